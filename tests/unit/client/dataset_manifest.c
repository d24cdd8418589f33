/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: the shard table survives encoding, and no damaged or foreign bytes are taken for one.
 * Method: round trip; every byte flipped; every length cut; counts and versions that do not fit.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/dataset_manifest.h"
#include "format/base/hash.h"

static void make(struct shard_table *t)
{
    struct err e;
    assert_int_equal(shard_table_init(t, 3, &e), 0);
    assert_int_equal(shard_table_name(t, 0, slice_str("a.tar"), &e), 0);
    assert_int_equal(shard_table_name(t, 1, slice_str("a.tar"), &e), 0); /* from another folder */
    assert_int_equal(shard_table_name(t, 2, slice_str("\xc3\xa4.bin"), &e), 0);
    t->shards[0].bytes = 10240;
    t->shards[0].format = SHARD_TAR;
    t->shards[1].bytes = 1ull << 40;
    t->shards[1].samples = 1ull << 33;
    t->shards[2].bytes = 1;
    t->shards[2].samples = 1;
}

static void round_trip(void **state)
{
    (void)state;
    struct shard_table t, u;
    struct buf b = {0};
    struct err e;
    make(&t);
    assert_int_equal(shard_table_encode(&t, &b, &e), 0);
    assert_int_equal(b.n, shard_table_bytes(&t));
    assert_int_equal(shard_table_decode(b.p, b.n, 3, &u, &e), 0);
    for (int i = 0; i < 3; i++) {
        assert_string_equal(t.shards[i].name, u.shards[i].name);
        assert_int_equal(t.shards[i].bytes, u.shards[i].bytes);
        assert_int_equal(t.shards[i].samples, u.shards[i].samples);
        assert_int_equal(t.shards[i].format, u.shards[i].format);
    }
    shard_table_free(&u);
    shard_table_free(&t);
    buf_free(&b);
}

static void refuses_damage(void **state)
{
    (void)state;
    struct shard_table t, u;
    struct buf b = {0};
    struct err e;
    make(&t);
    assert_int_equal(shard_table_encode(&t, &b, &e), 0);
    for (size_t i = 0; i < b.n; i++) {
        b.p[i] ^= 0x10;
        assert_true(shard_table_decode(b.p, b.n, 3, &u, &e) < 0);
        b.p[i] ^= 0x10;
    }
    for (size_t n = 0; n < b.n; n++) {
        uint8_t *exact = malloc(n ? n : 1);
        memcpy(exact, b.p, n);
        assert_true(shard_table_decode(exact, n, 3, &u, &e) < 0);
        free(exact);
    }
    assert_true(shard_table_decode(b.p, b.n, 4, &u, &e) < 0); /* another version's */
    assert_int_equal(e.class, ERR_CORRUPT);
    b.p[4] = 2;
    le64_put(b.p + b.n - 8, hash64(b.p, b.n - 8));
    assert_true(shard_table_decode(b.p, b.n, 3, &u, &e) < 0);
    assert_int_equal(e.class, ERR_VERSION);
    shard_table_free(&t);
    buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),
        cmocka_unit_test(refuses_damage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
