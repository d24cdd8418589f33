/* SPDX-License-Identifier: Apache-2.0 */
/*
 * larder: the client library, all of its public interface.
 *
 * Rules that hold for every call
 *   - Returns 0, a count, or a negative errno; on failure `struct larder_error` (may be NULL) says it for a
 * person.
 *   - Option structs begin with `size`, set to sizeof by the caller (LARDER_INIT does it); fields added later
 * read as zero.
 *   - No global state. A `struct larder` and what is opened from it may be used from any thread; one save,
 * restore or feed handle by one thread at a time unless said otherwise.
 *   - Strings are UTF-8. Names of runs and datasets: 1..255 bytes without control bytes. Tensor
 * names: 1..4096 bytes without NUL. Names are opaque: "a/b" is one name and never a path.
 *   - Every wait has a bound. timeout_ms < 0 means the bound of the client's options, never "for ever".
 *   - After fork() in a process that has a client open, every call in the child returns -ECHILD with a
 * sentence.
 */
#ifndef LARDER_H
#define LARDER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LARDER_API          __attribute__((visibility("default")))
#define LARDER_INIT(type)   ((struct type){.size = sizeof(struct type)})
#define LARDER_DIMS_MAX     16
#define LARDER_STATE_BYTES  64 /* a loader's position */
#define LARDER_ID_BYTES     16
#define LARDER_PRIORITY_MAX 100

enum larder_class { /* what kind of failure: branch on this */
                    LARDER_OK = 0,
                    LARDER_INVALID = 1,
                    LARDER_DENIED = 2,
                    LARDER_NOT_FOUND = 3,
                    LARDER_EXISTS = 4,
                    LARDER_CORRUPT = 5,
                    LARDER_WRONG_KEY = 6,
                    LARDER_FENCED = 7,
                    LARDER_NO_SPACE = 8,
                    LARDER_QUOTA = 9,
                    LARDER_IO = 10,
                    LARDER_TIMEOUT = 11,
                    LARDER_CANCELLED = 12,
                    LARDER_BUSY = 13,
                    LARDER_VERSION = 14,
                    LARDER_PROTOCOL = 15,
                    LARDER_LIMIT = 16,
                    LARDER_NETWORK = 17,
                    LARDER_READ_ONLY = 18,
                    LARDER_MISMATCH = 19,
                    LARDER_NO_MEMORY = 20,
                    LARDER_UNSUPPORTED = 21
};

struct larder_error {
    enum larder_class kind;
    int errnum;     /* positive errno */
    char text[512]; /* what was expected, what was found, what to do */
};
LARDER_API const char *larder_class_name(enum larder_class kind);
LARDER_API const char *larder_version(void); /* "0.1.0" */

enum larder_dtype {
    LARDER_U8 = 1,
    LARDER_I8 = 2,
    LARDER_U16 = 3,
    LARDER_I16 = 4,
    LARDER_U32 = 5,
    LARDER_I32 = 6,
    LARDER_U64 = 7,
    LARDER_I64 = 8,
    LARDER_F16 = 9,
    LARDER_BF16 = 10,
    LARDER_F32 = 11,
    LARDER_F64 = 12,
    LARDER_BOOL = 13,
    LARDER_F8_E4M3 = 14,
    LARDER_F8_E5M2 = 15,
    LARDER_F8_E8M0 = 16,
    LARDER_F8_E4M3FNUZ = 17,
    LARDER_F8_E5M2FNUZ = 18,
    LARDER_C64 = 19,
    LARDER_C128 = 20,
    LARDER_F4 = 21,
    LARDER_F6_E2M3 = 22,
    LARDER_F6_E3M2 = 23
};
LARDER_API unsigned larder_dtype_bits(enum larder_dtype dtype);    /* per element; 0: unknown */
LARDER_API const char *larder_dtype_name(enum larder_dtype dtype); /* "BF16" */

/* ---- client
 * ------------------------------------------------------------------------------------------------- */

struct larder;

struct larder_options {
    size_t size;
    const char *credentials; /* path of the credential file; NULL: $LARDER_CREDENTIALS */
    uint64_t staging_bytes;  /* pinned memory for saves, taken and faulted in at open; 0: 256 MiB. What
                                describes tensors lies in it too where they are tens of thousands, until the
                                save is durable: up to 52 bytes each, names and shapes, at most half of
                                it, and ordinary memory for the rest. Feeds take their own */
    unsigned
        threads; /* for compressing and sealing; 0: half the cores, 2 to 16, as far as there are so many */
    int nice;    /* added to the nice value of those threads, so that training wins; 0: 5 */
    unsigned connect_timeout_ms; /* 0: 10 s */
    unsigned request_timeout_ms; /* 0: 60 s: the bound of one request, and of waits with timeout_ms < 0 */
    unsigned reconnect_ms;       /* a lost connection is tried again for so long before calls fail; 0: 30 s */
    const int *devices; /* CUDA devices that tensors of saves will lie on: they are opened, and the staging
                           memory registered with them, at open, not by the first tensor */
    size_t device_count;
    int no_bulk_lane; /* 1: sealed chunks go over TLS like everything else, also where the server allows
                         plain, authenticated connections for them */
};

