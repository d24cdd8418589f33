/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: a feed to a device hands out the same samples as one to the host, in memory that nothing writes to
 * before the consumer's streams have read it; what goes wrong on the device is told, and nothing is left.
 * Method: a server in memory, and a stand-in for CUDA's driver whose copies are late and whose memory the
 * processor cannot touch.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/dlpack.h"
#include "client/feed_private.h"
#include "tests/support/feed_world.h"
#include "tests/support/good.h"
#include "tests/support/standin.h"

#define SETTINGS     "devices=2 memory=64M seed=3 delay_us=300"
#define RECONNECT_MS 5000u
#define FIELDS_MAX   8

static const struct standin *cuda;

/* A consumer with a stream of its own on device 1. */
struct consumer {
    struct feed_world w;
    struct memory *m;
    struct memory_stream *s;
    bool lost;
};

static int setup(void **state)
{
    struct consumer *c = calloc(1, sizeof *c);
    cuda->standin_reset();
    assert_int_equal(memory_open(MEMORY_CUDA, 1, &c->m, NULL), 0);
    assert_int_equal(memory_stream_create(c->m, &c->s, NULL), 0);
    world_make(&c->w, 7, 20, 9000, RECONNECT_MS);
    *state = c;
    return 0;
}

static int teardown(void **state)
{
    struct consumer *c = *state;
    struct standin_counts n;
    world_end(&c->w);
    memory_stream_destroy(c->s);
    memory_close(c->m);
    cuda->standin_counts(&n);
    if (!c->lost)
        assert_int_equal(n.allocations + n.registrations + n.streams + n.events + n.lost_handles, 0);
    free(c);
    return 0;
}

static void *raw(const struct consumer *c)
{
    return memory_stream_handle(c->s);
}

static void synchronize(struct consumer *c)
{
    struct err e;
    if (memory_stream_wait(c->s, 20000, &e) < 0)
        fail_msg("%s", e.text);
}

static struct larder_feed_options options(void)
{
    struct larder_feed_options o = world_options();
    o.memory = LARDER_MEMORY_CUDA;
    o.device = 1;
    return o;
}

static void check_sample(const struct consumer *c, const struct larder_batch *b, size_t i)
{
    struct larder_sample s;
    struct larder_field fields[FIELDS_MAX];
    assert_int_equal(larder_batch_sample(b, i, &s), 0);
    assert_true(s.fields <= FIELDS_MAX);
    for (uint32_t k = 0; k < s.fields; k++) {
        fields[k] = s.field[k];
        assert_int_equal((uintptr_t)fields[k].data % 256, 0);
        fields[k].data = cuda->standin_peek(fields[k].data);
        assert_non_null(fields[k].data);
    }
    s.field = fields;
    corpus_check(&c->w.corpus, &s);
}

static void all_samples_come_in_device_memory(void **state)
{
    struct consumer *c = *state;
    struct larder_error e;
    struct larder_feed_options o = options();
    struct larder_feed *f = world_feed(&c->w, &o);
    struct larder_batch *b;
    uint64_t position = 0, n = corpus_samples(&c->w.corpus) / 12 * 12;
    while (larder_feed_next(f, 20000, &b, &e) == 1) {
        GOOD(larder_batch_wait(b, raw(c), &e));
        synchronize(c);
        for (size_t i = 0; i < larder_batch_samples(b); i++, position++) {
            struct larder_sample s;
            assert_int_equal(larder_batch_sample(b, i, &s), 0);
            assert_int_equal(s.position, position);
            check_sample(c, b, i);
        }
        if (position % 24)
            GOOD(larder_batch_release_stream(b, raw(c), &e));
        else
            larder_batch_release(b);
    }
    assert_int_equal(position, n);
    struct larder_feed_info info = LARDER_INIT(larder_feed_info);
    assert_int_equal(larder_feed_info(f, &info), 0);
    assert_non_null(strstr(info.path, " -> pinned host memory -> CUDA device 1"));
    struct standin_counts counts;
    cuda->standin_counts(&counts);
    assert_int_equal(counts.pageable_copies, 0);
    larder_feed_close(f);
}

