/* SPDX-License-Identifier: Apache-2.0 */
/*
 * jansson's trees hold secrets here, and so do the buffers of its reader and writer: while a thread works on
 * credentials, what jansson takes comes from a `struct secret`, which is wiped as a whole at the end.
 */
#include "format/credentials.h"

#include <jansson.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/hash.h"
#include "format/commit.h"

#define CREDENTIALS_VERSION   1
#define CREDENTIALS_BYTES_MAX (256u << 10)
#define KEKS_MAX              64u
#define KEK_COMMAND_BYTES_MAX 4096u
#define PEM_BYTES_MAX         (64u << 10)
#define ARENA_BYTES           (1u << 20) /* twice what the largest credentials take */

/* ---- memory of jansson ---- */

static _Thread_local struct {
    struct secret *memory; /* NULL: this thread is at no credentials, and other JSON takes other memory */
    size_t used;           /* a multiple of max_align_t's */
} arena;
static json_malloc_t other_malloc; /* what jansson had before */
static json_free_t other_free;

static void *arena_malloc(size_t n)
{
    const size_t unit = _Alignof(max_align_t);
    if (!arena.memory)
        return other_malloc(n);
    if (n > ARENA_BYTES - unit || (n + unit - 1) / unit * unit > ARENA_BYTES - arena.used)
        return NULL;
    void *p = secret_fill(arena.memory) + arena.used;
    arena.used += (n + unit - 1) / unit * unit;
    return p;
}

static void arena_free(void *p)
{
    const uint8_t *at = p, *begin = arena.memory ? secret_bytes(arena.memory) : NULL;
    if (!begin || at < begin || at >= begin + ARENA_BYTES)
        other_free(p);
}

static void arena_install(void)
{
    json_get_alloc_funcs(&other_malloc, &other_free);
    json_set_alloc_funcs(arena_malloc, arena_free);
}

/* Every tree made until arena_end is to be given back by then. */
static int arena_begin(struct err *e)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, arena_install);
    arena.used = 0;
    arena.memory = secret_room(ARENA_BYTES);
    return arena.memory ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for the credentials");
}

static void arena_end(void)
{
    secret_free(arena.memory);
    arena.memory = NULL;
}

/* ---- addresses ---- */

static int bad_address(const char *address, const char *what, struct err *e)
{
    char quoted[96];
    return err_set(e, ERR_INVALID, "expected a server's address as HOST:PORT or [IPV6]:PORT, found '%s': %s",
                   err_quote(quoted, sizeof quoted, address, strlen(address)), what);
}

static int split(const char *address, unsigned long least_port, char *host, size_t host_size, char *port,
                 size_t port_size, struct err *e)
{
    const char *colon = strrchr(address, ':'), *begin = address, *end = colon;
    if (!colon || colon == address)
        return bad_address(address, "no host or no port", e);
    if (address[0] == '[') {
        if (colon[-1] != ']')
            return bad_address(address, "the bracket is not closed before the port", e);
        begin = address + 1;
        end = colon - 1;
    } else if (memchr(address, ':', (size_t)(colon - address))) {
        return bad_address(address, "an IPv6 address stands in brackets", e);
    }
    size_t host_bytes = (size_t)(end - begin), port_bytes = strlen(colon + 1);
    if (host_bytes == 0 || host_bytes >= host_size)
        return bad_address(address, "the host is empty or too long", e);
    for (const char *p = begin; p < end; p++)
        if ((unsigned char)*p <= ' ' || strchr("/@[]", *p))
            return bad_address(address, "a host holds no such character", e);
    unsigned long number = 0;
    for (const char *p = colon + 1; *p; p++) {
        if (*p < '0' || *p > '9' || number > 65535)
            number = 65536;
        else
            number = number * 10 + (unsigned long)(*p - '0');
    }
    if (port_bytes == 0 || number < least_port || number > 65535 || port_bytes > 5 || port_bytes >= port_size)
        return bad_address(address, "a port is a number from 1 to 65535", e);
    memcpy(host, begin, host_bytes);
    host[host_bytes] = '\0';
    memcpy(port, colon + 1, port_bytes + 1);
    return 0;
}

int address_split(const char *address, char *host, size_t host_size, char *port, size_t port_size,
                  struct err *e)
{
    return split(address, 1, host, host_size, port, port_size, e);
}

int listen_split(const char *address, char *host, size_t host_size, char *port, size_t port_size,
                 struct err *e)
{
    return split(address, 0, host, host_size, port, port_size, e);
}

/* ---- keys ---- */

