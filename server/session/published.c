/* SPDX-License-Identifier: Apache-2.0 */
#include "server/session/published.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/session/unpacked.h"

int published_create(struct worker *w, struct published **out)
{
    struct published *p = calloc(1, sizeof *p);
    if (!p)
        return -ENOMEM;
    p->w = w;
    list_init(&p->versions);
    list_init(&p->indexes);
    list_init(&p->jobs);
    if (shard_files_create(p, &p->files) < 0 || unpacker_create(w, &p->unpacker) < 0) {
        shard_files_destroy(p->files);
        free(p);
        return -ENOMEM;
    }
    *out = p;
    return 0;
}

void pubversion_free(struct pubversion *v)
{
    if (!v)
        return;
    for (uint32_t i = 0; i < v->count; i++) {
        free(v->shards[i].name);
        free(v->shards[i].idx);
    }
    mds_index_free(v->mds);
    free(v->shards);
    free(v);
}

void published_destroy(struct published *p)
{
    if (!p)
        return;
    check(list_empty(&p->jobs));
    shard_files_destroy(p->files);
    unpacker_destroy(p->unpacker);
    for (struct list *l; (l = list_pop(&p->versions));)
        pubversion_free(container_of(l, struct pubversion, link));
    for (struct list *l; (l = list_pop(&p->indexes));) {
        struct sample_index *x = container_of(l, struct sample_index, link);
        buf_free(&x->encoded);
        free(x);
    }
    free(p);
}

void pubversion_ref(struct pubversion *v)
{
    v->refs++;
}

static void evict(struct published *p)
{
    list_for_each_safe (l, &p->versions) {
        struct pubversion *v = container_of(l, struct pubversion, link);
        if (p->version_count <= VERSIONS_MAX)
            return;
        if (v->refs > 0)
            continue;
        list_del(&v->link);
        p->version_count--;
        pubversion_free(v);
    }
}

void pubversion_unref(struct published *p, struct pubversion *v)
{
    check(v->refs > 0);
    v->refs--;
    evict(p);
}

bool published_visible(const struct published_dir *dir, const char *tenant)
{
    return strcmp(dir->tenant, "*") == 0 || strcmp(dir->tenant, tenant) == 0;
}

static struct pubversion *known(struct published *p, const struct id *id)
{
    list_for_each (l, &p->versions) {
        struct pubversion *v = container_of(l, struct pubversion, link);
        if (!id_equal(&v->id, id))
            continue;
        list_del(&v->link);
        list_add_tail(&p->versions, &v->link);
        return v;
    }
    return NULL;
}

struct pubversion *published_find(struct published *p, const char *tenant, const struct id *id)
{
    struct pubversion *v = known(p, id);
    return v && !v->withdrawn && published_visible(v->dir, tenant) ? v : NULL;
}

static bool same_dir(const struct published_dir *a, const struct published_dir *b)
{
    return strcmp(a->name, b->name) == 0 && strcmp(a->path, b->path) == 0 && a->format == b->format &&
           a->record_bytes == b->record_bytes;
}

void published_reload(struct published *p)
{
    list_for_each (l, &p->versions) {
        struct pubversion *v = container_of(l, struct pubversion, link);
        v->withdrawn = true;
        for (size_t i = 0; i < p->w->dir_count && v->withdrawn; i++) {
            if (!same_dir(v->dir, &p->w->dirs[i]))
                continue;
            v->dir = &p->w->dirs[i]; /* its tenant may be another now */
            v->withdrawn = false;
        }
    }
    if (p->w->number == 0)
        unpacked_keep_dirs(p->w);
}

bool pubfile_path(const struct pubversion *v, const char *name, char *out, size_t size)
{
    return (size_t)snprintf(out, size, "%s/%s", v->dir->path, name) < size;
}

int pubfile_same(const struct pubversion *v, const char *name, const struct loop_stat *was,
                 const struct loop_stat *now, struct err *e)
{
    if (now->bytes == was->bytes && now->mtime_ns == was->mtime_ns && now->inode == was->inode)
        return 0;
    char id[2 * ID_BYTES + 1];
    hex_encode(v->id.bytes, ID_BYTES, id);
    return err_set(e, ERR_MISMATCH,
                   "shard %s of %s was replaced while version %s was being read (%" PRIu64
                   " bytes then, %" PRIu64 " now%s); open the dataset again",
                   name, v->dir->name, id, was->bytes, now->bytes,
                   now->bytes != was->bytes         ? ""
                   : now->mtime_ns != was->mtime_ns ? ", changed at another time"
                                                    : ", another file");
}

struct pubversion *pubversion_keep(struct published *p, struct pubversion **built)
{
    struct pubversion *v = known(p, &(*built)->id);
    if (v) {
        v->dir = (*built)->dir; /* as it is configured now */
        v->withdrawn = false;
        return v;
    }
    v = *built;
    *built = NULL;
    list_add_tail(&p->versions, &v->link);
    p->version_count++;
    v->refs++; /* not this one */
    evict(p);
    v->refs--;
    unpacked_keep_version(p->w, v);
    return v;
}

/* OP_PUBLISHED_LIST and OP_PUBLISHED_OPEN. */

struct query {
    struct request r;
    struct scan scan;
    struct published *p;
    size_t dir; /* the directory being looked at */
    struct buf items;
    uint32_t count;
};

static void query_cancel(struct request *r, const struct err *why)
{
    request_fail(r, why); /* freed when the scan has come to its end */
}

