/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a feed hands out exactly the samples that the order names, byte for byte, whatever connections and
 * servers do; its memory is bounded while the consumer pauses; damage is failed or left out as asked.
 * Method: a server in memory that serves a published directory of known tar shards, cuts connections, goes
 * away and comes back, and fails reads. Imported datasets go through the same feed in dataset_import.c.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/clock.h"
#include "client/feed_private.h"
#include "tests/support/feed_world.h"

#define RECONNECT_MS 5000u

/* Takes one batch, checks its samples against the corpus and counts them by position. 0: the end. */
static int take_batch(struct feed_world *w, struct larder_feed *f, uint32_t *seen)
{
    struct larder_batch *b = NULL;
    struct larder_error e = {0};
    int rc = larder_feed_next(f, 20000, &b, &e);
    if (rc < 0)
        fail_msg("%s", e.text);
    for (size_t i = 0; rc == 1 && i < larder_batch_samples(b); i++) {
        struct larder_sample s;
        assert_int_equal(larder_batch_sample(b, i, &s), 0);
        corpus_check(&w->corpus, &s);
        seen[s.position]++;
    }
    larder_batch_release(b);
    return rc;
}

static void assert_all_seen(const struct feed_world *w, const uint32_t *seen, uint64_t epochs)
{
    uint64_t n = corpus_samples(&w->corpus), whole = n / 12 * 12;
    for (uint64_t i = 0; i < n * epochs; i++)
        assert_int_equal(seen[i], i % n < whole);
}

static void hands_out_what_the_order_names(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 7, 20, 3000, RECONNECT_MS);
    struct order *order;
    struct err e;
    assert_int_equal(order_create(w.corpus.counts, 7, 99, 3, &order, &e), 0);
    struct larder_feed_options o = world_options();
    struct larder_feed *f = world_feed(&w, &o);
    struct larder_batch *b;
    uint64_t position = 0;
    while (larder_feed_next(f, 20000, &b, NULL) == 1) {
        for (size_t i = 0; i < larder_batch_samples(b); i++, position++) {
            struct larder_sample s;
            assert_int_equal(larder_batch_sample(b, i, &s), 0);
            struct order_place p = order_at(order, position);
            assert_int_equal(s.position, position);
            assert_int_equal(s.shard, p.shard);
            assert_int_equal(s.number, p.sample);
            corpus_check(&w.corpus, &s);
        }
        assert_int_equal(larder_batch_sample(b, larder_batch_samples(b), &(struct larder_sample){0}),
                         -ENOENT);
        larder_batch_release(b);
    }
    struct larder_feed_info info = LARDER_INIT(larder_feed_info);
    assert_int_equal(larder_feed_info(f, &info), 0);
    assert_int_equal(info.samples, corpus_samples(&w.corpus));
    assert_int_equal(info.shards, 7);
    assert_int_equal(info.batches_per_epoch, info.samples / 12);
    assert_int_equal(info.samples_out, info.samples / 12 * 12);
    assert_int_equal(info.epoch, 1);
    assert_int_equal(info.position, 0);
    larder_feed_close(f);
    order_free(order);
    world_end(&w);
}

/* Ranks in one process, one after the other: each takes `batches`; all states must agree. */
static void ranks_take(struct feed_world *w, uint32_t world, unsigned batches, uint8_t state[64],
                       size_t *state_bytes, uint32_t *seen)
{
    uint8_t after[64];
    for (uint32_t r = 0; r < world; r++) {
        struct larder_feed_options o = world_options();
        o.rank = r;
        o.world = world;
        o.epochs = 2;
        o.connections = 1;
        o.state = *state_bytes ? state : NULL;
        o.state_bytes = *state_bytes;
        struct larder_feed *f = world_feed(w, &o);
        for (unsigned i = 0; i < batches; i++)
            take_batch(w, f, seen);
        uint8_t own[64];
        assert_int_equal(larder_feed_state(f, own), 64);
        if (r > 0)
            assert_memory_equal(own, after, 64);
        memcpy(after, own, 64);
        larder_feed_close(f);
    }
    memcpy(state, after, 64);
    *state_bytes = 64;
}

