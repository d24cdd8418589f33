/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What saves of one client share: staging slots, the threads that compress and seal, the connection that they
 * send on, and the one save at a time that is being sent. One lock guards all of it and the state of every
 * save.
 *
 *   submit (trainer's thread, and helpers)   slot <- tensors        snapshot_take
 *   workers (niced)                          slot -> part_writer    compress, seal, send
 *   one thread per save                      create, seal, join, check, commit   (save_run.c)
 */
#ifndef LARDER_CLIENT_SAVER_H
#define LARDER_CLIENT_SAVER_H

#include <pthread.h>
#include <stdatomic.h>

#include "client/opened.h"
#include "client/part.h"
#include "client/snapshot.h"

struct saver;

struct larder_save {
    struct larder *client;
    struct saver *saver;
    struct list link; /* of the saver's `active` or `finished` */
    pthread_t thread;

    /* Fixed by larder_save_begin. */
    char run[NAME_BYTES_MAX + 1];
    uint64_t step;
    uint32_t rank, world;
    struct id attempt;
    uint8_t loader[LOADER_STATE_BYTES_MAX];
    size_t loader_bytes;
    bool loader_asked; /* at submit, of the client's feed */
    struct buf labels;
    enum codec_level level;
    enum larder_when_busy when_busy;
    uint32_t join_timeout_ms, given_ms;
    uint64_t deadline_ms; /* clock_ms() when given_ms are over; 0: none */
    unsigned verify_percent;

    struct snapshot snapshot; /* the owner's thread until submit; then immutable but for hashes */
    uint8_t *stored;          /* by chunk, when it failed: 1 if the server had it. Made by submit */

    /* Under the saver's lock. */
    unsigned references; /* handle, thread */
    enum larder_save_state state;
    bool submitted, copying, sealed; /* copying: submit has not returned */
    bool going;                      /* workers may begin: nothing is left to copy, or all slots are full */
    bool failed;                     /* err tells; the thread winds up and then sets state */
    bool seen;                       /* somebody was told of the failure */
    bool cancelled;
    bool over;          /* the thread waits for nothing more */
    struct err set_err; /* the thread's own: with one rank, why its part makes no checkpoint */
    bool told;          /* the thread's own: the server said that the save failed */
    struct err err;
    struct lane *lanes; /* of the devices that it is on; see stage.h */
    unsigned lane_count;
    pthread_t stager;
    bool has_stager, staging; /* staging: the stager runs */
    uint32_t host_end;        /* no chunk from there on is of host memory */
    uint64_t host_bytes;
    size_t slots;       /* of staging memory that were not lent at submit */
    uint32_t next_copy; /* chunks taken by copiers */
    uint32_t copied;    /* chunks whose bytes are private now */
    uint32_t handled;   /* chunks that workers are done with, well or not */
    uint32_t queued;    /* chunks given to workers */
    struct part_writer *writer;
    struct commit_part part;
    uint64_t sequence;
    uint64_t submitted_ns, returned_ns, staged_ns, durable_ns;
    uint64_t plain_bytes, stored_bytes, sent_bytes;
    uint32_t chunks_sent;
    size_t left_at, left_index; /* where the list of what was left out goes on */
};

struct filled { /* a slot on its way to a worker */
    struct larder_save *save;
    uint32_t chunk;
    uint8_t *slot;
};

struct attempt_known {
    struct attempt_known *next;
    struct id run_id, attempt;
    uint64_t number;
};

struct saver {
    struct larder *client;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct conn *conn; /* made by the first save's thread */
    bool connecting, stopping;
    bool abandon; /* copies from devices that do not end are not waited for any more */

    struct larder_save *sending; /* between submit and the sealing of its part */
    struct list active, finished;
    struct err unseen;                   /* the failure that the next submit, or the end, returns */
    const struct larder_save *unseen_of; /* only compared */
    uint64_t skipped;
    struct snapshot_size expected; /* as the last one: mostly the next is like it */

    struct filled *queue; /* a ring: as many as there are slots */
    size_t queue_cap, queue_at, queue_count;
    pthread_t *workers;
    unsigned worker_count;

    struct attempt_known *attempts; /* registered by this client */
    size_t lent;                    /* slots, see loan.h */
};

must_check int saver_create(struct larder *c, struct saver **out, struct err *e);
/* Waits until no save is in flight, until clock_ms() reaches until_ms. Then gives up on those that are:
 * ERR_TIMEOUT naming run and step of one. Else a failure that nobody has seen is returned. Nothing is in
 * flight after it. */
must_check int saver_drain(struct saver *v, uint64_t until_ms, struct err *e);
void saver_destroy(struct saver *v); /* after saver_drain */

/* A staging slot is free again. */
void saver_give(void *saver, uint8_t *slot);

/* With the lock held, all of these. */
must_check int saver_start_workers(struct saver *v, struct err *e); /* once; then nothing */
void saver_queue(struct saver *v, struct larder_save *s, uint32_t chunk, uint8_t *slot);
/* Workers leave the cores and the memory's bandwidth to the copy until this is called: the trainer waits for
 * it, and for nothing else. */
void saver_go(struct saver *v, struct larder_save *s);
void save_fail(struct larder_save *s, const struct err *e); /* the first counts */
void save_release(struct larder_save *s);                   /* a reference; lets go of the lock to free s */
void saver_reap(struct saver *v);                           /* joins threads of finished saves */

struct save_left { /* of a save that failed: what the server did not have */
    uint32_t tensors;
    uint64_t bytes;
    struct slice first; /* name of a tensor */
};
struct save_left save_left(const struct larder_save *s);
/* Without the lock: what is left of the deadline, at least 1, at most bound_ms. */
uint32_t save_time_left(const struct larder_save *s, uint32_t bound_ms);
/* A thread beside that of a save with a deadline: fails it when the time is up and its part is not sealed
 * (else the server's wait for the other ranks ends by then). Ends when `over` is set. */
void *save_watch(void *save);

/* The connection that saves use. */
must_check int saver_conn(struct saver *v, struct conn **out, struct err *e);
/* The thread of a save. */
void *save_run(void *save);
/* Tells the server, and so all ranks, that the save is given up, and which class of failure it is. -EEXIST:
 * it is durable. */
int save_abort(struct larder_save *s, const struct id *run_id, enum err_class class, const char *reason,
               uint32_t timeout_ms, struct err *e);
/* The same from the caller's thread, of a save whose thread waits for the others, or was never begun. */
int save_give_up(struct larder_save *s, const char *reason, struct err *e);

#endif
