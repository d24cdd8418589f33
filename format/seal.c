/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nonce: u32 domain, u64 counter. Associated data: the segment's context, which is the same for everything
 * that it seals, with the domain in front, and what is particular behind. FORMAT.md gives both byte by byte.
 */
#include "format/seal.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/aead.h"
#include "format/version.h"

enum domain { DOMAIN_CHUNK = 1, DOMAIN_INDEX = 2, DOMAIN_TRAILER = 3 };

/* Associated data: offsets. */
enum {
    A_DOMAIN = 0,
    A_VERSION = 4,
    A_SUITE = 8,
    A_RANK = 12,
    A_WORLD = 16,
    A_ZERO = 20,
    A_STEP = 24,
    A_RUN = 32,
    A_ATTEMPT = 48,
    A_SEGMENT = 64,
    A_DEK = 80,
    A_TENANT = 96,
    A_OWN = 160, /* what is particular */
    A_END_MAX = A_OWN + SEGMENT_TRAILER_SIGNED_BYTES,
};
static_assert(A_STEP == A_ZERO + 4 && A_ATTEMPT == A_RUN + ID_BYTES && A_SEGMENT == A_ATTEMPT + ID_BYTES &&
                  A_DEK == A_SEGMENT + ID_BYTES && A_TENANT == A_DEK + ID_BYTES &&
                  A_OWN == A_TENANT + TENANT_NAME_BYTES_MAX + 1 &&
                  SEGMENT_TRAILER_SIGNED_BYTES >= SHA256_BYTES,
              "associated data without padding");
#define CHUNK_OWN_BYTES 16

static_assert(TAG_BYTES == AEAD_TAG_BYTES && KEY_BYTES == AEAD_KEY_BYTES, "one suite");

static const char label[] = "larder/1 segment";

struct seal {
    uint64_t number; /* unique in the process: tells a state whether it has this key already */
    bool writes;
    uint32_t chunks;
    struct secret *key;
    uint8_t context[A_OWN];
    /* One bit for each nonce that is used up: chunks, then index, then trailer. NULL for reading. */
    _Atomic uint64_t *used;
};

struct seal_state {
    struct aead *seals, *opens;
    uint64_t seals_for, opens_for; /* number of the seal whose key is set; 0: none */
};

/* HKDF's info: everything that makes this segment this one, each of fixed width or with its length before it.
 */
static size_t context_info(const struct segment_header *h, uint8_t out[256])
{
    size_t tenant = strnlen(h->tenant, TENANT_NAME_BYTES_MAX);
    uint8_t *p = out;
    le16_put(p, sizeof label - 1);
    memcpy(p + 2, label, sizeof label - 1);
    p += 2 + sizeof label - 1;
    le32_put(p, h->version);
    le32_put(p + 4, h->suite);
    le16_put(p + 8, (uint16_t)tenant);
    memcpy(p + 10, h->tenant, tenant);
    p += 10 + tenant;
    memcpy(p, &h->run_id, ID_BYTES);
    le64_put(p + 16, h->step);
    memcpy(p + 24, &h->attempt, ID_BYTES);
    le32_put(p + 40, h->rank);
    le32_put(p + 44, h->world);
    memcpy(p + 48, &h->segment_id, ID_BYTES);
    memcpy(p + 64, &h->dek_id, ID_BYTES);
    return (size_t)(p + 80 - out);
}
static_assert(2 + sizeof label - 1 + 10 + TENANT_NAME_BYTES_MAX + 80 <= 256, "info fits");

static void context_ad(const struct segment_header *h, uint8_t out[A_OWN])
{
    memset(out, 0, A_OWN);
    le32_put(out + A_VERSION, h->version);
    le32_put(out + A_SUITE, h->suite);
    le32_put(out + A_RANK, h->rank);
    le32_put(out + A_WORLD, h->world);
    le64_put(out + A_STEP, h->step);
    memcpy(out + A_RUN, &h->run_id, ID_BYTES);
    memcpy(out + A_ATTEMPT, &h->attempt, ID_BYTES);
    memcpy(out + A_SEGMENT, &h->segment_id, ID_BYTES);
    memcpy(out + A_DEK, &h->dek_id, ID_BYTES);
    memcpy(out + A_TENANT, h->tenant, strnlen(h->tenant, TENANT_NAME_BYTES_MAX));
}

