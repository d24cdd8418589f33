/* SPDX-License-Identifier: Apache-2.0 */
/* Importing a dataset version: the caller's thread leads the stages, a few workers do them file by file. */
#include "client/dataset_import.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "client/clock.h"
#include "format/base/digest.h"

#define WORKERS_MAX       4u
#define PROGRESS_EVERY_MS 200u

/* ---- what was asked for ---- */

static int labels_encode(const char *const *labels, struct buf *out, struct err *e)
{
    out->max = LABELS_BYTES_MAX;
    for (size_t i = 0; labels && labels[i]; i += 2) {
        size_t key_bytes = strlen(labels[i]);
        if (!labels[i + 1])
            return err_set(e, ERR_INVALID,
                           "label \"%s\" has no value: labels are key, value, key, value, ..., NULL",
                           labels[i]);
        if (key_bytes == 0 || key_bytes > NAME_BYTES_MAX)
            return err_set(e, ERR_INVALID, "a label's key has %zu bytes, 1 to %u are allowed", key_bytes,
                           NAME_BYTES_MAX);
        buf_put16(out, slice_str(labels[i]));
        buf_put16(out, slice_str(labels[i + 1]));
    }
    return buf_end(out, "labels", e);
}

static int level_of(enum larder_compression compression, enum codec_level *out, struct err *e)
{
    switch (compression) {
    case LARDER_COMPRESS_DEFAULT:
    case LARDER_COMPRESS_FAST: *out = CODEC_LEVEL_FAST; return 0;
    case LARDER_COMPRESS_OFF: *out = CODEC_LEVEL_OFF; return 0;
    case LARDER_COMPRESS_DENSE: *out = CODEC_LEVEL_DENSE; return 0;
    }
    return err_set(e, ERR_INVALID, "compression %d is not known: 0 to 3 are", (int)compression);
}

static int check_options(const struct larder_import_options *o, struct err *e)
{
    if (!o || !o->dataset)
        return err_set(e, ERR_INVALID, "no dataset name was given");
    int rc = run_name_check(o->dataset, strlen(o->dataset), e);
    if (rc < 0)
        return err_prepend(e, "dataset");
    if (o->format < LARDER_SHARD_AUTO || o->format > LARDER_SHARD_TOKENS)
        return err_set(e, ERR_INVALID, "shard format %d is not known", (int)o->format);
    if (o->format == LARDER_SHARD_RECORDS && o->record_bytes == 0)
        return err_set(e, ERR_INVALID, "records of 0 bytes: give the size of one record");
    if (o->window_tokens == 0 ? o->window_extra != 0 : o->window_extra > o->window_tokens)
        return err_set(e, ERR_INVALID,
                       "windows of %" PRIu64 " tokens and %" PRIu64 " more: the latter are at most as many",
                       o->window_tokens, o->window_extra);
    if (o->window_tokens > TOKEN_WINDOW_MAX)
        return err_set(e, ERR_LIMIT, "windows of %" PRIu64 " tokens, at most %llu are allowed",
                       o->window_tokens, TOKEN_WINDOW_MAX);
    return 0;
}

/* Nobody asks for windows of what has no tokens. */
static int check_window(const struct import *im, struct err *e)
{
    for (uint32_t i = 0; im->o->window_tokens && i < im->files.count; i++)
        if (im->files.list[i].format != SHARD_TOKENS)
            return err_set(e, ERR_INVALID,
                           "%s: windows are of token files (X.bin and X.idx), which it is not",
                           im->files.list[i].path);
    return 0;
}

static int import_init(struct import *im, struct larder *c, const struct larder_import_options *o,
                       struct err *e)
{
    *im = (struct import){.client = c, .o = o, .lock = PTHREAD_MUTEX_INITIALIZER};
    clock_cond_init(&im->changed);
    int rc = check_options(o, e);
    if (rc == 0)
        rc = level_of(o->compression, &im->level, e);
    if (rc == 0)
        rc = labels_encode(o->labels, &im->labels, e);
    if (rc == 0)
        rc = import_files_gather(o, &im->files, e);
    uint32_t count = im->files.count;
    if (rc == 0)
        rc = check_window(im, e);
    if (rc == 0)
        rc = shard_table_init(&im->table, count, e);
    if (rc < 0)
        return rc;
    im->parts = calloc(count, sizeof *im->parts);
    im->sealed = calloc(count, sizeof *im->sealed);
    if (!im->parts || !im->sealed)
        return err_set(e, ERR_NO_MEMORY, "no memory for importing %u shards", count);
    for (uint32_t i = 0; rc == 0 && i < count; i++) {
        rc = shard_table_name(&im->table, i, slice_str(im->files.list[i].name), e);
        if (rc < 0)
            err_prepend(e, "%s", im->files.list[i].path);
    }
    return rc;
}

