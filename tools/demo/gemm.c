/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The product works on tiles of 4 rows by 16 columns held in registers. Each element is its own chain of
 * multiply, then add, in ascending k: vector width changes nothing, so the AVX2 twin gives the same bits.
 */
#include "tools/demo/gemm.h"

#include <string.h>

typedef float v8 __attribute__((vector_size(32)));

#define TILE_ROWS    4
#define TILE_COLUMNS 16

/* Loads and stores through memcpy: rows are only as aligned as floats are. */
static inline __attribute__((always_inline)) void load(v8 *v, const float *p)
{
    memcpy(v, p, sizeof *v);
}
static inline __attribute__((always_inline)) void store(float *p, const v8 *v)
{
    memcpy(p, v, sizeof *v);
}

static inline __attribute__((always_inline)) void tile(const struct gemm *g, size_t i, size_t j)
{
    v8 acc[TILE_ROWS][2];
    for (int r = 0; r < TILE_ROWS; r++) {
        acc[r][0] = acc[r][1] = (v8){0};
        if (g->add) {
            load(&acc[r][0], g->c + (i + r) * g->c_row + j);
            load(&acc[r][1], g->c + (i + r) * g->c_row + j + 8);
        }
    }
    const float *a = g->a + i * g->a_row, *b = g->b + j;
    for (size_t k = 0; k < g->depth; k++, a += g->a_column, b += g->b_row) {
        v8 b0, b1;
        load(&b0, b);
        load(&b1, b + 8);
        for (int r = 0; r < TILE_ROWS; r++) {
            float s = a[r * g->a_row];
            acc[r][0] = acc[r][0] + b0 * s;
            acc[r][1] = acc[r][1] + b1 * s;
        }
    }
    for (int r = 0; r < TILE_ROWS; r++) {
        store(g->c + (i + r) * g->c_row + j, &acc[r][0]);
        store(g->c + (i + r) * g->c_row + j + 8, &acc[r][1]);
    }
}

static inline __attribute__((always_inline)) void tiles(const struct gemm *g)
{
    for (size_t i = 0; i < g->rows; i += TILE_ROWS)
        for (size_t j = 0; j < g->columns; j += TILE_COLUMNS)
            tile(g, i, j);
}

void gemm_portable(const struct gemm *g)
{
    tiles(g);
}

#ifdef __x86_64__
__attribute__((target("avx2"))) static void gemm_avx2(const struct gemm *g)
{
    tiles(g);
}
#endif

void gemm(const struct gemm *g)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) {
        gemm_avx2(g);
        return;
    }
#endif
    gemm_portable(g);
}

void transpose(const float *in, size_t rows, size_t columns, float *out)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t j = 0; j < columns; j++)
            out[j * rows + i] = in[i * columns + j];
}
