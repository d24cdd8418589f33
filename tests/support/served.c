/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/served.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "format/credentials.h"
#include "format/pki.h"
#include "server/io/ring.h"
#include "tests/support/tls_pair.h"

/* Certificates. */

static struct pki_pair ca, server_pair;
static struct {
    char tenant[TENANT_NAME_BYTES_MAX + 1];
    enum client_role role;
    struct channel_config *config;
} users[16];

static void free_certificates(void)
{
    for (size_t i = 0; i < sizeof users / sizeof *users; i++)
        channel_config_unref(users[i].config);
    pki_pair_free(&ca);
    pki_pair_free(&server_pair);
}

static void make_certificates(void)
{
    static const char *const hosts[] = {"localhost", "127.0.0.1", NULL};
    struct err e = {0};
    if (ca.certificate_pem)
        return;
    if (pki_ca_create("test", time(NULL), 30, &ca, &e) < 0 ||
        pki_issue_server(&ca, hosts, time(NULL), 30, &server_pair, &e) < 0)
        fail_msg("%s", e.text);
    atexit(free_certificates);
}

struct channel_config *served_user(const char *tenant, enum client_role role)
{
    struct err e = {0};
    struct pki_pair pair = {0};
    size_t i = 0;
    make_certificates();
    for (; users[i].config; i++)
        if (strcmp(users[i].tenant, tenant) == 0 && users[i].role == role)
            return users[i].config;
    assert_true(i < sizeof users / sizeof *users);
    if (pki_issue_user(&ca, tenant, role, time(NULL), 30, &pair, &e) < 0)
        fail_msg("%s", e.text);
    users[i].config = tls_config(false, &ca, &pair);
    users[i].role = role;
    strcpy(users[i].tenant, tenant);
    pki_pair_free(&pair);
    return users[i].config;
}

/* The server. */

static void wait_event(struct served *s)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += SERVED_PATIENCE_MS / 1000;
    while (sem_timedwait(&s->event, &until) < 0)
        if (errno != EINTR)
            fail_msg("the server did not %s in time", s->stopping ? "stop" : "start");
}

static void on_started(void *arg, struct boot *b, const struct err *e)
{
    struct served *s = arg;
    s->boot = b;
    s->err = *e;
    if (b)
        snprintf(s->address, sizeof s->address, "%s", server_address(boot_server(b), 0));
    sem_post(&s->event);
}

static void on_stopped(void *arg, uint64_t finished, uint64_t failed)
{
    struct served *s = arg;
    s->finished = finished;
    s->failed = failed;
    sem_post(&s->event);
}

static void *run(void *p)
{
    struct err e = {0};
    if (loop_run(p, &e) < 0)
        fprintf(stderr, "loop: %s\n", e.text);
    return NULL;
}

static void make_loops(struct served *s, size_t count)
{
    struct err e = {0};
    struct ring_options o = {0};
    for (s->loop_count = 0; s->loop_count < count; s->loop_count++) {
        if (ring_create(&o, &s->loops[s->loop_count], &e) == 0)
            continue;
        o.worker_pool = true; /* this machine refuses io_uring */
        if (ring_create(&o, &s->loops[s->loop_count], &e) < 0)
            fail_msg("%s", e.text);
    }
}

void served_start(struct served *s, const struct served_options *o)
{
    static const char *const listen[] = {"127.0.0.1:0"};
    static const struct identity anyone = {.tenant = "acme", .role = ROLE_WRITER, .subject = "acme/writer"};
    memset(s, 0, sizeof *s);
    make_certificates();
    sem_init(&s->event, 0, 0);
    make_loops(s, o->loop_count ? o->loop_count : 1);
    s->disk = memory_disk_create(1ull << 30);
    assert_non_null(s->disk);
    if (!o->clear)
        s->tls = tls_config(true, &ca, &server_pair);
    struct boot_options b = {.loops = s->loops,
                             .loop_count = s->loop_count,
                             .memory = s->disk,
                             .join_wait_ms = 60000,
                             .check_wait_ms = 30000,
                             .segment_idle_ms = 60000,
                             .buffers_bytes = 64 << 20,
                             .ensure_tenant = "acme",
                             .server = {.tls = s->tls,
                                        .no_bulk_lane = o->no_bulk_lane,
                                        .clear_identities = &anyone,
                                        .listen = listen,
                                        .listen_count = 1,
                                        .published = o->published,
                                        .published_count = o->published_count,
                                        .store_folder = o->store_folder,
                                        .space_reserve_bytes = o->space_reserve_bytes,
                                        .limits = o->limits}};
    if (b.server.limits.closing_ms == 0)
        b.server.limits.closing_ms = 50; /* test clients do not always close when told to */
    if (b.server.limits.read_cache_bytes == 0)
        b.server.limits.read_cache_bytes = 8 << 20;
    assert_int_equal(boot_start(&b, on_started, s), 0);
    for (size_t i = 0; i < s->loop_count; i++)
        assert_int_equal(pthread_create(&s->threads[i], NULL, run, s->loops[i]), 0);
    wait_event(s);
    if (!s->boot)
        fail_msg("%s", s->err.text);
}

