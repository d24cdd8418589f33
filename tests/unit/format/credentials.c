/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a credential file survives a round trip, and each way of being wrong gets a sentence that names it.
 * Method: one good file, changed in one place at a time. And what jansson holds of it, keys among that, never
 * lies in ordinary memory: its own allocator, as it was before the first decoding, is not asked for any.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "format/credentials.h"

#define HEX "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
#define BEGIN                                                                                      \
    "{\"larder_credentials\": 1, \"server\": \"127.0.0.1:7440\", \"tenant\": \"acme\", \"role\": " \
    "\"writer\", \"ca\": \"CA\\n\", \"certificate\": \"CERT\\n\", \"key\": \"KEY\\n\""
#define KEKS ", \"keks\": [{\"epoch\": 1, \"key\": \"" HEX "\"}, {\"epoch\": 7, \"key\": \"" HEX "\"}]"

static size_t ordinary; /* pieces that jansson took from its own allocator */

static void *counted(size_t n)
{
    ordinary++;
    return malloc(n);
}

static void no_key_is_in_ordinary_memory(void **state)
{
    (void)state;
    static const char json[] = BEGIN KEKS "}";
    struct credentials c;
    struct buf out = {0};
    assert_int_equal(credentials_decode(json, sizeof json - 1, &c, NULL), 0);
    assert_int_equal(credentials_encode(&c, &out, NULL), 0);
    assert_true(credentials_decode(json, sizeof json - 10, &(struct credentials){0}, NULL) < 0);
    assert_int_equal(ordinary, 0);
    json_decref(json_pack("{s:s}", "others", "as before"));
    assert_true(ordinary > 0);
    buf_free(&out);
    credentials_free(&c);
}

static void a_file_is_read(void **state)
{
    (void)state;
    static const char json[] = BEGIN KEKS "}";
    struct credentials c;
    struct err e;
    if (credentials_decode(json, sizeof json - 1, &c, &e) < 0)
        fail_msg("%s", e.text);
    assert_string_equal(c.server, "127.0.0.1:7440");
    assert_string_equal(c.tenant, "acme");
    assert_int_equal(c.role, ROLE_WRITER);
    assert_string_equal(c.ca_pem, "CA\n");
    assert_string_equal(c.certificate_pem, "CERT\n");
    assert_int_equal(secret_size(c.key_pem), 5);
    assert_memory_equal(secret_bytes(c.key_pem), "KEY\n", 5);
    assert_int_equal(c.keks.count, 2);
    assert_int_equal(keyring_newest(&c.keks)->epoch, 7);
    assert_null(keyring_find(&c.keks, 2));
    for (int i = 0; i < KEY_BYTES; i++)
        assert_int_equal(secret_bytes(keyring_find(&c.keks, 1)->key)[i], i);
    assert_null(c.kek_command);
    credentials_free(&c);
    assert_null(c.ca_pem);
}

static void what_is_written_is_read_again(void **state)
{
    (void)state;
    static const char *const files[] = {BEGIN KEKS "}", BEGIN ", \"kek_command\": \"vault read kek\"}"};
    for (int i = 0; i < 2; i++) {
        struct credentials a, b;
        struct buf out = {0}, again = {0};
        assert_int_equal(credentials_decode(files[i], strlen(files[i]), &a, NULL), 0);
        assert_int_equal(credentials_encode(&a, &out, NULL), 0);
        assert_int_equal(credentials_decode(out.p, out.n, &b, NULL), 0);
        assert_int_equal(credentials_encode(&b, &again, NULL), 0);
        assert_int_equal(out.n, again.n);
        assert_memory_equal(out.p, again.p, out.n);
        assert_true(secret_equal(a.key_pem, b.key_pem));
        assert_int_equal(a.keks.count, b.keks.count);
        for (size_t k = 0; k < a.keks.count; k++) {
            assert_int_equal(a.keks.keks[k].epoch, b.keks.keks[k].epoch);
            assert_true(secret_equal(a.keks.keks[k].key, b.keks.keks[k].key));
        }
        if (i == 1)
            assert_string_equal(b.kek_command, "vault read kek");
        credentials_free(&a), credentials_free(&b);
        buf_free(&out), buf_free(&again);
    }
}

