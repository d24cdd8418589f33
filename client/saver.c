/* SPDX-License-Identifier: Apache-2.0 */
#include "client/saver.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "client/clock.h"

#define GIVE_UP_MS \
    3500u /* for telling the other ranks of saves that are given up when the client is closed */

/* ---- workers ---- */

void saver_queue(struct saver *v, struct larder_save *s, uint32_t chunk, uint8_t *slot)
{
    check(v->queue_count < v->queue_cap);
    v->queue[(v->queue_at + v->queue_count++) % v->queue_cap] =
        (struct filled){.save = s, .chunk = chunk, .slot = slot};
    s->queued++;
    if (s->going)
        pthread_cond_broadcast(&v->changed);
}

void saver_go(struct saver *v, struct larder_save *s)
{
    if (s->going)
        return;
    s->going = true;
    pthread_cond_broadcast(&v->changed);
}

/* With the lock held: the next slot, when the save's part has been begun or has failed. False: stopping. */
static bool next_filled(struct saver *v, struct filled *out)
{
    for (;;) {
        if (v->queue_count > 0) {
            *out = v->queue[v->queue_at];
            if (out->save->failed || (out->save->going && out->save->writer)) {
                v->queue_at = (v->queue_at + 1) % v->queue_cap;
                v->queue_count--;
                return true;
            }
        } else if (v->stopping) {
            return false;
        }
        pthread_cond_wait(&v->changed, &v->lock);
    }
}

void saver_give(void *arg, uint8_t *slot)
{
    struct saver *v = arg;
    pool_give(v->client->staging, slot);
    pthread_mutex_lock(&v->lock);
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
}

static void work(struct saver *v, struct part_scratch *scratch, const struct filled *f,
                 struct part_writer *writer)
{
    struct larder_save *s = f->save;
    const struct planned_chunk *c = &s->snapshot.chunks[f->chunk];
    struct err e;
    int rc = 0;
    if (writer) {
        snapshot_hash(&s->snapshot, f->chunk, f->slot);
        rc = part_writer_chunk(writer, scratch, f->chunk, (enum dtype)c->dtype, f->slot, c->bytes, &e);
    } else {
        pool_give(v->client->staging, f->slot);
    }
    pthread_mutex_lock(&v->lock);
    if (rc < 0)
        save_fail(s, &e);
    s->handled++;
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
}

static void *worker(void *arg)
{
    struct saver *v = arg;
    struct filled f;
    struct part_scratch *scratch = part_scratch_create();
    pthread_setname_np(pthread_self(), "larder-save");
    (void)setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), v->client->options.nice); /* training wins */
    pthread_mutex_lock(&v->lock);
    while (next_filled(v, &f)) {
        struct part_writer *writer = f.save->failed ? NULL : f.save->writer;
        if (writer && !scratch && !(scratch = part_scratch_create())) { /* not at its start, and not now */
            struct err e;
            err_set(&e, ERR_NO_MEMORY, "no memory for compressing and sealing");
            save_fail(f.save, &e);
            writer = NULL;
        }
        pthread_mutex_unlock(&v->lock);
        work(v, scratch, &f, writer);
        pthread_mutex_lock(&v->lock);
    }
    pthread_mutex_unlock(&v->lock);
    part_scratch_free(scratch);
    return NULL;
}

int saver_start_workers(struct saver *v, struct err *e)
{
    if (v->worker_count > 0)
        return 0;
    unsigned wanted = v->client->options.threads;
    v->queue_cap = pool_slots(v->client->staging);
    v->queue = v->queue ? v->queue : calloc(v->queue_cap, sizeof *v->queue);
    v->workers = v->workers ? v->workers : calloc(wanted, sizeof *v->workers);
    if (!v->queue || !v->workers)
        return err_set(e, ERR_NO_MEMORY, "no memory for the threads that compress and seal");
    while (v->worker_count < wanted) {
        int rc = pthread_create(&v->workers[v->worker_count], NULL, worker, v);
        if (rc != 0 && v->worker_count == 0)
            return err_sys(e, rc, "starting a thread that compresses and seals");
        if (rc != 0)
            break; /* fewer do it too */
        v->worker_count++;
    }
    return 0;
}

/* ---- saves ---- */

void save_fail(struct larder_save *s, const struct err *e)
{
    if (s->failed || s->state == LARDER_SAVE_DURABLE || s->state == LARDER_SAVE_FAILED)
        return;
    s->failed = true;
    s->err = *e;
    if (s->writer) {
        part_writer_stored(s->writer, s->stored);
        part_writer_fail(s->writer, e);
    }
    pthread_cond_broadcast(&s->saver->changed);
}

