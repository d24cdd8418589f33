/* SPDX-License-Identifier: Apache-2.0 */
#include "gpudirect/cufile.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>

struct calls {
#define CUFILE_CALL_MEMBER(symbol, result, parameters) result(*symbol) parameters;
    CUFILE_CALLS(CUFILE_CALL_MEMBER)
};

struct cufile {
    struct memory *m;
    cufile_handle handle;
    char path[240];
};

static pthread_once_t loaded = PTHREAD_ONCE_INIT;
static struct calls lib;             /* after loaded */
static struct cufile_probe found;    /* likewise */
static struct cufile_properties has; /* likewise */
static struct memory *held;          /* keeps the context that the library was started in */

/* ---- errors ---- */

static const struct meaning {
    int code;
    enum err_class class;
    const char *text;
} meanings[] = {
    {CUFILE_NOT_INITIALIZED, ERR_UNSUPPORTED,
     "nvidia-fs is not loaded, and cufile.json forbids compatibility mode; load nvidia-fs, or set "
     "allow_compat_mode"},
    {CUFILE_PLATFORM, ERR_UNSUPPORTED, "this platform has no GPUDirect Storage"},
    {CUFILE_FILE, ERR_UNSUPPORTED, "not with this file or its file system"},
    {CUFILE_DEVICE, ERR_UNSUPPORTED, "not with this GPU"},
    {CUFILE_CUDA, ERR_IO, "CUDA failed"},
    {CUFILE_POINTER, ERR_INVALID, "the address is not device memory"},
    {CUFILE_CONTEXT, ERR_INVALID, "the memory belongs to another context"},
    {CUFILE_NO_DIRECT, ERR_UNSUPPORTED, "the file is not open for direct I/O"},
    {CUFILE_VALUE, ERR_INVALID, "an argument is not what cuFile allows"},
    {CUFILE_DENIED, ERR_DENIED, "the driver or the file may not be used"},
    {CUFILE_PINNING, ERR_NO_MEMORY, "device memory could not be pinned for the storage"},
};

static const struct meaning *meaning_of(int code)
{
    static const struct meaning other = {0, ERR_IO, "look it up in cufile.h"};
    for (size_t i = 0; i < sizeof meanings / sizeof meanings[0]; i++)
        if (meanings[i].code == code)
            return &meanings[i];
    return &other;
}

static int fail(struct cufile_result r, struct err *e, const char *what)
{
    const struct meaning *m = meaning_of(r.code);
    if (r.code == CUFILE_CUDA)
        return err_set(e, m->class, "%s: cuFile says %d, CUDA says %d", what, r.code, r.cuda_code);
    return err_set(e, m->class, "%s: cuFile says %d: %s", what, r.code, m->text);
}

/* ---- the library ---- */

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(found.note, sizeof found.note, format, args);
    va_end(args);
}

