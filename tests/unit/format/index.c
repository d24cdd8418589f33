/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: the index comes back, hostile ones are refused before memory is taken, and a million tensors are no
 * trouble (cases S1, S2, S4, S5, S9, S10, S11). Method: round trips, cuts, flipped bytes, nonsense. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/index.h"

#define MIB (1u << 20)

/* Chunk 0: 100 bytes of F32 shared; 1, 2: a large BF16 tensor; 3: zero; 4: a blob. */
static struct chunk_entry chunks[5] = {
    {.offset = 4096, .stored_bytes = 116, .plain_bytes = 100, .codec = CODEC_RAW, .dtype = DTYPE_F32},
    {.offset = 8192,
     .stored_bytes = 3 * MIB,
     .plain_bytes = 4 * MIB,
     .codec = CODEC_PLANES,
     .dtype = DTYPE_BF16},
    {.offset = 8192 + 4 * MIB,
     .stored_bytes = MIB,
     .plain_bytes = 2 * MIB,
     .codec = CODEC_PLANES,
     .dtype = DTYPE_BF16},
    {.plain_bytes = 64, .codec = CODEC_ZERO, .dtype = DTYPE_F32},
    {.offset = 8192 + 6 * MIB, .stored_bytes = 30, .plain_bytes = 14, .codec = CODEC_ZSTD, .dtype = DTYPE_U8},
};
static struct hash128 hashes[5];

static struct tensor tensors[6];
static struct alias aliases[1];
static struct blob blobs[2];

static struct index_private an_index(void)
{
    for (int i = 0; i < 5; i++) {
        memset(&hashes[i], i + 1, sizeof hashes[i]);
        if (chunks[i].stored_bytes)
            memset(&chunks[i].stored_hash, i + 17, HASH128_BYTES);
    }
    tensors[0] = (struct tensor){.name = slice_str("a/b"),
                                 .dtype = DTYPE_F32,
                                 .dims = 2,
                                 .shape = {4, 5},
                                 .offsets = {2, 0},
                                 .lengths = {2, 5},
                                 .bytes = 40};
    memset(&tensors[0].plain_hash, 0x55, HASH128_BYTES);
    tensors[1] = (struct tensor){.name = slice_str("scalar"), .dtype = DTYPE_F32, .bytes = 4, .offset = 40};
    tensors[2] = (struct tensor){.name = slice_str("large"),
                                 .dtype = DTYPE_BF16,
                                 .dims = 1,
                                 .shape = {3 * MIB},
                                 .lengths = {3 * MIB},
                                 .bytes = 6 * MIB,
                                 .first_chunk = 1};
    tensors[3] = (struct tensor){
        .name = slice_str("none"), .dtype = DTYPE_F64, .dims = 2, .shape = {2, 0}, .lengths = {2, 0}};
    tensors[4] = (struct tensor){.name = slice_str("zero"),
                                 .dtype = DTYPE_I32,
                                 .dims = 1,
                                 .shape = {16},
                                 .lengths = {16},
                                 .bytes = 64,
                                 .first_chunk = 3};
    tensors[5] = (struct tensor){.name = slice_str("../~/x.y"),
                                 .dtype = DTYPE_F32,
                                 .dims = 1,
                                 .shape = {3},
                                 .lengths = {3},
                                 .bytes = 12,
                                 .offset = 88};
    aliases[0] = (struct alias){.name = slice_str("tied"), .tensor = 2};
    blobs[0] = (struct blob){.name = slice_str("optimizer.json"), .bytes = 14, .first_chunk = 4};
    blobs[1] = (struct blob){.name = slice_str("empty")};
    return (struct index_private){.tensors = tensors,
                                  .tensor_count = 6,
                                  .aliases = aliases,
                                  .alias_count = 1,
                                  .blobs = blobs,
                                  .blob_count = 2,
                                  .plain_hashes = hashes,
                                  .chunk_count = 5};
}

