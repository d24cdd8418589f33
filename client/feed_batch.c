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
    struct dataset_view **views; /* one reference each; NULL: the shard's index is damaged */
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
                f->sources[s->dataset].dataset->name,
                f->sources[s->dataset].dataset->table.shards[s->shard].name, key, p->bytes, p->offset);
}

void feed_batch_ready(struct larder_feed *f, struct larder_batch *b)
{
    b->complete = true;
    if (f->lift && b->err.class == ERR_NONE) {
        feed_lift_wake(f); /* ready when it is on its way to the device */
        return;
    }
    b->ready = true;
    pthread_cond_broadcast(&f->changed);
}

/* With the lock held: nothing of the batch is on its way any more. */
static void settled(struct larder_feed *f, struct larder_batch *b)
{
    if (!b->hurt || b->err.class != ERR_NONE) {
        feed_batch_ready(f, b);
        return;
    }
    list_add_tail(&f->repairs, &b->repair);
    pthread_cond_signal(&f->work);
}

void feed_piece_ends(struct larder_feed *f, struct feed_piece *p, const struct err *e)
{
    struct larder_batch *b = p->batch;
    if (e && b->err.class == ERR_NONE) {
        struct err why = *e;
        tell_where(f, p, &why);
        if (f->damage != FEED_FAIL && feed_is_damage(e))
            feed_hurt_add(b, p->sample, &why);
        else
            b->err = why;
    }
    if (--b->pending == 0)
        settled(f, b);
}

void feed_piece_goes(struct larder_feed *f, struct feed_piece *p)
{
    p->batch->fetching++;
    f->pieces_in_flight++;
    f->bytes_in_flight += p->bytes;
}

void feed_piece_came(struct larder_feed *f, struct feed_piece *p)
{
    f->bytes_in_flight -= p->bytes;
    if (f->pieces_in_flight-- == FEED_PIECES_IN_FLIGHT)
        pthread_cond_signal(&f->space);
    if (--p->batch->fetching == 0)
        pthread_cond_broadcast(&f->changed);
}

/* ---- drafting ---- */

static uint32_t spans(const struct dataset_view *v, uint64_t offset, uint64_t bytes)
{
    if (bytes == 0)
        return 0;
    if (v->dataset->published)
        return 1;
    return dataset_chunk_of(v, offset + bytes - 1).chunk - dataset_chunk_of(v, offset).chunk + 1;
}

static int find_view(struct drafting *d, uint32_t i, struct err *e)
{
    struct larder_feed *f = d->f;
    uint32_t shard = d->places[i].at.at.shard;
    struct feed_source *s = &f->sources[d->places[i].at.source];
    if (s->shard_bad[shard])
        return 0;
    int rc = dataset_view_get(s->dataset, shard, true, &d->views[i], e);
    if (rc < 0 && f->damage != FEED_FAIL && feed_is_damage(e)) {
        s->shard_bad[shard] = strdup(e->text);
        rc = s->shard_bad[shard] ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for noting a damaged shard");
    }
    return rc;
}

static int measure(struct drafting *d, uint32_t i, struct err *e)
{
    struct order_place at = d->places[i].at.at;
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
        d->strings += field.name.n + 1 + field.type.n + 1;
        d->pieces += spans(v, field.offset, field.bytes);
        if (field.bytes > SIZE_MAX / 4 || add_overflows(d->bytes, feed_align(field.bytes), &d->bytes))
            return err_set(e, ERR_LIMIT, "a batch of more bytes than memory can have");
    }
    return 0;
}

/* ---- stacks ---- */

static struct feed_stack *stack_named(const struct larder_batch *b, uint32_t guess, struct slice name)
{
    for (uint32_t i = 0; i < b->stack_count; i++) {
        struct feed_stack *s = &b->stacks[(guess + i) % b->stack_count];
        if (slice_eq(s->name, name))
            return s;
    }
    return NULL;
}

