/* SPDX-License-Identifier: Apache-2.0 */
#include "format/published.h"

#include <string.h>

#include "format/base/hash.h"

static void put_file(struct buf *b, const struct published_file *f)
{
    buf_u64(b, f->bytes);
    buf_u64(b, f->mtime_ns);
    buf_u64(b, f->inode);
}

void published_version_begin(struct published_version *v, struct slice dataset, enum shard_format format,
                             uint64_t record_bytes, uint32_t shards)
{
    buf_put16(&v->b, dataset);
    buf_u8(&v->b, (uint8_t)format);
    buf_u64(&v->b, record_bytes);
    buf_u32(&v->b, shards);
}

void published_version_shard(struct published_version *v, struct slice name,
                             const struct published_file *file, const struct published_file *idx)
{
    buf_put16(&v->b, name);
    put_file(&v->b, file);
    if (idx)
        put_file(&v->b, idx);
}

int published_version_end(struct published_version *v, const struct token_window *window,
                          const struct published_file *json, struct id *out, struct err *e)
{
    uint8_t digest[SHA256_BYTES];
    if (window) {
        buf_u64(&v->b, window->tokens);
        buf_u64(&v->b, window->extra);
    }
    if (json)
        put_file(&v->b, json);
    int rc = buf_end(&v->b, "the version of a published directory", e);
    if (rc == 0) {
        sha256(v->b.p, v->b.n, digest);
        memcpy(out->bytes, digest, ID_BYTES);
    }
    buf_free(&v->b);
    return rc;
}
