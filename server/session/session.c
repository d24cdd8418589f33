/* SPDX-License-Identifier: Apache-2.0 */
/* The life of one connection. See session.h for the rules. */
#include "server/session/session.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "server/obs/metrics.h"
#include "server/session/extents.h"

static void on_recv(struct io_op *op);
static void on_send(struct io_op *op);
static void on_close(struct io_op *op);
static void on_timer(struct loop_timer *t);
static void input(struct session *s, size_t n);

static const char *state_name(enum session_state state)
{
    static const char *const names[] = {"handshake", "hello", "open", "closing"};
    return names[state];
}

static bool over_limit(struct server *sv)
{
    uint32_t before = atomic_fetch_add(&sv->session_count, 1);
    return before >= sv->limits.sessions_max;
}

/* Beyond this many refusals waiting to be told, connections are closed without a word. */
#define REFUSALS_MAX 64

static int make_channel(struct session *s, unsigned address, struct err *e)
{
    int rc = 0;
    if (s->w->tls)
        rc = channel_create(s->w->tls, NULL, &s->channel, e);
    else if (channel_create_clear(true, &s->w->server->o.clear_identities[address], &s->channel) < 0)
        rc = err_set(e, ERR_NO_MEMORY, "no memory for a channel");
    if (rc == 0)
        payloads_serve(s->w, s->channel);
    return rc;
}

void session_accept(struct worker *w, int fd, unsigned address, struct slice first)
{
    struct err e = {0};
    struct session *s = calloc(1, sizeof *s);
    uint8_t *recv_buf = malloc(RECEIVE_BYTES);
    check(fd >= 0);
    if (!s || !recv_buf || w->stopping)
        goto refuse;
    s->w = w;
    s->fd = fd;
    s->address = address;
    s->recv_buf = recv_buf;
    s->least = 1;
    if (make_channel(s, address, &e) < 0) {
        log_error("connection refused: %s", e.text);
        goto refuse;
    }
    s->over_limit = over_limit(w->server);
    if (s->over_limit &&
        atomic_load(&w->server->session_count) > (uint64_t)w->server->limits.sessions_max + REFUSALS_MAX) {
        atomic_fetch_sub(&w->server->session_count, 1);
        metric_add(METRIC_sessions_refused, 1);
        goto refuse;
    }
    s->number = atomic_fetch_add(&w->server->session_number, 1) + 1;
    s->state_at_ms = s->frame_at_ms = loop_now_ms(w->loop);
    s->timer.fire = on_timer;
    s->recv.done = on_recv;
    s->send.done = on_send;
    s->close.done = on_close;
    list_init(&s->requests);
    list_init(&s->streams);
    list_init(&s->feeds);
    output_init(s);
    list_add_tail(&w->sessions, &s->link);
    w->session_count++;
    loop_peer(w->loop, fd, s->peer, sizeof s->peer);
    if (first.n > 0) {
        memcpy(s->recv_buf, first.p, first.n);
        session_place(s);
        input(s, first.n);
    }
    session_settle(s);
    return;
refuse:
    if (s)
        channel_free(s->channel);
    free(s);
    free(recv_buf);
    loop_shutdown(w->loop, fd);
    struct io_op *op = calloc(1, sizeof *op);
    if (!op)
        return; /* the descriptor is lost with the memory: the process is at its end */
    op->done = (io_done *)free;
    loop_close(w->loop, op, fd);
}

static void session_free(struct session *s)
{
    struct worker *w = s->w;
    loop_timer_clear(w->loop, &s->timer);
    if (s->identity.role != ROLE_NONE) {
        metric_add(METRIC_sessions_open, -1);
        if (s->lane)
            metric_add(METRIC_lanes_open, -1);
        log_info("session closed session=%llu tenant=%s peer=%s", (unsigned long long)s->number,
                 s->identity.tenant, s->peer);
    }
    list_del(&s->link);
    session_displace(s);
    channel_free(s->channel);
    free(s->recv_buf);
    feeds_free(s);
    output_free(s);
    lane_left(s);
    free(s);
    atomic_fetch_sub(&w->server->session_count, 1);
    w->session_count--;
    worker_has_less(w);
}

void session_leave(struct session *s)
{
    check(s->state == SESSION_HANDSHAKE && !s->receiving && !s->sending && list_empty(&s->requests));
    session_free(s);
}

size_t session_output_bytes(const struct session *s)
{
    return output_bytes(s);
}

