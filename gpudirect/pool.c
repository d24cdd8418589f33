/* SPDX-License-Identifier: Apache-2.0 */
#include "gpudirect/pool.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "format/base/cursor.h"

#define HUGE_BYTES (2u << 20)
#define PAGE_BYTES 4096u

#define PIECE_BYTES     (1u << 30) /* registered at once; some drivers refuse much more */
#define PIECE_BYTES_MIN (1u << 24) /* halved down to this where they refuse */

/* From <linux/mempolicy.h>, which not every libc has. */
#define MPOL_PREFERRED 1
#define MPOL_MF_MOVE   2

struct pool {
    uint8_t *memory; /* aligned to a huge page */
    void *mapped;
    size_t mapped_bytes;
    size_t bytes, slot_bytes, slots;
    bool locked;
    int lock_errnum; /* why not */
    char note[ERR_TEXT_BYTES + 100];
    struct memory *device; /* once asked to register */
    struct err refused;    /* why it is not */
    int near;              /* NUMA node that it was moved to, or -1 */
    size_t *pieces;        /* where each registered one begins; ascending, the first at 0 */
    size_t piece_count;
    pthread_mutex_t lock;
    size_t free_count;
    uint32_t *free_slots; /* a stack: the slot used last is the warmest */
};

/* "256 MiB locked, registered with CUDA in 1 piece near NUMA node 0" */
static void describe(struct pool *p)
{
    char registered[ERR_TEXT_BYTES + 40] = "", node[32] = "";
    unsigned long long mib = p->bytes >> 20;
    const char *kind = p->device ? memory_kind_name(memory_kind(p->device)) : "";
    struct rlimit limit = {0};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (p->near >= 0)
        snprintf(node, sizeof node, " near NUMA node %d", p->near);
    if (p->piece_count > 0)
        snprintf(registered, sizeof registered, "registered with %s in %zu piece%s%s", kind, p->piece_count,
                 p->piece_count == 1 ? "" : "s", node);
    else if (p->refused.class != ERR_NONE)
        snprintf(registered, sizeof registered, "not registered with %s: %s", kind, p->refused.text);
    const char *comma = *registered ? ", " : "";
    if (p->locked)
        snprintf(p->note, sizeof p->note, "%llu MiB locked%s%s", mib, comma, registered);
    else if (p->piece_count > 0) /* which pins it */
        snprintf(p->note, sizeof p->note, "%llu MiB %s", mib, registered);
    else if (limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < p->bytes)
        snprintf(
            p->note, sizeof p->note,
            "%llu MiB not locked: the memlock limit is %llu KiB; raise it (ulimit -l, or LimitMEMLOCK=)%s%s",
            mib, (unsigned long long)limit.rlim_cur >> 10, comma, registered);
    else
        snprintf(p->note, sizeof p->note, "%llu MiB not locked: %s%s%s", mib, strerror(p->lock_errnum), comma,
                 registered);
}

/* Huge pages first, so that touching takes few faults; then every page is made present, and every byte
 * written to: where a hypervisor gives memory late, the first pass over pages that are merely present takes a
 * third longer than later ones, and the first save would stall its trainer for it. */
static void take_memory(struct pool *p)
{
    (void)madvise(p->memory, p->bytes, MADV_HUGEPAGE);
    (void)madvise(p->memory, p->bytes, MADV_DONTFORK); /* a child has no use for it, and must not copy it */
    (void)madvise(p->memory, p->bytes, MADV_DONTDUMP);
    p->locked = mlock(p->memory, p->bytes) == 0;
    if (!p->locked)
        p->lock_errnum = errno;
    memset(p->memory, 0, p->bytes);
    describe(p);
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
    p->near = -1;
    p->free_slots = free_slots;
    for (size_t i = 0; i < p->slots; i++)
        free_slots[i] = (uint32_t)(p->slots - 1 - i);
    pthread_mutex_init(&p->lock, NULL);
    take_memory(p);
    *out = p;
    return 0;
}

/* ---- registering ---- */

