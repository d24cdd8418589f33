/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: header and trailer of a segment: every field comes back, every damaged byte is noticed, the version
 * is told from damage. Method: round trips, fixed places, one flipped bit at a time. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/segment.h"
#include "format/version.h"

static struct segment_header a_header(void)
{
    struct segment_header h = {.version = SEGMENT_VERSION,
                               .suite = SUITE_AES256GCM_HKDF_SHA256,
                               .step = 0x0102030405060708ull,
                               .rank = 5,
                               .world = 8,
                               .tenant = "acme-1"};
    memset(&h.segment_id, 1, ID_BYTES);
    memset(&h.run_id, 2, ID_BYTES);
    memset(&h.attempt, 3, ID_BYTES);
    memset(h.salt, 4, SALT_BYTES);
    memset(&h.dek_id, 5, ID_BYTES);
    memset(h.commitment, 6, COMMITMENT_BYTES);
    return h;
}

static struct segment_trailer a_trailer(void)
{
    struct segment_trailer t = {.version = SEGMENT_VERSION,
                                .index_offset = 5 * 4096,
                                .index_public_bytes = 32 + 40 * 3,
                                .index_bytes = 5000,
                                .chunks = 3,
                                .file_bytes = (5 + 2 + 1) * 4096};
    memset(&t.segment_id, 1, ID_BYTES);
    memset(t.index_digest, 7, SHA256_BYTES);
    memset(t.tag, 8, TAG_BYTES);
    return t;
}

static void reseal(uint8_t block[BLOCK_BYTES])
{
    le64_put(block, hash64(block + 8, BLOCK_BYTES - 8));
}

static void header_comes_back(void **state)
{
    (void)state;
    struct segment_header h = a_header(), back;
    uint8_t block[BLOCK_BYTES];
    segment_header_encode(&h, block);
    assert_memory_equal(block + 8, "LARDSEGM", 8);
    assert_int_equal(le32_get(block + 16), 1);
    assert_true(le64_get(block + 72) == h.step);
    assert_memory_equal(block + 168, "acme-1\0", 7);
    memset(&back, 0, sizeof back);
    assert_int_equal(segment_header_decode(block, &back, NULL), 0);
    assert_memory_equal(&back.salt, &h.salt, SALT_BYTES);
    assert_memory_equal(&back.commitment, &h.commitment, COMMITMENT_BYTES);
    assert_true(id_equal(&back.segment_id, &h.segment_id) && id_equal(&back.run_id, &h.run_id) &&
                id_equal(&back.attempt, &h.attempt) && id_equal(&back.dek_id, &h.dek_id));
    assert_true(back.step == h.step && back.rank == 5 && back.world == 8);
    assert_string_equal(back.tenant, "acme-1");
}

static void trailer_comes_back(void **state)
{
    (void)state;
    struct segment_trailer t = a_trailer(), back;
    uint8_t block[BLOCK_BYTES];
    segment_trailer_encode(&t, block);
    assert_int_equal(segment_trailer_decode(block, &back, NULL), 0);
    assert_true(back.file_bytes == t.file_bytes && back.index_offset == t.index_offset &&
                back.index_bytes == t.index_bytes && back.index_public_bytes == t.index_public_bytes &&
                back.chunks == 3);
    assert_memory_equal(back.index_digest, t.index_digest, SHA256_BYTES);
    assert_memory_equal(back.tag, t.tag, TAG_BYTES);
}

