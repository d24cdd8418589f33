/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loop: all I/O, clock and randomness of the server stand behind this interface. Two implementations:
 * the ring (io_uring; server/io/ring.h) and a seeded simulator (server/io/sim.h). Code above cannot tell
 * which it runs on.
 *
 * One loop is one thread: the one that first calls loop_run. Every call but loop_post is made on it, or
 * before it starts: operations submitted early begin with loop_run. An operation embeds its completion: the
 * caller owns `struct io_op` (zeroed before first use), keeps it and every buffer and path it names alive
 * until `done` runs, and may reuse or free it from within `done`. Submitting never calls back: `done` runs
 * later, from loop_run.
 *
 * op->result is >= 0 or a negative errno. Short transfers are continued here: a read ends short only at the
 * end of the file, a write or send never. More operations than the kernel's queue takes are held back in
 * order.
 */
#ifndef LARDER_LOOP_H
#define LARDER_LOOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "format/base/err.h"
#include "format/base/list.h"

struct loop;
struct io_op;
typedef void io_done(struct io_op *op);

struct io_op {
    io_done *done;
    int64_t result;
    /* Private to server/io from here. */
    struct list link;
    struct loop *loop;
    uint64_t priv[16];
};

/* Files. Paths are absolute or relative to the process's folder (in the simulator: its own tree),
 * NUL-terminated. */
/* result: fd. Files and folders only: of anything else, and of a pipe whose other end nobody opens,
 * -EMEDIUMTYPE at once. */
void loop_open(struct loop *l, struct io_op *op, const char *path, int flags, mode_t mode);
void loop_read(struct loop *l, struct io_op *op, int fd, void *p, size_t n, uint64_t offset);
/* What the page cache should do about a range of a file; a hint. */
enum loop_advice { LOOP_WILL_NEED, LOOP_FORGET };
void loop_advise(struct loop *l, struct io_op *op, int fd, uint64_t offset, uint64_t n,
                 enum loop_advice advice);
void loop_write(struct loop *l, struct io_op *op, int fd, const void *p, size_t n, uint64_t offset);
void loop_fdatasync(struct loop *l, struct io_op *op, int fd);
void loop_fsync(struct loop *l, struct io_op *op, int fd); /* also folders */
void loop_allocate(struct loop *l, struct io_op *op, int fd,
                   uint64_t n); /* reserves space; -EOPNOTSUPP where none */
void loop_truncate(struct loop *l, struct io_op *op, int fd,
                   uint64_t n); /* sets the length; also gives back what was reserved past it */
/* Files and sockets; no operation on the descriptor is pending: shut down or cancel first, and wait. */
void loop_close(struct loop *l, struct io_op *op, int fd);
void loop_link(struct loop *l, struct io_op *op, const char *from,
               const char *to); /* -EEXIST if `to` exists */
void loop_unlink(struct loop *l, struct io_op *op, const char *path);
void loop_rmdir(struct loop *l, struct io_op *op, const char *path);
void loop_mkdir(struct loop *l, struct io_op *op, const char *path, mode_t mode);

struct loop_stat {
    uint64_t bytes;
    uint64_t mtime_ns;
    uint64_t inode;
    bool folder, file; /* neither: a pipe, a device, a socket */
};
void loop_stat(struct loop *l, struct io_op *op, const char *path, struct loop_stat *out);

/* Names in a folder, without "." and "..", sorted bytewise. All of them, or an error: never a short list. */
struct loop_names {
    char **names; /* owned by the caller after success; loop_names_free */
    size_t count;
};
void loop_list(struct loop *l, struct io_op *op, const char *path, struct loop_names *out);
void loop_names_free(struct loop_names *names);
/* Computes on a helper thread, for what would hold the loop up: no I/O, and nothing that anybody else touches
 * meanwhile. result: 0. */
