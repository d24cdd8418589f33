/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: what goes in comes out, for every dtype, length and pattern of bits; ratios are what the design
 * promises; and a decoder given any bytes gives an error or exactly its plain bytes, never more. Method:
 * round trips, and payloads with random damage, in buffers that end where the promise ends (run it under
 * ASan). */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/codec.h"
#include "format/codec_planes.h"
#include "format/limits.h"

static struct codec_state *state;
static uint64_t seed = 0x853c49e6748fea9bull;

static uint64_t next(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

/* Close enough to a normal distribution: the sum of twelve uniform ones. */
static float normal(void)
{
    float sum = -6;
    for (int i = 0; i < 12; i++)
        sum += (float)(next() >> 40) * 0x1p-24f;
    return sum;
}

static size_t unit_of(enum dtype dtype)
{
    unsigned bits = dtype_bits(dtype);
    return bits % 8 == 0 ? bits / 8 : 1;
}

struct packed {
    uint8_t *p;
    size_t n;
    enum codec codec;
};

/* The payload in memory of exactly its size. */
static struct packed encode(enum codec_level level, enum dtype dtype, const uint8_t *plain, size_t n)
{
    struct packed x = {.n = SIZE_MAX, .codec = CODEC_COUNT};
    struct err e;
    uint8_t *out = malloc(codec_payload_max(n));
    struct hash128 found, want = hash128(plain, n);
    assert_int_equal(codec_encode(state, level, dtype, plain, n, out, &x.n, &x.codec, &found, &e), 0);
    assert_memory_equal(&found, &want, sizeof want);
    assert_true(x.n <= n);
    assert_in_range(x.codec, 0, CODEC_COUNT - 1);
    x.p = malloc(x.n + !x.n);
    memcpy(x.p, out, x.n);
    free(out);
    return x;
}

static size_t round_trip(enum codec_level level, enum dtype dtype, const uint8_t *plain, size_t n,
                         enum codec *codec)
{
    struct packed x = encode(level, dtype, plain, n);
    uint8_t *back = malloc(n);
    struct err e;
    memset(back, 0xa5, n);
    struct hash128 found, want = hash128(plain, n);
    assert_int_equal(codec_decode(state, x.codec, dtype, x.p, x.n, back, n, &found, &e), 0);
    assert_memory_equal(back, plain, n);
    assert_memory_equal(&found, &want, sizeof want);
    free(back);
    free(x.p);
    if (codec)
        *codec = x.codec;
    return x.n;
}

/* Fills with one of several kinds of data that real tensors hold. */
static void fill(uint8_t *p, size_t n, enum dtype dtype, int kind)
{
    size_t unit = unit_of(dtype);
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)next();
    for (size_t i = 0; i + unit <= n; i += unit)
        switch (kind) {
        case 0: break;                                                       /* noise */
        case 1: memset(p + i, 0, unit), p[i] = (uint8_t)(next() % 5); break; /* small numbers */
        case 2: /* narrow exponents */ p[i + unit - 1] = (uint8_t)(0x3c + next() % 4); break;
        case 3: /* mostly zero */
            if (next() % 10)
                memset(p + i, 0, unit);
            break;
        case 4: memset(p + i, next() % 2 ? 0xff : 0, unit); break; /* -1, 0, NaN */
        }
}

static void every_dtype_every_short_length(void **unused)
{
    (void)unused;
    uint8_t plain[16 * 300];
    for (unsigned dtype = 1; dtype < DTYPE_COUNT; dtype++)
        for (size_t elements = 1; elements <= 300; elements++)
            for (int kind = (int)(elements % 2); kind < 5; kind += 2) {
                size_t n = elements * unit_of(dtype);
                fill(plain, n, dtype, kind);
                round_trip(CODEC_LEVEL_FAST, dtype, plain, n, NULL);
                if (elements % 7 == 0)
                    round_trip(CODEC_LEVEL_DENSE, dtype, plain, n, NULL);
            }
}

