/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loops of codec "planes" for AVX-512 with VBMI and VBMI2 (byte permutes, compress and expand): 64 bytes
 * a step. Built on every x86-64, called only where the processor has all of it.
 */
#include "format/codec_tiers.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,popcnt")))

static inline uint64_t lanes(size_t n)
{
    return n >= 64 ? ~0ull : (1ull << n) - 1;
}

/* Byte indexes for permutes: where byte i of the result comes from. Made once, on first use by the loader. */
static struct {
    uint8_t halves[2][64]; /* of 128 bytes of 2-byte elements: high bytes, low bytes */
    uint8_t zip[2][64];    /* the opposite: 64 high and 64 low bytes to the first and second 64 bytes */
    uint8_t group4[64];    /* of 16 elements of 4 bytes: plane 0's 16 bytes, plane 1's, ... */
    uint8_t ungroup4[64];
    uint8_t group8[64]; /* of 8 elements of 8 bytes: plane 0's 8 bytes, ... */
    uint8_t ungroup8[64];
} at;

__attribute__((constructor)) static void tables_fill(void)
{
    for (unsigned i = 0; i < 64; i++) {
        at.halves[0][i] = (uint8_t)(2 * i + 1);
        at.halves[1][i] = (uint8_t)(2 * i);
        for (unsigned half = 0; half < 2; half++) { /* byte i of output half: element 32 * half + i / 2 */
            unsigned element = 32 * half + i / 2;
            at.zip[half][i] = (uint8_t)(i % 2 == 1 ? element : 64 + element);
        }
        at.group4[i] = (uint8_t)(4 * (i % 16) + 3 - i / 16);
        at.ungroup4[i] = (uint8_t)(16 * (3 - i % 4) + i / 4);
        at.group8[i] = (uint8_t)(8 * (i % 8) + 7 - i / 8);
        at.ungroup8[i] = (uint8_t)(8 * (7 - i % 8) + i / 8);
    }
}

/* v[r] holds, as 128-bit lanes, the bytes of plane 0..3 of elements 16r..16r+15; turned so that v[p] is plane
 * p. Its own inverse. */
TARGET static inline void transpose4(__m512i v[4])
{
    __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x44), b = _mm512_shuffle_i32x4(v[0], v[1], 0xee);
    __m512i c = _mm512_shuffle_i32x4(v[2], v[3], 0x44), d = _mm512_shuffle_i32x4(v[2], v[3], 0xee);
    v[0] = _mm512_shuffle_i32x4(a, c, 0x88);
    v[1] = _mm512_shuffle_i32x4(a, c, 0xdd);
    v[2] = _mm512_shuffle_i32x4(b, d, 0x88);
    v[3] = _mm512_shuffle_i32x4(b, d, 0xdd);
}

/* The same for 8 by 8 words of 64 bits. */
TARGET static inline void transpose8(__m512i v[8])
{
    __m512i t[8];
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm512_unpacklo_epi64(v[2 * i], v[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi64(v[2 * i], v[2 * i + 1]);
    }
    /* t[0] words: 00 10 02 12 04 14 06 16 (word, then row swapped in pairs); lanes of 128 bits are transposed
     * next. */
    __m512i lo[4] = {t[0], t[2], t[4], t[6]}, hi[4] = {t[1], t[3], t[5], t[7]};
    transpose4(lo);
    transpose4(hi);
    for (int i = 0; i < 4; i++) {
        v[2 * i] = lo[i];
        v[2 * i + 1] = hi[i];
    }
}

/* Bytes turned left (right) by one bit. */
TARGET static size_t split1(const uint8_t *in, size_t n, bool rotate, uint8_t *const planes[PLANES_MAX])
{
    const __m512i low = _mm512_set1_epi8(1);
    size_t i = 0;
    for (; rotate && i + 64 <= n; i += 64) {
        __m512i v = _mm512_loadu_si512(in + i), carry = _mm512_and_si512(_mm512_srli_epi16(v, 7), low);
        _mm512_storeu_si512(planes[0] + i, _mm512_or_si512(_mm512_add_epi8(v, v), carry));
    }
    return i;
}

TARGET static size_t merge1(const uint8_t *const planes[PLANES_MAX], size_t n, bool rotate, uint8_t *out)
{
    const __m512i high = _mm512_set1_epi8((char)0x80);
    size_t i = 0;
    for (; rotate && i + 64 <= n; i += 64) {
        __m512i v = _mm512_loadu_si512(planes[0] + i);
        __m512i carry = _mm512_and_si512(_mm512_slli_epi16(v, 7), high);
        _mm512_storeu_si512(out + i,
                            _mm512_or_si512(_mm512_andnot_si512(high, _mm512_srli_epi16(v, 1)), carry));
    }
    return i;
}

TARGET static size_t split2(const uint8_t *in, size_t n, bool rotate, uint8_t *const planes[PLANES_MAX])
{
    const __m512i high = _mm512_loadu_si512(at.halves[0]), low = _mm512_loadu_si512(at.halves[1]);
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        __m512i a = _mm512_loadu_si512(in + 2 * i), b = _mm512_loadu_si512(in + 2 * i + 64);
        if (rotate) {
            a = _mm512_shldi_epi16(a, a, 1);
            b = _mm512_shldi_epi16(b, b, 1);
        }
        _mm512_storeu_si512(planes[0] + i, _mm512_permutex2var_epi8(a, high, b));
        _mm512_storeu_si512(planes[1] + i, _mm512_permutex2var_epi8(a, low, b));
    }
    return i;
}

