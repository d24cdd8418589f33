/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: our wrapper is AES-256-GCM, and lets no unverified byte out. Method: test cases 13 to 16 of the GCM
 * specification (McGrew and Viega, submission to NIST), then every changed bit; and whoever does the
 * arithmetic here, what OpenSSL says, at every length and however it is cut.
 */
#include <errno.h>
#include <openssl/evp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/aead.h"
#include "format/base/hash.h"

static const struct {
    const char *key, *nonce, *ad, *plain, *sealed;
} vectors[] = {
    {"0000000000000000000000000000000000000000000000000000000000000000", "000000000000000000000000", "", "",
     "530f8afbc74536b9a963b4f1c4cb738b"},
    {"0000000000000000000000000000000000000000000000000000000000000000", "000000000000000000000000", "",
     "00000000000000000000000000000000", "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"},
    {"feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308", "cafebabefacedbaddecaf888", "",
     "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525"
     "b16aedf5aa0de657ba637b391aafd255",
     "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b1056828838"
     "c5f61e6393ba7a0abcc9f662898015adb094dac5d93471bdec1a502270e3cc6c"},
    {"feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308", "cafebabefacedbaddecaf888",
     "feedfacedeadbeeffeedfacedeadbeefabaddad2",
     "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525"
     "b16aedf5aa0de657ba637b39",
     "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b1056828838"
     "c5f61e6393ba7a0abcc9f66276fc6ece0f4e1768cddf8853bb2d551b"},
};

static size_t unhex(const char *text, uint8_t *out)
{
    size_t n = strlen(text) / 2;
    assert_int_equal(hex_decode(text, n, out), 0);
    return n;
}

/* The sum is that of the sealed bytes with their tag, in place or not, however many pieces it takes. */
static void sums_are_those_of_the_sealed_bytes(void **state)
{
    (void)state;
    static const size_t lengths[] = {0, 1, 16, 32767, 32768, 32769, 100000};
    struct aead *seals = aead_create(AEAD_AES_256_GCM, true), *opens = aead_create(AEAD_AES_256_GCM, false);
    uint8_t key[32] = {3}, nonce[12] = {4}, *plain = calloc(1, 100000), *sealed = malloc(100016);
    aead_key(seals, key);
    aead_key(opens, key);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        size_t n = lengths[i];
        struct hash128 sealing, opening, want;
        aead_seal(seals, nonce, "ad", 2, plain, n, sealed, &sealing);
        want = hash128(sealed, n + AEAD_TAG_BYTES);
        assert_memory_equal(&sealing, &want, sizeof want);
        assert_int_equal(aead_open(opens, nonce, "ad", 2, sealed, n + AEAD_TAG_BYTES, sealed, &opening), 0);
        assert_memory_equal(&opening, &want, sizeof want);
        assert_memory_equal(sealed, plain, n);
        aead_seal(seals, nonce, "ad", 2, plain, n, sealed, NULL);
        sealed[n / 2] ^= 1;
        want = hash128(sealed, n + AEAD_TAG_BYTES);
        assert_int_equal(aead_open(opens, nonce, "ad", 2, sealed, n + AEAD_TAG_BYTES, sealed, &opening),
                         -EBADMSG);
        assert_memory_equal(&opening, &want, sizeof want);
    }
    aead_free(seals);
    aead_free(opens);
    free(plain);
    free(sealed);
}

static void known_answers(void **state)
{
    (void)state;
    struct aead *seals = aead_create(AEAD_AES_256_GCM, true), *opens = aead_create(AEAD_AES_256_GCM, false);
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        uint8_t key[32], nonce[12], ad[64], plain[128], sealed[128], out[128];
        unhex(vectors[i].key, key);
        unhex(vectors[i].nonce, nonce);
        size_t ad_n = unhex(vectors[i].ad, ad), n = unhex(vectors[i].plain, plain);
        assert_int_equal(unhex(vectors[i].sealed, sealed), n + AEAD_TAG_BYTES);
        aead_key(seals, key);
        aead_key(opens, key);
        aead_seal(seals, nonce, ad, ad_n, plain, n, out, NULL);
        assert_memory_equal(out, sealed, n + AEAD_TAG_BYTES);
        memset(out, 0xee, sizeof out);
        assert_int_equal(aead_open(opens, nonce, ad, ad_n, sealed, n + AEAD_TAG_BYTES, out, NULL), 0);
        assert_memory_equal(out, plain, n);
        /* In place, both ways. */
        memcpy(out, plain, n);
        aead_seal(seals, nonce, ad, ad_n, out, n, out, NULL);
        assert_memory_equal(out, sealed, n + AEAD_TAG_BYTES);
        assert_int_equal(aead_open(opens, nonce, ad, ad_n, out, n + AEAD_TAG_BYTES, out, NULL), 0);
        assert_memory_equal(out, plain, n);
    }
    aead_free(seals);
    aead_free(opens);
}

