/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The network of the simulator. A connection is two ends; bytes travel in segments of random size and delay,
 * in order. What is sent and not received is bounded by a window, so senders wait as they do on TCP. An end
 * that is closed sends an end of stream, or a reset where bytes were left unread; bytes that arrive at a
 * closed end are answered with a reset.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/io/sim_impl.h"

#define WINDOW_BYTES  (256u << 10)
#define SEGMENT_BYTES (64u << 10)

struct endpoint {
    struct conn *conn;
    struct endpoint *peer;
    struct sim_node *node;
    uint8_t *in; /* received and not yet read */
    size_t in_first, in_bytes;
    size_t travelling_bytes; /* towards this end */
    uint64_t last_arrival_us;
    bool ended;    /* the peer's end of stream has arrived */
    bool finished; /* our end of stream was sent */
    bool shut;     /* shut down here: what arrives is dropped */
    bool reset, closed;
    struct list receivers, senders; /* of io_op */
    struct list in_backlog;
};

struct conn {
    struct list in_sim;
    unsigned segments;      /* under way */
    struct endpoint end[2]; /* 0: who connected */
    unsigned client_port, server_port;
};

struct listener {
    struct list in_sim;
    struct sim_node *node;
    unsigned port;
    bool shared;
    struct list backlog;   /* of endpoint */
    struct list accepters; /* of io_op */
};

enum segment_kind { SEGMENT_DATA, SEGMENT_END, SEGMENT_RESET };

struct segment {
    struct endpoint *to;
    enum segment_kind kind;
    size_t n;
    uint8_t bytes[];
};

/* "nodeN" */
static int parse_host(const char *host, unsigned *node)
{
    char *end;
    if (strncmp(host, "node", 4) != 0 || host[4] < '0' || host[4] > '9')
        return -EINVAL;
    unsigned long n = strtoul(host + 4, &end, 10);
    *node = (unsigned)n;
    return *end || n > 4095 ? -EINVAL : 0;
}

static int parse_port(const char *port, unsigned *out)
{
    char *end;
    unsigned long n = strtoul(port, &end, 10);
    *out = (unsigned)n;
    return !*port || *end || n > 65535 ? -EINVAL : 0;
}

static struct listener *listener_at(struct sim *s, unsigned node, unsigned port)
{
    struct listener *found = NULL;
    unsigned count = 0;
    list_for_each (it, &s->listeners) {
        struct listener *l = container_of(it, struct listener, in_sim);
        if (l->node->number == node && l->port == port && sim_below(s, ++count) == 0)
            found = l; /* of those that share it, each with the same chance */
    }
    return found;
}

static bool port_taken(struct sim *s, unsigned node, unsigned port, bool shared)
{
    list_for_each (it, &s->listeners) {
        struct listener *l = container_of(it, struct listener, in_sim);
        if (l->node->number == node && l->port == port && !(shared && l->shared))
            return true;
    }
    return false;
}

int net_listen(struct sim_loop *sl, const char *host, const char *port, bool shared, int *fd, char *bound,
               size_t bound_size, struct err *e)
{
    struct sim *s = sl->sim;
    unsigned number, node = sl->node->number;
    if (host && strncmp(host, "node", 4) == 0 && (parse_host(host, &node) || node != sl->node->number))
        return err_sys(e, EADDRNOTAVAIL, "cannot listen on %s port %s; this is node%u", host, port,
                       sl->node->number);
    if (parse_port(port, &number))
        return err_set(e, ERR_INVALID, "cannot listen on port %s; expected 0 to 65535", port);
    if (number && port_taken(s, node, number, shared))
        return err_sys(e, EADDRINUSE, "cannot listen on %s port %s", host ? host : "*", port);
    struct listener *l = sim_alloc(sizeof *l);
    l->node = sl->node;
    l->port = number ? number : s->next_port++;
    l->shared = shared;
    list_init(&l->backlog);
    list_init(&l->accepters);
    list_add_tail(&s->listeners, &l->in_sim);
    struct sim_fd *f = sim_fd_new(s, sl->node);
    f->listener = l;
    *fd = f->fd;
    if (bound_size)
        snprintf(bound, bound_size, "node%u:%u", node, l->port);
    return 0;
}

/* Segments. */

static void conn_free_if_over(struct conn *c)
{
    if (!c->end[0].closed || !c->end[1].closed || c->segments)
        return;
    for (int i = 0; i < 2; i++)
        free(c->end[i].in);
    list_del(&c->in_sim);
    free(c);
}

