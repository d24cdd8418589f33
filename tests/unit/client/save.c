/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: what is saved comes back, byte by byte, whatever its shape, strides and number of ranks; and a save
 * that cannot succeed fails on every rank, with the reason. Method: a real larderd, clients in this process.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/larder.h"
#include "client/saver.h"
#include "tests/support/daemon.h"
#include "tests/support/good.h"

static struct daemon server;

static struct larder_save_options options(const char *run, uint64_t step)
{
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    o.run = run;
    o.step = step;
    o.world = 1;
    o.verify_percent = 100;
    return o;
}

static struct larder_save *begin(struct larder *c, const struct larder_save_options *o)
{
    struct larder_error e;
    struct larder_save *s = NULL;
    GOOD(larder_save_begin(c, o, &s, &e));
    return s;
}

static struct larder_tensor tensor(const char *name, enum larder_dtype dtype, void *data, unsigned dims, ...)
{
    struct larder_tensor t = {.name = name, .dtype = dtype, .dims = dims, .data = data};
    va_list args;
    va_start(args, dims);
    for (unsigned i = 0; i < dims; i++)
        t.shape[i] = va_arg(args, unsigned);
    va_end(args);
    return t;
}

static void fill(void *p, size_t n, uint64_t seed)
{
    uint8_t *b = p;
    for (size_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        b[i] = (uint8_t)(seed >> 56);
    }
}

static struct larder_restore *reopen(struct larder *c, const char *run)
{
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    struct larder_error e;
    struct larder_restore *r = NULL;
    o.run = run;
    GOOD(larder_restore_open(c, &o, &r, &e));
    return r;
}

static void add(struct larder_restore *r, struct larder_tensor t, void *data)
{
    struct larder_error e;
    t.data = data;
    GOOD(larder_restore_add(r, &t, &e));
}

static void finish(struct larder_save *s)
{
    struct larder_error e;
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_wait(s, -1, &e));
    larder_save_free(s);
}

/* ---- one rank ---- */

/* S1, S2, S8, S9, S10, S13: every dtype, scalars, empty tensors, tied weights, views; more than the staging
 * memory holds; and all of it overwritten as soon as submit returns. */
