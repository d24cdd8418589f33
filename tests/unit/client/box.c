/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: copying boxes with any strides is right. Method: random tensors, boxes, regions, strides (permuted,
 * padded, negative, zero) against a naive element-by-element model; ranges of every cut.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/transfer.h"

static uint64_t seed, rng;

static uint64_t draw(uint64_t below)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return rng % below;
}

static const enum dtype dtypes[] = {DTYPE_U8, DTYPE_BF16, DTYPE_F32, DTYPE_F64, DTYPE_C128};

#define MEMORY 65536

struct trial {
    enum dtype dtype;
    uint32_t dims;
    uint64_t lengths[TENSOR_DIMS_MAX], begin[TENSOR_DIMS_MAX], count[TENSOR_DIMS_MAX];
    int64_t elements[TENSOR_DIMS_MAX], strides[TENSOR_DIMS_MAX];
    uint8_t memory[MEMORY], *base;
    uint64_t total; /* elements of the packed box */
};

/* Strides of a permuted, padded box in memory of `count`; some dimensions turned around or repeated. */
static void draw_strides(struct trial *t, bool writable)
{
    uint32_t order[TENSOR_DIMS_MAX];
    for (uint32_t i = 0; i < t->dims; i++)
        order[i] = i;
    for (uint32_t i = t->dims; i > 1; i--) {
        uint32_t j = (uint32_t)draw(i), x = order[i - 1];
        order[i - 1] = order[j];
        order[j] = x;
    }
    bool plain = draw(3) == 0;
    int64_t step = 1, base = 0, any = 0;
    for (uint32_t i = t->dims; i-- > 0;) {
        uint32_t d = plain ? i : order[i];
        t->elements[d] = step;
        step *= (int64_t)(t->count[d] + (plain ? 0 : draw(2)));
        if (!plain && draw(4) == 0) {
            base += t->elements[d] * (int64_t)(t->count[d] - 1);
            t->elements[d] = -t->elements[d];
        } else if (!plain && !writable && draw(4) == 0) {
            t->elements[d] = 0;
        }
        any |= t->elements[d];
    }
    if (t->dims > 0 && any == 0) /* would mean: packed */
        t->elements[0] = 1;
    t->base = t->memory + base * (int64_t)(dtype_bits(t->dtype) / 8);
    assert_int_equal(box_strides(t->dtype, t->dims, t->count, t->elements, writable, t->strides, NULL), 0);
}

static void draw_trial(struct trial *t, bool writable, bool whole)
{
    memset(t, 0, sizeof *t);
    t->dtype = dtypes[draw(sizeof dtypes / sizeof *dtypes)];
    t->dims = (uint32_t)draw(5);
    t->total = 1;
    for (uint32_t i = 0; i < t->dims; i++) {
        t->lengths[i] = 1 + draw(6);
        t->begin[i] = whole ? 0 : draw(t->lengths[i]);
        t->count[i] = whole ? t->lengths[i] : 1 + draw(t->lengths[i] - t->begin[i]);
        t->total *= t->lengths[i];
    }
    draw_strides(t, writable);
}

/* The naive model: byte address in memory of the packed element, or NULL if outside the region. */
static uint8_t *model(struct trial *t, uint64_t element)
{
    int64_t at = 0;
    for (uint32_t i = t->dims; i-- > 0;) {
        uint64_t x = element % t->lengths[i];
        element /= t->lengths[i];
        if (x < t->begin[i] || x >= t->begin[i] + t->count[i])
            return NULL;
        at += (int64_t)(x - t->begin[i]) * t->elements[i];
    }
    return t->base + at * (int64_t)(dtype_bits(t->dtype) / 8);
}

