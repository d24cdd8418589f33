/* SPDX-License-Identifier: Apache-2.0 */
/* larder_local_*: published shards whose files lie on this machine, straight to host or device memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "client/dataset_local.h"
#include "gpudirect/file.h"

struct larder_local {
    struct larder_dataset *dataset;
    struct dataset_local *files;
    struct memory *m;
    struct file_access *access;
    struct file *file; /* of `shard`; NULL: none is open */
    uint32_t shard;
};

static void close_local(struct larder_local *l)
{
    file_close(l->file);
    file_access_close(l->access);
    memory_close(l->m);
    dataset_local_close(l->files);
    free(l);
}

static int open_local(struct larder_dataset *d, const struct larder_local_options *o,
                      struct larder_local **out, struct err *e)
{
    if (!o->local_dir)
        return err_set(e, ERR_INVALID,
                       "local_dir is missing: the folder of the published directory on this machine");
    if (o->memory != LARDER_MEMORY_HOST && o->memory != LARDER_MEMORY_CUDA)
        return err_set(e, ERR_INVALID, "memory is %d; expected 0 (host) or 1 (CUDA)", (int)o->memory);
    struct larder_local *l = calloc(1, sizeof *l);
    if (!l)
        return err_set(e, ERR_NO_MEMORY, "no memory to read local files");
    l->dataset = d;
    int rc = dataset_local_open(d, o->local_dir, &l->files, e);
    if (rc == 0)
        rc = memory_open(o->memory == LARDER_MEMORY_CUDA ? MEMORY_CUDA : MEMORY_HOST,
                         o->memory == LARDER_MEMORY_CUDA ? o->device : 0, &l->m, e);
    if (rc == 0)
        rc = file_access_open(l->m, o->bounce ? FILE_BOUNCE : FILE_BEST, &l->access, e);
    if (rc < 0) {
        close_local(l);
        return rc;
    }
    *out = l;
    return 0;
}

int larder_local_open(struct larder_dataset *d, const struct larder_local_options *options,
                      struct larder_local **out, struct larder_error *error)
{
    struct larder_local_options o = {0};
    struct err e;
    err_clear(&e);
    memcpy(&o, options, options->size < sizeof o ? options->size : sizeof o);
    int rc = client_enter(d->client, &e);
    if (rc == 0)
        rc = open_local(d, &o, out, &e);
    return client_leave(rc, &e, error);
}

void larder_local_close(struct larder_local *l)
{
    if (l)
        close_local(l);
}

const char *larder_local_path(const struct larder_local *l)
{
    return l->file ? file_path(l->file) : "no shard was read yet";
}

/* The file of the shard, which is the one of the version. */
static int open_shard(struct larder_local *l, uint32_t shard, struct err *e)
{
    char path[4096];
    if (l->file && l->shard == shard)
        return 0;
    file_close(l->file);
    l->file = NULL;
    l->shard = shard;
    local_shard_path(l->files, shard, path, sizeof path);
    int rc = file_open(l->access, path, FILE_READ, &l->file, e);
    return rc < 0 ? rc : local_shard_same(l->files, shard, file_stat(l->file), e);
}

static int64_t read_shard(struct larder_local *l, uint32_t shard, uint64_t offset, void *p, size_t n,
                          void *stream, struct err *e)
{
    uint64_t bytes = l->dataset->table.shards[shard].bytes;
    if (offset >= bytes || n == 0)
        return 0;
    n = bytes - offset < n ? (size_t)(bytes - offset) : n;
    int rc = memory_check(l->m, p, n, e);
    if (rc == 0)
        rc = open_shard(l, shard, e);
    if (rc == 0)
        rc = file_after_caller(l->access, stream, e);
    if (rc == 0)
        rc = file_read(l->file, offset, n, p, e);
    struct err changed; /* a file that was cut ends early: that it changed says more */
    if (l->file && file_unchanged(l->file, file_stat(l->file), &changed) < 0) {
        *e = changed;
        rc = -changed.errnum;
    }
    if (rc < 0) { /* the next read looks again */
        file_close(l->file);
        l->file = NULL;
    }
    return rc < 0 ? rc : (int64_t)n;
}

int64_t larder_local_read(struct larder_local *l, size_t shard, uint64_t offset, void *p, size_t n,
                          void *stream, struct larder_error *error)
{
    struct err e;
    err_clear(&e);
    int64_t rc = client_enter(l->dataset->client, &e);
    if (rc == 0 && shard >= l->dataset->table.count)
        rc = err_set(&e, ERR_INVALID, "shard %zu; there are %u", shard, l->dataset->table.count);
    if (rc == 0)
        rc = read_shard(l, (uint32_t)shard, offset, p, n, stream, &e);
    (void)client_leave(rc < 0 ? (int)rc : 0, &e, error);
    return rc;
}
