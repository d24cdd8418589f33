/* SPDX-License-Identifier: Apache-2.0 */
/* The launcher: makes the shared world, forks the ranks before any of them opens larder, and waits. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "format/base/hash.h"
#include "tools/demo/demo.h"
#include "tools/demo/model.h"

#define JOB_BOUND_S 900

static const char train_help[] =
    "usage: larder-demo train --run RUN --dataset DATASET [options]\n"
    "  --title TEXT      what the job is called in its output and labels\n"
    "  --ranks N         rank processes; must divide 12 (2)\n"
    "  --steps N         training steps (300)\n"
    "  --save-every N    steps between saves (20)\n"
    "  --per-micro N     sequences in each of the 12 micro-batches of a step (4)\n"
    "  --seed N          of weights, order and text positions (1)\n"
    "  --kill STEP       SIGKILL the last rank in the middle of the save of STEP\n"
    "  --kill-percent N  how far into it, of the time that its last save took (40)\n"
    "  --resume          from the latest committed step\n"
    "  --generate        let the trained model write a few lines\n"
    "  --report FILE     write figures as JSON\n"
    "LARDER_CREDENTIALS names the credential file.\n"
    "Exit status: 0 trained, 75 a rank died (resume it), 1 failed, 2 usage.\n";

void demo_error(const char *fmt, ...)
{
    char text[768];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    fprintf(stderr, "larder-demo: %s\n", text);
}

struct crew {
    pid_t pids[WORLD_RANKS_MAX];
    unsigned running;
    bool killed;
    double lost_s; /* when the first rank was seen to be gone */
    double over_s; /* when the last one was */
    bool failed;
};

static int number(const char *text, uint64_t least, uint64_t most, uint64_t *out)
{
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (errno || end == text || *end || *text == '-' || v < least || v > most) {
        demo_error("\"%s\" is not a number from %llu to %llu", text, (unsigned long long)least,
                   (unsigned long long)most);
        return -EINVAL;
    }
    *out = v;
    return 0;
}

