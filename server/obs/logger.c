/* SPDX-License-Identifier: Apache-2.0 */
#include "server/obs/logger.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static struct {
    char path[4096]; /* empty: standard error */
    int fd;
} logger = {.fd = STDERR_FILENO};

size_t logger_line(char *out, size_t size, uint64_t time_ns, enum log_level level, const char *text)
{
    static const char *const names[] = {"error", "warn", "info", "debug"};
    time_t seconds = (time_t)(time_ns / 1000000000u);
    struct tm tm;
    gmtime_r(&seconds, &tm);
    size_t n = strftime(out, size, "%Y-%m-%dT%H:%M:%S", &tm);
    int more = snprintf(out + n, size - n, ".%03uZ %s %s", (unsigned)(time_ns / 1000000u % 1000u),
                        names[level], text);
    size_t end = n + (size_t)more;
    if (end > size - 2) /* too long: cut, but still a line */
        end = size - 2;
    for (size_t i = n; i < end; i++)
        if ((unsigned char)out[i] < 0x20 || out[i] == 0x7f)
            out[i] = '?';
    out[end++] = '\n';
    out[end] = 0;
    return end;
}

static void sink(void *arg, enum log_level level, const char *text)
{
    (void)arg;
    char line[1200];
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t time_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    size_t n = logger_line(line, sizeof line, time_ns, level, text);
    /* A log that cannot be written has nowhere to say so. */
    ssize_t done;
    do
        done = write(logger.fd, line, n);
    while (done < 0 && errno == EINTR);
}

static int open_file(void)
{
    return open(logger.path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640);
}

int logger_open(const char *path, enum log_level most, struct err *e)
{
    if (path) {
        if ((size_t)snprintf(logger.path, sizeof logger.path, "%s", path) >= sizeof logger.path)
            return err_set(e, ERR_LIMIT, "the path of the log is longer than %zu bytes",
                           sizeof logger.path - 1);
        int fd = open_file();
        if (fd < 0)
            return err_sys(e, errno, "opening the log %s", path);
        logger.fd = fd;
    }
    log_set_sink(sink, NULL, most);
    return 0;
}

void logger_reopen(void)
{
    if (!logger.path[0])
        return;
    int fd = open_file();
    if (fd < 0) {
        log_warn("the log could not be opened again path=%s: %s", logger.path, strerror(errno));
        return;
    }
    dup2(fd, logger.fd); /* the number stays: writers on other threads go over in one step */
    close(fd);
}
