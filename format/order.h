/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The order of samples: a pure function of (dataset shape, seed, epoch, position), in constant memory beside
 * the shard table and constant time but for one binary search, the same on every machine.
 *
 * Shards are permuted for the epoch; consecutive permuted shards form windows of `window_shards`; within a
 * window all its samples are permuted. window_shards 0 means sequential: shards and samples as they stand.
 *
 * The keyed permutation of [0, n) is a Feistel network of 8 rounds over [0, 4^h), the least such range that
 * holds n with h >= 4, whose round function is the finalizer of SplitMix64 over the half and a round key;
 * values outside of [0, n) go through it again. FORMAT.md has it in full, with values to check against.
 */
#ifndef LARDER_ORDER_H
#define LARDER_ORDER_H

#include <stdbool.h>
#include <stdint.h>

#include "format/base/err.h"

struct order;

struct order_place {
    uint32_t shard;  /* index in the dataset version's shard table */
    uint64_t sample; /* within that shard */
};

/* samples_per_shard: one count per shard, copied. ERR_INVALID if all are zero. */
must_check int order_create(const uint64_t *samples_per_shard, uint32_t shards, uint64_t seed,
                            uint32_t window_shards, struct order **out, struct err *e);
void order_free(struct order *o);
uint64_t order_samples(const struct order *o);
/* Positions run over all epochs: epoch = position / samples. Recomputes the epoch's shard table when the
 * epoch changes (O(shards)); not thread-safe for that reason. */
struct order_place order_at(struct order *o, uint64_t position);

/* What stands in for a sample that cannot be read: the attempt-th of its window in another keyed order, which
 * begins behind the sample's own place, so that the same damage is replaced by the same samples on any number
 * of ranks. May be the sample itself. A sequential order counts windows of 8 shards. False: all of the window
 * were tried. */
must_check bool order_substitute(struct order *o, uint64_t position, uint32_t attempt,
                                 struct order_place *out);

/* The finalizer of SplitMix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014): spreads every bit of x over all. */
uint64_t order_mix(uint64_t x);

/* The keyed permutation itself, of [0, n): x < n gives a value < n; a bijection for every key. n >= 1. */
uint64_t order_permute(uint64_t n, uint64_t key, uint64_t x);

#endif
