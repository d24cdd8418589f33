/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: whatever the network, the disk and the clients do, every request is answered once or its connection
 * ends, what is read is what was written, and a stop leaves nothing behind.
 * Method: a whole server with two loops on the simulator, bots on another node that save, read under credits,
 * wait, cancel, talk rubbish and vanish, connections that are cut, disks that fail; stopped in the middle.
 * The seed makes all of it; the same seed must give the same trace. LARDER_SIM_SEEDS sets how many seeds are
 * run.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/channel.h"
#include "server/boot.h"
#include "server/io/sim.h"
#include "server/obs/metrics.h"
#include "tests/support/handmade.h"

#define BOTS        5
#define CONNECTIONS 6
#define ACTIONS     30
#define IN_FLIGHT   6
#define CHUNK_BYTES (8u << 10)
#define EVENTS_MAX  20000000u

struct pending {
    uint64_t id;
    uint16_t opcode;
    bool one_sent;     /* a credit of the rest was sent */
    struct range want; /* reads */
    uint64_t got;
};

struct world;
struct bot {
    struct world *w;
    struct loop *loop;
    unsigned number;
    uint64_t rng;
    struct handmade part;
    unsigned save_step; /* how far its part has come */
    bool sealed;
    int fd;
    struct channel *channel;
    struct io_op connect, recv, send, close;
    bool receiving, sending, leaving, closing;
    uint8_t *recv_buf, *send_buf;
    struct pending pending[IN_FLIGHT];
    unsigned pending_count, connections, actions;
    uint64_t next_id;
    bool hello;
    struct loop_timer pause;
};

struct world {
    struct sim *sim;
    struct loop *loops[2];
    struct boot *boot;
    bool started, stopped;
    struct bot bots[BOTS];
    unsigned bots_done;
    unsigned bots_before_stop; /* the stop comes when so many are done */
    uint64_t answers, errors, read_bytes, trace;
    struct loop_msg stop_msg;
    uint32_t stop_bound_ms;
};

static uint32_t roll(struct bot *b, uint32_t n)
{
    b->rng = b->rng * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((b->rng >> 33) % n);
}

/* Bots. */

static void bot_step(struct bot *b);

static void bot_flush(struct bot *b)
{
    size_t n;
    if (b->sending || b->leaving)
        return;
    free(b->send_buf);
    b->send_buf = channel_output_take(b->channel, &n);
    if (!b->send_buf)
        return;
    b->sending = true;
    loop_send(b->loop, &b->send, b->fd, b->send_buf, n);
}

static uint64_t bot_send(struct bot *b, uint16_t opcode, struct buf message, struct slice tail)
{
    struct frame_header h = {.opcode = opcode, .request_id = ++b->next_id, .deadline_ms = 60000};
    int r = channel_send(b->channel, &h, SLICE(message.p, message.n), tail, NULL);
    assert_int_equal(r, 0);
    buf_free(&message);
    return h.request_id;
}

static struct pending *expect_answer(struct bot *b, uint16_t opcode, uint64_t id)
{
    struct pending *p = &b->pending[b->pending_count++];
    *p = (struct pending){.id = id, .opcode = opcode};
    return p;
}

static void bot_one_way(struct bot *b, uint16_t opcode, uint64_t id, uint64_t bytes)
{
    struct buf m = {0};
    struct frame_header h = {.opcode = opcode, .request_id = id};
    if (opcode == OP_CANCEL)
        msg_cancel_encode(&(struct msg_cancel){.request_id = id}, &m);
    else
        msg_credit_encode(&(struct msg_credit){.request_id = id, .bytes = bytes}, &m);
    assert_int_equal(channel_send(b->channel, &h, SLICE(m.p, m.n), (struct slice){0}, NULL), 0);
    buf_free(&m);
}

static void bot_leave(struct bot *b)
{
    if (b->leaving)
        return;
    b->leaving = true;
    loop_shutdown(b->loop, b->fd);
}

