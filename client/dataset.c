/* SPDX-License-Identifier: Apache-2.0 */
/* The public face of an opened dataset version: its shard table, and reading a shard's bytes. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "client/dataset_blob.h"
#include "client/dataset_published.h"
#include "client/dataset_read.h"
#include "client/dataset_view.h"
#include "client/larder.h"

#define READ_CHUNKS_AT_ONCE 64u /* in one round of fetching; only a few of them are in memory at a time */
#define RENEWALS_MAX        4u

/* The chunk that the last read ended in: the next one most often begins there. */
struct read_cache {
    uint32_t shard, chunk;
    size_t bytes; /* 0: holds nothing */
    uint8_t plain[CHUNK_PLAIN_BYTES_MAX];
};

int larder_dataset_open(struct larder *c, const char *dataset, uint64_t version, struct larder_dataset **out,
                        struct larder_error *error)
{
    struct err e = {0};
    int rc = client_enter(c, &e);
    if (rc == 0)
        rc = dataset_open(c, client_conn(c), dataset, version, out, &e);
    return client_leave(rc, &e, error);
}

void larder_dataset_close(struct larder_dataset *d)
{
    if (!d || client_enter(d->client, NULL) == -ECHILD)
        return;
    dataset_close(d);
}

uint64_t larder_dataset_version(struct larder_dataset *d)
{
    return d->version;
}

size_t larder_dataset_shards(struct larder_dataset *d)
{
    return d->table.count;
}

int larder_dataset_shard(struct larder_dataset *d, size_t i, struct larder_shard_info *out,
                         struct larder_error *error)
{
    struct err e;
    err_clear(&e);
    int rc = client_enter(d->client, &e);
    if (rc == 0 && i >= d->table.count)
        rc = err_set(&e, ERR_NOT_FOUND, "dataset \"%s\" has %u shards, numbered from 0; there is no %zu",
                     d->name, d->table.count, i);
    if (rc < 0)
        return client_leave(rc, &e, error);
    const struct shard *s = &d->table.shards[i];
    pthread_mutex_lock(&d->lock);
    bool known = s->samples != SAMPLES_UNKNOWN;
    pthread_mutex_unlock(&d->lock);
    *out = (struct larder_shard_info){.name = s->name, .bytes = s->bytes};
    if (!known) {
        struct dataset_view *v;
        rc = dataset_view_get(d, (uint32_t)i, true, &v, &e);
        if (rc == 0)
            dataset_view_put(d, v);
    }
    if (rc == 0)
        out->samples = s->samples;
    return client_leave(rc, &e, error);
}

/* What one call of larder_dataset_read wants: [offset, offset + n) of the shard of v. */
struct reading {
    struct larder_dataset *d;
    const struct dataset_view *v;
    uint64_t offset;
    size_t n;
    uint8_t *out;
    uint64_t next; /* the first byte that has not been placed yet */
};

static void remember(struct reading *r, uint32_t chunk, const uint8_t *plain, size_t n)
{
    struct read_cache *c = r->d->cache;
    if (!c)
        c = r->d->cache = malloc(sizeof *c);
    if (!c)
        return; /* slower, not wrong */
    c->shard = r->v->shard;
    c->chunk = chunk;
    c->bytes = n;
    memcpy(c->plain, plain, n);
}

/* Places what the plain bytes of a chunk give of the range, from r->next on. */
static int place(void *arg, uint32_t chunk, const uint8_t *plain, size_t n, struct err *e)
{
    struct reading *r = arg;
    struct chunk_place at = dataset_chunk_of(r->v, r->next);
    uint64_t left = r->offset + r->n - r->next;
    size_t take = at.bytes < left ? at.bytes : (size_t)left;
    if (at.chunk != chunk || at.offset > n || take > n - at.offset)
        return err_set(e, ERR_CORRUPT, "chunk %u has %zu bytes, %zu at %u of chunk %u were expected", chunk,
                       n, take, at.offset, at.chunk);
    memcpy(r->out + (r->next - r->offset), plain + at.offset, take);
    r->next += take;
    if (take < at.bytes && plain != (r->d->cache ? r->d->cache->plain : NULL))
        remember(r, chunk, plain, n);
    return 0;
}

