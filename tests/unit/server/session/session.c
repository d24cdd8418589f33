/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: sessions keep to PROTOCOL.md whatever the peer does, and leave nothing behind.
 * Method: a whole server in this process on loopback, and a client that can also break the rules.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>
#include <jansson.h>

#include "server/obs/metrics.h"
#include "tests/support/handmade.h"
#include "tests/support/served.h"

#define CHUNKS     PART_CHUNKS
#define CHUNK_SIZE (1u << 20)

static struct channel_config *writer(void)
{
    return served_user("acme", ROLE_WRITER);
}

static struct channel_config *reader(void)
{
    return served_user("acme", ROLE_READER);
}

static void expect(struct caller *c, uint16_t opcode, struct buf *b, enum err_class class)
{
    struct answer a;
    enum err_class got = caller_call(c, opcode, b, &a);
    if (got != class)
        fail_msg("%s: %s expected, %s found: %s", opcode_name(opcode), err_class_name(class),
                 err_class_name(got), a.err.text);
    answer_free(&a);
}

static void tell(struct caller *c, uint16_t opcode, struct buf b, struct slice tail)
{
    struct answer a;
    caller_send(c, opcode, 0, &b, tail);
    assert_true(caller_answer(c, &a));
    if (a.err.class != ERR_NONE)
        fail_msg("%s: %s", opcode_name(opcode), a.err.text);
    answer_free(&a);
}

static void begin_part(struct caller *c, struct handmade *p)
{
    handmade_make(p, CHUNK_SIZE, 0);
    tell(c, OP_RUN_OPEN, handmade_run_open(p), (struct slice){0});
    tell(c, OP_ATTEMPT, handmade_attempt(p), (struct slice){0});
    tell(c, OP_SEGMENT_CREATE, handmade_create(p, "acme"), (struct slice){0});
}

static void finish_part(struct caller *c, struct handmade *p)
{
    struct buf index = {0};
    for (uint32_t i = 0; i < CHUNKS; i++)
        tell(c, OP_SEGMENT_CHUNK, handmade_chunk(p, i), handmade_chunk_tail(p, i));
    struct buf b = handmade_index(p, &index);
    tell(c, OP_SEGMENT_INDEX, b, SLICE(index.p, index.n));
    buf_free(&index);
    tell(c, OP_SEGMENT_SEAL, handmade_seal(p), (struct slice){0});
}

static void part_save(struct caller *c, struct handmade *p)
{
    begin_part(c, p);
    finish_part(c, p);
}

/* Gathers a stream's bytes up to its end, or until so many have come. Returns the class it ended with. */
static enum err_class gather(struct caller *c, uint64_t id, struct buf *out, size_t until, bool *ended)
{
    *ended = false;
    while (!*ended && out->n < until) {
        struct answer a;
        if (!caller_answer(c, &a))
            fail_msg("the stream was cut: %s", c->err.text);
        assert_int_equal(a.header.request_id, id);
        enum err_class class = a.err.class;
        *ended = !(a.header.flags & FRAME_MORE);
        if (class == ERR_NONE)
            buf_put(out, a.payload, a.header.payload_bytes);
        answer_free(&a);
        if (class != ERR_NONE)
            return class;
    }
    return ERR_NONE;
}

static json_t *status(struct caller *c)
{
    struct answer a;
    struct msg_status_reply m;
    assert_int_equal(caller_call(c, OP_STATUS, NULL, &a), ERR_NONE);
    struct rcur in = rcur_of(a.payload, a.header.payload_bytes);
    assert_int_equal(msg_status_reply_decode(&in, &m, NULL), 0);
    json_t *o = json_loadb((const char *)m.json.p, m.json.n, 0, NULL);
    assert_non_null(o);
    answer_free(&a);
    return o;
}

static json_int_t figure(json_t *o, const char *name)
{
    json_t *v = json_object_get(o, name);
    if (!json_is_integer(v))
        fail_msg("status has no number %s", name);
    return json_integer_value(v);
}

/* Everything that is counted up is back where it was: waits, since a closing session ends on its own. */
static void nothing_left(void)
{
    for (int i = 0; i < SERVED_PATIENCE_MS; i++) {
        if (metric_get(METRIC_sessions_open) == 0 && metric_get(METRIC_requests_in_flight) == 0)
            return;
        struct timespec ms = {.tv_nsec = 1000000};
        nanosleep(&ms, NULL);
    }
    fail_msg("%lld sessions and %lld requests are left", (long long)metric_get(METRIC_sessions_open),
             (long long)metric_get(METRIC_requests_in_flight));
}

/* Tests. */

