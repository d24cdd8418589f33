/* SPDX-License-Identifier: Apache-2.0 */
/* The catalogue in memory: tenants, runs, envelopes, attempts, commits and segments. No I/O happens here. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/store/internal.h"

/* ---- names ---- */

void name_of_tenant(const char *tenant, char out[OBJECT_NAME_BYTES])
{
    snprintf(out, OBJECT_NAME_BYTES, "t/%s/tenant", tenant);
}

const char *id_text(const struct id *id, char out[2 * ID_BYTES + 1])
{
    hex_encode(id->bytes, sizeof id->bytes, out);
    return out;
}

void name_of_run(const char *tenant, enum run_kind kind, const struct id *name_key,
                 char out[OBJECT_NAME_BYTES])
{
    char hex[2 * ID_BYTES + 1];
    snprintf(out, OBJECT_NAME_BYTES, "t/%s/n/%c-%s", tenant, kind == RUN_DATASET ? 'd' : 'c',
             id_text(name_key, hex));
}

void name_of_folder(const struct run *r, char out[OBJECT_NAME_BYTES])
{
    char hex[2 * ID_BYTES + 1];
    snprintf(out, OBJECT_NAME_BYTES, "t/%s/r/%s", r->tenant->record.name, id_text(&r->record.run_id, hex));
}

void name_of_number(const struct run *r, char letter, uint64_t number, char out[OBJECT_NAME_BYTES])
{
    char folder[OBJECT_NAME_BYTES];
    name_of_folder(r, folder);
    snprintf(out, OBJECT_NAME_BYTES, "%.200s/%c-%0*" PRIx64, folder, letter, letter == 'e' ? 8 : 16, number);
}

void store_segment_name(const char *tenant, const struct id *run, const struct id *segment,
                        char out[BACKEND_NAME_BYTES_MAX + 1])
{
    char r[2 * ID_BYTES + 1], g[2 * ID_BYTES + 1];
    snprintf(out, OBJECT_NAME_BYTES, "t/%s/r/%s/s-%s", tenant, id_text(run, r), id_text(segment, g));
}

void name_of_segment(const struct segment *g, char out[OBJECT_NAME_BYTES])
{
    store_segment_name(g->run->tenant->record.name, &g->run->record.run_id, &g->id, out);
}

bool name_number(const char *component, char letter, unsigned digits, uint64_t *number)
{
    uint8_t bytes[8];
    if (component[0] != letter || component[1] != '-' || strlen(component) != digits + 2 ||
        hex_decode(component + 2, digits / 2, bytes) < 0)
        return false;
    *number = 0;
    for (unsigned i = 0; i < digits / 2; i++)
        *number = *number << 8 | bytes[i];
    return true;
}

struct id key_of_name(const void *name, size_t n)
{
    uint8_t digest[SHA256_BYTES];
    struct id key;
    sha256(name, n, digest);
    memcpy(key.bytes, digest, sizeof key.bytes);
    return key;
}

const char *run_text(const struct run *r)
{
    static _Thread_local char text[128];
    return err_quote(text, sizeof text, r->record.name, strlen(r->record.name));
}

/* ---- tenants ---- */

struct tenant *tenant_find(const struct store *s, const char *name)
{
    struct id key = key_of_name(name, strlen(name));
    return map_get(&s->tenants_by_name, &key);
}

int tenant_reserve(struct store *s)
{
    if (!s->tenant_spare && !(s->tenant_spare = calloc(1, sizeof *s->tenant_spare)))
        return -ENOMEM;
    return map_reserve(&s->tenants_by_name);
}

struct tenant *tenant_insert(struct store *s, const struct record_tenant *record)
{
    if (tenant_reserve(s) < 0)
        return NULL;
    struct tenant *t = s->tenant_spare;
    s->tenant_spare = NULL;
    t->record = *record;
    t->key = key_of_name(record->name, strlen(record->name));
    t->runs.seed = t->names.seed = t->segments.seed = s->map_seed;
    latch_init(&t->latch);
    check(map_put(&s->tenants_by_name, &t->key, t) == 0); /* tenant_reserve */
    list_add_tail(&s->tenants, &t->link);
    return t;
}

static void run_free(struct run *r)
{
    saves_free(r);
    for (size_t i = 0; i < r->commit_count; i++)
        commit_entry_free(r->commits[i]);
    free(r->commits);
    free(r->envelopes);
    free(r->attempts);
    free(r);
}

void run_release(struct run *r)
{
    check(r->holds > 0);
    if (--r->holds == 0 && r->gone)
        run_free(r);
}

