/* SPDX-License-Identifier: Apache-2.0 */
#include "server/backend/backend.h"

#include <errno.h>
#include <string.h>

#include "server/backend/impl.h"

void backend_init(struct backend *b, const struct backend_ops *ops, struct loop *l)
{
    *b = (struct backend){.ops = ops, .loop = l};
}

static void close_if_idle(struct backend *b)
{
    if (b->closing && b->pending == 0)
        b->ops->close(b);
}

void backend_end(struct backend_op *op, int64_t result)
{
    struct backend *b = op->backend;
    check(op->pending);
    check(result <= (int64_t)op->asked_bytes);
    if (result >= 0 && op->err.class != ERR_NONE)
        result = -op->err.errnum;
    if (result < 0 && op->err.class == ERR_NONE)
        err_sys(&op->err, (int)-result, "a verb of the %s backend failed", b->ops->name);
    if (op->file) { /* an append */
        op->file->appends--;
        op->file->failed |= result < 0;
        op->file = NULL;
    }
    op->pending = false;
    op->result = result;
    b->pending--;
    bool last = b->closing && b->pending == 0; /* else done may close and free b */
    op->done(op);
    if (last)
        close_if_idle(b);
}

static void end_posted(struct loop_msg *m)
{
    struct backend_op *op = container_of(m, struct backend_op, msg);
    backend_end(op, op->result);
}

void backend_end_later(struct backend_op *op, int64_t result)
{
    op->result = result;
    op->msg.run = end_posted;
    loop_post(op->backend->loop, &op->msg);
}

static void closed_posted(struct loop_msg *m)
{
    struct backend *b = container_of(m, struct backend, msg);
    void (*closed)(void *arg) = b->closed;
    void *arg = b->closed_arg;
    b->ops->free_now(b);
    closed(arg);
}

void backend_closed(struct backend *b)
{
    b->msg.run = closed_posted;
    loop_post(b->loop, &b->msg);
}

void backend_close(struct backend *b, void (*done)(void *arg), void *arg)
{
    check(!b->closing && done);
    b->closing = true;
    b->closed = done;
    b->closed_arg = arg;
    close_if_idle(b);
}

int backend_sync_failed(struct err *e, int errnum, const char *name)
{
    char quoted[300];
    err_quote(quoted, sizeof quoted, name, strlen(name));
    err_sys(
        e, errnum,
        "sync failed; it is not tried again, since what was written for \"%s\" may be lost: check the disk, "
        "then reboot and start larderd again",
        quoted);
    if (e) {
        e->class = ERR_IO;
        e->errnum = EIO;
    }
    return -EIO;
}

static bool name_is_good(const char *name, bool empty_is_good)
{
    size_t n = strnlen(name, BACKEND_NAME_BYTES_MAX + 1);
    if (n > BACKEND_NAME_BYTES_MAX)
        return false;
    if (n == 0)
        return empty_is_good;
    bool first = true;
    for (size_t i = 0; i < n; i++) {
        char c = name[i];
        if (c == '/') {
            if (first)
                return false;
            first = true;
            continue;
        }
        bool good = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || (c == '.' && !first);
        if (!good)
            return false;
        first = false;
    }
    return !first;
}

void backend_begin(struct backend *b, struct backend_op *op, uint64_t asked_bytes)
{
    check(op->done);
    check(!op->pending); /* else it is pending already, or was never zeroed */
    check(!b->closing);
    op->backend = b;
    op->file = NULL;
    op->next = NULL;
    op->pending = true;
    op->asked_bytes = asked_bytes;
    op->result = 0;
    err_clear(&op->err);
    memset(op->priv, 0, sizeof op->priv);
    b->pending++;
}

/* False: refused, and the operation will end so. */
static bool begin_named(struct backend *b, struct backend_op *op, const char *name, uint64_t asked_bytes)
{
    backend_begin(b, op, asked_bytes);
    if (name_is_good(name, false))
        return true;
    char quoted[300];
    err_quote(quoted, sizeof quoted, name, strnlen(name, BACKEND_NAME_BYTES_MAX + 1));
    backend_end_later(op,
                      err_set(&op->err, ERR_INVALID,
                              "\"%s\" is not the name of an object; expected parts of a-z, 0-9, '.' and '-' "
                              "separated by '/', %u bytes at most",
                              quoted, BACKEND_NAME_BYTES_MAX));
    return false;
}

