/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batches in device memory. A thread copies each batch, as soon as all of it is in host memory and in the
 * order of handing out, into a ring on the device, and makes it ready when its copies are given: consumers'
 * streams wait for the rest (larder_batch_wait). Host memory goes back to its ring when the copies are done,
 * device memory when the batch was released and the streams that it was released behind have come so far.
 *
 * Copies have a stream of their own that waits for nothing but itself, so they overlap with whatever
 * consumers compute. What was released is looked at by the same thread; no copy waits for a consumer's
 * stream.
 */
#include "client/feed_lift.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "client/device.h"
#include "client/feed_private.h"

#define LOOK_MIN_NS 20000u /* between looks at events; twice as long after each in vain */
#define LOOK_MAX_NS 500000u

struct flight { /* host memory that is being copied from */
    struct list link;
    struct memory_event *event;
    struct feed_region *region; /* NULL: a mapping of its own */
    void *own;
    size_t own_bytes;
};

struct feed_return { /* device memory that consumers' streams may still read */
    struct list link;
    struct memory_event *event;
    struct feed_region *region;
};

struct feed_lift {
    struct larder_feed *feed;
    struct memory *memory;
    struct memory_stream *copies, *releases; /* releases: comes after consumers' streams, and does nothing */
    void *base;
    struct feed_arena arena; /* of device memory */
    pthread_t thread;
    bool started, stuck;
    pthread_cond_t work;
    bool full;           /* the next batch waits for room on the device */
    struct list flights; /* in order */
    struct list returns; /* likewise */
    unsigned wait_ms;
};

/* ---- copying ---- */

static bool is_outside(const struct larder_batch *b, const struct larder_field *f)
{
    const uint8_t *p = f->data;
    return f->bytes > 0 && (p < b->data || p >= b->data + b->data_bytes);
}

/* What a batch takes on the device: its memory, and substitutes that have their own. */
static size_t lifted_bytes(const struct larder_batch *b)
{
    size_t n = feed_align(b->data_bytes);
    for (uint32_t i = 0; i < b->count; i++)
        for (uint32_t k = 0; k < b->samples[i].fields; k++)
            if (is_outside(b, &b->samples[i].field[k]))
                n += feed_align(b->samples[i].field[k].bytes);
    return n;
}

static int copy_main(struct feed_lift *l, const struct larder_batch *b, uint8_t *to, struct err *e)
{
    int rc = 0;
    for (size_t at = 0, n; rc == 0 && at < b->data_bytes; at += n) {
        n = b->data_bytes - at;
        if (b->region)
            n = pool_run(l->feed->pool, b->data + at, n);
        rc = memory_copy(l->copies, MEMORY_IN, to + at, b->data + at, n, e);
    }
    return rc;
}

/* Fields point to the device from then on. */
static int copy_fields(struct feed_lift *l, struct larder_batch *b, uint8_t *to, struct err *e)
{
    uint8_t *next = to + feed_align(b->data_bytes);
    int rc = 0;
    for (uint32_t i = 0; i < b->count; i++)
        for (uint32_t k = 0; k < b->samples[i].fields; k++) {
            struct larder_field *f = (struct larder_field *)&b->samples[i].field[k]; /* the batch's own */
            if (!is_outside(b, f)) {
                f->data = f->bytes > 0 ? to + ((const uint8_t *)f->data - b->data) : to;
                continue;
            }
            rc = rc < 0 ? rc : memory_copy(l->copies, MEMORY_IN, next, f->data, f->bytes, e);
            f->data = next;
            next += feed_align(f->bytes);
        }
    return rc;
}

static int lift_events(struct feed_lift *l, struct larder_batch *b, struct flight **out, struct err *e)
{
    struct flight *f = calloc(1, sizeof *f);
    if (!f)
        return err_set(e, ERR_NO_MEMORY, "no memory for a batch");
    list_init(&f->link);
    int rc = memory_event_create(l->memory, &f->event, e);
    if (rc == 0)
        rc = memory_event_create(l->memory, &b->event, e);
    if (rc < 0) {
        memory_event_destroy(f->event);
        free(f);
        return rc;
    }
    *out = f;
    return 0;
}

