/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a feed of several datasets hands out what the mix names, goes on exactly on any number of ranks, and
 * reads no shard that was not chosen; what cannot be opened so is refused with a sentence. Method: a server
 * in memory that publishes known shards and keeps an import of them; expected orders from format/mix.h;
 * random kills and numbers of ranks. The seed is printed.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "format/mix.h"
#include "tests/support/feed_world.h"
#include "tests/support/folder.h"

static uint64_t rng_state;

static uint64_t rng(uint64_t below)
{
    return order_mix(rng_state += 0x9e3779b97f4a7c15ull) % below;
}

/* Even shards three times as often as odd ones, as two datasets. */
static void even_and_odd(struct larder_mix m[2])
{
    for (uint32_t i = 0; i < 2; i++) {
        m[i] = LARDER_INIT(larder_mix);
        m[i].dataset = "corpus";
        m[i].weight = i ? 1 : 3;
        m[i].slice = i;
        m[i].slices = 2;
    }
}

static struct mix *expected_of(const struct corpus *c)
{
    static bool chosen[2][64];
    struct mix_source s[2];
    struct mix *m = NULL;
    struct err e;
    for (uint32_t i = 0; i < 2; i++) {
        for (uint32_t k = 0; k < c->shards; k++)
            chosen[i][k] = k % 2 == i;
        s[i] = (struct mix_source){.name = "corpus",
                                   .samples_per_shard = c->counts,
                                   .chosen = chosen[i],
                                   .shards = c->shards,
                                   .weight = i ? 1 : 3};
    }
    assert_int_equal(mix_create(s, 2, 99, 3, &m, &e), 0);
    return m;
}

static struct larder_feed_options mixed(const struct larder_mix *m, unsigned count)
{
    struct larder_feed_options o = world_options();
    o.dataset = NULL;
    o.mix = m;
    o.mix_count = count;
    o.epochs = 2;
    return o;
}

static void take(struct feed_world *w, struct larder_feed *f, struct mix *expected, uint32_t *seen)
{
    struct larder_batch *b = NULL;
    struct larder_error e = {0};
    if (larder_feed_next(f, 20000, &b, &e) != 1)
        fail_msg("%s", e.text);
    for (size_t i = 0; i < larder_batch_samples(b); i++) {
        struct larder_sample s;
        assert_int_equal(larder_batch_sample(b, i, &s), 0);
        struct mix_place p = mix_at(expected, s.position);
        assert_true(s.dataset == p.source && s.shard == p.at.shard && s.number == p.at.sample);
        corpus_check(&w->corpus, &s);
        seen[s.position]++;
    }
    larder_batch_release(b);
}

/* Random kills and numbers of ranks: the union over ranks has every position once. */
static void a_mix_goes_on_on_any_ranks(void **state)
{
    (void)state;
    static const uint32_t worlds[] = {1, 2, 3, 4, 6, 12};
    const char *given = getenv("LARDER_TEST_SEED");
    rng_state = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    print_message("LARDER_TEST_SEED=%llu\n", (unsigned long long)rng_state);
    struct feed_world w;
    world_make(&w, 9, 16, 500, 5000);
    struct larder_mix m[2];
    even_and_odd(m);
    struct mix *expected = expected_of(&w.corpus);
    uint64_t n = corpus_samples(&w.corpus), batches = n / 12 * 2;
    assert_int_equal(mix_samples(expected), n);
    uint32_t *seen = calloc(2 * n, sizeof *seen);
    uint8_t at[64], next[64];
    for (uint64_t taken = 0; taken < batches;) {
        uint32_t world = worlds[rng(6)];
        uint64_t now = 1 + rng(4);
        now = now < batches - taken ? now : batches - taken;
        for (uint32_t r = 0; r < world; r++) {
            struct larder_feed_options o = mixed(m, 2);
            o.rank = r;
            o.world = world;
            o.connections = 1;
            o.state = taken ? at : NULL;
            o.state_bytes = taken ? sizeof at : 0;
            struct larder_feed *f = world_feed(&w, &o);
            for (uint64_t i = 0; i < now; i++)
                take(&w, f, expected, seen);
            assert_int_equal(larder_feed_state(f, next), 64);
            larder_feed_close(f);
        }
        memcpy(at, next, sizeof at);
        taken += now;
    }
    for (uint64_t i = 0; i < 2 * n; i++)
        assert_int_equal(seen[i], i % n < n / 12 * 12);
    mix_free(expected);
    free(seen);
    world_end(&w);
}

