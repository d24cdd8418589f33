/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scrub: everything that commit records promise is read back from the medium and compared, without keys and
 * without ever writing. Memory is bounded: one buffer of a chunk and one window of a chunk table.
 *
 *   for each run, each commit:  the record; for each part: length, header, trailer, digest of the index and
 * zeros behind it, and at level data every chunk: XXH3-128 of what is stored, and zeros up to the next border
 *
 * What does not match is read once more, past the cache, before it is called damaged. A commit that prune
 * removes meanwhile is skipped.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "server/store/internal.h"

#define NOT_A_CHUNK UINT32_MAX
#define BUFFER_BYTES \
    ((size_t)COMMIT_BYTES_MAX + BLOCK_BYTES) /* a record, or a chunk; touched as far as needed */
#define WINDOW_BYTES     ((size_t)256 << 10)
#define INDEX_HEAD_BYTES 32u

struct scrub {
    struct msg_scrub m;
    struct id *runs; /* to visit */
    size_t run_count, run_at;
    uint64_t *sequences; /* of the run */
    size_t sequence_count, sequence_at;
    uint32_t part_at;
    const struct list *damage_at; /* the last one told, from when the runs are done */
    bool again;                   /* the step that failed is being done once more */
    bool found;                   /* damage in this segment */
    uint64_t commits;             /* looked at */
    struct commit_part part;
    task_step *after_item;
    uint64_t object_bytes;
    struct segment_trailer trailer;
    struct sha256 *hash;
    uint64_t hashed;
    uint32_t chunk_at;
    struct chunk_entry chunk;
    uint8_t *buffer, *window;
    uint64_t window_offset;
    size_t window_bytes;
};

static void scrub_free(void *own)
{
    struct scrub *x = own;
    free(x->runs);
    free(x->sequences);
    sha256_end(x->hash, NULL);
    free(x->buffer);
    free(x->window);
    free(x);
}

static task_step next_run, next_commit, next_part, segment_start, header_start, trailer_start, index_start,
    index_step, chunk_next, chunk_step, segment_good;

static uint64_t sequence_now(const struct scrub *x)
{
    return x->sequences[x->sequence_at];
}

/* The commit that is being looked at, if it is still there. */
static struct commit_entry *commit_now(struct task *t)
{
    struct scrub *x = t->own;
    return t->run->destroying ? NULL : commit_by_sequence(t->run, sequence_now(x));
}

static bool scrub_goes_on(struct task *t)
{
    if (!t->cancelled && !t->s->stopping)
        return true;
    task_fail(t, ERR_CANCELLED, t->cancelled ? "the request was cancelled" : "the server is stopping");
    return false;
}

/* ---- findings ---- */

static void tell(struct task *t)
{
    const struct scrub *x = t->own;
    if (!scrub_goes_on(t))
        return;
    t->waiting = t->lent = true; /* until scrub_continue */
    t->then = x->after_item;
    t->op->more(t->op);
}

static void send_item(struct task *t, const struct msg_scrub_item *m, task_step *next)
{
    struct scrub *x = t->own;
    buf_free(&t->op->reply);
    t->op->reply.max = FRAME_CONTROL_BYTES_MAX;
    msg_scrub_item_encode(m, &t->op->reply);
    x->after_item = next;
    if (buf_end(&t->op->reply, "a finding", t->err) < 0)
        task_end(t);
    else
        task_later(t, tell);
}