static const char *find_symbols(void *library)
{
#define CUFILE_CALL_FIND(symbol, result, parameters)        \
    if (!(*(void **)&lib.symbol = dlsym(library, #symbol))) \
        return #symbol;
    CUFILE_CALLS(CUFILE_CALL_FIND)
    return NULL;
}

static bool bit(unsigned bits, unsigned number)
{
    return bits >> number & 1;
}

/* In a context of the first device, which cuFile needs to look at GPUs. */
static int start(void *arg, struct err *e)
{
    (void)arg;
    struct cufile_result r = lib.cuFileDriverOpen();
    if (r.code != 0)
        return fail(r, e, "opening its driver");
    r = lib.cuFileDriverGetProperties(&has);
    return r.code != 0 ? fail(r, e, "asking for its properties") : 0;
}

/* PCI P2PDMA: storage and GPU reach each other without nvidia-fs, where kernel and storage allow it. */
static bool has_p2p(void)
{
    return bit(has.features, CUFILE_FEATURE_P2P) || bit(has.driver.kinds, CUFILE_KIND_NVME_P2P);
}

static void describe(void)
{
    bool driver = has.driver.major > 0 || has.driver.minor > 0, p2p = has_p2p();
    found.usable = true;
    found.compatible = !driver && !p2p;
    if (driver)
        note("with nvidia-fs %u.%u", has.driver.major, has.driver.minor);
    else if (p2p)
        note("without nvidia-fs; direct where kernel and storage allow PCI P2PDMA");
    else
        note("nvidia-fs is not loaded");
}

static void load(void)
{
    struct memory_probe cuda;
    struct err e;
    memory_probe(MEMORY_CUDA, &cuda);
    if (!cuda.usable) {
        note("cuFile needs CUDA, which cannot be used here");
        return;
    }
    void *library = dlopen(CUFILE_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        note("there is no cuFile here (%s); install libcufile (GPUDirect Storage)", dlerror());
        return;
    }
    const char *missing = find_symbols(library);
    if (missing) {
        note("%s lacks %s: it is too old, or damaged; install it again", CUFILE_LIBRARY, missing);
        return;
    }
    int rc = memory_open(MEMORY_CUDA, 0, &held, &e);
    if (rc == 0)
        rc = memory_call(held, start, NULL, &e);
    if (rc == 0) {
        describe();
        return;
    }
    note("cuFile does not start: %s", e.text);
    memory_close(held);
    held = NULL;
}

void cufile_probe(struct cufile_probe *out)
{
    pthread_once(&loaded, load);
    *out = found;
}

/* ---- files ---- */

/* File systems by the number that statfs gives; kinds are those that can lie under them. */
static const struct storage {
    uint32_t magic;
    const char *name;
    unsigned kinds; /* bits */
} storages[] = {
    {0xef53, "ext4", 1u << CUFILE_KIND_NVME | 1u << CUFILE_KIND_NVMEOF | 1u << CUFILE_KIND_SCSI},
    {0x58465342, "XFS", 1u << CUFILE_KIND_NVME | 1u << CUFILE_KIND_NVMEOF | 1u << CUFILE_KIND_SCSI},
    {0x6969, "NFS", 1u << CUFILE_KIND_NFS},
    {0x0bd00bd0, "Lustre", 1u << CUFILE_KIND_LUSTRE},
    {0x47504653, "GPFS", 1u << CUFILE_KIND_GPFS},
    {0x19830326, "BeeGFS", 1u << CUFILE_KIND_BEEGFS},
};

/* What speaks against the direct path, as far as it can be seen from here. */
static void find_path(struct cufile *f, int fd)
{
    static const char compatible[] = "cuFile, compatibility mode: ";
    struct statfs s;
    const struct storage *at = NULL;
    int flags = fcntl(fd, F_GETFL);
    uint32_t magic = fstatfs(fd, &s) == 0 ? (uint32_t)s.f_type : 0;
    for (size_t i = 0; i < sizeof storages / sizeof storages[0]; i++)
        if (storages[i].magic == magic)
            at = &storages[i];
    if (found.compatible)
        snprintf(f->path, sizeof f->path, "%s%.200s", compatible, found.note);
    else if (flags < 0 || !(flags & O_DIRECT))
        snprintf(f->path, sizeof f->path, "%sthe file system has no direct I/O", compatible);
    else if (!at)
        snprintf(f->path, sizeof f->path,
                 "cuFile, direct only if it knows file systems of type 0x%x, which larder cannot tell",
                 magic);
    else if (has_p2p() && !(has.driver.kinds & at->kinds))
        snprintf(f->path, sizeof f->path,
                 "cuFile, direct only if kernel and storage under %s allow PCI P2PDMA", at->name);
    else if (!(has.driver.kinds & at->kinds))
        snprintf(f->path, sizeof f->path, "%snvidia-fs was not set up for what lies under %s here",
                 compatible, at->name);
    else
        snprintf(f->path, sizeof f->path, "cuFile, direct");
}

struct opening {
    struct cufile *f;
    int fd;
};

static int open_file(void *arg, struct err *e)
{
    struct opening *o = arg;
    struct cufile_description d = {.type = CUFILE_TYPE_FD, .handle.fd = o->fd};
    struct cufile_result r = lib.cuFileHandleRegister(&o->f->handle, &d);
    return r.code != 0 ? fail(r, e, "making the file known to cuFile") : 0;
}

int cufile_open(struct memory *m, int fd, struct cufile **out, struct err *e)
{
    struct cufile_probe p;
    cufile_probe(&p);
    check(memory_kind(m) == MEMORY_CUDA);
    if (!p.usable)
        return err_set(e, ERR_UNSUPPORTED, "%s", p.note);
    struct cufile *f = calloc(1, sizeof *f);
    if (!f)
        return err_set(e, ERR_NO_MEMORY, "no memory for a file");
    f->m = m;
    find_path(f, fd);
    int rc = memory_call(m, open_file, &(struct opening){f, fd}, e);
    if (rc < 0) {
        free(f);
        return rc;
    }
    *out = f;
    return 0;
}

static int close_file(void *arg, struct err *e)
{
    struct cufile *f = arg;
    (void)e;
    lib.cuFileHandleDeregister(f->handle);
    return 0;
}

void cufile_close(struct cufile *f)
{
    struct err e;
    if (!f)
        return;
    if (memory_call(f->m, close_file, f, &e) < 0) /* a lost device: the handle must go all the same */
        (void)close_file(f, &e);
    free(f);
}

const char *cufile_path(const struct cufile *f)
{
    return f->path;
}

/* ---- bytes ---- */

struct transfer {
    struct cufile *f;
    uint64_t offset;
    size_t n;
    void *to;
    const void *from; /* of a write; else NULL */
    ssize_t done;
};

static int transfer(void *arg, struct err *e)
{
    struct transfer *t = arg;
    errno = 0;
    t->done = t->from ? lib.cuFileWrite(t->f->handle, t->from, t->n, (off_t)t->offset, 0)
                      : lib.cuFileRead(t->f->handle, t->to, t->n, (off_t)t->offset, 0);
    if (t->done >= 0)
        return 0;
    const char *what = t->from ? "writing from device memory" : "reading into device memory";
    if (t->done == -1) /* of the system, as errno tells */
        return err_sys(e, errno ? errno : EIO, "%s: cuFile", what);
    return fail((struct cufile_result){.code = (int)-t->done}, e, what);
}

static int64_t run(struct transfer *t, struct err *e)
{
    check(t->n > 0);
    int rc = memory_call(t->f->m, transfer, t, e);
    return rc < 0 ? rc : t->done;
}

int64_t cufile_read(struct cufile *f, uint64_t offset, size_t n, void *to, struct err *e)
{
    return run(&(struct transfer){.f = f, .offset = offset, .n = n, .to = to}, e);
}

int64_t cufile_write(struct cufile *f, uint64_t offset, size_t n, const void *from, struct err *e)
{
    return run(&(struct transfer){.f = f, .offset = offset, .n = n, .from = from}, e);
}
