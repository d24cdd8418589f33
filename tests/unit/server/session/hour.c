/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: hours of pauses, cut connections and server restarts cost a feed nothing: every sample comes once,
 * byte for byte, on changing numbers of ranks; a stream whose consumer pauses for ten minutes is not cut off
 * and goes on where it stood (D14); a connection that drops in the middle of a shard goes on at the first
 * byte that had not come (D13); the server's memory is flat; and what it tells of waits for the disk is true.
 * Method: the whole server on the simulator, hours of its clock in seconds of ours. Ranks plan with the
 * client's own feed plan, read with little credit, pause at random, and keep nothing over a change of ranks
 * but the 64 bytes of state. The seed makes all of it; LARDER_SIM_SEEDS sets how many seeds are run.
 */
#include <fcntl.h>
#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/feed_plan.h"
#include "format/channel.h"
#include "server/boot.h"
#include "server/io/sim_impl.h"

#define SHARDS        4u
#define RECORD_BYTES  512u
#define BATCH         12u
#define PHASES        5u
#define PHASE_BATCHES 60u
#define RANKS_MAX     4u
#define LONG_PAUSE_MS 600000u
#define EVENTS_MAX    50000000u

static const uint64_t counts[SHARDS] = {37, 1, 64, 21};
static const uint32_t worlds[PHASES] = {2, 3, 1, 4, 2};

struct hour;
struct rank {
    struct hour *w;
    struct loop *loop;
    struct feed_plan plan;
    uint32_t batches;
    struct feed_slice slice;
    bool in_batch, done;
    uint8_t bytes[BATCH * RECORD_BYTES];
    uint64_t got, wanted, granted; /* bytes of the batch; credit of the present stream */
    uint64_t asked_from;
    struct id version;
    bool version_known;
    bool long_pause_had, paused;
    uint64_t request; /* the read's */
    /* The connection. */
    int fd;
    struct channel *channel;
    struct io_op connect, recv, send, close;
    bool up, receiving, sending, leaving, closing;
    uint8_t recv_buf[4096], *send_buf;
    uint64_t next_id;
    struct loop_timer timer;
};

struct life {
    struct hour *w;
    struct loop *loop;
    struct boot *boot;
    bool over;
    struct loop_msg stop_msg;
};

struct hour {
    struct sim *sim;
    struct loop *clients;
    uint64_t rng;
    struct life *life, *dying; /* of the server: the present one, and the one before it */
    struct loop_timer fate;
    bool ending;
    struct rank ranks[RANKS_MAX];
    uint32_t world, running;
    uint8_t state[FEED_STATE_BYTES];
    uint32_t *seen; /* by position */
    uint64_t positions;
    uint64_t cuts, stops, crashes, pauses, pauses_outlived, waited_ms;
    uint64_t memory[PHASES]; /* in use when one rank is left */
    uint32_t phase;
};

static uint64_t roll(struct hour *w, uint64_t n)
{
    return order_mix(w->rng += 0x9e3779b97f4a7c15ull) % n;
}

static void fill_record(uint32_t shard, uint64_t number, uint8_t out[RECORD_BYTES])
{
    for (uint32_t i = 0; i < RECORD_BYTES; i += 8)
        le64_put(out + i, order_mix((uint64_t)shard << 40 | number << 16 | i));
}

/* ---- the server's lives ---- */

static void life_begin(struct hour *w);

static void on_stopped(void *arg, uint64_t finished, uint64_t failed)
{
    struct life *l = arg;
    (void)finished, (void)failed;
    l->boot = NULL;
    l->over = true;
}

static void stop_now(struct loop_msg *m)
{
    struct life *l = container_of(m, struct life, stop_msg);
    boot_stop(l->boot, 200, on_stopped, l);
}

static void on_started(void *arg, struct boot *b, const struct err *e)
{
    struct life *l = arg;
    if (!b)
        fail_msg("the server does not start: %s", e->text);
    l->boot = b;
}

