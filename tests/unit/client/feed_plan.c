/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: whatever is killed, whenever, on however many ranks it goes on, the samples handed out are those of
 * the order, each once: no gap, no repeat (D9, D10, D11), also of mixes and chosen shards. And what cannot be
 * fed is refused with the numbers. Method: datasets in memory (counts only), the planner, and states passed
 * on as bytes; a thousand random histories of kills and resumes against the straight order. The seed is
 * printed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "client/feed_plan.h"

static uint64_t rng_state;

static uint64_t rng(uint64_t below)
{
    rng_state += 0x9e3779b97f4a7c15ull;
    uint64_t z = rng_state;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return (z ^ z >> 31) % below;
}

static struct feed_plan_options small_plan(struct mix_source *source, const uint64_t *counts, uint32_t shards)
{
    *source = (struct mix_source){.name = "d", .samples_per_shard = counts, .shards = shards, .weight = 1};
    return (struct feed_plan_options){.sources = source,
                                      .source_count = 1,
                                      .seed = 7,
                                      .window_shards = 2,
                                      .world = 1,
                                      .global_batch = 4,
                                      .epochs = 1};
}

static void assert_refused(struct feed_plan_options o, enum err_class class, const char *word,
                           const char *other)
{
    struct feed_plan p;
    struct err e = {0};
    assert_true(feed_plan_init(&p, &o, &e) < 0);
    assert_int_equal(e.class, class);
    assert_non_null(strstr(e.text, word));
    assert_non_null(strstr(e.text, other));
    feed_plan_free(&p);
}

static void refuses_what_cannot_be_fed(void **state)
{
    (void)state;
    const uint64_t counts[3] = {2, 0, 3}, none[2] = {0, 0};
    struct mix_source s, both[2];
    struct feed_plan_options o = small_plan(&s, none, 2);
    assert_refused(o, ERR_INVALID, "no samples", "2 shards");
    o = small_plan(&s, counts, 3);
    both[0] = both[1] = s;
    o.sources = both;
    o.source_count = 2;
    o.global_batch = 11;
    assert_refused(o, ERR_INVALID, "mix of 2 datasets has 10 samples", "batch of 11");
    o = small_plan(&s, counts, 3);
    o.global_batch = 6;
    assert_refused(o, ERR_INVALID, "5 samples", "batch of 6");
    o.world = 4;
    assert_refused(o, ERR_INVALID, "6 samples", "4 ranks");
    o.global_batch = 0;
    assert_refused(o, ERR_INVALID, "0 samples", "batch");
    o = small_plan(&s, counts, 3);
    o.rank = 1;
    assert_refused(o, ERR_INVALID, "rank 1 of 1", "does not exist");
}

static void state_round_trips_and_refuses_others(void **state)
{
    (void)state;
    struct feed_state s = {.dataset = 1,
                           .version = 3,
                           .seed = 42,
                           .epoch = 5,
                           .position = 6,
                           .window_shards = 8,
                           .choice = 9},
                      t;
    uint8_t bytes[FEED_STATE_BYTES];
    struct err e = {0};
    feed_state_encode(&s, bytes);
    assert_int_equal(feed_state_decode(bytes, sizeof bytes, &t, &e), 0);
    assert_int_equal(t.dataset, 1);
    assert_int_equal(t.version, 3);
    assert_int_equal(t.seed, 42);
    assert_int_equal(t.epoch, 5);
    assert_int_equal(t.position, 6);
    assert_int_equal(t.window_shards, 8);
    assert_int_equal(t.choice, 9);
    assert_int_equal(feed_state_check(&t, &s, "d", &e), 0);

    t.seed = 43;
    assert_true(feed_state_check(&t, &s, "d", &e) < 0);
    assert_int_equal(e.class, ERR_MISMATCH);
    assert_non_null(strstr(e.text, "seed 43"));
    t = s;
    t.version = 4;
    assert_true(feed_state_check(&t, &s, "d", &e) < 0);
    assert_non_null(strstr(e.text, "version 4"));
    t = s;
    t.dataset = 2;
    assert_true(feed_state_check(&t, &s, "d", &e) < 0);
    assert_non_null(strstr(e.text, "another dataset"));
    t = s;
    t.window_shards = 0;
    assert_true(feed_state_check(&t, &s, "d", &e) < 0);
    assert_non_null(strstr(e.text, "window"));
    t = s;
    t.choice = 0;
    assert_true(feed_state_check(&t, &s, "d", &e) < 0);
    assert_non_null(strstr(e.text, "choice of shards"));

    for (size_t i = 0; i < sizeof bytes; i++) { /* no flipped bit passes */
        bytes[i] ^= 1;
        assert_true(feed_state_decode(bytes, sizeof bytes, &t, &e) < 0);
        bytes[i] ^= 1;
    }
    assert_true(feed_state_decode(bytes, sizeof bytes - 1, &t, &e) < 0);
    assert_non_null(strstr(e.text, "63"));
}

