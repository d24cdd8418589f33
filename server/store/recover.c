/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What happens at start: the catalogue is read from the medium, folder by folder. A listing that fails stops
 * the start, for what is not listed might be taken for absent; a single object that cannot be read does not:
 * it is reported by name and skipped. Nothing is removed before everything has been read, and what no commit
 * names is only removed where every commit record of the run could be read.
 *
 *   store -> t -> for each tenant: record, n (run records), r -> for each run:
 *            envelopes, attempts, commit records -> pins and marks -> segments
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "format/version.h"
#include "server/store/internal.h"

#define PARALLEL 32 /* objects looked at at once */

struct slot;
struct recover;
typedef int slot_decode(struct slot *t, const uint8_t *p, size_t n, struct err *e);

struct slot {
    struct backend_op op;
    struct recover *r;
    bool busy;
    bool again; /* damaged at the first look: read once more, past the cache */
    uint8_t *p; /* aligned */
    uint64_t bytes;
    uint64_t number;
    char letter;
    struct segment *segment;
    struct segment_header header;
    slot_decode *decode;
    char name[OBJECT_NAME_BYTES];
};

struct recover {
    struct store *s;
    struct store_opening *opening;
    struct backend_op op;
    char name[OBJECT_NAME_BYTES];
    struct buf buf;
    struct loop_names tenants, folders, objects; /* objects: run records, then what is in a run's folder */
    size_t tenant_at, folder_at, object_at;
    struct tenant *tenant;
    struct run *run;
    unsigned flying;
    bool failed;
    uint8_t *record; /* the store's own, as read; on a border of BLOCK_BYTES */
    bool again;      /* that is the second look at it */
    bool (*each)(struct slot *t, const char *component); /* false: nothing to wait for */
    void (*after)(struct recover *r);
    struct slot slots[PARALLEL];
};

static void finish(struct recover *r)
{
    struct store_opening *o = r->opening;
    free(r->record);
    loop_names_free(&r->tenants);
    loop_names_free(&r->folders);
    loop_names_free(&r->objects);
    buf_free(&r->buf);
    if (o->err.class != ERR_NONE)
        store_free(r->s);
    else
        o->store = r->s;
    free(r);
    o->done(o);
}

static void fail(struct recover *r, const char *doing)
{
    struct err *e = &r->opening->err;
    if (e->class == ERR_NONE) {
        if (r->op.err.class == ERR_NONE)
            err_sys(&r->op.err, r->op.result < 0 ? (int)-r->op.result : 12, "%s", r->name);
        *e = r->op.err;
    }
    err_prepend(e, "%s", doing);
    r->failed = true;
    finish(r);
}

static struct backend_op *next_op(struct recover *r, backend_done *done)
{
    memset(&r->op, 0, sizeof r->op);
    r->op.done = done;
    return &r->op;
}

static struct recover *recover_of(struct backend_op *op)
{
    return container_of(op, struct recover, op);
}

static void list(struct recover *r, struct loop_names *out, backend_done *done)
{
    loop_names_free(out);
    backend_list(r->s->o.backend, next_op(r, done), r->name, out);
}

/* ---- many objects at once ---- */

static void each_go(struct recover *r)
{
    while (!r->failed && r->object_at < r->objects.count && r->flying < PARALLEL) {
        struct slot *t = r->slots;
        while (t->busy)
            t++;
        *t = (struct slot){.r = r, .busy = true};
        r->flying++;
        if (!r->each(t, r->objects.names[r->object_at++])) {
            t->busy = false;
            r->flying--;
        }
    }
    if (r->flying > 0)
        return;
    if (r->failed)
        fail(r, "reading the store");
    else
        r->after(r);
}

static void each(struct recover *r, bool (*start)(struct slot *t, const char *component),
                 void (*after)(struct recover *r))
{
    r->object_at = 0;
    r->each = start;
    r->after = after;
    each_go(r);
}

static void slot_end(struct slot *t)
{
    struct recover *r = t->r;
    free(t->p);
    t->p = NULL;
    t->busy = false;
    r->flying--;
    each_go(r);
}

