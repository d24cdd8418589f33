/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/sim/world.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/sim/people.h"
#include "tests/support/scarce.h"

/* What a world may take. Beyond it, it hangs. */
#define FAULTY_EVENTS_MAX 60000u
#define CALM_EVENTS_MAX   3000000u
#define AUDIT_EVENTS_MAX  1000000u

#define STOP_AFTER_CHANGES \
    120u /* where one thing goes wrong: with something in the store, before the jobs end */

char *world_fail_text;
size_t world_fail_size;

void world_fail(struct world *w, const char *fmt, ...)
{
    char text[1024] = "";
    int n = 0;
    va_list ap;
    const uint32_t *k = w->plan.knob;
    if (k[KNOB_CRASH_AT])
        n = snprintf(text, sizeof text, "--set crash-at=%u --set crash-way=%u: ", k[KNOB_CRASH_AT],
                     k[KNOB_CRASH_WAY]);
    else if (k[KNOB_FAIL_AT])
        n = snprintf(text, sizeof text, "--set fail-at=%u --set fail-errno=%u: ", k[KNOB_FAIL_AT],
                     k[KNOB_FAIL_ERRNO]);
    else if (k[KNOB_CUT_AT])
        n = snprintf(text, sizeof text, "--set cut-at=%u: ", k[KNOB_CUT_AT]);
    else if (k[KNOB_STARVE_AT])
        n = snprintf(text, sizeof text, "--set starve-at=%u (%s): ", k[KNOB_STARVE_AT], scarce_failed());
    va_start(ap, fmt);
    vsnprintf(text + n, sizeof text - (size_t)n, fmt, ap);
    va_end(ap);
    if (w->watching.print)
        printf("FAILED: %s\n", text);
    fflush(stdout);
    if (world_fail_text)
        snprintf(world_fail_text, world_fail_size, "%s", text);
    else
        fprintf(stderr, "seed %llu: %s\n", (unsigned long long)w->plan.seed, text);
    _exit(1);
}

static void model_failed(void *arg, const char *text)
{
    world_fail(arg, "%s", text);
}

static void trace_line(void *arg, const char *line)
{
    struct world *w = arg;
    w->trace_hash = w->trace_hash * 31 + hash64(line, strlen(line));
    if (w->watching.print)
        printf("%s\n", line);
}

void world_note(struct world *w, const char *fmt, ...)
{
    char line[700];
    if (!w->watching.trace)
        return;
    int n = snprintf(line, sizeof line, "%llu ms -- ", (unsigned long long)sim_now_ms(w->sim));
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line + n, sizeof line - (size_t)n, fmt, ap);
    va_end(ap);
    trace_line(w, line);
}

/* ---- running ---- */

static void bury_actors(struct world *w, bool all)
{
    list_for_each_safe (it, &w->actors) {
        struct actor *a = container_of(it, struct actor, link);
        if (a->over && !a->wake_due)
            actor_free(a);
        else if (all)
            world_fail(w, "%s does not end", a->name);
    }
}

struct until {
    struct world *w;
    bool (*holds)(struct world *w);
};

static bool is_eventful(void *arg)
{
    struct until *u = arg;
    struct world *w = u->w;
    return u->holds(w) || w->restart_wanted || server_down(w);
}

/* Runs until it holds; keeps the server alive meanwhile. Events run; less than max: it holds. */
static uint64_t run_until(struct world *w, bool (*holds)(struct world *w), uint64_t max)
{
    struct until u = {.w = w, .holds = holds};
    uint64_t events = 0;
    while (events < max && !holds(w)) {
        server_bury(w, false);
        bury_actors(w, false);
        if (server_down(w))
            server_begin(w);
        uint64_t n = sim_run(w->sim, is_eventful, &u, max - events);
        events += n;
        w->tally.events += n;
        if (n == 0 && !is_eventful(&u))
            world_fail(w, "nothing is left to happen, and the world is not done");
        if (w->restart_wanted && server_up(w)) {
            if (w->faulty && draw_below(&w->rng, 2))
                server_lose_power(w);
            else
                server_stop_well(w);
        }
        w->restart_wanted = false;
    }
    return events;
}

static bool jobs_done(struct world *w)
{
    return w->jobs_done == w->plan.knob[KNOB_JOBS];
}

