/* SPDX-License-Identifier: Apache-2.0 */
/*
 * larder bench save|restore: ranks are processes of their own, forked before larder is opened, each with its
 * share of one global tensor list. Every figure is compared with a bound made from the stages of bench limits
 * measured in the same run:
 *
 *   bound = min(slowest device for what it has to carry, cores / (sum of CPU seconds per GB of plaintext))
 */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "format/base/pages.h"
#include "tools/bench.h"
#include "tools/commands.h"

#define RANKS_MAX         64
#define ROUNDS_MAX        16
#define COPIERS_MAX       4 /* threads that a submit copies with, at most */
#define RANK_WAIT_MS      600000
#define RESTORE_BYTES     (128u << 20) /* memory_bytes of a restore, as larder.h says */
#define DESCRIPTION_BYTES 72           /* of staging memory, of a tensor of which there are very many */

struct bench_job {
    bool restore, compare; /* compare: restores once more, over TLS alone */
    bool train;            /* saves once more, beside a trainer that computes */
    uint64_t bytes, ranks, rounds, staging, threads, stage_ms, tensor_bytes;
    const char *data, *folder, *credentials, *compression_word;
    enum larder_compression compression;
    bool json;
    char run[64];
    uint8_t attempt[LARDER_ID_BYTES];
};

struct rank_result {
    double describe_s[ROUNDS_MAX];                     /* begin and all tensors, before the round begins */
    double stall_s[ROUNDS_MAX], durable_s[ROUNDS_MAX]; /* since the round's begin */
    double begun_s, restored_s;                        /* by the machine's clock */
    double memcpy_s, memcpy_cpu_s, cpu_s;
    double step_s, step_saving_s; /* of a trainer, alone and while a save goes on; 0: not measured */
    uint64_t plain, stored, fetched, peak_rss;
    char path[128];
    int status;
};

/* Shared with the rank processes. */
struct board {
    pthread_barrier_t barrier;
    struct rank_result ranks[RANKS_MAX];
    struct rank_result tls[RANKS_MAX]; /* of the restore over TLS alone */
    double round_begun_s[ROUNDS_MAX];
};

struct share {
    uint8_t *data, *copy;
    uint64_t bytes;
    size_t tensors;
};

static uint64_t share_bytes(const struct bench_job *j)
{
    uint64_t each = j->bytes / j->ranks;
    return each - each % 4096;
}

/* A rank's tensors, told one after the other: quickly, since that is done while a restore is timed. */
struct telling {
    char name[64]; /* "rank0.7" */
    uint64_t next;
    struct larder_tensor t;
};

static void tell_begin(const struct bench_job *j, uint64_t rank, struct telling *k)
{
    enum dtype dtype;
    bench_dtype(j->data, &dtype);
    *k = (struct telling){.t = {.name = k->name, .dtype = (enum larder_dtype)dtype, .dims = 1}};
    k->t.name_bytes = (size_t)snprintf(k->name, sizeof k->name, "rank%llu.0", (unsigned long long)rank);
}

/* The next number, digit by digit. */
static void next_name(char *name, size_t *n)
{
    char *p = name + *n - 1;
    while (*p == '9')
        *p-- = '0';
    if (*p != '.') {
        ++*p;
        return;
    }
    p[1] = '1'; /* of 9, 99, ... only zeros are left */
    name[(*n)++] = '0';
}

/* The next one, of one dimension; each rank has some whole ones of its own. */
static const struct larder_tensor *tell_next(const struct bench_job *j, const struct share *s,
                                             struct telling *k)
{
    uint64_t at = k->next * j->tensor_bytes;
    uint64_t bytes = s->bytes - at < j->tensor_bytes ? s->bytes - at : j->tensor_bytes;
    if (k->next++ > 0)
        next_name(k->name, &k->t.name_bytes);
    k->t.data = s->data + at;
    k->t.shape[0] = bytes * 8 / dtype_bits((enum dtype)k->t.dtype);
    return &k->t;
}

struct copier {
    uint8_t *to;
    const uint8_t *from;
    size_t n;
};

static void *copier_run(void *arg)
{
    const struct copier *c = arg;
    memcpy(c->to, c->from, c->n);
    __asm__ volatile("" ::: "memory");
    return NULL;
}

/* As larder.h says of `threads`. */
static uint64_t copy_threads(const struct bench_job *j)
{
    uint64_t cores = (uint64_t)cores_usable(), half = cores / 2 > 2 ? cores / 2 : 2;
    uint64_t threads = j->threads ? j->threads : half < cores ? half : cores;
    return threads < COPIERS_MAX ? threads : COPIERS_MAX;
}

