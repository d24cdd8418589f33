/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a save is one thing: all ranks hear durable, or all hear why not. Method: requests as clients send
 * them, to a store on the simulator, with the whole of joins, checks, verdicts, aborts, fences and late
 * ranks.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/commit.h"
#include "tests/support/store_rig.h"

static struct store_rig rig;
static struct id run, attempt;

static int setup(void **state)
{
    (void)state;
    store_rig_open(&rig, STORE_ON_SIM, 11); /* its clock only moves when nothing else happens */
    if (!store_rig_start(&rig))
        return -1;
    attempt = store_rig_id(&rig);
    return rig_tenant_add(&rig, "acme", 0) || rig_run_open(&rig, RUN_CHECKPOINTS, "llm/base", true, &run) ||
           rig_attempt(&rig, &run, &attempt, 2, NULL);
}

static int teardown(void **state)
{
    (void)state;
    store_rig_close(&rig);
    return 0;
}

static struct rig_part part_of(uint64_t step, uint32_t rank, uint32_t world)
{
    struct rig_part p = {
        .run = run, .attempt = attempt, .step = step, .rank = rank, .world = world, .chunks = 2};
    rig_part_make(&rig, &p);
    return p;
}

static struct rig_part sealed_part(uint64_t step, uint32_t rank, uint32_t world)
{
    struct rig_part p = part_of(step, rank, world);
    assert_int_equal(rig_part_write(&rig, &p), ERR_NONE);
    return p;
}

static enum err_class finish(struct ask *c)
{
    enum err_class class = ask_end(c);
    ask_free(c);
    return class;
}

static size_t commits(bool pending, struct msg_commit_item *items)
{
    return rig_commits(&rig, RUN_CHECKPOINTS, "llm/base", pending, items, 16);
}

static void a_save_becomes_durable_on_all_ranks(void **state)
{
    (void)state;
    struct msg_commit_item items[16];
    uint64_t sequence = 0;
    assert_int_equal(rig_save(&rig, &run, &attempt, 20, 3, &sequence, NULL), ERR_NONE);
    assert_int_equal(sequence, 1);
    assert_int_equal(rig_save(&rig, &run, &attempt, 40, 1, &sequence, NULL), ERR_NONE);
    assert_int_equal(sequence, 2);
    assert_int_equal(commits(true, items), 2);
    assert_int_equal(items[0].step, 20);
    assert_int_equal(items[0].world, 3);
    assert_int_equal(items[0].state, COMMIT_GOOD);
    assert_int_equal(items[1].step, 40);
    struct ask *c = ASK(&rig, OP_COMMIT_GET, commit_get, .kind = RUN_CHECKPOINTS,
                        .name = slice_str("llm/base"), .select = SELECT_LATEST);
    assert_int_equal(ask_do(c), ERR_NONE);
    struct msg_commit_get_reply reply = ANSWER(c, commit_get_reply);
    struct commit record;
    assert_int_equal(commit_decode(reply.record.p, reply.record.n, &record, NULL), 0);
    assert_int_equal(record.step, 40);
    assert_int_equal(record.sequence, 2);
    assert_int_equal(record.attempt_number, 1);
    commit_free(&record);
    ask_free(c);
}

/* C2, C10: no commit without all, and the late rank is named to all. */
static void a_late_rank_is_named(void **state)
{
    (void)state;
    struct msg_commit_item items[16];
    struct rig_part a = sealed_part(20, 0, 4), b = sealed_part(20, 2, 4), late = sealed_part(20, 3, 4);
    struct ask *first = rig_join(&rig, &a, 50), *second = rig_join(&rig, &b, 0);
    ask_begin(first);
    ask_begin(second);
    assert_int_equal(finish(first), ERR_TIMEOUT);
    assert_non_null(strstr(rig.err.text, "ranks 1, 3 of 4 have not joined"));
    assert_int_equal(finish(second), ERR_TIMEOUT); /* who could have waited longer hears it as well */
    assert_int_equal(finish(({
                         struct ask *c = rig_join(&rig, &late, 0);
                         ask_begin(c);
                         c;
                     })),
                     ERR_TIMEOUT);
    assert_non_null(strstr(rig.err.text, "ranks 1, 3"));
    struct rig_part begun =
        part_of(20, 1, 4); /* a rank that had not even begun: told at its first request, once */
    struct ask *c = rig_create(&rig, &begun);
    assert_int_equal(ask_do(c), ERR_TIMEOUT);
    ask_free(c);
    assert_int_equal(rig_part_write(&rig, &begun), ERR_NONE);
    assert_int_equal(commits(false, items), 0);
    rig_part_free(&a), rig_part_free(&b), rig_part_free(&late), rig_part_free(&begun);
}

