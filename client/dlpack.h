/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of DLPack that is exported: DLManagedTensor as of DLPack 0.8, which 1.0 keeps beside its versioned
 * one. Declared by us, with DLPack's own names of tags and members, so that nothing of it is needed to build.
 */
#ifndef LARDER_CLIENT_DLPACK_H
#define LARDER_CLIENT_DLPACK_H

#include <stdint.h>

enum dl_device_type { DL_CPU = 1, DL_CUDA = 2 };
enum dl_type_code { DL_UINT = 1 };

struct dl_tensor {
    void *data;
    struct {
        int32_t device_type; /* an enum there, of the size of an int */
        int32_t device_id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* strides in elements; NULL: packed row-major */
    uint64_t byte_offset;
};

struct DLManagedTensor {
    struct dl_tensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensor *self);
};

_Static_assert(sizeof(struct dl_tensor) == 48 && sizeof(struct DLManagedTensor) == 64,
               "as DLPack lays it out");

#endif
