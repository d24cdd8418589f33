/* SPDX-License-Identifier: Apache-2.0 */
/* Samples of published shards: each field is a range of a plain file and lands straight in its batch. */
#include "client/feed_private.h"

/* Two wanted ranges this near each other travel as one: a tar header costs less than a range. */
#define GAP_BYTES_MAX (16u << 10)

void feed_range_came(struct ranged_read *r, struct read_piece *p)
{
    struct feed_fetch *fetch = container_of(r, struct feed_fetch, read);
    struct larder_feed *f = fetch->feed;
    pthread_mutex_lock(&f->lock);
    feed_fetch_came(fetch);
    if (p->tag) {
        feed_piece_came(f, p->tag);
        feed_piece_ends(f, p->tag, NULL);
    }
    pthread_mutex_unlock(&f->lock);
}

/* Puts pieces from `first` on into the fetch while there is room; returns the first that is not in. */
static uint32_t gather(struct feed_fetch *fetch, struct feed_piece *pieces, uint32_t count, uint32_t first)
{
    uint32_t n = 0, i = first;
    uint64_t end = 0;
    for (; i < count && n + 2 <= FEED_FETCH_PIECES_MAX; i++) {
        struct feed_piece *p = &pieces[i];
        struct id object = dataset_published_object(p->view->shard);
        if (n && id_equal(&object, &fetch->pieces[n - 1].object) && p->offset > end &&
            p->offset - end <= GAP_BYTES_MAX)
            fetch->pieces[n++] =
                (struct read_piece){.object = object, .offset = end, .bytes = p->offset - end};
        fetch->pieces[n++] = (struct read_piece){
            .object = object, .offset = p->offset, .bytes = p->bytes, .into = p->to, .tag = p};
        end = p->offset + p->bytes;
    }
    fetch->read.count = n;
    return i;
}

int feed_ranges_request(struct larder_feed *f, struct feed_piece *pieces, uint32_t count, struct err *e)
{
    pthread_mutex_lock(&f->lock);
    for (uint32_t i = 0; i < count; i++)
        feed_piece_goes(f, &pieces[i]);
    pthread_mutex_unlock(&f->lock);
    for (uint32_t i = 0; i < count;) {
        uint32_t left = count - i;
        uint32_t room = left < FEED_FETCH_PIECES_MAX / 2 ? 2 * left : FEED_FETCH_PIECES_MAX;
        struct feed_fetch *fetch = feed_fetch_create(f, pieces->view->dataset, room);
        if (!fetch) {
            err_set(e, ERR_NO_MEMORY, "no memory for a request");
            pthread_mutex_lock(&f->lock);
            for (; i < count; i++) {
                feed_piece_came(f, &pieces[i]);
                feed_piece_ends(f, &pieces[i], e);
            }
            pthread_mutex_unlock(&f->lock);
            return -e->errnum;
        }
        i = gather(fetch, pieces, count, i);
        feed_fetch_start(fetch);
    }
    return 0;
}