static struct feed_stack *stack_of(const struct larder_batch *b, uint32_t k, const struct sample_field *field)
{
    struct feed_stack *s = stack_named(b, k, field->name);
    return s && s->fits ? s : NULL;
}

/* The fields of the first sample that there is; which of them all others have too, with that size, is found
 * next. */
static int stacks_begin(struct drafting *d, struct err *e)
{
    struct larder_batch *b = d->b;
    uint32_t i = 0;
    while (i < b->count && !d->views[i])
        i++;
    if (i == b->count)
        return 0;
    const struct samples *samples = d->views[i]->samples;
    uint64_t number = d->places[i].at.at.sample;
    b->stack_count = samples_fields(samples, number);
    b->stacks = calloc(b->stack_count, sizeof *b->stacks);
    if (!b->stacks)
        return err_set(e, ERR_NO_MEMORY, "no memory for describing a batch of %u samples", b->count);
    for (uint32_t k = 0; k < b->stack_count; k++) {
        struct sample_field field = samples_field(samples, number, k);
        b->stacks[k] = (struct feed_stack){.name = field.name, .bytes = (size_t)field.bytes, .fits = true};
    }
    return 0;
}

static void stacks_compare(struct drafting *d, uint32_t i)
{
    const struct larder_batch *b = d->b;
    const struct samples *samples = d->views[i]->samples;
    uint64_t number = d->places[i].at.at.sample;
    uint32_t fields = samples_fields(samples, number), found = 0;
    for (uint32_t k = 0; k < fields; k++) {
        struct sample_field field = samples_field(samples, number, k);
        struct feed_stack *s = stack_named(b, k, field.name);
        found += s != NULL;
        if (s && s->bytes != field.bytes)
            s->fits = false;
    }
    for (uint32_t k = 0; found < b->stack_count && k < b->stack_count; k++) {
        bool has = false;
        for (uint32_t j = 0; j < fields; j++)
            has |= slice_eq(b->stacks[k].name, samples_field(samples, number, j).name);
        b->stacks[k].fits &= has;
    }
}

/* Bytes of the batch with every stack in a block of its own. */
static int stacks_measure(struct drafting *d, struct err *e)
{
    struct larder_batch *b = d->b;
    int rc = stacks_begin(d, e);
    for (uint32_t i = 0; rc == 0 && i < b->count; i++)
        if (d->views[i])
            stacks_compare(d, i);
    size_t bytes = 0, rows;
    for (uint32_t k = 0; rc == 0 && k < b->stack_count; k++) {
        const struct feed_stack *s = &b->stacks[k];
        if (s->fits && (mul_overflows(s->bytes, (size_t)b->count, &rows) || rows > SIZE_MAX / 4 ||
                        add_overflows(bytes, feed_align(rows), &bytes)))
            rc = err_set(e, ERR_LIMIT, "a batch of more bytes than memory can have");
    }
    for (uint32_t i = 0; rc == 0 && i < b->count; i++) {
        const struct dataset_view *v = d->views[i];
        uint64_t number = d->places[i].at.at.sample;
        for (uint32_t k = 0; v && k < samples_fields(v->samples, number); k++) {
            struct sample_field field = samples_field(v->samples, number, k);
            if (!stack_of(b, k, &field))
                bytes += feed_align(field.bytes); /* added up once before, by measure */
        }
    }
    d->bytes = bytes;
    return rc;
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
    if (rc == 0 && d->f->contiguous)
        rc = stacks_measure(d, e);
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

/* With the lock held: small samples take less memory than what describes them; both are bounded. */
static bool far_ahead(const struct larder_feed *f)
{
    if (f->batches_ahead >= f->batches_ahead_max)
        return true;
    return f->batches_ahead >= 2 && f->described_bytes > f->depth_bytes / 4;
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
    while (!f->closing &&
           (far_ahead(f) || (own ? !all_handed_out(f) : !feed_arena_take(&f->arena, bytes, r)))) {
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
    b->feed->described_bytes -= b->described_bytes;
    feed_lift_drop(b);
    if (b->region)
        feed_arena_give(&b->feed->arena, b->region);
    else if (b->data)
        munmap(b->data, b->data_bytes);
    free(b->samples);
    free(b->fields);
    free(b->strings);
    free(b->stacks);
    feed_hurts_free(b);
    free(b->bad);
    free(b->pieces);
    free(b);
}

static void count_description(const struct drafting *d)
{
    struct larder_batch *b = d->b;
    struct larder_feed *f = d->f;
    size_t piece = sizeof *b->pieces + 2 * sizeof(struct read_piece); /* the request has a gap before each */
    b->described_bytes = sizeof *b + b->count * sizeof *b->samples + d->fields * sizeof *b->fields +
                         d->pieces * piece + d->strings;
    pthread_mutex_lock(&f->lock);
    f->described_bytes += b->described_bytes;
    pthread_mutex_unlock(&f->lock);
}

static int take_descriptions(struct drafting *d, struct err *e)
{
    struct larder_batch *b = d->b;
    count_description(d);
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

static void put_pieces(struct drafting *d, struct cursor *c, uint32_t i, const struct sample_field *field,
                       uint8_t *to)
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
                                 .to = to + done};
        if (!v->dataset->published) {
            struct chunk_place at = dataset_chunk_of(v, p->offset);
            p->chunk = at.chunk;
            p->at = at.offset;
            p->bytes = at.bytes < left ? at.bytes : left;
        }
        done += p->bytes;
    }
}

