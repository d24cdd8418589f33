/* SPDX-License-Identifier: Apache-2.0 */
#include "server/session/unpacked.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/hash.h"
#include "format/base/log.h"
#include "server/obs/metrics.h"
#include "server/session/shard_files.h"
#include "server/session/unpacking.h"

#define FOLDER        "unpacked-shards"
#define BUCKETS       256u
#define DATASET_BYTES 8u
#define NAME_BYTES    (2 * UNPACKED_KEY_BYTES + 1) /* both parts in hexadecimal, a dash between them */

enum file_state { FILE_MAKING, FILE_THERE, FILE_LEAVING };

struct unpacked_file {
    struct list link; /* bucket */
    uint8_t key[UNPACKED_KEY_BYTES];
    enum file_state state;
    uint64_t bytes, used_ns;
    unsigned users;
    bool doomed;         /* goes when nobody uses it */
    struct list waiting; /* wants */
    struct list queued;  /* its unpacker's */
    struct unpacker *by; /* who makes or removes it */
    struct io_op op;
    char path[];
};

struct unpacked {
    pthread_mutex_t lock;
    struct server *server;
    struct list buckets[BUCKETS];
    uint64_t bytes, leaving_bytes; /* of all files but those that wait for room; of these, being removed */
    struct list shorts;            /* unpackers that wait for room */
    bool loaded;
    struct list waiting; /* wants, for that */
    atomic_bool hurry;
    char folder[400]; /* empty: nothing can be kept */
};

struct unpacker {
    struct worker *w;
    struct list queue;             /* files to be made, under the lock */
    struct unpacked_file *current; /* likewise */
    struct unpacking job;
    struct list shorts;      /* where it waits for room */
    struct loop_timer timer; /* for how long */
    struct loop_msg room;
    bool room_posted; /* under the lock */
    unsigned pending; /* removals and the load */
};

/* What earlier servers left. */
struct load {
    struct worker *w;
    struct loop_names names;
    size_t next;
    struct io_op op;
    struct loop_stat stat;
    char path[480];
};

static struct unpacked *unpacked_of(const struct worker *w)
{
    return w->server->unpacked;
}

static struct unpacker *unpacker_of(const struct worker *w)
{
    return w->published->unpacker;
}

int unpacked_create(struct server *s, struct unpacked **out)
{
    struct unpacked *u = calloc(1, sizeof *u);
    *out = u;
    if (!u)
        return -ENOMEM;
    u->server = s;
    pthread_mutex_init(&u->lock, NULL);
    for (unsigned i = 0; i < BUCKETS; i++)
        list_init(&u->buckets[i]);
    list_init(&u->shorts);
    list_init(&u->waiting);
    if (s->o.store_folder &&
        (size_t)snprintf(u->folder, sizeof u->folder, "%s/" FOLDER, s->o.store_folder) >= sizeof u->folder)
        u->folder[0] = 0;
    u->loaded = u->folder[0] == 0;
    return 0;
}

void unpacked_destroy(struct unpacked *u)
{
    if (!u)
        return;
    for (unsigned i = 0; i < BUCKETS; i++)
        for (struct list *l; (l = list_pop(&u->buckets[i]));)
            free(container_of(l, struct unpacked_file, link));
    pthread_mutex_destroy(&u->lock);
    free(u);
}

static void on_timer(struct loop_timer *t);
static void on_room(struct loop_msg *m);

int unpacker_create(struct worker *w, struct unpacker **out)
{
    struct unpacker *x = calloc(1, sizeof *x);
    *out = x;
    if (!x)
        return -ENOMEM;
    x->w = w;
    x->timer.fire = on_timer;
    x->room.run = on_room;
    list_init(&x->queue);
    list_init(&x->shorts);
    return 0;
}

void unpacker_destroy(struct unpacker *x)
{
    free(x);
}

