/* SPDX-License-Identifier: Apache-2.0 */
/* The loops of codec "planes" for AVX2: 32 bytes a step for splitting and merging, 64 for tiers. */
#include "format/codec_tiers.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx2,popcnt,bmi,bmi2")))

/* Within each 128-bit lane: 4 elements of 4 bytes to their planes, most significant first. Its own inverse
 * but for the order of bytes, hence two tables. */
#define GROUP4   3, 7, 11, 15, 2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12
#define UNGROUP4 12, 8, 4, 0, 13, 9, 5, 1, 14, 10, 6, 2, 15, 11, 7, 3

TARGET static inline __m256i rotl16(__m256i v)
{
    return _mm256_or_si256(_mm256_slli_epi16(v, 1), _mm256_srli_epi16(v, 15));
}
TARGET static inline __m256i rotr16(__m256i v)
{
    return _mm256_or_si256(_mm256_srli_epi16(v, 1), _mm256_slli_epi16(v, 15));
}
TARGET static inline __m256i rotl32(__m256i v)
{
    return _mm256_or_si256(_mm256_slli_epi32(v, 1), _mm256_srli_epi32(v, 31));
}
TARGET static inline __m256i rotr32(__m256i v)
{
    return _mm256_or_si256(_mm256_srli_epi32(v, 1), _mm256_slli_epi32(v, 31));
}

TARGET static size_t split2(const uint8_t *in, size_t n, bool rotate, uint8_t *const planes[PLANES_MAX])
{
    const __m256i low = _mm256_set1_epi16(0xff);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i a = _mm256_loadu_si256((const void *)(in + 2 * i));
        __m256i b = _mm256_loadu_si256((const void *)(in + 2 * i + 32));
        if (rotate) {
            a = rotl16(a);
            b = rotl16(b);
        }
        __m256i h = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
        __m256i l = _mm256_packus_epi16(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
        _mm256_storeu_si256((void *)(planes[0] + i), _mm256_permute4x64_epi64(h, 0xd8));
        _mm256_storeu_si256((void *)(planes[1] + i), _mm256_permute4x64_epi64(l, 0xd8));
    }
    return i;
}

/* 4 by 4 words of 32 bits within each lane. Its own inverse. */
TARGET static inline void transpose4(__m256i v[4])
{
    __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
    __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm256_unpacklo_epi64(a, c);
    v[1] = _mm256_unpackhi_epi64(a, c);
    v[2] = _mm256_unpacklo_epi64(b, d);
    v[3] = _mm256_unpackhi_epi64(b, d);
}

/* A plane's 8 words of 4 bytes stand, after the transpose, as elements 0-3 8-11 16-19 24-27 | 4-7 12-15 ...:
 * put in order, and back. */
#define ORDER   0, 4, 1, 5, 2, 6, 3, 7
#define UNORDER 0, 2, 4, 6, 1, 3, 5, 7

TARGET static size_t split4(const uint8_t *in, size_t n, bool rotate, uint8_t *const planes[PLANES_MAX])
{
    const __m256i group = _mm256_setr_epi8(GROUP4, GROUP4), order = _mm256_setr_epi32(ORDER);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i v[4];
        for (int r = 0; r < 4; r++) {
            v[r] = _mm256_loadu_si256((const void *)(in + 4 * i + 32 * (size_t)r));
            if (rotate)
                v[r] = rotl32(v[r]);
            v[r] = _mm256_shuffle_epi8(v[r], group);
        }
        transpose4(v);
        for (int p = 0; p < 4; p++)
            _mm256_storeu_si256((void *)(planes[p] + i), _mm256_permutevar8x32_epi32(v[p], order));
    }
    return i;
}

static void split(const uint8_t *in, size_t n, unsigned width, bool rotate, uint8_t *const planes[PLANES_MAX])
{
    size_t done = width == 2 ? split2(in, n, rotate, planes) : width == 4 ? split4(in, n, rotate, planes) : 0;
    uint8_t *rest[PLANES_MAX] = {0};
    for (unsigned p = 0; p < width; p++)
        rest[p] = planes[p] + done;
    tiers_portable.split(in + done * width, n - done, width, rotate, rest);
}

TARGET static size_t merge2(const uint8_t *const planes[PLANES_MAX], size_t n, bool rotate, uint8_t *out)
{
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i h = _mm256_loadu_si256((const void *)(planes[0] + i));
        __m256i l = _mm256_loadu_si256((const void *)(planes[1] + i));
        h = _mm256_permute4x64_epi64(h, 0xd8);
        l = _mm256_permute4x64_epi64(l, 0xd8);
        __m256i a = _mm256_unpacklo_epi8(l, h), b = _mm256_unpackhi_epi8(l, h);
        if (rotate) {
            a = rotr16(a);
            b = rotr16(b);
        }
        _mm256_storeu_si256((void *)(out + 2 * i), a);
        _mm256_storeu_si256((void *)(out + 2 * i + 32), b);
    }
    return i;
}

TARGET static size_t merge4(const uint8_t *const planes[PLANES_MAX], size_t n, bool rotate, uint8_t *out)
{
    const __m256i ungroup = _mm256_setr_epi8(UNGROUP4, UNGROUP4), order = _mm256_setr_epi32(UNORDER);
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i v[4];
        for (int p = 0; p < 4; p++)
            v[p] = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const void *)(planes[p] + i)), order);
        transpose4(v);
        for (int r = 0; r < 4; r++) {
            v[r] = _mm256_shuffle_epi8(v[r], ungroup);
            if (rotate)
                v[r] = rotr32(v[r]);
            _mm256_storeu_si256((void *)(out + 4 * i + 32 * (size_t)r), v[r]);
        }
    }
    return i;
}

