/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pinned memory that chunks are decoded into on their way to devices: so that the bytes of a restore are
 * never all in host memory, and copies go on while the next chunks are decoded.
 *
 *   decoding thread   landing_room -> decodes -> landing_copy, any number -> landing_sent
 *   device            copies; the slot is used again when they are done
 */
#ifndef LARDER_CLIENT_LANDING_H
#define LARDER_CLIENT_LANDING_H

#include "client/box.h"
#include "client/device.h"

struct landing;

/* Registered with the devices, which are different ones; at least one slot for each of `threads`. */
must_check int landing_create(struct larder *c, struct device *const *devices, unsigned device_count,
                              unsigned threads, struct landing **out, struct err *e);
/* A slot for a chunk's plain bytes; waits, at most the request timeout, until one is free. Each thread has
 * one at a time. */
must_check int landing_room(struct landing *l, uint8_t **slot, struct err *e);
/* As transfer, with memory of the device and the calling thread's slot, or what lies in it. */
must_check int landing_copy(struct landing *l, struct device *d, const struct box_copy *b, uint64_t offset,
                            size_t n, uint8_t *packed, struct err *e);
/* The slot goes back when what was copied from it is done. */
void landing_sent(struct landing *l, uint8_t *slot);
/* All of it is done, after at most timeout_ms; or ERR_TIMEOUT, or the first failure of a copy. */
must_check int landing_wait(struct landing *l, unsigned timeout_ms, struct err *e);
/* When no thread has a slot. NULL allowed. */
void landing_free(struct landing *l);

#endif
