/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CUDA as a kind of memory. The driver is loaded and initialised once per process, at the first question
 * about it, and stays. Every call happens with the device's primary context pushed, and with the thread's
 * capture mode relaxed: an event that is asked about here must not spoil a graph that another thread is
 * capturing.
 */
#include "gpudirect/cuda.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct calls {
#define CUDA_CALL_MEMBER(symbol, parameters) cu_result(*symbol) parameters;
    CUDA_CALLS(CUDA_CALL_MEMBER)
};

struct device {
    cu_context context;
    cu_device id;
    int ordinal, priority;
    size_t pitch_max;
};

/* What a thread had before a call of ours. */
struct before {
    cu_capture_mode mode;
};

static pthread_once_t loaded = PTHREAD_ONCE_INIT;
static struct calls cu;           /* after loaded */
static struct memory_probe found; /* likewise */

/* ---- errors ---- */

enum fate { KEPT, LOST }; /* of the context, by an error */

static const struct meaning {
    cu_result code;
    enum err_class class;
    enum fate fate;
    const char *advice;
} meanings[] = {
    {CU_INVALID_VALUE, ERR_INVALID, KEPT, "an argument is not what CUDA allows"},
    {CU_OUT_OF_MEMORY, ERR_NO_MEMORY, KEPT, "use less memory, or free some"},
    {CU_NOT_INITIALIZED, ERR_UNSUPPORTED, KEPT, "CUDA cannot be used after fork; open after forking"},
    {CU_DEINITIALIZED, ERR_IO, LOST, "the process is ending; close before it does"},
    {CU_STUB_LIBRARY, ERR_UNSUPPORTED, KEPT,
     "the library found is the toolkit's stub; install the NVIDIA driver"},
    {CU_DEVICE_UNAVAILABLE, ERR_BUSY, KEPT, "another process has the device for itself (compute mode)"},
    {CU_NO_DEVICE, ERR_UNSUPPORTED, KEPT, "look at nvidia-smi and CUDA_VISIBLE_DEVICES"},
    {CU_INVALID_DEVICE, ERR_NOT_FOUND, KEPT, "look at nvidia-smi and CUDA_VISIBLE_DEVICES"},
    {CU_INVALID_IMAGE, ERR_UNSUPPORTED, KEPT, "the kernels in this build are damaged"},
    {CU_INVALID_CONTEXT, ERR_INVALID, KEPT, "it belongs to another context"},
    {CU_NO_BINARY_FOR_GPU, ERR_UNSUPPORTED, KEPT, "this build has no kernels for this device"},
    {CU_ECC_UNCORRECTABLE, ERR_IO, LOST,
     "the device's memory has failed; restart the job elsewhere and have it checked"},
    {CU_INVALID_PTX, ERR_UNSUPPORTED, KEPT, "this driver cannot read the kernels; update it"},
    {CU_NVLINK_UNCORRECTABLE, ERR_IO, LOST,
     "NVLink has failed; restart the job elsewhere and have it checked"},
    {CU_JIT_COMPILER_NOT_FOUND, ERR_UNSUPPORTED, KEPT, "the driver's compiler is not installed"},
    {CU_UNSUPPORTED_PTX_VERSION, ERR_UNSUPPORTED, KEPT, "this driver cannot read the kernels; update it"},
    {CU_INVALID_HANDLE, ERR_INVALID, KEPT, "it belongs to another device or context, or is no more"},
    {CU_NOT_FOUND, ERR_NOT_FOUND, KEPT, "it is not there"},
    {CU_ILLEGAL_ADDRESS, ERR_IO, LOST, "some kernel or copy in this process used memory that is not there"},
    {CU_LAUNCH_OUT_OF_RESOURCES, ERR_LIMIT, KEPT, "the kernel needs more than this device has"},
    {CU_LAUNCH_TIMEOUT, ERR_IO, LOST, "a kernel ran longer than this device allows"},
    {CU_CONTEXT_IS_DESTROYED, ERR_IO, LOST,
     "someone in this process reset the device; nothing of it is left"},
    {CU_ASSERT, ERR_IO, LOST, "an assertion failed in a kernel of this process"},
    {CU_HOST_MEMORY_ALREADY_REGISTERED, ERR_EXISTS, KEPT, "it was registered before"},
    {CU_HOST_MEMORY_NOT_REGISTERED, ERR_INVALID, KEPT, "it was not registered"},
    {CU_HARDWARE_STACK_ERROR, ERR_IO, LOST, "some kernel in this process has failed"},
    {CU_ILLEGAL_INSTRUCTION, ERR_IO, LOST, "some kernel in this process has failed"},
    {CU_MISALIGNED_ADDRESS, ERR_IO, LOST, "some kernel in this process has failed"},
    {CU_INVALID_ADDRESS_SPACE, ERR_IO, LOST, "some kernel in this process has failed"},
    {CU_INVALID_PC, ERR_IO, LOST, "some kernel in this process has failed"},
    {CU_LAUNCH_FAILED, ERR_IO, LOST, "some kernel in this process has failed"},
    {CU_NOT_PERMITTED, ERR_DENIED, KEPT, "the system or the container forbids it"},
    {CU_NOT_SUPPORTED, ERR_UNSUPPORTED, KEPT, "this device, driver or system cannot do it"},
    {CU_SYSTEM_NOT_READY, ERR_UNSUPPORTED, KEPT, "start nvidia-fabricmanager, or wait for it"},
    {CU_SYSTEM_DRIVER_MISMATCH, ERR_UNSUPPORTED, KEPT,
     "the driver's library and kernel module differ in version; reboot, or mount the right library"},
    {CU_MPS_CLIENT_TERMINATED, ERR_IO, LOST, "another process under the same MPS server has failed"},
    {CU_STREAM_CAPTURE_UNSUPPORTED, ERR_INVALID, KEPT, "call it outside of the capture of a graph"},
    {CU_STREAM_CAPTURE_IMPLICIT, ERR_INVALID, KEPT,
     "the default stream cannot be used while a graph is captured; give the stream that you work on"},
    {CU_UNKNOWN, ERR_IO, LOST, "the device may have fallen off the bus; look at dmesg for NVRM: Xid"},
};

