/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: whatever was acknowledged exists, whole, after a power failure at any moment; what was not is either
 * whole or not there; nothing half is ever listed, and nothing is held for ever. Method: one history (saves
 * of several ranks, a pin, prunes, new attempts, a step saved again) on the simulated disk, cut off by a
 * power failure that loses any part of what was not synced, at many events of it; then the store is opened
 * again and compared with a model of what the client was told, scrubbed, and used on.
 *
 * LARDER_CRASH_STEP=1 tries every event.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/base/log.h"
#include "format/commit.h"
#include "server/obs/metrics.h"
#include "tests/support/store_rig.h"

#define NAME     "llm"
#define SAVES    8
#define ATTEMPTS 4

enum known { UNKNOWN, ASKED, TOLD };

struct saved {
    enum known commit; /* ASKED: the request was sent */
    enum known pruned;
    uint64_t step, sequence;
};

struct model {
    struct store_rig rig;
    struct id run;
    bool has_run;
    struct id attempts[ATTEMPTS];
    unsigned attempt_count; /* told */
    struct saved saves[SAVES];
    unsigned save_count;
    enum known pin;
};

static enum err_class once(struct ask *c)
{
    enum err_class class = ask_do(c);
    ask_free(c);
    return class;
}

/* ---- the history ---- */

static bool attempt(struct model *m)
{
    struct id *id = &m->attempts[m->attempt_count];
    *id = store_rig_id(&m->rig);
    uint64_t number;
    if (rig_attempt(&m->rig, &m->run, id, 2, &number) != ERR_NONE)
        return false;
    m->attempt_count++;
    assert_int_equal(number, m->attempt_count);
    return true;
}

static struct rig_part part(struct model *m, uint64_t step, uint32_t rank)
{
    struct rig_part p = {.run = m->run,
                         .attempt = m->attempts[m->attempt_count - 1],
                         .step = step,
                         .rank = rank,
                         .world = 2,
                         .chunks = 2,
                         .index_extra = 5000};
    rig_part_make(&m->rig, &p);
    return p;
}

static bool save(struct model *m, uint64_t step)
{
    struct rig_part p[2] = {part(m, step, 0), part(m, step, 1)};
    struct ask *joins[2] = {rig_join(&m->rig, &p[0], 0), rig_join(&m->rig, &p[1], 0)};
    struct ask *commit = rig_commit(&m->rig, &p[0], ERR_NONE, "");
    struct saved *s = &m->saves[m->save_count];
    bool good = rig_part_write(&m->rig, &p[0]) == ERR_NONE && rig_part_write(&m->rig, &p[1]) == ERR_NONE;
    if (good) {
        ask_begin(joins[0]);
        good = ask_do(joins[1]) == ERR_NONE;
        if (good) {
            *s = (struct saved){.step = step, .commit = ASKED};
            m->save_count++;
            good = ask_do(commit) == ERR_NONE;
        }
        if (good) {
            s->commit = TOLD;
            s->sequence = ANSWER(commit, commit_reply).sequence;
        }
        if (!joins[0]->done && !good)
            store_cancel(m->rig.store, &joins[0]->op);
        if (ask_end(joins[0]) == ERR_NONE) { /* the other rank was told */
            assert_int_equal(ANSWER(joins[0], join_reply).state, JOIN_DURABLE);
            s->commit = TOLD;
            s->sequence = ANSWER(joins[0], join_reply).sequence;
        }
    }
    ask_free(commit);
    for (int i = 0; i < 2; i++) {
        ask_free(joins[i]);
        rig_part_free(&p[i]);
    }
    return good;
}

/* Keeps the last two; the pinned first one stays as well. */
static bool prune(struct model *m)
{
    unsigned first = m->pin == UNKNOWN ? 0 : 1;
    for (unsigned i = first; i + 2 < m->save_count; i++)
        if (m->saves[i].pruned == UNKNOWN)
            m->saves[i].pruned = ASKED;
    if (once(ASK(&m->rig, OP_PRUNE, prune, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME), .keep_last = 2,
                 .execute = 1)) != ERR_NONE)
        return false;
    for (unsigned i = first; i + 2 < m->save_count; i++)
        m->saves[i].pruned = TOLD;
    return true;
}

