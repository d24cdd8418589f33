/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread of one save: register the attempt, begin the part, wait for the workers, seal, join the other
 * ranks, check the set if asked to, hear the outcome. Whatever fails is told to the server, so that every
 * rank hears it, and kept for the caller.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/clock.h"
#include "client/list.h"
#include "client/saver.h"
#include "client/stage.h"
#include "format/base/log.h"

#define ABORT_TIMEOUT_MS 3000u
#define JOIN_MARGIN_MS   5000u
#define CHECKS_MAX       8 /* a rank is asked again after another was too slow; never without end */

/* ---- small calls ---- */

static int ask(struct conn *conn, uint16_t opcode, struct buf *b, uint32_t timeout_ms, struct call *call,
               struct rcur *in, struct err *e)
{
    int rc = buf_end(b, opcode_name(opcode), e);
    if (rc == 0)
        rc = conn_call(conn, opcode, SLICE(b->p, b->n), SLICE(NULL, 0), timeout_ms, call, in, e);
    buf_free(b);
    return rc;
}

int save_abort(struct larder_save *s, const struct id *run_id, enum err_class class, const char *reason,
               uint32_t timeout_ms, struct err *e)
{
    struct buf b = {0};
    struct call call;
    struct conn *conn = client_conn(s->client); /* not the one that chunks wait on */
    struct msg_save_abort m = {.run_id = *run_id,
                               .step = s->step,
                               .attempt = s->attempt,
                               .rank = s->rank,
                               .class = class,
                               .text = slice_str(reason)};
    msg_save_abort_encode(&m, &b);
    int rc = ask(conn, OP_SAVE_ABORT, &b, timeout_ms, &call, NULL, e);
    if (rc == 0)
        call_free(&call);
    return rc;
}

/* ---- attempt ---- */

static bool attempt_is_known(struct saver *v, const struct id *run_id, const struct id *attempt)
{
    bool known = false;
    pthread_mutex_lock(&v->lock);
    for (struct attempt_known *a = v->attempts; a && !known; a = a->next)
        known = id_equal(&a->run_id, run_id) && id_equal(&a->attempt, attempt);
    pthread_mutex_unlock(&v->lock);
    return known;
}

/* Once per run, attempt and client: a newer attempt fences us from then on. */
static int attempt_register(struct larder_save *s, struct conn *conn, const struct run *run, struct err *e)
{
    struct saver *v = s->saver;
    if (attempt_is_known(v, &run->run_id, &s->attempt))
        return 0;
    struct buf b = {0};
    struct call call;
    struct rcur in = {0};
    struct msg_attempt_reply reply;
    msg_attempt_encode(&(struct msg_attempt){.run_id = run->run_id, .attempt = s->attempt, .world = s->world},
                       &b);
    int rc = ask(conn, OP_ATTEMPT, &b, 0, &call, &in, e);
    if (rc < 0)
        return rc;
    rc = msg_attempt_reply_decode(&in, &reply, e);
    call_free(&call);
    struct attempt_known *a = rc == 0 ? calloc(1, sizeof *a) : NULL;
    if (a) { /* without memory it is registered again next time, which is harmless */
        *a = (struct attempt_known){.run_id = run->run_id, .attempt = s->attempt, .number = reply.number};
        pthread_mutex_lock(&v->lock);
        a->next = v->attempts;
        v->attempts = a;
        pthread_mutex_unlock(&v->lock);
    }
    return rc;
}

/* The server tells all ranks, ours among them: its join ends. */
int save_give_up(struct larder_save *s, const char *reason, struct err *e)
{
    struct run run;
    int rc = run_open(s->client, RUN_CHECKPOINTS, s->run, true, &run, e);
    if (rc < 0)
        return rc;
    rc = attempt_register(s, client_conn(s->client), &run, e);
    if (rc == 0)
        rc = save_abort(s, &run.run_id, ERR_CANCELLED, reason, s->client->options.request_timeout_ms, e);
    run_close(&run);
    return rc;
}

/* ---- the part ---- */

static int begin_part(struct larder_save *s, struct conn *conn, const struct run *run, struct err *e)
{
    struct part_writer_options o = {
        .client = s->client,
        .conn = conn,
        .run = run,
        .step = s->step,
        .attempt = s->attempt,
        .rank = s->rank,
        .world = s->world,
        .chunks = s->snapshot.chunk_count,
        .plain_bytes = s->snapshot.plain_bytes,
        .index = &s->snapshot.index,
        .level = s->level,
        .verify_percent = s->verify_percent,
        .give = saver_give,
        .give_arg = s->saver,
    };
    struct part_writer *w = NULL;
    int rc = part_writer_create(&o, &w, e);
    if (rc < 0) { /* the server tells so that the step failed already, if this rank has not heard it */
        s->told = e->class == ERR_CANCELLED || e->class == ERR_TIMEOUT;
        return rc;
    }
    struct saver *v = s->saver;
    pthread_mutex_lock(&v->lock);
    s->writer = w;
    if (s->failed)
        part_writer_fail(w, &s->err);
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
    return 0;
}

