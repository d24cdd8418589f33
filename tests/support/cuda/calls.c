/* SPDX-License-Identifier: Apache-2.0 */
/* The driver's calls that only look, and those on contexts, memory and pointers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/cuda/state.h"

#define CUDA_DECLARE(symbol, parameters) __attribute__((visibility("default"))) cu_result symbol parameters;
CUDA_CALLS(CUDA_DECLARE)
__attribute__((visibility("default"))) cu_result cuCtxSetCurrent(cu_context context);
__attribute__((visibility("default"))) cu_result cuCtxGetCurrent(cu_context *context);
__attribute__((visibility("default"))) cu_result cuDevicePrimaryCtxReset_v2(cu_device device);

/* ---- driver and devices ---- */

cu_result cuInit(unsigned flags)
{
    cu_result code = begin(CALL_cuInit);
    if (code == CU_OK && flags != 0)
        code = CU_INVALID_VALUE;
    if (code == CU_OK && world.set.devices == 0)
        code = CU_NO_DEVICE;
    if (code == CU_OK)
        world.initialised = true;
    return finish(code);
}

cu_result cuDriverGetVersion(int *version)
{
    cu_result code = begin(CALL_cuDriverGetVersion);
    *version = world.set.version;
    return finish(code);
}

static const struct {
    cu_result code;
    const char *name;
} codes[] = {{CU_OK, "CUDA_SUCCESS"},
#define CODE_ROW(name, value) {value, "CUDA_ERROR_" #name},
             CUDA_CODES(CODE_ROW)};

static cu_result code_text(cu_result code, const char **text, bool name)
{
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (codes[i].code == code) {
            *text = name ? codes[i].name : "as the stand-in was told";
            return CU_OK;
        }
    *text = NULL;
    return CU_INVALID_VALUE;
}

cu_result cuGetErrorName(cu_result code, const char **name)
{
    cu_result rc = begin(CALL_cuGetErrorName);
    return finish(rc == CU_OK ? code_text(code, name, true) : rc);
}

cu_result cuGetErrorString(cu_result code, const char **text)
{
    cu_result rc = begin(CALL_cuGetErrorString);
    return finish(rc == CU_OK ? code_text(code, text, false) : rc);
}

cu_result cuDeviceGetCount(int *count)
{
    cu_result code = begin(CALL_cuDeviceGetCount);
    *count = world.set.devices;
    return finish(code);
}

static bool device_there(cu_device device)
{
    return device >= 0 && device < world.set.devices;
}

cu_result cuDeviceGet(cu_device *device, int ordinal)
{
    cu_result code = begin(CALL_cuDeviceGet);
    if (code == CU_OK && !device_there(ordinal))
        code = CU_INVALID_DEVICE;
    *device = ordinal;
    return finish(code);
}

cu_result cuDeviceGetName(char *name, int bytes, cu_device device)
{
    cu_result code = begin(CALL_cuDeviceGetName);
    if (code == CU_OK && !device_there(device))
        code = CU_INVALID_DEVICE;
    if (code == CU_OK)
        snprintf(name, (size_t)bytes, "Stand-in %d", device);
    return finish(code);
}

static cu_result attribute(cu_device device, cu_device_attribute which, int *value)
{
    switch ((enum cu_number)which) {
    case CU_ATTR_MAX_PITCH: *value = INT32_MAX; return CU_OK;
    case CU_ATTR_PCI_BUS: *value = 0x10 + device; return CU_OK;
    case CU_ATTR_PCI_DEVICE: *value = 0; return CU_OK;
    case CU_ATTR_PCI_DOMAIN: *value = 0xffff; return CU_OK; /* which no machine has */
    case CU_ATTR_UNIFIED_ADDRESSING: *value = 1; return CU_OK;
    case CU_ATTR_MAJOR: *value = 9; return CU_OK;
    case CU_ATTR_MINOR: *value = 0; return CU_OK;
    case CU_ATTR_HOST_NUMA: *value = world.set.numa; return CU_OK;
    default: return CU_INVALID_VALUE;
    }
}

