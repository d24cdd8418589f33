/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How names come and go in the local backend.
 *
 * A name is durable when its folder was synced after the link, and when every folder above it is durable
 * itself: a folder made here has its parent synced before anything is linked below it, also if another
 * operation made it a moment ago. Folders known to be durable are remembered, so the usual publication is one
 * link and one sync. Empty folders are removed while nobody else publishes or removes (the gate), so that a
 * folder never vanishes between those two steps of another operation.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "server/backend/local.h"

#define TRIES_MAX 8

static void run_next(struct backend_op *op)
{
    local_next *next = local_op(op)->next;
    local_op(op)->next = NULL;
    next(op);
}

static void folder_closed(struct io_op *io)
{
    run_next(container_of(io, struct backend_op, io));
}

static void close_folder(struct backend_op *op)
{
    op->io.done = folder_closed;
    loop_close(op->backend->loop, &op->io, local_op(op)->folder_fd);
}

static void failed_folder_marked(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    local_marked(op, io->result);
    close_folder(op);
}

static void folder_synced(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (local_synced(op, io->result))
        close_folder(op);
    else
        local_mark(op, failed_folder_marked);
}

static void folder_opened(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (io->result < 0) {
        local_fail(op, io->result, "opening the folder of");
        run_next(op);
        return;
    }
    local_op(op)->folder_fd = (int)io->result;
    io->done = folder_synced;
    loop_fsync(op->backend->loop, io, local_op(op)->folder_fd);
}

void local_sync_folder(struct backend_op *op, local_next *next)
{
    local_op(op)->next = next;
    op->io.done = folder_opened;
    loop_open(op->backend->loop, &op->io, op->path[1], O_RDONLY | O_DIRECTORY, 0);
}

/* Folders known to be durable. */

static struct hash128 *known_slot(struct local *l, const char *path, size_t n, struct hash128 *hash)
{
    uint32_t index;
    *hash = hash128(path, n);
    memcpy(&index, hash->bytes, sizeof index);
    return &l->known[index % LOCAL_KNOWN_FOLDERS];
}

static bool is_known(struct local *l, const char *path, size_t n)
{
    struct hash128 hash, *slot = known_slot(l, path, n, &hash);
    return memcmp(slot, &hash, sizeof hash) == 0;
}

static void set_known(struct local *l, const char *path, size_t n, bool known)
{
    struct hash128 hash, *slot = known_slot(l, path, n, &hash);
    if (known)
        *slot = hash;
    else if (memcmp(slot, &hash, sizeof hash) == 0)
        *slot = (struct hash128){0};
}

/* Length of FOLDER/objects/. */
static size_t root_bytes(struct local *l)
{
    return strlen(l->folder) + strlen("/objects/");
}

static void cut_last(char *path)
{
    *strrchr(path, '/') = '\0';
}

static void copy_parent(struct backend_op *op)
{
    strcpy(op->path[1], op->path[0]);
    cut_last(op->path[1]);
}

static struct gate_ticket *ticket_of(struct backend_op *op)
{
    return &local_op(op)->ticket;
}

/* Publishing. */

static void walk(struct backend_op *op);

static void leave_published(struct backend_op *op)
{
    gate_leave(&local_of(op)->gate, ticket_of);
    local_finish_file(op);
}

static void folder_durable(struct backend_op *op)
{
    struct local_op *o = local_op(op);
    if (o->status) {
        leave_published(op);
        return;
    }
    size_t n = (size_t)(strchr(op->path[0] + o->cut, '/') - op->path[0]);
    set_known(local_of(op), op->path[0], n, true);
    o->cut = (uint16_t)(n + 1);
    walk(op);
}

static void folder_made(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (io->result < 0 && io->result != -EEXIST) {
        local_fail(op, io->result == -ENOTDIR ? -EEXIST : io->result, "making the folder of");
        leave_published(op);
        return;
    }
    cut_last(op->path[1]);
    local_sync_folder(op, folder_durable);
}

static void start_walk(struct backend_op *op)
{
    local_op(op)->cut = (uint16_t)root_bytes(local_of(op));
    walk(op);
}

static void forget_chain(struct backend_op *op)
{
    const char *path = op->path[0];
    for (const char *p = strchr(path + root_bytes(local_of(op)), '/'); p; p = strchr(p + 1, '/'))
        set_known(local_of(op), path, (size_t)(p - path), false);
}

static void linked(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (io->result == -ENOENT && local_op(op)->tries++ < TRIES_MAX) {
        forget_chain(op); /* somebody else removed a folder */
        start_walk(op);
        return;
    }
    if (io->result < 0) {
        local_fail(op, io->result == -ENOTDIR ? -EEXIST : io->result, "naming");
        leave_published(op);
        return;
    }
    copy_parent(op);
    local_sync_folder(op, leave_published);
}

/* Makes the next folder of the path that is not known, or links if all are. */
static void walk(struct backend_op *op)
{
    struct local_op *o = local_op(op);
    const char *path = op->path[0], *slash;
    while ((slash = strchr(path + o->cut, '/'))) {
        size_t n = (size_t)(slash - path);
        if (!is_known(local_of(op), path, n)) {
            memcpy(op->path[1], path, n);
            op->path[1][n] = '\0';
            op->io.done = folder_made;
            loop_mkdir(op->backend->loop, &op->io, op->path[1], 0750);
            return;
        }
        o->cut = (uint16_t)(n + 1);
    }
    op->io.done = linked;
    loop_link(op->backend->loop, &op->io, o->file->path, path);
}

void local_publish(struct backend_op *op)
{
    local_op(op)->tries = 0;
    gate_enter(&local_of(op)->gate, op, ticket_of(op), false, start_walk);
}

/* Removing. */

static void end_removed(struct backend_op *op)
{
    backend_end(op, local_op(op)->status);
}

static void leave_alone(struct backend_op *op)
{
    gate_leave(&local_of(op)->gate, ticket_of);
    end_removed(op);
}

static void prune_folder(struct backend_op *op);

/* Not empty is the usual end; any other error leaves an empty folder, which harms nobody. */
static void folder_pruned(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (io->result < 0) {
        leave_alone(op);
        return;
    }
    cut_last(op->path[1]);
    prune_folder(op);
}

static void prune_folder(struct backend_op *op)
{
    size_t n = strlen(op->path[1]);
    if (n < root_bytes(local_of(op))) {
        leave_alone(op);
        return;
    }
    set_known(local_of(op), op->path[1], n, false);
    op->io.done = folder_pruned;
    loop_rmdir(op->backend->loop, &op->io, op->path[1]);
}

static void leave_removed(struct backend_op *op)
{
    struct local *l = local_of(op);
    descriptors_forget(&l->descriptors, local_op(op)->name);
    gate_leave(&l->gate, ticket_of);
    if (local_op(op)->status || !strchr(local_op(op)->name, '/'))
        end_removed(op);
    else
        gate_enter(&l->gate, op, ticket_of(op), true, prune_folder);
}

static void unlinked(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (io->result < 0) {
        local_fail(op, io->result == -EISDIR ? -ENOENT : io->result, "removing");
        leave_removed(op);
        return;
    }
    copy_parent(op);
    local_sync_folder(op, leave_removed);
}

static void start_remove(struct backend_op *op)
{
    op->io.done = unlinked;
    loop_unlink(op->backend->loop, &op->io, op->path[0]);
}

void local_remove(struct backend_op *op, const char *name)
{
    local_object_path(op, name);
    gate_enter(&local_of(op)->gate, op, ticket_of(op), false, start_remove);
}
