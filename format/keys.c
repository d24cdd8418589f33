/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Offsets of the envelope stand here and in FORMAT.md. Its sealing key is fresh for every envelope, since it
 * comes from a fresh salt; therefore the nonce can be zero.
 */
#include "format/keys.h"

#include <assert.h>
#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/aead.h"
#include "format/base/cursor.h"
#include "format/base/hash.h"
#include "format/commit.h"
#include "format/version.h"

enum {
    V_CHECKSUM = 0, /* XXH3-64 of all bytes behind it */
    V_MAGIC = 8,
    V_VERSION = 16,
    V_SUITE = 20,
    V_EPOCH = 24,
    V_RESERVED = 28,
    V_RUN = 32,
    V_DEK = 48,
    V_TENANT = 64,
    V_SALT = 128,
    V_COMMITMENT = 160,
    V_SEALED = 192,
    V_RESERVED2 = 240,
    V_END = 256,
};
static_assert(V_RUN == V_RESERVED + 4 && V_DEK == V_RUN + ID_BYTES && V_TENANT == V_DEK + ID_BYTES &&
                  V_SALT == V_TENANT + TENANT_NAME_BYTES_MAX + 1 && V_COMMITMENT == V_SALT + SALT_BYTES &&
                  V_SEALED == V_COMMITMENT + COMMITMENT_BYTES &&
                  V_RESERVED2 == V_SEALED + KEY_BYTES + AEAD_TAG_BYTES && V_END == ENVELOPE_BYTES,
              "envelope without padding");

/* Associated data: everything before the sealed DEK but the checksum. */
#define AD_FROM  V_MAGIC
#define AD_BYTES (V_SEALED - V_MAGIC)

static const char magic[8] = {'L', 'A', 'R', 'D', 'E', 'N', 'V', 'L'};
static const char label[] = "larder/1 envelope";

void keyring_free(struct keyring *k)
{
    for (size_t i = 0; i < k->count; i++)
        secret_free(k->keks[i].key);
    free(k->keks);
    *k = (struct keyring){0};
}

const struct kek *keyring_newest(const struct keyring *k)
{
    const struct kek *newest = NULL;
    for (size_t i = 0; i < k->count; i++)
        if (!newest || k->keks[i].epoch > newest->epoch)
            newest = &k->keks[i];
    return newest;
}

const struct kek *keyring_find(const struct keyring *k, uint32_t epoch)
{
    for (size_t i = 0; i < k->count; i++)
        if (k->keks[i].epoch == epoch)
            return &k->keks[i];
    return NULL;
}

void dek_free(struct dek *d)
{
    secret_free(d->key);
    *d = (struct dek){0};
}

void hkdf_sha256(const void *key, size_t key_bytes, const void *salt, size_t salt_bytes, const void *info,
                 size_t info_bytes, void *out, size_t out_bytes)
{
    static char digest[] = "SHA256";
    static const uint8_t no_salt[32];
    uint8_t prk[32];
    size_t prk_bytes = 0;
    int mode = EVP_KDF_HKDF_MODE_EXPAND_ONLY;
    check(out_bytes > 0 && out_bytes <= 255 * 32);
    /* Extracting by hand: OpenSSL's HKDF would copy the key into memory of its own before it looks for the
     * digest. Both fail only without memory or without a provider: no key is better than a guess at one. */
    check(EVP_Q_mac(NULL, "HMAC", NULL, digest, NULL, salt_bytes > 0 ? salt : no_salt,
                    salt_bytes > 0 ? salt_bytes : sizeof no_salt, key, key_bytes, prk, sizeof prk,
                    &prk_bytes) &&
          prk_bytes == sizeof prk);
    /* OpenSSL's parameters take pointers to what it only reads as if it wrote; an empty one is left out. */
    OSSL_PARAM params[5], *p = params;
    *p++ = OSSL_PARAM_construct_int(OSSL_KDF_PARAM_MODE, &mode);
    *p++ = OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest, 0);
    *p++ = OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, prk, sizeof prk);
    if (info_bytes > 0)
        *p++ = OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, (void *)(uintptr_t)info, info_bytes);
    *p = OSSL_PARAM_construct_end();
    EVP_KDF *kdf = EVP_KDF_fetch(NULL, "HKDF", NULL);
    EVP_KDF_CTX *ctx = kdf ? EVP_KDF_CTX_new(kdf) : NULL;
    check(ctx && EVP_KDF_derive(ctx, out, out_bytes, params) == 1);
    EVP_KDF_CTX_free(ctx);
    EVP_KDF_free(kdf);
    secret_wipe(prk, sizeof prk);
}

/* ---- envelopes ---- */

static void tenant_put(const char *tenant, uint8_t out[TENANT_NAME_BYTES_MAX + 1])
{
    size_t n = strnlen(tenant, TENANT_NAME_BYTES_MAX);
    memset(out, 0, TENANT_NAME_BYTES_MAX + 1);
    memcpy(out, tenant, n);
}

