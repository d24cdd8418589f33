/* SPDX-License-Identifier: Apache-2.0 */
/* The one wrapper around all kinds: checks arguments, and remembers with what a device was lost. */
#include "gpudirect/memory.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "format/base/cursor.h"
#include "gpudirect/memory_kind.h"

#define LOOKS_AWAKE 16u /* at an event, before the first sleep between looks */
#define SLEEP_NS    20000

struct memory {
    const struct memory_ops *ops;
    enum memory_kind kind;
    int ordinal;
    void *device;
    struct memory_info info;
    atomic_uint users; /* streams, events, modules */
    atomic_bool lost;
    pthread_mutex_t lock;
    struct err cause; /* once lost; under the lock */
};

struct memory_event {
    struct memory *m;
    void *handle;
};

struct memory_stream {
    struct memory *m;
    void *handle;
    struct memory_event *event; /* for waits and for what callers gave to theirs */
};

struct memory_module {
    struct memory *m;
    void *handle;
};

static const struct memory_ops *const kinds[MEMORY_KIND_COUNT] = {
    [MEMORY_HOST] = &memory_host_ops,
    [MEMORY_CUDA] = &memory_cuda_ops,
};

const char *memory_kind_name(enum memory_kind kind)
{
    return (unsigned)kind < MEMORY_KIND_COUNT ? kinds[kind]->name : "unknown";
}

/* ---- what there is ---- */

static int kind_check(enum memory_kind kind, struct err *e)
{
    if ((unsigned)kind < MEMORY_KIND_COUNT)
        return 0;
    return err_set(e, ERR_INVALID, "%d is not a kind of memory; expected 0 (host) or 1 (CUDA)", (int)kind);
}

static int usable_check(enum memory_kind kind, int ordinal, struct err *e)
{
    struct memory_probe p;
    int rc = kind_check(kind, e);
    if (rc < 0)
        return rc;
    memory_probe(kind, &p);
    if (!p.usable)
        return err_set(e, ERR_UNSUPPORTED, "%s", p.note);
    if (ordinal < 0 || ordinal >= p.devices)
        return err_set(
            e, ERR_NOT_FOUND,
            "there is no %s device %d; this process sees %d, numbered from 0 (CUDA_VISIBLE_DEVICES "
            "chooses which)",
            kinds[kind]->name, ordinal, p.devices);
    return 0;
}

void memory_probe(enum memory_kind kind, struct memory_probe *out)
{
    struct err e = {0};
    *out = (struct memory_probe){0};
    if (kind_check(kind, &e) < 0)
        snprintf(out->note, sizeof out->note, "%s", e.text);
    else
        kinds[kind]->probe(out);
}

int memory_describe(enum memory_kind kind, int ordinal, struct memory_info *out, struct err *e)
{
    struct err own = {0};
    int rc = usable_check(kind, ordinal, e);
    return rc < 0 ? rc : kinds[kind]->describe(ordinal, out, e ? e : &own);
}

int memory_where(const void *p, struct memory_pointer *out, struct err *e)
{
    struct memory_probe found;
    struct err own = {0};
    *out = (struct memory_pointer){.kind = MEMORY_HOST};
    for (unsigned k = MEMORY_HOST + 1; k < MEMORY_KIND_COUNT; k++) {
        if (!kinds[k]->in_use())
            continue;
        memory_probe(k, &found);
        int rc = found.usable ? kinds[k]->where(p, out, e ? e : &own) : 0;
        if (rc < 0 || out->kind != MEMORY_HOST || out->registered)
            return rc;
    }
    return 0;
}

/* ---- devices ---- */

/* Every call on a device goes between enter and leave. */
static int enter(struct memory *m, struct err *e)
{
    return atomic_load_explicit(&m->lost, memory_order_acquire) ? memory_lost(m, e) : 0;
}

static int leave(struct memory *m, int rc, const struct err *e)
{
    if (rc != -ENODEV)
        return rc;
    pthread_mutex_lock(&m->lock);
    if (!atomic_load_explicit(&m->lost, memory_order_relaxed)) {
        m->cause = *e;
        atomic_store_explicit(&m->lost, true, memory_order_release);
    }
    pthread_mutex_unlock(&m->lock);
    return rc;
}

