/* SPDX-License-Identifier: Apache-2.0 */
/* larder tenant add|ls. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "format/commit.h"
#include "format/pki.h"
#include "tools/commands.h"
#include "tools/files.h"

#define PEM_BYTES_MAX (64u << 10)

struct adding {
    const char *name, *ca_folder, *role, *server, *out, *residency, *keks_from;
    uint64_t quota, weight, days;
    enum client_role as;
    struct credentials made;
};

/* ca.pem and ca.key of the folder. */
static int ca_read(const char *folder, struct pki_pair *ca, struct err *e)
{
    char path[4096], *key = NULL;
    size_t n;
    snprintf(path, sizeof path, "%s/ca.pem", folder);
    int status = file_read(path, PEM_BYTES_MAX, &ca->certificate_pem, &n, e);
    if (status < 0)
        return status;
    snprintf(path, sizeof path, "%s/ca.key", folder);
    if ((status = file_read(path, SECRET_BYTES_MAX - 1, &key, &n, e)) < 0)
        return status;
    ca->key_pem = secret_create(key, n + 1); /* the NUL belongs to it */
    secret_wipe(key, n);
    free(key);
    return ca->key_pem ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for the CA's key");
}

/* The tenant's keys: those of another of its credential files, or the first epoch, drawn now. */
static int keks_make(struct adding *a, struct err *e)
{
    if (a->keks_from) {
        struct credentials other = {0};
        int status = credentials_read(a->keks_from, &other, e);
        if (status == 0 && strcmp(other.tenant, a->name) != 0)
            status =
                err_set(e, ERR_INVALID, "%s is of tenant %s, not of %s", a->keks_from, other.tenant, a->name);
        if (status == 0) {
            a->made.keks = other.keks;
            a->made.kek_command = other.kek_command;
            other.keks = (struct keyring){0};
            other.kek_command = NULL;
        }
        credentials_free(&other);
        return status;
    }
    uint8_t bytes[KEY_BYTES];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        return err_set(e, ERR_IO, "no randomness for a key");
    struct kek *kek = calloc(1, sizeof *kek);
    if (kek)
        *kek = (struct kek){.epoch = 1, .key = secret_create(bytes, sizeof bytes)};
    secret_wipe(bytes, sizeof bytes);
    if (!kek || !kek->key) {
        free(kek);
        return err_set(e, ERR_NO_MEMORY, "no memory for a key");
    }
    a->made.keks = (struct keyring){.keks = kek, .count = 1};
    return 0;
}

static int credentials_make(struct adding *a, struct err *e)
{
    struct pki_pair ca = {0}, user = {0};
    int status = ca_read(a->ca_folder, &ca, e);
    if (status == 0)
        status = pki_issue_user(&ca, a->name, a->as, time(NULL), (int)a->days, &user, e);
    if (status == 0) {
        snprintf(a->made.tenant, sizeof a->made.tenant, "%s", a->name);
        a->made.role = a->as;
        a->made.ca_pem = ca.certificate_pem;
        a->made.certificate_pem = user.certificate_pem;
        a->made.key_pem = user.key_pem;
        ca.certificate_pem = user.certificate_pem = NULL;
        user.key_pem = NULL;
        status = keks_make(a, e);
    }
    pki_pair_free(&ca);
    pki_pair_free(&user);
    return status;
}

/* Registers the tenant. One that exists is fine where its keys were given: this is another user of it. */
static int tenant_register(struct larder *c, const struct adding *a)
{
    struct larder_error e = {0};
    if (larder_tenant_add(c, a->name, a->quota, (uint32_t)a->weight, a->residency, &e) == 0)
        return STATUS_OK;
    if (e.kind == LARDER_EXISTS && a->keks_from)
        return STATUS_OK;
    if (e.kind == LARDER_EXISTS)
        return fail_with(STATUS_CONFLICT,
                         "%s; to add a user of it, give --keks-from and a credential file that it has",
                         e.text);
    return fail(&e);
}

static int add(const struct common *common, struct adding *a)
{
    struct larder_info info = LARDER_INIT(larder_info);
    struct larder_error le = {0};
    struct err e = {0};
    struct larder *c = NULL;
    char path[512];
    /* All that can fail here is done before the server is told. */
    if (credentials_make(a, &e) < 0)
        return fail_err(&e);
    snprintf(path, sizeof path, "%s-%s.json", a->name, a->role);
    const char *out = a->out ? a->out : path;
    if (access(out, F_OK) == 0)
        return fail_with(STATUS_CONFLICT, "%s exists; give another --out, or remove it", out);
    int status = client_open(common, &c);
    if (status == STATUS_OK && larder_info(c, &info, &le) < 0)
        status = fail(&le);
    if (status == STATUS_OK)
        snprintf(a->made.server, sizeof a->made.server, "%s", a->server ? a->server : info.server);
    if (status == STATUS_OK)
        status = tenant_register(c, a);
    if (status == STATUS_OK && credentials_write(out, &a->made, false, &e) < 0)
        status = fail_err(&e);
    if (status == STATUS_OK)
        printf("tenant %s, role %s: credentials in %s; keep it secret, and set LARDER_CREDENTIALS to it\n",
               a->name, a->role, out);
    return client_close(c, status);
}

