/* SPDX-License-Identifier: Apache-2.0 */
#include "server/session/stream.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "server/obs/metrics.h"

/* Of an object, before it is known whether several read it: those who restore together begin together. */
#define UNSURE_RESTORE_BYTES (64u << 20)
#define UNSURE_FEED_BYTES    (8u << 20)

static void piece_free(struct piece *p)
{
    struct stream *st = p->stream;
    struct session *s = st->r.s;
    sched_release(s->w->sched, &p->item);
    list_del(&p->link);
    st->piece_count--;
    if (st->on_disk && (s->read_bytes -= p->extent_bytes) == 0)
        atomic_fetch_sub(&s->w->server->reading_count, 1);
    extent_put(s->w->server->extents, p->extent);
    free(p);
}

/* Frees what is not being read; when nothing is left, the stream. */
static void stream_drop(struct stream *st)
{
    check(st->ended);
    list_for_each_safe (l, &st->pieces) {
        struct piece *p = container_of(l, struct piece, link);
        if (p->state != PIECE_READING)
            piece_free(p);
    }
    if (st->piece_count > 0 || st->looking)
        return;
    if (st->source)
        st->source->end(st);
    request_free(&st->r);
}

/* The stream was answered for the last time. */
static void stream_end(struct stream *st)
{
    check(!st->ended && st->r.answered);
    st->ended = true;
    if (st->begun) {
        list_del(&st->link);
        st->r.s->stream_count--;
    }
    stream_drop(st);
}

void stream_fail(struct stream *st, const struct err *e)
{
    request_fail(&st->r, e);
    stream_end(st);
}

void stream_cancel(struct request *r, const struct err *why)
{
    struct stream *st = container_of(r, struct stream, r);
    if (!st->ended)
        stream_fail(st, why);
}

bool stream_waits_for_credit(const struct request *r)
{
    const struct stream *st = container_of(r, struct stream, r);
    return r->cancel == stream_cancel && st->begun && st->piece_count == 0 && st->credit == 0 &&
           !st->all_begun;
}

/* Is it the client that has to do something next? */
static bool waits_for_client(const struct stream *st)
{
    return stream_waits_for_credit(&st->r) || session_output_bytes(st->r.s) > OUTPUT_HIGH_BYTES;
}

static void watch(struct stream *st)
{
    struct loop *l = st->r.s->w->loop;
    loop_timer_set(l, &st->r.timer, loop_now_ms(l) + st->r.deadline_ms);
}

/* A stream's deadline bounds the time in which it makes no step although the client waits for it. */
void stream_timer(struct loop_timer *t)
{
    struct stream *st = container_of(t, struct stream, r.timer);
    struct session *s = st->r.s;
    if (waits_for_client(st)) {
        watch(st);
        return;
    }
    struct err e = {0};
    err_set(&e, ERR_TIMEOUT, "%s made no progress within its deadline of %u ms",
            opcode_name(st->r.op->opcode), st->r.deadline_ms);
    metric_add(METRIC_requests_cancelled, 1);
    stream_fail(st, &e);
    session_settle(s);
}

struct stream *stream_request(struct session *s, const struct op_entry *op, struct frame *f)
{
    struct request *r = request_begin(s, op, f, sizeof(struct stream), stream_cancel, stream_timer);
    if (!r)
        return NULL;
    struct stream *st = container_of(r, struct stream, r);
    list_init(&st->pieces);
    list_init(&st->link);
    watch(st);
    return st;
}

void stream_begin(struct stream *st, const struct stream_source *source, enum sched_class class, bool on_disk,
                  uint64_t credit)
{
    struct session *s = st->r.s;
    st->source = source;
    st->class = class;
    st->on_disk = on_disk;
    st->credit = credit;
    st->begun = true;
    s->has_fed |= class == CLASS_FEED;
    list_add_tail(&s->streams, &st->link);
    s->stream_count++;
    if (s->stream_count > s->w->server->limits.session_streams_max) {
        struct err e = {0};
        err_set(&e, ERR_BUSY, "this session has %u streams open, the limit; finish or cancel some",
                s->stream_count - 1);
        stream_fail(st, &e);
    }
}