/* Connects and authenticates. */
LARDER_API int larder_open(const struct larder_options *options, struct larder **out, struct larder_error *e);
/* Drains saves in flight for at most timeout_ms, then gives up on them (-ETIMEDOUT, and e names the run and
 * step lost, and how many bytes were not stored). The failure of a save that nobody has seen yet is returned
 * here too, with its class: 0 means that every save was durable, was cancelled, or its failure was told.
 * Frees the client in any case; restores and feeds must be closed, and handles of saves freed,
 * before. */
LARDER_API int larder_close(struct larder *c, int timeout_ms, struct larder_error *e);

struct larder_info {
    size_t size;
    char server[272], tenant[64], role[16], server_software[64];
    char path[128]; /* how bytes travel, for people: "TLS 1.3 over TCP" */
    uint64_t server_time_ns;
};
LARDER_API int larder_info(struct larder *c, struct larder_info *out, struct larder_error *e);

/* ---- tensors
 * ------------------------------------------------------------------------------------------------- */

enum larder_memory {
    LARDER_MEMORY_HOST = 0,
    LARDER_MEMORY_CUDA = 1 /* of one device: cudaMalloc and what is built on it, managed memory */
};

/* A box of a global tensor and where its elements lie in memory. */
struct larder_tensor {
    const char *name;
    size_t name_bytes; /* 0: strlen(name) */
    enum larder_dtype dtype;
    unsigned dims;                     /* 0: one element */
    uint64_t shape[LARDER_DIMS_MAX];   /* global */
    uint64_t offsets[LARDER_DIMS_MAX]; /* of this rank's box */
    uint64_t lengths[LARDER_DIMS_MAX]; /* of this rank's box. Offsets and lengths all zero: the whole tensor.
                                          A rank with no rows gives their end as offset, or does not add the
                                          tensor */
    int64_t strides[LARDER_DIMS_MAX];  /* in elements, between neighbours of the box in memory; all zero:
                                          packed row-major. A stride of 0 with  others set repeats (expanded
                                          views). Packed dtypes (F4, F6): must be packed */
    void *data;                        /* first element of the box; for saving it is only read */
    enum larder_memory memory;         /* that data points to */
    int device;                        /* CUDA: ordinal, as the driver of this process numbers them */
    void *stream; /* CUDA: the CUstream (cudaStream_t) that the data was produced on, or will be used on;
                     NULL: the default stream */
    int priority; /* of a save: higher ones are sent first. -LARDER_PRIORITY_MAX .. LARDER_PRIORITY_MAX;
                     blobs have 0 */
};

/* ---- saving
 * --------------------------------------------------------------------------------------------------- */

struct larder_save;

enum larder_compression {
    LARDER_COMPRESS_DEFAULT = 0,
    LARDER_COMPRESS_OFF = 1,
    LARDER_COMPRESS_FAST = 2,
    LARDER_COMPRESS_DENSE = 3
};
enum larder_when_busy {
    LARDER_BUSY_WAIT = 0 /* until the save before is done sending */,
    LARDER_BUSY_SKIP = 1 /* -EBUSY, counted */
};

struct larder_save_options {
    size_t size;
    const char *run;
    uint64_t step;
    uint32_t rank, world;             /* world 0: 1 */
    uint8_t attempt[LARDER_ID_BYTES]; /* the same on all ranks of one incarnation of the job, another after
                                        each restart. All zero: from $LARDER_ATTEMPT (hashed), or random where
                                        world is 1, else refused */
    const void *loader_state; /* what larder_feed_state or larder_batch_state gave. NULL: that of the client's
                                open feed, as it is at larder_save_submit, if one is open that is not `aside`;
                                with several such feeds open, submit refuses to choose */
    size_t loader_state_bytes; /* <= LARDER_STATE_BYTES */
    const char *const *labels; /* key, value, key, value, ..., NULL; may be NULL */
    enum larder_compression compression;
    enum larder_when_busy when_busy;
    int join_timeout_ms;     /* how long to wait for the other ranks; 0: the request timeout */
    unsigned verify_percent; /* of chunks that are decoded again before they are sent; 0: 1 %, 100: all */
    unsigned deadline_ms; /* the last save of a job that has so long: from larder_save_begin until it must be
                             durable. Then it fails with LARDER_TIMEOUT on all ranks, nothing is committed,
                             and larder_save_left_out names what was not stored. 0: none */
    int no_loader_state;  /* 1: the checkpoint has none, whatever feeds are open */
};

LARDER_API int larder_save_begin(struct larder *c, const struct larder_save_options *o,
                                 struct larder_save **out, struct larder_error *e);
/* Registers a tensor: the description is copied, the data is read by larder_save_submit. -EINVAL names it.
 * Device memory is checked: errors name the device, and what the pointer is. A rank that cannot add what it
 * has to gives up with larder_save_cancel, so that the others do not wait for it. */
LARDER_API int larder_save_tensor(struct larder_save *s, const struct larder_tensor *t,
                                  struct larder_error *e);
/* A second name of a tensor already added (tied weights): stored once, restored under both. */
LARDER_API int larder_save_alias(struct larder_save *s, const char *name, const char *of,
                                 struct larder_error *e);
