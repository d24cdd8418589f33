/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/shelf.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "client/clock.h"
#include "client/opened.h"
#include "client/secrets.h"
#include "format/channel.h"
#include "format/commit.h"
#include "format/index.h"
#include "format/keys.h"

#define LINKS_MAX   24
#define FRAME_BYTES 65536u

struct segment {
    struct list link;
    struct segment_header header;
    struct buf bytes; /* the file, as far as it has come */
    struct buf index;
    struct buf received; /* chunk numbers */
    bool sealed;
};

struct member {
    struct msg_join m;
    bool joined;
    int link; /* whose answer is awaited; -1: nobody's */
    struct frame_header header;
};

struct record {
    struct list link;
    uint8_t kind;
    char name[NAME_BYTES_MAX + 1];
    struct id run_id;
    struct buf envelopes;
    struct buf commits[16]; /* by sequence - 1 */
    uint64_t sequence;
    struct id attempt;
    struct member *members; /* of the version being joined */
    uint32_t world, joined;
    bool durable;
};

struct shelf {
    struct shelf_options o;
    pthread_t thread;
    int listener, wake, port;
    struct {
        int fd;
        struct channel *channel;
        bool opened; /* knows the published version */
        bool cut;
    } links[LINKS_MAX];
    struct list segments, records;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t changed;
    bool stop, want_down, down;
    atomic_ullong cut_every, since_cut, bytes_read;
    atomic_uint reads, cuts, held, disk_ms;
};

/* ---- answering ---- */

static void answer(struct shelf *s, int l, const struct frame_header *h, uint32_t flags, struct buf *message)
{
    struct frame_header a = {
        .opcode = h->opcode, .flags = FRAME_RESPONSE | flags, .request_id = h->request_id};
    if (h->opcode == OP_READ && flags == 0)
        a.deadline_ms = atomic_load(&s->disk_ms);
    struct err e;
    check(!message || !message->failed);
    int rc = channel_send(s->links[l].channel, &a, message ? SLICE(message->p, message->n) : SLICE(NULL, 0),
                          SLICE(NULL, 0), &e);
    check(rc == 0);
    if (message)
        buf_free(message);
}

static void refuse(struct shelf *s, int l, const struct frame_header *h, enum err_class class,
                   const char *text)
{
    struct err e;
    struct buf b = {0};
    err_set(&e, class, "%s", text);
    msg_of_err(&e, &b);
    answer(s, l, h, FRAME_ERROR, &b);
}

static bool flush(struct shelf *s, int l)
{
    struct channel *c = s->links[l].channel;
    struct slice out = channel_output(c);
    while (out.n > 0) {
        ssize_t n = send(s->links[l].fd, out.p, out.n, MSG_NOSIGNAL);
        if (n <= 0)
            return false;
        channel_output_done(c, (size_t)n);
        out = channel_output(c);
    }
    return true;
}

/* ---- finding ---- */

static struct segment *segment_find(struct shelf *s, const struct id *id)
{
    list_for_each (it, &s->segments) {
        struct segment *g = container_of(it, struct segment, link);
        if (id_equal(&g->header.segment_id, id))
            return g;
    }
    return NULL;
}

static struct record *record_find(struct shelf *s, uint8_t kind, struct slice name)
{
    list_for_each (it, &s->records) {
        struct record *r = container_of(it, struct record, link);
        if (r->kind == kind && slice_eq(name, slice_str(r->name)))
            return r;
    }
    return NULL;
}

static struct record *record_of(struct shelf *s, const struct id *run_id)
{
    list_for_each (it, &s->records) {
        struct record *r = container_of(it, struct record, link);
        if (id_equal(&r->run_id, run_id))
            return r;
    }
    return NULL;
}

/* ---- runs ---- */

#define DECODE(name, m, in)                         \
    struct msg_##name m;                            \
    do {                                            \
        struct err de;                              \
        int drc = msg_##name##_decode(in, &m, &de); \
        check(drc == 0);                            \
    } while (0)

