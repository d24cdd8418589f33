/* SPDX-License-Identifier: Apache-2.0 */
/* Processes: threads, locks, waits, clock and randomness. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

#include "client/secrets.h"
#include "format/channel.h"
#include "tests/sim/fiber.h"
#include "tests/sim/people.h"
#include "tests/sim/process.h"

#define YIELD_LONG 24u /* one in so many yields takes milliseconds */

/* ---- processes ---- */

struct process *process_enter(struct actor *a)
{
    struct process *p = calloc(1, sizeof *p);
    check(p && !a->process);
    p->w = a->w;
    p->name = a->name;
    p->rng = draw(&a->rng);
    p->yields = 2 + draw_below(&p->rng, 60);
    list_init(&p->handles);
    a->process = p;
    p->dead = a->killed;
    return p;
}

void process_leave(struct actor *a)
{
    struct process *p = a->process;
    if (p->threads || !list_empty(&p->handles))
        world_fail(p->w, "%s: the client was closed and has left %u threads%s", p->name, p->threads,
                   list_empty(&p->handles) ? "" : " and open sockets");
    a->process = NULL;
    free(p);
}

struct process *process_now(void)
{
    return actor_now() ? actor_now()->process : NULL;
}

uint32_t process_below(struct process *p, uint32_t n)
{
    return draw_below(&p->rng, n);
}

uint64_t process_clock_ns(const struct process *p)
{
    return sim_now_ns(p->w->sim) + p->skew_ns;
}

/* ---- waiting ---- */

struct wait {
    struct list link;
    const void *on, *other;
    struct actor *a;
    bool woken;
};

static struct list waits = {&waits, &waits};

static void wait_begin(struct wait *x, const void *on)
{
    *x = (struct wait){.on = on, .a = actor_now()};
    list_add_tail(&waits, &x->link);
}

/* With a dead process's clock there is no waiting for time. */
static bool wait_end(struct wait *x, uint64_t until_ns)
{
    struct actor *a = x->a;
    struct process *p = a->process;
    while (!x->woken) {
        uint64_t now = process_clock_ns(p);
        if (now >= until_ns)
            break;
        if (until_ns != UINT64_MAX)
            actor_set_timer(a, p->dead ? 1 : (until_ns - now + 999999) / 1000000);
        fiber_wait(a->fiber);
        if (p->dead && a->rang && until_ns != UINT64_MAX && !x->woken)
            p->skew_ns += until_ns > process_clock_ns(p) ? until_ns - process_clock_ns(p) : 0;
    }
    list_del(&x->link);
    return x->woken;
}

bool wait_on(const void *on, uint64_t until_ns)
{
    return wait_on_either(on, NULL, until_ns);
}

bool wait_on_either(const void *on, const void *other, uint64_t until_ns)
{
    struct wait x;
    wait_begin(&x, on);
    x.other = other;
    return wait_end(&x, until_ns);
}

static void wake(struct wait *x)
{
    x->woken = true;
    actor_wake(x->a);
}

void wake_all(const void *on)
{
    list_for_each (it, &waits) {
        struct wait *x = container_of(it, struct wait, link);
        if ((x->on == on || x->other == on) && !x->woken)
            wake(x);
    }
}

static void wake_one(struct process *p, const void *on)
{
    struct wait *chosen = NULL;
    uint32_t n = 0;
    list_for_each (it, &waits) {
        struct wait *x = container_of(it, struct wait, link);
        if (x->on == on && !x->woken && process_below(p, ++n) == 0)
            chosen = x;
    }
    if (chosen)
        wake(chosen);
}

void process_kill(struct process *p)
{
    p->dead = true;
    handles_cut(p);
    list_for_each (it, &waits) { /* those that wait for time */
        struct wait *x = container_of(it, struct wait, link);
        if (x->a->process == p)
            actor_wake(x->a);
    }
}

void process_yield(void)
{
    struct actor *a = actor_now();
    struct process *p = a->process;
    if (process_below(p, p->yields) > 0)
        return;
    p->w->tally.yields++;
    if (process_below(p, YIELD_LONG) > 0 || p->dead) {
        actor_wake(a);
        fiber_wait(a->fiber);
    } else {
        (void)wait_on(a, process_clock_ns(p) + process_below(p, 20) * 1000000ull);
    }
}

