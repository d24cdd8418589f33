/* SPDX-License-Identifier: Apache-2.0 */
#define ZSTD_STATIC_LINKING_ONLY
#include "format/codec_planes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "format/base/cursor.h"
#include "format/base/pages.h"
#include "format/limits.h"

#define LAYOUT 1u

enum kind { KIND_RAW = 0, KIND_CONSTANT = 1, KIND_TIERS = 2, KIND_ZSTD = 3 };

/* A sample of this many elements, in runs that lie evenly over the chunk, decides. */
#define SAMPLE_RUNS     64u
#define SAMPLE_RUN      64u
#define SAMPLE_ELEMENTS (SAMPLE_RUNS * SAMPLE_RUN)

#define BLOCK_ELEMENTS \
    16384u /* that are split and coded, or decoded and merged, at a time: a multiple of 64 */

#define PLAN_TIERS_MAX 3u    /* the encoder's; more gain too little */
#define DENSE_LEVEL    (-50) /* hardly any search for matches: what is wanted is the entropy stage */

struct tier {
    uint8_t k, base;
};

struct plane_plan {
    enum kind kind;
    uint8_t value; /* of a constant */
    uint8_t tiers;
    struct tier tier[TIERS_MAX];
    uint32_t zstd_bytes; /* decoding */
    double bits;         /* per element, estimated */
};

struct planes_state {
    const struct tiers_ops *ops;
    ZSTD_CCtx *pack;
    ZSTD_DCtx *unpack;
    uint8_t *planes;     /* planes that are not raw: together as long as a chunk */
    uint8_t *escapes[2]; /* of one tier and the next */
    unsigned width;      /* of the plan */
    bool rotate;
    struct plane_plan plan[PLANES_MAX];
    uint8_t block[BLOCK_ELEMENTS + TIERS_SLACK];
    uint8_t sample[SAMPLE_ELEMENTS * PLANES_MAX];
    uint8_t sample_planes[PLANES_MAX][SAMPLE_ELEMENTS];
};

struct planes_state *planes_state_create(void)
{
    struct planes_state *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->ops = tiers_ops_best();
    s->planes = pages_alloc(CHUNK_PLAIN_BYTES_MAX + TIERS_SLACK);
    s->escapes[0] = pages_alloc(CHUNK_PLAIN_BYTES_MAX + TIERS_SLACK);
    s->escapes[1] = pages_alloc(CHUNK_PLAIN_BYTES_MAX + TIERS_SLACK);
    s->pack = ZSTD_createCCtx();
    s->unpack = ZSTD_createDCtx();
    if (s->planes && s->escapes[0] && s->escapes[1] && s->pack && s->unpack &&
        !ZSTD_isError(ZSTD_CCtx_setParameter(s->pack, ZSTD_c_compressionLevel, DENSE_LEVEL)) &&
        !ZSTD_isError(ZSTD_CCtx_setParameter(s->pack, ZSTD_c_literalCompressionMode, ZSTD_ps_enable)))
        return s;
    planes_state_free(s);
    return NULL;
}

void planes_state_free(struct planes_state *s)
{
    if (!s)
        return;
    ZSTD_freeCCtx(s->pack);
    ZSTD_freeDCtx(s->unpack);
    free(s->planes);
    free(s->escapes[0]);
    free(s->escapes[1]);
    free(s);
}

void planes_state_use(struct planes_state *s, const struct tiers_ops *ops)
{
    s->ops = ops;
}

static bool is_float(enum dtype dtype)
{
    switch (dtype) {
    case DTYPE_F16:
    case DTYPE_BF16:
    case DTYPE_F32:
    case DTYPE_F64:
    case DTYPE_C64:
    case DTYPE_C128:
    case DTYPE_F8_E4M3:
    case DTYPE_F8_E5M2:
    case DTYPE_F8_E4M3FNUZ:
    case DTYPE_F8_E5M2FNUZ: return true;
    default: return false; /* also F8_E8M0, which has no sign, and packed ones */
    }
}

