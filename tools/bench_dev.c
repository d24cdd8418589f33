/* SPDX-License-Identifier: Apache-2.0 */
/* A throw-away larderd for a benchmark. */
#include <errno.h>
#include <fcntl.h>
#include <fts.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tools/bench.h"
#include "tools/ui.h"

#define START_WAIT_S 20
#define STOP_WAIT_S  20

/* build/larderd beside build/larder, or sbin/larderd beside bin/larder. */
static int find_server(char *out, size_t size)
{
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n <= 0)
        return fail_with(STATUS_OTHER, "this program cannot find itself in /proc");
    self[n] = 0;
    *strrchr(self, '/') = 0;
    snprintf(out, size, "%s/larderd", self);
    if (access(out, X_OK) < 0)
        snprintf(out, size, "%s/../sbin/larderd", self);
    if (access(out, X_OK) < 0)
        return fail_with(
            STATUS_MISSING,
            "larderd is not beside %s; build it, or set LARDER_CREDENTIALS to measure a server that runs",
            self);
    return STATUS_OK;
}

static int fork_server(const char *program, struct dev_server *s)
{
    char log[4200], folder[4200];
    snprintf(folder, sizeof folder, "%s/dev", s->folder);
    snprintf(log, sizeof log, "%s/larderd.log", s->folder);
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        int fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        if (getppid() != parent || fd < 0)
            _exit(127);
        dup2(fd, 1);
        dup2(fd, 2);
        execl(program, "larderd", "--dev", folder, (char *)NULL);
        _exit(127);
    }
    if (pid < 0)
        return fail_with(STATUS_OTHER, "larderd cannot be started: %s", strerror(errno));
    s->pid = pid;
    return STATUS_OK;
}

/* Its log, for a person whose bench did not start. */
static void show_log(const struct dev_server *s)
{
    char path[4200], line[512];
    snprintf(path, sizeof path, "%s/larderd.log", s->folder);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f))
        fprintf(stderr, "larderd: %s", line);
    if (f)
        fclose(f);
}

/* --dev takes a configuration that is there already as it is. */
static int write_config(const struct dev_server *s, const struct dev_publish *p)
{
    char path[4300];
    snprintf(path, sizeof path, "%s/dev", s->folder);
    FILE *f = mkdir(path, 0700) == 0 ? fopen(strcat(path, "/larderd.conf"), "wxe") : NULL;
    if (!f)
        return fail_with(STATUS_OTHER, "%s cannot be written: %s", path, strerror(errno));
    fprintf(f,
            "[server]\nlisten = 127.0.0.1:0\nstore = store\ncertificate = server.pem\nkey = server.key\n"
            "ca = ca.pem\n[publish %s]\npath = %s\ntenant = dev\nformat = %s\n",
            p->name, p->path, p->format);
    if (p->record_bytes)
        fprintf(f, "record_bytes = %" PRIu64 "\n", p->record_bytes);
    if (fclose(f) != 0)
        return fail_with(STATUS_OTHER, "%s cannot be written: %s", path, strerror(errno));
    return STATUS_OK;
}

int dev_start(const char *parent, const struct dev_publish *publish, struct dev_server *out)
{
    char program[4200], address[4300];
    *out = (struct dev_server){0};
    int status = find_server(program, sizeof program);
    if (status != STATUS_OK)
        return status;
    snprintf(out->folder, sizeof out->folder, "%s/larder-bench-XXXXXX", parent);
    if (!mkdtemp(out->folder)) {
        out->folder[0] = 0;
        return fail_with(STATUS_OTHER, "a folder in %s cannot be made: %s", parent, strerror(errno));
    }
    if (publish)
        status = write_config(out, publish);
    if (status == STATUS_OK)
        status = fork_server(program, out);
    if (status != STATUS_OK) {
        dev_stop(out);
        return status;
    }
    snprintf(address, sizeof address, "%s/dev/address", out->folder);
    snprintf(out->credentials, sizeof out->credentials, "%s/dev/dev-admin.json", out->folder);
    for (double until = clock_now_s() + START_WAIT_S; access(address, F_OK) < 0;) {
        if (waitpid(out->pid, NULL, WNOHANG) == out->pid || clock_now_s() > until) {
            show_log(out);
            dev_stop(out);
            return fail_with(STATUS_SERVER, "larderd --dev did not start within %d s", START_WAIT_S);
        }
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    }
    return STATUS_OK;
}

void remove_tree(const char *folder)
{
    char *const paths[] = {(char *)folder, NULL};
    FTS *walk = fts_open(paths, FTS_PHYSICAL | FTS_NOCHDIR | FTS_XDEV, NULL);
    for (FTSENT *f; walk && (f = fts_read(walk));)
        if (f->fts_info == FTS_DP)
            rmdir(f->fts_path);
        else if (f->fts_info != FTS_D)
            unlink(f->fts_path);
    if (walk)
        fts_close(walk);
}

void dev_stop(struct dev_server *s)
{
    if (s->pid > 0) {
        kill(s->pid, SIGTERM);
        double until = clock_now_s() + STOP_WAIT_S;
        while (waitpid(s->pid, NULL, WNOHANG) == 0) {
            if (clock_now_s() > until) {
                kill(s->pid, SIGKILL);
                waitpid(s->pid, NULL, 0);
                break;
            }
            nanosleep(&(struct timespec){0, 5000000}, NULL);
        }
    }
    if (s->folder[0])
        remove_tree(s->folder);
    *s = (struct dev_server){0};
}

double dev_cpu_s(const struct dev_server *s)
{
    char path[64], text[1024];
    unsigned long long user, system;
    if (s->pid <= 0)
        return -1;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)s->pid);
    FILE *f = fopen(path, "re");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    if (f)
        fclose(f);
    text[n] = 0;
    const char *at = strrchr(text, ')'); /* the name may hold anything */
    if (!at || sscanf(at, ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &user, &system) != 2)
        return -1;
    return (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
}

void dev_forget_pages(const struct dev_server *s)
{
    char *const paths[] = {(char *)s->folder, NULL};
    FTS *walk = s->folder[0] ? fts_open(paths, FTS_PHYSICAL | FTS_NOCHDIR, NULL) : NULL;
    for (FTSENT *f; walk && (f = fts_read(walk));) {
        int fd = f->fts_info == FTS_F ? open(f->fts_path, O_RDONLY | O_CLOEXEC) : -1;
        if (fd >= 0) {
            (void)!fdatasync(fd);
            posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
            close(fd);
        }
    }
    if (walk)
        fts_close(walk);
}
