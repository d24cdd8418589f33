/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Measuring. One GB is 10^9 bytes of plaintext unless said otherwise; times are of the monotonic clock, CPU
 * seconds of all threads concerned.
 */
#ifndef LARDER_TOOLS_BENCH_H
#define LARDER_TOOLS_BENCH_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "format/codec.h"
#include "format/dtype.h"

/* ---- data ------------------------------------------------------------------------------------------------
 */

/* "bf16-gaussian", "fp32-gaussian", "random" or "zero": fills n bytes (a multiple of 8), the same for the
 * same seed. false: no such kind. */
bool bench_fill(const char *kind, uint64_t seed, void *p, size_t n);
bool bench_dtype(const char *kind, enum dtype *out);

/* ---- one stage alone
 * --------------------------------------------------------------------------------------- */

enum stage {
    STAGE_MEMCPY,
    STAGE_CHECKSUM,
    STAGE_AES_GCM,  /* sealing chunks, through format/seal */
    STAGE_LANE_TAG, /* the tag over a frame on the bulk lane, of one end */
    STAGE_ZSTD,
    STAGE_PLANES_ENCODE,
    STAGE_PLANES_DECODE,
    STAGE_TCP, /* loopback, both ends on this machine: CPU is the sum of both */
    STAGE_TLS, /* the same through format/channel */
    STAGE_DISK_WRITE,
    STAGE_DISK_READ,
    STAGE_CACHED_READ, /* of a file that the page cache holds */
    STAGE_COUNT
};
struct stage_figures {
    double gbps;         /* one core, one stream or one disk */
    double cpu_s_per_gb; /* of the bytes that go in */
    double ratio;        /* of compression; 1 for the others */
    bool direct;         /* disk stages: O_DIRECT was possible */
    char why_not[128];   /* gbps 0: why it could not be measured */
};
const char *stage_name(enum stage s);
struct stage_work {
    const char *data;    /* what kind the codecs get */
    const char *folder;  /* for the disk */
    double seconds;      /* for each stage in memory or on the network, about */
    uint64_t disk_bytes; /* to write and read */
    double disk_seconds; /* reads go on for so long in all: disks hold less over seconds than at first */
};
void stage_measure(enum stage s, const struct stage_work *w, struct stage_figures *out);

/* Encode and decode speed of a codec level on one core; level -1: plain zstd level 1. loops: as
 * codec_state_loops takes them, NULL for the best; -ENOTSUP. */
struct codec_figures {
    double ratio, encode_gbps, decode_gbps;
    bool same; /* what was decoded equals what was encoded */
};
int codec_measure(int level, const char *loops, enum dtype dtype, const void *p, size_t n, double seconds,
                  struct codec_figures *out);

/* A trainer that computes on so many threads, step after step; NULL: no memory. */
struct trainer;
struct trainer *trainer_start(unsigned threads);
/* Whole steps since the last look, and the seconds that they took. */
void trainer_look(struct trainer *t, double *busy_s, uint64_t *steps);
void trainer_stop(struct trainer *t);

double cpu_now_s(void); /* of this process, all threads */
int cores_usable(void);

/* ---- a server of one's own
 * ----------------------------------------------------------------------------------- */

struct dev_server {
    pid_t pid; /* 0: none of our own */
    char folder[4096];
    char credentials[4200];
};
/* A folder that the server publishes. */
struct dev_publish {
    const char *name, *path, *format;
    uint64_t record_bytes; /* 0: not records */
};
/* Starts larderd --dev in a new folder below `parent`, found next to this program or in ../sbin; waits until
 * it answers. publish may be NULL. 0 or an exit code, told. */
int dev_start(const char *parent, const struct dev_publish *publish, struct dev_server *out);
/* Stops it and removes its folder. */
void dev_stop(struct dev_server *s);
double dev_cpu_s(const struct dev_server *s); /* < 0: unknown */
/* Drops the store's files from the page cache. */
void dev_forget_pages(const struct dev_server *s);
/* Removes a folder and all in it, without following links. */
void remove_tree(const char *folder);

#endif
