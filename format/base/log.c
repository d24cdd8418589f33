/* SPDX-License-Identifier: Apache-2.0 */
#include "format/base/log.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

static struct {
    log_sink *sink;
    void *arg;
    enum log_level most;
} target;

void log_set_sink(log_sink *sink, void *arg, enum log_level most)
{
    target.sink = sink;
    target.arg = arg;
    target.most = most;
}

void log_line(enum log_level level, const char *fmt, ...)
{
    if (!target.sink || level > target.most)
        return;
    char line[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    target.sink(target.arg, level, line);
}
