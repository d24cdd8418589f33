/* SPDX-License-Identifier: Apache-2.0 */
#include "server/tenant/sched.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/cursor.h"
#include "format/limits.h"

/* Shares are measured over the last window's bytes: counters are halved whenever their sum passes twice this.
 */
#define WINDOW_BYTES (64ull << 20)
/* Virtual time is bytes scaled by this over weight, so that weights keep their resolution. */
#define VTIME_SCALE 1024u
/* A capped tenant may burst this long. */
#define BURST_MS 200u

enum item_state { ITEM_IDLE, ITEM_QUEUED, ITEM_ADMITTED };

/* What one tenant waits for in one class. */
struct flow {
    struct list items;
    struct list link; /* in the class's active flows while items is not empty */
    struct sched_tenant *tenant;
    uint64_t vtime;
};

struct sched_tenant {
    struct list link;
    char name[TENANT_NAME_BYTES_MAX + 1];
    uint32_t weight;
    uint64_t cap_bytes_s;
    int64_t tokens_milli; /* thousandths of a byte */
    uint64_t filled_at_ms;
    struct flow flows[SCHED_CLASSES];
};

struct class_state {
    struct list active; /* flows with waiting items */
    uint64_t vnow;      /* virtual start of the item admitted last */
    uint64_t recent_bytes;
    uint32_t floor_percent;
    struct sched_figures figures;
};

struct sched {
    uint64_t in_flight_bytes, in_flight_bytes_max;
    uint64_t recent_bytes;
    struct class_state classes[SCHED_CLASSES];
    struct list tenants;
};

const char *sched_class_name(enum sched_class c)
{
    static const char *const names[] = {"restore", "feed", "save", "scrub"};
    check(c < SCHED_CLASSES);
    return names[c];
}

int sched_create(const struct sched_options *o, struct sched **out)
{
    static const uint32_t defaults[SCHED_CLASSES] = {40, 25, 20, 5};
    uint32_t sum = 0;
    check(o->in_flight_bytes_max > 0);
    for (int c = 0; c < SCHED_CLASSES; c++)
        sum += o->floor_percent[c];
    check(sum <= 100);
    struct sched *s = calloc(1, sizeof *s);
    if (!s)
        return -ENOMEM;
    s->in_flight_bytes_max = o->in_flight_bytes_max;
    list_init(&s->tenants);
    for (int c = 0; c < SCHED_CLASSES; c++) {
        list_init(&s->classes[c].active);
        s->classes[c].floor_percent = sum ? o->floor_percent[c] : defaults[c];
    }
    *out = s;
    return 0;
}

void sched_destroy(struct sched *s)
{
    if (!s)
        return;
    check(s->in_flight_bytes == 0);
    for (int c = 0; c < SCHED_CLASSES; c++)
        check(list_empty(&s->classes[c].active));
    for (struct list *l; (l = list_pop(&s->tenants));)
        free(container_of(l, struct sched_tenant, link));
    free(s);
}

struct sched_tenant *sched_tenant(struct sched *s, const char *name)
{
    list_for_each (l, &s->tenants) {
        struct sched_tenant *t = container_of(l, struct sched_tenant, link);
        if (strcmp(t->name, name) == 0)
            return t;
    }
    check(strlen(name) <= TENANT_NAME_BYTES_MAX);
    struct sched_tenant *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    strcpy(t->name, name);
    t->weight = 1;
    for (int c = 0; c < SCHED_CLASSES; c++) {
        list_init(&t->flows[c].items);
        list_init(&t->flows[c].link);
        t->flows[c].tenant = t;
    }
    list_add_tail(&s->tenants, &t->link);
    return t;
}

static int64_t burst_milli(const struct sched_tenant *t)
{
    return (int64_t)(t->cap_bytes_s * BURST_MS);
}

void sched_tenant_set(struct sched_tenant *t, uint32_t weight, uint64_t cap_bytes_s)
{
    t->weight = weight ? weight : 1;
    if (cap_bytes_s >
        INT64_MAX / 1000000) /* more than any disk: as good as none, and keeps the sums in range */
        cap_bytes_s = 0;
    if (cap_bytes_s != t->cap_bytes_s) {
        t->cap_bytes_s = cap_bytes_s;
        t->tokens_milli = burst_milli(t);
    }
}

void sched_queue(struct sched *s, struct sched_item *item, enum sched_class c, struct sched_tenant *t,
                 uint64_t now_ms)
{
    check(item->state == ITEM_IDLE && c < SCHED_CLASSES && item->admit);
    struct class_state *class = &s->classes[c];
    struct flow *f = &t->flows[c];
    item->state = ITEM_QUEUED;
    item->class = c;
    item->tenant = t;
    item->queued_at_ms = now_ms;
    if (list_empty(&f->items)) {
        /* Who was away does not save up a claim for the time it did not ask. */
        if (f->vtime < class->vnow)
            f->vtime = class->vnow;
        list_add_tail(&class->active, &f->link);
    }
    list_add_tail(&f->items, &item->link);
    class->figures.queued++;
    class->figures.queued_bytes += item->bytes;
}

