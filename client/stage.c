/* SPDX-License-Identifier: Apache-2.0 */
#include "client/stage.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/clock.h"
#include "client/opened.h"

#define COPIERS_MAX      4u
#define COPY_ALONE_BYTES (32u << 20) /* a snapshot below this is not worth other threads */
#define LOOK_MIN_NS      20000u      /* between looks at events; twice as long after each in vain */
#define LOOK_MAX_NS      500000u
#define QUERIES_MAX      2000u /* that fail, of one event, while the device does not count as lost */

struct flight { /* the copies of a chunk, given to a stream */
    struct list link;
    struct memory_event *event;
    uint8_t *slot;
    uint32_t chunk;
    unsigned failed_queries;
    bool spoilt; /* not all of it was given: the slot only goes back */
};

struct lane { /* what a save does with one device */
    struct device *device;
    struct memory_event *last; /* behind all copies, once none is left */
    uint32_t left;       /* chunks whose copies are not given; written with the device's lock held too */
    struct list flights; /* in order */
    struct list idle;    /* to be used again */
};

/* ---- chunks and slots ---- */

void stage_check(struct larder_save *s)
{
    if (s->staged_ns || s->copied < s->snapshot.chunk_count)
        return;
    s->staged_ns = clock_ns();
    if (s->state == LARDER_SAVE_OPEN)
        s->state = LARDER_SAVE_STAGED;
    pthread_cond_broadcast(&s->saver->changed);
}

/* With the lock held. */
static void chunk_copied(struct larder_save *s, uint32_t chunk, uint8_t *slot)
{
    s->copied++;
    saver_queue(s->saver, s, chunk, slot);
    stage_check(s);
}

static struct lane *lane_of(const struct larder_save *s, uint32_t chunk)
{
    const struct device *d = snapshot_device(&s->snapshot, chunk);
    for (unsigned i = 0; d && i < s->lane_count; i++)
        if (s->lanes[i].device == d)
            return &s->lanes[i];
    return NULL;
}

/* With the lock held: the copies that a device was given do not come. The network has bounds of its own. */
static void fail_if_stuck(struct larder_save *s, uint32_t waited_ms)
{
    struct err e;
    for (unsigned i = 0; i < s->lane_count; i++) {
        if (list_empty(&s->lanes[i].flights))
            continue;
        err_set(
            &e, ERR_TIMEOUT,
            "for %u ms no staging memory was free: %zu MiB of it wait for copies from device %d, which come "
            "after all that the tensors' streams were given; let these streams get on while "
            "larder_save_submit waits, or open the client with more staging_bytes",
            waited_ms, (s->slots * STAGING_SLOT_BYTES) >> 20, memory_ordinal(s->lanes[i].device->memory));
        save_fail(s, &e);
        return;
    }
}

/* With the lock held: a slot, and the chunk to put into it, up to the last one of host memory. The slot comes
 * first, so that the lowest chunk that is not copied always has one, and workers, which need chunks in order,
 * never wait for a chunk without. */
static uint8_t *next_copy(struct larder_save *s, uint32_t *chunk)
{
    struct saver *v = s->saver;
    uint8_t *slot = NULL;
    uint32_t bound = s->client->options.request_timeout_ms;
    uint64_t until = clock_ms() + bound;
    while (!s->failed && s->next_copy < s->host_end && !(slot = pool_take(s->client->staging))) {
        saver_go(v, s);
        if (clock_wait(&v->changed, &v->lock, until)) /* workers give slots back, or the save fails */
            continue;
        fail_if_stuck(s, bound);
        until = clock_ms() + bound;
    }
    if (!slot)
        return NULL;
    *chunk = s->next_copy++;
    return slot;
}

/* ---- device memory ---- */

static void flight_free(struct flight *f)
{
    memory_event_destroy(f->event);
    free(f);
}

static struct flight *flight_make(struct lane *l, struct err *e)
{
    struct flight *f = calloc(1, sizeof *f);
    if (!f) {
        err_set(e, ERR_NO_MEMORY, "no memory for a copy");
        return NULL;
    }
    list_init(&f->link);
    if (memory_event_create(l->device->memory, &f->event, e) < 0) {
        free(f);
        return NULL;
    }
    return f;
}

/* With the lock held: nobody knows when the device stops writing there. */
static void slot_lost(struct larder_save *s)
{
    s->client->staging_lost = true;
}

