/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a bulk lane serves its ticket's holder once, for sealed chunks only, and ends with the session that
 * opened it; who brings anything else is turned away in bounded time and memory.
 * Method: a whole server with TLS in this process, and clients that break the rules.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "server/obs/metrics.h"
#include "tests/support/handmade.h"
#include "tests/support/served.h"

#define CHUNK_SIZE (1u << 20)

struct key {
    struct id ticket;
    struct lane_keys keys;
};

static struct channel_config *user(enum client_role role)
{
    return served_user("acme", role);
}

static void tell(struct caller *c, uint16_t opcode, struct buf b, struct slice tail)
{
    struct answer a;
    caller_send(c, opcode, 0, &b, tail);
    if (!caller_answer(c, &a) || a.err.class != ERR_NONE)
        fail_msg("%s: %s %s", opcode_name(opcode), a.err.text, c->err.text);
    answer_free(&a);
}

static enum err_class ask(struct caller *tls, struct key *k)
{
    struct answer a;
    struct msg_lane_open_reply m;
    enum err_class class = caller_call(tls, OP_LANE_OPEN, NULL, &a);
    if (class == ERR_NONE) {
        struct rcur in = rcur_of(a.payload, a.header.payload_bytes);
        assert_int_equal(msg_lane_open_reply_decode(&in, &m, NULL), 0);
        assert_true(m.life_ms > 0);
        k->ticket = m.ticket;
        assert_int_equal(
            channel_export(tls->channel, LANE_LABEL, &k->ticket, sizeof k->ticket, &k->keys, sizeof k->keys),
            0);
    }
    answer_free(&a);
    return class;
}

static void open_lane(struct caller *tls, const struct served *s, struct caller *lane)
{
    struct key k;
    assert_int_equal(ask(tls, &k), ERR_NONE);
    caller_lane(lane, s, &k.keys, &k.ticket);
    if (lane->closed)
        fail_msg("the lane was refused: %s", lane->err.text);
}

static enum err_class ping(struct caller *c)
{
    struct answer a;
    enum err_class class = caller_call(c, OP_PING, NULL, &a);
    answer_free(&a);
    return class;
}

static void refused(const struct served *s, const struct key *k)
{
    struct caller lane;
    int64_t before = metric_get(METRIC_lanes_refused);
    caller_lane(&lane, s, &k->keys, &k->ticket);
    assert_true(lane.closed);
    assert_false(channel_ready(lane.channel));
    caller_close(&lane);
    assert_true(metric_get(METRIC_lanes_refused) > before);
}