/* With one rank its own tables tell whether the part makes a checkpoint: each box must be the whole tensor.
 */
static void check_own(struct larder_save *s)
{
    struct tensor t;
    uint32_t partial = s->snapshot.partial;
    if (s->world > 1 || partial == 0)
        return;
    snapshot_get(&s->snapshot, partial - 1, &t);
    const struct index_private x = {.tensors = &t, .tensor_count = 1};
    if (index_check_set(&x, 1, &s->set_err) < 0)
        check(s->set_err.class != ERR_NONE); /* told once the part has joined */
}

/* All chunks went through the workers, or the save failed. */
static int wait_for_workers(struct larder_save *s, struct err *e)
{
    struct saver *v = s->saver;
    pthread_mutex_lock(&v->lock);
    while (!s->failed && s->handled < s->snapshot.chunk_count)
        pthread_cond_wait(&v->changed, &v->lock); /* ends: submit and workers end, with chunks or a failure */
    int rc = s->failed ? -s->err.errnum : 0;
    if (rc < 0)
        *e = s->err;
    pthread_mutex_unlock(&v->lock);
    return rc;
}

static int seal_part(struct larder_save *s, struct err *e)
{
    struct commit_part part;
    int rc = part_writer_seal(s->writer, &part, e);
    if (rc < 0)
        return rc;
    struct saver *v = s->saver;
    pthread_mutex_lock(&v->lock);
    if (s->failed) { /* cancelled meanwhile */
        *e = s->err;
        rc = -e->errnum;
    } else {
        s->part = part;
        s->sealed = true;
        v->sending = NULL; /* the next save may be staged */
    }
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
    return rc;
}

/* ---- joining ---- */

static int join_once(struct larder_save *s, struct conn *conn, const struct run *run, struct call *call,
                     struct msg_join_reply *out, struct err *e)
{
    uint32_t wait_ms = save_time_left(s, s->join_timeout_ms);
    struct buf b = {0};
    struct rcur in = {0};
    struct msg_join m = {
        .run_id = run->run_id,
        .step = s->step,
        .attempt = s->attempt,
        .rank = s->rank,
        .world = s->world,
        .segment = s->part.segment,
        .segment_bytes = s->part.segment_bytes,
        .plain_bytes = s->snapshot.plain_bytes,
        .loader = SLICE(s->loader, s->loader_bytes),
        .labels = SLICE(s->labels.p, s->labels.n),
        .wait_ms = wait_ms,
    };
    memcpy(m.index_digest.bytes, s->part.index_digest, SHA256_BYTES);
    msg_join_encode(&m, &b);
    int rc = ask(conn, OP_JOIN, &b, wait_ms + JOIN_MARGIN_MS, call, &in, e);
    if (rc < 0) {
        s->told = call->answered;
        return rc;
    }
    rc = msg_join_reply_decode(&in, out, e);
    if (rc < 0)
        call_free(call);
    return rc;
}

static int parts_of_reply(struct larder_save *s, struct slice items, struct commit_part *parts, struct err *e)
{
    struct rcur in = rcur_of(items.p, items.n);
    for (uint32_t i = 0; i < s->world; i++) {
        struct msg_join_part m;
        int rc = msg_join_part_decode(&in, &m, e);
        if (rc < 0)
            return rc;
        parts[i] =
            (struct commit_part){.rank = m.rank, .segment = m.segment, .segment_bytes = m.segment_bytes};
        memcpy(parts[i].index_digest, m.index_digest.bytes, SHA256_BYTES);
        if (m.rank != i)
            return err_set(e, ERR_PROTOCOL, "the server listed rank %u where rank %u was expected", m.rank,
                           i);
    }
    return rcur_end(&in, "the list of parts", e);
}

static int check_indexes(struct part **parts, uint32_t world, struct err *e)
{
    struct index_private *indexes = calloc(world, sizeof *indexes);
    int rc = indexes ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for checking the parts of %u ranks", world);
    for (uint32_t i = 0; rc == 0 && i < world; i++) {
        indexes[i] = *part_index(parts[i]);
        indexes[i].owned = NULL; /* the part's */
        rc = index_private_expand(&indexes[i], e);
        if (rc < 0)
            err_prepend(e, "part of rank %u", i);
    }
    if (rc == 0)
        rc = index_check_set(indexes, world, e);
    for (uint32_t i = 0; indexes && i < world; i++)
        index_private_free(&indexes[i]);
    free(indexes);
    return rc;
}