bool unpacker_idle(const struct unpacker *x)
{
    struct unpacked *u = unpacked_of(x->w);
    pthread_mutex_lock(&u->lock);
    bool idle = !x->current && list_empty(&x->queue) && !x->room_posted && x->pending == 0;
    pthread_mutex_unlock(&u->lock);
    return idle;
}

bool unpacked_takes_room(const struct worker *w, const struct unpacked_file *f)
{
    struct unpacked *u = unpacked_of(w);
    pthread_mutex_lock(&u->lock);
    bool takes = f->doomed || !list_empty(&u->shorts);
    pthread_mutex_unlock(&u->lock);
    return takes;
}

/* ---- names ---- */

static void dataset_key(const char *dataset, uint8_t out[DATASET_BYTES])
{
    uint8_t digest[SHA256_BYTES];
    sha256(dataset, strlen(dataset), digest);
    memcpy(out, digest, DATASET_BYTES);
}

/* false: no memory. */
static bool key_of(const struct pubversion *v, uint32_t shard, uint8_t out[UNPACKED_KEY_BYTES])
{
    const struct pubshard *s = &v->shards[shard];
    uint8_t digest[SHA256_BYTES];
    struct buf b = {0};
    buf_put16(&b, slice_str(v->dir->name));
    buf_put16(&b, slice_str(s->name));
    buf_u64(&b, s->bytes);
    buf_u64(&b, s->stat.bytes);
    buf_u64(&b, s->stat.mtime_ns);
    buf_u64(&b, s->stat.inode);
    bool good = !b.failed;
    if (good) {
        sha256(b.p, b.n, digest);
        memcpy(out + DATASET_BYTES, digest, ID_BYTES);
        dataset_key(v->dir->name, out);
    }
    buf_free(&b);
    return good;
}

/* What follows the name, or NULL: it is not one of ours. */
static const char *name_read(const char *name, uint8_t key[UNPACKED_KEY_BYTES])
{
    if (strlen(name) < NAME_BYTES || hex_read(name, DATASET_BYTES, key) < 0 ||
        name[2 * DATASET_BYTES] != '-' ||
        hex_read(name + 2 * DATASET_BYTES + 1, ID_BYTES, key + DATASET_BYTES) < 0)
        return NULL;
    const char *rest = name + NAME_BYTES;
    return rest[0] == 0 || strcmp(rest, UNPACKING_TEMPORARY) == 0 ? rest : NULL;
}

/* ---- the table; with the lock held ---- */

static struct list *bucket_of(struct unpacked *u, const uint8_t key[UNPACKED_KEY_BYTES])
{
    return &u->buckets[key[UNPACKED_KEY_BYTES - 1] % BUCKETS];
}

static struct unpacked_file *find(struct unpacked *u, const uint8_t key[UNPACKED_KEY_BYTES])
{
    list_for_each (l, bucket_of(u, key)) {
        struct unpacked_file *f = container_of(l, struct unpacked_file, link);
        if (memcmp(f->key, key, UNPACKED_KEY_BYTES) == 0)
            return f;
    }
    return NULL;
}

static struct unpacked_file *make(struct unpacked *u, const uint8_t key[UNPACKED_KEY_BYTES], uint64_t bytes)
{
    char dataset[2 * DATASET_BYTES + 1], shard[2 * ID_BYTES + 1];
    size_t size = strlen(u->folder) + 1 + NAME_BYTES + 1;
    struct unpacked_file *f = calloc(1, sizeof *f + size);
    if (!f)
        return NULL;
    memcpy(f->key, key, UNPACKED_KEY_BYTES);
    f->bytes = bytes;
    hex_encode(key, DATASET_BYTES, dataset);
    hex_encode(key + DATASET_BYTES, ID_BYTES, shard);
    snprintf(f->path, size, "%s/%s-%s", u->folder, dataset, shard);
    list_init(&f->waiting);
    list_init(&f->queued);
    list_add_tail(bucket_of(u, key), &f->link);
    return f;
}

