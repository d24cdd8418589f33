/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: what was sealed opens in its own place only; no nonce is used twice; a wrong key is told from damage;
 * the bytes are those of FORMAT.md. Method: round trips, one changed field at a time, a chunk sealed by hand,
 * and threads that race for the same numbers.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/aead.h"
#include "format/seal.h"
#include "format/version.h"

static void ramp(uint8_t *p, size_t n, unsigned from)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)(from + i);
}

static struct dek make_dek(unsigned from)
{
    uint8_t raw[KEY_BYTES];
    struct dek d;
    ramp(raw, sizeof raw, from);
    ramp(d.id.bytes, ID_BYTES, 0xa0);
    d.key = secret_create(raw, sizeof raw);
    return d;
}

static struct segment_header make_header(void)
{
    struct segment_header h = {.version = SEGMENT_VERSION,
                               .suite = SUITE_AES256GCM_HKDF_SHA256,
                               .step = 0x1122334455667788,
                               .rank = 5,
                               .world = 9,
                               .tenant = "acme"};
    ramp(h.segment_id.bytes, ID_BYTES, 0x10);
    ramp(h.run_id.bytes, ID_BYTES, 0x20);
    ramp(h.attempt.bytes, ID_BYTES, 0x30);
    ramp(h.salt, SALT_BYTES, 0x40);
    return h;
}

#define CHUNKS 3
#define PLAIN  1000

struct fixture {
    struct dek dek;
    struct segment_header header;
    struct seal *writes, *reads;
    struct seal_state *st;
    uint8_t plain[PLAIN], stored[PLAIN + TAG_BYTES], out[PLAIN];
    struct chunk_entry entry;
};

static void make(struct fixture *f)
{
    memset(f, 0, sizeof *f);
    f->dek = make_dek(0x80);
    f->header = make_header();
    f->st = seal_state_create();
    assert_int_equal(seal_create(&f->dek, &f->header, CHUNKS, &f->writes, NULL), 0);
    assert_int_equal(seal_open(&f->dek, &f->header, CHUNKS, &f->reads, NULL), 0);
    ramp(f->plain, PLAIN, 1);
    f->entry = (struct chunk_entry){.offset = 4096,
                                    .stored_bytes = PLAIN + TAG_BYTES,
                                    .plain_bytes = 4000,
                                    .codec = CODEC_ZSTD,
                                    .dtype = DTYPE_F32};
}

static void drop(struct fixture *f)
{
    seal_free(f->writes);
    seal_free(f->reads);
    seal_state_free(f->st);
    dek_free(&f->dek);
}

static int seal_one(struct fixture *f, uint32_t number, struct err *e)
{
    return seal_chunk(f->writes, f->st, number, 4000, CODEC_ZSTD, DTYPE_F32, f->plain, PLAIN, f->stored, NULL,
                      e);
}

static void a_chunk_opens_where_it_belongs(void **state)
{
    (void)state;
    struct fixture f;
    struct err e;
    make(&f);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        assert_int_equal(seal_one(&f, i, &e), 0);
        assert_memory_not_equal(f.stored, f.plain, PLAIN);
        assert_int_equal(open_chunk(f.reads, f.st, i, &f.entry, f.stored, f.out, NULL, &e), 0);
        assert_memory_equal(f.out, f.plain, PLAIN);
        for (uint32_t other = 0; other < CHUNKS + 2; other++) {
            if (other == i)
                continue;
            assert_int_equal(open_chunk(f.reads, f.st, other, &f.entry, f.stored, f.out, NULL, &e), -EBADMSG);
        }
        /* The writer may read back what it sealed, in place. */
        assert_int_equal(open_chunk(f.writes, f.st, i, &f.entry, f.stored, f.stored, NULL, &e), 0);
        assert_memory_equal(f.stored, f.plain, PLAIN);
    }
    drop(&f);
}

