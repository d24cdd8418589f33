/* SPDX-License-Identifier: Apache-2.0 */
/* Who does what in a world: jobs with their ranks, readers, an operator, and the audit. */
#ifndef LARDER_TESTS_SIM_PEOPLE_H
#define LARDER_TESTS_SIM_PEOPLE_H

#include "tests/sim/actor.h"

/* ---- reading.c: what all of them do ---- */

/* Opens the run, making it if create, and its key; keeps both in the model. ERR_NOT_FOUND, or ERR_NETWORK if
 * killed. */
enum err_class read_run(struct actor *a, struct model_run *r, bool create);
/* Lists all commits of the run and holds them against the model. items: malloc'ed, NULL if not asked for.
 * ERR_NOT_FOUND: no such run. */
enum err_class read_list(struct actor *a, struct model_run *r, struct msg_commit_item **items, size_t *n);
/* The commit record; ERR_NOT_FOUND: there is none, which the model has been asked about. */
enum err_class read_commit(struct actor *a, struct model_run *r, enum commit_select select, uint64_t value,
                           struct commit *out);
/* Reads all parts and checks every byte of them. ERR_NOT_FOUND: pruned meanwhile. */
enum err_class read_parts(struct actor *a, struct model_run *r, const struct commit *c);
/* Checks the set of parts as the rank does that is asked to: without their data. */
enum err_class read_set(struct actor *a, struct model_run *r, const struct commit *c);

void people_keks(struct keyring *out); /* the tenant's keys, a copy */

/* Wraps the run's key under the next epoch, and then drops the older envelopes. */
void rotate_key(struct actor *a, struct model_run *r);

/* ---- the actors' mains ---- */

void job_main(struct actor *a); /* arg: struct job */
void job_free(struct job *j);
void reader_main(struct actor *a); /* restores what it finds, until all jobs are done */
void operator_main(struct actor *a);
void importer_main(struct actor *a); /* feeding.c: both run the real client */
void feeder_main(struct actor *a);
void clock_main(struct actor *a); /* sets the wall clock, while there are faults */

struct audit {
    bool last; /* the world is calm, and nobody else is there: all must be in order */
    bool *done;
    uint64_t *found; /* for each run a digest of its list; may be NULL */
};
void audit_main(struct actor *a); /* arg: struct audit, read at the begin */

#endif