static void life_begin(struct hour *w)
{
    static const char *const listen[] = {"node0:7000"};
    static const struct identity anyone = {.tenant = "acme", .role = ROLE_WRITER, .subject = "rank"};
    static const struct published_dir rows = {.name = "rows",
                                              .path = "rows",
                                              .tenant = "acme",
                                              .format = SHARD_RECORDS,
                                              .record_bytes = RECORD_BYTES};
    struct life *l = calloc(1, sizeof *l);
    l->w = w;
    l->loop = sim_loop(w->sim, 0);
    w->life = l;
    struct boot_options o = {.loops = &l->loop,
                             .loop_count = 1,
                             .folder = "store",
                             .join_wait_ms = 2000,
                             .check_wait_ms = 1000,
                             .segment_idle_ms = 5000,
                             .buffers_bytes = 1 << 20,
                             .ensure_tenant = "acme",
                             .server = {.clear_identities = &anyone,
                                        .listen = listen,
                                        .listen_count = 1,
                                        .published = &rows,
                                        .published_count = 1,
                                        .limits = {.read_cache_bytes = 1 << 20}}};
    assert_int_equal(boot_start(&o, on_started, l), 0);
}

static bool life_rests(const struct life *l)
{
    return l->over && sim_loop_of(l->loop)->stopped && l->loop->pending == 0 && !sim_loop_of(l->loop)->first;
}

static void bury(struct hour *w)
{
    if (!w->dying || !life_rests(w->dying))
        return;
    loop_destroy(w->dying->loop);
    free(w->dying);
    w->dying = NULL;
}

/* Every few minutes the server is stopped, or loses power; another begins a little later. */
static void fate(struct loop_timer *t)
{
    struct hour *w = container_of(t, struct hour, fate);
    bury(w);
    if (w->life && w->life->boot && !w->dying) {
        bool crash = roll(w, 2);
        *(crash ? &w->crashes : &w->stops) += 1;
        w->dying = w->life;
        w->life = NULL;
        if (crash)
            sim_crash(w->sim, 0);
        w->dying->stop_msg.run = stop_now;
        loop_post(w->dying->loop, &w->dying->stop_msg);
    } else if (!w->life && !w->ending && !w->dying) {
        life_begin(w);
        loop_timer_set(w->clients, t, loop_now_ms(w->clients) + 60000 + roll(w, 600000));
        return;
    }
    if (!w->ending || w->dying)
        loop_timer_set(w->clients, t, loop_now_ms(w->clients) + 1000);
}

/* ---- a rank ---- */

static void rank_step(struct rank *r);

static void rank_flush(struct rank *r)
{
    size_t n;
    if (r->sending || r->leaving)
        return;
    free(r->send_buf);
    r->send_buf = channel_output_take(r->channel, &n);
    if (!r->send_buf)
        return;
    r->sending = true;
    loop_send(r->loop, &r->send, r->fd, r->send_buf, n);
}

static uint64_t rank_send(struct rank *r, uint16_t opcode, struct buf *m, uint64_t about)
{
    struct frame_header h = {
        .opcode = opcode, .request_id = about ? about : ++r->next_id, .deadline_ms = 30000};
    assert_int_equal(channel_send(r->channel, &h, SLICE(m->p, m->n), (struct slice){0}, NULL), 0);
    buf_free(m);
    return h.request_id;
}

static void rank_leave(struct rank *r)
{
    if (r->leaving)
        return;
    r->leaving = true;
    r->up = r->paused = false;
    r->request = 0;
    loop_timer_clear(r->loop, &r->timer);
    loop_shutdown(r->loop, r->fd);
}

static void rank_dial(struct rank *r);

static void redial(struct loop_timer *t)
{
    rank_dial(container_of(t, struct rank, timer));
}

static void rank_closed(struct io_op *op)
{
    struct rank *r = container_of(op, struct rank, close);
    channel_free(r->channel);
    r->channel = NULL;
    free(r->send_buf);
    r->send_buf = NULL;
    r->closing = false;
    if (r->done) {
        r->w->running--;
        return;
    }
    r->w->cuts++;
    r->timer.fire = redial;
    loop_timer_set(r->loop, &r->timer, loop_now_ms(r->loop) + 100 + roll(r->w, 900));
}

