/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: documents and windows of Megatron token files come out where they lie, for every dtype code; an .idx
 * that is cut, damaged, of another version or not of its .bin is refused with what was expected and found
 * (D16). Method: indexes made here, pushed in pieces, then each of their bytes changed.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/samples.h"
#include "tests/support/mosaic.h"

static const int32_t lengths[] = {3, 5, 0, 7, 1, 10};
static const int64_t borders[] = {0, 2, 2, 3, 6}; /* 8 tokens, none, none, 18 */
enum { SEQUENCES = 6, BORDERS = 5, TOKENS = 26 };

static struct buf usual(uint8_t code)
{
    struct buf b = {0};
    mosaic_idx(&b, code, tokens_width(code), lengths, SEQUENCES, borders, BORDERS);
    return b;
}

static int build(const struct buf *idx, uint64_t bin_bytes, struct token_window window, size_t piece,
                 struct samples **out, struct err *e)
{
    struct samples_source source = {.format = SHARD_TOKENS,
                                    .shard = "text.bin",
                                    .shard_bytes = bin_bytes,
                                    .idx_bytes = idx->n,
                                    .window = window};
    struct samples_builder *b;
    int r = samples_builder_create(&source, &b, e);
    if (r < 0)
        return r;
    for (size_t at = 0; r == 0 && at < idx->n; at += piece) {
        size_t take = idx->n - at < piece ? idx->n - at : piece;
        uint8_t *exact = malloc(take);
        memcpy(exact, idx->p + at, take);
        assert_int_equal(samples_builder_skippable(b), 0);
        r = samples_builder_push(b, exact, take, e);
        free(exact);
    }
    if (r == 0)
        r = samples_builder_finish(b, out, e);
    samples_builder_free(b);
    return r;
}

static void assert_sample(const struct samples *s, uint64_t i, const char *type, uint64_t offset,
                          uint64_t bytes)
{
    struct sample_field f = samples_field(s, i, 0);
    assert_true(samples_fields(s, i) == 1 && samples_key(s, i).n == 0);
    assert_true(slice_eq(f.name, slice_str("tokens")) && slice_eq(f.type, slice_str(type)));
    assert_int_equal(f.offset, offset);
    assert_int_equal(f.bytes, bytes);
}

static struct samples *again(struct samples *s, uint64_t shard_bytes)
{
    struct buf b = {0};
    struct samples *t;
    struct err e;
    assert_int_equal(samples_encode(s, &b, &e), 0);
    if (samples_decode(b.p, b.n, shard_bytes, &t, &e) < 0)
        fail_msg("%s", e.text);
    assert_int_equal(samples_count(s), samples_count(t));
    samples_free(s);
    buf_free(&b);
    return t;
}

static void every_dtype_code(void **state)
{
    (void)state;
    static const struct {
        const char *type;
        unsigned width;
    } codes[] = {{NULL, 0},    {"uint8", 1},   {"int8", 1},    {"int16", 2}, {"int32", 4},
                 {"int64", 8}, {"float64", 8}, {"float32", 4}, {"uint16", 2}};
    for (unsigned code = 1; code <= TOKENS_CODES; code++)
        for (size_t piece = 1; piece < 300; piece += 37) {
            struct buf b = usual((uint8_t)code);
            uint64_t w = codes[code].width;
            struct samples *s;
            struct err e;
            if (build(&b, TOKENS * w, (struct token_window){0}, piece, &s, &e) < 0)
                fail_msg("code %u: %s", code, e.text);
            s = again(s, TOKENS * w);
            assert_int_equal(samples_count(s), 4);
            assert_sample(s, 0, codes[code].type, 0, 8 * w);
            assert_sample(s, 1, codes[code].type, 8 * w, 0); /* documents without tokens stay samples */
            assert_sample(s, 2, codes[code].type, 8 * w, 0);
            assert_sample(s, 3, codes[code].type, 8 * w, 18 * w);
            samples_free(s);
            buf_free(&b);
        }
    assert_int_equal(tokens_width(0), 0);
    assert_int_equal(tokens_width(9), 0);
    assert_null(tokens_type(9));
}

