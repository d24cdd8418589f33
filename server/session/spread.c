/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections are spread over the loops. The kernel gives them to listeners by chance, so two of them, or
 * both lanes of a client, would share one loop half of the time while another has nothing to do. The first
 * bytes tell what a connection will be; then, if another loop has fewer of that kind, it goes there, once,
 * with these bytes.
 */
#include <stdlib.h>
#include <string.h>

#include "server/session/session.h"

struct move {
    struct loop_msg msg;
    struct worker *to;
    enum session_kind kind;
    int fd;
    unsigned address;
    size_t n;
    uint8_t bytes[];
};

/* Of several that have as few, the one whose turn it is: so the connections of one client, which come one
 * after the other, are dealt out evenly whatever else is there. */
static struct worker *least_loaded(const struct worker *w, enum session_kind kind)
{
    struct server *sv = w->server;
    struct worker *best = NULL;
    size_t last = atomic_load(&sv->spread_last[kind]);
    for (size_t i = 1; i <= sv->worker_count; i++) {
        struct worker *next = &sv->workers[(last + i) % sv->worker_count];
        if (!best || atomic_load(&next->placed[kind]) < atomic_load(&best->placed[kind]))
            best = next;
    }
    check(best); /* there is a worker at least */
    atomic_store(&sv->spread_last[kind], best->number);
    return best;
}

void session_displace(struct session *s)
{
    if (s->spread)
        atomic_fetch_sub(&s->w->placed[s->kind], 1);
}

static void go_home(struct loop_msg *m)
{
    struct move *v = container_of(m, struct move, msg);
    struct server *sv = v->to->server;
    free(v);
    atomic_fetch_sub(&sv->moves, 1);
    server_try_free(sv);
}

static void arrive(struct loop_msg *m)
{
    struct move *v = container_of(m, struct move, msg);
    session_accept(v->to, v->fd, v->address, SLICE(v->bytes, v->n));
    atomic_fetch_sub(&v->to->placed[v->kind], 1); /* now it counts for itself */
    m->run = go_home;
    loop_post(v->to->server->workers[0].loop, m);
}

static enum session_kind kind_of(const struct session *s)
{
    return s->w->tls && s->recv_buf[0] == (uint8_t)LANE_MAGIC ? KIND_LANE : KIND_TLS;
}

void session_place(struct session *s)
{
    s->spread = true;
    s->kind = kind_of(s);
    atomic_fetch_add(&s->w->placed[s->kind], 1);
}

bool session_spread(struct session *s, size_t n)
{
    if (s->spread)
        return false;
    enum session_kind kind = kind_of(s);
    struct worker *to = s->w->stopping ? s->w : least_loaded(s->w, kind);
    struct move *v = to != s->w ? malloc(sizeof *v + n) : NULL;
    if (!v) {
        session_place(s);
        return false;
    }
    *v = (struct move){.msg.run = arrive, .to = to, .kind = kind, .fd = s->fd, .address = s->address, .n = n};
    atomic_fetch_add(&to->placed[kind], 1); /* already, so that others that come now go elsewhere */
    memcpy(v->bytes, s->recv_buf, n);
    loop_release(s->w->loop, s->fd);
    atomic_fetch_add(&s->w->server->moves, 1);
    session_leave(s);
    loop_post(to->loop, &v->msg);
    return true;
}