static void wake_receivers(struct sim *s, struct endpoint *ep);
static void push(struct sim *s, struct endpoint *ep);

static void fail_waiting(struct list *ops, int status)
{
    struct list *entry;
    while ((entry = list_pop(ops)))
        sim_ready(container_of(entry, struct io_op, link), status);
}

static void reset_end(struct endpoint *ep)
{
    ep->reset = true;
    ep->in_bytes = 0;
    fail_waiting(&ep->receivers, -ECONNRESET);
    fail_waiting(&ep->senders, -ECONNRESET);
}

static void arrive(struct sim *s, void *arg);
static void cut(struct sim *s, struct endpoint *ep);

static void send_segment(struct sim *s, struct endpoint *from, enum segment_kind kind, const void *p,
                         size_t n)
{
    struct segment *g = sim_alloc(sizeof *g + n);
    g->to = from->peer;
    g->kind = kind;
    g->n = n;
    if (n)
        memcpy(g->bytes, p, n);
    uint64_t at_us = s->now_us + 20 + sim_below(s, 200) + sim_stall_us(s);
    if (at_us < g->to->last_arrival_us)
        at_us = g->to->last_arrival_us;
    g->to->last_arrival_us = at_us;
    g->to->travelling_bytes += n;
    from->conn->segments++;
    sim_at(s, at_us - s->now_us, arrive, g);
}

static void take_in(struct endpoint *ep, const void *p, size_t n)
{
    if (!ep->in)
        ep->in = sim_alloc(WINDOW_BYTES);
    check(ep->in_bytes + n <= WINDOW_BYTES);
    if (ep->in_first + ep->in_bytes + n > WINDOW_BYTES) {
        memmove(ep->in, ep->in + ep->in_first, ep->in_bytes);
        ep->in_first = 0;
    }
    memcpy(ep->in + ep->in_first + ep->in_bytes, p, n);
    ep->in_bytes += n;
}

/* True: the segment holds the byte at which the connection breaks. */
static bool is_cut(struct sim *s, const struct segment *g, size_t *before)
{
    uint64_t from = s->traffic, at = s->options.faults.cut_at;
    if (!s->counts_traffic || g->kind != SEGMENT_DATA)
        return false;
    s->traffic += g->n;
    *before = (size_t)(at - from - 1);
    return at > from && at <= s->traffic;
}

static void arrive(struct sim *s, void *arg)
{
    struct segment *g = arg;
    struct endpoint *ep = g->to;
    struct conn *c = ep->conn;
    size_t before;
    ep->travelling_bytes -= g->n;
    c->segments--;
    bool cuts = is_cut(s, g, &before);
    if (cuts) {
        s->struck.cut_at++;
        g->n = before;
    }
    if (g->kind == SEGMENT_RESET) {
        reset_end(ep);
    } else if (g->kind == SEGMENT_END) {
        ep->ended = true;
        wake_receivers(s, ep);
    } else if (ep->closed) {
        send_segment(s, ep, SEGMENT_RESET, NULL, 0);
    } else if (!ep->reset && !ep->shut) {
        take_in(ep, g->bytes, g->n);
        wake_receivers(s, ep);
    } else {
        push(s, ep->peer); /* dropped: the window opens */
    }
    if (cuts && !ep->reset)
        cut(s, ep);
    free(g);
    conn_free_if_over(c);
}

static void cut(struct sim *s, struct endpoint *ep)
{
    sim_trace(s, "the connection of node%u and node%u is cut", ep->node->number, ep->peer->node->number);
    reset_end(ep);
    reset_end(ep->peer);
}

/* Receiving and sending. */

static void receive_now(struct sim *s, struct endpoint *ep, struct io_op *op)
{
    struct io_req *r = io_req(op);
    size_t n = r->n < ep->in_bytes ? r->n : ep->in_bytes;
    if (n > 1 && sim_strikes(s, &s->options.faults.short_transfer))
        n = 1 + (size_t)sim_below(s, n - 1);
    memcpy(r->p, ep->in + ep->in_first, n);
    ep->in_first += n;
    ep->in_bytes -= n;
    sim_ready(op, (int64_t)n);
    push(s, ep->peer);
}

static void wake_receivers(struct sim *s, struct endpoint *ep)
{
    while (!list_empty(&ep->receivers) && (ep->in_bytes || ep->ended || ep->shut)) {
        struct io_op *op = container_of(list_pop(&ep->receivers), struct io_op, link);
        if (ep->in_bytes)
            receive_now(s, ep, op);
        else
            sim_ready(op, 0);
    }
}

