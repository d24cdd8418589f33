/* SPDX-License-Identifier: Apache-2.0 */
/* What operators ask for: lists, marks, prune, status, tenants. Verify is in verify.c, keys in runs.c. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/list.h"
#include "format/commit.h"

static int kind_check(enum larder_kind kind, struct err *e)
{
    if (kind == LARDER_CHECKPOINTS || kind == LARDER_DATASETS)
        return 0;
    return err_set(e, ERR_INVALID, "kind is %d; expected LARDER_CHECKPOINTS (1) or LARDER_DATASETS (2)",
                   (int)kind);
}

static int run_check(const char *run, struct err *e)
{
    if (!run)
        return err_set(e, ERR_INVALID, "no run is named");
    return run_name_check(run, strlen(run), e);
}

static int enter_run(struct larder *c, enum larder_kind kind, const char *run, struct err *e)
{
    err_clear(e);
    int rc = client_enter(c, e);
    if (rc == 0)
        rc = kind_check(kind, e);
    if (rc == 0)
        rc = run_check(run, e);
    return rc;
}

/* ---- lists ---- */

struct run_walk {
    int (*each)(void *arg, const struct larder_run_info *r);
    void *arg;
    bool ended; /* by each, with ended_by */
    int ended_by;
};

static int give_run(struct run_walk *w, const struct larder_run_info *i)
{
    w->ended_by = w->each(w->arg, i);
    w->ended = w->ended_by != 0;
    return w->ended_by;
}

static int give_run_item(void *arg, struct rcur *in, struct err *e)
{
    struct msg_run_item m;
    char name[NAME_BYTES_MAX + 1];
    int rc = msg_run_item_decode(in, &m, e);
    if (rc < 0)
        return rc;
    if (!slice_cstr(m.name, name, sizeof name))
        return err_set(e, ERR_PROTOCOL, "the server listed a run under a name of %zu bytes", m.name.n);
    struct larder_run_info i = {
        .name = name,
        .commits = m.commits,
        .latest_sequence = m.latest_sequence,
        .latest_step = m.latest_step,
        .stored_bytes = m.stored_bytes,
        .created_ns = m.created_ns,
    };
    memcpy(i.run_id, m.run_id.bytes, sizeof i.run_id);
    for (size_t at = 0; at + 4 <= m.envelope_epochs.n; at += 4)
        if (le32_get(m.envelope_epochs.p + at) > i.key_epoch)
            i.key_epoch = le32_get(m.envelope_epochs.p + at);
    return give_run(arg, &i);
}

static int give_published_item(void *arg, struct rcur *in, struct err *e)
{
    struct msg_published_item m;
    char name[NAME_BYTES_MAX + 1];
    int rc = msg_published_item_decode(in, &m, e);
    if (rc < 0)
        return rc;
    if (!slice_cstr(m.name, name, sizeof name))
        return err_set(e, ERR_PROTOCOL, "the server listed a published folder under a name of %zu bytes",
                       m.name.n);
    struct larder_run_info i = {.name = name, .stored_bytes = m.bytes, .published = 1};
    return give_run(arg, &i);
}

int larder_run_list(struct larder *c, enum larder_kind kind,
                    int (*each)(void *arg, const struct larder_run_info *r), void *arg,
                    struct larder_error *error)
{
    struct err e;
    err_clear(&e);
    struct run_walk w = {.each = each, .arg = arg};
    int rc = client_enter(c, &e);
    if (rc == 0)
        rc = kind_check(kind, &e);
    if (rc == 0)
        rc = list_runs(c, (enum run_kind)kind, give_run_item, &w, &e);
    if (rc == 0 && kind == LARDER_DATASETS)
        rc = list_published(c, give_published_item, &w, &e);
    if (w.ended) {
        client_leave(0, &e, error);
        return w.ended_by;
    }
    return client_leave(rc, &e, error);
}

