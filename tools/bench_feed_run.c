/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Accelerators at work. All take their first batch, wait for each other, and are measured from there on until
 * the time is up, each until the end of the step that it is in.
 */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "format/order.h"
#include "tools/bench_feed.h"

#define SEED 1

struct team {
    const struct feed_run *run;
    pthread_barrier_t barrier; /* accelerators and the one who measures */
    atomic_bool failed;
    double until_s; /* fixed between two barriers */
};

struct accelerator {
    pthread_t thread;
    struct team *team;
    uint32_t rank;
    struct larder_feed *feed;
    struct larder_dataset *dataset; /* single reads */
    struct order *order;
    uint8_t *room;
    uint64_t position;                   /* of the next global batch: single reads */
    uint64_t samples, bytes, steps;      /* handed out since the measurement began */
    double begun_s, ended_s, waited_s;   /* waited: for single reads */
    struct larder_feed_info then, after; /* at begin and end of it */
    struct larder_error error;
    int status; /* 0, or an exit code */
};

/* ---- a batch ---- */

static int check_field(struct accelerator *a, uint64_t number, const void *p, size_t n)
{
    const struct feed_set *s = a->team->run->set;
    uint64_t found = UINT64_MAX;
    if (n >= sizeof found)
        memcpy(&found, p, sizeof found);
    if (s->samples > 0 && (found != number || number >= s->samples || n != s->sizes[number]))
        return fail_with(STATUS_DAMAGE, "sample %llu came as %zu bytes that begin with number %llu",
                         (unsigned long long)number, n, (unsigned long long)found);
    a->bytes += n;
    return STATUS_OK;
}

static int take_batch(struct accelerator *a)
{
    const struct feed_set *s = a->team->run->set;
    struct larder_batch *b;
    struct larder_sample sample;
    int rc = larder_feed_next(a->feed, -1, &b, &a->error), status = STATUS_OK;
    if (rc <= 0)
        return rc < 0 ? fail(&a->error) : fail_with(STATUS_OTHER, "the feed ended");
    for (size_t i = 0; status == STATUS_OK && larder_batch_sample(b, i, &sample) == 0; i++)
        for (uint32_t k = 0; status == STATUS_OK && k < sample.fields; k++)
            status = check_field(a, sample.shard * s->per_shard + sample.number, sample.field[k].data,
                                 sample.field[k].bytes);
    a->samples += larder_batch_samples(b);
    larder_batch_release(b); /* copied to the device by now */
    return status;
}

/* The same samples, each with a request of its own. */
static int take_singly(struct accelerator *a)
{
    const struct feed_run *r = a->team->run;
    const struct feed_set *s = r->set;
    double began = clock_now_s();
    for (uint32_t i = 0; i < s->workload.batch; i++) {
        uint64_t mine = a->position + (uint64_t)a->rank * s->workload.batch + i;
        struct order_place at = order_at(a->order, mine);
        uint64_t number = at.shard * s->per_shard + at.sample;
        int64_t n = larder_dataset_read(a->dataset, at.shard, s->offsets[number], a->room, s->sizes[number],
                                        &a->error);
        int status = n < 0 ? fail(&a->error) : check_field(a, number, a->room, (size_t)n);
        if (status != STATUS_OK)
            return status;
    }
    a->samples += s->workload.batch;
    a->position += (uint64_t)r->accelerators * s->workload.batch;
    a->waited_s += clock_now_s() - began;
    return STATUS_OK;
}

/* Takes a batch and computes; what the thread oversleeps is not the accelerator's work, and counts as lost.
 */
