/* SPDX-License-Identifier: Apache-2.0 */
#include "server/store/retention.h"

#include <errno.h>
#include <stdlib.h>

static int by_step(const void *a, const void *b)
{
    const struct retention_item *x = *(struct retention_item *const *)a,
                                *y = *(struct retention_item *const *)b;
    if (x->step != y->step)
        return x->step < y->step ? -1 : 1;
    return x->sequence < y->sequence ? -1 : x->sequence > y->sequence;
}

/* Marks the items of which a later good one of the same step exists. */
static int find_superseded(struct retention_item *items, size_t n)
{
    struct retention_item **sorted = calloc(n ? n : 1, sizeof *sorted);
    if (!sorted)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++)
        sorted[i] = &items[i];
    qsort(sorted, n, sizeof *sorted, by_step);
    bool later_good = false; /* of the step that is being walked, from its end */
    for (size_t i = n; i-- > 0;) {
        if (i + 1 < n && sorted[i]->step != sorted[i + 1]->step)
            later_good = false;
        if (later_good)
            sorted[i]->reason = PRUNE_REMOVE_SUPERSEDED;
        if (!sorted[i]->bad)
            later_good = true;
    }
    free(sorted);
    return 0;
}

static enum prune_reason judge(const struct retention_rule *rule, const struct retention_item *x,
                               uint64_t last_from)
{
    if (x->pinned)
        return PRUNE_KEEP_PINNED;
    if (x->reason == PRUNE_REMOVE_SUPERSEDED)
        return PRUNE_REMOVE_SUPERSEDED;
    if (rule->keep_last && x->sequence >= last_from)
        return PRUNE_KEEP_LAST;
    if (rule->keep_every && x->step % rule->keep_every == 0)
        return PRUNE_KEEP_EVERY;
    /* A time in the future (the clock was set back) counts as young. */
    if (rule->keep_within_ns &&
        (x->time_ns >= rule->now_ns || rule->now_ns - x->time_ns <= rule->keep_within_ns))
        return PRUNE_KEEP_WITHIN;
    return PRUNE_REMOVE_OLD;
}

int retention_plan(const struct retention_rule *rule, struct retention_item *items, size_t n)
{
    for (size_t i = 0; i < n; i++)
        items[i].reason = PRUNE_REMOVE_OLD;
    if (!rule->versions && find_superseded(items, n) < 0)
        return -ENOMEM;
    /* From which sequence on the last keep_last good ones lie. With fewer than that, from the start. */
    uint64_t last_from = 0;
    uint32_t seen = 0;
    struct retention_item *last_good = NULL;
    for (size_t i = n; i-- > 0;) {
        if (items[i].bad || items[i].reason == PRUNE_REMOVE_SUPERSEDED)
            continue;
        if (!last_good)
            last_good = &items[i];
        if (++seen == rule->keep_last) {
            last_from = items[i].sequence;
            break;
        }
    }
    for (size_t i = 0; i < n; i++)
        items[i].reason = judge(rule, &items[i], last_from);
    if (last_good && retention_removes(last_good->reason))
        last_good->reason = PRUNE_KEEP_LAST_GOOD;
    return 0;
}