static struct slot *slot_of(struct backend_op *op)
{
    return container_of(op, struct slot, op);
}

static struct backend_op *slot_op(struct slot *t, backend_done *done)
{
    memset(&t->op, 0, sizeof t->op);
    t->op.done = done;
    return &t->op;
}

static void slot_damaged(struct slot *t, const struct err *why)
{
    if (why->class == ERR_NO_MEMORY) {
        t->r->failed = true;
        t->r->opening->err = *why;
    } else {
        if (t->letter == 'c')
            t->r->run->unreadable++;
        if (t->letter == 'e')
            t->r->run->envelopes_unreadable++;
        store_report_damaged(t->r->s, t->name, why);
    }
    slot_end(t);
}

static void slot_read(struct slot *t);

static void slot_has_read(struct backend_op *op)
{
    struct slot *t = slot_of(op);
    struct err why = {0};
    if (op->result < 0) {
        why = op->err;
    } else if ((uint64_t)op->result != t->bytes) {
        err_set(&why, ERR_CORRUPT, "%" PRIu64 " bytes expected, %" PRId64 " could be read", t->bytes,
                op->result);
    } else if (t->decode(t, t->p, (size_t)t->bytes, &why) == 0) {
        slot_end(t);
        return;
    }
    if (t->again || why.class == ERR_NO_MEMORY) {
        slot_damaged(t, &why);
        return;
    }
    t->again = true;
    slot_read(t);
}

static void slot_read(struct slot *t)
{
    size_t n = (size_t)block_align(t->bytes);
    backend_read(t->r->s->o.backend, slot_op(t, slot_has_read), t->name, t->again, 0, t->p, n);
}

/* A disk may fail to answer once. True: the object is to be looked at again from the begin. */
static bool once_more(struct slot *t, const struct backend_op *op)
{
    if (op->result >= 0 || t->again)
        return false;
    t->again = true;
    free(t->p);
    t->p = NULL;
    return true;
}

static bool read_record(struct slot *t, slot_decode *decode);

static void slot_has_size(struct backend_op *op)
{
    struct slot *t = slot_of(op);
    struct err why = op->err;
    if (once_more(t, op)) {
        read_record(t, t->decode);
        return;
    }
    if (op->result >= 0 && (t->bytes == 0 || t->bytes > COMMIT_BYTES_MAX))
        err_set(&why, ERR_CORRUPT, "%" PRIu64 " bytes; a record has 1 to %u", t->bytes, COMMIT_BYTES_MAX);
    else if (op->result >= 0 && !(t->p = aligned_alloc(BLOCK_BYTES, (size_t)block_align(t->bytes))))
        err_set(&why, ERR_NO_MEMORY, "no memory for a record of %" PRIu64 " bytes", t->bytes);
    if (why.class != ERR_NONE)
        slot_damaged(t, &why);
    else
        slot_read(t);
}

static bool read_record(struct slot *t, slot_decode *decode)
{
    t->decode = decode;
    backend_stat(t->r->s->o.backend, slot_op(t, slot_has_size), t->name, &t->bytes);
    return true;
}

/* ---- the end ---- */

/* What the newest attempt may still join is kept; see run_collect for what it has left behind. */
static void judge_loose(struct store *s, struct run *r)
{
    const struct record_attempt *newest = attempt_newest(r);
    struct err why = {0};
    err_set(&why, ERR_FENCED,
            "the segment belonged to an attempt that was replaced before the server restarted");
    list_for_each_safe (it, &r->loose) {
        struct segment *g = container_of(it, struct segment, loose);
        if (!g->suspect && newest && !id_equal(&g->attempt, &newest->attempt))
            segment_give_up(s, g, &why);
    }
    run_collect(s, r);
}

static void recovered(struct recover *r)
{
    struct store *s = r->s;
    struct store_stats stats;
    list_for_each (it, &s->tenants) {
        struct tenant *x = container_of(it, struct tenant, link);
        size_t at = 0;
        for (struct run *run; (run = map_next(&x->runs, &at));)
            judge_loose(s, run);
    }
    store_stats(s, &stats);
    log_info("store opened tenants=%" PRIu64 " runs=%" PRIu64 " commits=%" PRIu64 " stored_bytes=%" PRIu64
             " free_bytes=%" PRIu64 " damaged_objects=%" PRIu64,
             stats.tenants, stats.runs, stats.commits, stats.stored_bytes, stats.free_bytes,
             stats.damaged_objects);
    finish(r);
}

