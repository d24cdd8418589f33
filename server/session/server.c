/* SPDX-License-Identifier: Apache-2.0 */
/* Workers: listeners, start and stop, the scheduler's pump, tenants' weights. */
#include "server/session/server.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "format/credentials.h"
#include "server/obs/metrics.h"
#include "server/session/extents.h"
#include "server/session/published.h"
#include "server/session/session.h"
#include "server/session/unpacked.h"

#define ACCEPT_RETRY_MS 100u

static void on_accept(struct io_op *op);
static void worker_check_stopped(struct worker *w);

static const struct server_limits limit_defaults = {
    .sessions_max = 4096,
    .session_requests_max = 256,
    .session_streams_max = 64,
    .session_payload_bytes_max = 64ull << 20,
    .session_read_bytes_max = 4ull << 20,
    .feed_read_bytes_max = 4ull << 20,
    .in_flight_bytes_max = 64ull << 20,
    .read_cache_bytes = 128ull << 20,
    .sample_index_bytes_max = 64ull << 20,
    .unpacked_bytes_max = 16ull << 30,
    .handshake_ms = 10 * 1000,
    .deadline_ms = 30 * 1000,
    .frame_ms = 120 * 1000,
    .send_ms = 15 * 60 * 1000,
    .idle_ms = 2 * 60 * 60 * 1000,
    .closing_ms = 2 * 1000,
    .join_wait_ms = 10 * 60 * 1000,
};

static struct server_limits limits_of(const struct server_limits *asked)
{
    struct server_limits l = *asked;
#define DEFAULT(name) \
    if (l.name == 0)  \
        l.name = limit_defaults.name;
    DEFAULT(sessions_max)
    DEFAULT(session_requests_max)
    DEFAULT(session_streams_max)
    DEFAULT(session_payload_bytes_max)
    DEFAULT(session_read_bytes_max)
    DEFAULT(feed_read_bytes_max)
    DEFAULT(in_flight_bytes_max)
    DEFAULT(read_cache_bytes)
    DEFAULT(sample_index_bytes_max)
    DEFAULT(unpacked_bytes_max)
    DEFAULT(handshake_ms)
    DEFAULT(deadline_ms)
    DEFAULT(frame_ms)
    DEFAULT(send_ms)
    DEFAULT(idle_ms)
    DEFAULT(closing_ms)
    DEFAULT(join_wait_ms)
#undef DEFAULT
    return l;
}

/* The scheduler's pump. */

void worker_pump(struct worker *w)
{
    uint64_t wake_ms = sched_pump(w->sched, loop_now_ms(w->loop));
    if (wake_ms == 0)
        loop_timer_clear(w->loop, &w->sched_timer);
    else if (wake_ms != w->sched_timer.at_ms)
        loop_timer_set(w->loop, &w->sched_timer, wake_ms);
}

static void on_sched_timer(struct loop_timer *t)
{
    worker_pump(container_of(t, struct worker, sched_timer));
}

void worker_figures(const struct worker *w, struct worker_figures *out)
{
    out->sessions = w->session_count;
    for (enum sched_class c = 0; c < SCHED_CLASSES; c++)
        sched_figures(w->sched, c, &out->classes[c]);
}

/* Listeners. */

static void accept_next(struct listener *l)
{
    if (l->w->stopping || l->accepting)
        return;
    l->accepting = true;
    l->accept.done = on_accept;
    loop_accept(l->w->loop, &l->accept, l->fd);
}

static void on_retry(struct loop_timer *t)
{
    accept_next(container_of(t, struct listener, retry));
}

static void on_listener_closed(struct io_op *op)
{
    struct listener *l = container_of(op, struct listener, close);
    l->closing = false;
    l->fd = -1;
    worker_check_stopped(l->w);
}

static void listener_close(struct listener *l)
{
    loop_timer_clear(l->w->loop, &l->retry);
    if (l->accepting) {
        loop_cancel(l->w->loop, &l->accept);
    } else if (l->fd >= 0 && !l->closing) {
        l->closing = true;
        l->close.done = on_listener_closed;
        loop_close(l->w->loop, &l->close, l->fd);
    }
}

static void on_accept(struct io_op *op)
{
    struct listener *l = container_of(op, struct listener, accept);
    struct worker *w = l->w;
    l->accepting = false;
    if (op->result >= 0) {
        session_accept(w, (int)op->result, l->number, (struct slice){0});
    } else if (!w->stopping && op->result != -ECONNABORTED && op->result != -EINTR) {
        log_warn("accepting a connection failed address=%s: %s; trying again in %u ms",
                 w->server->addresses[l->number], strerror((int)-op->result), ACCEPT_RETRY_MS);
        l->retry.fire = on_retry;
        loop_timer_set(w->loop, &l->retry, loop_now_ms(w->loop) + ACCEPT_RETRY_MS);
        return;
    }
    if (w->stopping)
        listener_close(l);
    else
        accept_next(l);
}

