/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sim/clients.h"

#include <stdlib.h>
#include <string.h>

#include "client/larder.h"
#include "tests/sim/process.h"

#define STAGING_BYTES (8u << 20) /* two chunks: larger parts go in waves */
#define REQUEST_MS    6000u
#define PATIENCE_MS   60000u /* of a wait whose parts are all bounded by less */

/* ---- errors ---- */

enum err_class client_failed(struct actor *a, const char *what, const struct larder_error *e)
{
    enum err_class class = (enum err_class)e->kind;
    world_note(a->w, "%s: %s: %s: %s", a->name, what, err_class_name(class), e->text);
    if (!e->text[0])
        world_fail(a->w, "%s: %s failed and does not say why", a->name, what);
    if (class == ERR_CORRUPT &&
        a->w->plan.knob[KNOB_READ_ERROR]) /* the second look failed: the first stands */
        return class;
    if (class == ERR_INVALID && a->w->tally.ghosts) /* one has begun a part anew that the server had lost */
        return class;
    switch (class) {
    case ERR_INVALID:
    case ERR_DENIED:
    case ERR_VERSION:
    case ERR_PROTOCOL:
    case ERR_LIMIT:
    case ERR_UNSUPPORTED:
    case ERR_QUOTA:
    case ERR_KEY:
    case ERR_NO_MEMORY:
    case ERR_CORRUPT: /* a disk that misreads does so once, and the client looks twice */
        if (alive(a))
            world_fail(a->w, "%s: %s: \"%s\": %s", a->name, what, err_class_name(class), e->text);
        break;
    case ERR_READ_ONLY: a->w->restart_wanted |= alive(a); break;
    default: break;
    }
    return class;
}

/* ---- up and down ---- */

struct client *client_up(struct actor *a)
{
    struct larder_error e;
    struct client *c = calloc(1, sizeof *c);
    check(c);
    const char role[] = {(char)('0' + a->role), 0};
    struct larder_options o = LARDER_INIT(larder_options);
    o.credentials = role;
    o.staging_bytes = STAGING_BYTES;
    o.threads = 1 + roll(a, 3);
    o.connect_timeout_ms = 2000 + roll(a, 2000);
    o.request_timeout_ms = REQUEST_MS;
    o.reconnect_ms = c->reconnect_ms = 1000 + roll(a, 8000);
    process_enter(a);
    while (alive(a) && larder_open(&o, &c->larder, &e) < 0) {
        c->larder = NULL;
        (void)client_failed(a, "open", &e);
        actor_sleep(a, 10 + roll(a, 200));
    }
    a->w->tally.clients += c->larder != NULL;
    return c;
}

void client_down(struct actor *a, struct client *c)
{
    struct larder_error e;
    if (c->larder && larder_close(c->larder, (int)roll(a, 2 * REQUEST_MS), &e) < 0)
        (void)client_failed(a, "close", &e);
    process_leave(a);
    free(c);
}

struct begun { /* a call */
    uint64_t ms, server_starts;
};

static struct begun begin_call(const struct world *w)
{
    return (struct begun){sim_now_ms(w->sim), w->tally.starts};
}

/* A lost connection is no failure before it was tried again for so long; but a server that was started again
 * may have lost what was begun. */
static enum err_class look_at_call(struct actor *a, const struct client *c, struct begun at, const char *what,
                                   const struct larder_error *e)
{
    uint64_t took_ms = sim_now_ms(a->w->sim) - at.ms;
    if (e->kind == LARDER_NETWORK && alive(a) && took_ms + 1 < c->reconnect_ms &&
        at.server_starts == a->w->tally.starts)
        world_fail(a->w, "%s: %s failed after %llu ms, a connection is to be tried again for %u: %s", a->name,
                   what, (unsigned long long)took_ms, c->reconnect_ms, e->text);
    return client_failed(a, what, e);
}

/* ---- saving ---- */

static void describe(const struct sim_piece *x, uint32_t rank, uint32_t world, struct larder_tensor *t)
{
    *t = (struct larder_tensor){.name = x->name,
                                .dtype = (enum larder_dtype)x->dtype,
                                .dims = 2,
                                .shape = {x->shared ? 1 : world, x->elements},
                                .offsets = {x->shared ? 0 : rank, 0},
                                .lengths = {1, x->elements},
                                .data = x->plain};
}

static int add_tensors(struct actor *a, struct larder_save *s, const struct client_part *x,
                       const struct sim_piece *piece, uint32_t n, struct larder_error *e)
{
    uint32_t first = roll(a, n); /* any order will do */
    int rc = 0;
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        struct larder_tensor t;
        describe(&piece[(first + i) % n], x->rank, x->world, &t);
        t.priority = (int)roll(a, 3);
        rc = larder_save_tensor(s, &t, e);
    }
    return rc;
}

