/* SPDX-License-Identifier: Apache-2.0 */
/* The public calls of saving: describe, take the snapshot, ask, wait. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/clock.h"
#include "client/opened.h"
#include "client/saver.h"
#include "client/stage.h"
#include "format/base/hash.h"

/* ---- begin ---- */

static int attempt_of(struct larder *c, const struct larder_save_options *o, struct id *out, struct err *e)
{
    static const struct id zero;
    memcpy(out, o->attempt, sizeof *out);
    if (!id_equal(out, &zero))
        return 0;
    const char *named = getenv("LARDER_ATTEMPT");
    uint8_t digest[SHA256_BYTES];
    if (named && *named) {
        sha256(named, strlen(named), digest);
        memcpy(out, digest, sizeof *out);
        return 0;
    }
    if (o->world > 1)
        return err_set(e, ERR_INVALID,
                       "with %u ranks the attempt must be given, the same on all of them and another after "
                       "each restart: in the "
                       "options, or as LARDER_ATTEMPT (any text, such as the job's id and restart count)",
                       o->world);
    *out = c->incarnation;
    return 0;
}

static int labels_of(const char *const *labels, struct buf *out, struct err *e)
{
    out->max = LABELS_BYTES_MAX;
    for (size_t i = 0; labels && labels[i]; i += 2) {
        if (!labels[i + 1])
            return err_set(e, ERR_INVALID, "label \"%.100s\" has no value; labels are key, value, ..., NULL",
                           labels[i]);
        if (strlen(labels[i]) == 0 || strlen(labels[i]) > NAME_BYTES_MAX)
            return err_set(e, ERR_INVALID, "a label's key has %zu bytes; expected 1 to %u", strlen(labels[i]),
                           NAME_BYTES_MAX);
        buf_put16(out, slice_str(labels[i]));
        buf_put16(out, slice_str(labels[i + 1]));
    }
    return buf_end(out, "the labels of a save", e);
}

static int level_of(enum larder_compression compression, enum codec_level *out, struct err *e)
{
    switch (compression) {
    case LARDER_COMPRESS_DEFAULT:
    case LARDER_COMPRESS_FAST: *out = CODEC_LEVEL_FAST; return 0;
    case LARDER_COMPRESS_OFF: *out = CODEC_LEVEL_OFF; return 0;
    case LARDER_COMPRESS_DENSE: *out = CODEC_LEVEL_DENSE; return 0;
    }
    return err_set(e, ERR_INVALID, "compression is %d; expected 0 to 3", (int)compression);
}

static int fill_save(struct larder_save *s, struct larder *c, const struct larder_save_options *o,
                     struct err *e)
{
    if (!o->run)
        return err_set(e, ERR_INVALID, "the save names no run");
    int rc = run_name_check(o->run, strlen(o->run), e);
    if (rc < 0)
        return rc;
    if (o->world > WORLD_MAX || o->rank >= o->world)
        return err_set(e, ERR_INVALID, "rank %u of %u; expected a rank below world, and world at most %u",
                       o->rank, o->world, WORLD_MAX);
    if (o->loader_state_bytes > LOADER_STATE_BYTES_MAX || (o->loader_state_bytes > 0 && !o->loader_state))
        return err_set(e, ERR_INVALID, "a loader state of %zu bytes; at most %u are kept",
                       o->loader_state_bytes, LOADER_STATE_BYTES_MAX);
    if (o->verify_percent > 100)
        return err_set(e, ERR_INVALID, "verify_percent is %u; expected 0 to 100", o->verify_percent);
    strcpy(s->run, o->run);
    s->step = o->step;
    s->rank = o->rank;
    s->world = o->world;
    if (o->loader_state)
        memcpy(s->loader, o->loader_state, o->loader_state_bytes);
    s->loader_bytes = o->loader_state ? o->loader_state_bytes : 0;
    s->loader_asked = !o->loader_state && !o->no_loader_state;
    s->when_busy = o->when_busy;
    s->join_timeout_ms =
        o->join_timeout_ms > 0 ? (uint32_t)o->join_timeout_ms : c->options.request_timeout_ms;
    s->verify_percent = o->verify_percent ? o->verify_percent : 1;
    s->given_ms = o->deadline_ms;
    s->deadline_ms = o->deadline_ms ? clock_ms() + o->deadline_ms : 0;
    rc = level_of(o->compression, &s->level, e);
    if (rc == 0)
        rc = attempt_of(c, o, &s->attempt, e);
    if (rc == 0)
        rc = labels_of(o->labels, &s->labels, e);
    return rc;
}

