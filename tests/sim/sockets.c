/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Processes: sockets and eventfds. A socket does not wait: bytes to be sent are taken one send at a time and
 * travel behind it, and one receive is always under way once what it brought was read. It goes on existing
 * after close until what was sent has left.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "tests/sim/process.h"

#define NUMBER_FIRST (1 << 20) /* above all real descriptors */
#define OUT_BYTES    (32u << 10)

struct handle {
    struct list link; /* of the process; empty once it is closed */
    struct list in_all;
    struct process *p; /* NULL: closed */
    struct world *w;
    int number;
    bool event;
    uint64_t count; /* of an eventfd */
    /* Of a socket. */
    int fd, error;
    struct io_op connect, recv, send, close;
    bool connecting, receiving, sending, closing, connected, ended;
    char port[8];
    struct tap *tap;
    size_t in_at, in_n, out_n;
    uint8_t in[8192], out[OUT_BYTES];
};

static struct list all = {&all, &all};
static int next_number = NUMBER_FIRST;

static struct handle *handle_of(int number)
{
    list_for_each (it, &all) {
        struct handle *h = container_of(it, struct handle, in_all);
        if (h->number == number && h->p)
            return h;
    }
    check(number < NUMBER_FIRST); /* used after close */
    return NULL;
}

static struct handle *handle_new(struct process *p, bool event)
{
    struct handle *h = calloc(1, sizeof *h);
    check(h);
    h->p = p;
    h->w = p->w;
    h->number = next_number++;
    h->event = event;
    h->fd = -1;
    h->tap = event ? NULL : tap_new(p->w, actor_now()->role);
    p->w->lines++;
    list_add_tail(&p->handles, &h->link);
    list_add_tail(&all, &h->in_all);
    return h;
}

/* ---- the life of a socket ---- */

static void settle(struct handle *h);

static void fail_with(struct handle *h, int error)
{
    h->error = h->error ? h->error : error;
    h->in_n = 0;
    if (h->fd >= 0)
        loop_shutdown(h->w->clients, h->fd);
    wake_all(h);
}

static void closed(struct io_op *op)
{
    struct handle *h = container_of(op, struct handle, close);
    h->fd = -1;
    h->closing = false;
    settle(h);
}

/* Of a socket that its process has closed: frees it when nothing is under way any more. */
static void settle(struct handle *h)
{
    if (h->p)
        return;
    if (!h->sending && h->fd >= 0)
        loop_shutdown(h->w->clients, h->fd);
    if (h->connecting || h->receiving || h->sending || h->closing)
        return;
    if (h->fd >= 0) {
        h->closing = true;
        h->close.done = closed;
        loop_close(h->w->clients, &h->close, h->fd);
        return;
    }
    h->w->lines--;
    list_del(&h->in_all);
    tap_free(h->tap);
    free(h);
}

static void receive(struct handle *h);

/* The answer is lost on its way, with the connection. */
static bool is_lost(struct handle *h)
{
    uint32_t chance = h->w->faulty ? h->w->plan.knob[KNOB_LOST_REPLY] : 0;
    if (!chance || !h->p || process_below(h->p, 1000000) >= chance)
        return false;
    h->w->tally.lost_replies++;
    return true;
}

static void received(struct io_op *op)
{
    struct handle *h = container_of(op, struct handle, recv);
    h->receiving = false;
    if (op->result < 0 || is_lost(h)) {
        fail_with(h, ECONNRESET);
    } else if (op->result == 0) {
        h->ended = true;
    } else if (!h->error) {
        h->in_at = 0;
        h->in_n = (size_t)op->result;
    }
    wake_all(h);
    settle(h);
}

static void receive(struct handle *h)
{
    if (h->receiving || h->in_n || h->ended || h->error || h->fd < 0)
        return;
    h->receiving = true;
    h->recv.done = received;
    loop_recv(h->w->clients, &h->recv, h->fd, h->in, sizeof h->in);
}

static void sent(struct io_op *op)
{
    struct handle *h = container_of(op, struct handle, send);
    h->sending = false;
    if (op->result < 0)
        fail_with(h, ECONNRESET);
    wake_all(h);
    settle(h);
}

