/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: the hash of chunks is what its header says, and mixes well. Method: a second implementation, written
 * from the header word by word; values that may never change; every kind of small difference between inputs,
 * counted over millions of them; the number of collisions of 32 bits of it is what chance gives.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpudirect/chunk_hash.h"

typedef unsigned __int128 u128;

static uint64_t seed = 0x853c49e6748fea9bull;

static uint64_t next(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed * 0x2545f4914f6cdd1dull;
}

static uint8_t *random_bytes(size_t n)
{
    uint8_t *p = malloc(n + 1);
    assert_non_null(p);
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)(next() >> 56);
    return p;
}

static bool same(struct chunk_hash a, struct chunk_hash b)
{
    return a.lo == b.lo && a.hi == b.hi;
}

/* ---- as specified ---- */

static uint64_t splitmix(uint64_t *state)
{
    uint64_t v = *state += 0x9e3779b97f4a7c15ull;
    v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9ull;
    v = (v ^ v >> 27) * 0x94d049bb133111ebull;
    return v ^ v >> 31;
}

static uint64_t mix(uint64_t v)
{
    v -= 0x9e3779b97f4a7c15ull;
    return splitmix(&v);
}

static struct chunk_hash plain_hash(const uint8_t *p, size_t n)
{
    uint64_t k[8], zero = 0, lo = 0, hi = 0;
    for (int i = 0; i < 8; i++)
        k[i] = splitmix(&zero);
    for (uint64_t i = 0; 32 * i < n; i++) {
        uint64_t w[4] = {0};
        for (size_t j = 0; j < 32 && 32 * i + j < n; j++)
            w[j / 8] |= (uint64_t)p[32 * i + j] << 8 * (j % 8);
        u128 a = (u128)(w[0] ^ (k[0] + i * 0x9e3779b97f4a7c15ull)) * (w[1] ^ k[1]);
        u128 b = (u128)(w[2] ^ (k[2] + i * 0x9e3779b97f4a7c15ull)) * (w[3] ^ k[3]);
        uint64_t x = ((uint64_t)a ^ (uint64_t)(b >> 64)) + w[0] + w[3];
        uint64_t y = ((uint64_t)(a >> 64) ^ (uint64_t)b) + w[1] + w[2];
        u128 r = (u128)(x ^ k[4]) * (y ^ k[5]);
        lo += (uint64_t)r;
        hi += (uint64_t)(r >> 64);
    }
    lo += mix(hi + n);
    hi += mix(lo + k[6]);
    lo += mix(hi + k[7]);
    hi += mix(lo);
    return (struct chunk_hash){lo, hi};
}

static void equals_its_specification(void **state)
{
    (void)state;
    uint8_t *p = random_bytes(8192);
    for (size_t n = 0; n <= 4096; n++)
        assert_true(same(chunk_hash(p + n % 64, n), plain_hash(p + n % 64, n)));
    free(p);
    size_t large = (4u << 20) + 77;
    p = random_bytes(large);
    for (size_t n = large - 80; n <= large; n++)
        assert_true(same(chunk_hash(p, n), plain_hash(p, n)));
    free(p);
}

static void pieces_give_the_same(void **state)
{
    (void)state;
    uint8_t *p = random_bytes(5000);
    for (size_t n = 0; n <= 5000; n += 1 + next() % 40) {
        struct chunk_hash sum = {0, 0};
        for (size_t at = 0, piece; at < n; at += piece) {
            piece = (1 + next() % 20) * CHUNK_HASH_BLOCK;
            piece = n - at < piece ? n - at : piece;
            chunk_hash_sum(&sum, at / CHUNK_HASH_BLOCK, p + at, piece);
        }
        assert_true(same(chunk_hash_end(sum, n), chunk_hash(p, n)));
    }
    free(p);
}

/* Once something rests on hashes of yesterday, these must not change. */
static void keeps_its_values(void **state)
{
    (void)state;
    uint8_t counting[256];
    for (int i = 0; i < 256; i++)
        counting[i] = (uint8_t)i;
    assert_true(same(chunk_hash("", 0), (struct chunk_hash){0x5e1ded9ab2e75be3ull, 0xb488c540681815a1ull}));
    assert_true(
        same(chunk_hash("larder", 6), (struct chunk_hash){0xc91975e7617ea679ull, 0x54445c426a177e15ull}));
    assert_true(
        same(chunk_hash(counting, 256), (struct chunk_hash){0x0829283ced889fcfull, 0xb99c18b6603fb61aull}));
}

