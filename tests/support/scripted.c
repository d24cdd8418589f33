/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/scripted.h"

#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

struct scripted {
    struct scripted_options o;
    pthread_t thread;
    int listener, stop, fd;
    char port[8];
    struct channel *channel;
    atomic_uint connections;
};

static void send_frame(struct scripted *s, const struct frame_header *h, struct slice message)
{
    struct err e;
    int rc = channel_send(s->channel, h, message, SLICE(NULL, 0), &e);
    check(rc == 0);
}

void scripted_answer(struct scripted *s, const struct frame_header *h, uint32_t flags, const void *p,
                     size_t n)
{
    struct frame_header answer = {
        .opcode = h->opcode, .flags = FRAME_RESPONSE | flags, .request_id = h->request_id};
    send_frame(s, &answer, SLICE(p, n));
}

void scripted_refuse(struct scripted *s, const struct frame_header *h, int class, const char *text)
{
    struct err e;
    struct buf b = {0};
    err_set(&e, (enum err_class) class, "%s", text);
    msg_of_err(&e, &b);
    scripted_answer(s, h, FRAME_ERROR, b.p, b.n);
    buf_free(&b);
}

static void hello(struct scripted *s, const struct frame_header *h)
{
    struct buf b = {0};
    struct msg_hello_reply m = {.features = FEATURES_KNOWN,
                                .software = slice_str("scripted 1"),
                                .tenant = slice_str("acme"),
                                .role = ROLE_WRITER,
                                .server_time_ns = 17};
    if (s->o.refuse_class) {
        struct frame_header early = {.opcode = OP_HELLO};
        scripted_refuse(s, s->o.refuse_early ? &early : h, s->o.refuse_class,
                        "hello was refused by the script");
        return;
    }
    msg_hello_reply_encode(&m, &b);
    scripted_answer(s, h, 0, b.p, b.n);
    buf_free(&b);
    channel_allow_large(s->channel);
}

static bool flush(struct scripted *s)
{
    struct slice out = channel_output(s->channel);
    while (out.n > 0) {
        ssize_t n = send(s->fd, out.p, out.n, MSG_NOSIGNAL);
        if (n <= 0)
            return false;
        channel_output_done(s->channel, (size_t)n);
        out = channel_output(s->channel);
    }
    return true;
}

/* False: hang up. */
static bool take_input(struct scripted *s)
{
    static uint8_t bytes[65536];
    ssize_t n = recv(s->fd, bytes, sizeof bytes, 0);
    struct err e;
    if (n <= 0 || channel_input(s->channel, bytes, (size_t)n, &e) < 0)
        return false;
    if (s->o.silent)
        return true;
    struct frame f;
    while (channel_frame(s->channel, &f, &e) > 0) {
        enum scripted_next next = SCRIPT_GO_ON;
        if (f.header.opcode == OP_HELLO)
            hello(s, &f.header);
        else
            next = s->o.frame(s->o.arg, s, &f.header, f.payload);
        channel_frame_done(s->channel);
        if (!flush(s) || next == SCRIPT_HANG_UP)
            return false;
    }
    return true;
}

/* Until the client hangs up (true) or the test ends (false). */
static bool serve(struct scripted *s)
{
    for (;;) {
        struct pollfd p[2] = {{.fd = s->stop, .events = POLLIN}, {.fd = s->fd, .events = POLLIN}};
        if (poll(p, 2, -1) < 0)
            continue;
        if (p[0].revents)
            return false;
        if (!take_input(s))
            return true;
    }
}

static void *run(void *arg)
{
    struct scripted *s = arg;
    bool go_on = true;
    while (go_on) {
        struct pollfd p[2] = {{.fd = s->stop, .events = POLLIN}, {.fd = s->listener, .events = POLLIN}};
        if (poll(p, 2, -1) < 0)
            continue;
        if (p[0].revents)
            break;
        struct identity peer = {.tenant = "acme", .role = ROLE_WRITER};
        s->fd = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC);
        check(s->fd >= 0);
        atomic_fetch_add(&s->connections, 1);
        int rc = channel_create_clear(true, &peer, &s->channel);
        check(rc == 0);
        go_on = serve(s);
        channel_free(s->channel);
        close(s->fd);
    }
    return NULL;
}

struct scripted *scripted_start(const struct scripted_options *o)
{
    struct scripted *s = calloc(1, sizeof *s);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    check(s);
    s->o = *o;
    s->stop = eventfd(0, EFD_CLOEXEC);
    s->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    check(s->listener >= 0 && bind(s->listener, (struct sockaddr *)&a, n) == 0 &&
          listen(s->listener, 16) == 0);
    check(getsockname(s->listener, (struct sockaddr *)&a, &n) == 0);
    snprintf(s->port, sizeof s->port, "%u", ntohs(a.sin_port));
    int rc = pthread_create(&s->thread, NULL, run, s);
    check(rc == 0);
    return s;
}

const char *scripted_port(const struct scripted *s)
{
    return s->port;
}

unsigned scripted_connections(struct scripted *s)
{
    return atomic_load(&s->connections);
}

void scripted_stop(struct scripted *s)
{
    uint64_t one = 1;
    ssize_t n = write(s->stop, &one, sizeof one);
    check(n == sizeof one);
    pthread_join(s->thread, NULL);
    close(s->listener);
    close(s->stop);
    free(s);
}
