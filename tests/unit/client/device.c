/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: tensors on devices are saved as they were when they were handed over, however late and in whatever
 * order the device copies, and come back into any device's memory; what goes wrong on a device fails the save
 * on all ranks with its cause, and the trainer goes on. Method: a real larderd, and a stand-in for CUDA's
 * driver whose copies are late and in chance order across streams, and whose memory the processor cannot
 * touch.
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

#include "client/larder.h"
#include "tests/support/daemon.h"
#include "tests/support/standin.h"

#define SETTINGS "devices=2 memory=256M seed=11 delay_us=200"
#define DEVICES  2

static const struct standin *cuda;
static struct daemon server;

#define GOOD(call)                                     \
    do {                                               \
        int rc_ = (call);                              \
        if (rc_ < 0)                                   \
            fail_msg("%s: %d %s", #call, rc_, e.text); \
    } while (0)

/* ---- a trainer ---- */

struct trainer {
    struct memory *device[DEVICES];
    struct memory_stream *stream[DEVICES];
    struct larder *client;
    bool keeps; /* the test lets something stay */
};

static int setup(void **state)
{
    struct trainer *t = calloc(1, sizeof *t);
    cuda->standin_reset();
    for (int i = 0; i < DEVICES; i++) {
        assert_int_equal(memory_open(MEMORY_CUDA, i, &t->device[i], NULL), 0);
        assert_int_equal(memory_stream_create(t->device[i], &t->stream[i], NULL), 0);
    }
    t->client = daemon_client(&server, "writer");
    *state = t;
    return 0;
}

/* Whatever was done, nothing is left on any device. */
static int teardown(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    struct standin_counts n;
    bool lost = false;
    (void)larder_close(t->client, -1, &e);
    for (int i = 0; i < DEVICES; i++) {
        lost |= memory_stream_wait(t->stream[i], 20000, NULL) < 0;
        memory_stream_destroy(t->stream[i]);
        memory_close(t->device[i]);
    }
    cuda->standin_counts(&n);
    if (!lost && !t->keeps && n.allocations + n.registrations + n.streams + n.events + n.lost_handles > 0)
        fail_msg(
            "left: %zu allocations, %zu registrations, %zu streams, %zu events, %zu handles, %zu contexts",
            n.allocations, n.registrations, n.streams, n.events, n.lost_handles, n.contexts);
    free(t);
    return 0;
}

static void *raw(const struct trainer *t, int device)
{
    return memory_stream_handle(t->stream[device]);
}

static uint8_t *device_memory(struct trainer *t, int device, size_t n)
{
    void *p;
    struct err e;
    if (memory_alloc(t->device[device], n, &p, &e) < 0)
        fail_msg("%s", e.text);
    memset(cuda->standin_peek(p), 0xcc, n);
    return p;
}

/* Given to the trainer's stream: done late. */
static void fill_later(struct trainer *t, int device, uint8_t *p, uint8_t value, size_t n)
{
    cu_context c;
    assert_int_equal(cuda->cuDevicePrimaryCtxRetain(&c, device), CU_OK);
    assert_int_equal(cuda->cuCtxPushCurrent_v2(c), CU_OK);
    assert_int_equal(cuda->cuMemsetD8Async((cu_ptr)(uintptr_t)p, value, n, raw(t, device)), CU_OK);
    assert_int_equal(cuda->cuCtxPopCurrent_v2(&c), CU_OK);
    assert_int_equal(cuda->cuDevicePrimaryCtxRelease_v2(device), CU_OK);
}

static void synchronize(struct trainer *t, int device)
{
    struct err e;
    if (memory_stream_wait(t->stream[device], 20000, &e) < 0)
        fail_msg("%s", e.text);
}

static void fill(uint8_t *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        p[i] = (uint8_t)(seed >> 56);
    }
}

static struct larder_save *begin(struct larder *c, const char *run, uint64_t step, uint32_t rank,
                                 uint32_t world)
{
    struct larder_error e;
    struct larder_save *s = NULL;
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    o.run = run;
    o.step = step;
    o.rank = rank;
    o.world = world;
    o.attempt[0] = 1;
    GOOD(larder_save_begin(c, &o, &s, &e));
    return s;
}

