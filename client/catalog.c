/* SPDX-License-Identifier: Apache-2.0 */
#include "client/catalog.h"

#include <stdlib.h>
#include <string.h>

struct entry {
    uint64_t prefix; /* the name's first 8 bytes, most significant first: decides most comparisons */
    struct slice name;
    uint32_t rank;
    const struct tensor *tensor;
};

static uint64_t prefix_of(struct slice name)
{
    uint64_t p = 0;
    for (size_t i = 0; i < 8; i++)
        p = p << 8 | (i < name.n ? name.p[i] : 0);
    return p;
}

static int order_names(struct slice a, struct slice b)
{
    size_t n = a.n < b.n ? a.n : b.n;
    int differ = n ? memcmp(a.p, b.p, n) : 0;
    return differ ? differ : a.n < b.n ? -1 : a.n > b.n;
}

static int order_entries(const void *pa, const void *pb)
{
    const struct entry *a = pa, *b = pb;
    if (a->prefix != b->prefix)
        return a->prefix < b->prefix ? -1 : 1;
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
    *out = (struct entry){.prefix = prefix_of(name), .name = name, .rank = rank, .tensor = t};
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

static int group(struct catalog *c, const struct entry *entries, size_t n, struct err *e)
{
    for (size_t i = 0; i < n; i++) {
        bool same = i > 0 && slice_eq(entries[i].name, entries[i - 1].name);
        c->pieces[i] = (struct piece){.rank = entries[i].rank, .tensor = entries[i].tensor};
        if (same) {
            int rc = agree(&entries[i - 1], &entries[i], e);
            if (rc < 0)
                return rc;
            c->saved[c->count - 1].pieces++;
            continue;
        }
        struct slice name = entries[i].name;
        char *copy = names_alloc(&c->names, name.n + 1);
        if (!copy)
            return err_set(e, ERR_NO_MEMORY, "no memory for the names of %zu tensors", n);
        memcpy(copy, name.p, name.n);
        copy[name.n] = 0;
        c->saved[c->count++] = (struct saved){.name = SLICE(copy, name.n), .first = i, .pieces = 1};
    }
    return 0;
}

int catalog_create(struct part *const *parts, uint32_t world, struct catalog *out, struct err *e)
{
    size_t n = count_entries(parts, world);
    struct catalog c = {0};
    struct entry *entries = calloc(n + 1, sizeof *entries);
    c.saved = calloc(n + 1, sizeof *c.saved);
    c.pieces = calloc(n + 1, sizeof *c.pieces);
    int rc = entries && c.saved && c.pieces
                 ? 0
                 : err_set(e, ERR_NO_MEMORY, "no memory for a list of %zu tensors", n);
    if (rc == 0) {
        fill_entries(parts, world, entries);
        qsort(entries, n, sizeof *entries, order_entries);
        rc = group(&c, entries, n, e);
    }
    free(entries);
    if (rc < 0)
        catalog_free(&c);
    else
        *out = c;
    return rc;
}

struct saved *catalog_find(const struct catalog *c, struct slice name)
{
    size_t from = 0, to = c->count;
    while (from < to) {
        size_t mid = from + (to - from) / 2;
        int differ = order_names(name, c->saved[mid].name);
        if (differ == 0)
            return &c->saved[mid];
        if (differ < 0)
            to = mid;
        else
            from = mid + 1;
    }
    return NULL;
}

void catalog_free(struct catalog *c)
{
    free(c->saved);
    free(c->pieces);
    names_free(&c->names);
    *c = (struct catalog){0};
}
