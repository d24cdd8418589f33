/* SPDX-License-Identifier: Apache-2.0 */
#include "client/snapshot.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/stream.h"
#include "client/transfer.h"
#include "format/base/utf8.h"

#define NAMES_MIN        64u
#define ALIAS            (1u << 31) /* of the number of a name: what is left is that of an alias */
#define RECORD_BYTES_MAX (2u + 2u + 24u * TENSOR_DIMS_MAX + 8u + HASH128_BYTES) /* without its name */
#define SMALL_BYTES_MAX  (CHUNK_PLAIN_BYTES_MAX / 4)                            /* as format/index.h says */

/* ---- growing tables ---- */

static int grow(void *table, uint32_t count, uint32_t *cap, size_t size)
{
    void **t = table, *p;
    size_t bytes;
    if (count < *cap)
        return 0;
    uint32_t bigger = *cap ? *cap * 2 : 16;
    if (mul_overflows(bigger, size, &bytes) || !(p = realloc(*t, bytes)))
        return -ENOMEM;
    *t = p;
    *cap = bigger;
    return 0;
}

static int no_memory(struct err *e)
{
    return err_set(e, ERR_NO_MEMORY, "no memory for the description of what is saved");
}

/* ---- tensors and names ---- */

static uint8_t *record_of(const struct snapshot *s, uint32_t i)
{
    return s->index.p + s->records_at + s->records[i];
}

void snapshot_get(const struct snapshot *s, uint32_t i, struct tensor *out)
{
    record_get(record_of(s, i), out);
    out->bytes = tensor_bytes(out);
}

struct slice snapshot_name(const struct snapshot *s, uint32_t i)
{
    return record_name(record_of(s, i));
}

const char *snapshot_string(struct snapshot *s, uint32_t i)
{
    struct slice name = snapshot_name(s, i);
    char *copy = names_alloc(&s->memory, name.n + 1);
    if (!copy)
        return NULL;
    memcpy(copy, name.p, name.n);
    copy[name.n] = 0;
    return copy;
}

static struct slice name_of(const struct snapshot *s, uint32_t number)
{
    return number & ALIAS ? s->aliases[number & ~ALIAS].name : snapshot_name(s, number);
}

/* The slot that holds the name, or the free one where it would go. Names are compared only where tags agree.
 */
static uint64_t *slot_of(const struct snapshot *s, struct slice name, uint32_t tag)
{
    const struct name_set *n = &s->names;
    size_t mask = n->slot_count - 1, i = tag & mask;
    while (n->slots[i] &&
           !(n->slots[i] >> 32 == tag && slice_eq(name_of(s, (uint32_t)n->slots[i] - 1), name)))
        i = (i + 1) & mask;
    return &n->slots[i];
}

/* count: a power of two. */
static int grow_names(struct snapshot *s, size_t count)
{
    struct name_set *n = &s->names;
    struct loan memory;
    if (!loan_begin(s->lender, count * sizeof *n->slots, &memory))
        return -ENOMEM;
    uint64_t *slots = (uint64_t *)(void *)memory.memory;
    memset(slots, 0, count * sizeof *slots);
    for (size_t i = 0; i < n->slot_count; i++) {
        size_t to = (size_t)(n->slots[i] >> 32) & (count - 1);
        if (!n->slots[i])
            continue;
        while (slots[to]) /* all names differ */
            to = (to + 1) & (count - 1);
        slots[to] = n->slots[i];
    }
    loan_end(s->lender, &n->memory);
    n->memory = memory;
    n->slots = slots;
    n->slot_count = count;
    return 0;
}

static uint32_t tag_of(struct slice name)
{
    return (uint32_t)hash64(name.p, name.n);
}

/* NULL: there is no memory. */
static uint64_t *room_for(struct snapshot *s, struct slice name, uint32_t tag)
{
    struct name_set *n = &s->names;
    if (2 * (n->count + 1) > n->slot_count &&
        grow_names(s, n->slot_count ? 2 * n->slot_count : NAMES_MIN) < 0)
        return NULL;
    return slot_of(s, name, tag);
}

