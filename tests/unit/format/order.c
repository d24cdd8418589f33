/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: the order is a permutation of all samples in every epoch, spread evenly, and the same on every
 * machine (cases D9 to D11 lean on it). Method: bijection for many sizes, chi-square over many keys, values
 * computed once and written down here and in FORMAT.md. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/order.h"

static void permutation_is_a_bijection(void **state)
{
    (void)state;
    static uint8_t hit[70000];
    for (uint64_t n = 1; n < 70000; n = n < 300 ? n + 1 : n * 3 / 2) {
        for (uint64_t key = 0; key < 3; key++) {
            memset(hit, 0, n);
            for (uint64_t x = 0; x < n; x++) {
                uint64_t y = order_permute(n, key * 0x123456789abcdefull, x);
                assert_true(y < n);
                assert_int_equal(hit[y]++, 0);
            }
        }
    }
}

/* Where does position x land, over many keys? In each of `cells` equally often. */
static void landings_are_even(void **state)
{
    (void)state;
    static const uint64_t sizes[] = {2, 3, 4, 5, 7, 10, 16, 17, 100, 1000};
    enum { KEYS = 20000 };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint64_t n = sizes[i], cells = n < 10 ? n : 10;
        for (uint64_t x = 0; x < n; x += n / 4 + 1) {
            double count[10] = {0}, chi = 0;
            for (uint64_t key = 0; key < KEYS; key++)
                count[order_permute(n, key, x) * cells / n]++;
            for (uint64_t c = 0; c < cells; c++) {
                uint64_t low = (c * n + cells - 1) / cells, high = ((c + 1) * n + cells - 1) / cells;
                double expected = (double)KEYS * (double)(high - low) / (double)n;
                chi += (count[c] - expected) * (count[c] - expected) / expected;
            }
            /* 9 degrees of freedom: above 40 once in 130,000; keys are fixed, so this cannot flicker. */
            if (chi > 40)
                print_error("n %llu x %llu chi %f\n", (unsigned long long)n, (unsigned long long)x, chi);
            assert_true(chi < 40);
        }
    }
}

/* How far a chi-square lies above what chance gives, in its standard deviations. Keys are fixed, so nothing
 * flickers: a construction that is even passes with room, one that is not is off by hundreds. */
static double excess(double chi, double freedom)
{
    return (chi - freedom) / sqrt(2 * freedom);
}

/* Every permutation of a few elements comes as often as any other: shards are few. */
static void permutations_of_few_are_even(void **state)
{
    (void)state;
    enum { KEYS = 96000 };
    unsigned count = 2;
    for (unsigned n = 2; n <= 6; count *= ++n) {
        static double hit[720];
        double chi = 0, expected = (double)KEYS / count;
        memset(hit, 0, sizeof hit);
        for (uint64_t key = 0; key < KEYS; key++) {
            uint64_t p[6], number = 0;
            for (unsigned i = 0; i < n; i++)
                p[i] = order_permute(n, key, i);
            for (unsigned i = 0; i < n; i++) {
                unsigned less = 0;
                for (unsigned j = i + 1; j < n; j++)
                    less += p[j] < p[i];
                number = number * (n - i) + less;
            }
            hit[number]++;
        }
        for (unsigned i = 0; i < count; i++)
            chi += (hit[i] - expected) * (hit[i] - expected) / expected;
        if (excess(chi, count - 1) > 5)
            print_error("n %u chi %f\n", n, chi);
        assert_true(excess(chi, count - 1) < 5);
    }
}

/* Two positions land together as two that know nothing of each other: every pair of eighths as often as its
 * size says. */
static double pairs_excess(uint64_t n, uint64_t distance)
{
    enum { KEYS = 40000, PARTS = 8 };
    double hit[PARTS][PARTS] = {{0}}, chi = 0, freedom = -1;
    uint64_t parts = n < PARTS ? n : PARTS;
    for (uint64_t key = 0; key < KEYS; key++) {
        uint64_t x = key * 2654435761u % n, y = (x + distance) % n;
        uint64_t a = order_permute(n, key * 77, x), b = order_permute(n, key * 77, y);
        hit[(unsigned __int128)a * parts / n][(unsigned __int128)b * parts / n]++;
    }
    for (uint64_t i = 0; i < parts; i++) {
        for (uint64_t j = 0; j < parts; j++) {
            double first = (double)((n * (i + 1) + parts - 1) / parts - (n * i + parts - 1) / parts);
            double second =
                (double)((n * (j + 1) + parts - 1) / parts - (n * j + parts - 1) / parts) - (i == j);
            double expected = KEYS * first * second / ((double)n * (double)(n - 1));
            if (expected == 0) {
                assert_true(hit[i][j] == 0);
                continue;
            }
            chi += (hit[i][j] - expected) * (hit[i][j] - expected) / expected;
            freedom++;
        }
    }
    return excess(chi, freedom);
}

