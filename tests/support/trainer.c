/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/trainer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct trainer *trainer_begin(const struct standin *cuda, const struct daemon *server)
{
    struct trainer *t = calloc(1, sizeof *t);
    check(t);
    t->cuda = cuda;
    cuda->standin_reset();
    for (int i = 0; i < TRAINER_DEVICES; i++) {
        assert_int_equal(memory_open(MEMORY_CUDA, i, &t->device[i], NULL), 0);
        assert_int_equal(memory_stream_create(t->device[i], &t->stream[i], NULL), 0);
    }
    t->client = daemon_client(server, "writer");
    return t;
}

void trainer_end(struct trainer *t)
{
    struct larder_error e;
    struct standin_counts n;
    bool lost = false;
    (void)larder_close(t->client, -1, &e);
    for (int i = 0; i < TRAINER_DEVICES; i++) {
        lost |= memory_stream_wait(t->stream[i], 20000, NULL) < 0;
        memory_stream_destroy(t->stream[i]);
        memory_close(t->device[i]);
    }
    t->cuda->standin_counts(&n);
    if (!lost && !t->keeps && n.allocations + n.registrations + n.streams + n.events + n.lost_handles > 0)
        fail_msg(
            "left: %zu allocations, %zu registrations, %zu streams, %zu events, %zu handles, %zu contexts",
            n.allocations, n.registrations, n.streams, n.events, n.lost_handles, n.contexts);
    free(t);
}

void *trainer_stream(const struct trainer *t, int device)
{
    return memory_stream_handle(t->stream[device]);
}

uint8_t *trainer_memory(struct trainer *t, int device, size_t n)
{
    void *p;
    struct err e;
    if (memory_alloc(t->device[device], n, &p, &e) < 0)
        fail_msg("%s", e.text);
    memset(t->cuda->standin_peek(p), 0xcc, n);
    return p;
}

void trainer_fill(struct trainer *t, int device, uint8_t *p, uint8_t value, size_t n)
{
    cu_context c;
    assert_int_equal(t->cuda->cuDevicePrimaryCtxRetain(&c, device), CU_OK);
    assert_int_equal(t->cuda->cuCtxPushCurrent_v2(c), CU_OK);
    assert_int_equal(t->cuda->cuMemsetD8Async((cu_ptr)(uintptr_t)p, value, n, trainer_stream(t, device)),
                     CU_OK);
    assert_int_equal(t->cuda->cuCtxPopCurrent_v2(&c), CU_OK);
    assert_int_equal(t->cuda->cuDevicePrimaryCtxRelease_v2(device), CU_OK);
}

void trainer_wait(struct trainer *t, int device)
{
    struct err e;
    if (memory_stream_wait(t->stream[device], 20000, &e) < 0)
        fail_msg("%s", e.text);
}

void trainer_bytes(uint8_t *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        p[i] = (uint8_t)(seed >> 56);
    }
}

struct larder_save *trainer_save(struct larder *c, const char *run, uint64_t step, uint32_t rank,
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

struct larder_restore *trainer_restore(struct larder *c, const char *run)
{
    struct larder_error e;
    struct larder_restore *r = NULL;
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    o.run = run;
    GOOD(larder_restore_open(c, &o, &r, &e));
    return r;
}

struct larder_tensor trainer_tensor(struct trainer *t, const char *name, int device, void *p, uint64_t n)
{
    return (struct larder_tensor){.name = name,
                                  .dtype = LARDER_U8,
                                  .dims = 1,
                                  .shape = {n},
                                  .data = p,
                                  .memory = LARDER_MEMORY_CUDA,
                                  .device = device,
                                  .stream = trainer_stream(t, device)};
}

void trainer_read(struct larder *c, const char *run, const char *name, uint8_t *out)
{
    struct larder_error e;
    struct larder_restore *r = trainer_restore(c, run);
    struct larder_tensor t = {.name = name, .dtype = LARDER_U8, .dims = 1, .data = out};
    GOOD(larder_restore_add(r, &t, &e));
    GOOD(larder_restore_run(r, &e));
    larder_restore_close(r);
}

void trainer_all(const uint8_t *p, uint8_t value, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] != value)
            fail_msg("byte %zu is %u, expected %u", i, p[i], value);
}
