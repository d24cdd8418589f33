/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a save that has so long and no longer ends by then, durable or not at all, on every rank; what was
 * worth most went first, and what was left out is known by name. Likewise what a closed client lost. Method:
 * a real larderd, and a proxy before it that holds back what comes after so many bytes.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/larder.h"
#include "tests/support/daemon.h"
#include "tests/support/good.h"

#define FIRST_BYTES (3u << 20)
#define LAST_BYTES  (48u << 20) /* more than 8 MiB of staging and 32 MiB on their way; also less is saved */
#define SMALL       40          /* tensors of 100 bytes */

static struct daemon server;
static struct proxy *proxy;
static char proxied[320];
static uint8_t *memory;

/* Rank 0 of two: what matters least is added first. */
static struct larder_save *begin(struct larder *c, const char *run, uint64_t step, unsigned deadline_ms,
                                 uint32_t world, uint64_t last_bytes)
{
    struct larder_error e;
    struct larder_save *s = NULL;
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    o.run = run;
    o.step = step;
    o.world = world;
    o.attempt[0] = 1;
    o.deadline_ms = deadline_ms;
    o.compression = LARDER_COMPRESS_OFF;
    GOOD(larder_save_begin(c, &o, &s, &e));
    struct larder_tensor last = {.name = "last",
                                 .dtype = LARDER_U8,
                                 .dims = 1,
                                 .shape = {last_bytes},
                                 .data = memory,
                                 .priority = -10};
    struct larder_tensor first = {.name = "first",
                                  .dtype = LARDER_U8,
                                  .dims = 1,
                                  .shape = {FIRST_BYTES},
                                  .data = memory + 1,
                                  .priority = 10};
    GOOD(larder_save_tensor(s, &last, &e));
    for (unsigned i = 0; i < SMALL; i++) { /* every second one matters: they must not share chunks */
        char name[16];
        snprintf(name, sizeof name, "small/%u", i);
        struct larder_tensor t = {.name = name,
                                  .dtype = LARDER_U8,
                                  .dims = 1,
                                  .shape = {100},
                                  .data = memory + 100 * i,
                                  .priority = i % 2 ? 10 : -20};
        GOOD(larder_save_tensor(s, &t, &e));
    }
    GOOD(larder_save_tensor(s, &first, &e));
    GOOD(larder_save_blob(s, "rng", memory, 1000, &e));
    struct larder_tensor wrong = {.name = "wrong", .dtype = LARDER_U8, .data = memory, .priority = 101};
    assert_int_equal(larder_save_tensor(s, &wrong, &e), -EINVAL);
    assert_non_null(strstr(e.text, "\"wrong\" has priority 101"));
    return s;
}

struct other { /* rank 1: a small part, and all the time in the world */
    pthread_t thread;
    const char *run;
    uint64_t step;
    int rc;
    struct larder_error e;
};

static void *save_other(void *arg)
{
    struct other *k = arg;
    struct larder_error e;
    struct larder *c = daemon_client(&server, "writer");
    struct larder_save *s = NULL;
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    uint8_t byte = 7;
    o.run = k->run;
    o.step = k->step;
    o.rank = 1;
    o.world = 2;
    o.attempt[0] = 1;
    GOOD(larder_save_begin(c, &o, &s, &e));
    struct larder_tensor t = {.name = "own", .dtype = LARDER_U8, .data = &byte};
    GOOD(larder_save_tensor(s, &t, &e));
    k->rc = larder_save_submit(s, &k->e);
    if (k->rc == 0)
        k->rc = larder_save_wait(s, -1, &k->e);
    larder_save_free(s);
    GOOD(larder_close(c, -1, &e));
    return NULL;
}

