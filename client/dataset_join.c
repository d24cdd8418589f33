/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One process joins all ranks of its version. A join is answered when the commit is durable, so joins stand
 * open side by side; the server takes only so many requests of one connection, so of a large dataset only the
 * newest stay open: an older one is given up once it has been sent, which leaves its part joined.
 *
 * The server asks one of them to check the set. What there is to check, this process has written itself: each
 * part must be the one that it sealed.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/dataset_import.h"
#include "client/dataset_wait.h"
#include "format/wire.h"

#define JOINS_OPEN_MAX 48u

struct joining;

enum join_at {
    TO_SUBMIT,
    OPEN,
    GIVEN_UP, /* joined; its answer is not waited for */
};

struct join_call {
    struct call call;
    struct joining *j;
    uint32_t rank;
    enum join_at at;
};

struct joining {
    struct import *im;
    struct conn *conn;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct join_call *ranks;
    uint32_t todo, open; /* how many are TO_SUBMIT, and how many calls have not ended */
    uint64_t lost_ms;    /* when the connection was first found lost; 0: it is not */
    bool check_asked;    /* a rank was asked, the parts of its reply are kept */
    struct buf check_parts;
    bool durable;
    uint64_t sequence;
    bool failed;
    struct err err;
};

static void fail(struct joining *j, const struct err *e)
{
    if (!j->failed) {
        j->failed = true;
        j->err = *e;
    }
}

/* With the lock held. */
static void submit_again(struct joining *j, struct join_call *jc)
{
    jc->at = TO_SUBMIT;
    j->todo++;
}

/* With the lock held. */
static void take_reply(struct joining *j, struct join_call *jc)
{
    struct rcur in = rcur_of(jc->call.payload, jc->call.payload_bytes);
    struct msg_join_reply m;
    struct err e = {0};
    j->lost_ms = 0;
    if (msg_join_reply_decode(&in, &m, &e) < 0) {
        fail(j, &e);
    } else if (m.state == JOIN_DURABLE) {
        j->durable = true;
        j->sequence = m.sequence;
    } else if (m.state == JOIN_CHECK) {
        buf_reset(&j->check_parts);
        buf_put(&j->check_parts, m.parts.p, m.parts.n);
        if (buf_end(&j->check_parts, "the set of parts", &e) < 0) {
            fail(j, &e);
        } else {
            j->check_asked = true;
            submit_again(j, jc);
        }
    } else {
        err_set(&e, ERR_PROTOCOL, "the server answered a join with unknown state %u", m.state);
        fail(j, &e);
    }
}

/* With the lock held. A join may be repeated, so a lost connection costs nothing but time. */
static void take_error(struct joining *j, struct join_call *jc)
{
    const struct err *e = &jc->call.err;
    if (jc->at == GIVEN_UP && e->class == ERR_CANCELLED)
        return;
    uint64_t now = clock_ms();
    if (e->class == ERR_NETWORK && j->lost_ms == 0)
        j->lost_ms = now;
    if (e->class == ERR_NETWORK && now - j->lost_ms < client_options(j->im->client)->reconnect_ms)
        submit_again(j, jc);
    else
        fail(j, e);
}

static void on_joined(struct call *call)
{
    struct join_call *jc = container_of(call, struct join_call, call);
    struct joining *j = jc->j;
    pthread_mutex_lock(&j->lock);
    if (call->err.class == ERR_NONE)
        take_reply(j, jc);
    else
        take_error(j, jc);
    call_free(call);
    j->open--;
    pthread_cond_signal(&j->changed);
    pthread_mutex_unlock(&j->lock);
}

