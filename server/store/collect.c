/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Segments that no commit names and nobody needs any more: open ones are discarded when their last write has
 * completed, sealed ones are removed one after the other in the background, with one more look at whether a
 * commit names them now. What is left is a ghost: it tells a late writer why its segment is gone, for as long
 * as an idle segment would have been kept.
 */
#include <inttypes.h>
#include <stdlib.h>

#include "format/base/log.h"
#include "format/base/pages.h"
#include "server/store/writer.h"

void writer_begin(struct segment *g)
{
    g->writer->flying++;
}

static void discard_start(struct store *s, struct segment *g);

void writer_end(struct store *s, struct segment *g)
{
    check(g->writer->flying > 0);
    g->writer->flying--;
    if (g->state == SEGMENT_LEAVING && g->writer->flying == 0)
        discard_start(s, g);
    else
        task_wake_all(&g->waiting);
}

void writer_close(struct store *s, struct segment *g)
{
    struct writer *w = g->writer;
    g->writer = NULL;
    g->run->tenant->reserved_bytes -= w->reserve_bytes;
    metric_add(METRIC_reserved_bytes, -(int64_t)w->reserve_bytes);
    s->tables_bytes -= w->tables_bytes;
    s->segments_open--;
    free(w->block);
    free(w->entries);
    free(w->states);
    free(w->table);
    sha256_end(w->index_hash, NULL);
    free(w);
}

/* ---- the list of idle ones ---- */

static void idle_timer_set(struct store *s)
{
    if (list_empty(&s->idle) || s->stopping) {
        loop_timer_clear(s->o.loop, &s->idle_timer);
        return;
    }
    struct segment *oldest = container_of(s->idle.next, struct segment, idle);
    uint64_t at_ms = oldest->touched_ms + s->o.segment_idle_ms + 1;
    if (s->idle_timer.at_ms != at_ms)
        loop_timer_set(s->o.loop, &s->idle_timer, at_ms);
}

void segment_touch(struct store *s, struct segment *g)
{
    g->touched_ms = loop_now_ms(s->o.loop);
    list_del(&g->idle);
    if (g->state == SEGMENT_SEALED)
        return;
    list_add_tail(&s->idle, &g->idle);
    if (s->idle_timer.at_ms == 0)
        idle_timer_set(s);
}

void segments_idle(struct loop_timer *timer)
{
    struct store *s = container_of(timer, struct store, idle_timer);
    uint64_t now = loop_now_ms(s->o.loop);
    struct err why = {0};
    char hex[2 * ID_BYTES + 1];
    while (!list_empty(&s->idle)) {
        struct segment *g = container_of(s->idle.next, struct segment, idle);
        if (g->touched_ms + s->o.segment_idle_ms >= now)
            break;
        if (g->state == SEGMENT_GIVEN_UP) {
            segment_forget(g);
            continue;
        }
        segment_touch(s, g); /* to the end of the list; the writes of one that is left may take their time */
        if (g->state == SEGMENT_LEAVING) {
            if (g->writer && g->writer->flying == 0)
                discard_start(s, g);
        } else if (g->writer->flying == 0) {
            err_set(&why, ERR_TIMEOUT,
                    "segment %s was given up: nothing was written to it for %u ms; save the part again",
                    id_text(&g->id, hex), s->o.segment_idle_ms);
            segment_give_up(s, g, &why);
        }
    }
    idle_timer_set(s);
}

/* ---- discarding open ones ---- */

static void become_ghost(struct store *s, struct segment *g)
{
    g->state = SEGMENT_GIVEN_UP;
    g->save = NULL;
    metric_add(METRIC_segments_discarded, 1);
    segment_touch(s, g);
    task_wake_all(&g->waiting);
}

static void discarded(struct task *t)
{
    struct segment *g = t->segment;
    if (task_result(t) < 0)
        log_warn("space of a discarded segment may be held until the restart tenant=%s reason=\"%s\"",
                 g->run->tenant->record.name, t->io->op.err.text);
    g->writer->file = NULL;
    writer_close(t->s, g);
    become_ghost(t->s, g);
    task_end(t);
}

static void discard_start(struct store *s, struct segment *g)
{
    struct writer *w = g->writer;
    if (w->discarding)
        return;
    if (!w->file) { /* creation or sealing failed: there is nothing on the medium */
        writer_close(s, g);
        become_ghost(s, g);
        return;
    }
    struct task *t = task_start(s, NULL, true);
    if (!t)
        return; /* no memory now: segments_idle tries again */
    w->discarding = true;
    segment_hold(t, g);
    struct backend_op *b = task_op(t, discarded);
    backend_discard(s->o.backend, b, w->file);
}

