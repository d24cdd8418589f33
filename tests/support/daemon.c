/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/daemon.h"

#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "format/base/err.h"

#define START_MS 30000

static void moment(void)
{
    const struct timespec t = {.tv_nsec = 5000000};
    nanosleep(&t, NULL);
}

/* Reads a small text file; false: not there yet. */
static bool slurp(const char *path, char *out, size_t size)
{
    FILE *f = fopen(path, "r");
    if (!f)
        return false;
    size_t n = fread(out, 1, size - 1, f);
    fclose(f);
    out[n] = 0;
    return n > 0;
}

/* False: larderd ended at once (LARDER_TEST_VERBOSE=1 shows why). */
static bool launch(struct daemon *d, const char *listen)
{
    char path[300], binary[300];
    const char *build = getenv("BUILD");
    snprintf(path, sizeof path, "%s/address", d->folder);
    unlink(path);
    snprintf(binary, sizeof binary, "%s/larderd", build ? build : "build");
    d->pid = fork();
    check(d->pid >= 0);
    if (d->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int log = open("/dev/null", O_WRONLY);
        if (!getenv("LARDER_TEST_VERBOSE"))
            dup2(log, STDOUT_FILENO), dup2(log, STDERR_FILENO);
        execl(binary, "larderd", "--dev", d->folder, "--listen", listen, (char *)NULL);
        _exit(127);
    }
    for (int waited = 0; !slurp(path, d->address, sizeof d->address); waited += 5) {
        int status;
        if (waitpid(d->pid, &status, WNOHANG) != 0)
            return false;
        check(waited < START_MS);
        moment();
    }
    d->address[strcspn(d->address, "\r\n")] = 0;
    return true;
}

void daemon_start(struct daemon *d)
{
    snprintf(d->folder, sizeof d->folder, "/tmp/larder-test-XXXXXX");
    check(mkdtemp(d->folder) != NULL);
    /* Below the ports that the kernel gives out, so that nobody takes it while the server is restarted. */
    for (unsigned i = 0; i < 50; i++) {
        char listen[64];
        snprintf(listen, sizeof listen, "127.0.0.1:%u", 12000 + ((unsigned)getpid() * 31 + i * 101) % 18000);
        if (launch(d, listen))
            return;
    }
    check(!"larderd starts");
}

void daemon_kill(struct daemon *d)
{
    int status;
    kill(d->pid, SIGKILL);
    check(waitpid(d->pid, &status, 0) == d->pid);
    d->pid = 0;
}

void daemon_restart(struct daemon *d)
{
    char listen[64];
    strcpy(listen, d->address);
    if (d->pid)
        daemon_kill(d);
    bool up = launch(d, listen);
    check(up);
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st, (void)type, (void)at;
    return remove(path);
}

void daemon_stop(struct daemon *d)
{
    if (d->pid)
        daemon_kill(d);
    nftw(d->folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

void daemon_credentials(const struct daemon *d, const char *role, char *out, size_t size)
{
    snprintf(out, size, "%s/dev-%s.json", d->folder, role);
}

/* Replaces the first `from` in text (of `size` bytes) by `to`. */
static void replace(char *text, size_t size, const char *from, const char *to)
{
    char *at = strstr(text, from);
    check(at && strlen(text) - strlen(from) + strlen(to) < size);
    memmove(at + strlen(to), at + strlen(from), strlen(at + strlen(from)) + 1);
    memcpy(at, to, strlen(to));
}

void daemon_credentials_edit(const struct daemon *d, const char *role, const char *name, const char *address,
                             const char *from, const char *to, char *out, size_t size)
{
    static char text[65536];
    daemon_credentials(d, role, out, size);
    check(slurp(out, text, sizeof text));
    if (address)
        replace(text, sizeof text, d->address, address);
    if (from)
        replace(text, sizeof text, from, to);
    snprintf(out, size, "%s/%s", d->folder, name);
    int fd = open(out, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    check(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
    close(fd);
}

struct larder *daemon_client_at(const char *credentials, uint64_t staging_bytes)
{
    struct larder_options o = LARDER_INIT(larder_options);
    struct larder_error e;
    struct larder *c = NULL;
    o.credentials = credentials;
    o.staging_bytes = staging_bytes;
    o.threads = 2;
    o.request_timeout_ms = 20000;
    if (larder_open(&o, &c, &e) < 0) {
        fprintf(stderr, "%s\n", e.text);
        abort();
    }
    return c;
}

struct larder *daemon_client(const struct daemon *d, const char *role)
{
    char path[320];
    daemon_credentials(d, role, path, sizeof path);
    return daemon_client_at(path, 16u << 20);
}

/* ---- segments on disk ---- */

static struct {
    char path[512];
    off_t size;
} found[64];
static unsigned found_count;

static int look(const char *path, const struct stat *st, int type, struct FTW *at)
{
    if (type == FTW_F && strncmp(path + at->base, "s-", 2) == 0 && found_count < 64) {
        snprintf(found[found_count].path, sizeof found[0].path, "%s", path);
        found[found_count++].size = st->st_size;
    }
    return 0;
}

static int larger_first(const void *a, const void *b)
{
    const typeof(found[0]) *x = a, *y = b;
    return x->size > y->size ? -1 : x->size < y->size;
}

void daemon_segment(const struct daemon *d, unsigned n, char *out, size_t size)
{
    found_count = 0;
    nftw(d->folder, look, 16, FTW_PHYS);
    qsort(found, found_count, sizeof found[0], larger_first);
    check(n < found_count);
    snprintf(out, size, "%s", found[n].path);
}

void daemon_flip(const char *path, int64_t offset, uint8_t mask)
{
    uint8_t byte;
    struct stat st;
    chmod(path, 0600);
    int fd = open(path, O_RDWR);
    check(fd >= 0 && fstat(fd, &st) == 0);
    offset = offset < 0 ? st.st_size + offset : offset;
    check(pread(fd, &byte, 1, offset) == 1);
    byte ^= mask;
    check(pwrite(fd, &byte, 1, offset) == 1);
    close(fd);
}
