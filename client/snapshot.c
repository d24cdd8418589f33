/* SPDX-License-Identifier: Apache-2.0 */
#include "client/snapshot.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/stream.h"
#include "client/transfer.h"
#include "format/base/utf8.h"

#define SMALL_BYTES_MAX (CHUNK_PLAIN_BYTES_MAX / 4) /* as format/index.h says */

/* ---- growing tables ---- */

static int grow(void *table, uint32_t count, uint32_t *cap, size_t size)
{
    void **t = table;
    if (count < *cap)
        return 0;
    uint32_t bigger = *cap ? *cap * 2 : 16;
    void *p = reallocarray(*t, bigger, size);
    if (!p)
        return -ENOMEM;
    *t = p;
    *cap = bigger;
    return 0;
}

static int no_memory(struct err *e)
{
    return err_set(e, ERR_NO_MEMORY, "no memory for the description of what is saved");
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
    for (uint32_t i = 0; i < s->tensor_count; i++)
        if (s->tensors[i].bytes > 0)
            s->tensors[i].first_chunk = to[s->tensors[i].first_chunk];
    for (uint32_t i = 0; i < s->blob_count; i++)
        if (s->blobs[i].bytes > 0)
            s->blobs[i].first_chunk = to[s->blobs[i].first_chunk];
}

int snapshot_end(struct snapshot *s, struct err *e)
{
    if (s->incomplete)
        return err_set(e, ERR_INVALID, "a tensor or blob could not be added to this save; begin another");
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
    *out = (struct tensor){.name = SLICE(name, t->name_bytes ? t->name_bytes : strlen(name)),
                           .dtype = (enum dtype)t->dtype,
                           .dims = t->dims};
    unsigned dims = t->dims <= TENSOR_DIMS_MAX ? t->dims : TENSOR_DIMS_MAX;
    bool whole = all_zero(t->lengths, dims) && all_zero(t->offsets, dims);
    memcpy(out->shape, t->shape, dims * sizeof *out->shape);
    memcpy(out->offsets, t->offsets, dims * sizeof *out->offsets);
    memcpy(out->lengths, whole ? t->shape : t->lengths, dims * sizeof *out->lengths);
}

static int name_error(const struct slice *name, const char *what, struct err *e)
{
    char text[160];
    return err_set(e, ERR_INVALID, "%s \"%s\" %s", "tensor", err_quote(text, sizeof text, name->p, name->n),
                   what);
}

static int priority_error(const struct slice *name, int priority, struct err *e)
{
    char text[64];
    snprintf(text, sizeof text, "has priority %d; expected -%d to %d", priority, LARDER_PRIORITY_MAX,
             LARDER_PRIORITY_MAX);
    return name_error(name, text, e);
}

static int add_name(struct snapshot *s, struct slice *name, uint32_t value, struct err *e)
{
    struct slice kept;
    int rc = names_add(&s->names, *name, value, &kept);
    if (rc == -EEXIST)
        return name_error(name, "was added to this save before; every name is saved once per rank", e);
    if (rc < 0)
        return no_memory(e);
    *name = kept;
    return 0;
}

/* Strides that matter are kept beside the names. */
static int item_of(struct snapshot *s, const struct larder_tensor *t, const struct tensor *x,
                   struct item *out, struct err *e)
{
    *out = (struct item){.data = t->data, .bytes = x->bytes, .next = NO_ITEM};
    if (x->bytes == 0) {
        out->data = NULL;
        return 0;
    }
    if (!t->data)
        return name_error(&x->name, "has elements but its data is NULL", e);
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
    if (is_packed)
        return 0;
    int64_t *kept = names_alloc(&s->names, x->dims * sizeof *kept);
    if (!kept)
        return no_memory(e);
    memcpy(kept, strides, x->dims * sizeof *kept);
    out->strides = kept;
    return 0;
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
    int64_t low, high, packed[TENSOR_DIMS_MAX], zero[TENSOR_DIMS_MAX] = {0};
    *out = NULL;
    if (x->bytes == 0 || !c)
        return 0;
    int rc = device_of(c, t, out, e);
    if (rc == 0 && !item->strides)
        rc = box_strides(x->dtype, x->dims, x->lengths, zero, false, packed, e);
    if (rc == 0)
        rc =
            box_extent(x->dtype, x->dims, x->lengths, item->strides ? item->strides : packed, &low, &high, e);
    if (rc == 0)
        rc = device_check(*out, item->data + low, item->data + high, e);
    if (rc == 0)
        return 0;
    char text[160];
    return err_prepend(e, "tensor \"%s\"", err_quote(text, sizeof text, x->name.p, x->name.n));
}