static void hello_tells_who_is_who(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    struct answer a;
    struct buf b = {0};
    struct msg_hello m = {.features = FEATURES_KNOWN | 1u << 20, .software = slice_str("a\nb")};
    struct msg_hello_reply reply;
    served_start(&s, &(struct served_options){.loop_count = 2});
    caller_open(&c, &s, reader());
    msg_hello_encode(&m, &b);
    assert_int_equal(caller_call(&c, OP_HELLO, &b, &a), ERR_NONE);
    struct rcur in = rcur_of(a.payload, a.header.payload_bytes);
    assert_int_equal(msg_hello_reply_decode(&in, &reply, NULL), 0);
    assert_int_equal(reply.features, FEATURES_KNOWN); /* what both have; unknown optional bits are left out */
    assert_true(slice_eq(reply.tenant, slice_str("acme")));
    assert_int_equal(reply.role, ROLE_READER);
    assert_int_equal(reply.default_deadline_ms, 30000);
    assert_true(reply.server_time_ns > 1600000000ull * 1000000000ull);
    answer_free(&a);
    expect(&c, OP_PING, NULL, ERR_NONE);
    caller_close(&c);
    served_stop(&s, 1000);
    nothing_left();
}

static void roles_bound_what_is_asked(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    struct answer a;
    struct buf b = {0};
    static const struct {
        enum client_role role;
        uint16_t opcode;
        bool allowed;
    } cases[] = {
        {ROLE_READER, OP_ATTEMPT, false},
        {ROLE_READER, OP_SEGMENT_CHUNK, false},
        {ROLE_READER, OP_PRUNE, false},
        {ROLE_READER, OP_TENANT_LIST, false},
        {ROLE_READER, OP_ENVELOPE_PUT, false},
        {ROLE_READER, OP_SCRUB, false},
        {ROLE_READER, OP_COMMIT_LIST, true},
        {ROLE_READER, OP_READ, true},
        {ROLE_WRITER, OP_PRUNE, false},
        {ROLE_WRITER, OP_RUN_DESTROY, false},
        {ROLE_WRITER, OP_ENVELOPE_DROP, false},
        {ROLE_WRITER, OP_SCRUB, false},
        {ROLE_WRITER, OP_ATTEMPT, true},
        {ROLE_WRITER, OP_ENVELOPE_PUT, true},
        {ROLE_OPERATOR, OP_ATTEMPT, false},
        {ROLE_OPERATOR, OP_SEGMENT_CREATE, false},
        {ROLE_OPERATOR, OP_SEGMENT_INDEX, false},
        {ROLE_OPERATOR, OP_JOIN, false},
        {ROLE_OPERATOR, OP_COMMIT, false},
        {ROLE_OPERATOR, OP_TENANT_ADD, false},
        {ROLE_OPERATOR, OP_PRUNE, true},
        {ROLE_OPERATOR, OP_READ, true},
        {ROLE_ADMIN, OP_TENANT_LIST, true},
        {ROLE_ADMIN, OP_ATTEMPT, true},
        {ROLE_ADMIN, OP_PRUNE, true},
    };
    served_start(&s, &(struct served_options){0});
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        caller_join(&c, &s, served_user("acme", cases[i].role));
        /* Empty requests: past the role's check they are refused for another reason, or are done. */
        enum err_class class = caller_call(&c, cases[i].opcode, NULL, &a);
        if ((class != ERR_DENIED) != cases[i].allowed)
            fail_msg("%s asks %s: %s", role_name(cases[i].role), opcode_name(cases[i].opcode), a.err.text);
        if (!cases[i].allowed)
            assert_non_null(strstr(a.err.text, "needs the role"));
        answer_free(&a);
        caller_close(&c);
    }
    /* By what the message says: a reader may open, not make; a writer may report damage, not pin. */
    struct msg_run_open open = {.kind = 1, .name = slice_str("x"), .create = 1, .run_id = handmade_id(1)};
    caller_join(&c, &s, reader());
    msg_run_open_encode(&open, &b);
    expect(&c, OP_RUN_OPEN, &b, ERR_DENIED);
    open.create = 0;
    msg_run_open_encode(&open, &b);
    expect(&c, OP_RUN_OPEN, &b, ERR_NOT_FOUND);
    caller_close(&c);
    struct msg_mark mark = {.kind = 1, .name = slice_str("x"), .sequence = 1, .action = MARK_ACTION_PIN};
    caller_join(&c, &s, writer());
    msg_mark_encode(&mark, &b);
    expect(&c, OP_MARK, &b, ERR_DENIED);
    mark.action = MARK_ACTION_BAD;
    msg_mark_encode(&mark, &b);
    expect(&c, OP_MARK, &b, ERR_NOT_FOUND);
    caller_close(&c);
    served_stop(&s, 1000);
    nothing_left();
}

