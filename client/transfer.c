/* SPDX-License-Identifier: Apache-2.0 */
#include "client/transfer.h"

#define COPIES_MAX  4u    /* of one transfer; more are for the packer */
#define ROW_BYTES   512u  /* rows that are shorter likewise: a copy engine takes about one step for each */
#define SMALL_BYTES 4096u /* not worth a kernel */

struct moving {
    struct memory_stream *stream;
    enum memory_direction direction;
    uint8_t *packed;
    struct err *e;
};

/* The levels from `first` on as one copy. False: the device cannot do it. */
static bool box_of(const struct moving *m, const struct box_strip *s, uint32_t first, struct memory_box *out)
{
    size_t stride[2] = {0}, pitch[2] = {0}, count[2] = {1, 1};
    uint32_t n = s->levels - first;
    if (n > 2)
        return false;
    for (uint32_t i = 0; i < n; i++) { /* the innermost level is rows */
        uint32_t level = s->levels - 1 - i;
        if (s->level[level].stride <= 0 && s->level[level].count > 1)
            return false;
        count[i] = (size_t)s->level[level].count;
        stride[i] = (size_t)s->level[level].stride;
        pitch[i] = s->level[level].pitch;
    }
    bool in = m->direction == MEMORY_IN;
    *out = (struct memory_box){.row_bytes = s->row_bytes,
                               .rows = count[0],
                               .slices = count[1],
                               .to_pitch = in ? stride[0] : pitch[0],
                               .to_slice = in ? stride[1] : pitch[1],
                               .from_pitch = in ? pitch[0] : stride[0],
                               .from_slice = in ? pitch[1] : stride[1]};
    return memory_box_fits(memory_stream_memory(m->stream), out);
}

static int move(const struct moving *m, const struct box_strip *s, uint32_t first, uint8_t *memory,
                uint8_t *packed)
{
    struct memory_box b;
    if (box_of(m, s, first, &b)) {
        b.to = m->direction == MEMORY_IN ? memory : packed;
        b.from = m->direction == MEMORY_IN ? packed : memory;
        return memory_copy_box(m->stream, m->direction, &b, m->e);
    }
    int rc = 0;
    for (uint64_t i = 0; rc == 0 && i < s->level[first].count; i++)
        rc = move(m, s, first + 1, memory + (int64_t)i * s->level[first].stride,
                  packed + i * s->level[first].pitch);
    return rc;
}

static int move_strip(void *arg, const struct box_strip *s)
{
    const struct moving *m = arg;
    return move(m, s, 0, s->memory, m->packed + s->packed);
}

struct survey {
    struct moving m;
    uint64_t copies;
};

/* Not 0: enough is seen, it is for the packer. */
static int look_at_strip(void *arg, const struct box_strip *s)
{
    struct survey *v = arg;
    struct memory_box b;
    uint64_t copies = 1;
    for (uint32_t first = 0; !box_of(&v->m, s, first, &b); first++)
        copies *= s->level[first].count;
    v->copies += copies;
    return v->copies > COPIES_MAX || (b.row_bytes < ROW_BYTES && b.rows * b.slices > 1);
}

static bool is_for_packer(const struct moving *m, const struct box_copy *b, uint64_t offset, size_t n)
{
    struct survey v = {.m = *m};
    return n > SMALL_BYTES && n <= CHUNK_PLAIN_BYTES_MAX && box_walk(b, offset, n, look_at_strip, &v) != 0;
}

int transfer(struct memory_stream *s, struct packer *p, enum memory_direction d, const struct box_copy *b,
             uint64_t offset, size_t n, uint8_t *packed, struct err *e)
{
    struct moving m = {.stream = s, .direction = d, .packed = packed, .e = e};
    if (p && is_for_packer(&m, b, offset, n) && packer_ready(p, memory_stream_memory(s)))
        return packer_move(p, s, d, b, offset, n, packed, e);
    return box_walk(b, offset, n, move_strip, &m);
}
