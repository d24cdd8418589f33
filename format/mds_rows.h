/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds the samples of a raw MDS shard, pushed in any split:
 *
 *   u32 samples N   N + 1 x u32 where sample i begins, and where the last one ends   JSON, passed over
 *   per sample      u32 bytes of each column without a fixed size, then all columns
 *
 * Its columns, samples and length are what index.json says; offsets must ascend and end where the shard does,
 * and each sample must have the bytes that its columns add up to. Offsets that wrapped at 4 GiB are told as
 * such.
 */
#ifndef LARDER_MDS_ROWS_H
#define LARDER_MDS_ROWS_H

#include "format/columns.h"
#include "format/mds.h"

struct mds_rows;

/* shard must live as long as the reader. */
must_check int mds_rows_create(const struct mds_shard *shard, uint64_t shard_bytes, struct mds_rows **out,
                               struct err *e);
void mds_rows_free(struct mds_rows *m); /* NULL allowed */
must_check int mds_rows_push(struct mds_rows *m, const void *p, size_t n, struct err *e);
/* Bytes from here on that need not be pushed; and passing over up to so many. */
uint64_t mds_rows_skippable(const struct mds_rows *m);
void mds_rows_skip(struct mds_rows *m, uint64_t n);
/* All bytes were pushed or passed over. *out is the caller's to free. */
must_check int mds_rows_finish(struct mds_rows *m, struct columns *out, struct err *e);

#endif
