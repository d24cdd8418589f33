/* SPDX-License-Identifier: Apache-2.0 */
/*
 * OpenSSL's calls below fail only where we pass it nonsense, or where its provider is broken; neither may end
 * in bytes that look sealed, so both stop the process. A tag that does not verify is the one answer that
 * input can bring about.
 */
#include "format/aead.h"

#include <errno.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

#include "format/aead_mb.h"
#include "format/base/secret.h"

#define PIECE_BYTES (32u << 10) /* stays in the nearest cache but one: a multiple of the cipher's block */

struct aead {
    struct aead_mb *mb; /* does it all; or NULL, and OpenSSL does */
    EVP_CIPHER_CTX *ctx;
    bool seals;
    bool keyed;
};

static const EVP_CIPHER *cipher_of(enum aead_suite suite)
{
    switch (suite) {
    case AEAD_AES_256_GCM: return EVP_aes_256_gcm();
    case AEAD_AES_128_GCM: return EVP_aes_128_gcm();
    case AEAD_CHACHA20_POLY1305: return EVP_chacha20_poly1305();
    }
    return NULL;
}

struct aead *aead_create(enum aead_suite suite, bool seals)
{
    struct aead *a = calloc(1, sizeof *a);
    if (!a)
        return NULL;
    a->seals = seals;
    if (suite == AEAD_AES_256_GCM && (a->mb = aead_mb_create(seals)))
        return a;
    a->ctx = EVP_CIPHER_CTX_new();
    if (a->ctx && EVP_CipherInit_ex(a->ctx, cipher_of(suite), NULL, NULL, NULL, seals) == 1)
        return a;
    ERR_clear_error();
    aead_free(a);
    return NULL;
}

void aead_free(struct aead *a)
{
    if (!a)
        return;
    aead_mb_free(a->mb);
    EVP_CIPHER_CTX_free(a->ctx);
    free(a);
}

void aead_key(struct aead *a, const uint8_t *key)
{
    a->keyed = true;
    if (a->mb)
        aead_mb_key(a->mb, key);
    else
        check(EVP_CipherInit_ex(a->ctx, NULL, NULL, key, NULL, a->seals) == 1);
}

/* ---- in pieces ---- */

void aead_begin(struct aead *a, const uint8_t nonce[AEAD_NONCE_BYTES], const void *ad, size_t ad_bytes)
{
    int done;
    check(a->keyed && ad_bytes <= AEAD_BYTES_MAX);
    if (a->mb) {
        aead_mb_begin(a->mb, nonce, ad, ad_bytes);
        return;
    }
    check(EVP_CipherInit_ex(a->ctx, NULL, NULL, NULL, nonce, a->seals) == 1);
    if (ad_bytes > 0)
        check(EVP_CipherUpdate(a->ctx, NULL, &done, ad, (int)ad_bytes) == 1);
}

void aead_add(struct aead *a, const void *in, size_t n, uint8_t *out)
{
    int done;
    check(n <= AEAD_BYTES_MAX);
    if (n == 0)
        return;
    if (a->mb)
        aead_mb_add(a->mb, in, n, out);
    else
        check(EVP_CipherUpdate(a->ctx, out, &done, in, (int)n) == 1 && done == (int)n);
}

void aead_tag(struct aead *a, uint8_t tag[AEAD_TAG_BYTES])
{
    uint8_t none[1];
    int done;
    check(a->seals);
    if (a->mb) {
        aead_mb_end(a->mb, tag);
        return;
    }
    check(EVP_CipherFinal_ex(a->ctx, none, &done) == 1 && done == 0);
    check(EVP_CIPHER_CTX_ctrl(a->ctx, EVP_CTRL_AEAD_GET_TAG, AEAD_TAG_BYTES, tag) == 1);
}

int aead_check(struct aead *a, const uint8_t tag[AEAD_TAG_BYTES])
{
    uint8_t copy[AEAD_TAG_BYTES], none[1];
    int done;
    check(!a->seals);
    if (a->mb) {
        aead_mb_end(a->mb, copy);
        return secret_memequal(copy, tag, sizeof copy) ? 0 : -EBADMSG;
    }
    memcpy(copy, tag, sizeof copy);
    check(EVP_CIPHER_CTX_ctrl(a->ctx, EVP_CTRL_AEAD_SET_TAG, sizeof copy, copy) == 1);
    if (EVP_CipherFinal_ex(a->ctx, none, &done) == 1)
        return 0;
    ERR_clear_error();
    return -EBADMSG;
}

/* ---- as a whole ---- */

/* n bytes through the cipher; with a sum in pieces, each of which is hashed where it is sealed. */
static void run(struct aead *a, const uint8_t *in, size_t n, uint8_t *out, struct hash128_sum *sum)
{
    size_t piece = sum ? PIECE_BYTES : n;
    for (size_t at = 0; at < n; at += piece) {
        size_t take = n - at < piece ? n - at : piece;
        if (sum && !a->seals)
            hash128_add(sum, in + at, take);
        aead_add(a, in + at, take, out + at);
        if (sum && a->seals)
            hash128_add(sum, out + at, take);
    }
}

void aead_seal(struct aead *a, const uint8_t nonce[AEAD_NONCE_BYTES], const void *ad, size_t ad_bytes,
               const void *plain, size_t n, uint8_t *out, struct hash128 *sum)
{
    struct hash128_sum s;
    check(n <= AEAD_BYTES_MAX);
    if (sum)
        hash128_begin(&s);
    aead_begin(a, nonce, ad, ad_bytes);
    run(a, plain, n, out, sum ? &s : NULL);
    aead_tag(a, out + n);
    if (sum) {
        hash128_add(&s, out + n, AEAD_TAG_BYTES);
        *sum = hash128_end(&s);
    }
}

int aead_open(struct aead *a, const uint8_t nonce[AEAD_NONCE_BYTES], const void *ad, size_t ad_bytes,
              const void *sealed, size_t n, uint8_t *out, struct hash128 *sum)
{
    struct hash128_sum s;
    uint8_t tag[AEAD_TAG_BYTES];
    check(n >= sizeof tag && n <= AEAD_BYTES_MAX);
    n -= sizeof tag;
    memcpy(tag, (const uint8_t *)sealed + n, sizeof tag);
    if (sum)
        hash128_begin(&s);
    aead_begin(a, nonce, ad, ad_bytes);
    run(a, sealed, n, out, sum ? &s : NULL);
    if (sum) {
        hash128_add(&s, tag, sizeof tag);
        *sum = hash128_end(&s);
    }
    int rc = aead_check(a, tag);
    if (rc < 0)
        secret_wipe(out, n);
    return rc;
}