static void what_is_saved_comes_back(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    enum { BIG = 9u << 20 };
    uint8_t *big = malloc(BIG), *big2 = malloc(BIG), *back = malloc(BIG);
    float scalar = 3.25f, matrix[6][4], expanded[3] = {1, 2, 3};
    uint8_t small[LARDER_F6_E3M2 + 1][48];
    char names[LARDER_F6_E3M2 + 1][16];
    fill(big, BIG, 1);
    memcpy(big2, big, BIG);
    for (int i = 0; i < 24; i++)
        ((float *)matrix)[i] = (float)i;
    const char *labels[] = {"host", "node7", "note", "a, b", NULL};
    uint8_t loader[20];
    fill(loader, sizeof loader, 2);
    struct larder_save_options o = options("one", 100);
    o.labels = labels;
    o.loader_state = loader;
    o.loader_state_bytes = sizeof loader;
    struct larder_save *s = begin(c, &o);

    struct larder_tensor t[40];
    unsigned n = 0;
    for (unsigned d = LARDER_U8; d <= LARDER_F6_E3M2; d++) {
        fill(small[d], sizeof small[d], d);
        snprintf(names[d], sizeof names[d], "small/%u", d);
        t[n++] = tensor(names[d], d, small[d], 2, 1u, (unsigned)(sizeof small[d] * 8 / larder_dtype_bits(d)));
    }
    struct larder_tensor large = tensor("large", LARDER_U8, big, 1, BIG);
    struct larder_tensor zero_d = tensor("zero-d", LARDER_F32, &scalar, 0);
    struct larder_tensor empty = tensor("empty", LARDER_F32, NULL, 2, 2u, 0u);
    struct larder_tensor empty2 = tensor("empty2", LARDER_BF16, NULL, 1, 0u);
    struct larder_tensor transposed = tensor("transposed", LARDER_F32, matrix, 2, 4u, 6u);
    transposed.strides[0] = 1;
    transposed.strides[1] = 4;
    struct larder_tensor repeated = tensor("repeated", LARDER_F32, expanded, 2, 5u, 3u);
    repeated.strides[0] = 0;
    repeated.strides[1] = 1;
    struct larder_tensor turned = tensor("turned", LARDER_F32, &expanded[2], 1, 3u);
    turned.strides[0] = -1;
    for (unsigned i = 0; i < n; i++)
        GOOD(larder_save_tensor(s, &t[i], &e));
    const struct larder_tensor *others[] = {&large,      &zero_d,   &empty, &empty2,
                                            &transposed, &repeated, &turned};
    for (unsigned i = 0; i < sizeof others / sizeof *others; i++)
        GOOD(larder_save_tensor(s, others[i], &e));
    GOOD(larder_save_alias(s, "tied", "large", &e));
    GOOD(larder_save_blob(s, "rng", big + 5, 1000, &e));
    GOOD(larder_save_blob(s, "nothing", NULL, 0, &e));
    GOOD(larder_save_submit(s, &e));
    memset(big, 0xee, BIG);
    memset(matrix, 0xee, sizeof matrix);
    memset(expanded, 0xee, sizeof expanded);
    scalar = 0;
    GOOD(larder_save_wait(s, -1, &e));
    struct larder_save_info info = LARDER_INIT(larder_save_info);
    assert_int_equal(larder_save_info(s, &info), 0);
    assert_int_equal(info.state, LARDER_SAVE_DURABLE);
    assert_true(info.sequence == 1 && info.chunks == info.chunks_sent && info.durable_seconds > 0);
    assert_true(info.plain_bytes < 2 * BIG); /* tied weights are stored once */
    larder_save_free(s);

    struct larder_restore *r = reopen(c, "one");
    struct larder_restore_info ri = LARDER_INIT(larder_restore_info);
    assert_int_equal(larder_restore_info(r, &ri), 0);
    assert_true(ri.step == 100 && ri.sequence == 1 && ri.world == 1);
    assert_int_equal(ri.loader_state_bytes, sizeof loader);
    assert_memory_equal(ri.loader_state, loader, sizeof loader);
    const char *key, *value;
    assert_int_equal(larder_restore_label(r, 1, &key, &value), 0);
    assert_string_equal(key, "note");
    assert_string_equal(value, "a, b");
    assert_int_equal(larder_restore_label(r, 2, &key, &value), -ENOENT);
    assert_int_equal(larder_restore_tensors(r), n + 8);

    static uint8_t got[LARDER_F6_E3M2 + 1][48];
    for (unsigned i = 0; i < n; i++)
        add(r, t[i], got[i]);
    float got_scalar = 0, got_matrix[4][6], got_repeated[5][3], got_turned[3];
    add(r, zero_d, &got_scalar);
    add(r, empty, NULL);
    struct larder_tensor plain = tensor("transposed", LARDER_F32, NULL, 2, 4u, 6u);
    add(r, plain, got_matrix);
    plain = tensor("repeated", LARDER_F32, NULL, 2, 5u, 3u);
    add(r, plain, got_repeated);
    plain = tensor("turned", LARDER_F32, NULL, 1, 3u);
    add(r, plain, got_turned);
    plain = tensor("tied", LARDER_U8, NULL, 1, BIG);
    add(r, plain, back);
    const char *extra;
    assert_int_equal(larder_restore_extra(r, 0, &extra), 0); /* not asked for, by name */
    assert_string_equal(extra, "empty2");
    assert_int_equal(larder_restore_extra(r, 1, &extra), 0);
    assert_string_equal(extra, "large");
    assert_int_equal(larder_restore_extra(r, 2, &extra), -ENOENT);
    GOOD(larder_restore_run(r, &e));
    for (unsigned i = 0; i < n; i++)
        assert_memory_equal(got[i], small[LARDER_U8 + i], sizeof got[i]);
    assert_memory_equal(back, big2, BIG);
    assert_true(got_scalar == 3.25f);
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 6; k++)
            assert_true(got_matrix[i][k] == (float)(k * 4 + i));
    for (int i = 0; i < 5; i++)
        for (int k = 0; k < 3; k++)
            assert_true(got_repeated[i][k] == (float)(k + 1));
    for (int k = 0; k < 3; k++)
        assert_true(got_turned[k] == (float)(3 - k));
    void *blob;
    size_t blob_bytes;
    GOOD(larder_restore_blob(r, 0, "rng", &blob, &blob_bytes, &e));
    assert_int_equal(blob_bytes, 1000);
    assert_memory_equal(blob, big2 + 5, 1000);
    free(blob);
    assert_int_equal(larder_restore_blob(r, 0, "none", &blob, &blob_bytes, &e), -ENOENT);
    larder_restore_close(r);
    free(big);
    free(big2);
    free(back);
    GOOD(larder_close(c, -1, &e));
}

