/* SPDX-License-Identifier: Apache-2.0 */
/*
 * OP_READ: ranges of segments, through the loop's own backend, past the page cache; and of published shards
 * (published.c). OP_READ_SCANS: where others read. A segment's name is made from the tenant of the session's
 * certificate and from nothing else: that is the whole access check, and what is absent and what is another
 * tenant's look alike.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "format/base/hash.h"
#include "server/session/published.h"
#include "server/session/stream.h"

#define RANGE_BYTES 32u /* msg_read_range as encoded */

static struct msg_read_range next_range(struct rcur *in)
{
    struct msg_read_range range = {0};
    int r = msg_read_range_decode(in, &range, NULL);
    check(r == 0); /* counted and checked before */
    return range;
}

/* Leaves the next range that has bytes in the stream, or all_begun. */
static void load_range(struct stream *st)
{
    while (st->left_bytes == 0 && st->ranges.left > 0) {
        struct msg_read_range range = next_range(&st->ranges);
        st->object = range.object;
        st->offset = range.offset;
        st->left_bytes = range.bytes;
    }
    st->all_begun = st->left_bytes == 0;
}

int stream_ranges(struct stream *st, const struct msg_read *m, struct err *e)
{
    if (m->count > READ_RANGES_MAX)
        return err_set(e, ERR_LIMIT, "read: %u ranges, at most %u in one request", m->count, READ_RANGES_MAX);
    if (m->ranges.n != (size_t)m->count * RANGE_BYTES)
        return err_set(e, ERR_PROTOCOL, "read: %u ranges take %zu bytes, %zu were sent", m->count,
                       (size_t)m->count * RANGE_BYTES, m->ranges.n);
    struct rcur in = rcur_of(m->ranges.p, m->ranges.n);
    for (uint32_t i = 0; i < m->count; i++) {
        struct msg_read_range range = next_range(&in);
        uint64_t end;
        if (add_overflows(range.offset, range.bytes, &end) || end > SEGMENT_BYTES_MAX)
            return err_set(e, ERR_LIMIT,
                           "read: range %u, offset %" PRIu64 ", %" PRIu64 " bytes, ends beyond %llu", i,
                           range.offset, range.bytes, SEGMENT_BYTES_MAX);
    }
    st->scope = m->scope;
    st->ranges = rcur_of(m->ranges.p, m->ranges.n);
    load_range(st);
    return 0;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t border_behind(uint64_t offset)
{
    return (offset / PIECE_BYTES + 1) * PIECE_BYTES;
}

/* Adds up to max_bytes of the current range to the piece. */
static void add_part(struct stream *st, struct piece *p, uint64_t max_bytes)
{
    uint32_t skip = (uint32_t)(st->offset - p->offset);
    uint32_t bytes = (uint32_t)least(least(st->left_bytes, max_bytes), border_behind(p->offset) - st->offset);
    p->parts[p->part_count].skip = skip;
    p->parts[p->part_count].bytes = bytes;
    p->part_count++;
    p->send_bytes += bytes;
    p->extent_bytes = skip + bytes;
    st->offset += bytes;
    st->left_bytes -= bytes;
    if (st->left_bytes == 0)
        load_range(st);
}

/* Does the current range begin so close behind the piece that reading both at once is cheaper? */
static bool joins(const struct stream *st, const struct piece *p)
{
    return !st->all_begun && p->part_count < PIECE_PARTS_MAX && id_equal(&st->object, &p->object) &&
           st->offset >= p->offset + p->extent_bytes &&
           st->offset - (p->offset + p->extent_bytes) <= PIECE_GAP_BYTES &&
           st->offset < border_behind(p->offset);
}

void stream_next_ranges(struct stream *st, uint64_t max_bytes, struct piece *p)
{
    p->object = st->object;
    p->offset = st->offset;
    do
        add_part(st, p, max_bytes - p->send_bytes);
    while (p->send_bytes < max_bytes && joins(st, p));
}

/* Segments. */

static void segment_error(struct piece *p, struct err *e)
{
    char object[2 * ID_BYTES + 1], run[2 * ID_BYTES + 1];
    hex_encode(p->object.bytes, ID_BYTES, object);
    hex_encode(p->stream->scope.bytes, ID_BYTES, run);
    if (p->op.err.class == ERR_NOT_FOUND || p->op.result == -ENOENT)
        err_set(e, ERR_NOT_FOUND, "there is no segment %s in run %s (removed, never sealed, or not yours)",
                object, run);
    else if (p->op.err.class != ERR_NONE)
        *e = p->op.err;
    else
        err_sys(e, (int)-p->op.result, "reading segment %s at byte %" PRIu64, object, p->offset);
}

static void segment_ends(struct piece *p, uint64_t end)
{
    char object[2 * ID_BYTES + 1];
    hex_encode(p->object.bytes, ID_BYTES, object);
    err_set(&p->err, ERR_CORRUPT,
            "segment %s ends at byte %" PRIu64 ", but bytes %" PRIu64 " to %" PRIu64
            " were asked for; verify the checkpoint",
            object, end, p->offset, p->offset + p->extent_bytes);
}

static void segment_read_done(struct backend_op *op)
{
    struct piece *p = container_of(op, struct piece, op);
    if (op->result < 0)
        segment_error(p, &p->wait.extent->err);
    piece_read(p, op->result < 0 ? 0 : (uint32_t)op->result);
}

/* A run's segments; made of tenant and run, so that what is another tenant's is never found. */
static struct id segment_group(const struct session *s, const struct id *run)
{
    uint8_t name[TENANT_NAME_BYTES_MAX + ID_BYTES], digest[SHA256_BYTES];
    struct id group;
    size_t n = strlen(s->identity.tenant);
    memcpy(name, s->identity.tenant, n);
    memcpy(name + n, run->bytes, ID_BYTES);
    sha256(name, n + ID_BYTES, digest);
    memcpy(group.bytes, digest, ID_BYTES);
    return group;
}

static void segment_key(struct piece *p)
{
    const struct session *s = p->stream->r.s;
    char name[BACKEND_NAME_BYTES_MAX + 1];
    store_segment_name(s->identity.tenant, &p->stream->scope, &p->object, name);
    check(strlen(name) < sizeof p->path);
    strcpy(p->path, name);
    p->key = (struct extent_key){.group = segment_group(s, &p->stream->scope), .object = p->object};
}

static void segment_read(struct piece *p)
{
    struct extent *x = p->wait.extent;
    p->op.done = segment_read_done;
    backend_read(p->stream->r.s->w->backend, &p->op, p->path, true, x->begin, x->memory, x->room);
}

static void segment_end(struct stream *st)
{
    (void)st;
}

static const struct stream_source segment_source = {.next = stream_next_ranges,
                                                    .key = segment_key,
                                                    .read = segment_read,
                                                    .ends = segment_ends,
                                                    .end = segment_end,
                                                    .keep = true};

static unsigned read_class(const struct msg_read *m)
{
    return m->class & ~(READ_ANEW | READ_SCAN);
}

static int decode(const struct request *r, struct msg_read *m, struct err *e)
{
    struct rcur in = rcur_of(r->payload.p, r->payload.n);
    int bad = msg_read_decode(&in, m, e);
    if (bad < 0)
        return bad;
    bad = rcur_end(&in, "read", e);
    if (bad < 0)
        return bad;
    if (m->source != READ_SEGMENT && m->source != READ_PUBLISHED)
        return err_set(e, ERR_INVALID, "read: source %u is not known; 1 is segments, 2 is published",
                       m->source);
    if (read_class(m) != 1 && read_class(m) != 2)
        return err_set(e, ERR_INVALID,
                       "read: class %u is not known; 1 is restore, 2 is feed, with 128 added the bytes are "
                       "read anew, with 64 they are part of a scan",
                       m->class);
    if (r->s->lane && m->source != READ_SEGMENT)
        return err_set(e, ERR_INVALID, "read: a bulk lane carries sealed chunks only; ask for this over TLS");
    return 0;
}

void read_handle(struct session *s, const struct op_entry *op, struct frame *f)
{
    struct err e = {0};
    struct msg_read m;
    struct stream *st = stream_request(s, op, f);
    if (!st)
        return;
    if (decode(&st->r, &m, &e) < 0 || stream_ranges(st, &m, &e) < 0) {
        stream_fail(st, &e);
        return;
    }
    enum sched_class class = read_class(&m) == 1 ? CLASS_RESTORE : CLASS_FEED;
    st->fresh = m.class & READ_ANEW;
    st->scan = m.class & READ_SCAN;
    if (m.source == READ_PUBLISHED)
        published_read(st, class, m.credit);
    else
        stream_begin(st, &segment_source, class, true, m.credit);
}

/* OP_READ_SCANS */

static void answer_scans(struct session *s, uint64_t id, const struct msg_read_scans *m)
{
    struct extent_scan scans[EXTENT_SCANS_MAX];
    struct buf ranges = {0}, b = {0};
    const struct id group = segment_group(s, &m->scope);
    unsigned n = extents_scans(s->w->server->extents, &group, m->joins, loop_now_ms(s->w->loop), scans);
    for (unsigned i = 0; i < n; i++) {
        struct msg_read_range range = {
            .object = scans[i].object, .offset = scans[i].begin, .bytes = scans[i].end - scans[i].begin};
        msg_read_range_encode(&range, &ranges);
    }
    struct msg_read_scans_reply reply = {.count = n, .ranges = SLICE(ranges.p, ranges.n)};
    msg_read_scans_reply_encode(&reply, &b);
    if (ranges.failed || b.failed)
        s->broken = true;
    else
        session_send(s, OP_READ_SCANS, 0, id, SLICE(b.p, b.n), (struct slice){0});
    buf_free(&ranges);
    buf_free(&b);
}

void read_scans_handle(struct session *s, const struct op_entry *op, struct frame *f)
{
    struct err e = {0};
    struct msg_read_scans m;
    uint64_t id = f->header.request_id;
    struct rcur in = rcur_of(f->payload, f->header.payload_bytes);
    int bad = msg_read_scans_decode(&in, &m, &e);
    if (bad == 0)
        bad = rcur_end(&in, "read_scans", &e);
    if (bad == 0 && m.joins > 1)
        bad = err_set(&e, ERR_INVALID, "read_scans: joins is %u; it is 0 or 1", m.joins);
    channel_frame_done(s->channel);
    if (bad < 0)
        session_send_error(s, op->opcode, id, &e);
    else
        answer_scans(s, id, &m);
}
