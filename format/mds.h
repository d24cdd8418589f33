/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index.json of an MDS dataset (MosaicML streaming, version 2): which shard files there are, how many
 * samples each has, and which columns a sample consists of. What lies in a shard is read by samples.h.
 *
 * Encodings are names: the bytes of a column are handed on as they are, and never decoded, least of all
 * unpickled. Only their sizes are checked where the name alone gives one (int8 to float64).
 */
#ifndef LARDER_MDS_H
#define LARDER_MDS_H

#include "format/base/cursor.h"
#include "format/columns.h"

#define MDS_INDEX_NAME      "index.json"
#define MDS_INDEX_BYTES_MAX (64u << 20)
#define MDS_SHARDS_MAX      65536u
#define MDS_HASHES_MAX      16u

struct mds_hash {
    char *algorithm; /* as it stands there: "sha1", "xxh64" */
    char *digest;    /* hexadecimal */
};

struct mds_file {
    char *name; /* below the folder of index.json: a relative path without "." and ".." */
    uint64_t bytes;
    struct mds_hash *hashes;
    uint32_t hash_count;
};

struct mds_shard {
    struct mds_file raw; /* the file that samples are read from */
    struct mds_file zip; /* its compressed form; name NULL: there is none */
    char *compression;   /* "zstd:3"; NULL: none */
    uint64_t samples;
    const struct column *columns; /* shared between shards that have the same */
    uint32_t column_count;        /* 1 .. SAMPLE_FIELDS_MAX */
};

struct mds_index { /* owns everything in it */
    struct mds_shard *shards;
    uint32_t count;
    struct mds_column_set *sets;
};

/* ERR_CORRUPT (not the JSON of an index, or what it says cannot be), ERR_VERSION, ERR_UNSUPPORTED (shards of
 * another format), ERR_LIMIT. The file's name is the caller's to prepend. */
must_check int mds_index_parse(const void *p, size_t n, struct mds_index **out, struct err *e);
void mds_index_free(struct mds_index *x); /* NULL allowed */

/* Is it zstd, at any level? */
bool mds_is_zstd(const char *compression);

#endif