/* Key that seals the DEK, and commitment to the KEK. Only what is known before opening goes into the context,
 * so that a commitment which differs means the wrong KEK and a tag which differs means damage. */
static void derive(const struct kek *kek, const uint8_t *envelope, uint8_t key[KEY_BYTES],
                   uint8_t commitment[COMMITMENT_BYTES])
{
    uint8_t info[2 + sizeof label - 1 + 4 + 4 + 4 + ID_BYTES + TENANT_NAME_BYTES_MAX + 1];
    uint8_t okm[KEY_BYTES + COMMITMENT_BYTES], *p = info;
    le16_put(p, sizeof label - 1);
    memcpy(p + 2, label, sizeof label - 1);
    p += 2 + sizeof label - 1;
    memcpy(p, envelope + V_VERSION, 12); /* version, suite, epoch */
    memcpy(p + 12, envelope + V_RUN, ID_BYTES);
    memcpy(p + 12 + ID_BYTES, envelope + V_TENANT, TENANT_NAME_BYTES_MAX + 1);
    hkdf_sha256(secret_bytes(kek->key), secret_size(kek->key), envelope + V_SALT, SALT_BYTES, info,
                sizeof info, okm, sizeof okm);
    memcpy(key, okm, KEY_BYTES);
    memcpy(commitment, okm + KEY_BYTES, COMMITMENT_BYTES);
    secret_wipe(okm, sizeof okm);
}

int envelope_wrap(const struct kek *kek, const char *tenant, const struct id *run_id, const struct dek *dek,
                  const uint8_t random_salt[SALT_BYTES], uint8_t out[ENVELOPE_BYTES], struct err *e)
{
    static const uint8_t nonce[AEAD_NONCE_BYTES];
    uint8_t key[KEY_BYTES];
    check(kek->epoch > 0 && secret_size(kek->key) == KEY_BYTES && secret_size(dek->key) == KEY_BYTES);
    int rc = tenant_name_check(tenant, e);
    if (rc < 0)
        return rc;
    struct aead *a = aead_create(AEAD_AES_256_GCM, true);
    if (!a)
        return err_set(e, ERR_NO_MEMORY, "no memory for sealing a key");
    memset(out, 0, ENVELOPE_BYTES);
    memcpy(out + V_MAGIC, magic, sizeof magic);
    le32_put(out + V_VERSION, ENVELOPE_VERSION);
    le32_put(out + V_SUITE, SUITE_AES256GCM_HKDF_SHA256);
    le32_put(out + V_EPOCH, kek->epoch);
    memcpy(out + V_RUN, run_id, ID_BYTES);
    memcpy(out + V_DEK, &dek->id, ID_BYTES);
    tenant_put(tenant, out + V_TENANT);
    memcpy(out + V_SALT, random_salt, SALT_BYTES);
    derive(kek, out, key, out + V_COMMITMENT);
    aead_key(a, key);
    aead_seal(a, nonce, out + AD_FROM, AD_BYTES, secret_bytes(dek->key), KEY_BYTES, out + V_SEALED, NULL);
    le64_put(out + V_CHECKSUM, hash64(out + V_MAGIC, ENVELOPE_BYTES - V_MAGIC));
    secret_wipe(key, sizeof key);
    aead_free(a);
    return 0;
}

static bool all_zero(const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] != 0)
            return false;
    return true;
}

/* All that can be said without a key. */
static int envelope_check(const uint8_t *p, size_t n, struct err *e)
{
    if (n != ENVELOPE_BYTES)
        return err_set(e, ERR_CORRUPT, "key envelope: expected %d bytes, found %zu", ENVELOPE_BYTES, n);
    if (memcmp(p + V_MAGIC, magic, sizeof magic) != 0)
        return err_set(e, ERR_CORRUPT,
                       "key envelope: magic at offset %d is not \"%.8s\"; this is no envelope, or damaged",
                       V_MAGIC, magic);
    uint32_t version = le32_get(p + V_VERSION), suite = le32_get(p + V_SUITE);
    if (version != ENVELOPE_VERSION)
        return err_set(e, ERR_VERSION,
                       "key envelope: version %u at offset %d, this build knows %u only; use a newer larder",
                       version, V_VERSION, ENVELOPE_VERSION);
    uint64_t expected = hash64(p + V_MAGIC, ENVELOPE_BYTES - V_MAGIC), found = le64_get(p + V_CHECKSUM);
    if (expected != found)
        return err_set(
            e, ERR_CORRUPT,
            "key envelope: checksum at offset %d is %016llx, its bytes give %016llx; it is damaged",
            V_CHECKSUM, (unsigned long long)found, (unsigned long long)expected);
    if (suite != SUITE_AES256GCM_HKDF_SHA256)
        return err_set(e, ERR_VERSION, "key envelope: suite %u at offset %d, this build knows %u only", suite,
                       V_SUITE, SUITE_AES256GCM_HKDF_SHA256);
    size_t tenant = strnlen((const char *)p + V_TENANT, TENANT_NAME_BYTES_MAX + 1);
    if (tenant > TENANT_NAME_BYTES_MAX || !all_zero(p + V_TENANT + tenant, V_SALT - V_TENANT - tenant) ||
        tenant_name_check((const char *)p + V_TENANT, NULL) < 0)
        return err_set(e, ERR_CORRUPT, "key envelope: the tenant's name at offset %d is none", V_TENANT);
    if (le32_get(p + V_EPOCH) == 0)
        return err_set(e, ERR_CORRUPT, "key envelope: epoch 0 at offset %d; epochs begin with 1", V_EPOCH);
    if (!all_zero(p + V_RESERVED, 4) || !all_zero(p + V_RESERVED2, V_END - V_RESERVED2))
        return err_set(e, ERR_CORRUPT, "key envelope: reserved bytes at offset %d or %d are not zero",
                       V_RESERVED, V_RESERVED2);
    return 0;
}

