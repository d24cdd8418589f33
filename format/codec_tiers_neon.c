/* SPDX-License-Identifier: Apache-2.0 */
/* The loops of codec "planes" for NEON: 16 elements a step for splitting and merging, 64 bytes for tiers. */
#include "format/codec_tiers.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

/* Bytes of 16 elements, least significant first: e[b] holds byte b of each. */
static inline void elements_load(const uint8_t *in, unsigned width, uint8x16_t e[PLANES_MAX])
{
    if (width == 1) {
        e[0] = vld1q_u8(in);
    } else if (width == 2) {
        uint8x16x2_t v = vld2q_u8(in);
        e[0] = v.val[0];
        e[1] = v.val[1];
    } else if (width == 4) {
        uint8x16x4_t v = vld4q_u8(in);
        for (int b = 0; b < 4; b++)
            e[b] = v.val[b];
    } else { /* val[b] holds byte b and byte b + 4 of 8 elements, in turn */
        uint8x16x4_t v = vld4q_u8(in), w = vld4q_u8(in + 64);
        for (int b = 0; b < 4; b++) {
            e[b] = vuzp1q_u8(v.val[b], w.val[b]);
            e[b + 4] = vuzp2q_u8(v.val[b], w.val[b]);
        }
    }
}

static inline void elements_store(const uint8x16_t e[PLANES_MAX], unsigned width, uint8_t *out)
{
    if (width == 1) {
        vst1q_u8(out, e[0]);
    } else if (width == 2) {
        vst2q_u8(out, (uint8x16x2_t){{e[0], e[1]}});
    } else if (width == 4) {
        vst4q_u8(out, (uint8x16x4_t){{e[0], e[1], e[2], e[3]}});
    } else {
        uint8x16x4_t v, w;
        for (int b = 0; b < 4; b++) {
            v.val[b] = vzip1q_u8(e[b], e[b + 4]);
            w.val[b] = vzip2q_u8(e[b], e[b + 4]);
        }
        vst4q_u8(out, v);
        vst4q_u8(out + 64, w);
    }
}

/* Each byte of an element takes one bit from its neighbour below, and the lowest from the highest. */
static inline void rotate_left(uint8x16_t e[PLANES_MAX], unsigned width)
{
    uint8x16_t top = e[width - 1];
    for (unsigned b = width - 1; b > 0; b--)
        e[b] = vsriq_n_u8(vshlq_n_u8(e[b], 1), e[b - 1], 7);
    e[0] = vsriq_n_u8(vshlq_n_u8(e[0], 1), top, 7);
}

static inline void rotate_right(uint8x16_t e[PLANES_MAX], unsigned width)
{
    uint8x16_t bottom = e[0];
    for (unsigned b = 0; b + 1 < width; b++)
        e[b] = vsliq_n_u8(vshrq_n_u8(e[b], 1), e[b + 1], 7);
    e[width - 1] = vsliq_n_u8(vshrq_n_u8(e[width - 1], 1), bottom, 7);
}

/* Inlined with constant width and rotate, so that each case is a plain loop. */
static inline __attribute__((always_inline)) size_t split_loop(const uint8_t *in, size_t n, unsigned width,
                                                               bool rotate, uint8_t *const planes[PLANES_MAX])
{
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        uint8x16_t e[PLANES_MAX];
        elements_load(in + i * width, width, e);
        if (rotate)
            rotate_left(e, width);
        for (unsigned p = 0; p < width; p++)
            vst1q_u8(planes[p] + i, e[width - 1 - p]);
    }
    return i;
}

static inline __attribute__((always_inline)) size_t
merge_loop(const uint8_t *const planes[PLANES_MAX], size_t n, unsigned width, bool rotate, uint8_t *out)
{
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        uint8x16_t e[PLANES_MAX];
        for (unsigned p = 0; p < width; p++)
            e[width - 1 - p] = vld1q_u8(planes[p] + i);
        if (rotate)
            rotate_right(e, width);
        elements_store(e, width, out + i * width);
    }
    return i;
}

static size_t split_whole(const uint8_t *in, size_t n, unsigned width, bool rotate,
                          uint8_t *const planes[PLANES_MAX])
{
    switch (width) {
    case 1: return rotate ? split_loop(in, n, 1, true, planes) : 0;
    case 2: return rotate ? split_loop(in, n, 2, true, planes) : split_loop(in, n, 2, false, planes);
    case 4: return rotate ? split_loop(in, n, 4, true, planes) : split_loop(in, n, 4, false, planes);
    default: return rotate ? split_loop(in, n, 8, true, planes) : split_loop(in, n, 8, false, planes);
    }
}

static size_t merge_whole(const uint8_t *const planes[PLANES_MAX], size_t n, unsigned width, bool rotate,
                          uint8_t *out)
{
    switch (width) {
    case 1: return rotate ? merge_loop(planes, n, 1, true, out) : 0;
    case 2: return rotate ? merge_loop(planes, n, 2, true, out) : merge_loop(planes, n, 2, false, out);
    case 4: return rotate ? merge_loop(planes, n, 4, true, out) : merge_loop(planes, n, 4, false, out);
    default: return rotate ? merge_loop(planes, n, 8, true, out) : merge_loop(planes, n, 8, false, out);
    }
}

