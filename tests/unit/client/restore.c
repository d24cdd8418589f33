/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a restore gives exactly the boxes that were asked for, says what is damaged and gives the rest, and
 * tells a wrong key from damage. Method: a real larderd, whose files are damaged on disk; a proxy that cuts
 * connections.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/larder.h"
#include "tests/support/daemon.h"
#include "tests/support/good.h"

static struct daemon server;
static uint64_t rng;

#define MIB (1u << 20)

static uint64_t draw(uint64_t below)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return rng % below;
}

static void fill(uint8_t *p, size_t n)
{
    for (size_t i = 0; i + 8 <= n; i += 8) {
        uint64_t x = (draw(UINT32_MAX) << 32) | draw(UINT32_MAX);
        memcpy(p + i, &x, 8);
    }
}

static struct larder_tensor bytes_of(const char *name, uint8_t *p, uint64_t n)
{
    return (struct larder_tensor){.name = name, .dtype = LARDER_U8, .dims = 1, .shape = {n}, .data = p};
}

/* Saves the tensors, and as many steps. */
static void save(struct larder *c, const char *run, uint64_t step, const struct larder_tensor *t, unsigned n)
{
    struct larder_error e;
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    struct larder_save *s = NULL;
    o.run = run;
    o.step = step;
    GOOD(larder_save_begin(c, &o, &s, &e));
    for (unsigned i = 0; i < n; i++)
        GOOD(larder_save_tensor(s, &t[i], &e));
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_wait(s, -1, &e));
    larder_save_free(s);
}

static int restore_open(struct larder *c, const char *run, int fallback, struct larder_restore **r,
                        struct larder_error *e)
{
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    o.run = run;
    o.fallback = fallback;
    *r = NULL;
    return larder_restore_open(c, &o, r, e);
}

/* ---- damage ---- */

struct findings {
    int bad, good;
    int64_t chunk;
    char tensor[64], text[512];
};

static int note(void *arg, const struct larder_finding *f)
{
    struct findings *n = arg;
    if (f->error.kind == LARDER_OK) {
        n->good++;
        return 0;
    }
    n->bad++;
    n->chunk = f->chunk;
    snprintf(n->tensor, sizeof n->tensor, "%s", f->tensor ? f->tensor : "");
    snprintf(n->text, sizeof n->text, "%s", f->error.text);
    return 0;
}

static void damage_is_named_and_the_rest_comes_back(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "admin");
    enum { N = 3 * MIB };
    uint8_t *data = malloc(3 * N), *back = calloc(3, N);
    fill(data, 3 * N);
    struct larder_tensor t[3] = {bytes_of("first", data, N), bytes_of("second", data + N, N),
                                 bytes_of("third", data + 2 * N, N)};
    save(c, "damage", 1, t, 3);
    char path[512];
    daemon_segment(&server, 0, path, sizeof path);
    daemon_flip(path, 4096 + N + 4096 + 1000,
                0x10); /* in the second chunk: each is N bytes, a tag, and padding */

    struct findings found = {0};
    int64_t damaged = larder_verify(c, LARDER_CHECKPOINTS, "damage", 0, LARDER_VERIFY_DEEP, note, &found, &e);
    assert_int_equal(damaged, 1);
    assert_string_equal(found.tensor, "second");
    assert_int_equal(found.chunk, 1);
    found = (struct findings){0};
    damaged = larder_verify(c, LARDER_CHECKPOINTS, "damage", 1, LARDER_VERIFY_SCRUB, note, &found, &e);
    assert_int_equal(damaged, 1);
    assert_int_equal(found.chunk, 1);
    found = (struct findings){0};
    assert_int_equal(
        larder_verify(c, LARDER_CHECKPOINTS, "damage", 0, LARDER_VERIFY_STRUCTURE, note, &found, &e), 0);
    assert_true(found.good > 0);

    struct larder_restore *r;
    GOOD(restore_open(c, "damage", 0, &r, &e));
    for (int i = 0; i < 3; i++) {
        t[i].data = back + i * N;
        GOOD(larder_restore_add(r, &t[i], &e));
    }
    assert_int_equal(larder_restore_run(r, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "\"second\""));
    assert_non_null(strstr(e.text, "chunk 1"));
    struct larder_damage d;
    assert_int_equal(larder_restore_damage(r, 0, &d), 0);
    assert_string_equal(d.tensor, "second");
    assert_int_equal(d.chunk, 1);
    assert_int_equal(larder_restore_damage(r, 1, &d), -ENOENT);
    assert_memory_equal(back, data, N);
    assert_memory_equal(back + 2 * N, data + 2 * N, N);
    larder_restore_close(r);

    GOOD(restore_open(c, "damage", 0, &r, &e)); /* who does not need the chunk does not notice */
    t[2].data = back;
    GOOD(larder_restore_add(r, &t[2], &e));
    GOOD(larder_restore_run(r, &e));
    assert_memory_equal(back, data + 2 * N, N);
    larder_restore_close(r);
    free(data);
    free(back);
    GOOD(larder_close(c, -1, &e));
}

