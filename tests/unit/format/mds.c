/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: samples of MDS shards and their columns come out where they lie, whatever the columns are; an index
 * or a shard that is cut, damaged, of another version or not of one pair is refused with what was expected
 * and found (D6 among them). Method: datasets made here, pushed in pieces; each byte of their heads changed.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/samples.h"
#include "tests/support/mosaic.h"

static const struct mosaic_column every[] = {
    {"a", "bytes", -1},   {"b", "int8", 1},           {"c", "int16", 2},   {"d", "int32", 4},
    {"e", "int64", 8},    {"f", "uint8", 1},          {"g", "uint16", 2},  {"h", "uint32", 4},
    {"i", "uint64", 8},   {"j", "float16", 2},        {"k", "float32", 4}, {"l", "float64", 8},
    {"m", "str", -1},     {"n", "str_int", -1},       {"o", "int", 8},     {"p", "json", -1},
    {"q", "pkl", -1},     {"r", "jpeg", -1},          {"s", "png", -1},    {"t", "ndarray:float32:3,2", 24},
    {"u", "ndarray", -1}, {"v", "ndarray:uint16", -1}};
enum { EVERY = sizeof every / sizeof *every };

static const struct mosaic_column fixed[] = {{"x", "int32", 4}, {"y", "ndarray:uint8:5", 5}};

/* Bytes that tell sample and column; a variable one has (7 sample + column) mod 50 of them. */
static void fill_of(const struct mosaic_column *columns, uint32_t sample, uint32_t column, struct buf *out)
{
    int64_t n = columns[column].bytes < 0 ? (sample * 7 + column) % 50 : columns[column].bytes;
    for (int64_t i = 0; i < n; i++)
        buf_u8(out, (uint8_t)(sample * 31 + column * 7 + (uint64_t)i));
}

static void fill(void *arg, uint32_t sample, uint32_t column, struct buf *out)
{
    fill_of(arg, sample, column, out);
}

struct made {
    struct buf shard, json;
    struct mds_index *index;
};

static void make(struct made *m, const struct mosaic_column *columns, uint32_t count, uint32_t samples)
{
    struct err e;
    *m = (struct made){0};
    mosaic_shard(&m->shard, columns, count, samples, fill, (void *)columns);
    struct mosaic_entry entry = {.raw = "shard.00000.mds", .raw_bytes = m->shard.n, .samples = samples};
    mosaic_index(&m->json, columns, count, &entry, 1);
    if (mds_index_parse(m->json.p, m->json.n, &m->index, &e) < 0)
        fail_msg("%s", e.text);
}

static void made_free(struct made *m)
{
    mds_index_free(m->index);
    buf_free(&m->shard);
    buf_free(&m->json);
}

static int build(const struct mds_shard *x, const uint8_t *p, uint64_t n, size_t piece, struct samples **out,
                 struct err *e)
{
    struct samples_source source = {
        .format = SHARD_MDS, .shard = "shard.00000.mds", .shard_bytes = n, .mds = x};
    struct samples_builder *b;
    int r = samples_builder_create(&source, &b, e);
    if (r < 0)
        return r;
    for (uint64_t at = 0; r == 0 && at < n;) {
        uint64_t take = n - at < piece ? n - at : piece, most = samples_builder_skippable(b);
        if (piece % 2 && most > 0) {
            take = most < n - at ? most : n - at;
            samples_builder_skip(b, take);
        } else {
            r = samples_builder_push(b, p + at, take, e);
        }
        at += take;
    }
    if (r == 0)
        r = samples_builder_finish(b, out, e);
    samples_builder_free(b);
    return r;
}

static void assert_fields(const struct samples *s, const struct mosaic_column *columns, uint32_t count,
                          const uint8_t *shard)
{
    struct buf want = {0};
    for (uint32_t i = 0; i < samples_count(s); i++) {
        assert_int_equal(samples_key(s, i).n, 0);
        assert_int_equal(samples_fields(s, i), count);
        for (uint32_t k = 0; k < count; k++) {
            struct sample_field f = samples_field(s, i, k);
            buf_reset(&want);
            fill_of(columns, i, k, &want);
            assert_true(slice_eq(f.name, slice_str(columns[k].name)));
            assert_true(slice_eq(f.type, slice_str(columns[k].encoding)));
            assert_int_equal(f.bytes, want.n);
            assert_true(want.n == 0 || memcmp(shard + f.offset, want.p, want.n) == 0);
        }
    }
    buf_free(&want);
}

