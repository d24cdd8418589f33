/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The world: time jumps from event to event, in the order of (time, serial). An operation's effect takes
 * place in one event, some time after it was submitted and in any order with others; its completion is handed
 * out in a later turn of its loop.
 */
#include "server/io/sim.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/limits.h"
#include "server/io/sim_impl.h"

#define DISK_BYTES_DEFAULT (1ull << 40)
#define UNIX_NS_AT_START   1750000000000000000ull
#define START_US           1000000u
#define FD_FIRST           1000

/* splitmix64 (Steele, Lea, Flood 2014). */
static uint64_t draw(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t sim_below(struct sim *s, uint64_t n)
{
    return n ? draw(&s->random) % n : 0;
}

bool sim_strikes(struct sim *s, const uint32_t *fault)
{
    if (!*fault || sim_below(s, 1000000) >= *fault)
        return false;
    size_t which = (size_t)(fault - (const uint32_t *)&s->options.faults);
    ((uint32_t *)&s->struck)[which]++;
    return true;
}

const struct sim_faults *sim_struck(const struct sim *s)
{
    return &s->struck;
}

uint64_t sim_stall_us(struct sim *s)
{
    return sim_below(s, (uint64_t)s->options.faults.stall_ms_max * 1000);
}

uint64_t sim_unix_ns(const struct sim *s)
{
    return UNIX_NS_AT_START + s->now_us * 1000 + (uint64_t)s->clock_ns;
}

void sim_step_clock(struct sim *s, int64_t ns)
{
    sim_trace(s, "the clock is set by %lld ns", (long long)ns);
    s->clock_ns += ns;
}

void *sim_alloc(size_t n)
{
    void *p = calloc(1, n ? n : 1);
    check(p);
    return p;
}

void sim_trace(struct sim *s, const char *fmt, ...)
{
    if (!s->options.trace)
        return;
    char line[512];
    int used = snprintf(line, sizeof line, "%llu us ", (unsigned long long)s->now_us);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line + used, sizeof line - (size_t)used, fmt, ap);
    va_end(ap);
    s->options.trace(s->options.trace_arg, line);
}

/* Events: a binary heap. */

static bool before(const struct sim_event *a, const struct sim_event *b)
{
    return a->at_us != b->at_us ? a->at_us < b->at_us : a->serial < b->serial;
}

void sim_at(struct sim *s, uint64_t delay_us, void (*run)(struct sim *s, void *arg), void *arg)
{
    if (s->event_count == s->event_room) {
        s->event_room = s->event_room ? s->event_room * 2 : 256;
        s->heap = reallocarray(s->heap, s->event_room, sizeof *s->heap);
        check(s->heap);
    }
    struct sim_event e = {.at_us = s->now_us + delay_us, .serial = s->serial++, .run = run, .arg = arg};
    size_t i = s->event_count++;
    for (; i > 0 && before(&e, &s->heap[(i - 1) / 2]); i = (i - 1) / 2)
        s->heap[i] = s->heap[(i - 1) / 2];
    s->heap[i] = e;
}

static struct sim_event pop_event(struct sim *s)
{
    struct sim_event top = s->heap[0], last = s->heap[--s->event_count];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= s->event_count)
            break;
        if (child + 1 < s->event_count && before(&s->heap[child + 1], &s->heap[child]))
            child++;
        if (!before(&s->heap[child], &last))
            break;
        s->heap[i] = s->heap[child];
        i = child;
    }
    s->heap[i] = last;
    return top;
}

void sim_forget(struct sim *s, void *arg)
{
    for (size_t i = 0; i < s->event_count; i++)
        if (s->heap[i].arg == arg)
            s->heap[i].run = NULL;
}

static void drop_forgotten(struct sim *s)
{
    while (s->event_count && !s->heap[0].run)
        (void)pop_event(s);
}

/* Descriptors. */

struct sim_fd *sim_fd_get(struct sim *s, const struct sim_node *n, int fd)
{
    size_t i = (size_t)(fd - FD_FIRST);
    if (fd < FD_FIRST || i >= s->fd_count || !s->fds[i] || s->fds[i]->node != n)
        return NULL;
    return s->fds[i];
}

