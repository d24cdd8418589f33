/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/ui.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int status_of_class(int class)
{
    switch (class) {
    case LARDER_OK: return STATUS_OK;
    case LARDER_INVALID:
    case LARDER_LIMIT: return STATUS_USAGE;
    case LARDER_NOT_FOUND: return STATUS_MISSING;
    case LARDER_DENIED: return STATUS_DENIED;
    case LARDER_WRONG_KEY: return STATUS_KEY;
    case LARDER_TIMEOUT:
    case LARDER_NETWORK: return STATUS_SERVER;
    case LARDER_CORRUPT:
    case LARDER_MISMATCH: return STATUS_CORRUPT;
    case LARDER_NO_SPACE:
    case LARDER_QUOTA: return STATUS_SPACE;
    case LARDER_EXISTS:
    case LARDER_FENCED:
    case LARDER_BUSY: return STATUS_CONFLICT;
    default: return STATUS_OTHER;
    }
}

static int say(int class, const char *text)
{
    int status = status_of_class(class);
    fflush(stdout);
    fprintf(stderr, "larder: %s\n", *text ? text : err_class_name((enum err_class) class));
    return status == STATUS_OK ? STATUS_OTHER : status;
}

int fail(const struct larder_error *e)
{
    return say((int)e->kind, e->text);
}

int fail_err(const struct err *e)
{
    return say((int)e->class, e->text);
}

int fail_with(int status, const char *fmt, ...)
{
    va_list args;
    fflush(stdout);
    fputs("larder: ", stderr);
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fputc('\n', stderr);
    return status;
}

int fail_usage(const char *command, const char *fmt, ...)
{
    va_list args;
    fputs("larder: ", stderr);
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fprintf(stderr, "; see larder %s%s--help\n", command, *command ? " " : "");
    return STATUS_USAGE;
}

void *need(void *p)
{
    if (!p)
        exit(fail_with(STATUS_OTHER, "memory is used up"));
    return p;
}

double clock_now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- options ------------------------------------------------------------------------------------------- */

bool parse_number(const char *text, uint64_t *out)
{
    char *end;
    errno = 0;
    if (*text < '0' || *text > '9')
        return false;
    unsigned long long v = strtoull(text, &end, 10);
    *out = v;
    return errno == 0 && *end == 0;
}

/* A decimal number and the rest; exact for whole numbers. */
static bool parse_scaled(const char *text, char **rest, double *out)
{
    if (*text < '0' || *text > '9' || text[strspn(text, "0123456789.")] == 'x')
        return false;
    errno = 0;
    *out = strtod(text, rest);
    return errno == 0;
}

bool parse_size(const char *text, uint64_t *out)
{
    static const char letters[] = "KMGTP";
    char *rest;
    double v;
    if (parse_number(text, out))
        return true;
    if (!parse_scaled(text, &rest, &v))
        return false;
    rest += *rest == ' ';
    const char *letter = *rest ? strchr(letters, *rest == 'k' ? 'K' : *rest) : NULL;
    if (letter) {
        for (int i = 0; i <= letter - letters; i++)
            v *= 1024;
        rest++;
    }
    if (strcmp(rest, "") != 0 && strcmp(rest, "iB") != 0 && strcmp(rest, "B") != 0)
        return false;
    if (v >= 18446744073709549568.0)
        return false;
    *out = (uint64_t)v;
    return true;
}

bool parse_time(const char *text, uint64_t *out)
{
    static const struct {
        const char *unit;
        double seconds;
    } units[] = {{"", 1}, {"s", 1}, {"m", 60}, {"min", 60}, {"h", 3600}, {"d", 86400}, {"w", 7 * 86400}};
    char *rest;
    double v;
    if (!parse_scaled(text, &rest, &v))
        return false;
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
        if (strcmp(rest, units[i].unit) == 0 && v * units[i].seconds < 1e15) {
            *out = (uint64_t)(v * units[i].seconds);
            return true;
        }
    return false;
}

static bool opt_take(const struct opt *o, const char *value)
{
    switch (o->kind) {
    case OPT_FLAG: *(bool *)o->to = true; return true;
    case OPT_TEXT: *(const char **)o->to = value; return true;
    case OPT_NUMBER: return parse_number(value, o->to);
    case OPT_SIZE: return parse_size(value, o->to);
    case OPT_TIME: return parse_time(value, o->to);
    }
    return false;
}

static const char *opt_wants(enum opt_kind kind)
{
    return kind == OPT_NUMBER ? "a whole number"
           : kind == OPT_SIZE ? "a size such as 512M or 1.5GiB"
                              : "a time such as 30m, 36h or 7d";
}

static const struct opt *opt_find(const struct opt *opts, const char *name, size_t n)
{
    for (const struct opt *o = opts; o && o->name; o++)
        if (strlen(o->name) == n && strncmp(o->name, name, n) == 0)
            return o;
    return NULL;
}