/* The next bytes of a send, at most n of them. */
static const uint8_t *next_bytes(struct io_req *r, size_t *n)
{
    if (r->code == IO_SEND)
        return (uint8_t *)r->p + r->done;
    const struct iovec *v = io_parts(r)->msg_iov;
    *n = *n < v->iov_len ? *n : v->iov_len;
    return v->iov_base;
}

/* Sends of those who wait as much as the window takes. */
static void push(struct sim *s, struct endpoint *ep)
{
    while (!list_empty(&ep->senders)) {
        struct io_op *op = container_of(ep->senders.next, struct io_op, link);
        struct io_req *r = io_req(op);
        size_t used = ep->peer->in_bytes + ep->peer->travelling_bytes, room = WINDOW_BYTES - used,
               n = r->n - r->done;
        if (n && !room)
            return;
        n = n < room ? n : room;
        n = n < SEGMENT_BYTES ? n : SEGMENT_BYTES;
        if (n > 1 && sim_strikes(s, &s->options.faults.short_transfer))
            n = 1 + (size_t)sim_below(s, n - 1);
        if (n) {
            const uint8_t *bytes = next_bytes(r, &n);
            send_segment(s, ep, SEGMENT_DATA, bytes, n);
        }
        if (io_settle(op, (int64_t)n)) {
            list_del(&op->link);
            sim_ready(op, op->result);
        }
    }
}

static void wait_in(struct list *ops, struct io_op *op)
{
    io_req(op)->state = IO_HELD;
    list_add_tail(ops, &op->link);
}

static void perform_recv(struct sim *s, struct endpoint *ep, struct io_op *op)
{
    if (ep->reset) {
        sim_ready(op, -ECONNRESET);
        return;
    }
    wait_in(&ep->receivers, op);
    wake_receivers(s, ep);
}

static void perform_send(struct sim *s, struct endpoint *ep, struct io_op *op)
{
    if (ep->reset || ep->finished) {
        sim_ready(op, ep->reset ? -ECONNRESET : -EPIPE);
        return;
    }
    wait_in(&ep->senders, op);
    push(s, ep);
}

/* Connecting. */

static struct conn *conn_new(struct sim *s, struct sim_node *client, struct listener *l)
{
    struct conn *c = sim_alloc(sizeof *c);
    c->client_port = 50000 + (unsigned)sim_below(s, 10000);
    c->server_port = l->port;
    for (int i = 0; i < 2; i++) {
        struct endpoint *ep = &c->end[i];
        ep->conn = c;
        ep->peer = &c->end[!i];
        ep->node = i == 0 ? client : l->node;
        list_init(&ep->receivers);
        list_init(&ep->senders);
        list_init(&ep->in_backlog);
    }
    list_add_tail(&s->conns, &c->in_sim);
    return c;
}

static void serve_accepters(struct sim *s, struct listener *l)
{
    while (!list_empty(&l->accepters) && !list_empty(&l->backlog)) {
        struct io_op *op = container_of(list_pop(&l->accepters), struct io_op, link);
        struct sim_fd *f = sim_fd_new(s, l->node);
        f->endpoint = container_of(list_pop(&l->backlog), struct endpoint, in_backlog);
        sim_ready(op, f->fd);
    }
}

static void perform_connect(struct sim *s, struct io_op *op)
{
    struct io_req *r = io_req(op);
    struct sim_node *from = sim_loop_of(op->loop)->node;
    unsigned node, port;
    if (parse_host(r->path, &node) || parse_port(r->path2, &port)) {
        sim_ready(op, -EINVAL);
        return;
    }
    struct listener *l = listener_at(s, node, port);
    if (!l) {
        sim_ready(op, -ECONNREFUSED);
        return;
    }
    if (sim_strikes(s, &s->options.faults.connection_cut)) {
        sim_ready(op, -ECONNRESET);
        return;
    }
    struct conn *c = conn_new(s, from, l);
    struct sim_fd *f = sim_fd_new(s, from);
    f->endpoint = &c->end[0];
    list_add_tail(&l->backlog, &c->end[1].in_backlog);
    sim_ready(op, f->fd);
    serve_accepters(s, l);
}