int larder_save_begin(struct larder *c, const struct larder_save_options *options, struct larder_save **out,
                      struct larder_error *error)
{
    struct err e;
    err_clear(&e);
    struct larder_save_options o = {0};
    int rc = client_enter(c, &e);
    if (rc < 0)
        return client_leave(rc, &e, error);
    memcpy(&o, options, options->size < sizeof o ? options->size : sizeof o);
    o.world = o.world ? o.world : 1;
    if (!c->staging)
        return client_leave(
            err_set(&e, ERR_DENIED, "the credentials' role is reader; saving needs a writer's"), &e, error);
    pthread_mutex_lock(&c->saver->lock);
    saver_reap(c->saver); /* an older save's description goes before the next one grows */
    struct snapshot_size expected = c->saver->expected;
    pthread_mutex_unlock(&c->saver->lock);
    struct larder_save *s = calloc(1, sizeof *s);
    rc = s ? fill_save(s, c, &o, &e) : err_set(&e, ERR_NO_MEMORY, "no memory for a save");
    if (rc < 0) {
        if (s)
            buf_free(&s->labels);
        free(s);
        return client_leave(rc, &e, error);
    }
    s->client = c;
    s->saver = c->saver;
    s->references = 1;
    s->snapshot.alone = s->world == 1;
    s->snapshot.lender = c;
    snapshot_expect(&s->snapshot, &expected);
    list_init(&s->link);
    *out = s;
    return client_leave(0, &e, error);
}

/* ---- describing ---- */

static int enter_save(struct larder_save *s, struct err *e)
{
    err_clear(e);
    if (!s)
        return err_set(e, ERR_INVALID, "the save is NULL");
    return client_enter(s->client, e);
}

static int enter_open(struct larder_save *s, struct err *e)
{
    int rc = enter_save(s, e);
    if (rc == 0 && s->submitted)
        rc = err_set(e, ERR_INVALID, "the save of step %llu was submitted already; begin another",
                     (unsigned long long)s->step);
    return rc;
}

int larder_save_tensor(struct larder_save *s, const struct larder_tensor *t, struct larder_error *error)
{
    struct err e;
    int rc = enter_open(s, &e);
    if (rc == 0)
        rc = snapshot_tensor(&s->snapshot, s->client, t, &e);
    return client_leave(rc, &e, error);
}

int larder_save_alias(struct larder_save *s, const char *name, const char *of, struct larder_error *error)
{
    struct err e;
    int rc = enter_open(s, &e);
    if (rc == 0)
        rc = snapshot_alias(&s->snapshot, name, of, &e);
    return client_leave(rc, &e, error);
}

int larder_save_blob(struct larder_save *s, const char *name, const void *p, size_t n,
                     struct larder_error *error)
{
    struct err e;
    int rc = enter_open(s, &e);
    if (rc == 0)
        rc = snapshot_blob(&s->snapshot, name, p, n, &e);
    return client_leave(rc, &e, error);
}

/* ---- submit ---- */

/* With the lock held. */
static int take_unseen(struct saver *v, struct err *e)
{
    if (v->unseen.class == ERR_NONE)
        return 0;
    *e = v->unseen;
    err_clear(&v->unseen);
    return -e->errnum;
}

/* With the lock held: this save becomes the one that is sent. */
static int take_turn(struct larder_save *s, struct err *e)
{
    struct saver *v = s->saver;
    uint32_t bound = save_time_left(s, s->client->options.request_timeout_ms);
    uint64_t until = clock_ms() + bound;
    int rc = take_unseen(v, e);
    while (rc == 0 && v->sending) {
        const struct larder_save *before = v->sending;
        if (s->when_busy == LARDER_BUSY_SKIP) {
            v->skipped++;
            return err_set(e, ERR_BUSY,
                           "step %llu of %s is skipped: step %llu is still being sent (%llu skipped so far)",
                           (unsigned long long)s->step, s->run, (unsigned long long)before->step,
                           (unsigned long long)v->skipped);
        }
        if (!clock_wait(&v->changed, &v->lock, until) && v->sending)
            return err_set(e, ERR_TIMEOUT,
                           "step %llu of %s was still being sent after %u ms; step %llu was not staged",
                           (unsigned long long)before->step, before->run, bound, (unsigned long long)s->step);
        rc = take_unseen(v, e);
    }
    if (rc == 0 && s->failed) { /* cancelled before it began */
        *e = s->err;
        rc = -e->errnum;
    }
    if (rc == 0)
        v->sending = s;
    return rc;
}

