/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: the parts of one checkpoint fit together, or the save fails naming tensor, ranks and boxes (cases S1,
 * S3, S5, S6, S10). Method: small worlds by hand, then random guillotine cuts with one box damaged. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/index.h"

#define MIB (1u << 20)

static struct tensor box1(const char *name, uint64_t shape, uint64_t offset, uint64_t length, uint8_t content)
{
    struct tensor t = {.name = slice_str(name),
                       .dtype = DTYPE_F32,
                       .dims = 1,
                       .shape = {shape},
                       .offsets = {offset},
                       .lengths = {length},
                       .bytes = 4 * length};
    memset(&t.plain_hash, content, HASH128_BYTES);
    return t;
}

static struct tensor box2(const char *name, const uint64_t shape[2], uint64_t o0, uint64_t l0, uint64_t o1,
                          uint64_t l1)
{
    return (struct tensor){.name = slice_str(name),
                           .dtype = DTYPE_F32,
                           .dims = 2,
                           .shape = {shape[0], shape[1]},
                           .offsets = {o0, o1},
                           .lengths = {l0, l1},
                           .bytes = 4 * l0 * l1};
}

/* Checks one tensor per rank; NULL names: the rank holds nothing. */
static int set_of(struct tensor *each, uint32_t world, struct err *e)
{
    struct index_private *parts = calloc(world, sizeof *parts);
    for (uint32_t i = 0; i < world; i++)
        if (each[i].name.p)
            parts[i] = (struct index_private){.tensors = &each[i], .tensor_count = 1};
    int r = index_check_set(parts, world, e);
    free(parts);
    return r;
}

static void rows_over_ranks(void **state)
{
    (void)state;
    struct err e;
    struct tensor rows[4] = {box1("w", 6, 0, 2, 1), box1("w", 6, 2, 2, 2), box1("w", 6, 4, 2, 3)};
    assert_int_equal(set_of(rows, 4, &e), 0); /* the last rank holds nothing: case S3 */
    rows[3] = box1("w", 6, 6, 0, 0);          /* or says that it holds zero rows */
    assert_int_equal(set_of(rows, 4, &e), 0);
    rows[1].offsets[0] = 3, rows[1].lengths[0] = 1;
    assert_int_equal(set_of(rows, 4, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "\"w\""));
    assert_non_null(strstr(e.text, "hold 5 of them, none from 2 of dimension 0"));
    rows[1].lengths[0] = 2;
    assert_int_equal(set_of(rows, 4, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "[3:5] of rank 1 and [4:6] of rank 2 overlap"));
    struct index_private none[3] = {{0}};
    assert_int_equal(index_check_set(none, 3, &e), 0);
}

static void replicas_must_be_the_same(void **state)
{
    (void)state;
    struct err e;
    struct tensor copies[3] = {box1("bias", 8, 0, 8, 7), box1("bias", 8, 0, 8, 7), box1("bias", 8, 0, 8, 7)};
    assert_int_equal(set_of(copies, 3, &e), 0);
    memset(&copies[2].plain_hash, 9, HASH128_BYTES);
    assert_int_equal(set_of(copies, 3, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "\"bias\": ranks 0 and 2 both hold [0:8], with different bytes"));
    /* A scalar is a box like any other: case S1 */
    struct tensor scalar[2] = {{.name = slice_str("step"), .dtype = DTYPE_I64, .bytes = 8},
                               {.name = slice_str("step"), .dtype = DTYPE_I64, .bytes = 8}};
    assert_int_equal(set_of(scalar, 2, &e), -EILSEQ); /* nothing shows that they are the same */
    assert_non_null(strstr(e.text, "\"step\": ranks 0 and 1 both hold [], with no hash"));
    scalar[0].plain_hash.bytes[0] = scalar[1].plain_hash.bytes[0] = 2;
    assert_int_equal(set_of(scalar, 2, &e), 0);
    scalar[1].plain_hash.bytes[0] = 1;
    assert_int_equal(set_of(scalar, 2, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "\"step\": ranks 0 and 1"));
}