struct sim_fd *sim_fd_new(struct sim *s, struct sim_node *n)
{
    struct sim_fd *f = sim_alloc(sizeof *f);
    s->fds = reallocarray(s->fds, s->fd_count + 1, sizeof *s->fds);
    check(s->fds);
    f->fd = FD_FIRST + (int)s->fd_count;
    f->node = n;
    s->fds[s->fd_count++] = f;
    return f;
}

void sim_fd_free(struct sim *s, struct sim_fd *f)
{
    s->fds[f->fd - FD_FIRST] = NULL;
    free(f);
}

/* Turns of a loop. */

static void turn(struct sim *s, void *arg)
{
    struct sim_loop *l = arg;
    l->turn_due = false;
    s->turn = l;
    struct loop_msg *m = l->first, *next;
    l->first = NULL;
    l->end = &l->first;
    for (; m; m = next) {
        next = m->next;
        m->run(m);
    }
    unsigned ready = 0;
    list_for_each (it, &l->loop.ready)
        ready++;
    loop_run_ready(&l->loop, ready);
    s->turn = NULL;
}

int sim_turn(const struct sim *s)
{
    return s->turn ? (int)s->turn->node->number : -1;
}

static void want_turn(struct sim_loop *l)
{
    if (l->turn_due)
        return;
    l->turn_due = true;
    sim_at(l->sim, 1 + sim_below(l->sim, 5), turn, l);
}

void sim_ready(struct io_op *op, int64_t result)
{
    struct sim_loop *l = sim_loop_of(op->loop);
    struct io_req *r = io_req(op);
    sim_trace(l->sim, "node%u %s%s%s fd %d n %zu at %llu: %lld", l->node->number,
              io_code_name((enum io_code)r->code), r->path ? " " : "", r->path ? r->path : "", r->fd, r->n,
              (unsigned long long)r->offset, (long long)result);
    loop_ready(&l->loop, op, result);
    want_turn(l);
}

/* Operations. */

static uint64_t latency_us(struct sim *s, enum io_code code)
{
    switch (code) {
    case IO_FDATASYNC:
    case IO_FSYNC: return 200 + sim_below(s, 4000);
    case IO_READ:
    case IO_WRITE: return 30 + sim_below(s, 400);
    case IO_RECV:
    case IO_ACCEPT: return 1 + sim_below(s, 5);
    default: return 5 + sim_below(s, 100);
    }
}

static void op_due(struct sim *s, void *arg);

static void attempt_later(struct io_op *op)
{
    struct sim *s = sim_loop_of(op->loop)->sim;
    io_req(op)->state = IO_FLIGHT;
    sim_at(s, latency_us(s, io_req(op)->code) + sim_stall_us(s), op_due, op);
}

void sim_settle(struct io_op *op, int64_t result)
{
    if (io_settle(op, result))
        sim_ready(op, op->result);
    else
        attempt_later(op);
}

/* How much of a transfer one attempt does. */
static size_t piece(struct sim *s, const struct sim_fd *f, size_t n, bool cut)
{
    size_t unit = f->flags & O_DIRECT ? BLOCK_BYTES : 1;
    if (!cut || n <= unit)
        return n;
    return (1 + (size_t)sim_below(s, (n - 1) / unit)) * unit;
}

/* Of n bytes that were read well. */
static void misread(struct sim *s, struct sim_fd *f, uint8_t *p, size_t n)
{
    unsigned *rest = disk_rest(f);
    if (*rest > 0) {
        --*rest;
        return;
    }
    bool flips = sim_strikes(s, &s->options.faults.read_corrupt);
    bool strays = sim_strikes(s, &s->options.faults.read_misdirected);
    if (flips)
        p[sim_below(s, n)] ^= (uint8_t)(1u << sim_below(s, 8));
    if (strays)
        disk_misdirect(f->node->disk, f, p, n);
    if (flips || strays)
        *rest = s->options.faults.misread_rest;
}

