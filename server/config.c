/* SPDX-License-Identifier: Apache-2.0 */
#include "server/config.h"

#include <errno.h>
#include <fcntl.h>
#include <ini.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format/credentials.h"
#include "server/session/published.h"

#define CONFIG_BYTES_MAX (1u << 20)
/* inih cuts longer lines short without a word. */
#define LINE_BYTES_MAX 198u

enum value_kind { KIND_PATH, KIND_SIZE, KIND_TIME, KIND_COUNT, KIND_LISTEN, KIND_IO, KIND_LEVEL, KIND_YES };

/* Keys of [server]. */
static const struct key {
    const char *name;
    enum value_kind kind;
    size_t at;
    uint64_t min, max; /* sizes, times (ms), counts */
} server_keys[] = {
#define AT(field) offsetof(struct config, field)
    {"listen", KIND_LISTEN, 0, 0, 0},
    {"store", KIND_PATH, AT(store), 0, 0},
    {"certificate", KIND_PATH, AT(certificate), 0, 0},
    {"key", KIND_PATH, AT(key), 0, 0},
    {"ca", KIND_PATH, AT(ca), 0, 0},
    {"io", KIND_IO, 0, 0, 0},
    {"bulk_lane", KIND_YES, AT(bulk_lane), 0, 0},
    {"loops", KIND_COUNT, AT(loops), 1, LOOPS_MAX},
    {"log", KIND_PATH, AT(log), 0, 0},
    {"log_level", KIND_LEVEL, AT(log_level), 0, 0},
    {"space_reserve", KIND_SIZE, AT(space_reserve_bytes), 0, 1ull << 50},
    {"buffers", KIND_SIZE, AT(buffers_bytes), 16ull << 20, 1ull << 40},
    {"join_wait", KIND_TIME, AT(join_wait_ms), 1000, 24 * 3600 * 1000},
    {"check_wait", KIND_TIME, AT(check_wait_ms), 1000, 3600 * 1000},
    {"segment_idle", KIND_TIME, AT(segment_idle_ms), 1000, 24 * 3600 * 1000},
    {"stop_wait", KIND_TIME, AT(stop_wait_ms), 0, 3600 * 1000},
    {"deadline", KIND_TIME, AT(limits.deadline_ms), 100, 3600 * 1000},
    {"handshake", KIND_TIME, AT(limits.handshake_ms), 100, 3600 * 1000},
    {"idle", KIND_TIME, AT(limits.idle_ms), 1000, 30u * 24 * 3600 * 1000},
    {"send_wait", KIND_TIME, AT(limits.send_ms), 1000, 24 * 3600 * 1000},
    {"sessions_max", KIND_COUNT, AT(limits.sessions_max), 1, 1000000},
    {"session_requests_max", KIND_COUNT, AT(limits.session_requests_max), 1, 65536},
    {"session_streams_max", KIND_COUNT, AT(limits.session_streams_max), 1, 65536},
    {"in_flight", KIND_SIZE, AT(limits.in_flight_bytes_max), 1u << 20, 1ull << 40},
    {"feed_window", KIND_SIZE, AT(limits.feed_read_bytes_max), 1u << 20, 1ull << 40},
    {"read_cache", KIND_SIZE, AT(limits.read_cache_bytes), 1u << 20, 1ull << 36},
    {"sample_indexes", KIND_SIZE, AT(limits.sample_index_bytes_max), 1u << 20, 1ull << 40},
    {"unpacked_shards", KIND_SIZE, AT(limits.unpacked_bytes_max), 1u << 20, 1ull << 50},
#undef AT
};
#define SERVER_KEYS (sizeof server_keys / sizeof *server_keys)

struct parse {
    struct config *c;
    const char *folder;
    char section[256];
    bool server_seen[SERVER_KEYS];
    unsigned section_seen; /* keys of the present [publish] or [tenant], by bit */
    bool in_publish, in_tenant;
    struct err *err;
    bool failed;
};

