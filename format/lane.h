/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bulk lane: plain TCP connections for chunks that the client has sealed, bound to a TLS session by a
 * ticket and authenticated frame by frame. Here are its keys, its tags and its opening; channel.h gives the
 * frames.
 *
 * Keys: 64 bytes of the TLS exporter (RFC 8446, 7.5) with label LANE_LABEL and the ticket as context; the
 * first half authenticates what the client sends, the second what the server sends. A tag is that of
 * ChaCha20-Poly1305 (RFC 8439) over associated data and no plaintext. The nonce is never sent: 4 bytes of
 * direction (0 to the server, 1 to the client) and 8 of a counter of the tags in that direction,
 * little-endian. So a frame that was changed, dropped, repeated or put elsewhere does not fit.
 *
 *   hello, client to server     u32 magic "LRLN", u16 version, u16 zero, ticket (16), tag over these 24 bytes
 *   welcome, server to client   u32 magic "LRLN", u16 version, u16 zero, ticket (16), tag over these 24 bytes
 */
#ifndef LARDER_LANE_H
#define LARDER_LANE_H

#include <stdbool.h>
#include <stdint.h>

#include "format/base/cursor.h"
#include "format/base/err.h"
#include "format/segment.h"

#define LANE_LABEL       "EXPORTER-larder-lane"
#define LANE_MAGIC       0x4e4c524cu /* "LRLN" read little-endian; TLS begins with 0x16 */
#define LANE_VERSION     1
#define LANE_KEY_BYTES   32
#define LANE_TAG_BYTES   16
#define LANE_PLAIN_BYTES 24 /* of hello and welcome, without their tags */
#define LANE_HELLO_BYTES (LANE_PLAIN_BYTES + LANE_TAG_BYTES)

/* As the exporter gives them; to be wiped after use. */
struct lane_keys {
    uint8_t to_server[LANE_KEY_BYTES];
    uint8_t to_client[LANE_KEY_BYTES];
};
_Static_assert(sizeof(struct lane_keys) == 2 * LANE_KEY_BYTES, "filled by the exporter in one piece");

/* The tags of one direction; not thread-safe. NULL: no memory. */
struct lane_mac;
must_check struct lane_mac *lane_mac_create(bool to_client, const uint8_t key[LANE_KEY_BYTES]);
void lane_mac_free(struct lane_mac *m); /* wipes the key; NULL allowed */
/* Each uses up one count. */
void lane_mac_tag(struct lane_mac *m, struct slice a, struct slice b, uint8_t tag[LANE_TAG_BYTES]);
must_check int lane_mac_check(struct lane_mac *m, struct slice a,
                              const uint8_t tag[LANE_TAG_BYTES]); /* 0 or -EBADMSG */
/* The same in pieces, as they come or go: one tag at a time. */
void lane_mac_begin(struct lane_mac *m);
void lane_mac_add(struct lane_mac *m, struct slice part);
void lane_mac_end(struct lane_mac *m, uint8_t tag[LANE_TAG_BYTES]);
must_check int lane_mac_end_check(struct lane_mac *m, const uint8_t tag[LANE_TAG_BYTES]);
uint64_t lane_mac_count(const struct lane_mac *m);

/* Hello or welcome without its tag. */
void lane_plain_encode(const struct id *ticket, uint8_t out[LANE_PLAIN_BYTES]);
/* ERR_PROTOCOL, ERR_VERSION. */
must_check int lane_plain_decode(const uint8_t in[LANE_PLAIN_BYTES], struct id *ticket, struct err *e);

#endif