static int add_run(const struct command *cmd, int argc, char **argv)
{
    struct common common = {0};
    struct adding a = {.role = "writer", .residency = "", .weight = 1, .days = 365};
    struct err e = {0};
    char host[256], port[8];
    const struct opt opts[] = {{"ca", OPT_TEXT, &a.ca_folder},        {"role", OPT_TEXT, &a.role},
                               {"server", OPT_TEXT, &a.server},       {"out", OPT_TEXT, &a.out},
                               {"quota", OPT_SIZE, &a.quota},         {"weight", OPT_NUMBER, &a.weight},
                               {"residency", OPT_TEXT, &a.residency}, {"keks-from", OPT_TEXT, &a.keks_from},
                               {"days", OPT_NUMBER, &a.days},         {0}};
    int status;
    if (!options_read(cmd, &argc, argv, opts, 1, 1, &common, &status))
        return status;
    a.name = argv[0];
    if (!a.ca_folder)
        return fail_usage(cmd->name, "--ca FOLDER is needed: where ca.pem and ca.key lie");
    if (tenant_name_check(a.name, &e) < 0)
        return fail_usage(cmd->name, "%s", e.text);
    if (role_of_name(a.role, &a.as) < 0)
        return fail_usage(cmd->name, "\"%s\" is not a role: reader, writer, operator or admin", a.role);
    if (a.weight < 1 || a.weight > 1000 || a.days < 1 || a.days > 36500)
        return fail_usage(cmd->name, "--weight is from 1 to 1000, --days from 1 to 36500");
    if (a.server && address_split(a.server, host, sizeof host, port, sizeof port, &e) < 0)
        return fail_usage(cmd->name, "%s", e.text);
    status = add(&common, &a);
    credentials_free(&a.made);
    return status;
}

const struct command cmd_tenant_add = {
    "tenant add", "register a tenant, or another user of one",
    "usage: larder tenant add NAME --ca FOLDER [options]           (role admin)\n"
    "Registers the tenant at the server, issues a certificate and writes a credential file (mode 0600) with "
    "a new\n"
    "key of epoch 1 in it.\n"
    "  --ca FOLDER       where ca.pem and ca.key lie\n"
    "  --role R          of the new user: reader, writer (default), operator, admin\n"
    "  --keks-from FILE  a user of a tenant that exists: take its keys from this credential file\n"
    "  --server ADDR     HOST:PORT to write into the file (default: the one asked now)\n"
    "  --out FILE        (default: NAME-ROLE.json)\n"
    "  --quota SIZE      stored bytes at most (default: no limit)\n"
    "  --weight N        share of bandwidth among tenants (1)\n"
    "  --residency TEXT  label: where its data may lie\n"
    "  --days N          validity of the certificate (365)\n",
    add_run};

/* ---- ls -------------------------------------------------------------------------------------------------
 */

struct tenants {
    struct table *table;
    json_t *list;
};

static int one_tenant(void *arg, const struct larder_tenant_info *t)
{
    struct tenants *l = arg;
    if (l->list)
        json_array_append_new(
            l->list, json_pack("{s:s,s:I,s:I,s:I,s:I,s:I,s:s}", "name", t->name, "quota_bytes",
                               (json_int_t)t->quota_bytes, "used_bytes", (json_int_t)t->used_bytes, "weight",
                               (json_int_t)t->weight, "runs", (json_int_t)t->runs, "datasets",
                               (json_int_t)t->datasets, "residency", t->residency ? t->residency : ""));
    else
        table_row(l->table, t->name, size_text(t->used_bytes).s,
                  t->quota_bytes ? size_text(t->quota_bytes).s : "none", number_text(t->weight).s,
                  number_text(t->runs).s, number_text(t->datasets).s, t->residency ? t->residency : "");
    return 0;
}

static int ls_run(const struct command *cmd, int argc, char **argv)
{
    static const char *const heads[] = {"TENANT", ">USED",     ">QUOTA",   ">WEIGHT",
                                        ">RUNS",  ">DATASETS", "RESIDENCY"};
    struct common common = {0};
    struct larder_error e = {0};
    struct larder *c = NULL;
    struct table t;
    struct tenants l = {.table = &t};
    int status;
    if (!options_read(cmd, &argc, argv, NULL, 0, 0, &common, &status))
        return status;
    if ((status = client_open(&common, &c)) != STATUS_OK)
        return status;
    l.list = common.json ? json_array() : NULL;
    table_begin(&t, heads, 7);
    if (larder_tenant_list(c, one_tenant, &l, &e) < 0)
        status = fail(&e);
    else if (common.json)
        return client_close(c, json_print(l.list));
    else
        table_end(&t);
    json_decref(l.list);
    return client_close(c, status);
}

const struct command cmd_tenant_ls = {"tenant ls", "list tenants with what they use",
                                      "usage: larder tenant ls [--json]           (role admin)\n", ls_run};
