/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bytes and sample indexes of published shards. Both are streams that may first have to find their version
 * again (by looking at the folders) and, for samples, to build the index by reading the shard once.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "server/obs/metrics.h"
#include "server/session/published.h"

/* Finding a version. */

struct lookup {
    struct scan scan;
    struct stream *st;
    struct published *p;
    struct id id;
    size_t dir;
    enum sched_class class;
    uint64_t credit;
    void (*found)(struct stream *st, struct pubversion *v, enum sched_class class, uint64_t credit);
};

static void not_current(struct stream *st, const struct id *id)
{
    struct err e = {0};
    char text[2 * ID_BYTES + 1];
    hex_encode(id->bytes, ID_BYTES, text);
    err_set(&e, ERR_MISMATCH,
            "version %s is not what any published directory holds now; open the dataset again", text);
    stream_fail(st, &e);
}

static bool lookup_next(struct lookup *k)
{
    const struct server_options *o = &k->p->w->server->o;
    for (; k->dir < o->published_count; k->dir++) {
        if (!published_visible(&o->published[k->dir], k->st->r.s->identity.tenant))
            continue;
        scan_begin(&k->scan, k->p, &o->published[k->dir++]);
        return true;
    }
    return false;
}

static void lookup_scanned(struct scan *scan)
{
    struct lookup *k = container_of(scan, struct lookup, scan);
    struct stream *st = k->st;
    struct session *s = st->r.s;
    struct pubversion *v = scan->version && id_equal(&scan->version->id, &k->id) ? scan->version : NULL;
    if (!v && !st->ended && lookup_next(k))
        return;
    if (stream_found(st)) {
        if (v)
            k->found(st, v, k->class, k->credit);
        else
            not_current(st, &k->id);
    }
    free(k);
    session_settle(s);
}

static void find(struct stream *st, const struct id *id, enum sched_class class, uint64_t credit,
                 void (*found)(struct stream *st, struct pubversion *v, enum sched_class class,
                               uint64_t credit))
{
    struct published *p = st->r.s->w->published;
    struct pubversion *v = published_find(p, st->r.s->identity.tenant, id);
    if (v) {
        found(st, v, class, credit);
        return;
    }
    struct lookup *k = calloc(1, sizeof *k);
    if (!k) {
        struct err e = {0};
        err_set(&e, ERR_NO_MEMORY, "no memory for finding a published version");
        stream_fail(st, &e);
        return;
    }
    *k = (struct lookup){.st = st, .p = p, .id = *id, .class = class, .credit = credit, .found = found};
    k->scan.done = lookup_scanned;
    if (lookup_next(k)) {
        st->looking = true;
        return;
    }
    free(k);
    not_current(st, id);
}

/* Ranges. A piece opens its shard, reads, looks whether it read the right one, and closes. */

static uint32_t shard_number(const struct id *object)
{
    return le32_get(object->bytes);
}

static const struct pubshard *shard_of(const struct piece *p)
{
    return &p->stream->version->shards[shard_number(&p->object)];
}

static void range_done(struct io_op *op);

static void range_close(struct piece *p)
{
    p->stage = 3;
    loop_close(p->stream->r.s->w->loop, &p->io, p->fd);
}

static void range_opened(struct piece *p)
{
    const struct pubversion *v = p->stream->version;
    struct extent *x = p->wait.extent;
    struct io_op *op = &p->io;
    if (op->result < 0) {
        err_sys(&x->err, (int)-op->result, "shard %s of %s", shard_of(p)->name, v->dir->name);
        piece_read(p, 0);
        return;
    }
    p->fd = (int)op->result;
    p->stage = 1;
    loop_read(p->stream->r.s->w->loop, op, p->fd, x->memory, x->room, x->begin);
}

static void range_read(struct piece *p)
{
    const struct pubversion *v = p->stream->version;
    struct extent *x = p->wait.extent;
    int64_t got = p->io.result;
    if (got < 0) {
        err_sys(&x->err, (int)-got, "reading shard %s of %s at byte %" PRIu64, shard_of(p)->name,
                v->dir->name, x->begin);
        range_close(p);
        return;
    }
    p->got_bytes = (uint32_t)got;
    p->stage = 2;
    loop_stat(p->stream->r.s->w->loop, &p->io, p->path, &p->stat);
}