static void rank_close_if_quiet(struct rank *r)
{
    if (!r->leaving || r->receiving || r->sending || r->closing)
        return;
    r->closing = true;
    r->close.done = rank_closed;
    loop_close(r->loop, &r->close, r->fd);
}

static uint64_t some_credit(struct rank *r)
{
    uint64_t left = r->wanted - r->got, n = 1 + roll(r->w, 3 * RECORD_BYTES);
    return n < left ? n : left;
}

/* What is still missing of the batch, beginning with the first byte that has not come. */
static void ask(struct rank *r)
{
    struct buf ranges = {0}, b = {0};
    uint32_t count = 0;
    for (uint32_t i = (uint32_t)(r->got / RECORD_BYTES); i < r->slice.count; i++) {
        struct order_place at = feed_plan_place(&r->plan, &r->slice, i).at.at;
        uint64_t skip = count == 0 ? r->got % RECORD_BYTES : 0;
        struct msg_read_range range = {.offset = at.sample * RECORD_BYTES + skip,
                                       .bytes = RECORD_BYTES - skip};
        le32_put(range.object.bytes, at.shard);
        msg_read_range_encode(&range, &ranges);
        count++;
    }
    r->asked_from = r->got;
    r->granted = some_credit(r);
    struct msg_read m = {.source = READ_PUBLISHED,
                         .class = 2,
                         .scope = r->version,
                         .credit = r->granted,
                         .count = count,
                         .ranges = SLICE(ranges.p, ranges.n)};
    msg_read_encode(&m, &b);
    r->request = rank_send(r, OP_READ, &b, 0);
    buf_free(&ranges);
}

static void grant(struct rank *r)
{
    struct buf b = {0};
    uint64_t more = some_credit(r);
    r->granted += more;
    msg_credit_encode(&(struct msg_credit){.request_id = r->request, .bytes = more}, &b);
    (void)rank_send(r, OP_CREDIT, &b, r->request);
}

static void pause_over(struct loop_timer *t)
{
    struct rank *r = container_of(t, struct rank, timer);
    r->paused = false;
    if (r->request) {
        r->w->pauses_outlived++; /* nobody has cut the stream off */
        grant(r);
    } else {
        rank_step(r);
    }
    rank_flush(r);
}

static void pause_for(struct rank *r, uint64_t ms)
{
    r->paused = true;
    r->timer.fire = pause_over;
    loop_timer_set(r->loop, &r->timer, loop_now_ms(r->loop) + ms);
}

static void batch_came(struct rank *r)
{
    struct hour *w = r->w;
    uint8_t expected[RECORD_BYTES];
    for (uint32_t i = 0; i < r->slice.count; i++) {
        struct feed_place p = feed_plan_place(&r->plan, &r->slice, i);
        fill_record(p.at.at.shard, p.at.at.sample, expected);
        assert_memory_equal(r->bytes + i * RECORD_BYTES, expected, RECORD_BYTES);
        assert_true(p.position < w->positions);
        w->seen[p.position]++;
    }
    r->in_batch = false;
    r->batches++;
    if (r->batches == PHASE_BATCHES) { /* all ranks end at the same batch: any of their states will do */
        struct feed_state s = {.epoch = r->slice.next_epoch, .position = r->slice.next_position};
        feed_state_encode(&s, w->state);
    }
    if (w->running == 1)
        w->memory[w->phase] = mallinfo2().uordblks;
}

