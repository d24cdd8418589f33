/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the samples of local files. Bytes of members are skipped, not read: a scan costs one read per header.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <strings.h>

#include "client/dataset_import.h"
#include "client/dataset_source.h"

#define SCAN_READ_BYTES  (16u << 10)
#define INDEX_KEPT_BYTES (256u << 20) /* sample indexes kept from the scan to the writing, all together */

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

/* Where the samples of file i are found: in the shard itself, or in the .idx of a token file. */
static struct samples_source found_in(const struct import *im, uint32_t i)
{
    const struct import_file *f = &im->files.list[i];
    const struct shard *s = &im->table.shards[i];
    return (struct samples_source){
        .format = s->format,
        .shard = s->name,
        .shard_bytes = s->bytes,
        .record_bytes = s->format == SHARD_RECORDS ? im->o->record_bytes : 0,
        .mds = f->mds,
        .idx_bytes = f->idx ? (uint64_t)f->idx_at_scan.st_size : 0,
        .window = {im->o->window_tokens, im->o->window_extra},
    };
}

static int push_all(struct samples_builder *b, struct source *s, uint64_t size, struct err *e)
{
    uint8_t block[SCAN_READ_BYTES];
    int rc = 0;
    for (uint64_t at = 0; rc == 0 && at < size;) {
        uint64_t skip = source_skip(s, samples_builder_skippable(b)), left = size - at;
        if (skip > 0) {
            samples_builder_skip(b, skip);
            at += skip;
            continue;
        }
        size_t n = left < sizeof block ? (size_t)left : sizeof block;
        rc = source_read(s, block, n, e);
        if (rc == 0)
            rc = samples_builder_push(b, block, n, e);
        at += n;
    }
    return rc == 0 ? source_end(s, e) : rc;
}

static int scan_source(struct import *im, uint32_t i, struct source *s, struct buf *out, uint64_t *count,
                       struct err *e)
{
    struct samples_source found = found_in(im, i);
    struct samples_builder *b = NULL;
    struct samples *samples = NULL;
    int rc = samples_builder_create(&found, &b, e);
    if (rc == 0)
        rc = push_all(b, s, samples_source_bytes(&found), e);
    if (rc == 0)
        rc = samples_builder_finish(b, &samples, e);
    if (rc == 0)
        rc = samples_encode(samples, out, e);
    if (rc == 0)
        *count = samples_count(samples);
    samples_free(samples);
    samples_builder_free(b);
    return rc;
}

/* Errors name the file. */
static int scan_file(struct import *im, uint32_t i, struct buf *out, uint64_t *count, struct err *e)
{
    const struct import_file *f = &im->files.list[i];
    struct source_options o = {.path = f->idx ? f->idx : f->path,
                               .bytes = f->idx ? (uint64_t)f->idx_at_scan.st_size : im->table.shards[i].bytes,
                               .zstd = f->zstd,
                               .was = f->idx ? &f->idx_at_scan : &f->at_scan};
    struct source *s = NULL;
    int rc = source_open(&o, &s, e);
    if (rc == 0)
        rc = scan_source(im, i, s, out, count, e);
    source_close(s);
    return rc < 0 ? err_prepend(e, "%s", o.path) : 0;
}

/* What kind of file it is, before anything is read. */
static int look_at(const char *path, struct stat *st, struct err *e)
{
    if (stat(path, st) < 0)
        return err_sys(e, errno, "looking at it");
    if (!S_ISREG(st->st_mode))
        return err_set(e, ERR_INVALID, "it is not a regular file: a shard is one file");
    if (st->st_size == 0)
        return err_set(e, ERR_CORRUPT,
                       "it has 0 bytes: no shard is empty, the file was cut or never written");
    return 0;
}

static int look(struct import *im, uint32_t i, struct err *e)
{
    struct import_file *f = &im->files.list[i];
    int rc = look_at(f->path, &f->at_scan, e);
    if (rc == 0 && f->idx)
        rc = look_at(f->idx, &f->idx_at_scan, e);
    if (rc < 0)
        return rc;
    if (f->zstd && (uint64_t)f->at_scan.st_size != f->mds->zip.bytes)
        return err_set(e, ERR_CORRUPT,
                       "%lld bytes, its " MDS_INDEX_NAME " says %" PRIu64
                       "; it is cut, or of another version",
                       (long long)f->at_scan.st_size, f->mds->zip.bytes);
    uint64_t size = f->zstd ? f->mds->raw.bytes : (uint64_t)f->at_scan.st_size;
    if (size / CHUNK_PLAIN_BYTES_MAX >= SEGMENT_CHUNKS_MAX - 1024 || size > SEGMENT_BYTES_MAX)
        return err_set(e, ERR_LIMIT, "it has %" PRIu64 " bytes, more than one shard can hold: split it",
                       size);
    im->table.shards[i].bytes = size;
    im->table.shards[i].format = f->format;
    return compressed_tar_check(im, f->path, e);
}

int import_scan(struct import *im, uint32_t i, struct err *e)
{
    struct import_file *f = &im->files.list[i];
    int rc = look(im, i, e);
    if (rc < 0)
        return err_prepend(e, "%s", f->path);
    rc = scan_file(im, i, &f->index, &im->table.shards[i].samples, e);
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
    struct import_file *f = &im->files.list[i];
    if (f->index.n) {
        *out = f->index;
        f->index = (struct buf){0};
        return 0;
    }
    uint64_t count;
    int rc = scan_file(im, i, out, &count, e);
    if (rc == 0 && out->n != f->index_bytes)
        rc = err_set(e, ERR_MISMATCH, "%s: its samples are not those of the first look: the file was changed",
                     f->path);
    return rc;
}