/* ---- threads ---- */

struct thread {
    void *(*main)(void *arg);
    void *arg;
    bool over;
};

static void thread_main(struct actor *a)
{
    struct thread *t = a->arg;
    (void)t->main(t->arg);
    t->over = true;
    a->process->threads--;
    a->process = NULL;
    wake_all(t);
}

int simulated_pthread_create(pthread_t *out, const pthread_attr_t *attr, void *(*start)(void *), void *arg);
int simulated_pthread_create(pthread_t *out, const pthread_attr_t *attr, void *(*start)(void *), void *arg)
{
    struct process *p = process_now();
    check(!attr);
    process_yield();
    struct thread *t = calloc(1, sizeof *t);
    check(t);
    *t = (struct thread){.main = start, .arg = arg};
    actor_begin(p->w, actor_now()->role, thread_main, t, "%s'", p->name)->process = p;
    p->threads++;
    *out = (pthread_t)t;
    return 0;
}

int simulated_pthread_join(pthread_t thread, void **result);
int simulated_pthread_join(pthread_t thread, void **result)
{
    struct thread *t = (struct thread *)thread;
    check(!result);
    process_yield();
    while (!t->over)
        (void)wait_on(t, UINT64_MAX);
    free(t);
    return 0;
}

/* ---- locks: who holds it stands in the lock itself ---- */

struct lock {
    const struct actor *holder;
};
_Static_assert(sizeof(struct lock) <= sizeof(pthread_mutex_t), "a lock has room for its holder");

static struct lock *lock_of(pthread_mutex_t *m)
{
    return (struct lock *)m;
}

int simulated_pthread_mutex_init(pthread_mutex_t *m, const pthread_mutexattr_t *attr);
int simulated_pthread_mutex_init(pthread_mutex_t *m, const pthread_mutexattr_t *attr)
{
    check(!attr);
    memset(m, 0, sizeof *m);
    return 0;
}

int simulated_pthread_mutex_destroy(pthread_mutex_t *m);
int simulated_pthread_mutex_destroy(pthread_mutex_t *m)
{
    check(!lock_of(m)->holder);
    return 0;
}

int simulated_pthread_mutex_lock(pthread_mutex_t *m);
int simulated_pthread_mutex_lock(pthread_mutex_t *m)
{
    struct lock *l = lock_of(m);
    process_yield();
    check(l->holder != actor_now());
    while (l->holder)
        (void)wait_on(l, UINT64_MAX);
    l->holder = actor_now();
    return 0;
}

int simulated_pthread_mutex_trylock(pthread_mutex_t *m);
int simulated_pthread_mutex_trylock(pthread_mutex_t *m)
{
    struct lock *l = lock_of(m);
    process_yield();
    if (l->holder)
        return EBUSY;
    l->holder = actor_now();
    return 0;
}

int simulated_pthread_mutex_unlock(pthread_mutex_t *m);
int simulated_pthread_mutex_unlock(pthread_mutex_t *m)
{
    struct lock *l = lock_of(m);
    check(l->holder == actor_now());
    l->holder = NULL;
    wake_all(l);
    process_yield();
    return 0;
}

/* ---- conditions ---- */

int simulated_pthread_cond_init(pthread_cond_t *c, const pthread_condattr_t *attr);
int simulated_pthread_cond_init(pthread_cond_t *c, const pthread_condattr_t *attr)
{
    (void)c, (void)attr;
    return 0;
}

int simulated_pthread_cond_destroy(pthread_cond_t *c);
int simulated_pthread_cond_destroy(pthread_cond_t *c)
{
    list_for_each (it, &waits)
        check(container_of(it, struct wait, link)->on != c);
    return 0;
}

static bool cond_wait(pthread_cond_t *c, pthread_mutex_t *m, uint64_t until_ns)
{
    struct process *p = process_now();
    struct wait x;
    check(p && lock_of(m)->holder == actor_now());
    wait_begin(&x, c);
    x.woken = process_below(p, 50) == 0; /* for no reason, as POSIX allows */
    lock_of(m)->holder = NULL;
    wake_all(lock_of(m));
    bool woken = wait_end(&x, until_ns);
    (void)simulated_pthread_mutex_lock(m);
    return woken;
}