static void the_request_s_deadline_ends_the_request_alone(void **state)
{
    (void)state;
    struct rig_part a = sealed_part(20, 0, 2), b = sealed_part(20, 1, 2);
    struct ask *c = rig_join(&rig, &a, 0);
    c->op.deadline_at_ms = loop_now_ms(rig.loop) + 30;
    ask_begin(c);
    assert_int_equal(finish(c), ERR_TIMEOUT);
    assert_non_null(strstr(rig.err.text, "rank 1 of 2 has not joined"));
    struct ask *second = rig_join(&rig, &b, 0); /* rank 0 has joined all the same */
    assert_int_equal(ask_do(second), ERR_NONE);
    assert_int_equal(ANSWER(second, join_reply).state, JOIN_CHECK);
    ask_free(second);
    rig_part_free(&a), rig_part_free(&b);
}

static void one_rank_is_asked_and_all_hear_its_verdict(void **state)
{
    (void)state;
    struct rig_part a = sealed_part(20, 0, 2), b = sealed_part(20, 1, 2);
    struct ask *first = rig_join(&rig, &a, 0), *second = rig_join(&rig, &b, 0);
    ask_begin(first);
    ask_begin(second);
    assert_int_equal(ask_end(second), ERR_NONE); /* the last that came */
    struct msg_join_reply reply = ANSWER(second, join_reply);
    assert_int_equal(reply.state, JOIN_CHECK);
    assert_int_equal(reply.reference, 0);
    struct rcur in = rcur_of(reply.parts.p, reply.parts.n);
    for (uint32_t i = 0; i < 2; i++) {
        struct msg_join_part part;
        assert_int_equal(msg_join_part_decode(&in, &part, NULL), 0);
        assert_int_equal(part.rank, i);
        assert_memory_equal(part.segment.bytes, i ? b.segment.bytes : a.segment.bytes, sizeof part.segment);
    }
    assert_int_equal(in.left, 0);
    ask_free(second);
    assert_false(first->done);
    struct ask *verdict = rig_commit(&rig, &b, ERR_MISMATCH, "tensor w: ranks 0 and 1 overlap");
    assert_int_equal(ask_do(verdict), ERR_NONE);
    ask_free(verdict);
    assert_int_equal(finish(first), ERR_MISMATCH);
    assert_non_null(strstr(rig.err.text, "tensor w"));
    struct ask *again = rig_join(&rig, &b, 0);
    assert_int_equal(ask_do(again), ERR_MISMATCH);
    ask_free(again);
    rig_part_free(&a), rig_part_free(&b);
}

static void another_rank_is_asked_when_one_is_silent(void **state)
{
    (void)state;
    rig.options.check_wait_ms = 40;
    store_rig_stop(&rig);
    assert_true(store_rig_start(&rig));
    struct rig_part p[3] = {sealed_part(20, 0, 3), sealed_part(20, 1, 3), sealed_part(20, 2, 3)};
    struct ask *c[3];
    for (int i = 0; i < 3; i++)
        ask_begin(c[i] = rig_join(&rig, &p[i], 0));
    assert_int_equal(finish(c[2]), ERR_NONE);
    assert_int_equal(ask_end(c[1]), ERR_NONE); /* after a while, the next */
    assert_int_equal(ANSWER(c[1], join_reply).state, JOIN_CHECK);
    ask_free(c[1]);
    struct ask *verdict = rig_commit(&rig, &p[1], ERR_NONE, "");
    assert_int_equal(ask_do(verdict), ERR_NONE);
    assert_int_equal(ANSWER(verdict, commit_reply).sequence, 1);
    ask_free(verdict);
    assert_int_equal(ask_end(c[0]), ERR_NONE);
    assert_int_equal(ANSWER(c[0], join_reply).state, JOIN_DURABLE);
    ask_free(c[0]);
    for (int i = 0; i < 3; i++) { /* lost answers are asked for again, as often as one likes */
        struct ask *again = rig_join(&rig, &p[i], 0);
        assert_int_equal(ask_do(again), ERR_NONE);
        assert_int_equal(ANSWER(again, join_reply).state, JOIN_DURABLE);
        assert_int_equal(ANSWER(again, join_reply).sequence, 1);
        ask_free(again);
        rig_part_free(&p[i]);
    }
}

