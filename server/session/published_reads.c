/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes of published shards: streams that may first have to find their version again, by looking at the
 * folders.
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
    published_found *found;
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
    const struct worker *w = k->p->w;
    for (; k->dir < w->dir_count; k->dir++) {
        if (!published_visible(&w->dirs[k->dir], k->st->r.s->identity.tenant))
            continue;
        scan_begin(&k->scan, k->p, &w->dirs[k->dir++]);
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

void published_find_version(struct stream *st, const struct id *id, enum sched_class class, uint64_t credit,
                            published_found *found)
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

/* Ranges: a piece gets its shard's file, reads, and looks whether the file still is the right one. */

#define AHEAD_BYTES                                                                         \
    (8u << 20) /* of what is read, and asked of the page cache at most half of it at a time \
                */
#define AHEAD_BYTES_MIN (512u << 10)

static uint32_t shard_number(const struct id *object)
{
    return le32_get(object->bytes);
}

static const struct pubshard *shard_of(const struct piece *p)
{
    return &p->stream->version->shards[shard_number(&p->object)];
}

/* A range of a file on its way into the page cache. */
struct hint {
    struct io_op io;
    struct shard_file *file;
};

static void hint_done(struct io_op *op) /* whether it helped shows when the range is read */
{
    struct hint *h = container_of(op, struct hint, io);
    shard_file_put(h->file);
    free(h);
}

/* What follows the piece in its range will be read soon: the page cache is asked for it, so that the disk
 * works ahead of the reads in large steps. Ranges far apart are read side by side anyway. */
static void read_ahead(struct piece *p)
{
    struct stream *st = p->stream;
    uint64_t here = p->offset + p->extent_bytes, from = here, end = st->offset + st->left_bytes;
    if (!id_equal(&st->object, &p->object) || st->left_bytes == 0 || st->offset < here)
        return;
    if (id_equal(&st->hint_object, &p->object) && st->hint_end > from)
        from = st->hint_end;
    end = end < here + AHEAD_BYTES ? end : here + AHEAD_BYTES;
    if (from + AHEAD_BYTES / 2 > here + AHEAD_BYTES || from + AHEAD_BYTES_MIN > end)
        return;
    struct hint *h = calloc(1, sizeof *h);
    if (!h)
        return;
    h->file = p->file.file;
    shard_file_hold(h->file);
    h->io.done = hint_done;
    loop_advise(st->r.s->w->loop, &h->io, shard_file_fd(h->file), from, end - from, LOOP_WILL_NEED);
    metric_add(METRIC_ahead_read_bytes, (int64_t)(end - from));
    st->hint_object = p->object;
    st->hint_end = end;
}

static void range_end(struct piece *p, uint32_t bytes)
{
    if (p->file.file)
        shard_file_put(p->file.file);
    p->file.file = NULL;
    piece_read(p, bytes);
}

static void range_checked(struct shard_file_look *l, const struct err *e)
{
    struct piece *p = container_of(l, struct piece, look);
    p->wait.extent->err = *e;
    range_end(p, e->class == ERR_NONE ? p->got_bytes : 0);
}

static void range_read(struct io_op *op)
{
    struct piece *p = container_of(op, struct piece, io);
    struct extent *x = p->wait.extent;
    if (op->result < 0) {
        err_sys(&x->err, (int)-op->result, "reading shard %s of %s at byte %" PRIu64, shard_of(p)->name,
                p->stream->version->dir->name, x->begin);
        range_end(p, 0);
        return;
    }
    p->got_bytes = (uint32_t)op->result;
    p->look.told = range_checked;
    shard_file_look(p->file.file, &p->look);
}

static void range_load(struct piece *p)
{
    struct extent *x = p->wait.extent;
    p->io.done = range_read;
    loop_read(p->stream->r.s->w->loop, &p->io, shard_file_fd(p->file.file), x->memory, x->room, x->begin);
}

static void range_forgotten(struct io_op *op)
{
    range_load(container_of(op, struct piece, io));
}

static void range_file(struct shard_file_wait *w)
{
    struct piece *p = container_of(w, struct piece, file);
    struct extent *x = p->wait.extent;
    if (!w->file) {
        x->err = w->err;
        range_end(p, 0);
        return;
    }
    if (p->stream->fresh) { /* from the disk, whatever the page cache holds */
        p->io.done = range_forgotten;
        loop_advise(p->stream->r.s->w->loop, &p->io, shard_file_fd(w->file), x->begin, x->room, LOOP_FORGET);
        return;
    }
    read_ahead(p);
    range_load(p);
}

/* Of the version: pieces of another one that the same file belongs to do not join. */
static void range_key(struct piece *p)
{
    const struct pubversion *v = p->stream->version;
    uint32_t shard = shard_number(&p->object);
    p->key.group = v->id;
    le64_put(p->key.object.bytes, shard);
}

static void range_begin(struct piece *p)
{
    struct stream *st = p->stream;
    p->file.got = range_file;
    shard_file_get(st->r.s->w->published->files, st->version, shard_number(&p->object), false, &p->file);
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

/* packed: is one of the shards? */
static int check_ranges(const struct msg_read *m, const struct pubversion *v, bool *packed, struct err *e)
{
    struct rcur in = rcur_of(m->ranges.p, m->ranges.n);
    *packed = false;
    for (uint32_t i = 0; i < m->count; i++) {
        struct msg_read_range range;
        int r = msg_read_range_decode(&in, &range, e);
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
        *packed = *packed || v->shards[n].packed;
    }
    return 0;
}

/* Packed shards are unpacked before the stream begins, since its pieces hold what the scheduler gives to all:
 * one by one, and none is held meanwhile. */
struct unpack_first {
    struct shard_file_wait wait;
    struct stream *st; /* has its version */
    struct rcur ranges;
    uint32_t shard; /* that was asked for last */
    enum sched_class class;
    bool asking, waited;
};

static bool next_packed(struct unpack_first *k)
{
    struct msg_read_range range;
    const struct pubversion *v = k->st->version;
    while (k->ranges.left > 0 && msg_read_range_decode(&k->ranges, &range, NULL) == 0) {
        uint32_t shard = shard_number(&range.object);
        if (shard == k->shard || !v->shards[shard].packed)
            continue;
        k->shard = shard;
        return true;
    }
    return false;
}

static void unpack_first_end(struct unpack_first *k)
{
    struct stream *st = k->st;
    struct session *s = st->r.s;
    bool waited = k->waited;
    if (st->ended || k->wait.err.class != ERR_NONE)
        pubversion_unref(s->w->published, st->version);
    if (stream_found(st)) {
        if (k->wait.err.class == ERR_NONE)
            stream_begin(st, &range_source, k->class, true, st->credit);
        else
            stream_fail(st, &k->wait.err);
    }
    free(k);
    if (waited)
        session_settle(s);
}

static void unpack_next(struct unpack_first *k)
{
    do {
        if (k->st->ended || k->wait.err.class != ERR_NONE || !next_packed(k)) {
            unpack_first_end(k);
            return;
        }
        k->asking = true;
        shard_file_get(k->st->r.s->w->published->files, k->st->version, k->shard, false, &k->wait);
    } while (!k->asking);
    k->asking = false;
    k->waited = true;
}

static void unpacked_first(struct shard_file_wait *w)
{
    struct unpack_first *k = container_of(w, struct unpack_first, wait);
    if (w->file)
        shard_file_put(w->file);
    if (k->asking) /* it was open: unpack_next goes on */
        k->asking = false;
    else
        unpack_next(k);
}

static void unpack_first(struct stream *st, const struct msg_read *m, enum sched_class class, uint64_t credit)
{
    struct unpack_first *k = calloc(1, sizeof *k);
    if (!k) {
        struct err e = {0};
        err_set(&e, ERR_NO_MEMORY, "no memory for reading packed shards");
        pubversion_unref(st->r.s->w->published, st->version);
        stream_fail(st, &e);
        return;
    }
    *k = (struct unpack_first){.st = st,
                               .ranges = rcur_of(m->ranges.p, m->ranges.n),
                               .shard = UINT32_MAX,
                               .class = class,
                               .wait.got = unpacked_first};
    st->credit = credit; /* more may be given meanwhile */
    st->looking = true;
    unpack_next(k);
}

static void read_found(struct stream *st, struct pubversion *v, enum sched_class class, uint64_t credit)
{
    struct err e = {0};
    struct msg_read m;
    struct rcur in = rcur_of(st->r.payload.p, st->r.payload.n);
    bool packed;
    if (msg_read_decode(&in, &m, &e) < 0 || check_ranges(&m, v, &packed, &e) < 0) {
        stream_fail(st, &e);
        return;
    }
    st->version = v;
    pubversion_ref(v);
    if (packed)
        unpack_first(st, &m, class, credit);
    else
        stream_begin(st, &range_source, class, true, credit);
}

void published_read(struct stream *st, enum sched_class class, uint64_t credit)
{
    struct id id = st->scope;
    published_find_version(st, &id, class, credit, read_found);
}
