/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A ghost says on a connection of its own what another connection has said before: in full or up to some
 * frame, each frame once or twice, or in any order behind the first. That is a client that repeats all of its
 * requests after a reconnect, messages that come late and out of turn, and a peer that means harm. It listens
 * to no answer. Whatever it does must be refused or be harmless.
 */
#ifndef LARDER_TESTS_SIM_GHOST_H
#define LARDER_TESTS_SIM_GHOST_H

#include "tests/sim/world.h"

#define GHOST_BYTES_MAX (128u << 10)

/* Some time later. said: bytes of a clear channel, from its begin. The world counts it as a line
 * until it has gone. What an operator said is not repeated: a second prune is another one. */
void ghost_begin(struct world *w, enum client_role role, struct buf *said);

#endif
