/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many chunks of many parts, fetched over several connections, decoded on several threads, in bounded memory:
 * what restore and deep verify run on. Every stored chunk is read once; one that arrives damaged, or that the
 * server's disk cannot read, is read once more before it counts as damaged.
 */
#ifndef LARDER_CLIENT_FETCH_H
#define LARDER_CLIENT_FETCH_H

#include <stdatomic.h>

#include "client/part.h"

struct fetch_item {
    const struct part *part;
    uint32_t chunk;
};

struct fetch_job {
    struct larder *client;
    enum part_class class; /* of the first reads */
    struct conn *const *conns;
    unsigned conn_count;
    uint64_t memory_bytes; /* for stored chunks on their way, one slot at least, borrowed from the staging
                              memory if it has some; each decoding thread has a plain chunk beside it */
    unsigned threads;
    const struct fetch_item *items; /* ascending by part (any order of parts) and chunk; no pair twice */
    size_t count;
    /* Where an item's n plain bytes may be decoded to at once, or NULL: as below. What is there after damage
     * is undefined. May be NULL itself. On decoding threads, several at once, as all of these. */
    uint8_t *(*straight)(void *arg, size_t item, uint32_t n);
    /* Memory for the plain bytes of a chunk, CHUNK_PLAIN_BYTES_MAX; each decoding thread has one at a time.
     * NULL: they have their own. A failure ends the whole. */
    int (*room)(void *arg, uint8_t **plain, struct err *e);
    /* The plain bytes, which are valid during the call; there: they are straight where they belong. A failure
     * ends the whole. */
    int (*good)(void *arg, size_t item, uint8_t *plain, uint32_t n, bool there, struct err *e);
    /* With room: the memory is not used any more by the thread, which always says so. */
    void (*done)(void *arg, uint8_t *plain);
    /* A chunk that is damaged or cannot be read; also on fetching threads. Returns 0 to go on with the
     * others. */
    int (*damaged)(void *arg, size_t item, const struct err *why);
    void *arg;
    atomic_ullong *fetched_bytes; /* counted up; may be NULL */
};

/* 0 if every chunk was given to good or damaged; else the first failure that is none of a chunk (network,
 * memory, a value that `damaged` returned). */
must_check int fetch_run(const struct fetch_job *job, struct err *e);

/* A chunk at a time into memory, for small things: plain holds CHUNK_PLAIN_BYTES_MAX. */
must_check int fetch_one(const struct part *p, struct conn *conn, struct part_scratch *s, uint32_t chunk,
                         uint8_t *plain, struct err *e);

#endif