/* A plain copy of the same bytes, with as many threads as a submit has; kept if it is the fastest so far. */
static void memcpy_measure(const struct bench_job *j, const struct share *s, double *best)
{
    uint64_t threads = copy_threads(j);
    struct copier copiers[COPIERS_MAX];
    pthread_t ids[COPIERS_MAX];
    uint64_t started = 1, each = s->bytes / threads / 4096 * 4096;
    double t = clock_now_s();
    for (uint64_t i = 0; i < threads; i++)
        copiers[i] = (struct copier){s->copy + i * each, s->data + i * each,
                                     i + 1 < threads ? each : s->bytes - i * each};
    while (started < threads && pthread_create(&ids[started], NULL, copier_run, &copiers[started]) == 0)
        started++;
    for (uint64_t i = 0; i < threads; i++)
        if (i == 0 || i >= started)
            (void)copier_run(&copiers[i]);
    for (uint64_t i = 1; i < started; i++)
        pthread_join(ids[i], NULL);
    t = clock_now_s() - t;
    *best = *best > 0 && *best < t ? *best : t;
}

/* Begins a save of all tensors. */
static int begin_save(const struct bench_job *j, struct larder *c, uint64_t rank, const struct share *s,
                      uint64_t step, struct larder_save **save, struct larder_error *e)
{
    struct larder_save_options o = LARDER_INIT(larder_save_options);
    o.run = j->run;
    o.step = step;
    o.rank = (uint32_t)rank;
    o.world = (uint32_t)j->ranks;
    o.compression = j->compression;
    o.join_timeout_ms = RANK_WAIT_MS;
    memcpy(o.attempt, j->attempt, sizeof o.attempt);
    struct telling k;
    tell_begin(j, rank, &k);
    int status = larder_save_begin(c, &o, save, e);
    for (size_t i = 0; status == 0 && i < s->tensors; i++)
        status = larder_save_tensor(*save, tell_next(j, s, &k), e);
    return status;
}

static int one_save(const struct bench_job *j, struct larder *c, uint64_t rank, const struct share *s,
                    unsigned round, struct board *b, struct larder_error *e)
{
    struct larder_save_info info = LARDER_INIT(larder_save_info);
    struct larder_save *save = NULL;
    struct rank_result *r = &b->ranks[rank];
    double cpu = cpu_now_s();
    memcpy_measure(j, s, &r->memcpy_s); /* beside the stall that it is compared with */
    r->memcpy_cpu_s += cpu_now_s() - cpu;
    double began = clock_now_s();
    int status = begin_save(j, c, rank, s, round + 1, &save, e);
    r->describe_s[round] = clock_now_s() - began;
    pthread_barrier_wait(&b->barrier);
    double begun = clock_now_s();
    if (rank == 0)
        b->round_begun_s[round] = begun;
    if (status == 0)
        status = larder_save_submit(save, e);
    r->stall_s[round] = clock_now_s() - begun;
    if (status == 0)
        status = larder_save_wait(save, RANK_WAIT_MS, e);
    r->durable_s[round] = clock_now_s() - begun;
    if (status == 0 && (status = larder_save_info(save, &info)) == 0) {
        r->plain = info.plain_bytes;
        r->stored = info.stored_bytes;
        snprintf(r->path, sizeof r->path, "%s", info.path);
    }
    larder_save_free(save);
    return status;
}

#define TRAIN_SAVES 3 /* steps during so many saves count */

/* Steps while nothing is saved, then while saves go on in the background: from the return of submit, which is
 * the stall, until the checkpoint is durable. */
static int train_and_save(const struct bench_job *j, struct larder *c, uint64_t rank, const struct share *s,
                          struct rank_result *r, struct larder_error *e)
{
    unsigned cores = (unsigned)cores_usable(), each = cores / (unsigned)j->ranks;
    struct trainer *trainer = trainer_start(each);
    double busy = 0, took;
    uint64_t steps = 0, n;
    int status = 0;
    if (!trainer)
        return -ENOMEM;
    usleep(300 * 1000);
    trainer_look(trainer, &took, &n);
    usleep(1000 * 1000);
    trainer_look(trainer, &took, &n);
    r->step_s = n ? took / (double)n : 0;
    for (unsigned i = 0; i < TRAIN_SAVES && status == 0; i++) {
        struct larder_save *save = NULL;
        status = begin_save(j, c, rank, s, j->rounds + 1 + i, &save, e);
        if (status == 0)
            status = larder_save_submit(save, e);
        trainer_look(trainer, &took, &n);
        if (status == 0)
            status = larder_save_wait(save, RANK_WAIT_MS, e);
        trainer_look(trainer, &took, &n);
        busy += took;
        steps += n;
        larder_save_free(save);
    }
    r->step_saving_s = steps ? busy / (double)steps : 0;
    trainer_stop(trainer);
    return status;
}

