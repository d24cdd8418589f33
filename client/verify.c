/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Verify. Structure and scrub run on the server, which needs no key for them, and come as a stream of
 * findings. Deep reads everything here: each chunk fetched, opened, decoded, and compared with the hash of
 * what was saved.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/fetch.h"
#include "client/list.h"

#define DEEP_MEMORY_BYTES (64u << 20)

struct verify {
    struct larder *client;
    enum run_kind kind;
    int (*each)(void *arg, const struct larder_finding *f);
    void *arg;
    pthread_mutex_t lock;
    int64_t damaged;
    int ended_by; /* what each returned, if not 0 */
};

/* Findings come from several threads; the caller hears them one at a time. */
static int tell(struct verify *v, const struct larder_finding *f)
{
    pthread_mutex_lock(&v->lock);
    if (f->error.kind != LARDER_OK)
        v->damaged++;
    if (v->ended_by == 0 && v->each)
        v->ended_by = v->each(v->arg, f);
    int rc = v->ended_by;
    pthread_mutex_unlock(&v->lock);
    return rc;
}

/* ---- on the server ---- */

struct scrub {
    struct call call;
    struct verify *verify;
    struct conn *conn;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool done;
};

static int take_item(struct verify *v, const uint8_t *payload, size_t n, struct err *e)
{
    struct rcur in = rcur_of(payload, n);
    struct msg_scrub_item m;
    char object[256];
    int rc = msg_scrub_item_decode(&in, &m, e);
    if (rc < 0)
        return rc;
    struct larder_finding f = {
        .object = err_quote(object, sizeof object, m.object.p, m.object.n),
        .sequence = m.sequence,
        .step = m.step,
        .offset = m.offset,
        .bytes = m.bytes,
        .rank = m.rank,
        .chunk = m.chunk == UINT32_MAX ? -1 : (int64_t)m.chunk,
    };
    if (m.class != ERR_NONE) {
        f.error.kind = m.class < ERR_CLASS_COUNT ? (enum larder_class)m.class : LARDER_CORRUPT;
        f.error.errnum = err_class_errno((enum err_class)f.error.kind);
        err_quote(f.error.text, sizeof f.error.text, m.text.p, m.text.n);
    }
    return tell(v, &f) == 0 ? 0 : err_set(e, ERR_CANCELLED, "verify was ended by its caller");
}

static int scrub_more(struct call *call, const uint8_t *payload, size_t n, struct err *e)
{
    struct scrub *s = container_of(call, struct scrub, call);
    return take_item(s->verify, payload, n, e);
}

static void scrub_done(struct call *call)
{
    struct scrub *s = container_of(call, struct scrub, call);
    pthread_mutex_lock(&s->lock);
    s->done = true;
    pthread_cond_signal(&s->cond);
    pthread_mutex_unlock(&s->lock);
}

static int scrub(struct verify *v, const char *run, uint64_t sequence, enum scrub_level level, struct err *e)
{
    struct buf b = {0};
    struct scrub s = {.verify = v,
                      .call = {.opcode = OP_SCRUB, .more = scrub_more, .done = scrub_done},
                      .lock = PTHREAD_MUTEX_INITIALIZER,
                      .cond = PTHREAD_COND_INITIALIZER};
    struct msg_scrub m = {.kind = (uint8_t)v->kind,
                          .name = slice_str(run ? run : ""),
                          .sequence = sequence,
                          .level = (uint8_t)level};
    msg_scrub_encode(&m, &b);
    int rc = buf_end(&b, "scrub", e);
    if (rc == 0) /* a connection of its own: the callback may take its time */
        rc = client_connect(v->client, CONN_LANE_OFFER, &s.conn, e);
    if (rc == 0) {
        conn_submit(s.conn, &s.call, SLICE(b.p, b.n), SLICE(NULL, 0));
        pthread_mutex_lock(&s.lock);
        while (!s.done) /* the call has a deadline between two findings */
            pthread_cond_wait(&s.cond, &s.lock);
        pthread_mutex_unlock(&s.lock);
        if (s.call.err.class == ERR_NONE && s.call.payload_bytes > 0)
            rc = take_item(v, s.call.payload, s.call.payload_bytes, e);
        if (s.call.err.class != ERR_NONE) {
            rc = -s.call.err.errnum;
            *e = s.call.err;
        }
        call_free(&s.call);
        conn_close(s.conn);
    }
    buf_free(&b);
    pthread_cond_destroy(&s.cond);
    pthread_mutex_destroy(&s.lock);
    return v->ended_by ? 0 : rc;
}

/* ---- here ---- */

struct deep {
    struct verify *verify;
    const struct commit *commit;
    const struct fetch_item *items;
};

static void segment_name(const struct part *p, char out[2 * ID_BYTES + 1])
{
    hex_encode(&part_header(p)->segment_id, ID_BYTES, out);
}

