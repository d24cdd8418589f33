/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prune: a plan (retention.h), and its execution. The plan is a list that a person has seen; its digest makes
 * sure that what is executed is what was shown. Each removal looks again: at pins, at the last good commit,
 * at whether another commit names a segment. The commit record goes first and durably, so that a crash never
 * leaves a commit that lacks segments; segments that a crash leaves are collected as abandoned.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "server/store/internal.h"
#include "server/store/retention.h"

#define ITEM_BYTES 34u /* of an encoded prune_item */
#define ITEMS_MAX  (PAGE_BYTES_MAX / ITEM_BYTES)

struct plan_item {
    struct msg_prune_item m;
    struct id attempt; /* of an abandoned save */
};

struct prune {
    struct msg_prune m;
    struct plan_item *items;
    uint32_t count, at;
    uint8_t digest[SHA256_BYTES];
    uint64_t freed_bytes, removed;
    struct commit_part *parts; /* of the commit that is being removed */
    uint32_t part_count, part_at;
};

static void prune_free(void *own)
{
    struct prune *p = own;
    free(p->items);
    free(p->parts);
    free(p);
}

/* ---- the plan ---- */

static int plan_commits(struct task *t, struct prune *p)
{
    const struct run *r = t->run;
    struct retention_item *items = calloc(r->commit_count + 1, sizeof *items);
    struct retention_rule rule = {
        .keep_last = p->m.keep_last,
        .keep_every = p->m.keep_every,
        .keep_within_ns =
            p->m.keep_within_s < UINT64_MAX / 1000000000u ? p->m.keep_within_s * 1000000000u : UINT64_MAX,
        .now_ns = loop_unix_ns(t->s->o.loop),
        .versions = r->record.kind == RUN_DATASET,
    };
    if (!items)
        return -1;
    for (size_t i = 0; i < r->commit_count; i++) {
        const struct commit_entry *c = r->commits[i];
        items[i] = (struct retention_item){.sequence = c->commit.sequence,
                                           .step = c->commit.step,
                                           .time_ns = c->commit.server_time_ns,
                                           .pinned = c->pinned,
                                           .bad = commit_bad(c)};
    }
    int rc = retention_plan(&rule, items, r->commit_count);
    for (size_t i = 0; i < r->commit_count && p->count < ITEMS_MAX; i++)
        p->items[p->count++] = (struct plan_item){.m = {.step = items[i].step,
                                                        .sequence = items[i].sequence,
                                                        .reason = (uint8_t)items[i].reason,
                                                        .stored_bytes = r->commits[i]->stored_bytes,
                                                        .server_time_ns = items[i].time_ns}};
    free(items);
    return rc;
}

/* One item for what is left of each abandoned save. */
static void plan_abandoned(struct task *t, struct prune *p)
{
    uint32_t first = p->count;
    list_for_each (it, &t->run->loose) {
        const struct segment *g = container_of(it, struct segment, loose);
        uint32_t i = first;
        if (!segment_abandoned(t->s, g))
            continue;
        while (i < p->count &&
               (p->items[i].m.step != g->step || !id_equal(&p->items[i].attempt, &g->attempt)))
            i++;
        if (i == ITEMS_MAX)
            return;
        if (i == p->count)
            p->items[p->count++] = (struct plan_item){
                .m = {.step = g->step, .reason = PRUNE_REMOVE_ABANDONED}, .attempt = g->attempt};
        p->items[i].m.stored_bytes += g->file_bytes;
    }
}

static void encode_items(const struct prune *p, struct buf *out)
{
    for (uint32_t i = 0; i < p->count; i++)
        msg_prune_item_encode(&p->items[i].m, out);
}

static bool plan(struct task *t, struct prune *p)
{
    size_t n = t->run->commit_count + t->run->tenant->segments.count + 1;
    p->items = calloc(n < ITEMS_MAX ? n : ITEMS_MAX, sizeof *p->items);
    if (!p->items || plan_commits(t, p) < 0) {
        task_fail(t, ERR_NO_MEMORY, "the server has no memory for the plan; try again later");
        return false;
    }
    plan_abandoned(t, p);
    struct buf items = {0};
    encode_items(p, &items);
    int rc = buf_end(&items, "the plan", t->err);
    if (rc == 0)
        sha256(items.p, items.n, p->digest);
    buf_free(&items);
    if (rc < 0)
        task_end(t);
    return rc == 0;
}

