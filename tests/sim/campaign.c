/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Goal: whatever fails, and in whatever order, the store keeps what it has promised. Method: worlds under
 * seeds (world.h), beside a model of the promises (model.h); each world is played until its faults stop and
 * all has ended well. A seed is a whole history: one that fails is played again alone, with a trace, and made
 * smaller as long as it still fails.
 *
 * Or one thing goes wrong in each history of a plan (moments.h): the power fails after one change of the
 * disk, one operation of the disk fails, one allocation fails, or a connection breaks at one byte of a
 * commit.
 *
 *   campaign [--from S] [--seeds N] [--seconds T] [--jobs N] [--stop]    many; --stop: until one fails
 *   campaign --images N | --sites N | --allocations N | --cuts N  [--seeds N] ...
 *                                                                        so many histories of a seed; 0: all
 *   campaign --seed S [--set KNOB=VALUE ...] [--trace]                   one
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/sim/moments.h"
#include "tests/sim/world.h"

#define WORKERS_MAX       64
#define SEED_SECONDS      120  /* of one world; they take a hundredth */
#define HISTORIES_SECONDS 3600 /* of all histories of one */
#define SHRINK_TRIES      120
#define TRACED_EVERY      50 /* of so many seeds one is played twice, and the traces compared */
#define FAILURES_SHOWN    10

/* What a worker process shares with the one that watches it. */
struct worker {
    pid_t pid;
    uint64_t seed; /* being played */
    uint64_t next, step, end;
    bool busy, failed;
    uint64_t seeds, traced;
    struct tally tally;
    char text[1024];
};

/* Given by hand, for every seed. */
static const char *sets[KNOBS];
static unsigned set_count;
/* Instead of what the seed draws: one thing that goes wrong, in as many histories of a seed as it takes, or
 * at most. */
static void (*one_thing)(const struct plan *p, uint64_t most, struct tally *sum);
static uint64_t most;

static void plan_of(struct plan *p, uint64_t seed)
{
    plan_draw(p, seed);
    if (one_thing)
        moments_calm(p);
    for (unsigned i = 0; i < set_count; i++)
        check(plan_set(p, sets[i]));
}

static struct worker *workers;
static unsigned worker_count;

static void *shared(size_t n)
{
    void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check(p != MAP_FAILED);
    return p;
}

/* ---- one seed ---- */

static void play(const struct plan *p, struct tally *sum)
{
    static struct world w;
    world_play(&w, p, NULL);
    w.tally.pruned = w.tally.prunes > 0 && w.tally.crashes > 0 && w.tally.stops > 0;
    tally_add(sum, &w.tally);
}

static void play_twice(const struct plan *p)
{
    static struct world w;
    uint64_t hash[2];
    for (int i = 0; i < 2; i++) {
        world_play(&w, p, &(struct watching){.trace = true});
        hash[i] = w.trace_hash;
    }
    if (hash[0] != hash[1])
        world_fail(&w, "the same seed gives two histories");
}

static int play_alone(const struct plan *p, bool print)
{
    static struct world w;
    world_play(&w, p, &(struct watching){.trace = print, .print = print});
    printf("seed %llu: %llu events, %llu commits, %llu restores, %llu crashes: passed\n",
           (unsigned long long)p->seed, (unsigned long long)w.tally.events,
           (unsigned long long)w.tally.commits, (unsigned long long)w.tally.restores,
           (unsigned long long)w.tally.crashes);
    return 0;
}

/* ---- workers ---- */

/* Ends this process after so much time of the processor: a machine that stands still is no failure. */
static void bound_cpu(unsigned seconds)
{
    struct itimerval bound = {.it_value.tv_sec = (time_t)seconds};
    check(setitimer(ITIMER_PROF, &bound, NULL) == 0);
}

static void work(struct worker *k)
{
    world_fail_text = k->text;
    world_fail_size = sizeof k->text;
    while (k->next < k->end) {
        struct plan p;
        k->seed = k->next;
        k->next += k->step;
        k->busy = true;
        bound_cpu(one_thing ? HISTORIES_SECONDS : SEED_SECONDS);
        plan_of(&p, k->seed);
        if (one_thing) {
            one_thing(&p, most, &k->tally);
        } else {
            play(&p, &k->tally);
            if (k->seed % TRACED_EVERY == 0) {
                play_twice(&p);
                k->traced++;
            }
        }
        k->seeds++;
        k->busy = false;
    }
    _exit(0);
}

static void worker_start(struct worker *k)
{
    k->text[0] = 0;
    fflush(stdout);
    pid_t pid = fork(); /* the child shares k */
    check(pid >= 0);
    if (pid == 0)
        work(k);
    k->pid = pid;
}