static void every_encoding_is_passed_through(void **state)
{
    (void)state;
    static const size_t pieces[] = {1, 2, 3, 7, 64, 333, 100000, 100001};
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        struct made m;
        struct samples *s, *again;
        struct buf encoded = {0};
        struct err e;
        make(&m, every, EVERY, 40);
        if (build(&m.index->shards[0], m.shard.p, m.shard.n, pieces[i], &s, &e) < 0)
            fail_msg("%s", e.text);
        assert_int_equal(samples_count(s), 40);
        assert_fields(s, every, EVERY, m.shard.p);
        assert_int_equal(samples_encode(s, &encoded, &e), 0);
        if (samples_decode(encoded.p, encoded.n, m.shard.n, &again, &e) < 0)
            fail_msg("%s", e.text);
        assert_fields(again, every, EVERY, m.shard.p);
        assert_int_equal(samples_count(again), 40);
        samples_free(again);
        samples_free(s);
        buf_free(&encoded);
        made_free(&m);
    }
}

static void fixed_sizes_need_the_table_only(void **state)
{
    (void)state;
    struct made m;
    struct samples *s, *again;
    struct buf encoded = {0};
    struct err e;
    make(&m, fixed, 2, 1000);
    assert_int_equal(build(&m.index->shards[0], m.shard.p, m.shard.n, 511, &s, &e), 0);
    assert_fields(s, fixed, 2, m.shard.p);
    assert_int_equal(samples_encode(s, &encoded, &e), 0);
    assert_true(encoded.n < 200); /* nothing for each sample */
    assert_int_equal(samples_decode(encoded.p, encoded.n, m.shard.n, &again, &e), 0);
    assert_fields(again, fixed, 2, m.shard.p);
    samples_free(again);
    samples_free(s);
    buf_free(&encoded);
    made_free(&m);
    make(&m, every, EVERY, 0);
    assert_int_equal(build(&m.index->shards[0], m.shard.p, m.shard.n, 3, &s, &e), 0);
    assert_int_equal(samples_count(s), 0);
    samples_free(s);
    made_free(&m);
}

static void assert_refused(struct made *m, const char *word)
{
    struct samples *s;
    struct err e;
    if (build(&m->index->shards[0], m->shard.p, m->shard.n, 100, &s, &e) != -EBADMSG ||
        !strstr(e.text, word) || !strstr(e.text, "shard \"shard.00000.mds\""))
        fail_msg("%s expected, found: %s", word, e.text);
}

static void damage_says_what_was_expected_and_found(void **state)
{
    (void)state;
    struct made m;
    make(&m, every, EVERY, 10);
    uint32_t second = le32_get(m.shard.p + 8);
    m.shard.n -= 1;
    assert_refused(&m, "index.json says");
    m.index->shards[0].raw.bytes--; /* a cut file and an index that knows no better */
    assert_refused(&m, "the last sample ends at byte");
    m.index->shards[0].raw.bytes++;
    m.shard.n += 1;
    le32_put(m.shard.p, 11);
    assert_refused(&m, "11 samples, its index.json says 10");
    le32_put(m.shard.p, 10);
    le32_put(m.shard.p + 8, 5);
    assert_refused(&m, "sample 0 goes from byte");
    le32_put(m.shard.p + 8, second + 1);
    assert_refused(&m, "columns of sample 0 have");
    le32_put(m.shard.p + 8, second);
    uint32_t first = le32_get(m.shard.p + 4);
    m.shard.p[first] ^= 1; /* the size of a column */
    assert_refused(&m, "columns of sample 0 have");
    m.shard.p[first] ^= 1;
    le32_put(m.shard.p + 4, 47);
    assert_refused(&m, "inside the table");
    made_free(&m);
    make(&m, fixed, 2, 3);
    le32_put(m.shard.p + 8, le32_get(m.shard.p + 8) + 1);
    assert_refused(&m, "fixed size take 9");
    made_free(&m);
}

