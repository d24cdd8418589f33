/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan of a restore: from boxes that were asked for to chunks that are fetched, each once, and from each
 * chunk to all memory that wants some of it. Where several ranks saved the same box, the lowest one's is
 * read.
 */
#ifndef LARDER_CLIENT_PLAN_H
#define LARDER_CLIENT_PLAN_H

#include "client/box.h"
#include "client/catalog.h"
#include "client/device.h"
#include "client/fetch.h"

struct target { /* on a device */
    struct device *device;
    void *stream; /* of the caller's: copies to the device come after what was given to it */
};

/* A box that was asked for, or many: whole small tensors that lie packed one behind the other, in one chunk
 * as in host memory, as those of a flat buffer of parameters do. */
struct request {
    uint32_t piece; /* first one of its name */
    uint32_t count; /* pieces from there on, one each of as many names; more than 1: of such a run */
    /* Of each dimension: offset and length (global), stride in bytes; first all offsets, then all lengths.
     * NULL: the whole tensor, packed. */
    const uint64_t *box;
    uint8_t *memory;
    const struct target *target; /* NULL: the host */
};

struct landing;

#define WHOLE_REQUEST UINT32_MAX

struct copy { /* what one piece gives to one request */
    uint32_t request;
    uint32_t region; /* in `regions`, or WHOLE_REQUEST */
    uint32_t piece;
};

struct use { /* of a chunk, of the rank of the copy's piece, by that copy */
    uint32_t chunk, copy;
};

struct plan {
    const struct catalog *catalog;
    const struct request *requests;
    bool (*usable)(void *arg, uint32_t piece);
    void *arg;
    struct copy *copies;
    size_t copy_count, copy_cap;
    struct box_set regions;
    struct use *uses; /* by rank, chunk */
    size_t use_count, use_cap;
    struct fetch_item *items; /* one per chunk */
    size_t *first_use;        /* of each item; one more at the end */
    size_t item_count;
};

/* usable: may a piece be read? NULL: any. ERR_MISMATCH naming tensor and box if elements that are asked for
 * lie in no (usable) piece. */
must_check int plan_create(const struct catalog *c, const struct request *requests, size_t request_count,
                           bool (*usable)(void *arg, uint32_t piece), void *arg, struct plan *out,
                           struct err *e);
/* The request for just what a copy gives of the nth piece of its request; its box is written to memory of the
 * caller's. */
void plan_copy_request(const struct plan *p, const struct copy *c, uint32_t nth,
                       uint64_t box[3 * TENSOR_DIMS_MAX], struct request *out);
uint32_t plan_rank(const struct plan *p, const struct use *u);
/* Where a chunk's n plain bytes go if that is one place in host memory, and nothing else wants them; else
 * NULL. */
uint8_t *plan_straight(const struct plan *p, size_t item, uint32_t n);
/* Places a chunk's plain bytes: in host memory at once, on devices by copies that `landing` gives (NULL: none
 * of the requests is on a device). Different items: any number of threads. */
must_check int plan_place(const struct plan *p, size_t item, uint8_t *plain, uint32_t n,
                          struct landing *landing, struct err *e);
void plan_free(struct plan *p);

#endif
