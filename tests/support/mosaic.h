/* SPDX-License-Identifier: Apache-2.0 */
/* Makes MDS datasets and Megatron token files in memory, right ones and wrong ones, for tests. */
#ifndef LARDER_TESTS_MOSAIC_H
#define LARDER_TESTS_MOSAIC_H

#include "format/base/cursor.h"

struct mosaic_column {
    const char *name, *encoding;
    int64_t bytes; /* -1: each sample says */
};

/* A shard of `samples` samples; fill appends the bytes of one column of one sample. */
typedef void mosaic_fill(void *arg, uint32_t sample, uint32_t column, struct buf *out);
void mosaic_shard(struct buf *out, const struct mosaic_column *columns, uint32_t count, uint32_t samples,
                  mosaic_fill *fill, void *arg);

/* index.json, shard by shard. */
struct mosaic_entry {
    const char *raw, *zip; /* names; zip NULL: none */
    uint64_t raw_bytes, zip_bytes, samples;
    const char *raw_hashes, *zip_hashes; /* what stands between the braces; NULL: nothing */
    const char *compression;             /* NULL: none */
};
void mosaic_index(struct buf *out, const struct mosaic_column *columns, uint32_t count,
                  const struct mosaic_entry *entries, uint32_t shards);

/* An .idx: sequences of so many tokens; borders[b] is the first sequence of document b, and the last one
 * their number. */
void mosaic_idx(struct buf *out, uint8_t code, unsigned width, const int32_t *lengths, uint64_t sequences,
                const int64_t *borders, uint64_t border_count);

#endif
