/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: key derivation is RFC 5869; an envelope opens with the right KEK only, tells a wrong key from damage,
 * and has the bytes that FORMAT.md says. Method: known answers, an envelope rebuilt by hand, every changed
 * bit.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/aead.h"
#include "format/base/cursor.h"
#include "format/base/hash.h"
#include "format/keys.h"

static void ramp(uint8_t *p, size_t n, unsigned from)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)(from + i);
}

static void expect_hex(const void *p, size_t n, const char *hex)
{
    char text[256];
    hex_encode(p, n, text);
    assert_string_equal(text, hex);
}

/* RFC 5869, appendix A.1 to A.3. */
static void hkdf_known_answers(void **state)
{
    (void)state;
    uint8_t ikm[80], salt[80], info[80], okm[82];
    memset(ikm, 0x0b, 22);
    ramp(salt, 13, 0);
    ramp(info, 10, 0xf0);
    hkdf_sha256(ikm, 22, salt, 13, info, 10, okm, 42);
    expect_hex(okm, 42,
               "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865");
    hkdf_sha256(ikm, 22, NULL, 0, NULL, 0, okm, 42);
    expect_hex(okm, 42,
               "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8");
    ramp(ikm, 80, 0);
    ramp(salt, 80, 0x60);
    ramp(info, 80, 0xb0);
    hkdf_sha256(ikm, 80, salt, 80, info, 80, okm, 82);
    expect_hex(
        okm, 82,
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
        "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87");
}

struct fixture {
    struct keyring ring;
    struct dek dek;
    struct id run_id;
    uint8_t salt[SALT_BYTES], envelope[ENVELOPE_BYTES];
};

static struct kek make_kek(uint32_t epoch, unsigned from)
{
    uint8_t raw[KEY_BYTES];
    ramp(raw, sizeof raw, from);
    return (struct kek){.epoch = epoch, .key = secret_create(raw, sizeof raw)};
}

static void make(struct fixture *f)
{
    uint8_t raw[KEY_BYTES];
    memset(f, 0, sizeof *f);
    f->ring.count = 2;
    f->ring.keks = calloc(2, sizeof *f->ring.keks);
    f->ring.keks[0] = make_kek(3, 0x10);
    f->ring.keks[1] = make_kek(2, 0x40);
    ramp(raw, sizeof raw, 0x80);
    f->dek.key = secret_create(raw, sizeof raw);
    ramp(f->dek.id.bytes, ID_BYTES, 0xa0);
    ramp(f->run_id.bytes, ID_BYTES, 0xb0);
    ramp(f->salt, SALT_BYTES, 0xc0);
    assert_int_equal(envelope_wrap(&f->ring.keks[0], "acme", &f->run_id, &f->dek, f->salt, f->envelope, NULL),
                     0);
}

static void drop(struct fixture *f)
{
    keyring_free(&f->ring);
    dek_free(&f->dek);
}

static void an_envelope_opens(void **state)
{
    (void)state;
    struct fixture f;
    struct dek got;
    struct id run;
    uint32_t epoch;
    make(&f);
    assert_int_equal(keyring_newest(&f.ring)->epoch, 3);
    assert_int_equal(envelope_epoch(f.envelope, sizeof f.envelope, &run, &epoch, NULL), 0);
    assert_int_equal(epoch, 3);
    struct id dek_id = envelope_dek_id(f.envelope);
    assert_true(id_equal(&dek_id, &f.dek.id));
    assert_true(id_equal(&run, &f.run_id));
    assert_int_equal(envelope_open(&f.ring, "acme", &f.run_id, f.envelope, ENVELOPE_BYTES, &got, NULL), 0);
    assert_true(secret_equal(got.key, f.dek.key));
    assert_true(id_equal(&got.id, &f.dek.id));
    dek_free(&got);
    drop(&f);
}

/* What another implementation would write, from FORMAT.md alone. */
static void an_envelope_has_the_bytes_of_the_specification(void **state)
{
    (void)state;
    struct fixture f;
    make(&f);
    uint8_t want[256] = {0}, info[2 + 17 + 12 + 16 + 64] = {0}, okm[64], dek[32];
    memcpy(want + 8, "LARDENVL", 8);
    le32_put(want + 16, 1);
    le32_put(want + 20, 1);
    le32_put(want + 24, 3);
    ramp(want + 32, 16, 0xb0);
    ramp(want + 48, 16, 0xa0);
    memcpy(want + 64, "acme", 4);
    ramp(want + 128, 32, 0xc0);
    le16_put(info, 17);
    memcpy(info + 2, "larder/1 envelope", 17);
    le32_put(info + 19, 1);
    le32_put(info + 23, 1);
    le32_put(info + 27, 3);
    ramp(info + 31, 16, 0xb0);
    memcpy(info + 47, "acme", 4);
    hkdf_sha256(secret_bytes(f.ring.keks[0].key), 32, want + 128, 32, info, sizeof info, okm, 64);
    memcpy(want + 160, okm + 32, 32);
    struct aead *a = aead_create(AEAD_AES_256_GCM, true);
    aead_key(a, okm);
    ramp(dek, 32, 0x80);
    aead_seal(a, (const uint8_t[12]){0}, want + 8, 184, dek, 32, want + 192, NULL);
    aead_free(a);
    le64_put(want, hash64(want + 8, 248));
    assert_memory_equal(f.envelope, want, 256);
    /* And they never change: XXH3-64 of the whole. */
    assert_int_equal(hash64(f.envelope, 256), 0x6ebefa041b92eb0dull);
    drop(&f);
}

