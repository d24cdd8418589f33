/* SPDX-License-Identifier: Apache-2.0 */
#include "client/plan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/landing.h"

#define USES_AHEAD      16u /* whose tensors are on their way from memory while one is placed */
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

/* ---- requests ---- */

struct asked { /* a request's box, spelled out */
    struct box box;
    int64_t strides[TENSOR_DIMS_MAX];
};

/* t: any piece of its tensor. */
static void spell(const struct request *r, const struct tensor *t, struct asked *out)
{
    static const int64_t packed[TENSOR_DIMS_MAX];
    size_t n = t->dims * sizeof(uint64_t);
    *out = (struct asked){0};
    if (r->box) {
        memcpy(out->box.offsets, r->box, n);
        memcpy(out->box.lengths, r->box + t->dims, n);
        memcpy(out->strides, r->box + 2 * t->dims, n);
        return;
    }
    memcpy(out->box.lengths, t->shape, n);
    int rc = box_strides(t->dtype, t->dims, t->shape, packed, true, out->strides, NULL);
    check(rc == 0); /* it was, when it was asked for */
}

/* Does the request take just the piece's bytes, packed as they are? */
static bool is_plain(const struct request *r, const struct tensor *t)
{
    bool whole = !r->box;
    for (uint32_t i = 0; i < t->dims; i++)
        whole &= t->lengths[i] == t->shape[i];
    return whole;
}

/* ---- copies ---- */

/* Where the region of the request's box begins in memory. */
static uint8_t *memory_of(const struct request *r, const struct asked *a, const struct tensor *t,
                          const struct box *region)
{
    uint8_t *memory = r->memory;
    for (uint32_t i = 0; i < t->dims; i++) {
        uint64_t into = region->offsets[i] - a->box.offsets[i];
        if (dtype_pack(t->dtype) > 1 && i + 1 == t->dims)
            into = into / dtype_pack(t->dtype) * dtype_pack(t->dtype) * dtype_bits(t->dtype) / 8;
        memory += (int64_t)into * a->strides[i];
    }
    return memory;
}

void plan_copy_request(const struct plan *p, const struct copy *c, uint32_t nth,
                       uint64_t box[3 * TENSOR_DIMS_MAX], struct request *out)
{
    struct tensor room;
    const struct tensor *t = catalog_tensor(p->catalog, c->piece, &room);
    struct request one = p->requests[c->request];
    const struct request *r = &one;
    struct asked a;
    check(nth < one.count);
    if (nth > 0) {
        uint32_t begin = t->offset;
        t = catalog_tensor(p->catalog, c->piece + nth, &room);
        one.piece += nth;
        one.memory += t->offset - begin;
    }
    one.count = 1;
    spell(r, t, &a);
    const struct box *region = c->region == WHOLE_REQUEST ? &a.box : &p->regions.boxes[c->region];
    size_t n = t->dims * sizeof(uint64_t);
    memcpy(box, region->offsets, n);
    memcpy(box + t->dims, region->lengths, n);
    memcpy(box + 2 * t->dims, a.strides, n);
    *out = (struct request){.piece = r->piece,
                            .count = 1,
                            .box = box,
                            .memory = memory_of(r, &a, t, region),
                            .target = r->target};
}

/* From packed bytes of the piece, t, to the request's memory. */
static void prepare(const struct plan *p, const struct copy *c, const struct tensor *t, struct box_copy *out)
{
    const struct request *r = &p->requests[c->request];
    struct asked a;
    spell(r, t, &a);
    const struct box *region = c->region == WHOLE_REQUEST ? &a.box : &p->regions.boxes[c->region];
    uint64_t begin[TENSOR_DIMS_MAX];
    for (uint32_t i = 0; i < t->dims; i++)
        begin[i] = region->offsets[i] - t->offsets[i];
    box_copy_init(out, t->dtype, t->dims, t->lengths, begin, region->lengths, a.strides,
                  memory_of(r, &a, t, region));
}

static int add_use(struct plan *p, uint32_t chunk, struct err *e)
{
    struct use *uses = grow(p->uses, p->use_count, &p->use_cap, sizeof *uses);
    if (!uses)
        return no_memory(e);
    p->uses = uses;
    uses[p->use_count++] = (struct use){.chunk = chunk, .copy = (uint32_t)(p->copy_count - 1)};
    return 0;
}