/* A part whose chunks travel on the lane, and all else over TLS; it comes back the same both ways. */
static void chunks_travel_on_a_lane(void **state)
{
    (void)state;
    for (size_t loops = 1; loops <= 3; loops += 2) {
        struct served s;
        struct caller tls, lane;
        struct handmade p;
        struct buf index = {0};
        served_start(&s, &(struct served_options){.loop_count = loops});
        caller_join(&tls, &s, user(ROLE_WRITER));
        open_lane(&tls, &s, &lane);
        handmade_make(&p, CHUNK_SIZE, 0);
        tell(&tls, OP_RUN_OPEN, handmade_run_open(&p), (struct slice){0});
        tell(&tls, OP_ATTEMPT, handmade_attempt(&p), (struct slice){0});
        tell(&tls, OP_SEGMENT_CREATE, handmade_create(&p, "acme"), (struct slice){0});
        for (uint32_t i = 0; i < PART_CHUNKS; i++)
            tell(&lane, OP_SEGMENT_CHUNK, handmade_chunk(&p, i), handmade_chunk_tail(&p, i));
        struct buf b = handmade_index(&p, &index);
        tell(&tls, OP_SEGMENT_INDEX, b, SLICE(index.p, index.n));
        buf_free(&index);
        tell(&tls, OP_SEGMENT_SEAL, handmade_seal(&p), (struct slice){0});

        struct caller *ways[] = {&tls, &lane};
        const struct range all[] = {{p.bytes_offset, PART_CHUNKS * (uint64_t)CHUNK_SIZE},
                                    {p.bytes_offset + 100, 5000},
                                    {p.bytes_offset + 3, 2 * CHUNK_SIZE}};
        for (int way = 0; way < 2; way++) {
            struct buf got = {0};
            struct buf read = handmade_read(&p, UINT32_MAX, all, 3);
            uint64_t id = caller_send(ways[way], OP_READ, 0, &read, (struct slice){0});
            for (bool more = true; more;) {
                struct answer a;
                assert_true(caller_answer(ways[way], &a));
                assert_int_equal(a.header.request_id, id);
                assert_int_equal(a.err.class, ERR_NONE);
                buf_put(&got, a.payload, a.header.payload_bytes);
                more = a.header.flags & FRAME_MORE;
                answer_free(&a);
            }
            assert_int_equal(got.n, PART_CHUNKS * CHUNK_SIZE + 5000 + 2 * CHUNK_SIZE);
            assert_memory_equal(got.p, p.bytes, all[0].bytes);
            assert_memory_equal(got.p + all[0].bytes, p.bytes + 100, 5000);
            assert_memory_equal(got.p + all[0].bytes + 5000, p.bytes + 3, all[2].bytes);
            buf_free(&got);
        }
        caller_close(&lane);
        caller_close(&tls);
        handmade_free(&p);
        served_stop(&s, 1000);
        assert_int_equal(metric_get(METRIC_lanes_open), 0);
    }
}

static void only_sealed_chunks_may(void **state)
{
    (void)state;
    static const uint16_t forbidden[] = {OP_HELLO,          OP_STATUS,        OP_LANE_OPEN,    OP_RUN_OPEN,
                                         OP_SEGMENT_CREATE, OP_SEGMENT_INDEX, OP_SEGMENT_SEAL, OP_JOIN,
                                         OP_COMMIT_GET,     OP_PUBLISHED_LIST};
    struct served s;
    struct caller tls, lane;
    served_start(&s, &(struct served_options){.loop_count = 1});
    caller_join(&tls, &s, user(ROLE_ADMIN));
    for (size_t i = 0; i < sizeof forbidden / sizeof forbidden[0]; i++) {
        struct answer a;
        open_lane(&tls, &s, &lane);
        assert_int_equal(ping(&lane), ERR_NONE);
        assert_int_equal(caller_call(&lane, forbidden[i], NULL, &a), ERR_PROTOCOL);
        answer_free(&a);
        assert_true(caller_drained(&lane)); /* and the lane is closed */
        caller_close(&lane);
    }
    /* plain bytes are not for a lane either, and a reader does not write there */
    struct answer a;
    struct buf b = {0};
    open_lane(&tls, &s, &lane);
    struct msg_read m = {.source = READ_PUBLISHED, .class = 1};
    msg_read_encode(&m, &b);
    assert_int_equal(caller_call(&lane, OP_READ, &b, &a), ERR_INVALID);
    assert_non_null(strstr(a.err.text, "TLS"));
    answer_free(&a);
    caller_close(&lane);
    caller_close(&tls);
    caller_join(&tls, &s, user(ROLE_READER));
    open_lane(&tls, &s, &lane);
    assert_int_equal(caller_call(&lane, OP_SEGMENT_CHUNK, NULL, &a), ERR_DENIED);
    answer_free(&a);
    caller_close(&lane);
    caller_close(&tls);
    served_stop(&s, 1000);
}

