/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads along what a real client and the server say to each other, and tells the model: what was asked when
 * it is sent, what was told when the client has received it.
 */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/ghost.h"
#include "tests/sim/process.h"

#define KEPT_BYTES_MAX (64u << 10) /* of a payload that the model is told of */
#define ASKED_MAX      512u

struct stream { /* one direction */
    uint8_t header[FRAME_HEADER_BYTES];
    size_t header_bytes, left; /* left: of the payload */
    struct frame_header h;
    struct buf payload;
};

struct asked {
    uint64_t id;
    uint16_t opcode;
    struct model_run *run;
    struct id attempt, segment;
    uint64_t step;
    uint32_t rank, world;
};

struct tap {
    struct world *w;
    enum client_role role;
    struct stream to, from;
    struct asked asked[ASKED_MAX]; /* those that the model is told of; a ring */
    size_t asked_count;
    struct buf said;
};

struct tap *tap_new(struct world *w, enum client_role role)
{
    struct tap *t = calloc(1, sizeof *t);
    check(t);
    t->w = w;
    t->role = role;
    return t;
}

void tap_free(struct tap *t)
{
    if (!t)
        return;
    if (t->w->faulty && t->said.n && t->w->ghosts_left && draw_below(&t->w->rng, 2))
        ghost_begin(t->w, t->role, &t->said);
    buf_free(&t->said);
    buf_free(&t->to.payload);
    buf_free(&t->from.payload);
    free(t);
}

/* ---- what the model hears ---- */

/* NULL: of a dataset that the model does not know. */
static struct model_run *run_of(struct world *w, const struct id *id)
{
    for (int i = 0; i < 2; i++)
        if (w->model.run[i].id_told && id_equal(&w->model.run[i].id, id))
            return &w->model.run[i];
    return NULL;
}

/* What the request is about; false: nothing that the model is told of. */
static bool read_asked(struct world *w, struct rcur in, struct asked *a, bool *approves)
{
    struct msg_join join;
    struct msg_commit commit;
    struct msg_attempt attempt;
    if (a->opcode == OP_JOIN) {
        check(msg_join_decode(&in, &join, NULL) == 0);
        a->run = run_of(w, &join.run_id);
        a->attempt = join.attempt;
        a->segment = join.segment;
        a->rank = join.rank;
        a->step = join.step;
    } else if (a->opcode == OP_COMMIT) {
        check(msg_commit_decode(&in, &commit, NULL) == 0);
        a->run = run_of(w, &commit.run_id);
        a->attempt = commit.attempt;
        a->step = commit.step;
        *approves = commit.verdict == ERR_NONE;
    } else if (a->opcode == OP_ATTEMPT) {
        check(msg_attempt_decode(&in, &attempt, NULL) == 0);
        a->run = run_of(w, &attempt.run_id);
        a->attempt = attempt.attempt;
        a->world = attempt.world;
    }
    return a->run != NULL;
}

static void ask(struct tap *t, const struct frame_header *h, struct rcur in)
{
    struct model *m = &t->w->model;
    struct asked a = {.id = h->request_id, .opcode = h->opcode};
    bool approves = false;
    if (!read_asked(t->w, in, &a, &approves))
        return;
    struct segment_header part = {
        .segment_id = a.segment, .attempt = a.attempt, .step = a.step, .rank = a.rank};
    if (a.opcode == OP_JOIN)
        model_join_asked(m, a.run, &part);
    else if (a.opcode == OP_ATTEMPT)
        model_attempt_asked(m, a.run, &a.attempt);
    else if (approves)
        model_verdict_asked(m, a.run, &a.attempt, a.step);
    t->asked[t->asked_count++ % ASKED_MAX] = a;
}

static void told(struct tap *t, const struct asked *a, struct rcur in)
{
    struct model *m = &t->w->model;
    struct msg_join_reply join;
    struct msg_commit_reply commit;
    struct msg_attempt_reply attempt;
    if (a->opcode == OP_JOIN) {
        check(msg_join_reply_decode(&in, &join, NULL) == 0);
        if (join.state == JOIN_DURABLE)
            model_durable_told(m, a->run, &a->attempt, a->step, &a->segment, join.sequence);
    } else if (a->opcode == OP_COMMIT) {
        check(msg_commit_reply_decode(&in, &commit, NULL) == 0);
        if (commit.sequence)
            model_durable_told(m, a->run, &a->attempt, a->step, NULL, commit.sequence);
    } else {
        check(msg_attempt_reply_decode(&in, &attempt, NULL) == 0);
        model_attempt_told(m, a->run, &a->attempt, attempt.number, a->world);
    }
}

static void answer(struct tap *t, const struct frame_header *h, struct rcur in)
{
    for (size_t i = 0; i < t->asked_count && i < ASKED_MAX; i++) {
        struct asked *a = &t->asked[i];
        struct err e = {0};
        if (a->id != h->request_id)
            continue;
        a->id = 0;
        if (!(h->flags & FRAME_ERROR))
            told(t, a, in);
        else if (err_of_msg(&in, &e) < 0 && a->opcode == OP_JOIN &&
                 (e.class == ERR_FENCED || e.class == ERR_NOT_FOUND))
            model_segment_refused(&t->w->model, a->run, &a->segment);
        return;
    }
}

/* ---- frames ---- */

static void frame_done(struct tap *t, struct stream *s)
{
    struct rcur in = rcur_of(s->payload.p, s->payload.n);
    check(!s->payload.failed);
    if (s == &t->to)
        ask(t, &s->h, in);
    else if (s->h.flags & FRAME_RESPONSE)
        answer(t, &s->h, in);
    s->header_bytes = 0;
    buf_reset(&s->payload);
}

static void read_along(struct tap *t, struct stream *s, const uint8_t *p, size_t n)
{
    while (n > 0) {
        bool in_header = s->header_bytes < FRAME_HEADER_BYTES;
        size_t want = in_header ? FRAME_HEADER_BYTES - s->header_bytes : s->left, take = n < want ? n : want;
        if (in_header) {
            memcpy(s->header + s->header_bytes, p, take);
            s->header_bytes += take;
        } else {
            s->left -= take;
            if (s->payload.n + take <= KEPT_BYTES_MAX)
                buf_put(&s->payload, p, take);
        }
        p += take;
        n -= take;
        if (in_header && s->header_bytes == FRAME_HEADER_BYTES) {
            check(frame_header_decode(s->header, &s->h, NULL) == 0);
            s->left = s->h.payload_bytes;
        }
        if (s->header_bytes == FRAME_HEADER_BYTES && s->left == 0)
            frame_done(t, s);
    }
}

void tap_sent(struct tap *t, const uint8_t *p, size_t n)
{
    if (t->w->ghosts_left && t->said.n < GHOST_BYTES_MAX)
        buf_put(&t->said, p, n);
    read_along(t, &t->to, p, n);
}

void tap_received(struct tap *t, const uint8_t *p, size_t n)
{
    read_along(t, &t->from, p, n);
}
