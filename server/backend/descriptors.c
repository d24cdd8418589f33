/* SPDX-License-Identifier: Apache-2.0 */
#include "server/backend/descriptors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/hash.h"

struct descriptor {
    struct io_op io;
    struct descriptors *owner;
    struct list in_bucket; /* empty once forgotten */
    struct list in_idle;
    int fd; /* -1: being opened */
    unsigned users;
    bool direct;
    uint64_t used_ms;
    struct backend_op *first, **end; /* wait for the open */
    const char *path;                /* of the first who waits */
    char name[BACKEND_NAME_BYTES_MAX + 1];
};

/* op->priv of those who wait. */
struct waiter {
    descriptor_got *got;
} __attribute__((may_alias));

static struct list *bucket_of(struct descriptors *d, const char *name)
{
    return &d->buckets[hash64(name, strlen(name)) % DESCRIPTORS_BUCKETS];
}

static void closed(struct io_op *io)
{
    struct descriptor *e = container_of(io, struct descriptor, io);
    struct descriptors *d = e->owner;
    free(e);
    d->closing--;
    if (d->emptied && d->closing == 0 && d->count == 0)
        d->emptied(d);
}

static void close_one(struct descriptors *d, struct descriptor *e)
{
    list_del(&e->in_bucket);
    list_del(&e->in_idle);
    d->count--;
    d->closing++;
    e->io.done = closed;
    loop_close(d->loop, &e->io, e->fd);
}

static void timer_fires(struct loop_timer *t)
{
    struct descriptors *d = container_of(t, struct descriptors, timer);
    uint64_t now = loop_now_ms(d->loop);
    while (!list_empty(&d->idle)) {
        struct descriptor *e = container_of(d->idle.next, struct descriptor, in_idle);
        if (e->used_ms + DESCRIPTORS_IDLE_MS > now) {
            loop_timer_set(d->loop, t, e->used_ms + DESCRIPTORS_IDLE_MS);
            return;
        }
        close_one(d, e);
    }
}

void descriptors_init(struct descriptors *d, struct loop *l)
{
    *d = (struct descriptors){.loop = l, .timer.fire = timer_fires};
    list_init(&d->idle);
    for (unsigned i = 0; i < DESCRIPTORS_BUCKETS; i++)
        list_init(&d->buckets[i]);
}

static void take(struct descriptor *e)
{
    e->users++;
    list_del(&e->in_idle);
}

static void opened(struct io_op *io)
{
    struct descriptor *e = container_of(io, struct descriptor, io);
    struct descriptors *d = e->owner;
    if (io->result == -EINVAL && e->direct && !d->no_direct) {
        d->no_direct = true;
        loop_open(d->loop, io, e->path, O_RDONLY, 0);
        return;
    }
    int status = io->result < 0 ? (int)io->result : 0;
    struct backend_op *op = e->first, *next;
    if (status == 0)
        e->fd = (int)io->result;
    for (struct backend_op *o = op; status == 0 && o; o = o->next)
        e->users++; /* before the first callback, which may put e */
    if (status) {
        list_del(&e->in_bucket);
        d->count--;
        free(e);
        e = NULL;
    } else {
        e->first = NULL;
    }
    for (; op; op = next) {
        next = op->next;
        op->next = NULL;
        ((struct waiter *)op->priv)->got(op, e, status);
    }
}

static struct descriptor *find(struct descriptors *d, const char *name, bool direct)
{
    struct list *bucket = bucket_of(d, name);
    list_for_each (it, bucket) {
        struct descriptor *e = container_of(it, struct descriptor, in_bucket);
        if (e->direct == direct && strcmp(e->name, name) == 0)
            return e;
    }
    return NULL;
}

static struct descriptor *open_one(struct descriptors *d, const char *name, const char *path, bool direct)
{
    struct descriptor *e = calloc(1, sizeof *e);
    if (!e)
        return NULL;
    if (d->count >= DESCRIPTORS_MAX && !list_empty(&d->idle))
        close_one(d, container_of(d->idle.next, struct descriptor, in_idle));
    e->owner = d;
    e->fd = -1;
    e->direct = direct;
    e->end = &e->first;
    e->path = path;
    strcpy(e->name, name);
    list_init(&e->in_idle);
    list_add_tail(bucket_of(d, name), &e->in_bucket);
    d->count++;
    e->io.done = opened;
    loop_open(d->loop, &e->io, path, O_RDONLY | (direct && !d->no_direct ? O_DIRECT : 0), 0);
    return e;
}

void descriptors_get(struct descriptors *d, struct backend_op *op, const char *name, const char *path,
                     bool direct, descriptor_got *got)
{
    struct descriptor *e = find(d, name, direct);
    if (e && e->fd >= 0) {
        take(e);
        got(op, e, 0);
        return;
    }
    if (!e)
        e = open_one(d, name, path, direct);
    if (!e) {
        got(op, NULL, -ENOMEM);
        return;
    }
    ((struct waiter *)op->priv)->got = got;
    op->next = NULL;
    *e->end = op;
    e->end = &op->next;
}

int descriptor_fd(const struct descriptor *e)
{
    return e->fd;
}

void descriptors_put(struct descriptors *d, struct descriptor *e)
{
    check(e->users > 0);
    if (--e->users)
        return;
    if (list_empty(&e->in_bucket)) { /* forgotten meanwhile */
        close_one(d, e);
        return;
    }
    e->used_ms = loop_now_ms(d->loop);
    list_add_tail(&d->idle, &e->in_idle);
    if (!d->timer.at_ms)
        loop_timer_set(d->loop, &d->timer, e->used_ms + DESCRIPTORS_IDLE_MS);
    if (d->count > DESCRIPTORS_MAX)
        close_one(d, container_of(d->idle.next, struct descriptor, in_idle));
}

void descriptors_forget(struct descriptors *d, const char *name)
{
    for (int direct = 0; direct < 2; direct++) {
        struct descriptor *e = find(d, name, direct);
        if (!e)
            continue;
        if (e->users == 0 && e->fd >= 0)
            close_one(d, e);
        else
            list_del(&e->in_bucket); /* closed by the last user; one being opened has users soon */
    }
}

void descriptors_close(struct descriptors *d, void (*emptied)(struct descriptors *d))
{
    loop_timer_clear(d->loop, &d->timer);
    d->emptied = emptied;
    while (!list_empty(&d->idle))
        close_one(d, container_of(d->idle.next, struct descriptor, in_idle));
    if (d->count == 0 && d->closing == 0)
        emptied(d);
}
