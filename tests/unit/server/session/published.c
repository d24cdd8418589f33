/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a folder is served as it was when it was opened, or not at all.
 * Method: a real folder, a whole server on loopback with several loops, files changed behind its back.
 */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "server/obs/metrics.h"
#include "tests/support/folder.h"
#include "tests/support/publishing.h"
#include "tests/support/served.h"
#include "tests/support/tarball.h"

#define BIG_BYTES (3u << 20)

struct fixture {
    struct served s;
    char tars[160], records[160], secret[160];
    uint8_t *big;
    struct published_dir dirs[3];
};

static void write_tar(const char *folder, const char *name, int samples)
{
    struct buf b = {0};
    for (int i = 0; i < samples; i++) {
        char member[64], text[64];
        snprintf(member, sizeof member, "%06d.txt", i);
        snprintf(text, sizeof text, "sample %d of %s", i, name);
        tarball_file(&b, TARBALL_USTAR, member, text, strlen(text));
        snprintf(member, sizeof member, "%06d.cls", i);
        tarball_file(&b, TARBALL_USTAR, member, "7", 1);
    }
    tarball_end(&b);
    assert_false(b.failed);
    folder_file(folder, name, b.p, b.n);
    buf_free(&b);
}

static int setup(void **state)
{
    struct fixture *x = calloc(1, sizeof *x);
    assert_non_null(x);
    folder_make(x->tars, sizeof x->tars);
    folder_make(x->records, sizeof x->records);
    folder_make(x->secret, sizeof x->secret);
    x->big = malloc(BIG_BYTES);
    assert_non_null(x->big);
    for (uint32_t i = 0; i < BIG_BYTES; i++)
        x->big[i] = (uint8_t)(i * 2246822519u >> 24);
    write_tar(x->tars, "b.tar", 5);
    write_tar(x->tars, "a.tar", 300);
    folder_file(x->tars, ".hidden", "x", 1);
    folder_file(x->records, "r.bin", x->big, BIG_BYTES);
    folder_file(x->records, "empty.bin", "", 0);
    folder_file(x->secret, "s", "secret", 6);
    x->dirs[0] = (struct published_dir){.name = "tars", .path = x->tars, .tenant = "*", .format = SHARD_TAR};
    x->dirs[1] = (struct published_dir){.name = "records",
                                        .path = x->records,
                                        .tenant = "acme",
                                        .format = SHARD_RECORDS,
                                        .record_bytes = 4096};
    x->dirs[2] = (struct published_dir){.name = "secret", .path = x->secret, .tenant = "rival"};
    served_start(&x->s,
                 &(struct served_options){.loop_count = 3, .published = x->dirs, .published_count = 3});
    *state = x;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *x = *state;
    served_stop(&x->s, 1000);
    folder_remove(x->tars);
    folder_remove(x->records);
    folder_remove(x->secret);
    free(x->big);
    free(x);
    return 0;
}

static void join_as(struct fixture *x, struct caller *c, const char *tenant)
{
    caller_join(c, &x->s, served_user(tenant, ROLE_READER));
}

