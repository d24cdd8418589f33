/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where larderd's log goes: one line an event, "2026-11-30T00:00:00.000Z info message key=value", to standard
 * error or appended to a file, each by one write so that lines of several threads never mix. Control bytes
 * are replaced, so that a line stays a line.
 */
#ifndef LARDER_LOGGER_H
#define LARDER_LOGGER_H

#include "format/base/err.h"
#include "format/base/log.h"

/* path NULL: standard error. Before threads start. */
must_check int logger_open(const char *path, enum log_level most, struct err *e);
/* The file again, by its name: after a rotation. Keeps the old one if that fails. Any thread. */
void logger_reopen(void);

/* The line of one event, with its newline; the length. time_ns: Unix time. For tests. */
size_t logger_line(char *out, size_t size, uint64_t time_ns, enum log_level level, const char *text);

#endif
