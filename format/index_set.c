/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The check that makes one checkpoint out of the parts of many ranks.
 *
 * All names of all parts are sorted together, so that those of one tensor stand side by side; then each
 * group is looked at alone. Boxes that are equal are folded (their bytes must be equal), what remains must be
 * disjoint, and disjoint boxes inside a shape tile it exactly if their volumes add up to its own.
 * Disjointness is shown by a sweep along the dimension in which the boxes begin at the most places: for
 * slices of rows, or of columns, that is a single pass.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/index.h"

#define UNSIGNED(x) ((unsigned long long)(x))

struct entry {
    const struct slice *name;         /* of the tensor, or of the alias */
    const struct tensor *tensor;      /* for an alias: the one that it names */
    const struct index_private *part; /* of rank */
    uint32_t rank;
    bool alias;
};

struct set {
    struct entry *entries;
    size_t count;
    const struct entry **boxes; /* of the group at hand; room for all entries */
};

struct key { /* what is sorted in place of entries, which are large */
    uint64_t hash;
    const struct entry *entry;
};

static int order_keys(const void *pa, const void *pb)
{
    const struct key *x = pa, *y = pb;
    if (x->hash != y->hash)
        return x->hash < y->hash ? -1 : 1;
    const struct entry *a = x->entry, *b = y->entry;
    size_t n = a->name->n < b->name->n ? a->name->n : b->name->n;
    int differ = memcmp(a->name->p, b->name->p, n);
    if (differ)
        return differ;
    if (a->name->n != b->name->n)
        return a->name->n < b->name->n ? -1 : 1;
    return a->rank < b->rank ? -1 : a->rank > b->rank;
}

/* Same boxes side by side, by offsets and then lengths; among those, by rank. */
static int order_boxes(const void *pa, const void *pb)
{
    const struct entry *a = *(const struct entry *const *)pa, *b = *(const struct entry *const *)pb;
    size_t n = a->tensor->dims * sizeof(uint64_t);
    int differ = memcmp(a->tensor->offsets, b->tensor->offsets, n);
    if (!differ)
        differ = memcmp(a->tensor->lengths, b->tensor->lengths, n);
    return differ ? differ : a->rank < b->rank ? -1 : a->rank > b->rank;
}

static int order_along(const void *pa, const void *pb, void *arg)
{
    const struct entry *a = *(const struct entry *const *)pa, *b = *(const struct entry *const *)pb;
    uint32_t dim = *(const uint32_t *)arg;
    uint64_t x = a->tensor->offsets[dim], y = b->tensor->offsets[dim];
    return x < y ? -1 : x > y ? 1 : a->rank < b->rank ? -1 : a->rank > b->rank;
}

/* "[0:4, 8:16]", shortened where it is long. */
static const char *box_text(char *out, size_t size, const struct tensor *t)
{
    size_t n = (size_t)snprintf(out, size, "[");
    for (uint32_t i = 0; i < t->dims && n + 48 < size; i++)
        n += (size_t)snprintf(out + n, size - n, "%s%llu:%llu", i ? ", " : "", UNSIGNED(t->offsets[i]),
                              UNSIGNED(t->offsets[i] + t->lengths[i]));
    snprintf(out + n, size - n, "]");
    return out;
}

static const char *shape_text(char *out, size_t size, const struct tensor *t)
{
    size_t n = (size_t)snprintf(out, size, "%s [", dtype_name(t->dtype));
    for (uint32_t i = 0; i < t->dims && n + 28 < size; i++)
        n += (size_t)snprintf(out + n, size - n, "%s%llu", i ? ", " : "", UNSIGNED(t->shape[i]));
    snprintf(out + n, size - n, "]");
    return out;
}

static const char *name_text(char *out, size_t size, const struct entry *x)
{
    return err_quote(out, size, x->name->p, x->name->n);
}