/* What one of two ranks saves. */
struct saving {
    pthread_t thread;
    const char *run;
    const struct larder_tensor *t;
    unsigned count;
    bool blob_before, blob_behind; /* of 100 bytes */
    uint32_t rank;
};

static void *save_as_rank(void *arg)
{
    const struct saving *k = arg;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    struct larder_save *s = NULL;
    uint8_t blob[100];
    memset(blob, 0xee, sizeof blob);
    o.run = k->run;
    o.rank = k->rank;
    o.world = 2;
    o.attempt[0] = 1;
    GOOD(larder_save_begin(c, &o, &s, &e));
    if (k->blob_before)
        GOOD(larder_save_blob(s, "rng", blob, sizeof blob, &e));
    for (unsigned i = 0; i < k->count; i++)
        GOOD(larder_save_tensor(s, &k->t[i], &e));
    if (k->blob_behind)
        GOOD(larder_save_blob(s, "rng", blob, sizeof blob, &e));
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_wait(s, -1, &e));
    larder_save_free(s);
    GOOD(larder_close(c, -1, &e));
    return NULL;
}

static void save_as_two(struct saving ranks[2])
{
    for (uint32_t i = 0; i < 2; i++) {
        ranks[i].rank = i;
        pthread_create(&ranks[i].thread, NULL, save_as_rank, &ranks[i]);
    }
    for (int i = 0; i < 2; i++)
        pthread_join(ranks[i].thread, NULL);
}

/* What one rank's part has lost, another's may still have. */
static void a_damaged_copy_is_read_from_another_rank(void **state)
{
    (void)state;
    struct larder_error e;
    uint8_t *data = malloc(20 * MIB), *back = calloc(28 * MIB, 1);
    fill(data, 20 * MIB);
    struct larder_tensor saved[2] = {bytes_of("both", data, 20 * MIB), bytes_of("alone", data, 8 * MIB)};
    save_as_two((struct saving[2]){{.run = "replica", .t = saved, .count = 2},
                                   {.run = "replica", .t = saved, .count = 1}});
    char path[512];
    daemon_segment(&server, 0, path, sizeof path);           /* the larger one, of rank 0 */
    daemon_flip(path, 4096 + 100, 1);                        /* chunk 0, of "both" */
    daemon_flip(path, 4096 + 5 * (4 * MIB + 4096) + 100, 1); /* chunk 5, of "alone" */
    struct larder *c = daemon_client(&server, "reader");
    struct larder_restore *r;
    GOOD(restore_open(c, "replica", 0, &r, &e));
    struct larder_tensor both = bytes_of("both", back, 20 * MIB),
                         alone = bytes_of("alone", back + 20 * MIB, 8 * MIB);
    GOOD(larder_restore_add(r, &both, &e));
    GOOD(larder_restore_run(r, &e));
    assert_memory_equal(back, data, 20 * MIB);
    struct larder_restore_info info = LARDER_INIT(larder_restore_info); /* not in silence */
    GOOD(larder_restore_info(r, &info));
    assert_int_equal(info.repaired, 1);
    GOOD(larder_restore_add(r, &alone, &e));
    GOOD(larder_restore_add(r, &both, &e));
    assert_int_equal(larder_restore_run(r, &e), -EBADMSG);
    struct larder_damage d;
    assert_int_equal(larder_restore_damage(r, 0, &d), 0);
    assert_string_equal(d.tensor, "alone");
    assert_true(d.rank == 0 && d.chunk == 5 && strstr(d.text, "chunk 5"));
    assert_int_equal(larder_restore_damage(r, 1, &d), -ENOENT);
    larder_restore_close(r);
    free(data);
    free(back);
    GOOD(larder_close(c, -1, &e));
}

