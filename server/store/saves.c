/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves on their way: ranks join with sealed segments, one of them checks the complete set, the commit record
 * is written, everybody is told. A save lives in memory only; after a restart the ranks join again with the
 * segments that they sealed before.
 *
 *   GATHERING --last rank joined--> COMPLETE --a waiting rank is asked--> CHECKING --good--> COMMITTING
 *       |                               ^                                     |                |
 *       |                               +---- no answer in check_wait_ms -----+                v
 *       +------ late rank, abort, newer attempt, verdict, failed write -----------------> durable or failed
 *
 * A save that is COMMITTING ends by its committer alone, which holds the run's latch.
 *
 * All hear of a failure: those who wait at once, those who still write or have sealed by their segment's
 * ghost, and those who have not begun by the failed save that is kept for them.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "format/base/utf8.h"
#include "server/store/internal.h"

/* So that the record fits one frame, in commit_get: 68 bytes for each part. */
#define SAVE_WORLD_MAX ((PAYLOAD_MAX - 16384u) / 68u)

enum save_state { SAVE_GATHERING, SAVE_COMPLETE, SAVE_CHECKING, SAVE_COMMITTING, SAVE_FAILED };

struct part {
    struct commit_part p;
    uint64_t plain_bytes;
    bool joined;
};

struct save {
    struct list link; /* run.saves, or run.failed */
    struct store *s;
    struct run *run;
    struct id attempt;
    uint64_t step;
    uint32_t world, joined;
    enum save_state state;
    struct part *parts;
    uint8_t loader[LOADER_STATE_BYTES_MAX];
    size_t loader_bytes;
    struct buf labels;
    uint32_t loader_rank, labels_rank; /* who gave them first */
    struct list waiting;               /* tasks, in the order they came */
    struct loop_timer timer;
    uint32_t checks, checker;
    struct err why;                /* FAILED */
    uint8_t heard[WORLD_MAX / 8u]; /* FAILED: ranks that know, or whose segment tells them */
};

struct join {
    struct msg_join m;
    uint64_t until_ms;
};

static void save_ask(struct save *v);

/* ---- words ---- */

/* "ranks 3, 7 of 8 have not joined" */
static const char *missing_text(const struct save *v, char *out, size_t size)
{
    uint32_t shown = 0, missing = v->world - v->joined;
    size_t n = (size_t)snprintf(out, size, missing == 1 ? "rank" : "ranks");
    for (uint32_t i = 0; i < v->world && shown < 16 && n < size; i++)
        if (!v->parts[i].joined)
            n += (size_t)snprintf(out + n, size - n, "%s %u", shown++ ? "," : "", i);
    if (n < size && shown < missing)
        n += (size_t)snprintf(out + n, size - n, " and %u more", missing - shown);
    if (n < size)
        snprintf(out + n, size - n, " of %u %s not joined", v->world, missing == 1 ? "has" : "have");
    return out;
}

static struct save *save_find(const struct list *among, const struct id *attempt, uint64_t step)
{
    for (struct list *it = among->prev; it != among; it = it->prev) {
        struct save *v = container_of(it, struct save, link);
        if (v->step == step && id_equal(&v->attempt, attempt))
            return v;
    }
    return NULL;
}

static void timer_set(struct save *v, uint32_t wait_ms)
{
    loop_timer_set(v->s->o.loop, &v->timer, loop_now_ms(v->s->o.loop) + wait_ms + 1);
}

void save_free(struct save *v)
{
    check(list_empty(&v->waiting));
    loop_timer_clear(v->s->o.loop, &v->timer);
    list_del(&v->link);
    buf_free(&v->labels);
    free(v->parts);
    free(v);
}

void saves_free(struct run *r)
{
    while (!list_empty(&r->saves))
        save_free(container_of(r->saves.next, struct save, link));
    while (!list_empty(&r->failed))
        save_free(container_of(r->failed.next, struct save, link));
}

/* ---- failing ---- */

static void heard(struct save *v, uint32_t rank)
{
    if (rank < WORLD_MAX)
        v->heard[rank / 8] |= (uint8_t)(1u << rank % 8);
}