static void lengths_around_borders(void **unused)
{
    (void)unused;
    static const size_t borders[] = {512, 4096, 65536, 262144};
    uint8_t *plain = malloc(CHUNK_PLAIN_BYTES_MAX);
    for (size_t i = 0; i < sizeof borders / sizeof *borders; i++)
        for (int off = -2; off <= 2; off++)
            for (int kind = 0; kind < 5; kind++) {
                size_t elements = borders[i] / 2 + (size_t)off;
                fill(plain, elements * 2, DTYPE_BF16, kind);
                round_trip(CODEC_LEVEL_FAST, DTYPE_BF16, plain, elements * 2, NULL);
            }
    fill(plain, CHUNK_PLAIN_BYTES_MAX, DTYPE_F64, 2);
    round_trip(CODEC_LEVEL_FAST, DTYPE_F64, plain, CHUNK_PLAIN_BYTES_MAX, NULL);
    fill(plain, CHUNK_PLAIN_BYTES_MAX - 2, DTYPE_BF16, 2);
    round_trip(CODEC_LEVEL_DENSE, DTYPE_BF16, plain, CHUNK_PLAIN_BYTES_MAX - 2, NULL);
    free(plain);
}

static void every_pattern_of_16_bits(void **unused)
{
    (void)unused;
    static uint8_t plain[2 * 65536 * 8];
    for (unsigned i = 0; i < 65536 * 8; i++) { /* each once, amid many alike, so that planes is chosen */
        uint16_t v = i % 8 == 3 ? (uint16_t)(i / 8) : (uint16_t)(0x3f80 + next() % 64);
        memcpy(plain + 2 * (size_t)i, &v, 2);
    }
    enum codec codec;
    enum dtype types[] = {DTYPE_BF16, DTYPE_F16, DTYPE_I16, DTYPE_U16};
    for (size_t i = 0; i < 4; i++) {
        assert_true(round_trip(CODEC_LEVEL_FAST, types[i], plain, sizeof plain, &codec) < sizeof plain);
        round_trip(CODEC_LEVEL_DENSE, types[i], plain, sizeof plain, &codec);
    }
}

static void special_floats_keep_their_bits(void **unused)
{
    (void)unused;
    static const uint32_t special[] = {0x00000000, 0x80000000, 0x7f800000, 0xff800000,
                                       0x7fc00001, 0xffc12345, 0x7f800001, 0x00000001,
                                       0x807fffff, 0x00800000, 0x7f7fffff, 0x3f800000};
    static uint32_t plain[20000];
    for (size_t i = 0; i < 20000; i++) {
        float f = normal();
        memcpy(&plain[i], &f, 4);
        if (next() % 20 == 0)
            plain[i] = special[next() % (sizeof special / sizeof *special)];
    }
    enum codec codec;
    round_trip(CODEC_LEVEL_FAST, DTYPE_F32, (uint8_t *)plain, sizeof plain, &codec);
    assert_int_equal(codec, CODEC_PLANES);
    round_trip(CODEC_LEVEL_DENSE, DTYPE_F32, (uint8_t *)plain, sizeof plain, &codec);
    assert_int_equal(codec, CODEC_PLANES);
}