/* Common to both ways; *commitment is what the header must hold. */
static int prepare(const struct dek *dek, const struct segment_header *h, uint32_t chunks, bool writes,
                   struct seal **out, uint8_t commitment[COMMITMENT_BYTES], struct err *e)
{
    static _Atomic uint64_t last;
    uint8_t info[256], okm[KEY_BYTES + COMMITMENT_BYTES];
    *out = NULL;
    if (h->version != SEGMENT_VERSION || h->suite != SUITE_AES256GCM_HKDF_SHA256)
        return err_set(e, ERR_VERSION,
                       "a segment of version %u and suite %u; this build knows %u and %u only", h->version,
                       h->suite, SEGMENT_VERSION, SUITE_AES256GCM_HKDF_SHA256);
    if (chunks > SEGMENT_CHUNKS_MAX)
        return err_set(e, ERR_LIMIT, "a segment of %u chunks; at most %u are possible", chunks,
                       SEGMENT_CHUNKS_MAX);
    struct seal *s = calloc(1, sizeof *s);
    if (!s)
        return err_set(e, ERR_NO_MEMORY, "no memory for sealing");
    hkdf_sha256(secret_bytes(dek->key), secret_size(dek->key), h->salt, SALT_BYTES, info,
                context_info(h, info), okm, sizeof okm);
    s->number = atomic_fetch_add(&last, 1) + 1;
    s->writes = writes;
    s->chunks = chunks;
    s->key = secret_create(okm, KEY_BYTES);
    s->used = writes ? calloc(((size_t)chunks + 2 + 63) / 64, sizeof *s->used) : NULL;
    memcpy(commitment, okm + KEY_BYTES, COMMITMENT_BYTES);
    secret_wipe(okm, sizeof okm);
    context_ad(h, s->context);
    if (!s->key || (writes && !s->used)) {
        seal_free(s);
        return err_set(e, ERR_NO_MEMORY, "no memory for sealing");
    }
    *out = s;
    return 0;
}

int seal_create(const struct dek *dek, struct segment_header *h, uint32_t chunks, struct seal **out,
                struct err *e)
{
    h->dek_id = dek->id;
    return prepare(dek, h, chunks, true, out, h->commitment, e);
}

int seal_open(const struct dek *dek, const struct segment_header *h, uint32_t chunks, struct seal **out,
              struct err *e)
{
    uint8_t commitment[COMMITMENT_BYTES];
    *out = NULL;
    if (!id_equal(&dek->id, &h->dek_id))
        return err_set(e, ERR_KEY,
                       "wrong key: the segment was sealed with another key of the run than the one "
                       "at hand; open the run again to fetch its envelopes");
    int rc = prepare(dek, h, chunks, false, out, commitment, e);
    if (rc == 0 && !secret_memequal(commitment, h->commitment, sizeof commitment)) {
        seal_free(*out);
        *out = NULL;
        rc = err_set(e, ERR_KEY,
                     "wrong key: the segment's key commitment is not that of the run's key; use the "
                     "credentials of the tenant that saved it");
    }
    return rc;
}

void seal_free(struct seal *s)
{
    if (!s)
        return;
    secret_free(s->key);
    free(s->used);
    free(s);
}

struct seal_state *seal_state_create(void)
{
    struct seal_state *st = calloc(1, sizeof *st);
    if (!st)
        return NULL;
    st->seals = aead_create(AEAD_AES_256_GCM, true);
    st->opens = aead_create(AEAD_AES_256_GCM, false);
    if (st->seals && st->opens)
        return st;
    seal_state_free(st);
    return NULL;
}

void seal_state_free(struct seal_state *st)
{
    if (!st)
        return;
    aead_free(st->seals);
    aead_free(st->opens);
    free(st);
}

static struct aead *sealing(const struct seal *s, struct seal_state *st)
{
    if (st->seals_for != s->number) {
        aead_key(st->seals, secret_bytes(s->key));
        st->seals_for = s->number;
    }
    return st->seals;
}

static struct aead *opening(const struct seal *s, struct seal_state *st)
{
    if (st->opens_for != s->number) {
        aead_key(st->opens, secret_bytes(s->key));
        st->opens_for = s->number;
    }
    return st->opens;
}

static void nonce_of(enum domain domain, uint64_t counter, uint8_t out[AEAD_NONCE_BYTES])
{
    le32_put(out, domain);
    le64_put(out + 4, counter);
}

/* The shared part of the associated data; returns where the particular one goes. */
static uint8_t *ad_begin(const struct seal *s, enum domain domain, uint8_t ad[A_END_MAX])
{
    memcpy(ad, s->context, A_OWN);
    le32_put(ad + A_DOMAIN, domain);
    return ad + A_OWN;
}