static int64_t perform_read(struct sim *s, struct sim_fd *f, struct io_req *r)
{
    const struct sim_faults *faults = &s->options.faults;
    size_t bytes, start = io_resume(r, &bytes);
    uint8_t *p = (uint8_t *)r->p + start;
    if (sim_strikes(s, &faults->read_error)) {
        *disk_rest(f) = faults->misread_rest; /* the second look is not spoilt */
        return -EIO;
    }
    bytes = piece(s, f, bytes, sim_strikes(s, &faults->short_transfer));
    int64_t got = disk_read(f->node->disk, f, p, bytes, r->offset + start);
    if (got > 0)
        misread(s, f, p, (size_t)got);
    return got;
}

static int64_t perform_write(struct sim *s, struct sim_fd *f, struct io_req *r)
{
    const struct sim_faults *faults = &s->options.faults;
    size_t bytes, start = io_resume(r, &bytes);
    const uint8_t *p = (const uint8_t *)r->p + start;
    if (sim_strikes(s, &faults->write_no_space))
        return -ENOSPC;
    bool fails = sim_strikes(s, &faults->write_error);
    bytes = piece(s, f, bytes, fails || sim_strikes(s, &faults->short_transfer));
    int64_t put = disk_write(f->node->disk, f, p, bytes, r->offset + start);
    return fails && put >= 0 ? -EIO : put;
}

static int64_t perform_sync(struct sim *s, struct sim_fd *f)
{
    if (sim_strikes(s, &s->options.faults.sync_error)) {
        disk_break_sync(f);
        return -EIO;
    }
    return disk_sync(f->node->disk, f);
}

static int64_t perform_close(struct sim *s, struct sim_fd *f)
{
    if (f->inode)
        disk_close(f->node->disk, f);
    else
        net_close(s, f);
    sim_fd_free(s, f);
    return 0;
}

static int64_t perform_open(struct sim *s, struct sim_node *n, struct io_req *r)
{
    struct inode *inode = NULL;
    int64_t status = disk_open(n->disk, r->path, r->flags, &inode);
    if (status < 0)
        return status;
    struct sim_fd *f = sim_fd_new(s, n);
    f->flags = r->flags;
    f->inode = inode;
    return f->fd;
}

static int64_t perform_on_fd(struct sim *s, struct sim_fd *f, struct io_req *r)
{
    if (!f)
        return -EBADF;
    if (r->code == IO_CLOSE)
        return perform_close(s, f);
    if (!f->inode)
        return -EINVAL;
    switch ((enum io_code)r->code) {
    case IO_READ: return perform_read(s, f, r);
    case IO_WRITE: return perform_write(s, f, r);
    case IO_ALLOCATE:
        return sim_strikes(s, &s->options.faults.write_no_space) ? -ENOSPC
                                                                 : disk_allocate(f->node->disk, f, r->offset);
    case IO_ADVISE: return 0;
    case IO_TRUNCATE: return disk_truncate(f->node->disk, f, r->offset);
    default: return perform_sync(s, f);
    }
}

static int64_t perform(struct sim *s, struct sim_node *n, struct io_req *r)
{
    switch ((enum io_code)r->code) {
    case IO_OPEN: return perform_open(s, n, r);
    case IO_LINK: return disk_link(n->disk, r->path, r->path2);
    case IO_UNLINK: return disk_unlink(n->disk, r->path, false);
    case IO_RMDIR: return disk_unlink(n->disk, r->path, true);
    case IO_MKDIR: return disk_mkdir(n->disk, r->path);
    case IO_STAT: return disk_stat(n->disk, r->path, r->out);
    case IO_LIST: return disk_list(n->disk, r->path, r->out);
    case IO_WORK: return io_work(r);
    default: return perform_on_fd(s, sim_fd_get(s, n, r->fd), r);
    }
}

static bool changes_disk(const struct io_req *r, int64_t result)
{
    switch ((enum io_code)r->code) {
    case IO_OPEN: return result >= 0 && r->flags & O_CREAT;
    case IO_WRITE: return result > 0;
    case IO_TRUNCATE:
    case IO_LINK:
    case IO_UNLINK:
    case IO_RMDIR:
    case IO_MKDIR:
    case IO_FSYNC:
    case IO_FDATASYNC: return result >= 0;
    default: return false;
    }
}

static bool needs_space(const struct io_req *r)
{
    return r->code == IO_WRITE || r->code == IO_ALLOCATE || r->code == IO_LINK || r->code == IO_MKDIR ||
           (r->code == IO_OPEN && r->flags & O_CREAT);
}

