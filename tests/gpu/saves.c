/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Saves of device memory beside a computing kernel, and restores into it, against a larderd of this machine.
 *
 * What a training step does: the weights are ready, the save is submitted, the next step computes (the
 * spinning kernel), and before the optimizer overwrites the weights, the stream waits for the save's copies
 * (larder_save_fence_stream). `Blocked` is how much later the stream comes to that point than without a save.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/gpu.h"
#include "tools/bench.h"

#define ROUNDS      5
#define TENSORS     8
#define SPIN_BLOCKS 512u /* on every processor of a device */

struct job {
    struct bench *b;
    struct larder *c;
    uint8_t *weights, *next; /* on the device: what is saved, and what overwrites it */
    uint8_t *host, *found;
    struct memory_event *fenced;
    double alone_s; /* a step without a save */
    uint64_t step_ns;
};

struct figures {
    double submit_s, blocked_s, staged_s, durable_s;
};

static void tensor_at(const struct job *j, unsigned i, uint8_t *base, char name[16], struct larder_tensor *t)
{
    uint64_t n = j->b->bytes / TENSORS;
    snprintf(name, 16, "layer.%u", i);
    *t = (struct larder_tensor){.name = name,
                                .dtype = LARDER_BF16,
                                .dims = 2,
                                .shape = {n / 2048, 1024},
                                .data = base + i * n,
                                .memory = LARDER_MEMORY_CUDA,
                                .device = memory_ordinal(j->b->m),
                                .stream = memory_stream_handle(j->b->s)};
}

/* ---- a step ---- */

static int compute(struct job *j, struct err *e)
{
    return j->b->k ? kernels_spin(j->b->k, j->b->s, SPIN_BLOCKS, j->step_ns, e) : 0;
}

/* Until the stream has come to the optimizer. */
static int reach_optimizer(struct job *j, struct err *e)
{
    int rc = memory_event_record(j->fenced, j->b->s, e);
    if (rc == 0) /* the optimizer: the weights are other ones from here on */
        rc = memory_copy(j->b->s, MEMORY_WITHIN, j->weights, j->next, j->b->bytes, e);
    return rc < 0 ? rc : memory_event_wait(j->fenced, WAIT_MS, e);
}

static void measure_step_alone(struct job *j)
{
    double seconds[ROUNDS];
    struct err e;
    for (int i = 0; i < ROUNDS; i++) {
        double start = now_s();
        int rc = compute(j, &e);
        if (rc == 0)
            rc = reach_optimizer(j, &e);
        seconds[i] = now_s() - start;
        if (rc == 0)
            rc = memory_stream_wait(j->b->s, WAIT_MS, &e); /* the optimizer is not the next step's */
        must(rc, &e, "a step");
    }
    j->alone_s = median(seconds, ROUNDS);
}

static int add_tensors(const struct job *j, struct larder_save *s, struct larder_error *e)
{
    int rc = 0;
    for (unsigned i = 0; i < TENSORS && rc == 0; i++) {
        char name[16];
        struct larder_tensor t;
        tensor_at(j, i, j->weights, name, &t);
        rc = larder_save_tensor(s, &t, e);
    }
    return rc;
}

/* 0, or the error. */
static int step_with_save(struct job *j, uint64_t step, struct figures *f, struct larder_error *e)
{
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    struct larder_save_info info = LARDER_INIT(larder_save_info);
    struct larder_save *s = NULL;
    struct err own;
    o.run = "gpu";
    o.step = step;
    upload(j->b, j->weights, j->host, j->b->bytes);
    int rc = larder_save_begin(j->c, &o, &s, e);
    if (rc == 0)
        rc = add_tensors(j, s, e);
    double start = now_s();
    if (rc == 0)
        rc = larder_save_submit(s, e);
    double submitted = now_s();
    if (rc == 0)
        must(compute(j, &own), &own, "a step");
    if (rc == 0)
        rc = larder_save_fence_stream(s, memory_ordinal(j->b->m), memory_stream_handle(j->b->s), e);
    if (rc == 0)
        must(reach_optimizer(j, &own), &own, "a step");
    *f = (struct figures){.submit_s = submitted - start, .blocked_s = now_s() - submitted - j->alone_s};
    if (rc == 0)
        rc = larder_save_wait(s, 2 * (int)WAIT_MS, e);
    if (rc == 0)
        rc = larder_save_info(s, &info);
    f->staged_s = info.staged_seconds;
    f->durable_s = info.durable_seconds;
    larder_save_free(s);
    return rc;
}

/* ---- coming back ---- */

