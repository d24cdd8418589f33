/* SPDX-License-Identifier: Apache-2.0 */
#include "server/io/host.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#define LISTEN_BACKLOG 4096
/* A larderd that was killed keeps its port until the kernel has taken its ring apart, which goes on for some
 * milliseconds after the process is gone; whoever starts the next one need not know. */
#define LISTEN_PATIENCE_MS 1500
#define LISTEN_PAUSE_MS    20

/* The loop whose callbacks run on this thread: its own messages need no bell. */
static _Thread_local const struct host *here;

static uint64_t clock_ms(void)
{
    struct timespec t;
    check(clock_gettime(CLOCK_MONOTONIC, &t) == 0);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

int host_init(struct host *h, const struct loop_ops *ops, unsigned threads_max, struct err *e)
{
    loop_base_init(&h->loop, ops);
    h->end = &h->first;
    int status = inbox_init(&h->inbox);
    if (status)
        return err_sys(e, -status, "a loop needs an eventfd; none could be made (see `ulimit -n`)");
    h->workers = workers_create(threads_max, &h->inbox);
    if (!h->workers) {
        inbox_fini(&h->inbox);
        return err_set(e, ERR_NO_MEMORY, "no memory for a loop");
    }
    h->turn_ms = clock_ms();
    return 0;
}

void host_fini(struct host *h)
{
    workers_destroy(h->workers);
    inbox_fini(&h->inbox);
}

void host_gather(struct host *h)
{
    struct list finished, *entry;
    list_init(&finished);
    inbox_empty(&h->inbox, &h->end, &finished);
    while ((entry = list_pop(&finished))) {
        struct io_op *op = container_of(entry, struct io_op, link);
        loop_ready(&h->loop, op, op->result);
    }
}

bool host_done(const struct host *h)
{
    return h->stopped && h->loop.pending == 0 && !h->first;
}

int64_t host_wait_ms(const struct host *h)
{
    uint64_t at = loop_next_timer(&h->loop);
    if (h->first || !list_empty(&h->loop.ready))
        return 0;
    if (!at)
        return -1;
    uint64_t now = clock_ms();
    return at <= now ? 0 : (int64_t)(at - now < INT32_MAX ? at - now : INT32_MAX);
}

static void run_messages(struct host *h)
{
    for (unsigned budget = HOST_BUDGET; budget && h->first; budget--) {
        struct loop_msg *m = h->first;
        h->first = m->next;
        if (!h->first)
            h->end = &h->first;
        m->run(m);
    }
}

void host_turn(struct host *h)
{
    const struct host *outer = here;
    here = h;
    h->turn_ms = clock_ms();
    run_messages(h);
    loop_fire_timers(&h->loop, h->turn_ms, HOST_BUDGET);
    loop_run_ready(&h->loop, HOST_BUDGET);
    here = outer;
}

int host_space(struct loop *l, const char *path, uint64_t *free_bytes, uint64_t *total_bytes)
{
    struct statvfs v;
    (void)l;
    if (statvfs(path, &v))
        return -errno;
    *free_bytes = (uint64_t)v.f_bavail * v.f_frsize;
    *total_bytes = (uint64_t)v.f_blocks * v.f_frsize;
    return 0;
}

int host_boot(struct loop *l, char out[LOOP_BOOT_BYTES])
{
    (void)l;
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    ssize_t n = read(fd, out, LOOP_BOOT_BYTES - 1);
    int status = n < 0 ? -errno : 0;
    close(fd);
    if (status)
        return status;
    out[n] = '\0';
    out[strspn(out, "abcdefghijklmnopqrstuvwxyz0123456789-")] = '\0'; /* a line's end follows */
    return *out ? 0 : -EINVAL;
}

int host_lock(struct loop *l, int fd)
{
    (void)l;
    return flock(fd, LOCK_EX | LOCK_NB) ? -errno : 0;
}

static void address_text(const struct sockaddr *a, socklen_t n, char *out, size_t size)
{
    char host[NI_MAXHOST], port[NI_MAXSERV];
    if (getnameinfo(a, n, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV))
        snprintf(out, size, "unknown");
    else
        snprintf(out, size, a->sa_family == AF_INET6 ? "[%s]:%s" : "%s:%s", host, port);
}

/* One address of those that a name stands for. Returns the descriptor or a negative errno. */
static int listen_at(const struct addrinfo *a, bool shared, const char **doing)
{
    int on = 1;
    *doing = "making a socket";
    int fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
    if (fd < 0)
        return -errno;
    *doing = "setting SO_REUSEADDR";
    int status = setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (status == 0 && shared) {
        *doing = "setting SO_REUSEPORT";
        status = setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on);
    }
    if (status == 0) {
        *doing = "binding";
        status = bind(fd, a->ai_addr, a->ai_addrlen);
    }
    if (status == 0) {
        *doing = "listening";
        status = listen(fd, LISTEN_BACKLOG);
    }
    if (status == 0)
        return fd;
    status = -errno;
    close(fd);
    return status;
}

static const char *listen_advice(int errnum)
{
    switch (errnum) {
    case EADDRINUSE: return "; another program uses this port: stop it or choose another port";
    case EADDRNOTAVAIL: return "; no interface of this machine has this address";
    case EACCES: return "; ports below 1024 need CAP_NET_BIND_SERVICE: choose a higher one";
    default: return "";
    }
}