/* "key=value, key=value" from encoded labels; what does not fit is left out whole. */
static void labels_text(struct slice labels, char *out, size_t size)
{
    struct rcur in = rcur_of(labels.p, labels.n);
    size_t n = 0;
    out[0] = 0;
    while (in.left > 0 && !in.failed) {
        struct slice key = rcur_take16(&in), value = rcur_take16(&in);
        size_t need = (n ? 2 : 0) + key.n + 1 + value.n;
        if (in.failed || n + need >= size)
            return;
        n += (size_t)snprintf(out + n, size - n, "%s%.*s=%.*s", n ? ", " : "", (int)key.n,
                              (const char *)key.p, (int)value.n, (const char *)value.p);
    }
}

struct commit_walk {
    int (*each)(void *arg, const struct larder_commit_info *i);
    void *arg;
    bool ended;
    int ended_by;
};

static int give_commit_item(void *arg, struct rcur *in, struct err *e)
{
    struct commit_walk *w = arg;
    struct msg_commit_item m;
    char reason[ERR_TEXT_BYTES], labels[LABELS_BYTES_MAX + 1];
    int rc = msg_commit_item_decode(in, &m, e);
    if (rc < 0)
        return rc;
    err_quote(reason, sizeof reason, m.reason.p, m.reason.n);
    labels_text(m.labels, labels, sizeof labels);
    struct larder_commit_info i = {
        .step = m.step,
        .sequence = m.sequence,
        .attempt_number = m.attempt_number,
        .state = (enum larder_commit_state)m.state,
        .pinned = m.pinned,
        .world = m.world,
        .parts = m.parts,
        .plain_bytes = m.plain_bytes,
        .stored_bytes = m.stored_bytes,
        .server_time_ns = m.server_time_ns,
        .reason = reason,
        .labels = labels,
    };
    w->ended_by = w->each(w->arg, &i);
    w->ended = w->ended_by != 0;
    return w->ended_by;
}

int larder_commit_list(struct larder *c, enum larder_kind kind, const char *run, int with_pending,
                       int (*each)(void *arg, const struct larder_commit_info *i), void *arg,
                       struct larder_error *error)
{
    struct err e;
    struct commit_walk w = {.each = each, .arg = arg};
    int rc = enter_run(c, kind, run, &e);
    if (rc == 0)
        rc = list_commits(c, (enum run_kind)kind, run, with_pending != 0, give_commit_item, &w, &e);
    if (w.ended) {
        client_leave(0, &e, error);
        return w.ended_by;
    }
    return client_leave(rc, &e, error);
}

/* ---- marks ---- */

int larder_mark(struct larder *c, enum larder_kind kind, const char *run, uint64_t sequence,
                enum larder_mark mark, const char *reason, struct larder_error *error)
{
    struct err e;
    struct buf b = {0};
    struct call call;
    int rc = enter_run(c, kind, run, &e);
    if (rc == 0 && (mark < LARDER_PIN || mark > LARDER_MARK_GOOD))
        rc = err_set(&e, ERR_INVALID, "mark is %d; expected pin, unpin, bad or good (1 to 4)", (int)mark);
    if (rc == 0) {
        struct msg_mark m = {.kind = (uint8_t)kind,
                             .name = slice_str(run),
                             .sequence = sequence,
                             .action = (uint8_t)mark,
                             .reason = slice_str(reason ? reason : "")};
        msg_mark_encode(&m, &b);
        rc = buf_end(&b, "mark", &e);
    }
    if (rc == 0)
        rc = conn_call(client_conn(c), OP_MARK, SLICE(b.p, b.n), SLICE(NULL, 0), 0, &call, NULL, &e);
    if (rc == 0)
        call_free(&call);
    buf_free(&b);
    return client_leave(rc, &e, error);
}

/* ---- prune ---- */

struct prune_words {
    const struct larder_prune_options *o;
    char text[96];
};

/* In the largest unit that leaves no rest. */
static void younger_text(struct prune_words *w)
{
    static const struct {
        uint64_t seconds;
        const char *name;
    } units[] = {{24 * 3600, "day"}, {3600, "hour"}, {60, "minute"}, {1, "second"}};
    size_t i = 0;
    while (w->o->keep_within_s % units[i].seconds != 0)
        i++;
    uint64_t n = w->o->keep_within_s / units[i].seconds;
    snprintf(w->text, sizeof w->text, "younger than %llu %s%s", (unsigned long long)n, units[i].name,
             n == 1 ? "" : "s");
}

