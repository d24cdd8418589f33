/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading ranges of segments. A stream's bytes go to a sink as they come; after a lost connection the same
 * ranges are asked for again from the first byte that the sink has not taken, as long as the connection comes
 * back in time.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "client/clock.h"
#include "client/part_private.h"

/* ---- one OP_READ ---- */

/* Takes n bytes of the stream in order. On the connection's thread. */
typedef int sink_take(void *arg, const uint8_t *p, size_t n, struct err *e);

struct stream {
    struct call call;
    struct conn *conn;
    sink_take *take;
    void *arg;
    uint64_t expected, got; /* bytes of this request */
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool done;
};

static int stream_bytes(struct stream *s, const uint8_t *p, size_t n, struct err *e)
{
    if (n > s->expected - s->got)
        return err_set(e, ERR_PROTOCOL, "the server sent more than the %llu bytes asked for",
                       (unsigned long long)s->expected);
    s->got += n;
    return n > 0 ? s->take(s->arg, p, n, e) : 0;
}

static int stream_more(struct call *call, const uint8_t *payload, size_t n, struct err *e)
{
    struct stream *s = container_of(call, struct stream, call);
    int rc = stream_bytes(s, payload, n, e);
    if (rc == 0)
        conn_credit(s->conn, call, n);
    return rc;
}

