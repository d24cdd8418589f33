/* SPDX-License-Identifier: Apache-2.0 */
#include "client/feed_plan.h"

#include <inttypes.h>
#include <string.h>

#include "format/base/cursor.h"
#include "format/base/hash.h"

#define STATE_MAGIC   0x4644524cu /* "LRDF" read little-endian */
#define STATE_VERSION 1u

static int check_numbers(const struct feed_plan_options *o, struct err *e)
{
    if (o->world == 0 || o->rank >= o->world)
        return err_set(e, ERR_INVALID, "rank %u of %u does not exist: ranks run from 0 to world - 1", o->rank,
                       o->world);
    if (o->global_batch == 0)
        return err_set(e, ERR_INVALID,
                       "a global batch of 0 samples: give the number of samples that all ranks "
                       "together take per step");
    if (o->global_batch % o->world != 0)
        return err_set(
            e, ERR_INVALID,
            "a global batch of %u samples cannot be divided by %u ranks: %u would be left over; use a "
            "multiple of %u",
            o->global_batch, o->world, o->global_batch % o->world, o->world);
    if (o->epochs == 0)
        return err_set(e, ERR_INVALID, "0 epochs: give at least 1");
    return 0;
}

static int count_samples(const struct feed_plan_options *o, uint64_t *out, struct err *e)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < o->shards; i++)
        if (add_overflows(n, o->samples_per_shard[i], &n))
            return err_set(e, ERR_LIMIT, "dataset \"%s\": its sample counts add up to more than 64 bits",
                           o->dataset);
    if (n == 0)
        return err_set(e, ERR_INVALID, "dataset \"%s\" has no samples in its %u shards: nothing to feed",
                       o->dataset, o->shards);
    if (n < o->global_batch)
        return err_set(e, ERR_INVALID,
                       "dataset \"%s\" has %" PRIu64
                       " samples, fewer than one global batch of %u: use a smaller "
                       "batch or more data",
                       o->dataset, n, o->global_batch);
    uint64_t all;
    if (mul_overflows(n, o->epochs, &all))
        return err_set(e, ERR_LIMIT, "%" PRIu64 " epochs of %" PRIu64 " samples are more than 64 bits count",
                       o->epochs, n);
    *out = n;
    return 0;
}

int feed_plan_init(struct feed_plan *p, const struct feed_plan_options *o, struct err *e)
{
    *p = (struct feed_plan){.rank = o->rank,
                            .world = o->world,
                            .global_batch = o->global_batch,
                            .epochs = o->epochs,
                            .pad = o->pad};
    int rc = check_numbers(o, e);
    if (rc == 0)
        rc = count_samples(o, &p->samples, e);
    if (rc == 0)
        rc = order_create(o->samples_per_shard, o->shards, o->seed, o->window_shards, &p->order, e);
    return rc;
}

void feed_plan_free(struct feed_plan *p)
{
    if (p->order)
        order_free(p->order);
    p->order = NULL;
}

/* Positions at which no batch starts any more belong to the next epoch. */
static void normalise(const struct feed_plan *p, uint64_t *epoch, uint64_t *position)
{
    uint64_t left = p->samples - *position;
    if (left == 0 || (left < p->global_batch && !p->pad)) {
        *epoch += 1;
        *position = 0;
    }
}

int feed_plan_seek(struct feed_plan *p, uint64_t epoch, uint64_t position, struct err *e)
{
    if (position > p->samples)
        return err_set(e, ERR_MISMATCH,
                       "the state names position %" PRIu64 " of an epoch of %" PRIu64
                       " samples: it is not of this dataset",
                       position, p->samples);
    normalise(p, &epoch, &position);
    p->epoch = epoch;
    p->position = position;
    return 0;
}

uint64_t feed_plan_batches(const struct feed_plan *p)
{
    uint64_t whole = p->samples / p->global_batch;
    return whole + (p->pad && p->samples % p->global_batch != 0);
}