/* A shard whose index is damaged: the row has nothing but its place. */
static void put_nothing(struct drafting *d, uint32_t i)
{
    const struct larder_sample *s = &d->b->samples[i];
    const struct feed_source *source = &d->f->sources[s->dataset];
    struct err why;
    err_set(&why, ERR_CORRUPT, "dataset \"%s\", %s", source->dataset->name, source->shard_bad[s->shard]);
    feed_hurt_add(d->b, i, &why);
}

static uint8_t *put_field(struct drafting *d, struct cursor *c, uint32_t i, uint32_t k,
                          const struct sample_field *field)
{
    struct feed_stack *s = stack_of(d->b, k, field);
    uint8_t *at = s ? s->base + i * s->bytes : c->at;
    if (!s)
        c->at += feed_align(field->bytes);
    return at;
}

static void put_sample(struct drafting *d, struct cursor *c, uint32_t i)
{
    struct larder_sample *s = &d->b->samples[i];
    struct order_place at = d->places[i].at.at;
    *s = (struct larder_sample){.key = "",
                                .position = d->places[i].position,
                                .shard = at.shard,
                                .number = at.sample,
                                .dataset = d->places[i].at.source};
    const struct dataset_view *v = d->views[i];
    if (!v) {
        put_nothing(d, i);
        return;
    }
    s->key = put_string(c, samples_key(v->samples, at.sample));
    s->fields = samples_fields(v->samples, at.sample);
    s->field = c->field;
    for (uint32_t k = 0; k < s->fields; k++) {
        struct sample_field field = samples_field(v->samples, at.sample, k);
        uint8_t *to = put_field(d, c, i, k, &field);
        *c->field++ = (struct larder_field){.name = put_string(c, field.name),
                                            .data = to,
                                            .bytes = (size_t)field.bytes,
                                            .type = put_string(c, field.type)};
        put_pieces(d, c, i, &field, to);
    }
}

static void put_stacks(struct larder_batch *b, struct cursor *c)
{
    for (uint32_t k = 0; k < b->stack_count; k++) {
        struct feed_stack *s = &b->stacks[k];
        if (!s->fits)
            continue;
        s->base = c->at;
        c->at += feed_align(s->bytes * b->count);
    }
}

