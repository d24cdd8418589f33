/* SPDX-License-Identifier: Apache-2.0 */
/* Tenants, runs, envelopes, attempts. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "server/store/internal.h"

/* ---- tenants ---- */

static void tenant_written(struct task *t)
{
    struct record_tenant *record = t->own;
    if (task_result(t) < 0) {
        if (t->io->op.err.class == ERR_EXISTS)
            task_fail(t, ERR_CORRUPT,
                      "the record of tenant %s exists but cannot be read (%s); see the server's log",
                      record->name, t->io->name);
        else
            task_fail_io(t, "adding a tenant");
        return;
    }
    check(tenant_insert(t->s, record)); /* tenant_reserve */
    log_info("tenant added tenant=%s quota_bytes=%" PRIu64 " weight=%u", record->name, record->quota_bytes,
             record->weight);
    task_end(t);
}

static void tenant_gated(struct task *t)
{
    struct record_tenant *record = t->own;
    if (tenant_find(t->s, record->name)) {
        task_fail(t, ERR_EXISTS, "tenant %s exists already", record->name);
        return;
    }
    if (tenant_reserve(t->s) < 0) {
        task_fail(t, ERR_NO_MEMORY, "the server has no memory for another tenant; try again later");
        return;
    }
    if (record_tenant_encode(record, &t->buf, t->err) < 0) {
        task_end(t);
        return;
    }
    name_of_tenant(record->name, t->io->name);
    task_put_new(t, tenant_written);
}

void do_tenant_add(struct task *t)
{
    struct msg_tenant_add m = {0};
    if (!task_decode(t, tenant_add, &m))
        return;
    struct record_tenant *record = task_own(t, sizeof *record);
    if (!record)
        return;
    char text[128];
    if (!slice_cstr(m.name, record->name, sizeof record->name)) {
        task_fail(t, ERR_INVALID, "tenant name '%s' is longer than %u bytes",
                  err_quote(text, sizeof text, m.name.p, m.name.n), TENANT_NAME_BYTES_MAX);
        return;
    }
    if (tenant_name_check(record->name, t->err) < 0) {
        task_end(t);
        return;
    }
    if (!slice_cstr(m.residency, record->residency, sizeof record->residency)) {
        task_fail(t, ERR_INVALID, "residency '%s' is longer than %zu bytes",
                  err_quote(text, sizeof text, m.residency.p, m.residency.n), sizeof record->residency - 1);
        return;
    }
    record->quota_bytes = m.quota_bytes;
    record->weight = m.weight ? m.weight : 1;
    record->created_ns = loop_unix_ns(t->s->o.loop);
    latch_enter(t, &t->s->latch, "another change to the list of tenants", tenant_gated);
}

static int tenants_by_name(const void *a, const void *b)
{
    return strcmp((*(struct tenant *const *)a)->record.name, (*(struct tenant *const *)b)->record.name);
}

static void tenant_item(const struct tenant *x, struct buf *out)
{
    struct msg_tenant_item item = {
        .name = slice_str(x->record.name),
        .quota_bytes = x->record.quota_bytes,
        .used_bytes = x->stored_bytes + x->reserved_bytes,
        .weight = x->record.weight,
        .residency = slice_str(x->record.residency),
    };
    size_t at = 0;
    for (const struct run *r; (r = map_next(&x->runs, &at));) {
        if (r->record.kind == RUN_DATASET)
            item.datasets++;
        else
            item.runs++;
    }
    msg_tenant_item_encode(&item, out);
}

/* Ends the task with one page. */
static void list_reply(struct task *t, uint32_t count, struct slice next, struct buf *items)
{
    if (buf_end(items, "the list", t->err) == 0) {
        struct msg_list_reply reply = {.count = count, .next = next, .items = SLICE(items->p, items->n)};
        msg_list_reply_encode(&reply, &t->op->reply);
    }
    buf_free(items);
    task_reply(t);
}

