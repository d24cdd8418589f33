/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: what is served after a restart is what is on the medium; what is damaged there is named, skipped, and
 * never removed with what may belong to it. Method: stores with a history, changed behind their back,
 * reopened.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/base/log.h"
#include "format/commit.h"
#include "tests/support/store_rig.h"

#define NAME "llm"

static struct store_rig rig;
static struct id run, attempt;
static char logged[1 << 16];

static void keep_line(void *arg, enum log_level level, const char *line)
{
    (void)arg;
    (void)level;
    size_t n = strlen(logged);
    snprintf(logged + n, sizeof logged - n, "%s\n", line);
}

static int begin(enum store_rig_kind kind)
{
    store_rig_open(&rig, kind, 17);
    logged[0] = 0;
    if (!store_rig_start(&rig))
        return -1;
    attempt = store_rig_id(&rig);
    return rig_tenant_add(&rig, "acme", 0) || rig_run_open(&rig, RUN_CHECKPOINTS, NAME, true, &run) ||
           rig_attempt(&rig, &run, &attempt, 2, NULL);
}

static int on_memory(void **state)
{
    (void)state;
    return begin(STORE_ON_MEMORY);
}

static int on_folder(void **state)
{
    (void)state;
    return begin(STORE_ON_FOLDER);
}

static int teardown(void **state)
{
    (void)state;
    store_rig_close(&rig);
    return 0;
}

static struct store_stats restart(void)
{
    struct store_stats stats;
    store_rig_stop(&rig);
    if (!store_rig_start(&rig))
        fail_msg("%s", rig.err.text);
    store_rig_sleep(&rig, 30); /* what start has found useless goes in the background */
    store_stats(rig.store, &stats);
    return stats;
}

static size_t commits(bool pending, struct msg_commit_item *items)
{
    return rig_commits(&rig, RUN_CHECKPOINTS, NAME, pending, items, 16);
}

static enum err_class once(struct ask *c)
{
    enum err_class class = ask_do(c);
    ask_free(c);
    return class;
}

static struct rig_part sealed_part(uint64_t step, uint32_t rank, uint32_t world)
{
    struct rig_part p = {
        .run = run, .attempt = attempt, .step = step, .rank = rank, .world = world, .chunks = 2};
    rig_part_make(&rig, &p);
    assert_int_equal(rig_part_write(&rig, &p), ERR_NONE);
    return p;
}

static enum err_class mark(uint64_t sequence, unsigned action, const char *reason)
{
    return once(ASK(&rig, OP_MARK, mark, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME),
                    .sequence = sequence, .action = (uint8_t)action, .reason = slice_str(reason)));
}

static bool reason_is(uint64_t sequence, const char *text)
{
    struct ask *c = ASK(&rig, OP_COMMIT_GET, commit_get, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME),
                        .select = SELECT_SEQUENCE, .value = sequence);
    assert_int_equal(ask_do(c), ERR_NONE);
    struct msg_commit_get_reply m = ANSWER(c, commit_get_reply);
    bool same = m.reason.n == strlen(text) && memcmp(m.reason.p, text, m.reason.n) == 0;
    ask_free(c);
    return same;
}

static enum err_class get(enum commit_select select, uint64_t value)
{
    return once(ASK(&rig, OP_COMMIT_GET, commit_get, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME),
                    .select = (uint8_t)select, .value = value));
}

static void a_restart_changes_nothing(void **state)
{
    (void)state;
    struct msg_commit_item before[16], after[16];
    struct store_stats then, now;
    for (uint64_t step = 10; step <= 50; step += 10)
        assert_int_equal(rig_save(&rig, &run, &attempt, step, 2, NULL, NULL), ERR_NONE);
    assert_int_equal(mark(2, MARK_ACTION_PIN, "for the paper"), ERR_NONE);
    assert_int_equal(mark(4, MARK_ACTION_BAD, "loss was NaN"), ERR_NONE);
    assert_int_equal(commits(true, before), 5);
    store_stats(rig.store, &then);
    now = restart();
    assert_int_equal(commits(true, after), 5);
    struct buf encoded[2] = {{0}, {0}};
    for (int i = 0; i < 5; i++) {
        msg_commit_item_encode(&before[i], &encoded[0]);
        msg_commit_item_encode(&after[i], &encoded[1]);
    }
    assert_int_equal(encoded[0].n, encoded[1].n);
    assert_memory_equal(encoded[0].p, encoded[1].p, encoded[0].n);
    buf_free(&encoded[0]), buf_free(&encoded[1]);
    assert_int_equal(now.stored_bytes, then.stored_bytes);
    assert_memory_equal(&now.store_id, &then.store_id, sizeof now.store_id);
    assert_int_equal(now.damaged_objects, 0);
    assert_int_equal(after[1].pinned, 1);
    assert_true(reason_is(2, "for the paper"));
    assert_true(reason_is(3, ""));
    assert_true(reason_is(4, "loss was NaN"));
    assert_int_equal(after[3].state, COMMIT_BAD);
    assert_int_equal(rig_save(&rig, &run, &attempt, 60, 2, NULL, NULL), ERR_NONE);
    assert_int_equal(commits(false, after), 6);
    assert_int_equal(after[5].sequence, 6);
}

