/* SPDX-License-Identifier: Apache-2.0 */
#include "format/base/pages.h"

#include <stdlib.h>
#include <sys/mman.h>

#define SMALL_PAGE_BYTES 4096u
#define LARGE_PAGE_BYTES (2u << 20)

void *pages_alloc(size_t n)
{
    void *p;
    if (posix_memalign(&p, n < LARGE_PAGE_BYTES ? SMALL_PAGE_BYTES : LARGE_PAGE_BYTES, n) != 0)
        return NULL;
    /* Only whole large pages: a small rest on one would take all of it. It works without, only slower. */
    if (n >= LARGE_PAGE_BYTES)
        (void)madvise(p, n / LARGE_PAGE_BYTES * LARGE_PAGE_BYTES, MADV_HUGEPAGE);
    return p;
}
