/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of a connection: submitting, cancelling, waiting. The thread that does the I/O is in conn_io.c. */
#include "client/conn.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "client/clock.h"
#include "client/conn_private.h"
#include "format/base/log.h"

void conn_wake(struct conn *c)
{
    uint64_t one = 1;
    ssize_t n = write(c->wake, &one, sizeof one); /* can only fail when it is awake already */
    (void)n;
}

void conn_end(struct conn *c, struct call *call, const struct err *e)
{
    call->err = *e;
    list_del(&call->link);
    list_add_tail(&c->ended, &call->link);
}

/* The server bounds its side by timeout_ms; ours ends a little later, so that its words are heard. */
static uint64_t grace_ms(uint32_t timeout_ms)
{
    uint64_t g = timeout_ms / 8 + 250;
    return g < 2000 ? g : 2000;
}

/* Bytes that the server may send before the first OP_CREDIT. */
static int64_t first_credit(uint16_t opcode, struct slice message)
{
    struct rcur in = rcur_of(message.p, message.n);
    uint64_t credit = INT64_MAX;
    struct msg_read read;
    struct msg_published_samples samples;
    if (opcode == OP_READ && msg_read_decode(&in, &read, NULL) == 0)
        credit = read.credit;
    else if (opcode == OP_PUBLISHED_SAMPLES && msg_published_samples_decode(&in, &samples, NULL) == 0)
        credit = samples.credit;
    return credit < INT64_MAX ? (int64_t)credit : INT64_MAX;
}

bool conn_streams(const struct call *call)
{
    return call->more || call->place;
}

static struct outgoing *outgoing_create(struct call *call, uint16_t opcode, struct slice message,
                                        struct slice tail)
{
    struct outgoing *o = malloc(sizeof *o + message.n);
    if (!o)
        return NULL;
    *o = (struct outgoing){.call = call, .message_bytes = message.n, .tail = tail};
    o->header.opcode = opcode;
    list_init(&o->link);
    if (message.n > 0)
        memcpy(o->message, message.p, message.n);
    return o;
}

void conn_submit(struct conn *c, struct call *call, struct slice message, struct slice tail)
{
    if (call->sealed && conn_has_lane(c))
        c = c->lane;
    call->conn = c;
    uint32_t timeout = call->timeout_ms ? call->timeout_ms : c->request_timeout_ms;
    struct outgoing *o = outgoing_create(call, call->opcode, message, tail);
    err_clear(&call->err);
    call->payload = NULL;
    call->payload_bytes = 0;
    call->cancelled = call->answered = false;
    call->bound_ms = timeout + (uint32_t)grace_ms(timeout);
    call->deadline_ms = clock_ms() + call->bound_ms;
    call->credit = conn_streams(call) ? first_credit(call->opcode, message) : INT64_MAX;
    list_init(&call->link);
    bool wakes = !call->push_follows; /* once it is queued it may end, and be freed, at any moment */

    pthread_mutex_lock(&c->lock);
    call->id = c->next_id++;
    struct err e;
    if (!o) {
        err_set(&e, ERR_NO_MEMORY, "no memory for a request of %zu bytes", message.n);
        conn_end(c, call, &e);
    } else if (c->stopping) {
        err_set(&e, ERR_CANCELLED, "the connection to %s:%s was closed by this side", c->host, c->port);
        conn_end(c, call, &e);
        free(o);
    } else {
        o->header.request_id = call->id;
        o->header.deadline_ms = timeout;
        list_add_tail(&c->queue, &o->link);
        if (call->deadline_ms < c->next_deadline_ms)
            c->next_deadline_ms = call->deadline_ms;
        if (c->state == CONN_DOWN)
            c->state = CONN_CONNECTING;
    }
    pthread_mutex_unlock(&c->lock);
    if (wakes)
        conn_wake(c);
}

/* One-way frames get lost with their connection, as what they are about. */
void conn_one_way(struct conn *c, uint16_t opcode, uint64_t id, const struct buf *message)
{
    struct outgoing *o =
        message->failed ? NULL : outgoing_create(NULL, opcode, SLICE(message->p, message->n), SLICE(NULL, 0));
    if (o && c->state == CONN_UP) {
        o->header.request_id = id;
        list_add_head(&c->queue, &o->link); /* before chunks that wait */
        o = NULL;
    }
    free(o);
}

bool conn_flying(struct conn *c, const struct call *call)
{
    list_for_each (it, &c->flying)
        if (it == &call->link)
            return true;
    return false;
}

/* The entry of a call in the queue, or NULL. */
static struct outgoing *queued(struct conn *c, const struct call *call)
{
    list_for_each (it, &c->queue) {
        struct outgoing *o = container_of(it, struct outgoing, link);
        if (o->call == call)
            return o;
    }
    return NULL;
}

