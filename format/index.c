/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Encoding and decoding of the index. The check over all parts of a checkpoint is in index_set.c.
 *
 * The private part is authenticated before it is decoded here, yet nothing is taken on trust: a count is
 * bounded by the bytes that are left before memory is taken for it.
 */
#include "format/index.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/utf8.h"
#include "format/version.h"

#define UNSIGNED(x) ((unsigned long long)(x))

/* Chunk entry. */
enum {
    C_OFFSET = 0,
    C_STORED = 8,
    C_PLAIN = 12,
    C_CODEC = 16,
    C_DTYPE = 17,
    C_RESERVED = 18,
    C_HASH = 24,
};
static_assert(C_HASH + HASH128_BYTES == CHUNK_ENTRY_BYTES, "40 bytes");

/* Head of the public part. */
enum {
    P_CHECKSUM = 0, /* XXH3-64 of all of the public part behind it */
    P_MAGIC = 8,
    P_VERSION = 16,
    P_COUNT = 20,
    P_RESERVED = 24,
    PUBLIC_HEAD_BYTES = 32,
};
static const char public_magic[8] = {'L', 'A', 'R', 'D', 'I', 'N', 'D', 'X'};

/* Fewest bytes that an item of the private part takes: bounds the counts. */
enum {
    PRIVATE_HEAD_BYTES = 24,
    TENSOR_BYTES_MIN = 2 + 1 + 1 + 1 + 4 + 4,
    ALIAS_BYTES_MIN = 2 + 1 + 4,
    BLOB_BYTES_MIN = 2 + 1 + 8 + 4 + 4,
};

void chunk_entry_encode(const struct chunk_entry *c, uint8_t out[CHUNK_ENTRY_BYTES])
{
    memset(out, 0, CHUNK_ENTRY_BYTES);
    le64_put(out + C_OFFSET, c->offset);
    le32_put(out + C_STORED, c->stored_bytes);
    le32_put(out + C_PLAIN, c->plain_bytes);
    out[C_CODEC] = c->codec;
    out[C_DTYPE] = c->dtype;
    memcpy(out + C_HASH, &c->stored_hash, HASH128_BYTES);
}

static int chunk_entry_check(const struct chunk_entry *c, uint32_t number, struct err *e)
{
    static const struct hash128 none;
    if (c->codec >= CODEC_COUNT)
        return err_set(e, ERR_CORRUPT, "chunk %u: codec %u; expected one below %d", number, c->codec,
                       CODEC_COUNT);
    if (!dtype_known(c->dtype))
        return err_set(e, ERR_CORRUPT, "chunk %u: dtype %u is not one that this build knows", number,
                       c->dtype);
    if (c->plain_bytes == 0 || c->plain_bytes > CHUNK_PLAIN_BYTES_MAX)
        return err_set(e, ERR_CORRUPT, "chunk %u: %u plain bytes; expected 1 to %u", number, c->plain_bytes,
                       CHUNK_PLAIN_BYTES_MAX);
    if (c->stored_bytes > CHUNK_STORED_BYTES_MAX)
        return err_set(e, ERR_CORRUPT, "chunk %u: %u stored bytes; at most %u are possible", number,
                       c->stored_bytes, CHUNK_STORED_BYTES_MAX);
    if ((c->stored_bytes == 0) != (c->codec == CODEC_ZERO))
        return err_set(e, ERR_CORRUPT,
                       "chunk %u: codec %s with %u stored bytes; only \"zero\" stores nothing", number,
                       codec_name(c->codec), c->stored_bytes);
    if (c->stored_bytes == 0 && (c->offset != 0 || memcmp(&c->stored_hash, &none, sizeof none) != 0))
        return err_set(e, ERR_CORRUPT, "chunk %u: stores nothing, yet has an offset or a hash", number);
    if (c->stored_bytes > 0 &&
        (c->offset < BLOCK_BYTES || c->offset % BLOCK_BYTES != 0 || c->offset > SEGMENT_BYTES_MAX))
        return err_set(e, ERR_CORRUPT, "chunk %u: offset %llu; expected a multiple of %u from %u on", number,
                       UNSIGNED(c->offset), BLOCK_BYTES, BLOCK_BYTES);
    return 0;
}