/* The one operation that is to fail does. A close gives the descriptor back all the same. */
static bool fails_here(struct sim *s, struct sim_node *n, const struct io_req *r)
{
    struct sim_faults *f = &s->options.faults;
    struct sim_fd *fd;
    if (s->operations != f->fail_at || r->code == IO_CLOSE || (f->fail_errno == ENOSPC && !needs_space(r)))
        return false;
    s->struck.fail_at++;
    if ((r->code == IO_FSYNC || r->code == IO_FDATASYNC) && (fd = sim_fd_get(s, n, r->fd)) && fd->inode) {
        s->struck.sync_error++;
        disk_break_sync(fd);
    }
    return true;
}

static int64_t perform_counted(struct sim *s, struct sim_node *n, struct io_req *r)
{
    s->operations++;
    if (fails_here(s, n, r))
        return -(int64_t)s->options.faults.fail_errno;
    int64_t result = perform(s, n, r);
    n->changes += changes_disk(r, result);
    return result;
}

static void op_due(struct sim *s, void *arg)
{
    struct io_op *op = arg;
    struct io_req *r = io_req(op);
    if (r->cancelled && r->code != IO_CLOSE && (io_is_socket(r->code) || sim_below(s, 4) > 0))
        sim_ready(op, -ECANCELED);
    else if (io_is_socket(r->code))
        net_perform(op);
    else
        sim_settle(op, perform_counted(s, sim_loop_of(op->loop)->node, r));
}

static void sim_submit(struct loop *l, struct io_op *op)
{
    if (sim_loop_of(l)->dead)
        sim_ready(op, -EIO);
    else
        attempt_later(op);
}

static void sim_cancel(struct loop *l, struct io_op *op)
{
    (void)l;
    if (io_req(op)->state != IO_HELD)
        return; /* looked at when it is due */
    list_del(&op->link);
    sim_ready(op, -ECANCELED);
}

/* The other slots of the loop. */

static int sim_space(struct loop *l, const char *path, uint64_t *free_bytes, uint64_t *total_bytes)
{
    struct sim_loop *sl = sim_loop_of(l);
    return sl->dead ? -EIO : disk_space(sl->node->disk, path, free_bytes, total_bytes);
}

static int sim_boot(struct loop *l, char out[LOOP_BOOT_BYTES])
{
    struct sim_loop *sl = sim_loop_of(l);
    if (sl->dead)
        return -EIO;
    snprintf(out, LOOP_BOOT_BYTES, "node%u-%u", sl->node->number, sl->node->crashes);
    return 0;
}

static int sim_lock(struct loop *l, int fd)
{
    struct sim_loop *sl = sim_loop_of(l);
    struct sim_fd *f = sim_fd_get(sl->sim, sl->node, fd);
    if (sl->dead)
        return -EIO;
    return f && f->inode ? disk_lock(f) : -EBADF;
}

static int sim_listen(struct loop *l, const char *host, const char *port, bool shared, int *fd, char *bound,
                      size_t bound_size, struct err *e)
{
    struct sim_loop *sl = sim_loop_of(l);
    if (sl->dead)
        return err_sys(e, EIO, "listening on port %s: node%u is down", port, sl->node->number);
    return net_listen(sl, host, port, shared, fd, bound, bound_size, e);
}

static void sim_recv_least(struct loop *l, int fd, size_t n)
{
    (void)l, (void)fd, (void)n; /* any length may come at any time, as without it */
}

static void sim_shutdown(struct loop *l, int fd)
{
    struct sim_loop *sl = sim_loop_of(l);
    struct sim_fd *f = sim_fd_get(sl->sim, sl->node, fd);
    if (f && !sl->dead)
        net_shutdown(sl->sim, f);
}

static void sim_release(struct loop *l, int fd)
{
    struct sim_loop *sl = sim_loop_of(l);
    check(sl->dead || sim_fd_get(sl->sim, sl->node, fd));
}

static void sim_peer(struct loop *l, int fd, char *out, size_t size)
{
    struct sim_loop *sl = sim_loop_of(l);
    struct sim_fd *f = sim_fd_get(sl->sim, sl->node, fd);
    if (f && !sl->dead)
        net_peer(f, out, size);
    else
        snprintf(out, size, "unknown");
}