void conn_cancel(struct conn *c, struct call *call)
{
    c = call->conn;
    struct err e;
    err_set(&e, ERR_CANCELLED, "%s was cancelled", opcode_name(call->opcode));
    struct buf b = {0};
    msg_cancel_encode(&(struct msg_cancel){.request_id = call->id}, &b);
    pthread_mutex_lock(&c->lock);
    struct outgoing *o = queued(c, call);
    if (o) {
        list_del(&o->link);
        free(o);
        conn_end(c, call, &e);
    } else if (conn_flying(c, call)) {
        conn_one_way(c, OP_CANCEL, call->id, &b);
        call->cancelled = true;
        conn_end(c, call, &e); /* what still comes for it is dropped */
    }
    pthread_mutex_unlock(&c->lock);
    buf_free(&b);
    conn_wake(c);
}

void conn_credit(struct conn *c, struct call *call, uint64_t bytes)
{
    c = call->conn;
    struct buf b = {0};
    msg_credit_encode(&(struct msg_credit){.request_id = call->id, .bytes = bytes}, &b);
    pthread_mutex_lock(&c->lock);
    if (conn_flying(c, call)) {
        if (call->credit <= 0) { /* the server was not to send: its time begins now */
            call->deadline_ms = clock_ms() + call->bound_ms;
            if (call->deadline_ms < c->next_deadline_ms)
                c->next_deadline_ms = call->deadline_ms;
        }
        if (add_overflows(call->credit, (int64_t)bytes, &call->credit))
            call->credit = INT64_MAX;
        conn_one_way(c, OP_CREDIT, call->id, &b);
    }
    pthread_mutex_unlock(&c->lock);
    buf_free(&b);
    conn_wake(c);
}

void call_free(struct call *call)
{
    free(call->payload);
    call->payload = NULL;
    call->payload_bytes = 0;
}

/* ---- waiting for a call ---- */

struct waiter {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool done;
};

/* The waiter of a synchronous call stands behind it in memory of conn_call's frame; `done` finds it there. */
struct sync_call {
    struct call call;
    struct waiter waiter;
};

static void sync_done(struct call *call)
{
    struct sync_call *s = container_of(call, struct sync_call, call);
    pthread_mutex_lock(&s->waiter.lock);
    s->waiter.done = true;
    pthread_cond_signal(&s->waiter.cond);
    pthread_mutex_unlock(&s->waiter.lock);
}

/* done comes in any case: every call has a deadline, and the thread keeps it. */
static void sync_wait(struct sync_call *s)
{
    pthread_mutex_lock(&s->waiter.lock);
    while (!s->waiter.done)
        pthread_cond_wait(&s->waiter.cond, &s->waiter.lock);
    pthread_mutex_unlock(&s->waiter.lock);
}

int conn_call(struct conn *c, uint16_t opcode, struct slice message, struct slice tail, uint32_t timeout_ms,
              struct call *call, struct rcur *reply, struct err *e)
{
    struct sync_call s = {.waiter = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false}};
    uint64_t give_up_ms = 0;
    for (;;) {
        s.call = (struct call){.opcode = opcode, .timeout_ms = timeout_ms, .done = sync_done};
        s.waiter.done = false;
        conn_submit(c, &s.call, message, tail);
        sync_wait(&s);
        if (s.call.err.class != ERR_NETWORK)
            break;
        uint64_t now = clock_ms();
        if (give_up_ms == 0)
            give_up_ms = now + c->reconnect_ms;
        if (now >= give_up_ms)
            break;
    }
    pthread_cond_destroy(&s.waiter.cond);
    pthread_mutex_destroy(&s.waiter.lock);
    *call = s.call;
    list_init(&call->link);
    if (call->err.class != ERR_NONE) {
        call_free(call);
        if (e)
            *e = call->err;
        return -call->err.errnum;
    }
    if (reply)
        *reply = rcur_of(call->payload, call->payload_bytes);
    return 0;
}

/* ---- life ---- */

static void conn_free(struct conn *c)
{
    if (c->config)
        channel_config_unref(c->config);
    if (c->wake >= 0)
        close(c->wake);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    pthread_mutex_destroy(&c->io);
    free(c->host);
    free(c->port);
    free(c);
}

