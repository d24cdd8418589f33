/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: what goes wrong on a device fails the save on all ranks with its cause, or the restore, and the
 * trainer goes on. Method: a real larderd, and a stand-in for CUDA's driver that fails calls, refuses memory,
 * and loses devices when it is told to.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/sanitized.h"
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
    struct larder_save *s = trainer_save(c, "failing", k->step, 1, 2);
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
    struct larder_save *s = trainer_save(t->client, "failing", step, 0, 2);
    *other = (struct other){.step = step};
    pthread_create(&other->thread, NULL, save_other, other);
    struct larder_tensor x = trainer_tensor(t, "p", 0, p, n), y = trainer_tensor(t, "y", 0, p + 100, 50);
    int rc = larder_save_tensor(s, &x, e);
    if (rc == 0)
        rc = larder_save_tensor(s, &y, e);
    if (failure)
        cuda->standin_configure(failure);
    if (rc == 0)
        rc = larder_save_submit(s, e);
    if (rc == 0 && larder_save_fence(s, -1, e) == 0)
        trainer_fill(t, 0, p, 0xee, n);
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
    uint8_t *p = trainer_memory(t, 0, BYTES), *back = malloc(BYTES);
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
            trainer_fill(t, 0, p, (uint8_t)step, BYTES);
            if (save_two(t, ++step, p, BYTES, NULL, &e, &other) < 0)
                fail_msg("after %s: %s", failure, e.text);
            trainer_read(t->client, "failing", "p", back);
            trainer_all(back, (uint8_t)(step - 1), BYTES);
        }
    trainer_wait(t, 0);
    free(back);
    memory_free(t->device[0], p);
}

static void refused_registrations_and_streams_are_told(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    uint8_t *p = trainer_memory(t, 0, 1000);
    struct larder_tensor x = trainer_tensor(t, "x", 0, p, 1000);
    struct larder_save *s = trainer_save(t->client, "refused", 1, 0, 1);
    cuda->standin_configure("fail=cuStreamCreateWithPriority:1:2");
    assert_true(larder_save_tensor(s, &x, &e) < 0);
    assert_non_null(strstr(e.text, "tensor \"x\": device 0"));
    cuda->standin_configure("fail=cuMemHostRegister_v2:0:2");
    assert_true(larder_save_tensor(s, &x, &e) < 0);
    assert_non_null(strstr(e.text, "OUT_OF_MEMORY"));
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
    uint8_t *p = trainer_memory(t, 0, BYTES), byte = 3, back = 0;
    assert_true(save_two(t, 1001, p, BYTES, "lose=0:4:700", &e, &other) < 0);
    assert_non_null(strstr(e.text, "ILLEGAL_ADDRESS"));
    assert_true(other.rc < 0);
    assert_non_null(strstr(other.e.text, "ILLEGAL_ADDRESS"));
    assert_true(save_two(t, 1002, p, BYTES, NULL, &e, &other) < 0); /* and it stays so */
    assert_non_null(strstr(e.text, "ILLEGAL_ADDRESS"));
    struct larder_save *s = trainer_save(t->client, "host", 1, 0, 1);
    struct larder_tensor x = {.name = "byte", .dtype = LARDER_U8, .dims = 1, .shape = {1}, .data = &byte};
    GOOD(larder_save_tensor(s, &x, &e));
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_wait(s, -1, &e));
    larder_save_free(s);
    trainer_read(t->client, "host", "byte", &back);
    assert_int_equal(back, 3);
    struct larder_restore *r = trainer_restore(t->client, "host");
    x = trainer_tensor(t, "byte", 0, p, 1);
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
    uint8_t *p = trainer_memory(t, 0, BYTES);
    trainer_fill(t, 0, p, 9, BYTES);
    struct larder_save *s = trainer_save(t->client, "back", 1, 0, 1);
    struct larder_tensor x = trainer_tensor(t, "p", 0, p, BYTES);
    GOOD(larder_save_tensor(s, &x, &e));
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_wait(s, -1, &e));
    larder_save_free(s);
    static const char *const failures[] = {"fail=cuMemcpyHtoDAsync_v2:3:1", "register_total=20M",
                                           "fail=cuEventRecord:4:2", "fail=cuEventQuery:2:2", "lose=0:3:719"};
    for (unsigned i = 0; i < 5; i++) {
        struct larder_restore *r = trainer_restore(t->client, "back");
        trainer_fill(t, 0, p, 1, BYTES);
        trainer_wait(t, 0);
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
        r = trainer_restore(t->client, "back");
        GOOD(larder_restore_add(r, &x, &e));
        GOOD(larder_restore_run(r, &e));
        trainer_all(cuda->standin_peek(p), 9, BYTES);
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
    uint8_t *p = trainer_memory(t, 0, BYTES);
    struct larder *c = daemon_client(&server, "writer");
    struct larder_save *s = trainer_save(c, "hangs", 5, 0, 1);
    struct larder_tensor x = trainer_tensor(t, "p", 0, p, BYTES);
    GOOD(larder_save_tensor(s, &x, &e));
    cuda->standin_hold(trainer_stream(t, 0));
    GOOD(larder_save_submit(s, &e));
    assert_int_equal(larder_save_fence(s, 20, &e), -ETIMEDOUT);
    larder_save_free(s);
    t->keeps = true;
    assert_int_equal(larder_close(c, 50, &e), -ETIMEDOUT);
    assert_non_null(strstr(e.text, "step 5 of hangs"));
    cuda->standin_release(trainer_stream(t, 0)); /* now they write: into memory that is nobody else's */
    trainer_wait(t, 0);
    memory_free(t->device[0], p);
}

