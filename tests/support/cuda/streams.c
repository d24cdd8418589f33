/* SPDX-License-Identifier: Apache-2.0 */
/* Streams: lists of operations, which a few threads take in an order of chance and do late. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpudirect/kernels_host.h"
#include "tests/support/cuda/state.h"

#define WORKERS 3

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- streams ---- */

static cu_stream stream_new(cu_context c)
{
    cu_stream s = calloc(1, sizeof *s);
    s->context = c;
    s->next = world.streams;
    world.streams = s;
    return s;
}

static cu_stream shared_of(cu_context c)
{
    if (!c->shared) {
        c->shared = stream_new(c);
        c->shared->refs++;
    }
    return c->shared;
}

cu_stream stream_add(cu_context c, unsigned flags)
{
    cu_stream s = flags & CU_STREAM_FLAG_NON_BLOCKING ? stream_new(c) : shared_of(c);
    s->refs++;
    s->handles++;
    world.counts.streams++;
    return s;
}

cu_stream stream_of(cu_stream handle)
{
    cu_context c = current();
    if ((uintptr_t)handle <= 2) /* the default streams */
        return c ? shared_of(c) : NULL;
    for (cu_stream s = world.streams; s; s = s->next)
        if (s == handle && s->handles > 0)
            return s;
    return NULL;
}

static void free_if_done(cu_stream s)
{
    cu_stream *at = &world.streams;
    if (s->refs > 0 || s->first || s->busy)
        return;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    free(s);
}

void stream_unref(cu_stream s)
{
    s->refs--;
    free_if_done(s);
}

/* Mostly short, now and then long: what happens to be done in time with the one is not with the other. */
static uint64_t some_delay_ns(void)
{
    uint64_t most = world.set.delay_us * 1000;
    if (random_next() % 16 > 0)
        most /= 16;
    return most ? random_next() % most : 0;
}

void stream_give(cu_stream s, struct op *o)
{
    o->due_ns = now_ns() + some_delay_ns();
    if (s->last)
        s->last->next = o;
    else
        s->first = o;
    s->last = o;
    s->given++;
    for (int i = 0; i < 2; i++)
        if (o->ranges[i])
            o->ranges[i]->users++;
    if (o->kind == OP_KERNEL)
        s->context->kernels_waiting++;
    if (o->wait_stream)
        o->wait_stream->refs++;
    workers_start();
    pthread_cond_broadcast(&world.changed);
}

bool stream_wait(cu_stream s, uint64_t ticket)
{
    s->refs++;
    while (s->done < ticket)
        pthread_cond_wait(&world.changed, &world.lock);
    bool lost = s->context->lost != CU_OK;
    stream_unref(s);
    return !lost;
}

/* ---- operations ---- */

static void drop(cu_stream s, struct op *o)
{
    for (int i = 0; i < 2; i++)
        if (o->ranges[i])
            o->ranges[i]->users--;
    if (o->kind == OP_KERNEL)
        s->context->kernels_waiting--;
    if (o->wait_stream)
        stream_unref(o->wait_stream);
    free(o->staged);
    free(o);
}

static void do_copy(const struct memory_box *b)
{
    for (size_t z = 0; z < b->slices; z++)
        for (size_t y = 0; y < b->rows; y++)
            memmove((uint8_t *)b->to + z * b->to_slice + y * b->to_pitch,
                    (const uint8_t *)b->from + z * b->from_slice + y * b->from_pitch, b->row_bytes);
}

/* Without the lock. */
static void perform(struct op *o)
{
    switch (o->kind) {
    case OP_COPY: do_copy(&o->box); break;
    case OP_FILL: memset(o->box.to, o->value, o->box.row_bytes); break;
    case OP_KERNEL: kernel_host_run(o->kernel, o->threads, o->rows, o->parameters); break;
    case OP_WAIT:
    case OP_HOLD: break;
    }
}

static void count(const struct op *o)
{
    if (o->kind == OP_COPY) {
        world.counts.copies++;
        world.counts.copied_bytes += o->box.row_bytes * o->box.rows * o->box.slices;
        world.counts.pageable_copies += o->pageable;
    }
    world.counts.kernels += o->kind == OP_KERNEL;
}

