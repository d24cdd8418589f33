/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory backend: for tests, and for a store that may be forgotten. Objects are immutable and counted, so
 * reads copy outside the lock. One lock per disk; nothing else is taken under it.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "server/backend/impl.h"

struct object {
    unsigned refs; /* under the disk's lock */
    size_t n;
    uint8_t *p;
    char name[BACKEND_NAME_BYTES_MAX + 1];
};

struct memory_disk {
    pthread_mutex_t lock;
    unsigned refs;
    uint64_t capacity_bytes, used_bytes;
    struct object **objects; /* sorted by name */
    size_t count, room;
};

struct memory {
    struct backend backend;
    struct memory_disk *disk;
};

struct memory_file {
    struct backend_file file;
    uint64_t charged_bytes;
    uint8_t *p;
    size_t room;
};

static struct memory_disk *disk_of(struct backend_op *op)
{
    return container_of(op->backend, struct memory, backend)->disk;
}

struct memory_disk *memory_disk_create(uint64_t capacity_bytes)
{
    struct memory_disk *d = calloc(1, sizeof *d);
    if (!d)
        return NULL;
    pthread_mutex_init(&d->lock, NULL);
    d->refs = 1;
    d->capacity_bytes = capacity_bytes;
    return d;
}

void memory_disk_unref(struct memory_disk *d)
{
    if (!d)
        return;
    pthread_mutex_lock(&d->lock);
    bool last = --d->refs == 0;
    pthread_mutex_unlock(&d->lock);
    if (!last)
        return;
    for (size_t i = 0; i < d->count; i++) {
        free(d->objects[i]->p);
        free(d->objects[i]);
    }
    free(d->objects);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

static int charge(struct memory_disk *d, uint64_t n)
{
    int status = 0;
    pthread_mutex_lock(&d->lock);
    if (n > d->capacity_bytes - d->used_bytes)
        status = -ENOSPC;
    else
        d->used_bytes += n;
    pthread_mutex_unlock(&d->lock);
    return status;
}

static void give_back(struct memory_disk *d, uint64_t n)
{
    pthread_mutex_lock(&d->lock);
    d->used_bytes -= n;
    pthread_mutex_unlock(&d->lock);
}

/* Place of the first object whose name is not below the given one. Under the lock. */
static size_t place_of(const struct memory_disk *d, const char *name)
{
    size_t low = 0, high = d->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (strcmp(d->objects[middle]->name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct object *find(const struct memory_disk *d, const char *name)
{
    size_t at = place_of(d, name);
    return at < d->count && strcmp(d->objects[at]->name, name) == 0 ? d->objects[at] : NULL;
}

/* True if an object lies below name/. */
static bool is_folder(const struct memory_disk *d, const char *name)
{
    char prefix[BACKEND_NAME_BYTES_MAX + 2];
    size_t n = strlen(name);
    memcpy(prefix, name, n);
    memcpy(prefix + n, "/", 2);
    size_t at = place_of(d, prefix);
    return at < d->count && strncmp(d->objects[at]->name, prefix, n + 1) == 0;
}

static bool lies_below_an_object(const struct memory_disk *d, const char *name)
{
    char above[BACKEND_NAME_BYTES_MAX + 1];
    for (const char *cut = strchr(name, '/'); cut; cut = strchr(cut + 1, '/')) {
        memcpy(above, name, (size_t)(cut - name));
        above[cut - name] = '\0';
        if (find(d, above))
            return true;
    }
    return false;
}

static void release(struct memory_disk *d, struct object *o)
{
    pthread_mutex_lock(&d->lock);
    bool last = --o->refs == 0;
    if (last)
        d->used_bytes -= o->n;
    pthread_mutex_unlock(&d->lock);
    if (last) {
        free(o->p);
        free(o);
    }
}

/* Takes p over on success. */
static int publish(struct memory_disk *d, const char *name, uint8_t *p, size_t n)
{
    struct object *o = calloc(1, sizeof *o);
    if (!o)
        return -ENOMEM;
    *o = (struct object){.refs = 1, .n = n, .p = p};
    strcpy(o->name, name);
    int status = 0;
    pthread_mutex_lock(&d->lock);
    if (find(d, name) || is_folder(d, name) || lies_below_an_object(d, name))
        status = -EEXIST;
    if (status == 0 && d->count == d->room) {
        size_t room = d->room ? d->room * 2 : 64;
        struct object **grown = reallocarray(d->objects, room, sizeof *grown);
        if (grown)
            d->objects = grown, d->room = room;
        else
            status = -ENOMEM;
    }
    if (status == 0) {
        size_t at = place_of(d, name);
        memmove(d->objects + at + 1, d->objects + at, (d->count - at) * sizeof *d->objects);
        d->objects[at] = o;
        d->count++;
    }
    pthread_mutex_unlock(&d->lock);
    if (status)
        free(o);
    return status;
}

static void end(struct backend_op *op, int64_t result, const char *doing, const char *name)
{
    if (result == -ENOSPC)
        err_sys(&op->err, ENOSPC, "%s \"%s\": the memory disk of %llu bytes is full; remove something", doing,
                name, (unsigned long long)disk_of(op)->capacity_bytes);
    else if (result < 0)
        err_sys(&op->err, (int)-result, "%s \"%s\"", doing, name);
    backend_end_later(op, result);
}

static void memory_create(struct backend_op *op, uint64_t reserve_bytes, struct backend_file **file)
{
    struct memory_file *f = calloc(1, sizeof *f);
    int status = f ? charge(disk_of(op), reserve_bytes) : -ENOMEM;
    if (status == 0) {
        f->file.backend = op->backend;
        f->charged_bytes = reserve_bytes;
        *file = &f->file;
    } else {
        free(f);
    }
    end(op, status, "creating", "a new segment");
}

static int grow(struct memory_disk *d, struct memory_file *f, uint64_t bytes)
{
    if (bytes > f->charged_bytes) {
        int status = charge(d, bytes - f->charged_bytes);
        if (status)
            return status;
        f->charged_bytes = bytes;
    }
    if (bytes > f->room) {
        size_t room = bytes > 2 * f->room ? bytes : 2 * f->room;
        uint8_t *grown = realloc(f->p, room);
        if (!grown)
            return -ENOMEM;
        memset(grown + f->room, 0, room - f->room);
        f->p = grown;
        f->room = room;
    }
    return 0;
}

static void memory_append(struct backend_op *op, uint64_t offset, const void *p, size_t n)
{
    struct memory_file *f = container_of(op->file, struct memory_file, file);
    int status = grow(disk_of(op), f, offset + n);
    if (status == 0)
        memcpy(f->p + offset, p, n);
    end(op, status, "appending to", "a new segment");
}

static void free_file(struct memory_disk *d, struct memory_file *f)
{
    give_back(d, f->charged_bytes);
    free(f->p);
    free(f);
}

static void memory_seal(struct backend_op *op, const char *name)
{
    struct memory_disk *d = disk_of(op);
    struct memory_file *f = container_of(op->file, struct memory_file, file);
    op->file = NULL;
    int status = publish(d, name, f->p, f->file.bytes);
    if (status == 0) { /* the object keeps what it fills; the rest of the reservation goes */
        f->charged_bytes -= f->file.bytes;
        f->p = NULL;
    }
    free_file(d, f);
    end(op, status, "sealing", name);
}

static void memory_discard(struct backend_op *op)
{
    free_file(disk_of(op), container_of(op->file, struct memory_file, file));
    op->file = NULL;
    end(op, 0, NULL, NULL);
}

static void memory_put_new(struct backend_op *op, const char *name, const void *p, size_t n)
{
    struct memory_disk *d = disk_of(op);
    uint8_t *copy = malloc(n ? n : 1);
    int status = copy ? charge(d, n) : -ENOMEM;
    if (status == 0) {
        if (n)
            memcpy(copy, p, n);
        status = publish(d, name, copy, n);
        if (status)
            give_back(d, n);
    }
    if (status)
        free(copy);
    end(op, status, "writing", name);
}

static void memory_read(struct backend_op *op, const char *name, bool direct, uint64_t offset, void *p,
                        size_t n)
{
    struct memory_disk *d = disk_of(op);
    (void)direct;
    pthread_mutex_lock(&d->lock);
    struct object *o = find(d, name);
    if (o)
        o->refs++;
    pthread_mutex_unlock(&d->lock);
    if (!o) {
        end(op, -ENOENT, "reading", name);
        return;
    }
    size_t there = offset < o->n ? o->n - (size_t)offset : 0;
    size_t got = there < n ? there : n;
    if (got)
        memcpy(p, o->p + offset, got);
    release(d, o);
    end(op, (int64_t)got, NULL, NULL);
}

static void memory_stat(struct backend_op *op, const char *name, uint64_t *bytes)
{
    struct memory_disk *d = disk_of(op);
    pthread_mutex_lock(&d->lock);
    struct object *o = find(d, name);
    if (o)
        *bytes = o->n;
    pthread_mutex_unlock(&d->lock);
    end(op, o ? 0 : -ENOENT, "looking up", name);
}

/* The component that stands at name[from..], once; under the lock. */
static int add_component(struct loop_names *names, const char *component)
{
    size_t n = strcspn(component, "/");
    if (names->count) {
        const char *last = names->names[names->count - 1];
        if (strlen(last) == n && memcmp(last, component, n) == 0)
            return 0;
    }
    char **grown = reallocarray(names->names, names->count + 1, sizeof *grown);
    if (!grown)
        return -ENOMEM;
    names->names = grown;
    grown[names->count] = strndup(component, n);
    return grown[names->count] ? (names->count++, 0) : -ENOMEM;
}

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static void memory_list(struct backend_op *op, const char *prefix, struct loop_names *out)
{
    struct memory_disk *d = disk_of(op);
    char start[BACKEND_NAME_BYTES_MAX + 2] = "";
    size_t n = strlen(prefix);
    if (n) {
        memcpy(start, prefix, n);
        start[n++] = '/';
        start[n] = '\0';
    }
    int status = 0;
    pthread_mutex_lock(&d->lock);
    for (size_t i = place_of(d, start); status == 0 && i < d->count; i++) {
        if (strncmp(d->objects[i]->name, start, n) != 0)
            break;
        status = add_component(out, d->objects[i]->name + n);
    }
    pthread_mutex_unlock(&d->lock);
    if (status)
        loop_names_free(out);
    else if (out->count) /* by component: "b-x" stands before "b/y" among whole names, and after "b" here */
        qsort(out->names, out->count, sizeof *out->names, by_bytes);
    end(op, status, "listing", prefix);
}

static void memory_remove(struct backend_op *op, const char *name)
{
    struct memory_disk *d = disk_of(op);
    pthread_mutex_lock(&d->lock);
    struct object *o = find(d, name);
    if (o) {
        size_t at = place_of(d, name);
        memmove(d->objects + at, d->objects + at + 1, (d->count - at - 1) * sizeof *d->objects);
        d->count--;
    }
    pthread_mutex_unlock(&d->lock);
    if (o)
        release(d, o);
    end(op, o ? 0 : -ENOENT, "removing", name);
}

static int memory_space(struct backend *b, uint64_t *free_bytes, uint64_t *total_bytes)
{
    struct memory_disk *d = container_of(b, struct memory, backend)->disk;
    pthread_mutex_lock(&d->lock);
    *free_bytes = d->capacity_bytes - d->used_bytes;
    *total_bytes = d->capacity_bytes;
    pthread_mutex_unlock(&d->lock);
    return 0;
}

static void memory_free(struct backend *b)
{
    struct memory *m = container_of(b, struct memory, backend);
    memory_disk_unref(m->disk);
    free(m);
}

static const struct backend_ops memory_ops = {
    .name = "memory",
    .create = memory_create,
    .append = memory_append,
    .seal = memory_seal,
    .discard = memory_discard,
    .put_new = memory_put_new,
    .read = memory_read,
    .stat = memory_stat,
    .list = memory_list,
    .remove = memory_remove,
    .space = memory_space,
    .close = backend_closed,
    .free_now = memory_free,
};

struct backend *backend_memory(struct loop *l, struct memory_disk *d)
{
    struct memory *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    backend_init(&m->backend, &memory_ops, l);
    pthread_mutex_lock(&d->lock);
    d->refs++;
    pthread_mutex_unlock(&d->lock);
    m->disk = d;
    return &m->backend;
}
