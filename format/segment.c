/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Header and trailer of a segment. Both begin alike in every version, so that any reader can tell what it has
 * before it: checksum at 0, magic at 8, version at 16.
 */
#include "format/segment.h"

#include <assert.h>
#include <string.h>

#include "format/version.h"

enum {
    AT_CHECKSUM = 0, /* XXH3-64 of all bytes behind it */
    AT_MAGIC = 8,
    AT_VERSION = 16,
    CHECKED_FROM = 8,
};

/* Header. */
enum {
    H_SUITE = 20,
    H_SEGMENT = 24,
    H_RUN = 40,
    H_ATTEMPT = 56,
    H_STEP = 72,
    H_RANK = 80,
    H_WORLD = 84,
    H_SALT = 88,
    H_DEK = 120,
    H_COMMITMENT = 136,
    H_TENANT = 168,
    H_RESERVED = 232,
};
static_assert(H_SEGMENT == H_SUITE + 4 && H_RUN == H_SEGMENT + ID_BYTES && H_ATTEMPT == H_RUN + ID_BYTES &&
                  H_STEP == H_ATTEMPT + ID_BYTES && H_RANK == H_STEP + 8 && H_WORLD == H_RANK + 4 &&
                  H_SALT == H_WORLD + 4 && H_DEK == H_SALT + SALT_BYTES && H_COMMITMENT == H_DEK + ID_BYTES &&
                  H_TENANT == H_COMMITMENT + COMMITMENT_BYTES &&
                  H_RESERVED == H_TENANT + TENANT_NAME_BYTES_MAX + 1,
              "header without padding");
static_assert(H_RESERVED <= BLOCK_BYTES && BLOCK_BYTES == 4096, "one block");

/* Trailer. */
enum {
    T_CHUNKS = 20,
    T_SEGMENT = 24,
    T_FILE_BYTES = 40,
    T_INDEX_OFFSET = 48,
    T_INDEX_BYTES = 56,
    T_PUBLIC_BYTES = 64,
    T_DIGEST = 72,
    T_TAG = 104,
    T_RESERVED = 120,
};
static_assert(T_SEGMENT == T_CHUNKS + 4 && T_FILE_BYTES == T_SEGMENT + ID_BYTES &&
                  T_INDEX_OFFSET == T_FILE_BYTES + 8 && T_DIGEST == T_PUBLIC_BYTES + 8 &&
                  T_TAG == T_DIGEST + SHA256_BYTES && T_RESERVED == T_TAG + TAG_BYTES,
              "trailer without padding");
static_assert(sizeof(struct id) == ID_BYTES, "ids are bytes");

static const char header_magic[8] = {'L', 'A', 'R', 'D', 'S', 'E', 'G', 'M'};
static const char trailer_magic[8] = {'L', 'A', 'R', 'D', 'T', 'R', 'L', 'R'};

/* Head of the index's public part: 32 bytes, then 40 for each chunk; format/index.c. */
#define INDEX_HEAD_BYTES  32u
#define INDEX_CHUNK_BYTES 40u
#define UNSIGNED(x)       ((unsigned long long)(x))

static void block_seal(uint8_t out[BLOCK_BYTES])
{
    le64_put(out + AT_CHECKSUM, hash64(out + CHECKED_FROM, BLOCK_BYTES - CHECKED_FROM));
}

static int block_check(const uint8_t in[BLOCK_BYTES], const char magic[8], const char *what, size_t reserved,
                       struct err *e)
{
    if (memcmp(in + AT_MAGIC, magic, 8) != 0)
        return err_set(
            e, ERR_CORRUPT,
            "segment %s: magic at offset %d is not \"%.8s\"; this is no segment, or its first bytes "
            "are damaged",
            what, AT_MAGIC, magic);
    uint64_t expected = hash64(in + CHECKED_FROM, BLOCK_BYTES - CHECKED_FROM);
    uint64_t found = le64_get(in + AT_CHECKSUM);
    uint32_t version = le32_get(in + AT_VERSION);
    if (version != SEGMENT_VERSION)
        return err_set(e, ERR_VERSION, "segment %s: version %u at offset %d, this build knows %u only; %s",
                       what, version, AT_VERSION, SEGMENT_VERSION,
                       expected == found ? "read it with the larder that wrote it, or a newer one"
                                         : "its checksum does not match either, so it may be damaged");
    if (expected != found)
        return err_set(
            e, ERR_CORRUPT,
            "segment %s: checksum at offset %d is %016llx, its bytes give %016llx; the %s is damaged", what,
            AT_CHECKSUM, UNSIGNED(found), UNSIGNED(expected), what);
    for (size_t i = reserved; i < BLOCK_BYTES; i++)
        if (in[i] != 0)
            return err_set(e, ERR_CORRUPT, "segment %s: reserved byte at offset %zu is not zero", what, i);
    return 0;
}

