/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: numbers, sizes and times that people type are read exactly or refused, and those that are shown are
 * right at their borders. Method: tables of texts and values.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "tools/ui.h" /* before cmocka.h, which has a macro fail() */

#include <cmocka.h>

#define GIB (1ull << 30)

static void test_sizes_read(void **state)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {{"0", 0},
                {"4096", 4096},
                {"1K", 1024},
                {"1k", 1024},
                {"512M", 512ull << 20},
                {"1.5GiB", 3 * GIB / 2},
                {"2 TiB", 2ull << 40},
                {"3B", 3},
                {"18446744073709551615", UINT64_MAX},
                {"9007199254740993", 9007199254740993}}; /* not a double */
    static const char *const bad[] = {
        "",      "x",   "-1",  "1X", "1KK", "0x10",      "1.2.3M", "99999999999999999999",
        "1e3zz", "inf", "NaN", " 1", "1G ", "20000000P", "M"};
    uint64_t v;
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        assert_true(parse_size(good[i].text, &v));
        assert_int_equal(v, good[i].bytes);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        if (parse_size(bad[i], &v))
            fail_msg("\"%s\" was read as %llu bytes", bad[i], (unsigned long long)v);
}

static void test_times_read(void **state)
{
    uint64_t v;
    (void)state;
    assert_true(parse_time("90", &v) && v == 90);
    assert_true(parse_time("30m", &v) && v == 1800);
    assert_true(parse_time("1.5h", &v) && v == 5400);
    assert_true(parse_time("7d", &v) && v == 604800);
    assert_true(parse_time("2w", &v) && v == 1209600);
    assert_false(parse_time("7y", &v));
    assert_false(parse_time("", &v));
    assert_false(parse_time("-3h", &v));
    assert_false(parse_time("3 h", &v));
}

static void test_numbers_read(void **state)
{
    uint64_t v;
    (void)state;
    assert_true(parse_number("18446744073709551615", &v) && v == UINT64_MAX);
    assert_false(parse_number("18446744073709551616", &v));
    assert_false(parse_number("+1", &v));
    assert_false(parse_number("1 ", &v));
    assert_false(parse_number("", &v));
}

static void test_shown(void **state)
{
    static const uint64_t shape[16] = {1000000, 1000000, 1000000, 1000000, 1000000, 1000000, 1000000,
                                       1000000, 1000000, 1000000, 1000000, 1000000, 1000000, 1000000};
    const uint64_t s = 1000000000;
    (void)state;
    assert_string_equal(size_text(0).s, "0 B");
    assert_string_equal(size_text(1023).s, "1023 B");
    assert_string_equal(size_text(1024).s, "1.0 KiB");
    assert_string_equal(size_text(GIB - 1).s, "1.0 GiB"); /* never "1024.0 MiB" */
    assert_string_equal(size_text(UINT64_MAX).s, "16.0 EiB");
    assert_string_equal(age_text(100 * s, 0).s, "-");
    assert_string_equal(age_text(100 * s, 101 * s).s, "0 s ago");
    assert_string_equal(age_text(10000 * s, 9881 * s).s, "119 s ago");
    assert_string_equal(age_text(20000 * s, 9000 * s).s, "3 h ago");
    assert_string_equal(age_text(400000 * s, 100000 * s).s, "3 d ago");
    assert_string_equal(time_text(0).s, "1970-01-01T00:00:00Z");
    assert_string_equal(shape_text(0, shape).s, "[]");
    assert_string_equal(shape_text(2, (const uint64_t[]){64, 192}).s, "[64, 192]");
    assert_string_equal(shape_text(14, shape).s + strlen(shape_text(14, shape).s) - 4, "...]");
    assert_string_equal(name_text("a\x1b[31m\xff").s, "a\\x1b[31m\\xff");
}

/* One exit code for every class that the library or the server may name. */
static void test_classes_have_a_status(void **state)
{
    (void)state;
    assert_int_equal(status_of_class(LARDER_OK), STATUS_OK);
    for (int class = LARDER_INVALID; class <= LARDER_UNSUPPORTED; class ++)
        assert_in_range(status_of_class(class), STATUS_USAGE, STATUS_OTHER);
    assert_int_equal(status_of_class(LARDER_WRONG_KEY), STATUS_KEY);
    assert_int_equal(status_of_class(LARDER_CORRUPT), STATUS_CORRUPT);
    assert_int_equal(status_of_class(LARDER_FENCED), STATUS_CONFLICT);
    assert_int_equal(status_of_class(LARDER_QUOTA), STATUS_SPACE);
    assert_int_equal(status_of_class(9999), STATUS_OTHER);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes_read),
        cmocka_unit_test(test_times_read),
        cmocka_unit_test(test_numbers_read),
        cmocka_unit_test(test_shown),
        cmocka_unit_test(test_classes_have_a_status),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
