/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: nothing starves, priorities and weights hold, caps hold, bytes in flight stay bounded.
 * Method: a model of a disk: every step one of the items in flight ends, and each class (or tenant) that is
 * said to be hungry has a queue that never runs dry.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/tenant/sched.h"

#define MIB      (1ull << 20)
#define IN_QUEUE 64

struct job {
    struct sched_item item;
    struct model *m;
    struct source *from;
    struct list running;
};

struct source {
    enum sched_class class;
    struct sched_tenant *tenant;
    uint64_t bytes;
    uint64_t done_bytes;
    struct job jobs[IN_QUEUE];
};

struct model {
    struct sched *s;
    uint64_t now_ms, in_flight, most;
    struct list running;
};

static void on_admit(struct sched_item *item)
{
    struct job *j = container_of(item, struct job, item);
    j->m->in_flight += item->bytes;
    if (j->m->in_flight > j->m->most)
        j->m->most = j->m->in_flight;
    list_add_tail(&j->m->running, &j->running);
}

static void model_open(struct model *m, uint64_t in_flight_bytes_max)
{
    struct sched_options o = {.in_flight_bytes_max = in_flight_bytes_max};
    memset(m, 0, sizeof *m);
    list_init(&m->running);
    assert_int_equal(sched_create(&o, &m->s), 0);
}

static void feed(struct model *m, struct source *src)
{
    for (int i = 0; i < IN_QUEUE; i++) {
        struct job *j = &src->jobs[i];
        j->m = m;
        j->from = src;
        list_init(&j->running);
        j->item.admit = on_admit;
        j->item.bytes = src->bytes;
        sched_queue(m->s, &j->item, src->class, src->tenant, m->now_ms);
    }
}

/* The oldest operation ends and is queued anew. */
static void step(struct model *m)
{
    struct list *l = list_pop(&m->running);
    assert_non_null(l);
    struct job *j = container_of(l, struct job, running);
    m->in_flight -= j->item.bytes;
    j->from->done_bytes += j->item.bytes;
    sched_release(m->s, &j->item);
    sched_queue(m->s, &j->item, j->from->class, j->from->tenant, m->now_ms);
    (void)sched_pump(m->s, m->now_ms);
}

static void stop(struct model *m, struct source *src)
{
    for (int i = 0; i < IN_QUEUE; i++) {
        list_del(&src->jobs[i].running);
        sched_release(m->s, &src->jobs[i].item);
    }
}

static struct source source(struct model *m, enum sched_class c, const char *tenant, uint64_t bytes)
{
    return (struct source){.class = c, .tenant = sched_tenant(m->s, tenant), .bytes = bytes};
}

static void each_class_gets_its_floor(void **state)
{
    (void)state;
    static const unsigned floor[] = {40, 25, 20, 5};
    struct model m;
    struct source src[SCHED_CLASSES];
    uint64_t total = 0;
    model_open(&m, 8 * MIB);
    for (int c = 0; c < SCHED_CLASSES; c++) {
        src[c] = source(&m, (enum sched_class)c, "acme", MIB);
        feed(&m, &src[c]);
    }
    (void)sched_pump(m.s, 0);
    for (int i = 0; i < 4000; i++)
        step(&m);
    for (int c = 0; c < SCHED_CLASSES; c++)
        total += src[c].done_bytes;
    for (int c = 0; c < SCHED_CLASSES; c++) /* a little less: the window is finite */
        assert_true(src[c].done_bytes * 100 > total * (floor[c] - 1));
    /* What no floor claims goes to the highest. */
    assert_true(src[CLASS_RESTORE].done_bytes * 100 > total * 48);
    assert_true(m.most <= 8 * MIB);
    for (int c = 0; c < SCHED_CLASSES; c++)
        stop(&m, &src[c]);
    sched_destroy(m.s);
}

static void an_idle_machine_serves_anyone_in_full(void **state)
{
    (void)state;
    struct model m;
    model_open(&m, 2 * MIB);
    struct source src = source(&m, CLASS_SCRUB, "acme", MIB);
    feed(&m, &src);
    (void)sched_pump(m.s, 0);
    assert_int_equal(m.in_flight, 2 * MIB);
    stop(&m, &src);
    sched_destroy(m.s);
}

static void a_save_storm_does_not_delay_feed(void **state)
{
    (void)state;
    struct model m;
    model_open(&m, 8 * MIB);
    struct source save = source(&m, CLASS_SAVE, "acme", 4 * MIB);
    struct source read = source(&m, CLASS_FEED, "acme", 64 << 10);
    feed(&m, &save);
    (void)sched_pump(m.s, 0);
    for (int i = 0; i < 100; i++)
        step(&m);
    feed(&m, &read);
    for (int i = 0; i < 100 && read.done_bytes == 0; i++)
        step(&m);
    /* Behind what was in flight already (2) and itself, not behind the storm's queue. */
    assert_true(read.done_bytes > 0);
    uint64_t before = save.done_bytes;
    for (int i = 0; i < 1000; i++)
        step(&m);
    assert_true(save.done_bytes > before); /* small reads are not so many bytes that saving stops */
    stop(&m, &save);
    stop(&m, &read);
    sched_destroy(m.s);
}

