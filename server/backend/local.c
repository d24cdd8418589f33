/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The local backend: objects are files below a folder.
 *
 * Order of durability: bytes written in full, fdatasync, link to the name, fsync of the name's folder, then
 * the acknowledgement. A crash leaves at most a temporary file (cleared by the next writer) or an object that
 * is whole and was not acknowledged. How names come and go is in local_names.c.
 */
#include "server/backend/local.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"

#define FILE_MODE 0640

void local_object_path(struct backend_op *op, const char *name)
{
    local_op(op)->name = name;
    int n = snprintf(op->path[0], sizeof op->path[0], "%s/objects%s%s", local_of(op)->folder,
                     *name ? "/" : "", name);
    check(n > 0 && (size_t)n < sizeof op->path[0]);
}

void local_fail(struct backend_op *op, int64_t result, const char *doing)
{
    struct local_op *o = local_op(op);
    if (o->status)
        return;
    o->status = (int)result;
    if (result == -ENOSPC || result == -EDQUOT)
        err_set(&op->err, ERR_NO_SPACE, "%s \"%s\": the disk of %s is full; prune, or make room", doing,
                o->name, local_of(op)->folder);
    else
        err_sys(&op->err, (int)-result, "%s \"%s\"", doing, o->name);
    o->status = -op->err.errnum;
}

bool local_synced(struct backend_op *op, int64_t result)
{
    struct local *l = local_of(op);
    l->sync_failed |= result < 0;
    if (l->sync_failed && local_op(op)->status == 0)
        local_op(op)->status =
            backend_sync_failed(&op->err, result < 0 ? (int)-result : EIO, local_op(op)->name);
    return !l->sync_failed;
}

void local_mark(struct backend_op *op, io_done *then)
{
    struct local *l = local_of(op);
    op->io.done = then;
    loop_link(l->backend.loop, &op->io, l->lock_path, l->mark_path);
}

void local_marked(struct backend_op *op, int64_t result)
{
    struct local *l = local_of(op);
    if (result == 0 || result == -EEXIST)
        return;
    log_error(
        "a sync failed, and the mark that keeps larderd from starting on it before a reboot could not be "
        "left: check the disk and reboot before larderd is started again path=%s reason=\"%s\"",
        l->mark_path, strerror((int)-result));
}

static bool may_write(struct backend_op *op)
{
    if (local_of(op)->sync_failed) {
        backend_end_later(
            op, err_set(&op->err, ERR_READ_ONLY,
                        "the store %s takes no writes since a sync failed; check the disk, then reboot and "
                        "start larderd again",
                        local_of(op)->folder));
        return false;
    }
    if (local_of(op)->writer)
        return true;
    backend_end_later(
        op, err_set(&op->err, ERR_UNSUPPORTED,
                    "this instance of the store %s only reads; write through the one that holds its lock",
                    local_of(op)->folder));
    return false;
}

/* The end of a file being written: unlink, close, free, end. */

static void file_closed(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    struct local_op *o = local_op(op);
    free(o->file);
    o->file = NULL;
    backend_end(op, o->status);
}

static void temporary_gone(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    io->done = file_closed; /* a temporary name that stays is cleared by the next writer */
    loop_close(op->backend->loop, io, local_op(op)->file->fd);
}

void local_finish_file(struct backend_op *op)
{
    op->io.done = temporary_gone;
    loop_unlink(op->backend->loop, &op->io, local_op(op)->file->path);
}

/* create and put_new begin alike: a temporary file of a random name. */

static struct local_file *new_file(struct backend_op *op)
{
    struct local_file *f = calloc(1, sizeof *f);
    uint8_t id[12];
    char hex[2 * sizeof id + 1];
    if (!f)
        return NULL;
    loop_random(op->backend->loop, id, sizeof id);
    hex_encode(id, sizeof id, hex);
    f->file.backend = op->backend;
    f->fd = -1;
    snprintf(f->path, sizeof f->path, "%s/tmp/%s", local_of(op)->folder, hex);
    local_op(op)->file = f;
    return f;
}

static void end_without_file(struct backend_op *op)
{
    free(local_op(op)->file);
    local_op(op)->file = NULL;
    backend_end(op, local_op(op)->status);
}

static void allocated(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    struct local_op *o = local_op(op);
    if (io->result < 0 && io->result != -EOPNOTSUPP && io->result != -ENOSYS) {
        local_fail(op, io->result, "reserving space for");
        local_finish_file(op);
        return;
    }
    *o->file_out = &o->file->file;
    backend_end(op, 0);
}