/* A hint: where the kernel cannot, the pages stay. Locked pages may be moved until they are registered. */
static void move_near(struct pool *p, int node)
{
    unsigned long mask[16] = {0}; /* 1024 nodes, the most that kernels are built for */
    if (node < 0 || (size_t)node >= 8 * sizeof mask)
        return;
    mask[(size_t)node / (8 * sizeof *mask)] = 1ul << (size_t)node % (8 * sizeof *mask);
    if (syscall(SYS_mbind, p->memory, p->bytes, MPOL_PREFERRED, mask, 8 * sizeof mask, MPOL_MF_MOVE) == 0)
        p->near = node;
}

static void unregister_all(struct pool *p)
{
    while (p->piece_count > 0)
        memory_unregister(p->device, p->memory + p->pieces[--p->piece_count]);
}

/* Whole slots, so that none lies in two pieces; a slot that is larger than a piece is cut. */
static size_t piece_of(const struct pool *p, size_t most)
{
    return most > p->slot_bytes ? most / p->slot_bytes * p->slot_bytes : most;
}

static int register_all(struct pool *p, struct err *e)
{
    size_t most = PIECE_BYTES;
    for (size_t at = 0; at < p->bytes;) {
        size_t left = p->bytes - at, want = piece_of(p, most), n = left < want ? left : want;
        int rc = memory_register(p->device, p->memory + at, n, e);
        if (rc == 0) {
            p->pieces[p->piece_count++] = at;
            at += n;
        } else if (rc == -ENODEV || rc == -EEXIST || most <= PIECE_BYTES_MIN) {
            return rc;
        } else {
            most /= 2;
        }
    }
    return 0;
}

int pool_register(struct pool *p, struct memory *m, struct err *e)
{
    struct err own = {0};
    e = e ? e : &own;
    if (memory_kind(m) == MEMORY_HOST)
        return 0;
    if (p->device) {
        *e = p->refused; /* none, where it was registered */
        return -p->refused.errnum;
    }
    /* of pieces that are whole slots, none but the last is smaller than half of what was allowed */
    p->pieces = calloc(p->bytes / (PIECE_BYTES_MIN / 2) + 1, sizeof *p->pieces);
    if (!p->pieces)
        return err_set(e, ERR_NO_MEMORY, "no memory to register staging memory");
    p->device = m;
    move_near(p, memory_info(m)->numa_node);
    int rc = register_all(p, e);
    if (rc < 0) {
        err_prepend(e, "staging memory of %zu MiB", p->bytes >> 20);
        p->refused = *e;
        unregister_all(p);
    }
    describe(p);
    return rc;
}

bool pool_registered(const struct pool *p)
{
    return p->piece_count > 0;
}

size_t pool_run(const struct pool *p, const void *at, size_t n)
{
    size_t offset = (size_t)((const uint8_t *)at - p->memory);
    check((const uint8_t *)at >= p->memory && offset <= p->bytes && n <= p->bytes - offset);
    for (size_t i = 0; i < p->piece_count; i++)
        if (p->pieces[i] > offset)
            return p->pieces[i] - offset < n ? p->pieces[i] - offset : n;
    return n;
}

/* ---- slots ---- */

void pool_destroy(struct pool *p)
{
    if (!p)
        return;
    check(p->free_count == p->slots);
    unregister_all(p);
    munmap(p->mapped, p->mapped_bytes);
    pthread_mutex_destroy(&p->lock);
    free(p->pieces);
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

/* With the lock held: the last of the slots from which on `count` are free, or p->slots. */
static size_t find_row(const struct pool *p, size_t count, uint8_t *is_free)
{
    size_t found = 0;
    for (size_t i = 0; i < p->free_count; i++)
        is_free[p->free_slots[i]] = 1;
    for (size_t i = p->slots; i > 0; i--) {
        found = is_free[i - 1] ? found + 1 : 0;
        if (found == count)
            return i - 1;
    }
    return p->slots;
}

uint8_t *pool_take_row(struct pool *p, size_t count)
{
    uint8_t *is_free = calloc(p->slots, 1), *row = NULL;
    if (!is_free)
        return NULL;
    pthread_mutex_lock(&p->lock);
    size_t first = find_row(p, count, is_free), left = 0;
    if (first < p->slots) {
        row = p->memory + first * p->slot_bytes;
        for (size_t i = 0; i < p->free_count; i++)
            if (p->free_slots[i] < first || p->free_slots[i] >= first + count)
                p->free_slots[left++] = p->free_slots[i];
        p->free_count = left;
    }
    pthread_mutex_unlock(&p->lock);
    free(is_free);
    return row;
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