static void rank_step(struct rank *r)
{
    if (!r->up || r->leaving || r->request || r->paused)
        return;
    if (!r->version_known) {
        struct buf b = {0};
        msg_published_open_encode(&(struct msg_published_open){.name = slice_str("rows")}, &b);
        (void)rank_send(r, OP_PUBLISHED_OPEN, &b, 0);
        r->version_known = true;
        return;
    }
    if (!r->in_batch) {
        if (r->batches == PHASE_BATCHES) {
            r->done = true;
            rank_leave(r);
            return;
        }
        assert_true(feed_plan_next(&r->plan, &r->slice));
        r->in_batch = true;
        r->got = 0;
        r->wanted = (uint64_t)r->slice.count * RECORD_BYTES;
    }
    ask(r);
}

static void take_bytes(struct rank *r, const struct frame *f)
{
    uint32_t n = f->header.payload_bytes;
    assert_true(r->got + n <= r->wanted && r->got + n <= r->asked_from + r->granted);
    memcpy(r->bytes + r->got, f->payload, n);
    r->got += n;
    r->w->waited_ms += f->header.deadline_ms;
    if (!(f->header.flags & FRAME_MORE)) {
        assert_true(r->got == r->wanted);
        r->request = 0;
        batch_came(r);
        pause_for(r, 20 + roll(r->w, 3000)); /* it trains */
    } else if (r->got == r->asked_from + r->granted) {
        bool long_one = !r->long_pause_had;
        r->long_pause_had = true;
        r->w->pauses++;
        pause_for(r, long_one              ? LONG_PAUSE_MS
                     : roll(r->w, 20) == 0 ? roll(r->w, LONG_PAUSE_MS)
                                           : roll(r->w, 200));
    }
}

static void take_frame(struct rank *r, const struct frame *f)
{
    struct rcur in = rcur_of(f->payload, f->header.payload_bytes);
    struct err e = {0};
    if (f->header.flags & FRAME_ERROR) {
        assert_true(err_of_msg(&in, &e) < 0);
        /* A server that stops says so; nothing else may go wrong. */
        if (e.class != ERR_CANCELLED)
            fail_msg("%s", e.text);
        rank_leave(r);
    } else if (f->header.opcode == OP_HELLO) {
        r->up = true;
    } else if (f->header.opcode == OP_PUBLISHED_OPEN) {
        struct msg_published_open_reply reply;
        assert_int_equal(msg_published_open_reply_decode(&in, &reply, &e), 0);
        r->version = reply.version;
    } else if (f->header.opcode == OP_READ && f->header.request_id == r->request) {
        take_bytes(r, f);
        return;
    }
    rank_step(r);
}

static void rank_received(struct io_op *op)
{
    struct rank *r = container_of(op, struct rank, recv);
    struct frame f;
    struct err e = {0};
    int rc = 0;
    r->receiving = false;
    if (op->result <= 0)
        rank_leave(r);
    else
        rc = channel_input(r->channel, r->recv_buf, (size_t)op->result, &e);
    assert_int_equal(rc, 0);
    while (!r->leaving && (rc = channel_frame(r->channel, &f, &e)) > 0) {
        take_frame(r, &f);
        channel_frame_done(r->channel);
    }
    assert_true(rc >= 0);
    rank_flush(r);
    if (!r->leaving) {
        r->receiving = true;
        loop_recv(r->loop, &r->recv, r->fd, r->recv_buf, sizeof r->recv_buf);
    }
    rank_close_if_quiet(r);
}

static void rank_sent(struct io_op *op)
{
    struct rank *r = container_of(op, struct rank, send);
    r->sending = false;
    if (op->result < 0)
        rank_leave(r);
    else
        rank_flush(r);
    rank_close_if_quiet(r);
}

static void rank_connected(struct io_op *op)
{
    static const struct identity server = {.server = true};
    struct rank *r = container_of(op, struct rank, connect);
    struct buf m = {0};
    if (op->result < 0) {
        r->timer.fire = redial;
        loop_timer_set(r->loop, &r->timer, loop_now_ms(r->loop) + 500);
        return;
    }
    r->fd = (int)op->result;
    r->leaving = r->up = r->version_known = false;
    r->recv.done = rank_received;
    r->send.done = rank_sent;
    assert_int_equal(channel_create_clear(false, &server, &r->channel), 0);
    msg_hello_encode(&(struct msg_hello){.features = FEATURES_KNOWN, .software = slice_str("rank")}, &m);
    (void)rank_send(r, OP_HELLO, &m, 0);
    rank_flush(r);
    r->receiving = true;
    loop_recv(r->loop, &r->recv, r->fd, r->recv_buf, sizeof r->recv_buf);
}