struct loop_work {
    void (*run)(struct loop_work *w);
};
void loop_work(struct loop *l, struct io_op *op, struct loop_work *w);
/* Bytes free to an unprivileged writer and in all, of the file system that holds path. Immediate. */
must_check int loop_space(struct loop *l, const char *path, uint64_t *free_bytes, uint64_t *total_bytes);
/* Names the time since this machine was started: while the name is the same, memory may hold what a disk does
 * not. [a-z0-9-], ended by NUL. Immediate. 0 or a negative errno. */
#define LOOP_BOOT_BYTES 48
must_check int loop_boot(struct loop *l, char out[LOOP_BOOT_BYTES]);
/* An exclusive, non-blocking lock on an open file that ends with the process (flock). Immediate. 0 or
 * -EWOULDBLOCK ... */
must_check int loop_lock(struct loop *l, int fd);

/* Stream sockets. */
must_check int loop_listen(struct loop *l, const char *host, const char *port, bool shared, int *fd,
                           char *bound, size_t bound_size,
                           struct err *e); /* bound: "host:port" as it is; port "0" picks one */
void loop_accept(struct loop *l, struct io_op *op,
                 int fd); /* result: fd of one connection, TCP_NODELAY set */
void loop_connect(struct loop *l, struct io_op *op, const char *host,
                  const char *port); /* result: fd; numeric hosts only */
void loop_recv(struct loop *l, struct io_op *op, int fd, void *p,
               size_t n); /* result: bytes, 0 at the end of the stream */
/* Receives on the fd wait from now on until about n bytes have come, or the end. Immediate; a wish. */
void loop_recv_least(struct loop *l, int fd, size_t n);
void loop_send(struct loop *l, struct io_op *op, int fd, const void *p, size_t n); /* all n, or an error */
/* Several pieces of memory one behind the other, as one send. The array is changed as it goes. */
#define LOOP_PARTS_MAX 16
struct loop_parts {
    struct iovec part[LOOP_PARTS_MAX];
    unsigned count;
    /* Private. */
    unsigned first;
    struct msghdr message;
};
void loop_send_parts(struct loop *l, struct io_op *op, int fd, struct loop_parts *parts);
/* Ends both directions: pending recv and send on the fd complete soon. Immediate; errors are ignored. */
void loop_shutdown(struct loop *l, int fd);
void loop_peer(struct loop *l, int fd, char *out, size_t size); /* "address:port", for the log */
/* The descriptor will be used on another loop from now on; nothing of it is pending here. Immediate. */
void loop_release(struct loop *l, int fd);
/* Asks for a pending operation to end early: it completes with -ECANCELED, or with its result if that came
 * first. */
void loop_cancel(struct loop *l, struct io_op *op);

/* Time. */
uint64_t loop_now_ms(struct loop *l);  /* monotonic, of this turn of the loop */
uint64_t loop_unix_ns(struct loop *l); /* wall clock: labels and retention only */
struct loop_timer {
    void (*fire)(struct loop_timer *t);
    uint64_t at_ms; /* 0: not set */
    /* Private. */
    struct list link;
};
void loop_timer_set(struct loop *l, struct loop_timer *t,
                    uint64_t at_ms); /* moves it if set; no allocation */
void loop_timer_clear(struct loop *l, struct loop_timer *t);

/* Randomness fit for ids and salts (in the simulator: from the seed). */
void loop_random(struct loop *l, void *p, size_t n);

/* Messages between loops, and into a loop from any thread. The message is owned by the receiver until `run`
 * is called on its thread. Messages from one sender arrive in order. */
struct loop_msg {
    void (*run)(struct loop_msg *m);
    struct loop_msg *next; /* private */
};
void loop_post(struct loop *to, struct loop_msg *m);

/* Runs until loop_stop was called and nothing is pending, neither operation nor message. Returns 0, or the
 * error that made the loop itself unusable. In the simulator loops are run by sim_run instead. */
must_check int loop_run(struct loop *l, struct err *e);
void loop_stop(struct loop *l);
void loop_destroy(struct loop *l); /* only when not running */

#endif