static void failed_keep(struct save *v)
{
    struct run *r = v->run;
    loop_timer_clear(v->s->o.loop, &v->timer);
    list_del(&v->link);
    if (r->record.kind == RUN_DATASET ||
        r->destroying) { /* one client writes all shards of a dataset: it knows */
        save_free(v);
        return;
    }
    list_add_tail(&r->failed, &v->link);
    if (r->failed_count == FAILED_SAVES_MAX)
        save_free(container_of(r->failed.next, struct save, link));
    else
        r->failed_count++;
}

static void failed_forget(struct run *r, const struct id *attempt, bool other_attempts, uint64_t up_to_step)
{
    list_for_each_safe (it, &r->failed) {
        struct save *v = container_of(it, struct save, link);
        if (id_equal(&v->attempt, attempt) ? v->step <= up_to_step : other_attempts) {
            r->failed_count--;
            save_free(v);
        }
    }
}

static void save_fail(struct save *v, const struct err *why)
{
    struct store *s = v->s;
    struct run *r = v->run;
    v->state = SAVE_FAILED;
    v->why = *why;
    metric_add(METRIC_commits_failed, 1);
    log_warn("save failed tenant=%s run=%s step=%" PRIu64 " joined=%u world=%u class=\"%s\" reason=\"%s\"",
             r->tenant->record.name, run_text(r), v->step, v->joined, v->world, err_class_name(why->class),
             why->text);
    list_for_each_safe (it, &r->loose) {
        struct segment *g = container_of(it, struct segment, loose);
        if (g->state == SEGMENT_GIVEN_UP || g->step != v->step || !id_equal(&g->attempt, &v->attempt))
            continue;
        heard(v, g->rank);
        segment_give_up(s, g, why);
        g->save = NULL; /* also of one that had to stay */
    }
    while (!list_empty(&v->waiting))
        task_fail_with(container_of(v->waiting.next, struct task, queue), why);
    failed_keep(v);
}

void saves_fail(struct store *s, struct run *r, const struct id *keep, const struct err *why)
{
    (void)s;
    list_for_each_safe (it, &r->saves) {
        struct save *v = container_of(it, struct save, link);
        if (v->state != SAVE_COMMITTING && !(keep && id_equal(&v->attempt, keep)))
            save_fail(v, why);
    }
    if (keep)
        failed_forget(r, keep, true, 0);
}

bool save_failure_unheard(struct run *r, const struct id *attempt, uint64_t step, uint32_t rank,
                          struct err *why)
{
    struct save *v = save_find(&r->failed, attempt, step);
    if (!v || rank >= WORLD_MAX || (v->heard[rank / 8] >> rank % 8 & 1))
        return false;
    heard(v, rank);
    *why = v->why;
    return true;
}

/* ---- the timer of a save ---- */

static void save_timer(struct loop_timer *timer)
{
    struct save *v = container_of(timer, struct save, timer);
    struct err why = {0};
    char text[256];
    if (v->state == SAVE_GATHERING) {
        err_set(&why, ERR_TIMEOUT, "waited %u ms; %s", v->s->o.join_wait_max_ms,
                missing_text(v, text, sizeof text));
        save_fail(v, &why);
    } else if (v->state == SAVE_CHECKING && v->checks < CHECKS_MAX) {
        save_ask(v);
    } else if (v->state == SAVE_CHECKING || v->state == SAVE_COMPLETE) {
        err_set(&why, ERR_TIMEOUT,
                "all %u ranks have joined, but none checked the set (rank %u was asked last, %u were asked, "
                "%u ms each)",
                v->world, v->checker, v->checks, v->s->o.check_wait_ms);
        save_fail(v, &why);
    }
}

/* ---- join ---- */

static void durable_reply(struct task *t, uint64_t sequence)
{
    if (t->op->opcode == OP_COMMIT) {
        struct msg_commit_reply reply = {.sequence = sequence};
        msg_commit_reply_encode(&reply, &t->op->reply);
    } else {
        struct msg_join_reply reply = {.state = JOIN_DURABLE, .sequence = sequence};
        msg_join_reply_encode(&reply, &t->op->reply);
    }
    task_reply(t);
}