/* Sample i is the tokens [i W, i W + W + extra), across documents. */
static void windows(void **state)
{
    (void)state;
    static const struct {
        struct token_window window;
        uint64_t count;
    } cases[] = {{{1, 0}, 26}, {{1, 1}, 25}, {{5, 0}, 5},  {{5, 1}, 5},
                 {{5, 2}, 4},  {{13, 0}, 2}, {{13, 1}, 1}, {{26, 0}, 1},
                 {{26, 1}, 0}, {{25, 1}, 1}, {{27, 0}, 0}, {{TOKEN_WINDOW_MAX, 1}, 0}};
    struct buf b = usual(8);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct samples *s;
        struct err e;
        assert_int_equal(build(&b, 2 * TOKENS, cases[i].window, 50, &s, &e), 0);
        s = again(s, 2 * TOKENS);
        assert_int_equal(samples_count(s), cases[i].count);
        for (uint64_t k = 0; k < cases[i].count; k++)
            assert_sample(s, k, "uint16", 2 * k * cases[i].window.tokens,
                          2 * (cases[i].window.tokens + cases[i].window.extra));
        samples_free(s);
    }
    buf_free(&b);
}

static void window_texts(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool good;
        uint64_t tokens, extra;
    } cases[] = {{"2048", true, 2048, 0},     {"2048+1", true, 2048, 1},
                 {"7+7", true, 7, 7},         {"7+8", false, 0, 0},
                 {"0", false, 0, 0},          {"", false, 0, 0},
                 {"+1", false, 0, 0},         {"5+", false, 0, 0},
                 {"5 ", false, 0, 0},         {"4294967296", true, 1ull << 32, 0},
                 {"4294967297", false, 0, 0}, {"99999999999999999999999", false, 0, 0},
                 {"-1", false, 0, 0},         {"5+1+1", false, 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct token_window w;
        bool good = token_window_parse(cases[i].text, &w);
        if (good != cases[i].good || (good && (w.tokens != cases[i].tokens || w.extra != cases[i].extra)))
            fail_msg("\"%s\"", cases[i].text);
    }
}

enum { AT_VERSION = 9, AT_CODE = 17, AT_SEQUENCES = 18, AT_BORDERS = 26, AT_LENGTHS = 34 };
enum { AT_STARTS = AT_LENGTHS + 4 * SEQUENCES, AT_DOCUMENTS = AT_STARTS + 8 * SEQUENCES };

/* D16. */
static void a_wrong_pair_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *word;
        size_t at;
        uint64_t value;
        int bytes, rc;
        uint64_t bin; /* 0: as it should be */
    } cases[] = {
        {"its sequences have 52 bytes, the .bin has 53", 0, 'M', 1, -EBADMSG, 53},
        {"the .bin has 50", 0, 'M', 1, -EBADMSG, 50}, /* past its end */
        {"the .bin has 4", 0, 'M', 1, -EBADMSG, 4},
        {"expected \"MMIDIDX\"", 0, 'N', 1, -EBADMSG, 0},
        {"version 2, this larder knows version 1", AT_VERSION, 2, 8, -EPROTONOSUPPORT, 0},
        {"dtype code 0", AT_CODE, 0, 1, -EBADMSG, 0},
        {"dtype code 9; codes from 1 (uint8) to 8 (uint16) exist", AT_CODE, 9, 1, -EBADMSG, 0},
        {"begins at byte 6, the one before it ends at 12", AT_CODE, 4, 1, -EBADMSG, 0},
        {"7 sequences and 5", AT_SEQUENCES, 7, 8, -EBADMSG, 0},
        {"sequences and 5", AT_SEQUENCES, UINT64_MAX, 8, -EBADMSG, 0},
        {"6 sequences and 6", AT_BORDERS, 6, 8, -EBADMSG, 0},
        {"document borders do not make", AT_BORDERS, 1ull << 61, 8, -EBADMSG, 0},
        {"sequence 0 has -1 tokens", AT_LENGTHS, UINT32_MAX, 4, -EBADMSG, 0},
        {"sequence 1 begins at byte 6, the one before it ends at 8", AT_LENGTHS, 4, 4, -EBADMSG, 0},
        {"sequence 0 begins at byte 2", AT_STARTS, 2, 8, -EBADMSG, 0},
        {"sequence 5 begins at byte -1", AT_STARTS + 40, UINT64_MAX, 8, -EBADMSG, 0},
        {"border 0 is sequence 1; from 0 to 0", AT_DOCUMENTS, 1, 8, -EBADMSG, 0},
        {"border 2 is sequence 1; from 2 to 6", AT_DOCUMENTS + 16, 1, 8, -EBADMSG, 0},
        {"border 4 is sequence 7; from 3 to 6", AT_DOCUMENTS + 32, 7, 8, -EBADMSG, 0},
        {"the documents end with sequence 5, there are 6", AT_DOCUMENTS + 32, 5, 8, -EBADMSG, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct buf b = usual(8);
        struct samples *s;
        struct err e = {0};
        for (int k = 0; k < cases[i].bytes; k++)
            b.p[cases[i].at + (size_t)k] = (uint8_t)(cases[i].value >> 8 * k);
        int r = build(&b, cases[i].bin ? cases[i].bin : 2 * TOKENS, (struct token_window){0}, 11, &s, &e);
        if (r != cases[i].rc || !strstr(e.text, cases[i].word) || !strstr(e.text, "shard \"text.bin\""))
            fail_msg("case %zu: %d: %s", i, r, e.text);
        buf_free(&b);
    }
}

