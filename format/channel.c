/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames over TLS, or in the clear. Input is decrypted straight into the frame being received, as far as it
 * goes; what is left waits as it came in `kept`, so that a frame that nobody takes stops the decryption of
 * what follows it. Output is sealed from where a frame's parts are straight into `out`.
 */
#include "format/channel.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "format/tls.h"

#define IDLE_BYTES_MAX 65536u       /* buffers larger than this are given back when they are empty */
#define IDLE_INPUTS    64u          /* in a row that kept nothing: so long a client keeps memory for it */
#define PIECE_BYTES    (128u << 10) /* of a lent tail: covered, and sent while it is in the cache */
#define LEND_BYTES_MIN 16384u       /* less is copied */

struct channel {
    struct tls *tls; /* NULL: clear, or a lane */
    struct identity clear_peer;
    bool lane;
    struct id ticket;
    struct lane_mac *in_mac, *out_mac; /* of a lane */
    bool server;
    bool ready;
    bool large;
    bool broken;     /* no more frames come in */
    bool mute;       /* and none can be sent: TLS itself has failed */
    bool first_seen; /* the first byte from the peer was looked at */
    struct err why;  /* of broken */

    uint8_t *kept; /* input not yet decrypted */
    size_t kept_cap, kept_at, kept_end;
    unsigned idle_inputs;
    struct slice lent; /* the caller's, during channel_input only */

    uint8_t head[FRAME_HEADER_BYTES + LANE_TAG_BYTES]; /* the tag only on a lane */
    size_t head_bytes;                                 /* of it that have arrived */
    uint8_t tag[LANE_TAG_BYTES];                       /* of the payload, on a lane */
    size_t tag_bytes, covered_bytes;                   /* covered: of the payload, added to its tag */
    struct hash128_sum *sum;                           /* of a chunk's tail, likewise; a server's lane */
    struct frame_header header;
    struct channel_memory source;
    uint8_t *memory; /* payload's allocation, kept from frame to frame */
    size_t memory_bytes;
    uint8_t *payload; /* within it */
    size_t payload_bytes;
    struct channel_sink sink;
    bool sinks;  /* the payload being received goes there */
    bool whole;  /* the frame is complete */
    bool handed; /* and the caller has it */

    struct buf out;
    size_t out_at; /* bytes of it that were sent */

    /* A tail that was lent (of a lane) follows the output: piece by piece, each covered, then the tag. */
    bool lending, tag_shown;
    struct slice tail, piece; /* not shown yet; shown and not sent */
    uint8_t tail_tag[LANE_TAG_BYTES];
    uint8_t *tail_memory; /* its own, once the lender had to have his back */
};

/* ---- input ---- */

static size_t pull(void *arg, void *p, size_t n)
{
    struct channel *c = arg;
    size_t kept = c->kept_end - c->kept_at;
    if (kept > 0) {
        n = n < kept ? n : kept;
        memcpy(p, c->kept + c->kept_at, n);
        c->kept_at += n;
        return n;
    }
    n = n < c->lent.n ? n : c->lent.n;
    if (n == 0)
        return 0;
    memcpy(p, c->lent.p, n);
    c->lent = SLICE(c->lent.p + n, c->lent.n - n);
    return n;
}

/* Moves n bytes of the caller's input behind what is kept. */
static bool keep(struct channel *c, size_t n)
{
    size_t kept = c->kept_end - c->kept_at, want = kept + n;
    if (want > c->kept_cap) {
        size_t cap = want > 2 * c->kept_cap ? want : 2 * c->kept_cap;
        uint8_t *p = malloc(cap);
        if (!p)
            return false;
        if (kept > 0)
            memcpy(p, c->kept + c->kept_at, kept);
        free(c->kept);
        c->kept = p;
        c->kept_cap = cap;
    } else if (c->kept_at > 0 && kept > 0) {
        memmove(c->kept, c->kept + c->kept_at, kept);
    }
    c->kept_at = 0;
    c->kept_end = want;
    if (n > 0) {
        memcpy(c->kept + kept, c->lent.p, n);
        c->lent = SLICE(c->lent.p + n, c->lent.n - n);
    }
    return true;
}