/* Tensors that are asked for as they lie in a flat buffer are one request to the plan, and still each has a
 * name when its chunk is damaged, and another rank's copy. */
enum { FLAT = 3000, FLAT_BYTES = 1000 };

struct flat {
    struct larder_tensor t[FLAT + 1]; /* the last one is beside the buffer */
    char names[FLAT][16];
    uint8_t data[FLAT * FLAT_BYTES], back[FLAT * FLAT_BYTES];
};

static struct flat *flat_make(void)
{
    struct flat *f = calloc(1, sizeof *f);
    fill(f->data, sizeof f->data);
    for (int i = 0; i < FLAT; i++) {
        snprintf(f->names[i], sizeof f->names[i], "bias.%d", i);
        f->t[i] = bytes_of(f->names[i], f->data + i * FLAT_BYTES, FLAT_BYTES);
    }
    f->t[FLAT] = bytes_of("alone", f->data, MIB / 2);
    return f;
}

static void flat_ask(struct flat *f, struct larder_restore *r, int from, int to)
{
    struct larder_error e;
    for (int i = from; i < to; i++) {
        struct larder_tensor t = f->t[i];
        t.data = f->back + i * FLAT_BYTES;
        GOOD(larder_restore_add(r, &t, &e));
    }
}

static void damage_of_a_flat_buffer_is_told_of_each(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    struct flat *f = flat_make();
    struct larder_restore *r;
    struct larder_damage d;
    char path[512], last[16];
    save(c, "flat", 1, f->t, FLAT);
    daemon_segment(&server, 3, path, sizeof path); /* behind those of the tests before */
    daemon_flip(path, 4096 + 100, 1);
    GOOD(restore_open(c, "flat", 0, &r, &e));
    flat_ask(f, r, 0, FLAT);
    assert_int_equal(larder_restore_run(r, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "\"bias.0\" and 2999 more"));
    for (int i = 0; i < FLAT; i++) {
        assert_int_equal(larder_restore_damage(r, (size_t)i, &d), 0);
        snprintf(last, sizeof last, "bias.%d", i);
        assert_string_equal(d.tensor, last);
    }
    assert_int_equal(larder_restore_damage(r, FLAT, &d), -ENOENT);
    larder_restore_close(r);

    save(c, "flat", 2, f->t, FLAT);
    GOOD(restore_open(c, "flat", 0, &r, &e)); /* in two goes; the second goes on where the first ended */
    flat_ask(f, r, 0, FLAT / 2);
    GOOD(larder_restore_run(r, &e));
    assert_memory_equal(f->back, f->data, FLAT / 2 * FLAT_BYTES);
    memset(f->back, 0, sizeof f->back);
    flat_ask(f, r, FLAT / 2, FLAT);
    GOOD(larder_restore_run(r, &e));
    assert_memory_equal(f->back + FLAT / 2 * FLAT_BYTES, f->data + FLAT / 2 * FLAT_BYTES,
                        FLAT / 2 * FLAT_BYTES);
    assert_true(f->back[0] == 0 && memcmp(f->back, f->back + 1, FLAT / 2 * FLAT_BYTES - 1) == 0);
    larder_restore_close(r);

    struct larder_tensor other = f->t[FLAT - 1]; /* in its place, but not what is saved */
    GOOD(restore_open(c, "flat", 0, &r, &e));
    flat_ask(f, r, 0, FLAT - 1);
    other.data = f->back + (FLAT - 1) * FLAT_BYTES;
    other.dtype = LARDER_I8;
    assert_int_equal(larder_restore_add(r, &other, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "bias.2999"));
    larder_restore_close(r);
    free(f);
    GOOD(larder_close(c, -1, &e));
}

static void a_damaged_flat_buffer_is_read_from_another_rank(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder_restore *r;
    struct flat *f = flat_make();
    save_as_two((struct saving[2]){{.run = "flats", .t = f->t, .count = FLAT + 1},
                                   {.run = "flats", .t = f->t, .count = FLAT}});
    char path[512];
    daemon_segment(&server, 3, path, sizeof path); /* the larger one, of rank 0 */
    daemon_flip(path, 4096 + 100, 1);
    struct larder *c = daemon_client(&server, "reader");
    GOOD(restore_open(c, "flats", 0, &r, &e));
    flat_ask(f, r, 0, FLAT);
    GOOD(larder_restore_run(r, &e));
    assert_memory_equal(f->back, f->data, sizeof f->data);
    struct larder_restore_info info = LARDER_INIT(larder_restore_info);
    GOOD(larder_restore_info(r, &info));
    assert_int_equal(info.repaired, FLAT);
    larder_restore_close(r);
    free(f);
    GOOD(larder_close(c, -1, &e));
}

