/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: kernels on a device give what the host's code gives, in the order of their stream, and say why where
 * they cannot run; hashes of device memory are the same with kernels and without. On the stand-in for CUDA's
 * driver, which runs the kernels' C twins late, on memory that nothing else can touch. The image is one that
 * it takes for real, so that a build without nvcc is tested alike.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/box.h"
#include "gpudirect/hasher.h"
#include "gpudirect/kernels.h"
#include "gpudirect/kernels_image.h"
#include "tests/support/standin.h"

#define BYTES   (3u << 20)
#define WAIT_MS 20000

static const struct standin *cuda;
static const char image[] = "an image that the stand-in takes"; /* it looks at names only */

struct bench {
    struct memory *m;
    struct memory_stream *s;
    struct kernels *k;
    uint8_t *device, *other; /* BYTES each */
    uint8_t host[BYTES], again[BYTES];
};

static int setup(void **state)
{
    struct bench *b = calloc(1, sizeof *b);
    cuda->standin_reset();
    assert_int_equal(memory_open(MEMORY_CUDA, 0, &b->m, NULL), 0);
    assert_int_equal(memory_stream_create(b->m, &b->s, NULL), 0);
    assert_int_equal(kernels_open(b->m, image, &b->k, NULL), 0);
    assert_int_equal(memory_alloc(b->m, BYTES, (void **)&b->device, NULL), 0);
    assert_int_equal(memory_alloc(b->m, BYTES, (void **)&b->other, NULL), 0);
    for (size_t i = 0; i < BYTES; i++)
        b->host[i] = (uint8_t)(i * 2654435761u >> 11);
    memcpy(cuda->standin_peek(b->device), b->host, BYTES);
    *state = b;
    return 0;
}

static int teardown(void **state)
{
    struct bench *b = *state;
    struct standin_counts n;
    kernels_close(b->k);
    memory_free(b->m, b->device);
    memory_free(b->m, b->other);
    memory_stream_destroy(b->s);
    memory_close(b->m);
    free(b);
    cuda->standin_counts(&n);
    assert_int_equal(n.lost_handles + n.allocations + n.registrations + n.streams + n.events + n.modules, 0);
    return 0;
}

static void settle(struct bench *b)
{
    assert_int_equal(memory_stream_wait(b->s, WAIT_MS, NULL), 0);
}

/* A matrix of bf16 that lies transposed, and a part of it. */
static void packing_and_unpacking_equal_their_twins(void **state)
{
    struct bench *b = *state;
    const uint64_t lengths[2] = {300, 500}, begin[2] = {10, 20}, count[2] = {200, 444}, none[2] = {0};
    const int64_t strides[2] = {2, 2 * 300};
    const size_t n = 2 * 300 * 500;
    struct box_copy box;
    struct strided s;
    struct strided_job job;
    box_copy_init(&box, DTYPE_BF16, 2, lengths, none, lengths, strides, b->device);
    strided_init(&s, box.dims, box.unit, box.begin, box.end, box.pitch, box.strides);
    strided_job_init(&job, &s, 0, n, b->device, b->other);
    assert_int_equal(kernels_pack(b->k, b->s, &job, NULL), 0);
    settle(b);
    box.memory = b->host;
    box_gather(&box, 0, n, b->again);
    assert_memory_equal(cuda->standin_peek(b->other), b->again, n);

    box_copy_init(&box, DTYPE_BF16, 2, lengths, begin, count, strides, b->host);
    strided_init(&s, box.dims, box.unit, box.begin, box.end, box.pitch, box.strides);
    strided_job_init(&job, &s, 40, n - 80, b->device, b->other + 40);
    assert_int_equal(kernels_unpack(b->k, b->s, &job, NULL), 0);
    settle(b);
    box_scatter(&box, 40, n - 80, b->again + 40);
    assert_memory_equal(cuda->standin_peek(b->device), b->host, BYTES);
    job.count = 0; /* nothing to do is no kernel */
    assert_int_equal(kernels_pack(b->k, b->s, &job, NULL), 0);
}