void session_close(struct session *s, bool linger, const char *why)
{
    if (s->state == SESSION_CLOSING) {
        s->linger &= linger;
        return;
    }
    if (s->state != SESSION_OPEN) {
        metric_add(METRIC_sessions_refused, 1);
        log_info("connection refused session=%llu peer=%s state=%s: %s", (unsigned long long)s->number,
                 s->peer, state_name(s->state), why);
    } else {
        log_debug("session closing session=%llu tenant=%s: %s", (unsigned long long)s->number,
                  s->identity.tenant, why);
    }
    s->state = SESSION_CLOSING;
    s->linger = linger;
    s->state_at_ms = loop_now_ms(s->w->loop);
    struct err e = {0};
    err_set(&e, ERR_CANCELLED, "the session ended: %s", why);
    /* Cancelling one request frees at most that one. */
    list_for_each_safe (l, &s->requests) {
        struct request *r = container_of(l, struct request, link);
        if (!r->answered)
            metric_add(METRIC_requests_cancelled, 1);
        r->cancel(r, &e);
    }
    channel_close(s->channel);
    lanes_end(s);
}

/* Answers with the first thing that is wrong and closes: the peer broke the protocol or may not come in. */
static void refuse(struct session *s, const struct err *e)
{
    session_send_error(s, OP_HELLO, 0, e);
    session_close(s, true, e->text);
}

/* More requests may be taken only while what they made us hold stays bounded. */
static bool held_back(const struct session *s)
{
    struct server *sv = s->w->server;
    /* A session without a request may always bring one: what frees the others' memory is not its to wait for.
     */
    if (s->payload_bytes > 0 && atomic_load(&sv->payload_bytes) >= PAYLOADS_BYTES_MAX)
        return true;
    return s->payload_bytes >= sv->limits.session_payload_bytes_max ||
           session_output_bytes(s) > OUTPUT_STOP_BYTES;
}

static void take_frames(struct session *s)
{
    while (s->state != SESSION_CLOSING && !s->broken && !held_back(s)) {
        struct err e = {0};
        struct frame f;
        int got = channel_frame(s->channel, &f, &e);
        if (got < 0 && s->lane && e.class == ERR_CORRUPT)
            metric_add(METRIC_lanes_tampered, 1);
        if (got < 0)
            refuse(s, &e);
        if (got <= 0)
            return;
        s->frame_at_ms = loop_now_ms(s->w->loop);
        dispatch(s, &f);
    }
}

static void receive(struct session *s)
{
    if (s->receiving || s->shut || s->peer_end)
        return;
    if (s->state != SESSION_CLOSING && held_back(s))
        return;
    s->receiving = true;
    size_t n;
    uint8_t *place = channel_place(s->channel, 0, &n);
    s->placed = n >= RECEIVE_BYTES / 2; /* worth a receive of its own */
    size_t least = !s->placed ? 1 : n < RECEIVE_LEAST ? n : RECEIVE_LEAST;
    if (least != s->least)
        loop_recv_least(s->w->loop, s->fd, least);
    s->least = least;
    if (s->placed)
        loop_recv(s->w->loop, &s->recv, s->fd, place, n);
    else
        loop_recv(s->w->loop, &s->recv, s->fd, s->recv_buf, RECEIVE_BYTES);
}

/* One step further on the way out. True: the session was freed. */
static bool advance_close(struct session *s)
{
    if (!s->shut && !s->sending && (!s->linger || s->peer_end)) {
        s->shut = true;
        loop_shutdown(s->w->loop, s->fd);
    }
    if (s->shut && !s->receiving && !s->sending && !s->closing && !s->closed) {
        s->closing = true;
        loop_close(s->w->loop, &s->close, s->fd);
    }
    if (!s->closed || !list_empty(&s->requests))
        return false;
    session_free(s);
    return true;
}

/* When the session's patience ends next, 0 if never, and why. */
static uint64_t next_deadline(const struct session *s, const char **why)
{
    const struct server_limits *limits = &s->w->server->limits;
    if (s->state == SESSION_CLOSING) {
        *why = "the peer did not close";
        return s->shut ? 0 : s->state_at_ms + limits->closing_ms;
    }
    if (s->state != SESSION_OPEN) {
        *why = "no hello in time";
        return s->state_at_ms + limits->handshake_ms;
    }
    if (s->sending) {
        *why = "the peer takes nothing of what is sent to it";
        return s->send_at_ms + limits->send_ms;
    }
    if (channel_partial(s->channel) && !held_back(s)) {
        *why = "a frame did not arrive whole in time";
        return s->frame_at_ms + limits->frame_ms;
    }
    *why = "idle";
    return s->request_count == 0 ? s->frame_at_ms + limits->idle_ms : 0;
}