static void public_part_comes_back(void **state)
{
    (void)state;
    (void)an_index();
    struct buf b = {0};
    struct chunk_entry *back = NULL;
    uint32_t count = 0;
    assert_int_equal(index_public_encode(chunks, 5, &b, NULL), 0);
    assert_int_equal(b.n, 32 + 5 * 40);
    assert_int_equal(index_public_decode(b.p, b.n, 16 * MIB, &back, &count, NULL), 0);
    assert_int_equal(count, 5);
    for (int i = 0; i < 5; i++) {
        uint8_t one[CHUNK_ENTRY_BYTES], two[CHUNK_ENTRY_BYTES];
        chunk_entry_encode(&chunks[i], one);
        chunk_entry_encode(&back[i], two);
        assert_memory_equal(one, two, sizeof one);
    }
    free(back);
    /* The last chunk ends at 8222 + 6 MiB: an index before that cannot be. */
    struct err e;
    assert_int_equal(index_public_decode(b.p, b.n, 8192 + 6 * MIB, &back, &count, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "chunk 4"));
    for (size_t n = 0; n < b.n; n++)
        assert_int_equal(index_public_decode(b.p, n, 16 * MIB, &back, &count, NULL), -EBADMSG);
    for (size_t i = 0; i < b.n; i++) {
        b.p[i] ^= 4;
        int r = index_public_decode(b.p, b.n, 16 * MIB, &back, &count, NULL);
        assert_int_equal(r, i >= 16 && i < 20 ? -EPROTONOSUPPORT : -EBADMSG);
        b.p[i] ^= 4;
    }
    buf_free(&b);
    assert_int_equal(index_public_encode(NULL, 0, &b, NULL), 0); /* a rank with nothing, case S3 */
    assert_int_equal(index_public_decode(b.p, b.n, 4096, &back, &count, NULL), 0);
    assert_int_equal(count, 0);
    free(back);
    buf_free(&b);
}

static void bad_chunks_are_refused_by_number(void **state)
{
    (void)state;
    for (int i = 0; i < 12; i++) {
        (void)an_index();
        struct chunk_entry c = chunks[0], out;
        uint8_t raw[CHUNK_ENTRY_BYTES];
        if (i == 0)
            c.codec = CODEC_COUNT;
        if (i == 1)
            c.dtype = 0;
        if (i == 2)
            c.plain_bytes = 0;
        if (i == 3)
            c.plain_bytes = CHUNK_PLAIN_BYTES_MAX + 1;
        if (i == 4)
            c.stored_bytes = CHUNK_STORED_BYTES_MAX + 1;
        if (i == 5)
            c.stored_bytes = 0;
        if (i == 6)
            c.codec = CODEC_ZERO;
        if (i == 7)
            c.offset = 0;
        if (i == 8)
            c.offset = 4097;
        if (i == 9)
            c.offset = UINT64_MAX / 4096 * 4096;
        if (i == 10)
            c = chunks[3], c.stored_hash.bytes[0] = 1;
        chunk_entry_encode(&c, raw);
        if (i == 11)
            raw[20] = 1;
        struct err e;
        assert_int_equal(chunk_entry_decode(raw, 77, &out, &e), -EBADMSG);
        assert_non_null(strstr(e.text, "chunk 77"));
    }
    (void)an_index();
    struct chunk_entry swapped[2] = {chunks[1], chunks[0]}, *back;
    struct buf b = {0};
    uint32_t count;
    assert_int_equal(index_public_encode(swapped, 2, &b, NULL), 0);
    assert_int_equal(index_public_decode(b.p, b.n, 16 * MIB, &back, &count, NULL), -EBADMSG);
    buf_free(&b);
}

static void a_view_is_the_same(const uint8_t *p, size_t n, const struct index_private *decoded)
{
    struct index_private view;
    assert_int_equal(index_private_view(p, n, chunks, 5, &view, NULL), 0);
    assert_true(view.tensor_count == decoded->tensor_count && view.alias_count == decoded->alias_count &&
                view.blob_count == decoded->blob_count && !view.tensors);
    for (uint32_t i = 0; i < view.tensor_count; i++) {
        struct tensor room = {0};
        const struct tensor *s = &decoded->tensors[i], *t = index_tensor(&view, i, &room);
        assert_true(slice_eq(s->name, t->name) && slice_eq(s->name, index_tensor_name(&view, i)));
        assert_true(s->dtype == t->dtype && s->dims == t->dims && s->bytes == t->bytes &&
                    s->first_chunk == t->first_chunk && s->offset == t->offset);
        assert_memory_equal(s->shape, t->shape, sizeof s->shape);
        assert_memory_equal(s->offsets, t->offsets, sizeof s->offsets);
        assert_memory_equal(s->lengths, t->lengths, sizeof s->lengths);
        assert_memory_equal(&s->plain_hash, &t->plain_hash, HASH128_BYTES);
        assert_ptr_equal(index_tensor(decoded, i, &room), s);
    }
    index_private_free(&view);
}

