/* SPDX-License-Identifier: Apache-2.0 */
#include "client/dataset_source.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#include "format/mds_unpack.h"

#define PACKED_BYTES (256u << 10) /* read at once */

struct source {
    struct source_options o;
    int fd;
    uint64_t at;               /* of the file: where it is read next */
    uint64_t done;             /* bytes of the shard */
    struct mds_unpack *unpack; /* of a packed file */
    uint8_t *packed;
    struct slice in;
    struct mds_checks own; /* of any other */
};

/* ---- files ---- */

static bool same_time(struct timespec a, struct timespec b)
{
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

int source_unchanged(const struct stat *was, int fd, struct err *e)
{
    struct stat now;
    if (fstat(fd, &now) < 0)
        return err_sys(e, errno, "looking at it again");
    if (now.st_ino != was->st_ino || now.st_dev != was->st_dev || now.st_size != was->st_size ||
        !same_time(now.st_mtim, was->st_mtim))
        return err_set(e, ERR_MISMATCH,
                       "the file was changed while it was imported: import it again when nobody "
                       "writes to it");
    return 0;
}

/* Up to n bytes; 0 at the end of the file. */
static ssize_t read_some(struct source *s, void *p, size_t n, struct err *e)
{
    ssize_t r;
    do
        r = pread(s->fd, p, n, (off_t)s->at);
    while (r < 0 && errno == EINTR);
    if (r < 0)
        return err_sys(e, errno, "reading %zu bytes at %" PRIu64, n, s->at);
    s->at += (uint64_t)r;
    return r;
}

/* ---- the source ---- */

static int unpacking_begin(struct source *s, struct err *e)
{
    s->packed = malloc(PACKED_BYTES);
    if (!s->packed)
        return err_set(e, ERR_NO_MEMORY, "no memory for unpacking a shard");
    return mds_unpack_create(s->o.bytes, s->o.plain, s->o.packed, &s->unpack, e);
}

int source_open(const struct source_options *o, struct source **out, struct err *e)
{
    struct source *s = calloc(1, sizeof *s);
    if (!s)
        return err_set(e, ERR_NO_MEMORY, "no memory for reading a file");
    s->o = *o;
    s->fd = open(o->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    int rc = s->fd < 0 ? err_sys(e, errno, "opening it") : 0;
    if (rc == 0 && o->was)
        rc = source_unchanged(o->was, s->fd, e);
    if (rc == 0 && o->whole)
        (void)posix_fadvise(s->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    if (rc == 0 && o->zstd)
        rc = unpacking_begin(s, e);
    else if (rc == 0 && o->plain)
        rc = mds_checks_begin(&s->own, o->plain, e);
    if (rc < 0)
        source_close(s);
    else
        *out = s;
    return rc;
}

void source_close(struct source *s)
{
    if (!s)
        return;
    mds_checks_free(&s->own);
    mds_unpack_free(s->unpack);
    free(s->packed);
    if (s->fd >= 0)
        close(s->fd);
    free(s);
}

/* The next n unpacked bytes, fewer at the end of the file. */
static int unpack(struct source *s, uint8_t *p, size_t n, size_t *got, struct err *e)
{
    *got = 0;
    for (bool ended = false; *got < n && !ended;) {
        size_t more;
        int rc = mds_unpack_push(s->unpack, &s->in, p + *got, n - *got, &more, e);
        if (rc < 0)
            return rc;
        *got += more;
        if (*got == n)
            break;
        ssize_t refill = read_some(s, s->packed, PACKED_BYTES, e);
        if (refill < 0)
            return (int)refill;
        s->in = SLICE(s->packed, refill);
        ended = refill == 0;
    }
    return 0;
}

static int read_packed(struct source *s, void *p, size_t n, struct err *e)
{
    size_t got;
    int rc = unpack(s, p, n, &got, e);
    return rc == 0 && got < n ? mds_unpack_end(s->unpack, e) : rc;
}

static int read_plain(struct source *s, void *p, size_t n, struct err *e)
{
    for (size_t done = 0; done < n;) {
        ssize_t r = read_some(s, (char *)p + done, n - done, e);
        if (r < 0)
            return (int)r;
        if (r == 0)
            return err_set(e, ERR_MISMATCH,
                           "the file became shorter while it was imported: %" PRIu64 " bytes now", s->at);
        done += (size_t)r;
    }
    mds_checks_add(&s->own, p, n);
    return 0;
}

int source_read(struct source *s, void *p, size_t n, struct err *e)
{
    int rc = s->unpack ? read_packed(s, p, n, e) : read_plain(s, p, n, e);
    if (rc == 0)
        s->done += n;
    return rc;
}

uint64_t source_skip(struct source *s, uint64_t n)
{
    if (s->unpack)
        return 0;
    check(s->own.count == 0 || n == 0);
    s->at += n;
    s->done += n;
    return n;
}

int source_end(struct source *s, struct err *e)
{
    uint8_t more;
    size_t got;
    check(s->done == s->o.bytes);
    int rc = s->unpack ? unpack(s, &more, 1, &got, e) : mds_checks_end(&s->own, "own", e);
    if (rc == 0 && s->unpack)
        rc = mds_unpack_end(s->unpack, e);
    return rc == 0 && s->o.was ? source_unchanged(s->o.was, s->fd, e) : rc;
}
