/* SPDX-License-Identifier: Apache-2.0 */
/* The driver's calls on streams, events, copies and kernels. */
#include <stdlib.h>
#include <string.h>

#include "gpudirect/kernels_host.h"
#include "tests/support/cuda/state.h"

#define CUDA_DECLARE(symbol, parameters) __attribute__((visibility("default"))) cu_result symbol parameters;
CUDA_CALLS(CUDA_DECLARE)
__attribute__((visibility("default"))) cu_result cuStreamSynchronize(cu_stream stream);
__attribute__((visibility("default"))) cu_result cuMemsetD8Async(cu_ptr p, unsigned char value, size_t bytes,
                                                                 cu_stream stream);

/* ---- streams ---- */

/* The stream behind a handle, for a call that needs its context to be the current one. */
static cu_result stream_here(cu_stream handle, cu_stream *out)
{
    *out = stream_of(handle);
    return *out && (*out)->context == current() ? CU_OK : CU_INVALID_HANDLE;
}

cu_result cuStreamCreateWithPriority(cu_stream *stream, unsigned flags, int priority)
{
    (void)priority;
    cu_result code = begin(CALL_cuStreamCreateWithPriority);
    if (code == CU_OK && flags > CU_STREAM_FLAG_NON_BLOCKING)
        code = CU_INVALID_VALUE;
    if (code == CU_OK)
        *stream = stream_add(current(), flags);
    return finish(code);
}

cu_result cuStreamDestroy_v2(cu_stream handle)
{
    cu_result code = begin(CALL_cuStreamDestroy_v2);
    cu_stream s = code == CU_OK ? stream_of(handle) : NULL;
    if (code == CU_OK && s != handle) /* not there, or the default stream by its other names */
        code = CU_INVALID_HANDLE;
    if (code == CU_OK) {
        world.counts.streams--;
        s->handles--;
        stream_unref(s);
    }
    return finish(code);
}

cu_result cuStreamIsCapturing(cu_stream handle, cu_capture_status *status)
{
    cu_result code = begin(CALL_cuStreamIsCapturing);
    cu_stream s = code == CU_OK ? stream_of(handle) : NULL;
    if (code == CU_OK && !s)
        code = CU_INVALID_HANDLE;
    if (code == CU_OK && (uintptr_t)handle <= 1 && world.captures > 0)
        code = CU_STREAM_CAPTURE_IMPLICIT;
    if (code == CU_OK)
        *status = s->capturing;
    return finish(code);
}

cu_result cuStreamGetCtx(cu_stream handle, cu_context *context)
{
    cu_result code = begin(CALL_cuStreamGetCtx);
    cu_stream s = code == CU_OK ? stream_of(handle) : NULL;
    if (code == CU_OK && !s)
        code = CU_INVALID_HANDLE;
    if (code == CU_OK)
        *context = s->context;
    return finish(code);
}

cu_result cuStreamSynchronize(cu_stream handle)
{
    cu_stream s;
    cu_result code = begin(CALL_cuStreamSynchronize);
    if (code == CU_OK)
        code = stream_here(handle, &s);
    if (code == CU_OK) {
        cu_context c = s->context;
        if (!stream_wait(s, s->given))
            code = c->lost;
    }
    return finish(code);
}

/* ---- events ---- */

static cu_event event_of(cu_event handle)
{
    for (cu_event v = world.events; v; v = v->next)
        if (v == handle)
            return v;
    return NULL;
}

cu_result cuEventCreate(cu_event *event, unsigned flags)
{
    cu_result code = begin(CALL_cuEventCreate);
    if (code == CU_OK && flags > 7)
        code = CU_INVALID_VALUE;
    if (code == CU_OK) {
        cu_event v = calloc(1, sizeof *v);
        v->context = current();
        v->next = world.events;
        world.events = v;
        world.counts.events++;
        *event = v;
    }
    return finish(code);
}

static void event_free(cu_event gone)
{
    cu_event *at = &world.events;
    while (*at != gone)
        at = &(*at)->next;
    *at = gone->next;
    if (gone->stream)
        stream_unref(gone->stream);
    world.counts.events--;
    free(gone);
}

