/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Codec "planes": typed compression of one chunk. Layout of a payload, in order (FORMAT.md has an example):
 *
 *   u8 layout (1), u8 planes (the width of an element)
 *   per plane, most significant first, its kind:
 *     0 raw       its bytes, one per element
 *     1 constant  u8 value; no bytes
 *     2 tiers     u8 tiers (0 .. 4), per tier u8 k (1 .. 7), u8 base
 *     3 zstd      u32 bytes of one zstd frame
 *   bodies: of the raw planes, then of the others, both most significant first. The body of a plane in tiers
 * is the masks of tier 1 for all elements, those of tier 2 for the escapes of tier 1, and so on; then the
 *   escapes of the last tier as bytes.
 */
#ifndef LARDER_CODEC_PLANES_H
#define LARDER_CODEC_PLANES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/base/err.h"
#include "format/base/hash.h"
#include "format/codec_tiers.h"
#include "format/dtype.h"

#define TIERS_MAX 4u

struct planes_state;
must_check struct planes_state *planes_state_create(void); /* NULL: no memory */
void planes_state_free(struct planes_state *s);
/* Other loops than the best. */
void planes_state_use(struct planes_state *s, const struct tiers_ops *ops);

/* Bytes of an element, as planes sees it: 1, 2, 4 or 8. */
unsigned planes_width(enum dtype dtype);

/* From a sample: about how many bytes n plain bytes would become; n if they would not shrink. Prepares the
 * plan that planes_encode() then follows. n is a multiple of the width, and at least 64. */
size_t planes_probe(struct planes_state *s, enum dtype dtype, bool dense, const uint8_t *plain, size_t n);
/* Bytes written to out, which has room for n and TIERS_SLACK; 0 if that was not less than n. Only after
 * planes_probe() on the same bytes. sum, if not NULL: the plain bytes are added to it; to be thrown away if 0
 * was returned. */
size_t planes_encode(struct planes_state *s, const uint8_t *plain, size_t n, uint8_t *out,
                     struct hash128_sum *sum);

/* 0, ERR_CORRUPT, or ERR_NO_MEMORY. sum, if not NULL: the plain bytes are added to it. */
must_check int planes_decode(struct planes_state *s, enum dtype dtype, const uint8_t *payload,
                             size_t payload_bytes, uint8_t *out, size_t n, struct hash128_sum *sum,
                             struct err *e);

#endif
