/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a feed of a published directory whose files lie on this machine reads them itself, gives the very
 * samples that the server would give, and notices like the server that they are not, or no longer, the ones
 * that were opened. Method: a real larderd that publishes tar shards; it is killed once the feed is open, so
 * that nothing can come from it.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/larder.h"
#include "tests/support/folder.h"
#include "tests/support/larderd.h"
#include "tests/support/standin_cufile.h"
#include "tests/support/tarball.h"

#define SHARDS  5
#define SAMPLES 24 /* in each */
#define BATCH   8

static const struct standin *cuda;

struct world {
    char folder[256];
    struct larderd server;
    struct larder *client;
};

static void put(const char *path, const void *p, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, p, n), n);
    close(fd);
}

/* Samples of all sizes, empty ones among them. */
static void make_shard(const char *folder, unsigned shard, unsigned seed)
{
    struct buf b = {0};
    char path[400], name[64];
    uint8_t *data = malloc(70000);
    for (unsigned i = 0; i < SAMPLES; i++) {
        size_t n = i % 7 == 3 ? 0 : (i * 7919 + shard * 104729) % 70000;
        for (size_t k = 0; k < n; k++)
            data[k] = (uint8_t)(k * 31 + i + shard * 7 + seed);
        snprintf(name, sizeof name, "s%u-%u.bin", shard, i);
        tarball_file(&b, TARBALL_USTAR, name, (const char *)data, n);
    }
    tarball_end(&b);
    snprintf(path, sizeof path, "%s/shard-%u.tar", folder, shard);
    put(path, b.p, b.n);
    buf_free(&b);
    free(data);
}

static int setup(void **state)
{
    struct world *w = calloc(1, sizeof *w);
    struct larder_options o = LARDER_INIT(larder_options);
    struct larder_error e;
    folder_make(w->folder, sizeof w->folder);
    for (unsigned i = 0; i < SHARDS; i++)
        make_shard(w->folder, i, 0);
    char full[4096];
    assert_non_null(realpath(w->folder, full));
    snprintf(w->folder, sizeof w->folder, "%s", full);
    larderd_start(&w->server, w->folder);
    o.credentials = larderd_credentials(&w->server, "reader");
    o.staging_bytes = 1 << 20;
    o.reconnect_ms = 200;
    assert_int_equal(larder_open(&o, &w->client, &e), 0);
    *state = w;
    return 0;
}

static int teardown(void **state)
{
    struct world *w = *state;
    (void)larder_close(w->client, 0, NULL);
    larderd_remove(&w->server);
    folder_remove(w->folder);
    free(w);
    return 0;
}

static int open_feed(struct world *w, const char *local_dir, struct larder_feed **out, struct larder_error *e)
{
    struct larder_feed_options o = LARDER_INIT(larder_feed_options);
    o.dataset = "published";
    o.seed = 7;
    o.global_batch = BATCH;
    o.depth_bytes = 1 << 20; /* a quarter of the data: not all can be read ahead */
    o.local_dir = local_dir;
    return larder_feed_open(w->client, &o, out, e);
}

/* All that the feed gives, in a form to be compared; returns what larder_feed_next returned last. */
static int gather(struct larder_feed *f, struct buf *out, struct larder_error *e)
{
    struct larder_batch *b;
    int rc;
    while ((rc = larder_feed_next(f, 20000, &b, e)) == 1) {
        for (size_t i = 0; i < larder_batch_samples(b); i++) {
            struct larder_sample s;
            assert_int_equal(larder_batch_sample(b, i, &s), 0);
            buf_put16(out, slice_str(s.key));
            buf_u64(out, s.number);
            for (uint32_t k = 0; k < s.fields; k++)
                buf_put32(out, SLICE(s.field[k].data, s.field[k].bytes));
        }
        larder_batch_release(b);
    }
    return rc;
}

static void local_files_give_the_servers_samples(void **state)
{
    struct world *w = *state;
    struct larder_feed *f = NULL;
    struct larder_feed_info info = LARDER_INIT(larder_feed_info);
    struct larder_error e = {0};
    struct buf remote = {0}, local = {0};
    char path[400];
    assert_int_equal(open_feed(w, NULL, &f, &e), 0);
    assert_int_equal(gather(f, &remote, &e), 0);
    larder_feed_close(f);
    int rc = open_feed(w, w->folder, &f, &e);
    if (rc < 0)
        print_error("%s\n", e.text);
    assert_int_equal(rc, 0);
    larderd_end(&w->server, SIGKILL);
    assert_int_equal(gather(f, &local, &e), 0);
    assert_true(remote.n > SHARDS * SAMPLES * 10);
    assert_int_equal(remote.n, local.n);
    assert_memory_equal(remote.p, local.p, remote.n);
    assert_int_equal(larder_feed_info(f, &info), 0);
    snprintf(path, sizeof path, "files of this machine in %s", w->folder);
    assert_memory_equal(info.path, path, strlen(path) < 100 ? strlen(path) : 100);
    assert_int_equal(info.samples_out, SHARDS * SAMPLES);
    larder_feed_close(f);
    buf_free(&remote);
    buf_free(&local);
}

