/* SPDX-License-Identifier: Apache-2.0 */
#include "client/dataset_read.h"

#include <inttypes.h>
#include <string.h>

#include "client/dataset_wait.h"

/* One wire range from piece `first` on: as many pieces as touch each other. */
static uint32_t join_neighbours(const struct ranged_read *r, uint32_t first, struct msg_read_range *range)
{
    const struct read_piece *p = &r->pieces[first];
    uint64_t skip = first == r->next ? r->into_next : 0;
    *range =
        (struct msg_read_range){.object = p->object, .offset = p->offset + skip, .bytes = p->bytes - skip};
    uint32_t i = first + 1;
    for (; i < r->count; i++) {
        const struct read_piece *q = &r->pieces[i];
        if (!id_equal(&q->object, &range->object) || q->offset != range->offset + range->bytes)
            break;
        range->bytes += q->bytes;
    }
    return i;
}

static int request_encode(const struct ranged_read *r, struct buf *out, struct err *e)
{
    struct buf ranges = {0};
    uint64_t total = 0;
    uint32_t count = 0;
    for (uint32_t i = r->next; i < r->count;) {
        struct msg_read_range range;
        i = join_neighbours(r, i, &range);
        if (range.bytes == 0)
            continue;
        count++;
        total += range.bytes;
        msg_read_range_encode(&range, &ranges);
    }
    int rc = buf_end(&ranges, "ranges of a read", e);
    if (rc == 0) {
        /* Memory for every byte is there already, so all of them may be sent at once. */
        struct msg_read m = {.source = (uint8_t)r->source,
                             .class = r->past_lane ? 2 | READ_ANEW : 2,
                             .scope = r->scope,
                             .credit = total,
                             .count = count,
                             .ranges = SLICE(ranges.p, ranges.n)};
        msg_read_encode(&m, out);
        rc = buf_end(out, "read", e);
    }
    buf_free(&ranges);
    return rc;
}

/* Pieces without bytes come by themselves. */
static void pass_empty(struct ranged_read *r)
{
    while (r->next < r->count && r->into_next == r->pieces[r->next].bytes) {
        struct read_piece *p = &r->pieces[r->next];
        r->next++;
        r->into_next = 0;
        if (r->piece)
            r->piece(r, p);
    }
}

static uint8_t *place(struct call *call, size_t skip, size_t *n)
{
    struct ranged_read *r = container_of(call, struct ranged_read, call);
    uint64_t at = r->into_next + skip;
    uint32_t i = r->next;
    for (; i < r->count && at >= r->pieces[i].bytes; i++)
        at -= r->pieces[i].bytes;
    *n = 0;
    if (i == r->count)
        return NULL;
    const struct read_piece *p = &r->pieces[i];
    uint64_t head = p->bytes - p->tail_bytes;
    if (at >= head && p->tail_bytes > 0) {
        *n = (size_t)(p->bytes - at);
        return p->tail + (at - head);
    }
    *n = (size_t)(head - at);
    return p->into ? p->into + at : NULL;
}

static int came(struct call *call, size_t n, struct err *e)
{
    struct ranged_read *r = container_of(call, struct ranged_read, call);
    r->disk_ms += call->disk_ms;
    call->disk_ms = 0; /* a frame may come in several pieces */
    while (n > 0) {
        if (r->next == r->count)
            return err_set(e, ERR_PROTOCOL, "the server sent %zu bytes more than the read asked for", n);
        struct read_piece *p = &r->pieces[r->next];
        uint64_t want = p->bytes - r->into_next;
        size_t now = n < want ? n : (size_t)want;
        if (p->tag && r->some)
            r->some(r, p, r->into_next, now);
        r->into_next += now;
        n -= now;
        pass_empty(r);
    }
    return 0;
}

static void on_done(struct call *call)
{
    struct ranged_read *r = container_of(call, struct ranged_read, call);
    r->err = call->err;
    if (r->err.class == ERR_NONE)
        r->disk_ms += call->disk_ms;
    if (r->err.class == ERR_NONE && r->next < r->count)
        err_set(&r->err, ERR_PROTOCOL, "the server ended a read %" PRIu64 " bytes into range %u of %u",
                r->into_next, r->next + 1, r->count);
    call_free(call);
    r->done(r);
}

void ranged_read_submit(struct ranged_read *r)
{
    check(r->count > 0 && r->count <= READ_RANGES_MAX);
    err_clear(&r->err);
    pass_empty(r);
    struct buf message = {0};
    if (r->next == r->count || request_encode(r, &message, &r->err) < 0) {
        buf_free(&message);
        r->done(r);
        return;
    }
    bool sealed = r->source == READ_SEGMENT && !r->past_lane;
    r->call = (struct call){.opcode = OP_READ,
                            .sealed = sealed,
                            .timeout_ms = r->timeout_ms,
                            .place = place,
                            .came = came,
                            .done = on_done};
    conn_submit(r->conn, &r->call, SLICE(message.p, message.n), SLICE(NULL, 0));
    buf_free(&message);
}

bool ranged_read_retriable(const struct err *e)
{
    return e->class == ERR_NETWORK || e->class == ERR_BUSY || e->class == ERR_TIMEOUT ||
           e->class == ERR_CANCELLED;
}

/* A read and whoever waits for it. */
struct waited {
    struct ranged_read read;
    struct waiter waiter;
};

static void wake(struct ranged_read *r)
{
    waiter_wake(&container_of(r, struct waited, read)->waiter);
}

int ranged_read_wait(struct ranged_read *r, unsigned retry_ms, struct err *e)
{
    struct waited w = {.read = *r, .waiter = WAITER_INIT};
    const struct ranged_read *now = &w.read;
    w.read.done = wake;
    uint64_t last = clock_ms();
    for (unsigned pause_ms = 0;; pause_between(&pause_ms)) {
        uint32_t next = now->next;
        uint64_t into = now->into_next;
        ranged_read_submit(&w.read);
        waiter_wait(&w.waiter);
        if (now->err.class == ERR_NONE)
            break;
        if (now->next != next || now->into_next != into)
            last = clock_ms();
        if (!ranged_read_retriable(&now->err) || clock_ms() - last >= retry_ms)
            break;
    }
    waiter_free(&w.waiter);
    r->next = now->next;
    r->into_next = now->into_next;
    r->err = now->err;
    if (r->err.class == ERR_NONE)
        return 0;
    if (e)
        *e = r->err;
    return -r->err.errnum;
}
