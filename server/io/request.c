/* SPDX-License-Identifier: Apache-2.0 */
#include "server/io/request.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format/limits.h"

#define ATTEMPTS_BEHIND_MAX 100u
#define ATTEMPT_BYTES_MAX   ((size_t)1 << 30)

const char *io_code_name(enum io_code code)
{
    static const char *const names[IO_CODE_COUNT] = {
        "open",   "read", "write",  "fdatasync", "fsync", "allocate", "truncate",
        "close",  "link", "unlink", "rmdir",     "mkdir", "stat",     "list",
        "advise", "work", "accept", "connect",   "recv",  "send",     "send_parts",
    };
    return (unsigned)code < IO_CODE_COUNT ? names[code] : "unknown";
}

size_t io_resume(const struct io_req *r, size_t *bytes)
{
    size_t start = r->done;
    if ((r->code == IO_READ || r->code == IO_WRITE) && start > 0) {
        size_t past_border = (size_t)((r->offset + start) % BLOCK_BYTES);
        start -= past_border < start ? past_border : start;
    }
    *bytes = r->n - start < ATTEMPT_BYTES_MAX ? r->n - start : ATTEMPT_BYTES_MAX;
    return start;
}

struct msghdr *io_parts(struct io_req *r)
{
    struct loop_parts *p = r->out;
    for (size_t skip = r->done - (size_t)r->offset; skip > 0;) {
        struct iovec *v = &p->part[p->first];
        size_t n = skip < v->iov_len ? skip : v->iov_len;
        v->iov_base = (uint8_t *)v->iov_base + n;
        v->iov_len -= n;
        skip -= n;
        if (v->iov_len == 0)
            p->first++;
    }
    r->offset = r->done;
    p->message = (struct msghdr){.msg_iov = p->part + p->first, .msg_iovlen = p->count - p->first};
    return &p->message;
}

/* A transfer got `got` bytes: 0 or more. An attempt that starts again on a block border and reaches less than
 * the one before says nothing of the end of the file: another is made, but not for ever. */
static bool settle_transfer(struct io_op *op, size_t got)
{
    struct io_req *r = io_req(op);
    size_t asked, reached = io_resume(r, &asked) + got;
    bool moved = reached > r->done;
    if (reached < r->done && r->code != IO_SEND) {
        if (++r->mode < ATTEMPTS_BEHIND_MAX)
            return false;
        op->result = -EIO;
        return true;
    }
    if (moved)
        r->done = reached;
    if (r->done < r->n && moved)
        return false;
    if (r->done < r->n && r->code != IO_READ)
        op->result = -EIO; /* neither progress nor an error */
    else
        op->result = (int64_t)r->done; /* all of it, or the end of the file */
    return true;
}

bool io_settle(struct io_op *op, int64_t result)
{
    struct io_req *r = io_req(op);
    if (result == -EINTR || result == -EAGAIN) {
        if (r->code == IO_CLOSE) { /* Linux has released the descriptor by then */
            op->result = 0;
            return true;
        }
        if (!r->cancelled)
            return false;
        result = -ECANCELED;
    }
    if (result >= 0 &&
        (r->code == IO_READ || r->code == IO_WRITE || r->code == IO_SEND || r->code == IO_SEND_PARTS)) {
        if (settle_transfer(op, (size_t)result))
            return true;
        if (!r->cancelled)
            return false;
        result = -ECANCELED;
    }
    op->result = result;
    return true;
}

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int names_add(struct loop_names *names, size_t *room, const char *name)
{
    if (names->count == *room) {
        size_t more = *room ? *room * 2 : 64;
        char **grown = reallocarray(names->names, more, sizeof *grown);
        if (!grown)
            return -ENOMEM;
        names->names = grown;
        *room = more;
    }
    char *copy = strdup(name);
    if (!copy)
        return -ENOMEM;
    names->names[names->count++] = copy;
    return 0;
}