void save_release(struct larder_save *s)
{
    struct saver *v = s->saver;
    if (--s->references > 0)
        return;
    pthread_mutex_unlock(&v->lock); /* nobody else has it */
    snapshot_free(&s->snapshot);
    free(s->stored);
    buf_free(&s->labels);
    free(s);
    pthread_mutex_lock(&v->lock);
}

void saver_reap(struct saver *v)
{
    struct list *it;
    while ((it = list_pop(&v->finished)) != NULL) {
        struct larder_save *s = container_of(it, struct larder_save, link);
        pthread_t thread = s->thread;
        save_release(s);
        pthread_mutex_unlock(&v->lock); /* it takes the lock once more on its way out */
        pthread_join(thread, NULL);
        pthread_mutex_lock(&v->lock);
    }
}

int saver_conn(struct saver *v, struct conn **out, struct err *e)
{
    int rc = 0;
    pthread_mutex_lock(&v->lock);
    while (v->connecting)
        pthread_cond_wait(&v->changed, &v->lock);
    bool make = !v->conn && !v->stopping;
    v->connecting = make;
    pthread_mutex_unlock(&v->lock);
    struct conn *conn = NULL;
    if (make)
        rc = client_connect(v->client, CONN_LANE_OPEN, &conn, e);
    pthread_mutex_lock(&v->lock);
    if (make) {
        v->connecting = false;
        v->conn = conn;
        pthread_cond_broadcast(&v->changed);
    }
    *out = v->conn;
    if (rc == 0 && v->stopping)
        rc = err_set(e, ERR_CANCELLED, "the client is being closed");
    pthread_mutex_unlock(&v->lock);
    return rc;
}

/* ---- life ---- */

int saver_create(struct larder *c, struct saver **out, struct err *e)
{
    struct saver *v = calloc(1, sizeof *v);
    if (!v)
        return err_set(e, ERR_NO_MEMORY, "no memory for a client");
    v->client = c;
    pthread_mutex_init(&v->lock, NULL);
    if (clock_cond_init(&v->changed) != 0) {
        free(v);
        return err_set(e, ERR_NO_MEMORY, "no memory for a client");
    }
    list_init(&v->active);
    list_init(&v->finished);
    *out = v;
    return 0;
}

int saver_drain(struct saver *v, uint64_t until_ms, struct err *e)
{
    int rc = 0;
    pthread_mutex_lock(&v->lock);
    while (!list_empty(&v->active) && clock_wait(&v->changed, &v->lock, until_ms))
        ;
    if (!list_empty(&v->active)) {
        struct err lost;
        err_set(&lost, ERR_CANCELLED, "the client was closed before the save was durable");
        list_for_each (it, &v->active)
            save_fail(container_of(it, struct larder_save, link), &lost);
        const struct larder_save *s = container_of(v->active.next, struct larder_save, link);
        rc =
            err_set(e, ERR_TIMEOUT,
                    "the save of step %llu of %s was not durable when the client was closed and is given up: "
                    "%llu of %llu bytes of rank %u were not stored",
                    (unsigned long long)s->step, s->run, (unsigned long long)save_left(s).bytes,
                    (unsigned long long)s->snapshot.plain_bytes, s->rank);
    }
    v->stopping = true;
    if (v->conn && rc < 0)
        conn_stop(v->conn); /* whatever a save's thread waits for ends now; the other ranks are told */
    uint64_t told_ms = clock_ms() + GIVE_UP_MS;
    while (!list_empty(&v->active) && clock_wait(&v->changed, &v->lock, told_ms))
        ;
    if (!list_empty(&v->active)) {
        conn_stop(client_conn(v->client));
        v->abandon = true;
    }
    while (!list_empty(&v->active)) /* no connection and no device is left to wait for */
        pthread_cond_wait(&v->changed, &v->lock);
    saver_reap(v);
    if (rc == 0 && v->unseen.class != ERR_NONE) { /* no submit comes any more that could tell it */
        *e = v->unseen;
        rc = -e->errnum;
    }
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
    return rc;
}

void saver_destroy(struct saver *v)
{
    if (!v)
        return;
    pthread_mutex_lock(&v->lock);
    check(list_empty(&v->active));
    v->stopping = true;
    pthread_cond_broadcast(&v->changed);
    pthread_mutex_unlock(&v->lock);
    for (unsigned i = 0; i < v->worker_count; i++)
        pthread_join(v->workers[i], NULL);
    conn_close(v->conn);
    struct attempt_known *next;
    for (struct attempt_known *a = v->attempts; a; a = next) {
        next = a->next;
        free(a);
    }
    free(v->queue);
    free(v->workers);
    pthread_cond_destroy(&v->changed);
    pthread_mutex_destroy(&v->lock);
    free(v);
}