/* Keeps what of the caller's input is not used yet. */
static int keep_rest(struct channel *c, struct err *e)
{
    size_t n = c->lent.n;
    if (!keep(c, n))
        return err_set(e, ERR_NO_MEMORY, "no memory for %zu bytes of input", n);
    c->idle_inputs = c->kept_end == 0 ? c->idle_inputs + 1 : 0;
    if (c->idle_inputs >= (c->server ? 1 : IDLE_INPUTS) && c->kept_cap > IDLE_BYTES_MAX) {
        free(c->kept);
        c->kept = NULL;
        c->kept_cap = 0;
    }
    return 0;
}

/* A record that came in two pieces is put together; all others are read where they came. */
static struct slice see(void *arg, size_t n)
{
    struct channel *c = arg;
    size_t kept = c->kept_end - c->kept_at;
    if (kept == 0)
        return c->lent;
    if (kept < n && c->lent.n > 0)
        (void)!keep(c, n - kept < c->lent.n ? n - kept : c->lent.n); /* if not, keep_rest says so */
    return SLICE(c->kept + c->kept_at, c->kept_end - c->kept_at);
}

static void skip(void *arg, size_t n)
{
    struct channel *c = arg;
    if (c->kept_end > c->kept_at) {
        check(n <= c->kept_end - c->kept_at);
        c->kept_at += n;
    } else {
        check(n <= c->lent.n);
        c->lent = SLICE(c->lent.p + n, c->lent.n - n);
    }
}

static uint8_t *grow(void *arg, size_t n)
{
    struct channel *c = arg;
    if (!buf_reserve(&c->out, n))
        return NULL;
    c->out.n += n;
    return c->out.p + c->out.n - n;
}

/* From here on every call fails with what is in c->why. */
static int break_channel(struct channel *c, struct err *e)
{
    c->broken = true;
    if (e)
        *e = c->why;
    return -c->why.errnum;
}

static int mute_channel(struct channel *c, struct err *e)
{
    c->mute = true;
    return break_channel(c, e);
}

/* 1..n bytes of plaintext, 0: none now, or <0. */
static int read_plain(struct channel *c, void *p, size_t n)
{
    if (!c->tls)
        return (int)pull(c, p, n);
    int rc = tls_read(c->tls, p, n, &c->why);
    c->mute |= rc < 0;
    return rc;
}

static uint8_t *memory_take(struct channel *c, size_t n)
{
    void *p;
    if (c->source.take)
        return c->source.take(c->source.arg, n);
    return posix_memalign(&p, BLOCK_BYTES, n) == 0 ? p : NULL;
}

static void memory_drop(struct channel *c)
{
    if (c->memory && c->source.give)
        c->source.give(c->source.arg, c->memory);
    else
        free(c->memory);
    c->memory = NULL;
    c->memory_bytes = 0;
}

/* Is the payload of such a frame covered by a tag of its own? Bytes of sealed chunks have theirs. */
static bool is_covered(bool from_server, const struct frame_header *h)
{
    return h->payload_bytes > 0 && !(from_server && h->opcode == OP_READ &&
                                     (h->flags & (FRAME_RESPONSE | FRAME_ERROR)) == FRAME_RESPONSE);
}

static int tampered(struct channel *c, unsigned long long count)
{
    return err_set(
        &c->why, ERR_CORRUPT,
        "what came on the bulk lane as number %llu is not what the %s sent: it was changed, dropped, "
        "repeated or reordered on the way",
        count, c->server ? "client" : "server");
}

static int check_head(struct channel *c)
{
    unsigned long long count = lane_mac_count(c->in_mac);
    if (lane_mac_check(c->in_mac, SLICE(c->head, FRAME_HEADER_BYTES), c->head + FRAME_HEADER_BYTES) < 0)
        return tampered(c, count);
    return 0;
}