static void resumes_on_other_numbers_of_ranks(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 5, 16, 500, RECONNECT_MS);
    uint64_t n = corpus_samples(&w.corpus), batches = n / 12 * 2;
    uint32_t *seen = calloc(2 * n, sizeof *seen);
    uint8_t at[64];
    size_t at_bytes = 0;
    const uint32_t worlds[] = {3, 4, 1, 12, 2, 6};
    for (unsigned taken = 0, k = 0; taken < batches; k++) {
        unsigned now = 1 + k % 3;
        now = now < batches - taken ? now : (unsigned)batches - taken;
        ranks_take(&w, worlds[k % 6], now, at, &at_bytes, seen);
        taken += now;
    }
    assert_all_seen(&w, seen, 2);
    /* And the end is an end, for a feed that begins there too. */
    struct larder_feed_options o = world_options();
    o.epochs = 2;
    o.state = at;
    o.state_bytes = at_bytes;
    struct larder_feed *f = world_feed(&w, &o);
    assert_int_equal(take_batch(&w, f, seen), 0);
    larder_feed_close(f);
    free(seen);
    world_end(&w);
}

/* D13: connections drop in the middle of shards; what came is not asked for again. */
static void goes_on_when_connections_are_cut(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 6, 20, 20000, RECONNECT_MS);
    uint32_t *seen = calloc(corpus_samples(&w.corpus), sizeof *seen);
    struct larder_feed_options o = world_options();
    shelf_cut_every(w.shelf, 250000);
    struct larder_feed *f = world_feed(&w, &o);
    while (take_batch(&w, f, seen) == 1)
        ;
    assert_true(shelf_cuts(w.shelf) >= 3);
    assert_all_seen(&w, seen, 1);
    larder_feed_close(f);
    free(seen);
    world_end(&w);
}

static void goes_on_when_the_server_restarts(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 6, 20, 50000, 20000);
    uint32_t *seen = calloc(corpus_samples(&w.corpus), sizeof *seen);
    struct larder_feed_options o = world_options();
    struct larder_feed *f = world_feed(&w, &o);
    bool more = true;
    for (unsigned i = 0; more; i++) {
        more = take_batch(&w, f, seen) == 1;
        if (i == 1 || i == 4) {
            shelf_down(w.shelf);
            shelf_up(w.shelf);
        }
    }
    assert_all_seen(&w, seen, 1);
    larder_feed_close(f);
    free(seen);
    world_end(&w);
}

static void a_server_that_stays_away_is_an_error_in_bounded_time(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 6, 20, 100000, 300);
    struct larder_feed_options o = world_options();
    struct larder_feed *f = world_feed(&w, &o);
    struct larder_batch *b;
    struct larder_error e = {0};
    shelf_down(w.shelf);
    uint64_t begin = clock_ms();
    int rc;
    while ((rc = larder_feed_next(f, 20000, &b, &e)) == 1)
        larder_batch_release(b);
    assert_true(rc < 0);
    assert_int_equal(e.kind, LARDER_NETWORK);
    assert_true(clock_ms() - begin < 20000);
    assert_int_equal(larder_feed_next(f, 20000, &b, NULL), rc); /* and it stays */
    larder_feed_close(f);
    shelf_up(w.shelf);
    world_end(&w);
}

/* Whoever waits for a server that is away, for its bytes or for a sample index, is told to stop. */
static void closes_at_once_while_the_server_is_away(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 60, 20, 5000, 30000);
    struct larder_feed_options o = world_options();
    o.window_shards = 1;
    struct larder_feed *f = world_feed(&w, &o);
    struct larder_batch *b;
    struct larder_error e = {0};
    shelf_down(w.shelf);
    int rc;
    while ((rc = larder_feed_next(f, 300, &b, &e)) == 1)
        larder_batch_release(b);
    assert_int_equal(rc, -ETIMEDOUT); /* nothing is ready, and nothing has failed */
    uint64_t begin = clock_ms();
    larder_feed_close(f);
    assert_true(clock_ms() - begin < 10000);
    shelf_up(w.shelf);
    world_end(&w);
}

/* Damages the first sample that can be damaged alone; returns its shard. */
static unsigned damage_one(struct feed_world *w)
{
    for (uint32_t i = 0; i < w->corpus.shards; i++)
        for (uint64_t k = 2; k < w->corpus.counts[i]; k++)
            if (world_damage_sample(w, i, k))
                return i;
    fail();
    return 0;
}

