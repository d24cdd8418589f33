/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: short transfers go on, and only the end of a file looks like the end of a file. Method: results of
 * attempts by hand. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "server/io/request.h"

static struct io_op read_of(size_t n, uint64_t offset)
{
    struct io_op op = {0};
    struct io_req *r = io_req(&op);
    r->code = IO_READ;
    r->n = n;
    r->offset = offset;
    return op;
}

static void an_attempt_that_falls_behind_is_not_the_end(void **state)
{
    (void)state;
    struct io_op op = read_of(4096, 8192);
    assert_false(io_settle(&op, 1564));
    assert_false(io_settle(&op, 600)); /* from the border again, and shorter */
    assert_true(io_settle(&op, 4096));
    assert_int_equal(op.result, 4096);
}

static void twice_the_same_is_the_end(void **state)
{
    (void)state;
    struct io_op op = read_of(8192, 0);
    assert_false(io_settle(&op, 5000));
    assert_true(io_settle(&op, 5000 - 4096)); /* from the border at 4096 */
    assert_int_equal(op.result, 5000);
}

static void falling_behind_has_a_bound(void **state)
{
    (void)state;
    struct io_op op = read_of(4096, 0);
    assert_false(io_settle(&op, 1564));
    int attempts = 1;
    while (!io_settle(&op, 1))
        assert_true(++attempts < 1000);
    assert_int_equal(op.result, -EIO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_attempt_that_falls_behind_is_not_the_end),
        cmocka_unit_test(twice_the_same_is_the_end),
        cmocka_unit_test(falling_behind_has_a_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