static void on_hello(struct shelf *s, int l, const struct frame_header *h)
{
    struct buf b = {0};
    struct msg_hello_reply m = {.features = FEATURES_KNOWN,
                                .software = slice_str("shelf 1"),
                                .tenant = slice_str("acme"),
                                .role = ROLE_WRITER,
                                .server_time_ns = 17};
    msg_hello_reply_encode(&m, &b);
    answer(s, l, h, 0, &b);
    channel_allow_large(s->links[l].channel);
}

static void on_run_open(struct shelf *s, int l, const struct frame_header *h, struct rcur *in)
{
    DECODE(run_open, m, in);
    struct record *r = record_find(s, m.kind, m.name);
    if (!r && !m.create) {
        refuse(s, l, h, ERR_NOT_FOUND, "no such run");
        return;
    }
    bool created = !r;
    if (!r) {
        r = calloc(1, sizeof *r);
        r->kind = m.kind;
        r->run_id = m.run_id;
        check(slice_cstr(m.name, r->name, sizeof r->name));
        list_add_tail(&s->records, &r->link);
    }
    struct msg_run_open_reply reply = {.run_id = r->run_id,
                                       .created = created,
                                       .latest_sequence = r->sequence,
                                       .envelopes = SLICE(r->envelopes.p, r->envelopes.n)};
    struct buf b = {0};
    msg_run_open_reply_encode(&reply, &b);
    answer(s, l, h, 0, &b);
}

static void on_envelope_put(struct shelf *s, int l, const struct frame_header *h, struct rcur *in)
{
    DECODE(envelope_put, m, in);
    buf_put(&record_of(s, &m.run_id)->envelopes, m.envelope.p, m.envelope.n);
    answer(s, l, h, 0, NULL);
}

static void on_attempt(struct shelf *s, int l, const struct frame_header *h, struct rcur *in)
{
    DECODE(attempt, m, in);
    struct record *r = record_of(s, &m.run_id);
    r->attempt = m.attempt;
    free(r->members);
    r->members = calloc(m.world, sizeof *r->members);
    r->world = m.world;
    r->joined = 0;
    r->durable = false;
    struct buf b = {0};
    msg_attempt_reply_encode(&(struct msg_attempt_reply){.number = 1}, &b);
    answer(s, l, h, 0, &b);
}

static void on_commit_get(struct shelf *s, int l, const struct frame_header *h, struct rcur *in)
{
    DECODE(commit_get, m, in);
    struct record *r = record_find(s, m.kind, m.name);
    uint64_t sequence = m.select == SELECT_SEQUENCE ? m.value : r ? r->sequence : 0;
    if (!r || sequence == 0 || sequence > r->sequence) {
        refuse(s, l, h, ERR_NOT_FOUND, "no such commit");
        return;
    }
    const struct buf *c = &r->commits[sequence - 1];
    struct msg_commit_get_reply reply = {.state = COMMIT_GOOD, .record = SLICE(c->p, c->n)};
    struct buf b = {0};
    msg_commit_get_reply_encode(&reply, &b);
    answer(s, l, h, 0, &b);
}

/* ---- segments ---- */

static void put_at(struct buf *b, uint64_t offset, const void *p, size_t n)
{
    if (b->n < offset + n)
        buf_zeros(b, offset + n - b->n);
    check(!b->failed);
    memcpy(b->p + offset, p, n);
}

static void on_segment_create(struct shelf *s, int l, const struct frame_header *h, struct rcur *in)
{
    DECODE(segment_create, m, in);
    struct segment_header header;
    struct err e;
    int rc = segment_header_decode(m.header.p, &header, &e);
    check(rc == 0 && m.header.n == BLOCK_BYTES);
    struct segment *g = segment_find(s, &header.segment_id);
    if (!g) {
        g = calloc(1, sizeof *g);
        g->header = header;
        put_at(&g->bytes, 0, m.header.p, m.header.n);
        list_add_tail(&s->segments, &g->link);
        atomic_fetch_add(&s->held, 1);
    }
    struct buf b = {0};
    msg_segment_create_reply_encode(
        &(struct msg_segment_create_reply){.sealed = g->sealed,
                                           .chunks_received = SLICE(g->received.p, g->received.n)},
        &b);
    answer(s, l, h, 0, &b);
}

