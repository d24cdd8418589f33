/* SPDX-License-Identifier: Apache-2.0 */
/* Opening parts, and decoding their chunks. Nothing of a part is used before it was checked against the
 * commit record (segment, length, digest of the index) and against the key. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "client/part_private.h"
#include "format/base/pages.h"
#include "format/base/secret.h"

#define TAIL_BYTES  (64u << 10) /* read with the trailer: a small index comes along */
#define OPENERS_MAX 8u

static const struct commit_part *find_part(const struct commit *commit, uint32_t rank)
{
    for (uint32_t i = 0; i < commit->world; i++)
        if (commit->parts[i].rank == rank)
            return &commit->parts[i];
    return NULL;
}

/* What the header must say, so that no part can stand in for another. */
static int header_check(const struct part *p, const struct commit *commit, const struct commit_part *cp,
                        struct err *e)
{
    const struct segment_header *h = &p->header;
    const char *what = NULL;
    if (!id_equal(&h->segment_id, &cp->segment))
        what = "segment";
    else if (!id_equal(&h->run_id, &commit->run_id))
        what = "run";
    else if (!id_equal(&h->attempt, &commit->attempt))
        what = "attempt";
    else if (h->step != commit->step)
        what = "step";
    else if (h->rank != cp->rank || h->world != commit->world)
        what = "rank or world";
    else if (strcmp(h->tenant, client_credentials(p->client)->tenant) != 0)
        what = "tenant";
    return what ? err_set(e, ERR_CORRUPT, "its header is of another %s than the commit record says", what)
                : 0;
}

static int trailer_check(const struct part *p, const struct commit_part *cp, struct err *e)
{
    const struct segment_trailer *t = &p->trailer;
    uint64_t end;
    if (!id_equal(&t->segment_id, &cp->segment) || t->file_bytes != cp->segment_bytes)
        return err_set(e, ERR_CORRUPT,
                       "its trailer says %llu bytes, the commit record %llu, or it is of another segment",
                       (unsigned long long)t->file_bytes, (unsigned long long)cp->segment_bytes);
    if (memcmp(t->index_digest, cp->index_digest, SHA256_BYTES) != 0)
        return err_set(e, ERR_CORRUPT, "its trailer names another index than the commit record");
    if (t->index_offset < BLOCK_BYTES || add_overflows(t->index_offset, t->index_bytes, &end) ||
        end > t->file_bytes - BLOCK_BYTES)
        return err_set(e, ERR_CORRUPT,
                       "its trailer places the index at %llu, %llu bytes, outside the segment of %llu",
                       (unsigned long long)t->index_offset, (unsigned long long)t->index_bytes,
                       (unsigned long long)t->file_bytes);
    if (t->index_bytes > INDEX_BYTES_MAX || t->index_public_bytes > t->index_bytes ||
        t->index_bytes - t->index_public_bytes < TAG_BYTES || t->chunks > SEGMENT_CHUNKS_MAX)
        return err_set(
            e, ERR_CORRUPT,
            "its trailer tells impossible sizes of the index (%llu bytes, %llu of them public, %u chunks)",
            (unsigned long long)t->index_bytes, (unsigned long long)t->index_public_bytes, t->chunks);
    return 0;
}

static int open_private(struct part *p, struct seal_state *st, struct err *e)
{
    const struct segment_trailer *t = &p->trailer;
    size_t sealed = (size_t)(t->index_bytes - t->index_public_bytes);
    uint8_t digest[SHA256_BYTES], *private = p->index_bytes + t->index_public_bytes;
    sha256(p->index_bytes, (size_t)t->index_public_bytes, digest);
    int rc = open_index(p->seal, st, digest, private, sealed, private, e);
    if (rc == 0)
        rc = index_private_view(private, sealed - TAG_BYTES, p->chunks, p->chunk_count, &p->index, e);
    return rc;
}

/* digest: of what was read; NULL: the seals vouch for it. */
static int index_open(struct part *p, const uint8_t *digest, struct err *e)
{
    const struct segment_trailer *t = &p->trailer;
    if (digest && memcmp(digest, t->index_digest, SHA256_BYTES) != 0)
        return err_set(e, ERR_CORRUPT,
                       "its index (%llu bytes at %llu) does not match the digest in the commit record",
                       (unsigned long long)t->index_bytes, (unsigned long long)t->index_offset);
    struct seal_state *st = seal_state_create();
    if (!st)
        return err_set(e, ERR_NO_MEMORY, "no memory for a cipher");
    int rc = check_trailer(p->seal, st, t, e);
    if (rc == 0)
        rc = index_public_decode(p->index_bytes, (size_t)t->index_public_bytes, t->index_offset, &p->chunks,
                                 &p->chunk_count, e);
    if (rc == 0 && p->chunk_count != t->chunks)
        rc = err_set(e, ERR_CORRUPT, "its trailer counts %u chunks, its index %u", t->chunks, p->chunk_count);
    if (rc == 0)
        rc = open_private(p, st, e);
    seal_state_free(st);
    return rc;
}

