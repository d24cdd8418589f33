/* SPDX-License-Identifier: Apache-2.0 */
#include "client/plan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/landing.h"

#define SMALL_BYTES_MAX (CHUNK_PLAIN_BYTES_MAX / 4) /* as format/index.h says */

static int no_memory(struct err *e)
{
    return err_set(e, ERR_NO_MEMORY, "no memory for the plan of a restore");
}

static void *grow(void *table, size_t count, size_t *cap, size_t size)
{
    if (count < *cap)
        return table;
    size_t bigger = *cap ? *cap * 2 : 64;
    void *p = reallocarray(table, bigger, size);
    if (p)
        *cap = bigger;
    return p;
}

/* ---- copies ---- */

static const struct box *region_of(const struct plan *p, const struct copy *c, struct box *whole)
{
    if (c->region != WHOLE_REQUEST)
        return &p->regions.boxes[c->region];
    const struct request *r = &p->requests[c->request];
    uint32_t dims = c->piece.tensor->dims;
    memcpy(whole->offsets, r->offsets, dims * sizeof *whole->offsets);
    memcpy(whole->lengths, r->lengths, dims * sizeof *whole->lengths);
    return whole;
}

/* Where the region of the request's box begins in memory. */
static uint8_t *memory_of(const struct request *r, const struct tensor *t, const struct box *region)
{
    uint8_t *memory = r->memory;
    for (uint32_t i = 0; i < t->dims; i++) {
        uint64_t into = region->offsets[i] - r->offsets[i];
        if (dtype_pack(t->dtype) > 1 && i + 1 == t->dims)
            into = into / dtype_pack(t->dtype) * dtype_pack(t->dtype) * dtype_bits(t->dtype) / 8;
        memory += (int64_t)into * r->strides[i];
    }
    return memory;
}

void plan_copy_request(const struct plan *p, const struct copy *c, struct box *box, struct request *out)
{
    const struct request *r = &p->requests[c->request];
    const struct box *region = region_of(p, c, box);
    if (region != box)
        *box = *region;
    *out = (struct request){.saved = r->saved,
                            .offsets = box->offsets,
                            .lengths = box->lengths,
                            .strides = r->strides,
                            .memory = memory_of(r, c->piece.tensor, box),
                            .device = r->device,
                            .stream = r->stream};
}

/* From packed bytes of the piece to the request's memory. */
static void prepare(const struct plan *p, const struct copy *c, struct box_copy *out)
{
    const struct tensor *t = c->piece.tensor;
    const struct request *r = &p->requests[c->request];
    struct box whole;
    const struct box *region = region_of(p, c, &whole);
    uint64_t begin[TENSOR_DIMS_MAX];
    for (uint32_t i = 0; i < t->dims; i++)
        begin[i] = region->offsets[i] - t->offsets[i];
    uint8_t *memory = memory_of(r, t, region);
    box_copy_init(out, t->dtype, t->dims, t->lengths, begin, region->lengths, r->strides, memory);
}

static int add_use(struct plan *p, uint32_t rank, uint32_t chunk, struct err *e)
{
    struct use *uses = grow(p->uses, p->use_count, &p->use_cap, sizeof *uses);
    if (!uses)
        return no_memory(e);
    p->uses = uses;
    uses[p->use_count++] = (struct use){.rank = rank, .chunk = chunk, .copy = (uint32_t)(p->copy_count - 1)};
    return 0;
}