/* The last save, into other device memory. */
static int restore(struct job *j, double *seconds, struct larder_error *e)
{
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    struct larder_restore *r = NULL;
    o.run = "gpu";
    double start = now_s();
    int rc = larder_restore_open(j->c, &o, &r, e);
    for (unsigned i = 0; i < TENSORS && rc == 0; i++) {
        char name[16];
        struct larder_tensor t;
        tensor_at(j, i, j->next, name, &t);
        rc = larder_restore_add(r, &t, e);
    }
    if (rc == 0)
        rc = larder_restore_run(r, e);
    *seconds = now_s() - start;
    larder_restore_close(r);
    return rc;
}

static void tell(struct job *j, struct figures f[ROUNDS], bool same, double restore_s)
{
    struct bench *b = j->b;
    double submit[ROUNDS], blocked[ROUNDS], staged[ROUNDS], durable[ROUNDS];
    char note[96];
    for (int i = 0; i < ROUNDS; i++) {
        submit[i] = f[i].submit_s;
        blocked[i] = f[i].blocked_s;
        staged[i] = f[i].staged_s;
        durable[i] = f[i].durable_s;
    }
    double staged_s = median(staged, ROUNDS), blocked_s = median(blocked, ROUNDS);
    snprintf(note, sizeof note, "%.2f of the pinned copy",
             b->out_gbps > 0 ? gbps(b->bytes, staged_s) / b->out_gbps : 0);
    row(b, "save: snapshot of device memory", same, note, "%.2f GB/s", gbps(b->bytes, staged_s));
    row(b, "save: submit holds the caller's thread", same, "", "%.3f ms", median(submit, ROUNDS) * 1e3);
    snprintf(note, sizeof note, "%.2f %% of the copying, beside a step of %.1f ms",
             staged_s > 0 ? 100 * blocked_s / staged_s : 0, (double)j->step_ns / 1e6);
    if (b->k)
        row(b, "save: the caller's stream is blocked", same, note, "%.3f ms", blocked_s * 1e3);
    snprintf(note, sizeof note, "%.2f GB/s", gbps(b->bytes, median(durable, ROUNDS)));
    row(b, "save: durable, compressed and encrypted", same, note, "%.3f s", median(durable, ROUNDS));
    row(b, "restore into device memory", same, "the bytes from before the overwriting", "%.2f GB/s",
        gbps(b->bytes, restore_s));
}

static void run(struct job *j)
{
    struct figures f[ROUNDS] = {0};
    struct larder_error e = {0};
    double restore_s = 0;
    int rc = 0;
    measure_step_alone(j);
    for (int i = -1; i < ROUNDS && rc == 0; i++) { /* the first one warms up */
        struct figures one;
        rc = step_with_save(j, (uint64_t)(i + 2), &one, &e);
        if (i >= 0)
            f[i] = one;
    }
    if (rc == 0)
        rc = restore(j, &restore_s, &e);
    if (rc < 0) {
        row_failed(j->b, "save and restore of device memory", e.text);
        return;
    }
    download(j->b, j->found, j->next, j->b->bytes);
    tell(j, f, memcmp(j->found, j->host, j->b->bytes) == 0, restore_s);
}

static int open_client(struct job *j, const struct dev_server *server, struct larder_error *e)
{
    struct larder_options o = LARDER_INIT(larder_options);
    int device = memory_ordinal(j->b->m);
    o.credentials = server->credentials;
    o.staging_bytes = j->b->bytes + (64u << 20); /* all of it at once: no waves */
    o.devices = &device;
    o.device_count = 1;
    return larder_open(&o, &j->c, e);
}

void measure_saves(struct bench *b)
{
    struct job j = {.b = b, .host = host_alloc(b->bytes), .found = host_alloc(b->bytes)};
    struct dev_server server;
    struct larder_error le = {0};
    struct err e;
    uint8_t *other = host_alloc(b->bytes);
    fill(j.host, b->bytes, 5);
    if (!bench_fill("bf16-gaussian", 1, j.host, b->bytes) || dev_start(b->folder, NULL, &server) != 0) {
        row_failed(b, "save and restore of device memory", "larderd --dev did not start");
        return;
    }
    must(memory_alloc(b->m, b->bytes, (void **)&j.weights, &e), &e, "device memory");
    must(memory_alloc(b->m, b->bytes, (void **)&j.next, &e), &e, "device memory");
    must(memory_event_create(b->m, &j.fenced, &e), &e, "event");
    upload(b, j.next, other, b->bytes);
    double copy_s = b->out_gbps > 0 ? (double)b->bytes / b->out_gbps / 1e9 : 0.1;
    j.step_ns = (uint64_t)(2.5e9 * copy_s) + 20000000;
    if (open_client(&j, &server, &le) < 0)
        row_failed(b, "save and restore of device memory", le.text);
    else
        run(&j);
    if (j.c && larder_close(j.c, (int)WAIT_MS, &le) < 0)
        row_failed(b, "closing the client", le.text);
    memory_event_destroy(j.fenced);
    memory_free(b->m, j.next);
    memory_free(b->m, j.weights);
    dev_stop(&server);
    free(j.host);
    free(j.found);
    free(other);
}
