/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: MDS datasets (raw, packed, both) and Megatron token files are imported as they are, and a feed hands
 * out their columns and tokens with their types; what is missing, damaged or not a pair leaves nothing behind
 * (D6 and D16 on the way through an import). Method: files made here, a server in memory.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#include <cmocka.h>

#include "format/base/digest.h"
#include "tests/support/folder.h"
#include "tests/support/mosaic.h"
#include "tests/support/shelf.h"

#define SHARDS  3u
#define SAMPLES 50u

struct world {
    struct shelf *shelf;
    struct larder *client;
    char folder[256], notes[2048];
    unsigned note_count;
};

static void world_make(struct world *w)
{
    struct shelf_options o = {0};
    *w = (struct world){0};
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

static char *path_of(const struct world *w, const char *name)
{
    static char path[600];
    snprintf(path, sizeof path, "%s%s%s", w->folder, *name ? "/" : "", name);
    return path;
}

static void write_file(const struct world *w, const char *name, const void *p, size_t n)
{
    folder_file(w->folder, name, p, n);
}

static void note(void *arg, const char *text)
{
    struct world *w = arg;
    w->note_count++;
    snprintf(w->notes + strlen(w->notes), sizeof w->notes - strlen(w->notes), "%s\n", text);
}

static int import_some(struct world *w, const char *const *paths, enum larder_shard_format format,
                       uint64_t window, uint64_t extra, struct larder_error *e)
{
    struct larder_import_options o = LARDER_INIT(larder_import_options);
    o.dataset = "set";
    o.files = paths;
    o.format = format;
    o.window_tokens = window;
    o.window_extra = extra;
    o.note = note;
    o.note_arg = w;
    return larder_dataset_import(w->client, &o, NULL, e);
}

static void import(struct world *w, const char *name, enum larder_shard_format format)
{
    struct larder_error e = {0};
    const char *paths[] = {path_of(w, name), NULL};
    if (import_some(w, paths, format, 0, 0, &e) < 0)
        fail_msg("%s", e.text);
}

static void assert_refused(struct world *w, const char *name, enum larder_shard_format format,
                           enum larder_class kind, const char *word, const char *other)
{
    struct larder_error e = {0};
    struct larder_dataset *d;
    const char *paths[] = {path_of(w, name), NULL};
    assert_true(import_some(w, paths, format, 0, 0, &e) < 0);
    if (e.kind != kind || !strstr(e.text, word) || !strstr(e.text, other))
        fail_msg("class %d: %s", (int)e.kind, e.text);
    assert_int_equal(shelf_segments(w->shelf), 0);
    assert_true(larder_dataset_open(w->client, "set", 0, &d, NULL) < 0);
}

/* ---- MDS ---- */

static const struct mosaic_column columns[] = {{"audio", "ndarray", -1},
                                               {"id", "int32", 4},
                                               {"kind", "str", -1},
                                               {"pickled", "pkl", -1},
                                               {"w", "float64", 8}};
enum { COLUMNS = sizeof columns / sizeof *columns };

struct filling {
    uint32_t shard;
};

static void fill(void *arg, uint32_t sample, uint32_t column, struct buf *out)
{
    const struct filling *f = arg;
    uint32_t id = f->shard * 1000 + sample;
    int64_t n = column == 0                 ? 3000 + sample * 17
                : columns[column].bytes < 0 ? sample % 5
                                            : columns[column].bytes;
    if (column == 1) {
        buf_u32(out, id);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        buf_u8(out, (uint8_t)(id * 2654435761u >> 24) ^ (uint8_t)(column + (uint64_t)i / 7));
}

enum form { RAW, PACKED, BOTH };

static void hash_text(const char *algorithm, const struct buf *b, char *out, size_t size)
{
    char hex[DIGEST_HEX_BYTES];
    struct digest *d;
    assert_int_equal(digest_start(algorithm, &d, NULL), 0);
    digest_update(d, b->p, b->n);
    digest_end(d, hex);
    digest_free(d);
    snprintf(out, size, "\"%s\": \"%s\", \"other9\": \"00\"", algorithm, hex);
}

/* Writes a dataset into the folder; the shards' bytes are kept in raw. The index says of the first packed
 * shard that so many bytes stand behind it. */
static void write_mds_with(struct world *w, enum form form, struct buf raw[SHARDS], int behind)
{
    struct mosaic_entry entries[SHARDS];
    static char names[SHARDS][2][40], hashes[SHARDS][2][300];
    struct buf json = {0};
    for (uint32_t i = 0; i < SHARDS; i++) {
        struct filling f = {i};
        struct buf zip = {0};
        buf_reset(&raw[i]);
        mosaic_shard(&raw[i], columns, COLUMNS, SAMPLES, fill, &f);
        assert_true(buf_reserve(&zip, ZSTD_compressBound(raw[i].n)));
        zip.n = ZSTD_compress(zip.p, zip.cap, raw[i].p, raw[i].n, 3);
        snprintf(names[i][0], sizeof names[i][0], "shard.%05u.mds", i);
        snprintf(names[i][1], sizeof names[i][1], "shard.%05u.mds.zstd", i);
        hash_text("sha1", &raw[i], hashes[i][0], sizeof hashes[i][0]);
        hash_text("xxh64", &zip, hashes[i][1], sizeof hashes[i][1]);
        if (form != PACKED)
            write_file(w, names[i][0], raw[i].p, raw[i].n);
        if (form != RAW)
            write_file(w, names[i][1], zip.p, zip.n);
        entries[i] = (struct mosaic_entry){
            .raw = names[i][0], .raw_bytes = raw[i].n, .samples = SAMPLES, .raw_hashes = hashes[i][0]};
        if (form != RAW) {
            entries[i].zip = names[i][1];
            entries[i].zip_bytes = zip.n + (i == 0 ? (unsigned)behind : 0);
            entries[i].zip_hashes = hashes[i][1];
            entries[i].compression = "zstd:3";
        }
        buf_free(&zip);
    }
    mosaic_index(&json, columns, COLUMNS, entries, SHARDS);
    write_file(w, "index.json", json.p, json.n);
    buf_free(&json);
}

static void write_mds(struct world *w, enum form form, struct buf raw[SHARDS])
{
    write_mds_with(w, form, raw, 0);
}

static void assert_sample(const struct larder_sample *s)
{
    struct filling f = {s->shard};
    struct buf want = {0};
    assert_int_equal(s->fields, COLUMNS);
    assert_string_equal(s->key, "");
    for (uint32_t i = 0; i < COLUMNS; i++) {
        buf_reset(&want);
        fill(&f, (uint32_t)s->number, i, &want);
        assert_string_equal(s->field[i].name, columns[i].name);
        assert_string_equal(s->field[i].type, columns[i].encoding);
        assert_int_equal(s->field[i].bytes, want.n);
        assert_true(want.n == 0 || memcmp(s->field[i].data, want.p, want.n) == 0);
    }
    buf_free(&want);
}

/* Feeds all of "set"; returns how many samples came. */
static unsigned feed_all(struct world *w, unsigned batch, void (*each)(const struct larder_sample *s))
{
    struct larder_feed_options o = LARDER_INIT(larder_feed_options);
    struct larder_error e = {0};
    struct larder_feed *f;
    struct larder_batch *b;
    struct larder_sample s;
    unsigned seen = 0;
    int rc;
    o.dataset = "set";
    o.seed = 5;
    o.global_batch = batch;
    if (larder_feed_open(w->client, &o, &f, &e) < 0)
        fail_msg("%s", e.text);
    while ((rc = larder_feed_next(f, 20000, &b, &e)) == 1) {
        for (size_t i = 0; i < larder_batch_samples(b); i++, seen++) {
            assert_int_equal(larder_batch_sample(b, i, &s), 0);
            each(&s);
        }
        larder_batch_release(b);
    }
    if (rc < 0)
        fail_msg("%s", e.text);
    larder_feed_close(f);
    return seen;
}

static void mds_in_every_form(void **state)
{
    (void)state;
    struct buf raw[SHARDS] = {{0}};
    for (enum form form = RAW; form <= BOTH; form++) {
        struct world w;
        struct larder_dataset *d;
        struct larder_shard_info info;
        world_make(&w);
        write_mds(&w, form, raw);
        /* A folder, and the index alone; found by itself, and by name. */
        import(&w, form == RAW ? "" : "index.json", form == BOTH ? LARDER_SHARD_MDS : LARDER_SHARD_AUTO);
        assert_int_equal(larder_dataset_open(w.client, "set", 0, &d, NULL), 0);
        assert_int_equal(larder_dataset_shards(d), SHARDS);
        for (uint32_t i = 0; i < SHARDS; i++) {
            uint8_t *p = malloc(raw[i].n);
            assert_int_equal(larder_dataset_shard(d, i, &info, NULL), 0);
            assert_int_equal(info.bytes, raw[i].n); /* unpacked, whatever it was */
            assert_int_equal(info.samples, SAMPLES);
            assert_int_equal(larder_dataset_read(d, i, 0, p, raw[i].n, NULL), (int64_t)raw[i].n);
            assert_memory_equal(p, raw[i].p, raw[i].n);
            free(p);
        }
        assert_string_equal(info.name, "shard.00002.mds");
        larder_dataset_close(d);
        assert_int_equal(feed_all(&w, 10, assert_sample), SHARDS * SAMPLES);
        /* Checksums that nobody here knows are told, once for each kind of file. */
        assert_int_equal(w.note_count, form == PACKED ? 2 : 1);
        assert_non_null(strstr(w.notes, "other9 is not known here"));
        world_end(&w);
    }
    for (uint32_t i = 0; i < SHARDS; i++)
        buf_free(&raw[i]);
}

static void assert_columns(const struct larder_sample *s)
{
    assert_int_equal(s->fields, 13);
}

/* Written by the library itself, with the checksums that it knows. */
static void files_of_the_library_itself(void **state)
{
    (void)state;
    static const char *const folders[] = {"tests/golden/mosaicml/raw", "tests/golden/mosaicml/zstd"};
    for (int i = 0; i < 2; i++) {
        struct world w;
        struct larder_error e = {0};
        const char *paths[] = {folders[i], NULL};
        world_make(&w);
        if (import_some(&w, paths, LARDER_SHARD_AUTO, 0, 0, &e) < 0)
            fail_msg("%s", e.text);
        assert_int_equal(w.note_count, 0);
        assert_int_equal(feed_all(&w, 5, assert_columns), 20);
        world_end(&w);
    }
}

static void flip(struct world *w, const char *name, long at)
{
    FILE *f = fopen(path_of(w, name), "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, at, at < 0 ? SEEK_END : SEEK_SET), 0);
    int was = fgetc(f);
    assert_int_equal(fseek(f, -1, SEEK_CUR), 0);
    fputc(was ^ 1, f);
    assert_int_equal(fclose(f), 0);
}

static void damaged_mds_leaves_nothing(void **state)
{
    (void)state;
    struct world w;
    struct buf raw[SHARDS] = {{0}};
    world_make(&w);
    write_mds(&w, RAW, raw);
    flip(&w, "shard.00001.mds", -9); /* the data: only the checksum tells */
    assert_refused(&w, "", LARDER_SHARD_AUTO, LARDER_CORRUPT, "shard.00001.mds",
                   "the sha1 of its own bytes is");
    flip(&w, "shard.00001.mds", -9);
    flip(&w, "shard.00001.mds", 1); /* the number of samples */
    assert_refused(&w, "", LARDER_SHARD_AUTO, LARDER_CORRUPT, "shard.00001.mds", "index.json says 50");
    flip(&w, "shard.00001.mds", 1);
    assert_int_equal(truncate(path_of(&w, "shard.00002.mds"), 5000), 0);
    assert_refused(&w, "", LARDER_SHARD_AUTO, LARDER_CORRUPT, "shard.00002.mds",
                   "5000 bytes, its index.json says");
    assert_int_equal(unlink(path_of(&w, "shard.00002.mds")), 0);
    assert_refused(&w, "", LARDER_SHARD_AUTO, LARDER_NOT_FOUND, "shard.00002.mds is missing",
                   "index.json names it");
    assert_refused(&w, "shard.00000.mds", LARDER_SHARD_AUTO, LARDER_INVALID, "a shard alone", "index.json");
    write_file(&w, "index.json", "{\"version\": 2, ", 15);
    assert_refused(&w, "", LARDER_SHARD_AUTO, LARDER_CORRUPT, "index.json: ", "not JSON");
    assert_int_equal(unlink(path_of(&w, "index.json")), 0);
    assert_refused(&w, "", LARDER_SHARD_MDS, LARDER_NOT_FOUND, "index.json", "");
    assert_refused(&w, "", LARDER_SHARD_AUTO, LARDER_INVALID,
                   "not a regular file, nor a folder with index.json", "token files");
    assert_refused(&w, "", LARDER_SHARD_TAR, LARDER_INVALID, "not a regular file", "");

    world_end(&w);
    for (uint32_t i = 0; i < SHARDS; i++)
        buf_free(&raw[i]);
}

/* Where the first digest by that algorithm stands in index.json. */
static long digest_at(const struct world *w, const char *algorithm)
{
    static char text[20000];
    FILE *f = fopen(path_of(w, "index.json"), "rb");
    assert_non_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    fclose(f);
    const char *at = strstr(text, algorithm);
    assert_non_null(at);
    return at - text + (long)strlen(algorithm) + 4; /* behind ": " and two quotes */
}

static void damaged_packed_mds_leaves_nothing(void **state)
{
    (void)state;
    struct world w;
    struct buf raw[SHARDS] = {{0}};
    struct stat st;
    world_make(&w);
    write_mds(&w, PACKED, raw);
    const char *name = "shard.00000.mds.zstd";
    assert_int_equal(stat(path_of(&w, name), &st), 0);
    flip(&w, name, st.st_size / 2);
    assert_refused(&w, "", LARDER_SHARD_AUTO, LARDER_CORRUPT, name, "");
    flip(&w, name, st.st_size / 2);
    assert_int_equal(truncate(path_of(&w, name), st.st_size - 3), 0);
    assert_refused(&w, "", LARDER_SHARD_AUTO, LARDER_CORRUPT, name, "index.json says");
    write_mds_with(&w, PACKED, raw, 1);
    FILE *f = fopen(path_of(&w, name), "ab"); /* what stands behind the frame is no frame */
    assert_true(f && fputc(0, f) == 0 && fclose(f) == 0);
    assert_refused(&w, "", LARDER_SHARD_AUTO, LARDER_CORRUPT, name, "cannot be unpacked");
    write_mds(&w, PACKED, raw);
    flip(&w, "index.json", digest_at(&w, "xxh64")); /* good bytes, which are not those that were meant */
    assert_refused(&w, "", LARDER_SHARD_AUTO, LARDER_CORRUPT, name, "the xxh64 of its packed bytes is");
    world_end(&w);
    for (uint32_t i = 0; i < SHARDS; i++)
        buf_free(&raw[i]);
}

/* D6: the table of a shard beyond 4 GiB is not believed. The file is sparse. */
static void wrapped_offsets_are_refused(void **state)
{
    (void)state;
    struct world w;
    struct mosaic_column column = {"x", "bytes", -1};
    struct mosaic_entry entry = {.raw = "shard.00000.mds", .raw_bytes = (5ull << 30) + 20, .samples = 2};
    struct buf json = {0}, head = {0};
    world_make(&w);
    mosaic_index(&json, &column, 1, &entry, 1);
    write_file(&w, "index.json", json.p, json.n);
    buf_u32(&head, 2);
    buf_u32(&head, 16);
    buf_u32(&head, 3u << 30);
    buf_u32(&head, (1u << 30) + 20);
    write_file(&w, entry.raw, head.p, head.n);
    assert_int_equal(truncate(path_of(&w, entry.raw), (off_t)entry.raw_bytes), 0);
    assert_refused(&w, "", LARDER_SHARD_AUTO, LARDER_CORRUPT, "shard.00000.mds", "have wrapped");
    buf_free(&json);
    buf_free(&head);
    world_end(&w);
}

static void only_zstd_is_unpacked(void **state)
{
    (void)state;
    struct world w;
    struct mosaic_column column = {"x", "bytes", -1};
    struct mosaic_entry entry = {
        .raw = "s.mds", .zip = "s.mds.br", .raw_bytes = 50, .zip_bytes = 9, .compression = "br:11"};
    struct buf json = {0};
    world_make(&w);
    mosaic_index(&json, &column, 1, &entry, 1);
    write_file(&w, "index.json", json.p, json.n);
    write_file(&w, "s.mds.br", "123456789", 9);
    assert_refused(&w, "", LARDER_SHARD_AUTO, LARDER_UNSUPPORTED, "s.mds.br is packed by br:11",
                   "unpack it to s.mds");
    buf_free(&json);
    world_end(&w);
}

/* ---- token files ---- */

static const int32_t lengths[] = {5, 4, 0, 11};
static const int64_t borders[] = {0, 2, 3, 4}; /* 9, 0 and 11 tokens */

/* Tokens of shard x are x * 1000, x * 1000 + 1, ... */
static void write_tokens(struct world *w, const char *name, uint32_t shard)
{
    char file[80];
    struct buf idx = {0}, bin = {0};
    for (uint32_t i = 0; i < 20; i++)
        buf_u16(&bin, (uint16_t)(shard * 1000 + i));
    mosaic_idx(&idx, 8, 2, lengths, 4, borders, 4);
    snprintf(file, sizeof file, "%s.bin", name);
    write_file(w, file, bin.p, bin.n);
    snprintf(file, sizeof file, "%s.idx", name);
    write_file(w, file, idx.p, idx.n);
    buf_free(&idx);
    buf_free(&bin);
}

static unsigned tokens_seen, windows_of;

static void assert_tokens(const struct larder_sample *s)
{
    static const uint32_t first[] = {0, 9, 9}, count[] = {9, 0, 11};
    uint32_t from = windows_of ? (uint32_t)s->number * windows_of : first[s->number];
    assert_int_equal(s->fields, 1);
    assert_string_equal(s->field[0].name, "tokens");
    assert_string_equal(s->field[0].type, "uint16");
    size_t n = s->field[0].bytes / 2;
    assert_int_equal(n, windows_of ? windows_of + 1 : count[s->number]);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(le16_get((const uint8_t *)s->field[0].data + 2 * i), s->shard * 1000 + from + i);
    tokens_seen += (unsigned)n;
}

static void documents_and_windows(void **state)
{
    (void)state;
    struct world w;
    struct larder_error e = {0};
    world_make(&w);
    write_tokens(&w, "a_text_document", 0);
    write_tokens(&w, "b_text_document", 1);
    import(&w, "", LARDER_SHARD_AUTO);
    tokens_seen = windows_of = 0;
    assert_int_equal(feed_all(&w, 2, assert_tokens), 6);
    assert_int_equal(tokens_seen, 40);
    /* Both files of a pair may be named; 20 tokens make 4 windows of 4 and one more: the last would end
     * at 21. */
    char bin[600], idx[600], other[600];
    snprintf(bin, sizeof bin, "%s", path_of(&w, "a_text_document.bin"));
    snprintf(idx, sizeof idx, "%s", path_of(&w, "a_text_document.idx"));
    snprintf(other, sizeof other, "%s", path_of(&w, "b_text_document.idx"));
    const char *paths[] = {bin, idx, other, NULL};
    if (import_some(&w, paths, LARDER_SHARD_TOKENS, 4, 1, &e) < 0)
        fail_msg("%s", e.text);
    windows_of = 4;
    tokens_seen = 0;
    assert_int_equal(feed_all(&w, 2, assert_tokens), 8);
    assert_int_equal(tokens_seen, 8 * 5);
    world_end(&w);
}

/* D16 on the way through an import. */
static void wrong_pairs_are_refused(void **state)
{
    (void)state;
    struct world w;
    struct larder_error e = {0};
    world_make(&w);
    write_tokens(&w, "x", 0);
    assert_int_equal(truncate(path_of(&w, "x.bin"), 38), 0);
    assert_refused(&w, "x.bin", LARDER_SHARD_AUTO, LARDER_CORRUPT, "x.idx: ", "the .bin has 38");
    assert_int_equal(truncate(path_of(&w, "x.bin"), 42), 0);
    assert_refused(&w, "x.bin", LARDER_SHARD_AUTO, LARDER_CORRUPT,
                   "x.idx: ", "the .bin has 42; they are not a pair");
    write_tokens(&w, "x", 0);
    flip(&w, "x.idx", 9);
    assert_refused(&w, "x.idx", LARDER_SHARD_AUTO, LARDER_VERSION, "x.idx: ", "version 0, this larder knows");
    write_tokens(&w, "x", 0);
    flip(&w, "x.idx", 17);
    assert_refused(&w, "x.idx", LARDER_SHARD_AUTO, LARDER_CORRUPT, "x.idx: ", "dtype code 9");
    assert_int_equal(unlink(path_of(&w, "x.idx")), 0);
    assert_refused(&w, "x.bin", LARDER_SHARD_TOKENS, LARDER_NOT_FOUND, "x.idx is missing", "pairs");
    assert_refused(&w, "", LARDER_SHARD_AUTO, LARDER_NOT_FOUND, "x.idx is missing", "pairs");
    assert_refused(&w, "y.txt", LARDER_SHARD_TOKENS, LARDER_NOT_FOUND, "y.txt", "");
    write_file(&w, "y.txt", "y", 1);
    assert_refused(&w, "y.txt", LARDER_SHARD_TOKENS, LARDER_INVALID, "y.txt: token files are pairs", "");
    const char *paths[] = {path_of(&w, "y.txt"), NULL};
    assert_int_equal(import_some(&w, paths, LARDER_SHARD_WHOLE, 5, 0, &e), -EINVAL);
    assert_non_null(strstr(e.text, "windows are of token files"));
    assert_int_equal(import_some(&w, paths, LARDER_SHARD_TOKENS, 5, 6, &e), -EINVAL);
    /* A .bin alone is any file. */
    import(&w, "x.bin", LARDER_SHARD_AUTO);
    world_end(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mds_in_every_form),           cmocka_unit_test(files_of_the_library_itself),
        cmocka_unit_test(damaged_mds_leaves_nothing),  cmocka_unit_test(damaged_packed_mds_leaves_nothing),
        cmocka_unit_test(wrapped_offsets_are_refused), cmocka_unit_test(only_zstd_is_unpacked),
        cmocka_unit_test(documents_and_windows),       cmocka_unit_test(wrong_pairs_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
