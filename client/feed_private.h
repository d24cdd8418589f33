/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of a feed. Threads:
 *   planner     plans batch after batch, takes memory for it, asks for its bytes (feed_batch.c)
 *   connections put what comes to its place (dataset_read.c), open raw chunks there, hand others to the
 * workers scout       runs some batches before the planner, so that parts and sample indexes are there in
 * time (feed_scout.c) workers     read local files (feed_local.c), decode chunks, copy samples out of them,
 * ask again after losses (feed_worker.c), see to samples that could not be read (feed_repair.c), report to
 * the server (feed_report.c) lift        copies batches to a device (feed_lift.c) consumer    whoever calls
 * larder_feed_next (feed.c)
 *
 * Memory: depth_bytes of pinned memory for the samples of batches ahead and of those the consumer holds
 * (feed_arena.h); for imported datasets as much again, at least 16 MiB, for chunks on their way and decoded
 * ones that may be wanted again, and a quarter more for what does not fill its buffer (feed_buffers.h);
 * beside them sample indexes, and descriptions of batches, up to a quarter of depth_bytes or two batches.
 *
 * One lock guards everything that more than one of them touches. It is taken before the dataset's locks and
 * those of connections, and held only for bookkeeping: no copying, decoding or asking happens under it.
 */
#ifndef LARDER_FEED_PRIVATE_H
#define LARDER_FEED_PRIVATE_H

#include <pthread.h>
#include <stdbool.h>
#include <sys/types.h>

#include "client/client.h"
#include "client/dataset_read.h"
#include "client/dataset_view.h"
#include "client/feed_arena.h"
#include "client/feed_buffers.h"
#include "client/feed_lift.h"
#include "client/feed_plan.h"
#include "client/larder.h"
#include "gpudirect/pool.h"

#define FEED_CONNECTIONS_MAX 16u
#define FEED_WORKERS_MAX     4u
#define FEED_RENEWALS_MAX    4u
#define FEED_CHUNK_BUCKETS   256u
#define FEED_CHUNK_BYTES_MIN (16u << 20)
#define FEED_OPENINGS_MAX    32u /* kept while unused */

#define FEED_SUBSTITUTES_MAX 64u /* tried for one sample */
/* Requested and not here, of one connection or many: enough to keep a server busy. With more, the first batch
 * would come late, since a server lets all requests go on in turn. */
#define FEED_PIECES_IN_FLIGHT 4096u
#define FEED_DAMAGE_MAX       1024u /* told by larder_feed_damage */

struct feed_source { /* one dataset of the feed */
    struct larder_dataset *dataset;
    struct choice choice;
    char *pattern; /* of the choice */
    uint32_t weight;
    bool *chosen;                /* by shard */
    char **shard_bad;            /* the planner's own, by shard: why its sample index cannot be read */
    struct dataset_local *local; /* its files on this machine; NULL: they come from the server */
};

/* A field that has one size in all samples of a batch, and one block of memory. */
struct feed_stack {
    struct slice name;
    uint8_t *base;
    size_t bytes; /* of one row */
    bool fits;
};

/* A sample that could not be read, and what was done. */
struct feed_hurt {
    struct feed_hurt *next;
    uint32_t row;
    struct err why;
    uint64_t position;
    uint32_t source, shard;
    uint64_t number;
    bool substituted;
    struct order_place by;
    uint8_t *memory; /* fields, names and bytes of what stands in for it */
};

struct larder_batch {
    struct list link;   /* feed.batches until handed out */
    struct list repair; /* feed.repairs */
    struct larder_feed *feed;
    struct feed_slice slice;
    uint32_t count;
    struct larder_sample *samples;
    struct larder_field *fields;
    char *strings; /* keys and names of fields */
    struct feed_stack *stacks;
    uint32_t stack_count;
    bool *bad;              /* by row: it could not be read */
    struct feed_hurt *hurt; /* those, by row */
    struct feed_piece *pieces;
    uint32_t piece_count;
    uint8_t *data;
    size_t data_bytes;
    uint64_t described_bytes;   /* of all that describes it, about */
    struct feed_region *region; /* of data; NULL: a mapping of its own, larger than the arena */
    uint32_t pending;           /* pieces not in place, and 1 while it is planned */
    uint32_t fetching;          /* of these, on their way through the network */
    uint32_t local;             /* of these, to be read from files of this machine */
    bool asked;                 /* for all of its bytes */
    bool complete;              /* all of it is in host memory, or it failed */
    bool ready;                 /* to be handed out */
    unsigned references;        /* the consumer's, and one for each tensor made of it */
    struct feed_region *lifted; /* its memory on the device; data and region are gone then */
    struct memory_event *event; /* behind its copies there */
    struct feed_return *after;  /* behind consumers' streams */
    struct err err;             /* instead of samples */
};

/* A stretch of a shard and its place in a batch: within one chunk (imported), or a whole field (published).
 */
