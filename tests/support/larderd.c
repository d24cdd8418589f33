/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/larderd.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/clock.h"
#include "format/base/err.h"
#include "tests/support/folder.h"

#define START_MS 20000u

static void child(const struct larderd *d, int out)
{
    char program[512];
    const char *build = getenv("BUILD");
    snprintf(program, sizeof program, "%s/%s", build ? build : "build", d->program);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    execl(program, program, "--dev", d->folder, "--listen", d->address, NULL);
    fprintf(stderr, "%s: %s\n", program, strerror(errno));
    _exit(127);
}

/* Looks at what it says, which goes to a file, until it says that it is ready. */
static void wait_ready(struct larderd *d, const char *log)
{
    static const char ready[] = "is ready at ";
    char text[16384];
    for (uint64_t until = clock_ms() + START_MS; clock_ms() < until;) {
        FILE *f = fopen(log, "r");
        size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
        if (f)
            fclose(f);
        text[n] = '\0';
        char *at = strstr(text, ready);
        if (at && strchr(at, '\n') && sscanf(at + sizeof ready - 1, "%63s", d->address) == 1)
            return;
        if (waitpid(d->pid, NULL, WNOHANG) != 0)
            break;
        poll(NULL, 0, 5);
    }
    fprintf(stderr, "larderd did not start:\n%s\n", text);
    abort();
}

static void run(struct larderd *d)
{
    char log[512];
    snprintf(log, sizeof log, "%s/larderd.log", d->folder);
    int out = open(log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    check(out >= 0);
    d->pid = fork();
    check(d->pid >= 0);
    if (d->pid == 0)
        child(d, out);
    close(out);
    wait_ready(d, log);
}

static void publish_folder(struct larderd *d, const char *path)
{
    char conf[512];
    snprintf(conf, sizeof conf, "%s/larderd.conf", d->folder);
    FILE *f = fopen(conf, "a");
    check(f);
    fprintf(f, "\n[publish published]\npath = %s\ntenant = *\nformat = tar\n", path);
    check(fclose(f) == 0);
}

void larderd_start(struct larderd *d, const char *publish)
{
    larderd_start_as(d, "larderd", publish);
}

void larderd_start_as(struct larderd *d, const char *program, const char *publish)
{
    *d = (struct larderd){.address = "127.0.0.1:0", .program = program};
    folder_make(d->folder, sizeof d->folder);
    run(d);
    if (publish) {
        larderd_end(d, SIGTERM);
        publish_folder(d, publish);
        larderd_again(d);
    }
}

void larderd_end(struct larderd *d, int signal)
{
    int status;
    if (d->pid == 0)
        return;
    kill(d->pid, signal);
    check(waitpid(d->pid, &status, 0) == d->pid);
    d->pid = 0;
}

void larderd_again(struct larderd *d)
{
    check(d->pid == 0);
    run(d);
}

void larderd_remove(struct larderd *d)
{
    larderd_end(d, SIGTERM);
    folder_remove(d->folder);
}

const char *larderd_credentials(const struct larderd *d, const char *role)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/dev-%s.json", d->folder, role);
    return path;
}
