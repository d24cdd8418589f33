/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: prune removes what its plan said and nothing else, and scrub finds every changed byte and changes
 * none. Method: histories on memory and on a real folder; plans executed, repeated and outdated; bytes
 * flipped in every kind of place.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/commit.h"
#include "format/index.h"
#include "tests/support/store_rig.h"

#define NAME "llm"

static struct store_rig rig;
static struct id run, attempt;

static int begin(enum store_rig_kind kind)
{
    store_rig_open(&rig, kind, 23);
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

static int on_sim(void **state)
{
    (void)state;
    return begin(STORE_ON_SIM);
}

static int teardown(void **state)
{
    (void)state;
    store_rig_close(&rig);
    return 0;
}

static void save(uint64_t step, uint32_t world)
{
    assert_int_equal(rig_save(&rig, &run, &attempt, step, world, NULL, NULL), ERR_NONE);
}

static void mark(uint64_t sequence, unsigned action)
{
    struct ask *c = ASK(&rig, OP_MARK, mark, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME),
                        .sequence = sequence, .action = (uint8_t)action, .reason = slice_str("test"));
    assert_int_equal(ask_do(c), ERR_NONE);
    ask_free(c);
}

struct plan {
    struct msg_prune_reply reply;
    struct msg_prune_item items[16];
};

static enum err_class prune(uint32_t keep_last, bool execute, const msg_hash *digest, struct plan *out)
{
    struct ask *c = ASK(&rig, OP_PRUNE, prune, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME),
                        .keep_last = keep_last, .execute = execute);
    if (digest) {
        buf_reset(&c->payload);
        struct msg_prune m = {.kind = RUN_CHECKPOINTS,
                              .name = slice_str(NAME),
                              .keep_last = keep_last,
                              .execute = execute,
                              .plan = *digest};
        msg_prune_encode(&m, &c->payload);
    }
    enum err_class class = ask_do(c);
    if (class == ERR_NONE) {
        out->reply = ANSWER(c, prune_reply);
        struct rcur in = rcur_of(out->reply.items.p, out->reply.items.n);
        for (uint32_t i = 0; i < out->reply.count; i++)
            assert_int_equal(msg_prune_item_decode(&in, &out->items[i], NULL), 0);
        assert_int_equal(in.left, 0);
    }
    ask_free(c);
    return class;
}

static size_t commits(struct msg_commit_item *items)
{
    return rig_commits(&rig, RUN_CHECKPOINTS, NAME, true, items, 16);
}

static size_t objects(void)
{
    struct loop_names names = {0};
    size_t n = rig_object_list(&rig, rig_folder(&rig, &run), &names);
    loop_names_free(&names);
    return n;
}

static void a_plan_is_shown_then_done(void **state)
{
    (void)state;
    struct msg_commit_item items[16];
    struct plan shown, done;
    struct store_stats before, after;
    for (uint64_t step = 10; step <= 50; step += 10)
        save(step, 2);
    mark(1, MARK_ACTION_PIN);
    store_stats(rig.store, &before);
    assert_int_equal(prune(2, false, NULL, &shown), ERR_NONE);
    assert_int_equal(shown.reply.count, 5);
    static const uint8_t reasons[] = {PRUNE_KEEP_PINNED, PRUNE_REMOVE_OLD, PRUNE_REMOVE_OLD, PRUNE_KEEP_LAST,
                                      PRUNE_KEEP_LAST};
    for (int i = 0; i < 5; i++) {
        assert_int_equal(shown.items[i].reason, reasons[i]);
        assert_int_equal(shown.items[i].removed, 0);
    }
    assert_int_equal(commits(items), 5);
    size_t there = objects();
    assert_int_equal(prune(2, true, &shown.reply.plan, &done), ERR_NONE);
    assert_memory_equal(&done.reply.plan, &shown.reply.plan, sizeof done.reply.plan);
    assert_int_equal(done.items[1].removed, 1);
    assert_int_equal(done.items[0].removed, 0);
    assert_int_equal(done.reply.freed_bytes, shown.reply.freed_bytes);
    assert_int_equal(commits(items), 3);
    assert_int_equal(objects(), there - 2 * 3);
    store_stats(rig.store, &after);
    assert_int_equal(after.stored_bytes, before.stored_bytes - done.reply.freed_bytes);
    assert_int_equal(prune(2, true, &shown.reply.plan, &done), ERR_MISMATCH); /* that plan is over */
    assert_int_equal(prune(2, true, NULL, &done), ERR_NONE);
    assert_int_equal(done.reply.freed_bytes, 0);
    assert_int_equal(prune(0, false, NULL, &done), ERR_INVALID); /* no rule */
}

