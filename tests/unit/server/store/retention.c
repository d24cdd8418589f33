/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: prune keeps what the rules say and never loses the last good commit. Method: known cases, and random
 * histories and rules (LARDER_TEST_SEQUENCES, 10,000) against a model that follows the words of retention.h
 * one by one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/store/retention.h"

static uint64_t seed = 20240607;

static uint64_t next_random(uint64_t below)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (seed >> 11) % below;
}

static void known_cases(void **state)
{
    (void)state;
    struct retention_item x[] = {{.sequence = 1, .step = 9000},
                                 {.sequence = 2, .step = 10000},
                                 {.sequence = 4, .step = 500, .pinned = true},
                                 {.sequence = 5, .step = 600},
                                 {.sequence = 6, .step = 600}};
    struct retention_rule rule = {.keep_last = 1};
    assert_int_equal(retention_plan(&rule, x, 5), 0);
    assert_int_equal(x[0].reason, PRUNE_REMOVE_OLD); /* C6: by sequence, not by step or name */
    assert_int_equal(x[1].reason, PRUNE_REMOVE_OLD);
    assert_int_equal(x[2].reason, PRUNE_KEEP_PINNED);
    assert_int_equal(x[3].reason, PRUNE_REMOVE_SUPERSEDED);
    assert_int_equal(x[4].reason, PRUNE_KEEP_LAST);
    rule = (struct retention_rule){.keep_every = 5000};
    assert_int_equal(retention_plan(&rule, x, 5), 0);
    assert_int_equal(x[0].reason, PRUNE_REMOVE_OLD);
    assert_int_equal(x[1].reason, PRUNE_KEEP_EVERY);
    assert_int_equal(x[4].reason, PRUNE_KEEP_LAST_GOOD);
    x[4].bad = true; /* a bad one replaces nothing, and counts for nothing */
    rule = (struct retention_rule){.keep_last = 1};
    assert_int_equal(retention_plan(&rule, x, 5), 0);
    assert_int_equal(x[3].reason, PRUNE_KEEP_LAST);
    assert_int_equal(x[4].reason, PRUNE_KEEP_LAST);
    assert_int_equal(retention_plan(&rule, x, 0), 0);
}

/* Is it superseded, by the words? */
static bool model_superseded(const struct retention_rule *rule, const struct retention_item *x, size_t n,
                             size_t i)
{
    for (size_t k = i + 1; k < n && !rule->versions; k++)
        if (x[k].step == x[i].step && !x[k].bad)
            return true;
    return false;
}

static bool model_keeps(const struct retention_rule *rule, const struct retention_item *x, size_t n, size_t i)
{
    size_t later = 0; /* good ones that count, after this one */
    bool good_later = false;
    for (size_t k = i + 1; k < n; k++) {
        if (!x[k].bad && !model_superseded(rule, x, n, k))
            later++;
        good_later |= !x[k].bad;
    }
    if (x[i].pinned || (!x[i].bad && !good_later))
        return true;
    if (model_superseded(rule, x, n, i))
        return false;
    size_t rank = later + !x[i].bad; /* 1: the last */
    if (rule->keep_last && (x[i].bad ? later < rule->keep_last : rank <= rule->keep_last))
        return true;
    if (rule->keep_every && x[i].step % rule->keep_every == 0)
        return true;
    return rule->keep_within_ns &&
           (x[i].time_ns > rule->now_ns || rule->now_ns - x[i].time_ns <= rule->keep_within_ns);
}

static void random_histories_follow_the_model(void **state)
{
    (void)state;
    const char *given = getenv("LARDER_TEST_SEED"), *count = getenv("LARDER_TEST_SEQUENCES");
    uint64_t rounds = count ? strtoull(count, NULL, 10) : 10000;
    seed = given ? strtoull(given, NULL, 10) | 1 : seed;
    print_message("seed %llu\n", (unsigned long long)seed);
    size_t removed = 0, kept = 0;
    for (uint64_t round = 0; round < rounds; round++) {
        struct retention_item x[24];
        size_t n = next_random(25);
        uint64_t sequence = 0;
        for (size_t i = 0; i < n; i++)
            x[i] = (struct retention_item){.sequence = sequence += 1 + next_random(3),
                                           .step = next_random(8) * 10,
                                           .time_ns = next_random(100),
                                           .pinned = next_random(8) == 0,
                                           .bad = next_random(4) == 0};
        struct retention_rule rule = {.keep_last = (uint32_t)next_random(5),
                                      .keep_every = next_random(3) * 20,
                                      .keep_within_ns = next_random(2) * next_random(60),
                                      .now_ns = 90,
                                      .versions = next_random(4) == 0};
        assert_int_equal(retention_plan(&rule, x, n), 0);
        bool had_good = false, has_good = false;
        for (size_t i = 0; i < n; i++) {
            bool removes = retention_removes(x[i].reason);
            if (removes == model_keeps(&rule, x, n, i))
                fail_msg("round %llu, item %zu of %zu: reason %d", (unsigned long long)round, i, n,
                         x[i].reason);
            had_good |= !x[i].bad;
            has_good |= !x[i].bad && !removes;
            removed += removes;
            kept += !removes;
        }
        assert_int_equal(had_good, has_good); /* C5 */
    }
    assert_true(removed > rounds && kept > rounds); /* both were tried */
    print_message("%llu sequences\n", (unsigned long long)rounds);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_cases),
        cmocka_unit_test(random_histories_follow_the_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
