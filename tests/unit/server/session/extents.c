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
    return (struct extent_want){
        .key.object.bytes = {object}, .begin = begin, .end = end, .unsure_bytes = 8 * MIB, .reader = 1};
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

/* Not what was used last: of many who go through an object, the last one is the last to want a piece, and
 * what he has just had is worth the least. */
static void what_was_read_first_makes_room(void **state)
{
    struct fixture *f = *state;
    struct reader r, held;
    for (uint8_t i = 0; i < 4; i++) {
        struct extent_want want = want_of(i, 0, MIB);
        assert_int_equal(get(f, &r, &want), 1);
        deliver(f, &r, i, 0);
        put(f, &r);
    }
    struct extent_want first = want_of(0, 0, MIB), second = want_of(1, 0, MIB), another = want_of(9, 0, MIB);
    assert_int_equal(get(f, &r, &second), 0); /* used again: no younger by that */
    rig_settle(&f->rig);
    put(f, &r);
    assert_int_equal(get(f, &held, &first), 0); /* in use: it stays */
    rig_settle(&f->rig);
    assert_int_equal(get(f, &r, &another), 1);
    deliver(f, &r, 9, 0);
    put(f, &r);
    assert_int_equal(get(f, &r, &first), 0);
    rig_settle(&f->rig);
    put(f, &r);
    put(f, &held);
    assert_int_equal(get(f, &r, &second), 1);
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
        assert_int_equal(extents_crowded(f->x), i >= 1); /* a quarter of it is held */
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

/* ---- scans ---- */

static void read_by(struct fixture *f, uint64_t reader, uint8_t object, uint64_t window, uint64_t now_ms)
{
    struct reader r;
    struct extent_want want = want_of(object, window * MIB, (window + 1) * MIB);
    want.reader = reader;
    want.now_ms = now_ms;
    if (get(f, &r, &want) == 1)
        deliver(f, &r, 1, now_ms);
    rig_settle(&f->rig);
    put(f, &r);
}

/* Where a scan of the object is: in MiB, what is in memory around it; no scan: 0, 0. */
static void assert_scan(struct fixture *f, uint8_t object, uint64_t now_ms, uint64_t begin, uint64_t end)
{
    struct extent_scan scans[EXTENT_SCANS_MAX];
    const struct id group = {{0}};
    unsigned n = extents_scans(f->x, &group, false, now_ms, scans), i = 0;
    while (i < n && scans[i].object.bytes[0] != object)
        i++;
    assert_int_equal(i < n ? scans[i].begin / MIB : 0, begin);
    assert_int_equal(i < n ? scans[i].end / MIB : 0, end);
}

static void a_scan_tells_what_is_in_memory_around_it(void **state)
{
    struct fixture *f = *state;
    assert_scan(f, 1, 0, 0, 0);
    for (uint64_t w = 10; w < 13; w++)
        read_by(f, 1, 1, w, 0);
    assert_scan(f, 1, 0, 10, 13);
    read_by(f, 1, 1, 40, 0); /* its reader went elsewhere, and the scan with it */
    assert_scan(f, 1, 0, 40, 41);
    read_by(f, 1, 1, 44, 0); /* over a gap; the oldest has gone */
    assert_scan(f, 1, 0, 40, 45);
}

static void others_do_not_turn_a_scan_but_may_take_it_along(void **state)
{
    struct fixture *f = *state;
    read_by(f, 1, 1, 100, 0);
    read_by(f, 2, 1, 5, 0);
    read_by(f, 2, 1, 300, 0);
    read_by(f, 0, 1, 130, 0); /* who goes through nothing */
    assert_scan(f, 1, 0, 100, 101);
    read_by(f, 3, 1, 140, 0);
    assert_scan(f, 1, 0, 140, 141);
    read_by(f, 1, 1, 101, 0); /* overtaken */
    assert_scan(f, 1, 0, 140, 141);
    read_by(f, 3, 1, 7, 0);
    assert_scan(f, 1, 0, 7, 8);
}

static void a_scan_that_rests_has_ended(void **state)
{
    struct fixture *f = *state;
    read_by(f, 1, 1, 100, 5000);
    read_by(f, 2, 1, 7, 5999);
    assert_scan(f, 1, 5999, 100, 101);
    assert_scan(f, 1, 6000, 0, 0);
    read_by(f, 2, 1, 8, 6000);
    assert_scan(f, 1, 6000, 7, 9);
}

/* So all who ask go to the same one. */
static void the_scan_that_began_first_comes_first(void **state)
{
    struct fixture *f = *state;
    struct extent_scan scans[EXTENT_SCANS_MAX];
    struct id group = {{0}};
    for (uint8_t i = 1; i <= 20; i++)
        read_by(f, i, i, 3, 0);
    for (uint8_t i = 20; i >= 1; i--)
        read_by(f, i, i, 4, 0);
    assert_int_equal(extents_scans(f->x, &group, false, 0, scans), EXTENT_SCANS_MAX);
    for (uint8_t i = 0; i < EXTENT_SCANS_MAX; i++)
        assert_int_equal(scans[i].object.bytes[0], i + 1);
    group.bytes[0] = 1; /* somebody else's */
    assert_int_equal(extents_scans(f->x, &group, false, 0, scans), 0);
}

/* From when somebody joins a scan, what is read there is kept for him. */
static void who_joins_a_scan_finds_what_is_read_from_then_on(void **state)
{
    struct fixture *f = *state;
    struct extent_scan scans[EXTENT_SCANS_MAX];
    const struct id group = {{0}};
    struct reader r;
    for (uint64_t w = 0; w < 32; w++)
        assert_int_equal(read_once(f, &r, w), 1);
    assert_int_equal(extents_scans(f->x, &group, false, 0, scans), 1);
    assert_int_equal(read_once(f, &r, 32), 1);
    assert_int_equal(read_once(f, &r, 32), 1);
    assert_int_equal(extents_scans(f->x, &group, true, 0, scans), 1);
    for (uint64_t w = 33; w < 64; w++) {
        assert_int_equal(read_once(f, &r, w), 1);
        assert_int_equal(read_once(f, &r, w), 0);
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
        cmocka_unit_test_setup_teardown(what_was_read_first_makes_room, setup, teardown),
        cmocka_unit_test_setup_teardown(what_nobody_wants_twice_is_not_kept, setup, teardown),
        cmocka_unit_test_setup_teardown(small_ones_take_little_room, setup, teardown),
        cmocka_unit_test_setup_teardown(a_full_arena_stalls_nobody, setup, teardown),
        cmocka_unit_test_setup_teardown(a_scan_tells_what_is_in_memory_around_it, setup, teardown),
        cmocka_unit_test_setup_teardown(others_do_not_turn_a_scan_but_may_take_it_along, setup, teardown),
        cmocka_unit_test_setup_teardown(a_scan_that_rests_has_ended, setup, teardown),
        cmocka_unit_test_setup_teardown(the_scan_that_began_first_comes_first, setup, teardown),
        cmocka_unit_test_setup_teardown(who_joins_a_scan_finds_what_is_read_from_then_on, setup, teardown),
        cmocka_unit_test_setup_teardown(private_memory_is_found_by_nobody, setup, teardown),
        cmocka_unit_test_setup_teardown(private_memory_takes_nothing_away, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