unsigned planes_width(enum dtype dtype)
{
    unsigned bits = dtype_bits(dtype);
    if (dtype == DTYPE_C64 || dtype == DTYPE_C128)
        bits /= 2; /* two floats */
    return bits < 8 ? 1 : bits / 8;
}

/* ---- Planning ---- */

/* The 2^k - 1 neighbouring values, round the clock, that the most bytes have. */
static uint32_t best_window(const uint32_t hist[256], unsigned k, uint8_t *base)
{
    unsigned span = (1u << k) - 1;
    uint32_t sum = 0, best;
    for (unsigned i = 0; i < span; i++)
        sum += hist[i];
    best = sum;
    *base = 0;
    for (unsigned i = 1; i < 256; i++) {
        sum += hist[(i + span - 1) & 255] - hist[i - 1];
        if (sum > best) {
            best = sum;
            *base = (uint8_t)i;
        }
    }
    return best;
}

/* Cheapest bits for `left` bytes of a histogram in at most `depth` tiers, if below `limit`; fills tier[].
 * `toll` is what another tier must gain to be worth its time. What cannot get below the limit is not looked
 * into: each byte costs k bits here, and each that is left over a bit at least. */
static uint64_t plan_search(const uint32_t hist[256], uint64_t left, unsigned depth, uint64_t toll,
                            uint64_t limit, struct tier tier[], uint8_t *tiers)
{
    static const uint8_t likely[TIER_BITS_MAX] = {2, 3, 1, 4,
                                                  5, 6, 7}; /* a good plan early spares the others */
    uint64_t best = 8 * left < limit ? 8 * left : limit;
    *tiers = 0;
    for (unsigned i = 0; depth > 0 && i < TIER_BITS_MAX; i++) {
        struct tier below[TIERS_MAX];
        unsigned k = likely[i];
        uint8_t base, more = 0;
        uint32_t rest[256];
        uint64_t here = k * left + toll;
        if (here >= best)
            continue;
        uint64_t gone = left - best_window(hist, k, &base);
        if (here + (depth > 1 ? gone : 8 * gone) >= best)
            continue;
        if (depth > 1 && gone > 0) {
            memcpy(rest, hist, sizeof rest);
            for (unsigned v = 0; v < (1u << k) - 1; v++)
                rest[(base + v) & 255] = 0;
            here += plan_search(rest, gone, depth - 1, toll, best - here, below, &more);
        } else {
            here += 8 * gone;
        }
        if (here >= best)
            continue;
        best = here;
        tier[0] = (struct tier){(uint8_t)k, base};
        memcpy(tier + 1, below, more * sizeof *below);
        *tiers = (uint8_t)(more + 1);
    }
    return best;
}

static double entropy_bits(const uint32_t hist[256], uint32_t n)
{
    double bits = 0;
    for (unsigned i = 0; i < 256; i++)
        if (hist[i] > 0)
            bits -= hist[i] * log2((double)hist[i] / n);
    return bits / n;
}

static void plane_choose(struct plane_plan *p, const uint8_t *values, uint32_t n, bool dense)
{
    uint32_t hist[256] = {0};
    for (uint32_t i = 0; i < n; i++)
        hist[values[i]]++;
    *p = (struct plane_plan){.kind = KIND_RAW, .bits = 8};
    if (hist[values[0]] == n) {
        p->kind = KIND_CONSTANT;
        p->value = values[0];
        p->bits = 0;
        return;
    }
    double bits = entropy_bits(hist, n);
    if (bits >= 7.8) /* noise: no code can help */
        return;
    if (dense) {
        p->kind = KIND_ZSTD;
        p->bits = bits > 1 ? bits : 1; /* Huffman gives no code less than a bit */
        return;
    }
    bits = (double)plan_search(hist, n, PLAN_TIERS_MAX, n / 16, UINT64_MAX, p->tier, &p->tiers) / n;
    if (p->tiers > 0 && bits < 7.7) {
        p->kind = KIND_TIERS;
        p->bits = bits;
    }
}

