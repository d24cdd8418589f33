/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A training job. Its launcher finds the newest checkpoint, restores it, and starts an attempt of so many
 * ranks, each an actor of its own, that save step after step. Ranks die; then the launcher ends the attempt
 * and starts another. Sometimes it starts another although the old one still runs.
 */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/clients.h"

#define STEP     10u
#define STUCK_MS 15000u

struct rank {
    struct attempt *attempt;
    uint32_t number;
    bool real; /* runs the real client */
    struct actor *actor;
};

struct attempt {
    struct list link; /* job.attempts */
    struct job *job;
    struct id id;
    uint64_t number;
    uint32_t joining;                      /* ranks */
    uint32_t world, over, finished, saved; /* saved: steps of all ranks */
    uint64_t first_step, last_step;
    bool left_alone; /* the launcher has gone on without it */
    struct rank ranks[MODEL_RANKS_MAX];
};

enum outcome { SAVED, AGAIN, FENCED };

/* ---- one part ---- */

static struct slice none(void)
{
    return (struct slice){0};
}

/* Chunks that the server does not have yet, several in flight. */
static enum err_class send_chunks(struct actor *a, const struct sim_part *p, struct slice have)
{
    struct call calls[PART_TENSORS_MAX] = {0};
    bool sent[PART_TENSORS_MAX] = {0};
    enum err_class class = ERR_NONE;
    for (size_t i = 0; i + 4 <= have.n; i += 4)
        sent[le32_get(have.p + i) % PART_TENSORS_MAX] = true;
    uint32_t first = roll(a, p->chunks); /* any order will do */
    for (uint32_t k = 0; k < p->chunks; k++) {
        uint32_t i = (first + k) % p->chunks;
        struct buf m = {0};
        struct msg_segment_chunk x = {.segment = p->h.segment_id, .number = i};
        if (sent[i])
            continue;
        chunk_entry_encode(&p->entry[i], x.entry.bytes);
        msg_segment_chunk_encode(&x, &m);
        call_begin(a, &calls[i], OP_SEGMENT_CHUNK, &m, SLICE(p->stored[i].p, p->stored[i].n));
        buf_free(&m);
    }
    for (uint32_t i = 0; i < p->chunks; i++) {
        if (sent[i])
            continue;
        enum err_class one = call_end(a, &calls[i]);
        if (class == ERR_NONE || one == ERR_NETWORK)
            class = one;
        call_drop(&calls[i]);
    }
    return class;
}

/* On the present connection. */
static enum err_class call_once(struct actor *a, uint16_t opcode, struct buf *m, struct slice tail)
{
    struct call c = {0};
    call_begin(a, &c, opcode, m, tail);
    enum err_class class = call_end(a, &c);
    if (class != ERR_NONE)
        world_note(a->w, "%s: %s: %s", a->name, opcode_name(opcode), c.err.text);
    call_drop(&c);
    buf_free(m);
    return class;
}

static enum err_class send_index(struct actor *a, const struct sim_part *p)
{
    enum err_class class = ERR_NONE;
    size_t piece = BLOCK_BYTES * (1u + roll(a, 1u + (uint32_t)p->index.n / BLOCK_BYTES));
    for (size_t at = 0; at < p->index.n && class == ERR_NONE; at += piece) {
        struct buf m = {0};
        size_t n = p->index.n - at < piece ? p->index.n - at : piece;
        if (at > 0)
            n = piece = p->index.n - at; /* two are enough */
        msg_segment_index_encode(&(struct msg_segment_index){.segment = p->h.segment_id,
                                                             .index_offset = p->index_offset,
                                                             .offset = at},
                                 &m);
        class = call_once(a, OP_SEGMENT_INDEX, &m, SLICE(p->index.p + at, n));
    }
    return class;
}

static enum err_class seal(struct actor *a, const struct sim_part *p)
{
    struct buf m = {0};
    msg_segment_seal_encode(
        &(struct msg_segment_seal){.segment = p->h.segment_id, .trailer = SLICE(p->trailer, BLOCK_BYTES)},
        &m);
    return call_once(a, OP_SEGMENT_SEAL, &m, none());
}

/* Goes on after a lost connection where the server says that it stands. */
static enum err_class write_part(struct actor *a, const struct sim_part *p)
{
    enum err_class class = ERR_NETWORK;
    while (alive(a) && class == ERR_NETWORK) {
        struct call c = {0};
        class = ASK(a, &c, OP_SEGMENT_CREATE, segment_create, .run_id = p->h.run_id, .chunks = p->chunks,
                    .reserve_bytes = p->file_bytes, .header = SLICE(p->header, BLOCK_BYTES));
        if (class == ERR_NONE) {
            struct msg_segment_create_reply reply = ANSWER(&c, segment_create_reply);
            if (reply.sealed) {
                call_drop(&c);
                return ERR_NONE;
            }
            class = send_chunks(a, p, reply.chunks_received);
        }
        call_drop(&c);
        if (class == ERR_NONE)
            class = send_index(a, p);
        if (class == ERR_NONE)
            class = seal(a, p);
    }
    return class;
}

