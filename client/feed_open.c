/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a feed: options, datasets, plan, memory, threads. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/clock.h"
#include "client/dataset_local.h"
#include "client/feed_private.h"
#include "client/opened.h"

#define WINDOW_SHARDS_DEFAULT 8u
#define DEPTH_BYTES_DEFAULT   (64ull << 20)
#define DEPTH_BYTES_MIN       (1ull << 20)
#define VIEWS_BESIDE_WINDOW   4u

_Static_assert(LARDER_MIX_MAX == MIX_DATASETS_MAX, "as in mix.h");
_Static_assert((int)FEED_SKIP == (int)LARDER_DAMAGE_SKIP &&
                   (int)FEED_SUBSTITUTE == (int)LARDER_DAMAGE_SUBSTITUTE,
               "policies are the same numbers");

/* ---- options ---- */

static int check_options(const struct larder_feed_options *o, struct err *e)
{
    if (o->mix_count > 0
            ? !o->mix || o->dataset || o->version || o->shards || o->slice || o->slices || o->local_dir
            : !o->dataset)
        return err_set(e, ERR_INVALID,
                       o->mix_count > 0
                           ? "a mix is given, and so each of its members names dataset, version, shards and "
                             "local_dir itself: leave these out of the options"
                           : "no dataset name was given");
    if (o->last != LARDER_LAST_DROP && o->last != LARDER_LAST_PAD)
        return err_set(e, ERR_INVALID, "last %d is not known: LARDER_LAST_DROP or LARDER_LAST_PAD",
                       (int)o->last);
    if ((unsigned)o->damage > LARDER_DAMAGE_SUBSTITUTE)
        return err_set(
            e, ERR_INVALID,
            "damage %d is not known: LARDER_DAMAGE_FAIL, LARDER_DAMAGE_SKIP or LARDER_DAMAGE_SUBSTITUTE",
            (int)o->damage);
    if (o->memory != LARDER_MEMORY_HOST && o->memory != LARDER_MEMORY_CUDA)
        return err_set(e, ERR_INVALID, "memory is %d; expected 0 (host) or 1 (CUDA)", (int)o->memory);
    if (o->connections > FEED_CONNECTIONS_MAX)
        return err_set(e, ERR_LIMIT, "%u connections, at most %u are allowed", o->connections,
                       FEED_CONNECTIONS_MAX);
    if (o->mix_count > MIX_DATASETS_MAX)
        return err_set(e, ERR_LIMIT, "a mix of %u datasets, at most %u are allowed", o->mix_count,
                       MIX_DATASETS_MAX);
    return 0;
}

static int options_of(const struct larder_feed_options *given, struct larder_feed_options *o, struct err *e)
{
    *o = (struct larder_feed_options){.size = sizeof *o};
    if (!given || given->size < offsetof(struct larder_feed_options, rank))
        return err_set(e, ERR_INVALID, "no feed options were given: start from LARDER_INIT and set size");
    memcpy(o, given, given->size < sizeof *o ? given->size : sizeof *o);
    int rc = check_options(o, e);
    if (rc < 0)
        return rc;
    o->world = o->world ? o->world : 1;
    o->epochs = o->epochs ? o->epochs : 1;
    o->connections = o->connections ? o->connections : 2;
    o->depth_bytes = o->depth_bytes ? o->depth_bytes : DEPTH_BYTES_DEFAULT;
    o->depth_bytes = o->depth_bytes < DEPTH_BYTES_MIN ? DEPTH_BYTES_MIN : o->depth_bytes;
    o->device_depth_bytes = o->device_depth_bytes ? o->device_depth_bytes : o->depth_bytes;
    o->device_depth_bytes = o->device_depth_bytes < DEPTH_BYTES_MIN ? DEPTH_BYTES_MIN : o->device_depth_bytes;
    if (o->window_shards == UINT32_MAX)
        o->window_shards = 0; /* sequential, as order.h has it */
    else if (o->window_shards == 0)
        o->window_shards = WINDOW_SHARDS_DEFAULT;
    return 0;
}

