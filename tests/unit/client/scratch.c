/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: scratch files give back what was written, say what is wrong with them, and never stand in for a file
 * that is not theirs. Method: tensors of host memory with every kind of layout; damage at every place; the
 * folder is looked at afterwards.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/larder.h"
#include "format/limits.h"
#include "tests/support/folder.h"

static char folder[256], path[300];

static int setup(void **state)
{
    (void)state;
    folder_make(folder, sizeof folder);
    snprintf(path, sizeof path, "%s/scratch", folder);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    folder_remove(folder);
    return 0;
}

static size_t files_in_folder(void)
{
    size_t n = 0;
    DIR *d = opendir(folder);
    assert_non_null(d);
    for (struct dirent *x; (x = readdir(d));)
        n += x->d_name[0] != '.';
    closedir(d);
    return n;
}

static uint64_t seed = 0x9e3779b97f4a7c15ull;

static void fill(void *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        ((uint8_t *)p)[i] = (uint8_t)(seed >> 56);
    }
}

#define LARGE (9u << 20) /* three chunks */

static struct {
    uint8_t large[LARGE], large_again[LARGE];
    float matrix[40][60], matrix_again[60][40];
    uint16_t box[7][5], box_again[7][5];
    double scalar, scalar_again;
} data;

/* large: packed; matrix: written as it lies, read transposed; box: of a larger tensor, with gaps; scalar;
 * nothing. */
static void describe(struct larder_tensor t[5], int again)
{
    memset(t, 0, 5 * sizeof *t);
    t[0] = (struct larder_tensor){.name = "large", .dtype = LARDER_U8, .dims = 1, .shape = {LARGE}};
    t[0].data = again ? data.large_again : data.large;
    t[1] = (struct larder_tensor){.name = "matrix", .dtype = LARDER_F32, .dims = 2, .shape = {40, 60}};
    t[1].data = again ? (void *)data.matrix_again : (void *)data.matrix;
    if (again) {
        t[1].strides[0] = 1;
        t[1].strides[1] = 40;
    }
    t[2] = (struct larder_tensor){.name = "box",
                                  .dtype = LARDER_BF16,
                                  .dims = 2,
                                  .shape = {100, 9},
                                  .offsets = {50, 2},
                                  .lengths = {7, 3}};
    t[2].strides[0] = 5;
    t[2].strides[1] = 1;
    t[2].data = again ? data.box_again : data.box;
    t[3] = (struct larder_tensor){.name = "scalar", .dtype = LARDER_F64};
    t[3].data = again ? &data.scalar_again : &data.scalar;
    t[4] = (struct larder_tensor){.name = "nothing", .dtype = LARDER_I64, .dims = 2, .shape = {2, 0}};
}

static void write_all(void)
{
    struct larder_tensor t[5];
    struct larder_error e = {0};
    fill(data.large, sizeof data.large);
    fill(data.matrix, sizeof data.matrix);
    fill(data.box, sizeof data.box);
    fill(&data.scalar, sizeof data.scalar);
    describe(t, 0);
    assert_int_equal(larder_scratch_write(path, t, 5, NULL, NULL, &e), 0);
}

static int read_all(struct larder_error *e)
{
    struct larder_tensor t[5];
    memset(data.large_again, 0, sizeof data.large_again);
    memset(data.matrix_again, 0, sizeof data.matrix_again);
    memset(data.box_again, 0x77, sizeof data.box_again);
    data.scalar_again = 0;
    describe(t, 1);
    return larder_scratch_read(path, t, 5, NULL, NULL, e);
}

static void all_comes_back(void **state)
{
    struct larder_error e = {0};
    struct stat st;
    (void)state;
    write_all();
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(read_all(&e), 0);
    assert_memory_equal(data.large, data.large_again, LARGE);
    assert_memory_equal(&data.scalar, &data.scalar_again, 8);
    for (size_t i = 0; i < 40; i++)
        for (size_t j = 0; j < 60; j++)
            assert_memory_equal(&data.matrix[i][j], &data.matrix_again[j][i], 4);
    for (size_t i = 0; i < 7; i++)
        for (size_t j = 0; j < 5; j++)
            assert_int_equal(data.box_again[i][j], j < 3 ? data.box[i][j] : 0x7777);
    assert_int_equal(files_in_folder(), 1);
}

static void the_old_is_replaced_and_the_path_is_told(void **state)
{
    struct larder_scratch_info w = LARDER_INIT(larder_scratch_info), r = LARDER_INIT(larder_scratch_info);
    uint32_t value = 7, again = 0;
    struct larder_tensor t = {.name = "x", .dtype = LARDER_U32, .data = &value};
    (void)state;
    write_all();
    assert_int_equal(larder_scratch_write(path, &t, 1, NULL, &w, NULL), 0);
    t.data = &again;
    assert_int_equal(larder_scratch_read(path, &t, 1, NULL, &r, NULL), 0);
    assert_int_equal(again, 7);
    assert_int_equal(w.bytes, 4);
    assert_int_equal(r.bytes, 4);
    assert_string_equal(w.path, "host memory: read and written in place");
    assert_string_equal(r.path, w.path);
    assert_int_equal(files_in_folder(), 1);
}

