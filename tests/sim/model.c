/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sim/model.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A new last element, zeroed. */
#define model_add(a)                                                                      \
    ({                                                                                    \
        if ((a)->n == (a)->room) {                                                        \
            (a)->room = (a)->room ? 2 * (a)->room : 16;                                   \
            check(((a)->at = reallocarray((a)->at, (a)->room, sizeof *(a)->at)) != NULL); \
        }                                                                                 \
        memset(&(a)->at[(a)->n], 0, sizeof *(a)->at);                                     \
        &(a)->at[(a)->n++];                                                               \
    })

static void broken(struct model *m, const struct model_run *r, const char *fmt, ...)
    __attribute__((format(printf, 3, 4), noreturn));

static void broken(struct model *m, const struct model_run *r, const char *fmt, ...)
{
    char text[512];
    int n = snprintf(text, sizeof text, "%s: ", r->name);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text + n, sizeof text - (size_t)n, fmt, ap);
    va_end(ap);
    m->fail(m->fail_arg, text);
    abort();
}

void model_free(struct model *m)
{
    free(m->clocks.at);
    for (size_t i = 0; i < sizeof m->run / sizeof *m->run; i++) {
        struct model_run *r = &m->run[i];
        free(r->asked.at);
        free(r->attempts.at);
        free(r->saves.at);
        free(r->segments.at);
        free(r->commits.at);
        free(r->prunes.at);
        free(r->fences.at);
        if (r->dek_told)
            dek_free(&r->dek);
    }
}

uint64_t model_asks(struct model *m)
{
    return ++m->now;
}

/* ---- finding ---- */

static struct model_attempt *attempt_of(struct model_run *r, const struct id *id)
{
    for (size_t i = 0; i < r->attempts.n; i++)
        if (id_equal(&r->attempts.at[i].id, id))
            return &r->attempts.at[i];
    return NULL;
}

static struct model_attempt *attempt_numbered(struct model_run *r, uint64_t number)
{
    for (size_t i = 0; i < r->attempts.n; i++)
        if (r->attempts.at[i].number == number)
            return &r->attempts.at[i];
    return NULL;
}

static struct model_save *save_of(struct model_run *r, const struct id *attempt, uint64_t step)
{
    for (size_t i = 0; i < r->saves.n; i++)
        if (r->saves.at[i].step == step && id_equal(&r->saves.at[i].attempt, attempt))
            return &r->saves.at[i];
    return NULL;
}

static struct model_segment *segment_of(struct model_run *r, const struct id *id)
{
    for (size_t i = 0; i < r->segments.n; i++)
        if (id_equal(&r->segments.at[i].id, id))
            return &r->segments.at[i];
    return NULL;
}

static struct model_commit *commit_of(struct model_run *r, uint64_t sequence)
{
    for (size_t i = 0; i < r->commits.n; i++)
        if (r->commits.at[i].sequence == sequence)
            return &r->commits.at[i];
    return NULL;
}

/* ---- runs, keys, attempts ---- */

void model_run_told(struct model *m, struct model_run *r, const struct id *id)
{
    m->now++;
    if (r->id_told && !id_equal(&r->id, id))
        broken(m, r, "the run has another id than before");
    r->id_told = true;
    r->id = *id;
}

void model_key_told(struct model *m, struct model_run *r, struct dek *dek)
{
    m->now++;
    if (!r->dek_told) {
        r->dek = *dek;
        r->dek_told = true;
        return;
    }
    if (!id_equal(&r->dek.id, &dek->id) || !secret_equal(r->dek.key, dek->key))
        broken(m, r, "the run has another key than before");
    dek_free(dek);
}

static struct model_asked *asked_of(struct model_run *r, const struct id *attempt)
{
    for (size_t i = 0; i < r->asked.n; i++)
        if (id_equal(&r->asked.at[i].attempt, attempt))
            return &r->asked.at[i];
    return NULL;
}

void model_attempt_asked(struct model *m, struct model_run *r, const struct id *attempt)
{
    m->now++;
    if (!asked_of(r, attempt))
        *model_add(&r->asked) = (struct model_asked){.attempt = *attempt, .at = m->now};
}