static void a_new_commit_makes_the_plan_stale(void **state)
{
    (void)state;
    struct msg_commit_item items[16];
    struct plan shown, done;
    save(10, 1);
    save(20, 1);
    assert_int_equal(prune(1, false, NULL, &shown), ERR_NONE);
    save(30, 1);
    assert_int_equal(prune(1, true, &shown.reply.plan, &done), ERR_MISMATCH);
    assert_int_equal(commits(items), 3);
}

/* C5: a save on its way counts for nothing, and one good commit always remains. */
static void pending_and_bad_ones_do_not_count(void **state)
{
    (void)state;
    struct msg_commit_item items[16];
    struct plan done;
    save(10, 2);
    save(20, 2);
    mark(2, MARK_ACTION_BAD);
    struct rig_part p = {.run = run, .attempt = attempt, .step = 30, .rank = 0, .world = 2, .chunks = 1};
    rig_part_make(&rig, &p);
    assert_int_equal(rig_part_write(&rig, &p), ERR_NONE);
    struct ask *join = rig_join(&rig, &p, 0);
    ask_begin(join);
    assert_int_equal(prune(1, true, NULL, &done), ERR_NONE);
    assert_int_equal(commits(items), 3);
    assert_int_equal(items[0].step, 10);
    assert_int_equal(items[2].state, COMMIT_PENDING);
    struct rig_part q = {.run = run, .attempt = attempt, .step = 30, .rank = 1, .world = 2, .chunks = 1};
    rig_part_make(&rig, &q);
    assert_int_equal(rig_part_write(&rig, &q), ERR_NONE);
    struct ask *second = rig_join(&rig, &q, 0);
    assert_int_equal(ask_do(second), ERR_NONE);
    ask_free(second);
    struct ask *c = rig_commit(&rig, &q, ERR_NONE, "");
    assert_int_equal(ask_do(c), ERR_NONE);
    ask_free(c);
    assert_int_equal(ask_end(join), ERR_NONE);
    ask_free(join);
    assert_int_equal(prune(1, true, NULL, &done), ERR_NONE);
    assert_int_equal(commits(items), 1);
    assert_int_equal(items[0].step, 30);
    rig_part_free(&p), rig_part_free(&q);
}

/* C16: what is pinned, or turns out to be the last good one, while a prune is under way stays. */
static void each_removal_looks_again(void **state)
{
    (void)state;
    struct msg_commit_item items[16];
    for (uint64_t step = 10; step <= 50; step += 10)
        save(step, 2);
    struct ask *c = ASK(&rig, OP_PRUNE, prune, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME),
                        .keep_last = 1, .execute = 1);
    struct ask *pin = ASK(&rig, OP_MARK, mark, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME),
                          .sequence = 2, .action = MARK_ACTION_PIN);
    struct ask *bad = ASK(&rig, OP_MARK, mark, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME),
                          .sequence = 5, .action = MARK_ACTION_BAD, .reason = slice_str("NaN"));
    ask_begin(c);
    ask_begin(pin);
    ask_begin(bad);
    assert_int_equal(ask_end(pin), ERR_NONE);
    assert_int_equal(ask_end(bad), ERR_NONE);
    assert_int_equal(ask_end(c), ERR_NONE);
    struct msg_prune_reply reply = ANSWER(c, prune_reply);
    struct rcur in = rcur_of(reply.items.p, reply.items.n);
    static const uint8_t removed[] = {1, 0, 1, 0, 0};
    for (int i = 0; i < 5; i++) {
        struct msg_prune_item item;
        assert_int_equal(msg_prune_item_decode(&in, &item, NULL), 0);
        assert_int_equal(item.removed, removed[i]);
    }
    ask_free(c), ask_free(pin), ask_free(bad);
    assert_int_equal(commits(items), 3);
    assert_int_equal(items[0].sequence, 2);
    assert_int_equal(items[0].pinned, 1);
    assert_int_equal(items[1].sequence, 4);
    assert_int_equal(items[1].state, COMMIT_GOOD);
    assert_int_equal(items[2].state, COMMIT_BAD);
}

/* The number of a removed commit is not given again, not even after a restart. */
static void sequences_only_rise(void **state)
{
    (void)state;
    struct msg_commit_item items[16];
    struct plan done;
    uint64_t sequence = 0;
    save(10, 1);
    save(25, 1);
    mark(2, MARK_ACTION_BAD);
    struct ask *c = ASK(&rig, OP_PRUNE, prune, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME),
                        .keep_every = 10, .execute = 1);
    assert_int_equal(ask_do(c), ERR_NONE);
    ask_free(c);
    assert_int_equal(commits(items), 1);
    store_rig_stop(&rig);
    assert_true(store_rig_start(&rig));
    assert_int_equal(rig_save(&rig, &run, &attempt, 30, 1, &sequence, NULL), ERR_NONE);
    assert_int_equal(sequence, 3);
    assert_int_equal(commits(items), 2);
    assert_int_equal(items[1].state, COMMIT_GOOD);
    (void)done;
}

