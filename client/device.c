/* SPDX-License-Identifier: Apache-2.0 */
#include "client/device.h"

#include <errno.h>
#include <stdlib.h>

#include "client/opened.h"

static int device_open(int ordinal, struct device **out, struct err *e)
{
    struct device *d = calloc(1, sizeof *d);
    if (!d)
        return err_set(e, ERR_NO_MEMORY, "no memory for a device");
    int rc = memory_open(MEMORY_CUDA, ordinal, &d->memory, e);
    if (rc == 0)
        rc = memory_stream_create(d->memory, &d->out, e);
    if (rc == 0)
        rc = memory_stream_create(d->memory, &d->in, e);
    if (rc < 0) {
        memory_stream_destroy(d->out);
        memory_close(d->memory);
        free(d);
        return rc;
    }
    pthread_mutex_init(&d->lock, NULL);
    *out = d;
    return 0;
}

/* With the client's lock of devices held. */
static int find_or_open(struct larder *c, int ordinal, struct device **out, struct err *e)
{
    for (struct device *d = c->devices; d; d = d->next) {
        if (memory_ordinal(d->memory) != ordinal)
            continue;
        *out = d;
        return memory_lost(d->memory, e);
    }
    int rc = device_open(ordinal, out, e);
    if (rc == 0) {
        (*out)->next = c->devices;
        c->devices = *out;
    }
    return rc;
}

int device_get(struct larder *c, int ordinal, struct device **out, struct err *e)
{
    pthread_mutex_lock(&c->device_lock);
    int rc = find_or_open(c, ordinal, out, e);
    pthread_mutex_unlock(&c->device_lock);
    return rc < 0 ? err_prepend(e, "device %d", ordinal) : 0;
}

int device_get_staged(struct larder *c, int ordinal, struct device **out, struct err *e)
{
    check(c->staging);
    pthread_mutex_lock(&c->device_lock);
    int rc = find_or_open(c, ordinal, out, e);
    if (rc == 0)
        rc = pool_register(c->staging, (*out)->memory, e);
    pthread_mutex_unlock(&c->device_lock);
    return rc < 0 ? err_prepend(e, "device %d", ordinal) : 0;
}

/* A device that is not well must not keep the host's memory from being saved: only what is known counts. */
int device_check(struct device *d, const uint8_t *low, const uint8_t *high, struct err *e)
{
    struct memory_pointer p;
    if (d)
        return memory_check(d->memory, low, (size_t)(high - low), e);
    if (memory_where(low, &p, NULL) < 0 || p.kind == MEMORY_HOST || p.managed)
        return 0;
    return err_set(e, ERR_INVALID,
                   "it lies on CUDA device %d, not in host memory; say so in the `memory` of a tensor",
                   p.ordinal);
}

/* So that it is not lost, but kept. */
static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER;
static struct kept {
    struct kept *next;
    struct pool *pool;
    void *needs;
} * kept;

void device_keep(struct pool *p, void *needs)
{
    struct kept *k = malloc(sizeof *k);
    if (!k)
        return;
    pthread_mutex_lock(&kept_lock);
    *k = (struct kept){.next = kept, .pool = p, .needs = needs};
    kept = k;
    pthread_mutex_unlock(&kept_lock);
}

void devices_close(struct larder *c)
{
    struct device *next;
    for (struct device *d = c->devices; d; d = next) {
        next = d->next;
        packer_end(&d->packer_out, d->memory);
        packer_end(&d->packer_in, d->memory);
        memory_stream_destroy(d->out);
        memory_stream_destroy(d->in);
        memory_close(d->memory);
        pthread_mutex_destroy(&d->lock);
        free(d);
    }
    c->devices = NULL;
}