/* With the lock held. */
static int start_thread(struct larder_save *s, struct err *e)
{
    struct saver *v = s->saver;
    int rc = snapshot_close(&s->snapshot, e);
    if (rc == 0 && !s->stored && !(s->stored = calloc(s->snapshot.chunk_count + 1u, 1)))
        rc = err_set(e, ERR_NO_MEMORY, "no memory for a save");
    if (rc == 0) {
        v->expected = snapshot_size(&s->snapshot);
        rc = saver_start_workers(v, e);
    }
    if (rc == 0) {
        s->submitted = s->copying = true;
        s->slots = pool_slots(s->client->staging) - v->lent;
        s->references++;
        list_add_tail(&v->active, &s->link);
        rc = pthread_create(&s->thread, NULL, save_run, s);
        if (rc != 0) {
            list_del(&s->link);
            s->references--;
            s->submitted = s->copying = false;
            rc = err_sys(e, rc, "starting the thread of a save");
        }
    }
    if (rc < 0) {
        v->sending = NULL;
        pthread_cond_broadcast(&v->changed);
    }
    return rc;
}

static int submit(struct larder_save *s, struct err *e)
{
    struct saver *v = s->saver;
    uint64_t start = clock_ns();
    int rc = snapshot_end(&s->snapshot, e);
    if (rc < 0)
        return rc;
    pthread_mutex_lock(&v->lock);
    saver_reap(v);
    rc = take_turn(s, e);
    if (rc == 0) {
        s->submitted_ns = start;
        rc = start_thread(s, e);
    }
    pthread_mutex_unlock(&v->lock);
    if (rc < 0)
        return rc;
    rc = stage_begin(s, e);
    if (rc == 0)
        stage_copy(s);
    pthread_mutex_lock(&v->lock);
    if (rc < 0)
        save_fail(s, e);
    s->copying = false;
    s->returned_ns = clock_ns();
    saver_go(v, s);
    stage_check(s);
    if (s->failed && !s->staged_ns) { /* the memory was not copied */
        s->seen = true;
        *e = s->err;
        rc = -e->errnum;
    }
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
    return rc;
}

int larder_save_submit(struct larder_save *s, struct larder_error *error)
{
    struct err e;
    int rc = enter_open(s, &e);
    int loader = rc == 0 && s->loader_asked ? client_feed_state(s->client, s->loader, &e) : 0;
    if (loader < 0)
        rc = loader;
    else if (loader > 0)
        s->loader_bytes = (size_t)loader;
    if (rc == 0)
        rc = submit(s, &e);
    return client_leave(rc, &e, error);
}

/* ---- asking ---- */

/* With the lock held: who is told of a failure has seen it. */
static void mark_seen(struct larder_save *s)
{
    if (s->state != LARDER_SAVE_FAILED || s->seen)
        return;
    s->seen = true;
    if (s->saver->unseen_of == s)
        err_clear(&s->saver->unseen);
}

static double seconds(uint64_t from_ns, uint64_t to_ns)
{
    return from_ns && to_ns > from_ns ? (double)(to_ns - from_ns) / 1e9 : 0;
}

int larder_save_info(struct larder_save *s, struct larder_save_info *out)
{
    struct err e;
    int rc = enter_save(s, &e);
    if (rc < 0)
        return rc;
    struct larder_save_info i = {.size = out->size};
    struct saver *v = s->saver;
    pthread_mutex_lock(&v->lock);
    if (s->writer)
        part_writer_progress(s->writer, &s->plain_bytes, &s->stored_bytes, &s->sent_bytes, &s->chunks_sent);
    i.state = s->state;
    if (s->state == LARDER_SAVE_FAILED)
        client_leave(-s->err.errnum, &s->err, &i.error);
    mark_seen(s);
    i.sequence = s->sequence;
    i.plain_bytes = s->plain_bytes;
    i.stored_bytes = s->stored_bytes;
    i.sent_bytes = s->sent_bytes;
    i.stall_seconds = seconds(s->submitted_ns, s->returned_ns);
    i.staged_seconds = seconds(s->submitted_ns, s->staged_ns);
    i.durable_seconds = seconds(s->submitted_ns, s->durable_ns);
    i.chunks = s->snapshot.chunk_count;
    i.chunks_sent = s->chunks_sent;
    size_t slots = s->slots ? s->slots : pool_slots(s->client->staging);
    i.waves = (uint32_t)((s->snapshot.chunk_count + slots - 1) / slots);
    stage_path(s, i.path, sizeof i.path);
    size_t told = strlen(i.path);
    snprintf(i.path + told, sizeof i.path - told, "%s; staging %s",
             conn_path(v->conn ? v->conn : s->client->conn), pool_note(s->client->staging));
    pthread_mutex_unlock(&v->lock);
    memcpy(out, &i, out->size < sizeof i ? out->size : sizeof i);
    return 0;
}

static bool decided(const struct larder_save *s)
{
    return s->state == LARDER_SAVE_DURABLE || s->state == LARDER_SAVE_FAILED;
}

