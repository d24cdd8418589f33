/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a packed shard comes out as it went in, whatever the pieces; one that is cut anywhere, damaged, of
 * another size or with other checksums is refused, and never gives more bytes than it should. Method: shards
 * of one and of several frames, pieces of many sizes, each cut.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include <cmocka.h>

#include "format/mds_unpack.h"

#define RAW_BYTES 30000u

static uint8_t raw[RAW_BYTES], out[RAW_BYTES + 100];

/* raw in so many frames, with zstd's own checksums where asked. */
static void pack(unsigned frames, int checksums, struct buf *packed)
{
    static uint8_t room[RAW_BYTES + 1000];
    ZSTD_CCtx *c = ZSTD_createCCtx();
    assert_non_null(c);
    assert_false(ZSTD_isError(ZSTD_CCtx_setParameter(c, ZSTD_c_checksumFlag, checksums)));
    for (unsigned i = 0; i < frames; i++) {
        size_t n = RAW_BYTES / frames;
        size_t got = ZSTD_compress2(c, room, sizeof room, raw + i * n, n);
        assert_false(ZSTD_isError(got));
        buf_put(packed, room, got);
    }
    ZSTD_freeCCtx(c);
    assert_false(packed->failed);
}

static int setup(void **state)
{
    (void)state;
    uint32_t x = 5;
    for (uint32_t i = 0; i < RAW_BYTES; i++) {
        x = x * 1664525u + 1013904223u;
        raw[i] = (uint8_t)('a' + (x >> 24) % 12);
    }
    return 0;
}

/* In pieces of `in` packed and `room` unpacked bytes. What comes out lies in `out`. */
static int unpack(struct slice packed, uint64_t bytes, size_t in, size_t room, const struct mds_file *plain,
                  const struct mds_file *zip, struct err *e)
{
    struct mds_unpack *u = NULL;
    size_t done = 0, got;
    int rc = mds_unpack_create(bytes, plain, zip, &u, e);
    while (rc == 0 && packed.n > 0) {
        struct slice piece = SLICE(packed.p, packed.n < in ? packed.n : in);
        packed = SLICE(packed.p + piece.n, packed.n - piece.n);
        do {
            size_t most = sizeof out - done < room ? sizeof out - done : room;
            rc = mds_unpack_push(u, &piece, out + done, most, &got, e);
            done += rc == 0 ? got : 0;
            assert_true(done <= bytes);
            assert_true(rc < 0 || got == most || piece.n == 0);
            if (got < most)
                break;
        } while (rc == 0);
    }
    if (rc == 0)
        rc = mds_unpack_end(u, e);
    assert_true(rc < 0 || done == bytes);
    mds_unpack_free(u);
    return rc;
}

static void comes_out_as_it_went_in(void **state)
{
    (void)state;
    static const size_t pieces[] = {1, 7, 1000, RAW_BYTES};
    for (unsigned frames = 1; frames <= 3; frames++) {
        struct buf packed = {0};
        pack(frames, 1, &packed);
        for (size_t i = 0; i < 4; i++) {
            for (size_t j = 0; j < 4; j++) {
                struct err e = {0};
                memset(out, 0, sizeof out);
                if (unpack(SLICE(packed.p, packed.n), RAW_BYTES, pieces[i], pieces[j], NULL, NULL, &e) < 0)
                    fail_msg("%s", e.text);
                assert_memory_equal(out, raw, RAW_BYTES);
            }
        }
        buf_free(&packed);
    }
}

static void every_cut_is_refused(void **state)
{
    (void)state;
    for (unsigned frames = 1; frames <= 2; frames++) {
        struct buf packed = {0};
        pack(frames, 1, &packed);
        for (size_t n = 0; n < packed.n; n += n < 40 || n > packed.n - 40 ? 1 : 97) {
            struct err e = {0};
            assert_true(unpack(SLICE(packed.p, n), RAW_BYTES, 512, 512, NULL, NULL, &e) < 0);
            assert_int_equal(e.class, ERR_CORRUPT);
        }
        /* All bytes are out, and only zstd's checksum is missing. */
        struct err e = {0};
        assert_true(unpack(SLICE(packed.p, packed.n - 1), RAW_BYTES, 512, 512, NULL, NULL, &e) < 0);
        assert_non_null(strstr(e.text, "cut"));
        buf_free(&packed);
    }
}

