/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that the disk is read into and, on a lane, sent from. Buffers of a MiB are kept by the worker and
 * given out again, the latest first, in large pages where the kernel has them: fresh memory would cost a
 * fault for each of its pages, and small pages a look-up each when the disk writes to them; together that is
 * as much as the read itself.
 */
#include <stdlib.h>
#include <sys/mman.h>

#include "server/session/session.h"

#define BUFFER_BYTES     (1u << 20)
#define BUFFER_BYTES_MIN (128u << 10) /* smaller ones are malloc's */
#define LARGE_PAGE_BYTES (2u << 20)
#define REGION_BYTES     (BUFFER_REGION_BUFFERS * BUFFER_BYTES)

static bool is_kept(size_t n)
{
    return n >= BUFFER_BYTES_MIN && n <= BUFFER_BYTES;
}

/* One more region, if there may be one. */
static void grow(struct worker *w)
{
    void *p;
    if (w->region_count == BUFFER_REGIONS_MAX || posix_memalign(&p, LARGE_PAGE_BYTES, REGION_BYTES) != 0)
        return;
    (void)madvise(p, REGION_BYTES, MADV_HUGEPAGE); /* it works without, only slower */
    w->regions[w->region_count++] = p;
    for (size_t i = 0; i < BUFFER_REGION_BUFFERS; i++)
        w->buffers[w->buffer_count++] = (uint8_t *)p + i * BUFFER_BYTES;
}

static bool is_of_region(const struct worker *w, const uint8_t *p)
{
    for (unsigned i = 0; i < w->region_count; i++)
        if (p >= w->regions[i] && p < w->regions[i] + REGION_BYTES)
            return true;
    return false;
}

uint8_t *buffer_take(struct worker *w, size_t n)
{
    void *p;
    if (is_kept(n) && w->buffer_count == 0)
        grow(w);
    if (is_kept(n) && w->buffer_count > 0)
        return w->buffers[--w->buffer_count];
    return posix_memalign(&p, BLOCK_BYTES, n) == 0 ? p : NULL;
}

void buffer_give(struct worker *w, uint8_t *p)
{
    if (p && is_of_region(w, p))
        w->buffers[w->buffer_count++] = p;
    else
        free(p);
}

void buffers_free(struct worker *w)
{
    check(w->buffer_count == w->region_count * BUFFER_REGION_BUFFERS); /* else one is still in use */
    while (w->region_count > 0)
        free(w->regions[--w->region_count]);
    w->buffer_count = 0;
}
