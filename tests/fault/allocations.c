/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: memory that runs out in a trainer's process, or in larderd while it serves one, at whatever moment,
 * fails the call that needed it, with a reason, and nothing else: nothing acknowledged is lost, nothing hangs
 * or leaks, and the next call works. Method: each piece of work that a client does against a real larderd,
 * with the client's first allocation failing, then its second, until one goes through undisturbed
 * (scarce.h); then the same with those of the server, each fifth of them (of both each n-th with
 * LARDER_TEST_EVERY=n; from where on, LARDER_TEST_SEED says). After each failure the same work is done on the
 * same client; then that is closed, and all memory must be back: in the server after each kind of work, since
 * it keeps some things for a while.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zstd.h>

#include <cmocka.h>

#include "client/larder.h"
#include "tests/support/corpus.h"
#include "tests/support/folder.h"
#include "tests/support/larderd.h"
#include "tests/support/mosaic.h"
#include "tests/support/scarce.h"

#define HANG_S   120 /* one try; they take some milliseconds */
#define ROWS     700u
#define COLUMNS  100u
#define KEPT_MAX 64u /* pieces that larderd keeps for a while, of the last session */

static struct larderd server;
static char folder[256];
static struct corpus corpus;
static char **files;
static struct larder *client;
static uint64_t step, durable;
static float weights[ROWS * COLUMNS], back[ROWS * COLUMNS];

static int open_client(struct larder_error *e)
{
    struct larder_options o = LARDER_INIT(larder_options);
    o.credentials = larderd_credentials(&server, "admin");
    o.staging_bytes = 8u << 20;
    o.threads = 2;
    return larder_open(&o, &client, e);
}

static int close_client(struct larder_error *e)
{
    struct larder *c = client;
    client = NULL;
    return larder_close(c, -1, e);
}

/* ---- work: each frees what it has opened, however it ends ---- */

static int begin(struct larder_error *e)
{
    struct larder_info i = LARDER_INIT(larder_info);
    int rc = open_client(e);
    if (rc < 0)
        return rc;
    rc = larder_info(client, &i, e);
    return rc < 0 ? rc : close_client(e);
}

static int fill(struct larder_save *s, struct larder_error *e)
{
    for (size_t i = 0; i < ROWS * COLUMNS; i++)
        weights[i] = (float)((step * 31 + i * 7) % 1000) / 999;
    const struct larder_tensor tensors[] = {
        {.name = "w", .dtype = LARDER_F32, .dims = 2, .shape = {ROWS, COLUMNS}, .data = weights},
        {.name = "columns",
         .dtype = LARDER_F32,
         .dims = 2,
         .shape = {COLUMNS, ROWS},
         .strides = {1, COLUMNS},
         .data = weights},
        {.name = "step", .dtype = LARDER_U64, .data = &step},
    };
    int rc = 0;
    for (size_t i = 0; i < 3 && rc == 0; i++)
        rc = larder_save_tensor(s, &tensors[i], e);
    if (rc == 0)
        rc = larder_save_alias(s, "tied", "w", e);
    return rc == 0 ? larder_save_blob(s, "optimiser", "some state", 10, e) : rc;
}

static int save_run(const char *run, struct larder_error *e)
{
    static const char *const labels[] = {"host", "a", NULL};
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    struct larder_save *s;
    o.run = run;
    o.step = ++step;
    o.labels = labels;
    o.verify_percent = 100;
    int rc = larder_save_begin(client, &o, &s, e);
    if (rc < 0)
        return rc;
    rc = fill(s, e);
    if (rc == 0)
        rc = larder_save_submit(s, e);
    if (rc == 0)
        rc = larder_save_wait(s, -1, e);
    larder_save_free(s);
    return rc;
}

static int save(struct larder_error *e)
{
    int rc = save_run("run", e);
    durable = rc == 0 ? step : durable;
    return rc;
}

