/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: files reach device memory and leave it whole, by cuFile and by the bounce buffer; each tells its way;
 * a failure of one is told and never covered by the other; nothing is left behind. On the stand-ins for
 * CUDA's driver and for cuFile.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "gpudirect/file.h"
#include "tests/support/folder.h"
#include "tests/support/standin_cufile.h"

#define BYTES (7u << 20) /* more than the bounce buffer holds */

static const struct standin *cuda;
static const struct standin_cufile *cufile;

struct bench {
    struct memory *m;
    uint8_t *device;
    uint8_t *host, *again;
    char folder[256], path[300];
};

static int setup(void **state)
{
    struct bench *b = calloc(1, sizeof *b);
    assert_int_equal(memory_open(MEMORY_CUDA, 0, &b->m, NULL), 0);
    assert_int_equal(memory_alloc(b->m, BYTES, (void **)&b->device, NULL), 0);
    b->host = malloc(BYTES);
    b->again = malloc(BYTES);
    for (size_t i = 0; i < BYTES; i++)
        b->host[i] = (uint8_t)(i * 2654435761u >> 11);
    memcpy(cuda->standin_peek(b->device), b->host, BYTES);
    folder_make(b->folder, sizeof b->folder);
    snprintf(b->path, sizeof b->path, "%s/file", b->folder);
    *state = b;
    return 0;
}

static int teardown(void **state)
{
    struct bench *b = *state;
    struct standin_counts n;
    struct standin_cufile_counts f;
    memory_free(b->m, b->device);
    memory_close(b->m);
    folder_remove(b->folder);
    free(b->host);
    free(b->again);
    free(b);
    cuda->standin_counts(&n);
    cufile->standin_cufile_counts(&f);
    assert_int_equal(n.lost_handles + n.allocations + n.registrations + n.streams + n.events + n.modules, 0);
    assert_int_equal(f.files, 0);
    return 0;
}

static struct file_access *access_of(struct memory *m, enum file_want want)
{
    struct file_access *a = NULL;
    assert_int_equal(file_access_open(m, want, &a, NULL), 0);
    return a;
}

static struct file *file_of(struct file_access *a, const char *path, enum file_mode mode)
{
    struct file *f = NULL;
    assert_int_equal(file_open(a, path, mode, &f, NULL), 0);
    return f;
}

/* Any offset and length, out of the device, looked at with the system's own read, and into the device again.
 */
static void round_trip(struct bench *b, enum file_want want)
{
    static const struct {
        uint64_t offset;
        size_t from, n;
    } cases[] = {{0, 0, BYTES},
                 {4096, 0, 4096},
                 {4097, 3, 1},
                 {123, 777, (5u << 20) + 1},
                 {BYTES + 11, 5, (1u << 20) - 1}};
    struct file_access *a = access_of(b->m, want);
    struct file *f = file_of(a, b->path, FILE_CREATE);
    uint8_t *peek = cuda->standin_peek(b->device);
    int fd = open(b->path, O_RDONLY);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint8_t *p = b->device + cases[i].from;
        size_t n = cases[i].n;
        memcpy(peek, b->host, BYTES);
        assert_int_equal(file_write(f, cases[i].offset, n, p, NULL), 0);
        assert_int_equal(pread(fd, b->again, n, (off_t)cases[i].offset), n);
        assert_memory_equal(b->again, b->host + cases[i].from, n);
        memset(peek, 0x11, BYTES);
        assert_int_equal(file_read(f, cases[i].offset, n, p, NULL), 0);
        assert_memory_equal(peek + cases[i].from, b->host + cases[i].from, n);
        for (size_t at = 0; at < BYTES; at++) /* and nothing around it */
            if (at < cases[i].from || at >= cases[i].from + n)
                assert_int_equal(peek[at], 0x11);
    }
    assert_int_equal(file_sync(f, NULL), 0);
    close(fd);
    file_close(f);
    file_access_close(a);
}

static void files_go_by_cufile(void **state)
{
    struct standin_cufile_counts before, after;
    struct standin_counts copies, then;
    cuda->standin_counts(&then);
    cufile->standin_cufile_counts(&before);
    round_trip(*state, FILE_BEST);
    cufile->standin_cufile_counts(&after);
    assert_true(after.reads > before.reads && after.writes > before.writes);
    cufile->standin_cufile_configure("short=100000"); /* whatever it moves at once */
    unlink(((struct bench *)*state)->path);
    round_trip(*state, FILE_BEST);
    cufile->standin_cufile_configure("short=0");
    cuda->standin_counts(&copies);
    assert_int_equal(copies.copies, then.copies);
}

