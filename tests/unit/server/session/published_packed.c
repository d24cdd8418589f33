/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: MDS shards that are there in their packed form only are published like raw ones: the same samples and
 * bytes, unpacked once for all who want them, within the room that they may take, never mixed when they are
 * replaced, found again by the next server, and what is wrong with one is told and harms no other. Method:
 * real folders, a server with several loops, its folder of unpacked files looked at from outside.
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
#include <time.h>
#include <unistd.h>
#include <zstd.h>

#include <cmocka.h>

#include "format/base/digest.h"
#include "server/obs/metrics.h"
#include "tests/support/folder.h"
#include "tests/support/mosaic.h"
#include "tests/support/publishing.h"

#define SHARDS 4u
#define KEPT   "unpacked-shards"
#define NEVER  UINT64_MAX /* credit enough for all */

static const struct mosaic_column column = {"text", "bytes", -1};

struct fixture {
    struct served s;
    struct caller c;
    char folder[160], store[160];
    struct published_dir dirs[2];
    size_t dir_count;
    uint64_t max, reserve;
    struct buf raw[SHARDS], packed[SHARDS];
    struct mosaic_entry entries[SHARDS];
};

static const char *const raw_names[SHARDS] = {"a.mds", "b.mds", "c.mds", "d.mds"};
static const char *const packed_names[SHARDS] = {"a.mds.zstd", "b.mds.zstd", "c.mds.zstd", "d.mds.zstd"};

/* ---- the folder ---- */

static void fill(void *arg, uint32_t sample, uint32_t number, struct buf *out)
{
    uint32_t x = *(uint32_t *)arg + sample * 7919u + number;
    for (uint32_t i = 0; i < 50000; i++) {
        x = x * 1664525u + 1013904223u;
        buf_u8(out, (uint8_t)('a' + (x >> 24) % 20)); /* shrinks a little */
    }
}

static void pack(const struct buf *raw, struct buf *out)
{
    buf_reset(out);
    uint8_t *p = malloc(ZSTD_compressBound(raw->n));
    size_t n = ZSTD_compress(p, ZSTD_compressBound(raw->n), raw->p, raw->n, 1);
    assert_false(ZSTD_isError(n));
    buf_put(out, p, n);
    free(p);
}

static void write_index(struct fixture *x)
{
    struct buf json = {0};
    mosaic_index(&json, &column, 1, x->entries, SHARDS);
    folder_replace(x->folder, "index.json", json.p, json.n);
    buf_free(&json);
}

/* Shard i, of so many samples, in its packed form. */
static void write_shard(struct fixture *x, uint32_t i, uint32_t samples, uint32_t seed)
{
    buf_reset(&x->raw[i]);
    mosaic_shard(&x->raw[i], &column, 1, samples, fill, &seed);
    pack(&x->raw[i], &x->packed[i]);
    folder_replace(x->folder, packed_names[i], x->packed[i].p, x->packed[i].n);
    x->entries[i] = (struct mosaic_entry){.raw = raw_names[i],
                                          .raw_bytes = x->raw[i].n,
                                          .zip = packed_names[i],
                                          .zip_bytes = x->packed[i].n,
                                          .compression = "zstd:1",
                                          .samples = samples};
}

