/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: whoever comes and goes, and however, larderd keeps nothing of it: descriptors, sessions, lanes,
 * requests, segments and memory are back where they were. Method: a real larderd, and threads that connect
 * and hang up, leave handshakes half done, reset connections with requests in flight, cancel requests, open
 * lanes and drop them, begin saves and abandon them; LARDER_TEST_CYCLES of them (3,000). A quarter of them
 * comes first, so that caches are full when the server is looked at; /proc and its own counters are compared
 * after the rest.
 */
#include <dirent.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include <jansson.h>

#include "client/clock.h"
#include "client/conn.h"
#include "client/larder.h"
#include "client/secrets.h"
#include "tests/support/corpus.h"
#include "tests/support/folder.h"
#include "tests/support/larderd.h"
#include "tests/support/publishing.h"
#include "tests/support/sanitized.h"

#define CYCLES       3000u
#define THREADS      4u
#define SETTLE_MS    90000u
#define TENSOR_BYTES (5u << 20)
/* What malloc may keep more after the rest than after the first quarter; a kilobyte for each of 100,000
 * cycles would be a hundred times more. */
#define GROWN_MAX (16ull << 20)

static struct larderd server;
static struct served at; /* only its address */
static struct channel_config *user;
static struct credentials credentials;
static char folder[256];
static struct corpus corpus;
static uint8_t tensor[TENSOR_BYTES];
static uint64_t seed;
static atomic_uint_fast64_t left, saves;

static uint64_t draw(uint64_t *rng, uint64_t below)
{
    *rng ^= *rng << 13;
    *rng ^= *rng >> 7;
    *rng ^= *rng << 17;
    return *rng % below;
}

/* ---- one cycle each ---- */

/* The connection ends with a reset instead of in good order, half of the time. */
static void hang_up(struct caller *c, uint64_t *rng)
{
    const struct linger reset = {.l_onoff = 1};
    if (draw(rng, 2))
        (void)setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    caller_close(c);
}

static void connect_only(uint64_t *rng)
{
    struct caller c;
    uint8_t noise[300];
    caller_dial(&c, &at);
    for (size_t i = 0; i < sizeof noise; i++)
        noise[i] = (uint8_t)draw(rng, 256);
    if (draw(rng, 2))
        caller_send_raw(&c, noise, draw(rng, sizeof noise));
    hang_up(&c, rng);
}

static void half_a_handshake(uint64_t *rng)
{
    struct caller c;
    struct channel *half;
    struct err e;
    uint8_t answer[2048];
    size_t n;
    caller_dial(&c, &at);
    assert_int_equal(channel_create(user, "127.0.0.1", &half, &e), 0);
    assert_int_equal(channel_input(half, NULL, 0, &e), 0);
    uint8_t *p = channel_output_take(half, &n);
    assert_non_null(p);
    caller_send_raw(&c, p, draw(rng, 2) ? n : draw(rng, n));
    if (draw(rng, 2))
        (void)recv(c.fd, answer, sizeof answer, MSG_DONTWAIT);
    free(p);
    channel_free(half);
    hang_up(&c, rng);
}

static void hello_only(uint64_t *rng)
{
    struct caller c;
    caller_join(&c, &at, user);
    hang_up(&c, rng);
}

static uint64_t ask_something(struct caller *c, uint64_t *rng)
{
    struct buf b = {0};
    uint32_t deadline_ms = draw(rng, 4) ? 0 : 1 + (uint32_t)draw(rng, 50);
    switch (draw(rng, 5)) {
    case 0: return caller_send(c, OP_PING, deadline_ms, NULL, (struct slice){0});
    case 1: return caller_send(c, OP_STATUS, deadline_ms, NULL, (struct slice){0});
    case 2:
        msg_run_list_encode(&(struct msg_run_list){.kind = LARDER_CHECKPOINTS}, &b);
        return caller_send(c, OP_RUN_LIST, deadline_ms, &b, (struct slice){0});
    case 3:
        msg_commit_list_encode(&(struct msg_commit_list){.kind = LARDER_CHECKPOINTS,
                                                         .name = slice_str("run"),
                                                         .with_pending = 1},
                               &b);
        return caller_send(c, OP_COMMIT_LIST, deadline_ms, &b, (struct slice){0});
    default:
        msg_scrub_encode(&(struct msg_scrub){.kind = LARDER_CHECKPOINTS,
                                             .name = slice_str("run"),
                                             .level = 1 + (uint8_t)draw(rng, 2)},
                         &b);
        return caller_send(c, OP_SCRUB, deadline_ms, &b, (struct slice){0});
    }
}