/* ---- segments of a run ---- */

static void next_folder(struct recover *r);

/* Commits whose segments are not all there in full length are bad from the start. */
static void judge_commits(struct recover *r)
{
    struct run *run = r->run;
    char reason[256], hex[2 * ID_BYTES + 1], name[OBJECT_NAME_BYTES];
    for (size_t i = 0; i < run->commit_count; i++) {
        struct commit_entry *c = run->commits[i];
        for (uint32_t k = 0; k < c->commit.world && !c->missing; k++) {
            const struct commit_part *p = &c->commit.parts[k];
            const struct segment *g = segment_find(run->tenant, &p->segment);
            if (g && g->state == SEGMENT_SEALED && g->file_bytes == p->segment_bytes)
                continue;
            struct err why = {0};
            c->missing = true;
            snprintf(reason, sizeof reason, "segment %s of rank %u is missing or not %" PRIu64 " bytes long",
                     id_text(&p->segment, hex), k, p->segment_bytes);
            commit_set_reason(c, reason);
            err_set(&why, ERR_CORRUPT, "%s", reason);
            name_of_number(run, 'c', c->commit.sequence, name);
            store_report_damaged(r->s, name, &why);
        }
    }
}

static void segments_read(struct recover *r)
{
    judge_commits(r);
    next_folder(r);
}

static void loose_found(struct slot *t, const struct segment_trailer *trailer, struct err *why)
{
    struct recover *r = t->r;
    struct segment *g = segment_insert(r->run, &t->header.segment_id, SEGMENT_OPEN);
    if (!g) {
        err_set(why, ERR_NO_MEMORY, "no memory for the catalogue");
        return;
    }
    g->attempt = t->header.attempt;
    g->step = t->header.step;
    g->rank = t->header.rank;
    g->world = t->header.world;
    memcpy(g->index_digest, trailer->index_digest, sizeof g->index_digest);
    segment_stored(g, trailer->file_bytes);
    g->touched_ms = loop_now_ms(r->s->o.loop);
    g->suspect = r->run->unreadable > 0 || !attempt_find(r->run, &g->attempt);
}

static void segment_look(struct slot *t);

/* The segment is looked at again from the begin, past the cache; then it is damaged. */
static void segment_suspect(struct slot *t, const struct err *why)
{
    if (t->again || why->class == ERR_NO_MEMORY) {
        slot_damaged(t, why);
        return;
    }
    t->again = true;
    free(t->p);
    t->p = NULL;
    segment_look(t);
}

static void trailer_read(struct backend_op *op)
{
    struct slot *t = slot_of(op);
    struct segment_trailer trailer;
    struct err why = op->err;
    if (op->result >= 0 && op->result < BLOCK_BYTES)
        err_set(&why, ERR_CORRUPT, "the trailer is cut short");
    if (why.class == ERR_NONE && segment_trailer_decode(t->p, &trailer, &why) == 0) {
        if (trailer.file_bytes != t->bytes || !id_equal(&trailer.segment_id, &t->header.segment_id))
            err_set(&why, ERR_CORRUPT,
                    "the trailer speaks of another segment or of %" PRIu64 " bytes, the file has %" PRIu64,
                    trailer.file_bytes, t->bytes);
        else
            loose_found(t, &trailer, &why);
    }
    if (why.class != ERR_NONE)
        segment_suspect(t, &why);
    else
        slot_end(t);
}