static void import_free(struct import *im)
{
    shard_table_free(&im->table);
    import_files_free(&im->files);
    buf_free(&im->labels);
    free(im->parts);
    free(im->sealed);
    pthread_cond_destroy(&im->changed);
    pthread_mutex_destroy(&im->lock);
}

/* ---- workers ---- */

static void import_fail(struct import *im, const struct err *e)
{
    pthread_mutex_lock(&im->lock);
    /* What was cut short because another shard failed is not the cause. */
    if (!im->failed)
        im->err = *e;
    im->failed = true;
    pthread_mutex_unlock(&im->lock);
}

/* The next shard to do, or UINT32_MAX. */
static uint32_t take_next(struct import *im)
{
    pthread_mutex_lock(&im->lock);
    uint32_t i = im->failed || im->next == im->table.count ? UINT32_MAX : im->next++;
    pthread_mutex_unlock(&im->lock);
    return i;
}

static void worker_ends(struct import *im)
{
    pthread_mutex_lock(&im->lock);
    im->running--;
    pthread_cond_signal(&im->changed);
    pthread_mutex_unlock(&im->lock);
}

static void *scan_worker(void *arg)
{
    struct import *im = arg;
    for (uint32_t i; (i = take_next(im)) != UINT32_MAX;) {
        struct err e = {0};
        if (import_scan(im, i, &e) < 0)
            import_fail(im, &e);
    }
    worker_ends(im);
    return NULL;
}

static void *write_worker(void *arg)
{
    struct import *im = arg;
    struct err e = {0};
    struct conn *conn = NULL;
    struct part_scratch *scratch = part_scratch_create();
    if (!scratch)
        err_set(&e, ERR_NO_MEMORY, "no memory for sealing chunks");
    if (!scratch || client_connect(im->client, CONN_LANE_OPEN, &conn, &e) < 0)
        import_fail(im, &e);
    for (uint32_t i; (i = take_next(im)) != UINT32_MAX;) {
        if (import_write(im, conn, scratch, i, &e) < 0)
            import_fail(im, &e);
        else
            im->sealed[i] = true; /* its own element, read after the workers were joined */
    }
    conn_close(conn);
    if (scratch)
        part_scratch_free(scratch);
    worker_ends(im);
    return NULL;
}

/* On the caller's thread while workers work. */
static void watch(struct import *im)
{
    uint64_t last = 0;
    pthread_mutex_lock(&im->lock);
    while (im->running) {
        clock_wait(&im->changed, &im->lock, clock_ms() + PROGRESS_EVERY_MS);
        const char *file = im->current;
        uint64_t done = im->bytes_done;
        if (!im->o->progress || !file || clock_ms() - last < PROGRESS_EVERY_MS / 4)
            continue;
        last = clock_ms();
        pthread_mutex_unlock(&im->lock);
        im->o->progress(im->o->progress_arg, done, im->bytes_total, file);
        pthread_mutex_lock(&im->lock);
    }
    pthread_mutex_unlock(&im->lock);
}

