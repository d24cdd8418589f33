/* SPDX-License-Identifier: Apache-2.0 */
#include "gpudirect/pool.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "format/base/cursor.h"

#define HUGE_BYTES (2u << 20)
#define PAGE_BYTES 4096u

struct pool {
    uint8_t *memory; /* aligned to a huge page */
    void *mapped;
    size_t mapped_bytes;
    size_t bytes, slot_bytes, slots;
    bool locked;
    char note[200];
    pthread_mutex_t lock;
    size_t free_count;
    uint32_t *free_slots; /* a stack: the slot used last is the warmest */
};

static void describe(struct pool *p, int errnum)
{
    unsigned long long mib = p->bytes >> 20;
    struct rlimit limit = {0};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (p->locked)
        snprintf(p->note, sizeof p->note, "%llu MiB locked", mib);
    else if (limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < p->bytes)
        snprintf(p->note, sizeof p->note,
                 "%llu MiB not locked: the memlock limit is %llu KiB; raise it (ulimit -l, or LimitMEMLOCK=)",
                 mib, (unsigned long long)limit.rlim_cur >> 10);
    else
        snprintf(p->note, sizeof p->note, "%llu MiB not locked: %s", mib, strerror(errnum));
}

/* Huge pages first, so that touching takes few faults; then every page is made present. */
static void take_memory(struct pool *p)
{
    int errnum = 0;
    (void)madvise(p->memory, p->bytes, MADV_HUGEPAGE);
    (void)madvise(p->memory, p->bytes, MADV_DONTFORK); /* a child has no use for it, and must not copy it */
    (void)madvise(p->memory, p->bytes, MADV_DONTDUMP);
    p->locked = mlock(p->memory, p->bytes) == 0;
    if (!p->locked) {
        errnum = errno;
        for (size_t i = 0; i < p->bytes; i += PAGE_BYTES)
            ((volatile uint8_t *)p->memory)[i] = 0;
    }
    describe(p, errnum);
}

int pool_create(uint64_t bytes, size_t slot_bytes, struct pool **out, struct err *e)
{
    check(slot_bytes > 0 && slot_bytes % PAGE_BYTES == 0);
    uint64_t slots = bytes / slot_bytes > 0 ? bytes / slot_bytes : 1;
    size_t total = 0, mapped = 0;
    if (slots > UINT32_MAX || mul_overflows((size_t)slots, slot_bytes, &total) ||
        add_overflows(total, HUGE_BYTES, &mapped))
        return err_set(e, ERR_LIMIT, "staging memory of %llu bytes is more than this machine can address",
                       (unsigned long long)bytes);
    struct pool *p = calloc(1, sizeof *p);
    uint32_t *free_slots = calloc(slots, sizeof *free_slots);
    void *m = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!p || !free_slots || m == MAP_FAILED) {
        free(p);
        free(free_slots);
        if (m != MAP_FAILED)
            munmap(m, mapped);
        return err_set(e, ERR_NO_MEMORY, "cannot take %zu MiB of memory for staging; set staging_bytes lower",
                       total >> 20);
    }
    p->mapped = m;
    p->mapped_bytes = mapped;
    p->memory = (uint8_t *)(((uintptr_t)m + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES);
    p->bytes = total;
    p->slot_bytes = slot_bytes;
    p->slots = p->free_count = (size_t)slots;
    p->free_slots = free_slots;
    for (size_t i = 0; i < p->slots; i++)
        free_slots[i] = (uint32_t)(p->slots - 1 - i);
    pthread_mutex_init(&p->lock, NULL);
    take_memory(p);
    *out = p;
    return 0;
}

void pool_destroy(struct pool *p)
{
    if (!p)
        return;
    check(p->free_count == p->slots);
    munmap(p->mapped, p->mapped_bytes);
    pthread_mutex_destroy(&p->lock);
    free(p->free_slots);
    free(p);
}

size_t pool_slots(const struct pool *p)
{
    return p->slots;
}

size_t pool_slot_bytes(const struct pool *p)
{
    return p->slot_bytes;
}

uint8_t *pool_take(struct pool *p)
{
    uint8_t *slot = NULL;
    pthread_mutex_lock(&p->lock);
    if (p->free_count > 0)
        slot = p->memory + (size_t)p->free_slots[--p->free_count] * p->slot_bytes;
    pthread_mutex_unlock(&p->lock);
    return slot;
}

void pool_give(struct pool *p, uint8_t *slot)
{
    size_t at = (size_t)(slot - p->memory);
    check(slot >= p->memory && at < p->bytes && at % p->slot_bytes == 0);
    pthread_mutex_lock(&p->lock);
    check(p->free_count < p->slots);
    p->free_slots[p->free_count++] = (uint32_t)(at / p->slot_bytes);
    pthread_mutex_unlock(&p->lock);
}

bool pool_locked(const struct pool *p)
{
    return p->locked;
}

const char *pool_note(const struct pool *p)
{
    return p->note;
}
