/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: a choice of shards takes exactly those that its pattern and slice name, and hostile patterns cost no
 * time. Method: tables of patterns and names; slices over names. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/choice.h"

static void patterns_match_what_they_say(void **state)
{
    (void)state;
    static const struct {
        const char *pattern, *name;
        bool matches;
    } cases[] = {
        {"train-*.tar", "train-007.tar", true},
        {"train-*.tar", "train-.tar", true},
        {"train-*.tar", "train-007.tar.gz", false},
        {"train-*.tar", "a-train-007.tar", false},
        {"*", "", true},
        {"**a**", "banana", true},
        {"*a*b*c*", "xxaxxbxxc", true},
        {"*a*b*c*", "xxbxxaxxc", false},
        {"?", "a", true},
        {"?", "", false},
        {"?", "\xc3\xa9", true}, /* one character of two bytes */
        {"??", "\xc3\xa9", false},
        {"shard-[0-4]?", "shard-42", true},
        {"shard-[0-4]?", "shard-52", false},
        {"shard-[!0-4]?", "shard-52", true},
        {"shard-[!0-4]?", "shard-42", false},
        {"[]a]x", "]x", true},
        {"[a-]x", "-x", true},
        {"[a-]x", "bx", false},
        {"[\\]]", "]", true},
        {"[\xc3\xa0-\xc3\xbf]", "\xc3\xa9", true},
        {"[\xc3\xa0-\xc3\xbf]", "e", false},
        {"a\\*b", "a*b", true},
        {"a\\*b", "axb", false},
        {"A", "a", false},
        {"!val-*", "train-1", true},
        {"!val-*", "val-1", false},
        {"\\!x", "!x", true},
        {"abc", "abc", true},
        {"abc", "ab", false},
        {"ab", "abc", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bool got = choice_matches(cases[i].pattern, slice_str(cases[i].name));
        if (got != cases[i].matches)
            print_error("\"%s\" and \"%s\"\n", cases[i].pattern, cases[i].name);
        assert_int_equal(got, cases[i].matches);
    }
}

/* What takes a careless matcher for ever: each star could end anywhere. */
static void stars_cost_no_time(void **state)
{
    (void)state;
    char pattern[256], name[256];
    for (int i = 0; i < 250; i += 2)
        memcpy(pattern + i, "*a", 2);
    memcpy(pattern + 250, "*b", 3);
    memset(name, 'a', 255);
    name[255] = '\0';
    assert_false(choice_matches(pattern, slice_str(name)));
}

static uint32_t taken(struct choice c, uint32_t count)
{
    uint32_t matched = 0, bits = 0;
    for (uint32_t i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s-%02u", i % 3 ? "odd" : "third", i);
        bits |= (uint32_t)choice_takes(&c, slice_str(name), &matched) << i;
    }
    return bits;
}

static void slices_divide_what_matches(void **state)
{
    (void)state;
    assert_int_equal(taken((struct choice){0}, 10), 0x3ff);
    assert_int_equal(taken((struct choice){.pattern = "third-*"}, 10), 0x249); /* 0 3 6 9 */
    assert_int_equal(taken((struct choice){.pattern = "third-*", .slice = 1, .slices = 2}, 10),
                     0x208); /* 3 9 */
    uint32_t all = 0;
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t now = taken((struct choice){.slice = i, .slices = 4}, 30);
        assert_int_equal(all & now, 0);
        all |= now;
    }
    assert_int_equal(all, (1u << 30) - 1);
}

static void assert_refused(struct choice c, const char *word)
{
    struct err e = {0};
    assert_int_equal(choice_check(&c, &e), -EINVAL);
    assert_non_null(strstr(e.text, word));
}

static void refuses_what_means_nothing(void **state)
{
    (void)state;
    char long_one[300];
    memset(long_one, 'a', sizeof long_one);
    long_one[299] = '\0';
    assert_refused((struct choice){.slice = 4, .slices = 4}, "slice 4 of 4");
    assert_refused((struct choice){.slice = 1}, "slice 1 of 0");
    assert_refused((struct choice){.pattern = "a[bc"}, "close");
    assert_refused((struct choice){.pattern = "a[]"}, "close");
    assert_refused((struct choice){.pattern = "a[\\]"}, "close");
    assert_refused((struct choice){.pattern = long_one}, "299 bytes");
    assert_int_equal(choice_check(&(struct choice){.pattern = "[a[]\\[*", .slice = 1, .slices = 2}, NULL), 0);
}

static void digests_tell_choices_apart(void **state)
{
    (void)state;
    assert_int_equal(choice_digest(&(struct choice){0}), 0);
    assert_int_equal(choice_digest(&(struct choice){.pattern = "", .slices = 1}), 0);
    const struct choice c[] = {{.pattern = "a"},
                               {.pattern = "b"},
                               {.slices = 2},
                               {.slice = 1, .slices = 2},
                               {.pattern = "a", .slices = 2}};
    for (int i = 0; i < 5; i++)
        for (int k = 0; k < 5; k++)
            assert_int_equal(choice_digest(&c[i]) == choice_digest(&c[k]), i == k);
    /* {"a"}: hashed as FORMAT.md says, the same on every machine */
    assert_int_equal(choice_digest(&(struct choice){.pattern = "a"}),
                     choice_digest(&(struct choice){.pattern = "a", .slices = 1}));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(patterns_match_what_they_say), cmocka_unit_test(stars_cost_no_time),
        cmocka_unit_test(slices_divide_what_matches),   cmocka_unit_test(refuses_what_means_nothing),
        cmocka_unit_test(digests_tell_choices_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
