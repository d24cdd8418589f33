/* SPDX-License-Identifier: Apache-2.0 */
/* Restoring: open a checkpoint, ask for boxes of tensors, read what they need. */
#include "client/restore.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/opened.h"

#define MEMORY_DEFAULT (128u << 20)

/* ---- open ---- */

static int open_parts(struct larder_restore *r, struct err *e)
{
    r->parts = calloc(r->commit.world, sizeof(struct part *));
    if (!r->parts)
        return err_set(e, ERR_NO_MEMORY, "no memory for %u parts", r->commit.world);
    int rc = part_open_all(r->client, client_conn(r->client), &r->run, &r->commit, r->parts, e);
    if (rc == 0)
        rc = catalog_create(r->parts, r->commit.world, &r->catalog, e);
    return rc;
}

static void close_parts(struct larder_restore *r)
{
    catalog_free(&r->catalog);
    for (uint32_t i = 0; r->parts && i < r->commit.world; i++)
        part_close(r->parts[i]);
    free(r->parts);
    r->parts = NULL;
    commit_free(&r->commit);
    r->commit = (struct commit){0};
}

static int open_commit(struct larder_restore *r, enum commit_select select, uint64_t value, struct err *e)
{
    int rc = run_commit(r->client, &r->run, select, value, &r->commit, NULL, e);
    return rc < 0 ? rc : open_parts(r, e);
}

/* The newest one may be gone before its parts are open, pruned because a newer one came: then that is opened.
 */
static int open_latest(struct larder_restore *r, struct err *e)
{
    uint64_t tried = 0;
    for (;;) {
        int rc = open_commit(r, SELECT_LATEST_GOOD, 0, e);
        if (rc != -ENOENT || r->commit.sequence <= tried)
            return rc;
        tried = r->commit.sequence;
        close_parts(r);
    }
}

/* Damage of what is stored: another checkpoint may be fine. Not: wrong key, network, memory. */
static bool is_damage(int rc)
{
    return rc == -EBADMSG || rc == -EIO || rc == -ENOENT || rc == -EILSEQ;
}

/* So that nobody tries it again (C12). Best effort: a reader may not. */
static void mark_bad(struct larder_restore *r, uint64_t sequence, const struct err *why)
{
    struct larder_error ignored;
    if (why->class == ERR_CORRUPT)
        (void)larder_mark(r->client, LARDER_CHECKPOINTS, r->run.name, sequence, LARDER_MARK_BAD, why->text,
                          &ignored);
}

struct older { /* the newest good commit before a sequence */
    uint64_t before, found;
};

static int look_older(void *arg, const struct larder_commit_info *i)
{
    struct older *o = arg;
    if (i->state == LARDER_COMMIT_GOOD && i->sequence < o->before && i->sequence > o->found)
        o->found = i->sequence;
    return 0;
}

/* Goes back from a damaged latest checkpoint to the newest one that opens. */
static int fall_back(struct larder_restore *r, struct err *e)
{
    struct err first = *e;
    int rc = -e->errnum;
    while (is_damage(rc) && r->commit.sequence > 0) {
        struct older o = {.before = r->commit.sequence};
        struct larder_error listing;
        mark_bad(r, r->commit.sequence, e);
        close_parts(r);
        rc = larder_commit_list(r->client, LARDER_CHECKPOINTS, r->run.name, 0, look_older, &o, &listing);
        if (rc < 0)
            return err_set(e, (enum err_class)listing.kind, "%s", listing.text);
        if (o.found == 0) {
            *e = first;
            return err_prepend(e, "no good checkpoint of %s is left; the newest", r->run.name);
        }
        r->fell_back++;
        rc = open_commit(r, SELECT_SEQUENCE, o.found, e);
    }
    if (rc == 0)
        snprintf(r->fallback_reason, sizeof r->fallback_reason, "%s", first.text);
    return rc;
}

