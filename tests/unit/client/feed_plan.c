/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: whatever is killed, whenever, on however many ranks it goes on, the samples handed out are those of
 * the order, each once: no gap, no repeat (D9, D10, D11). And what cannot be fed is refused with the numbers.
 * Method: a dataset in memory (counts only), the planner, and states passed on as bytes; hundreds of random
 * histories of kills and resumes against the straight order. The seed is printed.
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

static struct feed_plan_options small_plan(const uint64_t *counts, uint32_t shards)
{
    return (struct feed_plan_options){.dataset = "d",
                                      .samples_per_shard = counts,
                                      .shards = shards,
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
    struct feed_plan_options o = small_plan(none, 2);
    assert_refused(o, ERR_INVALID, "no samples", "2 shards");
    o = small_plan(counts, 3);
    o.global_batch = 6;
    assert_refused(o, ERR_INVALID, "5 samples", "batch of 6");
    o.world = 4;
    assert_refused(o, ERR_INVALID, "6 samples", "4 ranks");
    o.global_batch = 0;
    assert_refused(o, ERR_INVALID, "0 samples", "batch");
    o = small_plan(counts, 3);
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
                           .window_shards = 8},
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

    for (size_t i = 0; i < sizeof bytes; i++) { /* no flipped bit passes */
        bytes[i] ^= 1;
        assert_true(feed_state_decode(bytes, sizeof bytes, &t, &e) < 0);
        bytes[i] ^= 1;
    }
    assert_true(feed_state_decode(bytes, sizeof bytes - 1, &t, &e) < 0);
    assert_non_null(strstr(e.text, "63"));
}

/* What a training job does with one rank after another: all ranks together take one global batch, then keep
 * the state as bytes. */
struct job {
    struct feed_plan_options o;
    const uint64_t *expected; /* packed places in the straight order, over all epochs */
    uint64_t samples;
    uint64_t epochs;
    uint64_t *first_of;  /* by place: counts how often it came, all epochs together */
    struct feed_state s; /* what a restart would start from */
};

static uint64_t pack(struct order_place p)
{
    return (uint64_t)p.shard << 32 | p.sample;
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

static void run_history(void)
{
    const uint32_t worlds[] = {1, 2, 3, 4, 6, 8, 12, 24};
    uint64_t counts[12];
    struct job j = {.epochs = 1 + rng(3)};
    uint32_t shards = 1 + (uint32_t)rng(12);
    do {
        j.samples = 0;
        for (uint32_t i = 0; i < shards; i++)
            j.samples += counts[i] = rng(4) ? rng(40) : 0;
    } while (j.samples < 24);
    j.o = small_plan(counts, shards);
    j.o.seed = rng(UINT64_MAX);
    j.o.window_shards = (uint32_t)rng(5);
    j.o.global_batch = 24;
    j.o.epochs = j.epochs;
    j.o.pad = rng(2);

    struct order *order;
    struct err e;
    uint64_t all = j.samples * j.epochs;
    assert_int_equal(order_create(counts, shards, j.o.seed, j.o.window_shards, &order, &e), 0);
    uint64_t *expected = calloc(all, sizeof *expected);
    for (uint64_t i = 0; i < all; i++)
        expected[i] = pack(order_at(order, i));
    j.expected = expected;
    j.first_of = calloc(all, sizeof *j.first_of);
    order_free(order);

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
    for (int i = 0; i < 400; i++)
        run_history();
}

static void the_end_of_an_epoch_is_the_start_of_the_next(void **state)
{
    (void)state;
    const uint64_t counts[2] = {5, 5};
    struct feed_plan_options o = small_plan(counts, 2);
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
        cmocka_unit_test(any_history_of_kills_gives_every_sample_once),
        cmocka_unit_test(the_end_of_an_epoch_is_the_start_of_the_next),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
