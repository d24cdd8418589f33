/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys, from the tenant's down to the chunk's. All of it happens on the client.
 *
 *   KEK (32 bytes, one per numbered epoch, in the credential file or from a command)
 *     wraps, in an envelope, the run's random DEK (32 bytes)
 *       from which HKDF-SHA256(DEK, salt of the segment, context) gives chunk key and key commitment
 *
 * Randomness is passed in. Formulas: RFC 5869 (HKDF), NIST SP 800-38D (GCM); the exact info strings are in
 * FORMAT.md.
 */
#ifndef LARDER_KEYS_H
#define LARDER_KEYS_H

#include <stdint.h>

#include "format/base/err.h"
#include "format/base/secret.h"
#include "format/segment.h"

#define KEY_BYTES      32
#define ENVELOPE_BYTES 256

struct kek {
    uint32_t epoch; /* >= 1 */
    struct secret *key;
};

/* KEKs of one tenant, any order, no epoch twice. Owns the secrets. */
struct keyring {
    struct kek *keks;
    size_t count;
};
void keyring_free(struct keyring *k);
const struct kek *keyring_newest(const struct keyring *k);               /* NULL if empty */
const struct kek *keyring_find(const struct keyring *k, uint32_t epoch); /* NULL if absent */

struct dek {
    struct id id;
    struct secret *key;
};
void dek_free(struct dek *d);

/* HKDF-SHA256, extract and expand. out_bytes <= 255 * 32. */
void hkdf_sha256(const void *key, size_t key_bytes, const void *salt, size_t salt_bytes, const void *info,
                 size_t info_bytes, void *out, size_t out_bytes);

/* An envelope holds the DEK sealed under a key derived from the KEK and a fresh random salt; tenant, run id,
 * DEK id and epoch are its associated data. */
must_check int envelope_wrap(const struct kek *kek, const char *tenant, const struct id *run_id,
                             const struct dek *dek, const uint8_t random_salt[SALT_BYTES],
                             uint8_t out[ENVELOPE_BYTES], struct err *e);
/* Epoch of an envelope without opening it; ERR_CORRUPT / ERR_VERSION. Verifies its checksum. The server uses
 * this. */
must_check int envelope_epoch(const void *p, size_t n, struct id *run_id, uint32_t *epoch, struct err *e);
/* Id of the DEK inside, in the clear, of an envelope that envelope_epoch accepted. All envelopes of a run
 * hold the same DEK: whoever stores them refuses one with another id, or two writers who race could each keep
 * a key. */
struct id envelope_dek_id(const uint8_t envelope[ENVELOPE_BYTES]);
/* ERR_KEY if the keyring has no such epoch, or its KEK is not the one; ERR_CORRUPT if the bytes are damaged.
 */
must_check int envelope_open(const struct keyring *ring, const char *tenant, const struct id *run_id,
                             const void *p, size_t n, struct dek *out, struct err *e);

#endif
