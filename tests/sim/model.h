/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the store owes its clients, from nothing but what they asked and were told. Nothing here looks into
 * the server. Each function is called when a request goes out (asked) or an answer has come (told, listed);
 * what must not be is a failure of the seed, with a sentence.
 *
 * Time is a counter of such calls. A request's answer speaks of some moment between the two.
 *
 *  - a commit that was told, or seen, is in every list that was asked for later, unless a prune that was
 *    allowed to may have removed it; and it is listed good unless somebody asked to mark it bad;
 *  - nothing is listed or opened that not all ranks of one attempt had joined and one of them had approved;
 *    its parts are segments that just those ranks had joined with;
 *  - one sequence is one save, for ever, and sequences of later saves are higher;
 *  - a segment is in at most one commit, and in none after its rank was told that it is fenced or gone;
 *  - once a newer attempt's number was told, the older ones commit nothing more;
 *  - a run keeps its id and its key from when they were told;
 *  - prune removes no pinned commit, not the last good one, and none that its rule keeps: also where the
 *    wall clock was set meanwhile, none that is young by what it ever said during the prune.
 */
#ifndef LARDER_TESTS_SIM_MODEL_H
#define LARDER_TESTS_SIM_MODEL_H

#include "format/commit.h"
#include "format/keys.h"
#include "format/wire.h"

#define MODEL_RANKS_MAX 8u

struct model_attempt {
    struct id id;
    uint64_t number; /* 0: not told yet */
    uint64_t told_at;
    uint32_t world;
};

struct model_asked { /* an attempt's first registration was sent */
    struct id attempt;
    uint64_t at;
};

/* All that was ever done for one step by one attempt. */
struct model_save {
    struct id attempt;
    uint64_t step, approved_at; /* the first verdict of 0 was sent; 0: none */
};

struct model_segment {
    struct id id, attempt;
    uint64_t step;
    uint32_t rank;
    uint64_t joined_at, refused_at; /* asked; told that it is fenced or gone */
    uint64_t sequence;              /* told, or seen in a record */
};

struct model_commit {
    uint64_t sequence, step, known_at, removed_at; /* removed: told by prune */
    uint64_t server_time_ns;                       /* listed */
    uint64_t pinned_at, pin_in_doubt_at; /* told; somebody asked to unpin or the pin is on its way */
    bool bad_asked;
    struct id attempt;
};

struct model_prune {
    uint64_t asked_at, told_at; /* told 0: may still go on */
    uint32_t keep_last;
    uint64_t keep_every, keep_within_ns;
};

struct model_clock { /* the wall clock was set */
    uint64_t at;
    int64_t by_ns;
};

struct model_fence { /* commits above `sequence` are of attempt `number` or newer */
    uint64_t sequence, number;
};

/* A growing array; grows by one in model_add. */
#define MODEL_ARRAY(type) \
    struct {              \
        struct type *at;  \
        size_t n, room;   \
    }

struct model_run {
    char name[16];
    enum run_kind kind;
    bool id_told, dek_told;
    struct id id;
    struct dek dek;
    MODEL_ARRAY(model_asked) asked;
    MODEL_ARRAY(model_attempt) attempts;
    MODEL_ARRAY(model_save) saves;
    MODEL_ARRAY(model_segment) segments;
    MODEL_ARRAY(model_commit) commits; /* in the order they became known */
    MODEL_ARRAY(model_prune) prunes;
    MODEL_ARRAY(model_fence) fences;
};

struct model {
    uint64_t now;
    uint64_t commits_told;
    MODEL_ARRAY(model_clock) clocks;
    struct model_run run[2];
    /* Does not return. */
    void (*fail)(void *arg, const char *text);
    void *fail_arg;
};

void model_free(struct model *m);
uint64_t model_asks(struct model *m); /* the moment at which a request goes out */

void model_run_told(struct model *m, struct model_run *r, const struct id *id);
/* The first key is kept; others must be the same. */
void model_key_told(struct model *m, struct model_run *r, struct dek *dek);

void model_attempt_asked(struct model *m, struct model_run *r, const struct id *attempt);
void model_attempt_told(struct model *m, struct model_run *r, const struct id *attempt, uint64_t number,
                        uint32_t world);
void model_join_asked(struct model *m, struct model_run *r, const struct segment_header *h);
void model_verdict_asked(struct model *m, struct model_run *r, const struct id *attempt, uint64_t step);
/* segment: the joined one; NULL: the answer to a verdict. */
void model_durable_told(struct model *m, struct model_run *r, const struct id *attempt, uint64_t step,
                        const struct id *segment, uint64_t sequence);
void model_segment_refused(struct model *m, struct model_run *r, const struct id *segment);

void model_listed(struct model *m, struct model_run *r, uint64_t asked_at,
                  const struct msg_commit_item *items, size_t n);
void model_record_seen(struct model *m, struct model_run *r, uint64_t asked_at, const struct commit *c,
                       uint8_t state);
/* A commit with that sequence was there, and could then not be found, or a part of it. To be called after the
 * run was listed once more, so that a prune's reasons are known. */
void model_not_found(struct model *m, struct model_run *r, uint64_t sequence, const char *what);
/* A client has opened a commit for reading, the newest good one if latest. Returns whose it is. */
const struct model_attempt *model_opened(struct model *m, struct model_run *r, uint64_t asked_at, bool latest,
                                         uint64_t sequence, uint64_t step, uint64_t attempt_number,
                                         uint32_t world);
/* Nothing good was found in the run. */
void model_empty(struct model *m, struct model_run *r, uint64_t asked_at);

void model_clock_stepped(struct model *m, int64_t by_ns);
size_t model_prune_asked(struct model *m, struct model_run *r, uint32_t keep_last, uint64_t keep_every,
                         uint64_t keep_within_ns);
/* now_ns: what the wall clock says. */
void model_prune_told(struct model *m, struct model_run *r, size_t prune, const struct msg_prune_item *items,
                      size_t n, uint64_t now_ns);
void model_pin(struct model *m, struct model_run *r, uint64_t sequence, bool told, bool pin);
void model_bad_asked(struct model *m, struct model_run *r, uint64_t sequence);

#endif