/* Without the lock. *f: owns the batch's host memory then, also where it fails; NULL: it is still the
 * batch's. *tracked: the events stand behind all that was given. */
static int give(struct feed_lift *l, struct larder_batch *b, uint8_t *to, struct flight **f, bool *tracked,
                struct err *e)
{
    struct err ignored;
    int rc = lift_events(l, b, f, e);
    if (rc < 0)
        return rc;
    rc = copy_main(l, b, to, e);
    if (rc == 0)
        rc = copy_fields(l, b, to, e);
    int recorded = memory_event_record((*f)->event, l->copies, rc < 0 ? &ignored : e);
    *tracked = recorded == 0 || memory_event_record((*f)->event, l->copies, NULL) == 0;
    rc = rc < 0 ? rc : recorded;
    return rc < 0 ? rc : memory_event_record(b->event, l->copies, e);
}

/* ---- memory that comes back ---- */

/* With the lock held. */
static void flight_end(struct feed_lift *l, struct flight *f)
{
    list_del(&f->link);
    if (f->region)
        feed_arena_give(&l->feed->arena, f->region);
    else
        munmap(f->own, f->own_bytes);
    memory_event_destroy(f->event);
    free(f);
    pthread_cond_signal(&l->feed->space);
}

static void return_end(struct feed_lift *l, struct feed_return *r)
{
    list_del(&r->link);
    feed_arena_give(&l->arena, r->region);
    memory_event_destroy(r->event);
    free(r);
}

/* An event that cannot be asked any more is over with its device, and else only later. */
static bool is_over(struct feed_lift *l, struct memory_event *v)
{
    int rc = memory_event_query(v, NULL);
    return rc == 1 || (rc < 0 && memory_lost(l->memory, NULL) < 0);
}

/* With the lock held. True: something came back. */
static bool reap(struct feed_lift *l)
{
    bool some = false;
    while (!list_empty(&l->flights)) {
        struct flight *f = container_of(l->flights.next, struct flight, link);
        if (!is_over(l, f->event))
            break;
        flight_end(l, f);
        some = true;
    }
    while (!list_empty(&l->returns)) {
        struct feed_return *r = container_of(l->returns.next, struct feed_return, link);
        if (!is_over(l, r->event))
            break;
        return_end(l, r);
        some = true;
    }
    return some;
}

void feed_lift_drop(struct larder_batch *b)
{
    struct feed_lift *l = b->feed->lift;
    if (!b->lifted)
        return;
    if (b->after) {
        b->after->region = b->lifted;
        list_add_tail(&l->returns, &b->after->link);
    } else {
        feed_arena_give(&l->arena, b->lifted);
    }
    b->after = NULL;
    b->lifted = NULL;
    memory_event_destroy(b->event);
    pthread_cond_signal(&l->work);
}

/* ---- the thread ---- */

/* With the lock held: the first batch that is not ready, if all of it is here. */
static struct larder_batch *next_complete(struct larder_feed *f)
{
    list_for_each (it, &f->batches) {
        struct larder_batch *b = container_of(it, struct larder_batch, link);
        if (!b->ready)
            return b->complete ? b : NULL;
    }
    return NULL;
}

static void fail(struct feed_lift *l, struct larder_batch *b, const struct err *e)
{
    b->err = *e;
    err_prepend(&b->err, "a batch to device %d", memory_ordinal(l->memory));
    b->ready = true;
    pthread_cond_broadcast(&l->feed->changed);
}

