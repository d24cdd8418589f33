/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sim/part.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/seal.h"
#include "format/version.h"

static uint64_t mix(const struct id *attempt, uint64_t step, uint32_t rank, uint32_t i)
{
    uint8_t key[ID_BYTES + 16];
    memcpy(key, attempt, ID_BYTES);
    le64_put(key + ID_BYTES, step);
    le32_put(key + ID_BYTES + 8, rank);
    le32_put(key + ID_BYTES + 12, i);
    return hash64(key, sizeof key);
}

static void fill(uint8_t *p, size_t n, uint64_t state)
{
    uint32_t kind = draw_below(&state, 5);
    for (size_t at = 0; at < n; at += 8) {
        uint64_t x = draw(&state);
        if (kind == 0)
            x = 0;
        else if (kind == 1) /* numbers near one: the exponents shrink */
            x = (x & 0x807fffff807fffffu) | 0x3f0000003f000000u;
        memcpy(p + at, &x, 8);
    }
}

uint32_t sim_pieces(const struct id *attempt, uint64_t step, uint32_t rank, const struct sim_shape *shape,
                    struct sim_piece out[PART_TENSORS_MAX])
{
    static const enum dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_U8, DTYPE_F64};
    uint64_t state = mix(attempt, step, ~0u, 0);
    uint32_t n =
        1 + draw_below(&state, shape->tensors < PART_TENSORS_MAX ? shape->tensors : PART_TENSORS_MAX);
    for (uint32_t i = 0; i < n; i++) {
        struct sim_piece *x = &out[i];
        x->shared = i > 0 && i + 1 == n;
        snprintf(x->name, sizeof x->name, "w%u", i);
        x->dtype = dtypes[i % 4];
        x->bytes = 8 + draw_below(&state, shape->bytes_max / 8) * 8ull;
        x->elements = x->bytes / (dtype_bits(x->dtype) / 8);
        check((x->plain = malloc(x->bytes)));
        fill(x->plain, x->bytes, mix(attempt, step, x->shared ? ~0u : rank, i + 1));
    }
    return n;
}

void sim_pieces_free(struct sim_piece *x, uint32_t n)
{
    while (n-- > 0)
        free(x[n].plain);
}

static struct tensor tensor_of(const struct sim_piece *x, uint32_t i, uint32_t rank, uint32_t world)
{
    return (struct tensor){
        .name = slice_str(x->name),
        .dtype = x->dtype,
        .dims = 2,
        .shape = {x->shared ? 1 : world, x->elements},
        .offsets = {x->shared ? 0 : rank, 0},
        .lengths = {1, x->elements},
        .bytes = x->bytes,
        .first_chunk = i,
        .plain_hash = hash128(x->plain, x->bytes),
    };
}

/* Scratch of the one thread; kept for the process. */
static struct codec_state *codec_scratch(void)
{
    static struct codec_state *s;
    if (!s)
        s = codec_state_create();
    check(s);
    return s;
}

static struct seal_state *seal_scratch(void)
{
    static struct seal_state *s;
    if (!s)
        s = seal_state_create();
    check(s);
    return s;
}

static void must(int rc, const struct err *e)
{
    if (rc < 0)
        fprintf(stderr, "making a part: %s\n", e->text);
    check(rc >= 0);
}

static uint64_t make_chunk(struct sim_part *p, const struct seal *seal, uint32_t i, const struct sim_piece *x,
                           uint64_t at)
{
    struct err e = {0};
    struct chunk_entry *c = &p->entry[i];
    size_t payload;
    enum codec codec;
    *c = (struct chunk_entry){.plain_bytes = (uint32_t)x->bytes, .dtype = (uint8_t)x->dtype};
    check(buf_reserve(&p->stored[i], codec_payload_max(x->bytes) + TAG_BYTES));
    uint8_t *out = p->stored[i].p;
    must(codec_encode(codec_scratch(), CODEC_LEVEL_FAST, x->dtype, x->plain, x->bytes, out, &payload, &codec,
                      NULL, &e),
         &e);
    c->codec = (uint8_t)codec;
    if (codec == CODEC_ZERO)
        return at;
    must(seal_chunk(seal, seal_scratch(), i, c->plain_bytes, codec, x->dtype, out, payload, out, NULL, &e),
         &e);
    p->stored[i].n = c->stored_bytes = (uint32_t)payload + TAG_BYTES;
    c->stored_hash = hash128(out, c->stored_bytes);
    c->offset = at;
    return at + block_align(c->stored_bytes);
}

