/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: what the local backend acknowledged survives a loss of power; what it did not acknowledge is there
 * whole or not at all. Method: one busy scenario (objects put, sealed and removed side by side in folders
 * that are new, or go at that moment) on the simulator, stopped by a crash after each number of events in
 * turn, for several seeds; unsynced sectors, lengths and folder entries are lost at random. Then the store is
 * opened again and looked at. The same with failing syncs: they must never be acknowledged, and keep the next
 * writer out until the power has failed, also where the process that met them has ended in good order.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/backend/backend.h"
#include "server/io/sim.h"

/* The last LATE objects are put into the folder of one that is being removed, at the same time. */
enum { OBJECTS = 20, LATE = 6, SEED_COUNT = 4, BLOCKS = 3, EVENTS_MAX = 100000 };

struct appending {
    struct backend_op op;
    struct object *o;
};

struct object {
    struct world *world;
    struct backend_op op, removal;
    struct appending append[BLOCKS];
    struct backend_file *file;
    unsigned appended;
    char name[32];
    bool small, removes, alone;
    unsigned folder;
    bool put_acked, removal_begun, removal_acked;
};

struct world {
    struct sim *sim;
    struct loop *loop;
    struct backend *b;
    struct backend_op op;
    struct object objects[OBJECTS];
    uint8_t *bytes; /* what the objects hold, aligned */
    unsigned syncs_failed;
    bool closed;
};

static size_t object_bytes(const struct object *o)
{
    return o->small ? 900 : BLOCKS * BLOCK_BYTES;
}

static uint8_t *content(struct object *o)
{
    return o->world->bytes + (o - o->world->objects) * BLOCKS * BLOCK_BYTES;
}

static void note(struct world *w, const struct backend_op *op)
{
    if (op->result == -EIO && strstr(op->err.text, "sync failed"))
        w->syncs_failed++;
}

static void removed(struct backend_op *op)
{
    struct object *o = container_of(op, struct object, removal);
    o->removal_acked = op->result == 0;
    note(o->world, op);
}

static void put(struct backend_op *op)
{
    struct object *o = container_of(op, struct object, op);
    o->put_acked = op->result == 0;
    note(o->world, op);
    if (!o->put_acked || !o->removes)
        return;
    o->removal_begun = true;
    o->removal.done = removed;
    backend_remove(o->world->b, &o->removal, o->name);
    for (unsigned i = OBJECTS - LATE; o->alone && i < OBJECTS; i++) {
        struct object *late = &o->world->objects[i];
        late->op.done = put;
        if (late->folder == o->folder)
            backend_put_new(o->world->b, &late->op, late->name, content(late), object_bytes(late));
    }
}

static void appended(struct backend_op *op)
{
    struct object *o = container_of(op, struct appending, op)->o;
    if (++o->appended < BLOCKS)
        return;
    o->op.done = put;
    backend_seal(o->world->b, &o->op, o->file, o->name); /* refused if an append failed */
}

static void created(struct backend_op *op)
{
    struct object *o = container_of(op, struct object, op);
    for (unsigned i = 0; op->result == 0 && i < BLOCKS; i++) {
        o->append[i].o = o;
        o->append[i].op.done = appended;
        backend_append(o->world->b, &o->append[i].op, o->file, i * BLOCK_BYTES, content(o) + i * BLOCK_BYTES,
                       BLOCK_BYTES);
    }
}

static void opened(struct backend_op *op)
{
    struct world *w = container_of(op, struct world, op);
    for (size_t i = 0; op->result == 0 && i < OBJECTS - LATE; i++) {
        struct object *o = &w->objects[i];
        o->op.done = o->small ? put : created;
        if (o->small)
            backend_put_new(w->b, &o->op, o->name, content(o), object_bytes(o));
        else
            backend_create(w->b, &o->op, 1 << 20, &o->file);
    }
}

static void world_open(struct world *w, uint64_t seed, const struct sim_faults *faults)
{
    memset(w, 0, sizeof *w);
    w->sim = sim_create(&(struct sim_options){.seed = seed, .faults = *faults});
    w->loop = sim_loop(w->sim, 0);
    assert_int_equal(posix_memalign((void **)&w->bytes, BLOCK_BYTES, OBJECTS * BLOCKS * BLOCK_BYTES), 0);
    for (size_t i = 0; i < OBJECTS * BLOCKS * BLOCK_BYTES; i++)
        w->bytes[i] = (uint8_t)(1 + i * 2654435761u % 255);
    for (unsigned i = 0; i < OBJECTS; i++) {
        struct object *o = &w->objects[i];
        o->world = w;
        bool late = i >= OBJECTS - LATE;
        o->alone = !late && i + 2 >= OBJECTS - LATE;
        o->small = i % 2 || late || o->alone;
        o->removes = i % 3 == 0 || o->alone;
        o->folder = i % 2;
        if (late || o->alone)
            snprintf(o->name, sizeof o->name, "q/%u/x/%u", o->folder, i);
        else
            snprintf(o->name, sizeof o->name, "r/%u/%s/%u", i % 4, o->small ? "c" : "s", i);
    }
    w->op.done = opened;
    backend_local_open(w->loop, &w->op, "store", true, &w->b);
}

