/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: members become samples as people expect of WebDataset, what cannot be one is refused naming shard,
 * member and offset (cases D2, D3, D7, D8), and the index comes back or is refused. Method: archives made
 * here. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/base/hash.h"
#include "format/samples.h"
#include "tests/support/tarball.h"

static int build(enum shard_format format, uint64_t record, const uint8_t *p, size_t n, size_t piece,
                 struct samples **out, struct err *e)
{
    struct samples_builder *b;
    struct samples_source source = {
        .format = format, .shard = "train/s-0001.tar", .shard_bytes = n, .record_bytes = record};
    int r = samples_builder_create(&source, &b, e);
    if (r < 0)
        return r;
    for (size_t at = 0; r == 0 && at < n;) {
        size_t take = n - at < piece ? n - at : piece;
        uint64_t most = samples_builder_skippable(b);
        if (piece % 2 && most > 0) {
            take = most < n - at ? most : n - at;
            samples_builder_skip(b, take);
        } else {
            r = samples_builder_push(b, p + at, take, e);
        }
        at += take;
    }
    if (r == 0)
        r = samples_builder_finish(b, out, e);
    samples_builder_free(b);
    return r;
}

static struct buf archive(const char *const names[], enum tarball_dialect dialect)
{
    struct buf b = {0};
    for (int i = 0; names[i]; i++)
        tarball_file(&b, dialect, names[i], names[i], strlen(names[i]));
    tarball_end(&b);
    return b;
}

static bool has(const struct samples *s, uint64_t i, const char *key, const char *fields)
{
    char found[256] = "";
    for (uint32_t f = 0; f < samples_fields(s, i); f++) {
        struct sample_field x = samples_field(s, i, f);
        strcat(found, f ? " " : "");
        strncat(found, (const char *)x.name.p, x.name.n);
    }
    return slice_eq(samples_key(s, i), slice_str(key)) && strcmp(found, fields) == 0;
}

static const char *const usual[] = {
    "a.jpg",  "a.cls",   "b.jpg",     "b.seg.png", "v1.0/c.jpg",   "v1.0/c.JSON",    "./d.e.f/g.x.tar.gz",
    "README", ".hidden", "x/._a.jpg", "h.",        "__meta__.txt", "__worker__/a.b", "__a/b.c",
    NULL};

/* D7 and, over the dialects, D3. */
static void keys_end_at_the_first_dot_of_the_base_name(void **state)
{
    (void)state;
    for (int dialect = 0; dialect < 3; dialect++)
        for (size_t piece = 1; piece < 2000; piece += 333) {
            struct buf b = archive(usual, dialect);
            struct samples *s;
            struct err e;
            assert_int_equal(build(SHARD_TAR, 0, b.p, b.n, piece, &s, &e), 0);
            assert_int_equal(samples_count(s), 7);
            assert_true(has(s, 0, "a", "jpg cls"));
            assert_true(has(s, 1, "b", "jpg seg.png"));
            assert_true(has(s, 2, "v1.0/c", "jpg JSON"));
            assert_true(has(s, 3, "./d.e.f/g", "x.tar.gz"));
            assert_true(has(s, 4, "h", "bin"));
            assert_true(has(s, 5, "__meta__", "txt")); /* no note: its name goes on behind the "__" */
            assert_true(has(s, 6, "__a/b", "c"));
            struct sample_field f = samples_field(s, 1, 1);
            assert_true(f.bytes == 9 && memcmp(b.p + f.offset, "b.seg.png", 9) == 0);
            samples_free(s);
            buf_free(&b);
        }
}

/* D8; what is in two shards: tests/integration/test_larder_dataset.py. */
static void apart_and_twice_are_refused(void **state)
{
    (void)state;
    static const char *const apart[] = {"a.jpg", "b.jpg", "a.cls", NULL};
    static const char *const twice[] = {"a.jpg", "a.cls", "a.jpg", NULL};
    static const char *const same[] = {"d1/a.jpg", "d2/a.jpg", NULL}; /* other folder, other sample */
    struct samples *s;
    struct err e;
    struct buf b = archive(apart, TARBALL_USTAR);
    assert_int_equal(build(SHARD_TAR, 0, b.p, b.n, 512, &s, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "shard \"train/s-0001.tar\": member \"a.cls\" at offset 2048"));
    assert_non_null(strstr(e.text, "adjacent"));
    buf_free(&b);
    b = archive(twice, TARBALL_USTAR);
    assert_int_equal(build(SHARD_TAR, 0, b.p, b.n, 512, &s, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "\"a.jpg\" at offset 2048 is there twice"));
    buf_free(&b);
    b = archive(same, TARBALL_USTAR);
    assert_int_equal(build(SHARD_TAR, 0, b.p, b.n, 512, &s, &e), 0);
    assert_int_equal(samples_count(s), 2);
    samples_free(s);
    buf_free(&b);
}

