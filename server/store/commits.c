/* SPDX-License-Identifier: Apache-2.0 */
/* Reading what is committed, and marking it: commit_list, commit_get, mark. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "server/store/internal.h"

static void commit_item(const struct commit_entry *c, struct buf *out)
{
    struct msg_commit_item item = {
        .step = c->commit.step,
        .sequence = c->commit.sequence,
        .state = commit_bad(c) ? COMMIT_BAD : COMMIT_GOOD,
        .pinned = c->pinned,
        .world = c->commit.world,
        .parts = c->commit.world,
        .plain_bytes = c->commit.plain_bytes,
        .stored_bytes = c->stored_bytes,
        .server_time_ns = c->commit.server_time_ns,
        .attempt_number = c->commit.attempt_number,
        .reason = commit_reason(c),
        .labels = c->commit.labels,
    };
    msg_commit_item_encode(&item, out);
}

/* The list is complete: a commit whose record cannot be read is on it, with what its name tells. */
static void damaged_item(const struct damage *d, struct buf *out)
{
    char reason[ERR_TEXT_BYTES + OBJECT_NAME_BYTES];
    snprintf(reason, sizeof reason, "%s: %s", d->name, d->why.text);
    msg_commit_item_encode(
        &(struct msg_commit_item){.sequence = d->sequence, .state = COMMIT_BAD, .reason = slice_str(reason)},
        out);
}

void do_commit_list(struct task *t)
{
    struct msg_commit_list m = {0};
    struct buf items = {0};
    char next[24] = "";
    uint32_t count = 0;
    if (!task_decode(t, commit_list, &m) || !task_run_by_name(t, m.kind, m.name))
        return;
    const struct run *r = t->run;
    uint64_t at = m.after_sequence;
    size_t i = 0;
    while (i < r->commit_count && r->commits[i]->commit.sequence <= at)
        i++;
    for (;;) {
        const struct damage *d = damage_of_commit(t->s, r, at);
        const struct commit_entry *c = i < r->commit_count ? r->commits[i] : NULL;
        if (!c && !d)
            break;
        if (count == LIST_ITEMS_MAX || items.n > PAGE_BYTES_MAX) {
            snprintf(next, sizeof next, "%" PRIu64, at);
            break;
        }
        if (d && (!c || d->sequence < c->commit.sequence)) {
            at = d->sequence;
            damaged_item(d, &items);
        } else {
            at = c->commit.sequence;
            commit_item(c, &items);
            i++;
        }
        count++;
    }
    if (m.with_pending && next[0] == 0)
        count += saves_list(t->s, t->run, &items);
    if (buf_end(&items, "the list", t->err) == 0) {
        struct msg_list_reply reply = {
            .count = count, .next = slice_str(next), .items = SLICE(items.p, items.n)};
        msg_list_reply_encode(&reply, &t->op->reply);
    }
    buf_free(&items);
    task_reply(t);
}

static struct commit_entry *commit_selected(const struct run *r, unsigned select, uint64_t value)
{
    if (select == SELECT_LATEST)
        return r->commit_count ? r->commits[r->commit_count - 1] : NULL;
    if (select == SELECT_LATEST_GOOD)
        return commit_last_good(r);
    if (select == SELECT_SEQUENCE)
        return commit_by_sequence(r, value);
    for (size_t i = r->commit_count; select == SELECT_STEP && i-- > 0;)
        if (r->commits[i]->commit.step == value)
            return r->commits[i];
    return NULL;
}

static void fail_not_selected(struct task *t, const struct msg_commit_get *m)
{
    const char *what = t->run->record.kind == RUN_DATASET ? "version" : "checkpoint";
    const struct damage *d = damage_of_commit(t->s, t->run, m->select == SELECT_SEQUENCE ? m->value - 1 : 0);
    if (d && (m->select == SELECT_STEP || (m->select == SELECT_SEQUENCE && d->sequence == m->value)))
        task_fail(t, d->why.class,
                  "the commit record of sequence %" PRIu64
                  " of %s could not be read (%s: %s), and no other %s fits; put the file back from a copy of "
                  "the store "
                  "and start larderd again",
                  d->sequence, run_text(t->run), d->name, d->why.text, what);
    else if (m->select == SELECT_STEP)
        task_fail(t, ERR_NOT_FOUND,
                  "%s has no committed checkpoint of step %" PRIu64
                  "; 'larder ckpt ls %s' shows what there is",
                  run_text(t->run), m->value, run_text(t->run));
    else if (m->select == SELECT_SEQUENCE)
        task_fail(t, ERR_NOT_FOUND,
                  "%s has no committed %s with sequence %" PRIu64 "; 'larder %s ls %s' shows what there is",
                  run_text(t->run), what, m->value, t->run->record.kind == RUN_DATASET ? "dataset" : "ckpt",
                  run_text(t->run));
    else if (t->run->unreadable > 0) /* whoever heard "not found" would begin from nothing */
        task_fail(
            t, ERR_CORRUPT,
            "%s has no %s that can be used, but %u commit record(s) that could not be read when the server "
            "started; see the server's log, restore them or check the disk, and start the server again",
            run_text(t->run), what, t->run->unreadable);
    else if (t->run->commit_count > 0)
        task_fail(t, ERR_NOT_FOUND, "%s has no good %s: all %zu are marked bad or have lost segments",
                  run_text(t->run), what, t->run->commit_count);
    else
        task_fail(t, ERR_NOT_FOUND, "%s has no committed %s yet", run_text(t->run), what);
}

