/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: records are those of RFC 8446, and nothing that is not one comes out of record_open. Method: the
 * traffic secrets and records of RFC 8448, section 3; every suite both ways; every changed bit; records that
 * only a peer with the key can make: padding of any length, content too long, no content type.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/aead.h"
#include "format/base/hash.h"
#include "format/record.h"

static const uint16_t suites[] = {0x1301, 0x1302, 0x1303};

static size_t unhex(const char *text, uint8_t *out)
{
    size_t n = strlen(text) / 2;
    assert_int_equal(hex_decode(text, n, out), 0);
    return n;
}

static struct record_key *key_of(bool seals, uint16_t suite, const uint8_t *secret)
{
    struct record_key *k;
    assert_int_equal(record_key_create(seals, suite, secret, &k), 0);
    return k;
}

static void records_are_those_of_the_rfc(void **state)
{
    (void)state;
    uint8_t secret[32], content[50], record[128], want[128], out[128];
    enum record_type type;
    size_t bytes;
    for (uint8_t i = 0; i < sizeof content; i++)
        content[i] = i;
    unhex("9e40646ce79a7f9dc05af8889bce6552875afa0b06df0087f792ebb7c17504a5", secret); /* the client's */
    struct record_key *seals = key_of(true, 0x1301, secret), *opens = key_of(false, 0x1301, secret);
    size_t n =
        unhex("1703030043a23f7054b62c94d0affafe8228ba55cbefacea42f914aa66bcab3f2b9819a8a5b46b395bd54a9a20441e"
              "2b62974e1f5a6292a2977014bd1e3deae63aeebb21694915e4",
              want);
    /* However it is cut into parts. */
    struct slice parts[] = {SLICE(content, 7), SLICE(NULL, 0), SLICE(content + 7, 43)};
    assert_int_equal(record_seal(seals, RECORD_DATA, parts, 3, record), n);
    assert_memory_equal(record, want, n);
    size_t whole;
    assert_int_equal(record_bytes(record, &whole), 0);
    assert_int_equal(whole, n);
    assert_int_equal(record_open(opens, record, n, out, &type, &bytes), 0);
    assert_int_equal(type, RECORD_DATA);
    assert_int_equal(bytes, sizeof content);
    assert_memory_equal(out, content, sizeof content);
    n = unhex("1703030013c9872760655666b74d7ff1153efd6db6d0b0e3", want); /* then its close_notify */
    assert_int_equal(record_seal(seals, RECORD_ALERT, &SLICE("\1\0", 2), 1, record), n);
    assert_memory_equal(record, want, n);
    assert_int_equal(record_open(opens, record, n, out, &type, &bytes), 0);
    assert_int_equal(type, RECORD_ALERT);
    assert_int_equal(bytes, 2);
    record_key_free(seals);
    record_key_free(opens);
}

static void every_suite_carries_every_length(void **state)
{
    (void)state;
    static const size_t lengths[] = {0, 1, 15, 16, 17, 255, 4096, RECORD_CONTENT_MAX};
    uint8_t *plain = malloc(RECORD_CONTENT_MAX), *record = malloc(RECORD_BYTES_MAX),
            *out = malloc(RECORD_BYTES_MAX);
    for (size_t i = 0; i < RECORD_CONTENT_MAX; i++)
        plain[i] = (uint8_t)(i * 7 + i / 251);
    for (size_t s = 0; s < 3; s++) {
        uint8_t secret[RECORD_SECRET_MAX] = {(uint8_t)s, 9};
        struct record_key *seals = key_of(true, suites[s], secret), *opens = key_of(false, suites[s], secret);
        for (unsigned round = 0; round < 3; round++) {
            for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
                enum record_type type;
                size_t bytes, n = record_seal(seals, RECORD_DATA, &SLICE(plain, lengths[i]), 1, record);
                assert_int_equal(n, lengths[i] + RECORD_OVERHEAD);
                bool in_place = i % 2;
                uint8_t *to = in_place ? record + RECORD_HEADER_BYTES : out;
                assert_int_equal(record_open(opens, record, n, to, &type, &bytes), 0);
                assert_int_equal(bytes, lengths[i]);
                assert_memory_equal(to, plain, bytes);
            }
            uint8_t next[RECORD_SECRET_MAX]; /* both go on with the next secret, which is another */
            assert_int_equal(record_secret_next(suites[s], secret, next), 0);
            assert_memory_not_equal(next, secret, record_secret_bytes(suites[s]));
            memcpy(secret, next, sizeof secret);
            assert_int_equal(record_key_set(seals, secret), 0);
            assert_int_equal(record_key_set(opens, secret), 0);
        }
        record_key_free(seals);
        record_key_free(opens);
    }
    struct record_key *k;
    assert_int_equal(record_key_create(true, 0x1304, plain, &k), -ENOTSUP);
    free(plain), free(record), free(out);
}

