/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: what travels on a bulk lane arrives as it was sent, or the lane breaks; tags are those of RFC 8439.
 * Method: known answers computed by an independent implementation; both ends in one process, with an
 * adversary between them who changes every byte, drops, repeats and swaps frames.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/channel.h"
#include "format/lane.h"

#define FRAMES_MAX 8
#define TAIL_BYTES 300

static const struct identity acme = {.tenant = "acme", .role = ROLE_WRITER};
static struct lane_keys keys;
static struct id ticket;

static int set_up(void **state)
{
    (void)state;
    for (unsigned i = 0; i < sizeof keys; i++)
        ((uint8_t *)&keys)[i] = (uint8_t)i;
    memset(&ticket, 0x5a, sizeof ticket);
    return 0;
}

static void expect_tag(struct lane_mac *m, const void *p, size_t n, const char *hex)
{
    uint8_t tag[LANE_TAG_BYTES];
    char found[2 * LANE_TAG_BYTES + 1];
    lane_mac_tag(m, SLICE(p, n / 3), SLICE((const uint8_t *)p + n / 3, n - n / 3), tag);
    hex_encode(tag, sizeof tag, found);
    assert_string_equal(found, hex);
}

static void tags_are_those_of_rfc_8439(void **state)
{
    (void)state;
    uint8_t hundred[100];
    for (unsigned i = 0; i < sizeof hundred; i++)
        hundred[i] = (uint8_t)i;
    struct lane_mac *up = lane_mac_create(false, keys.to_server),
                    *down = lane_mac_create(true, keys.to_server);
    expect_tag(up, "larder", 6, "4b456cc8abbd759285666372730ac3e9");
    expect_tag(up, "larder", 6, "8cb56f0c144d1191b11b69ff24a682e4"); /* the count differs */
    expect_tag(up, hundred, 100, "661628af3e8fae383216ae91947f0fd2");
    expect_tag(down, "larder", 6, "4eaad961fefbb833d692af7bf6fefef7"); /* and the direction */
    expect_tag(down, "", 0, "b3e581a01904d619c90aeb6da1dcfe57");
    assert_int_equal(lane_mac_count(up), 3);
    lane_mac_free(up);
    lane_mac_free(down);
}

/* However a payload is cut, its tag is the same. */
static void tags_in_pieces_are_the_same(void **state)
{
    (void)state;
    enum { BYTES = 70000 };
    static const size_t steps[] = {1, 15, 16, 17, 60, 4096, 16384, 16385, BYTES};
    uint8_t *p = malloc(BYTES), want[LANE_TAG_BYTES], found[LANE_TAG_BYTES];
    for (size_t i = 0; i < BYTES; i++)
        p[i] = (uint8_t)(i * 7 + i / 256);
    struct lane_mac *whole = lane_mac_create(false, keys.to_server),
                    *pieces = lane_mac_create(false, keys.to_server);
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        for (size_t n = BYTES - 17; n <= BYTES; n += 17) {
            lane_mac_tag(whole, SLICE(p, n), SLICE(NULL, 0), want);
            lane_mac_begin(pieces);
            for (size_t at = 0; at < n; at += steps[i])
                lane_mac_add(pieces, SLICE(p + at, n - at < steps[i] ? n - at : steps[i]));
            lane_mac_end(pieces, found);
            assert_memory_equal(found, want, sizeof want);
        }
    want[3] ^= 1;
    lane_mac_begin(pieces);
    assert_int_equal(lane_mac_end_check(pieces, want), -EBADMSG);
    lane_mac_free(whole);
    lane_mac_free(pieces);
    free(p);
}

/* ---- two ends ---- */

struct lane {
    struct channel *client, *server;
};

/* Bytes that are taken from one end, to be given to the other. */
static struct buf taken(struct channel *c)
{
    struct buf b = {0};
    struct slice s = channel_output(c);
    buf_put(&b, s.p, s.n);
    assert_false(b.failed);
    channel_output_done(c, s.n);
    return b;
}

static void give(struct channel *to, struct buf b)
{
    struct err e;
    assert_int_equal(channel_input(to, b.p, b.n, &e), 0);
    buf_free(&b);
}

