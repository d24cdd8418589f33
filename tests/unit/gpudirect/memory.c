/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: host memory answers to everything that a device does, at once; and the wrapper says what cannot be.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpudirect/memory.h"
#include "tests/support/sanitized.h"

static struct memory *host(void)
{
    struct memory *m = NULL;
    assert_int_equal(memory_open(MEMORY_HOST, 0, &m, NULL), 0);
    return m;
}

static void host_memory_is_always_there(void **state)
{
    struct memory_probe p;
    struct memory_info i;
    (void)state;
    memory_probe(MEMORY_HOST, &p);
    assert_true(p.usable);
    assert_int_equal(p.devices, 1);
    assert_int_equal(memory_describe(MEMORY_HOST, 0, &i, NULL), 0);
    assert_true(i.bytes > 1 << 20);
    assert_string_equal(memory_kind_name(MEMORY_HOST), "host");
    assert_string_equal(memory_kind_name((enum memory_kind)99), "unknown");
}

static void what_is_not_there_is_named(void **state)
{
    struct memory *m = NULL;
    struct err e;
    (void)state;
    assert_int_equal(memory_open(MEMORY_HOST, 1, &m, &e), -ENOENT);
    assert_int_equal(e.class, ERR_NOT_FOUND);
    assert_int_equal(memory_open((enum memory_kind)7, 0, &m, &e), -EINVAL);
    assert_non_null(strstr(e.text, "not a kind of memory"));
    assert_null(m);
}

/* A 2 x 3 box of 4-byte rows out of memory with gaps, and back into memory with other gaps. */
static void boxes_are_copied(void **state)
{
    struct memory *m = host();
    struct memory_stream *s = NULL;
    uint8_t from[64], packed[24], to[128];
    (void)state;
    assert_int_equal(memory_stream_create(m, &s, NULL), 0);
    for (unsigned i = 0; i < sizeof from; i++)
        from[i] = (uint8_t)i;
    memset(to, 0xee, sizeof to);
    struct memory_box out = {packed,          from, 4, 3, 2, .to_pitch = 4, .to_slice = 12, .from_pitch = 8,
                             .from_slice = 32};
    struct memory_box in = {
        to, packed, 4, 3, 2, .to_pitch = 16, .to_slice = 64, .from_pitch = 4, .from_slice = 12};
    assert_true(memory_box_fits(m, &out) && memory_box_fits(m, &in));
    assert_int_equal(memory_copy_box(s, MEMORY_OUT, &out, NULL), 0);
    assert_int_equal(memory_copy_box(s, MEMORY_IN, &in, NULL), 0);
    for (unsigned i = 0; i < sizeof to; i++) {
        unsigned slice = i / 64, row = i % 64 / 16, byte = i % 16;
        assert_int_equal(to[i], row < 3 && byte < 4 ? slice * 32 + row * 8 + byte : 0xee);
    }
    memory_stream_destroy(s);
    memory_close(m);
}

static void boxes_that_no_copy_can_do_are_refused(void **state)
{
    struct memory *m = host();
    struct memory_stream *s = NULL;
    uint8_t a[64], b[64];
    struct err e;
    (void)state;
    assert_int_equal(memory_stream_create(m, &s, NULL), 0);
    struct memory_box crossing = {a, b, 8, 2, 1, .to_pitch = 4, .from_pitch = 8};
    struct memory_box ragged = {
        a, b, 2, 2, 2, .to_pitch = 4, .to_slice = 10, .from_pitch = 4, .from_slice = 8};
    struct memory_box short_slice = {
        a, b, 2, 3, 2, .to_pitch = 4, .to_slice = 8, .from_pitch = 4, .from_slice = 12};
    assert_false(memory_box_fits(m, &crossing));
    assert_false(memory_box_fits(m, &ragged));
    assert_false(memory_box_fits(m, &short_slice));
    assert_int_equal(memory_copy_box(s, MEMORY_WITHIN, &crossing, &e), -EINVAL);
    struct memory_box one_row = {
        .to = a, .from = b, .row_bytes = 8, .rows = 1, .slices = 1}; /* pitches mean nothing here */
    assert_true(memory_box_fits(m, &one_row));
    memory_stream_destroy(s);
    memory_close(m);
}

static void events_have_happened_at_once(void **state)
{
    struct memory *m = host();
    struct memory_stream *s = NULL;
    struct memory_event *v = NULL;
    (void)state;
    assert_int_equal(memory_stream_create(m, &s, NULL), 0);
    assert_int_equal(memory_event_create(m, &v, NULL), 0);
    assert_int_equal(memory_event_query(v, NULL), 1);
    assert_int_equal(memory_event_record(v, s, NULL), 0);
    assert_int_equal(memory_event_wait(v, 0, NULL), 0);
    assert_int_equal(memory_stream_after(s, v, NULL), 0);
    assert_int_equal(memory_stream_after_caller(s, NULL, NULL), 0);
    assert_int_equal(memory_caller_after(NULL, v, NULL), 0);
    assert_int_equal(memory_stream_wait(s, 0, NULL), 0);
    assert_null(memory_event_handle(v));
    assert_null(memory_stream_handle(s));
    assert_ptr_equal(memory_stream_memory(s), m);
    memory_event_destroy(v);
    memory_stream_destroy(s);
    memory_close(m);
}

static void memory_is_aligned_and_plain(void **state)
{
    struct memory *m = host();
    struct memory_pointer x;
    struct err e;
    void *p = NULL;
    (void)state;
    assert_int_equal(memory_alloc(m, 1000, &p, NULL), 0);
    assert_int_equal((uintptr_t)p % 256, 0);
    assert_int_equal(memory_where(p, &x, NULL), 0);
    assert_int_equal(x.kind, MEMORY_HOST);
    assert_int_equal(memory_check(m, p, 1000, NULL), 0);
    assert_int_equal(memory_register(m, p, 1000, NULL), 0);
    memory_unregister(m, p);
    memory_free(m, p);
    memory_free(m, NULL);
    assert_true(SANITIZED || memory_alloc(m, SIZE_MAX / 2, &p, &e) == -ENOMEM);
    assert_int_equal(memory_lost(m, &e), 0);
    memory_close(m);
    memory_close(NULL);
}

static void kernels_need_a_device(void **state)
{
    struct memory *m = host();
    struct memory_module *x = NULL;
    struct err e;
    (void)state;
    assert_int_equal(memory_module_load(m, "", &x, &e), -ENOTSUP);
    assert_int_equal(e.class, ERR_UNSUPPORTED);
    memory_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(host_memory_is_always_there),
        cmocka_unit_test(what_is_not_there_is_named),
        cmocka_unit_test(boxes_are_copied),
        cmocka_unit_test(boxes_that_no_copy_can_do_are_refused),
        cmocka_unit_test(events_have_happened_at_once),
        cmocka_unit_test(memory_is_aligned_and_plain),
        cmocka_unit_test(kernels_need_a_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
