/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sim/actor.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "tests/sim/fiber.h"
#include "tests/sim/ghost.h"
#include "tests/sim/process.h"

#define DEADLINE_MS 8000u
#define PATIENCE_MS 40000u /* beyond it an answer that was promised within the deadline counts as lost */

/* A connection. It outlives its actor by as long as the operations on it take to end. */
struct line {
    struct world *w;
    struct actor *a; /* NULL: let go */
    int fd;
    struct channel *channel;
    struct io_op connect, recv, send, close;
    bool connecting, receiving, sending, closing;
    bool lost;
    enum client_role role;
    uint8_t *send_buf;
    uint8_t in[8192];
    struct buf said; /* all that was sent, for a ghost */
    struct list calls;
    uint64_t last_id;
};

uint32_t roll(struct actor *a, uint32_t n)
{
    return draw_below(&a->rng, n);
}

void actor_random(struct actor *a, void *p, size_t n)
{
    for (uint8_t *at = p; n-- > 0;)
        *at++ = (uint8_t)draw(&a->rng);
}

struct id actor_id(struct actor *a)
{
    struct id id;
    actor_random(a, &id, sizeof id);
    return id;
}

bool actor_errs(struct actor *a, uint32_t n)
{
    return a->w->faulty && roll(a, n) == 0;
}

/* ---- running ---- */

static struct actor *now;

struct actor *actor_now(void)
{
    return now;
}

static void wake_now(struct loop_msg *m)
{
    struct actor *a = container_of(m, struct actor, wake);
    a->wake_due = false;
    if (a->over)
        return;
    now = a;
    fiber_resume(a->fiber);
    now = NULL;
}

void actor_wake(struct actor *a)
{
    if (a->wake_due || a->over)
        return;
    a->wake_due = true;
    loop_post(a->w->clients, &a->wake);
}

static void timer_rang(struct loop_timer *t)
{
    struct actor *a = container_of(t, struct actor, timer);
    a->rang = true;
    actor_wake(a);
}

static void actor_run(void *arg)
{
    struct actor *a = arg;
    a->main(a); /* also if it was killed before it began: whoever counts on its end hears of it */
    actor_hang_up(a);
    loop_timer_clear(a->w->clients, &a->timer);
    world_note(a->w, "%s is over", a->name);
    a->over = true;
}

struct actor *actor_begin(struct world *w, enum client_role role, void (*main)(struct actor *a), void *arg,
                          const char *fmt, ...)
{
    struct actor *a = calloc(1, sizeof *a);
    check(a);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(a->name, sizeof a->name, fmt, ap);
    va_end(ap);
    a->w = w;
    a->role = role;
    a->main = main;
    a->arg = arg;
    a->rng = draw(&w->rng) ^ w->actor_count++;
    a->fiber = fiber_new(actor_run, a);
    a->wake.run = wake_now;
    a->timer.fire = timer_rang;
    list_add_tail(&w->actors, &a->link);
    actor_wake(a);
    return a;
}

void actor_kill(struct actor *a)
{
    if (a->over || a->killed)
        return;
    world_note(a->w, "%s dies", a->name);
    a->killed = true;
    actor_hang_up(a);
    if (a->process)
        process_kill(a->process);
    actor_wake(a);
}

void actor_free(struct actor *a)
{
    check(a->over && !a->wake_due);
    list_del(&a->link);
    fiber_free(a->fiber);
    free(a);
}

void actor_set_timer(struct actor *a, uint64_t ms)
{
    a->rang = false;
    loop_timer_set(a->w->clients, &a->timer, loop_now_ms(a->w->clients) + ms + 1);
}

void actor_sleep(struct actor *a, uint32_t ms)
{
    actor_set_timer(a, ms);
    while (alive(a) && !a->rang)
        fiber_wait(a->fiber);
}

/* ---- lines ---- */

static void line_settle(struct line *l);

static void line_lose(struct line *l)
{
    struct list *it;
    if (l->lost)
        return;
    l->lost = true;
    while ((it = list_pop(&l->calls))) {
        struct call *c = container_of(it, struct call, link);
        err_set(&c->err, ERR_NETWORK, "the connection was lost");
        c->done = true;
    }
    if (l->fd >= 0)
        loop_shutdown(l->w->clients, l->fd);
    if (l->a)
        actor_wake(l->a);
}

