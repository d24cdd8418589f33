/* SPDX-License-Identifier: Apache-2.0 */
#include "client/names.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/hash.h"

#define BLOCK_SIZE (256u << 10)

struct names_block {
    struct names_block *next;
    size_t used, size;
    uint64_t memory[];
};

void *names_alloc(struct names *s, size_t n)
{
    n = (n + 7) / 8 * 8;
    struct names_block *b = s->blocks;
    if (!b || b->size - b->used < n) {
        size_t size = n > BLOCK_SIZE ? n : BLOCK_SIZE;
        b = malloc(sizeof *b + size);
        if (!b)
            return NULL;
        *b = (struct names_block){.next = s->blocks, .size = size};
        s->blocks = b;
    }
    void *p = (uint8_t *)b->memory + b->used;
    b->used += n;
    return p;
}

/* The slot that holds the name, or the free one where it would go. */
static size_t slot_of(const struct names *s, struct slice name)
{
    size_t mask = s->slot_count - 1, i = (size_t)hash64(name.p, name.n) & mask;
    while (s->slots[i].p && !slice_eq(s->slots[i], name))
        i = (i + 1) & mask;
    return i;
}

static int grow(struct names *s)
{
    size_t n = s->slot_count ? 2 * s->slot_count : 64;
    struct names bigger = {
        .slots = calloc(n, sizeof *s->slots), .values = calloc(n, sizeof *s->values), .slot_count = n};
    if (!bigger.slots || !bigger.values) {
        free(bigger.slots);
        free(bigger.values);
        return -ENOMEM;
    }
    for (size_t i = 0; i < s->slot_count; i++) {
        if (!s->slots[i].p)
            continue;
        size_t to = slot_of(&bigger, s->slots[i]);
        bigger.slots[to] = s->slots[i];
        bigger.values[to] = s->values[i];
    }
    free(s->slots);
    free(s->values);
    s->slots = bigger.slots;
    s->values = bigger.values;
    s->slot_count = n;
    return 0;
}

int names_add(struct names *s, struct slice name, uint32_t value, struct slice *kept)
{
    if (2 * (s->count + 1) > s->slot_count && grow(s) < 0)
        return -ENOMEM;
    size_t i = slot_of(s, name);
    if (s->slots[i].p) {
        *kept = s->slots[i];
        return -EEXIST;
    }
    uint8_t *copy = names_alloc(s, name.n + 1);
    if (!copy)
        return -ENOMEM;
    if (name.n > 0)
        memcpy(copy, name.p, name.n);
    copy[name.n] = 0;
    s->slots[i] = *kept = SLICE(copy, name.n);
    s->values[i] = value;
    s->count++;
    return 0;
}

int names_find(const struct names *s, struct slice name, uint32_t *value)
{
    if (s->count == 0)
        return -ENOENT;
    size_t i = slot_of(s, name);
    if (!s->slots[i].p)
        return -ENOENT;
    *value = s->values[i];
    return 0;
}

void names_free(struct names *s)
{
    struct names_block *next;
    for (struct names_block *b = s->blocks; b; b = next) {
        next = b->next;
        free(b);
    }
    free(s->slots);
    free(s->values);
    *s = (struct names){0};
}