static void on_segment_chunk(struct shelf *s, int l, const struct frame_header *h, struct rcur *in)
{
    DECODE(segment_chunk, m, in);
    struct segment *g = segment_find(s, &m.segment);
    struct chunk_entry entry;
    struct err e;
    int rc = chunk_entry_decode(m.entry.bytes, m.number, &entry, &e);
    check(rc == 0);
    if (!g) {
        refuse(s, l, h, ERR_NOT_FOUND, "no such segment");
        return;
    }
    if (entry.stored_bytes)
        put_at(&g->bytes, entry.offset, in->p, in->left);
    buf_u32(&g->received, m.number);
    answer(s, l, h, 0, NULL);
}

static void on_segment_index(struct shelf *s, int l, const struct frame_header *h, struct rcur *in)
{
    DECODE(segment_index, m, in);
    put_at(&segment_find(s, &m.segment)->index, m.offset, in->p, in->left);
    answer(s, l, h, 0, NULL);
}

static void on_segment_seal(struct shelf *s, int l, const struct frame_header *h, struct rcur *in)
{
    DECODE(segment_seal, m, in);
    struct segment *g = segment_find(s, &m.segment);
    struct segment_trailer t;
    struct err e;
    int rc = segment_trailer_decode(m.trailer.p, &t, &e);
    check(rc == 0);
    put_at(&g->bytes, t.index_offset, g->index.p, g->index.n);
    put_at(&g->bytes, t.file_bytes - BLOCK_BYTES, m.trailer.p, BLOCK_BYTES);
    g->sealed = true;
    answer(s, l, h, 0, NULL);
}

static void segment_free(struct shelf *s, struct segment *g)
{
    list_del(&g->link);
    buf_free(&g->bytes);
    buf_free(&g->index);
    buf_free(&g->received);
    free(g);
    atomic_fetch_sub(&s->held, 1);
}

static void on_segment_discard(struct shelf *s, int l, const struct frame_header *h, struct rcur *in)
{
    DECODE(segment_discard, m, in);
    struct segment *g = segment_find(s, &m.segment);
    if (g)
        segment_free(s, g);
    answer(s, l, h, 0, NULL);
}

/* ---- joining ---- */

static void tell_durable(struct shelf *s, struct record *r)
{
    for (uint32_t i = 0; i < r->world; i++) {
        struct member *w = &r->members[i];
        if (w->link < 0 || !w->joined)
            continue;
        struct buf b = {0};
        msg_join_reply_encode(&(struct msg_join_reply){.state = JOIN_DURABLE, .sequence = r->sequence}, &b);
        answer(s, w->link, &w->header, 0, &b);
        w->link = -1;
    }
}

static void ask_check(struct shelf *s, struct record *r, struct member *w)
{
    struct buf parts = {0}, b = {0};
    for (uint32_t i = 0; i < r->world; i++) {
        const struct msg_join *m = &r->members[i].m;
        struct msg_join_part p = {.rank = i,
                                  .segment = m->segment,
                                  .segment_bytes = m->segment_bytes,
                                  .index_digest = m->index_digest};
        msg_join_part_encode(&p, &parts);
    }
    msg_join_reply_encode(&(struct msg_join_reply){.state = JOIN_CHECK, .parts = SLICE(parts.p, parts.n)},
                          &b);
    answer(s, w->link, &w->header, 0, &b);
    w->link = -1;
    buf_free(&parts);
}

static void on_join(struct shelf *s, int l, const struct frame_header *h, struct rcur *in)
{
    DECODE(join, m, in);
    struct record *r = record_of(s, &m.run_id);
    struct member *w = &r->members[m.rank];
    bool complete = r->joined == r->world;
    r->joined += !w->joined;
    *w = (struct member){.m = m, .joined = true, .link = l, .header = *h};
    w->m.labels = w->m.loader = (struct slice){0}; /* of the frame */
    if (r->durable)
        tell_durable(s, r);
    else if (r->joined == r->world && !complete)
        ask_check(s, r, w);
}