static void chunk_ad(const struct seal *s, uint32_t number, uint32_t plain_bytes, unsigned codec,
                     unsigned dtype, uint8_t ad[A_END_MAX])
{
    uint8_t *own = ad_begin(s, DOMAIN_CHUNK, ad);
    le32_put(own, number);
    le32_put(own + 4, number + 1 == s->chunks);
    le32_put(own + 8, plain_bytes);
    own[12] = (uint8_t)codec;
    own[13] = (uint8_t)dtype;
    le16_put(own + 14, 0);
}

/* Takes a nonce, once: the guard that a (key, nonce) pair never seals two messages. */
static int claim(const struct seal *s, uint32_t bit, const char *what, struct err *e)
{
    if (!s->writes)
        return err_set(e, ERR_INVALID, "a segment opened for reading cannot be sealed again");
    uint64_t mask = 1ull << (bit % 64);
    if (atomic_fetch_or(&s->used[bit / 64], mask) & mask)
        return err_set(e, ERR_EXISTS,
                       "%s was sealed already; send the same bytes again, or begin a new segment", what);
    return 0;
}

int seal_chunk(const struct seal *s, struct seal_state *st, uint32_t number, uint32_t plain_bytes,
               enum codec codec, enum dtype dtype, const void *payload, size_t payload_bytes, void *out,
               struct hash128 *stored_hash, struct err *e)
{
    uint8_t nonce[AEAD_NONCE_BYTES], ad[A_END_MAX];
    char what[32];
    if (number >= s->chunks || payload_bytes > CHUNK_STORED_BYTES_MAX - TAG_BYTES)
        return err_set(e, ERR_LIMIT, "chunk %u of %zu bytes; the segment has %u chunks of at most %u", number,
                       payload_bytes, s->chunks, CHUNK_STORED_BYTES_MAX - TAG_BYTES);
    if (codec == CODEC_ZERO)
        return err_set(e, ERR_INVALID, "chunk %u is all zeros: nothing of it is stored, so nothing is sealed",
                       number);
    snprintf(what, sizeof what, "chunk %u", number);
    int rc = claim(s, number, what, e);
    if (rc < 0)
        return rc;
    nonce_of(DOMAIN_CHUNK, number, nonce);
    chunk_ad(s, number, plain_bytes, codec, dtype, ad);
    aead_seal(sealing(s, st), nonce, ad, A_OWN + CHUNK_OWN_BYTES, payload, payload_bytes, out, stored_hash);
    return 0;
}

static int unverified(uint32_t number, const struct chunk_entry *entry, struct err *e)
{
    return err_set(e, ERR_CORRUPT,
                   "chunk %u at offset %llu (%u bytes) does not verify: its bytes, or its entry in the "
                   "index, are not those that were sealed",
                   number, (unsigned long long)entry->offset, entry->stored_bytes);
}

static int check_entry(const struct seal *s, uint32_t number, const struct chunk_entry *entry, struct err *e)
{
    if (number >= s->chunks)
        return err_set(e, ERR_CORRUPT, "chunk %u of a segment that has %u", number, s->chunks);
    if (entry->stored_bytes < TAG_BYTES || entry->stored_bytes > CHUNK_STORED_BYTES_MAX)
        return err_set(e, ERR_CORRUPT, "chunk %u has %u stored bytes; expected %u to %u", number,
                       entry->stored_bytes, TAG_BYTES, CHUNK_STORED_BYTES_MAX);
    return 0;
}

int open_chunk_begin(const struct seal *s, struct seal_state *st, uint32_t number,
                     const struct chunk_entry *entry, struct err *e)
{
    uint8_t nonce[AEAD_NONCE_BYTES], ad[A_END_MAX];
    int rc = check_entry(s, number, entry, e);
    if (rc < 0)
        return rc;
    nonce_of(DOMAIN_CHUNK, number, nonce);
    chunk_ad(s, number, entry->plain_bytes, entry->codec, entry->dtype, ad);
    aead_begin(opening(s, st), nonce, ad, A_OWN + CHUNK_OWN_BYTES);
    return 0;
}

void open_chunk_add(struct seal_state *st, uint8_t *bytes, size_t n)
{
    aead_add(st->opens, bytes, n, bytes);
}

int open_chunk_end(struct seal_state *st, uint32_t number, const struct chunk_entry *entry,
                   const uint8_t tag[TAG_BYTES], struct err *e)
{
    return aead_check(st->opens, tag) < 0 ? unverified(number, entry, e) : 0;
}