static size_t sample_take(struct planes_state *s, const uint8_t *plain, size_t elements)
{
    size_t run = SAMPLE_RUN * s->width;
    if (elements <= SAMPLE_ELEMENTS) {
        memcpy(s->sample, plain, elements * s->width);
        return elements;
    }
    for (size_t i = 0; i < SAMPLE_RUNS; i++) {
        size_t at = (elements - SAMPLE_RUN) * i / (SAMPLE_RUNS - 1);
        memcpy(s->sample + i * run, plain + at * s->width, run);
    }
    return SAMPLE_ELEMENTS;
}

size_t planes_probe(struct planes_state *s, enum dtype dtype, bool dense, const uint8_t *plain, size_t n)
{
    uint8_t *planes[PLANES_MAX];
    double bits = 0;
    s->width = planes_width(dtype);
    s->rotate = is_float(dtype);
    size_t elements = n / s->width, taken = sample_take(s, plain, elements);
    for (unsigned p = 0; p < PLANES_MAX; p++)
        planes[p] = s->sample_planes[p];
    s->ops->split(s->sample, taken, s->width, s->rotate, planes);
    for (unsigned p = 0; p < s->width; p++) {
        plane_choose(&s->plan[p], planes[p], (uint32_t)taken, dense);
        bits += s->plan[p].bits;
    }
    double bytes = bits / 8 * (double)elements + 16;
    return bytes < (double)n ? (size_t)bytes : n;
}

/* ---- Encoding ---- */

/* The sample said "constant"; here is what it is. Gives it tiers, or none, by its whole histogram. */
static void constant_confirm(struct plane_plan *p, const uint8_t *values, size_t n)
{
    if (n == 1 || memcmp(values, values + 1, n - 1) == 0) {
        p->value = values[0];
        return;
    }
    uint32_t hist[256] = {0};
    for (size_t i = 0; i < n; i++)
        hist[values[i]]++;
    p->kind = KIND_TIERS;
    (void)plan_search(hist, n, PLAN_TIERS_MAX, n / 64, UINT64_MAX, p->tier, &p->tiers);
}

/* Writes the body of a plane from tier `first` on; its bytes, or 0 if they are more than room. */
static size_t tiers_encode(struct planes_state *s, const struct plane_plan *p, unsigned first,
                           const uint8_t *values, size_t n, uint8_t *out, size_t room)
{
    size_t used = 0;
    for (unsigned i = first; i < p->tiers; i++) {
        size_t masks = tier_mask_bytes(n, p->tier[i].k);
        uint8_t *escapes = s->escapes[i & 1];
        if (masks > room - used)
            return 0;
        n = s->ops->encode(values, n, p->tier[i].k, p->tier[i].base, out + used, escapes);
        used += masks;
        values = escapes;
    }
    if (n > room - used)
        return 0;
    memcpy(out + used, values, n);
    return used + n;
}

static size_t zstd_encode(struct planes_state *s, struct plane_plan *p, const uint8_t *values, size_t n,
                          uint8_t *out, size_t room)
{
    size_t r = ZSTD_compress2(s->pack, out, room, values, n);
    if (ZSTD_isError(r))
        return 0; /* did not fit */
    p->zstd_bytes = (uint32_t)r;
    return r;
}

/* The plane that can go through its first tier while it is split off, block by block: where its body begins
 * is known only for the first of those that are not raw. PLANES_MAX: none. */
static unsigned plane_to_fuse(const struct planes_state *s)
{
    for (unsigned p = 0; p < s->width; p++)
        if (s->plan[p].kind != KIND_RAW)
            return s->plan[p].kind == KIND_TIERS && s->plan[p].tiers > 0 ? p : PLANES_MAX;
    return PLANES_MAX;
}

