/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The keyed permutation is a balanced Feistel network over the smallest power of four that holds n and is at
 * least 256, walked until it falls below n (J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains",
 * 2002): less than four steps on average for n > 64, 256 / n below. Smaller networks favour some permutations
 * of a few elements, such as a handful of shards. It is no cipher: its aim is even spread, the same on every
 * machine. Constants and worked values are in FORMAT.md.
 */
#include "format/order.h"

#include <stdlib.h>
#include <string.h>

#include "format/base/cursor.h"

#define GOLDEN            0x9e3779b97f4a7c15ull
#define ROUNDS            8u
#define HALF_BITS_MIN     4u
#define SUBSTITUTE_WINDOW 8u /* in shards, for sequential orders */

struct order {
    uint64_t *counts; /* per shard */
    uint32_t shards;
    uint32_t window_shards;
    uint64_t seed;
    uint64_t samples;
    uint64_t epoch;     /* of the two tables below */
    uint32_t *permuted; /* shard at each place of the epoch */
    uint64_t *before;   /* samples before each place; shards + 1 of them */
};

uint64_t order_mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

struct feistel {
    unsigned half; /* bits of each half */
    uint64_t keys[ROUNDS];
};

static struct feistel feistel_of(uint64_t n, uint64_t key)
{
    struct feistel f = {.half = HALF_BITS_MIN};
    while (f.half < 32 && n > 1ull << 2 * f.half)
        f.half++;
    for (unsigned i = 0; i < ROUNDS; i++)
        f.keys[i] = order_mix(key + (i + 1) * GOLDEN);
    return f;
}

static uint64_t feistel_step(const struct feistel *f, uint64_t x)
{
    uint64_t left = x >> f->half, right = x & ((1ull << f->half) - 1);
    for (unsigned i = 0; i < ROUNDS; i++) {
        uint64_t next = left ^ order_mix(right ^ f->keys[i]) >> (64 - f->half);
        left = right;
        right = next;
    }
    return left << f->half | right;
}

uint64_t order_permute(uint64_t n, uint64_t key, uint64_t x)
{
    check(x < n);
    if (n == 1)
        return 0;
    struct feistel f = feistel_of(n, key);
    do
        x = feistel_step(&f, x);
    while (x >= n);
    return x;
}

/* Stream 0 orders the shards of an epoch, stream 1 + w the samples of window w, stream 2^64 - 1 - w what
 * stands in for damaged ones of it. */
static uint64_t stream_key(const struct order *o, uint64_t stream)
{
    return order_mix(order_mix(order_mix(o->seed + GOLDEN) ^ o->epoch) + (stream + 1) * GOLDEN);
}

static void tables_fill(struct order *o)
{
    uint64_t key = stream_key(o, 0), sum = 0;
    for (uint32_t i = 0; i < o->shards; i++) {
        o->permuted[i] = o->window_shards == 0 ? i : (uint32_t)order_permute(o->shards, key, i);
        o->before[i] = sum;
        sum += o->counts[o->permuted[i]];
    }
    o->before[o->shards] = sum;
}

int order_create(const uint64_t *samples_per_shard, uint32_t shards, uint64_t seed, uint32_t window_shards,
                 struct order **out, struct err *e)
{
    uint64_t samples = 0;
    for (uint32_t i = 0; i < shards; i++)
        if (add_overflows(samples, samples_per_shard[i], &samples))
            return err_set(e, ERR_LIMIT, "the shards hold more samples than 64 bits can count");
    if (samples == 0)
        return err_set(e, ERR_INVALID, "none of the %u shards holds a sample; there is nothing to read",
                       shards);
    struct order *o = calloc(1, sizeof *o);
    if (o) {
        o->counts = malloc(shards * sizeof *o->counts);
        o->permuted = malloc(shards * sizeof *o->permuted);
        o->before = malloc((shards + 1ull) * sizeof *o->before);
    }
    if (!o || !o->counts || !o->permuted || !o->before) {
        order_free(o);
        return err_set(e, ERR_NO_MEMORY, "no memory for a table of %u shards", shards);
    }
    memcpy(o->counts, samples_per_shard, shards * sizeof *o->counts);
    o->shards = shards;
    o->window_shards = window_shards;
    o->seed = seed;
    o->samples = samples;
    tables_fill(o);
    *out = o;
    return 0;
}

void order_free(struct order *o)
{
    if (!o)
        return;
    free(o->counts);
    free(o->permuted);
    free(o->before);
    free(o);
}

uint64_t order_samples(const struct order *o)
{
    return o->samples;
}

/* The place whose shard holds the epoch's x-th sample: the last with before[] <= x. Empty shards share their
 * before[] with the next place, and are never the last. */
static uint32_t place_of(const struct order *o, uint64_t x)
{
    uint32_t low = 0, high = o->shards;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (o->before[middle] <= x)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void seek_epoch(struct order *o, uint64_t epoch)
{
    if (epoch == o->epoch)
        return;
    o->epoch = epoch;
    if (o->window_shards > 0)
        tables_fill(o);
}

static struct order_place sample_at(const struct order *o, uint64_t x)
{
    uint32_t place = place_of(o, x);
    return (struct order_place){.shard = o->permuted[place], .sample = x - o->before[place]};
}

/* Samples [begin, begin + size) of the epoch are shuffled among themselves. */
struct window {
    uint32_t number;
    uint64_t begin, size;
};

static struct window window_at(const struct order *o, uint64_t x, uint32_t width)
{
    uint32_t number = place_of(o, x) / width, first = number * width;
    uint32_t end = o->shards - first > width ? first + width : o->shards;
    return (struct window){number, o->before[first], o->before[end] - o->before[first]};
}

struct order_place order_at(struct order *o, uint64_t position)
{
    uint64_t x = position % o->samples;
    seek_epoch(o, position / o->samples);
    if (o->window_shards > 0) {
        struct window w = window_at(o, x, o->window_shards);
        x = w.begin + order_permute(w.size, stream_key(o, 1ull + w.number), x - w.begin);
    }
    return sample_at(o, x);
}

bool order_substitute(struct order *o, uint64_t position, uint32_t attempt, struct order_place *out)
{
    uint64_t x = position % o->samples;
    seek_epoch(o, position / o->samples);
    struct window w = window_at(o, x, o->window_shards ? o->window_shards : SUBSTITUTE_WINDOW);
    if (attempt >= w.size)
        return false;
    uint64_t from = (x - w.begin + 1 + attempt) % w.size;
    *out = sample_at(o, w.begin + order_permute(w.size, stream_key(o, ~(uint64_t)w.number), from));
    return true;
}