static void range_checked(struct piece *p)
{
    const struct pubversion *v = p->stream->version;
    struct extent *x = p->wait.extent;
    if (p->io.result < 0)
        err_sys(&x->err, (int)-p->io.result, "shard %s of %s is no longer what it was", shard_of(p)->name,
                v->dir->name);
    else if (pubshard_same(v, shard_number(&p->object), &p->stat, &x->err) < 0)
        check(x->err.class != ERR_NONE);
    range_close(p);
}

static void range_done(struct io_op *op)
{
    struct piece *p = container_of(op, struct piece, io);
    switch (p->stage) {
    case 0: range_opened(p); break;
    case 1: range_read(p); break;
    case 2: range_checked(p); break;
    default: piece_read(p, p->wait.extent->err.class == ERR_NONE ? p->got_bytes : 0);
    }
}

/* Of the version: pieces of another one that the same file belongs to do not join. */
static void range_key(struct piece *p)
{
    const struct pubversion *v = p->stream->version;
    uint32_t shard = shard_number(&p->object);
    bool fits = pubshard_path(v, shard, p->path, sizeof p->path);
    check(fits);
    p->key = v->id;
    le64_put(p->key.bytes, le64_get(v->id.bytes) + shard);
}

static void range_begin(struct piece *p)
{
    p->stage = 0;
    p->io.done = range_done;
    loop_open(p->stream->r.s->w->loop, &p->io, p->path, O_RDONLY | O_CLOEXEC, 0);
}

static void range_ends(struct piece *p, uint64_t end)
{
    const struct pubshard *shard = shard_of(p);
    err_set(&p->err, ERR_MISMATCH,
            "shard %s of %s ends at byte %" PRIu64 ", it had %" PRIu64
            " when it was opened; open the dataset again",
            shard->name, p->stream->version->dir->name, end, shard->bytes);
}

static void version_end(struct stream *st)
{
    pubversion_unref(st->r.s->w->published, st->version);
}

static const struct stream_source range_source = {.next = stream_next_ranges,
                                                  .key = range_key,
                                                  .read = range_begin,
                                                  .ends = range_ends,
                                                  .end = version_end};

static int check_ranges(const struct stream *st, const struct pubversion *v, struct err *e)
{
    struct msg_read m;
    struct rcur in = rcur_of(st->r.payload.p, st->r.payload.n);
    int r = msg_read_decode(&in, &m, e);
    if (r < 0)
        return r;
    in = rcur_of(m.ranges.p, m.ranges.n);
    for (uint32_t i = 0; i < m.count; i++) {
        struct msg_read_range range;
        r = msg_read_range_decode(&in, &range, e);
        if (r < 0)
            return r;
        static const uint8_t zeros[ID_BYTES - 4];
        uint32_t n = shard_number(&range.object);
        if (memcmp(range.object.bytes + 4, zeros, sizeof zeros) != 0)
            return err_set(e, ERR_PROTOCOL, "range %u: a shard's number is followed by zeros", i);
        if (n >= v->count)
            return err_set(e, ERR_INVALID, "range %u: shard %u of %s, which has %u", i, n, v->dir->name,
                           v->count);
        if (range.offset + range.bytes > v->shards[n].bytes)
            return err_set(e, ERR_INVALID,
                           "range %u: bytes %" PRIu64 " to %" PRIu64 " of shard %s, which has %" PRIu64, i,
                           range.offset, range.offset + range.bytes, v->shards[n].name, v->shards[n].bytes);
    }
    return 0;
}

static void read_found(struct stream *st, struct pubversion *v, enum sched_class class, uint64_t credit)
{
    struct err e = {0};
    if (check_ranges(st, v, &e) < 0) {
        stream_fail(st, &e);
        return;
    }
    st->version = v;
    pubversion_ref(v);
    stream_begin(st, &range_source, class, true, credit);
}

void published_read(struct stream *st, enum sched_class class, uint64_t credit)
{
    struct id id = st->scope;
    find(st, &id, class, credit, read_found);
}

/* Sample indexes. */

#define INDEX_READ_BYTES (256u << 10)