/* Chunks are numbered by rank: what lies at the place that would come next, of another rank, is no part of a
 * run. */
static void a_run_ends_with_its_rank(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder_restore *r;
    uint8_t data[150], back[150];
    fill(data, sizeof data);
    struct larder_tensor saved[3] = {bytes_of("a1", data, 60), bytes_of("a2", data + 60, 40),
                                     bytes_of("b", data + 100, 50)};
    for (int blob = 0; blob < 2; blob++) {
        const char *run = blob ? "border2" : "border1";
        save_as_two((struct saving[2]){{.run = run, .t = saved, .count = 2, .blob_behind = blob},
                                       {.run = run, .t = saved + 2, .count = 1, .blob_before = true}});
        struct larder *c = daemon_client(&server, "reader");
        struct larder_tensor t[3] = {bytes_of("a1", back, 60), bytes_of("a2", back + 60, 40),
                                     bytes_of("b", back + 100, 50)};
        memset(back, 0, sizeof back);
        GOOD(restore_open(c, run, 0, &r, &e));
        for (int i = 0; i < 3; i++)
            GOOD(larder_restore_add(r, &t[i], &e));
        GOOD(larder_restore_run(r, &e));
        assert_memory_equal(back, data, sizeof data);
        larder_restore_close(r);
        GOOD(larder_close(c, -1, &e));
    }
}

/* A name stands for its first piece: one that lies behind a run, but is another rank's first, is asked for
 * there, or it would be told as not asked for. */
static void a_run_takes_no_copy_of_a_lower_rank(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder_restore *r;
    const char *extra;
    uint8_t data[100], back[100] = {0};
    fill(data, sizeof data);
    struct larder_tensor saved[3] = {bytes_of("a", data, 60), bytes_of("b", data + 60, 40),
                                     bytes_of("z", data, 10)};
    save_as_two((struct saving[2]){{.run = "copies", .t = saved + 1, .count = 2},
                                   {.run = "copies", .t = saved, .count = 2}});
    struct larder *c = daemon_client(&server, "reader");
    struct larder_tensor t[2] = {bytes_of("a", back, 60), bytes_of("b", back + 60, 40)};
    GOOD(restore_open(c, "copies", 0, &r, &e));
    for (int i = 0; i < 2; i++)
        GOOD(larder_restore_add(r, &t[i], &e));
    GOOD(larder_restore_extra(r, 0, &extra));
    assert_string_equal(extra, "z");
    assert_int_equal(larder_restore_extra(r, 1, &extra), -ENOENT);
    GOOD(larder_restore_run(r, &e));
    assert_memory_equal(back, data, sizeof data);
    larder_restore_close(r);
    GOOD(larder_close(c, -1, &e));
}

static int last_state(void *arg, const struct larder_commit_info *i)
{
    *(enum larder_commit_state *)arg = i->state;
    return 0;
}

/* C12 */
static void a_damaged_index_falls_back(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    enum { N = 36 * MIB };
    uint8_t *data = malloc(N), *back = calloc(N, 1);
    fill(data, N);
    struct larder_tensor small = bytes_of("x", data, MIB), large = bytes_of("x", data, N);
    save(c, "fallback", 1, &small, 1);
    save(c, "fallback", 2, &large, 1); /* larger: the one that daemon_segment finds */
    char path[512];
    daemon_segment(&server, 0, path, sizeof path);
    daemon_flip(path, -8192 + 40, 0xff); /* the index lies in the block before the trailer */
    struct larder_restore *r;
    assert_int_equal(restore_open(c, "fallback", 0, &r, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "index"));
    GOOD(restore_open(c, "fallback", 1, &r, &e));
    struct larder_restore_info info = LARDER_INIT(larder_restore_info);
    assert_int_equal(larder_restore_info(r, &info), 0);
    assert_true(info.step == 1 && info.fell_back == 1);
    assert_non_null(strstr(info.fallback_reason, "step 2"));
    small.data = back;
    GOOD(larder_restore_add(r, &small, &e));
    GOOD(larder_restore_run(r, &e));
    assert_memory_equal(back, data, MIB);
    larder_restore_close(r);
    enum larder_commit_state last = LARDER_COMMIT_GOOD; /* marked, so that the next one does not even try */
    GOOD(larder_commit_list(c, LARDER_CHECKPOINTS, "fallback", 0, last_state, &last, &e));
    assert_int_equal(last, LARDER_COMMIT_BAD);
    GOOD(restore_open(c, "fallback", 0, &r, &e));
    assert_int_equal(larder_restore_info(r, &info), 0);
    assert_true(info.step == 1 && info.fell_back == 0);
    larder_restore_close(r);
    free(data);
    free(back);
    GOOD(larder_close(c, -1, &e));
}

