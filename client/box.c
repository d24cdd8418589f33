/* SPDX-License-Identifier: Apache-2.0 */
#include "client/box.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/cursor.h"

/* ---- strides ---- */

bool box_is_empty(uint32_t dims, const uint64_t *lengths)
{
    for (uint32_t i = 0; i < dims; i++)
        if (lengths[i] == 0)
            return true;
    return false;
}

static bool all_zero(uint32_t dims, const int64_t *v)
{
    for (uint32_t i = 0; i < dims; i++)
        if (v[i] != 0)
            return false;
    return true;
}

/* Row-major strides in elements of a box that is not empty. */
static int packed_strides(uint32_t dims, const uint64_t *lengths, int64_t *out, struct err *e)
{
    int64_t step = 1;
    for (uint32_t i = dims; i-- > 0;) {
        out[i] = step;
        if (mul_overflows(step, lengths[i], &step))
            return err_set(e, ERR_LIMIT, "a box of more than 2^63 elements");
    }
    return 0;
}

static uint64_t magnitude(int64_t v)
{
    return v < 0 ? 0 - (uint64_t)v : (uint64_t)v;
}

/* So many steps in one dimension lead to the same place as so many in the other, the fewest that do. */
static bool meet(uint64_t a_length, int64_t a_stride, uint64_t b_length, int64_t b_stride)
{
    uint64_t a = magnitude(a_stride), b = magnitude(b_stride), x = a, y = b;
    while (y != 0) { /* x: the greatest common divisor */
        uint64_t rest = x % y;
        x = y;
        y = rest;
    }
    return b / x < a_length && a / x < b_length;
}

static int no_sharing(uint32_t dims, const uint64_t *lengths, const int64_t *strides, struct err *e)
{
    for (uint32_t i = 0; i < dims; i++)
        if (lengths[i] > 1 && strides[i] == 0)
            return err_set(e, ERR_INVALID,
                           "stride 0 in dimension %u, of length %llu: elements would be written over each "
                           "other; give it "
                           "memory of its own",
                           i, (unsigned long long)lengths[i]);
    for (uint32_t i = 0; i < dims; i++)
        for (uint32_t k = i + 1; k < dims; k++)
            if (lengths[i] > 1 && lengths[k] > 1 && meet(lengths[i], strides[i], lengths[k], strides[k]))
                return err_set(e, ERR_INVALID,
                               "strides %lld and %lld in dimensions %u and %u, of lengths %llu and %llu: "
                               "elements would be written over each other; give it memory of its own",
                               (long long)strides[i], (long long)strides[k], i, k,
                               (unsigned long long)lengths[i], (unsigned long long)lengths[k]);
    return 0;
}

/* Several elements share bytes: only the packed layout has a meaning. */
static int must_be_packed(uint32_t dims, const uint64_t *lengths, const int64_t *given, const int64_t *packed,
                          struct err *e)
{
    for (uint32_t i = 0; i < dims; i++)
        if (lengths[i] > 1 && given[i] != packed[i])
            return err_set(
                e, ERR_INVALID,
                "stride %lld in dimension %u, expected %lld: a packed dtype must lie packed row-major",
                (long long)given[i], i, (long long)packed[i]);
    return 0;
}

int box_strides(enum dtype dtype, uint32_t dims, const uint64_t *lengths, const int64_t *elements,
                bool writable, int64_t *bytes, struct err *e)
{
    int64_t packed[TENSOR_DIMS_MAX] = {0};
    memset(bytes, 0, dims * sizeof *bytes);
    if (dims == 0 || box_is_empty(dims, lengths))
        return 0;
    int rc = packed_strides(dims, lengths, packed, e);
    bool is_packed = all_zero(dims, elements);
    const int64_t *from = is_packed ? packed : elements;
    if (rc == 0 && writable && !is_packed)
        rc = no_sharing(dims, lengths, from, e);
    if (rc == 0 && dtype_pack(dtype) > 1 && !is_packed)
        rc = must_be_packed(dims, lengths, elements, packed, e);
    if (rc < 0)
        return rc;
    unsigned bits = dtype_bits(dtype);
    for (uint32_t i = 0; i < dims; i++) {
        int64_t n, reach;
        if (dtype_pack(dtype) > 1) {
            bytes[i] = i + 1 == dims ? 1 : packed[i] / 8 * bits + packed[i] % 8 * bits / 8;
            continue;
        }
        if (mul_overflows(from[i], (int64_t)(bits / 8), &n) ||
            mul_overflows(n, (int64_t)(lengths[i] - 1), &reach))
            return err_set(e, ERR_LIMIT, "stride %lld in dimension %u reaches beyond any memory",
                           (long long)from[i], i);
        bytes[i] = n;
    }
    return 0;
}