static void rank_dial(struct rank *r)
{
    r->connect.done = rank_connected;
    loop_connect(r->loop, &r->connect, "node0", "7000");
}

/* ---- the world ---- */

static struct feed_plan plan_of(uint32_t rank, uint32_t world)
{
    struct mix_source source = {.name = "rows", .samples_per_shard = counts, .shards = SHARDS, .weight = 1};
    struct feed_plan_options o = {.sources = &source,
                                  .source_count = 1,
                                  .seed = 7,
                                  .window_shards = 2,
                                  .rank = rank,
                                  .world = world,
                                  .global_batch = BATCH,
                                  .epochs = 1000};
    struct feed_plan p;
    struct err e = {0};
    if (feed_plan_init(&p, &o, &e) < 0)
        fail_msg("%s", e.text);
    return p;
}

static void phase_begin(struct hour *w)
{
    struct feed_state s = {0};
    struct err e;
    if (w->phase > 0)
        assert_int_equal(feed_state_decode(w->state, sizeof w->state, &s, &e), 0);
    w->world = w->running = worlds[w->phase];
    for (uint32_t i = 0; i < w->world; i++) {
        struct rank *r = &w->ranks[i];
        memset(r, 0, sizeof *r);
        r->w = w;
        r->loop = w->clients;
        r->plan = plan_of(i, w->world);
        assert_int_equal(feed_plan_seek(&r->plan, s.epoch, s.position, &e), 0);
        rank_dial(r);
    }
}

static bool phase_over(void *arg)
{
    return ((struct hour *)arg)->running == 0;
}

struct making {
    struct io_op op;
    bool done;
};

static bool settled(void *arg)
{
    return ((struct making *)arg)->done;
}

static void made(struct io_op *op)
{
    container_of(op, struct making, op)->done = true;
}

static int64_t end_of(struct hour *w, struct making *m)
{
    (void)sim_run(w->sim, settled, m, EVENTS_MAX);
    assert_true(m->done);
    return m->op.result;
}

static struct io_op *fresh(struct making *m)
{
    *m = (struct making){.op.done = made};
    return &m->op;
}

static void write_shards(struct hour *w)
{
    struct loop *l = sim_loop(w->sim, 0);
    struct making op;
    loop_mkdir(l, fresh(&op), "rows", 0755);
    assert_int_equal(end_of(w, &op), 0);
    for (uint32_t i = 0; i < SHARDS; i++) {
        char path[32];
        uint8_t *p = malloc(counts[i] * RECORD_BYTES);
        for (uint64_t k = 0; k < counts[i]; k++)
            fill_record(i, k, p + k * RECORD_BYTES);
        snprintf(path, sizeof path, "rows/%u.bin", i);
        loop_open(l, fresh(&op), path, O_WRONLY | O_CREAT, 0644);
        int fd = (int)end_of(w, &op);
        assert_true(fd >= 0);
        loop_write(l, fresh(&op), fd, p, counts[i] * RECORD_BYTES, 0);
        assert_int_equal(end_of(w, &op), counts[i] * RECORD_BYTES);
        loop_fsync(l, fresh(&op), fd);
        assert_int_equal(end_of(w, &op), 0);
        loop_close(l, fresh(&op), fd);
        assert_int_equal(end_of(w, &op), 0);
        free(p);
    }
    static const char *const folders[] = {"rows", "."};
    for (int i = 0; i < 2; i++) {
        loop_open(l, fresh(&op), folders[i], O_RDONLY | O_DIRECTORY, 0);
        int fd = (int)end_of(w, &op);
        assert_true(fd >= 0);
        loop_fsync(l, fresh(&op), fd);
        assert_int_equal(end_of(w, &op), 0);
        loop_close(l, fresh(&op), fd);
        assert_int_equal(end_of(w, &op), 0);
    }
    loop_destroy(l);
}

