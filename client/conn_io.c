/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread of a connection: connect, authenticate, hello, then frames both ways until the connection is
 * lost or closed; and again. It blocks in conn_poll only, which keeps the deadlines of calls and runs what
 * ended, so these hold while the server is away as well.
 */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "client/clock.h"
#include "client/conn_private.h"
#include "format/base/log.h"
#include "format/base/secret.h"
#include "format/version.h"

#define INPUT_BYTES      (256u << 10) /* one receive: opened while it is in the cache */
#define RECEIVE_LEAST    (256u << 10) /* of a large frame, before the thread is woken */
#define PARTS_MAX        16u
#define AHEAD_BYTES      4096u       /* received together with the end of a payload: the next header */
#define WASTE_BYTES      (64u << 10) /* received at once of what nobody wants */
#define INPUT_TURN_BYTES (2u << 20)  /* received before output gets its turn */
#define OUTPUT_BYTES     (1u << 20)  /* encrypted and not sent: what else is queued waits in the clear */
#define BACKOFF_MIN_MS   20u
#define BACKOFF_MAX_MS   2000u
#define LANE_FAULTS_MAX  4u     /* of a lane, before it is given up */
#define LANE_STABLE_MS   10000u /* a lane that held so long has its faults forgiven */
#define STABLE_MS        1000u  /* a connection that held so long is made again without delay */

/* ---- calls that end ---- */

/* A call that ends before its request is out (cancelled, too late) gets its tail back all the same. */
static void give_tail_back(struct conn *c, const struct call *call)
{
    struct err e;
    if (c->lender != call)
        return;
    c->lender = NULL;
    if (c->channel && channel_lent_keep(c->channel, &e) < 0)
        (void)shutdown(c->fd, SHUT_RDWR); /* half a frame is out, and its rest never comes */
}

static void run_ended(struct conn *c)
{
    for (;;) {
        pthread_mutex_lock(&c->lock);
        struct list *it = list_pop(&c->ended);
        pthread_mutex_unlock(&c->lock);
        if (!it)
            return;
        struct call *call = container_of(it, struct call, link);
        give_tail_back(c, call);
        call->done(call);
    }
}

static void end_flying(struct conn *c, const struct err *e)
{
    while (!list_empty(&c->flying))
        conn_end(c, container_of(c->flying.next, struct call, link), e);
}

static void end_queued(struct conn *c, const struct err *e)
{
    struct list *it;
    while ((it = list_pop(&c->queue)) != NULL) {
        struct outgoing *o = container_of(it, struct outgoing, link);
        if (o->call)
            conn_end(c, o->call, e);
        free(o);
    }
}

static bool paused(const struct call *call)
{
    return conn_streams(call) && call->credit <= 0;
}

static void late(struct conn *c, struct call *call, bool sent)
{
    struct err e;
    err_set(&e, ERR_TIMEOUT, "%s:%s did not answer %s within %u ms (%s); is the server overloaded or gone?",
            c->host, c->port, opcode_name(call->opcode), call->bound_ms,
            sent ? "it was sent" : "it could not be sent");
    conn_end(c, call, &e);
}

/* With the lock held. Ends calls whose time is up, and finds the next such time. */
static void expire(struct conn *c)
{
    uint64_t now = clock_ms(), next = UINT64_MAX;
    if (now < c->next_deadline_ms)
        return;
    list_for_each_safe (it, &c->flying) {
        struct call *call = container_of(it, struct call, link);
        if (paused(call))
            continue;
        if (call->deadline_ms <= now) {
            struct buf b = {0};
            msg_cancel_encode(&(struct msg_cancel){.request_id = call->id}, &b);
            conn_one_way(c, OP_CANCEL, call->id, &b);
            buf_free(&b);
            late(c, call, true);
        } else if (call->deadline_ms < next) {
            next = call->deadline_ms;
        }
    }
    list_for_each_safe (it, &c->queue) {
        struct outgoing *o = container_of(it, struct outgoing, link);
        if (!o->call)
            continue;
        if (o->call->deadline_ms <= now) {
            list_del(&o->link);
            late(c, o->call, false);
            free(o);
        } else if (o->call->deadline_ms < next) {
            next = o->call->deadline_ms;
        }
    }
    c->next_deadline_ms = next;
}

/* ---- the one place that waits ---- */

