/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a mix gives each dataset its share over any stretch, each dataset goes through its own epochs without
 * gap or repeat, and a position means the same whatever was asked before. Method: many weights, stretches at
 * many places, each dataset's stream against its own order.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/mix.h"

#define GOLDEN 0x9e3779b97f4a7c15ull

static const uint64_t counts[3][4] = {{5, 0, 9, 2}, {1, 1, 0, 0}, {40, 3, 20, 7}};

static struct mix *make(uint32_t n, const uint32_t *weights, const bool *chosen, uint64_t seed,
                        uint32_t window)
{
    struct mix_source s[MIX_DATASETS_MAX];
    struct mix *m = NULL;
    struct err e = {0};
    for (uint32_t i = 0; i < n; i++)
        s[i] = (struct mix_source){.name = "d",
                                   .samples_per_shard = counts[i % 3],
                                   .chosen = chosen,
                                   .shards = 4,
                                   .weight = weights[i]};
    if (mix_create(s, n, seed, window, &m, &e) < 0)
        fail_msg("%s", e.text);
    return m;
}

/* Any stretch has of each dataset its share, to within twice the depth of the tree. */
static void shares_are_exact_over_any_stretch(void **state)
{
    (void)state;
    static const uint32_t weights[][8] = {{1, 1},
                                          {3, 1},
                                          {1, 1000},
                                          {70, 15, 15},
                                          {5, 3, 2, 7, 11},
                                          {UINT32_MAX, 1, UINT32_MAX - 1},
                                          {1, 1, 1, 1, 1, 1, 1, 1}};
    for (size_t w = 0; w < sizeof weights / sizeof *weights; w++) {
        uint32_t n = 0, depth = 0;
        double all = 0;
        while (n < 8 && weights[w][n])
            all += weights[w][n++];
        while (1u << depth < n)
            depth++;
        struct mix *m = make(n, weights[w], NULL, 42 + w, 2);
        for (uint64_t begin = 0; begin < UINT64_MAX / 2; begin = begin * 7 + 1234567) {
            uint64_t had[8] = {0};
            for (uint64_t i = 0; i < 3000; i++) {
                had[mix_at(m, begin + i).source]++;
                for (uint32_t s = 0; s < n; s++)
                    assert_true(fabs((double)had[s] - (double)(i + 1) * weights[w][s] / all) <= 2.0 * depth);
            }
        }
        mix_free(m);
    }
}

/* What a dataset gives, in the order in which it comes, is its own order, from its begin on, over epochs. */
static void each_dataset_follows_its_own_order(void **state)
{
    (void)state;
    static const uint32_t weights[3] = {5, 3, 9};
    for (uint32_t window = 0; window < 4; window++) {
        struct mix *m = make(3, weights, NULL, 77, window);
        struct order *own[3];
        uint64_t next[3] = {0};
        for (uint32_t i = 0; i < 3; i++)
            assert_int_equal(
                order_create(counts[i], 4, order_mix(77 + (i + 1) * GOLDEN), window, &own[i], NULL), 0);
        assert_int_equal(mix_samples(m), 16 + 2 + 70);
        for (uint64_t p = 0; p < 2000; p++) {
            struct mix_place at = mix_at(m, p);
            struct order_place expected = order_at(own[at.source], next[at.source]++);
            assert_int_equal(at.at.shard, expected.shard);
            assert_int_equal(at.at.sample, expected.sample);
        }
        for (uint32_t i = 0; i < 3; i++)
            order_free(own[i]);
        mix_free(m);
    }
}

static void positions_stand_alone(void **state)
{
    (void)state;
    static const uint32_t weights[3] = {1, 2, 3};
    struct mix *m = make(3, weights, NULL, 5, 2), *other;
    for (uint64_t p = 0; p < 3000; p += 7) {
        struct mix_place a = mix_at(m, p);
        (void)mix_at(m, p * 1000003);
        other = make(3, weights, NULL, 5, 2);
        struct mix_place b = mix_at(other, p), c = mix_at(m, p);
        assert_memory_equal(&a.at.sample, &b.at.sample, sizeof a.at.sample);
        assert_true(a.source == b.source && a.at.shard == b.at.shard);
        assert_true(a.source == c.source && a.at.shard == c.at.shard && a.at.sample == c.at.sample);
        mix_free(other);
    }
    mix_free(m);
}

/* Alone, a dataset is as without a mix; a choice is an order over the chosen shards. */
static void one_dataset_is_its_order(void **state)
{
    (void)state;
    static const uint32_t weight = 9;
    static const bool chosen[4] = {true, false, false, true};
    static const uint64_t two[2] = {5, 2};
    struct order *o;
    struct mix *m = make(1, &weight, NULL, 31, 2);
    assert_int_equal(order_create(counts[0], 4, 31, 2, &o, NULL), 0);
    for (uint64_t p = 0; p < 100; p++) {
        struct mix_place a = mix_at(m, p), s;
        struct order_place b = order_at(o, p), t;
        assert_true(a.source == 0 && a.at.shard == b.shard && a.at.sample == b.sample);
        assert_true(mix_substitute(m, p, 1, &s) && order_substitute(o, p, 1, &t));
        assert_true(s.at.shard == t.shard && s.at.sample == t.sample);
    }
    order_free(o);
    mix_free(m);
    m = make(1, &weight, chosen, 31, 2);
    assert_int_equal(mix_samples(m), 7);
    assert_int_equal(order_create(two, 2, 31, 2, &o, NULL), 0);
    for (uint64_t p = 0; p < 100; p++) {
        struct mix_place a = mix_at(m, p), s;
        struct order_place b = order_at(o, p);
        assert_true(a.at.shard == (b.shard ? 3 : 0) && a.at.sample == b.sample);
        assert_true(mix_substitute(m, p, 0, &s) && chosen[s.at.shard]);
    }
    order_free(o);
    mix_free(m);
}

static void assert_refused(const struct mix_source *s, uint32_t n, const char *word)
{
    struct mix *m;
    struct err e = {0};
    assert_int_equal(mix_create(s, n, 1, 1, &m, &e), -EINVAL);
    if (!strstr(e.text, word))
        fail_msg("%s", e.text);
}

static void refuses_what_gives_nothing(void **state)
{
    (void)state;
    static const uint64_t empty[2] = {0, 0};
    static const bool none[4] = {false};
    struct mix_source s[2] = {{.name = "a", .samples_per_shard = counts[0], .shards = 4, .weight = 1},
                              {.name = "b", .samples_per_shard = counts[1], .shards = 4, .weight = 0}};
    assert_refused(s, 2, "\"b\" has weight 0");
    assert_refused(s, 0, "mix of 0");
    assert_refused(s, 65, "mix of 65");
    s[1] = (struct mix_source){.name = "b", .samples_per_shard = empty, .shards = 2, .weight = 1};
    assert_refused(s, 2, "\"b\" has no samples in its 2 shards");
    s[0].chosen = none;
    assert_refused(s, 1, "none of its 4 shards is chosen");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shares_are_exact_over_any_stretch),
        cmocka_unit_test(each_dataset_follows_its_own_order),
        cmocka_unit_test(positions_stand_alone),
        cmocka_unit_test(one_dataset_is_its_order),
        cmocka_unit_test(refuses_what_gives_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