bool feed_plan_next(struct feed_plan *p, struct feed_slice *out)
{
    if (p->epoch >= p->epochs)
        return false;
    uint32_t count = p->global_batch / p->world;
    *out = (struct feed_slice){.epoch = p->epoch,
                               .position = p->position,
                               .first = p->position + (uint64_t)p->rank * count,
                               .count = count};
    uint64_t left = p->samples - p->position;
    p->position += left < p->global_batch ? left : p->global_batch;
    normalise(p, &p->epoch, &p->position);
    out->next_epoch = p->epoch;
    out->next_position = p->position;
    return true;
}

struct feed_place feed_plan_place(struct feed_plan *p, const struct feed_slice *s, uint32_t i)
{
    check(i < s->count);
    uint64_t within = (s->first + i) % p->samples; /* beyond the end: the epoch's first ones (pad) */
    struct feed_place place = {.position = s->epoch * p->samples + within};
    place.at = order_at(p->order, place.position);
    return place;
}

void feed_state_encode(const struct feed_state *s, uint8_t out[FEED_STATE_BYTES])
{
    memset(out, 0, FEED_STATE_BYTES);
    le32_put(out, STATE_MAGIC);
    le32_put(out + 4, STATE_VERSION);
    le64_put(out + 8, s->dataset);
    le64_put(out + 16, s->version);
    le64_put(out + 24, s->seed);
    le64_put(out + 32, s->epoch);
    le64_put(out + 40, s->position);
    le32_put(out + 48, s->window_shards);
    le64_put(out + 56, hash64(out, 56));
}

int feed_state_decode(const void *p, size_t n, struct feed_state *out, struct err *e)
{
    const char *advice = "pass the bytes that larder_feed_state gave, unchanged";
    if (n != FEED_STATE_BYTES)
        return err_set(e, ERR_CORRUPT, "a loader state has %u bytes, this one has %zu: %s", FEED_STATE_BYTES,
                       n, advice);
    struct rcur c = rcur_of(p, n);
    if (rcur_u32(&c) != STATE_MAGIC)
        return err_set(e, ERR_CORRUPT, "these bytes are not a loader state: %s", advice);
    uint32_t version = rcur_u32(&c);
    if (version != STATE_VERSION)
        return err_set(
            e, ERR_VERSION,
            "the loader state has version %u, this larder knows version %u: use the larder that wrote it",
            version, STATE_VERSION);
    *out = (struct feed_state){0};
    out->dataset = rcur_u64(&c);
    out->version = rcur_u64(&c);
    out->seed = rcur_u64(&c);
    out->epoch = rcur_u64(&c);
    out->position = rcur_u64(&c);
    out->window_shards = rcur_u32(&c);
    uint32_t reserved = rcur_u32(&c);
    if (rcur_u64(&c) != hash64(p, 56) || reserved != 0)
        return err_set(e, ERR_CORRUPT, "the loader state does not match its checksum: %s", advice);
    return rcur_end(&c, "loader state", e);
}

int feed_state_check(const struct feed_state *state, const struct feed_state *opened, const char *dataset,
                     struct err *e)
{
    if (state->dataset != opened->dataset)
        return err_set(
            e, ERR_MISMATCH,
            "the loader state is of another dataset than \"%s\": open the dataset that the job was "
            "reading",
            dataset);
    if (state->version != opened->version)
        return err_set(e, ERR_MISMATCH,
                       "the loader state is of version %" PRIu64
                       " of dataset \"%s\", opened is version %" PRIu64 ": open version %" PRIu64
                       " to continue exactly",
                       state->version, dataset, opened->version, state->version);
    if (state->seed != opened->seed)
        return err_set(e, ERR_MISMATCH,
                       "the loader state was made with seed %" PRIu64 ", this feed has seed %" PRIu64
                       ": use the same seed to continue exactly",
                       state->seed, opened->seed);
    if (state->window_shards != opened->window_shards)
        return err_set(e, ERR_MISMATCH,
                       "the loader state was made with a shuffle window of %u shards, this feed has %u (0: "
                       "sequential): use the same window to continue exactly",
                       state->window_shards, opened->window_shards);
    return 0;
}
