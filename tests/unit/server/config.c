/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: what is right is read, what is wrong is refused with file, line and what is allowed.
 * Method: texts through config_parse; each refusal's text is looked at.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "server/config.h"

#define BASE                                                                                        \
    "[server]\nlisten = 127.0.0.1:7000, [::1]:7000\nstore = /var/lib/larder\ncertificate = s.pem\n" \
    "key = s.key\nca = ca.pem\n"

static void all_keys_are_read(void **state)
{
    (void)state;
    struct err e = {0};
    struct config *c;
    int r = config_parse(
        BASE
        "listen = localhost:0\nio = pool\nloops = 3\nbulk_lane = no\nspace_reserve = 64M\njoin_wait = 5m\n"
        "log_level = debug\nsessions_max = 7\n; a remark\n"
        "[publish a b]\npath = shards\ntenant = *\nformat = records\nrecord_bytes = 4K\n"
        "[publish c]\npath = /d\ntenant = acme\n"
        "[publish d]\npath = /d\ntenant = acme\nformat = tokens\nwindow = 2048+1\n"
        "[publish e]\npath = /d\ntenant = acme\nformat = mds\n"
        "[tenant acme]\nbandwidth = 200M\n",
        "x.conf", "/etc/larder", &c, &e);
    assert_string_equal(e.text, "");
    assert_int_equal(r, 0);
    assert_int_equal(c->listen_count, 3);
    assert_string_equal(c->listen[1], "[::1]:7000");
    assert_string_equal(c->listen[2], "localhost:0");
    assert_string_equal(c->store, "/var/lib/larder");
    assert_string_equal(c->key, "/etc/larder/s.key");
    assert_true(c->worker_pool);
    assert_int_equal(c->loops, 3);
    assert_false(c->bulk_lane);
    assert_int_equal(c->space_reserve_bytes, 64 << 20);
    assert_int_equal(c->join_wait_ms, 300000);
    assert_int_equal(c->limits.join_wait_ms, 300000);
    assert_int_equal(c->limits.sessions_max, 7);
    assert_int_equal(c->log_level, LOG_DEBUG);
    assert_int_equal(c->published_count, 4);
    assert_string_equal(c->published[0].name, "a b");
    assert_string_equal(c->published[0].path, "/etc/larder/shards");
    assert_int_equal(c->published[0].format, SHARD_RECORDS);
    assert_int_equal(c->published[0].record_bytes, 4096);
    assert_int_equal(c->published[1].format, SHARD_TAR);
    assert_int_equal(c->published[2].format, SHARD_TOKENS);
    assert_true(c->published[2].window.tokens == 2048 && c->published[2].window.extra == 1);
    assert_int_equal(c->published[3].format, SHARD_MDS);
    assert_string_equal(c->caps[0].tenant, "acme");
    assert_int_equal(c->caps[0].bytes_s, 200ull << 20);
    config_free(c);
}

static void refusals_say_where_and_what(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says[3];
    } cases[] = {
        {BASE "colour = red\n", {"x.conf, line 7", "no key \"colour\"", "space_reserve"}},
        {"[sever]\nstore = x\n", {"line 2", "[sever]", "[publish NAME]"}},
        {BASE "store = b\n", {"line 7", "store is given twice in [server]", ""}},
        {BASE "loops = 99\n", {"line 7", "loops", "from 1 to 16"}},
        {BASE "bulk_lane = maybe\n", {"line 7", "bulk_lane", "yes or no"}},
        {BASE "loops = many\n", {"line 7", "a number", "many"}},
        {BASE "space_reserve = 12Q\n", {"line 7", "a size from 0 to 1P", "12Q"}},
        {BASE "join_wait = 10 parsecs\n", {"line 7", "a time from 1s to 1d", "parsecs"}},
        {BASE "io = magic\n", {"line 7", "ring (io_uring) or pool", "magic"}},
        {BASE "listen = nowhere\n", {"line 7", "host:port", "nowhere"}},
        {BASE "  key = indented\n", {"line 7", "begins with a blank", ""}},
        {BASE "[publish x]\n# path = /a\n", {"line 7", "[publish x]", "is empty"}},
        {"[server]\n\n[tenant a]\nbandwidth = 1\n", {"line 1", "[server]", "is empty"}},
        {BASE "just words\n", {"line 7", "key = value", ""}},
        {BASE "[publish x]\ntenant = acme\n", {"[publish x]", "lacks \"path\"", ""}},
        {BASE "[publish x]\npath = /a\ntenant = Acme!\n", {"line 9", "a tenant's name", "Acme!"}},
        {BASE "[publish x]\npath = /a\ntenant = *\nformat = zip\n",
         {"line 10", "tar, mds, tokens, records or whole", "zip"}},
        {BASE "[publish x]\npath = /a\ntenant = *\nformat = records\n", {"[publish x]", "record_bytes", ""}},
        {BASE "[publish x]\npath = /a\ntenant = *\nwindow = many\n", {"line 10", "window", "2048+1"}},
        {BASE "[publish x]\npath = /a\ntenant = *\nwindow = 8\n", {"[publish x]", "format=tokens", ""}},
        {BASE "[tenant acme]\nweight = 3\n", {"line 8", "[tenant acme] has no key \"weight\"", "bandwidth"}},
        {"[server]\nlisten = a:1\n", {"lacks \"store\"", "", ""}},
        {"", {"lacks \"listen\"", "", ""}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct err e = {0};
        struct config *c = NULL;
        assert_true(config_parse(cases[i].text, "x.conf", "/", &c, &e) < 0);
        for (int k = 0; k < 3; k++)
            if (!strstr(e.text, cases[i].says[k]))
                fail_msg("case %zu: \"%s\" does not say \"%s\"", i, e.text, cases[i].says[k]);
    }
}

static void long_lines_are_refused_not_cut(void **state)
{
    (void)state;
    char text[600] = "[server]\nstore = /";
    struct err e = {0};
    struct config *c = NULL;
    memset(text + strlen(text), 'x', 300);
    assert_true(config_parse(text, "x.conf", "/", &c, &e) < 0);
    assert_non_null(strstr(e.text, "line 2"));
    assert_non_null(strstr(e.text, "at most 198"));
}

static void sizes_and_times(void **state)
{
    (void)state;
    uint64_t n;
    uint32_t ms;
    assert_int_equal(config_size("0", &n), 0);
    assert_int_equal(n, 0);
    assert_int_equal(config_size("3GiB", &n), 0);
    assert_int_equal(n, 3ull << 30);
    assert_int_equal(config_size("1P", &n), 0);
    assert_true(config_size("", &n) < 0);
    assert_true(config_size("-1", &n) < 0);
    assert_true(config_size("16777216T", &n) < 0); /* 2^64 */
    assert_true(config_size("99999999999999999999", &n) < 0);
    assert_true(config_size("1KB", &n) < 0);
    assert_int_equal(config_time("1d", &ms), 0);
    assert_int_equal(ms, 86400000);
    assert_int_equal(config_time("15", &ms), 0);
    assert_int_equal(ms, 15000);
    assert_int_equal(config_time("250ms", &ms), 0);
    assert_int_equal(ms, 250);
    assert_true(config_time("50d", &ms) < 0); /* more than 32 bits of ms */
    assert_true(config_time("1 s", &ms) < 0);
    assert_true(config_time("s", &ms) < 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_keys_are_read),
        cmocka_unit_test(refusals_say_where_and_what),
        cmocka_unit_test(long_lines_are_refused_not_cut),
        cmocka_unit_test(sizes_and_times),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