/* With the lock held: of a slot that no worker gets. */
static void slot_back(struct larder_save *s, uint8_t *slot)
{
    pool_give(s->client->staging, slot);
    pthread_cond_broadcast(&s->saver->changed);
}

/* With the device's lock held: the chunk's copies, and the events behind them. *tracked: f->event tells when
 * what was given is done. */
static int give_copies(struct larder_save *s, struct lane *l, struct flight *f, bool *tracked, struct err *e)
{
    struct err ignored;
    int rc = snapshot_copy(&s->snapshot, f->chunk, f->slot, e);
    f->spoilt = rc < 0;
    int recorded = memory_event_record(f->event, l->device->out, rc < 0 ? &ignored : e);
    *tracked = recorded == 0 || memory_event_record(f->event, l->device->out, &ignored) == 0;
    if (rc == 0)
        rc = recorded;
    if (rc == 0 && l->left == 1)
        rc = memory_event_record(l->last, l->device->out, e);
    return rc < 0 ? err_prepend(e, "copying from device %d", memory_ordinal(l->device->memory)) : 0;
}

/* Without the lock. */
static void give(struct larder_save *s, struct lane *l, struct flight *f, uint32_t chunk, uint8_t *slot)
{
    struct saver *v = s->saver;
    struct err e;
    bool tracked = false;
    int rc = -ENOMEM;
    pthread_mutex_lock(&l->device->lock);
    f = f ? f : flight_make(l, &e);
    if (f) {
        f->chunk = chunk;
        f->slot = slot;
        f->failed_queries = 0;
        rc = give_copies(s, l, f, &tracked, &e);
    }
    bool gone = memory_lost(l->device->memory, NULL) < 0;
    pthread_mutex_lock(&v->lock);
    l->left--;
    if (rc < 0)
        save_fail(s, &e);
    if (tracked) {
        list_add_tail(&l->flights, &f->link);
    } else {
        if (f && !gone)
            slot_lost(s);
        else
            slot_back(s, slot);
        if (f)
            list_add_tail(&l->idle, &f->link);
    }
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
    pthread_mutex_unlock(&l->device->lock);
}

/* With the lock held, which is free meanwhile: one chunk, by whatever its memory needs. */
static void copy_one(struct larder_save *s, uint32_t chunk, uint8_t *slot)
{
    struct saver *v = s->saver;
    struct lane *l = lane_of(s, chunk);
    struct list *idle = l ? list_pop(&l->idle) : NULL;
    pthread_mutex_unlock(&v->lock);
    if (l)
        give(s, l, idle ? container_of(idle, struct flight, link) : NULL, chunk, slot);
    else
        snapshot_take(&s->snapshot, chunk, slot);
    pthread_mutex_lock(&v->lock);
    if (!l)
        chunk_copied(s, chunk, slot);
}

/* With the lock held: f, the first of its lane, is over. */
static void land(struct larder_save *s, struct lane *l, struct flight *f, bool whole)
{
    list_del(&f->link);
    list_add_tail(&l->idle, &f->link);
    if (whole)
        chunk_copied(s, f->chunk, f->slot);
    else
        slot_back(s, f->slot);
}

/* With the lock held, which is free meanwhile. True: it is over, one way or another. */
static bool look(struct larder_save *s, struct lane *l, struct flight *f)
{
    struct saver *v = s->saver;
    struct err e;
    bool abandon = v->abandon;
    pthread_mutex_unlock(&v->lock);
    int rc = memory_event_query(f->event, &e);
    bool gone = rc < 0 && memory_lost(l->device->memory, NULL) < 0;
    pthread_mutex_lock(&v->lock);
    if (rc < 0) {
        err_prepend(&e, "copying from device %d", memory_ordinal(l->device->memory));
        save_fail(s, &e);
        f->spoilt = true;
    }
    if (rc == 1 || gone) {
        land(s, l, f, rc == 1 && !f->spoilt);
        return true;
    }
    if (!abandon && (rc == 0 || ++f->failed_queries < QUERIES_MAX))
        return false;
    list_del(&f->link);
    list_add_tail(&l->idle, &f->link);
    slot_lost(s);
    return true;
}

