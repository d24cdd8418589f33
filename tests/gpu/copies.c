/* SPDX-License-Identifier: Apache-2.0 */
/* Copies between host and device, of pinned and of plain memory: what all the rest is compared with. */
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/gpu.h"

#define ROUNDS 5

/* The median of some copies of all the bytes. */
static double copy_gbps(struct bench *b, enum memory_direction d, void *device, void *host)
{
    double seconds[ROUNDS];
    struct err e;
    for (int i = -1; i < ROUNDS; i++) { /* the first one warms up */
        double start = now_s();
        int rc = memory_copy(b->s, d, d == MEMORY_IN ? device : host, d == MEMORY_IN ? host : device,
                             b->bytes, &e);
        if (rc == 0)
            rc = memory_stream_wait(b->s, WAIT_MS, &e);
        must(rc, &e, "a copy");
        if (i >= 0)
            seconds[i] = now_s() - start;
    }
    return gbps(b->bytes, median(seconds, ROUNDS));
}

/* In with one pattern, out again, over another. */
static void both_ways(struct bench *b, void *device, uint8_t *host, const char *name_in, const char *name_out,
                      uint64_t seed, double *in, double *out)
{
    uint8_t *expected = host_alloc(b->bytes);
    fill(expected, b->bytes, seed);
    memcpy(host, expected, b->bytes);
    *in = copy_gbps(b, MEMORY_IN, device, host);
    memset(host, 0, b->bytes);
    *out = copy_gbps(b, MEMORY_OUT, device, host);
    bool same = memcmp(host, expected, b->bytes) == 0;
    row(b, name_in, same, "", "%.2f GB/s", *in);
    row(b, name_out, same, "", "%.2f GB/s", *out);
    free(expected);
}

void measure_copies(struct bench *b)
{
    void *device = NULL;
    struct err e;
    double in, out;
    uint8_t *host = host_alloc(b->bytes);
    must(memory_alloc(b->m, b->bytes, &device, &e), &e, "device memory");
    both_ways(b, device, host, "plain memory, host to device", "plain memory, device to host", 1, &in, &out);
    if (memory_register(b->m, host, b->bytes, &e) < 0) {
        row_failed(b, "pinned memory", e.text);
    } else {
        both_ways(b, device, host, "pinned memory, host to device", "pinned memory, device to host", 2,
                  &b->in_gbps, &b->out_gbps);
        memory_unregister(b->m, host);
    }
    memory_free(b->m, device);
    free(host);
}
