/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: import and feed against the real server, over TLS: what comes back is what went in, on other numbers
 * of ranks, and a server that is stopped or killed and started again in the middle costs time and nothing
 * else (D9, D11, D13). Published folders give the same samples in the same order, and a file that is replaced
 * under a feed is told (D12). Method: larderd --dev as a process.
 */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/support/corpus.h"
#include "tests/support/folder.h"
#include "tests/support/larderd.h"

#define BATCH       24u
#define RANKS_BATCH 48u /* 8, 6, 16 and 1 divide it */

struct world {
    struct corpus corpus;
    char files[256];
    char **paths;
    struct larderd server;
    uint64_t samples;
};

static struct larder *open_client(struct world *w, const char *role)
{
    struct larder_options o = LARDER_INIT(larder_options);
    struct larder *c;
    struct larder_error e = {0};
    o.credentials = larderd_credentials(&w->server, role);
    o.staging_bytes = 8 << 20;
    if (larder_open(&o, &c, &e) < 0)
        fail_msg("%s", e.text);
    return c;
}

static void close_client(struct larder *c)
{
    assert_int_equal(larder_close(c, 10000, NULL), 0);
}

static int make(void **state)
{
    struct world *w = calloc(1, sizeof *w);
    corpus_make(&w->corpus, 12, 7, 60, 40000);
    w->samples = corpus_samples(&w->corpus);
    folder_make(w->files, sizeof w->files);
    w->paths = corpus_write(&w->corpus, w->files);
    larderd_start(&w->server, w->files);
    struct larder_import_options o = LARDER_INIT(larder_import_options);
    struct larder_error e = {0};
    struct larder *c = open_client(w, "writer");
    uint64_t version;
    o.dataset = "imported";
    o.files = (const char *const *)w->paths;
    o.format = LARDER_SHARD_AUTO;
    if (larder_dataset_import(c, &o, &version, &e) < 0)
        fail_msg("%s", e.text);
    assert_int_equal(version, 1);
    close_client(c);
    *state = w;
    return 0;
}

static int unmake(void **state)
{
    struct world *w = *state;
    larderd_remove(&w->server);
    corpus_paths_free(w->paths);
    folder_remove(w->files);
    corpus_free(&w->corpus);
    free(w);
    return 0;
}

static struct larder_feed *open_rank(struct larder *c, const char *dataset, uint32_t batch, uint32_t rank,
                                     uint32_t world, const uint8_t *at)
{
    struct larder_feed_options o = LARDER_INIT(larder_feed_options);
    struct larder_feed *f;
    struct larder_error e = {0};
    o.dataset = dataset;
    o.seed = 31;
    o.window_shards = 2;
    o.global_batch = batch;
    o.epochs = 2;
    o.rank = rank;
    o.world = world;
    o.depth_bytes = 1 << 20;
    o.state = at;
    o.state_bytes = at ? LARDER_STATE_BYTES : 0;
    if (larder_feed_open(c, &o, &f, &e) < 0)
        fail_msg("%s", e.text);
    return f;
}

static struct larder_feed *open_feed(struct larder *c, const char *dataset, const uint8_t *at)
{
    return open_rank(c, dataset, BATCH, 0, 1, at);
}

static int take(struct world *w, struct larder_feed *f, uint32_t *seen)
{
    struct larder_batch *b;
    struct larder_error e = {0};
    int rc = larder_feed_next(f, 60000, &b, &e);
    if (rc < 0)
        fail_msg("%s", e.text);
    for (size_t i = 0; rc == 1 && i < larder_batch_samples(b); i++) {
        struct larder_sample s;
        assert_int_equal(larder_batch_sample(b, i, &s), 0);
        corpus_check(&w->corpus, &s);
        seen[s.position]++;
    }
    larder_batch_release(b);
    return rc;
}

static void assert_all_once(const struct world *w, const uint32_t *seen, uint32_t batch)
{
    for (uint64_t i = 0; i < 2 * w->samples; i++)
        assert_int_equal(seen[i], i % w->samples < w->samples / batch * batch);
}

/* D11: 8 ranks to 6, 6 to 16, 16 to 1: the union has no gap and no repeat. D9: seven shards for sixteen
 * ranks. */
