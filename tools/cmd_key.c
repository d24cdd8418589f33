/* SPDX-License-Identifier: Apache-2.0 */
/*
 * larder key rotate. The new key is in the credential files, durably, before anything is wrapped under it, so
 * an interruption at any point loses nothing: the next call sees that runs are still wrapped under an older
 * key and finishes that rotation instead of beginning another.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "tools/commands.h"
#include "tools/files.h"

#define FILES_MAX 64

struct rotation {
    const char *own; /* the caller's credential file */
    char *also_text; /* owned; cut at its commas */
    const char *also[FILES_MAX];
    size_t also_count;
    bool drop_old, begin_new;
    uint32_t epoch;    /* the newest, once it is settled */
    bool from_command; /* the keys come from a command */
    bool resumed;
};

static int keyring_add(struct keyring *ring, uint32_t epoch, struct secret *key, struct err *e)
{
    struct kek *keks = realloc(ring->keks, (ring->count + 1) * sizeof *keks);
    if (keks)
        ring->keks = keks;
    if (!keks || !key) {
        secret_free(key);
        return err_set(e, ERR_NO_MEMORY, "no memory for a key");
    }
    ring->keks[ring->count++] = (struct kek){.epoch = epoch, .key = key};
    return 0;
}

static int keyring_add_random(struct keyring *ring, struct err *e)
{
    uint8_t bytes[KEY_BYTES];
    const struct kek *newest = keyring_newest(ring);
    if (newest && newest->epoch == UINT32_MAX)
        return err_set(e, ERR_LIMIT, "the tenant's key epochs are used up");
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        return err_set(e, ERR_IO, "no randomness for a key");
    struct secret *key = secret_create(bytes, sizeof bytes);
    secret_wipe(bytes, sizeof bytes);
    return keyring_add(ring, newest ? newest->epoch + 1 : 1, key, e);
}

/* Adds to `to` the epochs that it lacks; ERR_KEY if one epoch has two different keys. *added: how many. */
static int keyring_merge(struct keyring *to, const struct keyring *from, size_t *added, struct err *e)
{
    *added = 0;
    for (size_t i = 0; i < from->count; i++) {
        const struct kek *k = &from->keks[i], *there = keyring_find(to, k->epoch);
        if (there && !secret_equal(there->key, k->key))
            return err_set(e, ERR_KEY,
                           "it holds another key of epoch %" PRIu32
                           "; the files are not of one tenant's keys",
                           k->epoch);
        if (there)
            continue;
        int status = keyring_add(to, k->epoch, secret_create(secret_bytes(k->key), secret_size(k->key)), e);
        if (status < 0)
            return status;
        ++*added;
    }
    return 0;
}

static void keyring_keep_only(struct keyring *ring, uint32_t epoch)
{
    size_t kept = 0;
    for (size_t i = 0; i < ring->count; i++)
        if (ring->keks[i].epoch == epoch)
            ring->keks[kept++] = ring->keks[i];
        else
            secret_free(ring->keks[i].key);
    ring->count = kept;
}

/* Gives the other files the keys that they lack; or, not `doing`, only finds out whether that would work. */
static int update_also(const struct rotation *r, const struct credentials *own, bool doing, struct err *e)
{
    for (size_t i = 0; i < r->also_count; i++) {
        struct credentials c = {0};
        size_t added = 0;
        int status = credentials_read(r->also[i], &c, e);
        if (status == 0 && strcmp(c.tenant, own->tenant) != 0)
            status =
                err_set(e, ERR_INVALID, "%s is of tenant %s, not of %s", r->also[i], c.tenant, own->tenant);
        else if (status == 0 && c.kek_command)
            status = err_set(e, ERR_INVALID,
                             "%s takes its keys from a command; add the new epoch there, without --also",
                             r->also[i]);
        else if (status == 0 && (status = keyring_merge(&c.keks, &own->keks, &added, e)) < 0)
            status = err_prepend(e, "%s", r->also[i]);
        if (status == 0 && doing && added)
            status = credentials_write(r->also[i], &c, true, e);
        credentials_free(&c);
        if (status < 0)
            return status;
    }
    return 0;
}

