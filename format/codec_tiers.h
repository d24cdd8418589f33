/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The inner loops of codec "planes", behind a table, so that each machine may have loops of its own: all
 * variants read and write the same bytes. Only codec_planes.c and codec.c use this.
 *
 * Planes. An element of `width` bytes (1, 2, 4, 8; little-endian), rotated left by one bit if it is a float,
 * gives one byte to each plane; planes[0] takes the most significant.
 *
 * Tier. n bytes become codes of k bits: byte v has code (v - base) mod 256 if that is below 2^k - 1, and the
 * code 2^k - 1, "not here", otherwise; then v itself goes to the escapes, in order. Codes of 64 bytes stand
 * as k masks of 64 bits, little-endian; bit j of mask b is bit b of the code of byte j. Of the last 64, bits
 * that have no byte are zero.
 */
#ifndef LARDER_CODEC_TIERS_H
#define LARDER_CODEC_TIERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TIER_BITS_MAX 7u
#define PLANES_MAX    8u
#define TIERS_SLACK \
    64u /* bytes that loops may write behind the escapes and values that they were asked for */
#define TIERS_DEAD SIZE_MAX

struct tiers_ops {
    const char *name;
    void (*split)(const uint8_t *in, size_t n, unsigned width, bool rotate,
                  uint8_t *const planes[PLANES_MAX]);
    void (*merge)(const uint8_t *const planes[PLANES_MAX], size_t n, unsigned width, bool rotate,
                  uint8_t *out);
    /* Writes tier_mask_bytes(n, k) at masks; returns how many escapes it wrote. */
    size_t (*encode)(const uint8_t *values, size_t n, unsigned k, uint8_t base, uint8_t *masks,
                     uint8_t *escapes);
    /* How many codes say "not here"; TIERS_DEAD if a bit without a byte is set. */
    size_t (*count)(const uint8_t *masks, size_t n, unsigned k);
    /* escapes: as many as count() said, and TIERS_SLACK readable bytes behind them. Returns that number. */
    size_t (*decode)(const uint8_t *masks, size_t n, unsigned k, uint8_t base, const uint8_t *escapes,
                     uint8_t *values);
};

static inline size_t tier_mask_bytes(size_t n, unsigned k)
{
    return (n + 63) / 64 * k * 8;
}

/* For each set of 8 bits, indices for a byte shuffle: tiers_pack brings the bytes whose bit is set to the
 * front, tiers_spread takes them back. */
extern uint64_t tiers_pack[256], tiers_spread[256];

extern const struct tiers_ops tiers_portable;
/* NULL where the processor lacks the instructions. */
const struct tiers_ops *tiers_neon(void);
const struct tiers_ops *tiers_avx2(void);
const struct tiers_ops *tiers_avx512(void);
/* The best that this machine can run. */
const struct tiers_ops *tiers_ops_best(void);
/* All that this machine can run, slowest first: NULL behind the last. */
const struct tiers_ops *tiers_ops_at(unsigned i);

#endif
