/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/layout.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/files.h"

bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* `name` in the folder of `path`; malloc'ed. */
static char *beside(const char *path, const char *name)
{
    char *out;
    return asprintf(&out, "%.*s%s", (int)(base_name(path) - path), path, name) < 0 ? NULL : out;
}

static struct st_file *file_add(struct st_files *f, char *path)
{
    struct st_file *more = path ? reallocarray(f->file, f->count + 1, sizeof *more) : NULL;
    if (!more) {
        free(path);
        return NULL;
    }
    f->file = more;
    more += f->count++;
    *more = (struct st_file){.path = path, .name = base_name(path), .fd = -1};
    return more;
}

/* ---- reading ----------------------------------------------------------------------------------------------
 */

static int file_open(struct st_file *f, struct err *e)
{
    struct stat st;
    uint64_t header;
    f->fd = open(f->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (f->fd < 0 || fstat(f->fd, &st) < 0)
        return err_sys(e, errno, "%s cannot be opened", f->path);
    if (!S_ISREG(st.st_mode))
        return err_set(e, ERR_INVALID, "%s is not a regular file", f->path);
    f->bytes = (uint64_t)st.st_size;
    if (f->bytes < 8)
        return err_set(e, ERR_CORRUPT, "%s has %llu bytes; a safetensors file begins with 8 bytes of length",
                       f->path, (unsigned long long)f->bytes);
    void *map = mmap(NULL, f->bytes, PROT_READ, MAP_PRIVATE, f->fd, 0);
    if (map == MAP_FAILED)
        return err_sys(e, errno, "%s cannot be mapped", f->path);
    f->map = map;
    int status = safetensors_header_bytes(f->map, f->bytes, &header, e);
    if (status == 0)
        status = safetensors_parse(f->map + 8, header, f->bytes, &f->header, e);
    return status < 0 ? err_prepend(e, "%s", f->path) : 0;
}

static int name_order(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Every tensor name once, over all files. */
static int names_check(const struct st_files *f, struct err *e)
{
    size_t n = 0, total = 0;
    int status = 0;
    for (size_t i = 0; i < f->count; i++)
        total += f->file[i].header.count;
    char **names = calloc(total ? total : 1, sizeof *names);
    if (!names)
        return err_set(e, ERR_NO_MEMORY, "no memory for %zu names", total);
    for (size_t i = 0; i < f->count; i++)
        for (size_t k = 0; k < f->file[i].header.count; k++)
            names[n++] = f->file[i].header.entries[k].name;
    qsort(names, n, sizeof *names, name_order);
    for (size_t i = 1; i < n && status == 0; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            status = err_set(e, ERR_MISMATCH,
                             "tensor \"%.200s\" is in two of the files; save one of them only", names[i]);
    free(names);
    return status;
}

static bool listed(const struct st_files *f, const char *name)
{
    for (size_t i = 0; i < f->count; i++)
        if (strcmp(f->file[i].name, name) == 0)
            return true;
    return false;
}

/* The files that an index lists, each once, in the order of their first tensor. */
static int index_open(const char *path, struct st_files *out, struct err *e)
{
    char *text;
    size_t n;
    json_error_t je;
    const char *tensor;
    json_t *file;
    int status = file_read(path, LAYOUT_BYTES_MAX, &text, &n, e);
    if (status < 0)
        return status;
    if (out->index) {
        free(text);
        return err_set(e, ERR_INVALID, "%s is a second index; give one", path);
    }
    out->index = json_loadb(text, n, JSON_REJECT_DUPLICATES, &je);
    free(text);
    const json_t *map = json_object_get(out->index, "weight_map");
    if (!json_is_object(map))
        return err_set(e, ERR_CORRUPT, "%s: expected a JSON object with \"weight_map\"%s%s", path,
                       out->index ? "" : ", found: ", out->index ? "" : je.text);
    json_object_foreach((json_t *)map, tensor, file)
    {
        const char *name = json_string_value(file);
        if (!name || !*name || strchr(name, '/') || strcmp(name, "..") == 0 || strcmp(name, ".") == 0)
            return err_set(e, ERR_CORRUPT, "%s: tensor \"%.200s\" is not in a file beside the index", path,
                           tensor);
        if (listed(out, name))
            continue;
        if (out->count >= LAYOUT_FILES_MAX)
            return err_set(e, ERR_LIMIT, "%s lists more than %u files", path, LAYOUT_FILES_MAX);
        if (!file_add(out, beside(path, name)))
            return err_set(e, ERR_NO_MEMORY, "no memory for %s", name);
    }
    return 0;
}

/* Does every file hold what the index says, and no more? */
static int index_check(const struct st_files *f, struct err *e)
{
    const json_t *map = json_object_get(f->index, "weight_map");
    size_t found = 0;
    for (size_t i = 0; i < f->count; i++)
        for (size_t k = 0; k < f->file[i].header.count; k++) {
            const char *tensor = f->file[i].header.entries[k].name;
            const char *where = json_string_value(json_object_get(map, tensor));
            if (!where || strcmp(where, f->file[i].name) != 0)
                return err_set(e, ERR_MISMATCH, "%s holds tensor \"%.200s\", which the index places in %s",
                               f->file[i].name, tensor, where ? where : "no file");
            found++;
        }
    if (found != json_object_size(map))
        return err_set(e, ERR_MISMATCH, "the index lists %zu tensors, its files hold %zu",
                       json_object_size(map), found);
    return 0;
}

int st_files_open(char *const *paths, size_t count, struct st_files *out, struct err *e)
{
    int status = 0;
    for (size_t i = 0; i < count && status == 0; i++) {
        if (ends_with(paths[i], INDEX_SUFFIX))
            status = index_open(paths[i], out, e);
        else if (listed(out, base_name(paths[i])))
            status = err_set(e, ERR_INVALID, "two files are called %s; their names must differ",
                             base_name(paths[i]));
        else if (!file_add(out, strdup(paths[i])))
            status = err_set(e, ERR_NO_MEMORY, "no memory for %s", paths[i]);
    }
    for (size_t i = 0; i < out->count && status == 0; i++)
        status = file_open(&out->file[i], e);
    if (status == 0)
        status = names_check(out, e);
    if (status == 0 && out->index && count == 1)
        status = index_check(out, e);
    return status;
}

char *st_layout(const struct st_files *f)
{
    json_t *files = json_array();
    for (size_t i = 0; i < f->count; i++) {
        const struct safetensors *h = &f->file[i].header;
        json_t *metadata = json_object(), *tensors = json_array();
        for (size_t k = 0; k < h->metadata_pairs; k++)
            json_object_set_new(metadata, h->metadata[2 * k], json_string(h->metadata[2 * k + 1]));
        for (size_t k = 0; k < h->count; k++)
            json_array_append_new(tensors, json_string(h->entries[k].name));
        json_array_append_new(files, json_pack("{s:s,s:o,s:o}", "name", f->file[i].name, "metadata", metadata,
                                               "tensors", tensors));
    }
    json_t *o = json_pack("{s:i,s:o}", "version", 1, "files", files);
    const json_t *more = json_object_get(f->index, "metadata");
    if (more)
        json_object_set(o, "index_metadata", (json_t *)more);
    char *text = json_dumps(o, JSON_COMPACT | JSON_PRESERVE_ORDER);
    json_decref(o);
    return text;
}

void st_files_close(struct st_files *f)
{
    for (size_t i = 0; i < f->count; i++) {
        struct st_file *s = &f->file[i];
        if (s->map)
            munmap(s->map, s->bytes);
        if (s->fd >= 0)
            close(s->fd);
        if (s->temporary)
            unlink(s->temporary);
        free(s->temporary);
        free(s->path);
        safetensors_free(&s->header);
    }
    free(f->file);
    json_decref(f->index);
    *f = (struct st_files){0};
}

/* ---- writing ----------------------------------------------------------------------------------------------
 */

/* Entries by name, and which of them a file has taken already. */
struct pool {
    const struct safetensors_entry **by_name;
    bool *taken;
    size_t count;
};

static int entry_order(const void *a, const void *b)
{
    const struct safetensors_entry *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

static const struct safetensors_entry *pool_take(struct pool *p, const char *name)
{
    size_t low = 0, high = p->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        int order = strcmp(name, p->by_name[middle]->name);
        if (order == 0) {
            bool taken = p->taken[middle];
            p->taken[middle] = true;
            return taken ? NULL : p->by_name[middle];
        }
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

/* Appends a tensor behind the others of a file. */
static int entry_append(struct st_file *f, const struct safetensors_entry *from, struct err *e)
{
    struct safetensors *h = &f->header;
    uint64_t elements = 1, bytes;
    for (unsigned i = 0; i < from->dims; i++)
        if (__builtin_mul_overflow(elements, from->shape[i], &elements))
            return err_set(e, ERR_LIMIT, "tensor \"%.200s\" is too large", from->name);
    int status = dtype_bytes(from->dtype, elements, &bytes, e);
    if (status < 0)
        return err_prepend(e, "tensor \"%.200s\"", from->name);
    if (strcmp(from->name, "__metadata__") == 0)
        return err_set(e, ERR_MISMATCH,
                       "a tensor named __metadata__ cannot be written to a safetensors file");
    if ((h->count & (h->count - 1)) == 0) { /* room doubles */
        struct safetensors_entry *more = reallocarray(h->entries, h->count ? 2 * h->count : 1, sizeof *more);
        if (!more)
            return err_set(e, ERR_NO_MEMORY, "no memory for %zu tensors", h->count);
        h->entries = more;
    }
    struct safetensors_entry *to = &h->entries[h->count];
    *to = *from;
    to->begin = h->data_bytes;
    if (__builtin_add_overflow(h->data_bytes, bytes, &to->end))
        return err_set(e, ERR_LIMIT, "the file would be too large");
    if (!(to->name = strdup(from->name)))
        return err_set(e, ERR_NO_MEMORY, "no memory for a name");
    h->data_bytes = to->end;
    h->count++;
    return 0;
}

/* Adds a file's metadata; a key that is there already keeps its value. */
static int metadata_append(struct safetensors *h, const json_t *metadata, struct err *e)
{
    const char *key;
    json_t *value;
    char **more =
        reallocarray(h->metadata, h->metadata_pairs + json_object_size(metadata) + 1, 2 * sizeof *more);
    if (!more)
        return err_set(e, ERR_NO_MEMORY, "no memory for metadata");
    h->metadata = more;
    json_object_foreach((json_t *)metadata, key, value)
    {
        size_t i = 0;
        while (i < h->metadata_pairs && strcmp(h->metadata[2 * i], key) != 0)
            i++;
        if (i < h->metadata_pairs || !json_is_string(value))
            continue;
        char *k = strdup(key), *v = strdup(json_string_value(value));
        if (!k || !v) {
            free(k);
            free(v);
            return err_set(e, ERR_NO_MEMORY, "no memory for metadata");
        }
        h->metadata[2 * i] = k;
        h->metadata[2 * i + 1] = v;
        h->metadata_pairs++;
    }
    return 0;
}

/* Fills file number `to` with the tensors of one file of the layout. */
static int plan_file(struct st_files *files, size_t to, const json_t *described, struct pool *pool,
                     struct err *e)
{
    size_t i;
    json_t *name;
    int status = metadata_append(&files->file[to].header, json_object_get(described, "metadata"), e);
    json_array_foreach(json_object_get(described, "tensors"), i, name)
    {
        const struct safetensors_entry *entry =
            json_is_string(name) ? pool_take(pool, json_string_value(name)) : NULL;
        if (status == 0 && entry)
            status = entry_append(&files->file[to], entry, e);
    }
    return status;
}

/* What no file of the layout named: widest elements first, so that all stay aligned. */
static int plan_rest(struct st_files *files, struct pool *pool, struct err *e)
{
    int status = 0;
    for (unsigned bits = 128; bits > 0 && status == 0; bits = bits > 8 ? bits / 2 : bits - 1)
        for (size_t i = 0; i < pool->count && status == 0; i++)
            if (!pool->taken[i] && dtype_bits(pool->by_name[i]->dtype) >= bits) {
                pool->taken[i] = true;
                status = entry_append(&files->file[files->count - 1], pool->by_name[i], e);
            }
    return status;
}

static bool plain_name(const char *name)
{
    return name && *name && !strchr(name, '/') && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

static int plan_into(const char *out, const json_t *layout, struct pool *pool, struct st_files *files,
                     struct err *e)
{
    bool sharded = ends_with(out, INDEX_SUFFIX);
    const json_t *described = json_object_get(layout, "files");
    size_t i;
    json_t *file;
    int status = 0;
    if (sharded && json_array_size(described) == 0)
        return err_set(e, ERR_NOT_FOUND,
                       "the checkpoint was not saved from safetensors files, so there is no set of "
                       "files to write; give one .safetensors file instead of an index");
    if (!sharded && !file_add(files, strdup(out)))
        return err_set(e, ERR_NO_MEMORY, "no memory for %s", out);
    json_array_foreach((json_t *)described, i, file)
    {
        const char *name = json_string_value(json_object_get(file, "name"));
        if (sharded && (!plain_name(name) || listed(files, name)))
            return err_set(e, ERR_CORRUPT, "the checkpoint's layout names a file that cannot be written");
        if (sharded && !file_add(files, beside(out, name)))
            return err_set(e, ERR_NO_MEMORY, "no memory for %s", name);
        if (status == 0)
            status = plan_file(files, files->count - 1, file, pool, e);
    }
    if (status == 0)
        status = plan_rest(files, pool, e);
    if (sharded)
        files->index = json_pack("{s:O?}", "metadata", json_object_get(layout, "index_metadata"));
    return status;
}

int st_files_plan(const char *out, const json_t *layout, const struct safetensors_entry *entries,
                  size_t count, struct st_files *files, struct err *e)
{
    struct pool pool = {.by_name = calloc(count + 1, sizeof *pool.by_name),
                        .taken = calloc(count + 1, sizeof *pool.taken),
                        .count = count};
    int status;
    if (!pool.by_name || !pool.taken) {
        status = err_set(e, ERR_NO_MEMORY, "no memory for %zu tensors", count);
    } else {
        for (size_t i = 0; i < count; i++)
            pool.by_name[i] = &entries[i];
        qsort(pool.by_name, count, sizeof *pool.by_name, entry_order);
        status = plan_into(out, layout, &pool, files, e);
    }
    free(pool.by_name);
    free(pool.taken);
    return status;
}

/* A file without a name, where the file system has such: an interruption leaves nothing behind. Else one with
 * a name of its own. */
static int file_begin(struct st_file *f, struct err *e)
{
    char *folder = beside(f->path, "");
    if (!folder)
        return err_set(e, ERR_NO_MEMORY, "no memory for a name");
    f->fd = open(*folder ? folder : ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    free(folder);
    if (f->fd >= 0)
        return 0;
    if (asprintf(&f->temporary, "%s.XXXXXX", f->path) < 0) {
        f->temporary = NULL;
        return err_set(e, ERR_NO_MEMORY, "no memory for a name");
    }
    if ((f->fd = mkostemp(f->temporary, O_CLOEXEC)) >= 0)
        return 0;
    int why = errno;
    free(f->temporary);
    f->temporary = NULL;
    return err_sys(e, why, "a file beside %s cannot be made", f->path);
}

/* Its name, at last. What stood there before is replaced in one step. */
static int file_name(struct st_file *f, struct err *e)
{
    char of_fd[64];
    if (!f->temporary) {
        snprintf(of_fd, sizeof of_fd, "/proc/self/fd/%d", f->fd);
        if (linkat(AT_FDCWD, of_fd, AT_FDCWD, f->path, AT_SYMLINK_FOLLOW) == 0)
            return 0;
        if (errno != EEXIST || asprintf(&f->temporary, "%s.%d.new", f->path, (int)getpid()) < 0) {
            f->temporary = NULL;
            return err_sys(e, errno, "%s could not be given its name", f->path);
        }
        if (linkat(AT_FDCWD, of_fd, AT_FDCWD, f->temporary, AT_SYMLINK_FOLLOW) < 0)
            return err_sys(e, errno, "%s could not be given its name", f->temporary);
    }
    if (rename(f->temporary, f->path) < 0)
        return err_sys(e, errno, "%s could not be given its name", f->path);
    free(f->temporary);
    f->temporary = NULL;
    return 0;
}

static int file_make(struct st_file *f, struct err *e)
{
    struct buf header = {0};
    int status = safetensors_write(&f->header, &header, e);
    if (status < 0)
        goto out;
    f->header.data_offset = header.n;
    if (__builtin_add_overflow((uint64_t)header.n, f->header.data_bytes, &f->bytes)) {
        status = err_set(e, ERR_LIMIT, "%s would be too large", f->path);
        goto out;
    }
    if ((status = file_begin(f, e)) < 0)
        goto out;
    int r = fchmod(f->fd, 0644) < 0 ? errno : posix_fallocate(f->fd, 0, (off_t)f->bytes);
    void *map = r ? MAP_FAILED : mmap(NULL, f->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, f->fd, 0);
    if (map == MAP_FAILED) {
        status = err_sys(e, r ? r : errno, "%llu bytes for %s", (unsigned long long)f->bytes, f->path);
        goto out;
    }
    f->map = map;
    memcpy(f->map, header.p, header.n);
out:
    buf_free(&header);
    return status;
}

int st_files_create(struct st_files *f, struct err *e)
{
    int status = 0;
    for (size_t i = 0; i < f->count && status == 0; i++)
        status = file_make(&f->file[i], e);
    return status;
}

/* The index of a sharded set, from the files as they were written. */
static int index_write(struct st_files *f, const char *out, struct err *e)
{
    json_t *map = json_object();
    uint64_t total = 0;
    for (size_t i = 0; i < f->count; i++) {
        total += f->file[i].header.data_bytes;
        for (size_t k = 0; k < f->file[i].header.count; k++)
            json_object_set_new(map, f->file[i].header.entries[k].name, json_string(f->file[i].name));
    }
    if (!json_is_object(json_object_get(f->index, "metadata")))
        json_object_set_new(f->index, "metadata", json_pack("{s:I}", "total_size", (json_int_t)total));
    json_object_set_new(f->index, "weight_map", map);
    char *text = json_dumps(f->index, JSON_INDENT(2) | JSON_PRESERVE_ORDER);
    int status = text ? file_replace(out, text, strlen(text), 0644, e)
                      : err_set(e, ERR_NO_MEMORY, "no memory for the index");
    free(text);
    return status;
}

int st_files_finish(struct st_files *f, const char *out, struct err *e)
{
    for (size_t i = 0; i < f->count; i++)
        if (msync(f->file[i].map, f->file[i].bytes, MS_SYNC) < 0 || fsync(f->file[i].fd) < 0)
            return err_sys(e, errno, "%s could not be written", f->file[i].path);
    for (size_t i = 0; i < f->count; i++) {
        int status = file_name(&f->file[i], e);
        if (status < 0)
            return status;
    }
    return f->index ? index_write(f, out, e) : 0;
}