static void gather_is_the_model(void **state)
{
    (void)state;
    for (int round = 0; round < 2000; round++) {
        static struct trial t;
        draw_trial(&t, false, true);
        size_t size = dtype_bits(t.dtype) / 8;
        for (size_t i = 0; i < MEMORY; i++)
            t.memory[i] = (uint8_t)draw(256);
        struct box_copy b;
        box_copy_init(&b, t.dtype, t.dims, t.lengths, t.begin, t.count, t.strides, t.base);
        uint64_t first = draw(t.total), n = draw(t.total - first + 1);
        uint8_t *out = malloc(n * size + 1);
        out[n * size] = 0xa5;
        box_gather(&b, first * size, n * size, out);
        for (uint64_t i = 0; i < n; i++)
            assert_memory_equal(out + i * size, model(&t, first + i), size);
        assert_int_equal(out[n * size], 0xa5);
        free(out);
    }
}

static void scatter_is_the_model(void **state)
{
    (void)state;
    static uint8_t expected[MEMORY], packed[MEMORY];
    for (int round = 0; round < 2000; round++) {
        static struct trial t;
        draw_trial(&t, true, false);
        size_t size = dtype_bits(t.dtype) / 8;
        for (size_t i = 0; i < t.total * size; i++)
            packed[i] = (uint8_t)(1 + draw(255));
        struct box_copy b;
        box_copy_init(&b, t.dtype, t.dims, t.lengths, t.begin, t.count, t.strides, t.base);
        uint64_t cut = draw(t.total + 1); /* in two ranges, each alone checked against box_touches */
        uint64_t from[2] = {0, cut}, to[2] = {cut, t.total};
        memset(expected, 0, sizeof expected);
        for (int half = 0; half < 2; half++) {
            bool touched = false;
            for (uint64_t i = from[half]; i < to[half]; i++) {
                uint8_t *p = model(&t, i);
                touched |= p != NULL;
                if (p)
                    memcpy(expected + (p - t.memory), packed + i * size, size);
            }
            assert_int_equal(box_touches(&b, from[half] * size, (to[half] - from[half]) * size), touched);
            box_scatter(&b, from[half] * size, (to[half] - from[half]) * size, packed + from[half] * size);
        }
        assert_memory_equal(t.memory, expected, sizeof expected);
    }
}

/* What copies to and from devices does the same, by fewer and larger copies: here on host memory, where each
 * is done when it was given. */
static void transfers_are_gathers_and_scatters(void **state)
{
    (void)state;
    static uint8_t packed[MEMORY], got[MEMORY], before[MEMORY];
    struct memory *m = NULL;
    struct memory_stream *s = NULL;
    struct err e;
    assert_int_equal(memory_open(MEMORY_HOST, 0, &m, &e), 0);
    assert_int_equal(memory_stream_create(m, &s, &e), 0);
    for (int round = 0; round < 4000; round++) {
        static struct trial t;
        bool in = round % 2;
        draw_trial(&t, in, !in);
        size_t size = dtype_bits(t.dtype) / 8;
        for (size_t i = 0; i < MEMORY; i++)
            t.memory[i] = (uint8_t)draw(256);
        for (size_t i = 0; i < t.total * size; i++)
            packed[i] = (uint8_t)draw(256);
        struct box_copy b;
        box_copy_init(&b, t.dtype, t.dims, t.lengths, t.begin, t.count, t.strides, t.base);
        uint64_t first = draw(t.total), n = draw(t.total - first + 1);
        if (in) {
            memcpy(before, t.memory, sizeof before);
            box_scatter(&b, first * size, n * size, packed);
            memcpy(got, t.memory, sizeof got);
            memcpy(t.memory, before, sizeof before);
            assert_int_equal(transfer(s, NULL, MEMORY_IN, &b, first * size, n * size, packed, &e), 0);
            assert_memory_equal(t.memory, got, sizeof got);
        } else {
            memset(got, 0, sizeof got);
            memset(packed, 0, sizeof packed);
            box_gather(&b, first * size, n * size, got);
            assert_int_equal(transfer(s, NULL, MEMORY_OUT, &b, first * size, n * size, packed, &e), 0);
            assert_memory_equal(packed, got, sizeof got);
        }
    }
    memory_stream_destroy(s);
    memory_close(m);
}