static void hashes_equal_the_hosts(void **state)
{
    struct bench *b = *state;
    static const uint64_t chunks[] = {BYTES, BYTES + 1, 1u << 20, (1u << 20) + 4, 77777, 4096};
    struct chunk_hash *out = (struct chunk_hash *)b->other;
    for (size_t i = 0; i < sizeof chunks / sizeof chunks[0]; i++)
        for (size_t from = 0; from < 40; from += from < 4 ? 1 : 12) {
            uint64_t n = BYTES - 64 - i;
            assert_int_equal(kernels_hash(b->k, b->s, b->device + from, n, chunks[i], out, NULL), 0);
            settle(b);
            const struct chunk_hash *found = cuda->standin_peek(out);
            for (uint64_t at = 0; at < n; at += chunks[i], found++) {
                struct chunk_hash h =
                    chunk_hash(b->host + from + at, n - at < chunks[i] ? n - at : chunks[i]);
                assert_true(found->lo == h.lo && found->hi == h.hi);
            }
        }
}

/* What is given to the stream before is done before. */
static void kernels_keep_the_order_of_their_stream(void **state)
{
    struct bench *b = *state;
    struct chunk_hash *out = (struct chunk_hash *)b->other;
    memset(b->again, 0x42, BYTES);
    for (int round = 0; round < 20; round++) {
        assert_int_equal(
            memory_copy(b->s, MEMORY_IN, b->device, round % 2 ? b->host : b->again, BYTES / 64, NULL), 0);
        assert_int_equal(kernels_spin(b->k, b->s, 2, 100000, NULL), 0);
        assert_int_equal(kernels_hash(b->k, b->s, b->device, BYTES / 64, BYTES, out, NULL), 0);
        settle(b);
        struct chunk_hash h = chunk_hash(round % 2 ? b->host : b->again, BYTES / 64);
        assert_memory_equal(cuda->standin_peek(out), &h, sizeof h);
    }
}

static void hashers_agree(void **state)
{
    struct bench *b = *state;
    struct memory *host = NULL;
    struct hasher *h[3] = {0};
    struct chunk_hash out[3][800];
    assert_int_equal(memory_open(MEMORY_HOST, 0, &host, NULL), 0);
    assert_int_equal(hasher_open(host, image, &h[0], NULL), 0);
    assert_int_equal(hasher_open(b->m, image, &h[1], NULL), 0);
    assert_int_equal(hasher_open(b->m, NULL, &h[2], NULL), 0);
    assert_string_equal(hasher_path(h[0]), "in host memory");
    assert_string_equal(hasher_path(h[1]), "by a kernel on the device");
    assert_non_null(strstr(hasher_path(h[2]), "copied to the host: there are no kernels"));
    static const uint64_t chunks[] = {BYTES, (1u << 20) + 12345, 4096};
    for (size_t c = 0; c < 3; c++)
        for (uint64_t n = BYTES; n > 0; n = n > 3333 ? n / 3 : 0) {
            uint64_t count = (n - 1) / chunks[c] + 1;
            for (int i = 0; i < 3; i++)
                assert_int_equal(hasher_run(h[i], i ? b->device : b->host, n, chunks[c], out[i], NULL), 0);
            assert_memory_equal(out[0], out[1], count * sizeof out[0][0]);
            assert_memory_equal(out[0], out[2], count * sizeof out[0][0]);
        }
    /* more chunks than one round of kernels takes */
    struct chunk_hash *many = calloc(BYTES / 512, sizeof *many);
    assert_int_equal(hasher_run(h[1], b->device, BYTES, 512, many, NULL), 0);
    for (size_t i = 0; i < BYTES / 512; i++) {
        struct chunk_hash x = chunk_hash(b->host + 512 * i, 512);
        assert_true(many[i].lo == x.lo && many[i].hi == x.hi);
    }
    free(many);
    for (int i = 0; i < 3; i++)
        hasher_close(h[i]);
    memory_close(host);
}

