/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: whatever happens to stored bytes, a scrub without keys finds it and names the right object, and a
 * reader with keys takes nothing of it as good. Method: a small store of two tenants on the simulated disk;
 * every metadata byte changed in turn (LARDER_TEST_BYTES_STEP=n: every n-th); random damages of data
 * (LARDER_TEST_DAMAGES, 10,000 unless given), each undone again; and stores that nothing has happened to
 * (LARDER_TEST_STORES, 100).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/commit.h"
#include "format/index.h"
#include "format/seal.h"
#include "tests/support/store_rig.h"

#define SEGMENTS     6
#define NOT_A_CHUNK  UINT32_MAX
#define SECTOR_BYTES 512u
#define FINDINGS_MAX 16u
#define DAMAGES_MAX  100000000u
#define OBJECTS_MAX  64u
#define KEK_EPOCH    1u

static struct store_rig rig;
static struct dek deks[3]; /* one a run */

/* What was saved, and how it was read back right after. */
static struct saved {
    const char *tenant;
    const struct dek *dek;
    unsigned kind;
    struct rig_part part;
    struct segment_header header;
    struct segment_trailer trailer;
    struct chunk_entry entry[3];
    char name[BACKEND_NAME_BYTES_MAX + 1];
    uint8_t *bytes;
    size_t n;
} saved[SEGMENTS];