static void each_tenant_sees_its_own(void **state)
{
    struct fixture *x = *state;
    struct caller c;
    struct answer a;
    struct buf b = {0};
    struct msg_list m = {0};
    struct msg_list_reply list;
    struct msg_published_item item;
    struct published_opened o;
    join_as(x, &c, "acme");
    msg_list_encode(&m, &b);
    assert_int_equal(caller_call(&c, OP_PUBLISHED_LIST, &b, &a), ERR_NONE);
    struct rcur in = rcur_of(a.payload, a.header.payload_bytes);
    assert_int_equal(msg_list_reply_decode(&in, &list, NULL), 0);
    assert_int_equal(list.count, 2);
    in = rcur_of(list.items.p, list.items.n);
    assert_int_equal(msg_published_item_decode(&in, &item, NULL), 0);
    assert_true(slice_eq(item.name, slice_str("tars")));
    assert_int_equal(item.shards, 2);
    assert_int_equal(msg_published_item_decode(&in, &item, NULL), 0);
    assert_true(slice_eq(item.name, slice_str("records")));
    assert_int_equal(item.bytes, BIG_BYTES);
    answer_free(&a);
    assert_int_equal(published_open(&c, "secret", &o), ERR_NOT_FOUND);
    assert_int_equal(published_open(&c, "nothing", &o), ERR_NOT_FOUND);
    assert_int_equal(published_open(&c, "tars", &o), ERR_NONE);
    assert_int_equal(o.count, 2);
    assert_string_equal(o.names[0], "a.tar"); /* sorted, without what is hidden */
    assert_string_equal(o.names[1], "b.tar");
    caller_close(&c);
    /* Another tenant that knows the id of the version gets nothing by it, on any loop, known there or not. */
    struct caller acme[8], rival[8];
    struct buf got = {0};
    for (int i = 0; i < 8; i++) {
        join_as(x, &acme[i], "acme");
        assert_int_equal(published_open(&acme[i], "records", &o), ERR_NONE);
    }
    for (int i = 0; i < 8; i++) {
        join_as(x, &rival[i], "rival");
        struct err e = caller_gather(&rival[i], published_ask_read(&rival[i], &o.version, 100, 1, 0, 100),
                                     &got, SIZE_MAX);
        assert_int_equal(e.class, ERR_MISMATCH);
        e = caller_gather(&rival[i], published_ask_samples(&rival[i], &o.version, 100, 1), &got, SIZE_MAX);
        assert_int_equal(e.class, ERR_MISMATCH);
    }
    assert_int_equal(got.n, 0);
    for (int i = 0; i < 8; i++) {
        caller_close(&rival[i]);
        caller_close(&acme[i]);
    }
}

static void bytes_come_from_any_loop(void **state)
{
    struct fixture *x = *state;
    struct caller c[6];
    struct published_opened o;
    struct buf got = {0};
    join_as(x, &c[0], "acme");
    assert_int_equal(published_open(&c[0], "records", &o), ERR_NONE);
    /* The kernel spreads connections over the loops; each of them must know or find the version. */
    for (int i = 1; i < 6; i++)
        join_as(x, &c[i], "acme");
    for (int i = 0; i < 6; i++) {
        buf_reset(&got);
        uint64_t id = published_ask_read(&c[i], &o.version, UINT64_MAX, 1, 12345, BIG_BYTES - 12345);
        struct err e = caller_gather(&c[i], id, &got, SIZE_MAX);
        if (e.class != ERR_NONE)
            fail_msg("connection %d: %s", i, e.text);
        assert_int_equal(got.n, BIG_BYTES - 12345);
        assert_memory_equal(got.p, x->big + 12345, got.n);
    }
    struct err e =
        caller_gather(&c[0], published_ask_read(&c[0], &o.version, 9, 1, BIG_BYTES - 5, 6), &got, SIZE_MAX);
    assert_int_equal(e.class, ERR_INVALID);
    assert_non_null(strstr(e.text, "r.bin"));
    e = caller_gather(&c[0], published_ask_read(&c[0], &o.version, 9, 2, 0, 1), &got, SIZE_MAX);
    assert_int_equal(e.class, ERR_INVALID);
    buf_free(&got);
    for (int i = 0; i < 6; i++)
        caller_close(&c[i]);
}