int config_size(const char *text, uint64_t *bytes)
{
    static const char units[] = "KMGTP";
    char *end;
    if (text[0] < '0' || text[0] > '9')
        return -EINVAL;
    errno = 0;
    unsigned long long n = strtoull(text, &end, 10);
    if (errno)
        return -EINVAL;
    const char *unit = *end ? strchr(units, *end) : NULL;
    if (unit) {
        end++;
        if (mul_overflows(n, 1ull << 10 * (unit - units + 1), &n))
            return -EINVAL;
        if (strcmp(end, "iB") == 0)
            end += 2;
    }
    if (*end != 0)
        return -EINVAL;
    *bytes = n;
    return 0;
}

int config_time(const char *text, uint32_t *ms)
{
    static const struct {
        const char *name;
        uint32_t ms;
    } units[] = {{"ms", 1}, {"s", 1000}, {"", 1000}, {"m", 60000}, {"h", 3600000}, {"d", 86400000}};
    char *end;
    if (text[0] < '0' || text[0] > '9')
        return -EINVAL;
    errno = 0;
    unsigned long n = strtoul(text, &end, 10);
    if (errno)
        return -EINVAL;
    for (size_t i = 0; i < sizeof units / sizeof *units; i++)
        if (strcmp(end, units[i].name) == 0)
            return mul_overflows(n, units[i].ms, ms) ? -EINVAL : 0;
    return -EINVAL;
}

/* Keeps the first thing that is wrong. Returns 0, which tells inih that the line is bad. */
static int bad(struct parse *p, enum err_class class, const char *text)
{
    if (!p->failed)
        err_set(p->err, class, "%s", text);
    p->failed = true;
    return 0;
}

static int bad_value(struct parse *p, const char *name, const char *value, const char *expected)
{
    char text[ERR_TEXT_BYTES], quoted[128];
    err_quote(quoted, sizeof quoted, value, strlen(value));
    snprintf(text, sizeof text, "%s: %s was expected, \"%s\" was found", name, expected, quoted);
    return bad(p, ERR_INVALID, text);
}

static char *join_path(const struct parse *p, const char *value)
{
    char *out = NULL;
    if (value[0] == '/')
        return strdup(value);
    return asprintf(&out, "%s/%s", p->folder, value) < 0 ? NULL : out;
}

static int keep(struct parse *p, char **to, char *value)
{
    if (!value)
        return bad(p, ERR_NO_MEMORY, "no memory for the configuration");
    free(*to);
    *to = value;
    return 1;
}

static int set_listen(struct parse *p, const char *value)
{
    char host[ADDRESS_BYTES_MAX], port[16], copy[256];
    struct err e = {0};
    snprintf(copy, sizeof copy, "%s", value);
    char *rest = copy;
    for (char *word; (word = strsep(&rest, ", \t"));) {
        if (*word == 0)
            continue;
        if (listen_split(word, host, sizeof host, port, sizeof port, &e) < 0)
            return bad_value(p, "listen", word, "host:port or [v6 address]:port");
        if (p->c->listen_count == LISTEN_MAX)
            return bad(p, ERR_LIMIT, "listen: at most 16 addresses");
        char *kept = NULL;
        if (!keep(p, &kept, strdup(word)))
            return 0;
        p->c->listen[p->c->listen_count++] = kept;
    }
    return 1;
}

static int set_level(struct parse *p, const char *value, uint32_t *to)
{
    static const char *const levels[] = {"error", "warn", "info", "debug"};
    for (uint32_t i = 0; i < 4; i++)
        if (strcmp(value, levels[i]) == 0) {
            *to = i;
            return 1;
        }
    return bad_value(p, "log_level", value, "error, warn, info or debug");
}

