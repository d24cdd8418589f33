/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/handmade.h"

#include <stdlib.h>
#include <string.h>

#include "format/version.h"
#include "format/wire.h"

struct id handmade_id(uint8_t first)
{
    struct id id = {{first, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
    return id;
}

void handmade_make(struct handmade *p, uint32_t chunk_bytes, uint8_t seed)
{
    memset(p, 0, sizeof *p);
    p->run = handmade_id(1);
    p->attempt = handmade_id(2);
    p->segment = handmade_id((uint8_t)(3 + seed));
    p->step = 100 + seed;
    p->world = 2;
    p->chunk_bytes = chunk_bytes;
    p->bytes = malloc(PART_CHUNKS * chunk_bytes);
    check(p->bytes);
    for (uint32_t i = 0; i < PART_CHUNKS * chunk_bytes; i++)
        p->bytes[i] = (uint8_t)((i + seed) * 2654435761u >> 24);
    p->bytes_offset = BLOCK_BYTES;
    p->file_bytes = p->bytes_offset + PART_CHUNKS * chunk_bytes + 2 * BLOCK_BYTES; /* index and trailer */
}

void handmade_free(struct handmade *p)
{
    free(p->bytes);
    p->bytes = NULL;
}

struct buf handmade_run_open(const struct handmade *p)
{
    struct buf b = {0};
    struct msg_run_open m = {.kind = 1, .name = slice_str("run"), .create = 1, .run_id = p->run};
    msg_run_open_encode(&m, &b);
    return b;
}

struct buf handmade_attempt(const struct handmade *p)
{
    struct buf b = {0};
    struct msg_attempt m = {.run_id = p->run, .attempt = p->attempt, .world = p->world};
    msg_attempt_encode(&m, &b);
    return b;
}

struct buf handmade_create(const struct handmade *p, const char *tenant)
{
    uint8_t header[BLOCK_BYTES];
    struct segment_header h = {.version = SEGMENT_VERSION,
                               .suite = SUITE_AES256GCM_HKDF_SHA256,
                               .segment_id = p->segment,
                               .run_id = p->run,
                               .attempt = p->attempt,
                               .step = p->step,
                               .rank = p->rank,
                               .world = p->world,
                               .salt = {1},
                               .dek_id = handmade_id(9),
                               .commitment = {2}};
    struct buf b = {0};
    strcpy(h.tenant, tenant);
    segment_header_encode(&h, header);
    struct msg_segment_create m = {.run_id = p->run,
                                   .chunks = PART_CHUNKS,
                                   .reserve_bytes = p->file_bytes,
                                   .header = SLICE(header, sizeof header)};
    msg_segment_create_encode(&m, &b);
    return b;
}

struct chunk_entry handmade_entry(const struct handmade *p, uint32_t number)
{
    struct slice bytes = handmade_chunk_tail(p, number);
    return (struct chunk_entry){.offset = p->bytes_offset + (uint64_t)number * p->chunk_bytes,
                                .stored_bytes = p->chunk_bytes,
                                .plain_bytes = p->chunk_bytes - TAG_BYTES,
                                .codec = CODEC_RAW,
                                .dtype = DTYPE_U8,
                                .stored_hash = hash128(bytes.p, bytes.n)};
}

struct buf handmade_chunk(const struct handmade *p, uint32_t number)
{
    struct buf b = {0};
    struct chunk_entry entry = handmade_entry(p, number);
    struct msg_segment_chunk m = {.segment = p->segment, .number = number};
    chunk_entry_encode(&entry, m.entry.bytes);
    msg_segment_chunk_encode(&m, &b);
    return b;
}

struct slice handmade_chunk_tail(const struct handmade *p, uint32_t number)
{
    return SLICE(p->bytes + (size_t)number * p->chunk_bytes, p->chunk_bytes);
}

static size_t make_index(const struct handmade *p, struct buf *index)
{
    struct chunk_entry entries[PART_CHUNKS];
    for (uint32_t i = 0; i < PART_CHUNKS; i++)
        entries[i] = handmade_entry(p, i);
    int r = index_public_encode(entries, PART_CHUNKS, index, NULL);
    check(r == 0);
    size_t public_bytes = index->n;
    buf_zeros(index, 64); /* the server cannot look into the sealed part */
    return public_bytes;
}

struct buf handmade_index(const struct handmade *p, struct buf *tail)
{
    struct buf b = {0};
    struct msg_segment_index m = {.segment = p->segment,
                                  .index_offset = p->bytes_offset + PART_CHUNKS * p->chunk_bytes};
    (void)make_index(p, tail);
    msg_segment_index_encode(&m, &b);
    return b;
}

struct buf handmade_seal(struct handmade *p)
{
    struct buf b = {0}, index = {0};
    uint8_t trailer[BLOCK_BYTES];
    size_t public_bytes = make_index(p, &index);
    sha256(index.p, index.n, p->digest);
    struct segment_trailer t = {.version = SEGMENT_VERSION,
                                .segment_id = p->segment,
                                .file_bytes = p->file_bytes,
                                .index_offset = p->bytes_offset + PART_CHUNKS * p->chunk_bytes,
                                .index_bytes = index.n,
                                .index_public_bytes = public_bytes,
                                .chunks = PART_CHUNKS};
    memcpy(t.index_digest, p->digest, sizeof p->digest);
    segment_trailer_encode(&t, trailer);
    buf_free(&index);
    struct msg_segment_seal m = {.segment = p->segment, .trailer = SLICE(trailer, sizeof trailer)};
    msg_segment_seal_encode(&m, &b);
    return b;
}

struct buf handmade_join(const struct handmade *p, uint32_t wait_ms)
{
    struct buf b = {0};
    struct msg_join m = {.run_id = p->run,
                         .step = p->step,
                         .attempt = p->attempt,
                         .rank = p->rank,
                         .world = p->world,
                         .segment = p->segment,
                         .segment_bytes = p->file_bytes,
                         .wait_ms = wait_ms};
    memcpy(m.index_digest.bytes, p->digest, sizeof p->digest);
    msg_join_encode(&m, &b);
    return b;
}

struct buf handmade_read(const struct handmade *p, uint64_t credit, const struct range *ranges,
                         uint32_t count)
{
    struct buf b = {0}, items = {0};
    for (uint32_t i = 0; i < count; i++) {
        struct msg_read_range r = {
            .object = p->segment, .offset = ranges[i].offset, .bytes = ranges[i].bytes};
        msg_read_range_encode(&r, &items);
    }
    struct msg_read m = {.source = READ_SEGMENT,
                         .class = p->feeds ? 2 : 1,
                         .scope = p->run,
                         .credit = credit,
                         .count = count,
                         .ranges = SLICE(items.p, items.n)};
    msg_read_encode(&m, &b);
    buf_free(&items);
    return b;
}