static void run_on(struct world *w)
{
    assert_true(sim_run(w->sim, NULL, NULL, EVENTS_MAX) < EVENTS_MAX);
}

static void note_closed(void *arg)
{
    *(bool *)arg = true;
}

static void close_backend(struct world *w)
{
    w->closed = false;
    if (w->b) {
        backend_close(w->b, note_closed, &w->closed);
        run_on(w);
        assert_true(w->closed);
    }
    loop_destroy(w->loop);
    w->b = NULL;
}

static void world_close(struct world *w)
{
    close_backend(w);
    sim_destroy(w->sim);
    free(w->bytes);
}

static void done(struct backend_op *op)
{
    (void)op;
}

static void reopen(struct world *w)
{
    static const struct sim_faults none;
    sim_set_faults(w->sim, &none);
    w->loop = sim_loop(w->sim, 0);
    w->op = (struct backend_op){.done = done};
    backend_local_open(w->loop, &w->op, "store", true, &w->b);
    run_on(w);
    if (w->op.result)
        fail_msg("the store cannot be opened again: %s", w->op.err.text);
}

static void look_at(struct world *w, struct object *o, uint64_t seed, uint64_t events)
{
    static uint8_t got[(BLOCKS + 1) * BLOCK_BYTES];
    w->op = (struct backend_op){.done = done};
    backend_read(w->b, &w->op, o->name, false, 0, got, sizeof got);
    run_on(w);
    bool there = w->op.result >= 0, must = o->put_acked && !o->removal_begun, must_not = o->removal_acked;
    bool whole = w->op.result == (int64_t)object_bytes(o) && memcmp(got, content(o), object_bytes(o)) == 0;
    if ((must && !there) || (must_not && there) || (there && !whole) || (!there && w->op.result != -ENOENT))
        fail_msg(
            "seed %llu, crash after %llu events: %s acknowledged %d, removal %d/%d, result %lld, whole %d",
            (unsigned long long)seed, (unsigned long long)events, o->name, o->put_acked, o->removal_begun,
            o->removal_acked, (long long)w->op.result, whole);
}

/* Returns false once the scenario ended before the crash. */
static bool crash_after(uint64_t events, uint64_t seed, const struct sim_faults *faults)
{
    struct world w;
    world_open(&w, seed, faults);
    bool over = sim_run(w.sim, NULL, NULL, events) < events;
    sim_crash(w.sim, 0);
    run_on(&w);
    close_backend(&w);
    reopen(&w);
    for (unsigned i = 0; i < OBJECTS; i++)
        look_at(&w, &w.objects[i], seed, events);
    world_close(&w);
    return !over;
}

static void what_was_acknowledged_survives(void **state)
{
    (void)state;
    static const struct sim_faults faults = {.lose_unsynced = true, .short_transfer = 100000};
    for (uint64_t seed = 1; seed <= SEED_COUNT; seed++) {
        uint64_t events = 0;
        while (crash_after(events, seed, &faults))
            events++;
        assert_true(events > 200); /* it was the scenario that ran, not a shadow of it */
    }
}

/* A sync fails now and then: it is told, and nothing of it is acknowledged. */
static void failed_syncs_are_told(void **state)
{
    (void)state;
    static const struct sim_faults faults = {.lose_unsynced = true, .sync_error = 10000};
    unsigned syncs_failed = 0, acked = 0;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        struct world w;
        world_open(&w, seed, &faults);
        run_on(&w);
        for (unsigned i = 0; i < OBJECTS; i++)
            acked += w.objects[i].put_acked;
        syncs_failed += w.syncs_failed;
        sim_crash(w.sim, 0);
        run_on(&w);
        close_backend(&w);
        reopen(&w);
        for (unsigned i = 0; i < OBJECTS; i++) {
            struct object *o = &w.objects[i];
            if (o->put_acked)
                look_at(&w, o, seed, 0);
        }
        world_close(&w);
    }
    assert_true(syncs_failed > 10 && acked > 100);
}

/* What memory shows after a failed sync is not taken for what is on the disk by whoever opens the store next.
 */
