/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Staging memory lent for something else than chunks that are saved: it is there and faulted in, on large
 * pages, and within the client's budget. Half of it is never lent: saves always find that. Where it is not to
 * be had, memory of its own is. Any thread.
 */
#ifndef LARDER_CLIENT_LOAN_H
#define LARDER_CLIENT_LOAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct larder;

struct loan { /* zeroed: none */
    uint8_t *memory;
    size_t slots; /* 0: of its own */
};

/* bytes > 0, uninitialised; false: no memory. Never waits. Not with the saver's lock held. c: NULL: memory of
 * its own. */
bool loan_begin(struct larder *c, size_t bytes, struct loan *out) __attribute__((warn_unused_result));
/* A larger one in its place, that begins with the same `used` bytes. False: no memory; *l is as it was. */
bool loan_grow(struct larder *c, struct loan *l, size_t used, size_t bytes)
    __attribute__((warn_unused_result));
void loan_end(struct larder *c, struct loan *l); /* leaves none */

#endif
