/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What lets one source run on the host and on a GPU: C17 for the compiler, CUDA for nvcc. Functions marked
 * SHARED exist on both sides; they use integers and pointers only. Little-endian, like every machine that
 * CUDA runs on; the host side reads and writes through bytes and does not care.
 */
#ifndef LARDER_GPUDIRECT_PORTABLE_H
#define LARDER_GPUDIRECT_PORTABLE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define SHARED static __host__ __device__ __forceinline__
#else
#define SHARED static inline __attribute__((always_inline))
#endif

struct product {
    uint64_t lo, hi;
};

/* All 128 bits of a product. */
SHARED struct product multiply(uint64_t a, uint64_t b)
{
    struct product p;
#ifdef __CUDA_ARCH__
    p.lo = a * b;
    p.hi = __umul64hi(a, b);
#else
    unsigned __int128 all = (unsigned __int128)a * b;
    p.lo = (uint64_t)all;
    p.hi = (uint64_t)(all >> 64);
#endif
    return p;
}

#endif