static char *path_of(const char *folder, const char *name)
{
    static char paths[4][512];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

/* ---- the server ---- */

static void start(struct fixture *x)
{
    served_start(&x->s, &(struct served_options){.loop_count = 3,
                                                 .published = x->dirs,
                                                 .published_count = x->dir_count,
                                                 .store_folder = x->store,
                                                 .space_reserve_bytes = x->reserve,
                                                 .limits = {.unpacked_bytes_max = x->max}});
    caller_join(&x->c, &x->s, served_user("acme", ROLE_READER));
}

static void stop(struct fixture *x)
{
    caller_close(&x->c);
    served_stop(&x->s, 1000);
}

static int setup(void **state)
{
    struct fixture *x = calloc(1, sizeof *x);
    assert_non_null(x);
    folder_make(x->folder, sizeof x->folder);
    folder_make(x->store, sizeof x->store);
    for (uint32_t i = 0; i < SHARDS; i++)
        write_shard(x, i, 4 + i, i);
    write_index(x);
    x->dirs[0] = (struct published_dir){.name = "set", .path = x->folder, .tenant = "*", .format = SHARD_MDS};
    x->dirs[1] = (struct published_dir){.name = "other", .path = x->store, .tenant = "*"};
    x->dir_count = 1;
    *state = x;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *x = *state;
    folder_remove(x->folder);
    folder_remove(x->store);
    for (uint32_t i = 0; i < SHARDS; i++) {
        buf_free(&x->raw[i]);
        buf_free(&x->packed[i]);
    }
    free(x);
    return 0;
}

static void open_set(struct caller *c, struct published_opened *o)
{
    if (published_open(c, "set", o) != ERR_NONE)
        fail_msg("%s", o->err.text);
}

static struct err read_shard(struct caller *c, const struct id *version, uint32_t i, uint64_t bytes,
                             struct buf *got)
{
    return caller_gather(c, published_ask_read(c, version, NEVER, i, 0, bytes), got, SIZE_MAX);
}

/* All of shard i, and its samples, are as they were written. */
static void assert_shard(struct fixture *x, struct caller *c, const struct published_opened *o, uint32_t i)
{
    struct buf got = {0};
    struct samples *s = NULL;
    struct err e = read_shard(c, &o->version, i, x->raw[i].n, &got);
    if (e.class != ERR_NONE)
        fail_msg("%s", e.text);
    assert_true(slice_eq(SLICE(got.p, got.n), SLICE(x->raw[i].p, x->raw[i].n)));
    buf_reset(&got);
    e = caller_gather(c, published_ask_samples(c, &o->version, NEVER, i), &got, SIZE_MAX);
    if (e.class != ERR_NONE || samples_decode(got.p, got.n, o->bytes[i], &s, &e) < 0)
        fail_msg("%s", e.text);
    assert_int_equal(samples_count(s), x->entries[i].samples);
    samples_free(s);
    buf_free(&got);
}

static void assert_told(struct fixture *x, uint32_t i, enum err_class class, const char *word,
                        const char *other)
{
    struct published_opened o;
    struct buf got = {0};
    open_set(&x->c, &o);
    struct err e = read_shard(&x->c, &o.version, i, 1000, &got);
    if (e.class != class || !strstr(e.text, word) || !strstr(e.text, other) || !strstr(e.text, raw_names[i]))
        fail_msg("%s expected, found class %d: %s", word, e.class, e.text);
    assert_int_equal(got.n, 0);
    e = caller_gather(&x->c, published_ask_samples(&x->c, &o.version, NEVER, i), &got, SIZE_MAX);
    assert_int_equal(e.class, class);
    buf_free(&got);
}

/* ---- the folder of unpacked files ---- */

#define KEPT_MAX 16u

struct kept {
    unsigned files, temporary;
    uint64_t bytes;
    unsigned count;
    struct {
        char name[80];
        uint64_t bytes;
        ino_t inode;
    } list[KEPT_MAX];
};

static bool known(const struct kept *k, ino_t inode)
{
    for (unsigned i = 0; i < k->count; i++)
        if (k->list[i].inode == inode)
            return true;
    return false;
}

/* What was there at one time, at least: files that are the same when they are looked at again, each once,
 * with the size that they had before. */
static void look(const struct fixture *x, struct kept *k)
{
    char folder[300];
    struct kept seen = {0};
    struct stat st;
    snprintf(folder, sizeof folder, "%s/" KEPT, x->store);
    DIR *d = opendir(folder);
    for (struct dirent *one; d && (one = readdir(d));) {
        if (one->d_name[0] == '.' || stat(path_of(folder, one->d_name), &st) < 0 || known(&seen, st.st_ino))
            continue;
        assert_true(seen.count < KEPT_MAX);
        snprintf(seen.list[seen.count].name, sizeof seen.list[0].name, "%s", one->d_name);
        seen.list[seen.count].bytes = (uint64_t)st.st_size;
        seen.list[seen.count++].inode = st.st_ino;
    }
    if (d)
        closedir(d);
    *k = (struct kept){0};
    for (unsigned i = 0; i < seen.count; i++) {
        bool temporary = strstr(seen.list[i].name, ".tmp") != NULL;
        if (stat(path_of(folder, seen.list[i].name), &st) < 0 || st.st_ino != seen.list[i].inode)
            continue;
        k->list[k->count++] = seen.list[i];
        k->bytes += seen.list[i].bytes;
        k->temporary += temporary;
        k->files += !temporary;
    }
}

static bool kept_size(const struct fixture *x, uint64_t size)
{
    struct kept k;
    look(x, &k);
    for (unsigned i = 0; i < k.count; i++)
        if (k.list[i].bytes == size)
            return true;
    return false;
}

/* Until so many files are there, and nothing else. */
static void await_files(const struct fixture *x, unsigned files)
{
    struct kept k;
    for (int ms = 0; ms < SERVED_PATIENCE_MS; ms += 10) {
        look(x, &k);
        if (k.files == files && k.temporary == 0)
            return;
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    fail_msg("%u files expected, %u and %u temporary ones found", files, k.files, k.temporary);
}

static int64_t unpacked(void)
{
    return metric_get(METRIC_unpacked_shards_total);
}

/* ---- what is right ---- */

static void raw_and_packed_are_served_alike(void **state)
{
    struct fixture *x = *state;
    struct published_opened o, again;
    struct kept k;
    int64_t before = unpacked();
    folder_file(x->folder, "b.mds", x->raw[1].p, x->raw[1].n); /* beside its packed form */
    start(x);
    open_set(&x->c, &o);
    assert_int_equal(o.count, SHARDS);
    for (uint32_t i = 0; i < SHARDS; i++) {
        assert_string_equal(o.names[i], raw_names[i]);
        assert_int_equal(o.bytes[i], x->raw[i].n);
        assert_shard(x, &x->c, &o, i);
        assert_shard(x, &x->c, &o, i);
    }
    assert_int_equal(unpacked() - before, 3);
    look(x, &k);
    assert_true(k.files == 3 && k.temporary == 0);
    assert_int_equal(k.bytes, x->raw[0].n + x->raw[2].n + x->raw[3].n);
    /* A raw file that appears is another version, and is the one that is read; what was unpacked goes. */
    folder_file(x->folder, "a.mds", x->raw[0].p, x->raw[0].n);
    open_set(&x->c, &again);
    assert_false(id_equal(&o.version, &again.version));
    assert_shard(x, &x->c, &again, 0);
    assert_int_equal(unpacked() - before, 3);
    await_files(x, 2);
    stop(x);
}

static void all_who_want_it_wait_for_one_unpacking(void **state)
{
    struct fixture *x = *state;
    struct caller c[6];
    uint64_t ids[6];
    struct published_opened o;
    int64_t before = unpacked();
    start(x);
    for (int i = 0; i < 6; i++) { /* on any loop */
        caller_join(&c[i], &x->s, served_user("acme", ROLE_READER));
        open_set(&c[i], &o);
    }
    for (int i = 0; i < 6; i++)
        ids[i] = i % 2 ? published_ask_samples(&c[i], &o.version, NEVER, 3)
                       : published_ask_read(&c[i], &o.version, NEVER, 3, 0, x->raw[3].n);
    for (int i = 0; i < 6; i++) {
        struct buf got = {0};
        struct err e = caller_gather(&c[i], ids[i], &got, SIZE_MAX);
        assert_int_equal(e.class, ERR_NONE);
        if (i % 2 == 0)
            assert_true(slice_eq(SLICE(got.p, got.n), SLICE(x->raw[3].p, x->raw[3].n)));
        buf_free(&got);
        caller_close(&c[i]);
    }
    assert_int_equal(unpacked() - before, 1);
    stop(x);
}

static void the_next_server_finds_them(void **state)
{
    struct fixture *x = *state;
    struct published_opened o;
    struct kept k;
    char name[120];
    int64_t before = unpacked();
    start(x);
    open_set(&x->c, &o);
    for (uint32_t i = 0; i < SHARDS; i++)
        assert_shard(x, &x->c, &o, i);
    stop(x);
    /* What was cut off goes; what is not the server's stays. */
    look(x, &k);
    snprintf(name, sizeof name, KEPT "/%s.tmp", k.list[0].name);
    folder_file(x->store, name, "half", 4);
    folder_file(x->store, KEPT "/README", "mine", 4);
    start(x);
    open_set(&x->c, &o);
    for (uint32_t i = 0; i < SHARDS; i++)
        assert_shard(x, &x->c, &o, i);
    assert_int_equal(unpacked() - before, SHARDS);
    assert_int_equal(access(path_of(x->store, name), F_OK), -1);
    assert_int_equal(access(path_of(x->store, KEPT "/README"), F_OK), 0);
    assert_int_equal(unlink(path_of(x->store, KEPT "/README")), 0);
    /* One that was cut meanwhile is made again, and one that was removed behind the server's back. */
    stop(x);
    snprintf(name, sizeof name, KEPT "/%s", k.list[0].name);
    assert_int_equal(truncate(path_of(x->store, name), 100), 0);
    start(x);
    snprintf(name, sizeof name, KEPT "/%s", k.list[1].name);
    assert_int_equal(unlink(path_of(x->store, name)), 0);
    open_set(&x->c, &o);
    for (uint32_t i = 0; i < SHARDS; i++)
        assert_shard(x, &x->c, &o, i);
    assert_int_equal(unpacked() - before, SHARDS + 2);
    await_files(x, SHARDS);
    /* A directory that is published no more. */
    stop(x);
    x->dirs[0].name = "another";
    start(x);
    await_files(x, 0);
    stop(x);
}

/* ---- what is wrong ---- */

static void wrong_hash(struct fixture *x, uint32_t i, bool packed)
{
    static char text[2][100];
    char hex[DIGEST_HEX_BYTES];
    struct digest *d = NULL;
    const struct buf *b = packed ? &x->packed[i] : &x->raw[i];
    assert_int_equal(digest_start("sha1", &d, NULL), 0);
    digest_update(d, b->p, b->n - 1);
    digest_end(d, hex);
    digest_free(d);
    snprintf(text[packed], sizeof text[packed], "\"whirl\": \"00\", \"sha1\": \"%s\"", hex);
    *(packed ? &x->entries[i].zip_hashes : &x->entries[i].raw_hashes) = text[packed];
}

static void write_packed(struct fixture *x, uint32_t i, const void *p, size_t n)
{
    folder_replace(x->folder, packed_names[i], p, n);
    x->entries[i].zip_bytes = n;
    write_index(x);
}

/* The others are fine, and nothing is left of it. */
static void assert_others(struct fixture *x, uint32_t i)
{
    struct published_opened o;
    struct kept k;
    open_set(&x->c, &o);
    for (uint32_t j = 0; j < SHARDS; j++)
        if (j != i)
            assert_shard(x, &x->c, &o, j);
    look(x, &k);
    assert_int_equal(k.temporary, 0);
    assert_false(kept_size(x, x->raw[i].n));
}

static void faults_are_told(void **state)
{
    struct fixture *x = *state;
    const char *todo = "put the right file there, or an unpacked a.mds beside it";
    static const uint8_t wide[] = {0x28,           0xb5, 0x2f, 0xfd, 0,
                                   (28 - 10) << 3, 1,    0,    0}; /* a window of 256 MiB */
    start(x);
    /* Cut since index.json was written, and before. */
    folder_replace(x->folder, packed_names[0], x->packed[0].p, x->packed[0].n / 2);
    assert_told(x, 0, ERR_CORRUPT, "it is cut, or of another version", todo);
    write_packed(x, 0, x->packed[0].p, x->packed[0].n / 2);
    assert_told(x, 0, ERR_CORRUPT, "unpacked it has", todo);
    write_packed(x, 0, "this is not zstd", 16);
    assert_told(x, 0, ERR_CORRUPT, "cannot be unpacked", todo);
    write_packed(x, 0, "", 0);
    assert_told(x, 0, ERR_CORRUPT, "unpacked it has 0 bytes", todo);
    write_packed(x, 0, wide, sizeof wide);
    assert_told(x, 0, ERR_CORRUPT, "cannot be unpacked", todo);
    assert_others(x, 0);
    /* Whole, but of another size. */
    x->entries[0].raw_bytes--;
    write_packed(x, 0, x->packed[0].p, x->packed[0].n);
    assert_told(x, 0, ERR_CORRUPT, "more than the", todo);
    x->entries[0].raw_bytes += 2;
    write_index(x);
    assert_told(x, 0, ERR_CORRUPT, "index.json says", todo);
    x->entries[0].raw_bytes--;
    assert_others(x, 0);
    /* With other bytes. */
    for (int packed = 0; packed < 2; packed++) {
        wrong_hash(x, 0, packed);
        write_index(x);
        assert_told(x, 0, ERR_CORRUPT,
                    packed ? "the sha1 of its packed bytes" : "the sha1 of its unpacked bytes", todo);
        x->entries[0].raw_hashes = x->entries[0].zip_hashes = NULL;
    }
    assert_others(x, 0);
    write_index(x);
    struct published_opened o;
    open_set(&x->c, &o);
    assert_shard(x, &x->c, &o, 0); /* mended */
    stop(x);
}

static void what_cannot_be_a_shard_is_told_at_the_open(void **state)
{
    struct fixture *x = *state;
    struct published_opened o;
    x->entries[2].compression = "br:11";
    write_index(x);
    start(x);
    assert_int_equal(published_open(&x->c, "set", &o), ERR_UNSUPPORTED);
    assert_non_null(strstr(o.err.text, "c.mds.zstd is packed by br:11, only zstd"));
    x->entries[2].compression = "zstd";
    write_index(x);
    open_set(&x->c, &o);
    assert_int_equal(unlink(path_of(x->folder, packed_names[2])), 0);
    assert_int_equal(published_open(&x->c, "set", &o), ERR_IO);
    assert_non_null(strstr(o.err.text, "c.mds is missing, and so is its packed form c.mds.zstd"));
    stop(x);
}

static void one_that_is_replaced_is_never_mixed(void **state)
{
    struct fixture *x = *state;
    struct published_opened o, again;
    struct buf got = {0}, old = {0};
    start(x);
    open_set(&x->c, &o);
    buf_put(&old, x->raw[1].p, x->raw[1].n);
    uint64_t id = published_ask_read(&x->c, &o.version, 4096, 1, 0, x->raw[1].n);
    struct err e = caller_gather(&x->c, id, &got, 4096);
    assert_int_equal(e.class, ERR_NONE);
    write_shard(x, 1, 5, 999);
    write_index(x);
    caller_credit(&x->c, id, NEVER / 2);
    e = caller_gather(&x->c, id, &got, SIZE_MAX);
    assert_int_equal(e.class, ERR_MISMATCH);
    assert_non_null(strstr(e.text, "shard b.mds of set was replaced"));
    assert_true(got.n >= 4096 && slice_eq(SLICE(got.p, got.n), SLICE(old.p, got.n)));
    /* One of the same version that nobody had unpacked yet. */
    folder_replace(x->folder, packed_names[2], x->packed[2].p, x->packed[2].n);
    buf_reset(&got);
    e = read_shard(&x->c, &o.version, 2, 100, &got);
    assert_int_equal(e.class, ERR_MISMATCH);
    open_set(&x->c, &again);
    for (uint32_t i = 0; i < SHARDS; i++)
        assert_shard(x, &x->c, &again, i);
    await_files(x, SHARDS); /* the old one has gone */
    buf_free(&got);
    buf_free(&old);
    stop(x);
}

/* The same bytes into the same file. */
static void write_over(struct fixture *x, uint32_t i)
{
    FILE *f = fopen(path_of(x->folder, packed_names[i]), "r+");
    assert_non_null(f);
    assert_int_equal(fwrite(x->packed[i].p, 1, x->packed[i].n, f), x->packed[i].n);
    assert_int_equal(fclose(f), 0);
}

/* Its inode and size are the same: only the time of change tells. */
static void one_that_is_written_over_is_unpacked_anew(void **state)
{
    struct fixture *x = *state;
    struct published_opened o;
    start(x);
    open_set(&x->c, &o);
    assert_shard(x, &x->c, &o, 1);
    int64_t before = unpacked();
    assert_shard(x, &x->c, &o, 1);
    assert_int_equal(unpacked(), before);
    write_over(x, 1);
    open_set(&x->c, &o);
    assert_shard(x, &x->c, &o, 1);
    assert_int_equal(unpacked(), before + 1);
    stop(x);
}

/* ---- room ---- */

static void one_larger_than_all_room_is_told(void **state)
{
    struct fixture *x = *state;
    struct published_opened o;
    x->max = x->raw[3].n - 1;
    start(x);
    assert_told(x, 3, ERR_LIMIT, "unpacked_shards in larderd.conf", "an unpacked d.mds beside d.mds.zstd");
    open_set(&x->c, &o);
    assert_shard(x, &x->c, &o, 0);
    stop(x);
}

static void a_full_disk_is_told(void **state)
{
    struct fixture *x = *state;
    struct kept k;
    x->reserve = 1ull << 60;
    start(x);
    assert_told(x, 0, ERR_NO_SPACE, "lacks the space", "space_reserve");
    look(x, &k);
    assert_int_equal(k.files + k.temporary, 0);
    stop(x);
}

static void the_longest_unused_goes_first(void **state)
{
    struct fixture *x = *state;
    struct published_opened o;
    struct kept k;
    x->max = x->raw[1].n + x->raw[2].n + x->raw[3].n;
    start(x);
    open_set(&x->c, &o);
    for (uint32_t i = 0; i < 3; i++)
        assert_shard(x, &x->c, &o, i);
    assert_shard(x, &x->c, &o, 0);
    assert_shard(x, &x->c, &o, 3);
    assert_true(kept_size(x, x->raw[0].n) && kept_size(x, x->raw[2].n) && kept_size(x, x->raw[3].n));
    assert_false(kept_size(x, x->raw[1].n));
    assert_shard(x, &x->c, &o, 1);
    look(x, &k);
    assert_true(k.bytes <= x->max && k.temporary == 0);
    /* Less room for the next server. */
    stop(x);
    x->max = x->raw[3].n;
    start(x);
    await_files(x, 1);
    open_set(&x->c, &o);
    for (uint32_t i = 0; i < SHARDS; i++)
        assert_shard(x, &x->c, &o, i);
    look(x, &k);
    assert_true(k.bytes <= x->max);
    stop(x);
}

/* Several read all shards, with room for two: all bytes are right, and never is more there. */
static void room_is_kept_while_others_read(void **state)
{
    struct fixture *x = *state;
    struct caller c[3];
    uint64_t ids[3];
    struct published_opened o;
    struct kept k;
    x->max = x->raw[2].n + x->raw[3].n;
    start(x);
    for (int i = 0; i < 3; i++) {
        caller_join(&c[i], &x->s, served_user("acme", ROLE_READER));
        open_set(&c[i], &o);
    }
    for (uint32_t round = 0; round < 12; round++) {
        for (uint32_t i = 0; i < 3; i++) {
            uint32_t shard = (round * (i + 1) + i) % SHARDS;
            ids[i] = published_ask_read(&c[i], &o.version, NEVER, shard, 0, x->raw[shard].n);
        }
        look(x, &k);
        assert_true(k.bytes <= x->max);
        for (uint32_t i = 0; i < 3; i++) {
            const struct buf *raw = &x->raw[(round * (i + 1) + i) % SHARDS];
            struct buf got = {0};
            struct err e = caller_gather(&c[i], ids[i], &got, SIZE_MAX);
            if (e.class != ERR_NONE)
                fail_msg("round %u: %s", round, e.text);
            assert_true(slice_eq(SLICE(got.p, got.n), SLICE(raw->p, raw->n)));
            buf_free(&got);
        }
    }
    for (int i = 0; i < 3; i++)
        caller_close(&c[i]);
    stop(x);
}

/* ---- an end ---- */

/* So many bytes of nothing, without ever holding them. */
static void pack_zeros(uint64_t bytes, struct buf *packed)
{
    static uint8_t zeros[1 << 20], room[1 << 17];
    ZSTD_CCtx *c = ZSTD_createCCtx();
    ZSTD_inBuffer in = {.src = zeros, .size = sizeof zeros};
    size_t left = 1;
    assert_non_null(c);
    for (uint64_t done = 0; left > 0;) {
        ZSTD_outBuffer out = {.dst = room, .size = sizeof room};
        left = ZSTD_compressStream2(c, &out, &in, done + sizeof zeros < bytes ? ZSTD_e_continue : ZSTD_e_end);
        assert_false(ZSTD_isError(left));
        buf_put(packed, room, out.pos);
        if (in.pos == in.size && done + sizeof zeros < bytes) {
            done += sizeof zeros;
            in.pos = 0;
            left = 1;
        }
    }
    ZSTD_freeCCtx(c);
}

/* Starts a server, asks for the first bytes of a shard that takes a while, and returns once its file is seen:
 * the request's id. */
static uint64_t begin_long(struct fixture *x, uint64_t raw_bytes)
{
    struct published_opened o;
    struct kept k = {0};
    x->entries[0].raw_bytes = raw_bytes;
    buf_reset(&x->packed[0]);
    pack_zeros(raw_bytes, &x->packed[0]);
    write_packed(x, 0, x->packed[0].p, x->packed[0].n);
    start(x);
    open_set(&x->c, &o);
    uint64_t id = published_ask_read(&x->c, &o.version, NEVER, 0, 0, 100);
    for (int ms = 0; ms < SERVED_PATIENCE_MS && k.temporary == 0; ms++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        look(x, &k);
    }
    assert_int_equal(k.temporary, 1);
    return id;
}

/* What was read of it may be neither the old nor the new: nobody gets it, and it is not kept. */
static void one_that_changes_while_it_is_unpacked_is_refused(void **state)
{
    struct fixture *x = *state;
    struct published_opened o;
    struct buf got = {0};
    int64_t before = unpacked();
    uint64_t id = begin_long(x, 512u << 20);
    write_over(x, 0);
    struct err e = caller_gather(&x->c, id, &got, SIZE_MAX);
    assert_int_equal(e.class, ERR_MISMATCH);
    assert_non_null(strstr(e.text, "a.mds"));
    assert_int_equal(got.n, 0);
    assert_int_equal(unpacked(), before);
    await_files(x, 0);
    open_set(&x->c, &o); /* as it is now, it is served */
    e = read_shard(&x->c, &o.version, 0, 100, &got);
    assert_int_equal(e.class, ERR_NONE);
    assert_int_equal(unpacked(), before + 1);
    buf_free(&got);
    stop(x);
}

/* The server is told to stop as soon as the file is seen. */
static void a_stop_gives_up_what_is_being_unpacked(void **state)
{
    struct fixture *x = *state;
    struct published_opened o;
    struct kept k = {0};
    int64_t before = unpacked();
    (void)begin_long(x, 512u << 20);
    served_stop_begin(&x->s, 0);
    caller_close(&x->c);
    served_stop_end(&x->s);
    assert_int_equal(unpacked(), before);
    look(x, &k);
    assert_int_equal(k.count, 0);
    start(x); /* the next one has no trouble */
    open_set(&x->c, &o);
    assert_shard(x, &x->c, &o, 1);
    stop(x);
}

/* With time to finish, what was asked for is still answered. */
static void a_stop_lets_what_is_in_flight_finish(void **state)
{
    struct fixture *x = *state;
    struct kept k = {0};
    struct buf got = {0};
    uint64_t id = begin_long(x, 256u << 20);
    served_stop_begin(&x->s, SERVED_PATIENCE_MS);
    struct err e = caller_gather(&x->c, id, &got, SIZE_MAX);
    if (e.class != ERR_NONE)
        fail_msg("%s", e.text);
    assert_int_equal(got.n, 100);
    buf_free(&got);
    caller_close(&x->c);
    served_stop_end(&x->s);
    look(x, &k);
    assert_true(k.files == 1 && k.temporary == 0);
}

#define WITH_FOLDERS(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_FOLDERS(raw_and_packed_are_served_alike),
        WITH_FOLDERS(all_who_want_it_wait_for_one_unpacking),
        WITH_FOLDERS(the_next_server_finds_them),
        WITH_FOLDERS(faults_are_told),
        WITH_FOLDERS(what_cannot_be_a_shard_is_told_at_the_open),
        WITH_FOLDERS(one_that_is_replaced_is_never_mixed),
        WITH_FOLDERS(one_that_is_written_over_is_unpacked_anew),
        WITH_FOLDERS(one_larger_than_all_room_is_told),
        WITH_FOLDERS(a_full_disk_is_told),
        WITH_FOLDERS(the_longest_unused_goes_first),
        WITH_FOLDERS(room_is_kept_while_others_read),
        WITH_FOLDERS(one_that_changes_while_it_is_unpacked_is_refused),
        WITH_FOLDERS(a_stop_gives_up_what_is_being_unpacked),
        WITH_FOLDERS(a_stop_lets_what_is_in_flight_finish),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
