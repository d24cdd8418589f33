/* SPDX-License-Identifier: Apache-2.0 */
/* The public face of a feed: opening, handing out batches, the state. */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/clock.h"
#include "client/feed_private.h"

#define WINDOW_SHARDS_DEFAULT 8u
#define DEPTH_BYTES_DEFAULT   (64ull << 20)
#define DEPTH_BYTES_MIN       (1ull << 20)
#define VIEWS_BESIDE_WINDOW   4u

/* ---- opening ---- */

static int options_of(const struct larder_feed_options *given, struct larder_feed_options *o, struct err *e)
{
    *o = (struct larder_feed_options){.size = sizeof *o};
    if (!given || given->size < offsetof(struct larder_feed_options, rank))
        return err_set(e, ERR_INVALID, "no feed options were given: start from LARDER_INIT and set size");
    memcpy(o, given, given->size < sizeof *o ? given->size : sizeof *o);
    if (!o->dataset)
        return err_set(e, ERR_INVALID, "no dataset name was given");
    if (o->last != LARDER_LAST_DROP && o->last != LARDER_LAST_PAD)
        return err_set(e, ERR_INVALID, "last %d is not known: LARDER_LAST_DROP or LARDER_LAST_PAD",
                       (int)o->last);
    if (o->damage != LARDER_DAMAGE_FAIL && o->damage != LARDER_DAMAGE_SKIP)
        return err_set(e, ERR_INVALID, "damage %d is not known: LARDER_DAMAGE_FAIL or LARDER_DAMAGE_SKIP",
                       (int)o->damage);
    if (o->connections > FEED_CONNECTIONS_MAX)
        return err_set(e, ERR_LIMIT, "%u connections, at most %u are allowed", o->connections,
                       FEED_CONNECTIONS_MAX);
    o->world = o->world ? o->world : 1;
    o->epochs = o->epochs ? o->epochs : 1;
    o->connections = o->connections ? o->connections : 2;
    o->depth_bytes = o->depth_bytes ? o->depth_bytes : DEPTH_BYTES_DEFAULT;
    o->depth_bytes = o->depth_bytes < DEPTH_BYTES_MIN ? DEPTH_BYTES_MIN : o->depth_bytes;
    if (o->window_shards == UINT32_MAX)
        o->window_shards = 0; /* sequential, as order.h has it */
    else if (o->window_shards == 0)
        o->window_shards = WINDOW_SHARDS_DEFAULT;
    return 0;
}

