/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bytes on their way from disk to clients, shared by all loops: who wants bytes that somebody else is reading
 * waits for that read, and what was read stays for a while, so that many clients that restore one checkpoint
 * cost one read.
 *
 * An extent is one read: bytes of one object, on borders of blocks, within one window of EXTENT_BYTES_MAX.
 * Those that can be found never overlap: of what is wanted, only what no extent covers is read. An extent
 * belongs to those who hold it; the last lets its memory go, or leaves it to be found again.
 *
 * Memory is one arena, taken at start. What nobody holds is left there if it is worth keeping: of what was
 * wanted of its object lately, a quarter at least was wanted again, or little of it was wanted yet. What is
 * left goes, the longest unused first, when room is needed, and counts for nothing after EXTENT_KEPT_MS.
 * While all of the arena is held (slow readers), further extents have memory of their own, which is freed at
 * once: nobody stalls, and extents_crowded asks everyone to hold little.
 *
 * Threads: all calls from any loop. One lock guards the table; nothing is read, sent or waited for under it.
 */
#ifndef LARDER_EXTENTS_H
#define LARDER_EXTENTS_H

#include <stdbool.h>
#include <stdint.h>

#include "format/base/cursor.h"
#include "format/base/err.h"
#include "format/base/list.h"
#include "format/segment.h"
#include "server/io/loop.h"

#define EXTENT_BYTES_MAX (1u << 20)
#define EXTENT_KEPT_MS   60000u /* since it was read */

struct extents;

struct extent {
    uint64_t begin; /* in its object */
    uint32_t room;  /* bytes asked for */
    uint32_t bytes; /* of them, once read: fewer at the object's end */
    uint8_t *memory;
    struct err err; /* once read: why it could not be */
    /* Private. */
    struct list bucket; /* in the table; empty: can no longer be found */
    struct list idle;   /* held by nobody */
    struct list waiting;
    struct id key;
    uint64_t read_at_ms;
    uint32_t refs, frame, unit;
    uint32_t unsure_bytes;
    bool read;
    bool ghost; /* what is known of one that went: no memory, and nobody holds it */
};

/* What is wanted: of it, the extent that is found or made covers at least the first byte. */
struct extent_want {
    struct id key;       /* names the object and who may read it; no two of them share one */
    uint64_t begin, end; /* within one window */
    uint64_t now_ms;
    uint32_t
        unsure_bytes; /* may be found once it was read, if that pays; of its object so many bytes are kept
                         before anything is known of it. 0: it is found only while it is being read */
    bool fresh;       /* read it anew, whatever is there */
};

/* Embedded by who waits, zeroed before; stays until told. */
struct extent_wait {
    void (*told)(struct extent_wait *w); /* on `loop`, with w->extent read or failed */
    struct loop *loop;
    struct extent *extent;
    /* Private. */
    struct list link;
    struct loop_msg msg;
};

/* arena_bytes: rounded up to whole windows, faulted in. 0 or -ENOMEM. */
must_check int extents_create(uint64_t arena_bytes, struct extents **out);
void extents_destroy(struct extents *x); /* nobody holds any; NULL allowed */

/* 0: told follows, not from within. 1: w->extent is new; the caller reads its bytes and calls extent_read.
 * Either way the caller holds w->extent from now on. -ENOMEM. */
must_check int extent_get(struct extents *x, const struct extent_want *want, struct extent_wait *w);
/* The read has ended: with so many bytes, or e->err is filled. Tells all who wait. */
void extent_read(struct extents *x, struct extent *e, uint32_t bytes, uint64_t now_ms);
/* Memory that is found by nobody else, n <= EXTENT_BYTES_MAX; what is left in the arena does not go for it.
 * NULL: no memory */
must_check struct extent *extent_private(struct extents *x, uint32_t n);
void extent_put(struct extents *x, struct extent *e); /* NULL allowed */

/* More is held than the arena has room for. */
bool extents_crowded(const struct extents *x);

#endif
