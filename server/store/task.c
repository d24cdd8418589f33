/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tasks and latches. Answers are given, and waiting tasks stepped, from a turn of the loop of their own:
 * neither store_submit nor a step of another task ever calls back.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "server/store/internal.h"

void store_turn_soon(struct store *s)
{
    if (!s->turn_posted) {
        s->turn_posted = true;
        loop_post(s->o.loop, &s->turn);
    }
}

/* lent: a frame of a stream is still with the caller, perhaps on another thread. */
static void op_finish(struct store *s, struct store_op *op, bool lent)
{
    op->state = NULL;
    if (op->err.class != ERR_NONE && !lent)
        buf_free(&op->reply);
    list_del(&op->link);
    list_add_tail(&s->finished, &op->link);
    store_turn_soon(s);
}

static void deadline_passed(struct loop_timer *timer)
{
    struct store_op *op = container_of(timer, struct store_op, timer);
    struct task *t = op->state;
    check(t && t->waiting);
    if (t->expire) {
        t->expire(t);
        return;
    }
    uint64_t waited_ms = loop_now_ms(t->s->o.loop) - t->began_ms;
    task_fail(t, ERR_TIMEOUT, "waited %llu ms for %s; try again, or allow more time",
              (unsigned long long)waited_ms, t->wait_what);
}

struct task *task_start(struct store *s, struct store_op *op, bool with_io)
{
    struct task *t = calloc(1, sizeof *t);
    if (t && with_io && !(t->io = calloc(1, sizeof *t->io))) {
        free(t);
        t = NULL;
    }
    if (!t) {
        if (op) {
            err_set(&op->err, ERR_NO_MEMORY, "the server has no memory for the request; try again later");
            op_finish(s, op, false);
        }
        return NULL;
    }
    t->s = s;
    t->op = op;
    t->began_ms = loop_now_ms(s->o.loop);
    t->err = op ? &op->err : t->io ? &t->io->err : NULL;
    if (t->io)
        t->io->task = t;
    list_init(&t->queue);
    list_add_tail(&s->tasks, &t->link);
    if (op) {
        op->state = t;
        op->timer.fire = deadline_passed;
    }
    return t;
}

void task_end(struct task *t)
{
    struct store *s = t->s;
    if (t->latch)
        latch_leave(t);
    if (t->segment)
        segment_release(t->segment);
    if (t->run)
        run_release(t->run);
    list_del(&t->queue);
    list_del(&t->link);
    if (t->joining)
        metric_add(METRIC_joins_waiting, -1);
    if (t->op) {
        loop_timer_clear(s->o.loop, &t->op->timer);
        op_finish(s, t->op, t->lent);
    }
    buf_free(&t->buf);
    if (t->own)
        (t->own_free ? t->own_free : free)(t->own);
    free(t->io);
    free(t);
    store_turn_soon(s); /* a closing store waits for the last one */
}

void task_fail(struct task *t, enum err_class class, const char *fmt, ...)
{
    char text[ERR_TEXT_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    err_set(t->err, class, "%s", text);
    task_end(t);
}

void task_fail_with(struct task *t, const struct err *why)
{
    if (t->err)
        *t->err = *why;
    task_end(t);
}

void task_fail_io(struct task *t, const char *doing)
{
    struct backend_op *b = &t->io->op;
    check(b->result < 0);
    if (b->err.class == ERR_NONE)
        err_sys(&b->err, (int)-b->result, "%s", t->io->name);
    *t->err = b->err;
    err_prepend(t->err, "%s", doing);
    task_end(t);
}

void task_reply(struct task *t)
{
    if (t->op && buf_end(&t->op->reply, "the answer", t->err) < 0) {
        task_end(t);
        return;
    }
    task_end(t);
}

void task_later(struct task *t, task_step *then)
{
    t->then = then;
    t->waiting = false;
    list_del(&t->queue);
    list_add_tail(&t->s->ready, &t->queue);
    store_turn_soon(t->s);
}

void task_wait(struct task *t, struct list *queue, const char *what, task_step *then)
{
    if (t->op && (t->cancelled || t->s->stopping)) {
        task_fail(t, ERR_CANCELLED, t->cancelled ? "the request was cancelled" : "the server is stopping");
        return;
    }
    t->then = then;
    t->wait_what = what;
    t->waiting = true;
    list_del(&t->queue);
    list_add_tail(queue, &t->queue);
    if (t->op && t->op->deadline_at_ms)
        loop_timer_set(t->s->o.loop, &t->op->timer, t->op->deadline_at_ms);
}

void task_wake(struct task *t)
{
    if (t->op)
        loop_timer_clear(t->s->o.loop, &t->op->timer);
    task_later(t, t->then);
}

void task_wake_all(struct list *queue)
{
    while (!list_empty(queue))
        task_wake(container_of(queue->next, struct task, queue));
}

void *task_own(struct task *t, size_t bytes)
{
    check(!t->own);
    t->own = calloc(1, bytes);
    if (t->own)
        return t->own;
    task_fail(t, ERR_NO_MEMORY, "the server has no memory for the request; try again later");
    return NULL;
}

void latch_init(struct latch *g)
{
    g->holder = NULL;
    list_init(&g->waiting);
}

/* Called at once if the latch is free. */
void latch_enter(struct task *t, struct latch *g, const char *what, task_step *then)
{
    check(!t->latch);
    if (!g->holder) {
        g->holder = t;
        t->latch = g;
        then(t);
        return;
    }
    task_wait(t, &g->waiting, what, then);
}

void latch_leave(struct task *t)
{
    struct latch *g = t->latch;
    check(g && g->holder == t);
    t->latch = NULL;
    g->holder = NULL;
    if (list_empty(&g->waiting))
        return;
    struct task *next = container_of(g->waiting.next, struct task, queue);
    g->holder = next;
    next->latch = g;
    task_wake(next);
}

static void op_done(struct backend_op *b)
{
    struct task_io *io = container_of(b, struct task_io, op);
    struct task *t = io->task;
    if (b->result < 0 && io->changing &&
        (b->err.class == ERR_IO || b->err.class == ERR_READ_ONLY || b->err.class == ERR_NONE))
        store_turn_read_only(t->s, b->err.class ? b->err.text : io->name);
    t->then(t);
}

struct backend_op *task_op(struct task *t, task_step *then)
{
    struct backend_op *b = &t->io->op;
    memset(b, 0, sizeof *b);
    b->done = op_done;
    t->io->changing = false;
    t->then = then;
    return b;
}

void task_put_new(struct task *t, task_step *then)
{
    struct backend_op *b = task_op(t, then);
    t->io->changing = true;
    backend_put_new(t->s->o.backend, b, t->io->name, t->buf.p, t->buf.n);
}

void task_remove(struct task *t, task_step *then)
{
    struct backend_op *b = task_op(t, then);
    t->io->changing = true;
    backend_remove(t->s->o.backend, b, t->io->name);
}

void store_turn_read_only(struct store *s, const char *why)
{
    if (s->read_only)
        return;
    s->read_only = true;
    snprintf(s->read_only_reason, sizeof s->read_only_reason, "%s", why);
    metric_set(METRIC_store_read_only, 1);
    log_error(
        "the store takes no more writes: a failed sync leaves open what is on the medium; check the disk, "
        "reboot (or see larderd(8)), and start larderd again reason=\"%s\"",
        s->read_only_reason);
}