static void large_replicas_are_compared_by_their_chunks(void **state)
{
    (void)state;
    struct err e;
    struct tensor a = box1("big", 2 * MIB, 0, 2 * MIB, 0), b = a;
    struct hash128 one[3] = {{{1}}, {{2}}, {{3}}}, two[3] = {{{9}}, {{1}}, {{2}}};
    a.plain_hash.bytes[0] = 77; /* ignored */
    b.first_chunk = 1;
    struct index_private parts[2] = {
        {.tensors = &a, .tensor_count = 1, .plain_hashes = one, .chunk_count = 3},
        {.tensors = &b, .tensor_count = 1, .plain_hashes = two, .chunk_count = 3}};
    assert_int_equal(index_check_set(parts, 2, &e), 0);
    two[2].bytes[15] = 1;
    assert_int_equal(index_check_set(parts, 2, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "different bytes"));
}

static void structure_must_agree(void **state)
{
    (void)state;
    struct err e;
    struct tensor t[2] = {box1("w", 6, 0, 3, 1), box1("w", 6, 3, 3, 1)};
    t[1].dtype = DTYPE_I32;
    assert_int_equal(set_of(t, 2, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "F32 [6] in the part of rank 0, I32 [6] in that of rank 1"));
    t[1] = box1("w", 7, 3, 4, 1);
    assert_int_equal(set_of(t, 2, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "F32 [6] in the part of rank 0, F32 [7] in that of rank 1"));
    struct tensor scalar = {.name = slice_str("w"), .dtype = DTYPE_F32, .bytes = 4};
    t[1] = scalar;
    assert_int_equal(set_of(t, 2, &e), -EILSEQ);
    t[1] = box1("w/", 6, 0, 6, 1); /* another name is another tensor: case S5 */
    t[0] = box1("w", 6, 0, 6, 1);
    assert_int_equal(set_of(t, 2, &e), 0);
}

static void zero_elements_need_no_box(void **state)
{
    (void)state;
    struct tensor t[2] = {
        {.name = slice_str("none"), .dtype = DTYPE_F32, .dims = 2, .shape = {2, 0}, .lengths = {2, 0}},
        {.name = slice_str("none"), .dtype = DTYPE_F32, .dims = 2, .shape = {2, 0}, .lengths = {1, 0}}};
    assert_int_equal(set_of(t, 2, NULL), 0);
    struct tensor missing[1] = {box1("w", 6, 0, 0, 0)}; /* all ranks say that they hold nothing of it */
    struct err e;
    assert_int_equal(set_of(missing, 1, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "hold 0 of them"));
}

static void aliases_must_agree(void **state)
{
    (void)state;
    struct err e;
    struct tensor a[2] = {box1("embed", 4, 0, 4, 1), box1("head", 4, 0, 4, 2)};
    struct tensor b[2] = {box1("embed", 4, 0, 4, 1), box1("head", 4, 0, 4, 2)};
    struct alias tied = {.name = slice_str("tied"), .tensor = 0},
                 other = {.name = slice_str("tied"), .tensor = 0};
    struct index_private parts[3] = {
        {.tensors = a, .tensor_count = 2, .aliases = &tied, .alias_count = 1},
        {.tensors = b, .tensor_count = 2, .aliases = &other, .alias_count = 1},
    };
    assert_int_equal(index_check_set(parts, 3, &e), 0);
    other.tensor = 1;
    assert_int_equal(index_check_set(parts, 3, &e), -EILSEQ);
    assert_non_null(
        strstr(e.text, "\"tied\": it stands for \"embed\" in the part of rank 0 and for \"head\""));
    other.tensor = 0, other.name = slice_str("head2"), b[1].name = slice_str("tied");
    assert_int_equal(index_check_set(parts, 3, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "is a tensor in the part of rank 1 and an alias in that of rank 0"));
}

static uint64_t seed = 0x9e3779b97f4a7c15ull;
static uint64_t next(uint64_t below)
{
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (seed >> 33) % below;
}

/* Cuts the shape by random planes into at most `most` boxes. */
static uint32_t guillotine(const uint64_t shape[2], struct tensor *out, uint32_t most)
{
    uint32_t n = 1;
    out[0] = box2("g", shape, 0, shape[0], 0, shape[1]);
    while (n < most) {
        struct tensor *t = &out[next(n)], *u = &out[n];
        int d = (int)next(2);
        if (t->lengths[d] < 2)
            break;
        uint64_t at = 1 + next(t->lengths[d] - 1);
        *u = *t;
        u->offsets[d] += at, u->lengths[d] -= at, t->lengths[d] = at;
        n++;
    }
    return n;
}

