/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Protection of TLS 1.3 records (RFC 8446, 5.2 to 5.5, 7.2 and 7.3): a traffic secret goes in, records go in
 * and out. No connection, no handshake, no memory but the key's own: tls.c takes over from OpenSSL with it
 * once the handshake is done.
 *
 *   record   | type 23, version, length: 5 | sealed: content, type 1, zeros | tag, 16 |
 *   nonce    the key's IV xor the number of the record under this key, which never repeats: a key that has
 *            sealed RECORD_KEY_MAX records is worn, and is to be updated before its next one
 */
#ifndef LARDER_RECORD_H
#define LARDER_RECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/base/cursor.h"
#include "format/base/err.h"

#define RECORD_CONTENT_MAX  16384u /* of one record */
#define RECORD_HEADER_BYTES 5u
#define RECORD_OVERHEAD     22u                                 /* header 5, content type 1, tag 16 */
#define RECORD_BYTES_MAX    (RECORD_HEADER_BYTES + 16384 + 256) /* whole, with any padding */
/* AES-GCM is good for 2^24.5 whole records (5.5); 4 GiB are far from it, and an update costs next to nothing.
 */
#define RECORD_KEY_MAX    (1u << 18)
#define RECORD_SECRET_MAX 48u /* bytes of a traffic secret */

enum record_type { RECORD_ALERT = 21, RECORD_HANDSHAKE = 22, RECORD_DATA = 23 };
/* What a receiver tells whoever broke the protocol (RFC 8446, 6.2). */
enum record_alert {
    ALERT_CLOSE_NOTIFY = 0,
    ALERT_UNEXPECTED_MESSAGE = 10,
    ALERT_BAD_RECORD_MAC = 20,
    ALERT_RECORD_OVERFLOW = 22,
    ALERT_DECODE_ERROR = 50,
    ALERT_INTERNAL_ERROR = 80,
    ALERT_USER_CANCELED = 90
};

/* Bytes of a cipher suite's traffic secrets; 0: a suite that is not known. Numbers as in RFC 8446, B.4. */
size_t record_secret_bytes(uint16_t suite);
/* The traffic secret that follows (7.2). 0 or -ENOMEM. out may be secret. */
must_check int record_secret_next(uint16_t suite, const uint8_t *secret, uint8_t *out);

/* One direction. Not thread-safe. */
struct record_key;
/* secret: record_secret_bytes of it. 0, -ENOMEM or -ENOTSUP (suite). */
must_check int record_key_create(bool seals, uint16_t suite, const uint8_t *secret, struct record_key **out);
void record_key_free(struct record_key *k); /* wipes; NULL allowed */
/* Goes on with another secret, from record 0. 0 or -ENOMEM: then the key is as it was. */
must_check int record_key_set(struct record_key *k, const uint8_t *secret);
bool record_key_worn(const struct record_key *k);

/* Seals parts, together at most RECORD_CONTENT_MAX bytes, as one record; out has room for RECORD_OVERHEAD
 * more, and does not overlap them. Returns the record's bytes. */
size_t record_seal(struct record_key *k, enum record_type type, const struct slice *parts, size_t count,
                   uint8_t *out);

/* Bytes of the whole record that begins so. 0, or the alert: no protected record begins so. */
must_check int record_bytes(const uint8_t header[RECORD_HEADER_BYTES], size_t *n);
/*
 * Opens one whole record of n bytes. out: room for n - RECORD_OVERHEAD bytes, apart from the record or the
 * record's own place behind its header. Returns 0, with type and bytes of the content (without padding), or
 * the alert: then out holds nothing that was not verified.
 */
must_check int record_open(struct record_key *k, const uint8_t *record, size_t n, uint8_t *out,
                           enum record_type *type, size_t *bytes);

#endif
