/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: whether cuFile is there, and in which mode, is told as it is; its types are NVIDIA's. It is looked
 * for once per process, so every case has a child of its own, on the stand-ins. The library's header is
 * compiled against ours where it is found.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "gpudirect/cufile.h"
#include "tests/support/folder.h"
#include "tests/support/standin_cufile.h"

struct found {
    struct cufile_probe probe;
    int opened;     /* what cufile_open gave for a file of a disk */
    char path[240]; /* or why not */
};

static void look(const char *cuda_settings, const char *settings, int flags, struct found *out)
{
    char folder[256], path[300];
    struct memory *m = NULL;
    struct cufile *f = NULL;
    struct err e = {0};
    if (cuda_settings)
        (void)standin_load(cuda_settings);
    if (cuda_settings && settings)
        (void)standin_cufile_load(settings);
    cufile_probe(&out->probe);
    if (!cuda_settings || memory_open(MEMORY_CUDA, 0, &m, &e) < 0)
        return;
    folder_make(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/file", folder);
    int fd = open(path, O_CREAT | O_RDWR, 0600);
    int direct = flags ? open(path, O_RDWR | flags) : -1;
    out->opened = cufile_open(m, direct >= 0 ? direct : fd, &f, &e);
    snprintf(out->path, sizeof out->path, "%s", out->opened == 0 ? cufile_path(f) : e.text);
    cufile_close(f);
    memory_close(m);
    folder_remove(folder);
}

/* In a child. Settings NULL: without that stand-in. */
static struct found look_with(const char *cuda_settings, const char *settings, int flags)
{
    struct found found = {0};
    int pipes[2], status;
    assert_int_equal(pipe(pipes), 0);
    pid_t child = fork();
    if (child == 0) {
        setenv("LD_LIBRARY_PATH", "/nowhere", 1);
        look(cuda_settings, settings, flags, &found);
        _exit(write(pipes[1], &found, sizeof found) == (ssize_t)sizeof found ? 0 : 1);
    }
    close(pipes[1]);
    ssize_t n = read(pipes[0], &found, sizeof found);
    close(pipes[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(n, sizeof found);
    return found;
}

#define CUDA "memory=1M"

static void assert_unusable(const struct found *f, const char *word)
{
    if (f->probe.usable || !strstr(f->probe.note, word))
        print_error("usable %d: %s\n", f->probe.usable, f->probe.note);
    assert_false(f->probe.usable);
    assert_non_null(strstr(f->probe.note, word));
}

static void what_is_missing_is_named(void **state)
{
    struct found f;
    (void)state;
    f = look_with("devices=0", "nvfs=226", 0);
    assert_unusable(&f, "cuFile needs CUDA");
    f = look_with(CUDA, "fail=open:1:5007", 0);
    assert_unusable(&f, "does not start: opening its driver: cuFile says 5007: this platform");
    assert_int_equal(f.opened, -ENOTSUP);
    assert_string_equal(f.path, f.probe.note);
    f = look_with(CUDA, "fail=properties:1:5030", 0);
    assert_unusable(&f, "asking for its properties: cuFile says 5030");
    f = look_with(CUDA, "fail=open:1:5011", 0);
    assert_unusable(&f, "CUDA says 0");
    f = look_with(CUDA, "nvfs=0 compatible=0", 0);
    assert_unusable(&f, "allow_compat_mode");
}

static void modes_are_told(void **state)
{
    struct found f;
    (void)state;
    f = look_with(CUDA, "nvfs=226", O_DIRECT);
    assert_true(f.probe.usable && !f.probe.compatible);
    assert_string_equal(f.probe.note, "with nvidia-fs 2.26");
    assert_int_equal(f.opened, 0);
    assert_true(strncmp(f.path, "cuFile, direct", 14) == 0 || strstr(f.path, "no direct I/O"));
    f = look_with(CUDA, "nvfs=226", 0); /* the file is open without direct I/O */
    assert_string_equal(f.path, "cuFile, compatibility mode: the file system has no direct I/O");
    f = look_with(CUDA, "nvfs=226 compatible=0", 0);
    assert_int_equal(f.opened, -ENOTSUP);
    assert_non_null(strstr(f.path, "the file is not open for direct I/O"));
    f = look_with(CUDA, "nvfs=0", O_DIRECT);
    assert_true(f.probe.usable && f.probe.compatible);
    assert_string_equal(f.path, "cuFile, compatibility mode: nvidia-fs is not loaded");
    f = look_with(CUDA, "nvfs=0 p2p=1", O_DIRECT);
    assert_true(f.probe.usable && !f.probe.compatible);
    assert_non_null(strstr(f.probe.note, "P2PDMA"));
    f = look_with(CUDA, "nvfs=226 kinds=0", O_DIRECT);
    assert_true(f.probe.usable && strncmp(f.path, "cuFile, direct\0", 15) != 0);
    f = look_with(CUDA, "fail=register:1:5008", O_DIRECT);
    assert_int_equal(f.opened, -ENOTSUP);
    assert_non_null(strstr(f.path, "making the file known to cuFile: cuFile says 5008"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_missing_is_named),
        cmocka_unit_test(modes_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