/* Opaque bytes, kept per rank; copied at submit. */
LARDER_API int larder_save_blob(struct larder_save *s, const char *name, const void *p, size_t n,
                                struct larder_error *e);
/* Takes the snapshot. Returns when host tensors are staged: they may be changed. Device tensors are copied
 * later, by streams of larder's own that come after what was given to each tensor's stream until now; they
 * may be changed after larder_save_fence, or behind larder_save_fence_stream. What follows (compress, seal,
 * send, commit) goes on in the background. A snapshot larger than the staging memory goes in waves, and takes
 * longer: see the info. With host tensors in it submit may then have to wait for copies from devices:
 * -ETIMEDOUT where no staging memory comes free for the request timeout, as with a stream that waits for what
 * comes after submit. The failure of an earlier save of this client that nobody has seen yet is returned here
 * once (class of that failure). */
LARDER_API int larder_save_submit(struct larder_save *s, struct larder_error *e);

/* Waits until the save is staged, at most timeout_ms (-ETIMEDOUT): the tensors may be changed from then on.
 * Host tensors are staged when submit returns. The error of a save that failed before it was staged, once no
 * device reads its tensors any more. Call it before memory of a device is freed, also after a failure or
 * larder_save_cancel. Any thread. */
LARDER_API int larder_save_fence(struct larder_save *s, int timeout_ms, struct larder_error *e);
/* The same on the device: what is given to the stream (a CUstream of that device; NULL: its default stream)
 * from now on runs after the copies of that device's tensors. Where they are more than the staging memory
 * holds, it waits first, at most the request timeout, until the last of them is given to the device. Any
 * thread. */
LARDER_API int larder_save_fence_stream(struct larder_save *s, int device, void *stream,
                                        struct larder_error *e);

enum larder_save_state {
    LARDER_SAVE_OPEN = 0, /* also after submit, while device tensors are copied */
    LARDER_SAVE_STAGED = 1,
    LARDER_SAVE_DURABLE = 2,
    LARDER_SAVE_FAILED = 3
};
struct larder_save_info {
    size_t size;
    enum larder_save_state state;
    struct larder_error error; /* if failed */
    uint64_t sequence;         /* if durable */
    uint64_t plain_bytes, stored_bytes,
        sent_bytes;         /* of this rank; stored: after compression; grow as it goes on */
    double stall_seconds;   /* how long submit held the caller */
    double staged_seconds;  /* from submit until the tensors could be changed; 0 until then */
    double durable_seconds; /* from submit to durable; 0 until then */
    uint32_t chunks, chunks_sent;
    uint32_t waves;
    char path[256]; /* how the bytes went: "CUDA device 0 -> pinned host memory -> TLS 1.3 over TCP; ..." */
};
/* Any thread. */
LARDER_API int larder_save_info(struct larder_save *s, struct larder_save_info *out);
/* Waits until the save is durable or failed (then returns its error), at most timeout_ms (-ETIMEDOUT: it goes
 * on). Any thread. */
LARDER_API int larder_save_wait(struct larder_save *s, int timeout_ms, struct larder_error *e);
/* Of a save that failed, by number, the tensors whose bytes the server did not have all; -ENOENT past the
 * end. What was stored is given up with the save. The name lives as long as the handle. Any thread. */
LARDER_API int larder_save_left_out(struct larder_save *s, size_t i, const char **name);
/* Gives up: all ranks hear it, nothing is committed, unless it was durable already (-EEXIST). */
LARDER_API int larder_save_cancel(struct larder_save *s, const char *reason, struct larder_error *e);
/* The handle goes; a save in flight goes on (its failure is returned by the next submit, or by larder_close).
 * NULL allowed. */
LARDER_API void larder_save_free(struct larder_save *s);

/* ---- restoring
 * ------------------------------------------------------------------------------------------------- */

struct larder_restore;

struct larder_restore_options {
    size_t size;
    const char *run;
    enum {
        LARDER_AT_LATEST = 0,
        LARDER_AT_STEP = 1,
        LARDER_AT_SEQUENCE = 2
    } at;                  /* latest: newest that is not marked bad */
    uint64_t value;        /* step or sequence */
    uint64_t memory_bytes; /* bound for chunks in flight; 0: 128 MiB. At most half of the staging memory is
                              borrowed for them, and for indexes of over 1 MiB until the restore is closed,
                              while no save has it; only the rest is taken anew */
    unsigned connections;  /* 0: 2 */
    int fallback; /* with LARDER_AT_LATEST: if the newest turns out damaged (structure), open the one before;
                     it is told in the info */
};
LARDER_API int larder_restore_open(struct larder *c, const struct larder_restore_options *o,
                                   struct larder_restore **out, struct larder_error *e);

struct larder_restore_info {
    size_t size;
    uint64_t step, sequence, server_time_ns, attempt_number;
    uint32_t world;
    uint64_t plain_bytes, stored_bytes, fetched_bytes; /* fetched: so far, from the network */
    uint8_t loader_state[LARDER_STATE_BYTES];
    size_t loader_state_bytes;
    uint32_t fell_back; /* how many newer ones were passed over */
    char fallback_reason[256];
    char path[256];
    uint32_t repaired; /* boxes read from another rank's copy, because a chunk of the first was damaged */
};
LARDER_API int larder_restore_info(struct larder_restore *r, struct larder_restore_info *out);

