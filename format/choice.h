/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which shards of a dataset are read: those whose names match a pattern, and of these every n-th. A pure
 * function of the names in the order of the shard table.
 *
 * A pattern matches the whole name, case kept, the same under every locale: `*` any characters, also none;
 * `?` one character;
 * `[abc]`, `[a-m]`, `[!abc]` one of a set or none of it; `\` takes the special meaning of what follows. With
 * `!` in front of all the pattern chooses what does not match the rest.
 */
#ifndef LARDER_CHOICE_H
#define LARDER_CHOICE_H

#include <stdbool.h>
#include <stdint.h>

#include "format/base/cursor.h"
#include "format/base/err.h"

#define CHOICE_BYTES_MAX 255u

struct choice {
    const char *pattern; /* NULL or "": every name */
    uint32_t slice,
        slices; /* of those that match, the ones number slice, slice + slices, ...; slices 0 or 1: all */
};

/* ERR_INVALID: a pattern with an open set, or that is too long; a slice that is not below slices. */
must_check int choice_check(const struct choice *c, struct err *e);
bool choice_is_all(const struct choice *c);
/* Called for each shard in order; *matched counts and begins at 0. */
bool choice_takes(const struct choice *c, struct slice name, uint32_t *matched);
/* Tells choices apart: 0 for all shards, else not 0. */
uint32_t choice_digest(const struct choice *c);

bool choice_matches(const char *pattern, struct slice name);

#endif