/* Do the parts of all ranks make one checkpoint? With one rank its own tables tell. */
static int check_set(struct larder_save *s, struct conn *conn, const struct run *run, struct slice items,
                     struct err *e)
{
    if (s->world == 1) {
        *e = s->set_err;
        return -e->errnum;
    }
    struct commit_part *parts = calloc(s->world, sizeof *parts);
    struct part **opened = calloc(s->world, sizeof *opened);
    int rc = parts && opened
                 ? parts_of_reply(s, items, parts, e)
                 : err_set(e, ERR_NO_MEMORY, "no memory for checking the parts of %u ranks", s->world);
    if (rc == 0) {
        struct commit commit = {.kind = RUN_CHECKPOINTS,
                                .run_id = run->run_id,
                                .step = s->step,
                                .attempt = s->attempt,
                                .world = s->world,
                                .parts = parts};
        rc = part_open_all(s->client, conn, run, &commit, opened, e);
    }
    if (rc == 0) {
        rc = check_indexes(opened, s->world, e);
        for (uint32_t i = 0; i < s->world; i++)
            part_close(opened[i]);
    }
    free(opened);
    free(parts);
    return rc;
}

/* The verdict goes to the server, which tells all ranks; we hear it by joining again. A verdict that came too
 * late (another rank was asked) is no failure of the save; one that was not given is, else all would wait. */
static int give_verdict(struct larder_save *s, struct conn *conn, const struct run *run, struct slice items,
                        struct err *e)
{
    struct err bad;
    err_clear(&bad);
    int rc = check_set(s, conn, run, items, &bad);
    struct buf b = {0};
    struct call call;
    struct msg_commit m = {.run_id = run->run_id,
                           .step = s->step,
                           .attempt = s->attempt,
                           .world = s->world,
                           .verdict = rc < 0 ? (uint32_t)bad.class : 0,
                           .text = slice_str(rc < 0 ? bad.text : "")};
    msg_commit_encode(&m, &b);
    rc = ask(conn, OP_COMMIT, &b, 0, &call, NULL, e);
    if (rc == 0)
        call_free(&call);
    return rc == -ECONNRESET || rc == -ECANCELED || rc == -ETIMEDOUT || rc == -ENOMEM ? rc : 0;
}

static int join(struct larder_save *s, struct conn *conn, const struct run *run, uint64_t *sequence,
                struct err *e)
{
    for (int checks = 0; checks <= CHECKS_MAX; checks++) {
        struct call call;
        struct msg_join_reply reply;
        int rc = join_once(s, conn, run, &call, &reply, e);
        if (rc < 0)
            return rc;
        if (reply.state == JOIN_CHECK)
            rc = give_verdict(s, conn, run, reply.parts, e);
        *sequence = reply.sequence;
        unsigned state = reply.state;
        call_free(&call);
        if (rc < 0)
            return rc;
        if (state == JOIN_DURABLE)
            return 0;
        if (state != JOIN_CHECK)
            return err_set(e, ERR_PROTOCOL, "the server answered join with state %u", state);
    }
    return err_set(e, ERR_PROTOCOL, "the server asked %d times for a check of the same set", CHECKS_MAX + 1);
}

/* ---- the whole ---- */

/* What the server told us of the save it tells all ranks. Telling it back could hit their next try of the
 * step. */
static bool others_know(const struct larder_save *s, const struct err *e)
{
    return e->class == ERR_FENCED || s->told;
}

/* The outcome of a save whose answer was lost may be durable: then it is. */
static int tell_others(struct larder_save *s, struct conn *conn, const struct run *run, uint64_t *sequence,
                       struct err *e)
{
    struct err told, ignored;
    if (others_know(s, e))
        return -e->errnum;
    err_clear(&told);
    enum err_class class = e->class == ERR_TIMEOUT ? ERR_TIMEOUT : ERR_CANCELLED;
    int rc = save_abort(s, &run->run_id, class, e->text, ABORT_TIMEOUT_MS, &told);
    if (rc == -EEXIST && s->sealed && join(s, conn, run, sequence, &ignored) == 0)
        return 0;
    if (rc < 0)
        log_warn("save of step %llu of %s: the other ranks could not be told of its failure: %s",
                 (unsigned long long)s->step, s->run, told.text);
    return -e->errnum;
}

static void keep_progress(struct larder_save *s)
{
    struct part_writer *w = s->writer;
    if (w)
        part_writer_progress(w, &s->plain_bytes, &s->stored_bytes, &s->sent_bytes, &s->chunks_sent);
}