/* Tensors over all parts, aliases included, ordered by name. The description's offsets are 0 and lengths the
 * shape; data is NULL; strings live as long as the handle. */
LARDER_API size_t larder_restore_tensors(struct larder_restore *r);
LARDER_API int larder_restore_tensor(struct larder_restore *r, size_t i, struct larder_tensor *out);
LARDER_API int larder_restore_find(struct larder_restore *r, const char *name, size_t name_bytes,
                                   struct larder_tensor *out, struct larder_error *e);
/* "key", "value" by number; -ENOENT past the end. */
LARDER_API int larder_restore_label(struct larder_restore *r, size_t i, const char **key, const char **value);
/* Asks for a box of a tensor into t->data with t->strides. Checked strictly: -ENOENT (missing), -EILSEQ
 * (dtype or shape differ; shape may be left all zero to take what is saved), by name; -EINVAL where the
 * strides of one or two dimensions put elements over each other. That boxes asked for do not lie over each
 * other is the caller's part. Nothing is read before larder_restore_run. */
LARDER_API int larder_restore_add(struct larder_restore *r, const struct larder_tensor *t,
                                  struct larder_error *e);
/* Reads, verifies, decrypts, decompresses and places all that was asked for; each stored chunk is read once.
 * Damage: goes on with the rest, then -EBADMSG naming the first; larder_restore_damage lists all. Only a box
 * whose bytes were all good is reported good. Device memory is written by copies that come after what was
 * given to the tensors' streams until now, and that are done when this returns. */
LARDER_API int larder_restore_run(struct larder_restore *r, struct larder_error *e);
struct larder_damage {
    const char *tensor;
    uint32_t rank, chunk;
    const char *text;
};
LARDER_API int larder_restore_damage(struct larder_restore *r, size_t i,
                                     struct larder_damage *out); /* -ENOENT past the end */
/* Strict report: names that are saved and were not asked for, by number. -ENOENT past the end. */
LARDER_API int larder_restore_extra(struct larder_restore *r, size_t i, const char **name);
/* A rank's blob; *p is malloc'ed for the caller. */
LARDER_API int larder_restore_blob(struct larder_restore *r, uint32_t rank, const char *name, void **p,
                                   size_t *n, struct larder_error *e);
LARDER_API int larder_restore_blob_name(struct larder_restore *r, uint32_t rank, size_t i, const char **name,
                                        uint64_t *bytes);       /* -ENOENT past the end */
LARDER_API void larder_restore_close(struct larder_restore *r); /* NULL allowed */

/* ---- feeding
 * ---------------------------------------------------------------------------------------------------- */

struct larder_feed;
struct larder_batch;

/* One dataset of several that are read as one stream. Zeroed but for size, dataset and weight is everything
 * of its latest version. */
struct larder_mix {
    size_t size; /* LARDER_INIT(larder_mix); the same in all members of an array */
    const char *dataset;
    uint64_t version;       /* 0: latest */
    uint32_t weight;        /* >= 1: of every sum-of-weights samples, so many are of this dataset */
    const char *shards;     /* as in the options */
    uint32_t slice, slices; /* likewise */
    const char *local_dir;  /* likewise */
};
#define LARDER_MIX_MAX 64

struct larder_feed_options {
    size_t size;
    const char *dataset; /* name of an imported dataset, or of a published directory; NULL with a mix */
    uint64_t version;    /* 0: latest */
    uint64_t seed;
    uint32_t window_shards; /* shuffle window; 0: 8. UINT32_MAX: sequential */
    uint32_t rank, world;   /* world 0: 1 */
    uint32_t global_batch;  /* samples over all ranks; must be divisible by world */
    uint64_t epochs;        /* 0: 1. The feed ends after them */
    enum {
        LARDER_LAST_DROP = 0,
        LARDER_LAST_PAD = 1
    } last; /* an incomplete last batch of an epoch: dropped, or filled from the epoch's start */
    enum {
        LARDER_DAMAGE_FAIL = 0,
        LARDER_DAMAGE_SKIP = 1,
        LARDER_DAMAGE_SUBSTITUTE = 2 /* another sample of the same window, chosen by seed and position: the
                                        same one on any number of ranks */
    } damage; /* a sample that cannot be read, twice: larder_feed_next fails, or it is left out, or replaced.
                 What was done is counted in the info and listed by larder_feed_damage */
    uint64_t depth_bytes; /* memory for batches ahead, pinned; 0: 64 MiB */
    unsigned connections; /* 0: 2 */
    const void *state; /* resume: what larder_feed_state gave, on any number of ranks; NULL: from the start */
    size_t state_bytes;
    const char *shards; /* only shards with a matching name: * ? [a-z] [!a-z] \, a ! in front turns it round;
                           NULL: all */
    uint32_t slice, slices; /* of these the ones number slice, slice + slices, ...; slices 0: all */
    const struct larder_mix
        *mix;           /* several datasets instead of one; an epoch has as many samples as all have
                           together, and each goes round at its own pace. Resuming needs the same mix */
    unsigned mix_count; /* <= LARDER_MIX_MAX */
    int contiguous;     /* 1: a field that has the same size in all samples of a batch lies in one piece of
                           memory, see larder_batch_stack */
    int aside; /* 1: saves do not take this feed's position by themselves; for evaluation beside training */
    const char *run;        /* the run that the job trains, for larder status; may be NULL */
    const char *local_dir;  /* of a published directory: the server's own folder, as this machine sees it (it
                               is  the server's, or the folder is mounted here). Samples are then read straight
                               from  its files, and only their places come from the server. Refused (-EILSEQ)
                               unless  names, sizes, times and inodes are those of the server's version, and so
                               is any  change later. Not for token files. NULL: all comes from the server */
    uint32_t depth_batches; /* batches ahead at most; 0: as many as depth_bytes hold, and a quarter of it
                               their descriptions */
    enum larder_memory
        memory; /* where batches are handed out; CUDA: of `device`, through pinned host memory */
    int device;
    uint64_t device_depth_bytes; /* memory on the device for batches ahead and those handed out; 0: as
                                    depth_bytes */
};
/* Refused with the numbers: a dataset without samples, fewer samples than one global batch, a batch not
 * divisible by world, a state of another dataset, mix, choice of shards, seed or version. */