static struct lane lane_ends(const struct lane_keys *of_client)
{
    struct lane l;
    struct err e;
    assert_int_equal(channel_create_lane(false, &acme, of_client, &ticket, &l.client, &e), 0);
    assert_int_equal(channel_create_lane(true, &acme, &keys, &ticket, &l.server, &e), 0);
    return l;
}

static struct lane lane_open(void)
{
    struct lane l = lane_ends(&keys);
    give(l.server, taken(l.client));
    assert_true(channel_ready(l.server));
    assert_false(channel_ready(l.client));
    give(l.client, taken(l.server));
    assert_true(channel_ready(l.client));
    assert_string_equal(channel_peer(l.server)->tenant, "acme");
    channel_allow_large(l.server);
    channel_allow_large(l.client);
    return l;
}

static void lane_close(struct lane *l)
{
    channel_free(l->client);
    channel_free(l->server);
}

struct sent {
    struct frame_header header;
    uint8_t tail[TAIL_BYTES];
    size_t tail_bytes;
    struct buf bytes; /* as they travel */
};

/* Three or so frames of one direction. The server's are answers to reads but for the last. */
static unsigned talk(struct channel *from, bool server, struct sent *s)
{
    static const size_t sizes[] = {TAIL_BYTES, 0, 1, 100};
    struct err e;
    unsigned n = sizeof sizes / sizeof sizes[0];
    for (unsigned i = 0; i < n; i++) {
        s[i].tail_bytes = sizes[i];
        memset(s[i].tail, (int)(0x40 + i), sizes[i]);
        s[i].header = (struct frame_header){.opcode = server && i + 1 < n ? OP_READ
                                                      : server            ? OP_PING
                                                                          : OP_SEGMENT_CHUNK,
                                            .flags = server ? FRAME_RESPONSE : 0,
                                            .request_id = i + 1};
        assert_int_equal(channel_send(from, &s[i].header, SLICE(s[i].tail, sizes[i] / 2),
                                      SLICE(s[i].tail + sizes[i] / 2, sizes[i] - sizes[i] / 2), &e),
                         0);
        s[i].bytes = taken(from);
    }
    return n;
}

/* Takes what came. Frames that come must be those sent, in order, but for bytes of sealed chunks. Returns how
 * many; *broken: the lane broke. */
static unsigned hear(struct channel *to, const struct sent *s, bool whole_payload, bool *broken,
                     struct err *e)
{
    struct frame f;
    unsigned n = 0;
    int rc;
    while ((rc = channel_frame(to, &f, e)) == 1) {
        assert_int_equal(f.header.request_id, s[n].header.request_id);
        assert_int_equal(f.header.opcode, s[n].header.opcode);
        assert_int_equal(f.header.flags, s[n].header.flags);
        assert_int_equal(f.header.payload_bytes, s[n].tail_bytes);
        if (whole_payload || f.header.opcode != OP_READ)
            assert_memory_equal(f.payload, s[n].tail, s[n].tail_bytes);
        channel_frame_done(to);
        n++;
    }
    *broken = rc < 0;
    return n;
}

static void free_sent(struct sent *s, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        buf_free(&s[i].bytes);
}

static void frames_arrive(void **state)
{
    (void)state;
    for (int server = 0; server < 2; server++) {
        for (size_t step = 1; step < 700; step += step < 20 ? 1 : 97) {
            struct lane l = lane_open();
            struct sent s[FRAMES_MAX];
            struct err e;
            bool broken;
            struct buf all = {0};
            unsigned n = talk(server ? l.server : l.client, server, s), got = 0;
            for (unsigned i = 0; i < n; i++)
                buf_put(&all, s[i].bytes.p, s[i].bytes.n);
            struct channel *to = server ? l.client : l.server;
            for (size_t at = 0; at < all.n; at += step) {
                size_t now = all.n - at < step ? all.n - at : step;
                assert_int_equal(channel_input(to, all.p + at, now, &e), 0);
                got += hear(to, s + got, true, &broken, &e);
                assert_false(broken);
            }
            assert_int_equal(got, n);
            assert_false(channel_partial(to));
            buf_free(&all);
            free_sent(s, n);
            lane_close(&l);
        }
    }
}

