/* SPDX-License-Identifier: Apache-2.0 */
/* What the fuzz targets of shards share: samples are found, and what is found is looked at. */
#ifndef LARDER_FUZZ_FOUND_H
#define LARDER_FUZZ_FOUND_H

#include "format/samples.h"

#define FOUND_LOOKED_AT 1000u

/* Fields lie within the shard. */
static inline void found_check(const struct samples *s, uint64_t shard_bytes)
{
    uint64_t count = samples_count(s);
    for (uint64_t i = 0; i < count && i < FOUND_LOOKED_AT; i++) {
        (void)samples_key(s, i);
        for (uint32_t k = 0; k < samples_fields(s, i); k++) {
            struct sample_field f = samples_field(s, i, k);
            check(f.name.n > 0 && f.type.n > 0 && f.offset <= shard_bytes &&
                  f.bytes <= shard_bytes - f.offset);
        }
    }
}

/* Pushes the source's bytes in pieces, passing over what may be passed over if skip is set. Whatever is found
 * makes the way through its encoding, which is added to out. */
static inline int found_build(const struct samples_source *source, const uint8_t *p, size_t piece, bool skip,
                              struct buf *out)
{
    struct samples_builder *b = NULL;
    struct samples *s = NULL, *again;
    struct err e = {0};
    size_t n = (size_t)samples_source_bytes(source);
    int r = samples_builder_create(source, &b, &e);
    for (size_t at = 0; r == 0 && at < n;) {
        uint64_t most = samples_builder_skippable(b);
        size_t take = n - at < piece ? n - at : piece;
        if (skip && most > 0) {
            take = most < n - at ? (size_t)most : n - at;
            samples_builder_skip(b, take);
        } else {
            r = samples_builder_push(b, p + at, take, &e);
        }
        at += take;
    }
    if (r == 0)
        r = samples_builder_finish(b, &s, &e);
    samples_builder_free(b);
    check(r == 0 || e.text[0]);
    if (r < 0)
        return r;
    found_check(s, source->shard_bytes);
    check(samples_encode(s, out, &e) == 0);
    check(samples_decode(out->p, out->n, source->shard_bytes, &again, &e) == 0);
    check(samples_count(s) == samples_count(again));
    samples_free(again);
    samples_free(s);
    return 0;
}

/* The outcome does not depend on the pieces. */
static inline void found_both_ways(const struct samples_source *source, const uint8_t *p, size_t piece)
{
    struct buf one = {0}, two = {0};
    int a = found_build(source, p, piece, false, &one), b = found_build(source, p, 4096, true, &two);
    check(a == b && slice_eq(SLICE(one.p, one.n), SLICE(two.p, two.n)));
    buf_free(&one);
    buf_free(&two);
}

#endif