/* D12: the shard is replaced in the middle of a stream, by a file of the same size. */
static void a_replaced_shard_is_never_mixed(void **state)
{
    struct fixture *x = *state;
    struct caller c;
    struct published_opened o, again;
    struct buf got = {0};
    join_as(x, &c, "acme");
    assert_int_equal(published_open(&c, "records", &o), ERR_NONE);
    uint64_t id = published_ask_read(&c, &o.version, 4096, 1, 0, BIG_BYTES);
    struct err e = caller_gather(&c, id, &got, 4096);
    assert_int_equal(e.class, ERR_NONE);
    uint8_t *other = calloc(1, BIG_BYTES);
    assert_non_null(other);
    folder_replace(x->records, "r.bin", other, BIG_BYTES);
    caller_credit(&c, id, UINT64_MAX / 2);
    e = caller_gather(&c, id, &got, SIZE_MAX);
    assert_int_equal(e.class, ERR_MISMATCH);
    assert_non_null(strstr(e.text, "shard r.bin of records was replaced"));
    assert_non_null(strstr(e.text, "open the dataset again"));
    assert_int_equal(got.n, 4096);
    assert_memory_equal(got.p, x->big, 4096);
    /* Opened again it is another version, with the new bytes. */
    assert_int_equal(published_open(&c, "records", &again), ERR_NONE);
    assert_false(id_equal(&again.version, &o.version));
    buf_reset(&got);
    e = caller_gather(&c, published_ask_read(&c, &again.version, UINT64_MAX, 1, 0, BIG_BYTES), &got,
                      SIZE_MAX);
    assert_int_equal(e.class, ERR_NONE);
    assert_memory_equal(got.p, other, BIG_BYTES);
    /* Shards that did not change are still served under the old id, here where it is known. */
    e = caller_gather(&c, published_ask_read(&c, &o.version, 1, 0, 0, 0), &got, SIZE_MAX);
    assert_int_equal(e.class, ERR_NONE);
    free(other);
    buf_free(&got);
    caller_close(&c);
}

static void a_removed_or_shortened_shard_is_named(void **state)
{
    struct fixture *x = *state;
    struct caller c;
    struct published_opened o;
    struct buf got = {0};
    char path[512];
    join_as(x, &c, "acme");
    assert_int_equal(published_open(&c, "records", &o), ERR_NONE);
    snprintf(path, sizeof path, "%s/r.bin", x->records);
    assert_int_equal(truncate(path, 1000), 0);
    struct err e =
        caller_gather(&c, published_ask_read(&c, &o.version, UINT64_MAX, 1, 500, 5000), &got, SIZE_MAX);
    assert_int_equal(e.class, ERR_MISMATCH);
    assert_non_null(strstr(e.text, "r.bin"));
    assert_int_equal(unlink(path), 0);
    e = caller_gather(&c, published_ask_read(&c, &o.version, UINT64_MAX, 1, 500, 5000), &got, SIZE_MAX);
    assert_int_equal(e.class, ERR_NOT_FOUND);
    assert_non_null(strstr(e.text, "r.bin"));
    assert_int_equal(got.n, 0);
    buf_free(&got);
    caller_close(&c);
}

/* Neither a pipe that nobody writes to nor a device keeps a reader waiting, in a folder or in a shard's
 * place. */
static void pipes_and_devices_are_no_shards(void **state)
{
    struct fixture *x = *state;
    struct caller c;
    struct published_opened o, again;
    struct buf got = {0};
    char path[512], zero[512];
    join_as(x, &c, "acme");
    assert_int_equal(published_open(&c, "records", &o), ERR_NONE);
    snprintf(path, sizeof path, "%s/pipe", x->records);
    snprintf(zero, sizeof zero, "%s/zero", x->records);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(symlink("/dev/zero", zero), 0);
    assert_int_equal(published_open(&c, "records", &again), ERR_NONE);
    assert_true(id_equal(&again.version, &o.version));
    snprintf(path, sizeof path, "%s/r.bin", x->records);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(unlink(path), 0);
        assert_int_equal(i == 0 ? mkfifo(path, 0600) : symlink("/dev/zero", path), 0);
        struct err e =
            caller_gather(&c, published_ask_read(&c, &o.version, UINT64_MAX, 1, 0, 5000), &got, SIZE_MAX);
        assert_int_equal(e.class, ERR_MISMATCH);
        assert_non_null(strstr(e.text, "r.bin of records is a pipe or a device now"));
        assert_int_equal(got.n, 0);
    }
    buf_free(&got);
    caller_close(&c);
}

