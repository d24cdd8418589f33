/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/golden.h"

#include <stdlib.h>
#include <string.h>

#include "format/codec.h"
#include "format/safetensors.h"
#include "format/samples.h"
#include "format/scratch.h"
#include "format/seal.h"
#include "format/version.h"
#include "gpudirect/chunk_hash.h"
#include "tests/support/mosaic.h"
#include "tests/support/tarball.h"

struct id golden_id(uint8_t seed)
{
    struct id id;
    for (unsigned i = 0; i < ID_BYTES; i++)
        id.bytes[i] = (uint8_t)(seed + i);
    return id;
}

static struct secret *secret_of(uint8_t seed)
{
    uint8_t raw[KEY_BYTES];
    for (unsigned i = 0; i < KEY_BYTES; i++)
        raw[i] = (uint8_t)(seed + i);
    struct secret *s = secret_create(raw, sizeof raw);
    check(s);
    return s;
}

const struct keyring *golden_keyring(void)
{
    static struct kek kek = {.epoch = GOLDEN_KEK_EPOCH};
    static const struct keyring ring = {.keks = &kek, .count = 1};
    if (!kek.key)
        kek.key = secret_of(0x20);
    return &ring;
}

const struct dek *golden_dek(void)
{
    static struct dek dek;
    if (!dek.key) {
        dek.key = secret_of(0x60);
        dek.id = golden_id(0x50);
    }
    return &dek;
}

/* Knuth's MMIX constants; the upper bits are good enough. */
static uint64_t next(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005ull + 1442695040888963407ull;
    return *seed >> 33;
}

/* bf16 as weights have it: sign and mantissa of noise, exponents that halve in number as they fall. */
static void weights_fill(uint8_t *p, uint32_t n, uint64_t seed)
{
    for (uint32_t i = 0; i + 2 <= n; i += 2) {
        uint64_t r = next(&seed);
        unsigned exponent = 121;
        for (uint64_t bits = next(&seed) | 1u << 20; !(bits & 1) && exponent > 0; bits >>= 1)
            exponent--;
        le16_put(p + i, (uint16_t)((r & 1) << 15 | exponent << 7 | (r >> 1 & 0x7f)));
    }
}

uint8_t *golden_plain(uint32_t i, uint32_t *n)
{
    static const uint32_t sizes[GOLDEN_CHUNKS] = {3000,  16384, 4096,     1024, 1000,
                                                  16384, 8192,  4u << 20, 65536};
    static const char words[] = "larder keeps what the cluster learnt; ";
    uint64_t seed = i + 1;
    *n = sizes[i];
    uint8_t *p = calloc(1, *n);
    check(p);
    switch (i) {
    case 0:
        for (uint32_t k = 0; k < *n; k++)
            p[k] = (uint8_t)words[(k + k / 500) % (sizeof words - 1)];
        break;
    case 1:
    case 5: weights_fill(p, *n, seed); break;
    case 3:
        for (uint32_t k = 0; k < *n; k += 4)
            le32_put(p + k, 0x3f800000); /* 1.0 */
        break;
    case 4:
        for (uint32_t k = 0; k < *n; k++)
            p[k] = (uint8_t)next(&seed);
        break;
    case 6:
        for (uint32_t k = 0; k < *n; k += 8)
            le64_put(p + k, next(&seed) % 50257);
        break;
    default: break; /* 2, 7, 8: zeros */
    }
    return p;
}

static const struct {
    enum dtype dtype;
    enum codec_level level;
} golden_chunks[GOLDEN_CHUNKS] = {
    {DTYPE_U8, CODEC_LEVEL_FAST},  {DTYPE_BF16, CODEC_LEVEL_FAST}, {DTYPE_F32, CODEC_LEVEL_FAST},
    {DTYPE_F32, CODEC_LEVEL_FAST}, {DTYPE_U8, CODEC_LEVEL_FAST},   {DTYPE_BF16, CODEC_LEVEL_DENSE},
    {DTYPE_I64, CODEC_LEVEL_FAST}, {DTYPE_U8, CODEC_LEVEL_FAST},   {DTYPE_U8, CODEC_LEVEL_FAST},
};

#define TENSORS 10

