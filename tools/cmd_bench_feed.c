/* SPDX-License-Identifier: Apache-2.0 */
/*
 * larder bench feed: emulated accelerators read a data set made on the spot. What comes is compared with a
 * bound made from the stages of bench limits measured in the same run, of what this path cannot do without:
 *
 *   sealed      min(disk, cores / CPU of (direct read of the disk, TCP with both ends, AES-256-GCM))
 *   published   cores / CPU of (read from the page cache, TLS 1.3 with both ends)
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/bench_feed.h"
#include "tools/commands.h"

#define NAME          "bench feed"
#define DATASET       "bench-feed"
#define WINDOW_SHARDS 8 /* a feed's own default */

struct feed_bench {
    struct workload workload;
    const char *folder, *accelerators_word, *scale_word;
    bool published, json, largest;
    double scale;
    uint64_t accelerators, bytes, seconds, stage_ms;
    struct feed_run run;
    struct feed_set set;
    struct dev_server own;
    char made[64], path[128]; /* made: name of the dataset that this bench makes */
    const char *dataset;      /* one that is there already; NULL: make one */
    struct dev_server beside; /* a server that runs on this machine, not ours to stop */
    double bound_gbps, device_gbps, cpu_s_per_gb;
};

/* ---- the bound ---- */

static double cpu_of(enum stage s, const struct stage_work *w, double *gbps)
{
    struct stage_figures f;
    stage_measure(s, w, &f);
    if (gbps)
        *gbps = f.gbps;
    if (f.gbps == 0)
        fail_with(STATUS_OTHER, "%s cannot be measured: %s; the bound is without it", stage_name(s),
                  f.why_not);
    return f.cpu_s_per_gb;
}

static void bound_measure(struct feed_bench *b, bool lane)
{
    struct stage_work w = {.data = "random",
                           .folder = b->folder,
                           .seconds = (double)b->stage_ms / 1000,
                           .disk_bytes = 256u << 20};
    double disk = 0, cpu;
    if (b->published) {
        cpu = cpu_of(STAGE_CACHED_READ, &w, NULL);
    } else {
        w.disk_seconds = (double)b->seconds; /* as the run goes on */
        cpu = cpu_of(STAGE_DISK_READ, &w, &disk) + cpu_of(STAGE_AES_GCM, &w, NULL);
    }
    cpu += cpu_of(lane ? STAGE_TCP : STAGE_TLS, &w, NULL);
    b->cpu_s_per_gb = cpu;
    b->device_gbps = disk > 0 ? disk : INFINITY;
    b->bound_gbps = fmin(b->device_gbps, cores_usable() / cpu);
}

/* ---- options ---- */

static int options_check(const struct command *cmd, struct feed_bench *b, const char *workload,
                         uint64_t sample_bytes, uint64_t batch, uint64_t window, bool sequential)
{
    char *end;
    if (!workload_find(workload, &b->workload))
        return fail_usage(
            cmd->name, "\"%s\" is no workload: unet3d, resnet50, cosmoflow, retinanet, llm, plain", workload);
    if ((sample_bytes || batch) && b->workload.compute_s > 0)
        return fail_usage(cmd->name, "--sample-bytes and --batch are of --workload plain");
    b->workload.sample_bytes = sample_bytes ? (double)sample_bytes : b->workload.sample_bytes;
    b->workload.batch = batch ? (uint32_t)batch : b->workload.batch;
    if (b->workload.sample_bytes < 64 || b->workload.sample_bytes > 1e9 || batch > 1u << 20)
        return fail_usage(cmd->name, "--sample-bytes is from 64 to 1e9, --batch at most 1048576");
    b->largest = strcmp(b->accelerators_word, "max") == 0;
    if (!b->largest && (!parse_number(b->accelerators_word, &b->accelerators) || b->accelerators < 1 ||
                        b->accelerators > ACCELERATORS_MAX))
        return fail_usage(cmd->name, "--accelerators is from 1 to %d, or max", ACCELERATORS_MAX);
    if (b->largest && b->workload.compute_s == 0)
        return fail_usage(cmd->name,
                          "--workload plain has no computing, so no largest number of accelerators");
    b->scale = b->scale_word ? strtod(b->scale_word, &end) : 0;
    if (b->scale_word && (*end || !(b->scale > 0 && b->scale <= 1)))
        return fail_usage(cmd->name, "--scale is above 0, at most 1");
    if (window < 1 || window >= UINT32_MAX || b->run.connections > 16)
        return fail_usage(cmd->name, "--window is from 1 to %u, --connections at most 16", UINT32_MAX - 1);
    if (b->bytes < 1 << 20 || b->seconds < 1 || b->seconds > 3600 || b->stage_ms > 600000)
        return fail_usage(cmd->name, "--bytes is at least 1M, --seconds from 1 to 3600");
    b->run.window_shards = sequential ? UINT32_MAX : (uint32_t)window;
    b->run.seconds = (double)b->seconds;
    return STATUS_OK;
}