static bool is_summed(const struct channel *c)
{
    return c->sum && c->header.opcode == OP_SEGMENT_CHUNK && c->header.payload_bytes > CHUNK_MESSAGE_BYTES;
}

/* Of the payload, as far as it has come: while it is in the cache. */
static void cover_payload(struct channel *c)
{
    if (c->covered_bytes == 0) {
        lane_mac_begin(c->in_mac);
        if (is_summed(c))
            hash128_begin(c->sum);
    }
    while (c->covered_bytes < c->payload_bytes) {
        size_t at = c->covered_bytes, n = c->payload_bytes - at;
        n = n < PIECE_BYTES ? n : PIECE_BYTES;
        lane_mac_add(c->in_mac, SLICE(c->payload + at, n));
        size_t skip = at < CHUNK_MESSAGE_BYTES ? CHUNK_MESSAGE_BYTES - at : 0;
        if (is_summed(c) && n > skip)
            hash128_add(c->sum, c->payload + at + skip, n - skip);
        c->covered_bytes += n;
    }
}

/* The tag behind the payload. 1: it fits; 0: it is not whole yet. */
static int take_tag(struct channel *c)
{
    c->tag_bytes += pull(c, c->tag + c->tag_bytes, sizeof c->tag - c->tag_bytes);
    if (c->tag_bytes < sizeof c->tag)
        return 0;
    unsigned long long count = lane_mac_count(c->in_mac) - 1;
    return lane_mac_end_check(c->in_mac, c->tag) == 0 ? 1 : tampered(c, count);
}

/* Memory for the payload that the header announces: see struct frame for its place. */
static int begin_payload(struct channel *c)
{
    static uint8_t nothing[1];
    size_t n = c->header.payload_bytes;
    size_t max = c->large ? FRAME_PAYLOAD_BYTES_MAX : FRAME_CONTROL_BYTES_MAX;
    if (n > max)
        return err_set(&c->why, ERR_LIMIT,
                       "frame of request %llu (%s) announces %zu bytes, at most %zu are allowed before hello",
                       (unsigned long long)c->header.request_id, opcode_name(c->header.opcode), n, max);
    c->payload_bytes = 0;
    c->payload = nothing;
    c->sinks = n > 0 && c->sink.wants && !(c->lane && is_covered(!c->server, &c->header)) &&
               c->sink.wants(c->sink.arg, &c->header);
    if (n == 0 || c->sinks)
        return 0;
    size_t written = frame_written_at(c->header.opcode), lead = written > 0 ? BLOCK_BYTES - written : 0;
    size_t size = block_align(lead + n);
    if (size > c->memory_bytes || c->memory_bytes > 4 * size + IDLE_BYTES_MAX) {
        memory_drop(c);
        c->memory = memory_take(c, size);
        if (!c->memory)
            return err_set(&c->why, ERR_NO_MEMORY, "no memory for a frame of %zu bytes", n);
        c->memory_bytes = size;
    }
    c->payload = c->memory + lead;
    memset(c->payload + n, 0, size - lead - n);
    return 0;
}

/* Of the bytes behind the next `skip` of the payload, which is longer. */
static uint8_t *payload_place(struct channel *c, size_t skip, size_t *n)
{
    size_t left = c->header.payload_bytes - c->payload_bytes - skip;
    *n = left;
    if (!c->sinks)
        return c->payload + c->payload_bytes + skip;
    uint8_t *to = c->sink.place(c->sink.arg, skip, n);
    *n = *n < left ? *n : left;
    check((to && *n > 0) || skip > 0);
    return to;
}

static void payload_came(struct channel *c, size_t n)
{
    c->payload_bytes += n;
    if (c->sinks)
        c->sink.came(c->sink.arg, n);
}

