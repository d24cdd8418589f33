/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: the kernels, compiled for the host, do what their host twins do, however many threads run them.
 * Method: random boxes, regions, ranges and alignments against box_gather and box_scatter of the client,
 * which know nothing of units and inverses; random lengths and alignments against chunk_hash; guard bytes
 * around everything that is written.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/box.h"
#include "gpudirect/chunk_hash.h"
#include "gpudirect/kernels_host.h"
#include "gpudirect/strided.h"

static uint64_t seed = 0x9e3779b97f4a7c15ull;

static uint64_t next(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed * 0x2545f4914f6cdd1dull;
}

static uint64_t below(uint64_t n)
{
    return next() % n;
}

static void fill(uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)(next() >> 56);
}

static void run(const char *name, void *const *parameters, uint32_t rows)
{
    const struct kernel_host *k = kernel_host_find(name);
    assert_non_null(k);
    kernel_host_run(k, 1 + below(70), rows, parameters);
}

/* ---- packing ---- */

#define MEMORY (1u << 20)
#define PACKED (1u << 17)

struct world {
    uint8_t *memory, *again; /* the region's first element is in the middle */
    uint8_t *packed, *expected;
    struct box_copy box;
    struct strided strided;
    uint64_t bytes; /* of the packed box */
};

static const enum dtype dtypes[] = {DTYPE_U8, DTYPE_BF16, DTYPE_F32, DTYPE_F64, DTYPE_C128};