static void tenants_share_by_weight(void **state)
{
    (void)state;
    struct model m;
    model_open(&m, 4 * MIB);
    struct source light = source(&m, CLASS_FEED, "light", MIB),
                  heavy = source(&m, CLASS_FEED, "heavy", MIB / 2);
    sched_tenant_set(heavy.tenant, 3, 0);
    feed(&m, &light);
    feed(&m, &heavy);
    (void)sched_pump(m.s, 0);
    for (int i = 0; i < 8000; i++)
        step(&m);
    double ratio = (double)heavy.done_bytes / (double)light.done_bytes;
    assert_true(ratio > 2.8 && ratio < 3.2);
    stop(&m, &light);
    stop(&m, &heavy);
    sched_destroy(m.s);
}

/* Who asks for the first time after a long while does not get all of it until it has caught up. */
static void absence_saves_up_no_claim(void **state)
{
    (void)state;
    struct model m;
    model_open(&m, 4 * MIB);
    struct source old = source(&m, CLASS_FEED, "old", MIB), young = source(&m, CLASS_FEED, "young", MIB);
    feed(&m, &old);
    (void)sched_pump(m.s, 0);
    for (int i = 0; i < 10000; i++)
        step(&m);
    feed(&m, &young);
    uint64_t before = old.done_bytes;
    for (int i = 0; i < 100; i++)
        step(&m);
    assert_true(old.done_bytes - before >= 45 * MIB);
    assert_true(young.done_bytes >= 45 * MIB);
    stop(&m, &old);
    stop(&m, &young);
    sched_destroy(m.s);
}

static void a_cap_holds_and_says_when_to_go_on(void **state)
{
    (void)state;
    struct model m;
    model_open(&m, 64 * MIB);
    struct source src = source(&m, CLASS_RESTORE, "capped", MIB);
    sched_tenant_set(src.tenant, 1, 10 * MIB);
    feed(&m, &src);
    uint64_t wake_ms = sched_pump(m.s, 0);
    for (int i = 0; i < 100000 && m.now_ms < 10000; i++) {
        while (!list_empty(&m.running))
            step(&m);
        wake_ms = sched_pump(m.s, m.now_ms);
        if (list_empty(&m.running)) {
            assert_true(wake_ms > m.now_ms);
            m.now_ms = wake_ms;
            (void)sched_pump(m.s, m.now_ms);
        }
    }
    assert_true(m.now_ms >= 10000);
    assert_true(src.done_bytes >= 98 * MIB && src.done_bytes <= 105 * MIB);
    stop(&m, &src);
    sched_destroy(m.s);
}

static void a_capped_tenant_holds_up_nobody(void **state)
{
    (void)state;
    struct model m;
    model_open(&m, 4 * MIB);
    struct source capped = source(&m, CLASS_RESTORE, "capped", MIB),
                  other = source(&m, CLASS_FEED, "free", MIB);
    sched_tenant_set(capped.tenant, 1, 1);
    feed(&m, &capped);
    feed(&m, &other);
    assert_true(sched_pump(m.s, 0) == 0); /* nothing waits for time alone: there is no room either */
    for (int i = 0; i < 100; i++)
        step(&m);
    assert_true(other.done_bytes >= 90 * MIB);
    stop(&m, &capped);
    stop(&m, &other);
    sched_destroy(m.s);
}

static void large_items_pass_alone_and_are_not_overtaken(void **state)
{
    (void)state;
    struct model m;
    model_open(&m, 2 * MIB);
    struct source small = source(&m, CLASS_FEED, "a", MIB), large = source(&m, CLASS_FEED, "b", 8 * MIB);
    feed(&m, &small);
    (void)sched_pump(m.s, 0);
    feed(&m, &large);
    for (int i = 0; i < 60; i++)
        step(&m);
    assert_true(large.done_bytes > 0);
    assert_true(small.done_bytes > 0);
    assert_true(m.most <= 8 * MIB);
    stop(&m, &small);
    stop(&m, &large);
    sched_destroy(m.s);
}

static void release_takes_back_in_every_state(void **state)
{
    (void)state;
    struct model m;
    struct sched_figures f;
    model_open(&m, MIB);
    struct source src = source(&m, CLASS_SAVE, "acme", MIB);
    feed(&m, &src);
    (void)sched_pump(m.s, 7);
    sched_figures(m.s, CLASS_SAVE, &f);
    assert_int_equal(f.queued, IN_QUEUE - 1);
    assert_int_equal(f.in_flight_bytes, MIB);
    assert_int_equal(f.waited_ms_max, 7);
    stop(&m, &src);
    stop(&m, &src); /* harmless */
    sched_figures(m.s, CLASS_SAVE, &f);
    assert_int_equal(f.queued, 0);
    assert_int_equal(f.queued_bytes, 0);
    assert_int_equal(f.in_flight_bytes, 0);
    sched_destroy(m.s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_class_gets_its_floor),
        cmocka_unit_test(an_idle_machine_serves_anyone_in_full),
        cmocka_unit_test(a_save_storm_does_not_delay_feed),
        cmocka_unit_test(tenants_share_by_weight),
        cmocka_unit_test(absence_saves_up_no_claim),
        cmocka_unit_test(a_cap_holds_and_says_when_to_go_on),
        cmocka_unit_test(a_capped_tenant_holds_up_nobody),
        cmocka_unit_test(large_items_pass_alone_and_are_not_overtaken),
        cmocka_unit_test(release_takes_back_in_every_state),
    };
    return cmocka_run_group_tests_name("sched", tests, NULL, NULL);
}
