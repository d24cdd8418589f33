/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Real clients import a dataset and feed from it, once through, as one rank or as two, going on where they
 * stood after each failure and each end of a process. The dataset is no part of the model: what was imported
 * is known, and each position of the order must give the same sample whenever and by whomever it is read,
 * each sample once.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client/larder.h"
#include "tests/sim/clients.h"
#include "tests/sim/process.h"

#define DATASET      "samples"
#define SHARDS       3u
#define RECORDS      16u /* of a shard */
#define SAMPLES      (SHARDS * RECORDS)
#define RECORD_BYTES 200u
#define BATCH        4u
#define RANKS_MAX    2u
#define FD_FIRST     900 /* of the files that are imported: their names, so always the same */
#define NEXT_MS      20000u

static void fill_record(uint32_t shard, uint64_t number, uint8_t out[RECORD_BYTES])
{
    uint64_t state = shard * 1000 + number;
    for (size_t i = 0; i < RECORD_BYTES; i++)
        out[i] = (uint8_t)(draw(&state) >> 30);
}

/* Files in memory, made once in a program's life. */
static void make_files(char paths[SHARDS][32])
{
    uint8_t record[RECORD_BYTES];
    for (uint32_t s = 0; s < SHARDS; s++) {
        snprintf(paths[s], sizeof paths[s], "/proc/self/fd/%u", FD_FIRST + s);
        if (fcntl(FD_FIRST + (int)s, F_GETFD) >= 0)
            continue;
        int fd = memfd_create("shard", MFD_CLOEXEC);
        check(fd >= 0 && dup2(fd, FD_FIRST + (int)s) >= 0 && close(fd) == 0);
        for (uint64_t i = 0; i < RECORDS; i++) {
            fill_record(s, i, record);
            check(pwrite(FD_FIRST + (int)s, record, sizeof record, (off_t)(i * sizeof record)) ==
                  sizeof record);
        }
    }
}

/* ---- importing ---- */

void importer_main(struct actor *a)
{
    char paths[SHARDS][32];
    const char *files[SHARDS + 1] = {0};
    make_files(paths);
    for (uint32_t s = 0; s < SHARDS; s++)
        files[s] = paths[s];
    struct client *c = client_up(a);
    struct larder_import_options o = LARDER_INIT(larder_import_options);
    o.dataset = DATASET;
    o.files = files;
    o.format = LARDER_SHARD_RECORDS;
    o.record_bytes = RECORD_BYTES;
    while (alive(a) && !a->w->dataset_version) {
        struct larder_error e;
        uint64_t version;
        if (larder_dataset_import(c->larder, &o, &version, &e) == 0)
            a->w->dataset_version = version;
        else if (client_failed(a, "import", &e) != ERR_NONE)
            actor_sleep(a, 20 + roll(a, 200));
    }
    client_down(a, c);
}

/* ---- feeding ---- */

struct sample {
    bool known, seen;
    uint32_t shard;
    uint64_t number;
};

struct feeding {
    struct actor *a;
    uint64_t seed, next; /* batch */
    struct sample order[SAMPLES];
    uint8_t state[LARDER_STATE_BYTES]; /* before that batch */
    int state_bytes;
    struct larder_feed *feed[RANKS_MAX];
    uint32_t world;
};

static bool feeds_open(struct feeding *f, const struct client *c)
{
    struct actor *a = f->a;
    struct larder_error e;
    f->world = 1 + roll(a, RANKS_MAX);
    memset(f->feed, 0, sizeof f->feed);
    for (uint32_t r = 0; r < f->world; r++) {
        struct larder_feed_options o = LARDER_INIT(larder_feed_options);
        o.dataset = DATASET;
        o.version = a->w->dataset_version;
        o.seed = f->seed;
        o.window_shards = 2;
        o.rank = r;
        o.world = f->world;
        o.global_batch = BATCH;
        o.depth_bytes = 2u << 20;
        o.connections = 1 + roll(a, 2);
        o.state = f->state_bytes ? f->state : NULL;
        o.state_bytes = (size_t)f->state_bytes;
        if (larder_feed_open(c->larder, &o, &f->feed[r], &e) < 0) {
            f->feed[r] = NULL;
            (void)client_failed(a, "feed open", &e);
            return false;
        }
    }
    return true;
}

static void feeds_close(struct feeding *f)
{
    for (uint32_t r = 0; r < RANKS_MAX; r++)
        larder_feed_close(f->feed[r]);
}

