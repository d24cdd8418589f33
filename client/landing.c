/* SPDX-License-Identifier: Apache-2.0 */
#include "client/landing.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "client/clock.h"
#include "client/opened.h"
#include "client/transfer.h"

#define FLYING_SLOTS 4u /* beside one for each thread: 16 MiB on their way keep any bus busy */

struct slot {
    struct list link; /* of `ready` or `flying`; none: a thread has it */
    uint8_t *memory;
    bool *touched;                /* by device: copies were given since the slot was taken */
    struct memory_event **events; /* by device, behind them */
};

struct landing {
    struct larder *client;
    struct device *const *devices;
    unsigned device_count, slot_count;
    struct pool *pool;
    struct slot *slots;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct list ready, flying; /* flying: in the order of landing_sent */
    struct err first;          /* failure of a copy */
    atomic_bool stuck;         /* a device may still read from a slot */
};

static struct slot *slot_of(struct landing *l, const uint8_t *memory)
{
    for (unsigned i = 0; i < l->slot_count; i++)
        if (memory >= l->slots[i].memory && memory < l->slots[i].memory + CHUNK_PLAIN_BYTES_MAX)
            return &l->slots[i];
    check(!"memory of a slot");
    return NULL;
}

/* With the lock held. */
static void note(struct landing *l, const struct err *e)
{
    if (l->first.class == ERR_NONE)
        l->first = *e;
}

/* Without the lock; the slot is on no list. */
static int wait_slot(struct landing *l, struct slot *s, unsigned timeout_ms, struct err *e)
{
    int rc = 0;
    for (unsigned i = 0; i < l->device_count; i++) {
        struct err own;
        if (!s->touched[i])
            continue;
        int one = memory_event_wait(s->events[i], timeout_ms, &own);
        if (one < 0 && (one == -ETIMEDOUT || memory_event_wait(s->events[i], timeout_ms, NULL) < 0) &&
            memory_lost(l->devices[i]->memory, NULL) == 0)
            atomic_store(&l->stuck, true);
        if (one < 0 && rc == 0) {
            err_prepend(&own, "copying to device %d", memory_ordinal(l->devices[i]->memory));
            *e = own;
            rc = one;
        }
        s->touched[i] = false;
    }
    return rc;
}

int landing_room(struct landing *l, uint8_t **slot, struct err *e)
{
    unsigned bound = client_options(l->client)->request_timeout_ms;
    struct list *it = NULL;
    bool flies = false;
    pthread_mutex_lock(&l->lock);
    while (!(it = list_pop(&l->ready)) && !(flies = (it = list_pop(&l->flying)) != NULL))
        pthread_cond_wait(&l->changed, &l->lock); /* other threads have all: they end */
    int rc = l->first.class == ERR_NONE ? 0 : -l->first.errnum;
    if (rc < 0)
        *e = l->first;
    pthread_mutex_unlock(&l->lock);
    struct slot *s = container_of(it, struct slot, link);
    struct err second;
    int waited = flies ? wait_slot(l, s, bound, rc < 0 ? &second : e) : 0;
    rc = rc < 0 ? rc : waited;
    if (rc == 0) {
        *slot = s->memory;
        return 0;
    }
    pthread_mutex_lock(&l->lock);
    note(l, e);
    list_add_tail(&l->ready, &s->link);
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    return rc;
}

int landing_copy(struct landing *l, struct device *d, const struct box_copy *b, uint64_t offset, size_t n,
                 uint8_t *packed, struct err *e)
{
    struct slot *s = slot_of(l, packed);
    unsigned i = 0;
    while (l->devices[i] != d)
        check(++i < l->device_count);
    s->touched[i] = true; /* also of those that were given before one that failed */
    pthread_mutex_lock(&d->lock);
    int rc = transfer(d->in, &d->packer_in, MEMORY_IN, b, offset, n, packed, e);
    pthread_mutex_unlock(&d->lock);
    return rc < 0 ? err_prepend(e, "copying to device %d", memory_ordinal(d->memory)) : 0;
}