static void a_wrong_key_is_not_called_damage(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    uint8_t data[64] = {1};
    struct larder_tensor t = bytes_of("x", data, sizeof data);
    save(c, "key", 1, &t, 1);
    GOOD(larder_close(c, -1, &e));
    char path[320], text[16384], hex[128] = "";
    daemon_credentials(&server, "writer", path, sizeof path);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = 0;
    const char *keks = strstr(text, "keks");
    assert_non_null(keks);
    const char *key = strstr(keks, "\"key\"");
    assert_non_null(key);
    key = strchr(strchr(key + 5, ':'), '"') + 1;
    memcpy(hex, key, 64);
    char other[65];
    memset(other, 'a', 64);
    other[64] = 0;
    daemon_credentials_edit(&server, "writer", "other.json", NULL, hex, other, path, sizeof path);
    c = daemon_client_at(path, 8 * MIB);
    struct larder_restore *r;
    assert_int_equal(restore_open(c, "key", 1, &r, &e), -EKEYREJECTED);
    assert_int_equal(e.kind, LARDER_WRONG_KEY);
    GOOD(larder_close(c, -1, &e));
}

/* ---- boxes ---- */

struct grid {
    uint32_t rank;
    const uint32_t *whole; /* 12 x 10 x 9 */
};

enum { A = 12, B = 10, C = 9 };

/* Six ranks hold a grid of 2 x 3 boxes in the first two dimensions. */
static void *save_cell(void *arg)
{
    const struct grid *g = arg;
    static const uint64_t rows[3] = {0, 5, A}, columns[4] = {0, 3, 4, B};
    uint32_t i = g->rank / 3, k = g->rank % 3;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    struct larder_save *s = NULL;
    o.run = "grid";
    o.rank = g->rank;
    o.world = 6;
    o.attempt[3] = 1;
    GOOD(larder_save_begin(c, &o, &s, &e));
    struct larder_tensor t = {.name = "cube",
                              .dtype = LARDER_U32,
                              .dims = 3,
                              .shape = {A, B, C},
                              .offsets = {rows[i], columns[k], 0},
                              .lengths = {rows[i + 1] - rows[i], columns[k + 1] - columns[k], C},
                              .strides = {B * C, C, 1}};
    t.data = (void *)&g->whole[rows[i] * B * C + columns[k] * C];
    GOOD(larder_save_tensor(s, &t, &e));
    t = (struct larder_tensor){
        .name = "all", .dtype = LARDER_U32, .dims = 3, .shape = {A, B, C}, .data = (void *)g->whole};
    GOOD(larder_save_tensor(s, &t, &e)); /* the same on all ranks */
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_wait(s, -1, &e));
    larder_save_free(s);
    GOOD(larder_close(c, -1, &e));
    return NULL;
}