struct epochs {
    uint32_t oldest, newest; /* over all runs, of the newest epoch that each is wrapped under; 0: no runs */
};

static int look_at_epoch(void *arg, const struct larder_run_info *r)
{
    struct epochs *o = arg;
    if (r->key_epoch && (!o->oldest || r->key_epoch < o->oldest))
        o->oldest = r->key_epoch;
    if (r->key_epoch > o->newest)
        o->newest = r->key_epoch;
    return 0;
}

/* 0 or an exit code. */
static int epochs_in_use(struct larder *c, struct epochs *out)
{
    struct larder_error e = {0};
    *out = (struct epochs){0};
    if (larder_run_list(c, LARDER_CHECKPOINTS, look_at_epoch, out, &e) < 0 ||
        larder_run_list(c, LARDER_DATASETS, look_at_epoch, out, &e) < 0)
        return fail(&e);
    return STATUS_OK;
}

/* Before any file is touched: would the server let this user do it? */
static int may_rotate(struct larder *c, const struct rotation *r)
{
    struct larder_info info = LARDER_INIT(larder_info);
    struct larder_error e = {0};
    if (larder_info(c, &info, &e) < 0)
        return fail(&e);
    bool may_drop = strcmp(info.role, "operator") == 0 || strcmp(info.role, "admin") == 0;
    if (r->drop_old && !may_drop)
        return fail_with(STATUS_DENIED,
                         "--drop-old needs the role operator or admin; this certificate has %s", info.role);
    if (strcmp(info.role, "reader") == 0)
        return fail_with(STATUS_DENIED,
                         "key rotate needs the role writer, operator or admin; this certificate has reader");
    return STATUS_OK;
}

/* Settles the epoch to rotate to: a new one, written to the files; or that of a rotation left unfinished. */
static int settle_epoch(struct rotation *r, const struct epochs *used)
{
    struct credentials own = {0};
    struct err e = {0};
    int status = credentials_read(r->own, &own, &e);
    const struct kek *newest = status == 0 ? keyring_newest(&own.keks) : NULL;
    r->from_command = own.kek_command != NULL;
    if (newest && used->newest > newest->epoch)
        status = err_set(&e, ERR_KEY,
                         "the tenant's keys are at epoch %" PRIu32 ", and %s ends at %" PRIu32
                         ": somebody else rotated; get the newer key first, by key rotate --also %s from a "
                         "file that has it",
                         used->newest, r->own, newest->epoch, r->own);
    if (status == 0 && !r->from_command) /* a wrong name in --also must not leave a new epoch behind */
        status = update_also(r, &own, false, &e);
    if (status == 0 && !r->from_command) {
        newest = keyring_newest(&own.keks);
        r->resumed = newest && used->oldest && used->oldest < newest->epoch && !r->begin_new;
        if (!r->resumed && (status = keyring_add_random(&own.keks, &e)) == 0)
            status = credentials_write(r->own, &own, true, &e);
        if (status == 0) {
            r->epoch = keyring_newest(&own.keks)->epoch;
            status = update_also(r, &own, true, &e);
        }
    }
    credentials_free(&own);
    return status < 0 ? fail_err(&e) : STATUS_OK;
}

/* Takes the older keys out of the files: nothing is wrapped under them any more. */
static int drop_from_files(const struct rotation *r)
{
    for (size_t i = 0; i <= r->also_count; i++) {
        const char *path = i == 0 ? r->own : r->also[i - 1];
        struct credentials c = {0};
        struct err e = {0};
        int status = credentials_read(path, &c, &e);
        if (status == 0 && keyring_find(&c.keks, r->epoch) && c.keks.count > 1) {
            keyring_keep_only(&c.keks, r->epoch);
            status = credentials_write(path, &c, true, &e);
        }
        credentials_free(&c);
        if (status < 0)
            return fail_err(&e);
    }
    return STATUS_OK;
}