static void take_off(struct sched *s, struct sched_item *item)
{
    struct class_state *class = &s->classes[item->class];
    struct flow *f = &item->tenant->flows[item->class];
    list_del(&item->link);
    if (list_empty(&f->items))
        list_del(&f->link);
    class->figures.queued--;
    class->figures.queued_bytes -= item->bytes;
}

void sched_release(struct sched *s, struct sched_item *item)
{
    if (item->state == ITEM_QUEUED) {
        take_off(s, item);
    } else if (item->state == ITEM_ADMITTED) {
        check(s->in_flight_bytes >= item->bytes);
        s->in_flight_bytes -= item->bytes;
        s->classes[item->class].figures.in_flight_bytes -= item->bytes;
    }
    item->state = ITEM_IDLE;
}

bool sched_is_queued(const struct sched_item *item)
{
    return item->state == ITEM_QUEUED;
}

static void refill(struct sched_tenant *t, uint64_t now_ms)
{
    if (now_ms <= t->filled_at_ms)
        return;
    uint64_t passed_ms = now_ms - t->filled_at_ms;
    int64_t full = burst_milli(t), gain;
    t->filled_at_ms = now_ms;
    if (mul_overflows(passed_ms, t->cap_bytes_s, &gain) ||
        __builtin_add_overflow(t->tokens_milli, gain, &gain) || gain > full)
        gain = full;
    t->tokens_milli = gain;
}

/* May the tenant start something now? If not, *wake_ms is lowered to when it may. */
static bool within_cap(struct sched_tenant *t, uint64_t now_ms, uint64_t *wake_ms)
{
    if (t->cap_bytes_s == 0)
        return true;
    refill(t, now_ms);
    if (t->tokens_milli > 0)
        return true;
    uint64_t at = now_ms + (uint64_t)(-t->tokens_milli) / t->cap_bytes_s + 1;
    if (*wake_ms == 0 || at < *wake_ms)
        *wake_ms = at;
    return false;
}

/* The flow of a class that is next by weight, or NULL if none may go now. */
static struct flow *next_flow(struct class_state *class, uint64_t now_ms, uint64_t *wake_ms)
{
    struct flow *best = NULL;
    list_for_each (l, &class->active) {
        struct flow *f = container_of(l, struct flow, link);
        if (within_cap(f->tenant, now_ms, wake_ms) && (!best || f->vtime < best->vtime))
            best = f;
    }
    return best;
}

static bool below_floor(const struct sched *s, const struct class_state *class)
{
    return class->recent_bytes * 100 < class->floor_percent * s->recent_bytes;
}

static struct flow *choose(struct sched *s, uint64_t now_ms, uint64_t *wake_ms)
{
    struct flow *first = NULL;
    for (int c = 0; c < SCHED_CLASSES; c++) {
        struct class_state *class = &s->classes[c];
        struct flow *f = list_empty(&class->active) ? NULL : next_flow(class, now_ms, wake_ms);
        if (f && below_floor(s, class))
            return f;
        if (f && !first)
            first = f;
    }
    return first;
}

static void account(struct sched *s, struct sched_item *item, uint64_t now_ms)
{
    struct class_state *class = &s->classes[item->class];
    struct flow *f = &item->tenant->flows[item->class];
    class->vnow = f->vtime;
    f->vtime += item->bytes * VTIME_SCALE / item->tenant->weight + 1;
    class->recent_bytes += item->bytes;
    s->recent_bytes += item->bytes;
    if (s->recent_bytes > 2 * WINDOW_BYTES) {
        s->recent_bytes = 0;
        for (int c = 0; c < SCHED_CLASSES; c++)
            s->recent_bytes += s->classes[c].recent_bytes /= 2;
    }
    if (item->tenant->cap_bytes_s)
        item->tenant->tokens_milli -= (int64_t)item->bytes * 1000;
    s->in_flight_bytes += item->bytes;
    uint64_t waited_ms = now_ms > item->queued_at_ms ? now_ms - item->queued_at_ms : 0;
    class->figures.in_flight_bytes += item->bytes;
    class->figures.admitted++;
    class->figures.admitted_bytes += item->bytes;
    class->figures.waited_ms += waited_ms;
    if (waited_ms > class->figures.waited_ms_max)
        class->figures.waited_ms_max = waited_ms;
}

uint64_t sched_pump(struct sched *s, uint64_t now_ms)
{
    uint64_t wake_ms = 0;
    for (;;) {
        wake_ms = 0;
        struct flow *f = choose(s, now_ms, &wake_ms);
        if (!f)
            return wake_ms;
        struct sched_item *item = container_of(f->items.next, struct sched_item, link);
        /* The one whose turn it is waits for room; smaller ones do not overtake it, or it would starve. */
        if (s->in_flight_bytes > 0 && s->in_flight_bytes + item->bytes > s->in_flight_bytes_max)
            return 0;
        take_off(s, item);
        item->state = ITEM_ADMITTED;
        account(s, item, now_ms);
        item->admit(item);
    }
}

void sched_figures(const struct sched *s, enum sched_class c, struct sched_figures *out)
{
    *out = s->classes[c].figures;
}
