/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What larder bench feed is made of: workloads, a data set made on the spot, and emulated accelerators that
 * read it. Accelerators are emulated as MLPerf Storage does it: each takes a batch, waits as long as the real
 * one would compute, takes the next.
 *
 * Accelerators are threads of this process, each one rank with a feed of its own: its own connections, memory
 * and threads. What they share is what the ranks of one node share.
 */
#ifndef LARDER_TOOLS_BENCH_FEED_H
#define LARDER_TOOLS_BENCH_FEED_H

#include "tools/bench.h"
#include "tools/ui.h"

#define ACCELERATORS_MAX 64

/* ---- workloads and their data ---- */

struct workload {
    const char *name, *title;
    double sample_bytes; /* mean */
    double spread_bytes; /* standard deviation of a normal distribution, cut at twice that on both sides */
    uint32_t batch;      /* samples of one accelerator's step */
    double compute_s;    /* of a step; 0: takes batches as fast as they come */
    double reach;        /* utilisation from which on an accelerator counts as kept busy */
    bool records;        /* fixed-size records; else members of tar shards */
};
/* "unet3d", "resnet50", "cosmoflow", "retinanet", "llm", "plain". False: no such workload. */
bool workload_find(const char *name, struct workload *out);
double workload_gbps(const struct workload *w); /* what one accelerator needs; 0: as much as comes */
/* Smaller samples, by a factor of at most 1; times stay. */
void workload_scale(struct workload *w, double factor);

/* Shards in a folder of their own. A sample begins with its number, 8 bytes; the rest is random. */
struct feed_set {
    struct workload workload;
    char folder[4200];
    uint64_t bytes, per_shard; /* samples of a shard; the last may have fewer */
    uint64_t samples;          /* 0: a dataset that was not made here, of which nothing is known */
    uint32_t shards;
    uint64_t *sizes, *offsets; /* by sample; offset: in its shard */
};
/* At least `bytes` and `samples`, below `parent`. 0 or an exit code, told. */
int feed_set_make(const struct workload *w, const char *parent, uint64_t bytes, uint64_t samples,
                  struct feed_set *out);
void feed_set_remove_files(struct feed_set *s); /* what was imported is not needed any more */
void feed_set_free(struct feed_set *s);         /* and the files */
/* Imports it; 0 or an exit code, told. */
int feed_set_import(const struct feed_set *s, struct larder *c, const char *name);

/* ---- accelerators at work ---- */

struct feed_run {
    struct larder *client;
    const char *dataset;
    const struct feed_set *set;
    const struct dev_server *server; /* whose CPU is read, if it is ours */
    uint32_t accelerators, window_shards;
    uint64_t connections, depth_bytes;
    double seconds;
    bool single; /* one read after the other, instead of a feed */
};
struct feed_figures {
    double utilisation; /* compute time over total time of all accelerators, without their first step */
    double samples_per_s, gbps; /* that came meanwhile: what was ready before is not counted */
    double starved_network, starved_disk, starved_decode, starved_consumer;
    double server_cpu_s_per_gb, client_cpu_s_per_gb; /* the first < 0: not seen */
    char path[128];
};
/* 0 or an exit code, told. */
int feed_run(const struct feed_run *r, struct feed_figures *out);

#endif