static void assert_all_once(const struct hour *w)
{
    struct feed_plan p = plan_of(0, 1);
    struct feed_slice s;
    uint32_t *expected = calloc(w->positions, sizeof *expected);
    for (uint32_t i = 0; i < PHASES * PHASE_BATCHES; i++) {
        assert_true(feed_plan_next(&p, &s));
        for (uint32_t k = 0; k < s.count; k++)
            expected[feed_plan_place(&p, &s, k).position]++;
    }
    assert_memory_equal(w->seen, expected, w->positions * sizeof *expected);
    feed_plan_free(&p);
    free(expected);
}

static void hour_begin(struct hour *w, uint64_t seed)
{
    memset(w, 0, sizeof *w);
    w->rng = seed;
    w->sim = sim_create(&(struct sim_options){.seed = seed});
    w->positions = 2 * (uint64_t)PHASES * PHASE_BATCHES * BATCH;
    w->seen = calloc(w->positions, sizeof *w->seen);
    write_shards(w);
    sim_set_faults(w->sim, &(struct sim_faults){.connection_cut = 2000,
                                                .stall_ms_max = 20,
                                                .short_transfer = 50000,
                                                .lose_unsynced = true});
    w->clients = sim_loop(w->sim, 1);
    life_begin(w);
    w->fate.fire = fate;
    loop_timer_set(w->clients, &w->fate, 120000);
}

static void hour_end(struct hour *w)
{
    w->ending = true;
    while (w->life || w->dying) {
        if (sim_run(w->sim, NULL, NULL, 1) == 0)
            fail_msg("the server does not come to rest");
    }
    loop_timer_clear(w->clients, &w->fate);
    loop_destroy(w->clients);
    sim_destroy(w->sim);
    free(w->seen);
}

static void hours_of_trouble_cost_nothing(void **state)
{
    (void)state;
    static struct hour w;
    const char *asked = getenv("LARDER_SIM_SEEDS");
    uint64_t waited_ms = 0;
    for (uint64_t seed = 1; seed <= (asked ? strtoull(asked, NULL, 0) : 3); seed++) {
        hour_begin(&w, seed);
        for (w.phase = 0; w.phase < PHASES; w.phase++) {
            phase_begin(&w);
            uint64_t events = sim_run(w.sim, phase_over, &w, EVENTS_MAX);
            if (w.running > 0)
                fail_msg("seed %llu: phase %u does not end after %llu events", (unsigned long long)seed,
                         w.phase, (unsigned long long)events);
            for (uint32_t i = 0; i < w.world; i++)
                feed_plan_free(&w.ranks[i].plan);
        }
        assert_all_once(&w);
        uint64_t hours_ms = sim_now_ms(w.sim);
        print_message("seed %llu: %.1f hours, %llu cuts, %llu stops, %llu crashes, %llu pauses, %llu "
                      "outlived, disk %llu ms\n",
                      (unsigned long long)seed, (double)hours_ms / 3600000, (unsigned long long)w.cuts,
                      (unsigned long long)w.stops, (unsigned long long)w.crashes,
                      (unsigned long long)w.pauses, (unsigned long long)w.pauses_outlived,
                      (unsigned long long)w.waited_ms);
        assert_true(hours_ms > 3600000);
        assert_true(w.cuts > 5 && w.stops > 1 && w.crashes > 1 && w.pauses_outlived > 100);
        assert_true(w.waited_ms < hours_ms * RANKS_MAX);
        /* The simulator never uses a descriptor twice: its table grows by some bytes for each. */
        assert_true(w.memory[PHASES - 1] <= w.memory[1] + (64 << 10));
        waited_ms += w.waited_ms;
        hour_end(&w);
    }
    assert_true(waited_ms > 1000); /* the disk was waited for, and it was told */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hours_of_trouble_cost_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
