/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams: answers of many frames under flow control. A stream's source cuts what was asked for into pieces;
 * pieces are read in any order and sent in theirs.
 *
 *   source -> piece (waits for the scheduler) -> being read -> ready -> channel
 *
 * A piece is begun only against credit that the client has given, and while what the session holds stays
 * below session_read_bytes_max; so a client that gives no credit holds a stream for hours that costs a few
 * hundred bytes, and its deadline does not run.
 */
#ifndef LARDER_STREAM_H
#define LARDER_STREAM_H

#include "server/session/session.h"

#define PIECE_BYTES     (1u << 20)  /* read at once */
#define PIECE_PARTS_MAX 64u         /* ranges near each other that are read at once */
#define PIECE_GAP_BYTES (32u << 10) /* read over rather than read twice */
#define STREAM_PIECES   32u         /* of one stream in flight */

struct stream;

enum piece_state { PIECE_WAITING, PIECE_READING, PIECE_READY };

struct piece {
    struct list link; /* stream's pieces, in order */
    struct stream *stream;
    enum piece_state state;
    struct sched_item item;
    struct id object;
    uint64_t offset; /* what is wanted lies in [offset, offset + extent_bytes) of the object */
    uint32_t extent_bytes;
    uint32_t send_bytes; /* of these, what is sent */
    uint32_t part_count;
    struct {
        uint32_t skip, bytes;
    } parts[PIECE_PARTS_MAX]; /* ascending */
    uint8_t *memory;          /* held_bytes of it, or NULL where the source has the bytes already */
    uint32_t held_bytes;
    struct slice data; /* once ready: send_bytes to be sent */
    struct err err;    /* or why not */
    struct backend_op op;
    struct io_op io;
    struct loop_stat stat;
    char path[1024];
    int fd, stage;
};

/* Where a stream's bytes come from. */
struct stream_source {
    /* Fills object, offset, extent_bytes, send_bytes and parts of the next piece, at least one byte: at most
     * max_bytes are sent of it, at most PIECE_BYTES read. Sets all_begun if that was the last. */
    void (*next)(struct stream *st, uint64_t max_bytes, struct piece *p);
    /* Begins reading; piece_done follows, not from within. Not on disk: sets data and PIECE_READY instead. */
    void (*read)(struct piece *p);
    void (*end)(struct stream *st); /* lets go of what the source holds */
};

struct stream {
    struct request r;
    struct list link; /* session's streams */
    const struct stream_source *source;
    enum sched_class class;
    bool on_disk; /* pieces pass the scheduler */
    uint64_t credit;
    struct list pieces;
    uint32_t piece_count;
    bool begun, all_begun, ended;
    bool looking; /* something was asked for that the stream needs before it can begin; freed after that */
    /* ranges still to be begun (reads) */
    struct rcur ranges;
    struct id scope, object;
    uint64_t offset, left_bytes;
    /* the rest is the source's */
    struct pubversion *version;
    struct sample_index *samples;
    uint64_t position;
};

/* Enters a request that will be a stream; NULL: refused and answered. Until stream_begin it can be cancelled
 * and times out like any other; who looks something up meanwhile sets `looking`. */
struct stream *stream_request(struct session *s, const struct op_entry *op, struct frame *f);
/* From here the source feeds it, as credit allows; the session's settling moves it. May fail and free it. */
void stream_begin(struct stream *st, const struct stream_source *source, enum sched_class class, bool on_disk,
                  uint64_t credit);
void stream_fail(struct stream *st, const struct err *e); /* answers and ends; may free */
void stream_cancel(struct request *r, const struct err *why);
void stream_timer(struct loop_timer *t);
/* What was looked for has come: false if the stream has ended meanwhile, and is freed now. */
must_check bool stream_found(struct stream *st);
/* The piece has been read: data is set, or err. Settles the session. */
void piece_done(struct piece *p);
/* Moves the parts together at the front of the bytes read and sets data. */
void piece_gather(struct piece *p, uint8_t *extent);
/* Checks a read request's ranges and leaves them in the stream. */
must_check int stream_ranges(struct stream *st, const struct msg_read *m, struct err *e);
void stream_next_ranges(struct stream *st, uint64_t max_bytes, struct piece *p);

#endif
