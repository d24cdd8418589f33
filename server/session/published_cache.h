/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sample indexes of published shards in files beside the store, so that a server that starts again need not
 * look through the shards again. One file a shard, named by a hash of dataset and shard: a record (FORMAT.md,
 * section 8) that holds what the index was made from (format, window; size, time of change and inode of the
 * shard and of its .idx or index.json) and the index itself.
 *
 * A file is used only if its checksum is right and it was made from exactly what is there now; else it is as
 * good as absent, and replaced when the index was built. All of them may be removed at any time. Nothing is
 * written where that would eat into the space that the store keeps free; what cannot be written is done
 * without.
 */
#ifndef LARDER_PUBLISHED_CACHE_H
#define LARDER_PUBLISHED_CACHE_H

#include "server/session/published.h"

/* Embedded in the caller's struct, zeroed before; done runs later. */
struct cache_op {
    void (*done)(struct cache_op *op);
    bool found; /* load: encoded is the index */
    struct buf encoded;
    /* Private. */
    struct worker *w;
    const struct pubversion *version;
    uint32_t shard;
    struct io_op io;
    struct loop_stat stat;
    struct buf file;
    int fd;
    bool folder_made;
    int64_t result;
    char folder[400], path[440], temporary[460];
};

/* Both return false, and never call done, where no such files are kept (or, storing, this one cannot be). The
 * version must stay until done. */
must_check bool cache_load(struct cache_op *op, struct worker *w, const struct pubversion *v, uint32_t shard);
/* encoded is copied before this returns. */
must_check bool cache_store(struct cache_op *op, struct worker *w, const struct pubversion *v, uint32_t shard,
                            struct slice encoded);

#endif
