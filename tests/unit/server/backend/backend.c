/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: both backends keep the promises of backend.h. Method: the same tests over the memory backend and over
 * a local folder, on the ring, on the pool and in the simulator; then what only the local one has: its lock,
 * its temporary files.
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

#include "server/backend/backend.h"
#include "tests/support/rig.h"

#define MEMORY_BYTES (8u << 20)

static struct rig rig;
static struct memory_disk *disk;
static struct backend *b;
static char store[160];
static uint8_t *block; /* aligned, 16 blocks */

struct ask {
    struct backend_op op;
    bool done;
};

static void ask_done(struct backend_op *op)
{
    container_of(op, struct ask, op)->done = true;
}

static struct backend_op *ask_op(struct ask *a)
{
    a->op.done = ask_done;
    a->done = false;
    return &a->op;
}

static int64_t ask_end(struct ask *a)
{
    rig_settle(&rig);
    assert_true(a->done);
    if (a->op.result < 0) {
        assert_int_not_equal(a->op.err.class, ERR_NONE);
        assert_int_equal(a->op.err.errnum, -a->op.result);
        assert_true(a->op.err.text[0]);
    } else {
        assert_int_equal(a->op.err.class, ERR_NONE);
    }
    return a->op.result;
}

static struct ask one; /* for the tests that do one thing after the other */

static int64_t put_text(const char *name, const char *text)
{
    backend_put_new(b, ask_op(&one), name, text, strlen(text));
    assert_false(one.done);
    return ask_end(&one);
}
static int64_t get(const char *name, bool direct, uint64_t offset, void *p, size_t n)
{
    backend_read(b, ask_op(&one), name, direct, offset, p, n);
    assert_false(one.done);
    return ask_end(&one);
}
static int64_t size_of(const char *name)
{
    uint64_t bytes = 0;
    backend_stat(b, ask_op(&one), name, &bytes);
    int64_t status = ask_end(&one);
    return status < 0 ? status : (int64_t)bytes;
}
static int64_t remove_it(const char *name)
{
    backend_remove(b, ask_op(&one), name);
    return ask_end(&one);
}
static int64_t create(uint64_t reserve_bytes, struct backend_file **f)
{
    backend_create(b, ask_op(&one), reserve_bytes, f);
    return ask_end(&one);
}
static int64_t append(struct backend_file *f, uint64_t offset, size_t n)
{
    backend_append(b, ask_op(&one), f, offset, block, n);
    return ask_end(&one);
}
static int64_t seal(struct backend_file *f, const char *name)
{
    backend_seal(b, ask_op(&one), f, name);
    return ask_end(&one);
}
static int64_t discard(struct backend_file *f)
{
    backend_discard(b, ask_op(&one), f);
    return ask_end(&one);
}

