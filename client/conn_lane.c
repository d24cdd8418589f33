/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tickets for bulk lanes. A lane's thread asks over its base; the answer comes on the base's thread, which
 * alone may touch the TLS channel that the keys come from.
 */
#include <string.h>

#include "client/clock.h"
#include "client/conn_private.h"

static int take_ticket(struct conn_ticket *t, struct err *e)
{
    struct channel *tls = t->lane->base->channel;
    struct rcur in = rcur_of(t->call.payload, t->call.payload_bytes);
    struct msg_lane_open_reply m;
    int rc = msg_lane_open_reply_decode(&in, &m, e);
    if (rc == 0)
        rc = rcur_end(&in, "lane_open_reply", e);
    if (rc < 0)
        return rc;
    check(tls); /* a good answer runs its `done` before anything else happens to the connection */
    t->id = m.ticket;
    rc = channel_export(tls, LANE_LABEL, &t->id, sizeof t->id, &t->keys, sizeof t->keys);
    return rc < 0 ? err_set(e, ERR_UNSUPPORTED, "the TLS connection gives no keys for a bulk lane") : 0;
}

/* On the base's thread. Once `done` is seen and the lock is free, t may be gone. */
static void answered(struct call *call)
{
    struct conn_ticket *t = container_of(call, struct conn_ticket, call);
    struct conn *lane = t->lane;
    struct err e;
    if (call->err.class == ERR_NONE && take_ticket(t, &e) < 0)
        call->err = e;
    call_free(call);
    pthread_mutex_lock(&lane->lock);
    t->done = true;
    conn_wake(lane);
    pthread_cond_broadcast(&lane->changed);
    pthread_mutex_unlock(&lane->lock);
}

static bool is_done(struct conn_ticket *t)
{
    pthread_mutex_lock(&t->lane->lock);
    bool done = t->done;
    pthread_mutex_unlock(&t->lane->lock);
    return done;
}

int conn_ticket_get(struct conn *lane, struct conn_ticket *t, struct err *e)
{
    *t = (struct conn_ticket){
        .call = {.opcode = OP_LANE_OPEN, .timeout_ms = lane->connect_timeout_ms, .done = answered},
        .lane = lane};
    conn_submit(lane->base, &t->call, SLICE(NULL, 0), SLICE(NULL, 0));
    while (!is_done(t)) {
        if (conn_idle(lane, UINT64_MAX))
            continue;
        conn_cancel(lane->base, &t->call);
        pthread_mutex_lock(&lane->lock);
        while (!t->done) /* soon: cancelling is quick */
            pthread_cond_wait(&lane->changed, &lane->lock);
        pthread_mutex_unlock(&lane->lock);
    }
    if (t->call.err.class == ERR_NONE)
        return 0;
    *e = t->call.err;
    return -t->call.err.errnum;
}
