/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The reading of a restore: plan, fetch, place. What is damaged is read from another rank's copy where one
 * holds the same elements; what is left then is reported.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "client/landing.h"
#include "client/restore.h"
#include "format/base/log.h"

struct bad_use { /* of a damaged chunk, by a piece of a copy's request: the nth of a run */
    uint32_t rank, chunk, copy, nth;
    const char *text; /* in `texts` */
};

struct running {
    struct larder_restore *restore;
    struct plan plan;
    struct landing *landing; /* NULL: nothing goes to a device */
    pthread_mutex_t lock;    /* of what follows */
    struct bad_use *bad;
    size_t bad_count, bad_cap;
    struct names texts;
    struct err first;
};

static int place_good(void *arg, size_t item, uint8_t *plain, uint32_t n, bool there, struct err *e)
{
    struct running *g = arg;
    if (there)
        return 0;
    return plan_place(&g->plan, item, plain, n, g->landing, e);
}

static uint8_t *straight(void *arg, size_t item, uint32_t n)
{
    struct running *g = arg;
    return plan_straight(&g->plan, item, n);
}

static int room(void *arg, uint8_t **plain, struct err *e)
{
    struct running *g = arg;
    return landing_room(g->landing, plain, e);
}

static void placed(void *arg, uint8_t *plain)
{
    struct running *g = arg;
    landing_sent(g->landing, plain);
}

static int add_bad(struct running *g, const struct use *u, uint32_t nth, const char *text)
{
    if (g->bad_count == g->bad_cap) {
        size_t cap = g->bad_cap ? 2 * g->bad_cap : 16;
        struct bad_use *more = reallocarray(g->bad, cap, sizeof *more);
        if (!more)
            return -ENOMEM;
        g->bad = more;
        g->bad_cap = cap;
    }
    g->bad[g->bad_count++] = (struct bad_use){
        .rank = plan_rank(&g->plan, u), .chunk = u->chunk, .copy = u->copy, .nth = nth, .text = text};
    return 0;
}

static int add_damage(struct larder_restore *r, uint32_t piece, const struct bad_use *b)
{
    if (r->damage_count == r->damage_cap) {
        size_t cap = r->damage_cap ? 2 * r->damage_cap : 16;
        struct damage *more = reallocarray(r->damage, cap, sizeof *more);
        if (!more)
            return -ENOMEM;
        r->damage = more;
        r->damage_cap = cap;
    }
    char *copy = strdup(b->text);
    const char *tensor = catalog_string(&r->catalog, piece);
    if (!copy || !tensor) {
        free(copy);
        return -ENOMEM;
    }
    r->damage[r->damage_count++] =
        (struct damage){.tensor = tensor, .rank = b->rank, .chunk = b->chunk, .text = copy};
    return 0;
}

/* Everything that wanted some of the chunk. */
static int note_damage(void *arg, size_t item, const struct err *why)
{
    struct running *g = arg;
    const struct plan *p = &g->plan;
    log_warn("%s", why->text);
    pthread_mutex_lock(&g->lock);
    size_t n = strlen(why->text) + 1;
    char *text = names_alloc(&g->texts, n);
    int rc = text ? 0 : -ENOMEM;
    if (text)
        memcpy(text, why->text, n);
    if (g->first.class == ERR_NONE)
        g->first = *why;
    for (size_t i = p->first_use[item]; rc == 0 && i < p->first_use[item + 1]; i++) {
        const struct request *q = &p->requests[p->copies[p->uses[i].copy].request];
        for (uint32_t nth = 0; rc == 0 && nth < q->count; nth++)
            rc = add_bad(g, &p->uses[i], nth, text);
    }
    pthread_mutex_unlock(&g->lock);
    return rc;
}

/* ---- connections ---- */

static void *dial(void *arg)
{
    struct dial *d = arg;
    if (client_connect(d->client, CONN_LANE_OPEN, &d->conn, &d->err) < 0)
        d->conn = NULL;
    return NULL;
}

/* What could not be started is tried by restore_dialled. */
void restore_dial(struct larder_restore *r)
{
    struct dialling *d = &r->dialling;
    while (r->conn_count + d->count < r->conns_wanted) {
        d->dials[d->count] = (struct dial){.client = r->client};
        if (pthread_create(&d->threads[d->count], NULL, dial, &d->dials[d->count]) != 0)
            return;
        d->count++;
    }
}