/* S4, S5, and what is refused at save, by name. */
static void names_are_opaque_and_bad_input_is_refused(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    struct larder_save_options o = options("names of ../anything / at all", 1);
    struct larder_save *s = begin(c, &o);
    static char long_name[4098];
    memset(long_name, 'n', 4096);
    const char *names[] = {"a/b", "a", "b", "../../etc/passwd", "~", "a b\n", "\xc3\xa9", long_name};
    uint32_t values[8], got[8];
    for (unsigned i = 0; i < 8; i++) {
        values[i] = i * 77;
        struct larder_tensor t = tensor(names[i], LARDER_U32, &values[i], 0);
        GOOD(larder_save_tensor(s, &t, &e));
    }
    struct larder_tensor bad = tensor("a", LARDER_U32, &values[0], 0);
    assert_int_equal(larder_save_tensor(s, &bad, &e), -EINVAL); /* twice */
    assert_non_null(strstr(e.text, "\"a\""));
    bad = tensor("x\0y", LARDER_U32, &values[0], 0);
    bad.name_bytes = 3;
    assert_int_equal(larder_save_tensor(s, &bad, &e), -EINVAL);
    bad = tensor("bad \xff utf8", LARDER_U32, &values[0], 0);
    assert_int_equal(larder_save_tensor(s, &bad, &e), -EINVAL);
    assert_non_null(strstr(e.text, "\\xff"));
    long_name[4096] = 'n';
    bad = tensor(long_name, LARDER_U32, &values[0], 0);
    assert_true(larder_save_tensor(s, &bad, &e) < 0);
    long_name[4096] = 0;
    bad = tensor("null data", LARDER_U32, NULL, 1, 4u);
    assert_int_equal(larder_save_tensor(s, &bad, &e), -EINVAL);
    assert_non_null(strstr(e.text, "null data"));
    bad = tensor("odd fp4", LARDER_F4, &values[0], 1, 3u);
    assert_true(larder_save_tensor(s, &bad, &e) < 0);
    assert_non_null(strstr(e.text, "odd fp4"));
    bad = tensor("outside", LARDER_U32, &values[0], 1, 4u);
    bad.offsets[0] = 3;
    bad.lengths[0] = 2;
    assert_true(larder_save_tensor(s, &bad, &e) < 0);
    assert_true(larder_save_alias(s, "tie", "nobody", &e) < 0);
    assert_non_null(strstr(e.text, "nobody"));
    finish(s);

    struct larder_restore *r = reopen(c, "names of ../anything / at all");
    assert_int_equal(larder_restore_tensors(r), 8);
    for (unsigned i = 0; i < 8; i++)
        add(r, tensor(names[i], LARDER_U32, NULL, 0), &got[i]);
    GOOD(larder_restore_run(r, &e));
    assert_memory_equal(got, values, sizeof got);
    /* Strict, by name. */
    bad = tensor("nobody", LARDER_U32, got, 0);
    assert_int_equal(larder_restore_add(r, &bad, &e), -ENOENT);
    assert_non_null(strstr(e.text, "nobody"));
    bad = tensor("a/b", LARDER_F32, got, 0);
    assert_int_equal(larder_restore_add(r, &bad, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "F32"));
    bad = tensor("a/b", LARDER_U32, got, 1, 2u);
    assert_int_equal(larder_restore_add(r, &bad, &e), -EILSEQ);
    larder_restore_close(r);
    GOOD(larder_close(c, -1, &e));
}

