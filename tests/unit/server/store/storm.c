/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: no order of requests, cancels, fences and removals breaks the store: every request is answered once,
 * nothing leaks, and what was told durable and not pruned is there. Method: on the simulator, dozens of
 * random requests in flight at once over a few runs, attempts and parts, with delays and, in some rounds, a
 * failing disk; then a stop in the middle, a restart, and a look at all of it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/commit.h"
#include "format/keys.h"
#include "tests/support/store_rig.h"

#define FLIGHTS 40
#define PARTS   48
#define RUNS    2

static struct store_rig rig;
static struct id runs[RUNS], attempts[RUNS];
static const char *const names[RUNS] = {"llm", "vit"};
static struct rig_part parts[PARTS];
static struct ask *flights[FLIGHTS];
static struct told {
    unsigned run;
    uint64_t sequence;
} told[4096];
static unsigned told_count;
static bool pruned[RUNS];
static uint64_t answered, durable;

static uint32_t dice(uint32_t below)
{
    uint32_t v;
    store_rig_random(&rig, &v, sizeof v);
    return v % below;
}

static unsigned stages[PARTS]; /* how far each has come: create, chunks, index, seal, join and commit */

static bool spoken_of(unsigned i)
{
    for (unsigned k = 0; k < FLIGHTS; k++)
        if (flights[k] && flights[k]->arg == &parts[i])
            return true;
    return false;
}

static void part_make(unsigned i, unsigned run, uint64_t step, uint32_t rank, uint32_t world)
{
    rig_part_free(&parts[i]);
    parts[i] = (struct rig_part){.run = runs[run],
                                 .attempt = attempts[run],
                                 .step = step,
                                 .rank = rank,
                                 .world = world,
                                 .chunks = 1 + dice(3),
                                 .index_extra = dice(9000)};
    stages[i] = 0;
    rig_part_make(&rig, &parts[i]);
}

/* New parts in the place of a pair: of worlds of one, or the two of one world; few steps, so that they meet.
 */
static void pair_renew(unsigned i)
{
    i -= i % 2;
    if (spoken_of(i) || spoken_of(i + 1)) /* their bytes are still needed */
        return;
    unsigned run = dice(RUNS);
    uint64_t step = 10 * (1 + dice(5));
    bool one = dice(2);
    part_make(i, run, step, 0, one ? 1 : 2);
    part_make(i + 1, run, one ? step + 10 : step, one ? 0 : 1, one ? 1 : 2);
}

static struct ask *random_admin(unsigned run)
{
    struct slice name = slice_str(names[run]);
    switch (dice(8)) {
    case 0:
        attempts[run] = store_rig_id(&rig);
        return ASK(&rig, OP_ATTEMPT, attempt, .run_id = runs[run], .attempt = attempts[run], .world = 2);
    case 1:
        pruned[run] = true;
        return ASK(&rig, OP_PRUNE, prune, .kind = RUN_CHECKPOINTS, .name = name, .keep_last = 2,
                   .execute = 1);
    case 2:
        return ASK(&rig, OP_MARK, mark, .kind = RUN_CHECKPOINTS, .name = name, .sequence = 1 + dice(8),
                   .action = (uint8_t)(1 + dice(4)), .reason = slice_str("storm"));
    case 3: return ASK(&rig, OP_SCRUB, scrub, .kind = RUN_CHECKPOINTS, .name = name, .level = SCRUB_DATA);
    case 4:
        return ASK(&rig, OP_COMMIT_LIST, commit_list, .kind = RUN_CHECKPOINTS, .name = name,
                   .with_pending = 1);
    case 5: return ASK(&rig, OP_RUN_LIST, run_list, .kind = RUN_CHECKPOINTS);
    case 6: return ASK(&rig, OP_TENANT_LIST, list, .after = slice_str(""));
    default:
        return ASK(&rig, OP_SAVE_ABORT, save_abort, .run_id = runs[run], .step = 10 * (1 + dice(5)),
                   .attempt = attempts[run], .rank = dice(2), .text = slice_str("storm"));
    }
}