static void header_read(struct backend_op *op)
{
    struct slot *t = slot_of(op);
    struct err why = op->err;
    char hex[2 * ID_BYTES + 1], *base = strrchr(t->name, '/');
    if (op->result >= 0 && op->result < BLOCK_BYTES)
        err_set(&why, ERR_CORRUPT, "the header is cut short");
    if (why.class == ERR_NONE && segment_header_decode(t->p, &t->header, &why) == 0 &&
        (strcmp(base + 3, id_text(&t->header.segment_id, hex)) != 0 ||
         !id_equal(&t->header.run_id, &t->r->run->record.run_id)))
        err_set(&why, ERR_CORRUPT, "the header names segment %s, or another run, than the object's name does",
                hex);
    if (why.class != ERR_NONE) {
        segment_suspect(t, &why);
        return;
    }
    backend_read(t->r->s->o.backend, slot_op(t, trailer_read), t->name, t->again, t->bytes - BLOCK_BYTES,
                 t->p, BLOCK_BYTES);
}

static void segment_has_size(struct backend_op *op)
{
    struct slot *t = slot_of(op);
    struct err why = op->err;
    struct segment *g = t->segment;
    if (op->result >= 0 && g) {
        if (t->bytes == g->file_bytes)
            segment_stored(g, t->bytes);
        else
            err_set(&why, ERR_CORRUPT, "%" PRIu64 " bytes, its commit says %" PRIu64, t->bytes,
                    g->file_bytes);
    } else if (op->result >= 0 && (t->bytes < 2ull * BLOCK_BYTES || t->bytes % BLOCK_BYTES != 0)) {
        err_set(&why, ERR_CORRUPT, "%" PRIu64 " bytes are no whole segment", t->bytes);
    } else if (op->result >= 0 && !(t->p = aligned_alloc(BLOCK_BYTES, BLOCK_BYTES))) {
        err_set(&why, ERR_NO_MEMORY, "no memory for a segment's header");
    }
    if (why.class != ERR_NONE)
        segment_suspect(t, &why);
    else if (g)
        slot_end(t);
    else
        backend_read(t->r->s->o.backend, slot_op(t, header_read), t->name, t->again, 0, t->p, BLOCK_BYTES);
}

static void segment_look(struct slot *t)
{
    backend_stat(t->r->s->o.backend, slot_op(t, segment_has_size), t->name, &t->bytes);
}

static bool each_segment(struct slot *t, const char *component)
{
    struct id id;
    struct recover *r = t->r;
    if (component[0] != 's')
        return false;
    if (strlen(component) != 2 + 2 * ID_BYTES || component[1] != '-' ||
        hex_decode(component + 2, ID_BYTES, id.bytes) < 0)
        return false; /* reported by each_record */
    store_segment_name(r->tenant->record.name, &r->run->record.run_id, &id, t->name);
    t->segment = segment_find(r->tenant, &id);
    segment_look(t);
    return true;
}

/* ---- small records of a run ---- */

static void marks_read(struct recover *r)
{
    for (size_t i = 0; i < r->run->commit_count; i++) {
        if (commit_bind(r->run, r->run->commits[i]) < 0) {
            err_set(&r->opening->err, ERR_NO_MEMORY, "no memory for the catalogue");
            fail(r, "reading the store");
            return;
        }
    }
    each(r, each_segment, segments_read);
}

static int decode_mark(struct slot *t, const uint8_t *p, size_t n, struct err *e)
{
    struct record_mark mark;
    int rc = record_mark_decode(p, n, &mark, e);
    if (rc < 0)
        return rc;
    if (mark.sequence != t->number || mark.kind != (t->letter == 'p' ? MARK_PIN : MARK_BAD) ||
        !id_equal(&mark.run_id, &t->r->run->record.run_id))
        return err_set(e, ERR_CORRUPT,
                       "a mark of sequence %" PRIu64 " lies under another name, or is of another run",
                       mark.sequence);
    struct commit_entry *c = commit_by_sequence(t->r->run, t->number);
    if (!c) /* left by a removed commit, to keep its number from being given again */
        return 0;
    if (mark.kind == MARK_PIN) {
        commit_set_pinned(c, true, mark.reason);
    } else {
        c->marked_bad = true;
        commit_set_reason(c, mark.reason);
    }
    return 0;
}

