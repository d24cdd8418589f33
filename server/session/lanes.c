/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bulk lanes (format/lane.h). A session over TLS asks for tickets; each opens one connection, once, within
 * TICKET_MS, on whichever loop accepts it. The table of tickets is the one thing that loops share by a lock;
 * it is held for a few comparisons. A ticket is gone with its first use, whoever brings it.
 *
 * A session and its lanes share a group. When the session closes, a message visits every loop and closes the
 * lanes of the group there; a lane that comes later finds the group closed.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "format/base/secret.h"
#include "server/obs/metrics.h"
#include "server/session/session.h"

#define TICKET_MS       10000u
#define TICKETS_MAX     4096u /* of all sessions */
#define GROUP_LANES_MAX 64u   /* lanes and tickets of one session */
#define BUCKETS         256u

struct lane_group {
    _Atomic uint32_t refs, live;
    _Atomic bool closed, nudged;
    uint32_t tickets; /* under the table's lock */
    struct server *server;
    struct worker *home;
    uint64_t session; /* number of the one that opened it */
    size_t visited;
    struct loop_msg close_msg, nudge_msg;
};

struct ticket {
    struct list link;
    struct id id;
    struct lane_keys keys;
    struct identity identity;
    uint64_t features;
    struct lane_group *group; /* a reference */
    uint64_t expires_ms;
};

struct lane_table {
    pthread_mutex_t lock;
    struct list buckets[BUCKETS]; /* by the first byte; each by age */
    uint32_t count;
};

int lane_table_create(struct lane_table **out)
{
    struct lane_table *t = calloc(1, sizeof *t);
    *out = t;
    if (!t)
        return -ENOMEM;
    pthread_mutex_init(&t->lock, NULL);
    for (unsigned i = 0; i < BUCKETS; i++)
        list_init(&t->buckets[i]);
    return 0;
}

static void group_unref(struct lane_group *g)
{
    if (g && atomic_fetch_sub(&g->refs, 1) == 1)
        free(g);
}

static struct lane_group *group_ref(struct lane_group *g)
{
    atomic_fetch_add(&g->refs, 1);
    return g;
}

static void ticket_free(struct ticket *t)
{
    group_unref(t->group);
    secret_wipe(&t->keys, sizeof t->keys);
    free(t);
}

/* With the lock held. */
static void ticket_remove(struct lane_table *t, struct ticket *k)
{
    list_del(&k->link);
    k->group->tickets--;
    t->count--;
}

/* With the lock held: of a group, or, if g is NULL, what has expired. */
static void forget(struct lane_table *t, const struct lane_group *g, uint64_t now_ms)
{
    for (unsigned i = 0; i < BUCKETS && t->count > 0; i++) {
        list_for_each_safe (it, &t->buckets[i]) {
            struct ticket *k = container_of(it, struct ticket, link);
            if (g ? k->group != g : k->expires_ms > now_ms)
                continue;
            ticket_remove(t, k);
            ticket_free(k);
        }
    }
}

