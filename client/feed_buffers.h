/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory for the chunks of a feed: a stretch of address space on large pages, taken page by page as it is
 * first used, out of which buffers are cut. Looked through from its begin, so that what was given back a
 * moment ago, and is still in the cache, is used again first.
 *
 * Small buffers, and those for which no room is found, are malloc's. Not thread-safe.
 */
#ifndef LARDER_CLIENT_FEED_BUFFERS_H
#define LARDER_CLIENT_FEED_BUFFERS_H

#include <stddef.h>
#include <stdint.h>

#include "format/base/err.h"

#define FEED_UNIT_BYTES (64u << 10)

struct feed_buffers {
    uint8_t *memory;
    void *mapped;
    size_t mapped_bytes;
    uint64_t *used; /* by frame of 64 units: those that are taken */
    uint32_t frames;
};

/* Room for bytes at least. 0 or -ENOMEM; then nothing is held. */
must_check int feed_buffers_init(struct feed_buffers *b, uint64_t bytes);
void feed_buffers_free(struct feed_buffers *b); /* all was given back. Zeroed is allowed */
size_t feed_buffer_cost(size_t n);              /* what a buffer of n bytes takes */
must_check uint8_t *feed_buffer_take(struct feed_buffers *b, size_t n); /* n > 0. NULL: no memory */
void feed_buffer_give(struct feed_buffers *b, uint8_t *p, size_t n);    /* n: as it was taken */

#endif
