/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames over TLS, or in the clear. Input is decrypted straight into the frame being received, as far as it
 * goes; what is left waits as it came in `kept`, so that a frame that nobody takes stops the decryption of
 * what follows it.
 */
#include "format/channel.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "format/tls.h"

#define IDLE_BYTES_MAX 65536u /* buffers larger than this are given back when they are empty */

struct channel {
    struct tls *tls; /* NULL: clear */
    struct identity clear_peer;
    bool server;
    bool ready;
    bool large;
    bool broken;     /* no more frames come in */
    bool mute;       /* and none can be sent: TLS itself has failed */
    bool first_seen; /* the first byte from the peer was looked at */
    struct err why;  /* of broken */

    uint8_t *kept; /* input not yet decrypted */
    size_t kept_cap, kept_at, kept_end;
    struct slice lent; /* the caller's, during channel_input only */

    uint8_t head[FRAME_HEADER_BYTES];
    size_t head_bytes; /* of it that have arrived */
    struct frame_header header;
    uint8_t *memory; /* payload's allocation, kept from frame to frame */
    size_t memory_bytes;
    uint8_t *payload; /* within it */
    size_t payload_bytes;
    bool whole;  /* the frame is complete */
    bool handed; /* and the caller has it */

    struct buf out;
    size_t out_at; /* bytes of it that were sent */
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

static bool push(void *arg, const void *p, size_t n)
{
    struct channel *c = arg;
    buf_put(&c->out, p, n);
    return !c->out.failed;
}

/* Keeps what of the caller's input is not used yet. */
static int keep_rest(struct channel *c, struct err *e)
{
    size_t kept = c->kept_end - c->kept_at, want = kept + c->lent.n;
    if (want > c->kept_cap) {
        size_t cap = want > 2 * c->kept_cap ? want : 2 * c->kept_cap;
        uint8_t *p = malloc(cap);
        if (!p)
            return err_set(e, ERR_NO_MEMORY, "no memory for %zu bytes of input", cap);
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
    if (c->lent.n > 0)
        memcpy(c->kept + kept, c->lent.p, c->lent.n);
    c->lent = SLICE(NULL, 0);
    if (want == 0 && c->kept_cap > IDLE_BYTES_MAX) {
        free(c->kept);
        c->kept = NULL;
        c->kept_cap = 0;
    }
    return 0;
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

static void memory_drop(struct channel *c)
{
    free(c->memory);
    c->memory = NULL;
    c->memory_bytes = 0;
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
    if (n == 0)
        return 0;
    size_t lead = c->header.opcode == OP_SEGMENT_CHUNK ? BLOCK_BYTES - CHUNK_MESSAGE_BYTES : 0;
    size_t size = block_align(lead + n);
    if (size > c->memory_bytes || c->memory_bytes > 4 * size + IDLE_BYTES_MAX) {
        void *p;
        memory_drop(c);
        if (posix_memalign(&p, BLOCK_BYTES, size) != 0)
            return err_set(&c->why, ERR_NO_MEMORY, "no memory for a frame of %zu bytes", n);
        c->memory = p;
        c->memory_bytes = size;
    }
    c->payload = c->memory + lead;
    memset(c->payload + n, 0, size - lead - n);
    return 0;
}

/* Reads header, then payload; as far as input goes. */
static int read_frame(struct channel *c)
{
    int rc;
    while (c->head_bytes < sizeof c->head) {
        rc = read_plain(c, c->head + c->head_bytes, sizeof c->head - c->head_bytes);
        if (rc <= 0)
            return rc;
        c->head_bytes += (size_t)rc;
        if (c->head_bytes < sizeof c->head)
            continue;
        rc = frame_header_decode(c->head, &c->header, &c->why);
        if (rc == 0)
            rc = begin_payload(c);
        if (rc < 0)
            return rc;
    }
    while (c->payload_bytes < c->header.payload_bytes) {
        rc = read_plain(c, c->payload + c->payload_bytes, c->header.payload_bytes - c->payload_bytes);
        if (rc <= 0)
            return rc;
        c->payload_bytes += (size_t)rc;
    }
    c->whole = true;
    return 0;
}

/* Goes on with whatever input there is. */
static int advance(struct channel *c, struct err *e)
{
    if (!c->ready) {
        int rc = tls_handshake(c->tls, &c->why);
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
}

uint8_t *channel_frame_steal(struct channel *c)
{
    check(c->handed);
    uint8_t *p = NULL;
    if (c->header.payload_bytes > 0) {
        p = c->memory;
        c->memory = NULL;
        c->memory_bytes = 0;
    }
    channel_frame_done(c);
    return p;
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
    size_t want = n + (n / TLS_RECORD_BYTES_MAX + 4) * TLS_RECORD_OVERHEAD;
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

/* The first record takes up the header, and as much of the parts as fits; the rest goes without a copy. */
static int send_tls(struct channel *c, const struct frame_header *h, struct slice *parts, size_t count)
{
    uint8_t first[TLS_RECORD_BYTES_MAX];
    size_t used = FRAME_HEADER_BYTES;
    frame_header_encode(h, first);
    for (size_t i = 0; i < count; i++) {
        size_t n = parts[i].n < sizeof first - used ? parts[i].n : sizeof first - used;
        if (n == 0)
            continue;
        memcpy(first + used, parts[i].p, n);
        used += n;
        parts[i] = SLICE(parts[i].p + n, parts[i].n - n);
    }
    int rc = tls_write(c->tls, first, used, &c->why);
    for (size_t i = 0; i < count && rc == 0; i++)
        if (parts[i].n > 0)
            rc = tls_write(c->tls, parts[i].p, parts[i].n, &c->why);
    return rc;
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

int channel_send(struct channel *c, const struct frame_header *h, struct slice message, struct slice tail,
                 struct err *e)
{
    struct frame_header header = *h;
    struct slice parts[] = {message, tail};
    size_t n;
    if (c->mute)
        return break_channel(c, e);
    if (!c->ready)
        return err_set(e, ERR_INVALID, "a frame was to be sent before the handshake was done");
    if (add_overflows(message.n, tail.n, &n) || n > FRAME_PAYLOAD_BYTES_MAX)
        return err_set(e, ERR_LIMIT, "a frame %s of %zu and %zu bytes was to be sent; at most %u are allowed",
                       opcode_name(h->opcode), message.n, tail.n, FRAME_PAYLOAD_BYTES_MAX);
    int rc = make_room(c, FRAME_HEADER_BYTES + n, e);
    if (rc < 0)
        return rc;
    header.payload_bytes = (uint32_t)n;
    if (c->tls)
        return send_tls(c, &header, parts, 2) < 0 ? mute_channel(c, e) : 0;
    send_clear(c, &header, parts, 2);
    return 0;
}

struct slice channel_output(struct channel *c)
{
    return SLICE(c->out.n > c->out_at ? c->out.p + c->out_at : NULL, c->out.n - c->out_at);
}

void channel_output_done(struct channel *c, size_t n)
{
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
    struct tls_io io = {.pull = pull, .push = push, .arg = c};
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

void channel_free(struct channel *c)
{
    if (!c)
        return;
    tls_free(c->tls);
    free(c->kept);
    free(c->memory);
    buf_free(&c->out);
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