/* The chunks of a large tensor that hold something of the region. */
static int add_uses(struct plan *p, const struct copy *c, struct err *e)
{
    const struct tensor *t = c->piece.tensor;
    if (t->bytes <= SMALL_BYTES_MAX)
        return add_use(p, c->piece.rank, t->first_chunk, e);
    struct box_copy b;
    prepare(p, c, &b);
    uint32_t chunk = t->first_chunk;
    for (uint64_t at = 0; at < t->bytes; at += CHUNK_PLAIN_BYTES_MAX, chunk++) {
        uint64_t n = t->bytes - at < CHUNK_PLAIN_BYTES_MAX ? t->bytes - at : CHUNK_PLAIN_BYTES_MAX;
        int rc = box_touches(&b, at, n) ? add_use(p, c->piece.rank, chunk, e) : 0;
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int add_copy(struct plan *p, uint32_t request, uint32_t region, const struct piece *piece,
                    struct err *e)
{
    struct copy *copies = grow(p->copies, p->copy_count, &p->copy_cap, sizeof *copies);
    if (!copies || p->copy_count >= UINT32_MAX)
        return no_memory(e);
    p->copies = copies;
    copies[p->copy_count++] = (struct copy){.request = request, .region = region, .piece = *piece};
    return add_uses(p, &copies[p->copy_count - 1], e);
}

static bool same_box(uint32_t dims, const uint64_t *ao, const uint64_t *al, const uint64_t *bo,
                     const uint64_t *bl)
{
    return memcmp(ao, bo, dims * sizeof *ao) == 0 && memcmp(al, bl, dims * sizeof *al) == 0;
}

/* What of the request no piece has given yet shrinks with each piece that meets it. */
static int cover_by_pieces(struct plan *p, const struct catalog *c, uint32_t request, struct box_set *left,
                           struct box_set *taken, struct err *e)
{
    const struct request *r = &p->requests[request];
    for (uint32_t i = 0; i < r->saved->pieces && left->count > 0; i++) {
        const struct piece *piece = &c->pieces[r->saved->first + i];
        const struct tensor *t = piece->tensor;
        if (p->usable && !p->usable(p->arg, piece))
            continue;
        struct box cut = {0};
        memcpy(cut.offsets, t->offsets, sizeof cut.offsets);
        memcpy(cut.lengths, t->lengths, sizeof cut.lengths);
        taken->count = 0;
        if (box_set_cut(left, t->dims, &cut, taken) < 0)
            return no_memory(e);
        for (size_t k = 0; k < taken->count; k++) {
            const struct box *b = &taken->boxes[k];
            uint32_t region = WHOLE_REQUEST;
            if (!same_box(t->dims, b->offsets, b->lengths, r->offsets, r->lengths)) {
                region = (uint32_t)p->regions.count;
                if (region == WHOLE_REQUEST || box_set_add(&p->regions, b) < 0)
                    return no_memory(e);
            }
            int rc = add_copy(p, request, region, piece, e);
            if (rc < 0)
                return rc;
        }
    }
    return 0;
}

static int cover(struct plan *p, const struct catalog *c, uint32_t request, struct box_set *left,
                 struct box_set *taken, struct err *e)
{
    const struct request *r = &p->requests[request];
    uint32_t dims = c->pieces[r->saved->first].tensor->dims;
    struct box all = {0};
    if (box_is_empty(dims, r->lengths))
        return 0;
    memcpy(all.offsets, r->offsets, dims * sizeof *all.offsets);
    memcpy(all.lengths, r->lengths, dims * sizeof *all.lengths);
    left->count = 0;
    if (box_set_add(left, &all) < 0)
        return no_memory(e);
    int rc = cover_by_pieces(p, c, request, left, taken, e);
    if (rc == 0 && left->count > 0) {
        char name[160], box[160];
        rc = err_set(e, ERR_MISMATCH, "tensor \"%s\": elements %s were saved by no rank",
                     err_quote(name, sizeof name, r->saved->name.p, r->saved->name.n),
                     box_text(box, sizeof box, dims, left->boxes[0].offsets, left->boxes[0].lengths));
    }
    return rc;
}

/* ---- chunks ---- */

static int order_uses(const void *pa, const void *pb)
{
    const struct use *a = pa, *b = pb;
    if (a->rank != b->rank)
        return a->rank < b->rank ? -1 : 1;
    if (a->chunk != b->chunk)
        return a->chunk < b->chunk ? -1 : 1;
    return a->copy < b->copy ? -1 : a->copy > b->copy;
}

static int group_uses(struct plan *p, struct part *const *parts, struct err *e)
{
    qsort(p->uses, p->use_count, sizeof *p->uses, order_uses);
    p->items = calloc(p->use_count + 1, sizeof *p->items);
    p->first_use = calloc(p->use_count + 1, sizeof *p->first_use);
    if (!p->items || !p->first_use)
        return no_memory(e);
    for (size_t i = 0; i < p->use_count; i++) {
        const struct use *u = &p->uses[i];
        if (i > 0 && u->rank == u[-1].rank && u->chunk == u[-1].chunk)
            continue;
        p->first_use[p->item_count] = i;
        p->items[p->item_count++] = (struct fetch_item){.part = parts[u->rank], .chunk = u->chunk};
    }
    p->first_use[p->item_count] = p->use_count;
    return 0;
}

int plan_create(const struct catalog *c, struct part *const *parts, const struct request *requests,
                size_t request_count, bool (*usable)(void *arg, const struct piece *p), void *arg,
                struct plan *out, struct err *e)
{
    struct plan p = {.requests = requests, .usable = usable, .arg = arg};
    struct box_set left = {0}, taken = {0};
    int rc = request_count < UINT32_MAX ? 0 : no_memory(e);
    for (size_t i = 0; rc == 0 && i < request_count; i++)
        rc = cover(&p, c, (uint32_t)i, &left, &taken, e);
    if (rc == 0 && p.use_count > 0)
        rc = group_uses(&p, parts, e);
    box_set_free(&left);
    box_set_free(&taken);
    if (rc < 0)
        plan_free(&p);
    else
        *out = p;
    return rc;
}

/* ---- placing ---- */

static int place(const struct plan *p, const struct use *u, uint8_t *plain, uint32_t n,
                 struct landing *landing, struct err *e)
{
    const struct copy *c = &p->copies[u->copy];
    const struct tensor *t = c->piece.tensor;
    struct box_copy b;
    uint64_t offset = (uint64_t)(u->chunk - t->first_chunk) * CHUNK_PLAIN_BYTES_MAX;
    struct device *d = p->requests[c->request].device;
    prepare(p, c, &b);
    if (t->bytes <= SMALL_BYTES_MAX) {
        check(t->offset <= n && t->bytes <= n - t->offset); /* index_private_decode saw to it */
        plain += t->offset;
        n = (uint32_t)t->bytes;
        offset = 0;
    }
    if (d)
        return landing_copy(landing, d, &b, offset, n, plain, e);
    box_scatter(&b, offset, n, plain);
    return 0;
}

uint8_t *plan_straight(const struct plan *p, size_t item, uint32_t n)
{
    const struct use *u = &p->uses[p->first_use[item]];
    const struct copy *c = &p->copies[u->copy];
    const struct tensor *t = c->piece.tensor;
    struct box_copy b;
    if (p->first_use[item + 1] - p->first_use[item] > 1 || t->bytes <= SMALL_BYTES_MAX ||
        p->requests[c->request].device)
        return NULL;
    prepare(p, c, &b);
    return box_straight(&b, (uint64_t)(u->chunk - t->first_chunk) * CHUNK_PLAIN_BYTES_MAX, n);
}

int plan_place(const struct plan *p, size_t item, uint8_t *plain, uint32_t n, struct landing *landing,
               struct err *e)
{
    int rc = 0;
    for (size_t i = p->first_use[item]; rc == 0 && i < p->first_use[item + 1]; i++)
        rc = place(p, &p->uses[i], plain, n, landing, e);
    return rc;
}

void plan_free(struct plan *p)
{
    free(p->copies);
    box_set_free(&p->regions);
    free(p->uses);
    free(p->items);
    free(p->first_use);
    *p = (struct plan){0};
}