/* A save that was given up may have copies that a device has not come to: until then it is not said to be
 * over, and so nobody frees its tensors. */
static void a_cancelled_save_is_not_over_before_its_copies(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    enum { BYTES = 5u << 20 };
    char credentials[320];
    uint8_t *p = trainer_memory(t, 0, BYTES);
    struct larder *c = NULL;
    struct larder_options o = LARDER_INIT(larder_options);
    daemon_credentials(&server, "writer", credentials, sizeof credentials);
    o.credentials = credentials;
    o.request_timeout_ms = SANITIZED ? 10000 : 2000;
    GOOD(larder_open(&o, &c, &e));
    struct larder_save *s = trainer_save(c, "given up", 5, 0, 1);
    struct larder_tensor x = trainer_tensor(t, "p", 0, p, BYTES);
    GOOD(larder_save_tensor(s, &x, &e));
    cuda->standin_hold(trainer_stream(t, 0));
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_fence_stream(s, 0, trainer_stream(t, 0), &e)); /* all copies are given */
    assert_int_equal(larder_save_cancel(s, "not wanted", &e), -ETIMEDOUT);
    assert_int_equal(larder_save_fence(s, 100, &e), -ETIMEDOUT);
    cuda->standin_release(trainer_stream(t, 0));
    GOOD(larder_save_fence(s, 20000, &e)); /* they were all made, for nothing */
    assert_int_equal(larder_save_wait(s, 20000, &e), -ECANCELED);
    memory_free(t->device[0], p);
    larder_save_free(s);
    GOOD(larder_close(c, -1, &e));
}

/* Device tensors take all staging memory and their stream never gets on; submit needs some for the host
 * tensor behind them. */
static void submit_gives_up_on_a_stream_that_hangs(void **state)
{
    struct trainer *t = *state;
    struct larder_error e;
    enum { BYTES = 60u << 20 };
    static uint8_t host[2u << 20];
    char credentials[320];
    uint8_t *p = trainer_memory(t, 0, BYTES);
    struct larder *c = NULL;
    struct larder_options o = LARDER_INIT(larder_options);
    daemon_credentials(&server, "writer", credentials, sizeof credentials);
    o.credentials = credentials;
    o.staging_bytes = 24u << 20;
    o.request_timeout_ms = SANITIZED ? 15000 : 5000;
    GOOD(larder_open(&o, &c, &e));
    struct larder_tensor x = trainer_tensor(t, "p", 0, p, BYTES);
    struct larder_tensor y = {
        .name = "y", .dtype = LARDER_U8, .dims = 1, .shape = {sizeof host}, .data = host};
    for (unsigned step = 1; step <= 2; step++) {
        struct larder_save *s = trainer_save(c, "stuck", step, 0, 1);
        GOOD(larder_save_tensor(s, &x, &e));
        GOOD(larder_save_tensor(s, &y, &e));
        if (step == 1) {
            cuda->standin_hold(trainer_stream(t, 0));
            assert_int_equal(larder_save_submit(s, &e), -ETIMEDOUT);
            assert_non_null(strstr(e.text, "wait for copies from device 0"));
            cuda->standin_release(trainer_stream(t, 0));
            assert_int_equal(larder_save_wait(s, -1, &e), -ETIMEDOUT);
        } else { /* the client goes on */
            GOOD(larder_save_submit(s, &e));
            GOOD(larder_save_wait(s, 20000, &e));
        }
        larder_save_free(s);
    }
    GOOD(larder_close(c, -1, &e));
    memory_free(t->device[0], p);
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
    cuda = standin_load(TRAINER_SETTINGS);
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(a_failed_call_fails_the_save_on_all_ranks),
        TEST(refused_registrations_and_streams_are_told),
        TEST(a_lost_device_is_told_and_the_host_goes_on),
        TEST(a_restore_that_fails_on_a_device_says_so),
        TEST(a_cancelled_save_is_not_over_before_its_copies),
        TEST(submit_gives_up_on_a_stream_that_hangs),
        TEST(a_stream_that_hangs_does_not_hold_close),
    };
    return cmocka_run_group_tests(tests, start_server, stop_server);
}