/* The file stays open between reads, and is looked at each time all the same. */
static void a_shard_that_is_open_is_looked_at_again(void **state)
{
    struct fixture *x = *state;
    struct caller c;
    struct published_opened o;
    struct buf got = {0};
    join_as(x, &c, "acme");
    assert_int_equal(published_open(&c, "records", &o), ERR_NONE);
    for (int i = 0; i < 3; i++) {
        struct err e =
            caller_gather(&c, published_ask_read(&c, &o.version, UINT64_MAX, 1, 0, 5000), &got, SIZE_MAX);
        assert_int_equal(e.class, i < 2 ? ERR_NONE : ERR_MISMATCH);
        if (i == 1)
            folder_replace(x->records, "r.bin", x->big, BIG_BYTES);
    }
    assert_int_equal(got.n, 10000);
    buf_free(&got);
    caller_close(&c);
}

static void long_ranges_are_asked_for_ahead(void **state)
{
    struct fixture *x = *state;
    struct caller c;
    struct published_opened o;
    struct buf got = {0};
    join_as(x, &c, "acme");
    assert_int_equal(published_open(&c, "records", &o), ERR_NONE);
    int64_t before = metric_get(METRIC_ahead_read_bytes);
    struct err e =
        caller_gather(&c, published_ask_read(&c, &o.version, UINT64_MAX, 1, 0, 300000), &got, SIZE_MAX);
    assert_int_equal(e.class, ERR_NONE);
    assert_int_equal(metric_get(METRIC_ahead_read_bytes), before);
    buf_reset(&got);
    e = caller_gather(&c, published_ask_read(&c, &o.version, 4 << 20, 1, 0, BIG_BYTES), &got, SIZE_MAX);
    assert_int_equal(e.class, ERR_NONE);
    assert_int_equal(got.n, BIG_BYTES);
    assert_memory_equal(got.p, x->big, BIG_BYTES);
    int64_t ahead = metric_get(METRIC_ahead_read_bytes) - before;
    assert_true(ahead <= BIG_BYTES);
    buf_free(&got);
    caller_close(&c);
}

/* One that came damaged is read from the disk again, and is the same. */
static void a_shard_is_read_anew_when_asked(void **state)
{
    struct fixture *x = *state;
    struct caller c;
    struct published_opened o;
    join_as(x, &c, "acme");
    assert_int_equal(published_open(&c, "records", &o), ERR_NONE);
    struct buf ranges = {0}, b = {0}, got = {0};
    struct msg_read_range range = {.object.bytes = {1}, .offset = 5000, .bytes = 100000};
    msg_read_range_encode(&range, &ranges);
    struct msg_read m = {.source = READ_PUBLISHED,
                         .class = 2 | READ_ANEW,
                         .scope = o.version,
                         .credit = UINT64_MAX,
                         .count = 1,
                         .ranges = SLICE(ranges.p, ranges.n)};
    msg_read_encode(&m, &b);
    struct err e = caller_gather(&c, caller_send(&c, OP_READ, 0, &b, (struct slice){0}), &got, SIZE_MAX);
    assert_int_equal(e.class, ERR_NONE);
    assert_int_equal(got.n, 100000);
    assert_memory_equal(got.p, x->big + 5000, 100000);
    buf_free(&ranges);
    buf_free(&got);
    caller_close(&c);
}

static void samples_are_indexed_once_and_streamed(void **state)
{
    struct fixture *x = *state;
    struct caller c;
    struct published_opened o;
    struct buf got = {0}, second = {0};
    struct samples *samples;
    struct err e = {0};
    join_as(x, &c, "acme");
    assert_int_equal(published_open(&c, "tars", &o), ERR_NONE);
    uint64_t id = published_ask_samples(&c, &o.version, 100, 0);
    e = caller_gather(&c, id, &got, 100);
    assert_int_equal(got.n, 100);
    assert_true(caller_quiet(&c, 50));
    caller_credit(&c, id, UINT64_MAX / 2);
    e = caller_gather(&c, id, &got, SIZE_MAX);
    assert_int_equal(e.class, ERR_NONE);
    assert_int_equal(samples_decode(got.p, got.n, o.bytes[0], &samples, &e), 0);
    assert_int_equal(samples_count(samples), 300);
    assert_int_equal(samples_fields(samples, 0), 2);
    assert_true(slice_eq(samples_key(samples, 299), slice_str("000299")));
    samples_free(samples);
    /* Several ask at once for the same, on this connection and on others. */
    uint64_t ids[4];
    for (int i = 0; i < 4; i++)
        ids[i] = published_ask_samples(&c, &o.version, UINT64_MAX, 1);
    size_t bytes[4] = {0};
    for (int left = 4; left > 0;) {
        struct answer a;
        assert_true(caller_answer(&c, &a));
        assert_int_equal(a.err.class, ERR_NONE);
        for (int i = 0; i < 4; i++)
            if (ids[i] == a.header.request_id)
                bytes[i] += a.header.payload_bytes;
        left -= !(a.header.flags & FRAME_MORE);
        answer_free(&a);
    }
    for (int i = 1; i < 4; i++)
        assert_int_equal(bytes[i], bytes[0]);
    e = caller_gather(&c, published_ask_samples(&c, &o.version, UINT64_MAX, 0), &second, SIZE_MAX);
    assert_int_equal(second.n, got.n);
    assert_memory_equal(second.p, got.p, got.n);
    e = caller_gather(&c, published_ask_samples(&c, &o.version, UINT64_MAX, 2), &second, SIZE_MAX);
    assert_int_equal(e.class, ERR_INVALID);
    buf_free(&got);
    buf_free(&second);
    caller_close(&c);
}

