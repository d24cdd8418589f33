/* SPDX-License-Identifier: Apache-2.0 */
/* A set of names, and memory that they stay in: fit for millions. */
#ifndef LARDER_CLIENT_NAMES_H
#define LARDER_CLIENT_NAMES_H

#include <stdint.h>

#include "format/base/cursor.h"

struct names_block;
struct named;

/* Zeroed memory is an empty set. */
struct names {
    uint64_t *slots; /* open addressing: the low half of a name's hash above its number plus one; 0: free */
    size_t slot_count, count;
    struct named *items; /* by number */
    size_t item_cap;
    struct names_block *blocks;
};

/* Copies the name; *kept is the copy, which lives as long as the set, terminated by a NUL behind it. -EEXIST
 * (then *kept is the one that is there), -ENOMEM. value: found again by names_find. */
must_check int names_add(struct names *s, struct slice name, uint32_t value, struct slice *kept);
must_check int names_find(const struct names *s, struct slice name, uint32_t *value); /* -ENOENT */
/* n bytes beside the names, aligned to 8; NULL: no memory. */
void *names_alloc(struct names *s, size_t n);
void names_free(struct names *s);

#endif
