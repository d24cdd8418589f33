/* SPDX-License-Identifier: Apache-2.0 */
#include "client/feed_arena.h"

#include <stdlib.h>

void feed_arena_init(struct feed_arena *a, uint8_t *base, size_t bytes)
{
    check((uintptr_t)base % FEED_ALIGN == 0);
    *a = (struct feed_arena){.base = base, .bytes = bytes};
    list_init(&a->regions);
}

void feed_arena_reset(struct feed_arena *a)
{
    for (struct list *it; (it = list_pop(&a->regions));)
        free(container_of(it, struct feed_region, link));
    a->head = 0;
}

bool feed_arena_take(struct feed_arena *a, size_t bytes, struct feed_region *r)
{
    size_t need = feed_align(bytes ? bytes : 1);
    if (need < bytes || need > a->bytes)
        return false;
    size_t at = a->head;
    if (list_empty(&a->regions)) {
        at = 0;
    } else {
        struct feed_region *oldest = container_of(a->regions.next, struct feed_region, link);
        size_t tail = (size_t)(oldest->at - a->base);
        /* The free stretch is [head, end) and [0, tail), or [head, tail) once the ring has wrapped. */
        if (at > tail && a->bytes - at < need)
            at = 0;
        if (at <= tail && tail - at < need)
            return false;
    }
    *r = (struct feed_region){.at = a->base + at, .bytes = need};
    list_add_tail(&a->regions, &r->link);
    a->head = at + need;
    return true;
}

void feed_arena_give(struct feed_arena *a, struct feed_region *r)
{
    check(!r->given_back);
    r->given_back = true;
    while (!list_empty(&a->regions)) {
        struct feed_region *oldest = container_of(a->regions.next, struct feed_region, link);
        if (!oldest->given_back)
            break;
        list_del(&oldest->link);
        free(oldest);
    }
}
