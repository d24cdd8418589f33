/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/people.h"

/* ---- runs and keys ---- */

#define EPOCHS 16u

/* The tenant's keys of all epochs; a run begins with the first. */
static const struct keyring *keyring(void)
{
    static struct kek keks[EPOCHS];
    static struct keyring ring = {.keks = keks, .count = EPOCHS};
    for (uint32_t i = 0; i < EPOCHS && !keks[EPOCHS - 1].key; i++) {
        char bytes[KEY_BYTES + 1];
        snprintf(bytes, sizeof bytes, "a key of this small world: %6u", i);
        keks[i] = (struct kek){.epoch = i + 1, .key = secret_create(bytes, KEY_BYTES)};
        check(keks[i].key);
    }
    return &ring;
}

void people_keks(struct keyring *out)
{
    const struct keyring *ring = keyring();
    *out = (struct keyring){.keks = calloc(ring->count, sizeof *ring->keks), .count = ring->count};
    check(out->keks);
    for (size_t i = 0; i < ring->count; i++) {
        out->keks[i] = (struct kek){.epoch = ring->keks[i].epoch,
                                    .key = secret_create(secret_bytes(ring->keks[i].key), KEY_BYTES)};
        check(out->keks[i].key);
    }
}

/* Draws a key and puts it; whether it was first shows when the run is opened again. */
static enum err_class make_key(struct actor *a, const struct id *run)
{
    struct err e = {0};
    struct call c = {0};
    uint8_t bytes[KEY_BYTES], salt[SALT_BYTES], envelope[ENVELOPE_BYTES];
    actor_random(a, bytes, sizeof bytes);
    actor_random(a, salt, sizeof salt);
    struct dek dek = {.id = actor_id(a), .key = secret_create(bytes, sizeof bytes)};
    check(dek.key && envelope_wrap(keyring()->keks, "acme", run, &dek, salt, envelope, &e) == 0);
    dek_free(&dek);
    enum err_class class = ASK(a, &c, OP_ENVELOPE_PUT, envelope_put, .run_id = *run,
                               .envelope = SLICE(envelope, ENVELOPE_BYTES));
    call_drop(&c);
    return class == ERR_EXISTS ? ERR_NONE : class;
}

static void take_key(struct actor *a, struct model_run *r, const struct id *run, struct slice envelopes)
{
    struct err e = {0};
    if (envelopes.n % ENVELOPE_BYTES != 0)
        world_fail(a->w, "%s: %zu bytes of envelopes, each has %u", r->name, envelopes.n, ENVELOPE_BYTES);
    for (size_t at = 0; at < envelopes.n; at += ENVELOPE_BYTES) {
        struct dek dek;
        if (envelope_open(keyring(), "acme", run, envelopes.p + at, ENVELOPE_BYTES, &dek, &e) < 0)
            world_fail(a->w, "%s: the run's key does not open: %s", r->name, e.text);
        model_key_told(&a->w->model, r, &dek);
    }
}

enum err_class read_run(struct actor *a, struct model_run *r, bool create)
{
    enum err_class class = ERR_NETWORK;
    while (alive(a)) {
        struct call c = {0};
        bool was_there = r->id_told, had_key = r->dek_told;
        class = ASK(a, &c, OP_RUN_OPEN, run_open, .kind = (uint8_t)r->kind, .name = slice_str(r->name),
                    .create = create, .run_id = actor_id(a));
        if (class != ERR_NONE) {
            if (class == ERR_NOT_FOUND && (create || was_there))
                world_fail(a->w, "%s: the run is not found: %s", r->name, c.err.text);
            call_drop(&c);
            break;
        }
        struct msg_run_open_reply reply = ANSWER(&c, run_open_reply);
        model_run_told(&a->w->model, r, &reply.run_id);
        if (reply.envelopes.n)
            take_key(a, r, &reply.run_id, reply.envelopes);
        else if (had_key)
            world_fail(a->w, "%s: the run had a key and has none", r->name);
        bool has_key = reply.envelopes.n > 0;
        call_drop(&c);
        if (has_key)
            break;
        if (!create)
            return ERR_NOT_FOUND;
        class = make_key(a, &r->id);
        if (class != ERR_NONE)
            break;
    }
    return alive(a) ? class : ERR_NETWORK;
}

