/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/demo/model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/demo/gemm.h"

enum {
    T = MODEL_CONTEXT,
    D = MODEL_WIDTH,
    V = MODEL_VOCABULARY,
    H = MODEL_HEADS,
    HD = MODEL_WIDTH / MODEL_HEADS,
    F = 4 * MODEL_WIDTH,
    L = MODEL_LAYERS
};

/* Where each tensor of a layer lies, in floats from the layer's start. */
enum {
    NORM1 = 0,
    QKV = NORM1 + D,
    OUT = QKV + D * 3 * D,
    NORM2 = OUT + D * D,
    UP = NORM2 + D,
    DOWN = UP + D * F,
    LAYER_FLOATS = DOWN + F * D,

    TOKENS = 0,
    PLACES = TOKENS + V * D,
    LAYERS = PLACES + T * D,
    NORM = LAYERS + L * LAYER_FLOATS,
    MODEL_FLOATS = NORM + D
};

#define EPSILON 1e-5f

struct layer_work {
    float in[T * D], rms1[T], normed1[T * D], qkv[T * 3 * D];
    float attention[H][T * T]; /* after the softmax */
    float mixed[T * D], middle[T * D], rms2[T], normed2[T * D], up[T * F], act[T * F];
};

struct model_work {
    struct layer_work layer[L];
    float out[T * D], rms[T], normed[T * D], logits[T * V];
    /* transposed weights, for the backward pass; tokens for the output layer */
    float tokens_t[D * V], qkv_t[L][3 * D * D], out_t[L][D * D], up_t[L][F * D], down_t[L][D * F];
    /* gradients of one sequence */
    float d_out[T * D], d_normed[T * D], d_qkv[T * 3 * D], d_mixed[T * D], d_act[T * F];
    float head_t[HD * T], d_scores[T * T];
};

size_t model_floats(void)
{
    return MODEL_FLOATS;
}

static size_t param_set(struct param *p, const char *name, unsigned dims, uint64_t rows, uint64_t columns,
                        size_t offset)
{
    snprintf(p->name, sizeof p->name, "%s", name);
    p->dims = dims;
    p->shape[0] = rows;
    p->shape[1] = columns;
    p->offset = offset;
    p->count = rows * columns;
    return offset + p->count;
}

void model_params(struct param out[MODEL_PARAMS])
{
    struct param *p = out;
    size_t at = param_set(p++, "tokens.weight", 2, V, D, TOKENS);
    at = param_set(p++, "places.weight", 2, T, D, at);
    for (int l = 0; l < L; l++) {
        static const struct {
            const char *name;
            unsigned dims;
            uint64_t rows, columns;
        } parts[] = {{"norm1.weight", 1, D, 1}, {"qkv.weight", 2, D, 3 * D}, {"out.weight", 2, D, D},
                     {"norm2.weight", 1, D, 1}, {"up.weight", 2, D, F},      {"down.weight", 2, F, D}};
        for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
            char name[32];
            snprintf(name, sizeof name, "layer.%d.%s", l, parts[i].name);
            at = param_set(p++, name, parts[i].dims, parts[i].rows, parts[i].columns, at);
        }
    }
    param_set(p, "norm.weight", 1, D, 1, at);
}

/* ---- randomness: splitmix64, and Box and Muller's transform ------------------------------------------ */

static uint64_t random_next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static float random_unit(uint64_t *state) /* (0, 1) */
{
    return ((float)(random_next(state) >> 41) + 0.5f) / 8388608.0f;
}

static float random_normal(uint64_t *state)
{
    float a = random_unit(state), b = random_unit(state);
    return sqrtf(-2.0f * logf(a)) * cosf(6.28318530718f * b);
}