/* ---- finding the largest number of accelerators ---- */

/* Were they kept busy, by what came and not only by what was ready? */
static bool kept_busy(const struct feed_bench *b, uint32_t n, const struct feed_figures *f)
{
    double reach = b->workload.reach;
    return f->utilisation >= reach && f->gbps >= reach * n * workload_gbps(&b->workload);
}

static uint32_t most_possible(const struct feed_bench *b)
{
    double n = 2 * b->bound_gbps / workload_gbps(&b->workload); /* equal reads of several may be joined */
    return n < 1 ? 1 : n > ACCELERATORS_MAX ? ACCELERATORS_MAX : (uint32_t)n;
}

static int find_largest(struct feed_bench *b, struct feed_figures *best)
{
    struct progress p;
    uint32_t good = 0, bad = most_possible(b) + 1;
    double guess = 0.85 * b->bound_gbps / workload_gbps(&b->workload);
    int status = STATUS_OK;
    progress_begin(&p, "looking for the largest number");
    for (uint32_t n = (uint32_t)fmin(fmax(guess, 1), bad - 1); status == STATUS_OK && n > good;
         n = good + (bad - good) / 2) {
        struct feed_figures f;
        b->run.accelerators = n;
        progress_bytes(&p, good, bad, "");
        status = feed_run(&b->run, &f);
        bool busy = status == STATUS_OK && kept_busy(b, n, &f);
        if (busy || good == 0)
            *best = f;
        *(busy ? &good : &bad) = n;
    }
    progress_end(&p);
    b->accelerators = good;
    return status;
}

/* ---- telling ---- */

static json_t *real_or_null(double v)
{
    return v < 0 ? json_null() : json_real(v);
}

static int tell_json(const struct feed_bench *b, const struct feed_figures *f)
{
    return json_print(json_pack(
        "{s:s,s:f,s:I,s:o,s:f,s:f,s:f,s:f,s:{s:f,s:f,s:f,s:f},s:o,s:s}", "workload", b->workload.name,
        "scale", b->scale, "accelerators", (json_int_t)b->accelerators, "utilisation",
        real_or_null(b->workload.compute_s > 0 ? f->utilisation : -1), "samples_per_s", f->samples_per_s,
        "gbps", f->gbps, "bound_gbps", b->bound_gbps, "of_limit", f->gbps / b->bound_gbps, "starved_seconds",
        "network", f->starved_network, "disk", f->starved_disk, "decode", f->starved_decode, "consumer",
        f->starved_consumer, "server_cpu_s_per_gb", real_or_null(f->server_cpu_s_per_gb), "path",
        *f->path ? f->path : b->path));
}

