/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Boxes of tensors: where their elements lie in memory, and copying between such memory and packed row-major
 * bytes, whole or any range of them. The one place that knows strides.
 *
 *   packed bytes of a box      0 . . . . . . . . . . n        row-major, as stored
 *   a region of that box           [---)   [---)              rows of it
 *   memory                     base + sum(x[i] * strides[i])   any strides, also 0 or negative
 */
#ifndef LARDER_CLIENT_BOX_H
#define LARDER_CLIENT_BOX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/dtype.h"
#include "format/limits.h"

/* Strides in bytes of a box in memory, from strides in elements; all zero: packed row-major. Packed dtypes
 * (several elements to a byte) must be packed: ERR_INVALID; the stride of their last dimension reads 1.
 * writable: no two elements may share a place through a stride of 0, or through those of two dimensions
 * (ERR_INVALID); what takes three is not seen. ERR_LIMIT on overflow. */
must_check int box_strides(enum dtype dtype, uint32_t dims, const uint64_t *lengths, const int64_t *elements,
                           bool writable, int64_t *bytes, struct err *e);
/* Bytes from the first element to the lowest one (at most 0), and behind the highest one, of a box that is
 * not empty; strides as from box_strides. ERR_LIMIT on overflow. */
must_check int box_extent(enum dtype dtype, uint32_t dims, const uint64_t *lengths, const int64_t *strides,
                          int64_t *low, int64_t *high, struct err *e);
bool box_is_empty(uint32_t dims, const uint64_t *lengths);

/* Prepared copying between the packed bytes of a box and a region of it in memory. Immutable. */
struct box_copy {
    uint32_t dims; /* at least 1; dimensions that lie one behind the other are merged */
    uint32_t unit; /* bytes that are copied as one; 1 where the innermost dimension is dense */
    uint64_t begin[TENSOR_DIMS_MAX], end[TENSOR_DIMS_MAX]; /* of the region, in units */
    uint64_t pitch[TENSOR_DIMS_MAX];                       /* packed units to the next */
    int64_t strides[TENSOR_DIMS_MAX];                      /* in memory, bytes */
    uint8_t *memory;                                       /* of the region's first element */
};

/* lengths: of the packed box, not empty; the region [begin, begin + count) lies within it, all in elements.
 * strides: bytes, of the memory side, as from box_strides. memory: the region's first element. Sizes were
 * checked (dtype_bytes of the box fits). */
void box_copy_init(struct box_copy *b, enum dtype dtype, uint32_t dims, const uint64_t *lengths,
                   const uint64_t *begin, const uint64_t *count, const int64_t *strides, void *memory);
/* Packed bytes [offset, offset + n) of the box, from memory into out; all of them lie in the region. offset
 * and n are whole units. */
void box_gather(const struct box_copy *b, uint64_t offset, size_t n, uint8_t *out);
/* Of packed bytes [offset, offset + n), given at in, those that lie in the region go to memory. */
void box_scatter(const struct box_copy *b, uint64_t offset, size_t n, const uint8_t *in);
/* A part of such a copy that repeats: count[0] times count[1] times ... row_bytes dense bytes, the outermost
 * first. */
struct box_strip {
    uint8_t *memory;
    size_t packed; /* bytes behind the range's first */
    size_t row_bytes;
    uint32_t levels; /* used of what follows */
    struct {
        uint64_t count;
        int64_t stride; /* in memory, bytes */
        size_t pitch;   /* in packed bytes */
    } level[3];
};
/* For those who copy by other means than memcpy: the strips that make up what of packed bytes [offset, offset
 * + n) lies in the region. Returns what `strip` returned if not 0, else 0. */
must_check int box_walk(const struct box_copy *b, uint64_t offset, size_t n,
                        int (*strip)(void *arg, const struct box_strip *s), void *arg);
/* Where packed bytes [offset, offset + n) lie in memory, if all of them lie in the region and one behind the
 * other there; else NULL. */
uint8_t *box_straight(const struct box_copy *b, uint64_t offset, uint64_t n);
/* Does any of the packed bytes [offset, offset + n) lie in the region? */
bool box_touches(const struct box_copy *b, uint64_t offset, uint64_t n);

/* Intersection of two boxes of one tensor; false if empty (a box without dimensions meets any other). */
bool box_meet(uint32_t dims, const uint64_t *a_offsets, const uint64_t *a_lengths, const uint64_t *b_offsets,
              const uint64_t *b_lengths, uint64_t *offsets, uint64_t *lengths);

struct box {
    uint64_t offsets[TENSOR_DIMS_MAX], lengths[TENSOR_DIMS_MAX];
};

/* A set of disjoint boxes that shrinks. Zeroed memory is an empty one. */
struct box_set {
    struct box *boxes;
    size_t count, cap;
};
must_check int box_set_add(struct box_set *s, const struct box *b);
/* Takes `cut` away; the pieces that it took are appended to `taken` (which is not emptied). -ENOMEM. */
must_check int box_set_cut(struct box_set *s, uint32_t dims, const struct box *cut, struct box_set *taken);
void box_set_free(struct box_set *s);

/* "[0:4, 8:16]", for people. Returns text. */
char *box_text(char *text, size_t size, uint32_t dims, const uint64_t *offsets, const uint64_t *lengths);

#endif
