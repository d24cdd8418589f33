/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: columns lie where adding up the sizes before them says, for any mix of fixed and variable ones; sums
 * beyond 64 bits are refused. Method: every sample against a sum made here. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "format/columns.h"

#define SAMPLES 100u

static char name[] = "c", type[] = "t";

static uint32_t size_of(uint32_t sample, uint32_t i)
{
    return (sample * 13 + i * 5) % 31;
}

static void assert_mix(const uint64_t *bytes, uint32_t count, uint32_t unit, uint64_t head)
{
    struct column list[4];
    struct columns c;
    struct err e;
    for (uint32_t i = 0; i < count; i++)
        list[i] = (struct column){.name = name, .type = type, .bytes = bytes[i]};
    assert_int_equal(columns_init(&c, list, count, unit, head, 1000, &e), 0);
    for (uint32_t s = 0; s < SAMPLES && c.variable; s++) {
        uint32_t sizes[4], n = 0;
        for (uint32_t i = 0; i < count; i++)
            if (bytes[i] == COLUMN_VARIABLE)
                sizes[n++] = size_of(s, i);
        assert_int_equal(columns_add(&c, sizes, &e), 0);
    }
    if (c.variable == 0)
        assert_int_equal(columns_add_fixed(&c, SAMPLES, &e), 0);
    assert_int_equal(c.samples, SAMPLES);
    uint64_t at = 1000;
    for (uint32_t s = 0; s < SAMPLES; s++) {
        at += head;
        for (uint32_t i = 0; i < count; i++) {
            struct column_place p = columns_at(&c, s, i);
            uint64_t n = bytes[i] == COLUMN_VARIABLE ? (uint64_t)size_of(s, i) * unit : bytes[i];
            assert_int_equal(p.offset, at);
            assert_int_equal(p.bytes, n);
            at += n;
        }
    }
    assert_int_equal(c.end, at);
    columns_free(&c);
}

static void every_mix(void **state)
{
    (void)state;
    static const uint64_t kinds[] = {0, 3, COLUMN_VARIABLE};
    for (uint32_t mix = 0; mix < 81; mix++) {
        uint64_t bytes[4];
        for (uint32_t i = 0, rest = mix; i < 4; i++, rest /= 3)
            bytes[i] = kinds[rest % 3];
        assert_mix(bytes, 1 + mix % 4, 1 + mix % 3, mix % 9);
    }
}

static void sums_beyond_64_bits(void **state)
{
    (void)state;
    struct column list[2] = {{name, type, 1ull << 63}, {name, type, 1ull << 63}};
    uint32_t size = UINT32_MAX;
    struct columns c;
    struct err e;
    assert_int_equal(columns_init(&c, list, 2, 1, 0, 0, &e), -EBADMSG);
    assert_int_equal(columns_init(&c, list, 1, 1, 0, 0, &e), 0);
    assert_int_equal(columns_add_fixed(&c, 2, &e), -EBADMSG);
    columns_free(&c);
    list[1].bytes = COLUMN_VARIABLE;
    assert_int_equal(columns_init(&c, list, 2, 1, 0, 1ull << 63, &e), 0);
    assert_int_equal(columns_add(&c, &size, &e), -EBADMSG);
    columns_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_mix),
        cmocka_unit_test(sums_beyond_64_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
