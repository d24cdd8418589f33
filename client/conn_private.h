/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What conn.c (calls) and conn_io.c (the thread) share.
 *
 * One lock guards calls and state; `more` and `done` run without it. A call is on one of three lists: queue
 * (not yet handed to the channel, its bytes in an `outgoing`), flying (sent, answer awaited) or ended (its
 * err is set, done not yet run). Only the thread runs callbacks.
 *
 * A second lock, io, is of the channel and the socket. The thread holds it but while it waits in poll(); a
 * submitter takes it there to send what is queued itself (conn_push), and never waits for it. It comes before
 * the first lock.
 */
#ifndef LARDER_CLIENT_CONN_PRIVATE_H
#define LARDER_CLIENT_CONN_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "client/conn.h"
#include "format/channel.h"
#include "format/lane.h"

enum conn_state {
    CONN_CONNECTING, /* first try, or after a loss */
    CONN_UP,
    CONN_DOWN, /* given up: the next submit tries again */
};

struct outgoing {
    struct list link;
    struct call *call; /* NULL: one way */
    struct frame_header header;
    struct slice tail; /* the submitter's */
    size_t message_bytes;
    uint8_t message[];
};

struct conn {
    char *host, *port;
    struct channel_config *config;
    unsigned connect_timeout_ms, request_timeout_ms, reconnect_ms;
    enum conn_lane lane_wish;
    struct conn *lane;    /* beside this one; NULL: none. Fixed before others use the connection */
    struct conn *base;    /* of a lane: whom it belongs to, and who closes it before itself */
    bool lane_tried;      /* to open; likewise */
    atomic_bool lane_off; /* the lane was given up */
    pthread_t thread;
    int wake; /* eventfd */

    pthread_mutex_t lock;
    pthread_cond_t changed; /* state, hello */
    enum conn_state state;
    bool stopping;  /* every call fails from now on */
    bool closing;   /* and the thread ends */
    bool opened;    /* the first connection was made */
    struct err why; /* of CONN_DOWN */
    struct conn_hello hello;
    struct list queue, flying, ended;
    uint64_t next_id;
    uint64_t next_deadline_ms; /* no call ends earlier */
    uint64_t sleeps_until_ms;  /* the thread, unless it is woken */

    pthread_mutex_t io;  /* of what follows; the thread may look without it */
    struct err push_err; /* of a send on a submitter's thread: the connection is lost */
    struct channel *channel;
    const struct call *lender; /* whose tail the channel sends from where it is */
    uint8_t *input;
    int fd, least;    /* its SO_RCVLOWAT */
    uint64_t sinking; /* request whose payload is being received */
    bool more_input;  /* than was received at once, perhaps */
    uint64_t up_since_ms;
    unsigned faults; /* of a lane, lately */
};

void *conn_thread(void *arg);
void conn_wake(struct conn *c);
bool conn_streams(const struct call *call);
/* With the lock held: the call ends with e (copied). */
void conn_end(struct conn *c, struct call *call, const struct err *e);

/* A ticket for a lane, with its keys: conn_lane.c. */
struct conn_ticket {
    struct call call;
    struct conn *lane;
    bool done; /* under the lane's lock */
    struct id id;
    struct lane_keys keys; /* to be wiped */
};
/* Asks the lane's base for one. On the lane's thread. */
must_check int conn_ticket_get(struct conn *lane, struct conn_ticket *t, struct err *e);
/* The thread's: waits until it is woken, or a moment has passed. False: the connection is being closed. */
must_check bool conn_idle(struct conn *c, uint64_t until_ms);

/* With the lock held. */
void conn_one_way(struct conn *c, uint16_t opcode, uint64_t id, const struct buf *message);
bool conn_flying(struct conn *c, const struct call *call);

#endif
