/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/feed_world.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "format/samples.h"

#define BAD_SHARD_SHIFT 40

static enum err_class reading(void *arg, bool published, uint32_t shard, uint64_t offset, uint8_t *p,
                              size_t n)
{
    struct feed_world *w = arg;
    (void)p;
    unsigned count = atomic_load(&w->bad_count), ms = atomic_load(&w->slow_ms);
    while (atomic_load(&w->hold))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    if (ms)
        nanosleep(&(struct timespec){.tv_nsec = ms * 1000000l}, NULL);
    for (unsigned i = 0; published && i < count; i++) {
        uint64_t bad = atomic_load(&w->bad[i]), at = bad & ((1ull << BAD_SHARD_SHIFT) - 1);
        if (bad >> BAD_SHARD_SHIFT == shard && at >= offset && at < offset + n)
            return ERR_IO;
    }
    return ERR_NONE;
}

void world_make_of(struct feed_world *w, unsigned reconnect_ms)
{
    const struct corpus *c = &w->corpus;
    w->files = calloc(c->shards, sizeof *w->files);
    for (uint32_t i = 0; i < c->shards; i++)
        w->files[i] = (struct shelf_file){.name = c->names[i], .p = c->files[i].p, .n = c->files[i].n};
    struct shelf_options o = {.published = "corpus",
                              .format = SHARD_TAR,
                              .files = w->files,
                              .file_count = c->shards,
                              .reading = reading,
                              .arg = w};
    w->shelf = shelf_start(&o);
    w->client = shelf_client(w->shelf, reconnect_ms);
}

void world_make(struct feed_world *w, uint32_t shards, uint32_t samples, uint32_t field_bytes_max,
                unsigned reconnect_ms)
{
    memset(w, 0, sizeof *w);
    corpus_make(&w->corpus, 5, shards, samples, field_bytes_max);
    world_make_of(w, reconnect_ms);
}

void world_end(struct feed_world *w)
{
    assert_int_equal(larder_close(w->client, 1000, NULL), 0);
    shelf_stop(w->shelf);
    free(w->files);
    corpus_free(&w->corpus);
}

void world_damage(struct feed_world *w, uint32_t shard, uint64_t offset)
{
    unsigned i = atomic_load(&w->bad_count);
    check(i < WORLD_BAD_MAX);
    atomic_store(&w->bad[i], (uint64_t)shard << BAD_SHARD_SHIFT | offset);
    atomic_store(&w->bad_count, i + 1);
}

bool world_damage_sample(struct feed_world *w, uint32_t shard, uint64_t number)
{
    struct samples_builder *b = NULL;
    struct samples *s = NULL;
    struct err e;
    const struct buf *file = &w->corpus.files[shard];
    bool found = false;
    struct samples_source source = {.format = SHARD_TAR, .shard = "x", .shard_bytes = file->n};
    assert_int_equal(samples_builder_create(&source, &b, &e), 0);
    assert_int_equal(samples_builder_push(b, file->p, file->n, &e), 0);
    assert_int_equal(samples_builder_finish(b, &s, &e), 0);
    for (uint32_t k = 0; k < samples_fields(s, number) && !found; k++) {
        struct sample_field field = samples_field(s, number, k);
        found = field.bytes > 0;
        if (found)
            world_damage(w, shard, field.offset + field.bytes / 2);
    }
    samples_free(s);
    samples_builder_free(b);
    return found;
}

struct larder_feed_options world_options(void)
{
    struct larder_feed_options o = LARDER_INIT(larder_feed_options);
    o.dataset = "corpus";
    o.seed = 99;
    o.window_shards = 3;
    o.global_batch = 12;
    o.depth_bytes = 1 << 20;
    return o;
}

struct larder_feed *world_feed(struct feed_world *w, const struct larder_feed_options *o)
{
    struct larder_feed *f = NULL;
    struct larder_error e = {0};
    if (larder_feed_open(w->client, o, &f, &e) < 0)
        fail_msg("%s", e.text);
    return f;
}

void world_refuses(struct feed_world *w, struct larder_feed_options o, enum larder_class kind,
                   const char *word)
{
    struct larder_feed *f;
    struct larder_error e = {0};
    assert_true(larder_feed_open(w->client, &o, &f, &e) < 0);
    assert_null(f);
    if (e.kind != kind || !strstr(e.text, word))
        fail_msg("class %d: %s", (int)e.kind, e.text);
}
