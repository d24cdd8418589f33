/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a dataset of 10^9 samples opens and feeds in little memory, and what the order names comes from all
 * over it. Method: a thousand sparse files of a million records each, published by the real server; the
 * memory of this process is looked at before and after. The time from opening to the first batch is printed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/clock.h"
#include "client/larder.h"
#include "format/order.h"
#include "tests/support/folder.h"
#include "tests/support/larderd.h"
#include "tests/support/sanitized.h"

#define SHARDS       1000u
#define RECORDS      1000000u
#define RECORD_BYTES 32u
#define MEMORY_MAX   (100ull << 20)

/* "VmRSS": now; "VmHWM": at most so far. */
static uint64_t resident_bytes(const char *which)
{
    char line[256];
    unsigned long long kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f))
        if (strncmp(line, which, strlen(which)) == 0)
            assert_int_equal(sscanf(line + strlen(which), ": %llu", &kib), 1);
    fclose(f);
    assert_true(kib > 0);
    return kib * 1024;
}

static void make_shards(const char *folder)
{
    for (uint32_t i = 0; i < SHARDS; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/rows-%04u.bin", folder, i);
        FILE *f = fopen(path, "wb");
        assert_non_null(f);
        assert_int_equal(ftruncate(fileno(f), (off_t)RECORDS * RECORD_BYTES), 0);
        assert_int_equal(fclose(f), 0);
    }
}

static void publish(struct larderd *d, const char *folder)
{
    char path[512];
    larderd_start(d, NULL);
    larderd_end(d, 15);
    snprintf(path, sizeof path, "%s/larderd.conf", d->folder);
    FILE *f = fopen(path, "a");
    assert_non_null(f);
    fprintf(f, "\n[publish rows]\npath = %s\ntenant = *\nformat = records\nrecord_bytes = %u\n", folder,
            RECORD_BYTES);
    assert_int_equal(fclose(f), 0);
    larderd_again(d);
}

static void a_thousand_million_samples(void **state)
{
    (void)state;
    struct larderd d;
    char folder[256];
    struct larder_options co = LARDER_INIT(larder_options);
    struct larder_feed_options o = LARDER_INIT(larder_feed_options);
    struct larder_error e = {0};
    struct larder *c;
    struct larder_feed *f;
    struct larder_batch *b;
    folder_make(folder, sizeof folder);
    make_shards(folder);
    publish(&d, folder);
    uint64_t counts[SHARDS];
    struct order *order;
    for (uint32_t i = 0; i < SHARDS; i++)
        counts[i] = RECORDS;
    assert_int_equal(order_create(counts, SHARDS, 5, 8, &order, NULL), 0);

    uint64_t before = resident_bytes("VmRSS"), begin = clock_ns();
    co.credentials = larderd_credentials(&d, "reader");
    o.dataset = "rows";
    o.seed = 5;
    o.global_batch = 4096;
    o.contiguous = 1;
    o.epochs = 1000;
    if (larder_open(&co, &c, &e) < 0 || larder_feed_open(c, &o, &f, &e) < 0 ||
        larder_feed_next(f, 60000, &b, &e) != 1)
        fail_msg("%s", e.text);
    double s = (double)(clock_ns() - begin) / 1e9;
    for (size_t i = 0; i < larder_batch_samples(b); i++) {
        struct larder_sample sample;
        struct order_place p = order_at(order, i);
        assert_int_equal(larder_batch_sample(b, i, &sample), 0);
        assert_true(sample.position == i && sample.shard == p.shard && sample.number == p.sample);
    }
    larder_batch_release(b);
    for (int i = 0; i < 30; i++) { /* so that as much is ahead as ever will be */
        assert_int_equal(larder_feed_next(f, 60000, &b, &e), 1);
        larder_batch_release(b);
    }
    uint64_t grown = resident_bytes("VmHWM") - before;
    print_message("%u samples: first batch after %.2f s; %.1f MiB\n", SHARDS * RECORDS, s,
                  (double)grown / (1 << 20));
    assert_true(SANITIZED || grown < MEMORY_MAX);
    struct larder_feed_info info = LARDER_INIT(larder_feed_info);
    assert_int_equal(larder_feed_info(f, &info), 0);
    assert_int_equal(info.samples, (uint64_t)SHARDS * RECORDS);
    assert_int_equal(info.batches_per_epoch, (uint64_t)SHARDS * RECORDS / 4096);
    larder_feed_close(f);
    assert_int_equal(larder_close(c, 10000, NULL), 0);
    order_free(order);
    larderd_remove(&d);
    folder_remove(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_thousand_million_samples),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
