/* SPDX-License-Identifier: Apache-2.0 */
/* Goal: commit and small records come back, and damage, cuts, other kinds and newer versions are told apart.
 * Method: round trips, every cut, every flipped byte, rightly summed nonsense. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/commit.h"
#include "format/version.h"

static struct commit_part parts[3];

static struct commit a_commit(void)
{
    struct commit c = {.kind = RUN_CHECKPOINTS,
                       .run = slice_str("llama/7b \xc3\xa9"),
                       .step = 10000,
                       .sequence = 42,
                       .attempt_number = 2,
                       .world = 3,
                       .parts = parts,
                       .plain_bytes = 1ull << 40,
                       .server_time_ns = 1700000000000000000ull,
                       .loader = slice_str("position"),
                       .labels = SLICE("\2\0lr\4\0"
                                       "1e-4",
                                       10)};
    memset(&c.run_id, 9, ID_BYTES);
    memset(&c.attempt, 8, ID_BYTES);
    for (uint32_t i = 0; i < 3; i++) {
        parts[i] = (struct commit_part){.rank = i, .segment_bytes = 4096 * (i + 3ull)};
        memset(&parts[i].segment, (int)i + 1, ID_BYTES);
        memset(parts[i].index_digest, (int)i + 100, SHA256_BYTES);
    }
    return c;
}

static void commit_comes_back(void **state)
{
    (void)state;
    struct commit c = a_commit(), back;
    struct buf b = {0};
    assert_int_equal(commit_encode(&c, &b, NULL), 0);
    uint8_t *copy = malloc(b.n); /* what is decoded must not point into what it came from */
    memcpy(copy, b.p, b.n);
    assert_int_equal(commit_decode(copy, b.n, &back, NULL), 0);
    memset(copy, 0xee, b.n);
    free(copy);
    assert_true(back.kind == c.kind && back.step == c.step && back.sequence == 42 && back.world == 3 &&
                back.attempt_number == 2 && back.plain_bytes == c.plain_bytes &&
                back.server_time_ns == c.server_time_ns);
    assert_true(id_equal(&back.run_id, &c.run_id) && id_equal(&back.attempt, &c.attempt));
    assert_true(slice_eq(back.run, c.run) && slice_eq(back.loader, c.loader) &&
                slice_eq(back.labels, c.labels));
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(back.parts[i].rank, i);
        assert_true(back.parts[i].segment_bytes == parts[i].segment_bytes);
        assert_true(id_equal(&back.parts[i].segment, &parts[i].segment));
        assert_memory_equal(back.parts[i].index_digest, parts[i].index_digest, SHA256_BYTES);
    }
    commit_free(&back);
    commit_free(&back); /* twice is harmless */
    buf_free(&b);
}

static void cuts_and_damage_are_noticed(void **state)
{
    (void)state;
    struct commit c = a_commit(), back;
    struct buf b = {0};
    assert_int_equal(commit_encode(&c, &b, NULL), 0);
    for (size_t n = 0; n < b.n; n++) {
        uint8_t *cut = malloc(n + 1);
        memcpy(cut, b.p, n);
        assert_int_equal(commit_decode(cut, n, &back, NULL), -EBADMSG);
        free(cut);
    }
    for (size_t i = 0; i < b.n; i++) {
        b.p[i] ^= 0x10;
        assert_int_equal(commit_decode(b.p, b.n, &back, NULL), -EBADMSG);
        b.p[i] ^= 0x10;
    }
    buf_free(&b);
}

static void reseal(struct buf *b)
{
    struct hash128 h = hash128(b->p + 16, b->n - 16);
    memcpy(b->p, h.bytes, 16);
}

static void newer_version_and_other_kind_are_named(void **state)
{
    (void)state;
    struct record_store s = {.created_ns = 1}, back;
    struct buf b = {0};
    struct err e;
    assert_int_equal(record_store_encode(&s, &b, NULL), 0);
    struct commit c;
    assert_int_equal(commit_decode(b.p, b.n, &c, &e), -EBADMSG);
    assert_non_null(strstr(e.text, "expected a commit record, found a store record"));
    le32_put(b.p + 28, STORE_VERSION + 1);
    reseal(&b);
    assert_int_equal(record_store_decode(b.p, b.n, &back, &e), -EPROTONOSUPPORT);
    assert_non_null(strstr(e.text, "newer larder"));
    buf_free(&b);
}

/* Every field byte of the body, set to 0xff and summed again: either still a legal value, or refused as
 * damage; never accepted with a world that the parts do not bear out. */
static void rightly_summed_nonsense_is_refused(void **state)
{
    (void)state;
    struct commit c = a_commit(), back;
    struct buf b = {0};
    assert_int_equal(commit_encode(&c, &b, NULL), 0);
    for (size_t i = 40; i < b.n; i++) {
        uint8_t was = b.p[i];
        b.p[i] = 0xff;
        reseal(&b);
        int r = commit_decode(b.p, b.n, &back, NULL);
        assert_true(r == 0 || r == -EBADMSG);
        if (i < 48) /* kind, world */
            assert_int_equal(r, -EBADMSG);
        if (r == 0) {
            assert_int_equal(back.world, 3);
            commit_free(&back);
        }
        b.p[i] = was;
    }
    le32_put(b.p + 40 + 80 + 4, 1); /* reserved bytes of the first part */
    reseal(&b);
    assert_int_equal(commit_decode(b.p, b.n, &back, NULL), -EBADMSG);
    buf_free(&b);
}