static int one_restore(const struct bench_job *j, struct larder *c, uint64_t rank, const struct share *s,
                       struct board *b, struct rank_result *r, struct larder_error *e)
{
    struct larder_restore_options o = LARDER_INIT(larder_restore_options);
    struct larder_restore_info info = LARDER_INIT(larder_restore_info);
    struct larder_restore *from = NULL;
    struct share into = *s;
    struct telling k;
    tell_begin(j, rank, &k);
    o.run = j->run;
    o.at = LARDER_AT_LATEST;
    o.memory_bytes = RESTORE_BYTES;
    into.data = s->copy;
    memset(s->copy, 0, s->bytes); /* faulted in, and not what is expected */
    pthread_barrier_wait(&b->barrier);
    double cpu = cpu_now_s();
    r->begun_s = clock_now_s();
    int status = larder_restore_open(c, &o, &from, e);
    for (size_t i = 0; status == 0 && i < s->tensors; i++)
        status = larder_restore_add(from, tell_next(j, &into, &k), e);
    if (status == 0)
        status = larder_restore_run(from, e);
    r->restored_s = clock_now_s();
    r->cpu_s = cpu_now_s() - cpu;
    if (status == 0 && (status = larder_restore_info(from, &info)) == 0) {
        r->fetched = info.fetched_bytes;
        snprintf(r->path, sizeof r->path, "%s", info.path);
    }
    if (status == 0 && memcmp(s->copy, s->data, s->bytes) != 0) {
        snprintf(e->text, sizeof e->text, "rank %llu: what was restored is not what was saved",
                 (unsigned long long)rank);
        e->kind = LARDER_CORRUPT;
        status = -EBADMSG;
    }
    larder_restore_close(from);
    return status;
}

static int share_make(const struct bench_job *j, uint64_t rank, struct share *s)
{
    s->bytes = share_bytes(j);
    s->tensors = (size_t)((s->bytes + j->tensor_bytes - 1) / j->tensor_bytes);
    s->data = pages_alloc(2 * s->bytes); /* as the memory is that the stages of the bound are measured in */
    if (!s->data)
        return -ENOMEM;
    s->copy = s->data + s->bytes;
    bench_fill(j->data, rank + 1, s->data, s->bytes);
    memset(s->copy, 0, s->bytes);
    return 0;
}

/* Once more with a client that does without the bulk lane. */
static int restore_by_tls(const struct bench_job *j, const struct larder_options *like, uint64_t rank,
                          const struct share *s, struct board *b, struct larder_error *e)
{
    struct larder_options o = *like;
    struct larder *c = NULL;
    o.no_bulk_lane = 1;
    o.staging_bytes = 1; /* the least: nothing is saved with it */
    int status = larder_open(&o, &c, e);
    pthread_barrier_wait(&b->barrier);
    pthread_barrier_wait(&b->barrier);
    if (status == 0)
        status = one_restore(j, c, rank, s, b, &b->tls[rank], e);
    else
        pthread_barrier_wait(&b->barrier);
    (void)larder_close(c, -1, NULL);
    return status;
}

/* A rank's life. */
static int rank_run(const struct bench_job *j, struct board *b, uint64_t rank)
{
    struct larder_options o = LARDER_INIT(larder_options);
    struct larder_error e = {0};
    struct larder *c = NULL;
    struct share s;
    struct rank_result *r = &b->ranks[rank];
    struct rusage usage;
    if (share_make(j, rank, &s) < 0)
        return fail_with(STATUS_OTHER, "no memory for 2 x %s of tensors", size_text(share_bytes(j)).s);
    memcpy_measure(j, &s, &r->memcpy_s);
    o.credentials = j->credentials;
    o.staging_bytes = j->staging;
    o.threads = (unsigned)j->threads;
    int status = larder_open(&o, &c, &e);
    if (status < 0)
        return fail(&e);
    /* Saves first in both benches; restore measures only what comes after them. */
    double cpu = cpu_now_s();
    for (unsigned round = 0; round < j->rounds && status == 0; round++)
        status = one_save(j, c, rank, &s, round, b, &e);
    r->cpu_s = cpu_now_s() - cpu - r->memcpy_cpu_s;
    if (status == 0 && j->restore) {
        pthread_barrier_wait(&b->barrier); /* the parent forgets pages between these two */
        pthread_barrier_wait(&b->barrier);
        status = one_restore(j, c, rank, &s, b, r, &e);
    }
    if (getrusage(RUSAGE_SELF, &usage) == 0) /* without the caller's own tensors, and their copy */
        r->peak_rss = (uint64_t)usage.ru_maxrss * 1024 - 2 * s.bytes;
    if (status == 0 && j->train)
        status = train_and_save(j, c, rank, &s, r, &e);
    if (status == 0 && j->compare)
        status = restore_by_tls(j, &o, rank, &s, b, &e);
    if (status < 0)
        status = fail(&e);
    return client_close(c, status);
}