static void forget(struct unpacked_file *f)
{
    check(f->users == 0 && list_empty(&f->waiting));
    list_del(&f->link);
    free(f);
}

/* The one that nobody has used for the longest time. */
static struct unpacked_file *oldest(struct unpacked *u)
{
    struct unpacked_file *found = NULL;
    for (unsigned i = 0; i < BUCKETS; i++) {
        list_for_each (l, &u->buckets[i]) {
            struct unpacked_file *f = container_of(l, struct unpacked_file, link);
            if (f->state == FILE_THERE && f->users == 0 && (!found || f->used_ns < found->used_ns))
                found = f;
        }
    }
    return found;
}

static void want_again(struct loop_msg *m);

/* Lets them look again, or gives them the file, or the reason why there is none. */
static void wake(struct list *waiting, struct unpacked_file *f, const struct err *e)
{
    for (struct list *l; (l = list_pop(waiting));) {
        struct unpacked_want *want = container_of(l, struct unpacked_want, link);
        want->file = f;
        if (f)
            f->users++;
        if (e)
            want->err = *e;
        want->msg.run = want_again;
        loop_post(want->w->loop, &want->msg);
    }
}

static void wake_shorts(struct unpacked *u)
{
    list_for_each (l, &u->shorts) {
        struct unpacker *x = container_of(l, struct unpacker, shorts);
        if (x->room_posted)
            continue;
        x->room_posted = true;
        loop_post(x->w->loop, &x->room);
    }
}

static void left(struct io_op *op);

static void leave(struct unpacked *u, struct unpacked_file *f, struct unpacker *by)
{
    check(f->state == FILE_THERE && f->users == 0);
    f->state = FILE_LEAVING;
    f->by = by;
    by->pending++;
    u->leaving_bytes += f->bytes;
    f->op.done = left;
    loop_unlink(by->w->loop, &f->op, f->path);
}

/* It leaves, now or when nobody uses it any more. */
static void doom(struct unpacked *u, struct unpacked_file *f, struct unpacker *by)
{
    f->doomed = true;
    if (f->state == FILE_THERE && f->users == 0)
        leave(u, f, by);
}

/* ---- removal ---- */

static void left(struct io_op *op)
{
    struct unpacked_file *f = container_of(op, struct unpacked_file, op);
    struct unpacker *x = f->by;
    struct unpacked *u = unpacked_of(x->w);
    if (op->result < 0 && op->result != -ENOENT)
        log_warn("removing %s failed: %s", f->path, strerror((int)-op->result));
    pthread_mutex_lock(&u->lock);
    u->bytes -= f->bytes;
    u->leaving_bytes -= f->bytes;
    metric_set(METRIC_unpacked_bytes, (int64_t)u->bytes);
    wake(&f->waiting, NULL, NULL);
    forget(f);
    x->pending--;
    wake_shorts(u);
    pthread_mutex_unlock(&u->lock);
    worker_has_less(x->w);
}

static void put(struct worker *w, struct unpacked_file *f, uint64_t used_ns, bool lost)
{
    struct unpacked *u = unpacked_of(w);
    pthread_mutex_lock(&u->lock);
    check(f->users > 0);
    f->users--;
    f->used_ns = used_ns > f->used_ns ? used_ns : f->used_ns;
    f->doomed = f->doomed || lost;
    if (f->users == 0 && f->doomed)
        leave(u, f, unpacker_of(w));
    if (f->users == 0)
        wake_shorts(u);
    pthread_mutex_unlock(&u->lock);
}

void unpacked_put(struct worker *w, struct unpacked_file *f, uint64_t used_ns)
{
    put(w, f, used_ns, false);
}

void unpacked_lost(struct worker *w, struct unpacked_file *f)
{
    put(w, f, 0, true);
}

/* ---- making ---- */

static void no_longer_short(struct unpacker *x)
{
    if (list_empty(&x->shorts))
        return;
    list_del(&x->shorts);
    loop_timer_clear(x->w->loop, &x->timer);
}

