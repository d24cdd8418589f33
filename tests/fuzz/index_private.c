/* SPDX-License-Identifier: Apache-2.0 */
/* The sealed part of an index out of any bytes, with a chunk table of five: what decodes must encode to the
 * bytes that it came from, and may be compared with itself as if two ranks had saved it. */
#include <stdlib.h>
#include <string.h>

#include "format/index.h"

#define MIB (1u << 20)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const struct chunk_entry chunks[5] = {
        {.offset = 4096, .stored_bytes = 116, .plain_bytes = 100, .dtype = DTYPE_F32},
        {.offset = 8192, .stored_bytes = 3 * MIB, .plain_bytes = 4 * MIB, .dtype = DTYPE_BF16},
        {.offset = 8192 + 4 * MIB, .stored_bytes = MIB, .plain_bytes = 2 * MIB, .dtype = DTYPE_BF16},
        {.plain_bytes = 64, .codec = CODEC_ZERO, .dtype = DTYPE_F32},
        {.offset = 8192 + 6 * MIB, .stored_bytes = 30, .plain_bytes = 14, .dtype = DTYPE_U8},
    };
    struct index_private parts[2];
    struct err e = {0};
    struct buf b = {0};
    int r = index_private_decode(data, n, chunks, 5, &parts[0], &e);
    check(r == 0 || (r < 0 && e.text[0]));
    if (r < 0)
        return 0;
    check(index_private_encode(&parts[0], &b, &e) == 0);
    check(b.n == n && memcmp(b.p, data, n) == 0);
    buf_free(&b);
    bool told = true; /* the hashes that show that two ranks hold the same */
    for (uint32_t i = 0; i < parts[0].tensor_count; i++) {
        const struct tensor *t = &parts[0].tensors[i];
        static const struct hash128 none;
        told &= t->bytes == 0 || index_large(t->bytes) || memcmp(&t->plain_hash, &none, sizeof none) != 0;
    }
    parts[1] = parts[0];
    r = index_check_set(parts, 1, &e);
    check(r == 0 || r == -err_class_errno(ERR_MISMATCH));
    int both = index_check_set(parts, 2, &e);
    check(told ? both == r : both < 0); /* equal boxes with equal bytes change nothing */
    index_private_free(&parts[0]);
    return 0;
}