static void who_never_heard_that_it_checks_is_asked_again(void **state)
{
    (void)state;
    struct rig_part a = sealed_part(20, 0, 2), b = sealed_part(20, 1, 2);
    struct ask *first = rig_join(&rig, &a, 0);
    ask_begin(first);
    for (int i = 0; i < 5; i++) { /* as often as its connection is lost, at once */
        struct ask *second = rig_join(&rig, &b, 0);
        assert_int_equal(ask_do(second), ERR_NONE);
        assert_int_equal(ANSWER(second, join_reply).state, JOIN_CHECK);
        ask_free(second);
    }
    assert_false(first->done);
    struct ask *verdict = rig_commit(&rig, &b, ERR_NONE, "");
    assert_int_equal(ask_do(verdict), ERR_NONE);
    ask_free(verdict);
    assert_int_equal(ask_end(first), ERR_NONE);
    assert_int_equal(ANSWER(first, join_reply).state, JOIN_DURABLE);
    ask_free(first);
    rig_part_free(&a), rig_part_free(&b);
}

static void nobody_checks_and_the_save_fails(void **state)
{
    (void)state;
    rig.options.check_wait_ms = 20;
    rig.options.join_wait_max_ms = 60;
    store_rig_stop(&rig);
    assert_true(store_rig_start(&rig));
    struct rig_part a = sealed_part(20, 0, 2), b = sealed_part(20, 1, 2);
    struct ask *first = rig_join(&rig, &a, 0), *second = rig_join(&rig, &b, 0);
    ask_begin(first);
    ask_begin(second);
    assert_int_equal(finish(second), ERR_NONE);
    assert_int_equal(finish(first), ERR_NONE); /* asked second; then nobody waits any more */
    store_rig_sleep(&rig, 150);
    struct ask *again = rig_join(&rig, &a, 0);
    assert_int_equal(ask_do(again), ERR_TIMEOUT);
    assert_non_null(strstr(rig.err.text, "none checked"));
    ask_free(again);
    rig_part_free(&a), rig_part_free(&b);
}

static void an_abort_reaches_every_rank(void **state)
{
    (void)state;
    struct rig_part a = sealed_part(20, 0, 3), writing = part_of(20, 1, 3), later = part_of(20, 2, 3);
    struct ask *c = rig_create(&rig, &writing), *join = rig_join(&rig, &a, 0);
    assert_int_equal(ask_do(c), ERR_NONE);
    ask_free(c);
    ask_begin(join);
    c = ASK(&rig, OP_SAVE_ABORT, save_abort, .run_id = run, .step = 20, .attempt = attempt, .rank = 1,
            .text = slice_str("out of host memory"));
    assert_int_equal(ask_do(c), ERR_NONE);
    ask_free(c);
    assert_int_equal(finish(join), ERR_CANCELLED);
    assert_non_null(strstr(rig.err.text, "rank 1 gave up the save of step 20: out of host memory"));
    c = rig_chunk(&rig, &writing, 0);
    assert_int_equal(ask_do(c), ERR_CANCELLED);
    ask_free(c);
    c = rig_create(&rig, &later);
    assert_int_equal(ask_do(c), ERR_CANCELLED);
    ask_free(c);
    assert_int_equal(rig_save(&rig, &run, &attempt, 20, 3, NULL, NULL), ERR_NONE); /* and again, well */
    struct store_stats stats;
    store_stats(rig.store, &stats);
    assert_int_equal(stats.reserved_bytes, 0);
    rig_part_free(&a), rig_part_free(&writing), rig_part_free(&later);
}