static int kind_differs(const struct entry *a, const struct entry *b, struct err *e)
{
    char name[120], one[60], two[60];
    name_text(name, sizeof name, a);
    if (a->alias && b->alias)
        return err_set(
            e, ERR_MISMATCH,
            "alias \"%s\": it stands for \"%s\" in the part of rank %u and for \"%s\" in that of rank "
            "%u; tie the same tensors on all ranks",
            name, err_quote(one, sizeof one, a->tensor->name.p, a->tensor->name.n), a->rank,
            err_quote(two, sizeof two, b->tensor->name.p, b->tensor->name.n), b->rank);
    if (a->alias != b->alias)
        return err_set(
            e, ERR_MISMATCH,
            "\"%s\" is a tensor in the part of rank %u and an alias in that of rank %u; tie the same "
            "tensors on all ranks",
            name, a->alias ? b->rank : a->rank, a->alias ? a->rank : b->rank);
    return err_set(e, ERR_MISMATCH, "tensor \"%s\": %s in the part of rank %u, %s in that of rank %u", name,
                   shape_text(one, sizeof one, a->tensor), a->rank, shape_text(two, sizeof two, b->tensor),
                   b->rank);
}

static int structure_check(const struct entry *group, size_t n, struct err *e)
{
    const struct entry *a = group;
    for (size_t i = 1; i < n; i++) {
        const struct entry *b = &group[i];
        if (a->alias != b->alias)
            return kind_differs(a, b, e);
        if (a->alias
                ? !slice_eq(a->tensor->name, b->tensor->name)
                : a->tensor->dtype != b->tensor->dtype || a->tensor->dims != b->tensor->dims ||
                      memcmp(a->tensor->shape, b->tensor->shape, a->tensor->dims * sizeof(uint64_t)) != 0)
            return kind_differs(a, b, e);
    }
    return 0;
}

static bool is_hashed(const struct tensor *t)
{
    static const struct hash128 none;
    return memcmp(&t->plain_hash, &none, HASH128_BYTES) != 0;
}

/* Do two equal boxes hold equal bytes? A large one is known by the hashes of its chunks. */
static bool same_bytes(const struct entry *a, const struct entry *b)
{
    const struct tensor *x = a->tensor, *y = b->tensor;
    if (!index_large(x->bytes))
        return memcmp(&x->plain_hash, &y->plain_hash, HASH128_BYTES) == 0 && is_hashed(x);
    uint64_t n = (x->bytes - 1) / CHUNK_PLAIN_BYTES_MAX + 1;
    check(x->first_chunk + n <= a->part->chunk_count && y->first_chunk + n <= b->part->chunk_count);
    return memcmp(&a->part->plain_hashes[x->first_chunk], &b->part->plain_hashes[y->first_chunk],
                  n * HASH128_BYTES) == 0;
}

/* Leaves one of each set of equal boxes. */
static int boxes_fold(const struct entry **boxes, size_t *count, struct err *e)
{
    qsort(boxes, *count, sizeof *boxes, order_boxes);
    size_t kept = 0;
    for (size_t i = 0; i < *count; i++) {
        const struct entry *a = kept > 0 ? boxes[kept - 1] : NULL, *b = boxes[i];
        size_t n = b->tensor->dims * sizeof(uint64_t);
        if (!a || memcmp(a->tensor->offsets, b->tensor->offsets, n) != 0 ||
            memcmp(a->tensor->lengths, b->tensor->lengths, n) != 0) {
            boxes[kept++] = b;
        } else if (!same_bytes(a, b)) {
            char name[160], box[160];
            return err_set(e, ERR_MISMATCH,
                           "tensor \"%s\": ranks %u and %u both hold %s, with %s; save it from one "
                           "rank, or under names of their own",
                           name_text(name, sizeof name, b), a->rank, b->rank,
                           box_text(box, sizeof box, b->tensor),
                           index_large(b->tensor->bytes) || (is_hashed(a->tensor) && is_hashed(b->tensor))
                               ? "different bytes"
                               : "no hash that shows whether the bytes are the same");
        }
    }
    *count = kept;
    return 0;
}

static bool boxes_meet(const struct tensor *a, const struct tensor *b)
{
    for (uint32_t i = 0; i < a->dims; i++)
        if (a->offsets[i] >= b->offsets[i] + b->lengths[i] || b->offsets[i] >= a->offsets[i] + a->lengths[i])
            return false;
    return true;
}