static void a_wrong_key_is_not_called_damage(void **state)
{
    (void)state;
    struct fixture f;
    struct dek got;
    struct err e;
    make(&f);
    struct keyring other = {.count = 1, .keks = calloc(1, sizeof(struct kek))};
    other.keks[0] = make_kek(3, 0x11);
    assert_int_equal(envelope_open(&other, "acme", &f.run_id, f.envelope, ENVELOPE_BYTES, &got, &e),
                     -EKEYREJECTED);
    assert_int_equal(e.class, ERR_KEY);
    assert_int_equal(strncmp(e.text, "wrong key: KEK epoch 3", 22), 0);
    assert_null(got.key);
    other.keks[0].epoch = 9;
    assert_int_equal(envelope_open(&other, "acme", &f.run_id, f.envelope, ENVELOPE_BYTES, &got, &e),
                     -EKEYREJECTED);
    assert_non_null(strstr(e.text, "epoch 3, the credentials hold only epoch 9"));
    keyring_free(&other);
    assert_int_equal(envelope_open(&other, "acme", &f.run_id, f.envelope, ENVELOPE_BYTES, &got, &e),
                     -EKEYREJECTED);
    assert_non_null(strstr(e.text, "no KEK"));
    struct id run = f.run_id;
    run.bytes[0]++;
    assert_int_equal(envelope_open(&f.ring, "acme", &run, f.envelope, ENVELOPE_BYTES, &got, &e), -EBADMSG);
    assert_int_equal(envelope_open(&f.ring, "acm", &f.run_id, f.envelope, ENVELOPE_BYTES, &got, &e),
                     -EBADMSG);
    assert_non_null(strstr(e.text, "expected tenant 'acm', found 'acme'"));
    drop(&f);
}

static void every_changed_bit_is_noticed(void **state)
{
    (void)state;
    struct fixture f;
    struct dek got;
    struct id run;
    struct err e;
    uint32_t epoch;
    make(&f);
    for (size_t bit = 0; bit < 8 * ENVELOPE_BYTES; bit++) {
        f.envelope[bit / 8] ^= (uint8_t)(1 << bit % 8);
        int rc = envelope_epoch(f.envelope, ENVELOPE_BYTES, &run, &epoch, &e);
        bool in_version = bit / 32 == 4;
        assert_int_equal(rc, in_version ? -EPROTONOSUPPORT : -EBADMSG);
        assert_int_equal(envelope_open(&f.ring, "acme", &f.run_id, f.envelope, ENVELOPE_BYTES, &got, &e), rc);
        /* With a checksum to fit, as somebody would who means to: still refused. */
        uint8_t forged[ENVELOPE_BYTES];
        memcpy(forged, f.envelope, sizeof forged);
        le64_put(forged, hash64(forged + 8, sizeof forged - 8));
        rc = envelope_open(&f.ring, "acme", &f.run_id, forged, ENVELOPE_BYTES, &got, &e);
        if (bit >= 64)
            assert_true(rc < 0);
        if ((bit / 8 >= 28 && bit / 8 < 32) || bit / 8 >= 240) /* reserved: also who has no key refuses it */
            assert_int_equal(envelope_epoch(forged, sizeof forged, &run, &epoch, NULL), -EBADMSG);
        if (bit / 8 >= 192 && bit / 8 < 240)
            assert_non_null(strstr(e.text, "the KEK is right"));
        f.envelope[bit / 8] ^= (uint8_t)(1 << bit % 8);
        if (rc == 0)
            dek_free(&got);
    }
    assert_int_equal(envelope_epoch(f.envelope, ENVELOPE_BYTES - 1, &run, &epoch, &e), -EBADMSG);
    assert_int_equal(envelope_epoch(NULL, 0, &run, &epoch, &e), -EBADMSG);
    drop(&f);
}

static void salt_tenant_and_epoch_make_a_different_envelope(void **state)
{
    (void)state;
    struct fixture f;
    uint8_t other[ENVELOPE_BYTES], salt[SALT_BYTES];
    make(&f);
    memcpy(salt, f.salt, sizeof salt);
    salt[31] ^= 1;
    assert_int_equal(envelope_wrap(&f.ring.keks[0], "acme", &f.run_id, &f.dek, salt, other, NULL), 0);
    assert_memory_not_equal(other + 192, f.envelope + 192, 48);
    assert_memory_not_equal(other + 160, f.envelope + 160, 32);
    assert_int_equal(envelope_wrap(&f.ring.keks[0], "acmf", &f.run_id, &f.dek, f.salt, other, NULL), 0);
    assert_memory_not_equal(other + 192, f.envelope + 192, 48);
    assert_int_equal(envelope_wrap(&f.ring.keks[0], "No Tenant", &f.run_id, &f.dek, f.salt, other, NULL),
                     -EINVAL);
    drop(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hkdf_known_answers),
        cmocka_unit_test(an_envelope_opens),
        cmocka_unit_test(an_envelope_has_the_bytes_of_the_specification),
        cmocka_unit_test(a_wrong_key_is_not_called_damage),
        cmocka_unit_test(every_changed_bit_is_noticed),
        cmocka_unit_test(salt_tenant_and_epoch_make_a_different_envelope),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
