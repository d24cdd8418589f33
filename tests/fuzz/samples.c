/* SPDX-License-Identifier: Apache-2.0 */
/* Sample indexes out of any bytes (length of the shard first), also with a checksum made to fit: what decodes
 * keeps its promises and encodes to the bytes that it came from. */
#include <stdlib.h>
#include <string.h>

#include "format/base/hash.h"
#include "tests/fuzz/found.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void try(const uint8_t *p, size_t n, uint64_t shard)
{
    struct samples *s;
    struct err e = {0};
    struct buf b = {0};
    int r = samples_decode(p, n, shard, &s, &e);
    check(r == 0 || (r < 0 && e.text[0]));
    if (r < 0)
        return;
    found_check(s, shard);
    check(samples_encode(s, &b, &e) == 0);
    check(b.n == n && memcmp(b.p, p, n) == 0);
    buf_free(&b);
    samples_free(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n < 8)
        return 0;
    uint64_t shard = le64_get(data);
    try(data + 8, n - 8, shard);
    if (n < 8 + HASH128_BYTES)
        return 0;
    uint8_t *fitted = malloc(n - 8);
    check(fitted);
    memcpy(fitted, data + 8, n - 8);
    struct hash128 h = hash128(fitted + HASH128_BYTES, n - 8 - HASH128_BYTES);
    memcpy(fitted, h.bytes, HASH128_BYTES);
    try(fitted, n - 8, shard);
    free(fitted);
    return 0;
}
