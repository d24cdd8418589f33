/* SPDX-License-Identifier: Apache-2.0 */
/* What part_read.c and part_fetch.c share. */
#ifndef LARDER_CLIENT_PART_PRIVATE_H
#define LARDER_CLIENT_PART_PRIVATE_H

#include "client/loan.h"
#include "client/part.h"
#include "client/saver.h"

struct part {
    struct larder *client;
    struct id run_id;
    char run[NAME_BYTES_MAX + 1];
    uint32_t rank;
    struct segment_header header;
    struct segment_trailer trailer;
    struct seal *seal;
    struct chunk_entry *chunks;
    uint32_t chunk_count;
    struct loan index_memory;
    uint8_t *index_bytes;       /* in it: public and private part, opened in place */
    struct index_private index; /* a view of them */
};

struct part_scratch {
    struct codec_state *codec;
    struct seal_state *seal;
    uint8_t *bytes; /* payloads: CHUNK_STORED_BYTES_MAX */
    uint8_t *plain; /* for decoding again what is about to be sent; taken when first needed */
};

struct range {
    uint64_t offset, bytes;
};

/* Reads ranges of one segment, one behind the other, into out. Asks again after a lost connection. class: any
 * but PART_FEED. digest: SHA-256 of all of it, taken while it comes; may be NULL. */
must_check int segment_read(struct conn *conn, const struct id *run_id, const struct id *segment,
                            enum part_class class, const struct range *ranges, uint32_t count, uint8_t *out,
                            uint8_t *digest, struct err *e);

#endif