static void compare(struct larder *c, const char *run, uint64_t last_bytes)
{
    struct larder_error e;
    struct larder_restore *r = NULL;
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    o.run = run;
    GOOD(larder_restore_open(c, &o, &r, &e));
    uint8_t *first = malloc(FIRST_BYTES), *last = malloc(LAST_BYTES), small[SMALL][100];
    struct larder_tensor t = {.name = "first", .dtype = LARDER_U8, .dims = 1, .data = first};
    GOOD(larder_restore_add(r, &t, &e));
    t = (struct larder_tensor){.name = "last", .dtype = LARDER_U8, .dims = 1, .data = last};
    GOOD(larder_restore_add(r, &t, &e));
    for (unsigned i = 0; i < SMALL; i++) {
        char name[16];
        snprintf(name, sizeof name, "small/%u", i);
        t = (struct larder_tensor){.name = name, .dtype = LARDER_U8, .dims = 1, .data = small[i]};
        GOOD(larder_restore_add(r, &t, &e));
    }
    GOOD(larder_restore_run(r, &e));
    assert_memory_equal(first, memory + 1, FIRST_BYTES);
    assert_memory_equal(last, memory, last_bytes);
    assert_memory_equal(small, memory, sizeof small);
    void *blob;
    size_t n;
    GOOD(larder_restore_blob(r, 0, "rng", &blob, &n, &e));
    assert_int_equal(n, 1000);
    assert_memory_equal(blob, memory, 1000);
    free(blob);
    free(first);
    free(last);
    larder_restore_close(r);
}

static void what_matters_goes_first_and_nothing_half_is_committed(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = daemon_client_at(proxied, 48u << 20);
    struct other other = {.run = "preempted", .step = 9};
    proxy_hold_after(proxy, FIRST_BYTES + (3u << 20));
    struct larder_save *s = begin(c, "preempted", 9, 5000, 2, 16u << 20);
    const char *name;
    assert_int_equal(larder_save_left_out(s, 0, &name), -ENOENT);
    assert_int_equal(larder_save_fence(s, 0, &e), -EINVAL); /* not submitted */
    pthread_create(&other.thread, NULL, save_other, &other);
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_fence(s, 0, &e)); /* host tensors are staged when submit returns */
    assert_int_equal(larder_save_wait(s, -1, &e), -ETIMEDOUT);
    assert_int_equal(e.kind, LARDER_TIMEOUT);
    assert_non_null(strstr(e.text, "saving step 9 of preempted, rank 0 of 2: the 5000 ms"));
    assert_non_null(strstr(e.text, "of 21 tensors (\"last\", ...")); /* and the small ones of its kind */
    GOOD(larder_save_fence(s, 0, &e));
    assert_int_equal(larder_save_left_out(s, 0, &name), 0);
    assert_string_equal(name, "last");
    assert_int_equal(larder_save_left_out(s, 20, &name), 0);
    assert_string_equal(name, "small/38");
    assert_int_equal(larder_save_left_out(s, 1, &name), 0);
    assert_string_equal(name, "small/0");
    assert_int_equal(larder_save_left_out(s, 21, &name), -ENOENT);
    larder_save_free(s);
    pthread_join(other.thread, NULL);
    assert_int_equal(other.rc, -ETIMEDOUT); /* it would have waited much longer */
    assert_int_equal(other.e.kind, LARDER_TIMEOUT);
    assert_non_null(strstr(other.e.text, "rank 0 gave up"));

    struct larder_restore *r = NULL;
    struct larder_restore_options ro = LARDER_INIT(larder_restore_options);
    ro.run = "preempted";
    assert_int_equal(larder_restore_open(c, &ro, &r, &e), -ENOENT);
    proxy_hold_after(proxy, UINT64_MAX);
    other.step = 10; /* with time enough all of it is there */
    s = begin(c, "preempted", 10, 60000, 2, 16u << 20);
    pthread_create(&other.thread, NULL, save_other, &other);
    GOOD(larder_save_submit(s, &e));
    GOOD(larder_save_wait(s, -1, &e));
    assert_int_equal(larder_save_left_out(s, 0, &name), -ENOENT);
    larder_save_free(s);
    pthread_join(other.thread, NULL);
    assert_int_equal(other.rc, 0);
    compare(c, "preempted", 16u << 20);
    GOOD(larder_close(c, -1, &e));
}

/* The deadline also ends what submit waits for: staging memory, in waves; the other ranks; the save before.
 */