static void on_commit(struct shelf *s, int l, const struct frame_header *h, struct rcur *in)
{
    DECODE(commit, m, in);
    struct record *r = record_of(s, &m.run_id);
    struct commit_part *parts = calloc(r->world, sizeof *parts);
    struct commit c = {.kind = (enum run_kind)r->kind,
                       .run_id = r->run_id,
                       .run = slice_str(r->name),
                       .step = m.step,
                       .sequence = r->sequence + 1,
                       .attempt = m.attempt,
                       .attempt_number = 1,
                       .world = r->world,
                       .parts = parts};
    for (uint32_t i = 0; i < r->world; i++) {
        const struct msg_join *j = &r->members[i].m;
        parts[i] = (struct commit_part){.rank = i, .segment = j->segment, .segment_bytes = j->segment_bytes};
        memcpy(parts[i].index_digest, j->index_digest.bytes, SHA256_BYTES);
    }
    struct err e;
    check(m.verdict == 0 && r->sequence < 16);
    int rc = commit_encode(&c, &r->commits[r->sequence++], &e);
    check(rc == 0);
    free(parts);
    r->durable = true;
    struct buf b = {0};
    msg_commit_reply_encode(&(struct msg_commit_reply){.sequence = r->sequence}, &b);
    answer(s, l, h, 0, &b);
    tell_durable(s, r);
}

static void on_cancel(struct shelf *s, int l, struct rcur *in)
{
    DECODE(cancel, m, in);
    list_for_each (it, &s->records) {
        struct record *r = container_of(it, struct record, link);
        for (uint32_t i = 0; i < r->world; i++) {
            struct member *w = &r->members[i];
            if (w->joined && w->link == l && w->header.request_id == m.request_id)
                w->link = -1;
        }
    }
}

/* ---- reading ---- */

static const struct id published_version = {{9, 8, 7, 6, 5, 4, 3, 2, 1}};

static void on_published_open(struct shelf *s, int l, const struct frame_header *h, struct rcur *in)
{
    DECODE(published_open, m, in);
    if (!s->o.published || !slice_eq(m.name, slice_str(s->o.published))) {
        refuse(s, l, h, ERR_NOT_FOUND, "no such published directory");
        return;
    }
    struct buf shards = {0}, b = {0};
    for (uint32_t i = 0; i < s->o.file_count; i++)
        msg_published_shard_encode(
            &(struct msg_published_shard){.name = slice_str(s->o.files[i].name), .bytes = s->o.files[i].n},
            &shards);
    struct msg_published_open_reply reply = {.version = published_version,
                                             .format = (uint8_t)s->o.format,
                                             .record_bytes = s->o.record_bytes,
                                             .count = s->o.file_count,
                                             .shards = SLICE(shards.p, shards.n)};
    msg_published_open_reply_encode(&reply, &b);
    s->links[l].opened = true;
    answer(s, l, h, 0, &b);
    buf_free(&shards);
}

static void stream(struct shelf *s, int l, const struct frame_header *h, const struct buf *bytes)
{
    for (size_t at = 0; !s->links[l].cut;) {
        size_t n = bytes->n - at < FRAME_BYTES ? bytes->n - at : FRAME_BYTES;
        uint64_t every = atomic_load(&s->cut_every);
        if (every && atomic_load(&s->since_cut) + n > every) {
            n = (size_t)(every - atomic_load(&s->since_cut));
            s->links[l].cut = true;
            atomic_store(&s->since_cut, 0);
            atomic_fetch_add(&s->cuts, 1);
        }
        struct buf b = {0};
        buf_put(&b, bytes->p + at, n);
        at += n;
        atomic_fetch_add(&s->since_cut, n);
        atomic_fetch_add(&s->bytes_read, n);
        bool last = at == bytes->n && !s->links[l].cut;
        answer(s, l, h, last ? 0 : FRAME_MORE, &b);
        if (!flush(s, l))
            s->links[l].cut = true;
        if (last)
            break;
    }
}

