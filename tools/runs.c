/* SPDX-License-Identifier: Apache-2.0 */
/* What checkpoints and datasets have in common: lists, finding a commit, verify, prune, destroy. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/hash.h"
#include "tools/commands.h"

const char *commit_state_name(enum larder_commit_state state)
{
    switch (state) {
    case LARDER_COMMIT_GOOD: return "good";
    case LARDER_COMMIT_BAD: return "bad";
    case LARDER_COMMIT_PENDING: return "pending";
    case LARDER_COMMIT_ABANDONED: return "abandoned";
    }
    return "unknown";
}

/* ---- ls -------------------------------------------------------------------------------------------------
 */

struct runs {
    struct table *table;
    json_t *list;
    uint64_t now_ns;
    bool datasets;
};

static int one_run(void *arg, const struct larder_run_info *r)
{
    struct runs *l = arg;
    if (l->list) {
        char id[2 * LARDER_ID_BYTES + 1];
        hex_encode(r->run_id, sizeof r->run_id, id);
        json_array_append_new(
            l->list, json_pack("{s:s,s:s,s:I,s:o,s:I,s:I,s:I,s:I,s:b}", "name", r->name, "id", id, "commits",
                               (json_int_t)r->commits, "latest_step", json_u64(r->latest_step),
                               "latest_sequence", (json_int_t)r->latest_sequence, "stored_bytes",
                               (json_int_t)r->stored_bytes, "created_ns", (json_int_t)r->created_ns,
                               "key_epoch", (json_int_t)r->key_epoch, "published", r->published));
        return 0;
    }
    bool none = r->commits == 0;
    table_row(l->table, r->name, r->published ? "published" : number_text(r->commits).s,
              none ? "-" : number_text(l->datasets ? r->latest_sequence : r->latest_step).s,
              r->published ? "-" : size_text(r->stored_bytes).s, age_text(l->now_ns, r->created_ns).s,
              r->key_epoch ? number_text(r->key_epoch).s : "-");
    return 0;
}

int runs_list(struct larder *c, enum larder_kind kind, bool json)
{
    static const char *const run_heads[] = {"RUN",     ">CHECKPOINTS", ">LATEST STEP",
                                            ">STORED", ">CREATED",     ">KEY EPOCH"};
    static const char *const set_heads[] = {"DATASET", ">VERSIONS", ">LATEST",
                                            ">STORED", ">CREATED",  ">KEY EPOCH"};
    struct larder_error e = {0};
    struct table t;
    struct runs l = {.table = &t, .now_ns = client_now_ns(c), .datasets = kind == LARDER_DATASETS};
    if (json)
        l.list = json_array();
    table_begin(&t, l.datasets ? set_heads : run_heads, 6);
    int status = larder_run_list(c, kind, one_run, &l, &e) < 0 ? fail(&e) : STATUS_OK;
    if (json) {
        if (status == STATUS_OK)
            return json_print(l.list);
        json_decref(l.list);
    } else if (status == STATUS_OK && t.cells == 0) {
        fprintf(stderr, "no %s yet\n", l.datasets ? "datasets" : "checkpoints");
        table_end(&t);
    } else if (t.cells) { /* what was listed before the list failed, too */
        table_end(&t);
    }
    return status;
}

/* ---- what is published, not stored ---- */

struct looking {
    const char *name;
    bool published;
};

static int look_for(void *arg, const struct larder_run_info *r)
{
    struct looking *l = arg;
    l->published = r->published && strcmp(r->name, l->name) == 0;
    return l->published;
}

/* Fails; where a dataset is missing because it is a folder that the server publishes, says that. */
static int fail_run(struct larder *c, enum larder_kind kind, const char *run, const struct larder_error *e)
{
    struct looking l = {.name = run};
    if (e->kind == LARDER_NOT_FOUND && kind == LARDER_DATASETS && run &&
        larder_run_list(c, kind, look_for, &l, NULL) > 0 && l.published)
        return fail_with(
            STATUS_MISSING,
            "%s is a folder that the server publishes: nothing of it is stored here, and nothing "
            "there is changed; see [publish] in larderd.conf(5)",
            name_text(run).s);
    return fail(e);
}

/* ---- finding a commit -------------------------------------------------------------------------------------
 */

struct finding_commit {
    const uint64_t *step;
    uint64_t sequence, found_step;
    bool found;
};

