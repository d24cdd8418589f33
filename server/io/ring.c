/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loop on io_uring.
 *
 * Guarantees: the kernel never holds more of our operations than half its completion queue (the other half is
 * for cancels and the bell), so completions are never dropped; those over are held back in order. All
 * completions that are there are collected and marked seen before the first callback runs. The ring is made
 * disabled and enabled by the first loop_run, so that the thread which runs it is its single issuer,
 * whichever thread created it.
 */
#include "server/io/ring.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "server/io/host.h"
#include "server/io/pool.h"

#define ENTRIES_DEFAULT  256u
#define WORKERS_MAX      4u
#define USER_DATA_CANCEL 1u /* no operation has this address */
#define USER_DATA_BELL   2u

struct ring {
    struct host host;
    struct io_uring uring;
    bool enabled, bell_armed;
    bool native[IO_CODE_COUNT];  /* the kernel does it on the ring; else a helper thread does */
    struct list held;            /* wait for room, in order */
    struct list cancels;         /* in flight, and to be cancelled when there is room */
    unsigned flight, flight_max; /* operations with the kernel */
    unsigned owed;               /* completions to come, of any kind */
};

static const uint8_t opcodes[IO_CODE_COUNT] = {
    [IO_OPEN] = IORING_OP_OPENAT,     [IO_READ] = IORING_OP_READ,      [IO_WRITE] = IORING_OP_WRITE,
    [IO_FDATASYNC] = IORING_OP_FSYNC, [IO_FSYNC] = IORING_OP_FSYNC,    [IO_ALLOCATE] = IORING_OP_FALLOCATE,
    [IO_TRUNCATE] = IORING_OP_NOP,    [IO_CLOSE] = IORING_OP_CLOSE,    [IO_LINK] = IORING_OP_LINKAT,
    [IO_UNLINK] = IORING_OP_UNLINKAT, [IO_RMDIR] = IORING_OP_UNLINKAT, [IO_MKDIR] = IORING_OP_MKDIRAT,
    [IO_ADVISE] = IORING_OP_FADVISE,  [IO_STAT] = IORING_OP_STATX,     [IO_LIST] = IORING_OP_NOP,
    [IO_WORK] = IORING_OP_NOP,        [IO_ACCEPT] = IORING_OP_ACCEPT,  [IO_CONNECT] = IORING_OP_CONNECT,
    [IO_RECV] = IORING_OP_RECV,       [IO_SEND] = IORING_OP_SEND,      [IO_SEND_PARTS] = IORING_OP_SENDMSG,
};

static struct ring *ring_of(struct loop *l)
{
    return container_of(l, struct ring, host.loop);
}

/* A free submission entry, or NULL until the kernel takes some. */
static struct io_uring_sqe *next_entry(struct ring *r)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&r->uring);
    if (!sqe && io_uring_submit(&r->uring) > 0)
        sqe = io_uring_get_sqe(&r->uring);
    if (sqe)
        r->owed++;
    return sqe;
}

static void prepare_transfer(struct io_uring_sqe *sqe, struct io_req *q)
{
    size_t bytes, start = io_resume(q, &bytes);
    uint8_t *p = (uint8_t *)q->p + start;
    switch ((enum io_code)q->code) {
    case IO_READ: io_uring_prep_read(sqe, q->fd, p, (unsigned)bytes, q->offset + start); break;
    case IO_WRITE: io_uring_prep_write(sqe, q->fd, p, (unsigned)bytes, q->offset + start); break;
    case IO_RECV: io_uring_prep_recv(sqe, q->fd, p, bytes, 0); break;
    default: io_uring_prep_send(sqe, q->fd, p, bytes, MSG_NOSIGNAL); break;
    }
}