static void a_ticket_serves_its_holder_once(void **state)
{
    (void)state;
    struct served s;
    struct caller tls, rival, lane;
    struct key k, foreign;
    served_start(&s, &(struct served_options){.loop_count = 2});
    caller_join(&tls, &s, user(ROLE_WRITER));
    caller_join(&rival, &s, served_user("rival", ROLE_ADMIN));
    assert_int_equal(ask(&tls, &k), ERR_NONE);
    caller_lane(&lane, &s, &k.keys, &k.ticket);
    assert_false(lane.closed);
    refused(&s, &k); /* again, while it is in use */
    assert_int_equal(ping(&lane), ERR_NONE);
    caller_close(&lane);
    refused(&s, &k); /* and afterwards */

    /* Another tenant who has seen the ticket has other keys for it. */
    assert_int_equal(ask(&tls, &k), ERR_NONE);
    foreign.ticket = k.ticket;
    assert_int_equal(channel_export(rival.channel, LANE_LABEL, &k.ticket, sizeof k.ticket, &foreign.keys,
                                    sizeof foreign.keys),
                     0);
    refused(&s, &foreign);
    refused(&s, &k); /* it was used up by that */

    foreign.ticket.bytes[3] ^= 1; /* none at all */
    refused(&s, &foreign);
    assert_int_equal(ping(&tls), ERR_NONE);
    caller_close(&tls);
    caller_close(&rival);
    served_stop(&s, 1000);
}

static void lanes_end_with_their_session(void **state)
{
    (void)state;
    enum { LANES = 6 };
    struct served s;
    struct caller tls, other, lanes[LANES], others;
    struct key late;
    served_start(&s, &(struct served_options){.loop_count = 3});
    caller_join(&tls, &s, user(ROLE_WRITER));
    caller_join(&other, &s, user(ROLE_WRITER));
    open_lane(&other, &s, &others);
    for (int i = 0; i < LANES; i++)
        open_lane(&tls, &s, &lanes[i]);
    assert_int_equal(metric_get(METRIC_lanes_open), LANES + 1);
    assert_int_equal(ask(&tls, &late), ERR_NONE);
    caller_close(&tls);
    for (int i = 0; i < LANES; i++) {
        assert_true(caller_drained(&lanes[i]));
        caller_close(&lanes[i]);
    }
    refused(&s, &late);
    assert_int_equal(ping(&others), ERR_NONE);
    caller_close(&others);
    caller_close(&other);
    served_stop(&s, 1000);
    assert_int_equal(metric_get(METRIC_lanes_open), 0);
}

/* Changed on the way: the client is told in a sentence, nothing of the frame is acted upon. */
static void a_changed_frame_ends_the_lane(void **state)
{
    (void)state;
    struct served s;
    struct caller tls, lane;
    struct answer a;
    served_start(&s, &(struct served_options){.loop_count = 1});
    caller_join(&tls, &s, user(ROLE_WRITER));
    open_lane(&tls, &s, &lane);
    struct frame_header h = {.opcode = OP_PING, .request_id = 5};
    int64_t before = metric_get(METRIC_lanes_tampered);
    assert_int_equal(channel_send(lane.channel, &h, SLICE(NULL, 0), SLICE(NULL, 0), &lane.err), 0);
    size_t n;
    uint8_t *frame = channel_output_take(lane.channel, &n);
    frame[16] ^= 1; /* the request's id */
    caller_send_raw(&lane, frame, n);
    free(frame);
    assert_true(caller_answer(&lane, &a));
    assert_int_equal(a.err.class, ERR_CORRUPT);
    assert_int_equal(a.header.opcode, OP_HELLO);
    assert_int_equal(a.header.request_id, 0);
    answer_free(&a);
    assert_true(caller_drained(&lane));
    caller_close(&lane);
    assert_int_equal(metric_get(METRIC_lanes_tampered), before + 1);
    assert_int_equal(ping(&tls), ERR_NONE);
    caller_close(&tls);
    served_stop(&s, 1000);
}