static int restore_all(struct larder_restore *r, struct larder_error *e)
{
    struct larder_restore_info i = LARDER_INIT(larder_restore_info);
    struct larder_tensor t = {
        .name = "w", .dtype = LARDER_F32, .dims = 2, .shape = {ROWS, COLUMNS}, .data = back};
    struct larder_tensor part = {.name = "columns",
                                 .dtype = LARDER_F32,
                                 .dims = 2,
                                 .shape = {COLUMNS, ROWS},
                                 .offsets = {1, 2},
                                 .lengths = {1, ROWS - 2},
                                 .data = malloc(ROWS * sizeof back[0])};
    void *blob = NULL;
    size_t n;
    const char *name;
    int rc = larder_restore_info(r, &i);
    if (rc == 0 && i.step != durable)
        fail_msg("step %llu was durable, and %llu is restored", (unsigned long long)durable,
                 (unsigned long long)i.step);
    if (rc == 0)
        rc = larder_restore_add(r, &t, e);
    if (rc == 0)
        rc = larder_restore_add(r, &part, e);
    if (rc == 0)
        rc = larder_restore_run(r, e);
    if (rc == 0) {
        for (size_t at = 0; at < ROWS * COLUMNS; at++)
            assert_true(back[at] == (float)((i.step * 31 + at * 7) % 1000) / 999);
        for (size_t row = 2; row < ROWS; row++)
            assert_true(((float *)part.data)[row - 2] == back[row * COLUMNS + 1]);
        (void)larder_restore_extra(r, 0, &name);
        rc = larder_restore_blob(r, 0, "optimiser", &blob, &n, e);
    }
    if (rc == 0)
        assert_true(n == 10 && memcmp(blob, "some state", 10) == 0);
    scarce_free(blob);
    free(part.data);
    return rc;
}

static int restore(struct larder_error *e)
{
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    struct larder_restore *r;
    o.run = "run";
    int rc = larder_restore_open(client, &o, &r, e);
    if (rc < 0)
        return rc;
    rc = restore_all(r, e);
    larder_restore_close(r);
    return rc;
}

static int import(struct larder_error *e)
{
    struct larder_import_options o = LARDER_INIT(larder_import_options);
    uint64_t version;
    o.dataset = "sealed";
    o.files = (const char *const *)files;
    o.format = LARDER_SHARD_AUTO;
    return larder_dataset_import(client, &o, &version, e);
}

static int read_dataset(struct larder_error *e)
{
    struct larder_dataset *d;
    struct larder_shard_info i;
    char p[4096];
    int64_t rc = larder_dataset_open(client, "sealed", 0, &d, e);
    if (rc < 0)
        return (int)rc;
    rc = larder_dataset_shard(d, 1, &i, e);
    if (rc == 0)
        rc = larder_dataset_read(d, 1, 100, p, sizeof p, e);
    if (rc > 0)
        assert_memory_equal(p, corpus.files[1].p + 100, (size_t)rc);
    larder_dataset_close(d);
    return rc < 0 ? (int)rc : 0;
}

static void is_of_corpus(const struct larder_sample *s)
{
    corpus_check(&corpus, s);
}

/* Four batches of five. */
static int feed_on(const char *dataset, const char *local_dir, void (*right)(const struct larder_sample *s),
                   struct larder_error *e)
{
    struct larder_feed_options o = LARDER_INIT(larder_feed_options);
    struct larder_feed *f;
    struct larder_batch *b;
    o.dataset = dataset;
    o.local_dir = local_dir;
    o.seed = 3;
    o.global_batch = 5;
    o.depth_bytes = 1u << 20;
    o.run = "run";
    int rc = larder_feed_open(client, &o, &f, e);
    if (rc < 0)
        return rc;
    for (int i = 0; i < 4 && (rc = larder_feed_next(f, -1, &b, e)) == 1; i++) {
        for (size_t k = 0; k < larder_batch_samples(b); k++) {
            struct larder_sample s;
            assert_int_equal(larder_batch_sample(b, k, &s), 0);
            right(&s);
        }
        larder_batch_release(b);
    }
    larder_feed_close(f);
    return rc < 0 ? rc : 0;
}

static int feed_sealed(struct larder_error *e)
{
    return feed_on("sealed", NULL, is_of_corpus, e);
}

static int feed_published(struct larder_error *e)
{
    return feed_on("published", NULL, is_of_corpus, e);
}