static uint64_t in_units(enum dtype dtype, uint64_t n);

int box_extent(enum dtype dtype, uint32_t dims, const uint64_t *lengths, const int64_t *strides, int64_t *low,
               int64_t *high, struct err *e)
{
    bool packs = dtype_pack(dtype) > 1, over = false;
    *low = 0;
    *high = packs ? 1 : dtype_bits(dtype) / 8;
    for (uint32_t i = 0; i < dims; i++) {
        uint64_t n = i + 1 == dims ? in_units(dtype, lengths[i]) : lengths[i];
        int64_t reach;
        over |= mul_overflows(strides[i], (int64_t)(n - 1), &reach);
        over |= reach < 0 ? add_overflows(*low, reach, low) : add_overflows(*high, reach, high);
    }
    return over ? err_set(e, ERR_LIMIT, "its strides reach beyond any memory") : 0;
}

/* ---- preparing ---- */

/* Elements of the last dimension as units: bytes where several elements share one. */
static uint64_t in_units(enum dtype dtype, uint64_t n)
{
    return dtype_pack(dtype) > 1 ? n / dtype_pack(dtype) * dtype_pack(dtype) * dtype_bits(dtype) / 8 : n;
}

struct axis {
    uint64_t length, begin, count;
    int64_t stride;
};

/* Drops dimensions of length 1 and merges those that lie one behind the other on both sides. */
static uint32_t merge(struct axis *a, uint32_t dims)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < dims; i++) {
        if (a[i].length == 1)
            continue;
        struct axis *outer = n > 0 ? &a[n - 1] : NULL;
        bool whole = a[i].begin == 0 && a[i].count == a[i].length;
        if (outer && whole && outer->stride == a[i].stride * (int64_t)a[i].length) {
            outer->length *= a[i].length;
            outer->begin *= a[i].length;
            outer->count *= a[i].length;
            outer->stride = a[i].stride;
        } else {
            a[n++] = a[i];
        }
    }
    if (n == 0)
        a[n++] = (struct axis){.length = 1, .count = 1};
    return n;
}

void box_copy_init(struct box_copy *b, enum dtype dtype, uint32_t dims, const uint64_t *lengths,
                   const uint64_t *begin, const uint64_t *count, const int64_t *strides, void *memory)
{
    struct axis a[TENSOR_DIMS_MAX + 1];
    check(dims <= TENSOR_DIMS_MAX);
    uint32_t unit = dtype_pack(dtype) > 1 ? 1 : dtype_bits(dtype) / 8;
    for (uint32_t i = 0; i < dims; i++) {
        bool last = i + 1 == dims;
        check(count[i] > 0 && begin[i] < lengths[i] && count[i] <= lengths[i] - begin[i]);
        a[i] = (struct axis){.length = last ? in_units(dtype, lengths[i]) : lengths[i],
                             .begin = last ? in_units(dtype, begin[i]) : begin[i],
                             .count = last ? in_units(dtype, count[i]) : count[i],
                             .stride = strides[i]};
    }
    dims = merge(a, dims);
    struct axis *inner = &a[dims - 1];
    if (inner->stride == (int64_t)unit ||
        inner->length == 1) { /* dense: bytes, so that runs are copied at once */
        inner->length *= unit;
        inner->begin *= unit;
        inner->count *= unit;
        inner->stride = 1;
        unit = 1;
    }
    *b = (struct box_copy){.dims = dims, .unit = unit, .memory = memory};
    uint64_t pitch = 1;
    for (uint32_t i = dims; i-- > 0;) {
        b->begin[i] = a[i].begin;
        b->end[i] = a[i].begin + a[i].count;
        b->strides[i] = a[i].stride;
        b->pitch[i] = pitch;
        pitch *= a[i].length;
    }
}

uint8_t *box_straight(const struct box_copy *b, uint64_t offset, uint64_t n)
{
    bool straight = b->dims == 1 && b->unit == 1 && b->strides[0] == 1;
    if (!straight || offset < b->begin[0] || offset > b->end[0] || n > b->end[0] - offset)
        return NULL;
    return b->memory + (offset - b->begin[0]);
}

/* ---- walking ---- */

/* The next place behind x in dimension i, with carry; all inner ones begin anew. False: the region ends. */
static bool carry(const struct box_copy *b, uint64_t *x, uint32_t i)
{
    do {
        if (i == 0)
            return false;
        x[--i]++;
    } while (x[i] >= b->end[i]);
    for (uint32_t j = i + 1; j < b->dims; j++)
        x[j] = b->begin[j];
    return true;
}