static int by_place(const void *a, const void *b)
{
    const struct feed_piece *p = a, *q = b;
    uint32_t from = p->batch->samples[p->sample].dataset, other = q->batch->samples[q->sample].dataset;
    if (from != other)
        return from < other ? -1 : 1;
    if (p->view->shard != q->view->shard)
        return p->view->shard < q->view->shard ? -1 : 1;
    return p->offset < q->offset ? -1 : p->offset > q->offset;
}

static void fill_in(struct drafting *d)
{
    struct larder_batch *b = d->b;
    struct cursor c = {.field = b->fields, .string = b->strings, .piece = b->pieces, .at = b->data};
    put_stacks(b, &c);
    for (uint32_t i = 0; i < b->count; i++)
        put_sample(d, &c, i);
    check((size_t)(c.piece - b->pieces) == d->pieces && (size_t)(c.at - b->data) == d->bytes);
    qsort(b->pieces, b->piece_count, sizeof *b->pieces, by_place);
    uint32_t first = 0; /* the row that the stacks were begun with; its names stay */
    while (b->stack_count && !d->views[first])
        first++;
    for (uint32_t k = 0; k < b->stack_count; k++)
        b->stacks[k].name = slice_str(b->samples[first].field[k].name);
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
    f->batches_ahead++;
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
}

static void planned(struct larder_feed *f, struct larder_batch *b, const struct err *e)
{
    pthread_mutex_lock(&f->lock);
    if (e && b->err.class == ERR_NONE)
        b->err = *e;
    b->asked = true;
    if (--b->pending == 0)
        settled(f, b);
    pthread_mutex_unlock(&f->lock);
}

static void drafting_free(struct drafting *d)
{
    for (uint32_t i = 0; d->views && i < d->b->count; i++)
        if (d->views[i])
            dataset_view_put(d->views[i]->dataset, d->views[i]);
    free(d->views);
    free(d->places);
}

static const struct dataset_local *local_of(const struct larder_feed *f, const struct larder_dataset *d)
{
    for (uint32_t i = 0; i < f->source_count; i++)
        if (f->sources[i].dataset == d)
            return f->sources[i].local;
    return NULL;
}

/* Waits until few enough are on their way; each ends by itself. */
static void wait_in_flight(struct larder_feed *f)
{
    pthread_mutex_lock(&f->lock);
    while (!f->closing && f->pieces_in_flight >= FEED_PIECES_IN_FLIGHT)
        pthread_cond_wait(&f->space, &f->lock);
    pthread_mutex_unlock(&f->lock);
}

/* Asks for the pieces, those of one dataset after those of another. */
static int request(struct larder_feed *f, struct larder_batch *b, struct err *e)
{
    int rc = 0;
    for (uint32_t i = 0, n; i < b->piece_count; i += n) {
        struct feed_piece *first = &b->pieces[i];
        const struct larder_dataset *d = first->view->dataset;
        for (n = 1; i + n < b->piece_count && first[n].view->dataset == d; n++)
            ;
        if (rc == 0) {
            const struct dataset_local *local = local_of(f, d);
            rc = local          ? feed_local_request(f, local, first, n, e)
                 : d->published ? feed_ranges_request(f, first, n, e)
                                : feed_chunks_request(f, first, n, e);
            continue;
        }
        pthread_mutex_lock(&f->lock);
        for (uint32_t k = 0; k < n; k++)
            feed_piece_ends(f, &first[k], e);
        pthread_mutex_unlock(&f->lock);
    }
    return rc;
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
    wait_in_flight(f);
    if (rc == 0)
        rc = request(f, b, e);
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
        *b = (struct larder_batch){.feed = f, .slice = slice, .count = slice.count, .references = 1};
        list_init(&b->link);
        list_init(&b->repair);
        rc = plan_batch(f, b, &e);
    }
    pthread_mutex_lock(&f->lock);
    f->planned_all = rc == 0 && f->plan.epoch >= f->plan.epochs;
    f->planner_runs = false;
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
    return NULL;
}
