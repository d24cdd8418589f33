/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sim/clients.h"

#include <stdlib.h>
#include <string.h>

static bool jobs_run(const struct world *w)
{
    return w->jobs_done < w->plan.knob[KNOB_JOBS];
}

static struct model_run *some_run(struct actor *a)
{
    return &a->w->model.run[roll(a, a->w->plan.knob[KNOB_JOBS])];
}

/* ---- a reader ---- */

static void restore(struct actor *a, struct model_run *r, enum commit_select select, uint64_t value)
{
    struct commit c;
    if (read_commit(a, r, select, value, &c) != ERR_NONE)
        return;
    (void)read_parts(a, r, &c);
    commit_free(&c);
}

/* The same with the real client, which is open all the time. */
static void read_as_client(struct actor *a)
{
    struct client *c = client_up(a);
    while (c->larder && alive(a) && jobs_run(a->w)) {
        struct model_run *r = some_run(a);
        struct msg_commit_item *items = NULL;
        size_t n = 0;
        actor_sleep(a, 1 + roll(a, 150));
        if (!alive(a) || r->kind != RUN_CHECKPOINTS || read_run(a, r, false) != ERR_NONE ||
            read_list(a, r, &items, &n) != ERR_NONE)
            continue;
        (void)client_restore(a, c, r, n && roll(a, 2) ? items[roll(a, (uint32_t)n)].sequence : 0);
        free(items);
    }
    client_down(a, c);
}

void reader_main(struct actor *a)
{
    if (roll(a, 8) < a->w->plan.knob[KNOB_CLIENTS]) {
        read_as_client(a);
        return;
    }
    while (alive(a) && jobs_run(a->w)) {
        struct model_run *r = some_run(a);
        struct msg_commit_item *items = NULL;
        size_t n = 0;
        actor_sleep(a, 1 + roll(a, 150));
        if (!alive(a) || read_run(a, r, false) != ERR_NONE || read_list(a, r, &items, &n) != ERR_NONE)
            continue;
        if (n && roll(a, 2))
            restore(a, r, SELECT_SEQUENCE, items[roll(a, (uint32_t)n)].sequence);
        else if (n && roll(a, 2))
            restore(a, r, SELECT_STEP, items[roll(a, (uint32_t)n)].step);
        else
            restore(a, r, roll(a, 2) ? SELECT_LATEST : SELECT_LATEST_GOOD, 0);
        free(items);
    }
}

/* ---- the operator ---- */

/* Seconds for which commits are kept, mostly none. */
static uint64_t some_age(struct actor *a)
{
    static const uint64_t ages[] = {1, 10, 3600, 86400};
    return roll(a, 2) ? ages[roll(a, 4)] : 0;
}

static void prune(struct actor *a, struct model_run *r, uint32_t keep_last, uint64_t keep_every)
{
    uint64_t keep_within_s = some_age(a);
    struct call c = {0};
    size_t p = model_prune_asked(&a->w->model, r, keep_last, keep_every, keep_within_s * 1000000000u);
    enum err_class class =
        ASK(a, &c, OP_PRUNE, prune, .kind = (uint8_t)r->kind, .name = slice_str(r->name),
            .keep_last = keep_last, .keep_every = keep_every, .keep_within_s = keep_within_s, .execute = 1);
    if (class == ERR_NONE) {
        struct msg_prune_reply reply = ANSWER(&c, prune_reply);
        struct rcur in = rcur_of(reply.items.p, reply.items.n);
        struct msg_prune_item *items = calloc(reply.count + 1u, sizeof *items);
        check(items);
        for (uint32_t i = 0; i < reply.count; i++)
            if (msg_prune_item_decode(&in, &items[i], &c.err) < 0)
                world_fail(a->w, "the answer to prune: %s", c.err.text);
        model_prune_told(&a->w->model, r, p, items, reply.count, sim_unix_ns(a->w->sim));
        free(items);
        a->w->tally.prunes++;
    }
    call_drop(&c);
}

static void mark(struct actor *a, struct model_run *r, uint64_t sequence, enum mark_action action)
{
    struct call c = {0};
    bool pins = action == MARK_ACTION_PIN;
    if (action == MARK_ACTION_BAD)
        model_bad_asked(&a->w->model, r, sequence);
    if (action == MARK_ACTION_UNPIN)
        model_pin(&a->w->model, r, sequence, false, false);
    enum err_class class =
        ASK(a, &c, OP_MARK, mark, .kind = (uint8_t)r->kind, .name = slice_str(r->name), .sequence = sequence,
            .action = (uint8_t)action, .reason = slice_str("the simulator wants it so"));
    if (class == ERR_NONE && pins)
        model_pin(&a->w->model, r, sequence, true, true);
    call_drop(&c);
}