static void merge(const uint8_t *const planes[PLANES_MAX], size_t n, unsigned width, bool rotate,
                  uint8_t *out)
{
    size_t done = width == 2   ? merge2(planes, n, rotate, out)
                  : width == 4 ? merge4(planes, n, rotate, out)
                               : 0;
    const uint8_t *rest[PLANES_MAX] = {0};
    for (unsigned p = 0; p < width; p++)
        rest[p] = planes[p] + done;
    tiers_portable.merge(rest, n - done, width, rotate, out + done * width);
}

TARGET static size_t encode_whole(const uint8_t *values, size_t n, unsigned k, uint8_t base, uint8_t *masks,
                                  uint8_t *escapes)
{
    const __m256i from = _mm256_set1_epi8((char)base), away = _mm256_set1_epi8((char)((1u << k) - 1));
    size_t found = 0;
    for (size_t i = 0; i < n; i += 64, masks += 8 * k) {
        uint64_t gone = 0;
        for (unsigned half = 0; half < 2; half++) {
            __m256i v = _mm256_loadu_si256((const void *)(values + i + 32 * half));
            __m256i code = _mm256_min_epu8(_mm256_sub_epi8(v, from), away);
            gone |= (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(code, away)) << 32 * half;
            for (unsigned b = 0; b < k; b++) {
                __m256i top = _mm256_sll_epi16(code, _mm_cvtsi32_si128((int)(7 - b)));
                uint32_t mask = (uint32_t)_mm256_movemask_epi8(top);
                memcpy(masks + 8 * b + 4 * half, &mask, 4);
            }
        }
        for (unsigned g = 0; g < 8; g++) {
            unsigned bits = gone >> 8 * g & 0xff;
            if (bits == 0)
                continue;
            __m128i v = _mm_loadl_epi64((const void *)(values + i + 8 * g));
            v = _mm_shuffle_epi8(v, _mm_loadl_epi64((const void *)&tiers_pack[bits]));
            _mm_storel_epi64((void *)(escapes + found), v);
            found += (size_t)__builtin_popcount(bits);
        }
    }
    return found;
}

static size_t encode(const uint8_t *values, size_t n, unsigned k, uint8_t base, uint8_t *masks,
                     uint8_t *escapes)
{
    size_t whole = n / 64 * 64;
    size_t found = encode_whole(values, whole, k, base, masks, escapes);
    return found +
           tiers_portable.encode(values + whole, n - whole, k, base, masks + whole / 8 * k, escapes + found);
}

/* 32 bits to 32 bytes of 0xff or 0. */
TARGET static inline __m256i widen(uint32_t bits)
{
    const __m256i each = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    __m256i v = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), each);
    return _mm256_cmpeq_epi8(_mm256_and_si256(v, bit), bit);
}

TARGET static size_t decode_whole(const uint8_t *masks, size_t n, unsigned k, uint8_t base,
                                  const uint8_t *escapes, uint8_t *values)
{
    const __m256i from = _mm256_set1_epi8((char)base);
    size_t used = 0;
    for (size_t i = 0; i < n; i += 64, masks += 8 * k) {
        uint64_t gone = ~0ull;
        for (unsigned half = 0; half < 2; half++) {
            __m256i v = _mm256_setzero_si256();
            uint32_t away = ~0u;
            for (unsigned b = 0; b < k; b++) {
                uint32_t mask;
                memcpy(&mask, masks + 8 * b + 4 * half, 4);
                v = _mm256_or_si256(v, _mm256_and_si256(widen(mask), _mm256_set1_epi8((char)(1u << b))));
                away &= mask;
            }
            _mm256_storeu_si256((void *)(values + i + 32 * half), _mm256_add_epi8(v, from));
            gone &= (uint64_t)away << 32 * half | ~(0xffffffffull << 32 * half);
        }
        for (unsigned g = 0; g < 8; g++) {
            unsigned bits = gone >> 8 * g & 0xff;
            if (bits == 0)
                continue;
            __m128i v = _mm_loadl_epi64((const void *)(values + i + 8 * g));
            __m128i e = _mm_shuffle_epi8(_mm_loadl_epi64((const void *)(escapes + used)),
                                         _mm_loadl_epi64((const void *)&tiers_spread[bits]));
            v = _mm_blendv_epi8(v, e, _mm256_castsi256_si128(widen(bits)));
            _mm_storel_epi64((void *)(values + i + 8 * g), v);
            used += (size_t)__builtin_popcount(bits);
        }
    }
    return used;
}

static size_t decode(const uint8_t *masks, size_t n, unsigned k, uint8_t base, const uint8_t *escapes,
                     uint8_t *values)
{
    size_t whole = n / 64 * 64;
    size_t used = decode_whole(masks, whole, k, base, escapes, values);
    return used +
           tiers_portable.decode(masks + whole / 8 * k, n - whole, k, base, escapes + used, values + whole);
}

static size_t count(const uint8_t *masks, size_t n, unsigned k)
{
    return tiers_portable.count(masks, n, k);
}

static const struct tiers_ops ops = {
    .name = "AVX2", .split = split, .merge = merge, .encode = encode, .count = count, .decode = decode};

const struct tiers_ops *tiers_avx2(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") &&
                   __builtin_cpu_supports("popcnt")
               ? &ops
               : NULL;
}
#else
const struct tiers_ops *tiers_avx2(void)
{
    return NULL;
}
#endif