static struct larder_restore *open_latest(struct larder *c, const char *run)
{
    struct larder_error e;
    struct larder_restore *r = NULL;
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    o.run = run;
    GOOD(larder_restore_open(c, &o, &r, &e));
    return r;
}

static struct larder_tensor bytes_on(struct trainer *t, const char *name, int device, void *p, uint64_t n)
{
    return (struct larder_tensor){.name = name,
                                  .dtype = LARDER_U8,
                                  .dims = 1,
                                  .shape = {n},
                                  .data = p,
                                  .memory = LARDER_MEMORY_CUDA,
                                  .device = device,
                                  .stream = raw(t, device)};
}

/* Reads one tensor of bytes of the newest checkpoint into host memory. */
static void read_back(struct larder *c, const char *run, const char *name, uint8_t *out)
{
    struct larder_error e;
    struct larder_restore *r = open_latest(c, run);
    struct larder_tensor t = {.name = name, .dtype = LARDER_U8, .dims = 1, .data = out};
    GOOD(larder_restore_add(r, &t, &e));
    GOOD(larder_restore_run(r, &e));
    larder_restore_close(r);
}

static void all_are(const uint8_t *p, uint8_t value, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] != value)
            fail_msg("byte %zu is %u, expected %u", i, p[i], value);
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
    uint8_t *large = device_memory(t, 0, LARGE), *expected = malloc(LARGE), *back = malloc(LARGE);
    float *matrix = (void *)device_memory(t, 1, ROWS * PITCH * 4);
    uint8_t *small = device_memory(t, 0, SMALL * 100);
    float *row = (void *)device_memory(t, 1, 3 * sizeof(float));
    fill(expected, LARGE, 1);
    memcpy(cuda->standin_peek(large), expected, LARGE);
    for (int i = 0; i < ROWS; i++)
        for (int k = 0; k < COLUMNS; k++)
            ((float *)cuda->standin_peek(matrix))[i * PITCH + k] = host[i][k] = (float)(i * COLUMNS + k);
    memcpy(cuda->standin_peek(small), expected, SMALL * 100);
    memcpy(cuda->standin_peek(row), (float[]){1, 2, 3}, 12);
    struct larder_save *s = begin(t->client, "any", 1, 0, 1);
    struct larder_tensor x = bytes_on(t, "large", 0, large, LARGE);
    GOOD(larder_save_tensor(s, &x, &e));
    struct larder_tensor m = {.name = "padded",
                              .dtype = LARDER_F32,
                              .dims = 2,
                              .shape = {ROWS, COLUMNS},
                              .strides = {PITCH, 1},
                              .data = matrix,
                              .memory = LARDER_MEMORY_CUDA,
                              .device = 1,
                              .stream = raw(t, 1)};
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
        x = bytes_on(t, name, 0, small + 100 * i, 100);
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

    struct larder_restore *r = open_latest(t->client, "any");
    uint8_t *large2 = device_memory(t, 1, LARGE), *small2 = device_memory(t, 0, SMALL * 100);
    float *turned = (void *)device_memory(t, 0, COLUMNS * 512 * 4), *three = (void *)device_memory(t, 0, 64);
    x = bytes_on(t, "large", 1, large2, LARGE);
    GOOD(larder_restore_add(r, &x, &e));
    m = (struct larder_tensor){.name = "padded", /* into the transposed place, padded, on the other device */
                               .dtype = LARDER_F32,
                               .dims = 2,
                               .shape = {ROWS, COLUMNS},
                               .strides = {1, 512},
                               .data = turned,
                               .memory = LARDER_MEMORY_CUDA,
                               .stream = raw(t, 0)};
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
        x = bytes_on(t, name, 0, small2 + 100 * (SMALL - 1 - i), 100);
        GOOD(larder_restore_add(r, &x, &e));
    }
    fill_later(t, 1, large2, 7, LARGE); /* comes before the copies */
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
    uint8_t *p = device_memory(t, 0, BYTES), *q = device_memory(t, 1, BYTES), *back = malloc(BYTES);
    for (uint8_t round = 1; round <= 12; round++) {
        cuda->standin_hold(raw(t, 0)); /* the step before is still computed */
        fill_later(t, 0, p, round, BYTES);
        fill_later(t, 1, q, (uint8_t)(100 + round), BYTES);
        struct larder_save *s = begin(t->client, "order", round, 0, 1);
        struct larder_tensor x = bytes_on(t, "p", 0, p, BYTES), y = bytes_on(t, "q", 1, q, BYTES);
        GOOD(larder_save_tensor(s, &x, &e));
        GOOD(larder_save_tensor(s, &y, &e));
        GOOD(larder_save_submit(s, &e)); /* does not wait for it */
        assert_int_equal(larder_save_fence(s, 20, &e), -ETIMEDOUT);
        struct larder_save_info info = LARDER_INIT(larder_save_info);
        assert_int_equal(larder_save_info(s, &info), 0);
        assert_int_equal(info.state, LARDER_SAVE_OPEN);
        if (round % 2) {
            GOOD(larder_save_fence_stream(s, 0, raw(t, 0), &e));
            fill_later(t, 0, p, 0xee, BYTES); /* behind the copies, whenever they come */
            GOOD(larder_save_fence_stream(s, 1, raw(t, 1), &e));
            fill_later(t, 1, q, 0xee, BYTES);
            cuda->standin_release(raw(t, 0));
        } else {
            cuda->standin_release(raw(t, 0));
            GOOD(larder_save_fence(s, -1, &e));
            memset(cuda->standin_peek(p), 0xee, BYTES);
            memset(cuda->standin_peek(q), 0xee, BYTES);
        }
        GOOD(larder_save_wait(s, -1, &e));
        GOOD(larder_save_fence_stream(s, 0, raw(t, 0), &e)); /* nothing to wait for any more */
        larder_save_free(s);
        synchronize(t, 0);
        synchronize(t, 1);
        all_are(cuda->standin_peek(p), 0xee, BYTES); /* the trainer was not disturbed */
        read_back(t->client, "order", "p", back);
        all_are(back, round, BYTES);
        read_back(t->client, "order", "q", back);
        all_are(back, (uint8_t)(100 + round), BYTES);
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
    uint8_t *p = device_memory(t, 1, BYTES);
    fill_later(t, 1, p, 5, BYTES);
    struct larder_save *s = begin(t->client, "after", 1, 0, 1);
    struct larder_tensor x = bytes_on(t, "p", 1, p, BYTES);
    GOOD(larder_save_tensor(s, &x, &e));
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_wait(s, -1, &e));
    larder_save_free(s);
    struct restoring g = {.r = open_latest(t->client, "after")};
    GOOD(larder_restore_add(g.r, &x, &e));
    cuda->standin_hold(raw(t, 1));
    fill_later(t, 1, p, 6, BYTES);
    pthread_t thread;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec++;
    pthread_create(&thread, NULL, run_restore, &g);
    assert_int_equal(pthread_timedjoin_np(thread, NULL, &until), ETIMEDOUT);
    all_are(cuda->standin_peek(p), 5, BYTES);
    cuda->standin_release(raw(t, 1));
    pthread_join(thread, NULL);
    e = g.e;
    GOOD(g.rc);
    all_are(cuda->standin_peek(p), 5, BYTES); /* and no 6 */
    synchronize(t, 1);
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
    uint8_t *p = device_memory(t, 0, BYTES), *q = device_memory(t, 1, BIG), *back = malloc(BIG);
    fill_later(t, 0, p, 1, BYTES);
    fill_later(t, 1, q, 2, BIG);
    for (unsigned i = 1; i <= saves; i++) {
        struct larder_save *s = begin(t->client, "often", i, 0, 1);
        struct larder_tensor x = bytes_on(t, "p", 0, p, BYTES);
        GOOD(larder_save_tensor(s, &x, &e));
        bool big = i % 10 == 0; /* and its model is offloaded and loaded again: S12 */
        if (big) {
            struct larder_tensor y = bytes_on(t, "q", 1, q, BIG);
            GOOD(larder_save_tensor(s, &y, &e));
        }
        GOOD(larder_save_submit(s, &e));
        if (i % 2)
            GOOD(larder_save_fence_stream(s, 0, raw(t, 0), &e));
        else
            GOOD(larder_save_fence(s, -1, &e));
        fill_later(t, 0, p, (uint8_t)(i + 1), BYTES);
        if (big) {
            GOOD(larder_save_fence(s, -1, &e));
            memory_free(t->device[1], q);
            q = device_memory(t, 1, BIG);
            fill_later(t, 1, q, (uint8_t)(i + 2), BIG);
        }
        GOOD(larder_save_wait(s, -1, &e));
        larder_save_free(s);
        read_back(t->client, "often", "p", back);
        all_are(back, (uint8_t)i, BYTES);
        if (big) {
            read_back(t->client, "often", "q", back);
            all_are(back, (uint8_t)(i == 10 ? 2 : i - 8), BIG);
        }
    }
    synchronize(t, 0);
    synchronize(t, 1);
    free(back);
    memory_free(t->device[0], p);
    memory_free(t->device[1], q);
}