static const struct meaning *meaning_of(cu_result code)
{
    static const struct meaning other = {.class = ERR_IO, .advice = "look it up in CUDA's documentation"};
    for (size_t i = 0; i < sizeof meanings / sizeof *meanings; i++)
        if (meanings[i].code == code)
            return &meanings[i];
    return &other;
}

/* "pinning 4096 bytes: CUDA_ERROR_OUT_OF_MEMORY (out of memory); use less ...". what: the call, as a person
 * would put it. Returns 0 for CU_OK. */
__attribute__((format(printf, 3, 4))) static int fail(cu_result code, struct err *e, const char *what, ...)
{
    char doing[160];
    const char *name = NULL, *text = NULL;
    const struct meaning *m = meaning_of(code);
    va_list args;
    if (code == CU_OK)
        return 0;
    va_start(args, what);
    vsnprintf(doing, sizeof doing, what, args);
    va_end(args);
    if (cu.cuGetErrorName(code, &name) != CU_OK)
        name = NULL;
    if (cu.cuGetErrorString(code, &text) != CU_OK)
        text = NULL;
    int rc = err_set(e, m->class, "%s: %s (%d, %s); %s", doing, name ? name : "an unknown CUDA error", code,
                     text ? text : "no text", m->advice);
    if (m->fate == LOST) {
        e->errnum = ENODEV;
        rc = -ENODEV;
    }
    return rc;
}

/* ---- the driver ---- */

