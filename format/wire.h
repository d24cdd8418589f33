/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames and messages of the protocol larder/1. A frame is a 32-byte header and a payload; a payload is one
 * message (format/messages.def) and, where the opcode says so, raw bytes behind it ("tail").
 *
 *   0  u32 magic "LRD1"      4  u16 version     6  u16 opcode     8  u32 flags
 *  12  u32 payload bytes    16  u64 request id  24  u32 deadline in ms (requests)   28  u32 reserved, zero
 *
 * A request has an id chosen by the client, unique among those in flight. The answer has the same opcode and
 * id and FRAME_RESPONSE; FRAME_ERROR says that its payload is msg_error. Streams (read, scrub) answer with
 * several frames, all but the last with FRAME_MORE.
 */
#ifndef LARDER_WIRE_H
#define LARDER_WIRE_H

#include <stdint.h>

#include "format/base/cursor.h"
#include "format/base/err.h"
#include "format/limits.h"
#include "format/segment.h"

#define FRAME_HEADER_BYTES 32
#define FRAME_MAGIC        0x3144524cu /* "LRD1" read little-endian */

enum frame_flags { FRAME_RESPONSE = 1, FRAME_ERROR = 2, FRAME_MORE = 4, FRAME_FLAGS_KNOWN = 7 };

struct frame_header {
    uint16_t opcode;
    uint32_t flags;
    uint32_t payload_bytes;
    uint64_t request_id;
    uint32_t deadline_ms; /* 0: the server's default. Answers: FEATURE_READ_WAITS */
};

void frame_header_encode(const struct frame_header *h, uint8_t out[FRAME_HEADER_BYTES]);
/* ERR_PROTOCOL: bad magic, unknown flag, reserved bits, payload over FRAME_PAYLOAD_BYTES_MAX. ERR_VERSION. */
must_check int frame_header_decode(const uint8_t in[FRAME_HEADER_BYTES], struct frame_header *out,
                                   struct err *e);

/* Opcodes: values are fixed for ever. */
enum opcode {
    OP_HELLO = 1, /* first frame of a session, both ways */
    OP_PING = 2,
    OP_CANCEL = 3, /* one way: gives up on a request; it is answered with ERR_CANCELLED or was done already */
    OP_CREDIT = 4, /* one way: more bytes may be sent for a read */
    OP_STATUS = 5,
    OP_LANE_OPEN = 6, /* a ticket for one bulk lane */

    OP_TENANT_ADD = 10,
    OP_TENANT_LIST = 11,
    OP_RUN_OPEN = 12,
    OP_RUN_LIST = 13,
    OP_RUN_DESTROY = 14, /* envelopes first: erases the run */
    OP_ENVELOPE_PUT = 15,
    OP_ENVELOPE_DROP = 16,

    OP_ATTEMPT = 20,
    OP_SEGMENT_CREATE = 21,
    OP_SEGMENT_CHUNK = 22, /* tail: the stored bytes */
    OP_SEGMENT_INDEX = 23, /* tail: a piece of the index, in order */
    OP_SEGMENT_SEAL = 24,
    OP_SEGMENT_DISCARD = 25,
    OP_JOIN = 26,   /* long poll: durable, failed, or "check the set" */
    OP_COMMIT = 27, /* verdict of the rank that checked the set */
    OP_SAVE_ABORT = 28,

    OP_COMMIT_LIST = 30,
    OP_COMMIT_GET = 31, /* tail of the answer: the commit record */
    OP_MARK = 32,       /* pin, unpin, mark bad, unmark */
    OP_PRUNE = 33,
    OP_SCRUB = 34, /* stream: one finding a frame */

    OP_READ = 40, /* stream: the ranges' bytes one behind the other, as tails */
    OP_PUBLISHED_LIST = 41,
    OP_PUBLISHED_OPEN = 42,    /* pins the version of a published directory */
    OP_PUBLISHED_SAMPLES = 43, /* stream: the encoded sample index of one shard, as tails */
    OP_FEED_REPORT = 44,       /* what a feed waited for, every few seconds */
    OP_READ_SCANS = 45,        /* where others go through a run's segments now */
};

const char *opcode_name(unsigned opcode); /* "segment_chunk"; "unknown" */

enum client_role { ROLE_NONE = 0, ROLE_READER = 1, ROLE_WRITER = 2, ROLE_OPERATOR = 3, ROLE_ADMIN = 4 };
const char *role_name(enum client_role role);
int role_of_name(const char *name, enum client_role *out); /* 0 or -EINVAL */