static void leaves_out_damage_if_asked(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 4, 20, 3000, RECONNECT_MS);
    uint64_t n = corpus_samples(&w.corpus), seen_all = 0;
    uint32_t *seen = calloc(n, sizeof *seen);
    struct larder_feed_options o = world_options();
    o.damage = LARDER_DAMAGE_SKIP;
    o.global_batch = (uint32_t)n; /* nothing dropped at the end: exactly one is missing */
    (void)damage_one(&w);
    struct larder_feed *f = world_feed(&w, &o);
    assert_int_equal(take_batch(&w, f, seen), 1);
    for (uint64_t i = 0; i < n; i++)
        seen_all += seen[i];
    assert_int_equal(seen_all, n - 1);
    struct larder_feed_info info = LARDER_INIT(larder_feed_info);
    assert_int_equal(larder_feed_info(f, &info), 0);
    assert_int_equal(info.skipped, 1);
    assert_int_equal(info.samples_out, n - 1);
    larder_feed_close(f);
    free(seen);
    world_end(&w);
}

static void names_damage_and_stops(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 4, 20, 3000, RECONNECT_MS);
    uint64_t taken = 0;
    unsigned shard = damage_one(&w);
    struct larder_feed_options o = world_options();
    o.global_batch = 1;
    struct larder_feed *f = world_feed(&w, &o);
    struct larder_batch *b;
    struct larder_error e = {0};
    int rc;
    while ((rc = larder_feed_next(f, 20000, &b, &e)) == 1) {
        larder_batch_release(b);
        taken++;
    }
    assert_int_equal(rc, -EIO);
    assert_non_null(strstr(e.text, w.corpus.names[shard]));
    assert_non_null(strstr(e.text, "sample \"d"));
    /* Every batch before the damaged one was handed out: its position is where the order has the sample. */
    struct larder_feed_info info = LARDER_INIT(larder_feed_info);
    assert_int_equal(larder_feed_info(f, &info), 0);
    assert_int_equal(info.position, taken);
    struct order *order;
    struct err oe;
    assert_int_equal(order_create(w.corpus.counts, 4, 99, 3, &order, &oe), 0);
    assert_int_equal(order_at(order, taken).shard, shard);
    order_free(order);
    larder_feed_close(f);
    world_end(&w);
}

/* Until the planner has nowhere to put more: that is a consumer's pause. */
static void wait_full(struct larder_feed *f)
{
    for (bool full = false; !full;) {
        pthread_mutex_lock(&f->lock);
        full = f->want_space;
        if (!full)
            clock_wait(&f->changed, &f->lock, clock_ms() + 10);
        pthread_mutex_unlock(&f->lock);
    }
}

/* However small samples are, what describes them is bounded too, and batches are if that is asked for. */
static void small_samples_take_bounded_memory(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 8, 200, 10, RECONNECT_MS);
    struct larder_feed_options o = world_options();
    struct larder_feed *f = world_feed(&w, &o);
    wait_full(f);
    pthread_mutex_lock(&f->lock);
    uint64_t one = f->described_bytes / f->batches_ahead;
    assert_true(f->batches_ahead > 2 && f->described_bytes > o.depth_bytes / 8);
    assert_true(f->described_bytes < o.depth_bytes / 4 + 3 * one);
    pthread_mutex_unlock(&f->lock);
    larder_feed_close(f);
    o.depth_batches = 3;
    f = world_feed(&w, &o);
    wait_full(f);
    assert_int_equal(f->batches_ahead, 3);
    uint32_t *seen = calloc(corpus_samples(&w.corpus), sizeof *seen);
    while (take_batch(&w, f, seen) == 1)
        ;
    assert_all_seen(&w, seen, 1);
    assert_int_equal(f->described_bytes, 0);
    free(seen);
    larder_feed_close(f);
    world_end(&w);
}

/* So much is asked for ahead that the server has work, and no more: what was asked first comes first. */
static void what_is_on_its_way_is_bounded(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 4, 3000, 10, RECONNECT_MS);
    struct larder_feed_options o = world_options();
    o.global_batch = 1500;
    o.depth_bytes = 64 << 20;
    atomic_store(&w.hold, true);
    struct larder_feed *f = world_feed(&w, &o);
    struct larder_batch *b;
    uint64_t in_flight = 0, most = 0;
    while (in_flight < FEED_PIECES_IN_FLIGHT) {
        pthread_mutex_lock(&f->lock);
        clock_wait(&f->changed, &f->lock, clock_ms() + 10);
        in_flight = f->pieces_in_flight;
        pthread_mutex_unlock(&f->lock);
    }
    /* Nothing comes now. Who would go on planning has time for it. */
    for (uint64_t until = clock_ms() + 300; clock_ms() < until && most < 2 * FEED_PIECES_IN_FLIGHT;) {
        pthread_mutex_lock(&f->lock);
        clock_wait(&f->changed, &f->lock, clock_ms() + 10);
        most = f->pieces_in_flight;
        pthread_mutex_unlock(&f->lock);
    }
    atomic_store(&w.hold, false);
    for (int rc = 1; rc == 1;) {
        pthread_mutex_lock(&f->lock);
        most = f->pieces_in_flight > most ? f->pieces_in_flight : most;
        pthread_mutex_unlock(&f->lock);
        rc = larder_feed_next(f, 20000, &b, NULL);
        assert_true(rc >= 0);
        if (rc == 1)
            larder_batch_release(b);
    }
    assert_true(most < FEED_PIECES_IN_FLIGHT + 2 * o.global_batch); /* two fields each */
    assert_int_equal(f->pieces_in_flight, 0);
    larder_feed_close(f);
    world_end(&w);
}