/* With the lock held, which is free while the request is handed over. */
static int submit_join(struct joining *j, struct join_call *jc, struct err *e)
{
    struct import *im = j->im;
    const struct commit_part *p = &im->parts[jc->rank];
    struct msg_join m = {.run_id = im->run.run_id,
                         .step = im->step,
                         .attempt = im->attempt,
                         .rank = jc->rank,
                         .world = im->table.count,
                         .segment = p->segment,
                         .segment_bytes = p->segment_bytes,
                         .plain_bytes = im->table.shards[jc->rank].bytes,
                         .labels = SLICE(im->labels.p, im->labels.n)};
    memcpy(m.index_digest.bytes, p->index_digest, sizeof m.index_digest.bytes);
    struct buf message = {0};
    msg_join_encode(&m, &message);
    int rc = buf_end(&message, "join", e);
    if (rc == 0) {
        jc->call = (struct call){.opcode = OP_JOIN, .done = on_joined};
        jc->at = OPEN;
        j->todo--;
        j->open++;
        pthread_mutex_unlock(&j->lock);
        conn_submit(j->conn, &jc->call, SLICE(message.p, message.n), SLICE(NULL, 0));
        pthread_mutex_lock(&j->lock);
    }
    buf_free(&message);
    return rc;
}

/* Is each part of the set the one that was sealed here? */
static int check_set(const struct joining *j, struct err *e)
{
    struct rcur in = rcur_of(j->check_parts.p, j->check_parts.n);
    for (uint32_t i = 0; i < j->im->table.count; i++) {
        const struct commit_part *own = &j->im->parts[i];
        struct msg_join_part m;
        int rc = msg_join_part_decode(&in, &m, e);
        if (rc < 0)
            return rc;
        if (m.rank != i || !id_equal(&m.segment, &own->segment) || m.segment_bytes != own->segment_bytes ||
            memcmp(m.index_digest.bytes, own->index_digest, SHA256_BYTES) != 0)
            return err_set(e, ERR_MISMATCH, "the server holds another part for shard %u than was imported",
                           i);
    }
    return rcur_end(&in, "parts of a join", e);
}

static int give_verdict(struct joining *j, struct err *e)
{
    struct err found = {0};
    int checked = check_set(j, &found);
    struct msg_commit m = {.run_id = j->im->run.run_id,
                           .step = j->im->step,
                           .attempt = j->im->attempt,
                           .world = j->im->table.count,
                           .verdict = checked < 0 ? (uint32_t)found.class : 0,
                           .text = slice_str(found.text)};
    struct buf message = {0};
    msg_commit_encode(&m, &message);
    struct call call = {0};
    int rc = buf_end(&message, "commit", e);
    if (rc == 0)
        rc = conn_call(j->conn, OP_COMMIT, SLICE(message.p, message.n), SLICE(NULL, 0), 0, &call, NULL, e);
    call_free(&call);
    buf_free(&message);
    if (checked < 0) {
        if (e)
            *e = found;
        return checked;
    }
    return rc;
}

/* Requests of a connection are sent in the order they were submitted: once this one is answered, so have all
 * joins before it been. */
static int flush(struct joining *j, struct err *e)
{
    struct call call = {0};
    pthread_mutex_unlock(&j->lock);
    int rc = conn_call(j->conn, OP_PING, SLICE(NULL, 0), SLICE(NULL, 0), 0, &call, NULL, e);
    call_free(&call);
    pthread_mutex_lock(&j->lock);
    return rc;
}

/* With the lock held: gives up the open joins of ranks below `below`. Their done waits for the lock. */
static void give_up(struct joining *j, uint32_t below)
{
    for (uint32_t i = 0; i < below; i++) {
        if (j->ranks[i].at != OPEN)
            continue;
        j->ranks[i].at = GIVEN_UP;
        conn_cancel(j->conn, &j->ranks[i].call);
    }
}

/* With the lock held: room for more joins, at the cost of the oldest. */
static int make_room(struct joining *j, uint32_t rank, struct err *e)
{
    int rc = flush(j, e);
    if (rc < 0)
        return rc;
    give_up(j, rank - JOINS_OPEN_MAX / 2);
    while (j->open > JOINS_OPEN_MAX / 2 + 1 && !j->failed && !j->durable)
        pthread_cond_wait(&j->changed, &j->lock);
    return 0;
}

