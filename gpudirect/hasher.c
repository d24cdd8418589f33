/* SPDX-License-Identifier: Apache-2.0 */
#include "gpudirect/hasher.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpudirect/kernels.h"
#include "gpudirect/pool.h"

#define AT_ONCE    1024u      /* hashes that one round of kernels gives */
#define SLOT_BYTES (1u << 20) /* of the copies to the host; a multiple of the hash's blocks */

struct hasher {
    struct memory *m;
    struct memory_stream *stream;
    struct kernels *kernels;
    struct chunk_hash *on_device; /* AT_ONCE of them; with kernels */
    struct pool *pool;            /* one slot, pinned: for the hashes, or without kernels for the data */
    uint8_t *slot;
    char path[240];
};

/* With kernels, or with the reason why not in h->path. */
static int find_kernels(struct hasher *h, const void *image, struct err *e)
{
    struct err why;
    void *p = NULL;
    if (kernels_open(h->m, image, &h->kernels, &why) < 0) {
        snprintf(h->path, sizeof h->path, "copied to the host: %.200s", why.text);
        return memory_lost(h->m, e);
    }
    int rc = memory_alloc(h->m, AT_ONCE * sizeof *h->on_device, &p, e);
    h->on_device = p;
    snprintf(h->path, sizeof h->path, "by a kernel on the device");
    return rc;
}

static int prepare(struct hasher *h, const void *image, struct err *e)
{
    struct err ignored; /* memory that is not pinned serves as well, more slowly */
    int rc = find_kernels(h, image, e);
    if (rc == 0)
        rc = memory_stream_create(h->m, &h->stream, e);
    if (rc == 0)
        rc = pool_create(SLOT_BYTES, SLOT_BYTES, &h->pool, e);
    if (rc == 0 && pool_register(h->pool, h->m, &ignored) < 0)
        rc = memory_lost(h->m, e);
    if (rc == 0)
        h->slot = pool_take(h->pool);
    return rc;
}

int hasher_open(struct memory *m, const void *image, struct hasher **out, struct err *e)
{
    struct hasher *h = calloc(1, sizeof *h);
    if (!h)
        return err_set(e, ERR_NO_MEMORY, "no memory to hash chunks");
    h->m = m;
    int rc = 0;
    if (memory_kind(m) == MEMORY_HOST)
        snprintf(h->path, sizeof h->path, "in host memory");
    else
        rc = prepare(h, image, e);
    if (rc < 0) {
        hasher_close(h);
        return rc;
    }
    *out = h;
    return 0;
}

void hasher_close(struct hasher *h)
{
    struct err e;
    if (!h)
        return;
    if (h->stream && memory_stream_wait(h->stream, HASHER_WAIT_MS, &e) == -ETIMEDOUT)
        return; /* a device that hangs may still write there: it keeps its memory */
    kernels_close(h->kernels);
    memory_free(h->m, h->on_device);
    if (h->slot)
        pool_give(h->pool, h->slot);
    pool_destroy(h->pool);
    memory_stream_destroy(h->stream);
    free(h);
}

const char *hasher_path(const struct hasher *h)
{
    return h->path;
}

static void hash_here(const uint8_t *data, uint64_t n, uint64_t chunk_bytes, struct chunk_hash *out)
{
    for (uint64_t at = 0; at < n; at += chunk_bytes)
        *out++ = chunk_hash(data + at, (size_t)(n - at < chunk_bytes ? n - at : chunk_bytes));
}

/* At most AT_ONCE chunks. */
static int hash_there(struct hasher *h, const uint8_t *data, uint64_t n, uint64_t chunk_bytes,
                      struct chunk_hash *out, struct err *e)
{
    size_t bytes = (size_t)((n - 1) / chunk_bytes + 1) * sizeof *out;
    int rc = kernels_hash(h->kernels, h->stream, data, n, chunk_bytes, h->on_device, e);
    if (rc == 0)
        rc = memory_copy(h->stream, MEMORY_OUT, h->slot, h->on_device, bytes, e);
    if (rc == 0)
        rc = memory_stream_wait(h->stream, HASHER_WAIT_MS, e);
    if (rc == 0)
        memcpy(out, h->slot, bytes);
    return rc;
}

static int fetch(struct hasher *h, const uint8_t *from, size_t n, struct err *e)
{
    int rc = memory_copy(h->stream, MEMORY_OUT, h->slot, from, n, e);
    return rc < 0 ? rc : memory_stream_wait(h->stream, HASHER_WAIT_MS, e);
}

/* Piece by piece: sums go on where the piece before ended. */
static int hash_fetched(struct hasher *h, const uint8_t *data, uint64_t n, struct chunk_hash *out,
                        struct err *e)
{
    struct chunk_hash sum = {0, 0};
    for (uint64_t at = 0; at < n; at += SLOT_BYTES) {
        size_t piece = n - at < SLOT_BYTES ? (size_t)(n - at) : SLOT_BYTES;
        int rc = fetch(h, data + at, piece, e);
        if (rc < 0)
            return rc;
        chunk_hash_sum(&sum, at / CHUNK_HASH_BLOCK, h->slot, piece);
    }
    *out = chunk_hash_end(sum, n);
    return 0;
}

int hasher_run(struct hasher *h, const void *data, uint64_t n, uint64_t chunk_bytes, struct chunk_hash *out,
               struct err *e)
{
    struct err own = {0};
    const uint8_t *p = data;
    e = e ? e : &own;
    check(n > 0 && chunk_bytes > 0);
    if (memory_kind(h->m) == MEMORY_HOST) {
        hash_here(p, n, chunk_bytes, out);
        return 0;
    }
    uint64_t chunks = (n - 1) / chunk_bytes + 1, most = h->kernels ? AT_ONCE : 1;
    int rc = 0;
    for (uint64_t c = 0; rc == 0 && c < chunks; c += most) {
        uint64_t at = c * chunk_bytes, left = n - at;
        if (chunks - c > most)
            left = most * chunk_bytes;
        rc = h->kernels ? hash_there(h, p + at, left, chunk_bytes, out + c, e)
                        : hash_fetched(h, p + at, left, out + c, e);
    }
    return rc;
}