/* Tells of one object of a commit, then goes on with `next`. */
static void item(struct task *t, uint32_t chunk, uint64_t offset, uint64_t bytes, const struct err *why,
                 task_step *next)
{
    struct scrub *x = t->own;
    const struct commit_entry *c = commit_now(t);
    if (!c) { /* pruned meanwhile: what was found means nothing */
        x->again = false;
        next_commit(t);
        return;
    }
    struct msg_scrub_item m = {
        .object = slice_str(t->io->name),
        .sequence = c->commit.sequence,
        .step = c->commit.step,
        .rank = x->part_at,
        .chunk = chunk,
        .offset = offset,
        .bytes = bytes,
        .class = why ? (uint32_t)why->class : 0,
        .text = slice_str(why ? why->text : ""),
    };
    if (why) {
        x->found = true;
        metric_add(METRIC_corrupt_found, 1);
        log_warn("scrub found damage object=%s sequence=%" PRIu64 " rank=%u chunk=%d offset=%" PRIu64
                 " reason=\"%s\"",
                 t->io->name, c->commit.sequence, x->part_at, (int)chunk, offset, why->text);
    }
    x->again = false;
    send_item(t, &m, next);
}

void scrub_continue(struct task *t)
{
    check(t->lent);
    t->lent = false;
    buf_free(&t->op->reply);
    t->op->reply.max = PAYLOAD_MAX;
    task_later(t, t->then);
}

/* A look failed: once more, or tell it and go on with `next`. */
static void suspicion(struct task *t, uint32_t chunk, uint64_t offset, uint64_t bytes, const struct err *why,
                      task_step *repeat, task_step *next)
{
    struct scrub *x = t->own;
    if (!scrub_goes_on(t))
        return;
    if (!x->again) {
        x->again = true;
        repeat(t);
        return;
    }
    item(t, chunk, offset, bytes, why, next);
}

static void read_at(struct task *t, uint64_t offset, void *p, size_t n, task_step *then)
{
    struct backend_op *b = task_op(t, then);
    backend_read(t->s->o.backend, b, t->io->name, true, offset, p, n);
}

/* 0, or why the bytes that were asked for are not there. */
static int read_fully(struct task *t, size_t n, struct err *why)
{
    const struct backend_op *b = &t->io->op;
    if (b->result < 0) {
        *why = b->err;
        if (why->class == ERR_NONE)
            err_sys(why, (int)-b->result, "reading");
        return -why->errnum;
    }
    metric_add(METRIC_scrub_read_bytes, b->result);
    if ((uint64_t)b->result < n)
        return err_set(why, ERR_CORRUPT, "cut short: %zu bytes expected, %" PRId64 " are there", n,
                       b->result);
    return 0;
}

/* ---- chunks ---- */

/* Also a good chunk fails by an entry that was misread: the table is read again with it. */
static void chunk_suspect(struct task *t, uint64_t offset, uint64_t bytes, const struct err *why)
{
    struct scrub *x = t->own;
    uint32_t number = x->chunk_at;
    x->window_bytes = 0;
    x->chunk_at += x->again;
    suspicion(t, number, offset, bytes, why, chunk_step, chunk_next);
}

static void chunk_read(struct task *t)
{
    struct scrub *x = t->own;
    struct err why = {0};
    size_t stored = x->chunk.stored_bytes, padded = (size_t)block_align(stored);
    int rc = read_fully(t, padded, &why);
    if (rc == 0) {
        struct hash128 found = hash128(x->buffer, stored);
        char is[2 * HASH128_BYTES + 1], was[2 * HASH128_BYTES + 1];
        hex_encode(found.bytes, sizeof found.bytes, is);
        hex_encode(x->chunk.stored_hash.bytes, HASH128_BYTES, was);
        if (memcmp(found.bytes, x->chunk.stored_hash.bytes, HASH128_BYTES) != 0)
            rc = err_set(&why, ERR_CORRUPT, "chunk %u at offset %" PRIu64 ": XXH3-128 %s expected, %s found",
                         x->chunk_at, x->chunk.offset, was, is);
        for (size_t i = stored; i < padded && rc == 0; i++)
            if (x->buffer[i] != 0)
                rc = err_set(&why, ERR_CORRUPT, "chunk %u: padding at offset %" PRIu64 " is not zero",
                             x->chunk_at, x->chunk.offset + i);
    }
    if (rc < 0) {
        chunk_suspect(t, x->chunk.offset, stored, &why);
        return;
    }
    x->again = false;
    x->chunk_at++;
    chunk_next(t);
}

