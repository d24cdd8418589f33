/* SPDX-License-Identifier: Apache-2.0 */
#include "format/base/utf8.h"

#include <string.h>

#define ONES  0x0101010101010101ull
#define HIGHS 0x8080808080808080ull

size_t utf8_sequence(const uint8_t *p, size_t left)
{
    static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};
    if (p[0] < 0x80)
        return 1;
    size_t n = p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : p[0] >= 0xc0 ? 2 : 0;
    if (n == 0 || n > left || p[0] > 0xf4)
        return 0;
    uint32_t code = p[0] & (0xffu >> (n + 1));
    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return 0;
        code = code << 6 | (p[i] & 0x3f);
    }
    if (code < least[n] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        return 0;
    return n;
}

/* ASCII without NUL, eight bytes of it. */
static bool is_plain(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, 8);
    return !((v | (v - ONES)) & HIGHS);
}

bool utf8_valid(const void *p, size_t n)
{
    const uint8_t *b = p;
    size_t i = 0;
    while (i + 8 <= n && is_plain(b + i)) /* eight at a time; the last eight of some once more */
        i = i + 8 == n || i + 16 <= n ? i + 8 : n - 8;
    while (i < n) {
        size_t take = utf8_sequence(b + i, n - i);
        if (take == 0 || b[i] == 0)
            return false;
        i += take;
    }
    return true;
}
