/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sealing of what a segment stores: AES-256-GCM, 16-byte tag, nonce = domain (4 bytes) and counter (8 bytes),
 * never random. The key is fresh for every segment, so (key, nonce) repeats only if one segment seals one
 * chunk number twice; the sealer refuses that. Associated data binds version, suite, tenant, run, step,
 * attempt, rank, world and segment (all of the header's ids), and for chunks number, last flag, plain length,
 * codec and dtype.
 */
#ifndef LARDER_SEAL_H
#define LARDER_SEAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/base/err.h"
#include "format/codec.h"
#include "format/index.h"
#include "format/keys.h"
#include "format/segment.h"

/* Key and context of one segment. Immutable after creation but for the record of sealed chunk numbers, which
 * is atomic: one seal may be used by many threads at once. */
struct seal;

/* For writing: derives the chunk key and fills h->dek_id and h->commitment; everything else of h is set by
 * the caller before, and stays as it is. chunks: how many there will be (last flag, and nonce reuse guard).
 */
must_check int seal_create(const struct dek *dek, struct segment_header *h, uint32_t chunks,
                           struct seal **out, struct err *e);
/* For reading: ERR_KEY if the header's commitment is not this DEK's. */
must_check int seal_open(const struct dek *dek, const struct segment_header *h, uint32_t chunks,
                         struct seal **out, struct err *e);
void seal_free(struct seal *s);

/* What each worker thread needs of its own: cipher contexts. */
struct seal_state;
must_check struct seal_state *seal_state_create(void);
void seal_state_free(struct seal_state *st);

/* out: payload_bytes + TAG_BYTES; may equal payload. Refused, with nothing written: a number that was sealed
 * before (ERR_EXISTS), CODEC_ZERO (ERR_INVALID: nothing is stored, so nothing is sealed). The number counts
 * as used once it was tried. stored_hash: of what was written (chunk_entry's), for less than hashing it
 * later; may be NULL. */
must_check int seal_chunk(const struct seal *s, struct seal_state *st, uint32_t number, uint32_t plain_bytes,
                          enum codec codec, enum dtype dtype, const void *payload, size_t payload_bytes,
                          void *out, struct hash128 *stored_hash, struct err *e);
/* stored_bytes includes the tag; out: stored_bytes - TAG_BYTES; may equal stored. ERR_CORRUPT naming the
 * chunk; out was wiped then. CODEC_ZERO: nothing is read or written, 0. found: the hash of the stored bytes,
 * to be compared with the entry's, also if the chunk does not verify; may be NULL. */
must_check int open_chunk(const struct seal *s, struct seal_state *st, uint32_t number,
                          const struct chunk_entry *entry, const void *stored, void *out,
                          struct hash128 *found, struct err *e);

/* The same for a chunk that comes piece by piece, opened where it lies: its payload, then its tag. A state
 * opens one at a time. The payload counts for nothing before open_chunk_end has returned 0; ERR_CORRUPT as
 * above, and then the caller wipes it. */
must_check int open_chunk_begin(const struct seal *s, struct seal_state *st, uint32_t number,
                                const struct chunk_entry *entry, struct err *e);
void open_chunk_add(struct seal_state *st, uint8_t *bytes, size_t n);
must_check int open_chunk_end(struct seal_state *st, uint32_t number, const struct chunk_entry *entry,
                              const uint8_t tag[TAG_BYTES], struct err *e);

/* Sealed part of the index: public_digest is the SHA-256 of the public part. out: n + TAG_BYTES, may equal
 * plain. Once per seal (ERR_EXISTS). */
must_check int seal_index(const struct seal *s, struct seal_state *st,
                          const uint8_t public_digest[SHA256_BYTES], const void *plain, size_t n, void *out,
                          struct err *e);
/* The same piece by piece: n bytes in all, which are added in order, then the tag. A state seals one at a
 * time. */
must_check int seal_index_begin(const struct seal *s, struct seal_state *st,
                                const uint8_t public_digest[SHA256_BYTES], size_t n, struct err *e);
void seal_index_add(struct seal_state *st, const void *plain, size_t n, void *out);
void seal_index_end(struct seal_state *st, uint8_t tag[TAG_BYTES]);
must_check int open_index(const struct seal *s, struct seal_state *st,
                          const uint8_t public_digest[SHA256_BYTES], const void *stored, size_t n, void *out,
                          struct err *e);

/* The trailer's tag: written by seal_trailer into t->tag (once per seal: ERR_EXISTS), checked by
 * check_trailer. */
must_check int seal_trailer(const struct seal *s, struct seal_state *st, struct segment_trailer *t,
                            struct err *e);
must_check int check_trailer(const struct seal *s, struct seal_state *st, const struct segment_trailer *t,
                             struct err *e);

#endif
