/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What larder runs on a GPU. nvcc makes the image of it that kernels_image.h hands out; the C compiler makes
 * the same code for the host (kernels_host.h), where its logic is tested. Any number of threads may run a
 * kernel: each takes every THREADS-th piece of the work from its own number on, so results never depend on
 * how it is started.
 */
#include "gpudirect/chunk_hash.h"
#include "gpudirect/strided.h"

#ifdef __CUDACC__
#define KERNEL          extern "C" __global__ void
#define PARAMETER(type) const __grid_constant__ type
#define THREAD          ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x)
#define THREADS         ((uint64_t)gridDim.x * blockDim.x)
#define ROW             blockIdx.y
typedef ulonglong2 bytes16;

/* All threads of a warp come here: one of them adds for all. */
static __device__ void sum_add(struct chunk_hash *to, struct chunk_hash sum)
{
    for (int apart = 16; apart > 0; apart /= 2) {
        sum.lo += __shfl_down_sync(0xffffffffu, sum.lo, apart);
        sum.hi += __shfl_down_sync(0xffffffffu, sum.hi, apart);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd((unsigned long long *)&to->lo, sum.lo);
        atomicAdd((unsigned long long *)&to->hi, sum.hi);
    }
}

static __device__ uint64_t now_ns(void)
{
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}
#else
#include <string.h>
#include <time.h>

#include "gpudirect/kernels_host.h"

#define KERNEL          static void
#define PARAMETER(type) const type
#define THREAD          place.thread
#define THREADS         place.threads
#define ROW             place.row
typedef struct __attribute__((may_alias)) {
    uint64_t x, y;
} bytes16;

static _Thread_local struct {
    uint64_t thread, threads;
    uint32_t row;
} place;

static void sum_add(struct chunk_hash *to, struct chunk_hash sum)
{
    to->lo += sum.lo;
    to->hi += sum.hi;
}

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
#endif

typedef uint16_t __attribute__((may_alias)) word16;
typedef uint32_t __attribute__((may_alias)) word32;
typedef uint64_t __attribute__((may_alias)) word64;

/* ---- strided tensors ---- */

/* unit bytes, aligned to unit on both sides. */
SHARED void unit_copy(uint8_t *to, const uint8_t *from, uint32_t unit)
{
    switch (unit) {
    case 1: *to = *from; break;
    case 2: *(word16 *)to = *(const word16 *)from; break;
    case 4: *(word32 *)to = *(const word32 *)from; break;
    case 8: *(word64 *)to = *(const word64 *)from; break;
    default: *(bytes16 *)to = *(const bytes16 *)from; break;
    }
}

/* From memory to packed bytes; all units of the job lie in the region. */
KERNEL larder_pack(PARAMETER(struct strided_job) job)
{
    for (uint64_t i = THREAD; i < job.count; i += THREADS) {
        int64_t at;
        if (strided_at(&job.box, job.first + i, &at))
            unit_copy(job.packed + i * job.box.unit, job.memory + at, job.box.unit);
    }
}

/* From packed bytes to memory, as far as they lie in the region. */
KERNEL larder_unpack(PARAMETER(struct strided_job) job)
{
    for (uint64_t i = THREAD; i < job.count; i += THREADS) {
        int64_t at;
        if (strided_at(&job.box, job.first + i, &at))
            unit_copy(job.memory + at, job.packed + i * job.box.unit, job.box.unit);
    }
}

/* ---- hashes of chunks: begin, sums, end, in this order ---- */

/* A word of 64 bits by loads of the width that its alignment allows. */
SHARED uint64_t word_at(const uint8_t *p, uint32_t width)
{
    uint64_t v = 0;
    switch (width) {
    case 1:
        for (int i = 0; i < 8; i++)
            v |= (uint64_t)p[i] << 8 * i;
        return v;
    case 2:
        for (int i = 0; i < 4; i++)
            v |= (uint64_t)((const word16 *)p)[i] << 16 * i;
        return v;
    case 4: return ((const word32 *)p)[0] | (uint64_t)((const word32 *)p)[1] << 32;
    default: return *(const word64 *)p;
    }
}

SHARED uint64_t word_of_tail(const uint8_t *p, const uint8_t *end)
{
    uint64_t v = 0;
    for (int i = 0; i < 8 && p + i < end; i++)
        v |= (uint64_t)p[i] << 8 * i;
    return v;
}

