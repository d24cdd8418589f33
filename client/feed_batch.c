/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The planner: which samples make up the next batch, where their fields lie, memory for them, and the
 * request. It runs ahead of the consumer as far as memory allows and stops at the first batch that cannot be
 * planned; batches before it are still handed out.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "client/clock.h"
#include "client/feed_private.h"

/* A batch while it is planned: what its samples are, and how much of everything they take. */
struct drafting {
    struct larder_feed *f;
    struct larder_batch *b;
    struct feed_place *places;
    struct dataset_view **views; /* one reference each; NULL: the shard's index is damaged, left out */
    size_t fields, strings, pieces, bytes;
};

bool feed_is_damage(const struct err *e)
{
    return e->class == ERR_CORRUPT || e->class == ERR_IO;
}

/* ---- ends of pieces ---- */

static void tell_where(const struct larder_feed *f, const struct feed_piece *p, struct err *e)
{
    char key[128];
    const struct larder_batch *b = p->batch;
    const struct larder_sample *s = &b->samples[p->sample];
    err_quote(key, sizeof key, s->key, strlen(s->key));
    err_prepend(e, "dataset \"%s\", shard \"%s\", sample \"%s\" (%" PRIu64 " bytes at %" PRIu64 ")",
                f->dataset->name, f->dataset->table.shards[s->shard].name, key, p->bytes, p->offset);
}

static void batch_ready(struct larder_feed *f, struct larder_batch *b)
{
    b->ready = true;
    pthread_cond_broadcast(&f->changed);
}

void feed_piece_ends(struct larder_feed *f, struct feed_piece *p, const struct err *e)
{
    struct larder_batch *b = p->batch;
    if (e && f->skip_damage && feed_is_damage(e)) {
        b->bad[p->sample] = true;
    } else if (e && b->err.class == ERR_NONE) {
        b->err = *e;
        tell_where(f, p, &b->err);
    }
    if (--b->pending == 0)
        batch_ready(f, b);
}

void feed_piece_came(struct larder_feed *f, struct feed_piece *p)
{
    if (--p->batch->fetching == 0)
        pthread_cond_broadcast(&f->changed);
}

/* ---- drafting ---- */

static uint32_t spans(const struct larder_feed *f, const struct dataset_view *v, uint64_t offset,
                      uint64_t bytes)
{
    if (bytes == 0)
        return 0;
    if (f->dataset->published)
        return 1;
    return dataset_chunk_of(v, offset + bytes - 1).chunk - dataset_chunk_of(v, offset).chunk + 1;
}

static int find_view(struct drafting *d, uint32_t i, struct err *e)
{
    struct larder_feed *f = d->f;
    uint32_t shard = d->places[i].at.shard;
    if (f->shard_bad[shard])
        return 0;
    int rc = dataset_view_get(f->dataset, shard, true, &d->views[i], e);
    if (rc < 0 && f->skip_damage && feed_is_damage(e)) {
        f->shard_bad[shard] = true;
        err_clear(e);
        rc = 0;
    }
    return rc;
}

static int measure(struct drafting *d, uint32_t i, struct err *e)
{
    struct order_place at = d->places[i].at;
    const struct dataset_view *v = d->views[i];
    if (!v)
        return 0;
    if (at.sample >= samples_count(v->samples))
        return err_set(e, ERR_CORRUPT, "shard %u has %" PRIu64 " samples, number %" PRIu64 " was expected",
                       at.shard, samples_count(v->samples), at.sample);
    uint32_t n = samples_fields(v->samples, at.sample);
    d->fields += n;
    d->strings += samples_key(v->samples, at.sample).n + 1;
    for (uint32_t k = 0; k < n; k++) {
        struct sample_field field = samples_field(v->samples, at.sample, k);
        d->strings += field.name.n + 1;
        d->pieces += spans(d->f, v, field.offset, field.bytes);
        if (field.bytes > SIZE_MAX / 4 || add_overflows(d->bytes, feed_align(field.bytes), &d->bytes))
            return err_set(e, ERR_LIMIT, "a batch of more bytes than memory can have");
    }
    return 0;
}

