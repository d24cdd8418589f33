/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An opened dataset version: what larder_dataset_open gives, and what a feed reads through. Two kinds behind
 * one handle: imported (sealed parts of a commit) and published (plain files of a directory that the server
 * serves as it is).
 *
 * A view is what reading one shard needs: its opened part (imported) and its sample index. Views are loaded
 * when first asked for, shared, and kept for as long as view_max allows; more exist only while more are in
 * use.
 */
#ifndef LARDER_DATASET_VIEW_H
#define LARDER_DATASET_VIEW_H

#include <pthread.h>
#include <stdatomic.h>

#include "client/client.h"
#include "client/dataset_manifest.h"
#include "client/part.h"
#include "format/samples.h"

struct read_cache; /* dataset.c: decoded chunks of larder_dataset_read */

struct larder_dataset {
    struct larder *client;
    struct conn *conn; /* views are loaded over it */
    char name[NAME_BYTES_MAX + 1];
    uint64_t version; /* imported: the sequence. Published: first 8 bytes of its version id */
    bool published;
    struct shard_table table;
    bool counted; /* every shard's samples are known, of those that were chosen */
    /* imported */
    struct run run;
    struct commit commit;
    /* published */
    struct id version_id;
    uint64_t record_bytes;
    /* views; lock guards them, their reference counts and the counts in the table */
    pthread_mutex_t lock;
    pthread_cond_t loaded;
    struct list views; /* most recently used last */
    unsigned view_count, view_max;
    atomic_bool closing; /* nothing is asked again any more */
    /* larder_dataset_read */
    pthread_mutex_t read_lock; /* taken before lock */
    struct read_cache *cache;
};

struct dataset_view {
    struct list link;
    struct larder_dataset *dataset;
    uint32_t shard;
    unsigned refs;
    bool loading;
    struct part *part;       /* imported, else NULL */
    uint64_t shard_bytes;    /* imported */
    uint64_t piece_bytes;    /* imported: see dataset_manifest.h */
    struct samples *samples; /* NULL until asked for */
};

/* conn: for loading views; stays the caller's. version 0: latest. An imported dataset of that name comes
 * before a published directory. */
must_check int dataset_open(struct larder *c, struct conn *conn, const char *name, uint64_t version,
                            struct larder_dataset **out, struct err *e);
void dataset_close(struct larder_dataset *d); /* every view was put back. NULL allowed */

/* The view of a shard, with its sample index if samples is true. Blocks while it is fetched. Any thread. */
must_check int dataset_view_get(struct larder_dataset *d, uint32_t shard, bool samples,
                                struct dataset_view **out, struct err *e);
void dataset_view_put(struct larder_dataset *d, struct dataset_view *v);
/* One more reference to a view that the caller holds. */
void dataset_view_ref(struct larder_dataset *d, struct dataset_view *v);

/* Makes sure that table.shards[].samples are known, of all shards or of the chosen ones: published
 * directories are counted by the server, shard by shard. */
must_check int dataset_count(struct larder_dataset *d, const bool *chosen, struct err *e);

/* Bytes of a shard, verified and decrypted; returns how many (fewer only at its end). A lost connection is
 * asked again for retry_ms without a byte. Blocks. Any thread; one read of a dataset at a time. */
must_check int64_t dataset_bytes(struct larder_dataset *d, uint32_t shard, uint64_t offset, void *p, size_t n,
                                 unsigned retry_ms, struct err *e);

/* Opens a published directory's version on a connection that did not open it yet, or whose server may have
 * restarted, and checks that it still is the same. ERR_MISMATCH if it changed. */
must_check int dataset_published_renew(struct larder_dataset *d, struct conn *conn, struct err *e);

/* Object id of a shard for READ_PUBLISHED. */
struct id dataset_published_object(uint32_t shard);

/* Where byte `offset` of a view's shard lies: chunk number and place within its plain bytes. */
struct chunk_place {
    uint32_t chunk;
    uint32_t offset;
    uint32_t bytes; /* of the shard from there to the end of the chunk */
};
struct chunk_place dataset_chunk_of(const struct dataset_view *v, uint64_t offset);
/* How many bytes of the chunk belong to samples, what several have counted for each. UINT64_MAX: they
 * have many fields there, and were not counted. The view's samples are known. */
uint64_t dataset_sample_bytes(const struct dataset_view *v, uint32_t chunk);

/* Hashes that tell datasets and their versions apart, for the loader's state. */
uint64_t dataset_identity(const struct larder_dataset *d);

#endif
