/* SPDX-License-Identifier: Apache-2.0 */
#include "format/base/cursor.h"

#include <stdlib.h>
#include <string.h>

struct slice slice_str(const char *s)
{
    return SLICE(s, strlen(s));
}

bool slice_eq(struct slice a, struct slice b)
{
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

bool slice_cstr(struct slice s, char *out, size_t size)
{
    if (s.n >= size || (s.n > 0 && memchr(s.p, 0, s.n)))
        return false;
    if (s.n > 0)
        memcpy(out, s.p, s.n);
    out[s.n] = '\0';
    return true;
}

struct rcur rcur_of(const void *p, size_t n)
{
    return (struct rcur){.p = p, .left = n};
}

struct slice rcur_take(struct rcur *c, size_t n)
{
    if (c->failed || n > c->left) {
        c->failed = true;
        return (struct slice){0};
    }
    struct slice s = {.p = c->p, .n = n};
    if (n > 0)
        c->p += n;
    c->left -= n;
    return s;
}

uint8_t rcur_u8(struct rcur *c)
{
    struct slice s = rcur_take(c, 1);
    return s.p ? s.p[0] : 0;
}

uint16_t rcur_u16(struct rcur *c)
{
    struct slice s = rcur_take(c, 2);
    return s.p ? le16_get(s.p) : 0;
}

uint32_t rcur_u32(struct rcur *c)
{
    struct slice s = rcur_take(c, 4);
    return s.p ? le32_get(s.p) : 0;
}

uint64_t rcur_u64(struct rcur *c)
{
    struct slice s = rcur_take(c, 8);
    return s.p ? le64_get(s.p) : 0;
}

void rcur_copy(struct rcur *c, void *out, size_t n)
{
    struct slice s = rcur_take(c, n);
    if (s.n == n && n > 0)
        memcpy(out, s.p, n);
    else
        memset(out, 0, n);
}

struct slice rcur_take16(struct rcur *c)
{
    size_t n = rcur_u16(c);
    return rcur_take(c, n);
}

struct slice rcur_take32(struct rcur *c)
{
    size_t n = rcur_u32(c);
    return rcur_take(c, n);
}

bool rcur_zeros(struct rcur *c, size_t n)
{
    struct slice s = rcur_take(c, n);
    for (size_t i = 0; i < s.n; i++)
        if (s.p[i] != 0)
            c->failed = true;
    return !c->failed;
}

int rcur_end(const struct rcur *c, const char *what, struct err *e)
{
    if (c->failed)
        return err_set(e, ERR_CORRUPT, "%s is cut short or has reserved bytes set", what);
    if (c->left > 0)
        return err_set(e, ERR_CORRUPT, "%s has %zu bytes more than its fields", what, c->left);
    return 0;
}

void buf_free(struct buf *b)
{
    free(b->p);
    *b = (struct buf){.max = b->max};
}

void buf_reset(struct buf *b)
{
    b->n = 0;
    b->failed = false;
}

bool buf_reserve(struct buf *b, size_t more)
{
    size_t want;
    if (b->failed || add_overflows(b->n, more, &want) || (b->max > 0 && want > b->max)) {
        b->failed = true;
        return false;
    }
    if (want <= b->cap)
        return true;
    size_t cap = b->cap < 64 ? 64 : b->cap;
    while (cap < want)
        cap = cap > SIZE_MAX / 2 ? want : cap * 2;
    uint8_t *p = realloc(b->p, cap);
    if (!p) {
        b->failed = true;
        return false;
    }
    b->p = p;
    b->cap = cap;
    return true;
}

void buf_put(struct buf *b, const void *p, size_t n)
{
    if (n == 0 || !buf_reserve(b, n))
        return;
    memcpy(b->p + b->n, p, n);
    b->n += n;
}

void buf_u8(struct buf *b, uint8_t v)
{
    buf_put(b, &v, 1);
}

void buf_u16(struct buf *b, uint16_t v)
{
    uint8_t raw[2];
    le16_put(raw, v);
    buf_put(b, raw, sizeof raw);
}

void buf_u32(struct buf *b, uint32_t v)
{
    uint8_t raw[4];
    le32_put(raw, v);
    buf_put(b, raw, sizeof raw);
}

void buf_u64(struct buf *b, uint64_t v)
{
    uint8_t raw[8];
    le64_put(raw, v);
    buf_put(b, raw, sizeof raw);
}

void buf_put16(struct buf *b, struct slice s)
{
    if (s.n > UINT16_MAX) {
        b->failed = true;
        return;
    }
    buf_u16(b, (uint16_t)s.n);
    buf_put(b, s.p, s.n);
}

void buf_put32(struct buf *b, struct slice s)
{
    if (s.n > UINT32_MAX) {
        b->failed = true;
        return;
    }
    buf_u32(b, (uint32_t)s.n);
    buf_put(b, s.p, s.n);
}

void buf_zeros(struct buf *b, size_t n)
{
    if (n == 0 || !buf_reserve(b, n))
        return;
    memset(b->p + b->n, 0, n);
    b->n += n;
}

int buf_end(const struct buf *b, const char *what, struct err *e)
{
    if (!b->failed)
        return 0;
    if (b->max > 0 && b->cap >= b->max / 2)
        return err_set(e, ERR_LIMIT, "%s would be larger than its limit of %zu bytes", what, b->max);
    return err_set(e, ERR_NO_MEMORY, "no memory for %s, or a field of it is too long", what);
}