static void weights_shrink_as_promised(void **unused)
{
    (void)unused;
    size_t n = CHUNK_PLAIN_BYTES_MAX;
    uint8_t *plain = malloc(n);
    for (size_t i = 0; i < n / 2; i++) {
        float f = normal() * 0.02f;
        memcpy(plain + 2 * i, (uint8_t *)&f + 2, 2);
    }
    enum codec codec;
    assert_true(round_trip(CODEC_LEVEL_FAST, DTYPE_BF16, plain, n, &codec) < n * 0.685);
    assert_int_equal(codec, CODEC_PLANES);
    assert_true(round_trip(CODEC_LEVEL_DENSE, DTYPE_BF16, plain, n, &codec) < n * 0.6725);
    for (size_t i = 0; i < n / 4; i++) {
        float f = normal();
        memcpy(plain + 4 * i, &f, 4);
    }
    assert_true(round_trip(CODEC_LEVEL_FAST, DTYPE_F32, plain, n, &codec) < n * 0.85);
    for (size_t i = 0; i < n / 4; i++)
        memset(plain + 4 * i, 0, 2); /* what was bf16 once */
    assert_true(round_trip(CODEC_LEVEL_FAST, DTYPE_F32, plain, n, &codec) < n * 0.40);
    for (size_t i = 0; i < n / 8; i++) {
        uint64_t token = next() % 50257;
        memcpy(plain + 8 * i, &token, 8);
    }
    assert_true(round_trip(CODEC_LEVEL_FAST, DTYPE_I64, plain, n, &codec) < n * 0.26);
    for (size_t i = 0; i < n; i++)
        plain[i] = (uint8_t) "the quick brown fox jumps over the lazy dog "[(i * i / 700) % 44];
    assert_true(round_trip(CODEC_LEVEL_FAST, DTYPE_U8, plain, n, &codec) < n * 0.7);
    assert_int_equal(codec, CODEC_ZSTD);
    free(plain);
}

static void simplest_codec_wins(void **unused)
{
    (void)unused;
    uint8_t plain[960] = {0};
    enum codec codec;
    for (unsigned dtype = 1; dtype < DTYPE_COUNT; dtype++) {
        assert_int_equal(round_trip(CODEC_LEVEL_FAST, dtype, plain, sizeof plain, &codec), 0);
        assert_int_equal(codec, CODEC_ZERO);
    }
    for (size_t i = 0; i < sizeof plain; i += 4)
        memcpy(plain + i, "\0\0\x80\x3f", 4); /* 1.0f */
    assert_int_equal(round_trip(CODEC_LEVEL_FAST, DTYPE_F32, plain, sizeof plain, &codec), 4);
    assert_int_equal(codec, CODEC_CONSTANT);
    assert_int_equal(round_trip(CODEC_LEVEL_FAST, DTYPE_C128, plain, sizeof plain, &codec), 16);
    assert_int_equal(codec, CODEC_CONSTANT);
    assert_int_equal(round_trip(CODEC_LEVEL_OFF, DTYPE_F32, plain, sizeof plain, &codec), sizeof plain);
    assert_int_equal(codec, CODEC_RAW);
    fill(plain, sizeof plain, DTYPE_U8, 0);
    assert_int_equal(round_trip(CODEC_LEVEL_FAST, DTYPE_U8, plain, sizeof plain, &codec), sizeof plain);
    assert_int_equal(codec, CODEC_RAW);
    struct err e;
    size_t n;
    uint8_t out[2048];
    assert_int_equal(codec_encode(state, CODEC_LEVEL_FAST, DTYPE_F32, plain, 7, out, &n, &codec, NULL, &e),
                     -EINVAL);
    assert_int_equal(codec_encode(state, CODEC_LEVEL_FAST, DTYPE_F32, plain, 0, out, &n, &codec, NULL, &e),
                     -EINVAL);
}

/* A sample cannot see everything: planes that look constant, and tiers that look apt, must hold without. */
static void what_the_sample_missed_is_kept(void **unused)
{
    (void)unused;
    size_t n = 1 << 20;
    uint8_t *plain = calloc(1, n);
    for (int kind = 0; kind < 3; kind++) {
        for (size_t i = 0; i < n / 4; i++) {
            uint32_t v = (uint32_t)(next() % 256);
            memcpy(plain + 4 * i, &v, 4);
        }
        if (kind == 0)
            memcpy(plain + 4 * 100, "\1\2\3\4", 4); /* one odd element between two runs of the sample */
        if (kind == 1)
            for (size_t i = 100; i < 3000; i++) /* many */
                plain[4 * i + 3] = (uint8_t)next();
        if (kind == 2)
            for (size_t i = 0; i < n / 4; i++) { /* noise wherever the sample does not look */
                size_t into = i * 63 % (n / 4 - 64);
                if (into > 64 * 63 && into < n / 4 - 64 * 63)
                    plain[4 * i + 3] = (uint8_t)next(), plain[4 * i + 2] = (uint8_t)next();
            }
        round_trip(CODEC_LEVEL_FAST, DTYPE_I32, plain, n, NULL);
        round_trip(CODEC_LEVEL_DENSE, DTYPE_I32, plain, n, NULL);
    }
    free(plain);
}

