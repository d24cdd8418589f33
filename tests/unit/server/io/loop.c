/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: every kind of loop keeps the promises of loop.h. Method: the same tests run over each kind; files and
 * sockets are real where the loop is.
 */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/support/rig.h"

static struct rig rig;

static int64_t open_at(const char *path, int flags)
{
    static struct step s;
    loop_open(rig.loop, step_op(&s), path, flags, 0644);
    return step_end(&rig, &s);
}

static int64_t write_at(int fd, const void *p, size_t n, uint64_t at)
{
    static struct step s;
    loop_write(rig.loop, step_op(&s), fd, p, n, at);
    return step_end(&rig, &s);
}

static int64_t read_at(int fd, void *p, size_t n, uint64_t at)
{
    static struct step s;
    loop_read(rig.loop, step_op(&s), fd, p, n, at);
    return step_end(&rig, &s);
}

static int64_t simple(void (*call)(struct loop *l, struct io_op *op, int fd), int fd)
{
    static struct step s;
    call(rig.loop, step_op(&s), fd);
    return step_end(&rig, &s);
}

static int64_t by_path(void (*call)(struct loop *l, struct io_op *op, const char *path), const char *path)
{
    static struct step s;
    call(rig.loop, step_op(&s), path);
    return step_end(&rig, &s);
}

static void close_fd(int fd)
{
    assert_int_equal(simple(loop_close, fd), 0);
}

static void submitting_never_calls_back(void **state)
{
    (void)state;
    struct step s = {0};
    loop_open(rig.loop, step_op(&s), rig_path(&rig, "nothing"), O_RDONLY, 0);
    assert_false(s.done);
    assert_int_equal(step_end(&rig, &s), -ENOENT);
    loop_connect(rig.loop, step_op(&s), "not numeric", "1");
    assert_false(s.done);
    assert_int_equal(step_end(&rig, &s), -EINVAL);
}

