/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tests/gpu/run's program: checks and measures what larder does with a GPU, row by row of one table. Every
 * row compares bytes; what differs, or fails, makes the program fail. GB are 10^9 bytes.
 */
#ifndef LARDER_TESTS_GPU_H
#define LARDER_TESTS_GPU_H

#include <stdbool.h>
#include <stdint.h>

#include "client/larder.h"
#include "gpudirect/kernels.h"

#define WAIT_MS 60000u

struct bench {
    struct memory *m;
    struct memory_stream *s;
    struct kernels *k; /* NULL: there are none */
    bool standin;      /* rates mean nothing */
    uint64_t bytes;    /* that each row moves, about: a multiple of 4 MiB */
    const char *folder;

    double out_gbps, in_gbps; /* of pinned copies: what others are compared with */
    unsigned bad;             /* rows */
};

/* One row. value: what was measured; good: bytes were right and nothing failed; note: what else there is to
 * say. */
void row(struct bench *b, const char *what, bool good, const char *note, const char *value, ...)
    __attribute__((format(printf, 5, 6)));
/* A row that failed: says why. */
void row_failed(struct bench *b, const char *what, const char *why);
/* Stops the program, naming what: for what nothing can go on without. */
void must(int rc, const struct err *e, const char *what);

double now_s(void);
double gbps(uint64_t bytes, double seconds);
/* Of n measurements, sorted in place. */
double median(double *v, unsigned n);
/* The same for the same seed; no two words alike. */
void fill(void *p, uint64_t n, uint64_t seed);
void *host_alloc(uint64_t n); /* page-aligned, touched */
/* Blocking copies for checks. */
void upload(struct bench *b, void *device, const void *host, uint64_t n);
void download(struct bench *b, void *host, const void *device, uint64_t n);

/* The chapters of the table. */
void measure_copies(struct bench *b);
void measure_kernels(struct bench *b);
void measure_files(struct bench *b);
void measure_saves(struct bench *b);
void measure_feeds(struct bench *b);

#endif
