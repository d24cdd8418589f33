/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sockets: an attempt is made at once; what would block waits in its descriptor's list, in order, and epoll
 * (one shot, armed anew while somebody waits) says when to try again. Files: helper threads.
 */
#include "server/io/pool.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "server/io/host.h"

#define WORKERS_MAX 16u
#define EVENTS_MAX  128

struct slot {
    int fd;
    bool known; /* to epoll */
    struct list readers, writers;
};

struct pool {
    struct host host;
    int epoll;
    struct slot **slots; /* by descriptor */
    size_t slot_count;
};

static struct pool *pool_of(struct loop *l)
{
    return container_of(l, struct pool, host.loop);
}

static struct slot *slot_get(struct pool *p, int fd)
{
    if ((size_t)fd >= p->slot_count) {
        size_t count = (size_t)fd + 64;
        struct slot **grown = reallocarray(p->slots, count, sizeof *grown);
        if (!grown)
            return NULL;
        memset(grown + p->slot_count, 0, (count - p->slot_count) * sizeof *grown);
        p->slots = grown;
        p->slot_count = count;
    }
    if (!p->slots[fd]) {
        struct slot *s = p->slots[fd] = calloc(1, sizeof *s);
        if (!s)
            return NULL;
        s->fd = fd;
        list_init(&s->readers);
        list_init(&s->writers);
    }
    return p->slots[fd];
}

static void slot_drop(struct pool *p, int fd)
{
    struct slot *s = (size_t)fd < p->slot_count ? p->slots[fd] : NULL;
    if (!s)
        return;
    check(list_empty(&s->readers) && list_empty(&s->writers)); /* closed while in use */
    if (s->known)
        (void)epoll_ctl(p->epoll, EPOLL_CTL_DEL, fd, NULL);
    free(s);
    p->slots[fd] = NULL;
}

static int slot_arm(struct pool *p, struct slot *s)
{
    struct epoll_event ev = {.events = EPOLLONESHOT, .data.fd = s->fd};
    if (!list_empty(&s->readers))
        ev.events |= EPOLLIN | EPOLLRDHUP;
    if (!list_empty(&s->writers))
        ev.events |= EPOLLOUT;
    if (ev.events == EPOLLONESHOT)
        return 0;
    if (epoll_ctl(p->epoll, s->known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, s->fd, &ev))
        return -errno;
    s->known = true;
    return 0;
}

static int64_t try_connect(struct io_req *q)
{
    int problem = 0;
    socklen_t n = sizeof problem;
    if (!q->started) {
        q->started = true;
        if (connect(q->fd, (struct sockaddr *)q->addr.bytes, q->addr.length) == 0)
            return 0;
        return errno == EINPROGRESS || errno == EINTR ? -EAGAIN : -errno;
    }
    if (getsockopt(q->fd, SOL_SOCKET, SO_ERROR, &problem, &n))
        return -errno;
    return -problem;
}

static int64_t try_once(struct io_req *q)
{
    size_t bytes, start = io_resume(q, &bytes);
    uint8_t *p = (uint8_t *)q->p + start;
    ssize_t got;
    switch ((enum io_code)q->code) {
    case IO_ACCEPT: got = accept4(q->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK); break;
    case IO_RECV: got = recv(q->fd, p, bytes, MSG_DONTWAIT); break;
    case IO_SEND: got = send(q->fd, p, bytes, MSG_DONTWAIT | MSG_NOSIGNAL); break;
    case IO_SEND_PARTS: got = sendmsg(q->fd, io_parts(q), MSG_DONTWAIT | MSG_NOSIGNAL); break;
    default: return try_connect(q);
    }
    return got < 0 ? -errno : got;
}

static void finish(struct pool *p, struct io_op *op)
{
    struct io_req *q = io_req(op);
    int64_t result = op->result;
    if (q->code == IO_ACCEPT && result >= 0) {
        host_tune((int)result);
    } else if (q->code == IO_CONNECT && result == 0) {
        host_tune(q->fd);
        result = q->fd;
    } else if (q->code == IO_CONNECT) {
        slot_drop(p, q->fd);
        close(q->fd);
    }
    loop_ready(&p->host.loop, op, result);
}

/* True: the operation is over, op->result says how. False: it must wait. */
static bool try_socket(struct io_op *op)
{
    for (;;) {
        int64_t result = try_once(io_req(op));
        if (result == -EAGAIN)
            return false;
        if (io_settle(op, result))
            return true;
    }
}

static struct list *waiters(struct slot *s, enum io_code code)
{
    return code == IO_ACCEPT || code == IO_RECV ? &s->readers : &s->writers;
}

static void fail(struct pool *p, struct io_op *op, int status)
{
    op->result = status;
    finish(p, op);
}

static void submit_socket(struct pool *p, struct io_op *op)
{
    struct io_req *q = io_req(op);
    int status = q->code == IO_CONNECT ? host_address(q, SOCK_NONBLOCK) : 0;
    if (status) {
        loop_ready(&p->host.loop, op, status);
        return;
    }
    struct slot *s = slot_get(p, q->fd);
    if (!s) {
        fail(p, op, -ENOMEM);
        return;
    }
    struct list *queue = waiters(s, q->code);
    q->state = IO_HELD;
    if (list_empty(queue) && try_socket(op)) {
        finish(p, op);
        return;
    }
    list_add_tail(queue, &op->link);
    status = slot_arm(p, s);
    if (status) {
        list_del(&op->link);
        fail(p, op, status);
    }
}

