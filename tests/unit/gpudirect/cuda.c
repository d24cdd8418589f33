/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: device memory does what memory.h says: copies complete late and in order, events order our streams
 * and the caller's, wrong pointers and streams are named, a lost device stays lost with its first cause, and
 * whichever call fails, nothing is left behind. On the stand-in for CUDA's driver, with two devices.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "gpudirect/strided.h"
#include "tests/support/standin.h"

#define BYTES     (64u << 10)
#define WAIT_MS   20000
#define SETTINGS  "devices=2 memory=16M seed=5 delay_us=400"
#define SOON_USEC 3000 /* longer than any delay of the stand-in */

static const struct standin *cuda;

/* ---- what the tests work with ---- */

struct bench {
    struct memory *m;
    struct memory_stream *s;
    uint8_t *device, *host; /* BYTES each; host is registered */
    cu_context context;
    cu_stream caller; /* a trainer's */
};

static void *pages(size_t n)
{
    void *p = NULL;
    assert_int_equal(posix_memalign(&p, 4096, n), 0);
    return p;
}

static cu_stream caller_stream(cu_context context)
{
    cu_stream s;
    assert_int_equal(cuda->cuCtxPushCurrent_v2(context), CU_OK);
    assert_int_equal(cuda->cuStreamCreateWithPriority(&s, CU_STREAM_FLAG_NON_BLOCKING, 0), CU_OK);
    assert_int_equal(cuda->cuCtxPopCurrent_v2(&context), CU_OK);
    return s;
}

static int setup(void **state)
{
    struct bench *b = calloc(1, sizeof *b);
    cuda->standin_reset();
    assert_int_equal(memory_open(MEMORY_CUDA, 0, &b->m, NULL), 0);
    assert_int_equal(memory_stream_create(b->m, &b->s, NULL), 0);
    assert_int_equal(memory_alloc(b->m, BYTES, (void **)&b->device, NULL), 0);
    b->host = pages(BYTES);
    assert_int_equal(memory_register(b->m, b->host, BYTES, NULL), 0);
    assert_int_equal(cuda->cuDevicePrimaryCtxRetain(&b->context, 0), CU_OK);
    b->caller = caller_stream(b->context);
    *state = b;
    return 0;
}

static void in_context(const struct bench *b)
{
    assert_int_equal(cuda->cuCtxPushCurrent_v2(b->context), CU_OK);
}

static void out_of_context(void)
{
    cu_context c;
    assert_int_equal(cuda->cuCtxPopCurrent_v2(&c), CU_OK);
}

/* Nothing may be left, and no thread may have another current context than before. */
static int teardown(void **state)
{
    struct bench *b = *state;
    struct standin_counts n;
    cu_context c;
    struct err e;
    bool lost = memory_lost(b->m, &e) < 0;
    memory_unregister(b->m, b->host);
    memory_free(b->m, b->device);
    memory_stream_destroy(b->s);
    memory_close(b->m);
    in_context(b);
    assert_true(cuda->cuStreamDestroy_v2(b->caller) == CU_OK || lost);
    out_of_context();
    assert_int_equal(cuda->cuCtxGetCurrent(&c), CU_OK);
    assert_null(c);
    assert_int_equal(cuda->cuDevicePrimaryCtxRelease_v2(0), CU_OK);
    cuda->standin_counts(&n);
    if (!lost) {
        assert_int_equal(n.lost_handles, 0);
        assert_int_equal(n.allocations + n.registrations + n.streams + n.events + n.modules, 0);
    }
    free(b->host);
    free(b);
    return 0;
}

static void fill(uint8_t *p, size_t n, unsigned seed)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)((i * 2654435761u >> 13) + seed);
}

static void assert_filled(const uint8_t *p, size_t n, unsigned seed)
{
    for (size_t i = 0; i < n; i++)
        assert_int_equal(p[i], (uint8_t)((i * 2654435761u >> 13) + seed));
}

static uint8_t *peek(const void *device)
{
    uint8_t *p = cuda->standin_peek(device);
    assert_non_null(p);
    return p;
}

/* ---- what there is ---- */

static void devices_are_described(void **state)
{
    struct memory_probe p;
    struct memory_info i;
    struct err e;
    (void)state;
    memory_probe(MEMORY_CUDA, &p);
    assert_true(p.usable);
    assert_int_equal(p.devices, 2);
    assert_int_equal(p.driver_version, 13000);
    assert_string_equal(p.note, "CUDA 13.0, 2 devices");
    assert_int_equal(memory_describe(MEMORY_CUDA, 1, &i, NULL), 0);
    assert_string_equal(i.name, "Stand-in 1");
    assert_string_equal(i.bus, "ffff:11:00.0");
    assert_int_equal(i.bytes, 16u << 20);
    assert_int_equal(i.numa_node, -1);
    assert_int_equal(i.major, 9);
    assert_int_equal(memory_describe(MEMORY_CUDA, 2, &i, &e), -ENOENT);
    assert_non_null(strstr(e.text, "no CUDA device 2; this process sees 2"));
}