void do_tenant_list(struct task *t)
{
    struct msg_list m = {0};
    if (!task_decode(t, list, &m))
        return;
    struct tenant **all = task_own(t, (t->s->tenants_by_name.count + 1) * sizeof *all);
    if (!all)
        return;
    size_t n = 0;
    list_for_each (it, &t->s->tenants)
        all[n++] = container_of(it, struct tenant, link);
    qsort(all, n, sizeof *all, tenants_by_name);
    char after[TENANT_NAME_BYTES_MAX + 1];
    if (!slice_cstr(m.after, after, sizeof after))
        after[0] = 0;
    struct buf items = {0};
    struct slice next = {0};
    uint32_t count = 0;
    for (size_t i = 0; i < n; i++) {
        if (strcmp(all[i]->record.name, after) <= 0)
            continue;
        if (count == LIST_ITEMS_MAX) {
            next = slice_str(all[i - 1]->record.name);
            break;
        }
        tenant_item(all[i], &items);
        count++;
    }
    list_reply(t, count, next, &items);
}

/* ---- runs ---- */

/* A run whose key cannot be read is not one that has none yet: who believed that would give it another key.
 */
static bool key_is_lost(struct task *t, const struct run *r)
{
    if (r->envelope_count > 0 || r->envelopes_unreadable == 0)
        return false;
    task_fail(
        t, ERR_CORRUPT,
        "the %u envelope(s) of %s, which hold its key, could not be read when the server started; see the "
        "server's log, restore them or check the disk, and start the server again",
        r->envelopes_unreadable, run_text(r));
    return true;
}

static void run_open_reply(struct task *t, const struct run *r, bool created)
{
    if (key_is_lost(t, r))
        return;
    struct buf envelopes = {0};
    for (uint32_t i = 0; i < r->envelope_count; i++)
        buf_put(&envelopes, r->envelopes[i].bytes, ENVELOPE_BYTES);
    if (buf_end(&envelopes, "the envelopes", t->err) == 0) {
        struct msg_run_open_reply reply = {
            .run_id = r->record.run_id,
            .created = created,
            .latest_sequence = r->commit_count ? r->commits[r->commit_count - 1]->commit.sequence : 0,
            .envelopes = SLICE(envelopes.p, envelopes.n),
        };
        msg_run_open_reply_encode(&reply, &t->op->reply);
    }
    buf_free(&envelopes);
    task_reply(t);
}

static void run_written(struct task *t)
{
    struct record_run *record = t->own;
    if (task_result(t) < 0) {
        if (t->io->op.err.class == ERR_EXISTS)
            task_fail(t, ERR_CORRUPT,
                      "the record of this run exists but cannot be read (%s); see the server's log",
                      t->io->name);
        else
            task_fail_io(t, "making a run");
        return;
    }
    struct run *r = run_insert(t->tenant, record);
    check(r); /* run_reserve */
    log_info("run made tenant=%s kind=%s run=%s", t->op->tenant,
             record->kind == RUN_DATASET ? "dataset" : "run", run_text(r));
    run_open_reply(t, r, true);
}

static void run_gated(struct task *t)
{
    struct record_run *record = t->own;
    struct run *r = run_by_name(t->tenant, record->kind, slice_str(record->name));
    char text[2 * ID_BYTES + 1];
    if (r) { /* another was faster */
        run_open_reply(t, r, false);
        return;
    }
    if (map_get(&t->tenant->runs, &record->run_id)) {
        task_fail(t, ERR_EXISTS,
                  "run id %s is taken, or its run is just being destroyed; choose another at random",
                  id_text(&record->run_id, text));
        return;
    }
    if (run_reserve(t->tenant) < 0) {
        task_fail(t, ERR_NO_MEMORY, "the server has no memory for another run; try again later");
        return;
    }
    if (record_run_encode(record, &t->buf, t->err) < 0) {
        task_end(t);
        return;
    }
    struct id key = run_name_key(record->kind, slice_str(record->name));
    name_of_run(t->op->tenant, record->kind, &key, t->io->name);
    task_put_new(t, run_written);
}

