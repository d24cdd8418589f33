/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A loop to test on, of each kind, driven step by step: submit, then rig_settle, then look at results.
 * Files go to a folder of the rig's own; it is removed at the end.
 */
#ifndef LARDER_TEST_RIG_H
#define LARDER_TEST_RIG_H

#include "server/io/loop.h"
#include "server/io/sim.h"

enum rig_kind { RIG_RING, RIG_POOL, RIG_SIM };

struct rig {
    enum rig_kind kind;
    struct loop *loop;
    struct sim *sim;  /* RIG_SIM */
    char folder[128]; /* exists (in the simulator: its root); tests put everything below it */
};

/* Where io_uring is refused: says so, and makes the tests that begin on a ring (setup is one of the two, the
 * second may be NULL) skips. */
struct CMUnitTest;
void rig_skip_ring(struct CMUnitTest *tests, size_t count, int (*setup)(void **state),
                   int (*other)(void **state));

/* entries: of the ring's queue, 0: the default; for the simulator: the seed. Fails the test if the loop
 * cannot be had. */
void rig_open(struct rig *r, enum rig_kind kind, unsigned entries);
void rig_close(struct rig *r);
/* Runs until no operation and no message is pending. */
void rig_settle(struct rig *r);
/* folder/name; one of four rotating buffers. */
const char *rig_path(struct rig *r, const char *name);

/* An operation that remembers its end. */
struct step {
    struct io_op op;
    bool done;
};
struct io_op *step_op(struct step *s); /* readies it for the next call */
/* Settles and returns the result of the one operation. */
int64_t step_end(struct rig *r, struct step *s);

#endif