/* The next message of its part: one is repeated until it is answered well. */
static void bot_save(struct bot *b)
{
    struct buf tail = {0}, m;
    static const uint16_t opcodes[] = {OP_RUN_OPEN,      OP_ATTEMPT,       OP_SEGMENT_CREATE,
                                       OP_SEGMENT_CHUNK, OP_SEGMENT_CHUNK, OP_SEGMENT_CHUNK,
                                       OP_SEGMENT_INDEX, OP_SEGMENT_SEAL};
    switch (b->save_step) {
    case 0: m = handmade_run_open(&b->part); break;
    case 1: m = handmade_attempt(&b->part); break;
    case 2: m = handmade_create(&b->part, "acme"); break;
    case 6: m = handmade_index(&b->part, &tail); break;
    case 7: m = handmade_seal(&b->part); break;
    default:
        m = handmade_chunk(&b->part, b->save_step - 3);
        expect_answer(b, OP_SEGMENT_CHUNK,
                      bot_send(b, OP_SEGMENT_CHUNK, m, handmade_chunk_tail(&b->part, b->save_step - 3)));
        return;
    }
    uint16_t opcode = opcodes[b->save_step];
    expect_answer(b, opcode, bot_send(b, opcode, m, SLICE(tail.p, tail.n)));
    buf_free(&tail);
}

static void bot_read(struct bot *b)
{
    uint32_t all = PART_CHUNKS * CHUNK_BYTES;
    struct range want = {b->part.bytes_offset + roll(b, all), 0};
    want.bytes = 1 + roll(b, (uint32_t)(b->part.bytes_offset + all - want.offset));
    uint64_t credit = roll(b, 3) ? UINT64_MAX : roll(b, 5000);
    uint64_t id = bot_send(b, OP_READ, handmade_read(&b->part, credit, &want, 1), (struct slice){0});
    struct pending *p = expect_answer(b, OP_READ, id);
    p->want = want;
    if (credit != UINT64_MAX && roll(b, 4) == 0)
        bot_one_way(b, OP_CANCEL, id, 0);
}

static bool save_in_flight(const struct bot *b)
{
    for (unsigned i = 0; i < b->pending_count; i++)
        if (b->pending[i].opcode >= OP_RUN_OPEN && b->pending[i].opcode <= OP_SEGMENT_SEAL)
            return true;
    return false;
}

static void bot_act(struct bot *b)
{
    struct buf none = {0};
    uint32_t what = roll(b, 20);
    b->actions++;
    if (what == 0) {
        bot_leave(b);
    } else if (what == 1) {
        struct pending *p = &b->pending[b->pending_count++];
        *p = (struct pending){.opcode = OP_STATUS};
        p->id = bot_send(b, OP_STATUS, none, (struct slice){0});
    } else if (what == 2 && b->sealed) {
        uint64_t id = bot_send(b, OP_JOIN, handmade_join(&b->part, 500), (struct slice){0});
        expect_answer(b, OP_JOIN, id);
        if (roll(b, 2))
            bot_one_way(b, OP_CANCEL, id, 0);
    } else if (what == 3) {
        buf_zeros(&none, 1 + roll(b, 100)); /* rubbish: an empty listing's name is cut */
        expect_answer(b, OP_COMMIT_LIST, bot_send(b, OP_COMMIT_LIST, none, (struct slice){0}));
    } else if (b->save_step < 8) {
        bot_save(b);
    } else {
        bot_read(b);
    }
}

static void bot_step(struct bot *b)
{
    while (b->hello && !b->leaving && b->pending_count < IN_FLIGHT && b->actions < ACTIONS &&
           !save_in_flight(b))
        bot_act(b);
    /* Streams that are out of credit get more, a little or all of it. */
    for (unsigned i = 0; i < b->pending_count && !b->leaving; i++) {
        struct pending *p = &b->pending[i];
        if (p->opcode != OP_READ || p->one_sent)
            continue;
        p->one_sent = true;
        bot_one_way(b, OP_CREDIT, p->id, UINT64_MAX);
    }
    if (b->hello && !b->leaving && b->pending_count == 0)
        bot_leave(b);
    bot_flush(b);
}