static void prepare(struct io_uring_sqe *sqe, struct io_req *q)
{
    switch ((enum io_code)q->code) {
    case IO_OPEN:
        io_uring_prep_openat(sqe, AT_FDCWD, q->path, q->flags | IO_OPEN_FLAGS, (mode_t)q->mode);
        break;
    case IO_FDATASYNC: io_uring_prep_fsync(sqe, q->fd, IORING_FSYNC_DATASYNC); break;
    case IO_FSYNC: io_uring_prep_fsync(sqe, q->fd, 0); break;
    case IO_ALLOCATE: io_uring_prep_fallocate(sqe, q->fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)q->offset); break;
    case IO_ADVISE: io_uring_prep_fadvise(sqe, q->fd, q->offset, (off_t)q->n, q->flags); break;
    case IO_CLOSE: io_uring_prep_close(sqe, q->fd); break;
    case IO_LINK: io_uring_prep_linkat(sqe, AT_FDCWD, q->path, AT_FDCWD, q->path2, 0); break;
    case IO_UNLINK: io_uring_prep_unlinkat(sqe, AT_FDCWD, q->path, 0); break;
    case IO_RMDIR: io_uring_prep_unlinkat(sqe, AT_FDCWD, q->path, AT_REMOVEDIR); break;
    case IO_MKDIR: io_uring_prep_mkdirat(sqe, AT_FDCWD, q->path, (mode_t)q->mode); break;
    case IO_STAT: io_uring_prep_statx(sqe, AT_FDCWD, q->path, 0, STATX_BASIC_STATS, q->aux); break;
    case IO_ACCEPT: io_uring_prep_accept(sqe, q->fd, NULL, NULL, SOCK_CLOEXEC); break;
    case IO_SEND_PARTS: io_uring_prep_sendmsg(sqe, q->fd, io_parts(q), MSG_NOSIGNAL); break;
    case IO_CONNECT:
        io_uring_prep_connect(sqe, q->fd, (struct sockaddr *)q->addr.bytes, q->addr.length);
        break;
    default: prepare_transfer(sqe, q); break;
    }
}

static void fill(struct ring *r)
{
    while (!list_empty(&r->held) && r->flight < r->flight_max) {
        struct io_uring_sqe *sqe = next_entry(r);
        if (!sqe)
            return;
        struct io_op *op = container_of(list_pop(&r->held), struct io_op, link);
        prepare(sqe, io_req(op));
        io_uring_sqe_set_data(sqe, op);
        io_req(op)->state = IO_FLIGHT;
        r->flight++;
    }
    while (!list_empty(&r->cancels) && r->owed < *r->uring.cq.kring_entries) {
        struct io_uring_sqe *sqe = next_entry(r);
        if (!sqe)
            return;
        struct io_op *op = container_of(list_pop(&r->cancels), struct io_op, link);
        io_uring_prep_cancel(sqe, op, 0);
        io_uring_sqe_set_data64(sqe, USER_DATA_CANCEL);
    }
    if (!r->bell_armed) {
        struct io_uring_sqe *sqe = next_entry(r);
        if (!sqe)
            return;
        io_uring_prep_poll_add(sqe, r->host.inbox.fd, POLLIN);
        io_uring_sqe_set_data64(sqe, USER_DATA_BELL);
        r->bell_armed = true;
    }
}

static void finish(struct ring *r, struct io_op *op)
{
    struct io_req *q = io_req(op);
    int64_t result = op->result;
    if (q->code == IO_OPEN) {
        result = io_opened(result, q->flags);
    } else if (q->code == IO_STAT) {
        if (result >= 0)
            io_stat_fill(q->out, q->aux);
        free(q->aux);
        q->aux = NULL;
    } else if (q->code == IO_ACCEPT && result >= 0) {
        host_tune((int)result);
    } else if (q->code == IO_CONNECT) {
        if (result == 0 || result == -EISCONN) {
            host_tune(q->fd);
            result = q->fd;
        } else {
            close(q->fd);
        }
    }
    loop_ready(&r->host.loop, op, result);
}

static void collect(struct ring *r)
{
    struct io_uring_cqe *cqe;
    unsigned head, count = 0;
    io_uring_for_each_cqe(&r->uring, head, cqe)
    {
        count++;
        if (cqe->user_data == USER_DATA_BELL)
            r->bell_armed = false;
        if (cqe->user_data == USER_DATA_BELL || cqe->user_data == USER_DATA_CANCEL)
            continue;
        struct io_op *op = io_uring_cqe_get_data(cqe);
        r->flight--;
        list_del(&op->link); /* from the cancels, if it was there */
        if (io_settle(op, cqe->res)) {
            finish(r, op);
        } else {
            io_req(op)->state = IO_HELD;
            list_add_head(&r->held, &op->link);
        }
    }
    r->owed -= count;
    io_uring_cq_advance(&r->uring, count);
}

/* Submits what is queued and waits. A negative errno here means that the ring itself is broken. */
static int enter(struct ring *r, int64_t wait_ms)
{
    struct __kernel_timespec t = {.tv_sec = wait_ms / 1000, .tv_nsec = wait_ms % 1000 * 1000000};
    struct io_uring_cqe *cqe;
    int status;
    if (wait_ms == 0)
        status = io_uring_submit_and_get_events(&r->uring);
    else
        status = io_uring_submit_and_wait_timeout(&r->uring, &cqe, 1, wait_ms < 0 ? NULL : &t, NULL);
    switch (status) {
    case -ETIME:
    case -EINTR:
    case -EAGAIN: /* no memory for a request just now, or completions to be collected first */
    case -EBUSY: return 0;
    default: return status < 0 ? status : 0;
    }
}

