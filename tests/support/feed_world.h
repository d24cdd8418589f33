/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What tests of the feed start from: a server in memory (shelf.h) that publishes tar shards whose every byte
 * is known, as "corpus"; a client of it; and damage where the test wants it.
 */
#ifndef LARDER_TESTS_FEED_WORLD_H
#define LARDER_TESTS_FEED_WORLD_H

#include <stdatomic.h>

#include "client/larder.h"
#include "format/order.h"
#include "tests/support/corpus.h"
#include "tests/support/shelf.h"

#define WORLD_BAD_MAX 4096u

struct feed_world {
    struct corpus corpus;
    struct shelf_file *files;
    struct shelf *shelf;
    struct larder *client;
    /* Reads of a byte here fail: shard << 40 | offset. */
    atomic_ullong bad[WORLD_BAD_MAX];
    atomic_uint bad_count;
    atomic_uint slow_ms; /* each read takes so long */
    atomic_bool hold;    /* reads stand still */
};

/* shards of up to 2 * samples samples each, see corpus.h. */
void world_make(struct feed_world *w, uint32_t shards, uint32_t samples, uint32_t field_bytes_max,
                unsigned reconnect_ms);
/* The same over shards that the test has put into w->corpus, which is freed with the world. */
void world_make_of(struct feed_world *w, unsigned reconnect_ms);
void world_end(struct feed_world *w);

/* From now on this byte of a shard cannot be read. Shards and bytes below 2^40. */
void world_damage(struct feed_world *w, uint32_t shard, uint64_t offset);
/* A byte of the sample's first field that has any: damages this sample and no other. False: it has none. */
bool world_damage_sample(struct feed_world *w, uint32_t shard, uint64_t number);

/* dataset "corpus", seed 99, window 3, global batch 12, 1 MiB. */
struct larder_feed_options world_options(void);
struct larder_feed *world_feed(struct feed_world *w, const struct larder_feed_options *o);
/* Opening fails with that class, and a text that has the word in it. */
void world_refuses(struct feed_world *w, struct larder_feed_options o, enum larder_class kind,
                   const char *word);

#endif