static int select_commit(struct larder_restore *r, const struct larder_restore_options *o, struct err *e)
{
    int rc;
    switch (o->at) {
    case LARDER_AT_LATEST: rc = open_latest(r, e); break;
    case LARDER_AT_STEP: rc = open_commit(r, SELECT_STEP, o->value, e); break;
    case LARDER_AT_SEQUENCE: rc = open_commit(r, SELECT_SEQUENCE, o->value, e); break;
    default:
        return err_set(e, ERR_INVALID, "at is %d; expected latest, step or sequence (0 to 2)", (int)o->at);
    }
    if (rc < 0 && o->fallback && o->at == LARDER_AT_LATEST && is_damage(rc) && r->commit.sequence > 0)
        rc = fall_back(r, e);
    return rc;
}

int larder_restore_open(struct larder *c, const struct larder_restore_options *options,
                        struct larder_restore **out, struct larder_error *error)
{
    struct err e;
    err_clear(&e);
    struct larder_restore_options o = {0};
    int rc = client_enter(c, &e);
    if (rc < 0)
        return client_leave(rc, &e, error);
    memcpy(&o, options, options->size < sizeof o ? options->size : sizeof o);
    struct larder_restore *r = calloc(1, sizeof *r);
    if (!r)
        return client_leave(err_set(&e, ERR_NO_MEMORY, "no memory for a restore"), &e, error);
    r->client = c;
    r->memory_bytes = o.memory_bytes ? o.memory_bytes : MEMORY_DEFAULT;
    r->conns_wanted = o.connections ? o.connections : 2;
    if (r->conns_wanted > RESTORE_CONNS_MAX)
        r->conns_wanted = RESTORE_CONNS_MAX;
    rc = run_open(c, RUN_CHECKPOINTS, o.run, false, &r->run, &e);
    if (rc == 0) {
        r->run_is_open = true;
        rc = select_commit(r, &o, &e);
        if (rc < 0)
            err_prepend(&e, "opening a checkpoint of %s", r->run.name);
    }
    if (rc < 0)
        larder_restore_close(r);
    else
        *out = r;
    return client_leave(rc, &e, error);
}

void restore_clear_damage(struct larder_restore *r)
{
    for (size_t i = 0; i < r->damage_count; i++)
        free(r->damage[i].text);
    r->damage_count = 0;
}

void larder_restore_close(struct larder_restore *r)
{
    if (!r || client_enter(r->client, NULL) < 0)
        return;
    struct err ignored;
    restore_dial_end(r, &ignored);
    for (unsigned i = 0; i < r->conn_count; i++)
        conn_close(r->conns[i]);
    close_parts(r);
    restore_clear_damage(r);
    free(r->damage);
    free(r->requests);
    free(r->devices);
    names_free(&r->memory);
    if (r->run_is_open)
        run_close(&r->run);
    free(r);
}

/* ---- asking ---- */

static int enter(struct larder_restore *r, struct err *e)
{
    err_clear(e);
    if (!r)
        return err_set(e, ERR_INVALID, "the restore is NULL");
    return client_enter(r->client, e);
}

static uint64_t stored_bytes(const struct larder_restore *r)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < r->commit.world; i++)
        n += r->commit.parts[i].segment_bytes;
    return n;
}

int larder_restore_info(struct larder_restore *r, struct larder_restore_info *out)
{
    struct err e;
    int rc = enter(r, &e);
    if (rc < 0)
        return rc;
    const struct commit *c = &r->commit;
    struct larder_restore_info i = {
        .size = out->size,
        .step = c->step,
        .sequence = c->sequence,
        .server_time_ns = c->server_time_ns,
        .attempt_number = c->attempt_number,
        .world = c->world,
        .plain_bytes = c->plain_bytes,
        .stored_bytes = stored_bytes(r),
        .fetched_bytes = atomic_load(&r->fetched_bytes),
        .loader_state_bytes = c->loader.n,
        .fell_back = r->fell_back,
        .repaired = r->repaired,
    };
    check(c->loader.n <= sizeof i.loader_state);
    if (c->loader.n > 0)
        memcpy(i.loader_state, c->loader.p, c->loader.n);
    snprintf(i.fallback_reason, sizeof i.fallback_reason, "%s", r->fallback_reason);
    int told = snprintf(i.path, sizeof i.path, "%s, %u connections",
                        conn_paths(r->conns, r->conn_count, client_conn(r->client)), r->conns_wanted);
    for (unsigned k = 0; k < r->device_count && told > 0 && (size_t)told < sizeof i.path; k++)
        told += snprintf(i.path + told, sizeof i.path - (size_t)told, "%s%d",
                         k ? ", " : " -> pinned host memory -> CUDA device ",
                         memory_ordinal(r->devices[k]->memory));
    memcpy(out, &i, out->size < sizeof i ? out->size : sizeof i);
    return 0;
}