void segment_header_encode(const struct segment_header *h, uint8_t out[BLOCK_BYTES])
{
    size_t tenant = strnlen(h->tenant, sizeof h->tenant);
    check(h->version == SEGMENT_VERSION && tenant < sizeof h->tenant);
    memset(out, 0, BLOCK_BYTES);
    memcpy(out + AT_MAGIC, header_magic, 8);
    le32_put(out + AT_VERSION, h->version);
    le32_put(out + H_SUITE, h->suite);
    memcpy(out + H_SEGMENT, &h->segment_id, ID_BYTES);
    memcpy(out + H_RUN, &h->run_id, ID_BYTES);
    memcpy(out + H_ATTEMPT, &h->attempt, ID_BYTES);
    le64_put(out + H_STEP, h->step);
    le32_put(out + H_RANK, h->rank);
    le32_put(out + H_WORLD, h->world);
    memcpy(out + H_SALT, h->salt, SALT_BYTES);
    memcpy(out + H_DEK, &h->dek_id, ID_BYTES);
    memcpy(out + H_COMMITMENT, h->commitment, COMMITMENT_BYTES);
    memcpy(out + H_TENANT, h->tenant, tenant);
    block_seal(out);
}

static int header_fields_check(const struct segment_header *h, struct err *e)
{
    if (h->suite != SUITE_AES256GCM_HKDF_SHA256)
        return err_set(e, ERR_VERSION, "segment header: suite %u at offset %d, this build knows %u only",
                       h->suite, H_SUITE, SUITE_AES256GCM_HKDF_SHA256);
    if (h->world == 0 || h->world > WORLD_MAX || h->rank >= h->world)
        return err_set(e, ERR_CORRUPT,
                       "segment header: rank %u of %u at offset %d; expected a rank below a world of 1 to %u",
                       h->rank, h->world, H_RANK, WORLD_MAX);
    size_t tenant = strnlen(h->tenant, sizeof h->tenant);
    for (size_t i = tenant; i < sizeof h->tenant; i++)
        if (h->tenant[i] != 0)
            return err_set(e, ERR_CORRUPT, "segment header: tenant at offset %d has bytes behind its end",
                           H_TENANT);
    if (tenant == 0 || tenant == sizeof h->tenant)
        return err_set(e, ERR_CORRUPT, "segment header: tenant at offset %d is empty or does not end",
                       H_TENANT);
    return 0;
}

int segment_header_decode(const uint8_t in[BLOCK_BYTES], struct segment_header *out, struct err *e)
{
    int r = block_check(in, header_magic, "header", H_RESERVED, e);
    if (r < 0)
        return r;
    struct segment_header h = {
        .version = le32_get(in + AT_VERSION),
        .suite = le32_get(in + H_SUITE),
        .step = le64_get(in + H_STEP),
        .rank = le32_get(in + H_RANK),
        .world = le32_get(in + H_WORLD),
    };
    memcpy(&h.segment_id, in + H_SEGMENT, ID_BYTES);
    memcpy(&h.run_id, in + H_RUN, ID_BYTES);
    memcpy(&h.attempt, in + H_ATTEMPT, ID_BYTES);
    memcpy(h.salt, in + H_SALT, SALT_BYTES);
    memcpy(&h.dek_id, in + H_DEK, ID_BYTES);
    memcpy(h.commitment, in + H_COMMITMENT, COMMITMENT_BYTES);
    memcpy(h.tenant, in + H_TENANT, sizeof h.tenant);
    r = header_fields_check(&h, e);
    if (r == 0)
        *out = h;
    return r;
}

