/* SPDX-License-Identifier: Apache-2.0 */
/* Workloads of MLPerf Storage, and data sets with their sample sizes. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/bench_feed.h"

#define SAMPLE_BYTES_MIN 64u
#define SHARDS           32u /* about so many, so that a window of 8 is a part of all */
#define SHARD_BYTES_MAX  (64u << 20)
#define RANDOM_BYTES     (8u << 20) /* samples are cut from these, each at another place */
#define TAR_BLOCK        512u

static const struct workload workloads[] = {
    {"unet3d", "3D U-Net", 146.6e6, 68e6, 7, 0.323, 0.90, false},
    {"resnet50", "ResNet-50", 114.7e3, 0, 400, 0.224, 0.90, false},
    {"cosmoflow", "CosmoFlow", 2.83e6, 0, 1, 0.0035, 0.70, false},
    {"retinanet", "RetinaNet", 323e3, 0, 24, 0.0476, 0.90, false},
    /* sequences of 8,192 tokens of 4 bytes; not one of MLPerf Storage */
    {"llm", "language model", 32768, 0, 8, 0.25, 0.90, true},
    {"plain", "plain reading", 1 << 20, 0, 16, 0, 0, false},
};

bool workload_find(const char *name, struct workload *out)
{
    for (size_t i = 0; i < sizeof workloads / sizeof workloads[0]; i++)
        if (strcmp(workloads[i].name, name) == 0) {
            *out = workloads[i];
            return true;
        }
    return false;
}

double workload_gbps(const struct workload *w)
{
    return w->compute_s > 0 ? w->sample_bytes * w->batch / w->compute_s / 1e9 : 0;
}

void workload_scale(struct workload *w, double factor)
{
    w->sample_bytes = fmax(SAMPLE_BYTES_MIN, rint(w->sample_bytes * factor));
    w->spread_bytes *= factor;
}

/* ---- sizes ---- */

static double uniform(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return ((double)((z ^ z >> 31) >> 11) + 0.5) / 9007199254740992.0;
}

/* A normal deviate by Box and Muller's transform, drawn again beyond 2: the mean stays what it is. */
static uint64_t size_of(const struct workload *w, uint64_t number)
{
    uint64_t state = number * 0xd1342543de82ef95u + 1;
    double z = 0;
    while (w->spread_bytes > 0) {
        double a = uniform(&state), b = uniform(&state);
        z = sqrt(-2 * log(a)) * cos(6.283185307179586 * b);
        if (fabs(z) <= 2)
            break;
    }
    double n = w->sample_bytes + z * w->spread_bytes;
    return n < SAMPLE_BYTES_MIN ? SAMPLE_BYTES_MIN : (uint64_t)n;
}

static uint64_t round_up(uint64_t n)
{
    return (n + TAR_BLOCK - 1) / TAR_BLOCK * TAR_BLOCK;
}

static void lay_out(struct feed_set *s, uint64_t bytes, uint64_t samples)
{
    double mean = s->workload.sample_bytes;
    uint64_t want = (uint64_t)((double)bytes / mean) + 1;
    s->samples = want > samples ? want : samples;
    s->per_shard = (s->samples + SHARDS - 1) / SHARDS;
    if ((double)s->per_shard * mean > SHARD_BYTES_MAX)
        s->per_shard = (uint64_t)(SHARD_BYTES_MAX / mean);
    s->per_shard += s->per_shard == 0;
    s->shards = (uint32_t)((s->samples + s->per_shard - 1) / s->per_shard);
    s->sizes = need(calloc(s->samples, sizeof *s->sizes));
    s->offsets = need(calloc(s->samples, sizeof *s->offsets));
    for (uint64_t i = 0, at = 0; i < s->samples; i++) {
        at = i % s->per_shard == 0 ? 0 : at;
        at += s->workload.records ? 0 : TAR_BLOCK;
        s->sizes[i] = size_of(&s->workload, i);
        s->offsets[i] = at;
        s->bytes += s->sizes[i];
        at += s->workload.records ? s->sizes[i] : round_up(s->sizes[i]);
    }
}

/* ---- files ---- */

static void tar_header(uint64_t number, uint64_t bytes, char h[TAR_BLOCK])
{
    unsigned sum = 0;
    memset(h, 0, TAR_BLOCK);
    snprintf(h, 100, "%08" PRIu64 ".bin", number);
    memcpy(h + 100, "0000644\0000000000\0000000000", 24);
    snprintf(h + 124, 12, "%011" PRIo64, bytes);
    memcpy(h + 136, "00000000000", 12);
    h[156] = '0';
    memcpy(h + 257, "ustar\00000", 8);
    memset(h + 148, ' ', 8);
    for (unsigned i = 0; i < TAR_BLOCK; i++)
        sum += (unsigned char)h[i];
    snprintf(h + 148, 8, "%06o", sum);
}

