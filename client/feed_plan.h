/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a feed hands out, as arithmetic: which samples make up the next batch of a rank, where an epoch ends,
 * and the state that names a position. No memory of samples, no input or output, no clock.
 *
 * N is the number of samples in all chosen shards of all datasets; an epoch of a mix hands out so many, each
 * dataset going round at its own pace. With N samples and a global batch of B, an epoch is the positions [0,
 * N). A batch starts at the position p where the one before ended and takes [p, p + B); rank r of W takes the
 * r-th slice of B / W of it. When fewer than B are left, the epoch is over (drop), or they are filled up with
 * the epoch's first positions (pad). A position at an epoch's end and position 0 of the next are the same and
 * are always written as the latter.
 */
#ifndef LARDER_FEED_PLAN_H
#define LARDER_FEED_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "format/base/err.h"
#include "format/choice.h"
#include "format/mix.h"

#define FEED_STATE_BYTES 64

struct feed_plan_options {
    const struct mix_source *sources;
    uint32_t source_count;
    uint64_t seed;
    uint32_t window_shards; /* 0: sequential, as in order.h */
    uint32_t rank, world, global_batch;
    uint64_t epochs;
    bool pad;
};

struct feed_plan {
    struct mix *mix;
    uint64_t samples;
    uint32_t rank, world, global_batch;
    uint64_t epochs;
    bool pad;
    uint64_t epoch, position; /* of the batch that feed_plan_next gives next */
};

/* One batch of this rank: samples number 0 .. count - 1. */
struct feed_slice {
    uint64_t epoch, position; /* first of the global batch */
    uint64_t first;           /* first of this rank's slice, not yet wrapped at the epoch's end */
    uint32_t count;
    uint64_t next_epoch, next_position; /* where the batch after it starts: the state once it is handed out */
};

struct feed_place {
    uint64_t position; /* over all epochs: epoch * samples + place within it */
    struct mix_place at;
};

/* ERR_INVALID with the numbers: no samples, fewer than one global batch, a batch that the world does not
 * divide, a rank outside the world. */
must_check int feed_plan_init(struct feed_plan *p, const struct feed_plan_options *o, struct err *e);
void feed_plan_free(struct feed_plan *p);
/* Continues at a position that a state names. ERR_MISMATCH beyond the epoch's end. */
must_check int feed_plan_seek(struct feed_plan *p, uint64_t epoch, uint64_t position, struct err *e);
uint64_t feed_plan_batches(const struct feed_plan *p); /* of an epoch from its start */
/* The next batch, or false after the last epoch. */
bool feed_plan_next(struct feed_plan *p, struct feed_slice *out);
/* Sample i of a batch. Not thread-safe: the orders keep the tables of one epoch. */
struct feed_place feed_plan_place(struct feed_plan *p, const struct feed_slice *s, uint32_t i);
/* The attempt-th that may stand in for the sample at a position. False: there are no more. */
must_check bool feed_plan_substitute(struct feed_plan *p, uint64_t position, uint32_t attempt,
                                     struct mix_place *out);

/*
 * The state, 64 bytes, little-endian:
 *    0 u32 magic "LRDF"    4 u32 version, 1   8 u64 dataset   16 u64 dataset version   24 u64 seed
 *   32 u64 epoch          40 u64 position    48 u32 window   52 u32 choice            56 u64 XXH3-64 of the
 * first 56
 *
 * A mix has no room for its members there: dataset, version and choice are digests over all of them
 * (feed_state_of).
 */
struct feed_state {
    uint64_t dataset; /* which dataset: a hash that tells datasets apart */
    uint64_t version; /* its sequence, or a hash of what a published directory held */
    uint64_t seed;
    uint64_t epoch, position;
    uint32_t window_shards;
    uint32_t choice; /* choice_digest: 0 for all shards */
};

/* One dataset of a feed, as far as a state tells it from others. */
struct feed_member {
    uint64_t dataset, version;
    uint32_t weight, choice;
};
/* State of a feed's begin, but for seed and window. */
struct feed_state feed_state_of(const struct feed_member *members, uint32_t count);

void feed_state_encode(const struct feed_state *s, uint8_t out[FEED_STATE_BYTES]);
/* ERR_CORRUPT (length, magic, checksum), ERR_VERSION. */
must_check int feed_state_decode(const void *p, size_t n, struct feed_state *out, struct err *e);
/* Does a state belong to what was opened? ERR_MISMATCH saying which of dataset, version, shards, seed or
 * window differs. dataset: its name, for errors; NULL: a mix. */
must_check int feed_state_check(const struct feed_state *state, const struct feed_state *opened,
                                const char *dataset, struct err *e);

#endif