static void a_failed_sync_outlives_its_process(void **state)
{
    (void)state;
    static const struct sim_faults faults = {.lose_unsynced = true, .sync_error = 20000}, none;
    unsigned refused = 0, opened_at_once = 0;
    for (uint64_t seed = 1; seed <= 100; seed++) {
        struct world w;
        uint8_t *p;
        size_t n;
        world_open(&w, seed, &faults);
        run_on(&w);
        bool failed = sim_struck(w.sim)->sync_error > 0;
        sim_set_faults(w.sim, &none);
        close_backend(&w);
        for (int i = 0; i < 2 && failed; i++) { /* being refused changes nothing */
            w.loop = sim_loop(w.sim, 0);
            w.op = (struct backend_op){.done = done};
            backend_local_open(w.loop, &w.op, "store", true, &w.b);
            run_on(&w);
            assert_null(w.b);
            assert_int_equal(w.op.err.class, ERR_READ_ONLY);
            assert_non_null(strstr(w.op.err.text, "reboot"));
            assert_non_null(strstr(w.op.err.text, "failed-sync.node0-0"));
            loop_destroy(w.loop);
            refused++;
        }
        opened_at_once += !failed;
        if (failed) {
            w.loop = sim_loop(w.sim, 0);
            sim_crash(w.sim, 0);
            run_on(&w);
            loop_destroy(w.loop);
        }
        reopen(&w);
        assert_int_equal(sim_file(w.sim, 0, "store/failed-sync.node0-0", false, &p, &n), -ENOENT);
        for (unsigned i = 0; i < OBJECTS; i++) {
            struct object *o = &w.objects[i];
            if (o->put_acked)
                look_at(&w, o, seed, 0);
        }
        world_close(&w);
    }
    assert_true(refused > 40 && opened_at_once > 10);
}

static void io_noted(struct io_op *io)
{
    (void)io;
}

static int64_t io_wait(struct world *w, struct io_op *io)
{
    run_on(w);
    return io->result;
}

static size_t listed_in_k(struct world *w)
{
    struct loop_names names = {0};
    w->op = (struct backend_op){.done = done};
    backend_list(w->b, &w->op, "k", &names);
    run_on(w);
    assert_int_equal(w->op.result, 0);
    size_t count = names.count;
    loop_names_free(&names);
    return count;
}

/* A writer killed between a link and the sync of its folder: once the next writer has listed the name, and so
 * may build on it, a loss of power cannot take it. */
static void what_a_writer_lists_is_durable(void **state)
{
    (void)state;
    static const struct sim_faults quiet = {.lose_unsynced = true};
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct world w;
        struct io_op io = {.done = io_noted};
        world_open(&w, seed, &quiet);
        run_on(&w);
        close_backend(&w);
        w.loop = sim_loop(w.sim, 0);
        loop_mkdir(w.loop, &io, "store/objects/k", 0700);
        assert_int_equal(io_wait(&w, &io), 0);
        loop_open(w.loop, &io, "store/objects/k/x", O_CREAT | O_EXCL | O_RDWR, 0600);
        int fd = (int)io_wait(&w, &io);
        assert_true(fd >= 0);
        loop_fdatasync(w.loop, &io, fd);
        assert_int_equal(io_wait(&w, &io), 0);
        loop_close(w.loop, &io, fd);
        assert_int_equal(io_wait(&w, &io), 0);
        loop_destroy(w.loop);
        reopen(&w);
        assert_int_equal(listed_in_k(&w), 1);
        sim_set_faults(w.sim, &quiet);
        sim_crash(w.sim, 0);
        run_on(&w);
        close_backend(&w);
        reopen(&w);
        assert_int_equal(listed_in_k(&w), 1);
        world_close(&w);
    }
}

/* Reads and writes that fail, and a full disk: errors are told, nothing is half there, the backend closes. */
static void faults_of_the_disk(void **state)
{
    (void)state;
    static const struct sim_faults faults = {
        .write_error = 20000, .write_no_space = 20000, .short_transfer = 200000, .stall_ms_max = 20};
    unsigned acked = 0;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        struct world w;
        world_open(&w, seed, &faults);
        run_on(&w);
        for (unsigned i = 0; i < OBJECTS; i++)
            acked += w.objects[i].put_acked;
        close_backend(&w);
        reopen(&w);
        for (unsigned i = 0; i < OBJECTS; i++)
            look_at(&w, &w.objects[i], seed, 0);
        world_close(&w);
    }
    assert_true(acked > 60 * OBJECTS / 2 && acked < 60 * OBJECTS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_acknowledged_survives),
        cmocka_unit_test(failed_syncs_are_told),
        cmocka_unit_test(a_failed_sync_outlives_its_process),
        cmocka_unit_test(what_a_writer_lists_is_durable),
        cmocka_unit_test(faults_of_the_disk),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
