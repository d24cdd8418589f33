/* SPDX-License-Identifier: Apache-2.0 */
#include "client/dataset_published.h"

#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "client/dataset_read.h"
#include "client/dataset_wait.h"
#include "format/limits.h"
#include "format/wire.h"

/* Bytes of an index on the way: what the stream may run ahead of its memory growing. */
#define INDEX_CREDIT (1u << 20)
#define COUNTERS_MAX 8u

static int table_of_reply(const struct msg_published_open_reply *m, struct shard_table *out, struct err *e)
{
    int rc = shard_table_init(out, m->count, e);
    struct rcur c = rcur_of(m->shards.p, m->shards.n);
    for (uint32_t i = 0; rc == 0 && i < m->count; i++) {
        struct msg_published_shard s;
        rc = msg_published_shard_decode(&c, &s, e);
        if (rc == 0)
            rc = shard_table_name(out, i, s.name, e);
        if (rc < 0)
            break;
        out->shards[i].bytes = s.bytes;
        out->shards[i].samples = SAMPLES_UNKNOWN;
        out->shards[i].format = (enum shard_format)m->format;
    }
    if (rc == 0)
        rc = rcur_end(&c, "shards of a published directory", e);
    if (rc < 0)
        shard_table_free(out);
    return rc;
}

static int ask_open(struct larder_dataset *d, struct conn *conn, struct call *call,
                    struct msg_published_open_reply *out, struct err *e)
{
    struct msg_published_open m = {.name = slice_str(d->name)};
    struct buf message = {0};
    msg_published_open_encode(&m, &message);
    struct rcur reply;
    int rc = buf_end(&message, "published_open", e);
    if (rc == 0)
        rc = conn_call(conn, OP_PUBLISHED_OPEN, SLICE(message.p, message.n), SLICE(NULL, 0), 0, call, &reply,
                       e);
    if (rc == 0)
        rc = msg_published_open_reply_decode(&reply, out, e);
    buf_free(&message);
    /* Each entry takes 10 bytes of the reply at least. */
    if (rc == 0 && out->count == 0)
        return err_set(e, ERR_INVALID, "the published directory holds no files: put shards into it");
    if (rc == 0 && (out->format >= SHARD_FORMAT_COUNT || out->count > out->shards.n / 10))
        rc = err_set(e, ERR_PROTOCOL, "the server described %u shards of format %u in %zu bytes", out->count,
                     out->format, out->shards.n);
    return rc;
}

int dataset_published_open(struct larder_dataset *d, struct err *e)
{
    struct call call = {0};
    struct msg_published_open_reply m;
    int rc = ask_open(d, d->conn, &call, &m, e);
    if (rc == 0)
        rc = table_of_reply(&m, &d->table, e);
    if (rc == 0) {
        d->published = true;
        d->version_id = m.version;
        d->version = le64_get(m.version.bytes);
        d->record_bytes = m.record_bytes;
    }
    call_free(&call);
    return rc;
}

int dataset_published_renew(struct larder_dataset *d, struct conn *conn, struct err *e)
{
    struct call call = {0};
    struct msg_published_open_reply m;
    int rc = ask_open(d, conn, &call, &m, e);
    if (rc == 0 && !id_equal(&m.version, &d->version_id))
        rc = err_set(e, ERR_MISMATCH,
                     "the files of published directory \"%s\" were changed while it was read: open it again",
                     d->name);
    call_free(&call);
    return rc;
}

struct id dataset_published_object(uint32_t shard)
{
    struct id id = {{0}};
    le32_put(id.bytes, shard);
    return id;
}

struct index_stream {
    struct call call;
    struct conn *conn;
    struct buf bytes;
    struct waiter waiter;
};

static int on_index_bytes(struct call *call, const uint8_t *payload, size_t n, struct err *e)
{
    struct index_stream *s = container_of(call, struct index_stream, call);
    buf_put(&s->bytes, payload, n);
    conn_credit(s->conn, call, n);
    return buf_end(&s->bytes, "sample index", e);
}

