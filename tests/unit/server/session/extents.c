/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: bytes that several want are read once, nobody is served what was not read well, and who holds memory
 * for long takes none from the others.
 * Method: loops of the simulator, and the test plays the disk.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/obs/metrics.h"
#include "server/session/extents.h"
#include "tests/support/rig.h"

#define MIB (1u << 20)

struct fixture {
    struct rig rig;
    struct extents *x;
};

struct reader {
    struct extent_wait wait;
    unsigned told;
};

static void told(struct extent_wait *w)
{
    container_of(w, struct reader, wait)->told++;
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    rig_open(&f->rig, RIG_SIM, 1);
    assert_int_equal(extents_create(4 * MIB, &f->x), 0);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    rig_settle(&f->rig);
    extents_destroy(f->x);
    rig_close(&f->rig);
    free(f);
    return 0;
}

static struct extent_want want_of(uint8_t object, uint64_t begin, uint64_t end)
{
    return (struct extent_want){.key.bytes = {object}, .begin = begin, .end = end, .unsure_bytes = 8 * MIB};
}

static int get(struct fixture *f, struct reader *r, const struct extent_want *want)
{
    *r = (struct reader){.wait = {.told = told, .loop = f->rig.loop}};
    int rc = extent_get(f->x, want, &r->wait);
    assert_non_null(r->wait.extent);
    return rc;
}

static void deliver(struct fixture *f, struct reader *r, uint8_t fill, uint64_t now_ms)
{
    memset(r->wait.extent->memory, fill, r->wait.extent->room);
    extent_read(f->x, r->wait.extent, r->wait.extent->room, now_ms);
}

static void put(struct fixture *f, struct reader *r)
{
    extent_put(f->x, r->wait.extent);
    r->wait.extent = NULL;
}

static void those_who_come_meanwhile_wait(void **state)
{
    struct fixture *f = *state;
    struct reader first, others[3], later;
    struct extent_want want = want_of(1, 5 * MIB, 6 * MIB), part = want_of(1, 5 * MIB + 9000, 5 * MIB + 9001);
    int64_t read = metric_get(METRIC_disk_read_bytes), joined = metric_get(METRIC_joined_read_bytes),
            cached = metric_get(METRIC_cached_read_bytes);
    assert_int_equal(get(f, &first, &want), 1);
    for (int i = 0; i < 3; i++)
        assert_int_equal(get(f, &others[i], i == 2 ? &part : &want), 0);
    rig_settle(&f->rig);
    assert_int_equal(others[0].told, 0);
    deliver(f, &first, 7, 0);
    rig_settle(&f->rig);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(others[i].told, 1);
        assert_ptr_equal(others[i].wait.extent, first.wait.extent);
    }
    put(f, &first);
    for (int i = 0; i < 3; i++)
        put(f, &others[i]);
    want.now_ms = EXTENT_KEPT_MS - 1;
    assert_int_equal(get(f, &later, &want), 0);
    rig_settle(&f->rig);
    assert_int_equal(later.told, 1);
    assert_int_equal(later.wait.extent->bytes, MIB);
    assert_int_equal(later.wait.extent->memory[MIB - 1], 7);
    put(f, &later);
    assert_int_equal(metric_get(METRIC_disk_read_bytes) - read, MIB);
    assert_int_equal(metric_get(METRIC_joined_read_bytes) - joined, 2 * MIB + 1);
    assert_int_equal(metric_get(METRIC_cached_read_bytes) - cached, MIB);
}

static void what_is_old_or_not_to_be_kept_is_read_again(void **state)
{
    struct fixture *f = *state;
    struct reader r;
    struct extent_want want = want_of(1, 0, MIB), passing = want_of(2, 0, MIB);
    assert_int_equal(get(f, &r, &want), 1);
    deliver(f, &r, 1, 0);
    put(f, &r);
    want.now_ms = EXTENT_KEPT_MS;
    assert_int_equal(get(f, &r, &want), 1);
    deliver(f, &r, 2, want.now_ms);
    put(f, &r);
    passing.unsure_bytes = 0;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(get(f, &r, &passing), 1);
        deliver(f, &r, 3, 0);
        put(f, &r);
    }
}

static void another_object_is_another_matter(void **state)
{
    struct fixture *f = *state;
    struct reader a, b;
    struct extent_want one = want_of(1, 0, 4096), other = want_of(2, 0, 4096);
    assert_int_equal(get(f, &a, &one), 1);
    assert_int_equal(get(f, &b, &other), 1);
    deliver(f, &a, 1, 0);
    deliver(f, &b, 2, 0);
    put(f, &a);
    put(f, &b);
}

