/* SPDX-License-Identifier: Apache-2.0 */
#include "gpudirect/chunk_hash.h"

#include <string.h>

#include "format/base/cursor.h"

#define AHEAD 4096u /* bytes: about as much as memory delivers while a line is on its way */

static inline void add(struct chunk_hash *sum, uint64_t turn, const uint8_t *p)
{
    chunk_hash_add(sum, turn, le64_get(p), le64_get(p + 8), le64_get(p + 16), le64_get(p + 24));
}

void chunk_hash_sum(struct chunk_hash *to, uint64_t first, const void *data, size_t n)
{
    const uint8_t *p = data, *end = p + n;
    struct chunk_hash sum = *to;
    uint64_t turn = first * CHUNK_HASH_G;
    for (; end - p >= (ptrdiff_t)(2 * CHUNK_HASH_BLOCK); p += 2 * CHUNK_HASH_BLOCK) {
        __builtin_prefetch(
            (const void *)((uintptr_t)p + AHEAD)); /* may lie behind the end: it reads nothing */
        add(&sum, turn, p);
        add(&sum, turn + CHUNK_HASH_G, p + CHUNK_HASH_BLOCK);
        turn += 2 * CHUNK_HASH_G;
    }
    while (p < end) {
        uint8_t block[CHUNK_HASH_BLOCK] = {0};
        size_t got = (size_t)(end - p) < sizeof block ? (size_t)(end - p) : sizeof block;
        memcpy(block, p, got);
        add(&sum, turn, block);
        turn += CHUNK_HASH_G;
        p += got;
    }
    *to = sum;
}

struct chunk_hash chunk_hash(const void *p, size_t n)
{
    struct chunk_hash sum = {0, 0};
    chunk_hash_sum(&sum, 0, p, n);
    return chunk_hash_end(sum, n);
}