/* A sample as a kernel would read it: into memory of the consumer's own, whenever its stream comes to it. */
struct read_sample {
    struct larder_sample s;
    struct larder_field fields[FIELDS_MAX];
    char key[64];
    uint8_t *memory; /* FIELDS_MAX slots */
};
#define READ_SLOT 16384u

static void read_later(struct consumer *c, const struct larder_batch *b, size_t i, struct read_sample *r)
{
    void *p;
    assert_int_equal(larder_batch_sample(b, i, &r->s), 0);
    assert_int_equal(memory_alloc(c->m, (size_t)FIELDS_MAX * READ_SLOT, &p, NULL), 0);
    r->memory = p;
    snprintf(r->key, sizeof r->key, "%s", r->s.key);
    for (uint32_t k = 0; k < r->s.fields; k++) {
        const struct larder_field *f = &r->s.field[k];
        assert_true(f->bytes <= READ_SLOT);
        r->fields[k] = (struct larder_field){.name = strcmp(f->name, "bin") == 0 ? "bin" : "txt",
                                             .data = r->memory + (size_t)k * READ_SLOT,
                                             .bytes = f->bytes};
        if (f->bytes > 0)
            assert_int_equal(
                memory_copy(c->s, MEMORY_WITHIN, r->memory + (size_t)k * READ_SLOT, f->data, f->bytes, NULL),
                0);
    }
}

/* When the stream has come so far. */
static void check_read(struct consumer *c, struct read_sample *r)
{
    for (uint32_t k = 0; k < r->s.fields; k++)
        r->fields[k].data = cuda->standin_peek(r->fields[k].data);
    r->s.key = r->key;
    r->s.field = r->fields;
    corpus_check(&c->w.corpus, &r->s);
    memory_free(c->m, r->memory);
}

/* The consumer's kernels come late: the ring fills up, the feed says so, and no byte that they read is
 * another batch's. */
static void memory_waits_for_the_streams_that_read_it(void **state)
{
    struct consumer *c = *state;
    struct larder_error e;
    struct larder_feed_options o = options();
    o.epochs = 8; /* several rounds of the ring */
    struct larder_feed *f = world_feed(&c->w, &o);
    enum { READ_MAX = 200 };
    static struct read_sample reads[READ_MAX];
    for (unsigned round = 0; round < 3; round++) {
        struct larder_batch *b;
        unsigned n = 0;
        int rc;
        cuda->standin_hold(raw(c));
        while ((rc = larder_feed_next(f, 300, &b, &e)) == 1) {
            GOOD(larder_batch_wait(b, raw(c), &e));
            assert_true(n < READ_MAX);
            read_later(c, b, n % larder_batch_samples(b), &reads[n]);
            n++;
            GOOD(larder_batch_release_stream(b, raw(c), &e));
        }
        assert_int_equal(rc, -ETIMEDOUT);
        if (!strstr(e.text, "device_depth_bytes"))
            fail_msg("%s", e.text);
        assert_true(n > 5);
        cuda->standin_release(raw(c));
        synchronize(c);
        for (unsigned i = 0; i < n; i++)
            check_read(c, &reads[i]);
    }
    larder_feed_close(f);
}

/* Samples that stand in for damaged ones lie outside of their batch's memory; they are on the device, too. */
static void substitutes_are_there_too(void **state)
{
    struct consumer *c = *state;
    struct larder_error e;
    struct larder_feed_options o = options();
    struct larder_batch *b;
    o.damage = LARDER_DAMAGE_SUBSTITUTE;
    for (uint32_t shard = 0; shard < c->w.corpus.shards; shard++)
        for (uint64_t k = 0; k + 1 < c->w.corpus.counts[shard]; k += 3)
            (void)world_damage_sample(&c->w, shard, k);
    struct larder_feed *f = world_feed(&c->w, &o);
    while (larder_feed_next(f, 20000, &b, &e) == 1) {
        GOOD(larder_batch_wait(b, raw(c), &e));
        synchronize(c);
        for (size_t i = 0; i < larder_batch_samples(b); i++)
            check_sample(c, b, i);
        larder_batch_release(b);
    }
    struct larder_feed_info info = LARDER_INIT(larder_feed_info);
    assert_int_equal(larder_feed_info(f, &info), 0);
    assert_true(info.substituted > 3);
    larder_feed_close(f);
}

