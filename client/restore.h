/* SPDX-License-Identifier: Apache-2.0 */
/* A restore handle. */
#ifndef LARDER_CLIENT_RESTORE_H
#define LARDER_CLIENT_RESTORE_H

#include <pthread.h>
#include <stdatomic.h>

#include "client/plan.h"
#include "client/snapshot.h"

#define RESTORE_CONNS_MAX 16u

struct damage {
    const char *tensor; /* in the catalog's memory */
    uint32_t rank, chunk;
    char *text;
};

/* Connections on their way: opened side by side, while tensors are asked for. */
struct dialling {
    unsigned count;
    pthread_t threads[RESTORE_CONNS_MAX];
    struct dial {
        struct larder *client;
        struct conn *conn;
        struct err err;
    } dials[RESTORE_CONNS_MAX];
};

struct larder_restore {
    struct larder *client;
    struct run run;
    bool run_is_open;
    struct commit commit;
    struct part **parts;
    struct catalog catalog;
    uint64_t memory_bytes;
    struct conn *conns[RESTORE_CONNS_MAX];
    unsigned conns_wanted, conn_count;
    struct dialling dialling; /* of those that were not there when the first was asked for */
    struct request *requests;
    size_t request_count, request_cap, requests_done;
    struct tail { /* where a tensor would have to lie to be one more of the last request's run */
        uint32_t piece, chunk, offset;
        uint8_t *memory; /* NULL: that request can have no more */
    } tail;
    struct device **devices; /* of the requests, each once */
    unsigned device_count;
    struct names memory; /* boxes and targets of requests, labels that were given out */
    struct damage *damage;
    size_t damage_count, damage_cap;
    size_t extra_at, extra_at_index;
    atomic_ullong fetched_bytes;
    uint32_t fell_back, repaired;
    char fallback_reason[256];
};

/* Reads what was asked for since the last time. */
must_check int restore_run(struct larder_restore *r, struct err *e);
void restore_clear_damage(struct larder_restore *r);
/* Begins to open what connections it lacks; once. */
void restore_dial(struct larder_restore *r);
/* Waits until they are open or failed; why, or ERR_NONE. */
void restore_dial_end(struct larder_restore *r, struct err *why);
/* The same, and one at least is there: with fewer than wanted a restore is only slower. */
must_check int restore_dialled(struct larder_restore *r, struct err *e);

#endif