static bool is_up(struct world *w)
{
    return server_up(w);
}

static bool nobody_left(struct world *w)
{
    list_for_each (it, &w->actors)
        if (!container_of(it, struct actor, link)->over || container_of(it, struct actor, link)->wake_due)
            return false;
    return true;
}

static bool at_rest(struct world *w)
{
    return nobody_left(w) && w->lines == 0;
}

/* ---- the faulty time ---- */

/* A world in which one thing of the server's machine goes wrong, and where just that is said by the plan. */
static bool one_thing(const struct world *w)
{
    return w->plan.knob[KNOB_CRASH_AT] || w->plan.knob[KNOB_FAIL_AT] || w->plan.knob[KNOB_CUT_AT] ||
           w->plan.knob[KNOB_STARVE_AT];
}

void world_faults(struct world *w)
{
    const uint32_t *k = w->plan.knob;
    struct sim_faults f = {.lose_unsynced = k[KNOB_LOSE] != 0,
                           .lose_way = w->crash_way,
                           .fail_at = w->faulty ? k[KNOB_FAIL_AT] : 0,
                           .fail_errno = k[KNOB_FAIL_ERRNO],
                           .cut_at = w->faulty ? k[KNOB_CUT_AT] : 0,
                           .stall_ms_max = w->faulty ? k[KNOB_STALL] : 0};
    if (w->faulty && !one_thing(w))
        f = (struct sim_faults){.read_error = server_up(w) || k[KNOB_BAD_START] ? k[KNOB_READ_ERROR] : 0,
                                .read_corrupt = k[KNOB_CORRUPT],
                                .read_misdirected = k[KNOB_MISDIRECT],
                                .misread_rest =
                                    UINT32_MAX, /* once a file: what was misread may stay in memory */
                                .write_error = k[KNOB_WRITE_ERROR],
                                .write_no_space = k[KNOB_NO_SPACE],
                                .sync_error = k[KNOB_SYNC_ERROR],
                                .short_transfer = k[KNOB_SHORT],
                                .connection_cut = k[KNOB_CUT],
                                .stall_ms_max = k[KNOB_STALL],
                                .lose_unsynced = k[KNOB_LOSE] != 0};
    sim_set_faults(w->sim, &f);
}

/* Half of the crashes come soon after the one before: while the store recovers. */
static uint32_t next_blow(struct world *w)
{
    return draw_below(&w->rng, 2) ? draw_below(&w->rng, 600) : draw_below(&w->rng, 8000);
}

static void faulty_time(struct world *w)
{
    static struct audit audit;
    uint32_t crashes = w->plan.knob[KNOB_CRASHES], stops = w->plan.knob[KNOB_STOPS];
    uint64_t events = 0;
    w->faulty = true;
    world_faults(w);
    while (events < FAULTY_EVENTS_MAX && !jobs_done(w)) {
        bool blow = crashes + stops > 0;
        uint64_t most = blow ? next_blow(w) : FAULTY_EVENTS_MAX - events;
        events += run_until(w, jobs_done, most ? most : 1);
        if (!blow || jobs_done(w))
            continue;
        unsigned before = w->server_runs;
        if (draw_below(&w->rng, crashes + stops) < crashes) {
            crashes--;
            server_lose_power(w);
        } else {
            stops--;
            server_stop_well(w);
        }
        if (before && draw_below(&w->rng, 2)) /* what has recovered is looked at, whole */
            (void)actor_begin(w, ROLE_READER, audit_main, &audit, "audit");
    }
    w->faulty = false;
    world_faults(w);
}

/* ---- the time of one thing ---- */

static bool change_has_come(struct world *w)
{
    return jobs_done(w) || sim_changes(w->sim, 0) > w->changes;
}

