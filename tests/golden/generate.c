/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes the golden files of this build's format version, those broken on purpose, and seeds for the fuzzers:
 *
 *   make build/tests/golden/generate && build/tests/golden/generate
 *
 * Run at the root of the tree. Files that are there already are left as they are: they were written by the
 * build that first had the format, and that is what they are for.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format/codec.h"
#include "format/version.h"
#include "tests/support/golden.h"
#include "tests/support/mosaic.h"
#include "tests/support/tarball.h"

static void put(const char *folder, const char *name, const void *p, size_t n)
{
    char path[512];
    for (const char *slash = folder; (slash = strchr(slash, '/')); slash++) {
        snprintf(path, sizeof path, "%.*s", (int)(slash - folder), folder);
        mkdir(path, 0777);
    }
    mkdir(folder, 0777);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0666);
    if (fd < 0 && errno == EEXIST)
        return;
    if (fd < 0 || write(fd, p, n) != (ssize_t)n || close(fd) < 0) {
        perror(path);
        exit(1);
    }
    printf("%s: %zu bytes\n", path, n);
}

static void block_resum(uint8_t *block)
{
    le64_put(block, hash64(block + 8, BLOCK_BYTES - 8));
}

static void record_resum(struct buf *b)
{
    struct hash128 h = hash128(b->p + HASH128_BYTES, b->n - HASH128_BYTES);
    memcpy(b->p, h.bytes, sizeof h);
}

/* Each tells in its name what is wrong with it; tests/unit/format/golden.c says what reading it must give. */
static void broken_segments(const char *folder)
{
    struct buf b = {0};
    golden_segment(&b, true);
    uint8_t *end = b.p + b.n - BLOCK_BYTES, keep;
    put(folder, "segment-cut", b.p, b.n - BLOCK_BYTES);

    le32_put(b.p + 16, SEGMENT_VERSION + 1);
    block_resum(b.p);
    put(folder, "segment-newer", b.p, b.n);
    le32_put(b.p + 16, SEGMENT_VERSION);
    block_resum(b.p);

    struct {
        const char *name;
        uint8_t *at;
        bool resum;
    } flips[] = {
        {"segment-header-damaged", b.p + 100, false},
        {"segment-header-reserved", b.p + 3000, true},
        {"segment-chunk-damaged", b.p + 5000, false},
        {"segment-index-public-damaged", b.p + 8192 + 33, false},
        {"segment-index-sealed-damaged", b.p + 8192 + 80, false},
        {"segment-trailer-damaged", end + 50, false},
        {"segment-trailer-tag", end + 104, true},
    };
    for (size_t i = 0; i < sizeof flips / sizeof *flips; i++) {
        keep = *flips[i].at;
        *flips[i].at ^= 0x40;
        if (flips[i].resum)
            block_resum(flips[i].at < end ? b.p : end);
        put(folder, flips[i].name, b.p, b.n);
        *flips[i].at = keep;
        block_resum(b.p);
        block_resum(end);
    }
    buf_free(&b);
}

static void broken_records(const char *folder)
{
    struct buf b = {0};
    struct commit c;
    golden_commit(&c);
    check(commit_encode(&c, &b, NULL) == 0);
    put(folder, "commit-cut", b.p, b.n - 9);
    b.p[60] ^= 1;
    put(folder, "commit-damaged", b.p, b.n);
    b.p[60] ^= 1;
    le32_put(b.p + 28, COMMIT_VERSION + 1);
    record_resum(&b);
    put(folder, "commit-newer", b.p, b.n);
    le32_put(b.p + 28, COMMIT_VERSION);
    le32_put(b.p + 44, 3); /* a world of three with two parts */
    record_resum(&b);
    put(folder, "commit-world", b.p, b.n);
    buf_free(&b);
    golden_small(0, &b);
    b.p[200] ^= 1;
    put(folder, "envelope-damaged", b.p, b.n);
    buf_free(&b);
    golden_small(8, &b);
    b.p[b.n - 1] = 0x7f; /* the length of the last field */
    record_resum(&b);
    put(folder, "samples-outside", b.p, b.n);
    buf_free(&b);
    golden_shard(&b);
    put(folder, "shard-cut.tar", b.p, b.n - 1024);
    buf_free(&b);
}

#define CORPUS "tests/fuzz/corpus/"

