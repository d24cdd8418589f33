/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranged reads that survive what may be survived: a lost connection or a restarted server is asked again, for
 * as long as the client's reconnect_ms without a byte; a read of which something is damaged is asked again
 * piece by piece, so that only the damaged pieces fail.
 */
#include <stdlib.h>
#include <string.h>

#include "client/clock.h"
#include "client/feed_private.h"

#define PAUSE_MS_MIN 10u
#define PAUSE_MS_MAX 1000u

static void on_done(struct ranged_read *r);

struct feed_fetch *feed_fetch_create(struct larder_feed *f, struct larder_dataset *d, uint32_t pieces_max)
{
    struct feed_fetch *fetch = calloc(1, sizeof *fetch + pieces_max * sizeof fetch->pieces[0]);
    if (!fetch)
        return NULL;
    fetch->feed = f;
    fetch->dataset = d;
    list_init(&fetch->link);
    fetch->read = (struct ranged_read){.source = d->published ? READ_PUBLISHED : READ_SEGMENT,
                                       .scope = d->published ? d->version_id : d->run.run_id,
                                       .pieces = fetch->pieces,
                                       .some = d->published ? NULL : feed_chunk_some,
                                       .piece = d->published ? feed_range_came : feed_chunk_came,
                                       .done = on_done};
    return fetch;
}

void feed_fetch_start(struct feed_fetch *fetch)
{
    struct larder_feed *f = fetch->feed;
    if (!fetch->read.conn) {
        pthread_mutex_lock(&f->lock);
        fetch->conn = f->next_conn++ % f->conn_count;
        fetch->read.conn = f->conns[fetch->conn];
        pthread_mutex_unlock(&f->lock);
    }
    ranged_read_submit(&fetch->read);
}

void feed_fetch_came(struct feed_fetch *fetch)
{
    fetch->lost_ms = 0;
    fetch->feed->disk_ms[fetch->conn] += fetch->read.disk_ms - fetch->disk_ms;
    fetch->disk_ms = fetch->read.disk_ms;
}

/* With the lock held: every piece that did not come fails. */
static void give_up(struct feed_fetch *fetch, const struct err *e)
{
    struct larder_feed *f = fetch->feed;
    for (uint32_t i = fetch->read.next; i < fetch->read.count; i++) {
        void *tag = fetch->pieces[i].tag;
        if (!tag)
            continue;
        if (fetch->dataset->published) {
            feed_piece_came(f, tag);
            feed_piece_ends(f, tag, e);
        } else {
            feed_chunk_lost(f, tag, e);
        }
    }
}

/* With the lock held. */
static void go_on_later(struct feed_fetch *fetch, uint64_t in_ms)
{
    fetch->due_ms = clock_ms() + in_ms;
    list_add_tail(&fetch->feed->retries, &fetch->link);
    pthread_cond_signal(&fetch->feed->work);
}

/* With the lock held: has it been without a byte for too long? */
static bool patience_left(struct feed_fetch *fetch)
{
    uint64_t now = clock_ms();
    if (fetch->lost_ms == 0 || fetch->read.next != fetch->seen_next ||
        fetch->read.into_next != fetch->seen_into)
        fetch->lost_ms = now;
    fetch->seen_next = fetch->read.next;
    fetch->seen_into = fetch->read.into_next;
    return now - fetch->lost_ms < client_options(fetch->feed->client)->reconnect_ms;
}

/* With the lock held: true if the fetch goes on. */
static bool again(struct feed_fetch *fetch, const struct err *e)
{
    struct larder_feed *f = fetch->feed;
    if (f->closing)
        return false;
    if (ranged_read_retriable(e) && patience_left(fetch)) {
        fetch->renewals = 0;
        go_on_later(fetch, fetch->pause_ms);
        fetch->pause_ms = fetch->pause_ms ? fetch->pause_ms * 2 : PAUSE_MS_MIN;
        if (fetch->pause_ms > PAUSE_MS_MAX)
            fetch->pause_ms = PAUSE_MS_MAX;
        return true;
    }
    /* A connection that was made again may lead to a server, or a part of one, that never heard of us. */
    if (e->class == ERR_NOT_FOUND && fetch->dataset->published && fetch->renewals++ < FEED_RENEWALS_MAX) {
        fetch->renew = true;
        go_on_later(fetch, 0);
        return true;
    }
    if (feed_is_damage(e) && fetch->read.count - fetch->read.next > 1) {
        fetch->split = true;
        go_on_later(fetch, 0);
        return true;
    }
    return false;
}

/* On the connection's thread. */
static void on_done(struct ranged_read *r)
{
    struct feed_fetch *fetch = container_of(r, struct feed_fetch, read);
    struct larder_feed *f = fetch->feed;
    bool goes_on = false;
    if (r->err.class != ERR_NONE) {
        pthread_mutex_lock(&f->lock);
        goes_on = again(fetch, &r->err);
        if (!goes_on)
            give_up(fetch, &r->err);
        pthread_mutex_unlock(&f->lock);
    }
    if (!goes_on)
        free(fetch);
}

/* One fetch for each piece that did not come. */
static void start_split(struct feed_fetch *fetch)
{
    struct larder_feed *f = fetch->feed;
    struct err e;
    for (uint32_t i = fetch->read.next; i < fetch->read.count; i++) {
        if (!fetch->pieces[i].tag)
            continue;
        struct feed_fetch *one = feed_fetch_create(f, fetch->dataset, 1);
        if (one) {
            one->pieces[0] = fetch->pieces[i];
            one->read.count = 1;
            feed_fetch_start(one);
            continue;
        }
        err_set(&e, ERR_NO_MEMORY, "no memory for a request");
        pthread_mutex_lock(&f->lock);
        fetch->read.next = i;
        give_up(fetch, &e);
        pthread_mutex_unlock(&f->lock);
        break;
    }
    free(fetch);
}

void feed_fetch_go_on(struct feed_fetch *fetch)
{
    struct larder_feed *f = fetch->feed;
    struct err e = {0};
    if (fetch->split) {
        start_split(fetch);
        return;
    }
    if (fetch->renew && dataset_published_renew(fetch->dataset, fetch->read.conn, &e) < 0) {
        pthread_mutex_lock(&f->lock);
        give_up(fetch, &e);
        pthread_mutex_unlock(&f->lock);
        free(fetch);
        return;
    }
    fetch->renew = false;
    feed_fetch_start(fetch);
}