static void prune_reply(struct task *t)
{
    struct prune *p = t->own;
    struct buf items = {0};
    encode_items(p, &items);
    if (buf_end(&items, "the plan", t->err) == 0) {
        struct msg_prune_reply reply = {
            .freed_bytes = p->freed_bytes, .count = p->count, .items = SLICE(items.p, items.n)};
        memcpy(reply.plan.bytes, p->digest, SHA256_BYTES);
        msg_prune_reply_encode(&reply, &t->op->reply);
    }
    buf_free(&items);
    task_reply(t);
}

/* ---- execution ---- */

static task_step prune_next, remove_next_part;

static void prune_stopped(struct task *t)
{
    const struct prune *p = t->own;
    char doing[96];
    snprintf(doing, sizeof doing, "prune stopped after %" PRIu64 " removals", p->removed);
    task_fail_io(t, doing);
}

static bool prune_goes_on(struct task *t)
{
    const struct prune *p = t->own;
    if (t->cancelled || t->s->stopping)
        task_fail(t, ERR_CANCELLED, "prune was %s after %" PRIu64 " removals",
                  t->cancelled ? "cancelled" : "ended by the server's stop", p->removed);
    else if (t->run->destroying)
        task_fail(t, ERR_NOT_FOUND, "the run was destroyed meanwhile");
    else
        return true;
    return false;
}

static void segment_removed(struct task *t)
{
    struct prune *p = t->own;
    struct segment *g = t->segment;
    t->segment = NULL;
    if (task_result(t) < 0 && t->io->op.err.class != ERR_NOT_FOUND) {
        g->state = SEGMENT_SEALED;
        segment_release(g);
        prune_stopped(t);
        return;
    }
    g->run->stored_bytes -= g->file_bytes;
    g->run->tenant->stored_bytes -= g->file_bytes;
    p->freed_bytes += g->file_bytes;
    metric_add(METRIC_pruned_bytes, (int64_t)g->file_bytes);
    segment_forget(g);
    segment_release(g);
    remove_next_part(t);
}

/* The next segment of the item that is to go, or NULL. */
static struct segment *next_segment(struct task *t, struct prune *p)
{
    const struct plan_item *item = &p->items[p->at];
    while (p->part_at < p->part_count) {
        struct segment *g = segment_find(t->run->tenant, &p->parts[p->part_at++].segment);
        if (g && g->commits == 0 && g->state == SEGMENT_SEALED)
            return g;
    }
    if (item->m.reason != PRUNE_REMOVE_ABANDONED)
        return NULL;
    list_for_each (it, &t->run->loose) {
        struct segment *g = container_of(it, struct segment, loose);
        if (g->step == item->m.step && id_equal(&g->attempt, &item->attempt) && segment_abandoned(t->s, g))
            return g;
    }
    return NULL;
}

static void remove_next_part(struct task *t)
{
    struct prune *p = t->own;
    if (!prune_goes_on(t))
        return;
    struct segment *g = next_segment(t, p);
    if (g) {
        g->state = SEGMENT_LEAVING;
        segment_hold(t, g);
        name_of_segment(g, t->io->name);
        task_remove(t, segment_removed);
        return;
    }
    p->items[p->at++].m.removed = 1;
    p->removed++;
    free(p->parts);
    p->parts = NULL;
    p->part_count = p->part_at = 0;
    task_later(t, prune_next);
}

static void mark_removed(struct task *t)
{
    latch_leave(t);
    if (task_result(t) < 0 && t->io->op.err.class != ERR_NOT_FOUND)
        prune_stopped(t);
    else
        remove_next_part(t);
}

static void record_removed(struct task *t)
{
    struct prune *p = t->own;
    struct run *r = t->run;
    uint64_t sequence = p->items[p->at].m.sequence;
    if (task_result(t) < 0 && t->io->op.err.class != ERR_NOT_FOUND) {
        prune_stopped(t);
        return;
    }
    struct commit_entry *c = commit_by_sequence(r, sequence);
    check(c);
    bool marked = c->marked_bad;
    log_info("commit removed tenant=%s run=%s step=%" PRIu64 " sequence=%" PRIu64 " reason=%u", t->op->tenant,
             run_text(r), c->commit.step, sequence, p->items[p->at].m.reason);
    commit_remove(r, c);
    metric_add(METRIC_pruned_commits, 1);
    if (marked && sequence < r->sequence_highest) {
        name_of_number(r, 'b', sequence, t->io->name);
        task_remove(t, mark_removed);
        return;
    }
    latch_leave(t); /* the highest mark stays, so that its sequence is not given again */
    remove_next_part(t);
}

