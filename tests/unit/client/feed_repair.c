/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: damaged samples are left out or replaced as asked, by the same samples on any number of ranks, and
 * what was done is counted and listed; rows of stacked fields are those of their samples, also then. Method:
 * a server in memory on whose known shards reads of chosen bytes fail; what must stand in comes from
 * format/mix.h.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/mix.h"
#include "tests/support/feed_world.h"
#include "tests/support/tarball.h"

#define SHARDS 5u

static bool bad[SHARDS][64];

/* Every so many samples cannot be read. */
static uint64_t damage_every(struct feed_world *w, uint64_t step)
{
    uint64_t n = 0, damaged = 0;
    memset(bad, 0, sizeof bad);
    for (uint32_t i = 0; i < SHARDS; i++)
        for (uint64_t k = 0; k < w->corpus.counts[i]; k++)
            if (n++ % step == 0 && world_damage_sample(w, i, k))
                damaged += bad[i][k] = true;
    return damaged;
}

static struct mix *expected_of(const struct corpus *c)
{
    struct mix_source s = {
        .name = "corpus", .samples_per_shard = c->counts, .shards = c->shards, .weight = 1};
    struct mix *m = NULL;
    struct err e;
    assert_int_equal(mix_create(&s, 1, 99, 3, &m, &e), 0);
    return m;
}

/* What must come at a position: its sample, or the first good one that may stand in for it. */
static struct order_place good_at(struct mix *m, uint64_t position)
{
    struct mix_place p = mix_at(m, position);
    for (uint32_t k = 0; bad[p.at.shard][p.at.sample]; k++)
        assert_true(mix_substitute(m, position, k, &p));
    return p.at;
}

static uint64_t take_all(struct feed_world *w, struct larder_feed *f, struct mix *m, uint32_t *seen)
{
    struct larder_batch *b;
    struct larder_error e = {0};
    uint64_t n = 0;
    int rc;
    while ((rc = larder_feed_next(f, 20000, &b, &e)) == 1) {
        for (size_t i = 0; i < larder_batch_samples(b); i++, n++) {
            struct larder_sample s;
            assert_int_equal(larder_batch_sample(b, i, &s), 0);
            struct order_place p = good_at(m, s.position);
            assert_true(s.shard == p.shard && s.number == p.sample);
            corpus_check(&w->corpus, &s);
            seen[s.position]++;
        }
        larder_batch_release(b);
    }
    if (rc < 0)
        fail_msg("%s", e.text);
    return n;
}

static void substitutes_are_the_same_on_any_ranks(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, SHARDS, 20, 3000, 5000);
    struct mix *m = expected_of(&w.corpus);
    uint64_t n = corpus_samples(&w.corpus) / 12 * 12, damaged = damage_every(&w, 4), met = 0;
    assert_true(damaged > 10);
    for (uint64_t i = 0; i < n; i++) {
        struct order_place p = mix_at(m, i).at;
        met += bad[p.shard][p.sample];
    }
    for (uint32_t world = 1; world <= 4; world += 3) {
        uint32_t *seen = calloc(n, sizeof *seen);
        uint64_t substituted = 0;
        for (uint32_t r = 0; r < world; r++) {
            struct larder_feed_options o = world_options();
            o.damage = LARDER_DAMAGE_SUBSTITUTE;
            o.rank = r;
            o.world = world;
            struct larder_feed *f = world_feed(&w, &o);
            assert_int_equal(take_all(&w, f, m, seen), n / world);
            struct larder_feed_info info = LARDER_INIT(larder_feed_info);
            assert_int_equal(larder_feed_info(f, &info), 0);
            assert_int_equal(info.samples_out, n / world);
            assert_int_equal(info.skipped, 0);
            substituted += info.substituted;
            struct larder_feed_damage d;
            for (size_t i = 0; i < info.substituted; i++) { /* the list says what was done */
                assert_int_equal(larder_feed_damage(f, i, &d), 0);
                struct order_place was = mix_at(m, d.position).at, is = good_at(m, d.position);
                assert_string_equal(d.dataset, "corpus");
                assert_string_equal(d.shard, w.corpus.names[was.shard]);
                assert_string_equal(d.by_shard, w.corpus.names[is.shard]);
                assert_true(d.number == was.sample && d.by_number == is.sample && d.substituted == 1);
                assert_non_null(strstr(d.text, d.shard));
            }
            assert_int_equal(larder_feed_damage(f, info.substituted, &d), -ENOENT);
            larder_feed_close(f);
        }
        for (uint64_t i = 0; i < n; i++)
            assert_int_equal(seen[i], 1);
        assert_int_equal(substituted, met);
        free(seen);
    }
    mix_free(m);
    world_end(&w);
}

