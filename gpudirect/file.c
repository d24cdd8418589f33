/* SPDX-License-Identifier: Apache-2.0 */
#include "gpudirect/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpudirect/cufile.h"
#include "gpudirect/pool.h"

#define SLOTS      4u
#define SLOT_BYTES (1u << 20)
#define CALL_MAX   (64u << 20) /* bytes of one call of cuFile */

struct file_access {
    struct memory *m;
    enum file_want want;
    struct memory_stream *stream;
    bool ready; /* the bounce buffer, made when the first file needs it */
    struct pool *pool;
    uint8_t *slots[SLOTS];
    struct memory_event *events[SLOTS]; /* the last copy that used the slot */
};

struct file {
    struct file_access *a;
    int fd, direct_fd; /* -1: not open */
    struct cufile *cufile;
    struct stat stat;
    char path[320];
    char name[]; /* for errors */
};

/* ---- access ---- */

int file_access_open(struct memory *m, enum file_want want, struct file_access **out, struct err *e)
{
    struct file_access *a = calloc(1, sizeof *a);
    if (!a)
        return err_set(e, ERR_NO_MEMORY, "no memory to read and write files");
    a->m = m;
    a->want = want;
    int rc = memory_stream_create(m, &a->stream, e);
    if (rc < 0) {
        free(a);
        return rc;
    }
    *out = a;
    return 0;
}

static void bounce_end(struct file_access *a)
{
    for (unsigned i = 0; i < SLOTS; i++) {
        memory_event_destroy(a->events[i]);
        if (a->slots[i])
            pool_give(a->pool, a->slots[i]);
        a->events[i] = NULL;
        a->slots[i] = NULL;
    }
    pool_destroy(a->pool);
    a->pool = NULL;
}

void file_access_close(struct file_access *a)
{
    struct err e;
    if (!a)
        return;
    if (memory_stream_wait(a->stream, FILE_WAIT_MS, &e) == -ETIMEDOUT)
        return; /* a device that hangs may still write there: it keeps its memory */
    bounce_end(a);
    memory_stream_destroy(a->stream);
    free(a);
}

int file_after_caller(struct file_access *a, void *caller_stream, struct err *e)
{
    int rc = memory_stream_after_caller(a->stream, caller_stream, e);
    if (rc == 0)
        rc = memory_stream_wait(a->stream, FILE_WAIT_MS, e);
    return rc;
}

/* What it cannot pin it uses as it is; file_path tells. */
static int bounce_ready(struct file_access *a, struct err *e)
{
    if (a->ready)
        return 0;
    int rc = pool_create((uint64_t)SLOTS * SLOT_BYTES, SLOT_BYTES, &a->pool, e);
    if (rc < 0)
        return rc;
    if (pool_register(a->pool, a->m, e) < 0)
        rc = memory_lost(a->m, e);
    for (unsigned i = 0; i < SLOTS && rc == 0; i++) {
        a->slots[i] = pool_take(a->pool);
        rc = memory_event_create(a->m, &a->events[i], e);
    }
    a->ready = rc == 0;
    if (rc < 0)
        bounce_end(a);
    return rc;
}

/* ---- opening ---- */

/* cuFile wants direct I/O for the direct path. The same file, also if its name has got another meanwhile. */
static int open_direct(int fd, enum file_mode mode)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, (mode == FILE_READ ? O_RDONLY : O_RDWR) | O_DIRECT | O_CLOEXEC);
}

static bool try_cufile(struct file *f, enum file_mode mode, struct err *why)
{
    struct cufile_probe p;
    cufile_probe(&p);
    if (f->a->want == FILE_BOUNCE || !p.usable) {
        err_set(why, ERR_UNSUPPORTED, "%s", p.usable ? "as asked for" : p.note);
        return false;
    }
    f->direct_fd = open_direct(f->fd, mode);
    return cufile_open(f->a->m, f->direct_fd >= 0 ? f->direct_fd : f->fd, &f->cufile, why) == 0;
}

static int find_path(struct file *f, enum file_mode mode, struct err *e)
{
    struct err why;
    struct file_access *a = f->a;
    if (memory_kind(a->m) == MEMORY_HOST) {
        snprintf(f->path, sizeof f->path, "read and written in place");
        return 0;
    }
    if (try_cufile(f, mode, &why)) {
        snprintf(f->path, sizeof f->path, "%s", cufile_path(f->cufile));
        return 0;
    }
    int rc = bounce_ready(a, e);
    if (rc == 0 && pool_registered(a->pool))
        snprintf(f->path, sizeof f->path, "pinned bounce buffer: %.290s", why.text);
    else if (rc == 0)
        snprintf(f->path, sizeof f->path, "bounce buffer (%.140s): %.140s", pool_note(a->pool), why.text);
    return rc;
}