static void time_of_one_thing(struct world *w)
{
    uint32_t stops = w->plan.knob[KNOB_STOPS], crash_at = w->plan.knob[KNOB_CRASH_AT];
    uint64_t events = 0;
    bool crashed = false;
    while (!crashed && !jobs_done(w) && events < CALM_EVENTS_MAX) {
        w->changes = sim_changes(w->sim, 0);
        events += run_until(w, change_has_come, CALM_EVENTS_MAX);
        w->changes = sim_changes(w->sim, 0);
        if (w->watching.changed)
            w->watching.changed(w);
        crashed = !jobs_done(w) && crash_at && w->changes >= crash_at;
        if (stops && w->changes >= STOP_AFTER_CHANGES) {
            stops--;
            server_stop_well(w);
        }
    }
    w->faulty = false;
    w->allocations = scarce_end();
    if (crashed) {
        world_faults(w);
        server_lose_power(w);
        w->crash_way = SIM_LOSE_ANY; /* of what may follow */
    }
    world_faults(w);
}

/* ---- the calm after it ---- */

static void restart(struct world *w, bool crash)
{
    if (server_up(w) && !crash)
        server_stop_well(w);
    else
        server_lose_power(w);
    if (run_until(w, is_up, AUDIT_EVENTS_MAX) >= AUDIT_EVENTS_MAX)
        world_fail(w, "the server does not come up on a sound disk within %u events", AUDIT_EVENTS_MAX);
}

static void must_run(struct world *w, bool (*holds)(struct world *w), uint64_t max, const char *what)
{
    if (run_until(w, holds, max) < max)
        return;
    char names[400] = "";
    list_for_each (it, &w->actors) {
        const struct actor *a = container_of(it, struct actor, link);
        if (!a->over && strlen(names) + sizeof a->name + 2 < sizeof names)
            sprintf(names + strlen(names), " %s", a->name);
    }
    world_fail(w, "%s: not within %llu events without a fault; still there:%s", what, (unsigned long long)max,
               names);
}

static void audit_all(struct world *w, uint64_t found[2])
{
    bool done = false;
    struct audit audit = {.last = true, .done = &done, .found = found};
    (void)actor_begin(w, ROLE_OPERATOR, audit_main, &audit, "last audit");
    must_run(w, nobody_left, AUDIT_EVENTS_MAX, "the last audit");
    check(done);
}

static void calm_time(struct world *w)
{
    uint64_t first[2] = {0}, second[2] = {0};
    restart(w, draw_below(&w->rng, 2)); /* a disk whose sync has failed is not trusted until then */
    must_run(w, jobs_done, CALM_EVENTS_MAX, "the jobs end");
    must_run(w, nobody_left, CALM_EVENTS_MAX, "all people go home");
    audit_all(w, first);
    restart(w, true);
    audit_all(w, second);
    if (memcmp(first, second, sizeof first) != 0)
        world_fail(w, "a loss of power in a time of calm has changed what is listed");
    must_run(w, at_rest, AUDIT_EVENTS_MAX, "the connections end");
    server_stop_well(w);
    w->tally.events += sim_run(w->sim, NULL, NULL, 100000);
}

/* ---- begin and end ---- */

static void people_come(struct world *w)
{
    const uint32_t *k = w->plan.knob;
    for (uint32_t i = 0; i < k[KNOB_JOBS]; i++) {
        struct job *j = &w->jobs[i];
        *j = (struct job){.w = w,
                          .number = i,
                          .run = &w->model.run[i],
                          .kills_left = k[KNOB_KILLS],
                          .zombies_left = k[KNOB_ZOMBIES]};
        list_init(&j->attempts);
        (void)actor_begin(w, ROLE_WRITER, job_main, j, "job %u", i);
    }
    for (uint32_t i = 0; i < k[KNOB_READERS]; i++)
        (void)actor_begin(w, ROLE_READER, reader_main, NULL, "reader %u", i);
    if (k[KNOB_CLOCK_STEPS])
        (void)actor_begin(w, ROLE_OPERATOR, clock_main, NULL, "clock");
    bool feeds = k[KNOB_FEEDERS] > 0 && !k[KNOB_TIGHT]; /* there is no room for its versions */
    if (feeds)
        (void)actor_begin(w, ROLE_WRITER, importer_main, NULL, "importer");
    for (uint32_t i = 0; feeds && i < k[KNOB_FEEDERS]; i++)
        (void)actor_begin(w, ROLE_READER, feeder_main, NULL, "feeder %u", i);
    if (k[KNOB_OPERATOR] || k[KNOB_TIGHT])
        (void)actor_begin(w, ROLE_OPERATOR, operator_main, NULL, "operator");
}

