/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: what is imported is what comes back, by range and by feed; a bad file fails the import and leaves
 * nothing; each sealed chunk is fetched once while it is wanted; damage on the way is asked again, damage
 * that stays is failed or left out. Method: files in a temporary folder, a server in memory whose reads can
 * be damaged and cut.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/client.h"
#include "client/dataset_view.h"
#include "client/feed_private.h"
#include "tests/support/corpus.h"
#include "tests/support/folder.h"
#include "tests/support/shelf.h"
#include "tests/support/tarball.h"

struct world {
    struct shelf *shelf;
    struct larder *client;
    char folder[256];
    atomic_int flips;       /* reads of the bad place to be damaged; -1: all */
    atomic_uint bad_shard;  /* UINT32_MAX: none */
    atomic_ullong bad_from; /* only reads that begin here, as those of the chunk do, */
    atomic_ullong bad_byte; /* find this byte of the segment damaged */
    atomic_ullong chunk_bytes_read;
};

static enum err_class reading(void *arg, bool published, uint32_t shard, uint64_t offset, uint8_t *p,
                              size_t n)
{
    struct world *w = arg;
    uint64_t bad = atomic_load(&w->bad_byte);
    atomic_fetch_add(&w->chunk_bytes_read, n);
    if (!published && shard == atomic_load(&w->bad_shard) && atomic_load(&w->bad_from) == offset &&
        bad < offset + n && atomic_load(&w->flips) != 0) {
        p[bad - offset] ^= 1;
        if (atomic_load(&w->flips) > 0)
            atomic_fetch_sub(&w->flips, 1);
    }
    return ERR_NONE;
}

static void world_make(struct world *w)
{
    *w = (struct world){.bad_shard = UINT32_MAX};
    struct shelf_options o = {.reading = reading, .arg = w};
    w->shelf = shelf_start(&o);
    w->client = shelf_client(w->shelf, 5000);
    folder_make(w->folder, sizeof w->folder);
}

static void world_end(struct world *w)
{
    assert_int_equal(larder_close(w->client, 1000, NULL), 0);
    shelf_stop(w->shelf);
    folder_remove(w->folder);
}

static void import(struct world *w, const char *name, char **paths, enum larder_shard_format format,
                   uint64_t *version)
{
    struct larder_import_options o = LARDER_INIT(larder_import_options);
    struct larder_error e = {0};
    o.dataset = name;
    o.files = (const char *const *)paths;
    o.format = format;
    if (larder_dataset_import(w->client, &o, version, &e) < 0)
        fail_msg("%s", e.text);
}

static int64_t read_all(struct larder_dataset *d, size_t shard, uint8_t *p, size_t n, size_t step)
{
    int64_t got = 0, rc;
    struct larder_error e = {0};
    while ((rc = larder_dataset_read(d, shard, (uint64_t)got, p + got,
                                     step < n - (size_t)got ? step : n - (size_t)got, &e)) > 0)
        got += rc;
    if (rc < 0)
        fail_msg("%s", e.text);
    return got;
}

static void assert_same(struct larder_dataset *d, size_t shard, const struct buf *file, size_t step)
{
    uint8_t *p = calloc(1, file->n);
    assert_int_equal(read_all(d, shard, p, file->n, step), (int64_t)file->n);
    assert_memory_equal(p, file->p, file->n);
    free(p);
}

