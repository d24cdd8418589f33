/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting on the calling thread for something that ends on a connection's thread. Its bound is the call's. */
#ifndef LARDER_DATASET_WAIT_H
#define LARDER_DATASET_WAIT_H

#include <pthread.h>
#include <stdbool.h>
#include <time.h>

#include "client/clock.h"

struct waiter {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool done;
};

#define WAITER_INIT                                                                        \
    {                                                                                      \
        .lock = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER, .done = false \
    }

static inline void waiter_wake(struct waiter *w)
{
    pthread_mutex_lock(&w->lock);
    w->done = true;
    pthread_cond_signal(&w->cond);
    pthread_mutex_unlock(&w->lock);
}

/* Returns once woken; ready to be waited on again. */
static inline void waiter_wait(struct waiter *w)
{
    pthread_mutex_lock(&w->lock);
    while (!w->done)
        pthread_cond_wait(&w->cond, &w->lock);
    w->done = false;
    pthread_mutex_unlock(&w->lock);
}

static inline void waiter_free(struct waiter *w)
{
    pthread_cond_destroy(&w->cond);
    pthread_mutex_destroy(&w->lock);
}

/* Pauses between tries: doubles from 10 ms to a second. */
static inline void pause_between(unsigned *pause_ms)
{
    unsigned ms = *pause_ms ? *pause_ms : 10;
    *pause_ms = ms < 500 ? ms * 2 : 1000;
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}

#endif