/* ---- DLPack ---- */

static void tensors_keep_their_batch(void **state)
{
    struct consumer *c = *state;
    struct larder_error e;
    struct larder_feed_options o = options();
    for (int host = 0; host < 2; host++) {
        o.memory = host ? LARDER_MEMORY_HOST : LARDER_MEMORY_CUDA;
        o.epochs = 20;
        struct larder_feed *f = world_feed(&c->w, &o);
        struct larder_batch *b;
        struct DLManagedTensor *t[2], *none = NULL;
        char expected[64];
        assert_int_equal(larder_feed_next(f, 20000, &b, &e), 1);
        GOOD(larder_batch_wait(b, raw(c), &e));
        synchronize(c);
        struct larder_sample s;
        assert_int_equal(larder_batch_sample(b, 3, &s), 0);
        snprintf(expected, sizeof expected, "sample %llu of shard %u", (unsigned long long)s.number, s.shard);
        GOOD(larder_batch_dlpack(b, 3, "txt", &t[0], &e));
        GOOD(larder_batch_dlpack(b, 3, "txt", &t[1], &e));
        assert_int_equal(larder_batch_dlpack(b, 3, "jpg", &none, &e), -ENOENT);
        assert_int_equal(larder_batch_dlpack(b, 99, "txt", &none, &e), -ENOENT);
        assert_int_equal(larder_batch_dlpack(b, 3, NULL, &none, &e), -EINVAL);
        assert_int_equal(larder_batch_dlpack(b, LARDER_ALL_SAMPLES, NULL, &none, &e), -EINVAL);
        assert_true(larder_batch_dlpack(b, LARDER_ALL_SAMPLES, "bin", &none, &e) < 0); /* of many sizes */
        GOOD(larder_batch_release_stream(b, raw(c), &e));
        for (int k = 0; k < 30; k++) { /* whatever comes goes elsewhere */
            int rc = larder_feed_next(f, 200, &b, &e);
            if (rc == 1)
                larder_batch_release(b);
        }
        for (int k = 0; k < 2; k++) {
            const struct dl_tensor *d = &t[k]->dl_tensor;
            assert_true(d->ndim == 1 && d->shape[0] == (int64_t)strlen(expected) && !d->strides);
            assert_true(d->dtype.code == DL_UINT && d->dtype.bits == 8 && d->dtype.lanes == 1);
            assert_int_equal(d->device.device_type, host ? DL_CPU : DL_CUDA);
            assert_int_equal(d->device.device_id, host ? 0 : 1);
            assert_int_equal(d->byte_offset, 0);
            const void *p = host ? d->data : cuda->standin_peek(d->data);
            assert_memory_equal(p, expected, strlen(expected));
            if (k == 1)
                larder_feed_close(f); /* the last tensor outlives the feed */
            if (k == 1)
                assert_memory_equal(p, expected, strlen(expected));
            t[k]->deleter(t[k]);
        }
    }
}

/* As when a forked loader collects its garbage: whoever held the feed's lock at fork is not in the child. */
static void a_forked_child_releases_nothing(void **state)
{
    struct consumer *c = *state;
    struct larder_error e;
    struct larder_feed_options o = options();
    struct larder_feed *f = world_feed(&c->w, &o);
    struct larder_batch *b;
    struct DLManagedTensor *t;
    assert_int_equal(larder_feed_next(f, 20000, &b, &e), 1);
    GOOD(larder_batch_dlpack(b, 3, "txt", &t, &e));
    pthread_mutex_lock(&f->lock);
    pid_t child = fork();
    if (child == 0) {
        alarm(20); /* rather than for ever */
        int rc = larder_batch_release_stream(b, NULL, &e);
        larder_batch_release(b);
        t->deleter(t);
        _exit(rc == -ECHILD && strstr(e.text, "fork") ? 0 : 1);
    }
    pthread_mutex_unlock(&f->lock);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    GOOD(larder_batch_wait(b, raw(c), &e)); /* the parent's are as they were */
    synchronize(c);
    check_sample(c, b, 3);
    larder_batch_release(b);
    t->deleter(t);
    larder_feed_close(f);
}

/* ---- what goes wrong ---- */