/* The unpacker's current file is there, or is not to be had. counted: among u->bytes. */
static void made(struct unpacker *x, bool counted, const struct err *e)
{
    struct unpacked *u = unpacked_of(x->w);
    pthread_mutex_lock(&u->lock);
    struct unpacked_file *f = x->current;
    bool good = e->class == ERR_NONE;
    x->current = NULL;
    f->state = FILE_THERE;
    f->used_ns = loop_unix_ns(x->w->loop);
    no_longer_short(x);
    wake(&f->waiting, good ? f : NULL, good ? NULL : e);
    if (!good && counted)
        u->bytes -= f->bytes;
    if (!good)
        forget(f);
    metric_set(METRIC_unpacked_bytes, (int64_t)u->bytes);
    wake_shorts(u);
    pthread_mutex_unlock(&u->lock);
}

static void next(struct unpacker *x);

static void job_done(struct unpacking *job)
{
    struct unpacker *x = container_of(job, struct unpacker, job);
    if (job->err.class == ERR_NONE)
        metric_add(METRIC_unpacked_shards_total, 1);
    else
        log_warn("unpacking failed: %s", job->err.text);
    made(x, true, &job->err);
    next(x);
    worker_has_less(x->w);
}

static bool job_wanted(const struct unpacking *job)
{
    const struct unpacker *x = container_of(job, struct unpacker, job);
    return !atomic_load(&unpacked_of(x->w)->hurry);
}

static bool space_for(const struct worker *w, uint64_t bytes)
{
    uint64_t free_bytes, total;
    const struct server_options *o = &w->server->o;
    return loop_space(w->loop, o->store_folder, &free_bytes, &total) == 0 && free_bytes >= bytes &&
           free_bytes - bytes >= o->space_reserve_bytes;
}

enum room { ROOM_THERE, ROOM_WAIT, ROOM_NONE };

/* With the lock held: counts the file if it fits, else removes what can go. space: the disk has it. */
static enum room room_for(struct unpacker *x, const struct unpacked_file *f, bool space)
{
    struct unpacked *u = unpacked_of(x->w);
    uint64_t max = u->server->limits.unpacked_bytes_max;
    struct unpacked_file *old = NULL;
    if (space && u->bytes <= max && f->bytes <= max - u->bytes) {
        u->bytes += f->bytes;
        return ROOM_THERE;
    }
    while (u->bytes - u->leaving_bytes + f->bytes > max && (old = oldest(u)))
        leave(u, old, x);
    if (!space && u->leaving_bytes == 0 && (old = oldest(u)))
        leave(u, old, x);
    return space || u->leaving_bytes > 0 ? ROOM_WAIT : ROOM_NONE;
}

static const struct unpacked_want *first_want(const struct unpacked_file *f)
{
    return container_of(f->waiting.next, struct unpacked_want, link);
}

static void fail_made(struct unpacker *x, enum err_class class, const char *why)
{
    const struct unpacked_want *want = first_want(x->current); /* this loop's: they stay until made */
    struct err e = {0};
    err_set(&e, class, "shard %s of %s cannot be unpacked now: %s", want->version->shards[want->shard].name,
            want->version->dir->name, why);
    made(x, false, &e);
}

static void wait_for_room(struct unpacked *u, struct unpacker *x)
{
    if (!list_empty(&x->shorts))
        return;
    list_add_tail(&u->shorts, &x->shorts);
    loop_timer_set(x->w->loop, &x->timer, loop_now_ms(x->w->loop) + UNPACKED_ROOM_MS);
}

