/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the samples of local files. Bytes of members are skipped, not read: a scan costs one read per header.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "client/dataset_import.h"

#define SCAN_READ_BYTES  (16u << 10)
#define INDEX_KEPT_BYTES (256u << 20) /* sample indexes kept from the scan to the writing, all together */

int import_pread(int fd, void *p, size_t n, uint64_t offset, struct err *e)
{
    for (size_t done = 0; done < n;) {
        ssize_t r = pread(fd, (char *)p + done, n - done, (off_t)(offset + done));
        if (r < 0 && errno == EINTR)
            continue;
        if (r < 0)
            return err_sys(e, errno, "reading %zu bytes at %" PRIu64, n, offset);
        if (r == 0)
            return err_set(e, ERR_MISMATCH,
                           "the file became shorter while it was imported: %" PRIu64 " bytes now",
                           offset + done);
        done += (size_t)r;
    }
    return 0;
}

static bool same_time(struct timespec a, struct timespec b)
{
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

int import_unchanged(const struct import_file *f, int fd, struct err *e)
{
    struct stat now;
    if (fstat(fd, &now) < 0)
        return err_sys(e, errno, "looking at it again");
    if (now.st_ino != f->at_scan.st_ino || now.st_dev != f->at_scan.st_dev ||
        now.st_size != f->at_scan.st_size || !same_time(now.st_mtim, f->at_scan.st_mtim))
        return err_set(e, ERR_MISMATCH,
                       "the file was changed while it was imported: import it again when nobody "
                       "writes to it");
    return 0;
}

static enum shard_format format_of(const struct import *im, const char *path)
{
    size_t n = strlen(path);
    if (im->o->format != LARDER_SHARD_AUTO)
        return (enum shard_format)im->o->format;
    return n >= 4 && strcasecmp(path + n - 4, ".tar") == 0 ? SHARD_TAR : SHARD_WHOLE;
}

/* A compressed tar would become one opaque sample, which nobody means who lets the format be found. */
static int compressed_tar_check(const struct import *im, const char *path, struct err *e)
{
    static const char *const ends[] = {".tgz",     ".txz",     ".tar.gz", ".tar.xz",
                                       ".tar.zst", ".tar.bz2", ".tar.lz4"};
    size_t n = strlen(path);
    for (size_t i = 0; im->o->format == LARDER_SHARD_AUTO && i < sizeof ends / sizeof ends[0]; i++) {
        size_t m = strlen(ends[i]);
        if (n >= m && strcasecmp(path + n - m, ends[i]) == 0)
            return err_set(
                e, ERR_UNSUPPORTED,
                "it is a compressed archive: unpack it to a .tar to have its members as samples, or import "
                "it as one sample of bytes with the format whole");
    }
    return 0;
}

static int push_file(struct samples_builder *b, int fd, uint64_t size, struct err *e)
{
    uint8_t block[SCAN_READ_BYTES];
    int rc = 0;
    for (uint64_t at = 0; rc == 0 && at < size;) {
        uint64_t skip = samples_builder_skippable(b), left = size - at;
        if (skip > 0) {
            skip = skip < left ? skip : left;
            samples_builder_skip(b, skip);
            at += skip;
            continue;
        }
        size_t n = left < sizeof block ? (size_t)left : sizeof block;
        rc = import_pread(fd, block, n, at, e);
        if (rc == 0)
            rc = samples_builder_push(b, block, n, e);
        at += n;
    }
    return rc;
}

static int scan_open_file(struct import *im, uint32_t i, int fd, struct buf *out, uint64_t *count,
                          struct err *e)
{
    const struct shard *s = &im->table.shards[i];
    struct samples_builder *b = NULL;
    struct samples *samples = NULL;
    int rc = samples_builder_create(s->format, s->name, im->o->record_bytes, &b, e);
    if (rc == 0)
        rc = push_file(b, fd, s->bytes, e);
    if (rc == 0)
        rc = samples_builder_finish(b, &samples, e);
    if (rc == 0)
        rc = samples_encode(samples, out, e);
    if (rc == 0)
        *count = samples_count(samples);
    if (samples)
        samples_free(samples);
    if (b)
        samples_builder_free(b);
    return rc;
}

static int look(struct import *im, uint32_t i, int fd, struct err *e)
{
    struct import_file *f = &im->files[i];
    if (fstat(fd, &f->at_scan) < 0)
        return err_sys(e, errno, "looking at it");
    if (!S_ISREG(f->at_scan.st_mode))
        return err_set(e, ERR_INVALID, "it is not a regular file: a shard is one file");
    if (f->at_scan.st_size == 0)
        return err_set(e, ERR_CORRUPT,
                       "it has 0 bytes: no shard is empty, the file was cut or never written");
    uint64_t size = (uint64_t)f->at_scan.st_size;
    if (size / CHUNK_PLAIN_BYTES_MAX >= SEGMENT_CHUNKS_MAX - 1024 || size > SEGMENT_BYTES_MAX)
        return err_set(e, ERR_LIMIT, "it has %" PRIu64 " bytes, more than one shard can hold: split it",
                       size);
    im->table.shards[i].bytes = size;
    im->table.shards[i].format = format_of(im, f->path);
    return compressed_tar_check(im, f->path, e);
}

int import_scan(struct import *im, uint32_t i, struct err *e)
{
    struct import_file *f = &im->files[i];
    int fd = open(f->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return err_sys(e, errno, "%s", f->path);
    int rc = look(im, i, fd, e);
    if (rc == 0)
        rc = scan_open_file(im, i, fd, &f->index, &im->table.shards[i].samples, e);
    if (rc < 0)
        err_prepend(e, "%s", f->path);
    close(fd);
    f->index_bytes = f->index.n;
    pthread_mutex_lock(&im->lock);
    bool keep = im->index_bytes_kept + f->index.n <= INDEX_KEPT_BYTES;
    if (keep)
        im->index_bytes_kept += f->index.n;
    pthread_mutex_unlock(&im->lock);
    if (!keep || rc < 0)
        buf_free(&f->index);
    return rc;
}

int import_index(struct import *im, uint32_t i, struct buf *out, struct err *e)
{
    struct import_file *f = &im->files[i];
    if (f->index.n) {
        *out = f->index;
        f->index = (struct buf){0};
        return 0;
    }
    int fd = open(f->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return err_sys(e, errno, "%s", f->path);
    uint64_t count;
    int rc = import_unchanged(f, fd, e);
    if (rc == 0)
        rc = scan_open_file(im, i, fd, out, &count, e);
    if (rc == 0)
        rc = import_unchanged(f, fd, e);
    if (rc == 0 && out->n != f->index_bytes)
        rc = err_set(e, ERR_MISMATCH, "its samples are not those of the first look: the file was changed");
    if (rc < 0)
        err_prepend(e, "%s", f->path);
    close(fd);
    return rc;
}
