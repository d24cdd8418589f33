/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: whatever dies at whatever moment of a save, the newest committed checkpoint is whole, and saving goes
 * on. Method: kill the saving process, or the server, after a time drawn from the seed; then look. What a
 * step holds follows from its number, so a mixture of two steps cannot pass.
 */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/larder.h"
#include "tests/support/daemon.h"
#include "tests/support/good.h"

#define BYTES  (6u << 20)
#define ROUNDS 8

static struct daemon server;
static uint64_t rng;

static uint64_t draw(uint64_t below)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return rng % below;
}

static void content(uint8_t *p, uint64_t step)
{
    uint64_t x = step * 0x9e3779b97f4a7c15ull + 1;
    for (size_t i = 0; i < BYTES; i += 8) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        memcpy(p + i, &x, 8);
    }
}

/* Saves one step; 0 or the class of its failure. */
static int save_step(struct larder *c, uint64_t step, uint8_t attempt, uint8_t *memory,
                     struct larder_error *e)
{
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    struct larder_save *s = NULL;
    o.run = "killed";
    o.step = step;
    o.attempt[0] = attempt;
    int rc = larder_save_begin(c, &o, &s, e);
    if (rc < 0)
        return rc;
    content(memory, step);
    struct larder_tensor t = {.name = "x", .dtype = LARDER_U8, .dims = 1, .shape = {BYTES}, .data = memory};
    rc = larder_save_tensor(s, &t, e);
    if (rc == 0)
        rc = larder_save_submit(s, e);
    if (rc == 0)
        rc = larder_save_wait(s, -1, e);
    larder_save_free(s);
    return rc;
}

/* The newest checkpoint is whole; its step. */
static uint64_t newest_is_whole(uint8_t *memory, uint8_t *expected)
{
    struct larder_error e;
    struct larder *c = daemon_client(&server, "admin");
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    struct larder_restore *r = NULL;
    o.run = "killed";
    GOOD(larder_restore_open(c, &o, &r, &e));
    struct larder_restore_info i = LARDER_INIT(larder_restore_info);
    GOOD(larder_restore_info(r, &i));
    memset(memory, 0, BYTES);
    struct larder_tensor t = {.name = "x", .dtype = LARDER_U8, .dims = 1, .shape = {BYTES}, .data = memory};
    GOOD(larder_restore_add(r, &t, &e));
    GOOD(larder_restore_run(r, &e));
    content(expected, i.step);
    assert_memory_equal(memory, expected, BYTES);
    larder_restore_close(r);
    int64_t damaged = larder_verify(c, LARDER_CHECKPOINTS, "killed", 0, LARDER_VERIFY_SCRUB, NULL, NULL, &e);
    if (damaged != 0)
        fail_msg("%lld damaged objects: %s", (long long)damaged, e.text);
    GOOD(larder_close(c, -1, &e));
    return i.step;
}

static void pause_ms(uint64_t ms)
{
    const struct timespec t = {.tv_sec = (time_t)(ms / 1000), .tv_nsec = (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

/* C1, C4: the process that saves dies; another goes on as a new attempt, with the same step. */
static void the_saving_process_is_killed(void **state)
{
    (void)state;
    uint8_t *memory = malloc(BYTES), *expected = malloc(BYTES);
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    GOOD(save_step(c, 1, 1, memory, &e));
    GOOD(larder_close(c, -1, &e));
    uint64_t newest = 1;
    for (int round = 0; round < ROUNDS; round++) {
        fflush(NULL);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            c = daemon_client(&server, "writer");
            for (uint64_t step = newest + 1;; step++)
                if (save_step(c, step, (uint8_t)(2 + round), memory, &e) < 0)
                    _exit(1);
        }
        pause_ms(30 + draw(150));
        int status = 0;
        assert_int_equal(waitpid(pid, &status, WNOHANG), 0); /* it had not failed by itself */
        kill(pid, SIGKILL);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        uint64_t step = newest_is_whole(memory, expected);
        assert_true(step >= newest);
        newest = step;
    }
    free(memory);
    free(expected);
}

/* The server dies and comes back: a save in flight ends, well or with a reason, and the next one works. */
static void the_server_is_killed(void **state)
{
    (void)state;
    uint8_t *memory = malloc(BYTES), *expected = malloc(BYTES);
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    uint64_t step = 1000, durable = 0;
    GOOD(save_step(c, step, 100, memory, &e));
    for (int round = 0; round < ROUNDS; round++) {
        struct larder_save_options o = LARDER_INIT(larder_save_options);
        struct larder_save *s = NULL;
        o.run = "killed";
        o.step = ++step;
        o.attempt[0] = 100;
        GOOD(larder_save_begin(c, &o, &s, &e));
        content(memory, step);
        struct larder_tensor t = {
            .name = "x", .dtype = LARDER_U8, .dims = 1, .shape = {BYTES}, .data = memory};
        GOOD(larder_save_tensor(s, &t, &e));
        GOOD(larder_save_submit(s, &e));
        pause_ms(draw(40));
        daemon_restart(&server);
        int rc = larder_save_wait(s, -1, &e);
        larder_save_free(s);
        assert_true(rc != -ETIMEDOUT);
        if (rc == 0)
            durable = step;
        else
            assert_true(strlen(e.text) > 20);
        uint64_t newest = newest_is_whole(memory, expected);
        assert_true(newest >= durable && newest <= step); /* what was told durable stays */
        GOOD(save_step(c, ++step, 100, memory, &e));
        durable = step;
    }
    GOOD(larder_close(c, -1, &e));
    free(memory);
    free(expected);
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
    const char *given = getenv("LARDER_TEST_SEED");
    rng = given ? strtoull(given, NULL, 0) | 1 : 0x6c61726465720003ull;
    printf("# seed %llu\n", (unsigned long long)rng);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_saving_process_is_killed),
        cmocka_unit_test(the_server_is_killed),
    };
    return cmocka_run_group_tests(tests, start_server, stop_server);
}