void restore_dial_end(struct larder_restore *r, struct err *why)
{
    struct dialling *d = &r->dialling;
    err_clear(why);
    for (unsigned i = 0; i < d->count; i++) {
        pthread_join(d->threads[i], NULL);
        if (d->dials[i].conn)
            r->conns[r->conn_count++] = d->dials[i].conn;
        else if (why->class == ERR_NONE)
            *why = d->dials[i].err;
    }
    d->count = 0;
}

int restore_dialled(struct larder_restore *r, struct err *e)
{
    struct err first;
    restore_dial_end(r, &first);
    if (r->conn_count > 0)
        return 0;
    if (first.class != ERR_NONE) {
        *e = first;
        return -first.errnum;
    }
    int rc = client_connect(r->client, CONN_LANE_OPEN, &r->conns[0], e);
    r->conn_count += rc == 0;
    return rc;
}

static int fetch_plan(struct running *g, struct err *e)
{
    struct larder_restore *r = g->restore;
    if (g->plan.item_count == 0)
        return 0;
    struct fetch_job job = {
        .client = r->client,
        .conns = r->conns,
        .conn_count = r->conn_count,
        .memory_bytes = r->memory_bytes,
        .threads = client_options(r->client)->threads,
        .items = g->plan.items,
        .count = g->plan.item_count,
        .straight = straight,
        .room = g->landing ? room : NULL,
        .good = place_good,
        .done = placed,
        .damaged = note_damage,
        .arg = g,
        .fetched_bytes = &r->fetched_bytes,
    };
    return fetch_run(&job, e);
}

/* ---- other ranks' copies ---- */

static bool holds(const struct catalog *c, uint32_t piece, uint32_t rank, uint32_t chunk)
{
    struct tensor room;
    const struct tensor *t = catalog_tensor(c, piece, &room);
    uint64_t chunks = t->bytes > CHUNK_PLAIN_BYTES_MAX / 4 ? (t->bytes - 1) / CHUNK_PLAIN_BYTES_MAX + 1 : 1;
    return catalog_rank(c, piece) == rank && chunk >= t->first_chunk && chunk - t->first_chunk < chunks;
}

/* A piece without damaged chunks. */
static bool is_whole(void *arg, uint32_t piece)
{
    const struct running *before = arg;
    for (size_t i = 0; i < before->bad_count; i++)
        if (holds(&before->restore->catalog, piece, before->bad[i].rank, before->bad[i].chunk))
            return false;
    return true;
}

struct second { /* what is asked for again */
    struct request *requests;
    uint64_t (*boxes)[3 * TENSOR_DIMS_MAX];
    size_t *of; /* entry of g->bad that each request repairs */
    size_t count;
};

static int by_copy(const void *pa, const void *pb)
{
    const struct bad_use *a = pa, *b = pb;
    if (a->copy != b->copy)
        return a->copy < b->copy ? -1 : 1;
    return a->nth < b->nth ? -1 : a->nth > b->nth;
}

/* Those of the damaged copies that whole pieces of other ranks cover; each copy once, a run's pieces apart.
 */
static int choose_second(struct running *g, struct second *s, struct err *e)
{
    struct larder_restore *r = g->restore;
    s->requests = calloc(g->bad_count, sizeof *s->requests);
    s->boxes = calloc(g->bad_count, sizeof *s->boxes);
    s->of = calloc(g->bad_count, sizeof *s->of);
    if (!s->requests || !s->boxes || !s->of)
        return err_set(e, ERR_NO_MEMORY, "no memory for reading damaged tensors from other ranks");
    qsort(g->bad, g->bad_count, sizeof *g->bad, by_copy);
    for (size_t i = 0; i < g->bad_count; i++) {
        struct plan probe;
        struct err ignored;
        const struct bad_use *b = &g->bad[i];
        if (i > 0 && by_copy(b, b - 1) == 0)
            continue;
        plan_copy_request(&g->plan, &g->plan.copies[b->copy], b->nth, s->boxes[s->count],
                          &s->requests[s->count]);
        if (plan_create(&r->catalog, &s->requests[s->count], 1, is_whole, g, &probe, &ignored) < 0)
            continue;
        plan_free(&probe);
        s->of[s->count++] = i;
    }
    return 0;
}

/* Of the copies that were read again, those that came whole are no damage any more: they leave g->bad. */
static void forget_repaired(struct running *g, const struct running *again, const struct second *s)
{
    for (size_t i = 0; i < s->count; i++) {
        const struct bad_use b = g->bad[s->of[i]];
        bool good = true;
        for (size_t k = 0; good && k < again->bad_count; k++)
            good = again->plan.copies[again->bad[k].copy].request != i;
        g->restore->repaired += good;
        for (size_t k = s->of[i]; good && k < g->bad_count && by_copy(&g->bad[k], &b) == 0; k++)
            g->bad[k].rank = UINT32_MAX;
    }
    size_t left = 0;
    for (size_t i = 0; i < g->bad_count; i++)
        if (g->bad[i].rank != UINT32_MAX)
            g->bad[left++] = g->bad[i];
    g->bad_count = left;
}