static bool each_mark(struct slot *t, const char *component)
{
    struct run *run = t->r->run;
    t->letter = component[0];
    if ((t->letter != 'p' && t->letter != 'b') || !name_number(component, t->letter, 16, &t->number))
        return false;
    if (t->number > run->sequence_highest)
        run->sequence_highest = t->number;
    name_of_number(run, t->letter, t->number, t->name);
    return read_record(t, decode_mark);
}

static void records_read(struct recover *r)
{
    each(r, each_mark, marks_read);
}

static int decode_envelope(struct slot *t, const uint8_t *p, size_t n, struct err *e)
{
    struct id run_id;
    uint32_t epoch;
    struct run *run = t->r->run;
    if (n != ENVELOPE_BYTES)
        return err_set(e, ERR_CORRUPT, "%zu bytes; an envelope has %u", n, ENVELOPE_BYTES);
    int rc = envelope_epoch(p, n, &run_id, &epoch, e);
    if (rc < 0)
        return rc;
    if (!id_equal(&run_id, &run->record.run_id) || epoch != t->number)
        return err_set(e, ERR_CORRUPT, "the envelope is of epoch %u, or of another run than its name says",
                       epoch);
    if (envelope_insert(run, epoch, p) < 0)
        return err_set(e, ERR_NO_MEMORY, "no memory for the catalogue, or more than %u envelopes",
                       ENVELOPES_MAX);
    return 0;
}

static int decode_attempt(struct slot *t, const uint8_t *p, size_t n, struct err *e)
{
    struct record_attempt a;
    int rc = record_attempt_decode(p, n, &a, e);
    if (rc < 0)
        return rc;
    if (a.number != t->number || !id_equal(&a.run_id, &t->r->run->record.run_id))
        return err_set(e, ERR_CORRUPT, "attempt %" PRIu64 " lies under another name, or is of another run",
                       a.number);
    if (attempt_insert(t->r->run, &a) < 0)
        return err_set(e, ERR_NO_MEMORY, "no memory for the catalogue");
    return 0;
}

static int decode_commit(struct slot *t, const uint8_t *p, size_t n, struct err *e)
{
    struct run *run = t->r->run;
    struct commit_entry *c = calloc(1, sizeof *c);
    if (!c)
        return err_set(e, ERR_NO_MEMORY, "no memory for the catalogue");
    int rc = commit_decode(p, n, &c->commit, e);
    if (rc < 0) {
        free(c);
        return rc;
    }
    if (!id_equal(&c->commit.run_id, &run->record.run_id) || c->commit.kind != run->record.kind ||
        c->commit.sequence != t->number)
        rc = err_set(e, ERR_CORRUPT,
                     "the record is of sequence %" PRIu64 ", or of another run than its name says",
                     c->commit.sequence);
    else if (commit_insert(run, c) < 0)
        rc = err_set(e, ERR_NO_MEMORY, "no memory for the catalogue");
    if (rc < 0)
        commit_entry_free(c);
    return rc;
}

static bool each_record(struct slot *t, const char *component)
{
    struct run *run = t->r->run;
    struct err why = {0};
    t->letter = component[0];
    if (t->letter == 's' || t->letter == 'p' || t->letter == 'b') {
        if (component[1] == '-' && strlen(component) == (t->letter == 's' ? 34 : 18))
            return false; /* later */
    } else if (strchr("eac", t->letter) &&
               name_number(component, t->letter, t->letter == 'e' ? 8 : 16, &t->number)) {
        name_of_number(run, t->letter, t->number, t->name);
        if (t->letter == 'c' && t->number > run->sequence_highest)
            run->sequence_highest = t->number;
        if (t->letter == 'a' && t->number > run->attempt_highest)
            run->attempt_highest = t->number;
        return read_record(t, t->letter == 'e'   ? decode_envelope
                              : t->letter == 'a' ? decode_attempt
                                                 : decode_commit);
    }
    err_set(&why, ERR_VERSION, "this larder does not know such an object");
    snprintf(t->name, sizeof t->name, "t/%s/r/.../%.60s", t->r->tenant->record.name, component);
    store_report_damaged(t->r->s, t->name, &why);
    return false;
}

/* ---- folders of runs ---- */

