/* SPDX-License-Identifier: Apache-2.0 */
/* A trainer that only computes, on every core that it is given: what a save in the background costs it. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "tools/bench.h"
#include "tools/ui.h"

#define THREADS_MAX  256u
#define NUMBERS      4096u  /* of each thread: they stay in the nearest cache */
#define PASSES       20000u /* over them in one step: a few tens of milliseconds */
#define ALIGN_FLOATS 64

struct trainer {
    pthread_barrier_t barrier; /* a step ends when all threads have done their share, as with real ones */
    atomic_bool stopping;
    pthread_mutex_t lock;
    double busy_s; /* of whole steps since the last look */
    uint64_t steps;
    unsigned count;
    pthread_t threads[THREADS_MAX];
};

static float compute(float *x)
{
    float sum = 0;
    for (unsigned pass = 0; pass < PASSES; pass++)
        for (unsigned i = 0; i < NUMBERS; i++)
            x[i] = x[i] * 0.999f + 0.001f;
    for (unsigned i = 0; i < NUMBERS; i++)
        sum += x[i];
    return sum;
}

static void *train(void *arg)
{
    struct trainer *t = arg;
    _Alignas(ALIGN_FLOATS) float x[NUMBERS];
    for (unsigned i = 0; i < NUMBERS; i++)
        x[i] = (float)i;
    for (bool stop = false; !stop;) {
        double begun = clock_now_s();
        volatile float kept = compute(x);
        (void)kept;
        bool last = pthread_barrier_wait(&t->barrier) == PTHREAD_BARRIER_SERIAL_THREAD;
        if (last) {
            pthread_mutex_lock(&t->lock);
            t->busy_s += clock_now_s() - begun;
            t->steps++;
            pthread_mutex_unlock(&t->lock);
        }
        pthread_barrier_wait(&t->barrier);
        stop = atomic_load(&t->stopping);
        pthread_barrier_wait(&t->barrier); /* all have seen the same */
    }
    return NULL;
}

struct trainer *trainer_start(unsigned threads)
{
    struct trainer *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->count = threads < 1 ? 1 : threads < THREADS_MAX ? threads : THREADS_MAX;
    pthread_mutex_init(&t->lock, NULL);
    pthread_barrier_init(&t->barrier, NULL, t->count);
    for (unsigned i = 0; i < t->count; i++)
        if (pthread_create(&t->threads[i], NULL, train, t) != 0)
            exit(fail_with(STATUS_OTHER, "cannot start %u threads to compute on", t->count));
    return t;
}

void trainer_look(struct trainer *t, double *busy_s, uint64_t *steps)
{
    pthread_mutex_lock(&t->lock);
    *busy_s = t->busy_s;
    *steps = t->steps;
    t->busy_s = 0;
    t->steps = 0;
    pthread_mutex_unlock(&t->lock);
}

void trainer_stop(struct trainer *t)
{
    atomic_store(&t->stopping, true);
    for (unsigned i = 0; i < t->count; i++)
        pthread_join(t->threads[i], NULL);
    pthread_barrier_destroy(&t->barrier);
    pthread_mutex_destroy(&t->lock);
    free(t);
}