static void window_read(struct task *t)
{
    struct scrub *x = t->own;
    struct err why = {0};
    if (read_fully(t, CHUNK_ENTRY_BYTES, &why) < 0) {
        suspicion(t, NOT_A_CHUNK, x->window_offset, WINDOW_BYTES, &why, chunk_step, next_part);
        return;
    }
    x->window_bytes = (size_t)t->io->op.result;
    chunk_step(t);
}

/* The chunk numbered chunk_at: its entry, then its bytes. */
static void chunk_step(struct task *t)
{
    struct scrub *x = t->own;
    struct err why = {0};
    uint64_t at = x->trailer.index_offset + INDEX_HEAD_BYTES + (uint64_t)x->chunk_at * CHUNK_ENTRY_BYTES;
    if (at < x->window_offset || at + CHUNK_ENTRY_BYTES > x->window_offset + x->window_bytes) {
        x->window_offset = at / BLOCK_BYTES * BLOCK_BYTES;
        x->window_bytes = 0;
        read_at(t, x->window_offset, x->window, WINDOW_BYTES, window_read);
        return;
    }
    if (chunk_entry_decode(x->window + (at - x->window_offset), x->chunk_at, &x->chunk, &why) < 0) {
        chunk_suspect(t, at, CHUNK_ENTRY_BYTES, &why);
        return;
    }
    if (x->chunk.stored_bytes == 0) {
        x->again = false;
        x->chunk_at++;
        task_later(t, chunk_next);
        return;
    }
    read_at(t, x->chunk.offset, x->buffer, (size_t)block_align(x->chunk.stored_bytes), chunk_read);
}

static void chunk_next(struct task *t)
{
    struct scrub *x = t->own;
    if (!scrub_goes_on(t))
        return;
    if (!commit_now(t))
        next_commit(t);
    else if (x->m.level == SCRUB_DATA && x->chunk_at < x->trailer.chunks)
        chunk_step(t);
    else
        segment_good(t);
}

/* ---- header, trailer, index ---- */

static void segment_good(struct task *t)
{
    struct scrub *x = t->own;
    if (x->found)
        next_part(t);
    else
        item(t, NOT_A_CHUNK, 0, x->part.segment_bytes, NULL, next_part);
}

static int padding_is_zero(const struct scrub *x, size_t from, size_t to, struct err *why)
{
    for (size_t i = from; i < to; i++)
        if (x->buffer[i] != 0)
            return err_set(why, ERR_CORRUPT, "padding behind the index, at offset %" PRIu64 ", is not zero",
                           x->trailer.index_offset + x->hashed + i);
    return 0;
}

static void index_read(struct task *t)
{
    struct scrub *x = t->own;
    struct err why = {0};
    uint64_t left = x->trailer.index_bytes - x->hashed;
    size_t n = left < CHUNK_PLAIN_BYTES_MAX ? (size_t)left : CHUNK_PLAIN_BYTES_MAX;
    size_t padded = (size_t)block_align(n);
    int rc = read_fully(t, padded, &why);
    if (rc == 0)
        rc = padding_is_zero(x, n, padded, &why);
    if (rc < 0) {
        suspicion(t, NOT_A_CHUNK, x->trailer.index_offset + x->hashed, n, &why, index_start, next_part);
        return;
    }
    sha256_update(x->hash, x->buffer, n);
    x->hashed += n;
    index_step(t);
}

static void index_step(struct task *t)
{
    struct scrub *x = t->own;
    struct err why = {0};
    uint8_t digest[SHA256_BYTES];
    uint64_t left = x->trailer.index_bytes - x->hashed;
    if (!scrub_goes_on(t))
        return;
    if (left > 0) {
        size_t n = left < CHUNK_PLAIN_BYTES_MAX ? (size_t)block_align(left) : CHUNK_PLAIN_BYTES_MAX;
        read_at(t, x->trailer.index_offset + x->hashed, x->buffer, n, index_read);
        return;
    }
    sha256_end(x->hash, digest);
    x->hash = NULL;
    if (memcmp(digest, x->trailer.index_digest, SHA256_BYTES) != 0) {
        err_set(&why, ERR_CORRUPT,
                "the index at offset %" PRIu64 " does not have the SHA-256 that the trailer gives",
                x->trailer.index_offset);
        suspicion(t, NOT_A_CHUNK, x->trailer.index_offset, x->trailer.index_bytes, &why, index_start,
                  next_part);
        return;
    }
    x->again = false;
    x->chunk_at = 0;
    x->window_bytes = 0;
    chunk_next(t);
}