const struct index_private *golden_index(void)
{
    static struct tensor t[TENSORS];
    static struct alias a = {.tensor = 0};
    static struct blob b[2] = {{.bytes = 3000}, {.first_chunk = 0}};
    static struct hash128 hashes[GOLDEN_CHUNKS];
    static struct index_private x;
    if (x.tensors)
        return &x;
    t[0] = (struct tensor){.name = slice_str("model/embed"),
                           .dtype = DTYPE_BF16,
                           .dims = 2,
                           .shape = {64, 96},
                           .offsets = {16, 0},
                           .lengths = {32, 96},
                           .first_chunk = 1};
    t[1] = (struct tensor){.name = slice_str("model/norm \xc3\xa9"),
                           .dtype = DTYPE_BF16,
                           .dims = 1,
                           .shape = {5120},
                           .lengths = {5120},
                           .first_chunk = 1,
                           .offset = 6144};
    t[2] = (struct tensor){.name = slice_str("zeros"),
                           .dtype = DTYPE_F32,
                           .dims = 3,
                           .shape = {4, 16, 16},
                           .lengths = {4, 16, 16},
                           .first_chunk = 2};
    t[3] = (struct tensor){.name = slice_str("ones"),
                           .dtype = DTYPE_F32,
                           .dims = 1,
                           .shape = {255},
                           .lengths = {255},
                           .first_chunk = 3};
    t[4] = (struct tensor){.name = slice_str("scalar"), .dtype = DTYPE_F32, .first_chunk = 3, .offset = 1020};
    t[5] = (struct tensor){.name = slice_str("dense"),
                           .dtype = DTYPE_BF16,
                           .dims = 1,
                           .shape = {8192},
                           .lengths = {8192},
                           .first_chunk = 5};
    t[6] = (struct tensor){.name = slice_str("tokens"),
                           .dtype = DTYPE_I64,
                           .dims = 1,
                           .shape = {1024},
                           .lengths = {1024},
                           .first_chunk = 6};
    t[7] = (struct tensor){.name = slice_str("large"),
                           .dtype = DTYPE_U8,
                           .dims = 1,
                           .shape = {(4 << 20) + 65536},
                           .lengths = {(4 << 20) + 65536},
                           .first_chunk = 7};
    t[8] = (struct tensor){
        .name = slice_str("empty"), .dtype = DTYPE_F64, .dims = 2, .shape = {2, 0}, .lengths = {2, 0}};
    t[9] = (struct tensor){.name = slice_str("wide"),
                           .dtype = DTYPE_I64,
                           .dims = 2,
                           .shape = {1ull << 33, 4},
                           .offsets = {1ull << 32, 1},
                           .lengths = {5, 3},
                           .first_chunk = 6,
                           .offset = 128};
    for (uint32_t i = 0; i < GOLDEN_CHUNKS; i++) {
        uint32_t n;
        uint8_t *p = golden_plain(i, &n);
        hashes[i] = hash128(p, n);
        for (uint32_t k = 0; k < TENSORS; k++) {
            check(tensor_check(&t[k], &t[k].bytes, NULL) == 0);
            if (t[k].first_chunk == i && t[k].bytes > 0 && !index_large(t[k].bytes))
                t[k].plain_hash = hash128(p + t[k].offset, t[k].bytes);
        }
        free(p);
    }
    a.name = slice_str("model/head");
    b[0].name = slice_str("notes.txt");
    b[1].name = slice_str("nothing");
    x = (struct index_private){.tensors = t,
                               .tensor_count = TENSORS,
                               .aliases = &a,
                               .alias_count = 1,
                               .blobs = b,
                               .blob_count = 2,
                               .plain_hashes = hashes,
                               .chunk_count = GOLDEN_CHUNKS};
    return &x;
}

void golden_header(struct segment_header *h)
{
    *h = (struct segment_header){.version = SEGMENT_VERSION,
                                 .suite = SUITE_AES256GCM_HKDF_SHA256,
                                 .segment_id = golden_id(0x10),
                                 .run_id = golden_id(0x20),
                                 .attempt = golden_id(0x30),
                                 .step = 9000,
                                 .rank = 1,
                                 .world = 2,
                                 .tenant = GOLDEN_TENANT};
    for (unsigned i = 0; i < SALT_BYTES; i++)
        h->salt[i] = (uint8_t)(0x80 + i);
}

