/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: slots of the staging pool are distinct, aligned, of the size asked for, and come back; with a device
 * they are registered once, in pieces that no slot crosses, and unregistered before they are freed.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpudirect/pool.h"
#include "tests/support/standin.h"

#define SLOT (64u << 10)
#define MIB  (1u << 20)

static const struct standin *cuda;

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

static void a_row_of_slots_lies_together(void **state)
{
    (void)state;
    struct pool *p = NULL;
    uint8_t *slot[2];
    assert_int_equal(pool_create(6 * SLOT, SLOT, &p, NULL), 0);
    assert_null(pool_take_row(p, 7));
    uint8_t *all = pool_take_row(p, 6);
    assert_non_null(all);
    assert_null(pool_take(p));
    memset(all, 1, 6 * SLOT);
    for (int i = 0; i < 6; i++)
        if (i != 2)
            pool_give(p, all + i * SLOT); /* in any order, one by one */
    assert_null(pool_take_row(p, 4));     /* five are free, three of them together */
    assert_ptr_equal(pool_take_row(p, 3), all + 3 * SLOT);
    for (int i = 0; i < 2; i++)
        slot[i] = pool_take(p);
    assert_true(slot[0] != slot[1] && slot[0] < all + 2 * SLOT && slot[1] < all + 2 * SLOT);
    assert_null(pool_take(p));
    for (int i = 2; i < 6; i++)
        pool_give(p, all + i * SLOT);
    for (int i = 0; i < 2; i++)
        pool_give(p, slot[i]);
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

/* ---- with a device ---- */

static struct memory *device(const char *settings)
{
    struct memory *m = NULL;
    cuda->standin_reset();
    cuda->standin_configure(settings);
    assert_int_equal(memory_open(MEMORY_CUDA, 0, &m, NULL), 0);
    return m;
}

static struct standin_counts counts(void)
{
    struct standin_counts n;
    cuda->standin_counts(&n);
    return n;
}

static void registered_in_one_piece(void **state)
{
    struct memory *m = device("");
    struct pool *p = NULL;
    (void)state;
    assert_int_equal(pool_create(4 * SLOT, SLOT, &p, NULL), 0);
    assert_false(pool_registered(p));
    assert_int_equal(pool_register(p, m, NULL), 0);
    assert_int_equal(pool_register(p, m, NULL), 0); /* once */
    assert_true(pool_registered(p));
    assert_int_equal(counts().registrations, 1);
    assert_int_equal(counts().registered_bytes, 4 * SLOT);
    assert_non_null(strstr(pool_note(p), "registered with CUDA in 1 piece"));
    uint8_t *slot = pool_take(p);
    assert_int_equal(pool_run(p, slot, SLOT), SLOT);
    pool_give(p, slot);
    pool_destroy(p);
    assert_int_equal(counts().registrations, 0);
    memory_close(m);
    assert_int_equal(counts().lost_handles, 0);
}

/* Slots of 3 MiB in pieces of up to 16 MiB: five to a piece. */
static void no_slot_crosses_pieces(void **state)
{
    struct memory *m = device("register_max=20M");
    struct pool *p = NULL;
    uint8_t *slots[13];
    (void)state;
    assert_int_equal(pool_create(13 * 3 * MIB, 3 * MIB, &p, NULL), 0);
    assert_int_equal(pool_register(p, m, NULL), 0);
    assert_int_equal(counts().registrations, 3);
    assert_int_equal(counts().registered_bytes, 13 * 3 * MIB);
    assert_non_null(strstr(pool_note(p), "in 3 pieces"));
    for (int i = 0; i < 13; i++) {
        slots[i] = pool_take(p);
        assert_int_equal(pool_run(p, slots[i], 3 * MIB), 3 * MIB);
    }
    for (int i = 0; i < 13; i++)
        pool_give(p, slots[i]);
    pool_destroy(p);
    memory_close(m);
}

/* One slot of 40 MiB: copies of it go piece by piece. */
static void a_large_slot_is_copied_in_runs(void **state)
{
    struct memory *m = device("register_max=16M");
    struct memory_stream *s = NULL;
    struct pool *p = NULL;
    uint8_t *to = NULL;
    size_t n = 40 * MIB, runs = 0;
    (void)state;
    assert_int_equal(pool_create(n, n, &p, NULL), 0);
    assert_int_equal(pool_register(p, m, NULL), 0);
    assert_int_equal(memory_stream_create(m, &s, NULL), 0);
    assert_int_equal(memory_alloc(m, n, (void **)&to, NULL), 0);
    uint8_t *slot = pool_take(p);
    memset(slot, 0x5a, n);
    assert_int_equal(memory_copy(s, MEMORY_IN, to, slot, n, NULL), -EINVAL);
    for (size_t at = 0; at < n; runs++) {
        size_t run = pool_run(p, slot + at, n - at);
        assert_int_equal(memory_copy(s, MEMORY_IN, to + at, slot + at, run, NULL), 0);
        at += run;
    }
    assert_int_equal(runs, 3);
    assert_int_equal(memory_stream_wait(s, 20000, NULL), 0);
    assert_int_equal(counts().pageable_copies, 0);
    pool_give(p, slot);
    memory_free(m, to);
    memory_stream_destroy(s);
    pool_destroy(p);
    memory_close(m);
}

/* A pool that cannot be registered as a whole is not registered at all, and says why. */
static void refused_registration_is_told(void **state)
{
    struct memory *m = device("register_total=20M");
    struct pool *p = NULL;
    struct err e, again;
    (void)state;
    assert_int_equal(pool_create(32 * MIB, 4 * MIB, &p, NULL), 0);
    assert_int_equal(pool_register(p, m, &e), -ENOMEM);
    assert_int_equal(e.class, ERR_NO_MEMORY);
    assert_non_null(strstr(e.text, "staging memory of 32 MiB: registering 16777216 bytes"));
    assert_false(pool_registered(p));
    assert_int_equal(counts().registrations, 0);
    assert_non_null(strstr(pool_note(p), "not registered with CUDA: "));
    assert_int_equal(pool_register(p, m, &again), -ENOMEM); /* it does not try again */
    assert_string_equal(again.text, e.text);
    uint8_t *slot = pool_take(p); /* it goes on as plain memory */
    memset(slot, 1, 4 * MIB);
    pool_give(p, slot);
    pool_destroy(p);
    memory_close(m);
}

static void a_lost_device_registers_nothing(void **state)
{
    struct memory *m = device("fail=cuMemHostRegister_v2:1:719");
    struct pool *p = NULL;
    struct err e;
    (void)state;
    assert_int_equal(pool_create(32 * MIB, 4 * MIB, &p, NULL), 0);
    assert_int_equal(pool_register(p, m, &e), -ENODEV);
    assert_int_equal(counts().registrations, 0);
    pool_destroy(p);
    memory_close(m);
}

static void host_memory_registers_nothing(void **state)
{
    struct memory *m = NULL;
    struct pool *p = NULL;
    (void)state;
    assert_int_equal(memory_open(MEMORY_HOST, 0, &m, NULL), 0);
    assert_int_equal(pool_create(SLOT, SLOT, &p, NULL), 0);
    assert_int_equal(pool_register(p, m, NULL), 0);
    assert_false(pool_registered(p));
    pool_destroy(p);
    memory_close(m);
}

/* Node 0 is there on every machine; where the kernel lets pages be moved, the note tells. */
static void a_pool_moves_near_its_device(void **state)
{
    struct memory *m = device("numa=0");
    struct pool *p = NULL;
    (void)state;
    assert_int_equal(memory_info(m)->numa_node, 0);
    assert_int_equal(pool_create(SLOT, SLOT, &p, NULL), 0);
    uint8_t *slot = pool_take(p);
    memset(slot, 7, SLOT);
    assert_int_equal(pool_register(p, m, NULL), 0);
    assert_int_equal(slot[SLOT - 1], 7);
    if (!strstr(pool_note(p), " near NUMA node 0"))
        print_message("pages cannot be moved here\n");
    pool_give(p, slot);
    pool_destroy(p);
    memory_close(m);
    m = device("numa=4000"); /* more than any kernel has: not moved */
    assert_int_equal(pool_create(SLOT, SLOT, &p, NULL), 0);
    assert_int_equal(pool_register(p, m, NULL), 0);
    assert_null(strstr(pool_note(p), "NUMA"));
    pool_destroy(p);
    memory_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_are_distinct_and_reused), cmocka_unit_test(a_row_of_slots_lies_together),
        cmocka_unit_test(never_less_than_one_slot),      cmocka_unit_test(registered_in_one_piece),
        cmocka_unit_test(no_slot_crosses_pieces),        cmocka_unit_test(a_large_slot_is_copied_in_runs),
        cmocka_unit_test(refused_registration_is_told),  cmocka_unit_test(a_lost_device_registers_nothing),
        cmocka_unit_test(host_memory_registers_nothing), cmocka_unit_test(a_pool_moves_near_its_device),
    };
    cuda = standin_load("memory=64M");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