int memory_open(enum memory_kind kind, int ordinal, struct memory **out, struct err *e)
{
    struct err own = {0};
    e = e ? e : &own;
    int rc = usable_check(kind, ordinal, e);
    if (rc < 0)
        return rc;
    struct memory *m = calloc(1, sizeof *m);
    if (!m)
        return err_set(e, ERR_NO_MEMORY, "no memory to open a device");
    m->ops = kinds[kind];
    m->kind = kind;
    m->ordinal = ordinal;
    rc = m->ops->describe(ordinal, &m->info, e);
    if (rc == 0)
        rc = m->ops->open(ordinal, &m->device, e);
    if (rc < 0) {
        free(m);
        return rc;
    }
    pthread_mutex_init(&m->lock, NULL);
    *out = m;
    return 0;
}

void memory_close(struct memory *m)
{
    struct err e;
    if (!m)
        return;
    check(atomic_load(&m->users) == 0);
    (void)m->ops->close(m->device, &e); /* nobody is left to tell */
    pthread_mutex_destroy(&m->lock);
    free(m);
}

enum memory_kind memory_kind(const struct memory *m)
{
    return m->kind;
}

int memory_ordinal(const struct memory *m)
{
    return m->ordinal;
}

const struct memory_info *memory_info(const struct memory *m)
{
    return &m->info;
}

int memory_lost(struct memory *m, struct err *e)
{
    if (!atomic_load_explicit(&m->lost, memory_order_acquire))
        return 0;
    if (e)
        *e = m->cause; /* written once, before lost */
    return -ENODEV;
}

int memory_check(struct memory *m, const void *p, size_t n, struct err *e)
{
    struct err own = {0};
    e = e ? e : &own;
    check(n > 0);
    int rc = enter(m, e);
    return rc < 0 ? rc : leave(m, m->ops->check_range(m->device, p, n, e), e);
}

int memory_alloc(struct memory *m, size_t bytes, void **out, struct err *e)
{
    struct err own = {0};
    e = e ? e : &own;
    check(bytes > 0);
    int rc = enter(m, e);
    return rc < 0 ? rc : leave(m, m->ops->alloc(m->device, bytes, out, e), e);
}

void memory_free(struct memory *m, void *p)
{
    struct err e;
    if (p)
        (void)leave(m, m->ops->free(m->device, p, &e), &e);
}

int memory_register(struct memory *m, void *p, size_t bytes, struct err *e)
{
    struct err own = {0};
    e = e ? e : &own;
    check(p && bytes > 0);
    int rc = enter(m, e);
    return rc < 0 ? rc : leave(m, m->ops->reg(m->device, p, bytes, e), e);
}

void memory_unregister(struct memory *m, void *p)
{
    struct err e;
    (void)leave(m, m->ops->unreg(m->device, p, &e), &e);
}

/* ---- events ---- */

int memory_event_create(struct memory *m, struct memory_event **out, struct err *e)
{
    struct err own = {0};
    e = e ? e : &own;
    int rc = enter(m, e);
    if (rc < 0)
        return rc;
    struct memory_event *v = calloc(1, sizeof *v);
    if (!v)
        return err_set(e, ERR_NO_MEMORY, "no memory for an event");
    v->m = m;
    rc = leave(m, m->ops->event_create(m->device, &v->handle, e), e);
    if (rc < 0) {
        free(v);
        return rc;
    }
    atomic_fetch_add(&m->users, 1);
    *out = v;
    return 0;
}

void memory_event_destroy(struct memory_event *v)
{
    struct err e;
    if (!v)
        return;
    (void)leave(v->m, v->m->ops->event_destroy(v->m->device, v->handle, &e), &e);
    atomic_fetch_sub(&v->m->users, 1);
    free(v);
}

void *memory_event_handle(const struct memory_event *v)
{
    return v->handle;
}

/* In a stream of this device, ours or a caller's. */
static int record(struct memory_event *v, void *stream, struct err *e)
{
    int rc = enter(v->m, e);
    return rc < 0 ? rc : leave(v->m, v->m->ops->event_record(v->m->device, v->handle, stream, e), e);
}

int memory_event_record(struct memory_event *v, struct memory_stream *s, struct err *e)
{
    struct err own = {0};
    check(v->m == s->m);
    return record(v, s->handle, e ? e : &own);
}