static void a_site_may_forbid_lanes(void **state)
{
    (void)state;
    struct served s;
    struct caller tls, lane;
    struct key k = {0};
    struct answer a;
    served_start(&s, &(struct served_options){.loop_count = 1, .no_bulk_lane = true});
    caller_open(&tls, &s, user(ROLE_WRITER));
    struct buf b = {0};
    struct msg_hello m = {.features = FEATURES_KNOWN, .software = slice_str("test")};
    struct msg_hello_reply reply;
    msg_hello_encode(&m, &b);
    assert_int_equal(caller_call(&tls, OP_HELLO, &b, &a), ERR_NONE);
    struct rcur in = rcur_of(a.payload, a.header.payload_bytes);
    assert_int_equal(msg_hello_reply_decode(&in, &reply, NULL), 0);
    assert_int_equal(reply.features, FEATURES_KNOWN & ~(1ull << FEATURE_BULK_LANE));
    answer_free(&a);
    assert_int_equal(ask(&tls, &k), ERR_UNSUPPORTED);
    caller_lane(&lane, &s, &k.keys, &k.ticket);
    assert_true(lane.closed);
    caller_close(&lane);
    assert_int_equal(caller_call(&tls, OP_STATUS, NULL, &a), ERR_NONE);
    struct msg_status_reply status;
    in = rcur_of(a.payload, a.header.payload_bytes);
    assert_int_equal(msg_status_reply_decode(&in, &status, NULL), 0);
    json_t *o = json_loadb((const char *)status.json.p, status.json.n, 0, NULL);
    assert_string_equal(json_string_value(json_object_get(o, "transport")), "TLS 1.3");
    json_decref(o);
    answer_free(&a);
    caller_close(&tls);
    served_stop(&s, 1000);
}

/* Tickets of one session are bounded, and a lane that closes makes room. */
static void tickets_are_bounded(void **state)
{
    (void)state;
    struct served s;
    struct caller tls, lane;
    struct key k, one;
    unsigned got = 0;
    enum err_class class;
    served_start(&s, &(struct served_options){.loop_count = 1});
    caller_join(&tls, &s, user(ROLE_WRITER));
    while ((class = ask(&tls, &k)) == ERR_NONE && ++got < 1000)
        one = k;
    assert_int_equal(class, ERR_BUSY);
    assert_int_equal(got, 64);
    caller_lane(&lane, &s, &one.keys, &one.ticket);
    assert_false(lane.closed);
    assert_int_equal(ask(&tls, &k), ERR_BUSY); /* the lane counts in the ticket's place */
    caller_close(&lane);
    caller_close(&tls);
    caller_join(&tls, &s, user(ROLE_WRITER));
    assert_int_equal(ask(&tls, &k), ERR_NONE); /* another session has its own */
    caller_close(&tls);
    served_stop(&s, 1000);
}

/* Openings that trickle, stop, or lead nowhere: each is over in bounded time, and others are served. */
static void bad_openings_are_bounded(void **state)
{
    (void)state;
    enum { FLOOD = 200 };
    struct served s;
    struct caller tls, bad;
    struct key k = {0};
    served_start(
        &s, &(struct served_options){.loop_count = 1, .limits = {.handshake_ms = 300, .sessions_max = 32}});
    caller_join(&tls, &s, user(ROLE_WRITER));
    for (unsigned i = 0; i < FLOOD; i++) {
        memset(&k.ticket, (int)i, sizeof k.ticket);
        caller_lane(&bad, &s, &k.keys, &k.ticket);
        assert_true(bad.closed);
        caller_close(&bad);
        if (i % 50 == 0)
            assert_int_equal(ping(&tls), ERR_NONE);
    }
    /* the opening of no lane that we know */
    static const char *const wrong[] = {"LRLN\2\0\0\0aaaaaaaaaaaaaaaa", "LRLN\1\0\1\0aaaaaaaaaaaaaaaa",
                                        "LRLX\1\0\0\0aaaaaaaaaaaaaaaa", "L", "LRLN\1"};
    static const size_t sizes[] = {24, 24, 24, 1, 5};
    for (int i = 0; i < 5; i++) {
        caller_dial(&bad, &s);
        caller_send_raw(&bad, wrong[i], sizes[i]);
        assert_true(caller_drained(&bad));
        caller_close(&bad);
    }
    assert_int_equal(ping(&tls), ERR_NONE);
    caller_close(&tls);
    served_stop(&s, 1000);
}

