/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a process of the real client does: it opens the library, saves and restores. Every byte that comes
 * back is compared with what was saved; what is told goes to the model. Errors that no client of good manners
 * should meet fail the seed. Called by an actor, which may be killed at any moment.
 */
#ifndef LARDER_TESTS_SIM_CLIENTS_H
#define LARDER_TESTS_SIM_CLIENTS_H

#include "tests/sim/people.h"

struct larder;

struct client {
    struct larder *larder; /* NULL: its actor was killed before it was open */
    unsigned reconnect_ms;
};

/* Tries until it is there. Ended by client_down, which frees it. */
struct client *client_up(struct actor *a);
void client_down(struct actor *a, struct client *c);

/* What an error of the library means here: its class, noted; the seed fails if it must not happen. */
struct larder_error;
enum err_class client_failed(struct actor *a, const char *what, const struct larder_error *e);

struct client_part {
    struct model_run *run;
    struct id attempt;
    uint64_t step;
    uint32_t rank, world;
    bool
        may_lie; /* the tensor that all ranks hold may have other bytes here: then nothing may be committed */
};
/* One save, until it is decided. */
enum err_class client_save(struct actor *a, const struct client *c, const struct client_part *x);
/* Restores the newest good commit, or the one of that sequence, whole or as some rank of some world would.
 * ERR_NOT_FOUND: there is none, which the model has been asked about. */
enum err_class client_restore(struct actor *a, const struct client *c, struct model_run *r,
                              uint64_t sequence);

#endif