static int count_strip(void *arg, const struct box_strip *s)
{
    (void)s;
    ++*(int *)arg;
    return 0;
}

/* A box of rows is one copy, whatever its padding; a range that cuts rows takes a few. */
static void boxes_are_few_strips(void **state)
{
    (void)state;
    uint64_t lengths[3] = {20, 30, 40}, begin[3] = {0};
    int64_t strides[3] = {30 * 50 * 4, 50 * 4, 4};
    struct box_copy b;
    int strips = 0;
    box_copy_init(&b, DTYPE_F32, 3, lengths, begin, lengths, strides, &strips); /* not touched */
    assert_int_equal(box_walk(&b, 0, 20 * 30 * 40 * 4, count_strip, &strips), 0);
    assert_int_equal(strips, 1);
    strips = 0;
    assert_int_equal(box_walk(&b, 4, 20 * 30 * 40 * 4 - 8, count_strip, &strips), 0);
    assert_true(strips >= 3 && strips <= 5);
}

static void packed_dtypes_are_copied_by_bytes(void **state)
{
    (void)state;
    uint64_t lengths[2] = {3, 8}, begin[2] = {1, 4}, count[2] = {2, 4};
    int64_t zero[2] = {0}, strides[2];
    uint8_t in[18], out[6] = {0};
    for (int i = 0; i < 18; i++)
        in[i] = (uint8_t)(i + 1);
    /* F6: a row of 8 elements is 6 bytes; the region is the second half of rows 1 and 2 */
    assert_int_equal(box_strides(DTYPE_F6_E2M3, 2, count, zero, true, strides, NULL), 0);
    struct box_copy b;
    box_copy_init(&b, DTYPE_F6_E2M3, 2, lengths, begin, count, strides, out);
    box_scatter(&b, 0, 7, in); /* cuts within a group of four elements are legal */
    box_scatter(&b, 7, 11, in + 7);
    const uint8_t expected[6] = {10, 11, 12, 16, 17, 18};
    assert_memory_equal(out, expected, 6);
    int64_t transposed[2] = {1, 2};
    assert_int_equal(box_strides(DTYPE_F4, 2, count, transposed, false, strides, NULL), -EINVAL);
    int64_t stated[2] = {4, 1};
    assert_int_equal(box_strides(DTYPE_F4, 2, count, stated, false, strides, NULL), 0);
    assert_int_equal(strides[0], 2);
    assert_int_equal(strides[1], 1);
}

static void bad_strides_are_refused(void **state)
{
    (void)state;
    uint64_t lengths[2] = {2, 3};
    int64_t out[2], expanded[2] = {0, 1}, huge[2] = {INT64_MAX / 2, 1};
    struct err e;
    assert_int_equal(box_strides(DTYPE_F32, 2, lengths, expanded, false, out, &e), 0);
    assert_int_equal(box_strides(DTYPE_F32, 2, lengths, expanded, true, out, &e), -EINVAL);
    assert_non_null(strstr(e.text, "dimension 0"));
    assert_int_equal(box_strides(DTYPE_F32, 2, lengths, huge, false, out, &e), -E2BIG);
}

/* Does any place hold two elements? */
static bool share(const uint64_t *lengths, const int64_t *strides)
{
    uint8_t taken[256] = {0};
    for (uint64_t i = 0; i < lengths[0]; i++)
        for (uint64_t k = 0; k < lengths[1]; k++) {
            uint8_t *at = &taken[128 + (int64_t)i * strides[0] + (int64_t)k * strides[1]];
            if (*at)
                return true;
            *at = 1;
        }
    return false;
}

/* Every pair of small strides, against the model: what cannot be written without elements over each other is
 * refused, all else is not. */