/* ---- the parent
 * --------------------------------------------------------------------------------------------- */

static struct board *board_make(const struct bench_job *j)
{
    pthread_barrierattr_t a;
    struct board *b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b == MAP_FAILED)
        return NULL;
    pthread_barrierattr_init(&a);
    pthread_barrierattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
    /* The parent takes part in every barrier, so that it can read clocks and counters in between. */
    pthread_barrier_init(&b->barrier, &a, (unsigned)j->ranks + 1);
    pthread_barrierattr_destroy(&a);
    return b;
}

struct crew {
    pid_t pids[RANKS_MAX];
};

static int crew_fork(const struct bench_job *j, struct board *b, struct crew *c)
{
    pid_t parent = getpid();
    fflush(NULL);
    for (uint64_t i = 0; i < j->ranks; i++) {
        c->pids[i] = fork();
        if (c->pids[i] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent)
                _exit(1);
            _exit(rank_run(j, b, i));
        }
        if (c->pids[i] < 0)
            return -errno;
    }
    return 0;
}

/* Has a rank ended? While barriers lie ahead none should have. */
static bool rank_ended(const struct bench_job *j, const struct crew *c)
{
    for (uint64_t i = 0; i < j->ranks; i++) {
        siginfo_t info = {0};
        if (waitid(P_PID, (id_t)c->pids[i], &info, WEXITED | WNOHANG | WNOWAIT) < 0 || info.si_pid != 0)
            return true;
    }
    return false;
}

/* Waits at the barrier like a rank, but returns when a rank has ended too: a helper process takes the place.
 */
static int parent_barrier(const struct bench_job *j, struct board *b, const struct crew *c)
{
    int how = 0;
    pid_t helper = fork();
    if (helper == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pthread_barrier_wait(&b->barrier);
        _exit(0);
    }
    if (helper < 0)
        return -errno;
    for (;;) {
        pid_t r = waitpid(helper, &how, WNOHANG);
        if (r == helper)
            return 0;
        if (rank_ended(j, c)) {
            kill(helper, SIGKILL);
            waitpid(helper, &how, 0);
            return -ECANCELED;
        }
        usleep(200);
    }
}

static int crew_join(const struct bench_job *j, struct crew *c, bool failed)
{
    int status = STATUS_OK;
    for (uint64_t i = 0; i < j->ranks; i++) {
        int how = 0;
        if (c->pids[i] <= 0)
            continue;
        if (failed) { /* those that failed by themselves are given the time to end, and keep their status */
            usleep(100000);
            kill(c->pids[i], SIGKILL);
        }
        waitpid(c->pids[i], &how, 0);
        if (WIFEXITED(how) && WEXITSTATUS(how) != 0)
            status = WEXITSTATUS(how);
        else if (!WIFEXITED(how) && !failed)
            status = STATUS_OTHER;
    }
    return failed && status == STATUS_OK ? STATUS_OTHER : status;
}

/* ---- the bound
 * ---------------------------------------------------------------------------------------------- */

struct bound {
    double gbps, cpu_s_per_gb, device_gbps;
    bool direct;
};

/* Sealed chunks on a bulk lane need no TLS. */
static enum stage wire_of(const struct board *b)
{
    return strstr(b->ranks[0].path, "plain TCP") ? STAGE_TCP : STAGE_TLS;
}

/* CPU per GB of plaintext of everything that must be done once, and the slowest device, for the given ratio.
 */