/* Reads of a published shard, most of which wait for credit that never comes. */
static uint64_t read_something(struct caller *c, const struct published_opened *o, uint64_t *rng)
{
    uint32_t shard = (uint32_t)draw(rng, o->count);
    return draw(rng, 4) ? published_ask_read(c, &o->version, 1 + draw(rng, 2000), shard, 0, o->bytes[shard])
                        : published_ask_samples(c, &o->version, 1 + draw(rng, 100), shard);
}

static void requests_in_flight(uint64_t *rng)
{
    struct caller c;
    struct published_opened o = {0};
    caller_join(&c, &at, user);
    if (draw(rng, 2))
        assert_int_equal(published_open(&c, "published", &o), ERR_NONE);
    for (uint64_t n = 1 + draw(rng, 20); n > 0; n--)
        (void)(o.count && draw(rng, 2) ? read_something(&c, &o, rng) : ask_something(&c, rng));
    hang_up(&c, rng);
}

static void cancelled_requests(uint64_t *rng)
{
    struct caller c;
    struct published_opened o;
    struct answer a;
    unsigned open = 0;
    caller_join(&c, &at, user);
    assert_int_equal(published_open(&c, "published", &o), ERR_NONE);
    for (uint64_t n = 1 + draw(rng, 10); n > 0; n--, open++)
        caller_cancel(&c, draw(rng, 2) ? read_something(&c, &o, rng) : ask_something(&c, rng));
    while (open > 0 && caller_answer(&c, &a)) { /* each is answered, however that ends */
        open -= !(a.header.flags & FRAME_MORE);
        answer_free(&a);
    }
    assert_int_equal(open, 0);
    hang_up(&c, rng);
}

static void a_lane(uint64_t *rng)
{
    char host[272], port[16];
    struct conn *c;
    struct err e;
    assert_int_equal(address_split(at.address, host, sizeof host, port, sizeof port, &e), 0);
    struct conn_options o = {.host = host,
                             .port = port,
                             .config = user,
                             .connect_timeout_ms = 20000,
                             .request_timeout_ms = 20000,
                             .reconnect_ms = 1000,
                             .lane = CONN_LANE_OPEN};
    if (conn_open(&o, &c, &e) < 0)
        fail_msg("%s", e.text);
    if (draw(rng, 2))
        conn_stop(c);
    conn_close(c);
}

static void a_save(uint64_t *rng)
{
    struct larder_options o = LARDER_INIT(larder_options);
    struct larder_save_options so = LARDER_INIT(larder_save_options);
    struct larder_tensor t = {
        .name = "x", .dtype = LARDER_U8, .dims = 1, .shape = {TENSOR_BYTES}, .data = tensor};
    struct larder_error e;
    struct larder *c;
    struct larder_save *s;
    char path[300];
    snprintf(path, sizeof path, "%s", server.folder);
    strcat(path, "/dev-admin.json");
    o.credentials = path;
    o.staging_bytes = 16u << 20;
    o.threads = 1;
    so.run = "run";
    so.step = 1000 + atomic_fetch_add(&saves, 1);
    so.attempt[0] = 7;
    so.world = 2; /* the other rank never comes */
    if (larder_open(&o, &c, &e) < 0 || larder_save_begin(c, &so, &s, &e) < 0 ||
        larder_save_tensor(s, &t, &e) < 0 || larder_save_submit(s, &e) < 0)
        fail_msg("%s", e.text);
    if (draw(rng, 2))
        (void)larder_save_wait(s, (int)draw(rng, 40), &e);
    if (draw(rng, 2) && larder_save_cancel(s, "of no use any more", &e) < 0)
        fail_msg("%s", e.text);
    larder_save_free(s);
    (void)larder_close(c, 0, &e);
}