/* Splits, and codes plane `fused` in blocks that stay in the cache. The body's bytes; 0: more than room. */
static size_t split_fused(struct planes_state *s, const uint8_t *plain, size_t elements, unsigned fused,
                          uint8_t *planes[PLANES_MAX], uint8_t *out, size_t room, struct hash128_sum *sum)
{
    const struct plane_plan *plan = &s->plan[fused];
    size_t masks = tier_mask_bytes(elements, plan->tier[0].k), found = 0, rest = 0;
    uint8_t *to[PLANES_MAX], *mask = out;
    if (masks > room)
        return 0;
    for (size_t at = 0; at < elements; at += BLOCK_ELEMENTS) {
        size_t n = elements - at < BLOCK_ELEMENTS ? elements - at : BLOCK_ELEMENTS;
        for (unsigned p = 0; p < s->width; p++)
            to[p] = p == fused ? s->block : planes[p] + at;
        if (sum)
            hash128_add(sum, plain + at * s->width, n * s->width);
        s->ops->split(plain + at * s->width, n, s->width, s->rotate, to);
        found +=
            s->ops->encode(s->block, n, plan->tier[0].k, plan->tier[0].base, mask, s->escapes[0] + found);
        mask += tier_mask_bytes(n, plan->tier[0].k);
    }
    if (found > 0 && (rest = tiers_encode(s, plan, 1, s->escapes[0], found, mask, room - masks)) == 0)
        return 0;
    return masks + rest;
}

static void split_whole(const struct planes_state *s, const uint8_t *plain, size_t elements,
                        uint8_t *const planes[PLANES_MAX], struct hash128_sum *sum)
{
    if (sum)
        hash128_add(sum, plain, elements * s->width);
    s->ops->split(plain, elements, s->width, s->rotate, planes);
}

static uint8_t *heads_put(const struct planes_state *s, uint8_t *out)
{
    *out++ = LAYOUT;
    *out++ = (uint8_t)s->width;
    for (unsigned i = 0; i < s->width; i++) {
        const struct plane_plan *p = &s->plan[i];
        *out++ = (uint8_t)p->kind;
        switch (p->kind) {
        case KIND_RAW: break;
        case KIND_CONSTANT: *out++ = p->value; break;
        case KIND_TIERS:
            *out++ = p->tiers;
            for (unsigned t = 0; t < p->tiers; t++) {
                *out++ = p->tier[t].k;
                *out++ = p->tier[t].base;
            }
            break;
        case KIND_ZSTD:
            le32_put(out, p->zstd_bytes);
            out += 4;
            break;
        }
    }
    return out;
}

static size_t head_bytes(const struct planes_state *s)
{
    uint8_t head[2 + PLANES_MAX * (2 + 2 * TIERS_MAX)];
    return (size_t)(heads_put(s, head) - head);
}

size_t planes_encode(struct planes_state *s, const uint8_t *plain, size_t n, uint8_t *out,
                     struct hash128_sum *sum)
{
    size_t elements = n / s->width, raw = 0, others = 0;
    uint8_t *planes[PLANES_MAX];
    /* Kinds as the probe saw them fix where raw planes go. A constant that turns out not to be one makes the
     * head longer: in that rare case the bodies are moved up at the end. */
    size_t head = head_bytes(s);
    if (head >= n)
        return 0;
    for (unsigned p = 0; p < s->width; p++)
        raw += s->plan[p].kind == KIND_RAW;
    if (head + raw * elements >= n)
        return 0;
    uint8_t *next_raw = out + head;
    for (unsigned p = 0; p < s->width; p++) {
        bool is_raw = s->plan[p].kind == KIND_RAW;
        planes[p] = is_raw ? next_raw : s->planes + others++ * elements;
        next_raw += is_raw ? elements : 0;
    }
    size_t used = head + raw * elements, fused_body = 0;
    unsigned fused = plane_to_fuse(s);
    if (fused < PLANES_MAX)
        fused_body = split_fused(s, plain, elements, fused, planes, out + used, n - used, sum);
    else
        split_whole(s, plain, elements, planes, sum);
    for (unsigned p = 0; p < s->width; p++) {
        struct plane_plan *plan = &s->plan[p];
        size_t body = 0;
        if (plan->kind == KIND_CONSTANT)
            constant_confirm(plan, planes[p], elements);
        if (plan->kind == KIND_TIERS)
            body =
                p == fused ? fused_body : tiers_encode(s, plan, 0, planes[p], elements, out + used, n - used);
        if (plan->kind == KIND_ZSTD)
            body = zstd_encode(s, plan, planes[p], elements, out + used, n - used);
        if (body == 0 && (plan->kind == KIND_TIERS || plan->kind == KIND_ZSTD))
            return 0;
        used += body;
    }
    size_t real = head_bytes(s);
    if (real != head) {
        if (used - head + real >= n)
            return 0;
        memmove(out + real, out + head, used - head);
        used += real - head;
    }
    (void)heads_put(s, out);
    return used < n ? used : 0;
}

