/* SPDX-License-Identifier: Apache-2.0 */
/* The public face of an open feed: handing out batches, the state, figures, closing. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/clock.h"
#include "client/dataset_local.h"
#include "client/device.h"
#include "client/feed_private.h"
#include "client/opened.h"

/* ---- what saves look at ---- */

void feed_enlist(struct larder_feed *f)
{
    struct larder *c = f->client;
    pthread_mutex_lock(&c->feeds_lock);
    f->next_open = c->feeds;
    c->feeds = f;
    f->enlisted = true;
    pthread_mutex_unlock(&c->feeds_lock);
}

static void strike_off(struct larder_feed *f)
{
    struct larder *c = f->client;
    pthread_mutex_lock(&c->feeds_lock);
    for (struct larder_feed **at = &c->feeds; *at; at = &(*at)->next_open)
        if (*at == f) {
            *at = f->next_open;
            break;
        }
    pthread_mutex_unlock(&c->feeds_lock);
}

static void state_at(const struct larder_feed *f, uint64_t epoch, uint64_t position,
                     uint8_t out[LARDER_STATE_BYTES])
{
    _Static_assert(FEED_STATE_BYTES == LARDER_STATE_BYTES, "a feed's state fits the public one");
    struct feed_state s = f->identity;
    s.epoch = epoch;
    s.position = position;
    feed_state_encode(&s, out);
}

static void state_now(struct larder_feed *f, uint8_t out[LARDER_STATE_BYTES])
{
    pthread_mutex_lock(&f->lock);
    uint64_t epoch = f->epoch, position = f->position;
    pthread_mutex_unlock(&f->lock);
    state_at(f, epoch, position, out);
}

int client_feed_state(struct larder *c, uint8_t state[LARDER_STATE_BYTES], struct err *e)
{
    unsigned found = 0;
    pthread_mutex_lock(&c->feeds_lock);
    for (struct larder_feed *f = c->feeds; f; f = f->next_open)
        if (!f->aside && found++ == 0)
            state_now(f, state);
    pthread_mutex_unlock(&c->feeds_lock);
    if (found > 1)
        return err_set(
            e, ERR_INVALID,
            "%u feeds are open, and the save does not say whose position it takes: give loader_state, set "
            "no_loader_state, or open all feeds but the trained one with aside",
            found);
    return found ? FEED_STATE_BYTES : 0;
}

/* ---- closing ---- */

static void source_close(struct feed_source *s)
{
    for (uint32_t i = 0; s->shard_bad && i < s->dataset->table.count; i++)
        free(s->shard_bad[i]);
    free(s->shard_bad);
    free(s->chosen);
    free(s->pattern);
    dataset_local_close(s->local);
    dataset_close(s->dataset);
}

/* Everything but the memory of batches that are out. */
static void stop(struct larder_feed *f)
{
    pthread_mutex_lock(&f->lock);
    f->closing = true;
    pthread_cond_broadcast(&f->space);
    pthread_cond_broadcast(&f->work);
    pthread_cond_broadcast(&f->changed);
    pthread_cond_broadcast(&f->scouting);
    feed_lift_wake(f);
    pthread_mutex_unlock(&f->lock);
    for (uint32_t i = 0; i < f->source_count; i++)
        f->sources[i].dataset->closing = true;
    for (unsigned i = 0; i < f->conn_count; i++)
        conn_stop(f->conns[i]);
    if (f->planner_started)
        pthread_join(f->planner, NULL);
    if (f->scout_started)
        pthread_join(f->scout, NULL);
    for (unsigned i = 0; i < f->worker_count; i++)
        pthread_join(f->workers[i], NULL);
    feed_lift_stop(f);
    feed_report_end(f);
    for (unsigned i = 0; i < f->conn_count; i++)
        conn_close(f->conns[i]); /* whatever was on its way has ended now */
    for (struct list *it; (it = list_pop(&f->retries));)
        free(container_of(it, struct feed_fetch, link));
    feed_local_drop(f);
    feed_chunks_free(f);
    for (struct list *it; (it = list_pop(&f->batches));)
        feed_batch_free(container_of(it, struct larder_batch, link));
    feed_damages_free(f);
    feed_plan_free(&f->plan);
    feed_plan_free(&f->scout_plan);
    feed_plan_free(&f->repair_plan);
    for (uint32_t i = 0; i < f->source_count; i++)
        source_close(&f->sources[i]);
    f->source_count = 0;
}

static void feed_free(struct larder_feed *f)
{
    bool settled = feed_lift_settle(f);
    feed_arena_reset(&f->arena);
    if (f->arena.base)
        pool_give(f->pool, f->arena.base);
    if (settled) {
        pool_destroy(f->pool);
        feed_lift_free(f->lift);
    } else {
        device_keep(f->pool, f->lift);
    }
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
    if (f->enlisted)
        strike_off(f);
    stop(f);
    pthread_mutex_lock(&f->lock);
    bool last = f->batches_out == 0;
    f->closed = true; /* the memory of batches that are still out stays until they are released */
    pthread_mutex_unlock(&f->lock);
    if (last)
        feed_free(f);
}