static int submit_due(struct joining *j, struct err *e)
{
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < j->im->table.count && j->todo && !j->failed && !j->durable; i++) {
        if (j->ranks[i].at != TO_SUBMIT)
            continue;
        if (j->open >= JOINS_OPEN_MAX && i > JOINS_OPEN_MAX)
            rc = make_room(j, i, e);
        if (rc == 0 && !j->failed && !j->durable)
            rc = submit_join(j, &j->ranks[i], e);
    }
    return rc;
}

/* With the lock held, until durable or failed. */
static int follow(struct joining *j, struct err *e)
{
    int rc = 0;
    while (rc == 0 && !j->durable && !j->failed) {
        if (j->check_asked) {
            j->check_asked = false;
            pthread_mutex_unlock(&j->lock);
            rc = give_verdict(j, e);
            pthread_mutex_lock(&j->lock);
        } else if (j->todo) {
            rc = submit_due(j, e);
        } else if (j->open) {
            pthread_cond_wait(&j->changed, &j->lock);
        } else {
            rc = err_set(e, ERR_PROTOCOL, "the server ended every join without an outcome");
        }
    }
    return rc;
}

static int outcome(const struct joining *j, uint64_t *version, struct err *e)
{
    if (j->durable) {
        *version = j->sequence;
        return 0;
    }
    *e = j->err;
    return -j->err.errnum;
}

int import_join(struct import *im, struct conn *conn, uint64_t *version, struct err *e)
{
    uint32_t world = im->table.count;
    struct joining j = {.im = im,
                        .conn = conn,
                        .lock = PTHREAD_MUTEX_INITIALIZER,
                        .changed = PTHREAD_COND_INITIALIZER,
                        .ranks = calloc(world, sizeof *j.ranks),
                        .todo = world};
    if (!j.ranks)
        return err_set(e, ERR_NO_MEMORY, "no memory for joining %u shards", world);
    for (uint32_t i = 0; i < world; i++)
        j.ranks[i] = (struct join_call){.j = &j, .rank = i, .at = TO_SUBMIT};
    pthread_mutex_lock(&j.lock);
    int rc = follow(&j, e);
    give_up(&j, world);
    while (j.open) /* calls end before their memory goes; each is bounded */
        pthread_cond_wait(&j.changed, &j.lock);
    if (rc == 0)
        rc = outcome(&j, version, e);
    pthread_mutex_unlock(&j.lock);
    buf_free(&j.check_parts);
    free(j.ranks);
    pthread_cond_destroy(&j.changed);
    pthread_mutex_destroy(&j.lock);
    return rc;
}

static void send_and_forget(struct conn *conn, uint16_t opcode, struct buf *message)
{
    struct call call = {0};
    if (!message->failed) {
        int rc = conn_call(conn, opcode, SLICE(message->p, message->n), SLICE(NULL, 0), 0, &call, NULL, NULL);
        (void)rc; /* the server collects what an abandoned attempt left in any case */
    }
    call_free(&call);
    buf_free(message);
}

void import_abort(struct import *im, struct conn *conn, const struct err *why)
{
    bool any = false;
    for (uint32_t i = 0; i < im->table.count; i++)
        any = any || im->sealed[i];
    if (!any)
        return;
    struct msg_save_abort m = {.run_id = im->run.run_id,
                               .step = im->step,
                               .attempt = im->attempt,
                               .rank = 0,
                               .text = slice_str(why->text)};
    struct buf message = {0};
    msg_save_abort_encode(&m, &message);
    send_and_forget(conn, OP_SAVE_ABORT, &message);
    for (uint32_t i = 0; i < im->table.count; i++) {
        if (!im->sealed[i])
            continue;
        msg_segment_discard_encode(&(struct msg_segment_discard){.segment = im->parts[i].segment}, &message);
        send_and_forget(conn, OP_SEGMENT_DISCARD, &message);
    }
}
