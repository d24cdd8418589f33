/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a checkpoint over all its parts, by name, aliases included. */
#ifndef LARDER_CLIENT_CATALOG_H
#define LARDER_CLIENT_CATALOG_H

#include "client/names.h"
#include "client/part.h"

struct piece { /* one rank's box of a tensor */
    uint32_t rank;
    const struct tensor *tensor; /* of the part's index; its name may be another (alias) */
};

struct saved {
    struct slice name; /* NUL behind it */
    size_t first;      /* of its pieces, by rank */
    uint32_t pieces;
    bool asked;
};

struct catalog {
    struct saved *saved; /* by name, bytewise */
    size_t count;
    struct piece *pieces;
    struct names names; /* memory of the names */
};

/* parts: `world` of them; they must outlive the catalog. ERR_MISMATCH if two ranks do not agree on dtype or
 * shape of a name. */
must_check int catalog_create(struct part *const *parts, uint32_t world, struct catalog *out, struct err *e);
struct saved *catalog_find(const struct catalog *c, struct slice name); /* NULL: none */
void catalog_free(struct catalog *c);

#endif
