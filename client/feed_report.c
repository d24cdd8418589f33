/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tells the server every few seconds what the feed is at, so that an operator sees which rank waits for what
 * (larder status). Best effort, and never waited for: one report at a time is on its way, on the client's
 * control connection; the last one says that the feed has ended.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "client/clock.h"
#include "client/feed_private.h"
#include "client/secrets.h"
#include "format/base/utf8.h"

#define REPORT_TIMEOUT_MS 10000u

/* What the feed and its report on the way share: the feed may go first. */
struct feed_reports {
    atomic_int references;
    atomic_bool under_way;
};

struct report {
    struct call call;
    struct feed_reports *shared;
};

static void unref(struct feed_reports *r)
{
    if (atomic_fetch_sub(&r->references, 1) == 1)
        free(r);
}

/* The first bytes of a text that make up at most n of valid UTF-8. */
static struct slice cut(const char *text, size_t n)
{
    size_t bytes = strlen(text);
    while (bytes > n || !utf8_valid(text, bytes))
        bytes--;
    return SLICE(text, bytes);
}

/* "a, b, c" */
static char *join_names(const struct larder_feed *f)
{
    struct buf b = {0};
    for (uint32_t i = 0; i < f->source_count; i++) {
        const char *name = f->sources[i].dataset->name;
        buf_put(&b, ", ", i ? 2 : 0);
        buf_put(&b, name, strlen(name));
    }
    buf_u8(&b, 0);
    if (b.failed)
        buf_free(&b);
    return (char *)b.p;
}

int feed_report_begin(struct larder_feed *f, const char *run, struct err *e)
{
    struct conn_hello hello;
    conn_hello(client_conn(f->client), &hello);
    f->opened_ms = clock_ms();
    f->report_due_ms = hello.features & 1ull << FEATURE_FEED_REPORTS ? 0 : UINT64_MAX;
    secrets_random(&f->report_id, sizeof f->report_id);
    f->run = strdup(run ? run : "");
    f->names = join_names(f);
    f->reports = calloc(1, sizeof *f->reports);
    if (f->reports)
        atomic_store(&f->reports->references, 1);
    return f->run && f->names && f->reports ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for a feed");
}

static uint64_t milliseconds(double seconds)
{
    return (uint64_t)(seconds * 1e3);
}

static void encode(struct larder_feed *f, bool ended, struct buf *out)
{
    struct larder_feed_info i = {0};
    pthread_mutex_lock(&f->lock);
    feed_figures(f, &i);
    pthread_mutex_unlock(&f->lock);
    feed_path(f, i.path, sizeof i.path);
    struct msg_feed_report m = {.feed = f->report_id,
                                .ended = ended,
                                .dataset = cut(f->names, NAME_BYTES_MAX),
                                .run = cut(f->run, NAME_BYTES_MAX),
                                .rank = f->plan.rank,
                                .world = f->plan.world,
                                .epoch = i.epoch,
                                .position = i.position,
                                .samples = i.samples_out,
                                .bytes = i.bytes_out,
                                .damaged = i.skipped + i.substituted,
                                .batches_ready = i.batches_ready,
                                .ready_bytes = i.bytes_ready,
                                .in_flight_bytes = i.bytes_in_flight,
                                .age_ms = clock_ms() - f->opened_ms,
                                .network_ms = milliseconds(i.starved_seconds.network),
                                .disk_ms = milliseconds(i.starved_seconds.disk),
                                .decode_ms = milliseconds(i.starved_seconds.decode),
                                .full_ms = milliseconds(i.starved_seconds.consumer),
                                .path = cut(i.path, sizeof i.path - 1)};
    msg_feed_report_encode(&m, out);
}

/* On the connection's thread; a server that refuses reports is none that a feed should fail for. */
static void on_done(struct call *call)
{
    struct report *r = container_of(call, struct report, call);
    atomic_store(&r->shared->under_way, false);
    call_free(call);
    unref(r->shared);
    free(r);
}

void feed_report(struct larder_feed *f, bool ended)
{
    struct feed_reports *shared = f->reports;
    if (atomic_exchange(&shared->under_way, true) && !ended)
        return;
    struct buf b = {0};
    encode(f, ended, &b);
    struct report *r = b.failed ? NULL : calloc(1, sizeof *r);
    if (!r) {
        atomic_store(&shared->under_way, false);
        buf_free(&b);
        return;
    }
    atomic_fetch_add(&shared->references, 1);
    r->shared = shared;
    r->call = (struct call){.opcode = OP_FEED_REPORT, .timeout_ms = REPORT_TIMEOUT_MS, .done = on_done};
    conn_submit(client_conn(f->client), &r->call, SLICE(b.p, b.n), SLICE(NULL, 0));
    buf_free(&b);
}

void feed_report_end(struct larder_feed *f)
{
    if (f->reports) {
        if (f->report_due_ms > 0 && f->report_due_ms < UINT64_MAX) /* one was sent */
            feed_report(f, true);
        unref(f->reports);
    }
    free(f->run);
    free(f->names);
    f->reports = NULL;
    f->run = f->names = NULL;
}