static void folder_listed(struct backend_op *op)
{
    struct recover *r = recover_of(op);
    struct err why = {0};
    if (op->result < 0) {
        fail(r, "listing a run");
        return;
    }
    if (r->run) {
        each(r, each_record, records_read);
        return;
    }
    if (r->objects.count > 0) {
        err_set(&why, ERR_CORRUPT, "%zu objects without a readable record of their run", r->objects.count);
        store_report_damaged(r->s, r->name, &why);
    }
    next_folder(r);
}

static void next_tenant(struct recover *r);

static void next_folder(struct recover *r)
{
    struct id id;
    if (r->folder_at == r->folders.count) {
        next_tenant(r);
        return;
    }
    const char *component = r->folders.names[r->folder_at++];
    r->run = strlen(component) == 2 * ID_BYTES && hex_decode(component, ID_BYTES, id.bytes) == 0
                 ? run_by_id(r->tenant, &id)
                 : NULL;
    snprintf(r->name, sizeof r->name, "t/%s/r/%.80s", r->tenant->record.name, component);
    list(r, &r->objects, folder_listed);
}

static void folders_listed(struct backend_op *op)
{
    struct recover *r = recover_of(op);
    r->folder_at = 0;
    if (op->result < 0)
        fail(r, "listing the runs of a tenant");
    else
        next_folder(r);
}

/* ---- tenants and the records of their runs ---- */

static void runs_read(struct recover *r)
{
    snprintf(r->name, sizeof r->name, "t/%s/r", r->tenant->record.name);
    list(r, &r->folders, folders_listed);
}

static int decode_run(struct slot *t, const uint8_t *p, size_t n, struct err *e)
{
    struct record_run record;
    struct tenant *x = t->r->tenant;
    char name[OBJECT_NAME_BYTES];
    int rc = record_run_decode(p, n, &record, e);
    if (rc < 0)
        return rc;
    struct id key = run_name_key(record.kind, slice_str(record.name));
    name_of_run(x->record.name, record.kind, &key, name);
    if (strcmp(name, t->name) != 0)
        return err_set(e, ERR_CORRUPT, "the record of a run lies under another name");
    if (map_get(&x->runs, &record.run_id))
        return err_set(e, ERR_CORRUPT, "two runs have one id; the second is skipped");
    if (!run_insert(x, &record))
        return err_set(e, ERR_NO_MEMORY, "no memory for the catalogue");
    return 0;
}

static bool each_run(struct slot *t, const char *component)
{
    snprintf(t->name, sizeof t->name, "t/%s/n/%.100s", t->r->tenant->record.name, component);
    return read_record(t, decode_run);
}

static void run_records_listed(struct backend_op *op)
{
    struct recover *r = recover_of(op);
    if (op->result < 0)
        fail(r, "listing the names of a tenant's runs");
    else
        each(r, each_run, runs_read);
}

static int decode_tenant(struct slot *t, const uint8_t *p, size_t n, struct err *e)
{
    struct recover *r = t->r;
    struct record_tenant record;
    int rc = record_tenant_decode(p, n, &record, e);
    if (rc < 0)
        return rc;
    if (strcmp(record.name, r->tenants.names[r->tenant_at - 1]) != 0)
        return err_set(e, ERR_CORRUPT, "the record of tenant %s lies under another name", record.name);
    r->tenant = tenant_insert(r->s, &record);
    return r->tenant ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for the catalogue");
}

static bool each_tenant(struct slot *t, const char *component)
{
    (void)component; /* "tenant", the only one that is looked at here */
    name_of_tenant(t->r->tenants.names[t->r->tenant_at - 1], t->name);
    return read_record(t, decode_tenant);
}

static void tenant_read(struct recover *r)
{
    if (!r->tenant) { /* reported */
        next_tenant(r);
        return;
    }
    snprintf(r->name, sizeof r->name, "t/%s/n", r->tenant->record.name);
    list(r, &r->objects, run_records_listed);
}