size_t larder_restore_tensors(struct larder_restore *r)
{
    struct err e;
    return enter(r, &e) < 0 ? 0 : r->catalog.count;
}

static int describe(struct larder_restore *r, uint32_t piece, struct larder_tensor *out)
{
    struct tensor room;
    const struct tensor *t = catalog_tensor(&r->catalog, piece, &room);
    const char *name = catalog_string(&r->catalog, piece);
    if (!name)
        return -ENOMEM;
    *out = (struct larder_tensor){
        .name = name, .name_bytes = strlen(name), .dtype = (enum larder_dtype)t->dtype, .dims = t->dims};
    memcpy(out->shape, t->shape, t->dims * sizeof *out->shape);
    memcpy(out->lengths, t->shape, t->dims * sizeof *out->lengths);
    return 0;
}

int larder_restore_tensor(struct larder_restore *r, size_t i, struct larder_tensor *out)
{
    struct err e;
    int rc = enter(r, &e);
    if (rc < 0)
        return rc;
    if (i >= r->catalog.count)
        return -ENOENT;
    rc = catalog_sort(&r->catalog, &e);
    return rc < 0 ? rc : describe(r, r->catalog.sorted[i], out);
}

static int find(struct larder_restore *r, struct slice name, uint32_t *out, struct err *e)
{
    int rc = catalog_find(&r->catalog, name, out, e);
    if (rc < 0 || *out != NO_PIECE)
        return rc;
    char text[160];
    return err_set(e, ERR_NOT_FOUND, "tensor \"%s\" is not in step %llu of %s, which has %u",
                   err_quote(text, sizeof text, name.p, name.n), (unsigned long long)r->commit.step,
                   r->run.name, r->catalog.count);
}

int larder_restore_find(struct larder_restore *r, const char *name, size_t name_bytes,
                        struct larder_tensor *out, struct larder_error *error)
{
    struct err e;
    uint32_t piece;
    int rc = enter(r, &e);
    if (rc == 0)
        rc = find(r, SLICE(name, name_bytes ? name_bytes : strlen(name)), &piece, &e);
    if (rc == 0 && describe(r, piece, out) < 0)
        rc = err_set(&e, ERR_NO_MEMORY, "no memory for a name");
    return client_leave(rc, &e, error);
}

int larder_restore_label(struct larder_restore *r, size_t i, const char **key, const char **value)
{
    struct err e;
    int rc = enter(r, &e);
    if (rc < 0)
        return rc;
    struct rcur in = rcur_of(r->commit.labels.p, r->commit.labels.n);
    for (size_t n = 0; in.left > 0 && !in.failed; n++) {
        struct slice k = rcur_take16(&in), v = rcur_take16(&in);
        if (in.failed || n != i)
            continue;
        char *copy =
            names_alloc(&r->memory, k.n + v.n + 2); /* terminated copies live as long as the handle */
        if (!copy)
            return -ENOMEM;
        memcpy(copy, k.p, k.n);
        copy[k.n] = 0;
        memcpy(copy + k.n + 1, v.p, v.n);
        copy[k.n + 1 + v.n] = 0;
        *key = copy;
        *value = copy + k.n + 1;
        return 0;
    }
    return -ENOENT;
}

static void shape_text(char *text, size_t size, uint32_t dims, const uint64_t *shape)
{
    size_t n = (size_t)snprintf(text, size, "[");
    for (uint32_t i = 0; i < dims && n < size; i++)
        n += (size_t)snprintf(text + n, size - n, "%s%llu", i ? ", " : "", (unsigned long long)shape[i]);
    if (n < size)
        snprintf(text + n, size - n, "]");
}

