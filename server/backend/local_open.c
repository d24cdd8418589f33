/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a folder as a store: for the writer folder, lock, layout and clearing; for the others a look. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "server/backend/local.h"

#define FILE_MODE    0640
#define FOLDER_MODE  0750
#define BOOT_UNKNOWN "unknown"

struct opening {
    struct backend **result;
    struct loop_names names; /* of the folder, then of tmp/ */
    size_t next;
    struct loop_stat stat;
    bool folder_is_new;
};

static struct opening *opening_of(struct backend_op *op)
{
    return local_op(op)->out;
}

static void end_open(struct backend_op *op)
{
    struct local *l = local_of(op);
    struct opening *g = opening_of(op);
    int status = local_op(op)->status;
    loop_names_free(&g->names);
    if (status == 0)
        *g->result = &l->backend;
    free(g);
    backend_end(op, status);
    if (status)
        free(l);
}

static void lock_given_back(struct io_op *io)
{
    end_open(container_of(io, struct backend_op, io));
}

/* After the first failure; the lock goes with its descriptor. */
static void give_up(struct backend_op *op)
{
    struct local *l = local_of(op);
    if (l->lock_fd < 0) {
        end_open(op);
        return;
    }
    op->io.done = lock_given_back;
    loop_close(l->backend.loop, &op->io, l->lock_fd);
}

static void give_up_sys(struct backend_op *op, int64_t result, const char *doing, const char *path)
{
    local_op(op)->status = err_sys(&op->err, (int)-result, "opening the store: %s %s", doing, path);
    give_up(op);
}

static void set_path(struct backend_op *op, const char *below)
{
    snprintf(op->path[1], sizeof op->path[1], "%s%s", local_of(op)->folder, below);
}

static void clear_next(struct backend_op *op);

static void cleared(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (io->result < 0 && io->result != -ENOENT)
        give_up_sys(op, io->result, "clearing the temporary file", op->path[0]);
    else
        clear_next(op);
}

static void clear_next(struct backend_op *op)
{
    struct opening *g = opening_of(op);
    if (g->next == g->names.count) {
        end_open(op);
        return;
    }
    snprintf(op->path[0], sizeof op->path[0], "%s/tmp/%s", local_of(op)->folder, g->names.names[g->next++]);
    op->io.done = cleared;
    loop_unlink(op->backend->loop, &op->io, op->path[0]);
}

static void temporary_listed(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (io->result < 0)
        give_up_sys(op, io->result, "listing", op->path[1]);
    else
        clear_next(op);
}

static void layout_durable(struct backend_op *op)
{
    if (local_op(op)->status) {
        give_up(op);
        return;
    }
    set_path(op, "/tmp");
    op->io.done = temporary_listed;
    loop_list(op->backend->loop, &op->io, op->path[1], &opening_of(op)->names);
}

/* A folder above that somebody else has made, and that may not be read, is his to make durable. */
static void above_durable(struct backend_op *op)
{
    if (local_op(op)->status == -EACCES && !opening_of(op)->folder_is_new) {
        local_op(op)->status = 0;
        op->err = (struct err){0};
    }
    layout_durable(op);
}

/* The name of the folder too, every time: who made it may have been killed before it was durable. */
static void folder_durable(struct backend_op *op)
{
    if (local_op(op)->status) {
        layout_durable(op);
        return;
    }
    set_path(op, "");
    char *slash = strrchr(op->path[1], '/');
    if (!slash)
        strcpy(op->path[1], ".");
    else
        slash[slash == op->path[1]] = '\0';
    local_sync_folder(op, above_durable);
}

static void objects_made(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (io->result < 0 && io->result != -EEXIST) {
        give_up_sys(op, io->result, "making", op->path[1]);
        return;
    }
    set_path(op, "");
    local_sync_folder(op, folder_durable);
}

static void temporary_made(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (io->result < 0 && io->result != -EEXIST) {
        give_up_sys(op, io->result, "making", op->path[1]);
        return;
    }
    set_path(op, "/objects");
    io->done = objects_made;
    loop_mkdir(op->backend->loop, io, op->path[1], FOLDER_MODE);
}

/* Marks that failed syncs have left (see local_mark): one of this boot ends the opening, older ones go. Only
 * the boot decides: whether the file system was mounted anew meanwhile cannot be seen from here, since each
 * container and each sandboxed service has mounts of its own over the same cache. */

static void make_temporary(struct backend_op *op)
{
    set_path(op, "/tmp");
    op->io.done = temporary_made;
    loop_mkdir(op->backend->loop, &op->io, op->path[1], FOLDER_MODE);
}

static void refuse_marked(struct backend_op *op, const char *mark)
{
    local_op(op)->status =
        err_set(&op->err, ERR_READ_ONLY,
                "a sync of the store %s has failed since this machine was started: memory may show what the "
                "disk does "
                "not hold, so nothing is written; check the disk, then reboot, or unmount its file system "
                "wherever it "
                "is mounted, mount it again and remove %s from the store's folder; then start larderd again",
                local_of(op)->folder, mark);
    give_up(op);
}

/* One that cannot be told from this boot's counts as this boot's. */
static bool is_of_this_boot(const struct local *l, const char *mark)
{
    const char *now = strrchr(l->mark_path, '/') + 1, unknown[] = LOCAL_MARK BOOT_UNKNOWN;
    return strcmp(mark, now) == 0 || strcmp(mark, unknown) == 0 || strcmp(now, unknown) == 0;
}

