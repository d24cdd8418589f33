/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: buffers never overlap, all memory comes back, what was given back last is used again first, and who
 * finds no room gets memory all the same. Method: random takes and gives, each buffer filled with its own
 * byte; the seed is printed.
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

#include "client/feed_buffers.h"

#define HELD 24u
#define MIB  (1u << 20)

static void random_takes_and_gives(void **state)
{
    (void)state;
    struct feed_buffers b;
    struct {
        uint8_t *p, fill;
        size_t n;
    } held[HELD] = {0};
    unsigned seed = (unsigned)time(NULL);
    printf("seed %u\n", seed);
    srand(seed);
    assert_int_equal(feed_buffers_init(&b, 9 * MIB), 0); /* less than may be held */
    for (unsigned step = 0; step < 20000; step++) {
        unsigned i = (unsigned)rand() % HELD;
        for (size_t k = 0; held[i].p && k < held[i].n; k += held[i].n / 7 + 1)
            assert_int_equal(held[i].p[k], held[i].fill);
        if (held[i].p)
            assert_int_equal(held[i].p[held[i].n - 1], held[i].fill);
        feed_buffer_give(&b, held[i].p, held[i].n);
        held[i].n = 1 + (size_t)rand() % (rand() % 8 ? MIB : 5 * MIB);
        held[i].fill = (uint8_t)step;
        held[i].p = feed_buffer_take(&b, held[i].n);
        assert_non_null(held[i].p);
        for (size_t k = 0; k < held[i].n; k += held[i].n / 7 + 1)
            held[i].p[k] = held[i].fill;
        held[i].p[held[i].n - 1] = held[i].fill;
    }
    for (unsigned i = 0; i < HELD; i++)
        feed_buffer_give(&b, held[i].p, held[i].n);
    feed_buffers_free(&b); /* checks that all came back */
}

static void the_last_given_back_is_the_next_taken(void **state)
{
    (void)state;
    struct feed_buffers b;
    assert_int_equal(feed_buffers_init(&b, 8 * MIB), 0);
    uint8_t *first = feed_buffer_take(&b, MIB), *second = feed_buffer_take(&b, MIB), *whole[2];
    assert_ptr_equal(second, first + MIB);
    feed_buffer_give(&b, first, MIB);
    assert_ptr_equal(feed_buffer_take(&b, MIB), first);
    feed_buffer_give(&b, first, MIB);
    feed_buffer_give(&b, second, MIB);
    for (int i = 0; i < 2; i++)
        assert_ptr_equal(whole[i] = feed_buffer_take(&b, 4 * MIB), first + (size_t)i * 4 * MIB);
    uint8_t *beyond = feed_buffer_take(&b, 4 * MIB + 4096), *small = feed_buffer_take(&b, 100);
    memset(beyond, 1, 4 * MIB + 4096);
    memset(small, 1, 100);
    feed_buffer_give(&b, beyond, 4 * MIB + 4096);
    feed_buffer_give(&b, small, 100);
    for (int i = 0; i < 2; i++)
        feed_buffer_give(&b, whole[i], 4 * MIB);
    assert_int_equal(feed_buffer_cost(100), 100);
    assert_int_equal(feed_buffer_cost(65537), 131072);
    feed_buffers_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_takes_and_gives),
        cmocka_unit_test(the_last_given_back_is_the_next_taken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