static void codec_seeds(void)
{
    static const enum dtype dtypes[] = {DTYPE_U8, DTYPE_BF16, DTYPE_F32, DTYPE_F32,
                                        DTYPE_U8, DTYPE_BF16, DTYPE_I64};
    struct codec_state *s = codec_state_create();
    for (uint32_t i = 0; i < 7; i++)
        for (int level = 0; level < 3; level++) {
            uint32_t n;
            uint8_t *plain = golden_plain(i, &n), *out = malloc(codec_payload_max(n) + 4);
            size_t bytes;
            enum codec codec;
            char name[32];
            n = i == 0 ? 3000 : 1000;
            check(s && out &&
                  codec_encode(s, level, dtypes[i], plain, n, out + 4, &bytes, &codec, NULL, NULL) == 0);
            out[0] = (uint8_t)codec;
            out[1] = (uint8_t)dtypes[i];
            le16_put(out + 2, (uint16_t)n);
            snprintf(name, sizeof name, "%s-%u-%d", codec_name(codec), i, level);
            put(CORPUS "codec", name, out, bytes + 4);
            free(plain);
            free(out);
        }
    codec_state_free(s);
}

static void tar_seeds(void)
{
    struct buf b = {0};
    buf_u8(&b, 7);
    golden_shard(&b);
    put(CORPUS "tar", "shard", b.p, b.n);
    buf_reset(&b);
    buf_u8(&b, 200);
    tarball_pax(&b, 'g', "comment", "c");
    tarball_pax(&b, 'x', "size", "5");
    tarball_header(&b, 'L', "././@LongLink", 9);
    tarball_data(&b, "long.txt", 9);
    tarball_header(&b, '0', "short.txt", 0);
    tarball_data(&b, "12345", 5);
    tarball_end(&b);
    put(CORPUS "tar", "pax-size", b.p, b.n);
    buf_reset(&b);
    buf_u8(&b, 1);
    tarball_header(&b, '0', "huge", 1ull << 40);
    put(CORPUS "tar", "huge", b.p, b.n);
    buf_free(&b);
}

static void column_fill(void *arg, uint32_t sample, uint32_t column, struct buf *out)
{
    const struct mosaic_column *c = arg;
    for (int64_t i = 0, n = c[column].bytes < 0 ? sample * 3 : c[column].bytes; i < n; i++)
        buf_u8(out, (uint8_t)(sample + column));
}

static void mds_seeds(void)
{
    struct mosaic_column columns[] = {{"id", "int32", 4}, {"text", "str", -1}, {"wav", "ndarray", -1}};
    struct buf b = {0}, index = {0};
    for (uint32_t count = 1; count <= 3; count += 2) {
        buf_reset(&b);
        buf_u8(&b, 9);
        buf_u8(&b, (uint8_t)(count - 1));
        for (uint32_t i = 0; i < count; i++)
            buf_u8(&b, columns[i].bytes < 0 ? 255 : (uint8_t)columns[i].bytes);
        mosaic_shard(&b, columns, count, 5, column_fill, columns);
        put(CORPUS "mds_shard", count == 1 ? "fixed" : "mixed", b.p, b.n);
    }
    struct mosaic_entry entries[] = {
        {.raw = "shard.00000.mds", .raw_bytes = 900, .samples = 5, .raw_hashes = "\"sha1\": \"00ff\""},
        {.raw = "1/shard.00000.mds",
         .zip = "1/s.zstd",
         .raw_bytes = 9,
         .zip_bytes = 5,
         .compression = "zstd:3"}};
    mosaic_index(&index, columns, 3, entries, 2);
    put(CORPUS "mds_index", "two", index.p, index.n);
    buf_free(&b);
    buf_free(&index);
}

static void tokens_seeds(void)
{
    static const int32_t lengths[] = {3, 0, 5, 2};
    static const int64_t borders[] = {0, 1, 1, 4};
    static const struct {
        const char *name;
        uint16_t window, extra;
    } seeds[] = {{"documents", 0, 0}, {"windows", 4, 1}};
    struct buf b = {0};
    for (int i = 0; i < 2; i++) {
        buf_reset(&b);
        buf_u8(&b, 40);
        buf_u16(&b, seeds[i].window);
        buf_u16(&b, seeds[i].extra);
        buf_u32(&b, 20);
        mosaic_idx(&b, 8, 2, lengths, 4, borders, 4);
        put(CORPUS "tokens", seeds[i].name, b.p, b.n);
    }
    buf_free(&b);
}

