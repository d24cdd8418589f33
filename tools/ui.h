/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every subcommand of `larder` speaks through: options, exit codes, errors, tables, sizes and ages,
 * progress, JSON. Results go to standard output, everything else to standard error.
 */
#ifndef LARDER_TOOLS_UI_H
#define LARDER_TOOLS_UI_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/larder.h"
#include "format/base/err.h"

/* Exit codes: one table, the same as in larder(1). */
enum {
    STATUS_OK = 0,
    STATUS_DAMAGE = 1,   /* damage or differences were found */
    STATUS_USAGE = 2,    /* the command line, or a value in it, is not allowed */
    STATUS_MISSING = 3,  /* no such run, step, dataset, shard or file */
    STATUS_DENIED = 4,   /* credentials missing, refused or expired, or the role does not allow it */
    STATUS_KEY = 5,      /* wrong key */
    STATUS_SERVER = 6,   /* the server cannot be reached, or a deadline passed */
    STATUS_CORRUPT = 7,  /* an input is damaged or contradicts itself */
    STATUS_SPACE = 8,    /* disk full, or quota used up */
    STATUS_CONFLICT = 9, /* exists, busy, fenced, or the plan has changed */
    STATUS_OTHER = 10
};
/* Of an enum larder_class or an enum err_class: they have the same values. */
int status_of_class(int class);

/* Each prints "larder: TEXT" to standard error and returns the exit code. */
int fail(const struct larder_error *e);
int fail_err(const struct err *e);
int fail_with(int status, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Usage: adds which --help to read. */
int fail_usage(const char *command, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* ---- options ------------------------------------------------------------------------------------------- */

enum opt_kind {
    OPT_FLAG,   /* bool */
    OPT_TEXT,   /* const char * */
    OPT_NUMBER, /* uint64_t */
    OPT_SIZE,   /* uint64_t bytes: 4096, 512M, 1.5GiB (powers of 1024) */
    OPT_TIME    /* uint64_t seconds: 90, 30m, 36h, 7d, 2w */
};
struct opt {
    const char *name; /* without the dashes; NULL ends the list */
    enum opt_kind kind;
    void *to;
};
/* Every command's: */
struct common {
    bool json;
    const char *credentials;
};

struct command {
    const char *name;                                           /* "ckpt ls" */
    const char *summary;                                        /* one line */
    const char *help;                                           /* usage and options, as printed by --help */
    int (*run)(const struct command *c, int argc, char **argv); /* argv without the command's own words */
};

/* Reads options (anywhere; "--" ends them) and leaves the other words in argv[0..*argc). Knows --help, --json
 * and --credentials by itself; --json is refused where the help does not name it. True: go on. False: the
 * process exits with *status. */
bool options_read(const struct command *c, int *argc, char **argv, const struct opt *opts, int words_least,
                  int words_most, struct common *common, int *status);
bool parse_number(const char *text, uint64_t *out);
bool parse_size(const char *text, uint64_t *out);
bool parse_time(const char *text, uint64_t *out);

/* ---- the connection --------------------------------------------------------------------------------------
 */

/* 0, or an exit code after telling why. client_open takes next to no staging memory; one that will save wants
 * client_open_to_save. */
int client_open(const struct common *common, struct larder **out);
int client_open_to_save(const struct common *common, struct larder **out);
/* Closes; keeps a status that is not 0. */
int client_close(struct larder *c, int status);
/* The server's clock, or this machine's if it does not answer. */
uint64_t client_now_ns(struct larder *c);

/* ---- text ---------------------------------------------------------------------------------------------- */

struct text {
    char s[64];
};
struct text size_text(uint64_t bytes);                        /* "1.2 GiB" */
struct text age_text(uint64_t now_ns, uint64_t then_ns);      /* "3 h ago" */
struct text number_text(uint64_t n);                          /* "12345" */
struct text time_text(uint64_t ns);                           /* "2026-01-31T12:00:00Z" */
struct text shape_text(unsigned dims, const uint64_t *shape); /* "[64, 192]" */

/* Aligned columns. A head that begins with '>' is of a column of numbers, which stand to the right. */
struct table {
    const char *const *heads;
    size_t columns, cells, room;
    char **cell;
};
void table_begin(struct table *t, const char *const *heads, size_t columns);
/* As many strings as there are columns; copied; control bytes are shown escaped. */
void table_row(struct table *t, ...);
void table_end(struct table *t); /* prints and frees */

/* A line on standard error that is drawn again and again, only if that is a terminal. */
struct progress {
    const char *what;
    double drawn_s, begun_s;
    bool shown;
};
void progress_begin(struct progress *p, const char *what);
void progress_bytes(struct progress *p, uint64_t done, uint64_t total, const char *of);
void progress_end(struct progress *p);

double clock_now_s(void); /* monotonic */

/* Memory or exit with STATUS_OTHER: a command holds little and has nobody to recover for. */
void *need(void *p);

/* A number that may need all 64 bits (steps, seeds). JSON numbers end at 2^63-1 here, as in most readers of
 * JSON: what is larger becomes its decimal digits as a string, not another number. */
json_t *json_u64(uint64_t v);
/* Prints, frees. Returns 0 or an exit code. */
int json_print(json_t *o);
/* Control bytes and bad UTF-8 made visible. */
struct text_long {
    char s[1024];
};
struct text_long name_text(const char *name);

#endif
