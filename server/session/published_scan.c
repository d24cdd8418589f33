/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Looking at a published folder. Which files are its shards depends on the format: those that index.json
 * names (mds), pairs X.bin and X.idx (tokens), else all that are not hidden. Then each is looked at.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/utf8.h"
#include "format/published.h"
#include "server/session/published.h"

static void scan_end(struct scan *s)
{
    loop_names_free(&s->names);
    free(s->json);
    s->json = NULL;
    pubversion_free(s->building);
    s->building = NULL;
    s->done(s);
}

static void scan_fail(struct scan *s, enum err_class class, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static void scan_fail(struct scan *s, enum err_class class, const char *fmt, ...)
{
    char text[ERR_TEXT_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    err_set(&s->err, class, "published directory %s: %s", s->dir->name, text);
    scan_end(s);
}

static void scan_fail_sys(struct scan *s, int64_t result, const char *doing)
{
    err_sys(&s->err, (int)-result, "published directory %s: %s %s", s->dir->name, doing, s->path);
    if (s->err.class == ERR_NOT_FOUND) /* the dataset is there, its folder or a file of it is not */
        s->err.class = ERR_IO, s->err.errnum = EIO;
    scan_end(s);
}

/* ---- the version ---- */

static struct published_file file_of(const struct loop_stat *st)
{
    return (struct published_file){.bytes = st->bytes, .mtime_ns = st->mtime_ns, .inode = st->inode};
}

static int version_id(struct pubversion *v, struct err *e)
{
    const struct published_dir *dir = v->dir;
    struct published_version version = {0};
    struct published_file json = file_of(&v->json_stat);
    published_version_begin(&version, slice_str(dir->name), dir->format, dir->record_bytes, v->count);
    for (uint32_t i = 0; i < v->count; i++) {
        struct published_file file = file_of(&v->shards[i].stat), idx = file_of(&v->shards[i].idx_stat);
        published_version_shard(&version, slice_str(v->shards[i].name), &file,
                                v->shards[i].idx ? &idx : NULL);
    }
    return published_version_end(&version, dir->format == SHARD_TOKENS ? &dir->window : NULL,
                                 dir->format == SHARD_MDS ? &json : NULL, &v->id, e);
}

static void scan_finish(struct scan *s)
{
    if (version_id(s->building, &s->err) == 0)
        s->version = pubversion_keep(s->p, &s->building);
    scan_end(s);
}

/* ---- looking at the shards ---- */

static void scan_next(struct scan *s);

/* A file is not there: one that was only listed is left out, one that has to be there is told. */
static void shard_missing(struct scan *s, const char *name)
{
    const struct pubshard *shard = &s->building->shards[s->next];
    if (shard->packed)
        scan_fail(s, ERR_IO, "%s is missing, and so is its packed form %s; " MDS_INDEX_NAME " names them",
                  name, shard->packed);
    else
        scan_fail(s, ERR_IO, "%s is missing; %s", name,
                  shard->mds ? MDS_INDEX_NAME " names it" : "token files are pairs X.bin and X.idx");
}

/* There is no raw file: the packed one is looked for. False: told and ended. */
static bool shard_packed(struct scan *s)
{
    struct pubshard *shard = &s->building->shards[s->next];
    const struct mds_shard *mds = shard->mds;
    if (!mds_is_zstd(mds->compression)) {
        scan_fail(s, ERR_UNSUPPORTED,
                  "%s is packed by %s, only zstd can be read in place: put an unpacked %s beside it",
                  mds->zip.name, mds->compression, shard->name);
        return false;
    }
    shard->packed = mds->zip.name;
    return true;
}

static void idx_looked_at(struct io_op *op)
{
    struct scan *s = container_of(op, struct scan, op);
    struct pubshard *shard = &s->building->shards[s->next];
    if (op->result == -ENOENT || op->result == -ELOOP || (op->result >= 0 && !s->stat.file)) {
        shard_missing(s, shard->idx);
    } else if (op->result < 0) {
        scan_fail_sys(s, op->result, "looking at");
    } else {
        shard->idx_stat = s->stat;
        s->next++;
        scan_next(s);
    }
}

/* Takes shard number next out of the list. */
static void shard_drop(struct scan *s)
{
    struct pubversion *v = s->building;
    free(v->shards[s->next].name);
    v->count--;
    memmove(&v->shards[s->next], &v->shards[s->next + 1], (v->count - s->next) * sizeof *v->shards);
    v->shards[v->count] = (struct pubshard){0};
}

static void shard_looked_at(struct io_op *op)
{
    struct scan *s = container_of(op, struct scan, op);
    struct pubshard *shard = &s->building->shards[s->next];
    bool gone = op->result == -ENOENT || op->result == -ELOOP; /* since it was listed; or a link to nothing */
    if (op->result < 0 && !gone) {
        scan_fail_sys(s, op->result, "looking at");
    } else if ((gone || !s->stat.file) && shard->mds && shard->mds->zip.name && !shard->packed) {
        if (shard_packed(s))
            scan_next(s);
    } else if ((gone || !s->stat.file) && (shard->mds || shard->idx)) {
        shard_missing(s, shard->name);
    } else if (gone || !s->stat.file) {
        shard_drop(s);
        scan_next(s);
    } else {
        shard->stat = s->stat;
        shard->bytes = shard->packed ? shard->mds->raw.bytes : s->stat.bytes;
        s->building->bytes += shard->bytes;
        if (shard->idx) {
            snprintf(s->path, sizeof s->path, "%s/%s", s->dir->path, shard->idx);
            op->done = idx_looked_at;
            loop_stat(s->p->w->loop, op, s->path, &s->stat);
            return;
        }
        s->next++;
        scan_next(s);
    }
}

static void scan_next(struct scan *s)
{
    if (s->next == s->building->count) {
        scan_finish(s);
        return;
    }
    const struct pubshard *shard = &s->building->shards[s->next];
    snprintf(s->path, sizeof s->path, "%s/%s", s->dir->path, shard->packed ? shard->packed : shard->name);
    s->op.done = shard_looked_at;
    loop_stat(s->p->w->loop, &s->op, s->path, &s->stat);
}

/* Room for so many shards; false: told and ended. */
static bool building_begin(struct scan *s, size_t count)
{
    if (count > PUBLISHED_SHARDS_MAX) {
        scan_fail(s, ERR_LIMIT, "%zu shards, at most %u can be published", count, PUBLISHED_SHARDS_MAX);
        return false;
    }
    s->building = calloc(1, sizeof *s->building);
    if (s->building)
        s->building->shards = calloc(count + 1, sizeof *s->building->shards);
    if (!s->building || !s->building->shards) {
        scan_fail(s, ERR_NO_MEMORY, "no memory");
        return false;
    }
    s->building->dir = s->dir;
    return true;
}

/* ---- listed ---- */

/* Names that begin with a dot are how people hide what they are still writing. */
static bool skipped(const char *name)
{
    return name[0] == '.';
}

static bool ends_in(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n > m && strcmp(name + n - m, end) == 0;
}

/* False, told and ended: a file of that name cannot be a shard. */
static bool name_allowed(struct scan *s, const char *name)
{
    char quoted[128];
    if (skipped(name) || (strlen(name) <= NAME_BYTES_MAX && utf8_valid(name, strlen(name))))
        return true;
    scan_fail(s, ERR_INVALID, "the file name %s is not UTF-8 of at most %u bytes",
              err_quote(quoted, sizeof quoted, name, strlen(name)), NAME_BYTES_MAX);
    return false;
}

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static bool listed(const struct scan *s, char *name)
{
    return bsearch(&name, s->names.names, s->names.count, sizeof name, by_bytes) != NULL;
}

/* Adds the shard that the listed name stands for, if it stands for one. Of token files both of a pair are
 * listed; the .bin stands for it, and an .idx alone for one that is missing. */
static bool shard_of(struct scan *s, const char *name)
{
    struct pubversion *v = s->building;
    bool tokens = s->dir->format == SHARD_TOKENS, bin = ends_in(name, ".bin"), idx = ends_in(name, ".idx");
    if (skipped(name) || (tokens && !bin && !idx))
        return true;
    struct pubshard x = {.name = strdup(name)};
    if (tokens && x.name) {
        memcpy(x.name + strlen(x.name) - 3, "bin", 3);
        x.idx = strdup(x.name);
        if (x.idx)
            memcpy(x.idx + strlen(x.idx) - 3, "idx", 3);
    }
    bool known = tokens && idx && x.name && listed(s, x.name);
    if (known || !x.name || (tokens && !x.idx)) {
        free(x.name);
        free(x.idx);
        return known;
    }
    v->shards[v->count++] = x;
    return true;
}

static void scan_listed(struct io_op *op)
{
    struct scan *s = container_of(op, struct scan, op);
    if (op->result < 0) {
        snprintf(s->path, sizeof s->path, "%s", s->dir->path);
        scan_fail_sys(s, op->result, "listing");
        return;
    }
    if (!building_begin(s, s->names.count))
        return;
    for (size_t i = 0; i < s->names.count; i++) {
        if (!name_allowed(s, s->names.names[i]))
            return;
        if (!shard_of(s, s->names.names[i])) {
            scan_fail(s, ERR_NO_MEMORY, "no memory");
            return;
        }
    }
    scan_next(s);
}

/* ---- named by index.json ---- */

static void json_end(struct io_op *op)
{
    struct scan *s = container_of(op, struct scan, op);
    struct mds_index *x = NULL;
    struct err e = {0};
    if (op->result < 0) {
        scan_fail_sys(s, op->result, "looking again at");
        return;
    }
    if (s->stat.bytes != s->json_stat.bytes || s->stat.mtime_ns != s->json_stat.mtime_ns ||
        s->stat.inode != s->json_stat.inode) {
        scan_fail(s, ERR_MISMATCH, "%s was changed while it was read; open the dataset again", s->path);
        return;
    }
    if (mds_index_parse(s->json, s->json_stat.bytes, &x, &e) < 0) {
        scan_fail(s, e.class, "%s: %s", s->path, e.text);
        return;
    }
    if (!building_begin(s, x->count)) {
        mds_index_free(x);
        return;
    }
    s->building->mds = x;
    s->building->json_stat = s->json_stat;
    for (uint32_t i = 0; i < x->count; i++) {
        struct pubshard *shard = &s->building->shards[i];
        *shard = (struct pubshard){.name = strdup(x->shards[i].raw.name), .mds = &x->shards[i]};
        s->building->count++;
        if (!shard->name) {
            scan_fail(s, ERR_NO_MEMORY, "no memory");
            return;
        }
    }
    scan_next(s);
}

static void json_closed(struct io_op *op)
{
    struct scan *s = container_of(op, struct scan, op);
    if (s->json_read < 0 || (uint64_t)s->json_read != s->json_stat.bytes) {
        if (s->json_read < 0)
            scan_fail_sys(s, s->json_read, "reading");
        else
            scan_fail(s, ERR_MISMATCH, "%s became shorter while it was read; open the dataset again",
                      s->path);
        return;
    }
    op->done = json_end;
    loop_stat(s->p->w->loop, op, s->path, &s->stat);
}

static void json_got(struct io_op *op)
{
    struct scan *s = container_of(op, struct scan, op);
    s->json_read = op->result;
    op->done = json_closed;
    loop_close(s->p->w->loop, op, s->fd);
}

static void json_opened(struct io_op *op)
{
    struct scan *s = container_of(op, struct scan, op);
    if (op->result < 0) {
        scan_fail_sys(s, op->result, "opening");
        return;
    }
    s->fd = (int)op->result;
    op->done = json_got;
    loop_read(s->p->w->loop, op, s->fd, s->json, s->json_stat.bytes, 0);
}

static void json_looked_at(struct io_op *op)
{
    struct scan *s = container_of(op, struct scan, op);
    if (op->result < 0) {
        scan_fail_sys(s, op->result, "looking at");
        return;
    }
    s->json_stat = s->stat;
    if (!s->stat.file || s->stat.bytes > MDS_INDEX_BYTES_MAX) {
        scan_fail(s, ERR_LIMIT, "%s is no file of at most %u bytes", s->path, MDS_INDEX_BYTES_MAX);
        return;
    }
    s->json = malloc(s->stat.bytes + 1);
    if (!s->json) {
        scan_fail(s, ERR_NO_MEMORY, "no memory for %s", s->path);
        return;
    }
    op->done = json_opened;
    loop_open(s->p->w->loop, op, s->path, O_RDONLY | O_CLOEXEC, 0);
}

void scan_begin(struct scan *s, struct published *p, const struct published_dir *dir)
{
    s->p = p;
    s->dir = dir;
    s->version = NULL;
    s->next = 0;
    err_clear(&s->err);
    if (dir->format == SHARD_MDS) {
        s->op.done = json_looked_at;
        snprintf(s->path, sizeof s->path, "%s/" MDS_INDEX_NAME, dir->path);
        loop_stat(p->w->loop, &s->op, s->path, &s->stat);
        return;
    }
    s->op.done = scan_listed;
    loop_list(p->w->loop, &s->op, dir->path, &s->names);
}