static int feed_local(struct larder_error *e)
{
    return feed_on("published", folder, is_of_corpus, e);
}

/* ---- a packed MDS shard, published in a folder of its own ---- */

#define PACKED_SAMPLES 20u

static char mds[256];
static struct buf packed;

static void fill_column(void *arg, uint32_t sample, uint32_t column, struct buf *out)
{
    (void)arg, (void)column;
    for (uint32_t i = 0; i < 1000 + sample; i++)
        buf_u8(out, (uint8_t)('a' + (sample + i) % 26));
}

/* Also tells the server, and waits until it has heard. */
static int publish_packed(struct larder_error *e)
{
    static const struct mosaic_column column = {"text", "str", -1};
    struct buf raw = {0}, json = {0};
    char conf[300];
    uint8_t room[40000];
    mosaic_shard(&raw, &column, 1, PACKED_SAMPLES, fill_column, NULL);
    size_t n = ZSTD_compress(room, sizeof room, raw.p, raw.n, 3);
    assert_false(ZSTD_isError(n));
    buf_put(&packed, room, n);
    struct mosaic_entry entry = {.raw = "a.mds",
                                 .raw_bytes = raw.n,
                                 .zip = "a.mds.zstd",
                                 .zip_bytes = n,
                                 .compression = "zstd:3",
                                 .samples = PACKED_SAMPLES};
    mosaic_index(&json, &column, 1, &entry, 1);
    folder_replace(mds, "a.mds.zstd", packed.p, packed.n);
    folder_replace(mds, "index.json", json.p, json.n);
    buf_free(&raw);
    buf_free(&json);
    snprintf(conf, sizeof conf, "%s/larderd.conf", server.folder);
    FILE *f = fopen(conf, "a");
    assert_non_null(f);
    fprintf(f, "\n[publish packed]\npath = %s\ntenant = *\nformat = mds\n", mds);
    assert_int_equal(fclose(f), 0);
    kill(server.pid, SIGHUP);
    struct larder_dataset *d = NULL;
    int rc = -1;
    for (int ms = 0; ms < 20000 && rc < 0; ms += 20) {
        usleep(20000);
        rc = larder_dataset_open(client, "packed", 0, &d, e);
    }
    larder_dataset_close(d);
    return rc;
}

static void is_of_packed(const struct larder_sample *s)
{
    const uint8_t *text = s->field[0].data;
    assert_int_equal(s->field[0].bytes, 1000 + s->number);
    for (size_t j = 0; j < s->field[0].bytes; j++)
        assert_int_equal(text[j], 'a' + (s->number + j) % 26);
}

/* In a new file of the same bytes it is another shard, which nobody has unpacked. */
static int feed_packed(struct larder_error *e)
{
    folder_replace(mds, "a.mds.zstd", packed.p, packed.n);
    return feed_on("packed", NULL, is_of_packed, e);
}

static int each_run(void *arg, const struct larder_run_info *r)
{
    (void)arg, (void)r;
    return 0;
}

static int each_commit(void *arg, const struct larder_commit_info *i)
{
    (void)arg, (void)i;
    return 0;
}

static int each_tenant(void *arg, const struct larder_tenant_info *i)
{
    (void)arg, (void)i;
    return 0;
}

static int list(struct larder_error *e)
{
    char *json = NULL;
    int rc = larder_run_list(client, LARDER_CHECKPOINTS, each_run, NULL, e);
    if (rc == 0)
        rc = larder_commit_list(client, LARDER_CHECKPOINTS, "run", 1, each_commit, NULL, e);
    if (rc == 0)
        rc = larder_tenant_list(client, each_tenant, NULL, e);
    if (rc == 0)
        rc = larder_status(client, &json, e);
    scarce_free(json);
    return rc;
}

static int verify(struct larder_error *e)
{
    int64_t damaged = larder_verify(client, LARDER_CHECKPOINTS, "old", 0, LARDER_VERIFY_DEEP, NULL, NULL, e);
    if (damaged > 0)
        fail_msg("memory ran out, and %lld objects are called damaged: %s", (long long)damaged, e->text);
    return (int)damaged;
}