static void hello_comes_first_and_once(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    struct answer a;
    struct buf b = {0};
    served_start(&s, &(struct served_options){0});
    caller_open(&c, &s, writer());
    assert_int_equal(caller_call(&c, OP_PING, NULL, &a), ERR_PROTOCOL);
    assert_non_null(strstr(a.err.text, "hello must come first"));
    answer_free(&a);
    assert_true(caller_drained(&c));
    caller_close(&c);

    caller_join(&c, &s, writer());
    struct msg_hello m = {.software = slice_str("again")};
    msg_hello_encode(&m, &b);
    expect(&c, OP_HELLO, &b, ERR_PROTOCOL);
    assert_true(caller_drained(&c));
    caller_close(&c);

    caller_open(&c, &s, writer());
    m.features = 1ull << 40;
    msg_hello_encode(&m, &b);
    assert_int_equal(caller_call(&c, OP_HELLO, &b, &a), ERR_VERSION);
    assert_non_null(strstr(a.err.text, "feature 40"));
    answer_free(&a);
    assert_true(caller_drained(&c));
    caller_close(&c);
    served_stop(&s, 1000);
    nothing_left();
}

static void broken_frames_are_told_and_end_the_session(void **state)
{
    (void)state;
    static const struct {
        size_t at;
        uint8_t value;
        enum err_class class;
    } cases[] = {
        {0, 'X', ERR_PROTOCOL},  /* magic */
        {4, 2, ERR_VERSION},     /* protocol version */
        {8, 0x80, ERR_PROTOCOL}, /* unknown flag */
        {8, 1, ERR_PROTOCOL},    /* an answer's flag */
        {15, 0x7f, ERR_LIMIT},   /* payload of 2 GiB */
        {28, 1, ERR_PROTOCOL},   /* reserved */
    };
    struct served s;
    served_start(&s, &(struct served_options){.clear = true});
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct caller c;
        struct answer a;
        uint8_t head[FRAME_HEADER_BYTES];
        struct frame_header h = {.opcode = OP_PING, .request_id = 77};
        caller_join(&c, &s, NULL);
        frame_header_encode(&h, head);
        head[cases[i].at] = cases[i].value;
        caller_send_raw(&c, head, sizeof head);
        if (!caller_answer(&c, &a))
            fail_msg("case %zu: closed without a word", i);
        if (a.err.class != cases[i].class && !(cases[i].class == ERR_LIMIT && a.err.class == ERR_PROTOCOL))
            fail_msg("case %zu: %s", i, a.err.text);
        answer_free(&a);
        assert_true(caller_drained(&c));
        caller_close(&c);
    }
    served_stop(&s, 1000);
    nothing_left();
}

static void garbage_is_refused(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    uint8_t noise[3000];
    int64_t refused = metric_get(METRIC_sessions_refused);
    for (size_t i = 0; i < sizeof noise; i++)
        noise[i] = (uint8_t)(i * 131 + 7);
    served_start(&s, &(struct served_options){0});
    caller_open(&c, &s, reader()); /* a good one beside it goes on */
    for (int i = 0; i < 3; i++) {
        struct caller bad = {0};
        /* no TLS; TLS that breaks off; HTTP */
        static const char http[] = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
        static const uint8_t record[] = {0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 9, 9, 9, 9, 9, 9};
        struct caller open;
        caller_open(&open, &s, reader());
        bad.fd = open.fd;
        if (i == 0)
            caller_send_raw(&bad, noise, sizeof noise);
        else if (i == 1)
            caller_send_raw(&bad, record, sizeof record);
        else
            caller_send_raw(&bad, http, sizeof http - 1);
        assert_true(caller_drained(&open));
        caller_close(&open);
    }
    caller_close(&c);
    served_stop(&s, 1000);
    assert_true(metric_get(METRIC_sessions_refused) >= refused + 3);
    nothing_left();
}

static void trickle_and_silence_are_bounded(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    served_start(&s, &(struct served_options){
                         .clear = true, .limits = {.handshake_ms = 150, .frame_ms = 150, .idle_ms = 400}});
    /* silent before hello */
    caller_open(&c, &s, NULL);
    assert_true(caller_drained(&c));
    caller_close(&c);
    /* half a header, then nothing */
    caller_join(&c, &s, NULL);
    caller_send_raw(&c, "LRD1\1\0", 6);
    assert_true(caller_drained(&c));
    caller_close(&c);
    /* a header that announces more than comes */
    uint8_t head[FRAME_HEADER_BYTES];
    struct frame_header h = {.opcode = OP_JOIN, .request_id = 1, .payload_bytes = 4000};
    caller_join(&c, &s, NULL);
    frame_header_encode(&h, head);
    caller_send_raw(&c, head, sizeof head);
    assert_true(caller_drained(&c));
    caller_close(&c);
    /* idle */
    caller_join(&c, &s, NULL);
    assert_true(caller_drained(&c));
    caller_close(&c);
    served_stop(&s, 1000);
    nothing_left();
}