/* The unpacker's current file. True: it is over with it already. */
static bool begin(struct unpacker *x)
{
    struct unpacked *u = unpacked_of(x->w);
    struct unpacked_file *f = x->current; /* set on this loop only */
    bool hurry = atomic_load(&u->hurry), space = space_for(x->w, f->bytes);
    pthread_mutex_lock(&u->lock);
    enum room room = hurry ? ROOM_NONE : room_for(x, f, space);
    if (room == ROOM_WAIT)
        wait_for_room(u, x);
    else
        no_longer_short(x);
    pthread_mutex_unlock(&u->lock);
    if (hurry)
        fail_made(x, ERR_CANCELLED, "the server stops");
    else if (room == ROOM_NONE)
        fail_made(x, ERR_NO_SPACE,
                  "the store's disk lacks the space (space_reserve stays free); make space there, or put "
                  "unpacked shards beside the packed ones");
    else if (room == ROOM_WAIT)
        shard_files_trim(x->w->published->files);
    if (room != ROOM_THERE)
        return room == ROOM_NONE;
    const struct unpacked_want *want = first_want(f);
    x->job.done = job_done;
    x->job.wanted = job_wanted;
    unpacking_begin(&x->job, x->w->loop, want->version, want->shard, u->folder, f->path);
    return false;
}

static void next(struct unpacker *x)
{
    struct unpacked *u = unpacked_of(x->w);
    struct list *l;
    do {
        pthread_mutex_lock(&u->lock);
        l = x->current ? NULL : list_pop(&x->queue);
        if (l)
            x->current = container_of(l, struct unpacked_file, queued);
        pthread_mutex_unlock(&u->lock);
    } while (l && begin(x));
}

/* Something has gone, or nobody uses it any more. */
static void on_room(struct loop_msg *m)
{
    struct unpacker *x = container_of(m, struct unpacker, room);
    struct unpacked *u = unpacked_of(x->w);
    pthread_mutex_lock(&u->lock);
    x->room_posted = false;
    bool waits = !list_empty(&x->shorts);
    pthread_mutex_unlock(&u->lock);
    if (waits && begin(x))
        next(x);
    worker_has_less(x->w);
}

static void on_timer(struct loop_timer *t)
{
    struct unpacker *x = container_of(t, struct unpacker, timer);
    fail_made(x, ERR_BUSY,
              "the files of unpacked_shards (larderd.conf) are all being read; raise it, or put unpacked "
              "shards beside the packed ones");
    next(x);
    worker_has_less(x->w);
}

/* ---- wanting ---- */

static void want_failed(struct loop_msg *m)
{
    struct unpacked_want *want = container_of(m, struct unpacked_want, msg);
    want->told(want);
}

static void refuse(struct unpacked_want *want)
{
    want->msg.run = want_failed;
    loop_post(want->w->loop, &want->msg);
}

/* With the lock held. True: there it is, or it cannot be. *begun: it is to be made by this loop. */
static bool look(struct unpacked *u, struct unpacked_want *want, bool *begun)
{
    struct unpacker *x = unpacker_of(want->w);
    uint64_t bytes = want->version->shards[want->shard].bytes;
    struct unpacked_file *f = u->loaded ? find(u, want->key) : NULL;
    if (f && f->bytes != bytes) /* cut by somebody */
        doom(u, f, x);
    if (f && f->state == FILE_THERE && !f->doomed) {
        f->users++;
        want->file = f;
        return true;
    }
    if (u->loaded && !f) {
        f = make(u, want->key, bytes);
        if (!f) {
            err_set(&want->err, ERR_NO_MEMORY, "no memory for unpacking a shard");
            return true;
        }
        list_add_tail(&x->queue, &f->queued);
        *begun = true;
    }
    list_add_tail(f ? &f->waiting : &u->waiting, &want->link);
    return false;
}

static void want_look(struct unpacked_want *want)
{
    struct unpacked *u = unpacked_of(want->w);
    bool begun = false;
    pthread_mutex_lock(&u->lock);
    bool ends = look(u, want, &begun);
    pthread_mutex_unlock(&u->lock);
    if (begun)
        next(unpacker_of(want->w));
    if (!ends)
        return;
    if (!want->file) {
        refuse(want);
        return;
    }
    want->path = want->file->path;
    want->told(want);
}