/* Those who restore, or look at a checkpoint before it is committed, are soon done with it; a dataset stays
 * open for long. */
static bool take_index_memory(struct part *p, const struct run *run, size_t n)
{
    bool lent = loan_begin(run->kind == RUN_CHECKPOINTS ? p->client : NULL, n, &p->index_memory);
    p->index_bytes = p->index_memory.memory;
    return lent;
}

/* Header, and the last bytes with the trailer, in one request; the index if it did not come along. Its digest
 * is for those who have no key: the trailer, of which it is a part, and the sealed part, which binds the
 * public one, are authentic or do not open. It is taken where what is wrong is to be told, and of what is
 * verified. */
static int part_read(struct part *p, struct conn *conn, const struct run *run, const struct commit *commit,
                     const struct commit_part *cp, enum part_class class, uint8_t *edge, struct err *e)
{
    if (cp->segment_bytes < 2 * BLOCK_BYTES || cp->segment_bytes > SEGMENT_BYTES_MAX)
        return err_set(e, ERR_CORRUPT, "the commit record gives it %llu bytes",
                       (unsigned long long)cp->segment_bytes);
    uint64_t tail =
        cp->segment_bytes - BLOCK_BYTES < TAIL_BYTES ? cp->segment_bytes - BLOCK_BYTES : TAIL_BYTES;
    struct range edges[2] = {{0, BLOCK_BYTES}, {cp->segment_bytes - tail, tail}};
    uint8_t *tail_at = edge + BLOCK_BYTES;
    int rc = segment_read(conn, &run->run_id, &cp->segment, class, edges, 2, edge, NULL, e);
    if (rc == 0)
        rc = segment_header_decode(edge, &p->header, e);
    if (rc == 0)
        rc = segment_trailer_decode(tail_at + tail - BLOCK_BYTES, &p->trailer, e);
    if (rc == 0)
        rc = header_check(p, commit, cp, e);
    if (rc == 0)
        rc = trailer_check(p, cp, e);
    if (rc == 0)
        rc = seal_open(&run->dek, &p->header, p->trailer.chunks, &p->seal, e);
    if (rc < 0)
        return rc;
    struct range r = {p->trailer.index_offset, p->trailer.index_bytes};
    if (!take_index_memory(p, run, (size_t)r.bytes))
        return err_set(e, ERR_NO_MEMORY, "no memory for an index of %llu bytes", (unsigned long long)r.bytes);
    uint8_t summed[SHA256_BYTES], *digest = class == PART_RESTORE ? NULL : summed;
    if (r.offset >= edges[1].offset) {
        memcpy(p->index_bytes, tail_at + (r.offset - edges[1].offset), (size_t)r.bytes);
        if (digest)
            sha256(p->index_bytes, (size_t)r.bytes, digest);
    } else {
        rc = segment_read(conn, &run->run_id, &cp->segment, class, &r, 1, p->index_bytes, digest, e);
    }
    return rc < 0 ? rc : index_open(p, digest, e);
}

/* Bytes that do not stand their checks: a disk may have read them wrongly once. */
static bool may_be_misread(const struct err *e)
{
    return e->class == ERR_CORRUPT || e->class == ERR_IO || e->class == ERR_VERSION || e->class == ERR_KEY;
}

static void part_clear(struct part *p)
{
    index_private_free(&p->index);
    loan_end(p->client, &p->index_memory);
    seal_free(p->seal);
    free(p->chunks);
    p->index_bytes = NULL;
    p->seal = NULL;
    p->chunks = NULL;
    p->chunk_count = 0;
}