/* As it may be written in the file: "30s", "16M", "4096". */
static void bound_text(const struct key *k, uint64_t n, char *out, size_t size)
{
    static const struct unit {
        enum value_kind kind;
        uint64_t n;
        const char *name;
    } units[] = {{KIND_TIME, 24 * 3600 * 1000, "d"},
                 {KIND_TIME, 3600 * 1000, "h"},
                 {KIND_TIME, 60 * 1000, "m"},
                 {KIND_TIME, 1000, "s"},
                 {KIND_TIME, 1, "ms"},
                 {KIND_SIZE, 1ull << 50, "P"},
                 {KIND_SIZE, 1ull << 40, "T"},
                 {KIND_SIZE, 1u << 30, "G"},
                 {KIND_SIZE, 1u << 20, "M"},
                 {KIND_SIZE, 1u << 10, "K"}};
    for (const struct unit *u = units; n && u < units + sizeof units / sizeof *units; u++)
        if (u->kind == k->kind && n % u->n == 0) {
            snprintf(out, size, "%llu%s", (unsigned long long)(n / u->n), u->name);
            return;
        }
    snprintf(out, size, "%llu", (unsigned long long)n);
}

static int set_number(struct parse *p, const struct key *k, const char *value, void *to)
{
    char expected[160];
    uint64_t n = 0;
    uint32_t small = 0;
    int r = k->kind == KIND_TIME ? config_time(value, &small) : config_size(value, &n);
    char least[32], most[32];
    const char *what = k->kind == KIND_SIZE ? "a size" : k->kind == KIND_TIME ? "a time" : "a number";
    if (k->kind == KIND_TIME)
        n = small;
    bound_text(k, k->min, least, sizeof least);
    bound_text(k, k->max, most, sizeof most);
    snprintf(expected, sizeof expected, "%s from %s to %s", what, least, most);
    if (r < 0 || n < k->min || n > k->max)
        return bad_value(p, k->name, value, expected);
    if (k->kind == KIND_SIZE)
        *(uint64_t *)to = n;
    else
        *(uint32_t *)to = (uint32_t)n;
    return 1;
}

static int set_server(struct parse *p, const struct key *k, const char *value)
{
    void *to = (char *)p->c + k->at;
    switch (k->kind) {
    case KIND_PATH: return *value ? keep(p, to, join_path(p, value)) : bad_value(p, k->name, value, "a path");
    case KIND_LISTEN: return set_listen(p, value);
    case KIND_LEVEL: return set_level(p, value, to);
    case KIND_IO:
        p->c->worker_pool = strcmp(value, "pool") == 0;
        if (p->c->worker_pool || strcmp(value, "ring") == 0)
            return 1;
        return bad_value(p, k->name, value, "ring (io_uring) or pool (threads)");
    case KIND_YES:
        *(bool *)to = strcmp(value, "yes") == 0;
        return *(bool *)to || strcmp(value, "no") == 0 ? 1 : bad_value(p, k->name, value, "yes or no");
    default: return set_number(p, k, value, to);
    }
}

static int unknown_key(struct parse *p, const char *section, const char *name, const char *allowed)
{
    char text[ERR_TEXT_BYTES], quoted[64];
    err_quote(quoted, sizeof quoted, name, strlen(name));
    snprintf(text, sizeof text, "[%s] has no key \"%s\"; it may have %s", section, quoted, allowed);
    return bad(p, ERR_INVALID, text);
}

static int twice(struct parse *p, const char *name)
{
    char text[ERR_TEXT_BYTES], where[sizeof p->section + 8] = "", quoted[64];
    if (name != p->section)
        snprintf(where, sizeof where, " in [%s]", p->section);
    err_quote(quoted, sizeof quoted, name, strlen(name));
    snprintf(text, sizeof text, "%s is given twice%s; keep one", quoted, where);
    return bad(p, ERR_INVALID, text);
}

static int server_key(struct parse *p, const char *name, const char *value)
{
    char allowed[ERR_TEXT_BYTES] = "";
    size_t n = 0;
    for (size_t i = 0; i < SERVER_KEYS; i++) {
        if (strcmp(name, server_keys[i].name) == 0) {
            if (p->server_seen[i] && server_keys[i].kind != KIND_LISTEN)
                return twice(p, name);
            p->server_seen[i] = true;
            return set_server(p, &server_keys[i], value);
        }
        n += (size_t)snprintf(allowed + n, sizeof allowed - n, "%s%s", i ? ", " : "", server_keys[i].name);
    }
    return unknown_key(p, "server", name, allowed);
}