void model_attempt_told(struct model *m, struct model_run *r, const struct id *attempt, uint64_t number,
                        uint32_t world)
{
    uint64_t asked_at = asked_of(r, attempt)->at;
    m->now++;
    struct model_attempt *a = attempt_of(r, attempt), *other = attempt_numbered(r, number);
    if (a && a->number != number)
        broken(m, r, "an attempt that has number %" PRIu64 " was told %" PRIu64, a->number, number);
    if (other && other != a)
        broken(m, r, "two attempts were told number %" PRIu64, number);
    if (a)
        return;
    for (size_t i = 0; i < r->attempts.n; i++)
        if (r->attempts.at[i].told_at < asked_at && r->attempts.at[i].number > number)
            broken(m, r, "an attempt was told number %" PRIu64 " after another had %" PRIu64, number,
                   r->attempts.at[i].number);
    a = model_add(&r->attempts);
    *a = (struct model_attempt){.id = *attempt, .number = number, .world = world, .told_at = m->now};
}

/* ---- saves ---- */

void model_join_asked(struct model *m, struct model_run *r, const struct segment_header *h)
{
    m->now++;
    if (!save_of(r, &h->attempt, h->step))
        *model_add(&r->saves) = (struct model_save){.attempt = h->attempt, .step = h->step};
    if (segment_of(r, &h->segment_id))
        return;
    *model_add(&r->segments) = (struct model_segment){
        .id = h->segment_id, .attempt = h->attempt, .step = h->step, .rank = h->rank, .joined_at = m->now};
}

void model_verdict_asked(struct model *m, struct model_run *r, const struct id *attempt, uint64_t step)
{
    struct model_save *s = save_of(r, attempt, step);
    m->now++;
    check(s);
    if (!s->approved_at)
        s->approved_at = m->now;
}

/* Is a commit of that sequence, attempt and step possible, given all that is known? Enters it. */
static struct model_commit *commit_known(struct model *m, struct model_run *r, uint64_t sequence,
                                         const struct id *attempt, uint64_t step)
{
    struct model_commit *c = commit_of(r, sequence);
    struct model_save *s = save_of(r, attempt, step);
    struct model_attempt *a = attempt_of(r, attempt);
    if (!a || !s || !s->approved_at)
        broken(m, r, "sequence %" PRIu64 " is a commit of step %" PRIu64 " that nobody approved", sequence,
               step);
    if (c && (c->step != step || !id_equal(&c->attempt, attempt)))
        broken(m, r,
               "sequence %" PRIu64 " was step %" PRIu64 ", and is step %" PRIu64 " or of another attempt",
               sequence, c->step, step);
    if (c)
        return c;
    for (size_t i = 0; i < r->commits.n; i++) {
        const struct model_commit *o = &r->commits.at[i];
        const struct model_attempt *oa = attempt_of(r, &o->attempt);
        if (o->sequence > sequence && o->known_at < s->approved_at)
            broken(m, r,
                   "step %" PRIu64 " was approved after sequence %" PRIu64 " was known, and got %" PRIu64,
                   step, o->sequence, sequence);
        if (oa->number != a->number && (oa->number > a->number) != (o->sequence > sequence))
            broken(m, r,
                   "sequence %" PRIu64 " is of attempt %" PRIu64 " and %" PRIu64 " of attempt %" PRIu64
                   ": an older attempt committed after a newer one",
                   sequence, a->number, o->sequence, oa->number);
    }
    for (size_t i = 0; i < r->fences.n; i++)
        if (sequence > r->fences.at[i].sequence && a->number < r->fences.at[i].number)
            broken(m, r,
                   "attempt %" PRIu64 " committed sequence %" PRIu64 " after attempt %" PRIu64
                   " had been told its number, when the highest was %" PRIu64,
                   a->number, sequence, r->fences.at[i].number, r->fences.at[i].sequence);
    c = model_add(&r->commits);
    *c = (struct model_commit){.sequence = sequence, .step = step, .attempt = *attempt, .known_at = m->now};
    return c;
}

/* The segment is part of that commit. */
static void segment_in(struct model *m, struct model_run *r, struct model_segment *g, uint64_t sequence)
{
    if (g->sequence && g->sequence != sequence)
        broken(m, r, "one part of step %" PRIu64 " is in sequences %" PRIu64 " and %" PRIu64, g->step,
               g->sequence, sequence);
    for (size_t i = 0; i < r->segments.n; i++) {
        const struct model_segment *o = &r->segments.at[i];
        if (o != g && o->sequence == sequence && o->rank == g->rank)
            broken(m, r, "two parts of rank %u were told to be in sequence %" PRIu64, g->rank, sequence);
    }
    g->sequence = sequence;
}