static void check_reply(struct save *v, struct task *t)
{
    struct buf parts = {0};
    for (uint32_t i = 0; i < v->world; i++) {
        const struct commit_part *p = &v->parts[i].p;
        struct msg_join_part item = {
            .rank = p->rank, .segment = p->segment, .segment_bytes = p->segment_bytes};
        memcpy(item.index_digest.bytes, p->index_digest, SHA256_BYTES);
        msg_join_part_encode(&item, &parts);
    }
    if (buf_end(&parts, "the set of parts", t->err) == 0) {
        struct commit_entry *last = commit_last_good(v->run);
        struct msg_join_reply reply = {.state = JOIN_CHECK,
                                       .reference = last ? last->commit.sequence : 0,
                                       .parts = SLICE(parts.p, parts.n)};
        msg_join_reply_encode(&reply, &t->op->reply);
    }
    buf_free(&parts);
    task_reply(t);
}

/* Asks the rank that came last, of those who wait, to check the set. */
static void save_ask(struct save *v)
{
    for (struct list *it = v->waiting.prev; it != &v->waiting; it = it->prev) {
        struct task *t = container_of(it, struct task, queue);
        if (t->op->opcode != OP_JOIN)
            continue;
        v->state = SAVE_CHECKING;
        v->checker = ((struct join *)t->own)->m.rank;
        v->checks++;
        timer_set(v, v->s->o.check_wait_ms);
        check_reply(v, t);
        return;
    }
    v->state = SAVE_COMPLETE;
    timer_set(v, v->s->o.join_wait_max_ms);
}

static void join_never(struct task *t)
{
    (void)t;
    check(!"a waiting join is answered, never stepped");
}

static void join_arm(struct task *t)
{
    const struct join *j = t->own;
    uint64_t at = t->op->deadline_at_ms;
    if (j && j->until_ms && (at == 0 || j->until_ms < at))
        at = j->until_ms;
    if (at)
        loop_timer_set(t->s->o.loop, &t->op->timer, at);
}

static void join_expired(struct task *t)
{
    struct join *j = t->own;
    struct save *v = save_find(&t->run->saves, &j->m.attempt, j->m.step);
    uint64_t now = loop_now_ms(t->s->o.loop);
    struct err why = {0};
    char text[256];
    check(v);
    if (v->state == SAVE_GATHERING)
        err_set(&why, ERR_TIMEOUT, "waited %llu s; %s",
                (unsigned long long)((now - t->began_ms + 500) / 1000), missing_text(v, text, sizeof text));
    else
        err_set(&why, ERR_TIMEOUT,
                "all %u ranks have joined, rank %u is checking the set; join again to hear the end", v->world,
                v->checker);
    if (t->op->deadline_at_ms && now >= t->op->deadline_at_ms) {
        task_fail_with(t, &why); /* the request's end, not the save's */
    } else if (v->state == SAVE_GATHERING) {
        save_fail(v, &why);
    } else { /* the check has a bound of its own */
        j->until_ms = 0;
        join_arm(t);
    }
}

static void save_wait(struct save *v, struct task *t)
{
    t->joining = true;
    metric_add(METRIC_joins_waiting, 1);
    t->expire = join_expired;
    task_wait(t, &v->waiting, "the other ranks", join_never);
    join_arm(t);
}

/* Takes over what the part brings for the commit record. ERR_MISMATCH naming ranks. */
static int merge_loader(struct save *v, const struct msg_join *m, struct err *why)
{
    if (m->loader.n == 0)
        return 0;
    if (v->loader_bytes == 0) {
        memcpy(v->loader, m->loader.p, m->loader.n);
        v->loader_bytes = m->loader.n;
        v->loader_rank = m->rank;
    } else if (v->loader_bytes != m->loader.n || memcmp(v->loader, m->loader.p, m->loader.n) != 0) {
        return err_set(why, ERR_MISMATCH,
                       "ranks %u and %u of step %" PRIu64
                       " say different loader positions; all ranks must save the "
                       "same one",
                       v->loader_rank, m->rank, v->step);
    }
    return 0;
}