void tenant_free(struct tenant *t)
{
    size_t at = 0;
    for (struct segment *g; (g = map_next(&t->segments, &at));) {
        check(!g->writer && g->holds == 0);
        run_release(g->run);
        free(g->why);
        free(g);
    }
    at = 0;
    for (struct run *r; (r = map_next(&t->runs, &at));) {
        check(r->holds == 0);
        run_free(r);
    }
    map_free(&t->runs);
    map_free(&t->names);
    map_free(&t->segments);
    free(t->run_spare);
    free(t);
}

/* ---- runs ---- */

struct id run_name_key(enum run_kind kind, struct slice name)
{
    (void)kind; /* it stands before the key in the object's name, and in the map below */
    return key_of_name(name.p, name.n);
}

/* Names of checkpoints and datasets live in one map: the kind is mixed in. */
static struct id map_key(enum run_kind kind, const struct id *name_key)
{
    struct id key = *name_key;
    key.bytes[0] ^= (uint8_t)kind;
    return key;
}

struct run *run_by_id(const struct tenant *t, const struct id *id)
{
    struct run *r = map_get(&t->runs, id);
    return r && !r->destroying ? r : NULL;
}

struct run *run_by_name(const struct tenant *t, enum run_kind kind, struct slice name)
{
    struct id key = run_name_key(kind, name);
    key = map_key(kind, &key);
    struct run *r = map_get(&t->names, &key);
    return r && !r->destroying ? r : NULL;
}

int run_reserve(struct tenant *t)
{
    if (!t->run_spare && !(t->run_spare = calloc(1, sizeof *t->run_spare)))
        return -ENOMEM;
    return map_reserve(&t->runs) < 0 ? -ENOMEM : map_reserve(&t->names);
}

struct run *run_insert(struct tenant *t, const struct record_run *record)
{
    if (run_reserve(t) < 0)
        return NULL;
    struct run *r = t->run_spare;
    t->run_spare = NULL;
    r->tenant = t;
    r->record = *record;
    r->name_key = run_name_key(record->kind, slice_str(record->name));
    latch_init(&r->latch);
    list_init(&r->loose);
    list_init(&r->saves);
    list_init(&r->failed);
    struct id key = map_key(record->kind, &r->name_key);
    check(map_put(&t->runs, &record->run_id, r) == 0 && map_put(&t->names, &key, r) == 0); /* run_reserve */
    return r;
}

void run_hold(struct task *t, struct run *r)
{
    check(!t->run);
    t->run = r;
    r->holds++;
}

void run_forget(struct run *r)
{
    struct id key = map_key(r->record.kind, &r->name_key);
    map_remove(&r->tenant->runs, &r->record.run_id);
    map_remove(&r->tenant->names, &key);
    r->holds++;
    r->gone = true;
    run_release(r);
}

bool task_run_by_id(struct task *t, const struct id *id)
{
    struct run *r = run_by_id(t->tenant, id);
    const struct damage *d = r ? NULL : damage_of_some_run(t->tenant, t->s);
    char hex[2 * ID_BYTES + 1];
    if (r)
        run_hold(t, r);
    else if (d)
        task_fail(t, d->why.class,
                  "no run or dataset with id %s is known, and the record of one could not be read when the "
                  "server started "
                  "(%s: %s): it may be that one; put the file back from a copy of the store and start "
                  "larderd again",
                  id_text(id, hex), d->name, d->why.text);
    else
        task_fail(t, ERR_NOT_FOUND, "tenant %s has no run or dataset with id %s; open it by its name again",
                  t->tenant->record.name, id_text(id, hex));
    return r != NULL;
}

bool task_run_by_name(struct task *t, unsigned kind, struct slice name)
{
    char text[128];
    if (kind != RUN_CHECKPOINTS && kind != RUN_DATASET) {
        task_fail(t, ERR_INVALID, "expected kind 1 (run) or 2 (dataset), found %u", kind);
        return false;
    }
    struct run *r = run_by_name(t->tenant, kind, name);
    const struct damage *d = r ? NULL : damage_of_run(t->tenant, t->s, kind, name);
    if (r)
        run_hold(t, r);
    else if (d)
        task_fail(t, d->why.class,
                  "the record of '%s' exists but could not be read when the server started (%s: %s); put the "
                  "file back "
                  "from a copy of the store and start larderd again: nothing of it is removed meanwhile",
                  err_quote(text, sizeof text, name.p, name.n), d->name, d->why.text);
    else
        task_fail(t, ERR_NOT_FOUND, "tenant %s has no %s named '%s'; 'larder %s ls' shows what there is",
                  t->tenant->record.name, kind == RUN_DATASET ? "dataset" : "run",
                  err_quote(text, sizeof text, name.p, name.n), kind == RUN_DATASET ? "dataset" : "ckpt");
    return r != NULL;
}