/* The first of the addresses that can be had; waits a little for a port that is just becoming free. */
static int listen_any(const struct addrinfo *all, bool shared, const char **doing)
{
    uint64_t until_ms = clock_ms() + LISTEN_PATIENCE_MS;
    for (;;) {
        int result = -EADDRNOTAVAIL;
        for (const struct addrinfo *a = all; a && result < 0; a = a->ai_next)
            result = listen_at(a, shared, doing);
        if (result != -EADDRINUSE || clock_ms() >= until_ms)
            return result;
        nanosleep(&(struct timespec){.tv_nsec = LISTEN_PAUSE_MS * 1000000l}, NULL);
    }
}

int host_listen(struct loop *l, const char *host, const char *port, bool shared, int *fd, char *bound,
                size_t bound_size, struct err *e)
{
    struct addrinfo want = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV}, *all = NULL;
    const char *doing = "looking up the address", *shown = host && *host ? host : "*";
    (void)l;
    int status = getaddrinfo(host && *host && strcmp(host, "*") != 0 ? host : NULL, port, &want, &all);
    if (status)
        return err_set(e, ERR_INVALID, "cannot listen on %s port %s: %s; give an address of this machine",
                       shown, port, status == EAI_SYSTEM ? strerror(errno) : gai_strerror(status));
    int result = listen_any(all, shared, &doing);
    freeaddrinfo(all);
    if (result < 0)
        return err_sys(e, -result, "cannot listen on %s port %s%s (%s)", shown, port, listen_advice(-result),
                       doing);
    *fd = result;
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    if (bound_size && getsockname(result, (struct sockaddr *)&a, &n) == 0)
        address_text((struct sockaddr *)&a, n, bound, bound_size);
    else if (bound_size)
        snprintf(bound, bound_size, "%s:%s", shown, port);
    return 0;
}

int host_address(struct io_req *r, int flags)
{
    struct addrinfo want = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV},
                    *a = NULL;
    int status = getaddrinfo(r->path, r->path2, &want, &a);
    if (status)
        return status == EAI_MEMORY ? -ENOMEM : -EINVAL;
    check(a->ai_addrlen <= sizeof r->addr.bytes);
    memcpy(r->addr.bytes, a->ai_addr, a->ai_addrlen);
    r->addr.length = a->ai_addrlen;
    r->fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | flags, a->ai_protocol);
    status = r->fd < 0 ? -errno : 0;
    freeaddrinfo(a);
    return status;
}

void host_recv_least(struct loop *l, int fd, size_t n)
{
    (void)l;
    int least = n < (1u << 30) ? (int)n : 1 << 30;
    (void)!setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least);
}

void host_shutdown(struct loop *l, int fd)
{
    (void)l;
    (void)!shutdown(fd, SHUT_RDWR);
}

void host_peer(struct loop *l, int fd, char *out, size_t size)
{
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    (void)l;
    if (getpeername(fd, (struct sockaddr *)&a, &n))
        snprintf(out, size, "unknown");
    else
        address_text((struct sockaddr *)&a, n, out, size);
}

uint64_t host_now_ms(struct loop *l)
{
    struct host *h = container_of(l, struct host, loop);
    return h->running ? h->turn_ms : clock_ms();
}

uint64_t host_unix_ns(struct loop *l)
{
    struct timespec t;
    (void)l;
    check(clock_gettime(CLOCK_REALTIME, &t) == 0);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void host_random(struct loop *l, void *p, size_t n)
{
    uint8_t *at = p;
    (void)l;
    while (n) {
        ssize_t got = getrandom(at, n, 0);
        if (got < 0) {
            check(errno == EINTR); /* nothing else can fail once the kernel's pool is up */
            continue;
        }
        at += got;
        n -= (size_t)got;
    }
}

void host_post(struct loop *l, struct loop_msg *m)
{
    struct host *h = container_of(l, struct host, loop);
    inbox_post(&h->inbox, m, here != h);
}

void host_stop(struct loop *l)
{
    container_of(l, struct host, loop)->stopped = true;
}

static bool is_this_machine(const struct sockaddr_storage *a)
{
    if (a->ss_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    const struct in6_addr *six = &((const struct sockaddr_in6 *)a)->sin6_addr;
    return a->ss_family == AF_INET6 &&
           (IN6_IS_ADDR_LOOPBACK(six) || (IN6_IS_ADDR_V4MAPPED(six) && six->s6_addr[12] == IN_LOOPBACKNET));
}

/* Nothing is ever congested within a machine, but control that paces (BBR) sets a timer for every few
 * packets: as much CPU time as the copying. */
static void spare_pacing(int fd)
{
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    if (getpeername(fd, (struct sockaddr *)&a, &n) == 0 && is_this_machine(&a))
        (void)!setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

void host_tune(int fd)
{
    int on = 1;
    (void)!setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* slower without, not wrong */
    /* A peer whose machine is gone is found out in some minutes, also where nothing is sent to it: a stream
     * that waits for credit may wait for ever. */
    int idle_s = 60, interval_s = 20, probes = 6;
    (void)!setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    (void)!setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    (void)!setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
    (void)!setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    spare_pacing(fd);
}