/* However the payload is cut; what was changed, in it or its tag, is told by the end. */
static void a_chunk_opens_piece_by_piece(void **state)
{
    (void)state;
    struct fixture f;
    struct err e;
    make(&f);
    for (uint32_t i = 0; i < CHUNKS; i++) {
        assert_int_equal(seal_one(&f, i, &e), 0);
        for (size_t piece = 1; piece < PLAIN + 7; piece += 6) {
            for (int harm = 0; harm < 3; harm++) {
                uint8_t tag[TAG_BYTES];
                memcpy(f.out, f.stored, PLAIN);
                memcpy(tag, f.stored + PLAIN, TAG_BYTES);
                f.out[PLAIN - 1] ^= harm == 1;
                tag[15] ^= harm == 2;
                assert_int_equal(open_chunk_begin(f.reads, f.st, i, &f.entry, &e), 0);
                for (size_t at = 0, n; at < PLAIN; at += n) {
                    n = PLAIN - at < piece ? PLAIN - at : piece;
                    open_chunk_add(f.st, f.out + at, n);
                }
                int rc = open_chunk_end(f.st, i, &f.entry, tag, &e);
                assert_int_equal(rc, harm ? -EBADMSG : 0);
                if (!harm)
                    assert_memory_equal(f.out, f.plain, PLAIN);
            }
        }
    }
    assert_int_equal(open_chunk_begin(f.reads, f.st, CHUNKS, &f.entry, &e), -EBADMSG);
    f.entry.stored_bytes = TAG_BYTES - 1;
    assert_int_equal(open_chunk_begin(f.reads, f.st, 0, &f.entry, &e), -EBADMSG);
    drop(&f);
}

static void what_the_entry_says_is_bound(void **state)
{
    (void)state;
    struct fixture f;
    struct err e;
    make(&f);
    assert_int_equal(seal_one(&f, 1, &e), 0);
    struct chunk_entry wrong[] = {f.entry, f.entry, f.entry, f.entry, f.entry};
    wrong[0].plain_bytes++;
    wrong[1].codec = CODEC_RAW;
    wrong[2].dtype = DTYPE_I32;
    wrong[3].stored_bytes--;
    wrong[4].stored_bytes = TAG_BYTES - 1;
    for (int i = 0; i < 5; i++) {
        memset(f.out, 0xee, sizeof f.out);
        assert_int_equal(open_chunk(f.reads, f.st, 1, &wrong[i], f.stored, f.out, NULL, &e), -EBADMSG);
        assert_non_null(strstr(e.text, "chunk 1"));
        if (i < 3)
            assert_int_equal(f.out[0], 0); /* wiped */
    }
    f.entry.offset =
        8192; /* where it lies is not bound: nothing of it is to be trusted that the index gives */
    assert_int_equal(open_chunk(f.reads, f.st, 1, &f.entry, f.stored, f.out, NULL, &e), 0);
    f.stored[500] ^= 4;
    assert_int_equal(open_chunk(f.reads, f.st, 1, &f.entry, f.stored, f.out, NULL, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "chunk 1 at offset 8192 (1016 bytes) does not verify"));
    drop(&f);
}

/* The number of chunks says which is the last: a cut segment does not pass for a whole one. */
static void the_last_chunk_knows_that_it_is(void **state)
{
    (void)state;
    struct fixture f;
    struct seal *longer, *shorter;
    make(&f);
    assert_int_equal(seal_open(&f.dek, &f.header, CHUNKS + 1, &longer, NULL), 0);
    assert_int_equal(seal_open(&f.dek, &f.header, CHUNKS - 1, &shorter, NULL), 0);
    assert_int_equal(seal_one(&f, 2, NULL), 0);
    assert_int_equal(open_chunk(longer, f.st, 2, &f.entry, f.stored, f.out, NULL, NULL), -EBADMSG);
    assert_int_equal(seal_one(&f, 1, NULL), 0);
    assert_int_equal(open_chunk(longer, f.st, 1, &f.entry, f.stored, f.out, NULL, NULL), 0);
    assert_int_equal(open_chunk(shorter, f.st, 1, &f.entry, f.stored, f.out, NULL, NULL), -EBADMSG);
    seal_free(longer);
    seal_free(shorter);
    drop(&f);
}