/* Up to 16 dimensions in random order and of either direction in memory, with gaps, at times repeated. */
static void random_box(struct world *w, bool writable)
{
    enum dtype dtype = dtypes[below(5)];
    uint32_t dims = 1 + (uint32_t)below(below(8) ? 4 : TENSOR_DIMS_MAX), order[TENSOR_DIMS_MAX];
    uint64_t lengths[TENSOR_DIMS_MAX], begin[TENSOR_DIMS_MAX], count[TENSOR_DIMS_MAX], elements = 1;
    int64_t stride[TENSOR_DIMS_MAX], reach = dtype_bits(dtype) / 8;
    bool dense = below(3) == 0;
    for (uint32_t i = 0; i < dims; i++) {
        uint64_t most = 1024 / elements < 1 ? 1 : 1024 / elements;
        lengths[i] = 1 + below(most < 40 ? most : 40);
        elements *= lengths[i];
        count[i] = below(3) ? lengths[i] : 1 + below(lengths[i]);
        begin[i] = below(lengths[i] - count[i] + 1);
        order[i] = i;
    }
    for (uint32_t i = dims; i-- > 1 && !dense;) {
        uint32_t j = (uint32_t)below(i + 1), t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
    for (uint32_t i = dims; i-- > 0;) {
        uint32_t d = order[i];
        stride[d] = reach;
        reach *= (int64_t)count[d];
        if (!dense && below(4) == 0 && reach < (int64_t)MEMORY / 64)
            reach += (int64_t)(dtype_bits(dtype) / 8 * below(3));
        if (!dense && below(4) == 0)
            stride[d] = -stride[d];
        if (!writable && below(8) == 0)
            stride[d] = 0;
    }
    assert_true(reach < (int64_t)MEMORY / 4);
    w->bytes = elements * dtype_bits(dtype) / 8;
    uint8_t *first = w->memory + MEMORY / 2 + (below(2) ? 0 : below(16));
    box_copy_init(&w->box, dtype, dims, lengths, begin, count, stride, first);
    strided_init(&w->strided, w->box.dims, w->box.unit, w->box.begin, w->box.end, w->box.pitch,
                 w->box.strides);
}

static void world_begin(struct world *w)
{
    w->memory = aligned_alloc(256, MEMORY);
    w->again = aligned_alloc(256, MEMORY);
    w->packed = aligned_alloc(256, PACKED);
    w->expected = aligned_alloc(256, PACKED);
    assert_true(w->memory && w->again && w->packed && w->expected);
    fill(w->memory, MEMORY);
}

static void world_end(struct world *w)
{
    free(w->memory);
    free(w->again);
    free(w->packed);
    free(w->expected);
}

/* A range of whole elements. */
static void random_range(const struct world *w, uint64_t *offset, uint64_t *n)
{
    uint64_t unit = w->box.unit, units = w->bytes / unit;
    *offset = below(2) ? 0 : below(units) * unit;
    *n = (1 + below(units - *offset / unit)) * unit;
    if (*offset == 0 && below(2))
        *n = w->bytes;
}

/* A GPU refuses what a host merely does more slowly. */
static void all_is_aligned(const struct strided_job *j)
{
    uint32_t unit = j->box.unit;
    assert_int_equal((uintptr_t)j->packed % unit, 0);
    for (uint64_t i = 0; i < j->count; i++) {
        int64_t at;
        if (strided_at(&j->box, j->first + i, &at))
            assert_int_equal((uintptr_t)(j->memory + at) % unit, 0);
    }
}

static void packing_equals_gather(void **state)
{
    (void)state;
    struct world w;
    unsigned wide = 0, whole = 0;
    world_begin(&w);
    for (int round = 0; round < 6000; round++) {
        uint64_t offset, n;
        random_box(&w, false);
        random_range(&w, &offset, &n);
        /* gather wants all of the range in the region: take the region as the box where it is not */
        for (uint32_t i = 0; i < w.box.dims; i++) {
            uint64_t outer = i ? w.box.pitch[i - 1] / w.box.pitch[i] : w.bytes / w.box.unit / w.box.pitch[0];
            if (w.box.begin[i] != 0 || w.box.end[i] != outer)
                n = 0;
        }
        if (n == 0)
            continue;
        whole++;
        struct strided_job job;
        uint8_t *to = w.packed + 64 + (below(2) ? 0 : below(16));
        strided_job_init(&job, &w.strided, offset, n, w.box.memory, to);
        all_is_aligned(&job);
        wide += job.box.unit > w.box.unit;
        memset(w.packed, 0x5a, PACKED);
        run("larder_pack", (void *[]){&job}, 1);
        memset(w.expected, 0x5a, PACKED);
        box_gather(&w.box, offset, (size_t)n, w.expected + (to - w.packed));
        assert_memory_equal(w.packed, w.expected, PACKED);
    }
    assert_in_range(whole, 1000, 6000);
    assert_in_range(wide, 100, whole); /* units wider than an element were in use */
    world_end(&w);
}

static void unpacking_equals_scatter(void **state)
{
    (void)state;
    struct world w;
    world_begin(&w);
    uint8_t *start = aligned_alloc(256, MEMORY);
    assert_non_null(start);
    memcpy(start, w.memory, MEMORY);
    for (int round = 0; round < 3000; round++) {
        uint64_t offset, n;
        random_box(&w, true);
        random_range(&w, &offset, &n);
        struct strided_job job;
        uint8_t *from = w.packed + 64 + (below(2) ? 0 : below(16));
        fill(from, (size_t)n);
        strided_job_init(&job, &w.strided, offset, n, w.box.memory, from);
        all_is_aligned(&job);
        memcpy(w.memory, start, MEMORY);
        run("larder_unpack", (void *[]){&job}, 1);
        memcpy(w.again, w.memory, MEMORY);
        memcpy(w.memory, start, MEMORY);
        box_scatter(&w.box, offset, (size_t)n, from);
        assert_memory_equal(w.again, w.memory, MEMORY);
    }
    free(start);
    world_end(&w);
}

/* Places far apart: no product of sizes may be cut to 32 bits. */
static void boxes_beyond_4_gib_are_found(void **state)
{
    (void)state;
    const uint64_t begin[2] = {3000000, 5}, end[2] = {5000000, 1u << 20}, pitch[2] = {1u << 20, 1};
    const int64_t stride[2] = {-(1ll << 33), 16};
    struct strided s;
    struct strided_job job;
    strided_init(&s, 2, 8, begin, end, pitch, stride);
    strided_job_init(&job, &s, 0, 8, NULL, NULL);
    assert_int_equal(job.box.unit, 8);
    int64_t at;
    for (int round = 0; round < 100000; round++) {
        uint64_t row = below(6000000), column = below(1u << 20);
        if (round < 1000) /* the edges of rows */
            column = round % 2 ? (1u << 20) - 1 : 0;
        bool inside = row >= begin[0] && row < end[0] && column >= begin[1];
        assert_int_equal(strided_at(&job.box, row << 20 | column, &at), inside);
        if (inside)
            assert_true(at == (int64_t)(row - begin[0]) * stride[0] + (int64_t)(column - begin[1]) * 16);
    }
}

/* ---- hashing ---- */

static void hash_all(const uint8_t *p, uint64_t n, uint64_t chunk_bytes, uint64_t chunks,
                     struct chunk_hash *out)
{
    run("larder_hash_begin", (void *[]){&out, &chunks}, 1);
    for (uint64_t first = 0; first < chunks;) { /* in parts, as launches are */
        uint64_t rows = 1 + below(chunks - first);
        run("larder_hash_sums", (void *[]){&p, &n, &chunk_bytes, &first, &out}, (uint32_t)rows);
        first += rows;
    }
    run("larder_hash_end", (void *[]){&out, &n, &chunk_bytes, &chunks}, 1);
}

static void hashing_equals_its_host_twin(void **state)
{
    (void)state;
    uint8_t *all = aligned_alloc(64, 1u << 16);
    struct chunk_hash out[64];
    assert_non_null(all);
    fill(all, 1u << 16);
    for (uint64_t n = 1; n < 4200; n++) {
        uint64_t chunk_bytes = n < 700 ? 1 + below(n + 40) : 256 + below(4000), chunks;
        if (n / chunk_bytes >= 60)
            chunk_bytes = n;
        chunks = (n + chunk_bytes - 1) / chunk_bytes;
        const uint8_t *p = all + below(33);
        memset(out, 0xee, sizeof out); /* what was there before must not matter */
        hash_all(p, n, chunk_bytes, chunks, out);
        for (uint64_t c = 0; c < chunks; c++) {
            uint64_t left = n - c * chunk_bytes;
            struct chunk_hash h =
                chunk_hash(p + c * chunk_bytes, (size_t)(left < chunk_bytes ? left : chunk_bytes));
            assert_true(out[c].lo == h.lo && out[c].hi == h.hi);
        }
    }
    free(all);
}

static void kernels_are_found_by_name(void **state)
{
    (void)state;
    uint64_t ns = 1000;
    assert_null(kernel_host_find("larder_nothing"));
    run("larder_spin", (void *[]){&ns}, 2);
    assert_int_equal(kernel_host_find("larder_pack")->parameter_bytes[0], sizeof(struct strided_job));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packing_equals_gather),        cmocka_unit_test(unpacking_equals_scatter),
        cmocka_unit_test(boxes_beyond_4_gib_are_found), cmocka_unit_test(hashing_equals_its_host_twin),
        cmocka_unit_test(kernels_are_found_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