/* C4: leftovers of an older attempt cannot finish the save of a newer one. */
static void an_older_attempt_is_fenced_everywhere(void **state)
{
    (void)state;
    struct rig_part sealed = sealed_part(20, 0, 2), open = part_of(20, 1, 2);
    struct ask *c = rig_create(&rig, &open), *join = rig_join(&rig, &sealed, 0);
    struct id newer = store_rig_id(&rig);
    uint64_t number = 0;
    assert_int_equal(ask_do(c), ERR_NONE);
    ask_free(c);
    ask_begin(join);
    assert_int_equal(rig_attempt(&rig, &run, &attempt, 2, &number), ERR_NONE);
    assert_int_equal(number, 1);
    assert_int_equal(rig_attempt(&rig, &run, &attempt, 3, NULL), ERR_MISMATCH);
    assert_int_equal(rig_attempt(&rig, &run, &newer, 2, &number), ERR_NONE);
    assert_int_equal(number, 2);
    assert_int_equal(finish(join), ERR_FENCED);
    struct ask *all[] = {rig_chunk(&rig, &open, 0),
                         rig_index(&rig, &open, 0, open.index.n),
                         rig_seal(&rig, &open),
                         rig_create(&rig, &open),
                         rig_join(&rig, &sealed, 0),
                         rig_commit(&rig, &sealed, ERR_NONE, ""),
                         ASK(&rig, OP_SAVE_ABORT, save_abort, .run_id = run, .step = 20, .attempt = attempt)};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        assert_int_equal(ask_do(all[i]), ERR_FENCED);
        assert_non_null(strstr(rig.err.text, "replaced by attempt 2"));
        ask_free(all[i]);
    }
    assert_int_equal(rig_attempt(&rig, &run, &attempt, 2, NULL), ERR_FENCED);
    attempt = newer;
    assert_int_equal(rig_save(&rig, &run, &attempt, 20, 2, NULL, NULL), ERR_NONE);
    rig_part_free(&sealed), rig_part_free(&open);
}

/* C3 */
static void the_same_step_again_is_a_new_sequence(void **state)
{
    (void)state;
    struct msg_commit_item items[16];
    uint64_t sequence = 0;
    assert_int_equal(rig_save(&rig, &run, &attempt, 20, 2, NULL, NULL), ERR_NONE);
    attempt = store_rig_id(&rig);
    assert_int_equal(rig_attempt(&rig, &run, &attempt, 2, NULL), ERR_NONE);
    struct rig_part half = sealed_part(20, 0, 2);
    struct ask *join = rig_join(&rig, &half, 0);
    ask_begin(join);
    assert_int_equal(commits(true, items), 2); /* the old one, and the pending one */
    assert_int_equal(items[0].sequence, 1);
    assert_int_equal(items[1].state, COMMIT_PENDING);
    assert_int_equal(items[1].sequence, 0);
    assert_int_equal(items[1].parts, 1);
    assert_int_equal(items[1].attempt_number, 2);
    store_cancel(rig.store, &join->op);
    assert_int_equal(finish(join), ERR_CANCELLED);
    struct rig_part other = sealed_part(20, 1, 2);
    join = rig_join(&rig, &other, 0);
    assert_int_equal(ask_do(join), ERR_NONE);
    assert_int_equal(ANSWER(join, join_reply).state, JOIN_CHECK);
    assert_int_equal(ANSWER(join, join_reply).reference, 1);
    ask_free(join);
    struct ask *c = rig_commit(&rig, &other, ERR_NONE, "");
    assert_int_equal(ask_do(c), ERR_NONE);
    sequence = ANSWER(c, commit_reply).sequence;
    ask_free(c);
    assert_int_equal(sequence, 2);
    c = rig_commit(&rig, &other, ERR_NONE, ""); /* told twice */
    assert_int_equal(ask_do(c), ERR_NONE);
    assert_int_equal(ANSWER(c, commit_reply).sequence, 2);
    ask_free(c);
    rig_part_free(&half), rig_part_free(&other);
}

static struct ask *join_with(const struct rig_part *p, const char *loader, const char *labels,
                             size_t labels_bytes)
{
    struct msg_join m = {.run_id = p->run,
                         .step = p->step,
                         .attempt = p->attempt,
                         .rank = p->rank,
                         .world = p->world,
                         .segment = p->segment,
                         .segment_bytes = p->file_bytes,
                         .plain_bytes = 1000,
                         .loader = slice_str(loader),
                         .labels = SLICE(labels, labels_bytes)};
    memcpy(m.index_digest.bytes, p->index_digest, SHA256_BYTES);
    struct ask *c = ask_new(&rig, OP_JOIN);
    msg_join_encode(&m, &c->payload);
    return c;
}

