/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: the gate lets many in together or one alone, in order of asking. Method: a random history of entering
 * and leaving, its rules checked after each step.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "server/backend/gate.h"

enum { VISITORS = 40, STEPS = 20000 };

static struct gate gate;
static struct visitor {
    struct backend_op op;
    struct gate_ticket ticket;
    enum { OUTSIDE, WAITING, INSIDE } place;
    bool alone;
    unsigned asked; /* serial */
} visitors[VISITORS];
static unsigned last_in; /* serial of the last who came in */

static struct gate_ticket *ticket_of(struct backend_op *op)
{
    return &container_of(op, struct visitor, op)->ticket;
}

static void came_in(struct backend_op *op)
{
    struct visitor *v = container_of(op, struct visitor, op);
    assert_int_equal(v->place, WAITING);
    v->place = INSIDE;
    assert_int_equal(v->asked, last_in + 1); /* nobody overtakes */
    last_in = v->asked;
}

static void rules_hold(void)
{
    unsigned inside = 0, alone = 0, waiting = 0, first = 0;
    bool first_alone = false;
    for (int i = 0; i < VISITORS; i++) {
        const struct visitor *v = &visitors[i];
        inside += v->place == INSIDE;
        alone += v->place == INSIDE && v->alone;
        waiting += v->place == WAITING;
        if (v->place == WAITING && (!first || v->asked < first)) {
            first = v->asked;
            first_alone = v->alone;
        }
    }
    assert_true(alone == 0 || inside == 1);
    if (waiting) /* for a reason */
        assert_true(first_alone ? inside > 0 : alone > 0);
}

static void company_or_alone(void **state)
{
    (void)state;
    uint32_t random = 1;
    unsigned serial = 0, met_alone = 0, met_company = 0;
    gate_init(&gate);
    for (int step = 0; step < STEPS; step++) {
        random = random * 1664525 + 1013904223;
        struct visitor *v = &visitors[(random >> 8) % VISITORS];
        if (v->place == OUTSIDE) {
            v->alone = (random >> 24) % 4 == 0;
            v->place = WAITING;
            v->asked = ++serial;
            gate_enter(&gate, &v->op, &v->ticket, v->alone, came_in);
        } else if (v->place == INSIDE) {
            met_alone += v->alone;
            met_company += !v->alone && gate.inside > 1;
            v->place = OUTSIDE;
            gate_leave(&gate, ticket_of);
        }
        rules_hold();
    }
    assert_true(met_alone > 100 && met_company > 100);
    for (bool left = true; left;) { /* all get in, in the end */
        left = false;
        for (int i = 0; i < VISITORS; i++) {
            if (visitors[i].place != INSIDE)
                continue;
            visitors[i].place = OUTSIDE;
            gate_leave(&gate, ticket_of);
            left = true;
        }
    }
    for (int i = 0; i < VISITORS; i++)
        assert_int_equal(visitors[i].place, OUTSIDE);
    assert_int_equal(last_in, serial);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(company_or_alone)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