static void connected(struct io_op *op)
{
    struct handle *h = container_of(op, struct handle, connect);
    h->connecting = false;
    if (op->result < 0) {
        h->error = (int)-op->result;
    } else {
        h->fd = (int)op->result;
        h->connected = true;
        if (h->error)
            loop_shutdown(h->w->clients, h->fd);
        else if (h->p)
            receive(h);
    }
    wake_all(h);
    settle(h);
}

void handles_cut(struct process *p)
{
    list_for_each (it, &p->handles) {
        struct handle *h = container_of(it, struct handle, link);
        if (!h->event)
            fail_with(h, ECONNRESET);
    }
}

/* ---- addresses: "nodeN" is 10.0.0.N ---- */

int simulated_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                          struct addrinfo **out);
int simulated_getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                          struct addrinfo **out)
{
    struct {
        struct addrinfo info;
        struct sockaddr_in address;
    } * x;
    (void)hints;
    check(strncmp(host, "node", 4) == 0 && (x = calloc(1, sizeof *x)));
    x->address = (struct sockaddr_in){.sin_family = AF_INET,
                                      .sin_port = htons((uint16_t)atoi(port)),
                                      .sin_addr.s_addr = htonl(0x0a000000u + (uint32_t)atoi(host + 4))};
    x->info = (struct addrinfo){.ai_family = AF_INET,
                                .ai_socktype = SOCK_STREAM,
                                .ai_addr = (struct sockaddr *)&x->address,
                                .ai_addrlen = sizeof x->address};
    *out = &x->info;
    return 0;
}

void simulated_freeaddrinfo(struct addrinfo *list);
void simulated_freeaddrinfo(struct addrinfo *list)
{
    free(list);
}

/* ---- calls on sockets ---- */

static int refuse(int error)
{
    errno = error;
    return -1;
}

int simulated_socket(int family, int type, int protocol);
int simulated_socket(int family, int type, int protocol)
{
    (void)family, (void)type, (void)protocol;
    return handle_new(process_now(), false)->number;
}

int simulated_connect(int number, const struct sockaddr *address, socklen_t n);
int simulated_connect(int number, const struct sockaddr *address, socklen_t n)
{
    struct handle *h = handle_of(number);
    const struct sockaddr_in *to = (const struct sockaddr_in *)address;
    check(h && !h->event && n == sizeof *to);
    process_yield();
    if (h->p->dead)
        return refuse(ENETDOWN);
    snprintf(h->port, sizeof h->port, "%u", ntohs(to->sin_port));
    h->connecting = true;
    h->connect.done = connected;
    loop_connect(h->w->clients, &h->connect, "node0", h->port);
    return refuse(EINPROGRESS);
}

int simulated_setsockopt(int number, int level, int name, const void *value, socklen_t n);
int simulated_setsockopt(int number, int level, int name, const void *value, socklen_t n)
{
    (void)level, (void)name, (void)value, (void)n;
    check(handle_of(number));
    return 0;
}

int simulated_getsockopt(int number, int level, int name, void *value, socklen_t *n);
int simulated_getsockopt(int number, int level, int name, void *value, socklen_t *n)
{
    check(level == SOL_SOCKET && name == SO_ERROR && *n == sizeof(int));
    *(int *)value = handle_of(number)->error;
    return 0;
}

ssize_t simulated_send(int number, const void *p, size_t n, int flags);
ssize_t simulated_send(int number, const void *p, size_t n, int flags)
{
    (void)flags;
    struct handle *h = handle_of(number);
    check(h && !h->event);
    process_yield();
    if (h->error)
        return refuse(h->error);
    if (h->sending || !h->connected)
        return refuse(EAGAIN);
    n = n < OUT_BYTES ? n : OUT_BYTES;
    if (n > 1 && process_below(h->p, 8) == 0)
        n = 1 + process_below(h->p, (uint32_t)n - 1);
    memcpy(h->out, p, n);
    tap_sent(h->tap, h->out, n);
    h->sending = true;
    h->send.done = sent;
    loop_send(h->w->clients, &h->send, h->fd, h->out, n);
    return (ssize_t)n;
}

