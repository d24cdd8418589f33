/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What feeds report: kept with the session that reported it, and gone with it. Of each feed the last report,
 * and how it differs from the one before: an operator wants to know who starves now, not who once did.
 */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/utf8.h"
#include "server/obs/metrics.h"
#include "server/session/session.h"

#define SESSION_FEEDS_MAX 64u
#define REPORT_LIFE_MS    60000u
#define PATH_BYTES_MAX    127u

enum cause { CAUSE_NETWORK, CAUSE_DISK, CAUSE_DECODE, CAUSE_FULL, CAUSES };

struct feed_entry {
    struct list link; /* session's feeds */
    struct id id;
    char dataset[NAME_BYTES_MAX + 1], run[NAME_BYTES_MAX + 1], path[PATH_BYTES_MAX + 1];
    struct msg_feed_report last; /* its strings are those above */
    uint64_t reported_at_ms;
    uint64_t waited_ms[CAUSES];
    uint64_t recent_ms, recent_waited_ms[CAUSES]; /* between the last two reports */
};

static const struct {
    const char *name, *recent;
    enum metric metric;
} causes[CAUSES] = {
    [CAUSE_NETWORK] = {"network_ms", "recent_network_ms", METRIC_feed_network_ms},
    [CAUSE_DISK] = {"disk_ms", "recent_disk_ms", METRIC_feed_disk_ms},
    [CAUSE_DECODE] = {"decode_ms", "recent_decode_ms", METRIC_feed_decode_ms},
    [CAUSE_FULL] = {"full_ms", "recent_full_ms", METRIC_feed_full_ms},
};

static void entry_free(struct session *s, struct feed_entry *x)
{
    list_del(&x->link);
    s->feed_count--;
    metric_add(METRIC_feeds_open, -1);
    free(x);
}

void feeds_free(struct session *s)
{
    list_for_each_safe (l, &s->feeds)
        entry_free(s, container_of(l, struct feed_entry, link));
}

static struct feed_entry *find(const struct session *s, const struct id *id)
{
    list_for_each (l, &s->feeds) {
        struct feed_entry *x = container_of(l, struct feed_entry, link);
        if (id_equal(&x->id, id))
            return x;
    }
    return NULL;
}

static void forget_silent(struct session *s, uint64_t now_ms)
{
    list_for_each_safe (l, &s->feeds) {
        struct feed_entry *x = container_of(l, struct feed_entry, link);
        if (now_ms - x->reported_at_ms > REPORT_LIFE_MS)
            entry_free(s, x);
    }
}

static int make(struct session *s, const struct id *id, struct feed_entry **out, struct err *e)
{
    if (s->feed_count == SESSION_FEEDS_MAX)
        return err_set(e, ERR_LIMIT, "this session reports on %u feeds, the limit; the others are not shown",
                       s->feed_count);
    struct feed_entry *x = calloc(1, sizeof *x);
    if (!x)
        return err_set(e, ERR_NO_MEMORY, "no memory for the report of a feed");
    x->id = *id;
    list_add_tail(&s->feeds, &x->link);
    s->feed_count++;
    metric_add(METRIC_feeds_open, 1);
    *out = x;
    return 0;
}

/* Counts only grow; what does not is not believed. */
static uint64_t grown(uint64_t now, uint64_t before)
{
    return now > before ? now - before : 0;
}

static void keep(struct feed_entry *x, const struct msg_feed_report *m, uint64_t now_ms)
{
    const uint64_t waited[CAUSES] = {m->network_ms, m->disk_ms, m->decode_ms, m->full_ms};
    x->recent_ms = grown(m->age_ms, x->last.age_ms);
    for (unsigned i = 0; i < CAUSES; i++) {
        uint64_t more = grown(waited[i], x->waited_ms[i]);
        more = more < x->recent_ms ? more : x->recent_ms; /* nobody waits longer than it takes */
        x->recent_waited_ms[i] = more;
        x->waited_ms[i] = waited[i];
        metric_add(causes[i].metric, (int64_t)more);
    }
    x->last = *m;
    x->last.dataset = x->last.run = x->last.path = (struct slice){0};
    x->reported_at_ms = now_ms;
}