/* ---- several ranks ---- */

struct rank {
    pthread_t thread;
    uint32_t rank, world;
    uint64_t step;
    const char *run;
    uint8_t attempt;
    uint32_t rows, columns; /* of the sharded tensor */
    uint32_t from, count;   /* rows of this rank */
    uint32_t replica;       /* value of a tensor that all have */
    int join_timeout_ms;
    int rc;
    struct larder_error error;
};

static void *save_rank(void *arg)
{
    struct rank *k = arg;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    struct larder_save_options o = options(k->run, k->step);
    o.rank = k->rank;
    o.world = k->world;
    o.join_timeout_ms = k->join_timeout_ms;
    o.attempt[0] = k->attempt;
    struct larder_save *s = begin(c, &o);
    uint32_t *data = calloc((size_t)k->count * k->columns + 1, sizeof *data);
    for (uint32_t i = 0; i < k->count * k->columns; i++)
        data[i] = k->from * k->columns + i + (uint32_t)k->step;
    struct larder_tensor t = tensor("sharded", LARDER_U32, data, 2, k->rows, k->columns);
    t.offsets[0] = k->from;
    t.lengths[0] = k->count;
    t.lengths[1] = k->columns;
    struct larder_tensor same = tensor("replicated", LARDER_U32, &k->replica, 1, 1u);
    GOOD(larder_save_tensor(s, &t, &e));
    GOOD(larder_save_tensor(s, &same, &e));
    k->rc = larder_save_submit(s, &k->error);
    if (k->rc == 0)
        k->rc = larder_save_wait(s, -1, &k->error);
    larder_save_free(s);
    free(data);
    GOOD(larder_close(c, -1, &e));
    return NULL;
}

static void save_ranks(struct rank *ranks, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        pthread_create(&ranks[i].thread, NULL, save_rank, &ranks[i]);
    for (uint32_t i = 0; i < n; i++)
        pthread_join(ranks[i].thread, NULL);
}

/* S3, and restores by other boxes than were saved. */
static void ranks_make_one_checkpoint(void **state)
{
    (void)state;
    struct larder_error e;
    enum { ROWS = 600, COLUMNS = 3000 }; /* 7.2 MB: large tensors as well */
    struct rank ranks[4];
    for (uint32_t i = 0; i < 4; i++)
        ranks[i] = (struct rank){.rank = i,
                                 .world = 4,
                                 .step = 7,
                                 .run = "four",
                                 .attempt = 1,
                                 .rows = ROWS,
                                 .columns = COLUMNS,
                                 .from = i == 3 ? ROWS : 200 * i,
                                 .count = i == 3 ? 0 : 200,
                                 .replica = 9};
    save_ranks(ranks, 4);
    for (uint32_t i = 0; i < 4; i++)
        if (ranks[i].rc < 0)
            fail_msg("rank %u: %s", i, ranks[i].error.text);
    struct larder *c = daemon_client(&server, "reader");
    struct larder_restore *r = reopen(c, "four");
    static uint32_t whole[ROWS][COLUMNS], box[300][10];
    uint32_t replica = 0;
    struct larder_tensor t = tensor("sharded", LARDER_U32, NULL, 2, ROWS, COLUMNS);
    add(r, t, whole);
    t.offsets[0] = 150; /* a box over two ranks, into every second row of columns */
    t.offsets[1] = 2990;
    t.lengths[0] = 300;
    t.lengths[1] = 5;
    t.strides[0] = 10;
    t.strides[1] = 2;
    add(r, t, box);
    add(r, tensor("replicated", LARDER_U32, NULL, 1, 1u), &replica);
    GOOD(larder_restore_run(r, &e));
    for (uint32_t i = 0; i < ROWS; i++)
        for (uint32_t k = 0; k < COLUMNS; k++)
            assert_true(whole[i][k] == i * COLUMNS + k + 7);
    for (uint32_t i = 0; i < 300; i++)
        for (uint32_t k = 0; k < 10; k++)
            assert_true(box[i][k] == (k % 2 ? 0 : whole[150 + i][2990 + k / 2]));
    assert_int_equal(replica, 9);
    struct larder_restore_info info = LARDER_INIT(larder_restore_info);
    assert_int_equal(larder_restore_info(r, &info), 0);
    assert_true(info.fetched_bytes <= info.stored_bytes); /* nothing was read twice */
    larder_restore_close(r);
    GOOD(larder_close(c, -1, &e));
}

