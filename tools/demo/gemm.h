/* SPDX-License-Identifier: Apache-2.0 */
/* One matrix product serves forward and backward pass. */
#ifndef LARDER_DEMO_GEMM_H
#define LARDER_DEMO_GEMM_H

#include <stdbool.h>
#include <stddef.h>

/* c[i][j] (+)= sum over k, ascending, of a[i][k] * b[k][j]; i < rows (a multiple of 4), j < columns (a
 * multiple of 16). a[i][k] lies at a[i * a_row + k * a_column], so it may be read transposed; b and c have
 * contiguous rows b_row and c_row floats apart. */
struct gemm {
    size_t rows, columns, depth;
    const float *a;
    size_t a_row, a_column;
    const float *b;
    size_t b_row;
    float *c;
    size_t c_row;
    bool add;
};
void gemm(const struct gemm *g);
/* The same bits, without vector instructions of our choice: for tests. */
void gemm_portable(const struct gemm *g);

/* out[j][i] = in[i][j]. */
void transpose(const float *in, size_t rows, size_t columns, float *out);

#endif