/* Names joined by spaces. */
static const char *list(const char *prefix)
{
    static char text[512];
    struct loop_names names;
    backend_list(b, ask_op(&one), prefix, &names);
    assert_int_equal(ask_end(&one), 0);
    text[0] = '\0';
    for (size_t i = 0; i < names.count; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", i ? " " : "", names.names[i]);
    loop_names_free(&names);
    return text;
}

static void small_objects(void **state)
{
    (void)state;
    char got[32];
    assert_int_equal(put_text("runs/1/commits/7", "seven"), 0);
    assert_int_equal(put_text("empty", ""), 0);
    assert_int_equal(size_of("runs/1/commits/7"), 5);
    assert_int_equal(size_of("empty"), 0);
    assert_int_equal(get("runs/1/commits/7", false, 0, got, sizeof got), 5);
    assert_memory_equal(got, "seven", 5);
    assert_int_equal(get("runs/1/commits/7", false, 2, got, 2), 2);
    assert_memory_equal(got, "ve", 2);
    assert_int_equal(get("runs/1/commits/7", false, 5, got, 2), 0);
    assert_int_equal(get("runs/1/commits/7", false, 500, got, 2), 0);
    assert_int_equal(get("empty", false, 0, got, 2), 0);
}

static void names_are_exclusive(void **state)
{
    (void)state;
    char got[8];
    assert_int_equal(put_text("a/b", "first"), 0);
    assert_int_equal(put_text("a/b", "other"), -EEXIST);
    assert_int_equal(one.op.err.class, ERR_EXISTS);
    assert_non_null(strstr(one.op.err.text, "a/b"));
    assert_int_equal(put_text("a/b/c", "below an object"), -EEXIST);
    assert_int_equal(put_text("a", "a folder"), -EEXIST);
    assert_int_equal(get("a/b", false, 0, got, sizeof got), 5);
    assert_memory_equal(got, "first", 5);
    assert_string_equal(list(""), "a");
}

static void what_is_absent(void **state)
{
    (void)state;
    char got[8];
    assert_int_equal(get("none", false, 0, got, sizeof got), -ENOENT);
    assert_int_equal(one.op.err.class, ERR_NOT_FOUND);
    assert_non_null(strstr(one.op.err.text, "none"));
    assert_int_equal(size_of("none/at/all"), -ENOENT);
    assert_int_equal(remove_it("none"), -ENOENT);
    assert_int_equal(put_text("a/b", "x"), 0);
    assert_int_equal(get("a", false, 0, got, sizeof got), -ENOENT); /* a folder is no object */
    assert_int_equal(size_of("a"), -ENOENT);
    assert_int_equal(remove_it("a"), -ENOENT);
    assert_string_equal(list("none"), "");
    assert_string_equal(list("a/b"), "");
}

static void names_that_are_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {"",     "/a", "a/",  "a//b", ".",   "..",      "a/../b",
                                      "a/.b", "A",  "a b", "a\n",  "a_b", "\xc3\xa4"};
    char longest[BACKEND_NAME_BYTES_MAX + 2], got[1];
    struct loop_names names;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(put_text(bad[i], "x"), -EINVAL);
        assert_int_equal(one.op.err.class, ERR_INVALID);
        assert_int_equal(get(bad[i], false, 0, got, 1), -EINVAL);
        assert_int_equal(remove_it(bad[i]), -EINVAL);
        if (i > 0) {
            backend_list(b, ask_op(&one), bad[i], &names);
            assert_int_equal(ask_end(&one), -EINVAL);
        }
    }
    memset(longest, 'a', sizeof longest);
    longest[sizeof longest - 1] = '\0';
    assert_int_equal(put_text(longest, "x"), -EINVAL);
    longest[sizeof longest - 2] = '\0';
    assert_int_equal(put_text(longest, "x"), 0);
    assert_int_equal(size_of(longest), 1);
}

static void lists_are_sorted_and_whole(void **state)
{
    (void)state;
    enum { MANY = 300 };
    struct ask *asks = calloc(MANY, sizeof *asks);
    char(*name)[32] = calloc(MANY, sizeof *name);
    assert_int_equal(put_text("l/b/y", "x"), 0);
    assert_int_equal(put_text("l/b-x", "x"), 0);
    assert_int_equal(put_text("l/b.c", "x"), 0);
    assert_int_equal(put_text("l/b/z", "x"), 0);
    assert_int_equal(put_text("lx", "x"), 0);
    assert_string_equal(list("l"), "b b-x b.c");
    assert_string_equal(list(""), "l lx");
    for (int i = 0; i < MANY; i++) {
        snprintf(name[i], sizeof name[i], "many/%03d", (i * 7) % MANY);
        backend_put_new(b, ask_op(&asks[i]), name[i], "", 0);
    }
    for (int i = 0; i < MANY; i++)
        assert_int_equal(ask_end(&asks[i]), 0);
    free(asks);
    free(name);
    struct loop_names names;
    backend_list(b, ask_op(&one), "many", &names);
    assert_int_equal(ask_end(&one), 0);
    assert_int_equal(names.count, MANY);
    for (size_t i = 0; i < MANY; i++)
        assert_int_equal(atoi(names.names[i]), i);
    loop_names_free(&names);
}

static void removal_takes_empty_folders(void **state)
{
    (void)state;
    char got[1];
    assert_int_equal(put_text("r/1/x", "x"), 0);
    assert_int_equal(put_text("r/1/y", "y"), 0);
    assert_int_equal(put_text("r/2/x", "x"), 0);
    assert_int_equal(get("r/1/x", false, 0, got, 1), 1);
    assert_int_equal(remove_it("r/1/x"), 0);
    assert_int_equal(get("r/1/x", false, 0, got, 1), -ENOENT); /* also from the cache of descriptors */
    assert_int_equal(remove_it("r/1/x"), -ENOENT);
    assert_string_equal(list("r/1"), "y");
    assert_int_equal(remove_it("r/1/y"), 0);
    assert_string_equal(list("r"), "2");
    assert_int_equal(put_text("r/1/x", "again"), 0); /* folders come back */
    assert_int_equal(size_of("r/1/x"), 5);
    assert_int_equal(remove_it("r/1/x"), 0);
    assert_int_equal(remove_it("r/2/x"), 0);
    assert_string_equal(list(""), "");
}