static int check_same(const struct tensor *saved, struct tensor *asked, struct err *e)
{
    char want[128], got[128];
    if (asked->dtype != saved->dtype)
        return err_set(e, ERR_MISMATCH, "it is saved as %s, %s was asked for", dtype_name(saved->dtype),
                       dtype_known(asked->dtype) ? dtype_name(asked->dtype) : "an unknown dtype");
    bool open = asked->dims == saved->dims;
    for (uint32_t i = 0; open && i < asked->dims; i++)
        open = asked->shape[i] == 0;
    if (open) { /* takes what is saved */
        bool whole = true;
        for (uint32_t i = 0; whole && i < asked->dims; i++)
            whole = asked->lengths[i] == 0 && asked->offsets[i] == 0;
        memcpy(asked->shape, saved->shape, saved->dims * sizeof *asked->shape);
        if (whole)
            memcpy(asked->lengths, saved->shape, saved->dims * sizeof *asked->lengths);
    }
    if (asked->dims == saved->dims &&
        memcmp(asked->shape, saved->shape, asked->dims * sizeof *asked->shape) == 0)
        return 0;
    shape_text(want, sizeof want, saved->dims, saved->shape);
    shape_text(got, sizeof got, asked->dims, asked->shape);
    return err_set(e, ERR_MISMATCH, "it is saved with shape %s, %s was asked for", want, got);
}

static int keep_box(struct larder_restore *r, const struct tensor *t, const int64_t *strides,
                    const uint64_t **out, struct err *e)
{
    static const int64_t zeros[TENSOR_DIMS_MAX];
    int64_t packed[TENSOR_DIMS_MAX];
    size_t n = t->dims * sizeof(uint64_t);
    if (memcmp(t->lengths, t->shape, n) == 0) {
        int rc = box_strides(t->dtype, t->dims, t->lengths, zeros, true, packed, e);
        if (rc < 0 || memcmp(strides, packed, n) == 0)
            return rc;
    }
    uint64_t *box = names_alloc(&r->memory, 3 * n);
    if (!box)
        return err_set(e, ERR_NO_MEMORY, "no memory for a request");
    memcpy(box, t->offsets, n);
    memcpy(box + t->dims, t->lengths, n);
    memcpy(box + 2 * t->dims, strides, n);
    *out = box;
    return 0;
}

/* Requests that follow each other mostly have the same. */
static int keep_target(struct larder_restore *r, struct device *d, void *stream, const struct target **out,
                       struct err *e)
{
    const struct target *before = r->request_count ? r->requests[r->request_count - 1].target : NULL;
    *out = before;
    if (!d)
        *out = NULL;
    if (!d || (before && before->device == d && before->stream == stream))
        return 0;
    struct target *t = names_alloc(&r->memory, sizeof *t);
    if (!t)
        return err_set(e, ERR_NO_MEMORY, "no memory for a request");
    *t = (struct target){.device = d, .stream = stream};
    *out = t;
    return 0;
}

/* box: as struct request's. */
static int keep_request(struct larder_restore *r, uint32_t piece, const uint64_t *box,
                        const struct larder_tensor *asked, struct device *d, struct err *e)
{
    if (r->request_count == r->request_cap) {
        size_t cap = r->request_cap ? 2 * r->request_cap : 64;
        struct request *more = reallocarray(r->requests, cap, sizeof *more);
        if (!more)
            return err_set(e, ERR_NO_MEMORY, "no memory for %zu requests", cap);
        r->requests = more;
        r->request_cap = cap;
    }
    struct request q = {.piece = piece, .count = 1, .box = box, .memory = asked->data};
    int rc = keep_target(r, d, asked->stream, &q.target, e);
    if (rc < 0)
        return rc;
    if (r->request_count == 0)
        restore_dial(r);
    r->requests[r->request_count++] = q;
    r->tail.memory = NULL;
    catalog_ask(&r->catalog, piece);
    return 0;
}

static int keep_device(struct larder_restore *r, struct device *d, struct err *e)
{
    for (unsigned i = 0; i < r->device_count; i++)
        if (r->devices[i] == d)
            return 0;
    struct device **more = reallocarray(r->devices, r->device_count + 1u, sizeof(struct device *));
    if (!more)
        return err_set(e, ERR_NO_MEMORY, "no memory for a device");
    r->devices = more;
    r->devices[r->device_count++] = d;
    return 0;
}