static int draft(struct drafting *d, struct err *e)
{
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < d->b->count; i++) {
        d->places[i] = feed_plan_place(&d->f->plan, &d->b->slice, i);
        rc = find_view(d, i, e);
        if (rc == 0)
            rc = measure(d, i, e);
    }
    if (rc == 0 && d->pieces > UINT32_MAX)
        rc = err_set(e, ERR_LIMIT, "a batch of %zu pieces", d->pieces);
    return rc;
}

/* ---- memory ---- */

static bool all_handed_out(const struct larder_feed *f)
{
    return list_empty(&f->batches);
}

/* More than the arena can ever hold: a mapping of its own, for one batch at a time. */
static int take_own(struct larder_batch *b, size_t bytes, struct err *e)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return err_sys(e, errno, "memory for a batch of %zu bytes", bytes);
    b->data = p;
    b->data_bytes = bytes;
    return 0;
}

/* Waits for room; the time counts as waiting for the consumer. */
static int take_space(struct larder_feed *f, struct larder_batch *b, size_t bytes, struct err *e)
{
    struct feed_region *r = calloc(1, sizeof *r);
    if (!r)
        return err_set(e, ERR_NO_MEMORY, "no memory for a batch");
    bool own = feed_align(bytes) > f->arena.bytes;
    int rc = 0;
    pthread_mutex_lock(&f->lock);
    uint64_t begin = clock_ns();
    while (!f->closing && (own ? !all_handed_out(f) : !feed_arena_take(&f->arena, bytes, r))) {
        f->want_space = true;
        pthread_cond_wait(&f->space,
                          &f->lock); /* bounded by the consumer, who may pause as long as he likes */
    }
    f->want_space = false;
    f->starved_consumer += (double)(clock_ns() - begin) / 1e9;
    if (f->closing)
        rc = err_set(e, ERR_CANCELLED, "the feed is being closed");
    pthread_mutex_unlock(&f->lock);
    if (rc == 0 && own)
        rc = take_own(b, bytes, e);
    if (r->at) {
        b->region = r;
        b->data = r->at;
        b->data_bytes = r->bytes;
    } else {
        free(r);
    }
    return rc;
}

void feed_batch_free(struct larder_batch *b)
{
    if (b->region)
        feed_arena_give(&b->feed->arena, b->region);
    else if (b->data)
        munmap(b->data, b->data_bytes);
    free(b->samples);
    free(b->fields);
    free(b->strings);
    free(b->bad);
    free(b->pieces);
    free(b);
}

static int take_descriptions(struct drafting *d, struct err *e)
{
    struct larder_batch *b = d->b;
    b->piece_count = (uint32_t)d->pieces;
    b->samples = calloc(b->count, sizeof *b->samples);
    b->bad = calloc(b->count, sizeof *b->bad);
    b->fields = calloc(d->fields + 1, sizeof *b->fields);
    b->pieces = calloc(d->pieces + 1, sizeof *b->pieces);
    b->strings = malloc(d->strings + 1);
    if (!b->samples || !b->bad || !b->fields || !b->pieces || !b->strings)
        return err_set(e, ERR_NO_MEMORY, "no memory for describing a batch of %u samples", b->count);
    return 0;
}

/* ---- filling in ---- */

struct cursor {
    struct larder_field *field;
    char *string;
    struct feed_piece *piece;
    uint8_t *at;
};

static const char *put_string(struct cursor *c, struct slice s)
{
    char *out = c->string;
    memcpy(out, s.p, s.n);
    out[s.n] = '\0';
    c->string += s.n + 1;
    return out;
}

static void put_pieces(struct drafting *d, struct cursor *c, uint32_t i, const struct sample_field *field)
{
    struct dataset_view *v = d->views[i];
    for (uint64_t done = 0; done < field->bytes;) {
        struct feed_piece *p = c->piece++;
        uint64_t left = field->bytes - done;
        *p = (struct feed_piece){.batch = d->b,
                                 .view = v,
                                 .sample = i,
                                 .offset = field->offset + done,
                                 .bytes = left,
                                 .to = c->at + done};
        if (!d->f->dataset->published) {
            struct chunk_place at = dataset_chunk_of(v, p->offset);
            p->chunk = at.chunk;
            p->at = at.offset;
            p->bytes = at.bytes < left ? at.bytes : left;
        }
        done += p->bytes;
    }
}

