/* SPDX-License-Identifier: Apache-2.0 */
#include "format/choice.h"

#include <string.h>

#include "format/base/hash.h"

/* A character as a number that compares like its code point: the bytes of its UTF-8, the first one highest. A
 * byte that belongs to none counts as one character. */
static uint32_t character(const uint8_t **p, const uint8_t *end)
{
    uint32_t c = *(*p)++;
    unsigned more = c < 0xc0 ? 0 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
    for (; more > 0 && *p < end && (**p & 0xc0) == 0x80; more--)
        c = c << 8 | *(*p)++;
    return c;
}

static uint32_t literal(const uint8_t **p, const uint8_t *end)
{
    if (**p == '\\' && *p + 1 < end)
        ++*p;
    return character(p, end);
}

/* *p is behind the opening bracket, and ends behind the closing one; *closed: there is one. */
static bool in_set(const uint8_t **p, const uint8_t *end, uint32_t c, bool *closed)
{
    bool inverted = *p < end && **p == '!', found = false;
    *p += inverted;
    for (bool first = true; *p < end && (first || **p != ']'); first = false) {
        uint32_t low = literal(p, end), high = low;
        if (*p + 1 < end && **p == '-' && (*p)[1] != ']') {
            ++*p;
            high = literal(p, end);
        }
        found |= low <= c && c <= high;
    }
    *closed = *p < end;
    *p += *closed;
    return found != inverted;
}

/* One character of the name against one element of the pattern, which is no star. */
static bool one(const uint8_t **pattern, const uint8_t *end, uint32_t c)
{
    bool closed;
    switch (**pattern) {
    case '?': ++*pattern; return true;
    case '[': ++*pattern; return in_set(pattern, end, c, &closed);
    default: return literal(pattern, end) == c;
    }
}

/* On a mismatch the last star takes one character more: what stood before it matches already. */
static bool matches(struct slice pattern, struct slice name)
{
    const uint8_t *p = pattern.p, *p_end = p + pattern.n, *n = name.p, *n_end = n + name.n;
    const uint8_t *star = NULL, *star_name = NULL;
    for (;;) {
        if (p < p_end && *p == '*') {
            star = ++p;
            star_name = n;
            continue;
        }
        if (n == n_end && p == p_end)
            return true;
        const uint8_t *next = n;
        if (n < n_end && p < p_end && one(&p, p_end, character(&next, n_end))) {
            n = next;
            continue;
        }
        if (!star || star_name == n_end)
            return false;
        (void)character(&star_name, n_end);
        p = star;
        n = star_name;
    }
}

bool choice_matches(const char *pattern, struct slice name)
{
    bool inverted = *pattern == '!';
    return matches(slice_str(pattern + inverted), name) != inverted;
}

static bool any_name(const struct choice *c)
{
    return !c->pattern || !*c->pattern;
}

bool choice_is_all(const struct choice *c)
{
    return any_name(c) && c->slices <= 1;
}

int choice_check(const struct choice *c, struct err *e)
{
    if (c->slice > 0 && c->slice >= c->slices)
        return err_set(e, ERR_INVALID, "slice %u of %u does not exist: slices run from 0 to %u", c->slice,
                       c->slices, c->slices ? c->slices - 1 : 0);
    if (any_name(c))
        return 0;
    size_t n = strlen(c->pattern);
    if (n > CHOICE_BYTES_MAX)
        return err_set(e, ERR_INVALID, "a pattern of %zu bytes for shards, at most %u are allowed", n,
                       CHOICE_BYTES_MAX);
    const uint8_t *p = (const uint8_t *)c->pattern, *end = p + n;
    while (p < end) {
        if (*p++ != '[') {
            p += p[-1] == '\\' && p < end;
            continue;
        }
        bool closed;
        (void)in_set(&p, end, 0, &closed);
        if (!closed)
            return err_set(e, ERR_INVALID,
                           "the pattern \"%s\" for shards opens a set with [ and does not close it",
                           c->pattern);
    }
    return 0;
}

bool choice_takes(const struct choice *c, struct slice name, uint32_t *matched)
{
    if (!any_name(c) && !choice_matches(c->pattern, name))
        return false;
    uint32_t number = (*matched)++;
    return c->slices <= 1 || number % c->slices == c->slice;
}

uint32_t choice_digest(const struct choice *c)
{
    if (choice_is_all(c))
        return 0;
    struct slice pattern = slice_str(any_name(c) ? "" : c->pattern);
    uint8_t bytes[8 + CHOICE_BYTES_MAX];
    check(pattern.n <= CHOICE_BYTES_MAX);
    le32_put(bytes, c->slices > 1 ? c->slice : 0);
    le32_put(bytes + 4, c->slices > 1 ? c->slices : 1);
    memcpy(bytes + 8, pattern.p, pattern.n);
    uint32_t digest = (uint32_t)hash64(bytes, 8 + pattern.n);
    return digest ? digest : 1;
}