/* A view leaves names that are there twice to whoever compares them. */
static void a_name_used_twice_is_found_when_expanded(void **state)
{
    (void)state;
    struct index_private x = an_index(), y;
    struct buf b = {0};
    struct err e;
    assert_int_equal(index_private_encode(&x, &b, NULL), 0);
    const char *first = "tied"; /* an alias: give it the name of a tensor, of as many bytes */
    uint8_t *at = memmem(b.p, b.n, first, 4);
    assert_non_null(at);
    uint32_t i = 0;
    while (i < x.tensor_count && x.tensors[i].name.n != 4)
        i++;
    assert_true(i < x.tensor_count);
    memcpy(at, x.tensors[i].name.p, 4);
    assert_int_equal(index_private_decode(b.p, b.n, chunks, 5, &y, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "twice"));
    assert_int_equal(index_private_view(b.p, b.n, chunks, 5, &y, &e), 0);
    assert_int_equal(index_private_expand(&y, &e), -EBADMSG);
    index_private_free(&y);
    buf_free(&b);
}

static void private_part_comes_back(void **state)
{
    (void)state;
    struct index_private x = an_index(), y;
    struct buf b = {0};
    assert_int_equal(index_private_encode(&x, &b, NULL), 0);
    uint8_t *copy = malloc(b.n);
    memcpy(copy, b.p, b.n);
    assert_int_equal(index_private_decode(copy, b.n, chunks, 5, &y, NULL), 0);
    a_view_is_the_same(copy, b.n, &y);
    memset(copy, 0xee, b.n);
    free(copy);
    assert_true(y.tensor_count == 6 && y.alias_count == 1 && y.blob_count == 2 && y.chunk_count == 5);
    for (int i = 0; i < 6; i++) {
        const struct tensor *s = &x.tensors[i], *t = &y.tensors[i];
        assert_true(slice_eq(s->name, t->name) && s->dtype == t->dtype && s->dims == t->dims);
        assert_memory_equal(s->shape, t->shape, sizeof s->shape);
        assert_memory_equal(s->offsets, t->offsets, sizeof s->offsets);
        assert_memory_equal(s->lengths, t->lengths, sizeof s->lengths);
        assert_memory_equal(&s->plain_hash, &t->plain_hash, HASH128_BYTES);
        assert_true(s->bytes == t->bytes && s->first_chunk == t->first_chunk && s->offset == t->offset);
    }
    assert_true(slice_eq(y.aliases[0].name, slice_str("tied")) && y.aliases[0].tensor == 2);
    assert_true(slice_eq(y.blobs[0].name, blobs[0].name) && y.blobs[0].bytes == 14 &&
                y.blobs[0].first_chunk == 4);
    assert_true(slice_eq(y.blobs[1].name, slice_str("empty")) && y.blobs[1].bytes == 0);
    assert_memory_equal(y.plain_hashes, hashes, sizeof hashes);
    index_private_free(&y);
    for (size_t n = 0; n < b.n; n++) {
        uint8_t *cut = malloc(n + 1);
        memcpy(cut, b.p, n);
        assert_int_equal(index_private_decode(cut, n, chunks, 5, &y, NULL), -EBADMSG);
        free(cut);
    }
    /* Every byte set to three values: refused, or accepted with all promises kept. */
    for (size_t i = 0; i < b.n; i++)
        for (int v = 0; v < 3; v++) {
            uint8_t was = b.p[i];
            b.p[i] = v == 0 ? 0xff : v == 1 ? 0 : was ^ 1;
            if (index_private_decode(b.p, b.n, chunks, 5, &y, NULL) == 0) {
                for (uint32_t t = 0; t < y.tensor_count; t++)
                    assert_true(y.tensors[t].bytes == 0 || y.tensors[t].first_chunk < 5);
                index_private_free(&y);
            }
            b.p[i] = was;
        }
    buf_free(&b);
}