static void what_was_changed_repeated_or_left_out_is_noticed(void **state)
{
    (void)state;
    uint8_t secret[RECORD_SECRET_MAX] = {1}, two[2][64], out[64];
    static const uint8_t zeros[64];
    enum record_type type;
    size_t bytes, n = 0;
    for (size_t s = 0; s < 3; s++) {
        struct record_key *seals = key_of(true, suites[s], secret);
        for (int i = 0; i < 2; i++)
            n = record_seal(seals, RECORD_DATA, &SLICE("sixteen or more bytes", 21), 1, two[i]);
        for (size_t bit = 0; bit < 8 * n; bit++) {
            struct record_key *opens = key_of(false, suites[s], secret);
            two[0][bit / 8] ^= (uint8_t)(1 << bit % 8);
            memset(out, 1, sizeof out);
            assert_int_equal(record_open(opens, two[0], n, out, &type, &bytes), ALERT_BAD_RECORD_MAC);
            assert_memory_equal(out, zeros, n - RECORD_OVERHEAD);
            two[0][bit / 8] ^= (uint8_t)(1 << bit % 8);
            record_key_free(opens);
        }
        struct record_key *opens = key_of(false, suites[s], secret);
        assert_int_equal(record_open(opens, two[1], n, out, &type, &bytes),
                         ALERT_BAD_RECORD_MAC); /* one is missing */
        assert_int_equal(record_key_set(opens, secret), 0);
        assert_int_equal(record_open(opens, two[0], n, out, &type, &bytes), 0);
        assert_int_equal(record_open(opens, two[0], n, out, &type, &bytes), ALERT_BAD_RECORD_MAC); /* again */
        record_key_free(opens);
        record_key_free(seals);
    }
}

/* A record as only a peer with the key can make it: n bytes of content, type and padding are sealed as they
 * are. record_seal ends each with a byte for the type, which is the last of them here. */
static size_t forge(const uint8_t *secret, const uint8_t *plain, size_t n, uint8_t *record)
{
    struct record_key *k = key_of(true, 0x1302, secret);
    size_t made = record_seal(k, (enum record_type)plain[n - 1], &SLICE(plain, n - 1), 1, record);
    record_key_free(k);
    return made;
}

static int open_forged(const uint8_t *plain, size_t n, enum record_type *type, size_t *bytes)
{
    static uint8_t record[RECORD_BYTES_MAX], out[RECORD_BYTES_MAX];
    uint8_t secret[RECORD_SECRET_MAX] = {4};
    struct record_key *k = key_of(false, 0x1302, secret);
    size_t made = forge(secret, plain, n, record);
    int alert = record_open(k, record, made, out, type, bytes);
    if (alert == 0 && *bytes > 0)
        assert_memory_equal(out, plain, *bytes);
    record_key_free(k);
    return alert;
}

static void padding_is_taken_off(void **state)
{
    (void)state;
    static uint8_t plain[RECORD_CONTENT_MAX];
    enum record_type type;
    size_t bytes;
    for (size_t content = 0; content < 40; content += 13) {
        for (size_t pad = 0; pad < 400; pad += 57) {
            memset(plain, 0, sizeof plain);
            memset(plain, 'x', content);
            plain[content] = RECORD_DATA;
            assert_int_equal(open_forged(plain, content + 1 + pad, &type, &bytes), 0);
            assert_int_equal(type, RECORD_DATA);
            assert_int_equal(bytes, content);
        }
    }
    memset(plain, 0, sizeof plain);
    assert_int_equal(open_forged(plain, 1, &type, &bytes), ALERT_UNEXPECTED_MESSAGE); /* zeros only */
    assert_int_equal(open_forged(plain, sizeof plain, &type, &bytes), ALERT_UNEXPECTED_MESSAGE);
}