static void what_is_wrong_is_named(void **state)
{
    (void)state;
    static const struct {
        const char *json, *word;
        int rc;
    } cases[] = {
        {"", "is empty", -EINVAL},
        {"{", "not JSON", -EINVAL},
        {"[]", "JSON object", -EINVAL},
        {"{}", "not a credential file", -EINVAL},
        {"{\"larder_credentials\": 2}", "version 2", -EPROTONOSUPPORT},
        {BEGIN "}", "has no 'keks' and no 'kek_command'", -EINVAL},
        {BEGIN KEKS ", \"kek_command\": \"x\"}", "both 'keks' and 'kek_command'", -EINVAL},
        {BEGIN KEKS ", \"passwd\": \"x\"}", "a field 'passwd'", -EINVAL},
        {BEGIN KEKS ", \"server\": \"b:1\"}", "not JSON", -EINVAL}, /* twice */
        {BEGIN ", \"keks\": []}", "at least one key", -EINVAL},
        {BEGIN ", \"keks\": [1]}", "item 0", -EINVAL},
        {BEGIN ", \"keks\": [{\"epoch\": 0, \"key\": \"" HEX "\"}]}", "'epoch' from 1 on", -EINVAL},
        {BEGIN ", \"keks\": [{\"epoch\": 5000000000, \"key\": \"" HEX "\"}]}", "not 5000000000", -EINVAL},
        {BEGIN ", \"keks\": [{\"epoch\": 3}]}", "without a 'key'", -EINVAL},
        {BEGIN ", \"keks\": [{\"epoch\": 3, \"key\": \"00\"}]}", "epoch 3 is not 64 hex digits", -EINVAL},
        {BEGIN ", \"keks\": [{\"epoch\": 3, \"key\": \"" HEX "0\"}]}", "epoch 3 is not 64 hex", -EINVAL},
        {BEGIN ", \"keks\": [{\"epoch\": 3, \"key\": \"" HEX "\", \"x\": 1}]}", "'x' in 'keks'", -EINVAL},
        {BEGIN ", \"keks\": [{\"epoch\": 3, \"key\": \"" HEX "\"}, {\"epoch\": 3, \"key\": \"" HEX "\"}]}",
         "epoch 3 has two keys", -EINVAL},
        {"{\"larder_credentials\": 1, \"server\": \"h\"}", "HOST:PORT", -EINVAL},
        {"{\"larder_credentials\": 1, \"server\": 5}", "'server' that is not a string", -EINVAL},
        {"{\"larder_credentials\": 1, \"server\": \"h:1\"}", "has no 'tenant'", -EINVAL},
        {"{\"larder_credentials\": 1, \"server\": \"h:1\", \"tenant\": \"A b\"}", "\"A b\"", -EINVAL},
        {"{\"larder_credentials\": 1, \"server\": \"h:1\", \"tenant\": \"a\", \"role\": \"root\"}", "'root'",
         -EINVAL},
        {"{\"larder_credentials\": 1, \"server\": \"h:1\", \"tenant\": \"a\", \"role\": \"reader\"}",
         "has no 'ca'", -EINVAL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct credentials c;
        struct err e = {0};
        int rc = credentials_decode(cases[i].json, strlen(cases[i].json), &c, &e);
        if (rc != cases[i].rc || !strstr(e.text, cases[i].word))
            fail_msg("case %zu: %d, %s", i, rc, e.text);
        assert_null(strstr(e.text, "0001020304")); /* no key in a message */
        assert_null(c.key_pem);
    }
}

static void every_cut_is_refused(void **state)
{
    (void)state;
    static const char json[] = BEGIN KEKS "}";
    for (size_t n = 0; n < sizeof json - 1; n++) {
        char *copy = malloc(n + 1); /* exactly as long, so that a read beyond it is found */
        struct credentials c;
        memcpy(copy, json, n);
        assert_true(credentials_decode(copy, n, &c, NULL) < 0);
        free(copy);
    }
}

static void keks_of_a_command(void **state)
{
    (void)state;
    struct keyring k;
    struct err e;
    static const char text[] = "1 " HEX "\n\n  22\t" HEX "  \r\n";
    assert_int_equal(credentials_keks_parse(text, sizeof text - 1, &k, &e), 0);
    assert_int_equal(k.count, 2);
    assert_int_equal(k.keks[1].epoch, 22);
    keyring_free(&k);
    assert_int_equal(credentials_keks_parse("3 " HEX, 2 + 64, &k, &e), 0); /* no newline at the end */
    keyring_free(&k);
    static const struct {
        const char *text, *word;
    } bad[] = {
        {"", "no key"},
        {"\n \n", "no key"},
        {"1 " HEX "\n1 " HEX, "line 2: epoch 1 has two keys"},
        {HEX, "line 1"},
        {"x " HEX, "line 1"},
        {"0 " HEX, "line 1: a key's epoch"},
        {"4294967296 " HEX, "a key's epoch"},
        {"99999999999999999999 " HEX, "line 1"},
        {"1 " HEX "00", "not 64 hex digits"},
        {"1 zz", "not 64 hex digits"},
        {"1", "line 1"},
        {"error: permission denied", "line 1"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_true(credentials_keks_parse(bad[i].text, strlen(bad[i].text), &k, &e) < 0);
        if (!strstr(e.text, bad[i].word))
            fail_msg("case %zu: %s", i, e.text);
        assert_int_equal(k.count, 0);
    }
}

static void addresses(void **state)
{
    (void)state;
    char host[256], port[8];
    struct err e;
    assert_int_equal(address_split("store-1.example:7440", host, sizeof host, port, sizeof port, &e), 0);
    assert_string_equal(host, "store-1.example");
    assert_string_equal(port, "7440");
    assert_int_equal(address_split("[fd00::1]:1", host, sizeof host, port, sizeof port, &e), 0);
    assert_string_equal(host, "fd00::1");
    static const char *const bad[] = {"",         ":",         "h",         "h:",           ":1",
                                      "h:0",      "h:65536",   "h:1x",      "h:-1",         "h:+1",
                                      "h:123456", "fd00::1:5", "[fd00::1]", "[fd00::1]5:6", "[]:1",
                                      "a b:1",    "a/b:1",     "u@h:1",     "[::1:5"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        if (address_split(bad[i], host, sizeof host, port, sizeof port, &e) != -EINVAL)
            fail_msg("'%s' was taken", bad[i]);
    assert_int_equal(address_split("abcd:1", host, 4, port, sizeof port, &e), -EINVAL); /* no room */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_key_is_in_ordinary_memory),
        cmocka_unit_test(a_file_is_read),
        cmocka_unit_test(what_is_written_is_read_again),
        cmocka_unit_test(what_is_wrong_is_named),
        cmocka_unit_test(every_cut_is_refused),
        cmocka_unit_test(keks_of_a_command),
        cmocka_unit_test(addresses),
    };
    json_set_alloc_funcs(counted, free);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
