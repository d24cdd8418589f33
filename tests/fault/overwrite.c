/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: what a save holds is what the tensors were when it was submitted, though the trainer overwrites them
 * as soon as a fence lets it, and the device's copies are late and in any order among streams. Method: two
 * devices of the stand-in; tensors packed, strided and large; contents that follow from the step, written by
 * the trainer's stream; at once after the fence every byte is scribbled over, by the processor or by the
 * stream. Every step is restored, to the host or to a device, and every byte compared.
 *
 * LARDER_STRESS_SAVES=n saves so often (make stress: 10000); LARDER_STRESS_SEED chooses the modes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/larder.h"
#include "tests/support/daemon.h"
#include "tests/support/good.h"
#include "tests/support/standin.h"

#define DEVICES     2
#define BATCH       25 /* saves between two rounds of restoring */
#define LARGE_EVERY 40 /* saves; the large tensor takes several chunks */
#define SCRIBBLE    0xee
#define STAGING     (24u << 20) /* one slot for each kind of tensor: the large one goes in waves */

/* span: bytes of the memory that the strides reach over. */
static const struct plan {
    const char *name;
    enum larder_dtype dtype;
    unsigned element, dims;
    uint64_t shape[3];
    int64_t strides[3]; /* elements; all zero: packed */
    size_t span;
    int device; /* -1: host memory */
} plans[] = {
    {"flat", LARDER_U8, 1, 1, {3001}, {0}, 3001, 0},
    {"rows", LARDER_F32, 4, 2, {40, 24}, {64, 1}, 40 * 64 * 4, 0},
    {"grid", LARDER_BF16, 2, 3, {3, 5, 32}, {400, 64, 1}, 3 * 400 * 2, 0},
    {"turned", LARDER_F32, 4, 2, {64, 48}, {1, 64}, 64 * 48 * 4, 1},
    {"other", LARDER_I64, 8, 2, {25, 25}, {0}, 25 * 25 * 8, 1},
    {"host", LARDER_U8, 1, 1, {900}, {0}, 900, -1},
    {"large", LARDER_BF16, 2, 2, {1500, 2000}, {0}, 1500 * 2000 * 2, 0},
};
#define PLANS (sizeof plans / sizeof *plans)
#define LARGE (PLANS - 1)

static const struct standin *cuda;
static struct daemon server;
static uint64_t rng;

static struct {
    cu_context context[DEVICES];
    bool held;
    cu_stream stream[DEVICES];            /* the trainer's */
    uint8_t *memory[PLANS], *back[PLANS]; /* what is saved; where it is restored to. Of the plan's device */
    uint8_t *found[PLANS];
    uint8_t *content, *packed; /* as large as the largest tensor */
} trainer;

static uint64_t draw(uint64_t below)
{
    rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
    return rng % below;
}

static bool takes_part(size_t plan, uint64_t step)
{
    return plan != LARGE || step % LARGE_EVERY == 0;
}

static size_t packed_bytes(const struct plan *p)
{
    size_t n = p->element;
    for (unsigned i = 0; i < p->dims; i++)
        n *= p->shape[i];
    return n;
}

/* ---- contents ---- */

static void content(uint8_t *out, const struct plan *p, uint64_t step)
{
    uint64_t x = (step * PLANS + (uint64_t)(p - plans)) * 0x9e3779b97f4a7c15ull + 1, last = 0;
    for (size_t i = 0; i < p->span; i++) {
        if (i % 8 == 0)
            x ^= x << 13, x ^= x >> 7, x ^= x << 17, last = x;
        out[i] = (uint8_t)(last >> 8 * (i % 8));
    }
}

/* The elements of the plan out of memory with its strides. */
static void pack(uint8_t *out, const struct plan *p, const uint8_t *memory)
{
    const uint64_t *n = p->shape;
    const int64_t *s = p->strides;
    if (s[0] == 0) {
        memcpy(out, memory, packed_bytes(p));
        return;
    }
    for (uint64_t i = 0; i < n[0]; i++)
        for (uint64_t j = 0; j < n[1]; j++)
            for (uint64_t k = 0; k < (p->dims > 2 ? n[2] : 1); k++, out += p->element)
                memcpy(out, memory + ((int64_t)i * s[0] + (int64_t)j * s[1] + (int64_t)k * s[2]) * p->element,
                       p->element);
}

/* ---- the trainer ---- */

static void enter(int device)
{
    assert_int_equal(cuda->cuCtxPushCurrent_v2(trainer.context[device]), CU_OK);
}

static void leave(void)
{
    cu_context c;
    assert_int_equal(cuda->cuCtxPopCurrent_v2(&c), CU_OK);
}

static cu_ptr pointer(const void *p)
{
    return (cu_ptr)(uintptr_t)p;
}