int envelope_reserve(struct run *r)
{
    return r->envelopes || (r->envelopes = calloc(ENVELOPES_MAX, sizeof *r->envelopes)) ? 0 : -ENOMEM;
}

int envelope_insert(struct run *r, uint32_t epoch, const uint8_t bytes[ENVELOPE_BYTES])
{
    if (envelope_reserve(r) < 0)
        return -ENOMEM;
    if (r->envelope_count == ENVELOPES_MAX)
        return -E2BIG;
    uint32_t i = r->envelope_count++;
    for (; i > 0 && r->envelopes[i - 1].epoch > epoch; i--)
        r->envelopes[i] = r->envelopes[i - 1];
    r->envelopes[i].epoch = epoch;
    memcpy(r->envelopes[i].bytes, bytes, ENVELOPE_BYTES);
    return 0;
}

void envelope_remove(struct run *r, uint32_t epoch)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < r->envelope_count; i++)
        if (r->envelopes[i].epoch != epoch)
            r->envelopes[kept++] = r->envelopes[i];
    r->envelope_count = kept;
}

/* ---- attempts ---- */

int attempt_reserve(struct run *r)
{
    if (r->attempt_count < r->attempt_capacity)
        return 0;
    uint32_t capacity = r->attempt_capacity ? 2 * r->attempt_capacity : 4;
    struct record_attempt *bigger = reallocarray(r->attempts, capacity, sizeof *bigger);
    if (!bigger)
        return -ENOMEM;
    r->attempts = bigger;
    r->attempt_capacity = capacity;
    return 0;
}

int attempt_insert(struct run *r, const struct record_attempt *a)
{
    if (attempt_reserve(r) < 0)
        return -ENOMEM;
    uint32_t i = r->attempt_count++;
    for (; i > 0 && r->attempts[i - 1].number > a->number; i--)
        r->attempts[i] = r->attempts[i - 1];
    r->attempts[i] = *a;
    if (a->number > r->attempt_highest)
        r->attempt_highest = a->number;
    return 0;
}

const struct record_attempt *attempt_newest(const struct run *r)
{
    return r->attempt_count ? &r->attempts[r->attempt_count - 1] : NULL;
}

const struct record_attempt *attempt_find(const struct run *r, const struct id *attempt)
{
    for (uint32_t i = r->attempt_count; i-- > 0;)
        if (id_equal(&r->attempts[i].attempt, attempt))
            return &r->attempts[i];
    return NULL;
}

int attempt_check(const struct run *r, const struct id *attempt, struct err *why)
{
    const struct record_attempt *mine = attempt_find(r, attempt), *newest = attempt_newest(r);
    if (!mine)
        return err_set(why, ERR_NOT_FOUND,
                       "this attempt is not registered with %s; register it before it saves", run_text(r));
    if (mine != newest)
        return err_set(
            why, ERR_FENCED,
            "attempt %llu of %s was replaced by attempt %llu; this process must stop saving, or start again",
            (unsigned long long)mine->number, run_text(r), (unsigned long long)newest->number);
    return 0;
}

bool task_attempt_is_live(struct task *t, const struct run *r, const struct id *attempt)
{
    struct err why = {0};
    if (attempt_check(r, attempt, &why) == 0)
        return true;
    task_fail_with(t, &why);
    return false;
}

/* ---- commits ---- */

