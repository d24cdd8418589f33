/* SPDX-License-Identifier: Apache-2.0 */
#include "client/catalog.h"

#include <stdlib.h>
#include <string.h>

struct entry {
    struct slice name;
    uint32_t rank;
    const struct tensor *tensor;
};

/* What is sorted: the 8 bytes behind what all names have in common decide most comparisons. */
struct key {
    uint64_t bytes; /* most significant first */
    const struct entry *entry;
};

static uint64_t key_bytes(struct slice name, size_t from)
{
    uint64_t p = 0;
    for (size_t i = from; i < from + 8; i++)
        p = p << 8 | (i < name.n ? name.p[i] : 0);
    return p;
}

static size_t common_prefix(const struct entry *entries, size_t n)
{
    size_t common = n > 0 ? entries[0].name.n : 0;
    for (size_t i = 1; i < n; i++) {
        struct slice a = entries[0].name, b = entries[i].name;
        size_t same = 0;
        common = common < b.n ? common : b.n;
        while (same < common && a.p[same] == b.p[same])
            same++;
        common = same;
    }
    return common;
}

static int order_names(struct slice a, struct slice b)
{
    size_t n = a.n < b.n ? a.n : b.n;
    int differ = n ? memcmp(a.p, b.p, n) : 0;
    return differ ? differ : a.n < b.n ? -1 : a.n > b.n;
}

static int order_keys(const void *pa, const void *pb)
{
    const struct key *x = pa, *y = pb;
    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? -1 : 1;
    const struct entry *a = x->entry, *b = y->entry;
    int differ = order_names(a->name, b->name);
    return differ ? differ : a->rank < b->rank ? -1 : a->rank > b->rank;
}

static size_t count_entries(struct part *const *parts, uint32_t world)
{
    size_t n = 0;
    for (uint32_t i = 0; i < world; i++)
        n += (size_t)part_index(parts[i])->tensor_count + part_index(parts[i])->alias_count;
    return n;
}

static void add_entry(struct entry *out, struct slice name, uint32_t rank, const struct tensor *t)
{
    *out = (struct entry){.name = name, .rank = rank, .tensor = t};
}

static void fill_entries(struct part *const *parts, uint32_t world, struct entry *out)
{
    for (uint32_t rank = 0; rank < world; rank++) {
        const struct index_private *x = part_index(parts[rank]);
        for (uint32_t i = 0; i < x->tensor_count; i++)
            add_entry(out++, x->tensors[i].name, rank, &x->tensors[i]);
        for (uint32_t i = 0; i < x->alias_count; i++)
            add_entry(out++, x->aliases[i].name, rank, &x->tensors[x->aliases[i].tensor]);
    }
}

static int agree(const struct entry *a, const struct entry *b, struct err *e)
{
    const struct tensor *x = a->tensor, *y = b->tensor;
    if (x->dtype == y->dtype && x->dims == y->dims &&
        memcmp(x->shape, y->shape, x->dims * sizeof *x->shape) == 0)
        return 0;
    char text[160];
    return err_set(e, ERR_MISMATCH, "tensor \"%s\": ranks %u and %u saved it with different dtype or shape",
                   err_quote(text, sizeof text, a->name.p, a->name.n), a->rank, b->rank);
}

static int group(struct catalog *c, const struct key *keys, size_t n, struct err *e)
{
    for (size_t i = 0; i < n; i++) {
        const struct entry *x = keys[i].entry;
        c->pieces[i] = (struct piece){.rank = x->rank, .tensor = x->tensor};
        if (i > 0 && keys[i].bytes == keys[i - 1].bytes && slice_eq(x->name, keys[i - 1].entry->name)) {
            int rc = agree(keys[i - 1].entry, x, e);
            if (rc < 0)
                return rc;
            c->saved[c->count - 1].pieces++;
            continue;
        }
        struct slice kept;
        if (names_add(&c->names, x->name, (uint32_t)c->count, &kept) < 0)
            return err_set(e, ERR_NO_MEMORY, "no memory for the names of %zu tensors", n);
        c->saved[c->count++] = (struct saved){.name = kept, .first = i, .pieces = 1};
    }
    return 0;
}

static void fill_keys(const struct entry *entries, size_t n, struct key *out)
{
    size_t common = common_prefix(entries, n);
    for (size_t i = 0; i < n; i++)
        out[i] = (struct key){key_bytes(entries[i].name, common), &entries[i]};
}

int catalog_create(struct part *const *parts, uint32_t world, struct catalog *out, struct err *e)
{
    size_t n = count_entries(parts, world);
    struct catalog c = {0};
    struct entry *entries = calloc(n + 1, sizeof *entries);
    struct key *keys = calloc(n + 1, sizeof *keys);
    c.saved = calloc(n + 1, sizeof *c.saved);
    c.pieces = calloc(n + 1, sizeof *c.pieces);
    int rc = entries && keys && c.saved && c.pieces && n < UINT32_MAX
                 ? 0
                 : err_set(e, ERR_NO_MEMORY, "no memory for a list of %zu tensors", n);
    if (rc == 0) {
        fill_entries(parts, world, entries);
        fill_keys(entries, n, keys);
        qsort(keys, n, sizeof *keys, order_keys);
        rc = group(&c, keys, n, e);
    }
    free(entries);
    free(keys);
    if (rc < 0)
        catalog_free(&c);
    else
        *out = c;
    return rc;
}

struct saved *catalog_find(const struct catalog *c, struct slice name)
{
    uint32_t i;
    return names_find(&c->names, name, &i) == 0 ? &c->saved[i] : NULL;
}

void catalog_free(struct catalog *c)
{
    free(c->saved);
    free(c->pieces);
    names_free(&c->names);
    *c = (struct catalog){0};
}
