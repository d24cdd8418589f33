/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fixed budget of host memory, taken once: page-aligned, on huge pages where the kernel grants them, locked
 * where the memlock limit allows, every page touched at creation so that no later use waits for the kernel.
 * It is split into slots of one size. Locking is best effort; what was got is told by pool_note.
 */
#ifndef LARDER_GPUDIRECT_POOL_H
#define LARDER_GPUDIRECT_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/base/err.h"

struct pool;

/* bytes is rounded down to whole slots, at least one; slot_bytes is a multiple of 4096. ERR_NO_MEMORY. */
must_check int pool_create(uint64_t bytes, size_t slot_bytes, struct pool **out, struct err *e);
/* All slots must be back. NULL allowed. */
void pool_destroy(struct pool *p);
size_t pool_slots(const struct pool *p);
size_t pool_slot_bytes(const struct pool *p);
/* A free slot, aligned to 4096 bytes, or NULL. Never waits. Any thread. */
uint8_t *pool_take(struct pool *p);
void pool_give(struct pool *p, uint8_t *slot);
bool pool_locked(const struct pool *p);
/* For people: "256 MiB locked", or "256 MiB not locked: the memlock limit is 8 MiB; raise it with ..." */
const char *pool_note(const struct pool *p);

#endif