/* x: the first place of the region whose packed unit is not before `at`. False: there is none. */
static bool seek(const struct box_copy *b, uint64_t at, uint64_t *x)
{
    for (uint32_t i = 0; i < b->dims; i++) {
        x[i] = at / b->pitch[i];
        at %= b->pitch[i];
    }
    for (uint32_t i = 0; i < b->dims; i++) {
        if (x[i] >= b->end[i])
            return carry(b, x, i);
        if (x[i] < b->begin[i]) {
            for (; i < b->dims; i++)
                x[i] = b->begin[i];
            return true;
        }
    }
    return true;
}

static uint64_t packed_unit(const struct box_copy *b, const uint64_t *x)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < b->dims; i++)
        at += x[i] * b->pitch[i];
    return at;
}

static uint8_t *memory_of(const struct box_copy *b, const uint64_t *x)
{
    uint8_t *p = b->memory;
    for (uint32_t i = 0; i < b->dims; i++)
        p += (int64_t)(x[i] - b->begin[i]) * b->strides[i];
    return p;
}

#define STRIDED(size)                                                                   \
    case size:                                                                          \
        for (uint64_t i = 0; i < n; i++)                                                \
            memcpy(to + (int64_t)i * to_stride, from + (int64_t)i * from_stride, size); \
        break

static void copy_units(uint8_t *to, int64_t to_stride, const uint8_t *from, int64_t from_stride,
                       uint32_t unit, uint64_t n)
{
    if (to_stride == (int64_t)unit && from_stride == (int64_t)unit) {
        memcpy(to, from, n * unit);
        return;
    }
    switch (unit) {
        STRIDED(1);
        STRIDED(2);
        STRIDED(4);
        STRIDED(8);
        STRIDED(16);
    default: check(!"a unit of 1, 2, 4, 8 or 16 bytes");
    }
}

/* Exactly one of in and out is set. */
static void copy_range(const struct box_copy *b, uint64_t offset, size_t n, uint8_t *out, const uint8_t *in)
{
    check(offset % b->unit == 0 && n % b->unit == 0);
    uint64_t x[TENSOR_DIMS_MAX], first = offset / b->unit, last = first + n / b->unit;
    uint32_t k = b->dims - 1;
    bool more = seek(b, first, x);
    while (more) {
        uint64_t at = packed_unit(b, x);
        if (at >= last)
            return;
        uint64_t run = b->end[k] - x[k];
        run = run < last - at ? run : last - at;
        size_t packed = (size_t)(at - first) * b->unit;
        if (out)
            copy_units(out + packed, b->unit, memory_of(b, x), b->strides[k], b->unit, run);
        else
            copy_units(memory_of(b, x), b->strides[k], in + packed, b->unit, b->unit, run);
        more = carry(b, x, k);
    }
}

void box_gather(const struct box_copy *b, uint64_t offset, size_t n, uint8_t *out)
{
    copy_range(b, offset, n, out, NULL);
}

void box_scatter(const struct box_copy *b, uint64_t offset, size_t n, const uint8_t *in)
{
    copy_range(b, offset, n, NULL, in);
}

/* How often `span` units, `pitch` apart, fit into what is left; at most `most`. */
static uint64_t fits(uint64_t left, uint64_t span, uint64_t pitch, uint64_t most)
{
    uint64_t n = left < span ? 0 : (left - span) / pitch + 1;
    return n < most ? n : most;
}

static void add_level(const struct box_copy *b, struct box_strip *s, uint32_t i, uint64_t count)
{
    s->level[s->levels].count = count;
    s->level[s->levels].stride = b->strides[i];
    s->level[s->levels++].pitch = (size_t)b->pitch[i] * b->unit;
}

/* The largest strip that begins at x: whole slices of rows, else whole rows, else a piece of one row. x moves
 * to the strip's last row, or slice. Returns the dimension to go on behind. */
static uint32_t widest(const struct box_copy *b, uint64_t *x, uint64_t left, struct box_strip *s)
{
    uint32_t k = b->dims - 1, behind = k;
    uint64_t run = b->end[k] - x[k];
    bool begins = x[k] == b->begin[k];
    uint64_t rows = k >= 1 && begins ? fits(left, run, b->pitch[k - 1], b->end[k - 1] - x[k - 1]) : 0;
    if (rows > 0 && k >= 2 && x[k - 1] == b->begin[k - 1]) {
        uint64_t all = b->end[k - 1] - b->begin[k - 1], span = (all - 1) * b->pitch[k - 1] + run;
        uint64_t slices = fits(left, span, b->pitch[k - 2], b->end[k - 2] - x[k - 2]);
        if (slices > 0) {
            add_level(b, s, k - 2, slices);
            x[k - 2] += slices - 1;
            rows = all;
            behind = k - 1;
        }
    }
    if (rows > 0)
        add_level(b, s, k - 1, rows);
    if (rows > 0 && behind == k)
        x[k - 1] += rows - 1;
    run = run < left ? run : left;
    if (b->strides[k] != (int64_t)b->unit)
        add_level(b, s, k, run);
    s->row_bytes = (size_t)(b->strides[k] == (int64_t)b->unit ? run * b->unit : b->unit);
    return behind;
}