int file_open(struct file_access *a, const char *path, enum file_mode mode, struct file **out, struct err *e)
{
    static const int flags[] = {[FILE_READ] = O_RDONLY | O_NONBLOCK,
                                [FILE_CREATE] = O_RDWR | O_CREAT | O_EXCL,
                                [FILE_UPDATE] = O_RDWR | O_NONBLOCK};
    size_t n = strlen(path) + 1;
    struct file *f = calloc(1, sizeof *f + n);
    if (!f)
        return err_set(e, ERR_NO_MEMORY, "no memory to open %s", path);
    memcpy(f->name, path, n);
    f->a = a;
    f->direct_fd = -1;
    f->fd = open(path, flags[mode] | O_CLOEXEC, 0600);
    int rc = f->fd < 0 || fstat(f->fd, &f->stat) < 0 ? err_sys(e, errno, "opening %s", path) : 0;
    if (rc == 0 && !S_ISREG(f->stat.st_mode))
        rc = err_set(e, ERR_INVALID, "%s is not a regular file", path);
    if (rc == 0)
        rc = find_path(f, mode, e);
    if (rc < 0) {
        file_close(f);
        return rc;
    }
    *out = f;
    return 0;
}

void file_close(struct file *f)
{
    if (!f)
        return;
    cufile_close(f->cufile);
    if (f->direct_fd >= 0)
        close(f->direct_fd);
    if (f->fd >= 0)
        close(f->fd);
    free(f);
}

const struct stat *file_stat(const struct file *f)
{
    return &f->stat;
}

const char *file_path(const struct file *f)
{
    return f->path;
}

static bool same_time(const struct timespec *a, const struct timespec *b)
{
    return a->tv_sec == b->tv_sec && a->tv_nsec == b->tv_nsec;
}

int file_unchanged(struct file *f, const struct stat *then, struct err *e)
{
    struct stat now;
    if (fstat(f->fd, &now) < 0)
        return err_sys(e, errno, "looking at %s", f->name);
    if (now.st_size == then->st_size && now.st_ino == then->st_ino && now.st_dev == then->st_dev &&
        same_time(&now.st_mtim, &then->st_mtim))
        return 0;
    return err_set(e, ERR_MISMATCH, "%s was changed while it is in use: it had %lld bytes, and has %lld now",
                   f->name, (long long)then->st_size, (long long)now.st_size);
}

/* ---- host memory ---- */

static int ended(const struct file *f, uint64_t at, size_t missing, struct err *e)
{
    return err_set(e, ERR_CORRUPT, "%s ends at byte %llu, where %zu more were expected", f->name,
                   (unsigned long long)at, missing);
}

int file_read_host(struct file *f, uint64_t offset, size_t n, void *to, struct err *e)
{
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(f->fd, (uint8_t *)to + done, n - done, (off_t)(offset + done));
        if (got == 0)
            return ended(f, offset + done, n - done, e);
        if (got < 0 && errno != EINTR)
            return err_sys(e, errno, "reading %s at byte %llu", f->name, (unsigned long long)(offset + done));
        done += got > 0 ? (size_t)got : 0;
    }
    return 0;
}

int file_write_host(struct file *f, uint64_t offset, size_t n, const void *from, struct err *e)
{
    for (size_t done = 0; done < n;) {
        ssize_t put = pwrite(f->fd, (const uint8_t *)from + done, n - done, (off_t)(offset + done));
        if (put < 0 && errno != EINTR)
            return err_sys(e, errno, "writing %s at byte %llu", f->name, (unsigned long long)(offset + done));
        done += put > 0 ? (size_t)put : 0;
    }
    return 0;
}

int file_sync(struct file *f, struct err *e)
{
    return fsync(f->fd) < 0 ? err_sys(e, errno, "syncing %s", f->name) : 0;
}

/* ---- by cuFile ---- */