static void do_stop(struct loop_msg *m)
{
    struct served *s = container_of(m, struct served, msg);
    boot_stop(s->boot, s->stop_bound_ms, on_stopped, s);
}

static void do_hurry(struct loop_msg *m)
{
    boot_hurry(container_of(m, struct served, msg)->boot);
}

void served_stop_begin(struct served *s, uint32_t bound_ms)
{
    s->stopping = true;
    s->stop_bound_ms = bound_ms;
    s->msg.run = do_stop;
    loop_post(s->loops[0], &s->msg);
}

void served_hurry(struct served *s)
{
    s->msg.run = do_hurry;
    loop_post(s->loops[0], &s->msg);
}

void served_stop_end(struct served *s)
{
    wait_event(s);
    for (size_t i = 0; i < s->loop_count; i++)
        pthread_join(s->threads[i], NULL);
    for (size_t i = 0; i < s->loop_count; i++)
        loop_destroy(s->loops[i]);
    memory_disk_unref(s->disk);
    channel_config_unref(s->tls);
    sem_destroy(&s->event);
}

void served_stop(struct served *s, uint32_t bound_ms)
{
    served_stop_begin(s, bound_ms);
    served_stop_end(s);
}

/* The client. */

static int dial(const char *address)
{
    char host[ADDRESS_BYTES_MAX], port[16];
    struct err e = {0};
    if (address_split(address, host, sizeof host, port, sizeof port, &e) < 0)
        fail_msg("%s", e.text);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
    assert_int_equal(inet_pton(AF_INET, host, &to.sin_addr), 1);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    if (connect(fd, (struct sockaddr *)&to, sizeof to) < 0)
        fail_msg("connecting to %s: %s", address, strerror(errno));
    return fd;
}

void caller_send_raw(struct caller *c, const void *p, size_t n)
{
    while (n > 0) {
        ssize_t done = send(c->fd, p, n, MSG_NOSIGNAL);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0) {
            c->closed = true;
            return;
        }
        p = (const char *)p + done;
        n -= (size_t)done;
    }
}

static void flush(struct caller *c)
{
    size_t n;
    uint8_t *p = channel_output_take(c->channel, &n);
    if (p)
        caller_send_raw(c, p, n);
    free(p);
}

/* Takes in what comes within ms. 1: something came, 0: nothing, -1: the end. */
static int receive(struct caller *c, int ms)
{
    static _Thread_local uint8_t bytes[65536];
    struct pollfd p = {.fd = c->fd, .events = POLLIN};
    if (c->closed)
        return -1;
    int ready = poll(&p, 1, ms);
    if (ready <= 0)
        return 0;
    ssize_t n = recv(c->fd, bytes, sizeof bytes, 0);
    if (n <= 0) {
        c->closed = true;
        return -1;
    }
    int r = channel_input(c->channel, bytes, (size_t)n, &c->err);
    flush(c);
    if (r < 0)
        c->closed = true;
    return r < 0 ? -1 : 1;
}

static void shake_hands(struct caller *c)
{
    assert_int_equal(channel_input(c->channel, NULL, 0, &c->err), 0);
    flush(c);
    while (!channel_ready(c->channel)) {
        int r = receive(c, SERVED_PATIENCE_MS);
        if (r == 0)
            fail_msg("no handshake in time");
        if (r < 0)
            return;
    }
}

void caller_open(struct caller *c, const struct served *s, struct channel_config *as)
{
    static const struct identity server = {.server = true};
    memset(c, 0, sizeof *c);
    c->fd = dial(s->address);
    if (as)
        assert_int_equal(channel_create(as, "127.0.0.1", &c->channel, &c->err), 0);
    else
        assert_int_equal(channel_create_clear(false, &server, &c->channel), 0);
    shake_hands(c);
}

void caller_dial(struct caller *c, const struct served *s)
{
    static const struct identity server = {.server = true};
    memset(c, 0, sizeof *c);
    c->fd = dial(s->address);
    assert_int_equal(channel_create_clear(false, &server, &c->channel), 0);
}

