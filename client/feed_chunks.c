/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Samples of imported shards lie in sealed chunks. A raw one is received to where it is wanted and opened
 * there, piece by piece, while the core that received it has it in its cache; others come whole and are
 * decoded by the workers. Bytes of a chunk are used once all of it has verified. A chunk is fetched once for
 * all the pieces that want it while it is there; decoded ones stay until all of their samples were taken,
 * since a shuffled window comes back to the same chunks, or their memory is needed, the longest unused going
 * first. Where there is memory for all of an epoch, only the latter: the next one comes back.
 *
 * The planner never waits for memory while it holds back a request, and every chunk on its way ends by
 * itself, so there is always memory to come.
 */
#include <stdlib.h>
#include <string.h>

#include "client/feed_private.h"

#define FETCH_CHUNKS_MAX 256u

/* With the lock held. NULL only if n is 0 or memory is out. */
static uint8_t *buffer_take(struct larder_feed *f, size_t n)
{
    uint8_t *p = n > 0 ? feed_buffer_take(&f->buffers, n) : NULL;
    f->chunk_bytes += p ? feed_buffer_cost(n) : 0;
    return p;
}

static void buffer_give(struct larder_feed *f, uint8_t *p, size_t n)
{
    f->chunk_bytes -= p ? feed_buffer_cost(n) : 0;
    feed_buffer_give(&f->buffers, p, n);
}

static struct list *bucket_of(struct larder_feed *f, uint32_t shard, uint32_t number)
{
    return &f->buckets[(shard * 2654435761u ^ number * 40503u) >> 4 & (FEED_CHUNK_BUCKETS - 1)];
}

static struct feed_chunk *find(struct larder_feed *f, const struct dataset_view *v, uint32_t number)
{
    list_for_each (it, bucket_of(f, v->shard, number)) {
        struct feed_chunk *c = container_of(it, struct feed_chunk, bucket);
        if (c->dataset == v->dataset && c->shard == v->shard && c->number == number)
            return c;
    }
    return NULL;
}

/* With the lock held. */
static void chunk_free(struct larder_feed *f, struct feed_chunk *c)
{
    list_del(&c->bucket);
    list_del(&c->queue);
    buffer_give(f, c->stored, c->stored_bytes);
    if (!c->lent)
        buffer_give(f, c->plain, c->plain_bytes);
    if (c->view)
        dataset_view_put(c->view->dataset, c->view);
    part_opening_free(c->opening);
    free(c);
}

void feed_chunks_free(struct larder_feed *f)
{
    for (unsigned i = 0; i < FEED_CHUNK_BUCKETS; i++)
        for (struct list *it; (it = list_pop(&f->buckets[i]));)
            chunk_free(f, container_of(it, struct feed_chunk, bucket));
    feed_buffers_free(&f->buffers);
    while (f->opening_count > 0)
        part_opening_free(f->openings[--f->opening_count]);
}

/* With the lock held. */
static bool make_room(struct larder_feed *f, uint64_t need)
{
    while (f->chunk_bytes + need > f->chunk_bytes_max && f->chunk_bytes) {
        if (list_empty(&f->unused))
            return false;
        chunk_free(f, container_of(f->unused.next, struct feed_chunk, queue));
    }
    return true;
}

static const struct chunk_entry *entry_of(const struct dataset_view *v, uint32_t number)
{
    uint32_t count;
    const struct chunk_entry *table = part_chunks(v->part, &count);
    check(number < count); /* decoding the index has checked the tensor's chunks */
    return &table[number];
}

/* Is the whole chunk wanted in one place? Then it is decoded there. */
static bool wants_all(const struct feed_piece *p)
{
    return p->at == 0 && p->bytes == entry_of(p->view, p->chunk)->plain_bytes;
}