LARDER_API int larder_feed_open(struct larder *c, const struct larder_feed_options *o,
                                struct larder_feed **out, struct larder_error *e);

/* Valid until the batch is released. */
struct larder_field {
    const char *name; /* of a tar member: what follows the key and a dot, "cls"; MDS: the column; token
                         files: "tokens"; else "bin" */
    const void *data; /* 256-byte aligned, but for rows of a stack after the first; never decoded */
    size_t bytes;
    const char *type; /* MDS: the column's encoding, "int32", "pkl", "ndarray:..."; token files: "uint8",
                         "int8", "int16", "int32", "int64", "float64", "float32", "uint16"; else "bytes" */
};
struct larder_sample {
    const char *key;   /* tar: the members' common name; whole: the file's name; else "" */
    uint64_t position; /* in the global order, counted on over epochs */
    uint32_t shard;
    uint64_t number; /* within the shard */
    uint32_t fields;
    const struct larder_field *field;
    uint32_t dataset; /* number in the mix; 0 without one */
};

/* The next batch of this rank: 1, 0 at the end of the last epoch, or an error. */
LARDER_API int larder_feed_next(struct larder_feed *f, int timeout_ms, struct larder_batch **out,
                                struct larder_error *e);
LARDER_API size_t larder_batch_samples(const struct larder_batch *b);
LARDER_API int larder_batch_sample(const struct larder_batch *b, size_t i, struct larder_sample *out);
LARDER_API const struct larder_field *larder_sample_field(const struct larder_sample *s,
                                                          const char *name); /* NULL: no such field */
/* A field of all samples as rows of one piece of memory, without a copy: row i, of *bytes bytes, at *data + i
 * * *bytes, is of sample i. *data is 256-byte aligned. The feed was opened contiguous. -EINVAL naming the
 * sample whose size differs or that has no such field. */
LARDER_API int larder_batch_stack(const struct larder_batch *b, const char *field, const void **data,
                                  size_t *bytes, size_t *rows, struct larder_error *e);
LARDER_API void larder_batch_release(struct larder_batch *b); /* gives its memory back to the ring */
/* Batches in device memory: keys and descriptions are in host memory, and the fields' data on the device.
 * What is given to the stream (a CUstream of that device; NULL: its default stream) from now on runs after
 * the batch's copies. Nothing to wait for in host memory. */
LARDER_API int larder_batch_wait(struct larder_batch *b, void *stream, struct larder_error *e);
/* Releases it; its memory is not used again before what the stream was given until now is done.
 * larder_batch_release of such a batch says that nothing reads it any more. On failure it is not released. */
LARDER_API int larder_batch_release_stream(struct larder_batch *b, void *stream, struct larder_error *e);
/* A field's bytes as a DLPack tensor (of uint8, one dimension; with LARDER_ALL_SAMPLES rows by bytes, as
 * larder_batch_stack has them), where they are, without a copy. *out is DLPack's DLManagedTensor as of 0.8
 * (and, unversioned, 1.0). The batch's memory stays until it was released and the deleters of all its tensors
 * were called, on any thread. On a device, streams come after the copies by larder_batch_wait, and what reads
 * the tensor is done, or given to the stream of larder_batch_release_stream, before the last of them.
 * -ENOENT: no such sample or field. */
#define LARDER_ALL_SAMPLES SIZE_MAX
struct DLManagedTensor;
LARDER_API int larder_batch_dlpack(struct larder_batch *b, size_t sample, const char *field,
                                   struct DLManagedTensor **out, struct larder_error *e);

/* Position after the last batch handed out, whatever was read ahead: valid for any number of ranks. Returns
 * its bytes (<= LARDER_STATE_BYTES). A save takes it by itself, see loader_state. */
LARDER_API int larder_feed_state(struct larder_feed *f, uint8_t state[LARDER_STATE_BYTES]);
/* The same after a certain batch: for trainers that take batches before they train on them. */
LARDER_API int larder_batch_state(const struct larder_batch *b, uint8_t state[LARDER_STATE_BYTES]);