void do_run_open(struct task *t)
{
    struct msg_run_open m = {0};
    if (!task_decode(t, run_open, &m))
        return;
    if (run_name_check(m.name.p, m.name.n, t->err) < 0) {
        task_end(t);
        return;
    }
    if (!m.create || run_by_name(t->tenant, m.kind, m.name) ||
        damage_of_run(t->tenant, t->s, m.kind, m.name)) {
        if (task_run_by_name(t, m.kind, m.name))
            run_open_reply(t, t->run, false);
        return;
    }
    static const struct id zero;
    if (t->op->role < ROLE_WRITER) {
        task_fail(t, ERR_DENIED, "making a run needs the role writer, this certificate has %s",
                  role_name(t->op->role));
    } else if (t->s->read_only) {
        task_fail(t, ERR_READ_ONLY, "the store takes no writes since a sync failed (%s)",
                  t->s->read_only_reason);
    } else if (m.kind != RUN_CHECKPOINTS && m.kind != RUN_DATASET) {
        task_fail(t, ERR_INVALID, "expected kind 1 (run) or 2 (dataset), found %u", m.kind);
    } else if (id_equal(&m.run_id, &zero)) {
        task_fail(t, ERR_INVALID, "a new run needs a random id, found zero");
    } else {
        struct record_run *record = task_own(t, sizeof *record);
        if (!record)
            return;
        record->kind = m.kind;
        record->run_id = m.run_id;
        record->created_ns = loop_unix_ns(t->s->o.loop);
        check(slice_cstr(m.name, record->name, sizeof record->name)); /* run_name_check */
        latch_enter(t, &t->tenant->latch, "another change to the list of runs", run_gated);
    }
}

static int runs_by_name(const void *a, const void *b)
{
    return strcmp((*(struct run *const *)a)->record.name, (*(struct run *const *)b)->record.name);
}

static void run_item(const struct run *r, struct buf *out)
{
    uint8_t epochs[4 * ENVELOPES_MAX];
    for (uint32_t i = 0; i < r->envelope_count; i++)
        le32_put(epochs + 4 * i, r->envelopes[i].epoch);
    const struct commit *latest = r->commit_count ? &r->commits[r->commit_count - 1]->commit : NULL;
    struct msg_run_item item = {
        .name = slice_str(r->record.name),
        .run_id = r->record.run_id,
        .commits = (uint32_t)r->commit_count,
        .latest_sequence = latest ? latest->sequence : 0,
        .latest_step = latest ? latest->step : 0,
        .stored_bytes = r->stored_bytes,
        .created_ns = r->record.created_ns,
        .envelope_epochs = SLICE(epochs, 4 * r->envelope_count),
    };
    msg_run_item_encode(&item, out);
}

void do_run_list(struct task *t)
{
    struct msg_run_list m = {0};
    if (!task_decode(t, run_list, &m))
        return;
    struct run **all = task_own(t, (t->tenant->runs.count + 1) * sizeof *all);
    if (!all)
        return;
    size_t n = 0, at = 0;
    for (struct run *r; (r = map_next(&t->tenant->runs, &at));)
        if (r->record.kind == m.kind && !r->destroying)
            all[n++] = r;
    qsort(all, n, sizeof *all, runs_by_name);
    char after[NAME_BYTES_MAX + 1];
    if (!slice_cstr(m.after, after, sizeof after))
        after[0] = 0;
    struct buf items = {0};
    struct slice next = {0};
    uint32_t count = 0;
    for (size_t i = 0; i < n; i++) {
        if (strcmp(all[i]->record.name, after) <= 0)
            continue;
        if (count == LIST_ITEMS_MAX || items.n > PAGE_BYTES_MAX) {
            next = slice_str(all[i - 1]->record.name);
            break;
        }
        run_item(all[i], &items);
        count++;
    }
    list_reply(t, count, next, &items);
}

/* ---- destroying a run ---- */

/* Everything in the run's folder, in this order: without envelopes nothing can be read any more, without
 * commit records nothing is offered any more. Whatever else lies there goes last. */
static const char destroy_order[] = "ecpbsa";

struct destroy {
    struct loop_names names;
    size_t order, at;
    unsigned rounds;
    uint64_t removed;
};

static void destroy_free(void *own)
{
    struct destroy *d = own;
    loop_names_free(&d->names);
    free(d);
}

static task_step destroy_next, destroy_list;

static void destroy_failed(struct task *t, const char *doing)
{
    t->run->destroying = false; /* it can be tried again */
    task_fail_io(t, doing);
}

static void destroy_record_removed(struct task *t)
{
    struct destroy *d = t->own;
    if (task_result(t) < 0 && t->io->op.err.class != ERR_NOT_FOUND) {
        destroy_failed(t, "removing the record of the run");
        return;
    }
    log_info("run destroyed tenant=%s run=%s objects=%" PRIu64, t->op->tenant, run_text(t->run), d->removed);
    damage_forget(t->s, t->run);
    run_forget(t->run);
    task_end(t);
}

