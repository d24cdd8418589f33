/* SPDX-License-Identifier: Apache-2.0 */
/* A segment while it is being written: segments.c writes, collect.c gives up. */
#ifndef LARDER_STORE_WRITER_H
#define LARDER_STORE_WRITER_H

#include "server/store/internal.h"

enum chunk_state { CHUNK_ABSENT = 0, CHUNK_WRITING, CHUNK_WRITTEN };

struct writer {
    struct backend_file *file; /* NULL until created, and once sealed or discarded */
    uint8_t *block;            /* BLOCK_BYTES, aligned: the header, at the end the trailer */
    struct hash128 header_hash;
    uint32_t chunks, received;
    unsigned flying; /* operations on the file that have not completed */
    bool discarding;
    uint64_t reserve_bytes, tables_bytes;
    uint8_t (*entries)[CHUNK_ENTRY_BYTES]; /* as they came */
    uint8_t *states;                       /* enum chunk_state of each */
    uint8_t *table;                        /* the index's public part, as far as it came */
    uint64_t index_offset;                 /* 0: no piece came yet */
    size_t index_bytes;                    /* that came; written, or on their way */
    struct sha256 *index_hash; /* of the index_bytes; NULL once it has been asked for the digest */
    uint8_t index_digest[SHA256_BYTES];
    struct segment_trailer trailer;
};

/* An operation on the file begins, has ended. A segment that was given up meanwhile is discarded after its
 * last. */
void writer_begin(struct segment *g);
void writer_end(struct store *s, struct segment *g);
/* The file is gone (sealed, or lost): gives memory and reserves back. */
void writer_close(struct store *s, struct segment *g);

#endif