/* What the part needs next. */
static struct ask *next_request(const struct rig_part *p, unsigned stage)
{
    if (stage == 0)
        return rig_create(&rig, p);
    if (stage <= p->chunks)
        return rig_chunk(&rig, p, stage - 1);
    if (stage == p->chunks + 1)
        return rig_index(&rig, p, 0, p->index.n);
    if (stage == p->chunks + 2)
        return rig_seal(&rig, p);
    return dice(2) ? rig_join(&rig, p, dice(2) ? 0 : 200)
                   : rig_commit(&rig, p, dice(12) ? ERR_NONE : ERR_MISMATCH, "storm");
}

static struct ask *odd_request(const struct rig_part *p)
{
    switch (dice(6)) {
    case 0: return rig_create(&rig, p);
    case 1: return rig_index(&rig, p, 0, dice((uint32_t)p->index.n) / BLOCK_BYTES * BLOCK_BYTES);
    case 2: return rig_seal(&rig, p);
    case 3: return rig_join(&rig, p, 0);
    case 4: return rig_chunk(&rig, p, dice(p->chunks));
    default: return ASK(&rig, OP_SEGMENT_DISCARD, segment_discard, .segment = p->segment);
    }
}

static struct ask *random_request(void)
{
    unsigned i = dice(PARTS);
    if (dice(25) == 0)
        return random_admin(dice(RUNS));
    if (dice(40) == 0)
        pair_renew(i);
    struct ask *c = dice(12) ? next_request(&parts[i], stages[i]) : odd_request(&parts[i]);
    c->arg = &parts[i];
    return c;
}

static void remember(struct ask *c)
{
    struct rig_part *p = c->arg;
    answered++;
    c->arg = NULL;
    if (c->op.err.class == ERR_FENCED && p)
        pair_renew((unsigned)(p - parts));
    if (c->op.err.class != ERR_NONE)
        return;
    static const uint16_t opcodes[] = {OP_SEGMENT_CREATE, OP_SEGMENT_CHUNK, OP_SEGMENT_INDEX,
                                       OP_SEGMENT_SEAL};
    if (p) {
        unsigned *stage = &stages[p - parts];
        unsigned expected = *stage == 0 ? 0 : *stage <= p->chunks ? 1 : *stage - p->chunks + 1;
        if (expected < 4 && c->op.opcode == opcodes[expected])
            ++*stage;
    }
    uint64_t sequence = 0;
    if (c->op.opcode == OP_COMMIT)
        sequence = ANSWER(c, commit_reply).sequence;
    if (c->op.opcode == OP_JOIN && ANSWER(c, join_reply).state == JOIN_DURABLE)
        sequence = ANSWER(c, join_reply).sequence;
    if (sequence == 0)
        return;
    durable++;
    if (told_count < sizeof told / sizeof told[0])
        told[told_count++] = (struct told){.run = p && id_equal(&p->run, &runs[1]), .sequence = sequence};
}

static bool some_done(void *arg)
{
    (void)arg;
    for (unsigned i = 0; i < FLIGHTS; i++)
        if (flights[i] && flights[i]->done)
            return true;
    return false;
}

static void reap(void)
{
    for (unsigned i = 0; i < FLIGHTS; i++) {
        if (!flights[i] || !flights[i]->done)
            continue;
        remember(flights[i]);
        ask_free(flights[i]);
        flights[i] = NULL;
    }
}

static void fly(unsigned count)
{
    while (count-- > 0) {
        unsigned i = dice(FLIGHTS);
        if (flights[i]) {
            if (dice(30) == 0)
                store_cancel(rig.store, &flights[i]->op);
            else if (dice(3) == 0)
                store_rig_sleep(&rig, dice(40));
            else if (some_done(NULL))
                reap();
            continue;
        }
        flights[i] = random_request();
        ask_begin(flights[i]);
    }
}