/* ---- what is refused ---- */

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
    uint8_t *p = device_memory(t, 0, 1000), *q = device_memory(t, 1, 1000);
    struct larder_save *s = begin(t->client, "wrong", 1, 0, 1);
    struct larder_tensor good = bytes_on(t, "good", 0, p, 1000);
    GOOD(larder_save_tensor(s, &good, &e));
    struct larder_tensor x = good;
    x.name = "x";
    x.data = host;
    refused(s, x, "tensor \"x\": ");
    refused(s, x, "host memory");
    x.data = q;
    refused(s, x, "device 1");
    x.data = p;
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

    s = begin(t->client, "wrong", 2, 0, 1); /* a stream of another device: told by submit, and all ranks */
    x = good;
    x.stream = raw(t, 1);
    GOOD(larder_save_tensor(s, &x, &e));
    assert_int_equal(larder_save_submit(s, &e), -EINVAL);
    assert_non_null(strstr(e.text, "a stream of device 0"));
    assert_int_equal(larder_save_wait(s, -1, &e), -EINVAL);
    larder_save_free(s);

    struct larder_restore *r = open_latest(t->client, "wrong");
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

/* ---- failures ---- */

struct other { /* rank 1, of host memory */
    pthread_t thread;
    uint64_t step;
    int rc;
    struct larder_error e;
};