void landing_sent(struct landing *l, uint8_t *slot)
{
    struct slot *s = slot_of(l, slot);
    bool any = false;
    for (unsigned i = 0; i < l->device_count; i++) {
        struct err e;
        if (!s->touched[i])
            continue;
        any = true;
        pthread_mutex_lock(&l->devices[i]->lock);
        int rc = memory_event_record(s->events[i], l->devices[i]->in, &e);
        pthread_mutex_unlock(&l->devices[i]->lock);
        if (rc == 0)
            continue;
        err_prepend(&e, "copying to device %d", memory_ordinal(l->devices[i]->memory));
        pthread_mutex_lock(&l->devices[i]->lock);
        s->touched[i] = memory_event_record(s->events[i], l->devices[i]->in, NULL) == 0;
        pthread_mutex_unlock(&l->devices[i]->lock);
        pthread_mutex_lock(&l->lock);
        if (!s->touched[i] && memory_lost(l->devices[i]->memory, NULL) == 0)
            atomic_store(&l->stuck, true);
        note(l, &e);
        pthread_mutex_unlock(&l->lock);
    }
    pthread_mutex_lock(&l->lock);
    list_add_tail(any ? &l->flying : &l->ready, &s->link);
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
}

int landing_wait(struct landing *l, unsigned timeout_ms, struct err *e)
{
    uint64_t until = clock_ms() + timeout_ms;
    pthread_mutex_lock(&l->lock);
    for (struct list *it; (it = list_pop(&l->flying)) != NULL;) {
        struct slot *s = container_of(it, struct slot, link);
        uint64_t now = clock_ms();
        struct err own;
        if (wait_slot(l, s, now < until ? (unsigned)(until - now) : 0, &own) < 0)
            note(l, &own);
        list_add_tail(&l->ready, &s->link);
    }
    int rc = l->first.class == ERR_NONE ? 0 : -l->first.errnum;
    if (rc < 0)
        *e = l->first;
    pthread_mutex_unlock(&l->lock);
    return rc;
}

static int make_slot(struct landing *l, struct slot *s, struct err *e)
{
    list_init(&s->link);
    s->memory = pool_take(l->pool);
    s->touched = calloc(l->device_count, sizeof *s->touched);
    s->events = calloc(l->device_count, sizeof(struct memory_event *));
    if (!s->touched || !s->events)
        return err_set(e, ERR_NO_MEMORY, "no memory for restoring to devices");
    int rc = 0;
    for (unsigned i = 0; rc == 0 && i < l->device_count; i++)
        rc = memory_event_create(l->devices[i]->memory, &s->events[i], e);
    if (rc == 0)
        list_add_tail(&l->ready, &s->link);
    return rc;
}

int landing_create(struct larder *c, struct device *const *devices, unsigned device_count, unsigned threads,
                   struct landing **out, struct err *e)
{
    struct landing *l = calloc(1, sizeof *l);
    if (!l)
        return err_set(e, ERR_NO_MEMORY, "no memory for restoring to devices");
    unsigned slots = threads + FLYING_SLOTS;
    l->client = c;
    l->devices = devices;
    l->device_count = device_count;
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->changed, NULL);
    list_init(&l->ready);
    list_init(&l->flying);
    int rc = pool_create((uint64_t)slots * CHUNK_PLAIN_BYTES_MAX, CHUNK_PLAIN_BYTES_MAX, &l->pool, e);
    if (rc == 0)
        rc = pool_register(l->pool, devices[0]->memory, e);
    l->slots = rc == 0 ? calloc(slots, sizeof *l->slots) : NULL;
    if (rc == 0 && !l->slots)
        rc = err_set(e, ERR_NO_MEMORY, "no memory for restoring to devices");
    while (rc == 0 && l->slot_count < slots)
        rc = make_slot(l, &l->slots[l->slot_count++], e);
    if (rc < 0) {
        landing_free(l);
        return err_prepend(e, "pinned memory for restoring");
    }
    *out = l;
    return 0;
}

void landing_free(struct landing *l)
{
    if (!l)
        return;
    for (unsigned i = 0; i < l->slot_count; i++) {
        struct slot *s = &l->slots[i];
        for (unsigned k = 0; s->events && k < l->device_count; k++)
            memory_event_destroy(s->events[k]);
        if (!l->stuck && s->memory)
            pool_give(l->pool, s->memory);
        free(s->events);
        free(s->touched);
    }
    if (l->stuck) {
        device_keep(l->pool, NULL);
        l->client->staging_lost = true; /* the devices stay, too */
    } else {
        pool_destroy(l->pool);
    }
    free(l->slots);
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->lock);
    free(l);
}