static bool pin_first(struct model *m)
{
    m->pin = ASKED;
    if (once(ASK(&m->rig, OP_MARK, mark, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME), .sequence = 1,
                 .action = MARK_ACTION_PIN)) != ERR_NONE)
        return false;
    m->pin = TOLD;
    return true;
}

static bool half_a_save(struct model *m, uint64_t step)
{
    struct rig_part p = part(m, step, 0);
    bool good = rig_part_write(&m->rig, &p) == ERR_NONE;
    rig_part_free(&p);
    return good;
}

static bool history(struct model *m)
{
    if (!store_rig_start(&m->rig) || rig_tenant_add(&m->rig, "acme", 0) != ERR_NONE ||
        rig_run_open(&m->rig, RUN_CHECKPOINTS, NAME, true, &m->run) != ERR_NONE)
        return false;
    m->has_run = true;
    return attempt(m) && save(m, 10) && save(m, 20) && pin_first(m) && save(m, 30) && save(m, 40) &&
           prune(m) && half_a_save(m, 50) && attempt(m) && save(m, 40) && save(m, 50) && prune(m) &&
           half_a_save(m, 60) && attempt(m) && save(m, 60);
}

/* ---- the comparison ---- */

/* The item of a save: by its sequence, or, where that was not told, one of its step that is no other save's.
 */
static struct msg_commit_item *find(const struct model *m, struct msg_commit_item *items, size_t n,
                                    const struct saved *s)
{
    for (size_t i = 0; i < n; i++) {
        bool others = false;
        for (unsigned k = 0; k < m->save_count && s->commit != TOLD; k++)
            others |= m->saves[k].commit == TOLD && m->saves[k].sequence == items[i].sequence;
        if (items[i].step == s->step && (s->commit == TOLD ? items[i].sequence == s->sequence : !others))
            return &items[i];
    }
    return NULL;
}

static void compare_commits(struct model *m)
{
    struct msg_commit_item items[SAVES + 1];
    size_t n = rig_commits(&m->rig, RUN_CHECKPOINTS, NAME, false, items, SAVES + 1), explained = 0;
    for (unsigned i = 0; i < m->save_count; i++) {
        const struct saved *s = &m->saves[i];
        struct msg_commit_item *item = find(m, items, n, s);
        if (s->commit == TOLD && s->pruned == UNKNOWN)
            assert_non_null(item);
        if (s->commit == TOLD && s->pruned == TOLD)
            assert_null(item);
        explained += item != NULL;
        if (item)
            assert_int_equal(item->state, COMMIT_GOOD);
        if (item && i == 0 && m->pin == TOLD)
            assert_int_equal(item->pinned, 1);
    }
    assert_int_equal(explained, n); /* nothing that nobody asked for */
}

static void count_bad(struct ask *c)
{
    if (ANSWER(c, scrub_item).class != ERR_NONE)
        ++*(unsigned *)c->arg;
}

static void nothing_is_damaged(struct model *m)
{
    unsigned bad = 0;
    struct store_stats stats;
    struct ask *c =
        ASK(&m->rig, OP_SCRUB, scrub, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME), .level = SCRUB_DATA);
    c->frame = count_bad;
    c->arg = &bad;
    assert_int_equal(ask_do(c), ERR_NONE);
    ask_free(c);
    assert_int_equal(bad, 0);
    store_stats(m->rig.store, &stats);
    assert_int_equal(stats.damaged_objects, 0);
    assert_false(stats.read_only);
}

/* A new attempt saves on, and afterwards only what commits name takes space. */
static void goes_on(struct model *m)
{
    struct msg_commit_item items[SAVES + 2];
    struct id newest = store_rig_id(&m->rig);
    struct store_stats stats;
    uint64_t number, sequence, bytes = 0;
    for (unsigned i = 0; i < m->attempt_count; i++) { /* who was told a number keeps it, or was replaced */
        enum err_class class = rig_attempt(&m->rig, &m->run, &m->attempts[i], 2, &number);
        assert_true(class == ERR_FENCED || (class == ERR_NONE && number == i + 1));
    }
    assert_int_equal(rig_attempt(&m->rig, &m->run, &newest, 3, &number), ERR_NONE);
    assert_true(number > m->attempt_count);
    assert_int_equal(rig_save(&m->rig, &m->run, &newest, 1000, 3, &sequence, NULL), ERR_NONE);
    for (unsigned i = 0; i < m->save_count; i++)
        assert_true(sequence > m->saves[i].sequence);
    store_rig_sleep(&m->rig, 1000); /* the collector's time */
    size_t n = rig_commits(&m->rig, RUN_CHECKPOINTS, NAME, true, items, SAVES + 2);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(items[i].state, COMMIT_GOOD);
        bytes += items[i].stored_bytes;
    }
    store_stats(m->rig.store, &stats);
    assert_int_equal(stats.stored_bytes, bytes);
    assert_int_equal(stats.reserved_bytes, 0);
}