/* Its number, then random bytes. */
static void put_sample(FILE *f, uint64_t number, uint64_t bytes, const uint8_t *random)
{
    fwrite(&number, sizeof number, 1, f);
    uint64_t from = number * 4099 % (RANDOM_BYTES / 2);
    for (uint64_t left = bytes - sizeof number; left > 0;) {
        uint64_t n = left < RANDOM_BYTES - from ? left : RANDOM_BYTES - from;
        fwrite(random + from, 1, n, f);
        left -= n;
        from = 0;
    }
}

static void shard_path(const struct feed_set *s, uint32_t shard, char out[4300])
{
    snprintf(out, 4300, "%s/shard-%05u.%s", s->folder, shard, s->workload.records ? "bin" : "tar");
}

static int put_shard(const struct feed_set *s, uint32_t shard, const uint8_t *random)
{
    static const char zeros[2 * TAR_BLOCK];
    char path[4300], header[TAR_BLOCK];
    uint64_t first = shard * s->per_shard, end = first + s->per_shard;
    shard_path(s, shard, path);
    FILE *f = fopen(path, "wxe");
    for (uint64_t i = first; f && i < end && i < s->samples; i++) {
        if (!s->workload.records) {
            tar_header(i, s->sizes[i], header);
            fwrite(header, 1, sizeof header, f);
        }
        put_sample(f, i, s->sizes[i], random);
        if (!s->workload.records)
            fwrite(zeros, 1, round_up(s->sizes[i]) - s->sizes[i], f);
    }
    if (f && !s->workload.records)
        fwrite(zeros, 1, sizeof zeros, f);
    bool bad = !f || ferror(f);
    if ((f && fclose(f) != 0) || bad)
        return fail_with(errno == ENOSPC ? STATUS_SPACE : STATUS_OTHER, "%s cannot be written: %s", path,
                         strerror(errno));
    return STATUS_OK;
}

int feed_set_make(const struct workload *w, const char *parent, uint64_t bytes, uint64_t samples,
                  struct feed_set *s)
{
    struct progress p;
    *s = (struct feed_set){.workload = *w};
    snprintf(s->folder, sizeof s->folder, "%s/larder-bench-XXXXXX", parent);
    if (!mkdtemp(s->folder)) {
        s->folder[0] = 0;
        return fail_with(STATUS_OTHER, "a folder in %s cannot be made: %s", parent, strerror(errno));
    }
    lay_out(s, bytes, samples);
    uint8_t *random = need(malloc(RANDOM_BYTES));
    bench_fill("random", 1, random, RANDOM_BYTES);
    int status = STATUS_OK;
    progress_begin(&p, "making the data set");
    for (uint32_t i = 0; i < s->shards && status == STATUS_OK; i++) {
        status = put_shard(s, i, random);
        progress_bytes(&p, s->bytes / s->shards * (i + 1), s->bytes, "");
    }
    progress_end(&p);
    free(random);
    return status;
}

void feed_set_remove_files(struct feed_set *s)
{
    if (s->folder[0])
        remove_tree(s->folder);
    s->folder[0] = 0;
}

void feed_set_free(struct feed_set *s)
{
    feed_set_remove_files(s);
    free(s->sizes);
    free(s->offsets);
    *s = (struct feed_set){0};
}

int feed_set_import(const struct feed_set *s, struct larder *c, const char *name)
{
    struct larder_import_options o = LARDER_INIT(larder_import_options);
    struct larder_error e = {0};
    uint64_t version;
    char(*paths)[4300] = need(calloc(s->shards, sizeof *paths));
    const char **files = need(calloc(s->shards + 1, sizeof *files));
    for (uint32_t i = 0; i < s->shards; i++) {
        shard_path(s, i, paths[i]);
        files[i] = paths[i];
    }
    o.dataset = name;
    o.files = files;
    o.format = s->workload.records ? LARDER_SHARD_RECORDS : LARDER_SHARD_TAR;
    o.record_bytes = s->workload.records ? (uint64_t)s->workload.sample_bytes : 0;
    int status = larder_dataset_import(c, &o, &version, &e) < 0 ? fail(&e) : STATUS_OK;
    free(files);
    free(paths);
    return status;
}
