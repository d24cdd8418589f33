/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients: each a fiber with a connection that it makes again when it is lost. Calls wait for their answers;
 * several may be in flight. An actor that is killed gets ERR_NETWORK from whatever it waits for and has to
 * end; its connection is gone at once.
 */
#ifndef LARDER_TESTS_SIM_ACTOR_H
#define LARDER_TESTS_SIM_ACTOR_H

#include "format/channel.h"
#include "tests/sim/world.h"

struct line;
struct process;

struct actor {
    struct list link;
    struct world *w;
    char name[40];
    enum client_role role;
    struct fiber *fiber;
    void (*main)(struct actor *a);
    void *arg;
    uint64_t rng;
    struct line *line;
    struct loop_msg wake;
    struct loop_timer timer;
    bool wake_due, rang, killed, over;
    struct process *process; /* that it is a thread of; NULL: it speaks the protocol itself */
};

/* One request. */
struct call {
    struct list link;
    struct line *line;
    struct buf reply; /* of a stream: all tails */
    struct err err;
    uint64_t id, want_bytes;
    uint16_t opcode;
    bool done;
    void (*frame)(struct call *c, struct rcur *in); /* scrub: each frame; may be NULL */
    void *arg;
};

/* The name is for the trace. arg stays the caller's. Freed by the world when it is over. */
struct actor *actor_begin(struct world *w, enum client_role role, void (*main)(struct actor *a), void *arg,
                          const char *fmt, ...) __attribute__((format(printf, 5, 6)));
void actor_kill(struct actor *a); /* not by itself */
void actor_free(struct actor *a); /* that is over */
static inline bool alive(const struct actor *a)
{
    return !a->killed;
}

struct actor *actor_now(void);                      /* that runs; NULL: none */
void actor_wake(struct actor *a);                   /* its fiber goes on in a moment */
void actor_set_timer(struct actor *a, uint64_t ms); /* then it is woken, and has `rang` */

/* From within. */
void actor_sleep(struct actor *a, uint32_t ms);
uint32_t roll(struct actor *a, uint32_t n);
void actor_random(struct actor *a, void *p, size_t n);
struct id actor_id(struct actor *a);
/* Something random may happen while faults do: one time in n. */
bool actor_errs(struct actor *a, uint32_t n);

/* Makes sure of a connection; false: killed. */
bool actor_connect(struct actor *a);
void actor_hang_up(struct actor *a);
/* One request on the present connection: begun, and waited for. message is freed. */
void call_begin(struct actor *a, struct call *c, uint16_t opcode, struct buf *message, struct slice tail);
enum err_class call_end(struct actor *a, struct call *c);
void call_drop(struct call *c);

/* Connects, asks, and repeats what PROTOCOL.md allows to repeat, with pauses, until there is an answer that
 * says something. Frees the message. Classes that no client of good manners is answered with fail the seed.
 */
enum err_class actor_ask(struct actor *a, struct call *c, uint16_t opcode, struct buf *message);

#define ASK(a, call, opcode, type, ...)                                \
    ({                                                                 \
        struct buf ask_ = {0};                                         \
        msg_##type##_encode(&(struct msg_##type){__VA_ARGS__}, &ask_); \
        actor_ask(a, call, opcode, &ask_);                             \
    })
/* The answer to a call that went well. */
#define ANSWER(call, type)                                           \
    ({                                                               \
        struct msg_##type answer_;                                   \
        struct rcur in_ = rcur_of((call)->reply.p, (call)->reply.n); \
        check(msg_##type##_decode(&in_, &answer_, NULL) == 0);       \
        answer_;                                                     \
    })

#endif
