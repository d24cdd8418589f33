/* SPDX-License-Identifier: Apache-2.0 */
#include "format/codec_tiers.h"

#include <string.h>

#include "format/base/cursor.h"

#define ONES 0x0101010101010101ull

static inline uint64_t element_get(const uint8_t *p, unsigned width)
{
    switch (width) {
    case 1: return *p;
    case 2: return le16_get(p);
    case 4: return le32_get(p);
    default: return le64_get(p);
    }
}

static inline void element_put(uint8_t *p, unsigned width, uint64_t v)
{
    switch (width) {
    case 1: *p = (uint8_t)v; break;
    case 2: le16_put(p, (uint16_t)v); break;
    case 4: le32_put(p, (uint32_t)v); break;
    default: le64_put(p, v); break;
    }
}

/* Rotations by one bit of a value of 8 * width bits. */
static inline uint64_t rotate_left(uint64_t v, unsigned width)
{
    unsigned bits = 8 * width;
    return v << 1 | v >> (bits - 1); /* what is shifted out above the width is cut off by whoever stores it */
}

static inline uint64_t rotate_right(uint64_t v, unsigned width)
{
    unsigned bits = 8 * width;
    return v >> 1 | v << (bits - 1);
}

/* Inlined with constant width and rotate, so that each case is a plain loop. */
static inline __attribute__((always_inline)) void split_loop(const uint8_t *in, size_t n, unsigned width,
                                                             bool rotate, uint8_t *const planes[PLANES_MAX])
{
    for (size_t i = 0; i < n; i++) {
        uint64_t v = element_get(in + i * width, width);
        if (rotate)
            v = rotate_left(v, width);
        for (unsigned p = 0; p < width; p++)
            planes[p][i] = (uint8_t)(v >> 8 * (width - 1 - p));
    }
}

static inline __attribute__((always_inline)) void
merge_loop(const uint8_t *const planes[PLANES_MAX], size_t n, unsigned width, bool rotate, uint8_t *out)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t v = 0;
        for (unsigned p = 0; p < width; p++)
            v |= (uint64_t)planes[p][i] << 8 * (width - 1 - p);
        if (rotate)
            v = rotate_right(v, width);
        element_put(out + i * width, width, v);
    }
}

/* Bytes one by one would be the slowest of all: eight of them turn in a word. */
static inline __attribute__((always_inline)) void rotate_bytes(const uint8_t *in, size_t n, unsigned left,
                                                               uint8_t *out)
{
    const uint64_t high = ONES * (0xffu << left & 0xffu), low = ~high;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t v = le64_get(in + i);
        le64_put(out + i, (v << left & high) | (v >> (8 - left) & low));
    }
    for (; i < n; i++)
        out[i] = (uint8_t)(in[i] << left | in[i] >> (8 - left));
}

static void split(const uint8_t *in, size_t n, unsigned width, bool rotate, uint8_t *const planes[PLANES_MAX])
{
    if (rotate) {
        switch (width) {
        case 1: rotate_bytes(in, n, 1, planes[0]); break;
        case 2: split_loop(in, n, 2, true, planes); break;
        case 4: split_loop(in, n, 4, true, planes); break;
        default: split_loop(in, n, 8, true, planes); break;
        }
        return;
    }
    switch (width) {
    case 1: memcpy(planes[0], in, n); break;
    case 2: split_loop(in, n, 2, false, planes); break;
    case 4: split_loop(in, n, 4, false, planes); break;
    default: split_loop(in, n, 8, false, planes); break;
    }
}

static void merge(const uint8_t *const planes[PLANES_MAX], size_t n, unsigned width, bool rotate,
                  uint8_t *out)
{
    if (rotate) {
        switch (width) {
        case 1: rotate_bytes(planes[0], n, 7, out); break;
        case 2: merge_loop(planes, n, 2, true, out); break;
        case 4: merge_loop(planes, n, 4, true, out); break;
        default: merge_loop(planes, n, 8, true, out); break;
        }
        return;
    }
    switch (width) {
    case 1: memcpy(out, planes[0], n); break;
    case 2: merge_loop(planes, n, 2, false, out); break;
    case 4: merge_loop(planes, n, 4, false, out); break;
    default: merge_loop(planes, n, 8, false, out); break;
    }
}

/* Bit 0 of each of 8 bytes, gathered into one byte: the product moves bit 8i to bit 56 + i, and no two of its
 * terms meet. */
static inline uint64_t gather(uint64_t bytes)
{
    return (bytes & ONES) * 0x0102040810204080ull >> 56;
}