static void line_free(struct line *l)
{
    l->w->lines--;
    channel_free(l->channel);
    free(l->send_buf);
    if (l->w->faulty && l->said.n && l->w->ghosts_left && draw_below(&l->w->rng, 2))
        ghost_begin(l->w, l->role, &l->said);
    buf_free(&l->said);
    free(l);
}

static void line_closed(struct io_op *op)
{
    struct line *l = container_of(op, struct line, close);
    l->closing = false;
    l->fd = -1;
    line_settle(l);
}

static void line_sent(struct io_op *op);

static void line_settle(struct line *l)
{
    size_t n;
    if (!l->lost && !l->sending && !l->connecting) {
        free(l->send_buf);
        l->send_buf = channel_output_take(l->channel, &n);
        if (l->send_buf) {
            l->sending = true;
            if (l->w->ghosts_left && l->said.n < GHOST_BYTES_MAX)
                buf_put(&l->said, l->send_buf, n);
            l->send.done = line_sent;
            loop_send(l->w->clients, &l->send, l->fd, l->send_buf, n);
        }
    }
    if (!l->lost || l->connecting || l->receiving || l->sending || l->closing)
        return;
    if (l->fd >= 0) {
        l->closing = true;
        l->close.done = line_closed;
        loop_close(l->w->clients, &l->close, l->fd);
    } else if (!l->a) {
        line_free(l);
    }
}

static void line_sent(struct io_op *op)
{
    struct line *l = container_of(op, struct line, send);
    l->sending = false;
    if (op->result < 0)
        line_lose(l);
    line_settle(l);
}

static void grant(struct line *l, struct call *c)
{
    struct buf m = {0};
    struct frame_header h = {.opcode = OP_CREDIT, .request_id = c->id};
    uint64_t bytes = l->a && roll(l->a, 3) == 0 ? 1 + roll(l->a, 5000) : 1u << 20;
    msg_credit_encode(&(struct msg_credit){.request_id = c->id, .bytes = bytes}, &m);
    check(channel_send(l->channel, &h, SLICE(m.p, m.n), (struct slice){0}, NULL) == 0);
    buf_free(&m);
}

/* The deed is done, and nobody hears of it. */
static bool is_lost_on_the_way(struct line *l, const struct frame *f)
{
    uint32_t chance = l->w->faulty ? l->w->plan.knob[KNOB_LOST_REPLY] : 0;
    if (!chance || f->header.flags & FRAME_MORE || draw_below(&l->w->rng, 1000000) >= chance)
        return false;
    l->w->tally.lost_replies++;
    line_lose(l);
    return true;
}

static void take_answer(struct line *l, struct call *c, const struct frame *f)
{
    struct rcur in = rcur_of(f->payload, f->header.payload_bytes);
    if (f->header.opcode != c->opcode || !(f->header.flags & FRAME_RESPONSE))
        world_fail(l->w, "a %s was answered by a %s", opcode_name(c->opcode), opcode_name(f->header.opcode));
    if (f->header.flags & FRAME_ERROR) {
        (void)err_of_msg(&in, &c->err);
        l->w->tally.errors++;
        if (c->err.class == ERR_NONE || !c->err.text[0])
            world_fail(l->w, "a %s failed and the answer does not say why", opcode_name(c->opcode));
    } else if (c->frame) {
        c->frame(c, &in);
    } else {
        buf_put(&c->reply, f->payload, f->header.payload_bytes);
        if (c->opcode == OP_READ && c->reply.n > c->want_bytes)
            world_fail(l->w, "%zu bytes were read, %llu asked for", c->reply.n,
                       (unsigned long long)c->want_bytes);
    }
    if (f->header.flags & FRAME_MORE) {
        if (c->opcode == OP_READ)
            grant(l, c);
        return;
    }
    l->w->tally.answers++;
    c->done = true;
    list_del(&c->link);
    if (l->a)
        actor_wake(l->a);
}