void segment_trailer_encode(const struct segment_trailer *t, uint8_t out[BLOCK_BYTES])
{
    check(t->version == SEGMENT_VERSION);
    memset(out, 0, BLOCK_BYTES);
    memcpy(out + AT_MAGIC, trailer_magic, 8);
    le32_put(out + AT_VERSION, t->version);
    le32_put(out + T_CHUNKS, t->chunks);
    memcpy(out + T_SEGMENT, &t->segment_id, ID_BYTES);
    le64_put(out + T_FILE_BYTES, t->file_bytes);
    le64_put(out + T_INDEX_OFFSET, t->index_offset);
    le64_put(out + T_INDEX_BYTES, t->index_bytes);
    le64_put(out + T_PUBLIC_BYTES, t->index_public_bytes);
    memcpy(out + T_DIGEST, t->index_digest, SHA256_BYTES);
    memcpy(out + T_TAG, t->tag, TAG_BYTES);
    block_seal(out);
}

/* All sums below stay under 2^45, since each term is checked first. */
static int trailer_fields_check(const struct segment_trailer *t, struct err *e)
{
    if (t->chunks > SEGMENT_CHUNKS_MAX)
        return err_set(e, ERR_CORRUPT, "segment trailer: %u chunks at offset %d, at most %u are possible",
                       t->chunks, T_CHUNKS, SEGMENT_CHUNKS_MAX);
    if (t->file_bytes > SEGMENT_BYTES_MAX)
        return err_set(e, ERR_CORRUPT, "segment trailer: file of %llu bytes at offset %d, at most %llu",
                       UNSIGNED(t->file_bytes), T_FILE_BYTES, SEGMENT_BYTES_MAX);
    if (t->index_offset % BLOCK_BYTES != 0 || t->index_offset < BLOCK_BYTES ||
        t->index_offset > t->file_bytes)
        return err_set(
            e, ERR_CORRUPT,
            "segment trailer: index offset %llu at offset %d; expected a multiple of %u inside the "
            "file of %llu bytes",
            UNSIGNED(t->index_offset), T_INDEX_OFFSET, BLOCK_BYTES, UNSIGNED(t->file_bytes));
    if (t->index_bytes > INDEX_BYTES_MAX || t->index_public_bytes > t->index_bytes ||
        t->index_public_bytes != INDEX_HEAD_BYTES + (uint64_t)INDEX_CHUNK_BYTES * t->chunks)
        return err_set(e, ERR_CORRUPT,
                       "segment trailer: index of %llu bytes, %llu of them public, at offset %d does not fit "
                       "%u chunks",
                       UNSIGNED(t->index_bytes), UNSIGNED(t->index_public_bytes), T_INDEX_BYTES, t->chunks);
    uint64_t end = block_align(t->index_offset + t->index_bytes) + BLOCK_BYTES;
    if (end != t->file_bytes)
        return err_set(e, ERR_CORRUPT,
                       "segment trailer: index and trailer end at %llu, the file at %llu (offset %d)",
                       UNSIGNED(end), UNSIGNED(t->file_bytes), T_FILE_BYTES);
    return 0;
}

int segment_trailer_decode(const uint8_t in[BLOCK_BYTES], struct segment_trailer *out, struct err *e)
{
    int r = block_check(in, trailer_magic, "trailer", T_RESERVED, e);
    if (r < 0)
        return r;
    struct segment_trailer t = {
        .version = le32_get(in + AT_VERSION),
        .chunks = le32_get(in + T_CHUNKS),
        .file_bytes = le64_get(in + T_FILE_BYTES),
        .index_offset = le64_get(in + T_INDEX_OFFSET),
        .index_bytes = le64_get(in + T_INDEX_BYTES),
        .index_public_bytes = le64_get(in + T_PUBLIC_BYTES),
    };
    memcpy(&t.segment_id, in + T_SEGMENT, ID_BYTES);
    memcpy(t.index_digest, in + T_DIGEST, SHA256_BYTES);
    memcpy(t.tag, in + T_TAG, TAG_BYTES);
    r = trailer_fields_check(&t, e);
    if (r == 0)
        *out = t;
    return r;
}

void segment_trailer_signed(const struct segment_trailer *t, uint8_t out[SEGMENT_TRAILER_SIGNED_BYTES])
{
    memset(out, 0, SEGMENT_TRAILER_SIGNED_BYTES);
    le32_put(out, t->version);
    memcpy(out + 4, &t->segment_id, ID_BYTES);
    le64_put(out + 20, t->file_bytes);
    le64_put(out + 28, t->index_offset);
    le64_put(out + 36, t->index_bytes);
    le64_put(out + 44, t->index_public_bytes);
    le32_put(out + 52, t->chunks);
    memcpy(out + 56, t->index_digest, SHA256_BYTES);
    static_assert(56 + SHA256_BYTES <= SEGMENT_TRAILER_SIGNED_BYTES, "fits, rest zero");
}