struct scrubbing {
    struct actor *a;
    bool strict;
};

static void scrub_frame(struct call *c, struct rcur *in)
{
    struct scrubbing *s = c->arg;
    struct msg_scrub_item x;
    struct err e = {0};
    if (in->left == 0)
        return; /* the last one */
    if (msg_scrub_item_decode(in, &x, &e) < 0)
        world_fail(s->a->w, "a scrub's frame: %s", e.text);
    if (x.class == ERR_CORRUPT || (s->strict && x.class != ERR_NONE))
        world_fail(s->a->w, "scrub finds %.*s damaged: %.*s", (int)x.object.n, (const char *)x.object.p,
                   (int)x.text.n, (const char *)x.text.p);
}

static void scrub(struct actor *a, struct model_run *r, bool strict)
{
    struct scrubbing s = {.a = a, .strict = strict};
    struct call c = {.frame = scrub_frame, .arg = &s};
    (void)ASK(a, &c, OP_SCRUB, scrub, .kind = (uint8_t)r->kind, .name = slice_str(r->name),
              .level = SCRUB_DATA);
    call_drop(&c);
}

void operator_main(struct actor *a)
{
    while (alive(a) && jobs_run(a->w)) {
        struct model_run *r = some_run(a);
        struct msg_commit_item *items = NULL;
        size_t n = 0;
        actor_sleep(a, 20 + roll(a, 200));
        if (!alive(a) || !jobs_run(a->w) || read_list(a, r, &items, &n) != ERR_NONE)
            continue;
        uint32_t what = roll(a, 10);
        uint64_t some = n ? items[roll(a, (uint32_t)n)].sequence : 0;
        if (what < 5)
            prune(a, r, 1 + roll(a, 3), roll(a, 3) ? 0 : 20);
        else if (what < 7)
            scrub(a, r, false);
        else if (n && what == 7)
            mark(a, r, some, MARK_ACTION_PIN);
        else if (n && what == 8)
            mark(a, r, some, MARK_ACTION_UNPIN);
        else if (what == 9 && roll(a, 2))
            rotate_key(a, r);
        else if (n > 1 && roll(a, 3) == 0)
            mark(a, r, some, MARK_ACTION_BAD);
        free(items);
    }
}

/* ---- the clock ---- */

void clock_main(struct actor *a)
{
    static const uint32_t spans_s[] = {1, 60, 3600, 3 * 3600, 86400};
    uint32_t left = a->w->plan.knob[KNOB_CLOCK_STEPS];
    while (alive(a) && left > 0 && jobs_run(a->w)) {
        actor_sleep(a, 1 + roll(a, 1500));
        if (!a->w->faulty)
            break;
        left--;
        int64_t ns = (int64_t)spans_s[roll(a, 5)] * 1000000000 + roll(a, 1000000000);
        ns = roll(a, 2) ? ns : -ns;
        sim_step_clock(a->w->sim, ns);
        model_clock_stepped(&a->w->model, ns);
        a->w->tally.clock_steps++;
    }
}

/* ---- the audit ---- */

static uint64_t audit_run(struct actor *a, struct model_run *r, bool last)
{
    struct msg_commit_item *items = NULL;
    size_t n = 0;
    uint64_t digest = 0;
    enum err_class class = read_run(a, r, false);
    if (class == ERR_NONE)
        class = read_list(a, r, &items, &n);
    for (size_t i = 0; i < n && alive(a); i++) {
        restore(a, r, SELECT_SEQUENCE, items[i].sequence);
        uint64_t word[4] = {digest, items[i].sequence, items[i].step, items[i].stored_bytes};
        digest = hash64(word, sizeof word);
    }
    if (alive(a) && n)
        restore(a, r, SELECT_LATEST_GOOD, 0);
    if (alive(a) && last && class == ERR_NONE)
        scrub(a, r, true);
    if (alive(a) && last && n == 0)
        world_fail(a->w, "%s: the job is done, and nothing is there", r->name);
    free(items);
    return digest;
}

void audit_main(struct actor *a)
{
    struct audit *x = a->arg;
    bool last = x->last;
    for (uint32_t i = 0; i < a->w->plan.knob[KNOB_JOBS] && alive(a); i++) {
        uint64_t digest = audit_run(a, &a->w->model.run[i], last);
        if (alive(a) && x->found)
            x->found[i] = digest;
    }
    if (alive(a) && x->done)
        *x->done = true;
}