static void what_is_not_there_or_differs_is_named(void **state)
{
    struct larder_error e = {0};
    float f[8] = {0};
    struct larder_tensor t = {.name = "other", .dtype = LARDER_F32, .dims = 1, .shape = {8}, .data = f};
    (void)state;
    assert_int_equal(larder_scratch_read(path, &t, 1, NULL, NULL, &e), -ENOENT); /* the file */
    assert_int_equal(
        larder_scratch_write(
            path,
            &(struct larder_tensor){.name = "x", .dtype = LARDER_F32, .dims = 1, .shape = {8}, .data = f}, 1,
            NULL, NULL, &e),
        0);
    assert_int_equal(larder_scratch_read(path, &t, 1, NULL, NULL, &e), -ENOENT);
    assert_non_null(strstr(e.text, "tensor \"other\": it is not in the file"));
    t.name = "x";
    t.dtype = LARDER_I32;
    assert_int_equal(larder_scratch_read(path, &t, 1, NULL, NULL, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "F32 in the file, I32 was asked for"));
    t.dtype = LARDER_F32;
    t.shape[0] = 7;
    assert_int_equal(larder_scratch_read(path, &t, 1, NULL, NULL, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "[0:8]"));
    t.shape[0] = 8;
    t.strides[0] = 0;
    t.data = NULL;
    assert_int_equal(larder_scratch_read(path, &t, 1, NULL, NULL, &e), -EINVAL);
    struct larder_tensor twice[2] = {{.name = "a", .dtype = LARDER_F32, .data = f},
                                     {.name = "a", .dtype = LARDER_F32, .data = f}};
    assert_int_equal(larder_scratch_write(path, twice, 2, NULL, NULL, &e), -EINVAL);
    assert_int_equal(larder_scratch_write("", twice, 1, NULL, NULL, &e), -EINVAL);
    assert_int_equal(files_in_folder(), 1);
}

static void put_file(const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void other_files_are_not_overwritten(void **state)
{
    struct larder_error e = {0};
    uint8_t x = 1;
    struct larder_tensor t = {.name = "x", .dtype = LARDER_U8, .data = &x};
    char text[64] = "";
    static const char *const contents[] = {"", "a thesis", "12345678LARDSCR"};
    (void)state;
    for (size_t i = 0; i < 3; i++) {
        put_file(contents[i]);
        assert_int_equal(larder_scratch_write(path, &t, 1, NULL, NULL, &e), -EEXIST);
        assert_non_null(strstr(e.text, "no scratch file"));
        FILE *f = fopen(path, "r");
        size_t n = fread(text, 1, sizeof text - 1, f);
        fclose(f);
        text[n] = '\0';
        assert_string_equal(text, contents[i]);
        assert_true(larder_scratch_read(path, &t, 1, NULL, NULL, &e) == -EBADMSG);
    }
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_true(larder_scratch_write(path, &t, 1, NULL, NULL, &e) < 0);
    assert_int_equal(rmdir(path), 0);
    char missing[400];
    snprintf(missing, sizeof missing, "%s/no/such/folder", folder);
    assert_int_equal(larder_scratch_write(missing, &t, 1, NULL, NULL, &e), -ENOENT);
    assert_int_equal(files_in_folder(), 0);
}

static void flip(off_t at)
{
    uint8_t byte;
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

/* Every byte of header and table, and bytes of every chunk. */
static void damage_is_found_and_named(void **state)
{
    struct larder_error e = {0};
    struct stat st;
    (void)state;
    write_all();
    assert_int_equal(stat(path, &st), 0);
    const off_t chunk = 4 << 20, border = BLOCK_BYTES,
                in_data[] = {border, border + chunk + 5, border + LARGE - 1};
    for (size_t i = 0; i < 3; i++) {
        flip(in_data[i]);
        assert_int_equal(read_all(&e), -EBADMSG);
        assert_non_null(strstr(e.text, "tensor \"large\""));
        char at[64];
        snprintf(at, sizeof at, "from %lld on", (long long)(border + (off_t)i * chunk));
        assert_non_null(strstr(e.text, at));
        flip(in_data[i]);
    }
    const off_t table = st.st_size / border * border; /* it is shorter than a block, and ends the file */
    for (off_t at = 0; at < st.st_size; at++) {
        if (at == border)
            at = table; /* zeros between data and table are nobody's */
        flip(at);
        int rc = read_all(&e);
        assert_true(rc == -EBADMSG || rc == -EPROTONOSUPPORT);
        flip(at);
        if (at > 64 && at < border - 40)
            at += 16;
    }
    assert_int_equal(read_all(&e), 0);
    for (off_t n = 0; n < st.st_size; n += n < 4096 ? 512 : st.st_size / 7) {
        assert_int_equal(truncate(path, st.st_size - 1 - n), 0);
        assert_int_equal(read_all(&e), -EBADMSG);
        write_all();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(all_comes_back, setup, teardown),
        cmocka_unit_test_setup_teardown(the_old_is_replaced_and_the_path_is_told, setup, teardown),
        cmocka_unit_test_setup_teardown(what_is_not_there_or_differs_is_named, setup, teardown),
        cmocka_unit_test_setup_teardown(other_files_are_not_overwritten, setup, teardown),
        cmocka_unit_test_setup_teardown(damage_is_found_and_named, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