/* Member i of what is read: of the mix, or the one dataset. */
static int member_of(const struct larder_feed_options *o, uint32_t i, struct larder_mix *out, struct err *e)
{
    *out = (struct larder_mix){.size = sizeof *out,
                               .dataset = o->dataset,
                               .version = o->version,
                               .weight = 1,
                               .shards = o->shards,
                               .slice = o->slice,
                               .slices = o->slices,
                               .local_dir = o->local_dir};
    if (o->mix_count == 0)
        return 0;
    size_t size = o->mix->size;
    if (size < offsetof(struct larder_mix, shards))
        return err_set(e, ERR_INVALID,
                       "the size of a mix's members is %zu: start each from LARDER_INIT(larder_mix)", size);
    *out = (struct larder_mix){0};
    memcpy(out, (const char *)o->mix + i * size, size < sizeof *out ? size : sizeof *out);
    if (out->size != size || !out->dataset)
        return err_set(e, ERR_INVALID, "member %u of the mix %s: start each from LARDER_INIT(larder_mix)", i,
                       out->dataset ? "has another size than the first" : "names no dataset");
    return 0;
}

static struct larder_feed *feed_create(struct larder *c, const struct larder_feed_options *o)
{
    struct larder_feed *f = calloc(1, sizeof *f);
    if (!f)
        return NULL;
    f->client = c;
    f->pid = getpid();
    f->damage = (enum feed_damage)o->damage;
    f->contiguous = o->contiguous != 0;
    f->aside = o->aside != 0;
    f->depth_bytes = o->depth_bytes;
    f->batches_ahead_max = o->depth_batches ? o->depth_batches : UINT32_MAX;
    f->chunk_bytes_max = o->depth_bytes < FEED_CHUNK_BYTES_MIN ? FEED_CHUNK_BYTES_MIN : o->depth_bytes;
    list_init(&f->batches);
    list_init(&f->unused);
    list_init(&f->decode);
    list_init(&f->retries);
    list_init(&f->local_runs);
    list_init(&f->repairs);
    list_init(&f->arena.regions);
    for (unsigned i = 0; i < FEED_CHUNK_BUCKETS; i++)
        list_init(&f->buckets[i]);
    pthread_mutex_init(&f->lock, NULL);
    clock_cond_init(&f->changed);
    clock_cond_init(&f->space);
    clock_cond_init(&f->work);
    clock_cond_init(&f->scouting);
    return f;
}

/* ---- datasets ---- */

static int choose_shards(struct feed_source *s, const struct larder_mix *m, struct err *e)
{
    const struct shard_table *t = &s->dataset->table;
    uint32_t matched = 0;
    s->pattern = m->shards ? strdup(m->shards) : NULL;
    s->choice = (struct choice){.pattern = s->pattern, .slice = m->slice, .slices = m->slices};
    s->chosen = calloc(t->count, sizeof *s->chosen);
    s->shard_bad = calloc(t->count, sizeof *s->shard_bad);
    if (!s->chosen || !s->shard_bad || (m->shards && !s->pattern))
        return err_set(e, ERR_NO_MEMORY, "no memory for %u shards", t->count);
    int rc = choice_check(&s->choice, e);
    for (uint32_t i = 0; rc == 0 && i < t->count; i++)
        s->chosen[i] = choice_takes(&s->choice, slice_str(t->shards[i].name), &matched);
    return rc;
}

static int open_source(struct larder_feed *f, const struct larder_feed_options *o, const struct larder_mix *m,
                       struct err *e)
{
    struct feed_source *s = &f->sources[f->source_count];
    int rc = dataset_open(f->client, f->conns[0], m->dataset, m->version, &s->dataset, e);
    if (rc < 0)
        return rc;
    f->source_count++;
    s->weight = m->weight;
    struct larder_dataset *d = s->dataset;
    for (unsigned i = 0; !d->published && i < f->conn_count; i++)
        conn_lane_open(f->conns[i]); /* nothing else has use for one */
    for (unsigned i = 1; rc == 0 && d->published && i < f->conn_count; i++)
        rc = dataset_published_renew(d, f->conns[i], e); /* each may be on a loop of its own */
    if (rc == 0 && m->local_dir)
        rc = dataset_local_open(d, m->local_dir, &s->local, e);
    if (rc == 0)
        rc = choose_shards(s, m, e);
    if (rc == 0)
        rc = dataset_count(d, s->chosen, e);
    uint64_t views = (o->window_shards ? 2 * (uint64_t)o->window_shards : 1) + VIEWS_BESIDE_WINDOW;
    d->view_max = views < d->table.count ? (unsigned)views : d->table.count;
    return rc;
}