static void running_free(struct running *g)
{
    plan_free(&g->plan);
    free(g->bad);
    names_free(&g->texts);
    pthread_mutex_destroy(&g->lock);
}

static int read_copies(struct running *g, struct err *e)
{
    struct larder_restore *r = g->restore;
    struct second s = {0};
    struct running again = {.restore = r, .landing = g->landing, .lock = PTHREAD_MUTEX_INITIALIZER};
    int rc = choose_second(g, &s, e);
    if (rc == 0 && s.count > 0) {
        rc = plan_create(&r->catalog, s.requests, s.count, is_whole, g, &again.plan, e);
        if (rc == 0)
            rc = fetch_plan(&again, e);
        if (rc == 0)
            forget_repaired(g, &again, &s);
    }
    running_free(&again);
    free(s.requests);
    free(s.boxes);
    free(s.of);
    return rc;
}

/* ---- the whole ---- */

static int report(struct running *g, struct err *e)
{
    struct larder_restore *r = g->restore;
    for (size_t i = 0; i < g->bad_count; i++) {
        const struct request *q = &g->plan.requests[g->plan.copies[g->bad[i].copy].request];
        if (add_damage(r, q->piece + g->bad[i].nth, &g->bad[i]) < 0)
            return err_set(e, ERR_NO_MEMORY, "no memory for the list of damaged tensors");
    }
    if (r->damage_count == 0)
        return 0;
    char name[160];
    const char *tensor = err_quote(name, sizeof name, r->damage[0].tensor, strlen(r->damage[0].tensor));
    *e = g->first;
    if (r->damage_count == 1)
        return err_prepend(e, "tensor \"%s\" is damaged", tensor);
    return err_prepend(e, "tensor \"%s\" and %zu more places are damaged", tensor, r->damage_count - 1);
}

/* Copies to devices come after what the callers gave to their streams. */
static int order(const struct larder_restore *r, struct err *e)
{
    const struct target *before = NULL;
    int rc = 0;
    for (size_t i = r->requests_done; rc == 0 && i < r->request_count; i++) {
        const struct target *q = r->requests[i].target;
        if (!q || q == before)
            continue;
        pthread_mutex_lock(&q->device->lock);
        rc = memory_stream_after_caller(q->device->in, q->stream, e);
        pthread_mutex_unlock(&q->device->lock);
        if (rc < 0)
            err_prepend(e, "a stream of device %d", memory_ordinal(q->device->memory));
        before = q;
    }
    return rc;
}

static int land(struct running *g, struct err *e)
{
    struct larder_restore *r = g->restore;
    int rc = order(r, e);
    if (rc == 0 && r->device_count > 0)
        rc = landing_create(r->client, r->devices, r->device_count, client_options(r->client)->threads,
                            &g->landing, e);
    return rc;
}

static int plan(struct running *g, struct err *e)
{
    struct larder_restore *r = g->restore;
    size_t count = r->request_count - r->requests_done;
    if (count > 0)
        restore_dial(r);
    int rc = plan_create(&r->catalog, r->requests + r->requests_done, count, NULL, NULL, &g->plan, e);
    return rc == 0 && g->plan.item_count > 0 ? restore_dialled(r, e) : rc;
}

int restore_run(struct larder_restore *r, struct err *e)
{
    struct running g = {.restore = r, .lock = PTHREAD_MUTEX_INITIALIZER};
    restore_clear_damage(r);
    r->tail.memory = NULL; /* what is read once is not added to */
    int rc = plan(&g, e);
    if (rc == 0)
        rc = land(&g, e);
    if (rc == 0)
        rc = fetch_plan(&g, e);
    if (rc == 0 && g.bad_count > 0)
        rc = read_copies(&g, e);
    struct err ignored; /* where something failed before */
    int landed = g.landing ? landing_wait(g.landing, client_options(r->client)->request_timeout_ms,
                                          rc < 0 ? &ignored : e)
                           : 0;
    rc = rc < 0 ? rc : landed;
    landing_free(g.landing);
    if (rc == 0) {
        r->requests_done = r->request_count;
        rc = report(&g, e);
    }
    running_free(&g);
    return rc;
}