/* Epochs of all envelopes: a bit each. 0: the run was not opened. */
static uint32_t epochs_of(struct actor *a, struct model_run *r)
{
    struct call c = {0};
    uint32_t epochs = 0;
    if (ASK(a, &c, OP_RUN_OPEN, run_open, .kind = (uint8_t)r->kind, .name = slice_str(r->name)) == ERR_NONE) {
        struct msg_run_open_reply reply = ANSWER(&c, run_open_reply);
        for (size_t at = 0; at + ENVELOPE_BYTES <= reply.envelopes.n; at += ENVELOPE_BYTES) {
            uint32_t epoch;
            struct id run;
            check(envelope_epoch(reply.envelopes.p + at, ENVELOPE_BYTES, &run, &epoch, &c.err) == 0);
            check(epoch >= 1 && epoch <= EPOCHS);
            epochs |= 1u << (epoch - 1);
        }
        if (reply.envelopes.n)
            take_key(a, r, &reply.run_id, reply.envelopes);
    }
    call_drop(&c);
    return epochs;
}

void rotate_key(struct actor *a, struct model_run *r)
{
    uint32_t had = epochs_of(a, r), newest = had ? 31u - (uint32_t)__builtin_clz(had) : 0;
    uint8_t salt[SALT_BYTES], envelope[ENVELOPE_BYTES];
    struct err e = {0};
    struct call c = {0};
    if (!had || !r->dek_told || newest + 1 >= EPOCHS)
        return;
    actor_random(a, salt, sizeof salt);
    check(envelope_wrap(&keyring()->keks[newest + 1], "acme", &r->id, &r->dek, salt, envelope, &e) == 0);
    enum err_class class = ASK(a, &c, OP_ENVELOPE_PUT, envelope_put, .run_id = r->id,
                               .envelope = SLICE(envelope, ENVELOPE_BYTES));
    call_drop(&c);
    for (uint32_t i = 0; i <= newest && class == ERR_NONE; i++) {
        struct call drop = {0};
        if (had >> i & 1)
            class = ASK(a, &drop, OP_ENVELOPE_DROP, envelope_drop, .run_id = r->id, .epoch = i + 1);
        call_drop(&drop);
    }
    a->w->tally.rotations += class == ERR_NONE;
}

/* ---- commits ---- */

static enum err_class list_page(struct actor *a, struct model_run *r, uint64_t after,
                                struct msg_commit_item **items, size_t *n)
{
    struct call c = {0};
    enum err_class class = ASK(a, &c, OP_COMMIT_LIST, commit_list, .kind = (uint8_t)r->kind,
                               .name = slice_str(r->name), .after_sequence = after);
    if (class == ERR_NONE) {
        struct msg_list_reply reply = ANSWER(&c, list_reply);
        struct rcur in = rcur_of(reply.items.p, reply.items.n);
        if (reply.next.n)
            world_fail(a->w, "%s: so few commits come in two pages", r->name);
        *items = calloc(reply.count + 1u, sizeof **items);
        check(*items);
        for (uint32_t i = 0; i < reply.count; i++) {
            if (msg_commit_item_decode(&in, &(*items)[i], &c.err) < 0)
                world_fail(a->w, "%s: the list: %s", r->name, c.err.text);
            (*items)[i].reason = (*items)[i].labels = (struct slice){0}; /* they go with the answer */
        }
        *n = reply.count;
    }
    call_drop(&c);
    return class;
}

enum err_class read_list(struct actor *a, struct model_run *r, struct msg_commit_item **items, size_t *n)
{
    struct msg_commit_item *found = NULL;
    size_t count = 0;
    uint64_t asked_at = model_asks(&a->w->model);
    bool was_there = r->id_told;
    enum err_class class = list_page(a, r, 0, &found, &count);
    if (class == ERR_NOT_FOUND && was_there)
        world_fail(a->w, "%s: the run that was there is not listed", r->name);
    if (class == ERR_NONE)
        model_listed(&a->w->model, r, asked_at, found, count);
    if (items && class == ERR_NONE) {
        *items = found;
        *n = count;
    } else {
        free(found);
    }
    return class;
}

static void not_found(struct actor *a, struct model_run *r, enum commit_select select, uint64_t value,
                      uint64_t asked_at)
{
    if (select == SELECT_LATEST_GOOD || select == SELECT_LATEST)
        model_empty(&a->w->model, r, asked_at);
    else if (select == SELECT_SEQUENCE && read_list(a, r, NULL, NULL) == ERR_NONE)
        model_not_found(&a->w->model, r, value, "its record");
}

enum err_class read_commit(struct actor *a, struct model_run *r, enum commit_select select, uint64_t value,
                           struct commit *out)
{
    struct call c = {0};
    uint64_t asked_at = model_asks(&a->w->model);
    enum err_class class = ASK(a, &c, OP_COMMIT_GET, commit_get, .kind = (uint8_t)r->kind,
                               .name = slice_str(r->name), .select = (uint8_t)select, .value = value);
    if (class == ERR_NONE) {
        struct msg_commit_get_reply reply = ANSWER(&c, commit_get_reply);
        if (commit_decode(reply.record.p, reply.record.n, out, &c.err) < 0)
            world_fail(a->w, "%s: a commit record: %s", r->name, c.err.text);
        if (select == SELECT_SEQUENCE && out->sequence != value)
            world_fail(a->w, "%s: another sequence than was asked for", r->name);
        model_record_seen(&a->w->model, r, asked_at, out, reply.state);
        uint8_t loader[8];
        le64_put(loader, out->step);
        if (out->loader.n != sizeof loader || memcmp(out->loader.p, loader, sizeof loader) != 0)
            world_fail(a->w, "%s: step %llu has another loader position than was saved", r->name,
                       (unsigned long long)out->step);
    } else if (class == ERR_NOT_FOUND && alive(a)) {
        not_found(a, r, select, value, asked_at);
    }
    call_drop(&c);
    return class;
}