static void ranks_change(struct world *w, const char *dataset)
{
    const uint32_t worlds[] = {8, 6, 16, 1};
    uint32_t *seen = calloc(2 * w->samples, sizeof *seen);
    uint64_t batches = 2 * (w->samples / RANKS_BATCH), taken = 0;
    uint8_t at[LARDER_STATE_BYTES], next[LARDER_STATE_BYTES];
    struct larder *c = open_client(w, "reader");
    for (unsigned k = 0; k < 4; k++) {
        uint64_t now = k == 3 ? batches - taken : batches / 5;
        for (uint32_t r = 0; r < worlds[k]; r++) {
            struct larder_feed *f = open_rank(c, dataset, RANKS_BATCH, r, worlds[k], k ? at : NULL);
            for (uint64_t i = 0; i < now; i++)
                assert_int_equal(take(w, f, seen), 1);
            assert_int_equal(larder_feed_state(f, next), LARDER_STATE_BYTES);
            larder_feed_close(f);
        }
        memcpy(at, next, sizeof at);
        taken += now;
    }
    assert_all_once(w, seen, RANKS_BATCH);
    close_client(c);
    free(seen);
}

static void ranks_change_over_an_imported_dataset(void **state)
{
    ranks_change(*state, "imported");
}

static void ranks_change_over_a_published_folder(void **state)
{
    ranks_change(*state, "published");
}

static void restarts(struct world *w, const char *dataset)
{
    uint32_t *seen = calloc(2 * w->samples, sizeof *seen);
    struct larder *c = open_client(w, "reader");
    struct larder_feed *f = open_feed(c, dataset, NULL);
    unsigned n = 0;
    for (; take(w, f, seen) == 1; n++) {
        if (n == 3 || n == 20)
            larderd_end(&w->server, n == 3 ? SIGTERM : SIGKILL);
        if (n == 3 || n == 20)
            larderd_again(&w->server);
    }
    assert_true(n > 20);
    assert_all_once(w, seen, BATCH);
    larder_feed_close(f);
    close_client(c);
    free(seen);
}

static void an_imported_feed_outlives_its_server(void **state)
{
    restarts(*state, "imported");
}

static void a_published_feed_outlives_its_server(void **state)
{
    restarts(*state, "published");
}

static void reads_come_back_as_they_went(void **state)
{
    struct world *w = *state;
    struct larder *c = open_client(w, "reader");
    const char *const names[] = {"imported", "published"};
    for (int k = 0; k < 2; k++) {
        struct larder_dataset *d;
        struct larder_error e = {0};
        assert_int_equal(larder_dataset_open(c, names[k], 0, &d, &e), 0);
        assert_int_equal(larder_dataset_shards(d), w->corpus.shards);
        for (uint32_t i = 0; i < w->corpus.shards; i++) {
            const struct buf *file = &w->corpus.files[i];
            struct larder_shard_info info;
            uint8_t *p = malloc(file->n);
            assert_int_equal(larder_dataset_shard(d, i, &info, NULL), 0);
            assert_string_equal(info.name, w->corpus.names[i]);
            assert_int_equal(info.samples, w->corpus.counts[i]);
            assert_int_equal(larder_dataset_read(d, i, 0, p, file->n, &e), (int64_t)file->n);
            assert_memory_equal(p, file->p, file->n);
            assert_int_equal(larder_dataset_read(d, i, file->n - 7, p, 20, &e), 7);
            free(p);
        }
        larder_dataset_close(d);
    }
    close_client(c);
}

static void save(struct larder *c, uint64_t step, const struct larder_save_options *given, int expected)
{
    struct larder_save_options o = *given;
    struct larder_save *s;
    struct larder_error e = {0};
    o.run = "trained";
    o.step = step;
    assert_int_equal(larder_save_begin(c, &o, &s, &e), 0);
    assert_int_equal(larder_save_blob(s, "b", "x", 1, &e), 0);
    int rc = larder_save_submit(s, &e);
    if (rc == 0)
        rc = larder_save_wait(s, 60000, &e);
    larder_save_free(s);
    if (rc != expected)
        fail_msg("%s", e.text);
}

static size_t saved_state(struct larder *c, uint64_t step, uint8_t state[LARDER_STATE_BYTES])
{
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    struct larder_restore_info info = LARDER_INIT(larder_restore_info);
    struct larder_restore *r;
    struct larder_error e = {0};
    o.run = "trained";
    o.at = LARDER_AT_STEP;
    o.value = step;
    if (larder_restore_open(c, &o, &r, &e) < 0)
        fail_msg("%s", e.text);
    assert_int_equal(larder_restore_info(r, &info), 0);
    memcpy(state, info.loader_state, LARDER_STATE_BYTES);
    larder_restore_close(r);
    return info.loader_state_bytes;
}

