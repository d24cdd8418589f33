/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Key material has this one type. It lives in locked memory of its own kept out of core files and out of
 * forked children (MADV_DONTDUMP, MADV_WIPEONFORK), is wiped when freed, compared in constant time, and has
 * no way to be printed or logged.
 */
#ifndef LARDER_BASE_SECRET_H
#define LARDER_BASE_SECRET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/base/err.h"

#define SECRET_BYTES_MAX 4096       /* of one key or its text */
#define SECRET_ROOM_MAX  (4u << 20) /* of what a secret is read and parsed in */

struct secret; /* owned by whoever created it; secret_free wipes it */

/* A copy of n bytes (0 < n <= SECRET_BYTES_MAX); the caller wipes its own source. NULL: no memory. */
must_check struct secret *secret_create(const void *bytes, size_t n);
/* n zero bytes (0 < n <= SECRET_ROOM_MAX) to be filled in place, so that no copy stands elsewhere even for a
 * moment. NULL: no memory. */
must_check struct secret *secret_room(size_t n);
uint8_t *secret_fill(struct secret *s);
void secret_free(struct secret *s); /* NULL allowed */
size_t secret_size(const struct secret *s);
const uint8_t *secret_bytes(const struct secret *s); /* for handing to a cipher; do not copy */
bool secret_equal(const struct secret *a, const struct secret *b);

/* Wipes memory in a way the compiler keeps. */
void secret_wipe(void *p, size_t n);
/* Constant-time comparison of public-length values such as tags and commitments. */
bool secret_memequal(const void *a, const void *b, size_t n);

#endif