/* D14: what is wanted is here or on its way when the pause begins; nothing is held open at the server
 * meanwhile. */
static void a_paused_consumer_holds_bounded_memory_and_its_stream(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 8, 60, 30000, RECONNECT_MS);
    assert_true(corpus_bytes(&w.corpus) > 4u << 20);
    uint32_t *seen = calloc(corpus_samples(&w.corpus), sizeof *seen);
    struct larder_feed_options o = world_options();
    struct larder_feed *f = world_feed(&w, &o);
    uint64_t before = shelf_bytes_read(w.shelf);
    wait_full(f);
    assert_true(shelf_bytes_read(w.shelf) - before <=
                o.depth_bytes + (o.depth_bytes >> 2)); /* gaps are read too */
    while (take_batch(&w, f, seen) == 1)
        ;
    assert_all_seen(&w, seen, 1);
    struct larder_feed_info info = LARDER_INIT(larder_feed_info);
    assert_int_equal(larder_feed_info(f, &info), 0);
    assert_true(info.starved_seconds.consumer > 0);
    larder_feed_close(f);
    free(seen);
    world_end(&w);
}

/* Waiting is booked on what is waited for: a slow server's network, or its disk, if it says so. */
static void waits_are_told_apart(void **state)
{
    (void)state;
    for (unsigned told = 0; told < 2; told++) {
        struct feed_world w;
        world_make(&w, 4, 20, 3000, RECONNECT_MS);
        uint32_t *seen = calloc(corpus_samples(&w.corpus), sizeof *seen);
        struct larder_feed_options o = world_options();
        o.connections = 1;
        atomic_store(&w.slow_ms, 5);
        shelf_disk_ms(w.shelf, told ? 60000 : 0); /* all of every wait */
        struct larder_feed *f = world_feed(&w, &o);
        while (take_batch(&w, f, seen) == 1)
            ;
        struct larder_feed_info i = LARDER_INIT(larder_feed_info);
        assert_int_equal(larder_feed_info(f, &i), 0);
        assert_true(i.starved_seconds.decode == 0);
        assert_true(told ? i.starved_seconds.disk > 0 : i.starved_seconds.disk == 0);
        assert_true(told || i.starved_seconds.network > 0);
        larder_feed_close(f);
        free(seen);
        world_end(&w);
    }
}

static void batches_larger_than_the_ring_come_one_at_a_time(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 3, 12, 400000, RECONNECT_MS);
    uint32_t *seen = calloc(corpus_samples(&w.corpus), sizeof *seen);
    struct larder_feed_options o = world_options();
    struct larder_feed *f = world_feed(&w, &o);
    struct larder_batch *held = NULL; /* one is kept while the next is asked for */
    assert_int_equal(larder_feed_next(f, 20000, &held, NULL), 1);
    struct larder_feed_info info = LARDER_INIT(larder_feed_info);
    assert_int_equal(larder_feed_info(f, &info), 0);
    assert_true(info.bytes_out > o.depth_bytes);
    for (size_t i = 0; i < larder_batch_samples(held); i++) {
        struct larder_sample s;
        assert_int_equal(larder_batch_sample(held, i, &s), 0);
        seen[s.position]++;
    }
    while (take_batch(&w, f, seen) == 1)
        ;
    for (size_t i = 0; i < larder_batch_samples(held); i++) {
        struct larder_sample s;
        assert_int_equal(larder_batch_sample(held, i, &s), 0);
        corpus_check(&w.corpus, &s); /* nothing wrote over it */
    }
    assert_all_seen(&w, seen, 1);
    larder_feed_close(f); /* the batch that is out keeps its memory */
    larder_batch_release(held);
    free(seen);
    world_end(&w);
}

