/* SPDX-License-Identifier: Apache-2.0 */
#include "client/feed_buffers.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

#define FRAME_UNITS 64u
#define FRAME_BYTES ((size_t)FRAME_UNITS * FEED_UNIT_BYTES)
#define SMALL_BYTES FEED_UNIT_BYTES
#define HUGE_BYTES  (2u << 20)

int feed_buffers_init(struct feed_buffers *b, uint64_t bytes)
{
    uint64_t frames = bytes / FRAME_BYTES + (bytes % FRAME_BYTES > 0);
    *b = (struct feed_buffers){0};
    if (frames > UINT32_MAX || frames > SIZE_MAX / FRAME_BYTES - 1)
        return -ENOMEM;
    b->mapped_bytes = (size_t)frames * FRAME_BYTES + HUGE_BYTES;
    b->mapped = mmap(NULL, b->mapped_bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    b->used = calloc(frames, sizeof *b->used);
    if (b->mapped == MAP_FAILED || !b->used) {
        if (b->mapped != MAP_FAILED)
            munmap(b->mapped, b->mapped_bytes);
        free(b->used);
        *b = (struct feed_buffers){0};
        return -ENOMEM;
    }
    b->memory = (uint8_t *)(((uintptr_t)b->mapped + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES);
    b->frames = (uint32_t)frames;
    (void)madvise(b->mapped, b->mapped_bytes, MADV_HUGEPAGE); /* it works without, only slower */
    (void)madvise(b->mapped, b->mapped_bytes, MADV_DONTDUMP);
    return 0;
}

void feed_buffers_free(struct feed_buffers *b)
{
    for (uint32_t i = 0; i < b->frames; i++)
        check(b->used[i] == 0);
    if (b->mapped)
        munmap(b->mapped, b->mapped_bytes);
    free(b->used);
    *b = (struct feed_buffers){0};
}

static unsigned units_of(size_t n)
{
    return (unsigned)((n + FEED_UNIT_BYTES - 1) / FEED_UNIT_BYTES);
}

size_t feed_buffer_cost(size_t n)
{
    return n <= SMALL_BYTES ? n : (size_t)units_of(n) * FEED_UNIT_BYTES;
}

static uint64_t run_of(unsigned units)
{
    return units == FRAME_UNITS ? UINT64_MAX : (1ull << units) - 1;
}

/* The first free run of so many units in a frame; FRAME_UNITS: none. */
static unsigned find_run(uint64_t used, unsigned units)
{
    unsigned at = 0;
    while (at + units <= FRAME_UNITS) {
        uint64_t taken = used >> at & run_of(units);
        if (!taken)
            return at;
        at += 64u - (unsigned)__builtin_clzll(taken); /* behind the last one taken */
    }
    return FRAME_UNITS;
}

uint8_t *feed_buffer_take(struct feed_buffers *b, size_t n)
{
    unsigned units = units_of(n);
    check(n > 0);
    for (uint32_t i = 0; n > SMALL_BYTES && units <= FRAME_UNITS && i < b->frames; i++) {
        unsigned at = find_run(b->used[i], units);
        if (at == FRAME_UNITS)
            continue;
        b->used[i] |= run_of(units) << at;
        return b->memory + i * FRAME_BYTES + (size_t)at * FEED_UNIT_BYTES;
    }
    return malloc(n);
}

void feed_buffer_give(struct feed_buffers *b, uint8_t *p, size_t n)
{
    if (!p)
        return;
    if ((uintptr_t)p < (uintptr_t)b->memory ||
        (uintptr_t)p >= (uintptr_t)b->memory + b->frames * FRAME_BYTES) {
        free(p);
        return;
    }
    size_t unit = (size_t)(p - b->memory) / FEED_UNIT_BYTES;
    uint64_t run = run_of(units_of(n)) << unit % FRAME_UNITS;
    check((b->used[unit / FRAME_UNITS] & run) == run);
    b->used[unit / FRAME_UNITS] &= ~run;
}