struct feed_piece {
    struct feed_piece *next; /* waiting for the same chunk */
    struct larder_batch *batch;
    struct dataset_view *view; /* held by the batch while it is planned */
    uint32_t sample;           /* row of the batch */
    uint32_t chunk;            /* imported: chunk number, and place in its plain bytes */
    uint32_t at;
    uint64_t offset, bytes; /* in the shard */
    uint8_t *to;
};

enum chunk_state { CHUNK_FETCHING, CHUNK_STORED /* to be decoded */, CHUNK_READY };

struct feed_chunk {
    struct list bucket; /* of its hash */
    struct list queue;  /* feed.decode (STORED) or feed.unused (READY and not pinned), the oldest first */
    enum chunk_state state;
    const struct larder_dataset *dataset;
    uint32_t shard, number;
    struct dataset_view *view; /* until READY */
    unsigned pins;
    bool again;                   /* fetched a second time, after it did not decode */
    bool lent;                    /* plain is the place of the one piece that wants all of it */
    bool raw;                     /* received into plain, and opened there as it comes */
    bool opens;                   /* that goes well so far */
    struct part_opening *opening; /* of a raw one, from its first bytes on */
    uint8_t tag[TAG_BYTES];
    uint8_t *stored, *plain; /* stored: NULL if raw */
    size_t stored_bytes, plain_bytes;
    uint64_t left_bytes; /* of samples, not copied to a batch yet; 0: nobody comes back in this epoch.
                            UINT64_MAX: not counted */
    struct feed_piece *waiting;
};

/* One ranged read on its way, and what becomes of it when it fails. */
struct feed_fetch {
    struct ranged_read read;
    struct larder_feed *feed;
    struct larder_dataset *dataset;
    struct list link;   /* feed.retries */
    uint64_t due_ms;    /* when to go on */
    uint64_t lost_ms;   /* since when nothing came; 0: it comes */
    uint32_t seen_next; /* how far it had come then */
    uint64_t seen_into;
    unsigned pause_ms; /* before the next try */
    bool renew;        /* the server does not know the opened version: open it again first */
    bool split;        /* something of it is damaged: ask piece by piece */
    unsigned renewals; /* in a row */
    unsigned conn;     /* number of the connection */
    uint64_t disk_ms;  /* of the read's, added to the feed's */
    struct read_piece pieces[];
};

struct larder_feed {
    struct larder *client;
    pid_t
        pid; /* who opened it: batches are not released by children of fork. Tensors may outlive the client */
    struct feed_source sources[MIX_DATASETS_MAX];
    uint32_t source_count;
    struct conn *conns[FEED_CONNECTIONS_MAX];
    unsigned conn_count;
    enum feed_damage { FEED_FAIL, FEED_SKIP, FEED_SUBSTITUTE } damage; /* as in larder.h */
    bool contiguous;
    bool aside, enlisted; /* saves of the client look at it unless it is aside */
    struct larder_feed *next_open;
    uint64_t depth_bytes;
    struct pool *pool;
    struct feed_lift *lift;     /* NULL: batches are handed out in host memory */
    struct feed_state identity; /* dataset, version, seed, window */
    uint64_t batches_per_epoch;

    struct feed_plan scout_plan;  /* the scout's own */
    struct feed_plan repair_plan; /* of the worker that repairs */

    /* The planner's own. */
    struct feed_plan plan;
    unsigned next_conn;

    pthread_mutex_t lock;
    pthread_cond_t changed;  /* the consumer waits: a batch got ready, or its cause of waiting changed */
    pthread_cond_t space;    /* the planner waits: memory was given back */
    pthread_cond_t work;     /* workers wait */
    pthread_cond_t scouting; /* the scout waits: it is far enough ahead */
    pthread_t planner, scout, workers[FEED_WORKERS_MAX];
    unsigned worker_count;
    bool planner_started, scout_started, planner_runs;
    uint64_t batches_planned;
    bool closing, planned_all;
    bool want_space; /* the planner waits for room in the arena */
    struct feed_arena arena;
    struct list batches;                       /* planned and not handed out, in order */
    uint32_t batches_ahead, batches_ahead_max; /* of them; those are planned before it waits */
    uint64_t described_bytes;                  /* of all batches */
    uint32_t batches_out;
    bool closed; /* the last batch to be released frees the feed */

    struct list buckets[FEED_CHUNK_BUCKETS];
    struct list unused;
    uint64_t chunk_bytes, chunk_bytes_max;
    bool forgets; /* chunks whose samples were all taken: there is no room for all of an epoch's */
    struct feed_buffers buffers;
    struct list decode, retries;
    struct part_opening *openings[FEED_OPENINGS_MAX];
    unsigned opening_count;
    struct list local_runs; /* to be read from files of this machine */
    struct list repairs;    /* batches with samples that could not be read; all else of them is there */
    bool repairing;         /* one worker does, at a time */