static int read_sealed(struct reading *r, struct err *e)
{
    int rc = 0;
    while (rc == 0 && r->next < r->offset + r->n) {
        const struct read_cache *c = r->d->cache;
        struct chunk_place at = dataset_chunk_of(r->v, r->next);
        if (c && c->bytes && c->shard == r->v->shard && c->chunk == at.chunk) {
            rc = place(r, at.chunk, c->plain, c->bytes, e);
            continue;
        }
        struct chunk_place last = dataset_chunk_of(r->v, r->offset + r->n - 1);
        uint32_t numbers[READ_CHUNKS_AT_ONCE], count = 0;
        while (count < READ_CHUNKS_AT_ONCE && at.chunk + count <= last.chunk) {
            numbers[count] = at.chunk + count;
            count++;
        }
        rc = dataset_chunks_read(r->v->part, r->d->conn, numbers, count, place, r, e);
    }
    return rc;
}

static int read_published(struct reading *r, unsigned retry_ms, struct err *e)
{
    struct read_piece piece = {
        .object = dataset_published_object(r->v->shard), .offset = r->offset, .bytes = r->n, .into = r->out};
    struct ranged_read read = {.conn = r->d->conn,
                               .source = READ_PUBLISHED,
                               .scope = r->d->version_id,
                               .pieces = &piece,
                               .count = 1};
    struct err why = {0};
    int rc = ranged_read_wait(&read, retry_ms, &why);
    /* A connection that was made again may lead to a server, or a part of one, that never heard of us. */
    for (unsigned i = 0; i < RENEWALS_MAX && rc < 0 && why.class == ERR_NOT_FOUND; i++) {
        uint64_t before = read.into_next;
        rc = dataset_published_renew(r->d, r->d->conn, &why);
        if (rc == 0)
            rc = ranged_read_wait(&read, retry_ms, &why);
        if (read.into_next > before)
            i = 0;
    }
    if (rc < 0 && e)
        *e = why;
    return rc;
}

static int64_t read_range(struct larder_dataset *d, uint32_t shard, uint64_t offset, void *p, size_t n,
                          unsigned retry_ms, struct err *e)
{
    uint64_t size = d->table.shards[shard].bytes;
    if (offset >= size || n == 0)
        return 0;
    if (n > size - offset)
        n = (size_t)(size - offset);
    struct dataset_view *v;
    int rc = dataset_view_get(d, shard, false, &v, e);
    if (rc < 0)
        return rc;
    struct reading r = {.d = d, .v = v, .offset = offset, .n = n, .out = p, .next = offset};
    rc = d->published ? read_published(&r, retry_ms, e) : read_sealed(&r, e);
    if (rc < 0)
        err_prepend(e, "dataset \"%s\", shard \"%s\", %zu bytes at %" PRIu64, d->name,
                    d->table.shards[shard].name, n, offset);
    dataset_view_put(d, v);
    return rc < 0 ? rc : (int64_t)n;
}

int64_t dataset_bytes(struct larder_dataset *d, uint32_t shard, uint64_t offset, void *p, size_t n,
                      unsigned retry_ms, struct err *e)
{
    pthread_mutex_lock(&d->read_lock);
    int64_t rc = read_range(d, shard, offset, p, n, retry_ms, e);
    pthread_mutex_unlock(&d->read_lock);
    return rc;
}

int64_t larder_dataset_read(struct larder_dataset *d, size_t shard, uint64_t offset, void *p, size_t n,
                            struct larder_error *error)
{
    struct err e = {0};
    int64_t rc = client_enter(d->client, &e);
    if (rc == 0 && shard >= d->table.count)
        rc = err_set(&e, ERR_INVALID, "dataset \"%s\" has %u shards, shard number %zu does not exist",
                     d->name, d->table.count, shard);
    if (rc == 0 && n > INT64_MAX)
        rc = err_set(&e, ERR_INVALID, "%zu bytes cannot be read at once", n);
    if (rc == 0)
        rc = dataset_bytes(d, (uint32_t)shard, offset, p, n, client_options(d->client)->reconnect_ms, &e);
    return rc < 0 ? client_leave((int)rc, &e, error) : rc;
}
