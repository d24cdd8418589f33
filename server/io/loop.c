/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of the loop that all implementations share: arguments are checked, requests filled, timers kept,
 * and completions handed out here.
 */
#include "server/io/loop.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "server/io/impl.h"

void loop_base_init(struct loop *l, const struct loop_ops *ops)
{
    l->ops = ops;
    list_init(&l->timers);
    list_init(&l->ready);
    l->pending = 0;
}

void loop_ready(struct loop *l, struct io_op *op, int64_t result)
{
    op->result = result;
    io_req(op)->state = IO_READY;
    list_add_tail(&l->ready, &op->link);
}

void loop_run_ready(struct loop *l, unsigned budget)
{
    struct list *entry;
    while (budget-- && (entry = list_pop(&l->ready))) {
        struct io_op *op = container_of(entry, struct io_op, link);
        io_req(op)->state = IO_IDLE;
        l->pending--;
        op->done(op);
    }
}

void loop_fire_timers(struct loop *l, uint64_t now_ms, unsigned budget)
{
    while (budget-- && !list_empty(&l->timers)) {
        struct loop_timer *t = container_of(l->timers.next, struct loop_timer, link);
        if (t->at_ms > now_ms)
            return;
        loop_timer_clear(l, t);
        t->fire(t);
    }
}

uint64_t loop_next_timer(const struct loop *l)
{
    return list_empty(&l->timers) ? 0 : container_of(l->timers.next, struct loop_timer, link)->at_ms;
}

static struct io_req *begin(struct loop *l, struct io_op *op, enum io_code code)
{
    struct io_req *r = io_req(op);
    check(op->done);
    check(r->state == IO_IDLE); /* else it is pending already, or was never zeroed */
    *r = (struct io_req){.code = (uint8_t)code, .fd = -1};
    op->loop = l;
    op->result = 0;
    list_init(&op->link);
    return r;
}

static void submit(struct loop *l, struct io_op *op)
{
    l->pending++;
    l->ops->submit(l, op);
}

void loop_open(struct loop *l, struct io_op *op, const char *path, int flags, mode_t mode)
{
    struct io_req *r = begin(l, op, IO_OPEN);
    r->path = path;
    r->flags = flags;
    r->mode = mode;
    submit(l, op);
}

static void submit_transfer(struct loop *l, struct io_op *op, enum io_code code, int fd, void *p, size_t n,
                            uint64_t offset)
{
    struct io_req *r = begin(l, op, code);
    uint64_t end;
    check(fd >= 0 && (p || !n));
    check(!__builtin_add_overflow(offset, n, &end) && end <= INT64_MAX);
    r->fd = fd;
    r->p = p;
    r->n = n;
    r->offset = offset;
    submit(l, op);
}

void loop_read(struct loop *l, struct io_op *op, int fd, void *p, size_t n, uint64_t offset)
{
    submit_transfer(l, op, IO_READ, fd, p, n, offset);
}

void loop_advise(struct loop *l, struct io_op *op, int fd, uint64_t offset, uint64_t n,
                 enum loop_advice advice)
{
    struct io_req *r = begin(l, op, IO_ADVISE);
    check(fd >= 0 && n <= INT64_MAX && offset <= INT64_MAX - n);
    r->fd = fd;
    r->n = n;
    r->offset = offset;
    r->flags = advice == LOOP_FORGET ? POSIX_FADV_DONTNEED : POSIX_FADV_WILLNEED;
    submit(l, op);
}

void loop_write(struct loop *l, struct io_op *op, int fd, const void *p, size_t n, uint64_t offset)
{
    submit_transfer(l, op, IO_WRITE, fd, (void *)(uintptr_t)p, n, offset);
}

static void submit_fd(struct loop *l, struct io_op *op, enum io_code code, int fd, uint64_t n)
{
    struct io_req *r = begin(l, op, code);
    check(fd >= 0 && n <= INT64_MAX);
    r->fd = fd;
    r->offset = n;
    submit(l, op);
}

void loop_fdatasync(struct loop *l, struct io_op *op, int fd)
{
    submit_fd(l, op, IO_FDATASYNC, fd, 0);
}

void loop_fsync(struct loop *l, struct io_op *op, int fd)
{
    submit_fd(l, op, IO_FSYNC, fd, 0);
}

void loop_allocate(struct loop *l, struct io_op *op, int fd, uint64_t n)
{
    check(n > 0);
    submit_fd(l, op, IO_ALLOCATE, fd, n);
}

void loop_truncate(struct loop *l, struct io_op *op, int fd, uint64_t n)
{
    submit_fd(l, op, IO_TRUNCATE, fd, n);
}

void loop_close(struct loop *l, struct io_op *op, int fd)
{
    submit_fd(l, op, IO_CLOSE, fd, 0);
}

static void submit_path(struct loop *l, struct io_op *op, enum io_code code, const char *path, void *out)
{
    struct io_req *r = begin(l, op, code);
    check(path);
    r->path = path;
    r->out = out;
    submit(l, op);
}

void loop_link(struct loop *l, struct io_op *op, const char *from, const char *to)
{
    struct io_req *r = begin(l, op, IO_LINK);
    check(from && to);
    r->path = from;
    r->path2 = to;
    submit(l, op);
}

void loop_unlink(struct loop *l, struct io_op *op, const char *path)
{
    submit_path(l, op, IO_UNLINK, path, NULL);
}

