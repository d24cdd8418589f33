/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Open descriptors of objects, kept for the next read: by name and by whether they go past the page cache.
 * Those not in use are closed when there are more than DESCRIPTORS_MAX, the least recently used first, and
 * when they have not been used for DESCRIPTORS_IDLE_MS (an object removed by another instance holds its space
 * until then). Private to server/backend.
 */
#ifndef LARDER_DESCRIPTORS_H
#define LARDER_DESCRIPTORS_H

#include "server/backend/impl.h"

#define DESCRIPTORS_MAX     256u
#define DESCRIPTORS_BUCKETS 512u
#define DESCRIPTORS_IDLE_MS 10000u

struct descriptor;
typedef void descriptor_got(struct backend_op *op, struct descriptor *e, int status);

struct descriptors {
    struct loop *loop;
    bool no_direct;                           /* this file system refuses O_DIRECT */
    unsigned count;                           /* open or opening */
    unsigned closing;                         /* closes pending */
    struct list idle;                         /* of descriptor, least recently used first */
    struct list buckets[DESCRIPTORS_BUCKETS]; /* of descriptor */
    struct loop_timer timer;
    void (*emptied)(struct descriptors *d); /* set by descriptors_close */
};

void descriptors_init(struct descriptors *d, struct loop *l);
/* got is called from the loop with a descriptor to use, or NULL and a negative errno; or from within this
 * call with one that is open already. path: of the object, valid until got. op belongs to the callee
 * meanwhile. */
void descriptors_get(struct descriptors *d, struct backend_op *op, const char *name, const char *path,
                     bool direct, descriptor_got *got);
int descriptor_fd(const struct descriptor *e);
void descriptors_put(struct descriptors *d, struct descriptor *e);
/* The object is gone: later gets open anew. */
void descriptors_forget(struct descriptors *d, const char *name);
/* Nothing is in use. emptied is called when the last is closed, maybe from within. */
void descriptors_close(struct descriptors *d, void (*emptied)(struct descriptors *d));

#endif
