/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fetchers own a slot of memory each, and fill it by part_fetch with a large chunk or several small ones;
 * decoders take chunks from a queue as they arrive. The slots are the bound: a fetcher asks again when what
 * came to its slot is decoded, and there are several on a connection, so that others are on their way
 * meanwhile. Now and then the server is asked where others read (fetch_order.h), on the control connection;
 * nobody waits for the answer but at the beginning.
 */
#include "client/fetch.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "client/clock.h"
#include "client/fetch_order.h"
#include "client/loan.h"
#include "client/opened.h"
#include "client/part_private.h"
#include "client/saver.h"
#include "format/base/pages.h"

#define FETCHERS_PER_CONN 8u
#define BATCH_CHUNKS_MAX  64u
#define SLOT_BYTES        STAGING_SLOT_BYTES
#define THREADS_MAX       64u
#define AHEAD_BYTES       (2 * SLOT_BYTES) /* on their way on a connection, before more is asked for */
#define ASK_BYTES         (16u << 20)      /* taken, then the server is asked where others read */
#define ASK_FIRST_MS      1000u            /* so long its answer is waited for at the beginning */
#define SCANS_MAX         64u              /* looked at of its answer */

struct fetch;

struct way { /* a connection */
    struct conn *conn;
    uint64_t coming_bytes; /* asked for, and not there yet */
    pthread_cond_t clear;  /* less is */
};

struct fetcher {
    struct fetch *fetch;
    struct way *way;
    uint64_t coming_bytes; /* of the batch */
    struct loan slot;      /* SLOT_BYTES */
    pthread_cond_t decoded;
    size_t first; /* item; the batch is first, first + 1, ... */
    uint32_t count, given;
    uint32_t undecoded; /* under the lock: chunks of the batch given to decoders */
    uint32_t numbers[BATCH_CHUNKS_MAX];
};

struct ready { /* a chunk for the decoders */
    struct fetcher *from;
    size_t item;
    uint8_t *stored;
    uint32_t stored_bytes;
};

struct fetch {
    const struct fetch_job *job;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* for decoders: a chunk came, or a fetcher ended */
    struct way *ways;
    struct fetch_order order; /* of items that no fetcher has taken */
    bool asks;                /* where others read */
    bool asking;
    uint64_t unasked_bytes; /* taken since */
    struct call ask;
    pthread_cond_t answered;
    unsigned fetching; /* fetchers that are not done */
    struct ready *queue;
    size_t queue_cap, queue_at, queue_count;
    bool failed;
    struct err err;
};

/* With the lock held. */
static void fetch_fail(struct fetch *f, const struct err *e)
{
    if (!f->failed)
        f->err = *e;
    f->failed = true;
    pthread_cond_broadcast(&f->changed);
    for (unsigned i = 0; i < f->job->conn_count; i++)
        pthread_cond_broadcast(&f->ways[i].clear);
}

static const struct chunk_entry *entry_of(const struct fetch_item *i)
{
    uint32_t count;
    const struct chunk_entry *chunks = part_chunks(i->part, &count);
    check(i->chunk < count);
    return &chunks[i->chunk];
}

/* ---- taking ---- */

/* With the lock held: the next items of one part that fit into the buffer. False: nothing is left. */
static bool take_batch(struct fetch *f, struct fetcher *t)
{
    const struct fetch_job *job = f->job;
    size_t bytes = 0;
    t->count = t->given = 0;
    while (f->order.left > 0 && t->count < BATCH_CHUNKS_MAX) {
        size_t next = fetch_order_next(&f->order);
        const struct fetch_item *i = &job->items[next];
        size_t n = block_align(entry_of(i)->stored_bytes); /* chunks that are neighbours come with padding */
        if (t->count == 0)
            t->first = next;
        else if (next != t->first + t->count || i->part != job->items[t->first].part ||
                 bytes + n > SLOT_BYTES)
            break;
        bytes += n;
        t->numbers[t->count++] = i->chunk;
        fetch_order_take(&f->order);
    }
    f->unasked_bytes += bytes;
    t->coming_bytes = bytes;
    t->way->coming_bytes += bytes;
    return t->count > 0;
}