static void assert_refused(struct world *w, const char *folder, int errnum, const char *word)
{
    struct larder_feed *f = NULL;
    struct larder_error e = {0};
    int rc = open_feed(w, folder, &f, &e);
    if (rc != -errnum || !strstr(e.text, word))
        print_error("%d: %s\n", rc, e.text);
    assert_int_equal(rc, -errnum);
    assert_non_null(strstr(e.text, word));
}

static void other_files_are_refused(void **state)
{
    struct world *w = *state;
    char other[256], path[400];
    folder_make(other, sizeof other);
    assert_refused(w, "/no/such/folder", ENOENT, "/no/such/folder");
    assert_refused(w, other, EILSEQ, "has no shard-0.tar");
    for (unsigned i = 0; i < SHARDS; i++)
        make_shard(other, i, 0);
    assert_refused(w, other, EILSEQ, "they are copies, or were changed"); /* the same bytes even */
    snprintf(path, sizeof path, "%s/shard-3.tar", other);
    assert_int_equal(truncate(path, 1024), 0);
    assert_refused(w, other, EILSEQ, "shard-3.tar has 1024 bytes");
    folder_remove(other);
}

/* Behind the feed's back: in place, by a new file under the name, or it goes. */
static void files_that_change_are_noticed(void **state)
{
    struct world *w = *state;
    for (int how = 0; how < 3; how++) {
        struct larder_feed *f = NULL;
        struct larder_error e = {0};
        struct buf some = {0};
        char path[400], new[400];
        for (unsigned i = 0; i < SHARDS; i++)
            make_shard(w->folder, i, (unsigned)how);
        assert_int_equal(open_feed(w, w->folder, &f, &e), 0);
        for (unsigned i = 0; i < SHARDS; i++) {
            snprintf(path, sizeof path, "%s/shard-%u.tar", w->folder, i);
            snprintf(new, sizeof new, "%s/.new", w->folder);
            if (how == 0) { /* one byte, and the same size */
                struct stat st;
                struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {0}};
                assert_int_equal(stat(path, &st), 0);
                int fd = open(path, O_WRONLY);
                assert_int_equal(pwrite(fd, "!", 1, st.st_size / 2), 1);
                times[1] = st.st_mtim;
                times[1].tv_sec++; /* however coarse the clock of the file system is */
                assert_int_equal(futimens(fd, times), 0);
                close(fd);
            } else if (how == 1) {
                put(new, "another", 7);
                assert_int_equal(rename(new, path), 0);
            } else {
                assert_int_equal(unlink(path), 0);
            }
        }
        int rc = gather(f, &some, &e); /* what was read ahead may come first */
        assert_int_equal(rc, -EILSEQ);
        assert_non_null(strstr(e.text, how == 2 ? "was removed" : "was replaced"));
        assert_non_null(strstr(e.text, "dataset \"published\", shard \"shard-"));
        larder_feed_close(f);
        buf_free(&some);
    }
}

/* A feed that nobody reads from ends at once. */
static void a_feed_is_closed_in_the_middle(void **state)
{
    struct world *w = *state;
    struct larder_error e = {0};
    for (int i = 0; i < 20; i++) {
        struct larder_feed *f = NULL;
        struct larder_batch *b = NULL;
        assert_int_equal(open_feed(w, w->folder, &f, &e), 0);
        if (i % 2)
            assert_int_equal(larder_feed_next(f, 20000, &b, &e), 1);
        if (b)
            larder_batch_release(b);
        larder_feed_close(f);
    }
}

/* ---- whole shards ---- */

static uint8_t *file_bytes(const struct world *w, unsigned shard, size_t *n)
{
    char path[400];
    snprintf(path, sizeof path, "%s/shard-%u.tar", w->folder, shard);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    uint8_t *p = malloc(4u << 20);
    *n = fread(p, 1, 4u << 20, f);
    fclose(f);
    return p;
}