static void on_published_samples(struct shelf *s, int l, const struct frame_header *h, struct rcur *in)
{
    DECODE(published_samples, m, in);
    if (!s->links[l].opened) {
        refuse(s, l, h, ERR_NOT_FOUND, "no such version is open");
        return;
    }
    const struct shelf_file *f = &s->o.files[m.shard];
    struct samples_builder *b = NULL;
    struct samples *samples = NULL;
    struct buf out = {0};
    struct err e;
    struct samples_source source = {
        .format = s->o.format, .shard = f->name, .shard_bytes = f->n, .record_bytes = s->o.record_bytes};
    int rc = samples_builder_create(&source, &b, &e);
    if (rc == 0)
        rc = samples_builder_push(b, f->p, f->n, &e);
    if (rc == 0)
        rc = samples_builder_finish(b, &samples, &e);
    if (rc == 0)
        rc = samples_encode(samples, &out, &e);
    if (rc == 0)
        stream(s, l, h, &out);
    else
        refuse(s, l, h, e.class, e.text);
    buf_free(&out);
    samples_free(samples);
    samples_builder_free(b);
}

/* One range, through the test's hook. */
static enum err_class read_range(struct shelf *s, bool published, const struct msg_read_range *r,
                                 struct buf *out)
{
    uint32_t shard = le32_get(r->object.bytes);
    const uint8_t *p;
    size_t n;
    if (published) {
        if (shard >= s->o.file_count)
            return ERR_NOT_FOUND;
        p = s->o.files[shard].p;
        n = s->o.files[shard].n;
    } else {
        struct segment *g = segment_find(s, &r->object);
        if (!g || !g->sealed)
            return ERR_NOT_FOUND;
        p = g->bytes.p;
        n = g->bytes.n;
        shard = g->header.rank;
    }
    if (r->bytes == 0 || r->offset > n || r->bytes > n - r->offset)
        return ERR_INVALID;
    size_t at = out->n;
    buf_put(out, p + r->offset, r->bytes);
    return s->o.reading ? s->o.reading(s->o.arg, published, shard, r->offset, out->p + at, r->bytes)
                        : ERR_NONE;
}

static void on_read(struct shelf *s, int l, const struct frame_header *h, struct rcur *in)
{
    DECODE(read, m, in);
    bool published = m.source == READ_PUBLISHED;
    struct buf out = {0};
    struct rcur ranges = rcur_of(m.ranges.p, m.ranges.n);
    enum err_class class = published && !s->links[l].opened ? ERR_NOT_FOUND : ERR_NONE;
    atomic_fetch_add(&s->reads, 1);
    for (uint32_t i = 0; class == ERR_NONE && i < m.count; i++) {
        DECODE(read_range, r, &ranges);
        class = read_range(s, published, &r, &out);
    }
    if (class == ERR_NONE)
        stream(s, l, h, &out);
    else
        refuse(s, l, h, class, "the shelf was told to fail this read");
    buf_free(&out);
}

/* ---- the thread ---- */

