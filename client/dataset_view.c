/* SPDX-License-Identifier: Apache-2.0 */
#include "client/dataset_view.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/dataset_blob.h"
#include "client/dataset_published.h"
#include "client/dataset_read.h"
#include "client/dataset_wait.h"
#include "format/base/hash.h"

#define VIEWS_KEPT         16
#define FIELDS_COUNTED_MAX 256u /* of a chunk */

static int open_imported(struct larder_dataset *d, uint64_t version, struct err *e)
{
    int rc = run_open(d->client, RUN_DATASET, d->name, false, &d->run, e);
    if (rc < 0)
        return rc;
    enum commit_select select = version ? SELECT_SEQUENCE : SELECT_LATEST_GOOD;
    rc = run_commit(d->client, &d->run, select, version, &d->commit, NULL, e);
    if (rc < 0)
        goto fail;
    struct dataset_blob table = {0};
    struct part *first = NULL;
    rc = part_open(d->client, d->conn, &d->run, &d->commit, 0, PART_RESTORE, &first, e);
    if (rc == 0)
        rc = dataset_blob_read(first, d->conn, SHARD_BLOB_TABLE, &table, e);
    if (rc == 0)
        rc = shard_table_decode(table.p, table.bytes, d->commit.world, &d->table, e);
    dataset_blob_free(&table);
    part_close(first);
    if (rc < 0) {
        commit_free(&d->commit);
        goto fail;
    }
    d->version = d->commit.sequence;
    d->counted = true;
    return 0;
fail:
    run_close(&d->run);
    return rc;
}

static int open_either(struct larder_dataset *d, uint64_t version, struct err *e)
{
    int rc = open_imported(d, version, e);
    if (rc == 0 || !e || e->class != ERR_NOT_FOUND)
        return rc;
    struct err published = {0};
    rc = dataset_published_open(d, &published);
    if (rc < 0) {
        if (published.class != ERR_NOT_FOUND)
            *e = published;
        return -e->errnum;
    }
    err_clear(e);
    if (version && version != d->version)
        return err_set(e, ERR_MISMATCH,
                       "the published directory has version %" PRIu64 ", asked for was %" PRIu64
                       ": its files were changed since",
                       d->version, version);
    return 0;
}

int dataset_open(struct larder *c, struct conn *conn, const char *name, uint64_t version,
                 struct larder_dataset **out, struct err *e)
{
    struct err local = {0};
    e = e ? e : &local;
    *out = NULL;
    if (!name)
        return err_set(e, ERR_INVALID, "no dataset name was given");
    int rc = run_name_check(name, strlen(name), e);
    if (rc < 0)
        return err_prepend(e, "dataset");
    struct larder_dataset *d = calloc(1, sizeof *d);
    if (!d)
        return err_set(e, ERR_NO_MEMORY, "no memory for a dataset handle");
    d->client = c;
    d->conn = conn;
    d->view_max = VIEWS_KEPT;
    snprintf(d->name, sizeof d->name, "%s", name);
    list_init(&d->views);
    pthread_mutex_init(&d->lock, NULL);
    pthread_mutex_init(&d->read_lock, NULL);
    pthread_cond_init(&d->loaded, NULL);
    rc = open_either(d, version, e);
    if (rc < 0) {
        err_prepend(e, "dataset \"%s\"", name);
        dataset_close(d);
        return rc;
    }
    *out = d;
    return 0;
}

static void view_free(struct larder_dataset *d, struct dataset_view *v)
{
    list_del(&v->link);
    d->view_count--;
    if (v->part)
        part_close(v->part);
    if (v->samples)
        samples_free(v->samples);
    free(v);
}