static void what_cannot_run_is_told(void **state)
{
    struct bench *b = *state;
    struct memory *host = NULL;
    struct kernels *k = NULL;
    struct err e;
    char text[64];
    assert_int_equal(kernels_open(b->m, NULL, &k, &e), -ENOTSUP);
    assert_non_null(strstr(e.text, "no kernels for GPUs in this build"));
    assert_int_equal(memory_open(MEMORY_HOST, 0, &host, NULL), 0);
    assert_int_equal(kernels_open(host, image, &k, &e), -ENOTSUP);
    memory_close(host);
    snprintf(text, sizeof text, "fail=cuModuleLoadDataEx:1:%d", CU_NO_BINARY_FOR_GPU);
    cuda->standin_configure(text);
    assert_int_equal(kernels_open(b->m, image, &k, &e), -ENOTSUP);
    assert_non_null(strstr(e.text, "loading the kernels"));
    snprintf(text, sizeof text, "fail=cuModuleGetFunction:3:%d", CU_NOT_FOUND);
    cuda->standin_configure(text);
    assert_true(kernels_open(b->m, image, &k, &e) < 0);
    snprintf(text, sizeof text, "fail=cuLaunchKernel:2:%d", CU_LAUNCH_OUT_OF_RESOURCES);
    cuda->standin_configure(text);
    assert_true(kernels_hash(b->k, b->s, b->device, 100, 10, (struct chunk_hash *)b->other, &e) < 0);
    assert_non_null(strstr(e.text, "starting larder_hash_sums"));
    settle(b);
    assert_null(k);
}

static int hash_with(const void *with_image, struct err *e)
{
    struct memory *m = NULL;
    struct hasher *h = NULL;
    struct chunk_hash out[3];
    void *p = NULL;
    assert_int_equal(memory_open(MEMORY_CUDA, 0, &m, NULL), 0);
    int rc = memory_alloc(m, BYTES, &p, e);
    assert_int_equal(rc, 0);
    rc = hasher_open(m, with_image, &h, e);
    if (rc == 0)
        rc = hasher_run(h, p, BYTES, 1u << 20, out, e);
    hasher_close(h);
    memory_free(m, p);
    memory_close(m);
    return rc;
}

/* Whichever call fails: an error, and nothing is left. */
static void a_hasher_fails_cleanly(void **state)
{
    static const struct {
        const char *call;
        unsigned with, without; /* which call it is, with kernels and without; 0: it makes none */
        bool matters;
    } calls[] = {{"cuModuleLoadDataEx", 1, 0, false},
                 {"cuModuleGetFunction", 2, 0, false},
                 {"cuMemAlloc_v2", 2, 0, true},
                 {"cuLaunchKernel", 3, 0, true},
                 {"cuStreamCreateWithPriority", 1, 1, true},
                 {"cuEventCreate", 1, 1, true},
                 {"cuMemHostRegister_v2", 1, 1, false},
                 {"cuMemcpyDtoHAsync_v2", 1, 3, true},
                 {"cuEventRecord", 1, 2, true},
                 {"cuEventQuery", 1, 2, true}};
    struct standin_counts n;
    struct err e;
    char text[64];
    (void)state;
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        for (int with = 0; with < 2; with++) {
            unsigned at = with ? calls[i].with : calls[i].without;
            if (at == 0)
                continue;
            cuda->standin_reset();
            snprintf(text, sizeof text, "fail=%s:%u:%d", calls[i].call, at, CU_OUT_OF_MEMORY);
            cuda->standin_configure(text);
            int rc = hash_with(with ? image : NULL, &e);
            if (rc == 0 && calls[i].matters)
                print_error("%s has failed, and nobody tells\n", calls[i].call);
            assert_int_equal(rc, calls[i].matters ? -ENOMEM : 0);
            cuda->standin_counts(&n);
            assert_int_equal(
                n.lost_handles + n.allocations + n.registrations + n.streams + n.events + n.modules, 0);
        }
    cuda->standin_reset();
    cuda->standin_configure("lose=0:2:719"); /* in the middle */
    int rc = hash_with(image, &e);
    assert_int_equal(rc, -ENODEV);
}

int main(void)
{
    cuda = standin_load("memory=16M seed=3 delay_us=200");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(packing_and_unpacking_equal_their_twins, setup, teardown),
        cmocka_unit_test_setup_teardown(hashes_equal_the_hosts, setup, teardown),
        cmocka_unit_test_setup_teardown(kernels_keep_the_order_of_their_stream, setup, teardown),
        cmocka_unit_test_setup_teardown(hashers_agree, setup, teardown),
        cmocka_unit_test_setup_teardown(what_cannot_run_is_told, setup, teardown),
        cmocka_unit_test(a_hasher_fails_cleanly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
