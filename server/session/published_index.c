/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sample indexes of published shards: kept in memory, and in a file each (published_cache.h); where neither
 * has one that is of this very shard, it is built by reading the shard once, or the .idx of a token file.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "server/obs/metrics.h"
#include "server/session/published.h"
#include "server/session/published_cache.h"
#include "server/session/shard_files.h"

#define INDEX_READ_BYTES (256u << 10)

struct index_job {
    struct list link; /* published's jobs */
    struct published *p;
    struct pubversion *version; /* a reference */
    uint32_t shard;
    struct list waiting; /* streams, by their link; not begun */
    struct samples_builder *builder;
    struct cache_op cache;
    struct shard_file_wait wait;
    struct shard_file_look look;
    struct shard_file *file;
    struct io_op io;
    uint64_t offset, bytes; /* of the file that is read */
    struct err err;
    struct buf encoded;
    uint8_t *memory;
};

static struct sample_index *index_known(struct published *p, const struct id *version, uint32_t shard)
{
    list_for_each (l, &p->indexes) {
        struct sample_index *x = container_of(l, struct sample_index, link);
        if (x->shard != shard || !id_equal(&x->version, version))
            continue;
        list_del(&x->link);
        list_add_tail(&p->indexes, &x->link);
        return x;
    }
    return NULL;
}

static void index_evict(struct published *p)
{
    list_for_each_safe (l, &p->indexes) {
        struct sample_index *x = container_of(l, struct sample_index, link);
        if (p->index_bytes <= p->w->server->limits.sample_index_bytes_max)
            return;
        if (x->refs > 0)
            continue;
        list_del(&x->link);
        p->index_bytes -= x->encoded.n;
        buf_free(&x->encoded);
        free(x);
    }
}

static void samples_next(struct stream *st, uint64_t max_bytes, struct piece *p)
{
    uint64_t left = st->samples->encoded.n - st->position;
    p->offset = st->position;
    p->extent_bytes = p->send_bytes = (uint32_t)(left < max_bytes ? left : max_bytes);
    st->position += p->send_bytes;
    st->all_begun = st->position == st->samples->encoded.n;
}

static void samples_read(struct piece *p)
{
    p->data = SLICE(p->stream->samples->encoded.p + p->offset, p->send_bytes);
    p->state = PIECE_READY;
}

static void samples_end(struct stream *st)
{
    check(st->samples->refs > 0);
    st->samples->refs--;
    index_evict(st->r.s->w->published);
}

static const struct stream_source samples_source = {
    .next = samples_next, .read = samples_read, .end = samples_end};

static void samples_begin(struct stream *st, struct sample_index *x)
{
    x->refs++;
    st->samples = x;
    st->all_begun = x->encoded.n == 0;
    stream_begin(st, &samples_source, CLASS_FEED, false, st->credit);
}

/* Keeps what was built; NULL: no memory. */
static struct sample_index *job_keep(struct index_job *j)
{
    struct sample_index *x = calloc(1, sizeof *x);
    if (!x) {
        err_set(&j->err, ERR_NO_MEMORY, "no memory for a sample index");
        return NULL;
    }
    x->version = j->version->id;
    x->shard = j->shard;
    x->encoded = j->encoded;
    j->encoded = (struct buf){0};
    list_add_tail(&j->p->indexes, &x->link);
    j->p->index_bytes += x->encoded.n;
    return x;
}

static void job_end(struct index_job *j)
{
    struct published *p = j->p;
    struct sample_index *x = j->err.class == ERR_NONE ? job_keep(j) : NULL;
    list_del(&j->link);
    if (x)
        x->refs++; /* until everyone who waits has it */
    for (struct list *l; (l = list_pop(&j->waiting));) {
        struct stream *st = container_of(l, struct stream, link);
        struct session *s = st->r.s;
        if (stream_found(st)) {
            if (x)
                samples_begin(st, x);
            else
                stream_fail(st, &j->err);
        }
        session_settle(s);
    }
    if (x)
        x->refs--;
    index_evict(p);
    pubversion_unref(p, j->version);
    samples_builder_free(j->builder);
    buf_free(&j->encoded);
    free(j->memory);
    free(j);
}

static void job_stored(struct cache_op *op)
{
    job_end(container_of(op, struct index_job, cache));
}

/* Built, or failed. */
static void job_built(struct index_job *j)
{
    shard_file_put(j->file);
    j->cache.done = job_stored;
    if (j->err.class != ERR_NONE ||
        !cache_store(&j->cache, j->p->w, j->version, j->shard, SLICE(j->encoded.p, j->encoded.n)))
        job_end(j);
}

static void job_checked(struct shard_file_look *l, const struct err *e)
{
    struct index_job *j = container_of(l, struct index_job, look);
    struct samples *samples = NULL;
    j->err = *e;
    if (e->class == ERR_NONE && samples_builder_finish(j->builder, &samples, &j->err) == 0) {
        int r = samples_encode(samples, &j->encoded, &j->err);
        check(r == 0 || j->err.class != ERR_NONE);
        samples_free(samples);
    }
    job_built(j);
}

static void job_read(struct index_job *j);

/* The name of the file that is read. */
static const char *job_name(const struct index_job *j)
{
    const struct pubshard *shard = &j->version->shards[j->shard];
    return shard->idx ? shard->idx : shard->name;
}