static void any_box_comes_back_from_any_grid(void **state)
{
    (void)state;
    struct larder_error e;
    static uint32_t whole[A * B * C];
    for (uint32_t i = 0; i < A * B * C; i++)
        whole[i] = i + 1;
    struct grid ranks[6];
    pthread_t threads[6];
    for (uint32_t i = 0; i < 6; i++) {
        ranks[i] = (struct grid){.rank = i, .whole = whole};
        pthread_create(&threads[i], NULL, save_cell, &ranks[i]);
    }
    for (uint32_t i = 0; i < 6; i++)
        pthread_join(threads[i], NULL);
    struct larder *c = daemon_client(&server, "reader");
    struct larder_restore *r;
    GOOD(restore_open(c, "grid", 0, &r, &e));
    enum { BOXES = 100 };
    static uint32_t got[BOXES][A * B * C];
    struct larder_tensor t[BOXES];
    for (int n = 0; n < BOXES; n++) {
        t[n] = (struct larder_tensor){
            .name = n % 4 ? "cube" : "all", .dtype = LARDER_U32, .dims = 3, .data = got[n]};
        const uint64_t shape[3] = {A, B, C};
        for (int i = 0; i < 3; i++) {
            t[n].offsets[i] = draw(shape[i]);
            t[n].lengths[i] = 1 + draw(shape[i] - t[n].offsets[i]);
        }
        if (n % 2) { /* column-major */
            t[n].strides[0] = 1;
            t[n].strides[1] = (int64_t)t[n].lengths[0];
            t[n].strides[2] = (int64_t)(t[n].lengths[0] * t[n].lengths[1]);
        } else {
            t[n].strides[0] = (int64_t)(t[n].lengths[1] * t[n].lengths[2]);
            t[n].strides[1] = (int64_t)t[n].lengths[2];
            t[n].strides[2] = 1;
        }
        GOOD(larder_restore_add(r, &t[n], &e));
    }
    GOOD(larder_restore_run(r, &e));
    for (int n = 0; n < BOXES; n++) {
        uint64_t volume = t[n].lengths[0] * t[n].lengths[1] * t[n].lengths[2];
        for (uint64_t x = 0; x < t[n].lengths[0]; x++)
            for (uint64_t y = 0; y < t[n].lengths[1]; y++)
                for (uint64_t z = 0; z < t[n].lengths[2]; z++)
                    assert_int_equal(
                        got[n][(int64_t)x * t[n].strides[0] + (int64_t)y * t[n].strides[1] +
                               (int64_t)z * t[n].strides[2]],
                        whole[((t[n].offsets[0] + x) * B + t[n].offsets[1] + y) * C + t[n].offsets[2] + z]);
        for (uint64_t i = volume; i < A * B * C; i++)
            assert_int_equal(got[n][i], 0);
    }
    struct larder_tensor bad = t[0];
    bad.lengths[0] = A + 1;
    assert_true(larder_restore_add(r, &bad, &e) < 0);
    bad = t[0];
    bad.strides[0] = 0;
    bad.lengths[0] = 2;
    bad.offsets[0] = 0;
    assert_int_equal(larder_restore_add(r, &bad, &e), -EINVAL); /* elements over each other */
    larder_restore_close(r);
    GOOD(larder_close(c, -1, &e));
}

/* S11 in small: tens of thousands of tensors share chunks, and come back through few of them. */
/* Tensors of one chunk that lie in memory as in the chunk are decoded there at once; others are not, and what
 * was not asked for stays as it was. how 0: one behind the other, but one is left out; 1: backwards, each
 * asked for in turn; 2: as in the chunk, but asked for backwards; 3: with room between them; 4: one twice. */
static void small_tensors_land(struct larder *c, const struct larder_tensor *t, const uint32_t *data,
                               uint32_t n, int how)
{
    struct larder_error e;
    struct larder_restore *r;
    uint32_t *back = malloc((n + 1) * 16), step = how == 3 ? 4 : 3, twice[3] = {0};
    memset(back, 0x5a, (n + 1) * 16);
    GOOD(restore_open(c, "many", 0, &r, &e));
    for (uint32_t k = 0; k < n; k++) {
        uint32_t i = how == 2 ? n - 1 - k : k;
        struct larder_tensor x = t[i];
        x.data = back + (size_t)(how == 1 ? n - 1 - i : i) * step;
        if (how == 0 && i == n / 2)
            continue;
        GOOD(larder_restore_add(r, &x, &e));
        x.data = twice;
        if (how == 4 && i == n / 2)
            GOOD(larder_restore_add(r, &x, &e));
    }
    GOOD(larder_restore_run(r, &e));
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t *at = back + (size_t)(how == 1 ? n - 1 - i : i) * step;
        if (how == 0 && i == n / 2)
            assert_true(at[0] == 0x5a5a5a5a && at[1] == at[0] && at[2] == at[0]);
        else
            assert_memory_equal(at, data + 3 * i, 12);
        assert_true(how != 3 || at[3] == 0x5a5a5a5a);
    }
    assert_true(how != 4 || memcmp(twice, data + 3 * (n / 2), 12) == 0);
    assert_int_equal(back[(size_t)n * step], 0x5a5a5a5a);
    larder_restore_close(r);
    free(back);
}

