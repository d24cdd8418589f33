/* SPDX-License-Identifier: Apache-2.0 */
/* The loop on io_uring. */
#ifndef LARDER_RING_H
#define LARDER_RING_H

#include "server/io/loop.h"

/* At most this many operations per entry of the submission queue are with the kernel at once, 8,192 by
 * default; more are held back. An idle connection with a pending receive is one of them, so the number of
 * connections per loop must stay well below. The completion queue is sized for it: 16 bytes for each, twice.
 */
#define RING_FLIGHT_PER_ENTRY 32u

struct ring_options {
    unsigned entries; /* submission queue; 0: 256 */
    bool worker_pool; /* file operations on a pool of threads and sockets on epoll, for machines that refuse
                         io_uring */
};

/* ERR_UNSUPPORTED where io_uring is refused or lacks a needed feature: the text says which, why it may be
 * (container, sysctl kernel.io_uring_disabled, old kernel) and what to do. */
must_check int ring_create(const struct ring_options *o, struct loop **out, struct err *e);

/* What this kernel's io_uring can do, one line for a person: "io_uring: kernel 6.1, single issuer, ..." */
must_check int ring_probe(char *text, size_t size, struct err *e);

#endif