static void job_got(struct io_op *op)
{
    struct index_job *j = container_of(op, struct index_job, io);
    const char *dir = j->version->dir->name;
    if (op->result < 0)
        err_sys(&j->err, (int)-op->result, "reading shard %s of %s at byte %" PRIu64, job_name(j), dir,
                j->offset);
    else if (op->result == 0)
        err_set(&j->err, ERR_MISMATCH,
                "shard %s of %s ends at byte %" PRIu64 ", it had %" PRIu64
                " when it was opened; open the dataset again",
                job_name(j), dir, j->offset, j->bytes);
    else if (samples_builder_push(j->builder, j->memory, (size_t)op->result, &j->err) == 0)
        j->offset += (uint64_t)op->result;
    if (j->err.class != ERR_NONE) {
        job_built(j);
        return;
    }
    metric_add(METRIC_feed_read_bytes, op->result);
    uint64_t skip = samples_builder_skippable(j->builder);
    if (skip > 0)
        samples_builder_skip(j->builder, skip);
    j->offset += skip;
    job_read(j);
}

static void job_read(struct index_job *j)
{
    uint64_t left = j->bytes - j->offset;
    if (left == 0) {
        j->look.told = job_checked;
        shard_file_look(j->file, &j->look);
        return;
    }
    j->io.done = job_got;
    loop_read(j->p->w->loop, &j->io, shard_file_fd(j->file), j->memory,
              left < INDEX_READ_BYTES ? (size_t)left : INDEX_READ_BYTES, j->offset);
}

static void job_opened(struct shard_file_wait *w)
{
    struct index_job *j = container_of(w, struct index_job, wait);
    if (!w->file) {
        j->err = w->err;
        job_end(j);
        return;
    }
    j->file = w->file;
    job_read(j);
}

static void job_build(struct index_job *j)
{
    j->wait.got = job_opened;
    shard_file_get(j->p->files, j->version, j->shard, j->version->shards[j->shard].idx != NULL, &j->wait);
}

static void job_loaded(struct cache_op *op)
{
    struct index_job *j = container_of(op, struct index_job, cache);
    if (!op->found) {
        job_build(j);
        return;
    }
    j->encoded = op->encoded;
    op->encoded = (struct buf){0};
    job_end(j);
}

static struct samples_source found_in(const struct pubversion *v, uint32_t shard)
{
    const struct pubshard *s = &v->shards[shard];
    return (struct samples_source){.format = v->dir->format,
                                   .shard = s->name,
                                   .shard_bytes = s->bytes,
                                   .record_bytes = v->dir->record_bytes,
                                   .mds = s->mds,
                                   .idx_bytes = s->idx_stat.bytes,
                                   .window = v->dir->window};
}

static struct index_job *job_create(struct published *p, struct pubversion *v, uint32_t shard, struct err *e)
{
    struct samples_source source = found_in(v, shard);
    struct index_job *j = calloc(1, sizeof *j);
    if (j)
        j->memory = malloc(INDEX_READ_BYTES);
    if (!j || !j->memory) {
        err_set(e, ERR_NO_MEMORY, "no memory for a sample index");
        goto failed;
    }
    if (samples_builder_create(&source, &j->builder, e) < 0)
        goto failed;
    j->p = p;
    j->version = v;
    pubversion_ref(v);
    j->shard = shard;
    j->bytes = samples_source_bytes(&source);
    list_init(&j->waiting);
    list_add_tail(&p->jobs, &j->link);
    j->cache.done = job_loaded;
    if (!cache_load(&j->cache, p->w, v, shard))
        job_build(j);
    return j;
failed:
    if (j)
        free(j->memory);
    free(j);
    return NULL;
}

static struct index_job *job_running(struct published *p, const struct pubversion *v, uint32_t shard)
{
    list_for_each (l, &p->jobs) {
        struct index_job *j = container_of(l, struct index_job, link);
        if (j->version == v && j->shard == shard)
            return j;
    }
    return NULL;
}

static void samples_found(struct stream *st, struct pubversion *v, enum sched_class class, uint64_t credit)
{
    (void)class;
    struct err e = {0};
    struct published *p = st->r.s->w->published;
    uint32_t shard = (uint32_t)st->position;
    st->position = 0;
    st->credit = credit;
    if (shard >= v->count) {
        err_set(&e, ERR_INVALID, "samples of shard %u of %s, which has %u shards", shard, v->dir->name,
                v->count);
        stream_fail(st, &e);
        return;
    }
    struct sample_index *x = index_known(p, &v->id, shard);
    if (x) {
        samples_begin(st, x);
        return;
    }
    struct index_job *j = job_running(p, v, shard);
    if (!j)
        j = job_create(p, v, shard, &e);
    if (!j) {
        stream_fail(st, &e);
        return;
    }
    st->looking = true;
    list_add_tail(&j->waiting, &st->link);
}

void published_samples_handle(struct session *s, const struct op_entry *op, struct frame *f)
{
    struct err e = {0};
    struct msg_published_samples m;
    struct stream *st = stream_request(s, op, f);
    if (!st)
        return;
    struct rcur in = rcur_of(st->r.payload.p, st->r.payload.n);
    if (msg_published_samples_decode(&in, &m, &e) < 0 || rcur_end(&in, "published_samples", &e) < 0) {
        stream_fail(st, &e);
        return;
    }
    st->position = m.shard;
    published_find_version(st, &m.version, CLASS_FEED, m.credit, samples_found);
}