/* The dimension with the most different offsets; leaves the boxes sorted along it. */
static uint32_t sweep_dimension(const struct entry **boxes, size_t n, uint32_t dims)
{
    uint32_t best = 0;
    size_t most = 0;
    for (uint32_t d = 0; d < dims && most < n; d++) {
        size_t different = 1;
        qsort_r(boxes, n, sizeof *boxes, order_along, &d);
        for (size_t i = 1; i < n; i++)
            different += boxes[i]->tensor->offsets[d] != boxes[i - 1]->tensor->offsets[d];
        if (different > most) {
            most = different;
            best = d;
        }
    }
    qsort_r(boxes, n, sizeof *boxes, order_along, &best);
    return best;
}

/* boxes[0 .. live) are those that the sweep has entered and not left; they are a part of those before i. */
static int boxes_disjoint(const struct entry **boxes, size_t n, struct err *e)
{
    uint32_t d = sweep_dimension(boxes, n, boxes[0]->tensor->dims);
    size_t live = 0;
    for (size_t i = 0; i < n; i++) {
        const struct entry *b = boxes[i];
        size_t kept = 0;
        for (size_t j = 0; j < live; j++) {
            const struct entry *a = boxes[j];
            if (a->tensor->offsets[d] + a->tensor->lengths[d] <= b->tensor->offsets[d])
                continue;
            boxes[kept++] = a;
            if (boxes_meet(a->tensor, b->tensor)) {
                char name[120], one[110], two[110];
                return err_set(e, ERR_MISMATCH,
                               "tensor \"%s\": %s of rank %u and %s of rank %u overlap; only equal boxes may "
                               "be held twice",
                               name_text(name, sizeof name, a), box_text(one, sizeof one, a->tensor), a->rank,
                               box_text(two, sizeof two, b->tensor), b->rank);
            }
        }
        live = kept;
        boxes[live++] = b;
    }
    return 0;
}

/* Where the union of the boxes, seen along dimension 0, first has a hole; shape[0] if it has none there. */
static uint64_t first_hole(const struct entry **boxes, size_t n)
{
    uint32_t d = 0;
    uint64_t reached = 0;
    qsort_r(boxes, n, sizeof *boxes, order_along, &d);
    for (size_t i = 0; i < n && boxes[i]->tensor->offsets[0] <= reached; i++) {
        uint64_t end = boxes[i]->tensor->offsets[0] + boxes[i]->tensor->lengths[0];
        reached = end > reached ? end : reached;
    }
    return reached;
}

static uint64_t volume(const uint64_t *lengths, uint32_t dims)
{
    uint64_t v = 1;
    for (uint32_t i = 0; i < dims; i++)
        v *= lengths[i]; /* fits: tensor_check() has seen the shape */
    return v;
}

static int gap(const struct entry *x, const struct entry **boxes, size_t n, uint64_t found, uint64_t all,
               const struct entry *first, const struct entry *last, struct err *e)
{
    char name[120], shape[100], where[64] = "", one[90] = "nothing";
    if (n > 0 && x->tensor->dims > 0) {
        uint64_t hole = first_hole(boxes, n);
        if (hole < x->tensor->shape[0])
            snprintf(where, sizeof where, ", none from %llu of dimension 0 on", UNSIGNED(hole));
        box_text(one, sizeof one, boxes[n - 1]->tensor);
    }
    return err_set(
        e, ERR_MISMATCH,
        "tensor \"%s\": %s has %llu elements, the parts of ranks %u to %u hold %llu of them%s (the last "
        "box is %s of rank %u); every element must be saved by some rank",
        name_text(name, sizeof name, x), shape_text(shape, sizeof shape, x->tensor), UNSIGNED(all),
        first->rank, last->rank, UNSIGNED(found), where, one, n > 0 ? boxes[n - 1]->rank : x->rank);
}

/* The boxes of the group that hold anything. */
static size_t boxes_collect(struct set *s, const struct entry *group, size_t n)
{
    size_t boxes = 0;
    for (size_t i = 0; i < n; i++)
        if (volume(group[i].tensor->lengths, group[i].tensor->dims) > 0)
            s->boxes[boxes++] = &group[i];
    return boxes;
}