static int find_tensor(const struct snapshot *s, struct slice name, uint32_t *out)
{
    uint64_t slot = s->names.count > 0 ? *slot_of(s, name, tag_of(name)) : 0;
    *out = (uint32_t)slot - 1;
    return slot == 0 || *out & ALIAS ? -ENOENT : 0;
}

static int name_error(const struct slice *name, const char *what, struct err *e)
{
    char text[160];
    return err_set(e, ERR_INVALID, "%s \"%s\" %s", "tensor", err_quote(text, sizeof text, name->p, name->n),
                   what);
}

/* The name of tensor or alias `number`, which the caller adds next. */
static int add_name(struct snapshot *s, struct slice name, uint32_t number, struct err *e)
{
    uint32_t tag = tag_of(name);
    uint64_t *slot = room_for(s, name, tag);
    if (!slot)
        return no_memory(e);
    if (*slot)
        return name_error(&name, "was added to this save before; every name is saved once per rank", e);
    *slot = (uint64_t)tag << 32 | (number + 1);
    s->names.count++;
    return 0;
}

/* ---- cutting into chunks ---- */

static struct item *item_at(const struct snapshot *s, uint32_t i)
{
    return i & BLOB_ITEM ? &s->blob_items[i & ~BLOB_ITEM] : &s->tensor_items[i];
}

static int add_chunk(struct snapshot *s, const struct planned_chunk *c, struct err *e)
{
    if (s->chunk_count >= SEGMENT_CHUNKS_MAX)
        return err_set(e, ERR_LIMIT,
                       "one rank's part takes more than %u chunks of %u MiB; save with more ranks",
                       SEGMENT_CHUNKS_MAX, CHUNK_PLAIN_BYTES_MAX >> 20);
    if (grow(&s->chunks, s->chunk_count, &s->chunk_cap, sizeof *s->chunks) < 0)
        return no_memory(e);
    s->chunks[s->chunk_count++] = *c;
    return 0;
}