static void file_round_trip(void **state)
{
    (void)state;
    char text[] = "what was written", got[64];
    int fd = (int)open_at(rig_path(&rig, "f"), O_CREAT | O_EXCL | O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(open_at(rig_path(&rig, "f"), O_CREAT | O_EXCL | O_RDWR), -EEXIST);
    assert_int_equal(write_at(fd, text, sizeof text, 5000), sizeof text);
    assert_int_equal(write_at(fd, text, 0, 0), 0);
    assert_int_equal(simple(loop_fdatasync, fd), 0);
    assert_int_equal(read_at(fd, got, sizeof got, 5000), sizeof text); /* short only at the end */
    assert_memory_equal(got, text, sizeof text);
    assert_int_equal(read_at(fd, got, sizeof got, 6000), 0);
    assert_int_equal(read_at(fd, got, 8, 0), 8);
    assert_memory_equal(got, "\0\0\0\0\0\0\0\0", 8);
    close_fd(fd);
    fd = (int)open_at(rig_path(&rig, "f"), O_RDONLY);
    assert_int_equal(write_at(fd, text, 1, 0), -EBADF);
    close_fd(fd);
}

static int64_t advise(int fd, uint64_t n, enum loop_advice advice)
{
    struct step s = {0};
    loop_advise(rig.loop, step_op(&s), fd, 0, n, advice);
    return step_end(&rig, &s);
}

/* Hints change nothing that can be read. */
static void advice_is_taken(void **state)
{
    (void)state;
    char text[] = "what was written", got[64];
    int fd = (int)open_at(rig_path(&rig, "f"), O_CREAT | O_EXCL | O_RDWR);
    assert_int_equal(write_at(fd, text, sizeof text, 0), sizeof text);
    assert_int_equal(advise(fd, 1 << 20, LOOP_WILL_NEED), 0);
    assert_int_equal(advise(fd, 1 << 20, LOOP_FORGET), 0);
    assert_int_equal(read_at(fd, got, sizeof got, 0), sizeof text);
    assert_memory_equal(got, text, sizeof text);
    close_fd(fd);
}

struct sum {
    struct loop_work work;
    pthread_t by;
    uint64_t n, total;
};

static void add_up(struct loop_work *w)
{
    struct sum *s = container_of(w, struct sum, work);
    s->by = pthread_self();
    for (uint64_t i = 1; i <= s->n; i++)
        s->total += i;
}

/* Many at once, more than there are threads; none on the loop's own. */
static void work_is_done_elsewhere(void **state)
{
    (void)state;
    static struct sum sums[40];
    static struct step steps[40];
    memset(sums, 0, sizeof sums);
    for (unsigned i = 0; i < 40; i++) {
        sums[i].work.run = add_up;
        sums[i].n = 1000 * i;
        loop_work(rig.loop, step_op(&steps[i]), &sums[i].work);
        assert_false(steps[i].done);
    }
    rig_settle(&rig);
    for (unsigned i = 0; i < 40; i++) {
        assert_true(steps[i].done && steps[i].op.result == 0);
        assert_int_equal(sums[i].total, sums[i].n * (sums[i].n + 1) / 2);
        assert_true(rig.kind == RIG_SIM || !pthread_equal(sums[i].by, pthread_self()));
    }
}

/* None of them makes the loop wait. */
static void only_files_and_folders_are_opened(void **state)
{
    (void)state;
    assert_int_equal(mkfifo(rig_path(&rig, "pipe"), 0600), 0);
    assert_int_equal(open_at(rig_path(&rig, "pipe"), O_RDONLY), -EMEDIUMTYPE);
    assert_int_equal(open_at(rig_path(&rig, "pipe"), O_WRONLY), -EMEDIUMTYPE);
    assert_int_equal(open_at("/dev/null", O_RDONLY), -EMEDIUMTYPE);
    int fd = (int)open_at(rig_path(&rig, "."), O_RDONLY | O_DIRECTORY);
    assert_true(fd >= 0);
    assert_int_equal(fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
    close_fd(fd);
    fd = (int)open_at(rig_path(&rig, "f"), O_CREAT | O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(fcntl(fd, F_GETFL) & (O_NONBLOCK | O_ACCMODE), O_RDWR);
    close_fd(fd);
}

static void direct_read_ends_inside_a_block(void **state)
{
    (void)state;
    char *p = NULL;
    assert_int_equal(posix_memalign((void **)&p, 4096, 65536), 0);
    memset(p, 'x', 65536);
    int fd = (int)open_at(rig_path(&rig, "f"), O_CREAT | O_RDWR);
    assert_int_equal(write_at(fd, p, 10000, 0), 10000);
    assert_int_equal(simple(loop_fsync, fd), 0);
    close_fd(fd);
    fd = (int)open_at(rig_path(&rig, "f"), O_RDONLY | O_DIRECT);
    if (fd == -EINVAL) {
        free(p);
        skip(); /* this file system has no O_DIRECT */
    }
    assert_int_equal(read_at(fd, p, 65536, 0), 10000);
    assert_int_equal(read_at(fd, p, 65536, 8192), 10000 - 8192);
    assert_int_equal(read_at(fd, p, 4096, 12288), 0);
    close_fd(fd);
    free(p);
}

static void truncate_gives_length(void **state)
{
    (void)state;
    struct step s = {0};
    struct loop_stat st;
    int fd = (int)open_at(rig_path(&rig, "f"), O_CREAT | O_RDWR);
    loop_allocate(rig.loop, step_op(&s), fd, 1 << 20);
    int64_t status = step_end(&rig, &s);
    assert_true(status == 0 || status == -EOPNOTSUPP);
    assert_int_equal(write_at(fd, "abc", 3, 0), 3);
    loop_stat(rig.loop, step_op(&s), rig_path(&rig, "f"), &st);
    assert_int_equal(step_end(&rig, &s), 0);
    assert_int_equal(st.bytes, 3); /* space reserved is not length */
    loop_truncate(rig.loop, step_op(&s), fd, 2);
    assert_int_equal(step_end(&rig, &s), 0);
    loop_stat(rig.loop, step_op(&s), rig_path(&rig, "f"), &st);
    assert_int_equal(step_end(&rig, &s), 0);
    assert_int_equal(st.bytes, 2);
    close_fd(fd);
}

static void folders_and_names(void **state)
{
    (void)state;
    struct step s = {0};
    struct loop_stat st;
    struct loop_names names;
    loop_mkdir(rig.loop, step_op(&s), rig_path(&rig, "d"), 0755);
    assert_int_equal(step_end(&rig, &s), 0);
    loop_mkdir(rig.loop, step_op(&s), rig_path(&rig, "d"), 0755);
    assert_int_equal(step_end(&rig, &s), -EEXIST);
    loop_mkdir(rig.loop, step_op(&s), rig_path(&rig, "no/d"), 0755);
    assert_int_equal(step_end(&rig, &s), -ENOENT);
    close_fd((int)open_at(rig_path(&rig, "d/b"), O_CREAT | O_RDWR));
    loop_link(rig.loop, step_op(&s), rig_path(&rig, "d/b"), rig_path(&rig, "d/a"));
    assert_int_equal(step_end(&rig, &s), 0);
    loop_link(rig.loop, step_op(&s), rig_path(&rig, "d/b"), rig_path(&rig, "d/a"));
    assert_int_equal(step_end(&rig, &s), -EEXIST);
    loop_link(rig.loop, step_op(&s), rig_path(&rig, "d/none"), rig_path(&rig, "d/c"));
    assert_int_equal(step_end(&rig, &s), -ENOENT);
    close_fd((int)open_at(rig_path(&rig, "d/Z"), O_CREAT | O_RDWR));
    loop_list(rig.loop, step_op(&s), rig_path(&rig, "d"), &names);
    assert_int_equal(step_end(&rig, &s), 0);
    assert_int_equal(names.count, 3);
    assert_string_equal(names.names[0], "Z"); /* bytewise */
    assert_string_equal(names.names[1], "a");
    assert_string_equal(names.names[2], "b");
    loop_names_free(&names);
    loop_list(rig.loop, step_op(&s), rig_path(&rig, "none"), &names);
    assert_int_equal(step_end(&rig, &s), -ENOENT);
    assert_int_equal(names.count, 0);
    loop_list(rig.loop, step_op(&s), rig_path(&rig, "d/a"), &names);
    assert_int_equal(step_end(&rig, &s), -ENOTDIR);
    loop_stat(rig.loop, step_op(&s), rig_path(&rig, "d"), &st);
    assert_int_equal(step_end(&rig, &s), 0);
    assert_true(st.folder);
    assert_int_equal(by_path(loop_rmdir, rig_path(&rig, "d")), -ENOTEMPTY);
    assert_int_equal(by_path(loop_unlink, rig_path(&rig, "d/a")), 0);
    assert_int_equal(by_path(loop_unlink, rig_path(&rig, "d/a")), -ENOENT);
    assert_int_equal(by_path(loop_unlink, rig_path(&rig, "d/b")), 0);
    assert_int_equal(by_path(loop_unlink, rig_path(&rig, "d/Z")), 0);
    int fd = (int)open_at(rig_path(&rig, "d"), O_RDONLY | O_DIRECTORY);
    assert_int_equal(simple(loop_fsync, fd), 0);
    close_fd(fd);
    assert_int_equal(by_path(loop_rmdir, rig_path(&rig, "d")), 0);
    loop_stat(rig.loop, step_op(&s), rig_path(&rig, "d"), &st);
    assert_int_equal(step_end(&rig, &s), -ENOENT);
}

static void an_open_file_outlives_its_name(void **state)
{
    (void)state;
    char got[3];
    int fd = (int)open_at(rig_path(&rig, "f"), O_CREAT | O_RDWR);
    assert_int_equal(write_at(fd, "abc", 3, 0), 3);
    assert_int_equal(by_path(loop_unlink, rig_path(&rig, "f")), 0);
    assert_int_equal(read_at(fd, got, 3, 0), 3);
    assert_memory_equal(got, "abc", 3);
    close_fd(fd);
}

/* Far more operations than the queue holds: all complete, and as asked. */
static void more_than_the_queue_holds(void **state)
{
    (void)state;
    enum { N = 500 };
    struct step *steps = calloc(N, sizeof *steps);
    uint32_t *values = calloc(N, sizeof *values);
    int fd = (int)open_at(rig_path(&rig, "f"), O_CREAT | O_RDWR);
    for (uint32_t i = 0; i < N; i++) {
        values[i] = i * 2654435761u;
        loop_write(rig.loop, step_op(&steps[i]), fd, &values[i], 4, i * 4);
    }
    rig_settle(&rig);
    for (uint32_t i = 0; i < N; i++)
        assert_true(steps[i].done && steps[i].op.result == 4);
    uint32_t *got = calloc(N, sizeof *got);
    assert_int_equal(read_at(fd, got, N * 4, 0), N * 4);
    assert_memory_equal(got, values, N * 4);
    close_fd(fd);
    free(got);
    free(values);
    free(steps);
}

static void one_lock_per_file(void **state)
{
    (void)state;
    int a = (int)open_at(rig_path(&rig, "lock"), O_CREAT | O_RDWR);
    int b = (int)open_at(rig_path(&rig, "lock"), O_CREAT | O_RDWR);
    assert_int_equal(loop_lock(rig.loop, a), 0);
    assert_int_equal(loop_lock(rig.loop, b), -EWOULDBLOCK);
    close_fd(a);
    assert_int_equal(loop_lock(rig.loop, b), 0);
    close_fd(b);
}

static void space_is_told(void **state)
{
    (void)state;
    uint64_t free_bytes = 0, total_bytes = 0;
    assert_int_equal(loop_space(rig.loop, rig.folder, &free_bytes, &total_bytes), 0);
    assert_true(total_bytes > 0 && free_bytes <= total_bytes);
    assert_int_equal(loop_space(rig.loop, rig_path(&rig, "none"), &free_bytes, &total_bytes), -ENOENT);
}

static void the_boot_has_a_name(void **state)
{
    (void)state;
    char name[LOOP_BOOT_BYTES], again[LOOP_BOOT_BYTES];
    assert_int_equal(loop_boot(rig.loop, name), 0);
    assert_int_equal(loop_boot(rig.loop, again), 0);
    assert_string_equal(name, again);
    assert_true(strlen(name) >= strlen("node0-0"));
    assert_int_equal(strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789-"), strlen(name));
}

/* Sockets. */

static const char *listen_host(void)
{
    return rig.kind == RIG_SIM ? "node0" : "127.0.0.1";
}

static void connect_pair(int *listener, int *client, int *server)
{
    struct step accepting = {0}, connecting = {0};
    struct err e = {0};
    char bound[128];
    assert_int_equal(loop_listen(rig.loop, listen_host(), "0", false, listener, bound, sizeof bound, &e), 0);
    const char *port = strrchr(bound, ':') + 1;
    assert_string_not_equal(port, "0");
    loop_accept(rig.loop, step_op(&accepting), *listener);
    loop_connect(rig.loop, step_op(&connecting), listen_host(), port);
    rig_settle(&rig);
    assert_true(accepting.done && connecting.done);
    *server = (int)accepting.op.result;
    *client = (int)connecting.op.result;
    assert_true(*server >= 0 && *client >= 0);
}

static void echo(void **state)
{
    (void)state;
    struct step sending = {0}, receiving = {0};
    char got[16], peer[128];
    int listener, client, server;
    connect_pair(&listener, &client, &server);
    loop_peer(rig.loop, server, peer, sizeof peer);
    assert_non_null(strstr(peer, listen_host()));
    loop_recv(rig.loop, step_op(&receiving), server, got, sizeof got);
    loop_send(rig.loop, step_op(&sending), client, "hello", 5);
    rig_settle(&rig);
    assert_int_equal(sending.op.result, 5);
    assert_true(receiving.op.result >= 1 && receiving.op.result <= 5);
    assert_memory_equal(got, "hello", (size_t)receiving.op.result);
    close_fd(client);
    int64_t more = receiving.op.result, n;
    do { /* the rest, then the end of the stream */
        loop_recv(rig.loop, step_op(&receiving), server, got, sizeof got);
        n = step_end(&rig, &receiving);
        assert_true(n >= 0);
        more += n;
    } while (n > 0);
    assert_int_equal(more, 5);
    close_fd(server);
    close_fd(listener);
}

struct flow {
    struct io_op op;
    int fd;
    uint8_t *p;
    size_t n, got;
    int64_t last;
};

static void flow_on(struct io_op *op)
{
    struct flow *f = container_of(op, struct flow, op);
    f->last = op->result;
    if (op->result <= 0)
        return;
    f->got += (size_t)op->result;
    if (f->got < f->n)
        loop_recv(rig.loop, op, f->fd, f->p + f->got, f->n - f->got);
}

/* Pieces of many sizes as one send, more than a socket buffer holds: they arrive in order, each once. */
static void parts_are_sent_in_order(void **state)
{
    (void)state;
    enum { N = 4 << 20 };
    struct step sending = {0};
    struct flow in = {.n = N};
    static struct loop_parts parts;
    uint8_t *out = malloc(N);
    int listener, client, server;
    size_t at = 0;
    for (uint32_t i = 0; i < N; i++)
        out[i] = (uint8_t)(i * 2654435761u >> 13);
    connect_pair(&listener, &client, &server);
    parts.count = 0;
    for (size_t i = 0; i < LOOP_PARTS_MAX; i++) {
        size_t n = i + 1 == LOOP_PARTS_MAX ? N - at : i % 2 ? (i * 60000) : 48;
        parts.part[parts.count++] = (struct iovec){.iov_base = out + at, .iov_len = n};
        at += n;
    }
    in.fd = server;
    in.p = malloc(N);
    in.op.done = flow_on;
    loop_send_parts(rig.loop, step_op(&sending), client, &parts);
    loop_recv(rig.loop, &in.op, server, in.p, N);
    rig_settle(&rig);
    assert_int_equal(sending.op.result, N);
    assert_int_equal(in.got, N);
    assert_memory_equal(in.p, out, N);
    free(in.p);
    free(out);
    close_fd(client);
    close_fd(server);
    close_fd(listener);
}

/* One send that no socket buffer holds: it ends whole, and both directions go on at the same time. */
static void large_sends_both_ways(void **state)
{
    (void)state;
    enum { N = 8 << 20 };
    struct step a = {0}, b = {0};
    struct flow in[2] = {{.n = N}, {.n = N}};
    uint8_t *out = malloc(N);
    int listener, client, server;
    for (uint32_t i = 0; i < N; i++)
        out[i] = (uint8_t)(i * 2654435761u >> 13);
    connect_pair(&listener, &client, &server);
    in[0].fd = client, in[1].fd = server;
    loop_send(rig.loop, step_op(&a), client, out, N);
    loop_send(rig.loop, step_op(&b), server, out, N);
    for (int i = 0; i < 2; i++) {
        in[i].p = malloc(N);
        in[i].op.done = flow_on;
        loop_recv(rig.loop, &in[i].op, in[i].fd, in[i].p, N);
    }
    rig_settle(&rig);
    assert_true(a.op.result == N && b.op.result == N);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(in[i].got, N);
        assert_memory_equal(in[i].p, out, N);
        free(in[i].p);
    }
    free(out);
    close_fd(client);
    close_fd(server);
    close_fd(listener);
}

static void nobody_listens(void **state)
{
    (void)state;
    struct step s = {0};
    struct err e = {0};
    char bound[128];
    int listener;
    assert_int_equal(loop_listen(rig.loop, listen_host(), "0", false, &listener, bound, sizeof bound, &e), 0);
    close_fd(listener);
    loop_connect(rig.loop, step_op(&s), listen_host(), strrchr(bound, ':') + 1);
    assert_int_equal(step_end(&rig, &s), -ECONNREFUSED);
}

static void port_is_taken(void **state)
{
    (void)state;
    struct err e = {0};
    char bound[128];
    int a, b;
    assert_int_equal(loop_listen(rig.loop, listen_host(), "0", false, &a, bound, sizeof bound, &e), 0);
    const char *port = strrchr(bound, ':') + 1;
    assert_int_equal(loop_listen(rig.loop, listen_host(), port, false, &b, NULL, 0, &e), -EADDRINUSE);
    assert_non_null(strstr(e.text, port));
    close_fd(a);
    assert_int_equal(loop_listen(rig.loop, listen_host(), port, true, &a, NULL, 0, &e), 0);
    assert_int_equal(loop_listen(rig.loop, listen_host(), port, true, &b, NULL, 0, &e), 0);
    close_fd(a);
    close_fd(b);
}

static void *let_go(void *arg)
{
    nanosleep(&(struct timespec){.tv_nsec = 100 * 1000000l}, NULL);
    close(*(int *)arg);
    return NULL;
}

/* The ring of a larderd that was killed gives its port back a little later than the process ends. */
static void a_port_that_becomes_free_is_waited_for(void **state)
{
    (void)state;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    struct err e = {0};
    pthread_t thread;
    char port[8];
    int held = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), fd;
    assert_int_equal(bind(held, (struct sockaddr *)&a, n), 0);
    assert_int_equal(listen(held, 1), 0);
    assert_int_equal(getsockname(held, (struct sockaddr *)&a, &n), 0);
    snprintf(port, sizeof port, "%u", ntohs(a.sin_port));
    assert_int_equal(pthread_create(&thread, NULL, let_go, &held), 0);
    assert_int_equal(loop_listen(rig.loop, listen_host(), port, false, &fd, NULL, 0, &e), 0);
    pthread_join(thread, NULL);
    close_fd(fd);
}

static void shutdown_ends_what_waits(void **state)
{
    (void)state;
    struct step receiving = {0}, sending = {0};
    char got[4];
    static char much[32 << 20];
    int listener, client, server;
    connect_pair(&listener, &client, &server);
    loop_recv(rig.loop, step_op(&receiving), server, got, sizeof got);
    loop_send(rig.loop, step_op(&sending), server, much, sizeof much); /* nobody reads it */
    loop_shutdown(rig.loop, server);
    rig_settle(&rig);
    assert_true(receiving.done && receiving.op.result <= 0);
    assert_true(sending.done && sending.op.result < 0);
    loop_send(rig.loop, step_op(&sending), server, "x", 1);
    assert_true(step_end(&rig, &sending) < 0); /* an error, not a signal */
    close_fd(client);
    close_fd(server);
    close_fd(listener);
}

static void cancel_ends_what_waits(void **state)
{
    (void)state;
    struct step accepting = {0}, receiving = {0};
    char got[4];
    int listener, client, server;
    connect_pair(&listener, &client, &server);
    loop_accept(rig.loop, step_op(&accepting), listener);
    loop_recv(rig.loop, step_op(&receiving), server, got, sizeof got);
    loop_cancel(rig.loop, &accepting.op);
    loop_cancel(rig.loop, &receiving.op);
    loop_cancel(rig.loop, &receiving.op); /* again: harmless */
    rig_settle(&rig);
    assert_int_equal(accepting.op.result, -ECANCELED);
    assert_int_equal(receiving.op.result, -ECANCELED);
    loop_cancel(rig.loop, &receiving.op); /* over: harmless */
    close_fd(client);
    close_fd(server);
    close_fd(listener);
}

struct late_cancel {
    struct io_op victim;
    struct loop_timer timer;
    int64_t result;
};

static void cancel_later(struct loop_timer *t)
{
    loop_cancel(rig.loop, &container_of(t, struct late_cancel, timer)->victim);
}

static void note_result(struct io_op *op)
{
    container_of(op, struct late_cancel, victim)->result = op->result;
}

/* The operation is with the kernel when the cancel comes. */
static void cancel_in_flight(void **state)
{
    (void)state;
    struct late_cancel c = {.victim.done = note_result, .timer.fire = cancel_later};
    char got[4];
    int listener, client, server;
    connect_pair(&listener, &client, &server);
    loop_recv(rig.loop, &c.victim, server, got, sizeof got);
    loop_timer_set(rig.loop, &c.timer, loop_now_ms(rig.loop) + 5);
    rig_settle(&rig);
    assert_int_equal(c.result, -ECANCELED);
    close_fd(client);
    close_fd(server);
    close_fd(listener);
}

/* Cancels that race with data: each operation ends exactly once, and its memory may be used again at once. */
enum { PAIRS = 16, ROUNDS = 200 };

struct storm_end {
    struct storm *storm;
    struct io_op *receiving; /* malloc'ed for each receive, freed when it is done */
    struct step sending;
    int fd;
    char byte;
};
struct storm {
    struct storm_end ends[2 * PAIRS];
    struct loop_timer timer;
    unsigned rounds, ended, begun, received, sent;
    uint32_t random;
};
struct storm_receive {
    struct io_op op;
    struct storm_end *end;
};

static void storm_received(struct io_op *op);

static void storm_receive(struct storm_end *end)
{
    struct storm_receive *r = calloc(1, sizeof *r);
    r->op.done = storm_received;
    r->end = end;
    end->receiving = &r->op;
    end->storm->begun++;
    loop_recv(rig.loop, &r->op, end->fd, &end->byte, 1);
}

static void storm_received(struct io_op *op)
{
    struct storm_receive *r = container_of(op, struct storm_receive, op);
    struct storm_end *end = r->end;
    assert_true(op->result == 1 || op->result == -ECANCELED);
    end->storm->received += op->result == 1;
    end->storm->ended++;
    end->receiving = NULL;
    memset(r, 0xa5, sizeof *r);
    free(r);
    if (end->storm->rounds < ROUNDS)
        storm_receive(end);
}

static void storm_round(struct loop_timer *t)
{
    struct storm *s = container_of(t, struct storm, timer);
    bool last = ++s->rounds >= ROUNDS;
    for (int i = 0; i < 2 * PAIRS; i++) {
        struct storm_end *end = &s->ends[i];
        s->random = s->random * 1664525 + 1013904223;
        if ((s->random >> 24) % 2 && (end->sending.done || !end->sending.op.done) && !last) {
            loop_send(rig.loop, step_op(&end->sending), end->fd, "x", 1);
            s->sent++;
        }
        if (last || (s->random >> 20) % 2)
            loop_cancel(rig.loop, end->receiving);
    }
    if (!last)
        loop_timer_set(rig.loop, t, loop_now_ms(rig.loop) + (s->random >> 16) % 2);
}

static void a_storm_of_cancels(void **state)
{
    (void)state;
    struct storm *s = calloc(1, sizeof *s);
    int listeners[PAIRS];
    for (int i = 0; i < PAIRS; i++)
        connect_pair(&listeners[i], &s->ends[2 * i].fd, &s->ends[2 * i + 1].fd);
    s->timer.fire = storm_round;
    s->random = 1;
    for (int i = 0; i < 2 * PAIRS; i++) {
        s->ends[i].storm = s;
        storm_receive(&s->ends[i]);
    }
    loop_timer_set(rig.loop, &s->timer, loop_now_ms(rig.loop));
    rig_settle(&rig);
    assert_int_equal(s->rounds, ROUNDS);
    assert_int_equal(s->ended, s->begun);
    assert_true(s->received > 0 && s->received <= s->sent && s->ended > s->received);
    for (int i = 0; i < 2 * PAIRS; i++)
        close_fd(s->ends[i].fd);
    for (int i = 0; i < PAIRS; i++)
        close_fd(listeners[i]);
    free(s);
}

/* Time and messages. */

struct alarm {
    struct loop_timer timer;
    struct step *wake; /* cancelled to let the loop end */
    unsigned *order, place;
    uint64_t fired_ms;
};

static void alarm_rings(struct loop_timer *t)
{
    struct alarm *a = container_of(t, struct alarm, timer);
    a->place = ++*a->order;
    a->fired_ms = loop_now_ms(rig.loop);
    if (a->wake)
        loop_cancel(rig.loop, &a->wake->op);
}

static void timers_fire_in_order(void **state)
{
    (void)state;
    struct step waiting = {0};
    unsigned order = 0;
    struct alarm a[4];
    int listener;
    assert_int_equal(loop_listen(rig.loop, listen_host(), "0", false, &listener, NULL, 0, NULL), 0);
    loop_accept(rig.loop, step_op(&waiting), listener);
    uint64_t now = loop_now_ms(rig.loop);
    static const unsigned delays[] = {30, 10, 20, 10};
    for (int i = 0; i < 4; i++) {
        a[i] = (struct alarm){.timer.fire = alarm_rings, .order = &order, .wake = i == 0 ? &waiting : NULL};
        loop_timer_set(rig.loop, &a[i].timer, now + delays[i]);
    }
    loop_timer_set(rig.loop, &a[2].timer, now + 5); /* moved */
    loop_timer_clear(rig.loop, &a[3].timer);
    loop_timer_clear(rig.loop, &a[3].timer);
    rig_settle(&rig);
    assert_int_equal(a[2].place, 1);
    assert_int_equal(a[1].place, 2);
    assert_int_equal(a[0].place, 3);
    assert_int_equal(a[3].place, 0);
    for (int i = 0; i < 2; i++)
        assert_true(a[i].fired_ms >= now + delays[i]);
    assert_int_equal(a[0].timer.at_ms, 0);
    close_fd(listener);
}

static void randomness_differs(void **state)
{
    (void)state;
    uint8_t a[32] = {0}, b[32] = {0};
    loop_random(rig.loop, a, sizeof a);
    loop_random(rig.loop, b, sizeof b);
    assert_memory_not_equal(a, b, sizeof a);
    assert_true(loop_unix_ns(rig.loop) > 1600000000ull * 1000000000);
}

struct note {
    struct loop_msg msg;
    unsigned value;
    struct notes *to;
};
struct notes {
    unsigned last[4], count;
    struct step waiting;
    bool in_order;
};
enum { SENDERS = 3, NOTES = 2000 };
struct sender {
    pthread_t thread;
    struct note notes[NOTES];
};

static void note_arrives(struct loop_msg *m)
{
    struct note *n = container_of(m, struct note, msg);
    unsigned sender = n->value >> 16, serial = n->value & 0xffff;
    if (n->to->last[sender] + 1 != serial)
        n->to->in_order = false;
    n->to->last[sender] = serial;
    if (++n->to->count == SENDERS * NOTES)
        loop_cancel(rig.loop, &n->to->waiting.op);
}

static void *send_notes(void *arg)
{
    struct sender *s = arg;
    for (unsigned i = 0; i < NOTES; i++)
        loop_post(rig.loop, &s->notes[i].msg);
    return NULL;
}

static void messages_from_threads(void **state)
{
    (void)state;
    struct notes got = {.in_order = true};
    struct sender *senders = calloc(SENDERS, sizeof *senders);
    int listener;
    assert_int_equal(loop_listen(rig.loop, listen_host(), "0", false, &listener, NULL, 0, NULL), 0);
    loop_accept(rig.loop, step_op(&got.waiting), listener);
    for (unsigned s = 0; s < SENDERS; s++) {
        for (unsigned i = 0; i < NOTES; i++)
            senders[s].notes[i] =
                (struct note){.msg.run = note_arrives, .value = s << 16 | (i + 1), .to = &got};
        assert_int_equal(pthread_create(&senders[s].thread, NULL, send_notes, &senders[s]), 0);
    }
    rig_settle(&rig);
    for (unsigned s = 0; s < SENDERS; s++)
        pthread_join(senders[s].thread, NULL);
    assert_int_equal(got.count, SENDERS * NOTES);
    assert_true(got.in_order);
    free(senders);
    close_fd(listener);
}

static void *run_elsewhere(void *arg)
{
    rig_settle(arg);
    return NULL;
}

static void close_what_was_opened(struct io_op *op)
{
    container_of(op, struct step, op)->done = true;
    if (op->result > 2)
        loop_close(rig.loop, step_op(container_of(op, struct step, op)), (int)op->result);
}

/* A loop may be made, and operations submitted, before its thread starts. */
static void made_here_run_there(void **state)
{
    (void)state;
    struct step s = {.op.done = close_what_was_opened};
    pthread_t thread;
    loop_open(rig.loop, &s.op, rig_path(&rig, "f"), O_CREAT | O_RDWR, 0644);
    assert_int_equal(pthread_create(&thread, NULL, run_elsewhere, &rig), 0);
    pthread_join(thread, NULL);
    assert_true(s.done && s.op.result == 0);
}

static void begin(enum rig_kind kind, unsigned entries)
{
    rig_open(&rig, kind, entries);
}
static int begin_ring(void **state)
{
    (void)state;
    begin(RIG_RING, 0);
    return 0;
}
static int begin_tiny_ring(void **state)
{
    (void)state;
    begin(RIG_RING, 1);
    return 0;
}
static int begin_sim(void **state)
{
    (void)state;
    begin(RIG_SIM, 7);
    return 0;
}
static int begin_pool(void **state)
{
    (void)state;
    begin(RIG_POOL, 0);
    return 0;
}
static int end(void **state)
{
    (void)state;
    rig_close(&rig);
    return 0;
}

#define ON(kind, test)                                  \
    {                                                   \
#kind ": " #test, test, begin_##kind, end, NULL \
    }
#define ON_HOST(test) ON(ring, test), ON(tiny_ring, test), ON(pool, test)
#define ON_ALL(test)  ON_HOST(test), ON(sim, test)

int main(void)
{
    struct CMUnitTest tests[] = {
        ON_ALL(submitting_never_calls_back),
        ON_ALL(file_round_trip),
        ON_ALL(advice_is_taken),
        ON_ALL(work_is_done_elsewhere),
        ON_HOST(only_files_and_folders_are_opened),
        ON_ALL(direct_read_ends_inside_a_block),
        ON_ALL(truncate_gives_length),
        ON_ALL(folders_and_names),
        ON_ALL(an_open_file_outlives_its_name),
        ON_ALL(more_than_the_queue_holds),
        ON_ALL(one_lock_per_file),
        ON_ALL(space_is_told),
        ON_ALL(the_boot_has_a_name),
        ON_ALL(echo),
        ON_ALL(large_sends_both_ways),
        ON_ALL(parts_are_sent_in_order),
        ON_ALL(nobody_listens),
        ON_ALL(port_is_taken),
        ON_HOST(a_port_that_becomes_free_is_waited_for),
        ON_ALL(shutdown_ends_what_waits),
        ON_ALL(cancel_ends_what_waits),
        ON_ALL(cancel_in_flight),
        ON_ALL(a_storm_of_cancels),
        ON_ALL(timers_fire_in_order),
        ON_ALL(randomness_differs),
        ON_HOST(messages_from_threads),
        ON_HOST(made_here_run_there),
    };
    rig_skip_ring(tests, sizeof tests / sizeof tests[0], begin_ring, begin_tiny_ring);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