/* The state of a batch is where the feed goes on after it, whatever was taken meanwhile. */
static void batches_carry_their_state(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 4, 16, 500, 5000);
    struct larder_feed_options o = world_options();
    struct larder_feed *f = world_feed(&w, &o);
    struct larder_batch *b[2];
    struct larder_sample s, again;
    uint8_t at[64], now[64];
    assert_int_equal(larder_feed_next(f, 20000, &b[0], NULL), 1);
    assert_int_equal(larder_feed_state(f, now), 64);
    assert_int_equal(larder_feed_next(f, 20000, &b[1], NULL), 1);
    assert_int_equal(larder_batch_state(b[0], at), 64);
    assert_memory_equal(at, now, 64);
    assert_int_equal(larder_batch_sample(b[1], 0, &s), 0);
    o.state = at;
    o.state_bytes = 64;
    struct larder_feed *g = world_feed(&w, &o);
    struct larder_batch *c;
    assert_int_equal(larder_feed_next(g, 20000, &c, NULL), 1);
    assert_int_equal(larder_batch_sample(c, 0, &again), 0);
    assert_int_equal(again.position, 12);
    assert_string_equal(again.key, s.key);
    larder_batch_release(c);
    larder_feed_close(g);
    larder_batch_release(b[0]);
    larder_batch_release(b[1]);
    larder_feed_close(f);
    world_end(&w);
}

/* A shard that is not chosen is not looked at: here it is no tar at all, and its neighbours feed. */
static void only_chosen_shards_are_read(void **state)
{
    (void)state;
    struct feed_world w;
    memset(&w, 0, sizeof w);
    corpus_make(&w.corpus, 5, 12, 16, 500);
    memset(w.corpus.files[7].p, 'x', w.corpus.files[7].n);
    world_make_of(&w, 5000);
    struct larder_feed_options o = world_options();
    world_refuses(&w, o, LARDER_CORRUPT, "shard-007.tar");
    o.shards = "!*-007.tar";
    o.slice = 1;
    o.slices = 3; /* of 0..6, 8..11: 1 4 8 11 */
    o.global_batch = 1;
    struct larder_feed *f = world_feed(&w, &o);
    uint64_t had[12] = {0};
    struct larder_batch *b;
    int rc;
    while ((rc = larder_feed_next(f, 20000, &b, NULL)) == 1) {
        struct larder_sample s;
        assert_int_equal(larder_batch_sample(b, 0, &s), 0);
        corpus_check(&w.corpus, &s);
        had[s.shard]++;
        larder_batch_release(b);
    }
    assert_int_equal(rc, 0);
    for (uint32_t i = 0; i < 12; i++)
        assert_int_equal(had[i], i == 1 || i == 4 || i == 8 || i == 11 ? w.corpus.counts[i] : 0);
    larder_feed_close(f);
    world_end(&w);
}

static void import(struct feed_world *w, const char *name, char **paths)
{
    struct larder_import_options io = LARDER_INIT(larder_import_options);
    struct larder_error e = {0};
    io.dataset = name;
    io.files = (const char *const *)paths;
    io.format = LARDER_SHARD_AUTO;
    if (larder_dataset_import(w->client, &io, NULL, &e) < 0)
        fail_msg("%s", e.text);
}

/* Two imported datasets, the second with the shards the other way round, and a published folder in one
 * stream. */