void model_init(float *w, uint64_t seed)
{
    struct param params[MODEL_PARAMS];
    model_params(params);
    for (int i = 0; i < MODEL_PARAMS; i++) {
        const struct param *p = &params[i];
        /* layers that add to the residual stream start smaller, so that its size does not grow with depth */
        bool residual = strstr(p->name, "out.") || strstr(p->name, "down.");
        float spread = i < 2      ? 0.05f
                       : residual ? 0.5f / sqrtf((float)p->shape[0] * L)
                                  : 1.0f / sqrtf((float)p->shape[0]);
        for (size_t j = 0; j < p->count; j++)
            w[p->offset + j] = p->dims == 1 ? 1.0f : spread * random_normal(&seed);
    }
}

struct model_work *model_work_create(void)
{
    return calloc(1, sizeof(struct model_work));
}

void model_work_free(struct model_work *k)
{
    free(k);
}

void model_prepare(struct model_work *k, const float *w)
{
    transpose(w + TOKENS, V, D, k->tokens_t);
    for (int l = 0; l < L; l++) {
        const float *p = w + LAYERS + l * LAYER_FLOATS;
        transpose(p + QKV, D, 3 * D, k->qkv_t[l]);
        transpose(p + OUT, D, D, k->out_t[l]);
        transpose(p + UP, D, F, k->up_t[l]);
        transpose(p + DOWN, F, D, k->down_t[l]);
    }
}

/* ---- pieces ------------------------------------------------------------------------------------------- */

/* y (+)= x w, x being T rows of `depth`, w being depth rows of `columns`. */
static void rows_times(const float *x, size_t depth, const float *w, size_t columns, float *y, bool add)
{
    gemm(&(struct gemm){T, columns, depth, x, depth, 1, w, columns, y, columns, add});
}

/* g += x' dy: the gradient of a weight matrix of `depth` rows and `columns`. */
static void weight_gradient(const float *x, size_t depth, const float *dy, size_t columns, float *g)
{
    gemm(&(struct gemm){depth, columns, T, x, 1, depth, dy, columns, g, columns, true});
}

static void norm_forward(const float *x, const float *gain, float *rms, float *y)
{
    for (int t = 0; t < T; t++) {
        float sum = 0;
        for (int i = 0; i < D; i++)
            sum += x[t * D + i] * x[t * D + i];
        rms[t] = 1.0f / sqrtf(sum / D + EPSILON);
        for (int i = 0; i < D; i++)
            y[t * D + i] = x[t * D + i] * rms[t] * gain[i];
    }
}

/* With r = rms: dx = r (dy g) - x r^3 / D sum(dy g x). Adds to dx and to d_gain. */
static void norm_backward(const float *x, const float *gain, const float *rms, const float *dy, float *dx,
                          float *d_gain)
{
    for (int t = 0; t < T; t++) {
        const float *xt = x + t * D, *dyt = dy + t * D;
        float sum = 0, r = rms[t];
        for (int i = 0; i < D; i++)
            sum += dyt[i] * gain[i] * xt[i];
        float back = sum * r * r * r / D;
        for (int i = 0; i < D; i++) {
            d_gain[i] += dyt[i] * xt[i] * r;
            dx[t * D + i] += dyt[i] * gain[i] * r - xt[i] * back;
        }
    }
}

/* Softmax over the first n of a row; the rest becomes zero. */
static void softmax(float *row, int n, int width)
{
    float most = row[0], sum = 0;
    for (int i = 1; i < n; i++)
        most = row[i] > most ? row[i] : most;
    for (int i = 0; i < n; i++) {
        row[i] = expf(row[i] - most);
        sum += row[i];
    }
    for (int i = 0; i < n; i++)
        row[i] /= sum;
    memset(row + n, 0, (size_t)(width - n) * sizeof *row);
}

/* One head's columns of a T x 3D or T x D array, transposed: HD rows of T. */
static void head_transpose(const float *x, size_t row, float *out)
{
    for (int t = 0; t < T; t++)
        for (int i = 0; i < HD; i++)
            out[i * T + t] = x[t * row + i];
}

