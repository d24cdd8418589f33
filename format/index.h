/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index of a segment, in two parts that stand one behind the other.
 *
 * Public part: the chunk table. It holds all that verifying without keys needs, and nothing that a name or a
 * shape could be learnt from beyond sizes.
 * Sealed part: tensors, aliases, blobs, and the XXH3-128 of each chunk's plain bytes; encrypted by
 * seal_index(), with the public part's SHA-256 among the associated data, so that opening it authenticates
 * both.
 *
 * Where bytes of a tensor lie. A tensor's plain bytes are its box, packed row-major. Large (>
 * CHUNK_PLAIN_BYTES_MAX / 4): chunks first_chunk, first_chunk + 1, ... of CHUNK_PLAIN_BYTES_MAX bytes each
 * (the last may be shorter), offset 0. Small: inside chunk first_chunk at `offset`, sharing it with others of
 * the same dtype width, wholly within it. A tensor of zero bytes has first_chunk 0 and offset 0 and is stored
 * nowhere. Blobs likewise, as DTYPE_U8.
 */
#ifndef LARDER_INDEX_H
#define LARDER_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "format/base/cursor.h"
#include "format/base/err.h"
#include "format/base/hash.h"
#include "format/codec.h"
#include "format/dtype.h"
#include "format/limits.h"
#include "format/segment.h"

#define CHUNK_ENTRY_BYTES 40

struct chunk_entry {
    uint64_t offset;       /* in the segment, multiple of BLOCK_BYTES; 0 if nothing is stored */
    uint32_t stored_bytes; /* payload and tag; 0 only for CODEC_ZERO */
    uint32_t plain_bytes;  /* 1 .. CHUNK_PLAIN_BYTES_MAX */
    uint8_t codec;
    uint8_t dtype;
    struct hash128 stored_hash; /* XXH3-128 of the stored bytes; zero if none */
};

/* One entry as it travels in chunk messages and stands in the table: 40 bytes. */
void chunk_entry_encode(const struct chunk_entry *c, uint8_t out[CHUNK_ENTRY_BYTES]);
/* Checks ranges and reserved bytes; `number` is for the message. */
must_check int chunk_entry_decode(const uint8_t in[CHUNK_ENTRY_BYTES], uint32_t number,
                                  struct chunk_entry *out, struct err *e);

/* Public part: 32-byte head (checksum, magic, count) and the entries. */
must_check int index_public_encode(const struct chunk_entry *chunks, uint32_t count, struct buf *out,
                                   struct err *e);
size_t index_public_bytes(uint32_t count); /* that it appends */
/* *chunks is malloc'ed for the caller. Checks that stored ranges ascend, do not overlap and end before
 * data_end (the index's offset). */
must_check int index_public_decode(const void *p, size_t n, uint64_t data_end, struct chunk_entry **chunks,
                                   uint32_t *count, struct err *e);

struct tensor {
    struct slice name; /* UTF-8, 1..TENSOR_NAME_BYTES_MAX, no NUL; need not be terminated */
    enum dtype dtype;
    uint32_t dims;                     /* 0: one element */
    uint64_t shape[TENSOR_DIMS_MAX];   /* global */
    uint64_t offsets[TENSOR_DIMS_MAX]; /* of the box that this part holds */
    uint64_t lengths[TENSOR_DIMS_MAX];
    uint64_t bytes; /* of the box */
    uint32_t first_chunk;
    uint32_t offset; /* within first_chunk */
    /* XXH3-128 of the box's bytes, where it is small (see above): what shows that two ranks hold the same.
     * All zeros: not told. Ignored, and not written, for a large tensor: there the plain hashes of its chunks
     * tell. */
    struct hash128 plain_hash;
};

/* What a record says before its numbers, and what follows from it. Records that follow each other mostly have
 * the same, and a processor that takes this from the one before need not wait for where the next begins. */
struct record_form {
    size_t name_bytes;
    uint8_t dtype, form;
    unsigned unit; /* dtype_unit */
    size_t bytes;  /* of the record; 0: of no record that was taken */
};

struct place { /* of a tensor's bytes; see above */
    uint32_t chunk, offset;
    uint64_t bytes;
};

struct alias {
    struct slice name;
    uint32_t tensor; /* index in the table */
};

struct blob {
    struct slice name; /* 1..NAME_BYTES_MAX */
    uint64_t bytes;
    uint32_t first_chunk;
    uint32_t offset;
};

/* What the sealed part holds. Arrays and names belong to whoever filled it; those of a decoded one are freed
 * by index_private_free. Of a view, tensors stay in the stored bytes, a quarter as large, and are taken out
 * one by one: a checkpoint may have millions. */
struct index_private {
    struct tensor *tensors; /* NULL in a view: see index_tensor */
    uint32_t tensor_count;
    struct alias *aliases;
    uint32_t alias_count;
    struct blob *blobs;
    uint32_t blob_count;
    struct hash128 *plain_hashes; /* one per chunk */
    uint32_t chunk_count;
    const uint8_t *stored; /* of a view: the bytes, and where in them each tensor begins */
    size_t stored_bytes;
    uint32_t *places;
    void *owned, *expanded, *copy;
};