static void *save_other(void *arg)
{
    struct other *k = arg;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    struct larder_save *s = begin(c, "failing", k->step, 1, 2);
    uint8_t byte = 7;
    struct larder_tensor x = {.name = "own", .dtype = LARDER_U8, .data = &byte};
    GOOD(larder_save_tensor(s, &x, &e));
    k->rc = larder_save_submit(s, &k->e);
    if (k->rc == 0)
        k->rc = larder_save_wait(s, -1, &k->e);
    larder_save_free(s);
    GOOD(larder_close(c, -1, &e));
    return NULL;
}

/* Rank 0 of two, with device memory and more of it than the staging memory holds. */
static int save_two(struct trainer *t, uint64_t step, uint8_t *p, size_t n, const char *failure,
                    struct larder_error *e, struct other *other)
{
    struct larder_save *s = begin(t->client, "failing", step, 0, 2);
    *other = (struct other){.step = step};
    pthread_create(&other->thread, NULL, save_other, other);
    struct larder_tensor x = bytes_on(t, "p", 0, p, n), y = bytes_on(t, "y", 0, p + 100, 50);
    int rc = larder_save_tensor(s, &x, e);
    if (rc == 0)
        rc = larder_save_tensor(s, &y, e);
    if (failure)
        cuda->standin_configure(failure);
    if (rc == 0)
        rc = larder_save_submit(s, e);
    if (rc == 0 && larder_save_fence(s, -1, e) == 0)
        fill_later(t, 0, p, 0xee, n);
    if (rc == 0)
        rc = larder_save_wait(s, -1, e);
    else
        (void)larder_save_cancel(s, e->text, &(struct larder_error){0}); /* where it did not come to submit */
    larder_save_free(s);
    pthread_join(other->thread, NULL);
    return rc;
}