static int look_at_commit(void *arg, const struct larder_commit_info *i)
{
    struct finding_commit *f = arg;
    bool committed = i->state == LARDER_COMMIT_GOOD || i->state == LARDER_COMMIT_BAD;
    bool readable = i->world > 0;
    if (!committed || (f->step && !readable) || (f->step ? i->step != *f->step : i->sequence != f->sequence))
        return 0;
    if (!f->found || i->sequence > f->sequence) {
        f->sequence = i->sequence;
        f->found_step = i->step;
    }
    f->found = true;
    return 0;
}

int commit_find(struct larder *c, enum larder_kind kind, const char *run, const uint64_t *step,
                uint64_t *sequence, uint64_t *found_step)
{
    struct larder_error e = {0};
    struct finding_commit f = {.step = step, .sequence = step ? 0 : *sequence};
    if (larder_commit_list(c, kind, run, 0, look_at_commit, &f, &e) < 0)
        return fail(&e);
    if (!f.found)
        return fail_with(
            STATUS_MISSING, "%s \"%s\" has no committed %s %" PRIu64 "; larder %s ls %s lists what it has",
            kind == LARDER_DATASETS ? "dataset" : "run", name_text(run).s,
            kind == LARDER_DATASETS ? "version"
            : step                  ? "step"
                                    : "sequence",
            step ? *step : *sequence, kind == LARDER_DATASETS ? "dataset" : "ckpt", name_text(run).s);
    *sequence = f.sequence;
    *found_step = f.found_step;
    return STATUS_OK;
}

/* ---- verify -----------------------------------------------------------------------------------------------
 */

bool verify_level(const char *word, enum larder_verify_level *out)
{
    static const char *const words[] = {[LARDER_VERIFY_STRUCTURE] = "structure",
                                        [LARDER_VERIFY_SCRUB] = "scrub",
                                        [LARDER_VERIFY_DEEP] = "deep"};
    for (int i = LARDER_VERIFY_STRUCTURE; i <= LARDER_VERIFY_DEEP; i++)
        if (strcmp(word, words[i]) == 0) {
            *out = (enum larder_verify_level)i;
            return true;
        }
    return false;
}

#define BAD_MAX 1024

struct verifying {
    struct table *table;
    json_t *list;
    struct progress progress;
    uint64_t objects, bytes;
    uint64_t bad[BAD_MAX]; /* sequences with damage, each once */
    size_t bad_count;
};

static void note_bad(struct verifying *v, uint64_t sequence)
{
    for (size_t i = 0; i < v->bad_count; i++)
        if (v->bad[i] == sequence)
            return;
    if (v->bad_count < BAD_MAX && sequence)
        v->bad[v->bad_count++] = sequence;
}

static int one_finding(void *arg, const struct larder_finding *f)
{
    struct verifying *v = arg;
    if (f->error.kind == LARDER_OK) {
        v->objects++;
        v->bytes += f->bytes;
        if (v->progress.shown)
            progress_bytes(&v->progress, v->bytes, v->bytes, f->object);
        return 0;
    }
    note_bad(v, f->sequence);
    if (v->list) {
        json_array_append_new(
            v->list, json_pack("{s:s,s:o,s:I,s:I,s:I,s:I,s:I,s:s?,s:s,s:s}", "object", f->object, "step",
                               json_u64(f->step), "sequence", (json_int_t)f->sequence, "rank",
                               (json_int_t)f->rank, "chunk", (json_int_t)f->chunk, "offset",
                               (json_int_t)f->offset, "bytes", (json_int_t)f->bytes, "tensor", f->tensor,
                               "class", larder_class_name(f->error.kind), "text", f->error.text));
        return 0;
    }
    table_row(v->table, number_text(f->step).s, number_text(f->sequence).s, number_text(f->rank).s,
              f->chunk < 0 ? "-" : number_text((uint64_t)f->chunk).s, number_text(f->offset).s,
              f->tensor ? f->tensor : "-", f->object, f->error.text);
    return 0;
}

static int mark_all_bad(struct larder *c, enum larder_kind kind, const char *run, const struct verifying *v)
{
    for (size_t i = 0; i < v->bad_count; i++) {
        struct larder_error e = {0};
        if (larder_mark(c, kind, run, v->bad[i], LARDER_MARK_BAD, "damage found by verify", &e) < 0) {
            if (e.kind == LARDER_NOT_FOUND) /* its record could not be read: it is offered to nobody anyway */
                continue;
            return fail(&e);
        }
        fprintf(stderr, "marked bad: sequence %" PRIu64 "\n", v->bad[i]);
    }
    return STATUS_OK;
}