struct index_job {
    struct list link; /* published's jobs */
    struct published *p;
    struct pubversion *version; /* a reference */
    uint32_t shard;
    struct list waiting; /* streams, by their link; not begun */
    struct samples_builder *builder;
    struct io_op io;
    struct loop_stat stat;
    int fd;
    uint64_t offset;
    struct err err;
    struct buf encoded;
    uint8_t *memory;
    char path[PUBLISHED_PATH_BYTES_MAX + 2 + NAME_BYTES_MAX];
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

static void job_closed(struct io_op *op)
{
    job_end(container_of(op, struct index_job, io));
}

static void job_close(struct index_job *j)
{
    j->io.done = job_closed;
    loop_close(j->p->w->loop, &j->io, j->fd);
}

static void job_checked(struct io_op *op)
{
    struct index_job *j = container_of(op, struct index_job, io);
    struct samples *samples = NULL;
    if (op->result < 0)
        err_sys(&j->err, (int)-op->result, "shard %s is no longer what it was", j->path);
    else if (pubshard_same(j->version, j->shard, &j->stat, &j->err) == 0 &&
             samples_builder_finish(j->builder, &samples, &j->err) == 0) {
        int r = samples_encode(samples, &j->encoded, &j->err);
        check(r == 0 || j->err.class != ERR_NONE);
        samples_free(samples);
    }
    job_close(j);
}

static void job_read(struct index_job *j);

static void job_got(struct io_op *op)
{
    struct index_job *j = container_of(op, struct index_job, io);
    const struct pubshard *shard = &j->version->shards[j->shard];
    if (op->result < 0)
        err_sys(&j->err, (int)-op->result, "reading shard %s at byte %" PRIu64, j->path, j->offset);
    else if (op->result == 0)
        err_set(&j->err, ERR_MISMATCH,
                "shard %s ends at byte %" PRIu64 ", it had %" PRIu64
                " when it was opened; open the dataset again",
                shard->name, j->offset, shard->bytes);
    else if (samples_builder_push(j->builder, j->memory, (size_t)op->result, &j->err) == 0)
        j->offset += (uint64_t)op->result;
    if (j->err.class != ERR_NONE) {
        job_close(j);
        return;
    }
    metric_add(METRIC_feed_read_bytes, op->result);
    uint64_t skip = samples_builder_skippable(j->builder), left = shard->bytes - j->offset;
    if (skip > left)
        skip = left;
    if (skip > 0)
        samples_builder_skip(j->builder, skip);
    j->offset += skip;
    job_read(j);
}

static void job_read(struct index_job *j)
{
    uint64_t left = j->version->shards[j->shard].bytes - j->offset;
    if (left == 0) {
        j->io.done = job_checked;
        loop_stat(j->p->w->loop, &j->io, j->path, &j->stat);
        return;
    }
    j->io.done = job_got;
    loop_read(j->p->w->loop, &j->io, j->fd, j->memory,
              left < INDEX_READ_BYTES ? (size_t)left : INDEX_READ_BYTES, j->offset);
}

static void job_opened(struct io_op *op)
{
    struct index_job *j = container_of(op, struct index_job, io);
    if (op->result < 0) {
        err_sys(&j->err, (int)-op->result, "opening shard %s", j->path);
        job_end(j);
        return;
    }
    j->fd = (int)op->result;
    job_read(j);
}

static struct index_job *job_create(struct published *p, struct pubversion *v, uint32_t shard, struct err *e)
{
    struct index_job *j = calloc(1, sizeof *j);
    if (j)
        j->memory = malloc(INDEX_READ_BYTES);
    if (!j || !j->memory) {
        err_set(e, ERR_NO_MEMORY, "no memory for a sample index");
        goto failed;
    }
    struct samples_source source = {.format = v->dir->format,
                                    .shard = v->shards[shard].name,
                                    .shard_bytes = v->shards[shard].bytes,
                                    .record_bytes = v->dir->record_bytes};
    if (samples_builder_create(&source, &j->builder, e) < 0)
        goto failed;
    j->p = p;
    j->version = v;
    pubversion_ref(v);
    j->shard = shard;
    list_init(&j->waiting);
    list_add_tail(&p->jobs, &j->link);
    bool fits = pubshard_path(v, shard, j->path, sizeof j->path);
    check(fits);
    j->io.done = job_opened;
    loop_open(p->w->loop, &j->io, j->path, O_RDONLY | O_CLOEXEC, 0);
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
    find(st, &m.version, CLASS_FEED, m.credit, samples_found);
}
