/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process that runs the real client library. Its threads are fibers, which change places where they call
 * the system; at each such call the seed may let others go first. What they call goes to the simulator:
 * threads, locks and waits, clock and randomness (threads.c), sockets and eventfds (sockets.c): in the
 * client's objects these calls are renamed (Makefile). TLS is replaced by the clear channel, and the
 * credential file by what belongs to the role.
 *
 * A process that is killed has no network from that moment on, and its time flies: it comes to its end at
 * once, unseen by all others, and gives back its memory on the way.
 */
#ifndef LARDER_TESTS_SIM_PROCESS_H
#define LARDER_TESTS_SIM_PROCESS_H

#include "tests/sim/actor.h"

struct process {
    struct world *w;
    const char *name; /* its first thread's; for the trace */
    uint64_t rng;
    uint64_t skew_ns; /* its clock is so much ahead: of a dead one */
    uint32_t yields;  /* one in so many calls lets others run */
    bool dead;
    unsigned threads;    /* beside the first */
    struct list handles; /* sockets and eventfds that are open */
};

/* From within the actor that is its first thread, before it calls the library; and after. */
struct process *process_enter(struct actor *a);
void process_leave(struct actor *a);
void process_kill(struct process *p);
/* The process that runs now; NULL: none. */
struct process *process_now(void);
uint32_t process_below(struct process *p, uint32_t n);
uint64_t process_clock_ns(const struct process *p);

/* ---- waiting; threads.c ---- */

/* The calling thread waits until wake_all(on) or until the clock says so (UINT64_MAX: no bound). False: the
 * time is up. May return true for no reason. */
bool wait_on(const void *on, uint64_t until_ns);
bool wait_on_either(const void *on, const void *other, uint64_t until_ns); /* other: may be NULL */
void wake_all(const void *on);
/* Perhaps others go first. */
void process_yield(void);

/* ---- sockets.c ---- */
void handles_cut(struct process *p); /* the network is gone */

/* ---- tap.c ---- */

/* What a connection says, read along: frames of a clear channel. */
struct tap;
struct tap *tap_new(struct world *w, enum client_role role);
void tap_free(struct tap *t);                                 /* NULL allowed */
void tap_sent(struct tap *t, const uint8_t *p, size_t n);     /* to the server */
void tap_received(struct tap *t, const uint8_t *p, size_t n); /* by the client */

#endif
