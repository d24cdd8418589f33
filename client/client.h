/* SPDX-License-Identifier: Apache-2.0 */
/* What the rooms of the client share: the opened client, runs with their keys, and helpers at the border to
 * larder.h. */
#ifndef LARDER_CLIENT_H
#define LARDER_CLIENT_H

#include <pthread.h>

#include "client/conn.h"
#include "client/larder.h"
#include "format/base/err.h"
#include "format/commit.h"
#include "format/credentials.h"
#include "format/keys.h"

/* Every public call begins with it: -ECHILD after a fork, -EINVAL if c is NULL. */
must_check int client_enter(struct larder *c, struct err *e);
/* At the border: err to larder_error; returns rc. */
int client_leave(int rc, const struct err *from, struct larder_error *to);

const struct credentials *client_credentials(struct larder *c);
struct conn *client_conn(struct larder *c); /* the control connection */
/* Another connection to the same server, for data, with a bulk lane as wished where both sides have it; the
 * caller closes it. Tried for reconnect_ms while the server cannot be reached. */
must_check int client_connect(struct larder *c, enum conn_lane lane, struct conn **out, struct err *e);
const struct larder_options *client_options(struct larder *c); /* defaults filled in */
/* The right bound for a public timeout_ms argument. */
uint32_t client_timeout(struct larder *c, int timeout_ms);

/* The position that saves take by themselves: its bytes, 0 if no feed is open that they look at. ERR_INVALID:
 * several are. */
must_check int client_feed_state(struct larder *c, uint8_t state[LARDER_STATE_BYTES], struct err *e);

/* A run or dataset with its key. */
struct run {
    enum run_kind kind;
    struct id run_id;
    char name[NAME_BYTES_MAX + 1];
    struct dek dek;
    uint64_t latest_sequence;
};
/* create: makes run and key if absent (all ranks may race: one key wins). ERR_NOT_FOUND, ERR_KEY. */
must_check int run_open(struct larder *c, enum run_kind kind, const char *name, bool create, struct run *out,
                        struct err *e);
void run_close(struct run *r);
/* The commit that select and value name; free with commit_free. state/reason may be NULL. */
must_check int run_commit(struct larder *c, const struct run *r, enum commit_select select, uint64_t value,
                          struct commit *out, enum commit_state *state, struct err *e);

#endif
