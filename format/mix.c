/* SPDX-License-Identifier: Apache-2.0 */
#include "format/mix.h"

#include <inttypes.h>
#include <stdlib.h>

#include "format/base/cursor.h"

#define GOLDEN 0x9e3779b97f4a7c15ull

struct source {
    struct order *order;
    uint32_t *shards; /* by place in the order; NULL: as they stand */
};

struct mix {
    uint32_t count;
    uint64_t key;
    uint64_t samples;
    struct source sources[MIX_DATASETS_MAX];
    uint64_t before[MIX_DATASETS_MAX + 1]; /* sums of weights */
};

static int check_source(const struct mix_source *s, uint32_t chosen, uint64_t samples, struct err *e)
{
    if (s->weight == 0)
        return err_set(e, ERR_INVALID,
                       "dataset \"%s\" has weight 0 in its mix: give at least 1, or leave it out", s->name);
    if (chosen == 0 && s->shards > 0)
        return err_set(e, ERR_INVALID,
                       "dataset \"%s\": none of its %u shards is chosen; look at their names with "
                       "larder dataset ls",
                       s->name, s->shards);
    if (samples == 0)
        return err_set(e, ERR_INVALID, "dataset \"%s\" has no samples in its %u shards: nothing to feed",
                       s->name, chosen);
    return 0;
}

/* The chosen shards and their counts, one behind the other. counts and shards have room for all. */
static int gather(const struct mix_source *s, uint64_t *counts, uint32_t *shards, uint32_t *chosen,
                  struct err *e)
{
    uint64_t samples = 0;
    *chosen = 0;
    for (uint32_t i = 0; i < s->shards; i++) {
        if (s->chosen && !s->chosen[i])
            continue;
        shards[*chosen] = i;
        counts[(*chosen)++] = s->samples_per_shard[i];
        if (add_overflows(samples, s->samples_per_shard[i], &samples))
            return err_set(e, ERR_LIMIT, "dataset \"%s\": its sample counts add up to more than 64 bits",
                           s->name);
    }
    return check_source(s, *chosen, samples, e);
}

static int source_create(struct source *out, const struct mix_source *s, uint64_t seed,
                         uint32_t window_shards, struct err *e)
{
    uint64_t *counts = malloc((s->shards + 1ull) * sizeof *counts);
    uint32_t chosen = 0;
    out->shards = malloc((s->shards + 1ull) * sizeof *out->shards);
    int rc = counts && out->shards
                 ? 0
                 : err_set(e, ERR_NO_MEMORY, "no memory for a table of %u shards", s->shards);
    if (rc == 0)
        rc = gather(s, counts, out->shards, &chosen, e);
    if (rc == 0)
        rc = order_create(counts, chosen, seed, window_shards, &out->order, e);
    free(counts);
    if (chosen == s->shards) {
        free(out->shards);
        out->shards = NULL;
    }
    return rc;
}

int mix_create(const struct mix_source *sources, uint32_t count, uint64_t seed, uint32_t window_shards,
               struct mix **out, struct err *e)
{
    if (count == 0 || count > MIX_DATASETS_MAX)
        return err_set(e, ERR_INVALID, "a mix of %u datasets: 1 to %u are possible", count, MIX_DATASETS_MAX);
    struct mix *m = calloc(1, sizeof *m);
    if (!m)
        return err_set(e, ERR_NO_MEMORY, "no memory for a mix of datasets");
    m->count = count;
    m->key = order_mix(seed + GOLDEN);
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        uint64_t own = count == 1 ? seed : order_mix(seed + (i + 1ull) * GOLDEN);
        m->before[i + 1] = m->before[i] + sources[i].weight;
        rc = source_create(&m->sources[i], &sources[i], own, window_shards, e);
        if (rc == 0 && add_overflows(m->samples, order_samples(m->sources[i].order), &m->samples))
            rc = err_set(e, ERR_LIMIT, "the datasets of a mix hold more samples than 64 bits can count");
    }
    if (rc < 0) {
        mix_free(m);
        return rc;
    }
    *out = m;
    return 0;
}

void mix_free(struct mix *m)
{
    if (!m)
        return;
    for (uint32_t i = 0; i < m->count; i++) {
        order_free(m->sources[i].order);
        free(m->sources[i].shards);
    }
    free(m);
}

uint64_t mix_samples(const struct mix *m)
{
    return m->samples;
}

/* How many of the first n positions go to the left half of a node. */
static uint64_t left_of(unsigned __int128 n, uint64_t left, uint64_t all, uint64_t shift)
{
    return (uint64_t)((n * left + shift) / all);
}

/* *index: which of the source's samples, counted over its epochs. */
static uint32_t source_at(const struct mix *m, uint64_t position, uint64_t *index)
{
    uint32_t low = 0, high = m->count;
    uint64_t n = position;
    for (uint64_t node = 1; high - low > 1;) {
        uint32_t middle = low + (high - low) / 2;
        uint64_t all = m->before[high] - m->before[low], left = m->before[middle] - m->before[low];
        uint64_t shift = order_mix(m->key + node * GOLDEN) % all;
        uint64_t before = left_of(n, left, all, shift);
        bool goes_left = left_of((unsigned __int128)n + 1, left, all, shift) > before;
        n = goes_left ? before : n - before;
        node = 2 * node + !goes_left;
        *(goes_left ? &high : &low) = middle;
    }
    *index = n;
    return low;
}

static struct mix_place place_in(const struct mix *m, uint32_t source, struct order_place at)
{
    const struct source *s = &m->sources[source];
    if (s->shards)
        at.shard = s->shards[at.shard];
    return (struct mix_place){source, at};
}

struct mix_place mix_at(struct mix *m, uint64_t position)
{
    uint64_t index;
    uint32_t source = source_at(m, position, &index);
    return place_in(m, source, order_at(m->sources[source].order, index));
}

bool mix_substitute(struct mix *m, uint64_t position, uint32_t attempt, struct mix_place *out)
{
    uint64_t index;
    uint32_t source = source_at(m, position, &index);
    struct order_place at;
    if (!order_substitute(m->sources[source].order, index, attempt, &at))
        return false;
    *out = place_in(m, source, at);
    return true;
}
