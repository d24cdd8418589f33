/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What prune keeps and what it removes: a pure function of the committed checkpoints and the rule, so that it
 * can be tried against a model without a store. Saves that wait or were given up are no part of it.
 *
 * Kept: the last keep_last by sequence, steps that are multiples of keep_every, those younger than
 * keep_within_ns, pinned ones, and always the last good one. Removed: a step that was committed again, well,
 * later (not for datasets, whose versions all stand for themselves), and the rest. Bad ones count for
 * nothing; they stay while they are newer than the oldest of the last keep_last good ones, for whoever wants
 * to look.
 */
#ifndef LARDER_RETENTION_H
#define LARDER_RETENTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/base/err.h"
#include "format/wire.h"

struct retention_rule {
    uint32_t keep_last;      /* 0: not used, as below */
    uint64_t keep_every;     /* steps */
    uint64_t keep_within_ns; /* before now_ns, by the server's clock */
    uint64_t now_ns;
    bool versions; /* a dataset: equal steps do not replace each other */
};

struct retention_item {
    uint64_t sequence, step, time_ns;
    bool pinned, bad;
    enum prune_reason reason; /* the answer */
};

/* items ascend by sequence. -ENOMEM. */
must_check int retention_plan(const struct retention_rule *rule, struct retention_item *items, size_t n);

static inline bool retention_removes(enum prune_reason reason)
{
    return reason >= PRUNE_REMOVE_OLD;
}

#endif