static void make_index(struct sim_part *p, const struct seal *seal, struct index_private *x, uint64_t at)
{
    struct err e = {0};
    struct buf private = {0};
    uint8_t digest[SHA256_BYTES];
    must(index_public_encode(p->entry, p->chunks, &p->index, &e), &e);
    size_t public_bytes = p->index.n;
    must(index_private_encode(x, &private, &e), &e);
    sha256(p->index.p, public_bytes, digest);
    check(buf_reserve(&p->index, private.n + TAG_BYTES));
    must(seal_index(seal, seal_scratch(), digest, private.p, private.n, p->index.p + public_bytes, &e), &e);
    p->index.n += private.n + TAG_BYTES;
    buf_free(&private);
    struct segment_trailer t = {.version = SEGMENT_VERSION,
                                .segment_id = p->h.segment_id,
                                .file_bytes = at + block_align(p->index.n) + BLOCK_BYTES,
                                .index_offset = at,
                                .index_bytes = p->index.n,
                                .index_public_bytes = public_bytes,
                                .chunks = p->chunks};
    sha256(p->index.p, p->index.n, t.index_digest);
    must(seal_trailer(seal, seal_scratch(), &t, &e), &e);
    segment_trailer_encode(&t, p->trailer);
    p->index_offset = t.index_offset;
    p->file_bytes = t.file_bytes;
    memcpy(p->index_digest, t.index_digest, SHA256_BYTES);
}

void sim_part_make(struct sim_part *p, const struct segment_header *h, const struct dek *dek,
                   const struct sim_shape *shape)
{
    struct sim_piece x[PART_TENSORS_MAX];
    struct tensor tensors[PART_TENSORS_MAX];
    struct hash128 hashes[PART_TENSORS_MAX];
    struct seal *seal;
    struct err e = {0};
    memset(p, 0, sizeof *p);
    p->h = *h;
    p->h.version = SEGMENT_VERSION;
    p->h.suite = SUITE_AES256GCM_HKDF_SHA256;
    p->chunks = sim_pieces(&h->attempt, h->step, h->rank, shape, x);
    must(seal_create(dek, &p->h, p->chunks, &seal, &e), &e);
    segment_header_encode(&p->h, p->header);
    uint64_t at = BLOCK_BYTES;
    for (uint32_t i = 0; i < p->chunks; i++) {
        at = make_chunk(p, seal, i, &x[i], at);
        tensors[i] = tensor_of(&x[i], i, h->rank, h->world);
        hashes[i] = hash128(x[i].plain, x[i].bytes);
        p->plain_bytes += x[i].bytes;
    }
    struct index_private index = {
        .tensors = tensors, .tensor_count = p->chunks, .plain_hashes = hashes, .chunk_count = p->chunks};
    make_index(p, seal, &index, at);
    seal_free(seal);
    sim_pieces_free(x, p->chunks);
}

void sim_part_free(struct sim_part *p)
{
    for (uint32_t i = 0; i < PART_TENSORS_MAX; i++)
        buf_free(&p->stored[i]);
    buf_free(&p->index);
}

/* ---- the way back ---- */

struct opened {
    const uint8_t *p;
    size_t n;
    struct segment_header h;
    struct segment_trailer t;
    struct seal *seal;
    struct chunk_entry *chunks;
    uint32_t count;
};

static int check_frame(struct opened *o, const struct commit *c, const struct commit_part *cp, struct err *e)
{
    uint8_t digest[SHA256_BYTES];
    if (o->n != cp->segment_bytes || o->n < 2 * BLOCK_BYTES)
        return err_set(e, ERR_CORRUPT, "it has %zu bytes, the commit record says %llu", o->n,
                       (unsigned long long)cp->segment_bytes);
    int rc = segment_header_decode(o->p, &o->h, e);
    if (rc == 0)
        rc = segment_trailer_decode(o->p + o->n - BLOCK_BYTES, &o->t, e);
    if (rc < 0)
        return rc;
    if (!id_equal(&o->h.segment_id, &cp->segment) || !id_equal(&o->h.run_id, &c->run_id) ||
        !id_equal(&o->h.attempt, &c->attempt) || o->h.step != c->step || o->h.rank != cp->rank ||
        o->h.world != c->world)
        return err_set(e, ERR_CORRUPT, "its header is that of another segment, run, attempt, step or rank");
    if (o->t.file_bytes != o->n || o->t.index_offset + o->t.index_bytes > o->n - BLOCK_BYTES ||
        memcmp(o->t.index_digest, cp->index_digest, SHA256_BYTES) != 0)
        return err_set(e, ERR_CORRUPT, "its trailer does not agree with the commit record");
    sha256(o->p + o->t.index_offset, o->t.index_bytes, digest);
    if (memcmp(digest, cp->index_digest, SHA256_BYTES) != 0)
        return err_set(e, ERR_CORRUPT, "its index is not the one that was committed");
    return 0;
}

