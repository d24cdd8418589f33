/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Samples of published shards whose files lie on this machine: workers read them straight into their batch,
 * all pieces of a shard that follow each other with the file open once.
 */
#include <stdlib.h>

#include "client/dataset_local.h"
#include "client/feed_private.h"

#define RUN_PIECES_MAX 64u /* so that several workers share a batch */

struct local_run {
    struct list link; /* feed.local_runs */
    const struct dataset_local *local;
    struct feed_piece *pieces; /* of one shard; views are gone when they are read */
    uint32_t count, shard;
};

/* With the lock held: all pieces from the first on have come to their end. */
static void end_all(struct larder_feed *f, struct feed_piece *pieces, uint32_t count, const struct err *e)
{
    for (uint32_t i = 0; i < count; i++) {
        struct larder_batch *b = pieces[i].batch;
        if (--b->local == 0)
            pthread_cond_broadcast(&f->changed);
        feed_piece_ends(f, &pieces[i], e);
    }
}

int feed_local_request(struct larder_feed *f, const struct dataset_local *local, struct feed_piece *pieces,
                       uint32_t count, struct err *e)
{
    int rc = 0;
    pthread_mutex_lock(&f->lock);
    pieces->batch->local += count;
    for (uint32_t i = 0, n; i < count; i += n) {
        uint32_t shard = pieces[i].view->shard;
        for (n = 1; n < RUN_PIECES_MAX && i + n < count && pieces[i + n].view->shard == shard; n++)
            ;
        struct local_run *run = rc == 0 ? malloc(sizeof *run) : NULL;
        if (!run) {
            rc = err_set(e, ERR_NO_MEMORY, "no memory for reading local files");
            end_all(f, &pieces[i], n, e);
            continue;
        }
        *run = (struct local_run){.local = local, .pieces = &pieces[i], .count = n, .shard = shard};
        list_add_tail(&f->local_runs, &run->link);
        pthread_cond_signal(&f->work);
    }
    pthread_mutex_unlock(&f->lock);
    return rc;
}

/* Each piece ends when it is there, so that a batch of few is not held up by others. */
void feed_local_read(struct larder_feed *f, struct list *link)
{
    struct local_run *run = container_of(link, struct local_run, link);
    struct local_shard shard;
    struct err e;
    int opened = local_shard_open(run->local, run->shard, &shard, &e);
    for (uint32_t i = 0; i < run->count; i++) {
        struct feed_piece *p = &run->pieces[i];
        int rc = opened < 0 ? opened : local_shard_read(&shard, p->offset, (size_t)p->bytes, p->to, &e);
        pthread_mutex_lock(&f->lock);
        end_all(f, p, 1, rc < 0 ? &e : NULL);
        pthread_mutex_unlock(&f->lock);
    }
    if (opened == 0)
        local_shard_close(&shard);
    free(run);
}

/* The feed is closing: nobody waits for them any more. */
void feed_local_drop(struct larder_feed *f)
{
    struct list *link;
    while ((link = list_pop(&f->local_runs)) != NULL)
        free(container_of(link, struct local_run, link));
}
