/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arena is cut into frames of one window, and these into units; an extent has units of one frame. Frames
 * are looked through from the first, so that memory that was used just now, and is in the cache, comes first.
 */
#include "server/session/extents.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "server/obs/metrics.h"

#define UNIT_BYTES   (64u << 10)
#define FRAME_UNITS  (EXTENT_BYTES_MAX / UNIT_BYTES)
#define BUCKETS      1024u
#define FRAME_NONE   UINT32_MAX /* memory of its own */
#define FRAMES_BEGIN (2u << 20) /* large pages where the kernel has them */

_Static_assert(FRAME_UNITS == 16, "a frame's units are the bits of a uint16_t");

struct extents {
    pthread_mutex_t lock;
    struct list buckets[BUCKETS];
    struct list idle; /* read, held by nobody, the longest unused first */
    uint8_t *arena;
    uint16_t *used; /* units of each frame */
    uint32_t frame_count;
    _Atomic uint64_t held_bytes;
};

int extents_create(uint64_t arena_bytes, struct extents **out)
{
    uint64_t frames = arena_bytes / EXTENT_BYTES_MAX + (arena_bytes % EXTENT_BYTES_MAX > 0);
    struct extents *x = calloc(1, sizeof *x);
    *out = x;
    if (!x)
        return -ENOMEM;
    pthread_mutex_init(&x->lock, NULL);
    list_init(&x->idle);
    for (unsigned i = 0; i < BUCKETS; i++)
        list_init(&x->buckets[i]);
    x->used = calloc(frames + 1, sizeof *x->used);
    x->arena = aligned_alloc(FRAMES_BEGIN, frames * EXTENT_BYTES_MAX + FRAMES_BEGIN -
                                               frames * EXTENT_BYTES_MAX % FRAMES_BEGIN);
    if (!x->used || !x->arena) {
        extents_destroy(x);
        *out = NULL;
        return -ENOMEM;
    }
    x->frame_count = (uint32_t)frames;
    (void)madvise(x->arena, frames * EXTENT_BYTES_MAX, MADV_HUGEPAGE); /* it works without, only slower */
    memset(x->arena, 0, frames * EXTENT_BYTES_MAX); /* faulted in now, and not by the first who restores */
    return 0;
}

/* With the lock held. */
static void extent_free(struct extents *x, struct extent *e)
{
    check(e->refs == 0 && list_empty(&e->waiting));
    list_del(&e->bucket);
    list_del(&e->idle);
    if (e->frame == FRAME_NONE)
        free(e->memory);
    else
        x->used[e->frame] &= (uint16_t) ~(((1u << (e->room + UNIT_BYTES - 1) / UNIT_BYTES) - 1) << e->unit);
    free(e);
}

void extents_destroy(struct extents *x)
{
    if (!x)
        return;
    while (!list_empty(&x->idle))
        extent_free(x, container_of(x->idle.next, struct extent, idle));
    for (unsigned i = 0; i < BUCKETS; i++)
        check(list_empty(&x->buckets[i])); /* else one is still in use */
    check(atomic_load(&x->held_bytes) == 0);
    pthread_mutex_destroy(&x->lock);
    free(x->used);
    free(x->arena);
    free(x);
}

/* ---- memory, with the lock held ---- */

static bool take_units(struct extents *x, uint32_t frame, uint32_t units, struct extent *e)
{
    uint32_t run = (1u << units) - 1;
    for (uint32_t unit = 0; unit + units <= FRAME_UNITS; unit++) {
        if (x->used[frame] & run << unit)
            continue;
        x->used[frame] |= (uint16_t)(run << unit);
        e->frame = frame;
        e->unit = unit;
        e->memory = x->arena + (size_t)frame * EXTENT_BYTES_MAX + (size_t)unit * UNIT_BYTES;
        return true;
    }
    return false;
}

static bool take_room(struct extents *x, struct extent *e)
{
    uint32_t units = (e->room + UNIT_BYTES - 1) / UNIT_BYTES;
    for (uint32_t f = 0; f < x->frame_count; f++)
        if (take_units(x, f, units, e))
            return true;
    while (!list_empty(&x->idle)) {
        struct extent *oldest = container_of(x->idle.next, struct extent, idle);
        uint32_t frame = oldest->frame;
        extent_free(x, oldest);
        if (take_units(x, frame, units, e))
            return true;
    }
    return false;
}

static struct extent *extent_make(struct extents *x, uint32_t room)
{
    struct extent *e = calloc(1, sizeof *e);
    void *own;
    check(room > 0 && room <= EXTENT_BYTES_MAX);
    if (!e)
        return NULL;
    list_init(&e->bucket);
    list_init(&e->idle);
    list_init(&e->waiting);
    e->room = room;
    e->refs = 1;
    if (!take_room(x, e)) {
        if (posix_memalign(&own, BLOCK_BYTES, block_align(room)) != 0) {
            free(e);
            return NULL;
        }
        e->frame = FRAME_NONE;
        e->memory = own;
    }
    atomic_fetch_add(&x->held_bytes, room);
    return e;
}

static void hold(struct extents *x, struct extent *e)
{
    list_del(&e->idle);
    if (e->refs++ == 0)
        atomic_fetch_add(&x->held_bytes, e->room);
}

