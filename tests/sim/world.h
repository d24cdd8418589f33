/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A world under one seed: the simulator, a server that is stopped, crashed and started again on the same
 * disk, and the actors that are its clients. Everything follows from the plan.
 */
#ifndef LARDER_TESTS_SIM_WORLD_H
#define LARDER_TESTS_SIM_WORLD_H

#include "server/boot.h"
#include "server/io/sim.h"
#include "tests/sim/model.h"
#include "tests/sim/part.h"
#include "tests/sim/plan.h"

/* What a seed reached; all 64 bits wide, so that they can be added up. */
struct tally {
    uint64_t events, answers, errors, commits, restores, prunes, starts, crashes, stops, kills, zombies,
        rotations, images, sites, allocations, site_cuts,
        pruned; /* pruned: worlds with a prune, a crash and a stop */
    uint64_t cuts, read_errors, write_errors, no_space, sync_errors, shorts;
    uint64_t corrupt, misdirected, caught; /* caught: what a client read did not stand its checks */
    uint64_t clients, client_saves, client_restores, batches, lies,
        yields; /* of real clients; yields: of their threads */
    uint64_t lost_replies, ghosts, ghost_frames, clock_steps;
};

struct life;
struct actor;

struct job {
    struct world *w;
    unsigned number;
    struct model_run *run;
    struct list attempts;
    unsigned kills_left, zombies_left;
    bool done;
};

struct watching {
    bool trace, print; /* hash what happens; and print it */
    /* After changes of the server's disk, of a plan in which one thing goes wrong; may be NULL. */
    void (*changed)(struct world *w);
};

struct world {
    struct plan plan;
    struct sim *sim;
    struct loop *clients; /* of node 1: all actors */
    uint64_t rng;
    struct list lives;    /* of the server, those that are not yet freed */
    struct life *life;    /* the present one */
    unsigned server_runs; /* counts starts that went well */
    bool faulty;
    uint64_t changes;      /* of the server's disk, at the last look */
    uint64_t allocations;  /* of the server, where one of them is to fail */
    uint32_t crash_way;    /* of the next loss of power */
    uint32_t syncs_failed; /* when the power failed last */
    bool reboot_wanted;    /* the server has refused to start before one */
    bool restart_wanted;   /* somebody met a store that is read-only */
    struct list actors;
    unsigned actor_count, lines; /* lines: and ghosts */
    unsigned ghosts_left;
    uint64_t dataset_version; /* of what feeds read; 0: not imported yet */
    struct job jobs[2];
    unsigned jobs_done;
    struct model model;
    struct sim_shape shape;
    struct tally tally;
    uint64_t trace_hash;
    struct watching watching;
};

/* Plays the plan from begin to end; does not return if something is wrong. watching: may be NULL. */
void world_play(struct world *w, const struct plan *plan, const struct watching *watching);
void tally_add(struct tally *sum, const struct tally *x);

/* Says why the seed has failed, and ends the process. */
void world_fail(struct world *w, const char *fmt, ...) __attribute__((format(printf, 2, 3), noreturn));
/* Where the text goes, beside stderr; for the process that watches this one. */
extern char *world_fail_text;
extern size_t world_fail_size;

/* A line of the trace. */
void world_note(struct world *w, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Sets the simulator's faults as they are to be now. */
void world_faults(struct world *w);

/* Ports of the server by role. */
const char *world_port(enum client_role role);

/* The server's life; world_server.c. */
void server_begin(struct world *w);               /* a new one, where none lives */
void server_starve(struct world *w, uint64_t at); /* its allocation of that number, from now on, fails */
void server_lose_power(struct world *w);          /* and nothing lives */
void server_stop_well(struct world *w);           /* begins it */
bool server_down(const struct world *w);          /* none lives, or it has ended */
bool server_up(const struct world *w);
void server_bury(struct world *w, bool all); /* frees the dead that have come to rest; all: they must have */

#endif