static void want_again(struct loop_msg *m)
{
    struct unpacked_want *want = container_of(m, struct unpacked_want, msg);
    if (!want->file && want->err.class == ERR_NONE) {
        want_look(want);
        return;
    }
    if (want->file)
        want->path = want->file->path;
    want->told(want);
}

void unpacked_get(struct unpacked_want *want, struct worker *w, struct pubversion *v, uint32_t shard)
{
    const struct pubshard *s = &v->shards[shard];
    uint64_t max = w->server->limits.unpacked_bytes_max;
    want->w = w;
    want->version = v;
    want->shard = shard;
    want->file = NULL;
    want->path = NULL;
    err_clear(&want->err);
    list_init(&want->link);
    if (!unpacked_of(w)->folder[0])
        err_set(&want->err, ERR_UNSUPPORTED,
                "shard %s of %s is packed, and this server has no folder to unpack it in", s->name,
                v->dir->name);
    else if (s->bytes > max)
        err_set(&want->err, ERR_LIMIT,
                "shard %s of %s has %" PRIu64 " bytes unpacked, unpacked_shards in larderd.conf is %" PRIu64
                ": raise it, or put an unpacked %s beside %s",
                s->name, v->dir->name, s->bytes, max, s->name, s->packed);
    else if (!key_of(v, shard, want->key))
        err_set(&want->err, ERR_NO_MEMORY, "no memory for unpacking a shard");
    if (want->err.class != ERR_NONE)
        refuse(want);
    else
        want_look(want);
}

/* ---- what is kept ---- */

static bool is_published(const struct worker *w, const uint8_t key[UNPACKED_KEY_BYTES])
{
    for (size_t i = 0; i < w->dir_count; i++) {
        uint8_t dataset[DATASET_BYTES];
        if (w->dirs[i].format != SHARD_MDS)
            continue;
        dataset_key(w->dirs[i].name, dataset);
        if (memcmp(dataset, key, DATASET_BYTES) == 0)
            return true;
    }
    return false;
}

void unpacked_keep_dirs(struct worker *w)
{
    struct unpacked *u = unpacked_of(w);
    pthread_mutex_lock(&u->lock);
    for (unsigned i = 0; i < BUCKETS; i++) {
        list_for_each_safe (l, &u->buckets[i]) {
            struct unpacked_file *f = container_of(l, struct unpacked_file, link);
            if (!is_published(w, f->key))
                doom(u, f, unpacker_of(w));
        }
    }
    pthread_mutex_unlock(&u->lock);
}

static int by_key(const void *a, const void *b)
{
    return memcmp(a, b, UNPACKED_KEY_BYTES);
}

/* The keys of a version's packed shards, sorted; NULL: no memory. */
static uint8_t (*keys_of(const struct pubversion *v, size_t *count))[UNPACKED_KEY_BYTES]
{
    uint8_t(*keys)[UNPACKED_KEY_BYTES] = calloc((size_t)v->count + 1, sizeof *keys);
    bool good = keys != NULL;
    *count = 0;
    for (uint32_t i = 0; i < v->count && good; i++)
        if (v->shards[i].packed)
            good = key_of(v, i, keys[(*count)++]);
    if (good) {
        qsort(keys, *count, sizeof *keys, by_key);
        return keys;
    }
    free(keys);
    return NULL;
}

void unpacked_keep_version(struct worker *w, const struct pubversion *v)
{
    struct unpacked *u = unpacked_of(w);
    size_t count;
    uint8_t dataset[DATASET_BYTES];
    uint8_t(*keys)[UNPACKED_KEY_BYTES] = v->mds ? keys_of(v, &count) : NULL;
    if (!keys)
        return; /* they go later, as the longest unused */
    dataset_key(v->dir->name, dataset);
    pthread_mutex_lock(&u->lock);
    for (unsigned i = 0; i < BUCKETS; i++) {
        list_for_each_safe (l, &u->buckets[i]) {
            struct unpacked_file *f = container_of(l, struct unpacked_file, link);
            if (memcmp(f->key, dataset, DATASET_BYTES) == 0 &&
                !bsearch(f->key, keys, count, sizeof *keys, by_key))
                doom(u, f, unpacker_of(w));
        }
    }
    pthread_mutex_unlock(&u->lock);
    free(keys);
}