/* Each byte once, however the requests are cut. */
static void only_what_is_lacking_is_read(void **state)
{
    struct fixture *f = *state;
    struct reader head, middle, rest;
    struct extent_want m = want_of(1, 300000, 500000), all = want_of(1, 0, MIB);
    assert_int_equal(get(f, &middle, &m), 1);
    assert_int_equal(middle.wait.extent->begin, 73 * 4096);
    assert_int_equal(middle.wait.extent->begin + middle.wait.extent->room, 123 * 4096);
    assert_int_equal(get(f, &head, &all), 1);
    assert_int_equal(head.wait.extent->begin, 0);
    assert_int_equal(head.wait.extent->room, 73 * 4096);
    all.begin = 123 * 4096 - 1; /* its last byte is in the middle one */
    assert_int_equal(get(f, &rest, &all), 0);
    deliver(f, &middle, 1, 0);
    rig_settle(&f->rig);
    assert_int_equal(rest.told, 1);
    assert_ptr_equal(rest.wait.extent, middle.wait.extent);
    put(f, &rest);
    all.begin = 123 * 4096;
    assert_int_equal(get(f, &rest, &all), 1);
    assert_int_equal(rest.wait.extent->begin, 123 * 4096);
    deliver(f, &head, 2, 0);
    deliver(f, &rest, 3, 0);
    put(f, &head);
    put(f, &middle);
    put(f, &rest);
}

static void a_failure_is_told_to_all_and_not_kept(void **state)
{
    struct fixture *f = *state;
    struct reader first, other, again;
    struct extent_want want = want_of(1, 0, 4096);
    assert_int_equal(get(f, &first, &want), 1);
    assert_int_equal(get(f, &other, &want), 0);
    err_sys(&first.wait.extent->err, EIO, "the disk");
    extent_read(f->x, first.wait.extent, 0, 0);
    put(f, &first);
    rig_settle(&f->rig);
    assert_int_equal(other.told, 1);
    assert_int_equal(other.wait.extent->err.class, ERR_IO);
    assert_int_equal(get(f, &again, &want), 1);
    deliver(f, &again, 1, 0);
    put(f, &again);
    put(f, &other);
}

/* Past what is there, and past what is on its way; who has the old bytes keeps them. */
static void asked_anew_it_is_read_anew(void **state)
{
    struct fixture *f = *state;
    struct reader old, waits, fresh, later;
    struct extent_want want = want_of(1, 0, MIB), anew = want;
    anew.fresh = true;
    assert_int_equal(get(f, &old, &want), 1);
    assert_int_equal(get(f, &waits, &want), 0);
    assert_int_equal(get(f, &fresh, &anew), 1);
    deliver(f, &fresh, 2, 0);
    deliver(f, &old, 1, 0);
    rig_settle(&f->rig);
    assert_int_equal(waits.told, 1);
    assert_int_equal(waits.wait.extent->memory[0], 1);
    assert_int_equal(get(f, &later, &want), 0);
    rig_settle(&f->rig);
    assert_int_equal(later.wait.extent->memory[0], 2);
    put(f, &old);
    put(f, &waits);
    put(f, &fresh);
    put(f, &later);
}

static void the_longest_unused_makes_room(void **state)
{
    struct fixture *f = *state;
    struct reader r;
    for (uint8_t i = 0; i < 4; i++) {
        struct extent_want want = want_of(i, 0, MIB);
        assert_int_equal(get(f, &r, &want), 1);
        deliver(f, &r, i, 0);
        put(f, &r);
    }
    struct extent_want oldest = want_of(0, 0, MIB), next = want_of(1, 0, MIB), another = want_of(9, 0, MIB);
    assert_int_equal(get(f, &r, &oldest), 0); /* used again: no longer the oldest */
    rig_settle(&f->rig);
    put(f, &r);
    assert_int_equal(get(f, &r, &another), 1);
    deliver(f, &r, 9, 0);
    put(f, &r);
    assert_int_equal(get(f, &r, &oldest), 0);
    rig_settle(&f->rig);
    put(f, &r);
    assert_int_equal(get(f, &r, &next), 1);
    deliver(f, &r, 1, 0);
    put(f, &r);
}

static int read_once(struct fixture *f, struct reader *r, uint64_t window)
{
    struct extent_want want = want_of(1, window * MIB, (window + 1) * MIB);
    int rc = get(f, r, &want);
    if (rc == 1)
        deliver(f, r, (uint8_t)window, 0);
    rig_settle(&f->rig);
    assert_int_equal(r->wait.extent->memory[MIB - 1], (uint8_t)window);
    put(f, r);
    return rc;
}

/* What one reader alone goes through leaves the same memory in use again and again; where a second one comes
 * close behind, what the first has read is there for him, once that has shown. */