ssize_t simulated_recvmsg(int number, struct msghdr *m, int flags);
ssize_t simulated_recvmsg(int number, struct msghdr *m, int flags)
{
    (void)flags;
    struct handle *h = handle_of(number);
    size_t got = 0;
    check(h && !h->event);
    process_yield();
    if (h->error)
        return refuse(h->error);
    for (size_t i = 0; i < m->msg_iovlen && h->in_n > 0; i++) {
        struct iovec *v = &m->msg_iov[i];
        size_t n = v->iov_len < h->in_n ? v->iov_len : h->in_n;
        memcpy(v->iov_base, h->in + h->in_at, n);
        tap_received(h->tap, h->in + h->in_at, n);
        h->in_at += n;
        h->in_n -= n;
        got += n;
    }
    receive(h);
    return got || h->ended ? (ssize_t)got : refuse(EAGAIN);
}

int simulated_shutdown(int number, int how);
int simulated_shutdown(int number, int how)
{
    struct handle *h = handle_of(number);
    (void)how;
    check(h && !h->event);
    fail_with(h, ECONNRESET);
    return 0;
}

/* ---- descriptors of both kinds ---- */

int simulated_eventfd(unsigned count, int flags);
int simulated_eventfd(unsigned count, int flags)
{
    (void)flags;
    check(count == 0);
    return handle_new(process_now(), true)->number;
}

int simulated_close(int number);
int simulated_close(int number)
{
    struct handle *h = handle_of(number);
    if (!h)
        return close(number);
    process_yield();
    list_del(&h->link);
    h->p = NULL;
    settle(h);
    return 0;
}

ssize_t simulated_read(int number, void *p, size_t n);
ssize_t simulated_read(int number, void *p, size_t n)
{
    struct handle *h = handle_of(number);
    if (!h)
        return read(number, p, n);
    check(h->event && n == sizeof h->count);
    if (!h->count)
        return refuse(EAGAIN);
    memcpy(p, &h->count, n);
    h->count = 0;
    return (ssize_t)n;
}

ssize_t simulated_write(int number, const void *p, size_t n);
ssize_t simulated_write(int number, const void *p, size_t n)
{
    struct handle *h = handle_of(number);
    (void)p;
    check(h && h->event && n == sizeof h->count);
    h->count++;
    wake_all(h);
    process_yield();
    return (ssize_t)n;
}

static short ready(const struct handle *h)
{
    if (h->event)
        return h->count ? POLLIN : 0;
    short events = 0;
    if (h->in_n || h->ended)
        events |= POLLIN;
    if (h->connected && !h->sending)
        events |= POLLOUT;
    return h->error ? POLLIN | POLLOUT | POLLERR | POLLHUP : events;
}

static int look(struct pollfd *fds, nfds_t n)
{
    int found = 0;
    for (nfds_t i = 0; i < n; i++) {
        struct handle *h = handle_of(fds[i].fd);
        check(h);
        fds[i].revents = (short)(ready(h) & (fds[i].events | POLLERR | POLLHUP));
        found += fds[i].revents != 0;
    }
    return found;
}

int simulated_poll(struct pollfd *fds, nfds_t n, int timeout_ms);
int simulated_poll(struct pollfd *fds, nfds_t n, int timeout_ms)
{
    struct process *p = process_now();
    check(p && timeout_ms >= 0 && n <= 2);
    process_yield();
    uint64_t until_ns = process_clock_ns(p) + (uint64_t)timeout_ms * 1000000u;
    for (;;) {
        int found = look(fds, n);
        if (found || timeout_ms == 0 || process_clock_ns(p) >= until_ns)
            return found;
        if (process_below(p, 50) == 0)
            return refuse(EINTR);
        const void *on[2] = {handle_of(fds[0].fd), n > 1 ? handle_of(fds[1].fd) : NULL};
        (void)wait_on_either(on[0], on[1], until_ns);
    }
}
