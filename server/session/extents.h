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
 * left goes when room is needed, that which was read first before others, and counts for nothing after
 * EXTENT_KEPT_MS. What is held is not there for those who come later: from a quarter of the arena on,
 * extents_crowded asks everyone to hold little. While all of it is held (slow readers), further extents have
 * memory of their own, which is freed at once: nobody stalls.
 *
 * Those who go through the same objects can only share what is between them while it fits into the arena. So
 * it is known where somebody goes through an object (a scan), and who comes later may begin there.
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

#define EXTENT_SCANS_MAX 16u /* of a group that extents_scans tells of */

struct extents;

/* Names an object; no two share one. */
struct extent_key {
    struct id group; /* what it is part of, and who may read it */
    struct id object;
};

struct extent {
    uint64_t begin; /* in its object */
    uint32_t room;  /* bytes asked for */
    uint32_t bytes; /* of them, once read: fewer at the object's end */
    uint8_t *memory;
    struct err err; /* once read: why it could not be */
    /* Private. */
    struct list bucket; /* in the table; empty: can no longer be found */
    struct list link;   /* of those that are kept, or of ghosts */
    struct list waiting;
    struct extent_key key;
    uint64_t read_at_ms;
    uint32_t refs, frame, unit;
    uint32_t unsure_bytes;
    bool read;
    bool ghost; /* what is known of one that went: no memory, and nobody holds it */
};

/* What is wanted: of it, the extent that is found or made covers at least the first byte. */
struct extent_want {
    struct extent_key key;
    uint64_t begin, end; /* within one window */
    uint64_t now_ms;
    uint32_t
        unsure_bytes; /* may be found once it was read, if that pays; of its object so many bytes are kept
                         before anything is known of it. 0: it is found only while it is being read */
    bool fresh;       /* read it anew, whatever is there */
    uint64_t reader;  /* who goes through the object with it; 0: nobody does */
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

/* A scan: somebody goes through an object, and others may join; the bytes in memory around where it is now.
 */
struct extent_scan {
    struct id object;
    uint64_t begin, end;
};

/* The scans of a group's objects, the one that began first before others, so that all who ask choose the same
 * one. joins: for who is about to join one; what is read there is worth keeping from now on. Returns how
 * many.
 */
unsigned extents_scans(struct extents *x, const struct id *group, bool joins, uint64_t now_ms,
                       struct extent_scan out[EXTENT_SCANS_MAX]);

/* So much is held that little is left for what may be wanted again. */
bool extents_crowded(const struct extents *x);

#endif