/* ---- handing out ---- */

/* With the lock held. */
static struct larder_batch *first(struct larder_feed *f)
{
    return list_empty(&f->batches) ? NULL : container_of(f->batches.next, struct larder_batch, link);
}

/* With the lock held: for how long the server's disk was waited for since `before`, on the connection that
 * met it most: connections wait at the same time. */
static double disk_seconds(const struct larder_feed *f, const uint64_t before[FEED_CONNECTIONS_MAX])
{
    uint64_t most = 0;
    for (unsigned i = 0; i < f->conn_count; i++)
        if (f->disk_ms[i] - before[i] > most)
            most = f->disk_ms[i] - before[i];
    return (double)most / 1e3;
}

/* With the lock held: waits a little, and books the time on what the consumer waits for. */
static void wait_for(struct larder_feed *f, const struct larder_batch *b, uint64_t until_ms)
{
    uint64_t begin = clock_ns(), before[FEED_CONNECTIONS_MAX];
    bool local = b && b->fetching == 0 && b->local > 0;
    bool decoding = b && b->asked && !local && b->fetching == 0 && (b->pending > 0 || b->complete);
    memcpy(before, f->disk_ms, sizeof before);
    clock_wait(&f->changed, &f->lock, until_ms);
    double s = (double)(clock_ns() - begin) / 1e9, disk = disk_seconds(f, before);
    if (decoding) {
        f->starved_decode += s;
        return;
    }
    disk = disk < s && !local ? disk : s;
    f->starved_disk += disk;
    f->starved_network += s - disk;
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
    if (b && b->complete && feed_lift_full(f))
        return err_set(
            e, ERR_TIMEOUT,
            "no batch within %u ms: %u batches that were handed out and not released, and those whose "
            "streams have not come so far, hold the ring on the device; release them, or open the feed "
            "with a larger device_depth_bytes",
            timeout_ms, f->batches_out);
    return err_set(e, ERR_TIMEOUT, "no batch within %u ms: %s; call again to go on waiting", timeout_ms,
                   b && b->complete                        ? "it waits for its copies to the device"
                   : b && b->fetching == 0 && b->local > 0 ? "its files are being read"
                   : b && b->fetching == 0                 ? "its chunks are being decoded"
                                                           : "its bytes are on their way from the server");
}

/* With the lock held. */
static void count_out(struct larder_feed *f, const struct larder_batch *b)
{
    for (uint32_t i = 0; i < b->count; i++)
        for (uint32_t k = 0; k < b->samples[i].fields; k++)
            f->bytes_out += b->samples[i].field[k].bytes;
    f->samples_out += b->count;
}

/* With the lock held: 1, or the batch's error, which stays. */
static int hand_out(struct larder_feed *f, struct larder_batch *b, struct larder_batch **out, struct err *e)
{
    if (b->err.class != ERR_NONE) {
        *e = b->err;
        return -b->err.errnum;
    }
    list_del(&b->link);
    f->batches_ahead--;
    f->batches_out++;
    f->epoch = b->slice.next_epoch;
    f->position = b->slice.next_position;
    feed_repair_told(f, b);
    count_out(f, b);
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
    for (uint32_t i = 0; name && i < s->fields; i++)
        if (strcmp(s->field[i].name, name) == 0)
            return &s->field[i];
    return NULL;
}

/* Why the rows do not make up a stack, for the first sample that does not fit. */
static int no_stack(const struct larder_batch *b, size_t i, const char *name, const struct larder_field *row,
                    const struct larder_field *first, struct err *e)
{
    char key[128];
    const struct larder_sample *s = &b->samples[i];
    const struct larder_dataset *d = b->feed->sources[s->dataset].dataset;
    err_quote(key, sizeof key, s->key, strlen(s->key));
    err_clear(e);
    if (row && first && row->bytes == first->bytes)
        return err_set(e, ERR_INVALID, "%s",
                       b->feed->contiguous
                           ? "a substitute of the same size stands outside of the batch's memory"
                           : "the fields lie where samples put them: open the feed with contiguous");
    if (!row)
        return err_set(e, ERR_INVALID,
                       "dataset \"%s\", shard \"%s\", sample %" PRIu64 " \"%s\" has no field \"%s\"", d->name,
                       d->table.shards[s->shard].name, s->number, key, name);
    return err_set(e, ERR_INVALID,
                   "dataset \"%s\", shard \"%s\", sample %" PRIu64
                   " \"%s\": field \"%s\" has %zu bytes, and %zu in the "
                   "first sample of the batch: only fields of one size can be stacked",
                   d->name, d->table.shards[s->shard].name, s->number, key, name, row->bytes, first->bytes);
}