/* A tensor takes what it needs, and can be written in one way only. */
static void records_have_one_form(void **state)
{
    (void)state;
    const struct {
        struct tensor t;
        size_t bytes; /* behind the name */
    } cases[] = {
        {{.dims = 2, .shape = {4, 5}, .lengths = {4, 5}, .bytes = 80}, 2 + 2 * 4 + 8},
        {{.dims = 2, .shape = {4, 5}, .offsets = {1, 0}, .lengths = {3, 5}, .bytes = 60}, 2 + 6 * 4 + 8},
        {{.dims = 1, .shape = {1ull << 32}, .lengths = {1ull << 32}, .bytes = 4ull << 32}, 2 + 8 + 8},
        {{.dims = 2, .shape = {1ull << 32, 2}, .offsets = {7, 0}, .lengths = {1, 2}, .bytes = 8},
         2 + 6 * 8 + 8},
        {{.dims = 1, .shape = {3}, .lengths = {3}, .bytes = 12, .plain_hash = {{9}}}, 2 + 4 + 8 + 16},
        {{.bytes = 4}, 2 + 8},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct tensor t = cases[i].t, back;
        struct buf b = {0};
        t.name = slice_str("a name");
        t.dtype = DTYPE_F32;
        record_put(&b, &t, t.plain_hash.bytes[0] != 0);
        assert_int_equal(b.n, 2 + 6 + cases[i].bytes);
        record_set_place(b.p, 77, 99);
        assert_int_equal(record_take(b.p, b.n, &back), b.n);
        assert_true(slice_eq(back.name, t.name) && back.first_chunk == 77 && back.offset == 99);
        assert_true(tensor_bytes(&back) == t.bytes && back.dims == t.dims);
        assert_memory_equal(back.shape, t.shape, t.dims * 8);
        assert_memory_equal(back.offsets, t.offsets, t.dims * 8);
        assert_memory_equal(back.lengths, t.lengths, t.dims * 8);
        assert_memory_equal(&back.plain_hash, &t.plain_hash, HASH128_BYTES);
        for (size_t n = 0; n < b.n; n++)
            assert_int_equal(record_take(b.p, n, &back), 0);
        buf_zeros(&b, 200);
        for (unsigned bit = 1; bit < 8; bit++) { /* another form: other bytes, or none */
            b.p[9] ^= (uint8_t)(1u << bit);
            size_t n = record_take(b.p, b.n, &back);
            struct buf again = {0};
            if (n > 0 && tensor_check(&back, &back.bytes, NULL) == 0 && back.bytes > 0 &&
                !index_large(back.bytes)) {
                record_put(&again, &back, memcmp(&back.plain_hash, &(struct hash128){{0}}, 16) != 0);
                assert_true(again.n == n && memcmp(again.p, b.p, n) == 0);
            }
            buf_free(&again);
            b.p[9] ^= (uint8_t)(1u << bit);
        }
        buf_free(&b);
    }
    struct tensor t = {
        .name = slice_str("h"), .dims = 1, .dtype = DTYPE_U8, .shape = {1}, .lengths = {1}, .bytes = 1};
    struct buf b = {0};
    struct tensor back;
    record_put(&b, &t, true);
    assert_int_equal(record_take(b.p, b.n, &back), 0); /* a hash of zeros */
    record_set_hash(b.p, (struct hash128){{1, 2}});
    assert_int_equal(record_take(b.p, b.n, &back), b.n);
    assert_true(back.plain_hash.bytes[0] == 1 && record_hash(b.p).bytes[1] == 2);
    buf_free(&b);
}

static uint32_t draw(uint64_t *seed, uint32_t below)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33) % below;
}

