/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: tensors on devices are saved as they were when they were handed over, however late and in whatever
 * order the device copies, and come back into any device's memory; batches come there, too; what is not as it
 * should be is named. What goes wrong on a device: tests/fault/device.c. Method: a real larderd, and a
 * stand-in for CUDA's driver whose copies are late and in chance order across streams, and whose memory the
 * processor cannot touch.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/dlpack.h"
#include "tests/support/trainer.h"

static const struct standin *cuda;
static struct daemon server;

static int setup(void **state)
{
    *state = trainer_begin(cuda, &server);
    return 0;
}

static int teardown(void **state)
{
    trainer_end(*state);
    return 0;
}

/* ---- what is saved comes back ---- */

#define ROWS    300
#define COLUMNS 1700 /* 2 MB of floats */
#define PITCH   2048
#define SMALL   500

/* Any strides, several devices, host memory beside them, more than the staging memory holds; into any strides
 * of any memory. */
static void any_tensor_of_any_memory_comes_back(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    enum { LARGE = 21u << 20 };
    static float host[ROWS][COLUMNS], got[COLUMNS][ROWS];
    uint8_t *large = trainer_memory(t, 0, LARGE), *expected = malloc(LARGE), *back = malloc(LARGE);
    float *matrix = (void *)trainer_memory(t, 1, ROWS * PITCH * 4);
    uint8_t *small = trainer_memory(t, 0, SMALL * 100);
    float *row = (void *)trainer_memory(t, 1, 3 * sizeof(float));
    trainer_bytes(expected, LARGE, 1);
    memcpy(cuda->standin_peek(large), expected, LARGE);
    for (int i = 0; i < ROWS; i++)
        for (int k = 0; k < COLUMNS; k++)
            ((float *)cuda->standin_peek(matrix))[i * PITCH + k] = host[i][k] = (float)(i * COLUMNS + k);
    memcpy(cuda->standin_peek(small), expected, SMALL * 100);
    memcpy(cuda->standin_peek(row), (float[]){1, 2, 3}, 12);
    struct larder_save *s = trainer_save(t->client, "any", 1, 0, 1);
    struct larder_tensor x = trainer_tensor(t, "large", 0, large, LARGE);
    GOOD(larder_save_tensor(s, &x, &e));
    struct larder_tensor m = {.name = "padded",
                              .dtype = LARDER_F32,
                              .dims = 2,
                              .shape = {ROWS, COLUMNS},
                              .strides = {PITCH, 1},
                              .data = matrix,
                              .memory = LARDER_MEMORY_CUDA,
                              .device = 1,
                              .stream = trainer_stream(t, 1)};
    GOOD(larder_save_tensor(s, &m, &e));
    struct larder_tensor transposed = m;
    transposed.name = "transposed";
    transposed.shape[0] = COLUMNS;
    transposed.shape[1] = ROWS;
    transposed.strides[0] = 1;
    transposed.strides[1] = PITCH;
    GOOD(larder_save_tensor(s, &transposed, &e));
    m.name = "host";
    m.data = host;
    m.strides[0] = m.strides[1] = 0;
    m.memory = LARDER_MEMORY_HOST;
    GOOD(larder_save_tensor(s, &m, &e));
    struct larder_tensor view = {.name = "expanded",
                                 .dtype = LARDER_F32,
                                 .dims = 2,
                                 .shape = {4, 3},
                                 .strides = {0, 1},
                                 .data = row,
                                 .memory = LARDER_MEMORY_CUDA,
                                 .device = 1};
    GOOD(larder_save_tensor(s, &view, &e));
    view.name = "turned";
    view.dims = 1;
    view.shape[0] = 3;
    view.strides[0] = -1;
    view.strides[1] = 0;
    view.data = row + 2;
    GOOD(larder_save_tensor(s, &view, &e));
    view = (struct larder_tensor){
        .name = "empty", .dtype = LARDER_F32, .dims = 1, .memory = LARDER_MEMORY_CUDA, .device = 1};
    GOOD(larder_save_tensor(s, &view, &e));
    for (unsigned i = 0; i < SMALL; i++) {
        char name[32];
        snprintf(name, sizeof name, "small/%u", i);
        x = trainer_tensor(t, name, 0, small + 100 * i, 100);
        GOOD(larder_save_tensor(s, &x, &e));
    }
    GOOD(larder_save_submit(s, &e));
    memset(host, 0, sizeof host); /* host memory is private already */
    GOOD(larder_save_fence(s, -1, &e));
    memset(cuda->standin_peek(large), 0xee, LARGE);
    memset(cuda->standin_peek(matrix), 0xee, ROWS * PITCH * 4);
    memset(cuda->standin_peek(small), 0xee, SMALL * 100);
    memset(cuda->standin_peek(row), 0xee, 12);
    GOOD(larder_save_wait(s, -1, &e));
    struct larder_save_info info = LARDER_INIT(larder_save_info);
    assert_int_equal(larder_save_info(s, &info), 0);
    assert_non_null(strstr(info.path, "CUDA device 0, 1 -> pinned host memory -> "));
    assert_true(info.staged_seconds > 0 && info.staged_seconds <= info.durable_seconds);
    larder_save_free(s);
    struct standin_counts n;
    cuda->standin_counts(&n);
    assert_int_equal(n.pageable_copies, 0); /* all of them ran by themselves */
    assert_true(n.copies < SMALL + 4000); /* neighbours went together; only the transposed one is in lines */

    struct larder_restore *r = trainer_restore(t->client, "any");
    uint8_t *large2 = trainer_memory(t, 1, LARGE), *small2 = trainer_memory(t, 0, SMALL * 100);
    float *turned = (void *)trainer_memory(t, 0, COLUMNS * 512 * 4),
          *three = (void *)trainer_memory(t, 0, 64);
    x = trainer_tensor(t, "large", 1, large2, LARGE);
    GOOD(larder_restore_add(r, &x, &e));
    m = (struct larder_tensor){.name = "padded", /* into the transposed place, padded, on the other device */
                               .dtype = LARDER_F32,
                               .dims = 2,
                               .shape = {ROWS, COLUMNS},
                               .strides = {1, 512},
                               .data = turned,
                               .memory = LARDER_MEMORY_CUDA,
                               .stream = trainer_stream(t, 0)};
    GOOD(larder_restore_add(r, &m, &e));
    transposed = (struct larder_tensor){
        .name = "transposed", .dtype = LARDER_F32, .dims = 2, .shape = {COLUMNS, ROWS}, .data = got};
    GOOD(larder_restore_add(r, &transposed, &e));
    m = (struct larder_tensor){
        .name = "host", .dtype = LARDER_F32, .dims = 2, .shape = {ROWS, COLUMNS}, .data = host};
    GOOD(larder_restore_add(r, &m, &e));
    view = (struct larder_tensor){.name = "turned", .dtype = LARDER_F32, .dims = 1, .strides = {-1}};
    view.data = three + 2;
    view.memory = LARDER_MEMORY_CUDA;
    GOOD(larder_restore_add(r, &view, &e));
    float expanded[4][3];
    view = (struct larder_tensor){.name = "expanded", .dtype = LARDER_F32, .dims = 2, .data = expanded};
    GOOD(larder_restore_add(r, &view, &e));
    for (unsigned i = 0; i < SMALL; i++) {
        char name[32];
        snprintf(name, sizeof name, "small/%u", i);
        x = trainer_tensor(t, name, 0, small2 + 100 * (SMALL - 1 - i), 100);
        GOOD(larder_restore_add(r, &x, &e));
    }
    trainer_fill(t, 1, large2, 7, LARGE); /* comes before the copies */
    GOOD(larder_restore_run(r, &e));
    struct larder_restore_info ri = LARDER_INIT(larder_restore_info);
    assert_int_equal(larder_restore_info(r, &ri), 0);
    assert_non_null(strstr(ri.path, " -> pinned host memory -> CUDA device 1, 0"));
    memcpy(back, cuda->standin_peek(large2), LARGE);
    assert_memory_equal(back, expected, LARGE);
    const float *there = cuda->standin_peek(turned);
    for (int i = 0; i < ROWS; i++)
        for (int k = 0; k < COLUMNS; k++) {
            float is = (float)(i * COLUMNS + k);
            assert_true(there[k * 512 + i] == is && got[k][i] == is && host[i][k] == is);
        }
    for (int i = 0; i < 12; i++)
        assert_true(expanded[i / 3][i % 3] == (float)(i % 3 + 1));
    assert_memory_equal(cuda->standin_peek(three), ((float[]){1, 2, 3}), 12); /* turned twice */
    for (unsigned i = 0; i < SMALL; i++)
        assert_memory_equal((uint8_t *)cuda->standin_peek(small2) + 100 * (SMALL - 1 - i), expected + 100 * i,
                            100);
    larder_restore_close(r);
    void *all[] = {large, matrix, row, small, large2, small2, turned, three};
    int on[] = {0, 1, 1, 0, 1, 0, 0, 0};
    for (unsigned i = 0; i < 8; i++)
        memory_free(t->device[on[i]], all[i]);
    free(expected);
    free(back);
}