/* D6: a shard of more than 4 GiB, whose 32-bit offsets have begun again at 0, looks whole from its head. */
static void wrapped_offsets_are_detected(void **state)
{
    (void)state;
    struct mosaic_column column = {"x", "bytes", -1};
    struct mosaic_entry entry = {.raw = "shard.00000.mds", .raw_bytes = (5ull << 30) + 20, .samples = 2};
    struct buf json = {0}, shard = {0};
    struct mds_index *index;
    struct err e;
    mosaic_index(&json, &column, 1, &entry, 1);
    assert_int_equal(mds_index_parse(json.p, json.n, &index, &e), 0);
    buf_u32(&shard, 2);
    buf_u32(&shard, 16);
    buf_u32(&shard, 3u << 30);
    buf_u32(&shard, (1u << 30) + 20); /* 5 GiB and 20 bytes, less 4 GiB */
    struct samples_source source = {
        .format = SHARD_MDS, .shard = "s", .shard_bytes = entry.raw_bytes, .mds = &index->shards[0]};
    struct samples_builder *b;
    assert_int_equal(samples_builder_create(&source, &b, &e), 0);
    assert_int_equal(samples_builder_push(b, shard.p, shard.n, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "have wrapped"));
    assert_non_null(strstr(e.text, "size_limit"));
    samples_builder_free(b);
    mds_index_free(index);
    buf_free(&json);
    buf_free(&shard);
}

/* ---- index.json ---- */