/* Reads header, then payload; as far as input goes. */
static int read_frame(struct channel *c)
{
    int rc;
    size_t head_bytes = c->lane ? sizeof c->head : FRAME_HEADER_BYTES;
    while (c->head_bytes < head_bytes) {
        rc = read_plain(c, c->head + c->head_bytes, head_bytes - c->head_bytes);
        if (rc <= 0)
            return rc;
        c->head_bytes += (size_t)rc;
        if (c->head_bytes < head_bytes)
            continue;
        c->tag_bytes = c->covered_bytes = 0;
        rc = c->lane ? check_head(c) : 0;
        if (rc == 0)
            rc = frame_header_decode(c->head, &c->header, &c->why);
        if (rc == 0)
            rc = begin_payload(c);
        if (rc < 0)
            return rc;
    }
    bool covered = c->lane && is_covered(!c->server, &c->header);
    do {
        if (covered && c->payload_bytes > c->covered_bytes)
            cover_payload(c);
        if (c->payload_bytes == c->header.payload_bytes)
            break;
        size_t n;
        uint8_t *to = payload_place(c, 0, &n);
        rc = read_plain(c, to, n);
        if (rc <= 0)
            return rc;
        payload_came(c, (size_t)rc);
    } while (true);
    if (covered && (rc = take_tag(c)) <= 0)
        return rc;
    c->whole = true;
    return 0;
}

/* ---- the opening of a lane ---- */

static void put_opening(struct channel *c)
{
    uint8_t plain[LANE_HELLO_BYTES];
    lane_plain_encode(&c->ticket, plain);
    lane_mac_tag(c->out_mac, SLICE(plain, LANE_PLAIN_BYTES), SLICE(NULL, 0), plain + LANE_PLAIN_BYTES);
    buf_put(&c->out, plain, sizeof plain);
}

/* As tls_handshake. The client's hello waits in the output from the start. */
static int lane_handshake(struct channel *c)
{
    struct id ticket;
    c->head_bytes += pull(c, c->head + c->head_bytes, LANE_HELLO_BYTES - c->head_bytes);
    if (c->head_bytes < LANE_HELLO_BYTES)
        return 0;
    int rc = lane_plain_decode(c->head, &ticket, &c->why);
    if (rc < 0)
        return rc;
    if (!id_equal(&ticket, &c->ticket) ||
        lane_mac_check(c->in_mac, SLICE(c->head, LANE_PLAIN_BYTES), c->head + LANE_PLAIN_BYTES) < 0)
        return err_set(
            &c->why, ERR_DENIED,
            "the opening of the bulk lane is not by the holder of its ticket, or was changed on the "
            "way");
    c->head_bytes = 0;
    if (c->server)
        put_opening(c);
    return c->out.failed ? err_set(&c->why, ERR_NO_MEMORY, "no memory for a bulk lane") : 1;
}

/* Goes on with whatever input there is. */
static int advance(struct channel *c, struct err *e)
{
    if (!c->ready) {
        int rc = c->lane ? lane_handshake(c) : tls_handshake(c->tls, &c->why);
        if (rc < 0)
            return mute_channel(c, e);
        if (rc == 0)
            return 0;
        c->ready = true;
    }
    if (c->whole)
        return 0;
    if (read_frame(c) < 0)
        return break_channel(c, e);
    if (!c->whole && c->head_bytes > 0 && channel_peer_closed(c)) {
        (void)err_set(&c->why, ERR_PROTOCOL, "the peer closed the connection in the middle of a frame");
        return break_channel(c, e);
    }
    return 0;
}

/* TLS begins with a handshake record (0x16), or an alert (0x15); what begins otherwise was never TLS. */
static int check_first(struct channel *c, const uint8_t *p, size_t n)
{
    if (!c->tls || c->first_seen || n == 0)
        return 0;
    c->first_seen = true;
    if (p[0] == 0x16 || p[0] == 0x15)
        return 0;
    char quoted[48];
    return err_set(&c->why, ERR_PROTOCOL, "expected TLS, found '%s'; is the peer a larder %s?",
                   err_quote(quoted, sizeof quoted, p, n < 32 ? n : 32), c->server ? "client" : "server");
}

