/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small records of the store, each one durable object: the commit record, whose creation makes a checkpoint
 * or a dataset version exist, and the records of store, tenant, run and attempt. One frame for all: XXH3-128
 * checksum over the rest first, then magic, kind, version, body length, body.
 */
#ifndef LARDER_COMMIT_H
#define LARDER_COMMIT_H

#include <stdint.h>

#include "format/base/cursor.h"
#include "format/base/err.h"
#include "format/base/hash.h"
#include "format/limits.h"
#include "format/segment.h"

enum run_kind { RUN_CHECKPOINTS = 1, RUN_DATASET = 2 };

enum record_kind {
    RECORD_STORE = 1,
    RECORD_TENANT = 2,
    RECORD_RUN = 3,
    RECORD_ATTEMPT = 4,
    RECORD_COMMIT = 5,
    RECORD_MARK = 6,      /* pin or bad */
    RECORD_SAMPLES = 7,   /* sample index, format/samples.h */
    RECORD_PUBLISHED = 8, /* one of a published shard, and what it was made from */
};

/* Wraps a body. */
must_check int record_encode(enum record_kind kind, uint32_t version, const void *body, size_t n,
                             struct buf *out, struct err *e);
/* Checks checksum, magic, kind, version (ERR_VERSION: "written by a newer larder") and length; *body points
 * into p. */
must_check int record_decode(enum record_kind kind, uint32_t version, const void *p, size_t n,
                             struct slice *body, struct err *e);

struct commit_part {
    uint32_t rank;
    struct id segment;
    uint64_t segment_bytes;
    uint8_t index_digest[SHA256_BYTES];
};

struct commit {
    enum run_kind kind;
    struct id run_id;
    struct slice run; /* name */
    uint64_t step;
    uint64_t sequence; /* the server's own counter in the run, from 1 */
    struct id attempt;
    uint64_t attempt_number;
    uint32_t world;
    struct commit_part *parts; /* world of them, by rank */
    uint64_t plain_bytes;      /* as the clients told, for lists */
    uint64_t server_time_ns;   /* Unix time of the server */
    struct slice loader;       /* <= LOADER_STATE_BYTES_MAX */
    struct slice labels;       /* encoded key/value pairs: u16 key, u16 value, ... <= LABELS_BYTES_MAX */
    void *owned;               /* of a decoded one */
};

must_check int commit_encode(const struct commit *c, struct buf *out, struct err *e);
must_check int commit_decode(const void *p, size_t n, struct commit *out,
                             struct err *e); /* copies; free it */
void commit_free(struct commit *c);

struct record_store {
    struct id store_id;
    uint64_t created_ns;
};
struct record_tenant {
    char name[TENANT_NAME_BYTES_MAX + 1];
    uint64_t quota_bytes;
    uint32_t weight;
    char residency[64];
    uint64_t created_ns;
};
struct record_run {
    enum run_kind kind;
    struct id run_id;
    char name[NAME_BYTES_MAX + 1];
    uint64_t created_ns;
};
struct record_attempt {
    struct id run_id;
    struct id attempt;
    uint64_t number;
    uint32_t world;
    uint64_t created_ns;
};
enum mark_kind { MARK_PIN = 1, MARK_BAD = 2 };
struct record_mark {
    struct id run_id;
    enum mark_kind kind;
    uint64_t sequence;
    char reason[256];
    uint64_t created_ns;
};

#define RECORD_PAIR(name)                                                                                 \
    must_check int record_##name##_encode(const struct record_##name *r, struct buf *out, struct err *e); \
    must_check int record_##name##_decode(const void *p, size_t n, struct record_##name *out, struct err *e)
RECORD_PAIR(store);
RECORD_PAIR(tenant);
RECORD_PAIR(run);
RECORD_PAIR(attempt);
RECORD_PAIR(mark);

/* Run and dataset names: 1..NAME_BYTES_MAX bytes of UTF-8 without control bytes. Tenant names:
 * [a-z0-9][a-z0-9-]*. */
must_check int run_name_check(const void *name, size_t n, struct err *e);
must_check int tenant_name_check(const char *name, struct err *e);

#endif