static int ring_enable(struct ring *r, struct err *e)
{
    if (r->enabled)
        return 0;
    /* liburing declares io_uring_enable_rings and, in Debian 12, does not export it. */
    if (syscall(__NR_io_uring_register, r->uring.ring_fd, IORING_REGISTER_ENABLE_RINGS, NULL, 0) < 0)
        return err_sys(e, errno, "enabling io_uring");
    r->enabled = true;
    return 0;
}

static int ring_run(struct loop *l, struct err *e)
{
    struct ring *r = ring_of(l);
    int status = ring_enable(r, e);
    check(!r->host.running);
    r->host.running = status == 0;
    while (status == 0) {
        host_gather(&r->host);
        if (host_done(&r->host))
            break;
        fill(r);
        status = enter(r, host_wait_ms(&r->host));
        if (status) {
            err_sys(e, -status, "io_uring refused to go on");
            break;
        }
        collect(r);
        host_turn(&r->host);
    }
    r->host.running = false;
    return status;
}

static void ring_submit(struct loop *l, struct io_op *op)
{
    struct ring *r = ring_of(l);
    struct io_req *q = io_req(op);
    if (!r->native[q->code]) {
        workers_submit(r->host.workers, op);
        return;
    }
    int status = q->code == IO_CONNECT ? host_address(q, 0) : 0;
    if (q->code == IO_STAT && !(q->aux = malloc(sizeof(struct statx))))
        status = -ENOMEM;
    if (status) {
        loop_ready(l, op, status);
        return;
    }
    q->state = IO_HELD;
    list_add_tail(&r->held, &op->link);
}

static void ring_cancel(struct loop *l, struct io_op *op)
{
    struct ring *r = ring_of(l);
    struct io_req *q = io_req(op);
    if (q->state == IO_HELD) {
        list_del(&op->link);
        op->result = -ECANCELED;
        finish(r, op);
    } else if (q->state == IO_WORKER) {
        if (workers_take_back(r->host.workers, op))
            loop_ready(l, op, -ECANCELED);
    } else {
        list_add_tail(&r->cancels, &op->link);
    }
}

/* The ring keeps nothing of a descriptor between operations. */
static void ring_release(struct loop *l, int fd)
{
    (void)l, (void)fd;
}

static void ring_destroy(struct loop *l)
{
    struct ring *r = ring_of(l);
    check(!r->host.running);
    io_uring_queue_exit(&r->uring);
    host_fini(&r->host);
    free(r);
}

static const struct loop_ops ring_ops = {
    .name = "ring",
    .submit = ring_submit,
    .cancel = ring_cancel,
    .space = host_space,
    .boot = host_boot,
    .lock = host_lock,
    .listen = host_listen,
    .recv_least = host_recv_least,
    .shutdown = host_shutdown,
    .peer = host_peer,
    .release = ring_release,
    .now_ms = host_now_ms,
    .unix_ns = host_unix_ns,
    .random = host_random,
    .post = host_post,
    .run = ring_run,
    .stop = host_stop,
    .destroy = ring_destroy,
};

static int refused(struct err *e, int errnum)
{
    FILE *f = fopen("/proc/sys/kernel/io_uring_disabled", "re");
    int disabled = 0;
    if (f) {
        if (fscanf(f, "%d", &disabled) != 1)
            disabled = 0;
        fclose(f);
    }
    const char *advice = "write `io = pool` into the configuration to work without it";
    if (disabled && (errnum == EPERM || errnum == EACCES))
        err_set(e, ERR_UNSUPPORTED,
                "io_uring is needed and is switched off here (sysctl kernel.io_uring_disabled = %d); set it "
                "to 0, "
                "or %s",
                disabled, advice);
    else if (errnum == EPERM || errnum == EACCES)
        err_set(e, ERR_UNSUPPORTED,
                "io_uring is needed and is refused (%s), as containers do by a seccomp profile; allow "
                "io_uring_setup, io_uring_enter and io_uring_register in it, or %s",
                strerror(errnum), advice);
    else if (errnum == ENOSYS)
        err_set(e, ERR_UNSUPPORTED,
                "io_uring is needed and this kernel has none, or a container's seccomp profile hides it; "
                "Linux 5.11 "
                "or newer has it; else %s",
                advice);
    else if (errnum == ENOMEM)
        err_set(
            e, ERR_NO_MEMORY,
            "io_uring could not be set up: no memory; before Linux 5.12 it counts as locked memory: raise "
            "`ulimit -l`, or %s",
            advice);
    else
        err_sys(e, errnum, "io_uring could not be set up; %s", advice);
    return e && e->errnum > 0 ? -e->errnum : -ENOTSUP;
}

