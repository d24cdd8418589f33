/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Actors of the simulation are written as plain sequences of calls that wait. Each runs on a stack of its own
 * (ucontext); all run on the one thread of the simulator, and change places only where they wait.
 */
#ifndef LARDER_TESTS_SIM_FIBER_H
#define LARDER_TESTS_SIM_FIBER_H

#include <stdbool.h>

struct fiber;

/* It begins with the first fiber_resume. */
struct fiber *fiber_new(void (*main)(void *arg), void *arg);
/* From outside of any fiber: runs it until it waits or ends. */
void fiber_resume(struct fiber *f);
/* From within: back to who resumed it. */
void fiber_wait(struct fiber *f);
bool fiber_over(const struct fiber *f);
bool fiber_inside(void);          /* is one running now? */
void fiber_free(struct fiber *f); /* that is over; keeps its stack for the next one */

#endif