static void every_field_of_the_header_is_bound(void **state)
{
    (void)state;
    struct fixture f;
    struct err e;
    make(&f);
    struct segment_header wrong[9];
    for (int i = 0; i < 9; i++)
        wrong[i] = f.header;
    wrong[0].segment_id.bytes[3] ^= 1;
    wrong[1].run_id.bytes[3] ^= 1;
    wrong[2].attempt.bytes[3] ^= 1;
    wrong[3].step++;
    wrong[4].rank++;
    wrong[5].world++;
    wrong[6].salt[31] ^= 1;
    wrong[7].commitment[31] ^= 1;
    strcpy(wrong[8].tenant, "acmf");
    for (int i = 0; i < 9; i++) {
        struct seal *s;
        assert_int_equal(seal_open(&f.dek, &wrong[i], CHUNKS, &s, &e), -EKEYREJECTED);
        assert_null(s);
        assert_int_equal(strncmp(e.text, "wrong key: ", 11), 0);
        /* Somebody who could fix the commitment as well still could not make the chunks open. */
        uint8_t stored[PLAIN + TAG_BYTES];
        if (i == 7)
            continue;
        assert_int_equal(seal_create(&f.dek, &wrong[i], CHUNKS, &s, &e), 0);
        assert_int_equal(
            seal_chunk(s, f.st, 0, 4000, CODEC_ZSTD, DTYPE_F32, f.plain, PLAIN, stored, NULL, &e), 0);
        assert_int_equal(open_chunk(f.reads, f.st, 0, &f.entry, stored, f.out, NULL, &e), -EBADMSG);
        seal_free(s);
    }
    drop(&f);
}

static void a_wrong_key_is_told(void **state)
{
    (void)state;
    struct fixture f;
    struct seal *s;
    struct err e;
    make(&f);
    struct dek other = make_dek(0x81);
    assert_int_equal(seal_open(&other, &f.header, CHUNKS, &s, &e), -EKEYREJECTED);
    assert_int_equal(e.class, ERR_KEY);
    dek_free(&other);
    other = make_dek(0x80);
    other.id.bytes[0]++;
    assert_int_equal(seal_open(&other, &f.header, CHUNKS, &s, &e), -EKEYREJECTED);
    dek_free(&other);
    f.header.version = 2;
    assert_int_equal(seal_open(&f.dek, &f.header, CHUNKS, &s, &e), -EPROTONOSUPPORT);
    f.header.version = 1;
    assert_int_equal(seal_open(&f.dek, &f.header, SEGMENT_CHUNKS_MAX + 1, &s, &e), -E2BIG);
    drop(&f);
}

static void nothing_is_sealed_twice(void **state)
{
    (void)state;
    struct fixture f;
    struct err e;
    struct segment_trailer t = {.version = 1};
    uint8_t digest[32] = {7}, before[PLAIN + TAG_BYTES];
    make(&f);
    assert_int_equal(seal_one(&f, 1, &e), 0);
    memcpy(before, f.stored, sizeof before);
    f.plain[0] ^= 1;
    assert_int_equal(seal_one(&f, 1, &e), -EEXIST);
    assert_non_null(strstr(e.text, "chunk 1 was sealed already"));
    assert_memory_equal(f.stored, before, sizeof before); /* untouched */
    assert_int_equal(seal_one(&f, CHUNKS, &e), -E2BIG);
    assert_int_equal(seal_chunk(f.writes, f.st, 0, 4000, CODEC_ZERO, DTYPE_F32, NULL, 0, f.stored, NULL, &e),
                     -EINVAL);
    assert_int_equal(seal_one(&f, 0, &e), 0);
    assert_int_equal(seal_index(f.writes, f.st, digest, f.plain, 10, f.stored, &e), 0);
    assert_int_equal(seal_index(f.writes, f.st, digest, f.plain, 10, f.stored, &e), -EEXIST);
    assert_int_equal(seal_trailer(f.writes, f.st, &t, &e), 0);
    assert_int_equal(seal_trailer(f.writes, f.st, &t, &e), -EEXIST);
    /* Whoever reads does not seal. */
    assert_int_equal(
        seal_chunk(f.reads, f.st, 0, 4000, CODEC_ZSTD, DTYPE_F32, f.plain, PLAIN, f.stored, NULL, &e),
        -EINVAL);
    assert_int_equal(seal_index(f.reads, f.st, digest, f.plain, 10, f.stored, &e), -EINVAL);
    assert_int_equal(seal_trailer(f.reads, f.st, &t, &e), -EINVAL);
    drop(&f);
}

#define RACED   200
#define THREADS 4

struct race {
    struct seal *seal;
    atomic_uint won;
};