static void refuses_at_open(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 3, 10, 100, RECONNECT_MS);
    uint8_t bytes[64];
    struct larder_feed_options o = world_options();
    struct larder_feed *f = world_feed(&w, &o);
    assert_int_equal(larder_feed_state(f, bytes), 64);
    larder_feed_close(f);

    o.dataset = "nowhere";
    world_refuses(&w, o, LARDER_NOT_FOUND, "nowhere");
    o = world_options();
    o.global_batch = 1000;
    world_refuses(&w, o, LARDER_INVALID, "fewer than one global batch of 1000");
    o = world_options();
    o.world = 5;
    world_refuses(&w, o, LARDER_INVALID, "5 ranks");
    o = world_options();
    o.version = 1;
    world_refuses(&w, o, LARDER_MISMATCH, "version");
    o = world_options();
    o.state = bytes;
    o.state_bytes = 64;
    o.seed = 100;
    world_refuses(&w, o, LARDER_MISMATCH, "seed 99");
    o = world_options();
    o.state = bytes;
    o.state_bytes = 63;
    world_refuses(&w, o, LARDER_CORRUPT, "63");
    bytes[20] ^= 1;
    o.state_bytes = 64;
    world_refuses(&w, o, LARDER_CORRUPT, "checksum");
    world_end(&w);
}

/* D15: fork after start. */
static void a_fork_is_told(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 3, 10, 100, RECONNECT_MS);
    struct larder_feed_options o = world_options();
    struct larder_feed *f = world_feed(&w, &o);
    pid_t child = fork();
    if (child == 0) {
        struct larder_batch *b;
        struct larder_error e = {0};
        int rc = larder_feed_next(f, 1000, &b, &e);
        larder_feed_close(f);
        _exit(rc == -ECHILD && strstr(e.text, "fork") ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    uint32_t *seen = calloc(corpus_samples(&w.corpus), sizeof *seen);
    assert_int_equal(take_batch(&w, f, seen), 1); /* the parent's feed is as it was */
    free(seen);
    larder_feed_close(f);
    world_end(&w);
}

static void reads_shards_in_place(void **state)
{
    (void)state;
    struct feed_world w;
    world_make(&w, 3, 10, 5000, RECONNECT_MS);
    struct larder_dataset *d;
    struct larder_error e = {0};
    assert_int_equal(larder_dataset_open(w.client, "corpus", 0, &d, &e), 0);
    assert_int_equal(larder_dataset_shards(d), 3);
    shelf_cut_every(w.shelf, 20000);
    for (size_t i = 0; i < 3; i++) {
        struct larder_shard_info info;
        const struct buf *file = &w.corpus.files[i];
        assert_int_equal(larder_dataset_shard(d, i, &info, NULL), 0);
        assert_string_equal(info.name, w.corpus.names[i]);
        assert_int_equal(info.bytes, file->n);
        assert_int_equal(info.samples, w.corpus.counts[i]);
        uint8_t *p = malloc(file->n + 10);
        assert_int_equal(larder_dataset_read(d, i, 0, p, file->n + 10, &e), (int64_t)file->n);
        assert_memory_equal(p, file->p, file->n);
        assert_int_equal(larder_dataset_read(d, i, 513, p, 100, &e), 100);
        assert_memory_equal(p, file->p + 513, 100);
        assert_int_equal(larder_dataset_read(d, i, file->n, p, 1, &e), 0);
        free(p);
    }
    assert_true(larder_dataset_read(d, 3, 0, &e, 1, &e) < 0);
    larder_dataset_close(d);
    world_end(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hands_out_what_the_order_names),
        cmocka_unit_test(resumes_on_other_numbers_of_ranks),
        cmocka_unit_test(goes_on_when_connections_are_cut),
        cmocka_unit_test(goes_on_when_the_server_restarts),
        cmocka_unit_test(a_server_that_stays_away_is_an_error_in_bounded_time),
        cmocka_unit_test(closes_at_once_while_the_server_is_away),
        cmocka_unit_test(leaves_out_damage_if_asked),
        cmocka_unit_test(names_damage_and_stops),
        cmocka_unit_test(small_samples_take_bounded_memory),
        cmocka_unit_test(what_is_on_its_way_is_bounded),
        cmocka_unit_test(a_paused_consumer_holds_bounded_memory_and_its_stream),
        cmocka_unit_test(waits_are_told_apart),
        cmocka_unit_test(batches_larger_than_the_ring_come_one_at_a_time),
        cmocka_unit_test(refuses_at_open),
        cmocka_unit_test(a_fork_is_told),
        cmocka_unit_test(reads_shards_in_place),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