/* What is taken quickly is taken the slow way too, and means the same. */
static void the_quick_way_takes_nothing_else(void **state)
{
    uint64_t seed = 1, bytes;
    unsigned quick = 0, whole = 0, parts = 0, alike = 0;
    struct record_form form = {0}; /* stays from record to record */
    (void)state;
    for (int round = 0; round < 200000; round++) {
        struct tensor t = {.name = SLICE("some.name", 8 + draw(&seed, 2)),
                           .dtype = draw(&seed, DTYPE_COUNT),
                           .dims = draw(&seed, 4)};
        for (uint32_t i = 0; i < t.dims; i++) {
            t.shape[i] = draw(&seed, 20) ? draw(&seed, 64) * 4 : 1ull << (20 + draw(&seed, 20));
            t.lengths[i] = draw(&seed, 4) ? t.shape[i] : t.shape[i] / 2;
        }
        t.first_chunk = draw(&seed, 9);
        t.offset = draw(&seed, MIB);
        memset(&t.plain_hash, (int)draw(&seed, 2), sizeof t.plain_hash);
        struct buf b = {0};
        struct tensor slow;
        struct place p, q;
        if (tensor_check(&t, &t.bytes, NULL) < 0)
            continue;
        record_put(&b, &t, draw(&seed, 2));
        size_t behind = 2 + t.name.n;
        if (draw(&seed, 2)) /* any byte behind the name */
            b.p[behind + draw(&seed, (uint32_t)(b.n - behind))] ^= (uint8_t)(1u << draw(&seed, 8));
        struct record_form before = form, own = {0};
        size_t n = record_take_small(b.p, b.n, &form, &p), all = record_take(b.p, b.n, &slow);
        bool good = all > 0 && tensor_check(&slow, &bytes, NULL) == 0;
        bool is_whole = good && memcmp(slow.lengths, slow.shape, slow.dims * sizeof *slow.shape) == 0;
        assert_int_equal(record_take_small(b.p, b.n, &own, &q), n); /* whatever came before */
        struct record_form same = form;
        assert_int_equal(record_take_small(b.p, b.n, &same, &q), n); /* of the form that was left */
        assert_true(n == 0 || memcmp(&p, &q, sizeof p) == 0);
        alike += n > 0 && before.bytes == n && before.dtype == form.dtype && before.form == form.form;
        if (n > 0) {
            assert_true(n == all && is_whole && bytes == p.bytes && bytes > 0 && !index_large(bytes));
            assert_true(form.unit * 8 == dtype_bits(slow.dtype) && p.chunk == slow.first_chunk &&
                        p.offset == slow.offset);
        }
        if (good) {
            bool found = record_is(b.p, slow.name, slow.dtype, slow.dims, slow.shape, &q);
            assert_int_equal(found, is_whole);
            assert_true(!found || (q.chunk == slow.first_chunk && q.offset == slow.offset));
            assert_false(record_is(b.p, slow.name, slow.dtype ^ 1, slow.dims, slow.shape, &q));
            struct slice shorter = SLICE("some.name", 7), other = SLICE("some.fame", t.name.n);
            assert_false(record_is(b.p, shorter, slow.dtype, slow.dims, slow.shape, &q));
            assert_false(record_is(b.p, other, slow.dtype, slow.dims, slow.shape, &q));
        }
        quick += n > 0;
        whole += is_whole;
        parts += good && !is_whole;
        struct record_form other = form;
        own = (struct record_form){0};
        b.p[0] ^= 1; /* the same but for the length of its name: another record altogether */
        assert_int_equal(record_take_small(b.p, b.n, &other, &p), record_take_small(b.p, b.n, &own, &q));
        b.p[0] ^= 1;
        other = form;
        if (n > 0)
            assert_int_equal(record_take_small(b.p, n - 1, &other, &p), 0); /* cut off */
        buf_free(&b);
    }
    assert_true(quick > 20000 && whole > quick && parts > 20000 && alike > 100);
}

/* What is put together record by record is what is encoded at once. */
static void finish_records(size_t records_at)
{
    struct index_private x = an_index();
    struct buf whole = {0}, pieces = {0};
    assert_int_equal(index_private_encode(&x, &whole, NULL), 0);
    for (size_t i = 0; i < records_at; i++)
        buf_u8(&pieces, 0xee);
    for (uint32_t i = 0; i < x.tensor_count; i++)
        record_put(&pieces, &x.tensors[i], x.tensors[i].plain_hash.bytes[0] != 0);
    x.tensors = NULL;
    x.plain_hashes = NULL;
    assert_int_equal(index_private_finish(&x, 100, records_at, &pieces, NULL), 0);
    index_private_hash(hashes, 5, pieces.p + 100);
    assert_int_equal(pieces.n, whole.n + 100);
    assert_memory_equal(pieces.p + 100, whole.p, whole.n);
    for (size_t i = 0; i < 100; i++)
        assert_int_equal(pieces.p[i], 0);
    buf_free(&whole);
    buf_free(&pieces);
}

static void an_index_is_finished_from_records(void **state)
{
    (void)state;
    size_t at = 100 + index_private_head_bytes(5);
    const size_t all[] = {0, 1, at - 1, at, at + 1, at + 10000};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        finish_records(all[i]);
}