/* Every byte of the conversation, each way. What is not noticed may only be bytes of sealed chunks, which the
 * chunks' own tags cover. */
static void every_changed_byte_is_noticed(void **state)
{
    (void)state;
    for (int server = 0; server < 2; server++) {
        size_t unnoticed = 0, total = 1;
        for (size_t at = 0; at < total; at++) {
            struct lane l = lane_open();
            struct sent s[FRAMES_MAX];
            struct err e = {0};
            bool broken;
            struct buf all = {0};
            unsigned n = talk(server ? l.server : l.client, server, s);
            for (unsigned i = 0; i < n; i++)
                buf_put(&all, s[i].bytes.p, s[i].bytes.n);
            total = all.n;
            all.p[at] ^= 1u << at % 8;
            struct channel *to = server ? l.client : l.server;
            assert_int_equal(channel_input(to, all.p, all.n, &e), 0);
            unsigned got = hear(to, s, false, &broken, &e);
            if (broken) {
                assert_int_equal(e.class, ERR_CORRUPT);
                assert_non_null(strstr(e.text, server ? "server" : "client"));
                assert_true(got < n);
            } else {
                unnoticed++;
            }
            buf_free(&all);
            free_sent(s, n);
            lane_close(&l);
        }
        /* of the answers to reads: 300, 0 and 1 bytes */
        assert_int_equal(unnoticed, server ? TAIL_BYTES + 1 : 0);
    }
}

/* Orders in which frames may be given instead of 0 1 2 3: dropped, repeated, swapped, replayed. */
static void frames_elsewhere_are_noticed(void **state)
{
    (void)state;
    static const struct {
        unsigned order[6], count, good; /* good: frames that may still be taken */
    } cases[] = {
        {{1, 2, 3}, 3, 0},       {{0, 2, 3}, 3, 1},       {{0, 0, 1, 2, 3}, 5, 1},
        {{1, 0, 2, 3}, 4, 0},    {{0, 2, 1, 3}, 4, 1},    {{0, 1, 3, 2}, 4, 2},
        {{0, 1, 2, 3, 3}, 5, 4}, {{0, 1, 2, 3, 0}, 5, 4}, {{0, 1, 1}, 3, 2},
    };
    for (int server = 0; server < 2; server++) {
        for (unsigned i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            struct lane l = lane_open();
            struct sent s[FRAMES_MAX];
            struct err e = {0};
            bool broken;
            unsigned n = talk(server ? l.server : l.client, server, s);
            struct channel *to = server ? l.client : l.server;
            for (unsigned k = 0; k < cases[i].count; k++) {
                const struct buf *b = &s[cases[i].order[k]].bytes;
                assert_int_equal(channel_input(to, b->p, b->n, &e), 0);
            }
            assert_int_equal(hear(to, s, true, &broken, &e), cases[i].good);
            assert_true(broken);
            assert_int_equal(e.class, ERR_CORRUPT);
            free_sent(s, n);
            lane_close(&l);
        }
    }
}

/* A frame sent back to where it came from, or one of another lane with the same number. */
static void frames_of_others_are_noticed(void **state)
{
    (void)state;
    struct lane l = lane_open();
    struct sent s[FRAMES_MAX];
    struct err e = {0};
    bool broken;
    unsigned n = talk(l.client, false, s);
    assert_int_equal(channel_input(l.client, s[0].bytes.p, s[0].bytes.n, &e), 0);
    assert_int_equal(hear(l.client, s, true, &broken, &e), 0);
    assert_true(broken);
    free_sent(s, n);
    lane_close(&l);

    struct lane_keys mine = keys;
    keys.to_server[7] ^= 1; /* of another ticket */
    struct lane other = lane_open();
    keys = mine;
    l = lane_open();
    n = talk(other.client, false, s);
    assert_int_equal(channel_input(l.server, s[0].bytes.p, s[0].bytes.n, &e), 0);
    assert_int_equal(hear(l.server, s, true, &broken, &e), 0);
    assert_true(broken);
    free_sent(s, n);
    lane_close(&other);
    lane_close(&l);
}

