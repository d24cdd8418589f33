/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The seam below backend.h: what a backend fills in. backend.c has checked names, alignment and state before
 * a verb is called. Private to server/backend. Every slot is filled.
 */
#ifndef LARDER_BACKEND_IMPL_H
#define LARDER_BACKEND_IMPL_H

#include "server/backend/backend.h"

/* Each verb ends with backend_end (from a callback of the loop) or backend_end_later (from anywhere). Names
 * and buffers stay valid until then. */
struct backend_ops {
    const char *name;
    void (*create)(struct backend_op *op, uint64_t reserve_bytes, struct backend_file **file);
    void (*append)(struct backend_op *op, uint64_t offset, const void *p, size_t n); /* to op->file */
    void (*seal)(struct backend_op *op, const char *name);                           /* frees op->file */
    void (*discard)(struct backend_op *op);                                          /* frees op->file */
    void (*put_new)(struct backend_op *op, const char *name, const void *p, size_t n);
    void (*read)(struct backend_op *op, const char *name, bool direct, uint64_t offset, void *p, size_t n);
    void (*stat)(struct backend_op *op, const char *name, uint64_t *bytes);
    void (*list)(struct backend_op *op, const char *prefix, struct loop_names *out);
    void (*remove)(struct backend_op *op, const char *name);
    int (*space)(struct backend *b, uint64_t *free_bytes, uint64_t *total_bytes);
    void (*close)(struct backend *b); /* nothing is pending; ends with backend_closed, which calls free_now */
    void (*free_now)(struct backend *b);
};

struct backend {
    const struct backend_ops *ops;
    struct loop *loop;
    size_t pending;
    bool closing;
    void (*closed)(void *arg);
    void *closed_arg;
    struct loop_msg msg;
};

/* Base of each backend's own struct of a file that is being written. */
struct backend_file {
    struct backend *backend;
    unsigned appends; /* pending */
    bool failed;      /* an append did not succeed: cannot be sealed */
    uint64_t bytes;   /* end of what was appended */
};

void backend_init(struct backend *b, const struct backend_ops *ops, struct loop *l);
/* For an operation that begins while its backend is being made; the verbs' are begun by backend.c. */
void backend_begin(struct backend *b, struct backend_op *op, uint64_t asked_bytes);
/* A result < 0 has op->err filled already, or gets a plain text; with op->err filled, 0 becomes its error.
 * op->file is NULL except at the end of an append. */
void backend_end(struct backend_op *op, int64_t result);
void backend_end_later(struct backend_op *op, int64_t result);
void backend_closed(struct backend *b);

/* The text for a failed sync, so that every backend says it alike. Returns -EIO. */
int backend_sync_failed(struct err *e, int errnum, const char *name);

#endif