/* ---- order ---- */

/* S13, S14: what was given to the caller's stream before submit is in the save, what was given after the
 * fence is not, neither after that of the host nor after that of the stream. */
static void copies_come_between_what_was_given_before_and_after(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    enum { BYTES = 5u << 20 };
    uint8_t *p = trainer_memory(t, 0, BYTES), *q = trainer_memory(t, 1, BYTES), *back = malloc(BYTES);
    for (uint8_t round = 1; round <= 12; round++) {
        cuda->standin_hold(trainer_stream(t, 0)); /* the step before is still computed */
        trainer_fill(t, 0, p, round, BYTES);
        trainer_fill(t, 1, q, (uint8_t)(100 + round), BYTES);
        struct larder_save *s = trainer_save(t->client, "order", round, 0, 1);
        struct larder_tensor x = trainer_tensor(t, "p", 0, p, BYTES), y = trainer_tensor(t, "q", 1, q, BYTES);
        GOOD(larder_save_tensor(s, &x, &e));
        GOOD(larder_save_tensor(s, &y, &e));
        GOOD(larder_save_submit(s, &e)); /* does not wait for it */
        assert_int_equal(larder_save_fence(s, 20, &e), -ETIMEDOUT);
        struct larder_save_info info = LARDER_INIT(larder_save_info);
        assert_int_equal(larder_save_info(s, &info), 0);
        assert_int_equal(info.state, LARDER_SAVE_OPEN);
        if (round % 2) {
            GOOD(larder_save_fence_stream(s, 0, trainer_stream(t, 0), &e));
            trainer_fill(t, 0, p, 0xee, BYTES); /* behind the copies, whenever they come */
            GOOD(larder_save_fence_stream(s, 1, trainer_stream(t, 1), &e));
            trainer_fill(t, 1, q, 0xee, BYTES);
            cuda->standin_release(trainer_stream(t, 0));
        } else {
            cuda->standin_release(trainer_stream(t, 0));
            GOOD(larder_save_fence(s, -1, &e));
            memset(cuda->standin_peek(p), 0xee, BYTES);
            memset(cuda->standin_peek(q), 0xee, BYTES);
        }
        GOOD(larder_save_wait(s, -1, &e));
        GOOD(larder_save_fence_stream(s, 0, trainer_stream(t, 0), &e)); /* nothing to wait for any more */
        larder_save_free(s);
        trainer_wait(t, 0);
        trainer_wait(t, 1);
        trainer_all(cuda->standin_peek(p), 0xee, BYTES); /* the trainer was not disturbed */
        trainer_read(t->client, "order", "p", back);
        trainer_all(back, round, BYTES);
        trainer_read(t->client, "order", "q", back);
        trainer_all(back, (uint8_t)(100 + round), BYTES);
    }
    free(back);
    memory_free(t->device[0], p);
    memory_free(t->device[1], q);
}