static void files_go_by_the_bounce_buffer(void **state)
{
    struct standin_cufile_counts before, after;
    struct standin_counts copies, then;
    cuda->standin_counts(&then);
    cufile->standin_cufile_counts(&before);
    round_trip(*state, FILE_BOUNCE);
    cufile->standin_cufile_counts(&after);
    assert_int_equal(after.reads + after.writes, before.reads + before.writes);
    cuda->standin_counts(&copies);
    assert_true(copies.copies > then.copies);
    assert_int_equal(copies.pageable_copies, then.pageable_copies); /* all of it pinned */
}

static void files_of_host_memory_take_no_detour(void **state)
{
    struct bench *b = *state;
    struct memory *host = NULL;
    struct stat st;
    assert_int_equal(memory_open(MEMORY_HOST, 0, &host, NULL), 0);
    struct file_access *a = access_of(host, FILE_BEST);
    struct file *f = file_of(a, b->path, FILE_CREATE);
    assert_string_equal(file_path(f), "read and written in place");
    assert_int_equal(file_write(f, 5, BYTES, b->host, NULL), 0);
    assert_int_equal(file_read(f, 5, BYTES, b->again, NULL), 0);
    assert_memory_equal(b->host, b->again, BYTES);
    assert_int_equal(stat(b->path, &st), 0);
    assert_int_equal(st.st_size, BYTES + 5);
    file_close(f);
    file_access_close(a);
    memory_close(host);
}

static void assert_path(struct bench *b, enum file_want want, const char *path, const char *start,
                        const char *word)
{
    struct file_access *a = access_of(b->m, want);
    struct file *f = file_of(a, path, FILE_READ);
    if (strncmp(file_path(f), start, strlen(start)) != 0 || !strstr(file_path(f), word))
        print_error("%s\n", file_path(f));
    assert_memory_equal(file_path(f), start, strlen(start));
    assert_non_null(strstr(file_path(f), word));
    file_close(f);
    file_access_close(a);
}

static void every_file_tells_its_way(void **state)
{
    struct bench *b = *state;
    int fd = open(b->path, O_CREAT | O_RDWR, 0600);
    int direct = open(b->path, O_RDONLY | O_DIRECT);
    close(fd);
    assert_path(b, FILE_BOUNCE, b->path, "pinned bounce buffer: ", "as asked for");
    if (direct < 0) /* a file system without */
        assert_path(b, FILE_BEST, b->path, "cuFile, compatibility mode: ", "no direct I/O");
    else
        assert_path(b, FILE_BEST, b->path, "cuFile, direct", "");
    close(direct);
    cufile->standin_cufile_configure("fail=register:1:5008");
    assert_path(b, FILE_BEST, b->path, "pinned bounce buffer: ", "cuFile says 5008: not with this file");
    assert_path(b, FILE_BEST, "/proc/self/maps", "cuFile, compatibility mode: ", "direct I/O");
    cuda->standin_configure("register_max=4096");
    assert_path(b, FILE_BOUNCE, b->path, "bounce buffer (", "not registered");
}

/* The file is another one, shorter, or gone. */
static void what_is_wrong_with_a_file_is_told(void **state)
{
    struct bench *b = *state;
    struct err e;
    struct file *f = NULL;
    for (int want = FILE_BEST; want <= FILE_BOUNCE; want++) {
        struct file_access *a = access_of(b->m, (enum file_want)want);
        assert_int_equal(file_open(a, b->path, FILE_READ, &f, &e), -ENOENT);
        assert_int_equal(file_open(a, b->folder, FILE_READ, &f, &e), -EINVAL);
        assert_int_equal(file_open(a, "/dev/null", FILE_READ, &f, &e), -EINVAL);
        f = file_of(a, b->path, FILE_CREATE);
        struct file *second = NULL;
        assert_int_equal(file_open(a, b->path, FILE_CREATE, &second, &e), -EEXIST);
        assert_int_equal(file_write(f, 0, 5000, b->device, NULL), 0);
        file_close(f);
        f = file_of(a, b->path, FILE_READ);
        const struct stat then = *file_stat(f);
        assert_int_equal(file_unchanged(f, &then, &e), 0);
        assert_int_equal(file_read(f, 0, 5001, b->device, &e), -EBADMSG);
        assert_non_null(strstr(e.text, "ends at byte 5000, where 1 more"));
        assert_int_equal(truncate(b->path, 4999), 0);
        assert_int_equal(file_unchanged(f, &then, &e), -EILSEQ);
        assert_non_null(strstr(e.text, "it had 5000 bytes, and has 4999"));
        assert_int_equal(file_write(f, 0, 10, b->device, &e), -EBADF);
        file_close(f);
        unlink(b->path);
        file_access_close(a);
    }
}