int channel_input(struct channel *c, const void *p, size_t n, struct err *e)
{
    if (c->mute)
        return break_channel(c, e);
    if (c->broken || channel_peer_closed(c))
        return 0; /* what comes behind a broken frame or the peer's close counts for nothing */
    if (n > CHANNEL_INPUT_BYTES_MAX - (c->kept_end - c->kept_at)) {
        (void)err_set(&c->why, ERR_LIMIT,
                      "%zu bytes of input wait behind a frame that is not taken; at most %u are kept",
                      c->kept_end - c->kept_at, CHANNEL_INPUT_BYTES_MAX);
        return mute_channel(c, e);
    }
    if (check_first(c, p, n) < 0)
        return mute_channel(c, e);
    c->lent = SLICE(p, n);
    int rc = advance(c, NULL);
    if (rc == 0 && keep_rest(c, &c->why) < 0)
        c->mute = true;
    c->lent = SLICE(NULL, 0);
    return c->mute ? break_channel(c, e) : 0; /* what else is wrong, channel_frame tells */
}

uint8_t *channel_place(struct channel *c, size_t skip, size_t *n)
{
    *n = 0;
    if (c->tls || !c->ready || c->broken || c->whole || c->kept_end > c->kept_at || c->head_bytes == 0 ||
        c->header.payload_bytes - c->payload_bytes <= skip ||
        c->head_bytes < (c->lane ? sizeof c->head : FRAME_HEADER_BYTES))
        return NULL;
    return payload_place(c, skip, n);
}

size_t channel_awaited(const struct channel *c)
{
    size_t here = c->kept_end - c->kept_at;
    size_t left = c->header.payload_bytes - c->payload_bytes;
    bool begun = c->head_bytes >= (c->lane ? sizeof c->head : FRAME_HEADER_BYTES);
    return c->ready && !c->broken && !c->whole && begun && left > here ? left - here : 0;
}

int channel_placed(struct channel *c, size_t n, struct err *e)
{
    check(!c->whole && n <= c->header.payload_bytes - c->payload_bytes);
    payload_came(c, n);
    return channel_input(c, NULL, 0, e);
}

int channel_frame(struct channel *c, struct frame *out, struct err *e)
{
    check(!c->handed);
    if (!c->whole) {
        if (c->broken)
            return break_channel(c, e);
        if (!c->ready)
            return 0;
        int rc = advance(c, e);
        if (rc < 0)
            return rc;
    }
    if (!c->whole) {
        if (c->head_bytes == 0 && c->memory_bytes > IDLE_BYTES_MAX)
            memory_drop(c);
        return 0;
    }
    c->handed = true;
    out->header = c->header;
    out->payload = c->payload;
    out->sunk = c->sinks;
    out->summed = is_summed(c);
    if (out->summed)
        out->tail_hash = hash128_end(c->sum);
    return 1;
}

void channel_frame_done(struct channel *c)
{
    check(c->handed);
    c->handed = false;
    c->whole = false;
    c->head_bytes = 0;
    c->payload_bytes = 0;
    c->payload = NULL;
    c->sinks = false;
}

uint8_t *channel_frame_steal(struct channel *c)
{
    check(c->handed);
    uint8_t *p = NULL;
    if (c->header.payload_bytes > 0 && !c->sinks) {
        p = c->memory;
        c->memory = NULL;
        c->memory_bytes = 0;
    }
    channel_frame_done(c);
    return p;
}

void channel_sink(struct channel *c, const struct channel_sink *s)
{
    c->sink = *s;
}

void channel_allow_large(struct channel *c)
{
    c->large = true;
}

bool channel_partial(const struct channel *c)
{
    return !c->whole && (c->head_bytes > 0 || c->kept_end > c->kept_at);
}

size_t channel_buffered(const struct channel *c)
{
    return c->kept_cap + c->memory_bytes;
}

/* ---- output ---- */

