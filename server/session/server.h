/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The server's outward half: listeners, sessions, dispatch, streams of bytes. One listener per loop and
 * address; a connection stays on the loop that accepted it. No thread, clock or socket but through loop.h, so
 * it runs on the ring and on the simulator alike.
 *
 * Memory is bounded by the limits: a session holds at most
 *   RECEIVE_BYTES (socket buffer) + one frame being received
 *   + session_payload_bytes_max (payloads of requests in flight; nothing more is received beyond it; of all
 *     sessions together 64 MiB, beyond which each has no more than one)
 *   + twice OUTPUT_HIGH_BYTES (being sent) + 1 MiB (being read),
 * times sessions_max (bulk lanes are sessions too). What was read from disk and is not yet sent lies in
 * read_cache_bytes, all sessions together, each with up to session_read_bytes_max of it, and of feeds with
 * its share of feed_read_bytes_max, 1 MiB at least; a session that finds it full goes on with the 1 MiB of
 * its own. Disk operations in flight are bounded per loop by in_flight_bytes_max.
 */
#ifndef LARDER_SERVER_H
#define LARDER_SERVER_H

#include <stdint.h>

#include "format/base/err.h"
#include "format/channel.h"
#include "format/samples.h"
#include "server/backend/backend.h"
#include "server/io/loop.h"
#include "server/store/store.h"

#define LISTEN_MAX        16
#define ADDRESS_BYTES_MAX 272

struct server_loop {
    struct loop *loop;
    struct backend *backend; /* for reading; stays the caller's, outlives the server */
};

/* A folder of shards served read-only as it is. Strings belong to the caller and outlive the server. */
struct published_dir {
    const char *name;
    const char *path;
    const char *tenant; /* "*": every tenant */
    enum shard_format format;
    uint64_t record_bytes;      /* SHARD_RECORDS */
    struct token_window window; /* SHARD_TOKENS */
};

/* Bytes per second that a tenant may move, over all classes, on each loop. */
struct tenant_cap {
    const char *tenant;
    uint64_t bytes_s;
};

/* 0: the default, in brackets. */
struct server_limits {
    uint32_t sessions_max;              /* [4096] all loops together */
    uint32_t session_requests_max;      /* [256] in flight */
    uint32_t session_streams_max;       /* [64] of these, streams */
    uint64_t session_payload_bytes_max; /* [64 MiB] */
    uint64_t session_read_bytes_max;    /* [4 MiB] */
    uint64_t feed_read_bytes_max;    /* [4 MiB] over the sessions that read: a share, for those that feed */
    uint64_t in_flight_bytes_max;    /* [64 MiB] disk operations of one loop */
    uint64_t read_cache_bytes;       /* [128 MiB] of all loops; taken at start (extents.h) */
    uint64_t sample_index_bytes_max; /* [64 MiB] cached sample indexes of published shards, each loop */
    uint64_t unpacked_bytes_max;     /* [16 GiB] unpacked shards of published folders, on disk */
    uint32_t handshake_ms;           /* [10 s] from accept to hello */
    uint32_t deadline_ms;            /* [30 s] of requests that name none */
    uint32_t frame_ms;               /* [2 min] for one frame to arrive whole */
    uint32_t send_ms;                /* [15 min] for the peer to take what is being sent */
    uint32_t idle_ms;                /* [2 h] without a request; streams that wait for credit do not count */
    uint32_t closing_ms;             /* [2 s] for the peer to close after us */
    uint32_t join_wait_ms;           /* [10 min] bound of a join, as the store has it */
};

struct server_options {
    const struct server_loop *loops;
    size_t loop_count;                       /* loops[0] is the store's */
    struct store *store;                     /* outlives the server */
    struct channel_config *tls;              /* a reference is taken. NULL: clear channels, for tests only */
    const struct identity *clear_identities; /* without tls: who comes in through each listen address */
    const char *const *listen;               /* "host:port", numeric or a name; port 0 picks one */
    size_t listen_count;                     /* 1 .. LISTEN_MAX */
    const struct published_dir *published;
    size_t published_count;
    const char *store_folder;     /* sample indexes of published shards are kept in a folder of it, and packed
                                     ones unpacked in another; NULL: in memory only, and not at all */
    uint64_t space_reserve_bytes; /* which they leave free */
    const struct tenant_cap *caps;
    size_t cap_count;
    bool no_bulk_lane;   /* sealed chunks too go over TLS */
    const char *io_path; /* for status: the way I/O is done, one line */
    struct server_limits limits;
};

struct server;

/* Everything below is called, and calls back, on the thread of loops[0]. */

struct server_starting {
    void (*done)(struct server_starting *s);
    struct server *server; /* NULL on failure */
    struct err err;
};
/* The options' arrays must live as long as the server. */
void server_start(const struct server_options *o, struct server_starting *starting);

/* Address number i as it was really bound. */
const char *server_address(const struct server *s, size_t i);

struct server_stopping {
    void (*done)(struct server_stopping *s);
    uint64_t finished; /* requests that were in flight when the stop began and were answered well */
    uint64_t failed;   /* and those that were not */
};
/* Stops accepting, refuses new requests, lets those in flight finish for at most bound_ms (joins and streams
 * that wait for credit are failed at once: nothing could complete them), closes every session, frees the
 * server, then calls done. */
void server_stop(struct server *s, uint32_t bound_ms, struct server_stopping *stopping);
/* While stopping: what is still in flight fails now. */
void server_hurry(struct server *s);

/* New sessions use this from now on (a reference is taken), and these directories are published; they and the
 * former ones stay the caller's and live until the server is freed. */
must_check int server_reload(struct server *s, struct channel_config *tls, const struct published_dir *dirs,
                             size_t dir_count);

#endif