static int merge_label(struct save *v, uint32_t rank, struct slice key, struct slice value, struct err *why)
{
    char text[128];
    struct rcur known = rcur_of(v->labels.p, v->labels.n);
    while (known.left > 0) {
        struct slice k = rcur_take16(&known), x = rcur_take16(&known);
        if (!slice_eq(k, key))
            continue;
        return slice_eq(x, value)
                   ? 0
                   : err_set(why, ERR_MISMATCH,
                             "rank %u gives the label '%s' another value than a rank before (%u was the "
                             "first to give labels)",
                             rank, err_quote(text, sizeof text, key.p, key.n), v->labels_rank);
    }
    if (v->labels.n == 0)
        v->labels_rank = rank;
    buf_put16(&v->labels, key);
    buf_put16(&v->labels, value);
    if (v->labels.n > LABELS_BYTES_MAX)
        return err_set(why, ERR_LIMIT, "the labels of all ranks together take more than %u bytes",
                       LABELS_BYTES_MAX);
    return buf_end(&v->labels, "the labels", why);
}

static int merge(struct save *v, const struct msg_join *m, struct err *why)
{
    int rc = merge_loader(v, m, why);
    struct rcur in = rcur_of(m->labels.p, m->labels.n);
    while (rc == 0 && in.left > 0) {
        struct slice key = rcur_take16(&in), value = rcur_take16(&in);
        if (in.failed)
            return err_set(why, ERR_PROTOCOL, "the labels of rank %u are cut short", m->rank);
        rc = merge_label(v, m->rank, key, value, why);
    }
    return rc;
}

static struct save *save_begin(struct store *s, struct run *r, const struct id *attempt, uint64_t step,
                               uint32_t world)
{
    struct save *v = calloc(1, sizeof *v);
    if (!v)
        return NULL;
    v->s = s;
    v->run = r;
    v->attempt = *attempt;
    v->step = step;
    v->world = world;
    v->timer.fire = save_timer;
    list_init(&v->waiting);
    list_init(&v->link);
    v->parts = calloc(world ? world : 1, sizeof *v->parts);
    if (!v->parts) {
        free(v);
        return NULL;
    }
    list_add_tail(&r->saves, &v->link);
    return v;
}

static void join_save(struct task *t, struct segment *g)
{
    struct join *j = t->own;
    const struct msg_join *m = &j->m;
    struct save *v = save_find(&t->run->saves, &m->attempt, m->step);
    struct err why = {0};
    if (!v)
        v = save_begin(t->s, t->run, &m->attempt, m->step, m->world);
    if (!v) {
        task_fail(t, ERR_NO_MEMORY, "the server has no memory for a save of %u ranks; try again later",
                  m->world);
        return;
    }
    if (v->world != m->world) {
        task_fail(t, ERR_MISMATCH,
                  "rank %u joins step %" PRIu64 " with %u ranks, the ranks before it said %u; all must agree",
                  m->rank, m->step, m->world, v->world);
        return;
    }
    struct part *p = &v->parts[m->rank];
    if (p->joined && !id_equal(&p->p.segment, &m->segment)) {
        task_fail(t, ERR_EXISTS,
                  "rank %u has joined step %" PRIu64 " with another segment; abort the save to begin anew",
                  m->rank, m->step);
        return;
    }
    if (!p->joined) {
        if (merge(v, m, &why) < 0) { /* it can never be complete */
            task_fail_with(t, &why);
            save_fail(v, &why);
            return;
        }
        *p = (struct part){.p = {.rank = m->rank, .segment = m->segment, .segment_bytes = m->segment_bytes},
                           .plain_bytes = m->plain_bytes,
                           .joined = true};
        memcpy(p->p.index_digest, m->index_digest.bytes, SHA256_BYTES);
        g->save = v;
        v->joined++;
    }
    if (v->state ==
        SAVE_GATHERING) /* those who wait see to it before; this is for when they have gone away */
        timer_set(v, t->s->o.join_wait_max_ms + 1000);
    save_wait(v, t);
    bool lost = v->state == SAVE_CHECKING && v->checker == m->rank; /* what it was asked never reached it */
    if ((v->state == SAVE_GATHERING && v->joined == v->world) || v->state == SAVE_COMPLETE || lost)
        save_ask(v);
}