static void index_start(struct task *t)
{
    struct scrub *x = t->own;
    sha256_end(x->hash, NULL);
    x->hash = sha256_start();
    x->hashed = 0;
    if (!x->hash)
        task_fail(t, ERR_NO_MEMORY, "the server has no memory to go on");
    else
        index_step(t);
}

static void trailer_read(struct task *t)
{
    struct scrub *x = t->own;
    struct err why = {0};
    uint64_t at = x->part.segment_bytes - BLOCK_BYTES;
    int rc = read_fully(t, BLOCK_BYTES, &why);
    if (rc == 0)
        rc = segment_trailer_decode(x->buffer, &x->trailer, &why);
    if (rc == 0 && (!id_equal(&x->trailer.segment_id, &x->part.segment) ||
                    x->trailer.file_bytes != x->part.segment_bytes ||
                    memcmp(x->trailer.index_digest, x->part.index_digest, SHA256_BYTES) != 0))
        rc = err_set(&why, ERR_CORRUPT, "the trailer is not the one that the commit record binds");
    if (rc < 0) {
        suspicion(t, NOT_A_CHUNK, at, BLOCK_BYTES, &why, trailer_start, next_part);
        return;
    }
    x->again = false;
    index_start(t);
}

static void trailer_start(struct task *t)
{
    struct scrub *x = t->own;
    read_at(t, x->part.segment_bytes - BLOCK_BYTES, x->buffer, BLOCK_BYTES, trailer_read);
}

static void header_read(struct task *t)
{
    struct scrub *x = t->own;
    const struct commit_entry *c = commit_now(t);
    struct segment_header h;
    struct err why = {0};
    int rc = read_fully(t, BLOCK_BYTES, &why);
    if (rc == 0)
        rc = segment_header_decode(x->buffer, &h, &why);
    if (rc == 0 && c &&
        (!id_equal(&h.segment_id, &x->part.segment) || !id_equal(&h.run_id, &c->commit.run_id) ||
         !id_equal(&h.attempt, &c->commit.attempt) || h.step != c->commit.step || h.rank != x->part.rank ||
         h.world != c->commit.world || strcmp(h.tenant, t->tenant->record.name) != 0))
        rc = err_set(&why, ERR_CORRUPT,
                     "the header names another segment, run, attempt, step or rank than the commit");
    if (rc < 0) {
        suspicion(t, NOT_A_CHUNK, 0, BLOCK_BYTES, &why, header_start, next_part);
        return;
    }
    x->again = false;
    trailer_start(t);
}

static void header_start(struct task *t)
{
    struct scrub *x = t->own;
    read_at(t, 0, x->buffer, BLOCK_BYTES, header_read);
}

static void segment_has_size(struct task *t)
{
    struct scrub *x = t->own;
    struct err why = t->io->op.err;
    if (task_result(t) >= 0 && x->object_bytes != x->part.segment_bytes)
        err_set(&why, ERR_CORRUPT, "%" PRIu64 " bytes expected, the segment has %" PRIu64,
                x->part.segment_bytes, x->object_bytes);
    if (why.class != ERR_NONE) {
        suspicion(t, NOT_A_CHUNK, 0, x->part.segment_bytes, &why, segment_start, next_part);
        return;
    }
    x->again = false;
    header_start(t);
}

static void segment_start(struct task *t)
{
    struct scrub *x = t->own;
    store_segment_name(t->tenant->record.name, &t->run->record.run_id, &x->part.segment, t->io->name);
    backend_stat(t->s->o.backend, task_op(t, segment_has_size), t->io->name, &x->object_bytes);
}

