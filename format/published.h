/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The version of a published folder (PROTOCOL.md, section 9): a hash that binds the dataset's name and format
 * and every file that it consists of. The server makes it of its folder; a client that sees the same folder
 * on its own machine makes it of that, and so knows that it sees the same files.
 */
#ifndef LARDER_PUBLISHED_VERSION_H
#define LARDER_PUBLISHED_VERSION_H

#include "format/base/cursor.h"
#include "format/identity.h"
#include "format/samples.h"

struct published_file {
    uint64_t bytes, mtime_ns, inode;
};

/* Zeroed memory to begin with; published_version_end leaves it so again. */
struct published_version {
    struct buf b;
};

/* Shards follow, in the server's order. */
void published_version_begin(struct published_version *v, struct slice dataset, enum shard_format format,
                             uint64_t record_bytes, uint32_t shards);
/* idx: of SHARD_TOKENS, else NULL. */
void published_version_shard(struct published_version *v, struct slice name,
                             const struct published_file *file, const struct published_file *idx);
/* window: of SHARD_TOKENS, else NULL; json: of SHARD_MDS, else NULL. ERR_NO_MEMORY. */
must_check int published_version_end(struct published_version *v, const struct token_window *window,
                                     const struct published_file *json, struct id *out, struct err *e);

#endif