int envelope_epoch(const void *p, size_t n, struct id *run_id, uint32_t *epoch, struct err *e)
{
    int rc = envelope_check(p, n, e);
    if (rc < 0)
        return rc;
    memcpy(run_id, (const uint8_t *)p + V_RUN, ID_BYTES);
    *epoch = le32_get((const uint8_t *)p + V_EPOCH);
    return 0;
}

struct id envelope_dek_id(const uint8_t envelope[ENVELOPE_BYTES])
{
    struct id id;
    memcpy(&id, envelope + V_DEK, ID_BYTES);
    return id;
}

static int missing_epoch(const struct keyring *ring, uint32_t epoch, struct err *e)
{
    char have[128] = "";
    size_t used = 0;
    for (size_t i = 0; i < ring->count && used < sizeof have - 16; i++)
        used += (size_t)snprintf(have + used, sizeof have - used, "%s%u", i ? ", " : "", ring->keks[i].epoch);
    return err_set(e, ERR_KEY,
                   "wrong key: the run's key is wrapped under KEK epoch %u, the credentials hold %s%s; get "
                   "credentials that have it",
                   epoch, ring->count ? "only epoch " : "no KEK", have);
}

/* The envelope is well-formed and addressed to us; is it sealed with this KEK? */
static int unseal(const struct kek *kek, const uint8_t *p, struct dek *out, struct err *e)
{
    static const uint8_t nonce[AEAD_NONCE_BYTES];
    uint8_t key[KEY_BYTES], commitment[COMMITMENT_BYTES];
    struct secret *dek = NULL;
    int rc;
    struct aead *a = aead_create(AEAD_AES_256_GCM, false);
    if (!a)
        return err_set(e, ERR_NO_MEMORY, "no memory for opening a key");
    derive(kek, p, key, commitment);
    if (!secret_memequal(commitment, p + V_COMMITMENT, sizeof commitment)) {
        rc = err_set(
            e, ERR_KEY,
            "wrong key: KEK epoch %u of the credentials is not the one that wrapped the run's key; use "
            "the credentials of the tenant that saved it",
            kek->epoch);
        goto out;
    }
    if (!(dek = secret_room(KEY_BYTES))) {
        rc = err_set(e, ERR_NO_MEMORY, "no memory for a key");
        goto out;
    }
    aead_key(a, key);
    if (aead_open(a, nonce, p + AD_FROM, AD_BYTES, p + V_SEALED, KEY_BYTES + AEAD_TAG_BYTES, secret_fill(dek),
                  NULL) < 0) {
        rc =
            err_set(e, ERR_CORRUPT,
                    "key envelope: the KEK is right, but the sealed key at offset %d does not verify; it was "
                    "damaged or altered",
                    V_SEALED);
        goto out;
    }
    memcpy(&out->id, p + V_DEK, ID_BYTES);
    out->key = dek;
    dek = NULL;
    rc = 0;
out:
    secret_wipe(key, sizeof key);
    secret_free(dek);
    aead_free(a);
    return rc;
}

int envelope_open(const struct keyring *ring, const char *tenant, const struct id *run_id, const void *p,
                  size_t n, struct dek *out, struct err *e)
{
    const uint8_t *b = p;
    *out = (struct dek){0};
    int rc = envelope_check(p, n, e);
    if (rc < 0)
        return rc;
    if (memcmp(b + V_RUN, run_id, ID_BYTES) != 0)
        return err_set(e, ERR_CORRUPT, "key envelope: it belongs to another run (offset %d)", V_RUN);
    if (strcmp((const char *)b + V_TENANT, tenant) != 0)
        return err_set(e, ERR_CORRUPT, "key envelope: expected tenant '%s', found '%s' (offset %d)", tenant,
                       (const char *)b + V_TENANT, V_TENANT);
    uint32_t epoch = le32_get(b + V_EPOCH);
    const struct kek *kek = keyring_find(ring, epoch);
    return kek ? unseal(kek, b, out, e) : missing_epoch(ring, epoch, e);
}