int memory_event_query(struct memory_event *v, struct err *e)
{
    struct err own = {0};
    e = e ? e : &own;
    int rc = enter(v->m, e);
    return rc < 0 ? rc : leave(v->m, v->m->ops->event_query(v->m->device, v->handle, e), e);
}

static uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

int memory_event_wait(struct memory_event *v, unsigned timeout_ms, struct err *e)
{
    uint64_t until = now_ms() + timeout_ms;
    for (unsigned looks = 0;; looks++) {
        int rc = memory_event_query(v, e);
        if (rc != 0)
            return rc < 0 ? rc : 0;
        if (looks < LOOKS_AWAKE) {
            sched_yield();
            continue;
        }
        if (now_ms() >= until)
            return err_set(
                e, ERR_TIMEOUT,
                "%s device %d did not finish in %u ms what was given to it; look for a kernel that "
                "hangs, or for other work that keeps the device busy",
                v->m->ops->name, v->m->ordinal, timeout_ms);
        nanosleep(&(struct timespec){.tv_nsec = SLEEP_NS}, NULL);
    }
}

/* ---- streams ---- */

int memory_stream_create(struct memory *m, struct memory_stream **out, struct err *e)
{
    struct err own = {0};
    e = e ? e : &own;
    int rc = enter(m, e);
    if (rc < 0)
        return rc;
    struct memory_stream *s = calloc(1, sizeof *s);
    if (!s)
        return err_set(e, ERR_NO_MEMORY, "no memory for a stream");
    s->m = m;
    rc = memory_event_create(m, &s->event, e);
    if (rc == 0)
        rc = leave(m, m->ops->stream_create(m->device, &s->handle, e), e);
    if (rc < 0) {
        memory_event_destroy(s->event);
        free(s);
        return rc;
    }
    atomic_fetch_add(&m->users, 1);
    *out = s;
    return 0;
}

void memory_stream_destroy(struct memory_stream *s)
{
    struct err e;
    if (!s)
        return;
    memory_event_destroy(s->event);
    (void)leave(s->m, s->m->ops->stream_destroy(s->m->device, s->handle, &e), &e);
    atomic_fetch_sub(&s->m->users, 1);
    free(s);
}

struct memory *memory_stream_memory(const struct memory_stream *s)
{
    return s->m;
}

void *memory_stream_handle(const struct memory_stream *s)
{
    return s->handle;
}

int memory_stream_wait(struct memory_stream *s, unsigned timeout_ms, struct err *e)
{
    int rc = memory_event_record(s->event, s, e);
    return rc < 0 ? rc : memory_event_wait(s->event, timeout_ms, e);
}

/* On the device of the stream that is to wait. */
static int after(struct memory *m, void *stream, struct memory_event *v, struct err *e)
{
    int rc = enter(m, e);
    return rc < 0 ? rc : leave(m, m->ops->stream_after(m->device, stream, v->handle, e), e);
}

int memory_stream_after(struct memory_stream *s, struct memory_event *v, struct err *e)
{
    struct err own = {0};
    check(s->m->kind == v->m->kind);
    return after(s->m, s->handle, v, e ? e : &own);
}

static int caller_check(struct memory *m, void *caller_stream, struct err *e)
{
    int rc = enter(m, e);
    return rc < 0 ? rc : leave(m, m->ops->stream_caller(m->device, caller_stream, e), e);
}

int memory_stream_after_caller(struct memory_stream *s, void *caller_stream, struct err *e)
{
    struct err own = {0};
    e = e ? e : &own;
    int rc = caller_check(s->m, caller_stream, e);
    if (rc == 0)
        rc = record(s->event, caller_stream, e);
    return rc < 0 ? rc : after(s->m, s->handle, s->event, e);
}

int memory_caller_after(void *caller_stream, struct memory_event *v, struct err *e)
{
    struct err own = {0};
    e = e ? e : &own;
    int rc = caller_check(v->m, caller_stream, e);
    return rc < 0 ? rc : after(v->m, caller_stream, v, e);
}

/* ---- copies ---- */

