/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checksums and digests. XXH3 finds accidents; SHA-256 binds a commit record to the parts that it names.
 * Neither proves who wrote the bytes: that is what sealing is for. Canonical (big-endian) XXH3 bytes are
 * stored, as the library defines them, so that every machine writes the same.
 */
#ifndef LARDER_BASE_HASH_H
#define LARDER_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

#define HASH128_BYTES 16
#define SHA256_BYTES  32

struct hash128 {
    uint8_t bytes[HASH128_BYTES];
};

struct hash128 hash128(const void *p, size_t n);
/* The same in pieces, for bytes that are read or written for another reason too: while a piece is in the
 * cache, adding it costs a fraction of reading it again. */
struct hash128_sum {
    _Alignas(64) uint8_t state[576];
};
void hash128_begin(struct hash128_sum *s);
void hash128_add(struct hash128_sum *s, const void *p, size_t n);
struct hash128 hash128_end(const struct hash128_sum *s);
uint64_t hash64(const void *p, size_t n); /* XXH3-64, for headers and small objects */
void sha256(const void *p, size_t n, uint8_t out[SHA256_BYTES]);
/* The same in pieces. sha256_end gives the digest and frees the state; out may be NULL. */
struct sha256;
struct sha256 *sha256_start(void) __attribute__((warn_unused_result)); /* NULL: no memory */
void sha256_update(struct sha256 *h, const void *p, size_t n);
void sha256_end(struct sha256 *h, uint8_t out[SHA256_BYTES]);
void hex_encode(const void *p, size_t n, char *out);       /* out: 2n+1 bytes, lower case */
int hex_read(const char *digits, size_t n_out, void *out); /* the first 2*n_out characters; 0 or -EINVAL */
int hex_decode(const char *text, size_t n_out, void *out); /* exactly 2*n_out digits; 0 or -EINVAL */

#endif
