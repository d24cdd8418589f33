/* SPDX-License-Identifier: Apache-2.0 */
/* Makes tar archives in memory, right ones and wrong ones, for tests. */
#ifndef LARDER_TESTS_TARBALL_H
#define LARDER_TESTS_TARBALL_H

#include "format/base/cursor.h"

enum tarball_dialect { TARBALL_USTAR, TARBALL_GNU, TARBALL_PAX };

/* One header block; size as octal where it fits, else as base-256. */
void tarball_header(struct buf *b, char type, const char *name, uint64_t size);
/* Data, padded to a whole block. */
void tarball_data(struct buf *b, const void *p, size_t n);
/* A member of the dialect: long names go the dialect's way. */
void tarball_file(struct buf *b, enum tarball_dialect dialect, const char *name, const void *p, size_t n);
/* An extended header of type x or g with one record. */
void tarball_pax(struct buf *b, char type, const char *key, const char *value);
void tarball_end(struct buf *b); /* two blocks of zeros */
/* Sums the header at `at` again, after it was changed. */
void tarball_resum(struct buf *b, size_t at);

#endif