static void sealed_parts_of_the_live_attempt_wait_for_their_ranks(void **state)
{
    (void)state;
    struct msg_commit_item items[16];
    struct rig_part a = sealed_part(10, 0, 2), b = sealed_part(10, 1, 2);
    struct store_stats stats = restart();
    assert_int_equal(stats.stored_bytes, a.file_bytes + b.file_bytes);
    assert_int_equal(commits(true, items), 1);
    assert_int_equal(items[0].state, COMMIT_PENDING);
    struct ask *first = rig_join(&rig, &a, 0), *second = rig_join(&rig, &b, 0);
    ask_begin(first);
    assert_int_equal(once(second), ERR_NONE);
    assert_int_equal(once(rig_commit(&rig, &b, ERR_NONE, "")), ERR_NONE);
    assert_int_equal(ask_end(first), ERR_NONE);
    ask_free(first);
    struct rig_part old = sealed_part(20, 0, 2); /* and those of an attempt that was replaced do not */
    struct id newer = store_rig_id(&rig);
    assert_int_equal(once(ASK(&rig, OP_ATTEMPT, attempt, .run_id = run, .attempt = newer, .world = 2)),
                     ERR_NONE);
    stats = restart();
    assert_int_equal(stats.stored_bytes, a.file_bytes + b.file_bytes);
    rig_part_free(&a), rig_part_free(&b), rig_part_free(&old);
}

/* C1: killed in the middle of a save. */
static void a_half_saved_step_is_not_there(void **state)
{
    (void)state;
    struct msg_commit_item items[16];
    assert_int_equal(rig_save(&rig, &run, &attempt, 10, 2, NULL, NULL), ERR_NONE);
    struct rig_part a = sealed_part(20, 0, 2);
    restart();
    attempt = store_rig_id(&rig);
    assert_int_equal(rig_attempt(&rig, &run, &attempt, 2, NULL), ERR_NONE);
    assert_int_equal(commits(false, items), 1);
    assert_int_equal(items[0].step, 10);
    assert_int_equal(rig_save(&rig, &run, &attempt, 20, 2, NULL, NULL), ERR_NONE);
    assert_int_equal(commits(true, items), 2);
    rig_part_free(&a);
}