static int plan_large(struct snapshot *s, uint32_t item, uint16_t group, enum dtype dtype, uint64_t bytes,
                      struct err *e)
{
    for (uint64_t at = 0; at < bytes; at += CHUNK_PLAIN_BYTES_MAX) {
        uint64_t left = bytes - at;
        struct planned_chunk c = {.first = item,
                                  .bytes =
                                      (uint32_t)(left < CHUNK_PLAIN_BYTES_MAX ? left : CHUNK_PLAIN_BYTES_MAX),
                                  .offset = at,
                                  .dtype = (uint8_t)dtype,
                                  .group = group};
        int rc = add_chunk(s, &c, e);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int plan_small(struct snapshot *s, uint32_t item, uint16_t group, enum dtype dtype, uint64_t bytes,
                      uint32_t *chunk, uint32_t *offset, struct err *e)
{
    struct bin *bin = &s->groups[group].bins[dtype];
    if (!bin->open || s->chunks[bin->chunk].bytes + bytes > CHUNK_PLAIN_BYTES_MAX) {
        struct planned_chunk c = {.first = item, .dtype = (uint8_t)dtype, .shared = true, .group = group};
        int rc = add_chunk(s, &c, e);
        if (rc < 0)
            return rc;
        bin->open = true;
        bin->chunk = s->chunk_count - 1;
    } else {
        item_at(s, bin->last)->next = item;
    }
    bin->last = item;
    *chunk = bin->chunk;
    *offset = s->chunks[bin->chunk].bytes;
    s->chunks[bin->chunk].bytes += (uint32_t)bytes;
    return 0;
}

/* The search begins where the last one ended. */
static int group_of(struct snapshot *s, int priority, struct device *d, uint16_t *out, struct err *e)
{
    for (uint32_t i = 0; i < s->group_count; i++) {
        uint32_t at = (s->group_at + i) % s->group_count;
        if (s->groups[at].priority == priority && s->groups[at].device == d) {
            s->group_at = at;
            *out = (uint16_t)at;
            return 0;
        }
    }
    if (grow(&s->groups, s->group_count, &s->group_cap, sizeof *s->groups) < 0)
        return no_memory(e);
    *out = (uint16_t)s->group_count;
    s->group_at = s->group_count;
    s->groups[s->group_count++] = (struct group){.priority = priority, .device = d};
    return 0;
}

static int plan_item(struct snapshot *s, uint32_t item, int priority, struct device *d, enum dtype dtype,
                     uint64_t bytes, uint32_t *chunk, uint32_t *offset, struct err *e)
{
    uint16_t group = 0;
    int rc = 0;
    *chunk = 0;
    *offset = 0;
    if (bytes == 0)
        return 0;
    s->plain_bytes += bytes;
    rc = group_of(s, priority, d, &group, e);
    if (rc == 0 && bytes <= SMALL_BYTES_MAX) {
        rc = plan_small(s, item, group, dtype, bytes, chunk, offset, e);
    } else if (rc == 0) {
        *chunk = s->chunk_count;
        rc = plan_large(s, item, group, dtype, bytes, e);
    }
    s->incomplete |= rc < 0;
    return rc;
}

/* ---- order ---- */

static int priority_at(const struct snapshot *s, uint32_t chunk)
{
    return s->groups[s->chunks[chunk].group].priority;
}

static int by_priority(const void *pa, const void *pb, void *arg)
{
    uint32_t a = *(const uint32_t *)pa, b = *(const uint32_t *)pb;
    int x = priority_at(arg, a), y = priority_at(arg, b);
    if (x != y)
        return x > y ? -1 : 1;
    return a < b ? -1 : a > b; /* those of a large tensor stay one behind the other */
}

/* from: old number by new one; to: the other way round. */
static void renumber(struct snapshot *s, const uint32_t *from, uint32_t *to, struct planned_chunk *chunks)
{
    for (uint32_t i = 0; i < s->chunk_count; i++) {
        chunks[i] = s->chunks[from[i]];
        to[from[i]] = i;
    }
    memcpy(s->chunks, chunks, s->chunk_count * sizeof *chunks);
    for (uint32_t i = 0; i < s->tensor_count; i++) {
        struct tensor t;
        snapshot_get(s, i, &t);
        if (t.bytes > 0)
            record_set_place(record_of(s, i), to[t.first_chunk], t.offset);
    }
    for (uint32_t i = 0; i < s->blob_count; i++)
        if (s->blobs[i].bytes > 0)
            s->blobs[i].first_chunk = to[s->blobs[i].first_chunk];
}

/* Chunks of a higher priority get the lower numbers. */
static int sort_chunks(struct snapshot *s, struct err *e)
{
    uint32_t n = s->chunk_count;
    if (s->group_count < 2)
        return 0;
    uint32_t *from = calloc(n, sizeof *from), *to = calloc(n, sizeof *to);
    struct planned_chunk *chunks = calloc(n, sizeof *chunks);
    int rc = from && to && chunks ? 0 : no_memory(e);
    if (rc == 0) {
        for (uint32_t i = 0; i < n; i++)
            from[i] = i;
        qsort_r(from, n, sizeof *from, by_priority, s);
        renumber(s, from, to, chunks);
    }
    free(from);
    free(to);
    free(chunks);
    return rc;
}

/* ---- tensors ---- */

static bool all_zero(const uint64_t *v, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        if (v[i] != 0)
            return false;
    return true;
}

void tensor_of_public(const struct larder_tensor *t, struct tensor *out)
{
    const char *name = t->name ? t->name : "";
    out->name = SLICE(name, t->name_bytes ? t->name_bytes : strlen(name));
    out->dtype = (enum dtype)t->dtype;
    out->dims = t->dims;
    out->bytes = 0;
    out->first_chunk = out->offset = 0;
    memset(&out->plain_hash, 0, sizeof out->plain_hash);
    unsigned dims = t->dims <= TENSOR_DIMS_MAX ? t->dims : TENSOR_DIMS_MAX;
    bool whole = all_zero(t->lengths, dims) && all_zero(t->offsets, dims);
    memcpy(out->shape, t->shape, dims * sizeof *out->shape);
    memcpy(out->offsets, t->offsets, dims * sizeof *out->offsets);
    memcpy(out->lengths, whole ? t->shape : t->lengths, dims * sizeof *out->lengths);
}

static int priority_error(const struct slice *name, int priority, struct err *e)
{
    char text[64];
    snprintf(text, sizeof text, "has priority %d; expected -%d to %d", priority, LARDER_PRIORITY_MAX,
             LARDER_PRIORITY_MAX);
    return name_error(name, text, e);
}

const uint8_t *item_data(const struct item *i)
{
    return i->strided ? ((const struct strided_item *)i->data)->data : i->data;
}

const int64_t *item_strides(const struct item *i)
{
    return i->strided ? ((const struct strided_item *)i->data)->strides : NULL;
}

static int keep_strides(struct snapshot *s, const struct tensor *x, const int64_t *strides, struct item *out,
                        struct err *e)
{
    struct strided_item *kept = names_alloc(&s->memory, sizeof *kept + x->dims * sizeof *strides);
    if (!kept)
        return no_memory(e);
    kept->data = out->data;
    memcpy(kept->strides, strides, x->dims * sizeof *strides);
    out->data = kept;
    out->strided = 1;
    return 0;
}

static bool no_strides(const struct larder_tensor *t, uint32_t dims)
{
    for (uint32_t i = 0; i < dims; i++)
        if (t->strides[i] != 0)
            return false;
    return true;
}

/* Strides that matter are kept beside. */
static int item_of(struct snapshot *s, const struct larder_tensor *t, const struct tensor *x,
                   struct item *out, struct err *e)
{
    *out = (struct item){.next = NO_ITEM};
    if (x->bytes == 0)
        return 0;
    if (!t->data)
        return name_error(&x->name, "has elements but its data is NULL", e);
    out->data = t->data;
    out->bytes = x->bytes <= SMALL_BYTES_MAX ? (uint32_t)x->bytes : 0;
    if (x->bytes <= INT64_MAX && no_strides(t, x->dims))
        return 0;
    int64_t strides[TENSOR_DIMS_MAX], packed[TENSOR_DIMS_MAX], zero[TENSOR_DIMS_MAX] = {0};
    int rc = box_strides(x->dtype, x->dims, x->lengths, t->strides, false, strides, e);
    if (rc == 0)
        rc = box_strides(x->dtype, x->dims, x->lengths, zero, false, packed, e);
    if (rc < 0) {
        char text[160];
        return err_prepend(e, "tensor \"%s\"", err_quote(text, sizeof text, x->name.p, x->name.n));
    }
    bool is_packed = true;
    for (uint32_t i = 0; i < x->dims; i++)
        is_packed &= x->lengths[i] == 1 || strides[i] == packed[i];
    return is_packed ? 0 : keep_strides(s, x, strides, out, e);
}

static int device_of(struct larder *c, const struct larder_tensor *t, struct device **out, struct err *e)
{
    if (t->memory == LARDER_MEMORY_HOST)
        return 0;
    if (t->memory != LARDER_MEMORY_CUDA)
        return err_set(e, ERR_INVALID, "memory is %d; expected 0 (host) or 1 (CUDA)", (int)t->memory);
    return device_get_staged(c, t->device, out, e);
}

/* Notes the stream of a tensor that was added; there is room for it. */
static void add_source(struct snapshot *s, struct device *d, void *stream)
{
    for (uint32_t i = s->source_count; i-- > 0;)
        if (s->sources[i].device == d && s->sources[i].stream == stream)
            return;
    s->sources[s->source_count++] = (struct source){.device = d, .stream = stream};
}

/* Where the tensor's bytes lie, checked. */
static int place_of(struct larder *c, const struct larder_tensor *t, const struct tensor *x,
                    const struct item *item, struct device **out, struct err *e)
{
    int64_t low = 0, high = (int64_t)x->bytes;
    *out = NULL;
    if (x->bytes == 0 || !c)
        return 0;
    int rc = device_of(c, t, out, e);
    if (rc == 0 && item->strided)
        rc = box_extent(x->dtype, x->dims, x->lengths, item_strides(item), &low, &high, e);
    if (rc == 0)
        rc = device_check(*out, item_data(item) + low, item_data(item) + high, e);
    if (rc == 0)
        return 0;
    char text[160];
    return err_prepend(e, "tensor \"%s\"", err_quote(text, sizeof text, x->name.p, x->name.n));
}

static int may_add(const struct snapshot *s, struct err *e)
{
    return s->closed ? err_set(e, ERR_INVALID, "nothing can be added to this save any more; begin another")
                     : 0;
}

static int check_tensor(const struct snapshot *s, const struct larder_tensor *t, struct tensor *x,
                        struct err *e)
{
    int rc = may_add(s, e);
    if (rc == 0)
        rc = tensor_check(x, &x->bytes, e);
    if (rc == 0 && (t->priority < -LARDER_PRIORITY_MAX || t->priority > LARDER_PRIORITY_MAX))
        rc = priority_error(&x->name, t->priority, e);
    if (rc == 0 && s->tensor_count >= TENSORS_MAX)
        rc = err_set(e, ERR_LIMIT,
                     "more than %u tensors in one rank's part; save with more ranks or join small tensors",
                     TENSORS_MAX);
    return rc;
}

static int grow_tensors(struct snapshot *s, uint32_t cap)
{
    uint32_t n = s->tensor_count;
    if (!loan_grow(s->lender, &s->records_memory, n * sizeof *s->records, cap * sizeof *s->records))
        return -ENOMEM;
    s->records = (uint32_t *)(void *)s->records_memory.memory;
    if (!loan_grow(s->lender, &s->items_memory, n * sizeof *s->tensor_items, cap * sizeof *s->tensor_items))
        return -ENOMEM;
    s->tensor_items = (struct item *)(void *)s->items_memory.memory;
    s->tensor_cap = cap;
    return 0;
}

static int room_for_tensor(struct snapshot *s)
{
    if (s->tensor_count == s->tensor_cap && grow_tensors(s, s->tensor_cap ? 2 * s->tensor_cap : 16) < 0)
        return -ENOMEM;
    return grow(&s->sources, s->source_count, &s->source_cap, sizeof *s->sources);
}

/* Is the box less than the tensor? */
static bool is_partial(const struct tensor *t)
{
    return memcmp(t->lengths, t->shape, t->dims * sizeof *t->shape) != 0 && !box_is_empty(t->dims, t->shape);
}

static bool room_in_index(struct snapshot *s, size_t more)
{
    struct buf *b = &s->index;
    size_t cap = b->cap + b->cap / 2 > b->n + more ? b->cap + b->cap / 2 : b->n + more;
    if (b->cap - b->n >= more)
        return true;
    if (!loan_grow(s->lender, &s->index_memory, b->n, cap))
        return false;
    b->p = s->index_memory.memory;
    b->cap = b->max = cap; /* grows here, and nowhere else */
    return true;
}

/* There is room but for the record. */
static int add_record(struct snapshot *s, const struct tensor *x, struct err *e)
{
    bool room = room_in_index(s, RECORD_BYTES_MAX + x->name.n);
    if (!room || s->index.n > INDEX_BYTES_MAX) {
        s->incomplete = true; /* its name is noted */
        return !room ? no_memory(e)
                     : err_set(e, ERR_LIMIT,
                               "the tensors added so far take %zu bytes of index, at most %u are "
                               "allowed; save fewer or shorter-named tensors per rank",
                               s->index.n, INDEX_BYTES_MAX);
    }
    s->records[s->tensor_count++] = (uint32_t)(s->index.n - s->records_at);
    record_put(&s->index, x, !s->alone);
    if (s->partial == 0 && is_partial(x))
        s->partial = s->tensor_count;
    return 0;
}

int snapshot_tensor(struct snapshot *s, struct larder *c, const struct larder_tensor *t, struct err *e)
{
    struct tensor x;
    struct item item;
    struct device *d = NULL;
    uint32_t i = s->tensor_count, chunk = 0, offset = 0;
    tensor_of_public(t, &x);
    int rc = check_tensor(s, t, &x, e);
    if (rc < 0)
        return rc;
    if (room_for_tensor(s) < 0)
        return no_memory(e);
    rc = item_of(s, t, &x, &item, e);
    if (rc == 0)
        rc = place_of(c, t, &x, &item, &d, e);
    if (rc == 0)
        rc = add_name(s, x.name, i, e);
    if (rc == 0)
        rc = add_record(s, &x, e);
    if (rc < 0)
        return rc;
    if (d)
        add_source(s, d, t->stream);
    s->tensor_items[i] = item;
    rc = plan_item(s, i, t->priority, d, x.dtype, x.bytes, &chunk, &offset, e);
    record_set_place(record_of(s, i), chunk, offset);
    return rc;
}

int snapshot_alias(struct snapshot *s, const char *name, const char *of, struct err *e)
{
    if (!name || !of)
        return err_set(e, ERR_INVALID, "an alias needs its own name and that of a tensor");
    uint32_t tensor = 0;
    struct tensor probe = {.name = slice_str(name), .dtype = DTYPE_U8};
    struct slice target = slice_str(of);
    uint64_t bytes;
    int rc = may_add(s, e);
    if (rc == 0)
        rc = tensor_check(&probe, &bytes, e); /* the name follows the same rules */
    if (rc < 0)
        return rc;
    if (find_tensor(s, target, &tensor) < 0)
        return name_error(&target, "is not a tensor of this save; add it before its alias", e);
    if (s->alias_count >= TENSORS_MAX)
        return err_set(e, ERR_LIMIT, "more than %u aliases in one rank's part", TENSORS_MAX);
    if (grow(&s->aliases, s->alias_count, &s->alias_cap, sizeof *s->aliases) < 0)
        return no_memory(e);
    uint8_t *kept = names_alloc(&s->memory, probe.name.n);
    if (!kept)
        return no_memory(e);
    rc = add_name(s, probe.name, ALIAS | s->alias_count, e);
    if (rc < 0)
        return rc;
    memcpy(kept, probe.name.p, probe.name.n);
    s->aliases[s->alias_count++] = (struct alias){.name = SLICE(kept, probe.name.n), .tensor = tensor};
    return 0;
}

static int blob_name_check(const char *name, struct err *e)
{
    size_t n = name ? strlen(name) : 0;
    char text[160];
    if (n == 0 || n > NAME_BYTES_MAX)
        return err_set(e, ERR_INVALID, "a blob's name has %zu bytes; expected 1 to %u", n, NAME_BYTES_MAX);
    if (!utf8_valid(name, n))
        return err_set(e, ERR_INVALID, "blob \"%s\": its name is not UTF-8",
                       err_quote(text, sizeof text, name, n));
    return 0;
}

int snapshot_blob(struct snapshot *s, const char *name, const void *p, size_t n, struct err *e)
{
    int rc = may_add(s, e);
    if (rc == 0)
        rc = blob_name_check(name, e);
    if (rc < 0)
        return rc;
    if (n > 0 && !p)
        return err_set(e, ERR_INVALID, "blob \"%s\" has %zu bytes but its data is NULL", name, n);
    if (n > 0 && (rc = device_check(NULL, p, (const uint8_t *)p + n, e)) < 0)
        return err_prepend(e, "blob \"%s\"", name);
    if (s->blob_count >= BLOBS_MAX)
        return err_set(e, ERR_LIMIT, "more than %u blobs in one rank's part", BLOBS_MAX);
    uint32_t cap = s->blob_cap;
    if (grow(&s->blobs, s->blob_count, &cap, sizeof *s->blobs) < 0 ||
        grow(&s->blob_items, s->blob_count, &s->blob_cap, sizeof *s->blob_items) < 0)
        return no_memory(e);
    struct slice kept;
    rc = names_add(&s->memory, slice_str(name), s->blob_count, &kept);
    if (rc == -EEXIST)
        return err_set(e, ERR_INVALID, "blob \"%s\" was added to this save before", name);
    if (rc < 0)
        return no_memory(e);
    uint32_t i = s->blob_count++;
    s->blob_items[i] = (struct item){
        .data = n > 0 ? p : NULL, .bytes = n <= SMALL_BYTES_MAX ? (uint32_t)n : 0, .next = NO_ITEM};
    s->blobs[i] = (struct blob){.name = kept, .bytes = n};
    return plan_item(s, BLOB_ITEM | i, 0, NULL, DTYPE_U8, n, &s->blobs[i].first_chunk, &s->blobs[i].offset,
                     e);
}

/* ---- taking it ---- */

static void prepare(const struct snapshot *s, uint32_t i, struct box_copy *out)
{
    struct tensor t;
    const struct item *item = item_at(s, i);
    const uint64_t begin[TENSOR_DIMS_MAX] = {0};
    snapshot_get(s, i, &t);
    box_copy_init(out, t.dtype, t.dims, t.lengths, begin, t.lengths, item_strides(item),
                  (uint8_t *)item_data(item));
}

static void take_item(const struct snapshot *s, uint32_t i, uint64_t offset, size_t n, uint8_t *out)
{
    const struct item *item = item_at(s, i);
    struct box_copy b;
    if (!item->strided) {
        stream_copy(out, item_data(item) + offset, n);
        return;
    }
    prepare(s, i, &b);
    box_gather(&b, offset, n, out);
}

/* Tensors of a shared chunk that lie one behind the other, as in a flat buffer of parameters, are one copy:
 * its bytes, from item i on. */
static size_t run_of(const struct snapshot *s, uint32_t i, uint32_t *next)
{
    const struct item *item = item_at(s, i), *after;
    const uint8_t *data = item->data;
    size_t n = item->bytes;
    for (*next = item->next; !item->strided && *next != NO_ITEM; *next = after->next) {
        after = item_at(s, *next);
        if (after->strided || after->data != data + n)
            break;
        n += after->bytes;
    }
    return n;
}

void snapshot_take(const struct snapshot *s, uint32_t chunk, uint8_t *out)
{
    const struct planned_chunk *c = &s->chunks[chunk];
    if (!c->shared) {
        take_item(s, c->first, c->offset, c->bytes, out);
        return;
    }
    for (uint32_t i = c->first, next; i != NO_ITEM; i = next) {
        size_t n = run_of(s, i, &next);
        take_item(s, i, 0, n, out);
        out += n;
    }
}

struct device *snapshot_device(const struct snapshot *s, uint32_t chunk)
{
    return s->groups[s->chunks[chunk].group].device;
}

static int copy_strided(const struct snapshot *s, uint32_t i, uint64_t offset, size_t n, struct device *d,
                        uint8_t *out, struct err *e)
{
    struct box_copy b;
    prepare(s, i, &b);
    return transfer(d->out, &d->packer_out, MEMORY_OUT, &b, offset, n, out, e);
}

static int copy_shared(const struct snapshot *s, uint32_t first, struct device *d, uint8_t *out,
                       struct err *e)
{
    int rc = 0;
    for (uint32_t i = first, next; rc == 0 && i != NO_ITEM; i = next) {
        const struct item *item = item_at(s, i);
        size_t n = run_of(s, i, &next);
        rc = item->strided ? copy_strided(s, i, 0, n, d, out, e)
                           : memory_copy(d->out, MEMORY_OUT, out, item->data, n, e);
        out += n;
    }
    return rc;
}

int snapshot_copy(const struct snapshot *s, uint32_t chunk, uint8_t *out, struct err *e)
{
    const struct planned_chunk *c = &s->chunks[chunk];
    struct device *d = snapshot_device(s, chunk);
    if (c->shared)
        return copy_shared(s, c->first, d, out, e);
    const struct item *item = item_at(s, c->first);
    if (item->strided)
        return copy_strided(s, c->first, c->offset, c->bytes, d, out, e);
    return memory_copy(d->out, MEMORY_OUT, out, item_data(item) + c->offset, c->bytes, e);
}

void snapshot_hash(struct snapshot *s, uint32_t chunk, const uint8_t *bytes)
{
    const struct planned_chunk *c = &s->chunks[chunk];
    if (!c->shared || s->alone)
        return;
    for (uint32_t i = c->first; i != NO_ITEM; i = item_at(s, i)->next) {
        size_t n = item_at(s, i)->bytes;
        if (!(i & BLOB_ITEM))
            record_set_hash(record_of(s, i), hash128(bytes, n));
        bytes += n;
    }
}

/* ---- the index ---- */

/* Before the first record of an index of so many chunks. */
static size_t head_bytes(uint32_t chunks)
{
    return index_public_bytes(chunks) + index_private_head_bytes(chunks);
}

/* What is in it besides the records. */
static struct index_private rest_of(const struct snapshot *s)
{
    return (struct index_private){.tensor_count = s->tensor_count,
                                  .aliases = s->aliases,
                                  .alias_count = s->alias_count,
                                  .blobs = s->blobs,
                                  .blob_count = s->blob_count,
                                  .chunk_count = s->chunk_count};
}

int snapshot_end(struct snapshot *s, struct err *e)
{
    struct index_private x = rest_of(s);
    if (s->incomplete)
        return err_set(e, ERR_INVALID, "a tensor or blob could not be added to this save; begin another");
    if (s->closed)
        return 0;
    size_t head = head_bytes(s->chunk_count), before = s->records_at;
    size_t rest = index_private_rest_bytes(&x) + TAG_BYTES, all = head + (s->index.n - before) + rest;
    if (all > INDEX_BYTES_MAX)
        return err_set(e, ERR_LIMIT,
                       "the index of this part would take %zu bytes, at most %u are allowed; save fewer or "
                       "shorter-named tensors, aliases and blobs per rank",
                       all, INDEX_BYTES_MAX);
    return room_in_index(s, (head > before ? head - before : 0) + rest) ? 0 : no_memory(e);
}

int snapshot_close(struct snapshot *s, struct err *e)
{
    struct index_private x = rest_of(s);
    if (s->closed)
        return 0;
    int rc = sort_chunks(s, e);
    if (rc < 0)
        return rc;
    s->closed = true; /* whatever follows: chunks have other numbers than those that are being filled */
    rc = index_private_finish(&x, index_public_bytes(s->chunk_count), s->records_at, &s->index, e);
    s->records_at = head_bytes(s->chunk_count);
    s->incomplete |= rc < 0;
    return rc;
}

/* ---- beginning and end ---- */

void snapshot_expect(struct snapshot *s, const struct snapshot_size *size)
{
    size_t slots = NAMES_MIN, n = size->tensors;
    while (slots < 2 * n)
        slots *= 2;
    if (n == 0 || grow_names(s, slots) < 0 || grow_tensors(s, size->tensors) < 0 ||
        !room_in_index(s, size->index_bytes + RECORD_BYTES_MAX + TENSOR_NAME_BYTES_MAX))
        return;
    s->records_at = head_bytes(size->chunks);
    buf_zeros(&s->index, s->records_at);
    if (s->index.failed) {
        buf_reset(&s->index);
        s->records_at = 0;
    }
}

struct snapshot_size snapshot_size(const struct snapshot *s)
{
    return (struct snapshot_size){
        .tensors = s->tensor_count, .chunks = s->chunk_count, .index_bytes = s->index.n + TAG_BYTES};
}

void snapshot_forget(struct snapshot *s)
{
    loan_end(s->lender, &s->index_memory);
    loan_end(s->lender, &s->records_memory);
    loan_end(s->lender, &s->items_memory);
    loan_end(s->lender, &s->names.memory);
    s->index = (struct buf){0};
    s->records = NULL;
    s->tensor_items = NULL;
    s->tensor_cap = 0;
    s->names = (struct name_set){0};
}

void snapshot_free(struct snapshot *s)
{
    snapshot_forget(s);
    names_free(&s->memory);
    free(s->aliases);
    free(s->blobs);
    free(s->blob_items);
    free(s->chunks);
    free(s->groups);
    free(s->sources);
    *s = (struct snapshot){0};
}