/* ---- Decoding ---- */

static int corrupt(struct err *e, const char *what)
{
    return err_set(e, ERR_CORRUPT, "codec planes: %s; the payload is damaged", what);
}

struct first_tier { /* of a plane, whose other tiers are decoded */
    const uint8_t *masks, *escapes;
};

static bool head_take(struct rcur *c, struct plane_plan *p)
{
    *p = (struct plane_plan){.kind = rcur_u8(c)};
    switch (p->kind) {
    case KIND_RAW: break;
    case KIND_CONSTANT: p->value = rcur_u8(c); break;
    case KIND_TIERS:
        p->tiers = rcur_u8(c);
        if (p->tiers > TIERS_MAX)
            return false;
        for (unsigned i = 0; i < p->tiers; i++) {
            p->tier[i].k = rcur_u8(c);
            p->tier[i].base = rcur_u8(c);
            if (p->tier[i].k == 0 || p->tier[i].k > TIER_BITS_MAX)
                return false;
        }
        break;
    case KIND_ZSTD: p->zstd_bytes = rcur_u32(c); break;
    default: return false;
    }
    return !c->failed;
}

/* Masks are found from the first tier on, since each tells how long the next is; bytes from the last. Without
 * `values` the first tier is left to the caller: its masks, and its escapes in `escapes`. */
static int tiers_decode(struct planes_state *s, const struct plane_plan *p, struct rcur *c, uint8_t *values,
                        size_t n, struct first_tier *left, struct err *e)
{
    const uint8_t *masks[TIERS_MAX];
    size_t count[TIERS_MAX + 1] = {n};
    for (unsigned i = 0; i < p->tiers; i++) {
        masks[i] = rcur_take(c, tier_mask_bytes(count[i], p->tier[i].k)).p;
        if (c->failed)
            return corrupt(e, "a tier ends early");
        count[i + 1] = count[i] > 0 ? s->ops->count(masks[i], count[i], p->tier[i].k) : 0;
        if (count[i + 1] == TIERS_DEAD)
            return corrupt(e, "a tier has bits behind its last element");
    }
    struct slice rest = rcur_take(c, count[p->tiers]);
    if (c->failed)
        return corrupt(e, "escapes end early");
    uint8_t *to = p->tiers == 0 ? values : s->escapes[p->tiers & 1];
    if (rest.n > 0)
        memcpy(to, rest.p, rest.n);
    for (unsigned i = p->tiers; i-- > 0;) {
        const uint8_t *escapes = to;
        if (i == 0 && left) {
            *left = (struct first_tier){masks[0], escapes};
            break;
        }
        to = i == 0 ? values : s->escapes[i & 1];
        if (count[i] > 0)
            s->ops->decode(masks[i], count[i], p->tier[i].k, p->tier[i].base, escapes, to);
    }
    return 0;
}

static int zstd_decode(struct planes_state *s, const struct plane_plan *p, struct rcur *c, uint8_t *values,
                       size_t n, struct err *e)
{
    struct slice frame = rcur_take(c, p->zstd_bytes);
    if (c->failed)
        return corrupt(e, "a zstd plane ends early");
    if (ZSTD_findFrameCompressedSize(frame.p, frame.n) != frame.n ||
        ZSTD_decompressDCtx(s->unpack, values, n, frame.p, frame.n) != n)
        return corrupt(e, "a zstd plane does not give its elements");
    return 0;
}

