/* SPDX-License-Identifier: Apache-2.0 */
#include "gpudirect/kernels.h"

#include <stdlib.h>

#include "gpudirect/kernels_image.h"

#define BLOCK_THREADS 256u
#define BLOCKS_MAX    4096u  /* fill any device many times over */
#define ROWS_MAX      65535u /* what a grid allows */

enum kernel { PACK, UNPACK, HASH_BEGIN, HASH_SUMS, HASH_END, SPIN, KERNELS };
static const char *const names[KERNELS] = {
    [PACK] = "larder_pack",           [UNPACK] = "larder_unpack",     [HASH_BEGIN] = "larder_hash_begin",
    [HASH_SUMS] = "larder_hash_sums", [HASH_END] = "larder_hash_end", [SPIN] = "larder_spin",
};

struct kernels {
    struct memory_module *module;
    void *functions[KERNELS];
};

int kernels_open(struct memory *m, const void *image, struct kernels **out, struct err *e)
{
    if (!image)
        return err_set(e, ERR_UNSUPPORTED,
                       "there are no kernels for GPUs in this build (%s); build it where nvcc is",
                       kernels_image_note());
    struct kernels *k = calloc(1, sizeof *k);
    if (!k)
        return err_set(e, ERR_NO_MEMORY, "no memory for kernels");
    int rc = memory_module_load(m, image, &k->module, e);
    for (int i = 0; rc == 0 && i < KERNELS; i++)
        rc = memory_module_function(k->module, names[i], &k->functions[i], e);
    if (rc < 0) {
        kernels_close(k);
        return err_prepend(e, "loading the kernels (%s)", kernels_image_note());
    }
    *out = k;
    return 0;
}

void kernels_close(struct kernels *k)
{
    if (k)
        memory_module_unload(k->module);
    free(k);
}

/* Enough blocks for `pieces` threads in each of the rows, but not more than keep a device busy. */
static uint32_t blocks_for(uint64_t pieces, uint32_t rows)
{
    uint64_t wanted = (pieces + BLOCK_THREADS - 1) / BLOCK_THREADS;
    uint32_t most = rows < BLOCKS_MAX ? BLOCKS_MAX / rows : 1;
    return wanted < most ? (uint32_t)wanted : most;
}

static int start(struct kernels *k, enum kernel which, struct memory_stream *s, uint32_t blocks,
                 uint32_t rows, void **arguments, struct err *e)
{
    struct memory_launch l = {.grid = {blocks, rows, 1}, .block = {BLOCK_THREADS, 1, 1}};
    int rc = memory_launch(s, k->functions[which], &l, arguments, e);
    return rc < 0 ? err_prepend(e, "starting %s", names[which]) : 0;
}

static int move(struct kernels *k, enum kernel which, struct memory_stream *s, const struct strided_job *job,
                struct err *e)
{
    struct strided_job copy = *job;
    return copy.count == 0 ? 0 : start(k, which, s, blocks_for(copy.count, 1), 1, (void *[]){&copy}, e);
}

int kernels_pack(struct kernels *k, struct memory_stream *s, const struct strided_job *job, struct err *e)
{
    return move(k, PACK, s, job, e);
}

int kernels_unpack(struct kernels *k, struct memory_stream *s, const struct strided_job *job, struct err *e)
{
    return move(k, UNPACK, s, job, e);
}

int kernels_hash(struct kernels *k, struct memory_stream *s, const void *data, uint64_t n,
                 uint64_t chunk_bytes, struct chunk_hash *out, struct err *e)
{
    check(n > 0 && chunk_bytes > 0);
    uint64_t chunks = (n - 1) / chunk_bytes + 1, longest = n < chunk_bytes ? n : chunk_bytes;
    uint64_t pieces = (longest - 1) / CHUNK_HASH_BLOCK + 1;
    int rc = start(k, HASH_BEGIN, s, blocks_for(chunks, 1), 1, (void *[]){&out, &chunks}, e);
    for (uint64_t first = 0; rc == 0 && first < chunks; first += ROWS_MAX) {
        uint32_t rows = chunks - first < ROWS_MAX ? (uint32_t)(chunks - first) : ROWS_MAX;
        rc = start(k, HASH_SUMS, s, blocks_for(pieces, rows), rows,
                   (void *[]){&data, &n, &chunk_bytes, &first, &out}, e);
    }
    if (rc == 0)
        rc = start(k, HASH_END, s, blocks_for(chunks, 1), 1, (void *[]){&out, &n, &chunk_bytes, &chunks}, e);
    return rc;
}

int kernels_spin(struct kernels *k, struct memory_stream *s, uint32_t blocks, uint64_t ns, struct err *e)
{
    return start(k, SPIN, s, blocks, 1, (void *[]){&ns}, e);
}