void net_perform(struct io_op *op)
{
    struct sim_loop *sl = sim_loop_of(op->loop);
    struct sim *s = sl->sim;
    struct io_req *r = io_req(op);
    if (r->code == IO_CONNECT) {
        perform_connect(s, op);
        return;
    }
    struct sim_fd *f = sim_fd_get(s, sl->node, r->fd);
    if (!f || (r->code == IO_ACCEPT ? !f->listener : !f->endpoint)) {
        sim_ready(op, f ? -ENOTSOCK : -EBADF);
        return;
    }
    if (r->code == IO_ACCEPT) {
        wait_in(&f->listener->accepters, op);
        serve_accepters(s, f->listener);
        return;
    }
    if (!f->endpoint->reset && sim_strikes(s, &s->options.faults.connection_cut))
        cut(s, f->endpoint);
    if (r->code == IO_RECV)
        perform_recv(s, f->endpoint, op);
    else
        perform_send(s, f->endpoint, op);
}

/* Ending. */

static void finish(struct sim *s, struct endpoint *ep)
{
    if (ep->finished || ep->reset)
        return;
    ep->finished = true;
    send_segment(s, ep, SEGMENT_END, NULL, 0);
}

void net_shutdown(struct sim *s, struct sim_fd *f)
{
    if (f->listener)
        fail_waiting(&f->listener->accepters, -EINVAL);
    struct endpoint *ep = f->endpoint;
    if (!ep || ep->reset)
        return;
    ep->shut = true;
    finish(s, ep);
    fail_waiting(&ep->senders, -EPIPE);
    wake_receivers(s, ep);
    push(s, ep->peer);
}

static void close_end(struct sim *s, struct endpoint *ep)
{
    if (ep->closed)
        return;
    check(list_empty(&ep->receivers) && list_empty(&ep->senders)); /* closed while in use */
    if (ep->in_bytes && !ep->reset)
        send_segment(s, ep, SEGMENT_RESET, NULL, 0);
    else
        finish(s, ep);
    ep->closed = true;
    ep->in_bytes = 0;
    push(s, ep->peer);
    conn_free_if_over(ep->conn);
}

static void close_listener(struct sim *s, struct listener *l)
{
    struct list *entry;
    check(list_empty(&l->accepters)); /* closed while in use */
    while ((entry = list_pop(&l->backlog))) {
        struct endpoint *ep = container_of(entry, struct endpoint, in_backlog);
        send_segment(s, ep, SEGMENT_RESET, NULL, 0);
        ep->closed = true;
    }
    list_del(&l->in_sim);
    free(l);
}

void net_close(struct sim *s, struct sim_fd *f)
{
    if (f->listener)
        close_listener(s, f->listener);
    if (f->endpoint)
        close_end(s, f->endpoint);
}

void net_peer(const struct sim_fd *f, char *out, size_t size)
{
    const struct endpoint *ep = f->endpoint;
    if (!ep)
        snprintf(out, size, "unknown");
    else
        snprintf(out, size, "node%u:%u", ep->peer->node->number,
                 ep == &ep->conn->end[0] ? ep->conn->server_port : ep->conn->client_port);
}

static void fail_all(struct list *ops, void (*fail)(struct io_op *op))
{
    struct list *entry;
    while ((entry = list_pop(ops)))
        fail(container_of(entry, struct io_op, link));
}

void net_crash(struct sim *s, struct sim_node *n, void (*fail)(struct io_op *op))
{
    list_for_each_safe (it, &s->listeners) {
        struct listener *l = container_of(it, struct listener, in_sim);
        if (l->node != n)
            continue;
        fail_all(&l->accepters, fail);
        close_listener(s, l);
    }
    list_for_each_safe (it, &s->conns) {
        struct conn *c = container_of(it, struct conn, in_sim);
        for (int i = 0; i < 2; i++) {
            struct endpoint *ep = &c->end[i];
            if (ep->node != n || ep->closed)
                continue;
            list_del(&ep->in_backlog);
            fail_all(&ep->receivers, fail);
            fail_all(&ep->senders, fail);
            if (!ep->reset && !ep->peer->closed)
                send_segment(s, ep, SEGMENT_RESET, NULL, 0);
            ep->closed = true;
            ep->in_bytes = 0;
        }
        conn_free_if_over(c);
    }
}

void net_destroy(struct sim *s)
{
    for (size_t i = 0; i < s->event_count; i++)
        if (s->heap[i].run == arrive)
            free(s->heap[i].arg);
    struct list *entry;
    while ((entry = list_pop(&s->listeners)))
        free(container_of(entry, struct listener, in_sim));
    while ((entry = list_pop(&s->conns))) {
        struct conn *c = container_of(entry, struct conn, in_sim);
        free(c->end[0].in);
        free(c->end[1].in);
        free(c);
    }
}
