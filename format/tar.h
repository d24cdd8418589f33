/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A reader of tar archives that is pushed bytes, in any split: ustar, GNU (long names, base-256 sizes), PAX
 * (path, size, global headers) and the old format without a magic. It tells of each member where its data
 * lies; the data itself is passed over.
 *
 * An archive that is cut is an error, wherever it is cut: the end is where the end-of-archive marker (a block
 * of zeros) is, and nowhere else. Sparse members, continued volumes, and sizes that contradict each other are
 * refused. A PAX size is that of the next real member, never of an extended header in between. Errors name
 * the member and the offset.
 */
#ifndef LARDER_TAR_H
#define LARDER_TAR_H

#include <stddef.h>
#include <stdint.h>

#include "format/base/cursor.h"
#include "format/base/err.h"

#define TAR_BLOCK_BYTES     512u
#define TAR_NAME_BYTES_MAX  4096u
#define TAR_EXTRA_BYTES_MAX (1u << 20) /* of one extended header */

enum tar_type { TAR_FILE, TAR_DIRECTORY, TAR_HARD_LINK, TAR_SYMBOLIC_LINK, TAR_SPECIAL };

struct tar_member {
    struct slice name; /* valid during the call; 1 .. TAR_NAME_BYTES_MAX bytes, any but NUL */
    enum tar_type type;
    uint64_t header_offset; /* of the member's own header */
    uint64_t data_offset;
    uint64_t bytes; /* 0 unless TAR_FILE */
};

/* Called once per member, when its headers have been read and before its data has. A negative return ends the
 * reading with e as it was filled. */
typedef int tar_found(void *arg, const struct tar_member *m, struct err *e);

struct tar;

must_check int tar_create(tar_found *found, void *arg, struct tar **out, struct err *e);
void tar_free(struct tar *t); /* NULL allowed */
/* After an error, every further call gives that error. */
must_check int tar_push(struct tar *t, const void *p, size_t n, struct err *e);
/* Bytes from here on that need not be pushed, since they are data or padding; and passing over up to so many.
 */
uint64_t tar_skippable(const struct tar *t);
void tar_skip(struct tar *t, uint64_t n);
/* The archive has ended here: 0 if it may. */
must_check int tar_finish(struct tar *t, struct err *e);
uint64_t tar_offset(const struct tar *t); /* bytes pushed and skipped so far */

#endif