/* ---- joining ---- */

static void verdict(struct actor *a, const struct sim_part *p, struct msg_join_reply *join)
{
    struct attempt *at = ((struct rank *)a->arg)->attempt;
    struct model_run *r = at->job->run;
    struct commit_part parts[MODEL_RANKS_MAX];
    struct commit set = {.run_id = p->h.run_id,
                         .step = p->h.step,
                         .attempt = p->h.attempt,
                         .world = p->h.world,
                         .parts = parts};
    struct rcur in = rcur_of(join->parts.p, join->parts.n);
    for (uint32_t i = 0; i < p->h.world; i++) {
        struct msg_join_part x;
        if (msg_join_part_decode(&in, &x, NULL) < 0 || x.rank != i)
            world_fail(a->w, "%s: the set of parts is not whole", a->name);
        parts[i] = (struct commit_part){.rank = i, .segment = x.segment, .segment_bytes = x.segment_bytes};
        memcpy(parts[i].index_digest, x.index_digest.bytes, SHA256_BYTES);
    }
    if (actor_errs(a, 20)) /* asked, and never heard of again */
        return;
    uint32_t bad = actor_errs(a, 30) ? ERR_MISMATCH : ERR_NONE;
    sim_count_traffic(a->w->sim, false); /* of commits, not of what is read for them */
    enum err_class whole = read_set(a, r, &set);
    sim_count_traffic(a->w->sim, at->joining == at->world);
    if (whole != ERR_NONE) /* it fell apart meanwhile */
        return;
    if (!bad)
        model_verdict_asked(&a->w->model, r, &p->h.attempt, p->h.step);
    struct call c = {0};
    enum err_class class =
        ASK(a, &c, OP_COMMIT, commit, .run_id = p->h.run_id, .step = p->h.step, .attempt = p->h.attempt,
            .world = p->h.world, .verdict = bad, .text = slice_str(bad ? "the simulator wants it so" : ""));
    if (class == ERR_NONE) {
        uint64_t sequence = ANSWER(&c, commit_reply).sequence;
        if (!bad && sequence == 0)
            world_fail(a->w, "%s: a good verdict was answered with no sequence", a->name);
        if (sequence) /* also to a bad verdict that came when another had been good */
            model_durable_told(&a->w->model, r, &p->h.attempt, p->h.step, NULL, sequence);
    }
    call_drop(&c);
}

static enum err_class ask_join(struct actor *a, const struct sim_part *p, struct call *c)
{
    uint8_t loader[8], labels[] = {1, 0, 'k', 1, 0, 'v'};
    le64_put(loader, p->h.step);
    struct msg_join m = {.run_id = p->h.run_id,
                         .step = p->h.step,
                         .attempt = p->h.attempt,
                         .rank = p->h.rank,
                         .world = p->h.world,
                         .segment = p->h.segment_id,
                         .segment_bytes = p->file_bytes,
                         .plain_bytes = p->plain_bytes,
                         .loader = SLICE(loader, p->h.rank == 0 ? sizeof loader : 0),
                         .labels = SLICE(labels, sizeof labels),
                         .wait_ms = 500 + roll(a, 3000)};
    memcpy(m.index_digest.bytes, p->index_digest, SHA256_BYTES);
    struct buf b = {0};
    msg_join_encode(&m, &b);
    return actor_ask(a, c, OP_JOIN, &b);
}

static void give_up_save(struct actor *a, const struct sim_part *p)
{
    struct call c = {0};
    (void)ASK(a, &c, OP_SAVE_ABORT, save_abort, .run_id = p->h.run_id, .step = p->h.step,
              .attempt = p->h.attempt, .rank = p->h.rank, .text = slice_str("the simulator wants it so"));
    call_drop(&c);
}