static void bound_measure(const struct bench_job *j, double ratio, enum stage wire, struct bound *out)
{
    struct stage_figures f[STAGE_COUNT];
    double stored_cpu, plain_cpu, device = INFINITY;
    bool plain = j->compression == LARDER_COMPRESS_OFF;
    struct stage_work w = {
        .data = j->data, .folder = j->folder, .seconds = (double)j->stage_ms / 1000, .disk_bytes = j->bytes};
    w.disk_bytes = w.disk_bytes < (64u << 20)  ? 64u << 20
                   : w.disk_bytes > (1u << 30) ? 1u << 30
                                               : w.disk_bytes;
    for (int s = 0; s < STAGE_COUNT; s++)
        stage_measure((enum stage)s, &w, &f[s]);
    enum stage disk = j->restore ? STAGE_DISK_READ : STAGE_DISK_WRITE;
    enum stage codec = j->restore ? STAGE_PLANES_DECODE : STAGE_PLANES_ENCODE;
    /* of plaintext: the copy between trainer and staging (or into place), the codec, the hash of plain bytes
     */
    plain_cpu =
        f[STAGE_MEMCPY].cpu_s_per_gb + (plain ? 0 : f[codec].cpu_s_per_gb) + f[STAGE_CHECKSUM].cpu_s_per_gb;
    /* of stored bytes: cipher, checksum on both sides, the wire with both its ends, the disk */
    stored_cpu = f[STAGE_AES_GCM].cpu_s_per_gb + 2 * f[STAGE_CHECKSUM].cpu_s_per_gb + f[wire].cpu_s_per_gb +
                 f[disk].cpu_s_per_gb;
    /* a lane that is written to covers every byte, at both ends; who reads trusts the chunk's own tag */
    if (wire == STAGE_TCP && !j->restore)
        stored_cpu += 2 * f[STAGE_LANE_TAG].cpu_s_per_gb;
    if (f[disk].gbps > 0)
        device = f[disk].gbps / ratio;
    out->direct = f[disk].direct;
    out->device_gbps = device;
    out->cpu_s_per_gb = plain_cpu + ratio * stored_cpu;
    out->gbps = fmin(device, cores_usable() / out->cpu_s_per_gb);
}

/* ---- the result
 * --------------------------------------------------------------------------------------------- */

struct server_cpu {
    double seen, tls; /* seconds; negative: not seen */
};

struct figures {
    double gbps_tls, server_cpu_tls; /* of the restore over TLS alone; negative: there was none */
    double step_s, step_saving_s;
    double gbps, describe_s, stall_s, first_stall_s, memcpy_s, ratio, server_cpu, client_cpu;
    uint64_t bytes, peak_rss;
};

static void figures_save(const struct bench_job *j, const struct board *b, struct figures *f)
{
    double best = 1e30, stall = 1e30, describe = 1e30;
    for (uint64_t round = 0; round < j->rounds; round++) {
        double durable = 0, held = 0, described = 0;
        for (uint64_t i = 0; i < j->ranks; i++) {
            durable = fmax(durable, b->ranks[i].durable_s[round]);
            held = fmax(held, b->ranks[i].stall_s[round]);
            described = fmax(described, b->ranks[i].describe_s[round]);
        }
        best = fmin(best, durable);
        describe = fmin(describe, described);
        if (round == 0)
            f->first_stall_s = held;
        if (round > 0 || j->rounds == 1)
            stall = fmin(stall, held);
    }
    f->stall_s = stall;
    f->describe_s = describe;
    f->gbps = (double)f->bytes / best / 1e9;
}

/* Bytes restored by all ranks over the time from the first's begin to the last's end. */
static double restore_gbps(const struct bench_job *j, const struct rank_result *r)
{
    double begun = INFINITY, ended = 0;
    for (uint64_t i = 0; i < j->ranks; i++) {
        begun = fmin(begun, r[i].begun_s);
        ended = fmax(ended, r[i].restored_s);
    }
    return (double)(share_bytes(j) * j->ranks) / (ended - begun) / 1e9;
}

static void figures_make(const struct bench_job *j, const struct board *b, const struct server_cpu *cpu_s,
                         struct figures *f)
{
    double plain = 0, stored = 0, cpu = 0;
    f->bytes = share_bytes(j) * j->ranks;
    for (uint64_t i = 0; i < j->ranks; i++) {
        const struct rank_result *r = &b->ranks[i];
        plain += (double)r->plain;
        stored += (double)r->stored;
        cpu += r->cpu_s;
        f->memcpy_s = fmax(f->memcpy_s, r->memcpy_s);
        f->peak_rss = r->peak_rss > f->peak_rss ? r->peak_rss : f->peak_rss;
        f->step_s = fmax(f->step_s, r->step_s);
        f->step_saving_s = fmax(f->step_saving_s, r->step_saving_s);
    }
    f->ratio = plain > 0 ? stored / plain : 1;
    figures_save(j, b, f);
    if (j->restore)
        f->gbps = restore_gbps(j, b->ranks);
    f->gbps_tls = j->compare ? restore_gbps(j, b->tls) : -1;
    double moved_gb = (double)f->bytes * (j->restore ? 1 : (double)j->rounds) / 1e9;
    f->client_cpu = cpu / moved_gb;
    f->server_cpu = cpu_s->seen < 0 ? -1 : cpu_s->seen / moved_gb;
    f->server_cpu_tls = j->compare ? cpu_s->tls / moved_gb : -1;
}