struct restoring {
    struct larder_restore *r;
    int rc;
    struct larder_error e;
};

static void *run_restore(void *arg)
{
    struct restoring *x = arg;
    x->rc = larder_restore_run(x->r, &x->e);
    return NULL;
}

/* Memory is not written before what its stream still does with it is done. */
static void a_restore_comes_after_the_stream(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    enum { BYTES = 3u << 20 };
    uint8_t *p = trainer_memory(t, 1, BYTES);
    trainer_fill(t, 1, p, 5, BYTES);
    struct larder_save *s = trainer_save(t->client, "after", 1, 0, 1);
    struct larder_tensor x = trainer_tensor(t, "p", 1, p, BYTES);
    GOOD(larder_save_tensor(s, &x, &e));
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_wait(s, -1, &e));
    larder_save_free(s);
    struct restoring g = {.r = trainer_restore(t->client, "after")};
    GOOD(larder_restore_add(g.r, &x, &e));
    cuda->standin_hold(trainer_stream(t, 1));
    trainer_fill(t, 1, p, 6, BYTES);
    pthread_t thread;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec++;
    pthread_create(&thread, NULL, run_restore, &g);
    assert_int_equal(pthread_timedjoin_np(thread, NULL, &until), ETIMEDOUT);
    trainer_all(cuda->standin_peek(p), 5, BYTES);
    cuda->standin_release(trainer_stream(t, 1));
    pthread_join(thread, NULL);
    e = g.e;
    GOOD(g.rc);
    trainer_all(cuda->standin_peek(p), 5, BYTES); /* and no 6 */
    trainer_wait(t, 1);
    larder_restore_close(g.r);
    memory_free(t->device[1], p);
}

