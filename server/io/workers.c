/* SPDX-License-Identifier: Apache-2.0 */
#include "server/io/workers.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "server/io/request.h"

struct workers {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct list queue; /* of io_op */
    bool stop;
    unsigned idle, count, max;
    struct inbox *to;
    pthread_t threads[];
};

struct workers *workers_create(unsigned threads_max, struct inbox *to)
{
    struct workers *w = calloc(1, sizeof *w + threads_max * sizeof w->threads[0]);
    if (!w)
        return NULL;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->wake, NULL);
    list_init(&w->queue);
    w->max = threads_max;
    w->to = to;
    return w;
}

void workers_destroy(struct workers *w)
{
    if (!w)
        return;
    pthread_mutex_lock(&w->lock);
    w->stop = true;
    pthread_cond_broadcast(&w->wake);
    pthread_mutex_unlock(&w->lock);
    for (unsigned i = 0; i < w->count; i++)
        pthread_join(w->threads[i], NULL);
    pthread_cond_destroy(&w->wake);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

static void *worker(void *arg)
{
    struct workers *w = arg;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (list_empty(&w->queue) && !w->stop) {
            w->idle++;
            pthread_cond_wait(&w->wake, &w->lock);
            w->idle--;
        }
        struct list *entry = list_pop(&w->queue);
        if (!entry)
            break;
        struct io_op *op = container_of(entry, struct io_op, link);
        io_req(op)->started = true;
        pthread_mutex_unlock(&w->lock);
        op->result = io_blocking(op);
        inbox_finish(w->to, op);
        pthread_mutex_lock(&w->lock);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* Signals are the main thread's business. */
static int start_thread(struct workers *w)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = pthread_create(&w->threads[w->count], NULL, worker, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status == 0)
        w->count++;
    return status;
}

void workers_submit(struct workers *w, struct io_op *op)
{
    bool here = false;
    pthread_mutex_lock(&w->lock);
    io_req(op)->state = IO_WORKER;
    list_add_tail(&w->queue, &op->link);
    if (w->idle == 0 && w->count < w->max && start_thread(w) != 0 && w->count == 0) {
        list_del(&op->link); /* not one thread can be had: slow is better than stuck */
        here = true;
    } else {
        pthread_cond_signal(&w->wake);
    }
    pthread_mutex_unlock(&w->lock);
    if (here) {
        op->result = io_blocking(op);
        inbox_finish(w->to, op);
    }
}

bool workers_take_back(struct workers *w, struct io_op *op)
{
    pthread_mutex_lock(&w->lock);
    bool waiting = io_req(op)->state == IO_WORKER && !io_req(op)->started;
    if (waiting)
        list_del(&op->link);
    pthread_mutex_unlock(&w->lock);
    return waiting;
}