static void a_cut_archive_is_named_with_its_place(void **state)
{
    struct fixture *x = *state;
    struct caller c;
    struct published_opened o;
    struct buf got = {0};
    char path[512];
    snprintf(path, sizeof path, "%s/a.tar", x->tars);
    assert_int_equal(truncate(path, 1024 * 7 + 100), 0);
    join_as(x, &c, "acme");
    assert_int_equal(published_open(&c, "tars", &o), ERR_NONE);
    struct err e = caller_gather(&c, published_ask_samples(&c, &o.version, UINT64_MAX, 0), &got, SIZE_MAX);
    assert_int_equal(e.class, ERR_CORRUPT);
    assert_non_null(strstr(e.text, "a.tar"));
    assert_int_equal(got.n, 0);
    e = caller_gather(&c, published_ask_samples(&c, &o.version, UINT64_MAX, 1), &got, SIZE_MAX);
    assert_int_equal(e.class, ERR_NONE); /* the other shard is fine */
    buf_free(&got);
    caller_close(&c);
}

static void who_leaves_while_it_is_indexed_leaves_nothing(void **state)
{
    struct fixture *x = *state;
    struct published_opened o;
    for (int i = 0; i < 20; i++) {
        struct caller c;
        char name[32];
        join_as(x, &c, "acme");
        snprintf(name, sizeof name, "n%d.tar", i); /* a new version each time: nothing is cached */
        write_tar(x->tars, name, 50);
        struct published_opened *to = i < 4 ? &o : NULL;
        if (to)
            assert_int_equal(published_open(&c, "tars", to), ERR_NONE);
        uint64_t id = published_ask_samples(&c, &o.version, UINT64_MAX, (uint32_t)i % 4);
        if (i % 2)
            caller_cancel(&c, id);
        caller_close(&c);
    }
    /* teardown's stop ends only when every session and job has */
}

int main(void)
{
#define WITH_FOLDERS(test) cmocka_unit_test_setup_teardown(test, setup, teardown)
    const struct CMUnitTest tests[] = {
        WITH_FOLDERS(each_tenant_sees_its_own),
        WITH_FOLDERS(bytes_come_from_any_loop),
        WITH_FOLDERS(a_replaced_shard_is_never_mixed),
        WITH_FOLDERS(a_removed_or_shortened_shard_is_named),
        WITH_FOLDERS(pipes_and_devices_are_no_shards),
        WITH_FOLDERS(a_shard_that_is_open_is_looked_at_again),
        WITH_FOLDERS(long_ranges_are_asked_for_ahead),
        WITH_FOLDERS(a_shard_is_read_anew_when_asked),
        WITH_FOLDERS(samples_are_indexed_once_and_streamed),
        WITH_FOLDERS(a_cut_archive_is_named_with_its_place),
        WITH_FOLDERS(who_leaves_while_it_is_indexed_leaves_nothing),
    };
    return cmocka_run_group_tests_name("published", tests, NULL, NULL);
}
