/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: safetensors headers are read with every check that the format asks for, and what is written can be
 * read (cases S1, S2, S9, S11). Method: good and bad headers by hand, all cuts and damaged bytes of one. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/safetensors.h"

static int parse(const char *json, uint64_t data_bytes, struct safetensors *st, struct err *e)
{
    size_t n = strlen(json);
    char *exact = malloc(n); /* not terminated */
    memcpy(exact, json, n);
    int r = safetensors_parse(exact, n, 8 + n + data_bytes, st, e);
    free(exact);
    return r;
}

static void reads_what_is_right(void **state)
{
    (void)state;
    struct safetensors st;
    struct err e = {0};
    assert_int_equal(parse("{\"__metadata__\":{\"format\":\"pt\",\"k\":\"\"},"
                           "\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[8,32]},"
                           "\"a/\\u00e9\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
                           "\"none\":{\"shape\":[2,0],\"data_offsets\":[0,0],\"dtype\":\"BF16\"},"
                           "\"nil\":{\"dtype\":\"F64\",\"shape\":[0],\"data_offsets\":[0,0]},"
                           "\"f4\":{\"dtype\":\"F4\",\"shape\":[2,2],\"data_offsets\":[32,34]}}     ",
                           34, &st, &e),
                     0);
    assert_int_equal(st.count, 5);
    assert_true(st.entries[2].begin == 0 && st.entries[2].end == 8 && st.entries[2].dims == 0);
    assert_string_equal(st.entries[2].name, "a/\xc3\xa9");
    assert_string_equal(st.entries[3].name, "b");
    assert_true(st.entries[3].dtype == DTYPE_F32 && st.entries[3].dims == 2 && st.entries[3].shape[1] == 3);
    assert_int_equal(st.metadata_pairs, 2);
    assert_string_equal(st.metadata[0], "format");
    assert_string_equal(st.metadata[1], "pt");
    assert_true(st.data_bytes == 34);
    safetensors_free(&st);
    assert_int_equal(parse("{}", 0, &st, &e), 0);
    assert_int_equal(st.count, 0);
    safetensors_free(&st);
}

#define T(name, dtype, shape, range) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" range "}"