/* With the lock held, which is free meanwhile. */
static bool look_all(struct larder_save *s)
{
    bool some = false;
    for (unsigned i = 0; i < s->lane_count; i++) {
        struct lane *l = &s->lanes[i];
        while (!list_empty(&l->flights) && look(s, l, container_of(l->flights.next, struct flight, link)))
            some = true;
    }
    return some;
}

/* With the lock held. */
static bool is_flying(const struct larder_save *s)
{
    for (unsigned i = 0; i < s->lane_count; i++)
        if (!list_empty(&s->lanes[i].flights))
            return true;
    return false;
}

/* With the lock held: will there be more to give? */
static bool more_to_come(const struct larder_save *s)
{
    return s->copying || (!s->failed && s->next_copy < s->snapshot.chunk_count);
}

/* With the lock held: the next chunk, once the caller has left submit. */
static bool give_next(struct larder_save *s)
{
    uint8_t *slot = NULL;
    if (s->copying || s->failed || s->next_copy == s->snapshot.chunk_count ||
        !(slot = pool_take(s->client->staging)))
        return false;
    copy_one(s, s->next_copy++, slot);
    return true;
}

static void *stager(void *arg)
{
    struct larder_save *s = arg;
    struct saver *v = s->saver;
    unsigned pause_ns = LOOK_MIN_NS;
    pthread_setname_np(pthread_self(), "larder-device");
    pthread_mutex_lock(&v->lock);
    while (is_flying(s) || more_to_come(s)) {
        bool some = give_next(s);
        some |= look_all(s);
        if (some) {
            pause_ns = LOOK_MIN_NS;
        } else if (is_flying(s)) {
            pthread_mutex_unlock(&v->lock);
            nanosleep(&(struct timespec){.tv_nsec = pause_ns}, NULL);
            pause_ns = 2 * pause_ns < LOOK_MAX_NS ? 2 * pause_ns : LOOK_MAX_NS;
            pthread_mutex_lock(&v->lock);
        } else if (more_to_come(s)) {
            pthread_cond_wait(&v->changed, &v->lock); /* submit ends, workers give slots back, or it fails */
        }
    }
    s->staging = false;
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
    return NULL;
}

/* ---- beginning and end ---- */

static int lane_add(struct larder_save *s, struct device *d, struct err *e)
{
    struct lane *l = &s->lanes[s->lane_count];
    *l = (struct lane){.device = d};
    list_init(&l->flights);
    list_init(&l->idle);
    s->lane_count++;
    return memory_event_create(d->memory, &l->last, e);
}

/* With the lock held: what is on which device, and how far host memory reaches. */
static int survey(struct larder_save *s, struct err *e)
{
    const struct snapshot *x = &s->snapshot;
    s->lanes = calloc(x->group_count + 1u, sizeof *s->lanes);
    if (!s->lanes)
        return err_set(e, ERR_NO_MEMORY, "no memory for a save");
    for (uint32_t i = 0; i < x->chunk_count; i++) {
        struct device *d = snapshot_device(x, i);
        if (!d) {
            s->host_end = i + 1;
            s->host_bytes += x->chunks[i].bytes;
            continue;
        }
        int rc = lane_of(s, i) ? 0 : lane_add(s, d, e);
        if (rc < 0)
            return rc;
        lane_of(s, i)->left++;
    }
    return 0;
}

/* S14: nothing is copied before what the caller gave to his streams is done. */
static int order(struct larder_save *s, struct err *e)
{
    const struct snapshot *x = &s->snapshot;
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < x->source_count; i++) {
        struct device *d = x->sources[i].device;
        pthread_mutex_lock(&d->lock);
        rc = memory_stream_after_caller(d->out, x->sources[i].stream, e);
        pthread_mutex_unlock(&d->lock);
        if (rc < 0)
            err_prepend(e, "a stream of device %d", memory_ordinal(d->memory));
    }
    return rc;
}

int stage_begin(struct larder_save *s, struct err *e)
{
    pthread_mutex_lock(&s->saver->lock);
    int rc = survey(s, e);
    pthread_mutex_unlock(&s->saver->lock);
    if (rc == 0)
        rc = order(s, e);
    if (rc < 0 || s->lane_count == 0)
        return rc;
    s->staging = true; /* nobody else looks yet */
    rc = pthread_create(&s->stager, NULL, stager, s);
    s->has_stager = rc == 0;
    s->staging = rc == 0;
    return rc == 0 ? 0 : err_sys(e, rc, "starting the thread that copies from devices");
}

