/* SPDX-License-Identifier: Apache-2.0 */
/*
 * In which order items are fetched: as they stand, round and round, each once, until all are taken. Where the
 * server tells that others are reading the same segments, the order goes on from there, and what it left out
 * comes at the end: so those who restore one checkpoint at about the same time read it together, whenever
 * each began and however fast each is (a circular, shared scan, as databases have it).
 */
#ifndef LARDER_CLIENT_FETCH_ORDER_H
#define LARDER_CLIENT_FETCH_ORDER_H

#include "client/fetch.h"

struct fetch_order {
    const struct fetch_item *items;
    size_t count, left;
    /* Private. */
    size_t at;
    uint8_t *taken;
    struct fetch_span *spans; /* items of one part */
    size_t span_count;
};

struct fetch_scan { /* bytes of a segment that the server has in memory, where others are reading it */
    struct id segment;
    uint64_t begin, end;
};

/* items: as in struct fetch_job, and stay. 0 or -ENOMEM. */
must_check int fetch_order_create(struct fetch_order *o, const struct fetch_item *items, size_t count);
void fetch_order_free(struct fetch_order *o);
/* The item that is next; nothing is taken by that. left > 0. */
size_t fetch_order_next(struct fetch_order *o);
/* Takes the one that is next. */
void fetch_order_take(struct fetch_order *o);
/* The first of these scans that has something which is not taken yet is the one that the order goes on with;
 * it stays where it is if that is there. */
void fetch_order_join(struct fetch_order *o, const struct fetch_scan *scans, unsigned count);

#endif
