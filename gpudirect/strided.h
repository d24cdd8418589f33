/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the elements of a strided box lie, in a form that a thread of a GPU can use: given the number of a
 * unit in packed row-major order, it finds the unit's place in memory, or that it is not in the region,
 * without looking at its neighbours.
 *
 *   packed     0 . . . . [first . . . first + count)  . . .     the box as stored; a job takes a range of it
 *   a region            [---)   [---)                           the places [begin, end) of the box, as in
 * client/box.h memory     sum((x[i] - begin[i]) * stride[i])               from the region's first element;
 * any strides, also 0 or negative
 *
 * A unit is 1, 2, 4, 8 or 16 bytes: the widest that the addresses, the strides and the range allow, chosen
 * when a job is made.
 */
#ifndef LARDER_GPUDIRECT_STRIDED_H
#define LARDER_GPUDIRECT_STRIDED_H

#include "gpudirect/portable.h"

#define STRIDED_DIMS_MAX 17u /* those of a tensor, and the bytes of an element */
#define STRIDED_UNIT_MAX 16u

struct strided {
    uint32_t dims, unit;              /* unit in bytes */
    uint64_t begin[STRIDED_DIMS_MAX]; /* of the region, in places of the box */
    uint64_t end[STRIDED_DIMS_MAX];
    uint64_t pitch[STRIDED_DIMS_MAX];   /* packed units to the next place */
    uint64_t inverse[STRIDED_DIMS_MAX]; /* of the pitch: floor((2^64 - 1) / pitch) */
    int64_t stride[STRIDED_DIMS_MAX];   /* bytes in memory to the next place */
};

/* What a kernel is started with. Addresses are those of the side that runs it. */
struct strided_job {
    struct strided box;
    uint64_t first, count; /* packed units */
    uint8_t *memory;       /* of the region's first element */
    uint8_t *packed;       /* of packed unit `first` */
};

/* dims: 1..16, the innermost last. unit: bytes of an element, one of 1, 2, 4, 8, 16, or 1 for dense rows.
 * pitch in such units, the last one 1; stride in bytes. The box's bytes fit 63 bits. Values as in `struct
 * box_copy`. */
void strided_init(struct strided *s, uint32_t dims, uint32_t unit, const uint64_t *begin, const uint64_t *end,
                  const uint64_t *pitch, const int64_t *stride);
/* Packed bytes [offset, offset + n) of the box, which lie (or will lie) at packed; both are whole elements.
 */
void strided_job_init(struct strided_job *j, const struct strided *s, uint64_t offset, uint64_t n,
                      void *memory, void *packed);

/* ---- what host and device share ---- */

/* The place of packed unit u, in bytes from the region's first element. 0: it is not in the region. */
SHARED int strided_at(const struct strided *s, uint64_t u, int64_t *at)
{
    int inside = 1;
    *at = 0;
    for (uint32_t i = 0; i < s->dims; i++) {
        uint64_t x = multiply(u, s->inverse[i]).hi; /* u / pitch, or one less */
        u -= x * s->pitch[i];
        if (u >= s->pitch[i]) {
            u -= s->pitch[i];
            x++;
        }
        inside &= x >= s->begin[i] && x < s->end[i];
        *at += (int64_t)(x - s->begin[i]) * s->stride[i];
    }
    return inside;
}

#endif
