/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sim/ghost.h"

#include <stdlib.h>

#define FRAMES_MAX 256u
#define LATE_MS    3000u
#define STAY_MS    4000u

struct ghost {
    struct world *w;
    enum client_role role;
    struct buf says;
    int fd;
    struct io_op op, recv;
    struct loop_timer timer;
    bool sending, receiving, closing;
    uint8_t in[4096];
};

/* ---- what it says ---- */

/* Finds the whole frames; returns their number. at[0] .. at[number]: where they begin and the last ends. */
static size_t find_frames(const struct buf *said, size_t at[FRAMES_MAX + 1])
{
    size_t n = 0;
    for (at[0] = 0; n < FRAMES_MAX && said->n - at[n] >= FRAME_HEADER_BYTES; n++) {
        struct frame_header h;
        check(frame_header_decode(said->p + at[n], &h, NULL) == 0);
        if (said->n - at[n] - FRAME_HEADER_BYTES < h.payload_bytes)
            break;
        at[n + 1] = at[n] + FRAME_HEADER_BYTES + h.payload_bytes;
    }
    return n;
}

static void swap(size_t *a, size_t *b)
{
    size_t was = *a;
    *a = *b;
    *b = was;
}

static void choose_words(struct ghost *g, const struct buf *said)
{
    size_t at[FRAMES_MAX + 1], order[FRAMES_MAX], n = find_frames(said, at);
    uint32_t how = draw_below(&g->w->rng, 4);
    if (how == 0 && n > 1)
        n = 1 + draw_below(&g->w->rng, (uint32_t)n);
    for (size_t i = 0; i < n; i++) {
        order[i] = i;
        size_t k = how == 1 && i > 1 ? 1 + draw_below(&g->w->rng, (uint32_t)i) : i;
        swap(&order[i], &order[k]);
    }
    for (size_t i = 0; i < n; i++) {
        size_t f = order[i], twice = how == 2 ? 2 : 1;
        for (size_t k = 0; k < twice; k++)
            buf_put(&g->says, said->p + at[f], at[f + 1] - at[f]);
        g->w->tally.ghost_frames += twice;
    }
    check(!g->says.failed);
}

/* ---- its life ---- */

static void settle(struct ghost *g);

static void closed(struct io_op *op)
{
    struct ghost *g = container_of(op, struct ghost, op);
    g->fd = -1;
    g->closing = false;
    settle(g);
}

static void settle(struct ghost *g)
{
    if (g->sending || g->receiving || g->closing)
        return;
    loop_timer_clear(g->w->clients, &g->timer);
    if (g->fd >= 0) {
        g->closing = true;
        g->op.done = closed;
        loop_close(g->w->clients, &g->op, g->fd);
        return;
    }
    g->w->lines--;
    buf_free(&g->says);
    free(g);
}

static void goes(struct loop_timer *t)
{
    struct ghost *g = container_of(t, struct ghost, timer);
    loop_shutdown(g->w->clients, g->fd);
}

static void sent(struct io_op *op)
{
    struct ghost *g = container_of(op, struct ghost, op);
    g->sending = false;
    if (op->result < 0)
        loop_shutdown(g->w->clients, g->fd);
    settle(g);
}

static void received(struct io_op *op)
{
    struct ghost *g = container_of(op, struct ghost, recv);
    g->receiving = op->result > 0;
    if (g->receiving)
        loop_recv(g->w->clients, &g->recv, g->fd, g->in, sizeof g->in);
    else
        loop_shutdown(g->w->clients, g->fd);
    settle(g);
}

static void connected(struct io_op *op)
{
    struct ghost *g = container_of(op, struct ghost, op);
    if (op->result < 0) {
        settle(g);
        return;
    }
    g->fd = (int)op->result;
    g->sending = g->receiving = true;
    g->op.done = sent;
    loop_send(g->w->clients, &g->op, g->fd, g->says.p, g->says.n);
    g->recv.done = received;
    loop_recv(g->w->clients, &g->recv, g->fd, g->in, sizeof g->in);
    g->timer.fire = goes;
    loop_timer_set(g->w->clients, &g->timer, loop_now_ms(g->w->clients) + STAY_MS);
}

static void comes(struct loop_timer *t)
{
    struct ghost *g = container_of(t, struct ghost, timer);
    world_note(g->w, "a ghost comes");
    g->op.done = connected;
    loop_connect(g->w->clients, &g->op, "node0", world_port(g->role));
}

void ghost_begin(struct world *w, enum client_role role, struct buf *said)
{
    if (role == ROLE_OPERATOR)
        return;
    struct ghost *g = calloc(1, sizeof *g);
    check(g);
    g->w = w;
    g->role = role;
    g->fd = -1;
    w->lines++;
    w->ghosts_left--;
    w->tally.ghosts++;
    choose_words(g, said);
    g->timer.fire = comes;
    loop_timer_set(w->clients, &g->timer, loop_now_ms(w->clients) + 1 + draw_below(&w->rng, LATE_MS));
}
