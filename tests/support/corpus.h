/* SPDX-License-Identifier: Apache-2.0 */
/* Tar shards whose every byte is known: what a feed hands out can be checked without keeping the shards. */
#ifndef LARDER_TESTS_CORPUS_H
#define LARDER_TESTS_CORPUS_H

#include "client/larder.h"
#include "format/base/cursor.h"

struct corpus {
    uint32_t shards;
    uint64_t *counts;  /* samples per shard */
    struct buf *files; /* the archives */
    char (*names)[32]; /* "shard-000.tar" */
    uint32_t field_bytes_max;
};

/* shards of 0 .. 2 * samples samples with two fields each: "bin" of 0 .. field_bytes_max bytes and a short
 * "txt". The same seed gives the same corpus. */
void corpus_make(struct corpus *c, uint64_t seed, uint32_t shards, uint32_t samples,
                 uint32_t field_bytes_max);
void corpus_free(struct corpus *c);
uint64_t corpus_samples(const struct corpus *c);
uint64_t corpus_bytes(const struct corpus *c);
/* Writes the archives below folder; paths: shards + 1 places, NULL at the end; freed by corpus_paths_free. */
char **corpus_write(const struct corpus *c, const char *folder);
void corpus_paths_free(char **paths);
/* Is a sample that came byte for byte the one that was put in, aligned as promised? Fails the test if not. */
void corpus_check(const struct corpus *c, const struct larder_sample *s);

#endif