int part_open(struct larder *c, struct conn *conn, const struct run *run, const struct commit *commit,
              uint32_t rank, enum part_class class, struct part **out, struct err *e)
{
    const struct commit_part *cp = find_part(commit, rank);
    if (!cp)
        return err_set(e, ERR_NOT_FOUND, "the commit of step %llu has no part of rank %u",
                       (unsigned long long)commit->step, rank);
    struct part *p = calloc(1, sizeof *p);
    uint8_t *edge = malloc(BLOCK_BYTES + TAIL_BYTES);
    int rc = p && edge ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for a part");
    if (rc == 0) {
        p->client = c;
        p->run_id = run->run_id;
        p->rank = rank;
        memcpy(p->run, run->name, sizeof p->run);
        rc = part_read(p, conn, run, commit, cp, class, edge, e);
    }
    if (rc < 0 && may_be_misread(e)) {
        part_clear(p);
        rc = part_read(p, conn, run, commit, cp, PART_AGAIN, edge, e);
    }
    free(edge);
    if (rc < 0) {
        char id[2 * ID_BYTES + 1];
        part_close(p);
        hex_encode(&cp->segment, ID_BYTES, id);
        return err_prepend(e, "part of rank %u of %s, step %llu (segment %s)", rank, run->name,
                           (unsigned long long)commit->step, id);
    }
    *out = p;
    return 0;
}

void part_close(struct part *p)
{
    if (!p)
        return;
    part_clear(p);
    free(p);
}

/* ---- several at once ---- */

struct opening {
    struct larder *client;
    struct conn *conn;
    const struct run *run;
    const struct commit *commit;
    struct part **parts;
    atomic_uint next;
    pthread_mutex_t lock;
    struct err err; /* of the first that failed */
};

static void *open_some(void *arg)
{
    struct opening *o = arg;
    for (;;) {
        uint32_t i = atomic_fetch_add(&o->next, 1);
        if (i >= o->commit->world)
            return NULL;
        struct err e;
        int rc = part_open(o->client, o->conn, o->run, o->commit, o->commit->parts[i].rank, PART_RESTORE,
                           &o->parts[i], &e);
        if (rc < 0) {
            pthread_mutex_lock(&o->lock);
            if (o->err.class == ERR_NONE)
                o->err = e;
            pthread_mutex_unlock(&o->lock);
            atomic_store(&o->next, o->commit->world); /* the others need not begin */
        }
    }
}

int part_open_all(struct larder *c, struct conn *conn, const struct run *run, const struct commit *commit,
                  struct part **parts, struct err *e)
{
    struct opening o = {.client = c, .conn = conn, .run = run, .commit = commit, .parts = parts};
    pthread_t threads[OPENERS_MAX];
    uint32_t wanted = commit->world < OPENERS_MAX ? commit->world : OPENERS_MAX, started = 0;
    pthread_mutex_init(&o.lock, NULL);
    memset(parts, 0, commit->world * sizeof *parts);
    while (started + 1 < wanted && pthread_create(&threads[started], NULL, open_some, &o) == 0)
        started++;
    open_some(&o); /* this thread works too */
    for (uint32_t i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&o.lock);
    if (o.err.class == ERR_NONE)
        return 0;
    for (uint32_t i = 0; i < commit->world; i++) {
        part_close(parts[i]);
        parts[i] = NULL;
    }
    if (e)
        *e = o.err;
    return -o.err.errnum;
}

const struct index_private *part_index(const struct part *p)
{
    return &p->index;
}

const struct chunk_entry *part_chunks(const struct part *p, uint32_t *count)
{
    *count = p->chunk_count;
    return p->chunks;
}

const struct segment_header *part_header(const struct part *p)
{
    return &p->header;
}

struct larder *part_client(const struct part *p)
{
    return p->client;
}

/* ---- decoding ---- */

struct part_scratch *part_scratch_create(void)
{
    struct part_scratch *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->codec = codec_state_create();
    s->seal = seal_state_create();
    s->bytes = pages_alloc(CHUNK_STORED_BYTES_MAX);
    if (s->codec && s->seal && s->bytes)
        return s;
    part_scratch_free(s);
    return NULL;
}

void part_scratch_free(struct part_scratch *s)
{
    if (!s)
        return;
    codec_state_free(s->codec);
    seal_state_free(s->seal);
    free(s->bytes);
    free(s->plain);
    free(s);
}

struct part_scratch *part_scratch_take(struct larder *c)
{
    struct part_scratch *s = atomic_exchange(&c->scratch, NULL);
    return s ? s : part_scratch_create();
}

void part_scratch_give(struct larder *c, struct part_scratch *s)
{
    part_scratch_free(s ? atomic_exchange(&c->scratch, s) : NULL);
}

/* What does not fit its checksum was damaged on disk or on the way, which says more than that its tag does
 * not fit either. */
static int tell_damage(const struct chunk_entry *c, struct hash128 found, int rc, struct err *e)
{
    if (memcmp(&found, &c->stored_hash, sizeof found) == 0)
        return rc;
    char want[2 * HASH128_BYTES + 1], got[2 * HASH128_BYTES + 1];
    hex_encode(&c->stored_hash, HASH128_BYTES, want);
    hex_encode(&found, HASH128_BYTES, got);
    return err_set(e, ERR_CORRUPT, "its %u stored bytes at %llu have checksum %s, expected %s",
                   c->stored_bytes, (unsigned long long)c->offset, got, want);
}