struct larder_feed_info {
    size_t size;
    uint64_t samples, shards, version, batches_per_epoch; /* of the dataset; batches of this feed */
    uint64_t epoch, position;                             /* position: within the epoch, in global samples */
    uint64_t samples_out, bytes_out, skipped;
    uint32_t batches_ready;
    struct {
        double network, disk, decode, consumer;
    } starved_seconds; /* waited by cause: for the network, for the server's disk, for decoding and copies to
                          the device; consumer: the feed was full */
    char path[256];
    uint64_t substituted;     /* samples that others stood in for; skipped counts those left out */
    uint64_t bytes_in_flight; /* of samples, asked for and not here */
    uint64_t bytes_ready;     /* in batches that are ready */
};
LARDER_API int larder_feed_info(struct larder_feed *f, struct larder_feed_info *out);

/* What was done about damage, in the order of positions: the first 1024, by number. Strings live as long as
 * the feed. -ENOENT past the end; the info counts all. */
struct larder_feed_damage {
    uint64_t position; /* in the global order */
    const char *dataset, *shard;
    uint64_t number; /* of the damaged sample within the shard */
    int substituted; /* 0: left out */
    const char *by_shard;
    uint64_t by_number;
    const char *text; /* what was wrong */
};
LARDER_API int larder_feed_damage(struct larder_feed *f, size_t i, struct larder_feed_damage *out);
LARDER_API void larder_feed_close(struct larder_feed *f); /* NULL allowed; batches must be released before */

/* ---- datasets
 * ----------------------------------------------------------------------------------------------------- */

enum larder_shard_format {
    LARDER_SHARD_AUTO = -1,
    LARDER_SHARD_WHOLE = 0,
    LARDER_SHARD_TAR = 1,
    LARDER_SHARD_RECORDS = 2,
    LARDER_SHARD_MDS = 3,   /* MosaicML streaming: folders with an index.json, or such files */
    LARDER_SHARD_TOKENS = 4 /* Megatron: pairs X.bin and X.idx, named by either, or folders of them */
};
struct larder_import_options {
    size_t size;
    const char *dataset;
    const char *const *files; /* NULL-terminated paths, in order: one shard each, named by its base name. MDS
                                 and token files: as their formats say; AUTO: by name (*.tar, index.json,
                                 *.idx, X.bin beside an X.idx, folders of these), else WHOLE */
    enum larder_shard_format format;
    uint64_t record_bytes;     /* LARDER_SHARD_RECORDS */
    const char *const *labels; /* as for saves */
    enum larder_compression compression;
    void (*progress)(void *arg, uint64_t bytes_done, uint64_t bytes_total,
                     const char *file); /* may be NULL */
    void *progress_arg;
    /* LARDER_SHARD_TOKENS: sample i is the tokens [i * window_tokens, (i + 1) * window_tokens + window_extra)
     * of a file, across documents, as many as fit whole; window_tokens 0: each document is a sample.
     * window_extra is at most window_tokens. */
    uint64_t window_tokens, window_extra;
    void (*note)(void *arg, const char *text); /* what a person should know of a good import: checksums that
                                                  could not be compared. On the calling thread. May be NULL */
    void *note_arg;
};
/* Encrypts and sends; one commit makes the version exist. *version: the new version (sequence). */
LARDER_API int larder_dataset_import(struct larder *c, const struct larder_import_options *o,
                                     uint64_t *version, struct larder_error *e);

struct larder_shard_info {
    const char *name;
    uint64_t bytes, samples;
};
struct larder_dataset; /* an opened version */
LARDER_API int larder_dataset_open(struct larder *c, const char *dataset, uint64_t version,
                                   struct larder_dataset **out, struct larder_error *e);
LARDER_API uint64_t larder_dataset_version(struct larder_dataset *d);
LARDER_API size_t larder_dataset_shards(struct larder_dataset *d);
/* Fails where the samples of a published shard cannot be found (its file is cut, damaged, or was changed);
 * *out has its name and bytes also then, and 0 samples. */
LARDER_API int larder_dataset_shard(struct larder_dataset *d, size_t i, struct larder_shard_info *out,
                                    struct larder_error *e);
/* Bytes of a shard, verified and decrypted; returns how many (fewer only at its end). */
LARDER_API int64_t larder_dataset_read(struct larder_dataset *d, size_t shard, uint64_t offset, void *p,
                                       size_t n, struct larder_error *e);
LARDER_API void larder_dataset_close(struct larder_dataset *d);

/* ---- published shards on this machine
 * -------------------------------------------------------------------------------------------------- */

/* Whole shards, or ranges of them, of a published directory whose folder this machine sees too: straight from
 * the file to host or device memory, without the server; for device memory by cuFile (GPUDirect Storage)
 * where it is there, else by a pinned bounce buffer. A feed does that for samples: see its local_dir. */
struct larder_local;
struct larder_local_options {
    size_t size;
    const char *local_dir;     /* the server's folder as this machine sees it, as for feeds */
    enum larder_memory memory; /* that is read into */
    int device;                /* CUDA: ordinal */
    int bounce;                /* 1: by the bounce buffer, also where cuFile is there */
};
/* Checks that the files are the server's, as for feeds. d stays open for longer. */
LARDER_API int larder_local_open(struct larder_dataset *d, const struct larder_local_options *o,
                                 struct larder_local **out, struct larder_error *e);