static void take_read(struct bot *b, struct pending *p, const struct frame *f)
{
    uint32_t n = f->header.payload_bytes;
    assert_true(p->got + n <= p->want.bytes);
    assert_memory_equal(f->payload, b->part.bytes + (p->want.offset - b->part.bytes_offset) + p->got, n);
    p->got += n;
    b->w->read_bytes += n;
    if (!(f->header.flags & FRAME_MORE))
        assert_int_equal(p->got, p->want.bytes);
}

static void take_saved(struct bot *b, uint16_t opcode, const struct frame *f)
{
    if (opcode == OP_RUN_OPEN) {
        struct msg_run_open_reply reply;
        struct rcur in = rcur_of(f->payload, f->header.payload_bytes);
        assert_int_equal(msg_run_open_reply_decode(&in, &reply, NULL), 0);
        b->part.run = reply.run_id;
    }
    b->sealed = ++b->save_step == 8;
}

static void take_answer(struct bot *b, const struct frame *f)
{
    unsigned i = 0;
    struct err e = {0};
    if (f->header.opcode == OP_HELLO && !b->hello) {
        b->hello = !(f->header.flags & FRAME_ERROR);
        return;
    }
    while (i < b->pending_count && b->pending[i].id != f->header.request_id)
        i++;
    assert_true(i < b->pending_count); /* answered twice, or never asked */
    struct pending *p = &b->pending[i];
    assert_int_equal(f->header.opcode, p->opcode);
    if (f->header.flags & FRAME_ERROR) {
        struct rcur in = rcur_of(f->payload, f->header.payload_bytes);
        assert_true(err_of_msg(&in, &e) < 0);
        assert_true(e.text[0] != 0);
        b->w->errors++;
        /* A part whose segment was given up begins anew with another one. */
        if (p->opcode >= OP_SEGMENT_CREATE && p->opcode <= OP_SEGMENT_SEAL)
            b->save_step = 0;
    } else if (p->opcode == OP_READ) {
        take_read(b, p, f);
    } else if (p->opcode >= OP_RUN_OPEN && p->opcode <= OP_SEGMENT_SEAL) {
        take_saved(b, p->opcode, f);
    }
    if (f->header.flags & FRAME_MORE)
        return;
    b->w->answers++;
    *p = b->pending[--b->pending_count];
}

static void bot_dial(struct bot *b);

static void bot_over(struct bot *b)
{
    struct world *w = b->w;
    w->bots_done++;
    free(b->recv_buf);
    b->recv_buf = NULL;
    loop_stop(b->loop);
}

static void bot_paused(struct loop_timer *t)
{
    bot_dial(container_of(t, struct bot, pause));
}

static void bot_closed(struct io_op *op)
{
    struct bot *b = container_of(op, struct bot, close);
    channel_free(b->channel);
    b->channel = NULL;
    free(b->send_buf);
    b->send_buf = NULL;
    if (b->connections >= CONNECTIONS || b->w->stopped) {
        bot_over(b);
        return;
    }
    b->pause.fire = bot_paused;
    loop_timer_set(b->loop, &b->pause, loop_now_ms(b->loop) + 1 + roll(b, 50));
}

static void bot_close_if_quiet(struct bot *b)
{
    if (!b->leaving || b->receiving || b->sending || b->closing)
        return;
    b->closing = true;
    b->close.done = bot_closed;
    loop_close(b->loop, &b->close, b->fd);
}

static void bot_receive(struct bot *b)
{
    b->receiving = true;
    loop_recv(b->loop, &b->recv, b->fd, b->recv_buf, 4096);
}

