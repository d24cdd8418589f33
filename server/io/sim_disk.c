/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A disk of the simulator: what is there now, and what would be there after a loss of power.
 *
 * Bytes become durable with fdatasync or fsync of the file, together with its length; a name with fsync of
 * its folder. A crash takes for each sector of 512 bytes, each length and each folder entry that differ
 * between the two either the one or the other. Bytes that a truncation cut off are gone at once.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "format/limits.h"
#include "server/io/sim_impl.h"

#define PAGE_BYTES           4096u
#define SECTOR_BYTES         512u
#define GROUP_PAGES          512u
#define FILE_MAX             (1ull << 45)
#define ENTRY_NAME_BYTES_MAX 255u

struct page {
    uint8_t *now;  /* NULL: zeros */
    uint8_t *kept; /* where dirty: what is durable; NULL: zeros */
    uint8_t dirty; /* bit per sector */
};

struct group {
    struct page pages[GROUP_PAGES];
};

struct inode {
    struct list in_disk;
    uint64_t number;
    bool folder, broken_sync;
    unsigned links; /* entries that show it now */
    unsigned refs;  /* those, entries that show it durably, and open descriptors */
    unsigned opens;
    unsigned rest; /* reads that go well, after one that did not */
    uint64_t size, durable_size, mtime_ns;
    struct group **groups; /* of a file */
    size_t group_count;
    uint64_t page_count, reserved_bytes, charged_bytes;
    struct list entries; /* of a folder, in no order */
    const struct sim_fd *locked_by;
};

struct entry {
    struct list in_folder;
    struct inode *now, *durable; /* NULL: not there */
    char name[ENTRY_NAME_BYTES_MAX + 1];
};

struct disk {
    struct sim *sim;
    uint64_t capacity_bytes, used_bytes, next_number;
    struct list inodes;
    struct inode *root;
    uint64_t unit; /* of those that are not durable: the next one that a crash decides about */
};

static struct inode *inode_new(struct disk *d, bool folder)
{
    struct inode *i = sim_alloc(sizeof *i);
    i->number = d->next_number++;
    i->folder = folder;
    i->mtime_ns = sim_unix_ns(d->sim);
    list_init(&i->entries);
    list_add_tail(&d->inodes, &i->in_disk);
    return i;
}

static void page_clean(struct page *p)
{
    free(p->kept);
    p->kept = NULL;
    p->dirty = 0;
}

static void page_free(struct inode *i, struct page *p)
{
    page_clean(p);
    if (p->now)
        i->page_count--;
    free(p->now);
    p->now = NULL;
}

static void inode_free(struct inode *i)
{
    list_del(&i->in_disk);
    for (size_t g = 0; g < i->group_count; g++) {
        for (unsigned k = 0; i->groups[g] && k < GROUP_PAGES; k++)
            page_free(i, &i->groups[g]->pages[k]);
        free(i->groups[g]);
    }
    free(i->groups);
    struct list *e;
    while ((e = list_pop(&i->entries)))
        free(container_of(e, struct entry, in_folder));
    free(i);
}

/* Space is counted while a file can be reached; one that is only held for a crash costs nothing. */
static bool charge(struct disk *d, struct inode *i)
{
    uint64_t pages = i->page_count * PAGE_BYTES;
    uint64_t want = i->links || i->opens ? (pages > i->reserved_bytes ? pages : i->reserved_bytes) : 0;
    if (want > i->charged_bytes && want - i->charged_bytes > d->capacity_bytes - d->used_bytes)
        return false;
    d->used_bytes = d->used_bytes - i->charged_bytes + want;
    i->charged_bytes = want;
    return true;
}

static void inode_unref(struct disk *d, struct inode *i)
{
    (void)charge(d, i);
    if (--i->refs == 0)
        inode_free(i);
}

struct disk *disk_create(struct sim *s, uint64_t capacity_bytes)
{
    struct disk *d = sim_alloc(sizeof *d);
    d->sim = s;
    d->capacity_bytes = capacity_bytes;
    d->next_number = 2;
    list_init(&d->inodes);
    d->root = inode_new(d, true);
    d->root->links = d->root->refs = 1;
    return d;
}

