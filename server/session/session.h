/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of server/session: workers (one per loop), sessions (one per connection), requests.
 *
 * Everything of a worker happens on its loop's thread. A session is level-triggered: callbacks change state,
 * queue output, and end with session_settle, which does whatever is possible now (take frames, feed streams,
 * send, receive, close). Nothing is freed before settle, and settle is the last thing a callback does with
 * the session.
 *
 * A bulk lane is a session too: of the same tenant as the session that asked for its ticket, on any loop, for
 * sealed chunks only, and ended when that one ends (lanes.c).
 *
 * A session's life: handshake -> hello -> open -> closing -> freed. Closing: output is flushed, the peer's
 * end awaited for a bounded time, the socket shut down, receive and send counted down, the socket closed,
 * requests counted down, then freed.
 */
#ifndef LARDER_SESSION_H
#define LARDER_SESSION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/session/server.h"
#include "server/tenant/sched.h"

#define RECEIVE_BYTES     (128u << 10)
#define RECEIVE_LEAST     (512u << 10) /* of a large frame, before it is worth waking up for */
#define OUTPUT_HIGH_BYTES (1u << 20)   /* streams add nothing while more than this waits to be sent */
#define OUTPUT_STOP_BYTES (4u << 20)   /* and no request is taken while more than this does */

/* Buffers for whole frames that a worker keeps once they were needed. */
#define PAYLOADS_KEPT_MAX 16u
/* Payloads of all sessions: beyond that, each has no more than one. */
#define PAYLOADS_BYTES_MAX (64u << 20)

struct json_t;
struct op_entry;
struct extent;
struct extents;
struct published;
struct unpacked;
struct lane_table;
struct lane_group;

enum session_kind { KIND_TLS, KIND_LANE, SESSION_KINDS };

struct listener {
    struct worker *w;
    unsigned number; /* of the address */
    int fd;          /* -1: not open */
    struct io_op accept, close;
    bool accepting, closing;
    struct loop_timer retry; /* after a failed accept (descriptors used up) */
};

enum server_phase { SERVER_STARTING, SERVER_RUNNING, SERVER_STOPPING };

/* What one loop adds to the status. */
struct worker_figures {
    uint64_t sessions;
    struct sched_figures classes[SCHED_CLASSES];
};

struct worker {
    struct server *server;
    unsigned number;
    struct loop *loop;
    struct backend *backend;
    struct channel_config *tls;
    const struct published_dir *dirs; /* the caller's, until the server is freed */
    size_t dir_count;
    struct listener listeners[LISTEN_MAX];
    struct list sessions;
    uint32_t session_count;
    _Atomic uint32_t placed[SESSION_KINDS]; /* spread.c */
    struct sched *sched;
    struct loop_timer sched_timer;
    struct published *published;
    struct payload_buffer { /* payloads.c */
        uint8_t *p;
        bool taken;
    } payloads[PAYLOADS_KEPT_MAX];
    unsigned payload_count;
    bool stopping, stopped;
    uint64_t stop_finished, stop_failed;
    struct loop_timer stop_timer;
    struct loop_msg start_msg, stop_msg, hurry_msg, stopped_msg;
};

struct server {
    struct server_options o;
    struct server_limits limits; /* defaults filled in */
    enum server_phase phase;
    struct id store_id;
    uint64_t started_ms;
    char addresses[LISTEN_MAX][ADDRESS_BYTES_MAX];
    struct server_starting *starting;
    struct server_stopping *stopping;
    uint32_t stop_bound_ms;
    unsigned workers_stopped, hurries_out;
    bool hurried;
    struct err start_err;
    struct loop_msg start_msg;
    struct io_op probe_op;
    size_t probed;                   /* addresses found free */
    struct tenants_refresh *refresh; /* of the tenants' weights, in flight */
    bool refresh_again;
    _Atomic uint32_t session_count;
    _Atomic uint64_t payload_bytes; /* of requests, all sessions together */
    _Atomic uint32_t reading_count; /* sessions that hold pieces read from disk, or being read */
    _Atomic uint64_t session_number;
    struct extents *extents;   /* what was read */
    struct unpacked *unpacked; /* packed shards of published folders */
    struct lane_table *lanes;
    _Atomic uint32_t lane_messages;              /* of lanes.c, under way between loops */
    _Atomic uint32_t moves;                      /* of spread.c, likewise */
    _Atomic uint32_t spread_last[SESSION_KINDS]; /* number of the loop that got the last connection */
    size_t worker_count;
    struct worker workers[];
};