/* S6 */
static void ranks_that_differ_are_both_named(void **state)
{
    (void)state;
    struct rank ranks[2];
    for (uint32_t i = 0; i < 2; i++)
        ranks[i] = (struct rank){.rank = i,
                                 .world = 2,
                                 .step = 1,
                                 .run = "differ",
                                 .attempt = 1,
                                 .rows = 2,
                                 .columns = 4,
                                 .from = i,
                                 .count = 1,
                                 .replica = i};
    save_ranks(ranks, 2);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(ranks[i].rc, -EILSEQ);
        assert_non_null(strstr(ranks[i].error.text, "replicated"));
        assert_non_null(strstr(ranks[i].error.text, "0"));
        assert_non_null(strstr(ranks[i].error.text, "1"));
    }
}

/* A gap in a sharded tensor is found before the commit. */
static void gaps_are_found(void **state)
{
    (void)state;
    struct rank ranks[2];
    for (uint32_t i = 0; i < 2; i++)
        ranks[i] = (struct rank){.rank = i,
                                 .world = 2,
                                 .step = 1,
                                 .run = "gap",
                                 .attempt = 1,
                                 .rows = 5,
                                 .columns = 4,
                                 .from = 3 * i,
                                 .count = 2,
                                 .replica = 1};
    save_ranks(ranks, 2);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(ranks[i].rc, -EILSEQ);
        assert_non_null(strstr(ranks[i].error.text, "sharded"));
    }
}

/* C2, C10 */
static void a_missing_rank_is_named_in_bounded_time(void **state)
{
    (void)state;
    struct rank r = {.rank = 0,
                     .world = 3,
                     .step = 1,
                     .run = "missing",
                     .attempt = 1,
                     .rows = 3,
                     .columns = 1,
                     .from = 0,
                     .count = 1,
                     .join_timeout_ms = 200};
    save_ranks(&r, 1);
    assert_int_equal(r.rc, -ETIMEDOUT);
    assert_non_null(strstr(r.error.text, "1"));
    assert_non_null(strstr(r.error.text, "2"));
    struct larder *c = daemon_client(&server, "reader");
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    struct larder_restore *none = NULL;
    struct larder_error e;
    o.run = "missing";
    assert_int_equal(larder_restore_open(c, &o, &none, &e), -ENOENT); /* nothing was committed */
    GOOD(larder_close(c, -1, &e));
}

/* C3, C4 */
static void a_new_attempt_fences_the_old(void **state)
{
    (void)state;
    struct larder_error e;
    struct rank one = {
        .rank = 0, .world = 1, .step = 5, .run = "fence", .attempt = 1, .rows = 1, .columns = 8, .count = 1};
    save_ranks(&one, 1);
    assert_int_equal(one.rc, 0);
    struct larder *old = daemon_client(&server, "writer");
    struct larder_save_options o = options("fence", 6);
    o.attempt[0] = 1;
    struct larder_save *s = begin(old, &o);
    finish(s); /* registers the attempt with this client */
    one.attempt = 2;
    one.step = 5; /* the same step again, by the new attempt */
    save_ranks(&one, 1);
    assert_int_equal(one.rc, 0);
    o.step = 7;
    s = begin(old, &o);
    GOOD(larder_save_submit(s, &e));
    assert_int_equal(larder_save_wait(s, -1, &e), -ESTALE);
    assert_int_equal(e.kind, LARDER_FENCED);
    larder_save_free(s);
    GOOD(larder_close(old, -1, &e));
}