/* With the lock held; there is room. NULL: no memory. */
static struct feed_chunk *chunk_create(struct larder_feed *f, const struct feed_piece *p)
{
    struct dataset_view *v = p->view;
    uint32_t number = p->chunk;
    const struct chunk_entry *entry = entry_of(v, number);
    struct feed_chunk *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->dataset = v->dataset;
    c->shard = v->shard;
    c->number = number;
    c->stored_bytes = entry->stored_bytes;
    c->plain_bytes = entry->plain_bytes;
    c->raw = part_is_raw(v->part, number);
    c->stored = c->raw ? NULL : buffer_take(f, c->stored_bytes);
    c->lent = wants_all(p);
    c->plain = c->lent ? p->to : buffer_take(f, c->plain_bytes);
    list_init(&c->queue);
    list_init(&c->bucket);
    if (!c->plain || (!c->stored && c->stored_bytes && !c->raw)) {
        chunk_free(f, c);
        return NULL;
    }
    dataset_view_ref(v->dataset, v);
    c->view = v;
    if (!c->lent)
        c->left_bytes = f->forgets ? dataset_sample_bytes(v, number) : UINT64_MAX;
    list_add_tail(bucket_of(f, c->shard, c->number), &c->bucket);
    return c;
}

/* With the lock held: drops a pin. A chunk nobody uses may be forgotten from now on, and is at once if all of
 * its samples were taken: the next one is in its place then, which is still in the cache. */
static void unpin(struct larder_feed *f, struct feed_chunk *c)
{
    if (--c->pins > 0)
        return;
    if (c->lent || c->left_bytes == 0)
        chunk_free(f, c);
    else
        list_add_tail(&f->unused, &c->queue);
    pthread_cond_signal(&f->space);
}

static bool piece_fits(const struct feed_piece *p, const struct feed_chunk *c)
{
    return p->at <= c->plain_bytes && p->bytes <= c->plain_bytes - p->at;
}

/* With the lock held, which is free while the bytes are copied. c is READY. */
static void copy_pieces(struct larder_feed *f, struct feed_chunk *c, struct feed_piece *pieces)
{
    c->pins++;
    list_del(&c->queue);
    pthread_mutex_unlock(&f->lock);
    for (struct feed_piece *p = pieces; p; p = p->next)
        if (piece_fits(p, c) && p->to != c->plain)
            memcpy(p->to, c->plain + p->at, p->bytes);
    pthread_mutex_lock(&f->lock);
    for (struct feed_piece *p = pieces, *next; p; p = next) {
        struct err e;
        next = p->next; /* the batch may go with its last piece */
        c->left_bytes -= p->bytes < c->left_bytes ? p->bytes : c->left_bytes;
        if (!piece_fits(p, c))
            err_set(&e, ERR_CORRUPT, "chunk %u has %zu bytes, %u at %u were expected", c->number,
                    c->plain_bytes, (unsigned)p->bytes, p->at);
        feed_piece_ends(f, p, piece_fits(p, c) ? NULL : &e);
    }
    unpin(f, c);
}

/* ---- raw chunks, opened as they come ---- */

static struct part_opening *opening_take(struct larder_feed *f)
{
    pthread_mutex_lock(&f->lock);
    struct part_opening *o = f->opening_count > 0 ? f->openings[--f->opening_count] : NULL;
    pthread_mutex_unlock(&f->lock);
    return o ? o : part_opening_create();
}

/* With the lock held. */
static void opening_give(struct larder_feed *f, struct feed_chunk *c)
{
    if (c->opening && f->opening_count < FEED_OPENINGS_MAX)
        f->openings[f->opening_count++] = c->opening;
    else
        part_opening_free(c->opening);
    c->opening = NULL;
}

/* Its first bytes have come. What goes wrong is told once all of it is there. */
static void begin_opening(struct larder_feed *f, struct feed_chunk *c)
{
    struct err e;
    if (!c->opening)
        c->opening = opening_take(f);
    c->opens = c->opening && part_opening_begin(c->opening, c->view->part, c->number, &e) == 0;
}

void feed_chunk_some(struct ranged_read *r, struct read_piece *p, uint64_t at, size_t n)
{
    struct larder_feed *f = container_of(r, struct feed_fetch, read)->feed;
    struct feed_chunk *c = p->tag;
    if (!c->raw)
        return;
    if (at == 0)
        begin_opening(f, c);
    if (c->opens && at < c->plain_bytes)
        part_opening_add(c->opening, c->plain + at,
                         n < c->plain_bytes - at ? n : (size_t)(c->plain_bytes - at));
}

static void decoded(struct larder_feed *f, struct feed_chunk *c, int rc, struct err *e);