static void counts_are_bounded_by_the_bytes_behind_them(void **state)
{
    (void)state;
    struct index_private x = an_index(), y;
    struct buf b = {0};
    assert_int_equal(index_private_encode(&x, &b, NULL), 0);
    for (size_t at = 8; at <= 16; at += 4) {
        uint32_t was = le32_get(b.p + at);
        le32_put(b.p + at, at == 16 ? BLOBS_MAX : TENSORS_MAX);
        struct err e;
        assert_int_equal(index_private_decode(b.p, b.n, chunks, 5, &y, &e), -EBADMSG);
        assert_non_null(strstr(e.text, "do not fit"));
        le32_put(b.p + at, was);
    }
    assert_int_equal(index_private_decode(b.p, b.n, chunks, 4, &y, NULL), -EBADMSG);
    buf_free(&b);
}

static void places_outside_the_chunks_are_refused(void **state)
{
    (void)state;
    for (int i = 0; i < 11; i++) {
        struct index_private x = an_index(), y;
        struct buf b = {0};
        struct err e = {0};
        if (i == 0)
            tensors[0].offset = 61; /* ends at 101 of 100 */
        if (i == 1)
            tensors[0].offset = UINT32_MAX;
        if (i == 2)
            tensors[0].first_chunk = 5;
        if (i == 3)
            tensors[0].first_chunk = 1; /* another width */
        if (i == 4)
            tensors[2].first_chunk = 4; /* needs two */
        if (i == 5)
            tensors[2].first_chunk = 0;
        if (i == 6)
            tensors[2].offset = 2;
        if (i == 7)
            tensors[3].first_chunk = 1; /* stored nowhere */
        if (i == 8)
            blobs[0].bytes = 15;
        if (i == 9)
            blobs[0].bytes = UINT64_MAX;
        if (i == 10)
            blobs[1].offset = 1;
        assert_int_equal(index_private_encode(&x, &b, NULL), 0);
        assert_int_equal(index_private_decode(b.p, b.n, chunks, 5, &y, &e), -EBADMSG);
        assert_non_null(strstr(e.text, i < 8 ? "index: tensor \"" : "index: blob \""));
        buf_free(&b);
    }
}

