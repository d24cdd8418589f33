/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The description of one tensor as it stands in the sealed part of an index. There may be millions, so it has
 * the fewest bytes that can still be read in any order: numbers of 32 bits where all fit, the box only where
 * it is not the whole tensor, a hash only where one is told.
 */
#include <string.h>

#include "format/index.h"

/* The byte behind the dtype: number of dimensions, and what the record has. */
enum {
    FORM_DIMS = 0x1f,
    FORM_PART = 0x20,   /* offsets and lengths of a box behind the shape */
    FORM_WIDE = 0x40,   /* numbers of 64 bits */
    FORM_HASHED = 0x80, /* XXH3-128 of the bytes at the end */
};

static const struct hash128 no_hash;

static bool is_wide(const struct tensor *t)
{
    uint64_t all = 0;
    for (uint32_t i = 0; i < t->dims; i++)
        all |= t->shape[i] | t->offsets[i] | t->lengths[i];
    return all > UINT32_MAX;
}

static bool is_part(const struct tensor *t)
{
    for (uint32_t i = 0; i < t->dims; i++)
        if (t->offsets[i] != 0 || t->lengths[i] != t->shape[i])
            return true;
    return false;
}

static uint8_t form_of(const struct tensor *t, bool hashed)
{
    return (uint8_t)(t->dims | (is_part(t) ? FORM_PART : 0) | (is_wide(t) ? FORM_WIDE : 0) |
                     (hashed ? FORM_HASHED : 0));
}

static size_t numbers_bytes(uint8_t form)
{
    return (size_t)(form & FORM_DIMS) * (form & FORM_PART ? 3 : 1) * (form & FORM_WIDE ? 8 : 4);
}

static uint8_t *numbers_put(uint8_t *p, uint8_t form, const uint64_t *v)
{
    for (uint32_t i = 0; i < (form & FORM_DIMS); i++) {
        if (form & FORM_WIDE)
            le64_put(p, v[i]);
        else
            le32_put(p, (uint32_t)v[i]);
        p += form & FORM_WIDE ? 8 : 4;
    }
    return p;
}

static const uint8_t *numbers_get(const uint8_t *p, uint8_t form, uint64_t *v)
{
    for (uint32_t i = 0; i < (form & FORM_DIMS); i++) {
        v[i] = form & FORM_WIDE ? le64_get(p) : le32_get(p);
        p += form & FORM_WIDE ? 8 : 4;
    }
    return p;
}

void record_put(struct buf *out, const struct tensor *t, bool hashed)
{
    uint8_t fixed[2 + 24 * TENSOR_DIMS_MAX + 8 + HASH128_BYTES], *p = fixed;
    uint8_t form = form_of(t, hashed && t->bytes > 0 && !index_large(t->bytes));
    *p++ = (uint8_t)t->dtype;
    *p++ = form;
    p = numbers_put(p, form, t->shape);
    if (form & FORM_PART) {
        p = numbers_put(p, form, t->offsets);
        p = numbers_put(p, form, t->lengths);
    }
    le32_put(p, t->first_chunk);
    le32_put(p + 4, t->offset);
    p += 8;
    if (form & FORM_HASHED) {
        memcpy(p, &t->plain_hash, HASH128_BYTES);
        p += HASH128_BYTES;
    }
    buf_put16(out, t->name);
    buf_put(out, fixed, (size_t)(p - fixed));
}

struct slice record_name(const uint8_t *record)
{
    return SLICE(record + 2, le16_get(record));
}

void record_get(const uint8_t *record, struct tensor *out)
{
    out->name = record_name(record);
    const uint8_t *p = record + 2 + out->name.n;
    uint8_t form = p[1];
    out->dtype = p[0];
    out->dims = form & FORM_DIMS;
    p = numbers_get(p + 2, form, out->shape);
    if (form & FORM_PART) {
        p = numbers_get(p, form, out->offsets);
        p = numbers_get(p, form, out->lengths);
    } else {
        for (uint32_t i = 0; i < out->dims; i++) {
            out->offsets[i] = 0;
            out->lengths[i] = out->shape[i];
        }
    }
    out->first_chunk = le32_get(p);
    out->offset = le32_get(p + 4);
}