static int parse(int argc, char **argv, struct job *j)
{
    enum {
        RUN = 1,
        DATASET,
        TITLE,
        RANKS,
        STEPS,
        EVERY,
        MICRO,
        SEED,
        KILL,
        PERCENT,
        RESUME,
        GENERATE,
        REPORT,
        HELP
    };
    static const struct option options[] = {{"run", 1, NULL, RUN},
                                            {"dataset", 1, NULL, DATASET},
                                            {"title", 1, NULL, TITLE},
                                            {"ranks", 1, NULL, RANKS},
                                            {"steps", 1, NULL, STEPS},
                                            {"save-every", 1, NULL, EVERY},
                                            {"per-micro", 1, NULL, MICRO},
                                            {"seed", 1, NULL, SEED},
                                            {"kill", 1, NULL, KILL},
                                            {"kill-percent", 1, NULL, PERCENT},
                                            {"resume", 0, NULL, RESUME},
                                            {"generate", 0, NULL, GENERATE},
                                            {"report", 1, NULL, REPORT},
                                            {"help", 0, NULL, HELP},
                                            {0}};
    uint64_t ranks = 2, micro = 4;
    int opt, status = 0;
    *j = (struct job){.title = "job", .steps = 300, .save_every = 20, .seed = 1, .kill_percent = 40};
    while (status == 0 && (opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (opt) {
        case RUN: j->run = optarg; break;
        case DATASET: j->dataset = optarg; break;
        case TITLE: j->title = optarg; break;
        case RANKS: status = number(optarg, 1, 12, &ranks); break;
        case STEPS: status = number(optarg, 1, 1000000, &j->steps); break;
        case EVERY: status = number(optarg, 1, 1000000, &j->save_every); break;
        case MICRO: status = number(optarg, 1, 64, &micro); break;
        case SEED: status = number(optarg, 0, UINT64_MAX, &j->seed); break;
        case KILL: status = number(optarg, 1, 1000000, &j->kill_step); break;
        case PERCENT: status = number(optarg, 0, 100, &j->kill_percent); break;
        case RESUME: j->resume = true; break;
        case GENERATE: j->generate = true; break;
        case REPORT: j->report = optarg; break;
        case HELP: fputs(train_help, stdout); exit(0);
        default: return -EINVAL;
        }
    }
    j->ranks = (unsigned)ranks;
    j->per_micro = (unsigned)micro;
    if (status == 0 && (!j->run || !j->dataset || optind != argc || WORLD_MICROS % ranks)) {
        demo_error("--run and --dataset are needed, and the ranks must divide %d; see --help", WORLD_MICROS);
        status = -EINVAL;
    }
    return status;
}

/* Takes in ranks that have ended. */
static void reap(const struct job *j, struct crew *c)
{
    for (unsigned i = 0; i < j->ranks; i++) {
        int how;
        if (c->pids[i] <= 0 || waitpid(c->pids[i], &how, WNOHANG) != c->pids[i])
            continue;
        c->pids[i] = 0;
        c->running--;
        bool good = WIFEXITED(how) && WEXITSTATUS(how) == 0;
        if (!good && c->lost_s == 0)
            c->lost_s = clock_s();
        if (WIFEXITED(how) && WEXITSTATUS(how) != 0 && WEXITSTATUS(how) != DEMO_EXIT_LOST)
            c->failed = true;
        c->over_s = clock_s();
    }
}

static void show(const struct job *j, const struct world *w, uint64_t *shown, bool terminal)
{
    uint64_t step = atomic_load(&w->step);
    uint64_t every = terminal ? 1 : j->save_every * 3;
    if (step < *shown + every || step == 0)
        return;
    step -= step % every;
    *shown = step;
    printf("%s  %s: step %4llu of %llu, loss %.3f%s", terminal ? "\r" : "", j->title,
           (unsigned long long)step, (unsigned long long)w->steps, (double)w->loss[step - 1],
           terminal ? "\033[K" : "\n");
    fflush(stdout);
}

/* Some way into the victim's save: a part of what its last one took. */
static void strike(const struct job *j, const struct world *w, struct crew *c, unsigned victim)
{
    unsigned saves = w->figures[victim].save_count;
    double wait_s = saves ? w->figures[victim].saves[saves - 1].durable_s * (double)j->kill_percent / 100 : 0;
    wait_s = wait_s < 0.5 ? wait_s : 0.5;
    nanosleep(&(struct timespec){0, (long)(wait_s * 1e9)}, NULL);
    kill(c->pids[victim], SIGKILL);
    c->killed = true;
}

/* Forks the ranks; kills one in the middle of a save if the job asks for it; returns when all have ended. */
static int run_ranks(const struct job *j, struct world *w, struct crew *c)
{
    bool terminal = isatty(1);
    uint64_t shown = 0;
    double bound = clock_s() + JOB_BOUND_S;
    pid_t launcher = getpid();
    fflush(NULL);
    for (unsigned i = 0; i < j->ranks; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != launcher)
                _exit(1);
            _exit(rank_main(j, w, i));
        }
        if (pid < 0) {
            demo_error("a rank could not be forked: %s", strerror(errno));
            return -errno;
        }
        c->pids[i] = pid;
        c->running++;
    }
    while (c->running > 0) {
        unsigned victim = j->ranks - 1;
        if (j->kill_step && !c->killed && atomic_load(&w->staged[victim]) == j->kill_step &&
            c->pids[victim] > 0) {
            strike(j, w, c, victim);
        }
        reap(j, c);
        show(j, w, &shown, terminal);
        if (clock_s() > bound) {
            demo_error("the job is not over after %d s and is ended", JOB_BOUND_S);
            for (unsigned i = 0; i < j->ranks; i++)
                if (c->pids[i] > 0)
                    kill(c->pids[i], SIGKILL);
            return -ETIMEDOUT;
        }
        nanosleep(&(struct timespec){0, j->kill_step && !c->killed ? 50000 : 5000000}, NULL);
    }
    if (terminal)
        printf("\r\033[K");
    return 0;
}

static json_t *saves_json(const struct world *w)
{
    json_t *list = json_array();
    for (unsigned r = 0; r < w->ranks; r++)
        for (unsigned i = 0; i < w->figures[r].save_count; i++) {
            const struct save_figures *s = &w->figures[r].saves[i];
            json_array_append_new(
                list, json_pack("{s:I,s:i,s:f,s:f,s:I,s:I}", "step", (json_int_t)s->step, "rank", (int)r,
                                "stall_seconds", s->stall_s, "durable_seconds", s->durable_s, "plain_bytes",
                                (json_int_t)s->plain_bytes, "stored_bytes", (json_int_t)s->stored_bytes));
        }
    return list;
}