/* Rows or slices that lie one behind the other, or are only one, are no dimension of their own. */
static void fold(struct memory_box *b)
{
    if (b->rows == 1) { /* slices become rows */
        b->rows = b->slices;
        b->to_pitch = b->to_slice;
        b->from_pitch = b->from_slice;
        b->slices = 1;
    }
    if (b->rows > 1 && b->to_pitch == b->row_bytes && b->from_pitch == b->row_bytes &&
        !mul_overflows(b->row_bytes, b->rows, &b->row_bytes)) {
        b->rows = 1;
        if (b->slices > 1)
            fold(b);
    }
}

static bool side_fits(const struct memory_box *b, size_t pitch, size_t slice, size_t pitch_max)
{
    if (b->rows == 1)
        return true;
    if (pitch < b->row_bytes || pitch > pitch_max)
        return false;
    return b->slices == 1 || (slice % pitch == 0 && slice / pitch >= b->rows);
}

static bool folded_fits(const struct memory *m, const struct memory_box *b)
{
    size_t most = m->ops->pitch_max(m->device);
    return side_fits(b, b->to_pitch, b->to_slice, most) && side_fits(b, b->from_pitch, b->from_slice, most);
}

bool memory_box_fits(const struct memory *m, const struct memory_box *b)
{
    struct memory_box folded = *b;
    fold(&folded);
    return folded_fits(m, &folded);
}

int memory_copy_box(struct memory_stream *s, enum memory_direction d, const struct memory_box *b,
                    struct err *e)
{
    struct err own = {0};
    struct memory *m = s->m;
    struct memory_box folded = *b;
    e = e ? e : &own;
    check(b->row_bytes > 0 && b->rows > 0 && b->slices > 0);
    fold(&folded);
    if (!folded_fits(m, &folded))
        return err_set(e, ERR_INVALID,
                       "a copy of %zu x %zu rows of %zu bytes has pitches that one copy cannot do", b->slices,
                       b->rows, b->row_bytes);
    int rc = enter(m, e);
    return rc < 0 ? rc : leave(m, m->ops->copy(m->device, s->handle, d, &folded, e), e);
}

int memory_copy(struct memory_stream *s, enum memory_direction d, void *to, const void *from, size_t n,
                struct err *e)
{
    struct memory_box b = {.to = to, .from = from, .row_bytes = n, .rows = 1, .slices = 1};
    return memory_copy_box(s, d, &b, e);
}

/* ---- other libraries ---- */

int memory_call(struct memory *m, int (*f)(void *arg, struct err *e), void *arg, struct err *e)
{
    struct err own = {0};
    e = e ? e : &own;
    int rc = enter(m, e);
    return rc < 0 ? rc : leave(m, m->ops->call(m->device, f, arg, e), e);
}

/* ---- kernels ---- */

int memory_module_load(struct memory *m, const void *image, struct memory_module **out, struct err *e)
{
    struct err own = {0};
    e = e ? e : &own;
    int rc = enter(m, e);
    if (rc < 0)
        return rc;
    struct memory_module *x = calloc(1, sizeof *x);
    if (!x)
        return err_set(e, ERR_NO_MEMORY, "no memory for a module of kernels");
    x->m = m;
    rc = leave(m, m->ops->module_load(m->device, image, &x->handle, e), e);
    if (rc < 0) {
        free(x);
        return rc;
    }
    atomic_fetch_add(&m->users, 1);
    *out = x;
    return 0;
}

void memory_module_unload(struct memory_module *x)
{
    struct err e;
    if (!x)
        return;
    (void)leave(x->m, x->m->ops->module_unload(x->m->device, x->handle, &e), &e);
    atomic_fetch_sub(&x->m->users, 1);
    free(x);
}

int memory_module_function(struct memory_module *x, const char *name, void **out, struct err *e)
{
    struct err own = {0};
    struct memory *m = x->m;
    e = e ? e : &own;
    int rc = enter(m, e);
    return rc < 0 ? rc : leave(m, m->ops->module_function(m->device, x->handle, name, out, e), e);
}

int memory_launch(struct memory_stream *s, void *function, const struct memory_launch *l, void **arguments,
                  struct err *e)
{
    struct err own = {0};
    struct memory *m = s->m;
    e = e ? e : &own;
    int rc = enter(m, e);
    return rc < 0 ? rc : leave(m, m->ops->launch(m->device, s->handle, function, l, arguments, e), e);
}