int larder_batch_stack(const struct larder_batch *b, const char *field, const void **data, size_t *bytes,
                       size_t *rows, struct larder_error *error)
{
    struct err e = {0};
    const struct larder_field *first = b->count ? larder_sample_field(b->samples, field) : NULL;
    *data = first ? first->data : NULL;
    *bytes = first ? first->bytes : 0;
    *rows = b->count;
    int rc = client_enter(b->feed->client, &e);
    if (rc == 0 && !field)
        rc = err_set(&e, ERR_INVALID, "the name of the field is NULL");
    for (size_t i = 0; rc == 0 && i < b->count; i++) {
        const struct larder_field *row = larder_sample_field(&b->samples[i], field);
        if (!row || !first || row->bytes != first->bytes ||
            (const uint8_t *)row->data != (const uint8_t *)*data + i * *bytes)
            rc = no_stack(b, i, field, row, first, &e);
    }
    return client_leave(rc, &e, error);
}

void larder_batch_release(struct larder_batch *b)
{
    if (!b || b->feed->pid != getpid()) /* who held the lock at fork is not there */
        return;
    struct larder_feed *f = b->feed;
    pthread_mutex_lock(&f->lock);
    bool gone = --b->references == 0; /* else tensors that were made of it stay */
    if (gone)
        feed_batch_free(b);
    f->batches_out -= gone;
    bool last = gone && f->closed && f->batches_out == 0;
    pthread_cond_signal(&f->space);
    pthread_mutex_unlock(&f->lock);
    if (last)
        feed_free(f);
}

/* ---- state ---- */

int larder_feed_state(struct larder_feed *f, uint8_t state[LARDER_STATE_BYTES])
{
    int rc = client_enter(f->client, NULL);
    if (rc < 0)
        return rc;
    state_now(f, state);
    return FEED_STATE_BYTES;
}

int larder_batch_state(const struct larder_batch *b, uint8_t state[LARDER_STATE_BYTES])
{
    int rc = client_enter(b->feed->client, NULL);
    if (rc < 0)
        return rc;
    state_at(b->feed, b->slice.next_epoch, b->slice.next_position, state);
    return FEED_STATE_BYTES;
}

void feed_figures(const struct larder_feed *f, struct larder_feed_info *i)
{
    i->epoch = f->epoch;
    i->position = f->position;
    i->samples_out = f->samples_out;
    i->bytes_out = f->bytes_out;
    i->skipped = f->skipped;
    i->substituted = f->substituted;
    i->bytes_in_flight = f->bytes_in_flight;
    list_for_each (it, &f->batches) {
        const struct larder_batch *b = container_of(it, struct larder_batch, link);
        i->batches_ready += b->ready;
        i->bytes_ready += b->ready ? b->data_bytes : 0;
    }
    i->starved_seconds.network = f->starved_network;
    i->starved_seconds.disk = f->starved_disk;
    i->starved_seconds.decode = f->starved_decode;
    i->starved_seconds.consumer = f->starved_consumer;
}

/* Of what comes from the server, and of what does not. */
static void tell_sources(struct larder_feed *f, char *out, size_t size)
{
    bool imported = false, remote = false;
    size_t n = 0;
    *out = '\0';
    for (uint32_t k = 0; k < f->source_count && n < size; k++) {
        const struct feed_source *s = &f->sources[k];
        imported |= !s->dataset->published;
        remote |= s->dataset->published && !s->local;
        if (s->local)
            n += (size_t)snprintf(out + n, size - n, "%sfiles of this machine in %s", n ? "; " : "",
                                  dataset_local_folder(s->local));
    }
    if (n < size && (imported || remote))
        snprintf(out + n, size - n, "%s%s", n ? "; " : "",
                 imported ? conn_paths(f->conns, f->conn_count, client_conn(f->client)) : "TLS 1.3 over TCP");
}

void feed_path(struct larder_feed *f, char *out, size_t size)
{
    tell_sources(f, out, size);
    size_t told = strlen(out);
    if (f->lift)
        snprintf(out + told, size - told, " -> pinned host memory -> CUDA device %d", feed_lift_device(f));
}

int larder_feed_info(struct larder_feed *f, struct larder_feed_info *out)
{
    int rc = client_enter(f->client, NULL);
    if (rc < 0)
        return rc;
    struct larder_feed_info i = {.size = sizeof i,
                                 .samples = f->plan.samples,
                                 .version = f->source_count == 1 ? f->identity.version : 0,
                                 .batches_per_epoch = f->batches_per_epoch};
    for (uint32_t k = 0; k < f->source_count; k++)
        i.shards += f->sources[k].dataset->table.count;
    feed_path(f, i.path, sizeof i.path);
    pthread_mutex_lock(&f->lock);
    feed_figures(f, &i);
    pthread_mutex_unlock(&f->lock);
    memcpy(out, &i, out->size && out->size < sizeof i ? out->size : sizeof i);
    return 0;
}

int larder_feed_damage(struct larder_feed *f, size_t i, struct larder_feed_damage *out)
{
    int rc = client_enter(f->client, NULL);
    if (rc < 0)
        return rc;
    pthread_mutex_lock(&f->lock);
    if (i < f->damage_count)
        *out = f->damages[i];
    else
        rc = -ENOENT;
    pthread_mutex_unlock(&f->lock);
    return rc;
}