/* Where the box's bytes go, checked: from low to high, from t->data on. */
static int device_of(struct larder_restore *r, const struct larder_tensor *t, int64_t low, int64_t high,
                     struct device **out, struct err *e)
{
    int rc = 0;
    if (t->memory == LARDER_MEMORY_CUDA)
        rc = device_get(r->client, t->device, out, e);
    else if (t->memory != LARDER_MEMORY_HOST)
        rc = err_set(e, ERR_INVALID, "memory is %d; expected 0 (host) or 1 (CUDA)", (int)t->memory);
    if (rc == 0)
        rc = device_check(*out, (uint8_t *)t->data + low, (uint8_t *)t->data + high, e);
    return rc == 0 && *out ? keep_device(r, *out, e) : rc;
}

/* Any box, in any order. */
static int place_box(struct larder_restore *r, const struct larder_tensor *t, const struct tensor *x,
                     const uint64_t **box, struct device **d, struct err *e)
{
    int64_t strides[TENSOR_DIMS_MAX], low, high;
    int rc = box_strides(x->dtype, x->dims, x->lengths, t->strides, true, strides, e);
    if (rc == 0 && x->bytes > 0)
        rc = box_extent(x->dtype, x->dims, x->lengths, strides, &low, &high, e);
    if (rc == 0 && x->bytes > 0)
        rc = device_of(r, t, low, high, d, e);
    return rc == 0 ? keep_box(r, x, strides, box, e) : rc;
}

/* What most ask for: the whole tensor, packed. */
static bool is_whole(const struct larder_tensor *t, const struct tensor *x)
{
    for (uint32_t i = 0; i < x->dims; i++)
        if (t->strides[i] != 0 || x->offsets[i] != 0 || x->lengths[i] != x->shape[i])
            return false;
    return true;
}

/* x, of the same dtype and shape as what is saved. */
static int add_box(struct larder_restore *r, const struct larder_tensor *t, struct tensor *x, uint32_t piece,
                   struct err *e)
{
    struct device *d = NULL;
    const uint64_t *box = NULL;
    int rc = 0;
    bool whole = is_whole(t, x); /* as that, it was checked when it was saved and opened */
    if (whole)
        x->bytes = tensor_bytes(x);
    else
        rc = tensor_check(x, &x->bytes, e);
    if (rc == 0 && x->bytes > 0 && !t->data)
        rc = err_set(e, ERR_INVALID, "elements were asked for, but data is NULL");
    if (rc == 0 && (!whole || x->bytes > INT64_MAX))
        rc = place_box(r, t, x, &box, &d, e);
    else if (rc == 0 && x->bytes > 0)
        rc = device_of(r, t, 0, (int64_t)x->bytes, &d, e);
    return rc == 0 ? keep_request(r, piece, box, t, d, e) : rc;
}

/* Is a whole tensor asked for, packed, in host memory? By its shape, not by zeros for whatever it has. */
static bool asks_for_all(const struct larder_tensor *t)
{
    uint64_t other = 0, lengths = 0, differ = 0;
    for (uint32_t i = 0; i < t->dims; i++) {
        other |= (uint64_t)t->strides[i] | t->offsets[i];
        lengths |= t->lengths[i];
        differ |= t->lengths[i] ^ t->shape[i];
    }
    return t->memory == LARDER_MEMORY_HOST && other == 0 && (lengths == 0 || differ == 0);
}

/* Where the next one of the run would have to lie, behind piece, at p and in memory. Chunks are numbered by
 * rank, so a run ends with its rank's last piece. */
static struct tail tail_behind(const struct larder_restore *r, uint32_t piece, const struct place *p,
                               uint8_t *memory)
{
    bool last = piece + 1 == r->catalog.first[catalog_rank(&r->catalog, piece) + 1];
    return (struct tail){piece + 1, p->chunk, p->offset + (uint32_t)p->bytes,
                         last ? NULL : memory + p->bytes};
}