static int group_check(struct set *s, const struct entry *group, size_t n, struct err *e)
{
    int r = structure_check(group, n, e);
    if (r < 0 || group->alias)
        return r;
    uint32_t dims = group->tensor->dims;
    uint64_t all = volume(group->tensor->shape, dims), found = 0;
    size_t boxes = boxes_collect(s, group, n);
    if (boxes > 1)
        r = boxes_fold(s->boxes, &boxes, e);
    for (size_t i = 0; i < boxes; i++)
        found += volume(s->boxes[i]->tensor->lengths, dims); /* exact if they turn out to be disjoint */
    if (r == 0 && boxes > 1)
        r = boxes_disjoint(s->boxes, boxes, e);
    if (r < 0 || found == all)
        return r;
    boxes = boxes_collect(s, group, n); /* again: the sweep has dropped those that it left */
    return gap(group, s->boxes, boxes, found, all, group, &group[n - 1], e);
}

/* Names that are equal come to stand side by side, those of lower ranks first. */
static int set_sort(struct set *s, struct err *e)
{
    struct key *keys = malloc((s->count + 1) * sizeof *keys);
    struct entry *sorted = malloc((s->count + 1) * sizeof *sorted);
    int r = keys && sorted ? 0 : err_set(e, ERR_NO_MEMORY, "no memory to compare %zu tensors", s->count);
    for (size_t i = 0; r == 0 && i < s->count; i++)
        keys[i] = (struct key){hash64(s->entries[i].name->p, s->entries[i].name->n), &s->entries[i]};
    if (r == 0)
        qsort(keys, s->count, sizeof *keys, order_keys);
    for (size_t i = 0; r == 0 && i < s->count; i++)
        sorted[i] = *keys[i].entry;
    free(keys);
    if (r < 0) {
        free(sorted);
        return r;
    }
    free(s->entries);
    s->entries = sorted;
    return 0;
}

static int set_create(struct set *s, const struct index_private *parts, uint32_t world, struct err *e)
{
    size_t n = 0;
    for (uint32_t i = 0; i < world; i++)
        n += (size_t)parts[i].tensor_count + parts[i].alias_count;
    s->entries = malloc((n + 1) * sizeof *s->entries);
    s->boxes = malloc((n + 1) * sizeof *s->boxes);
    if (!s->entries || !s->boxes)
        return err_set(e, ERR_NO_MEMORY, "no memory to compare %zu tensors of %u parts", n, world);
    for (uint32_t i = 0; i < world; i++) {
        const struct index_private *x = &parts[i];
        for (uint32_t j = 0; j < x->tensor_count; j++)
            s->entries[s->count++] =
                (struct entry){.name = &x->tensors[j].name, .tensor = &x->tensors[j], .part = x, .rank = i};
        for (uint32_t j = 0; j < x->alias_count; j++)
            s->entries[s->count++] = (struct entry){.name = &x->aliases[j].name,
                                                    .tensor = &x->tensors[x->aliases[j].tensor],
                                                    .part = x,
                                                    .rank = i,
                                                    .alias = true};
    }
    return set_sort(s, e);
}

/* Within one part no name is there twice: each tensor is looked at where it is. */
static int check_one(const struct index_private *x, struct err *e)
{
    const struct entry *box;
    struct set s = {.boxes = &box};
    int r = 0;
    for (uint32_t i = 0; r == 0 && i < x->tensor_count; i++) {
        struct entry t = {.name = &x->tensors[i].name, .tensor = &x->tensors[i], .part = x};
        r = group_check(&s, &t, 1, e);
    }
    return r;
}

int index_check_set(const struct index_private *parts, uint32_t world, struct err *e)
{
    if (world == 1)
        return check_one(parts, e);
    struct set s = {0};
    int r = set_create(&s, parts, world, e);
    for (size_t i = 0, end; r == 0 && i < s.count; i = end) {
        for (end = i + 1; end < s.count && slice_eq(*s.entries[end].name, *s.entries[i].name); end++)
            ;
        r = group_check(&s, &s.entries[i], end - i, e);
    }
    free(s.entries);
    free(s.boxes);
    return r;
}
