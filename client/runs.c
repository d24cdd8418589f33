/* SPDX-License-Identifier: Apache-2.0 */
/* Runs and datasets with their keys: opening, rotating, destroying. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "client/list.h"
#include "client/secrets.h"

static int name_of(const char *name, struct err *e)
{
    if (!name)
        return err_set(e, ERR_INVALID, "no run is named");
    return run_name_check(name, strlen(name), e);
}

static int ask_open(struct larder *c, const struct run *r, bool create, struct call *call,
                    struct msg_run_open_reply *out, struct err *e)
{
    struct buf b = {0};
    struct msg_run_open m = {
        .kind = (uint8_t)r->kind, .name = slice_str(r->name), .create = create, .run_id = r->run_id};
    msg_run_open_encode(&m, &b);
    struct rcur in = {0};
    int rc = buf_end(&b, "run_open", e);
    if (rc == 0)
        rc = conn_call(client_conn(c), OP_RUN_OPEN, SLICE(b.p, b.n), SLICE(NULL, 0), 0, call, &in, e);
    buf_free(&b);
    if (rc < 0)
        return rc;
    rc = msg_run_open_reply_decode(&in, out, e);
    if (rc == 0 && out->envelopes.n % ENVELOPE_BYTES != 0)
        rc = err_set(e, ERR_PROTOCOL, "the server sent %zu bytes of envelopes, expected a multiple of %u",
                     out->envelopes.n, ENVELOPE_BYTES);
    if (rc < 0)
        call_free(call);
    return rc;
}

/* Opens the first envelope that the keyring fits, the lowest epoch first. All hold the same key. */
static int open_envelopes(struct larder *c, struct run *r, struct slice envelopes, struct err *e)
{
    const struct credentials *k = client_credentials(c);
    struct err last;
    err_set(&last, ERR_NOT_FOUND, "it has no key yet");
    uint32_t done = 0;
    for (size_t n = envelopes.n / ENVELOPE_BYTES; n > 0; n--) {
        uint32_t lowest = UINT32_MAX;
        const uint8_t *at = NULL;
        for (size_t i = 0; i < envelopes.n; i += ENVELOPE_BYTES) {
            struct id id;
            uint32_t epoch;
            int rc = envelope_epoch(envelopes.p + i, ENVELOPE_BYTES, &id, &epoch, &last);
            if (rc == 0 && epoch > done && epoch < lowest)
                lowest = epoch, at = envelopes.p + i;
        }
        if (!at)
            break;
        if (envelope_open(&k->keks, k->tenant, &r->run_id, at, ENVELOPE_BYTES, &r->dek, &last) == 0)
            return 0;
        done = lowest;
    }
    if (e)
        *e = last;
    return -last.errnum;
}

/* The creator's key: exclusive on the server, so of several ranks one wins. */
static int put_first_envelope(struct larder *c, const struct run *r, struct err *e)
{
    const struct credentials *k = client_credentials(c);
    const struct kek *kek = keyring_newest(&k->keks);
    if (!kek)
        return err_set(e, ERR_KEY, "the credential file %s holds no KEK; a new run cannot be given a key",
                       client_options(c)->credentials);
    uint8_t salt[SALT_BYTES], envelope[ENVELOPE_BYTES];
    struct dek dek = {0};
    int rc = err_set(e, ERR_NO_MEMORY, "no memory for a key");
    secrets_random(salt, sizeof salt);
    secrets_random(&dek.id, sizeof dek.id);
    if ((dek.key = secret_room(KEY_BYTES))) {
        secrets_random(secret_fill(dek.key), KEY_BYTES);
        rc = envelope_wrap(kek, k->tenant, &r->run_id, &dek, salt, envelope, e);
    }
    dek_free(&dek);
    if (rc < 0)
        return rc;
    return run_envelope_put(c, &r->run_id, envelope, e);
}

int run_envelope_put(struct larder *c, const struct id *run_id, const uint8_t envelope[ENVELOPE_BYTES],
                     struct err *e)
{
    struct buf b = {0};
    struct call call;
    msg_envelope_put_encode(
        &(struct msg_envelope_put){.run_id = *run_id, .envelope = SLICE(envelope, ENVELOPE_BYTES)}, &b);
    int rc = buf_end(&b, "envelope_put", e);
    if (rc == 0)
        rc = conn_call(client_conn(c), OP_ENVELOPE_PUT, SLICE(b.p, b.n), SLICE(NULL, 0), 0, &call, NULL, e);
    buf_free(&b);
    if (rc == 0)
        call_free(&call);
    return rc;
}