static void created(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    struct local_op *o = local_op(op);
    struct descriptors *d = &local_of(op)->descriptors;
    if (io->result == -EINVAL &&
        !d->no_direct) { /* a file system in memory, for example; it may leave the file */
        d->no_direct = true;
        loop_open(op->backend->loop, io, o->file->path, O_CREAT | O_RDWR, FILE_MODE);
        return;
    }
    if (io->result < 0) {
        local_fail(op, io->result, "creating");
        end_without_file(op);
        return;
    }
    o->file->fd = (int)io->result;
    if (o->file->reserve_bytes == 0) {
        *o->file_out = &o->file->file;
        backend_end(op, 0);
        return;
    }
    io->done = allocated;
    loop_allocate(op->backend->loop, io, o->file->fd, o->file->reserve_bytes);
}

static void local_create(struct backend_op *op, uint64_t reserve_bytes, struct backend_file **file)
{
    if (!may_write(op))
        return;
    local_op(op)->name = "a new segment";
    struct local_file *f = new_file(op);
    if (!f) {
        backend_end_later(op, -ENOMEM);
        return;
    }
    f->reserve_bytes = reserve_bytes;
    local_op(op)->file_out = file;
    op->io.done = created;
    loop_open(op->backend->loop, &op->io, f->path,
              O_CREAT | O_EXCL | O_RDWR | (local_of(op)->descriptors.no_direct ? 0 : O_DIRECT), FILE_MODE);
}

static void appended(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (io->result < 0)
        local_fail(op, io->result, "appending to");
    backend_end(op, local_op(op)->status);
}

static void local_append(struct backend_op *op, uint64_t offset, const void *p, size_t n)
{
    struct local_file *f = container_of(op->file, struct local_file, file);
    local_op(op)->name = "a new segment";
    op->io.done = appended;
    loop_write(op->backend->loop, &op->io, f->fd, p, n, offset);
}

static void failed_data_marked(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    local_marked(op, io->result);
    local_finish_file(op);
}

static void data_synced(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (local_synced(op, io->result))
        local_publish(op);
    else
        local_mark(op, failed_data_marked);
}

static void sync_data(struct backend_op *op)
{
    op->io.done = data_synced;
    loop_fdatasync(op->backend->loop, &op->io, local_op(op)->file->fd);
}

/* What was reserved past the end goes back; a file system that cannot keeps it. */
static void trimmed(struct io_op *io)
{
    sync_data(container_of(io, struct backend_op, io));
}

static void local_seal(struct backend_op *op, const char *name)
{
    struct local_file *f = container_of(op->file, struct local_file, file);
    op->file = NULL;
    local_op(op)->file = f;
    local_object_path(op, name);
    if (f->reserve_bytes > f->file.bytes) {
        op->io.done = trimmed;
        loop_truncate(op->backend->loop, &op->io, f->fd, f->file.bytes);
    } else {
        sync_data(op);
    }
}

static void local_discard(struct backend_op *op)
{
    local_op(op)->file = container_of(op->file, struct local_file, file);
    local_op(op)->name = "a new segment";
    op->file = NULL;
    local_finish_file(op);
}

static void small_written(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (io->result < 0) {
        local_fail(op, io->result, "writing");
        local_finish_file(op);
        return;
    }
    sync_data(op);
}

static void small_created(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    struct local_op *o = local_op(op);
    if (io->result < 0) {
        local_fail(op, io->result, "creating");
        end_without_file(op);
        return;
    }
    o->file->fd = (int)io->result;
    io->done = small_written;
    loop_write(op->backend->loop, io, o->file->fd, o->bytes, o->n, 0);
}

static void local_put_new(struct backend_op *op, const char *name, const void *p, size_t n)
{
    if (!may_write(op))
        return;
    local_object_path(op, name);
    struct local_file *f = new_file(op);
    if (!f) {
        backend_end_later(op, -ENOMEM);
        return;
    }
    local_op(op)->bytes = p;
    local_op(op)->n = n;
    op->io.done = small_created;
    loop_open(op->backend->loop, &op->io, f->path, O_CREAT | O_EXCL | O_RDWR, FILE_MODE);
}

static void was_read(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    descriptors_put(&local_of(op)->descriptors, local_op(op)->descriptor);
    int64_t result = io->result;
    if (result < 0) {
        local_fail(op, result == -EISDIR ? -ENOENT : result, "reading");
        result = local_op(op)->status;
    }
    backend_end(op, result);
}

