/* SPDX-License-Identifier: Apache-2.0 */
#include "client/secrets.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/clock.h"
#include "format/base/hash.h"

#define FILE_BYTES_MAX    (1u << 20)
#define COMMAND_BYTES_MAX (64u << 10)

void secrets_random(void *p, size_t n)
{
    uint8_t *at = p;
    while (n > 0) {
        ssize_t got =
            getrandom(at, n < 256 ? n : 256, 0); /* whole up to 256 bytes once the kernel is seeded */
        check(got > 0 || errno == EINTR);
        if (got > 0)
            at += got, n -= (size_t)got;
    }
}

/* What was read, in memory that no core file holds. */
struct text {
    struct secret *memory;
    size_t n;
};

/* ---- the file ---- */

static int check_private(int fd, const char *path, struct err *e)
{
    struct stat st;
    if (fstat(fd, &st) < 0)
        return err_sys(e, errno, "looking at the credential file %s", path);
    if (!S_ISREG(st.st_mode))
        return err_set(e, ERR_INVALID, "the credential file %s is not a regular file", path);
    if (st.st_mode & 077)
        return err_set(e, ERR_DENIED,
                       "the credential file %s holds keys and can be read or written by others (mode %03o); "
                       "run: chmod 600 '%s'",
                       path, (unsigned)st.st_mode & 0777, path);
    if (st.st_size > FILE_BYTES_MAX)
        return err_set(
            e, ERR_LIMIT,
            "the credential file %s has %lld bytes, at most %u are expected; is it the right file?", path,
            (long long)st.st_size, FILE_BYTES_MAX);
    return 0;
}

static int read_private(const char *path, struct text *out, struct err *e)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0)
        return err_sys(e, errno, "opening the credential file %s", path);
    int rc = check_private(fd, path, e);
    if (rc == 0 && !(out->memory = secret_room(FILE_BYTES_MAX)))
        rc = err_set(e, ERR_NO_MEMORY, "no memory for the credential file");
    while (rc == 0) {
        ssize_t n = read(fd, secret_fill(out->memory) + out->n, FILE_BYTES_MAX - out->n);
        if (n == 0)
            break;
        if (n < 0 && errno != EINTR)
            rc = err_sys(e, errno, "reading the credential file %s", path);
        else if (n > 0)
            out->n += (size_t)n;
    }
    close(fd);
    return rc;
}

/* ---- the command ---- */

static int spawn_shell(const char *command, int out_fd, pid_t *pid)
{
    char *const argv[] = {"sh", "-c", (char *)command, NULL};
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attr;
    sigset_t none;
    sigemptyset(&none);
    int rc = posix_spawn_file_actions_init(&actions);
    if (rc != 0)
        return rc;
    rc = posix_spawnattr_init(&attr);
    if (rc != 0) {
        posix_spawn_file_actions_destroy(&actions);
        return rc;
    }
    posix_spawn_file_actions_adddup2(&actions, out_fd, STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawnattr_setpgroup(&attr, 0); /* so that all of it can be ended */
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
    rc = posix_spawn(pid, "/bin/sh", &actions, &attr, argv, environ);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&actions);
    return rc;
}

/* Reads to the end of the output; 0, or the reason why not. */
static int read_output(int fd, unsigned timeout_ms, struct text *out, struct err *e)
{
    uint64_t until = clock_ms() + timeout_ms;
    for (;;) {
        uint64_t now = clock_ms();
        struct pollfd p = {.fd = fd, .events = POLLIN};
        int ready = now < until ? poll(&p, 1, (int)(until - now)) : 0;
        if (ready == 0)
            return err_set(e, ERR_TIMEOUT, "the kek_command did not end within %u ms", timeout_ms);
        if (ready < 0)
            continue;
        ssize_t n = read(fd, secret_fill(out->memory) + out->n, COMMAND_BYTES_MAX - out->n);
        if (n == 0)
            return out->n < COMMAND_BYTES_MAX
                       ? 0
                       : err_set(e, ERR_LIMIT,
                                 "the kek_command wrote more than %u bytes; expected lines \"EPOCH HEX\"",
                                 COMMAND_BYTES_MAX);
        if (n < 0 && errno != EINTR && errno != EAGAIN)
            return err_sys(e, errno, "reading from the kek_command");
        if (n > 0)
            out->n += (size_t)n;
    }
}

/* A command that closed its output and does not end is ended at the bound. */
static int reap(pid_t pid, bool failed, unsigned timeout_ms, int *status)
{
    uint64_t until = clock_ms() + timeout_ms;
    const struct timespec moment = {.tv_nsec = 2000000};
    for (;;) {
        if (failed || clock_ms() >= until)
            kill(-pid, SIGKILL);
        pid_t got = waitpid(pid, status, failed ? 0 : WNOHANG);
        if (got == pid)
            return 0;
        if (got < 0 && errno != EINTR)
            return -errno; /* the program ignores SIGCHLD: there is no status to be had */
        clock_nanosleep(CLOCK_MONOTONIC, 0, &moment, NULL);
    }
}

static int run_command(const char *command, unsigned timeout_ms, struct text *out, struct err *e)
{
    int fds[2], status = 0;
    pid_t pid = 0;
    if (!(out->memory = secret_room(COMMAND_BYTES_MAX)))
        return err_set(e, ERR_NO_MEMORY, "no memory for the output of the kek_command");
    if (pipe2(fds, O_CLOEXEC) < 0)
        return err_sys(e, errno, "making a pipe for the kek_command");
    int rc = spawn_shell(command, fds[1], &pid);
    close(fds[1]);
    if (rc != 0) {
        close(fds[0]);
        return err_sys(e, rc, "starting the kek_command");
    }
    rc = read_output(fds[0], timeout_ms, out, e);
    close(fds[0]);
    int reaped = reap(pid, rc < 0, timeout_ms, &status);
    if (rc == 0 && reaped == 0 && !(WIFEXITED(status) && WEXITSTATUS(status) == 0))
        rc = err_set(e, ERR_KEY, "the kek_command failed (%s %d); run it by hand to see why",
                     WIFEXITED(status) ? "exit status" : "signal",
                     WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
    return rc;
}

int secrets_load(const char *path, unsigned timeout_ms, struct credentials *out, struct err *e)
{
    struct text file = {0}, keks = {0};
    int rc = read_private(path, &file, e);
    if (rc == 0) {
        rc = credentials_decode(secret_bytes(file.memory), file.n, out, e);
        if (rc < 0)
            err_prepend(e, "credential file %s", path);
    }
    secret_free(file.memory);
    if (rc < 0)
        return rc;
    if (out->kek_command) {
        rc = run_command(out->kek_command, timeout_ms, &keks, e);
        if (rc == 0) {
            struct keyring ring = {0};
            rc = credentials_keks_parse(secret_bytes(keks.memory), keks.n, &ring, e);
            if (rc == 0) {
                keyring_free(&out->keks);
                out->keks = ring;
            }
        }
        if (rc < 0)
            err_prepend(e, "credential file %s", path);
        secret_free(keks.memory);
    }
    if (rc < 0)
        credentials_free(out);
    return rc;
}