int chunk_entry_decode(const uint8_t in[CHUNK_ENTRY_BYTES], uint32_t number, struct chunk_entry *out,
                       struct err *e)
{
    struct chunk_entry c = {
        .offset = le64_get(in + C_OFFSET),
        .stored_bytes = le32_get(in + C_STORED),
        .plain_bytes = le32_get(in + C_PLAIN),
        .codec = in[C_CODEC],
        .dtype = in[C_DTYPE],
    };
    memcpy(&c.stored_hash, in + C_HASH, HASH128_BYTES);
    for (size_t i = C_RESERVED; i < C_HASH; i++)
        if (in[i] != 0)
            return err_set(e, ERR_CORRUPT, "chunk %u: reserved byte %zu of its entry is not zero", number, i);
    int r = chunk_entry_check(&c, number, e);
    if (r == 0)
        *out = c;
    return r;
}

size_t index_public_bytes(uint32_t count)
{
    return PUBLIC_HEAD_BYTES + (size_t)count * CHUNK_ENTRY_BYTES;
}

int index_public_encode(const struct chunk_entry *chunks, uint32_t count, struct buf *out, struct err *e)
{
    if (count > SEGMENT_CHUNKS_MAX)
        return err_set(e, ERR_LIMIT, "%u chunks in one segment; at most %u are possible", count,
                       SEGMENT_CHUNKS_MAX);
    size_t start = out->n, bytes = index_public_bytes(count);
    buf_zeros(out, bytes);
    int r = buf_end(out, "the chunk table", e);
    if (r < 0)
        return r;
    uint8_t *p = out->p + start;
    memcpy(p + P_MAGIC, public_magic, sizeof public_magic);
    le32_put(p + P_VERSION, SEGMENT_VERSION);
    le32_put(p + P_COUNT, count);
    for (uint32_t i = 0; i < count; i++) {
        r = chunk_entry_check(&chunks[i], i, e);
        if (r < 0)
            return r;
        chunk_entry_encode(&chunks[i], p + PUBLIC_HEAD_BYTES + (size_t)i * CHUNK_ENTRY_BYTES);
    }
    le64_put(p + P_CHECKSUM, hash64(p + P_MAGIC, bytes - P_MAGIC));
    return 0;
}

static int public_head_check(const uint8_t *p, size_t n, uint32_t *count, struct err *e)
{
    if (n < PUBLIC_HEAD_BYTES || memcmp(p + P_MAGIC, public_magic, sizeof public_magic) != 0)
        return err_set(e, ERR_CORRUPT,
                       "chunk table: %zu bytes that do not begin with a head of %d bytes and magic \"%.8s\"",
                       n, PUBLIC_HEAD_BYTES, public_magic);
    if (le32_get(p + P_VERSION) != SEGMENT_VERSION)
        return err_set(e, ERR_VERSION, "chunk table: version %u, this build knows %u only",
                       le32_get(p + P_VERSION), SEGMENT_VERSION);
    if (le64_get(p + P_CHECKSUM) != hash64(p + P_MAGIC, n - P_MAGIC))
        return err_set(e, ERR_CORRUPT,
                       "chunk table: its checksum does not match its %zu bytes; it is damaged", n);
    *count = le32_get(p + P_COUNT);
    if (*count > SEGMENT_CHUNKS_MAX || n != PUBLIC_HEAD_BYTES + (size_t)*count * CHUNK_ENTRY_BYTES)
        return err_set(e, ERR_CORRUPT, "chunk table: %u chunks do not fit its %zu bytes", *count, n);
    if (le64_get(p + P_RESERVED) != 0)
        return err_set(e, ERR_CORRUPT, "chunk table: reserved bytes at offset %d are not zero", P_RESERVED);
    return 0;
}