static int poll_ms(uint64_t until_ms)
{
    uint64_t now = clock_ms();
    if (until_ms <= now)
        return 0;
    return until_ms - now > 60000 ? 60000 : (int)(until_ms - now);
}

/* What the socket is ready for; 0: woken, or a moment passed; -1: the connection is being closed. */
static int conn_poll(struct conn *c, short events, uint64_t until_ms)
{
    pthread_mutex_lock(&c->lock);
    if (c->stopping) {
        struct err e;
        err_set(&e, ERR_CANCELLED, "the connection to %s:%s was closed by this side", c->host, c->port);
        end_flying(c, &e);
        end_queued(c, &e);
    }
    expire(c);
    bool closing = c->closing;
    uint64_t next = c->next_deadline_ms < until_ms ? c->next_deadline_ms : until_ms;
    c->sleeps_until_ms = next;
    pthread_mutex_unlock(&c->lock);
    run_ended(c);
    if (closing)
        return -1;
    struct pollfd fds[2] = {{.fd = c->wake, .events = POLLIN}, {.fd = c->fd, .events = events}};
    nfds_t fd_count = c->fd >= 0 ? 2 : 1;
    pthread_mutex_unlock(&c->io);
    int ready = poll(fds, fd_count, poll_ms(next));
    pthread_mutex_lock(&c->io);
    if (ready <= 0)
        return 0;
    if (fds[0].revents) {
        uint64_t count;
        ssize_t n = read(c->wake, &count, sizeof count);
        (void)n;
    }
    return c->fd >= 0 ? fds[1].revents : 0;
}

bool conn_idle(struct conn *c, uint64_t until_ms)
{
    return conn_poll(c, 0, until_ms) >= 0;
}

/* Lets time pass while calls keep their deadlines; false: closing. */
static bool pause_until(struct conn *c, uint64_t until_ms)
{
    while (clock_ms() < until_ms)
        if (conn_poll(c, 0, until_ms) < 0)
            return false;
    return true;
}

static int closing_error(struct conn *c, struct err *e)
{
    return err_set(e, ERR_CANCELLED, "the connection to %s:%s was closed by this side", c->host, c->port);
}

/* ---- connecting ---- */