static const char *prune_reason(struct prune_words *w, unsigned reason)
{
    switch (reason) {
    case PRUNE_KEEP_LAST: snprintf(w->text, sizeof w->text, "last %u", w->o->keep_last); break;
    case PRUNE_KEEP_EVERY:
        snprintf(w->text, sizeof w->text, "step is a multiple of %llu", (unsigned long long)w->o->keep_every);
        break;
    case PRUNE_KEEP_WITHIN: younger_text(w); break;
    case PRUNE_KEEP_PINNED: return "pinned";
    case PRUNE_KEEP_LAST_GOOD: return "the last good one is never removed";
    case PRUNE_REMOVE_OLD: return "older than the rules keep";
    case PRUNE_REMOVE_SUPERSEDED: return "its step was committed again later";
    case PRUNE_REMOVE_ABANDONED: return "a save that never committed";
    default: snprintf(w->text, sizeof w->text, "reason %u, which this liblarder does not know", reason);
    }
    return w->text;
}

static int give_prune_items(const struct larder_prune_options *o, const struct msg_prune_reply *r,
                            int (*each)(void *arg, const struct larder_prune_item *i), void *arg,
                            struct err *e)
{
    struct rcur in = rcur_of(r->items.p, r->items.n);
    for (uint32_t n = 0; n < r->count; n++) {
        struct msg_prune_item m;
        struct prune_words words = {.o = o};
        int rc = msg_prune_item_decode(&in, &m, e);
        if (rc < 0)
            return rc;
        struct larder_prune_item i = {
            .step = m.step,
            .sequence = m.sequence,
            .stored_bytes = m.stored_bytes,
            .server_time_ns = m.server_time_ns,
            .remove = m.reason >= PRUNE_REMOVE_OLD,
            .removed = m.removed,
            .reason = prune_reason(&words, m.reason),
        };
        if (each && (rc = each(arg, &i)) != 0)
            return rc;
    }
    return rcur_end(&in, "the list of a prune plan", e);
}

static int prune(struct larder *c, const struct larder_prune_options *o,
                 int (*each)(void *arg, const struct larder_prune_item *i), void *arg, uint8_t plan[32],
                 uint64_t *freed, struct err *e)
{
    struct buf b = {0};
    struct call call;
    struct rcur in = {0};
    struct msg_prune m = {.kind = (uint8_t)o->kind,
                          .name = slice_str(o->run),
                          .keep_last = o->keep_last,
                          .keep_every = o->keep_every,
                          .keep_within_s = o->keep_within_s,
                          .execute = o->execute != 0};
    if (o->plan)
        memcpy(m.plan.bytes, o->plan, sizeof m.plan.bytes);
    msg_prune_encode(&m, &b);
    int rc = buf_end(&b, "prune", e);
    if (rc == 0)
        rc = conn_call(client_conn(c), OP_PRUNE, SLICE(b.p, b.n), SLICE(NULL, 0), 0, &call, &in, e);
    buf_free(&b);
    if (rc == -EILSEQ && o->plan) { /* the plan that was seen is no longer the plan: look again */
        e->class = ERR_BUSY;
        e->errnum = EBUSY;
        rc = -EBUSY;
    }
    if (rc < 0)
        return rc;
    struct msg_prune_reply r;
    rc = msg_prune_reply_decode(&in, &r, e);
    if (rc == 0) {
        if (plan)
            memcpy(plan, r.plan.bytes, 32);
        if (freed)
            *freed = r.freed_bytes;
        rc = give_prune_items(o, &r, each, arg, e);
    }
    call_free(&call);
    return rc;
}

