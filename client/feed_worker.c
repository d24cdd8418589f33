/* SPDX-License-Identifier: Apache-2.0 */
/* What a feed's workers do: read local files, decode chunks that came, go on with fetches whose time has
 * come, and see to samples that could not be read, report to the server. */
#include <unistd.h>

#include "client/clock.h"
#include "client/feed_private.h"

#define IDLE_MS 60000u

/* With the lock held: a fetch whose time has come, taken off; else *next_ms is when the first one's comes. */
static struct feed_fetch *due(struct larder_feed *f, uint64_t *next_ms)
{
    uint64_t now = clock_ms();
    *next_ms = now + IDLE_MS;
    list_for_each (it, &f->retries) {
        struct feed_fetch *fetch = container_of(it, struct feed_fetch, link);
        if (fetch->due_ms <= now) {
            list_del(&fetch->link);
            return fetch;
        }
        if (fetch->due_ms < *next_ms)
            *next_ms = fetch->due_ms;
    }
    return NULL;
}

/* With the lock held, which is free meanwhile. */
static void decode(struct larder_feed *f, struct feed_chunk *c, struct part_scratch *scratch)
{
    struct err e;
    if (!scratch) {
        err_set(&e, ERR_NO_MEMORY, "no memory for decoding chunks");
        feed_chunk_lost(f, c, &e);
        return;
    }
    pthread_mutex_unlock(&f->lock);
    feed_chunk_decode(f, c, scratch);
    pthread_mutex_lock(&f->lock);
}

/* Likewise. What is to be repaired waits for nothing that other workers do not do; so one at most does. */
static void repair(struct larder_feed *f)
{
    struct larder_batch *b = container_of(list_pop(&f->repairs), struct larder_batch, repair);
    f->repairing = true;
    pthread_mutex_unlock(&f->lock);
    feed_repair(f, b);
    pthread_mutex_lock(&f->lock);
    f->repairing = false;
    pthread_cond_signal(&f->work);
}

void *feed_worker(void *arg)
{
    struct larder_feed *f = arg;
    struct part_scratch *scratch = part_scratch_create();
    int was = nice(client_options(f->client)->nice); /* of this thread; training wins. Best effort */
    (void)was;
    pthread_mutex_lock(&f->lock);
    while (!f->closing) {
        uint64_t next_ms;
        if (clock_ms() >= f->report_due_ms) {
            f->report_due_ms = clock_ms() + (f->report_due_ms ? FEED_REPORT_MS : FEED_REPORT_MS / 5);
            pthread_mutex_unlock(&f->lock);
            feed_report(f, false);
            pthread_mutex_lock(&f->lock);
            continue;
        }
        struct list *it = list_pop(&f->decode);
        struct list *local = it ? NULL : list_pop(&f->local_runs);
        struct feed_fetch *fetch = it || local ? NULL : due(f, &next_ms);
        if (local) {
            pthread_mutex_unlock(&f->lock);
            feed_local_read(f, local);
            pthread_mutex_lock(&f->lock);
        } else if (it) {
            decode(f, container_of(it, struct feed_chunk, queue), scratch);
        } else if (fetch) {
            pthread_mutex_unlock(&f->lock);
            feed_fetch_go_on(fetch);
            pthread_mutex_lock(&f->lock);
        } else if (!list_empty(&f->repairs) && !f->repairing) {
            repair(f);
        } else {
            clock_wait(&f->work, &f->lock, next_ms < f->report_due_ms ? next_ms : f->report_due_ms);
        }
    }
    pthread_mutex_unlock(&f->lock);
    if (scratch)
        part_scratch_free(scratch);
    return NULL;
}