static void attention_forward(struct model_work *k, struct layer_work *y)
{
    const float scale = 1.0f / sqrtf(HD);
    for (int h = 0; h < H; h++) {
        const float *q = y->qkv + h * HD, *key = q + D, *value = q + 2 * D;
        float *p = y->attention[h];
        head_transpose(key, 3 * D, k->head_t);
        gemm(&(struct gemm){T, T, HD, q, 3 * D, 1, k->head_t, T, p, T, false});
        for (int t = 0; t < T; t++) {
            for (int i = 0; i <= t; i++)
                p[t * T + i] *= scale;
            softmax(p + t * T, t + 1, T);
        }
        gemm(&(struct gemm){T, HD, T, p, T, 1, value, 3 * D, y->mixed + h * HD, D, false});
    }
}

static void attention_backward(struct model_work *k, struct layer_work *y)
{
    const float scale = 1.0f / sqrtf(HD);
    for (int h = 0; h < H; h++) {
        const float *q = y->qkv + h * HD, *key = q + D, *value = q + 2 * D, *d_mixed = k->d_mixed + h * HD;
        float *d_q = k->d_qkv + h * HD, *d_key = d_q + D, *d_value = d_q + 2 * D;
        const float *p = y->attention[h];
        float *ds = k->d_scores;
        head_transpose(value, 3 * D, k->head_t);
        gemm(&(struct gemm){T, T, HD, d_mixed, D, 1, k->head_t, T, ds, T, false});
        for (int t = 0; t < T; t++) {
            float sum = 0;
            for (int i = 0; i <= t; i++)
                sum += ds[t * T + i] * p[t * T + i];
            for (int i = 0; i < T; i++)
                ds[t * T + i] = p[t * T + i] * (ds[t * T + i] - sum) * scale;
        }
        gemm(&(struct gemm){T, HD, T, p, 1, T, d_mixed, D, d_value, 3 * D, false});
        gemm(&(struct gemm){T, HD, T, ds, T, 1, key, 3 * D, d_q, 3 * D, false});
        gemm(&(struct gemm){T, HD, T, ds, 1, T, q, 3 * D, d_key, 3 * D, false});
    }
}

static void layer_forward(struct model_work *k, int l, const float *w, const float *in, float *out)
{
    struct layer_work *y = &k->layer[l];
    memcpy(y->in, in, sizeof y->in);
    norm_forward(y->in, w + NORM1, y->rms1, y->normed1);
    rows_times(y->normed1, D, w + QKV, 3 * D, y->qkv, false);
    attention_forward(k, y);
    memcpy(y->middle, y->in, sizeof y->middle);
    rows_times(y->mixed, D, w + OUT, D, y->middle, true);
    norm_forward(y->middle, w + NORM2, y->rms2, y->normed2);
    rows_times(y->normed2, D, w + UP, F, y->up, false);
    for (int i = 0; i < T * F; i++) {
        float u = y->up[i] > 0 ? y->up[i] : 0;
        y->act[i] = u * u;
    }
    memcpy(out, y->middle, sizeof y->middle);
    rows_times(y->act, F, w + DOWN, D, out, true);
}

/* k->d_out: gradient of the layer's output on entry, of its input on return. */
static void layer_backward(struct model_work *k, int l, const float *w, float *g)
{
    struct layer_work *y = &k->layer[l];
    weight_gradient(y->act, F, k->d_out, D, g + DOWN);
    rows_times(k->d_out, D, k->down_t[l], F, k->d_act, false);
    for (int i = 0; i < T * F; i++)
        k->d_act[i] *= y->up[i] > 0 ? 2 * y->up[i] : 0;
    weight_gradient(y->normed2, D, k->d_act, F, g + UP);
    rows_times(k->d_act, F, k->up_t[l], D, k->d_normed, false);
    norm_backward(y->middle, w + NORM2, y->rms2, k->d_normed, k->d_out, g + NORM2);

    weight_gradient(y->mixed, D, k->d_out, D, g + OUT);
    rows_times(k->d_out, D, k->out_t[l], D, k->d_mixed, false);
    attention_backward(k, y);
    weight_gradient(y->normed1, D, k->d_qkv, 3 * D, g + QKV);
    rows_times(k->d_qkv, 3 * D, k->qkv_t[l], D, k->d_normed, false);
    norm_backward(y->in, w + NORM1, y->rms1, k->d_normed, k->d_out, g + NORM1);
}

