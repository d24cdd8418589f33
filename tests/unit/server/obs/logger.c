/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: a line of the log is one line, with its time, whatever the text holds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "server/obs/logger.h"

static void a_line_has_time_level_and_text(void **state)
{
    (void)state;
    char line[200];
    size_t n = logger_line(line, sizeof line, 1796083200042000000ull, LOG_WARN, "disk slow ms=7");
    assert_string_equal(line, "2026-12-01T00:00:00.042Z warn disk slow ms=7\n");
    assert_int_equal(n, strlen(line));
}

static void control_bytes_do_not_break_the_line(void **state)
{
    (void)state;
    char line[200];
    (void)logger_line(line, sizeof line, 0, LOG_INFO, "name=a\nfake line\x1b[2J\x7f");
    assert_string_equal(line, "1970-01-01T00:00:00.000Z info name=a?fake line?[2J?\n");
}

static void long_text_is_cut_and_still_ends_the_line(void **state)
{
    (void)state;
    char line[64], text[300];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = 0;
    size_t n = logger_line(line, sizeof line, 0, LOG_INFO, text);
    assert_int_equal(n, sizeof line - 1);
    assert_int_equal(line[n - 1], '\n');
    assert_int_equal(line[n], 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_line_has_time_level_and_text),
        cmocka_unit_test(control_bytes_do_not_break_the_line),
        cmocka_unit_test(long_text_is_cut_and_still_ends_the_line),
    };
    return cmocka_run_group_tests_name("logger", tests, NULL, NULL);
}