/* Makes room for n bytes of plaintext, as they will be with their records. */
static int make_room(struct channel *c, size_t n, struct err *e)
{
    size_t waiting = c->out.n - c->out_at;
    size_t want = c->tls ? tls_output_bytes(n) : n + 2 * LANE_TAG_BYTES;
    if (waiting > 0 && waiting + want > CHANNEL_OUTPUT_BYTES_MAX)
        return err_set(e, ERR_BUSY, "%zu bytes wait to be sent; at most %u may", waiting,
                       CHANNEL_OUTPUT_BYTES_MAX);
    if (c->out_at > 0) {
        memmove(c->out.p, c->out.p + c->out_at, waiting);
        c->out.n = waiting;
        c->out_at = 0;
    }
    if (!buf_reserve(&c->out, want)) {
        c->out.failed = false;
        return err_set(e, ERR_NO_MEMORY, "no memory for %zu bytes of output", want);
    }
    return 0;
}

static int send_tls(struct channel *c, const struct frame_header *h, const struct slice *parts)
{
    uint8_t head[FRAME_HEADER_BYTES];
    frame_header_encode(h, head);
    return tls_write(c->tls, (struct slice[]){SLICE(head, sizeof head), parts[0], parts[1]}, 3, &c->why);
}

/* Header, tag, payload and, if it is covered, its tag. */
static void send_lane(struct channel *c, const struct frame_header *h, const struct slice *parts)
{
    uint8_t head[FRAME_HEADER_BYTES + LANE_TAG_BYTES], tag[LANE_TAG_BYTES];
    frame_header_encode(h, head);
    lane_mac_tag(c->out_mac, SLICE(head, FRAME_HEADER_BYTES), SLICE(NULL, 0), head + FRAME_HEADER_BYTES);
    buf_put(&c->out, head, sizeof head);
    buf_put(&c->out, parts[0].p, parts[0].n);
    buf_put(&c->out, parts[1].p, parts[1].n);
    if (!is_covered(c->server, h))
        return;
    lane_mac_tag(c->out_mac, parts[0], parts[1], tag);
    buf_put(&c->out, tag, sizeof tag);
}

/* The same, with the tail where it is. */
static void lend_lane(struct channel *c, const struct frame_header *h, struct slice message,
                      struct slice tail)
{
    uint8_t head[FRAME_HEADER_BYTES + LANE_TAG_BYTES];
    frame_header_encode(h, head);
    lane_mac_tag(c->out_mac, SLICE(head, FRAME_HEADER_BYTES), SLICE(NULL, 0), head + FRAME_HEADER_BYTES);
    buf_put(&c->out, head, sizeof head);
    buf_put(&c->out, message.p, message.n);
    lane_mac_begin(c->out_mac);
    lane_mac_add(c->out_mac, message);
    c->lending = true;
    c->tag_shown = false;
    c->tail = tail;
    c->piece = SLICE(NULL, 0);
}

/* Shows the next piece of a lent tail, or its tag, if nothing is shown. */
static void show(struct channel *c)
{
    while (c->lending && c->piece.n == 0) {
        if (c->tail.n > 0) {
            c->piece = SLICE(c->tail.p, c->tail.n < PIECE_BYTES ? c->tail.n : PIECE_BYTES);
            c->tail = SLICE(c->tail.p + c->piece.n, c->tail.n - c->piece.n);
            lane_mac_add(c->out_mac, c->piece);
        } else if (!c->tag_shown) {
            lane_mac_end(c->out_mac, c->tail_tag);
            c->piece = SLICE(c->tail_tag, sizeof c->tail_tag);
            c->tag_shown = true;
        } else {
            c->lending = false;
            free(c->tail_memory);
            c->tail_memory = NULL;
        }
    }
}

bool channel_lent(const struct channel *c)
{
    return c->lending;
}

int channel_lent_keep(struct channel *c, struct err *e)
{
    size_t shown = c->tag_shown ? 0 : c->piece.n, n = shown + c->tail.n;
    if (!c->lending || c->tail_memory || n == 0)
        return 0;
    c->tail_memory = malloc(n);
    if (!c->tail_memory) {
        c->lending = false;
        (void)err_set(&c->why, ERR_NO_MEMORY, "no memory for %zu bytes of output", n);
        return mute_channel(c, e);
    }
    if (shown > 0) {
        memcpy(c->tail_memory, c->piece.p, shown);
        c->piece.p = c->tail_memory;
    }
    if (c->tail.n > 0)
        memcpy(c->tail_memory + shown, c->tail.p, c->tail.n);
    c->tail.p = c->tail_memory + shown;
    return 0;
}

