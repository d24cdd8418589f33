/* SPDX-License-Identifier: Apache-2.0 */
#include "server/session/shard_files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>

#include "server/session/published.h"
#include "server/session/unpacked.h"

#define LOOK_MS 500u /* for files that nobody uses */

struct shard_file {
    int fd;
    struct shard_files *owner;
    struct list link; /* the longest unused first; empty: found no more */
    struct list waiting;
    struct list asking, looking; /* who waits for the next look; for the one under way */
    struct pubversion *version;  /* a reference */
    uint32_t shard, users;
    uint64_t used_ms, used_ns; /* by loop_now_ms, and by loop_unix_ns */
    bool idx, open;
    bool again;                /* the unpacked file was not there any more */
    struct unpacked_want want; /* of a packed shard */
    struct err err;
    struct io_op io;
    struct loop_stat stat;
    char path[PUBLISHED_PATH_BYTES_MAX + 2 + NAME_BYTES_MAX]; /* of what is looked at */
};

struct shard_files {
    struct published *p;
    struct list files;
    uint32_t count;
    struct loop_timer timer;
    bool closing;
};

static struct loop *loop_of(const struct shard_files *f)
{
    return f->p->w->loop;
}

static void on_timer(struct loop_timer *t);

int shard_files_create(struct published *p, struct shard_files **out)
{
    struct shard_files *f = calloc(1, sizeof *f);
    *out = f;
    if (!f)
        return -ENOMEM;
    f->p = p;
    f->timer.fire = on_timer;
    list_init(&f->files);
    return 0;
}

void shard_files_destroy(struct shard_files *f)
{
    check(!f || f->count == 0);
    free(f);
}

/* ---- an end ---- */

static void file_free(struct shard_file *file)
{
    struct shard_files *f = file->owner;
    if (file->want.file)
        unpacked_put(f->p->w, file->want.file, file->used_ns);
    pubversion_unref(f->p, file->version);
    free(file);
    f->count--;
    if (f->closing && f->count == 0)
        worker_has_less(f->p->w);
}

static void closed(struct io_op *op)
{
    file_free(container_of(op, struct shard_file, io));
}

static void close_file(struct shard_file *file)
{
    check(file->users == 0);
    list_del(&file->link);
    file->io.done = closed;
    loop_close(loop_of(file->owner), &file->io, file->fd);
}

static struct shard_file *longest_unused(struct shard_files *f)
{
    list_for_each (it, &f->files) {
        struct shard_file *file = container_of(it, struct shard_file, link);
        if (file->users == 0)
            return file;
    }
    return NULL;
}

static bool takes_room(const struct shard_file *file)
{
    return file->want.file && unpacked_takes_room(file->owner->p->w, file->want.file);
}

void shard_files_trim(struct shard_files *f)
{
    uint64_t now_ms = loop_now_ms(loop_of(f));
    list_for_each_safe (it, &f->files) {
        struct shard_file *file = container_of(it, struct shard_file, link);
        if (file->users == 0 && (file->used_ms + SHARD_FILES_IDLE_MS <= now_ms || takes_room(file)))
            close_file(file);
    }
}

static void on_timer(struct loop_timer *t)
{
    struct shard_files *f = container_of(t, struct shard_files, timer);
    shard_files_trim(f);
    if (longest_unused(f))
        loop_timer_set(loop_of(f), t, loop_now_ms(loop_of(f)) + LOOK_MS);
}

bool shard_files_close(struct shard_files *f)
{
    struct shard_file *file;
    f->closing = true;
    loop_timer_clear(loop_of(f), &f->timer);
    while ((file = longest_unused(f)))
        close_file(file);
    return f->count == 0;
}

void shard_file_put(struct shard_file *file)
{
    struct shard_files *f = file->owner;
    check(file->users > 0);
    if (--file->users > 0)
        return;
    file->used_ms = loop_now_ms(loop_of(f));
    file->used_ns = loop_unix_ns(loop_of(f));
    list_del(&file->link);
    list_add_tail(&f->files, &file->link);
    if (f->closing || f->count > SHARD_FILES_MAX)
        close_file(longest_unused(f));
    else if (takes_room(file))
        close_file(file);
    else if (f->timer.at_ms == 0)
        loop_timer_set(loop_of(f), &f->timer, file->used_ms + LOOK_MS);
}

/* ---- a beginning ---- */

static void give(struct shard_file *file, struct shard_file_wait *w)
{
    file->users++;
    w->file = file;
    w->got(w);
}

/* Tells those who wait. The file stays if it is the right one. */
static void opened_or_not(struct shard_file *file)
{
    file->open = file->err.class == ERR_NONE;
    if (!file->open)
        list_del(&file->link);
    for (struct list *it; (it = list_pop(&file->waiting));) {
        struct shard_file_wait *w = container_of(it, struct shard_file_wait, link);
        w->err = file->err;
        if (file->open)
            give(file, w);
        else
            w->got(w);
    }
    if (file->open) {
        shard_file_put(file);
        return;
    }
    file->users = 0;
    if (file->fd >= 0)
        close_file(file);
    else
        file_free(file);
}

static const char *name_of(const struct shard_file *file)
{
    const struct pubshard *shard = &file->version->shards[file->shard];
    return file->idx ? shard->idx : shard->name;
}