static void world_create(struct world *w, const struct plan *plan, const struct watching *watching)
{
    memset(w, 0, sizeof *w);
    w->plan = *plan;
    if (w->plan.knob[KNOB_JOBS] > 2)
        w->plan.knob[KNOB_JOBS] = 2;
    w->rng = plan->seed ^ 0x5eed;
    w->crash_way = plan->knob[KNOB_CRASH_WAY];
    if (watching)
        w->watching = *watching;
    w->shape = (struct sim_shape){.tensors = plan->knob[KNOB_TENSORS], .bytes_max = plan->knob[KNOB_BYTES]};
    w->model.fail = model_failed;
    w->model.fail_arg = w;
    for (int i = 0; i < 2; i++)
        snprintf(w->model.run[i].name, sizeof w->model.run[i].name, "run%d", i);
    w->model.run[0].kind = RUN_CHECKPOINTS;
    w->model.run[1].kind = plan->knob[KNOB_DATASET] ? RUN_DATASET : RUN_CHECKPOINTS;
    w->ghosts_left = plan->knob[KNOB_GHOSTS];
    list_init(&w->lives);
    list_init(&w->actors);
    struct sim_options so = {.seed = plan->seed};
    if (plan->knob[KNOB_TIGHT]) /* room for some saves of all ranks, and little more */
        so.disk_bytes =
            (256u << 10) + (uint64_t)w->plan.knob[KNOB_JOBS] * plan->knob[KNOB_RANKS] * 6 *
                               (plan->knob[KNOB_TENSORS] * (plan->knob[KNOB_BYTES] + 4096ull) + 16384);
    if (w->watching.trace) {
        so.trace = trace_line;
        so.trace_arg = w;
    }
    check((w->sim = sim_create(&so)));
    check((w->clients = sim_loop(w->sim, 1)));
}

static void world_destroy(struct world *w)
{
    server_bury(w, false);
    bury_actors(w, true);
    w->life = NULL;
    server_bury(w, true);
    for (int i = 0; i < 2; i++)
        if (w->jobs[i].w)
            job_free(&w->jobs[i]);
    w->tally.commits = 0;
    for (int i = 0; i < 2; i++)
        w->tally.commits += w->model.run[i].commits.n;
    const struct sim_faults *f = sim_struck(w->sim);
    w->tally.cuts = f->connection_cut;
    w->tally.read_errors = f->read_error;
    w->tally.write_errors = f->write_error;
    w->tally.sync_errors = f->sync_error;
    w->tally.no_space = f->write_no_space;
    w->tally.shorts = f->short_transfer;
    w->tally.sites = f->fail_at;
    w->tally.site_cuts = f->cut_at;
    w->tally.corrupt = f->read_corrupt;
    w->tally.misdirected = f->read_misdirected;
    model_free(&w->model);
    loop_destroy(w->clients);
    sim_destroy(w->sim);
}

/* Whatever was short of memory, nothing of it is forgotten. */
static void all_given_back(struct world *w)
{
    char text[200];
    scarce_describe(text, sizeof text);
    if (scarce_held())
        world_fail(w, "%zu pieces of memory are not given back, the first of %s", scarce_held(), text);
    w->tally.allocations += scarce_failed()[0] != 0;
}

void world_play(struct world *w, const struct plan *plan, const struct watching *watching)
{
    world_create(w, plan, watching);
    w->faulty = one_thing(w);
    if (plan->knob[KNOB_STARVE_AT])
        server_starve(w, plan->knob[KNOB_STARVE_AT]);
    server_begin(w);
    if (run_until(w, is_up, AUDIT_EVENTS_MAX) >= AUDIT_EVENTS_MAX)
        world_fail(w, "the first start does not end");
    people_come(w);
    if (one_thing(w))
        time_of_one_thing(w);
    else
        faulty_time(w);
    calm_time(w);
    world_destroy(w);
    if (plan->knob[KNOB_STARVE_AT])
        all_given_back(w);
}

void tally_add(struct tally *sum, const struct tally *x)
{
    for (size_t i = 0; i < sizeof *x / sizeof(uint64_t); i++)
        ((uint64_t *)sum)[i] += ((const uint64_t *)x)[i];
}
