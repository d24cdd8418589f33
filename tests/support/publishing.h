/* SPDX-License-Identifier: Apache-2.0 */
/* What a client asks of published folders, frame by frame. */
#ifndef LARDER_TESTS_PUBLISHING_H
#define LARDER_TESTS_PUBLISHING_H

#include "tests/support/served.h"

struct published_opened {
    struct id version;
    uint32_t count;
    char names[8][64];
    uint64_t bytes[8];
    struct err err; /* why it was refused */
};

/* Opens a dataset of at most 8 shards. Returns the error's class. */
enum err_class published_open(struct caller *c, const char *name, struct published_opened *o);
/* Sends a request; returns its id. */
uint64_t published_ask_read(struct caller *c, const struct id *version, uint64_t credit, uint32_t shard,
                            uint64_t offset, uint64_t bytes);
uint64_t published_ask_samples(struct caller *c, const struct id *version, uint64_t credit, uint32_t shard);
/* Puts the frames that answer it one behind the other, until there are so many bytes. */
struct err caller_gather(struct caller *c, uint64_t id, struct buf *out, size_t until);

#endif