static int open_datasets(struct larder_feed *f, const struct larder_feed_options *o, struct err *e)
{
    int rc = 0;
    for (; rc == 0 && f->conn_count < o->connections; f->conn_count += rc == 0)
        rc = client_connect(f->client, CONN_LANE_OFFER, &f->conns[f->conn_count], e);
    uint32_t count = o->mix_count ? o->mix_count : 1;
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        struct larder_mix m;
        rc = member_of(o, i, &m, e);
        if (rc == 0)
            rc = open_source(f, o, &m, e);
    }
    return rc;
}

/* ---- the plan ---- */

static int plan_create(struct larder_feed *f, const struct feed_plan_options *p, struct err *e)
{
    int rc = feed_plan_init(&f->plan, p, e);
    if (rc == 0)
        rc = feed_plan_init(&f->scout_plan, p, e);
    if (rc == 0 && f->damage == FEED_SUBSTITUTE)
        rc = feed_plan_init(&f->repair_plan, p, e);
    return rc;
}

static void identify(struct larder_feed *f, const struct larder_feed_options *o)
{
    struct feed_member members[MIX_DATASETS_MAX];
    for (uint32_t i = 0; i < f->source_count; i++) {
        const struct feed_source *s = &f->sources[i];
        members[i] = (struct feed_member){.dataset = dataset_identity(s->dataset),
                                          .version = s->dataset->version,
                                          .weight = s->weight,
                                          .choice = choice_digest(&s->choice)};
    }
    f->identity = feed_state_of(members, f->source_count);
    f->identity.seed = o->seed;
    f->identity.window_shards = o->window_shards;
}

static int make_plan(struct larder_feed *f, const struct larder_feed_options *o, struct err *e)
{
    struct mix_source sources[MIX_DATASETS_MAX];
    uint64_t *counts[MIX_DATASETS_MAX] = {0};
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < f->source_count; i++) {
        const struct feed_source *s = &f->sources[i];
        const struct shard_table *t = &s->dataset->table;
        counts[i] = malloc(t->count * sizeof *counts[i]);
        if (!counts[i])
            rc = err_set(e, ERR_NO_MEMORY, "no memory for the counts of %u shards", t->count);
        for (uint32_t k = 0; rc == 0 && k < t->count; k++)
            counts[i][k] = t->shards[k].samples;
        sources[i] = (struct mix_source){.name = s->dataset->name,
                                         .samples_per_shard = counts[i],
                                         .chosen = s->chosen,
                                         .shards = t->count,
                                         .weight = s->weight};
    }
    struct feed_plan_options p = {.sources = sources,
                                  .source_count = f->source_count,
                                  .seed = o->seed,
                                  .window_shards = o->window_shards,
                                  .rank = o->rank,
                                  .world = o->world,
                                  .global_batch = o->global_batch,
                                  .epochs = o->epochs,
                                  .pad = o->last == LARDER_LAST_PAD};
    if (rc == 0)
        rc = plan_create(f, &p, e);
    for (uint32_t i = 0; i < f->source_count; i++)
        free(counts[i]);
    if (rc == 0) {
        identify(f, o);
        f->batches_per_epoch = feed_plan_batches(&f->plan);
    }
    return rc;
}

static int resume(struct larder_feed *f, const struct larder_feed_options *o, struct err *e)
{
    if (!o->state && o->state_bytes == 0)
        return 0;
    struct feed_state s;
    int rc = feed_state_decode(o->state, o->state ? o->state_bytes : 0, &s, e);
    if (rc == 0)
        rc = feed_state_check(&s, &f->identity, f->source_count == 1 ? f->sources->dataset->name : NULL, e);
    if (rc == 0)
        rc = feed_plan_seek(&f->plan, s.epoch, s.position, e);
    if (rc == 0)
        rc = feed_plan_seek(&f->scout_plan, s.epoch, s.position, e);
    f->epoch = f->plan.epoch;
    f->position = f->plan.position;
    return rc;
}

