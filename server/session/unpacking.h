/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One packed shard becomes a file with its raw bytes: read and written step by step on a loop, unpacked on
 * its helper threads. The file has its name only when it is whole: of the packed file that the version names,
 * with the size and the checksums that index.json tells, and durable. Memory: two buffers and zstd's window.
 */
#ifndef LARDER_UNPACKING_H
#define LARDER_UNPACKING_H

#include "server/session/published.h"

#define UNPACK_PACKED_BYTES (256u << 10) /* read at once */
#define UNPACK_RAW_BYTES    (1u << 20)   /* written at once */

#define UNPACKING_TEMPORARY ".tmp" /* behind the name, until the file is whole */

struct mds_unpack;

/* Zeroed before. */
struct unpacking {
    void (*done)(struct unpacking *u);         /* later; err filled: nothing is left of it */
    bool (*wanted)(const struct unpacking *u); /* asked at each step: false gives it up */
    struct err err;
    /* Private. */
    struct loop *loop;
    const struct pubversion *version;
    const struct pubshard *shard;
    const char *folder, *to;
    int from_fd, to_fd; /* -1: not open */
    bool made;          /* there is a temporary file */
    struct mds_unpack *unpack;
    uint8_t *packed, *raw;
    struct slice in;
    size_t got;
    uint64_t at, done_bytes;
    struct io_op op;
    struct loop_work work;
    struct loop_stat stat;
    char path[PUBLISHED_PATH_BYTES_MAX + 2 + NAME_BYTES_MAX], temporary[512];
};

/* Folder, to and the version stay until done. to is in the folder. */
void unpacking_begin(struct unpacking *u, struct loop *l, const struct pubversion *v, uint32_t shard,
                     const char *folder, const char *to);

#endif