static void damaged_payloads_are_refused_or_harmless(void **unused)
{
    (void)unused;
    static const enum dtype types[] = {DTYPE_BF16, DTYPE_F32, DTYPE_I64, DTYPE_U8, DTYPE_F8_E4M3};
    size_t refused = 0;
    uint8_t plain[8192];
    for (int round = 0; round < 4000; round++) {
        enum dtype dtype = types[next() % 5];
        size_t n = (64 + next() % 960) * unit_of(dtype);
        fill(plain, n, dtype, (int)(next() % 5));
        struct packed x = encode(next() % 3 ? CODEC_LEVEL_FAST : CODEC_LEVEL_DENSE, dtype, plain, n);
        uint8_t *back = malloc(n);
        struct err e;
        if (x.n > 0 && next() % 4)
            for (uint64_t i = 1 + next() % 4; i-- > 0;)
                x.p[next() % (next() % 2 ? x.n : x.n < 24 ? x.n : 24)] = (uint8_t)next();
        if (next() % 3 == 0) { /* cut */
            size_t cut = x.n ? next() % x.n : 0;
            uint8_t *shorter = malloc(cut + !cut);
            memcpy(shorter, x.p, cut);
            free(x.p);
            x.p = shorter, x.n = cut;
        }
        if (next() % 8 == 0)
            dtype = types[next() % 5];
        if (next() % 8 == 0)
            x.codec = (enum codec)(next() % (CODEC_COUNT + 1));
        int r = codec_decode(state, x.codec, dtype, x.p, x.n, back, n, NULL, &e);
        assert_true(r == 0 || r == -EBADMSG);
        refused += r < 0;
        free(back);
        free(x.p);
    }
    assert_in_range(refused, 800, 3900);
}

static void hostile_plans_are_refused(void **unused)
{
    (void)unused;
    uint8_t back[128];
    struct err e;
    static const struct {
        uint8_t p[64];
        size_t n;
    } bad[] = {
        {{0}, 0},
        {{1}, 1},
        {{2, 1, 0}, 3},                                   /* another layout */
        {{1, 2, 0, 0}, 4},                                /* two planes for a dtype of one */
        {{1, 1, 9}, 3},                                   /* no such kind */
        {{1, 1, 0}, 68},                                  /* raw, one byte more than there are... */
        {{1, 1, 0}, 66},                                  /* ... and less */
        {{1, 1, 1, 5}, 5},                                /* constant, and a byte behind it */
        {{1, 1, 2, 5, 1, 1}, 60},                         /* five tiers */
        {{1, 1, 2, 1, 0, 0}, 60},                         /* of no bits */
        {{1, 1, 2, 1, 8, 0}, 64},                         /* of eight */
        {{1, 1, 2, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0}, 14}, /* one escape, which is missing */
        {{1, 1, 3, 0xff, 0xff, 0xff, 0xff}, 40},
        {{1, 1, 3, 0, 0, 0, 0}, 7},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        uint8_t *exact = malloc(bad[i].n + 1);
        memset(exact, 0, bad[i].n + 1);
        memcpy(exact, bad[i].p, bad[i].n < 64 ? bad[i].n : 64);
        assert_int_equal(codec_decode(state, CODEC_PLANES, DTYPE_U8, exact, bad[i].n, back, 64, NULL, &e),
                         -EBADMSG);
        free(exact);
    }
    /* Bits behind the last element. */
    uint8_t tail[16] = {1, 1, 2, 1, 1, 7, 0, 0, 0, 0, 0, 0, 0, 0x80};
    assert_int_equal(codec_decode(state, CODEC_PLANES, DTYPE_U8, tail, 14, back, 63, NULL, &e), -EBADMSG);
    tail[13] = 0;
    assert_int_equal(codec_decode(state, CODEC_PLANES, DTYPE_U8, tail, 14, back, 63, NULL, &e), 0);
    assert_int_equal(back[62], 7);
    /* Two frames are not one. */
    assert_int_equal(codec_decode(state, CODEC_COUNT, DTYPE_U8, tail, 14, back, 64, NULL, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "codec unknown"));
}

