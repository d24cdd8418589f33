/* SPDX-License-Identifier: Apache-2.0 */
/* larder doctor: what this machine can do for larder, how that was found out, and what to change. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/io_uring.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "format/channel.h"
#include "tools/commands.h"
#include "tools/files.h"

enum verdict {
    FINE,   /* as larder wants it */
    COULD,  /* works; better if changed */
    ABSENT, /* an extra that this machine does not have */
    BROKEN  /* must be changed before larder works */
};
static const char *const verdict_names[] = {"ok", "could be better", "absent", "broken"};

struct report {
    struct table table;
    json_t *list;
    bool broken;
};

__attribute__((format(printf, 5, 6))) static void
tell(struct report *r, const char *check_name, enum verdict v, const char *advice, const char *fmt, ...)
{
    char found[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(found, sizeof found, fmt, args);
    va_end(args);
    r->broken = r->broken || v == BROKEN;
    if (r->list)
        json_array_append_new(r->list, json_pack("{s:s,s:s,s:s,s:s}", "check", check_name, "state",
                                                 verdict_names[v], "found", found, "advice", advice));
    else
        table_row(&r->table, check_name, verdict_names[v], found, advice);
}

/* ---- kernel
 * ------------------------------------------------------------------------------------------------ */

static void look_at_ring(struct report *r)
{
    struct io_uring_params p = {0};
    int fd = (int)syscall(SYS_io_uring_setup, 4, &p);
    int why = errno;
    char off = '0', *text = NULL;
    size_t n;
    if (fd >= 0) {
        close(fd);
        tell(r, "io_uring", p.features & IORING_FEAT_NODROP ? FINE : COULD,
             p.features & IORING_FEAT_NODROP
                 ? ""
                 : "a kernel of 5.15 or later has the features that larderd wants",
             "a ring can be made; features 0x%x", p.features);
        return;
    }
    if (file_read("/proc/sys/kernel/io_uring_disabled", 4096, &text, &n, NULL) == 0 && n > 0)
        off = *text;
    free(text);
    tell(r, "io_uring", COULD,
         why == ENOSYS ? "the kernel is built without it; larderd can run on worker threads"
         : off != '0'
             ? "sysctl kernel.io_uring_disabled=0; or let larderd run on worker threads"
             : "allow io_uring in the container's seccomp profile; or let larderd run on worker threads",
         "refused: %s; only a server on this machine needs it", strerror(why));
}

static void look_at_memlock(struct report *r)
{
    struct rlimit l;
    if (getrlimit(RLIMIT_MEMLOCK, &l) < 0)
        return;
    if (l.rlim_cur == RLIM_INFINITY || geteuid() == 0)
        tell(r, "locked memory", FINE, "", "%s",
             l.rlim_cur == RLIM_INFINITY ? "no limit" : "a limit is set, but does not hold for root");
    else
        tell(r, "locked memory", l.rlim_cur < (256u << 20) ? COULD : FINE,
             l.rlim_cur < (256u << 20)
                 ? "raise it (ulimit -l, LimitMEMLOCK=, --ulimit memlock) to the staging memory of saves"
                 : "",
             "limit %s", size_text(l.rlim_cur).s);
}

/* /proc files have no size: read what there is. */
static size_t proc_read(const char *path, char *out, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, out, size - 1);
    if (fd >= 0)
        close(fd);
    out[n > 0 ? n : 0] = 0;
    return n > 0 ? (size_t)n : 0;
}

static void look_at_huge_pages(struct report *r)
{
    char text[8192], thp[256];
    unsigned long long pages = 0;
    proc_read("/proc/meminfo", text, sizeof text);
    proc_read("/sys/kernel/mm/transparent_hugepage/enabled", thp, sizeof thp);
    const char *at = strstr(text, "HugePages_Total:");
    if (at)
        sscanf(at, "HugePages_Total: %llu", &pages);
    bool transparent = strstr(thp, "[always]") || strstr(thp, "[madvise]");
    tell(r, "huge pages", pages || transparent ? FINE : COULD,
         pages || transparent ? "" : "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
         "%llu reserved, transparent ones %s", pages, transparent ? "on request" : "off");
}

