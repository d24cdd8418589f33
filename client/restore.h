/* SPDX-License-Identifier: Apache-2.0 */
/* A restore handle. */
#ifndef LARDER_CLIENT_RESTORE_H
#define LARDER_CLIENT_RESTORE_H

#include <stdatomic.h>

#include "client/plan.h"
#include "client/snapshot.h"

#define RESTORE_CONNS_MAX 16u

struct damage {
    const char *tensor; /* in the catalog's memory */
    uint32_t rank, chunk;
    char *text;
};

struct larder_restore {
    struct larder *client;
    struct run run;
    bool run_is_open;
    struct commit commit;
    struct part **parts;
    struct catalog catalog;
    uint64_t memory_bytes;
    struct conn *conns[RESTORE_CONNS_MAX]; /* made by the first run */
    unsigned conns_wanted, conn_count;
    struct request *requests;
    size_t request_count, request_cap, requests_done;
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

#endif
