/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/cufile/cufile.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpudirect/cuda.h"

#define EXPORT                              __attribute__((visibility("default")))
#define DECLARE(symbol, result, parameters) EXPORT result symbol parameters;
CUFILE_CALLS(DECLARE)
STANDIN_CUFILE_CALLS(DECLARE)

enum call { OPEN, PROPERTIES, REGISTER, READ, WRITE, CALLS };
static const char *const names[CALLS] = {"open", "properties", "register", "read", "write"};

struct known {
    struct known *next;
    int fd; /* of its own: without direct I/O, which would ask for aligned memory */
    bool direct;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool loaded, opened;
static long nvfs, compatible, kinds, p2p, most;
static struct {
    uint64_t left; /* 0: none */
    int code;
} rules[CALLS];
static struct known *files;
static struct standin_cufile_counts counts;

__attribute__((noreturn)) static void broken(const char *what)
{
    fprintf(stderr, "the stand-in for cuFile: %s\n", what);
    abort();
}

/* ---- settings ---- */

static void rule_read(const char *value)
{
    for (int i = 0; i < CALLS; i++) {
        size_t n = strlen(names[i]);
        if (strncmp(value, names[i], n) != 0 || value[n] != ':')
            continue;
        char *end;
        rules[i].left = strtoull(value + n + 1, &end, 10);
        rules[i].code = *end == ':' ? atoi(end + 1) : 0;
        if (rules[i].code <= 0)
            broken("fail= takes CALL:N:CODE");
        return;
    }
    broken("fail= names a call that it does not have");
}

static void settings_read(const char *text)
{
    struct {
        const char *word;
        long *to;
    } words[] = {{"nvfs=", &nvfs},
                 {"compatible=", &compatible},
                 {"kinds=", &kinds},
                 {"p2p=", &p2p},
                 {"short=", &most}};
    char *copy = strdup(text), *save = NULL;
    for (char *w = strtok_r(copy, " ", &save); w; w = strtok_r(NULL, " ", &save)) {
        bool found = strncmp(w, "fail=", 5) == 0;
        if (found)
            rule_read(w + 5);
        for (size_t i = 0; i < sizeof words / sizeof words[0] && !found; i++)
            if (strncmp(w, words[i].word, strlen(words[i].word)) == 0) {
                *words[i].to = atol(w + strlen(words[i].word));
                found = true;
            }
        if (!found)
            broken("unknown word in its settings");
    }
    free(copy);
}

static void load(void)
{
    const char *text = getenv("LARDER_STANDIN_CUFILE");
    if (loaded)
        return;
    loaded = true;
    nvfs = 226;
    compatible = 1;
    kinds = -1;
    if (text)
        settings_read(text);
}

/* With the lock held: the code that a rule has for this call, or 0. */
static int rule_says(enum call which)
{
    load();
    return rules[which].left > 0 && --rules[which].left == 0 ? rules[which].code : 0;
}

void standin_cufile_configure(const char *text)
{
    pthread_mutex_lock(&lock);
    load();
    settings_read(text);
    pthread_mutex_unlock(&lock);
}

void standin_cufile_counts(struct standin_cufile_counts *out)
{
    pthread_mutex_lock(&lock);
    *out = counts;
    pthread_mutex_unlock(&lock);
}

/* ---- the driver's stand-in ---- */

static void *symbol_of_cuda(const char *name)
{
    void *library = dlopen(CUDA_LIBRARY, RTLD_NOW | RTLD_NOLOAD);
    void *found = library ? dlsym(library, name) : NULL;
    if (library)
        dlclose(library); /* it stays: others hold it */
    if (!found)
        broken("the stand-in for CUDA's driver is not loaded");
    return found;
}

static bool in_context(void)
{
    cu_result (*get)(cu_context *);
    cu_context c = NULL;
    *(void **)&get = symbol_of_cuda("cuCtxGetCurrent");
    return get(&c) == CU_OK && c;
}

/* Where [p, p + n) of device memory can be touched; NULL: it is not all of one allocation. */
static uint8_t *touchable(const void *p, size_t n)
{
    void *(*peek)(const void *);
    *(void **)&peek = symbol_of_cuda("standin_peek");
    uint8_t *first = peek(p), *last = peek((const uint8_t *)p + n - 1);
    return first && last == first + n - 1 ? first : NULL;
}

/* ---- calls ---- */

static struct cufile_result result(int code)
{
    return (struct cufile_result){.code = code};
}

struct cufile_result cuFileDriverOpen(void)
{
    pthread_mutex_lock(&lock);
    int code = rule_says(OPEN);
    if (code == 0 && !in_context())
        code = CUFILE_CONTEXT;
    if (code == 0 && nvfs == 0 && !p2p && !compatible)
        code = CUFILE_NOT_INITIALIZED;
    opened = code == 0;
    pthread_mutex_unlock(&lock);
    return result(code);
}

struct cufile_result cuFileDriverGetProperties(struct cufile_properties *p)
{
    pthread_mutex_lock(&lock);
    int code = rule_says(PROPERTIES);
    *p = (struct cufile_properties){
        .driver = {.major = (unsigned)nvfs / 100,
                   .minor = (unsigned)nvfs % 100,
                   .kinds = nvfs ? (unsigned)kinds & ~(1u << CUFILE_KIND_NVME_P2P) : 0,
                   .controls = (unsigned)compatible << CUFILE_CONTROL_COMPATIBLE},
        .features = (unsigned)p2p << CUFILE_FEATURE_P2P};
    pthread_mutex_unlock(&lock);
    return result(code);
}

struct cufile_result cuFileHandleRegister(cufile_handle *handle, struct cufile_description *d)
{
    char path[64];
    pthread_mutex_lock(&lock);
    int code = rule_says(REGISTER);
    if (code == 0 && !opened)
        code = CUFILE_NOT_INITIALIZED;
    if (code == 0 && d->type != CUFILE_TYPE_FD)
        code = CUFILE_VALUE;
    bool direct = (nvfs || p2p) && fcntl(d->handle.fd, F_GETFL) & O_DIRECT;
    if (code == 0 && !direct && !compatible)
        code = CUFILE_NO_DIRECT;
    struct known *f = code == 0 ? calloc(1, sizeof *f) : NULL;
    if (f) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", d->handle.fd);
        f->direct = direct;
        f->fd = open(path, (fcntl(d->handle.fd, F_GETFL) & O_ACCMODE) | O_CLOEXEC);
        if (f->fd < 0)
            broken("a file could not be opened again");
        f->next = files;
        files = f;
        counts.files++;
        *handle = f;
    }
    pthread_mutex_unlock(&lock);
    return result(code);
}

