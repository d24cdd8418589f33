/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/tamper.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "format/base/cursor.h"
#include "format/base/list.h"
#include "format/lane.h"
#include "format/wire.h"

#define HEAD_BYTES  (FRAME_HEADER_BYTES + LANE_TAG_BYTES)
#define FRAME_BYTES (HEAD_BYTES + FRAME_PAYLOAD_BYTES_MAX + LANE_TAG_BYTES)

struct tamper {
    struct sockaddr_in server;
    int listener;
    char address[32];
    pthread_t thread;
    pthread_mutex_t lock;
    enum tamper_kind kind;
    bool to_server;
    unsigned skip, times;
    atomic_uint count, frames, lanes;
    atomic_uint pumps; /* threads */
    struct list links; /* under the lock */
};

struct link {
    struct list in_tamper;
    struct tamper *t;
    int fds[2];      /* client, server */
    atomic_int lane; /* -1: not known yet */
    atomic_uint users;
};

struct pump {
    struct link *l;
    bool to_server;
};

static bool send_all(int fd, const uint8_t *p, size_t n)
{
    while (n > 0) {
        ssize_t sent = send(fd, p, n, MSG_NOSIGNAL);
        if (sent <= 0)
            return false;
        p += sent;
        n -= (size_t)sent;
    }
    return true;
}

static bool receive_all(int fd, uint8_t *p, size_t n)
{
    return n == 0 || recv(fd, p, n, MSG_WAITALL) == (ssize_t)n;
}

/* Is this frame to be met with? */
static bool chosen(struct tamper *t, bool to_server, size_t payload)
{
    bool yes = false;
    pthread_mutex_lock(&t->lock);
    if (t->times > 0 && t->to_server == to_server && (payload > 0 || t->kind != TAMPER_PAYLOAD)) {
        if (t->skip > 0) {
            t->skip--;
        } else {
            t->times--;
            yes = true;
        }
    }
    pthread_mutex_unlock(&t->lock);
    if (yes)
        atomic_fetch_add(&t->count, 1);
    return yes;
}

/* One whole frame, with its tags. 0: the end. */
static size_t read_frame(int fd, bool to_server, uint8_t *frame, size_t *payload)
{
    if (!receive_all(fd, frame, HEAD_BYTES))
        return 0;
    *payload = le32_get(frame + 12);
    if (*payload > FRAME_PAYLOAD_BYTES_MAX)
        return 0;
    bool sealed = !to_server && le16_get(frame + 6) == OP_READ && (le32_get(frame + 8) & 3) == FRAME_RESPONSE;
    size_t rest = *payload + (*payload > 0 && !sealed ? LANE_TAG_BYTES : 0);
    return receive_all(fd, frame + HEAD_BYTES, rest) ? HEAD_BYTES + rest : 0;
}

static bool pass_frame(struct tamper *t, bool to_server, int from, int to, uint8_t *frame, uint8_t *next)
{
    size_t payload, other, n = read_frame(from, to_server, frame, &payload);
    if (n == 0)
        return false;
    atomic_fetch_add(&t->frames, 1);
    if (!chosen(t, to_server, payload))
        return send_all(to, frame, n);
    switch (t->kind) {
    case TAMPER_HEADER: frame[16] ^= 1; break;
    case TAMPER_PAYLOAD: frame[HEAD_BYTES + payload / 2] ^= 0x20; break;
    case TAMPER_TAG: frame[FRAME_HEADER_BYTES + 3] ^= 0x80; break;
    case TAMPER_DROP: return true;
    case TAMPER_REPEAT: return send_all(to, frame, n) && send_all(to, frame, n);
    case TAMPER_CUT: return false;
    default: {
        size_t m = read_frame(from, to_server, next, &other);
        if (m == 0 || !send_all(to, next, m))
            return false;
        break;
    }
    }
    return send_all(to, frame, n);
}

static void pass_lane(struct link *l, bool to_server, int from, int to)
{
    uint8_t opening[LANE_HELLO_BYTES];
    uint8_t *frame = malloc(FRAME_BYTES), *next = malloc(FRAME_BYTES);
    check(frame && next);
    if (receive_all(from, opening, sizeof opening) && send_all(to, opening, sizeof opening))
        while (pass_frame(l->t, to_server, from, to, frame, next))
            ;
    free(frame);
    free(next);
}

static void pass_bytes(int from, int to)
{
    uint8_t *bytes = malloc(65536);
    check(bytes);
    for (ssize_t n; (n = recv(from, bytes, 65536, 0)) > 0 && send_all(to, bytes, (size_t)n);)
        ;
    free(bytes);
}