void worker_pump(struct worker *w); /* admits what the scheduler lets through */
void worker_figures(const struct worker *w, struct worker_figures *out);
void worker_has_less(struct worker *w); /* a session or file is gone: a stop may end */
/* Ends a stop when nothing of the server is on its way any more. */
void server_try_free(struct server *s);

/* Asks the store for the tenants' weights and hands them to every worker's scheduler. From any worker. */
void server_tenants_changed(struct server *s);

enum session_state { SESSION_HANDSHAKE, SESSION_HELLO, SESSION_OPEN, SESSION_CLOSING };

struct session {
    struct list link; /* worker's sessions */
    struct worker *w;
    uint64_t number;
    char peer[80];
    struct identity identity; /* from hello on */
    struct sched_tenant *tenant;
    enum session_state state;
    unsigned address; /* number of the one that it came in by */
    bool spread;      /* counted in w->placed */
    enum session_kind kind;
    bool over_limit; /* will be told so at hello */
    struct channel *channel;
    uint64_t features;        /* negotiated; a lane has those of the session that opened it */
    uint32_t answer_wait_ms;  /* told in the header of the next frame: FEATURE_READ_WAITS */
    bool lane;                /* a bulk lane */
    bool has_fed;             /* something of it was a feed */
    struct lane_group *lanes; /* that it belongs to, or that it has opened; NULL: none */
    uint8_t opening[LANE_PLAIN_BYTES];
    size_t opening_bytes; /* of a lane's opening that have arrived */
    bool input_seen;
    int fd;
    struct io_op recv, send, close;
    bool receiving, sending, shut, closing, closed;
    bool linger;   /* closing: wait for the peer's end before shutting down */
    bool peer_end; /* the peer has closed its side */
    bool broken;   /* an answer could not be queued: settle closes */
    uint8_t *recv_buf;
    bool placed;  /* what is being received goes straight into a frame */
    size_t least; /* that a receive waits for */
    uint8_t *send_buf;
    size_t send_bytes;
    struct list queued, leaving; /* of a lane: output before the channel's, and what is being sent */
    size_t queued_bytes;
    struct loop_parts parts;
    struct loop_timer timer;
    uint64_t state_at_ms, frame_at_ms, send_at_ms;
    struct list requests;
    uint32_t request_count, stream_count;
    uint64_t payload_bytes, read_bytes;
    struct list streams;
    struct list feeds; /* feeds.c */
    uint32_t feed_count;
};

/* first: bytes that have come already, if another loop took them. */
void session_accept(struct worker *w, int fd, unsigned address, struct slice first);
/* Nothing of it is under way: frees it and leaves the connection open. */
void session_leave(struct session *s);
void session_settle(struct session *s);
/* why: for the log. linger: something was sent that the peer should get to read. */
void session_close(struct session *s, bool linger, const char *why);
/* A stop begins: refuses new work, closes if idle. force: fails what is in flight. */
void session_stop(struct session *s, bool force);
size_t session_output_bytes(const struct session *s);
/* Queues a frame; if that fails the session is closed when it settles, not here. */
void session_send(struct session *s, uint16_t opcode, uint32_t flags, uint64_t id, struct slice message,
                  struct slice tail);
/* The same with a tail of what was read, within an extent that is taken over: on a lane it is sent from
 * there.
 */
void session_send_extent(struct session *s, uint16_t opcode, uint32_t flags, uint64_t id, struct slice tail,
                         struct extent *x);
void session_send_error(struct session *s, uint16_t opcode, uint64_t id, const struct err *e);

/* One request in flight; embedded first in the struct of its kind. */
struct request {
    struct list link;
    struct session *s;
    const struct op_entry *op;
    uint64_t id;
    uint64_t started_ms;
    uint32_t deadline_ms;
    struct loop_timer timer; /* fire is set by the kind */
    bool answered;
    bool at_stop;    /* was in flight when a stop began */
    uint8_t *memory; /* the payload's, owned */
    struct slice payload;
    /* Ends early for the reason given: answers unless the answer is on its way. May free the request unless
     * something is still pending. */
    void (*cancel)(struct request *r, const struct err *why);
};

/* Takes the frame's payload over and enters the request in the session. bytes: size of the kind's struct.
 * NULL: refused, and answered. */
struct request *request_begin(struct session *s, const struct op_entry *op, struct frame *f, size_t bytes,
                              void (*cancel)(struct request *r, const struct err *why),
                              void (*timer)(struct loop_timer *t));
