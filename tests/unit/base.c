/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: the ground that every decoder stands on. Method: known values, and reads one byte past each end. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

#include "format/base/cursor.h"
#include "format/base/err.h"
#include "format/base/hash.h"
#include "format/base/secret.h"
#include "format/base/utf8.h"
#include "format/wire.h"

static void cursor_reads_what_buf_wrote(void **state)
{
    (void)state;
    struct buf b = {0};
    buf_u8(&b, 1);
    buf_u16(&b, 0x0203);
    buf_u32(&b, 0x04050607);
    buf_u64(&b, 0x08090a0b0c0d0e0full);
    buf_put16(&b, slice_str("name"));
    assert_int_equal(buf_end(&b, "test", NULL), 0);
    assert_int_equal(b.p[1], 3); /* little-endian */
    struct rcur c = rcur_of(b.p, b.n);
    assert_int_equal(rcur_u8(&c), 1);
    assert_int_equal(rcur_u16(&c), 0x0203);
    assert_int_equal(rcur_u32(&c), 0x04050607);
    assert_true(rcur_u64(&c) == 0x08090a0b0c0d0e0full);
    assert_true(slice_eq(rcur_take16(&c), slice_str("name")));
    assert_int_equal(rcur_end(&c, "test", NULL), 0);
    for (size_t n = 0; n < b.n; n++) { /* every cut is noticed */
        c = rcur_of(b.p, n);
        (void)rcur_u8(&c), (void)rcur_u16(&c), (void)rcur_u32(&c), (void)rcur_u64(&c), (void)rcur_take16(&c);
        assert_int_equal(rcur_end(&c, "test", NULL), -EBADMSG);
    }
    buf_free(&b);
}

static void buf_keeps_its_limit(void **state)
{
    (void)state;
    struct buf b = {.max = 10};
    buf_put(&b, "0123456789", 10);
    assert_false(b.failed);
    buf_u8(&b, 1);
    assert_true(b.failed);
    assert_true(buf_end(&b, "test", NULL) < 0);
    buf_free(&b);
}

static void errors_prepend_and_quote(void **state)
{
    (void)state;
    struct err e;
    assert_int_equal(err_set(&e, ERR_CORRUPT, "chunk %d is damaged", 3), -EBADMSG);
    assert_int_equal(err_prepend(&e, "reading %s", "a"), -EBADMSG);
    assert_string_equal(e.text, "reading a: chunk 3 is damaged");
    char q[32];
    assert_string_equal(err_quote(q, sizeof q, "a\n\xff\xc3\xa9", 5), "a\\x0a\\xff\xc3\xa9");
    assert_string_equal(err_quote(q, 8, "0123456789", 10), "0123...");
}

static void secret_is_compared_and_kept(void **state)
{
    (void)state;
    struct secret *a = secret_create("key", 3), *b = secret_create("kez", 3);
    assert_false(secret_equal(a, b));
    assert_memory_equal(secret_bytes(a), "key", 3);
    secret_free(a);
    secret_free(b);
}

static void message_round_trip_and_cuts(void **state)
{
    (void)state;
    struct msg_join m = {
        .step = 7, .rank = 1, .world = 2, .loader = slice_str("L"), .labels = slice_str("kv"), .wait_ms = 5};
    memset(m.index_digest.bytes, 9, 32);
    struct buf b = {0};
    msg_join_encode(&m, &b);
    struct rcur c = rcur_of(b.p, b.n);
    struct msg_join got;
    assert_int_equal(msg_join_decode(&c, &got, NULL), 0);
    assert_int_equal(c.left, 0);
    assert_int_equal(got.wait_ms, 5);
    assert_true(slice_eq(got.labels, m.labels));
    for (size_t n = 0; n < b.n; n++) {
        c = rcur_of(b.p, n);
        assert_int_equal(msg_join_decode(&c, &got, NULL), -EPROTO);
    }
    buf_free(&b);
}

static void frame_header_is_strict(void **state)
{
    (void)state;
    struct frame_header h = {.opcode = OP_PING,
                             .flags = FRAME_MORE,
                             .payload_bytes = 9,
                             .request_id = 77,
                             .deadline_ms = 3},
                        got;
    uint8_t raw[FRAME_HEADER_BYTES];
    frame_header_encode(&h, raw);
    assert_int_equal(frame_header_decode(raw, &got, NULL), 0);
    assert_int_equal(got.request_id, 77);
    assert_int_equal(got.opcode, OP_PING);
    assert_int_equal(got.flags, FRAME_MORE);
    assert_int_equal(got.payload_bytes, 9);
    assert_int_equal(got.deadline_ms, 3);
    static const int must_fail[] = {0, 9, 15, 28, 31};
    for (size_t i = 0; i < sizeof must_fail / sizeof must_fail[0]; i++) {
        raw[must_fail[i]] ^= 0x80;
        assert_true(frame_header_decode(raw, &got, NULL) < 0);
        raw[must_fail[i]] ^= 0x80;
    }
    raw[4] = 2;
    assert_int_equal(frame_header_decode(raw, &got, NULL), -EPROTONOSUPPORT);
}

/* Eight bytes are looked at together: at any place, a bad one is found and a long character is none. */
static void utf8_is_told_at_any_place(void **state)
{
    (void)state;
    for (size_t n = 1; n <= 40; n++)
        for (size_t at = 0; at < n; at++) {
            char text[40];
            memset(text, 'a', sizeof text);
            assert_true(utf8_valid(text, n));
            text[at] = 0;
            assert_false(utf8_valid(text, n));
            text[at] = (char)0x80; /* goes on with what did not begin */
            assert_false(utf8_valid(text, n));
            text[at] = (char)0xff;
            assert_false(utf8_valid(text, n));
            text[at] = (char)0xc3; /* of two bytes, the second not one that goes on */
            assert_false(utf8_valid(text, n));
            if (at + 1 < n) {
                text[at + 1] = (char)0xa9;
                assert_true(utf8_valid(text, n));
                assert_false(utf8_valid(text, at + 1)); /* cut off */
            }
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(utf8_is_told_at_any_place),   cmocka_unit_test(cursor_reads_what_buf_wrote),
        cmocka_unit_test(buf_keeps_its_limit),         cmocka_unit_test(errors_prepend_and_quote),
        cmocka_unit_test(secret_is_compared_and_kept), cmocka_unit_test(message_round_trip_and_cuts),
        cmocka_unit_test(frame_header_is_strict),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
