/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Walks the plan some batches before the planner and loads the views of the shards that it meets, so that the
 * planner finds them when a new window begins and need not wait for two answers per shard. What it cannot
 * load it leaves to the planner, who says why.
 */
#include <stdlib.h>

#include "client/feed_private.h"

#define BATCHES_AHEAD 16u

/* False: the feed is being closed. */
static bool wait_turn(struct larder_feed *f, uint64_t batch)
{
    pthread_mutex_lock(&f->lock);
    while (!f->closing && batch >= f->batches_planned + BATCHES_AHEAD)
        pthread_cond_wait(&f->scouting, &f->lock); /* as long as the consumer likes */
    bool go_on = !f->closing;
    pthread_mutex_unlock(&f->lock);
    return go_on;
}

void *feed_scout(void *arg)
{
    struct larder_feed *f = arg;
    struct larder_dataset *d = f->dataset;
    struct feed_slice slice;
    bool *failed = calloc(d->table.count, sizeof *failed);
    uint32_t last = UINT32_MAX;
    for (uint64_t batch = 0; failed && feed_plan_next(&f->scout_plan, &slice); batch++) {
        if (!wait_turn(f, batch))
            break;
        for (uint32_t i = 0; i < slice.count && !d->closing; i++) {
            uint32_t shard = feed_plan_place(&f->scout_plan, &slice, i).at.shard;
            struct dataset_view *v;
            if (shard == last || failed[shard])
                continue;
            failed[shard] = dataset_view_get(d, shard, true, &v, NULL) < 0;
            if (!failed[shard])
                dataset_view_put(d, v);
            last = shard;
        }
    }
    free(failed);
    return NULL;
}
