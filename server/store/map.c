/* SPDX-License-Identifier: Apache-2.0 */
/* Open addressing with linear probing; removal moves the followers back, so no slot is ever wasted. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "server/store/internal.h"

static size_t place(const struct map *m, const struct id *key)
{
    uint64_t h = (le64_get(key->bytes) ^ m->seed) * 0x9e3779b97f4a7c15ull;
    h = (h ^ (h >> 32) ^ le64_get(key->bytes + 8)) * 0xd6e8feb86659fd93ull;
    return (size_t)(h ^ (h >> 29)) & (m->capacity - 1);
}

static size_t find(const struct map *m, const struct id *key)
{
    size_t at = place(m, key);
    while (m->slots[at].value && !id_equal(&m->slots[at].key, key))
        at = (at + 1) & (m->capacity - 1);
    return at;
}

void *map_get(const struct map *m, const struct id *key)
{
    return m->capacity ? m->slots[find(m, key)].value : NULL;
}

static int grow(struct map *m)
{
    struct map bigger = {.capacity = m->capacity ? 2 * m->capacity : 16, .count = m->count, .seed = m->seed};
    bigger.slots = calloc(bigger.capacity, sizeof *bigger.slots);
    if (!bigger.slots)
        return -ENOMEM;
    for (size_t i = 0; i < m->capacity; i++)
        if (m->slots[i].value)
            bigger.slots[find(&bigger, &m->slots[i].key)] = m->slots[i];
    free(m->slots);
    *m = bigger;
    return 0;
}

int map_reserve(struct map *m)
{
    return m->count + m->count / 2 >= m->capacity ? grow(m) : 0;
}

int map_put(struct map *m, const struct id *key, void *value)
{
    if (map_reserve(m) < 0)
        return -ENOMEM;
    struct map_slot *slot = &m->slots[find(m, key)];
    check(!slot->value && value);
    *slot = (struct map_slot){.key = *key, .value = value};
    m->count++;
    return 0;
}

void map_remove(struct map *m, const struct id *key)
{
    if (m->capacity == 0)
        return;
    size_t hole = find(m, key);
    if (!m->slots[hole].value)
        return;
    m->count--;
    size_t mask = m->capacity - 1;
    for (size_t at = (hole + 1) & mask; m->slots[at].value; at = (at + 1) & mask) {
        /* May the entry at `at` move to the hole? Only if its own place is not between the two. */
        if (((at - place(m, &m->slots[at].key)) & mask) >= ((at - hole) & mask)) {
            m->slots[hole] = m->slots[at];
            hole = at;
        }
    }
    m->slots[hole].value = NULL;
}

void map_free(struct map *m)
{
    free(m->slots);
    *m = (struct map){.seed = m->seed};
}

void *map_next(const struct map *m, size_t *at)
{
    while (*at < m->capacity) {
        void *value = m->slots[(*at)++].value;
        if (value)
            return value;
    }
    return NULL;
}