static void a_damaged_commit_record_is_named_and_its_parts_stay(void **state)
{
    (void)state;
    struct msg_commit_item items[16];
    struct store_stats stats, before;
    assert_int_equal(rig_save(&rig, &run, &attempt, 10, 2, NULL, NULL), ERR_NONE);
    assert_int_equal(rig_save(&rig, &run, &attempt, 20, 2, NULL, NULL), ERR_NONE);
    store_stats(rig.store, &before);
    rig_object_flip(&rig, rig_object(&rig, &run, "c-0000000000000002"), 60, 4);
    stats = restart();
    assert_int_equal(stats.damaged_objects, 1);
    assert_non_null(strstr(logged, "c-0000000000000002"));
    assert_int_equal(commits(false, items),
                     2); /* the older one is offered, the damaged one not passed over */
    assert_int_equal(items[0].step, 10);
    assert_int_equal(items[0].state, COMMIT_GOOD);
    assert_int_equal(items[1].sequence, 2);
    assert_int_equal(items[1].state, COMMIT_BAD);
    assert_int_equal(items[1].world, 0);
    assert_int_equal(get(SELECT_LATEST, 0), ERR_NONE);
    assert_int_equal(get(SELECT_SEQUENCE, 1), ERR_NONE);
    assert_int_equal(get(SELECT_SEQUENCE, 2), ERR_CORRUPT);
    assert_int_equal(get(SELECT_SEQUENCE, 3), ERR_NOT_FOUND);
    assert_int_equal(get(SELECT_STEP, 20), ERR_CORRUPT); /* it may be that one */
    assert_int_equal(mark(2, MARK_ACTION_BAD, "found by a scrub"), ERR_NONE);
    assert_int_equal(mark(2, MARK_ACTION_PIN, ""), ERR_NOT_FOUND);
    struct id newer = store_rig_id(&rig); /* nothing takes its parts away */
    assert_int_equal(rig_attempt(&rig, &run, &newer, 2, NULL), ERR_NONE);
    attempt = newer;
    uint64_t sequence = 0;
    assert_int_equal(rig_save(&rig, &run, &attempt, 30, 2, &sequence, NULL), ERR_NONE);
    assert_int_equal(sequence, 3); /* and nothing its number */
    stats = restart();
    assert_true(stats.stored_bytes > before.stored_bytes);
    rig_object_flip(&rig, rig_object(&rig, &run, "c-0000000000000002"), 60, 4); /* repaired from a copy */
    stats = restart();
    assert_int_equal(stats.damaged_objects, 0);
    assert_int_equal(commits(false, items), 3);
    for (int i = 0; i < 3; i++)
        assert_int_equal(items[i].state, COMMIT_GOOD);
}

/* Found by the simulator's campaign: with its only commit record unreadable, a run looked as if nothing had
 * been committed yet, and a job would have begun from nothing. */
static void a_run_that_cannot_be_read_is_not_empty(void **state)
{
    (void)state;
    assert_int_equal(rig_save(&rig, &run, &attempt, 10, 2, NULL, NULL), ERR_NONE);
    rig_object_flip(&rig, rig_object(&rig, &run, "c-0000000000000001"), 60, 4);
    restart();
    for (unsigned select = SELECT_LATEST; select <= SELECT_LATEST_GOOD; select += 3)
        assert_int_equal(once(ASK(&rig, OP_COMMIT_GET, commit_get, .kind = RUN_CHECKPOINTS,
                                  .name = slice_str(NAME), .select = (uint8_t)select)),
                         ERR_CORRUPT);
    assert_non_null(strstr(rig.err.text, "could not be read"));
    assert_int_equal(rig_save(&rig, &run, &attempt, 20, 2, NULL, NULL), ERR_NONE);
    assert_int_equal(once(ASK(&rig, OP_COMMIT_GET, commit_get, .kind = RUN_CHECKPOINTS,
                              .name = slice_str(NAME), .select = SELECT_LATEST_GOOD)),
                     ERR_NONE);
}

static void a_record_of_a_later_version_is_skipped_by_name(void **state)
{
    (void)state;
    struct msg_commit_item items[16];
    struct buf record = {0};
    assert_int_equal(rig_save(&rig, &run, &attempt, 10, 1, NULL, NULL), ERR_NONE);
    assert_int_equal(record_encode(RECORD_COMMIT, 99, "later", 5, &record, NULL), 0);
    rig_object_replace(&rig, rig_object(&rig, &run, "c-0000000000000007"), record.p, record.n);
    rig_object_replace(&rig, rig_object(&rig, &run, "x-what-is-this"), "?", 1);
    struct store_stats stats = restart();
    assert_int_equal(stats.damaged_objects, 2);
    assert_non_null(strstr(logged, "c-0000000000000007"));
    assert_non_null(strstr(logged, "x-what-is-this"));
    uint64_t sequence = 0;
    assert_int_equal(rig_save(&rig, &run, &attempt, 20, 1, &sequence, NULL), ERR_NONE);
    assert_int_equal(sequence, 8);
    assert_int_equal(commits(false, items), 3);
    assert_int_equal(items[1].sequence, 7);
    assert_int_equal(items[1].state, COMMIT_BAD);
    assert_int_equal(get(SELECT_SEQUENCE, 7), ERR_VERSION);
    buf_free(&record);
}