static json_t *real_or_null(double v)
{
    return v < 0 ? json_null() : json_real(v);
}

static json_t *seconds_or_null(double v)
{
    return v > 0 ? json_real(v) : json_null();
}

/* Memory that the client was given: for its snapshot, and for stored chunks that it restores. */
static uint64_t budget_bytes(const struct bench_job *j)
{
    return j->staging + (j->restore ? RESTORE_BYTES : 0);
}

static double cpu_over_tls(const struct figures *f)
{
    return f->server_cpu_tls > 0 ? f->server_cpu / f->server_cpu_tls : -1;
}

static int tell(const struct bench_job *j, const struct board *b, const struct figures *f,
                const struct bound *bound)
{
    double over = f->memcpy_s > 0 ? f->stall_s / f->memcpy_s : 0;
    if (j->json)
        return json_print(json_pack(
            "{s:I,s:I,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:o,s:f,s:I,s:s,s:s,s:s,s:b,s:s,s:I,s:I,s:f,s:I,s:I,s:"
            "o,s:o,s:o,"
            "s:o,s:o,s:o}",
            "bytes", (json_int_t)f->bytes, "ranks", (json_int_t)j->ranks, "stall_seconds", f->stall_s,
            "first_stall_seconds", f->first_stall_s, "memcpy_seconds", f->memcpy_s, "stall_over_memcpy", over,
            "gbps", f->gbps, "bound_gbps", bound->gbps, "of_limit", f->gbps / bound->gbps, "codec_ratio",
            f->ratio, "server_cpu_s_per_gb", real_or_null(f->server_cpu), "client_cpu_s_per_gb",
            f->client_cpu, "peak_rss_bytes", (json_int_t)f->peak_rss, "path", b->ranks[0].path, "data",
            j->data, "compression", j->compression_word, "disk_direct", bound->direct, "encryption",
            "AES-256-GCM", "cores", (json_int_t)cores_usable(), "rounds", (json_int_t)j->rounds,
            "describe_seconds", f->describe_s, "budget_bytes", (json_int_t)budget_bytes(j), "threads",
            (json_int_t)copy_threads(j), "train_step_seconds", seconds_or_null(f->step_s),
            "train_step_seconds_saving", seconds_or_null(f->step_saving_s), "train_step_slowdown",
            seconds_or_null(f->step_s > 0 ? f->step_saving_s / f->step_s : 0), "server_cpu_s_per_gb_tls",
            real_or_null(f->server_cpu_tls), "server_cpu_over_tls", real_or_null(cpu_over_tls(f)), "gbps_tls",
            real_or_null(f->gbps_tls)));
    printf("%s of %s by %llu rank%s, %s: %.2f GB/s, %.2f of the bound of %.2f\n",
           j->restore ? "restore" : "durable save", size_text(f->bytes).s, (unsigned long long)j->ranks,
           j->ranks == 1 ? "" : "s", j->data, f->gbps, f->gbps / bound->gbps, bound->gbps);
    printf("  bound: device %.2f GB/s, %d cores / %.2f CPU s per GB\n", bound->device_gbps, cores_usable(),
           bound->cpu_s_per_gb);
    if (!j->restore)
        printf("  stall %.1f ms, first %.1f ms, memcpy %.1f ms: %.2f times\n", f->stall_s * 1e3,
               f->first_stall_s * 1e3, f->memcpy_s * 1e3, over);
    printf("  ratio %.3f (%s), AES-256-GCM, disk %s, by %s\n", f->ratio, j->compression_word,
           bound->direct ? "direct" : "through the page cache", b->ranks[0].path);
    printf("  CPU s per GB: client %.2f, server ", f->client_cpu);
    if (f->server_cpu < 0)
        printf("not seen");
    else
        printf("%.2f", f->server_cpu);
    printf("; a client's memory beside its tensors at most %s, its budget %s\n", size_text(f->peak_rss).s,
           size_text(budget_bytes(j)).s);
    if (f->step_s > 0)
        printf("  a training step on all cores %.1f ms, beside a save in the background %.1f ms: %.2f times "
               "(%llu threads, niced; %s)\n",
               f->step_s * 1e3, f->step_saving_s * 1e3, f->step_saving_s / f->step_s,
               (unsigned long long)copy_threads(j),
               f->server_cpu < 0 ? "the server elsewhere" : "the server on the same cores");
    if (f->server_cpu_tls > 0)
        printf("  the same over TLS alone: %.2f GB/s, server %.2f CPU s per GB; so %.2f of it here\n",
               f->gbps_tls, f->server_cpu_tls, cpu_over_tls(f));
    return STATUS_OK;
}