static void chunk_append(struct buf *out, struct chunk_entry *c, uint32_t number, const struct seal *seal,
                         struct seal_state *ss, struct codec_state *cs, bool tiny)
{
    uint32_t n;
    uint8_t *plain = golden_plain(number, &n), *payload = malloc(codec_payload_max(n) + TAG_BYTES);
    size_t bytes;
    enum codec codec;
    check(payload);
    enum dtype dtype = golden_chunks[number].dtype;
    enum codec_level level = tiny ? CODEC_LEVEL_OFF : golden_chunks[number].level;
    check(codec_encode(cs, level, dtype, plain, n, payload, &bytes, &codec, NULL, NULL) == 0);
    *c = (struct chunk_entry){.plain_bytes = n, .codec = (uint8_t)codec, .dtype = (uint8_t)dtype};
    if (codec != CODEC_ZERO) {
        check(seal_chunk(seal, ss, number, n, codec, dtype, payload, bytes, payload, NULL, NULL) == 0);
        c->offset = out->n;
        c->stored_bytes = (uint32_t)(bytes + TAG_BYTES);
        c->stored_hash = hash128(payload, c->stored_bytes);
        buf_put(out, payload, c->stored_bytes);
        buf_zeros(out, block_align(out->n) - out->n);
    }
    free(payload);
    free(plain);
}

void golden_segment(struct buf *out, bool tiny)
{
    struct segment_header h;
    struct seal *seal;
    struct seal_state *ss = seal_state_create();
    struct codec_state *cs = codec_state_create();
    struct chunk_entry chunks[GOLDEN_CHUNKS];
    struct index_private x = *golden_index();
    struct buf public = {0}, private = {0};
    uint8_t block[BLOCK_BYTES], digest[SHA256_BYTES];
    uint32_t count = tiny ? 1 : GOLDEN_CHUNKS;
    check(ss && cs && out->n == 0);
    golden_header(&h);
    check(seal_create(golden_dek(), &h, count, &seal, NULL) == 0);
    segment_header_encode(&h, block);
    buf_put(out, block, sizeof block);
    for (uint32_t i = 0; i < count; i++)
        chunk_append(out, &chunks[i], i, seal, ss, cs, tiny);
    if (tiny)
        x.tensor_count = x.alias_count = 0, x.chunk_count = 1; /* its one chunk holds a blob */
    check(index_public_encode(chunks, count, &public, NULL) == 0);
    check(index_private_encode(&x, &private, NULL) == 0);
    check(buf_reserve(&private, TAG_BYTES));
    sha256(public.p, public.n, digest);
    check(seal_index(seal, ss, digest, private.p, private.n, private.p, NULL) == 0);
    private.n += TAG_BYTES;
    struct segment_trailer t = {.version = SEGMENT_VERSION,
                                .segment_id = h.segment_id,
                                .index_offset = out->n,
                                .index_bytes = public.n + private.n,
                                .index_public_bytes = public.n,
                                .chunks = count};
    buf_put(out, public.p, public.n);
    buf_put(out, private.p, private.n);
    sha256(out->p + t.index_offset, t.index_bytes, t.index_digest);
    buf_zeros(out, block_align(out->n) - out->n);
    t.file_bytes = out->n + BLOCK_BYTES;
    check(seal_trailer(seal, ss, &t, NULL) == 0);
    segment_trailer_encode(&t, block);
    buf_put(out, block, sizeof block);
    check(!out->failed);
    buf_free(&public);
    buf_free(&private);
    seal_free(seal);
    seal_state_free(ss);
    codec_state_free(cs);
}

void golden_commit(struct commit *c)
{
    static struct commit_part parts[2];
    for (uint32_t i = 0; i < 2; i++) {
        parts[i] = (struct commit_part){
            .rank = i, .segment = golden_id((uint8_t)(0x10 - i)), .segment_bytes = 65536 + 4096 * i};
        memset(parts[i].index_digest, (int)(0xa0 + i), SHA256_BYTES);
    }
    *c = (struct commit){.kind = RUN_CHECKPOINTS,
                         .run_id = golden_id(0x20),
                         .run = slice_str("llama 7b \xc3\xa9"),
                         .step = 9000,
                         .sequence = 4,
                         .attempt = golden_id(0x30),
                         .attempt_number = 2,
                         .world = 2,
                         .parts = parts,
                         .plain_bytes = 4329660,
                         .server_time_ns = GOLDEN_TIME_NS,
                         .loader = slice_str("\1position"),
                         .labels = SLICE("\2\0lr\4\0"
                                         "1e-4\1\0k\0\0",
                                         15)};
}