/* Save after save, the source overwritten as soon as the fence is passed. LARDER_TEST_SAVES: how many. */
static void the_source_may_change_after_every_fence(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    enum { BYTES = 40000, BIG = 3u << 20 };
    const char *given = getenv("LARDER_TEST_SAVES");
    unsigned saves = given ? (unsigned)atoi(given) : 150;
    uint8_t *p = trainer_memory(t, 0, BYTES), *q = trainer_memory(t, 1, BIG), *back = malloc(BIG);
    trainer_fill(t, 0, p, 1, BYTES);
    trainer_fill(t, 1, q, 2, BIG);
    for (unsigned i = 1; i <= saves; i++) {
        struct larder_save *s = trainer_save(t->client, "often", i, 0, 1);
        struct larder_tensor x = trainer_tensor(t, "p", 0, p, BYTES);
        GOOD(larder_save_tensor(s, &x, &e));
        bool big = i % 10 == 0; /* and its model is offloaded and loaded again: S12 */
        if (big) {
            struct larder_tensor y = trainer_tensor(t, "q", 1, q, BIG);
            GOOD(larder_save_tensor(s, &y, &e));
        }
        GOOD(larder_save_submit(s, &e));
        if (i % 2)
            GOOD(larder_save_fence_stream(s, 0, trainer_stream(t, 0), &e));
        else
            GOOD(larder_save_fence(s, -1, &e));
        trainer_fill(t, 0, p, (uint8_t)(i + 1), BYTES);
        if (big) {
            GOOD(larder_save_fence(s, -1, &e));
            memory_free(t->device[1], q);
            q = trainer_memory(t, 1, BIG);
            trainer_fill(t, 1, q, (uint8_t)(i + 2), BIG);
        }
        GOOD(larder_save_wait(s, -1, &e));
        larder_save_free(s);
        trainer_read(t->client, "often", "p", back);
        trainer_all(back, (uint8_t)i, BYTES);
        if (big) {
            trainer_read(t->client, "often", "q", back);
            trainer_all(back, (uint8_t)(i == 10 ? 2 : i - 8), BIG);
        }
    }
    trainer_wait(t, 0);
    trainer_wait(t, 1);
    free(back);
    memory_free(t->device[0], p);
    memory_free(t->device[1], q);
}