void model_durable_told(struct model *m, struct model_run *r, const struct id *attempt, uint64_t step,
                        const struct id *segment, uint64_t sequence)
{
    m->now++;
    m->commits_told++;
    (void)commit_known(m, r, sequence, attempt, step);
    if (!segment)
        return;
    struct model_segment *g = segment_of(r, segment);
    check(g);
    if (g->refused_at)
        broken(m, r,
               "rank %u was told that its part of step %" PRIu64 " was refused, then that it is durable",
               g->rank, step);
    segment_in(m, r, g, sequence);
}

void model_segment_refused(struct model *m, struct model_run *r, const struct id *segment)
{
    struct model_segment *g = segment_of(r, segment);
    m->now++;
    if (!g)
        return;
    if (!g->sequence && !g->refused_at) /* or it was committed, and pruned meanwhile */
        g->refused_at = m->now;
}

/* ---- what prune may have removed ---- */

static bool superseded(const struct model_run *r, const struct model_commit *c)
{
    for (size_t i = 0; i < r->commits.n; i++)
        if (r->commits.at[i].step == c->step && r->commits.at[i].sequence > c->sequence)
            return true;
    return false;
}

static uint64_t highest_known(const struct model_run *r)
{
    uint64_t highest = 0;
    for (size_t i = 0; i < r->commits.n; i++)
        if (r->commits.at[i].sequence > highest)
            highest = r->commits.at[i].sequence;
    return highest;
}

/* highest: sequence that is known to have been given. */
static bool may_remove(const struct model_run *r, const struct model_prune *p, const struct model_commit *c,
                       uint64_t highest)
{
    const struct model_save *s = save_of((struct model_run *)r, &c->attempt, c->step);
    if (p->told_at && p->told_at < s->approved_at)
        return false; /* it ended before the commit was */
    if (c->pinned_at && c->pinned_at < p->asked_at && !c->pin_in_doubt_at)
        return false;
    if (c->bad_asked)
        return true;
    if (highest == c->sequence)
        return false; /* the last good one */
    if (superseded(r, c))
        return true;
    return highest - c->sequence >= p->keep_last && (!p->keep_every || c->step % p->keep_every != 0);
}

static bool may_be_gone(const struct model_run *r, const struct model_commit *c, uint64_t highest)
{
    for (size_t i = 0; i < r->prunes.n; i++)
        if (may_remove(r, &r->prunes.at[i], c, highest))
            return true;
    return false;
}

void model_not_found(struct model *m, struct model_run *r, uint64_t sequence, const char *what)
{
    const struct model_commit *c = commit_of(r, sequence);
    m->now++;
    if (c && !may_be_gone(r, c, highest_known(r)))
        broken(m, r,
               "sequence %" PRIu64 " (step %" PRIu64
               ") was there, no prune may have removed it, and %s is not found",
               sequence, c->step, what);
}

void model_empty(struct model *m, struct model_run *r, uint64_t asked_at)
{
    m->now++;
    for (size_t i = 0; i < r->commits.n; i++) {
        const struct model_commit *c = &r->commits.at[i];
        if (c->known_at < asked_at && !c->bad_asked && !may_be_gone(r, c, highest_known(r)))
            broken(m, r, "no good commit was found, though no prune may have removed sequence %" PRIu64,
                   c->sequence);
    }
}

void model_clock_stepped(struct model *m, int64_t by_ns)
{
    *model_add(&m->clocks) = (struct model_clock){.at = ++m->now, .by_ns = by_ns};
}

/* The latest time that the wall clock can have said since then. */
static uint64_t latest_since(const struct model *m, uint64_t at, uint64_t now_ns)
{
    uint64_t latest = now_ns, before = now_ns;
    for (size_t i = m->clocks.n; i-- > 0 && m->clocks.at[i].at > at;) {
        before -= (uint64_t)m->clocks.at[i].by_ns;
        latest = before > latest ? before : latest;
    }
    return latest;
}

size_t model_prune_asked(struct model *m, struct model_run *r, uint32_t keep_last, uint64_t keep_every,
                         uint64_t keep_within_ns)
{
    *model_add(&r->prunes) = (struct model_prune){.asked_at = ++m->now,
                                                  .keep_last = keep_last,
                                                  .keep_every = keep_every,
                                                  .keep_within_ns = keep_within_ns};
    return r->prunes.n - 1;
}