void loop_rmdir(struct loop *l, struct io_op *op, const char *path)
{
    submit_path(l, op, IO_RMDIR, path, NULL);
}

void loop_mkdir(struct loop *l, struct io_op *op, const char *path, mode_t mode)
{
    struct io_req *r = begin(l, op, IO_MKDIR);
    check(path);
    r->path = path;
    r->mode = mode;
    submit(l, op);
}

void loop_stat(struct loop *l, struct io_op *op, const char *path, struct loop_stat *out)
{
    check(out);
    submit_path(l, op, IO_STAT, path, out);
}

void loop_list(struct loop *l, struct io_op *op, const char *path, struct loop_names *out)
{
    check(out);
    *out = (struct loop_names){0};
    submit_path(l, op, IO_LIST, path, out);
}

void loop_work(struct loop *l, struct io_op *op, struct loop_work *w)
{
    struct io_req *r = begin(l, op, IO_WORK);
    check(w->run);
    r->out = w;
    submit(l, op);
}

void loop_names_free(struct loop_names *names)
{
    for (size_t i = 0; i < names->count; i++)
        free(names->names[i]);
    free(names->names);
    *names = (struct loop_names){0};
}

int loop_space(struct loop *l, const char *path, uint64_t *free_bytes, uint64_t *total_bytes)
{
    return l->ops->space(l, path, free_bytes, total_bytes);
}

int loop_boot(struct loop *l, char out[LOOP_BOOT_BYTES])
{
    return l->ops->boot(l, out);
}

int loop_lock(struct loop *l, int fd)
{
    return l->ops->lock(l, fd);
}

int loop_listen(struct loop *l, const char *host, const char *port, bool shared, int *fd, char *bound,
                size_t bound_size, struct err *e)
{
    check(port && fd && (bound || !bound_size));
    *fd = -1;
    return l->ops->listen(l, host, port, shared, fd, bound, bound_size, e);
}

void loop_accept(struct loop *l, struct io_op *op, int fd)
{
    submit_fd(l, op, IO_ACCEPT, fd, 0);
}

void loop_connect(struct loop *l, struct io_op *op, const char *host, const char *port)
{
    struct io_req *r = begin(l, op, IO_CONNECT);
    check(host && port);
    r->path = host;
    r->path2 = port;
    submit(l, op);
}

void loop_recv(struct loop *l, struct io_op *op, int fd, void *p, size_t n)
{
    check(n > 0); /* 0 bytes received mean the end of the stream */
    submit_transfer(l, op, IO_RECV, fd, p, n, 0);
}

void loop_send(struct loop *l, struct io_op *op, int fd, const void *p, size_t n)
{
    submit_transfer(l, op, IO_SEND, fd, (void *)(uintptr_t)p, n, 0);
}

void loop_send_parts(struct loop *l, struct io_op *op, int fd, struct loop_parts *parts)
{
    struct io_req *r = begin(l, op, IO_SEND_PARTS);
    check(fd >= 0 && parts->count > 0 && parts->count <= LOOP_PARTS_MAX);
    parts->first = 0;
    for (unsigned i = 0; i < parts->count; i++)
        check(parts->part[i].iov_len > 0 && !__builtin_add_overflow(r->n, parts->part[i].iov_len, &r->n));
    r->fd = fd;
    r->out = parts;
    submit(l, op);
}

void loop_recv_least(struct loop *l, int fd, size_t n)
{
    l->ops->recv_least(l, fd, n);
}

void loop_shutdown(struct loop *l, int fd)
{
    l->ops->shutdown(l, fd);
}

void loop_peer(struct loop *l, int fd, char *out, size_t size)
{
    check(size > 0);
    l->ops->peer(l, fd, out, size);
}

void loop_release(struct loop *l, int fd)
{
    check(fd >= 0);
    l->ops->release(l, fd);
}

void loop_cancel(struct loop *l, struct io_op *op)
{
    struct io_req *r = io_req(op);
    if (r->state == IO_IDLE || r->state == IO_READY || r->cancelled)
        return;
    check(op->loop == l);
    r->cancelled = true;
    l->ops->cancel(l, op);
}

uint64_t loop_now_ms(struct loop *l)
{
    return l->ops->now_ms(l);
}

uint64_t loop_unix_ns(struct loop *l)
{
    return l->ops->unix_ns(l);
}

/* Deadlines are mostly set in rising order, so the search from the end is short. */
void loop_timer_set(struct loop *l, struct loop_timer *t, uint64_t at_ms)
{
    check(t->fire);
    loop_timer_clear(l, t);
    t->at_ms = at_ms ? at_ms : 1;
    struct list *after = l->timers.prev;
    while (after != &l->timers && container_of(after, struct loop_timer, link)->at_ms > t->at_ms)
        after = after->prev;
    list_add_head(after, &t->link);
}

void loop_timer_clear(struct loop *l, struct loop_timer *t)
{
    (void)l;
    if (t->at_ms)
        list_del(&t->link);
    t->at_ms = 0;
}

void loop_random(struct loop *l, void *p, size_t n)
{
    l->ops->random(l, p, n);
}

void loop_post(struct loop *to, struct loop_msg *m)
{
    check(m->run);
    m->next = NULL;
    to->ops->post(to, m);
}

int loop_run(struct loop *l, struct err *e)
{
    return l->ops->run(l, e);
}

void loop_stop(struct loop *l)
{
    l->ops->stop(l);
}

void loop_destroy(struct loop *l)
{
    if (l)
        l->ops->destroy(l);
}