int box_walk(const struct box_copy *b, uint64_t offset, size_t n,
             int (*strip)(void *arg, const struct box_strip *s), void *arg)
{
    check(offset % b->unit == 0 && n % b->unit == 0);
    uint64_t x[TENSOR_DIMS_MAX], first = offset / b->unit, last = first + n / b->unit;
    int rc = 0;
    for (bool more = seek(b, first, x); more && rc == 0;) {
        uint64_t at = packed_unit(b, x);
        if (at >= last)
            break;
        struct box_strip s = {.memory = memory_of(b, x), .packed = (size_t)(at - first) * b->unit};
        uint32_t behind = widest(b, x, last - at, &s);
        rc = strip(arg, &s);
        more = carry(b, x, behind);
    }
    return rc;
}

bool box_touches(const struct box_copy *b, uint64_t offset, uint64_t n)
{
    uint64_t x[TENSOR_DIMS_MAX];
    return n > 0 && seek(b, offset / b->unit, x) && packed_unit(b, x) * b->unit < offset + n;
}

/* ---- sets of boxes ---- */

bool box_meet(uint32_t dims, const uint64_t *a_offsets, const uint64_t *a_lengths, const uint64_t *b_offsets,
              const uint64_t *b_lengths, uint64_t *offsets, uint64_t *lengths)
{
    for (uint32_t i = 0; i < dims; i++) {
        uint64_t a_end = a_offsets[i] + a_lengths[i], b_end = b_offsets[i] + b_lengths[i];
        uint64_t from = a_offsets[i] > b_offsets[i] ? a_offsets[i] : b_offsets[i];
        uint64_t to = a_end < b_end ? a_end : b_end;
        if (from >= to)
            return false;
        offsets[i] = from;
        lengths[i] = to - from;
    }
    return true;
}

int box_set_add(struct box_set *s, const struct box *b)
{
    if (s->count == s->cap) {
        size_t cap = s->cap ? 2 * s->cap : 8;
        struct box *boxes = reallocarray(s->boxes, cap, sizeof *boxes);
        if (!boxes)
            return -ENOMEM;
        s->boxes = boxes;
        s->cap = cap;
    }
    s->boxes[s->count++] = *b;
    return 0;
}

/* What is left of a outside its part `in`: before and behind it in each dimension, inner dimensions narrowed
 * as we go, so that the pieces are disjoint. */
static int add_rest(struct box_set *s, uint32_t dims, struct box a, const struct box *in)
{
    for (uint32_t i = 0; i < dims; i++) {
        struct box piece = a;
        piece.lengths[i] = in->offsets[i] - a.offsets[i];
        if (piece.lengths[i] > 0 && box_set_add(s, &piece) < 0)
            return -ENOMEM;
        piece.offsets[i] = in->offsets[i] + in->lengths[i];
        piece.lengths[i] = a.offsets[i] + a.lengths[i] - piece.offsets[i];
        if (piece.lengths[i] > 0 && box_set_add(s, &piece) < 0)
            return -ENOMEM;
        a.offsets[i] = in->offsets[i];
        a.lengths[i] = in->lengths[i];
    }
    return 0;
}

int box_set_cut(struct box_set *s, uint32_t dims, const struct box *cut, struct box_set *taken)
{
    for (size_t i = 0; i < s->count;) {
        struct box a = s->boxes[i], in = {0};
        if (!box_meet(dims, a.offsets, a.lengths, cut->offsets, cut->lengths, in.offsets, in.lengths)) {
            i++;
            continue;
        }
        if (box_set_add(taken, &in) < 0)
            return -ENOMEM;
        s->boxes[i] = s->boxes[--s->count]; /* the pieces come behind, and do not meet the cut */
        if (add_rest(s, dims, a, &in) < 0)
            return -ENOMEM;
    }
    return 0;
}

void box_set_free(struct box_set *s)
{
    free(s->boxes);
    *s = (struct box_set){0};
}

char *box_text(char *text, size_t size, uint32_t dims, const uint64_t *offsets, const uint64_t *lengths)
{
    size_t n = (size_t)snprintf(text, size, "[");
    for (uint32_t i = 0; i < dims && n < size; i++)
        n += (size_t)snprintf(text + n, size - n, "%s%llu:%llu", i ? ", " : "",
                              (unsigned long long)offsets[i], (unsigned long long)(offsets[i] + lengths[i]));
    if (n < size)
        snprintf(text + n, size - n, "]");
    return text;
}