/* The catalogue follows the medium at each step, so that a run whose destruction failed half way shows as it
 * is. */
static void destroy_in_catalogue(struct run *r, const char *name)
{
    uint64_t number;
    struct id id;
    struct commit_entry *c;
    struct segment *g;
    if (name_number(name, 'e', 8, &number)) {
        envelope_remove(r, (uint32_t)number);
    } else if (name_number(name, 'c', 16, &number) && (c = commit_by_sequence(r, number))) {
        commit_remove(r, c);
    } else if (name[0] == 's' && strlen(name) == 2 + 2 * ID_BYTES &&
               hex_decode(name + 2, ID_BYTES, id.bytes) == 0 && (g = segment_find(r->tenant, &id)) &&
               g->run == r && !g->writer && g->state == SEGMENT_SEALED) {
        r->stored_bytes -= g->file_bytes;
        r->tenant->stored_bytes -= g->file_bytes;
        segment_forget(g);
    }
}

static void destroy_removed(struct task *t)
{
    struct destroy *d = t->own;
    if (task_result(t) < 0 && t->io->op.err.class != ERR_NOT_FOUND) {
        destroy_failed(t, "destroying a run");
        return;
    }
    destroy_in_catalogue(t->run, d->names.names[d->at++]);
    d->removed++;
    destroy_next(t);
}

static bool destroy_takes(const struct destroy *d, const char *name)
{
    char letter = destroy_order[d->order];
    return letter ? name[0] == letter : !strchr("ecpbsa", name[0]);
}

static void destroy_next(struct task *t)
{
    struct destroy *d = t->own;
    char folder[OBJECT_NAME_BYTES];
    name_of_folder(t->run, folder);
    for (; d->order < sizeof destroy_order; d->order++, d->at = 0) {
        while (d->at < d->names.count && !destroy_takes(d, d->names.names[d->at]))
            d->at++;
        if (d->at < d->names.count) {
            snprintf(t->io->name, sizeof t->io->name, "%.180s/%.60s", folder, d->names.names[d->at]);
            task_remove(t, destroy_removed);
            return;
        }
    }
    loop_names_free(&d->names);
    task_later(t, destroy_list); /* a segment may have been sealed meanwhile */
}

static void destroy_listed(struct task *t)
{
    struct destroy *d = t->own;
    if (task_result(t) < 0) {
        destroy_failed(t, "listing the run that is to be destroyed");
        return;
    }
    d->order = d->at = 0;
    if (d->names.count > 0 && d->rounds++ < 8) {
        destroy_next(t);
        return;
    }
    name_of_run(t->op->tenant, t->run->record.kind, &t->run->name_key, t->io->name);
    task_remove(t, destroy_record_removed);
}

static void destroy_list(struct task *t)
{
    struct destroy *d = t->own;
    name_of_folder(t->run, t->io->name);
    backend_list(t->s->o.backend, task_op(t, destroy_listed), t->io->name, &d->names);
}

static void destroy_gated(struct task *t)
{
    struct run *r = t->run;
    struct err why = {0};
    if (r->destroying) {
        task_fail(t, ERR_NOT_FOUND, "the run has been destroyed just now");
        return;
    }
    r->destroying = true;
    err_set(&why, ERR_NOT_FOUND, "%s was destroyed by an operator", run_text(r));
    saves_fail(t->s, r, NULL, &why);
    list_for_each_safe (it, &r->loose)
        segment_give_up(t->s, container_of(it, struct segment, loose), &why);
    destroy_list(t);
}

void do_run_destroy(struct task *t)
{
    struct msg_run_destroy m = {0};
    if (!task_decode(t, run_destroy, &m) || !task_run_by_name(t, m.kind, m.name))
        return;
    struct destroy *d = task_own(t, sizeof *d);
    if (!d)
        return;
    t->own_free = destroy_free;
    latch_enter(t, &t->run->latch, "another change to the run", destroy_gated);
}

/* ---- envelopes ---- */

struct envelope_job {
    uint32_t epoch;
    uint8_t bytes[ENVELOPE_BYTES];
};