/* The segment that the rank brings; NULL: the task has been failed. */
static struct segment *join_segment(struct task *t)
{
    const struct msg_join *m = &((struct join *)t->own)->m;
    struct segment *g = segment_find(t->tenant, &m->segment);
    char hex[2 * ID_BYTES + 1];
    if (g && (g->state == SEGMENT_LEAVING || g->state == SEGMENT_GIVEN_UP)) {
        if (g->why)
            task_fail_with(t, g->why);
        else
            task_fail(t, ERR_NOT_FOUND, "segment %s was given up; save the part again", id_text(&g->id, hex));
        return NULL;
    }
    if (!g || g->run != t->run || g->state == SEGMENT_MISSING) {
        task_fail(t, ERR_NOT_FOUND, "segment %s is not in the store; save the part again",
                  id_text(&m->segment, hex));
    } else if (g->state != SEGMENT_SEALED) {
        task_fail(t, ERR_INVALID, "segment %s is not sealed; seal it, then join", id_text(&g->id, hex));
    } else if (!id_equal(&g->attempt, &m->attempt) || g->step != m->step || g->rank != m->rank ||
               g->world != m->world) {
        task_fail(t, ERR_MISMATCH,
                  "segment %s was written for step %" PRIu64 ", rank %u of %u, and joins as step %" PRIu64
                  ", rank %u of %u (or for another attempt)",
                  id_text(&g->id, hex), g->step, g->rank, g->world, m->step, m->rank, m->world);
    } else if (g->file_bytes != m->segment_bytes ||
               memcmp(g->index_digest, m->index_digest.bytes, SHA256_BYTES) != 0) {
        task_fail(t, ERR_MISMATCH,
                  "segment %s has %" PRIu64 " bytes here and %" PRIu64
                  " in the request, or another index digest; save "
                  "the part again",
                  id_text(&g->id, hex), g->file_bytes, m->segment_bytes);
    } else if (g->commits > 0) {
        task_fail(t, ERR_EXISTS, "segment %s belongs to another commit already", id_text(&g->id, hex));
    } else {
        return g;
    }
    return NULL;
}

static bool join_allowed(struct task *t, const struct msg_join *m)
{
    if (m->world == 0 || m->world > SAVE_WORLD_MAX || m->rank >= m->world)
        task_fail(t, ERR_INVALID, "rank %u of %u; expected a rank below a world of 1 to %u", m->rank,
                  m->world, SAVE_WORLD_MAX);
    else if (m->loader.n > LOADER_STATE_BYTES_MAX || m->labels.n > LABELS_BYTES_MAX)
        task_fail(t, ERR_LIMIT,
                  "a loader position of %zu and labels of %zu bytes; at most %u and %u are allowed",
                  m->loader.n, m->labels.n, LOADER_STATE_BYTES_MAX, LABELS_BYTES_MAX);
    else
        return true;
    return false;
}

static bool not_read_only(struct task *t)
{
    if (!t->s->read_only)
        return true;
    task_fail(t, ERR_READ_ONLY, "the store takes no writes since a sync failed (%s)", t->s->read_only_reason);
    return false;
}

void do_join(struct task *t)
{
    struct join *j = task_own(t, sizeof *j);
    if (!j || !task_decode(t, join, &j->m) || !task_run_by_id(t, &j->m.run_id) || !join_allowed(t, &j->m))
        return;
    /* The answer to an earlier join may have been lost. */
    struct commit_entry *done = commit_of_save(t->run, &j->m.attempt, j->m.step);
    if (done && j->m.rank < done->commit.world &&
        id_equal(&done->commit.parts[j->m.rank].segment, &j->m.segment)) {
        durable_reply(t, done->commit.sequence);
        return;
    }
    if (!not_read_only(t) || !task_attempt_is_live(t, t->run, &j->m.attempt))
        return;
    struct segment *g = join_segment(t);
    if (!g)
        return;
    uint32_t wait_ms = t->s->o.join_wait_max_ms;
    if (j->m.wait_ms && j->m.wait_ms < wait_ms)
        wait_ms = j->m.wait_ms;
    j->until_ms = loop_now_ms(t->s->o.loop) + wait_ms + 1;
    join_save(t, g);
}