/* ---- feeding ---- */

#define RECORDS      600
#define RECORD_BYTES 5000

/* Sealed chunks, decoded on the host, come to the device; the records of a batch are one tensor there. */
static void imported_records_come_as_tensors_of_the_device(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    char path[300];
    static uint8_t records[RECORDS][RECORD_BYTES];
    trainer_bytes(records[0], sizeof records, 17);
    snprintf(path, sizeof path, "%s/records.bin", server.folder);
    FILE *file = fopen(path, "wb");
    assert_true(file && fwrite(records, sizeof records, 1, file) == 1 && fclose(file) == 0);
    const char *files[] = {path, NULL};
    struct larder_import_options io = LARDER_INIT(larder_import_options);
    io.dataset = "records";
    io.files = files;
    io.format = LARDER_SHARD_RECORDS;
    io.record_bytes = RECORD_BYTES;
    uint64_t version;
    GOOD(larder_dataset_import(t->client, &io, &version, &e));
    struct larder_feed_options o = LARDER_INIT(larder_feed_options);
    struct larder_feed *f = NULL;
    struct larder_batch *b;
    o.dataset = "records";
    o.global_batch = 60;
    o.contiguous = 1;
    o.memory = LARDER_MEMORY_CUDA;
    o.device = 1;
    o.device_depth_bytes = 2u << 20;
    GOOD(larder_feed_open(t->client, &o, &f, &e));
    unsigned batches = 0;
    while (larder_feed_next(f, 20000, &b, &e) == 1) {
        struct DLManagedTensor *x = NULL;
        GOOD(larder_batch_wait(b, trainer_stream(t, 1), &e));
        GOOD(larder_batch_dlpack(b, LARDER_ALL_SAMPLES, "bin", &x, &e));
        const struct dl_tensor *d = &x->dl_tensor;
        assert_true(d->ndim == 2 && d->shape[0] == 60 && d->shape[1] == RECORD_BYTES);
        assert_true(d->device.device_type == DL_CUDA && d->device.device_id == 1);
        trainer_wait(t, 1);
        const uint8_t *rows = cuda->standin_peek(d->data);
        for (unsigned i = 0; i < 60; i++) {
            struct larder_sample s;
            assert_int_equal(larder_batch_sample(b, i, &s), 0);
            assert_ptr_equal(s.field[0].data, (uint8_t *)d->data + i * RECORD_BYTES);
            assert_memory_equal(rows + i * RECORD_BYTES, records[s.number], RECORD_BYTES);
        }
        larder_batch_release(b);
        x->deleter(x);
        batches++;
    }
    assert_int_equal(batches, RECORDS / 60);
    larder_feed_close(f);
}

/* ---- what is refused ---- */

/* Devices that are named when the client is opened: their registration is not what the first save waits for.
 */
static void named_devices_are_opened_with_the_client(void **state)
{
    (void)state;
    struct larder_error e;
    struct standin_counts n;
    char credentials[320];
    int devices[] = {1, 0};
    struct larder *c = NULL;
    struct larder_options o = LARDER_INIT(larder_options);
    daemon_credentials(&server, "writer", credentials, sizeof credentials);
    o.credentials = credentials;
    o.staging_bytes = 8u << 20;
    o.devices = devices;
    o.device_count = 2;
    cuda->standin_counts(&n);
    size_t before = n.registered_bytes;
    GOOD(larder_open(&o, &c, &e));
    cuda->standin_counts(&n);
    assert_true(n.registered_bytes - before >= 8u << 20);
    GOOD(larder_close(c, -1, &e));
    devices[1] = 9;
    assert_int_equal(larder_open(&o, &c, &e), -ENOENT);
    assert_non_null(strstr(e.text, "there is no CUDA device 9"));
    cuda->standin_counts(&n);
    assert_int_equal(n.registered_bytes, before);
}