/* ---- parts ---- */

/* ERR_NOT_FOUND, or ERR_NETWORK if killed. */
static enum err_class read_range(struct actor *a, const struct id *run, const struct commit_part *p,
                                 uint64_t offset, uint64_t n, bool anew, struct buf *out)
{
    enum err_class class = ERR_NETWORK;
    while (alive(a)) {
        struct call c = {.want_bytes = n};
        struct buf range = {0};
        msg_read_range_encode(&(struct msg_read_range){.object = p->segment, .offset = offset, .bytes = n},
                              &range);
        class = ASK(a, &c, OP_READ, read, .source = READ_SEGMENT, .class = anew ? 1 | READ_ANEW : 1,
                    .scope = *run, .credit = roll(a, 2) ? 1 + roll(a, 3000) : n, .count = 1,
                    .ranges = SLICE(range.p, range.n));
        buf_free(&range);
        if (class == ERR_NONE && c.reply.n != n)
            world_fail(a->w, "%s: %zu bytes were read well, %llu asked for", a->name, c.reply.n,
                       (unsigned long long)n);
        if (class == ERR_NONE)
            buf_put(out, c.reply.p, c.reply.n);
        call_drop(&c);
        if (class == ERR_NONE || class == ERR_NOT_FOUND)
            break;
        actor_sleep(a, 10);
    }
    return class;
}

/* A disk that misreads does so once: what does not stand its checks is read once more, past all caches. */
static enum err_class read_part(struct actor *a, struct model_run *r, const struct commit *c, uint32_t rank,
                                bool data, struct index_private *index)
{
    const uint32_t *k = a->w->plan.knob;
    for (bool anew = false;; anew = true) {
        const struct commit_part *p = &c->parts[rank];
        struct buf bytes = {0};
        struct err e = {0};
        enum err_class class = read_range(a, &r->id, p, 0, p->segment_bytes, anew, &bytes);
        bool good = class != ERR_NONE ||
                    sim_part_check(bytes.p, bytes.n, c, rank, &r->dek, &a->w->shape, data, index, &e) == 0;
        buf_free(&bytes);
        if (good)
            return class;
        if (anew || !(k[KNOB_CORRUPT] || k[KNOB_MISDIRECT]))
            world_fail(a->w, "%s: sequence %llu, step %llu: %s", r->name, (unsigned long long)c->sequence,
                       (unsigned long long)c->step, e.text);
        a->w->tally.caught++;
        world_note(a->w, "%s: reads rank %u of step %llu again: %s", a->name, rank,
                   (unsigned long long)c->step, e.text);
    }
}

static enum err_class read_whole(struct actor *a, struct model_run *r, const struct commit *c, bool data,
                                 struct index_private *indexes)
{
    enum err_class class = ERR_NONE;
    for (uint32_t i = 0; i < c->world && class == ERR_NONE; i++)
        class = read_part(a, r, c, i, data, &indexes[i]);
    return class;
}

static enum err_class read_all(struct actor *a, struct model_run *r, const struct commit *c, bool data)
{
    struct index_private indexes[MODEL_RANKS_MAX] = {0};
    struct err e = {0};
    check(c->world <= MODEL_RANKS_MAX);
    enum err_class class = read_whole(a, r, c, data, indexes);
    if (class == ERR_NONE && index_check_set(indexes, c->world, &e) < 0)
        world_fail(a->w, "%s: the parts of step %llu do not fit: %s", r->name, (unsigned long long)c->step,
                   e.text);
    for (uint32_t i = 0; i < c->world; i++)
        index_private_free(&indexes[i]);
    return class;
}

enum err_class read_set(struct actor *a, struct model_run *r, const struct commit *c)
{
    return read_all(a, r, c, false);
}

enum err_class read_parts(struct actor *a, struct model_run *r, const struct commit *c)
{
    enum err_class class = read_all(a, r, c, true);
    if (class == ERR_NONE)
        a->w->tally.restores++;
    if (class == ERR_NOT_FOUND && alive(a) && read_list(a, r, NULL, NULL) == ERR_NONE)
        model_not_found(&a->w->model, r, c->sequence, "a part of it");
    return class;
}
