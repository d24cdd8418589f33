/* SPDX-License-Identifier: Apache-2.0 */
/* The demo's trainer, `larder-demo`: its commands, and what they share. */
#ifndef LARDER_DEMO_H
#define LARDER_DEMO_H

#include <stdbool.h>
#include <stdint.h>

#include "client/larder.h"
#include "tools/demo/world.h"

#define DEMO_EXIT_LOST 75 /* a rank died; the job can be resumed */

struct job {
    const char *run, *dataset, *report, *title;
    unsigned ranks;
    uint64_t steps, save_every, seed;
    uint64_t kill_step;    /* 0, or the save in the middle of which the last rank is killed */
    uint64_t kill_percent; /* how far into it, as part of what the last save took to be durable */
    unsigned per_micro;    /* sequences of a micro-batch */
    bool resume;
    bool generate;
    uint8_t attempt[LARDER_ID_BYTES];
};

/* One rank's whole life; the process exits with what it returns. */
int rank_main(const struct job *j, struct world *w, unsigned rank);

/* larder-demo train: forks the ranks and waits for them. */
int train_main(int argc, char **argv);
/* larder-demo pack FOLDER: texts of this machine into tar shards. */
int pack_main(int argc, char **argv);
/* larder-demo report REFERENCE KILLED RESUMED: loss curve and table from the jobs' reports. */
int report_main(int argc, char **argv);

void demo_error(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

#endif