static void refused_requests_leave_the_session_alone(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    struct answer a;
    struct buf b = {0};
    served_start(&s, &(struct served_options){0});
    caller_join(&c, &s, writer());
    buf_zeros(&b, 1); /* ping takes none */
    assert_int_equal(caller_call(&c, OP_PING, &b, &a), ERR_LIMIT);
    assert_non_null(strstr(a.err.text, "at most 0 bytes"));
    answer_free(&a);
    assert_int_equal(caller_call(&c, 999, NULL, &a), ERR_UNSUPPORTED);
    assert_non_null(strstr(a.err.text, "999"));
    answer_free(&a);
    expect(&c, OP_READ, NULL, ERR_PROTOCOL); /* cut short */
    expect(&c, OP_PING, NULL, ERR_NONE);
    caller_close(&c);
    served_stop(&s, 1000);
    nothing_left();
}

static void ids_in_flight_are_unique(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    struct handmade p;
    served_start(&s, &(struct served_options){0});
    caller_join(&c, &s, writer());
    part_save(&c, &p);
    struct buf b = handmade_join(&p, 0);
    uint64_t id = caller_send(&c, OP_JOIN, 0, &b, (struct slice){0});
    struct frame_header h = {.opcode = OP_STATUS, .request_id = id};
    caller_send_frame(&c, &h, (struct slice){0}, (struct slice){0});
    struct answer a;
    assert_true(caller_answer(&c, &a));
    assert_int_equal(a.err.class, ERR_PROTOCOL);
    answer_free(&a);
    assert_true(caller_drained(&c));
    caller_close(&c);
    handmade_free(&p);
    served_stop(&s, 1000);
    nothing_left();
}

static void joins_end_by_cancel_and_by_time(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    struct handmade p;
    struct answer a;
    served_start(&s, &(struct served_options){.loop_count = 2});
    caller_join(&c, &s, writer());
    part_save(&c, &p);
    struct buf b = handmade_join(&p, 0);
    uint64_t id = caller_send(&c, OP_JOIN, 0, &b, (struct slice){0});
    expect(&c, OP_PING, NULL, ERR_NONE); /* answered meanwhile */
    caller_cancel(&c, id);
    assert_true(caller_answer(&c, &a));
    assert_int_equal(a.header.request_id, id);
    assert_int_equal(a.err.class, ERR_CANCELLED);
    answer_free(&a);
    caller_cancel(&c, id); /* too late: ignored */
    caller_cancel(&c, 123456);
    b = handmade_join(&p, 100);
    assert_int_equal(caller_call(&c, OP_JOIN, &b, &a), ERR_TIMEOUT);
    assert_non_null(strstr(a.err.text, "1")); /* the rank that is missing */
    answer_free(&a);
    caller_close(&c);
    handmade_free(&p);
    served_stop(&s, 1000);
    nothing_left();
}

static void damaged_chunks_are_refused_on_arrival(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    struct handmade p;
    struct answer a;
    int64_t refused = metric_get(METRIC_chunks_refused);
    served_start(&s, &(struct served_options){0});
    caller_join(&c, &s, writer());
    begin_part(&c, &p);
    struct buf b = handmade_chunk(&p, 1), again = handmade_chunk(&p, 1);
    p.bytes[CHUNK_SIZE + 12345] ^= 1;
    caller_send(&c, OP_SEGMENT_CHUNK, 0, &b, SLICE(p.bytes + CHUNK_SIZE, CHUNK_SIZE));
    assert_true(caller_answer(&c, &a));
    assert_int_equal(a.err.class, ERR_CORRUPT);
    assert_non_null(strstr(a.err.text, "chunk 1"));
    answer_free(&a);
    caller_send(&c, OP_SEGMENT_CHUNK, 0, &again, SLICE(p.bytes + CHUNK_SIZE, 100));
    assert_true(caller_answer(&c, &a));
    assert_int_equal(a.err.class, ERR_PROTOCOL);
    answer_free(&a);
    p.bytes[CHUNK_SIZE + 12345] ^= 1;
    finish_part(&c, &p); /* and the right bytes are taken after that */
    assert_int_equal(metric_get(METRIC_chunks_refused), refused + 1);
    caller_close(&c);
    handmade_free(&p);
    served_stop(&s, 1000);
    nothing_left();
}