/* ---- asking where others read ---- */

static void take_scans(struct fetch *f, struct rcur *in)
{
    struct fetch_scan scans[SCANS_MAX];
    struct msg_read_scans_reply m;
    struct msg_read_range range;
    unsigned n = 0;
    if (msg_read_scans_reply_decode(in, &m, NULL) < 0)
        return;
    struct rcur ranges = rcur_of(m.ranges.p, m.ranges.n);
    for (; n < SCANS_MAX && ranges.left > 0 && msg_read_range_decode(&ranges, &range, NULL) == 0; n++)
        scans[n] = (struct fetch_scan){range.object, range.offset, range.offset + range.bytes};
    fetch_order_join(&f->order, scans, n);
}

/* On the connection's thread. An error says nothing: the order stays as it is. */
static void ask_done(struct call *call)
{
    struct fetch *f = container_of(call, struct fetch, ask);
    struct rcur in = rcur_of(call->payload, call->payload_bytes);
    pthread_mutex_lock(&f->lock);
    if (call->err.class == ERR_NONE)
        take_scans(f, &in);
    call_free(call);
    f->asking = false;
    pthread_cond_broadcast(&f->answered);
    pthread_mutex_unlock(&f->lock);
}

/* With the lock held. */
static void ask(struct fetch *f, bool joins)
{
    struct buf b = {0};
    struct msg_read_scans m = {.scope = f->job->items[0].part->run_id, .joins = joins};
    if (!f->asks || f->asking || f->order.left == 0)
        return;
    f->unasked_bytes = 0;
    msg_read_scans_encode(&m, &b);
    f->ask = (struct call){.opcode = OP_READ_SCANS, .done = ask_done};
    f->asking = !b.failed;
    if (f->asking)
        conn_submit(client_conn(f->job->client), &f->ask, SLICE(b.p, b.n), SLICE(NULL, 0));
    buf_free(&b);
}

static void ask_begin(struct fetch *f)
{
    struct conn_hello hello;
    uint64_t bytes = 0, until_ms = clock_ms() + ASK_FIRST_MS;
    conn_hello(client_conn(f->job->client), &hello);
    for (size_t i = 0; i < f->job->count && bytes < 4 * ASK_BYTES; i++)
        bytes += entry_of(&f->job->items[i])->stored_bytes;
    f->asks = f->job->class == PART_RESTORE && bytes >= 4 * ASK_BYTES &&
              (hello.features & 1ull << FEATURE_READ_SCANS);
    pthread_mutex_lock(&f->lock);
    ask(f, true);
    while (f->asking && clock_wait(&f->answered, &f->lock, until_ms))
        continue;
    pthread_mutex_unlock(&f->lock);
}

static void ask_end(struct fetch *f)
{
    pthread_mutex_lock(&f->lock);
    bool asking = f->asking;
    pthread_mutex_unlock(&f->lock);
    if (asking)
        conn_cancel(client_conn(f->job->client), &f->ask);
    pthread_mutex_lock(&f->lock);
    while (f->asking)
        pthread_cond_wait(&f->answered, &f->lock);
    pthread_mutex_unlock(&f->lock);
}

/* ---- fetching ---- */

/* With the lock held: so much less of the batch is coming. Who waits, waits for the border to be crossed. */
static void came(struct fetcher *t, uint64_t bytes)
{
    bool crowded = t->way->coming_bytes >= AHEAD_BYTES;
    t->coming_bytes -= bytes;
    t->way->coming_bytes -= bytes;
    if (crowded && t->way->coming_bytes < AHEAD_BYTES)
        pthread_cond_broadcast(&t->way->clear);
}

/* Likewise: waits until the connection will soon be idle. What is asked for early is asked for in vain if
 * meanwhile it shows that others read elsewhere. */
static void wait_turn(struct fetcher *t)
{
    while (!t->fetch->failed && t->way->coming_bytes >= AHEAD_BYTES)
        pthread_cond_wait(&t->way->clear, &t->fetch->lock);
}