uint64_t sim_now_ms(const struct sim *s)
{
    return s->now_us / 1000;
}

uint64_t sim_now_ns(const struct sim *s)
{
    return s->now_us * 1000;
}

static uint64_t sim_loop_now_ms(struct loop *l)
{
    return sim_now_ms(sim_loop_of(l)->sim);
}

static uint64_t sim_loop_unix_ns(struct loop *l)
{
    return sim_unix_ns(sim_loop_of(l)->sim);
}

static void sim_random(struct loop *l, void *p, size_t n)
{
    uint8_t *at = p;
    for (size_t i = 0; i < n; i++)
        at[i] = (uint8_t)(draw(&sim_loop_of(l)->sim->random_ids) >> 24);
}

static void sim_post(struct loop *l, struct loop_msg *m)
{
    struct sim_loop *sl = sim_loop_of(l);
    *sl->end = m;
    sl->end = &m->next;
    want_turn(sl);
}

static int sim_loop_run(struct loop *l, struct err *e)
{
    (void)l;
    return err_set(e, ERR_UNSUPPORTED, "a simulated loop is run by sim_run, not by loop_run");
}

static void sim_stop(struct loop *l)
{
    sim_loop_of(l)->stopped = true;
}

static void sim_loop_destroy(struct loop *l)
{
    struct sim_loop *sl = sim_loop_of(l);
    check(l->pending == 0);
    sim_forget(sl->sim, sl);
    list_del(&sl->in_sim);
    free(sl);
}

static const struct loop_ops sim_ops = {
    .name = "simulator",
    .submit = sim_submit,
    .cancel = sim_cancel,
    .space = sim_space,
    .boot = sim_boot,
    .lock = sim_lock,
    .listen = sim_listen,
    .recv_least = sim_recv_least,
    .shutdown = sim_shutdown,
    .peer = sim_peer,
    .release = sim_release,
    .now_ms = sim_loop_now_ms,
    .unix_ns = sim_loop_unix_ns,
    .random = sim_random,
    .post = sim_post,
    .run = sim_loop_run,
    .stop = sim_stop,
    .destroy = sim_loop_destroy,
};

/* The world. */

struct sim *sim_create(const struct sim_options *o)
{
    struct sim *s = sim_alloc(sizeof *s);
    s->options = *o;
    if (!s->options.disk_bytes)
        s->options.disk_bytes = DISK_BYTES_DEFAULT;
    s->random = o->seed;
    s->random_ids = ~o->seed;
    s->now_us = START_US;
    s->next_port = 40000;
    list_init(&s->loops);
    list_init(&s->listeners);
    list_init(&s->conns);
    return s;
}

void sim_destroy(struct sim *s)
{
    if (!s)
        return;
    check(list_empty(&s->loops));
    net_destroy(s);
    for (size_t i = 0; i < s->fd_count; i++)
        free(s->fds[i]);
    for (size_t i = 0; i < s->node_count; i++) {
        if (s->nodes[i])
            disk_destroy(s->nodes[i]->disk);
        free(s->nodes[i]);
    }
    free(s->nodes);
    free(s->fds);
    free(s->heap);
    free(s);
}

void sim_set_faults(struct sim *s, const struct sim_faults *f)
{
    s->options.faults = *f;
}

static struct sim_node *node_of(struct sim *s, unsigned number)
{
    check(number < 4096);
    if (number >= s->node_count) {
        s->nodes = reallocarray(s->nodes, number + 1, sizeof *s->nodes);
        check(s->nodes);
        memset(s->nodes + s->node_count, 0, (number + 1 - s->node_count) * sizeof *s->nodes);
        s->node_count = number + 1;
    }
    if (!s->nodes[number]) {
        struct sim_node *n = s->nodes[number] = sim_alloc(sizeof *n);
        n->number = number;
        n->disk = disk_create(s, s->options.disk_bytes);
    }
    return s->nodes[number];
}

struct loop *sim_loop(struct sim *s, unsigned node)
{
    struct sim_loop *l = sim_alloc(sizeof *l);
    loop_base_init(&l->loop, &sim_ops);
    l->sim = s;
    l->node = node_of(s, node);
    l->end = &l->first;
    list_add_tail(&s->loops, &l->in_sim);
    return &l->loop;
}

