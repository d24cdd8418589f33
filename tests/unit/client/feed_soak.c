/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: the real client loses nothing over a long life of pauses, cut connections, restarts of the server and
 * changes of ranks: every sample once, byte for byte, and memory flat. Method: time is compressed, since the
 * client lives by the machine's clock: pauses of some ms stand for minutes, a hundred restarts for those of a
 * long run (hours on a simulated clock are in tests/unit/server/session/hour.c). A server in memory; the
 * seed, which is printed, makes what happens.
 */
#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/support/feed_world.h"

#define PHASES    7u
#define RANKS_MAX 4u
#define BATCHES   40u /* of a phase */

static const uint32_t worlds[PHASES] = {2, 2, 3, 1, 4, 3, 2};
static uint64_t rng_state;

static uint64_t rng(uint64_t below)
{
    return order_mix(rng_state += 0x9e3779b97f4a7c15ull) % below;
}

struct soak {
    struct feed_world w;
    struct larder_feed *feeds[RANKS_MAX];
    uint32_t *seen;
    uint8_t state[LARDER_STATE_BYTES];
    unsigned restarts;
};

static void rest(uint64_t ms)
{
    nanosleep(&(struct timespec){.tv_nsec = (long)ms * 1000000}, NULL);
}

static void trouble(struct soak *s)
{
    switch (rng(30)) {
    case 0:
    case 1: rest(rng(30)); break; /* the trainer pauses */
    case 2:
        shelf_down(s->w.shelf);
        rest(rng(20));
        shelf_up(s->w.shelf);
        s->restarts++;
        break;
    case 3: shelf_cut_every(s->w.shelf, 2000000 + rng(4000000)); break;
    default: break;
    }
}

static void take(struct soak *s, uint32_t rank)
{
    struct larder_batch *b;
    struct larder_error e = {0};
    if (larder_feed_next(s->feeds[rank], 60000, &b, &e) != 1)
        fail_msg("rank %u: %s", rank, e.text);
    for (size_t i = 0; i < larder_batch_samples(b); i++) {
        struct larder_sample sample;
        assert_int_equal(larder_batch_sample(b, i, &sample), 0);
        corpus_check(&s->w.corpus, &sample);
        s->seen[sample.position]++;
    }
    larder_batch_release(b);
}

static void phase(struct soak *s, unsigned number)
{
    uint32_t world = worlds[number];
    for (uint32_t r = 0; r < world; r++) {
        struct larder_feed_options o = world_options();
        o.rank = r;
        o.world = world;
        o.epochs = 1000;
        o.state = number ? s->state : NULL;
        o.state_bytes = number ? sizeof s->state : 0;
        s->feeds[r] = world_feed(&s->w, &o);
    }
    for (unsigned i = 0; i < BATCHES; i++) {
        for (uint32_t r = 0; r < world; r++)
            take(s, r);
        trouble(s);
    }
    assert_int_equal(larder_feed_state(s->feeds[rng(world)], s->state), LARDER_STATE_BYTES);
    for (uint32_t r = 0; r < world; r++)
        larder_feed_close(s->feeds[r]);
}

static void a_long_life_loses_nothing(void **state)
{
    (void)state;
    static struct soak s;
    const char *given = getenv("LARDER_TEST_SEED");
    rng_state = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    print_message("LARDER_TEST_SEED=%llu\n", (unsigned long long)rng_state);
    world_make(&s.w, 6, 30, 20000, 30000);
    uint64_t n = corpus_samples(&s.w.corpus), whole = n / 12 * 12, memory[PHASES];
    shelf_cut_every(s.w.shelf, 2000000);
    s.seen = calloc((PHASES * BATCHES / (whole / 12) + 2) * n, sizeof *s.seen);
    for (unsigned i = 0; i < PHASES; i++) {
        phase(&s, i);
        memory[i] = mallinfo2().uordblks;
    }
    uint64_t batches = PHASES * BATCHES;
    for (uint64_t i = 0; i < batches / (whole / 12) * n; i++) /* whole epochs, and then the begun one */
        assert_int_equal(s.seen[i], i % n < whole);
    uint64_t begun = batches / (whole / 12) * n, taken = batches % (whole / 12) * 12;
    for (uint64_t i = 0; i < n; i++)
        assert_int_equal(s.seen[begun + i], i < taken);
    print_message("%u restarts, %u cuts, memory %llu to %llu\n", s.restarts, shelf_cuts(s.w.shelf),
                  (unsigned long long)memory[1], (unsigned long long)memory[PHASES - 1]);
    assert_true(s.restarts + shelf_cuts(s.w.shelf) > 3);
    /* Both phases have two ranks; connections that the server has not yet seen end are a difference. */
    assert_true(memory[PHASES - 1] < memory[1] + (256 << 10));
    free(s.seen);
    world_end(&s.w);
}

/* Freed memory that threads keep for themselves would count as in use: this program runs without it. */
int main(int argc, char **argv)
{
    (void)argc;
    if (!getenv("GLIBC_TUNABLES") && setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0", 1) == 0)
        execv("/proc/self/exe", argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_long_life_loses_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