bool stream_found(struct stream *st)
{
    check(st->looking);
    st->looking = false;
    if (!st->ended)
        return true;
    stream_drop(st);
    return false;
}

/* ---- reading a piece ---- */

static void piece_done(struct piece *p)
{
    struct stream *st = p->stream;
    struct session *s = st->r.s;
    sched_release(s->w->sched, &p->item);
    p->state = PIECE_READY;
    if (st->ended)
        stream_drop(st);
    worker_pump(s->w);
    session_settle(s);
}

static struct extents *extents_of(const struct piece *p)
{
    return p->stream->r.s->w->server->extents;
}

/* Copies what is sent of bytes [from, to) of the object behind what was gathered before. */
static int gather(struct piece *p, const struct extent *x, uint64_t from, uint64_t to)
{
    if (!p->extent && !(p->extent = extent_private(extents_of(p), p->send_bytes)))
        return err_set(&p->err, ERR_NO_MEMORY, "no memory for reading; ask for less at once");
    for (uint32_t i = 0; i < p->part_count; i++) {
        uint64_t begin = p->offset + p->parts[i].skip, end = begin + p->parts[i].bytes;
        begin = begin > from ? begin : from;
        end = end < to ? end : to;
        if (begin >= end)
            continue;
        memcpy(p->extent->memory + p->gathered_bytes, x->memory + (begin - x->begin), end - begin);
        p->gathered_bytes += (uint32_t)(end - begin);
    }
    p->data = SLICE(p->extent->memory, p->gathered_bytes);
    return 0;
}

/* The piece's next extent has come. One that holds all that is sent, in one part, is sent from where it is.
 */
static int take_extent(struct piece *p, struct extent *x)
{
    uint64_t from = p->offset + p->done_bytes, end = p->offset + p->extent_bytes, there = x->begin + x->bytes;
    if (x->err.class != ERR_NONE) {
        p->err = x->err;
        return -1;
    }
    if (there <= from) {
        p->stream->source->ends(p, there);
        return -1;
    }
    if (p->part_count == 1 && p->done_bytes == 0 && there >= end) {
        p->extent = x;
        p->data = SLICE(x->memory + (from - x->begin), p->send_bytes);
    } else if (gather(p, x, from, there < end ? there : end) < 0) {
        return -1;
    }
    p->done_bytes = (uint32_t)((there < end ? there : end) - p->offset);
    return 0;
}

static void piece_advance(struct piece *p);

static void piece_told(struct extent_wait *w)
{
    struct piece *p = container_of(w, struct piece, wait);
    struct extent *x = w->extent;
    int rc = take_extent(p, x);
    w->extent = NULL;
    if (p->extent != x)
        extent_put(extents_of(p), x);
    if (rc < 0 || p->done_bytes == p->extent_bytes)
        piece_done(p);
    else
        piece_advance(p);
}

void piece_read(struct piece *p, uint32_t bytes)
{
    extent_read(extents_of(p), p->wait.extent, bytes, loop_now_ms(p->stream->r.s->w->loop));
    piece_told(&p->wait);
}

static void piece_lacks_memory(struct loop_msg *m)
{
    struct piece *p = container_of(m, struct piece, no_memory);
    err_set(&p->err, ERR_NO_MEMORY, "no memory for reading; ask for less at once");
    piece_done(p);
}