/* The three barriers before a restore: what came before is over; pages are forgotten; all are ready. */
static int cold_restore(const struct bench_job *j, struct board *b, const struct crew *crew,
                        const struct dev_server *own, double *cpu_before)
{
    int status = parent_barrier(j, b, crew);
    if (status != 0)
        return status;
    *cpu_before = dev_cpu_s(own);
    dev_forget_pages(own);
    status = parent_barrier(j, b, crew);
    return status == 0 ? parent_barrier(j, b, crew) : status;
}

/* Runs the ranks against the server whose CPU can be read (own) or not. */
static int measure(struct bench_job *j, const struct dev_server *own)
{
    struct board *b = board_make(j);
    struct crew crew = {0};
    struct figures f = {0};
    struct bound bound;
    struct server_cpu cpu = {-1, -1};
    int barriers = (int)j->rounds, status;
    if (!b)
        return fail_with(STATUS_OTHER, "no shared memory");
    status = crew_fork(j, b, &crew);
    double cpu_before = 0;
    for (int i = 0; i < barriers && status == 0; i++) {
        status = parent_barrier(j, b, &crew);
        if (i == 0)
            cpu_before = dev_cpu_s(own);
    }
    if (status == 0 && j->restore)
        status = cold_restore(j, b, &crew, own, &cpu_before);
    if (status == 0 && j->compare) {
        double before = cpu_before;
        status = cold_restore(j, b, &crew, own, &cpu_before);
        cpu.seen = cpu_before - before;
    }
    status = crew_join(j, &crew, status != 0);
    if (own->pid > 0)
        *(j->compare ? &cpu.tls : &cpu.seen) = dev_cpu_s(own) - cpu_before;
    if (status == STATUS_OK) {
        figures_make(j, b, &cpu, &f);
        bound_measure(j, f.ratio, wire_of(b), &bound);
        status = tell(j, b, &f, &bound);
    }
    munmap(b, sizeof *b);
    return status;
}

static void remove_run(const struct bench_job *j)
{
    struct larder_options o = LARDER_INIT(larder_options);
    struct larder_error e = {0};
    struct larder *c = NULL;
    o.credentials = j->credentials;
    if (larder_open(&o, &c, &e) < 0 || larder_run_destroy(c, LARDER_CHECKPOINTS, j->run, &e) < 0)
        fprintf(stderr, "larder: the run %s of this bench stays: %s\n", j->run, e.text);
    if (c)
        (void)larder_close(c, -1, &e);
}

static bool compression_of(const char *word, enum larder_compression *out)
{
    *out = strcmp(word, "off") == 0     ? LARDER_COMPRESS_OFF
           : strcmp(word, "dense") == 0 ? LARDER_COMPRESS_DENSE
                                        : LARDER_COMPRESS_FAST;
    return *out != LARDER_COMPRESS_FAST || strcmp(word, "fast") == 0;
}

/* 2 GiB, at which what begins and ends a save counts for little; with their copy and the snapshot they take
 * four times as much memory. */
static uint64_t bytes_default(void)
{
    uint64_t bytes = 2ull << 30, memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    while (bytes > memory / 8)
        bytes /= 2;
    return bytes;
}