static void every_changed_bit_is_noticed(void **state)
{
    (void)state;
    struct aead *opens = aead_create(AEAD_AES_256_GCM, false);
    uint8_t key[32], nonce[12], ad[64], sealed[128], out[128], zero[128] = {0};
    unhex(vectors[3].key, key);
    unhex(vectors[3].nonce, nonce);
    size_t ad_n = unhex(vectors[3].ad, ad), n = unhex(vectors[3].sealed, sealed);
    aead_key(opens, key);
    uint8_t *const parts[] = {nonce, ad, sealed};
    const size_t sizes[] = {sizeof nonce, ad_n, n};
    for (int p = 0; p < 3; p++)
        for (size_t bit = 0; bit < 8 * sizes[p]; bit++) {
            parts[p][bit / 8] ^= (uint8_t)(1 << bit % 8);
            memset(out, 0xee, sizeof out);
            assert_int_equal(aead_open(opens, nonce, ad, ad_n, sealed, n, out, NULL), -EBADMSG);
            assert_memory_equal(out, zero, n - AEAD_TAG_BYTES); /* wiped */
            assert_int_equal(out[n - AEAD_TAG_BYTES], 0xee);
            parts[p][bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
    assert_int_equal(aead_open(opens, nonce, ad, ad_n, sealed, n, out, NULL), 0);
    assert_int_equal(aead_open(opens, nonce, ad, ad_n - 1, sealed, n, out, NULL), -EBADMSG);
    assert_int_equal(aead_open(opens, nonce, ad, ad_n, sealed, n - 1, out, NULL), -EBADMSG);
    assert_int_equal(aead_open(opens, nonce, ad, ad_n, sealed, AEAD_TAG_BYTES, out, NULL), -EBADMSG);
    aead_free(opens);
}

static void openssl_seals(enum aead_suite suite, const uint8_t *key, const uint8_t *nonce, const uint8_t *ad,
                          size_t ad_bytes, const uint8_t *plain, size_t n, uint8_t *out)
{
    const EVP_CIPHER *c = suite == AEAD_AES_256_GCM   ? EVP_aes_256_gcm()
                          : suite == AEAD_AES_128_GCM ? EVP_aes_128_gcm()
                                                      : EVP_chacha20_poly1305();
    EVP_CIPHER_CTX *x = EVP_CIPHER_CTX_new();
    int done;
    assert_int_equal(EVP_EncryptInit_ex(x, c, NULL, key, nonce), 1);
    if (ad_bytes > 0)
        assert_int_equal(EVP_EncryptUpdate(x, NULL, &done, ad, (int)ad_bytes), 1);
    if (n > 0)
        assert_int_equal(EVP_EncryptUpdate(x, out, &done, plain, (int)n), 1);
    assert_int_equal(EVP_EncryptFinal_ex(x, out + n, &done), 1);
    assert_int_equal(EVP_CIPHER_CTX_ctrl(x, EVP_CTRL_AEAD_GET_TAG, AEAD_TAG_BYTES, out + n), 1);
    EVP_CIPHER_CTX_free(x);
}

/* In pieces of 1, 2, 3, ... times `step` bytes, in place. */
static void run_in_pieces(struct aead *a, uint8_t *p, size_t n, size_t step)
{
    for (size_t at = 0, piece = step; at < n; piece += step) {
        size_t take = n - at < piece ? n - at : piece;
        aead_add(a, p + at, take, p + at);
        at += take;
    }
}

static void every_length_is_as_openssl_seals_it(void **state)
{
    (void)state;
    enum { MOST = 20000 };
    static uint8_t plain[MOST], want[MOST + AEAD_TAG_BYTES], got[MOST + AEAD_TAG_BYTES];
    uint8_t key[32], nonce[12], ad[300];
    for (size_t i = 0; i < sizeof plain; i++)
        plain[i] = (uint8_t)(i * 13 + i / 256);
    memcpy(ad, plain + 7, sizeof ad);
    for (int suite = AEAD_AES_256_GCM; suite <= AEAD_CHACHA20_POLY1305; suite++) {
        struct aead *seals = aead_create(suite, true), *opens = aead_create(suite, false);
        for (size_t n = 0; n <= MOST; n += n < 600 ? 1 : n < 4200 ? 37 : 1571) {
            memset(key, (int)(n + 1), sizeof key);
            memset(nonce, (int)(n + 2), sizeof nonce);
            size_t ad_bytes = n % sizeof ad;
            aead_key(seals, key);
            aead_key(opens, key);
            openssl_seals(suite, key, nonce, ad, ad_bytes, plain, n, want);
            aead_seal(seals, nonce, ad, ad_bytes, plain, n, got, NULL);
            assert_memory_equal(got, want, n + AEAD_TAG_BYTES);
            for (size_t step = 1; step <= 33; step += 16) {
                memcpy(got, plain, n);
                aead_begin(seals, nonce, ad, ad_bytes);
                run_in_pieces(seals, got, n, step);
                aead_tag(seals, got + n);
                assert_memory_equal(got, want, n + AEAD_TAG_BYTES);
                aead_begin(opens, nonce, ad, ad_bytes);
                run_in_pieces(opens, got, n, step + 3);
                assert_int_equal(aead_check(opens, want + n), 0);
                assert_memory_equal(got, plain, n);
            }
        }
        aead_free(seals);
        aead_free(opens);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_answers),
        cmocka_unit_test(sums_are_those_of_the_sealed_bytes),
        cmocka_unit_test(every_changed_bit_is_noticed),
        cmocka_unit_test(every_length_is_as_openssl_seals_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