static void what_is_left_out_is_listed_up_to_a_bound(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, SHARDS, 25, 30, 5000);
    struct larder_feed_options o = world_options();
    uint64_t damaged = damage_every(&w, 1), n = corpus_samples(&w.corpus), listed = 0;
    assert_int_equal(damaged, n); /* all: every sample has a text */
    o.damage = LARDER_DAMAGE_SKIP;
    o.global_batch = 1;
    o.epochs = 1024 / n + 2;
    struct larder_feed *f = world_feed(&w, &o);
    struct larder_batch *b;
    int rc;
    while ((rc = larder_feed_next(f, 20000, &b, NULL)) == 1) {
        assert_int_equal(larder_batch_samples(b), 0);
        larder_batch_release(b);
    }
    assert_int_equal(rc, 0);
    struct larder_feed_info info = LARDER_INIT(larder_feed_info);
    struct larder_feed_damage d;
    assert_int_equal(larder_feed_info(f, &info), 0);
    assert_int_equal(info.skipped, n * o.epochs);
    for (; larder_feed_damage(f, listed, &d) == 0; listed++)
        assert_true(d.position == listed && d.substituted == 0);
    assert_int_equal(listed, 1024);
    larder_feed_close(f);
    world_end(&w);
}

static void nothing_stands_in_where_all_is_damaged(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, SHARDS, 10, 30, 5000);
    struct larder_feed_options o = world_options();
    struct larder_error e = {0};
    struct larder_batch *b;
    (void)damage_every(&w, 1);
    o.damage = LARDER_DAMAGE_SUBSTITUTE;
    struct larder_feed *f = world_feed(&w, &o);
    assert_int_equal(larder_feed_next(f, 20000, &b, &e), -EIO);
    assert_non_null(strstr(e.text, "no other sample of its window"));
    assert_non_null(strstr(e.text, "sample \"d"));
    larder_feed_close(f);
    world_end(&w);
}

/* ---- stacks: samples of one field of one size, and one that varies ---- */

#define ROW_BYTES 1000u

static void row_of(uint32_t shard, uint64_t number, uint8_t row[ROW_BYTES])
{
    for (unsigned i = 0; i < ROW_BYTES; i++)
        row[i] = (uint8_t)(shard * 50 + number * 7 + i);
}

static void stacked_world(struct feed_world *w)
{
    memset(w, 0, sizeof *w);
    corpus_make(&w->corpus, 5, SHARDS, 10, 10);
    for (uint32_t i = 0; i < SHARDS; i++) {
        buf_reset(&w->corpus.files[i]);
        for (uint64_t k = 0; k < w->corpus.counts[i]; k++) {
            uint8_t row[ROW_BYTES];
            char name[64];
            row_of(i, k, row);
            snprintf(name, sizeof name, "s%02u-%03u.img", i, (unsigned)k);
            tarball_file(&w->corpus.files[i], TARBALL_USTAR, name, row, sizeof row);
            snprintf(name, sizeof name, "s%02u-%03u.txt", i, (unsigned)k);
            tarball_file(&w->corpus.files[i], TARBALL_USTAR, name, "any length", 1 + k % 9);
        }
        tarball_end(&w->corpus.files[i]);
    }
    world_make_of(w, 5000);
}