static void other_bytes_are_refused(void **state)
{
    (void)state;
    struct buf packed = {0};
    struct err e = {0};
    pack(1, 1, &packed);
    for (size_t at = 0; at < packed.n; at += 211) {
        packed.p[at] ^= 0x41;
        assert_true(unpack(SLICE(packed.p, packed.n), RAW_BYTES, 512, 512, NULL, NULL, &e) < 0);
        assert_int_equal(e.class, ERR_CORRUPT);
        packed.p[at] ^= 0x41;
    }
    buf_put(&packed, "behind", 6);
    assert_true(unpack(SLICE(packed.p, packed.n), RAW_BYTES, 512, 512, NULL, NULL, &e) < 0);
    buf_free(&packed);
}

static void other_sizes_are_refused(void **state)
{
    (void)state;
    struct buf packed = {0};
    struct err e = {0};
    pack(2, 0, &packed);
    assert_true(unpack(SLICE(packed.p, packed.n), RAW_BYTES - 1, 512, 512, NULL, NULL, &e) < 0);
    assert_non_null(strstr(e.text, "unpacked it has more than the 29999 bytes of index.json"));
    assert_true(unpack(SLICE(packed.p, packed.n), RAW_BYTES / 2, 512, 512, NULL, NULL, &e) < 0);
    assert_non_null(strstr(e.text, "more than the 15000 bytes"));
    assert_true(unpack(SLICE(packed.p, packed.n), RAW_BYTES + 1, 512, 512, NULL, NULL, &e) < 0);
    assert_non_null(strstr(e.text, "unpacked it has 30000 bytes, index.json says 30001"));
    buf_free(&packed);
}

/* A frame that asks for a window of 256 MiB. */
static void wide_windows_are_refused(void **state)
{
    (void)state;
    static const uint8_t wide[] = {0x28, 0xb5, 0x2f, 0xfd, 0, (28 - 10) << 3, 1, 0, 0};
    struct err e = {0};
    assert_true(unpack(SLICE(wide, sizeof wide), 0, 512, 512, NULL, NULL, &e) < 0);
    assert_non_null(strstr(e.text, "cannot be unpacked"));
}

static void checksums_are_compared(void **state)
{
    (void)state;
    struct mds_hash unknown = {.algorithm = (char *)"whirl", .digest = (char *)"00"};
    struct mds_hash wrong[] = {unknown, {.algorithm = (char *)"md5", .digest = (char *)"00"}};
    struct mds_file fine = {.hashes = &unknown, .hash_count = 1}, bad = {.hashes = wrong, .hash_count = 2};
    struct buf packed = {0};
    struct err e = {0};
    pack(1, 0, &packed);
    struct slice p = SLICE(packed.p, packed.n);
    assert_int_equal(unpack(p, RAW_BYTES, 512, 512, &fine, &fine, &e), 0);
    assert_true(unpack(p, RAW_BYTES, 512, 512, &bad, &fine, &e) < 0);
    assert_non_null(strstr(e.text, "the md5 of its unpacked bytes is"));
    assert_true(unpack(p, RAW_BYTES, 512, 512, &fine, &bad, &e) < 0);
    assert_non_null(strstr(e.text, "the md5 of its packed bytes is"));
    buf_free(&packed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(comes_out_as_it_went_in),  cmocka_unit_test(every_cut_is_refused),
        cmocka_unit_test(other_bytes_are_refused),  cmocka_unit_test(other_sizes_are_refused),
        cmocka_unit_test(wide_windows_are_refused), cmocka_unit_test(checksums_are_compared),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