static void abandoned_parts_are_offered(void **state)
{
    (void)state;
    struct msg_commit_item items[16];
    struct plan shown, done;
    rig.options.segment_idle_ms = 1000;
    store_rig_stop(&rig);
    assert_true(store_rig_start(&rig));
    save(10, 1);
    struct rig_part p = {.run = run, .attempt = attempt, .step = 20, .rank = 0, .world = 2, .chunks = 3};
    rig_part_make(&rig, &p);
    assert_int_equal(rig_part_write(&rig, &p), ERR_NONE);
    store_rig_sleep(&rig, 2000);
    assert_int_equal(commits(items), 2);
    assert_int_equal(items[1].state, COMMIT_ABANDONED);
    assert_int_equal(prune(5, false, NULL, &shown), ERR_NONE);
    assert_int_equal(shown.reply.count, 2);
    assert_int_equal(shown.items[1].reason, PRUNE_REMOVE_ABANDONED);
    assert_int_equal(shown.items[1].stored_bytes, p.file_bytes);
    assert_int_equal(prune(5, true, &shown.reply.plan, &done), ERR_NONE);
    assert_int_equal(done.reply.freed_bytes, p.file_bytes);
    assert_int_equal(commits(items), 1);
    rig_part_free(&p);
}

/* ---- scrub ---- */

struct findings {
    unsigned good, bad;
    uint32_t chunk;
    uint64_t offset, sequence;
    char object[256], text[512];
};

static void finding(struct ask *c)
{
    struct findings *f = c->arg;
    struct msg_scrub_item m = ANSWER(c, scrub_item);
    if (m.class == ERR_NONE) {
        f->good++;
        return;
    }
    f->bad++;
    f->chunk = m.chunk;
    f->offset = m.offset;
    f->sequence = m.sequence;
    assert_true(slice_cstr(m.object, f->object, sizeof f->object));
    assert_true(slice_cstr(m.text, f->text, sizeof f->text));
}

static struct findings scrub_kind(enum run_kind kind, const char *name, uint64_t sequence,
                                  enum scrub_level level)
{
    struct findings f = {0};
    struct ask *c = ASK(&rig, OP_SCRUB, scrub, .kind = (uint8_t)kind, .name = slice_str(name),
                        .sequence = sequence, .level = (uint8_t)level);
    c->frame = finding;
    c->arg = &f;
    assert_int_equal(ask_do(c), ERR_NONE);
    assert_int_equal(c->op.reply.n, 0);
    assert_int_equal(c->frames, f.good + f.bad);
    ask_free(c);
    return f;
}

static struct findings scrub(const char *name, uint64_t sequence, enum scrub_level level)
{
    return scrub_kind(RUN_CHECKPOINTS, name, sequence, level);
}

static void what_recovery_skipped_is_told_of(void **state)
{
    (void)state;
    save(10, 1);
    save(20, 1);
    rig_object_flip(&rig, rig_object(&rig, &run, "c-0000000000000002"), 60, 4);
    store_rig_stop(&rig);
    if (!store_rig_start(&rig))
        fail_msg("%s", rig.err.text);
    struct findings f = scrub(NAME, 0, SCRUB_STRUCTURE);
    assert_int_equal(f.good, 1);
    assert_int_equal(f.bad, 1);
    assert_int_equal(f.sequence, 2);
    assert_non_null(strstr(f.object, "c-0000000000000002"));
    assert_int_equal(scrub("", 0, SCRUB_DATA).bad, 1);
    assert_int_equal(scrub(NAME, 1, SCRUB_DATA).bad, 0);
}

static void a_good_store_is_all_good(void **state)
{
    (void)state;
    save(10, 2);
    save(20, 3);
    for (int level = SCRUB_STRUCTURE; level <= SCRUB_DATA; level++) {
        struct findings f = scrub("", 0, (enum scrub_level)level);
        assert_int_equal(f.good, 5);
        assert_int_equal(f.bad, 0);
        assert_int_equal(scrub(NAME, 2, (enum scrub_level)level).good, 3);
        f = scrub_kind(RUN_DATASET, "", 0, (enum scrub_level)level); /* checkpoints are no datasets */
        assert_int_equal(f.good + f.bad, 0);
    }
    struct ask *no_kind = ASK(&rig, OP_SCRUB, scrub, .kind = 3, .level = 2);
    assert_int_equal(ask_do(no_kind), ERR_INVALID);
    ask_free(no_kind);
    struct ask *c = ASK(&rig, OP_SCRUB, scrub, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME),
                        .sequence = 9, .level = 2);
    assert_int_equal(ask_do(c), ERR_NOT_FOUND);
    ask_free(c);
}

