/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of server/store share: the catalogue in memory, and tasks.
 *
 * A task is one request on its way, or a piece of the store's own work. It is a chain of steps, each either
 * run at once or after a backend operation or a wait (`then`). Everything runs on the store's loop, so
 * between two steps nothing else happens, and across a step anything may have: what was looked up before is
 * looked at again after. A task keeps the run and the segment that it works on in memory (run_hold,
 * segment_hold), not in existence.
 *
 * Latches serialise what must not interleave: one per store (tenants), per tenant (names of runs) and per run
 * (attempts, commits, marks, envelopes). They are taken in that order.
 */
#ifndef LARDER_STORE_INTERNAL_H
#define LARDER_STORE_INTERNAL_H

#include "format/commit.h"
#include "format/index.h"
#include "format/keys.h"
#include "server/obs/metrics.h"
#include "server/store/store.h"

#define OBJECT_NAME_BYTES (BACKEND_NAME_BYTES_MAX + 1)
/* Memory for the chunk tables of all segments being written. */
#define TABLES_BYTES_MAX  (2ull << 30)
#define SEGMENTS_OPEN_MAX 16384u /* each is an open file */
#define PAYLOAD_MAX       (FRAME_PAYLOAD_BYTES_MAX - 1024u)
#define PAGE_BYTES_MAX \
    (FRAME_CONTROL_BYTES_MAX - 16384u) /* items of one page; an item is smaller than the rest */
#define FAILED_SAVES_MAX 8u            /* remembered of one run */
#define DAMAGES_MAX      4096u         /* remembered for verify */
#define CHECKS_MAX       3u            /* ranks asked to check one set */

/* ---- map: 16-byte keys to pointers ---- */

struct map_slot {
    struct id key;
    void *value; /* NULL: empty */
};
struct map {
    struct map_slot *slots;
    size_t count, capacity;
    uint64_t seed; /* keys come from clients; a secret seed keeps them from choosing one place */
};
void *map_get(const struct map *m, const struct id *key);
must_check int map_reserve(struct map *m); /* the next map_put will not fail; -ENOMEM */
must_check int map_put(struct map *m, const struct id *key, void *value); /* key is new; -ENOMEM */
void map_remove(struct map *m, const struct id *key);
void map_free(struct map *m);
/* Next value at or after slot *at, which is moved behind it; NULL at the end. The map must not change. */
void *map_next(const struct map *m, size_t *at);

/* ---- tasks ---- */

struct task;
typedef void task_step(struct task *t);

struct latch {
    struct task *holder;
    struct list waiting;
};

struct task_io {
    struct backend_op op;
    struct task *task;
    struct err err; /* of a task without a request */
    bool changing;  /* the operation makes something durable: its failure is a failed sync */
    char name[OBJECT_NAME_BYTES];
};

struct task {
    struct store *s;
    struct store_op *op; /* NULL: the store's own work */
    task_step *then;
    struct list link;      /* store.tasks */
    struct list queue;     /* what it waits in */
    bool waiting;          /* may be given up: in `queue`, not ready and no operation in flight */
    const char *wait_what; /* for the text of a timeout; a literal */
    task_step *expire;     /* what to do when the deadline passes in a wait; NULL: fail */
    uint64_t began_ms;
    bool cancelled;
    bool joining;        /* counted in joins_waiting */
    bool lent;           /* op->reply is with the caller until it continues the stream */
    struct latch *latch; /* held */
    struct task_io *io;
    struct tenant *tenant;
    struct run *run;
    struct segment *segment;
    struct err *err;             /* op->err, or io->err */
    struct buf buf;              /* a record on its way out */
    void *own;                   /* what the handler needs besides; freed with the task */
    void (*own_free)(void *own); /* NULL: free() */
};