int run_open(struct larder *c, enum run_kind kind, const char *name, bool create, struct run *out,
             struct err *e)
{
    struct run r = {.kind = kind};
    struct call call;
    struct msg_run_open_reply m;
    int rc = name_of(name, e);
    if (rc < 0)
        return rc;
    memcpy(r.name, name, strlen(name) + 1);
    if (create)
        secrets_random(&r.run_id, sizeof r.run_id);
    rc = ask_open(c, &r, create, &call, &m, e);
    if (rc < 0)
        return err_prepend(e, "opening %s %s", kind == RUN_DATASET ? "dataset" : "run", name);
    r.run_id = m.run_id;
    if (create && m.envelopes.n == 0) {
        call_free(&call);
        rc = put_first_envelope(c, &r, e);
        if (rc == -EEXIST)
            rc = 0;  /* another rank was first */
        if (rc == 0) /* what the store holds counts, not what we made */
            rc = ask_open(c, &r, false, &call, &m, e);
        if (rc < 0)
            return err_prepend(e, "making the key of %s", name);
    }
    r.latest_sequence = m.latest_sequence;
    rc = open_envelopes(c, &r, m.envelopes, e);
    call_free(&call);
    if (rc < 0)
        return err_prepend(e, "opening the key of %s %s", kind == RUN_DATASET ? "dataset" : "run", name);
    *out = r;
    return 0;
}

void run_close(struct run *r)
{
    dek_free(&r->dek);
    *r = (struct run){0};
}

int run_commit(struct larder *c, const struct run *r, enum commit_select select, uint64_t value,
               struct commit *out, enum commit_state *state, struct err *e)
{
    struct buf b = {0};
    struct call call;
    struct rcur in = {0};
    struct msg_commit_get m = {
        .kind = (uint8_t)r->kind, .name = slice_str(r->name), .select = (uint8_t)select, .value = value};
    msg_commit_get_encode(&m, &b);
    int rc = buf_end(&b, "commit_get", e);
    if (rc == 0)
        rc = conn_call(client_conn(c), OP_COMMIT_GET, SLICE(b.p, b.n), SLICE(NULL, 0), 0, &call, &in, e);
    buf_free(&b);
    if (rc < 0)
        return rc;
    struct msg_commit_get_reply reply;
    rc = msg_commit_get_reply_decode(&in, &reply, e);
    if (rc == 0)
        rc = commit_decode(reply.record.p, reply.record.n, out, e);
    if (rc == 0 && state)
        *state = (enum commit_state)reply.state;
    call_free(&call);
    if (rc == 0 && (!id_equal(&out->run_id, &r->run_id) || out->kind != r->kind)) {
        commit_free(out);
        rc = err_set(e, ERR_CORRUPT, "the server gave a commit record of another run than %s", r->name);
    }
    return rc;
}

/* ---- rotation ---- */

struct rotation {
    struct larder *c;
    bool drop_old;
    uint64_t count;
    uint64_t locked;       /* runs whose key does not open with ours */
    struct err first_lock; /* of the first of them */
};

static int drop_envelope(struct larder *c, const struct id *run_id, uint32_t epoch, struct err *e)
{
    struct buf b = {0};
    struct call call;
    msg_envelope_drop_encode(&(struct msg_envelope_drop){.run_id = *run_id, .epoch = epoch}, &b);
    int rc = buf_end(&b, "envelope_drop", e);
    if (rc == 0)
        rc = conn_call(client_conn(c), OP_ENVELOPE_DROP, SLICE(b.p, b.n), SLICE(NULL, 0), 0, &call, NULL, e);
    buf_free(&b);
    if (rc == 0)
        call_free(&call);
    return rc == -ENOENT ? 0 : rc; /* dropped by an earlier, interrupted rotation */
}

static int rewrap(struct rotation *t, const struct run *r, const struct kek *newest, struct err *e)
{
    uint8_t salt[SALT_BYTES], envelope[ENVELOPE_BYTES];
    secrets_random(salt, sizeof salt);
    int rc = envelope_wrap(newest, client_credentials(t->c)->tenant, &r->run_id, &r->dek, salt, envelope, e);
    if (rc == 0)
        rc = run_envelope_put(t->c, &r->run_id, envelope, e);
    if (rc == 0)
        t->count++;
    return rc == -EEXIST ? 0 : rc; /* another rotation was first: newest_opens() tells whether with our key */
}

/* What the store holds for the newest epoch must open with our KEK of that epoch, and hold the run's key:
 * before an old envelope goes, and before anybody takes the rotation for done. Somebody else may have given
 * that number to another KEK. */