static void bot_received(struct io_op *op)
{
    struct bot *b = container_of(op, struct bot, recv);
    struct frame f;
    struct err e = {0};
    int r = 0;
    b->receiving = false;
    if (op->result <= 0)
        bot_leave(b);
    else
        r = channel_input(b->channel, b->recv_buf, (size_t)op->result, &e);
    assert_int_equal(r, 0);
    while (!b->leaving && (r = channel_frame(b->channel, &f, &e)) > 0) {
        take_answer(b, &f);
        channel_frame_done(b->channel);
    }
    assert_int_equal(r, 0);
    bot_step(b);
    if (!b->leaving)
        bot_receive(b);
    bot_close_if_quiet(b);
}

static void bot_sent(struct io_op *op)
{
    struct bot *b = container_of(op, struct bot, send);
    b->sending = false;
    if (op->result < 0)
        bot_leave(b);
    else
        bot_flush(b);
    bot_close_if_quiet(b);
}

static void bot_connected(struct io_op *op)
{
    static const struct identity server = {.server = true};
    struct bot *b = container_of(op, struct bot, connect);
    struct buf m = {0};
    if (op->result < 0) {
        if (b->connections >= CONNECTIONS || b->w->stopped) {
            bot_over(b);
            return;
        }
        b->pause.fire = bot_paused;
        loop_timer_set(b->loop, &b->pause, loop_now_ms(b->loop) + 1 + roll(b, 50));
        return;
    }
    b->fd = (int)op->result;
    b->leaving = b->closing = b->hello = false;
    b->pending_count = b->actions = 0;
    b->recv.done = bot_received;
    b->send.done = bot_sent;
    assert_int_equal(channel_create_clear(false, &server, &b->channel), 0);
    msg_hello_encode(&(struct msg_hello){.features = 1, .software = slice_str("bot")}, &m);
    (void)bot_send(b, OP_HELLO, m, (struct slice){0});
    bot_flush(b);
    bot_receive(b);
}

static void bot_dial(struct bot *b)
{
    b->connections++;
    b->connect.done = bot_connected;
    loop_connect(b->loop, &b->connect, "node0", "7000");
}

/* The world. */

static void trace(void *arg, const char *line)
{
    struct world *w = arg;
    w->trace = w->trace * 31 + hash64(line, strlen(line));
}

static void on_started(void *arg, struct boot *boot, const struct err *e)
{
    struct world *w = arg;
    w->boot = boot;
    w->started = true;
    if (!boot) { /* a disk that fails at once: nothing to connect to */
        assert_true(e->text[0] != 0);
        w->stopped = true;
    }
}

static void on_stopped(void *arg, uint64_t finished, uint64_t failed)
{
    struct world *w = arg;
    (void)finished, (void)failed;
    w->stopped = true;
}

static void do_stop(struct loop_msg *m)
{
    struct world *w = container_of(m, struct world, stop_msg);
    boot_stop(w->boot, w->stop_bound_ms, on_stopped, w);
}

static bool has_started(void *arg)
{
    return ((struct world *)arg)->started;
}

static bool time_to_stop(void *arg)
{
    struct world *w = arg;
    return w->bots_done >= w->bots_before_stop;
}

static void bots_begin(struct world *w, uint64_t seed)
{
    for (unsigned i = 0; i < BOTS; i++) {
        struct bot *b = &w->bots[i];
        b->w = w;
        b->number = i;
        b->rng = seed * 77 + i;
        b->loop = sim_loop(w->sim, 1);
        b->recv_buf = malloc(4096);
        handmade_make(&b->part, CHUNK_BYTES, (uint8_t)i);
        b->part.rank = 0;
        bot_dial(b);
    }
}

