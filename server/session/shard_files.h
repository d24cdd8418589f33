/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Open files of published shards, and the .idx of token files: of one loop, by version and shard. A packed
 * shard's is the file that it is unpacked into (unpacked.h), which may take a while. One that nobody uses
 * stays open for a while, since most shards are read again at once. It is known to be the file that the
 * version names, or made of it: that was looked at after it had been opened. Whether it still is, they who
 * have read ask before they send (published.h): one look answers all who asked before it began.
 */
#ifndef LARDER_SHARD_FILES_H
#define LARDER_SHARD_FILES_H

#include <stdbool.h>
#include <stdint.h>

#include "format/base/err.h"
#include "format/base/list.h"
#include "server/io/loop.h"

#define SHARD_FILES_MAX     256u /* more only while all of them are in use */
#define SHARD_FILES_IDLE_MS 10000u

struct published;
struct pubversion;
struct shard_file;
struct shard_files;

/* Zeroed before first use. */
struct shard_file_wait {
    /* file: to be put back; from within shard_file_get if it is open. NULL: why is in err. */
    void (*got)(struct shard_file_wait *w);
    struct shard_file *file;
    struct err err;
    /* Private. */
    struct list link;
    struct loop_msg msg;
};

struct shard_file_look {
    /* Not from within shard_file_look. err: why it is not what the version names any more, if it is not. */
    void (*told)(struct shard_file_look *l, const struct err *err);
    /* Private. */
    struct list link;
};

must_check int shard_files_create(struct published *p, struct shard_files **out);
void shard_files_destroy(struct shard_files *f); /* all are closed; NULL allowed */
/* idx: not the shard, but its .idx. */
void shard_file_get(struct shard_files *f, struct pubversion *v, uint32_t shard, bool idx,
                    struct shard_file_wait *w);
void shard_file_hold(struct shard_file *file); /* for one more user */
void shard_file_put(struct shard_file *file);
int shard_file_fd(const struct shard_file *file);
/* Looks at the file from now on. It is put back only after being told. */
void shard_file_look(struct shard_file *file, struct shard_file_look *l);
/* Closes those that nobody uses, if that was long ago or they only take up room on the disk (unpacked.h). */
void shard_files_trim(struct shard_files *f);
/* No more are asked for: closes them all. True: they are closed; else worker_has_less is called when they
 * are. */
must_check bool shard_files_close(struct shard_files *f);

#endif