/* Runs a stage over all shards on several threads, which take no signals of the process. */
static int stage(struct import *im, void *(*worker)(void *), struct err *e)
{
    unsigned want = client_options(im->client)->threads;
    want = want < WORKERS_MAX ? want : WORKERS_MAX;
    want = want < im->table.count ? want : im->table.count;
    want = want ? want : 1;
    pthread_t threads[WORKERS_MAX];
    sigset_t all, old;
    unsigned started = 0;
    int rc = 0;
    im->next = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (; rc == 0 && started < want; started += rc == 0) {
        pthread_mutex_lock(&im->lock);
        im->running++;
        pthread_mutex_unlock(&im->lock);
        rc = pthread_create(&threads[started], NULL, worker, im);
        if (rc != 0)
            worker_ends(im);
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (started == 0)
        return err_sys(e, rc, "starting threads for the import");
    watch(im);
    for (unsigned i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    if (!im->failed)
        return 0;
    *e = im->err;
    return -im->err.errnum;
}

/* ---- the import ---- */

static int begin_attempt(struct import *im, struct err *e)
{
    if (getrandom(&im->attempt, sizeof im->attempt, 0) != (ssize_t)sizeof im->attempt)
        return err_sys(e, errno, "asking the kernel for random bytes");
    int rc = run_open(im->client, RUN_DATASET, im->o->dataset, true, &im->run, e);
    if (rc < 0)
        return rc;
    im->step = 0; /* versions are told apart by their sequence */
    struct msg_attempt m = {.run_id = im->run.run_id, .attempt = im->attempt, .world = im->table.count};
    struct buf message = {0};
    struct call call = {0};
    msg_attempt_encode(&m, &message);
    rc = buf_end(&message, "attempt", e);
    if (rc == 0)
        rc = conn_call(client_conn(im->client), OP_ATTEMPT, SLICE(message.p, message.n), SLICE(NULL, 0), 0,
                       &call, NULL, e);
    call_free(&call);
    buf_free(&message);
    if (rc < 0)
        run_close(&im->run);
    return rc;
}

/* Says which checksums of the files will not be compared, each once for packed or plain bytes of a shard that
 * is the first to have it. */
static void tell_unchecked(const struct import *im, const struct mds_file *f, const struct mds_file *before)
{
    char text[512], q[128];
    for (uint32_t i = 0; i < f->hash_count; i++) {
        const char *name = f->hashes[i].algorithm;
        bool told = digest_known(name);
        for (uint32_t k = 0; !told && before && k < before->hash_count; k++)
            told = strcmp(before->hashes[k].algorithm, name) == 0;
        if (told)
            continue;
        snprintf(text, sizeof text, "%s: the checksum %s is not known here and was not compared", f->name,
                 err_quote(q, sizeof q, name, strlen(name)));
        im->o->note(im->o->note_arg, text);
    }
}

static void tell_notes(const struct import *im)
{
    const struct mds_shard *before = NULL;
    for (uint32_t i = 0; im->o->note && i < im->files.count; i++) {
        const struct import_file *f = &im->files.list[i];
        if (!f->mds)
            continue;
        tell_unchecked(im, &f->mds->raw, before ? &before->raw : NULL);
        if (f->zstd)
            tell_unchecked(im, &f->mds->zip, before ? &before->zip : NULL);
        before = f->mds;
    }
}

static int import_run(struct import *im, uint64_t *version, struct err *e)
{
    int rc = stage(im, scan_worker, e);
    if (rc < 0)
        return rc;
    tell_notes(im);
    for (uint32_t i = 0; i < im->table.count; i++)
        if (add_overflows(im->bytes_total, im->table.shards[i].bytes, &im->bytes_total))
            return err_set(e, ERR_LIMIT, "the files together have more bytes than 64 bits count");
    rc = begin_attempt(im, e);
    if (rc < 0)
        return rc;
    rc = stage(im, write_worker, e);
    if (rc == 0)
        rc = import_join(im, client_conn(im->client), version, e);
    if (rc < 0)
        import_abort(im, client_conn(im->client), e);
    else if (im->o->progress)
        im->o->progress(im->o->progress_arg, im->bytes_total, im->bytes_total,
                        im->files.list[im->table.count - 1].path);
    run_close(&im->run);
    return rc;
}

int larder_dataset_import(struct larder *c, const struct larder_import_options *o, uint64_t *version,
                          struct larder_error *error)
{
    struct err e = {0};
    struct import im;
    uint64_t made = 0;
    int rc = client_enter(c, &e);
    if (rc < 0)
        return client_leave(rc, &e, error);
    struct larder_import_options own = {.size = sizeof own};
    if (o) /* a caller of an older header has fewer fields: the rest reads as zero */
        memcpy(&own, o, o->size < sizeof own ? o->size : sizeof own);
    rc = import_init(&im, c, o ? &own : NULL, &e);
    if (rc == 0)
        rc = import_run(&im, &made, &e);
    if (rc == 0 && version)
        *version = made;
    import_free(&im);
    if (rc < 0 && o && o->dataset)
        err_prepend(&e, "importing dataset \"%s\"", o->dataset);
    return client_leave(rc, &e, error);
}
