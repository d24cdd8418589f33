/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/scarce.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <zstd.h>

#include "format/base/err.h"

#define FRAMES_MAX 12
#define SLOTS      (1u << 18) /* open addressing; a test that takes more at once is too large */

struct slot {
    const void *p;    /* NULL: never used; GONE: given back */
    size_t n, caller; /* from where the program begins, as addr2line wants it */
};

struct state {
    pthread_mutex_t lock;
    bool on, watching;
    uint64_t calls, fails_at;
    bool (*counts_now)(void);
    char failed[1024];
    struct slot slots[SLOTS];
    size_t held, marks;
};

extern const char __executable_start;

#define GONE ((const void *)1)

static struct state own = {.lock = PTHREAD_MUTEX_INITIALIZER};
static struct state *mine = &own;  /* of what this process calls */
static struct state *asked = &own; /* that the test speaks of */

static struct state *attach(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    check(fd >= 0 && ftruncate(fd, sizeof(struct state)) == 0);
    struct state *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    check(s != MAP_FAILED);
    close(fd);
    return s;
}

static __attribute__((constructor)) void begin_elsewhere(void)
{
    const char *path = getenv(SCARCE_ENVIRONMENT);
    if (path)
        mine = attach(path);
}

void scarce_of_another(const char *path)
{
    pthread_mutexattr_t shared;
    asked = attach(path);
    pthread_mutexattr_init(&shared);
    pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&asked->lock, &shared);
    pthread_mutexattr_destroy(&shared);
}

void scarce_begin(uint64_t fail_at, bool (*counts)(void))
{
    pthread_mutex_lock(&asked->lock);
    asked->calls = 0;
    asked->fails_at = fail_at;
    asked->counts_now = counts;
    asked->failed[0] = 0;
    asked->on = true;
    pthread_mutex_unlock(&asked->lock);
}

uint64_t scarce_end(void)
{
    pthread_mutex_lock(&asked->lock);
    asked->on = false;
    uint64_t n = asked->calls;
    pthread_mutex_unlock(&asked->lock);
    return n;
}

const char *scarce_failed(void)
{
    return asked->failed;
}

/* "program+0x12ab" */
static int place(char *out, size_t size, const void *address)
{
    Dl_info i;
    if (!dladdr(address, &i) || !i.dli_fname)
        return snprintf(out, size, " %p", address);
    const char *name = strrchr(i.dli_fname, '/');
    return snprintf(out, size, " %s+0x%zx", name ? name + 1 : i.dli_fname,
                    (size_t)((const char *)address - (const char *)i.dli_fbase) - 1);
}

static void describe_call(struct state *s, const char *function)
{
    void *frames[FRAMES_MAX];
    int n = backtrace(frames, FRAMES_MAX);
    int at = snprintf(s->failed, sizeof s->failed, "%s from", function);
    for (int i = 3; i < n && at + 200 < (int)sizeof s->failed; i++)
        at += place(s->failed + at, sizeof s->failed - (size_t)at, frames[i]);
}

/* Does this call fail? */
static __attribute__((noinline)) bool fails(const char *function)
{
    struct state *s = mine;
    bool now = false;
    pthread_mutex_lock(&s->lock);
    if (s->on && (!s->counts_now || s->counts_now()))
        now = ++s->calls == s->fails_at;
    if (now)
        describe_call(s, function);
    pthread_mutex_unlock(&s->lock);
    if (now)
        errno = ENOMEM;
    return now;
}

/* ---- what is held ---- */

static size_t slot_of(const void *p)
{
    return ((uintptr_t)p >> 4) * 0x9e3779b97f4a7c15u >> 46;
}

static void *took(void *p, size_t n, const void *caller)
{
    struct state *s = mine;
    if (!p || !s->watching || (s->counts_now && !s->counts_now()))
        return p;
    pthread_mutex_lock(&s->lock);
    check(s->marks < SLOTS / 2);
    size_t i = slot_of(p);
    while (s->slots[i].p && s->slots[i].p != GONE && s->slots[i].p != p)
        i = (i + 1) % SLOTS;
    s->marks += !s->slots[i].p;
    s->held += s->slots[i].p != p; /* else it was given back past this file */
    s->slots[i] =
        (struct slot){.p = p, .n = n, .caller = (size_t)((const char *)caller - &__executable_start) - 1};
    pthread_mutex_unlock(&s->lock);
    return p;
}

static void gave(const void *p)
{
    struct state *s = mine;
    if (!p || !s->watching)
        return;
    pthread_mutex_lock(&s->lock);
    size_t i = slot_of(p);
    while (s->slots[i].p && s->slots[i].p != p)
        i = (i + 1) % SLOTS;
    if (s->slots[i].p) {
        s->slots[i].p = GONE;
        s->held--;
    }
    pthread_mutex_unlock(&s->lock);
}

void scarce_watch(void)
{
    pthread_mutex_lock(&asked->lock);
    if (asked->held || asked->marks > SLOTS / 4)
        memset(asked->slots, 0, sizeof asked->slots), asked->marks = 0;
    asked->watching = true;
    asked->held = 0;
    pthread_mutex_unlock(&asked->lock);
}

size_t scarce_held(void)
{
    return asked->held;
}

void scarce_describe(char *out, size_t size)
{
    pthread_mutex_lock(&asked->lock);
    out[0] = 0;
    for (size_t i = 0; asked->held && i < SLOTS && !out[0]; i++)
        if (asked->slots[i].p && asked->slots[i].p != GONE)
            snprintf(out, size, "%zu bytes, taken at 0x%zx", asked->slots[i].n, asked->slots[i].caller);
    pthread_mutex_unlock(&asked->lock);
}

