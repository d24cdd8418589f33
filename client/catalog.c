/* SPDX-License-Identifier: Apache-2.0 */
#include "client/catalog.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define NAMES_AHEAD 16u /* whose slots are on their way while one is looked at */

/* ---- pieces ---- */

uint32_t catalog_rank(const struct catalog *c, uint32_t piece)
{
    uint32_t low = 0, high = c->world; /* first[low] <= piece < first[high] */
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (c->first[middle] <= piece)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* The index that a piece is in, and its number there. */
static const struct index_private *index_of(const struct catalog *c, uint32_t piece, uint32_t *i)
{
    uint32_t rank = catalog_rank(c, piece);
    *i = piece - c->first[rank];
    return part_index(c->parts[rank]);
}

struct slice catalog_name(const struct catalog *c, uint32_t piece)
{
    uint32_t i;
    const struct index_private *x = index_of(c, piece, &i);
    return i < x->tensor_count ? index_tensor_name(x, i) : x->aliases[i - x->tensor_count].name;
}

const struct tensor *catalog_tensor(const struct catalog *c, uint32_t piece, struct tensor *room)
{
    uint32_t i;
    const struct index_private *x = index_of(c, piece, &i);
    return index_tensor(x, i < x->tensor_count ? i : x->aliases[i - x->tensor_count].tensor, room);
}

/* Is it the first of its name? */
static bool is_first(const struct catalog *c, uint32_t piece)
{
    uint32_t last = piece;
    if (piece < c->first[1])
        return true;
    while (c->next[last] > last)
        last = c->next[last];
    return c->next[last] == piece;
}

bool catalog_is(const struct catalog *c, uint32_t piece, struct slice name, enum dtype dtype, uint32_t dims,
                const uint64_t *shape, struct place *out)
{
    uint32_t i;
    const struct index_private *x = index_of(c, piece, &i);
    return is_first(c, piece) && i < x->tensor_count && index_tensor_is(x, i, name, dtype, dims, shape, out);
}

void catalog_soon(const struct catalog *c, uint32_t piece)
{
    uint32_t i;
    const struct index_private *x = index_of(c, piece, &i);
    if (i < x->tensor_count)
        __builtin_prefetch(x->stored + x->places[i]);
}

uint32_t catalog_next(const struct catalog *c, uint32_t piece)
{
    uint32_t next = c->next ? c->next[piece] : piece;
    return next > piece ? next : NO_PIECE;
}

const char *catalog_string(struct catalog *c, uint32_t piece)
{
    struct slice kept;
    int rc = names_add(&c->names, catalog_name(c, piece), piece, &kept);
    return rc == 0 || rc == -EEXIST ? (const char *)kept.p : NULL;
}

void catalog_ask(struct catalog *c, uint32_t piece)
{
    c->asked_count += !catalog_asked(c, piece);
    c->asked[piece / 64] |= 1ull << piece % 64;
    c->hint = piece + 1;
}

bool catalog_asked(const struct catalog *c, uint32_t piece)
{
    return c->asked[piece / 64] >> piece % 64 & 1;
}

bool catalog_all_asked(const struct catalog *c)
{
    return c->asked_count == c->count;
}

/* ---- by name ---- */

/* The slot of the name, or the free one where it would go. */
static uint64_t *slot_of(const struct catalog *c, struct slice name, uint64_t hash)
{
    size_t mask = c->slot_count - 1, i = hash & mask;
    for (; c->slots[i]; i = (i + 1) & mask)
        if (c->slots[i] >> 32 == hash >> 32 && slice_eq(catalog_name(c, (uint32_t)c->slots[i] - 1), name))
            break;
    return &c->slots[i];
}

static uint32_t look_up(const struct catalog *c, struct slice name)
{
    uint64_t slot = *slot_of(c, name, hash64(name.p, name.n));
    uint32_t last = (uint32_t)slot - 1;
    return slot == 0 ? NO_PIECE : c->next ? c->next[last] : last;
}

static int agree(const struct catalog *c, uint32_t a, uint32_t b, struct err *e)
{
    struct tensor room[2];
    const struct tensor *x = catalog_tensor(c, a, &room[0]), *y = catalog_tensor(c, b, &room[1]);
    if (x->dtype == y->dtype && x->dims == y->dims &&
        memcmp(x->shape, y->shape, x->dims * sizeof *x->shape) == 0)
        return 0;
    char text[160];
    struct slice name = catalog_name(c, a);
    return err_set(e, ERR_MISMATCH, "tensor \"%s\": ranks %u and %u saved it with different dtype or shape",
                   err_quote(text, sizeof text, name.p, name.n), catalog_rank(c, a), catalog_rank(c, b));
}

/* Behind the pieces of lower ranks. */
static int add_piece(struct catalog *c, uint32_t piece, struct slice name, uint64_t hash, struct err *e)
{
    uint64_t *slot = slot_of(c, name, hash);
    uint32_t last = (uint32_t)*slot - 1;
    if (*slot && (!c->next || catalog_rank(c, last) == catalog_rank(c, piece))) {
        char text[160];
        return err_set(e, ERR_CORRUPT, "tensor \"%s\": the name is used twice in the part of rank %u",
                       err_quote(text, sizeof text, name.p, name.n), catalog_rank(c, piece));
    }
    int rc = *slot ? agree(c, last, piece, e) : 0;
    if (c->next) {
        c->next[piece] = *slot ? c->next[last] : piece;
        if (*slot)
            c->next[last] = piece;
    }
    c->count += *slot == 0;
    *slot = hash >> 32 << 32 | (piece + 1);
    return rc;
}

static int add_all(struct catalog *c, struct err *e)
{
    struct {
        struct slice name;
        uint64_t hash;
    } ahead[NAMES_AHEAD];
    uint32_t n = c->first[c->world];
    for (uint32_t i = 0; i < n + NAMES_AHEAD; i++) {
        typeof(ahead[0]) *a = &ahead[i % NAMES_AHEAD];
        int rc =
            i >= NAMES_AHEAD && i - NAMES_AHEAD < n ? add_piece(c, i - NAMES_AHEAD, a->name, a->hash, e) : 0;
        if (rc < 0)
            return rc;
        if (i < n) {
            a->name = catalog_name(c, i);
            a->hash = hash64(a->name.p, a->name.n);
            __builtin_prefetch(&c->slots[a->hash & (c->slot_count - 1)], 1);
        }
    }
    return 0;
}

static int make_slots(struct catalog *c, struct err *e)
{
    size_t n = c->first[c->world];
    c->slot_count = 16;
    while (c->slot_count < 2 * n)
        c->slot_count *= 2;
    c->slots = calloc(c->slot_count, sizeof *c->slots);
    if (!c->slots)
        return err_set(e, ERR_NO_MEMORY, "no memory for the list of all tensors");
    c->count = 0;
    int rc = add_all(c, e);
    if (rc < 0) { /* whoever looks for the next name is told the same */
        free(c->slots);
        c->slots = NULL;
        c->count = (uint32_t)n;
    }
    return rc;
}

int catalog_find(struct catalog *c, struct slice name, uint32_t *out, struct err *e)
{
    uint32_t found = c->hint; /* of the first rank, so it is the first of its name */
    if (found >= c->first[1] || !slice_eq(catalog_name(c, found), name)) {
        int rc = c->slots ? 0 : make_slots(c, e);
        if (rc < 0)
            return rc;
        found = look_up(c, name);
    }
    c->hint = found == NO_PIECE ? c->hint : found + 1;
    *out = found;
    return 0;
}

static int number_pieces(struct catalog *c)
{
    uint64_t n = 0;
    c->first = malloc((c->world + 1u) * sizeof *c->first);
    for (uint32_t i = 0; c->first && i < c->world; i++) {
        c->first[i] = (uint32_t)n;
        n += (uint64_t)part_index(c->parts[i])->tensor_count + part_index(c->parts[i])->alias_count;
        if (n >= UINT32_MAX - NAMES_AHEAD)
            return -ENOMEM;
    }
    if (!c->first)
        return -ENOMEM;
    c->first[c->world] = (uint32_t)n;
    return 0;
}

int catalog_create(struct part *const *parts, uint32_t world, struct catalog *out, struct err *e)
{
    struct catalog c = {.parts = parts, .world = world};
    int rc = number_pieces(&c);
    if (rc == 0) {
        size_t n = c.first[world];
        c.count = (uint32_t)n;
        c.asked = calloc(n / 64 + 1, sizeof *c.asked);
        if (world > 1)
            c.next = malloc((n + 1) * sizeof *c.next);
        rc = c.asked && (world == 1 || c.next) ? 0 : -ENOMEM;
    }
    if (rc < 0)
        rc = err_set(e, ERR_NO_MEMORY, "no memory for the list of all tensors");
    else if (world > 1)
        rc = make_slots(&c, e);
    if (rc < 0)
        catalog_free(&c);
    else
        *out = c;
    return rc;
}

void catalog_free(struct catalog *c)
{
    free(c->first);
    free(c->next);
    free(c->slots);
    free(c->asked);
    free(c->sorted);
    names_free(&c->names);
    *c = (struct catalog){0};
}

/* ---- in order ---- */

/* What is sorted: the 8 bytes behind what all names have in common decide most comparisons. */
struct key {
    uint64_t bytes; /* most significant first */
    const struct catalog *catalog;
    uint32_t piece;
};

static uint64_t key_bytes(struct slice name, size_t from)
{
    uint64_t p = 0;
    for (size_t i = from; i < from + 8; i++)
        p = p << 8 | (i < name.n ? name.p[i] : 0);
    return p;
}

static size_t common_prefix(const struct catalog *c, const struct key *keys)
{
    struct slice a = catalog_name(c, keys[0].piece);
    size_t common = a.n;
    for (uint32_t i = 1; i < c->count; i++) {
        struct slice b = catalog_name(c, keys[i].piece);
        size_t same = 0;
        common = common < b.n ? common : b.n;
        while (same < common && a.p[same] == b.p[same])
            same++;
        common = same;
    }
    return common;
}

static int order_keys(const void *pa, const void *pb)
{
    const struct key *x = pa, *y = pb;
    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? -1 : 1;
    struct slice a = catalog_name(x->catalog, x->piece), b = catalog_name(y->catalog, y->piece);
    size_t n = a.n < b.n ? a.n : b.n;
    int differ = n ? memcmp(a.p, b.p, n) : 0;
    return differ ? differ : a.n < b.n ? -1 : a.n > b.n;
}

int catalog_sort(struct catalog *c, struct err *e)
{
    if (c->sorted || c->count == 0)
        return 0;
    struct key *keys = malloc(c->count * sizeof *keys);
    uint32_t *sorted = malloc(c->count * sizeof *sorted), n = 0;
    if (!keys || !sorted) {
        free(keys);
        free(sorted);
        return err_set(e, ERR_NO_MEMORY, "no memory for a list of %u tensors", c->count);
    }
    for (uint32_t i = 0; !c->next && i < c->count; i++)
        keys[n++] = (struct key){.catalog = c, .piece = i};
    for (size_t i = 0; c->next && i < c->slot_count; i++)
        if (c->slots[i])
            keys[n++] = (struct key){.catalog = c, .piece = c->next[(uint32_t)c->slots[i] - 1]};
    check(n == c->count);
    size_t common = common_prefix(c, keys);
    for (uint32_t i = 0; i < n; i++)
        keys[i].bytes = key_bytes(catalog_name(c, keys[i].piece), common);
    qsort(keys, n, sizeof *keys, order_keys);
    for (uint32_t i = 0; i < n; i++)
        sorted[i] = keys[i].piece;
    free(keys);
    c->sorted = sorted;
    return 0;
}