int snapshot_tensor(struct snapshot *s, struct larder *c, const struct larder_tensor *t, struct err *e)
{
    struct tensor x;
    struct item item;
    struct device *d;
    tensor_of_public(t, &x);
    int rc = tensor_check(&x, &x.bytes, e);
    if (rc == 0 && (t->priority < -LARDER_PRIORITY_MAX || t->priority > LARDER_PRIORITY_MAX))
        rc = priority_error(&x.name, t->priority, e);
    if (rc == 0 && s->tensor_count >= TENSORS_MAX)
        rc = err_set(e, ERR_LIMIT,
                     "more than %u tensors in one rank's part; save with more ranks or join small tensors",
                     TENSORS_MAX);
    if (rc < 0)
        return rc;
    uint32_t cap = s->tensor_cap;
    if (grow(&s->tensors, s->tensor_count, &cap, sizeof *s->tensors) < 0 ||
        grow(&s->tensor_items, s->tensor_count, &s->tensor_cap, sizeof *s->tensor_items) < 0 ||
        grow(&s->sources, s->source_count, &s->source_cap, sizeof *s->sources) < 0)
        return no_memory(e);
    rc = item_of(s, t, &x, &item, e);
    if (rc == 0)
        rc = place_of(c, t, &x, &item, &d, e);
    if (rc == 0)
        rc = add_name(s, &x.name, s->tensor_count, e);
    if (rc < 0)
        return rc;
    if (d)
        add_source(s, d, t->stream);
    uint32_t i = s->tensor_count++;
    s->tensor_items[i] = item;
    s->tensors[i] = x;
    return plan_item(s, i, t->priority, d, x.dtype, x.bytes, &s->tensors[i].first_chunk,
                     &s->tensors[i].offset, e);
}

int snapshot_alias(struct snapshot *s, const char *name, const char *of, struct err *e)
{
    if (!name || !of)
        return err_set(e, ERR_INVALID, "an alias needs its own name and that of a tensor");
    uint32_t tensor = 0;
    struct tensor probe = {.name = slice_str(name), .dtype = DTYPE_U8};
    struct slice target = slice_str(of);
    uint64_t bytes;
    int rc = tensor_check(&probe, &bytes, e); /* the name follows the same rules */
    if (rc < 0)
        return rc;
    if (names_find(&s->names, target, &tensor) < 0 || tensor >= s->tensor_count)
        return name_error(&target, "is not a tensor of this save; add it before its alias", e);
    if (s->alias_count >= TENSORS_MAX)
        return err_set(e, ERR_LIMIT, "more than %u aliases in one rank's part", TENSORS_MAX);
    if (grow(&s->aliases, s->alias_count, &s->alias_cap, sizeof *s->aliases) < 0)
        return no_memory(e);
    rc = add_name(s, &probe.name, NO_ITEM, e);
    if (rc < 0)
        return rc;
    s->aliases[s->alias_count++] = (struct alias){.name = probe.name, .tensor = tensor};
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
    int rc = blob_name_check(name, e);
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
    rc = names_add(&s->blob_names, slice_str(name), s->blob_count, &kept);
    if (rc == -EEXIST)
        return err_set(e, ERR_INVALID, "blob \"%s\" was added to this save before", name);
    if (rc < 0)
        return no_memory(e);
    uint32_t i = s->blob_count++;
    s->blob_items[i] = (struct item){.data = n > 0 ? p : NULL, .bytes = n, .next = NO_ITEM};
    s->blobs[i] = (struct blob){.name = kept, .bytes = n};
    return plan_item(s, BLOB_ITEM | i, 0, NULL, DTYPE_U8, n, &s->blobs[i].first_chunk, &s->blobs[i].offset,
                     e);
}

/* ---- taking it ---- */

static void prepare(const struct snapshot *s, uint32_t i, struct box_copy *out)
{
    const struct tensor *t = &s->tensors[i];
    const struct item *item = item_at(s, i);
    const uint64_t begin[TENSOR_DIMS_MAX] = {0};
    box_copy_init(out, t->dtype, t->dims, t->lengths, begin, t->lengths, item->strides,
                  (uint8_t *)item->data);
}

static void take_item(const struct snapshot *s, uint32_t i, uint64_t offset, size_t n, uint8_t *out)
{
    const struct item *item = item_at(s, i);
    struct box_copy b;
    if (!item->strides) {
        stream_copy(out, item->data + offset, n);
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
    size_t n = (size_t)item->bytes;
    for (*next = item->next; !item->strides && *next != NO_ITEM; *next = after->next) {
        after = item_at(s, *next);
        if (after->strides || after->data != item->data + n)
            break;
        n += (size_t)after->bytes;
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
        rc = item->strides ? copy_strided(s, i, 0, n, d, out, e)
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
    if (item->strides)
        return copy_strided(s, c->first, c->offset, c->bytes, d, out, e);
    return memory_copy(d->out, MEMORY_OUT, out, item->data + c->offset, c->bytes, e);
}

void snapshot_hash(struct snapshot *s, uint32_t chunk, const uint8_t *bytes)
{
    const struct planned_chunk *c = &s->chunks[chunk];
    if (!c->shared)
        return;
    for (uint32_t i = c->first; i != NO_ITEM; i = item_at(s, i)->next) {
        size_t n = (size_t)item_at(s, i)->bytes;
        if (!(i & BLOB_ITEM))
            s->tensors[i].plain_hash = hash128(bytes, n);
        bytes += n;
    }
}

void snapshot_index(const struct snapshot *s, struct index_private *out)
{
    *out = (struct index_private){
        .tensors = s->tensors,
        .tensor_count = s->tensor_count,
        .aliases = s->aliases,
        .alias_count = s->alias_count,
        .blobs = s->blobs,
        .blob_count = s->blob_count,
    };
}

void snapshot_free(struct snapshot *s)
{
    names_free(&s->names);
    names_free(&s->blob_names);
    free(s->tensors);
    free(s->tensor_items);
    free(s->aliases);
    free(s->blobs);
    free(s->blob_items);
    free(s->chunks);
    free(s->groups);
    free(s->sources);
    *s = (struct snapshot){0};
}