static int take(struct session *s, const struct msg_feed_report *m, struct err *e)
{
    uint64_t now_ms = loop_now_ms(s->w->loop);
    char dataset[NAME_BYTES_MAX + 1], run[NAME_BYTES_MAX + 1], path[PATH_BYTES_MAX + 1];
    if (m->rank >= m->world || m->ended > 1)
        return err_set(e, ERR_INVALID, "a report of rank %u of %u, ended %u", m->rank, m->world, m->ended);
    if (!slice_cstr(m->dataset, dataset, sizeof dataset) || !slice_cstr(m->run, run, sizeof run) ||
        !slice_cstr(m->path, path, sizeof path) || !utf8_valid(dataset, m->dataset.n) ||
        !utf8_valid(run, m->run.n) || !utf8_valid(path, m->path.n))
        return err_set(e, ERR_INVALID,
                       "a report whose names are no UTF-8 of at most %u bytes, or its path of %u",
                       NAME_BYTES_MAX, PATH_BYTES_MAX);
    forget_silent(s, now_ms);
    struct feed_entry *x = find(s, &m->feed);
    int rc = x || m->ended ? 0 : make(s, &m->feed, &x, e);
    if (rc < 0 || !x)
        return rc;
    keep(x, m, now_ms);
    memcpy(x->dataset, dataset, sizeof dataset);
    memcpy(x->run, run, sizeof run);
    memcpy(x->path, path, sizeof path);
    metric_add(METRIC_feed_reports_total, 1);
    if (m->ended)
        entry_free(s, x);
    return 0;
}

void feed_report_handle(struct session *s, const struct op_entry *op, struct frame *f)
{
    struct err e = {0};
    struct msg_feed_report m;
    uint64_t id = f->header.request_id;
    struct rcur in = rcur_of(f->payload, f->header.payload_bytes);
    if (msg_feed_report_decode(&in, &m, &e) == 0 && rcur_end(&in, "feed_report", &e) == 0)
        (void)take(s, &m, &e);
    channel_frame_done(s->channel);
    if (e.class != ERR_NONE)
        session_send_error(s, op->opcode, id, &e);
    else
        session_send(s, op->opcode, 0, id, (struct slice){0}, (struct slice){0});
}

static void put(json_t *o, const char *name, uint64_t v)
{
    json_object_set_new(o, name, json_integer((json_int_t)(v > INT64_MAX ? INT64_MAX : v)));
}

static json_t *entry_json(const struct session *s, const struct feed_entry *x, uint64_t now_ms)
{
    json_t *o = json_pack("{s:s,s:s,s:s,s:s}", "tenant", s->identity.tenant, "dataset", x->dataset, "run",
                          x->run, "path", x->path);
    if (!o)
        return NULL;
    put(o, "rank", x->last.rank);
    put(o, "world", x->last.world);
    put(o, "epoch", x->last.epoch);
    put(o, "position", x->last.position);
    put(o, "samples", x->last.samples);
    put(o, "bytes", x->last.bytes);
    put(o, "damaged", x->last.damaged);
    put(o, "batches_ready", x->last.batches_ready);
    put(o, "ready_bytes", x->last.ready_bytes);
    put(o, "in_flight_bytes", x->last.in_flight_bytes);
    put(o, "age_ms", x->last.age_ms);
    put(o, "reported_ms_ago", now_ms - x->reported_at_ms);
    put(o, "recent_ms", x->recent_ms);
    for (unsigned i = 0; i < CAUSES; i++) {
        put(o, causes[i].name, x->waited_ms[i]);
        put(o, causes[i].recent, x->recent_waited_ms[i]);
    }
    return o;
}

uint64_t feeds_json(const struct session *s, uint64_t now_ms, json_t *list)
{
    uint64_t left_out = 0;
    list_for_each (l, &s->feeds) {
        const struct feed_entry *x = container_of(l, struct feed_entry, link);
        if (now_ms - x->reported_at_ms > REPORT_LIFE_MS)
            continue;
        json_t *o = json_array_size(list) < STATUS_FEEDS_MAX ? entry_json(s, x, now_ms) : NULL;
        if (!o || json_array_append_new(list, o) < 0)
            left_out++;
    }
    return left_out;
}