static void cut_and_longer_ones_are_refused(void **state)
{
    (void)state;
    struct buf b = usual(4);
    struct samples *s;
    struct err e;
    size_t whole = b.n;
    for (b.n = 0; b.n < whole; b.n++)
        assert_int_equal(build(&b, 4 * TOKENS, (struct token_window){0}, 1000, &s, &e), -EBADMSG);
    /* A byte for each sequence may follow: what kind it is of, where there are several. */
    for (int i = 0; i < SEQUENCES; i++)
        buf_u8(&b, 1);
    assert_int_equal(build(&b, 4 * TOKENS, (struct token_window){0}, 1, &s, &e), 0);
    samples_free(s);
    buf_u8(&b, 1);
    assert_int_equal(build(&b, 4 * TOKENS, (struct token_window){0}, 1, &s, &e), -EBADMSG);
    buf_free(&b);
}

static void no_documents(void **state)
{
    (void)state;
    static const int64_t only[] = {0};
    struct buf b = {0};
    struct samples *s;
    struct err e;
    mosaic_idx(&b, 8, 2, lengths, 0, only, 1);
    assert_int_equal(build(&b, 0, (struct token_window){0}, 7, &s, &e), 0);
    s = again(s, 0);
    assert_int_equal(samples_count(s), 0);
    samples_free(s);
    assert_int_equal(build(&b, 0, (struct token_window){.tokens = 3}, 7, &s, &e), 0);
    assert_int_equal(samples_count(s), 0);
    samples_free(s);
    buf_free(&b);
}

/* Each byte changed: refused, or every promise kept. */
static void random_damage_never_harms(void **state)
{
    (void)state;
    static const uint8_t values[] = {0, 1, 2, 0x7f, 0xff};
    struct buf b = usual(3);
    for (size_t i = 0; i < b.n; i++)
        for (size_t v = 0; v < sizeof values; v++) {
            struct samples *s;
            struct err e;
            uint8_t was = b.p[i];
            b.p[i] = values[v];
            if (build(&b, 2 * TOKENS, (struct token_window){0}, 1 + i % 60, &s, &e) == 0) {
                for (uint64_t k = 0; k < samples_count(s); k++) {
                    struct sample_field f = samples_field(s, k, 0);
                    assert_true(f.offset <= 2 * TOKENS && f.bytes <= 2 * TOKENS - f.offset);
                }
                samples_free(s);
            }
            b.p[i] = was;
        }
    buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_dtype_code),
        cmocka_unit_test(windows),
        cmocka_unit_test(window_texts),
        cmocka_unit_test(a_wrong_pair_is_refused),
        cmocka_unit_test(cut_and_longer_ones_are_refused),
        cmocka_unit_test(no_documents),
        cmocka_unit_test(random_damage_never_harms),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