static void names_are_opaque_but_held_to_their_rules(void **state)
{
    (void)state;
    char longest[TENSOR_NAME_BYTES_MAX + 1];
    memset(longest, 'x', sizeof longest);
    struct {
        struct slice name;
        const char *word;
    } bad[] = {
        {SLICE("", 0), "0 bytes"},         {SLICE(longest, sizeof longest), "4097 bytes"},
        {SLICE("a\0b", 3), "a\\x00b"},     {SLICE("\xc3", 1), "\\xc3"},
        {slice_str("tied"), "used twice"}, {slice_str("large"), "used twice"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct index_private x = an_index();
        struct buf b = {0};
        struct err e;
        tensors[5].name = bad[i].name;
        assert_int_equal(index_private_encode(&x, &b, &e), -EINVAL);
        assert_non_null(strstr(e.text, bad[i].word));
        assert_int_equal(b.n, 0);
    }
    struct index_private x = an_index(), y;
    struct buf b = {0};
    tensors[5].name = SLICE(longest, TENSOR_NAME_BYTES_MAX);
    assert_int_equal(index_private_encode(&x, &b, NULL), 0);
    assert_int_equal(index_private_decode(b.p, b.n, chunks, 5, &y, NULL), 0);
    assert_int_equal(y.tensors[5].name.n, TENSOR_NAME_BYTES_MAX);
    index_private_free(&y);
    buf_free(&b);
    x = an_index();
    aliases[0].tensor = 6;
    assert_int_equal(index_private_encode(&x, &b, NULL), -EINVAL);
    x = an_index();
    blobs[1].name = blobs[0].name;
    assert_int_equal(index_private_encode(&x, &b, NULL), -EINVAL);
}

static void shapes_that_cannot_be_are_refused(void **state)
{
    (void)state;
    uint64_t n;
    struct err e;
    struct tensor t = {
        .name = slice_str("t"), .dtype = DTYPE_F32, .dims = 2, .shape = {4, 4}, .lengths = {4, 4}};
    assert_int_equal(tensor_check(&t, &n, &e), 0);
    assert_true(n == 64);
    t.offsets[1] = 1;
    assert_int_equal(tensor_check(&t, &n, &e), -EINVAL);
    assert_non_null(strstr(e.text, "dimension 1"));
    t.offsets[1] = UINT64_MAX;
    assert_int_equal(tensor_check(&t, &n, &e), -EINVAL);
    t = (struct tensor){.name = slice_str("t"), .dtype = DTYPE_F32, .dims = 17};
    assert_int_equal(tensor_check(&t, &n, &e), -EINVAL);
    t = (struct tensor){.name = slice_str("t"), .dtype = DTYPE_COUNT};
    assert_int_equal(tensor_check(&t, &n, &e), -EINVAL);
    t = (struct tensor){.name = slice_str("big"),
                        .dtype = DTYPE_U8,
                        .dims = 3,
                        .shape = {1ull << 40, 1ull << 40, 1},
                        .lengths = {1, 1, 1}};
    assert_int_equal(tensor_check(&t, &n, &e), -E2BIG);
    t.shape[2] = 0, t.lengths[2] = 0; /* no elements at all: legal, whatever the others are */
    assert_int_equal(tensor_check(&t, &n, &e), 0);
    assert_true(n == 0);
    t = (struct tensor){
        .name = slice_str("f4"), .dtype = DTYPE_F4, .dims = 2, .shape = {3, 8}, .lengths = {3, 8}};
    assert_int_equal(tensor_check(&t, &n, &e), 0);
    assert_true(n == 12);
    t.lengths[1] = 7;
    assert_int_equal(tensor_check(&t, &n, &e), -EINVAL);
    t.lengths[1] = 4, t.offsets[1] = 3;
    assert_int_equal(tensor_check(&t, &n, &e), -EINVAL);
    t = (struct tensor){.name = slice_str("f4"), .dtype = DTYPE_F4, .dims = 1, .shape = {5}, .lengths = {4}};
    assert_int_equal(tensor_check(&t, &n, &e), -EINVAL);
    t = (struct tensor){.name = slice_str("more than 2^31"),
                        .dtype = DTYPE_F32,
                        .dims = 2,
                        .shape = {1ull << 20, 1ull << 20},
                        .lengths = {1ull << 20, 1ull << 20}};
    assert_int_equal(tensor_check(&t, &n, &e), 0);
    assert_true(n == 4ull << 40);
}

static void a_million_tensors_are_no_trouble(void **state)
{
    (void)state;
    enum { COUNT = 200000 }; /* time grows in step; a search in a list would take minutes */
    struct tensor *many = calloc(COUNT, sizeof *many);
    char(*names)[24] = calloc(COUNT, sizeof *names);
    struct chunk_entry chunk = {
        .offset = 4096, .stored_bytes = 4 * COUNT + 16, .plain_bytes = 4 * COUNT, .dtype = DTYPE_F32};
    struct hash128 hash = {{0}};
    for (int i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], "layers.%d.w", i);
        many[i] = (struct tensor){.name = slice_str(names[i]),
                                  .dtype = DTYPE_F32,
                                  .dims = 1,
                                  .shape = {1},
                                  .lengths = {1},
                                  .bytes = 4,
                                  .offset = 4u * (uint32_t)i};
    }
    struct index_private x = {.tensors = many,
                              .tensor_count = COUNT,
                              .plain_hashes = &hash,
                              .chunk_count = 1},
                         y;
    struct buf b = {0};
    assert_int_equal(index_private_encode(&x, &b, NULL), 0);
    assert_int_equal(index_private_decode(b.p, b.n, &chunk, 1, &y, NULL), 0);
    assert_int_equal(y.tensor_count, COUNT);
    assert_true(y.tensors[COUNT - 1].offset == 4 * (COUNT - 1));
    index_private_free(&y);
    buf_free(&b);
    free(names);
    free(many);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(public_part_comes_back),
        cmocka_unit_test(bad_chunks_are_refused_by_number),
        cmocka_unit_test(private_part_comes_back),
        cmocka_unit_test(a_name_used_twice_is_found_when_expanded),
        cmocka_unit_test(records_have_one_form),
        cmocka_unit_test(the_quick_way_takes_nothing_else),
        cmocka_unit_test(an_index_is_finished_from_records),
        cmocka_unit_test(counts_are_bounded_by_the_bytes_behind_them),
        cmocka_unit_test(places_outside_the_chunks_are_refused),
        cmocka_unit_test(names_are_opaque_but_held_to_their_rules),
        cmocka_unit_test(shapes_that_cannot_be_are_refused),
        cmocka_unit_test(a_million_tensors_are_no_trouble),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