void do_commit_get(struct task *t)
{
    struct msg_commit_get m = {0};
    if (!task_decode(t, commit_get, &m) || !task_run_by_name(t, m.kind, m.name))
        return;
    if (m.select < SELECT_LATEST || m.select > SELECT_LATEST_GOOD) {
        task_fail(t, ERR_INVALID, "expected a selection from 1 to 4, found %u", m.select);
        return;
    }
    const struct commit_entry *c = commit_selected(t->run, m.select, m.value);
    if (!c) {
        fail_not_selected(t, &m);
        return;
    }
    if (commit_encode(&c->commit, &t->buf, t->err) < 0) {
        task_end(t);
        return;
    }
    struct msg_commit_get_reply reply = {
        .state = commit_bad(c) ? COMMIT_BAD : COMMIT_GOOD,
        .pinned = c->pinned,
        .reason = commit_reason(c),
        .record = SLICE(t->buf.p, t->buf.n),
    };
    msg_commit_get_reply_encode(&reply, &t->op->reply);
    task_reply(t);
}

/* ---- mark ---- */

struct mark_job {
    struct msg_mark m;
    char reason[256];
};

static const char *const mark_words[] = {[MARK_ACTION_PIN] = "pin",
                                         [MARK_ACTION_UNPIN] = "unpin",
                                         [MARK_ACTION_BAD] = "bad",
                                         [MARK_ACTION_GOOD] = "good"};

static void marked(struct task *t)
{
    const struct mark_job *job = t->own;
    unsigned action = job->m.action;
    enum err_class class = task_result(t) < 0 ? t->io->op.err.class : ERR_NONE;
    /* Found as wanted: a mark that was left there, or taken away before. */
    bool as_wanted = (class == ERR_EXISTS && (action == MARK_ACTION_PIN || action == MARK_ACTION_BAD)) ||
                     (class == ERR_NOT_FOUND && (action == MARK_ACTION_UNPIN || action == MARK_ACTION_GOOD));
    if (class != ERR_NONE && !as_wanted) {
        task_fail_io(t, "marking a commit");
        return;
    }
    struct commit_entry *c = commit_by_sequence(t->run, job->m.sequence);
    check(c); /* removing it needs the latch that this task holds */
    if (action == MARK_ACTION_PIN || action == MARK_ACTION_UNPIN) {
        commit_set_pinned(c, action == MARK_ACTION_PIN, job->reason);
    } else {
        c->marked_bad = action == MARK_ACTION_BAD;
        commit_set_reason(c, c->marked_bad ? job->reason : c->missing ? "segments are missing" : NULL);
    }
    log_info("commit marked tenant=%s run=%s sequence=%" PRIu64 " mark=%s reason=\"%s\"", t->op->tenant,
             run_text(t->run), job->m.sequence, mark_words[action], job->reason);
    task_end(t);
}

static void mark_gated(struct task *t)
{
    const struct mark_job *job = t->own;
    struct run *r = t->run;
    unsigned action = job->m.action;
    struct commit_entry *c = commit_by_sequence(r, job->m.sequence);
    const struct damage *d = c ? NULL : damage_of_commit(t->s, r, job->m.sequence - 1);
    if (d && d->sequence == job->m.sequence && action == MARK_ACTION_BAD) { /* as it is listed anyway */
        task_end(t);
        return;
    }
    if (!c || r->destroying) {
        task_fail(t, ERR_NOT_FOUND, "%s has no commit with sequence %" PRIu64, run_text(r), job->m.sequence);
        return;
    }
    bool pin = action == MARK_ACTION_PIN || action == MARK_ACTION_UNPIN;
    bool on = action == MARK_ACTION_PIN || action == MARK_ACTION_BAD;
    if ((pin ? c->pinned : c->marked_bad) == on) { /* told twice */
        task_end(t);
        return;
    }
    name_of_number(r, pin ? 'p' : 'b', job->m.sequence, t->io->name);
    if (!on) {
        task_remove(t, marked);
        return;
    }
    struct record_mark record = {
        .run_id = r->record.run_id,
        .kind = pin ? MARK_PIN : MARK_BAD,
        .sequence = job->m.sequence,
        .created_ns = loop_unix_ns(t->s->o.loop),
    };
    snprintf(record.reason, sizeof record.reason, "%s", job->reason);
    if (record_mark_encode(&record, &t->buf, t->err) < 0)
        task_end(t);
    else
        task_put_new(t, marked);
}

void do_mark(struct task *t)
{
    struct mark_job *job = task_own(t, sizeof *job);
    if (!job || !task_decode(t, mark, &job->m) || !task_run_by_name(t, job->m.kind, job->m.name))
        return;
    if (job->m.action < MARK_ACTION_PIN || job->m.action > MARK_ACTION_GOOD) {
        task_fail(t, ERR_INVALID, "expected an action from 1 (pin) to 4 (good), found %u", job->m.action);
    } else if (t->op->role < ROLE_OPERATOR && job->m.action != MARK_ACTION_BAD) {
        task_fail(t, ERR_DENIED, "the mark '%s' needs the role operator, this certificate has %s",
                  mark_words[job->m.action], role_name(t->op->role));
    } else if (!slice_cstr(job->m.reason, job->reason, sizeof job->reason)) {
        task_fail(t, ERR_INVALID, "the reason has %zu bytes; at most 255 without NUL are allowed",
                  job->m.reason.n);
    } else {
        latch_enter(t, &t->run->latch, "another change to the run", mark_gated);
    }
}
