/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams: answers of many frames under flow control. A stream's source cuts what was asked for into pieces;
 * pieces are read in any order and sent in theirs.
 *
 *   source -> piece (waits for the scheduler) -> being read -> ready -> channel
 *
 * A piece is begun only against credit that the client has given, and while what the session holds stays
 * below session_read_bytes_max and, of a feed, its share of feed_read_bytes_max; so a client that gives no
 * credit holds a stream for hours that costs a few hundred bytes, and its deadline does not run.
 */
#ifndef LARDER_STREAM_H
#define LARDER_STREAM_H

#include "server/session/extents.h"
#include "server/session/session.h"
#include "server/session/shard_files.h"

#define PIECE_BYTES     EXTENT_BYTES_MAX /* read at once, and a border that no piece crosses */
#define PIECE_PARTS_MAX 64u              /* ranges near each other that are read at once */
#define PIECE_GAP_BYTES (32u << 10)      /* read over rather than read twice */
#define STREAM_PIECES   32u              /* of one stream in flight */

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
    struct extent_key key;    /* of the object */
    uint32_t done_bytes;      /* of the extent */
    uint32_t gathered_bytes;  /* of what is sent, in `extent` */
    struct extent_wait wait;  /* for the extent that comes next */
    struct loop_msg no_memory;
    struct extent *extent; /* what data lies in; NULL: the source's memory */
    struct slice data;     /* once ready: send_bytes to be sent */
    struct err err;        /* or why not */
    struct backend_op op;
    struct io_op io;
    struct shard_file_wait file;
    struct shard_file_look look;
    char path[BACKEND_NAME_BYTES_MAX + 1];
    uint32_t got_bytes;
};

/* Where a stream's bytes come from. */
struct stream_source {
    /* Fills object, offset, extent_bytes, send_bytes and parts of the next piece, at least one byte: at most
     * max_bytes are sent of it, and it crosses no border of PIECE_BYTES. Sets all_begun if that was the last.
     */
    void (*next)(struct stream *st, uint64_t max_bytes, struct piece *p);
    /* On disk: what names the piece's object, and what reads p->wait.extent of it, which ends with
     * piece_read, not from within. Not on disk: `read` sets data and PIECE_READY; no key. */
    void (*key)(struct piece *p);
    void (*read)(struct piece *p);
    /* The object ends before byte `end`: fills p->err. */
    void (*ends)(struct piece *p, uint64_t end);
    bool keep;                      /* what was read never changes */
    void (*end)(struct stream *st); /* lets go of what the source holds */
};

struct stream {
    struct request r;
    struct list link; /* session's streams */
    const struct stream_source *source;
    enum sched_class class;
    bool on_disk; /* pieces pass the scheduler */
    bool fresh;   /* reads anew what is in memory */
    bool scan;    /* others may join it */
    uint64_t credit;
    struct list pieces;
    uint32_t piece_count;
    bool begun, all_begun, ended;
    uint64_t waits_since_ms; /* 0: the next piece is there, or could not be sent */
    uint64_t waited_ms;      /* for the disk, not told yet */
    bool looking; /* something was asked for that the stream needs before it can begin; freed after that */
    /* ranges still to be begun (reads) */
    struct rcur ranges;
    struct id scope, object;
    uint64_t offset, left_bytes;
    /* the rest is the source's */
    struct pubversion *version;
    struct id hint_object; /* that the page cache was asked for, up to hint_end */
    uint64_t hint_end;
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
/* p->wait.extent was read, so many bytes of it (see extent_read), or its err is filled. Settles the session.
 */
void piece_read(struct piece *p, uint32_t bytes);
/* Checks a read request's ranges and leaves them in the stream. */
must_check int stream_ranges(struct stream *st, const struct msg_read *m, struct err *e);
void stream_next_ranges(struct stream *st, uint64_t max_bytes, struct piece *p);

#endif
