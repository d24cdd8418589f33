/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tensors of a checkpoint over all its parts, by name, aliases included. There may be millions: a piece
 * is only a number, and the rest is looked up in the parts' indexes.
 */
#ifndef LARDER_CLIENT_CATALOG_H
#define LARDER_CLIENT_CATALOG_H

#include "client/names.h"
#include "client/part.h"

/* A piece is one rank's box of a tensor. Pieces are numbered by rank, and in one by the order of the index:
 * tensors, then aliases. A name stands for its first piece. */
#define NO_PIECE UINT32_MAX

struct catalog {
    struct part *const *parts;
    uint32_t world;
    uint32_t *first;   /* piece of each rank; behind them how many there are */
    uint32_t *next;    /* piece of the same name, the last one's being the first; NULL with one rank */
    uint64_t *slots;   /* open addressing: the upper half of a name's hash, its last piece plus one. With one
                          rank made when a name is first looked for that the hint does not find */
    size_t slot_count; /* a power of two */
    uint64_t *asked;   /* a bit for each piece; set by the user for first ones */
    uint32_t asked_count;
    uint32_t *sorted;   /* first pieces by name, bytewise; made by catalog_sort */
    uint32_t count;     /* of different names */
    uint32_t hint;      /* behind the piece that was found or asked for last: most ask in that order */
    struct names names; /* that were given out as strings */
};

/* parts: `world` of them; they must outlive the catalog. ERR_CORRUPT if a name is there twice in one part
 * (with one rank catalog_find says so, once it compares names), ERR_MISMATCH if two ranks do not agree on
 * dtype or shape of a name. */
must_check int catalog_create(struct part *const *parts, uint32_t world, struct catalog *out, struct err *e);
void catalog_free(struct catalog *c);

must_check int catalog_find(struct catalog *c, struct slice name, uint32_t *out,
                            struct err *e);                     /* first piece, or NO_PIECE */
uint32_t catalog_next(const struct catalog *c, uint32_t piece); /* of the next rank, or NO_PIECE */
uint32_t catalog_rank(const struct catalog *c, uint32_t piece);
struct slice catalog_name(const struct catalog *c, uint32_t piece); /* not terminated */
/* Its name may be another one (alias). As index_tensor. */
const struct tensor *catalog_tensor(const struct catalog *c, uint32_t piece, struct tensor *room);
/* Would catalog_find find this piece by the name, and is it a whole tensor of this dtype and shape? Then
 * where it lies. False says nothing. Much quicker. */
bool catalog_is(const struct catalog *c, uint32_t piece, struct slice name, enum dtype dtype, uint32_t dims,
                const uint64_t *shape, struct place *out);
void catalog_soon(const struct catalog *c, uint32_t piece); /* its tensor will be looked up soon */
/* The name, terminated; lives as long as the catalog. NULL: no memory. */
const char *catalog_string(struct catalog *c, uint32_t piece);
void catalog_ask(struct catalog *c, uint32_t piece);
bool catalog_asked(const struct catalog *c, uint32_t piece);
bool catalog_all_asked(const struct catalog *c);
must_check int catalog_sort(struct catalog *c, struct err *e); /* once; then nothing */

#endif