/* ---- differences ---- */

/* Every bit of the input turns every bit of the hash in half of the cases. */
static void every_bit_matters(void **state)
{
    (void)state;
    enum { ROUNDS = 2000 };
    static const size_t lengths[] = {4, 7, 8, 32, 33, 100};
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
        size_t n = lengths[l];
        for (size_t bit = 0; bit<8 * n; bit += 8 * n> 64 ? 7 : 1) {
            uint32_t turned[128] = {0};
            for (int round = 0; round < ROUNDS; round++) {
                uint8_t p[128];
                for (size_t i = 0; i < n; i += 8) {
                    uint64_t v = next();
                    memcpy(p + i, &v, 8);
                }
                struct chunk_hash a = chunk_hash(p, n);
                p[bit / 8] ^= (uint8_t)(1 << bit % 8);
                struct chunk_hash b = chunk_hash(p, n);
                for (int i = 0; i < 64; i++) {
                    turned[i] += (a.lo ^ b.lo) >> i & 1;
                    turned[64 + i] += (a.hi ^ b.hi) >> i & 1;
                }
            }
            for (int i = 0; i < 128; i++) /* 1000 expected, 22 is one standard deviation */
                assert_in_range(turned[i], ROUNDS / 2 - 160, ROUNDS / 2 + 160);
        }
    }
}

static void zeros_at_the_end_matter(void **state)
{
    (void)state;
    uint8_t *p = calloc(1, 4097);
    struct chunk_hash seen[4097];
    for (size_t start = 0; start < 2; start++) {
        p[0] = (uint8_t)start;
        for (size_t n = start; n <= 4096; n++) {
            seen[n] = chunk_hash(p, n);
            for (size_t before = start; before < n; before++)
                assert_false(same(seen[before], seen[n]));
        }
    }
    free(p);
}

static void order_of_blocks_matters(void **state)
{
    (void)state;
    uint8_t *p = random_bytes(4096), *q = malloc(4096);
    struct chunk_hash whole = chunk_hash(p, 4096);
    for (size_t width = 1; width <= 512; width *= 2)
        for (size_t i = 0; i < 4096; i += width)
            for (size_t j = i + width; j < 4096; j += (width < 32 ? 61 : 1) * width) {
                memcpy(q, p, 4096);
                memcpy(q + i, p + j, width);
                memcpy(q + j, p + i, width);
                if (memcmp(p, q, 4096) != 0)
                    assert_false(same(chunk_hash(q, 4096), whole));
            }
    free(p);
    free(q);
}

/* A block whose first factor is 0 still shows its other words. */
static void a_zero_factor_hides_nothing(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 4; i++)
        for (int factor = 0; factor < 4; factor++) {
            const uint64_t turn = i * CHUNK_HASH_G;
            const uint64_t keys[4] = {CHUNK_HASH_K0 + turn, CHUNK_HASH_K1, CHUNK_HASH_K2 + turn,
                                      CHUNK_HASH_K3};
            uint64_t w[16] = {0};
            w[4 * i + (uint64_t)factor] = keys[factor];
            struct chunk_hash a = chunk_hash(w, sizeof w);
            w[4 * i + (uint64_t)(factor ^ 1)] ^= 1;
            assert_false(same(a, chunk_hash(w, sizeof w)));
        }
}

/* ---- collisions ---- */

static int compare(const void *a, const void *b)
{
    const struct chunk_hash *x = a, *y = b;
    return x->lo != y->lo ? (x->lo < y->lo ? -1 : 1) : x->hi < y->hi ? -1 : x->hi > y->hi;
}