static void a_device_may_be_open_several_times(void **state)
{
    struct bench *b = *state;
    struct memory *again = NULL, *other = NULL;
    struct standin_counts n;
    assert_int_equal(memory_open(MEMORY_CUDA, 0, &again, NULL), 0);
    assert_int_equal(memory_open(MEMORY_CUDA, 1, &other, NULL), 0);
    cuda->standin_counts(&n);
    assert_int_equal(n.contexts, 2);
    assert_int_equal(memory_ordinal(other), 1);
    assert_int_equal(memory_kind(other), MEMORY_CUDA);
    assert_int_equal(memory_info(other)->bytes, 16u << 20);
    memory_close(again);
    memory_close(other);
    assert_int_equal(memory_check(b->m, b->device, BYTES, NULL), 0); /* not reset by closing the other */
}

static void the_current_context_is_given_back(void **state)
{
    struct bench *b = *state;
    cu_context other = cuda->standin_context(1), now;
    assert_int_equal(cuda->cuCtxSetCurrent(other), CU_OK);
    assert_int_equal(memory_copy(b->s, MEMORY_OUT, b->host, b->device, BYTES, NULL), 0);
    assert_int_equal(memory_copy(b->s, MEMORY_OUT, b->host, b->device + BYTES, BYTES, NULL), -EINVAL);
    assert_int_equal(memory_stream_wait(b->s, WAIT_MS, NULL), 0);
    assert_int_equal(cuda->cuCtxGetCurrent(&now), CU_OK);
    assert_ptr_equal(now, other);
    assert_int_equal(cuda->cuCtxSetCurrent(NULL), CU_OK);
}

/* ---- copies ---- */

