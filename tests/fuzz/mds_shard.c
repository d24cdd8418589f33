/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MDS shards out of any bytes, with any columns: the first byte says in what pieces they are pushed, the
 * second how many columns there are, one byte for each its size (above 200: none of its own). What follows is
 * the shard, and the index says of it what it says of itself.
 */
#include <stdio.h>
#include <string.h>

#include "tests/fuzz/found.h"

#define COLUMNS_MAX 7u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char names[COLUMNS_MAX][8], type[] = "bytes";
    struct column columns[COLUMNS_MAX];
    struct rcur c = rcur_of(data, n);
    size_t piece = 1 + rcur_u8(&c) * 3u;
    uint32_t count = 1 + rcur_u8(&c) % COLUMNS_MAX;
    for (uint32_t i = 0; i < count; i++) {
        uint8_t bytes = rcur_u8(&c);
        snprintf(names[i], sizeof names[i], "c%u", i);
        columns[i] =
            (struct column){.name = names[i], .type = type, .bytes = bytes > 200 ? COLUMN_VARIABLE : bytes};
    }
    if (c.failed || c.left < 4)
        return 0;
    struct mds_shard shard = {
        .raw.bytes = c.left, .samples = le32_get(c.p), .columns = columns, .column_count = count};
    struct samples_source source = {
        .format = SHARD_MDS, .shard = "fuzz", .shard_bytes = c.left, .mds = &shard};
    found_both_ways(&source, c.p, piece);
    return 0;
}