static uint64_t number_of(const char *variable, uint64_t otherwise)
{
    const char *text = getenv(variable);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static uint64_t draw(uint64_t below)
{
    uint64_t x;
    store_rig_random(&rig, &x, sizeof x);
    return x % below;
}

/* ---- the store ---- */

static void keep(struct saved *s, const struct rig_part *p, const struct dek *dek, unsigned kind)
{
    *s = (struct saved){.tenant = rig.tenant, .dek = dek, .kind = kind, .part = *p};
    snprintf(s->name, sizeof s->name, "%s", rig_segment_name(&rig, p));
    assert_non_null(s->bytes = rig_object_read(&rig, s->name, &s->n));
    assert_int_equal(segment_header_decode(p->header, &s->header, NULL), 0);
    assert_int_equal(segment_trailer_decode(p->trailer, &s->trailer, NULL), 0);
    for (uint32_t i = 0; i < p->chunks; i++)
        assert_int_equal(chunk_entry_decode(p->chunk[i].entry, i, &s->entry[i], NULL), 0);
}

static void put_envelope(const struct id *run, const struct dek *dek)
{
    uint8_t raw[KEY_BYTES] = {7}, salt[SALT_BYTES], envelope[ENVELOPE_BYTES];
    struct kek kek = {.epoch = KEK_EPOCH, .key = secret_create(raw, sizeof raw)};
    store_rig_random(&rig, salt, sizeof salt);
    assert_int_equal(envelope_wrap(&kek, rig.tenant, run, dek, salt, envelope, NULL), 0);
    secret_free(kek.key);
    struct ask *c = ASK(&rig, OP_ENVELOPE_PUT, envelope_put, .run_id = *run,
                        .envelope = SLICE(envelope, sizeof envelope));
    assert_int_equal(ask_do(c), ERR_NONE);
    ask_free(c);
}

/* A run with one commit, or two, of `world` parts each. Returns how many parts that makes. */
static unsigned fill_run(struct saved *to, struct dek *dek, unsigned kind, const char *name, uint32_t world,
                         unsigned commits)
{
    struct id run, attempt = store_rig_id(&rig);
    struct rig_part parts[2];
    uint8_t raw[KEY_BYTES];
    store_rig_random(&rig, raw, sizeof raw);
    *dek = (struct dek){.id = store_rig_id(&rig), .key = secret_create(raw, sizeof raw)};
    assert_int_equal(rig_run_open(&rig, kind, name, true, &run), ERR_NONE);
    put_envelope(&run, dek);
    assert_int_equal(rig_attempt(&rig, &run, &attempt, world, NULL), ERR_NONE);
    rig.dek = dek;
    for (unsigned i = 0; i < commits; i++) {
        assert_int_equal(
            rig_save(&rig, &run, &attempt, kind == RUN_DATASET ? 0 : 10 * i + 10, world, NULL, parts),
            ERR_NONE);
        for (uint32_t k = 0; k < world; k++)
            keep(to++, &parts[k], dek, kind);
    }
    return world * commits;
}

static void mark(const char *name, uint64_t sequence, unsigned action)
{
    struct ask *c = ASK(&rig, OP_MARK, mark, .kind = RUN_CHECKPOINTS, .name = slice_str(name),
                        .sequence = sequence, .action = (uint8_t)action, .reason = slice_str("why not"));
    assert_int_equal(ask_do(c), ERR_NONE);
    ask_free(c);
}

static void store_make(uint64_t seed)
{
    unsigned n = 0;
    store_rig_open(&rig, STORE_ON_SIM, seed);
    assert_true(store_rig_start(&rig));
    rig.tenant = "zeta";
    assert_int_equal(rig_tenant_add(&rig, "zeta", 0), ERR_NONE);
    n += fill_run(&saved[n], &deks[0], RUN_CHECKPOINTS, "llm", 1, 1);
    rig.tenant = "acme";
    assert_int_equal(rig_tenant_add(&rig, "acme", 0), ERR_NONE);
    n += fill_run(&saved[n], &deks[1], RUN_CHECKPOINTS, "llm", 2, 2);
    n += fill_run(&saved[n], &deks[2], RUN_DATASET, "tiles", 1, 1);
    mark("llm", 1, MARK_ACTION_PIN);
    mark("llm", 2, MARK_ACTION_BAD);
    assert_int_equal(n, SEGMENTS);
}

static void store_unmake(void)
{
    for (unsigned i = 0; i < SEGMENTS; i++) {
        free(saved[i].bytes);
        rig_part_free(&saved[i].part);
    }
    for (unsigned i = 0; i < 3; i++)
        dek_free(&deks[i]);
    store_rig_close(&rig);
}

static int setup(void **state)
{
    (void)state;
    store_make(number_of("LARDER_TEST_SEED", 11));
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    store_unmake();
    return 0;
}

/* ---- what a scrub says ---- */

struct findings {
    unsigned good, bad;
    struct {
        char object[BACKEND_NAME_BYTES_MAX + 1];
        uint32_t chunk;
    } at[FINDINGS_MAX];
};

static void finding(struct ask *c)
{
    struct findings *f = c->arg;
    struct msg_scrub_item m = ANSWER(c, scrub_item);
    if (m.class == ERR_NONE) {
        f->good++;
        return;
    }
    assert_true(f->bad < FINDINGS_MAX);
    assert_true(slice_cstr(m.object, f->at[f->bad].object, sizeof f->at[0].object));
    f->at[f->bad++].chunk = m.chunk;
}

static enum err_class scrub(struct findings *f, const char *tenant, unsigned kind, enum scrub_level level)
{
    rig.tenant = tenant;
    struct ask *c = ASK(&rig, OP_SCRUB, scrub, .kind = (uint8_t)kind, .level = (uint8_t)level);
    c->frame = finding;
    c->arg = f;
    enum err_class class = ask_do(c);
    ask_free(c);
    return class;
}

static struct findings scrub_all(enum scrub_level level)
{
    struct findings f = {0};
    assert_int_equal(scrub(&f, "zeta", RUN_CHECKPOINTS, level), ERR_NONE);
    assert_int_equal(scrub(&f, "acme", RUN_CHECKPOINTS, level), ERR_NONE);
    assert_int_equal(scrub(&f, "acme", RUN_DATASET, level), ERR_NONE);
    return f;
}

static bool named(const struct findings *f, const char *object, uint32_t chunk)
{
    for (unsigned i = 0; i < f->bad; i++)
        if (f->at[i].chunk == chunk && strcmp(f->at[i].object, object) == 0)
            return true;
    return false;
}

/* ---- damaging ---- */

static void flip(const char *name, uint64_t at, uint8_t mask)
{
    char path[BACKEND_NAME_BYTES_MAX + 16];
    snprintf(path, sizeof path, "%s/objects/%s", rig.folder + 1, name);
    assert_int_equal(sim_flip(rig.sim, 0, path, at, mask), 0);
}

/* Makes n bytes at `at` of the segment what `to` says; false: they were so. */
static bool overwrite(const struct saved *s, size_t at, const uint8_t *to, size_t n)
{
    if (memcmp(s->bytes + at, to, n) == 0)
        return false;
    for (size_t i = 0; i < n; i++)
        if (s->bytes[at + i] != to[i])
            flip(s->name, at + i, s->bytes[at + i] ^ to[i]);
    return true;
}

struct damage {
    const struct saved *at[2]; /* the objects, up to two */
    uint32_t chunk[2];         /* in each; NOT_A_CHUNK: all of it */
};

enum damage_kind {
    FLIP,
    ZERO_SECTOR,
    NOISE_SECTOR,
    SWAP_CHUNKS,
    REPLAY_CHUNK,
    MOVE_SEGMENT,
    SWAP_SEGMENTS,
    CUT,
    GROW,
    REMOVE,
    DAMAGE_KINDS
};

static uint32_t some_stored_chunk(const struct saved *s)
{
    for (;;) {
        uint32_t i = (uint32_t)draw(s->part.chunks);
        if (s->entry[i].stored_bytes > 0)
            return i;
    }
}

static bool damage_chunk(struct damage *d, enum damage_kind kind)
{
    const struct saved *s = d->at[0], *other = &saved[draw(SEGMENTS)];
    const struct chunk_entry *e = &s->entry[d->chunk[0] = some_stored_chunk(s)];
    uint8_t to[SECTOR_BYTES] = {0};
    size_t at = (size_t)(e->offset + draw(e->stored_bytes) / SECTOR_BYTES * SECTOR_BYTES);
    if (kind == FLIP) {
        flip(s->name, e->offset + draw(block_align(e->stored_bytes)), (uint8_t)(1 + draw(255)));
        return true;
    }
    if (kind == NOISE_SECTOR)
        store_rig_random(&rig, to, sizeof to);
    if (kind == NOISE_SECTOR || kind == ZERO_SECTOR)
        return overwrite(s, at, to, sizeof to);
    uint32_t number = some_stored_chunk(other);
    const struct chunk_entry *from = &other->entry[number];
    size_t n = from->stored_bytes < e->stored_bytes ? from->stored_bytes : e->stored_bytes;
    if (!overwrite(s, (size_t)e->offset, other->bytes + from->offset, n))
        return false;
    if (kind == SWAP_CHUNKS) {
        d->at[1] = other;
        d->chunk[1] = number;
        assert_true(overwrite(other, (size_t)from->offset, s->bytes + e->offset, n));
    }
    return true;
}

static bool damage_segment(struct damage *d, enum damage_kind kind)
{
    const struct saved *s = d->at[0], *other = &saved[draw(SEGMENTS)];
    d->chunk[0] = d->chunk[1] = NOT_A_CHUNK;
    if ((kind == MOVE_SEGMENT || kind == SWAP_SEGMENTS) && other == s)
        return false;
    if (kind == REMOVE) {
        rig_object_remove(&rig, s->name);
    } else if (kind == CUT) {
        rig_object_replace(&rig, s->name, s->bytes, 1 + draw(s->n - 1));
    } else if (kind == GROW) {
        size_t more = (1 + draw(3)) * BLOCK_BYTES;
        uint8_t *p = calloc(1, s->n + more);
        assert_non_null(p);
        memcpy(p, s->bytes, s->n);
        memcpy(p + s->n + more - BLOCK_BYTES, s->part.trailer, BLOCK_BYTES);
        rig_object_replace(&rig, s->name, p, s->n + more);
        free(p);
    } else {
        rig_object_replace(&rig, s->name, other->bytes, other->n);
    }
    if (kind == SWAP_SEGMENTS) {
        d->at[1] = other;
        rig_object_replace(&rig, other->name, s->bytes, s->n);
    }
    return true;
}

/* False: nothing has changed. */
static bool damage_do(struct damage *d, enum damage_kind kind)
{
    *d = (struct damage){.at = {&saved[draw(SEGMENTS)]}};
    return kind <= REPLAY_CHUNK ? damage_chunk(d, kind) : damage_segment(d, kind);
}

static void repair(const struct damage *d)
{
    for (int i = 0; i < 2 && d->at[i]; i++)
        rig_object_replace(&rig, d->at[i]->name, d->at[i]->bytes, d->at[i]->n);
}

/* ---- what a reader takes ---- */

/* How many stored chunks of the object open with the keys of its run, as the commit record binds it; `but`:
 * chunk that must not. */
static unsigned opened(const struct saved *s, uint32_t but)
{
    size_t n;
    uint8_t *p = rig_object_read(&rig, s->name, &n), *out = malloc(CHUNK_STORED_BYTES_MAX),
            digest[SHA256_BYTES];
    struct segment_header h;
    struct segment_trailer t;
    struct seal *seal = NULL;
    struct seal_state *st = seal_state_create();
    unsigned good = 0;
    if (p && n == s->part.file_bytes && segment_trailer_decode(p + n - BLOCK_BYTES, &t, NULL) == 0 &&
        segment_header_decode(p, &h, NULL) == 0 && id_equal(&h.segment_id, &s->part.segment) &&
        seal_open(s->dek, &h, t.chunks, &seal, NULL) == 0 && check_trailer(seal, st, &t, NULL) == 0) {
        sha256(p + t.index_offset, (size_t)t.index_bytes, digest);
        bool bound = memcmp(digest, s->part.index_digest, sizeof digest) == 0;
        for (uint32_t i = 0; i < s->part.chunks && bound; i++) {
            const struct chunk_entry *e = &s->entry[i];
            if (e->stored_bytes == 0 || open_chunk(seal, st, i, e, p + e->offset, out, NULL, NULL) < 0)
                continue;
            assert_true(i != but || memcmp(p + e->offset, s->bytes + e->offset, e->stored_bytes) == 0);
            good++;
        }
    }
    seal_free(seal);
    seal_state_free(st);
    free(out);
    free(p);
    return good;
}

static unsigned stored_chunks(const struct saved *s)
{
    unsigned n = 0;
    for (uint32_t i = 0; i < s->part.chunks; i++)
        n += s->entry[i].stored_bytes > 0;
    return n;
}

/* Nothing of what is damaged opens; what is beside it does. */
static void serves_no_damage(const struct damage *d)
{
    for (int i = 0; i < 2 && d->at[i]; i++) {
        unsigned damaged = d->chunk[i] == NOT_A_CHUNK ? stored_chunks(d->at[i]) : 1;
        if (d->at[0] == d->at[1])
            damaged = 2;
        unsigned good = opened(d->at[i], d->chunk[i]);
        /* a changed byte of padding is damage, but none of the chunk's own */
        assert_in_range(good, stored_chunks(d->at[i]) - damaged, stored_chunks(d->at[i]) - damaged + 1);
        assert_true(d->chunk[i] != NOT_A_CHUNK || good == 0);
    }
}

/* ---- tests ---- */

static void damages_of_data_are_found(void **state)
{
    (void)state;
    uint64_t most = number_of("LARDER_TEST_DAMAGES", 10000), done = 0;
    assert_in_range(most, 1, DAMAGES_MAX);
    while (done < most) {
        struct damage d;
        enum damage_kind kind = (enum damage_kind)draw(DAMAGE_KINDS);
        if (!damage_do(&d, kind))
            continue;
        struct findings f = scrub_all(SCRUB_DATA);
        unsigned objects = 1 + (d.at[1] && d.at[1] != d.at[0]), places = d.at[1] ? 2 : 1;
        if (f.bad != places || f.good != SEGMENTS - objects || !named(&f, d.at[0]->name, d.chunk[0]) ||
            (d.at[1] && !named(&f, d.at[1]->name, d.chunk[1])))
            fail_msg("damage %llu, kind %d, of %s chunk %d: %u good, %u bad, first %s chunk %d",
                     (unsigned long long)done, kind, d.at[0]->name, (int)d.chunk[0], f.good, f.bad,
                     f.at[0].object, (int)f.at[0].chunk);
        serves_no_damage(&d);
        repair(&d);
        done++;
    }
    struct findings f = scrub_all(SCRUB_DATA);
    assert_int_equal(f.good, SEGMENTS);
    assert_int_equal(f.bad, 0);
    print_message("%llu damages found without keys\n", (unsigned long long)done);
}

static void every_metadata_byte_of_segments_is_watched(void **state)
{
    (void)state;
    size_t bytes = 0, step = number_of("LARDER_TEST_BYTES_STEP", 1);
    assert_true(step > 0);
    for (unsigned k = 0; k < SEGMENTS; k++) {
        const struct saved *s = &saved[k];
        for (size_t at = 0; at < s->n; at += step) {
            if (at >= BLOCK_BYTES && at < s->trailer.index_offset)
                at = (size_t)s->trailer.index_offset;
            struct findings f = {0};
            uint8_t mask = (uint8_t)(1u << at % 8);
            flip(s->name, at, mask);
            assert_int_equal(scrub(&f, s->tenant, s->kind, SCRUB_STRUCTURE), ERR_NONE);
            if (f.bad != 1 || !named(&f, s->name, NOT_A_CHUNK))
                fail_msg("byte %zu of %s (%zu bytes, index at %zu): %u bad", at, s->name, s->n,
                         (size_t)s->trailer.index_offset, f.bad);
            flip(s->name, at, mask);
            bytes++;
        }
    }
    print_message("%zu bytes of headers, indexes and trailers\n", bytes);
}

/* Names of all objects that are no segments. */
static size_t list_records(char names[OBJECTS_MAX][BACKEND_NAME_BYTES_MAX + 1])
{
    size_t count = 2;
    snprintf(names[0], sizeof names[0], "store");
    snprintf(names[1], sizeof names[1], "t/acme/tenant");
    for (unsigned k = 1; k < SEGMENTS; k += SEGMENTS - 2) { /* one of each run of that tenant */
        struct loop_names found = {0};
        rig.tenant = saved[k].tenant;
        const char *folder = k == 1 ? "t/acme/n" : NULL;
        for (int pass = folder ? 0 : 1; pass < 2; pass++) {
            char in[BACKEND_NAME_BYTES_MAX + 1];
            snprintf(in, sizeof in, "%s", pass ? rig_folder(&rig, &saved[k].part.run) : folder);
            rig_object_list(&rig, in, &found);
            for (size_t i = 0; i < found.count; i++) {
                assert_true(count < OBJECTS_MAX);
                if (!pass || found.names[i][0] != 's')
                    snprintf(names[count++], sizeof names[0], "%.120s/%.120s", in, found.names[i]);
            }
            loop_names_free(&found);
        }
    }
    return count;
}

/* A server that starts on it says so: it does not start, or a scrub of the tenant names the object. */
static void told_at_start(const char *name, size_t at)
{
    struct findings f = {0};
    if (!store_rig_start(&rig)) {
        if (rig.err.class != ERR_CORRUPT && rig.err.class != ERR_VERSION)
            fail_msg("byte %zu of %s: %s", at, name, rig.err.text);
        assert_string_equal(name, "store");
        assert_non_null(strstr(rig.err.text, "store"));
        return;
    }
    enum err_class class = scrub(&f, "acme", RUN_CHECKPOINTS, SCRUB_STRUCTURE);
    if (class == ERR_NONE)
        class = scrub(&f, "acme", RUN_DATASET, SCRUB_STRUCTURE);
    bool told = class == ERR_NONE ? named(&f, name, NOT_A_CHUNK)
                                  : class == ERR_CORRUPT && strstr(rig.err.text, name) &&
                                        strcmp(name, "t/acme/tenant") == 0;
    if (!told)
        fail_msg("byte %zu of %s: class %d, %u bad, %s", at, name, class, f.bad, rig.err.text);
    store_rig_stop(&rig);
}

static void every_byte_of_records_is_watched(void **state)
{
    (void)state;
    char names[OBJECTS_MAX][BACKEND_NAME_BYTES_MAX + 1];
    size_t count = list_records(names), bytes = 0, step = number_of("LARDER_TEST_BYTES_STEP", 1);
    assert_true(step > 0);
    size_t sizes[OBJECTS_MAX];
    for (size_t i = 0; i < count; i++)
        free(rig_object_read(&rig, names[i], &sizes[i]));
    for (size_t i = 0; i < count; i++) {
        const char *component = strrchr(names[i], '/');
        for (size_t at = 0; at < sizes[i]; at += step) {
            uint8_t mask = (uint8_t)(1u << at % 8);
            flip(names[i], at, mask);
            if (component && component[1] == 'c' && component[2] == '-' && !strstr(names[i], "/n/")) {
                struct findings f = {0};
                assert_int_equal(scrub(&f, "acme", RUN_CHECKPOINTS, SCRUB_STRUCTURE), ERR_NONE);
                assert_int_equal(scrub(&f, "acme", RUN_DATASET, SCRUB_STRUCTURE), ERR_NONE);
                assert_true(named(&f, names[i], NOT_A_CHUNK));
            }
            store_rig_stop(&rig);
            told_at_start(names[i], at);
            flip(names[i], at, mask);
            assert_true(store_rig_start(&rig));
            bytes++;
        }
    }
    struct findings f = scrub_all(SCRUB_DATA);
    assert_int_equal(f.good, SEGMENTS);
    assert_int_equal(f.bad, 0);
    print_message("%zu bytes of %zu records\n", bytes, count);
}

static void clean_stores_raise_no_alarm(void **state)
{
    (void)state;
    uint64_t stores = number_of("LARDER_TEST_STORES", 100);
    assert_in_range(stores, 1, DAMAGES_MAX);
    for (uint64_t i = 0; i < stores; i++) {
        struct store_stats stats;
        store_make(number_of("LARDER_TEST_SEED", 1000) + i);
        for (int restarted = 0; restarted < 2; restarted++) {
            for (int level = SCRUB_STRUCTURE; level <= SCRUB_DATA; level++) {
                struct findings f = scrub_all((enum scrub_level)level);
                assert_int_equal(f.good, SEGMENTS);
                assert_int_equal(f.bad, 0);
            }
            for (unsigned k = 0; k < SEGMENTS; k++)
                assert_int_equal(opened(&saved[k], NOT_A_CHUNK), stored_chunks(&saved[k]));
            store_stats(rig.store, &stats);
            assert_int_equal(stats.damaged_objects, 0);
            store_rig_stop(&rig);
            assert_true(store_rig_start(&rig));
        }
        store_unmake();
    }
    print_message("%llu clean stores\n", (unsigned long long)stores);
}

#define ON_A_STORE(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON_A_STORE(damages_of_data_are_found),
        ON_A_STORE(every_metadata_byte_of_segments_is_watched),
        ON_A_STORE(every_byte_of_records_is_watched),
        cmocka_unit_test(clean_stores_raise_no_alarm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