/* ---- memory, threads ---- */

/* A quarter more than chunks may take, for what lies between them. */
static int take_chunk_memory(struct larder_feed *f, struct err *e)
{
    bool sealed = false;
    uint64_t all = 0;
    for (uint32_t i = 0; i < f->source_count; i++) {
        const struct larder_dataset *d = f->sources[i].dataset;
        sealed |= !d->published;
        for (uint32_t k = 0; !d->published && k < d->table.count; k++)
            all += d->table.shards[k].bytes;
    }
    f->forgets = all > f->chunk_bytes_max;
    if (sealed && feed_buffers_init(&f->buffers, f->chunk_bytes_max + f->chunk_bytes_max / 4) < 0)
        return err_set(e, ERR_NO_MEMORY, "no memory for chunks of %llu bytes; set depth_bytes lower",
                       (unsigned long long)f->chunk_bytes_max);
    return 0;
}

static int take_memory(struct larder_feed *f, const struct larder_feed_options *o, struct err *e)
{
    size_t bytes = (size_t)(f->depth_bytes / 4096 * 4096);
    int rc = pool_create(bytes, bytes, &f->pool, e);
    if (rc < 0)
        return err_prepend(e, "memory for batches ahead");
    uint8_t *base = pool_take(f->pool);
    check(base != NULL);
    feed_arena_init(&f->arena, base, bytes);
    rc = take_chunk_memory(f, e);
    if (rc < 0)
        return rc;
    return o->memory == LARDER_MEMORY_CUDA ? feed_lift_create(f, o->device, o->device_depth_bytes, e) : 0;
}

static unsigned workers_wanted(const struct larder_feed *f)
{
    bool decoding = false; /* or reading: more than asking again after losses */
    for (uint32_t i = 0; i < f->source_count; i++)
        decoding |= !f->sources[i].dataset->published || f->sources[i].local;
    unsigned want = decoding ? client_options(f->client)->threads : 1;
    return want < 1 ? 1 : want > FEED_WORKERS_MAX ? FEED_WORKERS_MAX : want;
}

/* Threads take no signals of the process. */
static int start_threads(struct larder_feed *f, struct err *e)
{
    unsigned want = workers_wanted(f);
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = 0;
    for (; rc == 0 && f->worker_count < want; f->worker_count += rc == 0)
        rc = pthread_create(&f->workers[f->worker_count], NULL, feed_worker, f);
    if (rc == 0) {
        f->planner_runs = true;
        rc = pthread_create(&f->planner, NULL, feed_planner, f);
        f->planner_started = rc == 0;
    }
    if (rc == 0) {
        rc = pthread_create(&f->scout, NULL, feed_scout, f);
        f->scout_started = rc == 0;
    }
    if (rc == 0)
        rc = feed_lift_start(f);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc == 0 ? 0 : err_sys(e, rc, "starting the threads of a feed");
}

int larder_feed_open(struct larder *c, const struct larder_feed_options *given, struct larder_feed **out,
                     struct larder_error *error)
{
    struct err e = {0};
    struct larder_feed_options o;
    struct larder_feed *f = NULL;
    *out = NULL;
    int rc = client_enter(c, &e);
    if (rc == 0)
        rc = options_of(given, &o, &e);
    if (rc == 0 && !(f = feed_create(c, &o)))
        rc = err_set(&e, ERR_NO_MEMORY, "no memory for a feed");
    if (rc == 0)
        rc = open_datasets(f, &o, &e);
    if (rc == 0)
        rc = make_plan(f, &o, &e);
    if (rc == 0)
        rc = resume(f, &o, &e);
    if (rc == 0)
        rc = take_memory(f, &o, &e);
    if (rc == 0)
        rc = feed_report_begin(f, o.run, &e);
    if (rc == 0)
        rc = start_threads(f, &e);
    if (rc < 0) {
        if (f)
            larder_feed_close(f);
        return client_leave(rc, &e, error);
    }
    feed_enlist(f);
    *out = f;
    return 0;
}
