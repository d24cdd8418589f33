/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a kind of memory provides to memory.c, which checks arguments, remembers lost devices and fills in
 * what is common. Every slot is filled. Handles are the kind's own: device (from open), stream, event, module
 * and function. Functions return 0 or -errno with e filled (never NULL here); -ENODEV says that the device is
 * lost for good. Destroying returns the same, for memory.c to remember.
 */
#ifndef LARDER_GPUDIRECT_MEMORY_KIND_H
#define LARDER_GPUDIRECT_MEMORY_KIND_H

#include "gpudirect/memory.h"

struct memory_ops {
    const char *name;
    void (*probe)(struct memory_probe *out);
    int (*describe)(int ordinal, struct memory_info *out, struct err *e);
    bool (*in_use)(void); /* has this process started the driver? Neither loads nor starts it */
    int (*where)(const void *p, struct memory_pointer *out, struct err *e);

    int (*open)(int ordinal, void **device, struct err *e);
    int (*close)(void *device, struct err *e);
    int (*check_range)(void *device, const void *p, size_t n, struct err *e);
    int (*alloc)(void *device, size_t bytes, void **out, struct err *e);
    int (*free)(void *device, void *p, struct err *e);
    int (*reg)(void *device, void *p, size_t bytes, struct err *e);
    int (*unreg)(void *device, void *p, struct err *e);
    size_t (*pitch_max)(void *device);

    int (*stream_create)(void *device, void **out, struct err *e);
    int (*stream_destroy)(void *device, void *stream, struct err *e);
    int (*stream_caller)(void *device, void *stream,
                         struct err *e); /* may events order this caller's stream? */
    int (*event_create)(void *device, void **out, struct err *e);
    int (*event_destroy)(void *device, void *event, struct err *e);
    int (*event_record)(void *device, void *event, void *stream, struct err *e);
    int (*event_query)(void *device, void *event, struct err *e); /* 1: happened, 0: not yet */
    int (*stream_after)(void *device, void *stream, void *event, struct err *e);

    /* A box that fits: rows > 1 or slices > 1 only where they cannot be folded away. */
    int (*copy)(void *device, void *stream, enum memory_direction d, const struct memory_box *b,
                struct err *e);

    int (*call)(void *device, int (*f)(void *arg, struct err *e), void *arg, struct err *e);

    int (*module_load)(void *device, const void *image, void **out, struct err *e);
    int (*module_unload)(void *device, void *module, struct err *e);
    int (*module_function)(void *device, void *module, const char *name, void **out, struct err *e);
    int (*launch)(void *device, void *stream, void *function, const struct memory_launch *l, void **arguments,
                  struct err *e);
};

extern const struct memory_ops memory_host_ops, memory_cuda_ops;

#endif