/* Is it a small whole tensor in host memory, and this piece? Then where it lies. */
static bool is_small(struct larder_restore *r, const struct larder_tensor *t, struct slice name,
                     uint32_t piece, struct place *out)
{
    return asks_for_all(t) &&
           catalog_is(&r->catalog, piece, name, (enum dtype)t->dtype, t->dims, t->shape, out) &&
           out->bytes > 0 && !index_large(out->bytes);
}

/* A small tensor behind those of the last request, in its chunk as in memory, makes that one longer: asking
 * for a million costs little then, and planning for them nothing. What it was asked for was checked with the
 * first; of the others name, dtype, shape and memory are looked at. True: done. */
static bool add_to_run(struct larder_restore *r, const struct larder_tensor *t, struct slice name)
{
    struct tail *tail = &r->tail;
    struct place p;
    if (!tail->memory || t->data != tail->memory || !is_small(r, t, name, tail->piece, &p) ||
        p.chunk != tail->chunk || p.offset != tail->offset)
        return false;
    r->requests[r->request_count - 1].count++;
    catalog_ask(&r->catalog, tail->piece);
    *tail = tail_behind(r, tail->piece, &p, tail->memory);
    return true;
}

/* May the request that was just kept become a run? */
static void begin_run(struct larder_restore *r, const struct larder_tensor *t, struct slice name,
                      uint32_t piece)
{
    const struct request *q = &r->requests[r->request_count - 1];
    struct place p;
    if (!q->box && !q->target && is_small(r, t, name, piece, &p))
        r->tail = tail_behind(r, piece, &p, q->memory);
}

static int add(struct larder_restore *r, const struct larder_tensor *t, struct err *e)
{
    struct tensor x, room;
    uint32_t piece;
    const char *name = t->name ? t->name : "";
    struct slice n = SLICE(name, t->name_bytes ? t->name_bytes : strlen(name));
    if (t->dims > TENSOR_DIMS_MAX)
        return err_set(e, ERR_INVALID, "%u dimensions were asked for; at most %u are possible", t->dims,
                       TENSOR_DIMS_MAX);
    if (add_to_run(r, t, n))
        return 0;
    int rc = find(r, n, &piece, e);
    if (rc < 0)
        return rc;
    tensor_of_public(t, &x);
    rc = check_same(catalog_tensor(&r->catalog, piece, &room), &x, e);
    if (rc == 0)
        rc = add_box(r, t, &x, piece, e);
    if (rc == 0)
        begin_run(r, t, n, piece);
    if (rc < 0) {
        char text[160];
        return err_prepend(e, "tensor \"%s\"", err_quote(text, sizeof text, x.name.p, x.name.n));
    }
    return 0;
}

int larder_restore_add(struct larder_restore *r, const struct larder_tensor *t, struct larder_error *error)
{
    struct err e;
    int rc = enter(r, &e);
    if (rc == 0)
        rc = add(r, t, &e);
    return client_leave(rc, &e, error);
}

int larder_restore_extra(struct larder_restore *r, size_t i, const char **name)
{
    struct err e;
    int rc = enter(r, &e);
    if (rc == 0 && catalog_all_asked(&r->catalog))
        return -ENOENT;
    if (rc == 0)
        rc = catalog_sort(&r->catalog, &e);
    if (rc < 0)
        return rc;
    for (size_t k = r->extra_at_index <= i ? r->extra_at : 0, n = k ? r->extra_at_index : 0;
         k < r->catalog.count; k++) {
        uint32_t piece = r->catalog.sorted[k];
        if (catalog_asked(&r->catalog, piece))
            continue;
        if (n++ == i) {
            r->extra_at = k; /* where the next call goes on */
            r->extra_at_index = i;
            *name = catalog_string(&r->catalog, piece);
            return *name ? 0 : -ENOMEM;
        }
    }
    return -ENOENT;
}

/* ---- reading ---- */

int larder_restore_run(struct larder_restore *r, struct larder_error *error)
{
    struct err e;
    int rc = enter(r, &e);
    if (rc == 0)
        rc = restore_run(r, &e);
    if (rc < 0 && r)
        err_prepend(&e, "restoring step %llu of %s", (unsigned long long)r->commit.step, r->run.name);
    return client_leave(rc, &e, error);
}