static int store_bench(const struct command *cmd, bool restore, int argc, char **argv)
{
    struct common common = {0};
    struct bench_job j = {.restore = restore,
                          .bytes = bytes_default(),
                          .ranks = 1,
                          .rounds = restore ? 1 : 3,
                          .stage_ms = 300,
                          .tensor_bytes = 32u << 20,
                          .data = "bf16-gaussian",
                          .folder = "/tmp",
                          .compression_word = "fast"};
    uint64_t tensors = 0;
    const struct opt opts[] = {{"bytes", OPT_SIZE, &j.bytes},
                               {"ranks", OPT_NUMBER, &j.ranks},
                               {"rounds", OPT_NUMBER, &j.rounds},
                               {"data", OPT_TEXT, &j.data},
                               {"dir", OPT_TEXT, &j.folder},
                               {"compression", OPT_TEXT, &j.compression_word},
                               {"staging", OPT_SIZE, &j.staging},
                               {"threads", OPT_NUMBER, &j.threads},
                               {"stage-ms", OPT_NUMBER, &j.stage_ms},
                               {"tensor-bytes", OPT_SIZE, &j.tensor_bytes},
                               {"tensors", OPT_NUMBER, &tensors},
                               {"train", OPT_FLAG, &j.train},
                               {0}};
    struct dev_server own = {0};
    enum dtype ignored;
    int status;
    if (!options_read(cmd, &argc, argv, opts, 0, 0, &common, &status))
        return status;
    if (!bench_dtype(j.data, &ignored))
        return fail_usage(cmd->name, "\"%s\" is no data: bf16-gaussian, fp32-gaussian, random or zero",
                          j.data);
    if (!compression_of(j.compression_word, &j.compression))
        return fail_usage(cmd->name, "\"%s\" is not a compression: off, fast or dense", j.compression_word);
    if (tensors > 0)
        j.tensor_bytes = (share_bytes(&j) / tensors + 63) / 64 * 64;
    if (j.tensor_bytes < 64 || j.tensor_bytes % 64 != 0)
        return fail_usage(cmd->name, "--tensor-bytes is a multiple of 64");
    if (j.ranks < 1 || j.ranks > RANKS_MAX || j.rounds < 1 || j.rounds > ROUNDS_MAX || j.threads > 256 ||
        j.stage_ms > 600000)
        return fail_usage(cmd->name, "--ranks is from 1 to %d, --rounds from 1 to %d", RANKS_MAX, ROUNDS_MAX);
    if (share_bytes(&j) < 4096)
        return fail_usage(cmd->name, "--bytes is too small for %llu ranks", (unsigned long long)j.ranks);
    j.json = common.json;
    if (!j.staging)
        j.staging = share_bytes(&j) + (16u << 20) + /* the snapshot in one wave, and what describes it */
                    share_bytes(&j) / j.tensor_bytes * DESCRIPTION_BYTES;
    snprintf(j.run, sizeof j.run, "bench-%d", (int)getpid());
    for (int i = 0; i < LARDER_ID_BYTES; i++)
        j.attempt[i] = (uint8_t)((unsigned)getpid() >> i % 4 * 8) ^ (uint8_t)i;
    const char *set = common.credentials ? common.credentials : getenv("LARDER_CREDENTIALS");
    if (!set || !*set)
        status = dev_start(j.folder, NULL, &own);
    if (status != STATUS_OK)
        return status;
    j.credentials = own.pid ? own.credentials : set;
    j.compare = restore && own.pid;
    status = measure(&j, &own);
    if (!own.pid)
        remove_run(&j);
    dev_stop(&own);
    return status;
}

static int save_run(const struct command *cmd, int argc, char **argv)
{
    return store_bench(cmd, false, argc, argv);
}
static int restore_run(const struct command *cmd, int argc, char **argv)
{
    return store_bench(cmd, true, argc, argv);
}

#define STORE_OPTIONS                                                                                        \
    "Without LARDER_CREDENTIALS it starts its own larderd in a new folder below --dir and removes both.\n"   \
    "  --bytes SIZE       of all ranks together (2G, at most an eighth of the memory)\n"                     \
    "  --ranks N          processes (1)\n"                                                                   \
    "  --data KIND        bf16-gaussian (default), fp32-gaussian, random, zero\n"                            \
    "  --compression C    fast (default), dense, off      --threads N  of each client (its default)\n"       \
    "  --staging SIZE     pinned memory of each client (one whole snapshot)    --dir FOLDER  (/tmp)\n"       \
    "  --stage-ms N       for each stage of the bound (300)\n"                                               \
    "  --tensor-bytes N   of each tensor (32M); with 1024, a million of them take 1 GB\n"                    \
    "  --tensors N        so many of each rank instead\n"                                                    \
    "  --train            saves, then saves beside a trainer that computes on all cores\n"                   \
    "  --json             {\"bytes\", \"ranks\", \"stall_seconds\", \"first_stall_seconds\", "               \
    "\"memcpy_seconds\",\n"                                                                                  \
    "                     \"stall_over_memcpy\", \"gbps\", \"bound_gbps\", \"of_limit\", \"codec_ratio\",\n" \
    "                     \"server_cpu_s_per_gb\", \"client_cpu_s_per_gb\", \"peak_rss_bytes\", \"path\", "  \
    "...}\n"

const struct command cmd_bench_save = {"bench save",
                                       "durable saves: speed, stall, and how far from the machine's bound",
                                       "usage: larder bench save [--rounds N] [options]\n"
                                       "Saves host tensors N times (3), encrypted and compressed; the best "
                                       "round counts, and the first stall beside.\n" STORE_OPTIONS,
                                       save_run};
const struct command cmd_bench_restore = {
    "bench restore", "restore into host memory, and how far from the machine's bound",
    "usage: larder bench restore [options]\n"
    "Saves once, drops the store's pages from the page cache, restores "
    "all ranks at once and compares every byte.\nWith a larderd of its own "
    "it restores once more over TLS alone, to compare the server's CPU "
    "time.\n" STORE_OPTIONS,
    restore_run};
