/* SPDX-License-Identifier: Apache-2.0 */
/* Monotonic time, and waits that end by it. */
#ifndef LARDER_CLIENT_CLOCK_H
#define LARDER_CLIENT_CLOCK_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

static inline uint64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline uint64_t clock_ms(void)
{
    return clock_ns() / 1000000u;
}

/* A condition variable that clock_wait can wait on. 0 or a positive errno. */
static inline int clock_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attr;
    int rc = pthread_condattr_init(&attr);
    if (rc != 0)
        return rc;
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    rc = pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
    return rc;
}

/* Waits for a signal until clock_ms() reaches until_ms; false: the time is up. */
static inline bool clock_wait(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t until_ms)
{
    struct timespec t = {.tv_sec = (time_t)(until_ms / 1000), .tv_nsec = (long)(until_ms % 1000) * 1000000};
    return pthread_cond_timedwait(cond, lock, &t) == 0 || clock_ms() < until_ms;
}

#endif