    uint64_t epoch, position; /* after the last batch handed out */
    uint64_t samples_out, bytes_out, skipped, substituted;
    uint64_t bytes_in_flight, pieces_in_flight;
    struct larder_feed_damage *damages; /* FEED_DAMAGE_MAX places from the first on; texts are the feed's */
    uint32_t damage_count;
    double starved_network, starved_disk, starved_decode, starved_consumer;
    uint64_t disk_ms[FEED_CONNECTIONS_MAX]; /* that the server waited for its disk, by connection */

    /* What the server is told (feed_report.c). */
    char *run, *names;
    struct id report_id;
    uint64_t opened_ms, report_due_ms; /* due: UINT64_MAX where the server does not want to know */
    struct feed_reports *reports;
};

/* feed.c: among the client's open feeds, whose position saves take. */
void feed_enlist(struct larder_feed *f);

/* feed_batch.c */
void *feed_planner(void *arg);
void feed_batch_free(struct larder_batch *b); /* its memory goes back; with the lock held */
/* With the lock held: one piece is in place, or (e set) never will be. */
void feed_piece_ends(struct larder_feed *f, struct feed_piece *p, const struct err *e);
/* With the lock held: the piece is asked for, and its bytes are on their way. */
void feed_piece_goes(struct larder_feed *f, struct feed_piece *p);
/* With the lock held: the network's share of a piece is over. */
void feed_piece_came(struct larder_feed *f, struct feed_piece *p);
/* Is it the data that is at fault, so that a feed may be asked to leave it out? */
bool feed_is_damage(const struct err *e);

/* With the lock held: the batch may be handed out. */
void feed_batch_ready(struct larder_feed *f, struct larder_batch *b);

/* feed_repair.c: what becomes of samples that could not be read */
/* With the lock held: notes that a row of a batch could not be read. */
void feed_hurt_add(struct larder_batch *b, uint32_t row, const struct err *why);
/* A worker's: leaves them out or finds others; then the batch is ready. */
void feed_repair(struct larder_feed *f, struct larder_batch *b);
/* With the lock held: the batch is handed out, and what was done is told. */
void feed_repair_told(struct larder_feed *f, struct larder_batch *b);
void feed_hurts_free(struct larder_batch *b);
void feed_damages_free(struct larder_feed *f);

/* Pieces of one dataset, sorted by shard and offset: feed_chunks.c imported, feed_ranges.c published. */
must_check int feed_chunks_request(struct larder_feed *f, struct feed_piece *pieces, uint32_t count,
                                   struct err *e);
must_check int feed_ranges_request(struct larder_feed *f, struct feed_piece *pieces, uint32_t count,
                                   struct err *e);
void feed_chunk_decode(struct larder_feed *f, struct feed_chunk *c, struct part_scratch *s);
void feed_chunks_free(struct larder_feed *f);

/* feed_fetch.c */
#define FEED_FETCH_PIECES_MAX READ_RANGES_MAX
must_check struct feed_fetch *feed_fetch_create(struct larder_feed *f, struct larder_dataset *d,
                                                uint32_t pieces_max); /* NULL: no memory */
/* Sends it over the next connection, or over that of another fetch; without the lock. Frees itself. Each
 * piece with a tag ends in `piece` of the read or in feed_fetch_lost. */
void feed_fetch_start(struct feed_fetch *fetch);
void feed_fetch_go_on(struct feed_fetch *fetch); /* a worker's: its due time has come */
void feed_chunk_some(struct ranged_read *r, struct read_piece *p, uint64_t at, size_t n);
void feed_chunk_came(struct ranged_read *r, struct read_piece *p);
void feed_range_came(struct ranged_read *r, struct read_piece *p);
/* With the lock held: p of a fetch will not come. */
void feed_chunk_lost(struct larder_feed *f, struct feed_chunk *c, const struct err *e);

/* With the lock held: something of the read came; its waits for the disk are the feed's. */
void feed_fetch_came(struct feed_fetch *fetch);

/* feed.c */
struct larder_feed_info;
/* With the lock held: what changes. */
void feed_figures(const struct larder_feed *f, struct larder_feed_info *out);
void feed_path(struct larder_feed *f, char *out, size_t size); /* which way the bytes go; without the lock */

/* feed_report.c */
#define FEED_REPORT_MS 5000u /* between reports; the second comes a second after the first */
must_check int feed_report_begin(struct larder_feed *f, const char *run, struct err *e);
/* A worker's, without the lock: sends a report unless the one before is still on its way. */
void feed_report(struct larder_feed *f, bool ended);
void feed_report_end(struct larder_feed *f);

/* feed_local.c: published shards whose files lie on this machine. Pieces of one dataset, as above. */
struct dataset_local;
must_check int feed_local_request(struct larder_feed *f, const struct dataset_local *local,
                                  struct feed_piece *pieces, uint32_t count, struct err *e);
void feed_local_read(struct larder_feed *f, struct list *link); /* a worker's: one of local_runs, taken off */
void feed_local_drop(struct larder_feed *f);                    /* when no thread is left */

/* feed_scout.c */
void *feed_scout(void *arg);

/* feed_worker.c */
void *feed_worker(void *arg);

#endif
