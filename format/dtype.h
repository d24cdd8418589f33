/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A dtype is a tag and a width in bits; the bytes of an element are never interpreted by the store. Values
 * are stored on disk and equal to enum larder_dtype of the public header.
 */
#ifndef LARDER_DTYPE_H
#define LARDER_DTYPE_H

#include <stdbool.h>
#include <stdint.h>

#include "format/base/err.h"

enum dtype {
    DTYPE_U8 = 1, /* also the dtype of opaque bytes */
    DTYPE_I8 = 2,
    DTYPE_U16 = 3,
    DTYPE_I16 = 4,
    DTYPE_U32 = 5,
    DTYPE_I32 = 6,
    DTYPE_U64 = 7,
    DTYPE_I64 = 8,
    DTYPE_F16 = 9,
    DTYPE_BF16 = 10,
    DTYPE_F32 = 11,
    DTYPE_F64 = 12,
    DTYPE_BOOL = 13,
    DTYPE_F8_E4M3 = 14,
    DTYPE_F8_E5M2 = 15,
    DTYPE_F8_E8M0 = 16,
    DTYPE_F8_E4M3FNUZ = 17,
    DTYPE_F8_E5M2FNUZ = 18,
    DTYPE_C64 = 19,     /* two f32 */
    DTYPE_C128 = 20,    /* two f64 */
    DTYPE_F4 = 21,      /* packed: two to a byte; the last dimension is even */
    DTYPE_F6_E2M3 = 22, /* packed: four to three bytes; the last dimension is a multiple of four */
    DTYPE_F6_E3M2 = 23,
    DTYPE_COUNT
};

bool dtype_known(unsigned dtype);
unsigned dtype_bits(enum dtype dtype);    /* bits per element */
unsigned dtype_unit(unsigned dtype);      /* bytes per element; 0: packed, or not known */
const char *dtype_name(enum dtype dtype); /* safetensors' spelling: "BF16", "F8_E4M3"; never NULL */
int dtype_of_name(const char *name, enum dtype *out); /* 0 or -EINVAL */
/* Elements that share bytes: 1 for whole-byte dtypes, 2 for F4, 4 for F6. A box's last dimension, offset and
 * length, must be multiples of it. */
unsigned dtype_pack(enum dtype dtype);

/* Bytes of `elements` packed elements; ERR_INVALID if they do not fill whole bytes, ERR_LIMIT on overflow. */
must_check int dtype_bytes(enum dtype dtype, uint64_t elements, uint64_t *bytes, struct err *e);

#endif