static void ready_to_read(struct backend_op *op, struct descriptor *e, int status)
{
    struct local_op *o = local_op(op);
    if (status) {
        local_fail(op, status, "reading");
        backend_end_later(op, o->status);
        return;
    }
    o->descriptor = e;
    op->io.done = was_read;
    loop_read(op->backend->loop, &op->io, descriptor_fd(e), o->out, o->n, o->offset);
}

static void local_read(struct backend_op *op, const char *name, bool direct, uint64_t offset, void *p,
                       size_t n)
{
    local_object_path(op, name);
    local_op(op)->out = p;
    local_op(op)->n = n;
    local_op(op)->offset = offset;
    descriptors_get(&local_of(op)->descriptors, op, name, op->path[0], direct, ready_to_read);
}

static void stat_known(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    struct local_op *o = local_op(op);
    struct loop_stat *st = o->out;
    if (io->result == 0 && st->folder)
        io->result = -ENOENT;
    if (io->result < 0)
        local_fail(op, io->result, "looking up");
    else
        *o->bytes_out = st->bytes;
    free(st);
    backend_end(op, o->status);
}

static void local_stat(struct backend_op *op, const char *name, uint64_t *bytes)
{
    struct loop_stat *st = malloc(sizeof *st);
    if (!st) {
        backend_end_later(op, -ENOMEM);
        return;
    }
    local_object_path(op, name);
    local_op(op)->out = st;
    local_op(op)->bytes_out = bytes;
    op->io.done = stat_known;
    loop_stat(op->backend->loop, &op->io, op->path[0], st);
}

static void list_end(struct backend_op *op)
{
    if (local_op(op)->status < 0)
        loop_names_free(local_op(op)->out);
    if (local_op(op)->status == -ENOENT) { /* it went with its last object meanwhile */
        local_op(op)->status = 0;
        err_clear(&op->err);
    }
    backend_end(op, local_op(op)->status);
}

static void list_synced(struct backend_op *op)
{
    if (local_op(op)->status < 0) {
        list_end(op);
        return;
    }
    *strrchr(op->path[1], '/') = '\0';
    local_sync_folder(op, list_end); /* the folder's own name */
}

/* A writer that was killed between a link and the sync behind it leaves a name that only memory knows.
 * Whoever writes next builds on what it lists, so what a writer lists is made durable first. */
static void listed(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    struct local *l = local_of(op);
    bool absent = io->result == -ENOENT || io->result == -ENOTDIR;
    if (io->result < 0 && !absent)
        local_fail(op, io->result, "listing");
    if (io->result < 0 || !l->writer || l->sync_failed) {
        list_end(op);
        return;
    }
    strcpy(op->path[1], op->path[0]);
    local_sync_folder(op, list_synced);
}

static void local_list(struct backend_op *op, const char *prefix, struct loop_names *out)
{
    local_object_path(op, prefix);
    local_op(op)->out = out;
    op->io.done = listed;
    loop_list(op->backend->loop, &op->io, op->path[0], out);
}

static void remove_object(struct backend_op *op, const char *name)
{
    if (may_write(op))
        local_remove(op, name);
}

static int local_space(struct backend *b, uint64_t *free_bytes, uint64_t *total_bytes)
{
    return loop_space(b->loop, container_of(b, struct local, backend)->folder, free_bytes, total_bytes);
}

static void lock_closed(struct io_op *io)
{
    backend_closed(&container_of(io, struct local, closing)->backend);
}

static void descriptors_gone(struct descriptors *d)
{
    struct local *l = container_of(d, struct local, descriptors);
    if (l->lock_fd < 0) {
        backend_closed(&l->backend);
        return;
    }
    l->closing.done = lock_closed;
    loop_close(l->backend.loop, &l->closing, l->lock_fd);
}

static void local_close(struct backend *b)
{
    descriptors_close(&container_of(b, struct local, backend)->descriptors, descriptors_gone);
}

static void local_free(struct backend *b)
{
    free(container_of(b, struct local, backend));
}

const struct backend_ops local_ops = {
    .name = "local",
    .create = local_create,
    .append = local_append,
    .seal = local_seal,
    .discard = local_discard,
    .put_new = local_put_new,
    .read = local_read,
    .stat = local_stat,
    .list = local_list,
    .remove = remove_object,
    .space = local_space,
    .close = local_close,
    .free_now = local_free,
};
