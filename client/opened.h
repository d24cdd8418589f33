/* SPDX-License-Identifier: Apache-2.0 */
/* An opened client, for the files of the client that need its parts. */
#ifndef LARDER_CLIENT_OPENED_H
#define LARDER_CLIENT_OPENED_H

#include <stdatomic.h>
#include <sys/types.h>

#include "client/client.h"
#include "client/spares.h"
#include "gpudirect/pool.h"

/* A chunk as it was copied, and then perhaps, in the same place, as it was sealed. */
#define STAGING_SLOT_BYTES block_align(CHUNK_STORED_BYTES_MAX)

struct larder {
    struct larder_options options; /* defaults filled in; credentials points to path */
    char *path;                    /* of the credential file */
    struct credentials credentials;
    struct channel_config *config;
    char host[256], port[16];
    struct conn *conn;
    pid_t pid;            /* who opened it: children of fork are refused */
    const uint8_t *own;   /* 1; a child of fork finds 0 there. NULL: the kernel does not do that */
    struct pool *staging; /* NULL for a role that cannot save */
    struct saver *saver;  /* likewise */
    _Atomic(struct part_scratch *) scratch; /* that nobody uses just now, or NULL */
    struct spares sealed;                   /* memory of chunks between compressing and the answer */
    /* A device may still write to a slot, or a restore or a save has some: pool and devices stay. */
    atomic_bool staging_lost;
    pthread_mutex_t device_lock;
    struct device *devices;     /* under device_lock; see device.h */
    struct id incarnation;      /* the attempt of saves that name none and have no other ranks */
    pthread_mutex_t feeds_lock; /* taken before a feed's own */
    struct larder_feed *feeds;  /* open ones */
};

#endif