static void a_commit_that_lost_a_segment_is_bad(void **state)
{
    (void)state;
    struct msg_commit_item items[16];
    struct rig_part parts[2][2];
    assert_int_equal(rig_save(&rig, &run, &attempt, 10, 2, NULL, NULL), ERR_NONE);
    assert_int_equal(rig_save(&rig, &run, &attempt, 20, 2, NULL, parts[0]), ERR_NONE);
    assert_int_equal(rig_save(&rig, &run, &attempt, 30, 2, NULL, parts[1]), ERR_NONE);
    rig_object_remove(&rig, rig_segment_name(&rig, &parts[0][1]));
    size_t n;
    uint8_t *p = rig_object_read(&rig, rig_segment_name(&rig, &parts[1][0]), &n);
    rig_object_replace(&rig, rig_segment_name(&rig, &parts[1][0]), p, n - BLOCK_BYTES); /* cut short */
    free(p);
    restart();
    assert_int_equal(commits(false, items), 3);
    assert_int_equal(items[0].state, COMMIT_GOOD);
    assert_int_equal(items[1].state, COMMIT_BAD);
    assert_int_equal(items[2].state, COMMIT_BAD);
    struct ask *c = ASK(&rig, OP_COMMIT_GET, commit_get, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME),
                        .select = SELECT_LATEST_GOOD);
    assert_int_equal(ask_do(c), ERR_NONE);
    struct msg_commit_get_reply reply = ANSWER(c, commit_get_reply);
    struct commit record;
    assert_int_equal(commit_decode(reply.record.p, reply.record.n, &record, NULL), 0);
    assert_int_equal(record.step, 10);
    commit_free(&record);
    ask_free(c);
    c = ASK(&rig, OP_COMMIT_GET, commit_get, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME),
            .select = SELECT_LATEST);
    assert_int_equal(ask_do(c), ERR_NONE);
    reply = ANSWER(c, commit_get_reply);
    assert_int_equal(reply.state, COMMIT_BAD);
    char reason[256];
    assert_true(slice_cstr(reply.reason, reason, sizeof reason));
    assert_non_null(strstr(reason, "of rank 0"));
    ask_free(c);
    for (int i = 0; i < 4; i++)
        rig_part_free(&parts[i / 2][i % 2]);
}

static void other_damage_does_not_stop_the_start(void **state)
{
    (void)state;
    struct id other, found;
    assert_int_equal(rig_run_open(&rig, RUN_DATASET, "tiles", true, &other), ERR_NONE);
    assert_int_equal(rig_save(&rig, &run, &attempt, 10, 1, NULL, NULL), ERR_NONE);
    struct rig_part loose = sealed_part(20, 0, 2);
    rig_object_flip(&rig, rig_segment_name(&rig, &loose), 9, 1);
    rig_object_flip(&rig, rig_object(&rig, &run, "a-0000000000000001"), 40, 1);
    char name[128] = "t/acme/n/d-", hex[65];
    uint8_t digest[SHA256_BYTES];
    sha256("tiles", 5, digest);
    hex_encode(digest, 16, hex);
    strcat(name, hex);
    rig_object_flip(&rig, name, 30, 1);
    struct store_stats stats = restart();
    assert_int_equal(stats.damaged_objects, 3);
    assert_non_null(strstr(logged, name));
    assert_int_equal(rig_run_open(&rig, RUN_DATASET, "tiles", false, &found), ERR_CORRUPT);
    assert_int_equal(rig_run_open(&rig, RUN_DATASET, "tiles", true, &found),
                     ERR_CORRUPT); /* not silently a new one */
    uint64_t number = 0;
    struct id newer = store_rig_id(&rig);
    assert_int_equal(rig_attempt(&rig, &run, &newer, 1, &number), ERR_NONE);
    assert_int_equal(number, 2); /* the damaged one keeps its number */
    rig_part_free(&loose);
}