int index_public_decode(const void *p, size_t n, uint64_t data_end, struct chunk_entry **chunks,
                        uint32_t *count, struct err *e)
{
    const uint8_t *in = p;
    uint32_t found = 0;
    int r = public_head_check(in, n, &found, e);
    if (r < 0)
        return r;
    struct chunk_entry *table = malloc((found + 1ull) * sizeof *table);
    if (!table)
        return err_set(e, ERR_NO_MEMORY, "no memory for a table of %u chunks", found);
    uint64_t used = BLOCK_BYTES; /* the header */
    for (uint32_t i = 0; r == 0 && i < found; i++) {
        r = chunk_entry_decode(in + PUBLIC_HEAD_BYTES + (size_t)i * CHUNK_ENTRY_BYTES, i, &table[i], e);
        if (r < 0 || table[i].stored_bytes == 0)
            continue;
        uint64_t end = table[i].offset + table[i].stored_bytes; /* < 2^45: both were checked */
        if (table[i].offset < used || end > data_end)
            r = err_set(e, ERR_CORRUPT,
                        "chunk %u: stored at %llu to %llu; expected behind %llu and before the index at %llu",
                        i, UNSIGNED(table[i].offset), UNSIGNED(end), UNSIGNED(used), UNSIGNED(data_end));
        used = end;
    }
    if (r < 0) {
        free(table);
        return r;
    }
    *chunks = table;
    *count = found;
    return 0;
}

static int name_check(struct slice name, size_t max, const char *what, struct err *e)
{
    char q[160];
    if (name.n == 0 || name.n > max)
        return err_set(e, ERR_INVALID, "%s \"%s\": its name has %zu bytes; 1 to %zu are allowed", what,
                       err_quote(q, sizeof q, name.p, name.n), name.n, max);
    if (!utf8_valid(name.p, name.n))
        return err_set(e, ERR_INVALID, "%s \"%s\": its name holds a NUL or is not UTF-8; rename it", what,
                       err_quote(q, sizeof q, name.p, name.n));
    return 0;
}

/* Number of elements of a shape: 0 if any length is 0, whatever the others are. */
static bool elements_of(const uint64_t *lengths, uint32_t dims, uint64_t *elements)
{
    uint64_t n = 1;
    bool fits = true;
    for (uint32_t i = 0; i < dims; i++) {
        if (lengths[i] == 0) {
            *elements = 0;
            return true;
        }
        fits = fits && !mul_overflows(n, lengths[i], &n);
    }
    *elements = n;
    return fits;
}

static int tensor_box_check(const struct tensor *t, struct err *e)
{
    char q[160];
    for (uint32_t i = 0; i < t->dims; i++) {
        uint64_t end;
        if (add_overflows(t->offsets[i], t->lengths[i], &end) || end > t->shape[i])
            return err_set(
                e, ERR_INVALID,
                "tensor \"%s\": its box goes from %llu for %llu in dimension %u, which has %llu only",
                err_quote(q, sizeof q, t->name.p, t->name.n), UNSIGNED(t->offsets[i]),
                UNSIGNED(t->lengths[i]), i, UNSIGNED(t->shape[i]));
    }
    unsigned pack = dtype_pack(t->dtype);
    if (pack == 1)
        return 0;
    uint32_t last = t->dims - 1;
    if (t->dims == 0 || t->shape[last] % pack != 0 || t->offsets[last] % pack != 0 ||
        t->lengths[last] % pack != 0)
        return err_set(
            e, ERR_INVALID,
            "tensor \"%s\": %s packs %u elements together, so its last dimension must be a multiple "
            "of %u in shape, offset and length",
            err_quote(q, sizeof q, t->name.p, t->name.n), dtype_name(t->dtype), pack, pack);
    return 0;
}

int tensor_check(const struct tensor *t, uint64_t *bytes, struct err *e)
{
    char q[160];
    int r = name_check(t->name, TENSOR_NAME_BYTES_MAX, "tensor", e);
    if (r < 0)
        return r;
    if (!dtype_known(t->dtype) || t->dims > TENSOR_DIMS_MAX)
        return err_set(e, ERR_INVALID,
                       "tensor \"%s\": dtype %u with %u dimensions; expected a known dtype and "
                       "at most %u dimensions",
                       err_quote(q, sizeof q, t->name.p, t->name.n), (unsigned)t->dtype, t->dims,
                       TENSOR_DIMS_MAX);
    r = tensor_box_check(t, e);
    if (r < 0)
        return r;
    /* The global shape must be countable too: sums over all parts rely on it. */
    uint64_t global, elements, global_bytes;
    if (!elements_of(t->shape, t->dims, &global) || !elements_of(t->lengths, t->dims, &elements) ||
        dtype_bytes(t->dtype, global, &global_bytes, NULL) < 0 ||
        dtype_bytes(t->dtype, elements, bytes, NULL) < 0)
        return err_set(e, ERR_LIMIT, "tensor \"%s\": its shape holds more bytes than 64 bits can count",
                       err_quote(q, sizeof q, t->name.p, t->name.n));
    return 0;
}

