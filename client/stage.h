/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The copying of what is saved into staging slots, from where the workers take it.
 *
 *   host tensors     copied by the caller's thread, and helpers, before submit returns
 *   device tensors   by copies that are given to the device's stream `out`, which comes after the callers'
 *                    streams: a thread of the save's own (the stager) gives them as slots come free, and
 *                    hands each slot on when the event behind its copies has happened
 *
 * Slots are taken in the order of chunks, whatever memory they are of: workers place chunks in that order.
 * A slot whose copies are given belongs to the device until they are done, also when the save has failed: it
 * then only goes back. Where a device neither ends them nor is lost, slot and pool are never used again.
 */
#ifndef LARDER_CLIENT_STAGE_H
#define LARDER_CLIENT_STAGE_H

#include "client/saver.h"

/* Orders copies after the callers' streams and starts the stager, if there are device tensors. Once per save,
 * whose thread runs already. */
must_check int stage_begin(struct larder_save *s, struct err *e);
/* Returns when all host tensors are copied, or the save has failed. */
void stage_copy(struct larder_save *s);
/* With the lock held: is everything private now? */
void stage_check(struct larder_save *s);
/* When s->staging has ended. */
void stage_end(struct larder_save *s);
/* "CUDA device 0, 1 -> pinned host memory -> ", or "". */
void stage_path(const struct larder_save *s, char *out, size_t size);

#endif
