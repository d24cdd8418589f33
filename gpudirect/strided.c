/* SPDX-License-Identifier: Apache-2.0 */
#include "gpudirect/strided.h"

#include <string.h>

#include "format/base/err.h"

static void set_pitch(struct strided *s, uint32_t i, uint64_t pitch)
{
    s->pitch[i] = pitch;
    s->inverse[i] = UINT64_MAX / pitch;
}

/* Everything in bytes: elements wider than one get a dimension of their own. */
void strided_init(struct strided *s, uint32_t dims, uint32_t unit, const uint64_t *begin, const uint64_t *end,
                  const uint64_t *pitch, const int64_t *stride)
{
    check(dims > 0 && dims < STRIDED_DIMS_MAX);
    check(unit > 0 && unit <= STRIDED_UNIT_MAX && (unit & (unit - 1)) == 0);
    memset(s, 0, sizeof *s);
    s->dims = dims;
    s->unit = 1;
    for (uint32_t i = 0; i < dims; i++) {
        s->begin[i] = begin[i];
        s->end[i] = end[i];
        s->stride[i] = stride[i];
        set_pitch(s, i, pitch[i] * unit);
    }
    if (unit == 1)
        return;
    s->end[dims] = unit;
    s->stride[dims] = 1;
    set_pitch(s, dims, 1);
    s->dims++;
}

/* The widest unit that divides everything that is added to an address, and the edges of the innermost rows.
 */
static uint32_t widest(const struct strided *s, uint64_t offset, uint64_t n, const void *memory,
                       const void *packed)
{
    uint32_t last = s->dims - 1;
    uint64_t all =
        offset | n | (uintptr_t)memory | (uintptr_t)packed | s->begin[last] | s->end[last] | STRIDED_UNIT_MAX;
    for (uint32_t i = 0; i < last; i++)
        all |= (uint64_t)s->stride[i] | s->pitch[i];
    return s->stride[last] == 1 ? (uint32_t)(all & -all) : 1;
}

void strided_job_init(struct strided_job *j, const struct strided *s, uint64_t offset, uint64_t n,
                      void *memory, void *packed)
{
    uint32_t unit = widest(s, offset, n, memory, packed), last = s->dims - 1;
    *j = (struct strided_job){
        .box = *s, .first = offset / unit, .count = n / unit, .memory = memory, .packed = packed};
    if (unit == 1)
        return;
    j->box.unit = unit;
    j->box.begin[last] /= unit;
    j->box.end[last] /= unit;
    j->box.stride[last] = unit;
    for (uint32_t i = 0; i < last; i++)
        set_pitch(&j->box, i, s->pitch[i] / unit);
}
