/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: boxes of any strides come from and go to a device as box_gather and box_scatter move them in host
 * memory, whether a kernel packs them or copies do; and the kernel is used where there is one. Method: boxes
 * of chance in memory of the stand-in for CUDA's driver.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/transfer.h"
#include "gpudirect/kernels_image.h"
#include "tests/support/standin.h"

#define MEMORY (1u << 18)
#define ROUNDS 150

static const struct standin *cuda;
static unsigned seed = 3;

static uint64_t draw(uint64_t below)
{
    return (uint64_t)rand_r(&seed) % below;
}

/* A box of 3 dimensions whose elements lie in chance order of the dimensions, some backwards; and a region of
 * it that is all of it, or (part) a piece. */
struct trial {
    struct box_copy box;
    size_t bytes; /* packed */
};

static void draw_trial(struct trial *t, uint8_t *memory, bool part)
{
    static const enum dtype dtypes[] = {DTYPE_U8, DTYPE_BF16, DTYPE_F32, DTYPE_F64};
    enum dtype dtype = dtypes[draw(4)];
    size_t size = dtype_bits(dtype) / 8, step = size;
    uint64_t lengths[3], begin[3], count[3];
    int64_t strides[3];
    uint8_t *first = memory;
    unsigned order[3] = {0, 1, 2}, k = (unsigned)draw(3);
    order[0] = k;
    order[k] = 0;
    t->bytes = size;
    for (unsigned i = 0; i < 3; i++) {
        unsigned d = order[i];
        lengths[d] = 1 + draw(30);
        begin[d] = part ? draw(lengths[d]) : 0;
        count[d] = part ? 1 + draw(lengths[d] - begin[d]) : lengths[d];
        strides[d] = (int64_t)step;
        if (draw(3) == 0) {
            first += step * (count[d] - 1);
            strides[d] = -strides[d];
        }
        step *= lengths[d] + draw(3);
        t->bytes *= lengths[d];
    }
    assert_true(step <= MEMORY);
    box_copy_init(&t->box, dtype, 3, lengths, begin, count, strides, first);
}

struct place {
    struct memory *m;
    struct memory_stream *s;
    struct packer packer;
    uint8_t *device, *twin, *packed, *expected; /* twin: what the device's memory holds, in host memory */
};

static void open_place(struct place *p)
{
    void *device;
    *p = (struct place){0};
    assert_int_equal(memory_open(MEMORY_CUDA, 0, &p->m, NULL), 0);
    assert_int_equal(memory_stream_create(p->m, &p->s, NULL), 0);
    assert_int_equal(memory_alloc(p->m, MEMORY, &device, NULL), 0);
    p->device = device;
    p->twin = malloc(MEMORY);
    p->packed = malloc(MEMORY);
    p->expected = malloc(MEMORY);
}

static void close_place(struct place *p)
{
    struct standin_counts n;
    packer_end(&p->packer, p->m);
    memory_free(p->m, p->device);
    memory_stream_destroy(p->s);
    memory_close(p->m);
    free(p->twin);
    free(p->packed);
    free(p->expected);
    cuda->standin_counts(&n);
    assert_int_equal(n.allocations + n.modules + n.streams + n.lost_handles, 0);
}

static void move_one(struct place *p, enum memory_direction d)
{
    struct trial t;
    struct box_copy there;
    uint8_t *peek = cuda->standin_peek(p->device);
    draw_trial(&t, p->twin, d == MEMORY_IN);
    size_t unit = t.box.unit;
    uint64_t offset = draw(t.bytes / unit) * unit, n = (1 + draw((t.bytes - offset) / unit)) * unit;
    for (size_t i = 0; i < MEMORY; i++) {
        p->twin[i] = (uint8_t)draw(256);
        p->packed[i] = (uint8_t)~p->twin[i];
    }
    memcpy(peek, p->twin, MEMORY);
    there = t.box;
    there.memory = p->device + (t.box.memory - p->twin);
    if (d == MEMORY_OUT) {
        memcpy(p->expected, p->packed, MEMORY);
        box_gather(&t.box, offset, n, p->expected);
    } else {
        box_scatter(&t.box, offset, n, p->packed);
    }
    assert_int_equal(transfer(p->s, &p->packer, d, &there, offset, n, p->packed, NULL), 0);
    assert_int_equal(memory_stream_wait(p->s, 20000, NULL), 0);
    assert_memory_equal(d == MEMORY_OUT ? p->packed : peek, d == MEMORY_OUT ? p->expected : p->twin, MEMORY);
}

/* How many kernels that took. */
static size_t move_many(const char *settings)
{
    struct place p;
    struct standin_counts n;
    cuda->standin_reset();
    cuda->standin_configure(settings);
    open_place(&p);
    for (int i = 0; i < ROUNDS; i++)
        move_one(&p, i % 2 ? MEMORY_IN : MEMORY_OUT);
    cuda->standin_counts(&n);
    close_place(&p);
    return n.kernels;
}

static void a_kernel_packs(void **state)
{
    (void)state;
    size_t kernels = move_many("");
    if (kernels_image())
        assert_in_range(kernels, ROUNDS / 8, ROUNDS);
    else
        assert_int_equal(kernels, 0);
}

static void copies_do_it_without_kernels(void **state)
{
    (void)state;
    assert_int_equal(move_many("fail=cuModuleLoadDataEx:0:209"), 0);
}

/* All the device's memory is the tensors'. */
static void copies_do_it_without_memory(void **state)
{
    (void)state;
    assert_int_equal(move_many("memory=1M"), 0);
}

static void wide_rows_are_copied(void **state)
{
    struct place p;
    struct standin_counts n;
    struct box_copy b;
    uint64_t lengths[2] = {64, 1024}, begin[2] = {0, 0};
    int64_t strides[2] = {1500, 1};
    (void)state;
    cuda->standin_reset();
    open_place(&p);
    box_copy_init(&b, DTYPE_U8, 2, lengths, begin, lengths, strides, p.device);
    assert_int_equal(transfer(p.s, &p.packer, MEMORY_OUT, &b, 0, 64 * 1024, p.packed, NULL), 0);
    assert_int_equal(memory_stream_wait(p.s, 20000, NULL), 0);
    cuda->standin_counts(&n);
    assert_int_equal(n.kernels, 0);
    assert_int_equal(n.copies, 1);
    close_place(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_kernel_packs),
        cmocka_unit_test(copies_do_it_without_kernels),
        cmocka_unit_test(copies_do_it_without_memory),
        cmocka_unit_test(wide_rows_are_copied),
    };
    cuda = standin_load("memory=64M delay_us=20");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
