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

void *pages_grow(void *p, size_t n, size_t more)
{
    void *q = n > 0 ? mremap(p, n, more, MREMAP_MAYMOVE)
                    : mmap(NULL, more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return q == MAP_FAILED ? NULL : q;
}

void pages_release(void *p, size_t n)
{
    if (n > 0)
        munmap(p, n);
}