int larder_restore_damage(struct larder_restore *r, size_t i, struct larder_damage *out)
{
    struct err e;
    int rc = enter(r, &e);
    if (rc < 0)
        return rc;
    if (i >= r->damage_count)
        return -ENOENT;
    const struct damage *d = &r->damage[i];
    *out = (struct larder_damage){.tensor = d->tensor, .rank = d->rank, .chunk = d->chunk, .text = d->text};
    return 0;
}

/* ---- blobs ---- */

static int part_of_rank(struct larder_restore *r, uint32_t rank, const struct index_private **out,
                        struct err *e)
{
    if (rank >= r->commit.world)
        return err_set(e, ERR_NOT_FOUND, "rank %u; the checkpoint has ranks 0 to %u", rank,
                       r->commit.world - 1);
    *out = part_index(r->parts[rank]);
    return 0;
}

static int read_blob(struct larder_restore *r, uint32_t rank, const struct blob *b, uint8_t *out,
                     struct err *e)
{
    struct part_scratch *s = part_scratch_create();
    uint8_t *plain = malloc(CHUNK_PLAIN_BYTES_MAX);
    int rc = s && plain ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for decoding");
    uint32_t chunk = b->first_chunk, chunks;
    const struct chunk_entry *table = part_chunks(r->parts[rank], &chunks);
    uint32_t skip = b->offset;
    for (uint64_t at = 0; rc == 0 && at < b->bytes; chunk++, skip = 0) {
        check(chunk < chunks && skip < table[chunk].plain_bytes); /* index_private_view saw to it */
        rc = fetch_one(r->parts[rank], client_conn(r->client), s, chunk, plain, e);
        if (rc < 0)
            break;
        uint64_t n = table[chunk].plain_bytes - skip;
        n = n < b->bytes - at ? n : b->bytes - at;
        memcpy(out + at, plain + skip, n);
        at += n;
    }
    free(plain);
    part_scratch_free(s);
    return rc;
}

static int blob(struct larder_restore *r, uint32_t rank, const char *name, void **p, size_t *n, struct err *e)
{
    const struct index_private *x = NULL;
    int rc = part_of_rank(r, rank, &x, e);
    for (uint32_t i = 0; rc == 0 && i < x->blob_count; i++) {
        const struct blob *b = &x->blobs[i];
        if (!slice_eq(b->name, slice_str(name)))
            continue;
        uint8_t *out = malloc(b->bytes ? b->bytes : 1);
        if (!out)
            return err_set(e, ERR_NO_MEMORY, "no memory for a blob of %llu bytes",
                           (unsigned long long)b->bytes);
        rc = read_blob(r, rank, b, out, e);
        if (rc < 0) {
            free(out);
            return err_prepend(e, "blob \"%s\"", name);
        }
        *p = out;
        *n = (size_t)b->bytes;
        return 0;
    }
    return rc < 0 ? rc : err_set(e, ERR_NOT_FOUND, "rank %u saved no blob \"%s\"", rank, name);
}

int larder_restore_blob(struct larder_restore *r, uint32_t rank, const char *name, void **p, size_t *n,
                        struct larder_error *error)
{
    struct err e;
    int rc = enter(r, &e);
    if (rc == 0)
        rc = blob(r, rank, name, p, n, &e);
    return client_leave(rc, &e, error);
}

int larder_restore_blob_name(struct larder_restore *r, uint32_t rank, size_t i, const char **name,
                             uint64_t *bytes)
{
    struct err e;
    const struct index_private *x = NULL;
    int rc = enter(r, &e);
    if (rc == 0)
        rc = part_of_rank(r, rank, &x, &e);
    if (rc < 0)
        return rc;
    if (i >= x->blob_count)
        return -ENOENT;
    const struct blob *b = &x->blobs[i];
    char *copy = names_alloc(&r->memory, b->name.n + 1);
    if (!copy)
        return -ENOMEM;
    memcpy(copy, b->name.p, b->name.n);
    copy[b->name.n] = 0;
    *name = copy;
    *bytes = b->bytes;
    return 0;
}