static void segments(void **state)
{
    (void)state;
    struct backend_file *f = NULL;
    uint8_t *got = NULL;
    assert_int_equal(posix_memalign((void **)&got, BLOCK_BYTES, 4 * BLOCK_BYTES), 0);
    assert_int_equal(create(1 << 20, &f), 0);
    for (size_t i = 0; i < 2 * BLOCK_BYTES; i++)
        block[i] = (uint8_t)(i * 31 >> 4);
    assert_int_equal(append(f, 2 * BLOCK_BYTES, BLOCK_BYTES), 0); /* in any order */
    assert_int_equal(append(f, 0, 2 * BLOCK_BYTES), 0);
    assert_string_equal(list(""), ""); /* no name before it is sealed */
    assert_int_equal(seal(f, "s/1"), 0);
    assert_int_equal(size_of("s/1"), 3 * BLOCK_BYTES);
    for (int direct = 0; direct < 2; direct++) {
        memset(got, 0, 4 * BLOCK_BYTES);
        assert_int_equal(get("s/1", direct, 0, got, 4 * BLOCK_BYTES), 3 * BLOCK_BYTES);
        assert_memory_equal(got, block, 2 * BLOCK_BYTES);
        assert_memory_equal(got + 2 * BLOCK_BYTES, block, BLOCK_BYTES);
    }
    assert_int_equal(create(0, &f), 0);
    assert_int_equal(append(f, 0, BLOCK_BYTES), 0);
    assert_int_equal(seal(f, "s/1"), -EEXIST);
    assert_int_equal(create(4096, &f), 0);
    assert_int_equal(seal(f, "s/nothing-in-it"), 0);
    assert_int_equal(size_of("s/nothing-in-it"), 0);
    assert_int_equal(create(1 << 20, &f), 0);
    assert_int_equal(append(f, 0, BLOCK_BYTES), 0);
    assert_int_equal(discard(f), 0);
    assert_string_equal(list("s"), "1 nothing-in-it");
    free(got);
}

/* Many publications at once into folders that nobody has made yet, and removals between them. */
static void many_at_once(void **state)
{
    (void)state;
    enum { N = 60 };
    struct ask *asks = calloc(N, sizeof *asks), *removals = calloc(N, sizeof *removals);
    char(*names)[32] = calloc(N, sizeof *names);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < N; i++) {
            snprintf(names[i], sizeof names[i], "m/%d/%d/%d", i % 4, i % 3, i);
            backend_put_new(b, ask_op(&asks[i]), names[i], names[i], strlen(names[i]));
        }
        for (int i = 0; i < N; i++)
            assert_int_equal(ask_end(&asks[i]), 0);
        for (int i = 0; i < N; i++) { /* half go, the other half is refused, since it is there */
            if (i % 2)
                backend_remove(b, ask_op(&removals[i]), names[i]);
            else
                backend_put_new(b, ask_op(&removals[i]), names[i], "", 0);
        }
        for (int i = 0; i < N; i++)
            assert_int_equal(ask_end(&removals[i]), i % 2 ? 0 : -EEXIST);
        for (int i = 0; i < N; i++) {
            char got[32];
            assert_int_equal(get(names[i], false, 0, got, sizeof got),
                             i % 2 ? -ENOENT : (int)strlen(names[i]));
            if (i % 2 == 0) {
                assert_memory_equal(got, names[i], strlen(names[i]));
                assert_int_equal(remove_it(names[i]), 0);
            }
        }
        assert_string_equal(list(""), "");
    }
    free(asks);
    free(removals);
    free(names);
}

/* More objects than descriptors are kept, read many times at once. */
static void reads_share_descriptors(void **state)
{
    (void)state;
    enum { N = 300 };
    struct ask *asks = calloc(2 * N, sizeof *asks);
    uint32_t *got = calloc(2 * N, sizeof *got);
    char(*names)[32] = calloc(N, sizeof *names);
    for (uint32_t i = 0; i < N; i++) {
        snprintf(names[i], sizeof names[i], "d/%u", i);
        got[i] = i;
        backend_put_new(b, ask_op(&asks[i]), names[i], &got[i], sizeof got[i]);
    }
    for (uint32_t i = 0; i < N; i++)
        assert_int_equal(ask_end(&asks[i]), 0);
    memset(got, 0xff, 2 * N * sizeof *got);
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < 2 * N; i++)
            backend_read(b, ask_op(&asks[i]), names[i % N], false, 0, &got[i], sizeof got[i]);
        for (uint32_t i = 0; i < 2 * N; i++) {
            assert_int_equal(ask_end(&asks[i]), sizeof got[i]);
            assert_int_equal(got[i], i % N);
        }
    }
    free(asks);
    free(got);
    free(names);
}

