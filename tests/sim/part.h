/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a rank saves: tensors whose every byte follows from attempt, step and rank, compressed, sealed and
 * laid out by the code of format/, and the way back, with everything checked that a client can check.
 */
#ifndef LARDER_TESTS_SIM_PART_H
#define LARDER_TESTS_SIM_PART_H

#include "format/commit.h"
#include "format/index.h"
#include "format/keys.h"
#include "tests/sim/plan.h"

#define PART_TENSORS_MAX 8u

struct sim_part {
    struct segment_header h;
    uint8_t header[BLOCK_BYTES], trailer[BLOCK_BYTES];
    uint32_t chunks;
    struct chunk_entry entry[PART_TENSORS_MAX];
    struct buf stored[PART_TENSORS_MAX];
    struct buf index;
    uint64_t index_offset, file_bytes, plain_bytes;
    uint8_t index_digest[SHA256_BYTES];
};

/* Sizes of what is saved. */
struct sim_shape {
    uint32_t tensors, bytes_max;
};

/* One rank's piece of tensor i. The last tensor, if there are several, is the same on all ranks; else rank r
 * holds row r. */
struct sim_piece {
    char name[16];
    enum dtype dtype;
    uint64_t elements, bytes;
    bool shared;
    uint8_t *plain; /* malloc'ed */
};
/* What it saves; returns how many, which like the sizes is the same on all ranks. */
uint32_t sim_pieces(const struct id *attempt, uint64_t step, uint32_t rank, const struct sim_shape *shape,
                    struct sim_piece out[PART_TENSORS_MAX]);
void sim_pieces_free(struct sim_piece *x, uint32_t n);

/* h: ids, step, rank, world, salt and tenant are set by the caller. */
void sim_part_make(struct sim_part *p, const struct segment_header *h, const struct dek *dek,
                   const struct sim_shape *shape);
void sim_part_free(struct sim_part *p);

/* The bytes of a whole segment (or, data false, of its first block and everything from the index on, where
 * the chunks between them are zeros) as a part of that commit. index, for index_private_free, is what it
 * holds. 0, or -errno and why it is not what was saved. */
must_check int sim_part_check(const uint8_t *p, size_t n, const struct commit *c, uint32_t rank,
                              const struct dek *dek, const struct sim_shape *shape, bool data,
                              struct index_private *index, struct err *e);

#endif
