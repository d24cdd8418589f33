/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: whatever is wrong with CUDA's driver, one sentence says so, and host memory goes on. The driver is
 * looked for once per process, so each case is a process of its own.
 */
#include <dlfcn.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/support/standin.h"

struct seen {
    struct memory_probe probe;
    int open_rc, where_rc;
    struct err e;
};

static void look(struct seen *out)
{
    struct memory *m = NULL;
    struct memory_pointer x;
    memory_probe(MEMORY_CUDA, &out->probe);
    out->open_rc = memory_open(MEMORY_CUDA, 0, &m, &out->e);
    memory_close(m);
    out->where_rc = memory_where(out, &x, NULL);
}

/* What a process sees that has this library (NULL: as the machine is), set up so. */
static struct seen process_sees(const char *kind, const char *settings)
{
    struct seen s = {0};
    char folder[4096], path[4200];
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    if (pid == 0) {
        if (settings)
            setenv("LARDER_STANDIN", settings, 1);
        if (kind) {
            snprintf(path, sizeof path, "%s/%s", standin_folder(kind, folder, sizeof folder), CUDA_LIBRARY);
            check(dlopen(path, RTLD_NOW) != NULL);
        }
        look(&s);
        _exit(write(ends[1], &s, sizeof s) == sizeof s ? 0 : 1);
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &s, sizeof s), sizeof s);
    close(ends[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    return s;
}

static void assert_unusable(const struct seen *s, const char *why)
{
    assert_false(s->probe.usable);
    assert_int_equal(s->probe.devices, 0);
    if (!strstr(s->probe.note, why))
        print_message("%s\n", s->probe.note);
    assert_non_null(strstr(s->probe.note, why));
    assert_int_equal(s->open_rc, -ENOTSUP);
    assert_int_equal(s->e.class, ERR_UNSUPPORTED);
    assert_string_equal(s->e.text, s->probe.note);
    assert_int_equal(s->where_rc, 0);
}

static void no_driver(void **state)
{
    (void)state;
    void *library = dlopen(CUDA_LIBRARY, RTLD_LAZY);
    if (library) {
        dlclose(library);
        print_message("this machine has a CUDA driver\n");
        skip();
    }
    struct seen s = process_sees(NULL, NULL);
    assert_unusable(&s, "there is no NVIDIA driver here (libcuda.so.1:");
    assert_int_equal(s.probe.driver_version, 0);
}

static void a_damaged_driver(void **state)
{
    (void)state;
    struct seen s = process_sees("standin-lacking", NULL);
    assert_unusable(&s, "the CUDA 13.0 driver lacks cuInit");
}

static void a_driver_too_old(void **state)
{
    (void)state;
    struct seen s = process_sees("standin", "version=11030");
    assert_unusable(&s, "it has CUDA 11.3, and 11.4 is the least; update it");
    assert_int_equal(s.probe.driver_version, 11030);
    s = process_sees("standin", "version=11040");
    assert_true(s.probe.usable);
}

static void no_device(void **state)
{
    (void)state;
    struct seen s = process_sees("standin", "devices=0");
    assert_unusable(&s, "CUDA_ERROR_NO_DEVICE");
    assert_non_null(strstr(s.probe.note, "CUDA_VISIBLE_DEVICES"));
}

static void a_driver_that_does_not_start(void **state)
{
    (void)state;
    struct seen s = process_sees("standin", "fail=cuInit:1:803");
    assert_unusable(&s, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH");
    assert_non_null(strstr(s.probe.note, "reboot"));
    s = process_sees("standin", "fail=cuDeviceGetCount:1:999");
    assert_unusable(&s, "CUDA_ERROR_UNKNOWN");
    s = process_sees("standin", "fail=cuDriverGetVersion:1:999");
    assert_unusable(&s, "does not tell its version");
    s = process_sees("standin", "fail=cuInit:1:987654 fail=cuGetErrorName:0:1 fail=cuGetErrorString:0:1");
    assert_unusable(&s, "an unknown CUDA error (987654, no text)");
}

static void a_driver_that_is_there(void **state)
{
    (void)state;
    struct seen s = process_sees("standin", "devices=3");
    assert_true(s.probe.usable);
    assert_int_equal(s.probe.devices, 3);
    assert_int_equal(s.open_rc, 0);
}

/* All of memory_cuda_ops and its wrapper are of no use in a child; the sentence says so. */
static void after_a_fork(void **state)
{
    (void)state;
    struct seen s = process_sees("standin", "fail=cuDevicePrimaryCtxRetain:1:3");
    assert_int_equal(s.open_rc, -ENOTSUP);
    assert_non_null(strstr(s.e.text, "CUDA cannot be used after fork"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_driver),
        cmocka_unit_test(a_damaged_driver),
        cmocka_unit_test(a_driver_too_old),
        cmocka_unit_test(no_device),
        cmocka_unit_test(a_driver_that_does_not_start),
        cmocka_unit_test(a_driver_that_is_there),
        cmocka_unit_test(after_a_fork),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