static struct larder_feed *feed_create(struct larder *c, const struct larder_feed_options *o)
{
    struct larder_feed *f = calloc(1, sizeof *f);
    if (!f)
        return NULL;
    f->client = c;
    f->skip_damage = o->damage == LARDER_DAMAGE_SKIP;
    f->depth_bytes = o->depth_bytes;
    f->chunk_bytes_max = o->depth_bytes < FEED_CHUNK_BYTES_MIN ? FEED_CHUNK_BYTES_MIN : o->depth_bytes;
    list_init(&f->batches);
    list_init(&f->unused);
    list_init(&f->decode);
    list_init(&f->retries);
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

static int open_dataset(struct larder_feed *f, const struct larder_feed_options *o, struct err *e)
{
    int rc = 0;
    for (; rc == 0 && f->conn_count < o->connections; f->conn_count += rc == 0)
        rc = client_connect(f->client, &f->conns[f->conn_count], e);
    if (rc == 0)
        rc = dataset_open(f->client, f->conns[0], o->dataset, o->version, &f->dataset, e);
    for (unsigned i = 1; rc == 0 && f->dataset->published && i < f->conn_count; i++)
        rc = dataset_published_renew(f->dataset, f->conns[i], e); /* each may be on a loop of its own */
    if (rc == 0)
        rc = dataset_count(f->dataset, e);
    if (rc < 0)
        return rc;
    struct larder_dataset *d = f->dataset;
    uint64_t views = (o->window_shards ? 2 * (uint64_t)o->window_shards : 1) + VIEWS_BESIDE_WINDOW;
    d->view_max = views < d->table.count ? (unsigned)views : d->table.count;
    f->shard_bad = calloc(d->table.count, sizeof *f->shard_bad);
    return f->shard_bad ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for %u shards", d->table.count);
}

static int make_plan(struct larder_feed *f, const struct larder_feed_options *o, struct err *e)
{
    const struct larder_dataset *d = f->dataset;
    uint64_t *counts = malloc(d->table.count * sizeof *counts);
    if (!counts)
        return err_set(e, ERR_NO_MEMORY, "no memory for the counts of %u shards", d->table.count);
    for (uint32_t i = 0; i < d->table.count; i++)
        counts[i] = d->table.shards[i].samples;
    struct feed_plan_options p = {.dataset = d->name,
                                  .samples_per_shard = counts,
                                  .shards = d->table.count,
                                  .seed = o->seed,
                                  .window_shards = o->window_shards,
                                  .rank = o->rank,
                                  .world = o->world,
                                  .global_batch = o->global_batch,
                                  .epochs = o->epochs,
                                  .pad = o->last == LARDER_LAST_PAD};
    int rc = feed_plan_init(&f->plan, &p, e);
    if (rc == 0)
        rc = feed_plan_init(&f->scout_plan, &p, e);
    free(counts);
    f->identity = (struct feed_state){.dataset = dataset_identity(d),
                                      .version = d->version,
                                      .seed = o->seed,
                                      .window_shards = o->window_shards};
    if (rc == 0)
        f->batches_per_epoch = feed_plan_batches(&f->plan);
    return rc;
}

static int resume(struct larder_feed *f, const struct larder_feed_options *o, struct err *e)
{
    if (!o->state && o->state_bytes == 0)
        return 0;
    struct feed_state s;
    int rc = feed_state_decode(o->state, o->state ? o->state_bytes : 0, &s, e);
    if (rc == 0)
        rc = feed_state_check(&s, &f->identity, f->dataset->name, e);
    if (rc == 0)
        rc = feed_plan_seek(&f->plan, s.epoch, s.position, e);
    if (rc == 0)
        rc = feed_plan_seek(&f->scout_plan, s.epoch, s.position, e);
    f->epoch = f->plan.epoch;
    f->position = f->plan.position;
    return rc;
}

static int take_memory(struct larder_feed *f, struct err *e)
{
    size_t bytes = (size_t)(f->depth_bytes / 4096 * 4096);
    int rc = pool_create(bytes, bytes, &f->pool, e);
    if (rc < 0)
        return err_prepend(e, "memory for batches ahead");
    uint8_t *base = pool_take(f->pool);
    check(base != NULL);
    feed_arena_init(&f->arena, base, bytes);
    return 0;
}

/* Threads take no signals of the process. */
static int start_threads(struct larder_feed *f, struct err *e)
{
    unsigned want = f->dataset->published ? 1 : client_options(f->client)->threads;
    want = want < 1 ? 1 : want > FEED_WORKERS_MAX ? FEED_WORKERS_MAX : want;
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
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc == 0 ? 0 : err_sys(e, rc, "starting the threads of a feed");
}

/* ---- closing ---- */

/* Everything but the memory of batches that are out. */
static void stop(struct larder_feed *f)
{
    pthread_mutex_lock(&f->lock);
    f->closing = true;
    pthread_cond_broadcast(&f->space);
    pthread_cond_broadcast(&f->work);
    pthread_cond_broadcast(&f->changed);
    pthread_cond_broadcast(&f->scouting);
    pthread_mutex_unlock(&f->lock);
    if (f->dataset)
        f->dataset->closing = true;
    for (unsigned i = 0; i < f->conn_count; i++)
        conn_stop(f->conns[i]);
    if (f->planner_started)
        pthread_join(f->planner, NULL);
    if (f->scout_started)
        pthread_join(f->scout, NULL);
    for (unsigned i = 0; i < f->worker_count; i++)
        pthread_join(f->workers[i], NULL);
    for (unsigned i = 0; i < f->conn_count; i++)
        conn_close(f->conns[i]); /* whatever was on its way has ended now */
    for (struct list *it; (it = list_pop(&f->retries));)
        free(container_of(it, struct feed_fetch, link));
    if (f->dataset)
        feed_chunks_free(f);
    for (struct list *it; (it = list_pop(&f->batches));)
        feed_batch_free(container_of(it, struct larder_batch, link));
    feed_plan_free(&f->plan);
    feed_plan_free(&f->scout_plan);
    free(f->shard_bad);
    dataset_close(f->dataset);
    f->dataset = NULL;
}

static void feed_free(struct larder_feed *f)
{
    feed_arena_reset(&f->arena);
    if (f->arena.base)
        pool_give(f->pool, f->arena.base);
    pool_destroy(f->pool);
    pthread_cond_destroy(&f->scouting);
    pthread_cond_destroy(&f->work);
    pthread_cond_destroy(&f->space);
    pthread_cond_destroy(&f->changed);
    pthread_mutex_destroy(&f->lock);
    free(f);
}

void larder_feed_close(struct larder_feed *f)
{
    if (!f || client_enter(f->client, NULL) == -ECHILD)
        return;
    stop(f);
    pthread_mutex_lock(&f->lock);
    bool last = f->batches_out == 0;
    f->closed = true; /* the memory of batches that are still out stays until they are released */
    pthread_mutex_unlock(&f->lock);
    if (last)
        feed_free(f);
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
        rc = open_dataset(f, &o, &e);
    if (rc == 0)
        rc = make_plan(f, &o, &e);
    if (rc == 0)
        rc = resume(f, &o, &e);
    if (rc == 0)
        rc = take_memory(f, &e);
    if (rc == 0)
        rc = start_threads(f, &e);
    if (rc < 0) {
        if (f)
            larder_feed_close(f);
        return client_leave(rc, &e, error);
    }
    *out = f;
    return 0;
}

/* ---- handing out ---- */

/* With the lock held. */
static struct larder_batch *first(struct larder_feed *f)
{
    return list_empty(&f->batches) ? NULL : container_of(f->batches.next, struct larder_batch, link);
}

/* With the lock held: waits a little, and books the time on what the consumer waits for. */
static void wait_for(struct larder_feed *f, const struct larder_batch *b, uint64_t until_ms)
{
    uint64_t begin = clock_ns();
    bool decoding = b && b->fetching == 0 && b->pending > 1;
    clock_wait(&f->changed, &f->lock, until_ms);
    double s = (double)(clock_ns() - begin) / 1e9;
    if (decoding)
        f->starved_decode += s;
    else
        f->starved_network += s;
}

static int waited_in_vain(struct larder_feed *f, const struct larder_batch *b, uint32_t timeout_ms,
                          struct err *e)
{
    if (!b && f->want_space && f->batches_out)
        return err_set(
            e, ERR_TIMEOUT,
            "no batch within %u ms: the %u batches that were handed out and not released hold all %" PRIu64
            " bytes of the ring; release them, or open the feed with a larger depth_bytes",
            timeout_ms, f->batches_out, f->depth_bytes);
    return err_set(e, ERR_TIMEOUT, "no batch within %u ms: %s; call again to go on waiting", timeout_ms,
                   b && b->fetching == 0 ? "its chunks are being decoded"
                                         : "its bytes are on their way from the server");
}

/* With the lock held: leaves out the samples that are damaged. */
static void leave_out(struct larder_feed *f, struct larder_batch *b)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < b->count; i++) {
        if (b->bad[i])
            continue;
        b->samples[kept] = b->samples[i];
        for (uint32_t k = 0; k < b->samples[kept].fields; k++)
            f->bytes_out += b->samples[kept].field[k].bytes;
        kept++;
    }
    f->skipped += b->count - kept;
    f->samples_out += kept;
    b->count = kept;
}