void model_prune_told(struct model *m, struct model_run *r, size_t prune, const struct msg_prune_item *items,
                      size_t n, uint64_t now_ns)
{
    struct model_prune *p = &r->prunes.at[prune];
    m->now++;
    for (size_t i = 0; i < n; i++) {
        struct model_commit *c = items[i].sequence ? commit_of(r, items[i].sequence) : NULL;
        uint32_t newer = 0;
        if (!items[i].removed || !items[i].sequence)
            continue;
        for (size_t k = i + 1; k < n; k++)
            newer += items[k].sequence > items[i].sequence && items[k].reason < PRUNE_REMOVE_OLD;
        if (c && c->pinned_at && c->pinned_at < p->asked_at && !c->pin_in_doubt_at)
            broken(m, r, "prune removed the pinned sequence %" PRIu64, c->sequence);
        if (!(c && c->bad_asked) && newer == 0)
            broken(m, r, "prune removed sequence %" PRIu64 ", the last good one", items[i].sequence);
        if (items[i].reason == PRUNE_REMOVE_OLD && newer < p->keep_last && !(c && c->bad_asked))
            broken(m, r, "prune removed sequence %" PRIu64 " of the last %u", items[i].sequence,
                   p->keep_last);
        if (items[i].reason == PRUNE_REMOVE_OLD && !(c && c->bad_asked) && p->keep_within_ns &&
            latest_since(m, p->asked_at, now_ns) <= items[i].server_time_ns + p->keep_within_ns)
            broken(m, r, "prune removed sequence %" PRIu64 ", which is younger than %" PRIu64 " s",
                   items[i].sequence, p->keep_within_ns / 1000000000u);
        if (c)
            c->removed_at = m->now;
    }
    p->told_at = m->now;
}

void model_pin(struct model *m, struct model_run *r, uint64_t sequence, bool told, bool pin)
{
    struct model_commit *c = commit_of(r, sequence);
    m->now++;
    if (!c)
        return;
    if (!pin)
        c->pin_in_doubt_at = m->now;
    else if (told && !c->pinned_at)
        c->pinned_at = m->now;
}

void model_bad_asked(struct model *m, struct model_run *r, uint64_t sequence)
{
    struct model_commit *c = commit_of(r, sequence);
    m->now++;
    if (c)
        c->bad_asked = true;
}

/* ---- lists and records ---- */

static void listed_one(struct model *m, struct model_run *r, uint64_t asked_at,
                       const struct msg_commit_item *x)
{
    struct model_attempt *a = attempt_numbered(r, x->attempt_number);
    if (!a)
        broken(m, r, "sequence %" PRIu64 " is listed with attempt %" PRIu64 ", a number that nobody was told",
               x->sequence, x->attempt_number);
    struct model_commit *c = commit_known(m, r, x->sequence, &a->id, x->step);
    if (c->removed_at && c->removed_at < asked_at)
        broken(m, r, "sequence %" PRIu64 " is listed again after prune had removed it", x->sequence);
    if (x->state != COMMIT_GOOD && !c->bad_asked)
        broken(m, r, "sequence %" PRIu64 " is listed in state %u: %.*s", x->sequence, x->state,
               (int)x->reason.n, (const char *)x->reason.p);
    if (x->parts != x->world || x->world != a->world)
        broken(m, r, "sequence %" PRIu64 " is listed with %u parts of %u, saved by %u ranks", x->sequence,
               x->parts, x->world, a->world);
    if (c->server_time_ns && c->server_time_ns != x->server_time_ns)
        broken(m, r, "sequence %" PRIu64 " was made at another time when it was listed before", x->sequence);
    c->server_time_ns = x->server_time_ns;
    if (c->pinned_at && c->pinned_at < asked_at && !c->pin_in_doubt_at && !x->pinned)
        broken(m, r, "sequence %" PRIu64 " was pinned and is listed without", x->sequence);
}

static void remember_fence(struct model_run *r, uint64_t asked_at, uint64_t highest)
{
    struct model_fence f = {.sequence = highest};
    for (size_t i = 0; i < r->attempts.n; i++)
        if (r->attempts.at[i].told_at < asked_at && r->attempts.at[i].number > f.number)
            f.number = r->attempts.at[i].number;
    struct model_fence *last = r->fences.n ? &r->fences.at[r->fences.n - 1] : NULL;
    if (last && last->number == f.number && last->sequence <= f.sequence)
        return; /* says more already */
    *model_add(&r->fences) = f;
}