int open_chunk(const struct seal *s, struct seal_state *st, uint32_t number, const struct chunk_entry *entry,
               const void *stored, void *out, struct hash128 *found, struct err *e)
{
    uint8_t nonce[AEAD_NONCE_BYTES], ad[A_END_MAX];
    if (number < s->chunks && entry->codec == CODEC_ZERO && entry->stored_bytes == 0)
        return 0; /* nothing is stored; the index, which names the codec, is sealed */
    int rc = check_entry(s, number, entry, e);
    if (rc < 0)
        return rc;
    nonce_of(DOMAIN_CHUNK, number, nonce);
    chunk_ad(s, number, entry->plain_bytes, entry->codec, entry->dtype, ad);
    if (aead_open(opening(s, st), nonce, ad, A_OWN + CHUNK_OWN_BYTES, stored, entry->stored_bytes, out,
                  found) < 0)
        return unverified(number, entry, e);
    return 0;
}

int seal_index_begin(const struct seal *s, struct seal_state *st, const uint8_t public_digest[SHA256_BYTES],
                     size_t n, struct err *e)
{
    uint8_t nonce[AEAD_NONCE_BYTES], ad[A_END_MAX];
    if (n > INDEX_BYTES_MAX - TAG_BYTES)
        return err_set(e, ERR_LIMIT, "an index of %zu bytes; at most %u are possible", n,
                       INDEX_BYTES_MAX - TAG_BYTES);
    int rc = claim(s, s->chunks, "the index", e);
    if (rc < 0)
        return rc;
    nonce_of(DOMAIN_INDEX, 0, nonce);
    memcpy(ad_begin(s, DOMAIN_INDEX, ad), public_digest, SHA256_BYTES);
    aead_begin(sealing(s, st), nonce, ad, A_OWN + SHA256_BYTES);
    return 0;
}

void seal_index_add(struct seal_state *st, const void *plain, size_t n, void *out)
{
    aead_add(st->seals, plain, n, out);
}

void seal_index_end(struct seal_state *st, uint8_t tag[TAG_BYTES])
{
    aead_tag(st->seals, tag);
}

int seal_index(const struct seal *s, struct seal_state *st, const uint8_t public_digest[SHA256_BYTES],
               const void *plain, size_t n, void *out, struct err *e)
{
    int rc = seal_index_begin(s, st, public_digest, n, e);
    if (rc < 0)
        return rc;
    seal_index_add(st, plain, n, out);
    seal_index_end(st, (uint8_t *)out + n);
    return 0;
}

int open_index(const struct seal *s, struct seal_state *st, const uint8_t public_digest[SHA256_BYTES],
               const void *stored, size_t n, void *out, struct err *e)
{
    uint8_t nonce[AEAD_NONCE_BYTES], ad[A_END_MAX];
    if (n < TAG_BYTES || n > INDEX_BYTES_MAX)
        return err_set(e, ERR_CORRUPT, "the index's sealed part has %zu bytes; expected %u to %u", n,
                       TAG_BYTES, INDEX_BYTES_MAX);
    nonce_of(DOMAIN_INDEX, 0, nonce);
    memcpy(ad_begin(s, DOMAIN_INDEX, ad), public_digest, SHA256_BYTES);
    if (aead_open(opening(s, st), nonce, ad, A_OWN + SHA256_BYTES, stored, n, out, NULL) < 0)
        return err_set(e, ERR_CORRUPT,
                       "the index does not verify: its sealed part, its chunk table, or the "
                       "segment's header are not those that were sealed");
    return 0;
}

/* Nothing is encrypted: the tag authenticates the trailer's fields. */
static void trailer_ad(const struct seal *s, const struct segment_trailer *t, uint8_t ad[A_END_MAX])
{
    segment_trailer_signed(t, ad_begin(s, DOMAIN_TRAILER, ad));
}

int seal_trailer(const struct seal *s, struct seal_state *st, struct segment_trailer *t, struct err *e)
{
    uint8_t nonce[AEAD_NONCE_BYTES], ad[A_END_MAX];
    int rc = claim(s, s->chunks + 1, "the trailer", e);
    if (rc < 0)
        return rc;
    nonce_of(DOMAIN_TRAILER, 0, nonce);
    trailer_ad(s, t, ad);
    aead_seal(sealing(s, st), nonce, ad, sizeof ad, NULL, 0, t->tag, NULL);
    return 0;
}

int check_trailer(const struct seal *s, struct seal_state *st, const struct segment_trailer *t, struct err *e)
{
    uint8_t nonce[AEAD_NONCE_BYTES], ad[A_END_MAX], none[1];
    nonce_of(DOMAIN_TRAILER, 0, nonce);
    trailer_ad(s, t, ad);
    if (aead_open(opening(s, st), nonce, ad, sizeof ad, t->tag, TAG_BYTES, none, NULL) < 0)
        return err_set(e, ERR_CORRUPT,
                       "the segment's trailer does not verify: its fields, or the segment's "
                       "header, are not those that were sealed");
    return 0;
}