/* Row i is sample i's, and lies where its field says. Returns the rows. */
static size_t check_stack(const struct larder_batch *b)
{
    const void *data;
    size_t bytes, rows;
    struct larder_error e = {0};
    if (larder_batch_stack(b, "img", &data, &bytes, &rows, &e) < 0)
        fail_msg("%s", e.text);
    assert_int_equal(rows, larder_batch_samples(b));
    assert_true(rows == 0 || (bytes == ROW_BYTES && (uintptr_t)data % 256 == 0));
    for (size_t i = 0; i < rows; i++) {
        struct larder_sample s;
        uint8_t row[ROW_BYTES];
        const uint8_t *at = (const uint8_t *)data + i * bytes;
        assert_int_equal(larder_batch_sample(b, i, &s), 0);
        row_of(s.shard, s.number, row);
        assert_memory_equal(at, row, bytes);
        assert_ptr_equal(larder_sample_field(&s, "img")->data, at);
        const struct larder_field *txt = larder_sample_field(&s, "txt");
        assert_true(txt->bytes == 1 + s.number % 9 && (uintptr_t)txt->data % 256 == 0);
        assert_memory_equal(txt->data, "any length", txt->bytes);
    }
    return rows;
}

static uint64_t check_stacks(struct feed_world *w, struct larder_feed_options o)
{
    uint64_t rows = 0;
    struct larder_feed *f = world_feed(w, &o);
    struct larder_batch *b;
    struct larder_error e = {0};
    int rc;
    while ((rc = larder_feed_next(f, 20000, &b, &e)) == 1) {
        rows += check_stack(b);
        larder_batch_release(b);
    }
    if (rc < 0)
        fail_msg("%s", e.text);
    larder_feed_close(f);
    return rows;
}

static void fields_of_one_size_stack(void **state)
{
    (void)state;
    struct feed_world w;
    stacked_world(&w);
    struct larder_feed_options o = world_options();
    o.contiguous = 1;
    uint64_t n = corpus_samples(&w.corpus) / 12 * 12, damaged = 0;
    assert_int_equal(check_stacks(&w, o), n);
    struct mix *m = expected_of(&w.corpus);
    (void)damage_every(&w, 5);
    for (uint64_t i = 0; i < n; i++) {
        struct order_place p = mix_at(m, i).at;
        damaged += bad[p.shard][p.sample];
    }
    o.damage = LARDER_DAMAGE_SKIP; /* the rows that stay move up */
    assert_int_equal(check_stacks(&w, o), n - damaged);
    o.damage = LARDER_DAMAGE_SUBSTITUTE;
    assert_int_equal(check_stacks(&w, o), n);
    mix_free(m);
    world_end(&w);
}

static void assert_no_stack(const struct larder_batch *b, const char *field, const char *word,
                            const char *other)
{
    const void *data;
    size_t bytes, rows;
    struct larder_error e = {0};
    assert_int_equal(larder_batch_stack(b, field, &data, &bytes, &rows, &e), -EINVAL);
    if (!strstr(e.text, word) || !strstr(e.text, other))
        fail_msg("%s", e.text);
}

static void what_cannot_be_stacked_names_the_sample(void **state)
{
    (void)state;
    struct feed_world w;
    stacked_world(&w);
    struct larder_feed_options o = world_options();
    struct larder_batch *b;
    for (int contiguous = 0; contiguous < 2; contiguous++) {
        o.contiguous = contiguous;
        struct larder_feed *f = world_feed(&w, &o);
        assert_int_equal(larder_feed_next(f, 20000, &b, NULL), 1);
        assert_no_stack(b, "txt", "sample", "bytes");
        assert_no_stack(b, "nothing", "sample", "no field \"nothing\"");
        if (contiguous)
            assert_int_equal(check_stack(b), 12);
        else
            assert_no_stack(b, "img", "contiguous", "");
        larder_batch_release(b);
        larder_feed_close(f);
    }
    world_end(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(substitutes_are_the_same_on_any_ranks),
        cmocka_unit_test(what_is_left_out_is_listed_up_to_a_bound),
        cmocka_unit_test(nothing_stands_in_where_all_is_damaged),
        cmocka_unit_test(fields_of_one_size_stack),
        cmocka_unit_test(what_cannot_be_stacked_names_the_sample),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