static void *copy_chunks(void *arg)
{
    struct larder_save *s = arg;
    struct saver *v = s->saver;
    uint32_t chunk;
    uint8_t *slot;
    pthread_mutex_lock(&v->lock);
    while ((slot = next_copy(s, &chunk)) != NULL)
        copy_one(s, chunk, slot);
    pthread_mutex_unlock(&v->lock);
    return NULL;
}

void stage_copy(struct larder_save *s)
{
    pthread_t helpers[COPIERS_MAX];
    unsigned wanted = s->client->options.threads < COPIERS_MAX ? s->client->options.threads : COPIERS_MAX,
             started = 0;
    if (s->host_bytes >= COPY_ALONE_BYTES)
        while (started + 1 < wanted && pthread_create(&helpers[started], NULL, copy_chunks, s) == 0)
            started++;
    copy_chunks(s);
    for (unsigned i = 0; i < started; i++)
        pthread_join(helpers[i], NULL);
}

void stage_end(struct larder_save *s)
{
    if (s->has_stager)
        pthread_join(s->stager, NULL);
    s->has_stager = false;
    pthread_mutex_lock(&s->saver->lock);
    struct lane *lanes = s->lanes;
    unsigned count = s->lane_count;
    s->lanes = NULL;
    s->lane_count = 0;
    pthread_mutex_unlock(&s->saver->lock);
    for (unsigned i = 0; i < count; i++) {
        for (struct list *it; (it = list_pop(&lanes[i].idle)) != NULL;)
            flight_free(container_of(it, struct flight, link));
        memory_event_destroy(lanes[i].last);
    }
    free(lanes);
}

/* ---- asking ---- */

void stage_path(const struct larder_save *s, char *out, size_t size)
{
    const struct snapshot *x = &s->snapshot;
    size_t n = 0;
    *out = 0;
    for (uint32_t i = 0; i < x->source_count && n < size; i++) {
        bool told = false;
        for (uint32_t k = 0; k < i; k++)
            told |= x->sources[k].device == x->sources[i].device;
        if (!told)
            n += (size_t)snprintf(out + n, size - n, "%s%d", n ? ", " : "CUDA device ",
                                  memory_ordinal(x->sources[i].device->memory));
    }
    if (n > 0 && n < size)
        snprintf(out + n, size - n, " -> pinned host memory -> ");
}

/* With the lock held: waits until the last copy from the device is given to its stream; NULL: there is none
 * to wait for any more, or *rc says why not. */
static struct lane *wait_given(struct larder_save *s, int device, int *rc, struct err *e)
{
    struct saver *v = s->saver;
    uint32_t bound = s->client->options.request_timeout_ms;
    uint64_t until = clock_ms() + bound;
    while (!s->staged_ns && s->state != LARDER_SAVE_FAILED) {
        struct lane *l = NULL;
        for (unsigned i = 0; i < s->lane_count; i++)
            if (memory_ordinal(s->lanes[i].device->memory) == device)
                l = &s->lanes[i];
        if (!s->failed && s->lanes && (!l || l->left == 0))
            return l;
        if (!clock_wait(&v->changed, &v->lock, until)) {
            *rc = err_set(e, ERR_TIMEOUT,
                          "the copies of step %llu of %s from device %d were not all given to it after %u ms",
                          (unsigned long long)s->step, s->run, device, bound);
            return NULL;
        }
    }
    if (!s->staged_ns) {
        *e = s->err;
        *rc = -e->errnum;
    }
    return NULL;
}

int larder_save_fence_stream(struct larder_save *s, int device, void *stream, struct larder_error *error)
{
    struct err e;
    err_clear(&e);
    int rc = s ? client_enter(s->client, &e) : err_set(&e, ERR_INVALID, "the save is NULL");
    if (rc < 0)
        return client_leave(rc, &e, error);
    pthread_mutex_lock(&s->saver->lock);
    if (!s->submitted)
        rc = err_set(&e, ERR_INVALID, "the save was not submitted: there is nothing to wait for");
    struct lane *l = rc == 0 ? wait_given(s, device, &rc, &e) : NULL;
    if (l)
        rc = memory_caller_after(stream, l->last, &e);
    pthread_mutex_unlock(&s->saver->lock);
    return client_leave(rc, &e, error);
}
