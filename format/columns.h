/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the fields of samples lie that stand one behind the other, all with the same columns: rows of an MDS
 * shard, documents of a token file. A sample is a head, then its columns in order; columns have a fixed size,
 * or one that each sample says. Kept are 4 bytes for each such size and a place for every 16 samples.
 */
#ifndef LARDER_COLUMNS_H
#define LARDER_COLUMNS_H

#include "format/base/cursor.h"

#define COLUMN_VARIABLE UINT64_MAX

struct column {
    char *name, *type; /* owned by whoever made the column */
    uint64_t bytes;    /* COLUMN_VARIABLE: told by each sample */
};

struct columns { /* zeroed is empty */
    struct column *columns;
    uint32_t count, variable; /* of these, without a fixed size */
    uint32_t unit;            /* bytes that 1 in a size stands for */
    uint64_t base;            /* where sample 0 begins */
    uint64_t head;            /* bytes of a sample before its first column */
    uint64_t fixed;           /* bytes of the head and of the columns of fixed size */
    uint64_t samples, end;    /* so far; end: where the next one begins */
    struct buf sizes;         /* u32 each, `variable` for each sample */
    struct buf places;        /* u64 each: where sample 16 k begins */
};

/* Copies the columns. ERR_LIMIT if those of fixed size alone cannot be counted. */
must_check int columns_init(struct columns *c, const struct column *columns, uint32_t count, uint32_t unit,
                            uint64_t head, uint64_t base, struct err *e);
void columns_free(struct columns *c);
/* One more sample; sizes: `variable` of them. ERR_CORRUPT beyond 64 bits. Where nothing varies, any number of
 * samples may be added at once. */
must_check int columns_add(struct columns *c, const uint32_t *sizes, struct err *e);
must_check int columns_add_fixed(struct columns *c, uint64_t samples, struct err *e);

/* A column of a sample. */
struct column_place {
    uint64_t offset, bytes;
};
struct column_place columns_at(const struct columns *c, uint64_t sample, uint32_t column);
/* Size number i of a sample, in units. */
uint32_t columns_size(const struct columns *c, uint64_t sample, uint32_t i);

#endif
