/* SPDX-License-Identifier: Apache-2.0 */
#include "client/scratch_side.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/box.h"
#include "gpudirect/hasher.h"
#include "gpudirect/kernels.h"
#include "gpudirect/kernels_image.h"

#define RUN_BYTES  (16u * SCRATCH_CHUNK_BYTES) /* of packed tensors, at once */
#define RUN_CHUNKS (RUN_BYTES / SCRATCH_CHUNK_BYTES)
#define KERNEL_MS  60000u

struct scratch_side {
    struct memory *m;
    struct file_access *access;
    struct file *file;
    struct hasher *hasher;
    struct kernels *kernels; /* of a device; NULL: there are none, no_kernels tells why */
    struct err no_kernels;
    struct memory_stream *stream; /* for them */
    void *buffer;                 /* a chunk that is packed, in this memory; made when needed */
};

/* ---- opening ---- */

int scratch_side_open(enum memory_kind kind, int ordinal, enum file_want want, struct scratch_side **out,
                      struct err *e)
{
    struct scratch_side *s = calloc(1, sizeof *s);
    if (!s)
        return err_set(e, ERR_NO_MEMORY, "no memory for a scratch file");
    int rc = memory_open(kind, ordinal, &s->m, e);
    if (rc == 0)
        rc = file_access_open(s->m, want, &s->access, e);
    if (rc == 0)
        rc = hasher_open(s->m, kernels_image(), &s->hasher, e);
    if (rc == 0)
        rc = memory_stream_create(s->m, &s->stream, e);
    if (rc == 0 && kind != MEMORY_HOST &&
        kernels_open(s->m, kernels_image(), &s->kernels, &s->no_kernels) < 0)
        rc = memory_lost(s->m, e);
    if (rc < 0) {
        scratch_side_close(s);
        return rc;
    }
    *out = s;
    return 0;
}

void scratch_side_close(struct scratch_side *s)
{
    if (!s)
        return;
    file_close(s->file);
    file_access_close(s->access);
    hasher_close(s->hasher);
    kernels_close(s->kernels);
    memory_stream_destroy(s->stream);
    if (s->buffer)
        memory_free(s->m, s->buffer);
    memory_close(s->m);
    free(s);
}

int scratch_side_file(struct scratch_side *s, const char *path, enum file_mode mode, struct file **out,
                      struct err *e)
{
    int rc = file_open(s->access, path, mode, &s->file, e);
    if (rc == 0)
        *out = s->file;
    return rc;
}

int scratch_side_after(struct scratch_side *s, void *caller_stream, struct err *e)
{
    return file_after_caller(s->access, caller_stream, e);
}

enum memory_kind scratch_side_kind(const struct scratch_side *s)
{
    return memory_kind(s->m);
}

int scratch_side_ordinal(const struct scratch_side *s)
{
    return memory_ordinal(s->m);
}

char *scratch_side_text(const struct scratch_side *s, char *text, size_t size)
{
    if (memory_kind(s->m) == MEMORY_HOST)
        snprintf(text, size, "host memory: %s", file_path(s->file));
    else
        snprintf(text, size, "device %d: %s; hashed %s", memory_ordinal(s->m), file_path(s->file),
                 hasher_path(s->hasher));
    return text;
}

/* ---- strides ---- */

int scratch_side_check(struct scratch_side *s, const struct tensor *t, const struct scratch_memory *m,
                       struct err *e)
{
    int64_t low = 0, high = (int64_t)t->bytes;
    int rc = 0;
    if (m->strides && memory_kind(s->m) != MEMORY_HOST && !s->kernels)
        return err_set(e, ERR_UNSUPPORTED, "it is strided, on a device, and is packed by a kernel: %s",
                       s->no_kernels.text);
    if (m->strides)
        rc = box_extent(t->dtype, t->dims, t->lengths, m->strides, &low, &high, e);
    return rc < 0 ? rc : memory_check(s->m, m->data + low, (size_t)(high - low), e);
}

static void whole_box(struct box_copy *b, const struct tensor *t, const struct scratch_memory *m)
{
    static const uint64_t begin[TENSOR_DIMS_MAX];
    box_copy_init(b, t->dtype, t->dims, t->lengths, begin, t->lengths, m->strides, m->data);
}

enum way { TO_PACKED, FROM_PACKED };

static int pack_on_device(struct scratch_side *s, enum way way, const struct box_copy *b, uint64_t offset,
                          size_t n, struct err *e)
{
    struct strided box;
    struct strided_job job;
    strided_init(&box, b->dims, b->unit, b->begin, b->end, b->pitch, b->strides);
    strided_job_init(&job, &box, offset, n, b->memory, s->buffer);
    int rc = way == TO_PACKED ? kernels_pack(s->kernels, s->stream, &job, e)
                              : kernels_unpack(s->kernels, s->stream, &job, e);
    return rc < 0 ? rc : memory_stream_wait(s->stream, KERNEL_MS, e);
}