/* Bounded in itself; here it is found out if it is not. */
static int wait_for(struct actor *a, struct larder_save *s, struct larder_error *e)
{
    uint64_t begin_ms = sim_now_ms(a->w->sim);
    int rc;
    while ((rc = larder_save_wait(s, (int)(1 + roll(a, 3000)), e)) < 0) {
        struct larder_save_info i = LARDER_INIT(larder_save_info);
        check(larder_save_info(s, &i) == 0);
        if (i.state == LARDER_SAVE_FAILED || i.state == LARDER_SAVE_DURABLE)
            break; /* of a save that was decided the next wait would say the same */
        if (sim_now_ms(a->w->sim) - begin_ms > PATIENCE_MS)
            world_fail(a->w, "%s: a save is not decided within %u ms", a->name, PATIENCE_MS);
    }
    return larder_save_wait(s, 0, e);
}

static enum err_class finish_save(struct actor *a, const struct client *c, struct begun begun,
                                  struct larder_save *s, const struct client_part *x)
{
    struct larder_error e;
    struct larder_save_info i = LARDER_INIT(larder_save_info);
    int rc = wait_for(a, s, &e);
    check(larder_save_info(s, &i) == 0);
    if ((rc == 0) != (i.state == LARDER_SAVE_DURABLE))
        world_fail(a->w, "%s: the wait for a save says %d, its state is %d", a->name, rc, (int)i.state);
    if (rc < 0)
        return look_at_call(a, c, begun, "save", &e);
    model_durable_told(&a->w->model, x->run, &x->attempt, x->step, NULL, i.sequence);
    a->w->tally.client_saves++;
    return ERR_NONE;
}

enum err_class client_save(struct actor *a, const struct client *c, const struct client_part *x)
{
    static const char *const labels[] = {"k", "v", NULL};
    struct sim_piece piece[PART_TENSORS_MAX];
    struct larder_error e;
    struct larder_save *s = NULL;
    uint8_t loader[8];
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    o.run = x->run->name;
    o.step = x->step;
    o.rank = x->rank;
    o.world = x->world;
    memcpy(o.attempt, &x->attempt, sizeof o.attempt);
    le64_put(loader, x->step);
    o.loader_state = x->rank == 0 ? loader : NULL;
    o.loader_state_bytes = x->rank == 0 ? sizeof loader : 0;
    o.no_loader_state = x->rank != 0;
    o.labels = labels;
    o.verify_percent = roll(a, 2) ? 100 : 1;
    o.join_timeout_ms = (int)(500 + roll(a, 3000));
    o.deadline_ms = actor_errs(a, 30) ? 1 + roll(a, 3000) : 0;
    uint32_t n = sim_pieces(&x->attempt, x->step, x->rank, &a->w->shape, piece);
    if (x->may_lie && piece[n - 1].shared && actor_errs(a, 10)) {
        piece[n - 1].plain[roll(a, (uint32_t)piece[n - 1].bytes)] ^= 1;
        a->w->tally.lies++;
    }
    struct begun begun = begin_call(a->w);
    int rc = larder_save_begin(c->larder, &o, &s, &e);
    if (rc == 0)
        rc = add_tensors(a, s, x, piece, n, &e);
    if (rc == 0)
        rc = larder_save_submit(s, &e);
    for (uint32_t i = 0; i < n; i++) /* staged: it may be changed */
        memset(piece[i].plain, 0xa5, piece[i].bytes);
    if (rc == 0 && actor_errs(a, 40) && larder_save_cancel(s, "the simulator wants it so", &e) < 0)
        (void)client_failed(a, "cancel", &e);
    enum err_class class = rc == 0 ? finish_save(a, c, begun, s, x) : client_failed(a, "submit", &e);
    larder_save_free(s);
    sim_pieces_free(piece, n);
    return alive(a) ? class : ERR_NETWORK;
}

/* ---- restoring ---- */

/* What is asked for: each tensor in one box, whole or the row of one rank. */
struct wanted {
    struct larder_tensor t[PART_TENSORS_MAX];
    uint32_t n, from, to; /* rows of those that are not shared */
};

static int ask_for(struct actor *a, struct larder_restore *r, const struct model_attempt *of, uint64_t step,
                   struct wanted *w, struct larder_error *e)
{
    struct sim_piece piece[PART_TENSORS_MAX];
    int rc = 0;
    w->from = roll(a, of->world);
    w->to = roll(a, 2) ? w->from + 1 : of->world;
    w->n = sim_pieces(&of->id, step, 0, &a->w->shape, piece);
    if (larder_restore_tensors(r) != w->n)
        world_fail(a->w, "%s: %zu tensors are offered, %u were saved", a->name, larder_restore_tensors(r),
                   w->n);
    for (uint32_t i = 0; i < w->n && rc == 0; i++) {
        uint64_t rows = piece[i].shared ? 1 : w->to - w->from;
        describe(&piece[i], w->from, of->world, &w->t[i]);
        w->t[i].lengths[0] = rows;
        check((w->t[i].data = malloc(rows * piece[i].bytes)));
        w->t[i].name = strdup(piece[i].name);
        check(w->t[i].name);
        rc = larder_restore_add(r, &w->t[i], e);
    }
    sim_pieces_free(piece, w->n);
    return rc;
}