/* On the connection's thread: the chunk is in the batch's buffer, and waits for a decoder. */
static int chunk_arrived(void *arg, uint32_t number, uint8_t *stored, size_t n, struct err *e)
{
    struct fetcher *t = arg;
    struct fetch *f = t->fetch;
    check(t->given < t->count && t->numbers[t->given] == number);
    if (f->job->fetched_bytes)
        atomic_fetch_add(f->job->fetched_bytes, n);
    pthread_mutex_lock(&f->lock);
    bool stop = f->failed;
    if (!stop) {
        check(f->queue_count < f->queue_cap);
        f->queue[(f->queue_at + f->queue_count++) % f->queue_cap] = (struct ready){
            .from = t, .item = t->first + t->given, .stored = stored, .stored_bytes = (uint32_t)n};
        t->given++;
        t->undecoded++;
        came(t, block_align(n));
        pthread_cond_signal(&f->changed);
    }
    pthread_mutex_unlock(&f->lock);
    return stop ? err_set(e, ERR_CANCELLED, "another chunk failed") : 0;
}

/* With the lock held: the slot is free again. */
static void await_decoded(struct fetch *f, struct fetcher *t)
{
    while (t->undecoded > 0)
        pthread_cond_wait(&t->decoded, &f->lock);
}

/* Does a failed read speak of the chunk's bytes (the disk cannot read them, they are not there)? */
static bool is_of_bytes(int rc)
{
    return rc == -EIO || rc == -EBADMSG;
}

/* What a batch failed to bring, each chunk for itself: bytes that cannot be read are damage of their chunk
 * alone. */
static int fetch_apart(struct fetch *f, struct fetcher *t, struct err *e)
{
    const struct fetch_job *job = f->job;
    int rc = 0;
    while (rc == 0 && t->given < t->count) {
        pthread_mutex_lock(&f->lock);
        await_decoded(f, t);
        pthread_mutex_unlock(&f->lock);
        size_t item = t->first + t->given;
        rc = part_fetch(job->items[item].part, t->way->conn, PART_AGAIN, &t->numbers[t->given], 1,
                        t->slot.memory, SLOT_BYTES, chunk_arrived, t, e);
        if (is_of_bytes(rc)) {
            e->class = ERR_CORRUPT;
            e->errnum = EBADMSG;
            rc = job->damaged(job->arg, item, e);
            t->given++;
        }
    }
    return rc;
}