static void set_socket_options(struct conn *c)
{
    int one = 1, idle = 10, interval = 5, probes = 3;
    unsigned unacked_ms = c->request_timeout_ms;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(c->fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one); /* a peer that vanished is noticed */
    setsockopt(c->fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(c->fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    setsockopt(c->fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    setsockopt(c->fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacked_ms, sizeof unacked_ms);
}

static bool is_this_machine(const struct sockaddr *a)
{
    if (a->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    return a->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)a)->sin6_addr);
}

/* Nothing is ever congested within a machine, but control that paces (BBR) sets a timer for every few
 * packets: as much CPU time as the copying. */
static void spare_pacing(int fd)
{
    (void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

static int connect_one(struct conn *c, const struct addrinfo *a, uint64_t until_ms, struct err *e)
{
    c->fd = socket(a->ai_family, a->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, a->ai_protocol);
    if (c->fd < 0)
        return err_sys(e, errno, "opening a socket");
    c->least = 1;
    set_socket_options(c);
    if (is_this_machine(a->ai_addr))
        spare_pacing(c->fd);
    int errnum = connect(c->fd, a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    while (errnum == EINPROGRESS) {
        int ready = conn_poll(c, POLLOUT, until_ms);
        if (ready < 0)
            return closing_error(c, e);
        socklen_t n = sizeof errnum;
        if (ready != 0)
            getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &errnum, &n);
        else if (clock_ms() >= until_ms)
            errnum = ETIMEDOUT;
    }
    if (errnum == 0)
        return 0;
    close(c->fd);
    c->fd = -1;
    char why[128];
    return err_set(e, ERR_NETWORK, "cannot reach %s:%s: %s; is larderd running there?", c->host, c->port,
                   strerror_r(errnum, why, sizeof why));
}

static int dial(struct conn *c, uint64_t until_ms, struct err *e)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *list = NULL;
    int rc = getaddrinfo(c->host, c->port, &hints, &list);
    if (rc != 0)
        return err_set(
            e, ERR_NETWORK,
            "the server's name %s cannot be resolved: %s; is the address in the credential file right?",
            c->host, gai_strerror(rc));
    unsigned left = 0;
    for (struct addrinfo *a = list; a; a = a->ai_next)
        left++;
    rc = err_set(e, ERR_NETWORK, "the name %s has no address", c->host);
    for (struct addrinfo *a = list; a; a = a->ai_next, left--) {
        uint64_t now = clock_ms(), span = until_ms > now ? (until_ms - now) / left : 0;
        rc = connect_one(c, a, now + span, e); /* an address that swallows packets leaves time for the next */
        if (rc == 0 || rc == -ECANCELED)
            break;
    }
    freeaddrinfo(list);
    return rc;
}

/* ---- bytes both ways ---- */

static int lost(struct conn *c, const char *how, int errnum, struct err *e)
{
    char why[128] = "";
    return err_set(e, ERR_NETWORK, "the connection to %s:%s was lost: %s%s%s", c->host, c->port, how,
                   errnum ? ": " : "", errnum ? strerror_r(errnum, why, sizeof why) : "");
}

static int flush(struct conn *c, struct err *e)
{
    for (;;) {
        struct slice out = channel_output(c->channel);
        if (out.n == 0)
            return 0;
        int more = channel_output_more(c->channel) ? MSG_MORE : 0;
        ssize_t n = send(c->fd, out.p, out.n, MSG_NOSIGNAL | more);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            return 0;
        if (n < 0)
            return lost(c, "sending failed", errno, e);
        channel_output_done(c->channel, (size_t)n);
    }
}

/* Where the next bytes go: to their place, and behind the end of a payload to the input. Returns how many
 * have a place. */
static size_t find_room(struct conn *c, struct iovec parts[PARTS_MAX], size_t *count)
{
    size_t placed = 0, n, awaited = channel_awaited(c->channel);
    uint8_t *to;
    for (*count = 0; *count < PARTS_MAX - 1 && placed < INPUT_BYTES; placed += n) {
        if (!(to = channel_place(c->channel, placed, &n)))
            break;
        n = n < INPUT_BYTES - placed ? n : INPUT_BYTES - placed;
        parts[(*count)++] = (struct iovec){to, n};
    }
    if (placed == 0 || placed >= awaited)
        parts[(*count)++] = (struct iovec){c->input, placed ? AHEAD_BYTES : INPUT_BYTES};
    return placed;
}

/* 0, or the end of the connection as an error. */
static int receive_some(struct conn *c, size_t *got, struct err *e)
{
    struct iovec parts[PARTS_MAX];
    struct msghdr m = {.msg_iov = parts};
    size_t room = find_room(c, parts, &m.msg_iovlen);
    *got = 0;
    c->more_input = false;
    ssize_t n = recvmsg(c->fd, &m, 0);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return 0;
    if (n < 0)
        return lost(c, "receiving failed", errno, e);
    if (n == 0)
        return lost(c, channel_peer_closed(c->channel) ? "the server closed it" : "it ended early", 0, e);
    *got = (size_t)n;
    c->more_input = *got >= room && *got >= WASTE_BYTES;
    size_t placed = *got < room ? *got : room;
    int rc = placed > 0 ? channel_placed(c->channel, placed, e) : 0;
    return rc == 0 && *got > placed ? channel_input(c->channel, c->input, *got - placed, e) : rc;
}

/* Woken for every segment that arrives, both sides would spend more on that than on the bytes. */
static void wait_for_much(struct conn *c)
{
    size_t awaited = channel_awaited(c->channel);
    int least = awaited == 0 ? 1 : (int)(awaited < RECEIVE_LEAST ? awaited : RECEIVE_LEAST);
    if (least != c->least && setsockopt(c->fd, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least) == 0)
        c->least = least;
}

/* Moves output, then input, once each as far as they go. */
static int exchange(struct conn *c, uint64_t until_ms, size_t *got, struct err *e)
{
    *got = 0;
    c->more_input = false;
    int rc = flush(c, e);
    if (rc < 0)
        return rc;
    short events = channel_output(c->channel).n > 0 ? POLLIN | POLLOUT : POLLIN;
    wait_for_much(c);
    int ready = conn_poll(c, events, until_ms);
    if (ready < 0)
        return closing_error(c, e);
    if (ready & ~POLLOUT) {
        rc = receive_some(c, got, e);
        if (rc < 0) {
            struct err ignored; /* an alert may tell the server why */
            (void)flush(c, &ignored);
        }
    }
    return rc;
}

/* ---- authentication and hello ---- */

/* The server ends the session and says why: an error of hello with no request's id (PROTOCOL.md, section 4).
 */
static bool ends_session(const struct frame *f)
{
    return f->header.opcode == OP_HELLO && f->header.request_id == 0 &&
           f->header.flags == (FRAME_RESPONSE | FRAME_ERROR);
}

static int take_hello(struct conn *c, const struct frame *f, uint64_t id, struct err *e)
{
    struct rcur in = rcur_of(f->payload, f->header.payload_bytes);
    if (ends_session(f))
        return err_of_msg(&in, e);
    if (!(f->header.flags & FRAME_RESPONSE) || f->header.request_id != id || f->header.opcode != OP_HELLO)
        return err_set(e, ERR_PROTOCOL, "%s:%s answered hello with a frame %s; is it a larderd?", c->host,
                       c->port, opcode_name(f->header.opcode));
    if (f->header.flags & FRAME_ERROR)
        return err_of_msg(&in, e);
    struct msg_hello_reply m;
    int rc = msg_hello_reply_decode(&in, &m, e);
    if (rc < 0)
        return rc;
    struct conn_hello h = {.features = m.features,
                           .server_time_ns = m.server_time_ns,
                           .store_id = m.store_id,
                           .role = (enum client_role)m.role};
    for (unsigned bit = FEATURE_MANDATORY_FIRST; bit < 64; bit++)
        if ((m.features & ~FEATURES_KNOWN) >> bit & 1)
            return err_set(
                e, ERR_VERSION,
                "the server at %s:%s demands feature %u, which this liblarder (%s) lacks; upgrade it",
                c->host, c->port, bit, LARDER_VERSION_STRING);
    if (!slice_cstr(m.tenant, h.tenant, sizeof h.tenant))
        return err_set(e, ERR_PROTOCOL, "the server's hello names a tenant that is no tenant name");
    err_quote(h.software, sizeof h.software, m.software.p, m.software.n);
    pthread_mutex_lock(&c->lock);
    bool another = c->opened && !id_equal(&c->hello.store_id, &h.store_id);
    c->hello = h;
    pthread_mutex_unlock(&c->lock);
    if (another) /* what was begun there does not exist here */
        return err_set(e, ERR_MISMATCH,
                       "%s:%s now serves another store than when this client was opened; close the client "
                       "and open it again",
                       c->host, c->port);
    return 0;
}

static int send_hello(struct conn *c, uint64_t id, struct err *e)
{
    struct buf b = {0};
    uint64_t lane = c->lane_wish == CONN_LANE_NONE ? 1ull << FEATURE_BULK_LANE : 0;
    struct msg_hello m = {.features = FEATURES_KNOWN & ~lane,
                          .software = slice_str("liblarder " LARDER_VERSION_STRING)};
    msg_hello_encode(&m, &b);
    int rc = buf_end(&b, "hello", e);
    struct frame_header h = {.opcode = OP_HELLO, .request_id = id, .deadline_ms = c->connect_timeout_ms};
    if (rc == 0)
        rc = channel_send(c->channel, &h, SLICE(b.p, b.n), SLICE(NULL, 0), e);
    buf_free(&b);
    return rc;
}

static int too_late(struct conn *c, const char *what, struct err *e)
{
    return err_set(e, ERR_NETWORK, "%s:%s took the connection but %s within %u ms; is it a larderd?", c->host,
                   c->port, what, c->connect_timeout_ms);
}

static int shake_hands(struct conn *c, uint64_t until_ms, struct err *e)
{
    size_t got;
    int rc = channel_input(c->channel, NULL, 0, e);
    while (rc == 0 && !channel_ready(c->channel)) {
        rc = exchange(c, until_ms, &got, e);
        if (rc == 0 && !channel_ready(c->channel) && clock_ms() >= until_ms)
            rc = too_late(c,
                          c->base ? "did not answer the opening of the bulk lane"
                                  : "did not finish the TLS handshake",
                          e);
    }
    return rc;
}

static int greet(struct conn *c, uint64_t until_ms, struct err *e)
{
    size_t got;
    int rc = shake_hands(c, until_ms, e);
    if (rc < 0)
        return rc;
    pthread_mutex_lock(&c->lock);
    uint64_t id = c->next_id++;
    pthread_mutex_unlock(&c->lock);
    rc = send_hello(c, id, e);
    while (rc == 0) {
        struct frame f;
        rc = channel_frame(c->channel, &f, e);
        if (rc > 0) {
            rc = take_hello(c, &f, id, e);
            channel_frame_done(c->channel);
            break;
        }
        if (rc == 0)
            rc = exchange(c, until_ms, &got, e);
        if (rc == 0 && got == 0 && clock_ms() >= until_ms)
            rc = too_late(c, "did not answer hello", e);
    }
    if (rc == 0)
        channel_allow_large(c->channel);
    return rc;
}

static const struct identity clear_server = {.server = true};

/* With keys from the base, which has authenticated the server. What fails once the ticket is there is the
 * lane's fault. */
static int establish_lane(struct conn *c, struct err *e)
{
    struct conn_ticket t;
    int rc = conn_ticket_get(c, &t, e);
    if (rc < 0)
        return err_prepend(e, "asking for a bulk lane");
    uint64_t until_ms = clock_ms() + c->connect_timeout_ms;
    rc = dial(c, until_ms, e);
    if (rc == 0)
        rc = channel_create_lane(false, &clear_server, &t.keys, &t.id, &c->channel, e);
    secret_wipe(&t.keys, sizeof t.keys);
    if (rc == 0)
        rc = shake_hands(c, until_ms, e);
    if (rc < 0) {
        c->faults++;
        return err_prepend(e, "opening a bulk lane to %s:%s", c->host, c->port);
    }
    channel_allow_large(c->channel);
    return 0;
}

static int establish(struct conn *c, struct err *e)
{
    if (c->base)
        return establish_lane(c, e);
    uint64_t until_ms = clock_ms() + c->connect_timeout_ms;
    int rc = dial(c, until_ms, e);
    if (rc < 0)
        return rc;
    rc = c->config ? channel_create(c->config, c->host, &c->channel, e)
                   : channel_create_clear(false, &clear_server, &c->channel);
    if (rc < 0)
        return rc;
    rc = greet(c, until_ms, e);
    return rc < 0 ? err_prepend(e, "connecting to %s:%s", c->host, c->port) : 0;
}

static void hang_up(struct conn *c)
{
    if (c->channel) {
        struct err ignored;
        channel_close(c->channel);
        (void)flush(c, &ignored);
    }
    channel_free(c->channel);
    c->channel = NULL;
    c->lender = NULL;
    err_clear(&c->push_err);
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
}

/* ---- frames ---- */

/* Hands queued requests to the channel while little waits there. */
static int fill(struct conn *c, struct err *e)
{
    while (!channel_lent(c->channel) && channel_output(c->channel).n < OUTPUT_BYTES) {
        pthread_mutex_lock(&c->lock);
        struct list *it = list_pop(&c->queue);
        struct outgoing *o = it ? container_of(it, struct outgoing, link) : NULL;
        if (o && o->call)
            list_add_tail(&c->flying, &o->call->link);
        pthread_mutex_unlock(&c->lock);
        if (!o)
            return 0;
        int rc = channel_lend(c->channel, &o->header, SLICE(o->message, o->message_bytes), o->tail, e);
        c->lender = rc == 0 && channel_lent(c->channel) ? o->call : NULL;
        free(o);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* Sends what is queued, until nothing is left or the socket takes no more. */
static int send_queued(struct conn *c, struct err *e)
{
    bool empty = false;
    int rc = 0;
    while (rc == 0 && !empty) {
        rc = fill(c, e);
        empty = rc == 0 && channel_output(c->channel).n == 0;
        if (rc == 0)
            rc = flush(c, e);
        if (rc == 0 && channel_output(c->channel).n > 0)
            break;
    }
    return rc;
}

static void push(struct conn *c)
{
    bool rest = true;
    if (pthread_mutex_trylock(&c->io) == 0) {
        pthread_mutex_lock(&c->lock);
        bool up = c->state == CONN_UP && c->channel && c->push_err.class == ERR_NONE;
        pthread_mutex_unlock(&c->lock);
        if (up)
            rest = send_queued(c, &c->push_err) < 0 || channel_output(c->channel).n > 0;
        pthread_mutex_unlock(&c->io);
        pthread_mutex_lock(&c->lock);
        /* The thread runs the `done` of calls that ended before they were sent, and keeps deadlines. */
        rest |= !list_empty(&c->ended) || c->next_deadline_ms < c->sleeps_until_ms;
        pthread_mutex_unlock(&c->lock);
    }
    if (rest)
        conn_wake(c);
}

void conn_push(struct conn *c)
{
    if (c->lane)
        push(c->lane);
    push(c); /* what is sealed goes here too once the lane was given up */
}

static struct call *find_flying(struct conn *c, uint64_t id)
{
    list_for_each (it, &c->flying) {
        struct call *call = container_of(it, struct call, link);
        if (call->id == id)
            return call;
    }
    return NULL;
}

static uint32_t disk_of(const struct frame_header *h)
{
    return h->opcode == OP_READ ? h->deadline_ms : 0;
}

/* After bytes of a stream were handed over, with what came of it. */
static void go_on(struct conn *c, struct call *call, int rc, struct err *e)
{
    pthread_mutex_lock(&c->lock);
    if (conn_flying(c, call)) { /* else cancelled meanwhile */
        if (rc < 0) {
            if (e->class == ERR_NONE)
                err_set(e, err_class_of_errno(-rc), "%s was given up by its reader",
                        opcode_name(call->opcode));
            struct buf b = {0};
            msg_cancel_encode(&(struct msg_cancel){.request_id = call->id}, &b);
            conn_one_way(c, OP_CANCEL, call->id, &b);
            buf_free(&b);
            conn_end(c, call, e);
        } else {
            call->deadline_ms = clock_ms() + call->bound_ms;
        }
    }
    pthread_mutex_unlock(&c->lock);
}

static void stream_frame(struct conn *c, struct call *call, const struct frame *f)
{
    struct err e;
    err_clear(&e);
    if (f->sunk)
        return; /* `came` had it */
    call->disk_ms = disk_of(&f->header);
    go_on(c, call, call->more(call, f->payload, f->header.payload_bytes, &e), &e);
}

static void last_frame(struct conn *c, struct call *call, const struct frame *f)
{
    struct err e;
    err_clear(&e);
    struct rcur in = rcur_of(f->payload, f->header.payload_bytes);
    uint8_t *copy = NULL;
    if (f->header.flags & FRAME_ERROR) {
        (void)err_of_msg(&in, &e);
    } else if (f->header.payload_bytes > 0 && !f->sunk) {
        copy = malloc(f->header.payload_bytes);
        if (copy)
            memcpy(copy, f->payload, f->header.payload_bytes);
        else
            err_set(&e, ERR_NO_MEMORY, "no memory for an answer of %u bytes", f->header.payload_bytes);
    }
    pthread_mutex_lock(&c->lock);
    if (conn_flying(c, call)) {
        call->answered = true;
        call->disk_ms = f->sunk ? 0 : disk_of(&f->header);
        call->payload = copy;
        call->payload_bytes = copy ? f->header.payload_bytes : 0;
        copy = NULL;
        conn_end(c, call, &e);
    }
    pthread_mutex_unlock(&c->lock);
    free(copy);
}

/* ---- payloads that go straight to their place ---- */

static bool sink_wants(void *arg, const struct frame_header *h)
{
    struct conn *c = arg;
    pthread_mutex_lock(&c->lock);
    struct call *call = find_flying(c, h->request_id);
    pthread_mutex_unlock(&c->lock);
    c->sinking = h->request_id;
    if (call)
        call->disk_ms = disk_of(h);
    return call && call->place && h->opcode == call->opcode &&
           (h->flags & (FRAME_RESPONSE | FRAME_ERROR)) == FRAME_RESPONSE;
}

/* The call whose payload it is; NULL: it has ended meanwhile. */
static struct call *sinking(struct conn *c)
{
    pthread_mutex_lock(&c->lock);
    struct call *call = find_flying(c, c->sinking);
    pthread_mutex_unlock(&c->lock);
    return call;
}

static uint8_t *sink_place(void *arg, size_t skip, size_t *n)
{
    struct conn *c = arg;
    struct call *call = sinking(c);
    *n = 0;
    uint8_t *to = call ? call->place(call, skip, n) : NULL;
    if (to || (*n == 0 && skip > 0))
        return to;
    *n = *n > 0 && *n < WASTE_BYTES ? *n : WASTE_BYTES;
    return c->input + INPUT_BYTES;
}

static void sink_came(void *arg, size_t n)
{
    struct conn *c = arg;
    struct call *call = sinking(c);
    struct err e;
    err_clear(&e);
    if (call)
        go_on(c, call, call->came(call, n, &e), &e);
}

static void use_sink(struct conn *c)
{
    channel_sink(c->channel, &(struct channel_sink){
                                 .wants = sink_wants, .place = sink_place, .came = sink_came, .arg = c});
}

static int take_frame(struct conn *c, const struct frame *f, struct err *e)
{
    unsigned long long id = f->header.request_id;
    struct rcur in = rcur_of(f->payload, f->sunk ? 0 : f->header.payload_bytes);
    if (ends_session(f))
        return err_of_msg(&in, e);
    pthread_mutex_lock(&c->lock);
    struct call *call = find_flying(c, id);
    bool ours = id > 0 && id < c->next_id;
    if (call && call->credit != INT64_MAX)
        call->credit -= f->header.payload_bytes;
    pthread_mutex_unlock(&c->lock);
    if (!(f->header.flags & FRAME_RESPONSE) || !ours)
        return err_set(e, ERR_PROTOCOL, "%s:%s sent a frame %s that answers nothing (request %llu)", c->host,
                       c->port, opcode_name(f->header.opcode), id);
    if (!call)
        return 0; /* cancelled, or its time was up */
    if (call->opcode != f->header.opcode || ((f->header.flags & FRAME_MORE) && !conn_streams(call)))
        return err_set(e, ERR_PROTOCOL, "%s:%s answered request %llu, %s, with a frame %s%s", c->host,
                       c->port, id, opcode_name(call->opcode), opcode_name(f->header.opcode),
                       f->header.flags & FRAME_MORE ? " of a stream" : "");
    if (f->header.flags & FRAME_MORE && !(f->header.flags & FRAME_ERROR))
        stream_frame(c, call, f);
    else
        last_frame(c, call, f);
    return 0;
}

static int take_frames(struct conn *c, struct err *e)
{
    for (;;) {
        struct frame f;
        int rc = channel_frame(c->channel, &f, e);
        if (rc <= 0)
            return rc;
        rc = take_frame(c, &f, e);
        channel_frame_done(c->channel);
        if (rc < 0)
            return rc;
        run_ended(c);
    }
}

/* Until the connection is lost (an error) or closed (ECANCELED). */
static int serve(struct conn *c, struct err *e)
{
    use_sink(c);
    int rc = take_frames(c, e);
    while (rc == 0) {
        size_t got, turn = 0;
        if (c->push_err.class != ERR_NONE) {
            *e = c->push_err;
            return -e->errnum;
        }
        rc = send_queued(c, e);
        if (rc == 0)
            rc = exchange(c, UINT64_MAX, &got, e);
        while (rc == 0 && got > 0) {
            turn += got;
            rc = take_frames(c, e);
            if (rc < 0 || turn >= INPUT_TURN_BYTES || !c->more_input)
                break;
            rc = receive_some(c, &got, e);
        }
    }
    return rc;
}

/* ---- the thread ---- */

static void block_signals(void)
{
    sigset_t all;
    sigfillset(&all); /* the program's signals are handled on its own threads */
    pthread_sigmask(SIG_BLOCK, &all, NULL);
}

/* Trying again would end the same way. */
static bool is_final(const struct err *e)
{
    return e->class == ERR_DENIED || e->class == ERR_VERSION || e->class == ERR_INVALID ||
           e->class == ERR_UNSUPPORTED || e->class == ERR_MISMATCH || e->class == ERR_CANCELLED;
}

static void set_state(struct conn *c, enum conn_state state)
{
    pthread_mutex_lock(&c->lock);
    c->state = state;
    if (state == CONN_UP)
        c->opened = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

/* A lane is given up for good; its base has the other way, so whoever waits asks again there. */
static void give_up_lane(struct conn *c, const struct err *e)
{
    struct err told = *e;
    if (e->class != ERR_CANCELLED) {
        if (!atomic_exchange(&c->base->lane_off, true) && c->opened)
            log_warn("the bulk lane to %s:%s is given up, sealed chunks go over TLS from now on: %s", c->host,
                     c->port, e->text);
        told.class = ERR_NETWORK;
        told.errnum = err_class_errno(ERR_NETWORK);
    }
    pthread_mutex_lock(&c->lock);
    c->state = CONN_DOWN;
    c->why = *e;
    end_queued(c, &told);
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

/* Counts what happened to a lane that was up. */
static void count_faults(struct conn *c, const struct err *e)
{
    if (clock_ms() - c->up_since_ms >= LANE_STABLE_MS)
        c->faults = 0;
    if (e->class == ERR_CORRUPT || e->class == ERR_PROTOCOL || e->class == ERR_DENIED)
        c->faults++;
}

static bool lane_is_hopeless(const struct conn *c)
{
    return c->base && (c->faults >= LANE_FAULTS_MAX || atomic_load(&c->base->lane_off));
}

/* Nothing more is tried: what waits to be sent fails. */
static void give_up(struct conn *c, struct err *e)
{
    if (c->base) {
        give_up_lane(c, e);
        return;
    }
    if (c->opened && !is_final(e))
        err_prepend(e, "the connection to %s:%s was lost and could not be made again within %u ms", c->host,
                    c->port, c->reconnect_ms);
    log_error("connection to %s:%s given up: %s", c->host, c->port, e->text);
    pthread_mutex_lock(&c->lock);
    c->state = CONN_DOWN;
    c->why = *e;
    end_queued(c, e);
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

/* Until somebody submits; false: closing. */
static bool wait_for_work(struct conn *c)
{
    for (;;) {
        pthread_mutex_lock(&c->lock);
        bool down = c->state == CONN_DOWN;
        pthread_mutex_unlock(&c->lock);
        if (!down)
            return true;
        if (conn_poll(c, 0, UINT64_MAX) < 0)
            return false;
    }
}

static void after_loss(struct conn *c, struct err *e)
{
    if (e->class != ERR_CANCELLED)
        log_warn("%s", e->text);
    struct err told = *e;
    if (told.class !=
        ERR_NETWORK) /* the peer's fault or ours: what was asked may be asked again all the same */
        told.class = ERR_NETWORK, told.errnum = err_class_errno(ERR_NETWORK);
    pthread_mutex_lock(&c->lock);
    end_flying(c, &told);
    c->state = CONN_CONNECTING;
    pthread_mutex_unlock(&c->lock);
    run_ended(c);
}

static unsigned longer(unsigned backoff_ms)
{
    unsigned next = backoff_ms == 0 ? BACKOFF_MIN_MS : 2 * backoff_ms;
    next += (unsigned)(clock_ns() % (next / 4 + 1)); /* ranks that lost one server do not return in step */
    return next < BACKOFF_MAX_MS ? next : BACKOFF_MAX_MS;
}

static void run(struct conn *c)
{
    uint64_t give_up_ms = 0;
    unsigned backoff_ms = 0;
    struct err e;
    err_set(&e, ERR_NETWORK, "no connection was tried");
    while (wait_for_work(c)) {
        if (lane_is_hopeless(c)) {
            give_up(c, &e);
            continue;
        }
        err_clear(&e);
        if (give_up_ms == 0)
            give_up_ms = clock_ms() + c->reconnect_ms;
        int rc = establish(c, &e);
        if (rc == 0) {
            c->up_since_ms = clock_ms();
            set_state(c, CONN_UP);
            (void)serve(c, &e);
            hang_up(c);
            after_loss(c, &e);
            count_faults(c, &e);
            backoff_ms = clock_ms() - c->up_since_ms >= STABLE_MS ? 0 : longer(backoff_ms);
            give_up_ms = clock_ms() + c->reconnect_ms;
        } else {
            hang_up(c);
            backoff_ms = longer(backoff_ms);
            if (!c->opened || is_final(&e) || clock_ms() + backoff_ms >= give_up_ms) {
                give_up(c, &e);
                give_up_ms = 0;
                backoff_ms = 0;
            }
        }
        if (!pause_until(c, clock_ms() + backoff_ms))
            return;
    }
}

void *conn_thread(void *arg)
{
    struct conn *c = arg;
    block_signals();
    pthread_setname_np(pthread_self(), "larder-conn");
    pthread_mutex_lock(&c->io);
    c->input = malloc(INPUT_BYTES + WASTE_BYTES);
    if (c->input) {
        run(c);
    } else {
        struct err e;
        err_set(&e, ERR_NO_MEMORY, "no memory for a connection's buffer of %u bytes", INPUT_BYTES);
        give_up(c, &e);
        while (wait_for_work(c)) /* each try ends the same way */
            give_up(c, &e);
    }
    pthread_mutex_lock(&c->lock);
    struct err e;
    closing_error(c, &e);
    end_flying(c, &e);
    end_queued(c, &e);
    pthread_mutex_unlock(&c->lock);
    run_ended(c);
    free(c->input);
    pthread_mutex_unlock(&c->io);
    return NULL;
}
