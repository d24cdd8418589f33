/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where tensors may live, behind one small table: host memory, always; CUDA devices, where a driver is found.
 * What is asked of a kind is the same for all, so that everything above runs, and is tested, without a
 * device.
 *
 *   struct memory          a device that was opened; host memory counts as one device, number 0
 *   struct memory_stream   copies and kernels given to one stream run in order, and later than the call
 *   struct memory_event    a point in a stream: is all that was given before it done?
 *
 * Streams are our own: non-blocking, of the highest priority. A caller's stream is a raw handle (a CUstream;
 * NULL is the default stream) and is never waited for by a thread: events order it before or after ours. On
 * host memory every call is done when it returns, every event has happened, and callers' streams mean
 * nothing.
 *
 * Threads: every function from any thread, at any time; one stream or one event by one thread at a time. The
 * calling thread's current context is the same after a call as before it, and work that another thread is
 * capturing into a graph is not disturbed.
 *
 * A lost device: errors that end a context (an illegal access by any kernel in it, a memory fault, a device
 * that is gone) are remembered with what was being done when they appeared. From then on every call on that
 * device fails at once with that first cause: ERR_IO, errno ENODEV. Only closing goes on working. The context
 * is the process's primary one, shared with everyone else in it, and is never reset.
 *
 * Errors name the call, CUDA's own word for the failure, and what to do. e may be NULL.
 */
#ifndef LARDER_GPUDIRECT_MEMORY_H
#define LARDER_GPUDIRECT_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/base/err.h"

enum memory_kind { MEMORY_HOST = 0, MEMORY_CUDA = 1, MEMORY_KIND_COUNT };

struct memory;
struct memory_stream;
struct memory_event;
struct memory_module;

const char *memory_kind_name(enum memory_kind kind); /* "host", "CUDA"; never NULL */

/* ---- what there is; nothing is created on any device ---- */

struct memory_probe {
    bool usable;
    int devices;               /* 0 where not usable */
    int driver_version;        /* 12040 for 12.4; 0 where unknown or where there is none */
    char note[ERR_TEXT_BYTES]; /* "CUDA 12.4, 2 devices", or why it cannot be used and what to do */
};

struct memory_info {
    char name[96];
    char bus[16];     /* PCI address, "0000:1b:00.0"; empty where there is none */
    uint64_t bytes;   /* of device memory */
    int numa_node;    /* of the host's memory nearest to it; -1: unknown */
    int major, minor; /* compute capability */
};

/* Looks for the driver once per process; later calls are cheap. */
void memory_probe(enum memory_kind kind, struct memory_probe *out);
/* ERR_UNSUPPORTED with the probe's note; ERR_NOT_FOUND for a number that no device has. */
must_check int memory_describe(enum memory_kind kind, int ordinal, struct memory_info *out, struct err *e);

struct memory_pointer {
    enum memory_kind kind;
    int ordinal;     /* the device that it lies on; for registered host memory any that knows it; else 0 */
    bool registered; /* host memory that is pinned for CUDA (or its allocations): copies can run by themselves
                      */
    bool managed;    /* moves between host and device by itself; counts as of its device */
};

/* What a pointer points to, as the driver knows it. Memory that the driver does not know is plain host
 * memory; that includes pointers to nowhere. Starts no driver: where nobody did, there is no other memory. */
must_check int memory_where(const void *p, struct memory_pointer *out, struct err *e);

/* ---- devices ---- */

/* Retains the device's primary context. Several devices, and one device several times, may be open at once.
 * ERR_UNSUPPORTED with the probe's note; ERR_NOT_FOUND; ERR_NO_MEMORY. */
must_check int memory_open(enum memory_kind kind, int ordinal, struct memory **out, struct err *e);
/* Its streams, events, modules and allocations must be gone. NULL allowed. */
void memory_close(struct memory *m);
enum memory_kind memory_kind(const struct memory *m);
int memory_ordinal(const struct memory *m);
const struct memory_info *memory_info(const struct memory *m);
/* 0, or the first cause with which this device was lost. */
must_check int memory_lost(struct memory *m, struct err *e);

/* Is all of [p, p + n) memory of this very device and context? ERR_INVALID says what it is instead: plain or
 * registered host memory, another device's, another context's, the end of an allocation. n > 0. For host
 * memory: not a device's. */
must_check int memory_check(struct memory *m, const void *p, size_t n, struct err *e);

/* Device memory, aligned to 256 bytes at least; bytes > 0. ERR_NO_MEMORY says how much is free. */
must_check int memory_alloc(struct memory *m, size_t bytes, void **out, struct err *e);
/* Nothing may be using it any more. NULL allowed. */
void memory_free(struct memory *m, void *p);

/* Pins host memory for all devices, so that copies run by themselves, at full speed. bytes > 0; no part of it
 * may be registered already (ERR_EXISTS). ERR_NO_MEMORY: refused. Unregister with the same address before it
 * is freed, when no copy uses it. On host memory both do nothing. */
