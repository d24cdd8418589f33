/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Feeds of a published folder of fixed records: into host memory, into device memory, and into device memory
 * from files of this machine. Utilisation: of a consumer that computes on each batch for twice the time that
 * a feed to host memory takes to bring one, the share of its time that it computes.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/gpu/gpu.h"
#include "tools/bench.h"

#define SHARDS      8u
#define PER_SHARD   64u
#define BATCH       16u
#define SPIN_BLOCKS 512u

struct feeding {
    struct bench *b;
    struct larder *c;
    char folder[4200];
    uint64_t record; /* bytes */
    uint8_t *expected, *found;
};

enum way { TO_HOST, TO_DEVICE, TO_DEVICE_LOCAL };

static uint64_t seed_of(uint32_t shard, uint64_t number)
{
    return (uint64_t)shard << 40 | number << 20;
}

static bool write_shards(struct feeding *f)
{
    bool good = mkdir(f->folder, 0700) == 0;
    for (uint32_t s = 0; s < SHARDS && good; s++) {
        char path[4300];
        snprintf(path, sizeof path, "%s/%02u", f->folder, s);
        FILE *out = fopen(path, "wbe");
        good = out != NULL;
        for (uint64_t i = 0; i < PER_SHARD && good; i++) {
            fill(f->expected, f->record, seed_of(s, i));
            good = fwrite(f->expected, f->record, 1, out) == 1;
        }
        good = out && fclose(out) == 0 && good;
    }
    return good;
}

static int open_feed(const struct feeding *f, enum way way, struct larder_feed **out, struct larder_error *e)
{
    struct larder_feed_options o = LARDER_INIT(larder_feed_options);
    o.dataset = "gpu";
    o.seed = 3;
    o.global_batch = BATCH;
    o.depth_bytes = 8 * BATCH * f->record;
    o.memory = way == TO_HOST ? LARDER_MEMORY_HOST : LARDER_MEMORY_CUDA;
    o.device = memory_ordinal(f->b->m);
    o.local_dir = way == TO_DEVICE_LOCAL ? f->folder : NULL;
    return larder_feed_open(f->c, &o, out, e);
}

/* Every byte of every sample. */
static bool right(struct feeding *f, const struct larder_batch *batch, enum way way)
{
    bool same = true;
    for (size_t i = 0; i < larder_batch_samples(batch); i++) {
        struct larder_sample s;
        if (larder_batch_sample(batch, i, &s) < 0 || s.fields != 1 || s.field->bytes != f->record)
            return false;
        fill(f->expected, f->record, seed_of(s.shard, s.number));
        const void *found = s.field->data;
        if (way != TO_HOST) {
            download(f->b, f->found, s.field->data, f->record);
            found = f->found;
        }
        same = same && memcmp(found, f->expected, f->record) == 0;
    }
    return same;
}

/* Takes all batches; computes so long on each; looks at the bytes if asked to. */
static int take_all(struct feeding *f, enum way way, uint64_t step_ns, bool *same, double *seconds,
                    char path[256], struct larder_error *e)
{
    struct larder_feed *feed = NULL;
    struct larder_feed_info info = LARDER_INIT(larder_feed_info);
    struct larder_batch *batch;
    struct err own;
    int rc = open_feed(f, way, &feed, e), got = 0;
    double start = now_s();
    while (rc == 0 && (got = larder_feed_next(feed, (int)WAIT_MS, &batch, e)) == 1) {
        if (way != TO_HOST)
            rc = larder_batch_wait(batch, memory_stream_handle(f->b->s), e);
        if (rc == 0 && step_ns && f->b->k) {
            must(kernels_spin(f->b->k, f->b->s, SPIN_BLOCKS, step_ns, &own), &own, "computing");
            must(memory_stream_wait(f->b->s, WAIT_MS, &own), &own, "computing");
        }
        if (rc == 0 && same)
            *same = right(f, batch, way) && *same;
        if (rc == 0 && way != TO_HOST)
            rc = larder_batch_release_stream(batch, memory_stream_handle(f->b->s), e);
        else
            larder_batch_release(batch);
    }
    *seconds = now_s() - start;
    if (feed && larder_feed_info(feed, &info) == 0)
        snprintf(path, 256, "%s", info.path);
    larder_feed_close(feed);
    return rc < 0 ? rc : got;
}

static void measure_way(struct feeding *f, enum way way, const char *name, double *host_s)
{
    uint64_t bytes = SHARDS * PER_SHARD * f->record, batches = SHARDS * PER_SHARD / BATCH;
    struct larder_error e = {0};
    char path[256] = "", note[400], what[96];
    bool same = true;
    double checked_s, alone_s, step_s = 0;
    int rc = take_all(f, way, 0, &same, &checked_s, path, &e);
    if (rc == 0)
        rc = take_all(f, way, 0, NULL, &alone_s, path, &e);
    uint64_t step_ns = (uint64_t)(2e9 * (*host_s > 0 ? *host_s : alone_s) / (double)batches);
    if (rc == 0 && way != TO_HOST && f->b->k)
        rc = take_all(f, way, step_ns, NULL, &step_s, path, &e);
    if (rc < 0) {
        row_failed(f->b, name, e.text);
        return;
    }
    if (way == TO_HOST)
        *host_s = alone_s;
    snprintf(note, sizeof note, "%.2f of that to host memory; %s", *host_s / alone_s, path);
    row(f->b, name, same, way == TO_HOST ? path : note, "%.2f GB/s", gbps(bytes, alone_s));
    snprintf(what, sizeof what, "%s, utilisation", name);
    snprintf(note, sizeof note, "computing %.2f ms on each batch of %.1f MB", (double)step_ns / 1e6,
             (double)(BATCH * f->record) / 1e6);
    if (step_s > 0)
        row(f->b, what, same, note, "%.1f %%", 100 * (double)step_ns * 1e-9 * (double)batches / step_s);
}

static void run(struct feeding *f)
{
    double host_s = 0;
    measure_way(f, TO_HOST, "feed to host memory", &host_s);
    measure_way(f, TO_DEVICE, "feed to device memory", &host_s);
    measure_way(f, TO_DEVICE_LOCAL, "feed to device memory, local files", &host_s);
}

void measure_feeds(struct bench *b)
{
    struct feeding f = {.b = b, .record = b->bytes / (SHARDS * PER_SHARD) / 8 * 8};
    struct larder_options o = LARDER_INIT(larder_options);
    struct larder_error e = {0};
    struct dev_server server;
    char full[4096];
    f.expected = host_alloc(f.record);
    f.found = host_alloc(f.record);
    if (!realpath(b->folder, full))
        snprintf(full, sizeof full, ".");
    snprintf(f.folder, sizeof f.folder, "%s/gpu-feed-%ld", full, (long)getpid());
    struct dev_publish publish = {"gpu", f.folder, "records", f.record};
    if (!write_shards(&f) || dev_start(b->folder, &publish, &server) != 0) {
        row_failed(b, "feeds", "no shards in the folder, or larderd --dev did not start");
    } else {
        o.credentials = server.credentials;
        o.staging_bytes = 4u << 20;
        if (larder_open(&o, &f.c, &e) < 0)
            row_failed(b, "feeds", e.text);
        else
            run(&f);
        if (f.c && larder_close(f.c, (int)WAIT_MS, &e) < 0)
            row_failed(b, "closing the client", e.text);
        dev_stop(&server);
    }
    remove_tree(f.folder);
    free(f.expected);
    free(f.found);
}