static void *cycle(void *arg)
{
    uint64_t rng = (seed + (uint64_t)(uintptr_t)arg) * 0x9e3779b97f4a7c15u | 1;
    while (atomic_fetch_sub(&left, 1) > 0) {
        uint64_t kind = draw(&rng, 100);
        if (kind < 25)
            connect_only(&rng);
        else if (kind < 50)
            half_a_handshake(&rng);
        else if (kind < 60)
            hello_only(&rng);
        else if (kind < 78)
            requests_in_flight(&rng);
        else if (kind < 90)
            cancelled_requests(&rng);
        else if (kind < 98)
            a_lane(&rng);
        else
            a_save(&rng);
        if (atomic_load(&left) > UINT64_MAX / 2) /* below zero */
            break;
    }
    return NULL;
}

static void cycles(uint64_t n)
{
    pthread_t threads[THREADS];
    atomic_store(&left, n);
    for (size_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, cycle, (void *)(uintptr_t)(i + 1)), 0);
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
}

/* ---- what the server holds ---- */

static const char *const gauges[] = {"sessions_open",
                                     "lanes_open",
                                     "requests_in_flight",
                                     "joins_waiting",
                                     "feeds_open",
                                     "reserved_bytes",
                                     "store_segments_open",
                                     "class_restore_queued",
                                     "class_feed_queued",
                                     "class_save_queued",
                                     "class_scrub_queued",
                                     "class_restore_in_flight_bytes",
                                     "class_feed_in_flight_bytes",
                                     "class_save_in_flight_bytes",
                                     "class_scrub_in_flight_bytes"};
#define GAUGES (sizeof gauges / sizeof gauges[0])

struct held {
    uint64_t descriptors, resident_bytes, gauge[GAUGES];
};