static void small_tensors_land_anywhere(struct larder *c, const struct larder_tensor *t, const uint32_t *data,
                                        uint32_t n)
{
    for (int how = 0; how < 5; how++)
        small_tensors_land(c, t, data, n, how);
}

static void many_small_tensors(void **state)
{
    (void)state;
    struct larder_error e;
    enum { N = 20000 };
    struct larder *c = daemon_client(&server, "writer");
    uint32_t *data = malloc(N * 3 * 4), *back = calloc(N * 3, 4);
    struct larder_tensor *t = calloc(N, sizeof *t);
    char(*names)[24] = calloc(N, sizeof *names);
    for (uint32_t i = 0; i < N; i++) {
        data[3 * i] = data[3 * i + 1] = data[3 * i + 2] = i * 2654435761u;
        snprintf(names[i], sizeof names[i], "layer.%u.bias", i);
        t[i] = (struct larder_tensor){
            .name = names[i], .dtype = LARDER_U32, .dims = 1, .shape = {3}, .data = data + 3 * i};
    }
    save(c, "many", 1, t, N);
    struct larder_restore *r;
    GOOD(restore_open(c, "many", 0, &r, &e));
    assert_int_equal(larder_restore_tensors(r), N);
    for (uint32_t i = 0; i < N; i++) {
        t[i].data = back + 3 * i;
        GOOD(larder_restore_add(r, &t[i], &e));
    }
    GOOD(larder_restore_run(r, &e));
    assert_memory_equal(back, data, N * 12);
    larder_restore_close(r);
    small_tensors_land_anywhere(c, t, data, N);
    free(t);
    free(names);
    free(data);
    free(back);
    GOOD(larder_close(c, -1, &e));
}

/* S7: more than 2^31 elements and 4 GiB, of which 2 MiB are in memory and next to nothing is stored. */
static void more_than_32_bits_can_count(void **state)
{
    (void)state;
    struct larder_error e;
    enum { ROW = MIB, ROWS = 1100 };
    uint16_t *rows = malloc(2 * ROW * sizeof *rows), got[8];
    for (int i = 0; i < ROW; i++)
        rows[i] = 3, rows[ROW + i] = 7;
    struct larder *c = daemon_client(&server, "writer");
    struct larder_tensor t = {.name = "huge",
                              .dtype = LARDER_BF16,
                              .dims = 3,
                              .shape = {2, ROWS, ROW},
                              .strides = {ROW, 0, 1},
                              .data = rows};
    save(c, "huge", 1, &t, 1);
    struct larder_restore *r;
    GOOD(restore_open(c, "huge", 0, &r, &e));
    struct larder_restore_info info = LARDER_INIT(larder_restore_info);
    GOOD(larder_restore_info(r, &info));
    assert_true(info.plain_bytes == 2ull * ROWS * ROW * 2 && info.plain_bytes > 1ull << 32 &&
                info.stored_bytes < 32 * MIB);
    for (unsigned i = 0; i < 2; i++) {
        struct larder_tensor box = {.name = "huge",
                                    .dtype = LARDER_BF16,
                                    .dims = 3,
                                    .data = got + 4 * i,
                                    .offsets = {i, i * (ROWS - 1), i * (ROW - 4)},
                                    .lengths = {1, 1, 4}};
        GOOD(larder_restore_add(r, &box, &e));
    }
    GOOD(larder_restore_run(r, &e));
    for (int i = 0; i < 8; i++)
        assert_int_equal(got[i], i < 4 ? 3 : 7);
    larder_restore_close(r);
    free(rows);
    GOOD(larder_close(c, -1, &e));
}

/* ---- connections and processes ---- */