/* One "--name", "--name=value" or "--name value" at argv[*i]. */
static bool opt_read(const struct command *c, int argc, char **argv, int *i, const struct opt *opts,
                     const struct opt *always, int *status)
{
    const char *name = argv[*i] + 2, *value = strchr(name, '=');
    size_t n = value ? (size_t)(value - name) : strlen(name);
    const struct opt *o = opt_find(opts, name, n);
    if (!o)
        o = opt_find(always, name, n);
    if (!o) {
        *status = fail_usage(c->name, "\"--%.*s\" is not an option of %s", (int)n, name, c->name);
        return false;
    }
    if (o->kind == OPT_FLAG && value) {
        *status = fail_usage(c->name, "--%s takes no value", o->name);
        return false;
    }
    if (o->kind != OPT_FLAG && !value && *i + 1 >= argc) {
        *status = fail_usage(c->name, "--%s needs a value", o->name);
        return false;
    }
    if (o->kind != OPT_FLAG)
        value = value ? value + 1 : argv[++*i];
    if (!opt_take(o, value)) {
        *status =
            fail_usage(c->name, "--%s needs %s, and \"%s\" is none", o->name, opt_wants(o->kind), value);
        return false;
    }
    return true;
}

bool options_read(const struct command *c, int *argc, char **argv, const struct opt *opts, int words_least,
                  int words_most, struct common *common, int *status)
{
    bool help = false, ended = false;
    const struct opt always[] = {{"help", OPT_FLAG, &help},
                                 {"json", OPT_FLAG, &common->json},
                                 {"credentials", OPT_TEXT, &common->credentials},
                                 {0}};
    int words = 0;
    for (int i = 0; i < *argc; i++) {
        if (!ended && strcmp(argv[i], "--") == 0)
            ended = true;
        else if (!ended && strcmp(argv[i], "-h") == 0)
            help = true;
        else if (!ended && argv[i][0] == '-' && argv[i][1] == '-') {
            if (!opt_read(c, *argc, argv, &i, opts, always, status))
                return false;
        } else
            argv[words++] = argv[i];
    }
    if (help) {
        printf("%s", c->help);
        *status = STATUS_OK;
        return false;
    }
    if (common->json && !strstr(c->help, "--json")) {
        *status = fail_usage(c->name, "%s has no --json: it only says what it did", c->name);
        return false;
    }
    *argc = words;
    if (words < words_least || (words_most >= 0 && words > words_most)) {
        *status = words < words_least
                      ? fail_usage(c->name, "%s needs more arguments", c->name)
                      : fail_usage(c->name, "\"%s\" is one argument too many", argv[words_most]);
        return false;
    }
    return true;
}

/* ---- the connection --------------------------------------------------------------------------------------
 */

static int open_with(const struct common *common, uint64_t staging_bytes, struct larder **out)
{
    struct larder_options o = LARDER_INIT(larder_options);
    struct larder_error e = {0};
    const char *path = common->credentials ? common->credentials : getenv("LARDER_CREDENTIALS");
    if (!path || !*path)
        return fail_with(
            STATUS_DENIED,
            "no credentials: set LARDER_CREDENTIALS to a credential file, or give --credentials FILE");
    if (access(path, R_OK) < 0)
        return fail_with(STATUS_DENIED, "the credential file %s cannot be read: %s", path, strerror(errno));
    o.credentials = path;
    o.reconnect_ms = 10000;
    o.staging_bytes = staging_bytes;
    if (larder_open(&o, out, &e) == 0)
        return STATUS_OK;
    int status = fail(&e);
    /* What is wrong with the file is wrong with the credentials. */
    return status == STATUS_USAGE || status == STATUS_CORRUPT || status == STATUS_MISSING ? STATUS_DENIED
                                                                                          : status;
}

int client_open(const struct common *common, struct larder **out)
{
    return open_with(common, 1, out); /* the least there is */
}

int client_open_to_save(const struct common *common, struct larder **out)
{
    return open_with(common, 0, out);
}

int client_close(struct larder *c, int status)
{
    struct larder_error e = {0};
    if (c && larder_close(c, -1, &e) < 0 && status == STATUS_OK)
        status = fail(&e);
    return status;
}