/* Are `bytes` bytes of width `dtype`, said to lie at (first, offset), really there? */
static int place_check(uint64_t bytes, enum dtype dtype, uint32_t first, uint32_t offset,
                       const struct chunk_entry *chunks, uint32_t count, struct err *e)
{
    if (bytes == 0)
        return first == 0 && offset == 0
                   ? 0
                   : err_set(e, ERR_CORRUPT, "has no bytes, yet a place in chunk %u", first);
    uint64_t need = index_large(bytes) ? (bytes - 1) / CHUNK_PLAIN_BYTES_MAX + 1 : 1;
    if (first >= count || need > count - first)
        return err_set(e, ERR_CORRUPT, "lies in %llu chunks from %u on, and there are %u", UNSIGNED(need),
                       first, count);
    for (uint64_t i = first; i < first + need; i++)
        if (dtype_bits(chunks[i].dtype) != dtype_bits(dtype))
            return err_set(e, ERR_CORRUPT, "is %s, and lies in chunk %llu of %s", dtype_name(dtype),
                           UNSIGNED(i), dtype_name(chunks[i].dtype));
    if (!index_large(bytes)) {
        if ((uint64_t)offset + bytes > chunks[first].plain_bytes)
            return err_set(e, ERR_CORRUPT, "ends at byte %llu of chunk %u, which has %u",
                           UNSIGNED(offset + bytes), first, chunks[first].plain_bytes);
        return 0;
    }
    if (offset != 0)
        return err_set(e, ERR_CORRUPT, "has chunks of its own, yet begins at byte %u of the first", offset);
    for (uint64_t i = 0, left = bytes; i < need; i++) {
        uint32_t want = left < CHUNK_PLAIN_BYTES_MAX ? (uint32_t)left : CHUNK_PLAIN_BYTES_MAX;
        if (chunks[first + i].plain_bytes != want)
            return err_set(e, ERR_CORRUPT, "needs %u bytes in chunk %llu, which has %u", want,
                           UNSIGNED(first + i), chunks[first + i].plain_bytes);
        left -= want;
    }
    return 0;
}

/* A set of names, open addressing, at most half full. Each slot holds the upper half of a name's hash and,
 * below it, the name's number plus one: names are looked at only where the hashes agree. */
struct names {
    uint64_t *slots;
    size_t mask;
    const struct slice **items;
    uint32_t count;
};
#define NAMES_AHEAD 16u /* whose slots are on their way while one is looked at */

static int names_create(struct names *s, size_t most, struct err *e)
{
    size_t size = 16;
    while (size < 2 * most)
        size *= 2;
    s->slots = calloc(size, sizeof *s->slots);
    s->items = malloc((most + 1) * sizeof *s->items);
    s->mask = size - 1;
    s->count = 0;
    return s->slots && s->items ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for a set of %zu names", most);
}

static void names_free(struct names *s)
{
    free(s->slots);
    free(s->items);
}

/* Keeps a pointer to name. ERR_INVALID if it is there already. */
static int names_add_hashed(struct names *s, const struct slice *name, uint64_t hash, const char *what,
                            struct err *e)
{
    const uint64_t upper = hash >> 32 << 32;
    size_t i = hash & s->mask;
    for (; s->slots[i]; i = (i + 1) & s->mask)
        if (s->slots[i] >> 32 == hash >> 32 && slice_eq(*s->items[(uint32_t)s->slots[i] - 1], *name)) {
            char q[160];
            return err_set(e, ERR_INVALID, "%s \"%s\": the name is used twice in one part", what,
                           err_quote(q, sizeof q, name->p, name->n));
        }
    s->items[s->count++] = name;
    s->slots[i] = upper | s->count;
    return 0;
}

static int names_add(struct names *s, const struct slice *name, const char *what, struct err *e)
{
    return names_add_hashed(s, name, hash64(name->p, name->n), what, e);
}

/* Of tensors there may be a million: memory is asked for before it is needed. */
static int names_add_tensors(struct names *s, const struct tensor *t, uint32_t n, struct err *e)
{
    uint64_t ahead[NAMES_AHEAD];
    for (uint32_t i = 0; i < n + NAMES_AHEAD; i++) {
        uint64_t *hash = &ahead[i % NAMES_AHEAD];
        int r = i < NAMES_AHEAD ? 0 : names_add_hashed(s, &t[i - NAMES_AHEAD].name, *hash, "tensor", e);
        if (r < 0)
            return r;
        if (i < n) {
            *hash = hash64(t[i].name.p, t[i].name.n);
            __builtin_prefetch(&s->slots[*hash & s->mask], 1);
        }
    }
    return 0;
}