/* With the lock held: 1, or the batch's error, which stays. */
static int hand_out(struct larder_feed *f, struct larder_batch *b, struct larder_batch **out, struct err *e)
{
    if (b->err.class != ERR_NONE) {
        *e = b->err;
        return -b->err.errnum;
    }
    list_del(&b->link);
    f->batches_out++;
    f->epoch = b->slice.next_epoch;
    f->position = b->slice.next_position;
    leave_out(f, b);
    free(b->pieces);
    b->pieces = NULL;
    pthread_cond_signal(&f->space); /* a batch larger than the ring waits for its turn */
    *out = b;
    return 1;
}

static int next_batch(struct larder_feed *f, uint32_t timeout_ms, struct larder_batch **out, struct err *e)
{
    uint64_t until = clock_ms() + timeout_ms;
    for (;;) {
        struct larder_batch *b = first(f);
        if (b && b->ready)
            return hand_out(f, b, out, e);
        if (!b && !f->planner_runs)
            return f->planned_all ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for planning a batch");
        if (clock_ms() >= until)
            return waited_in_vain(f, b, timeout_ms, e);
        wait_for(f, b, until);
    }
}

int larder_feed_next(struct larder_feed *f, int timeout_ms, struct larder_batch **out,
                     struct larder_error *error)
{
    struct err e = {0};
    *out = NULL;
    int rc = client_enter(f->client, &e);
    if (rc == 0) {
        pthread_mutex_lock(&f->lock);
        rc = next_batch(f, client_timeout(f->client, timeout_ms), out, &e);
        pthread_mutex_unlock(&f->lock);
    }
    return rc < 0 ? client_leave(rc, &e, error) : rc;
}