static void a_restore_survives_lost_connections(void **state)
{
    (void)state;
    struct larder_error e;
    char credentials[320];
    struct proxy *p = proxy_start(server.address);
    daemon_credentials_edit(&server, "writer", "proxied.json", proxy_address(p), NULL, NULL, credentials,
                            sizeof credentials);
    struct larder *c = daemon_client_at(credentials, 16 * MIB);
    enum { N = 30 * MIB };
    uint8_t *data = malloc(N), *back = calloc(N, 1);
    fill(data, N);
    struct larder_tensor t = bytes_of("x", data, N);
    save(c, "lost", 1, &t, 1);
    struct larder_restore *r;
    GOOD(restore_open(c, "lost", 0, &r, &e));
    t.data = back;
    GOOD(larder_restore_add(r, &t, &e));
    unsigned before = proxy_cuts(p);
    proxy_cut_after(p, 14 * MIB);
    GOOD(larder_restore_run(r, &e));
    assert_int_equal(proxy_cuts(p), before + 1);
    assert_memory_equal(back, data, N);
    larder_restore_close(r);
    free(data);
    free(back);
    GOOD(larder_close(c, -1, &e));
    proxy_stop(p);
}

/* Chunks on their way borrow staging memory, here of two slots: saves still get theirs, and end. */
enum { SHARED_BYTES = 24 * MIB };

struct restoring {
    struct larder *client;
    const uint8_t *expected;
    uint8_t *back;
};

static void *restore_some(void *arg)
{
    const struct restoring *x = arg;
    for (int i = 0; i < 3; i++) {
        struct larder_error e;
        struct larder_restore *r;
        struct larder_tensor t = bytes_of("t", x->back, SHARED_BYTES);
        memset(x->back, 0, SHARED_BYTES);
        GOOD(restore_open(x->client, "shared", 0, &r, &e));
        GOOD(larder_restore_add(r, &t, &e));
        GOOD(larder_restore_run(r, &e));
        assert_memory_equal(x->back, x->expected, SHARED_BYTES);
        larder_restore_close(r);
    }
    return NULL;
}

static void saves_and_restores_share_memory(void **state)
{
    (void)state;
    struct larder_error e;
    char path[512];
    daemon_credentials(&server, "admin", path, sizeof path);
    struct larder *c = daemon_client_at(path, 9 * MIB);
    uint8_t *data = malloc(SHARED_BYTES);
    fill(data, SHARED_BYTES);
    struct larder_tensor t = bytes_of("t", data, SHARED_BYTES);
    save(c, "shared", 1, &t, 1);
    pthread_t threads[2];
    struct restoring x[2];
    for (int i = 0; i < 2; i++) {
        x[i] = (struct restoring){c, data, malloc(SHARED_BYTES)};
        assert_int_equal(pthread_create(&threads[i], NULL, restore_some, &x[i]), 0);
    }
    for (uint64_t step = 2; step < 5; step++)
        save(c, "shared", step, &t, 1);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        free(x[i].back);
    }
    free(data);
    GOOD(larder_close(c, -1, &e));
}

/* D15 and the like */
static void a_forked_child_is_refused(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct larder_info i = LARDER_INIT(larder_info);
        struct larder_save_options o = LARDER_INIT(larder_save_options);
        struct larder_save *s;
        o.run = "x";
        bool good = larder_info(c, &i, &e) == -ECHILD && strstr(e.text, "fork") &&
                    larder_save_begin(c, &o, &s, &e) == -ECHILD && larder_close(c, -1, &e) == -ECHILD;
        _exit(good ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
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
    const char *given = getenv("LARDER_TEST_SEED");
    rng = given ? strtoull(given, NULL, 0) | 1 : 0x6c61726465720002ull;
    printf("# seed %llu\n", (unsigned long long)rng);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(damage_is_named_and_the_rest_comes_back),
        cmocka_unit_test(a_damaged_copy_is_read_from_another_rank),
        cmocka_unit_test(damage_of_a_flat_buffer_is_told_of_each),
        cmocka_unit_test(a_damaged_flat_buffer_is_read_from_another_rank),
        cmocka_unit_test(a_run_ends_with_its_rank),
        cmocka_unit_test(a_run_takes_no_copy_of_a_lower_rank),
        cmocka_unit_test(a_damaged_index_falls_back),
        cmocka_unit_test(a_wrong_key_is_not_called_damage),
        cmocka_unit_test(any_box_comes_back_from_any_grid),
        cmocka_unit_test(many_small_tensors),
        cmocka_unit_test(more_than_32_bits_can_count),
        cmocka_unit_test(a_restore_survives_lost_connections),
        cmocka_unit_test(saves_and_restores_share_memory),
        cmocka_unit_test(a_forked_child_is_refused),
    };
    return cmocka_run_group_tests(tests, start_server, stop_server);
}