static void take_frame(struct line *l, const struct frame *f)
{
    list_for_each (it, &l->calls) {
        struct call *c = container_of(it, struct call, link);
        if (c->id == f->header.request_id) {
            if (!is_lost_on_the_way(l, f))
                take_answer(l, c, f);
            return;
        }
    }
    if (f->header.opcode == OP_HELLO && (f->header.flags & FRAME_ERROR)) { /* refused before it was read */
        line_lose(l);
        return;
    }
    world_fail(l->w, "an answer came to a %s that is not in flight: answered twice, or never asked",
               opcode_name(f->header.opcode));
}

static void line_receive(struct line *l);

static void line_received(struct io_op *op)
{
    struct line *l = container_of(op, struct line, recv);
    struct frame f;
    struct err e = {0};
    int r = 1;
    l->receiving = false;
    if (op->result <= 0 || !l->a)
        line_lose(l);
    else if (channel_input(l->channel, l->in, (size_t)op->result, &e) < 0)
        world_fail(l->w, "bytes from the server: %s", e.text);
    while (!l->lost && (r = channel_frame(l->channel, &f, &e)) > 0) {
        take_frame(l, &f);
        channel_frame_done(l->channel);
    }
    if (r < 0)
        world_fail(l->w, "a frame of the server: %s", e.text);
    if (!l->lost)
        line_receive(l);
    line_settle(l);
}

static void line_receive(struct line *l)
{
    l->receiving = true;
    l->recv.done = line_received;
    loop_recv(l->w->clients, &l->recv, l->fd, l->in, sizeof l->in);
}

static void line_connected(struct io_op *op)
{
    struct line *l = container_of(op, struct line, connect);
    l->connecting = false;
    if (op->result >= 0)
        l->fd = (int)op->result;
    if (op->result < 0 || !l->a)
        line_lose(l);
    if (l->lost && l->fd >= 0)
        loop_shutdown(l->w->clients, l->fd);
    if (!l->lost)
        line_receive(l);
    if (l->a)
        actor_wake(l->a);
    line_settle(l);
}

static void line_open(struct actor *a)
{
    static const struct identity server = {.server = true};
    struct line *l = calloc(1, sizeof *l);
    check(l && channel_create_clear(false, &server, &l->channel) == 0);
    l->w = a->w;
    l->w->lines++;
    l->role = a->role;
    l->a = a;
    l->fd = -1;
    list_init(&l->calls);
    a->line = l;
    l->connecting = true;
    l->connect.done = line_connected;
    loop_connect(l->w->clients, &l->connect, "node0", world_port(a->role));
}

void actor_hang_up(struct actor *a)
{
    struct line *l = a->line;
    if (!l)
        return;
    a->line = NULL;
    line_lose(l);
    l->a = NULL;
    line_settle(l);
}

/* ---- calls ---- */

void call_drop(struct call *c)
{
    if (!c->done && c->line)
        list_del(&c->link);
    buf_free(&c->reply);
}

void call_begin(struct actor *a, struct call *c, uint16_t opcode, struct buf *message, struct slice tail)
{
    struct line *l = a->line;
    struct err e = {0};
    list_init(&c->link);
    buf_reset(&c->reply);
    err_clear(&c->err);
    c->opcode = opcode;
    c->done = false;
    c->line = NULL;
    check(!message->failed);
    if (!l || l->lost) {
        err_set(&c->err, ERR_NETWORK, "not connected");
        c->done = true;
        return;
    }
    struct frame_header h = {.opcode = opcode, .request_id = ++l->last_id, .deadline_ms = DEADLINE_MS};
    c->id = h.request_id;
    c->line = l;
    check(channel_send(l->channel, &h, SLICE(message->p, message->n), tail, &e) == 0);
    list_add_tail(&l->calls, &c->link);
    line_settle(l);
}

enum err_class call_end(struct actor *a, struct call *c)
{
    actor_set_timer(a, PATIENCE_MS);
    while (alive(a) && !c->done) {
        fiber_wait(a->fiber);
        if (a->rang && !c->done && alive(a))
            world_fail(a->w, "%s waits for a %s and is not answered within %u ms of a deadline of %u",
                       a->name, opcode_name(c->opcode), PATIENCE_MS, DEADLINE_MS);
    }
    if (!c->done) { /* killed */
        list_del(&c->link);
        err_set(&c->err, ERR_NETWORK, "dead");
        c->done = true;
    }
    return c->err.class;
}