static void pieces_follow_the_samples(void **state)
{
    (void)state;
    const struct {
        uint64_t bytes, samples;
        uint32_t piece;
    } cases[] = {
        {1, 1, 4 << 20}, /* a small shard is one piece */
        {1 << 20, 1000, 4 << 20},
        {(1 << 20) + 1, 1000, 128 << 10}, /* small samples: the smallest piece */
        {100 << 20, 500, 128 << 10},      /* 210 KB on average */
        {100 << 20, 100, 128 << 10},      /* exactly 1 MiB: an eighth */
        {128 << 20, 64, 256 << 10},
        {1ull << 30, 64, 1 << 20}, /* 16 MiB: the largest piece */
        {1ull << 30, 17, 1 << 20},
        {1ull << 30, 16, 4 << 20}, /* 64 MiB: cut like a tensor */
        {1ull << 30, 0, 4 << 20},
        {8ull << 30, 1 << 20, 1 << 20}, /* not too many pieces */
        {1ull << 40, 1 << 30, 4 << 20},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_int_equal(shard_piece_bytes(cases[i].bytes, cases[i].samples), cases[i].piece);
}

/* More shards than joins may stand open at once, so some are given up on the way. */
static void many_shards_come_back_as_they_went(void **state)
{
    (void)state;
    struct world w;
    struct corpus c;
    struct larder_dataset *d;
    uint64_t version = 0;
    world_make(&w);
    corpus_make(&c, 3, 130, 3, 300);
    char **paths = corpus_write(&c, w.folder);
    import(&w, "set", paths, LARDER_SHARD_AUTO, &version);
    assert_int_equal(version, 1);
    assert_int_equal(larder_dataset_open(w.client, "set", 0, &d, NULL), 0);
    assert_int_equal(larder_dataset_version(d), 1);
    assert_int_equal(larder_dataset_shards(d), 130);
    for (size_t i = 0; i < 130; i++) {
        struct larder_shard_info info;
        assert_int_equal(larder_dataset_shard(d, i, &info, NULL), 0);
        assert_string_equal(info.name, c.names[i]);
        assert_int_equal(info.bytes, c.files[i].n);
        assert_int_equal(info.samples, c.counts[i]);
        if (i % 13 == 0)
            assert_same(d, i, &c.files[i], 1000);
    }
    assert_int_equal(larder_dataset_shard(d, 130, &(struct larder_shard_info){0}, NULL), -ENOENT);
    larder_dataset_close(d);

    import(&w, "set", paths, LARDER_SHARD_AUTO, &version); /* again: a new version, the old one stays */
    assert_int_equal(version, 2);
    assert_int_equal(larder_dataset_open(w.client, "set", 1, &d, NULL), 0);
    assert_same(d, 7, &c.files[7], 4096);
    larder_dataset_close(d);
    struct larder_error e;
    assert_true(larder_dataset_open(w.client, "set", 3, &d, &e) < 0);
    assert_int_equal(e.kind, LARDER_NOT_FOUND);
    corpus_paths_free(paths);
    corpus_free(&c);
    world_end(&w);
}

/* A sample of several chunks, one of which stores nothing, in a batch larger than the ring. */
static void assert_fed_whole(struct world *w, const struct buf *file)
{
    struct larder_feed_options o = LARDER_INIT(larder_feed_options);
    struct larder_feed *f;
    struct larder_batch *b;
    struct larder_sample s;
    o.dataset = "large";
    o.global_batch = 1;
    o.depth_bytes = 1 << 20;
    assert_int_equal(larder_feed_open(w->client, &o, &f, NULL), 0);
    assert_int_equal(larder_feed_next(f, 20000, &b, NULL), 1);
    assert_int_equal(larder_batch_sample(b, 0, &s), 0);
    assert_int_equal(s.fields, 1);
    assert_int_equal(s.field[0].bytes, file->n);
    assert_memory_equal(s.field[0].data, file->p, file->n);
    larder_batch_release(b);
    assert_int_equal(larder_feed_next(f, 20000, &b, NULL), 0);
    larder_feed_close(f);
}

static void large_shards_are_read_by_chunks(void **state)
{
    (void)state;
    struct world w;
    struct larder_dataset *d;
    struct buf file = {0};
    char *paths[2] = {0};
    world_make(&w);
    assert_true(asprintf(&paths[0], "%s/%s", w.folder, "large.bin") > 0);
    for (uint32_t x = 1; file.n < (9u << 20) + 12345; x = x * 1664525 + 1013904223)
        buf_u32(&file, x);
    memset(file.p + (4 << 20), 0, 4 << 20); /* a chunk that stores nothing */
    FILE *f = fopen(paths[0], "wb");
    assert_int_equal(fwrite(file.p, 1, file.n, f), file.n);
    assert_int_equal(fclose(f), 0);
    import(&w, "large", paths, LARDER_SHARD_WHOLE, NULL);
    assert_int_equal(larder_dataset_open(w.client, "large", 0, &d, NULL), 0);
    atomic_store(&w.chunk_bytes_read, 0);
    assert_same(d, 0, &file, 100000);
    uint64_t read = atomic_load(&w.chunk_bytes_read);
    assert_in_range(read, file.n - (4 << 20), file.n - (4 << 20) + (1 << 20)); /* each chunk once */
    uint8_t few[10];
    assert_int_equal(larder_dataset_read(d, 0, (4 << 20) - 5, few, 10, NULL), 10);
    assert_memory_equal(few, file.p + (4 << 20) - 5, 10);
    assert_fed_whole(&w, &file);
    shelf_cut_every(w.shelf, 6 << 20);
    assert_same(d, 0, &file, 9 << 20);
    larder_dataset_close(d);
    free(paths[0]);
    buf_free(&file);
    world_end(&w);
}

static void assert_import_fails(struct world *w, char **paths, enum larder_shard_format format,
                                enum larder_class kind, const char *word, const char *other)
{
    struct larder_import_options o = LARDER_INIT(larder_import_options);
    struct larder_error e = {0};
    struct larder_dataset *d;
    uint64_t version = 77;
    o.dataset = "bad";
    o.files = (const char *const *)paths;
    o.format = format;
    assert_true(larder_dataset_import(w->client, &o, &version, &e) < 0);
    if (e.kind != kind || !strstr(e.text, word) || !strstr(e.text, other))
        fail_msg("class %d: %s", (int)e.kind, e.text);
    assert_int_equal(version, 77);
    assert_int_equal(shelf_segments(w->shelf), 0);
    assert_true(larder_dataset_open(w->client, "bad", 0, &d, &e) < 0);
    assert_int_equal(e.kind, LARDER_NOT_FOUND);
}

static void cut_to(const char *path, size_t n)
{
    assert_int_equal(truncate(path, (off_t)n), 0);
}

/* D1, D2: cut archives and empty files name the place, and nothing is left on the server. */
static void bad_files_leave_nothing(void **state)
{
    (void)state;
    struct world w;
    struct corpus c;
    world_make(&w);
    corpus_make(&c, 4, 5, 6, 2000);
    uint32_t last = 4;
    while (last > 0 && c.counts[last] == 0)
        last--;
    char **paths = corpus_write(&c, w.folder);
    size_t n = c.files[last].n;
    cut_to(paths[last], n - 1024 - 512); /* inside the data of the last member */
    assert_import_fails(&w, paths, LARDER_SHARD_AUTO, LARDER_CORRUPT, c.names[last], ".txt");
    cut_to(paths[last], 100);
    assert_import_fails(&w, paths, LARDER_SHARD_AUTO, LARDER_CORRUPT, c.names[last], "100");
    cut_to(paths[last], 0);
    assert_import_fails(&w, paths, LARDER_SHARD_AUTO, LARDER_CORRUPT, c.names[last], "0 bytes");
    unlink(paths[last]);
    assert_import_fails(&w, paths, LARDER_SHARD_AUTO, LARDER_NOT_FOUND, c.names[last], "No such file");
    free(paths[last]);
    paths[last] = strdup("/");
    assert_import_fails(&w, paths, LARDER_SHARD_WHOLE, LARDER_INVALID, "/", "");
    char *none[1] = {0};
    assert_import_fails(&w, none, LARDER_SHARD_AUTO, LARDER_INVALID, "no files", "");
    corpus_paths_free(paths);
    corpus_free(&c);
    world_end(&w);
}

/* Progress is told on this thread, and here the file is changed under the import's feet. */
struct change {
    const char *path;
    uint64_t done, total;
};

static void on_progress(void *arg, uint64_t done, uint64_t total, const char *file)
{
    struct change *c = arg;
    (void)file;
    assert_true(done >= c->done && done <= total);
    c->done = done;
    c->total = total;
}

static void progress_ends_at_the_total(void **state)
{
    (void)state;
    struct world w;
    struct corpus c;
    struct change seen = {0};
    world_make(&w);
    corpus_make(&c, 4, 5, 6, 2000);
    char **paths = corpus_write(&c, w.folder);
    const char *const labels[] = {"source", "test", NULL};
    struct larder_import_options o = LARDER_INIT(larder_import_options);
    o.dataset = "set";
    o.files = (const char *const *)paths;
    o.format = LARDER_SHARD_AUTO;
    o.labels = labels;
    o.progress = on_progress;
    o.progress_arg = &seen;
    assert_int_equal(larder_dataset_import(w.client, &o, NULL, NULL), 0);
    assert_int_equal(seen.done, corpus_bytes(&c));
    assert_int_equal(seen.total, corpus_bytes(&c));
    const char *const odd[] = {"source", NULL};
    struct larder_error e;
    o.labels = odd;
    assert_true(larder_dataset_import(w.client, &o, NULL, &e) < 0);
    assert_non_null(strstr(e.text, "source"));
    corpus_paths_free(paths);
    corpus_free(&c);
    world_end(&w);
}

/* ---- feeding what was imported ---- */

static struct larder_feed *open_feed_of(struct world *w, uint32_t batch, uint64_t depth_bytes, int damage,
                                        uint64_t epochs)
{
    struct larder_feed_options o = LARDER_INIT(larder_feed_options);
    struct larder_feed *f;
    struct larder_error e = {0};
    o.dataset = "set";
    o.seed = 4;
    o.window_shards = 2;
    o.global_batch = batch;
    o.last = LARDER_LAST_PAD;
    o.depth_bytes = depth_bytes;
    o.damage = damage;
    o.epochs = epochs;
    if (larder_feed_open(w->client, &o, &f, &e) < 0)
        fail_msg("%s", e.text);
    return f;
}

static struct larder_feed *open_feed(struct world *w, uint64_t depth_bytes, int damage)
{
    return open_feed_of(w, 8, depth_bytes, damage, 1);
}

static int drain(const struct corpus *c, struct larder_feed *f, uint32_t *seen, struct larder_error *e)
{
    struct larder_batch *b;
    int rc;
    while ((rc = larder_feed_next(f, 20000, &b, e)) == 1) {
        for (size_t i = 0; i < larder_batch_samples(b); i++) {
            struct larder_sample s;
            assert_int_equal(larder_batch_sample(b, i, &s), 0);
            corpus_check(c, &s);
            seen[s.position]++;
        }
        larder_batch_release(b);
    }
    return rc;
}

static void feeds_sealed_samples_through_cuts(void **state)
{
    (void)state;
    struct world w;
    struct corpus c;
    struct larder_error e = {0};
    world_make(&w);
    corpus_make(&c, 8, 6, 40, 60000); /* shards of more than a chunk and less than one */
    char **paths = corpus_write(&c, w.folder);
    import(&w, "set", paths, LARDER_SHARD_AUTO, NULL);
    uint64_t n = corpus_samples(&c), pad = (8 - n % 8) % 8;
    uint32_t *seen = calloc(n, sizeof *seen);
    atomic_store(&w.chunk_bytes_read, 0);
    struct larder_feed *f = open_feed(&w, 1 << 20, LARDER_DAMAGE_FAIL);
    assert_int_equal(drain(&c, f, seen, &e), 0);
    for (uint64_t i = 0; i < n; i++)
        assert_int_equal(seen[i], i < pad ? 2 : 1);
    larder_feed_close(f);
    /* The window fits into the chunk memory, so no chunk was fetched twice but for the epoch's first. */
    uint64_t once = atomic_load(&w.chunk_bytes_read), bytes = corpus_bytes(&c);
    assert_in_range(once, bytes / 2, bytes + (13 << 20));

    shelf_cut_every(w.shelf, bytes / 4);
    memset(seen, 0, n * sizeof *seen);
    f = open_feed(&w, 4 << 20, LARDER_DAMAGE_FAIL);
    assert_int_equal(drain(&c, f, seen, &e), 0);
    for (uint64_t i = 0; i < n; i++)
        assert_int_equal(seen[i], i < pad ? 2 : 1);
    assert_true(shelf_cuts(w.shelf) >= 3);
    larder_feed_close(f);
    free(seen);
    corpus_paths_free(paths);
    corpus_free(&c);
    world_end(&w);
}

/* Of all samples of a shard, byte by byte; and of how many fields. */
static uint64_t bytes_between(const struct samples *s, uint64_t begin, uint64_t end, uint64_t *fields)
{
    uint64_t all = 0;
    *fields = 0;
    for (uint64_t i = 0; i < samples_count(s); i++)
        for (uint32_t k = 0; k < samples_fields(s, i); k++) {
            struct sample_field f = samples_field(s, i, k);
            uint64_t before = all;
            for (uint64_t at = f.offset; at < f.offset + f.bytes; at++)
                all += at >= begin && at < end;
            *fields += all > before;
        }
    return all;
}

static void count_samples_in_chunks(uint32_t samples, uint32_t field_bytes_max, unsigned *counted,
                                    unsigned *many)
{
    struct world w;
    struct corpus c;
    struct larder_dataset *d;
    struct dataset_view *v;
    world_make(&w);
    corpus_make(&c, 8, 6, samples, field_bytes_max);
    char **paths = corpus_write(&c, w.folder);
    import(&w, "set", paths, LARDER_SHARD_AUTO, NULL);
    assert_int_equal(larder_dataset_open(w.client, "set", 0, &d, NULL), 0);
    for (uint32_t i = 0; i < 6; i++) {
        assert_int_equal(dataset_view_get(d, i, true, &v, NULL), 0);
        for (uint32_t k = 0; k * v->piece_bytes < v->shard_bytes; k++) {
            uint64_t fields, begin = k * v->piece_bytes, found = dataset_sample_bytes(v, k);
            uint64_t expected = bytes_between(v->samples, begin, begin + v->piece_bytes, &fields);
            if (found != UINT64_MAX)
                assert_int_equal(found, expected);
            else
                assert_true(fields > 100); /* samples without bytes count too */
            *counted += found != UINT64_MAX;
            *many += found == UINT64_MAX;
        }
        dataset_view_put(d, v);
    }
    larder_dataset_close(d);
    corpus_paths_free(paths);
    corpus_free(&c);
    world_end(&w);
}

static void bytes_of_samples_in_a_chunk_are_counted(void **state)
{
    (void)state;
    unsigned counted = 0, many = 0;
    count_samples_in_chunks(40, 60000, &counted, &many); /* cut by the borders of chunks */
    assert_true(counted > 20 && many == 0);
    count_samples_in_chunks(400, 100, &counted, &many);
    assert_true(many > 0);
}

/* Memory is not kept for chunks whose samples were all handed out, and no chunk is fetched twice for that. */
static void what_was_handed_out_is_forgotten(void **state)
{
    (void)state;
    struct world w;
    struct corpus c;
    struct larder_error e = {0};
    world_make(&w);
    corpus_make(&c, 8, 6, 150, 60000);
    assert_true(corpus_bytes(&c) > FEED_CHUNK_BYTES_MIN);
    char **paths = corpus_write(&c, w.folder);
    import(&w, "set", paths, LARDER_SHARD_AUTO, NULL);
    uint32_t *seen = calloc(corpus_samples(&c), sizeof *seen);
    atomic_store(&w.chunk_bytes_read, 0);
    struct larder_feed *f = open_feed_of(&w, 1, 1 << 20, LARDER_DAMAGE_FAIL, 1);
    assert_int_equal(drain(&c, f, seen, &e), 0);
    pthread_mutex_lock(&f->lock);
    assert_int_equal(f->chunk_bytes, 0);
    pthread_mutex_unlock(&f->lock);
    larder_feed_close(f);
    assert_in_range(atomic_load(&w.chunk_bytes_read), corpus_bytes(&c) / 2,
                    corpus_bytes(&c) + (256 << 10)); /* with the indexes of the samples */
    free(seen);
    corpus_paths_free(paths);
    corpus_free(&c);
    world_end(&w);
}

/* A dataset that fits into the memory for chunks is fetched in its first epoch, and in no other. */
static void small_datasets_stay_over_epochs(void **state)
{
    (void)state;
    enum { EPOCHS = 5 };
    struct world w;
    struct corpus c;
    struct larder_error e = {0};
    world_make(&w);
    corpus_make(&c, 8, 4, 60, 60000);
    assert_in_range(corpus_bytes(&c), 4 << 20, FEED_CHUNK_BYTES_MIN - 1);
    char **paths = corpus_write(&c, w.folder);
    import(&w, "set", paths, LARDER_SHARD_AUTO, NULL);
    uint64_t n = corpus_samples(&c);
    uint32_t *seen = calloc(n * EPOCHS, sizeof *seen);
    atomic_store(&w.chunk_bytes_read, 0);
    struct larder_feed *f = open_feed_of(&w, 1, 1 << 20, LARDER_DAMAGE_FAIL, EPOCHS);
    assert_int_equal(drain(&c, f, seen, &e), 0);
    larder_feed_close(f);
    for (uint64_t i = 0; i < n * EPOCHS; i++)
        assert_int_equal(seen[i], 1);
    assert_in_range(atomic_load(&w.chunk_bytes_read), corpus_bytes(&c) / 2,
                    corpus_bytes(&c) + (256 << 10)); /* with the indexes of the samples */
    free(seen);
    corpus_paths_free(paths);
    corpus_free(&c);
    world_end(&w);
}

static void records_are_samples_of_one_size(void **state)
{
    (void)state;
    struct world w;
    char *paths[2] = {0};
    uint32_t words[3000][16], seen = 0;
    world_make(&w);
    assert_true(asprintf(&paths[0], "%s/%s", w.folder, "tokens.bin") > 0);
    for (uint32_t i = 0; i < 3000; i++)
        for (uint32_t k = 0; k < 16; k++)
            words[i][k] = i * 16 + k;
    FILE *file = fopen(paths[0], "wb");
    assert_int_equal(fwrite(words, sizeof words[0], 3000, file), 3000);
    assert_int_equal(fclose(file), 0);
    struct larder_import_options o = LARDER_INIT(larder_import_options);
    struct larder_error e = {0};
    o.dataset = "set";
    o.files = (const char *const *)paths;
    o.format = LARDER_SHARD_RECORDS;
    o.record_bytes = 63;
    assert_int_equal(larder_dataset_import(w.client, &o, NULL, &e), -EBADMSG); /* does not divide the file */
    o.record_bytes = 64;
    assert_int_equal(larder_dataset_import(w.client, &o, NULL, &e), 0);
    struct larder_feed *f = open_feed(&w, 1 << 20, 0);
    struct larder_batch *b;
    while (larder_feed_next(f, 20000, &b, &e) == 1) {
        for (size_t i = 0; i < larder_batch_samples(b); i++, seen++) {
            struct larder_sample s;
            assert_int_equal(larder_batch_sample(b, i, &s), 0);
            assert_int_equal(s.fields, 1);
            assert_string_equal(s.field[0].name, "bin");
            assert_int_equal(s.field[0].bytes, 64);
            assert_memory_equal(s.field[0].data, words[s.number], 64);
        }
        larder_batch_release(b);
    }
    assert_int_equal(seen, 3000);
    larder_feed_close(f);
    free(paths[0]);
    world_end(&w);
}

/* A byte in the first chunk of a shard's file. */
static void damage(struct world *w, const struct corpus *c, int flips)
{
    struct larder_dataset *d;
    struct dataset_view *v;
    struct err e;
    uint32_t count, shard = 0;
    while (c->files[shard].n < 128 << 10) /* so that its chunk does not come along with the trailer */
        shard++;
    assert_true(shard < c->shards && c->files[shard].n <= 1 << 20);
    assert_int_equal(dataset_open(w->client, client_conn(w->client), "set", 0, &d, &e), 0);
    assert_int_equal(dataset_view_get(d, shard, false, &v, &e), 0);
    const struct chunk_entry *entry = &part_chunks(v->part, &count)[0];
    atomic_store(&w->bad_from, entry->offset);
    atomic_store(&w->bad_byte, entry->offset + entry->stored_bytes / 2);
    dataset_view_put(d, v);
    dataset_close(d);
    atomic_store(&w->flips, flips);
    atomic_store(&w->bad_shard, shard);
}

/* D17: one bad read of a good chunk is asked again; damage that stays is named, or left out. */
static void damage_is_read_again_then_named_or_left_out(void **state)
{
    (void)state;
    struct world w;
    struct corpus c;
    struct larder_error e = {0};
    world_make(&w);
    corpus_make(&c, 8, 4, 10, 20000);
    char **paths = corpus_write(&c, w.folder);
    import(&w, "set", paths, LARDER_SHARD_AUTO, NULL);
    uint64_t n = corpus_samples(&c), all = 0;
    uint32_t *seen = calloc(n, sizeof *seen);

    damage(&w, &c, 1);
    struct larder_feed *f = open_feed(&w, 1 << 20, LARDER_DAMAGE_FAIL);
    assert_int_equal(drain(&c, f, seen, &e), 0);
    assert_int_equal(atomic_load(&w.flips), 0); /* it was met */
    larder_feed_close(f);

    damage(&w, &c, -1);
    uint32_t shard = atomic_load(&w.bad_shard);
    f = open_feed(&w, 1 << 20, LARDER_DAMAGE_FAIL);
    assert_int_equal(drain(&c, f, seen, &e), -EBADMSG);
    assert_int_equal(e.kind, LARDER_CORRUPT);
    assert_non_null(strstr(e.text, c.names[shard]));
    assert_non_null(strstr(e.text, "sample \"d"));
    larder_feed_close(f);

    memset(seen, 0, n * sizeof *seen);
    f = open_feed(&w, 1 << 20, LARDER_DAMAGE_SKIP);
    assert_int_equal(drain(&c, f, seen, &e), 0);
    for (uint64_t i = 0; i < n; i++)
        all += seen[i] > 0;
    assert_int_equal(all, n - c.counts[shard]); /* small shards are one chunk each */
    struct larder_feed_info info = LARDER_INIT(larder_feed_info);
    assert_int_equal(larder_feed_info(f, &info), 0);
    assert_true(info.skipped >= c.counts[shard]);
    larder_feed_close(f);

    struct larder_dataset *d;
    uint8_t byte;
    assert_int_equal(larder_dataset_open(w.client, "set", 0, &d, NULL), 0);
    assert_int_equal(larder_dataset_read(d, shard, 0, &byte, 1, &e), -EBADMSG);
    assert_non_null(strstr(e.text, c.names[shard]));
    assert_int_equal(larder_dataset_read(d, (shard + 1) % 4, 0, &byte, 1, &e), 1);
    larder_dataset_close(d);
    free(seen);
    corpus_paths_free(paths);
    corpus_free(&c);
    world_end(&w);
}

/* The same state, and positions, whichever way the same shards are read. */
static void a_state_is_bound_to_its_version(void **state)
{
    (void)state;
    struct world w;
    struct corpus c;
    struct larder_error e = {0};
    uint8_t bytes[64];
    world_make(&w);
    corpus_make(&c, 8, 4, 10, 300);
    char **paths = corpus_write(&c, w.folder);
    import(&w, "set", paths, LARDER_SHARD_AUTO, NULL);
    struct larder_feed *f = open_feed(&w, 1 << 20, 0);
    struct larder_batch *b;
    assert_int_equal(larder_feed_next(f, 20000, &b, &e), 1);
    larder_batch_release(b);
    assert_int_equal(larder_feed_state(f, bytes), 64);
    larder_feed_close(f);
    import(&w, "set", paths, LARDER_SHARD_AUTO, NULL);
    struct larder_feed_options o = LARDER_INIT(larder_feed_options);
    o.dataset = "set";
    o.seed = 4;
    o.window_shards = 2;
    o.global_batch = 8;
    o.state = bytes;
    o.state_bytes = 64;
    assert_int_equal(larder_feed_open(w.client, &o, &f, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "open version 1"));
    o.version = 1;
    assert_int_equal(larder_feed_open(w.client, &o, &f, &e), 0);
    assert_int_equal(larder_feed_next(f, 20000, &b, &e), 1);
    struct larder_sample s;
    assert_int_equal(larder_batch_sample(b, 0, &s), 0);
    assert_int_equal(s.position, 8);
    larder_batch_release(b);
    larder_feed_close(f);
    corpus_paths_free(paths);
    corpus_free(&c);
    world_end(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_follow_the_samples),
        cmocka_unit_test(many_shards_come_back_as_they_went),
        cmocka_unit_test(large_shards_are_read_by_chunks),
        cmocka_unit_test(bad_files_leave_nothing),
        cmocka_unit_test(progress_ends_at_the_total),
        cmocka_unit_test(feeds_sealed_samples_through_cuts),
        cmocka_unit_test(bytes_of_samples_in_a_chunk_are_counted),
        cmocka_unit_test(what_was_handed_out_is_forgotten),
        cmocka_unit_test(small_datasets_stay_over_epochs),
        cmocka_unit_test(records_are_samples_of_one_size),
        cmocka_unit_test(damage_is_read_again_then_named_or_left_out),
        cmocka_unit_test(a_state_is_bound_to_its_version),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
