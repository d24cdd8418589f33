/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes of a shard, read in order out of a file: as they are, or unpacked from zstd on the way (the
 * memory of one window, at most 128 MiB). Checksums that the dataset carries are computed on the way where
 * asked for.
 */
#ifndef LARDER_DATASET_SOURCE_H
#define LARDER_DATASET_SOURCE_H

#include <stdbool.h>
#include <sys/stat.h>

#include "format/mds.h"

struct source_options {
    const char *path;
    uint64_t bytes;         /* of the shard */
    bool zstd;              /* the file is packed */
    bool whole;             /* all of it will be read */
    const struct stat *was; /* it must still be that file, at the open and at the end; NULL: any */
    const struct mds_file *plain, *packed; /* whose checksums are compared at the end; NULL: none */
};

struct source;

must_check int source_open(const struct source_options *o, struct source **out, struct err *e);
/* The next n bytes, all of them. */
must_check int source_read(struct source *s, void *p, size_t n, struct err *e);
/* Passes over some of the next n bytes, which costs nothing; says how many, 0 where they must be read. */
uint64_t source_skip(struct source *s, uint64_t n);
/* All bytes were read: nothing may follow, checksums must agree, the file be unchanged. */
must_check int source_end(struct source *s, struct err *e);
void source_close(struct source *s); /* NULL allowed */

/* ERR_MISMATCH if the open file is not as it was. */
must_check int source_unchanged(const struct stat *was, int fd, struct err *e);

#endif