void unpacked_hurry(struct server *s)
{
    struct unpacked *u = s->unpacked;
    pthread_mutex_lock(&u->lock);
    atomic_store(&u->hurry, true);
    wake_shorts(u);
    pthread_mutex_unlock(&u->lock);
}

/* ---- what earlier servers left ---- */

static void load_end(struct load *k)
{
    struct worker *w = k->w;
    struct unpacked *u = unpacked_of(w);
    struct unpacked_file *old;
    loop_names_free(&k->names);
    free(k);
    unpacked_keep_dirs(w);
    pthread_mutex_lock(&u->lock);
    u->loaded = true;
    while (u->bytes - u->leaving_bytes > u->server->limits.unpacked_bytes_max && (old = oldest(u)))
        leave(u, old, unpacker_of(w));
    metric_set(METRIC_unpacked_bytes, (int64_t)u->bytes);
    wake(&u->waiting, NULL, NULL);
    unpacker_of(w)->pending--;
    pthread_mutex_unlock(&u->lock);
    worker_has_less(w);
}

static void load_next(struct load *k);

static void load_removed(struct io_op *op)
{
    load_next(container_of(op, struct load, op));
}

static void load_looked_at(struct io_op *op)
{
    struct load *k = container_of(op, struct load, op);
    struct unpacked *u = unpacked_of(k->w);
    uint8_t key[UNPACKED_KEY_BYTES];
    const char *rest = name_read(k->names.names[k->next++], key);
    check(rest);
    if (op->result >= 0 && k->stat.file && rest[0] == 0) {
        pthread_mutex_lock(&u->lock);
        struct unpacked_file *f = make(u, key, k->stat.bytes);
        if (f) {
            f->state = FILE_THERE;
            f->used_ns = k->stat.mtime_ns;
            u->bytes += f->bytes;
        }
        pthread_mutex_unlock(&u->lock);
        load_next(k);
    } else { /* cut off by the end of a server */
        op->done = load_removed;
        loop_unlink(k->w->loop, op, k->path);
    }
}

static void load_next(struct load *k)
{
    const struct unpacked *u = unpacked_of(k->w);
    uint8_t key[UNPACKED_KEY_BYTES];
    while (k->next < k->names.count && !name_read(k->names.names[k->next], key))
        k->next++; /* not ours */
    if (k->next == k->names.count || (size_t)snprintf(k->path, sizeof k->path, "%s/%s", u->folder,
                                                      k->names.names[k->next]) >= sizeof k->path) {
        load_end(k);
        return;
    }
    k->op.done = load_looked_at;
    loop_stat(k->w->loop, &k->op, k->path, &k->stat);
}

static void load_listed(struct io_op *op)
{
    struct load *k = container_of(op, struct load, op);
    if (op->result < 0 && op->result != -ENOENT)
        log_warn("listing %s failed: %s", unpacked_of(k->w)->folder, strerror((int)-op->result));
    load_next(k);
}

void unpacked_load(struct worker *w)
{
    struct unpacked *u = unpacked_of(w);
    struct load *k = u->folder[0] ? calloc(1, sizeof *k) : NULL;
    pthread_mutex_lock(&u->lock);
    if (k) {
        unpacker_of(w)->pending++;
    } else { /* no folder; or no memory: the next server finds them */
        u->loaded = true;
        wake(&u->waiting, NULL, NULL);
    }
    pthread_mutex_unlock(&u->lock);
    if (!k)
        return;
    k->w = w;
    k->op.done = load_listed;
    loop_list(w->loop, &k->op, u->folder, &k->names);
}
