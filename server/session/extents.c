/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arena is cut into frames of one window, and these into units; an extent has units of one frame. Frames
 * are looked through from the first, so that memory that was used just now, and is in the cache, comes first:
 * the disk fills such memory half as fast again as memory that nobody touched for a while.
 *
 * That is why what one reader alone goes through is not left there: its memory is used again at once, and of
 * the extent a ghost stays in the table, without memory, for as long as the arena could have held it. Who
 * finds a ghost had to read once more, and shows that keeping pays. It is decided by object: of what was
 * wanted of it lately, was a quarter there, or a ghost (2Q by Johnson and Shasha, 1994, with a ratio). The
 * first bytes wanted of an object are kept, since those who restore together begin together.
 *
 * What is kept goes in the order in which it was read, however lately it was used: of several who go through
 * an object one behind the other, it is the last one who has used an extent last, and nobody wants it then.
 */
#include "server/session/extents.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "server/obs/metrics.h"

#define UNIT_BYTES    (64u << 10)
#define FRAME_UNITS   (EXTENT_BYTES_MAX / UNIT_BYTES)
#define BUCKETS       1024u
#define OBJECTS       1024u /* remembered, in sets of OBJECT_WAYS */
#define OBJECT_WAYS   4u
#define WANTED_BYTES  (64u << 20) /* of an object, then the older half counts half */
#define AGAIN_PART    4u          /* one of so many wanted again: worth keeping */
#define SCAN_QUIET_MS 1000u       /* since it moved on: it has ended */
#define SCAN_AHEAD    64u         /* windows: who reads so little ahead of a scan takes it along */
#define SCAN_GAP      8u          /* windows: several requests of one reader are under way at once */
#define SCAN_WINDOWS  1024u       /* looked at on each side */
#define HELD_PART     4u          /* of the arena; the rest is for those who come behind */
#define FRAME_NONE    UINT32_MAX  /* memory of its own */
#define FRAMES_BEGIN  (2u << 20)  /* large pages where the kernel has them */

_Static_assert(FRAME_UNITS == 16, "a frame's units are the bits of a uint16_t");

struct object {
    struct extent_key key;
    uint64_t seen_ms;
    struct {
        uint64_t number; /* by x->scans; 0: there is none */
        uint64_t window; /* that was read last */
        uint64_t reader; /* by whom */
        uint64_t moved_ms;
    } scan;
    uint32_t wanted_bytes, again_bytes; /* lately; again: of these, wanted before */
};

