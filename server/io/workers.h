/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Helper threads of one loop for what has no asynchronous form: each runs one request at a time with plain
 * system calls (io_blocking) and hands it to the loop's inbox. Threads start when work waits, up to a limit.
 * Private to server/io.
 */
#ifndef LARDER_WORKERS_H
#define LARDER_WORKERS_H

#include "server/io/inbox.h"

struct workers;

must_check struct workers *workers_create(unsigned threads_max, struct inbox *to); /* NULL: no memory */
void workers_destroy(struct workers *w); /* waits for what runs; nothing is queued */
void workers_submit(struct workers *w, struct io_op *op);
/* True: taken back before it began. Then it belongs to the caller again. */
must_check bool workers_take_back(struct workers *w, struct io_op *op);

#endif