static void reads_give_the_bytes(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    struct handmade p;
    struct range ranges[600];
    struct buf want = {0}, got = {0};
    bool ended;
    served_start(&s, &(struct served_options){.loop_count = 2});
    caller_join(&c, &s, writer());
    part_save(&c, &p);
    /* the whole, and many small pieces: adjacent, near, far, backwards, empty */
    ranges[0] = (struct range){p.bytes_offset, CHUNKS * CHUNK_SIZE};
    for (uint32_t i = 1; i < 600; i++)
        ranges[i] =
            (struct range){p.bytes_offset + (uint64_t)i * 2477 % (CHUNKS * CHUNK_SIZE - 9000), i % 7 * 1301};
    for (uint32_t i = 0; i < 600; i++)
        buf_put(&want, p.bytes + ranges[i].offset - p.bytes_offset, ranges[i].bytes);
    struct buf b = handmade_read(&p, UINT64_MAX, ranges, 600);
    uint64_t id = caller_send(&c, OP_READ, 0, &b, (struct slice){0});
    assert_int_equal(gather(&c, id, &got, SIZE_MAX, &ended), ERR_NONE);
    assert_true(ended);
    assert_int_equal(got.n, want.n);
    assert_memory_equal(got.p, want.p, want.n);
    /* nothing at all */
    buf_reset(&got);
    b = handmade_read(&p, 0, ranges, 0);
    id = caller_send(&c, OP_READ, 0, &b, (struct slice){0});
    assert_int_equal(gather(&c, id, &got, SIZE_MAX, &ended), ERR_NONE);
    assert_true(ended && got.n == 0);
    buf_free(&got);
    buf_free(&want);
    caller_close(&c);
    handmade_free(&p);
    served_stop(&s, 1000);
    nothing_left();
}

static void credit_holds_and_releases_a_stream(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    struct handmade p;
    struct buf got = {0};
    bool ended;
    /* The deadline is far shorter than the pause, and long enough for a sanitizer. */
    served_start(&s, &(struct served_options){.limits = {.deadline_ms = 1000}});
    caller_join(&c, &s, writer());
    part_save(&c, &p);
    struct range all = {p.bytes_offset, CHUNKS * CHUNK_SIZE};
    struct buf b = handmade_read(&p, 1000, &all, 1);
    uint64_t id = caller_send(&c, OP_READ, 0, &b, (struct slice){0});
    assert_int_equal(gather(&c, id, &got, 1000, &ended), ERR_NONE);
    assert_int_equal(got.n, 1000);
    assert_true(caller_quiet(&c, 2000));
    caller_credit(&c, id, 5000);
    assert_int_equal(gather(&c, id, &got, 6000, &ended), ERR_NONE);
    assert_int_equal(got.n, 6000);
    assert_true(caller_quiet(&c, 50));
    expect(&c, OP_PING, NULL, ERR_NONE); /* others go on */
    caller_credit(&c, id, UINT64_MAX);
    caller_credit(&c, id, UINT64_MAX); /* more than can be counted */
    assert_int_equal(gather(&c, id, &got, SIZE_MAX, &ended), ERR_NONE);
    assert_true(ended);
    assert_int_equal(got.n, CHUNKS * CHUNK_SIZE);
    assert_memory_equal(got.p, p.bytes, got.n);
    caller_credit(&c, id, 1); /* after the end */
    expect(&c, OP_PING, NULL, ERR_NONE);
    buf_free(&got);
    caller_close(&c);
    handmade_free(&p);
    served_stop(&s, 1000);
    nothing_left();
}

static void streams_share_a_session(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    struct handmade p;
    struct answer a;
    uint64_t ids[8];
    size_t got[8] = {0}, ended = 0;
    served_start(&s,
                 &(struct served_options){.limits = {.session_streams_max = 8, .session_read_bytes_max = 1}});
    caller_join(&c, &s, writer());
    part_save(&c, &p);
    struct range all = {p.bytes_offset, CHUNKS * CHUNK_SIZE};
    struct buf b = handmade_read(&p, 0, &all, 1);
    ids[0] = caller_send(&c, OP_READ, 0, &b, (struct slice){0}); /* paused for good */
    for (int i = 1; i < 8; i++) {
        b = handmade_read(&p, UINT64_MAX, &all, 1);
        ids[i] = caller_send(&c, OP_READ, 0, &b, (struct slice){0});
    }
    b = handmade_read(&p, 1, &all, 1);
    uint64_t refused = caller_send(&c, OP_READ, 0, &b, (struct slice){0});
    while (ended < 8) { /* the seven, and the refusal */
        assert_true(caller_answer(&c, &a));
        int i = 1;
        while (i < 8 && ids[i] != a.header.request_id)
            i++;
        ended += !(a.header.flags & FRAME_MORE);
        if (a.header.request_id == refused) {
            assert_int_equal(a.err.class, ERR_BUSY);
        } else {
            assert_in_range(i, 1, 7);
            assert_int_equal(a.err.class, ERR_NONE);
            got[i] += a.header.payload_bytes;
        }
        answer_free(&a);
    }
    for (int i = 1; i < 8; i++)
        assert_int_equal(got[i], CHUNKS * CHUNK_SIZE);
    caller_cancel(&c, ids[0]);
    assert_true(caller_answer(&c, &a));
    assert_int_equal(a.err.class, ERR_CANCELLED);
    answer_free(&a);
    caller_close(&c);
    handmade_free(&p);
    served_stop(&s, 1000);
    nothing_left();
}