static void *racer(void *arg)
{
    struct race *r = arg;
    struct seal_state *st = seal_state_create();
    uint8_t plain[64] = {0}, out[64 + TAG_BYTES];
    for (uint32_t i = 0; i < RACED; i++)
        if (seal_chunk(r->seal, st, i, 64, CODEC_RAW, DTYPE_U8, plain, sizeof plain, out, NULL, NULL) == 0)
            atomic_fetch_add(&r->won, 1);
    seal_state_free(st);
    return NULL;
}

static void threads_do_not_share_a_number(void **state)
{
    (void)state;
    struct dek dek = make_dek(1);
    struct segment_header h = make_header();
    struct race r = {0};
    pthread_t threads[THREADS];
    assert_int_equal(seal_create(&dek, &h, RACED, &r.seal, NULL), 0);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, racer, &r), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(r.won, RACED);
    seal_free(r.seal);
    dek_free(&dek);
}

/* One state serves many seals in turn: it must notice that the key changed, also where a new seal has the old
 * one's address. */
static void a_state_follows_the_seal(void **state)
{
    (void)state;
    struct dek dek = make_dek(1);
    struct seal_state *st = seal_state_create();
    uint8_t first[64 + TAG_BYTES] = {0}, out[64 + TAG_BYTES], plain[64] = {0};
    for (int i = 0; i < 4; i++) {
        struct segment_header h = make_header();
        struct seal *s;
        h.salt[0] = (uint8_t)i;
        assert_int_equal(seal_create(&dek, &h, 1, &s, NULL), 0);
        assert_int_equal(seal_chunk(s, st, 0, 64, CODEC_RAW, DTYPE_U8, plain, 64, out, NULL, NULL), 0);
        assert_memory_not_equal(out, first, sizeof out);
        struct chunk_entry c = {
            .stored_bytes = sizeof out, .plain_bytes = 64, .codec = CODEC_RAW, .dtype = DTYPE_U8};
        memcpy(first, out, sizeof out);
        assert_int_equal(open_chunk(s, st, 0, &c, out, out, NULL, NULL), 0);
        seal_free(s);
    }
    seal_state_free(st);
    dek_free(&dek);
}

static void an_index_is_sealed_piece_by_piece(void **state)
{
    (void)state;
    struct fixture f;
    uint8_t digest[SHA256_BYTES], sealed[PLAIN + TAG_BYTES], out[PLAIN];
    make(&f);
    ramp(digest, sizeof digest, 9);
    memcpy(sealed, f.plain, PLAIN);
    assert_int_equal(seal_index_begin(f.writes, f.st, digest, INDEX_BYTES_MAX, NULL), -E2BIG);
    assert_int_equal(seal_index_begin(f.writes, f.st, digest, PLAIN, NULL), 0);
    for (size_t at = 0, n = 1; at < PLAIN; at += n, n = 3 * n < PLAIN - at ? 3 * n : PLAIN - at)
        seal_index_add(f.st, sealed + at, n, sealed + at);
    seal_index_end(f.st, sealed + PLAIN);
    assert_int_equal(open_index(f.reads, f.st, digest, sealed, sizeof sealed, out, NULL), 0);
    assert_memory_equal(out, f.plain, PLAIN);
    assert_int_equal(seal_index_begin(f.writes, f.st, digest, PLAIN, NULL), -EEXIST);
    drop(&f);
}

static void index_and_trailer_are_bound(void **state)
{
    (void)state;
    struct fixture f;
    uint8_t digest[SHA256_BYTES], sealed[100 + TAG_BYTES], out[100];
    make(&f);
    ramp(digest, sizeof digest, 9);
    assert_int_equal(seal_index(f.writes, f.st, digest, f.plain, 100, sealed, NULL), 0);
    assert_int_equal(open_index(f.reads, f.st, digest, sealed, sizeof sealed, out, NULL), 0);
    assert_memory_equal(out, f.plain, 100);
    assert_int_equal(open_index(f.reads, f.st, digest, sealed, sizeof sealed - 1, out, NULL), -EBADMSG);
    assert_int_equal(open_index(f.reads, f.st, digest, sealed, TAG_BYTES - 1, out, NULL), -EBADMSG);
    digest[0] ^= 1;
    assert_int_equal(open_index(f.reads, f.st, digest, sealed, sizeof sealed, out, NULL), -EBADMSG);

    struct segment_trailer t = {.version = 1,
                                .segment_id = f.header.segment_id,
                                .file_bytes = 16384,
                                .index_offset = 8192,
                                .index_bytes = 300,
                                .index_public_bytes = 152,
                                .chunks = 3};
    ramp(t.index_digest, sizeof t.index_digest, 50);
    assert_int_equal(seal_trailer(f.writes, f.st, &t, NULL), 0);
    assert_int_equal(check_trailer(f.reads, f.st, &t, NULL), 0);
    struct segment_trailer wrong[8];
    for (int i = 0; i < 8; i++)
        wrong[i] = t;
    wrong[0].segment_id.bytes[0]++;
    wrong[1].file_bytes++;
    wrong[2].index_offset++;
    wrong[3].index_bytes++;
    wrong[4].index_public_bytes++;
    wrong[5].chunks++;
    wrong[6].index_digest[31]++;
    wrong[7].tag[15]++;
    for (int i = 0; i < 8; i++)
        assert_int_equal(check_trailer(f.reads, f.st, &wrong[i], NULL), -EBADMSG);
    drop(&f);
}

