/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of the batches ahead: one stretch, given out in order and taken back in any order, round
 * and round. A region becomes reusable once it and all older ones were given back, so a batch that is kept
 * holds up only what comes a whole round later. Not thread-safe: the feed's lock guards it.
 */
#ifndef LARDER_FEED_ARENA_H
#define LARDER_FEED_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/base/err.h"
#include "format/base/list.h"

#define FEED_ALIGN 256u /* of every field handed to a consumer */

struct feed_arena {
    uint8_t *base;
    size_t bytes;
    size_t head;         /* where the next region may start */
    struct list regions; /* oldest first, given out or waiting behind an older one */
};

struct feed_region {
    struct list link;
    uint8_t *at;
    size_t bytes;
    bool given_back;
};

/* base is aligned to FEED_ALIGN and stays the caller's. */
void feed_arena_init(struct feed_arena *a, uint8_t *base, size_t bytes);
/* Forgets all regions, given back or not. */
void feed_arena_reset(struct feed_arena *a);
/* bytes is rounded up to FEED_ALIGN, at least one unit; false: no room now (or ever, if bytes > a->bytes). r
 * comes from malloc; feed_arena_give hands it to the arena, which frees it when its stretch is reusable. */
must_check bool feed_arena_take(struct feed_arena *a, size_t bytes, struct feed_region *r);
void feed_arena_give(struct feed_arena *a, struct feed_region *r);

static inline size_t feed_align(size_t n)
{
    return (n + FEED_ALIGN - 1) / FEED_ALIGN * FEED_ALIGN;
}

#endif
