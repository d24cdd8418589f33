/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The door of a loop for other threads: messages, and operations that helper threads have finished. A sender
 * rings an eventfd at most once per emptying. Private to server/io.
 */
#ifndef LARDER_INBOX_H
#define LARDER_INBOX_H

#include <pthread.h>

#include "server/io/loop.h"

struct inbox {
    int fd; /* readable when there is something new; non-blocking */
    pthread_mutex_t lock;
    bool rung;                     /* the eventfd was written since the last emptying */
    struct loop_msg *first, **end; /* in the order of arrival */
    struct list finished;          /* of io_op, op->result set */
};

must_check int inbox_init(struct inbox *i); /* 0 or negative errno */
void inbox_fini(struct inbox *i);
/* Any thread. ring: false if the caller is the loop's own thread, which looks before it sleeps. */
void inbox_post(struct inbox *i, struct loop_msg *m, bool ring);
void inbox_finish(struct inbox *i, struct io_op *op);
/* The loop's thread. Appends what there is to the two lists. */
void inbox_empty(struct inbox *i, struct loop_msg ***end, struct list *finished);

#endif
