/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A segment: one immutable stored file.
 *
 *   0            header, 4 KiB
 *   4096         chunks as stored (sealed payloads), each starting on a 4 KiB border, zero padding between
 *   index_offset index: public part (chunk table), sealed part (tensor table, blobs, plain hashes);
 * format/index.h end - 4096   trailer, 4 KiB: finds the index, binds it by SHA-256, and carries the client's
 * authentication tag
 *
 * Fields are at fixed offsets, given in FORMAT.md and asserted in segment.c. Checksums come first, reserved
 * bytes are zero and checked.
 */
#ifndef LARDER_SEGMENT_H
#define LARDER_SEGMENT_H

#include <stdint.h>

#include "format/base/cursor.h"
#include "format/base/err.h"
#include "format/base/hash.h"
#include "format/limits.h"

#define ID_BYTES         16
#define SALT_BYTES       32
#define COMMITMENT_BYTES 32
#define TAG_BYTES        16

struct id {
    uint8_t bytes[ID_BYTES];
};

static inline bool id_equal(const struct id *a, const struct id *b)
{
    return __builtin_memcmp(a, b, sizeof *a) == 0;
}

struct segment_header {
    uint32_t version;
    uint32_t suite;
    struct id segment_id; /* random, chosen by the client */
    struct id run_id;
    struct id attempt; /* 128-bit id of the job's incarnation */
    uint64_t step;     /* datasets: the version being written, 0 */
    uint32_t rank;     /* datasets: the shard's number */
    uint32_t world;
    uint8_t salt[SALT_BYTES]; /* fresh and random for every attempt to write */
    struct id dek_id;
    uint8_t commitment[COMMITMENT_BYTES]; /* key commitment: tells a wrong key from damage */
    char tenant[TENANT_NAME_BYTES_MAX + 1];
};

void segment_header_encode(const struct segment_header *h, uint8_t out[BLOCK_BYTES]);
/* ERR_VERSION before anything else is looked at, then ERR_CORRUPT naming the field and its offset. */
must_check int segment_header_decode(const uint8_t in[BLOCK_BYTES], struct segment_header *out,
                                     struct err *e);

struct segment_trailer {
    uint32_t version;
    struct id segment_id;
    uint64_t file_bytes; /* of the whole segment, trailer included */
    uint64_t index_offset;
    uint64_t index_bytes;        /* public and sealed part, without padding */
    uint64_t index_public_bytes; /* of these, the public part */
    uint32_t chunks;
    uint8_t index_digest[SHA256_BYTES]; /* of the index_bytes; also in the commit record */
    uint8_t tag[TAG_BYTES];             /* by seal_trailer() over the fields above */
};

void segment_trailer_encode(const struct segment_trailer *t, uint8_t out[BLOCK_BYTES]);
must_check int segment_trailer_decode(const uint8_t in[BLOCK_BYTES], struct segment_trailer *out,
                                      struct err *e);
/* The bytes that the trailer's tag covers. */
#define SEGMENT_TRAILER_SIGNED_BYTES 96
void segment_trailer_signed(const struct segment_trailer *t, uint8_t out[SEGMENT_TRAILER_SIGNED_BYTES]);

static inline uint64_t block_align(uint64_t n)
{
    return (n + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
}

#endif