/* Bytes of a shard; returns how many (fewer only at its end). Device memory is written after what the stream
 * (a CUstream; NULL: the default stream) was given until now, and is complete when this returns. -EILSEQ: the
 * file is not, or not any more, the one that the server published; then nothing of it is to be used. */
LARDER_API int64_t larder_local_read(struct larder_local *l, size_t shard, uint64_t offset, void *p, size_t n,
                                     void *stream, struct larder_error *e);
/* How the bytes of the shard read last came: "cuFile, direct", "cuFile, compatibility mode: ...", "pinned
 * bounce buffer: ...". */
LARDER_API const char *larder_local_path(const struct larder_local *l);
LARDER_API void larder_local_close(struct larder_local *l); /* NULL allowed */

/* ---- scratch files
 * -------------------------------------------------------------------------------------------------- */

/*
 * Tensors to and from one plain file on a disk of this machine, without a server: for the fast disk beside
 * the GPU, in between durable saves. A scratch file is NOT ENCRYPTED: who can read it can read the tensors
 * (it is made with mode 0600). It is not compressed, not replicated, and belongs to one rank. Where cuFile
 * (GPUDirect Storage) is there, device memory goes between GPU and disk without the host's memory; else by a
 * pinned bounce buffer; the info says which. Every 4 MiB are hashed, and the hash is compared when they are
 * read.
 */
struct larder_scratch_options {
    size_t size;
    int bounce; /* 1: by the bounce buffer, also where cuFile is there */
};
struct larder_scratch_info {
    size_t size;
    uint64_t bytes; /* of the tensors */
    double seconds;
    char path[512]; /* how the bytes went, for each kind of memory */
};
/* Writes a new file beside it, syncs it, and lets it take the name: path holds the old or the new, never a
 * mixture, and the new one durably when 0 is returned. -EEXIST: path is there, and is no scratch file. After
 * a crash a file "path.partial-..." may be left, which may be removed. Of device tensors it writes what they
 * hold once their streams have done what they were given until now; those with strides need the kernels of a
 * build with nvcc: -ENOTSUP. Blocks. options and info may be NULL. Any thread. */
LARDER_API int larder_scratch_write(const char *path, const struct larder_tensor *tensors, size_t count,
                                    const struct larder_scratch_options *options,
                                    struct larder_scratch_info *info, struct larder_error *e);
/* Reads tensors by name into their memory: those of the file that are asked for. -ENOENT: it is not in the
 * file; -EILSEQ: dtype, shape or box are not those that were written; -EBADMSG: damaged, by name and place
 * (what was read is in memory all the same). Device memory is written after what the tensors' streams were
 * given until now, and is complete when this returns. */
LARDER_API int larder_scratch_read(const char *path, const struct larder_tensor *tensors, size_t count,
                                   const struct larder_scratch_options *options,
                                   struct larder_scratch_info *info, struct larder_error *e);

/* ---- what this machine has for device memory, and which way bytes go here
 * -------------------------------------------------------------------------------------------------- */

enum larder_cufile {
    LARDER_CUFILE_ABSENT = 0,
    LARDER_CUFILE_COMPATIBLE = 1, /* compatibility mode: through host memory */
    LARDER_CUFILE_DIRECT = 2      /* nvidia-fs is loaded, or there is another direct path */
};
struct larder_machine {
    size_t size;
    int devices;        /* CUDA devices that can be used; 0: none */
    int driver_version; /* 12040 for 12.4; 0: unknown */
    enum larder_cufile cufile;
    char cuda_note[256]; /* "CUDA 12.4, 2 devices", or why it cannot be used and what to do */
    char cufile_note[256];
    int has_kernels;        /* this build has kernels for GPUs */
    char kernels_note[256]; /* for which, or that it was built without nvcc */
};
/* Looks for driver and libraries once per process. Always 0. */
LARDER_API int larder_machine(struct larder_machine *out);
struct larder_device {
    size_t size;
    char name[96], bus[16];
    uint64_t bytes;
    int numa_node;    /* -1: unknown */
    int major, minor; /* compute capability */
    int has_kernels;  /* this build's kernels run on it; kernels: or why not */
    int pins;         /* a few MiB of host memory could be registered with it; pinned: how, or why not */
    char kernels[256], pinned[256];
};
/* Opens the device, tries, and closes it again. */
LARDER_API int larder_machine_device(int ordinal, struct larder_device *out, struct larder_error *e);

enum larder_use {
    LARDER_USE_SAVE = 1,
    LARDER_USE_RESTORE = 2,
    LARDER_USE_FEED = 3,    /* over the network */
    LARDER_USE_SCRATCH = 4, /* files in a folder of this machine */
    LARDER_USE_LOCAL = 5    /* published shards in a folder of this machine */
};
struct larder_way {
    size_t size;
    char way[384], why[256];
};
/* Which way the bytes of a use go, from or to device memory where there is a device. folder: for files, tried
 * with one that is removed again; NULL: the current one. */
LARDER_API int larder_machine_way(enum larder_use use, const char *folder, struct larder_way *out,
                                  struct larder_error *e);

/* ---- administration
 * ------------------------------------------------------------------------------------------------ */