/* Gets the extent with the first byte that the piece lacks. */
static void piece_advance(struct piece *p)
{
    const struct stream *st = p->stream;
    uint32_t unsure = st->class == CLASS_RESTORE ? UNSURE_RESTORE_BYTES : UNSURE_FEED_BYTES;
    struct extent_want want = {.key = p->key,
                               .begin = p->offset + p->done_bytes,
                               .end = p->offset + p->extent_bytes,
                               .now_ms = loop_now_ms(st->r.s->w->loop),
                               .unsure_bytes = st->source->keep ? unsure : 0,
                               .fresh = st->fresh,
                               .reader = st->scan ? st->r.s->number : 0};
    int rc = extent_get(extents_of(p), &want, &p->wait);
    if (rc == 1)
        st->source->read(p);
    if (rc >= 0)
        return;
    /* Told like any other end of a read: this may run within the scheduler's pump. */
    p->wait.extent = NULL;
    p->no_memory.run = piece_lacks_memory;
    loop_post(st->r.s->w->loop, &p->no_memory);
}

static void count_bytes(const struct stream *st, size_t n)
{
    metric_add(st->class == CLASS_RESTORE ? METRIC_restore_read_bytes : METRIC_feed_read_bytes, (int64_t)n);
}

/* The time in which the next piece was not there though it could have been sent is the disk's; the client is
 * told. */
static void disk_waits(struct stream *st, bool waits)
{
    uint64_t now_ms = loop_now_ms(st->r.s->w->loop);
    if (st->waits_since_ms)
        st->waited_ms += now_ms - st->waits_since_ms;
    st->waits_since_ms = waits ? now_ms : 0;
}

static void tell_wait(struct stream *st)
{
    disk_waits(st, false);
    st->r.s->answer_wait_ms = st->waited_ms < UINT32_MAX ? (uint32_t)st->waited_ms : UINT32_MAX;
    st->waited_ms = 0;
}

/* Sends the next piece if it is its turn and there is room. True: something moved. */
static bool send_one(struct stream *st)
{
    if (st->r.s->broken || session_output_bytes(st->r.s) > OUTPUT_HIGH_BYTES) {
        disk_waits(st, false);
        return false;
    }
    if (st->piece_count == 0 && st->all_begun) {
        request_answer(&st->r, (struct slice){0}, (struct slice){0});
        stream_end(st);
        return true;
    }
    struct piece *p = container_of(st->pieces.next, struct piece, link);
    if (st->piece_count == 0 || p->state != PIECE_READY) {
        disk_waits(st, st->on_disk && st->piece_count > 0);
        return false;
    }
    if (p->err.class != ERR_NONE) {
        struct err e = p->err;
        stream_fail(st, &e);
        return true;
    }
    count_bytes(st, p->data.n);
    tell_wait(st);
    bool last = st->all_begun && st->piece_count == 1;
    struct extent *x = p->extent; /* NULL: the source's memory, which stays where it is only until it ends */
    p->extent = NULL;
    if (x)
        request_extent(&st->r, last, p->data, x);
    else if (last)
        request_answer(&st->r, (struct slice){0}, p->data);
    else
        request_more(&st->r, (struct slice){0}, p->data);
    piece_free(p);
    if (last)
        stream_end(st);
    else
        watch(st);
    return true;
}

static void piece_admitted(struct sched_item *item)
{
    struct piece *p = container_of(item, struct piece, item);
    p->state = PIECE_READING;
    p->stream->source->key(p);
    piece_advance(p);
}

/* Pieces cut short by what credit is left are for clients who give no more than that at a time. */
static bool credit_is_worth_it(const struct stream *st)
{
    uint64_t whole = PIECE_BYTES - st->offset % PIECE_BYTES;
    return st->credit > 0 &&
           (st->piece_count == 0 || st->credit >= (st->left_bytes < whole ? st->left_bytes : whole));
}

/* What the session may hold before it begins another piece. Feeds, which go on for hours, share a little: so
 * their bytes go round in few places, which are in the processor's cache when the disk fills them and sockets
 * take them. Those who do not read what they asked for keep their share, no more. While much is held, each
 * goes on with one piece at a time. */
static uint64_t read_bytes_max(const struct session *s)
{
    const struct server *server = s->w->server;
    uint64_t max = server->limits.session_read_bytes_max, sessions = atomic_load(&server->reading_count);
    uint64_t share = server->limits.feed_read_bytes_max / (sessions > 0 ? sessions : 1);
    if (extents_crowded(server->extents))
        return 1;
    if (s->has_fed && share < max)
        max = share;
    return max > 0 ? max : 1;
}

