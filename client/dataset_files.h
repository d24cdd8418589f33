/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which files an import is made of: what its caller names, taken apart. A tar, a file of records or any file
 * is one shard; an index.json, or a folder that holds one, stands for the shards of an MDS dataset; X.bin and
 * X.idx, or a folder of them, for token files, which are one shard a pair.
 */
#ifndef LARDER_DATASET_FILES_H
#define LARDER_DATASET_FILES_H

#include <stdbool.h>
#include <sys/stat.h>

#include "client/larder.h"
#include "format/samples.h"

struct import_file {
    char *path; /* that the shard's bytes come from */
    char *name; /* of the shard */
    char *idx;  /* SHARD_TOKENS: the path of its .idx */
    enum shard_format format;
    const struct mds_shard *mds; /* SHARD_MDS: what index.json says */
    bool zstd;                   /* path is that of the packed form */
    struct stat at_scan, idx_at_scan;
    struct buf index; /* encoded sample index; dropped after the scan if all together are too large */
    uint64_t index_bytes;
};

struct import_files { /* owns everything in it; zeroed is empty */
    struct import_file *list;
    uint32_t count, room;
    struct mds_index **indexes;
    uint32_t index_count;
};

/* Errors name the file. Names of shards are all different. */
must_check int import_files_gather(const struct larder_import_options *o, struct import_files *out,
                                   struct err *e);
void import_files_free(struct import_files *f);

#endif
