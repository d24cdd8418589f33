/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: folders of MDS shards and of token files are published as they are, and what does not belong together
 * is told (D6, D16); an archive with a member over 8 GiB is found and read; sample indexes outlive the server
 * in files that are used only if they are whole and of the very files that are there. Method: real folders, a
 * server started again and again. That a kept index was used shows in a shard whose bytes were damaged
 * without a trace in size, time and inode: whoever looks through it again fails.
 */
#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/support/folder.h"
#include "tests/support/mosaic.h"
#include "tests/support/publishing.h"
#include "tests/support/tarball.h"

struct fixture {
    struct served s;
    struct caller c;
    char folder[160], store[160];
    struct published_dir dir;
};

static void start(struct fixture *x, uint64_t reserve)
{
    served_start(&x->s, &(struct served_options){.loop_count = 2,
                                                 .published = &x->dir,
                                                 .published_count = 1,
                                                 .store_folder = x->store,
                                                 .space_reserve_bytes = reserve});
    caller_join(&x->c, &x->s, served_user("acme", ROLE_READER));
}

static void stop(struct fixture *x)
{
    caller_close(&x->c);
    served_stop(&x->s, 1000);
}

static void begin(struct fixture *x, enum shard_format format, struct token_window window)
{
    *x = (struct fixture){0};
    folder_make(x->folder, sizeof x->folder);
    folder_make(x->store, sizeof x->store);
    x->dir = (struct published_dir){
        .name = "set", .path = x->folder, .tenant = "*", .format = format, .window = window};
}

static void end(struct fixture *x)
{
    folder_remove(x->folder);
    folder_remove(x->store);
}