SHARED void block_add(struct chunk_hash *sum, uint64_t turn, const uint8_t *p, const uint8_t *end,
                      uint32_t width)
{
    if (end - p < (ptrdiff_t)CHUNK_HASH_BLOCK) {
        uint64_t w[4];
        for (int i = 0; i < 4; i++)
            w[i] = p + 8 * i < end ? word_of_tail(p + 8 * i, end) : 0;
        chunk_hash_add(sum, turn, w[0], w[1], w[2], w[3]);
    } else if (width == 16) {
        bytes16 a = ((const bytes16 *)p)[0], b = ((const bytes16 *)p)[1];
        chunk_hash_add(sum, turn, a.x, a.y, b.x, b.y);
    } else {
        chunk_hash_add(sum, turn, word_at(p, width), word_at(p + 8, width), word_at(p + 16, width),
                       word_at(p + 24, width));
    }
}

KERNEL larder_hash_begin(struct chunk_hash *out, uint64_t chunks)
{
    for (uint64_t i = THREAD; i < chunks; i += THREADS)
        out[i].lo = out[i].hi = 0;
}

/* Row r of the grid takes chunk `first + r`: bytes [c * chunk_bytes, (c + 1) * chunk_bytes) of the data, as
 * far as it goes. */
KERNEL larder_hash_sums(const uint8_t *data, uint64_t n, uint64_t chunk_bytes, uint64_t first,
                        struct chunk_hash *out)
{
    uint64_t chunk = first + ROW, at = chunk * chunk_bytes;
    const uint8_t *p = data + at, *end = data + (n - at < chunk_bytes ? n : at + chunk_bytes);
    uint64_t blocks = ((uint64_t)(end - p) + CHUNK_HASH_BLOCK - 1) / CHUNK_HASH_BLOCK;
    uint32_t alignment = (uint32_t)((uintptr_t)p | 16), width = alignment & (0u - alignment);
    struct chunk_hash sum = {0, 0};
    for (uint64_t i = THREAD; i < blocks; i += THREADS)
        block_add(&sum, i * CHUNK_HASH_G, p + i * CHUNK_HASH_BLOCK, end, width);
    sum_add(&out[chunk], sum);
}

KERNEL larder_hash_end(struct chunk_hash *out, uint64_t n, uint64_t chunk_bytes, uint64_t chunks)
{
    for (uint64_t i = THREAD; i < chunks; i += THREADS) {
        uint64_t left = n - i * chunk_bytes;
        out[i] = chunk_hash_end(out[i], left < chunk_bytes ? left : chunk_bytes);
    }
}

/* ---- for measuring ---- */

/* Keeps the processors that it was given busy for so long. */
KERNEL larder_spin(uint64_t ns)
{
    for (uint64_t start = now_ns(); now_ns() - start < ns;)
        ;
}

/* ---- the host's side ---- */

#ifndef __CUDACC__
static void run_pack(void *const *p)
{
    larder_pack(*(const struct strided_job *)p[0]);
}

static void run_unpack(void *const *p)
{
    larder_unpack(*(const struct strided_job *)p[0]);
}

static void run_hash_begin(void *const *p)
{
    larder_hash_begin(*(struct chunk_hash *const *)p[0], *(const uint64_t *)p[1]);
}

static void run_hash_sums(void *const *p)
{
    larder_hash_sums(*(const uint8_t *const *)p[0], *(const uint64_t *)p[1], *(const uint64_t *)p[2],
                     *(const uint64_t *)p[3], *(struct chunk_hash *const *)p[4]);
}

static void run_hash_end(void *const *p)
{
    larder_hash_end(*(struct chunk_hash *const *)p[0], *(const uint64_t *)p[1], *(const uint64_t *)p[2],
                    *(const uint64_t *)p[3]);
}

static void run_spin(void *const *p)
{
    if (place.thread == 0 && place.row == 0)
        larder_spin(*(const uint64_t *)p[0]);
}

static const struct kernel_host kernels[] = {
    {"larder_pack", 1, {sizeof(struct strided_job)}, run_pack},
    {"larder_unpack", 1, {sizeof(struct strided_job)}, run_unpack},
    {"larder_hash_begin", 2, {8, 8}, run_hash_begin},
    {"larder_hash_sums", 5, {8, 8, 8, 8, 8}, run_hash_sums},
    {"larder_hash_end", 4, {8, 8, 8, 8}, run_hash_end},
    {"larder_spin", 1, {8}, run_spin},
};

const struct kernel_host *kernel_host_find(const char *name)
{
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        if (strcmp(kernels[i].name, name) == 0)
            return &kernels[i];
    return NULL;
}

void kernel_host_run(const struct kernel_host *k, uint64_t threads, uint32_t rows, void *const *parameters)
{
    place.threads = threads;
    for (place.row = 0; place.row < rows; place.row++)
        for (place.thread = 0; place.thread < threads; place.thread++)
            k->run(parameters);
}
#endif
