/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: scratch files of device memory: packed and strided tensors, on two devices and the host in one file,
 * by cuFile and by the bounce buffer, after the caller's stream; damage, wrong memory and failing devices are
 * told, and nothing is left. On the stand-ins.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/larder.h"
#include "gpudirect/kernels_image.h"
#include "tests/support/folder.h"
#include "tests/support/standin_cufile.h"

#define BYTES (9u << 20) /* three chunks */
#define SIDE  700u       /* of a matrix of 4-byte elements */

static const struct standin *cuda;
static const struct standin_cufile *cufile;

struct bench {
    struct memory *m[2];
    uint8_t *device[2]; /* BYTES each */
    uint8_t host[BYTES], copy[2][BYTES];
    char folder[256], path[300];
};

static void fill(uint8_t *p, size_t n, unsigned seed)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)((i * 2654435761u >> 13) + seed);
}

static int setup(void **state)
{
    struct bench *b = calloc(1, sizeof *b);
    for (int d = 0; d < 2; d++) {
        assert_int_equal(memory_open(MEMORY_CUDA, d, &b->m[d], NULL), 0);
        assert_int_equal(memory_alloc(b->m[d], BYTES, (void **)&b->device[d], NULL), 0);
        fill(b->copy[d], BYTES, (unsigned)d);
        memcpy(cuda->standin_peek(b->device[d]), b->copy[d], BYTES);
    }
    fill(b->host, BYTES, 77);
    folder_make(b->folder, sizeof b->folder);
    snprintf(b->path, sizeof b->path, "%s/scratch", b->folder);
    *state = b;
    return 0;
}

static size_t files_in(const char *folder)
{
    size_t n = 0;
    DIR *d = opendir(folder);
    for (struct dirent *x; d && (x = readdir(d));)
        n += x->d_name[0] != '.';
    closedir(d);
    return n;
}

static int teardown(void **state)
{
    struct bench *b = *state;
    struct standin_counts n;
    for (int d = 0; d < 2; d++) {
        memory_free(b->m[d], b->device[d]);
        memory_close(b->m[d]);
    }
    folder_remove(b->folder);
    free(b);
    cuda->standin_counts(&n);
    assert_int_equal(n.lost_handles + n.allocations + n.registrations + n.streams + n.events + n.modules, 0);
    return 0;
}

/* A matrix that lies transposed, behind the packed bytes of the second device. */
static struct larder_tensor matrix(uint8_t *data, int device)
{
    return (struct larder_tensor){.name = "matrix",
                                  .dtype = LARDER_F32,
                                  .dims = 2,
                                  .shape = {SIDE, SIDE},
                                  .strides = {1, SIDE},
                                  .data = data,
                                  .memory = LARDER_MEMORY_CUDA,
                                  .device = device};
}

static unsigned describe(const struct bench *b, struct larder_tensor *t)
{
    unsigned n = 0;
    t[n++] = (struct larder_tensor){.name = "first",
                                    .dtype = LARDER_U8,
                                    .dims = 1,
                                    .shape = {BYTES},
                                    .data = b->device[0],
                                    .memory = LARDER_MEMORY_CUDA};
    t[n++] = (struct larder_tensor){.name = "second",
                                    .dtype = LARDER_BF16,
                                    .dims = 1,
                                    .shape = {1u << 20},
                                    .data = b->device[1],
                                    .memory = LARDER_MEMORY_CUDA,
                                    .device = 1};
    t[n++] = (struct larder_tensor){.name = "host",
                                    .dtype = LARDER_U8,
                                    .dims = 1,
                                    .shape = {BYTES - 1},
                                    .data = (void *)(uintptr_t)b->host};
    if (kernels_image())
        t[n++] = matrix(b->device[1] + (4u << 20), 1);
    return n;
}

