/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small language model over bytes: a pre-norm transformer with RMSNorm, causal attention, a squared-ReLU
 * feed-forward layer and a tied output layer, its backward pass written out by hand.
 *
 * Every sum is taken in a fixed order and no operation depends on vector width, so one machine gives the same
 * bits whatever process computes a micro-batch. That is what lets the demo compare final weights by SHA-256.
 */
#ifndef LARDER_DEMO_MODEL_H
#define LARDER_DEMO_MODEL_H

#include <stddef.h>
#include <stdint.h>

#define MODEL_VOCABULARY 256
#define MODEL_CONTEXT    64
#define MODEL_WIDTH      64
#define MODEL_HEADS      4
#define MODEL_LAYERS     3
#define MODEL_PARAMS     (2 + 6 * MODEL_LAYERS + 1)

struct param {
    char name[32];
    unsigned dims;
    uint64_t shape[2]; /* shape[1] is 1 where dims is 1 */
    size_t offset;     /* first float in the flat array of weights */
    size_t count;
};

/* The parameter tensors, in the order in which they lie in the flat array. */
void model_params(struct param out[MODEL_PARAMS]);
size_t model_floats(void);

/* Fills w (model_floats() of them) from a seed. */
void model_init(float *w, uint64_t seed);

/* Memory for the activations of one sequence and for transposed weights: one per process. NULL: no memory. */
struct model_work *model_work_create(void);
void model_work_free(struct model_work *k);
/* Call after the weights changed, before the calls below. */
void model_prepare(struct model_work *k, const float *w);

/* text holds MODEL_CONTEXT + 1 bytes. Adds `scale` times the gradient of the summed loss to grad; returns the
 * mean loss of a byte, in nats. */
float model_learn(struct model_work *k, const float *w, const uint8_t *text, float scale, float *grad);

/* Continues `text` (n bytes of room, the first `given` are set) byte by byte. temperature 0: the likeliest.
 */
void model_generate(struct model_work *k, const float *w, uint8_t *text, size_t given, size_t n,
                    float temperature, uint64_t seed);

/* Adam over elements [from, to) of the flat arrays; step counts from 1. */
struct adam {
    float rate, beta1, beta2, epsilon;
};
void adam_update(const struct adam *a, uint64_t step, const float *grad, float *w, float *m, float *v,
                 size_t n);

#endif