static void failures_are_told_and_not_covered(void **state)
{
    struct bench *b = *state;
    struct file_access *a = access_of(b->m, FILE_BEST);
    struct file *f = file_of(a, b->path, FILE_CREATE);
    struct standin_counts before, after;
    struct err e;
    cuda->standin_counts(&before);
    assert_int_equal(file_write(f, 0, BYTES, b->device, NULL), 0);
    cufile->standin_cufile_configure("fail=read:1:5011");
    assert_int_equal(file_read(f, 0, BYTES, b->device, &e), -EIO);
    assert_non_null(strstr(e.text, "reading into device memory: cuFile says 5011"));
    cufile->standin_cufile_configure("fail=write:1:28");
    assert_int_equal(file_write(f, 0, BYTES, b->device, &e), -ENOSPC);
    assert_int_equal(file_read(f, 0, 100, b->host, &e), -EINVAL); /* no device memory */
    assert_non_null(strstr(e.text, "not device memory"));
    cuda->standin_counts(&after);
    assert_int_equal(after.copies, before.copies);
    file_close(f);
    file_access_close(a);
}

/* Whichever of the driver's calls fails in a bounce: an error, and nothing is under way or left. */
static void a_bounce_fails_cleanly(void **state)
{
    struct bench *b = *state;
    static const char *const calls[] = {"cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuEventRecord",
                                        "cuEventQuery"};
    struct file_access *a = access_of(b->m, FILE_BOUNCE);
    struct file *f = file_of(a, b->path, FILE_CREATE);
    struct err e;
    char text[64];
    assert_int_equal(file_write(f, 0, BYTES, b->device, NULL), 0);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        for (unsigned n = 1; n < 6; n += 2) {
            snprintf(text, sizeof text, "fail=%s:%u:%d", calls[i], n, CU_INVALID_VALUE);
            cuda->standin_configure(text);
            int rc = i == 1 ? file_write(f, 0, BYTES, b->device, &e) : file_read(f, 0, BYTES, b->device, &e);
            assert_int_equal(rc, -EINVAL);
            assert_int_equal(file_read(f, 0, BYTES, b->device, &e), 0);
        }
    file_close(f);
    file_access_close(a);
    snprintf(text, sizeof text, "fail=cuStreamCreateWithPriority:1:%d", CU_OUT_OF_MEMORY);
    cuda->standin_configure(text);
    assert_int_equal(file_access_open(b->m, FILE_BEST, &a, &e), -ENOMEM);
    a = access_of(b->m, FILE_BOUNCE);
    snprintf(text, sizeof text, "fail=cuEventCreate:3:%d", CU_OUT_OF_MEMORY);
    cuda->standin_configure(text);
    assert_int_equal(file_open(a, b->path, FILE_READ, &f, &e), -ENOMEM);
    f = file_of(a, b->path, FILE_READ); /* and then it is there */
    assert_int_equal(file_read(f, 0, BYTES, b->device, &e), 0);
    file_close(f);
    file_access_close(a);
}

/* Written is what the memory holds when the caller's stream has come so far. */
static void writes_come_after_the_callers_stream(void **state)
{
    struct bench *b = *state;
    struct memory_stream *caller = NULL;
    assert_int_equal(memory_stream_create(b->m, &caller, NULL), 0);
    for (int want = FILE_BEST; want <= FILE_BOUNCE; want++) {
        struct file_access *a = access_of(b->m, (enum file_want)want);
        struct file *f = file_of(a, b->path, FILE_CREATE);
        memset(cuda->standin_peek(b->device), 0, BYTES);
        assert_int_equal(memory_copy(caller, MEMORY_IN, b->device, b->host, BYTES, NULL), 0);
        assert_int_equal(file_after_caller(a, memory_stream_handle(caller), NULL), 0);
        assert_int_equal(file_write(f, 0, BYTES, b->device, NULL), 0);
        assert_int_equal(file_read_host(f, 0, BYTES, b->again, NULL), 0);
        assert_memory_equal(b->host, b->again, BYTES);
        file_close(f);
        unlink(b->path);
        file_access_close(a);
    }
    memory_stream_destroy(caller);
}

int main(void)
{
    cuda = standin_load("memory=16M seed=3 delay_us=200");
    cufile = standin_cufile_load(NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(files_go_by_cufile, setup, teardown),
        cmocka_unit_test_setup_teardown(files_go_by_the_bounce_buffer, setup, teardown),
        cmocka_unit_test_setup_teardown(files_of_host_memory_take_no_detour, setup, teardown),
        cmocka_unit_test_setup_teardown(what_is_wrong_with_a_file_is_told, setup, teardown),
        cmocka_unit_test_setup_teardown(failures_are_told_and_not_covered, setup, teardown),
        cmocka_unit_test_setup_teardown(a_bounce_fails_cleanly, setup, teardown),
        cmocka_unit_test_setup_teardown(writes_come_after_the_callers_stream, setup, teardown),
        cmocka_unit_test_setup_teardown(every_file_tells_its_way, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