static void submit_and_join_end_by_then_too(void **state)
{
    (void)state;
    struct larder_error e;
    const char *name;
    struct larder *c = daemon_client_at(proxied, 8u << 20);
    proxy_hold_after(proxy, 0);
    struct larder_save *s = begin(c, "waves", 1, 500, 1, LAST_BYTES);
    assert_int_equal(larder_save_submit(s, &e), -ETIMEDOUT);
    assert_int_equal(larder_save_fence(s, 0, &e), -ETIMEDOUT); /* the tensors were not all copied */
    assert_int_equal(larder_save_left_out(s, 0, &name), 0);
    assert_string_equal(name, "last");
    assert_int_equal(larder_save_left_out(s, 1 + SMALL, &name), 0);
    assert_string_equal(name, "first"); /* nothing at all went through */
    proxy_hold_after(proxy, UINT64_MAX);
    larder_save_free(s);
    s = begin(c, "waves", 2, 3000, 2, 2u << 20); /* rank 1 never comes; the bound of the join is 20 s */
    GOOD(larder_save_submit(s, &e));
    assert_int_equal(larder_save_wait(s, -1, &e), -ETIMEDOUT);
    assert_non_null(strstr(e.text, "1"));
    assert_int_equal(larder_save_left_out(s, 0, &name), -ENOENT); /* nothing of this rank's */
    larder_save_free(s);
    GOOD(larder_close(c, -1, &e));

    c = daemon_client_at(proxied, 64u << 20);
    proxy_hold_after(proxy, 1u << 20);
    s = begin(c, "waves", 3, 0, 1, 8u << 20);
    GOOD(larder_save_submit(s, &e));
    struct larder_save *second = begin(c, "waves", 4, 300, 1, 1000);
    assert_int_equal(larder_save_submit(second, &e), -ETIMEDOUT);
    assert_non_null(strstr(e.text, "step 3 of waves was still being sent"));
    larder_save_free(second);
    proxy_hold_after(proxy, UINT64_MAX);
    GOOD(larder_save_wait(s, -1, &e));
    larder_save_free(s);
    GOOD(larder_close(c, -1, &e));
}

static void close_says_what_was_lost(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder *c = daemon_client_at(proxied, 48u << 20);
    proxy_hold_after(proxy, 12u << 20);
    struct larder_save *s = begin(c, "closed", 77, 0, 1, 16u << 20);
    GOOD(larder_save_submit(s, &e));
    larder_save_free(s);
    assert_int_equal(larder_close(c, 100, &e), -ETIMEDOUT);
    assert_int_equal(e.kind, LARDER_TIMEOUT);
    assert_non_null(strstr(e.text, "step 77 of closed"));
    unsigned long long lost = 0, all = 0;
    const char *figures = strstr(e.text, "given up: ");
    assert_non_null(figures);
    assert_int_equal(sscanf(figures, "given up: %llu of %llu bytes", &lost, &all), 2);
    assert_int_equal(all, FIRST_BYTES + (16u << 20) + 100 * SMALL + 1000);
    assert_true(lost >= (7u << 20) && lost <= all); /* no more than was let through is there */
    proxy_hold_after(proxy, UINT64_MAX);
}

static int start_server(void **state)
{
    (void)state;
    daemon_start(&server);
    proxy = proxy_start(server.address);
    daemon_credentials_edit(&server, "writer", "proxied.json", proxy_address(proxy), NULL, NULL, proxied,
                            sizeof proxied);
    memory = malloc(LAST_BYTES);
    uint64_t x = 1;
    for (size_t i = 0; memory && i < LAST_BYTES; i++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        memory[i] = (uint8_t)(x >> 56);
    }
    return memory ? 0 : -1;
}

static int stop_server(void **state)
{
    (void)state;
    proxy_stop(proxy);
    daemon_stop(&server);
    free(memory);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_matters_goes_first_and_nothing_half_is_committed),
        cmocka_unit_test(submit_and_join_end_by_then_too),
        cmocka_unit_test(close_says_what_was_lost),
    };
    return cmocka_run_group_tests(tests, start_server, stop_server);
}