static void check_sample(struct feeding *f, const struct larder_sample *s)
{
    struct world *w = f->a->w;
    uint8_t want[RECORD_BYTES];
    if (s->position / BATCH != f->next)
        world_fail(w, "%s: batch %llu has a sample of position %llu", f->a->name, (unsigned long long)f->next,
                   (unsigned long long)s->position);
    struct sample *x = &f->order[s->position];
    if (x->seen)
        world_fail(w, "%s: position %llu is fed twice", f->a->name, (unsigned long long)s->position);
    if (x->known && (x->shard != s->shard || x->number != s->number))
        world_fail(w, "%s: position %llu was another sample before", f->a->name,
                   (unsigned long long)s->position);
    *x = (struct sample){.known = true, .seen = true, .shard = s->shard, .number = s->number};
    fill_record(s->shard, s->number, want);
    if (s->fields != 1 || s->field[0].bytes != RECORD_BYTES ||
        memcmp(s->field[0].data, want, RECORD_BYTES) != 0)
        world_fail(w, "%s: position %llu has other bytes than were imported", f->a->name,
                   (unsigned long long)s->position);
}

/* 1; 0: the end; -1: something failed. */
static int take_batch(struct feeding *f, uint32_t rank)
{
    struct larder_error e;
    struct larder_batch *b = NULL;
    int rc = larder_feed_next(f->feed[rank], (int)NEXT_MS, &b, &e);
    if (rc < 0)
        (void)client_failed(f->a, "feed", &e);
    if (rc <= 0)
        return rc < 0 ? -1 : 0;
    if (larder_batch_samples(b) != BATCH / f->world)
        world_fail(f->a->w, "%s: a batch of %zu samples", f->a->name, larder_batch_samples(b));
    for (size_t i = 0; i < larder_batch_samples(b); i++) {
        struct larder_sample s;
        check(larder_batch_sample(b, i, &s) == 0);
        check_sample(f, &s);
    }
    larder_batch_release(b);
    return 1;
}

/* A global batch: of all ranks. */
static int take_all(struct feeding *f)
{
    int rc = 1;
    for (uint32_t i = 0; i < BATCH; i++)
        if (f->next < SAMPLES / BATCH)
            f->order[f->next * BATCH + i].seen = false; /* of one that was not whole */
    for (uint32_t r = 0; r < f->world && rc == 1; r++)
        rc = take_batch(f, r);
    if (rc == 1) {
        f->next++;
        f->state_bytes = larder_feed_state(f->feed[0], f->state);
        check(f->state_bytes > 0);
        f->a->w->tally.batches++;
    }
    return rc;
}

static void feed_on(struct feeding *f)
{
    int rc = 1;
    while (rc == 1 && alive(f->a)) {
        if (actor_errs(f->a, 20)) /* the process dies; the next one goes on */
            process_kill(f->a->process);
        rc = take_all(f);
        if (rc == 0 && f->next != SAMPLES / BATCH)
            world_fail(f->a->w, "%s: the feed ends after %llu of %u batches", f->a->name,
                       (unsigned long long)f->next, SAMPLES / BATCH);
        if (rc == 1 && roll(f->a, 3) == 0)
            actor_sleep(f->a, roll(f->a, 30));
        if (rc == 1 && roll(f->a, 8) == 0)
            break; /* on another number of ranks, perhaps */
    }
}

static void all_was_fed(const struct feeding *f)
{
    bool fed[SHARDS][RECORDS] = {0};
    for (uint32_t i = 0; i < SAMPLES; i++) {
        const struct sample *x = &f->order[i];
        if (x->shard >= SHARDS || x->number >= RECORDS || fed[x->shard][x->number])
            world_fail(f->a->w, "%s: position %u is no sample of the dataset, or one that came before",
                       f->a->name, i);
        fed[x->shard][x->number] = true;
    }
}

void feeder_main(struct actor *a)
{
    struct feeding f = {.a = a, .seed = draw(&a->rng)};
    while (alive(a) && !a->w->dataset_version)
        actor_sleep(a, 1 + roll(a, 100));
    while (alive(a) && f.next < SAMPLES / BATCH) {
        struct client *c = client_up(a);
        bool open = c->larder && feeds_open(&f, c);
        if (open)
            feed_on(&f);
        feeds_close(&f);
        client_down(a, c);
        if (!open && alive(a))
            actor_sleep(a, 20 + roll(a, 200));
    }
    if (alive(a))
        all_was_fed(&f);
}
