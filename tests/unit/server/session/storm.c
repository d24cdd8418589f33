/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: many clients that restore one checkpoint cost about one read of it, whatever some of them do, and
 * each gets the right bytes. Method: a whole server with TLS and several loops in this process, clients on
 * threads of their own, half of them on bulk lanes; what was read is counted where it is read.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/obs/metrics.h"
#include "tests/support/handmade.h"
#include "tests/support/served.h"

#define CLIENTS    16u
#define CHUNK_SIZE (4u << 20)
#define PART_BYTES (PART_CHUNKS * (uint64_t)CHUNK_SIZE)
#define CREDIT     (2u << 20) /* of those who give it as they go on */

enum habit { READS, READS_IN_PIECES, CANCELS, LEAVES, HABITS };

struct client {
    struct caller tls, lane;
    struct caller *way; /* one of them */
    struct handmade *part;
    enum habit habit;
    pthread_t thread;
    bool right;
};

static void tell(struct caller *c, uint16_t opcode, struct buf b, struct slice tail)
{
    struct answer a;
    caller_send(c, opcode, 0, &b, tail);
    if (!caller_answer(c, &a) || a.err.class != ERR_NONE)
        fail_msg("%s: %s %s", opcode_name(opcode), a.err.text, c->err.text);
    answer_free(&a);
}

static void save(struct caller *c, struct handmade *p)
{
    struct buf index = {0};
    handmade_make(p, CHUNK_SIZE, 0);
    tell(c, OP_RUN_OPEN, handmade_run_open(p), (struct slice){0});
    tell(c, OP_ATTEMPT, handmade_attempt(p), (struct slice){0});
    tell(c, OP_SEGMENT_CREATE, handmade_create(p, "acme"), (struct slice){0});
    for (uint32_t i = 0; i < PART_CHUNKS; i++)
        tell(c, OP_SEGMENT_CHUNK, handmade_chunk(p, i), handmade_chunk_tail(p, i));
    struct buf b = handmade_index(p, &index);
    tell(c, OP_SEGMENT_INDEX, b, SLICE(index.p, index.n));
    buf_free(&index);
    tell(c, OP_SEGMENT_SEAL, handmade_seal(p), (struct slice){0});
}

static void open_lane(struct caller *tls, const struct served *s, struct caller *lane)
{
    struct answer a;
    struct msg_lane_open_reply m;
    struct lane_keys keys;
    assert_int_equal(caller_call(tls, OP_LANE_OPEN, NULL, &a), ERR_NONE);
    struct rcur in = rcur_of(a.payload, a.header.payload_bytes);
    assert_int_equal(msg_lane_open_reply_decode(&in, &m, NULL), 0);
    answer_free(&a);
    assert_int_equal(channel_export(tls->channel, LANE_LABEL, &m.ticket, sizeof m.ticket, &keys, sizeof keys),
                     0);
    caller_lane(lane, s, &keys, &m.ticket);
    assert_false(lane->closed);
}

/* No assertions here: they jump, and only the main thread may. */
static void *restore(void *arg)
{
    struct client *c = arg;
    const struct range range = {c->part->bytes_offset, PART_BYTES};
    struct buf b = handmade_read(c->part, c->habit == READS_IN_PIECES ? CREDIT : UINT32_MAX, &range, 1);
    uint64_t id = caller_send(c->way, OP_READ, 0, &b, (struct slice){0});
    uint64_t got = 0;
    bool same = true, ended = false;
    while (!ended) {
        struct answer a;
        if (!caller_answer(c->way, &a))
            return NULL;
        size_t n = a.header.payload_bytes;
        ended = !(a.header.flags & FRAME_MORE);
        if (a.err.class != ERR_NONE) {
            c->right = c->habit == CANCELS && a.err.class == ERR_CANCELLED;
            answer_free(&a);
            return NULL;
        }
        same &= got + n <= PART_BYTES && memcmp(a.payload, c->part->bytes + got, n) == 0;
        got += n;
        answer_free(&a);
        if (c->habit == READS_IN_PIECES)
            caller_credit(c->way, id, n);
        if (c->habit == CANCELS)
            caller_cancel(c->way, id);
        if (c->habit == LEAVES)
            break;
    }
    c->right = same && (c->habit == LEAVES || c->habit == CANCELS || got == PART_BYTES);
    return NULL;
}

static void client_open(struct client *c, const struct served *s, unsigned i)
{
    caller_join(&c->tls, s, served_user("acme", ROLE_READER));
    c->way = &c->tls;
    if (i % 2) {
        open_lane(&c->tls, s, &c->lane);
        c->way = &c->lane;
    }
}

static void client_close(struct client *c)
{
    if (c->way == &c->lane)
        caller_close(&c->lane);
    caller_close(&c->tls);
}

/* Asks for everything and takes nothing. */
static void stall(struct client *c, const struct served *s, struct handmade *p)
{
    const struct range range = {p->bytes_offset, PART_BYTES};
    client_open(c, s, 0);
    struct buf b = handmade_read(p, UINT32_MAX, &range, 1);
    caller_send(c->way, OP_READ, 0, &b, (struct slice){0});
}