/* Opens the listeners of one worker. Worker 0 picks the port where 0 was asked for; the others share it. */
static int worker_listen(struct worker *w, struct err *e)
{
    struct server *s = w->server;
    for (size_t i = 0; i < s->o.listen_count; i++) {
        char host[ADDRESS_BYTES_MAX], port[16];
        struct listener *l = &w->listeners[i];
        const char *address = w->number == 0 ? s->o.listen[i] : s->addresses[i];
        char bound[ADDRESS_BYTES_MAX];
        int r = listen_split(address, host, sizeof host, port, sizeof port, e);
        if (r < 0)
            return r;
        r = loop_listen(w->loop, host, port, s->o.loop_count > 1, &l->fd, bound, sizeof bound, e);
        if (r < 0) {
            l->fd = -1;
            return err_prepend(e, "listening on %s", address);
        }
        if (w->number == 0)
            memcpy(s->addresses[i], bound, sizeof bound);
    }
    return 0;
}

/* Start: a message visits every worker in turn, and then comes home. */

static void start_home(struct loop_msg *m);

static void worker_start(struct loop_msg *m)
{
    struct worker *w = container_of(m, struct worker, start_msg);
    struct server *s = w->server;
    if (s->start_err.class == ERR_NONE && worker_listen(w, &s->start_err) == 0)
        for (size_t i = 0; i < s->o.listen_count; i++)
            accept_next(&w->listeners[i]);
    if (s->start_err.class == ERR_NONE && w->number + 1 < s->worker_count) {
        struct worker *next = &s->workers[w->number + 1];
        next->start_msg.run = worker_start;
        loop_post(next->loop, &next->start_msg);
    } else {
        s->start_msg.run = start_home;
        loop_post(s->workers[0].loop, &s->start_msg);
    }
}

struct undo {
    struct server_stopping stopping;
    struct server_starting *starting;
};

static void start_undone(struct server_stopping *stopping)
{
    struct undo *undo = container_of(stopping, struct undo, stopping);
    struct server_starting *starting = undo->starting;
    free(undo);
    starting->done(starting);
}

static void start_home(struct loop_msg *m)
{
    struct server *s = container_of(m, struct server, start_msg);
    struct server_starting *starting = s->starting;
    s->starting = NULL;
    s->phase = SERVER_RUNNING;
    if (s->start_err.class == ERR_NONE) {
        starting->server = s;
        server_tenants_changed(s);
        unpacked_load(&s->workers[0]);
        starting->done(starting);
        return;
    }
    starting->err = s->start_err;
    struct undo *undo = calloc(1, sizeof *undo);
    check(undo);
    undo->stopping.done = start_undone;
    undo->starting = starting;
    server_stop(s, 0, &undo->stopping);
}

/*
 * Listeners that share a port do so with any other process of the same user that shares it: two servers would
 * each get a part of the connections. So each address is first taken alone, which fails if anybody has it.
 */
static void probe_next(struct server *s);

static void probe_closed(struct io_op *op)
{
    struct server *s = container_of(op, struct server, probe_op);
    s->probed++;
    probe_next(s);
}

static int probe(struct server *s, const char *address, int *fd, struct err *e)
{
    char host[ADDRESS_BYTES_MAX], port[16], bound[ADDRESS_BYTES_MAX];
    int r = listen_split(address, host, sizeof host, port, sizeof port, e);
    *fd = -1;
    if (r < 0 || s->o.loop_count == 1 || strcmp(port, "0") == 0)
        return r;
    r = loop_listen(s->workers[0].loop, host, port, false, fd, bound, sizeof bound, e);
    return r < 0 ? err_prepend(e, "listening on %s", address) : 0;
}

static void probe_next(struct server *s)
{
    int fd = -1;
    while (s->probed < s->o.listen_count && probe(s, s->o.listen[s->probed], &fd, &s->start_err) == 0) {
        if (fd >= 0) {
            s->probe_op.done = probe_closed;
            loop_close(s->workers[0].loop, &s->probe_op, fd);
            return;
        }
        s->probed++;
    }
    worker_start(&s->workers[0].start_msg);
}

static void probe_first(struct loop_msg *m)
{
    probe_next(container_of(m, struct worker, start_msg)->server);
}