size_t larder_batch_samples(const struct larder_batch *b)
{
    return b->count;
}

int larder_batch_sample(const struct larder_batch *b, size_t i, struct larder_sample *out)
{
    if (i >= b->count)
        return -ENOENT;
    *out = b->samples[i];
    return 0;
}

const struct larder_field *larder_sample_field(const struct larder_sample *s, const char *name)
{
    for (uint32_t i = 0; i < s->fields; i++)
        if (strcmp(s->field[i].name, name) == 0)
            return &s->field[i];
    return NULL;
}

void larder_batch_release(struct larder_batch *b)
{
    if (!b)
        return;
    struct larder_feed *f = b->feed;
    pthread_mutex_lock(&f->lock);
    feed_batch_free(b);
    f->batches_out--;
    bool last = f->closed && f->batches_out == 0;
    pthread_cond_signal(&f->space);
    pthread_mutex_unlock(&f->lock);
    if (last)
        feed_free(f);
}

/* ---- state ---- */

int larder_feed_state(struct larder_feed *f, uint8_t state[LARDER_STATE_BYTES])
{
    _Static_assert(FEED_STATE_BYTES <= LARDER_STATE_BYTES, "a feed's state fits the public one");
    int rc = client_enter(f->client, NULL);
    if (rc < 0)
        return rc;
    struct feed_state s = f->identity;
    pthread_mutex_lock(&f->lock);
    s.epoch = f->epoch;
    s.position = f->position;
    pthread_mutex_unlock(&f->lock);
    memset(state, 0, LARDER_STATE_BYTES);
    feed_state_encode(&s, state);
    return FEED_STATE_BYTES;
}

int larder_feed_info(struct larder_feed *f, struct larder_feed_info *out)
{
    int rc = client_enter(f->client, NULL);
    if (rc < 0)
        return rc;
    struct larder_feed_info i = {.size = sizeof i,
                                 .samples = f->plan.samples,
                                 .shards = f->dataset->table.count,
                                 .version = f->dataset->version,
                                 .batches_per_epoch = f->batches_per_epoch};
    snprintf(i.path, sizeof i.path, "%s",
             f->dataset->published ? "TLS 1.3 over TCP"
                                   : conn_paths(f->conns, f->conn_count, client_conn(f->client)));
    pthread_mutex_lock(&f->lock);
    i.epoch = f->epoch;
    i.position = f->position;
    i.samples_out = f->samples_out;
    i.bytes_out = f->bytes_out;
    i.skipped = f->skipped;
    list_for_each (it, &f->batches)
        i.batches_ready += container_of(it, struct larder_batch, link)->ready;
    i.starved_seconds.network = f->starved_network;
    i.starved_seconds.decode = f->starved_decode;
    i.starved_seconds.consumer = f->starved_consumer;
    pthread_mutex_unlock(&f->lock);
    memcpy(out, &i, out->size && out->size < sizeof i ? out->size : sizeof i);
    return 0;
}