static int alias_check(const struct index_private *x, uint32_t i, struct err *e)
{
    int r = name_check(x->aliases[i].name, TENSOR_NAME_BYTES_MAX, "alias", e);
    if (r == 0 && x->aliases[i].tensor >= x->tensor_count)
        r = err_set(e, ERR_INVALID, "alias %u names tensor %u; there are %u", i, x->aliases[i].tensor,
                    x->tensor_count);
    return r;
}

/* Names of tensors and aliases are one space, those of blobs another. */
static int names_check(const struct index_private *x, struct err *e)
{
    struct names tensors = {0}, blobs = {0};
    int r = names_create(&tensors, (size_t)x->tensor_count + x->alias_count, e);
    if (r == 0)
        r = names_create(&blobs, x->blob_count, e);
    if (r == 0)
        r = names_add_tensors(&tensors, x->tensors, x->tensor_count, e);
    for (uint32_t i = 0; r == 0 && i < x->alias_count; i++) {
        r = alias_check(x, i, e);
        if (r == 0)
            r = names_add(&tensors, &x->aliases[i].name, "alias", e);
    }
    for (uint32_t i = 0; r == 0 && i < x->blob_count; i++) {
        r = name_check(x->blobs[i].name, NAME_BYTES_MAX, "blob", e);
        if (r == 0)
            r = names_add(&blobs, &x->blobs[i].name, "blob", e);
    }
    names_free(&tensors);
    names_free(&blobs);
    return r;
}

static int counts_check(const struct index_private *x, struct err *e)
{
    if (x->tensor_count > TENSORS_MAX || x->alias_count > TENSORS_MAX || x->blob_count > BLOBS_MAX ||
        x->chunk_count > SEGMENT_CHUNKS_MAX)
        return err_set(
            e, ERR_LIMIT,
            "part of %u tensors, %u aliases, %u blobs and %u chunks; at most %u, %u, %u and %u are "
            "possible: save it in several parts",
            x->tensor_count, x->alias_count, x->blob_count, x->chunk_count, TENSORS_MAX, TENSORS_MAX,
            BLOBS_MAX, SEGMENT_CHUNKS_MAX);
    return 0;
}

size_t index_private_head_bytes(uint32_t chunk_count)
{
    return PRIVATE_HEAD_BYTES + (size_t)chunk_count * HASH128_BYTES;
}

static void head_put(uint8_t *p, const struct index_private *x)
{
    const uint32_t fields[] = {SEGMENT_VERSION, x->chunk_count, x->tensor_count,
                               x->alias_count,  x->blob_count,  0};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        le32_put(p + 4 * i, fields[i]);
    memset(p + PRIVATE_HEAD_BYTES, 0, (size_t)x->chunk_count * HASH128_BYTES);
    if (x->plain_hashes)
        index_private_hash(x->plain_hashes, x->chunk_count, p);
}

void index_private_hash(const struct hash128 *plain_hashes, uint32_t chunk_count, uint8_t *p)
{
    if (chunk_count > 0)
        memcpy(p + PRIVATE_HEAD_BYTES, plain_hashes, (size_t)chunk_count * HASH128_BYTES);
}

static void rest_put(struct buf *b, const struct index_private *x)
{
    for (uint32_t i = 0; i < x->alias_count; i++) {
        buf_put16(b, x->aliases[i].name);
        buf_u32(b, x->aliases[i].tensor);
    }
    for (uint32_t i = 0; i < x->blob_count; i++) {
        buf_put16(b, x->blobs[i].name);
        buf_u64(b, x->blobs[i].bytes);
        buf_u32(b, x->blobs[i].first_chunk);
        buf_u32(b, x->blobs[i].offset);
    }
}

size_t index_private_rest_bytes(const struct index_private *x)
{
    size_t n = 0;
    for (uint32_t i = 0; i < x->alias_count; i++)
        n += 2 + x->aliases[i].name.n + 4;
    for (uint32_t i = 0; i < x->blob_count; i++)
        n += 2 + x->blobs[i].name.n + 16;
    return n;
}