/* A state of another mix is refused: other members, weights, choices, order of members, or versions. */
static void a_mix_is_bound_in_its_state(void **state)
{
    (void)state;
    const struct feed_member m[3] = {{1, 10, 5, 0}, {2, 20, 3, 7}, {3, 30, 1, 0}};
    struct feed_state s = feed_state_of(m, 3), t;
    struct err e = {0};
    assert_int_equal(feed_state_check(&s, &s, NULL, &e), 0);
    for (int k = 0; k < 6; k++) {
        struct feed_member other[3];
        uint32_t count = 3;
        memcpy(other, m, sizeof m);
        switch (k) {
        case 0: other[1].weight = 4; break;
        case 1: other[1].choice = 8; break;
        case 2: other[2].dataset = 4; break;
        case 3: other[0] = m[1], other[1] = m[0]; break;
        case 4: count = 2; break;
        default: other[2].version = 31;
        }
        t = feed_state_of(other, count);
        assert_true(feed_state_check(&t, &s, NULL, &e) < 0);
        assert_int_equal(e.class, ERR_MISMATCH);
        assert_non_null(strstr(e.text, k == 5 ? "other versions" : "another mix"));
    }
    t = feed_state_of(m, 1); /* one alone is that dataset */
    assert_true(t.dataset == 1 && t.version == 10 && t.choice == 0);
}

/* What a training job does with one rank after another: all ranks together take one global batch, then keep
 * the state as bytes. */
struct job {
    struct feed_plan_options o;
    const uint64_t *expected; /* packed places in the straight order, over all epochs */
    uint64_t samples;
    uint64_t epochs;
    uint64_t *first_of;  /* by position: counts how often it came */
    struct feed_state s; /* what a restart would start from */
};

static uint64_t pack(struct mix_place p)
{
    return (uint64_t)p.source << 48 | (uint64_t)p.at.shard << 32 | p.at.sample;
}

/* One incarnation on `world` ranks: takes `batches` global batches or until the end; returns what was taken.
 */