static void stream_done(struct call *call)
{
    struct stream *s = container_of(call, struct stream, call);
    if (call->err.class == ERR_NONE) {
        struct err e;
        err_clear(&e);
        if (stream_bytes(s, call->payload, call->payload_bytes, &e) < 0)
            call->err = e;
        else if (s->got != s->expected)
            err_set(&call->err, ERR_PROTOCOL, "the server ended a read after %llu of %llu bytes",
                    (unsigned long long)s->got, (unsigned long long)s->expected);
    }
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

static int read_once(struct conn *conn, bool sealed, const struct id *run_id, const struct id *segment,
                     enum part_class class, const struct range *ranges, uint32_t count, uint64_t credit,
                     sink_take *take, void *arg, struct err *e)
{
    struct buf items = {0}, message = {0};
    struct stream s = {
        .conn = conn,
        .take = take,
        .arg = arg,
        .call = {.opcode = OP_READ, .sealed = sealed, .more = stream_more, .done = stream_done},
        .lock = PTHREAD_MUTEX_INITIALIZER,
        .cond = PTHREAD_COND_INITIALIZER};
    for (uint32_t i = 0; i < count; i++) {
        struct msg_read_range r = {.object = *segment, .offset = ranges[i].offset, .bytes = ranges[i].bytes};
        msg_read_range_encode(&r, &items);
        s.expected += ranges[i].bytes;
    }
    struct msg_read m = {.source = READ_SEGMENT,
                         .class = class == PART_FEED    ? 2
                                  : class == PART_AGAIN ? 1 | READ_ANEW
                                                        : 1,
                         .scope = *run_id,
                         .credit = credit,
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

struct memory_sink {
    uint8_t *out;
    uint64_t got;
};

static int memory_take(void *arg, const uint8_t *p, size_t n, struct err *e)
{
    (void)e;
    struct memory_sink *m = arg;
    memcpy(m->out + m->got, p, n);
    m->got += n;
    return 0;
}

int segment_read(struct conn *conn, const struct id *run_id, const struct id *segment,
                 const struct range *ranges, uint32_t count, uint8_t *out, struct err *e)
{
    uint64_t give_up = 0;
    for (;;) {
        struct memory_sink m = {.out = out};
        int rc = read_once(conn, false, run_id, segment, PART_RESTORE, ranges, count, UINT64_MAX >> 1,
                           memory_take, &m, e);
        uint64_t now = clock_ms();
        if (rc != -ECONNRESET || (give_up && now >= give_up))
            return rc;
        if (!give_up)
            give_up = now + conn_reconnect_ms(conn);
    }
}

/* ---- chunks ---- */

struct chunk_sink {
    const struct part *part;
    const uint32_t *numbers;
    uint32_t count, next; /* the next chunk to be given */
    int (*chunk)(void *arg, uint32_t number, uint8_t *stored, size_t n, struct err *e);
    void *arg;
    uint8_t *memory; /* the chunk being put together */
    size_t got;      /* bytes of it */
    size_t skip;     /* padding before it, not yet come */
};

static const struct chunk_entry *entry_at(const struct chunk_sink *s, uint32_t i)
{
    return &s->part->chunks[s->numbers[i]];
}

/* Gives chunks that store nothing, up to the next one that does. */
static int give_empty(struct chunk_sink *s, struct err *e)
{
    while (s->next < s->count && entry_at(s, s->next)->stored_bytes == 0) {
        int rc = s->chunk(s->arg, s->numbers[s->next], s->memory, 0, e);
        if (rc < 0)
            return rc;
        s->next++;
    }
    return 0;
}

/* Does chunk i + 1 (of those that store something) follow so closely that one range is cheaper than two? */
static bool is_neighbour(const struct chunk_entry *a, const struct chunk_entry *b)
{
    return b->offset == block_align(a->offset + a->stored_bytes);
}

/* Padding that comes before chunk `next` because it was read in one range with the chunk before. */
static size_t padding_before(const struct chunk_sink *s, uint32_t before)
{
    const struct chunk_entry *a = entry_at(s, before), *b = entry_at(s, s->next);
    return is_neighbour(a, b) ? b->offset - (a->offset + a->stored_bytes) : 0;
}

static int chunk_whole(struct chunk_sink *s, struct err *e)
{
    uint32_t just = s->next;
    int rc = s->chunk(s->arg, s->numbers[just], s->memory, s->got, e);
    if (rc < 0)
        return rc;
    s->got = 0;
    s->next++;
    rc = give_empty(s, e);
    if (rc == 0 && s->next < s->count)
        s->skip = padding_before(s, just);
    return rc;
}

static int chunk_take(void *arg, const uint8_t *p, size_t n, struct err *e)
{
    struct chunk_sink *s = arg;
    while (n > 0) {
        size_t skipped = s->skip < n ? s->skip : n;
        s->skip -= skipped;
        p += skipped;
        n -= skipped;
        if (n == 0)
            break;
        if (s->next == s->count)
            return err_set(e, ERR_PROTOCOL, "the server sent %zu bytes behind the last chunk asked for", n);
        size_t left = entry_at(s, s->next)->stored_bytes - s->got, take = n < left ? n : left;
        memcpy(s->memory + s->got, p, take);
        s->got += take;
        p += take;
        n -= take;
        if (take == left) {
            int rc = chunk_whole(s, e);
            if (rc < 0)
                return rc;
        }
    }
    return 0;
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

static int fetch_all(struct chunk_sink *s, struct conn *conn, enum part_class class, uint64_t window_bytes,
                     struct range *ranges, struct err *e)
{
    uint64_t give_up = 0;
    uint32_t all = s->count;
    int rc = give_empty(s, e);
    while (rc == 0 && s->next < all) {
        uint32_t before = s->next;
        s->got = s->skip = 0;
        uint32_t n = plan_ranges(s, ranges, &s->count); /* the sink sees only what these ranges bring */
        rc = read_once(conn, class != PART_AGAIN, &s->part->run_id, &s->part->header.segment_id, class,
                       ranges, n, window_bytes, chunk_take, s, e);
        s->count = all;
        if (rc == 0)
            rc = give_empty(s, e);
        uint64_t now = clock_ms();
        if (s->next > before)
            give_up = 0; /* progress: patience starts anew */
        if (rc == -ECONNRESET && (!give_up || now < give_up)) {
            if (!give_up)
                give_up = now + conn_reconnect_ms(conn);
            rc = 0;
        }
    }
    return rc;
}

int part_fetch(const struct part *p, struct conn *conn, enum part_class class, const uint32_t *numbers,
               uint32_t count, uint64_t window_bytes,
               int (*chunk)(void *arg, uint32_t number, uint8_t *stored, size_t n, struct err *e), void *arg,
               struct err *e)
{
    for (uint32_t i = 0; i < count; i++)
        check(numbers[i] < p->chunk_count && (i == 0 || numbers[i] > numbers[i - 1]));
    struct chunk_sink s = {.part = p, .numbers = numbers, .count = count, .chunk = chunk, .arg = arg};
    struct range *ranges = malloc(READ_RANGES_MAX * sizeof *ranges);
    s.memory = aligned_alloc(64, (CHUNK_STORED_BYTES_MAX + 63) / 64 * 64);
    int rc = ranges && s.memory ? fetch_all(&s, conn, class, window_bytes, ranges, e)
                                : err_set(e, ERR_NO_MEMORY, "no memory for fetching chunks");
    free(ranges);
    free(s.memory);
    return rc < 0 ? err_prepend(e, "reading part %u of %s", p->rank, p->run) : 0;
}