static void look_at_cores(struct report *r)
{
    cpu_set_t set;
    char features[256] = "";
    int cores =
        sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
#ifdef __x86_64__
#define FEATURE(name)                 \
    if (__builtin_cpu_supports(name)) \
    snprintf(features + strlen(features), sizeof features - strlen(features), " %s", name)
    FEATURE("avx2");
    FEATURE("avx512f");
    FEATURE("avx512bw");
    FEATURE("avx512vbmi2");
    FEATURE("aes");
    FEATURE("pclmul");
    bool fast = __builtin_cpu_supports("avx2");
#elif defined __aarch64__
    snprintf(features, sizeof features, " neon");
    bool fast = true;
#else
    bool fast = false;
#endif
    tell(r, "processor", fast ? FINE : COULD,
         fast ? "" : "without AVX2 or NEON the portable codec runs, slower", "%d cores;%s", cores,
         *features ? features : " no vector instructions that larder uses");
}

/* ---- GPU -------------------------------------------------------------------------------------------------
 */

/* What libraries note ends in what to do, behind a semicolon; otherwise is what else may be done. */
static void tell_note(struct report *r, const char *check_name, enum verdict v, const char *otherwise,
                      const char *note)
{
    const char *end = v == FINE ? NULL : strrchr(note, ';');
    int n = end ? (int)(end - note) : (int)strlen(note);
    tell(r, check_name, v,
         v == FINE ? ""
         : end     ? end + 1 + strspn(end + 1, " ")
                   : otherwise,
         "%.*s", n, note);
}

static void look_at_device(struct report *r, int ordinal)
{
    struct larder_device d = LARDER_INIT(larder_device);
    struct larder_error e = {0};
    char check_name[32];
    snprintf(check_name, sizeof check_name, "device %d", ordinal);
    if (larder_machine_device(ordinal, &d, &e) < 0) {
        tell(r, check_name, COULD, "look at nvidia-smi", "%s", e.text);
        return;
    }
    char node[32] = "";
    if (d.numa_node >= 0)
        snprintf(node, sizeof node, ", near NUMA node %d", d.numa_node);
    tell(r, check_name, FINE, "", "%s at %s, %s, compute capability %d.%d%s", d.name, d.bus,
         size_text(d.bytes).s, d.major, d.minor, node);
    tell_note(r, "  pinned memory", d.pins ? FINE : COULD, "without it copies are slower", d.pinned);
    tell_note(r, "  kernels", d.has_kernels ? FINE : COULD, "without them copies do what they do", d.kernels);
}

static void look_at_gpu(struct report *r)
{
    static const enum verdict verdicts[] = {ABSENT, COULD, FINE};
    struct larder_machine m = LARDER_INIT(larder_machine);
    (void)larder_machine(&m); /* never fails */
    tell_note(r, "CUDA", m.devices ? FINE : ABSENT, "an extra, for tensors in device memory", m.cuda_note);
    for (int i = 0; i < m.devices; i++)
        look_at_device(r, i);
    tell(r, "kernels built in", m.has_kernels ? FINE : ABSENT,
         m.has_kernels ? "" : "an extra: build larder where nvcc is", "%s", m.kernels_note);
    tell_note(r, "cuFile", verdicts[m.cufile],
              m.cufile == LARDER_CUFILE_COMPATIBLE
                  ? "load nvidia-fs for the direct path; until then it goes through host memory"
                  : "an extra, for files on local disks",
              m.cufile_note);
}

/* ---- ways ------------------------------------------------------------------------------------------------
 */