static void unusable(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void unusable(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(found.note, sizeof found.note, format, args);
    va_end(args);
}

static const char *find_symbols(void *library)
{
#define CUDA_CALL_FIND(symbol, parameters)                 \
    if (!(*(void **)&cu.symbol = dlsym(library, #symbol))) \
        return #symbol;
    CUDA_CALLS(CUDA_CALL_FIND)
    return NULL;
}

static bool find_version(void *library)
{
    cu_result (*version_of)(int *) = NULL;
    int version = 0;
    *(void **)&version_of = dlsym(library, "cuDriverGetVersion");
    if (!version_of || version_of(&version) != CU_OK) {
        unusable("%s does not tell its version; it is no CUDA driver, or a damaged one: install it again",
                 CUDA_LIBRARY);
        return false;
    }
    found.driver_version = version;
    if (version < CUDA_DRIVER_MIN)
        unusable("the NVIDIA driver is too old: it has CUDA %d.%d, and %d.%d is the least; update it (470 or "
                 "later)",
                 version / 1000, version % 1000 / 10, CUDA_DRIVER_MIN / 1000, CUDA_DRIVER_MIN % 1000 / 10);
    return version >= CUDA_DRIVER_MIN;
}

static bool start_driver(void)
{
    struct err e;
    cu_result code = cu.cuInit(0);
    if (code == CU_OK)
        code = cu.cuDeviceGetCount(&found.devices);
    if (code != CU_OK) {
        found.devices = 0;
        (void)fail(code, &e, "the NVIDIA driver is there, but it does not start");
        unusable("%s", e.text);
    } else if (found.devices == 0) {
        unusable(
            "the NVIDIA driver is there, but it sees no device; look at nvidia-smi and CUDA_VISIBLE_DEVICES");
    }
    return found.devices > 0;
}

static void load(void)
{
    void *library = dlopen(CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        unusable("there is no NVIDIA driver here (%s); with a GPU in this machine, install it, or give the "
                 "container its GPUs",
                 dlerror());
        return;
    }
    if (!find_version(library))
        return;
    const char *missing = find_symbols(library);
    if (missing) {
        unusable("the CUDA %d.%d driver lacks %s; it is damaged, or not NVIDIA's: install it again",
                 found.driver_version / 1000, found.driver_version % 1000 / 10, missing);
        return;
    }
    if (!start_driver())
        return;
    found.usable = true;
    unusable("CUDA %d.%d, %d device%s", found.driver_version / 1000, found.driver_version % 1000 / 10,
             found.devices, found.devices == 1 ? "" : "s");
}

static void probe(struct memory_probe *out)
{
    pthread_once(&loaded, load);
    *out = found;
}

/* ---- what a device is ---- */

static int attribute(cu_device id, cu_device_attribute which, int otherwise)
{
    int value;
    return cu.cuDeviceGetAttribute(&value, which, id) == CU_OK ? value : otherwise; /* older ones lack some */
}

/* The driver tells since 12.2; sysfs tells what the firmware says. */
static int numa_node(cu_device id, const char *bus)
{
    char path[64];
    int node = attribute(id, CU_ATTR_HOST_NUMA, -1);
    if (node >= 0)
        return node;
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", bus);
    FILE *f = fopen(path, "re");
    if (!f)
        return -1;
    if (fscanf(f, "%d", &node) != 1 || node < 0)
        node = -1;
    fclose(f);
    return node;
}

static int describe(int ordinal, struct memory_info *out, struct err *e)
{
    cu_device id;
    size_t bytes = 0;
    *out = (struct memory_info){.numa_node = -1};
    cu_result code = cu.cuDeviceGet(&id, ordinal);
    if (code == CU_OK)
        code = cu.cuDeviceGetName(out->name, sizeof out->name, id);
    if (code == CU_OK)
        code = cu.cuDeviceTotalMem_v2(&bytes, id);
    if (code != CU_OK)
        return fail(code, e, "asking for CUDA device %d", ordinal);
    out->bytes = bytes;
    out->major = attribute(id, CU_ATTR_MAJOR, 0);
    out->minor = attribute(id, CU_ATTR_MINOR, 0);
    snprintf(out->bus, sizeof out->bus, "%04x:%02x:%02x.0", attribute(id, CU_ATTR_PCI_DOMAIN, 0) & 0xffff,
             attribute(id, CU_ATTR_PCI_BUS, 0) & 0xff, attribute(id, CU_ATTR_PCI_DEVICE, 0) & 0xff);
    out->numa_node = numa_node(id, out->bus);
    return 0;
}

/* ---- contexts ---- */

static cu_result step_in(const struct device *d, struct before *b)
{
    cu_result code = cu.cuCtxPushCurrent_v2(d->context);
    if (code == CU_INVALID_CONTEXT) /* it is ours, so it was there */
        code = CU_CONTEXT_IS_DESTROYED;
    if (code != CU_OK)
        return code;
    b->mode = CU_CAPTURE_RELAXED;
    code = cu.cuThreadExchangeStreamCaptureMode(&b->mode);
    if (code != CU_OK) {
        cu_context ours;
        (void)cu.cuCtxPopCurrent_v2(&ours); /* the first failure is the one to tell */
    }
    return code;
}

/* Returns the first failure. */
static cu_result step_out(const struct before *b, cu_result code)
{
    cu_context ours;
    cu_capture_mode mode = b->mode;
    cu_result restored = cu.cuThreadExchangeStreamCaptureMode(&mode);
    cu_result popped = cu.cuCtxPopCurrent_v2(&ours);
    return code != CU_OK ? code : restored != CU_OK ? restored : popped;
}

/* One call, or several joined by a helper, within the device's context. */
#define WITHIN(device, call)                           \
    __extension__({                                    \
        struct before before_;                         \
        cu_result within_ = step_in(device, &before_); \
        if (within_ == CU_OK)                          \
            within_ = step_out(&before_, (call));      \
        within_;                                       \
    })

static int close_device(void *device, struct err *e)
{
    struct device *d = device;
    int rc = fail(cu.cuDevicePrimaryCtxRelease_v2(d->id), e, "closing CUDA device %d", d->ordinal);
    free(d);
    return rc;
}

static cu_result highest_priority(struct device *d)
{
    int least;
    return cu.cuCtxGetStreamPriorityRange(&least, &d->priority);
}

static int open_device(int ordinal, void **device, struct err *e)
{
    cu_device id;
    cu_result code = cu.cuDeviceGet(&id, ordinal);
    if (code == CU_OK && attribute(id, CU_ATTR_UNIFIED_ADDRESSING, 0) == 0)
        return err_set(e, ERR_UNSUPPORTED, "CUDA device %d has no unified addressing, which larder needs",
                       ordinal);
    struct device *d = calloc(1, sizeof *d);
    if (!d)
        return err_set(e, ERR_NO_MEMORY, "no memory to open a device");
    d->ordinal = ordinal;
    d->id = id;
    if (code == CU_OK)
        code = cu.cuDevicePrimaryCtxRetain(&d->context, id);
    if (code != CU_OK) {
        free(d);
        return fail(code, e, "opening CUDA device %d", ordinal);
    }
    d->pitch_max = (size_t)attribute(id, CU_ATTR_MAX_PITCH, INT32_MAX);
    code = WITHIN(d, highest_priority(d));
    if (code != CU_OK) {
        struct err second;
        (void)close_device(d, &second); /* the first failure is the one to tell */
        return fail(code, e, "opening CUDA device %d", ordinal);
    }
    *device = d;
    return 0;
}

/* ---- pointers ---- */

struct facts {
    cu_context context; /* NULL for memory from pools and virtual mappings, which no context owns */
    unsigned type, managed;
    int ordinal;
    cu_ptr start;
    size_t bytes;
};

static cu_result facts_of(const void *p, struct facts *f)
{
    cu_pointer_attribute which[] = {CU_POINTER_CONTEXT, CU_POINTER_TYPE,        CU_POINTER_MANAGED,
                                    CU_POINTER_ORDINAL, CU_POINTER_RANGE_START, CU_POINTER_RANGE_BYTES};
    void *where[] = {&f->context, &f->type, &f->managed, &f->ordinal, &f->start, &f->bytes};
    *f = (struct facts){0};
    return cu.cuPointerGetAttributes(sizeof which / sizeof *which, which, where, (cu_ptr)(uintptr_t)p);
}

static bool on_device(const struct facts *f)
{
    return f->type == CU_TYPE_DEVICE || f->managed != 0;
}

static int count_loads(struct dl_phdr_info *info, size_t size, void *out)
{
    (void)size;
    *(unsigned long long *)out = info->dlpi_adds;
    return 1;
}

/* Looking for the library takes long enough to matter for thousands of tensors: not again before others were
 * loaded. */
static bool in_use(void)
{
    static atomic_ullong loads_before; /* when it was looked for in vain */
    static _Atomic(void *) symbol;
    cu_result (*count_of)(int *) = NULL;
    unsigned long long loads = 0;
    int count;
    void *p = atomic_load(&symbol);
    if (!p) {
        (void)dl_iterate_phdr(count_loads, &loads);
        if (loads == atomic_load(&loads_before))
            return false;
        void *library = dlopen(CUDA_LIBRARY, RTLD_LAZY | RTLD_NOLOAD);
        p = library ? dlsym(library, "cuDeviceGetCount") : NULL;
        atomic_store(&symbol, p);
        if (!p)
            atomic_store(&loads_before, loads);
    }
    *(void **)&count_of = p;
    return count_of && count_of(&count) == CU_OK;
}

static int where(const void *p, struct memory_pointer *out, struct err *e)
{
    struct facts f;
    int rc = fail(facts_of(p, &f), e, "asking what %p points to", p);
    if (rc < 0)
        return rc;
    *out = (struct memory_pointer){.kind = on_device(&f) ? MEMORY_CUDA : MEMORY_HOST,
                                   .ordinal = f.type != 0 ? f.ordinal : 0,
                                   .registered = f.type == CU_TYPE_HOST && !f.managed,
                                   .managed = f.managed != 0};
    return 0;
}

static int check_facts(const struct device *d, const void *p, const struct facts *f, struct err *e)
{
    if (!on_device(f))
        return err_set(e, ERR_INVALID,
                       "%p is %s, not memory of CUDA device %d; say that it is on the host, or copy it "
                       "to the device first",
                       p, f->type == CU_TYPE_HOST ? "pinned host memory" : "plain host memory, or was freed",
                       d->ordinal);
    if (f->managed)
        return 0;
    if (f->ordinal != d->ordinal)
        return err_set(e, ERR_INVALID,
                       "%p is memory of CUDA device %d, not of device %d; name the right device", p,
                       f->ordinal, d->ordinal);
    if (f->context && f->context != d->context)
        return err_set(
            e, ERR_INVALID,
            "%p is memory of another context on CUDA device %d; larder works in the device's primary "
            "context, as the CUDA runtime does: allocate it there",
            p, d->ordinal);
    return 0;
}

static int check_range(void *device, const void *p, size_t n, struct err *e)
{
    const struct device *d = device;
    struct facts first, last;
    const uint8_t *end = (const uint8_t *)p + n;
    cu_result code = facts_of(p, &first);
    if (code == CU_OK)
        code = facts_of(end - 1, &last);
    if (code != CU_OK)
        return fail(code, e, "asking what %p points to", p);
    int rc = check_facts(d, p, &first, e);
    if (rc < 0)
        return rc;
    if (first.context && first.start + first.bytes < (cu_ptr)(uintptr_t)end)
        return err_set(e, ERR_INVALID,
                       "%zu bytes at %p reach beyond their allocation of %zu bytes on CUDA device %d", n, p,
                       first.bytes, d->ordinal);
    rc = check_facts(d, end - 1, &last, e);
    return rc < 0 ? err_prepend(e, "the last of %zu bytes at %p", n, p) : 0;
}

static cu_result free_bytes(size_t *left)
{
    size_t total;
    return cu.cuMemGetInfo_v2(left, &total);
}

static int alloc(void *device, size_t bytes, void **out, struct err *e)
{
    const struct device *d = device;
    cu_ptr p = 0;
    size_t left = 0;
    cu_result code = WITHIN(d, cu.cuMemAlloc_v2(&p, bytes));
    if (code == CU_OK) {
        *out = (void *)(uintptr_t)p; /* unified addressing */
        return 0;
    }
    if (code == CU_OUT_OF_MEMORY && WITHIN(d, free_bytes(&left)) == CU_OK)
        return fail(code, e, "taking %zu bytes on CUDA device %d, where %zu are free", bytes, d->ordinal,
                    left);
    return fail(code, e, "taking %zu bytes on CUDA device %d", bytes, d->ordinal);
}

static int free_memory(void *device, void *p, struct err *e)
{
    const struct device *d = device;
    return fail(WITHIN(d, cu.cuMemFree_v2((cu_ptr)(uintptr_t)p)), e, "freeing memory of CUDA device %d",
                d->ordinal);
}

static int reg(void *device, void *p, size_t bytes, struct err *e)
{
    const struct device *d = device;
    return fail(WITHIN(d, cu.cuMemHostRegister_v2(p, bytes, CU_REGISTER_PORTABLE)), e,
                "registering %zu bytes of host memory with CUDA", bytes);
}

static int unreg(void *device, void *p, struct err *e)
{
    const struct device *d = device;
    return fail(WITHIN(d, cu.cuMemHostUnregister(p)), e, "unregistering host memory from CUDA");
}

static size_t pitch_max(void *device)
{
    const struct device *d = device;
    return d->pitch_max;
}

/* ---- streams and events ---- */

static int stream_create(void *device, void **out, struct err *e)
{
    const struct device *d = device;
    cu_stream s = NULL;
    int rc = fail(WITHIN(d, cu.cuStreamCreateWithPriority(&s, CU_STREAM_FLAG_NON_BLOCKING, d->priority)), e,
                  "making a stream on CUDA device %d", d->ordinal);
    *out = s;
    return rc;
}

static int stream_destroy(void *device, void *stream, struct err *e)
{
    const struct device *d = device;
    return fail(WITHIN(d, cu.cuStreamDestroy_v2(stream)), e, "ending a stream on CUDA device %d", d->ordinal);
}

struct caller {
    cu_capture_status capturing;
    cu_context context;
};

static cu_result look_at_stream(cu_stream stream, struct caller *out)
{
    cu_result code = cu.cuStreamIsCapturing(stream, &out->capturing);
    return code == CU_OK ? cu.cuStreamGetCtx(stream, &out->context) : code;
}

static int stream_caller(void *device, void *stream, struct err *e)
{
    const struct device *d = device;
    struct caller c = {0};
    cu_result code = WITHIN(d, look_at_stream(stream, &c));
    if (code != CU_OK)
        return fail(code, e, "looking at the caller's stream %p on CUDA device %d", stream, d->ordinal);
    if (c.capturing != CU_CAPTURE_NONE)
        return err_set(
            e, ERR_INVALID,
            "the caller's stream %p is capturing a graph, and a save or feed is no part of one; call it "
            "before or after the capture",
            stream);
    if (c.context != d->context)
        return err_set(
            e, ERR_INVALID,
            "the caller's stream %p belongs to another device or context than CUDA device %d's primary "
            "one; give the stream of that device on which the tensors are made",
            stream, d->ordinal);
    return 0;
}

static int event_create(void *device, void **out, struct err *e)
{
    const struct device *d = device;
    cu_event v = NULL;
    int rc = fail(WITHIN(d, cu.cuEventCreate(&v, CU_EVENT_FLAG_NO_TIMING)), e,
                  "making an event on CUDA device %d", d->ordinal);
    *out = v;
    return rc;
}

static int event_destroy(void *device, void *event, struct err *e)
{
    const struct device *d = device;
    return fail(WITHIN(d, cu.cuEventDestroy_v2(event)), e, "ending an event on CUDA device %d", d->ordinal);
}

static int event_record(void *device, void *event, void *stream, struct err *e)
{
    const struct device *d = device;
    return fail(WITHIN(d, cu.cuEventRecord(event, stream)), e, "recording an event on CUDA device %d",
                d->ordinal);
}

static int event_query(void *device, void *event, struct err *e)
{
    const struct device *d = device;
    cu_result code = WITHIN(d, cu.cuEventQuery(event));
    if (code == CU_NOT_READY)
        return 0;
    return code == CU_OK ? 1 : fail(code, e, "waiting for CUDA device %d", d->ordinal);
}

static int stream_after(void *device, void *stream, void *event, struct err *e)
{
    const struct device *d = device;
    return fail(WITHIN(d, cu.cuStreamWaitEvent(stream, event, 0)), e,
                "making a stream of CUDA device %d wait for an event", d->ordinal);
}

/* ---- copies ---- */

static cu_result copy_dense(cu_stream s, enum memory_direction dir, void *to, const void *from, size_t n)
{
    if (dir == MEMORY_OUT)
        return cu.cuMemcpyDtoHAsync_v2(to, (cu_ptr)(uintptr_t)from, n, s);
    if (dir == MEMORY_IN)
        return cu.cuMemcpyHtoDAsync_v2((cu_ptr)(uintptr_t)to, from, n, s);
    return cu.cuMemcpyDtoDAsync_v2((cu_ptr)(uintptr_t)to, (cu_ptr)(uintptr_t)from, n, s);
}

static cu_result copy_rows(cu_stream s, enum memory_direction dir, const struct memory_box *b)
{
    struct cu_memcpy3d c = {
        .srcMemoryType = dir == MEMORY_IN ? CU_TYPE_HOST : CU_TYPE_DEVICE,
        .srcPitch = b->from_pitch,
        .srcHeight = b->slices > 1 ? b->from_slice / b->from_pitch : b->rows,
        .dstMemoryType = dir == MEMORY_OUT ? CU_TYPE_HOST : CU_TYPE_DEVICE,
        .dstPitch = b->to_pitch,
        .dstHeight = b->slices > 1 ? b->to_slice / b->to_pitch : b->rows,
        .WidthInBytes = b->row_bytes,
        .Height = b->rows,
        .Depth = b->slices,
    };
    if (dir == MEMORY_IN)
        c.srcHost = b->from;
    else
        c.srcDevice = (cu_ptr)(uintptr_t)b->from;
    if (dir == MEMORY_OUT)
        c.dstHost = b->to;
    else
        c.dstDevice = (cu_ptr)(uintptr_t)b->to;
    return cu.cuMemcpy3DAsync_v2(&c, s);
}

static int copy(void *device, void *stream, enum memory_direction dir, const struct memory_box *b,
                struct err *e)
{
    static const char *const words[] = {"from", "to", "within"};
    const struct device *d = device;
    cu_result code = b->rows == 1 ? WITHIN(d, copy_dense(stream, dir, b->to, b->from, b->row_bytes))
                                  : WITHIN(d, copy_rows(stream, dir, b));
    return fail(code, e, "copying %zu bytes %s CUDA device %d", b->row_bytes * b->rows * b->slices,
                words[dir], d->ordinal);
}

/* ---- other libraries ---- */

static int call(void *device, int (*f)(void *arg, struct err *e), void *arg, struct err *e)
{
    const struct device *d = device;
    struct before before;
    struct err second;
    int rc = fail(step_in(d, &before), e, "making the context of CUDA device %d current", d->ordinal);
    if (rc < 0)
        return rc;
    rc = f(arg, e);
    int after = fail(step_out(&before, CU_OK), &second, "making the caller's CUDA context current again");
    if (rc >= 0 && after < 0) {
        *e = second;
        rc = after;
    }
    return rc;
}

/* ---- kernels ---- */

#define LOG_BYTES 160 /* of what the driver's compiler has to say */

static int module_load(void *device, const void *image, void **out, struct err *e)
{
    const struct device *d = device;
    cu_module x = NULL;
    char log[LOG_BYTES] = "";
    cu_jit_option options[] = {CU_JIT_LOG, CU_JIT_LOG_BYTES};
    void *values[] = {log, (void *)(uintptr_t)(sizeof log - 1)};
    cu_result code = WITHIN(d, cu.cuModuleLoadDataEx(&x, image, 2, options, values));
    log[strcspn(log, "\n")] = '\0';
    *out = x;
    return fail(code, e, "loading kernels on CUDA device %d%s%s", d->ordinal, *log ? ": " : "", log);
}

static int module_unload(void *device, void *module, struct err *e)
{
    const struct device *d = device;
    return fail(WITHIN(d, cu.cuModuleUnload(module)), e, "unloading kernels from CUDA device %d", d->ordinal);
}

static int module_function(void *device, void *module, const char *name, void **out, struct err *e)
{
    const struct device *d = device;
    cu_function f = NULL;
    int rc = fail(WITHIN(d, cu.cuModuleGetFunction(&f, module, name)), e, "looking for kernel %s", name);
    *out = f;
    return rc;
}

static int launch(void *device, void *stream, void *function, const struct memory_launch *l, void **arguments,
                  struct err *e)
{
    const struct device *d = device;
    cu_result code =
        WITHIN(d, cu.cuLaunchKernel(function, l->grid[0], l->grid[1], l->grid[2], l->block[0], l->block[1],
                                    l->block[2], l->shared_bytes, stream, arguments, NULL));
    return fail(code, e, "starting a kernel of %u x %u threads on CUDA device %d", l->grid[0], l->block[0],
                d->ordinal);
}

const struct memory_ops memory_cuda_ops = {
    .name = "CUDA",
    .probe = probe,
    .describe = describe,
    .in_use = in_use,
    .where = where,
    .open = open_device,
    .close = close_device,
    .check_range = check_range,
    .alloc = alloc,
    .free = free_memory,
    .reg = reg,
    .unreg = unreg,
    .pitch_max = pitch_max,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_caller = stream_caller,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_query = event_query,
    .stream_after = stream_after,
    .copy = copy,
    .call = call,
    .module_load = module_load,
    .module_unload = module_unload,
    .module_function = module_function,
    .launch = launch,
};
