/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the two loops on a real kernel share (the ring and the pool): clock, randomness, inbox, helper
 * threads, making sockets, and the order of work within a turn. Private to server/io.
 */
#ifndef LARDER_HOST_H
#define LARDER_HOST_H

#include "server/io/impl.h"
#include "server/io/inbox.h"
#include "server/io/workers.h"

#define HOST_BUDGET 256u /* messages, timers and callbacks of a turn, each */

struct host {
    struct loop loop;
    struct inbox inbox;
    struct loop_msg *first, **end; /* messages taken from the inbox and not yet run */
    struct workers *workers;
    bool stopped, running;
    uint64_t turn_ms;
};

must_check int host_init(struct host *h, const struct loop_ops *ops, unsigned threads_max, struct err *e);
void host_fini(struct host *h);

/* A turn is: host_gather; unless host_done, wait for at most host_wait_ms and collect; host_turn. */
void host_gather(struct host *h);
must_check bool host_done(const struct host *h);
/* 0: there is work; -1: until something happens. */
int64_t host_wait_ms(const struct host *h);
void host_turn(struct host *h);

/* Slots of struct loop_ops. */
int host_space(struct loop *l, const char *path, uint64_t *free_bytes, uint64_t *total_bytes);
int host_boot(struct loop *l, char out[LOOP_BOOT_BYTES]);
int host_lock(struct loop *l, int fd);
int host_listen(struct loop *l, const char *host, const char *port, bool shared, int *fd, char *bound,
                size_t bound_size, struct err *e);
void host_recv_least(struct loop *l, int fd, size_t n);
void host_shutdown(struct loop *l, int fd);
void host_peer(struct loop *l, int fd, char *out, size_t size);
uint64_t host_now_ms(struct loop *l);
uint64_t host_unix_ns(struct loop *l);
void host_random(struct loop *l, void *p, size_t n);
void host_post(struct loop *l, struct loop_msg *m);
void host_stop(struct loop *l);

/* For connect: makes the socket, with more flags of its type, and the address from path (host) and path2
 * (port). 0 or a negative errno. */
must_check int host_address(struct io_req *r, int flags);
/* A connected descriptor sends small messages at once, and finds out in minutes when its peer is gone. */
void host_tune(int fd);

#endif