static void tenant_listed(struct backend_op *op)
{
    struct recover *r = recover_of(op);
    if (op->result < 0) {
        fail(r, "listing a tenant");
        return;
    }
    size_t kept = 0;
    for (size_t i = 0; i < r->objects.count; i++) {
        char *name = r->objects.names[i];
        if (strcmp(name, "tenant") == 0)
            r->objects.names[kept++] = name;
        else
            free(name);
    }
    if (kept == 0 && r->objects.count > 0) {
        struct err why = {0};
        err_set(&why, ERR_CORRUPT, "the record of the tenant is missing, its other objects are skipped");
        store_report_damaged(r->s, r->name, &why);
    }
    r->objects.count = kept;
    each(r, each_tenant, tenant_read);
}

static void next_tenant(struct recover *r)
{
    struct err why = {0};
    r->tenant = NULL;
    r->run = NULL;
    while (r->tenant_at < r->tenants.count) {
        const char *name = r->tenants.names[r->tenant_at++];
        snprintf(r->name, sizeof r->name, "t/%.100s", name);
        if (tenant_name_check(name, &why) == 0) {
            list(r, &r->objects, tenant_listed);
            return;
        }
        store_report_damaged(r->s, r->name, &why);
    }
    recovered(r);
}

/* ---- the store's own record ---- */

static void tenants_listed(struct backend_op *op)
{
    struct recover *r = recover_of(op);
    if (op->result < 0)
        fail(r, "listing the tenants");
    else
        next_tenant(r);
}

static void list_tenants(struct recover *r)
{
    snprintf(r->name, sizeof r->name, "t");
    list(r, &r->tenants, tenants_listed);
}

static void store_written(struct backend_op *op)
{
    struct recover *r = recover_of(op);
    char hex[2 * ID_BYTES + 1];
    if (op->result < 0) {
        fail(r, "making a new store");
        return;
    }
    log_info("new store made id=%s", id_text(&r->s->record.store_id, hex));
    list_tenants(r);
}

static void store_looked_for(struct backend_op *op)
{
    struct recover *r = recover_of(op);
    struct store *s = r->s;
    if (op->result < 0) {
        fail(r, "listing the store");
        return;
    }
    if (r->tenants.count > 0) {
        err_set(&r->opening->err, ERR_CORRUPT,
                "the store's own record ('store') is missing although %zu tenants are there; bring it back "
                "from a "
                "copy, this folder is no new store",
                r->tenants.count);
        fail(r, "opening the store");
        return;
    }
    loop_random(s->o.loop, &s->record.store_id, sizeof s->record.store_id);
    s->record.created_ns = loop_unix_ns(s->o.loop);
    if (record_store_encode(&s->record, &r->buf, &r->opening->err) < 0) {
        fail(r, "making a new store");
        return;
    }
    backend_put_new(s->o.backend, next_op(r, store_written), "store", r->buf.p, r->buf.n);
}

static void store_look(struct recover *r);

static void store_read(struct backend_op *op)
{
    struct recover *r = recover_of(op);
    if (op->err.class == ERR_NOT_FOUND) {
        snprintf(r->name, sizeof r->name, "t");
        list(r, &r->tenants, store_looked_for);
        return;
    }
    bool good = op->result >= 0 &&
                record_store_decode(r->record, (size_t)op->result, &r->s->record, &r->opening->err) == 0;
    if (!good && !r->again) {
        err_clear(&r->opening->err);
        r->again = true;
        store_look(r);
    } else if (!good) {
        fail(r, op->result < 0 ? "reading the store's record" : "the store's record ('store')");
    } else {
        list_tenants(r);
    }
}

static void store_look(struct recover *r)
{
    backend_read(r->s->o.backend, next_op(r, store_read), "store", r->again, 0, r->record, BLOCK_BYTES);
}

void recover_start(struct store *s, struct store_opening *opening)
{
    struct recover *r = calloc(1, sizeof *r);
    if (!r || !(r->record = aligned_alloc(BLOCK_BYTES, BLOCK_BYTES))) {
        err_set(&opening->err, ERR_NO_MEMORY, "no memory for reading the store");
        free(r);
        store_free(s);
        opening->done(opening);
        return;
    }
    r->s = s;
    r->opening = opening;
    store_look(r);
}