static int compare32(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

/* No two are equal, not even in 64 bits, and 32 bits at any of four places collide as often as chance would.
 */
static void collide_as_chance(struct chunk_hash *h, size_t n)
{
    double expected = (double)n * (double)(n - 1) / 2 / 4294967296.0;
    uint32_t *part = malloc(n * sizeof *part);
    for (int where = 0; where < 4; where++) {
        for (size_t i = 0; i < n; i++)
            part[i] = (uint32_t)((where < 2 ? h[i].lo : h[i].hi) >> 32 * (where % 2));
        qsort(part, n, sizeof *part, compare32);
        size_t found = 0;
        for (size_t i = 1; i < n; i++)
            found += part[i] == part[i - 1];
        assert_true((double)found < expected * 1.5 + 12);
        assert_true((double)found > expected * 0.5 - 12);
    }
    for (int half = 0; half < 2; half++) {
        qsort(h, n, sizeof *h, compare);
        for (size_t i = 1; i < n; i++)
            assert_true(h[i].lo != h[i - 1].lo);
        for (size_t i = 0; i < n; i++) {
            uint64_t v = h[i].lo;
            h[i].lo = h[i].hi;
            h[i].hi = v;
        }
    }
    free(part);
}

/* All inputs with at most two bits set; and a random one with two bits turned. */
static void two_bits_do_not_collide(void **state)
{
    (void)state;
    enum { BYTES = 192, BITS = 8 * BYTES };
    size_t most = 1 + BITS + (size_t)BITS * (BITS - 1) / 2, n;
    struct chunk_hash *h = malloc(most * sizeof *h);
    for (int random = 0; random < 2; random++) {
        uint8_t *p = random ? random_bytes(BYTES) : calloc(1, BYTES);
        n = 0;
        h[n++] = chunk_hash(p, BYTES);
        for (size_t i = 0; i < BITS; i++) {
            p[i / 8] ^= (uint8_t)(1 << i % 8);
            h[n++] = chunk_hash(p, BYTES);
            for (size_t j = 0; j < i; j++) {
                p[j / 8] ^= (uint8_t)(1 << j % 8);
                h[n++] = chunk_hash(p, BYTES);
                p[j / 8] ^= (uint8_t)(1 << j % 8);
            }
            p[i / 8] ^= (uint8_t)(1 << i % 8);
        }
        assert_int_equal(n, most);
        collide_as_chance(h, n);
        free(p);
    }
    free(h);
}

/* What training does: signs turn, low mantissa bits change, values move by one in opposite directions. */
static void small_changes_of_weights_do_not_collide(void **state)
{
    (void)state;
    enum { WORDS = 1024 };
    static const uint64_t by[] = {1ull << 63, 1ull << 15, 1, 1ull << 32};
    size_t most = (size_t)WORDS * (WORDS - 1) / 2;
    struct chunk_hash *h = malloc(most * sizeof *h);
    uint64_t *p = (uint64_t *)random_bytes(8 * WORDS);
    for (size_t k = 0; k < sizeof by / sizeof by[0]; k++) {
        size_t n = 0;
        for (size_t i = 0; i < WORDS; i++)
            for (size_t j = 0; j < i; j += 4) {
                p[i] += by[k];
                p[j] -= by[k];
                h[n++] = chunk_hash(p, 8 * WORDS);
                p[i] -= by[k];
                p[j] += by[k];
            }
        collide_as_chance(h, n);
    }
    free(p);
    free(h);
}

/* All 4 MiB of zeros but for one byte. */
static void one_byte_of_a_chunk_does_not_collide(void **state)
{
    (void)state;
    enum { N = 4 << 20, TRIES = 300 };
    uint8_t *p = calloc(1, N);
    struct chunk_hash h[TRIES];
    for (size_t i = 0; i < TRIES; i++) {
        size_t at = (size_t)(next() % N);
        p[at] = (uint8_t)(1 + next() % 255);
        h[i] = chunk_hash(p, N);
        p[at] = 0;
        for (size_t j = 0; j < i; j++)
            assert_true(h[i].lo != h[j].lo && h[i].hi != h[j].hi);
    }
    free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_its_specification),
        cmocka_unit_test(pieces_give_the_same),
        cmocka_unit_test(keeps_its_values),
        cmocka_unit_test(every_bit_matters),
        cmocka_unit_test(zeros_at_the_end_matter),
        cmocka_unit_test(order_of_blocks_matters),
        cmocka_unit_test(a_zero_factor_hides_nothing),
        cmocka_unit_test(two_bits_do_not_collide),
        cmocka_unit_test(small_changes_of_weights_do_not_collide),
        cmocka_unit_test(one_byte_of_a_chunk_does_not_collide),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