static void what_nobody_wants_twice_is_not_kept(void **state)
{
    struct fixture *f = *state;
    struct reader r;
    const uint8_t *used = NULL;
    uint64_t window = 0;
    for (; window < 32; window++) {
        struct extent_want want = want_of(1, window * MIB, (window + 1) * MIB);
        assert_int_equal(get(f, &r, &want), 1);
        if (window >= 16)
            assert_ptr_equal(r.wait.extent->memory, used);
        used = r.wait.extent->memory;
        deliver(f, &r, 1, 0);
        put(f, &r);
    }
    assert_int_equal(read_once(f, &r, 30), 1);
    for (; window < 64; window++) {
        assert_int_equal(read_once(f, &r, window), 1);
        int second = read_once(f, &r, window);
        assert_true(window < 40 ? second == 1 : window < 56 || second == 0);
    }
    for (; window < 192; window++) /* the second has gone */
        assert_int_equal(read_once(f, &r, window), 1);
    assert_int_equal(read_once(f, &r, 191), 1);
}

/* A small one takes a small place: many of them fit. */
static void small_ones_take_little_room(void **state)
{
    struct fixture *f = *state;
    struct reader r;
    for (uint64_t i = 0; i < 64; i++) {
        struct extent_want want = want_of(1, i * MIB, i * MIB + 4096);
        assert_int_equal(get(f, &r, &want), 1);
        deliver(f, &r, (uint8_t)i, 0);
        put(f, &r);
    }
    for (uint64_t i = 0; i < 64; i++) {
        struct extent_want want = want_of(1, i * MIB, i * MIB + 4096);
        assert_int_equal(get(f, &r, &want), 0);
        rig_settle(&f->rig);
        assert_int_equal(r.wait.extent->memory[4095], (uint8_t)i);
        put(f, &r);
    }
}

/* Whoever holds the whole arena stops nobody, and gets it back into use when it lets go. */
static void a_full_arena_stalls_nobody(void **state)
{
    struct fixture *f = *state;
    struct reader slow[4], r;
    struct extent_want want = want_of(9, 0, MIB);
    for (uint8_t i = 0; i < 4; i++) {
        struct extent_want mine = want_of(i, 0, MIB);
        assert_false(extents_crowded(f->x));
        assert_int_equal(get(f, &slow[i], &mine), 1);
        deliver(f, &slow[i], i, 0);
    }
    assert_true(extents_crowded(f->x));
    for (int round = 0; round < 2; round++) { /* read, joined by nobody, and not kept */
        assert_int_equal(get(f, &r, &want), 1);
        deliver(f, &r, 9, 0);
        put(f, &r);
    }
    for (uint8_t i = 0; i < 4; i++) {
        assert_int_equal(slow[i].wait.extent->memory[MIB - 1], i);
        put(f, &slow[i]);
    }
    assert_false(extents_crowded(f->x));
    for (int round = 0; round < 2; round++) {
        assert_int_equal(get(f, &r, &want), round == 0);
        if (round == 0)
            deliver(f, &r, 9, 0);
        rig_settle(&f->rig);
        put(f, &r);
    }
}

static void private_memory_is_found_by_nobody(void **state)
{
    struct fixture *f = *state;
    struct extent *e = extent_private(f->x, 100000);
    assert_non_null(e);
    memset(e->memory, 1, 100000);
    extent_put(f->x, e);
    extent_put(f->x, NULL);
    assert_false(extents_crowded(f->x));
}

static void private_memory_takes_nothing_away(void **state)
{
    struct fixture *f = *state;
    struct reader r;
    struct extent *own[4];
    for (uint64_t i = 0; i < 4; i++)
        assert_int_equal(read_once(f, &r, i), 1);
    for (int i = 0; i < 4; i++) {
        own[i] = extent_private(f->x, MIB);
        assert_non_null(own[i]);
        memset(own[i]->memory, 77, MIB);
    }
    for (uint64_t i = 0; i < 4; i++)
        assert_int_equal(read_once(f, &r, i), 0);
    for (int i = 0; i < 4; i++)
        extent_put(f->x, own[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(those_who_come_meanwhile_wait, setup, teardown),
        cmocka_unit_test_setup_teardown(what_is_old_or_not_to_be_kept_is_read_again, setup, teardown),
        cmocka_unit_test_setup_teardown(another_object_is_another_matter, setup, teardown),
        cmocka_unit_test_setup_teardown(only_what_is_lacking_is_read, setup, teardown),
        cmocka_unit_test_setup_teardown(a_failure_is_told_to_all_and_not_kept, setup, teardown),
        cmocka_unit_test_setup_teardown(asked_anew_it_is_read_anew, setup, teardown),
        cmocka_unit_test_setup_teardown(the_longest_unused_makes_room, setup, teardown),
        cmocka_unit_test_setup_teardown(what_nobody_wants_twice_is_not_kept, setup, teardown),
        cmocka_unit_test_setup_teardown(small_ones_take_little_room, setup, teardown),
        cmocka_unit_test_setup_teardown(a_full_arena_stalls_nobody, setup, teardown),
        cmocka_unit_test_setup_teardown(private_memory_is_found_by_nobody, setup, teardown),
        cmocka_unit_test_setup_teardown(private_memory_takes_nothing_away, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
