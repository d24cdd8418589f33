/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One thing goes wrong, at each moment of a history in turn: the power fails (images), an operation of the
 * disk fails (sites), memory runs out (allocations), a connection breaks (cuts).
 *
 * Crash replay. A plan is played without faults of disk and network, and every change of the server's disk is
 * noted: each write, sync, new length, link and removal of its saves, commits, prunes, rotations and imports.
 * Then the same history is played again and again; each time the power fails after another of these changes,
 * and what was not durable is lost in another of the ways that the order of syncs allows. Recovery runs on
 * that image, is held against the model, and the world goes on to its end.
 */
#ifndef LARDER_TESTS_SIM_MOMENTS_H
#define LARDER_TESTS_SIM_MOMENTS_H

#include "tests/sim/world.h"

/* Takes the faults out of a plan, and gives it what images are to be made of. */
void moments_calm(struct plan *p);
/* Plays about `most` images of the plan (0: all), evenly over its changes. Each change is taken in at most 8
 * ways: all is lost, nothing, any by chance, one unit alone is kept or lost. Does not return if one fails. */
void images_play(const struct plan *p, uint64_t most, struct tally *sum);

/* Fault sites: every disk operation of the plan fails once with EIO, those that need space once with ENOSPC,
 * each in a history of its own; the server's first start and one in good order are part of it. Does not
 * return if one ends badly. */
void sites_play(const struct plan *p, uint64_t most, struct tally *sum);
/* Every allocation of the server fails once, each in a history of its own, as in sites; and what the server
 * took is given back in the end. Does not return if one ends badly. */
void allocations_play(const struct plan *p, uint64_t most, struct tally *sum);
/* Cuts: at every byte that travels while the ranks of an attempt commit a step, in either direction, the
 * connection breaks once. Does not return if one ends badly. */
void cuts_play(const struct plan *p, uint64_t most, struct tally *sum);

#endif