static void what_was_told_is_there(bool failing)
{
    static struct msg_commit_item items[1024];
    for (unsigned run = 0; run < RUNS; run++) {
        size_t n = rig_commits(&rig, RUN_CHECKPOINTS, names[run], false, items, 1024);
        for (size_t i = 1; i < n; i++)
            assert_true(items[i].sequence > items[i - 1].sequence);
        for (unsigned k = 0; k < told_count; k++) {
            bool found = told[k].run != run || pruned[run];
            for (size_t i = 0; i < n && !found; i++)
                found = items[i].sequence == told[k].sequence;
            assert_true(found);
        }
        if (pruned[run] && told_count > 0 && !failing && n == 0)
            for (unsigned k = 0; k < told_count; k++)
                assert_true(told[k].run != run); /* one always remains */
    }
}

static void expect_good(struct ask *c)
{
    assert_int_equal(ANSWER(c, scrub_item).class, ERR_NONE);
}

static void all_is_whole(void)
{
    struct ask *c = ASK(&rig, OP_SCRUB, scrub, .kind = RUN_CHECKPOINTS, .level = SCRUB_DATA);
    c->frame = expect_good;
    assert_int_equal(ask_do(c), ERR_NONE);
    ask_free(c);
}

static void one_round(uint64_t seed, bool failing)
{
    struct store_stats stats;
    store_rig_open(&rig, STORE_ON_SIM, seed);
    rig.options.segment_idle_ms = 2000;
    rig.options.check_wait_ms = 100;
    rig.options.join_wait_max_ms = 500;
    rig.options.buffers_bytes_max = 100000;
    assert_true(store_rig_start(&rig));
    assert_int_equal(rig_tenant_add(&rig, "acme", 3000000), ERR_NONE);
    told_count = 0;
    for (unsigned i = 0; i < RUNS; i++) {
        pruned[i] = false;
        assert_int_equal(rig_run_open(&rig, RUN_CHECKPOINTS, names[i], true, &runs[i]), ERR_NONE);
        attempts[i] = store_rig_id(&rig);
        assert_int_equal(rig_attempt(&rig, &runs[i], &attempts[i], 2, NULL), ERR_NONE);
    }
    for (unsigned i = 0; i < PARTS; i += 2)
        pair_renew(i);
    sim_set_faults(rig.sim, &(struct sim_faults){.lose_unsynced = true,
                                                 .stall_ms_max = 3,
                                                 .short_transfer = 100000,
                                                 .write_error = failing ? 300 : 0,
                                                 .write_no_space = failing ? 300 : 0,
                                                 .read_error = failing ? 300 : 0,
                                                 .sync_error = failing ? 200 : 0});
    fly(4000);
    store_rig_stop(&rig); /* in the middle of it */
    for (unsigned i = 0; i < FLIGHTS; i++)
        assert_true(!flights[i] || flights[i]->done);
    reap();
    sim_set_faults(rig.sim, &(struct sim_faults){.lose_unsynced = true});
    if (!store_rig_power_on(&rig))
        fail_msg("%s", rig.err.text);
    store_rig_sleep(&rig, 10000);
    store_stats(rig.store, &stats);
    assert_int_equal(stats.damaged_objects, 0);
    assert_int_equal(stats.reserved_bytes, 0);
    assert_int_equal(stats.segments_open, 0);
    what_was_told_is_there(failing);
    all_is_whole();
    for (unsigned i = 0; i < PARTS; i++)
        rig_part_free(&parts[i]);
    store_rig_close(&rig);
}

static void no_order_of_requests_breaks_the_store(void **state)
{
    (void)state;
    const char *rounds = getenv("LARDER_STORM_ROUNDS"), *first = getenv("LARDER_STORM_SEED");
    uint64_t seed = first ? strtoull(first, NULL, 10) : 1,
             last = seed + (rounds ? strtoull(rounds, NULL, 10) : 12);
    for (; seed < last; seed++) {
        print_message("seed %llu\n", (unsigned long long)seed);
        one_round(seed, seed % 3 == 0);
    }
    print_message("%llu answers, %llu of them durable\n", (unsigned long long)answered,
                  (unsigned long long)durable);
    assert_true(durable > 500); /* or nothing was tried */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_order_of_requests_breaks_the_store),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
