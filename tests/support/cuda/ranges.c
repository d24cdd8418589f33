/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory, mapped twice: where the handle points, no processor may go; and registered host memory. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/support/cuda/state.h"

#define PAGE 4096u

static size_t device_bytes(int ordinal)
{
    size_t n = 0;
    for (struct range *r = world.ranges; r; r = r->next)
        if (r->kind == RANGE_DEVICE && r->ordinal == ordinal)
            n += r->bytes;
    return n;
}

static void link_range(struct range *r)
{
    r->next = world.ranges;
    world.ranges = r;
    if (r->kind == RANGE_DEVICE) {
        world.counts.allocations++;
        world.counts.allocated_bytes += r->bytes;
    } else {
        world.counts.registrations++;
        world.counts.registered_bytes += r->bytes;
    }
}

cu_result range_add_device(cu_context c, size_t bytes, struct range **out)
{
    if (bytes == 0)
        return CU_INVALID_VALUE;
    if (bytes > world.set.memory || device_bytes(c->ordinal) > world.set.memory - bytes)
        return CU_OUT_OF_MEMORY;
    struct range *r = calloc(1, sizeof *r);
    r->kind = RANGE_DEVICE;
    r->context = c;
    r->ordinal = c->ordinal;
    r->bytes = bytes;
    r->mapped = (bytes + PAGE - 1) / PAGE * PAGE;
    int fd = memfd_create("device memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)r->mapped) < 0)
        broken("no memory for its device memory");
    /* a page between allocations, so that running over an end hits nothing */
    r->base = mmap(NULL, r->mapped + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    r->peek = mmap(NULL, r->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int open = world.kernels_running > 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
    if (r->base == MAP_FAILED || r->peek == MAP_FAILED ||
        mmap(r->base, r->mapped, open, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        broken("no memory for its device memory");
    close(fd);
    memset(r->peek, 0xa5, r->mapped); /* what nobody wrote is not zero */
    link_range(r);
    *out = r;
    return CU_OK;
}

static bool meet(const struct range *r, const uint8_t *p, size_t bytes)
{
    return p < r->base + r->bytes && r->base < p + bytes;
}

cu_result range_add_host(cu_context c, void *p, size_t bytes)
{
    if (!p || bytes == 0)
        return CU_INVALID_VALUE;
    for (struct range *r = world.ranges; r; r = r->next)
        if (meet(r, p, bytes))
            return r->kind == RANGE_HOST ? CU_HOST_MEMORY_ALREADY_REGISTERED : CU_INVALID_VALUE;
    if (bytes > world.set.register_max || bytes > world.set.register_total ||
        world.counts.registered_bytes > world.set.register_total - bytes)
        return CU_OUT_OF_MEMORY;
    struct range *r = calloc(1, sizeof *r);
    r->kind = RANGE_HOST;
    r->context = c;
    r->ordinal = c->ordinal;
    r->base = r->peek = p;
    r->bytes = bytes;
    link_range(r);
    return CU_OK;
}

struct range *range_of(const void *p)
{
    for (struct range *r = world.ranges; r; r = r->next)
        if ((const uint8_t *)p >= r->base && (const uint8_t *)p < r->base + r->bytes)
            return r;
    return NULL;
}

static void unlink_range(struct range *gone)
{
    struct range **at = &world.ranges;
    while (*at != gone)
        at = &(*at)->next;
    *at = gone->next;
    if (gone->kind == RANGE_DEVICE) {
        world.counts.allocations--;
        world.counts.allocated_bytes -= gone->bytes;
        munmap(gone->base, gone->mapped + PAGE);
        munmap(gone->peek, gone->mapped);
    } else {
        world.counts.registrations--;
        world.counts.registered_bytes -= gone->bytes;
    }
    free(gone);
}

cu_result range_remove(void *p, enum range_kind kind)
{
    struct range *r = range_of(p);
    if (!r || r->kind != kind || r->base != (uint8_t *)p)
        return kind == RANGE_HOST ? CU_HOST_MEMORY_NOT_REGISTERED : CU_INVALID_VALUE;
    if (kind == RANGE_HOST && r->users > 0)
        broken("host memory is unregistered while a copy uses it");
    /* as the real one: freeing waits for what uses it */
    while (r->users > 0 || (kind == RANGE_DEVICE && r->context && r->context->kernels_waiting > 0))
        pthread_cond_wait(&world.changed, &world.lock);
    unlink_range(r);
    return CU_OK;
}

void ranges_open(bool open)
{
    for (struct range *r = world.ranges; r; r = r->next)
        if (r->kind == RANGE_DEVICE &&
            mprotect(r->base, r->mapped, open ? PROT_READ | PROT_WRITE : PROT_NONE) < 0)
            broken("mprotect of its device memory");
}

void ranges_end(cu_context c)
{
    for (struct range *r = world.ranges, *next; r; r = next) {
        next = r->next;
        if (r->context != c)
            continue;
        world.counts.lost_handles++;
        unlink_range(r);
    }
}

cu_result range_side(cu_context c, enum range_kind kind, const void *p, size_t extent, struct range **range)
{
    struct range *r = range_of(p);
    *range = NULL;
    if (!r) {
        if (kind == RANGE_DEVICE)
            return CU_INVALID_VALUE;
        for (r = world.ranges; r; r = r->next) /* plain where it begins, known where it ends */
            if (meet(r, p, extent))
                return CU_INVALID_VALUE;
        return CU_OK;
    }
    if (r->kind != kind || (const uint8_t *)p + extent > r->base + r->bytes)
        return CU_INVALID_VALUE;
    if (kind == RANGE_DEVICE && (r->ordinal != c->ordinal || (r->context && r->context != c)))
        return CU_INVALID_VALUE;
    *range = r;
    return CU_OK;
}