TARGET static size_t split4(const uint8_t *in, size_t n, bool rotate, uint8_t *const planes[PLANES_MAX])
{
    const __m512i group = _mm512_loadu_si512(at.group4);
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        __m512i v[4];
        for (int r = 0; r < 4; r++) {
            v[r] = _mm512_loadu_si512(in + 4 * i + 64 * (size_t)r);
            if (rotate)
                v[r] = _mm512_rol_epi32(v[r], 1);
            v[r] = _mm512_permutexvar_epi8(group, v[r]);
        }
        transpose4(v);
        for (int p = 0; p < 4; p++)
            _mm512_storeu_si512(planes[p] + i, v[p]);
    }
    return i;
}

TARGET static size_t split8(const uint8_t *in, size_t n, bool rotate, uint8_t *const planes[PLANES_MAX])
{
    const __m512i group = _mm512_loadu_si512(at.group8);
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        __m512i v[8];
        for (int r = 0; r < 8; r++) {
            v[r] = _mm512_loadu_si512(in + 8 * i + 64 * (size_t)r);
            if (rotate)
                v[r] = _mm512_rol_epi64(v[r], 1);
            v[r] = _mm512_permutexvar_epi8(group, v[r]);
        }
        transpose8(v);
        for (int p = 0; p < 8; p++)
            _mm512_storeu_si512(planes[p] + i, v[p]);
    }
    return i;
}

/* What is left over goes the portable way. */
static void split(const uint8_t *in, size_t n, unsigned width, bool rotate, uint8_t *const planes[PLANES_MAX])
{
    size_t done = width == 1   ? split1(in, n, rotate, planes)
                  : width == 2 ? split2(in, n, rotate, planes)
                  : width == 4 ? split4(in, n, rotate, planes)
                  : width == 8 ? split8(in, n, rotate, planes)
                               : 0;
    uint8_t *rest[PLANES_MAX] = {0};
    for (unsigned p = 0; p < width; p++)
        rest[p] = planes[p] + done;
    tiers_portable.split(in + done * width, n - done, width, rotate, rest);
}

TARGET static size_t merge2(const uint8_t *const planes[PLANES_MAX], size_t n, bool rotate, uint8_t *out)
{
    const __m512i first = _mm512_loadu_si512(at.zip[0]), second = _mm512_loadu_si512(at.zip[1]);
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        __m512i high = _mm512_loadu_si512(planes[0] + i), low = _mm512_loadu_si512(planes[1] + i);
        __m512i a = _mm512_permutex2var_epi8(high, first, low),
                b = _mm512_permutex2var_epi8(high, second, low);
        if (rotate) {
            a = _mm512_shrdi_epi16(a, a, 1);
            b = _mm512_shrdi_epi16(b, b, 1);
        }
        _mm512_storeu_si512(out + 2 * i, a);
        _mm512_storeu_si512(out + 2 * i + 64, b);
    }
    return i;
}

TARGET static size_t merge4(const uint8_t *const planes[PLANES_MAX], size_t n, bool rotate, uint8_t *out)
{
    const __m512i ungroup = _mm512_loadu_si512(at.ungroup4);
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        __m512i v[4];
        for (int p = 0; p < 4; p++)
            v[p] = _mm512_loadu_si512(planes[p] + i);
        transpose4(v);
        for (int r = 0; r < 4; r++) {
            v[r] = _mm512_permutexvar_epi8(ungroup, v[r]);
            if (rotate)
                v[r] = _mm512_ror_epi32(v[r], 1);
            _mm512_storeu_si512(out + 4 * i + 64 * (size_t)r, v[r]);
        }
    }
    return i;
}

TARGET static size_t merge8(const uint8_t *const planes[PLANES_MAX], size_t n, bool rotate, uint8_t *out)
{
    const __m512i ungroup = _mm512_loadu_si512(at.ungroup8);
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        __m512i v[8];
        for (int p = 0; p < 8; p++)
            v[p] = _mm512_loadu_si512(planes[p] + i);
        transpose8(v);
        for (int r = 0; r < 8; r++) {
            v[r] = _mm512_permutexvar_epi8(ungroup, v[r]);
            if (rotate)
                v[r] = _mm512_ror_epi64(v[r], 1);
            _mm512_storeu_si512(out + 8 * i + 64 * (size_t)r, v[r]);
        }
    }
    return i;
}

static void merge(const uint8_t *const planes[PLANES_MAX], size_t n, unsigned width, bool rotate,
                  uint8_t *out)
{
    size_t done = width == 1   ? merge1(planes, n, rotate, out)
                  : width == 2 ? merge2(planes, n, rotate, out)
                  : width == 4 ? merge4(planes, n, rotate, out)
                  : width == 8 ? merge8(planes, n, rotate, out)
                               : 0;
    const uint8_t *rest[PLANES_MAX] = {0};
    for (unsigned p = 0; p < width; p++)
        rest[p] = planes[p] + done;
    tiers_portable.merge(rest, n - done, width, rotate, out + done * width);
}

