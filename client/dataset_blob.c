/* SPDX-License-Identifier: Apache-2.0 */
#include "client/dataset_blob.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "format/limits.h"

#define CHUNKS_AT_ONCE 4u

/* Stored bytes of a few chunks, kept as they come on the connection's thread. */
struct stored_set {
    uint8_t *memory; /* CHUNKS_AT_ONCE places */
    struct {
        uint32_t number;
        size_t bytes;
    } chunk[CHUNKS_AT_ONCE];
    uint32_t count;
};

static int keep(void *arg, uint32_t number, uint8_t *stored, size_t n, struct err *e)
{
    struct stored_set *s = arg;
    if (s->count == CHUNKS_AT_ONCE || n > CHUNK_STORED_BYTES_MAX)
        return err_set(e, ERR_PROTOCOL, "chunk %u came with %zu bytes that were not asked for", number, n);
    if (n)
        memcpy(s->memory + (size_t)s->count * CHUNK_STORED_BYTES_MAX, stored, n);
    s->chunk[s->count].number = number;
    s->chunk[s->count].bytes = n;
    s->count++;
    return 0;
}

int dataset_chunks_read(const struct part *p, struct conn *conn, const uint32_t *numbers, uint32_t count,
                        int (*each)(void *arg, uint32_t number, const uint8_t *plain, size_t n,
                                    struct err *e),
                        void *arg, struct err *e)
{
    uint32_t chunks;
    const struct chunk_entry *table = part_chunks(p, &chunks);
    uint32_t at_once = count < CHUNKS_AT_ONCE ? count : CHUNKS_AT_ONCE;
    struct stored_set set = {.memory = malloc((size_t)at_once * CHUNK_STORED_BYTES_MAX)};
    uint8_t *plain = malloc(CHUNK_PLAIN_BYTES_MAX);
    struct part_scratch *scratch = part_scratch_create();
    int rc = 0;
    if (!set.memory || !plain || !scratch)
        rc = err_set(e, ERR_NO_MEMORY, "no memory for reading %u chunks", count);
    for (uint32_t done = 0; rc == 0 && done < count; done += at_once) {
        uint32_t now = count - done < at_once ? count - done : at_once;
        set.count = 0;
        rc = part_fetch(p, conn, PART_FEED, numbers + done, now, (uint64_t)now * CHUNK_STORED_BYTES_MAX, keep,
                        &set, e);
        for (uint32_t i = 0; rc == 0 && i < set.count; i++) {
            uint32_t number = set.chunk[i].number;
            check(number < chunks);
            rc = part_decode(p, scratch, number, set.memory + (size_t)i * CHUNK_STORED_BYTES_MAX, plain, e);
            if (rc == 0)
                rc = each(arg, number, plain, table[number].plain_bytes, e);
        }
    }
    if (scratch)
        part_scratch_free(scratch);
    free(plain);
    free(set.memory);
    return rc;
}

struct filling {
    struct dataset_blob *out;
    const struct blob *blob;
    uint64_t filled;
};

static int fill(void *arg, uint32_t number, const uint8_t *plain, size_t n, struct err *e)
{
    struct filling *f = arg;
    uint64_t want = f->out->bytes - f->filled;
    size_t skip = number == f->blob->first_chunk ? f->blob->offset : 0;
    if (skip > n)
        return err_set(e, ERR_CORRUPT, "chunk %u has %zu bytes, a blob in it starts at %zu", number, n, skip);
    size_t take = n - skip < want ? n - skip : (size_t)want;
    memcpy(f->out->p + f->filled, plain + skip, take);
    f->filled += take;
    return 0;
}

static const struct blob *find(const struct part *p, const char *name)
{
    const struct index_private *x = part_index(p);
    for (uint32_t i = 0; i < x->blob_count; i++)
        if (slice_eq(x->blobs[i].name, slice_str(name)))
            return &x->blobs[i];
    return NULL;
}

int dataset_blob_read(const struct part *p, struct conn *conn, const char *name, struct dataset_blob *out,
                      struct err *e)
{
    *out = (struct dataset_blob){0};
    const struct blob *b = find(p, name);
    if (!b)
        return err_set(e, ERR_CORRUPT, "blob \"%s\" is missing: this is not a part of an imported dataset",
                       name);
    if (b->bytes == 0)
        return 0;
    uint32_t count = b->bytes > CHUNK_PLAIN_BYTES_MAX / 4
                         ? (uint32_t)((b->bytes + CHUNK_PLAIN_BYTES_MAX - 1) / CHUNK_PLAIN_BYTES_MAX)
                         : 1;
    uint32_t *numbers = malloc(count * sizeof *numbers);
    out->p = malloc(b->bytes);
    if (!numbers || !out->p) {
        free(numbers);
        dataset_blob_free(out);
        return err_set(e, ERR_NO_MEMORY, "no memory for blob \"%s\" of %" PRIu64 " bytes", name, b->bytes);
    }
    for (uint32_t i = 0; i < count; i++)
        numbers[i] = b->first_chunk + i;
    out->bytes = b->bytes;
    struct filling f = {.out = out, .blob = b};
    int rc = dataset_chunks_read(p, conn, numbers, count, fill, &f, e);
    if (rc == 0 && f.filled != b->bytes)
        rc = err_set(e, ERR_CORRUPT, "blob \"%s\" ends after %" PRIu64 " of %" PRIu64 " bytes", name,
                     f.filled, b->bytes);
    free(numbers);
    if (rc < 0)
        dataset_blob_free(out);
    return rc;
}

void dataset_blob_free(struct dataset_blob *b)
{
    free(b->p);
    *b = (struct dataset_blob){0};
}
