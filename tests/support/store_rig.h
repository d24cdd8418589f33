/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store to test on, over memory, a real folder or a simulated disk, and what clients do to it: requests
 * that are waited for, and whole parts written with chunks of random bytes.
 */
#ifndef LARDER_TEST_STORE_RIG_H
#define LARDER_TEST_STORE_RIG_H

#include "format/keys.h"
#include "server/io/sim.h"
#include "server/store/store.h"

enum store_rig_kind { STORE_ON_MEMORY, STORE_ON_FOLDER, STORE_ON_SIM };

struct store_rig {
    enum store_rig_kind kind;
    struct loop *loop;
    struct sim *sim;
    uint64_t events;      /* run in the simulator so far */
    uint64_t crash_after; /* so many more events; 0: never */
    bool crashed;
    struct memory_disk *disk;
    struct backend *backend;
    struct store *store;
    struct store_options options; /* may be changed before store_rig_start */
    struct err err;               /* of a start that failed */
    char folder[128];
    int anchor[2];
    uint64_t random;
    const char *tenant;    /* of the calls */
    const struct dek *dek; /* seals the parts that are made; NULL: random bytes stand for sealed ones */
    enum client_role role;
};

void store_rig_open(struct store_rig *r, enum store_rig_kind kind, uint64_t seed);
void store_rig_close(struct store_rig *r);
/* Backend and store; false: r->err. */
bool store_rig_start(struct store_rig *r);
void store_rig_stop(struct store_rig *r);
/* Power fails, if it has not yet, and comes back; false: r->err. */
bool store_rig_power_on(struct store_rig *r);
/* Runs the loop until the condition holds; aborts if that takes longer than a minute. */
void store_rig_until(struct store_rig *r, bool (*holds)(void *arg), void *arg);
void rig_set_flag(void *flag); /* for callbacks */
bool rig_flag_set(void *flag);
void store_rig_sleep(struct store_rig *r, uint64_t ms); /* by the loop's clock */
void store_rig_random(struct store_rig *r, void *p, size_t n);
struct id store_rig_id(struct store_rig *r);

/* One request. */
struct ask {
    struct store_op op;
    struct store_rig *rig;
    struct buf payload;
    uint8_t *aligned;
    bool done;
    unsigned frames;              /* of a stream */
    void (*frame)(struct ask *c); /* each frame of a stream but the last; NULL: counted only */
    bool stop_after_frame;        /* the stream is not asked to go on */
    void *arg;
};
/* Encode the request into c->payload, then begin. */
struct ask *ask_new(struct store_rig *r, uint16_t opcode);
void ask_begin(struct ask *c);
enum err_class ask_end(struct ask *c); /* waits; the class of the answer */
void ask_free(struct ask *c);
bool ask_is_done(void *c);
/* Begin and end. */
enum err_class ask_do(struct ask *c);

#define ASK(r, opcode, name, ...)               \
    ({                                          \
        struct ask *c_ = ask_new(r, opcode);    \
        struct msg_##name m_ = {__VA_ARGS__};   \
        msg_##name##_encode(&m_, &c_->payload); \
        c_;                                     \
    })
/* Decodes the answer; aborts if it is not one. */
#define ANSWER(c, name)                                                    \
    ({                                                                     \
        struct msg_##name m_;                                              \
        struct rcur in_ = rcur_of((c)->op.reply.p, (c)->op.reply.n);       \
        check(msg_##name##_decode(&in_, &m_, NULL) == 0 && in_.left == 0); \
        m_;                                                                \
    })

/* What clients do, each waited for. The class of the first answer that was none; text: in rig->err. */
enum err_class rig_tenant_add(struct store_rig *r, const char *name, uint64_t quota_bytes);
enum err_class rig_run_open(struct store_rig *r, unsigned kind, const char *name, bool create,
                            struct id *run);
enum err_class rig_attempt(struct store_rig *r, const struct id *run, const struct id *attempt,
                           uint32_t world, uint64_t *number);

/* A part as a client holds it. */
struct rig_part {
    struct id run, attempt, segment;
    uint64_t step;
    uint32_t rank, world;
    uint32_t chunks;
    uint32_t index_extra; /* bytes of the sealed part of the index */
    /* Filled by rig_part_make. */
    uint8_t header[BLOCK_BYTES], trailer[BLOCK_BYTES];
    uint64_t reserve_bytes, file_bytes, index_offset;
    uint8_t index_digest[SHA256_BYTES];
    struct buf index;
    struct rig_chunk {
        uint8_t entry[40];
        uint8_t *bytes;
        uint32_t n;
    } * chunk;
};
void rig_part_make(struct store_rig *r, struct rig_part *p); /* random segment id and bytes */
void rig_part_free(struct rig_part *p);
struct ask *rig_create(struct store_rig *r, const struct rig_part *p); /* not begun, as those below */
struct ask *rig_chunk(struct store_rig *r, const struct rig_part *p, uint32_t number);
struct ask *rig_index(struct store_rig *r, const struct rig_part *p, size_t from, size_t n);
struct ask *rig_seal(struct store_rig *r, const struct rig_part *p);
struct ask *rig_join(struct store_rig *r, const struct rig_part *p, uint32_t wait_ms);
struct ask *rig_commit(struct store_rig *r, const struct rig_part *p, enum err_class verdict,
                       const char *text);
/* Create to seal. */
enum err_class rig_part_write(struct store_rig *r, const struct rig_part *p);
/* Makes and writes the parts of all ranks, joins, checks, commits. parts: world of them, or NULL. */
enum err_class rig_save(struct store_rig *r, const struct id *run, const struct id *attempt, uint64_t step,
                        uint32_t world, uint64_t *sequence, struct rig_part *parts);

/* Objects, changed behind the store's back. rig_object: the name of one in the run's folder. */
const char *rig_object(struct store_rig *r, const struct id *run, const char *component);
uint8_t *rig_object_read(struct store_rig *r, const char *name, size_t *n); /* malloc'ed; NULL: absent */
void rig_object_remove(struct store_rig *r, const char *name);
void rig_object_replace(struct store_rig *r, const char *name, const void *p, size_t n);
void rig_object_flip(struct store_rig *r, const char *name, size_t at, uint8_t mask);
const char *rig_folder(struct store_rig *r, const struct id *run);
size_t rig_object_list(struct store_rig *r, const char *prefix, struct loop_names *names); /* the count */
const char *rig_segment_name(struct store_rig *r, const struct rig_part *p);

/* The commits of a run; at most `max`. Aborts if the list fails. */
size_t rig_commits(struct store_rig *r, unsigned kind, const char *name, bool pending,
                   struct msg_commit_item *items, size_t max);

#endif
