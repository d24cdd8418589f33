/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <sched.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "format/limits.h"
#include "tools/bench.h"

static uint64_t next(uint64_t *s)
{
    uint64_t z = *s += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* A normal deviate of spread 0.02, as weights have, by Box and Muller's transform. */
static float weight(uint64_t *s)
{
    float a = ((float)(next(s) >> 41) + 0.5f) / 8388608.0f, b = (float)(next(s) >> 40) / 16777216.0f;
    return 0.02f * sqrtf(-2.0f * logf(a)) * cosf(6.28318530718f * b);
}

/* Round to nearest, ties to even. */
static uint16_t bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

bool bench_dtype(const char *kind, enum dtype *out)
{
    *out = strcmp(kind, "bf16-gaussian") == 0   ? DTYPE_BF16
           : strcmp(kind, "fp32-gaussian") == 0 ? DTYPE_F32
                                                : DTYPE_U8;
    return *out != DTYPE_U8 || strcmp(kind, "random") == 0 || strcmp(kind, "zero") == 0;
}

/* Chunks are compressed one by one, so one chunk's worth of numbers, repeated, is as good as all different.
 */
bool bench_fill(const char *kind, uint64_t seed, void *p, size_t n)
{
    enum dtype dtype;
    if (!bench_dtype(kind, &dtype))
        return false;
    if (strcmp(kind, "zero") == 0) {
        memset(p, 0, n);
        return true;
    }
    size_t first = n < CHUNK_PLAIN_BYTES_MAX ? n : CHUNK_PLAIN_BYTES_MAX;
    for (size_t i = 0; dtype == DTYPE_BF16 && i < first / 2; i++)
        ((uint16_t *)p)[i] = bf16(weight(&seed));
    for (size_t i = 0; dtype == DTYPE_F32 && i < first / 4; i++)
        ((float *)p)[i] = weight(&seed);
    for (size_t i = 0; dtype == DTYPE_U8 && i < first / 8; i++)
        ((uint64_t *)p)[i] = next(&seed);
    for (size_t at = first; at < n; at += first)
        memcpy((char *)p + at, p, n - at < first ? n - at : first);
    return true;
}

double cpu_now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int cores_usable(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
}