static void watch(struct session *s)
{
    const char *why;
    uint64_t at_ms = next_deadline(s, &why);
    if (at_ms == s->timer.at_ms)
        return;
    if (at_ms == 0)
        loop_timer_clear(s->w->loop, &s->timer);
    else
        loop_timer_set(s->w->loop, &s->timer, at_ms);
}

static int stopping_error(struct err *e)
{
    return err_set(e, ERR_CANCELLED, "the server is stopping; try again when it is back");
}

/* While the server stops: a stream that has used up its credit could not go on, since nothing new is taken.
 */
static void wind_down(struct session *s)
{
    struct err e = {0};
    if (!s->w->stopping)
        return;
    (void)stopping_error(&e);
    list_for_each_safe (l, &s->requests) {
        struct request *r = container_of(l, struct request, link);
        if (stream_waits_for_credit(r))
            r->cancel(r, &e);
    }
    if (s->request_count == 0 && !lanes_at_work(s))
        session_close(s, true, "the server is stopping");
}

void session_settle(struct session *s)
{
    if (s->state != SESSION_CLOSING)
        take_frames(s);
    if (s->state != SESSION_CLOSING) {
        streams_pump(s);
        calls_pump(s);
        wind_down(s);
    }
    if (s->broken)
        session_close(s, false, "an answer could not be queued");
    output_flush(s);
    receive(s);
    if (s->state == SESSION_CLOSING && advance_close(s))
        return;
    watch(s);
}

static void on_timer(struct loop_timer *t)
{
    struct session *s = container_of(t, struct session, timer);
    const char *why;
    uint64_t at_ms = next_deadline(s, &why);
    if (at_ms != 0 && at_ms <= loop_now_ms(s->w->loop)) {
        bool was_closing = s->state == SESSION_CLOSING;
        session_close(s, !s->sending, why);
        if (was_closing || s->sending) { /* it had its time, or does not take what is sent */
            s->shut = true;
            loop_shutdown(s->w->loop, s->fd);
        }
    }
    session_settle(s);
}

static void refuse_beyond_limit(struct session *s)
{
    struct err e = {0};
    if (!s->over_limit)
        return;
    err_set(&e, ERR_BUSY, "the server has %u sessions open, its limit; close some or raise sessions_max",
            s->w->server->limits.sessions_max);
    refuse(s, &e);
}

static void handshake_done(struct session *s)
{
    const struct identity *peer = channel_peer(s->channel);
    check(peer);
    if (peer->server || peer->role == ROLE_NONE) {
        struct err e = {0};
        err_set(&e, ERR_DENIED, "the certificate of %s is not a user's: use a certificate issued by `larder`",
                peer->subject);
        refuse(s, &e);
        return;
    }
    s->state = SESSION_HELLO;
    refuse_beyond_limit(s);
}

static int give_input(struct session *s, size_t n, struct err *e)
{
    const uint8_t *p = s->recv_buf;
    if (s->placed)
        return channel_placed(s->channel, n, e);
    int r = lane_opening(s, &p, &n, e);
    return r == 0 && n > 0 ? channel_input(s->channel, p, n, e) : r;
}

/* TLS tells the peer why by an alert, if there was memory for one; who opens a lane wrongly is told nothing.
 */
static void refuse_connection(struct session *s, const char *why)
{
    bool lane = s->opening_bytes > 0;
    if (lane)
        metric_add(METRIC_lanes_refused, 1);
    session_close(s, !lane && session_output_bytes(s) > 0, why);
}

static void input(struct session *s, size_t n)
{
    struct err e = {0};
    int r = give_input(s, n, &e);
    if (s->state == SESSION_HANDSHAKE && channel_ready(s->channel) && s->lane) {
        lane_begun(s);
        refuse_beyond_limit(s);
    } else if (s->state == SESSION_HANDSHAKE && channel_ready(s->channel))
        handshake_done(s);
    else if (r < 0 && s->state == SESSION_HANDSHAKE)
        refuse_connection(s, e.text);
    /* Once it is ready, frames that arrived before what broke it are taken first, then the error. */
}