/* Sample indexes, with the length of their shard before them. */
static void samples_seeds(void)
{
    struct buf b = {0}, shard = {0}, mds = {0};
    golden_shard(&shard);
    golden_small(14, &mds);
    const struct {
        const char *name;
        unsigned golden;
        uint64_t shard_bytes;
    } seeds[] = {{"shard", 8, shard.n},
                 {"mds", 11, mds.n},
                 {"documents", 12, GOLDEN_BIN_BYTES},
                 {"windows", 13, GOLDEN_BIN_BYTES}};
    for (size_t i = 0; i < sizeof seeds / sizeof *seeds; i++) {
        buf_reset(&b);
        buf_u64(&b, seeds[i].shard_bytes);
        golden_small(seeds[i].golden, &b);
        put(CORPUS "samples", seeds[i].name, b.p, b.n);
    }
    buf_free(&b);
    buf_free(&shard);
    buf_free(&mds);
}

/* The sealed part of a small index, opened. */
static void index_seeds(void)
{
    struct chunk_entry c[2] = {{.offset = 4096, .stored_bytes = 60, .plain_bytes = 44, .dtype = DTYPE_F32},
                               {.plain_bytes = 9, .codec = CODEC_ZERO, .dtype = DTYPE_U8}};
    struct hash128 hashes[5] = {{{1}}};
    struct tensor t[3] = {
        {.name = slice_str("a"),
         .dtype = DTYPE_F32,
         .dims = 2,
         .shape = {4, 5},
         .offsets = {2, 0},
         .lengths = {2, 5},
         .bytes = 40},
        {.name = slice_str("big"),
         .dtype = DTYPE_BF16,
         .dims = 1,
         .shape = {3 << 20},
         .lengths = {3 << 20},
         .bytes = 6 << 20,
         .first_chunk = 1},
        {.name = slice_str("none"), .dtype = DTYPE_F64, .dims = 1},
    };
    struct alias a = {.name = slice_str("tied"), .tensor = 1};
    struct blob blob = {.name = slice_str("notes"), .bytes = 14, .first_chunk = 4};
    struct index_private x = {.tensors = t,
                              .tensor_count = 3,
                              .aliases = &a,
                              .alias_count = 1,
                              .blobs = &blob,
                              .blob_count = 1,
                              .plain_hashes = hashes,
                              .chunk_count = 5};
    struct buf b = {0};
    check(index_private_encode(&x, &b, NULL) == 0);
    put(CORPUS "index_private", "five", b.p, b.n);
    buf_reset(&b);
    check(index_public_encode(c, 2, &b, NULL) == 0);
    put(CORPUS "index_public", "two", b.p, b.n);
    buf_reset(&b);
    check(index_public_encode(c, 0, &b, NULL) == 0);
    put(CORPUS "index_public", "none", b.p, b.n);
    buf_free(&b);
}

static void seeds(void)
{
    struct buf b = {0};
    golden_segment(&b, true);
    put(CORPUS "segment", "header", b.p, 256);
    put(CORPUS "segment", "trailer", b.p + b.n - BLOCK_BYTES, 256);
    for (unsigned i = 1; i < 8; i++) {
        buf_reset(&b);
        const char *name = golden_small(i, &b);
        put(CORPUS "records", name, b.p, b.n);
    }
    buf_reset(&b);
    golden_small(17, &b);
    memmove(b.p + 64, b.p + 3 * BLOCK_BYTES, b.n - 3 * BLOCK_BYTES); /* header's fields and table */
    put(CORPUS "scratch", "three", b.p, 64 + b.n - 3 * BLOCK_BYTES);
    static const char json[] =
        "\x10\0\0\0{\"__metadata__\":{\"a\":\"b\"},\"w\":{\"dtype\":\"BF16\",\"shape\":[2,3],"
        "\"data_offsets\":[0,12]},\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[12,16]}}";
    put(CORPUS "safetensors", "two", json, sizeof json - 1);
    buf_free(&b);
    codec_seeds();
    tar_seeds();
    mds_seeds();
    tokens_seeds();
    samples_seeds();
    index_seeds();
}

int main(void)
{
    struct buf b = {0};
    golden_segment(&b, false);
    put("tests/golden/v1", "segment", b.p, b.n);
    for (unsigned i = 0; golden_small(i, NULL); i++) {
        buf_reset(&b);
        const char *name = golden_small(i, &b);
        put("tests/golden/v1", name, b.p, b.n);
    }
    buf_free(&b);
    broken_segments("tests/golden/v1-broken");
    broken_records("tests/golden/v1-broken");
    seeds();
    return 0;
}