static void any_flipped_bit_is_noticed(void **state)
{
    (void)state;
    struct segment_header h = a_header();
    struct segment_trailer t = a_trailer();
    uint8_t head[BLOCK_BYTES], tail[BLOCK_BYTES];
    segment_header_encode(&h, head);
    segment_trailer_encode(&t, tail);
    for (size_t bit = 0; bit < 8ul * BLOCK_BYTES; bit += bit < 2000 ? 1 : 97) {
        int expected = bit / 8 >= 16 && bit / 8 < 20 ? -EPROTONOSUPPORT : -EBADMSG;
        head[bit / 8] ^= (uint8_t)(1u << bit % 8);
        tail[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_int_equal(segment_header_decode(head, &h, NULL), expected);
        assert_int_equal(segment_trailer_decode(tail, &t, NULL), expected);
        head[bit / 8] ^= (uint8_t)(1u << bit % 8);
        tail[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
}

static void newer_version_is_told_from_damage(void **state)
{
    (void)state;
    struct segment_header h = a_header();
    struct err e;
    uint8_t block[BLOCK_BYTES];
    segment_header_encode(&h, block);
    le32_put(block + 16, 2);
    assert_int_equal(segment_header_decode(block, &h, &e), -EPROTONOSUPPORT);
    assert_non_null(strstr(e.text, "may be damaged"));
    reseal(block);
    assert_int_equal(segment_header_decode(block, &h, &e), -EPROTONOSUPPORT);
    assert_int_equal(e.class, ERR_VERSION);
    assert_non_null(strstr(e.text, "version 2"));
    assert_null(strstr(e.text, "damaged"));
}

static void rightly_summed_nonsense_is_refused(void **state)
{
    (void)state;
    static const struct {
        size_t at;
        uint32_t value;
        const char *word;
    } bad[] = {
        {20, 9, "suite 9"}, {80, 8, "rank 8 of 8"}, {84, 0, "of 0"},        {84, WORLD_MAX + 1, "of 65537"},
        {168, 0, "tenant"}, {180, 1, "tenant"},     {232, 1, "offset 232"}, {4092, 1, "offset 4092"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct segment_header h = a_header();
        struct err e;
        uint8_t block[BLOCK_BYTES];
        segment_header_encode(&h, block);
        le32_put(block + bad[i].at, bad[i].value);
        reseal(block);
        assert_true(segment_header_decode(block, &h, &e) < 0);
        assert_non_null(strstr(e.text, bad[i].word));
    }
}

static void trailer_that_cannot_be_is_refused(void **state)
{
    (void)state;
    static const struct {
        size_t at;
        uint64_t value;
        const char *word;
    } bad[] = {
        {40, 7 * 4096, "end at"},
        {40, UINT64_MAX, "at most"},
        {48, 5 * 4096 + 1, "multiple"},
        {48, 0, "multiple"},
        {48, 1ull << 63, "multiple"},
        {56, 100, "does not fit"},
        {56, INDEX_BYTES_MAX + 1ull, "does not fit"},
        {64, 31, "does not fit"},
        {120, 1, "offset 120"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct segment_trailer t = a_trailer();
        struct err e;
        uint8_t block[BLOCK_BYTES];
        segment_trailer_encode(&t, block);
        le64_put(block + bad[i].at, bad[i].value);
        reseal(block);
        assert_int_equal(segment_trailer_decode(block, &t, &e), -EBADMSG);
        assert_non_null(strstr(e.text, bad[i].word));
    }
    struct segment_trailer t = a_trailer();
    uint8_t block[BLOCK_BYTES];
    segment_trailer_encode(&t, block);
    le32_put(block + 20, 4); /* one chunk more than the public part has room for */
    reseal(block);
    assert_int_equal(segment_trailer_decode(block, &t, NULL), -EBADMSG);
}

static void signed_bytes_depend_on_every_field(void **state)
{
    (void)state;
    struct segment_trailer t = a_trailer(), u;
    uint8_t one[SEGMENT_TRAILER_SIGNED_BYTES], two[SEGMENT_TRAILER_SIGNED_BYTES];
    segment_trailer_signed(&t, one);
    for (int i = 0; i < 9; i++) {
        u = t;
        switch (i) {
        case 0: u.version++; break;
        case 1: u.segment_id.bytes[15]++; break;
        case 2: u.file_bytes++; break;
        case 3: u.index_offset++; break;
        case 4: u.index_bytes++; break;
        case 5: u.index_public_bytes++; break;
        case 6: u.chunks++; break;
        case 7: u.index_digest[31]++; break;
        case 8: u.tag[0]++; break;
        }
        segment_trailer_signed(&u, two);
        assert_int_equal(memcmp(one, two, sizeof one) != 0, i != 8); /* the tag does not sign itself */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(header_comes_back),
        cmocka_unit_test(trailer_comes_back),
        cmocka_unit_test(any_flipped_bit_is_noticed),
        cmocka_unit_test(newer_version_is_told_from_damage),
        cmocka_unit_test(rightly_summed_nonsense_is_refused),
        cmocka_unit_test(trailer_that_cannot_be_is_refused),
        cmocka_unit_test(signed_bytes_depend_on_every_field),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