static void tell_workload(const struct feed_bench *b)
{
    const struct workload *w = &b->workload;
    printf("%s, %s: samples of %s", w->title, b->published ? "published folder" : "sealed dataset",
           size_text((uint64_t)w->sample_bytes).s);
    if (w->spread_bytes > 0)
        printf(" +- %s", size_text((uint64_t)w->spread_bytes).s);
    printf(" (scale %.4g), batches of %" PRIu32, b->scale, w->batch);
    if (w->compute_s > 0)
        printf(", %.4g s of computing each: %.3f GB/s an accelerator", w->compute_s, workload_gbps(w));
    printf("\n");
}

static int tell(const struct feed_bench *b, const struct feed_figures *f)
{
    if (b->json)
        return tell_json(b, f);
    tell_workload(b);
    if (b->largest && b->accelerators == 0)
        printf("  not even one accelerator is kept busy: ");
    else
        printf("  %s%" PRIu64 " accelerator%s: ", b->largest ? "at most " : "", b->accelerators,
               b->accelerators == 1 ? "" : "s");
    if (b->workload.compute_s > 0)
        printf("utilisation %.3f (%.2f counts as busy), ", f->utilisation, b->workload.reach);
    printf("%.0f samples/s\n", f->samples_per_s);
    printf("  %.2f GB/s, %.2f of the bound of %.2f: ", f->gbps, f->gbps / b->bound_gbps, b->bound_gbps);
    if (isfinite(b->device_gbps))
        printf("disk %.2f GB/s, ", b->device_gbps);
    printf("%d cores / %.2f CPU s per GB\n", cores_usable(), b->cpu_s_per_gb);
    printf("  starved, seconds of all: network %.2f, disk %.2f, decode %.2f; feeds full, waiting for "
           "accelerators %.2f\n",
           f->starved_network, f->starved_disk, f->starved_decode, f->starved_consumer);
    printf("  CPU s per GB: client %.2f, server ", f->client_cpu_s_per_gb);
    if (f->server_cpu_s_per_gb < 0)
        printf("not seen");
    else
        printf("%.2f", f->server_cpu_s_per_gb);
    printf("; by %s\n", *f->path ? f->path : b->path);
    return STATUS_OK;
}

/* ---- the whole ---- */

static int settle_scale(struct feed_bench *b, bool lane)
{
    bound_measure(b, lane);
    double one = workload_gbps(&b->workload);
    if (!b->scale_word)
        b->scale = one > 0 ? fmin(1, b->bound_gbps / 20 / one) : 1;
    workload_scale(&b->workload, b->scale);
    return STATUS_OK;
}

static int make_set(struct feed_bench *b)
{
    uint64_t most = b->largest ? most_possible(b) : b->accelerators;
    return feed_set_make(&b->workload, b->folder, b->bytes, 2 * most * b->workload.batch, &b->set);
}

/* Published folders are in the server's configuration, so the data set comes before the server. */
static int begin_server(struct feed_bench *b, const char *set)
{
    int status;
    if (b->dataset && !set)
        return fail_usage(NAME, "--dataset is of a server that runs: set LARDER_CREDENTIALS");
    if (b->dataset || !b->published)
        return set ? STATUS_OK : dev_start(b->folder, NULL, &b->own);
    if (set)
        return fail_usage(NAME, "--published starts a larderd of its own, which publishes the folder: unset "
                                "LARDER_CREDENTIALS");
    settle_scale(b, false);
    if ((status = make_set(b)) != STATUS_OK)
        return status;
    struct dev_publish p = {.name = b->made, .path = b->set.folder, .format = "tar"};
    if (b->workload.records) {
        p.format = "records";
        p.record_bytes = (uint64_t)b->workload.sample_bytes;
    }
    return dev_start(b->folder, &p, &b->own);
}

/* Samples of a dataset that is there already are counted, not checked. */
static int use_set(struct feed_bench *b)
{
    settle_scale(b, !b->published && strstr(b->path, "plain TCP") != NULL);
    b->set.workload = b->workload;
    return STATUS_OK;
}

