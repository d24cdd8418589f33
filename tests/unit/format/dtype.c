/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: dtypes are tags with a width; packed ones fill whole bytes or are refused (case S9). Method: all of
 * them. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "format/dtype.h"

static void names_and_values_agree(void **state)
{
    (void)state;
    assert_false(dtype_known(0));
    assert_false(dtype_known(DTYPE_COUNT));
    for (unsigned i = 1; i < DTYPE_COUNT; i++) {
        enum dtype back = 0;
        assert_true(dtype_known(i));
        assert_int_equal(dtype_of_name(dtype_name(i), &back), 0);
        assert_int_equal(back, i);
        assert_int_equal(dtype_bits(i) * dtype_pack(i) % 8, 0);
    }
    enum dtype none;
    assert_int_equal(dtype_of_name("bf16", &none), -EINVAL);
    assert_string_equal(dtype_name(99), "unknown");
    /* What is stored must never move. */
    assert_int_equal(DTYPE_U8, 1);
    assert_int_equal(DTYPE_BF16, 10);
    assert_int_equal(DTYPE_F6_E3M2, 23);
}

static void packed_elements_fill_bytes_or_are_refused(void **state)
{
    (void)state;
    uint64_t n;
    struct err e;
    assert_int_equal(dtype_bytes(DTYPE_F4, 10, &n, &e), 0);
    assert_true(n == 5);
    assert_int_equal(dtype_bytes(DTYPE_F4, 11, &n, &e), -EINVAL);
    assert_non_null(strstr(e.text, "11 elements of F4"));
    assert_int_equal(dtype_bytes(DTYPE_F6_E2M3, 8, &n, &e), 0);
    assert_true(n == 6);
    assert_int_equal(dtype_bytes(DTYPE_F6_E3M2, 6, &n, &e), -EINVAL);
    assert_int_equal(dtype_bytes(DTYPE_C128, 3, &n, &e), 0);
    assert_true(n == 48);
    assert_int_equal(dtype_bytes(DTYPE_F64, 0, &n, &e), 0);
    assert_true(n == 0);
}

static void huge_counts_are_64_bit_and_overflow_is_refused(void **state)
{
    (void)state;
    uint64_t n;
    assert_int_equal(dtype_bytes(DTYPE_F32, 3ull << 40, &n, NULL), 0);
    assert_true(n == 12ull << 40);
    assert_int_equal(dtype_bytes(DTYPE_F4, UINT64_MAX - 1, &n, NULL), 0); /* half as many bytes */
    assert_true(n == UINT64_MAX / 2);
    assert_int_equal(dtype_bytes(DTYPE_F32, UINT64_MAX / 2, &n, NULL), -E2BIG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_and_values_agree),
        cmocka_unit_test(packed_elements_fill_bytes_or_are_refused),
        cmocka_unit_test(huge_counts_are_64_bit_and_overflow_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