static bool tenant_name(const char *s)
{
    size_t n = strspn(s, "abcdefghijklmnopqrstuvwxyz0123456789-");
    return n > 0 && s[n] == 0 && n <= TENANT_NAME_BYTES_MAX && s[0] != '-';
}

static int publish_format(struct parse *p, struct published_dir *d, const char *value)
{
    static const char *const formats[SHARD_FORMAT_COUNT] = {[SHARD_WHOLE] = "whole",
                                                            [SHARD_TAR] = "tar",
                                                            [SHARD_RECORDS] = "records",
                                                            [SHARD_MDS] = "mds",
                                                            [SHARD_TOKENS] = "tokens"};
    for (int f = 0; f < SHARD_FORMAT_COUNT; f++)
        if (strcmp(value, formats[f]) == 0) {
            d->format = (enum shard_format)f;
            return 1;
        }
    return bad_value(p, "format", value, "tar, mds, tokens, records or whole");
}

enum publish_key {
    PUBLISH_PATH,
    PUBLISH_TENANT,
    PUBLISH_FORMAT,
    PUBLISH_RECORD,
    PUBLISH_WINDOW,
    PUBLISH_KEYS
};

static int set_publish(struct parse *p, struct published_dir *d, enum publish_key k, const char *value)
{
    switch (k) {
    case PUBLISH_PATH:
        if (!*value || strlen(value) + strlen(p->folder) + 2 > PUBLISHED_PATH_BYTES_MAX)
            return bad_value(p, "path", value, "a path of at most 700 bytes");
        return keep(p, (char **)&d->path, join_path(p, value));
    case PUBLISH_TENANT:
        if (strcmp(value, "*") != 0 && !tenant_name(value))
            return bad_value(p, "tenant", value, "a tenant's name, or * for all");
        return keep(p, (char **)&d->tenant, strdup(value));
    case PUBLISH_FORMAT: return publish_format(p, d, value);
    case PUBLISH_WINDOW:
        if (!token_window_parse(value, &d->window))
            return bad_value(p, "window", value, "a number of tokens, or 2048+1");
        return 1;
    default:
        if (config_size(value, &d->record_bytes) < 0 || d->record_bytes == 0)
            return bad_value(p, "record_bytes", value, "a size such as 4096");
        return 1;
    }
}

static int publish_key(struct parse *p, const char *name, const char *value)
{
    static const char *const keys[PUBLISH_KEYS] = {"path", "tenant", "format", "record_bytes", "window"};
    struct published_dir *d = &p->c->published[p->c->published_count - 1];
    for (unsigned k = 0; k < PUBLISH_KEYS; k++) {
        if (strcmp(name, keys[k]) != 0)
            continue;
        if (p->section_seen & 1u << k)
            return twice(p, name);
        p->section_seen |= 1u << k;
        return set_publish(p, d, (enum publish_key)k, value);
    }
    return unknown_key(p, p->section, name, "path, tenant, format, record_bytes, window");
}

static int tenant_key(struct parse *p, const char *name, const char *value)
{
    struct tenant_cap *cap = &p->c->caps[p->c->cap_count - 1];
    if (strcmp(name, "bandwidth") != 0)
        return unknown_key(p, p->section, name, "bandwidth");
    if (p->section_seen++)
        return twice(p, name);
    if (config_size(value, &cap->bytes_s) < 0 || cap->bytes_s == 0)
        return bad_value(p, name, value, "bytes per second, such as 200M");
    return 1;
}

static int begin_publish(struct parse *p, const char *name)
{
    struct config *c = p->c;
    if (*name == 0 || strlen(name) > NAME_BYTES_MAX)
        return bad(p, ERR_INVALID, "[publish NAME] needs a name of 1 to 255 bytes");
    for (size_t i = 0; i < c->published_count; i++)
        if (strcmp(c->published[i].name, name) == 0)
            return twice(p, p->section);
    if (c->published_count == PUBLISHED_MAX)
        return bad(p, ERR_LIMIT, "at most 256 directories can be published");
    struct published_dir *d = &c->published[c->published_count];
    if (!keep(p, (char **)&d->name, strdup(name)))
        return 0;
    c->published_count++;
    d->format = SHARD_TAR;
    return 1;
}