/* Takes a key of 64 hex digits into the ring. */
static int add_kek(struct keyring *ring, uint64_t epoch, const char *hex, size_t hex_bytes, struct err *e)
{
    if (epoch == 0 || epoch > UINT32_MAX)
        return err_set(e, ERR_INVALID, "a key's epoch is a number from 1 to %u, not %llu", UINT32_MAX,
                       (unsigned long long)epoch);
    if (keyring_find(ring, (uint32_t)epoch))
        return err_set(e, ERR_INVALID, "epoch %llu has two keys; keep the right one",
                       (unsigned long long)epoch);
    if (ring->count >= KEKS_MAX)
        return err_set(e, ERR_LIMIT, "there are more than %u keys; drop the epochs that no run uses any more",
                       KEKS_MAX);
    struct kek *keks = realloc(ring->keks, (ring->count + 1) * sizeof *keks);
    struct secret *key = secret_room(KEY_BYTES);
    if (keks)
        ring->keks = keks;
    if (!keks || !key) {
        secret_free(key);
        return err_set(e, ERR_NO_MEMORY, "no memory for a key");
    }
    if (hex_bytes != 2 * KEY_BYTES || hex_read(hex, KEY_BYTES, secret_fill(key)) < 0) {
        secret_free(key);
        return err_set(e, ERR_INVALID, "the key of epoch %llu is not %u hex digits",
                       (unsigned long long)epoch, 2 * KEY_BYTES);
    }
    ring->keks[ring->count++] = (struct kek){.epoch = (uint32_t)epoch, .key = key};
    return 0;
}

/* One line "EPOCH HEX" of [p, end), blanks between and around. */
static int parse_line(const char *p, const char *end, unsigned line, struct keyring *out, struct err *e)
{
    uint64_t epoch = 0;
    unsigned digits = 0;
    for (; p < end && *p >= '0' && *p <= '9' && digits < 11; p++, digits++)
        epoch = epoch * 10 + (uint64_t)(*p - '0');
    const char *hex = p;
    while (hex < end && (*hex == ' ' || *hex == '\t'))
        hex++;
    if (digits == 0 || digits > 10 || hex == p)
        return err_set(e, ERR_INVALID,
                       "expected a line 'EPOCH HEX', a number and %u hex digits; line %u is not one",
                       2 * KEY_BYTES, line);
    int rc = add_kek(out, epoch, hex, (size_t)(end - hex), e);
    return rc < 0 ? err_prepend(e, "line %u", line), rc : 0;
}

int credentials_keks_parse(const void *text, size_t n, struct keyring *out, struct err *e)
{
    const char *p = text, *end = p + n;
    unsigned line = 0;
    int rc = 0;
    *out = (struct keyring){0};
    if (n > CREDENTIALS_BYTES_MAX)
        return err_set(e, ERR_LIMIT, "the key command printed more than %u bytes", CREDENTIALS_BYTES_MAX);
    while (p < end && rc == 0) {
        const char *nl = memchr(p, '\n', (size_t)(end - p)), *stop = nl ? nl : end, *last = stop;
        line++;
        while (last > p && (last[-1] == ' ' || last[-1] == '\t' || last[-1] == '\r'))
            last--;
        while (p < last && (*p == ' ' || *p == '\t'))
            p++;
        if (p < last)
            rc = parse_line(p, last, line, out, e);
        p = nl ? nl + 1 : end;
    }
    if (rc == 0 && out->count == 0)
        rc = err_set(e, ERR_INVALID, "the key command printed no key; expected lines 'EPOCH HEX'");
    if (rc < 0)
        keyring_free(out);
    return rc;
}

/* ---- JSON in ---- */

