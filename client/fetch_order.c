/* SPDX-License-Identifier: Apache-2.0 */
#include "client/fetch_order.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct fetch_span {
    const struct part *part;
    size_t first, end;
};

static size_t span_end(const struct fetch_item *items, size_t first, size_t count)
{
    size_t i = first;
    while (i < count && items[i].part == items[first].part)
        i++;
    return i;
}

int fetch_order_create(struct fetch_order *o, const struct fetch_item *items, size_t count)
{
    *o = (struct fetch_order){.items = items, .count = count, .left = count};
    size_t n = 0;
    for (size_t i = 0; i < count; i = span_end(items, i, count))
        n++;
    o->taken = calloc(count + 1, sizeof *o->taken);
    o->spans = calloc(n + 1, sizeof *o->spans);
    if (!o->taken || !o->spans) {
        fetch_order_free(o);
        return -ENOMEM;
    }
    for (size_t i = 0; i < count; i = o->spans[o->span_count++].end)
        o->spans[o->span_count] = (struct fetch_span){items[i].part, i, span_end(items, i, count)};
    return 0;
}

void fetch_order_free(struct fetch_order *o)
{
    free(o->taken);
    free(o->spans);
    *o = (struct fetch_order){0};
}

size_t fetch_order_next(struct fetch_order *o)
{
    check(o->left > 0);
    const uint8_t *free_one = memchr(o->taken + o->at, 0, o->count - o->at);
    if (!free_one)
        free_one = memchr(o->taken, 0, o->at);
    o->at = (size_t)(free_one - o->taken);
    return o->at;
}

void fetch_order_take(struct fetch_order *o)
{
    o->taken[fetch_order_next(o)] = 1;
    o->left--;
}

static bool is_in(const struct fetch_order *o, size_t item, const struct fetch_scan *s)
{
    const struct fetch_item *i = &o->items[item];
    uint32_t count;
    const struct chunk_entry *c = &part_chunks(i->part, &count)[i->chunk];
    return c->stored_bytes > 0 && c->offset < s->end && c->offset + c->stored_bytes > s->begin &&
           id_equal(&part_header(i->part)->segment_id, &s->segment);
}

/* An item of the span that is in the scan and not taken, the first in its later half if there is one: what is
 * earlier leaves the server's memory first. o->count: none is. */
static size_t find_in_span(const struct fetch_order *o, const struct fetch_span *span,
                           const struct fetch_scan *s)
{
    struct fetch_scan later = *s;
    size_t first = o->count;
    later.begin = s->begin + (s->end - s->begin) / 2;
    for (size_t i = span->first; i < span->end; i++) {
        if (o->taken[i] || !is_in(o, i, s))
            continue;
        if (is_in(o, i, &later))
            return i;
        if (first == o->count)
            first = i;
    }
    return first;
}

static size_t find(const struct fetch_order *o, const struct fetch_scan *s)
{
    for (size_t i = 0; i < o->span_count; i++)
        if (id_equal(&part_header(o->spans[i].part)->segment_id, &s->segment))
            return find_in_span(o, &o->spans[i], s);
    return o->count;
}

void fetch_order_join(struct fetch_order *o, const struct fetch_scan *scans, unsigned count)
{
    for (unsigned k = 0; o->left > 0 && k < count; k++) {
        if (is_in(o, fetch_order_next(o), &scans[k]))
            return;
        size_t item = find(o, &scans[k]);
        if (item == o->count)
            continue;
        o->at = item;
        return;
    }
}