int larder_save_wait(struct larder_save *s, int timeout_ms, struct larder_error *error)
{
    struct err e;
    int rc = enter_save(s, &e);
    if (rc < 0)
        return client_leave(rc, &e, error);
    struct saver *v = s->saver;
    uint32_t bound = client_timeout(s->client, timeout_ms);
    uint64_t until = clock_ms() + bound;
    pthread_mutex_lock(&v->lock);
    if (!s->submitted && !decided(s))
        rc = err_set(&e, ERR_INVALID, "the save was not submitted: there is nothing to wait for");
    while (rc == 0 && !decided(s) && clock_wait(&v->changed, &v->lock, until))
        ;
    if (rc == 0 && !decided(s)) {
        rc = err_set(&e, ERR_TIMEOUT, "step %llu of %s was not durable after %u ms; it goes on (%s)",
                     (unsigned long long)s->step, s->run, bound,
                     s->sealed ? "waiting for the other ranks" : "sending");
    } else if (rc == 0 && s->state == LARDER_SAVE_FAILED) {
        e = s->err;
        rc = -e.errnum;
        mark_seen(s);
    }
    pthread_mutex_unlock(&v->lock);
    return client_leave(rc, &e, error);
}

int larder_save_fence(struct larder_save *s, int timeout_ms, struct larder_error *error)
{
    struct err e;
    int rc = enter_save(s, &e);
    if (rc < 0)
        return client_leave(rc, &e, error);
    struct saver *v = s->saver;
    uint32_t bound = client_timeout(s->client, timeout_ms);
    uint64_t until = clock_ms() + bound;
    pthread_mutex_lock(&v->lock);
    if (!s->submitted && !decided(s))
        rc = err_set(&e, ERR_INVALID, "the save was not submitted: there is nothing to wait for");
    while (rc == 0 && !s->staged_ns && !decided(s) && clock_wait(&v->changed, &v->lock, until))
        ;
    if (rc == 0 && !s->staged_ns && !decided(s)) {
        rc = err_set(&e, ERR_TIMEOUT, "step %llu of %s was not staged after %u ms; it goes on",
                     (unsigned long long)s->step, s->run, bound);
    } else if (rc == 0 && !s->staged_ns) {
        e = s->err;
        rc = -e.errnum;
        mark_seen(s);
    }
    pthread_mutex_unlock(&v->lock);
    return client_leave(rc, &e, error);
}

/* ---- giving up ---- */

static int cancel(struct larder_save *s, const char *reason, struct err *e)
{
    struct saver *v = s->saver;
    struct err why;
    err_set(&why, ERR_CANCELLED, "cancelled: %s", reason && *reason ? reason : "no reason given");
    pthread_mutex_lock(&v->lock);
    bool was_decided = decided(s), sealed = s->sealed, submitted = s->submitted;
    if (!was_decided) {
        s->cancelled = s->seen = true;
        save_fail(s, &why);
        if (!s->submitted)
            s->state = LARDER_SAVE_FAILED;
    }
    pthread_mutex_unlock(&v->lock);
    if (!was_decided && (sealed || (!submitted && s->world > 1))) { /* else the save's thread does it */
        struct err ignored;                                         /* the outcome below tells */
        (void)save_give_up(s, why.text, &ignored);
    }
    uint64_t until = clock_ms() + s->client->options.request_timeout_ms;
    pthread_mutex_lock(&v->lock);
    while (!decided(s) && clock_wait(&v->changed, &v->lock, until))
        ;
    int rc = 0;
    if (s->state == LARDER_SAVE_DURABLE)
        rc = err_set(e, ERR_EXISTS,
                     "step %llu of %s is durable as sequence %llu; it cannot be cancelled any more",
                     (unsigned long long)s->step, s->run, (unsigned long long)s->sequence);
    else if (!decided(s))
        rc = err_set(e, ERR_TIMEOUT, "step %llu of %s did not end within %u ms", (unsigned long long)s->step,
                     s->run, s->client->options.request_timeout_ms);
    pthread_mutex_unlock(&v->lock);
    return rc;
}

int larder_save_cancel(struct larder_save *s, const char *reason, struct larder_error *error)
{
    struct err e;
    int rc = enter_save(s, &e);
    if (rc == 0)
        rc = cancel(s, reason, &e);
    return client_leave(rc, &e, error);
}

void larder_save_free(struct larder_save *s)
{
    struct err e;
    if (!s || enter_save(s, &e) < 0)
        return;
    struct saver *v = s->saver;
    pthread_mutex_lock(&v->lock);
    save_release(s);
    saver_reap(v);
    pthread_mutex_unlock(&v->lock);
}