cu_result cuEventDestroy_v2(cu_event event)
{
    cu_result code = begin(CALL_cuEventDestroy_v2);
    if (code == CU_OK && !event_of(event))
        code = CU_INVALID_HANDLE;
    if (code == CU_OK)
        event_free(event);
    return finish(code);
}

cu_result cuEventRecord(cu_event event, cu_stream handle)
{
    cu_stream s;
    cu_result code = begin(CALL_cuEventRecord);
    if (code == CU_OK)
        code = stream_here(handle, &s);
    if (code == CU_OK && (!event_of(event) || event->context != s->context))
        code = CU_INVALID_HANDLE;
    if (code == CU_OK) {
        s->refs++;
        if (event->stream)
            stream_unref(event->stream);
        event->stream = s;
        event->ticket = s->given;
    }
    return finish(code);
}

cu_result cuEventQuery(cu_event event)
{
    cu_result code = begin(CALL_cuEventQuery);
    if (code == CU_OK && !event_of(event))
        code = CU_INVALID_HANDLE;
    if (code == CU_OK && event->stream && event->stream->done < event->ticket)
        code = CU_NOT_READY;
    return finish(code);
}

cu_result cuStreamWaitEvent(cu_stream handle, cu_event event, unsigned flags)
{
    cu_stream s;
    cu_result code = begin(CALL_cuStreamWaitEvent);
    if (code == CU_OK && flags != 0)
        code = CU_INVALID_VALUE;
    if (code == CU_OK)
        code = stream_here(handle, &s);
    if (code == CU_OK && !event_of(event))
        code = CU_INVALID_HANDLE;
    if (code == CU_OK && event->stream) {
        struct op *o = calloc(1, sizeof *o);
        o->kind = OP_WAIT;
        o->wait_stream = event->stream;
        o->wait_for = event->ticket;
        stream_give(s, o);
    }
    return finish(code);
}

/* ---- copies ---- */

struct side {
    enum range_kind kind;
    const uint8_t *p;
    size_t pitch, slice;
    struct range *range;
};

static size_t extent(const struct side *s, const struct memory_box *b)
{
    return s->slice * (b->slices - 1) + s->pitch * (b->rows - 1) + b->row_bytes;
}

/* Unregistered memory is read in the call. */
static void stage(struct op *o, const struct side *from)
{
    size_t n = extent(from, &o->box);
    o->staged = malloc(n);
    if (!o->staged)
        broken("no memory to stage a copy");
    memcpy(o->staged, from->p, n);
    o->box.from = o->staged;
}

static cu_result sides_check(cu_stream handle, struct side *to, struct side *from, const struct memory_box *b,
                             cu_stream *s)
{
    cu_result code = stream_here(handle, s);
    if (code == CU_OK)
        code = range_side(current(), to->kind, to->p, extent(to, b), &to->range);
    if (code == CU_OK)
        code = range_side(current(), from->kind, from->p, extent(from, b), &from->range);
    return code;
}

static cu_result give_copy(cu_stream s, const struct side *to, const struct side *from,
                           const struct memory_box *sizes)
{
    struct op *o = calloc(1, sizeof *o);
    struct memory_box *b = &o->box;
    *b = *sizes;
    b->to = to->range ? to->range->peek + (to->p - to->range->base) : (uint8_t *)(uintptr_t)to->p;
    b->from = from->range ? from->range->peek + (from->p - from->range->base) : from->p;
    b->to_pitch = to->pitch;
    b->to_slice = to->slice;
    b->from_pitch = from->pitch;
    b->from_slice = from->slice;
    o->ranges[0] = to->range;
    o->ranges[1] = from->range;
    o->kind = OP_COPY;
    o->pageable = !to->range || !from->range;
    if (!from->range)
        stage(o, from);
    bool now = !to->range;
    cu_context c = s->context;
    stream_give(s, o);
    return now && !stream_wait(s, s->given) ? c->lost : CU_OK;
}

static cu_result copy_call(enum call which, cu_stream handle, struct side to, struct side from,
                           const struct memory_box *b)
{
    cu_stream s;
    cu_result code = begin(which);
    if (code == CU_OK && b->row_bytes > 0 && b->rows > 0 && b->slices > 0) {
        code = sides_check(handle, &to, &from, b, &s);
        if (code == CU_OK)
            code = give_copy(s, &to, &from, b);
    }
    return finish(code);
}