static void send_clear(struct channel *c, const struct frame_header *h, const struct slice *parts,
                       size_t count)
{
    uint8_t head[FRAME_HEADER_BYTES];
    frame_header_encode(h, head);
    buf_put(&c->out, head, sizeof head);
    for (size_t i = 0; i < count; i++)
        buf_put(&c->out, parts[i].p, parts[i].n);
}

/* What holds for every frame; *header gets its length. */
static int begin_send(struct channel *c, struct frame_header *header, size_t message_bytes, size_t tail_bytes,
                      struct err *e)
{
    size_t n;
    check(!c->lending);
    if (c->mute)
        return break_channel(c, e);
    if (!c->ready)
        return err_set(e, ERR_INVALID, "a frame was to be sent before the handshake was done");
    if (add_overflows(message_bytes, tail_bytes, &n) || n > FRAME_PAYLOAD_BYTES_MAX)
        return err_set(e, ERR_LIMIT, "a frame %s of %zu and %zu bytes was to be sent; at most %u are allowed",
                       opcode_name(header->opcode), message_bytes, tail_bytes, FRAME_PAYLOAD_BYTES_MAX);
    header->payload_bytes = (uint32_t)n;
    return 0;
}

int channel_send(struct channel *c, const struct frame_header *h, struct slice message, struct slice tail,
                 struct err *e)
{
    struct frame_header header = *h;
    struct slice parts[] = {message, tail};
    int rc = begin_send(c, &header, message.n, tail.n, e);
    if (rc == 0)
        rc = make_room(c, FRAME_HEADER_BYTES + header.payload_bytes, e);
    if (rc < 0)
        return rc;
    if (c->tls)
        return send_tls(c, &header, parts) < 0 ? mute_channel(c, e) : 0;
    if (c->lane)
        send_lane(c, &header, parts);
    else
        send_clear(c, &header, parts, 2);
    return 0;
}

int channel_lend(struct channel *c, const struct frame_header *h, struct slice message, struct slice tail,
                 struct err *e)
{
    struct frame_header header = *h;
    if (!c->lane || tail.n <= LEND_BYTES_MIN)
        return channel_send(c, h, message, tail, e);
    int rc = begin_send(c, &header, message.n, tail.n, e);
    if (rc == 0)
        rc = make_room(c, FRAME_HEADER_BYTES + message.n, e);
    if (rc < 0)
        return rc;
    check(is_covered(c->server, &header));
    lend_lane(c, &header, message, tail);
    return 0;
}

int channel_send_head(struct channel *c, const struct frame_header *h, size_t tail_bytes, struct err *e)
{
    uint8_t head[FRAME_HEADER_BYTES + LANE_TAG_BYTES];
    struct frame_header header = *h;
    if (c->mute)
        return break_channel(c, e);
    check(c->lane && c->ready && !c->lending && tail_bytes <= FRAME_PAYLOAD_BYTES_MAX);
    header.payload_bytes = (uint32_t)tail_bytes;
    check(!is_covered(c->server, &header));
    int rc = make_room(c, sizeof head, e);
    if (rc < 0)
        return rc;
    frame_header_encode(&header, head);
    lane_mac_tag(c->out_mac, SLICE(head, FRAME_HEADER_BYTES), SLICE(NULL, 0), head + FRAME_HEADER_BYTES);
    buf_put(&c->out, head, sizeof head);
    return 0;
}

struct slice channel_output(struct channel *c)
{
    if (c->out.n > c->out_at)
        return SLICE(c->out.p + c->out_at, c->out.n - c->out_at);
    show(c);
    return c->lending ? c->piece : SLICE(NULL, 0);
}

bool channel_output_more(const struct channel *c)
{
    return c->lending && (c->out.n > c->out_at || !c->tag_shown);
}

