/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: the demo's model really learns (its hand-written gradient is the gradient), and its arithmetic gives
 * the same bits whatever the vector width and whoever computes which micro-batch. Method: central
 * differences on the steepest weight of every tensor; the vector product beside its portable twin; Adam on
 * rows cut for two ranks beside rows cut for three.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tools/demo/gemm.h"
#include "tools/demo/model.h"

static void text_make(uint8_t text[MODEL_CONTEXT + 1])
{
    for (int i = 0; i <= MODEL_CONTEXT; i++)
        text[i] = (uint8_t)(32 + i * 37 % 90);
}

static float loss_at(struct model_work *k, float *w, size_t i, float value, const uint8_t *text,
                     float *ignored)
{
    float was = w[i];
    w[i] = value;
    model_prepare(k, w);
    float loss = model_learn(k, w, text, 0, ignored);
    w[i] = was;
    return loss;
}

static void test_gradient(void **state)
{
    struct param params[MODEL_PARAMS];
    uint8_t text[MODEL_CONTEXT + 1];
    size_t n = model_floats();
    float *w = calloc(n, sizeof *w), *g = calloc(n, sizeof *g), *ignored = calloc(n, sizeof *ignored);
    struct model_work *k = model_work_create();
    (void)state;
    assert_true(w && g && ignored && k);
    model_params(params);
    model_init(w, 1);
    text_make(text);
    model_prepare(k, w);
    model_learn(k, w, text, 1.0f / MODEL_CONTEXT, g);
    for (int p = 0; p < MODEL_PARAMS; p++) {
        size_t best = params[p].offset;
        for (size_t i = best; i < params[p].offset + params[p].count; i++)
            best = fabsf(g[i]) > fabsf(g[best]) ? i : best;
        float step = 1e-2f * (fabsf(w[best]) + 0.1f);
        float slope = (loss_at(k, w, best, w[best] + step, text, ignored) -
                       loss_at(k, w, best, w[best] - step, text, ignored)) /
                      (2 * step);
        if (fabsf(slope - g[best]) > 0.1f * fabsf(g[best]))
            fail_msg("%s: the gradient is %g, the slope %g", params[p].name, (double)g[best], (double)slope);
    }
    free(w);
    free(g);
    free(ignored);
    model_work_free(k);
}

static void test_product_does_not_depend_on_the_vector_unit(void **state)
{
    enum { ROWS = 12, COLUMNS = 48, DEPTH = 33 };
    static float a[ROWS * DEPTH], b[DEPTH * COLUMNS], c[2][ROWS * COLUMNS];
    uint32_t s = 1;
    (void)state;
    for (size_t i = 0; i < ROWS * DEPTH + DEPTH * COLUMNS; i++) {
        s = s * 1664525 + 1013904223;
        *(i < ROWS * DEPTH ? &a[i] : &b[i - ROWS * DEPTH]) = (float)(int32_t)s / 1e9f;
    }
    for (int add = 0; add < 2; add++) {
        struct gemm g = {ROWS, COLUMNS, DEPTH, a, DEPTH, 1, b, COLUMNS, c[0], COLUMNS, add};
        gemm(&g);
        g.c = c[1];
        gemm_portable(&g);
        assert_memory_equal(c[0], c[1], sizeof c[0]);
    }
    double sum = 0;
    for (int k = 0; k < DEPTH; k++)
        sum += 2.0 * (double)a[5 * DEPTH + k] * (double)b[k * COLUMNS + 17]; /* written once, then added */
    assert_true(fabs(sum - (double)c[0][5 * COLUMNS + 17]) < 1e-3);
}

static void test_updates_do_not_depend_on_the_cut(void **state)
{
    enum { N = 997 };
    static float grad[N], w[2][N], m[2][N], v[2][N];
    struct adam adam = {.rate = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f};
    (void)state;
    for (int i = 0; i < N; i++)
        grad[i] = w[0][i] = w[1][i] = sinf((float)i);
    for (uint64_t step = 1; step <= 5; step++)
        for (int cuts = 2; cuts <= 3; cuts++)
            for (int r = 0; r < cuts; r++) {
                size_t from = (size_t)(N * r / cuts), to = (size_t)(N * (r + 1) / cuts);
                adam_update(&adam, step, grad + from, w[cuts - 2] + from, m[cuts - 2] + from,
                            v[cuts - 2] + from, to - from);
            }
    assert_memory_equal(w[0], w[1], sizeof w[0]);
    assert_true(fabsf(w[0][1] - sinf(1)) > 0.04f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradient),
        cmocka_unit_test(test_product_does_not_depend_on_the_vector_unit),
        cmocka_unit_test(test_updates_do_not_depend_on_the_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