/* Leaves the probabilities of the next byte, for every place, in k->logits. */
static void forward(struct model_work *k, const float *w, const uint8_t *text)
{
    for (int t = 0; t < T; t++)
        for (int i = 0; i < D; i++)
            k->out[t * D + i] = w[TOKENS + text[t] * D + i] + w[PLACES + t * D + i];
    for (int l = 0; l < L; l++)
        layer_forward(k, l, w + LAYERS + l * LAYER_FLOATS, k->out, k->out);
    norm_forward(k->out, w + NORM, k->rms, k->normed);
    rows_times(k->normed, D, k->tokens_t, V, k->logits, false);
    for (int t = 0; t < T; t++)
        softmax(k->logits + t * V, V, V);
}

float model_learn(struct model_work *k, const float *w, const uint8_t *text, float scale, float *grad)
{
    forward(k, w, text);
    float loss = 0;
    for (int t = 0; t < T; t++) {
        float *p = k->logits + t * V;
        loss -= logf(p[text[t + 1]] + 1e-30f);
        p[text[t + 1]] -= 1.0f;
        for (int i = 0; i < V; i++)
            p[i] *= scale;
    }
    rows_times(k->logits, V, w + TOKENS, D, k->d_normed, false);
    weight_gradient(k->logits, V, k->normed, D, grad + TOKENS);
    memset(k->d_out, 0, sizeof k->d_out);
    norm_backward(k->out, w + NORM, k->rms, k->d_normed, k->d_out, grad + NORM);
    for (int l = L - 1; l >= 0; l--)
        layer_backward(k, l, w + LAYERS + l * LAYER_FLOATS, grad + LAYERS + l * LAYER_FLOATS);
    for (int t = 0; t < T; t++)
        for (int i = 0; i < D; i++) {
            grad[TOKENS + text[t] * D + i] += k->d_out[t * D + i];
            grad[PLACES + t * D + i] += k->d_out[t * D + i];
        }
    return loss / T;
}

/* Draws from p at the given temperature; 0: the likeliest. */
static uint8_t draw(const float *p, float temperature, uint64_t *seed)
{
    float q[V], sum = 0;
    int best = 0;
    for (int i = 0; i < V; i++) {
        best = p[i] > p[best] ? i : best;
        q[i] = temperature > 0 ? powf(p[i], 1 / temperature) : 0;
        sum += q[i];
    }
    if (temperature <= 0)
        return (uint8_t)best;
    float left = random_unit(seed) * sum;
    for (int i = 0; i < V; i++)
        if ((left -= q[i]) < 0)
            return (uint8_t)i;
    return (uint8_t)best;
}

void model_generate(struct model_work *k, const float *w, uint8_t *text, size_t given, size_t n,
                    float temperature, uint64_t seed)
{
    for (size_t at = given; at < n; at++) {
        size_t from = at > T ? at - T : 0;
        uint8_t window[T] = {0};
        memcpy(window, text + from, at - from);
        forward(k, w, window);
        text[at] = draw(k->logits + (at - from - 1) * V, temperature, &seed);
    }
}

void adam_update(const struct adam *a, uint64_t step, const float *grad, float *w, float *m, float *v,
                 size_t n)
{
    float c1 = 1.0f / (1.0f - powf(a->beta1, (float)step)), c2 = 1.0f / (1.0f - powf(a->beta2, (float)step));
    for (size_t i = 0; i < n; i++) {
        m[i] = a->beta1 * m[i] + (1 - a->beta1) * grad[i];
        v[i] = a->beta2 * v[i] + (1 - a->beta2) * grad[i] * grad[i];
        w[i] -= a->rate * (m[i] * c1) / (sqrtf(v[i] * c2) + a->epsilon);
    }
}