/* Whatever call fails, once, at whatever moment of a save: it fails on both ranks with the cause, and the
 * next one is good. */
static void a_failed_call_fails_the_save_on_all_ranks(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    struct other other;
    enum { BYTES = 26u << 20 };
    static const char *const calls[] = {"cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuStreamWaitEvent",
                                        "cuEventCreate", "cuEventQuery"};
    uint8_t *p = device_memory(t, 0, BYTES), *back = malloc(BYTES);
    uint64_t step = 0;
    for (unsigned call = 0; call < sizeof calls / sizeof *calls; call++)
        for (unsigned at = 1; at <= 4; at += 1 + call % 2) {
            char failure[64];
            int rc = 0;
            snprintf(failure, sizeof failure, "fail=%s:%u:2", calls[call], at); /* out of memory */
            for (int tries = 0; rc == 0 && tries < 6; tries++) /* until it has made so many of these calls */
                rc = save_two(t, ++step, p, BYTES, tries == 0 ? failure : NULL, &e, &other);
            if (rc == 0 || !strstr(e.text, "OUT_OF_MEMORY"))
                fail_msg("%s: %d %s", failure, rc, e.text);
            if (other.rc == 0 || !strstr(other.e.text, "rank 0 gave up") ||
                !strstr(other.e.text, "OUT_OF_MEMORY"))
                fail_msg("%s: the other rank hears %d %s", failure, other.rc, other.e.text);
            fill_later(t, 0, p, (uint8_t)step, BYTES);
            if (save_two(t, ++step, p, BYTES, NULL, &e, &other) < 0)
                fail_msg("after %s: %s", failure, e.text);
            read_back(t->client, "failing", "p", back);
            all_are(back, (uint8_t)(step - 1), BYTES);
        }
    synchronize(t, 0);
    free(back);
    memory_free(t->device[0], p);
}

static void refused_registrations_and_streams_are_told(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    uint8_t *p = device_memory(t, 0, 1000);
    struct larder_tensor x = bytes_on(t, "x", 0, p, 1000);
    struct larder_save *s = begin(t->client, "refused", 1, 0, 1);
    cuda->standin_configure("fail=cuStreamCreateWithPriority:1:2");
    refused(s, x, "tensor \"x\": device 0");
    cuda->standin_configure("fail=cuMemHostRegister_v2:0:2");
    refused(s, x, "OUT_OF_MEMORY");
    struct larder_info info = LARDER_INIT(larder_info);
    GOOD(larder_info(t->client, &info, &e));
    larder_save_free(s);
    memory_free(t->device[0], p);
}

/* The device is gone in the middle of a save: all ranks hear it, what is on the host is saved on. */
static void a_lost_device_is_told_and_the_host_goes_on(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    struct other other;
    enum { BYTES = 30u << 20 };
    uint8_t *p = device_memory(t, 0, BYTES), byte = 3, back = 0;
    assert_true(save_two(t, 1001, p, BYTES, "lose=0:4:700", &e, &other) < 0);
    assert_non_null(strstr(e.text, "ILLEGAL_ADDRESS"));
    assert_true(other.rc < 0);
    assert_non_null(strstr(other.e.text, "ILLEGAL_ADDRESS"));
    assert_true(save_two(t, 1002, p, BYTES, NULL, &e, &other) < 0); /* and it stays so */
    assert_non_null(strstr(e.text, "ILLEGAL_ADDRESS"));
    struct larder_save *s = begin(t->client, "host", 1, 0, 1);
    struct larder_tensor x = {.name = "byte", .dtype = LARDER_U8, .dims = 1, .shape = {1}, .data = &byte};
    GOOD(larder_save_tensor(s, &x, &e));
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_wait(s, -1, &e));
    larder_save_free(s);
    read_back(t->client, "host", "byte", &back);
    assert_int_equal(back, 3);
    struct larder_restore *r = open_latest(t->client, "host");
    x = bytes_on(t, "byte", 0, p, 1);
    assert_true(larder_restore_add(r, &x, &e) < 0);
    assert_non_null(strstr(e.text, "ILLEGAL_ADDRESS"));
    larder_restore_close(r);
    memory_free(t->device[0], p);
}

