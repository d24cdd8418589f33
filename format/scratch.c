/* SPDX-License-Identifier: Apache-2.0 */
#include "format/scratch.h"

#include <stdlib.h>
#include <string.h>

#define UNSIGNED(x) ((unsigned long long)(x))

enum {
    AT_CHECKSUM = 0, /* XXH3-64 of the block's bytes behind it */
    AT_MAGIC = 8,
    AT_VERSION = 16,
    AT_TENSORS = 20,
    AT_TABLE = 24,
    AT_TABLE_BYTES = 32,
    AT_TABLE_HASH = 40,
    AT_RESERVED = 48,
};
static const char magic[8] = {'L', 'A', 'R', 'D', 'S', 'C', 'R', 'A'};

#define ROW_BYTES_MIN (2u + 1u + 1u + 1u) /* a name of one byte, dtype, dims */

/* ---- header ---- */

void scratch_header_encode(const struct scratch_header *h, uint8_t out[BLOCK_BYTES])
{
    memset(out, 0, BLOCK_BYTES);
    memcpy(out + AT_MAGIC, magic, sizeof magic);
    le32_put(out + AT_VERSION, SCRATCH_VERSION);
    le32_put(out + AT_TENSORS, h->tensors);
    le64_put(out + AT_TABLE, h->table_offset);
    le64_put(out + AT_TABLE_BYTES, h->table_bytes);
    le64_put(out + AT_TABLE_HASH, h->table_hash);
    le64_put(out + AT_CHECKSUM, hash64(out + AT_MAGIC, BLOCK_BYTES - AT_MAGIC));
}

bool scratch_is(const void *p, size_t n)
{
    return n >= AT_MAGIC + sizeof magic && memcmp((const uint8_t *)p + AT_MAGIC, magic, sizeof magic) == 0;
}

static int fields_check(const struct scratch_header *h, struct err *e)
{
    if (h->table_offset < BLOCK_BYTES || h->table_offset % BLOCK_BYTES != 0 ||
        h->table_offset > INT64_MAX / 2)
        return err_set(e, ERR_CORRUPT,
                       "scratch file: its table is said to begin at byte %llu, which is no border",
                       UNSIGNED(h->table_offset));
    if (h->tensors > TENSORS_MAX || h->table_bytes > INDEX_BYTES_MAX ||
        (uint64_t)h->tensors * ROW_BYTES_MIN > h->table_bytes)
        return err_set(
            e, ERR_CORRUPT,
            "scratch file: %u tensors in a table of %llu bytes; at most %u and %u, and %u bytes each",
            h->tensors, UNSIGNED(h->table_bytes), TENSORS_MAX, INDEX_BYTES_MAX, ROW_BYTES_MIN);
    return 0;
}

int scratch_header_decode(const uint8_t in[BLOCK_BYTES], struct scratch_header *out, struct err *e)
{
    if (!scratch_is(in, BLOCK_BYTES))
        return err_set(e, ERR_CORRUPT, "it does not begin as a scratch file of larder does");
    if (le32_get(in + AT_VERSION) != SCRATCH_VERSION)
        return err_set(e, ERR_VERSION, "scratch file of version %u, this build knows %u only",
                       le32_get(in + AT_VERSION), SCRATCH_VERSION);
    if (le64_get(in + AT_CHECKSUM) != hash64(in + AT_MAGIC, BLOCK_BYTES - AT_MAGIC))
        return err_set(e, ERR_CORRUPT,
                       "scratch file: the checksum of its header does not match; the header is damaged");
    for (size_t i = AT_RESERVED; i < BLOCK_BYTES; i++)
        if (in[i] != 0)
            return err_set(e, ERR_CORRUPT, "scratch file: reserved byte at offset %zu is not zero", i);
    struct scratch_header h = {.table_offset = le64_get(in + AT_TABLE),
                               .table_bytes = le64_get(in + AT_TABLE_BYTES),
                               .tensors = le32_get(in + AT_TENSORS),
                               .table_hash = le64_get(in + AT_TABLE_HASH)};
    *out = h;
    return fields_check(&h, e);
}

/* ---- table ---- */

int scratch_next(uint64_t place, uint64_t bytes, uint64_t *next, struct err *e)
{
    uint64_t end;
    if (add_overflows(place, bytes, &end) || end > INT64_MAX / 2)
        return err_set(e, ERR_LIMIT, "tensors of more than 2^62 bytes in one scratch file");
    *next = (end + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
    return 0;
}

void scratch_item_encode(struct buf *b, const struct scratch_item *item)
{
    const struct tensor *t = &item->tensor;
    buf_put16(b, t->name);
    buf_u8(b, (uint8_t)t->dtype);
    buf_u8(b, (uint8_t)t->dims);
    for (uint32_t i = 0; i < t->dims; i++) {
        buf_u64(b, t->shape[i]);
        buf_u64(b, t->offsets[i]);
        buf_u64(b, t->lengths[i]);
    }
    buf_put(b, item->hashes, (size_t)scratch_chunks(t->bytes) * SCRATCH_HASH_BYTES);
}

static int item_take(struct rcur *c, uint64_t *place, struct scratch_item *out, struct err *e)
{
    struct tensor *t = &out->tensor;
    struct err why;
    *out = (struct scratch_item){.place = *place};
    t->name = rcur_take16(c);
    t->dtype = rcur_u8(c);
    t->dims = rcur_u8(c);
    for (uint32_t i = 0; i < t->dims && i < TENSOR_DIMS_MAX; i++) {
        t->shape[i] = rcur_u64(c);
        t->offsets[i] = rcur_u64(c);
        t->lengths[i] = rcur_u64(c);
    }
    if (c->failed)
        return err_set(e, ERR_CORRUPT, "the table ends in the middle of a tensor");
    if (tensor_check(t, &t->bytes, &why) < 0)
        return err_set(e, ERR_CORRUPT, "%s", why.text);
    uint64_t chunks = scratch_chunks(t->bytes);
    if (chunks > c->left / SCRATCH_HASH_BYTES)
        return err_set(e, ERR_CORRUPT, "the table ends in the middle of a tensor's hashes");
    out->hashes = rcur_take(c, (size_t)chunks * SCRATCH_HASH_BYTES).p;
    if (scratch_next(*place, t->bytes, place, &why) < 0)
        return err_set(e, ERR_CORRUPT, "%s", why.text);
    return 0;
}

int scratch_table_decode(const void *p, size_t n, const struct scratch_header *h, struct scratch_item **items,
                         struct err *e)
{
    struct rcur c = rcur_of(p, n);
    uint64_t place = BLOCK_BYTES;
    int rc = 0;
    if (n != h->table_bytes || hash64(p, n) != h->table_hash)
        return err_set(e, ERR_CORRUPT,
                       "scratch file: the hash of its table does not match; the table is damaged");
    struct scratch_item *all = calloc((size_t)h->tensors + 1, sizeof *all);
    if (!all)
        return err_set(e, ERR_NO_MEMORY, "no memory for the table of %u tensors", h->tensors);
    for (uint32_t i = 0; i < h->tensors && rc == 0; i++)
        rc = item_take(&c, &place, &all[i], e);
    if (rc == 0)
        rc = rcur_end(&c, "table", e);
    if (rc == 0 && place != h->table_offset)
        rc = err_set(e, ERR_CORRUPT, "its tensors end at byte %llu, and the table begins at %llu",
                     UNSIGNED(place), UNSIGNED(h->table_offset));
    if (rc < 0) {
        free(all);
        return err_prepend(e, "scratch file");
    }
    *items = all;
    return 0;
}