static void imported_and_published_mix(void **state)
{
    (void)state;
    enum { SHARDS = 5 };
    struct feed_world w;
    char folder[256], *turned[SHARDS + 1] = {0};
    struct larder_error e = {0};
    world_make(&w, SHARDS, 12, 3000, 5000);
    folder_make(folder, sizeof folder);
    char **paths = corpus_write(&w.corpus, folder);
    for (int i = 0; i < SHARDS; i++)
        turned[i] = paths[SHARDS - 1 - i];
    import(&w, "set", paths);
    import(&w, "turned", turned);
    struct larder_mix m[3];
    static const char *const names[] = {"corpus", "set", "turned"};
    for (int i = 0; i < 3; i++) {
        m[i] = LARDER_INIT(larder_mix);
        m[i].dataset = names[i];
        m[i].weight = 1u << i;
    }
    struct larder_feed_options o = mixed(m, 3);
    struct larder_feed *f = world_feed(&w, &o);
    uint64_t had[3] = {0}, n = corpus_samples(&w.corpus);
    struct larder_batch *b;
    int rc;
    while ((rc = larder_feed_next(f, 20000, &b, &e)) == 1) {
        for (size_t i = 0; i < larder_batch_samples(b); i++) {
            struct larder_sample s;
            assert_int_equal(larder_batch_sample(b, i, &s), 0);
            if (s.dataset == 2)
                s.shard = SHARDS - 1 - s.shard;
            corpus_check(&w.corpus, &s);
            had[s.dataset]++;
        }
        larder_batch_release(b);
    }
    if (rc < 0)
        fail_msg("%s", e.text);
    uint64_t all = 2 * (3 * n / 12 * 12);
    assert_int_equal(had[0] + had[1] + had[2], all);
    for (int i = 0; i < 3; i++) /* epochs drop less than a batch each */
        assert_true(7 * had[i] + 7 * 24 > all << i && 7 * had[i] < (all << i) + 7 * 24);
    struct larder_feed_info info = LARDER_INIT(larder_feed_info);
    assert_int_equal(larder_feed_info(f, &info), 0);
    assert_true(info.samples == 3 * n && info.shards == 3 * SHARDS && info.version == 0);
    assert_true(info.bytes_in_flight == 0 && info.bytes_ready == 0 && info.batches_ready == 0);
    larder_feed_close(f);
    corpus_paths_free(paths);
    folder_remove(folder);
    world_end(&w);
}

static void refuses_what_is_no_mix(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 4, 16, 100, 5000);
    struct larder_mix m[2];
    uint8_t at[64];
    even_and_odd(m);
    struct larder_feed_options o = mixed(m, 2);
    struct larder_feed *f = world_feed(&w, &o);
    assert_int_equal(larder_feed_state(f, at), 64);
    larder_feed_close(f);

    o.dataset = "corpus";
    world_refuses(&w, o, LARDER_INVALID, "a mix is given");
    o = mixed(m, 65);
    world_refuses(&w, o, LARDER_LIMIT, "mix of 65");
    o = mixed(m, 2);
    o.global_batch = 12000;
    world_refuses(&w, o, LARDER_INVALID, "fewer than one global batch of 12000");
    o = mixed(m, 2);
    o.state = at;
    o.state_bytes = 64;
    m[1].weight = 2;
    world_refuses(&w, o, LARDER_MISMATCH, "another mix");
    m[1].weight = 1;
    m[1].slice = 0;
    world_refuses(&w, o, LARDER_MISMATCH, "another mix");
    o.state = NULL;
    o.state_bytes = 0;
    m[1].weight = 0;
    world_refuses(&w, o, LARDER_INVALID, "weight 0");
    m[1].weight = 1;
    m[1].shards = "nothing-*";
    world_refuses(&w, o, LARDER_INVALID, "none of its 4 shards is chosen");
    m[1].dataset = NULL;
    world_refuses(&w, o, LARDER_INVALID, "names no dataset");
    o = world_options();
    o.shards = "[";
    world_refuses(&w, o, LARDER_INVALID, "close it");
    o.shards = NULL;
    o.slice = 2;
    o.slices = 2;
    world_refuses(&w, o, LARDER_INVALID, "slice 2 of 2");
    o.slice = 1;
    f = world_feed(&w, &o);
    assert_int_equal(larder_feed_state(f, at), 64);
    larder_feed_close(f);
    o.state = at;
    o.state_bytes = 64;
    o.slice = 0;
    world_refuses(&w, o, LARDER_MISMATCH, "another choice of shards");
    world_end(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_mix_goes_on_on_any_ranks),  cmocka_unit_test(batches_carry_their_state),
        cmocka_unit_test(only_chosen_shards_are_read), cmocka_unit_test(imported_and_published_mix),
        cmocka_unit_test(refuses_what_is_no_mix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