/* ---- what the code under test calls instead ---- */

#define STAND_IN __attribute__((visibility("hidden"), noinline))
#define CALLER   __builtin_return_address(0)

void *scarce_malloc(size_t n);
void *scarce_calloc(size_t count, size_t n);
void *scarce_realloc(void *p, size_t n);
void *scarce_reallocarray(void *p, size_t count, size_t n);
void *scarce_aligned_alloc(size_t align, size_t n);
int scarce_posix_memalign(void **out, size_t align, size_t n);
char *scarce_strdup(const char *s);
char *scarce_strndup(const char *s, size_t n);
int scarce___asprintf_chk(char **out, int flag, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
int scarce_asprintf(char **out, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void *scarce_mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset);
DIR *scarce_opendir(const char *path);
int scarce_pthread_create(pthread_t *out, const pthread_attr_t *a, void *(*run)(void *), void *arg);
EVP_MD_CTX *scarce_EVP_MD_CTX_new(void);
EVP_CIPHER_CTX *scarce_EVP_CIPHER_CTX_new(void);
SSL *scarce_SSL_new(SSL_CTX *c);
BIO *scarce_BIO_new(const BIO_METHOD *m);
ZSTD_CCtx *scarce_ZSTD_createCCtx(void);
ZSTD_DCtx *scarce_ZSTD_createDCtx(void);

STAND_IN void scarce_free(void *p)
{
    gave(p);
    free(p);
}

STAND_IN void *scarce_malloc(size_t n)
{
    return fails("malloc") ? NULL : took(malloc(n), n, CALLER);
}

STAND_IN void *scarce_calloc(size_t count, size_t n)
{
    return fails("calloc") ? NULL : took(calloc(count, n), count * n, CALLER);
}

static void *moved(void *p, size_t n, const void *caller)
{
    gave(p); /* before another thread can be given the place */
    void *now = realloc(p, n);
    took(now ? now : p, n, caller);
    return now;
}

STAND_IN void *scarce_realloc(void *p, size_t n)
{
    return fails("realloc") ? NULL : moved(p, n, CALLER);
}

STAND_IN void *scarce_reallocarray(void *p, size_t count, size_t n)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, n, &bytes) || fails("reallocarray"))
        return NULL;
    return moved(p, bytes, CALLER);
}

STAND_IN void *scarce_aligned_alloc(size_t align, size_t n)
{
    return fails("aligned_alloc") ? NULL : took(aligned_alloc(align, n), n, CALLER);
}

STAND_IN int scarce_posix_memalign(void **out, size_t align, size_t n)
{
    int rc = fails("posix_memalign") ? ENOMEM : posix_memalign(out, align, n);
    if (rc == 0)
        took(*out, n, CALLER);
    return rc;
}

STAND_IN char *scarce_strdup(const char *s)
{
    return fails("strdup") ? NULL : took(strdup(s), strlen(s) + 1, CALLER);
}

STAND_IN char *scarce_strndup(const char *s, size_t n)
{
    return fails("strndup") ? NULL : took(strndup(s, n), n + 1, CALLER);
}

static int printed(char **out, const char *fmt, va_list ap, const void *caller)
{
    int n = fails("asprintf") ? -1 : vasprintf(out, fmt, ap);
    if (n >= 0)
        took(*out, (size_t)n + 1, caller);
    return n;
}

STAND_IN int scarce_asprintf(char **out, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = printed(out, fmt, ap, CALLER);
    va_end(ap);
    return n;
}

STAND_IN int scarce___asprintf_chk(char **out, int flag, const char *fmt, ...)
{
    va_list ap;
    (void)flag;
    va_start(ap, fmt);
    int n = printed(out, fmt, ap, CALLER);
    va_end(ap);
    return n;
}

STAND_IN void *scarce_mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset)
{
    return fails("mmap") ? MAP_FAILED : mmap(at, n, protection, flags, fd, offset);
}

STAND_IN DIR *scarce_opendir(const char *path)
{
    return fails("opendir") ? NULL : opendir(path);
}

STAND_IN int scarce_pthread_create(pthread_t *out, const pthread_attr_t *a, void *(*run)(void *), void *arg)
{
    return fails("pthread_create") ? EAGAIN : pthread_create(out, a, run, arg);
}

STAND_IN EVP_MD_CTX *scarce_EVP_MD_CTX_new(void)
{
    return fails("EVP_MD_CTX_new") ? NULL : EVP_MD_CTX_new();
}

STAND_IN EVP_CIPHER_CTX *scarce_EVP_CIPHER_CTX_new(void)
{
    return fails("EVP_CIPHER_CTX_new") ? NULL : EVP_CIPHER_CTX_new();
}

STAND_IN SSL *scarce_SSL_new(SSL_CTX *c)
{
    return fails("SSL_new") ? NULL : SSL_new(c);
}

STAND_IN BIO *scarce_BIO_new(const BIO_METHOD *m)
{
    return fails("BIO_new") ? NULL : BIO_new(m);
}

STAND_IN ZSTD_CCtx *scarce_ZSTD_createCCtx(void)
{
    return fails("ZSTD_createCCtx") ? NULL : ZSTD_createCCtx();
}

STAND_IN ZSTD_DCtx *scarce_ZSTD_createDCtx(void)
{
    return fails("ZSTD_createDCtx") ? NULL : ZSTD_createDCtx();
}