int larder_prune(struct larder *c, const struct larder_prune_options *options,
                 int (*each)(void *arg, const struct larder_prune_item *i), void *arg, uint8_t plan[32],
                 uint64_t *freed_bytes, struct larder_error *error)
{
    struct err e;
    struct larder_prune_options o = {0};
    memcpy(&o, options, options->size < sizeof o ? options->size : sizeof o);
    int rc = enter_run(c, o.kind, o.run, &e);
    if (rc == 0)
        rc = prune(c, &o, each, arg, plan, freed_bytes, &e);
    return client_leave(rc, &e, error);
}

/* ---- status, tenants ---- */

int larder_status(struct larder *c, char **json, struct larder_error *error)
{
    struct err e;
    err_clear(&e);
    struct call call;
    struct rcur in = {0};
    int rc = client_enter(c, &e);
    if (rc == 0)
        rc = conn_call(client_conn(c), OP_STATUS, SLICE(NULL, 0), SLICE(NULL, 0), 0, &call, &in, &e);
    if (rc < 0)
        return client_leave(rc, &e, error);
    struct msg_status_reply m;
    rc = msg_status_reply_decode(&in, &m, &e);
    if (rc == 0) {
        *json = malloc(m.json.n + 1);
        if (*json) {
            memcpy(*json, m.json.p, m.json.n);
            (*json)[m.json.n] = 0;
        } else {
            rc = err_set(&e, ERR_NO_MEMORY, "no memory for the server's status");
        }
    }
    call_free(&call);
    return client_leave(rc, &e, error);
}

int larder_tenant_add(struct larder *c, const char *name, uint64_t quota_bytes, uint32_t weight,
                      const char *residency, struct larder_error *error)
{
    struct err e;
    err_clear(&e);
    struct buf b = {0};
    struct call call;
    int rc = client_enter(c, &e);
    if (rc == 0)
        rc = name ? tenant_name_check(name, &e) : err_set(&e, ERR_INVALID, "no tenant is named");
    if (rc == 0) {
        struct msg_tenant_add m = {.name = slice_str(name),
                                   .quota_bytes = quota_bytes,
                                   .weight = weight,
                                   .residency = slice_str(residency ? residency : "")};
        msg_tenant_add_encode(&m, &b);
        rc = buf_end(&b, "tenant_add", &e);
    }
    if (rc == 0)
        rc = conn_call(client_conn(c), OP_TENANT_ADD, SLICE(b.p, b.n), SLICE(NULL, 0), 0, &call, NULL, &e);
    if (rc == 0)
        call_free(&call);
    buf_free(&b);
    return client_leave(rc, &e, error);
}

struct tenant_walk {
    int (*each)(void *arg, const struct larder_tenant_info *t);
    void *arg;
    bool ended;
    int ended_by;
};

static int give_tenant_item(void *arg, struct rcur *in, struct err *e)
{
    struct tenant_walk *w = arg;
    struct msg_tenant_item m;
    char name[TENANT_NAME_BYTES_MAX + 1], residency[128];
    int rc = msg_tenant_item_decode(in, &m, e);
    if (rc < 0)
        return rc;
    if (!slice_cstr(m.name, name, sizeof name))
        return err_set(e, ERR_PROTOCOL, "the server listed a tenant under a name of %zu bytes", m.name.n);
    err_quote(residency, sizeof residency, m.residency.p, m.residency.n);
    struct larder_tenant_info t = {
        .name = name,
        .quota_bytes = m.quota_bytes,
        .used_bytes = m.used_bytes,
        .weight = m.weight,
        .runs = m.runs,
        .datasets = m.datasets,
        .residency = residency,
    };
    w->ended_by = w->each(w->arg, &t);
    w->ended = w->ended_by != 0;
    return w->ended_by;
}

int larder_tenant_list(struct larder *c, int (*each)(void *arg, const struct larder_tenant_info *t),
                       void *arg, struct larder_error *error)
{
    struct err e;
    err_clear(&e);
    struct tenant_walk w = {.each = each, .arg = arg};
    int rc = client_enter(c, &e);
    if (rc == 0)
        rc = list_tenants(c, give_tenant_item, &w, &e);
    if (w.ended) {
        client_leave(0, &e, error);
        return w.ended_by;
    }
    return client_leave(rc, &e, error);
}
