/* SPDX-License-Identifier: Apache-2.0 */
/* Files read whole, and files replaced as one act: what stood there before, or all of the new bytes. */
#ifndef LARDER_TOOLS_FILES_H
#define LARDER_TOOLS_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "format/base/err.h"
#include "format/credentials.h"

/* Reads a file of at most `most` bytes into malloc'ed memory with a NUL behind it. ERR_NOT_FOUND, ERR_DENIED,
 * ERR_LIMIT, ERR_IO. */
must_check int file_read(const char *path, size_t most, char **out, size_t *n, struct err *e);

/* Writes a temporary file beside `path`, syncs it, renames it into place and syncs the folder. */
must_check int file_replace(const char *path, const void *p, size_t n, mode_t mode, struct err *e);
/* As file_replace, but ERR_EXISTS if there is a file already. */
must_check int file_create(const char *path, const void *p, size_t n, mode_t mode, struct err *e);

/* A credential file; what was read is wiped. */
must_check int credentials_read(const char *path, struct credentials *out, struct err *e);
must_check int credentials_write(const char *path, const struct credentials *c, bool replace, struct err *e);

#endif