void context_drop(cu_context c)
{
    for (cu_stream s = world.streams, next; s; s = next) {
        next = s->next;
        if (s->context != c)
            continue;
        s->refs++;
        while (s->first) {
            struct op *o = s->first;
            s->first = o->next;
            drop(s, o);
        }
        s->last = NULL;
        s->done = s->given; /* nobody waits for what never comes */
        next = s->next;
        stream_unref(s);
    }
}

void streams_end(cu_context c)
{
    for (cu_stream s = world.streams; s; s = s->next)
        while (s->context == c && s->busy)
            pthread_cond_wait(&world.changed, &world.lock);
    for (cu_stream s = world.streams, next; s; s = next) {
        next = s->next;
        if (s->context != c)
            continue;
        world.counts.lost_handles += s->handles;
        world.counts.streams -= s->handles;
        s->refs -= s->handles + (s == c->shared);
        s->handles = 0;
        free_if_done(s);
    }
    c->shared = NULL;
}

static void lose_context(cu_context c, cu_result code)
{
    if (c->lost == CU_OK)
        c->lost = code;
    context_drop(c);
}

void context_lose(int ordinal, cu_result code)
{
    lose_context(&world.primary[ordinal], code);
    for (cu_context c = world.others; c; c = c->next)
        if (c->ordinal == ordinal)
            lose_context(c, code);
    pthread_cond_broadcast(&world.changed);
}

/* Has its time to fail come? */
static bool lost_now(int ordinal)
{
    for (size_t i = 0; i < RULES_MAX; i++) {
        struct rule *r = &world.set.lose[i];
        if (!r->on || r->which != ordinal)
            continue;
        if (r->left-- > 0)
            continue;
        r->on = false;
        context_lose(ordinal, r->code);
        return true;
    }
    return false;
}

static void run_one(cu_stream s)
{
    struct op *o = s->first;
    bool works = o->kind != OP_WAIT && o->kind != OP_HOLD;
    if (works && lost_now(s->context->ordinal))
        return;
    s->first = o->next;
    if (!s->first)
        s->last = NULL;
    s->busy = true;
    if (o->kind == OP_KERNEL && world.kernels_running++ == 0)
        ranges_open(true);
    if (works) {
        pthread_mutex_unlock(&world.lock);
        perform(o);
        pthread_mutex_lock(&world.lock);
    }
    if (o->kind == OP_KERNEL && --world.kernels_running == 0)
        ranges_open(false);
    s->busy = false;
    s->done += s->done < s->given; /* unless it was lost meanwhile */
    count(o);
    drop(s, o);
    free_if_done(s);
    pthread_cond_broadcast(&world.changed);
}

/* ---- workers ---- */

static bool may_run(const struct cu_stream_object *s, uint64_t now, uint64_t *next)
{
    const struct op *o = s->first;
    if (!o || s->busy)
        return false;
    if (o->kind == OP_WAIT && o->wait_stream->done < o->wait_for)
        return false;
    if (o->kind == OP_HOLD && s->released < o->wait_for)
        return false;
    if (o->due_ns <= now)
        return true;
    *next = o->due_ns < *next ? o->due_ns : *next;
    return false;
}

/* A stream by chance, among those that can go on; NULL: none before *next. */
static cu_stream choose(uint64_t *next)
{
    uint64_t now = now_ns(), seen = 0;
    cu_stream chosen = NULL;
    *next = UINT64_MAX;
    for (cu_stream s = world.streams; s; s = s->next)
        if (may_run(s, now, next) && random_next() % ++seen == 0)
            chosen = s;
    return chosen;
}

static void *work(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&world.lock);
    for (;;) {
        uint64_t next;
        cu_stream s = choose(&next);
        struct timespec until = {.tv_sec = (time_t)(next / 1000000000u),
                                 .tv_nsec = (long)(next % 1000000000u)};
        if (s)
            run_one(s);
        else if (next == UINT64_MAX)
            pthread_cond_wait(&world.changed, &world.lock);
        else
            pthread_cond_timedwait(&world.changed, &world.lock, &until);
    }
    return NULL;
}

void workers_start(void)
{
    pthread_attr_t a;
    pthread_t thread;
    if (world.workers)
        return;
    world.workers = true;
    pthread_attr_init(&a);
    pthread_attr_setdetachstate(&a, PTHREAD_CREATE_DETACHED);
    for (int i = 0; i < WORKERS; i++)
        if (pthread_create(&thread, &a, work, NULL) != 0)
            broken("no thread to work with");
    pthread_attr_destroy(&a);
}