static uint64_t incarnation(struct job *j, uint32_t world, uint64_t batches, bool *ended)
{
    struct feed_plan *plans = calloc(world, sizeof *plans);
    struct err e = {0};
    uint8_t bytes[FEED_STATE_BYTES];
    feed_state_encode(&j->s, bytes);
    for (uint32_t r = 0; r < world; r++) {
        struct feed_plan_options o = j->o;
        struct feed_state s;
        o.world = world;
        o.rank = r;
        assert_int_equal(feed_plan_init(&plans[r], &o, &e), 0);
        assert_int_equal(feed_state_decode(bytes, sizeof bytes, &s, &e), 0);
        assert_int_equal(feed_plan_seek(&plans[r], s.epoch, s.position, &e), 0);
    }
    uint64_t taken = 0;
    *ended = false;
    for (uint64_t t = 0; t < batches && !*ended; t++) {
        struct feed_slice slice = {0};
        for (uint32_t r = 0; r < world; r++) {
            bool more = feed_plan_next(&plans[r], &slice);
            assert_true(r == 0 || more == !*ended); /* all ranks end at the same batch */
            *ended = !more;
            if (!more)
                continue;
            assert_int_equal(slice.count, j->o.global_batch / world);
            for (uint32_t i = 0; i < slice.count; i++) {
                struct feed_place p = feed_plan_place(&plans[r], &slice, i);
                assert_int_equal(pack(p.at), j->expected[p.position]);
                assert_int_equal(p.position / j->samples, slice.epoch);
                j->first_of[p.position]++;
                taken++;
            }
        }
        if (!*ended) {
            j->s.epoch = slice.next_epoch;
            j->s.position = slice.next_position;
        }
    }
    for (uint32_t r = 0; r < world; r++)
        feed_plan_free(&plans[r]);
    free(plans);
    return taken;
}

struct datasets {
    struct mix_source sources[4];
    uint64_t counts[4][12];
    bool chosen[4][12];
    uint32_t count;
};

/* One to four datasets, of which some shards may be chosen; returns the samples in those. */
static uint64_t random_datasets(struct datasets *d)
{
    uint64_t all = 0;
    d->count = 1 + (uint32_t)rng(4);
    for (uint32_t i = 0; i < d->count; i++) {
        uint32_t shards = 1 + (uint32_t)rng(12);
        bool filtered = rng(2);
        uint64_t samples = 0;
        while (samples < 24) {
            samples = 0;
            for (uint32_t k = 0; k < shards; k++) {
                d->counts[i][k] = rng(4) ? rng(40) : 0;
                d->chosen[i][k] = !filtered || rng(3);
                samples += d->chosen[i][k] ? d->counts[i][k] : 0;
            }
        }
        d->sources[i] = (struct mix_source){.name = "d",
                                            .samples_per_shard = d->counts[i],
                                            .chosen = filtered ? d->chosen[i] : NULL,
                                            .shards = shards,
                                            .weight = 1 + (uint32_t)rng(rng(2) ? 10 : UINT32_MAX)};
        all += samples;
    }
    return all;
}

static void run_history(void)
{
    const uint32_t worlds[] = {1, 2, 3, 4, 6, 8, 12, 24};
    struct datasets d;
    struct mix_source unused;
    struct job j = {.epochs = 1 + rng(3), .samples = random_datasets(&d)};
    j.o = small_plan(&unused, d.counts[0], 1);
    j.o.sources = d.sources;
    j.o.source_count = d.count;
    j.o.seed = rng(UINT64_MAX);
    j.o.window_shards = (uint32_t)rng(5);
    j.o.global_batch = 24;
    j.o.epochs = j.epochs;
    j.o.pad = rng(2);

    struct mix *mix;
    struct err e;
    uint64_t all = j.samples * j.epochs;
    assert_int_equal(mix_create(d.sources, d.count, j.o.seed, j.o.window_shards, &mix, &e), 0);
    uint64_t *expected = calloc(all, sizeof *expected);
    for (uint64_t i = 0; i < all; i++)
        expected[i] = pack(mix_at(mix, i));
    j.expected = expected;
    j.first_of = calloc(all, sizeof *j.first_of);
    mix_free(mix);

    bool ended = false;
    while (!ended)
        incarnation(&j, worlds[rng(sizeof worlds / sizeof worlds[0])], rng(4), &ended);

    /* Each epoch gave its first whole batches once; what is left over was dropped, or came once with the
     * epoch's first samples coming again to fill up. */
    uint64_t whole = j.samples / 24 * 24, left = j.samples - whole, filled = left ? 24 - left : 0;
    for (uint64_t i = 0; i < all; i++) {
        uint64_t within = i % j.samples, times = 1;
        if (within >= whole && !j.o.pad)
            times = 0;
        if (j.o.pad && within < filled)
            times = 2;
        assert_int_equal(j.first_of[i], times);
    }
    assert_int_equal(j.s.epoch, j.epochs);
    assert_int_equal(j.s.position, 0);
    free(expected);
    free(j.first_of);
}

