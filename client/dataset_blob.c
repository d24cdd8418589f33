/* SPDX-License-Identifier: Apache-2.0 */
#include "client/dataset_blob.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "format/limits.h"

#define CHUNKS_AT_ONCE 64u
#define BYTES_AT_ONCE  (4 * (size_t)CHUNK_STORED_BYTES_MAX)

/* Stored bytes of a few chunks, kept one behind the other as they come on the connection's thread. */
struct stored_set {
    const struct chunk_entry *table;
    uint8_t *memory; /* BYTES_AT_ONCE, or less if fewer are wanted */
    size_t bytes;
    uint32_t numbers[CHUNKS_AT_ONCE];
    uint32_t count;
};

static int keep(void *arg, uint32_t number, uint8_t *stored, size_t n, struct err *e)
{
    struct stored_set *s = arg;
    if (s->count == CHUNKS_AT_ONCE || n != s->table[number].stored_bytes)
        return err_set(e, ERR_PROTOCOL, "chunk %u came with %zu bytes that were not asked for", number, n);
    if (n)
        memcpy(s->memory + s->bytes, stored, n);
    s->bytes += n;
    s->numbers[s->count++] = number;
    return 0;
}

/* How many of the numbers make up the next group, and its bytes. */
static uint32_t group(const struct chunk_entry *table, const uint32_t *numbers, uint32_t count, size_t *bytes)
{
    uint32_t n = 0;
    for (*bytes = 0; n < count && n < CHUNKS_AT_ONCE; n++) {
        size_t more = table[numbers[n]].stored_bytes;
        if (n && *bytes + more > BYTES_AT_ONCE)
            break;
        *bytes += more;
    }
    return n;
}

struct chunk_reader {
    struct stored_set set;
    uint8_t *plain;
    struct part_scratch *scratch;
};

static int reader_init(struct chunk_reader *r, const struct part *p, const uint32_t *numbers, uint32_t count,
                       struct err *e)
{
    uint32_t chunks;
    size_t most = 1, bytes;
    *r = (struct chunk_reader){.set.table = part_chunks(p, &chunks)};
    for (uint32_t i = 0, n; i < count; i += n) {
        check(numbers[i] < chunks); /* decoding the index has checked what lies where */
        n = group(r->set.table, numbers + i, count - i, &bytes);
        most = bytes > most ? bytes : most;
    }
    r->set.memory = malloc(most);
    r->plain = malloc(CHUNK_PLAIN_BYTES_MAX);
    r->scratch = part_scratch_create();
    if (r->set.memory && r->plain && r->scratch)
        return 0;
    return err_set(e, ERR_NO_MEMORY, "no memory for reading %u chunks", count);
}

static void reader_free(struct chunk_reader *r)
{
    if (r->scratch)
        part_scratch_free(r->scratch);
    free(r->plain);
    free(r->set.memory);
}

int dataset_chunks_read(const struct part *p, struct conn *conn, const uint32_t *numbers, uint32_t count,
                        int (*each)(void *arg, uint32_t number, const uint8_t *plain, size_t n,
                                    struct err *e),
                        void *arg, struct err *e)
{
    struct chunk_reader r;
    int rc = reader_init(&r, p, numbers, count, e);
    for (uint32_t done = 0, now; rc == 0 && done < count; done += now) {
        size_t bytes, at = 0;
        now = group(r.set.table, numbers + done, count - done, &bytes);
        r.set.count = 0;
        r.set.bytes = 0;
        rc = part_fetch(p, conn, PART_FEED, numbers + done, now, BYTES_AT_ONCE, keep, &r.set, e);
        for (uint32_t i = 0; rc == 0 && i < r.set.count; i++) {
            const struct chunk_entry *c = &r.set.table[r.set.numbers[i]];
            rc = part_decode(p, r.scratch, r.set.numbers[i], r.set.memory + at, r.plain, e);
            if (rc == 0)
                rc = each(arg, r.set.numbers[i], r.plain, c->plain_bytes, e);
            at += c->stored_bytes;
        }
    }
    reader_free(&r);
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