void disk_destroy(struct disk *d)
{
    while (!list_empty(&d->inodes))
        inode_free(container_of(d->inodes.next, struct inode, in_disk));
    free(d);
}

/* Names. */

static struct entry *entry_find(const struct inode *folder, const char *name, size_t n)
{
    list_for_each (it, &folder->entries) {
        struct entry *e = container_of(it, struct entry, in_folder);
        if (strlen(e->name) == n && memcmp(e->name, name, n) == 0)
            return e;
    }
    return NULL;
}

static void entry_set(struct disk *d, struct inode **slot, struct inode *to, bool shows)
{
    struct inode *from = *slot;
    *slot = to;
    if (to) {
        to->refs++;
        to->links += shows;
    }
    if (from) {
        from->links -= shows;
        inode_unref(d, from);
    }
}

static void entry_drop_if_empty(struct entry *e)
{
    if (e->now || e->durable)
        return;
    list_del(&e->in_folder);
    free(e);
}

/* Goes down all but the last component. The last is name (may be empty: the folder itself is meant). */
static int walk_to(struct disk *d, const char *path, bool durable, struct inode **folder, const char **name,
                   size_t *name_bytes)
{
    struct inode *at = d->root;
    for (;;) {
        path += strspn(path, "/");
        size_t n = strcspn(path, "/");
        const char *rest = path + n + strspn(path + n, "/");
        if (!at->folder)
            return -ENOTDIR;
        if (n > ENTRY_NAME_BYTES_MAX)
            return -ENAMETOOLONG;
        if (n == 1 && path[0] == '.') {
            path = rest;
            continue;
        }
        if (!*rest) {
            *folder = at;
            *name = path;
            *name_bytes = n;
            return 0;
        }
        struct entry *e = entry_find(at, path, n);
        at = e ? (durable ? e->durable : e->now) : NULL;
        if (!at)
            return -ENOENT;
        path = rest;
    }
}

static int find_inode(struct disk *d, const char *path, bool durable, struct inode **out)
{
    struct inode *folder;
    const char *name;
    size_t n;
    int status = walk_to(d, path, durable, &folder, &name, &n);
    if (status)
        return status;
    if (n == 0) {
        *out = folder;
        return 0;
    }
    struct entry *e = entry_find(folder, name, n);
    *out = e ? (durable ? e->durable : e->now) : NULL;
    return *out ? 0 : -ENOENT;
}

static int entry_add(struct disk *d, const char *path, struct inode *what)
{
    struct inode *folder;
    const char *name;
    size_t n;
    int status = walk_to(d, path, false, &folder, &name, &n);
    if (status)
        return status;
    struct entry *e = n ? entry_find(folder, name, n) : NULL;
    if (!n || (e && e->now))
        return -EEXIST;
    if (!e) {
        e = sim_alloc(sizeof *e);
        memcpy(e->name, name, n);
        list_add_tail(&folder->entries, &e->in_folder);
    }
    entry_set(d, &e->now, what, true);
    folder->mtime_ns = sim_unix_ns(d->sim);
    return 0;
}

static int add_new(struct disk *d, const char *path, bool folder, struct inode **out)
{
    struct inode *i = inode_new(d, folder);
    i->refs = 1; /* ours, until it is named */
    int status = entry_add(d, path, i);
    *out = status ? NULL : i;
    inode_unref(d, i);
    return status;
}

int64_t disk_open(struct disk *d, const char *path, int flags, struct inode **out)
{
    struct inode *i = NULL;
    int status = find_inode(d, path, false, &i);
    if (status == 0 && (flags & O_CREAT) && (flags & O_EXCL))
        return -EEXIST;
    if (status == -ENOENT && (flags & O_CREAT))
        status = add_new(d, path, false, &i);
    if (status)
        return status;
    if ((flags & O_DIRECTORY) && !i->folder)
        return -ENOTDIR;
    if (i->folder && (flags & O_ACCMODE) != O_RDONLY)
        return -EISDIR;
    i->opens++;
    i->refs++;
    if ((flags & O_TRUNC) && !i->folder) {
        struct sim_fd f = {.inode = i, .flags = flags};
        (void)disk_truncate(d, &f, 0);
    }
    *out = i;
    return 0;
}