/* The checksum, if it is wanted, is taken while the cipher reads the bytes. */
static int open_and_decode(const struct part *p, struct part_scratch *s, uint32_t number, bool summed,
                           void *stored, void *out, struct err *e)
{
    const struct chunk_entry *c = &p->chunks[number];
    struct hash128 found = c->stored_hash;
    int rc = open_chunk(p->seal, s->seal, number, c, stored, stored, summed ? &found : NULL, e);
    rc = tell_damage(c, found, rc, e);
    if (rc == 0)
        rc = codec_decode(s->codec, (enum codec)c->codec, (enum dtype)c->dtype, stored,
                          c->stored_bytes > 0 ? c->stored_bytes - TAG_BYTES : 0, out, c->plain_bytes, &found,
                          e);
    if (rc == 0 && memcmp(&found, &p->index.plain_hashes[number], sizeof found) != 0)
        rc = err_set(e, ERR_CORRUPT, "it decodes, but not to the %u bytes that were saved", c->plain_bytes);
    return rc;
}

/* A raw chunk is opened to where it is wanted. Its tag vouches for the very bytes that were sealed; sums are
 * for those that a codec makes, and for telling what is wrong. */
static int open_raw(const struct part *p, struct part_scratch *s, uint32_t number, const void *stored,
                    void *out, struct err *e)
{
    const struct chunk_entry *c = &p->chunks[number];
    int rc = open_chunk(p->seal, s->seal, number, c, stored, out, NULL, e);
    return rc < 0 ? tell_damage(c, hash128(stored, c->stored_bytes), rc, e) : 0;
}

bool part_is_raw(const struct part *p, uint32_t number)
{
    check(number < p->chunk_count);
    const struct chunk_entry *c = &p->chunks[number];
    return c->codec == CODEC_RAW && c->stored_bytes == c->plain_bytes + TAG_BYTES;
}

static int tell_chunk(const struct part *p, uint32_t number, struct err *e)
{
    char id[2 * ID_BYTES + 1];
    hex_encode(&p->header.segment_id, ID_BYTES, id);
    return err_prepend(e, "chunk %u of rank %u of %s, step %llu (segment %s)", number, p->rank, p->run,
                       (unsigned long long)p->header.step, id);
}

static int decode(const struct part *p, struct part_scratch *s, uint32_t number, bool summed, void *stored,
                  void *out, struct err *e)
{
    check(number < p->chunk_count);
    int rc = part_is_raw(p, number) ? open_raw(p, s, number, stored, out, e)
                                    : open_and_decode(p, s, number, summed, stored, out, e);
    return rc < 0 ? tell_chunk(p, number, e) : 0;
}

int part_decode(const struct part *p, struct part_scratch *s, uint32_t number, void *stored, void *out,
                struct err *e)
{
    return decode(p, s, number, true, stored, out, e);
}

int part_decode_unsummed(const struct part *p, struct part_scratch *s, uint32_t number, void *stored,
                         void *out, struct err *e)
{
    return decode(p, s, number, false, stored, out, e);
}

/* ---- a raw chunk, as it comes ---- */

struct part_opening {
    struct seal_state *seal;
    const struct part *part;
    uint32_t number;
};

struct part_opening *part_opening_create(void)
{
    struct part_opening *o = calloc(1, sizeof *o);
    if (o && (o->seal = seal_state_create()))
        return o;
    free(o);
    return NULL;
}

void part_opening_free(struct part_opening *o)
{
    if (!o)
        return;
    seal_state_free(o->seal);
    free(o);
}

int part_opening_begin(struct part_opening *o, const struct part *p, uint32_t number, struct err *e)
{
    check(part_is_raw(p, number));
    o->part = p;
    o->number = number;
    int rc = open_chunk_begin(p->seal, o->seal, number, &p->chunks[number], e);
    return rc < 0 ? tell_chunk(p, number, e) : 0;
}

void part_opening_add(struct part_opening *o, uint8_t *bytes, size_t n)
{
    open_chunk_add(o->seal, bytes, n);
}

int part_opening_end(struct part_opening *o, uint8_t *plain, const uint8_t *tag, struct err *e)
{
    const struct chunk_entry *c = &o->part->chunks[o->number];
    int rc = open_chunk_end(o->seal, o->number, c, tag, e);
    if (rc == 0)
        return 0;
    secret_wipe(plain, c->plain_bytes);
    return tell_chunk(o->part, o->number, e);
}
