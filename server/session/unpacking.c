/* SPDX-License-Identifier: Apache-2.0 */
#include "server/session/unpacking.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "format/mds_unpack.h"

/* ---- an end ---- */

/* What went wrong, where, and what a person can do about it. */
static void tell(struct unpacking *u)
{
    struct err why = u->err;
    const char *dir = u->version->dir->name, *raw = u->shard->name, *packed = u->shard->packed;
    if (why.class == ERR_CORRUPT)
        err_set(&u->err, why.class,
                "shard %s of %s: %s: %s; put the right file there, or an unpacked %s beside it", raw, dir,
                packed, why.text, raw);
    else if (why.errnum == ENOSPC || why.errnum == EDQUOT)
        err_set(&u->err, why.class,
                "shard %s of %s: %s; make space there for its %" PRIu64
                " unpacked bytes, or lower unpacked_shards in larderd.conf, or put an unpacked %s beside %s",
                raw, dir, why.text, u->shard->bytes, raw, packed);
    else
        err_prepend(&u->err, "shard %s of %s, unpacking %s", raw, dir, packed);
}

static void end(struct unpacking *u)
{
    mds_unpack_free(u->unpack);
    free(u->packed);
    free(u->raw);
    u->unpack = NULL;
    u->packed = u->raw = NULL;
    if (u->err.class != ERR_NONE)
        tell(u);
    u->done(u);
}

static void ended(struct io_op *op)
{
    end(container_of(op, struct unpacking, op));
}

static void drop_temporary(struct unpacking *u)
{
    u->op.done = ended;
    loop_unlink(u->loop, &u->op, u->temporary);
}

static void linked(struct io_op *op)
{
    struct unpacking *u = container_of(op, struct unpacking, op);
    if (op->result < 0)
        err_sys(&u->err, (int)-op->result, "naming %s", u->to);
    drop_temporary(u);
}

/* What stood there before was not right. */
static void replaced(struct io_op *op)
{
    struct unpacking *u = container_of(op, struct unpacking, op);
    op->done = linked;
    loop_link(u->loop, op, u->temporary, u->to);
}

static void finish(struct unpacking *u);

static void from_closed(struct io_op *op)
{
    struct unpacking *u = container_of(op, struct unpacking, op);
    u->from_fd = -1;
    finish(u);
}

static void to_closed(struct io_op *op)
{
    struct unpacking *u = container_of(op, struct unpacking, op);
    u->to_fd = -1;
    finish(u);
}

/* All is written and durable, or something failed. */
static void finish(struct unpacking *u)
{
    if (u->from_fd >= 0) {
        u->op.done = from_closed;
        loop_close(u->loop, &u->op, u->from_fd);
    } else if (u->to_fd >= 0) {
        u->op.done = to_closed;
        loop_close(u->loop, &u->op, u->to_fd);
    } else if (u->err.class == ERR_NONE) {
        u->op.done = replaced;
        loop_unlink(u->loop, &u->op, u->to);
    } else if (u->made) {
        drop_temporary(u);
    } else {
        end(u);
    }
}

static void fail_sys(struct unpacking *u, int64_t result, const char *doing, const char *path)
{
    err_sys(&u->err, (int)-result, "%s %s", doing, path);
    finish(u);
}

/* ---- the bytes ---- */

static void synced(struct io_op *op)
{
    struct unpacking *u = container_of(op, struct unpacking, op);
    if (op->result < 0)
        err_sys(&u->err, (int)-op->result, "making %s durable", u->temporary);
    finish(u);
}

/* The file that was read still is the one that the version names. */
static void looked_again(struct io_op *op)
{
    struct unpacking *u = container_of(op, struct unpacking, op);
    if (op->result < 0) {
        fail_sys(u, op->result, "looking again at", u->path);
    } else if (pubfile_same(u->version, u->shard->name, &u->shard->stat, &u->stat, &u->err) < 0) {
        finish(u);
    } else {
        op->done = synced;
        loop_fdatasync(u->loop, op, u->to_fd);
    }
}

static void checked(struct io_op *op)
{
    struct unpacking *u = container_of(op, struct unpacking, op);
    if (op->result < 0)
        err_sys(&u->err, (int)-op->result, "comparing checksums");
    if (u->err.class != ERR_NONE) {
        finish(u);
        return;
    }
    op->done = looked_again;
    loop_stat(u->loop, op, u->path, &u->stat);
}

static void work_check(struct loop_work *w)
{
    struct unpacking *u = container_of(w, struct unpacking, work);
    int rc = mds_unpack_end(u->unpack, &u->err);
    check(rc == 0 || u->err.class != ERR_NONE);
}

static void read_more(struct unpacking *u);
static void unpack_more(struct unpacking *u);

static void written(struct io_op *op)
{
    struct unpacking *u = container_of(op, struct unpacking, op);
    if (op->result < 0) {
        fail_sys(u, op->result, "writing", u->temporary);
        return;
    }
    u->done_bytes += u->got;
    if (u->got == UNPACK_RAW_BYTES)
        unpack_more(u); /* there may be more of what was read */
    else
        read_more(u);
}