static void what_may_not_be_written_is_refused(void **state)
{
    (void)state;
    char many[LABELS_BYTES_MAX + 1] = {0};
    for (int i = 0; i < 9; i++) {
        struct commit c = a_commit();
        struct buf b = {0};
        struct err e = {0};
        switch (i) {
        case 0: c.kind = 0; break;
        case 1: c.run = SLICE("", 0); break;
        case 2: c.run = slice_str("a\nb"); break;
        case 3: c.sequence = 0; break;
        case 4: c.world = 0; break;
        case 5: parts[2].rank = 1; break;
        case 6: c.labels = SLICE("\2\0l", 3); break;
        case 7: c.labels = SLICE(many, sizeof many); break;
        case 8: c.loader = SLICE(many, LOADER_STATE_BYTES_MAX + 1); break;
        }
        assert_true(commit_encode(&c, &b, &e) < 0);
        assert_non_null(strstr(e.text, "commit record: "));
        assert_int_equal(b.n, 0);
        buf_free(&b);
    }
}

static void small_records_come_back(void **state)
{
    (void)state;
    struct buf b = {0};
    struct record_tenant t = {.name = "acme",
                              .quota_bytes = 1ull << 50,
                              .weight = 3,
                              .residency = "eu",
                              .created_ns = 4},
                         t2;
    assert_int_equal(record_tenant_encode(&t, &b, NULL), 0);
    assert_int_equal(record_tenant_decode(b.p, b.n, &t2, NULL), 0);
    assert_string_equal(t2.name, "acme");
    assert_string_equal(t2.residency, "eu");
    assert_true(t2.quota_bytes == 1ull << 50 && t2.weight == 3 && t2.created_ns == 4);
    buf_reset(&b);
    struct record_run r = {.kind = RUN_DATASET, .name = "books/v1", .created_ns = 5}, r2;
    r.run_id.bytes[0] = 1;
    assert_int_equal(record_run_encode(&r, &b, NULL), 0);
    assert_int_equal(record_run_decode(b.p, b.n, &r2, NULL), 0);
    assert_string_equal(r2.name, "books/v1");
    assert_true(r2.kind == RUN_DATASET && id_equal(&r.run_id, &r2.run_id) && r2.created_ns == 5);
    buf_reset(&b);
    struct record_attempt a = {.number = 7, .world = 9, .created_ns = 6}, a2;
    a.attempt.bytes[3] = a.run_id.bytes[4] = 1;
    assert_int_equal(record_attempt_encode(&a, &b, NULL), 0);
    assert_int_equal(record_attempt_decode(b.p, b.n, &a2, NULL), 0);
    assert_true(a2.number == 7 && a2.world == 9 && a2.created_ns == 6 && id_equal(&a.attempt, &a2.attempt) &&
                id_equal(&a.run_id, &a2.run_id));
    buf_reset(&b);
    struct record_mark m = {.kind = MARK_BAD, .sequence = 3, .reason = "chunk 3 is damaged", .created_ns = 7},
                       m2;
    m.run_id.bytes[5] = 1;
    assert_int_equal(record_mark_encode(&m, &b, NULL), 0);
    assert_int_equal(record_mark_decode(b.p, b.n, &m2, NULL), 0);
    assert_true(m2.kind == MARK_BAD && m2.sequence == 3 && m2.created_ns == 7 &&
                id_equal(&m.run_id, &m2.run_id));
    assert_string_equal(m2.reason, m.reason);
    le32_put(b.p + 40 + ID_BYTES, 3); /* no such mark */
    reseal(&b);
    assert_int_equal(record_mark_decode(b.p, b.n, &m2, NULL), -EBADMSG);
    buf_free(&b);
}

static void names_are_held_to_their_rules(void **state)
{
    (void)state;
    char longest[NAME_BYTES_MAX + 1];
    memset(longest, 'n', sizeof longest);
    assert_int_equal(run_name_check(longest, NAME_BYTES_MAX, NULL), 0);
    assert_int_equal(run_name_check(longest, NAME_BYTES_MAX + 1, NULL), -EINVAL);
    assert_int_equal(run_name_check("../..", 5, NULL), 0); /* a name is no path */
    assert_int_equal(run_name_check("a\0b", 3, NULL), -EINVAL);
    assert_int_equal(run_name_check("\xff", 1, NULL), -EINVAL);
    assert_int_equal(tenant_name_check("a", NULL), 0);
    assert_int_equal(tenant_name_check("0-a-", NULL), 0);
    assert_int_equal(tenant_name_check("", NULL), -EINVAL);
    assert_int_equal(tenant_name_check("-a", NULL), -EINVAL);
    assert_int_equal(tenant_name_check("Acme", NULL), -EINVAL);
    assert_int_equal(tenant_name_check("a/b", NULL), -EINVAL);
    longest[64] = '\0';
    assert_int_equal(tenant_name_check(longest, NULL), -EINVAL);
    longest[63] = '\0';
    assert_int_equal(tenant_name_check(longest, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(commit_comes_back),
        cmocka_unit_test(cuts_and_damage_are_noticed),
        cmocka_unit_test(newer_version_and_other_kind_are_named),
        cmocka_unit_test(rightly_summed_nonsense_is_refused),
        cmocka_unit_test(what_may_not_be_written_is_refused),
        cmocka_unit_test(small_records_come_back),
        cmocka_unit_test(names_are_held_to_their_rules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