int verify_run(struct larder *c, enum larder_kind kind, const char *run, uint64_t sequence, const char *level,
               bool mark_bad, bool json)
{
    static const char *const heads[] = {">STEP",   ">SEQ",   ">RANK",  ">CHUNK",
                                        ">OFFSET", "TENSOR", "OBJECT", "DAMAGE"};
    enum larder_verify_level how;
    struct larder_error e = {0};
    struct table t;
    struct verifying *v = need(calloc(1, sizeof *v));
    int status = STATUS_OK;
    if (!verify_level(level, &how)) {
        free(v);
        return fail_usage(kind == LARDER_DATASETS ? "dataset verify" : "ckpt verify",
                          "\"%s\" is not a level: structure, scrub or deep", level);
    }
    v->table = &t;
    v->list = json ? json_array() : NULL;
    table_begin(&t, heads, 8);
    progress_begin(&v->progress, "verified");
    int64_t damaged = larder_verify(c, kind, run, sequence, how, one_finding, v, &e);
    progress_end(&v->progress);
    if (damaged < 0)
        status = fail_run(c, kind, run, &e);
    else if (json)
        status = json_print(json_pack("{s:s,s:I,s:I,s:I,s:O}", "level", level, "objects_good",
                                      (json_int_t)v->objects, "bytes_good", (json_int_t)v->bytes, "damaged",
                                      (json_int_t)damaged, "findings", v->list));
    else {
        if (t.cells)
            table_end(&t);
        printf("%s: %" PRIu64 " objects good, %" PRId64 " damaged\n", level, v->objects, damaged);
    }
    if (damaged > 0 && status == STATUS_OK)
        status = STATUS_DAMAGE;
    if (damaged > 0 && mark_bad && mark_all_bad(c, kind, run, v) != STATUS_OK)
        status = STATUS_OTHER;
    json_decref(v->list);
    free(v);
    return status;
}

/* ---- prune ------------------------------------------------------------------------------------------------
 */

struct pruning {
    struct table *table;
    json_t *list;
    uint64_t now_ns, remove, keep, remove_bytes, removed;
    bool done, datasets;
};

static int one_item(void *arg, const struct larder_prune_item *i)
{
    struct pruning *p = arg;
    p->removed += i->removed ? 1 : 0;
    if (p->done)
        return 0;
    p->remove += i->remove ? 1 : 0;
    p->keep += i->remove ? 0 : 1;
    p->remove_bytes += i->remove ? i->stored_bytes : 0;
    if (p->list && p->datasets)
        json_array_append_new(p->list, json_pack("{s:I,s:I,s:I,s:b,s:s}", "version", (json_int_t)i->sequence,
                                                 "stored_bytes", (json_int_t)i->stored_bytes,
                                                 "server_time_ns", (json_int_t)i->server_time_ns, "remove",
                                                 i->remove, "reason", i->reason ? i->reason : ""));
    else if (p->list)
        json_array_append_new(p->list,
                              json_pack("{s:o,s:I,s:I,s:I,s:b,s:s}", "step", json_u64(i->step), "sequence",
                                        (json_int_t)i->sequence, "stored_bytes", (json_int_t)i->stored_bytes,
                                        "server_time_ns", (json_int_t)i->server_time_ns, "remove", i->remove,
                                        "reason", i->reason ? i->reason : ""));
    else if (p->datasets)
        table_row(p->table, number_text(i->sequence).s, size_text(i->stored_bytes).s,
                  age_text(p->now_ns, i->server_time_ns).s, i->remove ? "remove" : "keep",
                  i->reason ? i->reason : "");
    else
        table_row(p->table, number_text(i->step).s, number_text(i->sequence).s, size_text(i->stored_bytes).s,
                  age_text(p->now_ns, i->server_time_ns).s, i->remove ? "remove" : "keep",
                  i->reason ? i->reason : "");
    return 0;
}

struct prune_request {
    struct larder_prune_options o;
    bool yes, json;
    const char *plan_hex;
};

