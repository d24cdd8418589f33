/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trainer with two devices, for tests on the stand-in for CUDA's driver (standin.h): memory and a stream of
 * its own on each, a client of a real larderd, and what is done with tensors of bytes again and again.
 */
#ifndef LARDER_TESTS_TRAINER_H
#define LARDER_TESTS_TRAINER_H

#include "client/larder.h"
#include "tests/support/daemon.h"
#include "tests/support/good.h"
#include "tests/support/standin.h"

#define TRAINER_SETTINGS "devices=2 memory=256M seed=11 delay_us=200"
#define TRAINER_DEVICES  2

/* Fails the test with what the call said in `e`. */
struct trainer {
    const struct standin *cuda;
    struct memory *device[TRAINER_DEVICES];
    struct memory_stream *stream[TRAINER_DEVICES];
    struct larder *client;
    bool keeps; /* the test lets something stay on a device */
};

/* The stand-in begins anew. All of them fail the test where they cannot do what they say. */
struct trainer *trainer_begin(const struct standin *cuda, const struct daemon *server);
/* Whatever was done, nothing is left on any device, unless one was lost. */
void trainer_end(struct trainer *t);

void *trainer_stream(const struct trainer *t, int device); /* a CUstream */
uint8_t *trainer_memory(struct trainer *t, int device, size_t n);
/* Given to the trainer's stream: done late. */
void trainer_fill(struct trainer *t, int device, uint8_t *p, uint8_t value, size_t n);
/* Until its stream has done all. */
void trainer_wait(struct trainer *t, int device);

void trainer_bytes(uint8_t *p, size_t n, uint64_t seed); /* host memory */
void trainer_all(const uint8_t *p, uint8_t value, size_t n);

struct larder_save *trainer_save(struct larder *c, const char *run, uint64_t step, uint32_t rank,
                                 uint32_t world);
struct larder_restore *trainer_restore(struct larder *c, const char *run); /* of the newest checkpoint */
struct larder_tensor trainer_tensor(struct trainer *t, const char *name, int device, void *p, uint64_t n);
/* Reads one tensor of bytes of the newest checkpoint into host memory. */
void trainer_read(struct larder *c, const char *run, const char *name, uint8_t *out);

#endif