/* ---- faults ---- */

/* C13: the connection is cut again and again in the middle of a save; nothing is lost and nothing is sealed
 * twice. */
static void a_save_survives_lost_connections(void **state)
{
    (void)state;
    struct larder_error e;
    char credentials[320];
    struct proxy *p = proxy_start(server.address);
    daemon_credentials_edit(&server, "writer", "proxied.json", proxy_address(p), NULL, NULL, credentials,
                            sizeof credentials);
    struct larder *c = daemon_client_at(credentials, 16u << 20);
    enum { BYTES = 40u << 20 };
    uint8_t *data = malloc(BYTES), *back = calloc(BYTES, 1);
    fill(data, BYTES, 3);
    for (uint64_t step = 1; step <= 3; step++) {
        struct larder_save_options o = options("cut", step);
        struct larder_save *s = begin(c, &o);
        struct larder_tensor t = tensor("data", LARDER_U8, data, 1, BYTES);
        GOOD(larder_save_tensor(s, &t, &e));
        proxy_cut_after(p, step * (11u << 20));
        GOOD(larder_save_submit(s, &e));
        GOOD(larder_save_wait(s, -1, &e));
        assert_int_equal(proxy_cuts(p), step);
        larder_save_free(s);
    }
    struct larder_restore *r = reopen(c, "cut");
    add(r, tensor("data", LARDER_U8, NULL, 1, BYTES), back);
    GOOD(larder_restore_run(r, &e));
    assert_memory_equal(back, data, BYTES);
    larder_restore_close(r);
    free(data);
    free(back);
    GOOD(larder_close(c, -1, &e));
    proxy_stop(p);
}

/* C11: nobody waits; the next submit tells, once. */
static void an_unseen_failure_is_told_by_the_next_submit(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    struct larder_save_options o = options("unseen", 1);
    o.world = 2;
    o.attempt[0] = 1;
    o.join_timeout_ms = 100;
    struct larder_save *s = begin(c, &o);
    GOOD(larder_save_submit(s, &e));
    larder_save_free(s); /* goes on without its handle */
    o.step = 2;
    int rc = 0;
    for (int i = 0; i < 200 && rc == 0; i++) { /* until the failure is there; each save fails likewise */
        s = begin(c, &o);
        o.step++;
        rc = larder_save_submit(s, &e);
        if (rc == 0) {
            struct larder_error ignored;
            (void)larder_save_cancel(s, "only to try again", &ignored);
        }
        larder_save_free(s);
    }
    assert_int_equal(rc, -ETIMEDOUT);
    assert_non_null(strstr(e.text, "step 1 of unseen"));
    s = begin(c, &o);
    GOOD(larder_save_submit(s, &e)); /* once */
    GOOD(larder_save_cancel(s, "the test ends", &e));
    larder_save_free(s);
    GOOD(larder_close(c, -1, &e));
}

/* A submit that was refused may be repeated, with more tensors than the first time: of two priorities, in
 * more chunks. */
