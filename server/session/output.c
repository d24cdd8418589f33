/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What leaves a session. Over TLS all of it is the channel's output, sent piece by piece. On a lane, tails of
 * sealed chunks are sent from the memory that the disk was read into: a queue of outputs and tails in order,
 * several sent at once.
 */
#include <stdlib.h>

#include "server/session/extents.h"
#include "server/session/session.h"

#define COPIED_BYTES_MAX 16384u /* a tail this small is copied behind its header */

/* One piece of memory on its way out. */
struct departure {
    struct list link;
    uint8_t *memory; /* of malloc, or NULL: the extent's */
    struct extent *extent;
    struct slice bytes;
};

void output_init(struct session *s)
{
    list_init(&s->queued);
    list_init(&s->leaving);
}

size_t output_bytes(const struct session *s)
{
    return s->send_bytes + s->queued_bytes + channel_output(s->channel).n;
}

static void drop(struct session *s, struct list *departures)
{
    struct list *it;
    while ((it = list_pop(departures))) {
        struct departure *d = container_of(it, struct departure, link);
        free(d->memory);
        extent_put(s->w->server->extents, d->extent);
        free(d);
    }
}

/* Takes memory or extent over if it can. */
static bool enqueue(struct session *s, struct slice bytes, uint8_t *memory, struct extent *x)
{
    struct departure *d = malloc(sizeof *d);
    if (!d)
        return false;
    *d = (struct departure){.memory = memory, .extent = x, .bytes = bytes};
    list_add_tail(&s->queued, &d->link);
    s->queued_bytes += bytes.n;
    return true;
}

/* The channel's output joins the queue. */
static bool enqueue_channel(struct session *s)
{
    size_t n;
    uint8_t *p = channel_output_take(s->channel, &n);
    if (!p || enqueue(s, SLICE(p, n), p, NULL))
        return true;
    free(p);
    return false;
}

int output_extent(struct session *s, const struct frame_header *h, struct slice tail, struct extent *x,
                  struct err *e)
{
    int rc;
    if (!s->lane || tail.n <= COPIED_BYTES_MAX) {
        rc = channel_send(s->channel, h, SLICE(NULL, 0), tail, e);
        goto out;
    }
    rc = channel_send_head(s->channel, h, tail.n, e);
    if (rc == 0 && !enqueue_channel(s)) /* without its head the tail must not go either */
        rc = err_set(e, ERR_NO_MEMORY, "no memory for output");
    if (rc < 0)
        goto out;
    if (enqueue(s, tail, NULL, x))
        x = NULL;
    else
        rc = err_set(e, ERR_NO_MEMORY, "no memory for output");
out:
    extent_put(s->w->server->extents, x);
    return rc;
}

static void send_plain(struct session *s)
{
    s->send_buf = channel_output_take(s->channel, &s->send_bytes);
    if (!s->send_buf) {
        s->send_bytes = 0;
        return;
    }
    s->sending = true;
    loop_send(s->w->loop, &s->send, s->fd, s->send_buf, s->send_bytes);
}

static void send_queued(struct session *s)
{
    struct list *it;
    s->parts.count = 0;
    while (s->parts.count < LOOP_PARTS_MAX && (it = list_pop(&s->queued))) {
        struct departure *d = container_of(it, struct departure, link);
        list_add_tail(&s->leaving, &d->link);
        s->parts.part[s->parts.count++] =
            (struct iovec){.iov_base = (void *)(uintptr_t)d->bytes.p, .iov_len = d->bytes.n};
        s->send_bytes += d->bytes.n;
        s->queued_bytes -= d->bytes.n;
    }
    s->sending = true;
    loop_send_parts(s->w->loop, &s->send, s->fd, &s->parts);
}

void output_flush(struct session *s)
{
    if (s->sending || s->shut)
        return;
    if (!list_empty(&s->queued) && !enqueue_channel(s)) {
        s->broken = true; /* settle closes it */
        return;
    }
    if (list_empty(&s->queued))
        send_plain(s);
    else
        send_queued(s);
    if (s->sending)
        s->send_at_ms = loop_now_ms(s->w->loop);
}

void output_sent(struct session *s)
{
    free(s->send_buf);
    s->send_buf = NULL;
    s->send_bytes = 0;
    drop(s, &s->leaving);
}

void output_free(struct session *s)
{
    output_sent(s);
    drop(s, &s->queued);
    s->queued_bytes = 0;
}
