/* SPDX-License-Identifier: Apache-2.0 */
/* What the stand-in's files share: one lock over everything, and the objects behind the handles. */
#ifndef LARDER_TESTS_CUDA_STATE_H
#define LARDER_TESTS_CUDA_STATE_H

#include <pthread.h>
#include <stdbool.h>

#include "gpudirect/kernels_host.h"
#include "tests/support/cuda/standin.h"

#define CALL_NUMBER(symbol, parameters) CALL_##symbol,
enum call {
    CUDA_CALLS(CALL_NUMBER) CALL_cuCtxSetCurrent,
    CALL_cuCtxGetCurrent,
    CALL_cuDevicePrimaryCtxReset_v2,
    CALL_cuStreamSynchronize,
    CALL_cuMemsetD8Async,
    CALL_COUNT
};

#define RULES_MAX 8

struct rule { /* fail= and lose= */
    bool on, always;
    int which; /* call, or device */
    uint64_t left;
    cu_result code;
};

struct settings {
    uint64_t seed, delay_us, memory, register_max, register_total;
    int devices, version, numa;
    struct rule fail[RULES_MAX], lose[RULES_MAX];
};

struct cu_context_object {
    struct cu_context_object *next;
    int ordinal;
    unsigned retained; /* of primary ones */
    cu_result lost;
    size_t kernels_waiting;
    cu_stream shared; /* the default stream, and all blocking ones */
};

enum range_kind { RANGE_DEVICE, RANGE_HOST };

struct range { /* device memory, or registered host memory */
    struct range *next;
    enum range_kind kind;
    uint8_t *base, *peek; /* peek: where the processor may look */
    size_t bytes, mapped; /* mapped: with what rounding added */
    cu_context context;   /* NULL: of a pool */
    int ordinal;
    size_t users; /* operations that are not done */
};

enum op_kind { OP_COPY, OP_FILL, OP_KERNEL, OP_WAIT, OP_HOLD };

struct op {
    struct op *next;
    enum op_kind kind;
    uint64_t due_ns;
    struct memory_box box; /* of copies and fills, with addresses that can be touched */
    struct range *ranges[2];
    uint8_t *staged; /* what a copy of unregistered memory reads; freed with the operation */
    int value;
    bool pageable;
    const struct kernel_host *kernel;
    uint64_t threads;
    uint32_t rows;
    uint64_t arguments[160];
    void *parameters[KERNEL_PARAMETERS_MAX];
    cu_stream wait_stream; /* OP_WAIT: until it has done so many */
    uint64_t wait_for;
};

struct cu_stream_object {
    struct cu_stream_object *next;
    cu_context context;
    struct op *first, *last;
    uint64_t given, done, holds, released;
    bool busy, capturing, disturbed;
    unsigned handles;
    unsigned refs; /* handles, events and waits that point here, and its context if shared */
};

struct cu_event_object {
    struct cu_event_object *next;
    cu_context context;
    cu_stream stream; /* NULL: never recorded */
    uint64_t ticket;
};

struct cu_function_object {
    struct cu_function_object *next;
    const struct kernel_host *kernel;
};

struct cu_module_object {
    struct cu_module_object *next;
    cu_context context;
    struct cu_function_object *functions;
};

struct state {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct settings set;
    bool initialised;
    struct standin_counts counts;
    struct cu_context_object primary[STANDIN_DEVICES_MAX];
    struct cu_context_object *others;
    struct range *ranges;
    struct cu_stream_object *streams;
    struct cu_event_object *events;
    struct cu_module_object *modules;
    size_t captures; /* under way */
    size_t kernels_running;
    uint64_t random;
    bool workers;
};

extern struct state world;

/* Every call: begin takes the lock, and answers what a lost context, a rule or the order of calls makes of
 * it; finish gives the lock back. */
cu_result begin(enum call which);
cu_result finish(cu_result code);
void settings_read(struct settings *s, const char *text);
void settings_defaults(struct settings *s);
const char *call_name(enum call which);

/* The rest is called with the lock held. */
cu_context current(void); /* NULL: none */
uint64_t random_next(void);
void broken(const char *what) __attribute__((noreturn)); /* a promise of CUDA's callers */

cu_result range_add_device(cu_context c, size_t bytes, struct range **out);
cu_result range_add_host(cu_context c, void *p, size_t bytes);
cu_result range_remove(void *p, enum range_kind kind);
struct range *range_of(const void *p);
void ranges_open(bool open); /* to the processor, while kernels run */
/* One side of a copy. *range stays NULL for memory that is not known. */
cu_result range_side(cu_context c, enum range_kind kind, const void *p, size_t extent, struct range **range);

cu_stream stream_add(cu_context c, unsigned flags);
cu_stream stream_of(cu_stream handle); /* NULL: there is none */
void stream_unref(cu_stream s);
void stream_give(cu_stream s, struct op *o);    /* which must come from calloc */
bool stream_wait(cu_stream s, uint64_t ticket); /* false: lost meanwhile */
void context_lose(int ordinal, cu_result code);
void workers_start(void);
bool capture_disturbed(void); /* by a call of this thread that captures forbid */

/* Whatever is left in a context goes with it, and is counted as lost. */
void context_end(cu_context c);
void context_drop(cu_context c); /* of that: what its streams have not done */
void streams_end(cu_context c);
void ranges_end(cu_context c);

#endif
