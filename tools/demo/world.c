/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/demo/world.h"

#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

double clock_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int mutexes_init(struct world *w)
{
    pthread_mutexattr_t a;
    int r = pthread_mutexattr_init(&a);
    if (r)
        return -r;
    if (!(r = pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED)))
        r = pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    for (unsigned i = 0; i < w->ranks && !r; i++)
        r = pthread_mutex_init(&w->alive[i], &a);
    pthread_mutexattr_destroy(&a);
    return -r;
}

struct world *world_create(unsigned ranks, uint64_t steps, size_t floats)
{
    size_t head = (sizeof(struct world) + 63) / 64 * 64;
    size_t bytes = head + (floats * (1 + WORLD_MICROS) + steps) * sizeof(float);
    struct world *w = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (w == MAP_FAILED)
        return NULL;
    w->ranks = ranks;
    w->steps = steps;
    w->floats = floats;
    w->mapped_bytes = bytes;
    w->weights = (void *)((char *)w + head);
    w->slots = w->weights + floats;
    w->loss = w->slots + floats * WORLD_MICROS;
    if (mutexes_init(w)) {
        munmap(w, bytes);
        return NULL;
    }
    return w;
}

void world_free(struct world *w)
{
    if (w)
        munmap(w, w->mapped_bytes);
}

int world_enter(struct world *w, unsigned rank)
{
    return -pthread_mutex_lock(&w->alive[rank]);
}

void world_leave(struct world *w, unsigned rank)
{
    w->figures[rank].finished = true;
    pthread_mutex_unlock(&w->alive[rank]);
}

/* Is there a rank whose mutex lost its owner? */
static bool someone_died(struct world *w, unsigned rank, unsigned *dead)
{
    for (unsigned i = 0; i < w->ranks; i++) {
        if (i == rank)
            continue;
        int r = pthread_mutex_trylock(&w->alive[i]);
        if (r == 0)
            pthread_mutex_unlock(&w->alive[i]); /* has not begun, or has left */
        if (r == EOWNERDEAD || r == ENOTRECOVERABLE) {
            if (r == EOWNERDEAD)
                pthread_mutex_unlock(&w->alive[i]); /* not made consistent: the next to look hears it too */
            *dead = i;
            return true;
        }
    }
    return false;
}

int world_barrier(struct world *w, unsigned rank, unsigned *dead)
{
    unsigned turn = atomic_load(&w->turn);
    if (atomic_fetch_add(&w->arrived, 1) + 1 == w->ranks) {
        atomic_store(&w->arrived, 0);
        atomic_fetch_add(&w->turn, 1);
        syscall(SYS_futex, &w->turn, FUTEX_WAKE, w->ranks, NULL, NULL, 0);
        return 0;
    }
    double end = clock_s() + WORLD_WAIT_S;
    while (atomic_load(&w->turn) == turn) {
        struct timespec look = {0, WORLD_LOOK_MS * 1000000};
        syscall(SYS_futex, &w->turn, FUTEX_WAIT, turn, &look, NULL, 0);
        if (atomic_load(&w->turn) != turn)
            break;
        if (someone_died(w, rank, dead))
            return -EOWNERDEAD;
        if (clock_s() > end)
            return -ETIMEDOUT;
    }
    return 0;
}