TARGET static inline __attribute__((always_inline)) size_t
encode_loop(const uint8_t *values, size_t n, unsigned k, uint8_t base, uint8_t *masks, uint8_t *escapes)
{
    const __m512i from = _mm512_set1_epi8((char)base), away = _mm512_set1_epi8((char)((1u << k) - 1));
    size_t found = 0;
    for (size_t i = 0; i < n; i += 64, masks += 8 * k) {
        uint64_t here = lanes(n - i);
        __m512i v = _mm512_maskz_loadu_epi8(here, values + i);
        __m512i code = _mm512_maskz_min_epu8(here, _mm512_sub_epi8(v, from), away);
        uint64_t gone = _mm512_mask_cmpeq_epi8_mask(here, code, away);
#pragma GCC unroll 8
        for (unsigned b = 0; b < k; b++) {
            uint64_t mask = _mm512_test_epi8_mask(code, _mm512_set1_epi8((char)(1u << b)));
            __builtin_memcpy(masks + 8 * b, &mask, 8);
        }
        _mm512_storeu_si512(escapes + found, _mm512_maskz_compress_epi8(gone, v));
        found += (size_t)__builtin_popcountll(gone);
    }
    return found;
}

TARGET static size_t encode(const uint8_t *values, size_t n, unsigned k, uint8_t base, uint8_t *masks,
                            uint8_t *escapes)
{
    switch (k) { /* each its own loop, with constants */
    case 1: return encode_loop(values, n, 1, base, masks, escapes);
    case 2: return encode_loop(values, n, 2, base, masks, escapes);
    case 3: return encode_loop(values, n, 3, base, masks, escapes);
    case 4: return encode_loop(values, n, 4, base, masks, escapes);
    default: return encode_loop(values, n, k, base, masks, escapes);
    }
}

TARGET static inline __attribute__((always_inline)) size_t count_loop(const uint8_t *masks, size_t n,
                                                                      unsigned k)
{
    size_t found = 0;
    for (size_t i = 0; i < n; i += 64) {
        uint64_t all = ~0ull, any = 0;
#pragma GCC unroll 8
        for (unsigned b = 0; b < k; b++, masks += 8) {
            uint64_t mask;
            __builtin_memcpy(&mask, masks, 8);
            all &= mask;
            any |= mask;
        }
        if (any & ~lanes(n - i))
            return TIERS_DEAD;
        found += (size_t)__builtin_popcountll(all);
    }
    return found;
}

TARGET static size_t count(const uint8_t *masks, size_t n, unsigned k)
{
    switch (k) { /* each its own loop, with constants */
    case 1: return count_loop(masks, n, 1);
    case 2: return count_loop(masks, n, 2);
    case 3: return count_loop(masks, n, 3);
    case 4: return count_loop(masks, n, 4);
    default: return count_loop(masks, n, k);
    }
}

TARGET static inline __attribute__((always_inline)) size_t
decode_loop(const uint8_t *masks, size_t n, unsigned k, uint8_t base, const uint8_t *escapes, uint8_t *values)
{
    const uint8_t *first = escapes;
    const __m512i from = _mm512_set1_epi8((char)base);
    for (size_t i = 0; i < n; i += 64) {
        __m512i v = from;
        uint64_t gone = ~0ull;
#pragma GCC unroll 8
        for (unsigned b = 0; b < k; b++, masks += 8) {
            uint64_t mask;
            __builtin_memcpy(&mask, masks, 8);
            v = _mm512_mask_add_epi8(v, mask, v, _mm512_set1_epi8((char)(1u << b)));
            gone &= mask;
        }
        v = _mm512_mask_expand_epi8(v, gone, _mm512_loadu_si512(escapes));
        escapes += __builtin_popcountll(gone);
        _mm512_mask_storeu_epi8(values + i, lanes(n - i), v);
    }
    return (size_t)(escapes - first);
}

TARGET static size_t decode(const uint8_t *masks, size_t n, unsigned k, uint8_t base, const uint8_t *escapes,
                            uint8_t *values)
{
    switch (k) { /* each its own loop, with constants */
    case 1: return decode_loop(masks, n, 1, base, escapes, values);
    case 2: return decode_loop(masks, n, 2, base, escapes, values);
    case 3: return decode_loop(masks, n, 3, base, escapes, values);
    case 4: return decode_loop(masks, n, 4, base, escapes, values);
    default: return decode_loop(masks, n, k, base, escapes, values);
    }
}

static const struct tiers_ops ops = {
    .name = "AVX-512", .split = split, .merge = merge, .encode = encode, .count = count, .decode = decode};

const struct tiers_ops *tiers_avx512(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
                   __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("popcnt")
               ? &ops
               : NULL;
}
#else
const struct tiers_ops *tiers_avx512(void)
{
    return NULL;
}
#endif