/* A tensor, or blob, with bytes in the chunk: the first of them. */
static struct slice name_in_chunk(const struct part *p, uint32_t chunk)
{
    const struct index_private *x = part_index(p);
    struct tensor room;
    for (uint32_t i = 0; i < x->tensor_count; i++) {
        const struct tensor *t = index_tensor(x, i, &room);
        uint64_t chunks =
            t->bytes > CHUNK_PLAIN_BYTES_MAX / 4 ? (t->bytes - 1) / CHUNK_PLAIN_BYTES_MAX + 1 : 1;
        if (t->bytes > 0 && chunk >= t->first_chunk && chunk - t->first_chunk < chunks)
            return t->name;
    }
    for (uint32_t i = 0; i < x->blob_count; i++)
        if (x->blobs[i].bytes > 0 && chunk >= x->blobs[i].first_chunk &&
            chunk - x->blobs[i].first_chunk <= x->blobs[i].bytes / CHUNK_PLAIN_BYTES_MAX)
            return x->blobs[i].name;
    return SLICE(NULL, 0);
}

static int chunk_good(void *arg, size_t item, uint8_t *plain, uint32_t n, bool there, struct err *e)
{
    (void)arg, (void)item, (void)plain, (void)n, (void)there, (void)e;
    return 0;
}

static int chunk_damaged(void *arg, size_t item, const struct err *why)
{
    struct deep *d = arg;
    const struct fetch_item *i = &d->items[item];
    char object[2 * ID_BYTES + 1], tensor[256];
    uint32_t count;
    const struct chunk_entry *c = &part_chunks(i->part, &count)[i->chunk];
    struct slice name = name_in_chunk(i->part, i->chunk);
    segment_name(i->part, object);
    struct larder_finding f = {
        .object = object,
        .sequence = d->commit->sequence,
        .step = d->commit->step,
        .offset = c->offset,
        .bytes = c->stored_bytes,
        .rank = part_header(i->part)->rank,
        .chunk = i->chunk,
        .tensor = name.n ? err_quote(tensor, sizeof tensor, name.p, name.n) : NULL,
    };
    client_leave(-why->errnum, why, &f.error);
    return tell(d->verify, &f) == 0 ? 0 : -ECANCELED;
}

static int part_finding(struct verify *v, const struct commit *c, uint32_t i, const struct err *why)
{
    char object[2 * ID_BYTES + 1];
    hex_encode(&c->parts[i].segment, ID_BYTES, object);
    struct larder_finding f = {.object = object,
                               .sequence = c->sequence,
                               .step = c->step,
                               .bytes = c->parts[i].segment_bytes,
                               .rank = c->parts[i].rank,
                               .chunk = -1};
    if (why)
        client_leave(-why->errnum, why, &f.error);
    return tell(v, &f) == 0 ? 0 : -ECANCELED;
}

static int deep_part(struct verify *v, struct conn *conn, const struct run *run, const struct commit *c,
                     uint32_t i, struct err *e)
{
    struct part *p = NULL;
    int rc = part_open(v->client, conn, run, c, c->parts[i].rank, PART_VERIFY, &p, e);
    if (rc == -EBADMSG || rc == -EIO || rc == -ENOENT || rc == -EKEYREJECTED)
        return part_finding(v, c, i, e);
    if (rc < 0)
        return rc;
    uint32_t count;
    (void)part_chunks(p, &count);
    struct fetch_item *items = calloc(count + 1u, sizeof *items);
    struct deep d = {.verify = v, .commit = c, .items = items};
    int64_t before = v->damaged;
    struct fetch_job job = {
        .client = v->client,
        .class = PART_VERIFY,
        .conns = &conn,
        .conn_count = 1,
        .memory_bytes = DEEP_MEMORY_BYTES,
        .threads = client_options(v->client)->threads,
        .items = items,
        .count = count,
        .good = chunk_good,
        .damaged = chunk_damaged,
        .arg = &d,
    };
    for (uint32_t k = 0; items && k < count; k++)
        items[k] = (struct fetch_item){.part = p, .chunk = k};
    rc = items ? fetch_run(&job, e) : err_set(e, ERR_NO_MEMORY, "no memory for verifying %u chunks", count);
    if (rc == 0 && v->damaged == before)
        rc = part_finding(v, c, i, NULL);
    free(items);
    part_close(p);
    return rc;
}

