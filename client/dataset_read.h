/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranged reads that land where they are wanted: many ranges of many objects in one request, each with a place
 * in memory. Asynchronous, on a connection; also the waiting form over it.
 *
 * Bytes are received, or decrypted, straight into their place, on the connection's thread. A read that was
 * lost with its connection goes on at the first byte that had not come.
 */
#ifndef LARDER_DATASET_READ_H
#define LARDER_DATASET_READ_H

#include <stdbool.h>

#include "client/conn.h"
#include "format/limits.h"
#include "format/segment.h"

/* A range and its place. Neighbours in the array whose ranges touch travel as one range. */
struct read_piece {
    struct id object; /* as in msg_read_range */
    uint64_t offset, bytes;
    uint8_t *into; /* NULL: the bytes are passed over (a gap between two wanted ranges) */
    uint8_t *tail; /* where the last tail_bytes go instead; NULL: nowhere else */
    uint32_t tail_bytes;
    void *tag; /* the owner's */
};

struct ranged_read {
    /* Set by the owner before the first submit. All must stay until done. */
    struct conn *conn;
    enum read_source source;
    struct id scope;
    bool past_lane;      /* over TLS and past the server's memory: for what came damaged */
    uint32_t timeout_ms; /* between two frames; 0: the connection's */
    struct read_piece *pieces;
    uint32_t count; /* 1 .. READ_RANGES_MAX */
    /* Bytes [at, at + n) of p, which has a tag, have come, n > 0; the next ones follow. May be NULL. */
    void (*some)(struct ranged_read *r, struct read_piece *p, uint64_t at, size_t n);
    void (*piece)(struct ranged_read *r, struct read_piece *p); /* all bytes of p came. May be NULL */
    void (*done)(struct ranged_read *r);                        /* after the last piece, or with err set */
    void *arg;
    /* The outcome. */
    struct err err;     /* class ERR_NONE: all pieces came */
    uint32_t next;      /* pieces that came whole */
    uint64_t into_next; /* bytes that came of the piece after them */
    uint64_t disk_ms;   /* for which the server says that it waited for its disk, of all tries together */
    /* Private. */
    struct call call;
};

/* Asks for what is still missing: everything at first, the rest after a failure. Callbacks run on the
 * connection's thread, or on the caller's before this returns, and must be short. */
void ranged_read_submit(struct ranged_read *r);

/* Is it worth asking again after this error (a lost connection, a server that restarts)? */
bool ranged_read_retriable(const struct err *e);

/* Submits and waits; asks again after losses until retry_ms has passed without a byte. done is its own;
 * `piece` sees a copy of r, whose outcome is in r once it returns. */
must_check int ranged_read_wait(struct ranged_read *r, unsigned retry_ms, struct err *e);

#endif
