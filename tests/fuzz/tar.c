/* SPDX-License-Identifier: Apache-2.0 */
/* Tar archives out of any bytes; headers get a checksum made to fit, or nothing would get past it. The first
 * byte says in what pieces they are pushed: whatever the pieces, the outcome is the same, and what is found
 * lies within the archive and makes the way through its encoding. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/samples.h"
#include "format/tar.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static int build(const uint8_t *p, size_t n, size_t piece, bool skip, struct buf *out)
{
    struct samples_builder *b;
    struct samples *s = NULL, *again;
    struct err e = {0};
    check(samples_builder_create(SHARD_TAR, "fuzz", 0, &b, &e) == 0);
    int r = 0;
    for (size_t at = 0; r == 0 && at < n;) {
        uint64_t most = samples_builder_skippable(b);
        size_t take = n - at < piece ? n - at : piece;
        if (skip && most > 0) {
            take = most < n - at ? (size_t)most : n - at;
            samples_builder_skip(b, take);
        } else {
            r = samples_builder_push(b, p + at, take, &e);
        }
        at += take;
    }
    if (r == 0)
        r = samples_builder_finish(b, &s, &e);
    samples_builder_free(b);
    check(r == 0 || e.text[0]);
    if (r < 0)
        return r;
    check(samples_encode(s, out, &e) == 0);
    check(samples_decode(out->p, out->n, n, &again, &e) == 0);
    check(samples_count(s) == samples_count(again));
    samples_free(again);
    samples_free(s);
    return 0;
}

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
    struct buf one = {0}, two = {0};
    if (n < 1)
        return 0;
    size_t piece = 1 + data[0] * 5u;
    uint8_t *p = malloc(n);
    check(p);
    memcpy(p, data + 1, n - 1);
    sum_headers(p, n - 1);
    int a = build(p, n - 1, piece, false, &one), b = build(p, n - 1, 4096, true, &two);
    check(a == b && one.n == two.n && (one.n == 0 || memcmp(one.p, two.p, one.n) == 0));
    buf_free(&one);
    buf_free(&two);
    free(p);
    return 0;
}