static void strides_that_share_places_are_refused(void **state)
{
    (void)state;
    int refused = 0, taken = 0;
    for (int a = -9; a <= 9; a++)
        for (int b = -9; b <= 9; b++)
            for (uint64_t n = 1; n <= 5; n++)
                for (uint64_t m = 1; m <= 5; m++) {
                    uint64_t lengths[2] = {n, m};
                    int64_t strides[2] = {a, b}, out[2];
                    struct err e;
                    if (a == 0 && b == 0)
                        continue; /* packed */
                    int rc = box_strides(DTYPE_F32, 2, lengths, strides, true, out, &e);
                    assert_int_equal(rc, share(lengths, strides) ? -EINVAL : 0);
                    assert_int_equal(box_strides(DTYPE_F32, 2, lengths, strides, false, out, &e), 0);
                    rc < 0 ? refused++ : taken++;
                }
    assert_true(refused > 1000 && taken > 1000);
}

static uint64_t volume(uint32_t dims, const struct box *b)
{
    uint64_t v = 1;
    for (uint32_t i = 0; i < dims; i++)
        v *= b->lengths[i];
    return v;
}

/* Cutting random boxes out of one leaves exactly the cells that no cut held, each in one piece only. */
static void cutting_is_the_model(void **state)
{
    (void)state;
    enum { SIDE = 6 };
    for (int round = 0; round < 500; round++) {
        uint8_t cells[SIDE][SIDE][SIDE] = {0}; /* 1: cut away */
        struct box_set set = {0}, taken = {0};
        struct box whole = {.lengths = {SIDE, SIDE, SIDE}};
        assert_int_equal(box_set_add(&set, &whole), 0);
        uint64_t left = SIDE * SIDE * SIDE;
        for (int cuts = 0; cuts < 5; cuts++) {
            struct box c = {0};
            for (int i = 0; i < 3; i++) {
                c.offsets[i] = draw(SIDE);
                c.lengths[i] = 1 + draw(SIDE - c.offsets[i]);
            }
            uint64_t fresh = 0;
            for (uint64_t x = c.offsets[0]; x < c.offsets[0] + c.lengths[0]; x++)
                for (uint64_t y = c.offsets[1]; y < c.offsets[1] + c.lengths[1]; y++)
                    for (uint64_t z = c.offsets[2]; z < c.offsets[2] + c.lengths[2]; z++) {
                        fresh += !cells[x][y][z];
                        cells[x][y][z] = 1;
                    }
            taken.count = 0;
            assert_int_equal(box_set_cut(&set, 3, &c, &taken), 0);
            uint64_t got = 0, remains = 0;
            for (size_t i = 0; i < taken.count; i++)
                got += volume(3, &taken.boxes[i]);
            for (size_t i = 0; i < set.count; i++)
                remains += volume(3, &set.boxes[i]);
            left -= fresh;
            assert_int_equal(got, fresh);
            assert_int_equal(remains, left);
        }
        for (size_t i = 0; i < set.count;
             i++) { /* no piece holds a cell that was cut, or one of another piece */
            const struct box *b = &set.boxes[i];
            for (uint64_t x = b->offsets[0]; x < b->offsets[0] + b->lengths[0]; x++)
                for (uint64_t y = b->offsets[1]; y < b->offsets[1] + b->lengths[1]; y++)
                    for (uint64_t z = b->offsets[2]; z < b->offsets[2] + b->lengths[2]; z++) {
                        assert_int_equal(cells[x][y][z], 0);
                        cells[x][y][z] = 2;
                    }
        }
        box_set_free(&set);
        box_set_free(&taken);
    }
}

int main(void)
{
    const char *given = getenv("LARDER_TEST_SEED");
    seed = given ? strtoull(given, NULL, 0) : 0x6c61726465720001ull;
    rng = seed;
    printf("# seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gather_is_the_model),
        cmocka_unit_test(scatter_is_the_model),
        cmocka_unit_test(transfers_are_gathers_and_scatters),
        cmocka_unit_test(boxes_are_few_strips),
        cmocka_unit_test(packed_dtypes_are_copied_by_bytes),
        cmocka_unit_test(bad_strides_are_refused),
        cmocka_unit_test(strides_that_share_places_are_refused),
        cmocka_unit_test(cutting_is_the_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
