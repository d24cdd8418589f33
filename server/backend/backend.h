/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The whole seam to storage: eight verbs, asynchronous. Objects are immutable once they have a name. Names
 * are made by the store, never by people: components of [a-z0-9.-] separated by '/', at most
 * BACKEND_NAME_BYTES_MAX, no component empty or starting with '.'.
 *
 * One instance serves one loop. The caller owns `struct backend_op` as it owns an io_op (zeroed before first
 * use; it, names and buffers live until `done`; submitting never calls back). op->result is >= 0 or a
 * negative errno, and op->err says it for a person, naming the object. backend.c checks arguments and results
 * for all backends. A name that is not as above is refused with ERR_INVALID, since names also come from
 * records read back from disk.
 */
#ifndef LARDER_BACKEND_H
#define LARDER_BACKEND_H

#include "format/base/err.h"
#include "format/limits.h"
#include "server/io/loop.h"

#define BACKEND_NAME_BYTES_MAX 255

struct backend;
struct backend_file; /* being written, no name yet */
struct backend_op;
typedef void backend_done(struct backend_op *op);

struct backend_op {
    backend_done *done;
    int64_t result;
    struct err err;
    /* Private to server/backend from here. */
    struct backend *backend;
    struct backend_file *file;
    struct loop_msg msg;
    struct io_op io;
    struct backend_op *next;
    uint64_t asked_bytes;
    bool pending;
    uint64_t priv[14];
    char path[2][640];
};

/* A new file of no name; space for reserve_bytes is asked of the file system (refusal: ERR_NO_SPACE). */
void backend_create(struct backend *b, struct backend_op *op, uint64_t reserve_bytes,
                    struct backend_file **file);
/* Writes n bytes (multiple of BLOCK_BYTES, memory aligned to it) at offset (likewise). Any order, several at
 * once; the whole range or an error. Not durable yet. */
void backend_append(struct backend *b, struct backend_op *op, struct backend_file *file, uint64_t offset,
                    const void *p, size_t n);
/* All appends have completed. Makes the bytes durable, then the name, exclusively (ERR_EXISTS). The file
 * handle is gone afterwards, success or not. A failed sync is reported as ERR_IO with op->err.text saying so,
 * and is never retried: those already begun fail likewise, later ones with ERR_READ_ONLY. */
void backend_seal(struct backend *b, struct backend_op *op, struct backend_file *file, const char *name);
/* Gives the space back; no append is pending. */
void backend_discard(struct backend *b, struct backend_op *op, struct backend_file *file);
/* A small object (<= COMMIT_BYTES_MAX), durable when done; ERR_EXISTS if the name is taken. */
void backend_put_new(struct backend *b, struct backend_op *op, const char *name, const void *p, size_t n);
/* result: bytes read, fewer than n only at the end of the object. direct: past the page cache where possible
 * (then memory, offset and n are multiples of BLOCK_BYTES). ERR_NOT_FOUND. */
void backend_read(struct backend *b, struct backend_op *op, const char *name, bool direct, uint64_t offset,
                  void *p, size_t n);
void backend_stat(struct backend *b, struct backend_op *op, const char *name, uint64_t *bytes);
/* Last components directly below a prefix "a/b" ("": the top), folders and objects alike, sorted; a missing
 * prefix is an empty list. Complete or an error; what a writer lists has been made durable, since a writer
 * killed before may have left names that only memory knows. A folder whose last object is removed goes with
 * it, but may be seen empty for a while, and again after a crash. The names are the caller's:
 * loop_names_free. */
void backend_list(struct backend *b, struct backend_op *op, const char *prefix, struct loop_names *out);
/* Durable when done. ERR_NOT_FOUND if absent. Reads that have begun finish; other instances may go on reading
 * through a cached descriptor, and hold the space, for up to 10 seconds of not using it. */
void backend_remove(struct backend *b, struct backend_op *op, const char *name);

/* Immediate: bytes free and in all. */
must_check int backend_space(struct backend *b, uint64_t *free_bytes, uint64_t *total_bytes);
/* No operation is begun after this. Waits for those pending, closes descriptors, frees the backend, then
 * calls done from the loop, never from within this call. */
void backend_close(struct backend *b, void (*done)(void *arg), void *arg);

/* A local folder. writer: takes the store's lock (ERR_BUSY: "another larderd uses this store"), creates the
 * folder if it is missing, and clears temporary files that a crash has left; the other loops' instances only
 * read (verbs that write fail with ERR_UNSUPPORTED) and need the folder to be there. Completes through op;
 * *out is NULL on failure. The layout: FOLDER/lock, FOLDER/tmp/<random>, FOLDER/objects/<name>.
 *
 * A failed sync leaves FOLDER/failed-sync.<boot>, and no writer opens the store before the machine has been
 * started again (ERR_READ_ONLY; or a person who dropped the file system's cache by unmounting it has removed
 * the mark): what memory holds might be taken for what is on the disk. */
void backend_local_open(struct loop *l, struct backend_op *op, const char *folder, bool writer,
                        struct backend **out);

/* Memory shared by the instances of several loops; gone with its last instance. */
struct memory_disk;
must_check struct memory_disk *memory_disk_create(uint64_t capacity_bytes);
void memory_disk_unref(struct memory_disk *d);
must_check struct backend *backend_memory(struct loop *l, struct memory_disk *d);

#endif