void lane_table_destroy(struct lane_table *t)
{
    if (!t)
        return;
    forget(t, NULL, UINT64_MAX);
    check(t->count == 0);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

bool lane_allowed(const struct server *s)
{
    return s->o.tls && !s->o.no_bulk_lane;
}

/* ---- tickets ---- */

static struct lane_group *group_of(struct session *s)
{
    if (s->lanes)
        return s->lanes;
    struct lane_group *g = calloc(1, sizeof *g);
    if (g) {
        atomic_store(&g->refs, 1);
        g->server = s->w->server;
        g->home = s->w;
        g->session = s->number;
        s->lanes = g;
    }
    return g;
}

static int ticket_add(struct session *s, struct ticket *k, struct err *e)
{
    struct lane_table *t = s->w->server->lanes;
    struct lane_group *g = k->group;
    uint64_t now_ms = loop_now_ms(s->w->loop);
    int rc = 0;
    k->expires_ms = now_ms + TICKET_MS;
    pthread_mutex_lock(&t->lock);
    if (t->count >= TICKETS_MAX || g->tickets + atomic_load(&g->live) >= GROUP_LANES_MAX)
        forget(t, NULL, now_ms);
    if (t->count >= TICKETS_MAX)
        rc = err_set(e, ERR_BUSY, "lane_open: %u tickets wait for their lanes; try again soon", t->count);
    else if (g->tickets + atomic_load(&g->live) >= GROUP_LANES_MAX)
        rc = err_set(e, ERR_BUSY, "lane_open: this session has %u lanes and tickets, the limit",
                     GROUP_LANES_MAX);
    if (rc == 0) {
        list_add_tail(&t->buckets[k->id.bytes[0]], &k->link);
        g->tickets++;
        t->count++;
    }
    pthread_mutex_unlock(&t->lock);
    return rc;
}

static int ticket_make(struct session *s, struct id *id, struct err *e)
{
    struct lane_group *g = group_of(s);
    struct ticket *k = calloc(1, sizeof *k);
    if (!g || !k) {
        free(k);
        return err_set(e, ERR_NO_MEMORY, "lane_open: no memory for a lane");
    }
    list_init(&k->link);
    loop_random(s->w->loop, &k->id, sizeof k->id);
    *id = k->id;
    k->identity = s->identity;
    k->features = s->features;
    k->group = group_ref(g);
    int rc = channel_export(s->channel, LANE_LABEL, &k->id, sizeof k->id, &k->keys, sizeof k->keys);
    rc = rc < 0 ? err_set(e, ERR_UNSUPPORTED, "lane_open: the connection gives no keys for a lane")
                : ticket_add(s, k, e);
    if (rc < 0)
        ticket_free(k);
    return rc; /* once it is in the table, any loop may take it */
}

void lane_open_handle(struct session *s, const struct op_entry *op, struct frame *f)
{
    struct err e = {0};
    struct buf b = {0};
    struct msg_lane_open_reply reply = {.life_ms = TICKET_MS};
    uint64_t id = f->header.request_id;
    struct rcur in = rcur_of(f->payload, f->header.payload_bytes);
    int rc = rcur_end(&in, "lane_open", &e);
    channel_frame_done(s->channel);
    if (rc == 0 && !(s->features & 1ull << FEATURE_BULK_LANE))
        rc =
            err_set(&e, ERR_UNSUPPORTED,
                    "lane_open: the bulk lane was not agreed on in hello (larderd.conf: bulk_lane); use TLS");
    if (rc == 0 && s->w->stopping)
        rc = err_set(&e, ERR_CANCELLED, "the server is stopping; try again when it is back");
    if (rc == 0)
        rc = ticket_make(s, &reply.ticket, &e);
    if (rc < 0) {
        metric_add(METRIC_requests_failed, 1);
        session_send_error(s, op->opcode, id, &e);
        return;
    }
    msg_lane_open_reply_encode(&reply, &b);
    if (b.failed)
        s->broken = true;
    else
        session_send(s, op->opcode, 0, id, SLICE(b.p, b.n), (struct slice){0});
    buf_free(&b);
}

/* ---- a lane comes ---- */

static struct ticket *ticket_take(struct session *s, const struct id *id)
{
    struct lane_table *t = s->w->server->lanes;
    struct ticket *found = NULL;
    pthread_mutex_lock(&t->lock);
    list_for_each (it, &t->buckets[id->bytes[0]]) {
        struct ticket *k = container_of(it, struct ticket, link);
        if (id_equal(&k->id, id)) {
            found = k;
            break;
        }
    }
    if (found)
        ticket_remove(t, found);
    pthread_mutex_unlock(&t->lock);
    if (found && (found->expires_ms <= loop_now_ms(s->w->loop) || atomic_load(&found->group->closed))) {
        ticket_free(found);
        found = NULL;
    }
    return found;
}

/* The session becomes a lane of the ticket's group; not yet authentic. */
static int become(struct session *s, struct ticket *k, struct err *e)
{
    struct channel *lane;
    s->tenant = sched_tenant(s->w->sched, k->identity.tenant);
    if (!s->tenant)
        return err_set(e, ERR_NO_MEMORY, "no memory for a bulk lane");
    int rc = channel_create_lane(true, &k->identity, &k->keys, &k->id, &lane, e);
    if (rc < 0)
        return rc;
    channel_free(s->channel);
    s->channel = lane;
    payloads_serve(s->w, lane);
    s->lane = true;
    s->features = k->features;
    s->lanes = group_ref(k->group);
    atomic_fetch_add(&s->lanes->live, 1);
    return channel_input(s->channel, s->opening, sizeof s->opening, e);
}

static int find_group(struct session *s, struct err *e)
{
    struct id id;
    int rc = lane_allowed(s->w->server)
                 ? lane_plain_decode(s->opening, &id, e)
                 : err_set(e, ERR_UNSUPPORTED, "a bulk lane was opened; none is allowed");
    if (rc < 0)
        return rc;
    struct ticket *k = ticket_take(s, &id);
    if (!k)
        return err_set(e, ERR_DENIED,
                       "a bulk lane was opened with a ticket that is unknown, used or expired");
    rc = become(s, k, e);
    ticket_free(k);
    return rc;
}

int lane_opening(struct session *s, const uint8_t **p, size_t *n, struct err *e)
{
    if (s->state != SESSION_HANDSHAKE || s->lane || !s->w->tls || *n == 0)
        return 0;
    if (!s->input_seen && (*p)[0] != (uint8_t)LANE_MAGIC) {
        s->input_seen = true;
        return 0;
    }
    if (s->input_seen && s->opening_bytes == 0)
        return 0;
    s->input_seen = true;
    size_t left = sizeof s->opening - s->opening_bytes, take = *n < left ? *n : left;
    memcpy(s->opening + s->opening_bytes, *p, take);
    s->opening_bytes += take;
    *p += take;
    *n -= take;
    return take < left ? 0 : find_group(s, e);
}

void lane_begun(struct session *s)
{
    s->identity = *channel_peer(s->channel);
    s->state = SESSION_OPEN;
    s->state_at_ms = loop_now_ms(s->w->loop);
    channel_allow_large(s->channel);
    metric_add(METRIC_sessions_open, 1);
    metric_add(METRIC_sessions_total, 1);
    metric_add(METRIC_lanes_open, 1);
    metric_add(METRIC_lanes_total, 1);
    log_info("lane opened session=%llu of=%llu tenant=%s role=%s peer=%s", (unsigned long long)s->number,
             (unsigned long long)s->lanes->session, s->identity.tenant, role_name(s->identity.role), s->peer);
    if (atomic_load(&s->lanes->closed))
        session_close(s, false, "the session that opened this lane has ended");
}

/* ---- ends ---- */

static void message_home(struct server *sv, struct lane_group *g)
{
    group_unref(g);
    atomic_fetch_sub(&sv->lane_messages, 1);
    server_try_free(sv);
}

static void close_home(struct loop_msg *m)
{
    struct lane_group *g = container_of(m, struct lane_group, close_msg);
    message_home(g->server, g);
}

static void close_here(struct loop_msg *m)
{
    struct lane_group *g = container_of(m, struct lane_group, close_msg);
    struct worker *w = &g->server->workers[g->visited++];
    list_for_each_safe (it, &w->sessions) {
        struct session *s = container_of(it, struct session, link);
        if (!s->lane || s->lanes != g)
            continue;
        session_close(s, false, "the session that opened this lane has ended");
        session_settle(s);
    }
    bool last = g->visited == g->server->worker_count;
    m->run = last ? close_home : close_here;
    loop_post(g->server->workers[last ? 0 : g->visited].loop, m);
}

void lanes_end(struct session *s)
{
    struct lane_group *g = s->lanes;
    struct lane_table *t = s->w->server->lanes;
    if (!g || s->lane || atomic_exchange(&g->closed, true))
        return;
    pthread_mutex_lock(&t->lock);
    forget(t, g, 0);
    pthread_mutex_unlock(&t->lock);
    atomic_fetch_add(&s->w->server->lane_messages, 1);
    group_ref(g)->close_msg.run = close_here;
    loop_post(s->w->server->workers[0].loop, &g->close_msg);
}

static void nudge_home(struct loop_msg *m)
{
    struct lane_group *g = container_of(m, struct lane_group, nudge_msg);
    message_home(g->server, g);
}

/* A stop goes on: the session that opened the lanes may close now. */
static void nudge(struct loop_msg *m)
{
    struct lane_group *g = container_of(m, struct lane_group, nudge_msg);
    struct session *found = NULL;
    list_for_each (it, &g->home->sessions) {
        struct session *s = container_of(it, struct session, link);
        if (s->number == g->session)
            found = s;
    }
    if (found)
        session_settle(found);
    m->run = nudge_home;
    loop_post(g->server->workers[0].loop, m);
}

void lane_left(struct session *s)
{
    struct lane_group *g = s->lanes;
    if (!g)
        return;
    s->lanes = NULL;
    if (s->lane && atomic_fetch_sub(&g->live, 1) == 1 && s->w->stopping &&
        !atomic_exchange(&g->nudged, true)) {
        atomic_fetch_add(&g->server->lane_messages, 1);
        group_ref(g)->nudge_msg.run = nudge;
        loop_post(g->home->loop, &g->nudge_msg);
    }
    group_unref(g);
}

bool lanes_at_work(const struct session *s)
{
    return s->lanes && !s->lane && atomic_load(&s->lanes->live) > 0;
}
