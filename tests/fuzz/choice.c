/* SPDX-License-Identifier: Apache-2.0 */
/* Patterns and names of any bytes: up to the first zero byte the pattern, behind it the name. What is
 * accepted matches as a second, slow reading of the rules says, and a choice takes as many of equal names as
 * its slice says. */
#include <stdlib.h>
#include <string.h>

#include "format/choice.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum kind { STAR, ANY, ONE_OF };
struct element {
    enum kind kind;
    bool inverted;
    unsigned count;
    uint32_t low[CHOICE_BYTES_MAX], high[CHOICE_BYTES_MAX];
};

struct text {
    uint32_t c[CHOICE_BYTES_MAX + 1];
    bool plain[CHOICE_BYTES_MAX + 1]; /* taken from its special meaning */
    unsigned n;
};

/* Characters, and in patterns without the backslashes that escape. */
static void characters(struct slice s, bool escapes, struct text *out)
{
    out->n = 0;
    for (size_t i = 0; i < s.n;) {
        out->plain[out->n] = escapes && s.p[i] == '\\' && i + 1 < s.n;
        i += out->plain[out->n];
        uint8_t first = s.p[i];
        uint32_t c = s.p[i++];
        for (unsigned more = first < 0xc0   ? 0
                             : first < 0xe0 ? 1
                             : first < 0xf0 ? 2
                                            : 3;
             more > 0 && i < s.n && s.p[i] >= 0x80 && s.p[i] < 0xc0; more--)
            c = c << 8 | s.p[i++];
        out->c[out->n++] = c;
    }
}

static bool is(const struct text *t, unsigned i, char c)
{
    return i < t->n && t->c[i] == (uint8_t)c && !t->plain[i];
}

static unsigned set_of(const struct text *t, unsigned i, struct element *e)
{
    e->kind = ONE_OF;
    e->inverted = is(t, i, '!');
    i += e->inverted;
    for (bool first = true; i < t->n && (first || !is(t, i, ']')); first = false) {
        e->low[e->count] = e->high[e->count] = t->c[i++];
        if (is(t, i, '-') && i + 1 < t->n && !is(t, i + 1, ']')) {
            e->high[e->count] = t->c[i + 1];
            i += 2;
        }
        e->count++;
    }
    return i + 1;
}

static bool fits(const struct element *e, uint32_t c)
{
    bool found = e->kind == ANY;
    for (unsigned i = 0; e->kind == ONE_OF && i < e->count; i++)
        found |= e->low[i] <= c && c <= e->high[i];
    return found != e->inverted;
}

/* By a table: does what stands before element i match what stands before character k? */
static bool slow_match(struct slice pattern, struct slice name)
{
    static struct text p, t;
    static struct element e[CHOICE_BYTES_MAX];
    static bool yes[CHOICE_BYTES_MAX + 1][CHOICE_BYTES_MAX + 2];
    unsigned count = 0;
    characters(pattern, true, &p);
    characters(name, false, &t);
    memset(e, 0, sizeof e);
    for (unsigned i = 0; i < p.n; count++) {
        struct element *x = &e[count];
        if (is(&p, i, '['))
            i = set_of(&p, i + 1, x);
        else if (is(&p, i, '*') || is(&p, i, '?'))
            x->kind = is(&p, i++, '*') ? STAR : ANY;
        else
            *x = (struct element){.kind = ONE_OF, .count = 1, .low[0] = p.c[i], .high[0] = p.c[i]}, i++;
    }
    memset(yes, 0, sizeof yes);
    yes[0][0] = true;
    for (unsigned i = 0; i < count; i++)
        for (unsigned k = 0; k <= t.n; k++) {
            if (e[i].kind == STAR)
                yes[i + 1][k] = yes[i][k] || (k > 0 && yes[i + 1][k - 1]);
            else
                yes[i + 1][k] = k > 0 && yes[i][k - 1] && fits(&e[i], t.c[k - 1]);
        }
    return yes[count][t.n];
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char pattern[600];
    const uint8_t *zero = memchr(data, 0, n);
    size_t m = zero ? (size_t)(zero - data) : n, left = zero ? n - m - 1 : 0;
    if (m >= sizeof pattern)
        return 0;
    memcpy(pattern, data, m);
    pattern[m] = '\0';
    struct slice name = SLICE(zero ? zero + 1 : data, left < CHOICE_BYTES_MAX ? left : CHOICE_BYTES_MAX);
    struct choice c = {.pattern = pattern, .slice = (uint32_t)(n % 3), .slices = 3};
    bool longer = m > CHOICE_BYTES_MAX;
    int rc = choice_check(&c, NULL);
    check(!longer || rc < 0);
    if (rc < 0)
        return 0;
    bool inverted = m > 0 && *pattern == '!';
    bool expected = slow_match(SLICE(pattern + inverted, m - inverted), name) != inverted;
    check(choice_matches(pattern, name) == expected);
    uint32_t matched = 0, taken = 0;
    for (unsigned i = 0; i < 9; i++)
        taken += choice_takes(&c, name, &matched);
    check(taken == (expected || m == 0 ? 3u : 0u) && choice_digest(&c) != 0);
    return 0;
}
