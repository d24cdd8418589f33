/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests that the store serves. A call travels to the store's loop as a message, is served there, and comes
 * back as one; between, the store's thread owns `op` and nothing else of it. A cancellation travels behind it
 * the same way and comes back too, so that the call is freed when neither is on the road.
 *
 * Calls that move data (chunks, scrub) first pass the scheduler of the session's loop.
 */
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "format/index.h"
#include "server/obs/metrics.h"
#include "server/session/session.h"

/* The store answers deadlines itself, with the better text; this much later we answer for it. */
#define GRACE_MS 500u
/* A scrub is charged so much for each step that it takes. */
#define SCRUB_STEP_BYTES (4u << 20)

struct call {
    struct request r;
    char tenant[TENANT_NAME_BYTES_MAX + 1];
    struct loop *home; /* the session's loop */
    struct store *store;
    struct loop *store_loop;
    struct sched_item item;
    bool posted, returned;         /* to the store; from it */
    bool cancel_posted, cancelled; /* likewise */
    bool continue_posted;          /* and not back yet */
    bool has_more;                 /* a frame was sent on; the store waits to be told to go on */
    struct loop_msg submit_msg, back_msg, more_msg, continue_msg, cancel_msg;
    bool op_done;       /* store's thread */
    struct store_op op; /* store's thread while posted and not returned */
};

static struct call *of_request(struct request *r)
{
    return container_of(r, struct call, r);
}

static void call_free(struct call *c)
{
    sched_release(c->r.s->w->sched, &c->item);
    buf_free(&c->op.reply);
    request_free(&c->r);
}

/* On the session's loop. */

static void settled(struct call *c)
{
    struct session *s = c->r.s;
    sched_release(s->w->sched, &c->item);
    if (c->returned && c->cancel_posted == c->cancelled && !c->continue_posted)
        call_free(c);
    worker_pump(s->w);
    session_settle(s);
}

static void cancel_back(struct loop_msg *m)
{
    struct call *c = container_of(m, struct call, cancel_msg);
    c->cancelled = true;
    settled(c);
}

static void continue_back(struct loop_msg *m)
{
    struct call *c = container_of(m, struct call, continue_msg);
    c->continue_posted = false;
    if (c->returned)
        settled(c);
    else
        session_settle(c->r.s);
}

static void call_back(struct loop_msg *m)
{
    struct call *c = container_of(m, struct call, back_msg);
    struct server *sv = c->r.s->w->server;
    c->returned = true;
    if (c->op.err.class == ERR_NONE)
        request_answer(&c->r, SLICE(c->op.reply.p, c->op.reply.n), (struct slice){0});
    else
        request_fail(&c->r, &c->op.err);
    if (c->op.err.class == ERR_NONE && c->r.op->opcode == OP_TENANT_ADD)
        server_tenants_changed(sv);
    settled(c);
}

static void more_back(struct loop_msg *m)
{
    struct call *c = container_of(m, struct call, more_msg);
    request_more(&c->r, SLICE(c->op.reply.p, c->op.reply.n), (struct slice){0});
    buf_reset(&c->op.reply);
    c->has_more = true;
    sched_release(c->r.s->w->sched, &c->item);
    if (!c->r.answered) /* the time between two findings counts, not that of the whole */
        loop_timer_set(c->home, &c->r.timer, loop_now_ms(c->home) + c->r.deadline_ms + GRACE_MS);
    worker_pump(c->r.s->w);
    session_settle(c->r.s);
}

/* On the store's loop. */

static void op_done(struct store_op *op)
{
    struct call *c = container_of(op, struct call, op);
    c->op_done = true;
    c->back_msg.run = call_back;
    loop_post(c->home, &c->back_msg);
}

static void op_more(struct store_op *op)
{
    struct call *c = container_of(op, struct call, op);
    c->more_msg.run = more_back;
    loop_post(c->home, &c->more_msg);
}

static void run_submit(struct loop_msg *m)
{
    struct call *c = container_of(m, struct call, submit_msg);
    store_submit(c->store, &c->op);
}

static void run_continue(struct loop_msg *m)
{
    struct call *c = container_of(m, struct call, continue_msg);
    if (!c->op_done)
        store_continue(c->store, &c->op);
    m->run = continue_back;
    loop_post(c->home, m);
}

static void run_cancel(struct loop_msg *m)
{
    struct call *c = container_of(m, struct call, cancel_msg);
    if (!c->op_done)
        store_cancel(c->store, &c->op);
    m->run = cancel_back;
    loop_post(c->home, m);
}

/* On the session's loop again. */

static void post(struct call *c)
{
    c->posted = true;
    c->submit_msg.run = run_submit;
    loop_post(c->store_loop, &c->submit_msg);
}

static void admitted(struct sched_item *item)
{
    struct call *c = container_of(item, struct call, item);
    if (!c->posted) {
        post(c);
        return;
    }
    c->continue_posted = true;
    c->continue_msg.run = run_continue;
    loop_post(c->store_loop, &c->continue_msg);
}

static void call_cancel(struct request *r, const struct err *why)
{
    struct call *c = of_request(r);
    loop_timer_clear(c->home, &r->timer);
    if (!c->posted) {
        request_fail(r, why);
        call_free(c);
        return;
    }
    if (c->cancel_posted)
        return;
    c->cancel_posted = true;
    if (sched_is_queued(&c->item))
        sched_release(r->s->w->sched, &c->item);
    c->has_more = false;
    c->cancel_msg.run = run_cancel;
    loop_post(c->store_loop, &c->cancel_msg);
}

