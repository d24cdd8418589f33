/* SPDX-License-Identifier: Apache-2.0 */
/* Chunk tables out of any bytes, also with a checksum made to fit: what decodes must encode to the bytes that
 * it came from. */
#include <stdlib.h>
#include <string.h>

#include "format/index.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void try(const uint8_t *p, size_t n)
{
    struct chunk_entry *chunks;
    uint32_t count;
    struct err e = {0};
    struct buf b = {0};
    int r = index_public_decode(p, n, SEGMENT_BYTES_MAX, &chunks, &count, &e);
    check(r == 0 || (r < 0 && e.text[0]));
    if (r < 0)
        return;
    check(index_public_encode(chunks, count, &b, &e) == 0);
    check(b.n == n && memcmp(b.p, p, n) == 0);
    buf_free(&b);
    free(chunks);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    try(data, n);
    if (n < 8)
        return 0;
    uint8_t *fitted = malloc(n);
    check(fitted);
    memcpy(fitted, data, n);
    le64_put(fitted, hash64(fitted + 8, n - 8));
    try(fitted, n);
    free(fitted);
    return 0;
}
