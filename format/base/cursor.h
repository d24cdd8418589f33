/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bytes from outside are read only through a reader (`struct rcur`): it never leaves its range, and its first
 * failure sticks, so a decoder reads all fields and asks once at the end. Integers are little-endian.
 * `struct buf` is the growing counterpart for writing; it too fails once and stays failed (no memory, or over
 * its limit).
 */
#ifndef LARDER_BASE_CURSOR_H
#define LARDER_BASE_CURSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/base/err.h"

/* Bytes owned by somebody else; valid as long as that owner says. */
struct slice {
    const uint8_t *p;
    size_t n;
};

#define SLICE(ptr, len) ((struct slice){.p = (const uint8_t *)(ptr), .n = (len)})
struct slice slice_str(const char *s); /* without the NUL */
bool slice_eq(struct slice a, struct slice b);
/* Copies into out as a C string; false if it does not fit or holds a NUL. */
bool slice_cstr(struct slice s, char *out, size_t size);

struct rcur {
    const uint8_t *p;
    size_t left;
    bool failed; /* something was asked for beyond the end; all reads since gave zero */
};

struct rcur rcur_of(const void *p, size_t n);
uint8_t rcur_u8(struct rcur *c);
uint16_t rcur_u16(struct rcur *c);
uint32_t rcur_u32(struct rcur *c);
uint64_t rcur_u64(struct rcur *c);
void rcur_copy(struct rcur *c, void *out, size_t n);   /* out is zeroed on failure */
struct slice rcur_take(struct rcur *c, size_t n);      /* {NULL,0} on failure */
static inline void rcur_skip(struct rcur *c, size_t n) /* n <= left: for who looked at them in place */
{
    check(n <= c->left);
    c->p += n;
    c->left -= n;
}
struct slice rcur_take16(struct rcur *c);  /* u16 length, bytes */
struct slice rcur_take32(struct rcur *c);  /* u32 length, bytes */
bool rcur_zeros(struct rcur *c, size_t n); /* reserved bytes: fails the cursor unless all zero */
/* 0 if everything was read and nothing is left; else ERR_CORRUPT naming `what`. */
must_check int rcur_end(const struct rcur *c, const char *what, struct err *e);

struct buf {
    uint8_t *p;
    size_t n; /* bytes written */
    size_t cap;
    size_t max; /* 0: no limit but memory */
    bool failed;
};

/* Zeroed memory is a valid empty buf. buf_free leaves one behind. */
void buf_free(struct buf *b);
void buf_reset(struct buf *b); /* n = 0, keeps the memory */
must_check bool buf_reserve(struct buf *b, size_t more);
void buf_u8(struct buf *b, uint8_t v);
void buf_u16(struct buf *b, uint16_t v);
void buf_u32(struct buf *b, uint32_t v);
void buf_u64(struct buf *b, uint64_t v);
void buf_put(struct buf *b, const void *p, size_t n);
void buf_put16(struct buf *b, struct slice s); /* u16 length, bytes; fails if n > 65535 */
void buf_put32(struct buf *b, struct slice s); /* u32 length, bytes */
void buf_zeros(struct buf *b, size_t n);
/* 0, or ERR_NO_MEMORY / ERR_LIMIT naming `what` if any write failed. */
must_check int buf_end(const struct buf *b, const char *what, struct err *e);

/* Little-endian in fixed places. */
static inline uint16_t le16_get(const void *p)
{
    const uint8_t *b = p;
    return (uint16_t)(b[0] | b[1] << 8);
}
static inline uint32_t le32_get(const void *p)
{
    const uint8_t *b = p;
    return b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}
static inline uint64_t le64_get(const void *p)
{
    return le32_get(p) | (uint64_t)le32_get((const uint8_t *)p + 4) << 32;
}
static inline void le16_put(void *p, uint16_t v)
{
    uint8_t *b = p;
    b[0] = (uint8_t)v;
    b[1] = (uint8_t)(v >> 8);
}
static inline void le32_put(void *p, uint32_t v)
{
    uint8_t *b = p;
    for (int i = 0; i < 4; i++)
        b[i] = (uint8_t)(v >> 8 * i);
}
static inline void le64_put(void *p, uint64_t v)
{
    le32_put(p, (uint32_t)v);
    le32_put((uint8_t *)p + 4, (uint32_t)(v >> 32));
}

/* Overflow-checked arithmetic on lengths: true if the result does not fit. */
#define add_overflows(a, b, out) __builtin_add_overflow(a, b, out)
#define mul_overflows(a, b, out) __builtin_mul_overflow(a, b, out)

#endif
