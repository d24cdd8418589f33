/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: regions never overlap, lie within the arena, are aligned, and all memory comes back, in whatever
 * order regions are given back. Method: random takes and gives against a map of the bytes; the seed is
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

#include "client/feed_arena.h"

#define UNITS 64u
#define HELD  24u

static struct feed_region *take(struct feed_arena *a, size_t bytes)
{
    struct feed_region *r = calloc(1, sizeof *r);
    if (feed_arena_take(a, bytes, r))
        return r;
    free(r);
    return NULL;
}

static void mark(bool *used, const struct feed_arena *a, const struct feed_region *r, bool to)
{
    size_t first = (size_t)(r->at - a->base) / FEED_ALIGN;
    for (size_t i = first; i < first + r->bytes / FEED_ALIGN; i++) {
        assert_true(i < UNITS);
        assert_true(used[i] != to);
        used[i] = to;
    }
}

static void random_takes_and_gives(void **state)
{
    (void)state;
    unsigned seed = (unsigned)time(NULL);
    print_message("seed %u\n", seed);
    struct feed_arena a;
    uint8_t *base = aligned_alloc(FEED_ALIGN, UNITS * FEED_ALIGN);
    struct feed_region *held[HELD] = {0};
    bool used[UNITS] = {0};
    unsigned taken = 0;
    feed_arena_init(&a, base, UNITS * FEED_ALIGN);
    for (int i = 0; i < 20000; i++) {
        unsigned k = (unsigned)rand_r(&seed) % HELD;
        if (held[k]) {
            mark(used, &a, held[k], false);
            feed_arena_give(&a, held[k]);
            held[k] = NULL;
        } else if ((held[k] = take(&a, (unsigned)rand_r(&seed) % (12 * FEED_ALIGN)))) {
            assert_int_equal((uintptr_t)held[k]->at % FEED_ALIGN, 0);
            mark(used, &a, held[k], true);
            taken++;
        }
    }
    assert_true(taken > 1000);
    for (unsigned k = 0; k < HELD; k++)
        if (held[k])
            feed_arena_give(&a, held[k]);
    struct feed_region *all = take(&a, UNITS * FEED_ALIGN); /* every byte came back */
    assert_non_null(all);
    assert_null(take(&a, 1));
    feed_arena_give(&a, all);
    assert_null(take(&a, UNITS * FEED_ALIGN + 1));
    feed_arena_reset(&a);
    free(base);
}

static void a_kept_region_holds_up_only_a_round(void **state)
{
    (void)state;
    struct feed_arena a;
    uint8_t *base = aligned_alloc(FEED_ALIGN, 4 * FEED_ALIGN);
    feed_arena_init(&a, base, 4 * FEED_ALIGN);
    struct feed_region *kept = take(&a, 1), *b = take(&a, 1), *c = take(&a, 2 * FEED_ALIGN);
    assert_true(kept && b && c);
    feed_arena_give(&a, b);
    feed_arena_give(&a, c);
    assert_null(take(&a, 1)); /* all behind the kept one */
    feed_arena_give(&a, kept);
    struct feed_region *whole = take(&a, 4 * FEED_ALIGN);
    assert_non_null(whole);
    feed_arena_give(&a, whole);
    free(base);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_takes_and_gives),
        cmocka_unit_test(a_kept_region_holds_up_only_a_round),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