static struct conn *conn_create(const struct conn_options *o)
{
    struct conn *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->connect_timeout_ms = o->connect_timeout_ms ? o->connect_timeout_ms : 10000;
    c->request_timeout_ms = o->request_timeout_ms ? o->request_timeout_ms : 60000;
    c->reconnect_ms = o->reconnect_ms ? o->reconnect_ms : 30000;
    c->lane_wish = o->lane;
    c->fd = -1;
    c->next_id = 1;
    c->next_deadline_ms = UINT64_MAX;
    list_init(&c->queue);
    list_init(&c->flying);
    list_init(&c->ended);
    pthread_mutex_init(&c->lock, NULL);
    pthread_mutex_init(&c->io, NULL);
    c->config = o->config ? channel_config_ref(o->config) : NULL;
    c->host = strdup(o->host);
    c->port = strdup(o->port);
    c->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (clock_cond_init(&c->changed) != 0 || !c->host || !c->port || c->wake < 0) {
        conn_free(c);
        return NULL;
    }
    return c;
}

/* Starts the thread and waits for its first connection. On failure c is gone. */
static int conn_start(struct conn *c, struct err *e)
{
    int rc = pthread_create(&c->thread, NULL, conn_thread, c);
    if (rc != 0) {
        rc = err_sys(e, rc, "starting a thread for the connection to %s:%s", c->host, c->port);
        conn_free(c);
        return rc;
    }
    pthread_mutex_lock(&c->lock);
    while (c->state == CONN_CONNECTING) /* bounded by connect_timeout_ms in the thread */
        pthread_cond_wait(&c->changed, &c->lock);
    rc = c->state == CONN_UP || c->opened ? 0 : -c->why.errnum;
    if (rc < 0 && e)
        *e = c->why;
    pthread_mutex_unlock(&c->lock);
    if (rc < 0)
        conn_close(c);
    return rc;
}

static bool lane_agreed(struct conn *c)
{
    struct conn_hello h;
    conn_hello(c, &h);
    return c->config && c->lane_wish != CONN_LANE_NONE && (h.features & 1ull << FEATURE_BULK_LANE);
}

void conn_lane_open(struct conn *c)
{
    if (c->lane_tried || !lane_agreed(c))
        return;
    c->lane_tried = true;
    struct conn_options o = {.host = c->host,
                             .port = c->port,
                             .connect_timeout_ms = c->connect_timeout_ms,
                             .request_timeout_ms = c->request_timeout_ms,
                             .reconnect_ms = c->reconnect_ms};
    struct err e;
    err_set(&e, ERR_NO_MEMORY, "no memory or file descriptors for it");
    struct conn *lane = conn_create(&o);
    if (lane) {
        lane->base = c;
        if (conn_start(lane, &e) < 0)
            lane = NULL;
    }
    if (!lane)
        log_warn("no bulk lane to %s:%s, sealed chunks go over TLS: %s", c->host, c->port, e.text);
    c->lane = lane;
}

int conn_open(const struct conn_options *o, struct conn **out, struct err *e)
{
    struct conn *c = conn_create(o);
    if (!c)
        return err_set(e, ERR_NO_MEMORY, "no memory or file descriptors for a connection to %s:%s", o->host,
                       o->port);
    int rc = conn_start(c, e);
    if (rc < 0)
        return rc;
    if (c->lane_wish == CONN_LANE_OPEN)
        conn_lane_open(c);
    *out = c;
    return 0;
}

void conn_stop(struct conn *c)
{
    if (c->lane)
        conn_stop(c->lane);
    pthread_mutex_lock(&c->lock);
    c->stopping = true;
    pthread_mutex_unlock(&c->lock);
    conn_wake(c);
}

void conn_close(struct conn *c)
{
    if (!c)
        return;
    conn_close(c->lane); /* it may be waiting for a ticket from this one */
    pthread_mutex_lock(&c->lock);
    c->stopping = c->closing = true;
    pthread_mutex_unlock(&c->lock);
    conn_wake(c);
    pthread_join(c->thread, NULL);
    conn_free(c);
}

void conn_hello(struct conn *c, struct conn_hello *out)
{
    pthread_mutex_lock(&c->lock);
    *out = c->hello;
    pthread_mutex_unlock(&c->lock);
}

unsigned conn_reconnect_ms(const struct conn *c)
{
    return c->reconnect_ms;
}

bool conn_has_lane(struct conn *c)
{
    return c->lane && !atomic_load(&c->lane_off);
}

const char *conn_path(struct conn *c)
{
    if (!c->config)
        return "clear TCP";
    if (!lane_agreed(c))
        return "TLS 1.3 over TCP";
    if (c->lane_tried && !conn_has_lane(c))
        return "TLS 1.3 over TCP, since the bulk lane failed";
    return "sealed chunks on plain TCP, authenticated; the rest TLS 1.3";
}

const char *conn_paths(struct conn **conns, unsigned count, struct conn *control)
{
    for (unsigned i = 0; i < count; i++)
        if (!conn_has_lane(conns[i]))
            return conn_path(conns[i]);
    return conn_path(count > 0 ? conns[0] : control);
}