static void dispatch(struct shelf *s, int l, const struct frame *f)
{
    const struct frame_header *h = &f->header;
    struct rcur in = rcur_of(f->payload, h->payload_bytes);
    switch (h->opcode) {
    case OP_HELLO: on_hello(s, l, h); break;
    case OP_RUN_OPEN: on_run_open(s, l, h, &in); break;
    case OP_ENVELOPE_PUT: on_envelope_put(s, l, h, &in); break;
    case OP_ATTEMPT: on_attempt(s, l, h, &in); break;
    case OP_COMMIT_GET: on_commit_get(s, l, h, &in); break;
    case OP_SEGMENT_CREATE: on_segment_create(s, l, h, &in); break;
    case OP_SEGMENT_CHUNK: on_segment_chunk(s, l, h, &in); break;
    case OP_SEGMENT_INDEX: on_segment_index(s, l, h, &in); break;
    case OP_SEGMENT_SEAL: on_segment_seal(s, l, h, &in); break;
    case OP_SEGMENT_DISCARD: on_segment_discard(s, l, h, &in); break;
    case OP_JOIN: on_join(s, l, h, &in); break;
    case OP_COMMIT: on_commit(s, l, h, &in); break;
    case OP_CANCEL: on_cancel(s, l, &in); break;
    case OP_PUBLISHED_OPEN: on_published_open(s, l, h, &in); break;
    case OP_PUBLISHED_SAMPLES: on_published_samples(s, l, h, &in); break;
    case OP_READ: on_read(s, l, h, &in); break;
    case OP_CREDIT: break;
    default: answer(s, l, h, 0, NULL);
    }
}

/* False: the connection is over. */
static bool take_input(struct shelf *s, int l)
{
    static uint8_t bytes[FRAME_BYTES];
    struct channel *c = s->links[l].channel;
    struct err e;
    ssize_t n = recv(s->links[l].fd, bytes, sizeof bytes, 0);
    if (n <= 0 || channel_input(c, bytes, (size_t)n, &e) < 0)
        return false;
    struct frame f;
    while (channel_frame(c, &f, &e) > 0) {
        dispatch(s, l, &f);
        channel_frame_done(c);
        for (int i = 0; i < LINKS_MAX; i++)
            if (s->links[i].fd >= 0 && !flush(s, i))
                s->links[i].cut = true;
        if (s->links[l].cut)
            return false;
    }
    return true;
}

static void hang_up(struct shelf *s, int l)
{
    if (s->links[l].fd < 0)
        return;
    list_for_each (it, &s->records) {
        struct record *r = container_of(it, struct record, link);
        for (uint32_t i = 0; r->members && i < r->world; i++)
            if (r->members[i].link == l)
                r->members[i].link = -1;
    }
    channel_free(s->links[l].channel);
    close(s->links[l].fd);
    s->links[l].fd = -1;
}

static void take_link(struct shelf *s)
{
    struct identity peer = {.tenant = "acme", .role = ROLE_WRITER};
    int l = 0, fd = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC);
    while (l < LINKS_MAX && s->links[l].fd >= 0)
        l++;
    int one = 1;
    check(fd >= 0 && l < LINKS_MAX && setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
    s->links[l].fd = fd;
    s->links[l].opened = s->links[l].cut = false;
    int rc = channel_create_clear(true, &peer, &s->links[l].channel);
    check(rc == 0);
}

static int listen_on(int port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)port)};
    check(fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
    check(bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 64) == 0);
    return fd;
}

/* With the lock held. */
static void follow_orders(struct shelf *s)
{
    if (s->want_down && !s->down) {
        for (int l = 0; l < LINKS_MAX; l++)
            hang_up(s, l);
        close(s->listener);
        s->listener = -1;
    } else if (!s->want_down && s->down) {
        s->listener = listen_on(s->port);
    }
    s->down = s->want_down;
    pthread_cond_broadcast(&s->changed);
}

static void *run(void *arg)
{
    struct shelf *s = arg;
    for (;;) {
        struct pollfd p[LINKS_MAX + 2] = {{.fd = s->wake, .events = POLLIN},
                                          {.fd = s->listener, .events = POLLIN}};
        for (int l = 0; l < LINKS_MAX; l++)
            p[l + 2] = (struct pollfd){.fd = s->links[l].fd, .events = POLLIN};
        if (poll(p, LINKS_MAX + 2, -1) < 0)
            continue;
        for (int l = 0; l < LINKS_MAX; l++)
            if (p[l + 2].revents && s->links[l].fd >= 0 && !take_input(s, l))
                hang_up(s, l);
        if (p[1].revents & POLLIN)
            take_link(s);
        if (p[0].revents) {
            uint64_t n;
            ssize_t got = read(s->wake, &n, sizeof n);
            check(got == sizeof n);
            pthread_mutex_lock(&s->lock);
            follow_orders(s);
            bool stop = s->stop;
            pthread_mutex_unlock(&s->lock);
            if (stop)
                return NULL;
        }
    }
}

