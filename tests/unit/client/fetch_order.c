/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: every item is fetched once, whatever the server tells of others' scans, and where one goes on the
 * order goes along. Method: parts made here; random scans from a printed seed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/fetch_order.h"
#include "client/part_private.h"

#define PARTS      3u
#define CHUNKS     10u
#define ITEMS      (PARTS * CHUNKS)
#define CHUNK_SIZE (4u << 20)
#define AT(chunk)  ((chunk) * (uint64_t)CHUNK_SIZE + BLOCK_BYTES)

struct fixture {
    struct part parts[PARTS];
    struct chunk_entry chunks[CHUNKS];
    struct fetch_item items[ITEMS];
    struct fetch_order order;
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    for (uint32_t i = 0; i < CHUNKS; i++)
        f->chunks[i] = (struct chunk_entry){.offset = AT(i), .stored_bytes = CHUNK_SIZE};
    for (uint32_t p = 0; p < PARTS; p++) {
        f->parts[p] = (struct part){.chunks = f->chunks, .chunk_count = CHUNKS};
        f->parts[p].header.segment_id.bytes[0] = (uint8_t)(p + 1);
        for (uint32_t i = 0; i < CHUNKS; i++)
            f->items[p * CHUNKS + i] = (struct fetch_item){.part = &f->parts[p], .chunk = i};
    }
    assert_int_equal(fetch_order_create(&f->order, f->items, ITEMS), 0);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    fetch_order_free(&f->order);
    free(f);
    return 0;
}

static void takes(struct fixture *f, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++) {
        assert_int_equal(fetch_order_next(&f->order), i);
        fetch_order_take(&f->order);
    }
}

static struct fetch_scan scan(unsigned part, uint32_t from, uint32_t to)
{
    return (struct fetch_scan){.segment.bytes = {(uint8_t)(part + 1)}, .begin = AT(from), .end = AT(to)};
}

static void alone_it_goes_through_from_the_beginning(void **state)
{
    struct fixture *f = *state;
    fetch_order_join(&f->order, NULL, 0);
    takes(f, 0, ITEMS);
    assert_int_equal(f->order.left, 0);
    struct fetch_scan s = scan(0, 0, CHUNKS);
    fetch_order_join(&f->order, &s, 1);
}

/* From the later half of what is in memory to the end, and what was left out then. */
static void it_joins_where_others_read_and_wraps_around(void **state)
{
    struct fixture *f = *state;
    struct fetch_scan s = scan(1, 2, 6);
    takes(f, 0, 2);
    fetch_order_join(&f->order, &s, 1);
    takes(f, CHUNKS + 4, ITEMS);
    takes(f, 2, CHUNKS + 4);
    assert_int_equal(f->order.left, 0);
}

static void where_the_scan_is_already_it_stays(void **state)
{
    struct fixture *f = *state;
    struct fetch_scan s = scan(0, 1, 9);
    takes(f, 0, 1);
    fetch_order_join(&f->order, &s, 1);
    takes(f, 1, 3);
    fetch_order_join(&f->order, &s, 1);
    takes(f, 3, ITEMS);
}

static void the_first_scan_with_something_it_lacks_counts(void **state)
{
    struct fixture *f = *state;
    struct fetch_scan s[] = {scan(7, 0, 9), scan(0, 0, 4), scan(2, 0, 1), scan(1, 0, 9)};
    takes(f, 0, 4);
    fetch_order_join(&f->order, s, 4);
    takes(f, 2 * CHUNKS, 2 * CHUNKS + 1);
    fetch_order_join(&f->order, s, 3);
    takes(f, 2 * CHUNKS + 1, ITEMS);
    fetch_order_join(&f->order, s, 4);
    takes(f, CHUNKS + 4, 2 * CHUNKS);
    fetch_order_join(&f->order, s, 4);
    takes(f, CHUNKS, CHUNKS + 4); /* the earlier half is better than nothing */
    takes(f, 4, CHUNKS);
    assert_int_equal(f->order.left, 0);
}

/* It lies nowhere. */
static void a_chunk_that_stores_nothing_is_in_no_scan(void **state)
{
    struct fixture *f = *state;
    struct fetch_scan s = scan(1, 0, 1);
    f->chunks[0] = (struct chunk_entry){.offset = AT(0)};
    fetch_order_join(&f->order, &s, 1);
    takes(f, 0, ITEMS);
}

static void whatever_is_told_each_comes_once(void **state)
{
    struct fixture *f = *state;
    bool seen[ITEMS] = {false};
    unsigned seed = 20;
    printf("seed %u\n", seed);
    for (size_t n = 0; n < ITEMS; n++) {
        struct fetch_scan s[3];
        for (int i = 0; i < 3; i++) {
            uint32_t from = (uint32_t)rand_r(&seed) % CHUNKS;
            s[i] = scan((unsigned)rand_r(&seed) % 4, from, from + (uint32_t)rand_r(&seed) % 4);
        }
        fetch_order_join(&f->order, s, (unsigned)rand_r(&seed) % 4);
        size_t item = fetch_order_next(&f->order);
        assert_false(seen[item]);
        seen[item] = true;
        fetch_order_take(&f->order);
        assert_int_equal(f->order.left, ITEMS - n - 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(alone_it_goes_through_from_the_beginning, setup, teardown),
        cmocka_unit_test_setup_teardown(it_joins_where_others_read_and_wraps_around, setup, teardown),
        cmocka_unit_test_setup_teardown(where_the_scan_is_already_it_stays, setup, teardown),
        cmocka_unit_test_setup_teardown(the_first_scan_with_something_it_lacks_counts, setup, teardown),
        cmocka_unit_test_setup_teardown(a_chunk_that_stores_nothing_is_in_no_scan, setup, teardown),
        cmocka_unit_test_setup_teardown(whatever_is_told_each_comes_once, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
