/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checksums that other formats carry, by the names that they have there: md5, sha1, sha224 to sha512,
 * sha3_224 to sha3_512, blake2b, blake2s, xxh32, xxh64, xxh3_64, xxh128 (also xxh3_128). In hexadecimal,
 * lower case; those of xxHash with the high byte first.
 */
#ifndef LARDER_BASE_DIGEST_H
#define LARDER_BASE_DIGEST_H

#include <stdbool.h>
#include <stddef.h>

#include "format/base/err.h"

#define DIGEST_HEX_BYTES 129 /* the longest, and its NUL */

struct digest;

bool digest_known(const char *algorithm); /* and offered by the libraries of this machine */
must_check int digest_start(const char *algorithm, struct digest **out, struct err *e); /* ERR_UNSUPPORTED */
void digest_update(struct digest *d, const void *p, size_t n);
void digest_end(struct digest *d, char hex[DIGEST_HEX_BYTES]);
void digest_free(struct digest *d); /* NULL allowed */

#endif
