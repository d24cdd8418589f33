/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "server/io/ring.h"
#include "tests/support/folder.h"

#define RIG_EVENTS_MAX 10000000u

static void skip_it(void **state)
{
    (void)state;
    skip();
}

void rig_skip_ring(struct CMUnitTest *tests, size_t count, int (*setup)(void **state),
                   int (*other)(void **state))
{
    char text[256];
    struct err e = {0};
    if (ring_probe(text, sizeof text, &e) == 0)
        return;
    printf("# tests on the ring are skipped: %s\n", e.text);
    for (size_t i = 0; i < count; i++) {
        if (tests[i].setup_func != setup && (!other || tests[i].setup_func != other))
            continue;
        tests[i].test_func = skip_it;
        tests[i].setup_func = NULL;
        tests[i].teardown_func = NULL;
    }
}

void rig_open(struct rig *r, enum rig_kind kind, unsigned entries)
{
    struct err e = {0};
    memset(r, 0, sizeof *r);
    r->kind = kind;
    if (kind == RIG_SIM) {
        r->sim = sim_create(&(struct sim_options){.seed = entries});
        r->loop = sim_loop(r->sim, 0);
        return;
    }
    struct ring_options o = {.entries = entries, .worker_pool = kind == RIG_POOL};
    if (ring_create(&o, &r->loop, &e)) {
        fprintf(stderr, "rig: %s\n", e.text);
        abort();
    }
    loop_stop(r->loop); /* so that loop_run returns whenever nothing is pending */
    folder_make(r->folder, sizeof r->folder);
}

void rig_close(struct rig *r)
{
    rig_settle(r);
    loop_destroy(r->loop);
    sim_destroy(r->sim);
    if (r->kind != RIG_SIM)
        folder_remove(r->folder);
}

void rig_settle(struct rig *r)
{
    struct err e = {0};
    if (r->kind == RIG_SIM) {
        check(sim_run(r->sim, NULL, NULL, RIG_EVENTS_MAX) < RIG_EVENTS_MAX);
        return;
    }
    if (loop_run(r->loop, &e)) {
        fprintf(stderr, "rig: %s\n", e.text);
        abort();
    }
}

const char *rig_path(struct rig *r, const char *name)
{
    static char paths[4][256];
    static unsigned turn;
    char *path = paths[turn++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", r->folder, name);
    return path;
}

static void step_done(struct io_op *op)
{
    container_of(op, struct step, op)->done = true;
}

struct io_op *step_op(struct step *s)
{
    s->op.done = step_done;
    s->done = false;
    return &s->op;
}

int64_t step_end(struct rig *r, struct step *s)
{
    rig_settle(r);
    check(s->done);
    return s->op.result;
}
