/* SPDX-License-Identifier: Apache-2.0 */
#include "server/session/published_cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "format/base/hash.h"
#include "format/commit.h"
#include "format/version.h"

#define FILE_BYTES_MAX ((uint64_t)INDEX_BYTES_MAX + 4096)

#define FOLDER "sample-indexes"

static void op_init(struct cache_op *op, struct worker *w, const struct pubversion *v, uint32_t shard)
{
    char hex[2 * HASH128_BYTES + 1];
    struct buf key = {0};
    op->w = w;
    op->version = v;
    op->shard = shard;
    op->found = op->folder_made = false;
    op->encoded = op->file = (struct buf){0};
    buf_put16(&key, slice_str(v->dir->name));
    buf_put16(&key, slice_str(v->shards[shard].name));
    struct hash128 h = hash128(key.p, key.failed ? 0 : key.n);
    hex_encode(h.bytes, sizeof h.bytes, hex);
    buf_free(&key);
    snprintf(op->folder, sizeof op->folder, "%s/" FOLDER, w->server->o.store_folder);
    snprintf(op->path, sizeof op->path, "%s/%s", op->folder, hex);
    snprintf(op->temporary, sizeof op->temporary, "%s.%u", op->path,
             w->number); /* a loop does a shard once at a time */
}

static void stat_put(struct buf *b, const struct loop_stat *st)
{
    buf_u64(b, st->bytes);
    buf_u64(b, st->mtime_ns);
    buf_u64(b, st->inode);
}

/* What an index was made from. */
static void origin_put(struct buf *b, const struct pubversion *v, uint32_t shard)
{
    static const struct loop_stat none;
    const struct pubshard *s = &v->shards[shard];
    buf_put16(b, slice_str(v->dir->name));
    buf_put16(b, slice_str(s->name));
    buf_u32(b, (uint32_t)v->dir->format);
    buf_u64(b, v->dir->record_bytes);
    buf_u64(b, v->dir->window.tokens);
    buf_u64(b, v->dir->window.extra);
    stat_put(b, &s->stat);
    stat_put(b, s->idx ? &s->idx_stat : v->mds ? &v->json_stat : &none);
}

/* ---- loading ---- */

/* The index, if the file is right and of this very shard. */
static bool take(struct cache_op *op)
{
    struct buf origin = {0};
    struct slice body;
    if (record_decode(RECORD_PUBLISHED, PUBLISHED_VERSION, op->file.p, op->file.n, &body, NULL) < 0)
        return false;
    origin_put(&origin, op->version, op->shard);
    bool same = !origin.failed && body.n > origin.n && memcmp(body.p, origin.p, origin.n) == 0;
    if (same)
        buf_put(&op->encoded, body.p + origin.n, body.n - origin.n);
    buf_free(&origin);
    if (!op->encoded.failed)
        return same;
    buf_free(&op->encoded);
    return false;
}

static void load_closed(struct io_op *io)
{
    struct cache_op *op = container_of(io, struct cache_op, io);
    op->found = op->result == (int64_t)op->file.n && take(op);
    buf_free(&op->file);
    op->done(op);
}

static void load_read(struct io_op *io)
{
    struct cache_op *op = container_of(io, struct cache_op, io);
    op->result = io->result;
    io->done = load_closed;
    loop_close(op->w->loop, io, op->fd);
}

static void load_opened(struct io_op *io)
{
    struct cache_op *op = container_of(io, struct cache_op, io);
    if (io->result < 0) {
        buf_free(&op->file);
        op->done(op);
        return;
    }
    op->fd = (int)io->result;
    io->done = load_read;
    loop_read(op->w->loop, io, op->fd, op->file.p, op->file.n, 0);
}

static void load_looked_at(struct io_op *io)
{
    struct cache_op *op = container_of(io, struct cache_op, io);
    bool fits = io->result >= 0 && op->stat.file && op->stat.bytes <= FILE_BYTES_MAX;
    if (!fits || !buf_reserve(&op->file, op->stat.bytes)) {
        buf_free(&op->file);
        op->done(op);
        return;
    }
    op->file.n = op->stat.bytes;
    io->done = load_opened;
    loop_open(op->w->loop, io, op->path, O_RDONLY | O_CLOEXEC, 0);
}

bool cache_load(struct cache_op *op, struct worker *w, const struct pubversion *v, uint32_t shard)
{
    if (!w->server->o.store_folder)
        return false;
    op_init(op, w, v, shard);
    op->io.done = load_looked_at;
    loop_stat(w->loop, &op->io, op->path, &op->stat);
    return true;
}

/* ---- keeping ---- */

static void kept(struct io_op *io)
{
    struct cache_op *op = container_of(io, struct cache_op, io);
    buf_free(&op->file);
    op->done(op);
}

static void keep_linked(struct io_op *io)
{
    struct cache_op *op = container_of(io, struct cache_op, io);
    io->done = kept;
    loop_unlink(op->w->loop, io, op->temporary);
}

/* What stood there before was not right, or is of this very shard too (another loop's). */
static void keep_replaced(struct io_op *io)
{
    struct cache_op *op = container_of(io, struct cache_op, io);
    io->done = keep_linked;
    loop_link(op->w->loop, io, op->temporary, op->path);
}

static void keep_closed(struct io_op *io)
{
    struct cache_op *op = container_of(io, struct cache_op, io);
    if (op->result == (int64_t)op->file.n) {
        io->done = keep_replaced;
        loop_unlink(op->w->loop, io, op->path);
    } else {
        keep_linked(io);
    }
}

static void keep_written(struct io_op *io)
{
    struct cache_op *op = container_of(io, struct cache_op, io);
    op->result = io->result;
    io->done = keep_closed;
    loop_close(op->w->loop, io, op->fd);
}

static void keep_open(struct cache_op *op);

static void keep_folder_made(struct io_op *io)
{
    struct cache_op *op = container_of(io, struct cache_op, io);
    op->folder_made = true;
    keep_open(op);
}

static void keep_opened(struct io_op *io)
{
    struct cache_op *op = container_of(io, struct cache_op, io);
    if (io->result == -ENOENT && !op->folder_made) {
        io->done = keep_folder_made;
        loop_mkdir(op->w->loop, io, op->folder, 0700);
    } else if (io->result < 0) {
        kept(io);
    } else {
        op->fd = (int)io->result;
        io->done = keep_written;
        loop_write(op->w->loop, io, op->fd, op->file.p, op->file.n, 0);
    }
}

static void keep_open(struct cache_op *op)
{
    op->io.done = keep_opened;
    loop_open(op->w->loop, &op->io, op->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
}

static bool space_for(const struct worker *w, uint64_t bytes)
{
    uint64_t free_bytes, total;
    const struct server_options *o = &w->server->o;
    return loop_space(w->loop, o->store_folder, &free_bytes, &total) == 0 && free_bytes >= bytes &&
           free_bytes - bytes >= o->space_reserve_bytes;
}

bool cache_store(struct cache_op *op, struct worker *w, const struct pubversion *v, uint32_t shard,
                 struct slice encoded)
{
    struct buf body = {0};
    if (!w->server->o.store_folder || !space_for(w, encoded.n + BLOCK_BYTES))
        return false;
    op_init(op, w, v, shard);
    origin_put(&body, v, shard);
    buf_put(&body, encoded.p, encoded.n);
    bool good = !body.failed &&
                record_encode(RECORD_PUBLISHED, PUBLISHED_VERSION, body.p, body.n, &op->file, NULL) == 0;
    buf_free(&body);
    if (good)
        keep_open(op);
    else
        buf_free(&op->file);
    return good;
}