static int64_t list_folder(const char *path, struct loop_names *out)
{
    struct loop_names names = {0};
    size_t room = 0;
    int result = 0;
    DIR *d = opendir(path);
    if (!d)
        return -errno;
    while (result == 0) {
        errno = 0;
        struct dirent *entry = readdir(d);
        if (!entry) {
            result = -errno;
            break;
        }
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            result = names_add(&names, &room, entry->d_name);
    }
    if (closedir(d) && result == 0)
        result = -errno;
    if (result) {
        loop_names_free(&names);
        return result;
    }
    if (names.count)
        qsort(names.names, names.count, sizeof *names.names, by_bytes);
    *out = names;
    return 0;
}

void io_stat_fill(struct loop_stat *out, const struct statx *sx)
{
    *out = (struct loop_stat){
        .bytes = sx->stx_size,
        .mtime_ns = (uint64_t)sx->stx_mtime.tv_sec * 1000000000u + sx->stx_mtime.tv_nsec,
        .inode = sx->stx_ino,
        .folder = S_ISDIR(sx->stx_mode),
        .file = S_ISREG(sx->stx_mode),
    };
}

static int64_t stat_path(const char *path, struct loop_stat *out)
{
    struct statx sx;
    if (statx(AT_FDCWD, path, 0, STATX_BASIC_STATS, &sx))
        return -errno;
    io_stat_fill(out, &sx);
    return 0;
}

static int64_t transfer(struct io_op *op)
{
    struct io_req *r = io_req(op);
    for (;;) {
        size_t bytes, start = io_resume(r, &bytes);
        off_t at = (off_t)(r->offset + start);
        uint8_t *p = (uint8_t *)r->p + start;
        ssize_t got = r->code == IO_READ ? pread(r->fd, p, bytes, at) : pwrite(r->fd, p, bytes, at);
        if (io_settle(op, got < 0 ? -errno : got))
            return op->result;
    }
}

int64_t io_work(const struct io_req *r)
{
    struct loop_work *w = r->out;
    w->run(w);
    return 0;
}

static int64_t result_of(int value)
{
    return value < 0 ? -errno : value;
}

/* Opened without waiting, a pipe has no writer to wait for; a file is read and written as always, so the flag
 * goes again. */
int64_t io_opened(int64_t fd, int flags)
{
    struct stat st;
    if (fd < 0)
        return fd == -ENXIO ? -EMEDIUMTYPE : fd;
    int64_t result = result_of(fstat((int)fd, &st));
    if (result == 0 && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))
        result = -EMEDIUMTYPE;
    if (result == 0)
        result = result_of(fcntl((int)fd, F_SETFL, flags & (O_APPEND | O_DIRECT | O_NOATIME)));
    if (result == 0)
        return fd;
    close((int)fd);
    return result;
}

/* Close is not repeated after EINTR: Linux has released the descriptor by then. */
static int64_t attempt(struct io_req *r)
{
    switch ((enum io_code)r->code) {
    case IO_OPEN:
        return io_opened(result_of(open(r->path, r->flags | IO_OPEN_FLAGS, (mode_t)r->mode)), r->flags);
    case IO_ADVISE: return -posix_fadvise(r->fd, (off_t)r->offset, (off_t)r->n, r->flags);
    case IO_FDATASYNC: return result_of(fdatasync(r->fd));
    case IO_FSYNC: return result_of(fsync(r->fd));
    case IO_ALLOCATE: return result_of(fallocate(r->fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)r->offset));
    case IO_TRUNCATE: return result_of(ftruncate(r->fd, (off_t)r->offset));
    case IO_CLOSE: return result_of(close(r->fd));
    case IO_LINK: return result_of(link(r->path, r->path2));
    case IO_UNLINK: return result_of(unlink(r->path));
    case IO_RMDIR: return result_of(rmdir(r->path));
    case IO_MKDIR: return result_of(mkdir(r->path, (mode_t)r->mode));
    case IO_STAT: return stat_path(r->path, r->out);
    case IO_LIST: return list_folder(r->path, r->out);
    case IO_WORK: return io_work(r);
    default: return -ENOSYS;
    }
}

int64_t io_blocking(struct io_op *op)
{
    struct io_req *r = io_req(op);
    if (r->code == IO_READ || r->code == IO_WRITE)
        return transfer(op);
    int64_t result = attempt(r);
    while (result == -EINTR && r->code != IO_CLOSE)
        result = attempt(r);
    return result == -EINTR ? 0 : result;
}