static int begin_tenant(struct parse *p, const char *name)
{
    struct config *c = p->c;
    if (!tenant_name(name))
        return bad(p, ERR_INVALID, "[tenant NAME] needs a tenant's name: a-z, 0-9 and -");
    for (size_t i = 0; i < c->cap_count; i++)
        if (strcmp(c->caps[i].tenant, name) == 0)
            return twice(p, p->section);
    if (c->cap_count == CAPS_MAX)
        return bad(p, ERR_LIMIT, "at most 256 tenants can be capped");
    if (!keep(p, (char **)&c->caps[c->cap_count].tenant, strdup(name)))
        return 0;
    c->cap_count++;
    return 1;
}

static int begin_section(struct parse *p, const char *section)
{
    snprintf(p->section, sizeof p->section, "%s", section);
    p->section_seen = 0;
    p->in_publish = strncmp(section, "publish ", 8) == 0;
    p->in_tenant = strncmp(section, "tenant ", 7) == 0;
    if (p->in_publish)
        return begin_publish(p, section + 8);
    if (p->in_tenant)
        return begin_tenant(p, section + 7);
    if (strcmp(section, "server") == 0)
        return 1;
    char text[ERR_TEXT_BYTES], quoted[64];
    err_quote(quoted, sizeof quoted, section, strlen(section));
    snprintf(text, sizeof text,
             "there is no section [%s]; [server], [publish NAME] and [tenant NAME] are known", quoted);
    return bad(p, ERR_INVALID, text);
}

static int on_key(void *user, const char *section, const char *name, const char *value)
{
    struct parse *p = user;
    if (p->failed)
        return 0;
    if (strcmp(section, p->section) != 0 && !begin_section(p, section))
        return 0;
    if (p->in_publish)
        return publish_key(p, name, value);
    if (p->in_tenant)
        return tenant_key(p, name, value);
    return server_key(p, name, value);
}

static int empty_section(const char *line, const char *name, unsigned number, struct err *e)
{
    char quoted[96];
    return err_set(e, ERR_INVALID, "%s, line %u: the section %s is empty; give it keys or remove it", name,
                   number, err_quote(quoted, sizeof quoted, line, strcspn(line, "\r\n")));
}

/* What inih would take in silence: lines cut short, lines that go on with the one before, empty sections. */
static int check_lines(const char *text, const char *name, struct err *e)
{
    const char *section = NULL; /* that has no key yet */
    unsigned section_number = 0, number = 1;
    for (const char *line = text; *line; number++) {
        size_t n = strcspn(line, "\n");
        size_t blank = strspn(line, " \t\r");
        bool says = blank < n && line[blank] != ';' && line[blank] != '#';
        if (n > LINE_BYTES_MAX)
            return err_set(e, ERR_INVALID,
                           "%s, line %u: %zu bytes, at most %u; use a shorter path (a link helps)", name,
                           number, n, LINE_BYTES_MAX);
        if (blank > 0 && says)
            return err_set(e, ERR_INVALID,
                           "%s, line %u: begins with a blank; begin keys at the start of the line", name,
                           number);
        if (section && says && *line == '[')
            return empty_section(section, name, section_number, e);
        if (says) {
            section = *line == '[' ? line : NULL;
            section_number = number;
        }
        line += n + (line[n] == '\n');
    }
    return section ? empty_section(section, name, section_number, e) : 0;
}

static int missing(struct err *e, const char *name, const char *section, const char *key)
{
    return err_set(e, ERR_INVALID, "%s: [%s] lacks \"%s\"", name, section, key);
}

