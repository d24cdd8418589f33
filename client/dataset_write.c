/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One file as one part:
 *   chunks 0 .. T-1   the file, in pieces of one size (dataset_manifest.h)
 *   then              blobs larger than 1 MiB, in chunks of their own; the others share the last chunk
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/dataset_import.h"
#include "client/dataset_source.h"

#define SMALL_BYTES (CHUNK_PLAIN_BYTES_MAX / 4) /* as in index.h */
#define BLOBS       3u

struct layout {
    struct tensor *tensors; /* the file */
    char (*names)[24];      /* of pieces */
    uint32_t tensor_count;
    uint64_t piece_bytes;
    struct blob blobs[BLOBS];
    struct slice bytes[BLOBS];
    uint32_t blob_count;
    uint32_t chunks, file_chunks, shared; /* shared: number of the chunk of small blobs; UINT32_MAX: none */
    uint32_t shared_bytes;
    uint64_t plain_bytes;
};

static uint32_t chunks_of(uint64_t bytes)
{
    return (uint32_t)((bytes + CHUNK_PLAIN_BYTES_MAX - 1) / CHUNK_PLAIN_BYTES_MAX);
}

static struct tensor bytes_tensor(const char *name, uint64_t bytes, uint32_t first_chunk)
{
    return (struct tensor){.name = slice_str(name),
                           .dtype = DTYPE_U8,
                           .dims = 1,
                           .shape = {bytes},
                           .lengths = {bytes},
                           .bytes = bytes,
                           .first_chunk = first_chunk};
}

static void layout_free(struct layout *l)
{
    free(l->tensors);
    free(l->names);
}

static int lay_out_file(struct layout *l, uint64_t bytes, uint64_t samples, struct err *e)
{
    uint64_t piece = shard_piece_bytes(bytes, samples);
    bool whole = piece == CHUNK_PLAIN_BYTES_MAX;
    l->piece_bytes = piece;
    l->file_chunks = l->chunks = (uint32_t)((bytes + piece - 1) / piece);
    l->tensor_count = whole ? 1 : l->file_chunks;
    l->tensors = calloc(l->tensor_count, sizeof *l->tensors);
    l->names = calloc(l->tensor_count, sizeof *l->names);
    l->shared = UINT32_MAX;
    l->plain_bytes = bytes;
    if (!l->tensors || !l->names)
        return err_set(e, ERR_NO_MEMORY, "no memory for the layout of a shard");
    if (whole)
        l->tensors[0] = bytes_tensor(SHARD_TENSOR, bytes, 0);
    for (uint32_t i = 0; !whole && i < l->tensor_count; i++) {
        uint64_t left = bytes - i * piece;
        snprintf(l->names[i], sizeof l->names[i], SHARD_TENSOR "/%u", i);
        l->tensors[i] = bytes_tensor(l->names[i], left < piece ? left : piece, i);
    }
    return 0;
}

static void lay_out_blob(struct layout *l, const char *name, struct slice bytes)
{
    struct blob *b = &l->blobs[l->blob_count];
    *b = (struct blob){.name = slice_str(name), .bytes = bytes.n};
    l->bytes[l->blob_count++] = bytes;
    l->plain_bytes += bytes.n;
    if (bytes.n > SMALL_BYTES) {
        b->first_chunk = l->chunks;
        l->chunks += chunks_of(bytes.n);
        return;
    }
    b->first_chunk = UINT32_MAX; /* placed once all large ones are */
    b->offset = l->shared_bytes;
    l->shared_bytes += (uint32_t)bytes.n;
}

/* At most BLOBS quarters of a chunk, so they fit into one. */
static void lay_out_shared(struct layout *l)
{
    if (l->shared_bytes == 0)
        return;
    l->shared = l->chunks++;
    for (uint32_t i = 0; i < l->blob_count; i++)
        if (l->blobs[i].first_chunk == UINT32_MAX)
            l->blobs[i].first_chunk = l->shared;
}

static int write_pieces(struct import *im, const struct layout *l, struct part_writer *w,
                        struct part_scratch *scratch, uint32_t i, struct source *s, uint8_t *room,
                        struct err *e)
{
    uint64_t size = im->table.shards[i].bytes;
    int rc = 0;
    for (uint32_t number = 0; rc == 0 && number < l->file_chunks; number++) {
        uint64_t at = number * l->piece_bytes, left = size - at;
        uint32_t n = (uint32_t)(left < l->piece_bytes ? left : l->piece_bytes);
        rc = source_read(s, room, n, e);
        if (rc == 0)
            rc = part_writer_chunk(w, scratch, number, DTYPE_U8, room, n, e);
        pthread_mutex_lock(&im->lock);
        im->bytes_done += n;
        im->current = im->files.list[i].path;
        if (im->failed && rc == 0)
            rc = err_set(e, ERR_CANCELLED, "another shard failed");
        pthread_cond_signal(&im->changed);
        pthread_mutex_unlock(&im->lock);
    }
    return rc == 0 ? source_end(s, e) : rc;
}

