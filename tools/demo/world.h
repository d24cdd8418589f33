/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the ranks of one training job share: weights, gradient slots, a barrier, and who is alive. It is
 * anonymous shared memory, made before the ranks are forked; the launcher keeps it and reads the results.
 *
 * A rank holds its own robust mutex for life. The kernel releases it when the process dies, so the others,
 * who look whenever they wait, notice a death within WORLD_LOOK_MS without any help.
 */
#ifndef LARDER_DEMO_WORLD_H
#define LARDER_DEMO_WORLD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WORLD_RANKS_MAX 16
#define WORLD_MICROS    12 /* micro-batches of a global batch, whatever the number of ranks */
#define WORLD_SAVES_MAX 256
#define WORLD_LOOK_MS   10
#define WORLD_WAIT_S    60 /* a rank that is alive and this late is given up */

struct save_figures {
    uint64_t step;
    double stall_s, durable_s;
    uint64_t plain_bytes, stored_bytes;
};

/* Written by one rank, read by the launcher after the rank has ended. */
struct rank_figures {
    struct save_figures saves[WORLD_SAVES_MAX];
    unsigned save_count;
    double starved_network_s, starved_disk_s, starved_decode_s, feed_full_s;
    uint64_t samples, bytes;
    uint64_t resumed_step, resumed_sequence, resumed_epoch, resumed_position;
    char path[128];
    bool finished;
};

struct world {
    unsigned ranks;
    uint64_t steps, first_step;
    size_t floats;
    float *weights; /* floats of them */
    float *slots;   /* WORLD_MICROS gradients of floats each */
    float *loss;    /* one per step */
    float micro_loss[WORLD_MICROS];
    atomic_uint_least64_t step;                    /* the last that is done */
    atomic_uint_least64_t staged[WORLD_RANKS_MAX]; /* step of the last save that each rank has staged */
    atomic_uint arrived, turn;                     /* the barrier */
    pthread_mutex_t alive[WORLD_RANKS_MAX];
    double begun_s, ended_s; /* of training, by rank 0's clock */
    struct rank_figures figures[WORLD_RANKS_MAX];
    size_t mapped_bytes;
};

/* NULL: no memory. */
struct world *world_create(unsigned ranks, uint64_t steps, size_t floats);
void world_free(struct world *w);

/* First call of a rank: takes its mutex. */
int world_enter(struct world *w, unsigned rank);
/* Last call of a rank that ends well: it is not missed afterwards. */
void world_leave(struct world *w, unsigned rank);

/* Returns when all ranks have called it. -EOWNERDEAD: *dead has died; -ETIMEDOUT after WORLD_WAIT_S. */
int world_barrier(struct world *w, unsigned rank, unsigned *dead);

double clock_s(void);

#endif