uint64_t client_now_ns(struct larder *c)
{
    struct larder_info info = LARDER_INIT(larder_info);
    struct timespec t;
    if (larder_info(c, &info, NULL) == 0 && info.server_time_ns)
        return info.server_time_ns;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- text ---------------------------------------------------------------------------------------------- */

struct text size_text(uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    struct text t;
    double v = (double)bytes;
    size_t u = 0;
    while (v >= 1023.95 && u + 1 < sizeof units / sizeof units[0]) {
        v /= 1024;
        u++;
    }
    snprintf(t.s, sizeof t.s, u ? "%.1f %s" : "%.0f %s", v, units[u]);
    return t;
}

struct text age_text(uint64_t now_ns, uint64_t then_ns)
{
    struct text t;
    uint64_t s = now_ns > then_ns ? (now_ns - then_ns) / 1000000000u : 0;
    if (!then_ns)
        snprintf(t.s, sizeof t.s, "-");
    else if (s < 120)
        snprintf(t.s, sizeof t.s, "%" PRIu64 " s ago", s);
    else if (s < 120 * 60)
        snprintf(t.s, sizeof t.s, "%" PRIu64 " min ago", s / 60);
    else if (s < 48 * 3600)
        snprintf(t.s, sizeof t.s, "%" PRIu64 " h ago", s / 3600);
    else
        snprintf(t.s, sizeof t.s, "%" PRIu64 " d ago", s / 86400);
    return t;
}

struct text number_text(uint64_t n)
{
    struct text t;
    snprintf(t.s, sizeof t.s, "%" PRIu64, n);
    return t;
}

struct text time_text(uint64_t ns)
{
    struct text t;
    time_t s = (time_t)(ns / 1000000000u);
    struct tm tm;
    gmtime_r(&s, &tm);
    strftime(t.s, sizeof t.s, "%Y-%m-%dT%H:%M:%SZ", &tm);
    return t;
}

struct text shape_text(unsigned dims, const uint64_t *shape)
{
    struct text t;
    size_t at = (size_t)snprintf(t.s, sizeof t.s, "[");
    for (unsigned i = 0; i < dims && at < sizeof t.s; i++)
        at += (size_t)snprintf(t.s + at, sizeof t.s - at, "%s%" PRIu64, i ? ", " : "", shape[i]);
    if (at < sizeof t.s - 1)
        snprintf(t.s + at, sizeof t.s - at, "]");
    else
        snprintf(t.s + sizeof t.s - 5, 5, "...]");
    return t;
}

struct text_long name_text(const char *name)
{
    struct text_long t = {.s = ""};
    err_quote(t.s, sizeof t.s, name, strlen(name));
    return t;
}

void table_begin(struct table *t, const char *const *heads, size_t columns)
{
    *t = (struct table){.heads = heads, .columns = columns};
}

void table_row(struct table *t, ...)
{
    va_list args;
    if (t->cells + t->columns > t->room) {
        t->room = t->room * 2 + t->columns * 16;
        t->cell = need(reallocarray(t->cell, t->room, sizeof *t->cell));
    }
    va_start(args, t);
    for (size_t i = 0; i < t->columns; i++)
        t->cell[t->cells++] = need(strdup(name_text(va_arg(args, const char *)).s));
    va_end(args);
}

static size_t width_of(const char *s)
{
    size_t n = 0;
    for (; *s; s++)
        n += (*s & 0xc0) != 0x80;
    return n;
}

/* Fill is written only when something follows it, so that no line ends in blanks. */
static void table_cell(const char *text, size_t width, bool right, bool last, size_t *fill)
{
    size_t room = width - width_of(text);
    if (text[0])
        printf("%*s%s", (int)(*fill + (right ? room : 0)), "", text);
    *fill = text[0] ? (right ? 0 : room) + 2 : *fill + width + 2;
    if (last) {
        putchar('\n');
        *fill = 0;
    }
}

void table_end(struct table *t)
{
    size_t *width = need(calloc(t->columns, sizeof *width)), fill = 0;
    for (size_t c = 0; c < t->columns; c++) {
        width[c] = width_of(t->heads[c]) - (t->heads[c][0] == '>');
        for (size_t i = c; i < t->cells; i += t->columns)
            width[c] = width_of(t->cell[i]) > width[c] ? width_of(t->cell[i]) : width[c];
    }
    for (size_t c = 0; c < t->columns; c++)
        table_cell(t->heads[c] + (t->heads[c][0] == '>'), width[c], t->heads[c][0] == '>',
                   c + 1 == t->columns, &fill);
    for (size_t i = 0; i < t->cells; i++) {
        size_t c = i % t->columns;
        table_cell(t->cell[i], width[c], t->heads[c][0] == '>', c + 1 == t->columns, &fill);
        free(t->cell[i]);
    }
    free(t->cell);
    free(width);
    *t = (struct table){0};
}

void progress_begin(struct progress *p, const char *what)
{
    *p = (struct progress){.what = what, .begun_s = clock_now_s(), .shown = isatty(2)};
}

void progress_bytes(struct progress *p, uint64_t done, uint64_t total, const char *of)
{
    double now = clock_now_s();
    if (!p->shown || (now - p->drawn_s < 0.1 && done != total))
        return;
    p->drawn_s = now;
    double rate = now > p->begun_s ? (double)done / (now - p->begun_s) : 0;
    fprintf(stderr, "\r%s %s of %s, %s/s%s%s\033[K", p->what, size_text(done).s, size_text(total).s,
            size_text((uint64_t)rate).s, of ? "  " : "", of ? of : "");
    fflush(stderr);
}

void progress_end(struct progress *p)
{
    if (p->shown)
        fputs("\r\033[K", stderr);
    p->shown = false;
}

json_t *json_u64(uint64_t v)
{
    return v <= INT64_MAX ? json_integer((json_int_t)v) : json_string(number_text(v).s);
}

int json_print(json_t *o)
{
    if (!o)
        return fail_with(STATUS_OTHER, "the result cannot be written as JSON");
    int r = json_dumpf(o, stdout, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9));
    putchar('\n');
    json_decref(o);
    return r < 0 ? fail_with(STATUS_OTHER, "the result could not be written") : STATUS_OK;
}
