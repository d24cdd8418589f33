/* SPDX-License-Identifier: Apache-2.0 */
#include "client/packer.h"

#include "gpudirect/kernels_image.h"

bool packer_ready(struct packer *p, struct memory *m)
{
    void *memory = NULL;
    if (memory_kind(m) == MEMORY_HOST || p->refused)
        return false;
    p->refused = !p->kernels && kernels_open(m, kernels_image(), &p->kernels, NULL) < 0;
    if (!p->refused && !p->memory && memory_alloc(m, CHUNK_PLAIN_BYTES_MAX, &memory, NULL) == 0)
        p->memory = memory;
    return p->memory != NULL;
}

int packer_move(struct packer *p, struct memory_stream *s, enum memory_direction d, const struct box_copy *b,
                uint64_t offset, size_t n, uint8_t *packed, struct err *e)
{
    struct strided box;
    struct strided_job job;
    check(n <= CHUNK_PLAIN_BYTES_MAX);
    strided_init(&box, b->dims, b->unit, b->begin, b->end, b->pitch, b->strides);
    strided_job_init(&job, &box, offset, n, b->memory, p->memory);
    if (d == MEMORY_OUT) {
        int rc = kernels_pack(p->kernels, s, &job, e);
        return rc < 0 ? rc : memory_copy(s, MEMORY_OUT, packed, p->memory, n, e);
    }
    int rc = memory_copy(s, MEMORY_IN, p->memory, packed, n, e);
    return rc < 0 ? rc : kernels_unpack(p->kernels, s, &job, e);
}

void packer_end(struct packer *p, struct memory *m)
{
    kernels_close(p->kernels);
    memory_free(m, p->memory);
    *p = (struct packer){0};
}