cu_result cuDeviceGetAttribute(int *value, cu_device_attribute which, cu_device device)
{
    cu_result code = begin(CALL_cuDeviceGetAttribute);
    if (code == CU_OK && !device_there(device))
        code = CU_INVALID_DEVICE;
    return finish(code == CU_OK ? attribute(device, which, value) : code);
}

cu_result cuDeviceTotalMem_v2(size_t *bytes, cu_device device)
{
    cu_result code = begin(CALL_cuDeviceTotalMem_v2);
    if (code == CU_OK && !device_there(device))
        code = CU_INVALID_DEVICE;
    *bytes = world.set.memory;
    return finish(code);
}

/* ---- contexts ---- */

#define DEPTH_MAX 16

static _Thread_local struct {
    cu_context stack[DEPTH_MAX];
    unsigned depth;
    cu_capture_mode mode;
} thread;

cu_context current(void)
{
    return thread.depth > 0 ? thread.stack[thread.depth - 1] : NULL;
}

cu_result cuDevicePrimaryCtxRetain(cu_context *context, cu_device device)
{
    cu_result code = begin(CALL_cuDevicePrimaryCtxRetain);
    if (code == CU_OK && !device_there(device))
        code = CU_INVALID_DEVICE;
    if (code == CU_OK) {
        *context = &world.primary[device];
        if (world.primary[device].retained++ == 0)
            world.counts.contexts++;
    }
    return finish(code);
}

cu_result cuDevicePrimaryCtxRelease_v2(cu_device device)
{
    cu_result code = begin(CALL_cuDevicePrimaryCtxRelease_v2);
    if (code == CU_OK && (!device_there(device) || world.primary[device].retained == 0))
        code = CU_INVALID_CONTEXT;
    if (code == CU_OK && --world.primary[device].retained == 0) {
        context_end(&world.primary[device]);
        world.primary[device].lost = CU_OK; /* the next one is new */
    }
    return finish(code);
}

/* Whoever has retained it, it is gone. */
cu_result cuDevicePrimaryCtxReset_v2(cu_device device)
{
    cu_result code = begin(CALL_cuDevicePrimaryCtxReset_v2);
    if (code == CU_OK && (!device_there(device) || world.primary[device].retained == 0))
        code = CU_INVALID_CONTEXT;
    if (code == CU_OK) {
        context_end(&world.primary[device]);
        world.primary[device].retained = 0;
        world.primary[device].lost = CU_OK;
    }
    return finish(code);
}

static bool context_there(cu_context c)
{
    if (c >= world.primary && c < world.primary + STANDIN_DEVICES_MAX)
        return c->retained > 0;
    for (cu_context o = world.others; o; o = o->next)
        if (o == c)
            return true;
    return false;
}

cu_result cuCtxPushCurrent_v2(cu_context context)
{
    cu_result code = begin(CALL_cuCtxPushCurrent_v2);
    if (code == CU_OK && !context_there(context))
        code = CU_INVALID_CONTEXT;
    if (code == CU_OK && thread.depth == DEPTH_MAX)
        broken("contexts are pushed and not popped");
    if (code == CU_OK)
        thread.stack[thread.depth++] = context;
    return finish(code);
}

cu_result cuCtxPopCurrent_v2(cu_context *context)
{
    cu_result code = begin(CALL_cuCtxPopCurrent_v2);
    if (code == CU_OK && thread.depth == 0)
        code = CU_INVALID_CONTEXT;
    if (code == CU_OK)
        *context = thread.stack[--thread.depth];
    return finish(code);
}

cu_result cuCtxSetCurrent(cu_context context)
{
    cu_result code = begin(CALL_cuCtxSetCurrent);
    if (code == CU_OK && context && !context_there(context))
        code = CU_INVALID_CONTEXT;
    if (code == CU_OK) {
        thread.depth = context != NULL;
        thread.stack[0] = context;
    }
    return finish(code);
}

cu_result cuCtxGetCurrent(cu_context *context)
{
    cu_result code = begin(CALL_cuCtxGetCurrent);
    *context = current();
    return finish(code);
}