static int deep_commit(struct verify *v, struct conn *conn, const struct run *run, uint64_t sequence,
                       struct err *e)
{
    struct commit c;
    int rc = run_commit(v->client, run, SELECT_SEQUENCE, sequence, &c, NULL, e);
    if (rc == -EBADMSG || rc == -EIO) { /* the record itself */
        char object[64];
        snprintf(object, sizeof object, "commit record %llu", (unsigned long long)sequence);
        struct larder_finding f = {.object = object, .sequence = sequence, .chunk = -1};
        client_leave(rc, e, &f.error);
        return tell(v, &f) == 0 ? 0 : -ECANCELED;
    }
    if (rc < 0)
        return rc;
    for (uint32_t i = 0; rc == 0 && i < c.world; i++)
        rc = deep_part(v, conn, run, &c, i, e);
    commit_free(&c);
    return rc;
}

struct sequences {
    uint64_t *list;
    size_t count, cap;
};

static int keep_sequence(void *arg, struct rcur *in, struct err *e)
{
    struct sequences *s = arg;
    struct msg_commit_item m;
    int rc = msg_commit_item_decode(in, &m, e);
    if (rc < 0 || m.sequence == 0)
        return rc;
    if (s->count == s->cap) {
        size_t cap = s->cap ? 2 * s->cap : 64;
        uint64_t *more = reallocarray(s->list, cap, sizeof *more);
        if (!more)
            return err_set(e, ERR_NO_MEMORY, "no memory for a list of commits");
        s->list = more;
        s->cap = cap;
    }
    s->list[s->count++] = m.sequence;
    return 0;
}

static int deep_run(struct verify *v, struct conn *conn, const char *name, uint64_t sequence, struct err *e)
{
    struct run run;
    struct sequences all = {0};
    int rc = run_open(v->client, v->kind, name, false, &run, e);
    if (rc < 0)
        return rc;
    if (sequence == 0)
        rc = list_commits(v->client, v->kind, name, false, keep_sequence, &all, e);
    if (rc == 0 && sequence != 0)
        rc = deep_commit(v, conn, &run, sequence, e);
    for (size_t i = 0; rc == 0 && i < all.count; i++) {
        rc = deep_commit(v, conn, &run, all.list[i], e);
        if (rc == -ENOENT) /* pruned meanwhile */
            rc = 0;
    }
    free(all.list);
    run_close(&run);
    return rc;
}

struct deep_walk {
    struct verify *verify;
    struct conn *conn;
};

static int deep_item(void *arg, struct rcur *in, struct err *e)
{
    struct deep_walk *w = arg;
    struct msg_run_item m;
    char name[NAME_BYTES_MAX + 1];
    int rc = msg_run_item_decode(in, &m, e);
    if (rc < 0)
        return rc;
    if (!slice_cstr(m.name, name, sizeof name))
        return err_set(e, ERR_PROTOCOL, "the server listed a run under a name of %zu bytes", m.name.n);
    return m.commits == 0 ? 0 : deep_run(w->verify, w->conn, name, 0, e);
}

static int deep(struct verify *v, const char *run, uint64_t sequence, struct err *e)
{
    struct conn *conn = NULL;
    int rc = client_connect(v->client, CONN_LANE_OPEN, &conn, e);
    if (rc < 0)
        return rc;
    struct deep_walk w = {.verify = v, .conn = conn};
    rc = run ? deep_run(v, conn, run, sequence, e) : list_runs(v->client, v->kind, deep_item, &w, e);
    conn_close(conn);
    return v->ended_by ? 0 : rc;
}

int64_t larder_verify(struct larder *c, enum larder_kind kind, const char *run, uint64_t sequence,
                      enum larder_verify_level level, int (*each)(void *arg, const struct larder_finding *f),
                      void *arg, struct larder_error *error)
{
    struct err e;
    err_clear(&e);
    struct verify v = {.client = c,
                       .kind = (enum run_kind)kind,
                       .each = each,
                       .arg = arg,
                       .lock = PTHREAD_MUTEX_INITIALIZER};
    int rc = client_enter(c, &e);
    if (rc == 0 && kind != LARDER_CHECKPOINTS && kind != LARDER_DATASETS)
        rc = err_set(&e, ERR_INVALID, "kind is %d; expected LARDER_CHECKPOINTS (1) or LARDER_DATASETS (2)",
                     (int)kind);
    if (rc == 0 && run)
        rc = run_name_check(run, strlen(run), &e);
    if (rc == 0) {
        switch (level) {
        case LARDER_VERIFY_STRUCTURE: rc = scrub(&v, run, sequence, SCRUB_STRUCTURE, &e); break;
        case LARDER_VERIFY_SCRUB: rc = scrub(&v, run, sequence, SCRUB_DATA, &e); break;
        case LARDER_VERIFY_DEEP: rc = deep(&v, run, sequence, &e); break;
        default:
            rc = err_set(&e, ERR_INVALID, "level is %d; expected structure, scrub or deep (1 to 3)",
                         (int)level);
        }
    }
    pthread_mutex_destroy(&v.lock);
    client_leave(rc, &e, error);
    return rc < 0 ? rc : v.damaged;
}
