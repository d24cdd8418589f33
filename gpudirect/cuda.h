/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of CUDA's driver API that larder uses, declared by us so that nothing of CUDA is needed to build,
 * and loaded by dlopen. Only cuda.c, which fills memory_cuda_ops (memory_kind.h) with it, and tests, which
 * stand in for the driver, see these types. A test holds every line of this file against NVIDIA's own cuda.h
 * where there is one.
 *
 * Names, types and numbers are those of libcuda's exported symbols: calls that were changed over time carry
 * the suffix of the variant that is declared (cuMemAlloc_v2). Drivers older than CUDA_DRIVER_MIN are refused.
 */
#ifndef LARDER_GPUDIRECT_CUDA_H
#define LARDER_GPUDIRECT_CUDA_H

#include <stddef.h>
#include <stdint.h>

#include "gpudirect/memory_kind.h"

#define CUDA_LIBRARY    "libcuda.so.1"
#define CUDA_DRIVER_MIN 11040 /* all that is used is in 11.4, the oldest branch with long support */

typedef int cu_result; /* enum cu_code, or one that a newer driver adds */
typedef int cu_device;
typedef unsigned long long cu_ptr; /* in device memory; equal to the address under unified addressing */
typedef struct cu_context_object *cu_context;
typedef struct cu_stream_object *cu_stream;
typedef struct cu_event_object *cu_event;
typedef struct cu_module_object *cu_module;
typedef struct cu_function_object *cu_function;
typedef int cu_device_attribute;
typedef int cu_pointer_attribute;
typedef int cu_memory_type;
typedef int cu_capture_mode;
typedef int cu_capture_status;
typedef int cu_jit_option;

/* X(name, value): CUDA_ERROR_name. Those that we act on. */
#define CUDA_CODES(X)                      \
    X(INVALID_VALUE, 1)                    \
    X(OUT_OF_MEMORY, 2)                    \
    X(NOT_INITIALIZED, 3)                  \
    X(DEINITIALIZED, 4)                    \
    X(STUB_LIBRARY, 34)                    \
    X(DEVICE_UNAVAILABLE, 46)              \
    X(NO_DEVICE, 100)                      \
    X(INVALID_DEVICE, 101)                 \
    X(INVALID_IMAGE, 200)                  \
    X(INVALID_CONTEXT, 201)                \
    X(NO_BINARY_FOR_GPU, 209)              \
    X(ECC_UNCORRECTABLE, 214)              \
    X(INVALID_PTX, 218)                    \
    X(NVLINK_UNCORRECTABLE, 220)           \
    X(JIT_COMPILER_NOT_FOUND, 221)         \
    X(UNSUPPORTED_PTX_VERSION, 222)        \
    X(INVALID_HANDLE, 400)                 \
    X(NOT_FOUND, 500)                      \
    X(NOT_READY, 600)                      \
    X(ILLEGAL_ADDRESS, 700)                \
    X(LAUNCH_OUT_OF_RESOURCES, 701)        \
    X(LAUNCH_TIMEOUT, 702)                 \
    X(CONTEXT_IS_DESTROYED, 709)           \
    X(ASSERT, 710)                         \
    X(HOST_MEMORY_ALREADY_REGISTERED, 712) \
    X(HOST_MEMORY_NOT_REGISTERED, 713)     \
    X(HARDWARE_STACK_ERROR, 714)           \
    X(ILLEGAL_INSTRUCTION, 715)            \
    X(MISALIGNED_ADDRESS, 716)             \
    X(INVALID_ADDRESS_SPACE, 717)          \
    X(INVALID_PC, 718)                     \
    X(LAUNCH_FAILED, 719)                  \
    X(NOT_PERMITTED, 800)                  \
    X(NOT_SUPPORTED, 801)                  \
    X(SYSTEM_NOT_READY, 802)               \
    X(SYSTEM_DRIVER_MISMATCH, 803)         \
    X(MPS_CLIENT_TERMINATED, 810)          \
    X(STREAM_CAPTURE_UNSUPPORTED, 900)     \
    X(STREAM_CAPTURE_IMPLICIT, 906)        \
    X(UNKNOWN, 999)
#define CUDA_CODE_ENUM(name, value) CU_##name = value,
enum cu_code { CU_OK = 0, CUDA_CODES(CUDA_CODE_ENUM) };

/* X(our name, NVIDIA's name, value) */
#define CUDA_NUMBERS(X)                                                       \
    X(CU_ATTR_MAX_PITCH, CU_DEVICE_ATTRIBUTE_MAX_PITCH, 11)                   \
    X(CU_ATTR_PCI_BUS, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 33)                    \
    X(CU_ATTR_PCI_DEVICE, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 34)              \
    X(CU_ATTR_UNIFIED_ADDRESSING, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 41) \
    X(CU_ATTR_PCI_DOMAIN, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 50)              \
    X(CU_ATTR_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75)        \
    X(CU_ATTR_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 76)        \
    X(CU_ATTR_HOST_NUMA, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, 134)               \
    X(CU_POINTER_CONTEXT, CU_POINTER_ATTRIBUTE_CONTEXT, 1)                    \
    X(CU_POINTER_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 2)                   \
    X(CU_POINTER_MANAGED, CU_POINTER_ATTRIBUTE_IS_MANAGED, 8)                 \
    X(CU_POINTER_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 9)             \
    X(CU_POINTER_RANGE_START, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, 11)      \
    X(CU_POINTER_RANGE_BYTES, CU_POINTER_ATTRIBUTE_RANGE_SIZE, 12)            \
    X(CU_TYPE_HOST, CU_MEMORYTYPE_HOST, 1)                                    \
    X(CU_TYPE_DEVICE, CU_MEMORYTYPE_DEVICE, 2)                                \
    X(CU_STREAM_FLAG_NON_BLOCKING, CU_STREAM_NON_BLOCKING, 1)                 \
    X(CU_EVENT_FLAG_NO_TIMING, CU_EVENT_DISABLE_TIMING, 2)                    \
    X(CU_REGISTER_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE, 1)                   \
    X(CU_CAPTURE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED, 2)                  \
    X(CU_CAPTURE_NONE, CU_STREAM_CAPTURE_STATUS_NONE, 0)                      \
    X(CU_JIT_LOG, CU_JIT_ERROR_LOG_BUFFER, 5)                                 \
    X(CU_JIT_LOG_BYTES, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, 6)