/* One world from begin to end; returns the hash of its trace. */
static uint64_t play(uint64_t seed, const struct sim_faults *faults, struct world *w)
{
    static const char *const listen[] = {"node0:7000"};
    static const struct identity anyone = {.tenant = "acme", .role = ROLE_WRITER, .subject = "bot"};
    struct sim_options so = {.seed = seed, .trace = trace, .trace_arg = w};
    for (enum metric m = 0; m < METRIC_COUNT; m++)
        metric_set(m, 0); /* a status has their digits */
    memset(w, 0, sizeof *w);
    w->sim = sim_create(&so);
    assert_non_null(w->sim);
    for (int i = 0; i < 2; i++)
        w->loops[i] = sim_loop(w->sim, 0);
    struct boot_options o = {.loops = w->loops,
                             .loop_count = 2,
                             .folder = "store",
                             .join_wait_ms = 2000,
                             .check_wait_ms = 1000,
                             .segment_idle_ms = 5000,
                             .buffers_bytes = 1 << 20,
                             .ensure_tenant = "acme",
                             .server = {.clear_identities = &anyone,
                                        .listen = listen,
                                        .listen_count = 1,
                                        .limits = {.read_cache_bytes = 1 << 20}}};
    assert_int_equal(boot_start(&o, on_started, w), 0);
    (void)sim_run(w->sim, has_started, w, EVENTS_MAX);
    assert_true(w->started && w->boot);
    sim_set_faults(w->sim, faults);
    w->bots_before_stop = (unsigned)(seed % (BOTS + 1));
    w->stop_bound_ms = (uint32_t)(seed % 3 * 300);
    bots_begin(w, seed);
    (void)sim_run(w->sim, time_to_stop, w, EVENTS_MAX);
    w->stop_msg.run = do_stop;
    loop_post(w->loops[0], &w->stop_msg);
    uint64_t events = sim_run(w->sim, NULL, NULL, EVENTS_MAX);
    if (events == EVENTS_MAX || !w->stopped || w->bots_done < BOTS)
        fail_msg("seed %llu: the world does not come to rest: stopped %d, bots done %u",
                 (unsigned long long)seed, w->stopped, w->bots_done);
    for (unsigned i = 0; i < BOTS; i++) {
        handmade_free(&w->bots[i].part);
        loop_destroy(w->bots[i].loop);
    }
    for (int i = 0; i < 2; i++)
        loop_destroy(w->loops[i]);
    sim_destroy(w->sim);
    assert_int_equal(metric_get(METRIC_sessions_open), 0);
    assert_int_equal(metric_get(METRIC_requests_in_flight), 0);
    return w->trace;
}

static unsigned seeds(unsigned usual)
{
    const char *asked = getenv("LARDER_SIM_SEEDS");
    return asked ? (unsigned)atoi(asked) : usual;
}

static void a_calm_world_answers_everything(void **state)
{
    (void)state;
    static struct world w;
    uint64_t answers = 0, bytes = 0;
    for (uint64_t seed = 1; seed <= seeds(12); seed++) {
        (void)play(seed, &(struct sim_faults){0}, &w);
        answers += w.answers;
        bytes += w.read_bytes;
    }
    assert_true(answers > 500 && bytes > 100000); /* the bots did get somewhere */
}

static void cuts_stalls_and_failing_disks(void **state)
{
    (void)state;
    static struct world w;
    static const struct sim_faults faults = {.read_error = 2000,
                                             .write_error = 2000,
                                             .short_transfer = 200000,
                                             .connection_cut = 3000,
                                             .stall_ms_max = 40};
    uint64_t answers = 0, errors = 0;
    for (uint64_t seed = 100; seed < 100 + seeds(25); seed++) {
        (void)play(seed, &faults, &w);
        answers += w.answers;
        errors += w.errors;
    }
    assert_true(answers > 300 && errors > 20);
}

static void the_same_seed_gives_the_same_world(void **state)
{
    (void)state;
    static struct world w;
    static const struct sim_faults faults = {.connection_cut = 3000, .stall_ms_max = 20};
    uint64_t first = play(7, &faults, &w), second = play(7, &faults, &w), other = play(8, &faults, &w);
    assert_int_equal(first, second);
    assert_int_not_equal(first, other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_calm_world_answers_everything),
        cmocka_unit_test(cuts_stalls_and_failing_disks),
        cmocka_unit_test(the_same_seed_gives_the_same_world),
    };
    return cmocka_run_group_tests_name("simulated", tests, NULL, NULL);
}