static void storm(size_t loops, uint64_t cache_bytes, bool misbehave)
{
    struct served s;
    struct caller writer;
    struct handmade p;
    struct client clients[CLIENTS] = {0}, stalled[2] = {0};
    served_start(&s,
                 &(struct served_options){.loop_count = loops, .limits = {.read_cache_bytes = cache_bytes}});
    caller_join(&writer, &s, served_user("acme", ROLE_WRITER));
    save(&writer, &p);
    for (unsigned i = 0; i < CLIENTS; i++)
        client_open(&clients[i], &s, i);
    int64_t before = metric_get(METRIC_disk_read_bytes),
            shared = metric_get(METRIC_joined_read_bytes) + metric_get(METRIC_cached_read_bytes);
    for (unsigned i = 0; misbehave && i < 2; i++)
        stall(&stalled[i], &s, &p);
    for (unsigned i = 0; i < CLIENTS; i++) {
        clients[i].part = &p;
        clients[i].habit = misbehave ? i % HABITS : i % 3 == 0 ? READS_IN_PIECES : READS;
        assert_int_equal(pthread_create(&clients[i].thread, NULL, restore, &clients[i]), 0);
    }
    for (unsigned i = 0; i < CLIENTS; i++) {
        pthread_join(clients[i].thread, NULL);
        if (!clients[i].right)
            fail_msg("client %u did not get what it should: %s", i, clients[i].way->err.text);
        client_close(&clients[i]);
    }
    int64_t read = metric_get(METRIC_disk_read_bytes) - before;
    shared = metric_get(METRIC_joined_read_bytes) + metric_get(METRIC_cached_read_bytes) - shared;
    if (read * 10 > (int64_t)PART_BYTES * 11)
        fail_msg("%lld bytes were read for %llu", (long long)read, (unsigned long long)PART_BYTES);
    assert_true(shared >= (int64_t)PART_BYTES * (misbehave ? 4 : CLIENTS - 2));
    for (unsigned i = 0; misbehave && i < 2; i++)
        client_close(&stalled[i]);
    caller_close(&writer);
    handmade_free(&p);
    served_stop(&s, 1000);
}

static void a_storm_costs_one_read(void **state)
{
    (void)state;
    for (size_t loops = 1; loops <= 3; loops += 2)
        storm(loops, 16 << 20, false);
}

static void whatever_some_of_them_do(void **state)
{
    (void)state;
    storm(2, 16 << 20, true);
}

/* Read anew: by those who ask for that, each time. */
static void who_asks_anew_reads_anew(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    struct handmade p;
    const struct range range = {0, 0};
    served_start(&s, &(struct served_options){.loop_count = 1});
    caller_join(&c, &s, served_user("acme", ROLE_WRITER));
    save(&c, &p);
    struct range some = {p.bytes_offset + 5000, 3 << 20};
    for (int i = 0; i < 4; i++) {
        int64_t before = metric_get(METRIC_disk_read_bytes);
        struct buf b = handmade_read(&p, UINT32_MAX, i == 3 ? &range : &some, 1);
        if (i == 1 || i == 2)
            b.p[1] |= READ_ANEW;
        uint64_t id = caller_send(&c, OP_READ, 0, &b, (struct slice){0}), got = 0;
        for (bool more = true; more;) {
            struct answer a;
            assert_true(caller_answer(&c, &a));
            assert_int_equal(a.header.request_id, id);
            assert_int_equal(a.err.class, ERR_NONE);
            assert_memory_equal(a.payload, p.bytes + 5000 + got, a.header.payload_bytes);
            got += a.header.payload_bytes;
            more = a.header.flags & FRAME_MORE;
            answer_free(&a);
        }
        int64_t read = metric_get(METRIC_disk_read_bytes) - before;
        assert_int_equal(got, i == 3 ? 0 : some.bytes);
        assert_true(i == 3 ? read == 0
                           : read >= (int64_t)some.bytes && read <= (int64_t)some.bytes + 3 * 8192);
    }
    caller_close(&c);
    handmade_free(&p);
    served_stop(&s, 1000);
}

/* Two reads of one connection, asked for at once: bytes of the second that came before the first was whole.
 */
static uint64_t second_before_first(struct caller *c, const struct handmade *p)
{
    const struct range range = {p->bytes_offset, PART_BYTES};
    uint64_t id[2], got[2] = {0, 0}, before = 0;
    for (int i = 0; i < 2; i++) {
        struct buf b = handmade_read(p, UINT32_MAX, &range, 1);
        b.p[1] = 2; /* class feed */
        id[i] = caller_send(c, OP_READ, 0, &b, (struct slice){0});
    }
    for (unsigned ended = 0; ended < 2;) {
        struct answer a;
        assert_true(caller_answer(c, &a));
        assert_int_equal(a.err.class, ERR_NONE);
        int i = a.header.request_id == id[1];
        assert_memory_equal(a.payload, p->bytes + got[i], a.header.payload_bytes);
        got[i] += a.header.payload_bytes;
        bool last = !(a.header.flags & FRAME_MORE);
        if (last && i == 0)
            before = got[1];
        ended += last;
        answer_free(&a);
    }
    assert_int_equal(got[0], PART_BYTES);
    assert_int_equal(got[1], PART_BYTES);
    return before;
}

static void what_a_feed_asked_for_first_comes_first(void **state)
{
    (void)state;
    struct served s;
    struct caller c;
    struct handmade p;
    served_start(&s, &(struct served_options){.loop_count = 1});
    caller_join(&c, &s, served_user("acme", ROLE_WRITER));
    save(&c, &p);
    for (int i = 0; i < 3; i++)
        assert_true(second_before_first(&c, &p) <= PART_BYTES / 4);
    caller_close(&c);
    handmade_free(&p);
    served_stop(&s, 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_storm_costs_one_read),
        cmocka_unit_test(whatever_some_of_them_do),
        cmocka_unit_test(who_asks_anew_reads_anew),
        cmocka_unit_test(what_a_feed_asked_for_first_comes_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