static void unpacked_some(struct io_op *op)
{
    struct unpacking *u = container_of(op, struct unpacking, op);
    if (op->result < 0)
        err_sys(&u->err, (int)-op->result, "unpacking");
    if (u->err.class != ERR_NONE) {
        finish(u);
    } else if (u->got == 0) {
        read_more(u);
    } else {
        op->done = written;
        loop_write(u->loop, op, u->to_fd, u->raw, u->got, u->done_bytes);
    }
}

static void work_unpack(struct loop_work *w)
{
    struct unpacking *u = container_of(w, struct unpacking, work);
    int rc = mds_unpack_push(u->unpack, &u->in, u->raw, UNPACK_RAW_BYTES, &u->got, &u->err);
    check(rc == 0 || u->err.class != ERR_NONE);
}

static void unpack_more(struct unpacking *u)
{
    if (!u->wanted(u)) {
        err_set(&u->err, ERR_CANCELLED, "the server stops");
        finish(u);
        return;
    }
    u->op.done = unpacked_some;
    u->work.run = work_unpack;
    loop_work(u->loop, &u->op, &u->work);
}

static void got_more(struct io_op *op)
{
    struct unpacking *u = container_of(op, struct unpacking, op);
    if (op->result < 0) {
        fail_sys(u, op->result, "reading", u->path);
    } else if (op->result == 0) {
        op->done = checked;
        u->work.run = work_check;
        loop_work(u->loop, op, &u->work);
    } else {
        u->in = SLICE(u->packed, op->result);
        u->at += (uint64_t)op->result;
        unpack_more(u);
    }
}

static void read_more(struct unpacking *u)
{
    u->op.done = got_more;
    loop_read(u->loop, &u->op, u->from_fd, u->packed, UNPACK_PACKED_BYTES, u->at);
}

/* ---- a beginning ---- */

static void reserved(struct io_op *op)
{
    struct unpacking *u = container_of(op, struct unpacking, op);
    if (op->result < 0 && op->result != -EOPNOTSUPP)
        fail_sys(u, op->result, "reserving space for", u->temporary);
    else
        read_more(u);
}

static void created(struct io_op *op)
{
    struct unpacking *u = container_of(op, struct unpacking, op);
    if (op->result < 0) {
        fail_sys(u, op->result, "making", u->temporary);
        return;
    }
    u->to_fd = (int)op->result;
    u->made = true;
    op->done = reserved;
    loop_allocate(u->loop, op, u->to_fd, u->shard->bytes);
}

static void folder_made(struct io_op *op) /* or there already */
{
    struct unpacking *u = container_of(op, struct unpacking, op);
    op->done = created;
    loop_open(u->loop, op, u->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
}

static int prepare(struct unpacking *u)
{
    const struct mds_shard *mds = u->shard->mds;
    if (u->stat.bytes != mds->zip.bytes)
        return err_set(&u->err, ERR_CORRUPT,
                       "it has %" PRIu64 " bytes, " MDS_INDEX_NAME " says %" PRIu64
                       ": it is cut, or of another version",
                       u->stat.bytes, mds->zip.bytes);
    u->packed = malloc(UNPACK_PACKED_BYTES);
    u->raw = malloc(UNPACK_RAW_BYTES);
    if (!u->packed || !u->raw)
        return err_set(&u->err, ERR_NO_MEMORY, "no memory for unpacking a shard");
    return mds_unpack_create(u->shard->bytes, &mds->raw, &mds->zip, &u->unpack, &u->err);
}

static void looked_at(struct io_op *op)
{
    struct unpacking *u = container_of(op, struct unpacking, op);
    if (op->result < 0) {
        fail_sys(u, op->result, "looking at", u->path);
    } else if (pubfile_same(u->version, u->shard->name, &u->shard->stat, &u->stat, &u->err) < 0 ||
               prepare(u) < 0) {
        finish(u);
    } else {
        op->done = folder_made;
        loop_mkdir(u->loop, op, u->folder, 0700);
    }
}

static void opened(struct io_op *op)
{
    struct unpacking *u = container_of(op, struct unpacking, op);
    if (op->result < 0) {
        fail_sys(u, op->result, "opening", u->path);
        return;
    }
    u->from_fd = (int)op->result;
    op->done = looked_at;
    loop_stat(u->loop, op, u->path, &u->stat);
}

void unpacking_begin(struct unpacking *u, struct loop *l, const struct pubversion *v, uint32_t shard,
                     const char *folder, const char *to)
{
    u->loop = l;
    u->version = v;
    u->shard = &v->shards[shard];
    u->folder = folder;
    u->to = to;
    u->from_fd = u->to_fd = -1;
    u->made = false;
    u->at = u->done_bytes = 0;
    err_clear(&u->err);
    bool fits = pubfile_path(v, u->shard->packed, u->path, sizeof u->path) &&
                (size_t)snprintf(u->temporary, sizeof u->temporary, "%s" UNPACKING_TEMPORARY, to) <
                    sizeof u->temporary;
    check(fits);
    u->op.done = opened;
    loop_open(l, &u->op, u->path, O_RDONLY | O_CLOEXEC, 0);
}
