/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Published directories: folders of shards served read-only as they are, without importing them.
 *
 * A version is what a folder held when it was looked at: names, sizes, times of change and inode numbers of
 * its files, sorted by name (MDS: in the order of index.json); its id is a hash over them. Opening a dataset
 * pins its version. After a range is read and before it is sent, the file is looked at again: if it is not
 * the one that the version names, the read fails and nothing of it is sent, so a reader never gets mixed
 * bytes. A change that keeps size, time and inode cannot be seen.
 *
 * Each loop keeps versions and sample indexes of its own; indexes lie in files beside the store too. A
 * version opened on another loop is found again by looking at the folders: as long as they are unchanged they
 * give the same id.
 *
 * MDS shards may be there in their packed form only: then they are read from files that they are unpacked
 * into (unpacked.h), and the packed file is the one that is looked at.
 */
#ifndef LARDER_PUBLISHED_H
#define LARDER_PUBLISHED_H

#include "server/session/stream.h"

#define PUBLISHED_PATH_BYTES_MAX 700u   /* of a directory in the configuration */
#define VERSIONS_MAX             64u    /* kept on one loop without a reader */
#define PUBLISHED_SHARDS_MAX     65536u /* files in one directory */

struct pubshard {
    char *name;            /* below the folder */
    const char *packed;    /* SHARD_MDS: the packed form, if that is what is there; else NULL */
    uint64_t bytes;        /* of the shard; a packed one's as index.json says */
    struct loop_stat stat; /* of the file that is there */
    char *idx;             /* SHARD_TOKENS: name of its .idx, else NULL */
    struct loop_stat idx_stat;
    const struct mds_shard *mds; /* SHARD_MDS: what index.json says of it */
};

struct pubversion {
    struct list link; /* most recently used last */
    struct id id;
    const struct published_dir *dir;
    struct pubshard *shards;
    uint32_t count;
    struct mds_index *mds; /* SHARD_MDS, else NULL */
    struct loop_stat json_stat;
    uint64_t bytes;
    unsigned refs;
    bool withdrawn; /* its directory is published no more; who reads it goes on */
};

must_check int published_create(struct worker *w, struct published **out);
void published_destroy(struct published *p); /* nothing is in flight */

void pubversion_ref(struct pubversion *v);
void pubversion_unref(struct published *p, struct pubversion *v);
void pubversion_free(struct pubversion *v); /* one that is not kept. NULL allowed */
/* The version known by the id of *built; if there is none, that one, which is taken over. Valid until the
 * callback ends, unless a reference is taken. */
struct pubversion *pubversion_keep(struct published *p, struct pubversion **built);

/* The worker's directories are others now. */
void published_reload(struct published *p);
bool published_visible(const struct published_dir *dir, const char *tenant);

/* Looks at one folder. Embedded in the caller's struct, zeroed before; done runs later, with version set
 * (valid until the callback ends, unless a reference is taken) or err. */
struct scan {
    void (*done)(struct scan *s);
    struct pubversion *version;
    struct err err;
    /* Private. */
    struct published *p;
    const struct published_dir *dir;
    struct pubversion *building;
    struct loop_names names;
    uint32_t next;
    struct io_op op;
    struct loop_stat stat, json_stat;
    uint8_t *json; /* index.json */
    int64_t json_read;
    int fd;
    char path[PUBLISHED_PATH_BYTES_MAX + 2 + NAME_BYTES_MAX];
};
void scan_begin(struct scan *s, struct published *p, const struct published_dir *dir);

/* The version of that id among those that the tenant may see and this loop knows; NULL: unknown here. */
struct pubversion *published_find(struct published *p, const char *tenant, const struct id *id);
/* ERR_MISMATCH unless the file looked at is the one that the version names. */
must_check int pubfile_same(const struct pubversion *v, const char *name, const struct loop_stat *was,
                            const struct loop_stat *now, struct err *e);
/* false: the path is too long, which the configuration's check keeps from happening. */
bool pubfile_path(const struct pubversion *v, const char *name, char *out, size_t size);

/* published_index.c */
struct sample_index {
    struct list link; /* most recently used last */
    struct id version;
    uint32_t shard;
    struct buf encoded;
    unsigned refs;
};
struct published {
    struct worker *w;
    struct list versions;
    size_t version_count;
    struct list indexes;
    uint64_t index_bytes;
    struct list jobs; /* sample indexes being built */
    struct shard_files *files;
    struct unpacker *unpacker;
};
/* published_reads.c */
/* Goes on with the version of that id once it is found, or ends the stream. */
typedef void published_found(struct stream *st, struct pubversion *v, enum sched_class class,
                             uint64_t credit);
void published_find_version(struct stream *st, const struct id *id, enum sched_class class, uint64_t credit,
                            published_found *found);
/* OP_READ of READ_PUBLISHED: ranges are in the stream. */
void published_read(struct stream *st, enum sched_class class, uint64_t credit);

#endif