static void space_is_told(void **state)
{
    (void)state;
    uint64_t free_bytes = 0, total_bytes = 0;
    assert_int_equal(backend_space(b, &free_bytes, &total_bytes), 0);
    assert_true(total_bytes > 0 && free_bytes <= total_bytes);
}

/* Only in memory: how large a real disk is, is not ours to fill. */
static void full_disk(void **state)
{
    (void)state;
    struct backend_file *f = NULL;
    uint64_t before, after, total;
    assert_int_equal(backend_space(b, &before, &total), 0);
    assert_int_equal(before, MEMORY_BYTES);
    assert_int_equal(create(MEMORY_BYTES + 1, &f), -ENOSPC);
    assert_int_equal(one.op.err.class, ERR_NO_SPACE);
    assert_null(f);
    assert_int_equal(create(MEMORY_BYTES, &f), 0);
    assert_int_equal(put_text("x", "x"), -ENOSPC);
    assert_int_equal(append(f, 0, BLOCK_BYTES), 0);
    assert_int_equal(append(f, MEMORY_BYTES, BLOCK_BYTES), -ENOSPC);
    assert_int_equal(seal(f, "s"), -EIO); /* an append to it failed */
    assert_int_equal(put_text("x", "x"), 0);
    assert_int_equal(remove_it("x"), 0);
    assert_int_equal(backend_space(b, &after, &total), 0);
    assert_int_equal(after, before);
}

/* Only local. */

static struct backend *open_store(bool writer, int expected)
{
    struct backend *opened = NULL;
    backend_local_open(rig.loop, ask_op(&one), store, writer, &opened);
    assert_int_equal(ask_end(&one), expected);
    assert_true((opened != NULL) == (expected == 0));
    return opened;
}

static void note_closed(void *arg)
{
    *(bool *)arg = true;
}

static void close_store(struct backend *which)
{
    bool closed = false;
    backend_close(which, note_closed, &closed);
    assert_false(closed);
    rig_settle(&rig);
    assert_true(closed);
}

static void one_writer(void **state)
{
    (void)state;
    char got[4];
    open_store(true, -EBUSY);
    assert_int_equal(one.op.err.class, ERR_BUSY);
    assert_non_null(strstr(one.op.err.text, store));
    struct backend *writer = b;
    assert_int_equal(put_text("x", "abc"), 0);
    b = open_store(false, 0);
    assert_int_equal(get("x", false, 0, got, 3), 3);
    assert_int_equal(put_text("y", "abc"), -ENOTSUP);
    assert_int_equal(remove_it("x"), -ENOTSUP);
    close_store(b);
    close_store(writer);
    b = open_store(true, 0); /* the lock went with the descriptor */
    assert_int_equal(get("x", false, 0, got, 3), 3);
}

static void a_reader_needs_the_folder(void **state)
{
    (void)state;
    strcat(store, "-none");
    open_store(false, -ENOENT);
    *strrchr(store, '-') = '\0';
    char kept = store[0];
    store[0] = '\0';
    open_store(true, -EINVAL);
    store[0] = kept;
}

static void the_writer_clears_leftovers(void **state)
{
    (void)state;
    struct backend_file *f = NULL;
    char path[256];
    assert_int_equal(put_text("kept", "x"), 0);
    close_store(b);
    snprintf(path, sizeof path, "%s/tmp/left", store);
    int fd = open(path, O_CREAT | O_RDWR, 0600);
    assert_true(fd >= 0);
    close(fd);
    b = open_store(true, 0);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(size_of("kept"), 1);
    assert_int_equal(create(4096, &f), 0);
    assert_int_equal(discard(f), 0);
    snprintf(path, sizeof path, "%s/tmp", store);
    assert_int_equal(rmdir(path), 0); /* so it is empty */
    assert_int_equal(put_text("x", "x"), -ENOENT);
    assert_int_equal(mkdir(path, 0700), 0);
}