static int check_complete(const struct config *c, const char *name, struct err *e)
{
    if (c->listen_count == 0)
        return missing(e, name, "server", "listen");
    const struct {
        const char *key, *value;
    } needed[] = {{"store", c->store}, {"certificate", c->certificate}, {"key", c->key}, {"ca", c->ca}};
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!needed[i].value)
            return missing(e, name, "server", needed[i].key);
    for (size_t i = 0; i < c->published_count; i++) {
        const struct published_dir *d = &c->published[i];
        char section[300];
        snprintf(section, sizeof section, "publish %s", d->name);
        if (!d->path)
            return missing(e, name, section, "path");
        if (!d->tenant)
            return missing(e, name, section, "tenant");
        if ((d->format == SHARD_RECORDS) != (d->record_bytes != 0))
            return err_set(e, ERR_INVALID, "%s: [%s] needs record_bytes with format=records, and only then",
                           name, section);
        if (d->window.tokens && d->format != SHARD_TOKENS)
            return err_set(e, ERR_INVALID, "%s: [%s] has a window, which goes with format=tokens", name,
                           section);
    }
    return 0;
}

static void set_defaults(struct config *c)
{
    c->log_level = LOG_INFO;
    c->bulk_lane = true;
    c->space_reserve_bytes = 256ull << 20;
    c->join_wait_ms = 10 * 60 * 1000;
    c->check_wait_ms = 2 * 60 * 1000;
    c->segment_idle_ms = 10 * 60 * 1000;
    c->stop_wait_ms = 30 * 1000;
    c->buffers_bytes = 256ull << 20;
}

int config_parse(const char *text, const char *name, const char *folder, struct config **out, struct err *e)
{
    struct config *c = calloc(1, sizeof *c);
    struct err found = {0};
    if (!c)
        return err_set(e, ERR_NO_MEMORY, "no memory for the configuration");
    struct parse p = {.c = c, .folder = folder, .err = &found};
    set_defaults(c);
    int r = check_lines(text, name, e);
    if (r < 0)
        goto out;
    int line = ini_parse_string(text, on_key, &p);
    if (line != 0 && !p.failed)
        err_set(&found, ERR_INVALID, "\"key = value\" or \"[section]\" was expected");
    if (line != 0) {
        r = err_set(e, found.class, "%s, line %d: %s", name, line, found.text);
        goto out;
    }
    r = check_complete(c, name, e);
    c->limits.join_wait_ms = c->join_wait_ms;
out:
    if (r < 0)
        config_free(c);
    else
        *out = c;
    return r;
}

static int read_file(const char *path, char **out, struct err *e)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_sys(e, errno, "opening the configuration %s", path);
    char *text = malloc(CONFIG_BYTES_MAX + 1);
    size_t n = 0;
    int r = text ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for the configuration");
    while (r == 0 && n <= CONFIG_BYTES_MAX) {
        ssize_t got = read(fd, text + n, CONFIG_BYTES_MAX + 1 - n);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            r = err_sys(e, errno, "reading the configuration %s", path);
        if (got <= 0)
            break;
        n += (size_t)got;
    }
    if (r == 0 && n > CONFIG_BYTES_MAX)
        r = err_set(e, ERR_LIMIT, "the configuration %s is larger than %u bytes", path, CONFIG_BYTES_MAX);
    else if (r == 0 && memchr(text, 0, n))
        r = err_set(e, ERR_INVALID, "the configuration %s is not text: it holds a NUL", path);
    close(fd);
    if (r < 0) {
        free(text);
        return r;
    }
    text[n] = 0;
    *out = text;
    return 0;
}

int config_read(const char *path, struct config **out, struct err *e)
{
    char *text = NULL, *whole = realpath(path, NULL);
    if (!whole)
        return err_sys(e, errno, "opening the configuration %s", path);
    int r = read_file(whole, &text, e);
    if (r == 0) {
        char *slash = strrchr(whole, '/');
        *slash = 0;
        r = config_parse(text, path, whole[0] ? whole : "/", out, e);
        free(text);
    }
    free(whole);
    return r;
}

void config_free(struct config *c)
{
    if (!c)
        return;
    for (size_t i = 0; i < c->listen_count; i++)
        free(c->listen[i]);
    for (size_t i = 0; i < c->published_count; i++) {
        free((char *)c->published[i].name);
        free((char *)c->published[i].path);
        free((char *)c->published[i].tenant);
    }
    for (size_t i = 0; i < c->cap_count; i++)
        free((char *)c->caps[i].tenant);
    free(c->store);
    free(c->certificate);
    free(c->key);
    free(c->ca);
    free(c->log);
    free(c);
}
