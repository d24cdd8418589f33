/* SPDX-License-Identifier: Apache-2.0 */
/* Commit records and the small records out of any bytes, also with a checksum made to fit: what decodes must
 * encode to the bytes that it came from. */
#include <stdlib.h>
#include <string.h>

#include "format/commit.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define TRY_SMALL(name)                                           \
    do {                                                          \
        struct record_##name x;                                   \
        struct buf again = {0};                                   \
        if (record_##name##_decode(p, n, &x, NULL) == 0) {        \
            check(record_##name##_encode(&x, &again, NULL) == 0); \
            check(again.n == n && memcmp(again.p, p, n) == 0);    \
        }                                                         \
        buf_free(&again);                                         \
    } while (0)

static void try(const uint8_t *p, size_t n)
{
    struct commit c;
    struct err e = {0};
    struct buf b = {0};
    int r = commit_decode(p, n, &c, &e);
    check(r == 0 || (r < 0 && e.text[0]));
    if (r == 0) {
        check(commit_encode(&c, &b, &e) == 0);
        check(b.n == n && memcmp(b.p, p, n) == 0);
        commit_free(&c);
    }
    buf_free(&b);
    TRY_SMALL(store);
    TRY_SMALL(tenant);
    TRY_SMALL(run);
    TRY_SMALL(attempt);
    TRY_SMALL(mark);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    try(data, n);
    if (n < HASH128_BYTES)
        return 0;
    uint8_t *fitted = malloc(n);
    check(fitted);
    memcpy(fitted, data, n);
    struct hash128 h = hash128(fitted + HASH128_BYTES, n - HASH128_BYTES);
    memcpy(fitted, h.bytes, HASH128_BYTES);
    try(fitted, n);
    free(fitted);
    return 0;
}