struct extents {
    pthread_mutex_t lock;
    struct list buckets[BUCKETS];
    struct list kept;   /* read and to be found, as they were read; those that are held too */
    struct list ghosts; /* without memory, the oldest first */
    uint64_t ghost_bytes;
    uint64_t scans; /* begun */
    struct object objects[OBJECTS];
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
    list_init(&x->kept);
    list_init(&x->ghosts);
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
static void memory_free(struct extents *x, struct extent *e)
{
    if (e->frame == FRAME_NONE)
        free(e->memory);
    else
        x->used[e->frame] &= (uint16_t) ~(((1u << (e->room + UNIT_BYTES - 1) / UNIT_BYTES) - 1) << e->unit);
    e->frame = FRAME_NONE;
    e->memory = NULL;
}

/* Likewise. */
static void extent_free(struct extents *x, struct extent *e)
{
    check(e->refs == 0 && list_empty(&e->waiting));
    list_del(&e->bucket);
    list_del(&e->link);
    if (e->ghost)
        x->ghost_bytes -= e->room;
    memory_free(x, e);
    free(e);
}

void extents_destroy(struct extents *x)
{
    if (!x)
        return;
    while (!list_empty(&x->kept))
        extent_free(x, container_of(x->kept.next, struct extent, link));
    while (!list_empty(&x->ghosts))
        extent_free(x, container_of(x->ghosts.next, struct extent, link));
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

static bool take_room(struct extents *x, struct extent *e, bool evict)
{
    uint32_t units = (e->room + UNIT_BYTES - 1) / UNIT_BYTES;
    for (uint32_t f = 0; f < x->frame_count; f++)
        if (take_units(x, f, units, e))
            return true;
    if (!evict)
        return false;
    list_for_each_safe (it, &x->kept) {
        struct extent *oldest = container_of(it, struct extent, link);
        uint32_t frame = oldest->frame;
        if (oldest->refs > 0)
            continue;
        extent_free(x, oldest);
        if (take_units(x, frame, units, e))
            return true;
    }
    return false;
}

/* evict: what is left there goes for it. */
static struct extent *extent_make(struct extents *x, uint32_t room, bool evict)
{
    struct extent *e = calloc(1, sizeof *e);
    void *own;
    check(room > 0 && room <= EXTENT_BYTES_MAX);
    if (!e)
        return NULL;
    list_init(&e->bucket);
    list_init(&e->link);
    list_init(&e->waiting);
    e->room = room;
    e->refs = 1;
    if (!take_room(x, e, evict)) {
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
    if (e->refs++ == 0)
        atomic_fetch_add(&x->held_bytes, e->room);
}

/* ---- what is worth keeping, with the lock held ---- */

static bool is_past(uint64_t since_ms, uint64_t now_ms)
{
    return since_ms + EXTENT_KEPT_MS <= now_ms;
}

static bool key_equal(const struct extent_key *a, const struct extent_key *b)
{
    return id_equal(&a->object, &b->object) && id_equal(&a->group, &b->group);
}

static uint64_t key_hash(const struct extent_key *key)
{
    return le64_get(key->group.bytes) + le64_get(key->object.bytes);
}

/* The object's entry; begun anew, in place of the longest unseen, if there is none. */
static struct object *object_of(struct extents *x, const struct extent_key *key, uint64_t now_ms)
{
    struct object *set = &x->objects[key_hash(key) % (OBJECTS / OBJECT_WAYS) * OBJECT_WAYS];
    struct object *oldest = set;
    for (unsigned i = 0; i < OBJECT_WAYS; i++) {
        if (key_equal(&set[i].key, key) && !is_past(set[i].seen_ms, now_ms))
            return &set[i];
        if (set[i].seen_ms < oldest->seen_ms)
            oldest = &set[i];
    }
    *oldest = (struct object){.key = *key, .seen_ms = now_ms};
    return oldest;
}

static void object_wanted(struct extents *x, const struct extent_want *want, uint64_t end, bool again)
{
    struct object *o = object_of(x, &want->key, want->now_ms);
    uint32_t bytes = (uint32_t)((end < want->end ? end : want->end) - want->begin);
    o->seen_ms = want->now_ms;
    if (o->wanted_bytes >= WANTED_BYTES) {
        o->wanted_bytes /= 2;
        o->again_bytes /= 2;
    }
    o->wanted_bytes += bytes;
    o->again_bytes += again ? bytes : 0;
}

static bool is_quiet(const struct object *o, uint64_t now_ms)
{
    return o->scan.number == 0 || o->scan.moved_ms + SCAN_QUIET_MS <= now_ms;
}

/* The scan goes where its reader goes, or who overtakes it; others who read elsewhere do not turn it. */
static void scan_move(struct extents *x, const struct extent_want *want)
{
    struct object *o = object_of(x, &want->key, want->now_ms);
    uint64_t window = want->begin / EXTENT_BYTES_MAX;
    if (is_quiet(o, want->now_ms))
        o->scan.number = ++x->scans;
    else if (o->scan.reader != want->reader &&
             (window < o->scan.window || window > o->scan.window + SCAN_AHEAD))
        return;
    o->scan.window = window;
    o->scan.reader = want->reader;
    o->scan.moved_ms = want->now_ms;
}

static bool is_worth_keeping(struct extents *x, const struct extent *e)
{
    const struct object *o = object_of(x, &e->key, e->read_at_ms);
    return o->wanted_bytes <= e->unsure_bytes || o->again_bytes >= o->wanted_bytes / AGAIN_PART;
}

static void become_ghost(struct extents *x, struct extent *e)
{
    memory_free(x, e);
    e->ghost = true;
    list_del(&e->link);
    x->ghost_bytes += e->room;
    list_add_tail(&x->ghosts, &e->link);
    while (x->ghost_bytes > (uint64_t)x->frame_count * EXTENT_BYTES_MAX)
        extent_free(x, container_of(x->ghosts.next, struct extent, link));
}

static void put(struct extents *x, struct extent *e)
{
    check(e->refs > 0);
    if (--e->refs > 0)
        return;
    atomic_fetch_sub(&x->held_bytes, e->room);
    if (!e->unsure_bytes || !e->read || list_empty(&e->bucket))
        extent_free(x, e);
    else if (e->frame == FRAME_NONE || !is_worth_keeping(x, e))
        become_ghost(x, e);
}

/* ---- the table, with the lock held ---- */

static struct list *bucket_of(struct extents *x, const struct extent_key *key, uint64_t begin)
{
    return &x->buckets[(key_hash(key) + begin / EXTENT_BYTES_MAX) % BUCKETS];
}

/* It is found no more; freed unless somebody holds it. */
static void detach(struct extents *x, struct extent *e)
{
    list_del(&e->bucket);
    if (e->refs == 0)
        extent_free(x, e);
}

/* The extent that covers `begin`, or NULL; *end falls to where the next one begins. ghost: one covered it. */
static struct extent *find(struct extents *x, const struct extent_want *want, uint64_t begin, uint64_t *end,
                           bool *ghost)
{
    *ghost = false;
    list_for_each_safe (it, bucket_of(x, &want->key, begin)) {
        struct extent *e = container_of(it, struct extent, bucket);
        if (!key_equal(&e->key, &want->key) || e->begin >= *end || e->begin + e->room <= begin)
            continue;
        if (want->fresh || (e->read && is_past(e->read_at_ms, want->now_ms)))
            detach(x, e);
        else if (e->ghost && e->begin > begin)
            continue;
        else if (e->ghost)
            *ghost = true, extent_free(x, e);
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
    struct extent *e = extent_make(x, (uint32_t)(end - begin), true);
    if (!e)
        return -ENOMEM;
    e->key = want->key;
    e->begin = begin;
    e->unsure_bytes = want->unsure_bytes;
    list_add_tail(bucket_of(x, &want->key, begin), &e->bucket);
    w->extent = e;
    return 1;
}

int extent_get(struct extents *x, const struct extent_want *want, struct extent_wait *w)
{
    uint64_t begin = want->begin / BLOCK_BYTES * BLOCK_BYTES, end = block_align(want->end);
    check(want->begin < want->end && begin / EXTENT_BYTES_MAX == (end - 1) / EXTENT_BYTES_MAX);
    bool there = false, ghost;
    int rc = 0;
    pthread_mutex_lock(&x->lock);
    struct extent *e = find(x, want, begin, &end, &ghost);
    if (want->unsure_bytes)
        object_wanted(x, want, e ? e->begin + e->room : end, e || ghost);
    if (e)
        there = join(x, e, want, w);
    else
        rc = enter(x, want, begin, end, w);
    if (rc == 1 && want->unsure_bytes && want->reader)
        scan_move(x, want);
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
    if (!e->unsure_bytes || e->err.class != ERR_NONE)
        list_del(&e->bucket);
    else
        list_add_tail(&x->kept, &e->link);
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
    struct extent *e = extent_make(x, n, false);
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

/* ---- scans, with the lock held ---- */

static bool is_there(struct extents *x, const struct extent_key *key, uint64_t window)
{
    list_for_each (it, bucket_of(x, key, window * EXTENT_BYTES_MAX)) {
        const struct extent *e = container_of(it, struct extent, bucket);
        if (!e->ghost && e->begin / EXTENT_BYTES_MAX == window && key_equal(&e->key, key))
            return true;
    }
    return false;
}

/* The last window that is there, going on from where the scan is, or back, over small gaps. */
static uint64_t scan_edge(struct extents *x, const struct object *o, bool on)
{
    uint64_t edge = o->scan.window, gap = 0;
    for (uint64_t i = 1; i <= SCAN_WINDOWS && gap < SCAN_GAP && (on || i <= o->scan.window); i++) {
        uint64_t window = on ? o->scan.window + i : o->scan.window - i;
        bool there = is_there(x, &o->key, window);
        edge = there ? window : edge;
        gap = there ? 0 : gap + 1;
    }
    return edge;
}

/* Puts o among those that began first, in order, and returns how many they are. */
static unsigned add_first(struct object **first, unsigned n, struct object *o)
{
    unsigned i = n;
    for (; i > 0 && first[i - 1]->scan.number > o->scan.number; i--)
        if (i < EXTENT_SCANS_MAX)
            first[i] = first[i - 1];
    if (i < EXTENT_SCANS_MAX)
        first[i] = o;
    return n < EXTENT_SCANS_MAX ? n + 1 : n;
}

unsigned extents_scans(struct extents *x, const struct id *group, bool joins, uint64_t now_ms,
                       struct extent_scan out[EXTENT_SCANS_MAX])
{
    struct object *first[EXTENT_SCANS_MAX];
    unsigned n = 0;
    pthread_mutex_lock(&x->lock);
    for (unsigned i = 0; i < OBJECTS; i++) {
        struct object *o = &x->objects[i];
        if (id_equal(&o->key.group, group) && !is_quiet(o, now_ms))
            n = add_first(first, n, o);
    }
    for (unsigned i = 0; i < n; i++) {
        first[i]->again_bytes = joins ? first[i]->wanted_bytes : first[i]->again_bytes;
        out[i].object = first[i]->key.object;
        out[i].begin = scan_edge(x, first[i], false) * EXTENT_BYTES_MAX;
        out[i].end = (scan_edge(x, first[i], true) + 1) * EXTENT_BYTES_MAX;
    }
    pthread_mutex_unlock(&x->lock);
    return n;
}

bool extents_crowded(const struct extents *x)
{
    return atomic_load(&x->held_bytes) >= (uint64_t)x->frame_count * EXTENT_BYTES_MAX / HELD_PART;
}