static int operate(struct larder_error *e)
{
    struct larder_prune_options o = LARDER_INIT(larder_prune_options);
    uint8_t plan[32];
    uint64_t freed, runs;
    o.kind = LARDER_CHECKPOINTS;
    o.run = "run";
    o.keep_last = 1;
    o.execute = 1;
    int rc = larder_mark(client, LARDER_CHECKPOINTS, "old", 1, LARDER_PIN, "for a paper", e);
    if (rc == 0)
        rc = larder_mark(client, LARDER_CHECKPOINTS, "old", 1, LARDER_UNPIN, NULL, e);
    if (rc == 0)
        rc = larder_prune(client, &o, NULL, NULL, plan, &freed, e);
    return rc == 0 ? larder_key_rotate(client, 0, &runs, e) : rc;
}

static int scratch(struct larder_error *e)
{
    char path[300];
    snprintf(path, sizeof path, "%s/scratch", server.folder);
    struct larder_tensor t = {
        .name = "w", .dtype = LARDER_F32, .dims = 2, .shape = {ROWS, COLUMNS}, .data = weights};
    int rc = larder_scratch_write(path, &t, 1, NULL, NULL, e);
    t.data = back;
    if (rc == 0)
        rc = larder_scratch_read(path, &t, 1, NULL, NULL, e);
    if (rc == 0)
        assert_memory_equal(back, weights, sizeof back);
    return rc;
}

/* ---- the tries ---- */

typedef int work(struct larder_error *e);

static bool of_server; /* its memory runs out, and not the client's */
static unsigned mistakes;
static uint64_t total;

static bool opens_itself(work *w)
{
    return w == begin;
}

/* Some work of larderd's is tried on connections and lanes that are there; the others include their making,
 * and the client's patience with each that fails. */
static bool is_connected_before(work *w)
{
    return of_server && w != begin && w != save;
}

static void nothing_held(const char *when, size_t but)
{
    char text[200];
    scarce_describe(text, sizeof text);
    if (scarce_held() > but)
        fail_msg("%s: %zu pieces of memory are not given back, the first of %s", when, scarce_held(), text);
}

static void close_all(const char *when)
{
    struct larder_error e = {0};
    if (client && close_client(&e) < 0)
        fail_msg("%s: closing: %s", when, e.text);
    if (!of_server)
        nothing_held(when, 0);
}

/* A thread that cannot be started is told as the resource that is busy; a server that cannot answer hangs
 * up. */
static bool says_so(const struct larder_error *e)
{
    bool thread = strncmp(scarce_failed(), "pthread_create", 14) == 0;
    enum larder_class expected = thread ? LARDER_BUSY : LARDER_NO_MEMORY;
    return (e->kind == expected || (of_server && e->kind == LARDER_NETWORK)) && strlen(e->text) > 10;
}

/* One try; false: the work was done before so many allocations. */
static bool try_with(work *w, uint64_t at, uint64_t *failures)
{
    struct larder_error e = {0};
    char when[1200];
    snprintf(when, sizeof when, "allocation %llu", (unsigned long long)at);
    alarm(HANG_S);
    if (!of_server)
        scarce_watch();
    if (!opens_itself(w))
        assert_int_equal(open_client(&e), 0);
    if (is_connected_before(w) && w(&e) < 0)
        fail_msg("before %s: %s", when, e.text);
    scarce_begin(at, NULL);
    int rc = w(&e);
    (void)scarce_end();
    snprintf(when, sizeof when, "allocation %llu (%s)", (unsigned long long)at, scarce_failed());
    if (rc < 0 && !says_so(&e)) {
        print_error("%s: %d, kind %d: %s\n", when, rc, e.kind, e.text);
        mistakes++;
    }
    *failures += rc < 0;
    if (opens_itself(w))
        close_all(when);
    if ((rc = w(&e)) < 0)
        fail_msg("after %s: %d: %s", when, rc, e.text);
    close_all(when);
    return scarce_failed()[0] != 0;
}

static uint64_t number(const char *variable, uint64_t otherwise)
{
    const char *given = getenv(variable);
    return given ? strtoull(given, NULL, 0) : otherwise;
}