int simulated_pthread_cond_wait(pthread_cond_t *c, pthread_mutex_t *m);
int simulated_pthread_cond_wait(pthread_cond_t *c, pthread_mutex_t *m)
{
    (void)cond_wait(c, m, UINT64_MAX);
    return 0;
}

/* All of them wait by the monotonic clock (client/clock.h). */
int simulated_pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *until);
int simulated_pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *until)
{
    uint64_t until_ns = (uint64_t)until->tv_sec * 1000000000u + (uint64_t)until->tv_nsec;
    return cond_wait(c, m, until_ns) ? 0 : ETIMEDOUT;
}

int simulated_pthread_cond_signal(pthread_cond_t *c);
int simulated_pthread_cond_signal(pthread_cond_t *c)
{
    wake_one(process_now(), c);
    process_yield();
    return 0;
}

int simulated_pthread_cond_broadcast(pthread_cond_t *c);
int simulated_pthread_cond_broadcast(pthread_cond_t *c)
{
    wake_all(c);
    process_yield();
    return 0;
}

/* ---- clock, randomness, and what threads are otherwise told ---- */

int simulated_clock_gettime(clockid_t clock, struct timespec *out);
int simulated_clock_gettime(clockid_t clock, struct timespec *out)
{
    struct process *p = process_now();
    uint64_t ns = clock == CLOCK_MONOTONIC ? process_clock_ns(p) : sim_unix_ns(p->w->sim);
    *out = (struct timespec){.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    return 0;
}

int simulated_nanosleep(const struct timespec *span, struct timespec *left);
int simulated_nanosleep(const struct timespec *span, struct timespec *left)
{
    struct process *p = process_now();
    (void)left;
    uint64_t until_ns = process_clock_ns(p) + (uint64_t)span->tv_sec * 1000000000u + (uint64_t)span->tv_nsec;
    (void)wait_on(span, until_ns);
    return 0;
}

ssize_t simulated_getrandom(void *p, size_t n, unsigned flags);
ssize_t simulated_getrandom(void *p, size_t n, unsigned flags)
{
    struct process *of = process_now();
    (void)flags;
    for (uint8_t *at = p, *end = at + n; at < end;)
        *at++ = (uint8_t)draw(&of->rng);
    return (ssize_t)n;
}

int simulated_pthread_setname_np(pthread_t thread, const char *name);
int simulated_pthread_setname_np(pthread_t thread, const char *name)
{
    (void)thread, (void)name;
    return 0;
}

int simulated_pthread_sigmask(int how, const sigset_t *set, sigset_t *old);
int simulated_pthread_sigmask(int how, const sigset_t *set, sigset_t *old)
{
    (void)how, (void)set, (void)old;
    return 0;
}

int simulated_setpriority(int which, id_t who, int value);
int simulated_setpriority(int which, id_t who, int value)
{
    (void)which, (void)who, (void)value;
    return 0;
}

int simulated_nice(int by);
int simulated_nice(int by)
{
    return by;
}

/* ---- who the process is ---- */

/* path: the role's number. */
int __wrap_secrets_load(const char *path, unsigned timeout_ms, struct credentials *out, struct err *e);
int __wrap_secrets_load(const char *path, unsigned timeout_ms, struct credentials *out, struct err *e)
{
    (void)timeout_ms, (void)e;
    *out = (struct credentials){.tenant = "acme", .role = (enum client_role)(path[0] - '0')};
    snprintf(out->server, sizeof out->server, "node0:%s", world_port(out->role));
    people_keks(&out->keks);
    return 0;
}

int __wrap_channel_config_create(bool server, const char *ca_pem, const char *certificate_pem,
                                 const struct secret *key_pem, struct channel_config **out, struct err *e);
int __wrap_channel_config_create(bool server, const char *ca_pem, const char *certificate_pem,
                                 const struct secret *key_pem, struct channel_config **out, struct err *e)
{
    (void)server, (void)ca_pem, (void)certificate_pem, (void)key_pem, (void)e;
    *out = NULL; /* the clear channel */
    return 0;
}