static const struct {
    enum larder_use use;
    const char *name;
} uses[] = {{LARDER_USE_SAVE, "saves"},
            {LARDER_USE_RESTORE, "restores"},
            {LARDER_USE_FEED, "feeds over the network"},
            {LARDER_USE_LOCAL, "shards on this machine"},
            {LARDER_USE_SCRATCH, "scratch files"}};

/* Which way bytes go, and why: for people, or into the list. */
static void tell_ways(const char *folder, json_t *list)
{
    if (!list)
        printf("\nHow bytes go on this machine, and why\n");
    for (size_t i = 0; i < sizeof uses / sizeof uses[0]; i++) {
        struct larder_way w = LARDER_INIT(larder_way);
        struct larder_error e = {0};
        if (larder_machine_way(uses[i].use, folder, &w, &e) < 0)
            snprintf(w.way, sizeof w.way, "none: %.300s", e.text);
        if (list)
            json_array_append_new(
                list, json_pack("{s:s,s:s,s:s}", "use", uses[i].name, "way", w.way, "why", w.why));
        else
            printf("  %-24s%s\n  %-24s%s\n", uses[i].name, w.way, "", w.why);
    }
}

/* ---- disk ------------------------------------------------------------------------------------------------
 */

static void look_at_disk(struct report *r, const char *folder)
{
    char path[4096];
    struct statvfs vfs;
    if (statvfs(folder, &vfs) < 0) {
        tell(r, "disk", BROKEN, "give --dir a folder that exists", "%s: %s", folder, strerror(errno));
        return;
    }
    snprintf(path, sizeof path, "%s/larder-doctor-XXXXXX", folder);
    int fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0) {
        tell(r, "disk", BROKEN, "give --dir a folder that can be written to", "%s: %s", folder,
             strerror(errno));
        return;
    }
    close(fd);
    int direct = open(path, O_RDWR | O_DIRECT | O_CLOEXEC), why = errno;
    void *block = aligned_alloc(4096, 4096);
    if (direct >= 0 && block) {
        memset(block, 0, 4096);
        if (pwrite(direct, block, 4096, 0) != 4096 || fdatasync(direct) < 0 ||
            pread(direct, block, 4096, 0) != 4096)
            why = errno, close(direct), direct = -1;
    }
    free(block);
    if (direct >= 0)
        close(direct);
    unlink(path);
    uint64_t free_bytes = (uint64_t)vfs.f_bavail * vfs.f_frsize;
    if (direct >= 0)
        tell(r, "disk", FINE, "", "%s: direct writes and reads of 4 KiB work; %s free", folder,
             size_text(free_bytes).s);
    else
        tell(r, "disk", COULD, "put the store on ext4 or XFS: here it goes through the page cache",
             "%s: no direct I/O (%s); %s free", folder, strerror(why), size_text(free_bytes).s);
}

/* ---- credentials and server
 * ---------------------------------------------------------------------------------- */

static void look_at_server(struct report *r, const char *path)
{
    struct larder_options o = LARDER_INIT(larder_options);
    struct larder_info info = LARDER_INIT(larder_info);
    struct larder_error e = {0};
    struct larder *c = NULL;
    struct timespec now;
    o.credentials = path;
    o.staging_bytes = 1 << 20;
    o.connect_timeout_ms = 5000;
    o.request_timeout_ms = 5000;
    o.reconnect_ms = 1;
    if (larder_open(&o, &c, &e) < 0) {
        tell(r, "server", BROKEN, "start larderd, or correct address or certificate in the credential file",
             "%s", e.text);
        return;
    }
    if (larder_info(c, &info, &e) < 0) {
        tell(r, "server", BROKEN, "look into the server's log", "%s", e.text);
    } else {
        clock_gettime(CLOCK_REALTIME, &now);
        int64_t apart_s = (int64_t)(info.server_time_ns / 1000000000u) - (int64_t)now.tv_sec;
        bool together = apart_s > -60 && apart_s < 60;
        tell(r, "server", together ? FINE : COULD,
             together ? "" : "set the clocks: certificates depend on them",
             "%s answers as %s (%s), by %s; its clock is %" PRId64 " s from ours", info.server, info.tenant,
             info.role, info.path, apart_s);
    }
    (void)larder_close(c, 0, NULL);
}

