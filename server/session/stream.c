/* SPDX-License-Identifier: Apache-2.0 */
#include "server/session/stream.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "server/obs/metrics.h"

static void piece_free(struct piece *p)
{
    struct stream *st = p->stream;
    struct session *s = st->r.s;
    sched_release(s->w->sched, &p->item);
    list_del(&p->link);
    st->piece_count--;
    s->read_bytes -= p->held_bytes;
    buffer_give(s->w, p->memory);
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

void piece_gather(struct piece *p, uint8_t *extent)
{
    uint8_t *to = extent + p->parts[0].skip, *end = to;
    for (uint32_t i = 0; i < p->part_count; i++) {
        memmove(end, extent + p->parts[i].skip, p->parts[i].bytes);
        end += p->parts[i].bytes;
    }
    p->data = SLICE(to, end - to);
}

void piece_done(struct piece *p)
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

static void count_bytes(const struct stream *st, size_t n)
{
    metric_add(st->class == CLASS_RESTORE ? METRIC_restore_read_bytes : METRIC_feed_read_bytes, (int64_t)n);
}

/* Sends the next piece if it is its turn and there is room. True: something moved. */
static bool send_one(struct stream *st)
{
    if (st->r.s->broken || session_output_bytes(st->r.s) > OUTPUT_HIGH_BYTES)
        return false;
    if (st->piece_count == 0 && st->all_begun) {
        request_answer(&st->r, (struct slice){0}, (struct slice){0});
        stream_end(st);
        return true;
    }
    struct piece *p = container_of(st->pieces.next, struct piece, link);
    if (st->piece_count == 0 || p->state != PIECE_READY)
        return false;
    if (p->err.class != ERR_NONE) {
        struct err e = p->err;
        stream_fail(st, &e);
        return true;
    }
    count_bytes(st, p->data.n);
    bool last = st->all_begun && st->piece_count == 1;
    uint8_t *memory = p->memory; /* NULL: the source's, which stays where it is only until it ends */
    p->memory = NULL;
    if (memory)
        request_sealed(&st->r, last, p->data, memory);
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
    p->stream->source->read(p);
}

/* Room for the extent, widened to borders of blocks for direct reads. */
static int piece_memory(struct piece *p)
{
    uint64_t begin = p->offset / BLOCK_BYTES * BLOCK_BYTES;
    size_t n = (size_t)(block_align(p->offset + p->extent_bytes) - begin);
    p->memory = buffer_take(p->stream->r.s->w, n);
    if (!p->memory)
        return -ENOMEM;
    p->held_bytes = (uint32_t)n;
    p->stream->r.s->read_bytes += n;
    return 0;
}

static bool may_begin(const struct stream *st)
{
    const struct session *s = st->r.s;
    return !st->all_begun && st->credit > 0 && st->piece_count < STREAM_PIECES &&
           s->read_bytes < s->w->server->limits.session_read_bytes_max;
}

/* Begins the stream's next piece. True: something moved. */
static bool begin_one(struct stream *st)
{
    if (!may_begin(st))
        return false;
    struct session *s = st->r.s;
    struct err e = {0};
    struct piece *p = calloc(1, sizeof *p);
    if (!p)
        goto no_memory;
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
    if (piece_memory(p) < 0)
        goto no_memory;
    sched_queue(s->w->sched, &p->item, st->class, s->tenant, loop_now_ms(s->w->loop));
    return true;
no_memory:
    err_set(&e, ERR_NO_MEMORY, "%s: no memory for reading; ask for less at once",
            opcode_name(st->r.op->opcode));
    stream_fail(st, &e);
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

/* One step of each stream in turn, as long as any moves, so that they share what the session may hold. */
static void each_in_turn(struct session *s, bool (*step)(struct stream *st))
{
    for (uint32_t idle = 0; idle < s->stream_count;) {
        struct stream *st = container_of(list_pop(&s->streams), struct stream, link);
        list_add_tail(&s->streams, &st->link);
        idle = step(st) ? 0 : idle + 1;
    }
}

void streams_pump(struct session *s)
{
    if (s->stream_count == 0)
        return;
    do {
        each_in_turn(s, send_one);
        each_in_turn(s, begin_one);
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
