/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the golden files of format version 1 hold: fixed keys, ids and contents, made anew by these functions,
 * so that a test can tell what decoding them must give. The files themselves, in tests/golden/v1, are never
 * made anew: a build that cannot read them has broken its promise.
 */
#ifndef LARDER_TESTS_GOLDEN_H
#define LARDER_TESTS_GOLDEN_H

#include "format/base/cursor.h"
#include "format/commit.h"
#include "format/index.h"
#include "format/keys.h"
#include "format/segment.h"

#define GOLDEN_CHUNKS    9u
#define GOLDEN_TENANT    "golden"
#define GOLDEN_KEK_EPOCH 3u
#define GOLDEN_BIN_BYTES 20u /* of the tokens that tokens.idx speaks of */
#define GOLDEN_TIME_NS   1700000000123456789ull

/* n ids of bytes `seed`, seed + 1, ... */
struct id golden_id(uint8_t seed);
/* Kept for the process; not to be freed. */
const struct keyring *golden_keyring(void);
const struct dek *golden_dek(void);

/* Plain bytes of chunk i of the golden segment; malloc'ed. */
uint8_t *golden_plain(uint32_t i, uint32_t *n);
/* What the index of the golden segment says, but for places in the file. Static. */
const struct index_private *golden_index(void);
void golden_header(struct segment_header *h);
/* tiny: one raw chunk and one tensor, for files to be broken. */
void golden_segment(struct buf *out, bool tiny);
void golden_commit(struct commit *c); /* static parts and strings */
/* A shard of three samples in the given dialect's way. */
void golden_shard(struct buf *out);

/* The small files: number i of them, its name, or NULL behind the last; out may be NULL. */
const char *golden_small(unsigned i, struct buf *out);

#endif
