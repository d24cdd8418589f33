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

#include "format/base/secret.h"

struct aead {
    EVP_CIPHER_CTX *ctx;
    bool seals;
    bool keyed;
};

struct aead *aead_create(bool seals)
{
    struct aead *a = calloc(1, sizeof *a);
    if (!a)
        return NULL;
    a->seals = seals;
    a->ctx = EVP_CIPHER_CTX_new();
    if (a->ctx && EVP_CipherInit_ex(a->ctx, EVP_aes_256_gcm(), NULL, NULL, NULL, seals) == 1)
        return a;
    ERR_clear_error();
    aead_free(a);
    return NULL;
}

void aead_free(struct aead *a)
{
    if (!a)
        return;
    EVP_CIPHER_CTX_free(a->ctx);
    free(a);
}

void aead_key(struct aead *a, const uint8_t key[AEAD_KEY_BYTES])
{
    check(EVP_CipherInit_ex(a->ctx, NULL, NULL, key, NULL, a->seals) == 1);
    a->keyed = true;
}

/* Nonce, associated data, then n bytes through the cipher. */
static void run(struct aead *a, const uint8_t *nonce, const void *ad, size_t ad_bytes, const void *in,
                size_t n, uint8_t *out)
{
    int done;
    check(a->keyed && ad_bytes <= AEAD_BYTES_MAX && n <= AEAD_BYTES_MAX);
    check(EVP_CipherInit_ex(a->ctx, NULL, NULL, NULL, nonce, a->seals) == 1);
    if (ad_bytes > 0)
        check(EVP_CipherUpdate(a->ctx, NULL, &done, ad, (int)ad_bytes) == 1);
    if (n > 0)
        check(EVP_CipherUpdate(a->ctx, out, &done, in, (int)n) == 1 && done == (int)n);
}

void aead_seal(struct aead *a, const uint8_t nonce[AEAD_NONCE_BYTES], const void *ad, size_t ad_bytes,
               const void *plain, size_t n, uint8_t *out)
{
    int done;
    check(a->seals);
    run(a, nonce, ad, ad_bytes, plain, n, out);
    check(EVP_CipherFinal_ex(a->ctx, out + n, &done) == 1 && done == 0);
    check(EVP_CIPHER_CTX_ctrl(a->ctx, EVP_CTRL_AEAD_GET_TAG, AEAD_TAG_BYTES, out + n) == 1);
}

int aead_open(struct aead *a, const uint8_t nonce[AEAD_NONCE_BYTES], const void *ad, size_t ad_bytes,
              const void *sealed, size_t n, uint8_t *out)
{
    int done;
    uint8_t tag[AEAD_TAG_BYTES], none[1];
    check(!a->seals && n >= sizeof tag);
    n -= sizeof tag;
    __builtin_memcpy(tag, (const uint8_t *)sealed + n, sizeof tag);
    run(a, nonce, ad, ad_bytes, sealed, n, out);
    check(EVP_CIPHER_CTX_ctrl(a->ctx, EVP_CTRL_AEAD_SET_TAG, sizeof tag, tag) == 1);
    if (EVP_CipherFinal_ex(a->ctx, none, &done) == 1)
        return 0;
    ERR_clear_error();
    secret_wipe(out, n);
    return -EBADMSG;
}