static void remove_record(struct task *t)
{
    struct prune *p = t->own;
    name_of_number(t->run, 'c', p->items[p->at].m.sequence, t->io->name);
    task_remove(t, record_removed);
}

static void floor_written(struct task *t)
{
    struct prune *p = t->own;
    struct commit_entry *c = commit_by_sequence(t->run, p->items[p->at].m.sequence);
    if (task_result(t) < 0 && t->io->op.err.class != ERR_EXISTS) {
        prune_stopped(t);
        return;
    }
    check(c);
    c->marked_bad = true;
    remove_record(t);
}

/* May it still go? Under the run's latch nobody pins it or commits meanwhile. */
static void commit_gated(struct task *t)
{
    struct prune *p = t->own;
    struct run *r = t->run;
    struct plan_item *item = &p->items[p->at];
    struct commit_entry *c = commit_by_sequence(r, item->m.sequence);
    if (!c || c->pinned || c == commit_last_good(r) || r->destroying) {
        if (c)
            log_info("commit is kept after all tenant=%s run=%s sequence=%" PRIu64, t->op->tenant,
                     run_text(r), item->m.sequence);
        latch_leave(t);
        p->at++;
        task_later(t, prune_next);
        return;
    }
    p->parts = calloc(c->commit.world, sizeof *p->parts);
    if (!p->parts) {
        task_fail(t, ERR_NO_MEMORY, "the server has no memory to go on; %" PRIu64 " items were removed",
                  p->removed);
        return;
    }
    memcpy(p->parts, c->commit.parts, c->commit.world * sizeof *p->parts);
    p->part_count = c->commit.world;
    if (item->m.sequence < r->sequence_highest || c->marked_bad) {
        remove_record(t);
        return;
    }
    /* The highest sequence, bad without a mark (a segment is missing): a mark keeps its number taken. */
    struct record_mark floor = {.run_id = r->record.run_id,
                                .kind = MARK_BAD,
                                .sequence = item->m.sequence,
                                .created_ns = loop_unix_ns(t->s->o.loop)};
    snprintf(floor.reason, sizeof floor.reason, "%s", c->reason ? c->reason : "segments are missing");
    buf_reset(&t->buf);
    if (record_mark_encode(&floor, &t->buf, t->err) < 0) {
        task_end(t);
        return;
    }
    name_of_number(r, 'b', item->m.sequence, t->io->name);
    task_put_new(t, floor_written);
}

static void prune_next(struct task *t)
{
    struct prune *p = t->own;
    if (!prune_goes_on(t))
        return;
    while (p->at < p->count && !retention_removes(p->items[p->at].m.reason))
        p->at++;
    if (p->at == p->count) {
        log_info("prune done tenant=%s run=%s removed=%" PRIu64 " freed_bytes=%" PRIu64, t->op->tenant,
                 run_text(t->run), p->removed, p->freed_bytes);
        prune_reply(t);
    } else if (p->items[p->at].m.reason == PRUNE_REMOVE_ABANDONED) {
        remove_next_part(t);
    } else {
        latch_enter(t, &t->run->latch, "another change to the run", commit_gated);
    }
}

void do_prune(struct task *t)
{
    static const uint8_t any[SHA256_BYTES];
    struct prune *p = task_own(t, sizeof *p);
    if (!p)
        return;
    t->own_free = prune_free;
    if (!task_decode(t, prune, &p->m) || !task_run_by_name(t, p->m.kind, p->m.name))
        return;
    if (p->m.keep_last == 0 && p->m.keep_every == 0 && p->m.keep_within_s == 0) {
        task_fail(t, ERR_INVALID,
                  "prune needs a rule that keeps something: the last N, multiples of K, or younger than "
                  "T; to remove all of %s, destroy it",
                  run_text(t->run));
        return;
    }
    if (!plan(t, p))
        return;
    if (!p->m.execute) {
        for (uint32_t i = 0; i < p->count; i++)
            if (retention_removes(p->items[i].m.reason))
                p->freed_bytes += p->items[i].m.stored_bytes;
        prune_reply(t);
    } else if (t->s->read_only) {
        task_fail(t, ERR_READ_ONLY, "the store takes no writes since a sync failed (%s)",
                  t->s->read_only_reason);
    } else if (memcmp(p->m.plan.bytes, any, sizeof any) != 0 &&
               memcmp(p->m.plan.bytes, p->digest, sizeof p->digest) != 0) {
        task_fail(t, ERR_MISMATCH,
                  "the plan changed since it was shown (a commit, a pin or time came between); look at "
                  "the new plan, nothing was removed");
    } else {
        prune_next(t);
    }
}
