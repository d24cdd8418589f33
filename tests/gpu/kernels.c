/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels beside their host twins. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/box.h"
#include "tests/gpu/gpu.h"

#define ROUNDS 5
#define CHUNK  (4u << 20)

/* ---- hashing ---- */

static int hash_device(struct bench *b, const void *data, struct chunk_hash *out)
{
    struct err e;
    int rc = kernels_hash(b->k, b->s, data, b->bytes, CHUNK, out, &e);
    if (rc == 0)
        rc = memory_stream_wait(b->s, WAIT_MS, &e);
    must(rc, &e, "hashing");
    return rc;
}

static void measure_hash(struct bench *b, const uint8_t *host, const void *device)
{
    uint64_t chunks = b->bytes / CHUNK;
    struct chunk_hash *here = host_alloc(chunks * sizeof *here), *found = host_alloc(chunks * sizeof *found);
    void *there = NULL;
    double seconds[ROUNDS], start = now_s();
    struct err e;
    for (uint64_t c = 0; c < chunks; c++)
        here[c] = chunk_hash(host + c * CHUNK, CHUNK);
    row(b, "hash, host, one core", true, "", "%.2f GB/s", gbps(b->bytes, now_s() - start));
    if (b->k) {
        must(memory_alloc(b->m, chunks * sizeof *here, &there, &e), &e, "device memory");
        for (int i = -1; i < ROUNDS; i++) {
            start = now_s();
            hash_device(b, device, there);
            if (i >= 0)
                seconds[i] = now_s() - start;
        }
        download(b, found, there, chunks * sizeof *found);
        row(b, "hash, kernel", memcmp(found, here, chunks * sizeof *here) == 0,
            "chunks of 4 MiB, as on the host", "%.2f GB/s", gbps(b->bytes, median(seconds, ROUNDS)));
        memory_free(b->m, there);
    }
    free(here);
    free(found);
}

/* ---- packing ---- */

/* A matrix of so many elements in device memory, packed into `packed` and compared with the host's doing; and
 * back. */
static void measure_box(struct bench *b, const char *what, enum dtype dtype, const uint64_t lengths[2],
                        const int64_t strides[2], uint8_t *host, uint8_t *device, uint8_t *packed)
{
    static const uint64_t none[2];
    uint64_t n = lengths[0] * lengths[1] * dtype_bits(dtype) / 8;
    uint8_t *expected = host_alloc(n), *found = host_alloc(b->bytes);
    struct box_copy box;
    struct strided s;
    struct strided_job job;
    double pack_s[ROUNDS], unpack_s[ROUNDS];
    struct err e;
    box_copy_init(&box, dtype, 2, lengths, none, lengths, strides, host);
    box_gather(&box, 0, n, expected);
    strided_init(&s, box.dims, box.unit, box.begin, box.end, box.pitch, box.strides);
    strided_job_init(&job, &s, 0, n, device, packed);
    for (int i = -1; i < ROUNDS; i++) {
        double start = now_s();
        int rc = kernels_pack(b->k, b->s, &job, &e);
        if (rc == 0)
            rc = memory_stream_wait(b->s, WAIT_MS, &e);
        double between = now_s();
        if (rc == 0)
            rc = kernels_unpack(b->k, b->s, &job, &e);
        if (rc == 0)
            rc = memory_stream_wait(b->s, WAIT_MS, &e);
        must(rc, &e, "packing");
        if (i >= 0) {
            pack_s[i] = between - start;
            unpack_s[i] = now_s() - between;
        }
    }
    char name[96];
    download(b, found, packed, n);
    snprintf(name, sizeof name, "pack, kernel, %s", what);
    row(b, name, memcmp(found, expected, n) == 0, "", "%.2f GB/s", gbps(n, median(pack_s, ROUNDS)));
    download(b, found, device, b->bytes); /* unpacked over itself: nothing may have changed */
    snprintf(name, sizeof name, "unpack, kernel, %s", what);
    row(b, name, memcmp(found, host, b->bytes) == 0, "", "%.2f GB/s", gbps(n, median(unpack_s, ROUNDS)));
    free(expected);
    free(found);
}

void measure_kernels(struct bench *b)
{
    void *device = NULL, *packed = NULL;
    uint8_t *host = host_alloc(b->bytes);
    struct err e;
    fill(host, b->bytes, 3);
    must(memory_alloc(b->m, b->bytes, &device, &e), &e, "device memory");
    upload(b, device, host, b->bytes);
    measure_hash(b, host, device);
    if (b->k) {
        uint64_t side = 1024, rows = b->bytes / (side * 2);
        must(memory_alloc(b->m, b->bytes, &packed, &e), &e, "device memory");
        measure_box(b, "rows of 1.5 KiB with gaps", DTYPE_BF16, (const uint64_t[2]){rows, 768},
                    (const int64_t[2]){2048, 2}, host, device, packed);
        measure_box(b, "bf16, transposed", DTYPE_BF16, (const uint64_t[2]){side, rows},
                    (const int64_t[2]){2, 2048}, host, device, packed);
        memory_free(b->m, packed);
    }
    memory_free(b->m, device);
    free(host);
}