static int write_file(struct import *im, const struct layout *l, struct part_writer *w,
                      struct part_scratch *scratch, uint32_t i, uint8_t *room, struct err *e)
{
    const struct import_file *f = &im->files.list[i];
    struct source_options o = {.path = f->path,
                               .bytes = im->table.shards[i].bytes,
                               .zstd = f->zstd,
                               .whole = true,
                               .was = &f->at_scan,
                               .plain = f->mds ? &f->mds->raw : NULL,
                               .packed = f->zstd ? &f->mds->zip : NULL};
    struct source *s = NULL;
    int rc = source_open(&o, &s, e);
    if (rc == 0)
        rc = write_pieces(im, l, w, scratch, i, s, room, e);
    source_close(s);
    return rc;
}

static int write_blobs(const struct layout *l, struct part_writer *w, struct part_scratch *s, uint8_t *room,
                       struct err *e)
{
    int rc = 0;
    for (uint32_t i = 0; i < l->blob_count; i++) {
        const struct blob *b = &l->blobs[i];
        if (b->bytes <= SMALL_BYTES)
            continue;
        for (uint32_t k = 0; rc == 0 && k < chunks_of(b->bytes); k++) {
            uint64_t at = (uint64_t)k * CHUNK_PLAIN_BYTES_MAX, left = b->bytes - at;
            uint32_t n = left < CHUNK_PLAIN_BYTES_MAX ? (uint32_t)left : CHUNK_PLAIN_BYTES_MAX;
            rc = part_writer_chunk(w, s, b->first_chunk + k, DTYPE_U8, (uint8_t *)l->bytes[i].p + at, n, e);
        }
    }
    if (rc < 0 || l->shared == UINT32_MAX)
        return rc;
    for (uint32_t i = 0; i < l->blob_count; i++)
        if (l->blobs[i].first_chunk == l->shared && l->blobs[i].bytes)
            memcpy(room + l->blobs[i].offset, l->bytes[i].p, l->blobs[i].bytes);
    return part_writer_chunk(w, s, l->shared, DTYPE_U8, room, l->shared_bytes, e);
}

static int encode_index(struct layout *l, struct buf *out, struct err *e)
{
    struct index_private x = {.tensors = l->tensors,
                              .tensor_count = l->tensor_count,
                              .blobs = l->blobs,
                              .blob_count = l->blob_count,
                              .chunk_count = l->chunks};
    buf_zeros(out, index_public_bytes(l->chunks));
    return index_private_encode(&x, out, e);
}

static int write_part(struct import *im, struct conn *conn, struct part_scratch *s, uint32_t i,
                      struct layout *l, struct err *e)
{
    struct buf index = {0};
    struct part_writer_options o = {.client = im->client,
                                    .conn = conn,
                                    .run = &im->run,
                                    .step = im->step,
                                    .attempt = im->attempt,
                                    .rank = i,
                                    .world = im->table.count,
                                    .chunks = l->chunks,
                                    .plain_bytes = l->plain_bytes,
                                    .index = &index,
                                    .level = im->level};
    struct part_writer *w = NULL;
    uint8_t *room = malloc(CHUNK_PLAIN_BYTES_MAX);
    int rc = room ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for reading a file");
    if (rc == 0)
        rc = encode_index(l, &index, e);
    if (rc == 0)
        rc = part_writer_create(&o, &w, e);
    if (rc == 0)
        rc = write_file(im, l, w, s, i, room, e);
    if (rc == 0)
        rc = write_blobs(l, w, s, room, e);
    if (rc == 0)
        rc = part_writer_seal(w, &im->parts[i], e);
    part_writer_free(w);
    buf_free(&index);
    free(room);
    return rc;
}

int import_write(struct import *im, struct conn *conn, struct part_scratch *scratch, uint32_t i,
                 struct err *e)
{
    struct buf index = {0}, table = {0};
    int rc = import_index(im, i, &index, e);
    if (rc == 0 && i == 0)
        rc = shard_table_encode(&im->table, &table, e);
    struct layout l = {0};
    if (rc == 0)
        rc = lay_out_file(&l, im->table.shards[i].bytes, im->table.shards[i].samples, e);
    if (rc == 0) {
        lay_out_blob(&l, SHARD_BLOB_SAMPLES, SLICE(index.p, index.n));
        lay_out_blob(&l, SHARD_BLOB_NAME, slice_str(im->table.shards[i].name));
        if (i == 0)
            lay_out_blob(&l, SHARD_BLOB_TABLE, SLICE(table.p, table.n));
        lay_out_shared(&l);
        rc = write_part(im, conn, scratch, i, &l, e);
        if (rc < 0)
            err_prepend(e, "%s", im->files.list[i].path);
    }
    layout_free(&l);
    buf_free(&index);
    buf_free(&table);
    return rc;
}