static int end_put(const struct buf *out, size_t start, struct err *e)
{
    int r = buf_end(out, "the index", e);
    if (r == 0 && out->n - start > INDEX_BYTES_MAX)
        r = err_set(e, ERR_LIMIT, "index of %zu bytes; at most %u are possible: save it in several parts",
                    out->n - start, INDEX_BYTES_MAX);
    return r;
}

int index_private_finish(const struct index_private *x, size_t room, size_t records_at, struct buf *out,
                         struct err *e)
{
    size_t before = room + index_private_head_bytes(x->chunk_count), records = out->n - records_at;
    int r = counts_check(x, e);
    if (r < 0)
        return r;
    if (before > records_at)
        buf_zeros(out, before - records_at);
    if (!out->failed) {
        if (before != records_at)
            memmove(out->p + before, out->p + records_at, records);
        out->n = before + records;
        memset(out->p, 0, before);
        head_put(out->p + room, x);
    }
    rest_put(out, x);
    return end_put(out, room, e);
}

int index_private_encode(const struct index_private *x, struct buf *out, struct err *e)
{
    static const struct hash128 none;
    int r = counts_check(x, e);
    for (uint32_t i = 0; r == 0 && i < x->tensor_count; i++) {
        uint64_t bytes;
        r = tensor_check(&x->tensors[i], &bytes, e);
        check(r < 0 || bytes == x->tensors[i].bytes);
    }
    if (r == 0)
        r = names_check(x, e);
    if (r < 0)
        return r;
    size_t start = out->n;
    buf_zeros(out, index_private_head_bytes(x->chunk_count));
    if (!out->failed)
        head_put(out->p + start, x);
    for (uint32_t i = 0; i < x->tensor_count; i++)
        record_put(out, &x->tensors[i], memcmp(&x->tensors[i].plain_hash, &none, sizeof none) != 0);
    rest_put(out, x);
    return end_put(out, start, e);
}

static int head_take(struct rcur *c, uint32_t chunk_count, struct index_private *x, struct err *e)
{
    uint32_t version = rcur_u32(c);
    x->chunk_count = rcur_u32(c);
    x->tensor_count = rcur_u32(c);
    x->alias_count = rcur_u32(c);
    x->blob_count = rcur_u32(c);
    rcur_zeros(c, 4);
    if (!c->failed && version != SEGMENT_VERSION)
        return err_set(e, ERR_VERSION, "index: version %u, this build knows %u only", version,
                       SEGMENT_VERSION);
    if (c->failed || x->chunk_count != chunk_count || counts_check(x, NULL) < 0 ||
        (uint64_t)x->chunk_count * HASH128_BYTES + (uint64_t)x->tensor_count * TENSOR_BYTES_MIN +
                (uint64_t)x->alias_count * ALIAS_BYTES_MIN + (uint64_t)x->blob_count * BLOB_BYTES_MIN >
            c->left)
        return err_set(e, ERR_CORRUPT,
                       "index: its head is damaged, or its %u chunks (%u in the chunk table), %u tensors, %u "
                       "aliases and %u blobs do not fit the %zu bytes behind it",
                       x->chunk_count, chunk_count, x->tensor_count, x->alias_count, x->blob_count, c->left);
    return 0;
}

/* Arrays in falling order of alignment, in one allocation. */
static int private_own(struct index_private *x, struct err *e)
{
    size_t aliases = x->alias_count * sizeof *x->aliases, blobs = x->blob_count * sizeof *x->blobs;
    size_t hashes = x->chunk_count * sizeof *x->plain_hashes, places = x->tensor_count * sizeof *x->places;
    uint8_t *p = malloc(aliases + blobs + hashes + places + 1);
    if (!p)
        return err_set(e, ERR_NO_MEMORY, "no memory for an index of %u tensors", x->tensor_count);
    x->owned = p;
    x->aliases = (struct alias *)p;
    x->blobs = (struct blob *)(p + aliases);
    x->plain_hashes = (struct hash128 *)(p + aliases + blobs);
    x->places = (uint32_t *)(p + aliases + blobs + hashes);
    return 0;
}
static_assert(_Alignof(struct alias) == 8 && _Alignof(struct blob) == 8 && _Alignof(struct hash128) <= 8 &&
                  sizeof(struct hash128) % 8 == 0,
              "arrays may follow each other");