static void compare(struct actor *a, const struct model_attempt *of, uint64_t step, const struct wanted *w)
{
    for (uint32_t row = w->from; row < w->to; row++) {
        struct sim_piece piece[PART_TENSORS_MAX];
        uint32_t n = sim_pieces(&of->id, step, row, &a->w->shape, piece);
        for (uint32_t i = 0; i < n; i++) {
            const uint8_t *got = w->t[i].data;
            if (!piece[i].shared)
                got += (row - w->from) * piece[i].bytes;
            if (memcmp(got, piece[i].plain, piece[i].bytes) != 0)
                world_fail(a->w,
                           "%s: step %llu: tensor %s of rank %u is restored with other bytes than were "
                           "saved",
                           a->name, (unsigned long long)step, piece[i].name, row);
        }
        sim_pieces_free(piece, n);
    }
}

static enum err_class restore_opened(struct actor *a, const struct client *c, struct larder_restore *r,
                                     struct model_run *run, uint64_t asked_at, bool latest)
{
    struct begun begun = begin_call(a->w);
    struct larder_error e;
    struct larder_restore_info i = LARDER_INIT(larder_restore_info);
    struct wanted w = {0};
    check(larder_restore_info(r, &i) == 0);
    if (i.fell_back)
        world_fail(a->w, "%s: an older commit was opened: %s", a->name, i.fallback_reason);
    const struct model_attempt *of =
        model_opened(&a->w->model, run, asked_at, latest, i.sequence, i.step, i.attempt_number, i.world);
    struct model_attempt was = *of; /* the array grows */
    uint8_t loader[8];
    le64_put(loader, i.step);
    if (i.loader_state_bytes != sizeof loader || memcmp(i.loader_state, loader, sizeof loader) != 0)
        world_fail(a->w, "%s: step %llu has another loader position than was saved", a->name,
                   (unsigned long long)i.step);
    int rc = ask_for(a, r, &was, i.step, &w, &e);
    if (rc == 0)
        rc = larder_restore_run(r, &e);
    if (rc == 0) {
        compare(a, &was, i.step, &w);
        a->w->tally.client_restores++;
    }
    for (uint32_t k = 0; k < w.n; k++) {
        free(w.t[k].data);
        free((char *)w.t[k].name);
    }
    return rc == 0 ? ERR_NONE : look_at_call(a, c, begun, "restore", &e);
}

/* empty: it is said that nothing is there at all. Else what was opened as the latest was pruned meanwhile. */
static void not_there(struct actor *a, struct model_run *r, uint64_t asked_at, uint64_t sequence, bool empty)
{
    if (empty)
        model_empty(&a->w->model, r, asked_at);
    else if (sequence && read_list(a, r, NULL, NULL) == ERR_NONE)
        model_not_found(&a->w->model, r, sequence, "it");
}

static enum err_class restore_once(struct actor *a, const struct client *c, struct model_run *r,
                                   uint64_t sequence, bool *empty)
{
    struct larder_error e = {0};
    struct larder_restore *x = NULL;
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    o.run = r->name;
    o.at = sequence ? LARDER_AT_SEQUENCE : LARDER_AT_LATEST;
    o.value = sequence;
    o.connections = 1 + roll(a, 2);
    o.memory_bytes = 16u << 20;
    o.fallback = roll(a, 2) == 0;
    uint64_t asked_at = model_asks(&a->w->model);
    struct begun begun = begin_call(a->w);
    enum err_class class = larder_restore_open(c->larder, &o, &x, &e) < 0
                               ? look_at_call(a, c, begun, "restore open", &e)
                               : restore_opened(a, c, x, r, asked_at, !sequence);
    *empty = class == ERR_NOT_FOUND && !o.fallback && strstr(e.text, "no committed checkpoint yet");
    larder_restore_close(x);
    return class;
}

enum err_class client_restore(struct actor *a, const struct client *c, struct model_run *r, uint64_t sequence)
{
    uint64_t asked_at = model_asks(&a->w->model);
    enum err_class class = ERR_NETWORK;
    bool empty = false;
    while (alive(a) && class != ERR_NONE && class != ERR_NOT_FOUND) {
        class = restore_once(a, c, r, sequence, &empty);
        if (class != ERR_NONE && alive(a))
            actor_sleep(a, 5 + roll(a, 100));
    }
    if (class == ERR_NOT_FOUND && alive(a))
        not_there(a, r, asked_at, sequence, empty);
    return alive(a) ? class : ERR_NETWORK;
}