static void envelope_written(struct task *t)
{
    struct envelope_job *job = t->own;
    if (task_result(t) < 0) {
        task_fail_io(t, "storing an envelope");
        return;
    }
    check(envelope_insert(t->run, job->epoch, job->bytes) == 0); /* envelope_reserve */
    log_info("envelope stored tenant=%s run=%s epoch=%u", t->op->tenant, run_text(t->run), job->epoch);
    task_end(t);
}

static void envelope_gated(struct task *t)
{
    struct envelope_job *job = t->own;
    struct run *r = t->run;
    if (key_is_lost(t, r))
        return;
    for (uint32_t i = 0; i < r->envelope_count; i++) {
        if (r->envelopes[i].epoch != job->epoch)
            continue;
        if (memcmp(r->envelopes[i].bytes, job->bytes, ENVELOPE_BYTES) == 0)
            task_end(t); /* told twice */
        else
            task_fail(t, ERR_EXISTS,
                      "%s has an envelope of epoch %u already; open the run again and use that one",
                      run_text(r), job->epoch);
        return;
    }
    if (r->envelope_count > 0) {
        struct id known = envelope_dek_id(r->envelopes[0].bytes), offered = envelope_dek_id(job->bytes);
        if (!id_equal(&known, &offered)) { /* two writers raced, with KEKs of two epochs */
            task_fail(t, ERR_EXISTS,
                      "%s has a key already, and this envelope holds another; open the run again and use the "
                      "key that is there",
                      run_text(r));
            return;
        }
    }
    if (r->envelope_count == ENVELOPES_MAX) {
        task_fail(t, ERR_LIMIT, "%s has %u envelopes already, the most allowed; drop old epochs first",
                  run_text(r), ENVELOPES_MAX);
        return;
    }
    if (envelope_reserve(r) < 0) {
        task_fail(t, ERR_NO_MEMORY, "the server has no memory for an envelope; try again later");
        return;
    }
    buf_put(&t->buf, job->bytes, ENVELOPE_BYTES);
    if (buf_end(&t->buf, "the envelope", t->err) < 0) {
        task_end(t);
        return;
    }
    name_of_number(r, 'e', job->epoch, t->io->name);
    task_put_new(t, envelope_written);
}

void do_envelope_put(struct task *t)
{
    struct msg_envelope_put m = {0};
    if (!task_decode(t, envelope_put, &m) || !task_run_by_id(t, &m.run_id))
        return;
    struct envelope_job *job = task_own(t, sizeof *job);
    if (!job)
        return;
    struct id run_id;
    if (m.envelope.n != ENVELOPE_BYTES) {
        task_fail(t, ERR_PROTOCOL, "expected an envelope of %u bytes, found %zu", ENVELOPE_BYTES,
                  m.envelope.n);
        return;
    }
    if (envelope_epoch(m.envelope.p, m.envelope.n, &run_id, &job->epoch, t->err) < 0) {
        task_end(t);
        return;
    }
    if (!id_equal(&run_id, &m.run_id)) {
        char text[2 * ID_BYTES + 1];
        task_fail(t, ERR_INVALID, "the envelope belongs to the run with id %s, not to %s",
                  id_text(&run_id, text), run_text(t->run));
        return;
    }
    memcpy(job->bytes, m.envelope.p, ENVELOPE_BYTES);
    latch_enter(t, &t->run->latch, "another change to the run", envelope_gated);
}

static void envelope_dropped(struct task *t)
{
    struct envelope_job *job = t->own;
    if (task_result(t) < 0 && t->io->op.err.class != ERR_NOT_FOUND) {
        task_fail_io(t, "dropping an envelope");
        return;
    }
    envelope_remove(t->run, job->epoch);
    log_info("envelope dropped tenant=%s run=%s epoch=%u", t->op->tenant, run_text(t->run), job->epoch);
    task_end(t);
}

static void drop_gated(struct task *t)
{
    struct envelope_job *job = t->own;
    bool there = false;
    for (uint32_t i = 0; i < t->run->envelope_count; i++)
        there |= t->run->envelopes[i].epoch == job->epoch;
    if (!there)
        task_fail(t, ERR_NOT_FOUND, "%s has no envelope of epoch %u", run_text(t->run), job->epoch);
    else if (t->run->envelope_count == 1)
        task_fail(
            t, ERR_INVALID,
            "epoch %u is the last envelope of %s: without it the run could never be read again. Rotate to a "
            "newer key first, or destroy the run if that is what you want",
            job->epoch, run_text(t->run));
    else {
        name_of_number(t->run, 'e', job->epoch, t->io->name);
        task_remove(t, envelope_dropped);
    }
}

