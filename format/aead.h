/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Authenticated encryption with associated data: AES-GCM (NIST SP 800-38D) and ChaCha20-Poly1305 (RFC 8439),
 * 12-byte nonce, 16-byte tag behind the ciphertext. The only place that meets the cipher; nonces are the
 * caller's duty (seal.h, keys.h and record.h say how they never repeat).
 */
#ifndef LARDER_AEAD_H
#define LARDER_AEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/base/err.h"
#include "format/base/hash.h"

#define AEAD_KEY_BYTES   32 /* AES-128-GCM: 16 */
#define AEAD_NONCE_BYTES 12
#define AEAD_TAG_BYTES   16
#define AEAD_BYTES_MAX   0x7fffffffu /* of one message; associated data as well */

enum aead_suite { AEAD_AES_256_GCM, AEAD_AES_128_GCM, AEAD_CHACHA20_POLY1305 };

/* One direction with one key at a time; not thread-safe. NULL: no memory. */
struct aead;
must_check struct aead *aead_create(enum aead_suite suite, bool seals);
void aead_free(struct aead *a); /* wipes the key schedule */
/* To be set before first use; setting it costs far more than sealing a small message. */
void aead_key(struct aead *a, const uint8_t *key);

/* Writes n + AEAD_TAG_BYTES bytes; out may equal plain, and does not overlap it otherwise. sum: the hash of
 * what was written, taken piece by piece while it is in the cache; may be NULL. */
void aead_seal(struct aead *a, const uint8_t nonce[AEAD_NONCE_BYTES], const void *ad, size_t ad_bytes,
               const void *plain, size_t n, uint8_t *out, struct hash128 *sum);
/* n includes the tag, n >= AEAD_TAG_BYTES; writes n - AEAD_TAG_BYTES bytes; out may equal sealed. sum: as
 * above, of the n sealed bytes. 0 or -EBADMSG: then out was wiped. */
must_check int aead_open(struct aead *a, const uint8_t nonce[AEAD_NONCE_BYTES], const void *ad,
                         size_t ad_bytes, const void *sealed, size_t n, uint8_t *out, struct hash128 *sum);

/* One message in pieces: begin, any number of adds (out may equal in), then its tag. What was opened counts
 * for nothing until aead_check says 0; on -EBADMSG the caller wipes it. */
void aead_begin(struct aead *a, const uint8_t nonce[AEAD_NONCE_BYTES], const void *ad, size_t ad_bytes);
void aead_add(struct aead *a, const void *in, size_t n, uint8_t *out);
void aead_tag(struct aead *a, uint8_t tag[AEAD_TAG_BYTES]);
must_check int aead_check(struct aead *a, const uint8_t tag[AEAD_TAG_BYTES]);

#endif