static void next_part(struct task *t)
{
    struct scrub *x = t->own;
    if (!scrub_goes_on(t))
        return;
    const struct commit_entry *c = commit_now(t);
    x->part_at++;
    x->again = x->found = false;
    if (!c || x->part_at >= c->commit.world) {
        next_commit(t);
        return;
    }
    x->part = c->commit.parts[x->part_at];
    segment_start(t);
}

/* ---- commits and runs ---- */

static void record_read(struct task *t);

static void record_start(struct task *t)
{
    struct scrub *x = t->own;
    name_of_number(t->run, 'c', sequence_now(x), t->io->name);
    read_at(t, 0, x->buffer, (size_t)block_align(t->buf.n) + BLOCK_BYTES, record_read);
}

static void parts_begin(struct task *t)
{
    struct scrub *x = t->own;
    x->part_at = UINT32_MAX; /* next_part counts from here */
    next_part(t);
}

static void record_read(struct task *t)
{
    struct scrub *x = t->own;
    struct err why = {0};
    int rc = read_fully(t, 0, &why);
    if (rc == 0 && ((uint64_t)t->io->op.result != t->buf.n || memcmp(x->buffer, t->buf.p, t->buf.n) != 0)) {
        struct commit c = {0};
        rc = commit_decode(x->buffer, (size_t)t->io->op.result, &c, &why);
        commit_free(&c);
        if (rc == 0)
            rc = err_set(&why, ERR_CORRUPT,
                         "the commit record is not the one that the server read at its start");
    }
    if (rc < 0) {
        suspicion(t, NOT_A_CHUNK, 0, t->buf.n, &why, record_start, parts_begin);
        return;
    }
    x->again = false;
    parts_begin(t);
}

static void commit_start(struct task *t)
{
    struct scrub *x = t->own;
    const struct commit_entry *c = commit_now(t);
    if (!c) {
        next_commit(t);
        return;
    }
    x->commits++;
    x->part_at = 0;
    buf_reset(&t->buf);
    if (commit_encode(&c->commit, &t->buf, t->err) < 0)
        task_end(t);
    else
        record_start(t);
}

static void next_commit(struct task *t)
{
    struct scrub *x = t->own;
    if (!scrub_goes_on(t))
        return;
    x->again = false;
    if (++x->sequence_at < x->sequence_count)
        task_later(t, commit_start);
    else
        task_later(t, next_run);
}

static bool take_sequences(struct scrub *x, const struct run *r)
{
    free(x->sequences);
    x->sequences = calloc(r->commit_count + 1, sizeof *x->sequences);
    x->sequence_count = 0;
    for (size_t i = 0; x->sequences && i < r->commit_count; i++)
        if (x->m.sequence == 0 || r->commits[i]->commit.sequence == x->m.sequence)
            x->sequences[x->sequence_count++] = r->commits[i]->commit.sequence;
    x->sequence_at = (size_t)-1; /* next_commit counts from here */
    return x->sequences != NULL;
}

/* Does what recovery could not use belong to what is being verified? */
static bool damage_is_ours(const struct task *t, const struct damage *d)
{
    const struct scrub *x = t->own;
    char folder[OBJECT_NAME_BYTES];
    size_t at = 0;
    int n = snprintf(folder, sizeof folder, "t/%s/", t->tenant->record.name);
    if (d->gone || strncmp(d->name, folder, (size_t)n) != 0 ||
        (x->m.sequence && x->m.sequence != d->sequence))
        return false;
    for (const struct run *r; (r = map_next(&t->tenant->runs, &at));) {
        name_of_folder(r, folder);
        size_t len = strlen(folder);
        if (strncmp(d->name, folder, len) != 0 || d->name[len] != '/')
            continue;
        bool named = x->m.name.n == 0 || slice_eq(x->m.name, slice_str(r->record.name));
        bool listed = d->name[len + 1] == 'c' && commit_by_sequence(r, d->sequence); /* told of already */
        return named && r->record.kind == x->m.kind && !listed;
    }
    return x->m.name.n == 0;
}

