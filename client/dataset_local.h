/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The files of a published directory that lie on this machine too (or are mounted here): read without the
 * server. They are the server's if names, sizes, times of change and inodes give the version that it told;
 * what changes later is noticed as the server would, by looking at a file again after every read: never mixed
 * bytes.
 */
#ifndef LARDER_CLIENT_DATASET_LOCAL_H
#define LARDER_CLIENT_DATASET_LOCAL_H

#include <sys/stat.h>

#include "client/dataset_view.h"

struct dataset_local;

/* d is a published directory. ERR_MISMATCH: these are not the server's files, with what differs as far as it
 * can be told; ERR_UNSUPPORTED: token files, whose windows only the server knows. */
must_check int dataset_local_open(const struct larder_dataset *d, const char *folder,
                                  struct dataset_local **out, struct err *e);
void dataset_local_close(struct dataset_local *l); /* NULL allowed */
const char *dataset_local_folder(const struct dataset_local *l);

/* One shard's file, open for a few reads. Any threads, each with its own. */
struct local_shard {
    const struct dataset_local *local;
    uint32_t shard;
    int fd;
};
/* ERR_MISMATCH: it is another one by now. */
must_check int local_shard_open(const struct dataset_local *l, uint32_t shard, struct local_shard *out,
                                struct err *e);
void local_shard_close(struct local_shard *s);
/* The path, for those who open it by other means, and look at it with local_shard_same. */
void local_shard_path(const struct dataset_local *l, uint32_t shard, char *out, size_t size);
/* Is what was seen of an open file that of the version? ERR_MISMATCH. */
must_check int local_shard_same(const struct dataset_local *l, uint32_t shard, const struct stat *seen,
                                struct err *e);
/* n bytes from offset on, checked to be of the version. */
must_check int local_shard_read(const struct local_shard *s, uint64_t offset, size_t n, void *to,
                                struct err *e);

#endif