static bool hello(struct actor *a)
{
    struct buf m = {0};
    struct call c = {0};
    msg_hello_encode(&(struct msg_hello){.features = 1, .software = slice_str("sim")}, &m);
    call_begin(a, &c, OP_HELLO, &m, (struct slice){0});
    buf_free(&m);
    bool good = call_end(a, &c) == ERR_NONE;
    if (good && ANSWER(&c, hello_reply).role != a->role)
        world_fail(a->w, "%s was welcomed in another role", a->name);
    if (good)
        channel_allow_large(a->line->channel);
    call_drop(&c);
    return good;
}

bool actor_connect(struct actor *a)
{
    while (alive(a)) {
        if (a->line && !a->line->lost)
            return true;
        actor_hang_up(a);
        line_open(a);
        actor_set_timer(a, PATIENCE_MS);
        while (alive(a) && a->line->connecting && !a->rang)
            fiber_wait(a->fiber);
        if (alive(a) && !a->line->lost && !a->line->connecting && hello(a))
            return true;
        actor_hang_up(a);
        if (alive(a))
            actor_sleep(a, 2 + roll(a, 60));
    }
    return false;
}

static bool is_of_a_part(uint16_t opcode)
{
    return opcode >= OP_SEGMENT_CREATE && opcode <= OP_SAVE_ABORT;
}

/* After how long to repeat it; 0: the answer stands. */
static uint32_t pause_before_repeat(struct actor *a, uint16_t opcode, enum err_class class)
{
    switch (class) {
    case ERR_NETWORK: return 1 + roll(a, 20);
    case ERR_BUSY:
    case ERR_NO_MEMORY: return opcode == OP_SAVE_ABORT || opcode == OP_COMMIT ? 0 : 5 + roll(a, 50);
    case ERR_READ_ONLY: a->w->restart_wanted = true; return 100 + roll(a, 200);
    case ERR_CANCELLED:
    case ERR_TIMEOUT:
    case ERR_NO_SPACE:
    case ERR_IO: return is_of_a_part(opcode) ? 0 : 20 + roll(a, 100);
    default: return 0;
    }
}

static bool impossible(enum err_class class)
{
    return class == ERR_INVALID || class == ERR_DENIED || class == ERR_CORRUPT || class == ERR_VERSION ||
           class == ERR_PROTOCOL || class == ERR_LIMIT || class == ERR_UNSUPPORTED || class == ERR_QUOTA ||
           class == ERR_KEY;
}

/* What could not be read when the server started is damaged for it until it starts again. */
static bool tolerates(struct actor *a, uint16_t opcode)
{
    if (!a->w->faulty || !a->w->plan.knob[KNOB_READ_ERROR] || is_of_a_part(opcode) || opcode == OP_READ)
        return false;
    a->w->restart_wanted = true;
    return true;
}

enum err_class actor_ask(struct actor *a, struct call *c, uint16_t opcode, struct buf *message)
{
    enum err_class class = ERR_NETWORK;
    while (actor_connect(a)) {
        call_begin(a, c, opcode, message, (struct slice){0});
        class = call_end(a, c);
        if (!alive(a))
            break;
        uint32_t ms = pause_before_repeat(a, opcode, class);
        if (class == ERR_CORRUPT && tolerates(a, opcode)) {
            class = ERR_IO;
            ms = 100 + roll(a, 200);
        }
        if (impossible(class))
            world_fail(a->w, "%s: %s was answered with \"%s\": %s", a->name, opcode_name(opcode),
                       err_class_name(class), c->err.text);
        if (class != ERR_NONE)
            world_note(a->w, "%s: %s: %s: %s", a->name, opcode_name(opcode), err_class_name(class),
                       c->err.text);
        if (!ms)
            break;
        actor_sleep(a, ms);
        class = ERR_NETWORK;
    }
    buf_free(message);
    return alive(a) ? class : ERR_NETWORK;
}