static void put_sample(struct drafting *d, struct cursor *c, uint32_t i)
{
    struct larder_sample *s = &d->b->samples[i];
    struct order_place at = d->places[i].at;
    *s = (struct larder_sample){
        .key = "", .position = d->places[i].position, .shard = at.shard, .number = at.sample};
    const struct dataset_view *v = d->views[i];
    if (!v) {
        d->b->bad[i] = true;
        return;
    }
    s->key = put_string(c, samples_key(v->samples, at.sample));
    s->fields = samples_fields(v->samples, at.sample);
    s->field = c->field;
    for (uint32_t k = 0; k < s->fields; k++) {
        struct sample_field field = samples_field(v->samples, at.sample, k);
        *c->field++ = (struct larder_field){
            .name = put_string(c, field.name), .data = c->at, .bytes = (size_t)field.bytes};
        put_pieces(d, c, i, &field);
        c->at += feed_align(field.bytes);
    }
}

static int by_place(const void *a, const void *b)
{
    const struct feed_piece *p = a, *q = b;
    if (p->view->shard != q->view->shard)
        return p->view->shard < q->view->shard ? -1 : 1;
    return p->offset < q->offset ? -1 : p->offset > q->offset;
}

static void fill_in(struct drafting *d)
{
    struct larder_batch *b = d->b;
    struct cursor c = {.field = b->fields, .string = b->strings, .piece = b->pieces, .at = b->data};
    for (uint32_t i = 0; i < b->count; i++)
        put_sample(d, &c, i);
    check((size_t)(c.piece - b->pieces) == d->pieces && (size_t)(c.at - b->data) == d->bytes);
    qsort(b->pieces, b->piece_count, sizeof *b->pieces, by_place);
}

/* ---- planning ---- */

/* Puts the batch in line, with one piece more than it has so that it stays. */
static void line_up(struct larder_feed *f, struct larder_batch *b)
{
    pthread_mutex_lock(&f->lock);
    f->batches_planned++;
    pthread_cond_signal(&f->scouting);
    b->pending = b->piece_count + 1;
    list_add_tail(&f->batches, &b->link);
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
}

static void planned(struct larder_feed *f, struct larder_batch *b, const struct err *e)
{
    pthread_mutex_lock(&f->lock);
    if (e && b->err.class == ERR_NONE)
        b->err = *e;
    if (--b->pending == 0)
        batch_ready(f, b);
    pthread_mutex_unlock(&f->lock);
}

static void drafting_free(struct drafting *d)
{
    for (uint32_t i = 0; d->views && i < d->b->count; i++)
        if (d->views[i])
            dataset_view_put(d->f->dataset, d->views[i]);
    free(d->views);
    free(d->places);
}

/* Plans and asks for one batch. On failure it stands in line with the error instead of samples. */
static int plan_batch(struct larder_feed *f, struct larder_batch *b, struct err *e)
{
    struct drafting d = {.f = f,
                         .b = b,
                         .places = calloc(b->count, sizeof *d.places),
                         .views = calloc(b->count, sizeof *d.views)};
    int rc = d.places && d.views ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for planning a batch");
    if (rc == 0)
        rc = draft(&d, e);
    if (rc == 0)
        rc = take_descriptions(&d, e);
    if (rc == 0)
        rc = take_space(f, b, d.bytes, e);
    if (rc == 0)
        fill_in(&d);
    else
        b->piece_count = 0;
    line_up(f, b);
    if (rc == 0)
        rc = f->dataset->published ? feed_ranges_request(f, b, e) : feed_chunks_request(f, b, e);
    drafting_free(&d);
    planned(f, b, rc < 0 ? e : NULL);
    return rc;
}

void *feed_planner(void *arg)
{
    struct larder_feed *f = arg;
    struct feed_slice slice;
    struct err e = {0};
    int rc = 0;
    while (rc == 0 && feed_plan_next(&f->plan, &slice)) {
        struct larder_batch *b = calloc(1, sizeof *b);
        if (!b)
            break; /* the consumer hears of it: not all was planned */
        *b = (struct larder_batch){.feed = f, .slice = slice, .count = slice.count};
        list_init(&b->link);
        rc = plan_batch(f, b, &e);
    }
    pthread_mutex_lock(&f->lock);
    f->planned_all = rc == 0 && f->plan.epoch >= f->plan.epochs;
    f->planner_runs = false;
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
    return NULL;
}