static int read_cufile(struct file *f, uint64_t offset, size_t n, uint8_t *to, struct err *e)
{
    for (size_t done = 0; done < n;) {
        size_t most = n - done < CALL_MAX ? n - done : CALL_MAX;
        int64_t got = cufile_read(f->cufile, offset + done, most, to + done, e);
        if (got == 0)
            return ended(f, offset + done, n - done, e);
        if (got < 0)
            return err_prepend(e, "%s at byte %llu", f->name, (unsigned long long)(offset + done));
        done += (size_t)got;
    }
    return 0;
}

static int write_cufile(struct file *f, uint64_t offset, size_t n, const uint8_t *from, struct err *e)
{
    for (size_t done = 0; done < n;) {
        size_t most = n - done < CALL_MAX ? n - done : CALL_MAX;
        int64_t put = cufile_write(f->cufile, offset + done, most, from + done, e);
        if (put == 0)
            return err_set(e, ERR_IO, "cuFile wrote nothing of %zu bytes to %s, and does not say why", most,
                           f->name);
        if (put < 0)
            return err_prepend(e, "%s at byte %llu", f->name, (unsigned long long)(offset + done));
        done += (size_t)put;
    }
    return 0;
}

/* ---- by the bounce buffer ---- */

static size_t piece_at(size_t n, size_t at)
{
    return n - at < SLOT_BYTES ? n - at : SLOT_BYTES;
}

/* Nothing is under way any more when it returns; the first failure counts. */
static int settle(struct file_access *a, int rc, struct err *e)
{
    struct err second;
    int waited = memory_stream_wait(a->stream, FILE_WAIT_MS, rc < 0 ? &second : e);
    return rc < 0 ? rc : waited;
}

static int read_bounce(struct file *f, uint64_t offset, size_t n, uint8_t *to, struct err *e)
{
    struct file_access *a = f->a;
    int rc = 0;
    for (size_t at = 0, k = 0; at < n && rc == 0; at += piece_at(n, at), k++) {
        unsigned i = k % SLOTS;
        size_t piece = piece_at(n, at);
        rc = memory_event_wait(a->events[i], FILE_WAIT_MS, e);
        if (rc == 0)
            rc = file_read_host(f, offset + at, piece, a->slots[i], e);
        if (rc == 0)
            rc = memory_copy(a->stream, MEMORY_IN, to + at, a->slots[i], piece, e);
        if (rc == 0)
            rc = memory_event_record(a->events[i], a->stream, e);
    }
    return settle(a, rc, e);
}

static int copy_out(struct file_access *a, unsigned i, const uint8_t *from, size_t n, struct err *e)
{
    int rc = memory_copy(a->stream, MEMORY_OUT, a->slots[i], from, n, e);
    return rc < 0 ? rc : memory_event_record(a->events[i], a->stream, e);
}

/* The device is up to SLOTS pieces ahead of the disk. */
static int write_bounce(struct file *f, uint64_t offset, size_t n, const uint8_t *from, struct err *e)
{
    struct file_access *a = f->a;
    size_t asked = 0;
    int rc = 0;
    for (size_t at = 0, k = 0; at < n && rc == 0; at += piece_at(n, at), k++) {
        for (; rc == 0 && asked < n && asked < at + SLOTS * (size_t)SLOT_BYTES; asked += piece_at(n, asked))
            rc = copy_out(a, asked / SLOT_BYTES % SLOTS, from + asked, piece_at(n, asked), e);
        if (rc == 0)
            rc = memory_event_wait(a->events[k % SLOTS], FILE_WAIT_MS, e);
        if (rc == 0)
            rc = file_write_host(f, offset + at, piece_at(n, at), a->slots[k % SLOTS], e);
    }
    return settle(a, rc, e);
}

int file_read(struct file *f, uint64_t offset, size_t n, void *to, struct err *e)
{
    struct err own = {0};
    e = e ? e : &own;
    check(n > 0);
    if (memory_kind(f->a->m) == MEMORY_HOST)
        return file_read_host(f, offset, n, to, e);
    return f->cufile ? read_cufile(f, offset, n, to, e) : read_bounce(f, offset, n, to, e);
}

int file_write(struct file *f, uint64_t offset, size_t n, const void *from, struct err *e)
{
    struct err own = {0};
    e = e ? e : &own;
    check(n > 0);
    if (memory_kind(f->a->m) == MEMORY_HOST)
        return file_write_host(f, offset, n, from, e);
    return f->cufile ? write_cufile(f, offset, n, from, e) : write_bounce(f, offset, n, from, e);
}