static void call_timer(struct loop_timer *t)
{
    struct call *c = container_of(t, struct call, r.timer);
    struct session *s = c->r.s;
    struct err e = {0};
    err_set(&e, ERR_TIMEOUT, "%s was not done within its deadline of %u ms", opcode_name(c->r.op->opcode),
            c->r.deadline_ms);
    metric_add(METRIC_requests_cancelled, 1);
    request_fail(&c->r, &e);
    call_cancel(&c->r, &e);
    session_settle(s);
}

/* Are the tail's bytes what their entry says? Here, so that the store's thread need not look at them. */
static int check_chunk(const struct call *c, const struct frame *f, struct err *e)
{
    struct rcur in = rcur_of(c->r.payload.p, c->r.payload.n);
    struct msg_segment_chunk m;
    struct chunk_entry entry;
    char segment[2 * ID_BYTES + 1];
    int r = msg_segment_chunk_decode(&in, &m, e);
    if (r < 0)
        return r;
    r = chunk_entry_decode(m.entry.bytes, m.number, &entry, e);
    if (r < 0)
        return r;
    hex_encode(m.segment.bytes, ID_BYTES, segment);
    if (in.left != entry.stored_bytes)
        return err_set(e, ERR_PROTOCOL, "segment %s, chunk %u: its entry says %u bytes and %zu came with it",
                       segment, m.number, entry.stored_bytes, in.left);
    check(in.left == 0 || (uintptr_t)in.p % BLOCK_BYTES == 0); /* as channel.h promises */
    struct hash128 found = f->summed ? f->tail_hash : hash128(in.p, in.left);
    if (in.left == 0 || memcmp(&found, &entry.stored_hash, sizeof found) == 0)
        return 0;
    metric_add(METRIC_chunks_refused, 1);
    return err_set(e, ERR_CORRUPT,
                   "segment %s, chunk %u: the %zu bytes received do not match their checksum; send it again",
                   segment, m.number, in.left);
}

/* A join may wait for the other ranks for as long as it says, at most the store's bound. */
static uint32_t join_deadline(const struct call *c)
{
    struct msg_join m;
    struct rcur in = rcur_of(c->r.payload.p, c->r.payload.n);
    uint32_t bound_ms = c->r.s->w->server->limits.join_wait_ms;
    if (msg_join_decode(&in, &m, NULL) < 0)
        return c->r.deadline_ms;
    uint32_t wait_ms = m.wait_ms && m.wait_ms < bound_ms ? m.wait_ms : bound_ms;
    return wait_ms + 5000;
}

static void fill_op(struct call *c)
{
    struct session *s = c->r.s;
    strcpy(c->tenant, s->identity.tenant);
    c->op.tenant = c->tenant;
    c->op.role = s->identity.role;
    c->op.opcode = c->r.op->opcode;
    c->op.payload = c->r.payload.p;
    c->op.payload_bytes = c->r.payload.n;
    c->op.more = op_more;
    c->op.done = op_done;
    /* A stream's deadline is between its frames; the session's timer watches that. */
    if (c->r.op->class != OPCLASS_SCRUB)
        c->op.deadline_at_ms = c->r.started_ms + c->r.deadline_ms;
}

void call_handle(struct session *s, const struct op_entry *op, struct frame *f)
{
    struct err e = {0};
    struct request *r = request_begin(s, op, f, sizeof(struct call), call_cancel, call_timer);
    if (!r)
        return;
    struct call *c = of_request(r);
    c->home = s->w->loop;
    c->store = s->w->server->o.store;
    c->store_loop = s->w->server->o.loops[0].loop;
    c->item.admit = admitted;
    if (op->opcode == OP_JOIN)
        r->deadline_ms = join_deadline(c);
    if (op->opcode == OP_SEGMENT_CHUNK && check_chunk(c, f, &e) < 0) {
        request_fail(r, &e);
        call_free(c);
        return;
    }
    fill_op(c);
    loop_timer_set(c->home, &r->timer, r->started_ms + r->deadline_ms + GRACE_MS);
    if (op->class == OPCLASS_CONTROL) {
        post(c);
        return;
    }
    c->item.bytes = op->class == OPCLASS_SCRUB ? SCRUB_STEP_BYTES : r->payload.n;
    sched_queue(s->w->sched, &c->item, op->class == OPCLASS_SCRUB ? CLASS_SCRUB : CLASS_SAVE, s->tenant,
                r->started_ms);
    worker_pump(s->w);
}

void calls_pump(struct session *s)
{
    list_for_each (l, &s->requests) {
        struct request *r = container_of(l, struct request, link);
        if (r->cancel != call_cancel)
            continue;
        if (session_output_bytes(s) > OUTPUT_HIGH_BYTES)
            return;
        struct call *c = of_request(r);
        if (!c->has_more || c->cancel_posted || c->continue_posted)
            continue;
        c->has_more = false;
        sched_queue(s->w->sched, &c->item, CLASS_SCRUB, s->tenant, loop_now_ms(s->w->loop));
    }
    worker_pump(s->w);
}