static void folders_are_passed_over_and_links_refused(void **state)
{
    (void)state;
    struct samples *s;
    struct err e;
    struct buf b = {0};
    tarball_header(&b, '5', "d", 0);
    tarball_header(&b, '6', "d/pipe", 0);
    tarball_file(&b, TARBALL_GNU, "d/a.txt", "1", 1);
    size_t before = b.n;
    tarball_end(&b);
    assert_int_equal(build(SHARD_TAR, 0, b.p, b.n, 512, &s, &e), 0);
    assert_int_equal(samples_count(s), 1);
    samples_free(s);
    for (char type = '1'; type <= '2'; type++) {
        b.n = before;
        tarball_header(&b, type, "d/b.txt", 0);
        tarball_end(&b);
        assert_int_equal(build(SHARD_TAR, 0, b.p, b.n, 512, &s, &e), -ENOTSUP);
        assert_non_null(strstr(e.text, "\"d/b.txt\""));
        assert_non_null(strstr(e.text, "is a link"));
    }
    buf_free(&b);
}

static void other_formats(void **state)
{
    (void)state;
    static uint8_t bytes[1000];
    struct samples *s;
    struct err e;
    assert_int_equal(build(SHARD_WHOLE, 0, bytes, 1000, 10, &s, &e), 0);
    assert_true(samples_count(s) == 1 && has(s, 0, "s-0001.tar", "bin"));
    assert_true(samples_field(s, 0, 0).bytes == 1000 && samples_field(s, 0, 0).offset == 0);
    samples_free(s);
    assert_int_equal(build(SHARD_RECORDS, 40, bytes, 1000, 11, &s, &e), 0);
    assert_true(samples_count(s) == 25 && has(s, 24, "", "bin"));
    assert_true(samples_field(s, 24, 0).bytes == 40 && samples_field(s, 24, 0).offset == 960);
    samples_free(s);
    assert_int_equal(build(SHARD_RECORDS, 40, bytes, 0, 11, &s, &e), 0);
    assert_true(samples_count(s) == 0);
    samples_free(s);
    assert_int_equal(build(SHARD_RECORDS, 41, bytes, 1000, 11, &s, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "no whole number"));
    assert_int_equal(build(SHARD_RECORDS, 0, bytes, 1000, 11, &s, &e), -EINVAL);
    assert_int_equal(build(SHARD_TAR, 0, bytes, 512, 512, &s, &e), 0); /* a block of zeros */
    assert_true(samples_count(s) == 0);
    samples_free(s);
    assert_int_equal(build(SHARD_TAR, 0, bytes, 0, 512, &s, &e), -EBADMSG);
}