static void an_opening_is_its_holders(void **state)
{
    (void)state;
    for (size_t at = 0; at <= LANE_HELLO_BYTES; at++) { /* the last: unchanged, with other keys */
        struct lane_keys wrong = keys;
        struct err e = {0};
        if (at == LANE_HELLO_BYTES)
            wrong.to_server[0] ^= 1;
        struct lane l = lane_ends(&wrong);
        struct buf hello = taken(l.client);
        assert_int_equal(hello.n, LANE_HELLO_BYTES);
        if (at < LANE_HELLO_BYTES)
            hello.p[at] ^= 0x10;
        assert_true(channel_input(l.server, hello.p, hello.n, &e) < 0);
        assert_true(e.class == ERR_DENIED || (at < 8 && (e.class == ERR_PROTOCOL || e.class == ERR_VERSION)));
        assert_false(channel_ready(l.server));
        assert_int_equal(channel_output(l.server).n, 0);
        buf_free(&hello);
        lane_close(&l);
    }
    for (size_t at = 0; at < LANE_HELLO_BYTES; at++) {
        struct err e = {0};
        struct lane l = lane_ends(&keys);
        give(l.server, taken(l.client));
        struct buf welcome = taken(l.server);
        assert_int_equal(welcome.n, LANE_HELLO_BYTES);
        welcome.p[at] ^= 0x10;
        assert_true(channel_input(l.client, welcome.p, welcome.n, &e) < 0);
        assert_false(channel_ready(l.client));
        buf_free(&welcome);
        lane_close(&l);
    }
}

/* The hello given back to the client is no welcome. */
static void an_opening_cannot_be_reflected(void **state)
{
    (void)state;
    struct err e = {0};
    struct lane l = lane_ends(&keys);
    struct buf hello = taken(l.client);
    assert_true(channel_input(l.client, hello.p, hello.n, &e) < 0);
    assert_int_equal(e.class, ERR_DENIED);
    buf_free(&hello);
    lane_close(&l);
}

/* Bytes put straight into the payload, and heads whose tail the caller sends, are the same frames. */
static void frames_without_copies_are_the_same(void **state)
{
    (void)state;
    struct lane l = lane_open();
    struct err e;
    struct frame f;
    struct frame_header h = {.opcode = OP_READ, .flags = FRAME_RESPONSE | FRAME_MORE, .request_id = 9};
    uint8_t tail[TAIL_BYTES];
    size_t n;
    memset(tail, 0x77, sizeof tail);
    assert_null(channel_place(l.client, 0, &n));
    assert_int_equal(channel_send_head(l.server, &h, sizeof tail, &e), 0);
    give(l.client, taken(l.server));
    for (size_t at = 0; at < sizeof tail; at += 100) {
        uint8_t *place = channel_place(l.client, 0, &n);
        assert_non_null(place);
        assert_int_equal(n, sizeof tail - at);
        memcpy(place, tail + at, 100);
        assert_int_equal(channel_placed(l.client, 100, &e), 0);
    }
    assert_int_equal(channel_frame(l.client, &f, &e), 1);
    assert_int_equal(f.header.payload_bytes, sizeof tail);
    assert_memory_equal(f.payload, tail, sizeof tail);
    channel_frame_done(l.client);

    struct sent s[FRAMES_MAX]; /* and with a tag behind the payload */
    bool broken;
    unsigned count = talk(l.client, false, s);
    assert_int_equal(channel_input(l.server, s[0].bytes.p, FRAME_HEADER_BYTES + LANE_TAG_BYTES, &e), 0);
    uint8_t *place = channel_place(l.server, 0, &n);
    assert_int_equal(n, TAIL_BYTES);
    memcpy(place, s[0].tail, n);
    assert_int_equal(channel_placed(l.server, n, &e), 0);
    assert_int_equal(channel_frame(l.server, &f, &e), 0);
    assert_int_equal(
        channel_input(l.server, s[0].bytes.p + s[0].bytes.n - LANE_TAG_BYTES, LANE_TAG_BYTES, &e), 0);
    assert_int_equal(hear(l.server, s, true, &broken, &e), 1);
    free_sent(s, count);
    lane_close(&l);
}