static void round_trip(struct bench *b, const struct larder_scratch_options *o,
                       struct larder_scratch_info *info)
{
    struct larder_tensor t[4];
    struct larder_error e = {0};
    unsigned n = describe(b, t);
    int rc = larder_scratch_write(b->path, t, n, o, info, &e);
    if (rc < 0)
        print_error("%s\n", e.text);
    assert_int_equal(rc, 0);
    for (int d = 0; d < 2; d++)
        memset(cuda->standin_peek(b->device[d]), 0x5a, BYTES);
    memset(b->host, 0x5a, BYTES - 1);
    assert_int_equal(larder_scratch_read(b->path, t, n, o, info, &e), 0);
    assert_memory_equal(cuda->standin_peek(b->device[0]), b->copy[0], BYTES);
    assert_memory_equal(cuda->standin_peek(b->device[1]), b->copy[1], 2u << 20);
    if (n == 4)
        assert_memory_equal(cuda->standin_peek(b->device[1] + (4u << 20)), b->copy[1] + (4u << 20),
                            4 * SIDE * SIDE);
    uint8_t *host = malloc(BYTES);
    fill(host, BYTES, 77);
    assert_memory_equal(b->host, host, BYTES);
    free(host);
    assert_int_equal(files_in(b->folder), 1);
}

static void all_comes_back_by_either_way(void **state)
{
    struct larder_scratch_options o = LARDER_INIT(larder_scratch_options);
    struct larder_scratch_info info = LARDER_INIT(larder_scratch_info);
    struct standin_cufile_counts before, between, after;
    cufile->standin_cufile_counts(&before);
    round_trip(*state, NULL, &info);
    cufile->standin_cufile_counts(&between);
    assert_non_null(strstr(info.path, "device 0: cuFile, "));
    assert_non_null(strstr(info.path, "device 1: cuFile, "));
    assert_non_null(strstr(info.path, "host memory: read and written in place"));
    assert_non_null(strstr(info.path, kernels_image() ? "hashed by a kernel on the device"
                                                      : "hashed copied to the host"));
    assert_true(between.written_bytes >= before.written_bytes + BYTES &&
                between.read_bytes >= before.read_bytes + BYTES);
    o.bounce = 1;
    round_trip(*state, &o, &info);
    cufile->standin_cufile_counts(&after);
    assert_non_null(strstr(info.path, "device 0: pinned bounce buffer: as asked for"));
    assert_int_equal(after.reads + after.writes, between.reads + between.writes);
}

/* What the stream was given before counts, and what it is given after does not. */
static void the_callers_stream_comes_first(void **state)
{
    struct bench *b = *state;
    struct larder_scratch_options o = LARDER_INIT(larder_scratch_options);
    struct larder_tensor t = {.name = "x",
                              .dtype = LARDER_U8,
                              .dims = 1,
                              .shape = {BYTES},
                              .data = b->device[0],
                              .memory = LARDER_MEMORY_CUDA};
    struct memory_stream *s = NULL;
    struct larder_error e;
    assert_int_equal(memory_stream_create(b->m[0], &s, NULL), 0);
    t.stream = memory_stream_handle(s);
    for (o.bounce = 0; o.bounce < 2; o.bounce++) {
        memset(cuda->standin_peek(b->device[0]), 0, BYTES);
        assert_int_equal(memory_copy(s, MEMORY_IN, b->device[0], b->host, BYTES, NULL), 0);
        assert_int_equal(larder_scratch_write(b->path, &t, 1, &o, NULL, &e), 0);
        assert_int_equal(memory_copy(s, MEMORY_IN, b->device[0], b->copy[1], BYTES, NULL), 0);
        assert_int_equal(memory_stream_wait(s, 20000, NULL), 0);
        assert_int_equal(larder_scratch_read(b->path, &t, 1, NULL, NULL, &e), 0);
        assert_memory_equal(cuda->standin_peek(b->device[0]), b->host, BYTES);
    }
    t.data = b->device[1]; /* the stream is another device's */
    t.device = 1;
    assert_int_equal(larder_scratch_write(b->path, &t, 1, &o, NULL, &e), -EINVAL);
    memory_stream_destroy(s);
    assert_int_equal(files_in(b->folder), 1);
}