/* Answers once; later answers are dropped, and so are those of a session that is closing. */
void request_answer(struct request *r, struct slice message, struct slice tail);
void request_fail(struct request *r, const struct err *e);
void request_more(struct request *r, struct slice message, struct slice tail); /* one frame of a stream */
/* The same, with a tail as in session_send_extent. last: the answer. */
void request_extent(struct request *r, bool last, struct slice tail, struct extent *x);
void request_free(struct request *r); /* answered, or its session is closing; nothing is pending */
struct request *request_find(struct session *s, uint64_t id);

/* payloads.c: memory for what comes in. Channels of sessions take it there. */
void payloads_serve(struct worker *w, struct channel *c);
void payload_give(struct worker *w, uint8_t *p); /* what channel_frame_steal gave; NULL allowed */
void payloads_free(struct worker *w);

/* spread.c: n bytes, the first ones, have come to s->recv_buf. True: another loop goes on with them, and the
 * session is gone. */
must_check bool session_spread(struct session *s, size_t n);
void session_place(struct session *s);    /* it stays here; they are there */
void session_displace(struct session *s); /* it ends */

/* output.c: what leaves a session */
void output_init(struct session *s);
size_t output_bytes(const struct session *s);
/* A frame whose tail is sent from its extent (taken over) where that saves a copy. */
must_check int output_extent(struct session *s, const struct frame_header *h, struct slice tail,
                             struct extent *x, struct err *e);
void output_flush(struct session *s); /* begins a send if none is under way */
void output_sent(struct session *s);  /* it is over */
void output_free(struct session *s);

/* lanes.c */
must_check int lane_table_create(struct lane_table **out); /* 0 or -ENOMEM */
void lane_table_destroy(struct lane_table *t);
bool lane_allowed(const struct server *s);
void lane_open_handle(struct session *s, const struct op_entry *op, struct frame *f);
/* The first bytes of a connection: those of a lane's opening are taken off, and once it is known whose it is,
 * the session gets the lane's channel. <0: refused, why is in e. */
must_check int lane_opening(struct session *s, const uint8_t **p, size_t *n, struct err *e);
void lane_begun(struct session *s);          /* its opening was authentic */
void lanes_end(struct session *s);           /* the session that opened them closes */
void lane_left(struct session *s);           /* a session is freed */
bool lanes_at_work(const struct session *s); /* the session has opened lanes that still live */

/* dispatch.c */
enum op_where { OP_ON_SESSION, OP_ON_STORE };
enum op_class { OPCLASS_CONTROL, OPCLASS_SAVE, OPCLASS_READ, OPCLASS_SCRUB };
struct op_entry {
    uint16_t opcode;
    uint8_t states; /* bits 1 << enum session_state */
    uint8_t roles;  /* bits 1 << enum client_role */
    uint8_t class;  /* enum op_class */
    uint8_t where;
    bool audit; /* changes something: logged with who asked */
    uint32_t payload_bytes_max;
    void (*handle)(struct session *s, const struct op_entry *op, struct frame *f);
};
const struct op_entry *dispatch_find(uint16_t opcode);
void dispatch(struct session *s, struct frame *f);

/* calls.c: requests that the store serves */
void call_handle(struct session *s, const struct op_entry *op, struct frame *f);
/* Goes on with streamed answers now that output has drained. */
void calls_pump(struct session *s);

/* reads.c */
void read_handle(struct session *s, const struct op_entry *op, struct frame *f);
void read_scans_handle(struct session *s, const struct op_entry *op, struct frame *f);
void credit_handle(struct session *s, const struct op_entry *op, struct frame *f);
void streams_pump(struct session *s);
bool stream_waits_for_credit(const struct request *r);

/* published.c */
void published_list_handle(struct session *s, const struct op_entry *op, struct frame *f);
void published_open_handle(struct session *s, const struct op_entry *op, struct frame *f);
void published_samples_handle(struct session *s, const struct op_entry *op, struct frame *f);

/* feeds.c: what the feeds of the session's client report, for status */
void feed_report_handle(struct session *s, const struct op_entry *op, struct frame *f);
void feeds_free(struct session *s);
#define STATUS_FEEDS_MAX 4096u
/* Adds an object for each feed of a session to the list, up to STATUS_FEEDS_MAX in all; returns how many
 * found no room. */
uint64_t feeds_json(const struct session *s, uint64_t now_ms, struct json_t *list);

/* status.c */
void status_handle(struct session *s, const struct op_entry *op, struct frame *f);

#endif