/* How bytes of the data set travel. */
static int find_path(struct feed_bench *b)
{
    struct larder_info i = LARDER_INIT(larder_info);
    struct larder_error e = {0};
    if (larder_info(b->run.client, &i, &e) < 0)
        return fail(&e);
    snprintf(b->path, sizeof b->path, "%s", b->published ? "TLS 1.3 over TCP" : i.path);
    return STATUS_OK;
}

static int import_set(struct feed_bench *b)
{
    settle_scale(b, strstr(b->path, "plain TCP") != NULL);
    int status = make_set(b);
    if (status == STATUS_OK)
        status = feed_set_import(&b->set, b->run.client, b->made);
    feed_set_remove_files(&b->set);
    return status;
}

static uint64_t depth_of(const struct workload *w)
{
    double three = 3 * w->sample_bytes * w->batch;
    return (uint64_t)fmin(fmax(three, 8u << 20), 1u << 30);
}

static int measure(struct feed_bench *b)
{
    struct feed_figures f = {0};
    int status = STATUS_OK;
    b->run.dataset = b->dataset ? b->dataset : b->made;
    b->run.set = &b->set;
    b->run.server = b->own.pid ? &b->own : &b->beside;
    b->run.accelerators = (uint32_t)b->accelerators;
    if (b->run.depth_bytes == 0)
        b->run.depth_bytes = b->workload.compute_s > 0 ? depth_of(&b->workload) : 64u << 20;
    status = b->largest ? find_largest(b, &f) : feed_run(&b->run, &f);
    return status == STATUS_OK ? tell(b, &f) : status;
}

static int bench(struct feed_bench *b, const struct common *common)
{
    struct larder_error e = {0};
    const char *set = common->credentials ? common->credentials : getenv("LARDER_CREDENTIALS");
    set = set && *set ? set : NULL;
    snprintf(b->made, sizeof b->made, DATASET "-%d", (int)getpid());
    int status = begin_server(b, set);
    struct common with = {.credentials = b->own.pid ? b->own.credentials : set};
    if (status == STATUS_OK)
        status = client_open_to_save(&with, &b->run.client);
    if (status == STATUS_OK)
        status = find_path(b);
    if (status == STATUS_OK && b->dataset)
        status = use_set(b);
    else if (status == STATUS_OK && !b->published)
        status = import_set(b);
    if (status == STATUS_OK)
        status = measure(b);
    if (b->run.client && !b->own.pid && !b->dataset &&
        larder_run_destroy(b->run.client, LARDER_DATASETS, b->made, &e) < 0 && e.kind != LARDER_NOT_FOUND)
        fprintf(stderr, "larder: the dataset %s of this bench stays: %s\n", b->made, e.text);
    if (b->run.client)
        status = client_close(b->run.client, status);
    dev_stop(&b->own);
    feed_set_free(&b->set);
    return status;
}

static int feed_bench_run(const struct command *cmd, int argc, char **argv)
{
    struct common common = {0};
    struct feed_bench b = {.folder = "/tmp", .accelerators_word = "1", .bytes = 512u << 20, .seconds = 5};
    const char *workload = "unet3d";
    uint64_t sample_bytes = 0, batch = 0, window = WINDOW_SHARDS, server_pid = 0;
    bool sealed = false, sequential = false;
    b.stage_ms = 300;
    b.run.connections = 1;
    const struct opt opts[] = {{"workload", OPT_TEXT, &workload},
                               {"accelerators", OPT_TEXT, &b.accelerators_word},
                               {"scale", OPT_TEXT, &b.scale_word},
                               {"sealed", OPT_FLAG, &sealed},
                               {"published", OPT_FLAG, &b.published},
                               {"single", OPT_FLAG, &b.run.single},
                               {"sample-bytes", OPT_SIZE, &sample_bytes},
                               {"batch", OPT_NUMBER, &batch},
                               {"window", OPT_NUMBER, &window},
                               {"sequential", OPT_FLAG, &sequential},
                               {"connections", OPT_NUMBER, &b.run.connections},
                               {"depth", OPT_SIZE, &b.run.depth_bytes},
                               {"bytes", OPT_SIZE, &b.bytes},
                               {"seconds", OPT_NUMBER, &b.seconds},
                               {"stage-ms", OPT_NUMBER, &b.stage_ms},
                               {"dir", OPT_TEXT, &b.folder},
                               {"dataset", OPT_TEXT, &b.dataset},
                               {"server-pid", OPT_NUMBER, &server_pid},
                               {0}};
    int status;
    if (!options_read(cmd, &argc, argv, opts, 0, 0, &common, &status))
        return status;
    if (b.dataset && (b.run.single || b.scale_word))
        return fail_usage(cmd->name, "--dataset goes neither with --single nor with --scale");
    if (server_pid > INT32_MAX)
        return fail_usage(cmd->name, "--server-pid is no process");
    b.beside.pid = (pid_t)server_pid;
    if (sealed && b.published)
        return fail_usage(cmd->name, "--sealed or --published, not both");
    b.json = common.json;
    status = options_check(cmd, &b, workload, sample_bytes, batch, window, sequential);
    return status == STATUS_OK ? bench(&b, &common) : status;
}