static void loader_and_labels_are_gathered(void **state)
{
    (void)state;
    struct rig_part p[3] = {sealed_part(20, 0, 3), sealed_part(20, 1, 3), sealed_part(20, 2, 3)};
    struct ask *c[3] = {join_with(&p[0], "", "\1\0k\1\0v", 6),
                        join_with(&p[1], "position", "\1\0k\1\0v\1\0x\0\0", 11),
                        join_with(&p[2], "position", "", 0)};
    for (int i = 0; i < 3; i++)
        ask_begin(c[i]);
    assert_int_equal(finish(c[2]), ERR_NONE);
    struct ask *verdict = rig_commit(&rig, &p[2], ERR_NONE, "");
    assert_int_equal(ask_do(verdict), ERR_NONE);
    ask_free(verdict);
    finish(c[0]), finish(c[1]);
    struct ask *get = ASK(&rig, OP_COMMIT_GET, commit_get, .kind = RUN_CHECKPOINTS,
                          .name = slice_str("llm/base"), .select = SELECT_STEP, .value = 20);
    assert_int_equal(ask_do(get), ERR_NONE);
    struct msg_commit_get_reply reply = ANSWER(get, commit_get_reply);
    struct commit record;
    assert_int_equal(commit_decode(reply.record.p, reply.record.n, &record, NULL), 0);
    assert_true(slice_eq(record.loader, slice_str("position")));
    assert_true(slice_eq(record.labels, SLICE("\1\0k\1\0v\1\0x\0\0", 11)));
    assert_int_equal(record.plain_bytes, 3000);
    commit_free(&record);
    ask_free(get);
    for (int i = 0; i < 3; i++)
        rig_part_free(&p[i]);
}

static void different_loaders_fail_the_save_naming_ranks(void **state)
{
    (void)state;
    struct rig_part p[2] = {sealed_part(20, 0, 2), sealed_part(20, 1, 2)};
    struct ask *first = join_with(&p[0], "position 7", "", 0),
               *second = join_with(&p[1], "position 8", "", 0);
    ask_begin(first);
    ask_begin(second);
    assert_int_equal(finish(first), ERR_MISMATCH);
    assert_non_null(strstr(rig.err.text, "ranks 0 and 1"));
    assert_int_equal(finish(second), ERR_MISMATCH);
    rig_part_free(&p[0]), rig_part_free(&p[1]);
}

static void joins_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    struct rig_part a = sealed_part(20, 0, 2), open = part_of(20, 1, 2), x;
    struct ask *c = rig_create(&rig, &open);
    assert_int_equal(ask_do(c), ERR_NONE);
    ask_free(c);
    x = a, x.rank = 1;
    c = rig_join(&rig, &x, 0);
    assert_int_equal(ask_do(c), ERR_MISMATCH);
    ask_free(c);
    x = a, x.step = 21;
    c = rig_join(&rig, &x, 0);
    assert_int_equal(ask_do(c), ERR_MISMATCH);
    ask_free(c);
    x = a, x.index_digest[0] ^= 1;
    c = rig_join(&rig, &x, 0);
    assert_int_equal(ask_do(c), ERR_MISMATCH);
    ask_free(c);
    x = a, x.world = 0;
    c = rig_join(&rig, &x, 0);
    assert_int_equal(ask_do(c), ERR_INVALID);
    ask_free(c);
    x = a, x.segment.bytes[3] ^= 1;
    c = rig_join(&rig, &x, 0);
    assert_int_equal(ask_do(c), ERR_NOT_FOUND);
    ask_free(c);
    c = rig_join(&rig, &open, 0);
    assert_int_equal(ask_do(c), ERR_INVALID);
    ask_free(c);
    x = a, x.attempt.bytes[0] ^= 1;
    c = rig_join(&rig, &x, 0);
    assert_int_equal(ask_do(c), ERR_NOT_FOUND);
    ask_free(c);
    c = rig_commit(&rig, &a, ERR_NONE, ""); /* nobody has joined */
    assert_int_equal(ask_do(c), ERR_NOT_FOUND);
    ask_free(c);
    struct ask *join = rig_join(&rig, &a, 0);
    ask_begin(join);
    c = rig_commit(&rig, &a, ERR_NONE, ""); /* not all have */
    assert_int_equal(ask_do(c), ERR_BUSY);
    assert_non_null(strstr(rig.err.text, "rank 1 of 2 has not joined"));
    ask_free(c);
    store_cancel(rig.store, &join->op);
    assert_int_equal(finish(join), ERR_CANCELLED);
    rig_part_free(&a), rig_part_free(&open);
}

