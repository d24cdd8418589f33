/* SPDX-License-Identifier: Apache-2.0 */
#include "server/dev.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "format/credentials.h"
#include "format/pki.h"

#define DAYS           3650u
#define FILE_BYTES_MAX (1u << 20)

static const enum client_role roles[] = {ROLE_ADMIN, ROLE_WRITER, ROLE_READER, ROLE_OPERATOR};
#define ROLES (sizeof roles / sizeof *roles)

struct dev {
    char folder[PATH_MAX];
    char config[PATH_MAX + 32];
    bool fresh_ca; /* certificates of before are worth nothing */
    struct pki_pair ca;
};

struct path {
    char text[PATH_MAX + 64];
};

static struct path in(const struct dev *d, const char *name)
{
    struct path p;
    snprintf(p.text, sizeof p.text, "%s/%s", d->folder, name);
    return p;
}

static bool exists(const struct dev *d, const char *name)
{
    return access(in(d, name).text, F_OK) == 0;
}

/* The whole file at once or not at all, also across a crash. */
static int write_file(const struct dev *d, const char *name, const void *bytes, size_t n, mode_t mode,
                      struct err *e)
{
    struct path to = in(d, name), tmp;
    snprintf(tmp.text, sizeof tmp.text, "%s/.%s.new", d->folder, name);
    int fd = open(tmp.text, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode), r = 0;
    if (fd < 0)
        return err_sys(e, errno, "writing %s", tmp.text);
    for (size_t done = 0; r == 0 && done < n;) {
        ssize_t got = write(fd, (const char *)bytes + done, n - done);
        if (got < 0 && errno != EINTR)
            r = err_sys(e, errno, "writing %s", tmp.text);
        else if (got > 0)
            done += (size_t)got;
    }
    if (r == 0 && (fchmod(fd, mode) < 0 || fsync(fd) < 0))
        r = err_sys(e, errno, "writing %s", tmp.text);
    close(fd);
    if (r == 0 && rename(tmp.text, to.text) < 0)
        r = err_sys(e, errno, "writing %s", to.text);
    if (r < 0)
        unlink(tmp.text);
    return r;
}

