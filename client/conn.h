/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One connection to the server with a thread of its own that does all its I/O. Any thread may call. A lost
 * connection is made again in the background for reconnect_ms; what was in flight fails with ERR_NETWORK and
 * may be asked again (every request of the protocol may be repeated).
 *
 * A connection may have a bulk lane beside it (format/lane.h), with a thread of its own: calls that carry
 * sealed chunks and nothing else travel there, all others over TLS. A lane that is lost is opened again; one
 * that breaks again and again (somebody on the way changes what it carries, or lets it not through) is given
 * up, and everything goes over TLS from then on; conn_path tells.
 */
#ifndef LARDER_CONN_H
#define LARDER_CONN_H

#include <stdbool.h>

#include "format/base/cursor.h"
#include "format/base/err.h"
#include "format/base/list.h"
#include "format/wire.h"

struct conn;
struct conn_options;
struct channel_config;

enum conn_lane {
    CONN_LANE_NONE,  /* hello does not offer it */
    CONN_LANE_OFFER, /* it is offered and not opened: conn_path says what data connections will do */
    CONN_LANE_OPEN,  /* opened if the server has it */
};

struct conn_options {
    const char *host, *port;       /* copied */
    struct channel_config *config; /* a reference is taken. NULL: a clear channel, for tests */
    unsigned connect_timeout_ms, request_timeout_ms, reconnect_ms;
    enum conn_lane lane;
};

struct conn_hello { /* what the server said of itself and of us */
    uint64_t features, server_time_ns;
    struct id store_id;
    char tenant[TENANT_NAME_BYTES_MAX + 1], software[64];
    enum client_role role;
};

/* Connects, authenticates and exchanges hello before it returns. */
must_check int conn_open(const struct conn_options *o, struct conn **out, struct err *e);
/* Opens the lane of a connection that only offered it, once, if the server has it. By who opened the
 * connection, while nobody else submits to it. */
void conn_lane_open(struct conn *c);
/* Fails what is in flight with ERR_CANCELLED and joins the thread. NULL allowed. */
void conn_close(struct conn *c);
/* Fails what is in flight and all that comes later with ERR_CANCELLED; the connection stays to be closed. Any
 * thread. */
void conn_stop(struct conn *c);
unsigned conn_reconnect_ms(const struct conn *c); /* as given to conn_open */
/* How bytes travel, for people: "TLS 1.3 over TCP". */
const char *conn_path(struct conn *c);
/* The slowest path of several connections; without any, that of `control`. */
const char *conn_paths(struct conn **conns, unsigned count, struct conn *control);
bool conn_has_lane(struct conn *c); /* and sealed chunks take it now */
void conn_hello(struct conn *c, struct conn_hello *out);

/* A request under way. The submitter owns it until `done` ran (on the connection's thread: must be short and
 * not block). conn_submit copies the message before it returns; the tail has to stay until `done`. */
struct call {
    /* Set by the submitter. */
    uint16_t opcode;
    bool sealed; /* carries bytes of sealed chunks only (OP_SEGMENT_CHUNK, OP_READ): may take the lane */
    bool push_follows;   /* the submitter calls conn_push next: nobody else is woken for it */
    uint32_t timeout_ms; /* 0: the connection's request_timeout_ms. Streams: between two frames, not counted
                            while credit is 0 */
    /* Each frame of a streamed answer but the last: message and tail stand one behind the other in `payload`.
     * NULL if not a stream. Returning a negative errno (with e filled) cancels the call. */
    int (*more)(struct call *call, const uint8_t *payload, size_t n, struct err *e);
    /* Instead of `more`, for streams whose bytes are to be received where they stay: `place` says where those
     * behind the next `skip` go and how many fit (NULL: so many are passed over; 0: none are expected),
     * `came` that so many are there; the last frame is then handed out without them. What is placed must stay
     * until `done`. */
    uint8_t *(*place)(struct call *call, size_t skip, size_t *n);
    int (*came)(struct call *call, size_t n, struct err *e);
    void (*done)(struct call *call);
    /* The answer, when done runs. */
    struct err err;   /* class ERR_NONE: good */
    uint8_t *payload; /* of the last frame; malloc'ed; call_free releases it */
    size_t payload_bytes;
    uint32_t disk_ms; /* of a read, of the frame that `more`, `came` or `done` is called for: how long the
                         server says that it waited for its disk */
    /* Private. */
    struct list link;
    struct conn *conn; /* that it was submitted on: the connection's or its lane's */
    uint64_t id, deadline_ms;
    int64_t credit; /* bytes that the server may still send; streams without flow control: INT64_MAX */
    uint32_t bound_ms;
    bool cancelled;
    bool answered; /* err came from the server, not from this side */
};
void conn_submit(struct conn *c, struct call *call, struct slice message, struct slice tail);
/* Sends what is queued on the calling thread, as far as the socket takes it: who has just sealed a chunk has
 * it in its cache. The rest, or all if the connection's thread is at it, is left to that thread. */
void conn_push(struct conn *c);
void conn_cancel(struct conn *c, struct call *call);                 /* done follows soon */
void conn_credit(struct conn *c, struct call *call, uint64_t bytes); /* OP_CREDIT; callable from `more` */
void call_free(struct call *call);                                   /* the payload */

/* Submits and waits: 0, or a negative errno with e filled. *reply (may be NULL) is a cursor over payload
 * memory of `call`, which the caller frees with call_free. Network losses are retried until reconnect_ms has
 * passed. */
must_check int conn_call(struct conn *c, uint16_t opcode, struct slice message, struct slice tail,
                         uint32_t timeout_ms, struct call *call, struct rcur *reply, struct err *e);

#endif
