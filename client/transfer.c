/* SPDX-License-Identifier: Apache-2.0 */
#include "client/transfer.h"

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

int transfer(struct memory_stream *s, enum memory_direction d, const struct box_copy *b, uint64_t offset,
             size_t n, uint8_t *packed, struct err *e)
{
    struct moving m = {.stream = s, .direction = d, .packed = packed, .e = e};
    return box_walk(b, offset, n, move_strip, &m);
}
