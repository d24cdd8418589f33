/* SPDX-License-Identifier: Apache-2.0 */
/* Settings, rules of failure, and what every call begins and ends with. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/cuda/state.h"

struct state world = {.lock = PTHREAD_MUTEX_INITIALIZER};

static pthread_once_t once = PTHREAD_ONCE_INIT;

#define CALL_NAME(symbol, parameters) #symbol,
static const char *const names[CALL_COUNT] = {CUDA_CALLS(CALL_NAME) "cuCtxSetCurrent", "cuCtxGetCurrent",
                                              "cuDevicePrimaryCtxReset_v2", "cuStreamSynchronize",
                                              "cuMemsetD8Async"};

const char *call_name(enum call which)
{
    return names[which];
}

void broken(const char *what)
{
    fprintf(stderr, "the stand-in for CUDA: %s\n", what);
    abort();
}

uint64_t random_next(void) /* splitmix64 */
{
    uint64_t z = world.random += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* ---- settings ---- */

void settings_defaults(struct settings *s)
{
    *s = (struct settings){.seed = 1,
                           .delay_us = 2000,
                           .memory = 1u << 30,
                           .register_max = UINT64_MAX,
                           .register_total = UINT64_MAX,
                           .devices = 1,
                           .version = 13000,
                           .numa = -1};
}

static uint64_t size_in(const char *text, char **end)
{
    uint64_t v = strtoull(text, end, 10);
    static const char units[] = "KMG";
    const char *unit = **end ? strchr(units, **end) : NULL;
    if (unit) {
        v <<= 10 * (unit - units + 1);
        ++*end;
    }
    return v;
}

static int call_number(const char *name, size_t n)
{
    for (int i = 0; i < CALL_COUNT; i++)
        if (strlen(names[i]) == n && memcmp(names[i], name, n) == 0)
            return i;
    broken("fail= names a call that it does not have");
}

/* WHICH:N:CODE */
static char *rule_read(struct rule *rules, char *text, bool call)
{
    struct rule r = {.on = true};
    char *colon = strchr(text, ':');
    if (!colon)
        broken("fail= and lose= take WHICH:N:CODE");
    r.which = call ? call_number(text, (size_t)(colon - text)) : atoi(text);
    r.left = strtoull(colon + 1, &colon, 10);
    if (*colon != ':')
        broken("fail= and lose= take WHICH:N:CODE");
    r.code = (cu_result)strtol(colon + 1, &colon, 10);
    r.always = call && r.left == 0;
    for (size_t i = 0; i < RULES_MAX; i++)
        if (!rules[i].on) {
            rules[i] = r;
            return colon;
        }
    broken("too many rules");
}

static char *word_read(struct settings *s, const char *word, size_t n, char *value)
{
    char *end = value;
    struct {
        const char *word;
        uint64_t *to;
    } sizes[] = {{"seed", &s->seed},
                 {"delay_us", &s->delay_us},
                 {"memory", &s->memory},
                 {"register_max", &s->register_max},
                 {"register_total", &s->register_total}};
    struct {
        const char *word;
        int *to;
    } numbers[] = {{"devices", &s->devices}, {"version", &s->version}, {"numa", &s->numa}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (strlen(sizes[i].word) == n && memcmp(sizes[i].word, word, n) == 0) {
            *sizes[i].to = size_in(value, &end);
            return end;
        }
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (strlen(numbers[i].word) == n && memcmp(numbers[i].word, word, n) == 0) {
            *numbers[i].to = (int)strtol(value, &end, 10);
            return end;
        }
    if (n == 4 && memcmp(word, "fail", n) == 0)
        return rule_read(s->fail, value, true);
    if (n == 4 && memcmp(word, "lose", n) == 0)
        return rule_read(s->lose, value, false);
    broken("unknown word in its settings");
}

void settings_read(struct settings *s, const char *text)
{
    char *copy = strdup(text), *at = copy;
    while (copy && *(at += strspn(at, " "))) {
        size_t n = strcspn(at, "=");
        if (at[n] != '=')
            broken("settings are words like seed=7");
        at = word_read(s, at, n, at + n + 1);
        if (*at && *at != ' ')
            broken("a setting's value is not a number");
    }
    free(copy);
    if (s->devices < 0 || s->devices > STANDIN_DEVICES_MAX)
        broken("it has 0 to 8 devices");
}

static void from_environment(void)
{
    const char *text = getenv("LARDER_STANDIN");
    settings_defaults(&world.set);
    if (text)
        settings_read(&world.set, text);
    world.random = world.set.seed;
    for (int i = 0; i < STANDIN_DEVICES_MAX; i++)
        world.primary[i].ordinal = i;
}

static void load(void)
{
    pthread_condattr_t a;
    pthread_condattr_init(&a);
    pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
    pthread_cond_init(&world.changed, &a);
    pthread_condattr_destroy(&a);
    from_environment();
}

/* ---- every call ---- */

/* Calls that go on working in a lost context. */
static bool survives(enum call which)
{
    switch (which) {
    case CALL_cuInit:
    case CALL_cuDriverGetVersion:
    case CALL_cuGetErrorName:
    case CALL_cuGetErrorString:
    case CALL_cuDeviceGetCount:
    case CALL_cuDeviceGet:
    case CALL_cuDeviceGetName:
    case CALL_cuDeviceGetAttribute:
    case CALL_cuDeviceTotalMem_v2:
    case CALL_cuDevicePrimaryCtxRetain:
    case CALL_cuDevicePrimaryCtxRelease_v2:
    case CALL_cuDevicePrimaryCtxReset_v2:
    case CALL_cuCtxPushCurrent_v2:
    case CALL_cuCtxPopCurrent_v2:
    case CALL_cuCtxSetCurrent:
    case CALL_cuCtxGetCurrent:
    case CALL_cuThreadExchangeStreamCaptureMode:
    case CALL_cuPointerGetAttributes: return true;
    default: return false;
    }
}

/* While any stream captures, unless the thread's mode is relaxed. */
static bool captures_forbid(enum call which)
{
    return which == CALL_cuEventQuery || which == CALL_cuMemAlloc_v2 || which == CALL_cuMemFree_v2 ||
           which == CALL_cuMemHostRegister_v2 || which == CALL_cuMemHostUnregister ||
           which == CALL_cuModuleLoadDataEx || which == CALL_cuStreamSynchronize;
}

static bool needs_init(enum call which)
{
    return which != CALL_cuInit && which != CALL_cuDriverGetVersion && which != CALL_cuGetErrorName &&
           which != CALL_cuGetErrorString;
}

static cu_result rule_says(enum call which)
{
    for (size_t i = 0; i < RULES_MAX; i++) {
        struct rule *r = &world.set.fail[i];
        if (!r->on || r->which != (int)which)
            continue;
        if (r->always || --r->left == 0) {
            r->on = r->always;
            return r->code;
        }
    }
    return CU_OK;
}

cu_result begin(enum call which)
{
    pthread_once(&once, load);
    pthread_mutex_lock(&world.lock);
    cu_result code = rule_says(which);
    if (code != CU_OK)
        return code;
    if (needs_init(which) && !world.initialised)
        return CU_NOT_INITIALIZED;
    if (captures_forbid(which) && capture_disturbed())
        return CU_STREAM_CAPTURE_UNSUPPORTED;
    if (!survives(which)) {
        cu_context c = current();
        if (!c)
            return CU_INVALID_CONTEXT;
        return c->lost;
    }
    return CU_OK;
}

cu_result finish(cu_result code)
{
    pthread_mutex_unlock(&world.lock);
    return code;
}

/* ---- what tests call ---- */

#define STANDIN_DECLARE(symbol, result, parameters) \
    __attribute__((visibility("default"))) result symbol parameters;
STANDIN_CALLS(STANDIN_DECLARE)

void standin_configure(const char *text)
{
    pthread_once(&once, load);
    pthread_mutex_lock(&world.lock);
    settings_read(&world.set, text);
    world.random = world.set.seed;
    pthread_mutex_unlock(&world.lock);
}

void standin_counts(struct standin_counts *out)
{
    pthread_once(&once, load);
    pthread_mutex_lock(&world.lock);
    *out = world.counts;
    pthread_mutex_unlock(&world.lock);
}

void standin_reset(void)
{
    pthread_once(&once, load);
    pthread_mutex_lock(&world.lock);
    for (int i = 0; i < STANDIN_DEVICES_MAX; i++)
        if (world.primary[i].retained > 0)
            broken("reset while a device is open");
    while (world.others) {
        cu_context c = world.others;
        world.others = c->next;
        context_end(c);
        free(c);
    }
    memset(&world.counts, 0, sizeof world.counts);
    from_environment();
    pthread_mutex_unlock(&world.lock);
}

void standin_hold(cu_stream handle)
{
    pthread_mutex_lock(&world.lock);
    cu_stream s = stream_of(handle);
    if (!s)
        broken("no such stream to hold");
    struct op *o = calloc(1, sizeof *o);
    o->kind = OP_HOLD;
    o->wait_for = ++s->holds;
    stream_give(s, o);
    pthread_mutex_unlock(&world.lock);
}

void standin_release(cu_stream handle)
{
    pthread_mutex_lock(&world.lock);
    cu_stream s = stream_of(handle);
    if (!s)
        broken("no such stream to release");
    s->released++;
    pthread_cond_broadcast(&world.changed);
    pthread_mutex_unlock(&world.lock);
}

cu_context standin_context(int ordinal)
{
    pthread_once(&once, load);
    pthread_mutex_lock(&world.lock);
    cu_context c = calloc(1, sizeof *c);
    c->ordinal = ordinal;
    c->next = world.others;
    world.others = c;
    world.counts.contexts++;
    pthread_mutex_unlock(&world.lock);
    return c;
}

bool standin_capture(cu_stream handle, bool begins)
{
    pthread_mutex_lock(&world.lock);
    cu_stream s = stream_of(handle);
    if (!s || s->capturing == begins)
        broken("no such stream to capture on, or not the right time");
    bool undisturbed = !s->disturbed;
    s->capturing = begins;
    s->disturbed = false;
    world.captures += begins ? 1 : -(size_t)1;
    pthread_mutex_unlock(&world.lock);
    return undisturbed;
}

void *standin_peek(const void *device)
{
    pthread_mutex_lock(&world.lock);
    struct range *r = range_of(device);
    void *p = r && r->kind == RANGE_DEVICE ? r->peek + ((const uint8_t *)device - r->base) : NULL;
    pthread_mutex_unlock(&world.lock);
    return p;
}

void standin_pooled(const void *device)
{
    pthread_mutex_lock(&world.lock);
    struct range *r = range_of(device);
    if (!r || r->kind != RANGE_DEVICE)
        broken("no such device memory");
    r->context = NULL;
    pthread_mutex_unlock(&world.lock);
}
