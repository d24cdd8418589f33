/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: a copy past the caches gives the same bytes as memcpy, at any length and alignment, and writes
 * nothing beside them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/stream.h"

#define MOST (200u << 10)

static void test_any_length_and_alignment(void **state)
{
    (void)state;
    static const size_t lengths[] = {0,     1,     63,    65535, 65536,        65537,
                                     65663, 81919, 81920, 98304, (128u << 10), MOST};
    uint8_t *from = malloc(MOST + 64), *to = malloc(MOST + 192);
    assert_non_null(from);
    assert_non_null(to);
    for (size_t i = 0; i < MOST + 64; i++)
        from[i] = (uint8_t)(i * 2654435761u >> 13);
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
        for (size_t a = 0; a < 64; a += 21) {
            uint8_t *out = to + 64 + a;
            size_t n = lengths[l];
            memset(to, 0xa5, MOST + 192);
            stream_copy(out, from + 63 - a, n);
            assert_memory_equal(out, from + 63 - a, n);
            assert_int_equal(out[-1], 0xa5);
            assert_int_equal(out[n], 0xa5);
        }
    free(from);
    free(to);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_any_length_and_alignment)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