/* Until the save is decided. */
static enum err_class join_until_decided(struct actor *a, struct model_run *r, const struct sim_part *p)
{
    enum err_class class = ERR_NONE;
    if (actor_errs(a, 60))
        give_up_save(a, p);
    while (alive(a) && class == ERR_NONE) {
        struct call c = {0};
        model_join_asked(&a->w->model, r, &p->h);
        class = ask_join(a, p, &c);
        bool durable = false;
        if (class == ERR_NONE) {
            struct msg_join_reply reply = ANSWER(&c, join_reply);
            durable = reply.state == JOIN_DURABLE;
            if (durable)
                model_durable_told(&a->w->model, r, &p->h.attempt, p->h.step, &p->h.segment_id,
                                   reply.sequence);
            else
                verdict(a, p, &reply);
        } else if (class == ERR_FENCED || class == ERR_NOT_FOUND) {
            model_segment_refused(&a->w->model, r, &p->h.segment_id);
        }
        call_drop(&c);
        if (durable)
            return ERR_NONE;
    }
    return alive(a) ? class : ERR_NETWORK;
}

/* Traffic is that of commits while all ranks of an attempt are in here. */
static enum err_class join(struct actor *a, struct model_run *r, const struct sim_part *p)
{
    struct attempt *at = ((struct rank *)a->arg)->attempt;
    sim_count_traffic(a->w->sim, ++at->joining == at->world);
    enum err_class class = join_until_decided(a, r, p);
    at->joining--;
    sim_count_traffic(a->w->sim, false);
    return class;
}

/* ---- a rank ---- */

static enum outcome outcome_of(enum err_class class)
{
    return class == ERR_NONE ? SAVED : class == ERR_FENCED ? FENCED : AGAIN;
}

static enum outcome save_once(struct actor *a, struct rank *k, uint64_t step)
{
    struct attempt *at = k->attempt;
    struct model_run *r = at->job->run;
    struct segment_header h = {.segment_id = actor_id(a),
                               .run_id = r->id,
                               .attempt = at->id,
                               .step = step,
                               .rank = k->number,
                               .world = at->world,
                               .tenant = "acme"};
    struct sim_part p;
    actor_random(a, h.salt, sizeof h.salt);
    sim_part_make(&p, &h, &r->dek, &a->w->shape);
    enum err_class class = write_part(a, &p);
    if (class == ERR_NONE)
        class = join(a, r, &p);
    sim_part_free(&p);
    world_note(a->w, "%s: step %llu: %s", a->name, (unsigned long long)step, err_class_name(class));
    if (class == ERR_NO_SPACE || class == ERR_IO)
        actor_sleep(a, 50 + roll(a, 300));
    return outcome_of(class);
}

static bool register_attempt(struct actor *a, struct attempt *at)
{
    struct call c = {0};
    model_attempt_asked(&a->w->model, at->job->run, &at->id);
    enum err_class class =
        ASK(a, &c, OP_ATTEMPT, attempt, .run_id = at->job->run->id, .attempt = at->id, .world = at->world);
    if (class == ERR_NONE) {
        at->number = ANSWER(&c, attempt_reply).number;
        model_attempt_told(&a->w->model, at->job->run, &at->id, at->number, at->world);
    } else if (class != ERR_FENCED && alive(a)) {
        world_fail(a->w, "%s: registering the attempt: %s", a->name, c.err.text);
    }
    call_drop(&c);
    return class == ERR_NONE;
}

static bool begin_plain(struct actor *a, struct rank *k)
{
    struct model_run *r = k->attempt->job->run;
    if (read_run(a, r, true) != ERR_NONE || !register_attempt(a, k->attempt))
        return false;
    if (roll(a, 2)) /* what is there now is all that older attempts will ever have committed */
        (void)read_list(a, r, NULL, NULL);
    return true;
}

/* The client registers the attempt by itself, with its first save. */
static bool begin_real(struct actor *a, struct rank *k, const struct client *c)
{
    if (roll(a, 2))
        (void)client_restore(a, c, k->attempt->job->run, 0);
    return alive(a);
}

/* Ranks that speak the protocol themselves know what the others must have saved. */
static bool all_real(const struct attempt *at)
{
    bool all = at->world > 1;
    for (uint32_t i = 0; i < at->world; i++)
        all &= at->ranks[i].real;
    return all;
}

static void save_steps(struct actor *a, struct rank *k, const struct client *c)
{
    struct attempt *at = k->attempt;
    uint64_t step = at->first_step;
    while (alive(a) && step <= at->last_step) {
        struct client_part x = {at->job->run, at->id, step, k->number, at->world, all_real(at)};
        enum outcome o = c ? outcome_of(client_save(a, c, &x)) : save_once(a, k, step);
        if (o == FENCED)
            break;
        at->saved += o == SAVED;
        if (o == SAVED)
            step += STEP;
        else if (alive(a))
            actor_sleep(a, 5 + roll(a, 60));
    }
    if (alive(a) && step > at->last_step)
        at->finished++;
}