static void check_after(struct model *m)
{
    struct id run;
    if (!store_rig_power_on(&m->rig))
        fail_msg("the store does not open: %s", m->rig.err.text);
    if (!m->has_run) { /* tenant and run may or may not be there: then they are made */
        enum err_class class = rig_tenant_add(&m->rig, "acme", 0);
        assert_true(class == ERR_NONE || class == ERR_EXISTS);
        assert_int_equal(rig_run_open(&m->rig, RUN_CHECKPOINTS, NAME, true, &m->run), ERR_NONE);
    }
    assert_int_equal(rig_run_open(&m->rig, RUN_CHECKPOINTS, NAME, false, &run), ERR_NONE);
    assert_memory_equal(&run, &m->run, sizeof run);
    compare_commits(m);
    nothing_is_damaged(m);
    goes_on(m);
}

/* Events of the whole history, or of what came of it before the crash. */
static uint64_t try(uint64_t seed, uint64_t crash_after)
{
    static struct model m;
    memset(&m, 0, sizeof m);
    store_rig_open(&m.rig, STORE_ON_SIM, seed);
    m.rig.crash_after = crash_after;
    bool whole = history(&m);
    uint64_t events = m.rig.events;
    if (!crash_after)
        assert_true(whole);
    check_after(&m);
    store_rig_close(&m.rig);
    return events;
}

static void power_may_fail_at_any_event(void **state)
{
    (void)state;
    const char *every = getenv("LARDER_CRASH_STEP"), *first = getenv("LARDER_CRASH_SEED");
    uint64_t seed = first ? strtoull(first, NULL, 10) : 7;
    uint64_t events = try(seed, 0), step = every ? strtoull(every, NULL, 10) : events / 150 + 1;
    print_message("seed %llu, %llu events, every %llu\n", (unsigned long long)seed,
                  (unsigned long long)events, (unsigned long long)step);
    for (uint64_t at = 1; at < events; at += step) {
        print_message("crash after %llu\n", (unsigned long long)at);
        try(seed + (every ? 0 : at), at);
    }
}

/* The same history on a disk that fails in all ways, until something does; then a restart on a sound one. */
static void a_failing_disk_is_not_hidden(void **state)
{
    (void)state;
    static struct model m;
    unsigned failed = 0, read_only = 0;
    const char *rounds = getenv("LARDER_FAULT_ROUNDS");
    for (uint64_t seed = 1; seed <= (rounds ? strtoull(rounds, NULL, 10) : 60); seed++) {
        struct sim_faults faults = {.lose_unsynced = true};
        struct store_stats stats;
        memset(&m, 0, sizeof m);
        print_message("seed %llu\n", (unsigned long long)seed);
        store_rig_open(&m.rig, STORE_ON_SIM, seed);
        sim_set_faults(m.rig.sim, &(struct sim_faults){.lose_unsynced = true,
                                                       .write_error = 4000,
                                                       .write_no_space = 4000,
                                                       .sync_error = 4000,
                                                       .short_transfer = 300000,
                                                       .stall_ms_max = 20});
        bool whole = history(&m);
        if (m.rig.store) {
            store_stats(m.rig.store, &stats);
            read_only += stats.read_only;
            assert_false(whole && stats.read_only); /* it cannot have gone well */
        }
        failed += !whole;
        store_rig_sleep(&m.rig, 200); /* what was begun in the background comes to its end */
        sim_set_faults(m.rig.sim, &faults);
        check_after(&m);
        store_rig_close(&m.rig);
    }
    assert_true(failed > 10 && read_only > 5); /* or nothing was tried */
}

