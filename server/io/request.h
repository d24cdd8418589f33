/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What lies in the private part of an io_op, and the one place where short transfers continue. Private to
 * server/io.
 *
 * The life of an operation: loop.c fills the request and hands it to the implementation; that makes attempts
 * (a queue entry, a system call, a simulated event) and gives each attempt's result to io_settle, which says
 * whether another is needed.
 */
#ifndef LARDER_IO_REQUEST_H
#define LARDER_IO_REQUEST_H

#include <sys/socket.h>

#include "format/base/err.h"
#include "server/io/loop.h"

enum io_code {
    IO_OPEN,
    IO_READ,
    IO_WRITE,
    IO_FDATASYNC,
    IO_FSYNC,
    IO_ALLOCATE,
    IO_TRUNCATE,
    IO_CLOSE,
    IO_LINK,
    IO_UNLINK,
    IO_RMDIR,
    IO_MKDIR,
    IO_STAT,
    IO_LIST,
    IO_ADVISE,
    IO_WORK,
    IO_ACCEPT,
    IO_CONNECT,
    IO_RECV,
    IO_SEND,
    IO_SEND_PARTS,
    IO_CODE_COUNT
};

/* Where an operation is. op->link belongs to whoever holds it there. */
enum io_state {
    IO_IDLE,   /* the caller's */
    IO_HELD,   /* waits for room */
    IO_FLIGHT, /* with the kernel, or in the simulator's queue of events */
    IO_WORKER, /* queued for or running on a helper thread */
    IO_READY   /* result known, done not yet called */
};

struct io_req {
    uint8_t code, state;
    bool cancelled; /* loop_cancel was called */
    bool started;   /* on a helper thread: too late to take it back */
    int32_t fd;
    int32_t flags;   /* of open; of advise: POSIX_FADV_* */
    uint32_t mode;   /* of open and mkdir; of a transfer: attempts that fell behind */
    uint64_t offset; /* of a transfer; the length for allocate and truncate; bytes taken off the parts */
    size_t n, done;  /* bytes asked, bytes transferred */
    void *p;
    const char *path, *path2; /* connect: host and port */
    void *out;                /* struct loop_stat, loop_names, loop_work or loop_parts */
    void *aux;                /* the implementation's, freed by it */
    struct {
        uint32_t length;
        uint8_t bytes[28]; /* sockaddr_in or sockaddr_in6, of connect */
    } addr;
} __attribute__((may_alias));

_Static_assert(sizeof(struct io_req) <= sizeof(((struct io_op *)0)->priv), "io_op.priv is too small");

static inline struct io_req *io_req(struct io_op *op)
{
    return (struct io_req *)op->priv;
}

const char *io_code_name(enum io_code code);
static inline bool io_is_socket(enum io_code code)
{
    return code >= IO_ACCEPT && code <= IO_SEND_PARTS;
}

/* Offset within the request at which the next attempt starts, and its bytes (at most 1 GiB). Transfers on
 * files start on a block border even if the last attempt ended inside a block, so that descriptors opened
 * with O_DIRECT can go on: at most one block is read or written twice, with the same bytes. */
size_t io_resume(const struct io_req *r, size_t *bytes);
/* What is left to be sent of a request with parts. */
struct msghdr *io_parts(struct io_req *r);
/* Takes one attempt's result. True: op->result is final. False: make another attempt. */
must_check bool io_settle(struct io_op *op, int64_t result);

/* The request by plain system calls, to its end: for helper threads. Not for sockets. Returns the result. */
int64_t io_blocking(struct io_op *op);

int64_t io_work(const struct io_req *r); /* the computation of IO_WORK, here and now */

/* What an open gave, made with IO_OPEN_FLAGS besides those asked for: closed again, with -EMEDIUMTYPE, unless
 * it is a file or a folder. */
#define IO_OPEN_FLAGS (O_CLOEXEC | O_NONBLOCK)
int64_t io_opened(int64_t fd, int flags);

struct statx;
void io_stat_fill(struct loop_stat *out, const struct statx *sx);

#endif