static void look_at_credentials(struct report *r, const char *path)
{
    struct credentials c = {0};
    struct channel_config *config = NULL;
    struct err e = {0};
    struct stat st;
    if (!path || !*path) {
        tell(r, "credentials", ABSENT, "set LARDER_CREDENTIALS to reach a server",
             "LARDER_CREDENTIALS is not set");
        return;
    }
    if (stat(path, &st) < 0 || credentials_read(path, &c, &e) < 0) {
        tell(r, "credentials", BROKEN, "ask for a credential file: larder tenant add makes one", "%s",
             *e.text ? e.text : strerror(errno));
        return;
    }
    bool open_to_others = st.st_mode & (S_IRWXG | S_IRWXO), good = false;
    if (open_to_others)
        tell(r, "credentials", BROKEN, "chmod 600: it holds keys, and is refused while others may read it",
             "%s has mode %03o", path, st.st_mode & 0777);
    else if (channel_config_create(false, c.ca_pem, c.certificate_pem, c.key_pem, &config, &e) < 0)
        tell(r, "credentials", BROKEN, "ask for a new credential file", "%s: %s", path, e.text);
    else
        good = true;
    if (good)
        tell(r, "credentials", FINE, "", "%s: %s (%s) at %s, %zu key epoch%s", path, c.tenant,
             role_name(c.role), c.server, c.keks.count, c.keks.count == 1 ? "" : "s");
    channel_config_unref(config);
    credentials_free(&c);
    if (good)
        look_at_server(r, path);
}

static int doctor_run(const struct command *cmd, int argc, char **argv)
{
    static const char *const heads[] = {"CHECK", "STATE", "FOUND", "WHAT TO CHANGE"};
    struct common common = {0};
    const char *folder = ".";
    const struct opt opts[] = {{"dir", OPT_TEXT, &folder}, {0}};
    struct report r = {0};
    int status = STATUS_OK;
    if (!options_read(cmd, &argc, argv, opts, 0, 0, &common, &status))
        return status;
    r.list = common.json ? json_array() : NULL;
    table_begin(&r.table, heads, 4);
    look_at_ring(&r);
    look_at_memlock(&r);
    look_at_huge_pages(&r);
    look_at_cores(&r);
    look_at_gpu(&r);
    look_at_disk(&r, folder);
    look_at_credentials(&r, common.credentials ? common.credentials : getenv("LARDER_CREDENTIALS"));
    if (!common.json)
        table_end(&r.table);
    json_t *ways = common.json ? json_array() : NULL;
    tell_ways(folder, ways);
    if (common.json)
        status = json_print(json_pack("{s:b,s:o,s:o}", "healthy", !r.broken, "checks", r.list, "ways", ways));
    return status == STATUS_OK && r.broken ? STATUS_DAMAGE : status;
}

const struct command cmd_doctor = {
    "doctor", "what this machine can do, and what to change",
    "usage: larder doctor [--dir FOLDER] [--json]\n"
    "Looks at io_uring, locked memory, huge pages, processor, CUDA and its devices, cuFile, direct I/O in "
    "FOLDER\n"
    "(default: here), the credentials and the server, and says for each what was found and what to change; "
    "then which\n"
    "way the bytes of each use go here, and why.\n"
    "  --json    {\"healthy\", \"checks\": [{\"check\", \"state\", \"found\", \"advice\"}],\n"
    "             \"ways\": [{\"use\", \"way\", \"why\"}]}\n"
    "Exit status 1 if something must be changed before larder works.\n",
    doctor_run};