static void run_short(work *w)
{
    uint64_t every = number("LARDER_TEST_EVERY", of_server ? 5 : 1), tries = 0, failures = 0;
    uint64_t at = 1 + number("LARDER_TEST_SEED", 0) % every;
    mistakes = 0;
    struct larder_error e = {0};
    for (int i = 0; i < 2; i++) { /* what libraries keep for themselves they have from here on */
        assert_int_equal(open_client(&e), 0);
        if (!opens_itself(w) && w(&e) < 0)
            fail_msg("%s", e.text);
        assert_int_equal(close_client(&e), 0);
    }
    if (of_server)
        scarce_watch();
    for (; try_with(w, at, &failures); at += every)
        tries++;
    print_message("# %llu allocations failed, %llu times the work did\n", (unsigned long long)tries,
                  (unsigned long long)failures);
    total += tries;
    assert_true(tries * every > 10);
    assert_int_equal(mistakes, 0);
    if (of_server && w != save && w != import && w != feed_packed) /* of what these make it knows more */
        nothing_held("all those", KEPT_MAX);
}

#define TEST(name)                        \
    static void test_##name(void **state) \
    {                                     \
        (void)state;                      \
        run_short(name);                  \
    }
TEST(begin)
TEST(save)
TEST(restore)
TEST(import)
TEST(read_dataset)
TEST(feed_sealed)
TEST(feed_published)
TEST(feed_local)
TEST(feed_packed)
TEST(list)
TEST(verify)
TEST(operate)
TEST(scratch)

static int start(const char *program)
{
    struct larder_error e = {0};
    larderd_start_as(&server, program, folder);
    if (open_client(&e) < 0 || save_run("old", &e) < 0 || save(&e) < 0 || import(&e) < 0 ||
        (of_server && publish_packed(&e) < 0) || close_client(&e) < 0) {
        print_error("%s\n", e.text);
        return -1;
    }
    total = 0;
    return 0;
}

static int start_client(void **state)
{
    (void)state;
    return start("larderd");
}

static int start_server(void **state)
{
    char file[300];
    (void)state;
    snprintf(file, sizeof file, "%s.scarce", folder);
    of_server = true;
    scarce_of_another(file);
    setenv(SCARCE_ENVIRONMENT, file, 1);
    int rc = start("tests/scarce-larderd");
    unlink(file); /* both have it */
    return rc;
}

static int stop(void **state)
{
    (void)state;
    print_message("# %llu %s allocations failed\n", (unsigned long long)total,
                  of_server ? "server" : "client");
    larderd_remove(&server);
    return 0;
}

int main(void)
{
    const struct CMUnitTest of_client[] = {
        cmocka_unit_test(test_begin),          cmocka_unit_test(test_save),
        cmocka_unit_test(test_restore),        cmocka_unit_test(test_import),
        cmocka_unit_test(test_read_dataset),   cmocka_unit_test(test_feed_sealed),
        cmocka_unit_test(test_feed_published), cmocka_unit_test(test_feed_local),
        cmocka_unit_test(test_list),           cmocka_unit_test(test_verify),
        cmocka_unit_test(test_operate),        cmocka_unit_test(test_scratch),
    };
    const struct CMUnitTest of_larderd[] = {
        cmocka_unit_test(test_begin),          cmocka_unit_test(test_save),
        cmocka_unit_test(test_restore),        cmocka_unit_test(test_import),
        cmocka_unit_test(test_read_dataset),   cmocka_unit_test(test_feed_sealed),
        cmocka_unit_test(test_feed_published), cmocka_unit_test(test_list),
        cmocka_unit_test(test_verify),         cmocka_unit_test(test_operate),
        cmocka_unit_test(test_feed_packed), /* the last: what is known of its versions stays */
    };
    folder_make(folder, sizeof folder);
    folder_make(mds, sizeof mds);
    corpus_make(&corpus, 5, 3, 8, 3000);
    files = corpus_write(&corpus, folder);
    int failed = cmocka_run_group_tests(of_client, start_client, stop);
    failed += cmocka_run_group_tests(of_larderd, start_server, stop);
    corpus_paths_free(files);
    corpus_free(&corpus);
    buf_free(&packed);
    folder_remove(folder);
    folder_remove(mds);
    return failed;
}