static void retry(struct pool *p, struct list *queue)
{
    while (!list_empty(queue)) {
        struct io_op *op = container_of(queue->next, struct io_op, link);
        if (!try_socket(op))
            return;
        list_del(&op->link);
        if (io_req(op)->code == IO_CONNECT && op->result < 0) {
            finish(p, op); /* the slot is gone with the descriptor */
            return;
        }
        finish(p, op);
    }
}

static void on_event(struct pool *p, int fd)
{
    retry(p, &p->slots[fd]->readers);
    retry(p, &p->slots[fd]->writers);
    struct slot *s = p->slots[fd];
    int status = s ? slot_arm(p, s) : 0;
    while (status && (!list_empty(&s->readers) || !list_empty(&s->writers))) {
        struct list *entry = list_pop(list_empty(&s->readers) ? &s->writers : &s->readers);
        fail(p, container_of(entry, struct io_op, link), status);
    }
}

static int wait_events(struct pool *p, int64_t wait_ms)
{
    struct epoll_event events[EVENTS_MAX];
    int n = epoll_wait(p->epoll, events, EVENTS_MAX, (int)wait_ms);
    if (n < 0)
        return errno == EINTR ? 0 : -errno;
    for (int i = 0; i < n; i++) {
        int fd = events[i].data.fd;
        if (fd != p->host.inbox.fd && (size_t)fd < p->slot_count && p->slots[fd])
            on_event(p, fd);
    }
    return 0;
}

static int pool_run(struct loop *l, struct err *e)
{
    struct pool *p = pool_of(l);
    int status = 0;
    check(!p->host.running);
    p->host.running = true;
    for (;;) {
        host_gather(&p->host);
        if (host_done(&p->host))
            break;
        status = wait_events(p, host_wait_ms(&p->host));
        if (status) {
            err_sys(e, -status, "epoll refused to go on");
            break;
        }
        host_turn(&p->host);
    }
    p->host.running = false;
    return status;
}

static void pool_submit(struct loop *l, struct io_op *op)
{
    struct pool *p = pool_of(l);
    struct io_req *q = io_req(op);
    if (io_is_socket(q->code)) {
        submit_socket(p, op);
        return;
    }
    if (q->code == IO_CLOSE)
        slot_drop(p, q->fd);
    workers_submit(p->host.workers, op);
}

static void pool_cancel(struct loop *l, struct io_op *op)
{
    struct pool *p = pool_of(l);
    struct io_req *q = io_req(op);
    if (q->state == IO_HELD) {
        list_del(&op->link);
        fail(p, op, -ECANCELED);
    } else if (q->state == IO_WORKER && workers_take_back(p->host.workers, op)) {
        loop_ready(l, op, -ECANCELED);
    }
}

static void pool_release(struct loop *l, int fd)
{
    slot_drop(pool_of(l), fd);
}

static int not_blocking(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? -errno : 0;
}

static int pool_listen(struct loop *l, const char *host, const char *port, bool shared, int *fd, char *bound,
                       size_t bound_size, struct err *e)
{
    int status = host_listen(l, host, port, shared, fd, bound, bound_size, e);
    if (status)
        return status;
    status = not_blocking(*fd);
    if (status) {
        close(*fd);
        *fd = -1;
        return err_sys(e, -status, "listening on port %s", port);
    }
    return 0;
}

static void pool_destroy(struct loop *l)
{
    struct pool *p = pool_of(l);
    check(!p->host.running);
    host_fini(&p->host);
    for (size_t i = 0; i < p->slot_count; i++)
        free(p->slots[i]);
    free(p->slots);
    close(p->epoll);
    free(p);
}

static const struct loop_ops pool_ops = {
    .name = "pool",
    .submit = pool_submit,
    .cancel = pool_cancel,
    .space = host_space,
    .boot = host_boot,
    .lock = host_lock,
    .listen = pool_listen,
    .recv_least = host_recv_least,
    .shutdown = host_shutdown,
    .peer = host_peer,
    .release = pool_release,
    .now_ms = host_now_ms,
    .unix_ns = host_unix_ns,
    .random = host_random,
    .post = host_post,
    .run = pool_run,
    .stop = host_stop,
    .destroy = pool_destroy,
};

int pool_loop_create(struct loop **out, struct err *e)
{
    struct pool *p = calloc(1, sizeof *p);
    *out = NULL;
    if (!p)
        return err_set(e, ERR_NO_MEMORY, "no memory for a loop");
    p->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (p->epoll < 0) {
        int status = -errno;
        free(p);
        return err_sys(e, -status, "a loop needs an epoll descriptor");
    }
    int status = host_init(&p->host, &pool_ops, WORKERS_MAX, e);
    if (status == 0) {
        struct epoll_event ev = {.events = EPOLLIN, .data.fd = p->host.inbox.fd};
        if (epoll_ctl(p->epoll, EPOLL_CTL_ADD, p->host.inbox.fd, &ev)) {
            status = err_sys(e, errno, "watching a loop's eventfd");
            host_fini(&p->host);
        }
    }
    if (status) {
        close(p->epoll);
        free(p);
        return status;
    }
    *out = &p->host.loop;
    return 0;
}