/* With the lock held: where the handle stands in the list. */
static struct known **place_of(cufile_handle handle)
{
    struct known **at = &files;
    while (*at && *at != handle)
        at = &(*at)->next;
    if (!*at)
        broken("a file that it does not know");
    return at;
}

void cuFileHandleDeregister(cufile_handle handle)
{
    pthread_mutex_lock(&lock);
    struct known **at = place_of(handle), *f = *at;
    *at = f->next;
    counts.files--;
    close(f->fd);
    free(f);
    pthread_mutex_unlock(&lock);
}

/* Negative codes of the library; -1 with errno for the system's. */
static ssize_t move(enum call which, cufile_handle handle, const void *base, size_t n, off_t file_offset,
                    off_t base_offset)
{
    pthread_mutex_lock(&lock);
    struct known *f = *place_of(handle);
    int code = rule_says(which);
    if (code == 0 && !in_context())
        code = CUFILE_CONTEXT;
    uint8_t *p = n > 0 ? touchable((const uint8_t *)base + base_offset, n) : NULL;
    if (code == 0 && n > 0 && !p)
        code = CUFILE_POINTER;
    if (most > 0 && n > (size_t)most)
        n = (size_t)most;
    counts.compatible += !f->direct;
    int fd = f->fd;
    pthread_mutex_unlock(&lock);
    if (code != 0) {
        errno = code;
        return code < 4096 ? -1 : -(ssize_t)code;
    }
    ssize_t done = which == READ ? pread(fd, p, n, file_offset) : pwrite(fd, p, n, file_offset);
    pthread_mutex_lock(&lock);
    if (which == READ) {
        counts.reads++;
        counts.read_bytes += done > 0 ? (uint64_t)done : 0;
    } else {
        counts.writes++;
        counts.written_bytes += done > 0 ? (uint64_t)done : 0;
    }
    pthread_mutex_unlock(&lock);
    return done;
}

ssize_t cuFileRead(cufile_handle handle, void *base, size_t n, off_t file_offset, off_t base_offset)
{
    return move(READ, handle, base, n, file_offset, base_offset);
}

ssize_t cuFileWrite(cufile_handle handle, const void *base, size_t n, off_t file_offset, off_t base_offset)
{
    return move(WRITE, handle, base, n, file_offset, base_offset);
}
