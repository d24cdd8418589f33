/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: slots of the staging pool are distinct, aligned, of the size asked for, and come back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpudirect/pool.h"

#define SLOT (64u << 10)

static void slots_are_distinct_and_reused(void **state)
{
    (void)state;
    struct pool *p = NULL;
    struct err e;
    assert_int_equal(pool_create(5 * SLOT + 17, SLOT, &p, &e), 0);
    assert_int_equal(pool_slots(p), 5); /* rounded down */
    assert_int_equal(pool_slot_bytes(p), SLOT);
    uint8_t *slot[5];
    for (int i = 0; i < 5; i++) {
        slot[i] = pool_take(p);
        assert_non_null(slot[i]);
        assert_int_equal((uintptr_t)slot[i] % 4096, 0);
        memset(slot[i], i, SLOT);
    }
    assert_null(pool_take(p));
    for (int i = 0; i < 5; i++)
        for (size_t at = 0; at < SLOT; at += 4095)
            assert_int_equal(slot[i][at], i);
    pool_give(p, slot[2]);
    assert_ptr_equal(pool_take(p), slot[2]);
    for (int i = 0; i < 5; i++)
        pool_give(p, slot[i]);
    assert_non_null(strstr(pool_note(p), pool_locked(p) ? "MiB locked" : "MiB not locked"));
    pool_destroy(p);
}

static void never_less_than_one_slot(void **state)
{
    (void)state;
    struct pool *p = NULL;
    assert_int_equal(pool_create(1, SLOT, &p, NULL), 0);
    assert_int_equal(pool_slots(p), 1);
    pool_destroy(p);
    assert_true(pool_create(UINT64_MAX, SLOT, &p, NULL) < 0);
    pool_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_are_distinct_and_reused),
        cmocka_unit_test(never_less_than_one_slot),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