void backend_create(struct backend *b, struct backend_op *op, uint64_t reserve_bytes,
                    struct backend_file **file)
{
    check(file);
    *file = NULL;
    backend_begin(b, op, 0);
    if (reserve_bytes > SEGMENT_BYTES_MAX)
        backend_end_later(op, err_set(&op->err, ERR_LIMIT,
                                      "space for %llu bytes was asked, a segment has at most %llu",
                                      (unsigned long long)reserve_bytes, SEGMENT_BYTES_MAX));
    else
        b->ops->create(op, reserve_bytes, file);
}

void backend_append(struct backend *b, struct backend_op *op, struct backend_file *file, uint64_t offset,
                    const void *p, size_t n)
{
    uint64_t end;
    check(file && file->backend == b);
    check(n > 0 && n % BLOCK_BYTES == 0 && offset % BLOCK_BYTES == 0 && (uintptr_t)p % BLOCK_BYTES == 0);
    backend_begin(b, op, 0);
    op->file = file;
    file->appends++;
    if (__builtin_add_overflow(offset, n, &end) || end > SEGMENT_BYTES_MAX) {
        backend_end_later(
            op, err_set(&op->err, ERR_LIMIT, "a segment has at most %llu bytes", SEGMENT_BYTES_MAX));
        return;
    }
    if (end > file->bytes)
        file->bytes = end;
    b->ops->append(op, offset, p, n);
}

void backend_seal(struct backend *b, struct backend_op *op, struct backend_file *file, const char *name)
{
    check(file && file->backend == b && file->appends == 0);
    bool good = name_is_good(name, false);
    check(good); /* names of what is sealed are the store's own; the handle would be lost */
    backend_begin(b, op, 0);
    op->file = file;
    if (file->failed) {
        err_set(&op->err, ERR_IO, "\"%s\" cannot be sealed, since an append to it failed; it was discarded",
                name);
        b->ops->discard(op);
    } else {
        b->ops->seal(op, name);
    }
}

void backend_discard(struct backend *b, struct backend_op *op, struct backend_file *file)
{
    check(file && file->backend == b && file->appends == 0);
    backend_begin(b, op, 0);
    op->file = file;
    b->ops->discard(op);
}

void backend_put_new(struct backend *b, struct backend_op *op, const char *name, const void *p, size_t n)
{
    check(p || !n);
    if (!begin_named(b, op, name, 0))
        return;
    if (n > COMMIT_BYTES_MAX)
        backend_end_later(op, err_set(&op->err, ERR_LIMIT, "\"%s\" has %zu bytes, a small object at most %u",
                                      name, n, COMMIT_BYTES_MAX));
    else
        b->ops->put_new(op, name, p, n);
}

void backend_read(struct backend *b, struct backend_op *op, const char *name, bool direct, uint64_t offset,
                  void *p, size_t n)
{
    uint64_t end;
    check(p || !n);
    check(!__builtin_add_overflow(offset, n, &end) && end <= INT64_MAX);
    check(!direct || (offset % BLOCK_BYTES == 0 && n % BLOCK_BYTES == 0 && (uintptr_t)p % BLOCK_BYTES == 0));
    if (begin_named(b, op, name, n))
        b->ops->read(op, name, direct, offset, p, n);
}

void backend_stat(struct backend *b, struct backend_op *op, const char *name, uint64_t *bytes)
{
    check(bytes);
    if (begin_named(b, op, name, 0))
        b->ops->stat(op, name, bytes);
}

void backend_list(struct backend *b, struct backend_op *op, const char *prefix, struct loop_names *out)
{
    check(out);
    *out = (struct loop_names){0};
    if (!name_is_good(prefix, true))
        (void)begin_named(b, op, prefix, 0);
    else {
        backend_begin(b, op, 0);
        b->ops->list(op, prefix, out);
    }
}

void backend_remove(struct backend *b, struct backend_op *op, const char *name)
{
    if (begin_named(b, op, name, 0))
        b->ops->remove(op, name);
}

int backend_space(struct backend *b, uint64_t *free_bytes, uint64_t *total_bytes)
{
    check(free_bytes && total_bytes);
    return b->ops->space(b, free_bytes, total_bytes);
}