/* Features negotiated by hello: bit numbers. Bits 0..31 may be ignored by who does not know them, bits 32..63
 * are mandatory: an unknown one is refused by number. */
#define FEATURE_CREDITS         0 /* both sides of version 1 have it */
#define FEATURE_BULK_LANE       1 /* plain TCP connections for sealed chunks */
#define FEATURE_READ_WAITS      2 /* frames that answer reads tell how long they waited for the disk */
#define FEATURE_FEED_REPORTS    3 /* OP_FEED_REPORT */
#define FEATURE_READ_SCANS      4 /* OP_READ_SCANS */
#define FEATURE_MANDATORY_FIRST 32
#define FEATURES_KNOWN                                                                  \
    (1ull << FEATURE_CREDITS | 1ull << FEATURE_BULK_LANE | 1ull << FEATURE_READ_WAITS | \
     1ull << FEATURE_FEED_REPORTS | 1ull << FEATURE_READ_SCANS)

enum commit_select {
    SELECT_LATEST = 1,
    SELECT_STEP = 2,
    SELECT_SEQUENCE = 3,
    SELECT_LATEST_GOOD = 4 /* not marked bad */
};
enum join_state { JOIN_DURABLE = 1, JOIN_CHECK = 2 /* check the set, then OP_COMMIT, then join again */ };
enum mark_action { MARK_ACTION_PIN = 1, MARK_ACTION_UNPIN = 2, MARK_ACTION_BAD = 3, MARK_ACTION_GOOD = 4 };
enum scrub_level { SCRUB_STRUCTURE = 1, SCRUB_DATA = 2 };
enum read_source { READ_SEGMENT = 1, READ_PUBLISHED = 2 };
#define READ_ANEW \
    0x80u /* from the medium, whatever the server has in memory: for verifying, and for what came damaged */
#define READ_SCAN \
    0x40u /* of chunks of a checkpoint that the client goes through: others may join it (OP_READ_SCANS) */
/* Why prune would remove a commit, or keep it. */
enum prune_reason {
    PRUNE_KEEP_LAST = 1,
    PRUNE_KEEP_EVERY = 2,
    PRUNE_KEEP_WITHIN = 3,
    PRUNE_KEEP_PINNED = 4,
    PRUNE_KEEP_LAST_GOOD = 5, /* the last good one is never removed */
    PRUNE_REMOVE_OLD = 16,
    PRUNE_REMOVE_SUPERSEDED = 17 /* same step committed again later */,
    PRUNE_REMOVE_ABANDONED = 18 /* parts of a save that never committed */
};
enum commit_state { COMMIT_GOOD = 1, COMMIT_BAD = 2, COMMIT_PENDING = 3, COMMIT_ABANDONED = 4 };

/*
 * Messages. One definition gives struct, encoder and decoder; format/messages.def is the list.
 *   u8 u16 u32 u64   little-endian        id      16 bytes
 *   str              u16 length, UTF-8    bytes   u32 length, bytes
 *   hash             32 bytes (SHA-256)   entry   40 bytes (chunk_entry)
 * Decoded str and bytes point into the frame's payload. Lists travel as `bytes` of encoded items one behind
 * the other, each in the same form, beside a count.
 */
typedef struct slice msg_str;
typedef struct slice msg_bytes;
typedef struct id msg_id;
typedef uint8_t msg_u8;
typedef uint16_t msg_u16;
typedef uint32_t msg_u32;
typedef uint64_t msg_u64;
typedef struct {
    uint8_t bytes[32];
} msg_hash;
typedef struct {
    uint8_t bytes[40];
} msg_entry;

#define MSG_FIELD(type, name) msg_##type name;
#define MSG(name, fields)                                                                        \
    struct msg_##name {                                                                          \
        fields(MSG_FIELD)                                                                        \
    };                                                                                           \
    void msg_##name##_encode(const struct msg_##name *m, struct buf *out);                       \
    /* Leaves the cursor behind the message (a tail may follow). ERR_PROTOCOL naming message. */ \
    must_check int msg_##name##_decode(struct rcur *in, struct msg_##name *out, struct err *e);
#include "format/messages.def"
#undef MSG

/* The payload of an error answer, both ways. */
void msg_of_err(const struct err *e, struct buf *out);
int err_of_msg(struct rcur *in, struct err *e); /* fills e; returns -errno; itself never fails silently */

#endif
