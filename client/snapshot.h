/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one rank saves, and how it is cut into chunks: large tensors at 4 MiB borders from their own start,
 * small ones of one dtype side by side in shared chunks. The snapshot of a chunk is taken straight from the
 * trainer's memory into a staging slot.
 */
#ifndef LARDER_CLIENT_SNAPSHOT_H
#define LARDER_CLIENT_SNAPSHOT_H

#include "client/box.h"
#include "client/device.h"
#include "client/larder.h"
#include "client/loan.h"
#include "client/names.h"
#include "format/index.h"

#define NO_ITEM   UINT32_MAX
#define BLOB_ITEM (1u << 31) /* of an item's number: what is left is that of a blob, not of a tensor */

/* Where a tensor's or blob's bytes come from. There may be millions. */
struct item {
    const void *data;    /* strided: a struct strided_item */
    uint32_t bytes : 31; /* of a small one; 0: it has chunks of its own, or no bytes */
    uint32_t strided : 1;
    uint32_t next; /* in the same shared chunk, or NO_ITEM */
};

struct strided_item {
    const uint8_t *data;
    int64_t strides[]; /* of memory in bytes, one per dimension */
};

struct planned_chunk {
    uint32_t first;  /* item; of a shared chunk the first of its list */
    uint32_t bytes;  /* plain */
    uint64_t offset; /* in the item, for a large one */
    uint8_t dtype;
    bool shared;
    uint16_t group;
};

struct bin { /* the shared chunk of a dtype that is being filled */
    bool open;
    uint32_t chunk, last;
};

struct group { /* tensors that may share chunks: those of one priority in one memory */
    int priority;
    struct device *device; /* NULL: host memory */
    struct bin bins[DTYPE_COUNT];
};

struct source { /* copies come after what the caller gave to this stream */
    struct device *device;
    void *stream;
};

/* By name, to number; open addressing: the low half of the name's hash above its number plus one; 0: free. */
struct name_set {
    struct loan memory;
    uint64_t *slots; /* in it */
    size_t slot_count, count;
};

/* Zeroed memory is an empty snapshot. */
struct snapshot {
    struct larder *lender; /* the descriptions of very many tensors lie in its staging memory; NULL: they have
                              memory of their own. Set before anything is added */
    bool alone;  /* no other part holds the same: boxes need no hash. Set before anything is added */
    bool closed; /* nothing is added any more, and `index` is one */
    struct loan index_memory, records_memory, items_memory; /* of what follows */
    struct buf index; /* records of the tensors, from records_at on, and before them room for the rest */
    size_t records_at;
    uint32_t *records;     /* by tensor: where its record begins behind that */
    struct name_set names; /* of tensors and aliases */
    struct names memory;   /* names of blobs, and memory for all that is not in the index */
    struct item *tensor_items;
    uint32_t tensor_count, tensor_cap;
    uint32_t partial; /* the first tensor whose box is not all of it, plus one; 0: none */
    struct alias *aliases;
    uint32_t alias_count, alias_cap;
    struct blob *blobs;
    struct item *blob_items;
    uint32_t blob_count, blob_cap;
    struct planned_chunk *chunks;
    uint32_t chunk_count, chunk_cap;
    struct group *groups;
    uint32_t group_count, group_cap, group_at; /* at: used last */
    struct source *sources;
    uint32_t source_count, source_cap;
    bool incomplete; /* something found no place */
    uint64_t plain_bytes;
};

struct snapshot_size {
    uint32_t tensors, chunks;
    size_t index_bytes;
};
struct snapshot_size snapshot_size(const struct snapshot *s);
/* Best effort: as many tensors and chunks as in another one will be added. */
void snapshot_expect(struct snapshot *s, const struct snapshot_size *size);

/* Each copies the description, not the data, and gives it its place in a chunk. Errors name the tensor. c:
 * whose devices; NULL: which memory the data is in is not looked at. */
must_check int snapshot_tensor(struct snapshot *s, struct larder *c, const struct larder_tensor *t,
                               struct err *e);
must_check int snapshot_alias(struct snapshot *s, const char *name, const char *of, struct err *e);
must_check int snapshot_blob(struct snapshot *s, const char *name, const void *p, size_t n, struct err *e);
/* All was added, so far: takes the memory that snapshot_close needs. Fails if anything that was to be added
 * found no place. More may be added after it, and then it is called again. */
must_check int snapshot_end(struct snapshot *s, struct err *e);
/* Nothing more can be added: `index` becomes what a part_writer is given, and chunks of a higher priority get
 * the lower numbers, which are sent first. Once; then nothing. Right behind snapshot_end. */
must_check int snapshot_close(struct snapshot *s, struct err *e);
/* The device that the chunk's bytes lie on; NULL: host memory. */
struct device *snapshot_device(const struct snapshot *s, uint32_t chunk);
/* Copies the bytes of a chunk of host memory to out. Any number of threads, different chunks. */
void snapshot_take(const struct snapshot *s, uint32_t chunk, uint8_t *out);
/* Gives the copies of a chunk of device memory to the device's stream `out`, with its lock held: to out,
 * which is pinned, later. */
must_check int snapshot_copy(const struct snapshot *s, uint32_t chunk, uint8_t *out, struct err *e);
/* Fills the plain hashes of the small tensors in the chunk, where they have any, from its bytes. Likewise, of
 * a closed snapshot. */
void snapshot_hash(struct snapshot *s, uint32_t chunk, const uint8_t *bytes);
/* Tensor i without its hash; until the index is sealed. Of arrays only the dimensions are written. */
void snapshot_get(const struct snapshot *s, uint32_t i, struct tensor *out);
struct slice snapshot_name(const struct snapshot *s, uint32_t i);
/* The name, terminated; lives as long as the snapshot. NULL: no memory. */
const char *snapshot_string(struct snapshot *s, uint32_t i);
const uint8_t *item_data(const struct item *i);
const int64_t *item_strides(const struct item *i); /* NULL: packed */
/* The tensors' descriptions go, which nobody looks at any more; counts stay. */
void snapshot_forget(struct snapshot *s);
void snapshot_free(struct snapshot *s);

/* A public tensor as a struct tensor: name as given, whole box where none is stated. Not checked. Of arrays
 * only the dimensions are written. */
void tensor_of_public(const struct larder_tensor *t, struct tensor *out);

#endif