static void example_of_the_document(void **unused)
{
    (void)unused;
    static const uint8_t payload[] = {1, 2, 2, 2, 1, 0x80, 2, 0x7e, 0, 0, 1, 0, 0x92, 5, 0, 0, 0, 0, 0,
                                      0, 0, 1, 0, 0, 0,    0, 0,    0, 0, 0, 0, 0,    0, 0, 0, 0, 0};
    static const uint8_t plain[] = {0x80, 0x3f, 0x00, 0xc0, 0x00, 0x3f, 0x49, 0x40};
    uint8_t back[8];
    struct err e;
    assert_int_equal(
        codec_decode(state, CODEC_PLANES, DTYPE_BF16, payload, sizeof payload, back, 8, NULL, &e), 0);
    assert_memory_equal(back, plain, 8);
}

/* Each loop of each machine gives the same bytes as the portable ones. */
static void all_loops_agree(void **unused)
{
    (void)unused;
    static uint8_t plain[8 * 1000], one[8 * 1100], two[8 * 1100], back[8 * 1000];
    struct planes_state *a = planes_state_create(), *b = planes_state_create();
    planes_state_use(a, &tiers_portable);
    static const enum dtype types[] = {DTYPE_U8,  DTYPE_F8_E5M2, DTYPE_BF16, DTYPE_I16,
                                       DTYPE_F32, DTYPE_I32,     DTYPE_F64,  DTYPE_U64};
    for (unsigned v = 0; tiers_ops_at(v); v++) {
        planes_state_use(b, tiers_ops_at(v));
        for (int round = 0; round < 2000; round++) {
            enum dtype dtype = types[next() % 8];
            unsigned width = planes_width(dtype);
            size_t n = (64 + next() % 900) * width;
            fill(plain, n, dtype, (int)(next() % 5));
            size_t p = planes_probe(a, dtype, false, plain, n), q = planes_probe(b, dtype, false, plain, n);
            assert_int_equal(p, q);
            size_t x = planes_encode(a, plain, n, one, NULL), y = planes_encode(b, plain, n, two, NULL);
            assert_int_equal(x, y);
            assert_memory_equal(one, two, x);
            if (x == 0)
                continue;
            assert_int_equal(planes_decode(b, dtype, one, x, back, n, NULL, NULL), 0);
            assert_memory_equal(back, plain, n);
        }
    }
    planes_state_free(a);
    planes_state_free(b);
}

int main(void)
{
    state = codec_state_create();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_dtype_every_short_length),
        cmocka_unit_test(lengths_around_borders),
        cmocka_unit_test(every_pattern_of_16_bits),
        cmocka_unit_test(special_floats_keep_their_bits),
        cmocka_unit_test(weights_shrink_as_promised),
        cmocka_unit_test(simplest_codec_wins),
        cmocka_unit_test(what_the_sample_missed_is_kept),
        cmocka_unit_test(damaged_payloads_are_refused_or_harmless),
        cmocka_unit_test(hostile_plans_are_refused),
        cmocka_unit_test(example_of_the_document),
        cmocka_unit_test(all_loops_agree),
    };
    int r = cmocka_run_group_tests(tests, NULL, NULL);
    codec_state_free(state);
    return r;
}