/* All of it has come: does it verify? */
static void end_opening(struct larder_feed *f, struct feed_chunk *c)
{
    struct err e = {0};
    int rc;
    if (!c->opening)
        rc = err_set(&e, ERR_NO_MEMORY, "no memory for opening a chunk");
    else if (c->opens)
        rc = part_opening_end(c->opening, c->plain, c->tag, &e);
    else
        rc = part_opening_begin(c->opening, c->view->part, c->number, &e); /* why not */
    check(rc < 0 || c->opens);
    decoded(f, c, rc, &e);
}

void feed_chunk_came(struct ranged_read *r, struct read_piece *p)
{
    struct feed_fetch *fetch = container_of(r, struct feed_fetch, read);
    struct larder_feed *f = fetch->feed;
    struct feed_chunk *c = p->tag;
    pthread_mutex_lock(&f->lock);
    bool raw = c && c->raw; /* any other may be decoded and freed as soon as the lock is given back */
    feed_fetch_came(fetch);
    if (c) {
        c->state = CHUNK_STORED;
        for (struct feed_piece *w = c->waiting; w; w = w->next)
            feed_piece_came(f, w);
    }
    if (c && !raw) {
        list_add_tail(&f->decode, &c->queue);
        pthread_cond_signal(&f->work);
    }
    pthread_mutex_unlock(&f->lock);
    if (raw)
        end_opening(f, c);
}

void feed_chunk_lost(struct larder_feed *f, struct feed_chunk *c, const struct err *e)
{
    for (struct feed_piece *p = c->waiting, *next; p; p = next) {
        next = p->next;
        if (c->state == CHUNK_FETCHING)
            feed_piece_came(f, p);
        feed_piece_ends(f, p, e);
    }
    chunk_free(f, c);
    pthread_cond_signal(&f->space);
}

static void add_chunk(struct feed_fetch *fetch, struct feed_chunk *c)
{
    const struct chunk_entry *entry = entry_of(c->view, c->number);
    struct id object = part_header(c->view->part)->segment_id;
    uint32_t n = fetch->read.count;
    if (n && entry->stored_bytes && id_equal(&object, &fetch->pieces[n - 1].object)) {
        const struct read_piece *last = &fetch->pieces[n - 1];
        uint64_t end = last->offset + last->bytes;
        if (entry->offset > end && entry->offset - end < BLOCK_BYTES) /* only padding between */
            fetch->pieces[n++] =
                (struct read_piece){.object = object, .offset = end, .bytes = entry->offset - end};
    }
    fetch->pieces[n++] = (struct read_piece){.object = object,
                                             .offset = entry->offset,
                                             .bytes = entry->stored_bytes,
                                             .into = c->raw ? c->plain : c->stored,
                                             .tail = c->tag,
                                             .tail_bytes = c->raw ? sizeof c->tag : 0,
                                             .tag = c};
    fetch->read.count = n;
}

/* Once more, alone. Without the lock. */
static void fetch_again(struct larder_feed *f, struct feed_chunk *c)
{
    struct feed_fetch *fetch = feed_fetch_create(f, c->view->dataset, 1);
    if (fetch) {
        add_chunk(fetch, c);
        fetch->read.past_lane = true;
        feed_fetch_start(fetch);
        return;
    }
    struct err e;
    err_set(&e, ERR_NO_MEMORY, "no memory for a request");
    pthread_mutex_lock(&f->lock);
    feed_chunk_lost(f, c, &e);
    pthread_mutex_unlock(&f->lock);
}

/* Without the lock: the chunk's plain bytes are there, or not. */
static void decoded(struct larder_feed *f, struct feed_chunk *c, int rc, struct err *e)
{
    pthread_mutex_lock(&f->lock);
    if (rc < 0 && e->class == ERR_CORRUPT && !c->again) {
        /* Damage on the way, or in a cache, is gone the second time. */
        c->again = true;
        c->state = CHUNK_FETCHING;
        for (struct feed_piece *p = c->waiting; p; p = p->next)
            feed_piece_goes(f, p);
        pthread_mutex_unlock(&f->lock);
        fetch_again(f, c);
        return;
    }
    if (rc < 0) {
        feed_chunk_lost(f, c, e);
        pthread_mutex_unlock(&f->lock);
        return;
    }
    struct dataset_view *view = c->view;
    struct feed_piece *waiting = c->waiting;
    c->view = NULL;
    c->waiting = NULL;
    c->state = CHUNK_READY;
    if (c->lent) { /* its bytes are there only until their batch is handed out */
        list_del(&c->bucket);
        list_init(&c->bucket);
    }
    buffer_give(f, c->stored, c->stored_bytes);
    c->stored = NULL;
    opening_give(f, c);
    copy_pieces(f, c, waiting);
    pthread_mutex_unlock(&f->lock);
    dataset_view_put(view->dataset, view);
}