void do_envelope_drop(struct task *t)
{
    struct msg_envelope_drop m = {0};
    if (!task_decode(t, envelope_drop, &m) || !task_run_by_id(t, &m.run_id))
        return;
    struct envelope_job *job = task_own(t, sizeof *job);
    if (!job)
        return;
    job->epoch = m.epoch;
    latch_enter(t, &t->run->latch, "another change to the run", drop_gated);
}

/* ---- attempts ---- */

static void attempt_reply(struct task *t, uint64_t number)
{
    struct msg_attempt_reply reply = {.number = number};
    msg_attempt_reply_encode(&reply, &t->op->reply);
    task_reply(t);
}

static void attempt_gated(struct task *t);

static void attempt_written(struct task *t)
{
    struct record_attempt *record = t->own;
    struct run *r = t->run;
    struct err why = {0};
    if (task_result(t) < 0) {
        if (t->io->op.err.class == ERR_EXISTS) { /* an object of that number that could not be read */
            r->attempt_highest = record->number;
            attempt_gated(t);
        } else {
            task_fail_io(t, "registering an attempt");
        }
        return;
    }
    check(attempt_insert(r, record) == 0); /* attempt_reserve */
    log_info("attempt registered tenant=%s run=%s number=%" PRIu64 " world=%u", t->op->tenant, run_text(r),
             record->number, record->world);
    err_set(&why, ERR_FENCED,
            "an older attempt of %s was replaced by attempt %" PRIu64
            "; this process must stop saving, or start again",
            run_text(r), record->number);
    saves_fail(t->s, r, &record->attempt, &why);
    list_for_each_safe (it, &r->loose) {
        struct segment *g = container_of(it, struct segment, loose);
        if (!id_equal(&g->attempt, &record->attempt))
            segment_give_up(t->s, g, &why);
    }
    attempt_reply(t, record->number);
}

static void attempt_gated(struct task *t)
{
    struct record_attempt *record = t->own;
    struct run *r = t->run;
    const struct record_attempt *known = attempt_find(r, &record->attempt);
    if (r->destroying) {
        task_fail(t, ERR_NOT_FOUND, "the run has been destroyed just now");
        return;
    }
    if (known) {
        if (!task_attempt_is_live(t, r, &record->attempt))
            return;
        if (known->world != record->world)
            task_fail(t, ERR_MISMATCH,
                      "attempt %" PRIu64
                      " of %s was registered with %u ranks, this rank says %u; all ranks of one "
                      "incarnation must agree",
                      known->number, run_text(r), known->world, record->world);
        else
            attempt_reply(t, known->number);
        return;
    }
    if (attempt_reserve(r) < 0) {
        task_fail(t, ERR_NO_MEMORY, "the server has no memory for another attempt; try again later");
        return;
    }
    record->number = r->attempt_highest + 1;
    buf_reset(&t->buf);
    if (record_attempt_encode(record, &t->buf, t->err) < 0) {
        task_end(t);
        return;
    }
    name_of_number(r, 'a', record->number, t->io->name);
    task_put_new(t, attempt_written);
}

void do_attempt(struct task *t)
{
    struct msg_attempt m = {0};
    if (!task_decode(t, attempt, &m) || !task_run_by_id(t, &m.run_id))
        return;
    static const struct id zero;
    if (m.world == 0 || m.world > WORLD_MAX || id_equal(&m.attempt, &zero)) {
        task_fail(t, ERR_INVALID, "expected a random attempt id and 1 to %u ranks, found %u ranks%s",
                  WORLD_MAX, m.world, id_equal(&m.attempt, &zero) ? " and id zero" : "");
        return;
    }
    struct record_attempt *record = task_own(t, sizeof *record);
    if (!record)
        return;
    record->run_id = m.run_id;
    record->attempt = m.attempt;
    record->world = m.world;
    record->created_ns = loop_unix_ns(t->s->o.loop);
    latch_enter(t, &t->run->latch, "another change to the run", attempt_gated);
}
