/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One line per event: level, message, then key=value pairs written by the caller. Where the line goes and
 * what time stands before it is up to the sink, since this layer has no clock and no files.
 */
#ifndef LARDER_BASE_LOG_H
#define LARDER_BASE_LOG_H

enum log_level { LOG_ERROR = 0, LOG_WARN = 1, LOG_INFO = 2, LOG_DEBUG = 3 };

typedef void log_sink(void *arg, enum log_level level, const char *line);

/* Process-wide. Set once before threads start; NULL: lines are dropped (what a library does by default). */
void log_set_sink(log_sink *sink, void *arg, enum log_level most);

void log_line(enum log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define log_error(...) log_line(LOG_ERROR, __VA_ARGS__)
#define log_warn(...)  log_line(LOG_WARN, __VA_ARGS__)
#define log_info(...)  log_line(LOG_INFO, __VA_ARGS__)
#define log_debug(...) log_line(LOG_DEBUG, __VA_ARGS__)

#endif
