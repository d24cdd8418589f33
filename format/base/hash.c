/* SPDX-License-Identifier: Apache-2.0 */
#include "format/base/hash.h"

#include <errno.h>
#include <openssl/evp.h>
#include <stdbool.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY /* the size of its state */
#include <xxhash.h>

#include "format/base/err.h"

#if defined(__x86_64__)
/* The library's own choice of AVX2 or AVX-512, twice as fast as the plain names; not every build has it. */
__attribute__((weak)) XXH128_hash_t XXH3_128bits_dispatch(const void *p, size_t n);
__attribute__((weak)) XXH_errorcode XXH3_128bits_update_dispatch(XXH3_state_t *s, const void *p, size_t n);

static bool has_dispatch;

/* Its first call fills a table: here, before there are threads. */
__attribute__((constructor)) static void dispatch_start(void)
{
    has_dispatch = XXH3_128bits_dispatch && XXH3_128bits_update_dispatch;
    if (has_dispatch)
        (void)XXH3_128bits_dispatch("", 1);
}

static XXH128_hash_t xxh128(const void *p, size_t n)
{
    return has_dispatch ? XXH3_128bits_dispatch(p, n) : XXH3_128bits(p, n);
}

static XXH_errorcode xxh128_add(XXH3_state_t *s, const void *p, size_t n)
{
    return has_dispatch ? XXH3_128bits_update_dispatch(s, p, n) : XXH3_128bits_update(s, p, n);
}
#else
static XXH128_hash_t xxh128(const void *p, size_t n)
{
    return XXH3_128bits(p, n);
}

static XXH_errorcode xxh128_add(XXH3_state_t *s, const void *p, size_t n)
{
    return XXH3_128bits_update(s, p, n);
}
#endif

static struct hash128 canonical(XXH128_hash_t hash)
{
    XXH128_canonical_t c;
    XXH128_canonicalFromHash(&c, hash);
    struct hash128 h;
    memcpy(h.bytes, c.digest, sizeof h.bytes);
    return h;
}

struct hash128 hash128(const void *p, size_t n)
{
    return canonical(xxh128(p, n));
}

_Static_assert(sizeof(struct hash128_sum) == sizeof(XXH3_state_t), "it lies in there");

void hash128_begin(struct hash128_sum *s)
{
    XXH3_INITSTATE((XXH3_state_t *)s);
    check(XXH3_128bits_reset((XXH3_state_t *)s) == XXH_OK);
}

void hash128_add(struct hash128_sum *s, const void *p, size_t n)
{
    check(xxh128_add((XXH3_state_t *)s, p, n) == XXH_OK);
}

struct hash128 hash128_end(const struct hash128_sum *s)
{
    return canonical(XXH3_128bits_digest((const XXH3_state_t *)s));
}

uint64_t hash64(const void *p, size_t n)
{
    return XXH3_64bits(p, n);
}

void sha256(const void *p, size_t n, uint8_t out[SHA256_BYTES])
{
    check(EVP_Digest(p, n, out, NULL, EVP_sha256(), NULL) == 1);
}

/* An EVP_MD_CTX by another name: no OpenSSL type appears in a header. */
struct sha256 *sha256_start(void)
{
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    if (context && EVP_DigestInit_ex(context, EVP_sha256(), NULL) != 1) {
        EVP_MD_CTX_free(context);
        context = NULL;
    }
    return (struct sha256 *)context;
}

void sha256_update(struct sha256 *h, const void *p, size_t n)
{
    check(EVP_DigestUpdate((EVP_MD_CTX *)h, p, n) == 1);
}

void sha256_end(struct sha256 *h, uint8_t out[SHA256_BYTES])
{
    if (!h)
        return;
    if (out)
        check(EVP_DigestFinal_ex((EVP_MD_CTX *)h, out, NULL) == 1);
    EVP_MD_CTX_free((EVP_MD_CTX *)h);
}

void hex_encode(const void *p, size_t n, char *out)
{
    static const char digits[] = "0123456789abcdef";
    const uint8_t *b = p;
    for (size_t i = 0; i < n; i++) {
        out[2 * i] = digits[b[i] >> 4];
        out[2 * i + 1] = digits[b[i] & 15];
    }
    out[2 * n] = '\0';
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

int hex_read(const char *text, size_t n_out, void *out)
{
    uint8_t *b = out;
    for (size_t i = 0; i < n_out; i++) {
        int hi = hex_digit(text[2 * i]);
        int lo = hi < 0 ? -1 : hex_digit(text[2 * i + 1]);
        if (lo < 0)
            return -EINVAL;
        b[i] = (uint8_t)(hi << 4 | lo);
    }
    return 0;
}

int hex_decode(const char *text, size_t n_out, void *out)
{
    int rc = hex_read(text, n_out, out);
    return rc == 0 && text[2 * n_out] != '\0' ? -EINVAL : rc;
}
