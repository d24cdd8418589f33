/* SPDX-License-Identifier: Apache-2.0 */
/* Tar archives out of any bytes; headers get a checksum made to fit, or nothing would get past it. The first
 * byte says in what pieces they are pushed: whatever the pieces, the outcome is the same, and what is found
 * lies within the archive and makes the way through its encoding. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/tar.h"
#include "tests/fuzz/found.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* Sums every block that has a ustar magic and is not summed yet. */
static void sum_headers(uint8_t *p, size_t n)
{
    for (size_t at = 0; at + TAR_BLOCK_BYTES <= n; at += TAR_BLOCK_BYTES) {
        unsigned sum = 0;
        if (memcmp(p + at + 257, "ustar", 5) != 0)
            continue;
        memset(p + at + 148, ' ', 8);
        for (size_t i = 0; i < TAR_BLOCK_BYTES; i++)
            sum += p[at + i];
        char text[8];
        snprintf(text, sizeof text, "%06o", sum);
        memcpy(p + at + 148, text, 7);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n < 1)
        return 0;
    size_t piece = 1 + data[0] * 5u;
    uint8_t *p = malloc(n);
    check(p);
    memcpy(p, data + 1, n - 1);
    sum_headers(p, n - 1);
    struct samples_source source = {.format = SHARD_TAR, .shard = "fuzz", .shard_bytes = n - 1};
    found_both_ways(&source, p, piece);
    free(p);
    return 0;
}