static int newest_opens(struct rotation *t, struct run *r, uint32_t newest, struct err *e)
{
    struct call call;
    struct msg_run_open_reply m;
    struct dek dek = {0};
    int rc = ask_open(t->c, r, false, &call, &m, e);
    if (rc < 0)
        return rc;
    rc = err_set(e, ERR_NOT_FOUND, "the envelope of epoch %u has gone again; rotate once more", newest);
    for (size_t i = 0; i < m.envelopes.n; i += ENVELOPE_BYTES) {
        struct id id;
        uint32_t epoch;
        if (envelope_epoch(m.envelopes.p + i, ENVELOPE_BYTES, &id, &epoch, NULL) < 0 || epoch != newest)
            continue;
        const struct credentials *k = client_credentials(t->c);
        rc = envelope_open(&k->keks, k->tenant, &r->run_id, m.envelopes.p + i, ENVELOPE_BYTES, &dek, e);
        if (rc == 0 && (!id_equal(&dek.id, &r->dek.id) || !secret_equal(dek.key, r->dek.key)))
            rc = err_set(e, ERR_MISMATCH, "the envelope of epoch %u holds another key than the older ones",
                         newest);
    }
    dek_free(&dek);
    call_free(&call);
    if (rc == -EKEYREJECTED)
        return err_set(
            e, ERR_KEY,
            "wrong key: it is already wrapped under another KEK of epoch %u, made by a rotation with "
            "another credential file; the old envelopes are kept: use that file, or begin another epoch "
            "here (larder key rotate --new)",
            newest);
    return rc < 0 ? err_prepend(e, "the old envelopes are kept") : 0;
}

static int rotate_one(struct rotation *t, enum run_kind kind, const struct msg_run_item *item, struct err *e)
{
    const struct kek *newest = keyring_newest(&client_credentials(t->c)->keks);
    char name[NAME_BYTES_MAX + 1];
    bool has_newest = false;
    size_t epochs = item->envelope_epochs.n / 4;
    for (size_t i = 0; i < epochs; i++)
        has_newest |= le32_get(item->envelope_epochs.p + 4 * i) == newest->epoch;
    if (epochs == 0)
        return 0;
    if (!slice_cstr(item->name, name, sizeof name))
        return err_set(e, ERR_PROTOCOL, "the server listed a run under a name that is none");
    struct run r;
    int rc = run_open(t->c, kind, name, false, &r, e);
    if (rc < 0)
        return rc;
    if (!has_newest)
        rc = rewrap(t, &r, newest, e);
    if (rc == 0)
        rc = newest_opens(t, &r, newest->epoch, e);
    for (size_t i = 0; rc == 0 && t->drop_old && i < epochs; i++) {
        uint32_t epoch = le32_get(item->envelope_epochs.p + 4 * i);
        if (epoch != newest->epoch)
            rc = drop_envelope(t->c, &r.run_id, epoch, e);
    }
    run_close(&r);
    return rc < 0 ? err_prepend(e, "rotating the key of %s", name) : 0;
}

static int rotate_item(void *arg, enum run_kind kind, struct rcur *in, struct err *e)
{
    struct msg_run_item item;
    struct rotation *t = arg;
    struct err one;
    int rc = msg_run_item_decode(in, &item, e);
    if (rc < 0)
        return rc;
    err_clear(&one);
    rc = rotate_one(t, kind, &item, &one);
    if (rc == -EKEYREJECTED) { /* one lost key must not keep the others from being rotated */
        if (t->locked++ == 0)
            t->first_lock = one;
        return 0;
    }
    if (rc < 0 && e)
        *e = one;
    return rc;
}

static int rotate_checkpoints(void *arg, struct rcur *in, struct err *e)
{
    return rotate_item(arg, RUN_CHECKPOINTS, in, e);
}

static int rotate_datasets(void *arg, struct rcur *in, struct err *e)
{
    return rotate_item(arg, RUN_DATASET, in, e);
}

int larder_key_rotate(struct larder *c, int drop_old, uint64_t *runs, struct larder_error *error)
{
    struct err e;
    err_clear(&e);
    int rc = client_enter(c, &e);
    struct rotation t = {.c = c, .drop_old = drop_old != 0};
    if (rc == 0 && !keyring_newest(&client_credentials(c)->keks))
        rc = err_set(&e, ERR_KEY, "the credential file %s holds no KEK to rotate to",
                     client_options(c)->credentials);
    if (rc == 0)
        rc = list_runs(c, RUN_CHECKPOINTS, rotate_checkpoints, &t, &e);
    if (rc == 0)
        rc = list_runs(c, RUN_DATASET, rotate_datasets, &t, &e);
    if (rc == 0 && t.locked) {
        e = t.first_lock;
        rc = err_prepend(&e, "%" PRIu64 " keys were not rotated, the first", t.locked);
    }
    if (runs)
        *runs = t.count;
    return client_leave(rc, &e, error);
}

int larder_run_destroy(struct larder *c, enum larder_kind kind, const char *run, struct larder_error *error)
{
    struct err e;
    err_clear(&e);
    struct buf b = {0};
    struct call call;
    int rc = client_enter(c, &e);
    if (rc == 0)
        rc = name_of(run, &e);
    if (rc == 0) {
        msg_run_destroy_encode(&(struct msg_run_destroy){.kind = (uint8_t)kind, .name = slice_str(run)}, &b);
        rc = buf_end(&b, "run_destroy", &e);
    }
    if (rc == 0)
        rc = conn_call(client_conn(c), OP_RUN_DESTROY, SLICE(b.p, b.n), SLICE(NULL, 0), 0, &call, NULL, &e);
    if (rc == 0)
        call_free(&call);
    buf_free(&b);
    return client_leave(rc, &e, error);
}
