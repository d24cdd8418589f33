/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The seam below loop.h: what an implementation of the loop fills in. loop.c checks arguments, fills the
 * request (server/io/request.h) and calls through this table. Private to server/io. Every slot is filled.
 */
#ifndef LARDER_IO_IMPL_H
#define LARDER_IO_IMPL_H

#include "server/io/loop.h"
#include "server/io/request.h"

struct loop_ops {
    const char *name;
    void (*submit)(struct loop *l, struct io_op *op); /* must not call op->done */
    void (*cancel)(struct loop *l, struct io_op *op); /* op is pending, and cancelled for the first time */
    int (*space)(struct loop *l, const char *path, uint64_t *free_bytes, uint64_t *total_bytes);
    int (*boot)(struct loop *l, char out[LOOP_BOOT_BYTES]);
    int (*lock)(struct loop *l, int fd);
    int (*listen)(struct loop *l, const char *host, const char *port, bool shared, int *fd, char *bound,
                  size_t bound_size, struct err *e);
    void (*recv_least)(struct loop *l, int fd, size_t n);
    void (*shutdown)(struct loop *l, int fd);
    void (*peer)(struct loop *l, int fd, char *out, size_t size);
    void (*release)(struct loop *l, int fd);
    uint64_t (*now_ms)(struct loop *l);
    uint64_t (*unix_ns)(struct loop *l);
    void (*random)(struct loop *l, void *p, size_t n);
    void (*post)(struct loop *l, struct loop_msg *m);
    int (*run)(struct loop *l, struct err *e);
    void (*stop)(struct loop *l);
    void (*destroy)(struct loop *l);
};

struct loop {
    const struct loop_ops *ops;
    struct list timers; /* sorted by at_ms, those set first before others of the same time */
    struct list ready;  /* operations whose result is known */
    size_t pending;     /* operations whose done has not been called */
};

void loop_base_init(struct loop *l, const struct loop_ops *ops);

/* The result is final: done is called in a later step. The operation is on no list. */
void loop_ready(struct loop *l, struct io_op *op, int64_t result);
/* Calls done of at most `budget` ready operations, in order. */
void loop_run_ready(struct loop *l, unsigned budget);
/* Fires the timers that are due, at most `budget`. */
void loop_fire_timers(struct loop *l, uint64_t now_ms, unsigned budget);
/* Time of the next timer, or 0. */
uint64_t loop_next_timer(const struct loop *l);

#endif