static int rotate(const struct common *common, struct rotation *r)
{
    struct larder_error e = {0};
    struct larder *c = NULL;
    struct epochs used;
    uint64_t runs = 0;
    bool dropped = false;
    int status = client_open(common, &c);
    if (status == STATUS_OK && (status = may_rotate(c, r)) == STATUS_OK)
        status = epochs_in_use(c, &used);
    status = client_close(c, status);
    c = NULL;
    if (status != STATUS_OK || (status = settle_epoch(r, &used)) != STATUS_OK)
        return status;
    /* The library reads the file when it opens: once more, with the new key in it. */
    if ((status = client_open(common, &c)) != STATUS_OK)
        return status;
    if (larder_key_rotate(c, r->drop_old, &runs, &e) < 0)
        status = fail(&e);
    if (status == STATUS_OK && r->drop_old && !r->from_command &&
        (status = epochs_in_use(c, &used)) == STATUS_OK &&
        (dropped = !used.oldest || used.oldest == r->epoch))
        status = drop_from_files(r);
    if ((status = client_close(c, status)) != STATUS_OK)
        return status;
    if (common->json)
        return json_print(json_pack("{s:I,s:I,s:b,s:b}", "epoch", (json_int_t)r->epoch, "rewrapped",
                                    (json_int_t)runs, "resumed", r->resumed, "dropped_old", dropped));
    if (r->from_command)
        printf("%" PRIu64 " runs and datasets wrapped under the newest key of the kek_command\n", runs);
    else
        printf("%s epoch %" PRIu32 ": %" PRIu64 " runs and datasets rewrapped%s\n",
               r->resumed ? "finished the rotation to" : "rotated to", r->epoch, runs,
               dropped ? ", older keys dropped" : "");
    if (!r->from_command)
        fprintf(stderr,
                "every other credential file of this tenant needs the key of epoch %" PRIu32
                ": larder key rotate --also FILE,... copies it to those it can reach\n",
                r->epoch);
    return status;
}

/* The comma-separated files of --also. */
static bool split_also(struct rotation *r, const char *text)
{
    r->also_text = need(strdup(text));
    char *at = r->also_text;
    for (char *file; (file = strsep(&at, ","));)
        if (*file) {
            if (r->also_count == FILES_MAX)
                return false;
            r->also[r->also_count++] = file;
        }
    return true;
}

static int rotate_run(const struct command *cmd, int argc, char **argv)
{
    struct common common = {0};
    struct rotation r = {0};
    const char *also = NULL;
    const struct opt opts[] = {
        {"drop-old", OPT_FLAG, &r.drop_old}, {"new", OPT_FLAG, &r.begin_new}, {"also", OPT_TEXT, &also}, {0}};
    int status;
    if (!options_read(cmd, &argc, argv, opts, 0, 0, &common, &status))
        return status;
    r.own = common.credentials ? common.credentials : getenv("LARDER_CREDENTIALS");
    if (!r.own || !*r.own)
        return fail_with(STATUS_DENIED,
                         "no credentials: set LARDER_CREDENTIALS to the file whose key is to be rotated");
    if (also && !split_also(&r, also))
        status = fail_usage(cmd->name, "--also takes at most %d files", FILES_MAX);
    else
        status = rotate(&common, &r);
    free(r.also_text);
    return status;
}

const struct command cmd_key_rotate = {
    "key rotate", "wrap the keys of all runs under a new key",
    "usage: larder key rotate [--drop-old] [--also FILE,FILE...] [--new] [--json]\n"
    "Adds a new key epoch to the credential file, then wraps the key of every run and dataset under it. No "
    "data is\n"
    "written. An interrupted rotation is finished by calling it again. Other users' credential files of the "
    "tenant\n"
    "need the new key too.\n"
    "  --also FILE,...  copy the keys to these credential files of the same tenant\n"
    "  --drop-old       remove the older envelopes, then the older keys from the files: who has only an "
    "older key\n"
    "                   can open nothing any more\n"
    "  --new            begin a new epoch even if an earlier rotation was not finished\n"
    "  --json           {\"epoch\", \"rewrapped\", \"resumed\", \"dropped_old\"}\n",
    rotate_run};