static json_t *feed_json(const struct world *w)
{
    double network = 0, disk = 0, decode = 0, consumer = 0;
    uint64_t samples = 0, bytes = 0;
    for (unsigned r = 0; r < w->ranks; r++) {
        const struct rank_figures *f = &w->figures[r];
        network += f->starved_network_s;
        disk += f->starved_disk_s;
        decode += f->starved_decode_s;
        consumer += f->feed_full_s;
        samples += f->samples;
        bytes += f->bytes;
    }
    return json_pack("{s:f,s:f,s:f,s:f,s:I,s:I,s:s}", "network", network, "disk", disk, "decode", decode,
                     "consumer", consumer, "samples", (json_int_t)samples, "bytes", (json_int_t)bytes, "path",
                     w->figures[0].path);
}

static int write_report(const struct job *j, const struct world *w, const struct crew *c, const char *digest)
{
    uint64_t done = atomic_load(&w->step);
    json_t *loss = json_array();
    for (uint64_t i = 0; i < done; i++)
        json_array_append_new(loss, json_real((double)w->loss[i]));
    uint64_t samples = (done > w->first_step ? done - w->first_step : 0) * WORLD_MICROS * j->per_micro;
    json_t *o = json_pack(
        "{s:s,s:i,s:I,s:I,s:I,s:f,s:I,s:b,s:f,s:s,s:o,s:o,s:o,s:I}", "title", j->title, "ranks",
        (int)j->ranks, "steps", (json_int_t)w->steps, "first_step", (json_int_t)w->first_step, "done",
        (json_int_t)done, "seconds", w->ended_s > w->begun_s ? w->ended_s - w->begun_s : 0.0, "samples",
        (json_int_t)samples, "killed", c->killed, "notice_seconds", c->killed ? c->over_s - c->lost_s : 0.0,
        "sha256", digest, "loss", loss, "saves", saves_json(w), "feed", feed_json(w), "kill_step",
        (json_int_t)(c->killed ? j->kill_step : 0));
    int status = o && json_dump_file(o, j->report, JSON_INDENT(1) | JSON_REAL_PRECISION(9)) == 0 ? 0 : -EIO;
    if (status < 0)
        demo_error("the report cannot be written to %s", j->report);
    json_decref(o);
    return status;
}

/* A few lines by the trained model, set off from the rest. */
static void generate(const struct job *j, const struct world *w)
{
    struct model_work *k = model_work_create();
    uint8_t text[280] = "This program is ";
    if (!k)
        return;
    model_prepare(k, w->weights);
    model_generate(k, w->weights, text, strlen((char *)text), sizeof text, 0.5f, j->seed);
    printf("  what it writes after \"This program is\":\n    ");
    for (size_t i = 0; i < sizeof text; i++)
        if (text[i] == '\n')
            printf("\n    ");
        else
            putchar(text[i] >= 32 && text[i] < 127 ? text[i] : '.');
    putchar('\n');
    model_work_free(k);
}

static int tell(const struct job *j, const struct world *w, const struct crew *c, char digest[65])
{
    uint8_t sum[SHA256_BYTES];
    uint64_t done = atomic_load(&w->step);
    sha256(w->weights, w->floats * sizeof(float), sum);
    hex_encode(sum, sizeof sum, digest);
    if (c->failed)
        return 1;
    for (unsigned i = 0; i < w->ranks; i++)
        if (!w->figures[i].finished) {
            printf("  %s: rank %u %s; the others noticed and ended %.0f ms later\n", j->title, w->ranks - 1,
                   c->killed ? "was killed in the middle of a save" : "died", (c->over_s - c->lost_s) * 1000);
            return DEMO_EXIT_LOST;
        }
    printf("  %s: %llu steps, loss %.3f to %.3f, %.1f s, SHA-256 of the weights %.16s...\n", j->title,
           (unsigned long long)(done - w->first_step), (double)w->loss[w->first_step],
           (double)w->loss[done - 1], w->ended_s - w->begun_s, digest);
    if (j->generate)
        generate(j, w);
    return 0;
}

int train_main(int argc, char **argv)
{
    struct job j;
    struct crew c = {0};
    char digest[65];
    if (parse(argc, argv, &j) < 0)
        return 2;
    if (getrandom(j.attempt, sizeof j.attempt, 0) != sizeof j.attempt) {
        demo_error("no randomness for the attempt's id");
        return 1;
    }
    struct world *w = world_create(j.ranks, j.steps, model_floats());
    if (!w) {
        demo_error("no shared memory for %zu weights", model_floats());
        return 1;
    }
    int status = run_ranks(&j, w, &c) < 0 ? 1 : tell(&j, w, &c, digest);
    if (status != 1 && j.report && write_report(&j, w, &c, digest) < 0)
        status = 1;
    world_free(w);
    return status;
}