static void query_timer(struct loop_timer *t)
{
    struct request *r = container_of(t, struct request, timer);
    struct err e = {0};
    err_set(&e, ERR_TIMEOUT, "%s was not done within its deadline of %u ms", opcode_name(r->op->opcode),
            r->deadline_ms);
    request_fail(r, &e);
    session_settle(r->s);
}

static void query_end(struct query *q)
{
    struct session *s = q->r.s;
    buf_free(&q->items);
    request_free(&q->r);
    session_settle(s);
}

static struct query *query_begin(struct session *s, const struct op_entry *op, struct frame *f)
{
    struct request *r = request_begin(s, op, f, sizeof(struct query), query_cancel, query_timer);
    if (!r)
        return NULL;
    struct query *q = container_of(r, struct query, r);
    q->p = s->w->published;
    q->items.max = FRAME_PAYLOAD_BYTES_MAX - 4096;
    loop_timer_set(s->w->loop, &r->timer, r->started_ms + r->deadline_ms);
    return q;
}

static void list_answer(struct query *q)
{
    struct err e = {0};
    struct buf b = {0};
    struct msg_list_reply reply = {.count = q->count, .items = SLICE(q->items.p, q->items.n)};
    msg_list_reply_encode(&reply, &b);
    if (buf_end(&q->items, "the list of published directories", &e) < 0 ||
        buf_end(&b, "the list of published directories", &e) < 0)
        request_fail(&q->r, &e);
    else
        request_answer(&q->r, SLICE(b.p, b.n), (struct slice){0});
    buf_free(&b);
}

/* The next directory that the tenant may see, from q->dir on. */
static const struct published_dir *query_dir(struct query *q)
{
    const struct worker *w = q->p->w;
    for (; q->dir < w->dir_count; q->dir++)
        if (published_visible(&w->dirs[q->dir], q->r.s->identity.tenant))
            return &w->dirs[q->dir];
    return NULL;
}

static void list_scanned(struct scan *scan)
{
    struct query *q = container_of(scan, struct query, scan);
    if (scan->version) {
        struct msg_published_item item = {.name = slice_str(scan->dir->name),
                                          .shards = scan->version->count,
                                          .bytes = scan->version->bytes,
                                          .format = (uint8_t)scan->dir->format};
        msg_published_item_encode(&item, &q->items);
        q->count++;
    } else {
        request_fail(&q->r, &scan->err);
    }
    q->dir++;
    const struct published_dir *dir = q->r.answered ? NULL : query_dir(q);
    if (dir) {
        scan_begin(scan, q->p, dir);
        return;
    }
    list_answer(q);
    query_end(q);
}

void published_list_handle(struct session *s, const struct op_entry *op, struct frame *f)
{
    struct query *q = query_begin(s, op, f);
    if (!q)
        return;
    struct err e = {0};
    struct msg_list m;
    struct rcur in = rcur_of(q->r.payload.p, q->r.payload.n);
    const struct published_dir *dir = NULL;
    if (msg_list_decode(&in, &m, &e) < 0 || rcur_end(&in, "published_list", &e) < 0)
        request_fail(&q->r, &e);
    else if ((dir = query_dir(q))) {
        q->scan.done = list_scanned;
        scan_begin(&q->scan, q->p, dir);
        return;
    }
    list_answer(q);
    buf_free(&q->items);
    request_free(&q->r);
}

static void open_answer(struct query *q, const struct pubversion *v)
{
    struct err e = {0};
    struct buf b = {0};
    for (uint32_t i = 0; i < v->count; i++) {
        struct msg_published_shard shard = {.name = slice_str(v->shards[i].name),
                                            .bytes = v->shards[i].bytes};
        msg_published_shard_encode(&shard, &q->items);
    }
    struct msg_published_open_reply reply = {.version = v->id,
                                             .format = (uint8_t)v->dir->format,
                                             .record_bytes = v->dir->record_bytes,
                                             .count = v->count,
                                             .shards = SLICE(q->items.p, q->items.n)};
    msg_published_open_reply_encode(&reply, &b);
    if (buf_end(&q->items, "the list of shards", &e) < 0 || buf_end(&b, "the list of shards", &e) < 0)
        request_fail(&q->r, &e);
    else
        request_answer(&q->r, SLICE(b.p, b.n), (struct slice){0});
    buf_free(&b);
}

static void open_scanned(struct scan *scan)
{
    struct query *q = container_of(scan, struct query, scan);
    if (scan->version)
        open_answer(q, scan->version);
    else
        request_fail(&q->r, &scan->err);
    query_end(q);
}

static const struct published_dir *dir_of_name(struct query *q, struct slice name)
{
    for (const struct published_dir *dir; (dir = query_dir(q)); q->dir++)
        if (slice_eq(slice_str(dir->name), name))
            return dir;
    return NULL;
}

void published_open_handle(struct session *s, const struct op_entry *op, struct frame *f)
{
    struct err e = {0};
    struct msg_published_open m;
    struct query *q = query_begin(s, op, f);
    if (!q)
        return;
    struct rcur in = rcur_of(q->r.payload.p, q->r.payload.n);
    const struct published_dir *dir = NULL;
    if (msg_published_open_decode(&in, &m, &e) == 0 && rcur_end(&in, "published_open", &e) == 0 &&
        !(dir = dir_of_name(q, m.name))) {
        char quoted[128];
        err_set(&e, ERR_NOT_FOUND, "no published directory is called %s, or it is not yours",
                err_quote(quoted, sizeof quoted, m.name.p, m.name.n));
    }
    if (!dir) {
        request_fail(&q->r, &e);
        buf_free(&q->items);
        request_free(&q->r);
        return;
    }
    q->scan.done = open_scanned;
    scan_begin(&q->scan, q->p, dir);
}
