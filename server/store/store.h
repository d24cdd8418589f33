/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store: segments, commits, attempts and fencing, recovery at start, retention, scrub. It runs on one
 * loop; everything that changes the store happens on that loop's thread, so no lock guards it. Other loops
 * only read segments, by name, through backends of their own.
 *
 * Objects (all through the backend's verbs):
 *   store                              record_store, made once
 *   t/TENANT/tenant                    record_tenant
 *   t/TENANT/n/KIND-HASH               record_run; KIND "c" or "d", HASH: first 16 bytes of SHA-256(name) in
 * hex t/TENANT/r/RUN/e-EPOCH             envelope (8 hex digits); RUN: run id in hex t/TENANT/r/RUN/a-NUMBER
 * record_attempt (16 hex digits, as all numbers below) t/TENANT/r/RUN/c-SEQUENCE          commit record
 *   t/TENANT/r/RUN/p-SEQUENCE          pin; b-SEQUENCE: marked bad
 *   t/TENANT/r/RUN/s-SEGMENT           segment (32 hex digits)
 *
 * Requests come as wire messages: the session checks role and size, then hands payload and identity over.
 * Opcodes that the store serves: tenant_*, run_*, envelope_*, attempt, segment_*, join, commit, save_abort,
 * commit_*, mark, prune, scrub.
 */
#ifndef LARDER_STORE_H
#define LARDER_STORE_H

#include <stdbool.h>
#include <stdint.h>

#include "format/base/cursor.h"
#include "format/base/err.h"
#include "format/base/list.h"
#include "format/segment.h"
#include "format/wire.h"
#include "server/backend/backend.h"
#include "server/io/loop.h"

struct store;

struct store_options {
    struct loop *loop;
    struct backend *backend;      /* writer instance on that loop; stays the caller's, outlives the store */
    uint64_t space_reserve_bytes; /* kept free so that list, verify and prune work on a full disk */
    uint32_t join_wait_max_ms;    /* bound of the wait for other ranks */
    uint32_t check_wait_ms;       /* bound for the rank that checks the set; then another is asked */
    uint32_t segment_idle_ms;   /* a segment nobody wrote to for so long is given up (its client may reconnect
                                   before) */
    uint64_t buffers_bytes_max; /* chunk payloads held while their writes are in flight, all together */
};

/* Opens and recovers: reads every commit record, drops parts that no commit names and no live attempt owns,
 * checks that what commits name is there with the right length. Damaged or unknown-version objects are
 * reported by name and do not stop the start, except the store record itself. */
struct store_opening {
    void (*done)(struct store_opening *o); /* may be called before store_open returns: no memory */
    struct store *store;                   /* NULL on failure */
    struct err err;
};
void store_open(const struct store_options *o, struct store_opening *opening);

/* Fails what waits (ERR_CANCELLED, "the server is stopping"), lets running writes finish, then calls done;
 * the store is freed. */
void store_close(struct store *s, void (*done)(void *arg), void *arg);

/* One request. Owned by the caller until done; payload too. */
struct store_op {
    /* Set by the caller. */
    const char *tenant;
    enum client_role role;
    uint16_t opcode;
    const uint8_t *payload;
    size_t payload_bytes;
    uint64_t deadline_at_ms; /* loop time; 0: none */
    /* One frame of a streamed answer (scrub) is in op->reply; call store_continue when it has gone. The last
     * frame comes with done, and is empty. reply is the caller's from more to store_continue, also if the
     * request is cancelled meanwhile. */
    void (*more)(struct store_op *op);
    void (*done)(struct store_op *op);
    /* The answer: reply's bytes if err.class is ERR_NONE. The caller frees reply. */
    struct buf reply;
    struct err err;
    /* Private to the store from here. */
    struct list link;
    struct loop_timer timer;
    struct store *store;
    void *state;
};

/* For OP_SEGMENT_CHUNK and OP_SEGMENT_INDEX the tail of the payload must be aligned to BLOCK_BYTES in memory
 * and be followed by zeroed room up to the next multiple of it: it is written from where it stands. Of a
 * chunk the session has checked the tail's hash against the entry already (on its own thread); the store
 * trusts that. */
void store_submit(struct store *s, struct store_op *op);
void store_continue(struct store *s, struct store_op *op);
/* Gives up: done follows soon, with ERR_CANCELLED or with the result that came first. A write that has begun
 * is finished. */
void store_cancel(struct store *s, struct store_op *op);

struct store_stats {
    struct id store_id;
    bool read_only;
    char read_only_reason[256];
    uint64_t tenants, runs, commits, segments_open, stored_bytes, reserved_bytes, free_bytes, total_bytes,
        damaged_objects;
};
void store_stats(const struct store *s, struct store_stats *out); /* on the store's loop */

/* Name of a segment object for reading on any loop; tenant was checked by tenant_name_check. */
void store_segment_name(const char *tenant, const struct id *run, const struct id *segment,
                        char out[BACKEND_NAME_BYTES_MAX + 1]);

#endif