static void content_of_other_kinds_is_refused(void **state)
{
    (void)state;
    enum record_type type;
    size_t bytes;
    for (unsigned t = 1; t < 256; t++) {
        uint8_t plain[] = {'x', (uint8_t)t};
        bool known = t == RECORD_ALERT || t == RECORD_HANDSHAKE || t == RECORD_DATA;
        assert_int_equal(open_forged(plain, 2, &type, &bytes), known ? 0 : ALERT_UNEXPECTED_MESSAGE);
        assert_int_equal(open_forged(plain + 1, 1, &type, &bytes),
                         t == RECORD_DATA ? 0 : ALERT_UNEXPECTED_MESSAGE);
    }
}

static void lengths_are_bounded(void **state)
{
    (void)state;
    size_t n;
    for (unsigned body = 0; body < 65536; body++) {
        const uint8_t header[] = {RECORD_DATA, 3, 3, (uint8_t)(body >> 8), (uint8_t)body};
        int want = body < 17 ? ALERT_DECODE_ERROR : body > 16384 + 256 ? ALERT_RECORD_OVERFLOW : 0;
        assert_int_equal(record_bytes(header, &n), want);
        assert_true(want || n == body + 5);
    }
    for (unsigned t = 0; t < 256; t++) { /* the version is of no meaning (5.1) */
        const uint8_t header[] = {(uint8_t)t, 9, 9, 0, 17};
        assert_int_equal(record_bytes(header, &n), t == RECORD_DATA ? 0 : ALERT_UNEXPECTED_MESSAGE);
    }
}

/* A record may be longer than its content may be: then what is too much must be padding. */
static void content_beyond_the_limit_is_refused(void **state)
{
    (void)state;
    static uint8_t record[RECORD_BYTES_MAX], plain[RECORD_BYTES_MAX], out[RECORD_BYTES_MAX];
    static const uint8_t ad[] = {RECORD_DATA, 3, 3, (RECORD_BYTES_MAX - 5) >> 8,
                                 (RECORD_BYTES_MAX - 5) & 255};
    uint8_t secret[32];
    unhex("9e40646ce79a7f9dc05af8889bce6552875afa0b06df0087f792ebb7c17504a5", secret);
    uint8_t key[16], iv[12]; /* of that secret, also from RFC 8448 */
    unhex("17422dda596ed5d9acd890e3c63f5051", key);
    unhex("5b78923dee08579033e523d9", iv);
    size_t inner = RECORD_BYTES_MAX - 5 - 16, bytes;
    enum record_type type;
    for (size_t content = RECORD_CONTENT_MAX; content <= RECORD_CONTENT_MAX + 1; content++) {
        struct aead *a = aead_create(AEAD_AES_128_GCM, true);
        struct record_key *k = key_of(false, 0x1301, secret);
        memset(plain, 0, inner);
        memset(plain, 'x', content);
        plain[content] = RECORD_DATA;
        memcpy(record, ad, sizeof ad);
        aead_key(a, key);
        aead_seal(a, iv, ad, sizeof ad, plain, inner, record + 5, NULL);
        assert_int_equal(record_open(k, record, RECORD_BYTES_MAX, out, &type, &bytes),
                         content > RECORD_CONTENT_MAX ? ALERT_RECORD_OVERFLOW : 0);
        assert_true(content > RECORD_CONTENT_MAX || bytes == content);
        record_key_free(k);
        aead_free(a);
    }
}

static void a_key_wears_out(void **state)
{
    (void)state;
    uint8_t secret[RECORD_SECRET_MAX] = {5}, record[64];
    struct record_key *k = key_of(true, 0x1303, secret);
    for (uint32_t i = 0; i < RECORD_KEY_MAX; i++) {
        assert_false(record_key_worn(k));
        (void)record_seal(k, RECORD_DATA, &SLICE("x", 1), 1, record);
    }
    assert_true(record_key_worn(k));
    (void)record_seal(k, RECORD_HANDSHAKE, &SLICE("update", 6), 1, record); /* the update itself */
    assert_int_equal(record_key_set(k, secret), 0);
    assert_false(record_key_worn(k));
    record_key_free(k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(records_are_those_of_the_rfc),
        cmocka_unit_test(every_suite_carries_every_length),
        cmocka_unit_test(what_was_changed_repeated_or_left_out_is_noticed),
        cmocka_unit_test(padding_is_taken_off),
        cmocka_unit_test(content_of_other_kinds_is_refused),
        cmocka_unit_test(lengths_are_bounded),
        cmocka_unit_test(content_beyond_the_limit_is_refused),
        cmocka_unit_test(a_key_wears_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
