/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A libcuda.so.1 for tests: every call of gpudirect/cuda.h on host memory, with threads of its own.
 *
 * What it does as a device does: copies and kernels happen later than the call, after a random delay; in
 * order within a stream, in any order across streams. Copies of host memory that is not registered happen in
 * the call. Streams made without the non-blocking flag, and the default stream, run as one. What is wrong
 * with a call's arguments is an error of the call; a lost context fails every call in it from then on.
 *
 * What it does to find mistakes: device memory cannot be touched by the processor (SIGSEGV) except while a
 * kernel runs. Handles that are no more, memory of other devices, copies over the end of an allocation or
 * across two registrations are refused. Unregistering memory that a copy uses aborts.
 *
 * It is set up by text, from the environment variable LARDER_STANDIN at load, or by standin_configure:
 *
 *   seed=N delay_us=N            of the delays: up to delay_us (2000), most of them a sixteenth of it
 *   devices=N memory=N           how many (1; 0 to 8), of how many bytes each (1G)
 *   version=N numa=N             13000; node that all devices are near to (-1: unknown)
 *   register_max=N               bytes that one registration may have
 *   register_total=N             bytes that may be registered at once
 *   fail=CALL:N:CODE             the N-th call from now returns CODE, once; "fail=CALL:0:CODE": all of them
 *   lose=DEVICE:N:CODE           after N more operations on it, all its contexts are lost with CODE
 *
 * Sizes take K, M or G. Unknown words abort.
 */
#ifndef LARDER_TESTS_STANDIN_H
#define LARDER_TESTS_STANDIN_H

#include "gpudirect/cuda.h"

#define STANDIN_DEVICES_MAX 8

/* What is there now, and what was ever done. */
struct standin_counts {
    size_t allocations, allocated_bytes, registrations, registered_bytes, streams, events, modules, contexts;
    size_t copies, copied_bytes, pageable_copies; /* done; those of memory that is not registered */
    size_t kernels;
    size_t lost_handles; /* that were left when their context ended: leaks */
};

/* X(symbol, result, parameters) of what only tests call. Any thread. */
#define STANDIN_CALLS(X)                                                                            \
    X(standin_configure, void, (const char *text))                                                  \
    X(standin_counts, void, (struct standin_counts * out))                                          \
    /* Back to the start, as after load with the environment's text; nothing may be open. */        \
    X(standin_reset, void, (void))                                                                  \
    /* What is given to the stream from now on waits until it is released. */                       \
    X(standin_hold, void, (cu_stream stream))                                                       \
    X(standin_release, void, (cu_stream stream))                                                    \
    /* A context that is not the primary one; it is there until standin_reset. */                   \
    X(standin_context, cu_context, (int ordinal))                                                   \
    /* Begins, or ends, the capture of a graph on a stream. At the end: was it left undisturbed? */ \
    X(standin_capture, bool, (cu_stream stream, bool begin))                                        \
    /* Where the processor may look at device memory. NULL: it is none. */                          \
    X(standin_peek, void *, (const void *device))                                                   \
    /* Makes an allocation look like one of a memory pool: no context owns it. */                   \
    X(standin_pooled, void, (const void *device))                                                   \
    /* What trainers call, beyond what larder does. */                                              \
    X(cuCtxSetCurrent, cu_result, (cu_context context))                                             \
    X(cuDevicePrimaryCtxReset_v2, cu_result, (cu_device device))                                    \
    X(cuCtxGetCurrent, cu_result, (cu_context * context))                                           \
    X(cuStreamSynchronize, cu_result, (cu_stream stream))                                           \
    X(cuMemsetD8Async, cu_result, (cu_ptr p, unsigned char value, size_t bytes, cu_stream stream))

#endif
