/* SPDX-License-Identifier: Apache-2.0 */
#include "client/dataset_blob.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "format/limits.h"

#define CHUNKS_AT_ONCE 64u
#define BYTES_AT_ONCE  (4 * (uint64_t)CHUNK_STORED_BYTES_MAX)

/* Stored bytes of a few chunks. */
struct stored_set {
    uint8_t *memory; /* BYTES_AT_ONCE, or less if fewer are wanted */
    uint64_t memory_bytes;
    uint8_t *chunks[CHUNKS_AT_ONCE]; /* in it */
    uint32_t numbers[CHUNKS_AT_ONCE];
    uint32_t count;
};

static int keep(void *arg, uint32_t number, uint8_t *stored, size_t n, struct err *e)
{
    struct stored_set *s = arg;
    (void)n, (void)e;
    check(s->count < CHUNKS_AT_ONCE);
    s->chunks[s->count] = stored;
    s->numbers[s->count++] = number;
    return 0;
}

/* How many of the numbers make up the next group. */
static uint32_t group(const struct part *p, const uint32_t *numbers, uint32_t count)
{
    uint32_t n = count > 0;
    while (n < count && n < CHUNKS_AT_ONCE && part_fetch_bytes(p, numbers, n + 1) <= BYTES_AT_ONCE)
        n++;
    return n;
}

struct chunk_reader {
    struct stored_set set;
    uint8_t *plain, *second; /* second: stored bytes of a chunk that is read again; taken when needed */
    struct larder *client;
    struct part_scratch *scratch;
};

static int reader_init(struct chunk_reader *r, const struct part *p, const uint32_t *numbers, uint32_t count,
                       struct err *e)
{
    uint32_t chunks, plain = 1;
    uint64_t most = 1;
    const struct chunk_entry *table = part_chunks(p, &chunks);
    *r = (struct chunk_reader){.client = part_client(p)};
    for (uint32_t i = 0, n; i < count; i += n) {
        n = group(p, numbers + i, count - i);
        uint64_t bytes = part_fetch_bytes(p, numbers + i, n);
        most = bytes > most ? bytes : most;
    }
    for (uint32_t i = 0; i < count; i++)
        plain = table[numbers[i]].plain_bytes > plain ? table[numbers[i]].plain_bytes : plain;
    r->set.memory = malloc(most);
    r->set.memory_bytes = most;
    r->plain = malloc(plain);
    r->scratch = part_scratch_take(r->client);
    if (r->set.memory && r->plain && r->scratch)
        return 0;
    return err_set(e, ERR_NO_MEMORY, "no memory for reading %u chunks", count);
}

static void reader_free(struct chunk_reader *r)
{
    part_scratch_give(r->client, r->scratch);
    free(r->plain);
    free(r->second);
    free(r->set.memory);
}

static int leave(void *arg, uint32_t number, uint8_t *stored, size_t n, struct err *e)
{
    (void)arg, (void)number, (void)stored, (void)n, (void)e;
    return 0;
}

/* What came damaged is read once more, past the server's memory. */
static int decode(struct chunk_reader *r, const struct part *p, struct conn *conn, uint32_t number,
                  uint8_t *stored, struct err *e)
{
    int rc = part_decode(p, r->scratch, number, stored, r->plain, e);
    if (rc != -EBADMSG)
        return rc;
    r->second = r->second ? r->second : malloc(CHUNK_STORED_BYTES_MAX);
    if (!r->second)
        return rc;
    rc = part_fetch(p, conn, PART_AGAIN, &number, 1, r->second, CHUNK_STORED_BYTES_MAX, leave, NULL, e);
    return rc < 0 ? rc : part_decode(p, r->scratch, number, r->second, r->plain, e);
}

int dataset_chunks_read(const struct part *p, struct conn *conn, const uint32_t *numbers, uint32_t count,
                        int (*each)(void *arg, uint32_t number, const uint8_t *plain, size_t n,
                                    struct err *e),
                        void *arg, struct err *e)
{
    struct chunk_reader r;
    uint32_t chunks;
    const struct chunk_entry *table = part_chunks(p, &chunks);
    int rc = reader_init(&r, p, numbers, count, e);
    for (uint32_t done = 0, now; rc == 0 && done < count; done += now) {
        now = group(p, numbers + done, count - done);
        r.set.count = 0;
        rc = part_fetch(p, conn, PART_FEED, numbers + done, now, r.set.memory, r.set.memory_bytes, keep,
                        &r.set, e);
        for (uint32_t i = 0; rc == 0 && i < r.set.count; i++) {
            uint32_t number = r.set.numbers[i];
            rc = decode(&r, p, conn, number, r.set.chunks[i], e);
            if (rc == 0)
                rc = each(arg, number, r.plain, table[number].plain_bytes, e);
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