void channel_output_done(struct channel *c, size_t n)
{
    if (c->out.n == c->out_at) {
        check(n <= c->piece.n);
        c->piece = SLICE(c->piece.p + n, c->piece.n - n);
        show(c);
        return;
    }
    check(n <= c->out.n - c->out_at);
    c->out_at += n;
    if (c->out_at < c->out.n)
        return;
    c->out_at = 0;
    if (c->out.cap > IDLE_BYTES_MAX)
        buf_free(&c->out);
    else
        c->out.n = 0;
}

uint8_t *channel_output_take(struct channel *c, size_t *n)
{
    check(!c->lending);
    *n = c->out.n - c->out_at;
    if (*n == 0)
        return NULL;
    uint8_t *p = c->out.p;
    if (c->out_at > 0)
        memmove(p, p + c->out_at, *n);
    c->out = (struct buf){0};
    c->out_at = 0;
    return p;
}

/* ---- life ---- */

int channel_create(struct channel_config *config, const char *expected_host, struct channel **out,
                   struct err *e)
{
    *out = NULL;
    struct channel *c = calloc(1, sizeof *c);
    if (!c)
        return err_set(e, ERR_NO_MEMORY, "no memory for a connection");
    c->server = channel_config_is_server(config);
    struct tls_io io = {.see = see, .skip = skip, .grow = grow, .arg = c};
    int rc = tls_create(config, expected_host, &io, &c->tls, e);
    if (rc < 0) {
        channel_free(c);
        return rc;
    }
    *out = c;
    return 0;
}

int channel_create_clear(bool server, const struct identity *peer, struct channel **out)
{
    struct channel *c = calloc(1, sizeof *c);
    *out = c;
    if (!c)
        return -ENOMEM;
    c->server = server;
    c->clear_peer = *peer;
    c->ready = true;
    return 0;
}

int channel_create_lane(bool server, const struct identity *peer, const struct lane_keys *keys,
                        const struct id *ticket, struct channel **out, struct err *e)
{
    struct channel *c = calloc(1, sizeof *c);
    *out = NULL;
    if (!c)
        return err_set(e, ERR_NO_MEMORY, "no memory for a bulk lane");
    c->server = server;
    c->clear_peer = *peer;
    c->lane = true;
    c->ticket = *ticket;
    c->in_mac = lane_mac_create(!server, server ? keys->to_server : keys->to_client);
    c->out_mac = lane_mac_create(server, server ? keys->to_client : keys->to_server);
    if (server)
        c->sum = aligned_alloc(_Alignof(struct hash128_sum), sizeof *c->sum);
    if (c->in_mac && c->out_mac && !server)
        put_opening(c);
    if (!c->in_mac || !c->out_mac || (server && !c->sum) || c->out.failed) {
        channel_free(c);
        return err_set(e, ERR_NO_MEMORY, "no memory for a bulk lane");
    }
    *out = c;
    return 0;
}

void channel_use_memory(struct channel *c, const struct channel_memory *m)
{
    check(!c->memory);
    c->source = *m;
}

void channel_free(struct channel *c)
{
    if (!c)
        return;
    lane_mac_free(c->in_mac);
    lane_mac_free(c->out_mac);
    tls_free(c->tls);
    free(c->kept);
    memory_drop(c);
    buf_free(&c->out);
    free(c->tail_memory);
    free(c->sum);
    free(c);
}

bool channel_ready(const struct channel *c)
{
    return c->ready;
}

const struct identity *channel_peer(const struct channel *c)
{
    if (!c->ready)
        return NULL;
    return c->tls ? tls_peer(c->tls) : &c->clear_peer;
}

void channel_close(struct channel *c)
{
    if (c->tls && c->ready && !c->mute)
        tls_close(c->tls);
}

bool channel_peer_closed(const struct channel *c)
{
    return c->tls && tls_peer_closed(c->tls);
}

int channel_export(struct channel *c, const char *label, const void *context, size_t context_bytes, void *out,
                   size_t n)
{
    return c->tls ? tls_export(c->tls, label, context, context_bytes, out, n) : -ENOTSUP;
}