/* Between the strided tensor's packed bytes [offset, offset + n) and the buffer. */
static int pack(struct scratch_side *s, enum way way, const struct tensor *t, const struct scratch_memory *m,
                uint64_t offset, size_t n, struct err *e)
{
    struct box_copy b;
    whole_box(&b, t, m);
    if (memory_kind(s->m) != MEMORY_HOST)
        return pack_on_device(s, way, &b, offset, n, e);
    if (way == TO_PACKED)
        box_gather(&b, offset, n, s->buffer);
    else
        box_scatter(&b, offset, n, s->buffer);
    return 0;
}

/* ---- bytes ---- */

static int hash(struct scratch_side *s, const void *p, size_t n, struct chunk_hash *out, struct err *e)
{
    return hasher_run(s->hasher, p, n, SCRATCH_CHUNK_BYTES, out, e);
}

static int write_run(struct scratch_side *s, const uint8_t *p, size_t n, uint64_t place, uint8_t *hashes,
                     struct err *e)
{
    struct chunk_hash found[RUN_CHUNKS];
    int rc = hash(s, p, n, found, e);
    for (uint64_t i = 0; rc == 0 && i < scratch_chunks(n); i++) {
        le64_put(hashes + SCRATCH_HASH_BYTES * i, found[i].lo);
        le64_put(hashes + SCRATCH_HASH_BYTES * i + 8, found[i].hi);
    }
    return rc < 0 ? rc : file_write(s->file, place, n, p, e);
}

static int read_run(struct scratch_side *s, uint8_t *p, size_t n, uint64_t place, const uint8_t *hashes,
                    struct err *e)
{
    struct chunk_hash found[RUN_CHUNKS];
    int rc = file_read(s->file, place, n, p, e);
    if (rc == 0)
        rc = hash(s, p, n, found, e);
    for (uint64_t i = 0; rc == 0 && i < scratch_chunks(n); i++)
        if (found[i].lo != le64_get(hashes + SCRATCH_HASH_BYTES * i) ||
            found[i].hi != le64_get(hashes + SCRATCH_HASH_BYTES * i + 8))
            rc = err_set(e, ERR_CORRUPT,
                         "the bytes in the file from %llu on are damaged: their hash is another one",
                         (unsigned long long)(place + i * SCRATCH_CHUNK_BYTES));
    return rc;
}

static int buffer_ready(struct scratch_side *s, struct err *e)
{
    return s->buffer ? 0 : memory_alloc(s->m, SCRATCH_CHUNK_BYTES, &s->buffer, e);
}

/* Packed tensors go in long runs from where they lie, others chunk by chunk through the buffer. */
static int start(struct scratch_side *s, const struct scratch_memory *m, size_t *step, struct err *e)
{
    *step = m->strides ? SCRATCH_CHUNK_BYTES : RUN_BYTES;
    return m->strides ? buffer_ready(s, e) : 0;
}

int scratch_side_write(struct scratch_side *s, const struct tensor *t, const struct scratch_memory *m,
                       uint64_t place, uint8_t *hashes, struct err *e)
{
    size_t step, n;
    int rc = start(s, m, &step, e);
    for (uint64_t at = 0; rc == 0 && at < t->bytes; at += n) {
        n = t->bytes - at < step ? (size_t)(t->bytes - at) : step;
        if (m->strides)
            rc = pack(s, TO_PACKED, t, m, at, n, e);
        if (rc == 0)
            rc = write_run(s, m->strides ? s->buffer : m->data + at, n, place + at,
                           hashes + at / SCRATCH_CHUNK_BYTES * SCRATCH_HASH_BYTES, e);
    }
    return rc;
}

int scratch_side_read(struct scratch_side *s, const struct tensor *t, const struct scratch_memory *m,
                      uint64_t place, const uint8_t *hashes, struct err *e)
{
    size_t step, n;
    int rc = start(s, m, &step, e);
    for (uint64_t at = 0; rc == 0 && at < t->bytes; at += n) {
        n = t->bytes - at < step ? (size_t)(t->bytes - at) : step;
        rc = read_run(s, m->strides ? s->buffer : m->data + at, n, place + at,
                      hashes + at / SCRATCH_CHUNK_BYTES * SCRATCH_HASH_BYTES, e);
        if (rc == 0 && m->strides)
            rc = pack(s, FROM_PACKED, t, m, at, n, e);
    }
    return rc;
}