static const uint8_t *pointer(cu_ptr p)
{
    return (const uint8_t *)(uintptr_t)p;
}

cu_result cuMemcpyDtoHAsync_v2(void *to, cu_ptr from, size_t bytes, cu_stream stream)
{
    return copy_call(CALL_cuMemcpyDtoHAsync_v2, stream, (struct side){.kind = RANGE_HOST, .p = to},
                     (struct side){.kind = RANGE_DEVICE, .p = pointer(from)},
                     &(struct memory_box){.row_bytes = bytes, .rows = 1, .slices = 1});
}

cu_result cuMemcpyHtoDAsync_v2(cu_ptr to, const void *from, size_t bytes, cu_stream stream)
{
    return copy_call(CALL_cuMemcpyHtoDAsync_v2, stream, (struct side){.kind = RANGE_DEVICE, .p = pointer(to)},
                     (struct side){.kind = RANGE_HOST, .p = from},
                     &(struct memory_box){.row_bytes = bytes, .rows = 1, .slices = 1});
}

cu_result cuMemcpyDtoDAsync_v2(cu_ptr to, cu_ptr from, size_t bytes, cu_stream stream)
{
    return copy_call(CALL_cuMemcpyDtoDAsync_v2, stream, (struct side){.kind = RANGE_DEVICE, .p = pointer(to)},
                     (struct side){.kind = RANGE_DEVICE, .p = pointer(from)},
                     &(struct memory_box){.row_bytes = bytes, .rows = 1, .slices = 1});
}

static bool side_of(struct side *s, const struct memory_box *b, cu_memory_type type, const void *host,
                    cu_ptr device, size_t pitch, size_t height)
{
    if (type != CU_TYPE_HOST && type != CU_TYPE_DEVICE)
        return false;
    *s = (struct side){.kind = type == CU_TYPE_HOST ? RANGE_HOST : RANGE_DEVICE,
                       .p = type == CU_TYPE_HOST ? host : pointer(device),
                       .pitch = pitch,
                       .slice = pitch * height};
    return pitch >= b->row_bytes && pitch <= INT32_MAX && height >= b->rows;
}

cu_result cuMemcpy3DAsync_v2(const struct cu_memcpy3d *c, cu_stream stream)
{
    struct memory_box b = {.row_bytes = c->WidthInBytes, .rows = c->Height, .slices = c->Depth};
    struct side to, from;
    bool corner = c->srcXInBytes == 0 && c->srcY == 0 && c->srcZ == 0 && c->srcLOD == 0 &&
                  c->dstXInBytes == 0 && c->dstY == 0 && c->dstZ == 0 && c->dstLOD == 0 && !c->reserved0 &&
                  !c->reserved1;
    if (!corner || !side_of(&to, &b, c->dstMemoryType, c->dstHost, c->dstDevice, c->dstPitch, c->dstHeight) ||
        !side_of(&from, &b, c->srcMemoryType, c->srcHost, c->srcDevice, c->srcPitch, c->srcHeight))
        return CU_INVALID_VALUE;
    return copy_call(CALL_cuMemcpy3DAsync_v2, stream, to, from, &b);
}

cu_result cuMemsetD8Async(cu_ptr p, unsigned char value, size_t bytes, cu_stream handle)
{
    cu_stream s;
    struct range *r = NULL;
    cu_result code = begin(CALL_cuMemsetD8Async);
    if (code == CU_OK)
        code = stream_here(handle, &s);
    if (code == CU_OK)
        code = range_side(current(), RANGE_DEVICE, pointer(p), bytes, &r);
    if (code == CU_OK) {
        struct op *o = calloc(1, sizeof *o);
        o->kind = OP_FILL;
        o->box = (struct memory_box){.to = r->peek + (pointer(p) - r->base), .row_bytes = bytes};
        o->value = value;
        o->ranges[0] = r;
        stream_give(s, o);
    }
    return finish(code);
}

/* ---- kernels ---- */

