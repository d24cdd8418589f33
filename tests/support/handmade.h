/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A part saved by hand: the messages that a client sends for it, made of bytes that anybody can check.
 * Nothing in it is encrypted; the server cannot tell.
 */
#ifndef LARDER_TESTS_HANDMADE_H
#define LARDER_TESTS_HANDMADE_H

#include "format/base/cursor.h"
#include "format/index.h"
#include "format/segment.h"

#define PART_CHUNKS 3u

struct handmade {
    struct id run, attempt, segment;
    uint64_t step;
    uint32_t rank, world;
    uint32_t chunk_bytes; /* multiple of BLOCK_BYTES */
    uint8_t *bytes;       /* of all chunks, as stored, from bytes_offset on; freed by handmade_free */
    uint64_t bytes_offset, file_bytes;
    uint8_t digest[SHA256_BYTES]; /* after handmade_seal */
    bool feeds;                   /* its reads are a feed's, not a restore's */
};

struct id handmade_id(uint8_t first);
void handmade_make(struct handmade *p, uint32_t chunk_bytes, uint8_t seed);
void handmade_free(struct handmade *p);

/* Messages, for buf_free; the caller sends the tail where there is one. */
struct buf handmade_run_open(const struct handmade *p);
struct buf handmade_attempt(const struct handmade *p);
struct buf handmade_create(const struct handmade *p, const char *tenant);
struct chunk_entry handmade_entry(const struct handmade *p, uint32_t number);
struct buf handmade_chunk(const struct handmade *p, uint32_t number);
struct slice handmade_chunk_tail(const struct handmade *p, uint32_t number);
struct buf handmade_index(const struct handmade *p, struct buf *tail);
struct buf handmade_seal(struct handmade *p);
struct buf handmade_join(const struct handmade *p, uint32_t wait_ms);

struct range {
    uint64_t offset, bytes;
};
struct buf handmade_read(const struct handmade *p, uint64_t credit, const struct range *ranges,
                         uint32_t count);

#endif