/* ---- commit ---- */

struct committer {
    struct save *save;
    struct commit_entry *entry;
};

static void committer_free(void *own)
{
    struct committer *c = own;
    if (c->entry)
        commit_entry_free(c->entry);
    free(c);
}

static void committed_tell(struct save *v, uint64_t sequence)
{
    while (!list_empty(&v->waiting))
        durable_reply(container_of(v->waiting.next, struct task, queue), sequence);
}

static task_step commit_write;

static void commit_written(struct task *t)
{
    struct committer *c = t->own;
    struct save *v = c->save;
    struct run *r = v->run;
    struct commit *m = &c->entry->commit;
    if (task_result(t) < 0) {
        struct err why = t->io->op.err;
        if (why.class == ERR_EXISTS) { /* a record of that number that could not be read at start */
            r->sequence_highest = m->sequence;
            commit_entry_free(c->entry);
            c->entry = NULL;
            commit_write(t);
            return;
        }
        err_prepend(&why, "writing the commit record of step %" PRIu64, v->step);
        save_fail(v, &why);
        task_end(t);
        return;
    }
    check(commit_insert(r, c->entry) == 0); /* commit_reserve */
    check(commit_bind(r, c->entry) == 0);   /* all segments are there */
    for (uint32_t i = 0; i < v->world; i++) {
        struct segment *g = segment_find(r->tenant, &v->parts[i].p.segment);
        g->save = NULL;
    }
    metric_add(METRIC_commits_total, 1);
    log_info("commit tenant=%s run=%s step=%" PRIu64 " sequence=%" PRIu64 " attempt=%" PRIu64
             " world=%u bytes=%" PRIu64,
             r->tenant->record.name, run_text(r), m->step, m->sequence, m->attempt_number, m->world,
             c->entry->stored_bytes);
    committed_tell(v, m->sequence);
    failed_forget(r, &m->attempt, false, m->step);
    c->entry = NULL;
    save_free(v);
    run_collect(t->s, r);
    task_end(t);
}

static int commit_check_parts(const struct save *v, struct err *why)
{
    char hex[2 * ID_BYTES + 1];
    if (v->run->destroying)
        return err_set(why, ERR_NOT_FOUND, "the run was destroyed by an operator");
    if (v->s->read_only)
        return err_set(why, ERR_READ_ONLY, "the store takes no writes since a sync failed (%s)",
                       v->s->read_only_reason);
    int rc = attempt_check(v->run, &v->attempt, why);
    for (uint32_t i = 0; i < v->world && rc == 0; i++) {
        const struct segment *g = segment_find(v->run->tenant, &v->parts[i].p.segment);
        if (!g || g->state != SEGMENT_SEALED)
            rc = err_set(why, ERR_NOT_FOUND, "segment %s of rank %u is no longer in the store",
                         id_text(&v->parts[i].p.segment, hex), i);
    }
    return rc;
}

/* The record, encoded into t->buf and decoded back into an entry of the catalogue. */
static int commit_make(struct task *t, const struct save *v, struct err *why)
{
    struct committer *c = t->own;
    struct run *r = v->run;
    struct commit m = {
        .kind = r->record.kind,
        .run_id = r->record.run_id,
        .run = slice_str(r->record.name),
        .step = v->step,
        .sequence = r->sequence_highest + 1,
        .attempt = v->attempt,
        .attempt_number = attempt_find(r, &v->attempt)->number,
        .world = v->world,
        .server_time_ns = loop_unix_ns(t->s->o.loop),
        .loader = SLICE(v->loader, v->loader_bytes),
        .labels = SLICE(v->labels.p, v->labels.n),
    };
    m.parts = calloc(v->world, sizeof *m.parts);
    c->entry = calloc(1, sizeof *c->entry);
    if (!m.parts || !c->entry || commit_reserve(r) < 0) {
        free(m.parts);
        return err_set(why, ERR_NO_MEMORY, "the server has no memory for a commit record of %u parts",
                       v->world);
    }
    for (uint32_t i = 0; i < v->world; i++) {
        m.parts[i] = v->parts[i].p;
        if (add_overflows(m.plain_bytes, v->parts[i].plain_bytes, &m.plain_bytes))
            m.plain_bytes = UINT64_MAX;
    }
    buf_reset(&t->buf);
    int rc = commit_encode(&m, &t->buf, why);
    if (rc == 0)
        rc = commit_decode(t->buf.p, t->buf.n, &c->entry->commit, why);
    free(m.parts);
    return rc;
}