void caller_lane(struct caller *c, const struct served *s, const struct lane_keys *keys,
                 const struct id *ticket)
{
    static const struct identity server = {.server = true};
    memset(c, 0, sizeof *c);
    c->fd = dial(s->address);
    assert_int_equal(channel_create_lane(false, &server, keys, ticket, &c->channel, &c->err), 0);
    shake_hands(c);
    channel_allow_large(c->channel);
}

void caller_join(struct caller *c, const struct served *s, struct channel_config *as)
{
    struct answer a;
    struct buf b = {0};
    caller_open(c, s, as);
    struct msg_hello m = {.features = FEATURES_KNOWN, .software = slice_str("test")};
    msg_hello_encode(&m, &b);
    if (caller_call(c, OP_HELLO, &b, &a) != ERR_NONE)
        fail_msg("hello: %s", a.err.text);
    answer_free(&a);
    channel_allow_large(c->channel);
}

void caller_close(struct caller *c)
{
    if (!c->channel)
        return;
    close(c->fd);
    channel_free(c->channel);
    c->channel = NULL;
}

void caller_send_frame(struct caller *c, const struct frame_header *h, struct slice message,
                       struct slice tail)
{
    if (channel_send(c->channel, h, message, tail, &c->err) < 0)
        c->closed = true;
    flush(c);
}

uint64_t caller_send(struct caller *c, uint16_t opcode, uint32_t deadline_ms, struct buf *message,
                     struct slice tail)
{
    struct frame_header h = {.opcode = opcode, .request_id = ++c->last_id, .deadline_ms = deadline_ms};
    caller_send_frame(c, &h, message ? SLICE(message->p, message->n) : (struct slice){0}, tail);
    if (message)
        buf_free(message);
    return h.request_id;
}

void caller_cancel(struct caller *c, uint64_t id)
{
    struct buf b = {0};
    struct msg_cancel m = {.request_id = id};
    struct frame_header h = {.opcode = OP_CANCEL, .request_id = id};
    msg_cancel_encode(&m, &b);
    caller_send_frame(c, &h, SLICE(b.p, b.n), (struct slice){0});
    buf_free(&b);
}

void caller_credit(struct caller *c, uint64_t id, uint64_t bytes)
{
    struct buf b = {0};
    struct msg_credit m = {.request_id = id, .bytes = bytes};
    struct frame_header h = {.opcode = OP_CREDIT, .request_id = id};
    msg_credit_encode(&m, &b);
    caller_send_frame(c, &h, SLICE(b.p, b.n), (struct slice){0});
    buf_free(&b);
}

static bool take(struct caller *c, struct answer *a)
{
    struct frame f;
    int r = channel_frame(c->channel, &f, &c->err);
    if (r < 0)
        c->closed = true;
    if (r <= 0)
        return false;
    memset(a, 0, sizeof *a);
    a->header = f.header;
    a->payload = malloc(f.header.payload_bytes + 1);
    assert_non_null(a->payload);
    memcpy(a->payload, f.payload, f.header.payload_bytes);
    channel_frame_done(c->channel);
    assert_true(a->header.flags & FRAME_RESPONSE);
    if (a->header.flags & FRAME_ERROR) {
        struct rcur in = rcur_of(a->payload, a->header.payload_bytes);
        assert_true(err_of_msg(&in, &a->err) < 0);
    }
    return true;
}

bool caller_answer(struct caller *c, struct answer *a)
{
    memset(a, 0, sizeof *a);
    for (;;) {
        if (take(c, a))
            return true;
        int r = receive(c, SERVED_PATIENCE_MS);
        if (r == 0)
            fail_msg("no answer in time");
        if (r < 0)
            return take(c, a);
    }
}

bool caller_quiet(struct caller *c, int ms)
{
    struct answer a;
    bool came = take(c, &a);
    while (!came && receive(c, ms) > 0)
        came = take(c, &a);
    if (came)
        answer_free(&a);
    return !came;
}

void answer_free(struct answer *a)
{
    free(a->payload);
    a->payload = NULL;
}

enum err_class caller_call(struct caller *c, uint16_t opcode, struct buf *message, struct answer *a)
{
    uint64_t id = caller_send(c, opcode, 0, message, (struct slice){0});
    if (!caller_answer(c, a))
        fail_msg("%s: the server closed the connection (%s)", opcode_name(opcode), c->err.text);
    assert_int_equal(a->header.opcode, opcode);
    assert_int_equal(a->header.request_id, id);
    return a->err.class;
}

bool caller_drained(struct caller *c)
{
    for (;;) {
        struct answer a;
        while (take(c, &a))
            answer_free(&a);
        int r = receive(c, SERVED_PATIENCE_MS);
        if (r <= 0)
            return r < 0;
    }
}