/* D17: what was read wrongly once is read again before it is called damaged. */
static void one_bad_read_is_no_damage(void **state)
{
    (void)state;
    static struct model m;
    memset(&m, 0, sizeof m);
    store_rig_open(&m.rig, STORE_ON_SIM, 4);
    assert_true(history(&m));
    struct rig_part loose = part(&m, 5000, 0); /* sealed, and in no commit: looked into at a start */
    assert_int_equal(rig_part_write(&m.rig, &loose), ERR_NONE);
    /* never two in a row at one place, which nobody could tell from damage */
    sim_set_faults(m.rig.sim, &(struct sim_faults){
                                  .read_corrupt = 100000, .read_misdirected = 100000, .misread_rest = 2});
    int64_t found = metric_get(METRIC_corrupt_found);
    for (int i = 0; i < 40; i++) {
        nothing_is_damaged(&m);
        store_rig_stop(&m.rig);
        if (!store_rig_start(&m.rig))
            fail_msg("%s", m.rig.err.text);
    }
    assert_int_equal(once(rig_join(&m.rig, &loose, 1)), ERR_TIMEOUT); /* it is known, and waits for others */
    assert_true(sim_struck(m.rig.sim)->read_corrupt > 100 && sim_struck(m.rig.sim)->read_misdirected > 100);
    assert_int_equal(metric_get(METRIC_corrupt_found), found);
    rig_part_free(&loose);
    sim_set_faults(m.rig.sim,
                   &(struct sim_faults){.read_corrupt = 1000000}); /* and if it is always wrong, it is */
    unsigned bad = 0;
    struct ask *c = ASK(&m.rig, OP_SCRUB, scrub, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME),
                        .level = SCRUB_STRUCTURE);
    c->frame = count_bad;
    c->arg = &bad;
    assert_int_equal(ask_do(c), ERR_NONE);
    ask_free(c);
    assert_true(bad > 0);
    store_rig_close(&m.rig);
}

static void a_failed_sync_turns_the_store_read_only(void **state)
{
    (void)state;
    static struct model m;
    struct store_stats stats;
    struct msg_commit_item items[SAVES];
    memset(&m, 0, sizeof m);
    store_rig_open(&m.rig, STORE_ON_SIM, 99);
    assert_true(store_rig_start(&m.rig));
    assert_int_equal(rig_tenant_add(&m.rig, "acme", 0), ERR_NONE);
    assert_int_equal(rig_run_open(&m.rig, RUN_CHECKPOINTS, NAME, true, &m.run), ERR_NONE);
    m.has_run = true;
    assert_true(attempt(&m) && save(&m, 10));
    struct rig_part p = part(&m, 20, 0);
    assert_int_equal(once(rig_create(&m.rig, &p)), ERR_NONE);
    for (uint32_t i = 0; i < p.chunks; i++)
        assert_int_equal(once(rig_chunk(&m.rig, &p, i)), ERR_NONE);
    assert_int_equal(once(rig_index(&m.rig, &p, 0, p.index.n)), ERR_NONE);
    sim_set_faults(m.rig.sim, &(struct sim_faults){.lose_unsynced = true, .sync_error = 1000000});
    assert_int_equal(once(rig_seal(&m.rig, &p)), ERR_IO);
    sim_set_faults(m.rig.sim, &(struct sim_faults){.lose_unsynced = true});
    assert_true(once(rig_seal(&m.rig, &p)) != ERR_NONE); /* never tried again */
    assert_int_equal(once(rig_create(&m.rig, &p)), ERR_READ_ONLY);
    assert_int_equal(rig_attempt(&m.rig, &m.run, &m.attempts[0], 2, NULL), ERR_READ_ONLY);
    assert_int_equal(rig_tenant_add(&m.rig, "late", 0), ERR_READ_ONLY);
    assert_int_equal(rig_commits(&m.rig, RUN_CHECKPOINTS, NAME, false, items, SAVES),
                     1); /* reading goes on */
    store_stats(m.rig.store, &stats);
    assert_true(stats.read_only);
    assert_true(strlen(stats.read_only_reason) > 0);
    check_after(&m); /* until the restart */
    rig_part_free(&p);
    store_rig_close(&m.rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_failing_disk_is_not_hidden),
        cmocka_unit_test(one_bad_read_is_no_damage),
        cmocka_unit_test(a_failed_sync_turns_the_store_read_only),
        cmocka_unit_test(power_may_fail_at_any_event),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
