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

struct named {
    struct slice name;
    uint32_t value;
};

static uint32_t tag_of(struct slice name)
{
    return (uint32_t)hash64(name.p, name.n);
}

/* The slot that holds the name, or the free one where it would go. Names are compared only where tags agree.
 */
static size_t slot_of(const struct names *s, struct slice name, uint32_t tag)
{
    size_t mask = s->slot_count - 1, i = tag & mask;
    while (s->slots[i] &&
           !(s->slots[i] >> 32 == tag && slice_eq(s->items[(uint32_t)s->slots[i] - 1].name, name)))
        i = (i + 1) & mask;
    return i;
}

static int grow_slots(struct names *s)
{
    size_t n = s->slot_count ? 2 * s->slot_count : 64;
    uint64_t *slots = calloc(n, sizeof *slots);
    if (!slots)
        return -ENOMEM;
    for (size_t i = 0; i < s->slot_count; i++) {
        size_t to = (size_t)(s->slots[i] >> 32) & (n - 1);
        if (!s->slots[i])
            continue;
        while (slots[to]) /* all names differ */
            to = (to + 1) & (n - 1);
        slots[to] = s->slots[i];
    }
    free(s->slots);
    s->slots = slots;
    s->slot_count = n;
    return 0;
}

static int grow_items(struct names *s)
{
    size_t cap = s->item_cap ? 2 * s->item_cap : 32;
    struct named *items = reallocarray(s->items, cap, sizeof *items);
    if (!items)
        return -ENOMEM;
    s->items = items;
    s->item_cap = cap;
    return 0;
}

int names_add(struct names *s, struct slice name, uint32_t value, struct slice *kept)
{
    if ((2 * (s->count + 1) > s->slot_count && grow_slots(s) < 0) ||
        (s->count == s->item_cap && grow_items(s) < 0) || s->count == UINT32_MAX)
        return -ENOMEM;
    uint32_t tag = tag_of(name);
    size_t i = slot_of(s, name, tag);
    if (s->slots[i]) {
        *kept = s->items[(uint32_t)s->slots[i] - 1].name;
        return -EEXIST;
    }
    uint8_t *copy = names_alloc(s, name.n + 1);
    if (!copy)
        return -ENOMEM;
    if (name.n > 0)
        memcpy(copy, name.p, name.n);
    copy[name.n] = 0;
    *kept = SLICE(copy, name.n);
    s->items[s->count++] = (struct named){.name = *kept, .value = value};
    s->slots[i] = (uint64_t)tag << 32 | s->count;
    return 0;
}

int names_find(const struct names *s, struct slice name, uint32_t *value)
{
    if (s->count == 0)
        return -ENOENT;
    size_t i = slot_of(s, name, tag_of(name));
    if (!s->slots[i])
        return -ENOENT;
    *value = s->items[(uint32_t)s->slots[i] - 1].value;
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
    free(s->items);
    *s = (struct names){0};
}