/* Nobody uses slots or writer of the save any more; the writer is to be freed. */
static struct part_writer *wind_up(struct larder_save *s)
{
    struct saver *v = s->saver;
    pthread_mutex_lock(&v->lock);
    while (s->copying || s->staging || s->handled < s->queued)
        pthread_cond_wait(&v->changed, &v->lock);
    pthread_mutex_unlock(&v->lock);
    stage_end(s);
    pthread_mutex_lock(&v->lock);
    struct part_writer *w = s->writer;
    keep_progress(s);
    if (w && !s->failed)
        part_writer_stored(w, s->stored); /* all of it: nobody looks at what is sealed now, or forgotten */
    s->writer = NULL;
    if (v->sending == s)
        v->sending = NULL;
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
    return w;
}

/* Whoever waits is told. */
static void decide(struct larder_save *s, int rc, const struct err *e, uint64_t sequence)
{
    struct saver *v = s->saver;
    pthread_mutex_lock(&v->lock);
    if (rc == 0) {
        s->failed = false;
        s->state = LARDER_SAVE_DURABLE;
        s->sequence = sequence;
        s->durable_ns = clock_ns();
    } else {
        s->failed = true;
        s->err = *e;
        s->state = LARDER_SAVE_FAILED;
        if (!s->seen && !s->cancelled && v->unseen.class == ERR_NONE) {
            v->unseen = *e;
            v->unseen_of = s;
            err_prepend(&v->unseen, "an earlier save failed");
        }
        log_error("%s", e->text);
    }
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
}

static void retire(struct larder_save *s)
{
    struct saver *v = s->saver;
    pthread_mutex_lock(&v->lock);
    list_del(&s->link);
    list_add_tail(&v->finished, &s->link);
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
}

/* The first save makes the connection: not while the trainer waits for the copy, which has use for the cores.
 */
static void wait_for_copy(struct larder_save *s)
{
    struct saver *v = s->saver;
    pthread_mutex_lock(&v->lock);
    while (!v->conn && !s->going && !s->failed)
        pthread_cond_wait(&v->changed, &v->lock);
    pthread_mutex_unlock(&v->lock);
}

/* From the beginning to the commit. *opened: the run is, and is to be closed. */
static int save_steps(struct larder_save *s, struct conn **conn, struct run *run, bool *opened,
                      uint64_t *sequence, struct err *e)
{
    check_own(s);
    wait_for_copy(s);
    int rc = saver_conn(s->saver, conn, e);
    if (rc == 0)
        rc = run_open(s->client, RUN_CHECKPOINTS, s->run, true, run, e);
    *opened = rc == 0;
    if (rc == 0)
        rc = attempt_register(s, *conn, run, e);
    if (rc == 0)
        rc = begin_part(s, *conn, run, e);
    if (rc == 0)
        rc = wait_for_workers(s, e);
    if (rc == 0)
        rc = seal_part(s, e);
    if (rc == 0)
        rc = join(s, *conn, run, sequence, e);
    return rc;
}

/* Beside the steps, where a deadline is to be kept. */
static int watched_steps(struct larder_save *s, struct conn **conn, struct run *run, bool *opened,
                         uint64_t *sequence, struct err *e)
{
    pthread_t watch;
    int rc = s->deadline_ms ? pthread_create(&watch, NULL, save_watch, s) : 0;
    if (rc != 0)
        return err_sys(e, rc, "starting the thread that keeps a deadline");
    rc = save_steps(s, conn, run, opened, sequence, e);
    pthread_mutex_lock(&s->saver->lock);
    s->over = true;
    pthread_cond_broadcast(&s->saver->changed);
    pthread_mutex_unlock(&s->saver->lock);
    if (s->deadline_ms)
        pthread_join(watch, NULL);
    return rc;
}

void *save_run(void *arg)
{
    struct larder_save *s = arg;
    struct err e;
    struct conn *conn = NULL;
    struct run run = {0};
    uint64_t sequence = 0;
    bool opened = false;
    err_clear(&e);
    pthread_setname_np(pthread_self(), "larder-commit");
    int rc = watched_steps(s, &conn, &run, &opened, &sequence, &e);
    if (rc < 0) {
        pthread_mutex_lock(&s->saver->lock);
        if (s->failed) /* why, not what that broke */
            e = s->err;
        save_fail(s, &e);
        pthread_mutex_unlock(&s->saver->lock);
        if (opened)
            rc = tell_others(s, conn, &run, &sequence, &e);
        if (rc < 0)
            err_prepend(&e, "saving step %llu of %s, rank %u of %u", (unsigned long long)s->step, s->run,
                        s->rank, s->world);
    }
    struct part_writer *w = wind_up(s);
    if (rc == 0)
        snapshot_forget(&s->snapshot); /* the writer has sent the index */
    decide(s, rc, &e, sequence);
    part_writer_free(w); /* after that: answers that are still to come may take as long as they like */
    if (opened)
        run_close(&run);
    retire(s);
    return NULL;
}