/* Much more than the session may hold is under way at once: it is taken in as it is done. */
static void payloads_in_flight_are_bounded(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    struct handmade p;
    struct answer a;
    served_start(&s, &(struct served_options){.limits = {.session_payload_bytes_max = 2 * CHUNK_SIZE}});
    caller_join(&c, &s, writer());
    begin_part(&c, &p);
    for (int i = 0; i < 40; i++) { /* repeating a chunk is harmless */
        struct buf b = handmade_chunk(&p, (uint32_t)i % CHUNKS);
        caller_send(&c, OP_SEGMENT_CHUNK, 0, &b, handmade_chunk_tail(&p, (uint32_t)i % CHUNKS));
    }
    for (int i = 0; i < 40; i++) {
        assert_true(caller_answer(&c, &a));
        if (a.err.class != ERR_NONE)
            fail_msg("chunk: %s", a.err.text);
        answer_free(&a);
    }
    finish_part(&c, &p);
    caller_close(&c);
    handmade_free(&p);
    served_stop(&s, 1000);
    nothing_left();
}

static void who_does_not_read_is_given_up(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    struct handmade p;
    struct range ranges[32];
    served_start(&s, &(struct served_options){.limits = {.send_ms = 200}});
    caller_join(&c, &s, writer());
    part_save(&c, &p);
    for (int i = 0; i < 32; i++)
        ranges[i] = (struct range){p.bytes_offset, CHUNKS * CHUNK_SIZE};
    struct buf b = handmade_read(&p, UINT64_MAX, ranges, 32); /* 96 MiB: more than sockets hold */
    caller_send(&c, OP_READ, 0, &b, (struct slice){0});
    nothing_left();
    caller_close(&c);
    handmade_free(&p);
    served_stop(&s, 1000);
}

static int64_t begun_bytes(void)
{
    return metric_get(METRIC_disk_read_bytes) + metric_get(METRIC_cached_read_bytes) +
           metric_get(METRIC_joined_read_bytes);
}

/* Four who ask for much and receive nothing: the server reads so much for them at least, and how much in the
 * end. Meanwhile a fifth gets all it asks for. */
static int64_t held_for_slow_readers(bool feeds, uint64_t feed_read_bytes_max, int64_t least)
{
    struct served s;
    struct caller slow[4], c;
    struct handmade p;
    struct range ranges[32];
    struct buf b, got = {0};
    bool ended;
    served_start(&s, &(struct served_options){.limits = {.read_cache_bytes = 128 << 20,
                                                         .feed_read_bytes_max = feed_read_bytes_max}});
    caller_join(&c, &s, writer());
    part_save(&c, &p);
    p.feeds = feeds;
    for (int i = 0; i < 32; i++)
        ranges[i] = (struct range){p.bytes_offset, CHUNKS * CHUNK_SIZE};
    int64_t before = begun_bytes(), held = -1, now = 0;
    for (int i = 0; i < 4; i++) {
        caller_join(&slow[i], &s, writer());
        b = handmade_read(&p, UINT64_MAX, ranges, 32);
        caller_send(&slow[i], OP_READ, 0, &b, (struct slice){0});
    }
    for (int waits = SERVED_PATIENCE_MS / 100; waits > 0 && (now < least || now != held); waits--) {
        held = now;
        nanosleep(&(struct timespec){.tv_nsec = 100 * 1000 * 1000}, NULL);
        now = begun_bytes() - before;
    }
    assert_in_range(now, least, INT64_MAX);
    b = handmade_read(&p, UINT64_MAX, ranges, 1);
    uint64_t id = caller_send(&c, OP_READ, 0, &b, (struct slice){0});
    assert_int_equal(gather(&c, id, &got, SIZE_MAX, &ended), ERR_NONE);
    assert_true(ended);
    assert_int_equal(got.n, CHUNKS * CHUNK_SIZE);
    assert_memory_equal(got.p, p.bytes, got.n);
    buf_free(&got);
    for (int i = 0; i < 4; i++)
        caller_close(&slow[i]);
    caller_close(&c);
    handmade_free(&p);
    served_stop(&s, 1000);
    nothing_left();
    return now;
}

