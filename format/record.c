/* SPDX-License-Identifier: Apache-2.0 */
#include "format/record.h"

#include <errno.h>
#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <stdlib.h>
#include <string.h>

#include "format/aead.h"
#include "format/base/secret.h"

#define TAG_BYTES  AEAD_TAG_BYTES
#define BODY_MIN   (1u + TAG_BYTES) /* content type and tag */
#define BODY_MAX   (RECORD_BYTES_MAX - RECORD_HEADER_BYTES)
#define INFO_BYTES (2 + 1 + 6 + 11 + 1) /* HkdfLabel; the longest label is "traffic upd" */

struct suite {
    uint16_t number;
    enum aead_suite aead;
    uint8_t key_bytes, secret_bytes;
    const char *digest;
};
static const struct suite suites[] = {{0x1301, AEAD_AES_128_GCM, 16, 32, "SHA256"},
                                      {0x1302, AEAD_AES_256_GCM, 32, 48, "SHA384"},
                                      {0x1303, AEAD_CHACHA20_POLY1305, 32, 32, "SHA256"}};

struct record_key {
    const struct suite *suite;
    struct aead *aead;
    bool seals;
    uint64_t number; /* of the next record under this key */
    uint8_t iv[AEAD_NONCE_BYTES];
};

static const struct suite *suite_of(uint16_t number)
{
    for (size_t i = 0; i < sizeof suites / sizeof *suites; i++)
        if (suites[i].number == number)
            return &suites[i];
    return NULL;
}

size_t record_secret_bytes(uint16_t suite)
{
    const struct suite *s = suite_of(suite);
    return s ? s->secret_bytes : 0;
}

/* ---- keys ---- */

/* HKDF-Expand-Label with an empty context (7.1). */
static int expand(const struct suite *s, const uint8_t *secret, const char *label, uint8_t *out, size_t n)
{
    uint8_t info[INFO_BYTES];
    size_t label_bytes = strlen(label), at = 0;
    int mode = EVP_KDF_HKDF_MODE_EXPAND_ONLY, rc = -ENOMEM;
    info[at++] = 0;
    info[at++] = (uint8_t)n;
    info[at++] = (uint8_t)(6 + label_bytes);
    memcpy(info + at, "tls13 ", 6);
    memcpy(info + at + 6, label, label_bytes);
    at += 6 + label_bytes;
    info[at++] = 0;
    OSSL_PARAM params[] = {
        OSSL_PARAM_construct_int(OSSL_KDF_PARAM_MODE, &mode),
        OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, (char *)(uintptr_t)s->digest, 0),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, (void *)(uintptr_t)secret, s->secret_bytes),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, info, at), OSSL_PARAM_construct_end()};
    EVP_KDF *kdf = EVP_KDF_fetch(NULL, "HKDF", NULL);
    EVP_KDF_CTX *ctx = kdf ? EVP_KDF_CTX_new(kdf) : NULL;
    if (ctx && EVP_KDF_derive(ctx, out, n, params) == 1)
        rc = 0;
    EVP_KDF_CTX_free(ctx);
    EVP_KDF_free(kdf);
    return rc;
}

int record_secret_next(uint16_t suite, const uint8_t *secret, uint8_t *out)
{
    const struct suite *s = suite_of(suite);
    check(s);
    return expand(s, secret, "traffic upd", out, s->secret_bytes);
}

int record_key_set(struct record_key *k, const uint8_t *secret)
{
    uint8_t key[AEAD_KEY_BYTES], iv[AEAD_NONCE_BYTES];
    int rc = expand(k->suite, secret, "key", key, k->suite->key_bytes);
    if (rc == 0)
        rc = expand(k->suite, secret, "iv", iv, sizeof iv);
    if (rc == 0) {
        aead_key(k->aead, key);
        memcpy(k->iv, iv, sizeof iv);
        k->number = 0;
    }
    secret_wipe(key, sizeof key);
    secret_wipe(iv, sizeof iv);
    return rc;
}

int record_key_create(bool seals, uint16_t suite, const uint8_t *secret, struct record_key **out)
{
    const struct suite *s = suite_of(suite);
    *out = NULL;
    if (!s)
        return -ENOTSUP;
    struct record_key *k = calloc(1, sizeof *k);
    if (!k)
        return -ENOMEM;
    *k = (struct record_key){.suite = s, .seals = seals, .aead = aead_create(s->aead, seals)};
    if (!k->aead || record_key_set(k, secret) < 0) {
        record_key_free(k);
        return -ENOMEM;
    }
    *out = k;
    return 0;
}