static void damage_and_wrong_memory_are_told(void **state)
{
    struct bench *b = *state;
    struct larder_tensor t = {.name = "x",
                              .dtype = LARDER_U8,
                              .dims = 1,
                              .shape = {BYTES},
                              .data = b->device[0],
                              .memory = LARDER_MEMORY_CUDA};
    struct larder_error e;
    uint8_t byte = 0;
    assert_int_equal(larder_scratch_write(b->path, &t, 1, NULL, NULL, &e), 0);
    int fd = open(b->path, O_RDWR);
    assert_int_equal(pread(fd, &byte, 1, 4096 + (5 << 20)), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, 4096 + (5 << 20)), 1);
    close(fd);
    assert_int_equal(larder_scratch_read(b->path, &t, 1, NULL, NULL, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "tensor \"x\": the bytes in the file from 4198400 on are damaged"));
    t.data = b->device[1]; /* not what it is said to be */
    assert_int_equal(larder_scratch_write(b->path, &t, 1, NULL, NULL, &e), -EINVAL);
    t.data = b->device[0];
    t.memory = LARDER_MEMORY_HOST;
    assert_int_equal(larder_scratch_write(b->path, &t, 1, NULL, NULL, &e), -EINVAL);
    assert_non_null(strstr(e.text, "expected host memory"));
    t.memory = (enum larder_memory)5;
    assert_int_equal(larder_scratch_write(b->path, &t, 1, NULL, NULL, &e), -EINVAL);
    t.memory = LARDER_MEMORY_CUDA;
    t.device = 7;
    assert_int_equal(larder_scratch_write(b->path, &t, 1, NULL, NULL, &e), -ENOENT);
    t.device = 0;
    t.data = b->device[0] + 1; /* one byte over the end */
    assert_int_equal(larder_scratch_write(b->path, &t, 1, NULL, NULL, &e), -EINVAL);
    assert_non_null(strstr(e.text, "tensor \"x\""));
    struct larder_tensor m = matrix(b->device[0] + BYTES - 4 * SIDE * SIDE + 4, 0);
    assert_int_equal(larder_scratch_write(b->path, &m, 1, NULL, NULL, &e),
                     kernels_image() ? -EINVAL : -ENOTSUP);
    m.data = b->device[0];
    if (!kernels_image())
        assert_int_equal(larder_scratch_write(b->path, &m, 1, NULL, NULL, &e), -ENOTSUP);
    assert_int_equal(files_in(b->folder), 1);
}

/* Whichever call of driver or cuFile fails, or the device goes: an error, no file, nothing left. */
static void failures_leave_nothing(void **state)
{
    struct bench *b = *state;
    static const struct {
        const char *call;
        int errnum; /* 0: it goes on another way */
    } calls[] = {{"cuDevicePrimaryCtxRetain", ENOMEM},
                 {"cuStreamCreateWithPriority", ENOMEM},
                 {"cuEventCreate", ENOMEM},
                 {"cuMemcpyDtoHAsync_v2", ENOMEM},
                 {"cuEventRecord", ENOMEM},
                 {"cuMemHostRegister_v2", 0}};
    struct larder_scratch_options o = LARDER_INIT(larder_scratch_options);
    struct larder_tensor t = {.name = "x",
                              .dtype = LARDER_U8,
                              .dims = 1,
                              .shape = {BYTES},
                              .data = b->device[0],
                              .memory = LARDER_MEMORY_CUDA};
    struct larder_error e;
    char text[64];
    o.bounce = 1;
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        snprintf(text, sizeof text, "fail=%s:1:%d", calls[i].call, CU_OUT_OF_MEMORY);
        cuda->standin_configure(text);
        assert_int_equal(larder_scratch_write(b->path, &t, 1, &o, NULL, &e), -calls[i].errnum);
        assert_int_equal(files_in(b->folder), calls[i].errnum ? 0 : 1);
    }
    unlink(b->path);
    cufile->standin_cufile_configure("fail=write:1:28");
    assert_int_equal(larder_scratch_write(b->path, &t, 1, NULL, NULL, &e), -ENOSPC);
    assert_int_equal(files_in(b->folder), 0);
    cuda->standin_configure("lose=0:3:719");
    assert_true(larder_scratch_write(b->path, &t, 1, &o, NULL, &e) < 0);
    assert_non_null(strstr(e.text, "tensor \"x\""));
    assert_int_equal(files_in(b->folder), 0);
}

/* The last one: its device is lost. */
static int teardown_lost(void **state)
{
    struct bench *b = *state;
    for (int d = 0; d < 2; d++) {
        memory_free(b->m[d], b->device[d]);
        memory_close(b->m[d]);
    }
    folder_remove(b->folder);
    free(b);
    return 0;
}

int main(void)
{
    cuda = standin_load("devices=2 memory=32M seed=11 delay_us=200");
    cufile = standin_cufile_load(NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(all_comes_back_by_either_way, setup, teardown),
        cmocka_unit_test_setup_teardown(the_callers_stream_comes_first, setup, teardown),
        cmocka_unit_test_setup_teardown(damage_and_wrong_memory_are_told, setup, teardown),
        cmocka_unit_test_setup_teardown(failures_leave_nothing, setup, teardown_lost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