void dataset_close(struct larder_dataset *d)
{
    if (!d)
        return;
    list_for_each_safe (it, &d->views) {
        struct dataset_view *v = container_of(it, struct dataset_view, link);
        check(v->refs == 0);
        view_free(d, v);
    }
    free(d->cache);
    shard_table_free(&d->table);
    if (!d->published && d->version) {
        commit_free(&d->commit);
        run_close(&d->run);
    }
    pthread_cond_destroy(&d->loaded);
    pthread_mutex_destroy(&d->read_lock);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

/* Is tensor i piece i of a shard cut into pieces of `piece` bytes? */
static bool is_piece(const struct tensor *t, uint64_t i, uint64_t piece, uint64_t shard_bytes)
{
    char name[32];
    uint64_t left = shard_bytes - i * piece;
    snprintf(name, sizeof name, SHARD_TENSOR "/%" PRIu64, i);
    return t->dtype == DTYPE_U8 && slice_eq(t->name, slice_str(name)) && t->first_chunk == i &&
           t->offset == 0 && t->bytes == (left < piece ? left : piece);
}

/* Finds out how the shard's bytes lie in the part, and checks all of it. */
static int lay_out(struct dataset_view *v, const struct part *p, uint64_t bytes, struct err *e)
{
    const struct index_private *x = part_index(p);
    struct tensor room;
    const struct tensor *t = x->tensor_count > 0 ? index_tensor(x, 0, &room) : NULL;
    if (x->tensor_count == 1 && t->dtype == DTYPE_U8 && slice_eq(t->name, slice_str(SHARD_TENSOR)) &&
        t->bytes == bytes && t->first_chunk == 0 && t->offset == 0) {
        v->piece_bytes = CHUNK_PLAIN_BYTES_MAX;
        return 0;
    }
    uint64_t piece = t ? t->bytes : 0;
    bool good = piece && piece <= CHUNK_PLAIN_BYTES_MAX / 4 && (bytes + piece - 1) / piece == x->tensor_count;
    for (uint32_t i = 0; good && i < x->tensor_count; i++)
        good = is_piece(index_tensor(x, i, &room), i, piece, bytes);
    v->piece_bytes = piece;
    return good ? 0
                : err_set(e, ERR_CORRUPT,
                          "its part does not hold the %" PRIu64 " bytes that the shard table names", bytes);
}

static int load_part(struct larder_dataset *d, struct dataset_view *v, struct err *e)
{
    struct part *p = NULL;
    int rc = part_open(d->client, d->conn, &d->run, &d->commit, v->shard, PART_RESTORE, &p, e);
    if (rc == 0)
        rc = lay_out(v, p, d->table.shards[v->shard].bytes, e);
    if (rc < 0) {
        part_close(p);
        return rc;
    }
    v->shard_bytes = d->table.shards[v->shard].bytes;
    v->part = p;
    return 0;
}

/* Where the index follows from the size of the file nobody needs to be asked for it. */
static bool follows_from_size(const struct larder_dataset *d, const struct shard *s)
{
    return d->published && (s->format == SHARD_RECORDS || s->format == SHARD_WHOLE);
}

static int samples_of_size(const struct larder_dataset *d, const struct shard *s, struct samples **out,
                           struct err *e)
{
    struct samples_source source = {.format = s->format,
                                    .shard = s->name,
                                    .shard_bytes = s->bytes,
                                    .record_bytes = s->format == SHARD_RECORDS ? d->record_bytes : 0};
    struct samples_builder *b = NULL;
    int rc = samples_builder_create(&source, &b, e);
    if (rc == 0) {
        samples_builder_skip(b, s->bytes);
        rc = samples_builder_finish(b, out, e);
        samples_builder_free(b);
    }
    return rc;
}

static int fetch_samples(struct larder_dataset *d, struct dataset_view *v, struct samples **out,
                         struct err *e)
{
    struct dataset_blob b = {0};
    int rc = d->published ? dataset_published_samples(d, v->shard, &b, e)
                          : dataset_blob_read(v->part, d->conn, SHARD_BLOB_SAMPLES, &b, e);
    if (rc == 0)
        rc = samples_decode(b.p, b.bytes, d->table.shards[v->shard].bytes, out, e);
    dataset_blob_free(&b);
    return rc < 0 ? err_prepend(e, "sample index") : 0;
}

static int load_samples(struct larder_dataset *d, struct dataset_view *v, struct err *e)
{
    struct shard *s = &d->table.shards[v->shard];
    struct samples *samples = NULL;
    int rc = follows_from_size(d, s) ? samples_of_size(d, s, &samples, e) : fetch_samples(d, v, &samples, e);
    if (rc < 0)
        return rc;
    pthread_mutex_lock(&d->lock);
    uint64_t n = samples_count(samples);
    bool same = s->samples == SAMPLES_UNKNOWN || s->samples == n;
    if (same)
        s->samples = n;
    pthread_mutex_unlock(&d->lock);
    if (!same) {
        samples_free(samples);
        return err_set(e, d->published ? ERR_MISMATCH : ERR_CORRUPT,
                       "its sample index has %" PRIu64 " samples, %" PRIu64 " were expected", n, s->samples);
    }
    v->samples = samples;
    return 0;
}

static int load(struct larder_dataset *d, struct dataset_view *v, bool need_samples, struct err *e)
{
    int rc = d->published || v->part ? 0 : load_part(d, v, e);
    return rc == 0 && need_samples ? load_samples(d, v, e) : rc;
}

/* A server that stops or restarts is asked again, for as long as the client waits for a connection. */
static int load_patiently(struct larder_dataset *d, struct dataset_view *v, bool need_samples, struct err *e)
{
    struct err why;
    uint64_t begin = clock_ms();
    unsigned pause_ms = 0;
    for (;;) {
        err_clear(&why);
        int rc = load(d, v, need_samples, &why);
        if (rc == 0)
            return 0;
        if (!ranged_read_retriable(&why) || d->closing ||
            clock_ms() - begin >= client_options(d->client)->reconnect_ms) {
            if (e)
                *e = why;
            return rc;
        }
        pause_between(&pause_ms);
    }
}

/* Under lock: finds or makes the entry. NULL: no memory. */
static struct dataset_view *entry(struct larder_dataset *d, uint32_t shard)
{
    list_for_each (it, &d->views) {
        struct dataset_view *v = container_of(it, struct dataset_view, link);
        if (v->shard == shard)
            return v;
    }
    struct dataset_view *v = calloc(1, sizeof *v);
    if (!v)
        return NULL;
    v->dataset = d;
    v->shard = shard;
    list_add_tail(&d->views, &v->link);
    d->view_count++;
    return v;
}

/* Under lock: forgets the views longest unused beyond what is kept. */
static void trim(struct larder_dataset *d)
{
    list_for_each_safe (it, &d->views) {
        struct dataset_view *v = container_of(it, struct dataset_view, link);
        if (d->view_count <= d->view_max)
            return;
        if (v->refs == 0)
            view_free(d, v);
    }
}

int dataset_view_get(struct larder_dataset *d, uint32_t shard, bool samples, struct dataset_view **out,
                     struct err *e)
{
    check(shard < d->table.count);
    pthread_mutex_lock(&d->lock);
    struct dataset_view *v = entry(d, shard);
    if (!v) {
        pthread_mutex_unlock(&d->lock);
        return err_set(e, ERR_NO_MEMORY, "no memory for reading a shard");
    }
    v->refs++;
    while (v->loading) /* by another thread, whose calls are bounded */
        pthread_cond_wait(&d->loaded, &d->lock);
    bool need_part = !d->published && !v->part, need_samples = samples && !v->samples;
    v->loading = need_part || need_samples;
    list_del(&v->link);
    list_add_tail(&d->views, &v->link);
    bool loading = v->loading;
    pthread_mutex_unlock(&d->lock);
    int rc = loading ? load_patiently(d, v, need_samples, e) : 0;
    if (rc < 0)
        err_prepend(e, "shard %u, \"%s\"", shard, d->table.shards[shard].name);
    pthread_mutex_lock(&d->lock);
    if (loading) {
        v->loading = false;
        pthread_cond_broadcast(&d->loaded);
    }
    if (rc < 0)
        v->refs--;
    trim(d);
    pthread_mutex_unlock(&d->lock);
    *out = rc < 0 ? NULL : v;
    return rc;
}

void dataset_view_ref(struct larder_dataset *d, struct dataset_view *v)
{
    pthread_mutex_lock(&d->lock);
    check(v->refs > 0);
    v->refs++;
    pthread_mutex_unlock(&d->lock);
}

void dataset_view_put(struct larder_dataset *d, struct dataset_view *v)
{
    pthread_mutex_lock(&d->lock);
    check(v->refs > 0);
    v->refs--;
    trim(d);
    pthread_mutex_unlock(&d->lock);
}

struct chunk_place dataset_chunk_of(const struct dataset_view *v, uint64_t offset)
{
    check(offset < v->shard_bytes);
    uint64_t left = v->shard_bytes - offset, within = offset % v->piece_bytes, room = v->piece_bytes - within;
    return (struct chunk_place){.chunk = (uint32_t)(offset / v->piece_bytes),
                                .offset = (uint32_t)within,
                                .bytes = (uint32_t)(left < room ? left : room)};
}

static uint64_t sample_end(const struct samples *s, uint64_t i)
{
    struct sample_field last = samples_field(s, i, samples_fields(s, i) - 1);
    return last.offset + last.bytes;
}

/* Samples stand in the order of their bytes; if those of an odd file do not, only the number is wrong. */
static uint64_t first_sample_behind(const struct samples *s, uint64_t offset)
{
    uint64_t low = 0, high = samples_count(s);
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (sample_end(s, middle) > offset)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

uint64_t dataset_sample_bytes(const struct dataset_view *v, uint32_t chunk)
{
    const struct samples *s = v->samples;
    uint64_t begin = chunk * v->piece_bytes, end = begin + v->piece_bytes, bytes = 0, looked_at = 0;
    uint64_t i = first_sample_behind(s, begin);
    for (; i < samples_count(s) && samples_field(s, i, 0).offset < end; i++) {
        looked_at += samples_fields(s, i);
        if (looked_at > FIELDS_COUNTED_MAX)
            return UINT64_MAX;
        for (uint32_t k = 0; k < samples_fields(s, i); k++) {
            struct sample_field f = samples_field(s, i, k);
            uint64_t from = f.offset > begin ? f.offset : begin, to = f.offset + f.bytes;
            to = to < end ? to : end;
            bytes += to > from ? to - from : 0;
        }
    }
    return bytes;
}

uint64_t dataset_identity(const struct larder_dataset *d)
{
    if (d->published)
        return hash64(d->name, strlen(d->name));
    return hash64(&d->run.run_id, sizeof d->run.run_id);
}