void disk_close(struct disk *d, struct sim_fd *f)
{
    struct inode *i = f->inode;
    if (i->locked_by == f)
        i->locked_by = NULL;
    f->inode = NULL;
    i->opens--;
    inode_unref(d, i);
}

int disk_lock(struct sim_fd *f)
{
    if (f->inode->locked_by && f->inode->locked_by != f)
        return -EWOULDBLOCK;
    f->inode->locked_by = f;
    return 0;
}

int64_t disk_link(struct disk *d, const char *from, const char *to)
{
    struct inode *i;
    int status = find_inode(d, from, false, &i);
    if (status)
        return status;
    return i->folder ? -EPERM : entry_add(d, to, i);
}

static bool folder_is_empty(const struct inode *i)
{
    list_for_each (it, &i->entries)
        if (container_of(it, struct entry, in_folder)->now)
            return false;
    return true;
}

int64_t disk_unlink(struct disk *d, const char *path, bool folder)
{
    struct inode *in;
    const char *name;
    size_t n;
    int status = walk_to(d, path, false, &in, &name, &n);
    if (status)
        return status;
    struct entry *e = n ? entry_find(in, name, n) : NULL;
    if (!n)
        return -EBUSY;
    if (!e || !e->now)
        return -ENOENT;
    if (e->now->folder != folder)
        return folder ? -ENOTDIR : -EISDIR;
    if (folder && !folder_is_empty(e->now))
        return -ENOTEMPTY;
    entry_set(d, &e->now, NULL, true);
    entry_drop_if_empty(e);
    in->mtime_ns = sim_unix_ns(d->sim);
    return 0;
}

int64_t disk_mkdir(struct disk *d, const char *path)
{
    struct inode *i;
    return add_new(d, path, true, &i);
}

int64_t disk_stat(struct disk *d, const char *path, struct loop_stat *out)
{
    struct inode *i;
    int status = find_inode(d, path, false, &i);
    if (status == 0)
        *out = (struct loop_stat){.bytes = i->size,
                                  .mtime_ns = i->mtime_ns,
                                  .inode = i->number,
                                  .folder = i->folder,
                                  .file = !i->folder};
    return status;
}

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

int64_t disk_list(struct disk *d, const char *path, struct loop_names *out)
{
    struct inode *i;
    int status = find_inode(d, path, false, &i);
    if (status)
        return status;
    if (!i->folder)
        return -ENOTDIR;
    size_t count = 0;
    list_for_each (it, &i->entries)
        count += container_of(it, struct entry, in_folder)->now != NULL;
    struct loop_names names = {.names = sim_alloc(count * sizeof *names.names)};
    list_for_each (it, &i->entries) {
        struct entry *e = container_of(it, struct entry, in_folder);
        if (!e->now)
            continue;
        char *copy = strdup(e->name);
        check(copy);
        names.names[names.count++] = copy;
    }
    qsort(names.names, names.count, sizeof *names.names, by_bytes);
    *out = names;
    return 0;
}

int disk_space(struct disk *d, const char *path, uint64_t *free_bytes, uint64_t *total_bytes)
{
    struct inode *i;
    int status = find_inode(d, path, false, &i);
    *free_bytes = d->capacity_bytes - d->used_bytes;
    *total_bytes = d->capacity_bytes;
    return status;
}

/* Bytes. */

/* The page, or NULL if it was never written and make is false. */
static struct page *page_at(struct inode *i, uint64_t page, bool make)
{
    size_t g = (size_t)(page / GROUP_PAGES);
    if (g >= i->group_count) {
        if (!make)
            return NULL;
        i->groups = reallocarray(i->groups, g + 1, sizeof *i->groups);
        check(i->groups);
        memset(i->groups + i->group_count, 0, (g + 1 - i->group_count) * sizeof *i->groups);
        i->group_count = g + 1;
    }
    if (!i->groups[g] && make)
        i->groups[g] = sim_alloc(sizeof *i->groups[g]);
    return i->groups[g] ? &i->groups[g]->pages[page % GROUP_PAGES] : NULL;
}