enum larder_kind { LARDER_CHECKPOINTS = 1, LARDER_DATASETS = 2 };

struct larder_run_info {
    const char *name;
    uint8_t run_id[LARDER_ID_BYTES];
    uint32_t commits;
    uint64_t latest_sequence, latest_step, stored_bytes, created_ns;
    uint32_t key_epoch; /* newest KEK epoch that its key is wrapped under */
    int published;      /* a plain directory; then commits 0, key_epoch 0 */
};
/* Called per entry until it returns non-zero, which then is returned. Strings are valid during the call. */
LARDER_API int larder_run_list(struct larder *c, enum larder_kind kind,
                               int (*each)(void *arg, const struct larder_run_info *r), void *arg,
                               struct larder_error *e);

enum larder_commit_state {
    LARDER_COMMIT_GOOD = 1,
    LARDER_COMMIT_BAD = 2,
    LARDER_COMMIT_PENDING = 3,
    LARDER_COMMIT_ABANDONED = 4
};
struct larder_commit_info {
    uint64_t step, sequence, attempt_number;
    enum larder_commit_state state;
    int pinned;
    uint32_t world, parts; /* parts < world: still pending or abandoned. world 0: the commit record is
                              damaged, only its sequence is known */
    uint64_t plain_bytes, stored_bytes, server_time_ns;
    const char *reason; /* why bad, abandoned or pinned */
    const char *labels; /* "key=value, key=value" */
};
LARDER_API int larder_commit_list(struct larder *c, enum larder_kind kind, const char *run, int with_pending,
                                  int (*each)(void *arg, const struct larder_commit_info *i), void *arg,
                                  struct larder_error *e);

enum larder_mark { LARDER_PIN = 1, LARDER_UNPIN = 2, LARDER_MARK_BAD = 3, LARDER_MARK_GOOD = 4 };
LARDER_API int larder_mark(struct larder *c, enum larder_kind kind, const char *run, uint64_t sequence,
                           enum larder_mark mark, const char *reason, struct larder_error *e);

struct larder_prune_options {
    size_t size;
    enum larder_kind kind;
    const char *run;
    uint32_t keep_last;     /* newest N; 0: rule unused */
    uint64_t keep_every;    /* steps that are multiples of it; 0: unused */
    uint64_t keep_within_s; /* younger than that; 0: unused */
    int execute;            /* 0: plan only */
    const uint8_t *plan; /* 32 bytes: digest of the plan that a person has seen; executing another is -EBUSY.
                            NULL: no check */
};
struct larder_prune_item {
    uint64_t step, sequence, stored_bytes, server_time_ns;
    int remove; /* planned (or done) */
    int removed;
    const char *reason; /* "last 3", "pinned", "older than the rules keep", "superseded by sequence 9", ... */
};
LARDER_API int larder_prune(struct larder *c, const struct larder_prune_options *o,
                            int (*each)(void *arg, const struct larder_prune_item *i), void *arg,
                            uint8_t plan[32], uint64_t *freed_bytes, struct larder_error *e);

enum larder_verify_level {
    LARDER_VERIFY_STRUCTURE = 1,
    LARDER_VERIFY_SCRUB = 2 /* both on the server, no key */,
    LARDER_VERIFY_DEEP = 3 /* fetched, decrypted, decoded here */
};
struct larder_finding {
    const char *object; /* segment or record */
    uint64_t sequence, step, offset, bytes;
    uint32_t rank;
    int64_t chunk;             /* -1: not a chunk */
    const char *tensor;        /* deep only; else NULL */
    struct larder_error error; /* LARDER_OK: this object is good */
};
/* run NULL: all of that kind. sequence 0: all of the run. Returns the number of damaged objects, or an
 * error. */
LARDER_API int64_t larder_verify(struct larder *c, enum larder_kind kind, const char *run, uint64_t sequence,
                                 enum larder_verify_level level,
                                 int (*each)(void *arg, const struct larder_finding *f), void *arg,
                                 struct larder_error *e);

/* JSON object; malloc'ed. */
LARDER_API int larder_status(struct larder *c, char **json, struct larder_error *e);

struct larder_tenant_info {
    const char *name;
    uint64_t quota_bytes, used_bytes;
    uint32_t weight, runs, datasets;
    const char *residency;
};
LARDER_API int larder_tenant_add(struct larder *c, const char *name, uint64_t quota_bytes, uint32_t weight,
                                 const char *residency, struct larder_error *e);
LARDER_API int larder_tenant_list(struct larder *c,
                                  int (*each)(void *arg, const struct larder_tenant_info *t), void *arg,
                                  struct larder_error *e);

/* Wraps the key of every run and dataset of the tenant under the newest KEK of the credential file (which
 * must hold the older ones too); with drop_old the older envelopes go. No data is written. *runs: how many
 * were rewrapped. */
LARDER_API int larder_key_rotate(struct larder *c, int drop_old, uint64_t *runs, struct larder_error *e);
/* Destroys a run: its envelopes first, which erases it, then everything else. */
LARDER_API int larder_run_destroy(struct larder *c, enum larder_kind kind, const char *run,
                                  struct larder_error *e);

#ifdef __cplusplus
}
#endif

#endif