static void any_history_of_kills_gives_every_sample_once(void **state)
{
    (void)state;
    const char *given = getenv("LARDER_TEST_SEED");
    rng_state = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    print_message("LARDER_TEST_SEED=%llu\n", (unsigned long long)rng_state);
    for (int i = 0; i < 1000; i++)
        run_history();
}

/* D9: fewer shards than ranks, shards of uneven sizes: samples are divided, so all ranks get as many batches,
 * known before the first one. */
static void few_uneven_shards_feed_many_ranks_alike(void **state)
{
    (void)state;
    const uint64_t counts[3] = {1000, 1, 30};
    struct mix_source source;
    for (int pad = 0; pad < 2; pad++) {
        for (uint32_t world = 1; world <= 16; world *= 2) {
            uint64_t batches = pad ? 65 : 64, seen = 0;
            for (uint32_t r = 0; r < world; r++) {
                struct feed_plan_options o = small_plan(&source, counts, 3);
                struct feed_plan p;
                struct feed_slice s;
                struct err e;
                o.rank = r;
                o.world = world;
                o.global_batch = 16;
                o.pad = pad;
                assert_int_equal(feed_plan_init(&p, &o, &e), 0);
                assert_int_equal(feed_plan_batches(&p), batches);
                uint64_t n = 0;
                for (; feed_plan_next(&p, &s); n++)
                    seen += s.count;
                assert_int_equal(n, batches);
                feed_plan_free(&p);
            }
            assert_int_equal(seen, batches * 16);
        }
    }
}

/* D10 */
static void the_end_of_an_epoch_is_the_start_of_the_next(void **state)
{
    (void)state;
    const uint64_t counts[2] = {5, 5};
    struct mix_source source;
    struct feed_plan_options o = small_plan(&source, counts, 2);
    struct feed_plan p, q;
    struct feed_slice a, b;
    struct err e;
    o.epochs = 3;
    assert_int_equal(feed_plan_init(&p, &o, &e), 0);
    assert_int_equal(feed_plan_init(&q, &o, &e), 0);
    assert_int_equal(feed_plan_batches(&p), 2);
    assert_true(feed_plan_next(&p, &a));
    assert_true(feed_plan_next(&p, &a)); /* the third would have 2 samples: dropped */
    assert_int_equal(a.next_epoch, 1);
    assert_int_equal(a.next_position, 0);
    /* Positions at the end, named in any of the ways a batch size could have left them. */
    for (uint64_t position = 7; position <= 10; position++) {
        assert_int_equal(feed_plan_seek(&q, 0, position, &e), 0);
        assert_int_equal(q.epoch, 1);
        assert_int_equal(q.position, 0);
    }
    assert_true(feed_plan_next(&p, &a));
    assert_true(feed_plan_next(&q, &b));
    for (uint32_t i = 0; i < a.count; i++)
        assert_int_equal(pack(feed_plan_place(&p, &a, i).at), pack(feed_plan_place(&q, &b, i).at));
    assert_true(feed_plan_seek(&q, 0, 11, &e) < 0);
    assert_int_equal(e.class, ERR_MISMATCH);
    feed_plan_free(&p);
    feed_plan_free(&q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_what_cannot_be_fed),
        cmocka_unit_test(state_round_trips_and_refuses_others),
        cmocka_unit_test(a_mix_is_bound_in_its_state),
        cmocka_unit_test(few_uneven_shards_feed_many_ranks_alike),
        cmocka_unit_test(any_history_of_kills_gives_every_sample_once),
        cmocka_unit_test(the_end_of_an_epoch_is_the_start_of_the_next),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