/* The position is in the checkpoint unless it is not wanted: that of the batches handed out, whatever was
 * read ahead. */
static void a_save_takes_the_position_with_it(void **state)
{
    struct world *w = *state;
    struct larder *c = open_client(w, "writer");
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    uint32_t *seen = calloc(2 * w->samples, sizeof *seen);
    uint8_t expected[LARDER_STATE_BYTES], got[LARDER_STATE_BYTES];
    save(c, 1, &o, 0);
    assert_int_equal(saved_state(c, 1, got), 0); /* no feed */
    struct larder_feed *f = open_feed(c, "imported", NULL), *other;
    struct larder_feed_info info = LARDER_INIT(larder_feed_info);
    for (int i = 0; i < 3; i++)
        assert_int_equal(take(w, f, seen), 1);
    do /* until something is ahead */
        assert_int_equal(larder_feed_info(f, &info), 0);
    while (info.batches_ready == 0);
    assert_int_equal(larder_feed_state(f, expected), LARDER_STATE_BYTES);
    save(c, 2, &o, 0);
    assert_int_equal(saved_state(c, 2, got), LARDER_STATE_BYTES);
    assert_memory_equal(got, expected, sizeof got);
    larder_feed_close(f);
    f = open_feed(c, "imported", got); /* it goes on there */
    assert_int_equal(larder_feed_info(f, &info), 0);
    assert_int_equal(info.position, 3 * BATCH);

    o.no_loader_state = 1;
    save(c, 3, &o, 0);
    assert_int_equal(saved_state(c, 3, got), 0);
    o.no_loader_state = 0;
    other = open_feed(c, "published", NULL); /* which of the two is trained on? */
    save(c, 4, &o, -EINVAL);
    larder_feed_close(other);
    struct larder_feed_options fo = LARDER_INIT(larder_feed_options);
    struct larder_error e = {0};
    fo.dataset = "published";
    fo.global_batch = 1;
    fo.aside = 1;
    assert_int_equal(larder_feed_open(c, &fo, &other, &e), 0);
    save(c, 5, &o, 0);
    assert_int_equal(saved_state(c, 5, got), LARDER_STATE_BYTES);
    assert_memory_equal(got, expected, sizeof got);
    larder_feed_close(other);
    larder_feed_close(f);
    close_client(c);
    free(seen);
}

/* The one feed in the server's status, as text; "" if there is none. */
static void feed_in_status(struct larder *c, char out[4096])
{
    char *json = NULL, *begin, *end;
    assert_int_equal(larder_status(c, &json, NULL), 0);
    begin = strstr(json, "\"feeds\":[");
    assert_non_null(begin);
    end = strchr(begin, ']');
    snprintf(out, 4096, "%.*s", (int)(end - begin - 9), begin + 9);
    free(json);
}

static void wait_status(struct larder *c, bool there, char out[4096])
{
    for (time_t until = time(NULL) + 60; feed_in_status(c, out), (*out != 0) != there;)
        assert_true(time(NULL) < until);
}

/* An operator sees who reads what, until the feed is closed or its client is gone. */
static void a_feed_is_in_the_status(void **state)
{
    struct world *w = *state;
    struct larder *c = open_client(w, "reader"), *operator= open_client(w, "operator");
    struct larder_feed_options o = LARDER_INIT(larder_feed_options);
    struct larder_feed *f;
    struct larder_error e = {0};
    char text[4096];
    wait_status(operator, false, text);
    o.dataset = "imported";
    o.run = "llm";
    o.rank = 1;
    o.world = 3;
    o.global_batch = BATCH;
    assert_int_equal(larder_feed_open(c, &o, &f, &e), 0);
    wait_status(operator, true, text);
    assert_non_null(strstr(text, "\"dataset\":\"imported\""));
    assert_non_null(strstr(text, "\"run\":\"llm\""));
    assert_non_null(strstr(text, "\"rank\":1,\"world\":3"));
    larder_feed_close(f);
    wait_status(operator, false, text);
    assert_int_equal(larder_feed_open(c, &o, &f, &e), 0);
    wait_status(operator, true, text);
    larder_feed_close(f);
    close_client(c);
    wait_status(operator, false, text);
    close_client(operator);
}

/* D12: whatever was in memory may still come; then the replacement is told, and no byte of it was handed out.
 */