static void put(struct extents *x, struct extent *e)
{
    check(e->refs > 0);
    if (--e->refs > 0)
        return;
    atomic_fetch_sub(&x->held_bytes, e->room);
    if (e->keep && e->read && e->frame != FRAME_NONE && !list_empty(&e->bucket))
        list_add_tail(&x->idle, &e->idle);
    else
        extent_free(x, e);
}

/* ---- the table, with the lock held ---- */

static struct list *bucket_of(struct extents *x, const struct id *key, uint64_t begin)
{
    return &x->buckets[(le64_get(key->bytes) + begin / EXTENT_BYTES_MAX) % BUCKETS];
}

/* It is found no more; freed unless somebody holds it. */
static void detach(struct extents *x, struct extent *e)
{
    list_del(&e->bucket);
    if (e->refs == 0)
        extent_free(x, e);
}

static bool is_stale(const struct extent *e, uint64_t now_ms)
{
    return e->read && e->read_at_ms + EXTENT_KEPT_MS <= now_ms;
}

/* The extent that covers `begin`, or NULL; *end falls to where the next one begins. */
static struct extent *find(struct extents *x, const struct extent_want *want, uint64_t begin, uint64_t *end)
{
    list_for_each_safe (it, bucket_of(x, &want->key, begin)) {
        struct extent *e = container_of(it, struct extent, bucket);
        if (!id_equal(&e->key, &want->key) || e->begin >= *end || e->begin + e->room <= begin)
            continue;
        if (want->fresh || is_stale(e, want->now_ms))
            detach(x, e);
        else if (e->begin <= begin)
            return e;
        else
            *end = e->begin;
    }
    return NULL;
}

static void tell(struct loop_msg *m)
{
    struct extent_wait *w = container_of(m, struct extent_wait, msg);
    w->told(w);
}

static void post(struct extent_wait *w)
{
    w->msg.run = tell;
    loop_post(w->loop, &w->msg);
}

static void count(enum metric m, const struct extent *e, const struct extent_want *want)
{
    uint64_t end = e->begin + e->room < want->end ? e->begin + e->room : want->end;
    metric_add(m, (int64_t)(end - want->begin));
}

/* One that was found. True: it is read already. */
static bool join(struct extents *x, struct extent *e, const struct extent_want *want, struct extent_wait *w)
{
    hold(x, e);
    w->extent = e;
    list_init(&w->link);
    if (!e->read)
        list_add_tail(&e->waiting, &w->link);
    count(e->read ? METRIC_cached_read_bytes : METRIC_joined_read_bytes, e, want);
    return e->read;
}

static int enter(struct extents *x, const struct extent_want *want, uint64_t begin, uint64_t end,
                 struct extent_wait *w)
{
    struct extent *e = extent_make(x, (uint32_t)(end - begin));
    if (!e)
        return -ENOMEM;
    e->key = want->key;
    e->begin = begin;
    e->keep = want->keep;
    list_add_tail(bucket_of(x, &want->key, begin), &e->bucket);
    w->extent = e;
    return 1;
}

int extent_get(struct extents *x, const struct extent_want *want, struct extent_wait *w)
{
    uint64_t begin = want->begin / BLOCK_BYTES * BLOCK_BYTES, end = block_align(want->end);
    check(want->begin < want->end && begin / EXTENT_BYTES_MAX == (end - 1) / EXTENT_BYTES_MAX);
    bool there = false;
    int rc = 0;
    pthread_mutex_lock(&x->lock);
    struct extent *e = find(x, want, begin, &end);
    if (e)
        there = join(x, e, want, w);
    else
        rc = enter(x, want, begin, end, w);
    pthread_mutex_unlock(&x->lock);
    if (there)
        post(w);
    return rc;
}

void extent_read(struct extents *x, struct extent *e, uint32_t bytes, uint64_t now_ms)
{
    struct list waiting;
    check(!e->read && bytes <= e->room);
    list_init(&waiting);
    pthread_mutex_lock(&x->lock);
    e->read = true;
    e->read_at_ms = now_ms;
    e->bytes = bytes;
    if (!e->keep || e->err.class != ERR_NONE)
        list_del(&e->bucket);
    for (struct list *it; (it = list_pop(&e->waiting));)
        list_add_tail(&waiting, it);
    pthread_mutex_unlock(&x->lock);
    metric_add(METRIC_disk_read_bytes, bytes);
    for (struct list *it; (it = list_pop(&waiting));)
        post(container_of(it, struct extent_wait, link));
}

struct extent *extent_private(struct extents *x, uint32_t n)
{
    pthread_mutex_lock(&x->lock);
    struct extent *e = extent_make(x, n);
    pthread_mutex_unlock(&x->lock);
    return e;
}

void extent_put(struct extents *x, struct extent *e)
{
    if (!e)
        return;
    pthread_mutex_lock(&x->lock);
    put(x, e);
    pthread_mutex_unlock(&x->lock);
}

bool extents_crowded(const struct extents *x)
{
    return atomic_load(&x->held_bytes) >= (uint64_t)x->frame_count * EXTENT_BYTES_MAX;
}