static void what_the_device_refuses_is_told(void **state)
{
    struct consumer *c = *state;
    struct larder_error e;
    struct larder_feed_options o = options();
    struct larder_batch *b;
    o.device = 5;
    world_refuses(&c->w, o, LARDER_NOT_FOUND, "there is no CUDA device 5");
    o.device = 1;
    o.device_depth_bytes = 100u << 20; /* the device has 64 MiB */
    world_refuses(&c->w, o, LARDER_NO_MEMORY, "a feed to device 1");
    o.memory = (enum larder_memory)9;
    world_refuses(&c->w, o, LARDER_INVALID, "memory is 9");
    o = options();
    cuda->standin_configure("register_total=4K");
    world_refuses(&c->w, o, LARDER_NO_MEMORY, "a feed to device 1");
    cuda->standin_configure("register_total=1G");
    cuda->standin_configure("fail=cuStreamCreateWithPriority:2:2");
    world_refuses(&c->w, o, LARDER_NO_MEMORY, "OUT_OF_MEMORY");

    world_end(&c->w);
    world_make(&c->w, 7, 20, 40000, RECONNECT_MS);
    o.global_batch = 120; /* larger than the ring there, not than that of the host */
    o.depth_bytes = 64u << 20;
    o.device_depth_bytes = 1;
    struct larder_feed *f = world_feed(&c->w, &o);
    assert_true(larder_feed_next(f, 20000, &b, &e) < 0);
    assert_int_equal(e.kind, LARDER_LIMIT);
    assert_non_null(strstr(e.text, "device_depth_bytes"));
    larder_feed_close(f);

    o = options(); /* a stream of another device: the batch stays the consumer's */
    f = world_feed(&c->w, &o);
    struct memory *other;
    struct memory_stream *elsewhere;
    assert_int_equal(memory_open(MEMORY_CUDA, 0, &other, NULL), 0);
    assert_int_equal(memory_stream_create(other, &elsewhere, NULL), 0);
    assert_int_equal(larder_feed_next(f, 20000, &b, &e), 1);
    assert_int_equal(larder_batch_wait(b, memory_stream_handle(elsewhere), &e), -EINVAL);
    assert_int_equal(larder_batch_release_stream(b, memory_stream_handle(elsewhere), &e), -EINVAL);
    larder_feed_close(f);
    GOOD(larder_batch_wait(b, raw(c), &e)); /* also after the feed was closed */
    synchronize(c);
    check_sample(c, b, 0);
    GOOD(larder_batch_release_stream(b, raw(c), &e));
    memory_stream_destroy(elsewhere);
    memory_close(other);
}

static void a_copy_that_fails_is_told(void **state)
{
    struct consumer *c = *state;
    struct larder_error e;
    struct larder_batch *b;
    static const char *const failures[] = {"fail=cuMemcpyHtoDAsync_v2:3:2", "fail=cuEventRecord:3:2",
                                           "fail=cuEventRecord:4:2", "fail=cuEventCreate:4:2",
                                           "lose=1:4:719"};
    for (unsigned i = 0; i < 5; i++) {
        struct larder_feed_options o = options();
        o.epochs = 1000; /* until it fails */
        struct larder_feed *f = world_feed(&c->w, &o);
        int rc;
        cuda->standin_configure(failures[i]);
        while ((rc = larder_feed_next(f, 20000, &b, &e)) == 1)
            larder_batch_release(b);
        if (rc == 0 || !strstr(e.text, "a batch to device 1") ||
            !strstr(e.text, i == 4 ? "LAUNCH_FAILED" : "OUT_OF_MEMORY"))
            fail_msg("%s: %d %s", failures[i], rc, e.text);
        assert_int_equal(larder_feed_next(f, 20000, &b, &e), rc); /* and stays so */
        larder_feed_close(f);
        c->lost = i == 4;
    }
}

int main(void)
{
    cuda = standin_load(SETTINGS);
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(all_samples_come_in_device_memory), TEST(memory_waits_for_the_streams_that_read_it),
        TEST(substitutes_are_there_too),         TEST(tensors_keep_their_batch),
        TEST(a_forked_child_releases_nothing),   TEST(what_the_device_refuses_is_told),
        TEST(a_copy_that_fails_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