static void shards_come_to_any_memory(void **state)
{
    struct world *w = *state;
    struct larder_dataset *d = NULL;
    struct larder_error e = {0};
    struct memory *m = NULL;
    uint8_t *device = NULL, *host = malloc(4u << 20);
    static const struct {
        enum larder_memory memory;
        int bounce;
        const char *path;
    } ways[] = {{LARDER_MEMORY_HOST, 0, "read and written in place"},
                {LARDER_MEMORY_CUDA, 1, "pinned bounce buffer: as asked for"},
                {LARDER_MEMORY_CUDA, 0, "cuFile, "}};
    assert_int_equal(memory_open(MEMORY_CUDA, 0, &m, NULL), 0);
    assert_int_equal(memory_alloc(m, 4u << 20, (void **)&device, NULL), 0);
    assert_int_equal(larder_dataset_open(w->client, "published", 0, &d, &e), 0);
    larderd_end(&w->server, SIGKILL);
    for (size_t k = 0; k < sizeof ways / sizeof ways[0]; k++) {
        struct larder_local_options o = LARDER_INIT(larder_local_options);
        struct larder_local *l = NULL;
        o.local_dir = w->folder;
        o.memory = ways[k].memory;
        o.bounce = ways[k].bounce;
        bool on_device = o.memory == LARDER_MEMORY_CUDA;
        uint8_t *to = on_device ? device : host, *seen = on_device ? cuda->standin_peek(device) : host;
        assert_int_equal(larder_local_open(d, &o, &l, &e), 0);
        for (unsigned shard = 0; shard < SHARDS; shard++) {
            size_t n;
            uint8_t *expected = file_bytes(w, shard, &n);
            memset(seen, 0x77, 4u << 20);
            assert_int_equal(larder_local_read(l, shard, 0, to, 4u << 20, NULL, &e), n);
            assert_memory_equal(seen, expected, n);
            assert_int_equal(seen[n], 0x77);
            assert_int_equal(larder_local_read(l, shard, 777, to + 5, 1234, NULL, &e), 1234);
            assert_memory_equal(seen + 5, expected + 777, 1234);
            assert_int_equal(larder_local_read(l, shard, n, to, 1, NULL, &e), 0);
            free(expected);
        }
        assert_memory_equal(larder_local_path(l), ways[k].path, strlen(ways[k].path));
        assert_true(larder_local_read(l, SHARDS, 0, to, 1, NULL, &e) == -EINVAL);
        assert_true(larder_local_read(l, 0, 0, on_device ? host : device, 1, NULL, &e) == -EINVAL);
        larder_local_close(l);
    }
    larder_dataset_close(d);
    memory_free(m, device);
    memory_close(m);
    free(host);
}

static void a_shard_that_changes_is_noticed(void **state)
{
    struct world *w = *state;
    struct larder_local_options o = LARDER_INIT(larder_local_options);
    struct larder_dataset *d = NULL;
    struct larder_local *l = NULL;
    struct larder_error e = {0};
    char path[400];
    uint8_t byte;
    assert_int_equal(larder_dataset_open(w->client, "published", 0, &d, &e), 0);
    assert_int_equal(larder_local_open(d, &o, &l, &e), -EINVAL); /* no folder */
    o.local_dir = "/";
    assert_int_equal(larder_local_open(d, &o, &l, &e), -EILSEQ);
    o.local_dir = w->folder;
    assert_int_equal(larder_local_open(d, &o, &l, &e), 0);
    assert_int_equal(larder_local_read(l, 1, 0, &byte, 1, NULL, &e), 1);
    snprintf(path, sizeof path, "%s/shard-1.tar", w->folder);
    assert_int_equal(truncate(path, 512), 0); /* the file that is open */
    assert_true(larder_local_read(l, 1, 5000, &byte, 1, NULL, &e) == -EILSEQ);
    assert_true(larder_local_read(l, 1, 0, &byte, 1, NULL, &e) == -EILSEQ);
    assert_int_equal(larder_local_read(l, 2, 0, &byte, 1, NULL, &e), 1);
    larder_local_close(l);
    larder_dataset_close(d);
}

int main(void)
{
    cuda = standin_load("memory=16M seed=5 delay_us=100");
    (void)standin_cufile_load(NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(local_files_give_the_servers_samples, setup, teardown),
        cmocka_unit_test_setup_teardown(other_files_are_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(files_that_change_are_noticed, setup, teardown),
        cmocka_unit_test_setup_teardown(a_feed_is_closed_in_the_middle, setup, teardown),
        cmocka_unit_test_setup_teardown(shards_come_to_any_memory, setup, teardown),
        cmocka_unit_test_setup_teardown(a_shard_that_changes_is_noticed, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
