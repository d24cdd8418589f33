/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Raw bytes of published shards that are packed (x.mds.zstd without an x.mds), in files beside the store: a
 * shard is unpacked when it is first used, once for all who want it, and its file is found again by the next
 * server. A file's name is a hash of what it was made of (FORMAT.md, section 8), so one that is stale is
 * found no more; those of versions that went, and of directories that are published no more, are removed.
 *
 * Together they hold no more than limits.unpacked_bytes_max, those being made and removed included: that
 * which nobody has had open for the longest time goes first. While all are open, who wants another waits
 * UNPACKED_ROOM_MS. The space that the store keeps free is left.
 *
 * Threads: one table for all loops, under one lock; nothing is read, written or waited for under it. Each
 * loop makes one file at a time.
 */
#ifndef LARDER_UNPACKED_H
#define LARDER_UNPACKED_H

#include "server/session/published.h"

#define UNPACKED_KEY_BYTES (8 + ID_BYTES) /* dataset; dataset, shard and its packed file */
#define UNPACKED_ROOM_MS   10000u

struct unpacked; /* of a server */
struct unpacked_file;
struct unpacker; /* of a loop */

/* Zeroed before first use. */
struct unpacked_want {
    /* file: there, at path, until it is put back; from within unpacked_get if nothing had to be done for it.
     * NULL: why is in err. */
    void (*told)(struct unpacked_want *want);
    struct unpacked_file *file;
    const char *path; /* while the file is held */
    struct err err;
    /* Private. */
    struct worker *w;
    struct pubversion *version;
    uint32_t shard;
    uint8_t key[UNPACKED_KEY_BYTES];
    struct list link;
    struct loop_msg msg;
};

must_check int unpacked_create(struct server *s, struct unpacked **out); /* 0 or -ENOMEM */
void unpacked_destroy(struct unpacked *u); /* nothing is in flight; NULL allowed */
must_check int unpacker_create(struct worker *w, struct unpacker **out); /* 0 or -ENOMEM */
void unpacker_destroy(struct unpacker *x);                               /* NULL allowed */

/* Once, on loop 0: finds what earlier servers left; who wants something meanwhile waits. */
void unpacked_load(struct worker *w);
/* A shard that is packed. The version stays until told. */
void unpacked_get(struct unpacked_want *want, struct worker *w, struct pubversion *v, uint32_t shard);
/* used_ns: when it was used last, by loop_unix_ns. */
void unpacked_put(struct worker *w, struct unpacked_file *file, uint64_t used_ns);
/* The same of one that somebody has removed. */
void unpacked_lost(struct worker *w, struct unpacked_file *file);
/* It should not be left open when nobody reads it: somebody waits for room, or it is to go. */
bool unpacked_takes_room(const struct worker *w, const struct unpacked_file *file);

/* What the folder holds now. */
void unpacked_keep_version(struct worker *w, const struct pubversion *v);
/* On loop 0: its directories are others now. */
void unpacked_keep_dirs(struct worker *w);

/* Nothing of this loop is under way. */
bool unpacker_idle(const struct unpacker *x);
/* Gives up what is being made and waited for, on all loops; from any. */
void unpacked_hurry(struct server *s);

#endif
