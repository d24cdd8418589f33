/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scratch files: tensors as they are, not encrypted, not compressed, for the disk of one machine (FORMAT.md,
 * section 14). A header block, the tensors' packed bytes, each from a border of blocks on, and a table at the
 * end that describes and hashes them.
 */
#ifndef LARDER_SCRATCH_H
#define LARDER_SCRATCH_H

#include "format/index.h"

#define SCRATCH_VERSION     1u
#define SCRATCH_CHUNK_BYTES CHUNK_PLAIN_BYTES_MAX /* what one hash covers */
#define SCRATCH_HASH_BYTES  16u

struct scratch_header {
    uint64_t table_offset; /* multiple of BLOCK_BYTES, at least one block */
    uint64_t table_bytes;
    uint32_t tensors;
    uint64_t table_hash; /* XXH3-64 */
};

void scratch_header_encode(const struct scratch_header *h, uint8_t out[BLOCK_BYTES]);
/* ERR_CORRUPT, ERR_VERSION. */
must_check int scratch_header_decode(const uint8_t in[BLOCK_BYTES], struct scratch_header *out,
                                     struct err *e);
/* Do the first bytes say that it is a scratch file, of whatever version and in whatever state? */
bool scratch_is(const void *p, size_t n);

struct scratch_item {
    struct tensor tensor;  /* first_chunk, offset and plain_hash mean nothing here */
    uint64_t place;        /* of its bytes in the file */
    const uint8_t *hashes; /* SCRATCH_HASH_BYTES for each chunk: chunk_hash of gpudirect, lo before hi */
};

static inline uint64_t scratch_chunks(uint64_t bytes)
{
    return bytes / SCRATCH_CHUNK_BYTES + (bytes % SCRATCH_CHUNK_BYTES != 0);
}
/* Where the next tensor's bytes begin, when one of so many bytes begins at place. ERR_LIMIT. */
must_check int scratch_next(uint64_t place, uint64_t bytes, uint64_t *next, struct err *e);

/* Appends the tensor's row of the table, whose tensor was checked (tensor_check). */
void scratch_item_encode(struct buf *b, const struct scratch_item *item);
/* The table that h describes; h came from scratch_header_decode. Checks its hash, every tensor, and that data
 * and table fill the file. *items is malloc'ed for the caller; names and hashes point into p. Names may
 * repeat: the caller looks. */
must_check int scratch_table_decode(const void *p, size_t n, const struct scratch_header *h,
                                    struct scratch_item **items, struct err *e);

#endif
