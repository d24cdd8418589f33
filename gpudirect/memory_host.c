/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory as a kind: whatever is asked is done before the call returns, so streams and events are
 * nothing. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpudirect/memory_kind.h"

#define ALIGN_BYTES 4096u

static void probe(struct memory_probe *out)
{
    *out = (struct memory_probe){.usable = true, .devices = 1, .note = "host memory"};
}

static int describe(int ordinal, struct memory_info *out, struct err *e)
{
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    (void)ordinal;
    (void)e;
    *out = (struct memory_info){.name = "host memory", .numa_node = -1};
    out->bytes = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : 0;
    return 0;
}

static int where(const void *p, struct memory_pointer *out, struct err *e)
{
    (void)p;
    (void)e;
    *out = (struct memory_pointer){.kind = MEMORY_HOST};
    return 0;
}

static int open_device(int ordinal, void **device, struct err *e)
{
    (void)ordinal;
    (void)e;
    *device = NULL;
    return 0;
}

static int close_device(void *device, struct err *e)
{
    (void)device;
    (void)e;
    return 0;
}

static int check_range(void *device, const void *p, size_t n, struct err *e)
{
    struct memory_pointer x;
    (void)device;
    (void)n;
    int rc = memory_where(p, &x, e);
    if (rc < 0 || x.kind == MEMORY_HOST)
        return rc;
    return err_set(e, ERR_INVALID, "%p is memory of %s device %d; expected host memory", p,
                   memory_kind_name(x.kind), x.ordinal);
}

static int alloc(void *device, size_t bytes, void **out, struct err *e)
{
    (void)device;
    if (posix_memalign(out, ALIGN_BYTES, bytes) != 0)
        return err_set(e, ERR_NO_MEMORY, "cannot take %zu bytes of host memory", bytes);
    return 0;
}

static int free_memory(void *device, void *p, struct err *e)
{
    (void)device;
    (void)e;
    free(p);
    return 0;
}

static int reg(void *device, void *p, size_t bytes, struct err *e)
{
    (void)device;
    (void)p;
    (void)bytes;
    (void)e;
    return 0;
}

static int unreg(void *device, void *p, struct err *e)
{
    (void)device;
    (void)p;
    (void)e;
    return 0;
}

static size_t pitch_max(void *device)
{
    (void)device;
    return SIZE_MAX;
}

static int create(void *device, void **out, struct err *e)
{
    (void)device;
    (void)e;
    *out = NULL;
    return 0;
}

/* Destroying a stream or an event, and looking at a caller's stream. */
static int nothing(void *device, void *handle, struct err *e)
{
    (void)device;
    (void)handle;
    (void)e;
    return 0;
}

static int happened(void *device, void *event, struct err *e)
{
    (void)device;
    (void)event;
    (void)e;
    return 1;
}

/* Of a stream and an event, in either order. */
static int order(void *device, void *first, void *second, struct err *e)
{
    (void)device;
    (void)first;
    (void)second;
    (void)e;
    return 0;
}

static int copy(void *device, void *stream, enum memory_direction d, const struct memory_box *b,
                struct err *e)
{
    (void)device;
    (void)stream;
    (void)d;
    (void)e;
    for (size_t s = 0; s < b->slices; s++)
        for (size_t r = 0; r < b->rows; r++)
            memcpy((uint8_t *)b->to + s * b->to_slice + r * b->to_pitch,
                   (const uint8_t *)b->from + s * b->from_slice + r * b->from_pitch, b->row_bytes);
    return 0;
}

static int call(void *device, int (*f)(void *arg, struct err *e), void *arg, struct err *e)
{
    (void)device;
    return f(arg, e);
}

static int no_kernels(struct err *e)
{
    return err_set(e, ERR_UNSUPPORTED, "kernels run on devices; host memory has none");
}

static int module_load(void *device, const void *image, void **out, struct err *e)
{
    (void)device;
    (void)image;
    (void)out;
    return no_kernels(e);
}

static int module_function(void *device, void *module, const char *name, void **out, struct err *e)
{
    (void)device;
    (void)module;
    (void)name;
    (void)out;
    return no_kernels(e);
}

static int launch(void *device, void *stream, void *function, const struct memory_launch *l, void **arguments,
                  struct err *e)
{
    (void)device;
    (void)stream;
    (void)function;
    (void)l;
    (void)arguments;
    return no_kernels(e);
}

const struct memory_ops memory_host_ops = {
    .name = "host",
    .probe = probe,
    .describe = describe,
    .where = where,
    .open = open_device,
    .close = close_device,
    .check_range = check_range,
    .alloc = alloc,
    .free = free_memory,
    .reg = reg,
    .unreg = unreg,
    .pitch_max = pitch_max,
    .stream_create = create,
    .stream_destroy = nothing,
    .stream_caller = nothing,
    .event_create = create,
    .event_destroy = nothing,
    .event_record = order,
    .event_query = happened,
    .stream_after = order,
    .copy = copy,
    .call = call,
    .module_load = module_load,
    .module_unload = nothing,
    .module_function = module_function,
    .launch = launch,
};
