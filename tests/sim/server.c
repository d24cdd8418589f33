/* SPDX-License-Identifier: Apache-2.0 */
/* The server's lives: started on the disk of node 0, stopped well, or cut off by a loss of power. What is
 * dead goes on existing until its code has come to rest, beside the life that has followed it. */
#include <stdlib.h>

#include "server/io/sim_impl.h"
#include "tests/sim/world.h"
#include "tests/support/scarce.h"

#define LOOPS_MAX 2

enum life_state { LIFE_STARTING, LIFE_RUNNING, LIFE_STOPPING, LIFE_OVER };

struct life {
    struct list link; /* world.lives */
    struct world *w;
    struct loop *loops[LOOPS_MAX];
    size_t loop_count;
    enum life_state state;
    bool dead;      /* without power */
    bool untrusted; /* a sync had failed since the power failed last */
    struct boot *boot;
    struct loop_msg stop_msg;
    uint32_t stop_bound_ms;
};

static const char *const listen_at[] = {"node0:7001", "node0:7002", "node0:7003", "node0:7004"};
static const struct identity identities[] = {
    {.tenant = "acme", .role = ROLE_READER, .subject = "sim"},
    {.tenant = "acme", .role = ROLE_WRITER, .subject = "sim"},
    {.tenant = "acme", .role = ROLE_OPERATOR, .subject = "sim"},
    {.tenant = "acme", .role = ROLE_ADMIN, .subject = "sim"},
};

const char *world_port(enum client_role role)
{
    return listen_at[role - 1] + sizeof "node0:" - 1;
}

static void on_stopped(void *arg, uint64_t finished, uint64_t failed)
{
    struct life *l = arg;
    (void)finished, (void)failed;
    world_note(l->w, "the server has stopped");
    l->boot = NULL;
    l->state = LIFE_OVER;
}

static void stop_now(struct loop_msg *m)
{
    struct life *l = container_of(m, struct life, stop_msg);
    boot_stop(l->boot, l->stop_bound_ms, on_stopped, l);
}

static void begin_stop(struct life *l, uint32_t bound_ms)
{
    l->state = LIFE_STOPPING;
    l->stop_bound_ms = bound_ms;
    l->stop_msg.run = stop_now;
    loop_post(l->loops[0], &l->stop_msg);
}

static void on_started(void *arg, struct boot *b, const struct err *e)
{
    struct life *l = arg;
    l->boot = b;
    if (!b) {
        l->state = LIFE_OVER;
        world_note(l->w, "the server does not start: %s", e->text);
        bool refused = e->class == ERR_READ_ONLY;
        l->w->reboot_wanted |= refused && !l->dead;
        if (!l->w->faulty && !l->dead && !(refused && l->untrusted))
            world_fail(l->w, "the server does not start on a sound disk: %s", e->text);
        return;
    }
    l->state = LIFE_RUNNING;
    if (l->untrusted && !l->dead)
        world_fail(l->w, "the server starts on what a failed sync has left in memory");
    if (l->dead) { /* the power failed just before it could see that */
        begin_stop(l, 0);
        return;
    }
    world_note(l->w, "the server runs");
    world_faults(l->w);
    l->w->server_runs++;
    l->w->tally.starts++;
}

/* The server's own code runs in turns of its loops, and when it is begun. */
static const struct world *starving;
static bool beginning;

static bool of_the_server(void)
{
    return beginning || sim_turn(starving->sim) == 0;
}

void server_starve(struct world *w, uint64_t at)
{
    starving = w;
    scarce_watch();
    scarce_begin(at, of_the_server);
}

static void begin_life(struct life *l, const struct boot_options *o)
{
    beginning = true;
    int rc = boot_start(o, on_started, l);
    beginning = false;
    if (rc < 0 && !l->w->faulty)
        world_fail(l->w, "the server does not begin: %d", rc);
    if (rc < 0) {
        l->state = LIFE_OVER;
        for (size_t i = 0; i < l->loop_count; i++)
            loop_stop(l->loops[i]);
        world_note(l->w, "the server does not begin: %d", rc);
    }
}

void server_begin(struct world *w)
{
    bool untrusted = sim_struck(w->sim)->sync_error != w->syncs_failed;
    if (w->reboot_wanted || (untrusted && !w->plan.knob[KNOB_SAME_BOOT])) {
        server_lose_power(w); /* what its disk says is not trusted before the machine has started again */
        untrusted = false;
    }
    struct life *l = calloc(1, sizeof *l);
    check(l && server_down(w));
    l->w = w;
    l->untrusted = untrusted;
    l->loop_count = w->plan.knob[KNOB_LOOPS] < LOOPS_MAX ? w->plan.knob[KNOB_LOOPS] : LOOPS_MAX;
    for (size_t i = 0; i < l->loop_count; i++)
        check((l->loops[i] = sim_loop(w->sim, 0)));
    struct boot_options o = {.loops = l->loops,
                             .loop_count = l->loop_count,
                             .folder = "store",
                             .space_reserve_bytes = 64 << 10,
                             .join_wait_ms = 2500,
                             .check_wait_ms = 500,
                             .segment_idle_ms = 3000,
                             .buffers_bytes = 1 << 20,
                             .ensure_tenant = "acme",
                             .server = {.clear_identities = identities,
                                        .listen = listen_at,
                                        .listen_count = 4,
                                        .limits = {.read_cache_bytes = 1 << 20}}};
    list_add_tail(&w->lives, &l->link);
    w->life = l;
    world_note(w, "the server starts");
    world_faults(w);
    begin_life(l, &o);
}

bool server_down(const struct world *w)
{
    return !w->life || w->life->state == LIFE_OVER;
}

bool server_up(const struct world *w)
{
    return w->life && w->life->state == LIFE_RUNNING;
}

void server_lose_power(struct world *w)
{
    struct life *l = w->life;
    w->life = NULL;
    w->tally.crashes++;
    w->syncs_failed = sim_struck(w->sim)->sync_error;
    w->reboot_wanted = false;
    world_note(w, "the power fails");
    list_for_each (it, &w->lives)
        container_of(it, struct life, link)->dead = true;
    sim_crash(w->sim, 0);
    if (l && l->state == LIFE_RUNNING)
        begin_stop(l, 0);
}

void server_stop_well(struct world *w)
{
    struct life *l = w->life;
    if (!server_up(w))
        return;
    w->tally.stops++;
    world_note(w, "the server is asked to stop");
    begin_stop(l, draw_below(&w->rng, 400));
}

static bool loop_rests(struct loop *l)
{
    return sim_loop_of(l)->stopped && l->pending == 0 && !sim_loop_of(l)->first;
}

void server_bury(struct world *w, bool all)
{
    list_for_each_safe (it, &w->lives) {
        struct life *l = container_of(it, struct life, link);
        bool rests = l->state == LIFE_OVER;
        for (size_t i = 0; i < l->loop_count && rests; i++)
            rests = loop_rests(l->loops[i]);
        if (!rests && all)
            world_fail(w, "a server that was stopped does not come to rest");
        if (!rests || l == w->life)
            continue;
        for (size_t i = 0; i < l->loop_count; i++)
            loop_destroy(l->loops[i]);
        list_del(&l->link);
        free(l);
    }
}