static void on_index_done(struct call *call)
{
    waiter_wake(&container_of(call, struct index_stream, call)->waiter);
}

static int fetch_index(struct index_stream *s, struct slice message, struct err *e)
{
    buf_reset(&s->bytes);
    s->call = (struct call){.opcode = OP_PUBLISHED_SAMPLES, .more = on_index_bytes, .done = on_index_done};
    conn_submit(s->conn, &s->call, message, SLICE(NULL, 0));
    waiter_wait(&s->waiter);
    if (s->call.err.class == ERR_NONE)
        buf_put(&s->bytes, s->call.payload, s->call.payload_bytes);
    call_free(&s->call);
    if (s->call.err.class == ERR_NONE)
        return buf_end(&s->bytes, "sample index", e);
    if (e)
        *e = s->call.err;
    return -s->call.err.errnum;
}

int dataset_published_samples(struct larder_dataset *d, uint32_t shard, struct dataset_blob *out,
                              struct err *e)
{
    struct msg_published_samples m = {.version = d->version_id, .shard = shard, .credit = INDEX_CREDIT};
    struct buf message = {0};
    msg_published_samples_encode(&m, &message);
    struct index_stream s = {.conn = d->conn, .bytes.max = INDEX_BYTES_MAX, .waiter = WAITER_INIT};
    struct err why = {0};
    uint64_t begin = clock_ms();
    unsigned pause_ms = 0, bound_ms = client_options(d->client)->reconnect_ms;
    int rc = buf_end(&message, "published_samples", &why);
    while (rc == 0) {
        rc = fetch_index(&s, SLICE(message.p, message.n), &why);
        if (rc == 0 || d->closing || clock_ms() - begin >= bound_ms)
            break;
        if (why.class == ERR_NOT_FOUND) /* the server forgot the version that was opened: a restart */
            rc = dataset_published_renew(d, d->conn, &why);
        else if (ranged_read_retriable(&why))
            rc = 0;
        if (rc == 0)
            pause_between(&pause_ms);
    }
    buf_free(&message);
    waiter_free(&s.waiter);
    if (rc < 0) {
        buf_free(&s.bytes);
        if (e)
            *e = why;
        return rc;
    }
    *out = (struct dataset_blob){.p = s.bytes.p, .bytes = s.bytes.n};
    return 0;
}

/* ---- counting ---- */

struct counting {
    struct larder_dataset *d;
    const bool *chosen; /* NULL: all */
    atomic_uint next;
    pthread_mutex_t lock; /* of err */
    struct err err;       /* the first */
};

static void *count_some(void *arg)
{
    struct counting *c = arg;
    struct larder_dataset *d = c->d;
    for (uint32_t i; (i = atomic_fetch_add(&c->next, 1)) < d->table.count;) {
        struct dataset_view *v;
        struct err e = {0};
        if (c->chosen && !c->chosen[i])
            continue;
        if (dataset_view_get(d, i, true, &v, &e) == 0) {
            dataset_view_put(d, v);
            continue;
        }
        pthread_mutex_lock(&c->lock);
        if (c->err.class == ERR_NONE)
            c->err = e;
        pthread_mutex_unlock(&c->lock);
        atomic_store(&c->next, d->table.count); /* the others need not go on */
    }
    return NULL;
}

/* The server looks through a file when its index is first asked for; several at once hide that it waits. */
int dataset_count(struct larder_dataset *d, const bool *chosen, struct err *e)
{
    if (d->counted)
        return 0;
    struct counting c = {.d = d, .chosen = chosen, .lock = PTHREAD_MUTEX_INITIALIZER};
    pthread_t threads[COUNTERS_MAX];
    unsigned wanted = d->table.count < COUNTERS_MAX ? d->table.count : COUNTERS_MAX, started = 0;
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (started + 1 < wanted && pthread_create(&threads[started], NULL, count_some, &c) == 0)
        started++;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    count_some(&c); /* this thread works too */
    for (unsigned i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&c.lock);
    d->counted = c.err.class == ERR_NONE;
    if (d->counted)
        return 0;
    if (e)
        *e = c.err;
    return -c.err.errnum;
}