static void split(const uint8_t *in, size_t n, unsigned width, bool rotate, uint8_t *const planes[PLANES_MAX])
{
    size_t done = split_whole(in, n, width, rotate, planes);
    uint8_t *rest[PLANES_MAX] = {0};
    for (unsigned p = 0; p < width; p++)
        rest[p] = planes[p] + done;
    tiers_portable.split(in + done * width, n - done, width, rotate, rest);
}

static void merge(const uint8_t *const planes[PLANES_MAX], size_t n, unsigned width, bool rotate,
                  uint8_t *out)
{
    size_t done = merge_whole(planes, n, width, rotate, out);
    const uint8_t *rest[PLANES_MAX] = {0};
    for (unsigned p = 0; p < width; p++)
        rest[p] = planes[p] + done;
    tiers_portable.merge(rest, n - done, width, rotate, out + done * width);
}

static inline uint8x16_t bit_of_lane(void)
{
    return vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ull));
}

/* 64 bytes of 0xff or 0 to 64 bits. */
static inline uint64_t gather(const uint8x16_t v[4])
{
    const uint8x16_t bit = bit_of_lane();
    uint8x16_t a = vpaddq_u8(vandq_u8(v[0], bit), vandq_u8(v[1], bit));
    uint8x16_t b = vpaddq_u8(vandq_u8(v[2], bit), vandq_u8(v[3], bit));
    a = vpaddq_u8(a, b);
    a = vpaddq_u8(a, a);
    return vgetq_lane_u64(vreinterpretq_u64_u8(a), 0);
}

/* 16 bits to 16 bytes of 0xff or 0. */
static inline uint8x16_t widen(const uint8_t *bits)
{
    return vtstq_u8(vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1])), bit_of_lane());
}

static size_t escapes_pack(const uint8_t *values, uint64_t gone, uint8_t *escapes)
{
    size_t found = 0;
    for (unsigned g = 0; g < 8; g++) {
        unsigned bits = gone >> 8 * g & 0xff;
        if (bits == 0)
            continue;
        vst1_u8(escapes + found, vtbl1_u8(vld1_u8(values + 8 * g), vcreate_u8(tiers_pack[bits])));
        found += (size_t)__builtin_popcount(bits);
    }
    return found;
}

static size_t escapes_spread(const uint8_t *escapes, uint64_t gone, uint8_t *values)
{
    size_t used = 0;
    for (unsigned g = 0; g < 8; g++) {
        unsigned bits = gone >> 8 * g & 0xff;
        if (bits == 0)
            continue;
        uint8x8_t each = vtst_u8(vdup_n_u8((uint8_t)bits), vget_low_u8(bit_of_lane()));
        uint8x8_t e = vtbl1_u8(vld1_u8(escapes + used), vcreate_u8(tiers_spread[bits]));
        vst1_u8(values + 8 * g, vbsl_u8(each, e, vld1_u8(values + 8 * g)));
        used += (size_t)__builtin_popcount(bits);
    }
    return used;
}

static size_t encode(const uint8_t *values, size_t n, unsigned k, uint8_t base, uint8_t *masks,
                     uint8_t *escapes)
{
    const uint8x16_t from = vdupq_n_u8(base), away = vdupq_n_u8((uint8_t)((1u << k) - 1));
    size_t found = 0, i = 0;
    for (; i + 64 <= n; i += 64, masks += 8 * k) {
        uint8x16_t code[4], set[4];
        for (unsigned q = 0; q < 4; q++) {
            code[q] = vminq_u8(vsubq_u8(vld1q_u8(values + i + 16 * q), from), away);
            set[q] = vceqq_u8(code[q], away);
        }
        found += escapes_pack(values + i, gather(set), escapes + found);
        for (unsigned b = 0; b < k; b++) {
            for (unsigned q = 0; q < 4; q++)
                set[q] = vtstq_u8(code[q], vdupq_n_u8((uint8_t)(1u << b)));
            uint64_t mask = gather(set);
            memcpy(masks + 8 * b, &mask, 8);
        }
    }
    return found + tiers_portable.encode(values + i, n - i, k, base, masks, escapes + found);
}

static size_t decode(const uint8_t *masks, size_t n, unsigned k, uint8_t base, const uint8_t *escapes,
                     uint8_t *values)
{
    size_t used = 0, i = 0;
    for (; i + 64 <= n; i += 64, masks += 8 * k) {
        uint64_t gone = ~0ull;
        for (unsigned b = 0; b < k; b++) {
            uint64_t mask;
            memcpy(&mask, masks + 8 * b, 8);
            gone &= mask;
        }
        for (unsigned q = 0; q < 4; q++) {
            uint8x16_t v = vdupq_n_u8(0);
            for (unsigned b = 0; b < k; b++)
                v = vorrq_u8(v, vandq_u8(widen(masks + 8 * b + 2 * q), vdupq_n_u8((uint8_t)(1u << b))));
            vst1q_u8(values + i + 16 * q, vaddq_u8(v, vdupq_n_u8(base)));
        }
        used += escapes_spread(escapes + used, gone, values + i);
    }
    return used + tiers_portable.decode(masks, n - i, k, base, escapes + used, values + i);
}

static size_t count(const uint8_t *masks, size_t n, unsigned k)
{
    return tiers_portable.count(masks, n, k);
}

static const struct tiers_ops ops = {
    .name = "NEON", .split = split, .merge = merge, .encode = encode, .count = count, .decode = decode};

const struct tiers_ops *tiers_neon(void) /* every arm64 processor has it */
{
    return &ops;
}
#else
const struct tiers_ops *tiers_neon(void)
{
    return NULL;
}
#endif
