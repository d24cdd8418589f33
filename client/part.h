/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parts as they are stored: reading and writing one segment. Restore, datasets and feeds read through part_*;
 * saves and imports write through part_writer_*.
 */
#ifndef LARDER_PART_H
#define LARDER_PART_H

#include "client/client.h"
#include "format/index.h"
#include "format/seal.h"
#include "format/segment.h"

/* Restore and feed as in msg_read. PART_VERIFY: as PART_RESTORE, but past the server's memory, from the
 * medium. PART_AGAIN: past the bulk lane too, for what came damaged. */
enum part_class { PART_RESTORE, PART_FEED, PART_VERIFY, PART_AGAIN };

/* An opened segment: header checked against the commit record, index verified (digest, trailer tag) and
 * opened. Immutable; any thread. class: of the first reads; damaged bytes are read again in any case. */
struct part;
must_check int part_open(struct larder *c, struct conn *conn, const struct run *run,
                         const struct commit *commit, uint32_t rank, enum part_class class, struct part **out,
                         struct err *e);
/* All parts of a commit, several at once; parts has commit->world places. On failure none is left open. */
must_check int part_open_all(struct larder *c, struct conn *conn, const struct run *run,
                             const struct commit *commit, struct part **parts, struct err *e);
void part_close(struct part *p);
/* A view, whose names were not compared with each other (index_private_expand). */
const struct index_private *part_index(const struct part *p);
const struct chunk_entry *part_chunks(const struct part *p, uint32_t *count);
const struct segment_header *part_header(const struct part *p);
struct larder *part_client(const struct part *p);

/* Per-thread scratch for opening and decoding. */
struct part_scratch;
must_check struct part_scratch *part_scratch_create(void);
void part_scratch_free(struct part_scratch *s);
/* One that was given back before, if there is one: for those who need it for a moment, again and again. */
must_check struct part_scratch *part_scratch_take(struct larder *c);
void part_scratch_give(struct larder *c, struct part_scratch *s); /* NULL allowed */
/* Stored as it is, not compressed: decoding it is opening it, straight to its place. */
bool part_is_raw(const struct part *p, uint32_t number);
/* Checksum, seal, codec, plain hash: stored bytes of chunk `number` into plain_bytes at out. ERR_CORRUPT
 * naming part and chunk. stored may be overwritten. */
must_check int part_decode(const struct part *p, struct part_scratch *s, uint32_t number, void *stored,
                           void *out, struct err *e);
/* The same without the checksum, which only tells what is wrong where the seal does not verify: for who
 * fetches a damaged chunk again, and has that one's told. */
must_check int part_decode_unsummed(const struct part *p, struct part_scratch *s, uint32_t number,
                                    void *stored, void *out, struct err *e);

/* Fetches stored chunks (by number, ascending; neighbours are coalesced into one range) of one part into
 * memory, which has part_fetch_bytes at least: calls `chunk` in order, on the connection's thread, as each is
 * there; it stays there. Blocks until all came or one failed; if one failed, chunks that were not given may
 * be there in part. A chunk that stores nothing (CODEC_ZERO) comes with n = 0. */
uint64_t part_fetch_bytes(const struct part *p, const uint32_t *numbers, uint32_t count);
must_check int part_fetch(const struct part *p, struct conn *conn, enum part_class class,
                          const uint32_t *numbers, uint32_t count, uint8_t *memory, uint64_t memory_bytes,
                          int (*chunk)(void *arg, uint32_t number, uint8_t *stored, size_t n, struct err *e),
                          void *arg, struct err *e);

/* A raw chunk that is opened where it lies while it comes; used again from chunk to chunk. */
struct part_opening;
must_check struct part_opening *part_opening_create(void); /* NULL: no memory */
void part_opening_free(struct part_opening *o);
must_check int part_opening_begin(struct part_opening *o, const struct part *p, uint32_t number,
                                  struct err *e);
void part_opening_add(struct part_opening *o, uint8_t *bytes, size_t n); /* of the payload, the next */
/* All of the payload, which lies at plain, was given: 0, or ERR_CORRUPT as part_decode, and plain was wiped.
 */
must_check int part_opening_end(struct part_opening *o, uint8_t *plain, const uint8_t *tag, struct err *e);

/* Writing. Chunks are given plain, in any order, from any thread; they are compressed and sealed on the
 * calling thread and sent in the background with bounded memory. */
struct part_writer;
struct part_writer_options {
    struct larder *client;
    struct conn *conn;
    const struct run *run;
    uint64_t step;
    struct id attempt;
    uint32_t rank, world, chunks;
    uint64_t plain_bytes; /* for the reservation */
    /* index_public_bytes(chunks) bytes of room, then what index_private_encode or index_private_finish makes,
     * without plain hashes of chunks. part_writer_seal completes and seals it where it is: it must be there,
     * and untouched from then on, until part_writer_free. */
    struct buf *index;
    enum codec_level level;
    unsigned verify_percent;
    uint64_t in_flight_bytes; /* sent and not answered; 0: 32 MiB */
    /* With it, part_writer_chunk takes `plain` over, may seal into it (it has CHUNK_STORED_BYTES_MAX bytes),
     * and gives it back here, at the latest once the chunk was answered or has failed. On any thread, without
     * locks. NULL: plain is only read, during the call. */
    void (*give)(void *arg, uint8_t *plain);
    void *give_arg;
};
must_check int part_writer_create(const struct part_writer_options *o, struct part_writer **out,
                                  struct err *e);
/* Blocks while in_flight_bytes are under way. Fails with the first error of any chunk. */
must_check int part_writer_chunk(struct part_writer *w, struct part_scratch *s, uint32_t number,
                                 enum dtype dtype, void *plain, uint32_t plain_bytes, struct err *e);
/* All chunks were given: waits for them, sends index and trailer, seals. Fills what join needs. */
must_check int part_writer_seal(struct part_writer *w, struct commit_part *out, struct err *e);
/* Any thread: what is under way or comes later fails with e. */
void part_writer_fail(struct part_writer *w, const struct err *e);
void part_writer_progress(struct part_writer *w, uint64_t *plain, uint64_t *stored, uint64_t *sent,
                          uint32_t *chunks_sent); /* any thread */
/* Sets stored[number] to 1 for each chunk that the server has; any thread. */
void part_writer_stored(struct part_writer *w, uint8_t *stored);
void part_writer_free(struct part_writer *w); /* discards the segment on the server unless sealed */

#endif
