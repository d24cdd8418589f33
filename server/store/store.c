/* SPDX-License-Identifier: Apache-2.0 */
/* Opening, dispatch, cancelling, closing, figures. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "server/store/internal.h"

static const struct handler {
    task_step *start;
    bool changes;    /* refused once the store is read-only */
    bool any_tenant; /* the tenant need not have a record */
    bool waits;      /* many of these wait for long: no memory for I/O until it is needed */
} handlers[] = {
    [OP_TENANT_ADD] = {.start = do_tenant_add, .changes = true, .any_tenant = true},
    [OP_TENANT_LIST] = {.start = do_tenant_list, .any_tenant = true},
    [OP_RUN_OPEN] = {.start = do_run_open},
    [OP_RUN_LIST] = {.start = do_run_list},
    [OP_RUN_DESTROY] = {.start = do_run_destroy, .changes = true},
    [OP_ENVELOPE_PUT] = {.start = do_envelope_put, .changes = true},
    [OP_ENVELOPE_DROP] = {.start = do_envelope_drop, .changes = true},
    [OP_ATTEMPT] = {.start = do_attempt, .changes = true},
    [OP_SEGMENT_CREATE] = {.start = do_segment_create, .changes = true},
    [OP_SEGMENT_CHUNK] = {.start = do_segment_chunk, .changes = true},
    [OP_SEGMENT_INDEX] = {.start = do_segment_index, .changes = true},
    [OP_SEGMENT_SEAL] = {.start = do_segment_seal, .changes = true},
    [OP_SEGMENT_DISCARD] = {.start = do_segment_discard, .waits = true},
    [OP_JOIN] = {.start = do_join, .waits = true},
    [OP_COMMIT] = {.start = do_commit, .waits = true},
    [OP_SAVE_ABORT] = {.start = do_save_abort, .waits = true},
    [OP_COMMIT_LIST] = {.start = do_commit_list},
    [OP_COMMIT_GET] = {.start = do_commit_get},
    [OP_MARK] = {.start = do_mark, .changes = true},
    [OP_PRUNE] = {.start = do_prune},
    [OP_SCRUB] = {.start = do_scrub},
};

/* Nobody is told that a tenant is unknown whose record is there and cannot be read. */
static void task_fail_no_tenant(struct task *t)
{
    const char *name = t->op->tenant;
    const struct damage *d = damage_of_tenant(t->s, name);
    if (d)
        task_fail(
            t, ERR_CORRUPT,
            "the record of tenant %s, %s, cannot be read (%s); repair it from a copy and restart the server",
            name, d->name, d->why.text);
    else
        task_fail(t, ERR_NOT_FOUND,
                  "tenant %s is not registered with this server; an admin adds it with: larder tenant add %s",
                  name, name);
}

void store_submit(struct store *s, struct store_op *op)
{
    op->reply = (struct buf){.max = PAYLOAD_MAX};
    op->err = (struct err){0};
    op->timer = (struct loop_timer){0};
    op->store = s;
    op->state = NULL;
    list_init(&op->link);
    const struct handler *h =
        op->opcode < sizeof handlers / sizeof handlers[0] ? &handlers[op->opcode] : &handlers[0];
    struct task *t = task_start(s, op, !h->waits);
    if (!t)
        return;
    if (s->stopping) {
        task_fail(t, ERR_CANCELLED, "the server is stopping");
    } else if (!h->start) {
        task_fail(t, ERR_PROTOCOL, "the store does not serve opcode %u (%s)", op->opcode,
                  opcode_name(op->opcode));
    } else if (h->changes && s->read_only) {
        task_fail(t, ERR_READ_ONLY,
                  "the store takes no writes since a sync failed (%s); an administrator must check "
                  "the disk, reboot, and start larderd again",
                  s->read_only_reason);
    } else if (!(t->tenant = tenant_find(s, op->tenant)) && !h->any_tenant) {
        task_fail_no_tenant(t);
    } else {
        h->start(t);
    }
}

void store_continue(struct store *s, struct store_op *op)
{
    struct task *t = op->state;
    check(op->store == s && op->opcode == OP_SCRUB);
    if (t) /* else it was cancelled meanwhile; done is on its way */
        scrub_continue(t);
}