void segments_close(struct store *s)
{
    struct err why = {0};
    err_set(&why, ERR_CANCELLED, "the server is stopping");
    for (struct list *it = s->idle.next, *next; it != &s->idle; it = next) {
        next = it->next;
        struct segment *g = container_of(it, struct segment, idle);
        if (!g->writer)
            continue;
        if (g->state == SEGMENT_LEAVING)
            discard_start(s, g);
        else
            segment_give_up(s, g, &why);
    }
    if (list_empty(&s->tasks)) /* all are gone, or there was no memory for a task: look again */
        store_turn_soon(s);
}

/* ---- giving up ---- */

void segment_give_up(struct store *s, struct segment *g, const struct err *why)
{
    if (g->commits > 0 || g->suspect || g->state >= SEGMENT_LEAVING)
        return;
    g->why = malloc(sizeof *g->why);
    if (g->why)
        *g->why = *why;
    g->save = NULL;
    if (g->state == SEGMENT_SEALED) {
        g->state = SEGMENT_LEAVING;
        list_del(&g->idle);
        list_add_tail(&s->collecting, &g->idle);
        task_wake_all(&g->waiting);
        collector_start(s);
        return;
    }
    g->state = SEGMENT_LEAVING;
    segment_touch(s, g);
    if (g->writer->flying == 0)
        discard_start(s, g);
    else
        task_wake_all(&g->waiting);
}

/* ---- removing sealed ones ---- */

static task_step collect_next;

static void collected(struct task *t)
{
    struct segment *g = t->segment;
    struct store *s = t->s;
    if (task_result(t) < 0 && t->io->op.err.class != ERR_NOT_FOUND) {
        log_warn("a segment that nobody needs could not be removed object=%s reason=\"%s\"", t->io->name,
                 t->io->op.err.text);
        g->state = SEGMENT_SEALED;
    } else {
        g->run->stored_bytes -= g->file_bytes;
        g->run->tenant->stored_bytes -= g->file_bytes;
        log_info("abandoned segment removed object=%s bytes=%" PRIu64, t->io->name, g->file_bytes);
        become_ghost(s, g);
    }
    t->segment = NULL;
    segment_release(g);
    collect_next(t);
}

static void collect_next(struct task *t)
{
    struct store *s = t->s;
    for (struct list *it; (it = list_pop(&s->collecting));) {
        struct segment *g = container_of(it, struct segment, idle);
        if (g->commits > 0 || s->stopping || s->read_only) {
            g->state = SEGMENT_SEALED;
            free(g->why);
            g->why = NULL;
            continue;
        }
        segment_hold(t, g);
        name_of_segment(g, t->io->name);
        task_remove(t, collected);
        return;
    }
    s->collector_runs = false;
    task_end(t);
}

void collector_start(struct store *s)
{
    if (s->collector_runs || list_empty(&s->collecting))
        return;
    struct task *t = task_start(s, NULL, true);
    if (!t)
        return; /* the next one that is given up starts it */
    s->collector_runs = true;
    task_later(t, collect_next);
}

/* ---- which ---- */

bool segment_abandoned(const struct store *s, const struct segment *g)
{
    if (g->commits > 0 || g->suspect || g->save || g->state != SEGMENT_SEALED)
        return false;
    const struct record_attempt *newest = attempt_newest(g->run);
    return !newest || !id_equal(&g->attempt, &newest->attempt) ||
           g->touched_ms + s->o.segment_idle_ms < loop_now_ms(s->o.loop);
}

/* The attempt has gone on: its last commit is of a later step than what these were for. */
void run_collect(struct store *s, struct run *r)
{
    const struct commit *last = r->commit_count ? &r->commits[r->commit_count - 1]->commit : NULL;
    struct err why = {0};
    if (!last)
        return;
    err_set(&why, ERR_NOT_FOUND,
            "the segment was removed: its save never committed, and step %" PRIu64 " has since", last->step);
    list_for_each_safe (it, &r->loose) {
        struct segment *g = container_of(it, struct segment, loose);
        if (g->state == SEGMENT_SEALED && !g->save && g->step < last->step &&
            id_equal(&g->attempt, &last->attempt))
            segment_give_up(s, g, &why);
    }
}
