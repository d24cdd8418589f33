/* SPDX-License-Identifier: Apache-2.0 */
/*
 * OP_STATUS: one JSON object. A message visits the store's loop and then every other, collecting figures, and
 * comes home to be answered.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/hash.h"
#include "format/version.h"
#include "server/obs/metrics.h"
#include "server/session/session.h"

struct status {
    struct request r;
    struct loop_msg msg;
    struct worker *home;
    unsigned visited;
    uint64_t now_ms;
    struct store_stats store;
    json_t *feeds; /* NULL: no memory */
    uint64_t feeds_left_out;
    struct worker_figures workers[];
};

static json_t *number(uint64_t v)
{
    return json_integer((json_int_t)(v > INT64_MAX ? INT64_MAX : v));
}

/* A value that could not be had for want of memory leaves its name out. */
static void put(json_t *object, const char *name, json_t *value)
{
    if (value)
        json_object_set_new(object, name, value);
}

static void put_store(json_t *o, const struct store_stats *s)
{
    char id[2 * ID_BYTES + 1];
    hex_encode(s->store_id.bytes, ID_BYTES, id);
    put(o, "store_id", json_string(id));
    put(o, "store_read_only_reason", json_string(s->read_only ? s->read_only_reason : ""));
    put(o, "store_tenants", number(s->tenants));
    put(o, "store_runs", number(s->runs));
    put(o, "store_commits", number(s->commits));
    put(o, "store_segments_open", number(s->segments_open));
    put(o, "store_stored_bytes", number(s->stored_bytes));
    put(o, "store_total_bytes", number(s->total_bytes));
    put(o, "store_damaged_objects", number(s->damaged_objects));
}

static void put_class(json_t *o, enum sched_class c, const char *what, uint64_t v)
{
    char name[64];
    snprintf(name, sizeof name, "class_%s_%s", sched_class_name(c), what);
    put(o, name, number(v));
}

/* Sums over all loops. */
static void put_classes(json_t *o, const struct status *st, size_t workers)
{
    for (enum sched_class c = 0; c < SCHED_CLASSES; c++) {
        struct sched_figures sum = {0};
        for (size_t i = 0; i < workers; i++) {
            const struct sched_figures *f = &st->workers[i].classes[c];
            sum.queued += f->queued;
            sum.queued_bytes += f->queued_bytes;
            sum.in_flight_bytes += f->in_flight_bytes;
            sum.admitted += f->admitted;
            sum.admitted_bytes += f->admitted_bytes;
            sum.waited_ms += f->waited_ms;
            sum.waited_ms_max = f->waited_ms_max > sum.waited_ms_max ? f->waited_ms_max : sum.waited_ms_max;
        }
        put_class(o, c, "queued", sum.queued);
        put_class(o, c, "queued_bytes", sum.queued_bytes);
        put_class(o, c, "in_flight_bytes", sum.in_flight_bytes);
        put_class(o, c, "admitted", sum.admitted);
        put_class(o, c, "admitted_bytes", sum.admitted_bytes);
        put_class(o, c, "waited_ms", sum.waited_ms);
        put_class(o, c, "waited_ms_max", sum.waited_ms_max);
    }
}

static void put_loops(json_t *o, const struct status *st, size_t workers)
{
    put(o, "loops", number(workers));
    for (size_t i = 0; i < workers; i++) {
        char name[64];
        snprintf(name, sizeof name, "loop_%zu_sessions", i);
        put(o, name, number(st->workers[i].sessions));
    }
}

static const char *transport(const struct server *sv)
{
    if (!sv->o.tls)
        return "clear";
    return lane_allowed(sv) ? "TLS 1.3; sealed chunks on plain TCP, authenticated" : "TLS 1.3";
}

/* One flat object, as PROTOCOL.md says: who reads it needs no path to a value. */
static json_t *status_json(const struct status *st)
{
    const struct server *sv = st->home->server;
    json_t *o = json_object();
    if (!o)
        return NULL;
    put(o, "version", json_string(LARDER_VERSION_STRING));
    put(o, "protocol", number(PROTOCOL_VERSION));
    put(o, "uptime_ms", number(st->now_ms - sv->started_ms));
    put(o, "server_time_ns", number(loop_unix_ns(st->home->loop)));
    put(o, "io", json_string(sv->o.io_path ? sv->o.io_path : "unknown"));
    put(o, "transport", json_string(transport(st->home->server)));
    put_store(o, &st->store);
    for (enum metric m = 0; m < METRIC_COUNT; m++)
        put(o, metric_name(m), json_integer(metric_get(m)));
    put_classes(o, st, sv->worker_count);
    put_loops(o, st, sv->worker_count);
    put(o, "feeds", json_incref(st->feeds));
    put(o, "feeds_left_out", number(st->feeds_left_out));
    return o;
}

static void answer(struct status *st)
{
    struct err e = {0};
    json_t *o = status_json(st);
    char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
    struct buf b = {0};
    if (text) {
        struct msg_status_reply reply = {.json = SLICE(text, strlen(text))};
        msg_status_reply_encode(&reply, &b);
    }
    if (!text || b.failed) {
        err_set(&e, ERR_NO_MEMORY, "no memory for the status");
        request_fail(&st->r, &e);
    } else {
        request_answer(&st->r, SLICE(b.p, b.n), (struct slice){0});
    }
    buf_free(&b);
    free(text);
    json_decref(o);
}

static void home(struct loop_msg *m)
{
    struct status *st = container_of(m, struct status, msg);
    struct session *s = st->r.s;
    answer(st);
    json_decref(st->feeds);
    request_free(&st->r);
    session_settle(s);
}

/* An admin's tenants are those of the whole server. */
static void collect_feeds(struct status *st, const struct worker *w)
{
    const struct identity *who = &st->r.s->identity;
    list_for_each (l, &w->sessions) {
        const struct session *s = container_of(l, struct session, link);
        if (st->feeds && s->feed_count > 0 &&
            (who->role == ROLE_ADMIN || strcmp(who->tenant, s->identity.tenant) == 0))
            st->feeds_left_out += feeds_json(s, loop_now_ms(w->loop), st->feeds);
    }
}

static void visit(struct loop_msg *m)
{
    struct status *st = container_of(m, struct status, msg);
    struct server *sv = st->home->server;
    struct worker *w = &sv->workers[st->visited];
    if (st->visited == 0)
        store_stats(sv->o.store, &st->store);
    worker_figures(w, &st->workers[st->visited]);
    collect_feeds(st, w);
    st->visited++;
    if (st->visited == sv->worker_count) {
        m->run = home;
        loop_post(st->home->loop, m);
    } else {
        loop_post(sv->workers[st->visited].loop, m);
    }
}

/* It is answered within a turn of every loop: nothing to give up on. */
static void status_cancel(struct request *r, const struct err *why)
{
    (void)r, (void)why;
}

void status_handle(struct session *s, const struct op_entry *op, struct frame *f)
{
    struct server *sv = s->w->server;
    size_t bytes = sizeof(struct status) + sv->worker_count * sizeof(struct worker_figures);
    struct request *r = request_begin(s, op, f, bytes, status_cancel, NULL);
    if (!r)
        return;
    struct status *st = container_of(r, struct status, r);
    st->home = s->w;
    st->now_ms = loop_now_ms(s->w->loop);
    st->feeds = json_array();
    st->msg.run = visit;
    loop_post(sv->workers[0].loop, &st->msg);
}