static int worker_init(struct worker *w, struct server *s, unsigned number, struct err *e)
{
    w->server = s;
    w->number = number;
    w->loop = s->o.loops[number].loop;
    w->backend = s->o.loops[number].backend;
    w->tls = s->o.tls ? channel_config_ref(s->o.tls) : NULL;
    w->dirs = s->o.published;
    w->dir_count = s->o.published_count;
    w->sched_timer.fire = on_sched_timer;
    list_init(&w->sessions);
    for (unsigned i = 0; i < LISTEN_MAX; i++) {
        w->listeners[i].w = w;
        w->listeners[i].number = i;
        w->listeners[i].fd = -1;
    }
    struct sched_options so = {.in_flight_bytes_max = s->limits.in_flight_bytes_max};
    if (sched_create(&so, &w->sched) < 0 || published_create(w, &w->published) < 0)
        return err_set(e, ERR_NO_MEMORY, "no memory for loop %u", number);
    for (size_t i = 0; i < s->o.cap_count; i++) {
        struct sched_tenant *t = sched_tenant(w->sched, s->o.caps[i].tenant);
        if (!t)
            return err_set(e, ERR_NO_MEMORY, "no memory for the caps of loop %u", number);
        sched_tenant_set(t, 1, s->o.caps[i].bytes_s);
    }
    return 0;
}

static void server_free(struct server *s)
{
    for (size_t i = 0; i < s->worker_count; i++) {
        sched_destroy(s->workers[i].sched);
        published_destroy(s->workers[i].published);
        payloads_free(&s->workers[i]);
        channel_config_unref(s->workers[i].tls);
    }
    check(atomic_load(&s->reading_count) == 0);
    extents_destroy(s->extents);
    unpacked_destroy(s->unpacked);
    lane_table_destroy(s->lanes);
    free(s);
}

struct failed_start {
    struct loop_msg msg;
    struct server_starting *starting;
};

static void tell_failure(struct loop_msg *m)
{
    struct failed_start *f = container_of(m, struct failed_start, msg);
    struct server_starting *starting = f->starting;
    free(f);
    starting->done(starting);
}

/* Submitting never calls back: the failure is told in the loop's next turn. */
static void fail_start(const struct server_options *o, struct server_starting *starting)
{
    struct failed_start *f = calloc(1, sizeof *f);
    check(f);
    f->starting = starting;
    f->msg.run = tell_failure;
    loop_post(o->loops[0].loop, &f->msg);
}

void server_start(const struct server_options *o, struct server_starting *starting)
{
    check(o->loop_count > 0 && o->listen_count > 0 && o->listen_count <= LISTEN_MAX);
    check(o->tls || o->clear_identities);
    starting->server = NULL;
    err_clear(&starting->err);
    struct server *s = calloc(1, sizeof *s + o->loop_count * sizeof *s->workers);
    if (!s) {
        err_set(&starting->err, ERR_NO_MEMORY, "no memory for the server");
        fail_start(o, starting);
        return;
    }
    struct store_stats stats;
    store_stats(o->store, &stats);
    s->o = *o;
    s->limits = limits_of(&o->limits);
    s->store_id = stats.store_id;
    s->started_ms = loop_now_ms(o->loops[0].loop);
    s->starting = starting;
    if (lane_table_create(&s->lanes) < 0 || unpacked_create(s, &s->unpacked) < 0 ||
        extents_create(s->limits.read_cache_bytes, &s->extents) < 0) {
        err_set(&starting->err, ERR_NO_MEMORY, "no memory for the server");
        server_free(s);
        fail_start(o, starting);
        return;
    }
    for (size_t i = 0; i < o->loop_count; i++) {
        s->worker_count = i + 1;
        if (worker_init(&s->workers[i], s, (unsigned)i, &starting->err) < 0) {
            server_free(s);
            fail_start(o, starting);
            return;
        }
    }
    s->workers[0].start_msg.run = probe_first;
    loop_post(o->loops[0].loop, &s->workers[0].start_msg);
}

const char *server_address(const struct server *s, size_t i)
{
    check(i < s->o.listen_count);
    return s->addresses[i];
}

/* Stop: each worker closes its listeners and sessions, then reports to worker 0. */

void server_try_free(struct server *s)
{
    struct server_stopping *stopping = s->stopping;
    if (s->phase != SERVER_STOPPING || s->workers_stopped < s->worker_count || s->refresh ||
        s->hurries_out > 0 || atomic_load(&s->lane_messages) > 0 || atomic_load(&s->moves) > 0)
        return;
    server_free(s);
    stopping->done(stopping);
}