/* As a disk that reads from another place gives it: whole, of the right number, and of another run. */
static void records_of_another_run_are_not_taken(void **state)
{
    (void)state;
    static const char *const components[] = {"a-0000000000000001", "p-0000000000000001"};
    struct id other, its = store_rig_id(&rig);
    assert_int_equal(rig_save(&rig, &run, &attempt, 1, 2, NULL, NULL), ERR_NONE);
    assert_int_equal(mark(1, MARK_ACTION_PIN, "for the paper"), ERR_NONE);
    assert_int_equal(rig_run_open(&rig, RUN_CHECKPOINTS, "other", true, &other), ERR_NONE);
    assert_int_equal(rig_attempt(&rig, &other, &its, 2, NULL), ERR_NONE);
    for (int i = 0; i < 2; i++) {
        size_t n;
        char to[300];
        snprintf(to, sizeof to, "%s", rig_object(&rig, &other, components[i]));
        uint8_t *p = rig_object_read(&rig, rig_object(&rig, &run, components[i]), &n);
        assert_non_null(p);
        rig_object_replace(&rig, to, p, n);
        free(p);
    }
    assert_int_equal(restart().damaged_objects, 2);
    assert_non_null(strstr(logged, "attempt 1 lies under another name, or is of another run"));
    assert_non_null(strstr(logged, "a mark of sequence 1 lies under another name, or is of another run"));
    uint64_t number = 0;
    assert_int_equal(rig_attempt(&rig, &other, &attempt, 2, &number), ERR_NONE);
    assert_int_equal(number, 2); /* not known there */
}

static void the_store_s_own_record_must_be_right(void **state)
{
    (void)state;
    struct buf record = {0};
    size_t n;
    uint8_t *good = rig_object_read(&rig, "store", &n);
    rig_object_flip(&rig, "store", 30, 1);
    store_rig_stop(&rig);
    assert_false(store_rig_start(&rig));
    assert_int_equal(rig.err.class, ERR_CORRUPT);
    rig.backend = backend_memory(rig.loop, rig.disk);
    assert_int_equal(record_encode(RECORD_STORE, 99, "later", 5, &record, NULL), 0);
    rig_object_replace(&rig, "store", record.p, record.n);
    bool done = false;
    backend_close(rig.backend, rig_set_flag, &done);
    store_rig_until(&rig, rig_flag_set, &done);
    rig.backend = NULL;
    assert_false(store_rig_start(&rig));
    assert_int_equal(rig.err.class, ERR_VERSION);
    rig.backend = backend_memory(rig.loop, rig.disk);
    rig_object_remove(&rig, "store");
    done = false;
    backend_close(rig.backend, rig_set_flag, &done);
    store_rig_until(&rig, rig_flag_set, &done);
    rig.backend = NULL;
    assert_false(store_rig_start(&rig)); /* tenants without a store are no new store */
    assert_int_equal(rig.err.class, ERR_CORRUPT);
    rig.backend = backend_memory(rig.loop, rig.disk);
    rig_object_replace(&rig, "store", good, n);
    done = false;
    backend_close(rig.backend, rig_set_flag, &done);
    store_rig_until(&rig, rig_flag_set, &done);
    rig.backend = NULL;
    assert_true(store_rig_start(&rig));
    free(good);
    buf_free(&record);
}

static void one_store_has_one_server(void **state)
{
    (void)state;
    struct store_rig second = rig;
    second.backend = NULL;
    second.store = NULL;
    assert_false(store_rig_start(&second));
    assert_int_equal(second.err.class, ERR_BUSY);
}

#define ON_MEMORY(f) cmocka_unit_test_setup_teardown(f, on_memory, teardown)
#define ON_FOLDER(f)                                    \
    {                                                   \
#f " on a folder", f, on_folder, teardown, NULL \
    }

int main(void)
{
    log_set_sink(keep_line, NULL, LOG_INFO);
    const struct CMUnitTest tests[] = {
        ON_MEMORY(a_restart_changes_nothing),
        ON_FOLDER(a_restart_changes_nothing),
        ON_MEMORY(sealed_parts_of_the_live_attempt_wait_for_their_ranks),
        ON_FOLDER(sealed_parts_of_the_live_attempt_wait_for_their_ranks),
        ON_MEMORY(a_half_saved_step_is_not_there),
        ON_MEMORY(a_damaged_commit_record_is_named_and_its_parts_stay),
        ON_FOLDER(a_damaged_commit_record_is_named_and_its_parts_stay),
        ON_MEMORY(a_run_that_cannot_be_read_is_not_empty),
        ON_MEMORY(a_record_of_a_later_version_is_skipped_by_name),
        ON_MEMORY(a_commit_that_lost_a_segment_is_bad),
        ON_MEMORY(other_damage_does_not_stop_the_start),
        ON_MEMORY(records_of_another_run_are_not_taken),
        ON_MEMORY(the_store_s_own_record_must_be_right),
        ON_FOLDER(one_store_has_one_server),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