static_assert(INDEX_BYTES_MAX <= UINT32_MAX, "places fit");

uint64_t tensor_bytes(const struct tensor *t)
{
    uint64_t elements, bytes = 0;
    check(elements_of(t->lengths, t->dims, &elements) && dtype_bytes(t->dtype, elements, &bytes, NULL) == 0);
    return bytes;
}

const struct tensor *index_tensor(const struct index_private *x, uint32_t i, struct tensor *room)
{
    check(i < x->tensor_count);
    if (x->tensors)
        return &x->tensors[i];
    record_get(x->stored + x->places[i], room);
    room->plain_hash = record_hash(x->stored + x->places[i]);
    room->bytes = tensor_bytes(room);
    return room;
}

struct slice index_tensor_name(const struct index_private *x, uint32_t i)
{
    check(i < x->tensor_count);
    if (x->tensors)
        return x->tensors[i].name;
    return record_name(x->stored + x->places[i]);
}

bool index_tensor_is(const struct index_private *x, uint32_t i, struct slice name, enum dtype dtype,
                     uint32_t dims, const uint64_t *shape, struct place *out)
{
    uint64_t elements;
    check(i < x->tensor_count);
    if (!x->tensors) {
        if (!record_is(x->stored + x->places[i], name, dtype, dims, shape, out))
            return false;
    } else {
        const struct tensor *t = &x->tensors[i];
        bool same = t->dtype == dtype && t->dims == dims && slice_eq(t->name, name);
        for (uint32_t k = 0; same && k < dims; k++)
            same = t->shape[k] == shape[k] && t->lengths[k] == shape[k];
        if (!same)
            return false;
        *out = (struct place){.chunk = t->first_chunk, .offset = t->offset};
    }
    check(elements_of(shape, dims, &elements) && dtype_bytes(dtype, elements, &out->bytes, NULL) == 0);
    return true;
}

static int tensor_place_check(const struct index_private *x, struct tensor *t,
                              const struct chunk_entry *chunks, struct err *e)
{
    static const struct hash128 none;
    char q[160];
    struct err why;
    if (tensor_check(t, &t->bytes, &why) < 0)
        return err_set(e, ERR_CORRUPT, "index: %s", why.text);
    if ((t->bytes == 0 || index_large(t->bytes)) && memcmp(&t->plain_hash, &none, sizeof none) != 0)
        return err_set(e, ERR_CORRUPT, "index: tensor \"%s\" has a hash that only small ones have",
                       err_quote(q, sizeof q, t->name.p, t->name.n));
    int r = place_check(t->bytes, t->dtype, t->first_chunk, t->offset, chunks, x->chunk_count, e);
    return r < 0 ? err_prepend(e, "index: tensor \"%s\"", err_quote(q, sizeof q, t->name.p, t->name.n)) : 0;
}

/* As tensor_place_check, of a record of those that record_take_small knows. */
static bool small_is_good(const struct index_private *x, const uint8_t *record,
                          const struct record_form *form, const struct place *p,
                          const struct chunk_entry *chunks)
{
    if (form->name_bytes == 0 || form->name_bytes > TENSOR_NAME_BYTES_MAX || p->chunk >= x->chunk_count)
        return false;
    const struct chunk_entry *c = &chunks[p->chunk];
    return p->offset + p->bytes <= c->plain_bytes &&
           (c->dtype == form->dtype || dtype_unit(c->dtype) == form->unit) &&
           utf8_valid(record + 2, form->name_bytes);
}

static int tensors_take(struct rcur *c, struct index_private *x, const struct chunk_entry *chunks,
                        struct err *e)
{
    struct tensor t;
    struct place place;
    struct record_form form = {0}; /* of the one before */
    for (uint32_t i = 0; i < x->tensor_count && !c->failed; i++) {
        const uint8_t *record = c->p;
        x->places[i] = (uint32_t)(record - x->stored);
        size_t n = record_take_small(record, c->left, &form, &place);
        if (n > 0 && small_is_good(x, record, &form, &place, chunks)) {
            rcur_skip(c, n);
            continue;
        }
        n = record_take(record, c->left, &t);
        if (n == 0)
            return err_set(e, ERR_CORRUPT, "index: tensor %u of %u is cut off, or not written as it must be",
                           i, x->tensor_count);
        (void)rcur_take(c, n);
        int r = tensor_place_check(x, &t, chunks, e);
        if (r < 0)
            return r;
    }
    return 0;
}