/* From the best set of flags to none: what a kernel does not know, it refuses with EINVAL. */
static int setup(unsigned entries, struct io_uring *u)
{
    static const unsigned flags[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN,
        IORING_SETUP_COOP_TASKRUN,
        0,
    };
    int status = -EINVAL;
    for (size_t i = 0; i < sizeof flags / sizeof flags[0] && status == -EINVAL; i++) {
        struct io_uring_params p = {
            .flags = flags[i] | IORING_SETUP_CLAMP | IORING_SETUP_CQSIZE | IORING_SETUP_R_DISABLED,
            .cq_entries = entries * 2 * RING_FLIGHT_PER_ENTRY,
        };
        status = io_uring_queue_init_params(entries, u, &p);
    }
    return status;
}

/* Which operations the kernel does; sockets it must do. */
static int learn(struct io_uring *u, bool native[IO_CODE_COUNT], struct err *e)
{
    if (!(u->features & IORING_FEAT_EXT_ARG) || !(u->features & IORING_FEAT_NODROP))
        return err_set(
            e, ERR_UNSUPPORTED,
            "io_uring of Linux 5.11 or newer is needed, this kernel's is older; update it, or write "
            "`io = pool` into the configuration to work without it");
    struct io_uring_probe *probe = io_uring_get_probe_ring(u);
    if (!probe)
        return err_set(
            e, ERR_UNSUPPORTED,
            "io_uring cannot be asked what it does; update the kernel, or write `io = pool` into the "
            "configuration to work without it");
    int status = 0;
    for (int code = 0; code < IO_CODE_COUNT; code++) {
        native[code] = opcodes[code] != IORING_OP_NOP && io_uring_opcode_supported(probe, opcodes[code]);
        if (!native[code] && io_is_socket((enum io_code)code) && status == 0)
            status = err_set(e, ERR_UNSUPPORTED,
                             "io_uring here lacks `%s`; update the kernel, or write `io = pool` into the "
                             "configuration to work without it",
                             io_code_name((enum io_code)code));
    }
    io_uring_free_probe(probe);
    return status;
}

int ring_create(const struct ring_options *o, struct loop **out, struct err *e)
{
    static const struct ring_options none;
    *out = NULL;
    if (!o)
        o = &none;
    if (o->worker_pool)
        return pool_loop_create(out, e);
    struct ring *r = calloc(1, sizeof *r);
    if (!r)
        return err_set(e, ERR_NO_MEMORY, "no memory for a loop");
    struct err local = {.class = ERR_NONE};
    e = e ? e : &local;
    int status = setup(o->entries ? o->entries : ENTRIES_DEFAULT, &r->uring);
    if (status) {
        free(r);
        return refused(e, -status);
    }
    list_init(&r->held);
    list_init(&r->cancels);
    r->flight_max = *r->uring.cq.kring_entries / 2; /* clamped to 32,768 by the kernel */
    status = learn(&r->uring, r->native, e);
    if (status == 0)
        status = host_init(&r->host, &ring_ops, WORKERS_MAX, e);
    if (status) {
        io_uring_queue_exit(&r->uring);
        free(r);
        return status;
    }
    *out = &r->host.loop;
    return 0;
}

int ring_probe(char *text, size_t size, struct err *e)
{
    struct io_uring u;
    struct utsname name;
    struct err local = {.class = ERR_NONE};
    e = e ? e : &local;
    int status = setup(8, &u);
    if (status)
        return refused(e, -status);
    bool native[IO_CODE_COUNT];
    status = learn(&u, native, e);
    unsigned flags = u.flags;
    io_uring_queue_exit(&u);
    if (status)
        return status;
    if (uname(&name))
        snprintf(name.release, sizeof name.release, "unknown");
    int used = snprintf(text, size, "io_uring: kernel %s%s%s%s", name.release,
                        flags & IORING_SETUP_SINGLE_ISSUER ? ", single issuer" : "",
                        flags & IORING_SETUP_DEFER_TASKRUN ? ", deferred task work" : "",
                        flags & IORING_SETUP_COOP_TASKRUN ? ", cooperative task work" : "");
    const char *lead = "; on helper threads: ";
    for (int code = 0; code < IO_CODE_COUNT && used >= 0 && (size_t)used < size; code++) {
        if (native[code])
            continue;
        used += snprintf(text + used, size - (size_t)used, "%s%s", lead, io_code_name((enum io_code)code));
        lead = ", ";
    }
    return 0;
}