const struct command cmd_bench_feed = {
    NAME, "emulated accelerators fed with samples, and how far from the machine's bound",
    "usage: larder bench feed [--workload NAME] [--accelerators N|max] [options]\n"
    "Emulates accelerators as MLPerf Storage does: each takes a batch, waits as long as the real one would "
    "compute,\n"
    "takes the next. Utilisation is computing time over total time, the first step excluded. The data set "
    "is made on\n"
    "the spot. Without LARDER_CREDENTIALS it starts its own larderd in a new folder below --dir and removes "
    "both.\n"
    "  --workload NAME    unet3d (default): 146.6 MB +- 68 MB, 7 each 0.323 s; resnet50: 114.7 KB, 400 each "
    "0.224 s;\n"
    "                     cosmoflow: 2.83 MB, 1 each 3.5 ms; retinanet: 323 KB, 24 each 47.6 ms; llm: "
    "8,192 tokens of\n"
    "                     4 bytes, 8 each 0.25 s; plain: --sample-bytes (1M), --batch (16), without "
    "computing\n"
    "  --accelerators N   each a rank with a feed of its own (1); max: the largest N with utilisation of at "
    "least 0.90\n"
    "                     (cosmoflow 0.70) by what comes meanwhile; 0 if there is none\n"
    "  --scale F          samples smaller by that factor, times kept (until one accelerator needs a "
    "twentieth of the\n"
    "                     bound, at most 1)\n"
    "  --sealed           an imported dataset (default)    --published   a plain folder, by a larderd of "
    "its own\n"
    "  --single           one request after the other for each sample, instead of a feed\n"
    "  --sequential       no shuffling    --window N  shuffle window in shards (8)\n"
    "  --connections N    of each feed (1)    --depth SIZE  memory of each feed (3 batches, at least 8M; "
    "plain: 64M)\n"
    "  --bytes SIZE       of the data set, at least (512M)    --seconds N  measured (5)\n"
    "  --stage-ms N       for each stage of the bound (300), but reading the disk: --seconds    --dir FOLDER "
    " (/tmp)\n"
    "  --dataset NAME     of the server that LARDER_CREDENTIALS names, instead of one made on the spot; with "
    "--published\n"
    "                     if it is\n"
    "  --server-pid PID   the server runs on this machine: its CPU time is read\n"
    "  --json             {\"workload\", \"scale\", \"accelerators\", \"utilisation\", \"samples_per_s\", "
    "\"gbps\",\n"
    "                     \"bound_gbps\", \"of_limit\", \"starved_seconds\": {\"network\", \"disk\", "
    "\"decode\", \"consumer\"},\n"
    "                     \"server_cpu_s_per_gb\", \"path\"}; null: without computing, or not seen\n",
    feed_bench_run};
