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

static int check_epochs(const struct feed_plan *p, const struct feed_plan_options *o, struct err *e)
{
    uint64_t all;
    if (p->samples < o->global_batch && o->source_count == 1)
        return err_set(e, ERR_INVALID,
                       "dataset \"%s\" has %" PRIu64
                       " samples, fewer than one global batch of %u: use a smaller "
                       "batch or more data",
                       o->sources->name, p->samples, o->global_batch);
    if (p->samples < o->global_batch)
        return err_set(e, ERR_INVALID,
                       "the mix of %u datasets has %" PRIu64
                       " samples, fewer than one global batch of %u: use a "
                       "smaller batch or more data",
                       o->source_count, p->samples, o->global_batch);
    if (mul_overflows(p->samples, o->epochs, &all))
        return err_set(e, ERR_LIMIT, "%" PRIu64 " epochs of %" PRIu64 " samples are more than 64 bits count",
                       o->epochs, p->samples);
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
        rc = mix_create(o->sources, o->source_count, o->seed, o->window_shards, &p->mix, e);
    if (rc < 0)
        return rc;
    p->samples = mix_samples(p->mix);
    return check_epochs(p, o, e);
}

void feed_plan_free(struct feed_plan *p)
{
    mix_free(p->mix);
    p->mix = NULL;
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
    place.at = mix_at(p->mix, place.position);
    return place;
}

bool feed_plan_substitute(struct feed_plan *p, uint64_t position, uint32_t attempt, struct mix_place *out)
{
    return mix_substitute(p->mix, position, attempt, out);
}

struct feed_state feed_state_of(const struct feed_member *members, uint32_t count)
{
    struct feed_state s = {
        .dataset = members->dataset, .version = members->version, .choice = members->choice};
    if (count == 1)
        return s;
    uint8_t what[16 * MIX_DATASETS_MAX], versions[8 * MIX_DATASETS_MAX];
    check(count <= MIX_DATASETS_MAX);
    for (uint32_t i = 0; i < count; i++) {
        le64_put(what + 16 * i, members[i].dataset);
        le32_put(what + 16 * i + 8, members[i].weight);
        le32_put(what + 16 * i + 12, members[i].choice);
        le64_put(versions + 8 * i, members[i].version);
    }
    return (struct feed_state){.dataset = hash64(what, 16 * count), .version = hash64(versions, 8 * count)};
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
    le32_put(out + 52, s->choice);
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
    out->choice = rcur_u32(&c);
    if (rcur_u64(&c) != hash64(p, 56))
        return err_set(e, ERR_CORRUPT, "the loader state does not match its checksum: %s", advice);
    return rcur_end(&c, "loader state", e);
}

static int other_dataset(const char *dataset, struct err *e)
{
    if (!dataset)
        return err_set(
            e, ERR_MISMATCH,
            "the loader state is of another mix: open the same datasets in the same order, with the same "
            "weights and choices of shards, to continue exactly");
    return err_set(
        e, ERR_MISMATCH,
        "the loader state is of another dataset than \"%s\": open the dataset that the job was reading",
        dataset);
}

static int other_version(const struct feed_state *state, const struct feed_state *opened, const char *dataset,
                         struct err *e)
{
    if (!dataset)
        return err_set(
            e, ERR_MISMATCH,
            "the loader state was made with other versions of the mix's datasets: open the versions that "
            "the job was reading to continue exactly");
    return err_set(e, ERR_MISMATCH,
                   "the loader state is of version %" PRIu64 " of dataset \"%s\", opened is version %" PRIu64
                   ": open version %" PRIu64 " to continue exactly",
                   state->version, dataset, opened->version, state->version);
}

int feed_state_check(const struct feed_state *state, const struct feed_state *opened, const char *dataset,
                     struct err *e)
{
    if (state->dataset != opened->dataset)
        return other_dataset(dataset, e);
    if (state->version != opened->version)
        return other_version(state, opened, dataset, e);
    if (state->choice != opened->choice)
        return err_set(
            e, ERR_MISMATCH,
            "the loader state was made with another choice of shards of \"%s\": use the same pattern and "
            "slice to continue exactly",
            dataset);
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
