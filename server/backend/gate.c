/* SPDX-License-Identifier: Apache-2.0 */
#include "server/backend/gate.h"

void gate_init(struct gate *g)
{
    *g = (struct gate){.inside = 0};
    g->end = &g->first;
}

static bool may_pass(const struct gate *g, bool alone)
{
    return !g->alone && (!alone || g->inside == 0);
}

static void go_in(struct gate *g, bool alone)
{
    g->inside++;
    g->alone = alone;
}

void gate_enter(struct gate *g, struct backend_op *op, struct gate_ticket *t, bool alone, gate_pass *pass)
{
    if (!g->first && may_pass(g, alone)) {
        go_in(g, alone);
        pass(op);
        return;
    }
    *t = (struct gate_ticket){.pass = pass, .alone = alone};
    op->next = NULL;
    *g->end = op;
    g->end = &op->next;
}

void gate_leave(struct gate *g, struct gate_ticket *(*ticket_of)(struct backend_op *op))
{
    check(g->inside > 0);
    g->inside--;
    g->alone = false;
    while (g->first && may_pass(g, ticket_of(g->first)->alone)) {
        struct backend_op *op = g->first;
        struct gate_ticket t = *ticket_of(op);
        g->first = op->next;
        if (!g->first)
            g->end = &g->first;
        op->next = NULL;
        go_in(g, t.alone);
        t.pass(op);
    }
}
