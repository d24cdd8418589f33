/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels of kernels.cu on a device: loading them and starting them. Every start is a request to a stream
 * and returns before it is done; what it reads and writes stays in place until then. An error while a kernel
 * runs ends the device's context, and is told by the next wait (memory.h).
 */
#ifndef LARDER_GPUDIRECT_KERNELS_H
#define LARDER_GPUDIRECT_KERNELS_H

#include "gpudirect/chunk_hash.h"
#include "gpudirect/memory.h"
#include "gpudirect/strided.h"

struct kernels;

/* image: kernels_image(). ERR_UNSUPPORTED: it is NULL (built without nvcc), the device or the driver cannot
 * run it, or m is host memory. m stays open longer. */
must_check int kernels_open(struct memory *m, const void *image, struct kernels **out, struct err *e);
/* None of them may be running. NULL allowed. */
void kernels_close(struct kernels *k);

/* From strided memory to packed bytes, and back, all on the device; the twins are box_gather and box_scatter
 * of client/box.h. Rows that lie dense run at the speed of memory; elements that lie apart cost a memory
 * transaction each, and still more of them get through than a bus to the host carries. The job is copied. */
must_check int kernels_pack(struct kernels *k, struct memory_stream *s, const struct strided_job *job,
                            struct err *e);
must_check int kernels_unpack(struct kernels *k, struct memory_stream *s, const struct strided_job *job,
                              struct err *e);

/* Hashes n > 0 bytes of device memory, in chunks of chunk_bytes > 0 (the last may be shorter): out[c], in
 * device memory, aligned to 8 bytes, becomes what chunk_hash gives for chunk c. */
must_check int kernels_hash(struct kernels *k, struct memory_stream *s, const void *data, uint64_t n,
                            uint64_t chunk_bytes, struct chunk_hash *out, struct err *e);

/* Keeps `blocks` processors busy for ns nanoseconds: a stand-in for a training step, for measuring what runs
 * beside it. */
must_check int kernels_spin(struct kernels *k, struct memory_stream *s, uint32_t blocks, uint64_t ns,
                            struct err *e);

#endif