/* With the lock held: its host memory is the flight's from now on. */
static void take_off(struct feed_lift *l, struct larder_batch *b, struct flight *f, bool tracked)
{
    f->region = b->region;
    f->own = b->region ? NULL : b->data;
    f->own_bytes = b->region ? 0 : b->data_bytes;
    b->region = NULL;
    b->data = NULL;
    if (tracked || memory_lost(l->memory, NULL) < 0) {
        list_add_tail(&l->flights, &f->link);
        return;
    }
    l->stuck = true; /* nobody knows when the device is done with it: it stays */
    memory_event_destroy(f->event);
    free(f);
}

/* With the lock held, which is free meanwhile. True: something was done. */
static bool lift_next(struct feed_lift *l)
{
    struct larder_feed *f = l->feed;
    struct larder_batch *b = next_complete(f);
    struct err e = {0};
    if (!b)
        return false;
    size_t need = lifted_bytes(b);
    if (need > l->arena.bytes) {
        err_set(&e, ERR_LIMIT,
                "it has %zu bytes, the ring there %zu; open the feed with a larger "
                "device_depth_bytes",
                need, l->arena.bytes);
        fail(l, b, &e);
        return true;
    }
    struct feed_region *r = calloc(1, sizeof *r);
    l->full = r && !feed_arena_take(&l->arena, need, r);
    if (!r || l->full) {
        free(r);
        return false;
    }
    pthread_mutex_unlock(&f->lock);
    struct flight *flight = NULL;
    bool tracked = false;
    int rc = give(l, b, r->at, &flight, &tracked, &e);
    pthread_mutex_lock(&f->lock);
    b->lifted = r;
    if (flight)
        take_off(l, b, flight, tracked);
    if (rc < 0) {
        fail(l, b, &e);
        return true;
    }
    b->ready = true;
    pthread_cond_broadcast(&f->changed);
    return true;
}