static void describe_end(int status, char *text, size_t size)
{
    if (text[0])
        return;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGPROF)
        snprintf(text, size, "not over within %u s of a processor: it hangs within one event", SEED_SECONDS);
    else if (WIFSIGNALED(status))
        snprintf(text, size, "died of signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        snprintf(text, size, "ended with status %d", WEXITSTATUS(status));
}

/* ---- shrinking ---- */

/* Does the plan fail? In a process of its own; text says how. */
static bool fails(const struct plan *p, char *text, size_t size)
{
    static char *memory;
    int status;
    if (!memory)
        memory = shared(1024);
    memory[0] = 0;
    fflush(stdout);
    pid_t pid = fork();
    check(pid >= 0);
    if (pid == 0) {
        static struct tally ignored;
        world_fail_text = memory;
        world_fail_size = 1024;
        bound_cpu(SEED_SECONDS);
        if (!freopen("/dev/null", "w", stderr))
            _exit(0);
        play(p, &ignored);
        _exit(0);
    }
    check(waitpid(pid, &status, 0) == pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return false;
    describe_end(status, memory, 1024);
    snprintf(text, size, "%s", memory);
    return true;
}

/* Tries each knob at its least, then halfway to it; as long as something gets smaller. */
static void shrink(struct plan *p, char *text, size_t size)
{
    unsigned tries = 0;
    bool smaller = true;
    while (smaller && tries < SHRINK_TRIES) {
        smaller = false;
        for (int k = 0; k < KNOBS && tries < SHRINK_TRIES; k++) {
            uint32_t least = plan_knob_least((enum knob)k), now = p->knob[k];
            uint32_t to[] = {least, least + (now - least) / 2};
            for (int i = 0; i < 2 && to[i] < now && p->knob[k] == now; i++) {
                p->knob[k] = to[i];
                tries++;
                if (fails(p, text, size))
                    smaller = true;
                else
                    p->knob[k] = now;
            }
        }
    }
}

static void report(const char *program, uint64_t seed, const char *text)
{
    struct plan p;
    char how[512], smallest[1024] = "";
    plan_of(&p, seed);
    plan_print(&p, how, sizeof how);
    printf("seed %llu failed: %s\n  alone: %s --seed %llu%s --trace%s\n", (unsigned long long)seed, text,
           program, (unsigned long long)seed, how, one_thing ? ", with what is set above" : "");
    if (one_thing)
        return;
    shrink(&p, smallest, sizeof smallest);
    plan_print(&p, how, sizeof how);
    if (smallest[0])
        printf("  smaller: %s --seed %llu%s --trace\n    %s\n", program, (unsigned long long)seed, how,
               smallest);
    fflush(stdout);
}

/* ---- the campaign ---- */

struct campaign {
    const char *program;
    uint64_t from, seeds, seconds, failed, shown;
    bool stop; /* at the first failure, as it is */
};

static void worker_ended(struct campaign *c, struct worker *k, int status)
{
    k->pid = 0;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0 && !k->busy)
        return;
    c->failed++;
    k->busy = false;
    describe_end(status, k->text, sizeof k->text);
    if (c->stop) {
        printf("seed %llu failed: %s\n", (unsigned long long)k->seed, k->text);
        for (unsigned i = 0; i < worker_count; i++)
            workers[i].end = 0;
        return;
    }
    if (c->shown++ < FAILURES_SHOWN)
        report(c->program, k->seed, k->text);
    else
        printf("seed %llu failed: %s\n", (unsigned long long)k->seed, k->text);
    worker_start(k);
}

static unsigned running(void)
{
    unsigned n = 0;
    for (unsigned i = 0; i < worker_count; i++)
        n += workers[i].pid != 0;
    return n;
}

static uint64_t seconds_since(const struct timespec *start)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)(now.tv_sec - start->tv_sec);
}