/* What a look found: is it still the file that the version names? */
static void judge(const struct shard_file *file, int64_t result, struct err *e)
{
    const struct pubversion *v = file->version;
    const struct pubshard *shard = &v->shards[file->shard];
    const struct loop_stat *was = file->idx ? &shard->idx_stat : &shard->stat;
    err_clear(e);
    if (result < 0)
        err_sys(e, (int)-result, "shard %s of %s is no longer what it was", name_of(file), v->dir->name);
    else if (pubfile_same(v, name_of(file), was, &file->stat, e) < 0)
        check(e->class != ERR_NONE);
}

static void looked_at(struct io_op *op)
{
    struct shard_file *file = container_of(op, struct shard_file, io);
    judge(file, op->result, &file->err);
    opened_or_not(file);
}

static void unpacked(struct unpacked_want *want);

static void opened(struct io_op *op)
{
    struct shard_file *file = container_of(op, struct shard_file, io);
    const struct pubversion *v = file->version;
    struct worker *w = file->owner->p->w;
    if (op->result >= 0) {
        file->fd = (int)op->result;
        op->done = looked_at;
        loop_stat(loop_of(file->owner), op, file->path, &file->stat);
        return;
    }
    if (op->result == -ENOENT && file->want.file && !file->again) {
        file->again = true;
        unpacked_lost(w, file->want.file);
        unpacked_get(&file->want, w, file->version, file->shard);
        return;
    }
    if (op->result == -EMEDIUMTYPE)
        err_set(&file->err, ERR_MISMATCH,
                "shard %s of %s is a pipe or a device now, it was a file; open the dataset again",
                name_of(file), v->dir->name);
    else
        err_sys(&file->err, (int)-op->result, "shard %s of %s", name_of(file), v->dir->name);
    opened_or_not(file);
}

static void open_path(struct shard_file *file, const char *path)
{
    file->io.done = opened;
    loop_open(loop_of(file->owner), &file->io, path, O_RDONLY, 0);
}

static void unpacked(struct unpacked_want *want)
{
    struct shard_file *file = container_of(want, struct shard_file, want);
    if (want->file) {
        open_path(file, want->path);
        return;
    }
    file->err = want->err;
    opened_or_not(file);
}

static struct shard_file *find(struct shard_files *f, const struct pubversion *v, uint32_t shard, bool idx)
{
    for (struct list *it = f->files.prev; it != &f->files; it = it->prev) {
        struct shard_file *file = container_of(it, struct shard_file, link);
        if (file->version == v && file->shard == shard && file->idx == idx)
            return file;
    }
    return NULL;
}

static struct shard_file *open_one(struct shard_files *f, struct pubversion *v, uint32_t shard, bool idx)
{
    struct shard_file *file = calloc(1, sizeof *file), *old;
    const char *packed = v->shards[shard].packed;
    if (!file)
        return NULL;
    if (f->count >= SHARD_FILES_MAX && (old = longest_unused(f)))
        close_file(old);
    file->owner = f;
    file->fd = -1;
    file->version = v;
    pubversion_ref(v);
    file->shard = shard;
    file->idx = idx;
    bool fits = pubfile_path(v, packed ? packed : name_of(file), file->path, sizeof file->path);
    check(fits);
    list_init(&file->waiting);
    list_init(&file->asking);
    list_init(&file->looking);
    list_add_tail(&f->files, &file->link);
    f->count++;
    file->users = 1; /* the one that opens it */
    file->want.told = unpacked;
    if (packed)
        unpacked_get(&file->want, f->p->w, v, shard);
    else
        open_path(file, file->path);
    return file;
}

static void lacks_memory(struct loop_msg *m)
{
    struct shard_file_wait *w = container_of(m, struct shard_file_wait, msg);
    err_set(&w->err, ERR_NO_MEMORY, "no memory for opening a shard");
    w->got(w);
}

void shard_file_get(struct shard_files *f, struct pubversion *v, uint32_t shard, bool idx,
                    struct shard_file_wait *w)
{
    struct shard_file *file = find(f, v, shard, idx);
    w->file = NULL;
    list_init(&w->link);
    err_clear(&w->err);
    if (!file && !(file = open_one(f, v, shard, idx))) {
        w->msg.run = lacks_memory;
        loop_post(loop_of(f), &w->msg);
    } else if (file->open) {
        give(file, w);
    } else {
        list_add_tail(&file->waiting, &w->link);
    }
}

void shard_file_hold(struct shard_file *file)
{
    check(file->users > 0);
    file->users++;
}

int shard_file_fd(const struct shard_file *file)
{
    return file->fd;
}

/* ---- looks ---- */

static void looked_again(struct io_op *op);

/* Who asks from now on waits for another: this look may come before what they have read. */
static void look(struct shard_file *file)
{
    for (struct list *it; (it = list_pop(&file->asking));)
        list_add_tail(&file->looking, it);
    file->io.done = looked_again;
    loop_stat(loop_of(file->owner), &file->io, file->path, &file->stat);
}

static void looked_again(struct io_op *op)
{
    struct shard_file *file = container_of(op, struct shard_file, io);
    struct err e;
    struct list told;
    judge(file, op->result, &e);
    list_init(&told);
    for (struct list *it; (it = list_pop(&file->looking));)
        list_add_tail(&told, it);
    if (!list_empty(&file->asking))
        look(file);
    for (struct list *it; (it = list_pop(&told));) {
        struct shard_file_look *l = container_of(it, struct shard_file_look, link);
        l->told(l, &e); /* the last may put the file back */
    }
}

void shard_file_look(struct shard_file *file, struct shard_file_look *l)
{
    check(file->open && file->users > 0);
    list_add_tail(&file->asking, &l->link);
    if (list_empty(&file->looking))
        look(file);
}