void record_key_free(struct record_key *k)
{
    if (!k)
        return;
    aead_free(k->aead);
    secret_wipe(k, sizeof *k);
    free(k);
}

bool record_key_worn(const struct record_key *k)
{
    return k->number >= RECORD_KEY_MAX;
}

/* The nonce of the next record (5.3). */
static void next_nonce(struct record_key *k, uint8_t nonce[AEAD_NONCE_BYTES])
{
    memcpy(nonce, k->iv, AEAD_NONCE_BYTES);
    for (unsigned i = 0; i < 8; i++)
        nonce[AEAD_NONCE_BYTES - 1 - i] ^= (uint8_t)(k->number >> 8 * i);
    k->number++;
}

/* ---- records ---- */

size_t record_seal(struct record_key *k, enum record_type type, const struct slice *parts, size_t count,
                   uint8_t *out)
{
    uint8_t nonce[AEAD_NONCE_BYTES], last = (uint8_t)type, *to = out + RECORD_HEADER_BYTES;
    size_t n = 0;
    for (size_t i = 0; i < count; i++)
        n += parts[i].n;
    check(k->seals && n <= RECORD_CONTENT_MAX && k->number < RECORD_KEY_MAX + 1);
    size_t body = n + BODY_MIN;
    memcpy(out, (uint8_t[]){RECORD_DATA, 3, 3, (uint8_t)(body >> 8), (uint8_t)body}, RECORD_HEADER_BYTES);
    next_nonce(k, nonce);
    aead_begin(k->aead, nonce, out, RECORD_HEADER_BYTES);
    for (size_t i = 0; i < count; i++) {
        aead_add(k->aead, parts[i].p, parts[i].n, to);
        to += parts[i].n;
    }
    aead_add(k->aead, &last, 1, to);
    aead_tag(k->aead, to + 1);
    return RECORD_HEADER_BYTES + body;
}

int record_bytes(const uint8_t header[RECORD_HEADER_BYTES], size_t *n)
{
    size_t body = (size_t)header[3] << 8 | header[4];
    if (header[0] != RECORD_DATA) /* after the handshake nothing else is sent, and nothing in the clear */
        return ALERT_UNEXPECTED_MESSAGE;
    if (body > BODY_MAX)
        return ALERT_RECORD_OVERFLOW;
    if (body < BODY_MIN)
        return ALERT_DECODE_ERROR;
    *n = RECORD_HEADER_BYTES + body;
    return 0;
}

/* Type and length of what was opened: n bytes, and the last one behind them. */
static int strip(const uint8_t *plain, size_t n, uint8_t last, enum record_type *type, size_t *bytes)
{
    while (last == 0 && n > 0) /* padding */
        last = plain[--n];
    if (last != RECORD_ALERT && last != RECORD_HANDSHAKE && last != RECORD_DATA)
        return ALERT_UNEXPECTED_MESSAGE;
    if (n > RECORD_CONTENT_MAX)
        return ALERT_RECORD_OVERFLOW;
    if (n == 0 && last != RECORD_DATA) /* 5.1, 5.4 */
        return ALERT_UNEXPECTED_MESSAGE;
    *type = (enum record_type)last;
    *bytes = n;
    return 0;
}

int record_open(struct record_key *k, const uint8_t *record, size_t n, uint8_t *out, enum record_type *type,
                size_t *bytes)
{
    uint8_t nonce[AEAD_NONCE_BYTES], last;
    check(!k->seals && n >= RECORD_OVERHEAD && n <= RECORD_BYTES_MAX);
    if (k->number == UINT64_MAX)
        return ALERT_INTERNAL_ERROR;
    const uint8_t *sealed = record + RECORD_HEADER_BYTES;
    size_t room = n - RECORD_OVERHEAD;
    next_nonce(k, nonce);
    aead_begin(k->aead, nonce, record, RECORD_HEADER_BYTES);
    aead_add(k->aead, sealed, room, out);
    aead_add(k->aead, sealed + room, 1, &last);
    int alert = aead_check(k->aead, sealed + room + 1) == 0 ? strip(out, room, last, type, bytes)
                                                            : ALERT_BAD_RECORD_MAC;
    if (alert)
        secret_wipe(out, room);
    return alert;
}
