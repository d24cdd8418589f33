/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Strided tensors in a device's memory on their way to or from packed host memory by way of a kernel: it
 * packs them into device memory of its own (or unpacks from there), and one dense copy does the rest. For
 * elements that lie apart this is two requests instead of one for each.
 */
#ifndef LARDER_CLIENT_PACKER_H
#define LARDER_CLIENT_PACKER_H

#include "client/box.h"
#include "gpudirect/kernels.h"

/* Of one stream: its memory is used again in the stream's order. Zeroed: nothing is made yet. */
struct packer {
    struct kernels *kernels;
    uint8_t *memory; /* CHUNK_PLAIN_BYTES_MAX on the device */
    bool refused;    /* there are no kernels */
};

/* Makes what it needs, the first time. False: this build, device or driver has no kernels, or the device no
 * memory left. One thread at a time. */
bool packer_ready(struct packer *p, struct memory *m);
/* As transfer; n <= CHUNK_PLAIN_BYTES_MAX; ready. */
must_check int packer_move(struct packer *p, struct memory_stream *s, enum memory_direction d,
                           const struct box_copy *b, uint64_t offset, size_t n, uint8_t *packed,
                           struct err *e);
/* When nothing of it is under way. */
void packer_end(struct packer *p, struct memory *m);

#endif
