/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fixed budget of host memory, taken once: page-aligned, on huge pages where the kernel grants them, locked
 * where the memlock limit allows, every page touched at creation so that no later use waits for the kernel.
 * It is split into slots of one size. Locking is best effort; what was got is told by pool_note.
 *
 * With a device, the same memory is also registered with it, once, in pieces: copies between it and any
 * device then run by themselves. No copy may cross from one piece into the next; slots of up to 1 GiB never
 * do.
 */
#ifndef LARDER_GPUDIRECT_POOL_H
#define LARDER_GPUDIRECT_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpudirect/memory.h"

struct pool;

/* bytes is rounded down to whole slots, at least one; slot_bytes is a multiple of 4096. ERR_NO_MEMORY. */
must_check int pool_create(uint64_t bytes, size_t slot_bytes, struct pool **out, struct err *e);
/*
 * Moves the pool near the device where both sides' NUMA nodes are known, and registers it for all devices.
 * Once: a second call does nothing and gives what the first one gave. Not while another thread uses pool or
 * slots' contents for copies of a device. Host memory: nothing to do. m stays open for longer than the pool.
 * Where any piece is refused, none is registered: ERR_NO_MEMORY and others of memory_register; the pool goes
 * on as plain memory, and pool_note tells the reason.
 */
must_check int pool_register(struct pool *p, struct memory *m, struct err *e);
bool pool_registered(const struct pool *p);
/* How many of the n bytes at `at`, which lies in the pool, one copy may take: fewer than n where a piece
 * ends. */
size_t pool_run(const struct pool *p, const void *at, size_t n);

/* All slots must be back, and no copy under way. NULL allowed. */
void pool_destroy(struct pool *p);
size_t pool_slots(const struct pool *p);
size_t pool_slot_bytes(const struct pool *p);
/* A free slot, aligned to 4096 bytes, or NULL. Never waits. Any thread. */
uint8_t *pool_take(struct pool *p);
/* count > 0 slots, one behind the other; they are given back one by one. Slower than pool_take. */
uint8_t *pool_take_row(struct pool *p, size_t count);
void pool_give(struct pool *p, uint8_t *slot);
bool pool_locked(const struct pool *p);
/* For people: "256 MiB locked", or "256 MiB not locked: the memlock limit is 8 MiB; raise it with ..." */
const char *pool_note(const struct pool *p);

#endif