void golden_shard(struct buf *out)
{
    tarball_header(out, '5', "set/", 0);
    tarball_file(out, TARBALL_USTAR, "set/a.v1.txt", "one", 3);
    tarball_file(out, TARBALL_USTAR, "set/a.cls", "7", 1);
    tarball_file(out, TARBALL_PAX, "set/b.txt", "", 0);
    tarball_pax(out, 'x', "path", "c.txt");
    tarball_file(out, TARBALL_GNU, "set/short", "three", 5);
    tarball_end(out);
}

static const struct mosaic_column golden_columns[] = {{"id", "int32", 4}, {"text", "str", -1}};

static void column_fill(void *arg, uint32_t sample, uint32_t column, struct buf *out)
{
    (void)arg;
    if (column == 0)
        buf_u32(out, 100 + sample);
    else
        buf_put(out, "a text", 2 * sample);
}

static void mds_make(struct buf *shard, struct buf *json)
{
    struct buf own = {0};
    shard = shard ? shard : &own;
    mosaic_shard(shard, golden_columns, 2, 3, column_fill, NULL);
    struct mosaic_entry entry = {.raw = "shard.mds", .raw_bytes = shard->n, .samples = 3};
    if (json)
        mosaic_index(json, golden_columns, 2, &entry, 1);
    buf_free(&own);
}

static void idx_make(struct buf *out)
{
    static const int32_t lengths[] = {3, 0, 5, 2};
    static const int64_t borders[] = {0, 1, 1, 4};
    mosaic_idx(out, 8, 2, lengths, 4, borders, 4);
}

static void index_make(const struct samples_source *source, const struct buf *bytes, struct buf *out)
{
    struct samples_builder *b;
    struct samples *s;
    check(samples_builder_create(source, &b, NULL) == 0);
    check(samples_builder_push(b, bytes->p, bytes->n, NULL) == 0);
    check(samples_builder_finish(b, &s, NULL) == 0);
    check(samples_encode(s, out, NULL) == 0);
    samples_free(s);
    samples_builder_free(b);
}

static void samples_make(enum shard_format format, struct token_window window, struct buf *out)
{
    struct buf bytes = {0}, json = {0};
    struct mds_index *index = NULL;
    struct samples_source source = {.format = format, .shard = "golden", .window = window};
    if (format == SHARD_TAR)
        golden_shard(&bytes);
    else if (format == SHARD_TOKENS)
        idx_make(&bytes);
    else
        mds_make(&bytes, &json);
    if (json.n) {
        check(mds_index_parse(json.p, json.n, &index, NULL) == 0);
        source.mds = &index->shards[0];
    }
    source.idx_bytes = bytes.n;
    source.shard_bytes = format == SHARD_TOKENS ? GOLDEN_BIN_BYTES : bytes.n;
    index_make(&source, &bytes, out);
    mds_index_free(index);
    buf_free(&bytes);
    buf_free(&json);
}

static void safetensors_make(struct buf *out)
{
    struct safetensors_entry x[2] = {
        {.name = "w", .dtype = DTYPE_BF16, .dims = 2, .shape = {2, 3}, .begin = 0, .end = 12},
        {.name = "\"s\"", .dtype = DTYPE_F32, .begin = 12, .end = 16},
    };
    char *pairs[] = {"format", "pt"};
    struct safetensors st = {.entries = x, .count = 2, .metadata = pairs, .metadata_pairs = 1};
    check(safetensors_write(&st, out, NULL) == 0);
}