static void stopping_fails_who_waits(void **state)
{
    (void)state;
    struct rig_part a = sealed_part(20, 0, 2), open = part_of(20, 1, 2);
    struct ask *c = rig_create(&rig, &open), *join = rig_join(&rig, &a, 0);
    assert_int_equal(ask_do(c), ERR_NONE);
    ask_free(c);
    ask_begin(join);
    store_rig_stop(&rig);
    assert_true(join->done);
    assert_int_equal(finish(join), ERR_CANCELLED);
    assert_true(store_rig_start(&rig)); /* the sealed part is still there, and may join again */
    struct rig_part b = sealed_part(20, 1, 2);
    join = rig_join(&rig, &a, 0);
    ask_begin(join);
    c = rig_join(&rig, &b, 0);
    assert_int_equal(ask_do(c), ERR_NONE);
    assert_int_equal(ANSWER(c, join_reply).state, JOIN_CHECK);
    ask_free(c);
    c = rig_commit(&rig, &b, ERR_NONE, "");
    assert_int_equal(ask_do(c), ERR_NONE);
    ask_free(c);
    assert_int_equal(finish(join), ERR_NONE);
    rig_part_free(&a), rig_part_free(&b), rig_part_free(&open);
}

/* One process writes all shards and holds few joins at a time: a cancelled join has joined. */
static void a_dataset_is_committed_by_one_client(void **state)
{
    (void)state;
    enum { SHARDS = 40, OPEN = 4 };
    struct rig_part p[SHARDS];
    struct ask *joins[SHARDS];
    struct msg_commit_item items[16];
    uint64_t sequence = 0;
    for (int version = 1; version <= 2; version++) {
        struct id import = store_rig_id(&rig);
        assert_int_equal(rig_run_open(&rig, RUN_DATASET, "tiles", version == 1, &run), ERR_NONE);
        assert_int_equal(rig_attempt(&rig, &run, &import, 1, NULL), ERR_NONE);
        for (uint32_t i = 0; i < SHARDS; i++) {
            p[i] = (struct rig_part){
                .run = run, .attempt = import, .step = 0, .rank = i, .world = SHARDS, .chunks = 1};
            rig_part_make(&rig, &p[i]);
            assert_int_equal(rig_part_write(&rig, &p[i]), ERR_NONE);
            ask_begin(joins[i] = rig_join(&rig, &p[i], 0));
            if (i >= OPEN)
                store_cancel(rig.store, &joins[i - OPEN]->op);
        }
        assert_int_equal(ask_end(joins[SHARDS - 1]), ERR_NONE);
        assert_int_equal(ANSWER(joins[SHARDS - 1], join_reply).state, JOIN_CHECK);
        struct ask *c = rig_commit(&rig, &p[0], ERR_NONE, "");
        assert_int_equal(ask_do(c), ERR_NONE);
        sequence = ANSWER(c, commit_reply).sequence;
        assert_int_equal(sequence, version);
        ask_free(c);
        for (int i = 0; i < SHARDS; i++) {
            assert_int_equal(ask_end(joins[i]), i < SHARDS - OPEN ? ERR_CANCELLED : ERR_NONE);
            ask_free(joins[i]);
            rig_part_free(&p[i]);
        }
    }
    assert_int_equal(rig_commits(&rig, RUN_DATASET, "tiles", true, items, 16), 2);
    assert_int_equal(items[0].parts, SHARDS);
    struct ask *c =
        ASK(&rig, OP_PRUNE, prune, .kind = RUN_DATASET, .name = slice_str("tiles"), .keep_last = 2);
    assert_int_equal(ask_do(c), ERR_NONE);
    assert_int_equal(ANSWER(c, prune_reply).freed_bytes, 0); /* versions do not replace each other */
    ask_free(c);
}

#define ON_A_STORE(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON_A_STORE(a_save_becomes_durable_on_all_ranks),
        ON_A_STORE(a_late_rank_is_named),
        ON_A_STORE(the_request_s_deadline_ends_the_request_alone),
        ON_A_STORE(one_rank_is_asked_and_all_hear_its_verdict),
        ON_A_STORE(another_rank_is_asked_when_one_is_silent),
        ON_A_STORE(who_never_heard_that_it_checks_is_asked_again),
        ON_A_STORE(nobody_checks_and_the_save_fails),
        ON_A_STORE(an_abort_reaches_every_rank),
        ON_A_STORE(an_older_attempt_is_fenced_everywhere),
        ON_A_STORE(the_same_step_again_is_a_new_sequence),
        ON_A_STORE(loader_and_labels_are_gathered),
        ON_A_STORE(different_loaders_fail_the_save_naming_ranks),
        ON_A_STORE(joins_that_do_not_fit_are_refused),
        ON_A_STORE(a_dataset_is_committed_by_one_client),
        ON_A_STORE(stopping_fails_who_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
