/* SPDX-License-Identifier: Apache-2.0 */
#include "format/columns.h"

#include <stdlib.h>
#include <string.h>

#define SAMPLES_PER_PLACE 16u

static int too_large(struct err *e)
{
    return err_set(e, ERR_CORRUPT, "samples that together have more bytes than 64 bits count");
}

int columns_init(struct columns *c, const struct column *columns, uint32_t count, uint32_t unit,
                 uint64_t head, uint64_t base, struct err *e)
{
    *c = (struct columns){.unit = unit, .base = base, .end = base, .head = head, .fixed = head};
    c->columns = calloc(count, sizeof *c->columns);
    if (!c->columns)
        return err_set(e, ERR_NO_MEMORY, "no memory for %u columns", count);
    for (; c->count < count; c->count++) {
        struct column *to = &c->columns[c->count];
        *to = (struct column){.name = strdup(columns[c->count].name),
                              .type = strdup(columns[c->count].type),
                              .bytes = columns[c->count].bytes};
        c->variable += to->bytes == COLUMN_VARIABLE;
        bool over = to->bytes != COLUMN_VARIABLE && add_overflows(c->fixed, to->bytes, &c->fixed);
        if (!to->name || !to->type || over) {
            c->count++;
            columns_free(c);
            return over ? too_large(e) : err_set(e, ERR_NO_MEMORY, "no memory for %u columns", count);
        }
    }
    return 0;
}

void columns_free(struct columns *c)
{
    for (uint32_t i = 0; i < c->count; i++) {
        free(c->columns[i].name);
        free(c->columns[i].type);
    }
    free(c->columns);
    buf_free(&c->sizes);
    buf_free(&c->places);
    *c = (struct columns){0};
}

int columns_add(struct columns *c, const uint32_t *sizes, struct err *e)
{
    uint64_t bytes = c->fixed;
    for (uint32_t i = 0; i < c->variable; i++)
        if (add_overflows(bytes, (uint64_t)sizes[i] * c->unit, &bytes))
            return too_large(e);
    if (c->variable && c->samples % SAMPLES_PER_PLACE == 0)
        buf_put(&c->places, &c->end, sizeof c->end);
    buf_put(&c->sizes, sizes, c->variable * sizeof *sizes);
    if (add_overflows(c->end, bytes, &c->end))
        return too_large(e);
    c->samples++;
    return c->places.failed ? buf_end(&c->places, "a sample index", e)
                            : buf_end(&c->sizes, "a sample index", e);
}

int columns_add_fixed(struct columns *c, uint64_t samples, struct err *e)
{
    uint64_t bytes;
    check(c->variable == 0);
    if (mul_overflows(samples, c->fixed, &bytes) || add_overflows(c->end, bytes, &c->end))
        return too_large(e);
    c->samples += samples;
    return 0;
}

uint32_t columns_size(const struct columns *c, uint64_t sample, uint32_t i)
{
    uint32_t size;
    memcpy(&size, c->sizes.p + (sample * c->variable + i) * sizeof size, sizeof size);
    return size;
}

static uint64_t begin_of(const struct columns *c, uint64_t sample)
{
    uint64_t at;
    if (c->variable == 0)
        return c->base + sample * c->fixed;
    memcpy(&at, c->places.p + sample / SAMPLES_PER_PLACE * sizeof at, sizeof at);
    for (uint64_t i = sample / SAMPLES_PER_PLACE * SAMPLES_PER_PLACE; i < sample; i++) {
        at += c->fixed;
        for (uint32_t k = 0; k < c->variable; k++)
            at += (uint64_t)columns_size(c, i, k) * c->unit;
    }
    return at;
}

struct column_place columns_at(const struct columns *c, uint64_t sample, uint32_t column)
{
    check(sample < c->samples && column < c->count);
    struct column_place p = {.offset = begin_of(c, sample) + c->head};
    uint32_t size = 0;
    for (uint32_t i = 0;; i++) {
        bool varies = c->columns[i].bytes == COLUMN_VARIABLE;
        p.bytes = varies ? (uint64_t)columns_size(c, sample, size++) * c->unit : c->columns[i].bytes;
        if (i == column)
            return p;
        p.offset += p.bytes;
    }
}