/* Seals chunk 2 of 3 with nothing but hkdf and aead, as FORMAT.md says. */
static void a_chunk_has_the_bytes_of_the_specification(void **state)
{
    (void)state;
    struct fixture f;
    uint8_t info[2 + 16 + 10 + 4 + 80], okm[64], dek[32], salt[32], ad[176] = {0},
                                                                    nonce[12] = {1, 0, 0, 0, 2};
    uint8_t want[PLAIN + TAG_BYTES], *p = info;
    make(&f);
    le16_put(p, 16);
    memcpy(p + 2, "larder/1 segment", 16);
    le32_put(p + 18, 1);
    le32_put(p + 22, 1);
    le16_put(p + 26, 4);
    memcpy(p + 28, "acme", 4);
    ramp(p + 32, 16, 0x20);
    le64_put(p + 48, 0x1122334455667788);
    ramp(p + 56, 16, 0x30);
    le32_put(p + 72, 5);
    le32_put(p + 76, 9);
    ramp(p + 80, 16, 0x10);
    ramp(p + 96, 16, 0xa0);
    ramp(dek, 32, 0x80);
    ramp(salt, 32, 0x40);
    hkdf_sha256(dek, 32, salt, 32, info, sizeof info, okm, 64);
    assert_memory_equal(f.header.commitment, okm + 32, 32);
    le32_put(ad, 1);
    le32_put(ad + 4, 1);
    le32_put(ad + 8, 1);
    le32_put(ad + 12, 5);
    le32_put(ad + 16, 9);
    le64_put(ad + 24, 0x1122334455667788);
    ramp(ad + 32, 16, 0x20);
    ramp(ad + 48, 16, 0x30);
    ramp(ad + 64, 16, 0x10);
    ramp(ad + 80, 16, 0xa0);
    memcpy(ad + 96, "acme", 4);
    le32_put(ad + 160, 2);
    le32_put(ad + 164, 1);
    le32_put(ad + 168, 4000);
    ad[172] = CODEC_ZSTD;
    ad[173] = DTYPE_F32;
    struct aead *a = aead_create(AEAD_AES_256_GCM, true);
    aead_key(a, okm);
    aead_seal(a, nonce, ad, sizeof ad, f.plain, PLAIN, want, NULL);
    aead_free(a);
    assert_int_equal(seal_one(&f, 2, NULL), 0);
    assert_memory_equal(f.stored, want, sizeof want);
    /* And they never change. */
    assert_int_equal(hash64(f.stored, sizeof f.stored), 0x9240f80284a2c6f4ull);
    drop(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_chunk_opens_where_it_belongs),
        cmocka_unit_test(a_chunk_opens_piece_by_piece),
        cmocka_unit_test(what_the_entry_says_is_bound),
        cmocka_unit_test(the_last_chunk_knows_that_it_is),
        cmocka_unit_test(every_field_of_the_header_is_bound),
        cmocka_unit_test(a_wrong_key_is_told),
        cmocka_unit_test(nothing_is_sealed_twice),
        cmocka_unit_test(threads_do_not_share_a_number),
        cmocka_unit_test(a_state_follows_the_seal),
        cmocka_unit_test(an_index_is_sealed_piece_by_piece),
        cmocka_unit_test(index_and_trailer_are_bound),
        cmocka_unit_test(a_chunk_has_the_bytes_of_the_specification),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
