/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of an import, in three stages:
 *   scan   every file is opened and its samples are found; nothing is sent yet, so a cut or contradictory
 *          archive is refused before anything exists on the server
 *   write  each shard becomes one sealed part; several at once, each by one worker on a connection of its
 * own; the checksums that an MDS dataset carries are compared on the way join   all parts are joined and
 * committed as one version A failure at any point aborts the attempt: its parts are discarded.
 */
#ifndef LARDER_DATASET_IMPORT_H
#define LARDER_DATASET_IMPORT_H

#include <pthread.h>
#include <stdbool.h>

#include "client/client.h"
#include "client/dataset_files.h"
#include "client/dataset_manifest.h"
#include "client/part.h"
#include "format/samples.h"

struct import {
    struct larder *client;
    const struct larder_import_options *o;
    struct run run;
    struct id attempt;
    uint64_t step;
    enum codec_level level;
    struct buf labels; /* as they stand in a commit record */
    struct shard_table table;
    struct import_files files; /* table.count of them */
    struct commit_part *parts; /* filled as they are sealed */
    bool *sealed;
    uint64_t bytes_total;
    /* lock guards what follows, between the workers and the caller's thread */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint32_t next, running;
    uint64_t bytes_done, index_bytes_kept;
    const char *current; /* file being written, for progress */
    bool failed;
    struct err err; /* the first failure */
};

/* dataset_scan.c: finds the samples of file i; fills table.shards[i] and the file's index. */
must_check int import_scan(struct import *im, uint32_t i, struct err *e);
/* The encoded sample index again, where the scan's was dropped. The file must not have changed. */
must_check int import_index(struct import *im, uint32_t i, struct buf *out, struct err *e);

/* dataset_write.c: file i as a sealed part, over conn. */
must_check int import_write(struct import *im, struct conn *conn, struct part_scratch *scratch, uint32_t i,
                            struct err *e);

/* dataset_join.c: joins all parts and commits. */
must_check int import_join(struct import *im, struct conn *conn, uint64_t *version, struct err *e);
/* Discards whatever was sealed or begun; best effort. why is told to the server. */
void import_abort(struct import *im, struct conn *conn, const struct err *why);

#endif