static void next_mark(struct backend_op *op);

static void mark_gone(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (io->result < 0 && io->result != -ENOENT)
        give_up_sys(op, io->result, "removing the mark of a failed sync before the last boot", op->path[0]);
    else
        next_mark(op);
}

static void next_mark(struct backend_op *op)
{
    struct local *l = local_of(op);
    struct opening *g = opening_of(op);
    while (g->next < g->names.count) {
        const char *name = g->names.names[g->next++];
        if (strncmp(name, LOCAL_MARK, sizeof LOCAL_MARK - 1) != 0)
            continue;
        if (is_of_this_boot(l, name)) {
            refuse_marked(op, name);
            return;
        }
        snprintf(op->path[0], sizeof op->path[0], "%s/%s", l->folder, name);
        op->io.done = mark_gone;
        loop_unlink(op->backend->loop, &op->io, op->path[0]);
        return;
    }
    loop_names_free(&g->names);
    g->next = 0;
    make_temporary(op);
}

static void marks_listed(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (io->result < 0)
        give_up_sys(op, io->result, "listing", op->path[1]);
    else
        next_mark(op);
}

static void look_for_marks(struct backend_op *op)
{
    struct local *l = local_of(op);
    char boot[LOOP_BOOT_BYTES];
    int status = loop_boot(l->backend.loop, boot);
    if (status) { /* then a mark stays until it is removed by hand */
        log_warn("the name of this boot cannot be read; a failed sync would keep larderd from starting "
                 "until its mark is removed by hand reason=\"%s\"",
                 strerror(-status));
        strcpy(boot, BOOT_UNKNOWN);
    }
    snprintf(l->lock_path, sizeof l->lock_path, "%s/lock", l->folder);
    snprintf(l->mark_path, sizeof l->mark_path, "%s/" LOCAL_MARK "%s", l->folder, boot);
    set_path(op, "");
    op->io.done = marks_listed;
    loop_list(l->backend.loop, &op->io, op->path[1], &opening_of(op)->names);
}

static void lock_opened(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    struct local *l = local_of(op);
    if (io->result < 0) {
        give_up_sys(op, io->result, "opening", op->path[1]);
        return;
    }
    l->lock_fd = (int)io->result;
    int status = loop_lock(l->backend.loop, l->lock_fd);
    if (status == -EWOULDBLOCK) {
        local_op(op)->status =
            err_set(&op->err, ERR_BUSY,
                    "another larderd uses the store %s; stop it, or give this one another folder", l->folder);
        give_up(op);
        return;
    }
    if (status) {
        give_up_sys(op, status, "locking", op->path[1]);
        return;
    }
    look_for_marks(op);
}

static void folder_made(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (io->result < 0 && io->result != -EEXIST) {
        give_up_sys(op, io->result, "making the folder (its parent must be there)", op->path[1]);
        return;
    }
    opening_of(op)->folder_is_new = io->result == 0;
    set_path(op, "/lock");
    io->done = lock_opened;
    loop_open(op->backend->loop, io, op->path[1], O_CREAT | O_RDWR, FILE_MODE);
}

static void seen(struct io_op *io)
{
    struct backend_op *op = container_of(io, struct backend_op, io);
    if (io->result == 0 && !opening_of(op)->stat.folder)
        io->result = -ENOTDIR;
    if (io->result < 0)
        give_up_sys(op, io->result, "looking at", op->path[1]);
    else
        end_open(op);
}

static void refuse(struct loop_msg *m)
{
    struct backend_op *op = container_of(m, struct backend_op, msg);
    op->done(op);
}

/* Before there is a backend that could end it. */
static void refuse_later(struct loop *l, struct backend_op *op, int result)
{
    op->result = result;
    op->msg.run = refuse;
    loop_post(l, &op->msg);
}

void backend_local_open(struct loop *l, struct backend_op *op, const char *folder, bool writer,
                        struct backend **out)
{
    *out = NULL;
    err_clear(&op->err);
    size_t n = strlen(folder);
    while (n > 1 && folder[n - 1] == '/')
        n--;
    if (n == 0 || n >= LOCAL_FOLDER_BYTES_MAX) {
        refuse_later(l, op,
                     err_set(&op->err, ERR_INVALID,
                             "the path of a store has 1 to %u bytes, this one has %zu; use a shorter one",
                             LOCAL_FOLDER_BYTES_MAX - 1, n));
        return;
    }
    struct local *b = calloc(1, sizeof *b);
    struct opening *g = calloc(1, sizeof *g);
    if (!b || !g) {
        free(b);
        free(g);
        refuse_later(l, op, err_set(&op->err, ERR_NO_MEMORY, "no memory to open the store %s", folder));
        return;
    }
    backend_init(&b->backend, &local_ops, l);
    descriptors_init(&b->descriptors, l);
    gate_init(&b->gate);
    b->writer = writer;
    b->lock_fd = -1;
    memcpy(b->folder, folder, n);
    g->result = out;
    backend_begin(&b->backend, op, 0);
    local_op(op)->out = g;
    local_op(op)->name = b->folder;
    set_path(op, writer ? "" : "/objects");
    op->io.done = writer ? folder_made : seen;
    if (writer)
        loop_mkdir(l, &op->io, op->path[1], FOLDER_MODE);
    else
        loop_stat(l, &op->io, op->path[1], &g->stat);
}