static int check_index(struct opened *o, struct index_private *index, struct err *e)
{
    const uint8_t *at = o->p + o->t.index_offset;
    size_t public_bytes = o->t.index_public_bytes, sealed = o->t.index_bytes - public_bytes;
    uint8_t digest[SHA256_BYTES], *plain = malloc(sealed);
    check(plain);
    sha256(at, public_bytes, digest);
    int rc = check_trailer(o->seal, seal_scratch(), &o->t, e);
    if (rc == 0)
        rc = index_public_decode(at, public_bytes, o->t.index_offset, &o->chunks, &o->count, e);
    if (rc == 0)
        rc = open_index(o->seal, seal_scratch(), digest, at + public_bytes, sealed, plain, e);
    if (rc == 0)
        rc = index_private_decode(plain, sealed - TAG_BYTES, o->chunks, o->count, index, e);
    free(plain);
    return rc;
}

/* The plain bytes of a chunk, malloc'ed; NULL: e says why not. */
static uint8_t *chunk_open(const struct opened *o, uint32_t i, struct err *e)
{
    const struct chunk_entry *c = &o->chunks[i];
    int rc = 0;
    uint8_t *plain = calloc(1, c->plain_bytes), *stored = malloc(c->stored_bytes + 1u);
    check(plain && stored);
    if (c->codec != CODEC_ZERO) {
        struct hash128 hash = hash128(o->p + c->offset, c->stored_bytes);
        if (memcmp(&hash, &c->stored_hash, sizeof hash) != 0)
            rc = err_set(e, ERR_CORRUPT, "chunk %u is not the bytes that were stored", i);
        if (rc == 0)
            rc = open_chunk(o->seal, seal_scratch(), i, c, o->p + c->offset, stored, NULL, e);
        if (rc == 0)
            rc = codec_decode(codec_scratch(), (enum codec)c->codec, (enum dtype)c->dtype, stored,
                              c->stored_bytes - TAG_BYTES, plain, c->plain_bytes, NULL, e);
    }
    free(stored);
    if (rc == 0)
        return plain;
    free(plain);
    return NULL;
}

static int check_bytes(const struct opened *o, const struct tensor *t, const struct sim_piece *x,
                       struct err *e)
{
    if (t->first_chunk >= o->count || t->offset + x->bytes > o->chunks[t->first_chunk].plain_bytes)
        return err_set(e, ERR_CORRUPT, "tensor %s lies in no chunk", x->name);
    uint8_t *plain = chunk_open(o, t->first_chunk, e);
    int rc = plain ? 0 : -EBADMSG;
    if (plain && memcmp(plain + t->offset, x->plain, x->bytes) != 0)
        rc = err_set(e, ERR_CORRUPT, "tensor %s has other bytes than were saved", x->name);
    free(plain);
    return rc;
}

static const struct tensor *tensor_named(const struct index_private *index, struct slice name)
{
    for (uint32_t i = 0; i < index->tensor_count; i++)
        if (slice_eq(index->tensors[i].name, name))
            return &index->tensors[i];
    return NULL;
}

/* A client that saves alone tells none. */
static bool same_hash(const struct hash128 *want, const struct hash128 *got, uint32_t world)
{
    static const struct hash128 none;
    return memcmp(want, got, sizeof *want) == 0 || (world == 1 && memcmp(got, &none, sizeof none) == 0);
}

/* A client lays them out in another order than sim_part_make, and several in one chunk. */
static int check_tensors(const struct opened *o, const struct index_private *index,
                         const struct sim_shape *shape, bool data, struct err *e)
{
    struct sim_piece x[PART_TENSORS_MAX];
    uint32_t n = sim_pieces(&o->h.attempt, o->h.step, o->h.rank, shape, x);
    int rc = 0;
    if (n != index->tensor_count)
        rc = err_set(e, ERR_CORRUPT, "it holds %u tensors, %u were saved", index->tensor_count, n);
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        struct tensor want = tensor_of(&x[i], i, o->h.rank, o->h.world);
        const struct tensor *got = tensor_named(index, want.name);
        if (!got || want.bytes != got->bytes || want.dtype != got->dtype ||
            !same_hash(&want.plain_hash, &got->plain_hash, o->h.world))
            rc = err_set(e, ERR_CORRUPT, "tensor %u is not the one that was saved", i);
        else if (data)
            rc = check_bytes(o, got, &x[i], e);
    }
    sim_pieces_free(x, n);
    return rc;
}

int sim_part_check(const uint8_t *p, size_t n, const struct commit *c, uint32_t rank, const struct dek *dek,
                   const struct sim_shape *shape, bool data, struct index_private *index, struct err *e)
{
    struct opened o = {.p = p, .n = n};
    memset(index, 0, sizeof *index);
    int rc = check_frame(&o, c, &c->parts[rank], e);
    if (rc == 0)
        rc = seal_open(dek, &o.h, o.t.chunks, &o.seal, e);
    if (rc == 0)
        rc = check_index(&o, index, e);
    if (rc == 0)
        rc = check_tensors(&o, index, shape, data, e);
    seal_free(o.seal);
    free(o.chunks);
    return rc < 0 ? err_prepend(e, "the part of rank %u", rank) : 0;
}
