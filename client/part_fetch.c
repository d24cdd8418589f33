/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading ranges of segments. A stream's bytes go straight to the sink's memory, one behind the other; after
 * a lost connection the same ranges are asked for again from the first byte that the sink has not taken, as
 * long as the connection comes back in time. There is memory for all that is asked for, so the server needs
 * no credit.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "client/clock.h"
#include "client/part_private.h"

/* ---- one OP_READ ---- */

/* Where a stream goes. On the connection's thread. */
struct sink {
    uint8_t *memory; /* of the next byte */
    uint64_t room;
    int (*come)(struct sink *s, struct err *e); /* more bytes are there, up to `memory`; may be NULL */
};

struct stream {
    struct call call;
    struct conn *conn;
    struct sink *sink;
    uint64_t expected, got; /* bytes of this request */
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool done;
};

static uint8_t *stream_place(struct call *call, size_t skip, size_t *n)
{
    struct stream *s = container_of(call, struct stream, call);
    uint64_t left = s->expected - s->got;
    left = left < s->sink->room ? left : s->sink->room;
    *n = skip < left ? (size_t)(left - skip) : 0;
    return *n > 0 ? s->sink->memory + skip : NULL;
}

static int stream_came(struct call *call, size_t n, struct err *e)
{
    struct stream *s = container_of(call, struct stream, call);
    struct sink *sink = s->sink;
    if (n > s->expected - s->got || n > sink->room)
        return err_set(e, ERR_PROTOCOL, "the server sent more than the %llu bytes asked for",
                       (unsigned long long)s->expected);
    s->got += n;
    sink->memory += n;
    sink->room -= n;
    return n > 0 && sink->come ? sink->come(sink, e) : 0;
}

static void stream_done(struct call *call)
{
    struct stream *s = container_of(call, struct stream, call);
    if (call->err.class == ERR_NONE && s->got != s->expected)
        err_set(&call->err, ERR_PROTOCOL, "the server ended a read after %llu of %llu bytes",
                (unsigned long long)s->got, (unsigned long long)s->expected);
    call_free(call);
    pthread_mutex_lock(&s->lock);
    s->done = true;
    pthread_cond_signal(&s->cond);
    pthread_mutex_unlock(&s->lock);
}

