/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the local backend share. Private to server/backend. */
#ifndef LARDER_BACKEND_LOCAL_H
#define LARDER_BACKEND_LOCAL_H

#include "format/base/hash.h"
#include "server/backend/descriptors.h"
#include "server/backend/gate.h"

#define LOCAL_FOLDER_BYTES_MAX 320u
#define LOCAL_KNOWN_FOLDERS    1024u
#define LOCAL_MARK             "failed-sync." /* and the name of the boot */

struct local {
    struct backend backend;
    struct descriptors descriptors;
    struct gate gate; /* names are published and removed in company; empty folders are removed alone */
    /* Folders below objects/ whose own entry this instance has made durable, each in the slot of its hash. */
    struct hash128 known[LOCAL_KNOWN_FOLDERS];
    bool writer;
    bool sync_failed; /* for good: a later sync may succeed without having done anything */
    int lock_fd;
    char lock_path[LOCAL_FOLDER_BYTES_MAX + 8];
    char mark_path[LOCAL_FOLDER_BYTES_MAX + 64]; /* of a failed sync; set before the first sync */
    struct io_op closing;
    char folder[LOCAL_FOLDER_BYTES_MAX];
};

struct local_file {
    struct backend_file file;
    int fd;
    uint64_t reserve_bytes;
    char path[LOCAL_FOLDER_BYTES_MAX + 32]; /* FOLDER/tmp/<random> */
};

typedef void local_next(struct backend_op *op);

extern const struct backend_ops local_ops;

/* op->priv */
struct local_op {
    descriptor_got *got; /* of descriptors_get: stays first */
    struct gate_ticket ticket;
    local_next *next; /* after the present sub-procedure */
    struct local_file *file;
    struct descriptor *descriptor;
    union {
        struct backend_file **file_out;
        uint64_t *bytes_out;
        const void *bytes;
    };
    void *out;
    const char *name; /* the caller's */
    size_t n;
    uint64_t offset;
    int folder_fd;
    int status; /* the first error; what follows is cleaning up */
    uint16_t cut;
    uint8_t tries;
} __attribute__((may_alias));

_Static_assert(sizeof(struct local_op) <= sizeof(((struct backend_op *)0)->priv),
               "backend_op.priv is too small");

static inline struct local_op *local_op(struct backend_op *op)
{
    return (struct local_op *)op->priv;
}
static inline struct local *local_of(struct backend_op *op)
{
    return container_of(op->backend, struct local, backend);
}

/* FOLDER/objects/<name>, or FOLDER/objects for "". */
void local_object_path(struct backend_op *op, const char *name);
/* Notes the first error, its text saying what failed. */
void local_fail(struct backend_op *op, int64_t result, const char *doing);
/* Takes the result of a sync; false and noted in status if it, or any before it, failed. */
must_check bool local_synced(struct backend_op *op, int64_t result);
/* After a failed sync, on the way to telling it: leaves the mark that keeps the next writer of this boot out,
 * then goes on with `then`, which takes the result with local_marked. The mark is a second name of the lock:
 * it needs no space, is there whole or not at all, and need not outlive a loss of power. */
void local_mark(struct backend_op *op, io_done *then);
void local_marked(struct backend_op *op, int64_t result);
/* Makes the entries of the folder op->path[1] durable, then goes on; a failure is noted in status. */
void local_sync_folder(struct backend_op *op, local_next *next);

/* Gives the file its name op->path[0], making folders that are missing, exclusively and durably; then
 * local_finish_file. */
void local_publish(struct backend_op *op);
/* Removes the temporary name, closes and frees the file, and ends the operation with its status. */
void local_finish_file(struct backend_op *op);
/* The verb. */
void local_remove(struct backend_op *op, const char *name);

#endif