static void refuses_what_is_not(void **state)
{
    (void)state;
    static const struct {
        const char *json;
        uint64_t data;
        const char *word;
    } bad[] = {
        {" {}", 0, "does not begin with {"},
        {"[]", 0, "does not begin with {"},
        {"{}x", 0, "no JSON"},
        {"{\"a\":}", 0, "no JSON"},
        {"{" T("a", "F32", "[1]", "[0,4]") "," T("a", "F32", "[1]", "[4,8]") "}", 8, "duplicate"},
        {"{" T("a", "F32", "[1]", "[0,4]") "," T("b", "F32", "[1]", "[8,12]") "}", 12, "there is a hole"},
        {"{" T("a", "F32", "[1]", "[4,8]") "}", 8, "there is a hole"},
        {"{" T("a", "F32", "[2]", "[0,8]") "," T("b", "F32", "[1]", "[4,8]") "}", 8, "they overlap"},
        {"{" T("a", "F32", "[1]", "[0,4]") "," T("b", "F32", "[1]", "[0,4]") "}", 4, "they overlap"},
        {"{" T("a", "F32", "[2]", "[0,8]") "}", 7, "ends at 8, the data at 7"},
        {"{" T("a", "F32", "[2]", "[0,8]") "}", 9, "the data at 9"},
        {"{" T("a", "F32", "[3]", "[0,8]") "}", 8, "does not fit 3 elements"},
        {"{" T("a", "F32", "[2]", "[8,0]") "}", 8, "does not fit"},
        {"{" T("a", "F31", "[2]", "[0,8]") "}", 8, "\"F31\""},
        {"{" T("a", "F4", "[3]", "[0,2]") "}", 2, "whole bytes"},
        {"{" T("a", "F32", "[-1]", "[0,4]") "}", 4, "whole numbers"},
        {"{" T("a", "F32", "[1.0]", "[0,4]") "}", 4, "whole numbers"},
        {"{" T("a", "F32", "[1]", "[0.0,4]") "}", 4, "is not described"},
        {"{" T("a", "F32", "[1]", "[0,4,8]") "}", 4, "is not described"},
        {"{" T("a", "F32", "1", "[0,4]") "}", 4, "no shape"},
        {"{" T("a", "F32", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "16 dimensions"},
        {"{" T("a", "U8", "[4294967296,4294967296]", "[0,0]") "}", 0, "64 bits"},
        {"{" T("a", "U8", "[99999999999999999999]", "[0,0]") "}", 0, "too big integer"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":1}}", 1, "nothing else"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "is not described"},
        {"{\"a\":3}", 1, "is not described"},
        {"{" T("", "U8", "[1]", "[0,1]") "}", 1, "name of no bytes"},
        {"{" T("a\\u0000b", "U8", "[1]", "[0,1]") "}", 1, "no JSON"},
        {"{" T("\xff", "U8", "[1]", "[0,1]") "}", 1, "no JSON"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "no string"},
        {"{\"__metadata__\":[]}", 0, "no map"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct safetensors st;
        struct err e = {0};
        assert_int_equal(parse(bad[i].json, bad[i].data, &st, &e), -EBADMSG);
        if (!strstr(e.text, bad[i].word))
            print_error("%s: %s\n", bad[i].json, e.text);
        assert_non_null(strstr(e.text, bad[i].word));
    }
}

static void header_length_is_held_to_its_limits(void **state)
{
    (void)state;
    uint8_t first[8];
    uint64_t n;
    struct err e;
    le64_put(first, 100);
    assert_int_equal(safetensors_header_bytes(first, 108, &n, &e), 0);
    assert_true(n == 100);
    assert_int_equal(safetensors_header_bytes(first, 107, &n, &e), -EBADMSG);
    assert_int_equal(safetensors_header_bytes(first, 3, &n, &e), -EBADMSG);
    le64_put(first, 100000001);
    assert_int_equal(safetensors_header_bytes(first, 1ull << 40, &n, &e), -EBADMSG);
    le64_put(first, UINT64_MAX);
    assert_int_equal(safetensors_header_bytes(first, UINT64_MAX, &n, &e), -EBADMSG);
    le64_put(first, 0);
    assert_int_equal(safetensors_header_bytes(first, 8, &n, &e), -EBADMSG);
}

static void what_is_written_can_be_read(void **state)
{
    (void)state;
    struct safetensors_entry x[3] = {
        {.name = "w\"\\\n\x01 \xc3\xa9",
         .dtype = DTYPE_F8_E4M3,
         .dims = 2,
         .shape = {5, 1ull << 40},
         .begin = 0,
         .end = 5ull << 40},
        {.name = "s", .dtype = DTYPE_BF16, .begin = 5ull << 40, .end = (5ull << 40) + 2},
        {.name = "e", .dtype = DTYPE_BOOL, .dims = 1, .begin = 5ull << 40, .end = 5ull << 40},
    };
    char *pairs[] = {"run", "a\tb", "step", "1"};
    struct safetensors st = {.entries = x, .count = 3, .metadata = pairs, .metadata_pairs = 2}, back;
    struct buf b = {0};
    struct err e = {0};
    uint64_t n;
    assert_int_equal(safetensors_write(&st, &b, &e), 0);
    assert_int_equal(b.n % 8, 0);
    uint64_t file = b.n + (5ull << 40) + 2;
    assert_int_equal(safetensors_header_bytes(b.p, file, &n, &e), 0);
    assert_true(n == b.n - 8);
    assert_int_equal(safetensors_parse(b.p + 8, n, file, &back, &e), 0);
    assert_int_equal(back.count, 3);
    assert_string_equal(back.entries[0].name, x[0].name);
    assert_true(back.entries[0].shape[1] == 1ull << 40 && back.data_offset == b.n);
    assert_string_equal(back.entries[1].name, "e");
    assert_string_equal(back.metadata[1], "a\tb");
    safetensors_free(&back);
    for (size_t i = 0; i < b.n - 8; i++) { /* damage never harms */
        uint8_t was = b.p[8 + i];
        for (int bit = 0; bit < 8; bit++) {
            b.p[8 + i] = was ^ (uint8_t)(1 << bit);
            if (safetensors_parse(b.p + 8, n, file, &back, &e) == 0)
                safetensors_free(&back);
        }
        b.p[8 + i] = was;
        assert_int_equal(safetensors_parse(b.p + 8, i, file, &back, &e), -EBADMSG);
    }
    size_t kept = b.n;
    x[2].name = "s";
    assert_int_equal(safetensors_write(&st, &b, &e), -EINVAL);
    assert_non_null(strstr(e.text, "duplicate"));
    x[2].name = "__metadata__";
    assert_int_equal(safetensors_write(&st, &b, &e), -EINVAL);
    x[2].name = "\xff";
    assert_int_equal(safetensors_write(&st, &b, &e), -EINVAL);
    x[2].name = "e", x[1].begin++, x[1].end++;
    assert_int_equal(safetensors_write(&st, &b, &e), -EINVAL);
    assert_non_null(strstr(e.text, "hole"));
    assert_int_equal(b.n, kept);
    buf_free(&b);
}

static void many_tensors(void **state)
{
    (void)state;
    enum { COUNT = 50000 };
    struct safetensors_entry *x = calloc(COUNT, sizeof *x);
    char(*names)[24] = calloc(COUNT, sizeof *names);
    for (int i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], "layer.%d", i);
        x[i] = (struct safetensors_entry){.name = names[i],
                                          .dtype = DTYPE_U8,
                                          .dims = 1,
                                          .shape = {3},
                                          .begin = 3ull * (uint64_t)i,
                                          .end = 3ull * (uint64_t)i + 3};
    }
    struct safetensors st = {.entries = x, .count = COUNT}, back;
    struct buf b = {0};
    assert_int_equal(safetensors_write(&st, &b, NULL), 0);
    assert_int_equal(safetensors_parse(b.p + 8, b.n - 8, b.n + 3ull * COUNT, &back, NULL), 0);
    assert_int_equal(back.count, COUNT);
    assert_string_equal(back.entries[COUNT - 1].name, "layer.49999");
    safetensors_free(&back);
    buf_free(&b);
    free(names);
    free(x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_what_is_right),
        cmocka_unit_test(refuses_what_is_not),
        cmocka_unit_test(header_length_is_held_to_its_limits),
        cmocka_unit_test(what_is_written_can_be_read),
        cmocka_unit_test(many_tensors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