void store_cancel(struct store *s, struct store_op *op)
{
    struct task *t = op->state;
    check(op->store == s);
    if (!t) /* answered already; done is on its way */
        return;
    t->cancelled = true;
    if (t->waiting)
        task_fail(t, ERR_CANCELLED, "the request was cancelled");
}

/* ---- the turn ---- */

static void close_if_idle(struct store *s)
{
    if (!s->stopping || !list_empty(&s->tasks) || !list_empty(&s->finished))
        return;
    if (s->segments_open > 0) {
        segments_close(s);
        return;
    }
    void (*closed)(void *arg) = s->closed;
    void *arg = s->closed_arg;
    store_free(s);
    closed(arg);
}

static void turn(struct loop_msg *msg)
{
    struct store *s = container_of(msg, struct store, turn);
    struct list now; /* what is there at the start; what comes later has a later turn */
    list_init(&now);
    s->turn_posted = false;
    for (struct list *it; (it = list_pop(&s->ready));)
        list_add_tail(&now, it);
    for (struct list *it; (it = list_pop(&now));) {
        struct task *t = container_of(it, struct task, queue);
        t->then(t);
    }
    for (struct list *it; (it = list_pop(&s->finished));)
        list_add_tail(&now, it);
    for (struct list *it; (it = list_pop(&now));) {
        struct store_op *op = container_of(it, struct store_op, link);
        op->done(op);
    }
    if (!s->turn_posted)
        close_if_idle(s);
}

/* ---- life ---- */

void store_open(const struct store_options *o, struct store_opening *opening)
{
    struct store *s = calloc(1, sizeof *s);
    opening->store = NULL;
    opening->err = (struct err){0};
    if (!s) {
        err_set(&opening->err, ERR_NO_MEMORY, "no memory for the store");
        opening->done(opening);
        return;
    }
    s->o = *o;
    s->turn.run = turn;
    s->idle_timer.fire = segments_idle;
    list_init(&s->tenants);
    list_init(&s->damages);
    list_init(&s->tasks);
    list_init(&s->ready);
    list_init(&s->finished);
    list_init(&s->idle);
    list_init(&s->collecting);
    list_init(&s->buffer_queue);
    latch_init(&s->latch);
    loop_random(o->loop, &s->map_seed, sizeof s->map_seed);
    s->tenants_by_name.seed = s->map_seed;
    recover_start(s, opening);
}

void store_free(struct store *s)
{
    check(!s->turn_posted);
    loop_timer_clear(s->o.loop, &s->idle_timer);
    for (struct list *it; (it = list_pop(&s->tenants));)
        tenant_free(container_of(it, struct tenant, link));
    map_free(&s->tenants_by_name);
    free(s->tenant_spare);
    for (struct list *it; (it = list_pop(&s->damages));)
        free(container_of(it, struct damage, link));
    free(s);
}

void store_close(struct store *s, void (*done)(void *arg), void *arg)
{
    check(!s->stopping);
    s->stopping = true;
    s->closed = done;
    s->closed_arg = arg;
    list_for_each_safe (it, &s->tasks) {
        struct task *t = container_of(it, struct task, link);
        if (t->waiting && t->op)
            task_fail(t, ERR_CANCELLED, "the server is stopping");
    }
    store_turn_soon(s);
}

void store_stats(const struct store *s, struct store_stats *out)
{
    *out = (struct store_stats){
        .store_id = s->record.store_id,
        .read_only = s->read_only,
        .segments_open = s->segments_open,
        .damaged_objects = s->damaged,
    };
    snprintf(out->read_only_reason, sizeof out->read_only_reason, "%s", s->read_only_reason);
    list_for_each (it, &s->tenants) {
        const struct tenant *t = container_of(it, struct tenant, link);
        out->tenants++;
        out->runs += t->runs.count;
        out->stored_bytes += t->stored_bytes;
        out->reserved_bytes += t->reserved_bytes;
        size_t at = 0;
        for (const struct run *r; (r = map_next(&t->runs, &at));)
            out->commits += r->commit_count;
    }
    if (backend_space(s->o.backend, &out->free_bytes, &out->total_bytes) < 0)
        out->free_bytes = out->total_bytes = 0;
    metric_set(METRIC_store_free_bytes, (int64_t)out->free_bytes);
}