static void a_restore_that_fails_on_a_device_says_so(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    enum { BYTES = 30u << 20 };
    uint8_t *p = device_memory(t, 0, BYTES);
    fill_later(t, 0, p, 9, BYTES);
    struct larder_save *s = begin(t->client, "back", 1, 0, 1);
    struct larder_tensor x = bytes_on(t, "p", 0, p, BYTES);
    GOOD(larder_save_tensor(s, &x, &e));
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_wait(s, -1, &e));
    larder_save_free(s);
    static const char *const failures[] = {"fail=cuMemcpyHtoDAsync_v2:3:1", "register_total=20M",
                                           "fail=cuEventRecord:4:2", "fail=cuEventQuery:2:2", "lose=0:3:719"};
    for (unsigned i = 0; i < 5; i++) {
        struct larder_restore *r = open_latest(t->client, "back");
        fill_later(t, 0, p, 1, BYTES);
        synchronize(t, 0);
        GOOD(larder_restore_add(r, &x, &e));
        cuda->standin_configure(failures[i]);
        if (larder_restore_run(r, &e) == 0)
            fail_msg("%s: nothing failed", failures[i]);
        if (!strstr(e.text, i == 4 ? "LAUNCH_FAILED" : i == 0 ? "INVALID_VALUE" : "OUT_OF_MEMORY"))
            fail_msg("%s: %s", failures[i], e.text);
        larder_restore_close(r);
        cuda->standin_configure("register_total=4G");
        if (i == 4)
            break;
        r = open_latest(t->client, "back");
        GOOD(larder_restore_add(r, &x, &e));
        GOOD(larder_restore_run(r, &e));
        all_are(cuda->standin_peek(p), 9, BYTES);
        larder_restore_close(r);
    }
    memory_free(t->device[0], p);
}

/* A stream that never gets on: close gives up in bounded time, and keeps the memory that may still be
 * written. */
static void a_stream_that_hangs_does_not_hold_close(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    enum { BYTES = 5u << 20 };
    uint8_t *p = device_memory(t, 0, BYTES);
    struct larder *c = daemon_client(&server, "writer");
    struct larder_save *s = begin(c, "hangs", 5, 0, 1);
    struct larder_tensor x = bytes_on(t, "p", 0, p, BYTES);
    GOOD(larder_save_tensor(s, &x, &e));
    cuda->standin_hold(raw(t, 0));
    GOOD(larder_save_submit(s, &e));
    assert_int_equal(larder_save_fence(s, 20, &e), -ETIMEDOUT);
    larder_save_free(s);
    t->keeps = true;
    assert_int_equal(larder_close(c, 50, &e), -ETIMEDOUT);
    assert_non_null(strstr(e.text, "step 5 of hangs"));
    cuda->standin_release(raw(t, 0)); /* now they write: into memory that is nobody else's */
    synchronize(t, 0);
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
        struct larder_save *s = begin(c, "none", 1, 0, 1);
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
    cuda = standin_load(SETTINGS); /* for all that follow */
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
        TEST(wrong_pointers_are_named),
        TEST(a_failed_call_fails_the_save_on_all_ranks),
        TEST(refused_registrations_and_streams_are_told),
        TEST(a_lost_device_is_told_and_the_host_goes_on),
        TEST(a_restore_that_fails_on_a_device_says_so),
        TEST(a_stream_that_hangs_does_not_hold_close),
    };
    return cmocka_run_group_tests(tests, start_server, stop_server);
}
