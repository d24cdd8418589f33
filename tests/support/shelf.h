/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A larder server in memory, for testing what the client does when the world is not kind: one thread, clear
 * channels, several connections, and a hook in every read. It keeps runs, segments and commits as they are
 * sent and checks nothing that the real server is tested for; no file, no key, no role.
 */
#ifndef LARDER_TESTS_SHELF_H
#define LARDER_TESTS_SHELF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/larder.h"
#include "format/base/err.h"
#include "format/samples.h"

struct shelf;

struct shelf_file {
    const char *name;
    const uint8_t *p;
    size_t n;
};

struct shelf_options {
    /* A published directory; name NULL: none. Files stay the caller's. */
    const char *published;
    enum shard_format format;
    uint64_t record_bytes;
    const struct shelf_file *files;
    uint32_t file_count;
    /* On the server's thread, for each range read, before it is sent: may change the copy at p. Returns the
     * class of the error that the read fails with instead, or ERR_NONE. shard: of a segment, its rank.
     * May be NULL. */
    enum err_class (*reading)(void *arg, bool published, uint32_t shard, uint64_t offset, uint8_t *p,
                              size_t n);
    void *arg;
};

struct shelf *shelf_start(const struct shelf_options *o);
void shelf_stop(struct shelf *s);
/* A client of it, as larder_open would give; closed by larder_close. */
struct larder *shelf_client(struct shelf *s, unsigned reconnect_ms);

/* Every connection is cut once so many bytes of reads have gone out since the last cut; 0: never. */
void shelf_cut_every(struct shelf *s, uint64_t bytes);
/* Closes all connections and takes no new ones, until shelf_up. The opened versions of published directories
 * are forgotten, as by a restart. */
void shelf_down(struct shelf *s);
void shelf_up(struct shelf *s);
/* From now on each read says that it waited so long for the disk (and does not). */
void shelf_disk_ms(struct shelf *s, uint32_t ms);
uint64_t shelf_bytes_read(struct shelf *s); /* sent in answer to reads */
unsigned shelf_reads(struct shelf *s);      /* read requests */
unsigned shelf_cuts(struct shelf *s);
unsigned shelf_segments(struct shelf *s); /* held: made and not discarded */

#endif