static void file_read(const char *name, struct buf *out)
{
    char path[200];
    uint8_t piece[4096];
    snprintf(path, sizeof path, "tests/golden/mosaicml/raw/%s", name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    for (size_t n; (n = fread(piece, 1, sizeof piece, f)) > 0;)
        buf_put(out, piece, n);
    fclose(f);
}

/* Sample k: b is k bytes k, i is k * 10^10, nd six floats k, u16 is k. */
static void assert_library_sample(const struct samples *s, uint64_t i, const uint8_t *shard, uint32_t k)
{
    static const struct {
        const char *name, *type;
    } is[] = {{"b", "bytes"},
              {"f16", "float16"},
              {"f64", "float64"},
              {"i", "int"},
              {"i8", "int8"},
              {"j", "json"},
              {"nd", "ndarray:float32:2,3"},
              {"ndv", "ndarray"},
              {"p", "pkl"},
              {"png", "png"},
              {"s", "str"},
              {"si", "str_int"},
              {"u16", "uint16"}};
    struct sample_field f[13];
    assert_int_equal(samples_fields(s, i), 13);
    for (uint32_t c = 0; c < 13; c++) {
        f[c] = samples_field(s, i, c);
        assert_true(slice_eq(f[c].name, slice_str(is[c].name)) && slice_eq(f[c].type, slice_str(is[c].type)));
    }
    float floats[6];
    memcpy(floats, shard + f[6].offset, sizeof floats);
    assert_int_equal(f[0].bytes, k);
    assert_true(k == 0 || shard[f[0].offset + k - 1] == k);
    assert_int_equal(le64_get(shard + f[3].offset), k * 10000000000ull);
    assert_int_equal((int8_t)shard[f[4].offset], (int)k - 5);
    assert_true(floats[0] == (float)k && floats[5] == (float)k && f[6].bytes == sizeof floats);
    assert_memory_equal(shard + f[9].offset, "\x89PNG", 4);
    assert_int_equal(le16_get(shard + f[12].offset), k);
}

#define COLUMNS "\"column_names\":[\"a\"],\"column_encodings\":[\"int32\"],\"column_sizes\":[4],"
#define RAW     "\"raw_data\":{\"basename\":\"s.mds\",\"bytes\":9,\"hashes\":{}},"
#define SHARD(columns, raw, rest) \
    "{\"version\":2,\"shards\":[{" columns raw "\"format\":\"mds\",\"version\":2,\"samples\":1" rest "}]}"

static void indexes_are_checked(void **state)
{
    (void)state;
    static const struct {
        const char *json, *word;
        int rc;
    } cases[] = {
        {SHARD(COLUMNS, RAW, ""), "", 0},
        {SHARD(COLUMNS, RAW, ",\"zip_data\":null,\"compression\":null"), "", 0},
        {"{", "not JSON: line", -EBADMSG},
        {"[]", "no \"version\"", -EBADMSG},
        {"{\"version\":1,\"shards\":[]}", "version 1, this larder knows version 2", -EPROTONOSUPPORT},
        {"{\"version\":2,\"shards\":[]}", "one shard or more", -EBADMSG},
        {"{\"version\":2,\"shards\":[7]}", "shard 0 is not described", -EBADMSG},
        {"{\"version\":2,\"shards\":[{\"version\":3,\"format\":\"mds\"}]}", "shard 0 has version 3",
         -EPROTONOSUPPORT},
        {"{\"version\":2,\"shards\":[{\"version\":2,\"format\":\"csv\"}]}", "format \"csv\"", -ENOTSUP},
        {SHARD(COLUMNS, "", ""), "\"raw_data\" is missing", -EBADMSG},
        {SHARD(COLUMNS, "\"raw_data\":{\"basename\":\"../s\",\"bytes\":9,\"hashes\":{}},", ""), "\"../s\"",
         -EBADMSG},
        {SHARD(COLUMNS, "\"raw_data\":{\"basename\":\"/s\",\"bytes\":9,\"hashes\":{}},", ""), "\"/s\"",
         -EBADMSG},
        {SHARD(COLUMNS, "\"raw_data\":{\"basename\":\"a//s\",\"bytes\":9,\"hashes\":{}},", ""), "\"a//s\"",
         -EBADMSG},
        {SHARD(COLUMNS, "\"raw_data\":{\"basename\":\"a/./s\",\"bytes\":9,\"hashes\":{}},", ""), "a/./s",
         -EBADMSG},
        {SHARD(COLUMNS, "\"raw_data\":{\"basename\":\"a/s\",\"bytes\":9,\"hashes\":{}},", ""), "", 0},
        {SHARD(COLUMNS, "\"raw_data\":{\"basename\":\"s\",\"bytes\":-9,\"hashes\":{}},", ""), "\"bytes\"",
         -EBADMSG},
        {SHARD(COLUMNS, "\"raw_data\":{\"basename\":\"s\",\"bytes\":9,\"hashes\":{\"sha1\":7}},", ""), "hash",
         -EBADMSG},
        {SHARD(COLUMNS, RAW, ",\"compression\":\"zstd:3\""), "go together", -EBADMSG},
        {SHARD("\"column_names\":[],\"column_encodings\":[],\"column_sizes\":[],", RAW, ""), "0 column names",
         -EBADMSG},
        {SHARD("\"column_names\":[\"a\",\"a\"],\"column_encodings\":[\"str\",\"str\"],\"column_sizes\":[null,"
               "null],",
               RAW, ""),
         "two columns", -EBADMSG},
        {SHARD("\"column_names\":[\"a\"],\"column_encodings\":[\"int32\"],\"column_sizes\":[8],", RAW, ""),
         "takes 4 bytes", -EBADMSG},
        {SHARD("\"column_names\":[\"a\"],\"column_encodings\":[\"int32\"],\"column_sizes\":[null],", RAW, ""),
         "takes 4 bytes", -EBADMSG},
        {SHARD("\"column_names\":[\"a\"],\"column_encodings\":[\"new\"],\"column_sizes\":[null],", RAW, ""),
         "", 0},
        {SHARD(COLUMNS, RAW, ",\"samples\":2"), "not JSON", -EBADMSG}, /* said twice */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct mds_index *x = NULL;
        struct err e = {0};
        int r = mds_index_parse(cases[i].json, strlen(cases[i].json), &x, &e);
        if (r != cases[i].rc || !strstr(e.text, cases[i].word))
            fail_msg("case %zu: %d: %s", i, r, e.text);
        if (r == 0)
            mds_index_free(x);
    }
}

static void index_of_several_shards(void **state)
{
    (void)state;
    struct mosaic_entry entries[3] = {{.raw = "shard.00000.mds",
                                       .raw_bytes = 10,
                                       .samples = 1,
                                       .raw_hashes = "\"sha1\": \"ab\", \"xxh64\": \"cd\""},
                                      {.raw = "0/shard.00001.mds",
                                       .zip = "0/shard.00001.mds.zstd",
                                       .raw_bytes = 7,
                                       .zip_bytes = 5,
                                       .samples = 0,
                                       .compression = "zstd:11"},
                                      {.raw = "c", .zip = "c.br", .compression = "br"}};
    struct buf json = {0};
    struct mds_index *x;
    struct err e;
    mosaic_index(&json, every, EVERY, entries, 3);
    if (mds_index_parse(json.p, json.n, &x, &e) < 0)
        fail_msg("%s", e.text);
    assert_int_equal(x->count, 3);
    assert_int_equal(x->shards[0].raw.hash_count, 2);
    assert_string_equal(x->shards[0].raw.hashes[1].algorithm, "xxh64");
    assert_string_equal(x->shards[0].raw.hashes[1].digest, "cd");
    assert_null(x->shards[0].zip.name);
    assert_string_equal(x->shards[1].zip.name, "0/shard.00001.mds.zstd");
    assert_int_equal(x->shards[1].zip.bytes, 5);
    assert_true(mds_is_zstd(x->shards[1].compression) && mds_is_zstd("zstd"));
    assert_false(mds_is_zstd(x->shards[2].compression) || mds_is_zstd("zstandard") || mds_is_zstd(NULL));
    assert_ptr_equal(x->shards[2].columns, x->shards[0].columns); /* kept once */
    assert_int_equal(x->shards[2].column_count, EVERY);
    mds_index_free(x);
    buf_free(&json);
}

/* Files that version 0.13.0 of the library wrote: 20 samples in two shards. */
static void shards_of_the_library_itself(void **state)
{
    (void)state;
    struct buf json = {0}, shard = {0};
    struct mds_index *x;
    struct err e;
    file_read("index.json", &json);
    if (mds_index_parse(json.p, json.n, &x, &e) < 0)
        fail_msg("%s", e.text);
    assert_int_equal(x->count, 2);
    assert_string_equal(x->shards[0].raw.hashes[0].algorithm, "blake2b");
    for (uint32_t i = 0, k = 0; i < 2; i++) {
        struct samples *s;
        buf_reset(&shard);
        file_read(x->shards[i].raw.name, &shard);
        if (build(&x->shards[i], shard.p, shard.n, 77, &s, &e) < 0)
            fail_msg("%s", e.text);
        for (uint64_t j = 0; j < samples_count(s); j++, k++)
            assert_library_sample(s, j, shard.p, k);
        assert_int_equal(k, i ? 20 : samples_count(s));
        samples_free(s);
    }
    mds_index_free(x);
    buf_free(&json);
    buf_free(&shard);
}

/* Bytes at the head of a shard changed: refused, or every promise kept. */
static void random_damage_never_harms(void **state)
{
    (void)state;
    static const uint8_t values[] = {0, 1, 0x7f, 0x80, 0xff};
    struct made m;
    make(&m, every, EVERY, 5);
    for (size_t i = 0; i < m.shard.n; i++)
        for (size_t v = 0; v < sizeof values; v++) {
            uint8_t was = m.shard.p[i];
            struct samples *s;
            struct err e;
            m.shard.p[i] = values[v];
            if (build(&m.index->shards[0], m.shard.p, m.shard.n, 1 + i % 90, &s, &e) == 0) {
                for (uint32_t k = 0; k < samples_count(s); k++)
                    for (uint32_t f = 0; f < samples_fields(s, k); f++) {
                        struct sample_field x = samples_field(s, k, f);
                        assert_true(x.offset <= m.shard.n && x.bytes <= m.shard.n - x.offset);
                    }
                samples_free(s);
            }
            m.shard.p[i] = was;
        }
    made_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_encoding_is_passed_through),
        cmocka_unit_test(fixed_sizes_need_the_table_only),
        cmocka_unit_test(damage_says_what_was_expected_and_found),
        cmocka_unit_test(wrapped_offsets_are_detected),
        cmocka_unit_test(indexes_are_checked),
        cmocka_unit_test(index_of_several_shards),
        cmocka_unit_test(shards_of_the_library_itself),
        cmocka_unit_test(random_damage_never_harms),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