static void commit_write(struct task *t)
{
    struct committer *c = t->own;
    struct save *v = c->save;
    struct err why = {0};
    if (commit_check_parts(v, &why) < 0 || commit_make(t, v, &why) < 0) {
        save_fail(v, &why);
        task_end(t);
        return;
    }
    name_of_number(v->run, 'c', c->entry->commit.sequence, t->io->name);
    task_put_new(t, commit_written);
}

/* The verdict is good: the commit goes its way whether or not the rank that gave it is still there to hear.
 */
static void commit_go(struct task *t, struct save *v)
{
    struct task *w = task_start(t->s, NULL, true);
    struct committer *c = w ? task_own(w, sizeof *c) : NULL;
    if (!c) {
        task_fail(t, ERR_NO_MEMORY, "the server has no memory for the commit; try again");
        return;
    }
    w->own_free = committer_free;
    run_hold(w, v->run);
    c->save = v;
    v->state = SAVE_COMMITTING;
    loop_timer_clear(t->s->o.loop, &v->timer);
    task_wait(t, &v->waiting, "the commit record", join_never);
    latch_enter(w, &v->run->latch, "another change to the run", commit_write);
}

static void commit_refused(struct task *t, struct save *v, const struct msg_commit *m)
{
    struct err why = {0};
    char text[384];
    enum err_class class = m->verdict < ERR_CLASS_COUNT ? (enum err_class)m->verdict : ERR_MISMATCH;
    err_set(&why, class, "%s", err_quote(text, sizeof text, m->text.p, m->text.n));
    save_fail(v, &why);
    durable_reply(t, 0);
}

void do_commit(struct task *t)
{
    struct msg_commit m = {0};
    char text[256];
    if (!task_decode(t, commit, &m) || !task_run_by_id(t, &m.run_id))
        return;
    struct save *v = save_find(&t->run->saves, &m.attempt, m.step);
    struct commit_entry *done = commit_of_save(t->run, &m.attempt, m.step);
    if (!v && done && m.verdict == 0) { /* told twice */
        durable_reply(t, done->commit.sequence);
        return;
    }
    if (!not_read_only(t) || !task_attempt_is_live(t, t->run, &m.attempt))
        return;
    if (!v) {
        struct save *failed = save_find(&t->run->failed, &m.attempt, m.step);
        if (failed)
            task_fail_with(t, &failed->why);
        else
            task_fail(t, ERR_NOT_FOUND,
                      "no rank of this attempt has joined step %" PRIu64 " (the server may have "
                      "restarted); join again",
                      m.step);
    } else if (v->world != m.world) {
        task_fail(t, ERR_MISMATCH, "the save of step %" PRIu64 " has %u ranks, the verdict speaks of %u",
                  m.step, v->world, m.world);
    } else if (v->state == SAVE_COMMITTING) {
        task_wait(t, &v->waiting, "the commit record", join_never);
    } else if (m.verdict != 0) {
        commit_refused(t, v, &m);
    } else if (v->state == SAVE_GATHERING) {
        task_fail(t, ERR_BUSY, "step %" PRIu64 " is not complete: %s", m.step,
                  missing_text(v, text, sizeof text));
    } else {
        commit_go(t, v);
    }
}

/* ---- abort ---- */