static bool may_begin(const struct stream *st)
{
    const struct session *s = st->r.s;
    return !st->all_begun && credit_is_worth_it(st) && st->piece_count < STREAM_PIECES &&
           s->read_bytes < read_bytes_max(s);
}

/* Begins the stream's next piece. True: something moved. */
static bool begin_one(struct stream *st)
{
    if (!may_begin(st))
        return false;
    struct session *s = st->r.s;
    struct piece *p = calloc(1, sizeof *p);
    if (!p) {
        struct err e = {0};
        err_set(&e, ERR_NO_MEMORY, "%s: no memory for reading; ask for less at once",
                opcode_name(st->r.op->opcode));
        stream_fail(st, &e);
        return true;
    }
    p->stream = st;
    list_add_tail(&st->pieces, &p->link);
    st->piece_count++;
    st->source->next(st, st->credit < PIECE_BYTES ? st->credit : PIECE_BYTES, p);
    check(p->send_bytes > 0 && p->send_bytes <= st->credit);
    st->credit -= p->send_bytes;
    p->item.admit = piece_admitted;
    p->item.bytes = p->extent_bytes;
    if (!st->on_disk) {
        st->source->read(p);
        return true;
    }
    if (s->read_bytes == 0)
        atomic_fetch_add(&s->w->server->reading_count, 1);
    s->read_bytes += p->extent_bytes;
    p->wait.told = piece_told;
    p->wait.loop = s->w->loop;
    sched_queue(s->w->sched, &p->item, st->class, s->tenant, loop_now_ms(s->w->loop));
    return true;
}

static bool streams_ready(const struct session *s)
{
    if (s->broken || session_output_bytes(s) > OUTPUT_HIGH_BYTES)
        return false;
    list_for_each (l, &s->streams) {
        const struct stream *st = container_of(l, struct stream, link);
        if (st->piece_count > 0 && container_of(st->pieces.next, struct piece, link)->state == PIECE_READY)
            return true;
    }
    return false;
}

/* Steps of the streams as long as any moves. What was asked for first is needed first, so streams are served
 * in their order: side by side all would be late, and what a restore goes through would spread over all that
 * it has asked for. */
static void each_in_order(struct session *s, bool (*step)(struct stream *st))
{
    for (struct list *l = s->streams.next; l != &s->streams;) {
        struct list *next = l->next;
        bool moved = step(container_of(l, struct stream, link)); /* which may have ended and freed it */
        l = moved ? s->streams.next : next;
    }
}

void streams_pump(struct session *s)
{
    if (s->stream_count == 0)
        return;
    do {
        each_in_order(s, send_one);
        each_in_order(s, begin_one);
        worker_pump(s->w);
        /* Pieces that need no reading are ready by now; go on until output is full. */
    } while (s->stream_count > 0 && streams_ready(s));
}

void credit_handle(struct session *s, const struct op_entry *op, struct frame *f)
{
    (void)op;
    struct err e = {0};
    struct msg_credit m;
    struct rcur in = rcur_of(f->payload, f->header.payload_bytes);
    int bad = msg_credit_decode(&in, &m, &e);
    if (bad == 0)
        bad = rcur_end(&in, "credit", &e);
    uint64_t id = f->header.request_id;
    channel_frame_done(s->channel);
    if (bad < 0) {
        session_send_error(s, OP_CREDIT, id, &e);
        session_close(s, true, e.text);
        return;
    }
    struct request *r = request_find(s, m.request_id);
    if (!r || r->cancel != stream_cancel)
        return; /* the stream has ended meanwhile */
    struct stream *st = container_of(r, struct stream, r);
    if (add_overflows(st->credit, m.bytes, &st->credit))
        st->credit = UINT64_MAX;
    watch(st);
}