static void rank_main(struct actor *a)
{
    struct rank *k = a->arg;
    struct attempt *at = k->attempt;
    struct client *c = k->real ? client_up(a) : NULL;
    if (c ? c->larder && begin_real(a, k, c) : begin_plain(a, k))
        save_steps(a, k, c);
    if (c)
        client_down(a, c);
    at->over++;
    k->actor = NULL;
}

/* ---- the launcher ---- */

/* Where to go on: behind the newest good checkpoint, which is restored; sometimes one is saved again. */
static bool resume_at(struct actor *a, struct job *j, uint64_t *step)
{
    struct commit c;
    enum err_class class;
    *step = STEP;
    do {
        class = read_commit(a, j->run, SELECT_LATEST_GOOD, 0, &c);
        if (class == ERR_NONE) {
            *step = c.step + (roll(a, 4) ? STEP : 0);
            class = read_parts(a, j->run, &c) == ERR_NONE ? ERR_NONE : ERR_BUSY;
            commit_free(&c);
        }
    } while (alive(a) && class != ERR_NONE && class != ERR_NOT_FOUND);
    return alive(a);
}

static struct attempt *attempt_begin(struct actor *a, struct job *j)
{
    struct attempt *at;
    uint64_t step;
    if (read_run(a, j->run, true) != ERR_NONE || !resume_at(a, j, &step))
        return NULL;
    check((at = calloc(1, sizeof *at)));
    at->job = j;
    at->id = actor_id(a);
    at->world = 1 + roll(a, j->w->plan.knob[KNOB_RANKS]);
    if (at->world > MODEL_RANKS_MAX)
        at->world = MODEL_RANKS_MAX;
    at->first_step = step;
    at->last_step = (uint64_t)STEP * j->w->plan.knob[KNOB_STEPS];
    list_add_tail(&j->attempts, &at->link);
    for (uint32_t i = 0; i < at->world; i++) {
        at->ranks[i] = (struct rank){.attempt = at, .number = i};
        at->ranks[i].real = j->run->kind == RUN_CHECKPOINTS && roll(a, 8) < j->w->plan.knob[KNOB_CLIENTS];
        at->ranks[i].actor = actor_begin(j->w, ROLE_WRITER, rank_main, &at->ranks[i], "%s/%zx/%u",
                                         j->run->name, (size_t)at->id.bytes[0] << 8 | at->id.bytes[1], i);
    }
    return at;
}

static void rank_kill(struct rank *k)
{
    if (k->actor)
        actor_kill(k->actor);
}

static void attempt_end(struct attempt *at)
{
    for (uint32_t i = 0; i < at->world; i++)
        rank_kill(&at->ranks[i]);
}

/* Watches over an attempt until it has ended, gets nowhere (one rank was told that a step is durable, another
 * that nobody knows), or the launcher goes on without it. */
static void watch(struct actor *a, struct job *j, struct attempt *at)
{
    uint32_t trouble_in = 1 + roll(a, 60), saved = 0, idle = 0;
    while (alive(a) && at->over < at->world && idle < STUCK_MS / 10) {
        actor_sleep(a, 10);
        idle = saved == at->saved ? idle + 1 : 0;
        saved = at->saved;
        if (!j->w->faulty || --trouble_in)
            continue;
        trouble_in = 1 + roll(a, 60);
        if (j->kills_left && roll(a, 2)) {
            j->kills_left--;
            j->w->tally.kills++;
            rank_kill(&at->ranks[roll(a, at->world)]);
            actor_sleep(a, roll(a, 200));
            break;
        }
        if (j->zombies_left) {
            j->zombies_left--;
            j->w->tally.zombies++;
            at->left_alone = true;
            return;
        }
    }
    attempt_end(at);
}

static bool all_over(const struct job *j)
{
    list_for_each (it, &j->attempts) {
        const struct attempt *at = container_of(it, struct attempt, link);
        if (at->over < at->world)
            return false;
    }
    return true;
}

static bool finished(const struct job *j)
{
    list_for_each (it, &j->attempts) {
        const struct attempt *at = container_of(it, struct attempt, link);
        if (at->finished == at->world)
            return true;
    }
    return false;
}

void job_main(struct actor *a)
{
    struct job *j = a->arg;
    while (alive(a) && !finished(j)) {
        struct attempt *at = attempt_begin(a, j);
        if (!at)
            break;
        watch(a, j, at);
    }
    list_for_each (it, &j->attempts)
        attempt_end(container_of(it, struct attempt, link));
    while (alive(a) && !all_over(j))
        actor_sleep(a, 10);
    j->done = true;
    j->w->jobs_done++;
}

void job_free(struct job *j)
{
    struct list *it;
    while ((it = list_pop(&j->attempts)))
        free(container_of(it, struct attempt, link));
}