/* Shows the plan; with --yes executes that very plan, and no other. */
static int prune(struct larder *c, struct prune_request *r)
{
    static const char *const heads[] = {">STEP", ">SEQ", ">STORED", ">AGE", "ACTION", "WHY"};
    static const char *const set_heads[] = {">VERSION", ">STORED", ">AGE", "ACTION", "WHY"};
    struct larder_error e = {0};
    struct table t;
    struct pruning p = {.table = &t,
                        .now_ns = client_now_ns(c),
                        .datasets = r->o.kind == LARDER_DATASETS,
                        .list = r->json ? json_array() : NULL};
    uint8_t plan[32], seen[32], again[32];
    char hex[65];
    uint64_t freed = 0;
    int status = STATUS_OK;
    if (r->plan_hex && (strlen(r->plan_hex) != 64 || hex_decode(r->plan_hex, 32, seen) < 0))
        return fail_usage(p.datasets ? "dataset prune" : "ckpt prune",
                          "--plan needs the 64 hex digits that a plan was shown with");
    table_begin(&t, p.datasets ? set_heads : heads, p.datasets ? 5 : 6);
    if (larder_prune(c, &r->o, one_item, &p, plan, &freed, &e) < 0) {
        json_decref(p.list);
        return fail_run(c, r->o.kind, r->o.run, &e);
    }
    hex_encode(plan, sizeof plan, hex);
    if (!r->json) {
        table_end(&t);
        printf("%" PRIu64 " to remove (%s), %" PRIu64 " to keep; plan %s\n", p.remove,
               size_text(p.remove_bytes).s, p.keep, hex);
    }
    if (r->yes && r->plan_hex && memcmp(plan, seen, 32) != 0)
        status = fail_with(STATUS_CONFLICT,
                           "the plan has changed since it was shown: expected %.16s..., found %.16s...; "
                           "look at the new one and give its digest",
                           r->plan_hex, hex);
    else if (r->yes && p.remove) {
        freed = 0;
        p.done = true;
        r->o.execute = 1;
        r->o.plan = plan;
        if (larder_prune(c, &r->o, one_item, &p, again, &freed, &e) < 0)
            status = fail(&e);
        else if (!r->json)
            printf("removed %" PRIu64 ", %s freed\n", p.removed, size_text(freed).s);
    } else if (!r->yes && p.remove && !r->json) {
        printf("nothing was removed; give --yes to do it\n");
    }
    if (r->json && status == STATUS_OK)
        return json_print(json_pack(
            "{s:s,s:s,s:b,s:I,s:I,s:I,s:I,s:o}", p.datasets ? "dataset" : "run", r->o.run, "plan", hex,
            "executed", r->yes, "to_remove", (json_int_t)p.remove, "to_keep", (json_int_t)p.keep, "removed",
            (json_int_t)p.removed, "freed_bytes", (json_int_t)freed, "items", p.list));
    json_decref(p.list);
    return status;
}

int prune_command(const struct command *cmd, enum larder_kind kind, int argc, char **argv)
{
    struct prune_request r = {.o = LARDER_INIT(larder_prune_options)};
    struct common common = {0};
    uint64_t last = 0;
    const struct opt opts[] = {{"keep-last", OPT_NUMBER, &last},
                               {"keep-every", OPT_NUMBER, &r.o.keep_every},
                               {"keep-within", OPT_TIME, &r.o.keep_within_s},
                               {"yes", OPT_FLAG, &r.yes},
                               {"plan", OPT_TEXT, &r.plan_hex},
                               {0}};
    struct larder *c = NULL;
    int status;
    if (!options_read(cmd, &argc, argv, opts, 1, 1, &common, &status))
        return status;
    if (last > UINT32_MAX)
        return fail_usage(cmd->name, "--keep-last is at most %u", UINT32_MAX);
    if (kind == LARDER_DATASETS && r.o.keep_every)
        return fail_usage(cmd->name, "versions have no steps: --keep-every is for checkpoints");
    if (!last && !r.o.keep_every && !r.o.keep_within_s)
        return fail_usage(cmd->name, "give at least one of --keep-last, %sand --keep-within",
                          kind == LARDER_DATASETS ? "" : "--keep-every ");
    r.o.kind = kind;
    r.o.run = argv[0];
    r.o.keep_last = (uint32_t)last;
    r.json = common.json;
    if ((status = client_open(&common, &c)) == STATUS_OK)
        status = prune(c, &r);
    return client_close(c, status);
}

int destroy_command(const struct command *cmd, enum larder_kind kind, int argc, char **argv)
{
    struct common common = {0};
    bool yes = false;
    const struct opt opts[] = {{"yes", OPT_FLAG, &yes}, {0}};
    struct larder_error e = {0};
    struct larder *c = NULL;
    int status;
    if (!options_read(cmd, &argc, argv, opts, 1, 1, &common, &status))
        return status;
    if (!yes)
        return fail_usage(cmd->name,
                          "this erases the keys of \"%s\" and all it holds, for ever; give --yes to do it",
                          name_text(argv[0]).s);
    if ((status = client_open(&common, &c)) == STATUS_OK) {
        if (larder_run_destroy(c, kind, argv[0], &e) < 0)
            status = fail_run(c, kind, argv[0], &e);
        else
            printf("destroyed %s\n", name_text(argv[0]).s);
    }
    return client_close(c, status);
}