static void write_step(uint64_t step)
{
    for (size_t i = 0; i < PLANS; i++) {
        const struct plan *p = &plans[i];
        if (!takes_part(i, step))
            continue;
        content(trainer.content, p, step);
        if (p->device < 0) {
            memcpy(trainer.memory[i], trainer.content, p->span);
            continue;
        }
        enter(p->device);
        assert_int_equal(cuda->cuMemcpyHtoDAsync_v2(pointer(trainer.memory[i]), trainer.content, p->span,
                                                    trainer.stream[p->device]),
                         CU_OK);
        leave();
    }
}

/* By the stream (NULL: by the processor, at once). */
static void scribble_device(int device, cu_stream stream, bool at_once)
{
    for (size_t i = 0; i < PLANS; i++) {
        if (plans[i].device != device)
            continue;
        if (at_once) {
            memset(cuda->standin_peek(trainer.memory[i]), SCRIBBLE, plans[i].span);
            continue;
        }
        enter(device);
        assert_int_equal(cuda->cuMemsetD8Async(pointer(trainer.memory[i]), SCRIBBLE, plans[i].span, stream),
                         CU_OK);
        leave();
    }
}

/* Three ways to wait, drawn by chance, and what they allow. */
static void fence_and_scribble(struct larder_save *s)
{
    struct larder_error e;
    uint64_t way = draw(3);
    if (way == 0)
        GOOD(larder_save_fence(s, -1, &e));
    for (int d = 0; d < DEVICES; d++) {
        cu_stream stream = way == 1 ? trainer.stream[d] : NULL;
        if (way > 0)
            GOOD(larder_save_fence_stream(s, d, stream, &e));
        scribble_device(d, stream, way == 0);
        if (way < 2)
            continue;
        enter(d); /* what the trainer's stream does next is not ordered after the default stream */
        assert_int_equal(cuda->cuStreamSynchronize(NULL), CU_OK);
        leave();
    }
}

static struct larder_tensor tensor(size_t i, uint8_t *data)
{
    const struct plan *p = &plans[i];
    struct larder_tensor t = {.name = p->name, .dtype = p->dtype, .dims = p->dims, .data = data};
    memcpy(t.shape, p->shape, sizeof p->shape);
    memcpy(t.strides, p->strides, sizeof p->strides);
    if (p->device >= 0) {
        t.memory = LARDER_MEMORY_CUDA;
        t.device = p->device;
        t.stream = trainer.stream[p->device];
    }
    return t;
}

static void hold(void)
{
    trainer.held = true;
    for (int d = 0; d < DEVICES; d++)
        cuda->standin_hold(trainer.stream[d]);
}

static void release(void)
{
    for (int d = 0; trainer.held && d < DEVICES; d++)
        cuda->standin_release(trainer.stream[d]);
    trainer.held = false;
}

static struct larder_save *save_step(struct larder *c, uint64_t step)
{
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    struct larder_save *s = NULL;
    struct larder_error e;
    o.run = "overwritten";
    o.step = step;
    o.attempt[0] = 1;
    if (draw(3) == 0 && !takes_part(LARGE, step))
        hold(); /* the trainer's own work is later still than the save; with waves, submit waits for it */
    write_step(step);
    GOOD(larder_save_begin(c, &o, &s, &e));
    for (size_t i = 0; i < PLANS; i++) {
        struct larder_tensor t = tensor(i, trainer.memory[i]);
        if (takes_part(i, step))
            GOOD(larder_save_tensor(s, &t, &e));
    }
    GOOD(larder_save_submit(s, &e));
    for (size_t i = 0; i < PLANS; i++)
        if (plans[i].device < 0)
            memset(trainer.memory[i], SCRIBBLE, plans[i].span);
    release();
    fence_and_scribble(s);
    return s;
}

/* ---- looking ---- */

static void assert_old_bytes(size_t i, uint64_t step, const uint8_t *found)
{
    const struct plan *p = &plans[i];
    size_t n = packed_bytes(p);
    content(trainer.content, p, step);
    pack(trainer.packed, p, trainer.content);
    for (size_t at = 0; at < n; at++)
        if (found[at] != trainer.packed[at])
            fail_msg("step %llu, %s: byte %zu of %zu is %#x, not %#x", (unsigned long long)step, p->name, at,
                     n, found[at], trainer.packed[at]);
}

/* With the plan's strides, where it was saved from: on its device. Or packed, in host memory. */
static void ask_for(struct larder_restore *r, size_t i, bool to_device)
{
    struct larder_error e;
    struct larder_tensor t = tensor(i, trainer.back[i]);
    if (!to_device || plans[i].device < 0) {
        memset(t.strides, 0, sizeof t.strides);
        t.memory = LARDER_MEMORY_HOST;
        t.data = trainer.found[i];
        memset(t.data, SCRIBBLE, packed_bytes(&plans[i]));
    }
    GOOD(larder_restore_add(r, &t, &e));
}