/* A stop lets reads on lanes come to their end. */
static void a_stop_ends_lanes(void **state)
{
    (void)state;
    struct served s;
    struct caller tls, lane;
    served_start(&s, &(struct served_options){.loop_count = 2});
    caller_join(&tls, &s, user(ROLE_WRITER));
    open_lane(&tls, &s, &lane);
    served_stop_begin(&s, 60000);
    assert_true(caller_drained(&lane));
    assert_true(caller_drained(&tls)); /* long before the bound */
    caller_close(&lane);
    caller_close(&tls);
    served_stop_end(&s);
}

static json_int_t sessions_of(struct caller *c, unsigned loop)
{
    struct answer a;
    struct msg_status_reply m;
    char name[32];
    assert_int_equal(caller_call(c, OP_STATUS, NULL, &a), ERR_NONE);
    struct rcur in = rcur_of(a.payload, a.header.payload_bytes);
    assert_int_equal(msg_status_reply_decode(&in, &m, NULL), 0);
    json_t *o = json_loadb((const char *)m.json.p, m.json.n, 0, NULL);
    answer_free(&a);
    snprintf(name, sizeof name, "loop_%u_sessions", loop);
    json_int_t n = json_integer_value(json_object_get(o, name));
    json_decref(o);
    return n;
}

/* Whichever loop's listener the kernel gives them to: as many on each loop, and as many lanes. */
static void connections_are_spread_over_the_loops(void **state)
{
    (void)state;
    struct served s;
    struct caller tls[3], lanes[6];
    served_start(&s, &(struct served_options){.loop_count = 3});
    for (unsigned i = 0; i < 3; i++)
        caller_join(&tls[i], &s, user(ROLE_ADMIN));
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(sessions_of(&tls[0], i), 1);
    for (unsigned i = 0; i < 6; i++) {
        open_lane(&tls[i % 2], &s, &lanes[i]);
        assert_int_equal(ping(&lanes[i]), ERR_NONE);
    }
    for (unsigned i = 0; i < 3; i++)
        assert_int_equal(sessions_of(&tls[0], i), 3);
    for (unsigned i = 0; i < 6; i++)
        caller_close(&lanes[i]);
    for (unsigned i = 0; i < 3; i++)
        caller_close(&tls[i]);
    served_stop(&s, 1000);
    assert_int_equal(metric_get(METRIC_sessions_open), 0);
}

/* A client's connection that waits for orders counts like one at work: those at work are dealt out evenly all
 * the same. */
static void connections_of_one_client_are_dealt_out(void **state)
{
    (void)state;
    struct served s;
    struct caller idle, busy[4];
    served_start(&s, &(struct served_options){.loop_count = 2});
    caller_join(&idle, &s, user(ROLE_ADMIN));
    unsigned its = sessions_of(&idle, 0) == 1 ? 0 : 1;
    for (unsigned i = 0; i < 4; i++)
        caller_join(&busy[i], &s, user(ROLE_ADMIN));
    assert_int_equal(sessions_of(&idle, its), 3);
    assert_int_equal(sessions_of(&idle, 1 - its), 2);
    for (unsigned i = 0; i < 4; i++)
        caller_close(&busy[i]);
    caller_close(&idle);
    served_stop(&s, 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_travel_on_a_lane),
        cmocka_unit_test(only_sealed_chunks_may),
        cmocka_unit_test(a_ticket_serves_its_holder_once),
        cmocka_unit_test(lanes_end_with_their_session),
        cmocka_unit_test(a_changed_frame_ends_the_lane),
        cmocka_unit_test(a_site_may_forbid_lanes),
        cmocka_unit_test(tickets_are_bounded),
        cmocka_unit_test(bad_openings_are_bounded),
        cmocka_unit_test(a_stop_ends_lanes),
        cmocka_unit_test(connections_are_spread_over_the_loops),
        cmocka_unit_test(connections_of_one_client_are_dealt_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