cu_result cuModuleLoadDataEx(cu_module *module, const void *image, unsigned count, cu_jit_option *options,
                             void **values)
{
    (void)options;
    (void)values;
    cu_result code = begin(CALL_cuModuleLoadDataEx);
    if (code == CU_OK && (!image || count > 16))
        code = CU_INVALID_VALUE;
    if (code == CU_OK) {
        cu_module x = calloc(1, sizeof *x);
        x->context = current();
        x->next = world.modules;
        world.modules = x;
        world.counts.modules++;
        *module = x;
    }
    return finish(code);
}

static void module_free(cu_module gone)
{
    cu_module *at = &world.modules;
    while (*at != gone)
        at = &(*at)->next;
    *at = gone->next;
    for (cu_function f = gone->functions, next; f; f = next) {
        next = f->next;
        free(f);
    }
    world.counts.modules--;
    free(gone);
}

static cu_module module_of(cu_module handle)
{
    for (cu_module x = world.modules; x; x = x->next)
        if (x == handle && x->context == current())
            return x;
    return NULL;
}

cu_result cuModuleUnload(cu_module module)
{
    cu_result code = begin(CALL_cuModuleUnload);
    if (code == CU_OK && !module_of(module))
        code = CU_INVALID_HANDLE;
    if (code == CU_OK && module->context->kernels_waiting > 0)
        broken("kernels are unloaded before they ran");
    if (code == CU_OK)
        module_free(module);
    return finish(code);
}

cu_result cuModuleGetFunction(cu_function *function, cu_module module, const char *name)
{
    cu_result code = begin(CALL_cuModuleGetFunction);
    const struct kernel_host *k = kernel_host_find(name);
    if (code == CU_OK && !module_of(module))
        code = CU_INVALID_HANDLE;
    if (code == CU_OK && !k)
        code = CU_NOT_FOUND;
    if (code == CU_OK) {
        cu_function f = calloc(1, sizeof *f);
        f->kernel = k;
        f->next = module->functions;
        module->functions = f;
        *function = f;
    }
    return finish(code);
}

static bool function_there(cu_function handle)
{
    for (cu_module x = world.modules; x; x = x->next)
        for (cu_function f = x->functions; f; f = f->next)
            if (f == handle && x->context == current())
                return true;
    return false;
}

static void keep_arguments(struct op *o, const struct kernel_host *k, void **arguments)
{
    size_t at = 0;
    for (uint32_t i = 0; i < k->parameters; i++) {
        size_t words = (k->parameter_bytes[i] + 7) / 8;
        if (at + words > sizeof o->arguments / 8 || i >= sizeof o->parameters / sizeof *o->parameters)
            broken("a kernel has more arguments than it can keep");
        memcpy(&o->arguments[at], arguments[i], k->parameter_bytes[i]);
        o->parameters[i] = &o->arguments[at];
        at += words;
    }
}

cu_result cuLaunchKernel(cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                         cu_stream handle, void **arguments, void **extra)
{
    cu_stream s;
    cu_result code = begin(CALL_cuLaunchKernel);
    if (code == CU_OK)
        code = stream_here(handle, &s);
    if (code == CU_OK && !function_there(function))
        code = CU_INVALID_HANDLE;
    if (code == CU_OK && (grid_x == 0 || grid_y == 0 || grid_y > 65535 || grid_z != 1 || block_x == 0 ||
                          block_x > 1024 || block_y != 1 || block_z != 1 || shared_bytes > 48 << 10 || extra))
        code = CU_INVALID_VALUE;
    if (code == CU_OK) {
        struct op *o = calloc(1, sizeof *o);
        o->kind = OP_KERNEL;
        o->kernel = function->kernel;
        o->threads = (uint64_t)grid_x * block_x;
        o->rows = grid_y;
        keep_arguments(o, function->kernel, arguments);
        stream_give(s, o);
    }
    return finish(code);
}

/* ---- the end of a context ---- */

void context_end(cu_context c)
{
    context_drop(c);
    for (cu_event v = world.events, next; v; v = next) {
        next = v->next;
        if (v->context == c) {
            world.counts.lost_handles++;
            event_free(v);
        }
    }
    for (cu_module x = world.modules, next; x; x = next) {
        next = x->next;
        if (x->context == c) {
            world.counts.lost_handles++;
            module_free(x);
        }
    }
    streams_end(c);
    ranges_end(c);
    world.counts.contexts--;
}