static void stream_run(struct stream *s, const struct buf *message)
{
    conn_submit(s->conn, &s->call, SLICE(message->p, message->n), SLICE(NULL, 0));
    pthread_mutex_lock(&s->lock);
    while (!s->done) /* the call has a deadline, which the connection keeps */
        pthread_cond_wait(&s->cond, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

static int read_once(struct conn *conn, bool sealed, bool scan, const struct id *run_id,
                     const struct id *segment, enum part_class class, const struct range *ranges,
                     uint32_t count, struct sink *sink, struct err *e)
{
    struct buf items = {0}, message = {0};
    struct stream s = {.conn = conn,
                       .sink = sink,
                       .call = {.opcode = OP_READ,
                                .sealed = sealed,
                                .place = stream_place,
                                .came = stream_came,
                                .done = stream_done},
                       .lock = PTHREAD_MUTEX_INITIALIZER,
                       .cond = PTHREAD_COND_INITIALIZER};
    for (uint32_t i = 0; i < count; i++) {
        struct msg_read_range r = {.object = *segment, .offset = ranges[i].offset, .bytes = ranges[i].bytes};
        msg_read_range_encode(&r, &items);
        s.expected += ranges[i].bytes;
    }
    struct msg_read m = {.source = READ_SEGMENT,
                         .class = (uint8_t)((class == PART_FEED ? 2 : 1) |
                                            (class == PART_VERIFY || class == PART_AGAIN ? READ_ANEW : 0) |
                                            (scan ? READ_SCAN : 0)),
                         .scope = *run_id,
                         .credit = UINT64_MAX >> 1,
                         .count = count,
                         .ranges = SLICE(items.p, items.n)};
    msg_read_encode(&m, &message);
    int rc = items.failed ? err_set(e, ERR_NO_MEMORY, "no memory for a read of %u ranges", count)
                          : buf_end(&message, "a read", e);
    if (rc == 0) {
        stream_run(&s, &message);
        rc = s.call.err.class == ERR_NONE ? 0 : -s.call.err.errnum;
        if (rc < 0 && e)
            *e = s.call.err;
    }
    buf_free(&items);
    buf_free(&message);
    pthread_cond_destroy(&s.cond);
    pthread_mutex_destroy(&s.lock);
    return rc;
}

/* ---- into memory ---- */

struct summed { /* what came is digested on the connection's thread */
    struct sink sink;
    struct sha256 *sum;
    const uint8_t *done;
};

static int sum_come(struct sink *sink, struct err *e)
{
    struct summed *s = container_of(sink, struct summed, sink);
    (void)e;
    sha256_update(s->sum, s->done, (size_t)(sink->memory - s->done));
    s->done = sink->memory;
    return 0;
}

static int read_summed(struct conn *conn, const struct id *run_id, const struct id *segment,
                       enum part_class class, const struct range *ranges, uint32_t count, uint8_t *out,
                       uint8_t *digest, struct err *e)
{
    struct summed s = {.sink = {.memory = out, .room = UINT64_MAX, .come = digest ? sum_come : NULL},
                       .sum = digest ? sha256_start() : NULL,
                       .done = out};
    if (digest && !s.sum)
        return err_set(e, ERR_NO_MEMORY, "no memory for a digest");
    int rc = read_once(conn, false, false, run_id, segment, class, ranges, count, &s.sink, e);
    if (digest)
        sha256_end(s.sum, digest);
    return rc;
}

int segment_read(struct conn *conn, const struct id *run_id, const struct id *segment, enum part_class class,
                 const struct range *ranges, uint32_t count, uint8_t *out, uint8_t *digest, struct err *e)
{
    uint64_t give_up = 0;
    for (;;) {
        int rc = read_summed(conn, run_id, segment, class, ranges, count, out, digest, e);
        uint64_t now = clock_ms();
        if (rc != -ECONNRESET || (give_up && now >= give_up))
            return rc;
        if (!give_up)
            give_up = now + conn_reconnect_ms(conn);
    }
}

/* ---- chunks ---- */

struct chunk_sink {
    struct sink sink;
    const struct part *part;
    const uint32_t *numbers;
    uint32_t count, next; /* the next chunk to be given */
    int (*chunk)(void *arg, uint32_t number, uint8_t *stored, size_t n, struct err *e);
    void *arg;
    uint8_t *at; /* where the next chunk begins */
};

static const struct chunk_entry *entry_at(const struct chunk_sink *s, uint32_t i)
{
    return &s->part->chunks[s->numbers[i]];
}

/* Gives chunks that store nothing, up to the next one that does. */
static int give_empty(struct chunk_sink *s, struct err *e)
{
    while (s->next < s->count && entry_at(s, s->next)->stored_bytes == 0) {
        int rc = s->chunk(s->arg, s->numbers[s->next], s->at, 0, e);
        if (rc < 0)
            return rc;
        s->next++;
    }
    return 0;
}

/* Does b follow a so closely that one range is cheaper than two? */
static bool is_neighbour(const struct chunk_entry *a, const struct chunk_entry *b)
{
    return b->offset == block_align(a->offset + a->stored_bytes);
}

/* Padding of b that is read in one range with a, which comes before it. */
static size_t padding_between(const struct chunk_entry *a, const struct chunk_entry *b)
{
    return is_neighbour(a, b) ? b->offset - (a->offset + a->stored_bytes) : 0;
}

static int chunks_come(struct sink *sink, struct err *e)
{
    struct chunk_sink *s = container_of(sink, struct chunk_sink, sink);
    int rc = 0;
    while (rc == 0 && s->next < s->count) {
        const struct chunk_entry *c = entry_at(s, s->next);
        if (sink->memory < s->at || (size_t)(sink->memory - s->at) < c->stored_bytes)
            return 0;
        rc = s->chunk(s->arg, s->numbers[s->next], s->at, c->stored_bytes, e);
        s->at += c->stored_bytes;
        s->next += rc == 0;
        if (rc == 0)
            rc = give_empty(s, e);
        if (rc == 0 && s->next < s->count)
            s->at += padding_between(c, entry_at(s, s->next));
    }
    return rc;
}

uint64_t part_fetch_bytes(const struct part *p, const uint32_t *numbers, uint32_t count)
{
    uint64_t n = 0;
    const struct chunk_entry *before = NULL;
    for (uint32_t i = 0; i < count; i++) {
        const struct chunk_entry *c = &p->chunks[numbers[i]];
        if (c->stored_bytes == 0)
            continue;
        n += (before ? padding_between(before, c) : 0) + c->stored_bytes;
        before = c;
    }
    return n;
}

/* Ranges of what is still to come, at most READ_RANGES_MAX; *upto: how many numbers they cover. */
static uint32_t plan_ranges(const struct chunk_sink *s, struct range *ranges, uint32_t *upto)
{
    uint32_t n = 0, i = s->next;
    const struct chunk_entry *before = NULL;
    for (; i < s->count; i++) {
        const struct chunk_entry *c = entry_at(s, i);
        if (c->stored_bytes == 0)
            continue;
        if (before && is_neighbour(before, c)) {
            ranges[n - 1].bytes = c->offset + c->stored_bytes - ranges[n - 1].offset;
        } else {
            if (n == READ_RANGES_MAX)
                break;
            ranges[n++] = (struct range){.offset = c->offset, .bytes = c->stored_bytes};
        }
        before = c;
    }
    *upto = i;
    return n;
}

static int fetch_all(struct chunk_sink *s, struct conn *conn, enum part_class class, uint8_t *end,
                     struct range *ranges, struct err *e)
{
    uint64_t give_up = 0;
    uint32_t all = s->count;
    int rc = give_empty(s, e);
    while (rc == 0 && s->next < all) {
        uint32_t before = s->next;
        s->sink.memory = s->at;
        s->sink.room = (uint64_t)(end - s->at);
        uint32_t n = plan_ranges(s, ranges, &s->count); /* the sink sees only what these ranges bring */
        rc = read_once(conn, class != PART_AGAIN, class == PART_RESTORE, &s->part->run_id,
                       &s->part->header.segment_id, class, ranges, n, &s->sink, e);
        s->count = all;
        if (rc == 0)
            rc = give_empty(s, e);
        uint64_t now = clock_ms();
        if (s->next > before)
            give_up = 0; /* progress: patience starts anew */
        if (rc == -ETIMEDOUT &&
            class != PART_AGAIN) { /* a request that is dropped on a lane is never answered */
            class = PART_AGAIN;
            rc = 0;
        }
        if (rc == -ECONNRESET && (!give_up || now < give_up)) {
            if (!give_up)
                give_up = now + conn_reconnect_ms(conn);
            rc = 0;
        }
    }
    return rc;
}

int part_fetch(const struct part *p, struct conn *conn, enum part_class class, const uint32_t *numbers,
               uint32_t count, uint8_t *memory, uint64_t memory_bytes,
               int (*chunk)(void *arg, uint32_t number, uint8_t *stored, size_t n, struct err *e), void *arg,
               struct err *e)
{
    for (uint32_t i = 0; i < count; i++)
        check(numbers[i] < p->chunk_count && (i == 0 || numbers[i] > numbers[i - 1]));
    check(part_fetch_bytes(p, numbers, count) <= memory_bytes);
    struct chunk_sink s = {.sink.come = chunks_come,
                           .part = p,
                           .numbers = numbers,
                           .count = count,
                           .chunk = chunk,
                           .arg = arg,
                           .at = memory};
    struct range *ranges = malloc(READ_RANGES_MAX * sizeof *ranges);
    int rc = ranges ? fetch_all(&s, conn, class, memory + memory_bytes, ranges, e)
                    : err_set(e, ERR_NO_MEMORY, "no memory for fetching chunks");
    free(ranges);
    return rc < 0 ? err_prepend(e, "reading part %u of %s", p->rank, p->run) : 0;
}