/* Three tensors, the second without bytes. */
static void scratch_make(struct buf *out)
{
    static const uint8_t bytes[2][37] = {"six words of bf16 and a tail\0\1\2",
                                         "of a box, eight bytes each: 24"};
    const struct tensor tensors[3] = {
        {.name = slice_str("a/b"), .dtype = DTYPE_U8, .dims = 1, .shape = {37}, .lengths = {37}, .bytes = 37},
        {.name = slice_str("none"), .dtype = DTYPE_F32, .dims = 2, .shape = {3, 0}, .lengths = {3, 0}},
        {.name = slice_str("box"),
         .dtype = DTYPE_F64,
         .dims = 1,
         .shape = {9},
         .offsets = {5},
         .lengths = {3},
         .bytes = 24}};
    struct scratch_header h = {.table_offset = 3 * BLOCK_BYTES, .tensors = 3};
    struct buf table = {0};
    uint8_t block[BLOCK_BYTES], hash[SCRATCH_HASH_BYTES];
    buf_zeros(out, 3 * BLOCK_BYTES);
    for (unsigned i = 0; i < 3; i++) {
        struct chunk_hash x = chunk_hash(bytes[i / 2], tensors[i].bytes);
        le64_put(hash, x.lo);
        le64_put(hash + 8, x.hi);
        scratch_item_encode(&table, &(struct scratch_item){.tensor = tensors[i], .hashes = hash});
        memcpy(out->p + (i / 2 + 1) * BLOCK_BYTES, bytes[i / 2], tensors[i].bytes);
    }
    h.table_bytes = table.n;
    h.table_hash = hash64(table.p, table.n);
    scratch_header_encode(&h, block);
    memcpy(out->p, block, sizeof block);
    buf_put(out, table.p, table.n);
    buf_free(&table);
}

const char *golden_small(unsigned i, struct buf *out)
{
    static const char *const names[] = {"envelope",
                                        "commit",
                                        "store",
                                        "tenant",
                                        "run",
                                        "attempt",
                                        "pin",
                                        "bad",
                                        "samples",
                                        "safetensors",
                                        "shard.tar",
                                        "samples-mds",
                                        "samples-documents",
                                        "samples-windows",
                                        "shard.mds",
                                        "index.json",
                                        "tokens.idx",
                                        "scratch"};
    struct commit c;
    struct record_store store = {.store_id = golden_id(1), .created_ns = GOLDEN_TIME_NS};
    struct record_tenant tenant = {.name = GOLDEN_TENANT,
                                   .quota_bytes = 1ull << 40,
                                   .weight = 2,
                                   .residency = "eu",
                                   .created_ns = GOLDEN_TIME_NS};
    struct record_run run = {
        .kind = RUN_DATASET, .run_id = golden_id(0x20), .name = "books", .created_ns = GOLDEN_TIME_NS};
    struct record_attempt attempt = {.run_id = golden_id(0x20),
                                     .attempt = golden_id(0x30),
                                     .number = 2,
                                     .world = 2,
                                     .created_ns = GOLDEN_TIME_NS};
    struct record_mark mark = {.run_id = golden_id(0x20),
                               .kind = i == 6 ? MARK_PIN : MARK_BAD,
                               .sequence = 4,
                               .reason = "kept for the paper",
                               .created_ns = GOLDEN_TIME_NS};
    uint8_t salt[SALT_BYTES] = {1, 2, 3}, envelope[ENVELOPE_BYTES];
    if (i >= sizeof names / sizeof *names)
        return NULL;
    if (!out)
        return names[i];
    struct id run_id = golden_id(0x20);
    switch (i) {
    case 0:
        check(envelope_wrap(&golden_keyring()->keks[0], GOLDEN_TENANT, &run_id, golden_dek(), salt, envelope,
                            NULL) == 0);
        buf_put(out, envelope, sizeof envelope);
        break;
    case 1:
        golden_commit(&c);
        check(commit_encode(&c, out, NULL) == 0);
        break;
    case 2: check(record_store_encode(&store, out, NULL) == 0); break;
    case 3: check(record_tenant_encode(&tenant, out, NULL) == 0); break;
    case 4: check(record_run_encode(&run, out, NULL) == 0); break;
    case 5: check(record_attempt_encode(&attempt, out, NULL) == 0); break;
    case 6:
    case 7: check(record_mark_encode(&mark, out, NULL) == 0); break;
    case 8: samples_make(SHARD_TAR, (struct token_window){0}, out); break;
    case 9: safetensors_make(out); break;
    case 10: golden_shard(out); break;
    case 11: samples_make(SHARD_MDS, (struct token_window){0}, out); break;
    case 12: samples_make(SHARD_TOKENS, (struct token_window){0}, out); break;
    case 13: samples_make(SHARD_TOKENS, (struct token_window){4, 1}, out); break;
    case 14: mds_make(out, NULL); break;
    case 15: mds_make(NULL, out); break;
    case 16: idx_make(out); break;
    case 17: scratch_make(out); break;
    }
    check(!out->failed);
    return names[i];
}
