/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One mapping of whole pages per secret: small keys waste a page, and in return none shares a page with
 * anything that a core file, a swap or a forked child may see. Locking is best effort (the memlock limit may
 * be used up); the rest is not.
 */
#include "format/base/secret.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct secret {
    size_t n;
    size_t mapped;
    uint8_t bytes[];
};

void secret_wipe(void *p, size_t n)
{
    if (n > 0)
        explicit_bzero(p, n);
}

bool secret_memequal(const void *a, const void *b, size_t n)
{
    const volatile uint8_t *x = a, *y = b;
    uint8_t diff = 0;
    for (size_t i = 0; i < n; i++)
        diff |= x[i] ^ y[i];
    return diff == 0;
}

struct secret *secret_room(size_t n)
{
    check(n > 0 && n <= SECRET_ROOM_MAX);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t mapped = (sizeof(struct secret) + n + page - 1) / page * page;
    struct secret *s = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (s == MAP_FAILED)
        return NULL;
    (void)!madvise(s, mapped, MADV_DONTDUMP);
    (void)!mlock(s, mapped);
    (void)!madvise(s, mapped, MADV_WIPEONFORK);
    s->n = n;
    s->mapped = mapped;
    return s;
}

struct secret *secret_create(const void *bytes, size_t n)
{
    check(n <= SECRET_BYTES_MAX);
    struct secret *s = secret_room(n);
    if (s)
        memcpy(s->bytes, bytes, n);
    return s;
}

uint8_t *secret_fill(struct secret *s)
{
    return s->bytes;
}

void secret_free(struct secret *s)
{
    if (!s)
        return;
    size_t mapped = s->mapped;
    secret_wipe(s, mapped);
    munmap(s, mapped);
}

size_t secret_size(const struct secret *s)
{
    return s->n;
}

const uint8_t *secret_bytes(const struct secret *s)
{
    return s->bytes;
}

bool secret_equal(const struct secret *a, const struct secret *b)
{
    return a->n == b->n && secret_memequal(a->bytes, b->bytes, a->n);
}