static bool aligned(const struct sim_fd *f, const void *p, size_t n, uint64_t offset)
{
    return !(f->flags & O_DIRECT) ||
           (offset % BLOCK_BYTES == 0 && n % BLOCK_BYTES == 0 && (uintptr_t)p % BLOCK_BYTES == 0);
}

int64_t disk_read(struct disk *d, const struct sim_fd *f, void *p, size_t n, uint64_t offset)
{
    struct inode *i = f->inode;
    uint8_t *out = p;
    (void)d;
    if (i->folder)
        return -EISDIR;
    if ((f->flags & O_ACCMODE) == O_WRONLY)
        return -EBADF;
    if (!aligned(f, p, n, offset))
        return -EINVAL;
    if (offset >= i->size)
        return 0;
    if (n > i->size - offset)
        n = (size_t)(i->size - offset);
    for (size_t done = 0; done < n;) {
        uint64_t at = offset + done;
        size_t inside = at % PAGE_BYTES, take = PAGE_BYTES - inside;
        take = take < n - done ? take : n - done;
        struct page *page = page_at(i, at / PAGE_BYTES, false);
        if (page && page->now)
            memcpy(out + done, page->now + inside, take);
        else
            memset(out + done, 0, take);
        done += take;
    }
    return (int64_t)n;
}

/* A file of the disk, any. */
static struct inode *some_file(struct disk *d)
{
    uint64_t n = 0;
    struct inode *found = NULL;
    list_for_each (it, &d->inodes) {
        struct inode *i = container_of(it, struct inode, in_disk);
        if (!i->folder && i->size > 0 && sim_below(d->sim, ++n) == 0)
            found = i;
    }
    return found;
}

void disk_misdirect(struct disk *d, const struct sim_fd *f, uint8_t *p, size_t n)
{
    struct sim_fd from = {.inode = sim_below(d->sim, 2) ? f->inode : some_file(d), .flags = O_RDONLY};
    size_t skip = (size_t)sim_below(d->sim, (n + SECTOR_BYTES - 1) / SECTOR_BYTES) * SECTOR_BYTES;
    uint64_t sector = sim_below(d->sim, from.inode->size / SECTOR_BYTES + 1);
    int64_t got = disk_read(d, &from, p + skip, n - skip, sector * SECTOR_BYTES);
    check(got >= 0);
    memset(p + skip + got, 0, n - skip - (size_t)got);
}

unsigned *disk_rest(const struct sim_fd *f)
{
    return &f->inode->rest;
}

/* Keeps the durable bytes aside before the first change after a sync. */
static bool page_touch(struct disk *d, struct inode *i, struct page *p)
{
    if (!p->now) {
        i->page_count++;
        if (!charge(d, i)) {
            i->page_count--;
            return false;
        }
        p->now = sim_alloc(PAGE_BYTES);
        return true;
    }
    if (!p->dirty) {
        p->kept = sim_alloc(PAGE_BYTES);
        memcpy(p->kept, p->now, PAGE_BYTES);
    }
    return true;
}

int64_t disk_write(struct disk *d, const struct sim_fd *f, const void *p, size_t n, uint64_t offset)
{
    struct inode *i = f->inode;
    size_t done = 0;
    if (i->folder || (f->flags & O_ACCMODE) == O_RDONLY)
        return -EBADF;
    if (!aligned(f, p, n, offset))
        return -EINVAL;
    if (offset > FILE_MAX || n > FILE_MAX - offset)
        return -EFBIG;
    while (done < n) {
        uint64_t at = offset + done;
        size_t inside = at % PAGE_BYTES, take = PAGE_BYTES - inside;
        take = take < n - done ? take : n - done;
        struct page *page = page_at(i, at / PAGE_BYTES, true);
        if (!page_touch(d, i, page))
            break;
        memcpy(page->now + inside, (const uint8_t *)p + done, take);
        for (size_t k = inside / SECTOR_BYTES; k <= (inside + take - 1) / SECTOR_BYTES; k++)
            page->dirty |= (uint8_t)(1u << k);
        done += take;
        if (at + take > i->size)
            i->size = at + take;
    }
    i->mtime_ns = sim_unix_ns(d->sim);
    return done || !n ? (int64_t)done : -ENOSPC;
}

