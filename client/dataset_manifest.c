/* SPDX-License-Identifier: Apache-2.0 */
#include "client/dataset_manifest.h"

#include <stdlib.h>
#include <string.h>

#include "format/base/hash.h"
#include "format/commit.h"

#define TABLE_MAGIC   0x4d44524cu /* "LRDM" read little-endian */
#define TABLE_VERSION 1u
#define TABLE_HEAD    16u
#define ENTRY_FIXED   19u /* beside the name */

uint32_t shard_piece_bytes(uint64_t bytes, uint64_t samples)
{
    uint64_t small = CHUNK_PLAIN_BYTES_MAX / 4, piece = SHARD_PIECE_MIN;
    uint64_t mean = samples ? bytes / samples : bytes;
    if (bytes <= small || mean >= SHARD_SAMPLE_LARGE)
        return CHUNK_PLAIN_BYTES_MAX;
    while (piece < small && 16 * piece <= mean)
        piece *= 2;
    while (bytes / piece >= SHARD_PIECES_MAX)
        piece *= 2;
    return piece > small ? CHUNK_PLAIN_BYTES_MAX : (uint32_t)piece;
}

int shard_table_init(struct shard_table *t, uint32_t count, struct err *e)
{
    *t = (struct shard_table){0};
    if (count == 0)
        return err_set(e, ERR_INVALID, "a dataset needs at least one shard");
    t->shards = calloc(count, sizeof *t->shards);
    if (!t->shards)
        return err_set(e, ERR_NO_MEMORY, "no memory for a table of %u shards", count);
    t->count = count;
    return 0;
}

int shard_table_name(struct shard_table *t, uint32_t i, struct slice name, struct err *e)
{
    check(i < t->count && !t->shards[i].name);
    int rc = run_name_check(name.p, name.n, e);
    if (rc < 0)
        return err_prepend(e, "name of shard %u", i);
    t->shards[i].name = strndup((const char *)name.p, name.n);
    return t->shards[i].name ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for the name of shard %u", i);
}

void shard_table_free(struct shard_table *t)
{
    for (uint32_t i = 0; i < t->count; i++)
        free(t->shards[i].name);
    free(t->shards);
    *t = (struct shard_table){0};
}

uint64_t shard_table_bytes(const struct shard_table *t)
{
    uint64_t n = TABLE_HEAD + 8;
    for (uint32_t i = 0; i < t->count; i++)
        n += ENTRY_FIXED + strlen(t->shards[i].name);
    return n;
}

int shard_table_encode(const struct shard_table *t, struct buf *out, struct err *e)
{
    size_t start = out->n;
    buf_u32(out, TABLE_MAGIC);
    buf_u32(out, TABLE_VERSION);
    buf_u32(out, t->count);
    buf_u32(out, 0);
    for (uint32_t i = 0; i < t->count; i++) {
        const struct shard *s = &t->shards[i];
        buf_put16(out, slice_str(s->name));
        buf_u64(out, s->bytes);
        buf_u64(out, s->samples);
        buf_u8(out, (uint8_t)s->format);
    }
    if (!out->failed)
        buf_u64(out, hash64(out->p + start, out->n - start));
    return buf_end(out, "shard table", e);
}

static int entry_decode(struct rcur *c, struct shard_table *t, uint32_t i, struct err *e)
{
    struct slice name = rcur_take16(c);
    struct shard *s = &t->shards[i];
    s->bytes = rcur_u64(c);
    s->samples = rcur_u64(c);
    uint8_t format = rcur_u8(c);
    if (c->failed)
        return rcur_end(c, "shard table", e);
    if (format >= SHARD_FORMAT_COUNT || s->samples == SAMPLES_UNKNOWN || s->bytes > SEGMENT_BYTES_MAX)
        return err_set(e, ERR_CORRUPT, "shard table: entry %u has a format, size or count that cannot be", i);
    s->format = (enum shard_format)format;
    return shard_table_name(t, i, name, e);
}

int shard_table_decode(const void *p, size_t n, uint32_t world, struct shard_table *out, struct err *e)
{
    *out = (struct shard_table){0};
    struct rcur c = rcur_of(p, n);
    if (rcur_u32(&c) != TABLE_MAGIC)
        return err_set(e, ERR_CORRUPT, "shard table: wrong magic, it is not one");
    uint32_t version = rcur_u32(&c);
    if (version != TABLE_VERSION)
        return err_set(e, ERR_VERSION, "shard table: version %u, this larder knows version %u", version,
                       TABLE_VERSION);
    uint32_t count = rcur_u32(&c), reserved = rcur_u32(&c);
    if (n < TABLE_HEAD + 8 || le64_get((const uint8_t *)p + n - 8) != hash64(p, n - 8))
        return err_set(e, ERR_CORRUPT, "shard table: %zu bytes do not match their checksum", n);
    if (count != world || reserved != 0 || count == 0 || count > WORLD_MAX)
        return err_set(e, ERR_CORRUPT, "shard table: %u entries, the version has %u parts", count, world);
    int rc = shard_table_init(out, count, e);
    for (uint32_t i = 0; rc == 0 && i < count; i++)
        rc = entry_decode(&c, out, i, e);
    rcur_u64(&c); /* the checksum, verified above */
    if (rc == 0)
        rc = rcur_end(&c, "shard table", e);
    if (rc < 0)
        shard_table_free(out);
    return rc;
}