cu_result cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    cu_result code = begin(CALL_cuCtxGetStreamPriorityRange);
    *least = 0;
    *greatest = -5;
    return finish(code);
}

cu_result cuThreadExchangeStreamCaptureMode(cu_capture_mode *mode)
{
    cu_result code = begin(CALL_cuThreadExchangeStreamCaptureMode);
    if (code == CU_OK) {
        cu_capture_mode before = thread.mode;
        thread.mode = *mode;
        *mode = before;
    }
    return finish(code);
}

bool capture_disturbed(void)
{
    if (world.captures == 0 || thread.mode == CU_CAPTURE_RELAXED)
        return false;
    for (cu_stream s = world.streams; s; s = s->next)
        s->disturbed |= s->capturing;
    return true;
}

/* ---- memory ---- */

cu_result cuMemAlloc_v2(cu_ptr *p, size_t bytes)
{
    struct range *r = NULL;
    cu_result code = begin(CALL_cuMemAlloc_v2);
    if (code == CU_OK)
        code = range_add_device(current(), bytes, &r);
    if (code == CU_OK)
        *p = (cu_ptr)(uintptr_t)r->base;
    return finish(code);
}

cu_result cuMemFree_v2(cu_ptr p)
{
    cu_result code = begin(CALL_cuMemFree_v2);
    if (code == CU_OK && p != 0)
        code = range_remove((void *)(uintptr_t)p, RANGE_DEVICE);
    return finish(code);
}

cu_result cuMemGetInfo_v2(size_t *unused, size_t *total)
{
    cu_result code = begin(CALL_cuMemGetInfo_v2);
    if (code == CU_OK) {
        *total = *unused = world.set.memory;
        for (struct range *r = world.ranges; r; r = r->next)
            if (r->kind == RANGE_DEVICE && r->ordinal == current()->ordinal)
                *unused -= r->bytes < *unused ? r->bytes : *unused;
    }
    return finish(code);
}

cu_result cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags)
{
    cu_result code = begin(CALL_cuMemHostRegister_v2);
    if (code == CU_OK && flags != CU_REGISTER_PORTABLE)
        code = CU_INVALID_VALUE;
    return finish(code == CU_OK ? range_add_host(current(), p, bytes) : code);
}

cu_result cuMemHostUnregister(void *p)
{
    cu_result code = begin(CALL_cuMemHostUnregister);
    return finish(code == CU_OK ? range_remove(p, RANGE_HOST) : code);
}

static cu_result tell(const struct range *r, cu_pointer_attribute which, void *out)
{
    switch ((enum cu_number)which) {
    case CU_POINTER_CONTEXT: *(cu_context *)out = r ? r->context : NULL; return CU_OK;
    case CU_POINTER_TYPE:
        *(unsigned *)out = !r ? 0 : r->kind == RANGE_DEVICE ? CU_TYPE_DEVICE : CU_TYPE_HOST;
        return CU_OK;
    case CU_POINTER_MANAGED: *(unsigned char *)out = 0; return CU_OK; /* a bool: the rest is not written */
    case CU_POINTER_ORDINAL: *(int *)out = r ? r->ordinal : -2; return CU_OK;
    case CU_POINTER_RANGE_START: *(cu_ptr *)out = r ? (cu_ptr)(uintptr_t)r->base : 0; return CU_OK;
    case CU_POINTER_RANGE_BYTES: *(size_t *)out = r ? r->bytes : 0; return CU_OK;
    default: return CU_INVALID_VALUE;
    }
}

cu_result cuPointerGetAttributes(unsigned count, cu_pointer_attribute *attributes, void **data, cu_ptr p)
{
    cu_result code = begin(CALL_cuPointerGetAttributes);
    const struct range *r = code == CU_OK ? range_of((void *)(uintptr_t)p) : NULL;
    for (unsigned i = 0; i < count && code == CU_OK; i++)
        code = tell(r, attributes[i], data[i]);
    return finish(code);
}