static void every_changed_byte_is_found(void **state)
{
    (void)state;
    struct rig_part part;
    assert_int_equal(rig_save(&rig, &run, &attempt, 10, 1, NULL, &part), ERR_NONE);
    char name[256];
    strcpy(name, rig_segment_name(&rig, &part));
    struct segment_trailer t;
    assert_int_equal(segment_trailer_decode(part.trailer, &t, NULL), 0);
    size_t places[] = {100,
                       3000,
                       t.index_offset + 50,
                       t.index_offset + t.index_bytes - 1,
                       t.file_bytes - 4000,
                       t.file_bytes - 1};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) { /* found at both levels */
        rig_object_flip(&rig, name, places[i], 8);
        for (int level = SCRUB_STRUCTURE; level <= SCRUB_DATA; level++) {
            struct findings f = scrub(NAME, 0, (enum scrub_level)level);
            assert_int_equal(f.good, 0);
            assert_int_equal(f.bad, 1);
            assert_int_equal(f.chunk, UINT32_MAX);
            assert_string_equal(f.object, name);
        }
        rig_object_flip(&rig, name, places[i], 8);
    }
    for (uint32_t i = 0; i < part.chunks;
         i++) { /* chunks and their padding: at level data, by number and offset */
        struct chunk_entry e;
        assert_int_equal(chunk_entry_decode(part.chunk[i].entry, i, &e, NULL), 0);
        if (e.stored_bytes == 0)
            continue;
        size_t last = (size_t)block_align(e.offset + e.stored_bytes) - 1;
        for (int k = 0; k < 2; k++) {
            size_t at = k ? last : (size_t)e.offset + 3;
            rig_object_flip(&rig, name, at, 8);
            assert_int_equal(scrub(NAME, 0, SCRUB_STRUCTURE).good, 1);
            struct findings f = scrub(NAME, 0, SCRUB_DATA);
            assert_int_equal(f.bad, 1);
            assert_int_equal(f.good, 0);
            assert_int_equal(f.chunk, i);
            assert_int_equal(f.offset, e.offset);
            rig_object_flip(&rig, name, at, 8);
        }
    }
    strcpy(name, rig_object(&rig, &run, "c-0000000000000001"));
    rig_object_flip(&rig, name, 50, 1);
    struct findings f = scrub(NAME, 0, SCRUB_STRUCTURE);
    assert_int_equal(f.bad, 1);
    assert_int_equal(f.good, 1);
    assert_string_equal(f.object, name);
    rig_object_flip(&rig, name, 50, 1);
    rig_object_remove(&rig, rig_segment_name(&rig, &part));
    f = scrub(NAME, 0, SCRUB_DATA);
    assert_int_equal(f.bad, 1);
    assert_int_equal(f.good, 0);
    rig_part_free(&part);
}

static void cancel_first(struct ask *c)
{
    store_cancel(rig.store, &c->op);
    store_continue(rig.store, &c->op); /* was on its way: harmless */
    assert_true(c->op.reply.n > 0);    /* and the frame is ours to send until then */
}

static void a_scrub_can_be_cancelled(void **state)
{
    (void)state;
    save(10, 4);
    struct ask *c =
        ASK(&rig, OP_SCRUB, scrub, .kind = RUN_CHECKPOINTS, .name = slice_str(NAME), .level = SCRUB_DATA);
    c->frame = cancel_first;
    c->stop_after_frame = true;
    assert_int_equal(ask_do(c), ERR_CANCELLED);
    assert_int_equal(c->frames, 1);
    ask_free(c);
}

#define ON_MEMORY(f) cmocka_unit_test_setup_teardown(f, on_memory, teardown)
#define ON_SIM(f)    cmocka_unit_test_setup_teardown(f, on_sim, teardown)
#define ON_FOLDER(f)                                    \
    {                                                   \
#f " on a folder", f, on_folder, teardown, NULL \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON_MEMORY(a_plan_is_shown_then_done),         ON_FOLDER(a_plan_is_shown_then_done),
        ON_MEMORY(a_new_commit_makes_the_plan_stale), ON_MEMORY(pending_and_bad_ones_do_not_count),
        ON_MEMORY(each_removal_looks_again),          ON_MEMORY(sequences_only_rise),
        ON_SIM(abandoned_parts_are_offered),          ON_MEMORY(a_good_store_is_all_good),
        ON_FOLDER(a_good_store_is_all_good),          ON_MEMORY(every_changed_byte_is_found),
        ON_FOLDER(every_changed_byte_is_found),       ON_FOLDER(what_recovery_skipped_is_told_of),
        ON_MEMORY(a_scrub_can_be_cancelled),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