/* One piece of each is held, not 4 MiB; a restore is let alone. */
static void feeds_share_what_is_read_ahead(void **state)
{
    (void)state;
    int64_t little = held_for_slow_readers(true, 1, 4 << 20);
    held_for_slow_readers(true, 64 << 20, little + (4 << 20));
    held_for_slow_readers(false, 1, little + (4 << 20));
}

static void what_cannot_be_read_is_named(void **state)
{
    (void)state;
    struct served s;
    struct caller c, other;
    struct handmade p;
    struct answer a;
    char absent[ERR_TEXT_BYTES];
    served_start(&s, &(struct served_options){0});
    caller_join(&c, &s, writer());
    part_save(&c, &p);
    /* beyond the end */
    struct range beyond = {p.file_bytes - 100, 200};
    struct buf b = handmade_read(&p, UINT64_MAX, &beyond, 1);
    assert_int_equal(caller_call(&c, OP_READ, &b, &a), ERR_CORRUPT);
    assert_non_null(strstr(a.err.text, "03010203")); /* the segment */
    answer_free(&a);
    struct range far = {1ull << 50, 1};
    b = handmade_read(&p, UINT64_MAX, &far, 1);
    expect(&c, OP_READ, &b, ERR_LIMIT);
    struct range wraps = {UINT64_MAX, 2};
    b = handmade_read(&p, UINT64_MAX, &wraps, 1);
    expect(&c, OP_READ, &b, ERR_LIMIT);
    /* absent, and another tenant's, look alike */
    struct range first = {0, 10};
    struct handmade none = p;
    none.segment.bytes[0] ^= 1;
    b = handmade_read(&none, UINT64_MAX, &first, 1);
    assert_int_equal(caller_call(&c, OP_READ, &b, &a), ERR_NOT_FOUND);
    snprintf(absent, sizeof absent, "%s", a.err.text);
    answer_free(&a);
    caller_join(&other, &s, served_user("rival", ROLE_ADMIN));
    b = handmade_read(&none, UINT64_MAX, &first, 1);
    assert_int_equal(caller_call(&other, OP_READ, &b, &a), ERR_NOT_FOUND);
    assert_string_equal(a.err.text, absent);
    answer_free(&a);
    b = handmade_read(&p, UINT64_MAX, &first, 1);
    assert_int_equal(caller_call(&other, OP_READ, &b, &a), ERR_NOT_FOUND);
    answer_free(&a);
    caller_close(&other);
    caller_close(&c);
    handmade_free(&p);
    served_stop(&s, 1000);
    nothing_left();
}

/* Ends connections in every state, some hundred times, with everything in flight. */
static void disconnects_leave_nothing(void **state)
{
    (void)state;
    struct served s;
    struct caller first, c;
    struct handmade p;
    served_start(&s, &(struct served_options){.loop_count = 2});
    caller_join(&first, &s, writer());
    part_save(&first, &p);
    struct range all = {p.bytes_offset, CHUNKS * CHUNK_SIZE};
    for (int i = 0; i < 60; i++) {
        struct buf b;
        if (i % 6 == 0) { /* after the handshake */
            caller_open(&c, &s, writer());
            caller_close(&c);
            continue;
        }
        caller_join(&c, &s, writer());
        if (i % 6 == 2) { /* a join waits */
            b = handmade_join(&p, 0);
            caller_send(&c, OP_JOIN, 0, &b, (struct slice){0});
        } else if (i % 6 == 3) { /* a stream is running, and one is paused */
            b = handmade_read(&p, UINT64_MAX, &all, 1);
            caller_send(&c, OP_READ, 0, &b, (struct slice){0});
            b = handmade_read(&p, 0, &all, 1);
            caller_send(&c, OP_READ, 0, &b, (struct slice){0});
        } else if (i % 6 == 4) { /* a chunk is on its way */
            b = handmade_chunk(&p, 0);
            caller_send(&c, OP_SEGMENT_CHUNK, 0, &b, handmade_chunk_tail(&p, 0));
        } else if (i % 6 == 5) { /* status and half a frame */
            caller_send(&c, OP_STATUS, 0, NULL, (struct slice){0});
            caller_send_raw(&c, "\x17\3\3\1", 4);
        }
        caller_close(&c);
    }
    caller_close(&first);
    nothing_left();
    caller_join(&c, &s, reader());
    json_t *o = status(&c);
    assert_int_equal(figure(o, "sessions_open"), 1);
    assert_int_equal(figure(o, "requests_in_flight"), 1); /* itself */
    assert_int_equal(figure(o, "loop_0_sessions") + figure(o, "loop_1_sessions"), 1);
    assert_int_equal(figure(o, "class_restore_in_flight_bytes"), 0);
    assert_int_equal(figure(o, "class_save_in_flight_bytes"), 0);
    assert_int_equal(figure(o, "class_restore_queued"), 0);
    assert_true(figure(o, "class_save_admitted_bytes") > 0);
    json_decref(o);
    caller_close(&c);
    handmade_free(&p);
    served_stop(&s, 1000);
    nothing_left();
}