static void random_tilings_fit_and_damaged_ones_do_not(void **state)
{
    (void)state;
    static struct tensor t[64];
    for (int round = 0; round < 500; round++) {
        uint64_t shape[2] = {1 + next(40), 1 + next(40)};
        uint32_t n = guillotine(shape, t, 1 + (uint32_t)next(60));
        for (uint32_t i = n; i > 1; i--) {
            uint32_t j = (uint32_t)next(i);
            struct tensor keep = t[i - 1];
            t[i - 1] = t[j], t[j] = keep;
        }
        assert_int_equal(set_of(t, n, NULL), 0);
        struct tensor *hurt = &t[next(n)];
        int d = (int)next(2);
        if (next(2) && hurt->offsets[d] > 0) /* grow into a neighbour */
            hurt->offsets[d]--, hurt->lengths[d]++;
        else if (n > 1 || hurt->lengths[d] > 1)
            hurt->lengths[d]--; /* leave a gap */
        else
            continue;
        assert_int_equal(set_of(t, n, NULL), -EILSEQ);
    }
}

/* A grid, slices of rows and slices of columns of many ranks: a look at every pair would take minutes. */
static void many_ranks_are_quick(void **state)
{
    (void)state;
    enum { RANKS = 16384, SIDE = 128 };
    struct tensor *t = calloc(RANKS, sizeof *t);
    const uint64_t shape[2] = {1ull << 20, 1ull << 20};
    const uint64_t step = (1ull << 20) / RANKS, cell = (1ull << 20) / SIDE;
    for (int kind = 0; kind < 3; kind++) {
        for (uint32_t i = 0; i < RANKS; i++)
            t[i] = kind == 0   ? box2("m", shape, i * step, step, 0, shape[1])
                   : kind == 1 ? box2("m", shape, 0, shape[0], i * step, step)
                               : box2("m", shape, i / SIDE * cell, cell, i % SIDE * cell, cell);
        assert_int_equal(set_of(t, RANKS, NULL), 0);
        t[RANKS / 2].lengths[1]--;
        assert_int_equal(set_of(t, RANKS, NULL), -EILSEQ);
    }
    free(t);
}

/* Many tensors in slices over 64 ranks. */
static void many_tensors_are_quick(void **state)
{
    (void)state;
    enum { RANKS = 64, EACH = 2000 };
    struct index_private parts[RANKS] = {{0}};
    struct tensor *t = calloc((size_t)RANKS * EACH, sizeof *t);
    char(*names)[24] = calloc(EACH, sizeof *names);
    for (int i = 0; i < EACH; i++)
        snprintf(names[i], sizeof names[i], "layers.%d.w", i);
    for (uint32_t r = 0; r < RANKS; r++) {
        parts[r] = (struct index_private){.tensors = t + (size_t)r * EACH, .tensor_count = EACH};
        for (int i = 0; i < EACH; i++)
            parts[r].tensors[i] = box1(names[i], RANKS, r, 1, (uint8_t)r);
    }
    assert_int_equal(index_check_set(parts, RANKS, NULL), 0);
    parts[63].tensors[EACH - 1].lengths[0] = 0;
    struct err e;
    assert_int_equal(index_check_set(parts, RANKS, &e), -EILSEQ);
    assert_non_null(strstr(e.text, "layers.1999.w"));
    free(names);
    free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_over_ranks),
        cmocka_unit_test(replicas_must_be_the_same),
        cmocka_unit_test(large_replicas_are_compared_by_their_chunks),
        cmocka_unit_test(structure_must_agree),
        cmocka_unit_test(zero_elements_need_no_box),
        cmocka_unit_test(aliases_must_agree),
        cmocka_unit_test(random_tilings_fit_and_damaged_ones_do_not),
        cmocka_unit_test(many_ranks_are_quick),
        cmocka_unit_test(many_tensors_are_quick),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
