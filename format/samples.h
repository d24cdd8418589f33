/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sample index of one shard: where the fields of each sample lie in the shard's bytes. Built by a scanner
 * that is pushed the shard's bytes in order, so that the same code serves the importing client, the server
 * (for published directories) and the fuzzer. Stored as the blob "larder.samples" of an imported shard.
 */
#ifndef LARDER_SAMPLES_H
#define LARDER_SAMPLES_H

#include <stddef.h>
#include <stdint.h>

#include "format/base/cursor.h"
#include "format/base/err.h"
#include "format/mds.h"
#include "format/tokens.h"

/*
 * Tar. The key of a member is its name up to the first dot of the base name, folder included; what follows
 * the dot is the field ("bin" if nothing does). Case is kept. Folders, devices, members whose base name
 * begins with a dot or has none, and what lies under a first folder or is itself called "__so__" are no
 * samples and passed over; links are refused, since what they stand for may be elsewhere.
 */
enum shard_format {
    SHARD_WHOLE = 0,   /* the file is one sample with one field "bin"; its key is the shard's base name */
    SHARD_TAR = 1,     /* members grouped by key, as WebDataset does: see below */
    SHARD_RECORDS = 2, /* fixed-size records, each a sample with one field "bin" and an empty key */
    SHARD_MDS = 3,     /* a raw MDS shard; its columns are the fields, keys are empty */
    SHARD_TOKENS = 4,  /* a Megatron .bin: documents or windows, one field "tokens", keys are empty */
    SHARD_FORMAT_COUNT
};

struct sample_field {
    struct slice name; /* tar: extension ("txt", "seg.png"); mds: column; "tokens"; "bin" otherwise */
    struct slice type; /* mds: encoding ("int32", "pkl"); tokens: "uint16"; "bytes" otherwise */
    uint64_t offset;   /* of the data, in the shard */
    uint64_t bytes;
};

struct samples; /* immutable once built */

uint64_t samples_count(const struct samples *s);
/* Key of sample i (valid as long as s). */
struct slice samples_key(const struct samples *s, uint64_t i);
uint32_t samples_fields(const struct samples *s, uint64_t i);
struct sample_field samples_field(const struct samples *s, uint64_t i, uint32_t field);
void samples_free(struct samples *s);

/* Encoded form: self-contained, checksummed, see FORMAT.md. decode checks everything, including that every
 * field lies within shard_bytes. */
must_check int samples_encode(const struct samples *s, struct buf *out, struct err *e);
must_check int samples_decode(const void *p, size_t n, uint64_t shard_bytes, struct samples **out,
                              struct err *e);

/* What is known of a shard before its samples are found. What it names must outlive the builder. */
struct samples_source {
    enum shard_format format;
    const char *shard; /* its name, for errors; for the key of a whole file */
    uint64_t shard_bytes;
    uint64_t record_bytes;       /* SHARD_RECORDS, else 0 */
    const struct mds_shard *mds; /* SHARD_MDS: what index.json says of it */
    uint64_t idx_bytes;          /* SHARD_TOKENS: of the .idx, which is pushed instead of the shard */
    struct token_window window;  /* SHARD_TOKENS */
};
/* Bytes that are pushed or skipped in all: the shard's, but for tokens those of the .idx. */
uint64_t samples_source_bytes(const struct samples_source *s);

/* Building. push takes the bytes in order, any split. Members of a sample must be adjacent; a duplicate
 * field, a key that comes back later, a cut archive, sparse members, contradictory sizes, and offsets that do
 * not fit are refused naming shard, place and what was expected. */
struct samples_builder;
must_check int samples_builder_create(const struct samples_source *source, struct samples_builder **out,
                                      struct err *e);
must_check int samples_builder_push(struct samples_builder *b, const void *p, size_t n, struct err *e);
/* Where the next bytes are needed: the caller may skip up to `skip` bytes of member data instead of pushing
 * them (samples_builder_skip), so that an index over local files costs one read per header. */
uint64_t samples_builder_skippable(const struct samples_builder *b);
void samples_builder_skip(struct samples_builder *b, uint64_t n);
/* All bytes were pushed or skipped. On success *out is owned by the caller; the builder stays to be
 * freed. */
must_check int samples_builder_finish(struct samples_builder *b, struct samples **out, struct err *e);
void samples_builder_free(struct samples_builder *b);

#endif