/* Index of the first commit with at least that sequence. */
static size_t commit_place(const struct run *r, uint64_t sequence)
{
    size_t low = 0, high = r->commit_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (r->commits[middle]->commit.sequence < sequence)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct commit_entry *commit_by_sequence(const struct run *r, uint64_t sequence)
{
    size_t at = commit_place(r, sequence);
    return at < r->commit_count && r->commits[at]->commit.sequence == sequence ? r->commits[at] : NULL;
}

int commit_reserve(struct run *r)
{
    if (r->commit_count < r->commit_capacity)
        return 0;
    size_t capacity = r->commit_capacity ? 2 * r->commit_capacity : 16;
    struct commit_entry **bigger = reallocarray(r->commits, capacity, sizeof *bigger);
    if (!bigger)
        return -ENOMEM;
    r->commits = bigger;
    r->commit_capacity = capacity;
    return 0;
}

int commit_insert(struct run *r, struct commit_entry *c)
{
    if (commit_reserve(r) < 0)
        return -ENOMEM;
    size_t at = commit_place(r, c->commit.sequence);
    memmove(&r->commits[at + 1], &r->commits[at], (r->commit_count - at) * sizeof *r->commits);
    r->commits[at] = c;
    r->commit_count++;
    if (c->commit.sequence > r->sequence_highest)
        r->sequence_highest = c->commit.sequence;
    return 0;
}

void commit_entry_free(struct commit_entry *c)
{
    commit_free(&c->commit);
    free(c->reason);
    free(c->pin_reason);
    free(c);
}

void commit_remove(struct run *r, struct commit_entry *c)
{
    size_t at = commit_place(r, c->commit.sequence);
    check(at < r->commit_count && r->commits[at] == c);
    memmove(&r->commits[at], &r->commits[at + 1], (r->commit_count - at - 1) * sizeof *r->commits);
    r->commit_count--;
    for (uint32_t i = 0; i < c->commit.world; i++) {
        struct segment *g = segment_find(r->tenant, &c->commit.parts[i].segment);
        if (!g || g->commits == 0 || --g->commits > 0)
            continue;
        list_add_tail(&r->loose, &g->loose);
        if (g->state == SEGMENT_MISSING)
            segment_forget(g);
    }
    commit_entry_free(c);
}

struct commit_entry *commit_of_save(const struct run *r, const struct id *attempt, uint64_t step)
{
    const struct record_attempt *a = attempt_find(r, attempt);
    /* Attempts only ever follow each other: behind the first commit of an older one there is none of this. */
    for (size_t i = r->commit_count; i-- > 0;) {
        const struct commit *c = &r->commits[i]->commit;
        if (a && c->attempt_number < a->number)
            break;
        if (c->step == step && id_equal(&c->attempt, attempt))
            return r->commits[i];
    }
    return NULL;
}

struct commit_entry *commit_last_good(const struct run *r)
{
    for (size_t i = r->commit_count; i-- > 0;)
        if (!commit_bad(r->commits[i]))
            return r->commits[i];
    return NULL;
}

void commit_set_reason(struct commit_entry *c, const char *reason)
{
    free(c->reason);
    c->reason = reason ? strdup(reason) : NULL;
}

void commit_set_pinned(struct commit_entry *c, bool pinned, const char *reason)
{
    free(c->pin_reason);
    c->pinned = pinned;
    c->pin_reason = pinned && *reason ? strdup(reason) : NULL;
}

struct slice commit_reason(const struct commit_entry *c)
{
    const char *text = commit_bad(c) ? c->reason : c->pin_reason;
    return text ? slice_str(text) : (struct slice){0};
}

int commit_bind(struct run *r, struct commit_entry *c)
{
    for (uint32_t i = 0; i < c->commit.world; i++) {
        const struct commit_part *p = &c->commit.parts[i];
        struct segment *g = segment_find(r->tenant, &p->segment);
        if (!g) {
            g = segment_insert(r, &p->segment, SEGMENT_MISSING);
            if (!g)
                return -ENOMEM;
            g->attempt = c->commit.attempt;
            g->step = c->commit.step;
            g->rank = p->rank;
            g->world = c->commit.world;
            g->file_bytes = p->segment_bytes;
            memcpy(g->index_digest, p->index_digest, sizeof g->index_digest);
        }
        if (g->commits++ == 0)
            list_del(&g->loose);
        c->stored_bytes += p->segment_bytes;
    }
    return 0;
}

/* ---- segments ---- */

struct segment *segment_insert(struct run *r, const struct id *id, enum segment_state state)
{
    struct segment *g = calloc(1, sizeof *g);
    if (!g)
        return NULL;
    g->id = *id;
    g->run = r;
    g->state = state;
    list_init(&g->idle);
    list_init(&g->waiting);
    list_init(&g->loose);
    if (map_put(&r->tenant->segments, id, g) < 0) {
        free(g);
        return NULL;
    }
    list_add_tail(&r->loose, &g->loose);
    r->holds++;
    return g;
}

struct segment *segment_find(const struct tenant *t, const struct id *id)
{
    return map_get(&t->segments, id);
}

static void segment_free_if_unused(struct segment *g)
{
    if (!g->gone || g->holds > 0)
        return;
    run_release(g->run);
    free(g->why);
    free(g);
}

void segment_hold(struct task *t, struct segment *g)
{
    check(!t->segment);
    t->segment = g;
    g->holds++;
}

void segment_release(struct segment *g)
{
    check(g->holds > 0);
    g->holds--;
    segment_free_if_unused(g);
}

void segment_stored(struct segment *g, uint64_t bytes)
{
    g->file_bytes = bytes;
    g->state = SEGMENT_SEALED;
    g->run->stored_bytes += bytes;
    g->run->tenant->stored_bytes += bytes;
}

void segment_forget(struct segment *g)
{
    check(!g->gone && !g->writer);
    map_remove(&g->run->tenant->segments, &g->id);
    list_del(&g->loose);
    list_del(&g->idle);
    task_wake_all(&g->waiting);
    g->gone = true;
    segment_free_if_unused(g);
}