must_check int memory_register(struct memory *m, void *p, size_t bytes, struct err *e);
void memory_unregister(struct memory *m, void *p);

/* ---- streams and events ---- */

must_check int memory_stream_create(struct memory *m, struct memory_stream **out, struct err *e);
/* What was given to it goes on; wait first where its memory is to be freed. NULL allowed. */
void memory_stream_destroy(struct memory_stream *s);
struct memory *memory_stream_memory(const struct memory_stream *s);
void *memory_stream_handle(const struct memory_stream *s); /* a CUstream; NULL for host memory */

/* An event that was never recorded counts as happened. */
must_check int memory_event_create(struct memory *m, struct memory_event **out, struct err *e);
void memory_event_destroy(struct memory_event *v);       /* at any time; NULL allowed */
void *memory_event_handle(const struct memory_event *v); /* a CUevent, for callers; NULL for host memory */

/* The event now stands for all that was given to the stream so far. Same device. */
must_check int memory_event_record(struct memory_event *v, struct memory_stream *s, struct err *e);
/* 1: happened, 0: not yet; or an error of anything that ran in the context since. */
must_check int memory_event_query(struct memory_event *v, struct err *e);
/* Waits until it has happened; ERR_TIMEOUT after timeout_ms. Sleeps between looks. */
must_check int memory_event_wait(struct memory_event *v, unsigned timeout_ms, struct err *e);
/* Record and wait, with an event of the stream's own. */
must_check int memory_stream_wait(struct memory_stream *s, unsigned timeout_ms, struct err *e);

/* What is given to s from now on runs after v (of any device of the kind) has happened. */
must_check int memory_stream_after(struct memory_stream *s, struct memory_event *v, struct err *e);
/* What is given to s from now on runs after all that the caller has given to its stream so far. ERR_INVALID:
 * a stream of another device or context, or one that is capturing a graph. */
must_check int memory_stream_after_caller(struct memory_stream *s, void *caller_stream, struct err *e);
/* What the caller gives to its stream from now on runs after v has happened. ERR_INVALID likewise. */
must_check int memory_caller_after(void *caller_stream, struct memory_event *v, struct err *e);

/* ---- copies ---- */

enum memory_direction {
    MEMORY_OUT,    /* device to host */
    MEMORY_IN,     /* host to device */
    MEMORY_WITHIN, /* device to the same device */
};

/*
 * rows of row_bytes dense bytes in slices, each side with its own pitches, in bytes:
 *
 *   row r of slice s   to + s * to_slice + r * to_pitch     from + s * from_slice + r * from_pitch
 *
 * row_bytes, rows and slices are at least 1. A pitch matters only where there is more than one row, or slice.
 */
struct memory_box {
    void *to;
    const void *from;
    size_t row_bytes, rows, slices;
    size_t to_pitch, to_slice, from_pitch, from_slice;
};

/* Can one copy do it? Pitches must be no shorter than what they step over, not longer than the device allows,
 * and with several rows in several slices, a slice must be a whole number of rows. Other boxes (negative,
 * zero or crossing strides never fit a memory_box) are for several copies, or for a kernel. */
bool memory_box_fits(const struct memory *m, const struct memory_box *b);
/* ERR_INVALID for a box that does not fit. The host's side should be registered: of other memory the call
 * itself may copy, slowly, before it returns. Device pointers are taken as checked (memory_check). */
must_check int memory_copy_box(struct memory_stream *s, enum memory_direction d, const struct memory_box *b,
                               struct err *e);
/* n > 0 dense bytes. */
must_check int memory_copy(struct memory_stream *s, enum memory_direction d, void *to, const void *from,
                           size_t n, struct err *e);

/* ---- other libraries ---- */

/* Runs f on this thread with the device's context current, for libraries that look there for it. Returns what
 * f returned, or a failure to make it so. f does not call memory_* of this device. Not once the device is
 * lost. On host memory: f is called. */
must_check int memory_call(struct memory *m, int (*f)(void *arg, struct err *e), void *arg, struct err *e);

/* ---- kernels ---- */

struct memory_launch {
    unsigned grid[3], block[3];
    unsigned shared_bytes;
};

/* image: a cubin, fatbin or zero-terminated PTX; read during the call only. ERR_UNSUPPORTED on host memory
 * and for an image that this device or driver cannot run. */
must_check int memory_module_load(struct memory *m, const void *image, struct memory_module **out,
                                  struct err *e);
void memory_module_unload(struct memory_module *x); /* when none of its kernels runs; NULL allowed */
/* *out lives as long as the module. ERR_NOT_FOUND. */
must_check int memory_module_function(struct memory_module *x, const char *name, void **out, struct err *e);
/* arguments[i] points to the i-th argument; read during the call only. */
must_check int memory_launch(struct memory_stream *s, void *function, const struct memory_launch *l,
                             void **arguments, struct err *e);

#endif