static void on_recv(struct io_op *op)
{
    struct session *s = container_of(op, struct session, recv);
    s->receiving = false;
    if (op->result <= 0) {
        s->peer_end = true;
        if (op->result == 0)
            session_close(s, false, "the peer closed the connection");
        else
            session_close(s, false, strerror((int)-op->result));
    } else {
        metric_add(METRIC_received_bytes, op->result);
        if (s->state == SESSION_HANDSHAKE && session_spread(s, (size_t)op->result))
            return;
        if (s->state != SESSION_CLOSING) /* what comes after our end is dropped */
            input(s, (size_t)op->result);
        if (s->state != SESSION_CLOSING && channel_peer_closed(s->channel)) {
            take_frames(s);
            session_close(s, true, "the peer said goodbye");
        }
    }
    session_settle(s);
}

static void on_send(struct io_op *op)
{
    struct session *s = container_of(op, struct session, send);
    s->sending = false;
    if (op->result < 0) {
        s->peer_end = true;
        session_close(s, false, strerror((int)-op->result));
        s->shut = true; /* nothing more can be sent */
        loop_shutdown(s->w->loop, s->fd);
    } else {
        metric_add(METRIC_sent_bytes, op->result);
    }
    output_sent(s);
    session_settle(s);
}

static void on_close(struct io_op *op)
{
    struct session *s = container_of(op, struct session, close);
    s->closing = false;
    s->closed = true;
    session_settle(s);
}

static struct frame_header answer_header(struct session *s, uint16_t opcode, uint32_t flags, uint64_t id)
{
    struct frame_header h = {.opcode = opcode, .flags = FRAME_RESPONSE | flags, .request_id = id};
    if (s->features & 1ull << FEATURE_READ_WAITS)
        h.deadline_ms = s->answer_wait_ms;
    s->answer_wait_ms = 0;
    return h;
}

void session_send(struct session *s, uint16_t opcode, uint32_t flags, uint64_t id, struct slice message,
                  struct slice tail)
{
    struct err e = {0};
    struct frame_header h = answer_header(s, opcode, flags, id);
    if (s->state == SESSION_CLOSING || s->broken)
        return;
    if (channel_send(s->channel, &h, message, tail, &e) < 0) {
        log_info("session=%llu: an answer could not be queued: %s", (unsigned long long)s->number, e.text);
        s->broken = true;
    }
}

void session_send_extent(struct session *s, uint16_t opcode, uint32_t flags, uint64_t id, struct slice tail,
                         struct extent *x)
{
    struct err e = {0};
    struct frame_header h = answer_header(s, opcode, flags, id);
    if (s->state == SESSION_CLOSING || s->broken) {
        extent_put(s->w->server->extents, x);
    } else if (output_extent(s, &h, tail, x, &e) < 0) {
        log_info("session=%llu: an answer could not be queued: %s", (unsigned long long)s->number, e.text);
        s->broken = true;
    }
}

void session_send_error(struct session *s, uint16_t opcode, uint64_t id, const struct err *e)
{
    struct buf b = {0};
    msg_of_err(e, &b);
    if (b.failed)
        s->broken = true;
    else
        session_send(s, opcode, FRAME_ERROR, id, SLICE(b.p, b.n), (struct slice){0});
    buf_free(&b);
}

void session_stop(struct session *s, bool force)
{
    struct err e = {0};
    (void)stopping_error(&e);
    list_for_each_safe (l, &s->requests) {
        struct request *r = container_of(l, struct request, link);
        r->at_stop = true;
        if (force) /* now, and not when the store gets to it */
            request_fail(r, &e);
        if (force || r->op->opcode == OP_JOIN)
            r->cancel(r, &e);
    }
    if (force && s->state != SESSION_CLOSING)
        session_close(s, true, "the server is stopping");
    session_settle(s);
}

/* Requests. */

struct request *request_find(struct session *s, uint64_t id)
{
    list_for_each (l, &s->requests) {
        struct request *r = container_of(l, struct request, link);
        if (r->id == id && !r->answered)
            return r;
    }
    return NULL;
}

static int admission_error(struct session *s, const struct op_entry *op, struct err *e)
{
    if (s->w->stopping)
        return stopping_error(e);
    if (s->request_count >= s->w->server->limits.session_requests_max)
        return err_set(e, ERR_BUSY, "%s: this session has %u requests in flight, the limit; wait for answers",
                       opcode_name(op->opcode), s->request_count);
    return 0;
}