static void refused(struct larder_save *s, struct larder_tensor x, const char *why)
{
    struct larder_error e;
    assert_true(larder_save_tensor(s, &x, &e) < 0);
    if (!strstr(e.text, why))
        fail_msg("\"%s\" does not say \"%s\"", e.text, why);
}

static void wrong_pointers_are_named(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    static uint8_t host[1000];
    uint8_t *p = trainer_memory(t, 0, 1000), *q = trainer_memory(t, 1, 1000);
    struct larder_save *s = trainer_save(t->client, "wrong", 1, 0, 1);
    struct larder_tensor good = trainer_tensor(t, "good", 0, p, 1000);
    GOOD(larder_save_tensor(s, &good, &e));
    struct larder_tensor x = good;
    x.name = "x";
    x.data = host;
    refused(s, x, "tensor \"x\": ");
    refused(s, x, "host memory");
    x.data = q;
    x.stream = trainer_stream(t, 1); /* which must not be left behind in the save */
    refused(s, x, "device 1");
    x.data = p;
    x.stream = good.stream;
    x.shape[0] = 1 << 20;
    refused(s, x, "tensor \"x\": ");
    x.shape[0] = 1000;
    x.strides[0] = -1; /* reaches before the allocation */
    refused(s, x, "tensor \"x\": ");
    x.strides[0] = 0;
    x.device = 2;
    refused(s, x, "there is no CUDA device 2");
    x.device = -1;
    refused(s, x, "there is no CUDA device -1");
    x.memory = (enum larder_memory)7;
    refused(s, x, "memory is 7; expected 0 (host) or 1 (CUDA)");
    x.memory = LARDER_MEMORY_HOST;
    refused(s, x, "it lies on CUDA device 0, not in host memory");
    cu_context other = cuda->standin_context(0), now;
    cu_ptr elsewhere;
    assert_int_equal(cuda->cuCtxPushCurrent_v2(other), CU_OK);
    assert_int_equal(cuda->cuMemAlloc_v2(&elsewhere, 1000), CU_OK);
    x.memory = LARDER_MEMORY_CUDA;
    x.device = 0;
    x.data = (void *)(uintptr_t)elsewhere;
    refused(s, x, "context");
    assert_int_equal(cuda->cuMemFree_v2(elsewhere), CU_OK);
    assert_int_equal(cuda->cuCtxPopCurrent_v2(&now), CU_OK);
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_fence_stream(s, 7, NULL, &e)); /* nothing of that device */
    GOOD(larder_save_wait(s, -1, &e));
    larder_save_free(s);

    s = trainer_save(t->client, "wrong", 2, 0,
                     1); /* a stream of another device: told by submit, and all ranks */
    x = good;
    x.stream = trainer_stream(t, 1);
    GOOD(larder_save_tensor(s, &x, &e));
    assert_int_equal(larder_save_submit(s, &e), -EINVAL);
    assert_non_null(strstr(e.text, "a stream of device 0"));
    assert_int_equal(larder_save_wait(s, -1, &e), -EINVAL);
    larder_save_free(s);

    struct larder_restore *r = trainer_restore(t->client, "wrong");
    x = good;
    x.data = q;
    assert_true(larder_restore_add(r, &x, &e) < 0);
    assert_non_null(strstr(e.text, "device 1"));
    x.data = p + 1;
    assert_true(larder_restore_add(r, &x, &e) < 0);
    x.memory = LARDER_MEMORY_HOST;
    assert_true(larder_restore_add(r, &x, &e) < 0);
    assert_non_null(strstr(e.text, "not in host memory"));
    larder_restore_close(r);
    memory_free(t->device[0], p);
    memory_free(t->device[1], q);
}

