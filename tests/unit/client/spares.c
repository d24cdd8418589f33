/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: memory for chunks goes round, is bounded where that is asked for, and all of it comes back. Method:
 * takes and gives in chosen orders, looking at addresses. That nothing leaks is the sanitizers' part.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "client/spares.h"

static struct spare take(struct spares *s, size_t n, bool few)
{
    struct spare x;
    assert_true(spares_take(s, n, few, &x));
    assert_true(x.room >= n);
    memset(x.p, 0x5a, n);
    return x;
}

static void last_given_is_first_taken(void **state)
{
    (void)state;
    struct spares s;
    spares_init(&s);
    struct spare a = take(&s, 1000, true), b = take(&s, 1000, true);
    uint8_t *pa = a.p, *pb = b.p;
    spares_give(&s, &a);
    spares_give(&s, &b);
    assert_null(a.p);
    struct spare c = take(&s, 1000, true), d = take(&s, 1000, true);
    assert_ptr_equal(c.p, pb);
    assert_ptr_equal(d.p, pa);
    spares_give(&s, &c);
    spares_give(&s, &d);
    spares_end(&s);
}

static void too_small_ones_stay(void **state)
{
    (void)state;
    struct spares s;
    spares_init(&s);
    struct spare small = take(&s, 1000, true), large = take(&s, 4u << 20, true);
    uint8_t *ps = small.p, *pl = large.p;
    spares_give(&s, &large);
    spares_give(&s, &small);
    struct spare x = take(&s, 3u << 20, true), y = take(&s, 10, true);
    assert_ptr_equal(x.p, pl);
    assert_ptr_equal(y.p, ps);
    spares_give(&s, &x);
    spares_give(&s, &y);
    spares_end(&s);
}

static void few_are_few_and_others_are_not(void **state)
{
    (void)state;
    struct spares s;
    struct spare all[SPARES_MAX + 3], none;
    spares_init(&s);
    for (unsigned i = 0; i < SPARES_MAX; i++)
        all[i] = take(&s, 1, true);
    assert_false(spares_take(&s, 1, true, &none));
    assert_null(none.p);
    for (unsigned i = SPARES_MAX; i < SPARES_MAX + 3; i++)
        all[i] = take(&s, 1, false);
    for (unsigned i = 0; i < SPARES_MAX + 3; i++)
        spares_give(&s, &all[i]);
    assert_int_equal(s.count, SPARES_MAX);
    all[0] = take(&s, 1, true);
    spares_give(&s, &all[0]);
    spares_end(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(last_given_is_first_taken),
        cmocka_unit_test(too_small_ones_stay),
        cmocka_unit_test(few_are_few_and_others_are_not),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