static int wrong(struct err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static int wrong(struct err *e, const char *fmt, ...)
{
    char text[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return err_set(e, ERR_INVALID, "the credential file %s", text);
}

/* Every key of the object is one of `known`; unknown ones are refused by name. */
static int check_keys(json_t *object, const char *const *known, const char *where, struct err *e)
{
    const char *key;
    json_t *value;
    json_object_foreach(object, key, value)
    {
        size_t i = 0;
        while (known[i] && strcmp(known[i], key) != 0)
            i++;
        if (!known[i]) {
            char quoted[64];
            return wrong(e, "has a field '%s'%s that this larder does not know; is it of a newer version?",
                         err_quote(quoted, sizeof quoted, key, strlen(key)), where);
        }
    }
    return 0;
}

/* A string without NUL of 1..max bytes. */
static int text_field(json_t *root, const char *name, size_t max, const char **out, size_t *n, struct err *e)
{
    json_t *v = json_object_get(root, name);
    if (!v)
        return wrong(e, "has no '%s'", name);
    if (!json_is_string(v))
        return wrong(e, "has a '%s' that is not a string", name);
    *out = json_string_value(v);
    *n = json_string_length(v);
    if (*n == 0 || *n > max)
        return wrong(e, "has a '%s' of %zu bytes; expected 1 to %zu", name, *n, max);
    return 0;
}

static int copy_field(json_t *root, const char *name, char *out, size_t size, struct err *e)
{
    const char *text;
    size_t n;
    int rc = text_field(root, name, size - 1, &text, &n, e);
    if (rc == 0)
        memcpy(out, text, n + 1);
    return rc;
}

static int dup_field(json_t *root, const char *name, size_t max, char **out, struct err *e)
{
    const char *text;
    size_t n;
    int rc = text_field(root, name, max, &text, &n, e);
    if (rc == 0 && !(*out = strdup(text)))
        rc = err_set(e, ERR_NO_MEMORY, "no memory for the credentials");
    return rc;
}

static int read_identity(json_t *root, struct credentials *out, struct err *e)
{
    char role[16], host[256], port[8], quoted[96];
    int rc = copy_field(root, "server", out->server, sizeof out->server, e);
    if (rc == 0 && address_split(out->server, host, sizeof host, port, sizeof port, e) < 0)
        return err_prepend(e, "the credential file's 'server'");
    if (rc == 0)
        rc = copy_field(root, "tenant", out->tenant, sizeof out->tenant, e);
    if (rc == 0 && tenant_name_check(out->tenant, e) < 0)
        return err_prepend(e, "the credential file's 'tenant'");
    if (rc == 0)
        rc = copy_field(root, "role", role, sizeof role, e);
    if (rc == 0 && role_of_name(role, &out->role) < 0)
        return wrong(e, "has a 'role' '%s'; expected reader, writer, operator or admin",
                     err_quote(quoted, sizeof quoted, role, strlen(role)));
    return rc;
}

static int read_pems(json_t *root, struct credentials *out, struct err *e)
{
    const char *key;
    size_t n;
    int rc = dup_field(root, "ca", PEM_BYTES_MAX, &out->ca_pem, e);
    if (rc == 0)
        rc = dup_field(root, "certificate", PEM_BYTES_MAX, &out->certificate_pem, e);
    if (rc == 0)
        rc = text_field(root, "key", SECRET_BYTES_MAX - 1, &key, &n, e);
    if (rc == 0 && !(out->key_pem = secret_create(key, n + 1)))
        rc = err_set(e, ERR_NO_MEMORY, "no memory for the credentials");
    return rc;
}

static int read_kek(json_t *item, size_t i, struct keyring *ring, struct err *e)
{
    static const char *const known[] = {"epoch", "key", NULL};
    if (!json_is_object(item))
        return wrong(e, "has an item %zu of 'keks' that is not an object", i);
    int rc = check_keys(item, known, " in 'keks'", e);
    if (rc < 0)
        return rc;
    json_t *epoch = json_object_get(item, "epoch"), *key = json_object_get(item, "key");
    if (!json_is_integer(epoch) || json_integer_value(epoch) < 1)
        return wrong(e, "has an item %zu of 'keks' without a number 'epoch' from 1 on", i);
    if (!json_is_string(key))
        return wrong(e, "has an item %zu of 'keks' without a 'key' of hex digits", i);
    rc = add_kek(ring, (uint64_t)json_integer_value(epoch), json_string_value(key), json_string_length(key),
                 e);
    return rc < 0 ? err_prepend(e, "the credential file's 'keks'"), rc : 0;
}

static int read_keks(json_t *root, struct credentials *out, struct err *e)
{
    json_t *keks = json_object_get(root, "keks"), *item;
    bool command = json_object_get(root, "kek_command") != NULL;
    if (!keks && !command)
        return wrong(e, "has no 'keks' and no 'kek_command'; without keys nothing can be opened: ask whoever "
                        "issued it for the whole file");
    if (keks && command)
        return wrong(e, "has both 'keks' and 'kek_command'; keep one");
    if (command)
        return dup_field(root, "kek_command", KEK_COMMAND_BYTES_MAX, &out->kek_command, e);
    if (!json_is_array(keks) || json_array_size(keks) == 0)
        return wrong(e, "has 'keks' that are not a list of at least one key");
    size_t i;
    int rc = 0;
    json_array_foreach(keks, i, item)
    {
        if (rc == 0)
            rc = read_kek(item, i, &out->keks, e);
    }
    return rc;
}

static int read_root(json_t *root, struct credentials *out, struct err *e)
{
    static const char *const known[] = {"larder_credentials", "server", "tenant", "role",        "ca",
                                        "certificate",        "key",    "keks",   "kek_command", NULL};
    json_t *version = json_object_get(root, "larder_credentials");
    if (!json_is_integer(version))
        return err_set(e, ERR_INVALID,
                       "this is not a credential file of larder: expected the field \"larder_credentials\"");
    if (json_integer_value(version) != CREDENTIALS_VERSION)
        return err_set(e, ERR_VERSION,
                       "the credential file has version %lld, this larder knows version %d; "
                       "upgrade it, or have the file issued by this one",
                       (long long)json_integer_value(version), CREDENTIALS_VERSION);
    int rc = check_keys(root, known, "", e);
    if (rc == 0)
        rc = read_identity(root, out, e);
    if (rc == 0)
        rc = read_pems(root, out, e);
    if (rc == 0)
        rc = read_keks(root, out, e);
    return rc;
}

int credentials_decode(const void *json, size_t n, struct credentials *out, struct err *e)
{
    json_error_t je;
    *out = (struct credentials){0};
    if (n > CREDENTIALS_BYTES_MAX)
        return wrong(e, "has %zu bytes; at most %u are allowed", n, CREDENTIALS_BYTES_MAX);
    if (n == 0)
        return wrong(e, "is empty");
    int rc = arena_begin(e);
    if (rc < 0)
        return rc;
    json_t *root = json_loadb(json, n, JSON_REJECT_DUPLICATES, &je);
    if (root)
        rc = json_is_object(root) ? read_root(root, out, e) : wrong(e, "does not hold a JSON object");
    else if (json_error_code(&je) == json_error_out_of_memory)
        rc = wrong(e, "is of more pieces than credentials ever are; is it the right file?");
    else /* jansson's text may quote what stands near; only the place and the kind are told */
        rc = wrong(e, "is not JSON: line %d, column %d; expected one object", je.line, je.column);
    json_decref(root);
    arena_end();
    if (rc < 0)
        credentials_free(out);
    return rc;
}

/* ---- JSON out ---- */

static bool put_text(json_t *root, const char *name, const char *text)
{
    return json_object_set_new(root, name, json_string(text)) == 0;
}

static bool put_keks(json_t *root, const struct keyring *ring)
{
    json_t *list = json_array();
    bool done =
        json_object_set_new(root, "keks", list) == 0; /* the list is root's now, also if NULL failed */
    for (size_t i = 0; done && i < ring->count; i++) {
        char hex[2 * KEY_BYTES + 1];
        json_t *item = json_object();
        hex_encode(secret_bytes(ring->keks[i].key), KEY_BYTES, hex);
        done = json_array_append_new(list, item) == 0 &&
               json_object_set_new(item, "epoch", json_integer(ring->keks[i].epoch)) == 0 &&
               put_text(item, "key", hex);
        secret_wipe(hex, sizeof hex);
    }
    return done;
}

static json_t *tree_of(const struct credentials *c)
{
    json_t *root = json_object();
    bool done = root &&
                json_object_set_new(root, "larder_credentials", json_integer(CREDENTIALS_VERSION)) == 0 &&
                put_text(root, "server", c->server) && put_text(root, "tenant", c->tenant) &&
                put_text(root, "role", role_name(c->role)) && put_text(root, "ca", c->ca_pem) &&
                put_text(root, "certificate", c->certificate_pem) &&
                put_text(root, "key", (const char *)secret_bytes(c->key_pem)) &&
                (c->kek_command ? put_text(root, "kek_command", c->kek_command) : put_keks(root, &c->keks));
    if (done)
        return root;
    json_decref(root);
    return NULL;
}

static int encode(const struct credentials *c, struct buf *out, struct err *e)
{
    json_t *root = tree_of(c);
    if (!root)
        return err_set(e, ERR_NO_MEMORY, "no memory for the credentials, or a text of them is not UTF-8");
    const size_t flags = JSON_INDENT(2);
    size_t n = json_dumpb(root, NULL, 0, flags);
    if (n > 0 && buf_reserve(out, n + 1) && json_dumpb(root, (char *)out->p + out->n, n, flags) == n) {
        out->n += n;
        buf_u8(out, '\n');
    } else {
        out->failed = true;
    }
    json_decref(root);
    return buf_end(out, "the credentials", e);
}

int credentials_encode(const struct credentials *c, struct buf *out, struct err *e)
{
    if (secret_bytes(c->key_pem)[secret_size(c->key_pem) - 1] != '\0')
        return err_set(e, ERR_INVALID, "the private key is not a text that ends with NUL");
    int rc = arena_begin(e);
    if (rc < 0)
        return rc;
    rc = encode(c, out, e);
    arena_end();
    return rc;
}

void credentials_free(struct credentials *c)
{
    free(c->ca_pem);
    free(c->certificate_pem);
    secret_free(c->key_pem);
    keyring_free(&c->keks);
    free(c->kek_command);
    *c = (struct credentials){0};
}
