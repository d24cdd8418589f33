/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Several datasets as one stream of samples, by weight. Pure like order.h, which it stands on: (weights,
 * seed, position) give the dataset and how many samples of it came before; that number is a position in the
 * dataset's own order, which so goes through epochs of its own.
 *
 * How positions are shared. The datasets, halved again and again, are the leaves of a binary tree. At a node
 * of weight W whose left half has weight L, the first n positions give floor((n × L + shift) / W) to the
 * left, with a keyed shift below W. So of any n positions in a row a dataset of weight w gets n × w / W of
 * them to within twice the depth of the tree, at most 12, whatever n is; and nothing is kept, however large
 * the weights are. FORMAT.md has it in full.
 *
 * One dataset alone is the order itself; its weight means nothing.
 */
#ifndef LARDER_MIX_H
#define LARDER_MIX_H

#include <stdbool.h>
#include <stdint.h>

#include "format/base/err.h"
#include "format/order.h"

#define MIX_DATASETS_MAX 64u

struct mix;

struct mix_source {
    const char *name; /* for errors */
    const uint64_t *samples_per_shard;
    const bool *chosen; /* by shard; the counts of the others are not looked at. NULL: all are */
    uint32_t shards;
    uint32_t weight; /* >= 1 */
};

struct mix_place {
    uint32_t source;
    struct order_place at; /* shard: index in the dataset version's own table */
};

/* ERR_INVALID, naming the dataset: no samples, no shard chosen, a weight of 0, more than MIX_DATASETS_MAX of
 * them. What sources point to is copied. */
must_check int mix_create(const struct mix_source *sources, uint32_t count, uint64_t seed,
                          uint32_t window_shards, struct mix **out, struct err *e);
void mix_free(struct mix *m);              /* NULL allowed */
uint64_t mix_samples(const struct mix *m); /* of all sources, in the chosen shards: an epoch of the mix */
/* Not thread-safe: see order_at. */
struct mix_place mix_at(struct mix *m, uint64_t position);
/* As order_substitute, in the same dataset. */
must_check bool mix_substitute(struct mix *m, uint64_t position, uint32_t attempt, struct mix_place *out);

#endif
