/* SPDX-License-Identifier: Apache-2.0 */
#include "format/dtype.h"

#include <errno.h>
#include <string.h>

#include "format/base/cursor.h"

static const struct {
    uint8_t bits;
    uint8_t pack;
    const char *name;
} dtypes[DTYPE_COUNT] = {
    [DTYPE_U8] = {8, 1, "U8"},
    [DTYPE_I8] = {8, 1, "I8"},
    [DTYPE_U16] = {16, 1, "U16"},
    [DTYPE_I16] = {16, 1, "I16"},
    [DTYPE_U32] = {32, 1, "U32"},
    [DTYPE_I32] = {32, 1, "I32"},
    [DTYPE_U64] = {64, 1, "U64"},
    [DTYPE_I64] = {64, 1, "I64"},
    [DTYPE_F16] = {16, 1, "F16"},
    [DTYPE_BF16] = {16, 1, "BF16"},
    [DTYPE_F32] = {32, 1, "F32"},
    [DTYPE_F64] = {64, 1, "F64"},
    [DTYPE_BOOL] = {8, 1, "BOOL"},
    [DTYPE_F8_E4M3] = {8, 1, "F8_E4M3"},
    [DTYPE_F8_E5M2] = {8, 1, "F8_E5M2"},
    [DTYPE_F8_E8M0] = {8, 1, "F8_E8M0"},
    [DTYPE_F8_E4M3FNUZ] = {8, 1, "F8_E4M3FNUZ"},
    [DTYPE_F8_E5M2FNUZ] = {8, 1, "F8_E5M2FNUZ"},
    [DTYPE_C64] = {64, 1, "C64"},
    [DTYPE_C128] = {128, 1, "C128"},
    [DTYPE_F4] = {4, 2, "F4"},
    [DTYPE_F6_E2M3] = {6, 4, "F6_E2M3"},
    [DTYPE_F6_E3M2] = {6, 4, "F6_E3M2"},
};

bool dtype_known(unsigned dtype)
{
    return dtype < DTYPE_COUNT && dtypes[dtype].bits > 0;
}

unsigned dtype_bits(enum dtype dtype)
{
    check(dtype_known(dtype));
    return dtypes[dtype].bits;
}

unsigned dtype_unit(unsigned dtype)
{
    return dtype < DTYPE_COUNT && dtypes[dtype].pack == 1 ? dtypes[dtype].bits / 8 : 0;
}

const char *dtype_name(enum dtype dtype)
{
    return dtype_known(dtype) ? dtypes[dtype].name : "unknown";
}

int dtype_of_name(const char *name, enum dtype *out)
{
    for (unsigned i = 0; i < DTYPE_COUNT; i++)
        if (dtypes[i].name && strcmp(dtypes[i].name, name) == 0) {
            *out = i;
            return 0;
        }
    return -EINVAL;
}

unsigned dtype_pack(enum dtype dtype)
{
    check(dtype_known(dtype));
    return dtypes[dtype].pack;
}

int dtype_bytes(enum dtype dtype, uint64_t elements, uint64_t *bytes, struct err *e)
{
    if (!dtype_known(dtype))
        return err_set(e, ERR_INVALID, "dtype %u is not one that this build knows", (unsigned)dtype);
    unsigned pack = dtypes[dtype].pack; /* 1, 2 or 4 */
    if ((elements & (pack - 1)) != 0)
        return err_set(e, ERR_INVALID,
                       "%llu elements of %s do not fill whole bytes: the count must be a multiple of %u",
                       (unsigned long long)elements, dtypes[dtype].name, pack);
    /* Exact: pack elements fill pack * bits / 8 whole bytes. */
    if (mul_overflows(elements >> (pack / 2), (uint64_t)pack * dtypes[dtype].bits / 8, bytes))
        return err_set(e, ERR_LIMIT, "%llu elements of %s are more bytes than 64 bits can count",
                       (unsigned long long)elements, dtypes[dtype].name);
    return 0;
}