static void index_comes_back(void **state)
{
    (void)state;
    struct buf b = archive(usual, TARBALL_PAX), enc = {0};
    struct samples *s, *t;
    struct err e;
    assert_int_equal(build(SHARD_TAR, 0, b.p, b.n, 512, &s, &e), 0);
    assert_int_equal(samples_encode(s, &enc, &e), 0);
    uint8_t *copy = malloc(enc.n);
    memcpy(copy, enc.p, enc.n);
    assert_int_equal(samples_decode(copy, enc.n, b.n, &t, &e), 0);
    memset(copy, 0, enc.n);
    free(copy);
    assert_int_equal(samples_count(t), samples_count(s));
    for (uint64_t i = 0; i < samples_count(s); i++) {
        assert_true(slice_eq(samples_key(s, i), samples_key(t, i)));
        assert_int_equal(samples_fields(s, i), samples_fields(t, i));
        for (uint32_t f = 0; f < samples_fields(s, i); f++) {
            struct sample_field x = samples_field(s, i, f), y = samples_field(t, i, f);
            assert_true(slice_eq(x.name, y.name) && x.offset == y.offset && x.bytes == y.bytes);
        }
    }
    struct buf again = {0};
    assert_int_equal(samples_encode(t, &again, &e), 0);
    samples_free(t);
    assert_true(again.n == enc.n && memcmp(again.p, enc.p, enc.n) == 0);
    assert_int_equal(samples_decode(enc.p, enc.n, b.n + 1, &t, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "import it again"));
    samples_free(s);
    /* Other formats too. */
    buf_reset(&enc);
    struct samples *r;
    assert_int_equal(build(SHARD_RECORDS, 8, b.p, 800, 512, &s, &e), 0);
    assert_int_equal(samples_encode(s, &enc, &e), 0);
    assert_int_equal(samples_decode(enc.p, enc.n, 800, &r, &e), 0);
    assert_true(samples_count(r) == 100);
    samples_free(r);
    samples_free(s);
    buf_reset(&enc);
    assert_int_equal(build(SHARD_WHOLE, 0, b.p, 800, 512, &s, &e), 0);
    assert_int_equal(samples_encode(s, &enc, &e), 0);
    assert_int_equal(samples_decode(enc.p, enc.n, 800, &r, &e), 0);
    assert_true(samples_count(r) == 1 && has(r, 0, "s-0001.tar", "bin"));
    samples_free(r);
    samples_free(s);
    buf_free(&b);
    buf_free(&enc);
    buf_free(&again);
}

/* Bytes of the body changed and summed again: refused, or every promise kept. */
static void hostile_indexes_keep_their_promises(void **state)
{
    (void)state;
    struct buf b = archive(usual, TARBALL_USTAR), enc = {0};
    struct samples *s;
    struct err e;
    assert_int_equal(build(SHARD_TAR, 0, b.p, b.n, 512, &s, &e), 0);
    assert_int_equal(samples_encode(s, &enc, &e), 0);
    samples_free(s);
    for (size_t n = 0; n < enc.n; n++)
        assert_int_equal(samples_decode(enc.p, n, b.n, &s, NULL), -EBADMSG);
    static const uint8_t values[] = {0, 1, 2, 0x7f, 0xff};
    int accepted = 0;
    for (size_t i = 40; i < enc.n; i++)
        for (size_t v = 0; v < sizeof values; v++) {
            uint8_t was = enc.p[i];
            enc.p[i] = values[v];
            struct hash128 h = hash128(enc.p + 16, enc.n - 16);
            memcpy(enc.p, h.bytes, 16);
            if (samples_decode(enc.p, enc.n, b.n, &s, NULL) == 0) {
                accepted++;
                for (uint64_t k = 0; k < samples_count(s); k++)
                    for (uint32_t f = 0; f < samples_fields(s, k); f++) {
                        struct sample_field x = samples_field(s, k, f);
                        assert_true(x.offset <= b.n && x.bytes <= b.n - x.offset && x.name.n > 0);
                    }
                samples_free(s);
            }
            enc.p[i] = was;
        }
    assert_true(accepted > 0);
    buf_free(&b);
    buf_free(&enc);
}

static void many_samples_are_quick(void **state)
{
    (void)state;
    enum { COUNT = 100000 };
    struct buf b = {0}, enc = {0};
    struct samples *s;
    struct err e;
    for (int i = 0; i < COUNT; i++) {
        char name[32];
        snprintf(name, sizeof name, "%08d.txt", i);
        tarball_file(&b, TARBALL_USTAR, name, "x", 1);
    }
    tarball_end(&b);
    assert_int_equal(build(SHARD_TAR, 0, b.p, b.n, 65536, &s, &e), 0);
    assert_int_equal(samples_encode(s, &enc, &e), 0);
    samples_free(s);
    assert_int_equal(samples_decode(enc.p, enc.n, b.n, &s, &e), 0);
    assert_int_equal(samples_count(s), COUNT);
    assert_true(has(s, COUNT - 1, "00099999", "txt"));
    samples_free(s);
    buf_free(&b);
    buf_free(&enc);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_end_at_the_first_dot_of_the_base_name),
        cmocka_unit_test(apart_and_twice_are_refused),
        cmocka_unit_test(folders_are_passed_over_and_links_refused),
        cmocka_unit_test(other_formats),
        cmocka_unit_test(index_comes_back),
        cmocka_unit_test(hostile_indexes_keep_their_promises),
        cmocka_unit_test(many_samples_are_quick),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
