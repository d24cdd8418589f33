/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compression of one chunk: plaintext of one dtype in, payload out, chosen per chunk. A payload is decoded
 * with the codec id and plain length that the chunk table gives; both are bound by the chunk's seal, but the
 * decoder trusts neither: any bytes give either exactly plain_bytes bytes or ERR_CORRUPT.
 *
 * codec      payload
 * zero       nothing: all bytes are zero
 * constant   one element's bytes, repeated
 * raw        the bytes
 * zstd       one zstd frame
 * planes     see FORMAT.md: elements split by significance, constant planes not stored, mantissa planes raw,
 *            the exponent plane coded in tiers (fast) or by zstd's entropy stage (dense)
 */
#ifndef LARDER_CODEC_H
#define LARDER_CODEC_H

#include <stddef.h>
#include <stdint.h>

#include "format/base/err.h"
#include "format/base/hash.h"
#include "format/dtype.h"

enum codec {
    CODEC_RAW = 0,
    CODEC_ZERO = 1,
    CODEC_CONSTANT = 2,
    CODEC_ZSTD = 3,
    CODEC_PLANES = 4,
    CODEC_COUNT
};

enum codec_level {
    CODEC_LEVEL_OFF = 0,   /* raw, always */
    CODEC_LEVEL_FAST = 1,  /* the default: at the speed of memory */
    CODEC_LEVEL_DENSE = 2, /* for archives: smaller, slower */
};

const char *codec_name(enum codec codec);

/* Scratch memory of one worker thread; not thread-safe. NULL: no memory. */
struct codec_state;
must_check struct codec_state *codec_state_create(void);
void codec_state_free(struct codec_state *s);
/* Which loops the planes codec runs on: "portable", "NEON", "AVX2", "AVX-512". The best that the machine has
 * unless asked for others; all give the same bytes. -ENOTSUP: this machine has none of that name. */
must_check int codec_state_loops(struct codec_state *s, const char *name);
/* Those that this machine has, slowest first; NULL behind the last. */
const char *codec_loops_at(unsigned i);

/* Largest payload that codec_encode writes for n plain bytes (n <= CHUNK_PLAIN_BYTES_MAX). */
size_t codec_payload_max(size_t n);

/* Encodes n > 0 plain bytes; n is a multiple of the element size where dtype has one of whole bytes. out
 * holds codec_payload_max(n) bytes and does not overlap. Gives the payload's size (<= n unless n < 64) and
 * codec. plain_hash: of the plain bytes, for less than hashing them before or after; may be NULL. */
must_check int codec_encode(struct codec_state *s, enum codec_level level, enum dtype dtype,
                            const void *plain, size_t n, void *out, size_t *payload_bytes, enum codec *codec,
                            struct hash128 *plain_hash, struct err *e);

/* Decodes into exactly n bytes at out, which does not overlap. ERR_CORRUPT naming the codec otherwise.
 * plain_hash: of what was decoded; may be NULL. */
must_check int codec_decode(struct codec_state *s, enum codec codec, enum dtype dtype, const void *payload,
                            size_t payload_bytes, void *out, size_t n, struct hash128 *plain_hash,
                            struct err *e);

#endif
