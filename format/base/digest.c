/* SPDX-License-Identifier: Apache-2.0 */
#include "format/base/digest.h"

#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "format/base/hash.h"

enum kind { KIND_OPENSSL, KIND_XXH32, KIND_XXH64, KIND_XXH3_64, KIND_XXH3_128 };

static const struct algorithm {
    const char *name, *openssl;
    enum kind kind;
} algorithms[] = {
    {"md5", "MD5", KIND_OPENSSL},
    {"sha1", "SHA1", KIND_OPENSSL},
    {"sha224", "SHA2-224", KIND_OPENSSL},
    {"sha256", "SHA2-256", KIND_OPENSSL},
    {"sha384", "SHA2-384", KIND_OPENSSL},
    {"sha512", "SHA2-512", KIND_OPENSSL},
    {"sha3_224", "SHA3-224", KIND_OPENSSL},
    {"sha3_256", "SHA3-256", KIND_OPENSSL},
    {"sha3_384", "SHA3-384", KIND_OPENSSL},
    {"sha3_512", "SHA3-512", KIND_OPENSSL},
    {"blake2b", "BLAKE2B-512", KIND_OPENSSL},
    {"blake2s", "BLAKE2S-256", KIND_OPENSSL},
    {"xxh32", NULL, KIND_XXH32},
    {"xxh64", NULL, KIND_XXH64},
    {"xxh3_64", NULL, KIND_XXH3_64},
    {"xxh128", NULL, KIND_XXH3_128},
    {"xxh3_128", NULL, KIND_XXH3_128},
};

struct digest {
    enum kind kind;
    EVP_MD_CTX *openssl;
    XXH32_state_t *xxh32;
    XXH64_state_t *xxh64;
    XXH3_state_t *xxh3;
};

static const struct algorithm *find(const char *name)
{
    for (size_t i = 0; i < sizeof algorithms / sizeof *algorithms; i++)
        if (strcmp(algorithms[i].name, name) == 0)
            return &algorithms[i];
    return NULL;
}

/* A site's policy may take some away. */
static EVP_MD *fetch(const struct algorithm *a)
{
    return EVP_MD_fetch(NULL, a->openssl, NULL);
}

bool digest_known(const char *algorithm)
{
    const struct algorithm *a = find(algorithm);
    if (!a || a->kind != KIND_OPENSSL)
        return a != NULL;
    EVP_MD *md = fetch(a);
    EVP_MD_free(md);
    return md != NULL;
}

static bool begin(struct digest *d, const struct algorithm *a)
{
    EVP_MD *md = NULL;
    bool good = false;
    switch (a->kind) {
    case KIND_OPENSSL:
        md = fetch(a);
        d->openssl = EVP_MD_CTX_new();
        good = md && d->openssl && EVP_DigestInit_ex(d->openssl, md, NULL) == 1;
        EVP_MD_free(md);
        return good;
    case KIND_XXH32: d->xxh32 = XXH32_createState(); return d->xxh32 && XXH32_reset(d->xxh32, 0) == XXH_OK;
    case KIND_XXH64: d->xxh64 = XXH64_createState(); return d->xxh64 && XXH64_reset(d->xxh64, 0) == XXH_OK;
    case KIND_XXH3_64: d->xxh3 = XXH3_createState(); return d->xxh3 && XXH3_64bits_reset(d->xxh3) == XXH_OK;
    default: d->xxh3 = XXH3_createState(); return d->xxh3 && XXH3_128bits_reset(d->xxh3) == XXH_OK;
    }
}

int digest_start(const char *algorithm, struct digest **out, struct err *e)
{
    char q[64];
    const struct algorithm *a = find(algorithm);
    if (!a || !digest_known(algorithm))
        return err_set(e, ERR_UNSUPPORTED, "the checksum %s cannot be computed here",
                       err_quote(q, sizeof q, algorithm, strlen(algorithm)));
    struct digest *d = calloc(1, sizeof *d);
    if (!d || !begin(d, a)) {
        digest_free(d);
        return err_set(e, ERR_NO_MEMORY, "no memory for a checksum");
    }
    d->kind = a->kind;
    *out = d;
    return 0;
}

void digest_update(struct digest *d, const void *p, size_t n)
{
    if (n == 0)
        return;
    switch (d->kind) {
    case KIND_OPENSSL: check(EVP_DigestUpdate(d->openssl, p, n) == 1); break;
    case KIND_XXH32: check(XXH32_update(d->xxh32, p, n) == XXH_OK); break;
    case KIND_XXH64: check(XXH64_update(d->xxh64, p, n) == XXH_OK); break;
    case KIND_XXH3_64: check(XXH3_64bits_update(d->xxh3, p, n) == XXH_OK); break;
    case KIND_XXH3_128: check(XXH3_128bits_update(d->xxh3, p, n) == XXH_OK); break;
    }
}

void digest_end(struct digest *d, char hex[DIGEST_HEX_BYTES])
{
    uint8_t raw[EVP_MAX_MD_SIZE];
    unsigned n = 0;
    switch (d->kind) {
    case KIND_OPENSSL: check(EVP_DigestFinal_ex(d->openssl, raw, &n) == 1); break;
    case KIND_XXH32:
        XXH32_canonicalFromHash((XXH32_canonical_t *)raw, XXH32_digest(d->xxh32));
        n = 4;
        break;
    case KIND_XXH64:
        XXH64_canonicalFromHash((XXH64_canonical_t *)raw, XXH64_digest(d->xxh64));
        n = 8;
        break;
    case KIND_XXH3_64:
        XXH64_canonicalFromHash((XXH64_canonical_t *)raw, XXH3_64bits_digest(d->xxh3));
        n = 8;
        break;
    case KIND_XXH3_128:
        XXH128_canonicalFromHash((XXH128_canonical_t *)raw, XXH3_128bits_digest(d->xxh3));
        n = 16;
        break;
    }
    check(2 * n < DIGEST_HEX_BYTES);
    hex_encode(raw, n, hex);
}

void digest_free(struct digest *d)
{
    if (!d)
        return;
    EVP_MD_CTX_free(d->openssl);
    XXH32_freeState(d->xxh32);
    XXH64_freeState(d->xxh64);
    XXH3_freeState(d->xxh3);
    free(d);
}