void model_listed(struct model *m, struct model_run *r, uint64_t asked_at,
                  const struct msg_commit_item *items, size_t n)
{
    uint64_t highest = 0;
    m->now++;
    for (size_t i = 0; i < n; i++) {
        if (items[i].sequence <= highest)
            broken(m, r, "the list is not in the order of sequences: %" PRIu64 " after %" PRIu64,
                   items[i].sequence, highest);
        highest = items[i].sequence;
        listed_one(m, r, asked_at, &items[i]);
    }
    for (size_t i = 0; i < r->commits.n; i++) {
        const struct model_commit *c = &r->commits.at[i];
        size_t k = 0;
        while (k < n && items[k].sequence != c->sequence)
            k++;
        if (k == n && c->known_at < asked_at && !may_be_gone(r, c, highest_known(r)))
            broken(m, r,
                   "sequence %" PRIu64 " (step %" PRIu64
                   ") is not listed any more, and no prune may have removed it",
                   c->sequence, c->step);
    }
    remember_fence(r, asked_at, highest);
}

/* None that is newer was there before, unless it may be bad or gone. */
static void check_latest(struct model *m, struct model_run *r, uint64_t asked_at, uint64_t sequence)
{
    for (size_t i = 0; i < r->commits.n; i++) {
        const struct model_commit *c = &r->commits.at[i];
        if (c->sequence > sequence && c->known_at < asked_at && !c->bad_asked &&
            !may_be_gone(r, c, highest_known(r)))
            broken(m, r, "sequence %" PRIu64 " was opened as the latest, %" PRIu64 " was there before",
                   sequence, c->sequence);
    }
}

const struct model_attempt *model_opened(struct model *m, struct model_run *r, uint64_t asked_at, bool latest,
                                         uint64_t sequence, uint64_t step, uint64_t attempt_number,
                                         uint32_t world)
{
    struct model_attempt *a = attempt_numbered(r, attempt_number);
    m->now++;
    if (!a || a->world != world)
        broken(m, r, "sequence %" PRIu64 " was opened as one of attempt %" PRIu64 " of %u ranks", sequence,
               attempt_number, world);
    struct model_commit *c = commit_known(m, r, sequence, &a->id, step);
    if (c->removed_at && c->removed_at < asked_at)
        broken(m, r, "sequence %" PRIu64 " was opened after prune had removed it", sequence);
    if (latest)
        check_latest(m, r, asked_at, sequence);
    return a;
}

void model_record_seen(struct model *m, struct model_run *r, uint64_t asked_at, const struct commit *c,
                       uint8_t state)
{
    m->now++;
    if (!id_equal(&c->run_id, &r->id) || c->run.n != strlen(r->name) ||
        memcmp(c->run.p, r->name, c->run.n) != 0)
        broken(m, r, "the record of sequence %" PRIu64 " is another run's", c->sequence);
    struct model_commit *k = commit_known(m, r, c->sequence, &c->attempt, c->step);
    struct model_attempt *a = attempt_of(r, &c->attempt);
    if (k->removed_at && k->removed_at < asked_at)
        broken(m, r, "sequence %" PRIu64 " is there again after prune had removed it", c->sequence);
    if (state != COMMIT_GOOD && !k->bad_asked)
        broken(m, r, "sequence %" PRIu64 " is in state %u", c->sequence, state);
    if (c->attempt_number != a->number || c->world != a->world)
        broken(m, r,
               "the record of sequence %" PRIu64 " says attempt %" PRIu64 " of %u ranks, it is %" PRIu64
               " of %u",
               c->sequence, c->attempt_number, c->world, a->number, a->world);
    for (uint32_t i = 0; i < c->world; i++) {
        struct model_segment *g = segment_of(r, &c->parts[i].segment);
        if (!g || g->rank != i || c->parts[i].rank != i || g->step != c->step ||
            !id_equal(&g->attempt, &c->attempt))
            broken(m, r, "part %u of sequence %" PRIu64 " is nothing that this rank joined that step with", i,
                   c->sequence);
        if (g->refused_at && g->refused_at < asked_at)
            broken(m, r, "part %u of sequence %" PRIu64 " had been refused", i, c->sequence);
        segment_in(m, r, g, c->sequence);
    }
}