/* A mark of this boot keeps writers out until it is removed; one of another boot is of no account. */
static void a_mark_of_a_failed_sync(void **state)
{
    (void)state;
    struct step s = {0};
    struct loop_stat st;
    char boot[LOOP_BOOT_BYTES], now[300], before[300], unknown[300];
    assert_int_equal(put_text("kept", "x"), 0);
    close_store(b);
    assert_int_equal(loop_boot(rig.loop, boot), 0);
    snprintf(now, sizeof now, "%s/failed-sync.%s", store, boot);
    snprintf(before, sizeof before, "%s/failed-sync.of-another-boot", store);
    snprintf(unknown, sizeof unknown, "%s/failed-sync.unknown", store);
    const char *marks[] = {before, unknown, now};
    for (int i = 0; i < 3; i++) {
        loop_open(rig.loop, step_op(&s), marks[i], O_CREAT | O_RDWR, 0600);
        int64_t fd = step_end(&rig, &s);
        assert_true(fd >= 0);
        loop_close(rig.loop, step_op(&s), (int)fd);
        assert_int_equal(step_end(&rig, &s), 0);
    }
    open_store(true, -EROFS);
    assert_int_equal(one.op.err.class, ERR_READ_ONLY);
    assert_non_null(strstr(one.op.err.text, strrchr(now, '/') + 1));
    assert_non_null(strstr(one.op.err.text, "start larderd again"));
    b = open_store(false, 0); /* a reader beside a writer that has met it */
    assert_int_equal(size_of("kept"), 1);
    close_store(b);
    loop_unlink(rig.loop, step_op(&s), now);
    assert_int_equal(step_end(&rig, &s), 0);
    open_store(true, -EROFS); /* who knows which boot it was */
    assert_non_null(strstr(one.op.err.text, "failed-sync.unknown"));
    loop_unlink(rig.loop, step_op(&s), unknown);
    assert_int_equal(step_end(&rig, &s), 0);
    b = open_store(true, 0);
    loop_stat(rig.loop, step_op(&s), before, &st);
    assert_int_equal(step_end(&rig, &s), -ENOENT);
    assert_int_equal(put_text("more", "x"), 0);
}

/* The space that was reserved and not used comes back with the seal. */
static void reserved_space_comes_back(void **state)
{
    (void)state;
    struct backend_file *f = NULL;
    struct stat st;
    char path[256];
    assert_int_equal(create(16 << 20, &f), 0);
    assert_int_equal(append(f, 0, BLOCK_BYTES), 0);
    assert_int_equal(seal(f, "s"), 0);
    snprintf(path, sizeof path, "%s/objects/s", store);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, BLOCK_BYTES);
    assert_true(st.st_blocks * 512 < 1 << 20);
}

static int begin(enum rig_kind kind, bool local)
{
    rig_open(&rig, kind, 0);
    block = NULL;
    if (posix_memalign((void **)&block, BLOCK_BYTES, 16 * BLOCK_BYTES))
        return -1;
    memset(block, 'b', 16 * BLOCK_BYTES);
    snprintf(store, sizeof store, "%s/store", rig.folder);
    disk = NULL;
    if (local) {
        b = open_store(true, 0);
    } else {
        disk = memory_disk_create(MEMORY_BYTES);
        b = backend_memory(rig.loop, disk);
    }
    return b ? 0 : -1;
}
static int begin_memory(void **state)
{
    (void)state;
    return begin(RIG_POOL, false);
}
static int begin_local(void **state)
{
    (void)state;
    return begin(RIG_RING, true);
}
static int begin_local_pool(void **state)
{
    (void)state;
    return begin(RIG_POOL, true);
}
static int begin_local_sim(void **state)
{
    (void)state;
    return begin(RIG_SIM, true);
}
static int end(void **state)
{
    (void)state;
    close_store(b);
    memory_disk_unref(disk);
    rig_close(&rig);
    free(block);
    return 0;
}

#define ON(kind, test)                                  \
    {                                                   \
#kind ": " #test, test, begin_##kind, end, NULL \
    }
#define ON_LOCAL(test) ON(local, test), ON(local_pool, test)
#define ON_ALL(test)   ON(memory, test), ON_LOCAL(test), ON(local_sim, test)

int main(void)
{
    struct CMUnitTest tests[] = {
        ON_ALL(small_objects),
        ON_ALL(names_are_exclusive),
        ON_ALL(what_is_absent),
        ON_ALL(names_that_are_refused),
        ON_ALL(lists_are_sorted_and_whole),
        ON_ALL(removal_takes_empty_folders),
        ON_ALL(segments),
        ON_ALL(many_at_once),
        ON_ALL(reads_share_descriptors),
        ON_ALL(space_is_told),
        ON(memory, full_disk),
        ON_LOCAL(one_writer),
        ON(local_sim, one_writer),
        ON_LOCAL(a_reader_needs_the_folder),
        ON(local_sim, a_reader_needs_the_folder),
        ON_LOCAL(the_writer_clears_leftovers),
        ON_LOCAL(a_mark_of_a_failed_sync),
        ON(local_sim, a_mark_of_a_failed_sync),
        ON_LOCAL(reserved_space_comes_back),
    };
    rig_skip_ring(tests, sizeof tests / sizeof tests[0], begin_local, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