/* Workers take no further seed once the time is up. */
static void watch(struct campaign *c)
{
    struct timespec start;
    clock_gettime(CLOCK_MONOTONIC, &start);
    while (running()) {
        int status;
        pid_t pid = waitpid(-1, &status, c->seconds ? WNOHANG : 0);
        if (pid < 0 && errno == ECHILD)
            break;
        for (unsigned i = 0; i < worker_count && pid > 0; i++)
            if (workers[i].pid == pid)
                worker_ended(c, &workers[i], status);
        if (pid != 0)
            continue;
        for (unsigned i = 0; i < worker_count && seconds_since(&start) >= c->seconds; i++)
            workers[i].end = 0;
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
}

static int summary(const struct campaign *c)
{
    struct tally t = {0};
    uint64_t seeds = 0, traced = 0;
    for (unsigned i = 0; i < worker_count; i++) {
        tally_add(&t, &workers[i].tally);
        seeds += workers[i].seeds;
        traced += workers[i].traced;
    }
#define N(x) (unsigned long long)(x)
    printf("seeds %llu from %llu (%llu played twice), events %llu, answers %llu of which errors %llu, "
           "commits %llu, restores %llu, prunes %llu, real clients %llu: saves %llu, restores %llu, batches "
           "%llu, sets that do not fit %llu, yields "
           "%llu; histories with prunes beside kill and stop %llu; "
           "server: starts %llu, crashes %llu, stops %llu; ranks "
           "killed %llu, "
           "attempts left running %llu; faults: cuts %llu, read %llu, write %llu, sync %llu, no space %llu, "
           "short %llu, corrupt %llu, misdirected %llu of which caught by clients %llu, replies lost %llu, "
           "clock steps %llu, ghosts %llu of %llu frames; key rotations %llu, crash images %llu, fault sites "
           "%llu, allocations %llu, cuts of commits %llu: %llu passed, %llu failed\n",
           N(seeds + c->failed), N(c->from), N(traced), N(t.events), N(t.answers), N(t.errors), N(t.commits),
           N(t.restores), N(t.prunes), N(t.clients), N(t.client_saves), N(t.client_restores), N(t.batches),
           N(t.lies), N(t.yields), N(t.pruned), N(t.starts), N(t.crashes), N(t.stops), N(t.kills),
           N(t.zombies), N(t.cuts), N(t.read_errors), N(t.write_errors), N(t.sync_errors), N(t.no_space),
           N(t.shorts), N(t.corrupt), N(t.misdirected), N(t.caught), N(t.lost_replies), N(t.clock_steps),
           N(t.ghosts), N(t.ghost_frames), N(t.rotations), N(t.images), N(t.sites), N(t.allocations),
           N(t.site_cuts), N(one_thing ? t.images + t.sites + t.allocations + t.site_cuts : seeds),
           N(c->failed));
#undef N
    return c->failed ? 1 : 0;
}

static int campaign(struct campaign *c, unsigned jobs)
{
    worker_count = jobs < 1 ? 1 : jobs > WORKERS_MAX ? WORKERS_MAX : jobs;
    workers = shared(worker_count * sizeof *workers);
    for (unsigned i = 0; i < worker_count; i++) {
        workers[i].next = c->from + i;
        workers[i].step = worker_count;
        workers[i].end = c->from + c->seeds;
        worker_start(&workers[i]);
    }
    watch(c);
    return summary(c);
}

static int usage(const char *program)
{
    fprintf(stderr,
            "usage: %s [--images N | --sites N | --allocations N | --cuts N] [--from SEED] [--seeds N] "
            "[--seconds N] [--jobs "
            "N] [--stop] "
            "[--set "
            "KNOB=VALUE ...]\n"
            "       %s --seed SEED [--set KNOB=VALUE ...] [--trace]\nknobs:",
            program, program);
    for (int k = 0; k < KNOBS; k++)
        fprintf(stderr, " %s", plan_knob_name((enum knob)k));
    fprintf(stderr, "\n");
    return 2;
}

int main(int argc, char **argv)
{
    struct campaign c = {.program = argv[0], .from = 1, .seeds = 1000};
    struct plan p = {0};
    unsigned jobs = (unsigned)sysconf(_SC_NPROCESSORS_ONLN);
    bool one = false, trace = false;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "0";
        if (strcmp(argv[i], "--trace") == 0 || strcmp(argv[i], "--stop") == 0) {
            trace |= argv[i][2] == 't';
            c.stop |= argv[i][2] == 's';
            continue;
        }
        if (strcmp(argv[i], "--seed") == 0) {
            one = true;
            c.from = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--set") == 0) {
            if (!plan_set(&p, value) || set_count == KNOBS)
                return usage(argv[0]);
            sets[set_count++] = value;
        } else if (strcmp(argv[i], "--from") == 0) {
            c.from = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--seeds") == 0) {
            c.seeds = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--images") == 0) {
            one_thing = images_play;
            most = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--cuts") == 0) {
            one_thing = cuts_play;
            most = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--sites") == 0) {
            one_thing = sites_play;
            most = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--allocations") == 0) {
            one_thing = allocations_play;
            most = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--seconds") == 0) {
            c.seconds = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--jobs") == 0) {
            jobs = (unsigned)strtoul(value, NULL, 10);
        } else {
            return usage(argv[0]);
        }
        i++;
    }
    plan_of(&p, c.from);
    return one ? play_alone(&p, trace) : campaign(&c, jobs);
}
