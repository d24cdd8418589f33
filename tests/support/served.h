/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A whole server in the test's process, on loopback: loops on threads of their own, a store in memory, TLS
 * with certificates of its own, and a client that speaks frames and nothing above them, so that a test can
 * also say what no real client would.
 */
#ifndef LARDER_TESTS_SERVED_H
#define LARDER_TESTS_SERVED_H

#include <pthread.h>
#include <semaphore.h>

#include "format/channel.h"
#include "server/boot.h"

#define SERVED_LOOPS_MAX 4
/* How long a test waits for what must happen; only a broken server makes it pass. */
#define SERVED_PATIENCE_MS 20000

struct served_options {
    size_t loop_count; /* 0: 1 */
    bool clear;        /* no TLS: everyone who connects is a writer of "acme" */
    bool no_bulk_lane;
    struct server_limits limits;
    const struct published_dir *published;
    size_t published_count;
    const char *store_folder; /* for sample indexes; NULL: in memory */
    uint64_t space_reserve_bytes;
};

struct served {
    struct loop *loops[SERVED_LOOPS_MAX];
    pthread_t threads[SERVED_LOOPS_MAX];
    size_t loop_count;
    struct memory_disk *disk;
    struct channel_config *tls; /* NULL: clear */
    struct boot *boot;
    struct err err;
    char address[ADDRESS_BYTES_MAX];
    uint64_t finished, failed;
    sem_t event;
    struct loop_msg msg;
    uint32_t stop_bound_ms;
    bool stopping;
};

/* Both fail the test if they cannot. A tenant "acme" is registered. */
void served_start(struct served *s, const struct served_options *o);
void served_stop(struct served *s, uint32_t bound_ms); /* fills finished and failed */
/* The same in two steps, for looking at a stop under way. */
void served_stop_begin(struct served *s, uint32_t bound_ms);
void served_hurry(struct served *s);
void served_stop_end(struct served *s);

/* Certificates of the test's CA; cached for the process. TLS configuration of a client of that tenant and
 * role. */
struct channel_config *served_user(const char *tenant, enum client_role role);

struct caller {
    int fd;
    struct channel *channel;
    uint64_t last_id;
    bool closed; /* the server has ended the connection */
    struct err err;
};
/* as: NULL for clear. Connects; the handshake goes on with the first call or answer. */
void caller_open(struct caller *c, const struct served *s, struct channel_config *as);
/* The same with hello said and answered. */
void caller_join(struct caller *c, const struct served *s, struct channel_config *as);
/* Connects, and says nothing: for caller_send_raw. What the server sends is not looked at. */
void caller_dial(struct caller *c, const struct served *s);
/* A bulk lane: sends its hello and waits for the welcome; c->closed if the server does not want it. */
void caller_lane(struct caller *c, const struct served *s, const struct lane_keys *keys,
                 const struct id *ticket);
void caller_close(struct caller *c); /* harmless twice */

/* Sends a frame; returns its request id. */
uint64_t caller_send(struct caller *c, uint16_t opcode, uint32_t deadline_ms, struct buf *message,
                     struct slice tail);
void caller_send_frame(struct caller *c, const struct frame_header *h, struct slice message,
                       struct slice tail);
void caller_send_raw(struct caller *c, const void *p, size_t n); /* past the channel */
void caller_cancel(struct caller *c, uint64_t id);
void caller_credit(struct caller *c, uint64_t id, uint64_t bytes);

struct answer {
    struct frame_header header;
    uint8_t *payload; /* answer_free */
    struct err err;   /* of an error answer */
};
/* The next frame; false: the connection has ended (c->err may say why). Fails the test after its patience. */
bool caller_answer(struct caller *c, struct answer *a);
/* None comes within so long: the time is a bound on how much is proven, not on how long it takes. */
bool caller_quiet(struct caller *c, int ms);
void answer_free(struct answer *a);
/* Sends and takes the answer of that id; others on the way fail the test. Returns the error's class. */
enum err_class caller_call(struct caller *c, uint16_t opcode, struct buf *message, struct answer *a);
/* Reads the server's end: everything until it closes. False if it does not within the patience. */
bool caller_drained(struct caller *c);

#endif