static int plane_decode(struct planes_state *s, const struct plane_plan *p, struct rcur *c, uint8_t *values,
                        size_t n, struct err *e)
{
    switch (p->kind) {
    case KIND_CONSTANT: memset(values, p->value, n); return 0;
    case KIND_TIERS: return tiers_decode(s, p, c, values, n, NULL, e);
    case KIND_ZSTD: return zstd_decode(s, p, c, values, n, e);
    default: return 0;
    }
}

/* The plane whose first tier is decoded while it is merged: the last one in tiers, since its escapes must
 * stay until then. PLANES_MAX: none. */
static unsigned last_to_fuse(const struct planes_state *s, unsigned width)
{
    unsigned found = PLANES_MAX;
    for (unsigned p = 0; p < width; p++)
        if (s->plan[p].kind == KIND_TIERS)
            found = s->plan[p].tiers > 0 ? p : PLANES_MAX;
    return found;
}

static void merge_fused(struct planes_state *s, unsigned width, bool rotate, unsigned fused,
                        const struct first_tier *first, const uint8_t *const planes[PLANES_MAX],
                        size_t elements, uint8_t *out, struct hash128_sum *sum)
{
    const struct tier *t = &s->plan[fused].tier[0];
    const uint8_t *from[PLANES_MAX], *masks = first->masks, *escapes = first->escapes;
    for (size_t at = 0; at < elements; at += BLOCK_ELEMENTS) {
        size_t n = elements - at < BLOCK_ELEMENTS ? elements - at : BLOCK_ELEMENTS;
        escapes += s->ops->decode(masks, n, t->k, t->base, escapes, s->block);
        masks += tier_mask_bytes(n, t->k);
        for (unsigned p = 0; p < width; p++)
            from[p] = p == fused ? s->block : planes[p] + at;
        s->ops->merge(from, n, width, rotate, out + at * width);
        if (sum)
            hash128_add(sum, out + at * width, n * width);
    }
}

static void merge_whole(const struct planes_state *s, unsigned width, bool rotate,
                        const uint8_t *const planes[PLANES_MAX], size_t elements, uint8_t *out,
                        struct hash128_sum *sum)
{
    s->ops->merge(planes, elements, width, rotate, out);
    if (sum)
        hash128_add(sum, out, elements * width);
}

int planes_decode(struct planes_state *s, enum dtype dtype, const uint8_t *payload, size_t payload_bytes,
                  uint8_t *out, size_t n, struct hash128_sum *sum, struct err *e)
{
    struct rcur c = rcur_of(payload, payload_bytes);
    unsigned width = planes_width(dtype), layout = rcur_u8(&c), stored = rcur_u8(&c);
    if (c.failed || layout != LAYOUT || stored != width || n % width != 0 || n > CHUNK_PLAIN_BYTES_MAX)
        return corrupt(e, "its head does not fit the dtype and length");
    size_t elements = n / width, others = 0;
    const uint8_t *planes[PLANES_MAX];
    for (unsigned p = 0; p < width; p++)
        if (!head_take(&c, &s->plan[p]))
            return corrupt(e, "a plane's head is not one");
    for (unsigned p = 0; p < width; p++)
        if (s->plan[p].kind == KIND_RAW)
            planes[p] = rcur_take(&c, elements).p;
    if (c.failed)
        return corrupt(e, "a raw plane ends early");
    unsigned fused = last_to_fuse(s, width);
    struct first_tier first = {0};
    for (unsigned p = 0; p < width; p++) {
        if (s->plan[p].kind == KIND_RAW)
            continue;
        uint8_t *values = s->planes + others++ * elements;
        int r = p == fused ? tiers_decode(s, &s->plan[p], &c, values, elements, &first, e)
                           : plane_decode(s, &s->plan[p], &c, values, elements, e);
        if (r < 0)
            return r;
        planes[p] = values;
    }
    if (c.failed || c.left > 0)
        return corrupt(e, "it has more bytes than its planes");
    if (fused < PLANES_MAX && elements > 0)
        merge_fused(s, width, is_float(dtype), fused, &first, planes, elements, out, sum);
    else
        merge_whole(s, width, is_float(dtype), planes, elements, out, sum);
    return 0;
}