/* A task for a request or (op NULL) for the store itself. NULL: no memory; a request is then answered. */
struct task *task_start(struct store *s, struct store_op *op, bool with_io);
/* Answers with what is in op->err and op->reply; leaves the latch; frees the task. */
void task_end(struct task *t);
void task_fail(struct task *t, enum err_class class, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void task_fail_with(struct task *t, const struct err *why);
/* The failed backend operation is the answer. */
void task_fail_io(struct task *t, const char *doing);
/* Ends with success if the encoded reply is whole. */
void task_reply(struct task *t);
/* Runs `then` in a later turn. */
void task_later(struct task *t, task_step *then);
/* Waits in a queue until task_wake, the deadline or a cancel. */
void task_wait(struct task *t, struct list *queue, const char *what, task_step *then);
void task_wake(struct task *t);
void task_wake_all(struct list *queue);
/* Memory of the size asked for, zeroed, in t->own; NULL: the task has been failed. */
void *task_own(struct task *t, size_t bytes);

void latch_init(struct latch *g);
void latch_enter(struct task *t, struct latch *g, const char *what, task_step *then);
void latch_leave(struct task *t);

/* The next backend operation of the task, cleared, completing into `then`. */
struct backend_op *task_op(struct task *t, task_step *then);
void task_put_new(struct task *t, task_step *then); /* t->buf under t->io->name */
void task_remove(struct task *t, task_step *then);  /* t->io->name */
static inline int64_t task_result(const struct task *t)
{
    return t->io->op.result;
}

/* ---- the catalogue ---- */

struct tenant {
    struct record_tenant record;
    struct id key;
    struct list link; /* store.tenants */
    struct map runs, names, segments;
    struct run *run_spare; /* run_reserve */
    struct latch latch;
    uint64_t stored_bytes, reserved_bytes;
};

struct envelope {
    uint32_t epoch;
    uint8_t bytes[ENVELOPE_BYTES];
};

struct commit_entry {
    struct commit commit;
    uint64_t stored_bytes;
    bool pinned, marked_bad, missing; /* missing: a segment that it names is not there or not whole */
    char *reason;                     /* of bad or missing; may be NULL */
    char *pin_reason;                 /* of pinned; may be NULL */
};
static inline bool commit_bad(const struct commit_entry *c)
{
    return c->marked_bad || c->missing;
}

struct run {
    struct tenant *tenant;
    struct record_run record;
    struct id name_key;
    unsigned holds;
    bool destroying, gone;
    struct latch latch;
    struct envelope *envelopes; /* by epoch */
    uint32_t envelope_count;
    struct record_attempt *attempts; /* by number */
    uint32_t attempt_count, attempt_capacity;
    uint64_t attempt_highest;      /* number; also counts records that could not be read */
    struct commit_entry **commits; /* by sequence */
    size_t commit_count, commit_capacity;
    uint64_t sequence_highest; /* ever given, as far as the medium tells */
    struct list loose;         /* segments that no commit names */
    struct list saves, failed; /* struct save: on their way; failed ones whose ranks may not all know */
    uint32_t failed_count;
    uint64_t stored_bytes;
    uint32_t unreadable; /* commit records that could not be read: what no commit names may be theirs */
    uint32_t envelopes_unreadable; /* likewise: the run has a key, even if none is here */
};

enum segment_state {
    SEGMENT_CREATING,
    SEGMENT_OPEN,
    SEGMENT_SEALING,
    SEGMENT_SEALED,
    SEGMENT_LEAVING,  /* being discarded or removed */
    SEGMENT_GIVEN_UP, /* gone from the medium; kept for a while to tell its writer why */
    SEGMENT_MISSING,  /* a commit names it, and it is not there */
};

struct segment {
    struct id id;
    struct run *run;
    struct list loose;
    struct list idle; /* store.idle: open ones and those given up, the one untouched for longest first */
    uint64_t touched_ms;
    enum segment_state state;
    uint32_t commits; /* commit records that name it */
    unsigned holds;
    bool gone;    /* no longer in the map */
    bool suspect; /* found at start beside a commit record that could not be read: may be its, is never
                     removed */
    struct id attempt;
    uint64_t step;
    uint32_t rank, world;
    uint64_t file_bytes; /* of a sealed one */
    uint8_t index_digest[SHA256_BYTES];
    struct save *save;     /* that it has joined */
    struct writer *writer; /* CREATING to SEALING, and LEAVING from there */
    struct err *why;       /* LEAVING, GIVEN_UP */
    struct list waiting;   /* tasks */
};

/* An object that recovery could not use: verify tells of it for as long as the server runs. */
struct damage {
    struct list link;
    uint64_t sequence; /* of a commit record, a pin or a mark; else 0 */
    bool gone;         /* with its run */
    char name[OBJECT_NAME_BYTES];
    struct err why;
};

struct store {
    struct store_options o;
    struct record_store record;
    bool read_only;
    char read_only_reason[256];
    uint64_t map_seed;
    struct map tenants_by_name;
    struct list tenants;
    struct tenant *tenant_spare; /* tenant_reserve */
    struct latch latch;
    uint64_t damaged;
    struct list damages; /* the first DAMAGES_MAX of them */
    uint32_t damages_kept;
    struct list tasks;    /* all; a task is on it until it ends */
    struct list ready;    /* tasks to be stepped */
    struct list finished; /* requests to be answered */
    struct loop_msg turn;
    bool turn_posted;
    bool stopping;
    void (*closed)(void *arg);
    void *closed_arg;
    struct list idle;
    struct loop_timer idle_timer;
    struct list collecting; /* segments to be removed from the medium */
    bool collector_runs;
    uint64_t buffers_bytes, tables_bytes,
        creating_bytes; /* creating: reserves the medium does not know of yet */
    uint32_t segments_open;
    struct list buffer_queue; /* tasks that wait for buffers_bytes to fall */
};

void store_turn_read_only(struct store *s, const char *why);
/* An object that is damaged or of an unknown version: logged, counted, kept in mind for verify, skipped. */
void store_report_damaged(struct store *s, const char *name, const struct err *why);
void damage_forget(struct store *s, const struct run *r); /* it was destroyed */
/* The damaged commit record of the run with the least sequence above `above`; NULL: none. */
const struct damage *damage_of_commit(const struct store *s, const struct run *r, uint64_t above);
/* The record of a tenant that cannot be read, or its folder if that lacks one; NULL: as below. */
const struct damage *damage_of_tenant(const struct store *s, const char *tenant);
/* The record of a run that cannot be read; NULL: it can, or there is none. */
const struct damage *damage_of_run(const struct tenant *t, const struct store *s, unsigned kind,
                                   struct slice name);
/* One of the tenant's; NULL: all can be read, so that what is not known is not there. */
const struct damage *damage_of_some_run(const struct tenant *t, const struct store *s);
void store_turn_soon(struct store *s);

/* Names of objects. */
void name_of_tenant(const char *tenant, char out[OBJECT_NAME_BYTES]);
void name_of_run(const char *tenant, enum run_kind kind, const struct id *name_key,
                 char out[OBJECT_NAME_BYTES]);
void name_of_folder(const struct run *r, char out[OBJECT_NAME_BYTES]);
void name_of_number(const struct run *r, char letter, uint64_t number, char out[OBJECT_NAME_BYTES]);
void name_of_segment(const struct segment *g, char out[OBJECT_NAME_BYTES]);
/* "c-0000000000000001" of the letter; digits: 8 or 16. */
bool name_number(const char *component, char letter, unsigned digits, uint64_t *number);
struct id key_of_name(const void *name, size_t n); /* first half of its SHA-256 */
const char *id_text(const struct id *id, char out[2 * ID_BYTES + 1]);
/* A run's name fit for a sentence; good until the next call. */
const char *run_text(const struct run *r);

/* What is to become durable is put into the catalogue after it is: ..._reserve takes the memory for that
 * before, under the same latch. Then the next ..._insert will not fail. -ENOMEM. */
must_check int tenant_reserve(struct store *s);
must_check int run_reserve(struct tenant *t);
must_check int envelope_reserve(struct run *r);
must_check int attempt_reserve(struct run *r);
must_check int commit_reserve(struct run *r);

struct tenant *tenant_find(const struct store *s, const char *name);
must_check struct tenant *tenant_insert(struct store *s,
                                        const struct record_tenant *record); /* NULL: no memory */
void tenant_free(struct tenant *t);
struct run *run_by_id(const struct tenant *t,
                      const struct id *id); /* NULL also while it is being destroyed */
struct run *run_by_name(const struct tenant *t, enum run_kind kind, struct slice name);
struct id run_name_key(enum run_kind kind, struct slice name);
must_check struct run *run_insert(struct tenant *t, const struct record_run *record);
void run_hold(struct task *t, struct run *r); /* until the task ends */
void run_release(struct run *r);
void run_forget(struct run *r); /* out of the maps */
/* Finds and holds the run of a request, or fails the task: "absent" and "not yours" look alike. */
must_check bool task_run_by_id(struct task *t, const struct id *id);
must_check bool task_run_by_name(struct task *t, unsigned kind, struct slice name);

must_check int envelope_insert(struct run *r, uint32_t epoch, const uint8_t bytes[ENVELOPE_BYTES]);
void envelope_remove(struct run *r, uint32_t epoch);
must_check int attempt_insert(struct run *r, const struct record_attempt *a);
const struct record_attempt *attempt_newest(const struct run *r); /* NULL: none */
const struct record_attempt *attempt_find(const struct run *r, const struct id *attempt);
/* Is it the newest of the run? Else the task has been failed with ERR_FENCED or ERR_NOT_FOUND. */
must_check bool task_attempt_is_live(struct task *t, const struct run *r, const struct id *attempt);
/* 0, or fills why with ERR_FENCED / ERR_NOT_FOUND. */
must_check int attempt_check(const struct run *r, const struct id *attempt, struct err *why);

/* Takes the entry over. -ENOMEM leaves it with the caller. */
must_check int commit_insert(struct run *r, struct commit_entry *c);
void commit_remove(struct run *r, struct commit_entry *c); /* frees it; segments are counted down */
void commit_entry_free(struct commit_entry *c);
struct commit_entry *commit_by_sequence(const struct run *r, uint64_t sequence);
struct commit_entry *commit_of_save(const struct run *r, const struct id *attempt, uint64_t step);
struct commit_entry *commit_last_good(const struct run *r);
void commit_set_reason(struct commit_entry *c, const char *reason);
void commit_set_pinned(struct commit_entry *c, bool pinned, const char *reason);
/* What people are told: why it is bad, else why it is pinned. */
struct slice commit_reason(const struct commit_entry *c);
/* Names the segments of the commit as used: makes unknown ones SEGMENT_MISSING, counts, sums. */
must_check int commit_bind(struct run *r, struct commit_entry *c);

must_check struct segment *segment_insert(struct run *r, const struct id *id, enum segment_state state);
struct segment *segment_find(const struct tenant *t, const struct id *id);
void segment_hold(struct task *t, struct segment *g);
void segment_release(struct segment *g);
void segment_forget(struct segment *g);                 /* out of the map; freed once nobody holds it */
void segment_stored(struct segment *g, uint64_t bytes); /* accounts for a sealed one */

/* ---- across files ---- */

/* Gives up a segment that no commit names: an open one is discarded once its writes are done, a sealed one is
 * removed. Its writer is told why. */
void segment_give_up(struct store *s, struct segment *g, const struct err *why);
void segment_touch(struct store *s, struct segment *g);
void segments_idle(struct loop_timer *timer);
/* Removes, in the background, what is loose and of no use any more in the run. */
void run_collect(struct store *s, struct run *r);
/* Of use to nobody? (see retention of abandoned saves in prune.c) */
bool segment_abandoned(const struct store *s, const struct segment *g);
void collector_start(struct store *s);
/* Closing: frees what is open. done when store.segments_open is 0. */
void segments_close(struct store *s);
void writer_free(struct store *s, struct writer *w);

/* Fails every save of the run but those of the attempt `keep` (NULL: all). */
void saves_fail(struct store *s, struct run *r, const struct id *keep, const struct err *why);
void save_free(struct save *v);
/* Appends commit_item of pending and abandoned saves; returns their number. */
uint32_t saves_list(struct store *s, struct run *r, struct buf *out);
/* A failure of this save that the rank has not heard of yet? It counts as heard then. */
bool save_failure_unheard(struct run *r, const struct id *attempt, uint64_t step, uint32_t rank,
                          struct err *why);
void saves_free(struct run *r);

void recover_start(struct store *s, struct store_opening *opening);
void store_free(struct store *s);

task_step do_tenant_add, do_tenant_list, do_run_open, do_run_list, do_run_destroy, do_envelope_put,
    do_envelope_drop, do_attempt, do_segment_create, do_segment_chunk, do_segment_index, do_segment_seal,
    do_segment_discard, do_join, do_commit, do_save_abort, do_commit_list, do_commit_get, do_mark, do_prune,
    do_scrub;
void scrub_continue(struct task *t);

/* Decodes the message of the task's request, with nothing behind it; false: failed. */
#define task_decode(t, name, out)                                                                           \
    ({                                                                                                      \
        struct rcur in_ = rcur_of((t)->op->payload, (t)->op->payload_bytes);                                \
        bool ok_ = msg_##name##_decode(&in_, (out), (t)->err) == 0;                                         \
        if (ok_ && in_.left != 0)                                                                           \
            ok_ =                                                                                           \
                err_set((t)->err, ERR_PROTOCOL, "message " #name " has %zu bytes too many", in_.left) == 0; \
        if (!ok_)                                                                                           \
            task_end(t);                                                                                    \
        ok_;                                                                                                \
    })

#endif