/* NUL-terminated; the caller wipes what is secret. */
static int read_file(const struct dev *d, const char *name, char **out, size_t *n, struct err *e)
{
    struct path p = in(d, name);
    int fd = open(p.text, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_sys(e, errno, "opening %s", p.text);
    char *text = malloc(FILE_BYTES_MAX + 1);
    int r = text ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for %s", p.text);
    *n = 0;
    while (r == 0 && *n < FILE_BYTES_MAX) {
        ssize_t got = read(fd, text + *n, FILE_BYTES_MAX - *n);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            r = err_sys(e, errno, "reading %s", p.text);
        if (got <= 0)
            break;
        *n += (size_t)got;
    }
    close(fd);
    if (r < 0) {
        free(text);
        return r;
    }
    text[*n] = 0;
    *out = text;
    return 0;
}

/* Certificates. The key is written first: a certificate without its key is never found. */

static int write_pair(const struct dev *d, const char *certificate, const char *key,
                      const struct pki_pair *pair, struct err *e)
{
    int r = write_file(d, key, secret_bytes(pair->key_pem), secret_size(pair->key_pem) - 1, 0600, e);
    if (r == 0)
        r = write_file(d, certificate, pair->certificate_pem, strlen(pair->certificate_pem), 0644, e);
    return r;
}

static int read_pair(const struct dev *d, const char *certificate, const char *key, struct pki_pair *out,
                     struct err *e)
{
    char *key_text = NULL;
    size_t n;
    int r = read_file(d, certificate, &out->certificate_pem, &n, e);
    if (r == 0)
        r = read_file(d, key, &key_text, &n, e);
    if (r == 0 && !(out->key_pem = secret_create(key_text, n + 1)))
        r = err_set(e, ERR_NO_MEMORY, "no memory for a key");
    if (key_text)
        secret_wipe(key_text, n);
    free(key_text);
    return r;
}

static int prepare_ca(struct dev *d, struct err *e)
{
    if (exists(d, "ca.pem") && exists(d, "ca.key"))
        return read_pair(d, "ca.pem", "ca.key", &d->ca, e);
    d->fresh_ca = true;
    int r = pki_ca_create("larderd --dev", time(NULL), DAYS, &d->ca, e);
    return r < 0 ? r : write_pair(d, "ca.pem", "ca.key", &d->ca, e);
}

static int prepare_server(struct dev *d, struct err *e)
{
    static const char *const hosts[] = {"localhost", "127.0.0.1", "::1", NULL};
    struct pki_pair pair = {0};
    if (!d->fresh_ca && exists(d, "server.pem") && exists(d, "server.key"))
        return 0;
    int r = pki_issue_server(&d->ca, hosts, time(NULL), DAYS, &pair, e);
    if (r == 0)
        r = write_pair(d, "server.pem", "server.key", &pair, e);
    pki_pair_free(&pair);
    return r;
}

static int prepare_config(struct dev *d, const char *listen, struct err *e)
{
    char text[2048];
    if (exists(d, "larderd.conf"))
        return 0;
    int n = snprintf(text, sizeof text,
                     "# Made by larderd --dev; edit it freely, larderd.conf(5) tells what can be set.\n"
                     "[server]\n"
                     "listen = %s\n"
                     "store = store\n"
                     "certificate = server.pem\n"
                     "key = server.key\n"
                     "ca = ca.pem\n"
                     "\n"
                     "# A folder of shards, served read-only as it is:\n"
                     "# [publish NAME]\n"
                     "# path = /where/they/are\n"
                     "# tenant = dev\n"
                     "# format = tar\n",
                     listen);
    return write_file(d, "larderd.conf", text, (size_t)n, 0644, e);
}

int dev_prepare(const char *folder, const char *listen, struct dev **out, struct err *e)
{
    struct dev *d = calloc(1, sizeof *d);
    if (!d)
        return err_set(e, ERR_NO_MEMORY, "no memory for --dev");
    int r = 0;
    if (mkdir(folder, 0700) < 0 && errno != EEXIST)
        r = err_sys(e, errno, "making the folder %s", folder);
    else if (!realpath(folder, d->folder))
        r = err_sys(e, errno, "the folder %s", folder);
    if (r == 0)
        r = prepare_ca(d, e);
    if (r == 0)
        r = prepare_server(d, e);
    if (r == 0)
        r = prepare_config(d, listen, e);
    if (r < 0) {
        dev_free(d);
        return err_prepend(e, "--dev %s", folder);
    }
    snprintf(d->config, sizeof d->config, "%s/larderd.conf", d->folder);
    *out = d;
    return 0;
}

void dev_free(struct dev *d)
{
    if (d)
        pki_pair_free(&d->ca);
    free(d);
}

const char *dev_config(const struct dev *d)
{
    return d->config;
}

/* Credentials. */

static void credential_name(enum client_role role, char out[64])
{
    snprintf(out, 64, DEV_TENANT "-%s.json", role_name(role));
}

/* 1: read; 0: there is none. */
static int read_credentials(const struct dev *d, enum client_role role, struct credentials *out,
                            struct err *e)
{
    char name[64], *text;
    size_t n;
    credential_name(role, name);
    if (!exists(d, name))
        return 0;
    int r = read_file(d, name, &text, &n, e);
    if (r < 0)
        return r;
    r = credentials_decode(text, n, out, e);
    secret_wipe(text, n);
    free(text);
    return r < 0 ? err_prepend(e, "%s", in(d, name).text) : 1;
}

static int write_credentials(const struct dev *d, const struct credentials *c, struct err *e)
{
    char name[64];
    struct buf b = {0};
    credential_name(c->role, name);
    int r = credentials_encode(c, &b, e);
    if (r == 0)
        r = write_file(d, name, b.p, b.n, 0600, e);
    if (b.p)
        secret_wipe(b.p, b.cap);
    buf_free(&b);
    return r;
}

static int first_kek(struct keyring *k, struct err *e)
{
    uint8_t bytes[KEY_BYTES];
    if (getrandom(bytes, sizeof bytes, 0) != (ssize_t)sizeof bytes)
        return err_sys(e, errno, "randomness for a key");
    k->keks = calloc(1, sizeof *k->keks);
    if (k->keks)
        k->keks[0] = (struct kek){.epoch = 1, .key = secret_create(bytes, sizeof bytes)};
    secret_wipe(bytes, sizeof bytes);
    if (!k->keks || !k->keks[0].key) {
        free(k->keks);
        k->keks = NULL;
        return err_set(e, ERR_NO_MEMORY, "no memory for a key");
    }
    k->count = 1;
    return 0;
}

static int copy_keks(const struct keyring *from, struct keyring *to, struct err *e)
{
    to->keks = calloc(from->count, sizeof *to->keks);
    for (size_t i = 0; to->keks && i < from->count; i++) {
        const struct secret *key = from->keks[i].key;
        to->keks[i] = (struct kek){.epoch = from->keks[i].epoch,
                                   .key = secret_create(secret_bytes(key), secret_size(key))};
        if (!to->keks[i].key)
            return err_set(e, ERR_NO_MEMORY, "no memory for a key");
        to->count++;
    }
    return to->keks ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for keys");
}

/* The keys that any credential file holds already; new ones if there is none: data must stay readable. */
static int find_keks(const struct dev *d, struct keyring *out, struct err *e)
{
    for (size_t i = 0; i < ROLES; i++) {
        struct credentials c = {0};
        int r = read_credentials(d, roles[i], &c, e);
        if (r > 0)
            r = c.keks.count > 0 ? copy_keks(&c.keks, out, e) : 0;
        credentials_free(&c);
        if (r < 0 || out->count > 0)
            return r;
    }
    return first_kek(out, e);
}

static int issue(const struct dev *d, struct credentials *c, struct err *e)
{
    struct pki_pair pair = {0};
    int r = pki_issue_user(&d->ca, DEV_TENANT, c->role, time(NULL), (int)DAYS, &pair, e);
    if (r < 0)
        return r;
    free(c->certificate_pem);
    secret_free(c->key_pem);
    c->certificate_pem = pair.certificate_pem;
    c->key_pem = pair.key_pem;
    free(c->ca_pem);
    c->ca_pem = strdup(d->ca.certificate_pem);
    return c->ca_pem ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for a certificate");
}

static int announce_role(const struct dev *d, enum client_role role, const struct keyring *keks,
                         const char *address, struct err *e)
{
    struct credentials c = {0};
    int r = read_credentials(d, role, &c, e);
    bool fresh = r == 0;
    if (fresh) {
        c.role = role;
        strcpy(c.tenant, DEV_TENANT);
        r = copy_keks(keks, &c.keks, e);
    }
    if (r >= 0 && (fresh || d->fresh_ca))
        r = issue(d, &c, e);
    if (r >= 0) {
        snprintf(c.server, sizeof c.server, "%s", address);
        r = write_credentials(d, &c, e);
    }
    credentials_free(&c);
    return r < 0 ? r : 0;
}

/* An address to listen on is not always one to connect to. */
static void reachable(const char *address, char *out, size_t size)
{
    if (strncmp(address, "0.0.0.0:", 8) == 0)
        snprintf(out, size, "127.0.0.1:%s", address + 8);
    else if (strncmp(address, "[::]:", 5) == 0)
        snprintf(out, size, "[::1]:%s", address + 5);
    else
        snprintf(out, size, "%s", address);
}

int dev_announce(struct dev *d, const char *address, struct err *e)
{
    char at[272], text[320];
    struct keyring keks = {0};
    reachable(address, at, sizeof at);
    int r = find_keks(d, &keks, e);
    for (size_t i = 0; r == 0 && i < ROLES; i++)
        r = announce_role(d, roles[i], &keks, at, e);
    keyring_free(&keks);
    if (r == 0) {
        int n = snprintf(text, sizeof text, "%ld\n", (long)getpid());
        r = write_file(d, "larderd.pid", text, (size_t)n, 0644, e);
    }
    if (r == 0) {
        int n = snprintf(text, sizeof text, "%s\n", at);
        r = write_file(d, "address", text, (size_t)n, 0644, e);
    }
    return r < 0 ? err_prepend(e, "--dev %s", d->folder) : 0;
}

void dev_print(const struct dev *d, const char *address)
{
    char at[272];
    reachable(address, at, sizeof at);
    printf("larderd --dev is ready at %s\n"
           "  configuration  %s\n"
           "  credentials    %s/" DEV_TENANT "-{admin,writer,reader,operator}.json\n"
           "To use it:\n"
           "  export LARDER_CREDENTIALS=%s/" DEV_TENANT "-admin.json\n"
           "  larder status\n",
           at, d->config, d->folder, d->folder);
    fflush(stdout);
}

void dev_withdraw(struct dev *d)
{
    unlink(in(d, "address").text);
    unlink(in(d, "larderd.pid").text);
}
