/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What happens under a seed: a few numbers, drawn from it, each of which can be set by hand. Shrinking a
 * failure is making them smaller.
 */
#ifndef LARDER_TESTS_SIM_PLAN_H
#define LARDER_TESTS_SIM_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum knob {
    /* Faults. */
    KNOB_CRASHES, /* losses of power of the server */
    KNOB_STOPS,   /* stops and starts in good order */
    KNOB_LOSE,    /* whether a loss of power takes what was not synced */
    KNOB_KILLS,   /* ranks that die */
    KNOB_ZOMBIES, /* jobs that are started again while the old one still runs */
    KNOB_CUT,     /* from here on per million operations: connections are cut */
    KNOB_READ_ERROR,
    KNOB_CORRUPT,   /* what is read has a flipped bit */
    KNOB_MISDIRECT, /* or comes from other sectors */
    KNOB_WRITE_ERROR,
    KNOB_SYNC_ERROR,
    KNOB_NO_SPACE,
    KNOB_SHORT,      /* transfers end early */
    KNOB_STALL,      /* milliseconds that an operation may take more */
    KNOB_LOST_REPLY, /* per million answers: it is lost, with its connection, after the deed */
    KNOB_GHOSTS, /* connections whose messages come once more, on another: also doubled, or in any order */
    KNOB_CLOCK_STEPS, /* the wall clock is set forward or back, by seconds to days */
    KNOB_TIGHT,       /* a disk that is nearly full */
    KNOB_SAME_BOOT,   /* after a failed sync larderd is first started again without a start of the machine */
    KNOB_BAD_START,   /* reads fail also while the server starts and reads its records; never drawn */
    /* People and their work. */
    KNOB_JOBS,
    KNOB_RANKS,
    KNOB_STEPS,
    KNOB_TENSORS,
    KNOB_BYTES, /* of a tensor, at most */
    KNOB_READERS,
    KNOB_OPERATOR,
    KNOB_DATASET, /* whether the second job imports into a dataset */
    KNOB_CLIENTS, /* of 8 ranks and readers so many run the real client */
    KNOB_FEEDERS, /* real clients that feed from a dataset that another imports */
    KNOB_LOOPS,   /* of the server */
    /* One thing goes wrong, at one moment; never drawn. */
    KNOB_FAIL_AT,    /* number of the operation of the server's disk that fails; 0: none */
    KNOB_FAIL_ERRNO, /* how */
    KNOB_CUT_AT,     /* number of the byte of commits at which a connection breaks; 0: none */
    KNOB_STARVE_AT,  /* number of the server's allocation that fails; 0: none */
    /* The power fails, in one way. */
    KNOB_CRASH_AT,  /* number of the change of the server's disk after which; 0: not so */
    KNOB_CRASH_WAY, /* SIM_LOSE_... of server/io/sim.h */
    KNOBS
};

struct plan {
    uint64_t seed;
    uint32_t knob[KNOBS];
};

void plan_draw(struct plan *p, uint64_t seed);
const char *plan_knob_name(enum knob k);
uint32_t plan_knob_least(enum knob k);
/* "name=value"; false: no such name. */
bool plan_set(struct plan *p, const char *text);
/* The options that make this plan of its seed's: " --set crashes=0 ...". */
void plan_print(const struct plan *p, char *out, size_t size);

/* A stream of numbers of its own for everyone who needs one. */
uint64_t draw(uint64_t *state);
uint32_t draw_below(uint64_t *state, uint32_t n);

#endif