static void pairs_are_even(void **state)
{
    (void)state;
    static const uint64_t sizes[] = {3,   7,    10,   16,   17,    64,      100,          200,
                                     256, 1000, 1024, 4099, 65537, 1000003, 1000000000000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const uint64_t distances[] = {1, sizes[i] / 2, sizes[i] - 1};
        for (int k = 0; k < 3; k++) {
            double over = pairs_excess(sizes[i], distances[k]);
            if (over > 5)
                print_error("n %llu distance %llu excess %f\n", (unsigned long long)sizes[i],
                            (unsigned long long)distances[k], over);
            assert_true(over < 5);
        }
    }
}

/* These stand in FORMAT.md: whoever writes another implementation checks it against them. */
static void golden_values(void **state)
{
    (void)state;
    static const uint64_t ten[10] = {3, 7, 5, 0, 4, 8, 1, 9, 6, 2};
    for (uint64_t x = 0; x < 10; x++)
        assert_true(order_permute(10, 42, x) == ten[x]);
    assert_true(order_permute(1000000000000ull, 7, 123456789ull) == 328071954450ull);
    assert_true(order_permute(UINT64_MAX, 1, 0) == 4000726240098497997ull);
    static const uint64_t counts[4] = {3, 0, 5, 2};
    static const uint8_t expected[20][2] = {{0, 1}, {0, 0}, {0, 2}, {2, 0}, {3, 0}, {2, 1}, {2, 2},
                                            {2, 4}, {3, 1}, {2, 3}, {2, 0}, {2, 2}, {2, 3}, {2, 4},
                                            {2, 1}, {0, 0}, {3, 1}, {0, 1}, {3, 0}, {0, 2}};
    static const uint8_t instead[4][2] = {{2, 4}, {2, 1}, {3, 1}, {3, 0}};
    struct order *o;
    assert_int_equal(order_create(counts, 4, 2024, 2, &o, NULL), 0);
    for (uint64_t p = 0; p < 20; p++) {
        struct order_place at = order_at(o, p);
        assert_true(at.shard == expected[p][0] && at.sample == expected[p][1]);
    }
    for (uint32_t k = 0; k < 4; k++) {
        struct order_place at;
        assert_true(order_substitute(o, 3, k, &at));
        assert_true(at.shard == instead[k][0] && at.sample == instead[k][1]);
    }
    order_free(o);
}

static void each_epoch_has_every_sample_once(void **state)
{
    (void)state;
    static const uint64_t counts[] = {5, 0, 100, 1, 33, 0, 0, 64, 7, 0};
    enum { SHARDS = 10, SAMPLES = 210 };
    for (uint32_t window = 0; window < 13; window++) {
        struct order *o;
        assert_int_equal(order_create(counts, SHARDS, 99, window, &o, NULL), 0);
        assert_true(order_samples(o) == SAMPLES);
        struct order_place first[SAMPLES];
        int same = 0;
        for (uint64_t epoch = 0; epoch < 3; epoch++) {
            bool hit[SHARDS][100] = {{false}};
            for (uint64_t i = 0; i < SAMPLES; i++) {
                struct order_place at = order_at(o, epoch * SAMPLES + i);
                assert_true(at.shard < SHARDS && at.sample < counts[at.shard]);
                assert_false(hit[at.shard][at.sample]);
                hit[at.shard][at.sample] = true;
                if (epoch == 0)
                    first[i] = at;
                same += epoch == 1 && first[i].shard == at.shard && first[i].sample == at.sample;
            }
        }
        assert_true(window == 0 ? same == SAMPLES : same < SAMPLES / 2); /* another epoch, another order */
        order_free(o);
    }
}