/* The chunks of a large tensor that hold something of the region. */
static int add_uses(struct plan *p, const struct copy *c, const struct tensor *t, struct err *e)
{
    if (t->bytes <= SMALL_BYTES_MAX)
        return add_use(p, t->first_chunk, e);
    struct box_copy b;
    prepare(p, c, t, &b);
    uint32_t chunk = t->first_chunk;
    for (uint64_t at = 0; at < t->bytes; at += CHUNK_PLAIN_BYTES_MAX, chunk++) {
        uint64_t n = t->bytes - at < CHUNK_PLAIN_BYTES_MAX ? t->bytes - at : CHUNK_PLAIN_BYTES_MAX;
        int rc = box_touches(&b, at, n) ? add_use(p, chunk, e) : 0;
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int add_copy(struct plan *p, uint32_t request, uint32_t region, uint32_t piece, const struct tensor *t,
                    struct err *e)
{
    struct copy *copies = grow(p->copies, p->copy_count, &p->copy_cap, sizeof *copies);
    if (!copies || p->copy_count >= UINT32_MAX)
        return no_memory(e);
    p->copies = copies;
    copies[p->copy_count++] = (struct copy){.request = request, .region = region, .piece = piece};
    return add_uses(p, &copies[p->copy_count - 1], t, e);
}

static bool same_box(uint32_t dims, const struct box *a, const struct box *b)
{
    return memcmp(a->offsets, b->offsets, dims * sizeof *a->offsets) == 0 &&
           memcmp(a->lengths, b->lengths, dims * sizeof *a->lengths) == 0;
}

/* What of the request no piece has given yet shrinks with each piece that meets it. */
static int cover_by_pieces(struct plan *p, uint32_t request, const struct box *all, struct box_set *left,
                           struct box_set *taken, struct err *e)
{
    for (uint32_t piece = p->requests[request].piece; piece != NO_PIECE && left->count > 0;
         piece = catalog_next(p->catalog, piece)) {
        struct tensor room;
        const struct tensor *t = catalog_tensor(p->catalog, piece, &room);
        struct box cut;
        if (p->usable && !p->usable(p->arg, piece))
            continue;
        memcpy(cut.offsets, t->offsets, t->dims * sizeof *cut.offsets);
        memcpy(cut.lengths, t->lengths, t->dims * sizeof *cut.lengths);
        taken->count = 0;
        if (box_set_cut(left, t->dims, &cut, taken) < 0)
            return no_memory(e);
        for (size_t k = 0; k < taken->count; k++) {
            const struct box *b = &taken->boxes[k];
            uint32_t region = WHOLE_REQUEST;
            if (!same_box(t->dims, b, all)) {
                region = (uint32_t)p->regions.count;
                if (region == WHOLE_REQUEST || box_set_add(&p->regions, b) < 0)
                    return no_memory(e);
            }
            int rc = add_copy(p, request, region, piece, t, e);
            if (rc < 0)
                return rc;
        }
    }
    return 0;
}

static int cover(struct plan *p, uint32_t request, struct box_set *left, struct box_set *taken, struct err *e)
{
    const struct request *r = &p->requests[request];
    struct tensor room;
    const struct tensor *t = catalog_tensor(p->catalog, r->piece, &room);
    if (is_plain(r, t) && !p->usable) /* as nearly all are: the first piece has it all */
        return t->bytes > 0 ? add_copy(p, request, WHOLE_REQUEST, r->piece, t, e) : 0;
    struct asked a;
    spell(r, t, &a);
    if (box_is_empty(t->dims, a.box.lengths))
        return 0;
    left->count = 0;
    if (box_set_add(left, &a.box) < 0)
        return no_memory(e);
    int rc = cover_by_pieces(p, request, &a.box, left, taken, e);
    if (rc == 0 && left->count > 0) {
        char name[160], box[160];
        struct slice n = catalog_name(p->catalog, r->piece);
        rc = err_set(e, ERR_MISMATCH, "tensor \"%s\": elements %s were saved by no rank",
                     err_quote(name, sizeof name, n.p, n.n),
                     box_text(box, sizeof box, t->dims, left->boxes[0].offsets, left->boxes[0].lengths));
    }
    return rc;
}

/* ---- chunks ---- */

uint32_t plan_rank(const struct plan *p, const struct use *u)
{
    return p->catalog->world == 1 ? 0 : catalog_rank(p->catalog, p->copies[u->copy].piece);
}

static int order_uses(const void *pa, const void *pb, void *arg)
{
    const struct use *a = pa, *b = pb;
    const struct plan *p = arg;
    uint32_t a_rank = plan_rank(p, a), b_rank = plan_rank(p, b);
    if (a_rank != b_rank)
        return a_rank < b_rank ? -1 : 1;
    if (a->chunk != b->chunk)
        return a->chunk < b->chunk ? -1 : 1;
    return a->copy < b->copy ? -1 : a->copy > b->copy;
}

static bool new_chunk(const struct plan *p, size_t i)
{
    const struct use *u = &p->uses[i];
    return i == 0 || u->chunk != u[-1].chunk || plan_rank(p, u) != plan_rank(p, u - 1);
}

static int group_uses(struct plan *p, struct err *e)
{
    bool sorted = true;
    size_t n = 0;
    for (size_t i = 1; sorted && i < p->use_count; i++)
        sorted = order_uses(&p->uses[i - 1], &p->uses[i], p) <= 0;
    if (!sorted)
        qsort_r(p->uses, p->use_count, sizeof *p->uses, order_uses, p);
    for (size_t i = 0; i < p->use_count; i++)
        n += new_chunk(p, i);
    p->items = calloc(n + 1, sizeof *p->items);
    p->first_use = calloc(n + 1, sizeof *p->first_use);
    if (!p->items || !p->first_use)
        return no_memory(e);
    for (size_t i = 0; i < p->use_count; i++) {
        const struct use *u = &p->uses[i];
        if (!new_chunk(p, i))
            continue;
        p->first_use[p->item_count] = i;
        p->items[p->item_count++] =
            (struct fetch_item){.part = p->catalog->parts[plan_rank(p, u)], .chunk = u->chunk};
    }
    p->first_use[p->item_count] = p->use_count;
    return 0;
}

int plan_create(const struct catalog *c, const struct request *requests, size_t request_count,
                bool (*usable)(void *arg, uint32_t piece), void *arg, struct plan *out, struct err *e)
{
    struct plan p = {.catalog = c, .requests = requests, .usable = usable, .arg = arg};
    struct box_set left = {0}, taken = {0};
    int rc = request_count < UINT32_MAX ? 0 : no_memory(e);
    p.copy_cap = p.use_cap = request_count + 1; /* mostly it is enough */
    p.copies = malloc(p.copy_cap * sizeof *p.copies);
    p.uses = malloc(p.use_cap * sizeof *p.uses);
    if (rc == 0 && (!p.copies || !p.uses))
        rc = no_memory(e);
    for (size_t i = 0; rc == 0 && i < request_count; i++)
        rc = cover(&p, (uint32_t)i, &left, &taken, e);
    if (rc == 0 && p.use_count > 0)
        rc = group_uses(&p, e);
    box_set_free(&left);
    box_set_free(&taken);
    if (rc < 0)
        plan_free(&p);
    else
        *out = p;
    return rc;
}

/* ---- placing ---- */

/* Bytes of a request's run, whose first piece is t. */
static uint64_t run_bytes(const struct plan *p, const struct request *r, const struct tensor *t)
{
    struct tensor room;
    if (r->count == 1)
        return t->bytes;
    const struct tensor *last = catalog_tensor(p->catalog, r->piece + r->count - 1, &room);
    return last->offset + last->bytes - t->offset;
}

static int place(const struct plan *p, const struct use *u, uint8_t *plain, uint32_t n,
                 struct landing *landing, struct err *e)
{
    const struct copy *c = &p->copies[u->copy];
    const struct request *r = &p->requests[c->request];
    struct tensor room;
    const struct tensor *t = catalog_tensor(p->catalog, c->piece, &room);
    uint64_t offset = (uint64_t)(u->chunk - t->first_chunk) * CHUNK_PLAIN_BYTES_MAX;
    if (t->bytes <= SMALL_BYTES_MAX) {
        uint64_t bytes = run_bytes(p, r, t);
        check(t->offset <= n && bytes <= n - t->offset); /* index_private_view saw to it */
        plain += t->offset;
        n = (uint32_t)bytes;
        offset = 0;
    }
    if (!r->target && is_plain(r, t)) {
        memcpy(r->memory + offset, plain, n);
        return 0;
    }
    struct box_copy b;
    prepare(p, c, t, &b);
    if (r->target)
        return landing_copy(landing, r->target->device, &b, offset, n, plain, e);
    box_scatter(&b, offset, n, plain);
    return 0;
}

/* Of a chunk of small tensors: they lie in memory as they do in the chunk, as in a flat buffer of parameters,
 * one behind the other and none left out. */
static uint8_t *straight_small(const struct plan *p, size_t item, uint32_t n)
{
    uintptr_t begin = 0;
    uint64_t at = 0;
    for (size_t i = p->first_use[item]; i < p->first_use[item + 1]; i++) {
        const struct copy *c = &p->copies[p->uses[i].copy];
        const struct request *r = &p->requests[c->request];
        struct tensor room;
        const struct tensor *t = catalog_tensor(p->catalog, c->piece, &room);
        uintptr_t from = (uintptr_t)r->memory - t->offset;
        if (r->target || t->offset != at || (at > 0 && from != begin) || !is_plain(r, t))
            return NULL;
        begin = from;
        at += run_bytes(p, r, t);
    }
    return at == n ? (uint8_t *)begin : NULL;
}

uint8_t *plan_straight(const struct plan *p, size_t item, uint32_t n)
{
    const struct use *u = &p->uses[p->first_use[item]];
    const struct copy *c = &p->copies[u->copy];
    struct tensor room;
    const struct tensor *t = catalog_tensor(p->catalog, c->piece, &room);
    struct box_copy b;
    if (t->bytes <= SMALL_BYTES_MAX)
        return straight_small(p, item, n);
    if (p->first_use[item + 1] - p->first_use[item] > 1 || p->requests[c->request].target)
        return NULL;
    prepare(p, c, t, &b);
    return box_straight(&b, (uint64_t)(u->chunk - t->first_chunk) * CHUNK_PLAIN_BYTES_MAX, n);
}

int plan_place(const struct plan *p, size_t item, uint8_t *plain, uint32_t n, struct landing *landing,
               struct err *e)
{
    int rc = 0;
    for (size_t i = p->first_use[item], end = p->first_use[item + 1]; rc == 0 && i < end; i++) {
        if (i + USES_AHEAD < end)
            catalog_soon(p->catalog, p->copies[p->uses[i + USES_AHEAD].copy].piece);
        rc = place(p, &p->uses[i], plain, n, landing, e);
    }
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