static void rest_take(struct rcur *c, struct index_private *x)
{
    for (uint32_t i = 0; i < x->alias_count; i++) {
        x->aliases[i].name = rcur_take16(c);
        x->aliases[i].tensor = rcur_u32(c);
    }
    for (uint32_t i = 0; i < x->blob_count; i++) {
        x->blobs[i].name = rcur_take16(c);
        x->blobs[i].bytes = rcur_u64(c);
        x->blobs[i].first_chunk = rcur_u32(c);
        x->blobs[i].offset = rcur_u32(c);
    }
}

/* All names but those of tensors, which tensor_check saw. */
static int rest_check(const struct index_private *x, const struct chunk_entry *chunks, struct err *e)
{
    char q[160];
    struct err why;
    for (uint32_t i = 0; i < x->alias_count; i++)
        if (alias_check(x, i, &why) < 0)
            return err_set(e, ERR_CORRUPT, "index: %s", why.text);
    for (uint32_t i = 0; i < x->blob_count; i++) {
        struct blob *b = &x->blobs[i];
        if (name_check(b->name, NAME_BYTES_MAX, "blob", &why) < 0)
            return err_set(e, ERR_CORRUPT, "index: %s", why.text);
        int r = place_check(b->bytes, DTYPE_U8, b->first_chunk, b->offset, chunks, x->chunk_count, e);
        if (r < 0)
            return err_prepend(e, "index: blob \"%s\"", err_quote(q, sizeof q, b->name.p, b->name.n));
    }
    return 0;
}

int index_private_view(const void *p, size_t n, const struct chunk_entry *chunks, uint32_t count,
                       struct index_private *out, struct err *e)
{
    struct index_private x = {.stored = p, .stored_bytes = n};
    struct rcur c = rcur_of(p, n);
    int r = n > INDEX_BYTES_MAX
                ? err_set(e, ERR_CORRUPT, "index of %zu bytes; at most %u are possible", n, INDEX_BYTES_MAX)
                : head_take(&c, count, &x, e);
    if (r == 0)
        r = private_own(&x, e);
    if (r < 0)
        return r;
    for (uint32_t i = 0; i < x.chunk_count; i++)
        rcur_copy(&c, &x.plain_hashes[i], HASH128_BYTES);
    r = tensors_take(&c, &x, chunks, e);
    if (r == 0)
        rest_take(&c, &x);
    if (r == 0)
        r = rcur_end(&c, "index", e);
    if (r == 0)
        r = rest_check(&x, chunks, e);
    if (r < 0)
        index_private_free(&x);
    else
        *out = x;
    return r;
}

int index_private_expand(struct index_private *x, struct err *e)
{
    struct err why;
    struct tensor *tensors = malloc(x->tensor_count * sizeof *tensors + 1);
    if (!tensors)
        return err_set(e, ERR_NO_MEMORY, "no memory for an index of %u tensors", x->tensor_count);
    for (uint32_t i = 0; i < x->tensor_count; i++) {
        tensors[i] = (struct tensor){0};
        (void)index_tensor(x, i, &tensors[i]);
    }
    x->tensors = x->expanded = tensors;
    if (names_check(x, &why) == 0)
        return 0;
    return err_set(e, why.class == ERR_NO_MEMORY ? why.class : ERR_CORRUPT, "index: %s", why.text);
}

int index_private_decode(const void *p, size_t n, const struct chunk_entry *chunks, uint32_t count,
                         struct index_private *out, struct err *e)
{
    struct index_private x;
    uint8_t *copy = malloc(n + 1);
    if (!copy)
        return err_set(e, ERR_NO_MEMORY, "no memory for an index of %zu bytes", n);
    if (n > 0)
        memcpy(copy, p, n);
    int r = index_private_view(copy, n, chunks, count, &x, e);
    if (r < 0) {
        free(copy);
        return r;
    }
    x.copy = copy;
    r = index_private_expand(&x, e);
    if (r < 0)
        index_private_free(&x);
    else
        *out = x;
    return r;
}

void index_private_free(struct index_private *x)
{
    if (!x)
        return;
    free(x->owned);
    free(x->expanded);
    free(x->copy);
    *x = (struct index_private){0};
}