static bool loop_over(const struct sim_loop *l)
{
    return l->stopped && l->loop.pending == 0 && !l->first;
}

/* The loop whose timer comes first; NULL: none. */
static struct sim_loop *next_timer(struct sim *s, uint64_t *at_us)
{
    struct sim_loop *found = NULL;
    list_for_each (it, &s->loops) {
        struct sim_loop *l = container_of(it, struct sim_loop, in_sim);
        uint64_t at_ms = loop_over(l) ? 0 : loop_next_timer(&l->loop);
        if (at_ms && (!found || at_ms * 1000 < *at_us)) {
            found = l;
            *at_us = at_ms * 1000;
        }
    }
    return found;
}

/* False: nothing is left to do. */
static bool step(struct sim *s)
{
    uint64_t at_us = 0;
    struct sim_loop *timer = next_timer(s, &at_us);
    drop_forgotten(s);
    if (timer && (!s->event_count || at_us <= s->heap[0].at_us)) {
        if (at_us > s->now_us)
            s->now_us = at_us;
        s->turn = timer;
        loop_fire_timers(&timer->loop, sim_now_ms(s), 1);
        s->turn = NULL;
        return true;
    }
    if (!s->event_count)
        return false;
    struct sim_event e = pop_event(s);
    s->now_us = e.at_us;
    e.run(s, e.arg);
    return true;
}

static bool all_over(struct sim *s)
{
    list_for_each (it, &s->loops)
        if (!loop_over(container_of(it, struct sim_loop, in_sim)))
            return false;
    return true;
}

uint64_t sim_run(struct sim *s, bool (*until)(void *arg), void *arg, uint64_t max_events)
{
    uint64_t events = 0;
    while (events < max_events && !all_over(s) && !(until && until(arg)) && step(s))
        events++;
    return events;
}

static void fail_op(struct io_op *op)
{
    sim_ready(op, -EIO);
}

/* Events of operations on the dead node end here. Collected first: failing one makes new events. */
static void fail_flights(struct sim *s, struct sim_node *n)
{
    struct list failed, *entry;
    list_init(&failed);
    for (size_t i = 0; i < s->event_count; i++) {
        struct io_op *op = s->heap[i].arg;
        if (s->heap[i].run != op_due || sim_loop_of(op->loop)->node != n)
            continue;
        s->heap[i].run = NULL;
        list_add_tail(&failed, &op->link);
    }
    while ((entry = list_pop(&failed)))
        fail_op(container_of(entry, struct io_op, link));
}

void sim_crash(struct sim *s, unsigned node)
{
    struct sim_node *n = node_of(s, node);
    sim_trace(s, "node%u loses power", node);
    list_for_each (it, &s->loops) {
        struct sim_loop *l = container_of(it, struct sim_loop, in_sim);
        l->dead |= l->node == n;
    }
    fail_flights(s, n);
    net_crash(s, n, fail_op);
    for (size_t i = 0; i < s->fd_count; i++)
        if (s->fds[i] && s->fds[i]->node == n)
            sim_fd_free(s, s->fds[i]);
    disk_crash(n->disk);
    n->crashes++;
}

void sim_count_traffic(struct sim *s, bool on)
{
    s->counts_traffic = on;
}

uint64_t sim_traffic(const struct sim *s)
{
    return s->traffic;
}

uint64_t sim_operations(const struct sim *s)
{
    return s->operations;
}

uint64_t sim_changes(struct sim *s, unsigned node)
{
    return node_of(s, node)->changes;
}

uint64_t sim_unsynced(struct sim *s, unsigned node)
{
    return disk_unsynced(node_of(s, node)->disk);
}

int sim_file(struct sim *s, unsigned node, const char *path, bool durable_only, uint8_t **p, size_t *n)
{
    return disk_file(node_of(s, node)->disk, path, durable_only, p, n);
}

int sim_flip(struct sim *s, unsigned node, const char *path, uint64_t offset, uint8_t mask)
{
    return disk_flip(node_of(s, node)->disk, path, offset, mask);
}