static void for_each_page(struct inode *i, void (*visit)(struct disk *d, struct inode *i, struct page *p),
                          struct disk *d)
{
    for (size_t g = 0; g < i->group_count; g++)
        for (unsigned k = 0; i->groups[g] && k < GROUP_PAGES; k++)
            visit(d, i, &i->groups[g]->pages[k]);
}

static void visit_sync(struct disk *d, struct inode *i, struct page *p)
{
    (void)d, (void)i;
    page_clean(p);
}

int64_t disk_sync(struct disk *d, const struct sim_fd *f)
{
    struct inode *i = f->inode;
    if (i->broken_sync)
        return 0;
    if (!i->folder) {
        for_each_page(i, visit_sync, d);
        i->durable_size = i->size;
        return 0;
    }
    list_for_each_safe (it, &i->entries) {
        struct entry *e = container_of(it, struct entry, in_folder);
        if (e->durable != e->now)
            entry_set(d, &e->durable, e->now, false);
        entry_drop_if_empty(e);
    }
    return 0;
}

void disk_break_sync(const struct sim_fd *f)
{
    f->inode->broken_sync = true;
}

int64_t disk_allocate(struct disk *d, const struct sim_fd *f, uint64_t n)
{
    struct inode *i = f->inode;
    uint64_t before = i->reserved_bytes;
    if (i->folder || (f->flags & O_ACCMODE) == O_RDONLY)
        return -EBADF;
    if (n > FILE_MAX)
        return -EFBIG;
    n = (n + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    if (n > before)
        i->reserved_bytes = n;
    if (charge(d, i))
        return 0;
    i->reserved_bytes = before;
    return -ENOSPC;
}

static void cut_pages(struct inode *i, uint64_t n)
{
    uint64_t first = (n + PAGE_BYTES - 1) / PAGE_BYTES;
    for (uint64_t page = first; page < i->group_count * (uint64_t)GROUP_PAGES; page++) {
        struct page *p = page_at(i, page, false);
        if (p)
            page_free(i, p);
        else
            page |= GROUP_PAGES - 1; /* the whole group is absent */
    }
    struct page *last = n % PAGE_BYTES ? page_at(i, n / PAGE_BYTES, false) : NULL;
    if (last && last->now)
        memset(last->now + n % PAGE_BYTES, 0, PAGE_BYTES - n % PAGE_BYTES);
}

int64_t disk_truncate(struct disk *d, const struct sim_fd *f, uint64_t n)
{
    struct inode *i = f->inode;
    if (i->folder || (f->flags & O_ACCMODE) == O_RDONLY)
        return -EINVAL;
    if (n > FILE_MAX)
        return -EFBIG;
    cut_pages(i, n);
    i->size = n;
    i->reserved_bytes = 0;
    (void)charge(d, i);
    return 0;
}

/* Loss of power. */

/* True: what was not durable survived all the same. */
static bool survives(struct disk *d)
{
    const struct sim_faults *f = &d->sim->options.faults;
    uint64_t unit = d->unit++;
    if (!f->lose_unsynced || f->lose_way == SIM_LOSE_NOTHING)
        return true;
    if (f->lose_way == SIM_LOSE_ANY)
        return sim_below(d->sim, 2);
    if (f->lose_way == SIM_LOSE_ALL)
        return false;
    uint32_t way = f->lose_way - SIM_LOSE_BUT;
    return (unit == way / 2) == (way % 2 == 0);
}

static void visit_crash(struct disk *d, struct inode *i, struct page *p)
{
    (void)i;
    for (unsigned k = 0; p->dirty >> k; k++) {
        if (!(p->dirty >> k & 1) || survives(d))
            continue;
        if (p->kept)
            memcpy(p->now + k * SECTOR_BYTES, p->kept + k * SECTOR_BYTES, SECTOR_BYTES);
        else
            memset(p->now + k * SECTOR_BYTES, 0, SECTOR_BYTES);
    }
    page_clean(p);
}

static void crash_file(struct disk *d, struct inode *i)
{
    for_each_page(i, visit_crash, d);
    if (i->size != i->durable_size && !survives(d))
        i->size = i->durable_size;
    cut_pages(i, i->size);
    i->durable_size = i->size;
}

static void crash_folder(struct disk *d, struct inode *i)
{
    list_for_each_safe (it, &i->entries) {
        struct entry *e = container_of(it, struct entry, in_folder);
        if (e->now != e->durable) {
            if (survives(d))
                e->durable = e->now;
            else
                e->now = e->durable;
        }
        entry_drop_if_empty(e);
    }
}

static void count_reachable(struct inode *i)
{
    i->links++;
    i->refs += 2;
    if (i->links > 1)
        return;
    list_for_each (it, &i->entries)
        count_reachable(container_of(it, struct entry, in_folder)->now);
}

static uint64_t unsynced_bytes(const struct inode *i)
{
    uint64_t units = i->size != i->durable_size;
    for (size_t g = 0; g < i->group_count; g++)
        for (unsigned k = 0; i->groups[g] && k < GROUP_PAGES; k++)
            units += (unsigned)__builtin_popcount(i->groups[g]->pages[k].dirty);
    return units;
}

static uint64_t unsynced_names(const struct inode *i)
{
    uint64_t units = 0;
    list_for_each (it, &i->entries) {
        const struct entry *e = container_of(it, struct entry, in_folder);
        units += e->now != e->durable;
    }
    return units;
}

uint64_t disk_unsynced(struct disk *d)
{
    uint64_t units = 0;
    list_for_each (it, &d->inodes) {
        const struct inode *i = container_of(it, struct inode, in_disk);
        units += i->folder ? unsynced_names(i) : unsynced_bytes(i);
    }
    return units;
}

void disk_crash(struct disk *d)
{
    d->unit = 0;
    list_for_each (it, &d->inodes) {
        struct inode *i = container_of(it, struct inode, in_disk);
        i->links = i->refs = i->opens = 0;
        i->reserved_bytes = i->charged_bytes = 0;
        i->locked_by = NULL;
        i->broken_sync = false;
        if (i->folder)
            crash_folder(d, i);
        else
            crash_file(d, i);
    }
    count_reachable(d->root);
    d->used_bytes = 0;
    list_for_each_safe (it, &d->inodes) {
        struct inode *i = container_of(it, struct inode, in_disk);
        if (i->links)
            (void)charge(d, i);
        else
            inode_free(i);
    }
}

/* For tests. */

int disk_file(struct disk *d, const char *path, bool durable_only, uint8_t **p, size_t *n)
{
    struct inode *i;
    int status = find_inode(d, path, durable_only, &i);
    if (status)
        return status;
    if (i->folder)
        return -EISDIR;
    *n = (size_t)(durable_only ? i->durable_size : i->size);
    uint8_t *out = *p = sim_alloc(*n);
    for (uint64_t at = 0; at < *n; at += SECTOR_BYTES) {
        struct page *page = page_at(i, at / PAGE_BYTES, false);
        size_t inside = at % PAGE_BYTES, take = *n - at < SECTOR_BYTES ? (size_t)(*n - at) : SECTOR_BYTES;
        if (!page)
            continue;
        bool old = durable_only && page->dirty >> (inside / SECTOR_BYTES) & 1;
        const uint8_t *from = old ? page->kept : page->now;
        if (from)
            memcpy(out + at, from + inside, take);
    }
    return 0;
}

int disk_flip(struct disk *d, const char *path, uint64_t offset, uint8_t mask)
{
    struct inode *i;
    int status = find_inode(d, path, false, &i);
    if (status)
        return status;
    struct page *page = i->folder || offset >= i->size ? NULL : page_at(i, offset / PAGE_BYTES, false);
    if (!page || !page->now)
        return -EINVAL;
    page->now[offset % PAGE_BYTES] ^= mask;
    if (page->dirty && page->kept)
        page->kept[offset % PAGE_BYTES] ^= mask;
    return 0;
}