static void *fetch_some(void *arg)
{
    struct fetcher *t = arg;
    struct fetch *f = t->fetch;
    pthread_mutex_lock(&f->lock);
    for (;;) {
        wait_turn(t);
        if (f->failed || !take_batch(f, t))
            break;
        if (f->unasked_bytes >= ASK_BYTES)
            ask(f, false);
        pthread_mutex_unlock(&f->lock);
        struct err e;
        int rc = part_fetch(f->job->items[t->first].part, t->way->conn, f->job->class, t->numbers, t->count,
                            t->slot.memory, SLOT_BYTES, chunk_arrived, t, &e);
        if (is_of_bytes(rc))
            rc = fetch_apart(f, t, &e);
        pthread_mutex_lock(&f->lock);
        came(t, t->coming_bytes);
        if (rc < 0)
            fetch_fail(f, &e);
        await_decoded(f, t);
    }
    f->fetching--;
    pthread_cond_broadcast(&f->changed);
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

/* ---- decoding ---- */

static int leave_there(void *arg, uint32_t number, uint8_t *stored, size_t n, struct err *e)
{
    (void)arg, (void)number, (void)stored, (void)n, (void)e;
    return 0;
}

int fetch_one(const struct part *p, struct conn *conn, struct part_scratch *s, uint32_t chunk, uint8_t *plain,
              struct err *e)
{
    uint8_t *stored = malloc(CHUNK_STORED_BYTES_MAX);
    if (!stored)
        return err_set(e, ERR_NO_MEMORY, "no memory for a chunk");
    int rc = part_fetch(p, conn, PART_AGAIN, &chunk, 1, stored, CHUNK_STORED_BYTES_MAX, leave_there, NULL, e);
    if (rc == 0)
        rc = part_decode(p, s, chunk, stored, plain, e);
    free(stored);
    return rc;
}

static int decode(struct fetch *f, struct part_scratch *s, const struct ready *r, uint8_t *plain,
                  struct err *e)
{
    const struct fetch_item *i = &f->job->items[r->item];
    int rc = part_decode_unsummed(i->part, s, i->chunk, r->stored, plain, e);
    if (rc != -EBADMSG)
        return rc;
    struct err again; /* damaged on the way, or by a bad read of a good disk? */
    int rc2 = fetch_one(i->part, r->from->way->conn, s, i->chunk, plain, &again);
    if (rc2 == -EIO)
        return rc; /* what was found first stands */
    if (rc2 < 0)
        *e = again;
    return rc2;
}

static void finish_chunk(struct fetch *f, const struct ready *r, uint8_t *plain, bool there, int rc,
                         struct err *e)
{
    const struct fetch_job *job = f->job;
    if (rc == 0) {
        rc = job->good(job->arg, r->item, plain, entry_of(&job->items[r->item])->plain_bytes, there, e);
    } else if (rc == -EBADMSG || rc == -EKEYREJECTED) {
        rc = job->damaged(job->arg, r->item, e);
    }
    pthread_mutex_lock(&f->lock);
    if (rc < 0)
        fetch_fail(f, e);
    if (--r->from->undecoded == 0)
        pthread_cond_signal(&r->from->decoded);
    pthread_mutex_unlock(&f->lock);
}

/* False: nothing more will come. */
static bool next_ready(struct fetch *f, struct ready *r)
{
    pthread_mutex_lock(&f->lock);
    while (f->queue_count == 0 && f->fetching > 0)
        pthread_cond_wait(&f->changed, &f->lock);
    bool some = f->queue_count > 0;
    if (some) {
        *r = f->queue[f->queue_at];
        f->queue_at = (f->queue_at + 1) % f->queue_cap;
        f->queue_count--;
    }
    pthread_mutex_unlock(&f->lock);
    return some;
}

static uint8_t *straight(const struct fetch_job *job, size_t item)
{
    return job->straight ? job->straight(job->arg, item, entry_of(&job->items[item])->plain_bytes) : NULL;
}

static void *decode_some(void *arg)
{
    struct fetch *f = arg;
    const struct fetch_job *job = f->job;
    struct part_scratch *s = part_scratch_create();
    uint8_t *own = job->room ? NULL : pages_alloc(CHUNK_PLAIN_BYTES_MAX);
    struct ready r;
    while (next_ready(f, &r)) {
        struct err e;
        err_clear(&e);
        uint8_t *to = straight(job, r.item);
        bool there = to, has_room = false;
        int rc = s && (to || own || job->room) ? 0 : err_set(&e, ERR_NO_MEMORY, "no memory for decoding");
        if (rc == 0 && !to && job->room) {
            rc = job->room(job->arg, &to, &e);
            has_room = rc == 0;
        }
        to = to ? to : own;
        if (rc == 0)
            rc = decode(f, s, &r, to, &e);
        finish_chunk(f, &r, to, there, rc, &e);
        if (has_room)
            job->done(job->arg, to);
    }
    free(own);
    part_scratch_free(s);
    return NULL;
}

/* ---- slots ---- */

static int fetchers_create(struct fetch *f, unsigned count, struct fetcher **out, struct err *e)
{
    struct fetcher *t = calloc(count, sizeof *t);
    *out = t;
    for (unsigned i = 0; t && i < count; i++) {
        t[i].fetch = f;
        t[i].way = &f->ways[i % f->job->conn_count];
        pthread_cond_init(&t[i].decoded, NULL);
        if (!loan_begin(f->job->client, SLOT_BYTES, &t[i].slot))
            return err_set(e, ERR_NO_MEMORY, "no memory for fetching; lower memory_bytes");
    }
    return t ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for fetching");
}

static void fetchers_free(struct fetch *f, struct fetcher *t, unsigned count)
{
    for (unsigned i = 0; t && i < count; i++) {
        if (!t[i].fetch)
            break;
        loan_end(f->job->client, &t[i].slot);
        pthread_cond_destroy(&t[i].decoded);
    }
    free(t);
}

/* ---- the whole ---- */

static int start(struct fetch *f, struct fetcher *fetchers, unsigned fetcher_count, pthread_t *threads,
                 unsigned *started, struct err *e)
{
    unsigned decoders = f->job->threads < THREADS_MAX ? f->job->threads : THREADS_MAX;
    for (unsigned i = 0; i < fetcher_count; i++) {
        f->fetching++;
        int rc = pthread_create(&threads[*started], NULL, fetch_some, &fetchers[i]);
        if (rc != 0) {
            f->fetching--;
            if (i == 0)
                return err_sys(e, rc, "starting a thread that fetches");
            break;
        }
        ++*started;
    }
    for (unsigned i = 1; i < decoders; i++) { /* the caller is one too */
        if (pthread_create(&threads[*started], NULL, decode_some, f) != 0)
            break;
        ++*started;
    }
    return 0;
}

static unsigned fetchers_wanted(const struct fetch_job *job)
{
    uint64_t n = job->memory_bytes / SLOT_BYTES, most = job->conn_count * FETCHERS_PER_CONN;
    n = n < most ? n : most;
    n = n < job->count ? n : job->count;
    return n < 1 ? 1 : n < THREADS_MAX ? (unsigned)n : THREADS_MAX;
}

static int fetch_create(struct fetch *f, unsigned fetcher_count, struct err *e)
{
    const struct fetch_job *job = f->job;
    f->queue_cap = (size_t)fetcher_count * BATCH_CHUNKS_MAX;
    f->queue = calloc(f->queue_cap, sizeof *f->queue);
    f->ways = calloc(job->conn_count, sizeof *f->ways);
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->changed, NULL);
    (void)clock_cond_init(&f->answered);
    for (unsigned i = 0; f->ways && i < job->conn_count; i++) {
        f->ways[i].conn = job->conns[i];
        pthread_cond_init(&f->ways[i].clear, NULL);
    }
    if (!f->queue || !f->ways || fetch_order_create(&f->order, job->items, job->count) < 0)
        return err_set(e, ERR_NO_MEMORY, "no memory for fetching");
    return 0;
}

