/* SPDX-License-Identifier: Apache-2.0 */
#include "client/stream.h"

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

#define PAGE_BYTES 4096u
#define PAGES      4u /* walked side by side: the prefetcher follows each, and all banks of memory have work */
#define STEP_BYTES 128u
#define LEAST      (64u << 10) /* below, the copy is better left in the cache */

static inline void step(uint8_t *to, const uint8_t *from)
{
    __m128i v[STEP_BYTES / 16];
    for (unsigned i = 0; i < STEP_BYTES / 16; i++)
        v[i] = _mm_loadu_si128((const __m128i *)(const void *)(from + 16 * i));
    for (unsigned i = 0; i < STEP_BYTES / 16; i++)
        _mm_stream_si128((__m128i *)(void *)(to + 16 * i), v[i]);
}

/* to is aligned to 16, better to 64. Returns how many bytes it did. */
static size_t copy_pages(uint8_t *to, const uint8_t *from, size_t n)
{
    const size_t group = PAGES * PAGE_BYTES;
    size_t done = 0;
    for (; n - done >= group; done += group)
        for (size_t at = done; at < done + PAGE_BYTES; at += STEP_BYTES)
            for (size_t page = 0; page < group; page += PAGE_BYTES)
                step(to + at + page, from + at + page);
    _mm_sfence();
    return done;
}

void stream_copy(void *to, const void *from, size_t n)
{
    uint8_t *out = to;
    const uint8_t *in = from;
    if (n >= LEAST) {
        size_t head = (64 - (uintptr_t)out % 64) % 64;
        memcpy(out, in, head);
        size_t done = head + copy_pages(out + head, in + head, n - head);
        out += done;
        in += done;
        n -= done;
    }
    if (n > 0)
        memcpy(out, in, n);
}
#else
void stream_copy(void *to, const void *from, size_t n)
{
    if (n > 0)
        memcpy(to, from, n);
}
#endif
