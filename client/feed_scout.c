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

/* Of one dataset: shards whose views cannot be loaded, and the shard looked at last. */
struct seen {
    bool *failed;
    uint32_t last;
};

static void look(struct larder_dataset *d, struct seen *s, uint32_t shard)
{
    struct dataset_view *v;
    if (shard == s->last || s->failed[shard] || d->closing)
        return;
    s->failed[shard] = dataset_view_get(d, shard, true, &v, NULL) < 0;
    if (!s->failed[shard])
        dataset_view_put(d, v);
    s->last = shard;
}

void *feed_scout(void *arg)
{
    struct larder_feed *f = arg;
    struct seen seen[MIX_DATASETS_MAX] = {{0}};
    struct feed_slice slice;
    bool memory = true;
    for (uint32_t i = 0; i < f->source_count; i++) {
        seen[i] = (struct seen){.failed = calloc(f->sources[i].dataset->table.count, 1), .last = UINT32_MAX};
        memory = memory && seen[i].failed;
    }
    for (uint64_t batch = 0; memory && feed_plan_next(&f->scout_plan, &slice); batch++) {
        if (!wait_turn(f, batch))
            break;
        for (uint32_t i = 0; i < slice.count; i++) {
            struct mix_place p = feed_plan_place(&f->scout_plan, &slice, i).at;
            look(f->sources[p.source].dataset, &seen[p.source], p.at.shard);
        }
    }
    for (uint32_t i = 0; i < f->source_count; i++)
        free(seen[i].failed);
    return NULL;
}