static void fetch_free(struct fetch *f)
{
    fetch_order_free(&f->order);
    for (unsigned i = 0; f->ways && i < f->job->conn_count; i++)
        pthread_cond_destroy(&f->ways[i].clear);
    free(f->ways);
    free(f->queue);
    pthread_cond_destroy(&f->answered);
    pthread_cond_destroy(&f->changed);
    pthread_mutex_destroy(&f->lock);
}

int fetch_run(const struct fetch_job *job, struct err *e)
{
    if (job->count == 0)
        return 0;
    unsigned fetcher_count = fetchers_wanted(job), started = 0;
    struct fetch f = {.job = job};
    struct fetcher *fetchers = NULL;
    pthread_t threads[2 * THREADS_MAX];
    int rc = fetch_create(&f, fetcher_count, e);
    if (rc == 0)
        rc = fetchers_create(&f, fetcher_count, &fetchers, e);
    if (rc == 0) {
        ask_begin(&f);
        pthread_mutex_lock(&f.lock);
        rc = start(&f, fetchers, fetcher_count, threads, &started, e);
        pthread_mutex_unlock(&f.lock);
    }
    if (rc == 0)
        decode_some(&f);
    for (unsigned i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    ask_end(&f);
    if (rc == 0 && f.failed) {
        rc = -f.err.errnum;
        if (e)
            *e = f.err;
    }
    fetchers_free(&f, fetchers, fetcher_count);
    fetch_free(&f);
    return rc;
}