static void look_at(struct larder *c, uint64_t step)
{
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    struct larder_restore *r = NULL;
    struct larder_error e;
    o.run = "overwritten";
    o.at = LARDER_AT_STEP;
    o.value = step;
    GOOD(larder_restore_open(c, &o, &r, &e));
    bool to_device = draw(4) == 0;
    for (size_t i = 0; i < PLANS; i++)
        if (takes_part(i, step))
            ask_for(r, i, to_device);
    GOOD(larder_restore_run(r, &e));
    for (size_t i = 0; i < PLANS; i++) {
        if (!takes_part(i, step))
            continue;
        if (to_device && plans[i].device >= 0)
            pack(trainer.found[i], &plans[i], cuda->standin_peek(trainer.back[i]));
        assert_old_bytes(i, step, trainer.found[i]);
    }
    larder_restore_close(r);
}

static void every_restored_byte_is_the_old_one(void **state)
{
    const char *often = getenv("LARDER_STRESS_SAVES");
    uint64_t saves = often ? strtoull(often, NULL, 10) : 100, looked = 0;
    char credentials[320];
    daemon_credentials(&server, "writer", credentials, sizeof credentials);
    struct larder *c = daemon_client_at(credentials, STAGING);
    struct larder_save *s = NULL;
    struct standin_counts n;
    struct larder_error e;
    (void)state;
    for (uint64_t step = 1; step <= saves; step++) {
        larder_save_free(s); /* it goes on */
        s = save_step(c, step);
        if (step % BATCH != 0 && step != saves)
            continue;
        GOOD(larder_save_wait(s, -1, &e));
        while (looked < step)
            look_at(c, ++looked);
    }
    larder_save_free(s);
    GOOD(larder_close(c, -1, &e));
    cuda->standin_counts(&n);
    print_message("%llu saves, %zu copies, %zu of them not of pinned memory\n", (unsigned long long)saves,
                  n.copies, n.pageable_copies);
    assert_int_equal(n.registrations + n.events + n.modules, 0);
    assert_int_equal(n.streams, DEVICES); /* the trainer's */
}

/* ---- before and after ---- */

static uint8_t *take(const struct plan *p)
{
    cu_ptr device = 0;
    if (p->device < 0)
        return malloc(p->span);
    enter(p->device);
    assert_int_equal(cuda->cuMemAlloc_v2(&device, p->span), CU_OK);
    leave();
    return (uint8_t *)(uintptr_t)device;
}

static void give(const struct plan *p, uint8_t *memory)
{
    if (p->device < 0) {
        free(memory);
        return;
    }
    enter(p->device);
    assert_int_equal(cuda->cuMemFree_v2(pointer(memory)), CU_OK);
    leave();
}

static int begin(void **state)
{
    const char *seed = getenv("LARDER_STRESS_SEED");
    (void)state;
    rng = seed ? strtoull(seed, NULL, 10) : 20261130;
    print_message("LARDER_STRESS_SEED=%llu\n", (unsigned long long)rng);
    daemon_start(&server);
    assert_int_equal(cuda->cuInit(0), CU_OK);
    for (int d = 0; d < DEVICES; d++) {
        assert_int_equal(cuda->cuDevicePrimaryCtxRetain(&trainer.context[d], d), CU_OK);
        enter(d);
        assert_int_equal(cuda->cuStreamCreateWithPriority(&trainer.stream[d], CU_STREAM_FLAG_NON_BLOCKING, 0),
                         CU_OK);
        leave();
    }
    for (size_t i = 0; i < PLANS; i++) {
        trainer.memory[i] = take(&plans[i]);
        trainer.back[i] = take(&plans[i]);
        trainer.found[i] = malloc(plans[i].span);
    }
    trainer.content = malloc(plans[LARGE].span);
    trainer.packed = malloc(plans[LARGE].span);
    return 0;
}

static int end(void **state)
{
    struct standin_counts n;
    (void)state;
    release(); /* where it failed */
    for (size_t i = 0; i < PLANS; i++) {
        give(&plans[i], trainer.memory[i]);
        give(&plans[i], trainer.back[i]);
        free(trainer.found[i]);
    }
    for (int d = 0; d < DEVICES; d++) {
        enter(d);
        assert_int_equal(cuda->cuStreamDestroy_v2(trainer.stream[d]), CU_OK);
        leave();
        assert_int_equal(cuda->cuDevicePrimaryCtxRelease_v2(d), CU_OK);
    }
    free(trainer.content);
    free(trainer.packed);
    daemon_stop(&server);
    cuda->standin_counts(&n);
    assert_int_equal(n.lost_handles + n.contexts, 0);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_restored_byte_is_the_old_one),
    };
    cuda = standin_load("devices=2 memory=64M delay_us=1500 seed=9");
    return cmocka_run_group_tests(tests, begin, end);
}
