/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A bulk lane with an adversary on the way. Input: a script of bytes that says which frames the peer sends
 * and what the adversary does with what travels: cuts it up, changes, drops, repeats, swaps, or puts bytes of
 * the script in. Every frame that comes out must be the next one that was sent, unchanged but for bytes of
 * sealed chunks; and without any change all of them must come out.
 */
#include <stdlib.h>
#include <string.h>

#include "format/channel.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define FRAMES_MAX 16

struct sent {
    struct frame_header header;
    struct buf payload, bytes;
};

static struct buf taken(struct channel *c)
{
    struct buf b = {0};
    struct slice s = channel_output(c);
    buf_put(&b, s.p, s.n);
    check(!b.failed);
    channel_output_done(c, s.n);
    return b;
}

static void open_lane(struct channel *client, struct channel *server)
{
    struct buf hello = taken(client);
    check(channel_input(server, hello.p, hello.n, NULL) == 0);
    struct buf welcome = taken(server);
    check(channel_input(client, welcome.p, welcome.n, NULL) == 0);
    check(channel_ready(client) && channel_ready(server));
    buf_free(&hello);
    buf_free(&welcome);
}

static void send_one(struct channel *from, bool server, uint8_t what, uint64_t id, struct sent *s)
{
    static const uint16_t opcodes[] = {OP_READ, OP_SEGMENT_CHUNK, OP_PING, OP_CREDIT};
    s->header = (struct frame_header){
        .opcode = opcodes[what & 3], .flags = server ? FRAME_RESPONSE | (what & 4) : 0, .request_id = id};
    for (unsigned i = 0; i < (unsigned)(what >> 3) * 5; i++)
        buf_u8(&s->payload, (uint8_t)(what + i));
    struct slice payload = SLICE(s->payload.p, s->payload.n);
    check(channel_send(from, &s->header, payload, SLICE(NULL, 0), NULL) == 0);
    s->bytes = taken(from);
}

/* False: broken. */
static bool take(struct channel *to, const struct sent *s, unsigned count, unsigned *next)
{
    struct frame f;
    struct err e;
    int rc;
    while ((rc = channel_frame(to, &f, &e)) == 1) {
        check(*next < count);
        const struct sent *want = &s[(*next)++];
        check(f.header.opcode == want->header.opcode && f.header.flags == want->header.flags &&
              f.header.request_id == want->header.request_id && f.header.payload_bytes == want->payload.n);
        bool sealed = f.header.opcode == OP_READ && f.header.flags & FRAME_RESPONSE;
        check(sealed || want->payload.n == 0 || memcmp(f.payload, want->payload.p, want->payload.n) == 0);
        channel_frame_done(to);
    }
    check(rc == 0 || e.text[0]);
    return rc == 0;
}

/* What travels, after the adversary. True: it is what was sent. */
static bool travel(struct sent *s, unsigned count, const uint8_t *data, size_t n, struct buf *out)
{
    bool same = true;
    for (unsigned i = 0; i < count; i++) {
        uint8_t act = n > 0 ? *data : 0;
        unsigned which = i;
        if (n > 0)
            data++, n--;
        same &= act % 8 < 3;
        if (act % 8 == 3 && s[i].bytes.n > 0)
            s[i].bytes.p[act * 37u % s[i].bytes.n] ^= (uint8_t)(1u << act / 32);
        else if (act % 8 == 4)
            continue; /* dropped */
        else if (act % 8 == 5)
            buf_put(out, s[i].bytes.p, s[i].bytes.n); /* twice */
        else if (act % 8 == 6)
            which = act / 8 % count; /* another in its place */
        else if (act % 8 == 7)
            buf_put(out, data, n < act ? n : act); /* something else before it */
        buf_put(out, s[which].bytes.p, s[which].bytes.n);
    }
    check(!out->failed);
    return same;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const struct lane_keys keys = {{1}, {2}};
    static const struct id ticket = {{3}};
    const struct identity who = {.tenant = "fuzz", .role = ROLE_WRITER};
    struct channel *client, *server;
    struct sent s[FRAMES_MAX] = {0};
    struct buf way = {0};
    if (n < 3)
        return 0;
    bool from_server = data[0] & 1;
    unsigned count = data[0] / 2 % FRAMES_MAX + 1, next = 0;
    size_t step = data[1] ? data[1] : SIZE_MAX;
    data += 2, n -= 2;
    check(channel_create_lane(false, &who, &keys, &ticket, &client, NULL) == 0 &&
          channel_create_lane(true, &who, &keys, &ticket, &server, NULL) == 0);
    open_lane(client, server);
    struct channel *to = from_server ? client : server;
    for (unsigned i = 0; i < count; i++) {
        send_one(from_server ? server : client, from_server, n > 0 ? *data : 0, i + 1, &s[i]);
        if (n > 0)
            data++, n--;
    }
    bool same = travel(s, count, data, n, &way), good = true;
    for (size_t at = 0; at < way.n && good; at += step < way.n - at ? step : way.n - at) {
        size_t piece = step < way.n - at ? step : way.n - at;
        good = channel_input(to, way.p + at, piece, NULL) == 0 && take(to, s, count, &next);
    }
    check(!same || (good && next == count));
    for (unsigned i = 0; i < count; i++) {
        buf_free(&s[i].payload);
        buf_free(&s[i].bytes);
    }
    buf_free(&way);
    channel_free(client);
    channel_free(server);
    return 0;
}