static char *path_of(const char *folder, const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

/* The index of a shard of what is there now; NULL and *e: why there is none. */
static struct samples *index_of(struct fixture *x, uint32_t shard, struct err *e)
{
    struct published_opened o;
    struct buf got = {0};
    struct samples *s = NULL;
    if (published_open(&x->c, "set", &o) != ERR_NONE)
        fail_msg("%s", o.err.text);
    *e = caller_gather(&x->c, published_ask_samples(&x->c, &o.version, UINT64_MAX, shard), &got, SIZE_MAX);
    if (e->class == ERR_NONE && samples_decode(got.p, got.n, o.bytes[shard], &s, e) < 0)
        fail_msg("%s", e->text);
    buf_free(&got);
    return s;
}

static uint64_t count_of(struct fixture *x, uint32_t shard)
{
    struct err e;
    struct samples *s = index_of(x, shard, &e);
    if (!s)
        fail_msg("%s", e.text);
    uint64_t n = samples_count(s);
    samples_free(s);
    return n;
}

static void assert_no_index(struct fixture *x, uint32_t shard, enum err_class class, const char *word)
{
    struct err e;
    struct samples *s = index_of(x, shard, &e);
    if (s || e.class != class || !strstr(e.text, word))
        fail_msg("%s expected, found %s", word, s ? "samples" : e.text);
}

static void assert_not_opened(struct fixture *x, enum err_class class, const char *word, const char *other)
{
    struct published_opened o;
    if (published_open(&x->c, "set", &o) != class || !strstr(o.err.text, word) || !strstr(o.err.text, other))
        fail_msg("class %d: %s", o.err.class, o.err.text);
    assert_non_null(strstr(o.err.text, "published directory set"));
}

/* ---- MDS ---- */

static const struct mosaic_column columns[] = {{"id", "int32", 4}, {"text", "str", -1}};

static void fill(void *arg, uint32_t sample, uint32_t column, struct buf *out)
{
    (void)arg;
    if (column == 0)
        buf_u32(out, sample);
    else
        for (uint32_t i = 0; i < sample % 9; i++)
            buf_u8(out, (uint8_t)('a' + i));
}

/* Three shards, in an order that is not that of their names, one in a folder below. */
static void write_mds(const char *folder, uint32_t samples)
{
    static const char *const names[] = {"z.mds", "a.mds", "more/a.mds"};
    struct mosaic_entry entries[3];
    struct buf json = {0};
    (void)mkdir(path_of(folder, "more"), 0777);
    for (uint32_t i = 0; i < 3; i++) {
        struct buf shard = {0};
        mosaic_shard(&shard, columns, 2, samples + i, fill, NULL);
        folder_file(folder, names[i], shard.p, shard.n);
        entries[i] = (struct mosaic_entry){.raw = names[i], .raw_bytes = shard.n, .samples = samples + i};
        if (i == 1) {
            entries[i].zip = "a.mds.zstd";
            entries[i].compression = "zstd";
        }
        buf_free(&shard);
    }
    mosaic_index(&json, columns, 2, entries, 3);
    folder_replace(folder, "index.json", json.p, json.n);
    buf_free(&json);
}

static void mds_is_served_as_its_index_says(void **state)
{
    (void)state;
    struct fixture x;
    struct published_opened o, again;
    struct err e;
    struct buf got = {0};
    begin(&x, SHARD_MDS, (struct token_window){0});
    write_mds(x.folder, 10);
    folder_file(x.folder, "b.mds", "not of the dataset", 18);
    start(&x, 0);
    assert_int_equal(published_open(&x.c, "set", &o), ERR_NONE);
    assert_int_equal(o.count, 3);
    assert_string_equal(o.names[0], "z.mds");
    assert_string_equal(o.names[1], "a.mds");
    assert_string_equal(o.names[2], "more/a.mds");
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(count_of(&x, i), 10 + i);
    struct samples *s = index_of(&x, 2, &e);
    struct sample_field f = samples_field(s, 7, 1);
    assert_true(slice_eq(f.name, slice_str("text")) && slice_eq(f.type, slice_str("str")) && f.bytes == 7);
    e = caller_gather(&x.c, published_ask_read(&x.c, &o.version, UINT64_MAX, 2, f.offset, f.bytes), &got,
                      SIZE_MAX);
    assert_true(e.class == ERR_NONE && slice_eq(SLICE(got.p, got.n), slice_str("abcdefg")));
    samples_free(s);
    buf_free(&got);
    /* Another index is another version, though no shard has changed. */
    write_mds(x.folder, 10);
    assert_int_equal(published_open(&x.c, "set", &again), ERR_NONE);
    assert_false(id_equal(&o.version, &again.version));
    stop(&x);
    end(&x);
}

static void faults_of_mds_are_told(void **state)
{
    (void)state;
    struct fixture x;
    begin(&x, SHARD_MDS, (struct token_window){0});
    start(&x, 0);
    assert_not_opened(&x, ERR_IO, "looking at", "index.json");
    folder_file(x.folder, "index.json", "{\"version\": 1}", 14);
    assert_not_opened(&x, ERR_VERSION, "index.json", "version 1, this larder knows version 2");
    write_mds(x.folder, 10);
    assert_int_equal(truncate(path_of(x.folder, "z.mds"), 200), 0);
    assert_no_index(&x, 0, ERR_CORRUPT, "shard \"z.mds\": 200 bytes, its index.json says");
    assert_int_equal(count_of(&x, 1), 11); /* the others are fine */
    assert_int_equal(unlink(path_of(x.folder, "a.mds")), 0);
    assert_not_opened(&x, ERR_IO, "a.mds is missing, and so is its packed form a.mds.zstd",
                      "index.json names them");
    assert_int_equal(unlink(path_of(x.folder, "z.mds")), 0);
    assert_not_opened(&x, ERR_IO, "z.mds is missing", "index.json names it");
    stop(&x);
    end(&x);
}

/* D6: offsets that have wrapped. The shard is sparse. */
static void wrapped_offsets_are_told(void **state)
{
    (void)state;
    struct fixture x;
    struct mosaic_entry entry = {.raw = "big.mds", .raw_bytes = (5ull << 30) + 20, .samples = 2};
    struct buf json = {0}, head = {0};
    begin(&x, SHARD_MDS, (struct token_window){0});
    mosaic_index(&json, &columns[1], 1, &entry, 1);
    folder_file(x.folder, "index.json", json.p, json.n);
    buf_u32(&head, 2);
    buf_u32(&head, 16);
    buf_u32(&head, 3u << 30);
    buf_u32(&head, (1u << 30) + 20);
    folder_file(x.folder, "big.mds", head.p, head.n);
    assert_int_equal(truncate(path_of(x.folder, "big.mds"), (off_t)entry.raw_bytes), 0);
    start(&x, 0);
    assert_no_index(&x, 0, ERR_CORRUPT, "have wrapped");
    stop(&x);
    end(&x);
    buf_free(&json);
    buf_free(&head);
}

/* ---- token files ---- */

static void write_pair(const char *folder, const char *name, int32_t tokens)
{
    char file[64];
    const int32_t lengths[] = {3, tokens - 3};
    const int64_t borders[] = {0, 1, 2};
    struct buf idx = {0}, bin = {0};
    mosaic_idx(&idx, 8, 2, lengths, 2, borders, 3);
    buf_zeros(&bin, (size_t)tokens * 2);
    snprintf(file, sizeof file, "%s.bin", name);
    folder_file(folder, file, bin.p, bin.n);
    snprintf(file, sizeof file, "%s.idx", name);
    folder_replace(folder, file, idx.p, idx.n);
    buf_free(&idx);
    buf_free(&bin);
}

static void pairs_are_shards(void **state)
{
    (void)state;
    struct fixture x;
    struct published_opened o, again;
    for (int windows = 0; windows < 2; windows++) {
        begin(&x, SHARD_TOKENS, windows ? (struct token_window){5, 1} : (struct token_window){0});
        write_pair(x.folder, "b", 40);
        write_pair(x.folder, "a.b", 17);
        folder_file(x.folder, "README", "text", 4);
        folder_file(x.folder, ".c.bin", "being written", 13);
        start(&x, 0);
        assert_int_equal(published_open(&x.c, "set", &o), ERR_NONE);
        assert_int_equal(o.count, 2);
        assert_string_equal(o.names[0], "a.b.bin");
        assert_string_equal(o.names[1], "b.bin");
        assert_int_equal(o.bytes[1], 80);
        assert_int_equal(count_of(&x, 0), windows ? 3 : 2);
        assert_int_equal(count_of(&x, 1), windows ? 7 : 2);
        /* The .idx is part of the version. */
        write_pair(x.folder, "b", 40);
        assert_int_equal(published_open(&x.c, "set", &again), ERR_NONE);
        assert_false(id_equal(&o.version, &again.version));
        stop(&x);
        end(&x);
    }
}

/* D16 */
static void wrong_pairs_are_told(void **state)
{
    (void)state;
    struct fixture x;
    begin(&x, SHARD_TOKENS, (struct token_window){0});
    write_pair(x.folder, "a", 20);
    write_pair(x.folder, "b", 20);
    start(&x, 0);
    assert_int_equal(truncate(path_of(x.folder, "a.bin"), 30), 0);
    assert_no_index(&x, 0, ERR_CORRUPT, "the .bin has 30");
    assert_int_equal(count_of(&x, 1), 2);
    assert_int_equal(unlink(path_of(x.folder, "b.idx")), 0);
    assert_not_opened(&x, ERR_IO, "b.idx is missing", "pairs");
    write_pair(x.folder, "b", 20);
    assert_int_equal(unlink(path_of(x.folder, "b.bin")), 0);
    assert_not_opened(&x, ERR_IO, "b.bin is missing", "pairs");
    stop(&x);
    end(&x);
}

/* ---- archives ---- */

/* A member over 8 GiB, whose size octal does not hold: by base-256 (GNU) and by a PAX header. D3's large
 * kind. */
static void members_over_8_gib(void **state)
{
    (void)state;
    const uint64_t huge = (9ull << 30) + 5;
    for (int pax = 0; pax < 2; pax++) {
        struct fixture x;
        struct buf head = {0}, tail = {0}, got = {0};
        struct published_opened o;
        struct err e;
        char text[32];
        begin(&x, SHARD_TAR, (struct token_window){0});
        snprintf(text, sizeof text, "%llu", (unsigned long long)huge);
        if (pax)
            tarball_pax(&head, 'x', "size", text);
        tarball_header(&head, '0', "a.bin", pax ? 0 : huge);
        tarball_file(&tail, TARBALL_USTAR, "b.txt", "behind it", 9);
        tarball_end(&tail);
        folder_file(x.folder, "big.tar", head.p, head.n);
        uint64_t at = head.n + (huge + 511) / 512 * 512;
        int fd = open(path_of(x.folder, "big.tar"), O_WRONLY);
        assert_int_equal(pwrite(fd, "end of a", 8, (off_t)(head.n + huge - 8)), 8);
        assert_int_equal(pwrite(fd, tail.p, tail.n, (off_t)at), (ssize_t)tail.n);
        close(fd);
        start(&x, 0);
        assert_int_equal(published_open(&x.c, "set", &o), ERR_NONE);
        struct samples *s = index_of(&x, 0, &e);
        assert_non_null(s);
        assert_int_equal(samples_count(s), 2);
        struct sample_field a = samples_field(s, 0, 0), b = samples_field(s, 1, 0);
        assert_true(a.bytes == huge && b.bytes == 9 && b.offset == at + 512);
        e = caller_gather(&x.c, published_ask_read(&x.c, &o.version, 100, 0, a.offset + huge - 8, 8), &got,
                          SIZE_MAX);
        e = caller_gather(&x.c, published_ask_read(&x.c, &o.version, 100, 0, b.offset, 9), &got, SIZE_MAX);
        assert_true(e.class == ERR_NONE && slice_eq(SLICE(got.p, got.n), slice_str("end of abehind it")));
        samples_free(s);
        buf_free(&head);
        buf_free(&tail);
        buf_free(&got);
        stop(&x);
        end(&x);
    }
}

/* ---- kept indexes ---- */

#define KEPT "sample-indexes"

/* Names of files in the store's folder of indexes. */
static unsigned kept_files(const struct fixture *x, char names[4][64])
{
    unsigned n = 0;
    DIR *d = opendir(path_of(x->store, KEPT));
    for (struct dirent *one; d && (one = readdir(d));)
        if (one->d_name[0] != '.' && n < 4)
            snprintf(names[n++], 64, KEPT "/%s", one->d_name);
    if (d)
        closedir(d);
    return n;
}

/* Changes a byte in place; size, time of change and inode stay. */
static void damage_unseen(const char *path, off_t at)
{
    struct stat st;
    uint8_t byte = 0;
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0 && fstat(fd, &st) == 0 && pread(fd, &byte, 1, at) == 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    assert_int_equal(futimens(fd, (struct timespec[]){st.st_atim, st.st_mtim}), 0);
    close(fd);
}

static void write_tar(const struct fixture *x, const char *name, int samples)
{
    struct buf b = {0};
    for (int i = 0; i < samples; i++) {
        char member[32];
        snprintf(member, sizeof member, "%04d.txt", i);
        tarball_file(&b, TARBALL_USTAR, member, "x", 1);
    }
    tarball_end(&b);
    folder_replace(x->folder, name, b.p, b.n);
    buf_free(&b);
}

static void restart(struct fixture *x)
{
    stop(x);
    start(x, 0);
}

static void indexes_outlive_the_server(void **state)
{
    (void)state;
    struct fixture x;
    char names[4][64];
    begin(&x, SHARD_TAR, (struct token_window){0});
    write_tar(&x, "a.tar", 7);
    start(&x, 0);
    assert_int_equal(kept_files(&x, names), 0);
    assert_int_equal(count_of(&x, 0), 7);
    assert_int_equal(kept_files(&x, names), 1);
    /* From now on, looking through the shard fails; its index does not need that. */
    damage_unseen(path_of(x.folder, "a.tar"), 3);
    restart(&x);
    assert_int_equal(count_of(&x, 0), 7);
    /* A kept index with any byte changed is not used: the shard is looked through, and its damage found. */
    struct stat st;
    assert_int_equal(stat(path_of(x.store, names[0]), &st), 0);
    for (off_t at = 0; at < st.st_size; at += st.st_size / 7) {
        damage_unseen(path_of(x.store, names[0]), at);
        restart(&x);
        assert_no_index(&x, 0, ERR_CORRUPT, "no tar header at offset 0");
        damage_unseen(path_of(x.store, names[0]), at);
    }
    /* Nor one that was cut, or that is gone. */
    restart(&x);
    assert_int_equal(count_of(&x, 0), 7);
    assert_int_equal(truncate(path_of(x.store, names[0]), st.st_size - 1), 0);
    restart(&x);
    assert_no_index(&x, 0, ERR_CORRUPT, "no tar header");
    /* The shard is mended: its index is made again, and replaces the one that was no good. */
    damage_unseen(path_of(x.folder, "a.tar"), 3);
    assert_int_equal(count_of(&x, 0), 7);
    damage_unseen(path_of(x.folder, "a.tar"), 3);
    restart(&x);
    assert_int_equal(count_of(&x, 0), 7);
    stop(&x);
    end(&x);
}

static void stale_indexes_are_made_again(void **state)
{
    (void)state;
    struct fixture x;
    char names[4][64];
    begin(&x, SHARD_TAR, (struct token_window){0});
    write_tar(&x, "a.tar", 7);
    start(&x, 0);
    assert_int_equal(count_of(&x, 0), 7);
    write_tar(&x, "a.tar", 9);
    restart(&x);
    assert_int_equal(count_of(&x, 0), 9);
    assert_int_equal(kept_files(&x, names), 1); /* in the place of the other */
    /* The index of one shard in the place of another's: whole, but not of it. */
    write_tar(&x, "b.tar", 2);
    assert_int_equal(count_of(&x, 1), 2);
    assert_int_equal(kept_files(&x, names), 2);
    char from[512];
    snprintf(from, sizeof from, "%s", path_of(x.store, names[0]));
    assert_int_equal(rename(from, path_of(x.store, names[1])), 0);
    restart(&x);
    assert_int_equal(count_of(&x, 0), 9);
    assert_int_equal(count_of(&x, 1), 2);
    stop(&x);
    end(&x);
}

/* What is read is the .idx; what the index was made from is both. */
static void kept_indexes_of_pairs(void **state)
{
    (void)state;
    struct fixture x;
    begin(&x, SHARD_TOKENS, (struct token_window){0});
    write_pair(x.folder, "a", 40);
    start(&x, 0);
    assert_int_equal(count_of(&x, 0), 2);
    damage_unseen(path_of(x.folder, "a.idx"), 0);
    restart(&x);
    assert_int_equal(count_of(&x, 0), 2);
    /* The same files with another window are another matter. */
    stop(&x);
    x.dir.window = (struct token_window){10, 0};
    start(&x, 0);
    assert_no_index(&x, 0, ERR_CORRUPT, "expected \"MMIDIDX\"");
    write_pair(x.folder, "a", 40);
    assert_int_equal(count_of(&x, 0), 4);
    stop(&x);
    end(&x);
}

static void the_space_that_is_kept_free_is_left(void **state)
{
    (void)state;
    struct fixture x;
    char names[4][64];
    begin(&x, SHARD_TAR, (struct token_window){0});
    write_tar(&x, "a.tar", 7);
    start(&x, 1ull << 60);
    assert_int_equal(count_of(&x, 0), 7);
    assert_int_equal(kept_files(&x, names), 0);
    stop(&x);
    end(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mds_is_served_as_its_index_says),
        cmocka_unit_test(faults_of_mds_are_told),
        cmocka_unit_test(wrapped_offsets_are_told),
        cmocka_unit_test(pairs_are_shards),
        cmocka_unit_test(wrong_pairs_are_told),
        cmocka_unit_test(members_over_8_gib),
        cmocka_unit_test(indexes_outlive_the_server),
        cmocka_unit_test(stale_indexes_are_made_again),
        cmocka_unit_test(kept_indexes_of_pairs),
        cmocka_unit_test(the_space_that_is_kept_free_is_left),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
