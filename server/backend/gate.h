/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many may pass together, or one alone; in order of asking, so neither waits for ever. One loop, no locks.
 * Private to server/backend: names are published and removed in company, empty folders are removed alone.
 */
#ifndef LARDER_GATE_H
#define LARDER_GATE_H

#include "server/backend/impl.h"

typedef void gate_pass(struct backend_op *op);

struct gate {
    unsigned inside;
    bool alone;
    struct backend_op *first, **end;
};

/* What an operation keeps while it waits; lies in its private part. */
struct gate_ticket {
    gate_pass *pass;
    bool alone;
};

void gate_init(struct gate *g);
/* pass is called once it may go in: maybe from within this call. */
void gate_enter(struct gate *g, struct backend_op *op, struct gate_ticket *t, bool alone, gate_pass *pass);
/* ticket_of finds the ticket of one that waits. */
void gate_leave(struct gate *g, struct gate_ticket *(*ticket_of)(struct backend_op *op));

#endif