static void too_many_sessions_are_told_so(void **state)
{
    (void)state;
    struct served s;
    struct caller a, b;
    struct answer answer;
    struct buf m = {0};
    struct msg_hello hello = {.software = slice_str("test")};
    served_start(&s, &(struct served_options){.limits = {.sessions_max = 1}});
    caller_join(&a, &s, reader());
    caller_open(&b, &s, reader());
    msg_hello_encode(&hello, &m);
    caller_send(&b, OP_HELLO, 0, &m, (struct slice){0});
    assert_true(caller_answer(&b, &answer));
    assert_int_equal(answer.err.class, ERR_BUSY);
    assert_non_null(strstr(answer.err.text, "1 sessions"));
    answer_free(&answer);
    assert_true(caller_drained(&b));
    caller_close(&b);
    expect(&a, OP_PING, NULL, ERR_NONE);
    caller_close(&a);
    served_stop(&s, 1000);
    nothing_left();
}

static void a_stop_finishes_or_fails_what_runs(void **state)
{
    (void)state;
    struct served s;
    struct caller c, idle;
    struct handmade p;
    struct answer a;
    struct buf got = {0};
    bool ended;
    served_start(&s, &(struct served_options){.loop_count = 2});
    caller_join(&c, &s, writer());
    caller_join(&idle, &s, reader());
    part_save(&c, &p);
    struct range all = {p.bytes_offset, CHUNKS * CHUNK_SIZE};
    struct buf b = handmade_join(&p, 0);
    uint64_t join = caller_send(&c, OP_JOIN, 0, &b, (struct slice){0});
    b = handmade_read(&p, 0, &all, 1);
    uint64_t paused = caller_send(&c, OP_READ, 0, &b, (struct slice){0});
    b = handmade_read(&p, 1 << 20, &all, 1);
    uint64_t slow = caller_send(&c, OP_READ, 0, &b, (struct slice){0});
    assert_int_equal(gather(&c, slow, &got, 1 << 19, &ended), ERR_NONE);
    served_stop_begin(&s, 60000);
    assert_true(caller_drained(&idle)); /* nothing to wait for */
    caller_close(&idle);
    bool join_told = false, paused_told = false, slow_told = false;
    while (!join_told || !paused_told || !slow_told) {
        assert_true(caller_answer(&c, &a));
        if (a.header.request_id == join)
            join_told = a.err.class == ERR_CANCELLED;
        else if (a.header.request_id == paused)
            paused_told = a.err.class == ERR_CANCELLED;
        else if (a.header.request_id == slow) /* its credit runs out: then it only waits */
            slow_told = a.err.class == ERR_CANCELLED;
        answer_free(&a);
    }
    assert_true(caller_drained(&c));
    caller_close(&c);
    served_stop_end(&s);
    assert_int_equal(s.failed, 3);
    assert_int_equal(s.finished, 0);
    buf_free(&got);
    handmade_free(&p);
    nothing_left();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hello_tells_who_is_who),
        cmocka_unit_test(roles_bound_what_is_asked),
        cmocka_unit_test(hello_comes_first_and_once),
        cmocka_unit_test(broken_frames_are_told_and_end_the_session),
        cmocka_unit_test(garbage_is_refused),
        cmocka_unit_test(trickle_and_silence_are_bounded),
        cmocka_unit_test(refused_requests_leave_the_session_alone),
        cmocka_unit_test(ids_in_flight_are_unique),
        cmocka_unit_test(joins_end_by_cancel_and_by_time),
        cmocka_unit_test(damaged_chunks_are_refused_on_arrival),
        cmocka_unit_test(reads_give_the_bytes),
        cmocka_unit_test(credit_holds_and_releases_a_stream),
        cmocka_unit_test(streams_share_a_session),
        cmocka_unit_test(payloads_in_flight_are_bounded),
        cmocka_unit_test(who_does_not_read_is_given_up),
        cmocka_unit_test(feeds_share_what_is_read_ahead),
        cmocka_unit_test(what_cannot_be_read_is_named),
        cmocka_unit_test(disconnects_leave_nothing),
        cmocka_unit_test(too_many_sessions_are_told_so),
        cmocka_unit_test(a_stop_finishes_or_fails_what_runs),
    };
    if (getenv("FILTER"))
        cmocka_set_test_filter(getenv("FILTER"));
    return cmocka_run_group_tests_name("session", tests, NULL, NULL);
}
