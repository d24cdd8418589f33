/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hashes of chunks (chunk_hash.h) of memory wherever it lies: host memory by the processor; device memory by
 * a kernel beside it, or, where there are no kernels, copied to the host and hashed there. hasher_path tells
 * which, and why.
 *
 * Threads: one hasher by one thread at a time. Every wait has a bound, HASHER_WAIT_MS.
 */
#ifndef LARDER_GPUDIRECT_HASHER_H
#define LARDER_GPUDIRECT_HASHER_H

#include "gpudirect/chunk_hash.h"
#include "gpudirect/memory.h"

#define HASHER_WAIT_MS 60000u

struct hasher;

/* image: kernels_image(), or NULL to go without kernels. m stays open for longer. */
must_check int hasher_open(struct memory *m, const void *image, struct hasher **out, struct err *e);
void hasher_close(struct hasher *h); /* NULL allowed */
/* "in host memory", "by a kernel on the device", "copied to the host: ..." with the reason. */
const char *hasher_path(const struct hasher *h);

/* Chunks of chunk_bytes > 0 of n > 0 bytes of the hasher's memory, the last one as long as it is: their
 * hashes to out, in host memory. Returns when they are there. */
must_check int hasher_run(struct hasher *h, const void *data, uint64_t n, uint64_t chunk_bytes,
                          struct chunk_hash *out, struct err *e);

#endif