#define LENT_BYTES 300000

/* Moves at most `piece` bytes at a time from one end to the other, until nothing is left or `limit` has gone.
 */
static size_t move(struct channel *from, struct channel *to, size_t piece, size_t limit)
{
    struct err e;
    size_t moved = 0;
    while (moved < limit) {
        struct slice s = channel_output(from);
        size_t n = s.n < piece ? s.n : piece;
        if (n == 0)
            break;
        assert_true(n < s.n || channel_output_more(from) == (channel_lent(from) && s.n != LANE_TAG_BYTES));
        assert_int_equal(channel_input(to, s.p, n, &e), 0);
        channel_output_done(from, n);
        moved += n;
    }
    return moved;
}

/* A tail that is lent travels as if it had been copied; the lender may have it back at any moment. */
static void lent_tails_travel(void **state)
{
    (void)state;
    uint8_t *tail = malloc(LENT_BYTES), *pattern = malloc(LENT_BYTES);
    struct frame_header h = {.opcode = OP_SEGMENT_CHUNK, .request_id = 4};
    struct err e;
    struct frame f;
    for (size_t i = 0; i < LENT_BYTES; i++)
        pattern[i] = (uint8_t)(i * 3 + i / 1000);
    for (size_t back = 0; back <= LENT_BYTES + 1000; back += 50111) {
        struct lane l = lane_open();
        memcpy(tail, pattern, LENT_BYTES);
        assert_int_equal(channel_lend(l.client, &h, slice_str("message"), SLICE(tail, LENT_BYTES), &e), 0);
        assert_true(channel_lent(l.client));
        move(l.client, l.server, 7001, back);
        assert_int_equal(channel_lent_keep(l.client, &e), 0);
        memset(tail, 0, LENT_BYTES);
        move(l.client, l.server, 65536, SIZE_MAX);
        assert_false(channel_lent(l.client));
        assert_int_equal(channel_frame(l.server, &f, &e), 1);
        assert_int_equal(f.header.payload_bytes, 7 + LENT_BYTES);
        assert_memory_equal(f.payload, "message", 7);
        assert_memory_equal(f.payload + 7, pattern, LENT_BYTES);
        struct hash128 want = hash128(f.payload + CHUNK_MESSAGE_BYTES, 7 + LENT_BYTES - CHUNK_MESSAGE_BYTES);
        assert_true(f.summed); /* what lies behind a chunk's message, in whatever pieces it came */
        assert_memory_equal(&f.tail_hash, &want, sizeof want);
        channel_frame_done(l.server);
        /* Small ones are copied at once, and frames behind are in order. */
        assert_int_equal(channel_lend(l.client, &h, slice_str("small"), SLICE(pattern, 100), &e), 0);
        assert_false(channel_lent(l.client));
        move(l.client, l.server, SIZE_MAX, SIZE_MAX);
        assert_int_equal(channel_frame(l.server, &f, &e), 1);
        channel_frame_done(l.server);
        lane_close(&l);
    }
    free(tail);
    free(pattern);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(tags_are_those_of_rfc_8439, set_up),
        cmocka_unit_test_setup(tags_in_pieces_are_the_same, set_up),
        cmocka_unit_test_setup(frames_arrive, set_up),
        cmocka_unit_test_setup(every_changed_byte_is_noticed, set_up),
        cmocka_unit_test_setup(frames_elsewhere_are_noticed, set_up),
        cmocka_unit_test_setup(frames_of_others_are_noticed, set_up),
        cmocka_unit_test_setup(an_opening_is_its_holders, set_up),
        cmocka_unit_test_setup(an_opening_cannot_be_reflected, set_up),
        cmocka_unit_test_setup(frames_without_copies_are_the_same, set_up),
        cmocka_unit_test_setup(lent_tails_travel, set_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
