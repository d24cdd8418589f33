/* SPDX-License-Identifier: Apache-2.0 */
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "gpudirect/kernels_image.h"
#include "tests/gpu/gpu.h"

#define LACKING 77 /* exit status: there is nothing to measure here */

/* ---- the table ---- */

void row(struct bench *b, const char *what, bool good, const char *note, const char *value, ...)
{
    char text[64];
    va_list args;
    va_start(args, value);
    vsnprintf(text, sizeof text, value, args);
    va_end(args);
    b->bad += !good;
    if (*note)
        printf("%-50s %-14s %-6s %s\n", what, text, good ? "right" : "WRONG", note);
    else
        printf("%-50s %-14s %s\n", what, text, good ? "right" : "WRONG");
    fflush(stdout);
}

void row_failed(struct bench *b, const char *what, const char *why)
{
    b->bad++;
    printf("%-50s %-14s %-6s %s\n", what, "", "FAILED", why);
    fflush(stdout);
}

void must(int rc, const struct err *e, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "tests/gpu: %s: %s\n", what, e->text);
    exit(1);
}

/* ---- helpers ---- */

double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

double gbps(uint64_t bytes, double seconds)
{
    return seconds > 0 ? (double)bytes / seconds / 1e9 : 0;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

double median(double *v, unsigned n)
{
    qsort(v, n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

void fill(void *p, uint64_t n, uint64_t seed)
{
    uint64_t *w = p;
    for (uint64_t i = 0; i < n / 8; i++)
        w[i] = (i + seed) * 0x9e3779b97f4a7c15u;
    for (uint64_t i = n / 8 * 8; i < n; i++)
        ((uint8_t *)p)[i] = (uint8_t)(i + seed);
}

void *host_alloc(uint64_t n)
{
    void *p = NULL;
    if (posix_memalign(&p, 4096, n) != 0) {
        fprintf(stderr, "tests/gpu: no memory for %llu MiB\n", (unsigned long long)n >> 20);
        exit(1);
    }
    memset(p, 0, n);
    return p;
}

void upload(struct bench *b, void *device, const void *host, uint64_t n)
{
    struct err e;
    int rc = memory_copy(b->s, MEMORY_IN, device, host, n, &e);
    if (rc == 0)
        rc = memory_stream_wait(b->s, WAIT_MS, &e);
    must(rc, &e, "copying to the device");
}

void download(struct bench *b, void *host, const void *device, uint64_t n)
{
    struct err e;
    int rc = memory_copy(b->s, MEMORY_OUT, host, device, n, &e);
    if (rc == 0)
        rc = memory_stream_wait(b->s, WAIT_MS, &e);
    must(rc, &e, "copying from the device");
}

/* ---- start and end ---- */

static void begin(struct bench *b, int ordinal)
{
    struct larder_machine m = LARDER_INIT(larder_machine);
    struct err e;
    char date[32];
    time_t now = time(NULL);
    (void)larder_machine(&m);
    if (m.devices == 0) {
        printf("%s\n", m.cuda_note);
        exit(LACKING);
    }
    must(memory_open(MEMORY_CUDA, ordinal, &b->m, &e), &e, "device");
    must(memory_stream_create(b->m, &b->s, &e), &e, "stream");
    const struct memory_info *i = memory_info(b->m);
    b->standin = strncmp(i->name, "Stand-in", 8) == 0;
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    printf("%s, %s, %ld cores, %s\n", i->name, m.cuda_note, sysconf(_SC_NPROCESSORS_ONLN), date);
    printf("cuFile: %s; kernels: %s\n", m.cufile_note, m.kernels_note);
    if (b->standin)
        printf("This is the stand-in driver, on host memory: rates and ratios mean nothing, right and wrong "
               "do.\n");
    if (kernels_open(b->m, kernels_image(), &b->k, &e) < 0)
        printf("No kernels: %s\n", e.text);
    if (b->bytes == 0)
        b->bytes = b->standin ? 8u << 20 : 1ull << 30;
    printf("%llu MiB at a time\n\n%-50s %-14s %s\n", (unsigned long long)b->bytes >> 20, "WHAT", "MEASURED",
           "BYTES  NOTE");
}

int main(int argc, char **argv)
{
    struct bench b = {.folder = "."};
    int ordinal = 0, option;
    while ((option = getopt(argc, argv, "d:m:f:")) != -1)
        switch (option) {
        case 'd': ordinal = atoi(optarg); break;
        case 'm': b.bytes = strtoull(optarg, NULL, 10) / 4 * 4 << 20; break;
        case 'f': b.folder = optarg; break;
        default: fprintf(stderr, "usage: bench [-d DEVICE] [-m MIB] [-f FOLDER]\n"); return 2;
        }
    double start = now_s();
    begin(&b, ordinal);
    measure_copies(&b);
    measure_kernels(&b);
    measure_files(&b);
    measure_saves(&b);
    measure_feeds(&b);
    kernels_close(b.k);
    memory_stream_destroy(b.s);
    memory_close(b.m);
    printf("\n%s, after %.0f s\n", b.bad ? "something is wrong" : "all bytes were right", now_s() - start);
    return b.bad > 0;
}
