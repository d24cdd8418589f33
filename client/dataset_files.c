/* SPDX-License-Identifier: Apache-2.0 */
#include "client/dataset_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "format/limits.h"

static int no_memory(struct err *e)
{
    return err_set(e, ERR_NO_MEMORY, "no memory for the files of an import");
}

static bool ends_in(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n >= m && strcasecmp(name + n - m, end) == 0;
}

static const char *base_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* FOLDER/NAME, or NAME where the folder is "". */
static char *below(const char *folder, const char *name)
{
    char *out = NULL;
    return asprintf(&out, "%s%s%s", folder, *folder ? "/" : "", name) < 0 ? NULL : out;
}

/* The path with another ending of three letters. */
static char *with_ending(const char *path, const char *ending)
{
    char *out = strdup(path);
    if (out)
        memcpy(out + strlen(out) - 3, ending, 3);
    return out;
}

static bool is_file(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

static void file_free(struct import_file *f)
{
    free(f->path);
    free(f->name);
    free(f->idx);
    buf_free(&f->index);
}

/* Takes f over, whatever comes of it. */
static int add(struct import_files *files, struct import_file *f, struct err *e)
{
    int rc = f->path && f->name && (f->idx || f->format != SHARD_TOKENS) ? 0 : no_memory(e);
    if (rc == 0 && files->count == WORLD_MAX)
        rc = err_set(e, ERR_LIMIT, "more than %u shards: join small ones into larger shards", WORLD_MAX);
    if (rc == 0 && files->count == files->room) {
        uint32_t room = files->room ? 2 * files->room : 64;
        struct import_file *list = realloc(files->list, room * sizeof *list);
        if (list) {
            files->list = list;
            files->room = room;
        } else {
            rc = no_memory(e);
        }
    }
    if (rc < 0)
        file_free(f);
    else
        files->list[files->count++] = *f;
    return rc;
}

/* ---- MDS ---- */

static int read_whole(const char *path, size_t max, struct buf *out, struct err *e)
{
    uint8_t piece[65536];
    int fd = open(path, O_RDONLY | O_CLOEXEC), rc = 0;
    if (fd < 0)
        return err_sys(e, errno, "opening it");
    for (ssize_t n = 1; rc == 0 && n != 0;) {
        n = read(fd, piece, sizeof piece);
        if (n < 0 && errno != EINTR)
            rc = err_sys(e, errno, "reading it");
        if (n > 0)
            buf_put(out, piece, (size_t)n);
        if (out->failed || out->n > max)
            rc = err_set(e, ERR_LIMIT, "it has more than the %zu bytes that are allowed", max);
    }
    close(fd);
    return rc;
}

static int index_add(struct import_files *files, const char *path, struct mds_index **out, struct err *e)
{
    struct buf json = {0};
    struct mds_index **grown = realloc(files->indexes, (files->index_count + 1) * sizeof *grown);
    if (!grown)
        return no_memory(e);
    files->indexes = grown;
    int rc = read_whole(path, MDS_INDEX_BYTES_MAX, &json, e);
    if (rc == 0)
        rc = mds_index_parse(json.p, json.n, out, e);
    if (rc == 0)
        files->indexes[files->index_count++] = *out;
    buf_free(&json);
    return rc;
}

/* The raw file where it is there; else the packed one, if it can be unpacked. */
static int mds_file_of(const char *folder, struct import_file *f, struct err *e)
{
    const struct mds_shard *s = f->mds;
    f->path = below(folder, s->raw.name);
    if (!f->path || is_file(f->path))
        return 0; /* no memory is told by add */
    char *zip = s->zip.name ? below(folder, s->zip.name) : NULL;
    if (!zip || !is_file(zip)) {
        free(zip);
        return err_set(e, ERR_NOT_FOUND, "%s is missing; " MDS_INDEX_NAME " names it", f->path);
    }
    free(f->path);
    f->path = zip;
    f->zstd = true;
    if (mds_is_zstd(s->compression))
        return 0;
    return err_set(e, ERR_UNSUPPORTED, "%s is packed by %s, only zstd can be read; unpack it to %s beside it",
                   f->path, s->compression, s->raw.name);
}

static int add_mds(struct import_files *files, const char *folder, const char *json, struct err *e)
{
    struct mds_index *x = NULL;
    int rc = index_add(files, json, &x, e);
    if (rc < 0)
        return err_prepend(e, "%s", json);
    for (uint32_t i = 0; rc == 0 && i < x->count; i++) {
        struct import_file f = {
            .name = strdup(x->shards[i].raw.name), .format = SHARD_MDS, .mds = &x->shards[i]};
        rc = mds_file_of(folder, &f, e);
        if (rc == 0)
            rc = add(files, &f, e);
        else
            file_free(&f);
    }
    return rc;
}

static int add_mds_path(struct import_files *files, const char *path, struct err *e)
{
    if (ends_in(path, ".mds") || ends_in(path, ".mds.zstd"))
        return err_set(e, ERR_INVALID,
                       "%s: a shard alone does not say what its columns are; name its folder, or the "
                       "%s beside it",
                       path, MDS_INDEX_NAME);
    char *folder = strndup(path, (size_t)(base_of(path) - path));
    if (!folder)
        return no_memory(e);
    size_t n = strlen(folder);
    if (n > 1)
        folder[n - 1] = '\0'; /* the slash, but not that of the root */
    int rc = add_mds(files, folder, path, e);
    free(folder);
    return rc;
}

/* ---- token files ---- */

static bool is_idx(const char *path)
{
    size_t n = strlen(path);
    return n > 4 && strcmp(path + n - 4, ".idx") == 0;
}

static bool is_pair(const char *path)
{
    size_t n = strlen(path);
    return is_idx(path) || (n > 4 && strcmp(path + n - 4, ".bin") == 0);
}

static bool has_idx(const char *bin)
{
    char *idx = with_ending(bin, "idx");
    bool there = idx && is_file(idx);
    free(idx);
    return there;
}

static int add_tokens(struct import_files *files, const char *path, struct err *e)
{
    if (!is_pair(path))
        return err_set(e, ERR_INVALID, "%s: token files are pairs X.bin and X.idx; name one of the two",
                       path);
    struct import_file f = {
        .path = with_ending(path, "bin"), .idx = with_ending(path, "idx"), .format = SHARD_TOKENS};
    f.name = f.path ? strdup(base_of(f.path)) : NULL;
    for (uint32_t i = 0; f.path && i < files->count; i++)
        if (strcmp(files->list[i].path, f.path) == 0) { /* both of the pair were named */
            file_free(&f);
            return 0;
        }
    const char *missing = f.path && !is_file(f.path) ? f.path : f.idx && !is_file(f.idx) ? f.idx : NULL;
    if (!missing)
        return add(files, &f, e);
    int rc = err_set(e, ERR_NOT_FOUND, "%s is missing: token files are pairs X.bin and X.idx", missing);
    file_free(&f);
    return rc;
}

static int is_shown_pair(const struct dirent *d)
{
    return d->d_name[0] != '.' && is_pair(d->d_name);
}

static int by_bytes(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

/* Each .bin and .idx of a folder, so that one without the other is told. */
static int add_tokens_folder(struct import_files *files, const char *folder, struct err *e)
{
    struct dirent **names = NULL;
    int count = scandir(folder, &names, is_shown_pair, by_bytes), rc = 0;
    if (count < 0)
        return err_sys(e, errno, "listing %s", folder);
    for (int i = 0; i < count; i++) {
        char *path = rc == 0 ? below(folder, names[i]->d_name) : NULL;
        if (rc == 0)
            rc = path ? add_tokens(files, path, e) : no_memory(e);
        free(path);
        free(names[i]);
    }
    free(names);
    if (rc == 0 && count == 0)
        rc = err_set(
            e, ERR_INVALID,
            "%s is not a regular file, nor a folder with %s or token files; name the shards themselves",
            folder, MDS_INDEX_NAME);
    return rc;
}

/* ---- all of them ---- */

static int add_folder(struct import_files *files, const char *path, enum larder_shard_format format,
                      struct err *e)
{
    size_t n = strlen(path);
    char *folder = strndup(path, n > 1 && path[n - 1] == '/' ? n - 1 : n),
         *json = folder ? below(folder, MDS_INDEX_NAME) : NULL;
    int rc;
    if (!folder || !json)
        rc = no_memory(e);
    else if (format == LARDER_SHARD_MDS || (format == LARDER_SHARD_AUTO && is_file(json)))
        rc = add_mds(files, folder, json, e);
    else if (format == LARDER_SHARD_TOKENS || format == LARDER_SHARD_AUTO)
        rc = add_tokens_folder(files, folder, e);
    else
        rc = err_set(e, ERR_INVALID, "%s is not a regular file: a shard is one file", path);
    free(folder);
    free(json);
    return rc;
}

static enum shard_format format_of(const struct larder_import_options *o, const char *path)
{
    if (o->format != LARDER_SHARD_AUTO)
        return (enum shard_format)o->format;
    if (strcmp(base_of(path), MDS_INDEX_NAME) == 0 || ends_in(path, ".mds") || ends_in(path, ".mds.zstd"))
        return SHARD_MDS;
    if (is_idx(path) || (is_pair(path) && has_idx(path)))
        return SHARD_TOKENS;
    return ends_in(path, ".tar") ? SHARD_TAR : SHARD_WHOLE;
}

static int add_path(struct import_files *files, const struct larder_import_options *o, const char *path,
                    struct err *e)
{
    struct stat st;
    if (stat(path, &st) < 0)
        return err_sys(e, errno, "%s", path);
    if (S_ISDIR(st.st_mode))
        return add_folder(files, path, o->format, e);
    switch (format_of(o, path)) {
    case SHARD_MDS: return add_mds_path(files, path, e);
    case SHARD_TOKENS: return add_tokens(files, path, e);
    default: break;
    }
    struct import_file f = {
        .path = strdup(path), .name = strdup(base_of(path)), .format = format_of(o, path)};
    return add(files, &f, e);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int names_differ(const struct import_files *files, struct err *e)
{
    char q[160];
    int rc = 0;
    const char **names = calloc(files->count, sizeof *names);
    if (!names)
        return no_memory(e);
    for (uint32_t i = 0; i < files->count; i++)
        names[i] = files->list[i].name;
    qsort(names, files->count, sizeof *names, by_name);
    for (uint32_t i = 1; rc == 0 && i < files->count; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            rc = err_set(e, ERR_INVALID, "two files are called \"%s\", and a shard has the name of its file",
                         err_quote(q, sizeof q, names[i], strlen(names[i])));
    free(names);
    return rc;
}

int import_files_gather(const struct larder_import_options *o, struct import_files *out, struct err *e)
{
    int rc = 0;
    for (size_t i = 0; rc == 0 && o->files && o->files[i]; i++)
        rc = add_path(out, o, o->files[i], e);
    if (rc == 0 && out->count == 0)
        rc = err_set(e, ERR_INVALID, "no files were given: a dataset needs at least one shard");
    return rc == 0 ? names_differ(out, e) : rc;
}

void import_files_free(struct import_files *f)
{
    for (uint32_t i = 0; i < f->count; i++)
        file_free(&f->list[i]);
    for (uint32_t i = 0; i < f->index_count; i++)
        mds_index_free(f->indexes[i]);
    free(f->list);
    free(f->indexes);
    *f = (struct import_files){0};
}