static void a_replaced_file_is_told(void **state)
{
    struct world *w = *state;
    struct larder *c = open_client(w, "reader");
    struct larder_feed *f = open_feed(c, "published", NULL);
    struct larder_batch *b;
    struct larder_error e = {0};
    uint32_t *seen = calloc(2 * w->samples, sizeof *seen);
    assert_int_equal(take(w, f, seen), 1);
    for (uint32_t i = 0; i < w->corpus.shards; i++) { /* the same bytes under another inode: still replaced */
        char other[512];
        snprintf(other, sizeof other, "%s.new", w->paths[i]);
        FILE *file = fopen(other, "wb");
        assert_int_equal(fwrite(w->corpus.files[i].p, 1, w->corpus.files[i].n, file), w->corpus.files[i].n);
        assert_int_equal(fclose(file), 0);
        assert_int_equal(rename(other, w->paths[i]), 0);
    }
    int rc;
    while ((rc = larder_feed_next(f, 60000, &b, &e)) == 1)
        larder_batch_release(b);
    assert_int_equal(rc, -EILSEQ);
    assert_int_equal(e.kind, LARDER_MISMATCH);
    assert_non_null(strstr(e.text, "replaced"));
    larder_feed_close(f);
    close_client(c);
    free(seen);
}

static void a_reader_cannot_import_and_a_failed_import_leaves_no_version(void **state)
{
    struct world *w = *state;
    struct larder_import_options o = LARDER_INIT(larder_import_options);
    struct larder_error e = {0};
    o.dataset = "imported";
    o.files = (const char *const *)w->paths;
    o.format = LARDER_SHARD_AUTO;
    struct larder *c = open_client(w, "reader");
    assert_true(larder_dataset_import(c, &o, NULL, &e) < 0);
    assert_int_equal(e.kind, LARDER_DENIED);
    close_client(c);
    c = open_client(w, "writer");
    uint32_t last = w->corpus.shards - 1;
    assert_int_equal(truncate(w->paths[last], (off_t)w->corpus.files[last].n - 2048), 0);
    assert_int_equal(larder_dataset_import(c, &o, NULL, &e), -EBADMSG);
    assert_non_null(strstr(e.text, w->corpus.names[last]));
    struct larder_dataset *d;
    assert_int_equal(larder_dataset_open(c, "imported", 0, &d, &e), 0);
    assert_int_equal(larder_dataset_version(d), 1);
    larder_dataset_close(d);
    close_client(c);
}

/* Feeds that share a server with an import of more shards than joins may stand open. */
static void many_shards_join(void **state)
{
    struct world *w = *state;
    struct corpus many;
    struct larder_error e = {0};
    char folder[256];
    uint64_t version = 0;
    corpus_make(&many, 2, 150, 2, 100);
    folder_make(folder, sizeof folder);
    char **paths = corpus_write(&many, folder);
    struct larder_import_options o = LARDER_INIT(larder_import_options);
    o.dataset = "many";
    o.files = (const char *const *)paths;
    o.format = LARDER_SHARD_TAR;
    struct larder *c = open_client(w, "writer");
    if (larder_dataset_import(c, &o, &version, &e) < 0)
        fail_msg("%s", e.text);
    assert_int_equal(version, 1);
    if (larder_dataset_import(c, &o, &version, &e) < 0)
        fail_msg("%s", e.text);
    assert_int_equal(version, 2);
    struct larder_dataset *d;
    struct larder_shard_info info;
    assert_int_equal(larder_dataset_open(c, "many", 1, &d, &e), 0);
    assert_int_equal(larder_dataset_shards(d), 150);
    assert_int_equal(larder_dataset_shard(d, 149, &info, NULL), 0);
    assert_string_equal(info.name, "shard-149.tar");
    larder_dataset_close(d);
    close_client(c);
    corpus_paths_free(paths);
    corpus_free(&many);
    folder_remove(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_come_back_as_they_went),
        cmocka_unit_test(ranks_change_over_an_imported_dataset),
        cmocka_unit_test(ranks_change_over_a_published_folder),
        cmocka_unit_test(an_imported_feed_outlives_its_server),
        cmocka_unit_test(a_published_feed_outlives_its_server),
        cmocka_unit_test(a_save_takes_the_position_with_it),
        cmocka_unit_test(a_feed_is_in_the_status),
        cmocka_unit_test(many_shards_join),
        cmocka_unit_test(a_replaced_file_is_told),
        cmocka_unit_test(a_reader_cannot_import_and_a_failed_import_leaves_no_version),
    };
    return cmocka_run_group_tests(tests, make, unmake);
}