void feed_chunk_decode(struct larder_feed *f, struct feed_chunk *c, struct part_scratch *s)
{
    struct err e = {0};
    uint8_t nothing[1] = {0};
    int rc = part_decode(c->view->part, s, c->number, c->stored ? c->stored : nothing, c->plain, &e);
    decoded(f, c, rc, &e);
}

/* The request that is being put together for a batch. */
struct gathering {
    struct larder_feed *f;
    struct feed_fetch *fetch; /* NULL: none begun */
};

/* Without the lock. */
static void send_off(struct gathering *g)
{
    struct feed_fetch *fetch = g->fetch;
    g->fetch = NULL;
    if (fetch && fetch->read.count)
        feed_fetch_start(fetch);
    else
        free(fetch);
}

/* With the lock held: a new chunk in the request. NULL: closing, or e is set. */
static struct feed_chunk *ask_for(struct gathering *g, struct feed_piece *p, struct err *e)
{
    struct larder_feed *f = g->f;
    const struct chunk_entry *entry = entry_of(p->view, p->chunk);
    uint64_t need = (part_is_raw(p->view->part, p->chunk) ? 0 : feed_buffer_cost(entry->stored_bytes)) +
                    (wants_all(p) ? 0 : feed_buffer_cost(entry->plain_bytes));
    while (!f->closing && !make_room(f, need)) {
        if (g->fetch) {
            pthread_mutex_unlock(&f->lock);
            send_off(g);
            pthread_mutex_lock(&f->lock);
        } else {
            pthread_cond_wait(&f->space, &f->lock); /* chunks on their way are bounded in time */
        }
    }
    if (f->closing)
        return NULL;
    if (!g->fetch)
        g->fetch = feed_fetch_create(f, p->view->dataset, 2 * FETCH_CHUNKS_MAX);
    struct feed_chunk *c = g->fetch ? chunk_create(f, p) : NULL;
    if (!c)
        err_set(e, ERR_NO_MEMORY, "no memory for a chunk of %u bytes", entry->plain_bytes);
    else
        add_chunk(g->fetch, c);
    return c;
}

/* With the lock held. */
static int request_piece(struct gathering *g, struct feed_piece *p, struct err *e)
{
    struct larder_feed *f = g->f;
    struct feed_chunk *c = find(f, p->view, p->chunk);
    p->next = NULL;
    if (c && c->state == CHUNK_READY) {
        copy_pieces(f, c, p);
        return 0;
    }
    if (!c)
        c = ask_for(g, p, e);
    if (!c) {
        if (e->class == ERR_NONE)
            err_set(e, ERR_CANCELLED, "the feed is being closed");
        feed_piece_ends(f, p, e);
        return -e->errnum;
    }
    p->next = c->waiting;
    c->waiting = p;
    if (c->state == CHUNK_FETCHING)
        feed_piece_goes(f, p);
    return 0;
}

int feed_chunks_request(struct larder_feed *f, struct feed_piece *pieces, uint32_t count, struct err *e)
{
    struct gathering g = {.f = f};
    int rc = 0;
    for (uint32_t i = 0; i < count; i++) {
        pthread_mutex_lock(&f->lock);
        if (rc == 0)
            rc = request_piece(&g, &pieces[i], e);
        else
            feed_piece_ends(f, &pieces[i], e);
        pthread_mutex_unlock(&f->lock);
        if (g.fetch && g.fetch->read.count + 2 > 2 * FETCH_CHUNKS_MAX)
            send_off(&g);
    }
    send_off(&g);
    return rc;
}