struct shelf *shelf_start(const struct shelf_options *o)
{
    struct shelf *s = calloc(1, sizeof *s);
    struct sockaddr_in a;
    socklen_t n = sizeof a;
    check(s);
    s->o = *o;
    list_init(&s->segments);
    list_init(&s->records);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    for (int l = 0; l < LINKS_MAX; l++)
        s->links[l].fd = -1;
    s->wake = eventfd(0, EFD_CLOEXEC);
    s->listener = listen_on(0);
    check(getsockname(s->listener, (struct sockaddr *)&a, &n) == 0);
    s->port = ntohs(a.sin_port);
    int rc = pthread_create(&s->thread, NULL, run, s);
    check(rc == 0);
    return s;
}

static void order(struct shelf *s, bool down, bool stop)
{
    uint64_t one = 1;
    pthread_mutex_lock(&s->lock);
    s->want_down = down;
    s->stop = stop;
    ssize_t n = write(s->wake, &one, sizeof one);
    check(n == sizeof one);
    while (s->down != down)
        pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

void shelf_down(struct shelf *s)
{
    order(s, true, false);
}

void shelf_up(struct shelf *s)
{
    order(s, false, false);
}

static void record_free(struct record *r)
{
    for (int i = 0; i < 16; i++)
        buf_free(&r->commits[i]);
    buf_free(&r->envelopes);
    free(r->members);
    free(r);
}

void shelf_stop(struct shelf *s)
{
    order(s, true, true);
    pthread_join(s->thread, NULL);
    close(s->wake);
    while (!list_empty(&s->segments))
        segment_free(s, container_of(s->segments.next, struct segment, link));
    for (struct list *it; (it = list_pop(&s->records));)
        record_free(container_of(it, struct record, link));
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

struct larder *shelf_client(struct shelf *s, unsigned reconnect_ms)
{
    struct larder *c = calloc(1, sizeof *c);
    static const uint8_t kek[KEY_BYTES] = {1, 2, 3};
    struct err e;
    c->pid = getpid();
    c->options = (struct larder_options){.size = sizeof c->options,
                                         .threads = 2,
                                         .connect_timeout_ms = 5000,
                                         .request_timeout_ms = 10000,
                                         .reconnect_ms = reconnect_ms};
    c->path = strdup("(none)");
    snprintf(c->credentials.tenant, sizeof c->credentials.tenant, "acme");
    c->credentials.keks.keks = calloc(1, sizeof *c->credentials.keks.keks);
    c->credentials.keks.keks[0] = (struct kek){.epoch = 1, .key = secret_create(kek, sizeof kek)};
    c->credentials.keks.count = 1;
    snprintf(c->host, sizeof c->host, "127.0.0.1");
    snprintf(c->port, sizeof c->port, "%d", s->port);
    secrets_random(&c->incarnation, sizeof c->incarnation);
    int rc = client_connect(c, CONN_LANE_OPEN, &c->conn, &e);
    check(rc == 0);
    return c;
}

void shelf_cut_every(struct shelf *s, uint64_t bytes)
{
    atomic_store(&s->since_cut, 0);
    atomic_store(&s->cut_every, bytes);
}

void shelf_disk_ms(struct shelf *s, uint32_t ms)
{
    atomic_store(&s->disk_ms, ms);
}

uint64_t shelf_bytes_read(struct shelf *s)
{
    return atomic_load(&s->bytes_read);
}

unsigned shelf_reads(struct shelf *s)
{
    return atomic_load(&s->reads);
}

unsigned shelf_cuts(struct shelf *s)
{
    return atomic_load(&s->cuts);
}

unsigned shelf_segments(struct shelf *s)
{
    return atomic_load(&s->held);
}