static void *pump_run(void *arg)
{
    struct pump *p = arg;
    struct link *l = p->l;
    struct tamper *t = l->t;
    int from = l->fds[!p->to_server], to = l->fds[p->to_server];
    uint8_t first;
    /* The client speaks first in both protocols, so the server's side knows by then. */
    if (recv(from, &first, 1, MSG_PEEK) == 1) {
        if (p->to_server) {
            atomic_store(&l->lane, first == (uint8_t)LANE_MAGIC);
            if (first == (uint8_t)LANE_MAGIC)
                atomic_fetch_add(&t->lanes, 1);
        }
        if (atomic_load(&l->lane) == 1)
            pass_lane(l, p->to_server, from, to);
        else
            pass_bytes(from, to);
    }
    shutdown(l->fds[0], SHUT_RDWR);
    shutdown(l->fds[1], SHUT_RDWR);
    pthread_mutex_lock(&t->lock);
    bool last = atomic_fetch_sub(&l->users, 1) == 1;
    if (last)
        list_del(&l->in_tamper);
    pthread_mutex_unlock(&t->lock);
    if (last) {
        close(l->fds[0]);
        close(l->fds[1]);
        free(l);
    }
    free(p);
    atomic_fetch_sub(&t->pumps, 1);
    return NULL;
}

static void start_pump(struct link *l, bool to_server)
{
    struct pump *p = malloc(sizeof *p);
    pthread_t thread;
    check(p);
    *p = (struct pump){.l = l, .to_server = to_server};
    atomic_fetch_add(&l->t->pumps, 1);
    int rc = pthread_create(&thread, NULL, pump_run, p);
    check(rc == 0);
    pthread_detach(thread);
}

static void *accept_run(void *arg)
{
    struct tamper *t = arg;
    for (int client; (client = accept4(t->listener, NULL, NULL, SOCK_CLOEXEC)) >= 0;) {
        int one = 1, server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        struct link *l = calloc(1, sizeof *l);
        check(server >= 0 && l);
        setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (connect(server, (struct sockaddr *)&t->server, sizeof t->server) < 0) {
            close(client);
            close(server);
            free(l);
            continue;
        }
        *l = (struct link){.t = t, .fds = {client, server}};
        atomic_store(&l->lane, -1);
        atomic_store(&l->users, 2);
        pthread_mutex_lock(&t->lock);
        list_add_tail(&t->links, &l->in_tamper);
        pthread_mutex_unlock(&t->lock);
        start_pump(l, true);
        start_pump(l, false);
    }
    return NULL;
}

struct tamper *tamper_start(const char *server_address)
{
    struct tamper *t = calloc(1, sizeof *t);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    const char *port = strrchr(server_address, ':');
    check(t && port);
    t->server = a;
    t->server.sin_port = htons((uint16_t)atoi(port + 1));
    pthread_mutex_init(&t->lock, NULL);
    list_init(&t->links);
    t->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    check(t->listener >= 0 && bind(t->listener, (struct sockaddr *)&a, n) == 0 &&
          listen(t->listener, 32) == 0);
    check(getsockname(t->listener, (struct sockaddr *)&a, &n) == 0);
    snprintf(t->address, sizeof t->address, "127.0.0.1:%u", ntohs(a.sin_port));
    int rc = pthread_create(&t->thread, NULL, accept_run, t);
    check(rc == 0);
    return t;
}

const char *tamper_address(const struct tamper *t)
{
    return t->address;
}

void tamper_arm(struct tamper *t, enum tamper_kind kind, bool to_server, unsigned skip, unsigned times)
{
    pthread_mutex_lock(&t->lock);
    t->kind = kind;
    t->to_server = to_server;
    t->skip = skip;
    t->times = times;
    pthread_mutex_unlock(&t->lock);
}

unsigned tamper_count(struct tamper *t)
{
    return atomic_load(&t->count);
}

unsigned tamper_frames(struct tamper *t)
{
    return atomic_load(&t->frames);
}

unsigned tamper_lanes(struct tamper *t)
{
    return atomic_load(&t->lanes);
}

void tamper_stop(struct tamper *t)
{
    shutdown(t->listener, SHUT_RDWR);
    pthread_join(t->thread, NULL);
    close(t->listener);
    pthread_mutex_lock(&t->lock);
    list_for_each (it, &t->links) {
        struct link *l = container_of(it, struct link, in_tamper);
        shutdown(l->fds[0], SHUT_RDWR);
        shutdown(l->fds[1], SHUT_RDWR);
    }
    pthread_mutex_unlock(&t->lock);
    while (atomic_load(&t->pumps) > 0)
        poll(NULL, 0, 2);
    pthread_mutex_destroy(&t->lock);
    free(t);
}