bool record_is(const uint8_t *record, struct slice name, enum dtype dtype, uint32_t dims,
               const uint64_t *shape, struct place *out)
{
    if (le16_get(record) != name.n || memcmp(record + 2, name.p, name.n) != 0)
        return false;
    const uint8_t *p = record + 2 + name.n;
    uint8_t form = p[1];
    if (p[0] != dtype || (form & FORM_DIMS) != dims || (form & FORM_PART))
        return false;
    p += 2;
    for (uint32_t i = 0; i < dims; i++) {
        if (shape[i] != (form & FORM_WIDE ? le64_get(p) : le32_get(p)))
            return false;
        p += form & FORM_WIDE ? 8 : 4;
    }
    out->chunk = le32_get(p);
    out->offset = le32_get(p + 4);
    return true;
}

/* Where in the record its place stands; the hash is behind that. */
static size_t place_at(const uint8_t *record, uint8_t *form)
{
    size_t at = 2 + le16_get(record) + 2u;
    *form = record[at - 1];
    return at + numbers_bytes(*form);
}

void record_set_place(uint8_t *record, uint32_t first_chunk, uint32_t offset)
{
    uint8_t form, *p = record + place_at(record, &form);
    le32_put(p, first_chunk);
    le32_put(p + 4, offset);
}

void record_set_hash(uint8_t *record, struct hash128 plain_hash)
{
    uint8_t form, *p = record + place_at(record, &form);
    check(form & FORM_HASHED);
    memcpy(p + 8, &plain_hash, HASH128_BYTES);
}

struct hash128 record_hash(const uint8_t *record)
{
    uint8_t form;
    struct hash128 h = no_hash;
    const uint8_t *p = record + place_at(record, &form);
    if (form & FORM_HASHED)
        memcpy(&h, p + 8, HASH128_BYTES);
    return h;
}

/* The form of a record that record_take_small may take. False: of no such one. */
static bool form_take(const uint8_t *p, size_t n, struct record_form *out)
{
    size_t name = n < 2 ? 0 : le16_get(p), fixed = 2 + name + 2;
    *out = (struct record_form){0};
    if (n < fixed)
        return false;
    uint8_t dtype = p[fixed - 2], form = p[fixed - 1];
    uint32_t dims = form & FORM_DIMS;
    size_t all = fixed + 4 * dims + 8 + (form & FORM_HASHED ? HASH128_BYTES : 0);
    unsigned unit = dtype_unit(dtype);
    if (form & (FORM_PART | FORM_WIDE) || dims > TENSOR_DIMS_MAX || n < all || unit == 0)
        return false;
    *out = (struct record_form){name, dtype, form, unit, all};
    return true;
}

static bool has_form(const uint8_t *p, size_t n, const struct record_form *f)
{
    return f->bytes > 0 && n >= f->bytes && le16_get(p) == f->name_bytes &&
           p[2 + f->name_bytes] == f->dtype && p[3 + f->name_bytes] == f->form;
}

size_t record_take_small(const uint8_t *p, size_t n, struct record_form *form, struct place *out)
{
    if (!has_form(p, n, form) && !form_take(p, n, form))
        return 0;
    uint32_t dims = form->form & FORM_DIMS;
    size_t all = form->bytes, fixed = 2 + form->name_bytes + 2;
    if (form->form & FORM_HASHED && memcmp(p + all - HASH128_BYTES, &no_hash, sizeof no_hash) == 0)
        return 0;
    out->bytes = form->unit;
    for (p += fixed; dims > 0 && !index_large(out->bytes); dims--, p += 4) /* which keeps it within 52 bits */
        out->bytes *= le32_get(p);
    out->chunk = le32_get(p);
    out->offset = le32_get(p + 4);
    return out->bytes > 0 && !index_large(out->bytes) ? all : 0;
}

size_t record_take(const uint8_t *p, size_t n, struct tensor *out)
{
    size_t name = n < 2 ? 0 : le16_get(p), fixed = 2 + name + 2;
    if (n < fixed)
        return 0;
    uint8_t form = p[fixed - 1];
    size_t all = fixed + numbers_bytes(form) + 8 + (form & FORM_HASHED ? HASH128_BYTES : 0);
    if ((form & FORM_DIMS) > TENSOR_DIMS_MAX || n < all)
        return 0;
    record_get(p, out);
    out->plain_hash = record_hash(p);
    return form == form_of(out, memcmp(&out->plain_hash, &no_hash, sizeof no_hash) != 0) ? all : 0;
}
