/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: every variant of the planes' inner loops that this machine can run writes and reads the same bytes as
 * the portable one. Method: all lengths 0..300 and some larger, all widths, all k, skewed and uniform bytes;
 * buffers end where the promise ends (run it under ASan). */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/codec_tiers.h"

static uint64_t seed = 0x9e3779b97f4a7c15ull;

static uint64_t next(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

static size_t length_at(size_t i)
{
    return i <= 300 ? i : i * 37 + next() % 64;
}

static void split_and_merge_agree(void **state)
{
    (void)state;
    static const unsigned widths[] = {1, 2, 4, 8};
    for (unsigned v = 1; tiers_ops_at(v); v++) {
        const struct tiers_ops *ops = tiers_ops_at(v);
        for (size_t round = 0; round < 320 * 8; round++) {
            unsigned width = widths[round % 4];
            bool rotate = round / 4 % 2;
            size_t n = length_at(round / 8);
            uint8_t *in = malloc(n * width + 1), *back = malloc(n * width + 1);
            uint8_t *want[PLANES_MAX] = {0}, *got[PLANES_MAX] = {0};
            for (size_t i = 0; i < n * width; i++)
                in[i] = (uint8_t)next();
            for (unsigned p = 0; p < width; p++) {
                want[p] = malloc(n + 1);
                got[p] = malloc(n + 1);
            }
            tiers_portable.split(in, n, width, rotate, want);
            ops->split(in, n, width, rotate, got);
            for (unsigned p = 0; p < width; p++)
                assert_memory_equal(want[p], got[p], n);
            ops->merge((const uint8_t *const *)got, n, width, rotate, back);
            assert_memory_equal(in, back, n * width);
            for (unsigned p = 0; p < width; p++) {
                free(want[p]);
                free(got[p]);
            }
            free(in);
            free(back);
        }
    }
}

/* Bytes near base mostly, so that codes of every kind occur. */
static uint8_t value_near(uint8_t base, unsigned k)
{
    uint64_t r = next();
    return r % 4 == 0 ? (uint8_t)(r >> 8) : (uint8_t)(base + (r >> 8) % (1u << k));
}

static void tiers_agree(void **state)
{
    (void)state;
    for (unsigned v = 1; tiers_ops_at(v); v++) {
        const struct tiers_ops *ops = tiers_ops_at(v);
        for (size_t round = 0; round < 320 * TIER_BITS_MAX; round++) {
            unsigned k = (unsigned)(round % TIER_BITS_MAX) + 1;
            size_t n = length_at(round / TIER_BITS_MAX), bytes = tier_mask_bytes(n, k);
            uint8_t base = (uint8_t)next();
            uint8_t *in = malloc(n + 1), *back = malloc(n + TIERS_SLACK);
            uint8_t *want = malloc(bytes + 1), *got = malloc(bytes + 1);
            uint8_t *want_away = calloc(1, n + TIERS_SLACK), *got_away = calloc(1, n + TIERS_SLACK);
            for (size_t i = 0; i < n; i++)
                in[i] = value_near(base, k);
            size_t count = tiers_portable.encode(in, n, k, base, want, want_away);
            assert_int_equal(ops->encode(in, n, k, base, got, got_away), count);
            assert_memory_equal(want, got, bytes);
            assert_memory_equal(want_away, got_away, count);
            if (n > 0)
                assert_int_equal(ops->count(got, n, k), count);
            ops->decode(got, n, k, base, got_away, back);
            assert_memory_equal(in, back, n);
            if (n % 64 != 0) { /* a bit without a byte is noticed */
                got[bytes - 1] |= 0x80;
                assert_true(ops->count(got, n, k) == TIERS_DEAD);
                assert_true(tiers_portable.count(got, n, k) == TIERS_DEAD);
            }
            free(in);
            free(back);
            free(want);
            free(got);
            free(want_away);
            free(got_away);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(split_and_merge_agree),
                                       cmocka_unit_test(tiers_agree)};
    for (unsigned v = 0; tiers_ops_at(v); v++)
        print_message("# variant %u: %s\n", v, tiers_ops_at(v)->name);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