/* The opposite: bit i of a byte becomes bit 0 of byte i. */
static inline uint64_t scatter(uint64_t bits)
{
    uint64_t each = (bits & 0xff) * ONES & 0x8040201008040201ull; /* byte i keeps bit i */
    return (each + (ONES * 0x80 - ONES)) >> 7 & ONES;
}

static size_t encode_group(const uint8_t *values, size_t n, unsigned k, uint8_t base, uint8_t *masks,
                           uint8_t *escapes)
{
    uint8_t codes[64] = {0};
    const uint8_t away = (uint8_t)((1u << k) - 1);
    for (size_t i = 0; i < n; i++) {
        uint8_t code = (uint8_t)(values[i] - base);
        codes[i] = code < away ? code : away;
    }
    uint64_t gone = ~0ull;
    for (unsigned b = 0; b < k; b++) {
        uint64_t mask = 0;
        for (unsigned i = 0; i < 8; i++)
            mask |= gather(le64_get(codes + 8 * i) >> b) << 8 * i;
        le64_put(masks + 8 * b, mask);
        gone &= mask;
    }
    size_t found = 0;
    for (; gone; gone &= gone - 1)
        escapes[found++] = values[__builtin_ctzll(gone)];
    return found;
}

static size_t encode(const uint8_t *values, size_t n, unsigned k, uint8_t base, uint8_t *masks,
                     uint8_t *escapes)
{
    size_t found = 0;
    for (size_t i = 0; i < n; i += 64) {
        found += encode_group(values + i, n - i < 64 ? n - i : 64, k, base, masks, escapes + found);
        masks += 8 * k;
    }
    return found;
}

static size_t count(const uint8_t *masks, size_t n, unsigned k)
{
    size_t found = 0;
    for (size_t i = 0; i < n; i += 64) {
        uint64_t all = ~0ull, any = 0;
        for (unsigned b = 0; b < k; b++, masks += 8) {
            all &= le64_get(masks);
            any |= le64_get(masks);
        }
        if (n - i < 64 && any >> (n - i) != 0)
            return TIERS_DEAD;
        found += (size_t)__builtin_popcountll(all);
    }
    return found;
}

static size_t decode_group(const uint8_t *masks, size_t n, unsigned k, uint8_t base, const uint8_t *escapes,
                           uint8_t *values)
{
    uint8_t codes[64];
    uint64_t gone = ~0ull;
    for (unsigned b = 0; b < k; b++)
        gone &= le64_get(masks + 8 * b);
    for (unsigned i = 0; i < 8; i++) {
        uint64_t v = 0;
        for (unsigned b = 0; b < k; b++)
            v |= scatter(masks[8 * b + i]) << b; /* byte i of a little-endian mask holds bits 8i to 8i + 7 */
        le64_put(codes + 8 * i, v);
    }
    for (size_t i = 0; i < n; i++)
        values[i] = (uint8_t)(codes[i] + base);
    size_t used = 0;
    for (; gone; gone &= gone - 1)
        values[__builtin_ctzll(gone)] = escapes[used++];
    return used;
}

static size_t decode(const uint8_t *masks, size_t n, unsigned k, uint8_t base, const uint8_t *escapes,
                     uint8_t *values)
{
    const uint8_t *first = escapes;
    for (size_t i = 0; i < n; i += 64) {
        escapes += decode_group(masks, n - i < 64 ? n - i : 64, k, base, escapes, values + i);
        masks += 8 * k;
    }
    return (size_t)(escapes - first);
}

const struct tiers_ops tiers_portable = {
    .name = "portable", .split = split, .merge = merge, .encode = encode, .count = count, .decode = decode};

uint64_t tiers_pack[256], tiers_spread[256];

__attribute__((constructor)) static void tables_fill(void)
{
    for (unsigned bits = 0; bits < 256; bits++) {
        unsigned used = 0;
        for (unsigned i = 0; i < 8; i++) {
            if (!(bits >> i & 1))
                continue;
            tiers_pack[bits] |= (uint64_t)i << 8 * used;
            tiers_spread[bits] |= (uint64_t)used << 8 * i;
            used++;
        }
    }
}

/* From the slowest to the fastest. */
const struct tiers_ops *tiers_ops_at(unsigned i)
{
    const struct tiers_ops *all[] = {&tiers_portable, tiers_neon(), tiers_avx2(), tiers_avx512()};
    unsigned seen = 0;
    for (size_t j = 0; j < sizeof all / sizeof all[0]; j++)
        if (all[j] && seen++ == i)
            return all[j];
    return NULL;
}

const struct tiers_ops *tiers_ops_best(void)
{
    const struct tiers_ops *best = &tiers_portable;
    for (unsigned i = 1; tiers_ops_at(i); i++)
        best = tiers_ops_at(i);
    return best;
}