static int step(struct accelerator *a)
{
    const struct workload *w = &a->team->run->set->workload;
    int status = a->feed ? take_batch(a) : take_singly(a);
    double until = clock_now_s() + w->compute_s;
    struct timespec t = {.tv_sec = (time_t)until, .tv_nsec = (long)((until - floor(until)) * 1e9)};
    while (w->compute_s > 0 && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
    return status;
}

/* ---- an accelerator's life ---- */

static int open_feed(struct accelerator *a)
{
    const struct feed_run *r = a->team->run;
    struct larder_feed_options o = LARDER_INIT(larder_feed_options);
    o.dataset = r->dataset;
    o.seed = SEED;
    o.window_shards = r->window_shards;
    o.rank = a->rank;
    o.world = r->accelerators;
    o.global_batch = r->accelerators * r->set->workload.batch;
    o.epochs = 1 << 20;
    o.depth_bytes = r->depth_bytes;
    o.connections = (unsigned)r->connections;
    return larder_feed_open(r->client, &o, &a->feed, &a->error) < 0 ? fail(&a->error) : STATUS_OK;
}

static int open_singly(struct accelerator *a)
{
    const struct feed_run *r = a->team->run;
    const struct feed_set *s = r->set;
    struct err e = {0};
    uint64_t *counts = need(calloc(s->shards, sizeof *counts)), largest = 1;
    for (uint32_t i = 0; i < s->shards; i++)
        counts[i] = i + 1 < s->shards ? s->per_shard : s->samples - (uint64_t)i * s->per_shard;
    for (uint64_t i = 0; i < s->samples; i++)
        largest = s->sizes[i] > largest ? s->sizes[i] : largest;
    a->room = need(malloc(largest));
    uint32_t window = r->window_shards == UINT32_MAX ? 0 : r->window_shards;
    int rc = order_create(counts, s->shards, SEED, window, &a->order, &e);
    free(counts);
    if (rc < 0)
        return fail_err(&e);
    if (larder_dataset_open(r->client, r->dataset, 0, &a->dataset, &a->error) < 0)
        return fail(&a->error);
    return STATUS_OK;
}

static void look(struct accelerator *a, struct larder_feed_info *out)
{
    *out = LARDER_INIT(larder_feed_info);
    if (a->feed)
        (void)larder_feed_info(a->feed, out);
}

static void work(struct accelerator *a)
{
    a->samples = a->bytes = 0;
    a->waited_s = 0;
    look(a, &a->then);
    a->begun_s = a->ended_s = clock_now_s();
    while (a->ended_s < a->team->until_s && !atomic_load(&a->team->failed)) {
        a->status = step(a);
        a->ended_s = clock_now_s();
        a->steps++;
        if (a->status != STATUS_OK)
            atomic_store(&a->team->failed, true);
    }
    look(a, &a->after);
}

static void *live(void *arg)
{
    struct accelerator *a = arg;
    struct team *t = a->team;
    a->status = t->run->single ? open_singly(a) : open_feed(a);
    if (a->status == STATUS_OK)
        a->status = step(a);
    if (a->status != STATUS_OK)
        atomic_store(&t->failed, true);
    pthread_barrier_wait(&t->barrier);
    pthread_barrier_wait(&t->barrier); /* until_s is set between these */
    work(a);
    pthread_barrier_wait(&t->barrier);
    larder_feed_close(a->feed);
    larder_dataset_close(a->dataset);
    order_free(a->order);
    free(a->room);
    return NULL;
}

/* ---- figures ---- */

static void add_up(const struct team *t, const struct accelerator *all, struct feed_figures *f)
{
    const struct workload *w = &t->run->set->workload;
    double compute = 0, total = 0;
    for (uint32_t i = 0; i < t->run->accelerators; i++) {
        const struct accelerator *a = &all[i];
        double s = a->ended_s - a->begun_s, mean = (double)a->bytes / (double)a->steps;
        double came = (double)a->bytes + mean * ((double)a->after.batches_ready - a->then.batches_ready);
        came = fmax(came, 0);
        compute += w->compute_s * (double)a->steps;
        total += s;
        f->gbps += came / s / 1e9;
        f->samples_per_s += came / mean * w->batch / s;
        f->starved_network +=
            a->after.starved_seconds.network - a->then.starved_seconds.network + a->waited_s;
        f->starved_disk += a->after.starved_seconds.disk - a->then.starved_seconds.disk;
        f->starved_decode += a->after.starved_seconds.decode - a->then.starved_seconds.decode;
        f->starved_consumer += a->after.starved_seconds.consumer - a->then.starved_seconds.consumer;
    }
    f->utilisation = compute / total;
    if (all[0].feed)
        snprintf(f->path, sizeof f->path, "%s", all[0].after.path);
}

static int start(struct team *t, struct accelerator *all)
{
    for (uint32_t i = 0; i < t->run->accelerators; i++) {
        all[i] = (struct accelerator){.team = t, .rank = i};
        if (pthread_create(&all[i].thread, NULL, live, &all[i]) != 0) {
            fail_with(STATUS_OTHER, "thread %u of %u cannot be started", i, t->run->accelerators);
            exit(STATUS_OTHER); /* those that run wait at a barrier that nobody will open */
        }
    }
    return STATUS_OK;
}

int feed_run(const struct feed_run *r, struct feed_figures *f)
{
    struct team t = {.run = r};
    struct accelerator *all = need(calloc(r->accelerators, sizeof *all));
    *f = (struct feed_figures){0};
    pthread_barrier_init(&t.barrier, NULL, r->accelerators + 1);
    int status = start(&t, all);
    pthread_barrier_wait(&t.barrier);
    double server = dev_cpu_s(r->server), client = cpu_now_s(), begun = clock_now_s();
    t.until_s = begun + r->seconds;
    pthread_barrier_wait(&t.barrier);
    pthread_barrier_wait(&t.barrier);
    double took = clock_now_s() - begun;
    client = cpu_now_s() - client;
    server = server < 0 ? -1 : dev_cpu_s(r->server) - server;
    bool failed = atomic_load(&t.failed);
    if (!failed)
        add_up(&t, all, f);
    for (uint32_t i = 0; i < r->accelerators; i++) {
        pthread_join(all[i].thread, NULL);
        status = status == STATUS_OK ? all[i].status : status;
    }
    f->client_cpu_s_per_gb = client / (f->gbps * took);
    f->server_cpu_s_per_gb = server < 0 ? -1 : server / (f->gbps * took);
    pthread_barrier_destroy(&t.barrier);
    free(all);
    return status;
}