/* A position means the same whatever was asked before it: state is one number. */
static void positions_stand_alone(void **state)
{
    (void)state;
    static const uint64_t counts[] = {50, 60, 70};
    struct order *o, *other;
    assert_int_equal(order_create(counts, 3, 5, 2, &o, NULL), 0);
    for (uint64_t p = 0; p < 900; p += 7) {
        struct order_place a = order_at(o, p);
        (void)order_at(o, 1000000007ull * p); /* somewhere else */
        assert_int_equal(order_create(counts, 3, 5, 2, &other, NULL), 0);
        struct order_place b = order_at(other, p), c = order_at(o, p);
        assert_true(a.shard == b.shard && a.sample == b.sample && a.shard == c.shard && a.sample == c.sample);
        order_free(other);
    }
    order_free(o);
}

/* Only shards of one window are open at a time. */
static void windows_bound_the_shards_in_use(void **state)
{
    (void)state;
    uint64_t counts[20];
    for (int i = 0; i < 20; i++)
        counts[i] = 10;
    struct order *o;
    assert_int_equal(order_create(counts, 20, 3, 4, &o, NULL), 0);
    for (uint64_t w = 0; w < 5; w++) {
        bool used[20] = {false};
        int n = 0;
        for (uint64_t i = 0; i < 40; i++)
            used[order_at(o, w * 40 + i).shard] = true;
        for (int i = 0; i < 20; i++)
            n += used[i];
        assert_int_equal(n, 4);
    }
    order_free(o);
}

/* All samples of the window, each once, and none of another; also where the order is sequential. */
static void substitutes_are_of_the_window(void **state)
{
    (void)state;
    uint64_t counts[20];
    for (int i = 0; i < 20; i++)
        counts[i] = (uint64_t)i % 5;
    for (uint32_t window = 0; window < 5; window++) {
        struct order *o;
        assert_int_equal(order_create(counts, 20, 3, window, &o, NULL), 0);
        for (uint64_t p = 0; p < 80; p += 3) {
            bool given[20][5] = {{false}}, own = false, shards[20] = {false};
            struct order_place at, self = order_at(o, p);
            uint32_t n = 0, used = 0;
            for (; order_substitute(o, p, n, &at); n++) {
                assert_true(at.sample < counts[at.shard] && !given[at.shard][at.sample]);
                given[at.shard][at.sample] = true;
                own |= at.shard == self.shard && at.sample == self.sample;
                used += !shards[at.shard];
                shards[at.shard] = true;
            }
            assert_true(own && n > 0 && used <= (window ? window : 8));
        }
        order_free(o);
    }
}

static void sequential_is_as_it_stands(void **state)
{
    (void)state;
    static const uint64_t counts[] = {2, 0, 3};
    static const uint8_t expected[6][2] = {{0, 0}, {0, 1}, {2, 0}, {2, 1}, {2, 2}, {0, 0}};
    struct order *o;
    assert_int_equal(order_create(counts, 3, 77, 0, &o, NULL), 0);
    for (uint64_t p = 0; p < 6; p++) {
        struct order_place at = order_at(o, p);
        assert_true(at.shard == expected[p][0] && at.sample == expected[p][1]);
    }
    order_free(o);
}

static void a_million_million_samples(void **state)
{
    (void)state;
    enum { SHARDS = 1000 };
    static uint64_t counts[SHARDS];
    for (int i = 0; i < SHARDS; i++)
        counts[i] = 1000000000ull + (uint64_t)i;
    struct order *o;
    struct err e;
    assert_int_equal(order_create(counts, SHARDS, 1, 100, &o, NULL), 0);
    uint64_t n = order_samples(o);
    for (uint64_t p = 0; p < n; p += n / 1000) {
        struct order_place at = order_at(o, 5 * n + p);
        assert_true(at.sample < counts[at.shard]);
    }
    order_free(o);
    static const uint64_t none[2] = {0, 0}, over[2] = {UINT64_MAX, 1};
    assert_int_equal(order_create(none, 2, 1, 1, &o, &e), -EINVAL);
    assert_int_equal(order_create(none, 0, 1, 1, &o, &e), -EINVAL);
    assert_int_equal(order_create(over, 2, 1, 1, &o, &e), -E2BIG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(permutation_is_a_bijection),       cmocka_unit_test(landings_are_even),
        cmocka_unit_test(permutations_of_few_are_even),     cmocka_unit_test(pairs_are_even),
        cmocka_unit_test(substitutes_are_of_the_window),    cmocka_unit_test(golden_values),
        cmocka_unit_test(each_epoch_has_every_sample_once), cmocka_unit_test(positions_stand_alone),
        cmocka_unit_test(windows_bound_the_shards_in_use),  cmocka_unit_test(sequential_is_as_it_stands),
        cmocka_unit_test(a_million_million_samples),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