/* The runs are done: what recovery has skipped is told too, from memory, since no commit leads to it. */
static void next_damage(struct task *t)
{
    struct scrub *x = t->own;
    if (!scrub_goes_on(t))
        return;
    const struct list *head = &t->s->damages;
    if (!x->damage_at)
        x->damage_at = head;
    for (const struct list *it = x->damage_at->next; it != head; it = it->next) {
        const struct damage *d = container_of(it, struct damage, link);
        x->damage_at = it;
        if (!damage_is_ours(t, d))
            continue;
        struct msg_scrub_item m = {.object = slice_str(d->name),
                                   .sequence = d->sequence,
                                   .chunk = NOT_A_CHUNK,
                                   .class = (uint32_t)d->why.class,
                                   .text = slice_str(d->why.text)};
        send_item(t, &m, next_damage);
        return;
    }
    log_info("scrub done tenant=%s commits=%" PRIu64 " level=%u", t->op->tenant, x->commits, x->m.level);
    buf_free(&t->op->reply);
    task_end(t); /* the last frame is empty */
}

static void next_run(struct task *t)
{
    struct scrub *x = t->own;
    struct run *r = NULL;
    if (t->run) {
        struct run *before = t->run;
        t->run = NULL;
        run_release(before);
    }
    while (!r && x->run_at < x->run_count)
        r = run_by_id(t->tenant, &x->runs[x->run_at++]);
    if (!r) {
        next_damage(t);
        return;
    }
    run_hold(t, r);
    if (!take_sequences(x, r))
        task_fail(t, ERR_NO_MEMORY, "the server has no memory to go on");
    else
        next_commit(t);
}

static bool scrub_prepare(struct task *t, struct scrub *x)
{
    struct rcur name = rcur_of(x->m.name.p, x->m.name.n);
    size_t at = 0;
    x->runs = calloc(t->tenant->runs.count + 1, sizeof *x->runs);
    x->buffer = aligned_alloc(BLOCK_BYTES, BUFFER_BYTES);
    x->window = aligned_alloc(BLOCK_BYTES, WINDOW_BYTES);
    if (!x->runs || !x->buffer || !x->window) {
        task_fail(t, ERR_NO_MEMORY, "the server has no memory for a scrub; try again later");
        return false;
    }
    if (name.left > 0) {
        if (!task_run_by_name(t, x->m.kind, x->m.name))
            return false;
        x->runs[x->run_count++] = t->run->record.run_id;
        if (x->m.sequence && !commit_by_sequence(t->run, x->m.sequence)) {
            task_fail(t, ERR_NOT_FOUND, "%s has no commit with sequence %" PRIu64, run_text(t->run),
                      x->m.sequence);
            return false;
        }
        return true;
    }
    for (const struct run *r; (r = map_next(&t->tenant->runs, &at));)
        if (r->record.kind == x->m.kind)
            x->runs[x->run_count++] = r->record.run_id;
    return true;
}

void do_scrub(struct task *t)
{
    struct scrub *x = task_own(t, sizeof *x);
    if (!x)
        return;
    t->own_free = scrub_free;
    if (!task_decode(t, scrub, &x->m))
        return;
    if (x->m.level != SCRUB_STRUCTURE && x->m.level != SCRUB_DATA)
        task_fail(t, ERR_INVALID, "expected level 1 (structure) or 2 (data), found %u", x->m.level);
    else if (x->m.kind != RUN_CHECKPOINTS && x->m.kind != RUN_DATASET)
        task_fail(t, ERR_INVALID, "expected kind 1 (checkpoints) or 2 (datasets), found %u", x->m.kind);
    else if (!t->op->more)
        task_fail(t, ERR_INVALID, "a scrub is answered by a stream");
    else if (scrub_prepare(t, x))
        task_later(t, next_run);
}
