/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One place that tensors lie in, host memory or a device, and the way between it and a scratch file: packs
 * what is strided, hashes, and reads or writes.
 */
#ifndef LARDER_CLIENT_SCRATCH_SIDE_H
#define LARDER_CLIENT_SCRATCH_SIDE_H

#include "format/scratch.h"
#include "gpudirect/file.h"

struct scratch_side;

/* A tensor's memory; strides in bytes, one per dimension, or NULL: packed. */
struct scratch_memory {
    uint8_t *data;
    const int64_t *strides;
};

must_check int scratch_side_open(enum memory_kind kind, int ordinal, enum file_want want,
                                 struct scratch_side **out, struct err *e);
void scratch_side_close(struct scratch_side *s); /* NULL allowed */
/* Before its tensors. */
must_check int scratch_side_file(struct scratch_side *s, const char *path, enum file_mode mode,
                                 struct file **out, struct err *e);
/* Waits until the caller's stream, of this device, has done what it was given so far. */
must_check int scratch_side_after(struct scratch_side *s, void *caller_stream, struct err *e);

/* Is all that the tensor touches memory of this place? ERR_INVALID; ERR_UNSUPPORTED: strided on a device, and
 * no kernels. */
must_check int scratch_side_check(struct scratch_side *s, const struct tensor *t,
                                  const struct scratch_memory *m, struct err *e);
/* hashes: SCRATCH_HASH_BYTES for each chunk. t->bytes > 0. */
must_check int scratch_side_write(struct scratch_side *s, const struct tensor *t,
                                  const struct scratch_memory *m, uint64_t place, uint8_t *hashes,
                                  struct err *e);
/* ERR_CORRUPT: a chunk's hash is another one; what was read is in memory all the same. */
must_check int scratch_side_read(struct scratch_side *s, const struct tensor *t,
                                 const struct scratch_memory *m, uint64_t place, const uint8_t *hashes,
                                 struct err *e);

enum memory_kind scratch_side_kind(const struct scratch_side *s);
int scratch_side_ordinal(const struct scratch_side *s);
/* "device 0: cuFile, direct; hashed by a kernel on the device". Returns text. */
char *scratch_side_text(const struct scratch_side *s, char *text, size_t size);

#endif