/* By a client that has met no device yet. */
static void device_memory_that_is_called_host_memory_is_named(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    uint8_t *p = trainer_memory(t, 0, 1000), byte = 7;
    struct larder_save *s = trainer_save(t->client, "called", 1, 0, 1);
    struct larder_tensor x = {.name = "x", .dtype = LARDER_U8, .dims = 1, .shape = {1000}, .data = p};
    refused(s, x, "tensor \"x\": it lies on CUDA device 0, not in host memory");
    assert_int_equal(larder_save_blob(s, "b", p, 1000, &e), -EINVAL);
    assert_non_null(strstr(e.text, "blob \"b\": it lies on CUDA device 0"));
    x.shape[0] = 1;
    x.data = &byte;
    GOOD(larder_save_tensor(s, &x, &e));
    GOOD(larder_save_blob(s, "b", &byte, 1, &e));
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_wait(s, -1, &e));
    larder_save_free(s);
    struct larder_restore *r = trainer_restore(t->client, "called");
    x.data = p;
    assert_int_equal(larder_restore_add(r, &x, &e), -EINVAL);
    assert_non_null(strstr(e.text, "it lies on CUDA device 0, not in host memory"));
    larder_restore_close(r);
    memory_free(t->device[0], p);
}

/* ---- where there is no device ---- */

/* In a process of its own, since a process looks for the driver once: what saving from device memory says. */
static void text_of(const char *settings, char *out, size_t size)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct larder_error e = {0};
        (void)standin_load(settings);
        struct larder *c = daemon_client(&server, "writer");
        struct larder_save *s = trainer_save(c, "none", 1, 0, 1);
        struct larder_tensor x = {.name = "x", .dtype = LARDER_U8, .data = out, .memory = LARDER_MEMORY_CUDA};
        int rc = larder_save_tensor(s, &x, &e);
        ssize_t n = write(ends[1], e.text, strlen(e.text));
        struct larder_tensor y = {.name = "y", .dtype = LARDER_U8, .data = out};
        _exit(rc < 0 && n > 0 && larder_save_tensor(s, &y, &e) == 0 ? 0 : 1);
    }
    close(ends[1]);
    ssize_t n = read(ends[0], out, size - 1);
    close(ends[0]);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    out[n > 0 ? n : 0] = 0;
}

static void no_device_and_an_old_driver_are_told(void **state)
{
    (void)state;
    char text[600];
    text_of("version=11000", text, sizeof text);
    if (!strstr(text, "tensor \"x\"") || !strstr(text, "11.0"))
        fail_msg("%s", text);
    text_of("devices=0", text, sizeof text);
    if (!strstr(text, "tensor \"x\"") || !strstr(text, "device"))
        fail_msg("%s", text);
    cuda = standin_load(TRAINER_SETTINGS); /* for all that follow */
}

static int start_server(void **state)
{
    (void)state;
    daemon_start(&server);
    return 0;
}

static int stop_server(void **state)
{
    (void)state;
    daemon_stop(&server);
    return 0;
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_device_and_an_old_driver_are_told),
        TEST(any_tensor_of_any_memory_comes_back),
        TEST(copies_come_between_what_was_given_before_and_after),
        TEST(a_restore_comes_after_the_stream),
        TEST(the_source_may_change_after_every_fence),
        TEST(imported_records_come_as_tensors_of_the_device),
        TEST(named_devices_are_opened_with_the_client),
        TEST(wrong_pointers_are_named),
        TEST(device_memory_that_is_called_host_memory_is_named),
    };
    return cmocka_run_group_tests(tests, start_server, stop_server);
}