struct request *request_begin(struct session *s, const struct op_entry *op, struct frame *f, size_t bytes,
                              void (*cancel)(struct request *r, const struct err *why),
                              void (*timer)(struct loop_timer *t))
{
    struct err e = {0};
    struct request *r = NULL;
    if (admission_error(s, op, &e) == 0 && !(r = calloc(1, bytes)))
        err_set(&e, ERR_NO_MEMORY, "%s: no memory for the request", opcode_name(op->opcode));
    if (!r) {
        channel_frame_done(s->channel);
        metric_add(METRIC_requests_failed, 1);
        session_send_error(s, op->opcode, f->header.request_id, &e);
        return NULL;
    }
    r->s = s;
    r->op = op;
    r->id = f->header.request_id;
    r->cancel = cancel;
    r->timer.fire = timer;
    r->started_ms = loop_now_ms(s->w->loop);
    r->deadline_ms = f->header.deadline_ms ? f->header.deadline_ms : s->w->server->limits.deadline_ms;
    r->payload = SLICE(f->payload, f->header.payload_bytes);
    r->memory = channel_frame_steal(s->channel);
    list_add_tail(&s->requests, &r->link);
    s->request_count++;
    s->payload_bytes += r->payload.n;
    atomic_fetch_add(&s->w->server->payload_bytes, r->payload.n);
    metric_add(METRIC_requests_total, 1);
    metric_add(METRIC_requests_in_flight, 1);
    return r;
}

static void log_answer(const struct request *r, const struct err *e)
{
    const struct session *s = r->s;
    unsigned long long took_ms = loop_now_ms(s->w->loop) - r->started_ms;
    if (e)
        log_info("request failed session=%llu tenant=%s op=%s id=%llu ms=%llu class=\"%s\": %s",
                 (unsigned long long)s->number, s->identity.tenant, opcode_name(r->op->opcode),
                 (unsigned long long)r->id, took_ms, err_class_name(e->class), e->text);
    else
        log_debug("request session=%llu tenant=%s op=%s id=%llu ms=%llu", (unsigned long long)s->number,
                  s->identity.tenant, opcode_name(r->op->opcode), (unsigned long long)r->id, took_ms);
    if (r->op->audit)
        log_info("audit op=%s tenant=%s role=%s by=\"%s\" peer=%s session=%llu result=%s",
                 opcode_name(r->op->opcode), s->identity.tenant, role_name(s->identity.role),
                 s->identity.subject, s->peer, (unsigned long long)s->number,
                 e ? err_class_name(e->class) : "done");
}

static bool answer_once(struct request *r, const struct err *e)
{
    if (r->answered)
        return false;
    r->answered = true;
    loop_timer_clear(r->s->w->loop, &r->timer);
    metric_add(METRIC_requests_in_flight, -1);
    r->s->request_count--;
    if (e)
        metric_add(METRIC_requests_failed, 1);
    if (r->at_stop)
        *(e ? &r->s->w->stop_failed : &r->s->w->stop_finished) += 1;
    log_answer(r, e);
    return r->s->state != SESSION_CLOSING;
}

void request_answer(struct request *r, struct slice message, struct slice tail)
{
    if (answer_once(r, NULL))
        session_send(r->s, r->op->opcode, 0, r->id, message, tail);
}

void request_fail(struct request *r, const struct err *e)
{
    if (answer_once(r, e))
        session_send_error(r->s, r->op->opcode, r->id, e);
}

void request_more(struct request *r, struct slice message, struct slice tail)
{
    if (!r->answered)
        session_send(r->s, r->op->opcode, FRAME_MORE, r->id, message, tail);
}

void request_extent(struct request *r, bool last, struct slice tail, struct extent *x)
{
    if (last ? answer_once(r, NULL) : !r->answered)
        session_send_extent(r->s, r->op->opcode, last ? 0 : FRAME_MORE, r->id, tail, x);
    else
        extent_put(r->s->w->server->extents, x);
}

void request_free(struct request *r)
{
    struct session *s = r->s;
    check(r->answered);
    list_del(&r->link);
    s->payload_bytes -= r->payload.n;
    atomic_fetch_sub(&s->w->server->payload_bytes, r->payload.n);
    payload_give(s->w, r->memory);
    free(r);
}