static void *lift_batches(void *arg)
{
    struct feed_lift *l = arg;
    struct larder_feed *f = l->feed;
    unsigned pause_ns = LOOK_MIN_NS;
    pthread_setname_np(pthread_self(), "larder-lift");
    pthread_mutex_lock(&f->lock);
    while (!f->closing) {
        bool some = reap(l);
        some |= lift_next(l);
        if (some) {
            pause_ns = LOOK_MIN_NS;
        } else if (!list_empty(&l->flights) || !list_empty(&l->returns)) {
            pthread_mutex_unlock(&f->lock);
            nanosleep(&(struct timespec){.tv_nsec = pause_ns}, NULL);
            pause_ns = 2 * pause_ns < LOOK_MAX_NS ? 2 * pause_ns : LOOK_MAX_NS;
            pthread_mutex_lock(&f->lock);
        } else {
            pthread_cond_wait(&l->work, &f->lock); /* a batch is complete, one is released, or it ends */
        }
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

void feed_lift_wake(struct larder_feed *f)
{
    if (f->lift)
        pthread_cond_signal(&f->lift->work);
}

bool feed_lift_full(const struct larder_feed *f)
{
    return f->lift && f->lift->full;
}

int feed_lift_device(const struct larder_feed *f)
{
    return memory_ordinal(f->lift->memory);
}

/* ---- life ---- */

int feed_lift_create(struct larder_feed *f, int device, uint64_t bytes, struct err *e)
{
    struct feed_lift *l = calloc(1, sizeof *l);
    if (!l)
        return err_set(e, ERR_NO_MEMORY, "no memory for a feed");
    f->lift = l;
    l->feed = f;
    l->wait_ms = client_options(f->client)->request_timeout_ms;
    list_init(&l->flights);
    list_init(&l->returns);
    list_init(&l->arena.regions);
    pthread_cond_init(&l->work, NULL);
    size_t ring = (size_t)(bytes / FEED_ALIGN * FEED_ALIGN);
    int rc = memory_open(MEMORY_CUDA, device, &l->memory, e);
    if (rc == 0)
        rc = memory_stream_create(l->memory, &l->copies, e);
    if (rc == 0)
        rc = memory_stream_create(l->memory, &l->releases, e);
    if (rc == 0)
        rc = memory_alloc(l->memory, ring, &l->base, e);
    if (rc == 0)
        rc = pool_register(f->pool, l->memory, e);
    if (rc < 0)
        return err_prepend(e, "a feed to device %d", device);
    feed_arena_init(&l->arena, l->base, ring);
    return 0;
}

int feed_lift_start(struct larder_feed *f)
{
    int rc = f->lift ? pthread_create(&f->lift->thread, NULL, lift_batches, f->lift) : 0;
    if (f->lift)
        f->lift->started = rc == 0;
    return rc;
}

void feed_lift_stop(struct larder_feed *f)
{
    if (f->lift && f->lift->started)
        pthread_join(f->lift->thread, NULL);
}

/* Nothing of ours, and nothing that batches were released behind, is under way on the device. */
static bool settle(struct feed_lift *l)
{
    struct memory_stream *streams[] = {l->copies, l->releases};
    for (unsigned i = 0; i < 2; i++)
        if (streams[i] && memory_stream_wait(streams[i], l->wait_ms, NULL) < 0 &&
            memory_lost(l->memory, NULL) == 0)
            return false;
    return !l->stuck;
}

bool feed_lift_settle(struct larder_feed *f)
{
    struct feed_lift *l = f->lift;
    if (!l)
        return true;
    bool settled = !l->memory || settle(l);
    for (struct list *it; (it = list_pop(&l->flights)) != NULL;)
        flight_end(l, container_of(it, struct flight, link));
    for (struct list *it; (it = list_pop(&l->returns)) != NULL;)
        return_end(l, container_of(it, struct feed_return, link));
    feed_arena_reset(&l->arena);
    memory_stream_destroy(l->copies);
    memory_stream_destroy(l->releases);
    pthread_cond_destroy(&l->work);
    return settled;
}

void feed_lift_free(struct feed_lift *l)
{
    if (!l)
        return;
    if (l->memory)
        memory_free(l->memory, l->base);
    memory_close(l->memory);
    free(l);
}

/* ---- consumers ---- */

int larder_batch_wait(struct larder_batch *b, void *stream, struct larder_error *error)
{
    struct err e = {0};
    struct larder_feed *f = b->feed;
    int rc = client_enter(f->client, &e);
    if (rc < 0 || !b->event)
        return client_leave(rc, &e, error);
    pthread_mutex_lock(&f->lock);
    rc = memory_caller_after(stream, b->event, &e);
    pthread_mutex_unlock(&f->lock);
    return client_leave(rc, &e, error);
}

/* With the lock held: the batch's memory is not used again before all that the stream was given is done. */
static int release_behind(struct feed_lift *l, struct larder_batch *b, void *stream, struct err *e)
{
    struct feed_return *r = b->after;
    int rc = 0;
    if (!r) {
        r = calloc(1, sizeof *r);
        if (!r)
            return err_set(e, ERR_NO_MEMORY, "no memory for releasing a batch");
        list_init(&r->link);
        rc = memory_event_create(l->memory, &r->event, e);
    }
    if (rc == 0)
        rc = memory_stream_after_caller(l->releases, stream, e);
    if (rc == 0)
        rc = memory_event_record(r->event, l->releases, e);
    if (rc == 0) {
        b->after = r;
    } else if (r != b->after) {
        memory_event_destroy(r->event);
        free(r);
    }
    return rc;
}

int larder_batch_release_stream(struct larder_batch *b, void *stream, struct larder_error *error)
{
    struct err e = {0};
    struct larder_feed *f = b->feed;
    int rc = client_enter(f->client, &e);
    if (rc < 0)
        return client_leave(rc, &e, error);
    pthread_mutex_lock(&f->lock);
    if (b->lifted)
        rc = release_behind(f->lift, b, stream, &e);
    pthread_mutex_unlock(&f->lock);
    if (rc == 0)
        larder_batch_release(b);
    return client_leave(rc, &e, error);
}
