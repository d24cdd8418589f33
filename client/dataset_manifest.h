/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shard table of an imported dataset version: the blob "larder.shards" of its part 0, so that opening a
 * version of many shards reads one small object and not all of them.
 *
 *   u32 magic "LRDM"   u32 version, 1   u32 count   u32 zero
 *   count times: u16 length, name; u64 bytes; u64 samples; u8 format
 *   u64 XXH3-64 of all before it
 */
#ifndef LARDER_DATASET_MANIFEST_H
#define LARDER_DATASET_MANIFEST_H

#include <stdint.h>

#include "format/base/cursor.h"
#include "format/base/err.h"
#include "format/limits.h"
#include "format/samples.h"

/*
 * Tensors and blobs of an imported shard. Its bytes are cut into pieces of one size, which a reader has to
 * fetch and open whole, so the size follows that of a sample: feeds read samples from anywhere in a shard,
 * and with the pieces at both ends of one some bytes that nobody wants, about an eighth of it.
 *   one tensor "shard" of all its bytes, cut at 4 MiB, where samples are large or the shard is small
 *   else tensors "shard/0", "shard/1", ...: piece i in chunk i, all of the size of the first but the last
 */
#define SHARD_TENSOR       "shard" /* u8, shape [bytes] */
#define SHARD_PIECE_MIN    (128u << 10)
#define SHARD_PIECES_MAX   16384u
#define SHARD_SAMPLE_LARGE (64u << 20)      /* from here on, 4 MiB are little */
#define SHARD_BLOB_SAMPLES "larder.samples" /* samples_encode() */
#define SHARD_BLOB_NAME    "larder.name"
#define SHARD_BLOB_TABLE   "larder.shards" /* part 0 only */

/* Bytes of a piece for a shard of that size: CHUNK_PLAIN_BYTES_MAX says that it is not cut into tensors. */
uint32_t shard_piece_bytes(uint64_t bytes, uint64_t samples);

#define SAMPLES_UNKNOWN UINT64_MAX

struct shard {
    char *name; /* base name of its file */
    uint64_t bytes;
    uint64_t samples; /* SAMPLES_UNKNOWN: of a published directory, not counted yet */
    enum shard_format format;
};

/* A table owns its array and names. Zeroed is empty. */
struct shard_table {
    struct shard *shards;
    uint32_t count;
};

must_check int shard_table_init(struct shard_table *t, uint32_t count, struct err *e); /* all zero */
must_check int shard_table_name(struct shard_table *t, uint32_t i, struct slice name,
                                struct err *e); /* copies */
void shard_table_free(struct shard_table *t);

/* Size of the encoded form: it does not depend on the counts. */
uint64_t shard_table_bytes(const struct shard_table *t);
must_check int shard_table_encode(const struct shard_table *t, struct buf *out, struct err *e);
/* Checks everything; count must be `world`. ERR_CORRUPT, ERR_VERSION. */
must_check int shard_table_decode(const void *p, size_t n, uint32_t world, struct shard_table *out,
                                  struct err *e);

#endif