/* plain_hashes may be NULL: known last, and written by index_private_hash over the bytes that this made. */
must_check int index_private_encode(const struct index_private *x, struct buf *out, struct err *e);
void index_private_hash(const struct hash128 *plain_hashes, uint32_t chunk_count, uint8_t *p);
/* Of what lies behind the tensors' records: aliases and blobs. */
size_t index_private_rest_bytes(const struct index_private *x);
/* The same from records that were put one by one, of tensors that were checked and have different names: out
 * holds records_at bytes of anything, and them. Afterwards it holds `room` zeros and then what
 * index_private_encode makes; the records stay where they are if that room and the head have records_at
 * bytes. x: the rest; its tensors are only counted. */
must_check int index_private_finish(const struct index_private *x, size_t room, size_t records_at,
                                    struct buf *out, struct err *e);
size_t index_private_head_bytes(uint32_t chunk_count); /* before the first record */
/* Checks names, dtypes, boxes within shapes, places within the chunk table, duplicate names and aliases. */
must_check int index_private_decode(const void *p, size_t n, const struct chunk_entry *chunks, uint32_t count,
                                    struct index_private *out, struct err *e);
/* The same without a copy: p must stay as it is until index_private_free. That no name is there twice is not
 * checked. */
must_check int index_private_view(const void *p, size_t n, const struct chunk_entry *chunks, uint32_t count,
                                  struct index_private *out, struct err *e);
/* Gives a view its array of tensors, and checks that no name is there twice. */
must_check int index_private_expand(struct index_private *x, struct err *e);
void index_private_free(struct index_private *x);
/* Tensor i: in the array, or taken out of a view into *room, of which only its dimensions are written. */
const struct tensor *index_tensor(const struct index_private *x, uint32_t i, struct tensor *room);
struct slice index_tensor_name(const struct index_private *x, uint32_t i);

/* Is tensor i a whole one of this name, dtype and shape? Then where it lies. Quicker than index_tensor. */
bool index_tensor_is(const struct index_private *x, uint32_t i, struct slice name, enum dtype dtype,
                     uint32_t dims, const uint64_t *shape, struct place *out);

/* A tensor as it stands in the sealed part. hashed: with room for plain_hash, or with it where it is told;
 * only for those that have one. Place and hash may be written later. */
void record_put(struct buf *out, const struct tensor *t, bool hashed);
/* Of records that were checked. get: all but `bytes` and plain_hash; of arrays only the dimensions are
 * written. hash: zeros if it is not told. */
void record_get(const uint8_t *record, struct tensor *out);
struct hash128 record_hash(const uint8_t *record);
struct slice record_name(const uint8_t *record);
/* As index_tensor_is, all of *out but `bytes`. */
bool record_is(const uint8_t *record, struct slice name, enum dtype dtype, uint32_t dims,
               const uint64_t *shape, struct place *out);
void record_set_place(uint8_t *record, uint32_t first_chunk, uint32_t offset);
void record_set_hash(uint8_t *record, struct hash128 plain_hash);
/* All but `bytes`, of bytes that may be anything: how many the record has, or 0 if it is cut off or not in
 * the one form that it can have. Name and numbers are not checked. */
size_t record_take(const uint8_t *p, size_t n, struct tensor *out);
/* The same, much quicker, of nearly all there are: small whole tensors that have bytes, with numbers of 32
 * bits, of no packed dtype, with the bytes of its elements. 0: the record is another one, which says nothing
 * of whether it is good. form: zeros, or what was left by the record before. */
size_t record_take_small(const uint8_t *p, size_t n, struct record_form *form, struct place *out);

/* Checks one tensor's description (name, dtype, dims, box inside shape, packing) and computes its bytes. Used
 * before a save and after decoding. Errors name the tensor. */
must_check int tensor_check(const struct tensor *t, uint64_t *bytes, struct err *e);
/* Bytes of its box, once tensor_check has seen it. */
uint64_t tensor_bytes(const struct tensor *t);

/* Is a tensor (or blob) of so many bytes cut into chunks of its own? */
static inline bool index_large(uint64_t bytes)
{
    return bytes > CHUNK_PLAIN_BYTES_MAX / 4;
}

/* The parts of one checkpoint, parts[i] from rank i: does every name have one dtype and one global shape, do
 * the boxes of all parts tile it without a gap, and do boxes overlap only where they are the same box with
 * the same bytes? Do aliases name the same tensor wherever they appear? ERR_MISMATCH naming tensor, ranks and
 * boxes. Blobs belong to their rank and are not compared. Near-linear in the number of tensors. */
must_check int index_check_set(const struct index_private *parts, uint32_t world, struct err *e);

#endif