#define CUDA_NUMBER_ENUM(ours, theirs, value) ours = value,
enum cu_number { CUDA_NUMBERS(CUDA_NUMBER_ENUM) };

/* CUDA_MEMCPY3D_v2; one with a depth of 1 is a 2D copy. Members are NVIDIA's, in their order. */
struct cu_memcpy3d {
    size_t srcXInBytes, srcY, srcZ, srcLOD;
    cu_memory_type srcMemoryType;
    const void *srcHost;
    cu_ptr srcDevice;
    void *srcArray, *reserved0;
    size_t srcPitch, srcHeight;
    size_t dstXInBytes, dstY, dstZ, dstLOD;
    cu_memory_type dstMemoryType;
    void *dstHost;
    cu_ptr dstDevice;
    void *dstArray, *reserved1;
    size_t dstPitch, dstHeight;
    size_t WidthInBytes, Height, Depth;
};

/* X(symbol, parameters); all return cu_result. */
#define CUDA_CALLS(X)                                                                                    \
    X(cuInit, (unsigned flags))                                                                          \
    X(cuDriverGetVersion, (int *version))                                                                \
    X(cuGetErrorName, (cu_result code, const char **name))                                               \
    X(cuGetErrorString, (cu_result code, const char **text))                                             \
    X(cuDeviceGetCount, (int *count))                                                                    \
    X(cuDeviceGet, (cu_device * device, int ordinal))                                                    \
    X(cuDeviceGetName, (char *name, int bytes, cu_device device))                                        \
    X(cuDeviceGetAttribute, (int *value, cu_device_attribute attribute, cu_device device))               \
    X(cuDeviceTotalMem_v2, (size_t * bytes, cu_device device))                                           \
    X(cuDevicePrimaryCtxRetain, (cu_context * context, cu_device device))                                \
    X(cuDevicePrimaryCtxRelease_v2, (cu_device device))                                                  \
    X(cuCtxPushCurrent_v2, (cu_context context))                                                         \
    X(cuCtxPopCurrent_v2, (cu_context * context))                                                        \
    X(cuCtxGetStreamPriorityRange, (int *least, int *greatest))                                          \
    X(cuThreadExchangeStreamCaptureMode, (cu_capture_mode * mode))                                       \
    X(cuStreamCreateWithPriority, (cu_stream * stream, unsigned flags, int priority))                    \
    X(cuStreamDestroy_v2, (cu_stream stream))                                                            \
    X(cuStreamWaitEvent, (cu_stream stream, cu_event event, unsigned flags))                             \
    X(cuStreamIsCapturing, (cu_stream stream, cu_capture_status * status))                               \
    X(cuStreamGetCtx, (cu_stream stream, cu_context * context))                                          \
    X(cuEventCreate, (cu_event * event, unsigned flags))                                                 \
    X(cuEventDestroy_v2, (cu_event event))                                                               \
    X(cuEventRecord, (cu_event event, cu_stream stream))                                                 \
    X(cuEventQuery, (cu_event event))                                                                    \
    X(cuMemAlloc_v2, (cu_ptr * p, size_t bytes))                                                         \
    X(cuMemFree_v2, (cu_ptr p))                                                                          \
    X(cuMemGetInfo_v2, (size_t * unused, size_t * total))                                                \
    X(cuMemHostRegister_v2, (void *p, size_t bytes, unsigned flags))                                     \
    X(cuMemHostUnregister, (void *p))                                                                    \
    X(cuMemcpyDtoHAsync_v2, (void *to, cu_ptr from, size_t bytes, cu_stream stream))                     \
    X(cuMemcpyHtoDAsync_v2, (cu_ptr to, const void *from, size_t bytes, cu_stream stream))               \
    X(cuMemcpyDtoDAsync_v2, (cu_ptr to, cu_ptr from, size_t bytes, cu_stream stream))                    \
    X(cuMemcpy3DAsync_v2, (const struct cu_memcpy3d *copy, cu_stream stream))                            \
    X(cuPointerGetAttributes, (unsigned count, cu_pointer_attribute *attributes, void **data, cu_ptr p)) \
    X(cuModuleLoadDataEx,                                                                                \
      (cu_module * module, const void *image, unsigned count, cu_jit_option *options, void **values))    \
    X(cuModuleUnload, (cu_module module))                                                                \
    X(cuModuleGetFunction, (cu_function * function, cu_module module, const char *name))                 \
    X(cuLaunchKernel, (cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,          \
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,      \
                       cu_stream stream, void **arguments, void **extra))

#endif
