/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: whoever changes, drops, repeats or swaps what travels on a bulk lane makes no wrong byte be stored or
 * handed out; the save or restore goes on, at worst over TLS, and says so. Method: a real larderd, and an
 * adversary on the path (tests/support/tamper.h) who knows the form of lanes.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/larder.h"
#include "tests/support/daemon.h"
#include "tests/support/good.h"
#include "tests/support/sanitized.h"
#include "tests/support/tamper.h"

#define MIB   (1u << 20)
#define BYTES (24u * MIB)
#define EVER  1000000u

static struct daemon server;
static struct tamper *path;
static char credentials[320];
static uint8_t *data, *back;
static uint64_t step;

static int set_up(void **state)
{
    (void)state;
    uint64_t x = 88172645463325252u;
    data = malloc(BYTES);
    back = malloc(BYTES);
    for (size_t i = 0; i < BYTES; i += 8) { /* does not shrink */
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        memcpy(data + i, &x, 8);
    }
    daemon_start(&server);
    path = tamper_start(server.address);
    daemon_credentials_edit(&server, "admin", "tampered.json", tamper_address(path), NULL, NULL, credentials,
                            sizeof credentials);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    tamper_stop(path);
    daemon_stop(&server);
    free(data);
    free(back);
    return 0;
}

static struct larder *client(int no_bulk_lane)
{
    struct larder_options o = LARDER_INIT(larder_options);
    struct larder *c = NULL;
    struct larder_error e;
    o.credentials = credentials;
    o.staging_bytes = 16 * MIB;
    /* of a frame that was dropped, and nothing came after it */
    o.request_timeout_ms = SANITIZED ? 20000 : 5000;
    o.no_bulk_lane = no_bulk_lane;
    GOOD(larder_open(&o, &c, &e));
    return c;
}

static struct larder_tensor all(uint8_t *p)
{
    return (struct larder_tensor){.name = "t", .dtype = LARDER_U8, .dims = 1, .shape = {BYTES}, .data = p};
}

static int save(struct larder *c, char path_used[128], struct larder_error *e)
{
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    struct larder_save_info i = LARDER_INIT(larder_save_info);
    struct larder_save *s = NULL;
    struct larder_tensor t = all(data);
    o.run = "run";
    o.step = ++step;
    int rc = larder_save_begin(c, &o, &s, e);
    if (rc == 0)
        rc = larder_save_tensor(s, &t, e);
    if (rc == 0)
        rc = larder_save_submit(s, e);
    if (rc == 0)
        rc = larder_save_wait(s, 60000, e);
    if (s && larder_save_info(s, &i) == 0)
        memcpy(path_used, i.path, 128);
    larder_save_free(s);
    return rc;
}

static int restore(struct larder *c, char path_used[128], struct larder_error *e)
{
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    struct larder_restore_info i = LARDER_INIT(larder_restore_info);
    struct larder_restore *r = NULL;
    struct larder_tensor t = all(back);
    memset(back, 0, BYTES);
    o.run = "run";
    o.memory_bytes = 4 * MIB; /* a request for each chunk, so that others follow the one that is changed */
    int rc = larder_restore_open(c, &o, &r, e);
    if (rc == 0)
        rc = larder_restore_add(r, &t, e);
    if (rc == 0)
        rc = larder_restore_run(r, e);
    if (r && larder_restore_info(r, &i) == 0)
        memcpy(path_used, i.path, 128);
    if (rc == 0)
        assert_memory_equal(back, data, BYTES);
    larder_restore_close(r);
    return rc;
}

/* With a client of its own that takes no lane: what is stored is right, whatever happened on the way there.
 */
static void expect_stored(void)
{
    struct larder_error e;
    char used[128];
    struct larder *c = client(1);
    GOOD(restore(c, used, &e));
    assert_non_null(strstr(used, "TLS 1.3 over TCP"));
    GOOD(larder_close(c, -1, &e));
}

