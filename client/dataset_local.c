/* SPDX-License-Identifier: Apache-2.0 */
#include "client/dataset_local.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format/mds.h"
#include "format/published.h"

struct dataset_local {
    const struct larder_dataset *dataset; /* open for longer */
    int folder_fd;
    char *folder;
    struct published_file files[]; /* by shard */
};

static struct published_file file_of(const struct stat *st)
{
    return (struct published_file){.bytes = (uint64_t)st->st_size,
                                   .mtime_ns = (uint64_t)st->st_mtim.tv_sec * 1000000000u +
                                               (uint64_t)st->st_mtim.tv_nsec,
                                   .inode = (uint64_t)st->st_ino};
}

static const char *name_of(const struct dataset_local *l, uint32_t shard)
{
    return l->dataset->table.shards[shard].name;
}

static int look_at(const struct dataset_local *l, const char *name, struct published_file *out, struct err *e)
{
    struct stat st;
    if (fstatat(l->folder_fd, name, &st, 0) == 0) {
        *out = file_of(&st);
        return 0;
    }
    if (errno == ENOENT)
        return err_set(e, ERR_MISMATCH, "%s has no %s, which the server publishes as part of \"%s\"%s",
                       l->folder, name, l->dataset->name,
                       l->dataset->table.shards[0].format == SHARD_MDS
                           ? "; if it is there in its packed form, leave local_dir out"
                           : "");
    return err_sys(e, errno, "%s/%s", l->folder, name);
}

static int look_at_shard(struct dataset_local *l, uint32_t i, struct err *e)
{
    int rc = look_at(l, name_of(l, i), &l->files[i], e);
    if (rc == 0 && l->files[i].bytes != l->dataset->table.shards[i].bytes)
        rc = err_set(e, ERR_MISMATCH,
                     "%s/%s has %" PRIu64 " bytes, and %" PRIu64 " where the server publishes it", l->folder,
                     name_of(l, i), l->files[i].bytes, l->dataset->table.shards[i].bytes);
    return rc;
}

/* Do these files give the version that the server told? */
static int compare(struct dataset_local *l, struct err *e)
{
    const struct larder_dataset *d = l->dataset;
    enum shard_format format = d->table.shards[0].format;
    struct published_version v = {0};
    struct published_file json;
    struct id id;
    int rc = 0;
    published_version_begin(&v, slice_str(d->name), format, d->record_bytes, d->table.count);
    for (uint32_t i = 0; i < d->table.count && rc == 0; i++) {
        rc = look_at_shard(l, i, e);
        published_version_shard(&v, slice_str(name_of(l, i)), &l->files[i], NULL);
    }
    if (rc == 0 && format == SHARD_MDS)
        rc = look_at(l, MDS_INDEX_NAME, &json, e);
    struct err second;
    int ended = published_version_end(&v, NULL, format == SHARD_MDS && rc == 0 ? &json : NULL, &id,
                                      rc == 0 ? e : &second);
    rc = rc < 0 ? rc : ended;
    if (rc == 0 && !id_equal(&id, &d->version_id))
        rc = err_set(e, ERR_MISMATCH,
                     "the files in %s have the names and sizes of those that the server publishes as \"%s\", "
                     "but other times or "
                     "inodes: they are copies, or were changed; mount the server's own folder here, or leave "
                     "local_dir out",
                     l->folder, d->name);
    return rc;
}

int dataset_local_open(const struct larder_dataset *d, const char *folder, struct dataset_local **out,
                       struct err *e)
{
    if (!d->published)
        return err_set(
            e, ERR_INVALID,
            "dataset \"%s\" is imported, so encrypted: only published directories have files to read",
            d->name);
    if (d->table.shards[0].format == SHARD_TOKENS)
        return err_set(e, ERR_UNSUPPORTED, "token files are read from the server only: leave local_dir out");
    struct dataset_local *l = calloc(1, sizeof *l + d->table.count * sizeof l->files[0]);
    if (!l || !(l->folder = strdup(folder))) {
        free(l);
        return err_set(e, ERR_NO_MEMORY, "no memory for %u files", d->table.count);
    }
    l->dataset = d;
    l->folder_fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = l->folder_fd < 0 ? err_sys(e, errno, "local_dir %s", folder) : compare(l, e);
    if (rc < 0) {
        dataset_local_close(l);
        return rc;
    }
    *out = l;
    return 0;
}

void dataset_local_close(struct dataset_local *l)
{
    if (!l)
        return;
    if (l->folder_fd >= 0)
        close(l->folder_fd);
    free(l->folder);
    free(l);
}

const char *dataset_local_folder(const struct dataset_local *l)
{
    return l->folder;
}

/* ---- shards ---- */

void local_shard_path(const struct dataset_local *l, uint32_t shard, char *out, size_t size)
{
    snprintf(out, size, "%s/%s", l->folder, name_of(l, shard));
}

int local_shard_same(const struct dataset_local *l, uint32_t shard, const struct stat *seen, struct err *e)
{
    const struct published_file now = file_of(seen), *was = &l->files[shard];
    if (now.bytes == was->bytes && now.mtime_ns == was->mtime_ns && now.inode == was->inode)
        return 0;
    return err_set(e, ERR_MISMATCH,
                   "shard %s of %s was replaced while it was being read (%" PRIu64 " bytes then, %" PRIu64
                   " now); open the dataset again",
                   name_of(l, shard), l->dataset->name, was->bytes, now.bytes);
}

static int look_again(const struct local_shard *s, struct err *e)
{
    struct stat st;
    if (fstat(s->fd, &st) < 0)
        return err_sys(e, errno, "%s/%s", s->local->folder, name_of(s->local, s->shard));
    return local_shard_same(s->local, s->shard, &st, e);
}

int local_shard_open(const struct dataset_local *l, uint32_t shard, struct local_shard *out, struct err *e)
{
    int fd = openat(l->folder_fd, name_of(l, shard), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return errno == ENOENT
                   ? err_set(e, ERR_MISMATCH, "shard %s of %s was removed from %s; open the dataset again",
                             name_of(l, shard), l->dataset->name, l->folder)
                   : err_sys(e, errno, "%s/%s", l->folder, name_of(l, shard));
    *out = (struct local_shard){.local = l, .shard = shard, .fd = fd};
    int rc = look_again(out, e);
    if (rc < 0)
        local_shard_close(out);
    return rc;
}

void local_shard_close(struct local_shard *s)
{
    close(s->fd);
    s->fd = -1;
}

int local_shard_read(const struct local_shard *s, uint64_t offset, size_t n, void *to, struct err *e)
{
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(s->fd, (uint8_t *)to + done, n - done, (off_t)(offset + done));
        if (got == 0)
            break; /* cut: its size tells */
        if (got < 0 && errno != EINTR)
            return err_sys(e, errno, "%s/%s at byte %" PRIu64, s->local->folder, name_of(s->local, s->shard),
                           offset + done);
        done += got > 0 ? (size_t)got : 0;
    }
    return look_again(s, e);
}