static void a_refused_save_takes_more_and_is_submitted_again(void **state)
{
    (void)state;
    enum { EACH = 1u << 20, COUNT = 14, FIRST = 4 };
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    struct larder_save_options o = options("refused", 1);
    o.world = 2;
    o.attempt[0] = 1;
    o.join_timeout_ms = 100;
    struct larder_save *s = begin(c, &o);
    GOOD(larder_save_submit(s, &e));
    larder_save_free(s); /* its failure refuses the next submit */
    bool failed = false;
    for (unsigned i = 0; !failed && i < 2000; i++, usleep(10000)) {
        pthread_mutex_lock(&c->saver->lock);
        failed = c->saver->unseen.class != ERR_NONE;
        pthread_mutex_unlock(&c->saver->lock);
    }
    assert_true(failed);
    uint8_t *data = malloc((size_t)COUNT * EACH), *back = malloc((size_t)COUNT * EACH);
    char names[COUNT][16];
    struct larder_tensor t[COUNT];
    fill(data, (size_t)COUNT * EACH, 3);
    o = options("refused", 2);
    s = begin(c, &o);
    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], "t%u", i);
        t[i] = tensor(names[i], LARDER_U8, data + (size_t)i * EACH, 1, (unsigned)EACH);
        t[i].priority = i % 2 ? 10 : -10;
        if (i == FIRST)
            assert_true(larder_save_submit(s, &e) < 0);
        GOOD(larder_save_tensor(s, &t[i], &e));
    }
    GOOD(larder_save_alias(s, "tied", "t1", &e));
    finish(s);
    struct larder_restore *r = reopen(c, "refused");
    for (unsigned i = 0; i < COUNT; i++)
        add(r, t[i], back + (size_t)i * EACH);
    GOOD(larder_restore_run(r, &e));
    larder_restore_close(r);
    assert_memory_equal(back, data, (size_t)COUNT * EACH);
    free(data);
    free(back);
    GOOD(larder_close(c, -1, &e));
}

/* Nobody waits, and no submit comes after it: close tells. A cancelled save is no failure. */
static void an_unseen_failure_is_told_by_close(void **state)
{
    (void)state;
    struct larder_error e;
    for (int waited = 0; waited < 2; waited++) {
        struct larder *c = daemon_client(&server, "writer");
        struct larder_save_options o = options("unseen at close", 7);
        o.world = 2;
        o.attempt[0] = (uint8_t)(1 + waited);
        o.join_timeout_ms = 100;
        struct larder_save *s = begin(c, &o);
        GOOD(larder_save_submit(s, &e));
        if (waited)
            assert_int_equal(larder_save_wait(s, -1, &e), -ETIMEDOUT);
        larder_save_free(s);
        if (waited) {
            GOOD(larder_close(c, -1, &e)); /* told once */
            continue;
        }
        assert_int_equal(larder_close(c, -1, &e), -ETIMEDOUT);
        assert_int_equal(e.kind, LARDER_TIMEOUT);
        assert_non_null(strstr(e.text, "step 7 of unseen at close"));
    }
}

static void a_cancelled_save_leaves_nothing(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    struct larder_save_options o = options("cancel", 1);
    o.world = 2;
    o.attempt[0] = 1;
    struct larder_save *s = begin(c, &o);
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_cancel(s, "the loss is not a number", &e));
    assert_int_equal(larder_save_wait(s, -1, &e), -ECANCELED);
    assert_non_null(strstr(e.text, "not a number"));
    larder_save_free(s);
    o = options("cancel", 2);
    s = begin(c, &o);
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_wait(s, -1, &e));
    assert_int_equal(larder_save_cancel(s, "too late", &e), -EEXIST);
    larder_save_free(s);
    GOOD(larder_close(c, -1, &e));
}

static int start_server(void **state)
{
    (void)state;
    daemon_start(&server);
    return 0;
}

static int stop_server(void **state)
{
    (void)state;
    daemon_stop(&server);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_saved_comes_back),
        cmocka_unit_test(names_are_opaque_and_bad_input_is_refused),
        cmocka_unit_test(ranks_make_one_checkpoint),
        cmocka_unit_test(ranks_that_differ_are_both_named),
        cmocka_unit_test(gaps_are_found),
        cmocka_unit_test(a_missing_rank_is_named_in_bounded_time),
        cmocka_unit_test(a_new_attempt_fences_the_old),
        cmocka_unit_test(a_save_survives_lost_connections),
        cmocka_unit_test(an_unseen_failure_is_told_by_the_next_submit),
        cmocka_unit_test(a_refused_save_takes_more_and_is_submitted_again),
        cmocka_unit_test(an_unseen_failure_is_told_by_close),
        cmocka_unit_test(a_cancelled_save_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, start_server, stop_server);
}