static void device_memory_is_out_of_the_processors_reach(void **state)
{
    struct bench *b = *state;
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        fclose(stderr);           /* of what a sanitizer says */
        signal(SIGSEGV, SIG_DFL); /* not the test library's */
        (void)*(volatile uint8_t *)b->device;
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_false(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void copies_are_late_and_right(void **state)
{
    struct bench *b = *state;
    struct memory_event *v = NULL;
    uint8_t *second = NULL;
    assert_int_equal(memory_event_create(b->m, &v, NULL), 0);
    assert_int_equal(memory_event_query(v, NULL), 1); /* never recorded */
    assert_int_equal(memory_alloc(b->m, BYTES, (void **)&second, NULL), 0);
    cuda->standin_hold(memory_stream_handle(b->s));
    fill(b->host, BYTES, 7);
    assert_int_equal(memory_copy(b->s, MEMORY_IN, b->device, b->host, BYTES, NULL), 0);
    assert_int_equal(memory_copy(b->s, MEMORY_WITHIN, second, b->device, BYTES, NULL), 0);
    assert_int_equal(memory_event_record(v, b->s, NULL), 0);
    usleep(SOON_USEC);
    assert_int_equal(memory_event_query(v, NULL), 0);
    cuda->standin_release(memory_stream_handle(b->s));
    assert_int_equal(memory_event_wait(v, WAIT_MS, NULL), 0);
    assert_int_equal(memory_event_query(v, NULL), 1);
    assert_filled(peek(second), BYTES, 7);
    memset(b->host, 0, BYTES);
    assert_int_equal(memory_copy(b->s, MEMORY_OUT, b->host, second, BYTES, NULL), 0);
    assert_int_equal(memory_stream_wait(b->s, WAIT_MS, NULL), 0);
    assert_filled(b->host, BYTES, 7);
    memory_free(b->m, second);
    memory_event_destroy(v);
}

static void one_stream_keeps_its_order(void **state)
{
    struct bench *b = *state;
    for (unsigned i = 0; i < 200; i++) { /* a byte wanders from one end to the other and counts its steps */
        b->host[i] = (uint8_t)i;
        assert_int_equal(memory_copy(b->s, MEMORY_IN, b->device + i, b->host + i, 1, NULL), 0);
        if (i > 0)
            assert_int_equal(memory_copy(b->s, MEMORY_WITHIN, b->device + BYTES - 1, b->device + i, 1, NULL),
                             0);
    }
    assert_int_equal(memory_copy(b->s, MEMORY_OUT, b->host + BYTES - 1, b->device + BYTES - 1, 1, NULL), 0);
    assert_int_equal(memory_stream_wait(b->s, WAIT_MS, NULL), 0);
    assert_int_equal(b->host[BYTES - 1], 199);
}

static void a_wait_has_an_end(void **state)
{
    struct bench *b = *state;
    struct err e;
    cuda->standin_hold(memory_stream_handle(b->s));
    assert_int_equal(memory_stream_wait(b->s, 20, &e), -ETIMEDOUT);
    assert_int_equal(e.class, ERR_TIMEOUT);
    assert_non_null(strstr(e.text, "CUDA device 0 did not finish in 20 ms"));
    cuda->standin_release(memory_stream_handle(b->s));
    assert_int_equal(memory_stream_wait(b->s, WAIT_MS, NULL), 0);
}

/* The call copies it itself: its memory may change at once. */
static void unregistered_memory_is_copied_in_the_call(void **state)
{
    struct bench *b = *state;
    struct standin_counts n;
    uint8_t *plain = malloc(BYTES);
    fill(plain, BYTES, 3);
    assert_int_equal(memory_copy(b->s, MEMORY_IN, b->device, plain, BYTES, NULL), 0);
    memset(plain, 0, BYTES);
    assert_int_equal(memory_copy(b->s, MEMORY_OUT, plain, b->device, BYTES, NULL), 0);
    assert_filled(plain, BYTES, 3);
    cuda->standin_counts(&n);
    assert_int_equal(n.pageable_copies, 2);
    free(plain);
}

static size_t below(unsigned *seed, size_t n)
{
    return (size_t)rand_r(seed) % n;
}

/* A box of chance, with both sides below BYTES; half of them cannot be done by one copy. */
static struct memory_box some_box(unsigned *seed)
{
    struct memory_box b = {
        .row_bytes = 1 + below(seed, 60), .rows = 1 + below(seed, 5), .slices = 1 + below(seed, 4)};
    size_t *pitch[] = {&b.to_pitch, &b.from_pitch}, *slice[] = {&b.to_slice, &b.from_slice};
    for (int side = 0; side < 2; side++) {
        *pitch[side] = b.row_bytes + (below(seed, 2) ? below(seed, 9) : 0);
        *slice[side] = *pitch[side] * (b.rows + below(seed, 3)) + (below(seed, 3) == 0 ? 1 : 0);
    }
    return b;
}

/* The same box, the same bytes, on the device and in host memory, are copied alike, or refused alike. */
static void boxes_are_copied_as_on_the_host(void **state)
{
    struct bench *b = *state;
    struct memory *host = NULL;
    struct memory_stream *hs = NULL;
    uint8_t *expected = pages(BYTES), *from = pages(BYTES);
    unsigned seed = 11, done = 0;
    assert_int_equal(memory_open(MEMORY_HOST, 0, &host, NULL), 0);
    assert_int_equal(memory_stream_create(host, &hs, NULL), 0);
    fill(from, BYTES, 1);
    for (int i = 0; i < 400; i++) {
        struct memory_box x = some_box(&seed), y = x;
        bool out = below(&seed, 2);
        assert_int_equal(memory_box_fits(b->m, &x), memory_box_fits(host, &x));
        if (!memory_box_fits(host, &x))
            continue;
        memset(expected, 0xee, BYTES);
        x.to = expected;
        x.from = from;
        assert_int_equal(memory_copy_box(hs, MEMORY_OUT, &x, NULL), 0);
        memset(out ? b->host : peek(b->device), 0xee, BYTES);
        memcpy(out ? peek(b->device) : b->host, from, BYTES);
        y.to = out ? b->host : b->device;
        y.from = out ? b->device : b->host;
        assert_int_equal(memory_copy_box(b->s, out ? MEMORY_OUT : MEMORY_IN, &y, NULL), 0);
        assert_int_equal(memory_stream_wait(b->s, WAIT_MS, NULL), 0);
        assert_memory_equal(out ? b->host : peek(b->device), expected, BYTES);
        done++;
    }
    assert_in_range(done, 100, 399);
    memory_stream_destroy(hs);
    memory_close(host);
    free(expected);
    free(from);
}

/* ---- order among streams ---- */

static void our_stream_waits_for_the_callers(void **state)
{
    struct bench *b = *state;
    memset(peek(b->device), 1, BYTES);
    cuda->standin_hold(b->caller);
    in_context(b);
    assert_int_equal(cuda->cuMemsetD8Async((cu_ptr)(uintptr_t)b->device, 2, BYTES, b->caller), CU_OK);
    out_of_context();
    assert_int_equal(memory_stream_after_caller(b->s, b->caller, NULL), 0);
    assert_int_equal(memory_copy(b->s, MEMORY_OUT, b->host, b->device, BYTES, NULL), 0);
    struct err e;
    assert_int_equal(memory_stream_wait(b->s, 10, &e), -ETIMEDOUT);
    cuda->standin_release(b->caller);
    assert_int_equal(memory_stream_wait(b->s, WAIT_MS, NULL), 0);
    for (size_t i = 0; i < BYTES; i++)
        assert_int_equal(b->host[i], 2);
}

static void the_callers_stream_waits_for_ours(void **state)
{
    struct bench *b = *state;
    struct memory_event *v = NULL;
    assert_int_equal(memory_event_create(b->m, &v, NULL), 0);
    memset(peek(b->device), 1, BYTES);
    cuda->standin_hold(memory_stream_handle(b->s));
    assert_int_equal(memory_copy(b->s, MEMORY_OUT, b->host, b->device, BYTES, NULL), 0);
    assert_int_equal(memory_event_record(v, b->s, NULL), 0);
    assert_int_equal(memory_caller_after(b->caller, v, NULL), 0);
    in_context(b);
    assert_int_equal(cuda->cuMemsetD8Async((cu_ptr)(uintptr_t)b->device, 2, BYTES, b->caller), CU_OK);
    usleep(SOON_USEC);
    assert_int_equal(*peek(b->device), 1);
    cuda->standin_release(memory_stream_handle(b->s));
    assert_int_equal(cuda->cuStreamSynchronize(b->caller), CU_OK);
    out_of_context();
    assert_int_equal(*peek(b->device), 2);
    for (size_t i = 0; i < BYTES; i++)
        assert_int_equal(b->host[i], 1);
    memory_event_destroy(v);
}

static void the_default_stream_is_a_callers_stream(void **state)
{
    struct bench *b = *state;
    in_context(b);
    assert_int_equal(cuda->cuMemsetD8Async((cu_ptr)(uintptr_t)b->device, 9, BYTES, NULL), CU_OK);
    out_of_context();
    assert_int_equal(memory_stream_after_caller(b->s, NULL, NULL), 0);
    assert_int_equal(memory_copy(b->s, MEMORY_OUT, b->host, b->device, BYTES, NULL), 0);
    assert_int_equal(memory_stream_wait(b->s, WAIT_MS, NULL), 0);
    assert_int_equal(b->host[BYTES - 1], 9);
}

static void events_order_streams_of_two_devices(void **state)
{
    struct bench *b = *state;
    struct memory *m = NULL;
    struct memory_stream *s = NULL;
    struct memory_event *v = NULL;
    uint8_t *device = NULL;
    assert_int_equal(memory_open(MEMORY_CUDA, 1, &m, NULL), 0);
    assert_int_equal(memory_stream_create(m, &s, NULL), 0);
    assert_int_equal(memory_alloc(m, BYTES, (void **)&device, NULL), 0);
    assert_int_equal(memory_event_create(b->m, &v, NULL), 0);
    fill(peek(b->device), BYTES, 4);
    assert_int_equal(memory_copy(b->s, MEMORY_OUT, b->host, b->device, BYTES, NULL), 0);
    assert_int_equal(memory_event_record(v, b->s, NULL), 0);
    assert_int_equal(memory_stream_after(s, v, NULL), 0);
    assert_int_equal(memory_copy(s, MEMORY_IN, device, b->host, BYTES, NULL), 0);
    assert_int_equal(memory_stream_wait(s, WAIT_MS, NULL), 0);
    assert_filled(peek(device), BYTES, 4);
    memory_event_destroy(v);
    memory_free(m, device);
    memory_stream_destroy(s);
    memory_close(m);
}

static void streams_of_others_are_refused(void **state)
{
    struct bench *b = *state;
    cu_context context;
    struct err e;
    assert_int_equal(cuda->cuDevicePrimaryCtxRetain(&context, 1), CU_OK);
    cu_stream elsewhere = caller_stream(context);
    assert_int_equal(memory_stream_after_caller(b->s, elsewhere, &e), -EINVAL);
    assert_non_null(strstr(e.text, "belongs to another device or context than CUDA device 0's"));
    struct memory_event *v = NULL;
    assert_int_equal(memory_event_create(b->m, &v, NULL), 0);
    assert_int_equal(memory_caller_after(elsewhere, v, &e), -EINVAL);
    memory_event_destroy(v);
    assert_int_equal(cuda->cuCtxPushCurrent_v2(context), CU_OK);
    assert_int_equal(cuda->cuStreamDestroy_v2(elsewhere), CU_OK);
    out_of_context();
    assert_int_equal(memory_stream_after_caller(b->s, elsewhere, &e), -EINVAL); /* is no more */
    assert_int_equal(e.class, ERR_INVALID);
    assert_int_equal(cuda->cuDevicePrimaryCtxRelease_v2(1), CU_OK);
}

/* A thread that polls events must not spoil a graph that another one captures; and no save becomes part of
 * it. */
static void captures_are_left_alone(void **state)
{
    struct bench *b = *state;
    struct err e;
    void *p = NULL;
    cuda->standin_capture(b->caller, true);
    assert_int_equal(memory_stream_after_caller(b->s, b->caller, &e), -EINVAL);
    assert_non_null(strstr(e.text, "capturing a graph"));
    assert_int_equal(memory_stream_after_caller(b->s, NULL, &e), -EINVAL);
    assert_non_null(strstr(e.text, "STREAM_CAPTURE_IMPLICIT"));
    assert_int_equal(memory_alloc(b->m, 100, &p, NULL), 0);
    assert_int_equal(memory_copy(b->s, MEMORY_OUT, b->host, b->device, BYTES, NULL), 0);
    assert_int_equal(memory_stream_wait(b->s, WAIT_MS, NULL), 0);
    memory_free(b->m, p);
    assert_true(cuda->standin_capture(b->caller, false));
    assert_int_equal(memory_stream_after_caller(b->s, b->caller, NULL), 0);
}

/* ---- pointers ---- */

static void pointers_are_recognised(void **state)
{
    struct bench *b = *state;
    struct memory_pointer x;
    int here = 0;
    assert_int_equal(memory_where(b->device + 5, &x, NULL), 0);
    assert_int_equal(x.kind, MEMORY_CUDA);
    assert_int_equal(x.ordinal, 0);
    assert_false(x.registered);
    assert_int_equal(memory_where(b->host + 5, &x, NULL), 0);
    assert_int_equal(x.kind, MEMORY_HOST);
    assert_true(x.registered);
    assert_int_equal(memory_where(&here, &x, NULL), 0);
    assert_int_equal(x.kind, MEMORY_HOST);
    assert_false(x.registered);
}

static void pointers_of_others_are_refused(void **state)
{
    struct bench *b = *state;
    struct memory *other = NULL, *host = NULL;
    uint8_t *there = NULL, plain[8];
    struct err e;
    assert_int_equal(memory_open(MEMORY_CUDA, 1, &other, NULL), 0);
    assert_int_equal(memory_open(MEMORY_HOST, 0, &host, NULL), 0);
    assert_int_equal(memory_alloc(other, BYTES, (void **)&there, NULL), 0);
    assert_int_equal(memory_check(b->m, b->device, BYTES, NULL), 0);
    assert_int_equal(memory_check(b->m, plain, sizeof plain, &e), -EINVAL);
    assert_non_null(strstr(e.text, "is plain host memory, or was freed, not memory of CUDA device 0"));
    assert_int_equal(memory_check(b->m, b->host, 1, &e), -EINVAL);
    assert_non_null(strstr(e.text, "is pinned host memory"));
    assert_int_equal(memory_check(b->m, there, 1, &e), -EINVAL);
    assert_non_null(strstr(e.text, "is memory of CUDA device 1, not of device 0"));
    assert_int_equal(memory_check(b->m, b->device + 1, BYTES, &e), -EINVAL);
    assert_non_null(strstr(e.text, "reach beyond their allocation"));
    assert_int_equal(memory_check(host, b->device, 1, &e), -EINVAL);
    assert_non_null(strstr(e.text, "expected host memory"));
    memory_free(other, there);
    memory_close(other);
    memory_close(host);
}

static void memory_of_another_context_is_refused(void **state)
{
    struct bench *b = *state;
    cu_context other = cuda->standin_context(0);
    cu_ptr p;
    struct err e;
    assert_int_equal(cuda->cuCtxPushCurrent_v2(other), CU_OK);
    assert_int_equal(cuda->cuMemAlloc_v2(&p, 100), CU_OK);
    assert_int_equal(memory_check(b->m, (void *)(uintptr_t)p, 100, &e), -EINVAL);
    assert_non_null(strstr(e.text, "another context on CUDA device 0"));
    cuda->standin_pooled((void *)(uintptr_t)p); /* no context owns it: any may use it */
    assert_int_equal(memory_check(b->m, (void *)(uintptr_t)p, 100, NULL), 0);
    assert_int_equal(memory_check(b->m, (void *)(uintptr_t)p, 101, &e), -EINVAL);
    assert_int_equal(cuda->cuMemFree_v2(p), CU_OK);
    out_of_context();
}

/* ---- memory ---- */

static void a_full_device_says_how_much_is_free(void **state)
{
    struct bench *b = *state;
    struct err e;
    void *p = NULL, *q = NULL;
    assert_int_equal(memory_alloc(b->m, 12u << 20, &p, NULL), 0);
    assert_int_equal(memory_alloc(b->m, 12u << 20, &q, &e), -ENOMEM);
    assert_int_equal(e.class, ERR_NO_MEMORY);
    char free_bytes[40];
    snprintf(free_bytes, sizeof free_bytes, "where %u are free", (4u << 20) - BYTES);
    assert_non_null(strstr(e.text, free_bytes));
    assert_non_null(strstr(e.text, "CUDA_ERROR_OUT_OF_MEMORY"));
    memory_free(b->m, p);
    assert_int_equal(memory_alloc(b->m, 12u << 20, &p, NULL), 0);
    memory_free(b->m, p);
}

static void memory_is_registered_once(void **state)
{
    struct bench *b = *state;
    struct err e;
    uint8_t *p = pages(BYTES);
    assert_int_equal(memory_register(b->m, b->host + 4096, 4096, &e), -EEXIST);
    assert_int_equal(e.class, ERR_EXISTS);
    cuda->standin_configure("register_max=4K");
    assert_int_equal(memory_register(b->m, p, BYTES, &e), -ENOMEM);
    assert_non_null(strstr(e.text, "registering 65536 bytes of host memory"));
    assert_int_equal(memory_register(b->m, p, 4096, NULL), 0);
    memory_unregister(b->m, p);
    free(p);
}

/* ---- kernels ---- */

static void kernels_run_in_their_stream(void **state)
{
    struct bench *b = *state;
    struct memory_module *x = NULL;
    void *pack = NULL;
    struct err e;
    /* every second 4-byte element of the first 256 bytes, packed behind them */
    const uint64_t begin = 0, end = 32, pitch = 1;
    const int64_t stride = 8;
    struct strided box;
    struct strided_job job;
    strided_init(&box, 1, 4, &begin, &end, &pitch, &stride);
    strided_job_init(&job, &box, 0, 128, b->device, b->device + 4096);
    void *arguments[] = {&job};
    assert_int_equal(memory_module_load(b->m, "an image", &x, NULL), 0);
    assert_int_equal(memory_module_function(x, "no_such_kernel", &pack, &e), -ENOENT);
    assert_non_null(strstr(e.text, "no_such_kernel"));
    assert_int_equal(memory_module_function(x, "larder_pack", &pack, NULL), 0);
    fill(peek(b->device), 256, 0);
    cuda->standin_hold(memory_stream_handle(b->s));
    struct memory_launch l = {.grid = {2, 1, 1}, .block = {8, 1, 1}};
    assert_int_equal(memory_launch(b->s, pack, &l, arguments, NULL), 0);
    memset(&job, 0, sizeof job); /* was read in the call */
    cuda->standin_release(memory_stream_handle(b->s));
    assert_int_equal(memory_stream_wait(b->s, WAIT_MS, NULL), 0);
    for (int i = 0; i < 32; i++)
        assert_memory_equal(peek(b->device) + 4096 + 4 * i, peek(b->device) + 8 * i, 4);
    memory_module_unload(x);
}

/* ---- a lost device ---- */

static void a_lost_device_stays_lost(void **state)
{
    struct bench *b = *state;
    struct memory *other = NULL;
    struct err first, later;
    void *p = NULL;
    assert_int_equal(memory_open(MEMORY_CUDA, 1, &other, NULL), 0);
    cuda->standin_configure("lose=0:2:700");
    for (int i = 0; i < 6; i++)
        if (memory_copy(b->s, MEMORY_OUT, b->host, b->device, BYTES, NULL) < 0)
            break;
    assert_int_equal(memory_stream_wait(b->s, WAIT_MS, &first), -ENODEV);
    assert_int_equal(first.class, ERR_IO);
    assert_int_equal(first.errnum, ENODEV);
    assert_non_null(strstr(first.text, "CUDA_ERROR_ILLEGAL_ADDRESS"));
    assert_int_equal(memory_lost(b->m, &later), -ENODEV);
    assert_string_equal(later.text, first.text);
    cuda->standin_configure("fail=cuMemAlloc_v2:1:1");
    assert_int_equal(memory_alloc(b->m, 10, &p, &later), -ENODEV);
    assert_string_equal(later.text, first.text); /* and the driver was not asked */
    assert_int_equal(memory_alloc(other, 10, &p, &later), -EINVAL);
    assert_int_equal(memory_alloc(other, 10, &p, NULL), 0); /* the other device goes on */
    memory_free(other, p);
    memory_close(other);
}

/* What was found by destroying is remembered too. */
static void losses_are_seen_at_the_end(void **state)
{
    struct bench *b = *state;
    struct memory_event *v = NULL;
    struct err e;
    assert_int_equal(memory_event_create(b->m, &v, NULL), 0);
    cuda->standin_configure("fail=cuEventDestroy_v2:1:719");
    memory_event_destroy(v);
    assert_int_equal(memory_lost(b->m, &e), -ENODEV);
    assert_non_null(strstr(e.text, "ending an event"));
}

/* By someone else in the process, against all rules. */
static void a_reset_device_is_lost(void **state)
{
    struct memory *m = NULL;
    struct memory_event *v = NULL;
    struct err e;
    (void)state;
    cuda->standin_reset();
    assert_int_equal(memory_open(MEMORY_CUDA, 1, &m, NULL), 0);
    assert_int_equal(memory_event_create(m, &v, NULL), 0);
    assert_int_equal(cuda->cuDevicePrimaryCtxReset_v2(1), CU_OK);
    assert_int_equal(memory_event_query(v, &e), -ENODEV);
    assert_non_null(strstr(e.text, "CUDA_ERROR_CONTEXT_IS_DESTROYED"));
    assert_non_null(strstr(e.text, "someone in this process reset the device"));
    memory_event_destroy(v);
    memory_close(m);
    assert_int_equal(memory_open(MEMORY_CUDA, 1, &m, NULL), 0); /* a new one can be had */
    assert_int_equal(memory_lost(m, NULL), 0);
    memory_close(m);
}

/* ---- any call may fail ---- */

/* Uses everything once; returns the first failure. What was made is unmade. */
static int tour(struct err *e)
{
    struct memory *m = NULL;
    struct memory_stream *s = NULL;
    struct memory_event *v = NULL;
    struct memory_module *x = NULL;
    struct memory_pointer where;
    struct memory_info info;
    void *device = NULL, *host = pages(BYTES), *spin = NULL;
    bool registered = false;
    uint64_t ns = 0;
    void *arguments[] = {&ns};
    struct memory_launch l = {.grid = {1, 1, 1}, .block = {1, 1, 1}};
    struct memory_box box = {host, NULL, 8, 4, 2, 8, 32, 16, 64};
    int rc = memory_describe(MEMORY_CUDA, 0, &info, e);
    rc = rc < 0 ? rc : memory_open(MEMORY_CUDA, 0, &m, e);
    rc = rc < 0 ? rc : memory_stream_create(m, &s, e);
    rc = rc < 0 ? rc : memory_event_create(m, &v, e);
    rc = rc < 0 ? rc : memory_alloc(m, BYTES, &device, e);
    rc = rc < 0 ? rc : memory_register(m, host, BYTES, e);
    registered = rc == 0;
    rc = rc < 0 ? rc : memory_where(device, &where, e);
    rc = rc < 0 ? rc : memory_check(m, device, BYTES, e);
    rc = rc < 0 ? rc : memory_stream_after_caller(s, NULL, e);
    rc = rc < 0 ? rc : memory_copy(s, MEMORY_IN, device, host, BYTES, e);
    rc = rc < 0 ? rc : memory_copy(s, MEMORY_WITHIN, device, (uint8_t *)device + 100, 100, e);
    box.from = device;
    rc = rc < 0 ? rc : memory_copy_box(s, MEMORY_OUT, &box, e);
    rc = rc < 0 ? rc : memory_copy(s, MEMORY_OUT, host, device, BYTES, e);
    rc = rc < 0 ? rc : memory_module_load(m, "an image", &x, e);
    rc = rc < 0 ? rc : memory_module_function(x, "larder_spin", &spin, e);
    rc = rc < 0 ? rc : memory_launch(s, spin, &l, arguments, e);
    rc = rc < 0 ? rc : memory_event_record(v, s, e);
    rc = rc < 0 ? rc : memory_caller_after(NULL, v, e);
    rc = rc < 0 ? rc : memory_event_wait(v, WAIT_MS, e);
    int late = s && rc < 0 ? memory_stream_wait(s, WAIT_MS, NULL) : 0; /* what was given to it uses memory */
    rc = rc < 0 ? rc : late;
    memory_module_unload(x);
    if (registered)
        memory_unregister(m, host);
    memory_free(m, device);
    memory_event_destroy(v);
    memory_stream_destroy(s);
    memory_close(m);
    free(host);
    return rc;
}

static bool is_in(const char *symbol, const char *const *list)
{
    for (; *list; list++)
        if (strcmp(symbol, *list) == 0)
            return true;
    return false;
}

/* At load, or only words for people, or what a device without it is used without. */
static const char *const optional[] = {
    "cuInit",           "cuDriverGetVersion",   "cuDeviceGetCount", "cuGetErrorName",
    "cuGetErrorString", "cuDeviceGetAttribute", "cuMemGetInfo_v2",  NULL};
/* Their failure has nobody left to tell, or comes after the work was done; something stays. */
static const char *const endings[] = {"cuModuleUnload",
                                      "cuMemHostUnregister",
                                      "cuMemFree_v2",
                                      "cuEventDestroy_v2",
                                      "cuStreamDestroy_v2",
                                      "cuDevicePrimaryCtxRelease_v2",
                                      "cuCtxPopCurrent_v2",
                                      "cuThreadExchangeStreamCaptureMode",
                                      NULL};

static void fail_once(const char *symbol, unsigned nth, int code)
{
    struct standin_counts n;
    struct err e = {0};
    cu_context c;
    char rule[80];
    cuda->standin_reset();
    snprintf(rule, sizeof rule, "fail=%s:%u:%d", symbol, nth, code);
    cuda->standin_configure(rule);
    int rc = tour(&e);
    bool ending = is_in(symbol, endings);
    if (nth == 1 && !is_in(symbol, optional) && !ending)
        assert_true(rc < 0);
    if (rc < 0) {
        assert_int_equal(rc, -e.errnum);
        assert_non_null(strstr(e.text, "CUDA_ERROR_"));
    }
    assert_int_equal(cuda->cuCtxGetCurrent(&c), CU_OK);
    if (strcmp(symbol, "cuCtxPopCurrent_v2") == 0) /* what was not popped stays */
        assert_int_equal(cuda->cuCtxSetCurrent(NULL), CU_OK);
    else
        assert_null(c);
    cuda->standin_counts(&n);
    if (n.contexts > 0 && strcmp(symbol, "cuDevicePrimaryCtxRelease_v2") == 0)
        assert_int_equal(cuda->cuDevicePrimaryCtxRelease_v2(0), CU_OK);
    cuda->standin_counts(&n);
    assert_int_equal(n.contexts, 0);
    if (!ending)
        assert_int_equal(n.lost_handles, 0);
}

static void whatever_fails_nothing_is_left(void **state)
{
    static const char *const symbols[] = {
#define SYMBOL(symbol, parameters) #symbol,
        CUDA_CALLS(SYMBOL)};
    static const int codes[] = {CU_INVALID_VALUE, CU_OUT_OF_MEMORY, CU_NOT_SUPPORTED};
    struct err e;
    (void)state;
    cuda->standin_reset();
    cuda->standin_configure("delay_us=20");
    assert_int_equal(tour(&e), 0);
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++)
        for (unsigned nth = 1; nth <= 3; nth++)
            fail_once(symbols[i], nth, codes[(i + nth) % 3]);
}

/* ---- threads ---- */

#define THREADS 4

struct runner {
    struct bench *b;
    unsigned number;
    bool ok;
};

static void *run_copies(void *arg)
{
    struct runner *r = arg;
    struct memory *m = r->b->m;
    struct memory_stream *s = NULL;
    uint8_t *device = NULL, *host = r->b->host + r->number * (BYTES / THREADS);
    size_t n = BYTES / THREADS;
    r->ok = memory_stream_create(m, &s, NULL) == 0 && memory_alloc(m, n, (void **)&device, NULL) == 0;
    for (unsigned i = 0; i < 30 && r->ok; i++) {
        memset(host, (int)(r->number * 30 + i), n);
        r->ok = memory_copy(s, MEMORY_IN, device, host, n, NULL) == 0 &&
                memory_stream_wait(s, WAIT_MS, NULL) == 0;
        memset(host, 0xff, n);
        r->ok = r->ok && memory_copy(s, MEMORY_OUT, host, device, n, NULL) == 0 &&
                memory_stream_wait(s, WAIT_MS, NULL) == 0 && host[n - 1] == r->number * 30 + i;
    }
    memory_free(m, device);
    memory_stream_destroy(s);
    return NULL;
}

static void any_thread_may_use_a_device(void **state)
{
    struct runner r[THREADS];
    pthread_t t[THREADS];
    for (unsigned i = 0; i < THREADS; i++) {
        r[i] = (struct runner){.b = *state, .number = i};
        assert_int_equal(pthread_create(&t[i], NULL, run_copies, &r[i]), 0);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(t[i], NULL);
        assert_true(r[i].ok);
    }
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(devices_are_described),
        TEST(a_device_may_be_open_several_times),
        TEST(the_current_context_is_given_back),
        TEST(device_memory_is_out_of_the_processors_reach),
        TEST(copies_are_late_and_right),
        TEST(one_stream_keeps_its_order),
        TEST(a_wait_has_an_end),
        TEST(unregistered_memory_is_copied_in_the_call),
        TEST(boxes_are_copied_as_on_the_host),
        TEST(our_stream_waits_for_the_callers),
        TEST(the_callers_stream_waits_for_ours),
        TEST(the_default_stream_is_a_callers_stream),
        TEST(events_order_streams_of_two_devices),
        TEST(streams_of_others_are_refused),
        TEST(captures_are_left_alone),
        TEST(pointers_are_recognised),
        TEST(pointers_of_others_are_refused),
        TEST(memory_of_another_context_is_refused),
        TEST(a_full_device_says_how_much_is_free),
        TEST(memory_is_registered_once),
        TEST(kernels_run_in_their_stream),
        TEST(a_lost_device_stays_lost),
        TEST(losses_are_seen_at_the_end),
        cmocka_unit_test(a_reset_device_is_lost),
        cmocka_unit_test(whatever_fails_nothing_is_left),
        TEST(any_thread_may_use_a_device),
    };
    cuda = standin_load(SETTINGS);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