static uint64_t descriptors(void)
{
    char path[64];
    uint64_t n = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)server.pid);
    DIR *d = opendir(path);
    assert_non_null(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

static uint64_t resident(void)
{
    char path[64];
    unsigned long long whole, pages = 0;
    snprintf(path, sizeof path, "/proc/%d/statm", (int)server.pid);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%llu %llu", &whole, &pages), 2);
    fclose(f);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void look(struct larder *watcher, struct held *h)
{
    char *text;
    struct larder_error e;
    if (larder_status(watcher, &text, &e) < 0)
        fail_msg("%s", e.text);
    json_t *o = json_loads(text, 0, NULL);
    for (size_t i = 0; i < GAUGES; i++) {
        json_t *v = json_object_get(o, gauges[i]);
        if (!json_is_integer(v))
            fail_msg("the status has no %s", gauges[i]);
        h->gauge[i] = (uint64_t)json_integer_value(v);
    }
    json_decref(o);
    free(text);
    h->descriptors = descriptors();
    h->resident_bytes = resident();
}

/* Waits until it holds what it held before anybody came; what that was told of last. */
static struct held settled(struct larder *watcher, const struct held *before, uint64_t descriptors_max)
{
    struct held h;
    const char *what = "";
    for (uint64_t until = clock_ms() + SETTLE_MS; clock_ms() < until;) {
        look(watcher, &h);
        size_t i = 0;
        while (i < GAUGES && h.gauge[i] == before->gauge[i])
            i++;
        what = i < GAUGES ? gauges[i] : "descriptors";
        if (i == GAUGES && h.descriptors <= descriptors_max)
            return h;
        usleep(50000);
    }
    for (size_t i = 0; i < GAUGES; i++)
        print_error("%s: %llu, %llu at first\n", gauges[i], (unsigned long long)h.gauge[i],
                    (unsigned long long)before->gauge[i]);
    fail_msg("%s: not back after %u ms; descriptors %llu, at most %llu", what, SETTLE_MS,
             (unsigned long long)h.descriptors, (unsigned long long)descriptors_max);
    return h;
}

/* ---- the test ---- */

static struct larder *watch(void)
{
    struct larder_options o = LARDER_INIT(larder_options);
    struct larder_error e;
    struct larder *c;
    o.credentials = larderd_credentials(&server, "admin");
    o.staging_bytes = 8u << 20;
    if (larder_open(&o, &c, &e) < 0)
        fail_msg("%s", e.text);
    return c;
}

static void a_checkpoint(struct larder *c)
{
    struct larder_save_options so = LARDER_INIT(larder_save_options);
    struct larder_tensor t = {
        .name = "x", .dtype = LARDER_U8, .dims = 1, .shape = {TENSOR_BYTES}, .data = tensor};
    struct larder_error e;
    struct larder_save *s;
    so.run = "run";
    so.step = 1;
    so.attempt[0] = 6;
    if (larder_save_begin(c, &so, &s, &e) < 0 || larder_save_tensor(s, &t, &e) < 0 ||
        larder_save_submit(s, &e) < 0 || larder_save_wait(s, -1, &e) < 0)
        fail_msg("%s", e.text);
    larder_save_free(s);
}

static void nothing_is_kept(void **state)
{
    (void)state;
    const char *given = getenv("LARDER_TEST_CYCLES");
    uint64_t n = given ? strtoull(given, NULL, 0) : CYCLES;
    struct larder *watcher = watch();
    struct held first, warm, last;
    struct larder_error e;
    a_checkpoint(watcher);
    look(watcher, &first);
    cycles(n / 4);
    warm = settled(watcher, &first, UINT64_MAX);
    cycles(n - n / 4);
    last = settled(watcher, &first, warm.descriptors);
    print_message(
        "# %llu cycles: %llu descriptors at first, %llu after a quarter, %llu now; %.1f, %.1f, %.1f MiB\n",
        (unsigned long long)n, (unsigned long long)first.descriptors, (unsigned long long)warm.descriptors,
        (unsigned long long)last.descriptors, (double)first.resident_bytes / (1 << 20),
        (double)warm.resident_bytes / (1 << 20), (double)last.resident_bytes / (1 << 20));
    assert_true(SANITIZED || last.resident_bytes < warm.resident_bytes + GROWN_MAX);
    if (larder_close(watcher, -1, &e) < 0)
        fail_msg("%s", e.text);
}

/* A segment that nobody writes to any more is given up after a second. */
static void give_up_soon(void)
{
    char path[300], text[16384];
    snprintf(path, sizeof path, "%s/larderd.conf", server.folder);
    FILE *f = fopen(path, "r+");
    assert_non_null(f);
    size_t n = fread(text, 1, sizeof text - 1, f);
    text[n] = 0;
    char *section = strstr(text, "[server]\n");
    assert_non_null(section);
    section += strlen("[server]\n");
    rewind(f);
    fprintf(f, "%.*ssegment_idle = 1s\n%s", (int)(section - text), text, section);
    assert_int_equal(fclose(f), 0);
}

static int start(void **state)
{
    struct err e;
    (void)state;
    folder_make(folder, sizeof folder);
    corpus_make(&corpus, 5, 3, 20, 20000);
    corpus_paths_free(corpus_write(&corpus, folder));
    larderd_start(&server, folder);
    larderd_end(&server, 15);
    give_up_soon();
    larderd_again(&server);
    if (secrets_load(larderd_credentials(&server, "admin"), 1000, &credentials, &e) < 0 ||
        channel_config_create(false, credentials.ca_pem, credentials.certificate_pem, credentials.key_pem,
                              &user, &e) < 0) {
        print_error("%s\n", e.text);
        return -1;
    }
    snprintf(at.address, sizeof at.address, "%s", server.address);
    for (size_t i = 0; i < TENSOR_BYTES; i++)
        tensor[i] = (uint8_t)(i * i >> 3);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    channel_config_unref(user);
    credentials_free(&credentials);
    larderd_remove(&server);
    corpus_free(&corpus);
    folder_remove(folder);
    return 0;
}

int main(void)
{
    const char *given = getenv("LARDER_TEST_SEED");
    seed = given ? strtoull(given, NULL, 0) : 1;
    printf("# seed %llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_kept),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