static void stop_home(struct loop_msg *m)
{
    struct worker *w = container_of(m, struct worker, stopped_msg);
    struct server *s = w->server;
    struct server_stopping *stopping = s->stopping;
    stopping->finished += w->stop_finished;
    stopping->failed += w->stop_failed;
    s->workers_stopped++;
    server_try_free(s);
}

static void worker_check_stopped(struct worker *w)
{
    if (!w->stopping || w->stopped || !list_empty(&w->sessions))
        return;
    for (size_t i = 0; i < w->server->o.listen_count; i++)
        if (w->listeners[i].fd >= 0 || w->listeners[i].accepting)
            return;
    if (!shard_files_close(w->published->files) || !unpacker_idle(w->published->unpacker))
        return;
    w->stopped = true;
    loop_timer_clear(w->loop, &w->stop_timer);
    loop_timer_clear(w->loop, &w->sched_timer);
    w->stopped_msg.run = stop_home;
    loop_post(w->server->workers[0].loop, &w->stopped_msg);
}

void worker_has_less(struct worker *w)
{
    worker_check_stopped(w);
}

/* Stopping one session may free it, and no other. */
static void stop_sessions(struct worker *w, bool force)
{
    if (force)
        unpacked_hurry(w->server);
    list_for_each_safe (l, &w->sessions)
        session_stop(container_of(l, struct session, link), force);
}

static void on_stop_timer(struct loop_timer *t)
{
    struct worker *w = container_of(t, struct worker, stop_timer);
    stop_sessions(w, true);
}

static void worker_stop(struct loop_msg *m)
{
    struct worker *w = container_of(m, struct worker, stop_msg);
    uint32_t bound_ms = w->server->stop_bound_ms;
    w->stopping = true;
    for (size_t i = 0; i < w->server->o.listen_count; i++)
        listener_close(&w->listeners[i]);
    if (bound_ms > 0) {
        w->stop_timer.fire = on_stop_timer;
        loop_timer_set(w->loop, &w->stop_timer, loop_now_ms(w->loop) + bound_ms);
    }
    stop_sessions(w, bound_ms == 0);
    worker_check_stopped(w);
}

void server_stop(struct server *s, uint32_t bound_ms, struct server_stopping *stopping)
{
    check(s->phase == SERVER_RUNNING);
    s->phase = SERVER_STOPPING;
    s->stopping = stopping;
    s->stop_bound_ms = bound_ms;
    stopping->finished = stopping->failed = 0;
    for (size_t i = 0; i < s->worker_count; i++) {
        s->workers[i].stop_msg.run = worker_stop;
        loop_post(s->workers[i].loop, &s->workers[i].stop_msg);
    }
}

static void hurry_home(struct loop_msg *m)
{
    struct server *s = container_of(m, struct worker, hurry_msg)->server;
    s->hurries_out--;
    server_try_free(s);
}

static void worker_hurry(struct loop_msg *m)
{
    struct worker *w = container_of(m, struct worker, hurry_msg);
    if (!w->stopped)
        stop_sessions(w, true);
    m->run = hurry_home;
    loop_post(w->server->workers[0].loop, m);
}

void server_hurry(struct server *s)
{
    if (s->phase != SERVER_STOPPING || s->hurried)
        return;
    s->hurried = true;
    for (size_t i = 0; i < s->worker_count; i++) {
        s->hurries_out++;
        s->workers[i].hurry_msg.run = worker_hurry;
        loop_post(s->workers[i].loop, &s->workers[i].hurry_msg);
    }
}

/* New certificates and published directories, worker by worker; a session keeps the certificate that it began
 * with. */

struct reload {
    struct loop_msg msg;
    struct worker *w;
    struct channel_config *tls;
    const struct published_dir *dirs;
    size_t dir_count;
};

static void worker_reload(struct loop_msg *m)
{
    struct reload *r = container_of(m, struct reload, msg);
    channel_config_unref(r->w->tls);
    r->w->tls = r->tls;
    r->w->dirs = r->dirs;
    r->w->dir_count = r->dir_count;
    published_reload(r->w->published);
    free(r);
}

int server_reload(struct server *s, struct channel_config *tls, const struct published_dir *dirs,
                  size_t dir_count)
{
    if (s->phase != SERVER_RUNNING)
        return -EBUSY;
    for (size_t i = 0; i < s->worker_count; i++) {
        struct reload *r = calloc(1, sizeof *r);
        if (!r)
            return -ENOMEM;
        r->w = &s->workers[i];
        r->tls = channel_config_ref(tls);
        r->dirs = dirs;
        r->dir_count = dir_count;
        r->msg.run = worker_reload;
        loop_post(r->w->loop, &r->msg);
    }
    return 0;
}
