/* SPDX-License-Identifier: Apache-2.0 */
/* See daemon.h. One thread; each connection has a twin to the server. */
#include <arpa/inet.h>
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

#include "format/base/err.h"
#include "tests/support/daemon.h"

#define PAIRS_MAX 16
#define LOOK_MS   20 /* for a hold that has ended */

struct proxy {
    struct sockaddr_in server;
    int listener, stop;
    char address[32];
    pthread_t thread;
    int pairs[PAIRS_MAX][2];    /* client, server; -1: free */
    uint64_t passed[PAIRS_MAX]; /* to the server */
    atomic_ullong hold;
    atomic_llong left; /* bytes until the cut; negative: no cut */
    atomic_uint cuts;
};

static void close_pair(int pair[2])
{
    close(pair[0]);
    close(pair[1]);
    pair[0] = pair[1] = -1;
}

static void cut_all(struct proxy *p)
{
    for (int i = 0; i < PAIRS_MAX; i++)
        if (p->pairs[i][0] >= 0)
            close_pair(p->pairs[i]);
    atomic_fetch_add(&p->cuts, 1);
}

static void take_connection(struct proxy *p)
{
    int client = accept4(p->listener, NULL, NULL, SOCK_CLOEXEC);
    int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    check(client >= 0 && server >= 0);
    for (int i = 0; i < PAIRS_MAX; i++) {
        if (p->pairs[i][0] >= 0)
            continue;
        p->pairs[i][0] = client;
        p->pairs[i][1] = server;
        p->passed[i] = 0;
        if (connect(server, (struct sockaddr *)&p->server, sizeof p->server) < 0)
            close_pair(p->pairs[i]);
        return;
    }
    close(client);
    close(server);
}

static bool pass_on(int from, int to, void *buffer, ssize_t *n)
{
    *n = recv(from, buffer, 16384, 0);
    if (*n <= 0)
        return false;
    for (ssize_t at = 0; at < *n;) {
        ssize_t sent = send(to, (char *)buffer + at, (size_t)(*n - at), MSG_NOSIGNAL);
        if (sent <= 0)
            return false;
        at += sent;
    }
    return true;
}

/* False: that was the byte to cut at, and everything is cut. */
static bool counted(struct proxy *p, ssize_t n)
{
    long long left = atomic_load(&p->left);
    if (left < 0)
        return true;
    if (left > n) {
        atomic_fetch_sub(&p->left, n);
        return true;
    }
    atomic_store(&p->left, -1);
    cut_all(p);
    return false;
}

static void move(struct proxy *p, int i, bool from_client, bool from_server)
{
    int *pair = p->pairs[i];
    static char buffer[16384];
    ssize_t n = 0;
    bool good = true;
    if (from_server)
        good = pass_on(pair[1], pair[0], buffer, &n) && counted(p, n);
    if (good && from_client) {
        good = pass_on(pair[0], pair[1], buffer, &n);
        p->passed[i] += good ? (uint64_t)n : 0;
        good = good && counted(p, n);
    }
    if (!good && pair[0] >= 0)
        close_pair(pair);
}

static void *run(void *arg)
{
    struct proxy *p = arg;
    for (;;) {
        struct pollfd fds[2 + 2 * PAIRS_MAX] = {{.fd = p->stop, .events = POLLIN},
                                                {.fd = p->listener, .events = POLLIN}};
        for (int i = 0; i < PAIRS_MAX; i++)
            for (int side = 0; side < 2; side++) {
                bool held = side == 0 && p->passed[i] > atomic_load(&p->hold);
                fds[2 + 2 * i + side] =
                    (struct pollfd){.fd = held ? -1 : p->pairs[i][side], .events = POLLIN};
            }
        if (poll(fds, 2 + 2 * PAIRS_MAX, LOOK_MS) < 0)
            continue;
        if (fds[0].revents)
            break;
        for (int i = 0; i < PAIRS_MAX; i++)
            if (p->pairs[i][0] >= 0 && (fds[2 + 2 * i].revents || fds[3 + 2 * i].revents))
                move(p, i, fds[2 + 2 * i].revents, fds[3 + 2 * i].revents);
        if (fds[1].revents)
            take_connection(p);
    }
    for (int i = 0; i < PAIRS_MAX; i++)
        if (p->pairs[i][0] >= 0)
            close_pair(p->pairs[i]);
    return NULL;
}

struct proxy *proxy_start(const char *server_address)
{
    struct proxy *p = calloc(1, sizeof *p);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    check(p);
    const char *port = strrchr(server_address, ':');
    check(port);
    p->server = a;
    p->server.sin_port = htons((uint16_t)atoi(port + 1));
    p->stop = eventfd(0, EFD_CLOEXEC);
    p->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    check(p->listener >= 0 && bind(p->listener, (struct sockaddr *)&a, n) == 0 &&
          listen(p->listener, 16) == 0);
    check(getsockname(p->listener, (struct sockaddr *)&a, &n) == 0);
    snprintf(p->address, sizeof p->address, "127.0.0.1:%u", ntohs(a.sin_port));
    memset(p->pairs, -1, sizeof p->pairs);
    atomic_store(&p->left, -1);
    atomic_store(&p->hold, UINT64_MAX);
    int rc = pthread_create(&p->thread, NULL, run, p);
    check(rc == 0);
    return p;
}

const char *proxy_address(const struct proxy *p)
{
    return p->address;
}

void proxy_cut_after(struct proxy *p, uint64_t bytes)
{
    atomic_store(&p->left, (long long)bytes);
}

void proxy_hold_after(struct proxy *p, uint64_t bytes)
{
    atomic_store(&p->hold, bytes);
}

unsigned proxy_cuts(struct proxy *p)
{
    return atomic_load(&p->cuts);
}

void proxy_stop(struct proxy *p)
{
    uint64_t one = 1;
    ssize_t n = write(p->stop, &one, sizeof one);
    check(n == sizeof one);
    pthread_join(p->thread, NULL);
    close(p->listener);
    close(p->stop);
    free(p);
}