void do_save_abort(struct task *t)
{
    struct msg_save_abort m = {0};
    struct err why = {0};
    char text[384];
    if (!task_decode(t, save_abort, &m) || !task_run_by_id(t, &m.run_id) ||
        !task_attempt_is_live(t, t->run, &m.attempt))
        return;
    struct save *v = save_find(&t->run->saves, &m.attempt, m.step);
    if (v && v->state == SAVE_COMMITTING) {
        task_fail(t, ERR_BUSY, "step %" PRIu64 " is just being committed; join again to hear the end",
                  m.step);
        return;
    }
    if (!v && commit_of_save(t->run, &m.attempt, m.step)) {
        task_fail(t, ERR_EXISTS, "step %" PRIu64 " is durable already", m.step);
        return;
    }
    if (!v) /* nobody has joined yet, but those who come are told */
        v = save_begin(t->s, t->run, &m.attempt, m.step, 0);
    if (!v) {
        task_fail(t, ERR_NO_MEMORY, "the server has no memory for the request; try again later");
        return;
    }
    enum err_class class = m.class > 0 && m.class < ERR_CLASS_COUNT ? (enum err_class)m.class : ERR_CANCELLED;
    err_set(&why, class, "rank %u gave up the save of step %" PRIu64 ": %s", m.rank, m.step,
            m.text.n ? err_quote(text, sizeof text, m.text.p, m.text.n) : "no reason given");
    heard(v, m.rank);
    save_fail(v, &why);
    task_end(t);
}

/* ---- listing ---- */

struct group {
    struct id attempt;
    uint64_t step, bytes;
    uint32_t world, parts;
    bool abandoned, suspect;
};

static void pending_item(const struct run *r, const struct group *g, const char *reason, uint64_t plain_bytes,
                         struct buf *out)
{
    const struct record_attempt *a = attempt_find(r, &g->attempt);
    struct msg_commit_item item = {
        .step = g->step,
        .state = g->abandoned ? COMMIT_ABANDONED : COMMIT_PENDING,
        .world = g->world,
        .parts = g->parts,
        .plain_bytes = plain_bytes,
        .stored_bytes = g->bytes,
        .attempt_number = a ? a->number : 0,
        .reason = slice_str(reason),
    };
    msg_commit_item_encode(&item, out);
}

static void save_item(const struct save *v, struct buf *out)
{
    struct group g = {.attempt = v->attempt, .step = v->step, .world = v->world, .parts = v->joined};
    uint64_t plain_bytes = 0;
    char text[256];
    for (uint32_t i = 0; i < v->world; i++) {
        if (!v->parts[i].joined)
            continue;
        g.bytes += v->parts[i].p.segment_bytes;
        if (add_overflows(plain_bytes, v->parts[i].plain_bytes, &plain_bytes))
            plain_bytes = UINT64_MAX;
    }
    pending_item(v->run, &g,
                 v->state == SAVE_GATHERING    ? missing_text(v, text, sizeof text)
                 : v->state == SAVE_COMMITTING ? "being committed"
                                               : "being checked",
                 plain_bytes, out);
}

#define GROUPS_MAX 256u

uint32_t saves_list(struct store *s, struct run *r, struct buf *out)
{
    uint32_t count = 0, n = 0;
    list_for_each (it, &r->saves) {
        save_item(container_of(it, struct save, link), out);
        count++;
    }
    struct group *groups = calloc(GROUPS_MAX, sizeof *groups);
    if (!groups)
        return count;
    list_for_each (it, &r->loose) {
        const struct segment *g = container_of(it, struct segment, loose);
        uint32_t i = 0;
        if (g->save || g->state >= SEGMENT_LEAVING)
            continue;
        while (i < n && (groups[i].step != g->step || !id_equal(&groups[i].attempt, &g->attempt)))
            i++;
        if (i == GROUPS_MAX)
            break;
        if (i == n)
            groups[n++] = (struct group){.attempt = g->attempt,
                                         .step = g->step,
                                         .world = g->world,
                                         .abandoned = true,
                                         .suspect = true};
        groups[i].abandoned &= segment_abandoned(s, g);
        groups[i].suspect &= g->suspect;
        groups[i].parts++;
        groups[i].bytes += g->state == SEGMENT_SEALED ? g->file_bytes : 0;
    }
    for (uint32_t i = 0; i < n; i++)
        pending_item(r, &groups[i],
                     groups[i].abandoned ? "sealed, but never committed; prune removes it"
                     : groups[i].suspect
                         ? "kept: it stands beside a record that could not be read and may be its"
                         : "being written",
                     0, out);
    free(groups);
    return count + n;
}