static void sealed_chunks_take_the_lane(void **state)
{
    (void)state;
    struct larder_error e;
    struct larder_info i = LARDER_INIT(larder_info);
    char used[128];
    struct larder *c = client(0);
    GOOD(larder_info(c, &i, &e));
    assert_non_null(strstr(i.path, "sealed chunks on plain TCP, authenticated; the rest TLS 1.3"));
    unsigned before = tamper_frames(path);
    GOOD(save(c, used, &e));
    assert_non_null(strstr(used, "sealed chunks on plain TCP, authenticated; the rest TLS 1.3"));
    assert_true(tamper_frames(path) - before >= 2 * BYTES / (4 * MIB)); /* chunks, and their answers */
    before = tamper_frames(path);
    GOOD(restore(c, used, &e));
    assert_non_null(strstr(used, "sealed chunks on plain TCP, authenticated; the rest TLS 1.3"));
    assert_true(tamper_frames(path) - before >= BYTES / MIB);
    GOOD(larder_close(c, -1, &e));
    before = tamper_frames(path);
    expect_stored();
    assert_int_equal(tamper_frames(path), before);
}

static void what_is_changed_once_is_made_good(void **state)
{
    (void)state;
    for (enum tamper_kind kind = 0; kind < TAMPER_KINDS; kind++) {
        for (int to_server = 0; to_server < 2; to_server++) {
            struct larder_error e;
            char used[128];
            struct larder *c = client(0);
            unsigned before = tamper_count(path);
            tamper_arm(path, kind, to_server, 2, 1);
            GOOD(save(c, used, &e));
            if (kind != TAMPER_PAYLOAD || to_server) /* answers to chunks have no payload */
                assert_int_equal(tamper_count(path), before + 1);
            tamper_arm(path, kind, to_server, 0, 0);
            expect_stored();
            before = tamper_count(path);
            tamper_arm(path, kind, to_server, to_server ? 1 : 5, 1);
            GOOD(restore(c, used, &e)); /* and compared */
            assert_int_equal(tamper_count(path), before + 1);
            tamper_arm(path, kind, to_server, 0, 0);
            assert_non_null(strstr(used, "sealed chunks on plain TCP")); /* once is no reason to give up */
            GOOD(larder_close(c, -1, &e));
        }
    }
}

/* An adversary who does not stop: everything goes over TLS in the end, and that is shown. */
static void what_is_changed_for_ever_goes_over_tls(void **state)
{
    (void)state;
    static const enum tamper_kind kinds[] = {TAMPER_HEADER, TAMPER_TAG};
    for (unsigned i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        for (int to_server = 0; to_server < 2; to_server++) {
            struct larder_error e;
            char used[128];
            struct larder *c = client(0);
            tamper_arm(path, kinds[i], to_server, 0, EVER);
            GOOD(save(c, used, &e));
            assert_string_not_equal(used, "");
            /* Where only answers are changed, the chunks arrive, and the server is asked what it has. */
            if (to_server)
                assert_non_null(strstr(used, "the bulk lane failed"));
            GOOD(restore(c, used, &e));
            assert_null(strstr(used, "plain TCP"));
            tamper_arm(path, kinds[i], to_server, 0, 0);
            GOOD(larder_close(c, -1, &e));
            expect_stored();
        }
    }
}

/* The lane does not cover bytes of sealed chunks on their way to the client: their own tags do, and what came
 * damaged is asked for again over TLS. */
static void changed_chunks_are_asked_for_again(void **state)
{
    (void)state;
    struct larder_error e;
    char used[128];
    struct larder *c = client(0);
    GOOD(save(c, used, &e));
    unsigned before = tamper_count(path);
    tamper_arm(path, TAMPER_PAYLOAD, false, 0, EVER);
    GOOD(restore(c, used, &e));
    assert_true(tamper_count(path) - before >= BYTES / MIB / 2);
    tamper_arm(path, TAMPER_PAYLOAD, false, 0, 0);
    GOOD(larder_close(c, -1, &e));
}

/* The server is killed and comes back while lanes are open. */
static void lanes_come_back_after_a_restart(void **state)
{
    (void)state;
    struct larder_error e;
    char used[128];
    struct larder *c = client(0);
    GOOD(save(c, used, &e));
    unsigned lanes = tamper_lanes(path);
    daemon_kill(&server);
    daemon_restart(&server);
    GOOD(save(c, used, &e));
    assert_true(tamper_lanes(path) > lanes);
    assert_non_null(strstr(used, "sealed chunks on plain TCP"));
    GOOD(larder_close(c, -1, &e));
    expect_stored();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sealed_chunks_take_the_lane),
        cmocka_unit_test(what_is_changed_once_is_made_good),
        cmocka_unit_test(what_is_changed_for_ever_goes_over_tls),
        cmocka_unit_test(changed_chunks_are_asked_for_again),
        cmocka_unit_test(lanes_come_back_after_a_restart),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
