/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writing segments: create, chunks in any order, index in order, seal, discard. Space and quota are reserved
 * before the first byte. Chunks and pieces of the index are written from where they arrived. Every message
 * may be repeated after a lost connection.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "server/store/writer.h"

static void segment_drop(struct task *t)
{
    struct segment *g = t->segment;
    t->segment = NULL;
    if (g)
        segment_release(g);
}

/* Fails with the reason why the segment is gone. */
static void fail_gone(struct task *t, const struct segment *g)
{
    if (g->why)
        task_fail_with(t, g->why);
    else
        task_fail(t, ERR_NOT_FOUND, "the segment was given up; save the part again");
}

/* The segment of a request, held, if it is one that its writer may go on with: OPEN, SEALING or SEALED. */
static struct segment *writable(struct task *t, const struct id *id)
{
    segment_drop(t);
    struct segment *g = segment_find(t->tenant, id);
    char hex[2 * ID_BYTES + 1];
    if (!g || g->state == SEGMENT_MISSING) {
        task_fail(
            t, ERR_NOT_FOUND,
            "segment %s is not being written here (the server may have restarted since); create it again",
            id_text(id, hex));
        return NULL;
    }
    if (g->state == SEGMENT_LEAVING || g->state == SEGMENT_GIVEN_UP) {
        fail_gone(t, g);
        return NULL;
    }
    if (!task_attempt_is_live(t, g->run, &g->attempt))
        return NULL;
    segment_hold(t, g);
    return g;
}

/* ---- create ---- */

struct create {
    struct msg_segment_create m;
    struct segment_header header;
};

static void create_reply(struct task *t, const struct segment *g)
{
    struct buf numbers = {.max =
                              PAGE_BYTES_MAX}; /* those that do not fit are sent again, which is harmless */
    const struct writer *w = g->writer;
    if (w && g->state != SEGMENT_SEALED) {
        for (uint32_t i = 0; i < w->chunks && numbers.n + 4 <= PAGE_BYTES_MAX; i++)
            if (w->states[i] == CHUNK_WRITTEN)
                buf_u32(&numbers, i);
    }
    if (buf_end(&numbers, "the chunks received", t->err) == 0) {
        struct msg_segment_create_reply reply = {.sealed = g->state == SEGMENT_SEALED,
                                                 .chunks_received = SLICE(numbers.p, numbers.n)};
        msg_segment_create_reply_encode(&reply, &t->op->reply);
    }
    buf_free(&numbers);
    task_reply(t);
}

static task_step create_look;

/* A segment of that id is known. */
static void create_again(struct task *t, struct segment *g)
{
    struct create *c = t->own;
    struct writer *w = g->writer;
    char hex[2 * ID_BYTES + 1];
    segment_hold(t, g);
    if (g->run != t->run) {
        task_fail(t, ERR_EXISTS, "segment id %s is taken by another run; choose ids at random",
                  id_text(&g->id, hex));
    } else if (g->state == SEGMENT_CREATING || g->state == SEGMENT_LEAVING) {
        task_wait(t, &g->waiting, "an earlier request on the same segment", create_look);
    } else if (g->state == SEGMENT_GIVEN_UP || g->state == SEGMENT_MISSING) {
        fail_gone(t, g);
    } else if (w ? memcmp(hash128(c->m.header.p, BLOCK_BYTES).bytes, w->header_hash.bytes, HASH128_BYTES) !=
                           0 ||
                       w->chunks != c->m.chunks
                 : !id_equal(&g->attempt, &c->header.attempt) || g->step != c->header.step ||
                       g->rank != c->header.rank || g->world != c->header.world) {
        task_fail(t, ERR_EXISTS,
                  "segment %s was begun with another header or number of chunks; writing again needs a new "
                  "segment id",
                  id_text(&g->id, hex));
    } else {
        if (g->state != SEGMENT_SEALED)
            segment_touch(t->s, g);
        create_reply(t, g);
    }
}

static void header_written(struct task *t)
{
    struct segment *g = t->segment;
    struct store *s = t->s;
    if (task_result(t) < 0) {
        struct err why = t->io->op.err;
        segment_give_up(s, g, &why);
        writer_end(s, g);
        task_fail_io(t, "writing the header of a segment");
        return;
    }
    if (g->state == SEGMENT_CREATING)
        g->state = SEGMENT_OPEN;
    segment_touch(s, g);
    writer_end(s, g);
    if (g->state != SEGMENT_OPEN) {
        fail_gone(t, g);
        return;
    }
    metric_add(METRIC_segments_created, 1);
    log_debug("segment begun tenant=%s run=%s step=%" PRIu64 " rank=%u chunks=%u reserve_bytes=%" PRIu64,
              t->op->tenant, run_text(g->run), g->step, g->rank, g->writer->chunks, g->writer->reserve_bytes);
    create_reply(t, g);
}

static void file_created(struct task *t)
{
    struct segment *g = t->segment;
    struct store *s = t->s;
    s->creating_bytes -= g->writer->reserve_bytes;
    if (task_result(t) < 0) { /* nothing was made: the same request may be sent again */
        uint64_t reserve_bytes = g->writer->reserve_bytes;
        writer_close(s, g);
        segment_forget(g);
        *t->err = t->io->op.err;
        err_prepend(t->err, "reserving %" PRIu64 " bytes for a segment", reserve_bytes);
        task_end(t);
        return;
    }
    if (g->state == SEGMENT_LEAVING) {
        writer_end(s, g);
        fail_gone(t, g);
        return;
    }
    backend_append(s->o.backend, task_op(t, header_written), g->writer->file, 0, g->writer->block,
                   BLOCK_BYTES);
}

static bool quota_allows(struct task *t, uint64_t reserve_bytes)
{
    const struct tenant *x = t->tenant;
    uint64_t used = x->stored_bytes + x->reserved_bytes, quota = x->record.quota_bytes;
    if (quota == 0 || (used <= quota && reserve_bytes <= quota - used))
        return true;
    task_fail(t, ERR_QUOTA,
              "tenant %s uses %" PRIu64 " of its quota of %" PRIu64
              " bytes, and this part needs up to %" PRIu64
              "; prune old checkpoints, or ask an admin for a larger quota",
              x->record.name, used, quota, reserve_bytes);
    return false;
}

static bool space_allows(struct task *t, uint64_t reserve_bytes)
{
    struct store *s = t->s;
    uint64_t free_bytes, total_bytes, kept;
    int rc = backend_space(s->o.backend, &free_bytes, &total_bytes);
    if (rc < 0) {
        err_sys(t->err, -rc, "asking for free space");
        task_end(t);
        return false;
    }
    if (!add_overflows(s->o.space_reserve_bytes, s->creating_bytes, &kept) && free_bytes >= kept &&
        free_bytes - kept >= reserve_bytes)
        return true;
    task_fail(t, ERR_NO_SPACE,
              "the store has %" PRIu64 " bytes free, %" PRIu64
              " of them kept back for administration, and this part "
              "needs up to %" PRIu64 "; prune old checkpoints or add disks",
              free_bytes, kept, reserve_bytes);
    return false;
}

/* For each chunk its entry, as it came with the chunk and with the index, and its state. */
static uint64_t tables_bytes(uint32_t chunks)
{
    return chunks * (CHUNK_ENTRY_BYTES + 1ull) + index_public_bytes(chunks);
}

static bool writer_alloc(struct store *s, struct segment *g, const struct create *c)
{
    struct writer *w = calloc(1, sizeof *w);
    if (!w)
        return false;
    w->chunks = c->m.chunks;
    w->block = aligned_alloc(BLOCK_BYTES, BLOCK_BYTES);
    w->entries = calloc(w->chunks + 1u, sizeof *w->entries);
    w->states = calloc(w->chunks + 1u, 1);
    w->table = malloc(index_public_bytes(w->chunks));
    w->index_hash = sha256_start();
    if (!w->block || !w->entries || !w->states || !w->table || !w->index_hash) {
        free(w->block);
        free(w->entries);
        free(w->states);
        free(w->table);
        sha256_end(w->index_hash, NULL);
        free(w);
        return false;
    }
    memcpy(w->block, c->m.header.p, BLOCK_BYTES);
    w->header_hash = hash128(w->block, BLOCK_BYTES);
    w->reserve_bytes = c->m.reserve_bytes;
    w->tables_bytes = tables_bytes(w->chunks);
    g->writer = w;
    g->run->tenant->reserved_bytes += w->reserve_bytes;
    metric_add(METRIC_reserved_bytes, (int64_t)w->reserve_bytes);
    s->tables_bytes += w->tables_bytes;
    s->segments_open++;
    return true;
}

static void create_new(struct task *t)
{
    struct create *c = t->own;
    struct store *s = t->s;
    const struct segment_header *h = &c->header;
    struct err why = {0};
    if (save_failure_unheard(t->run, &h->attempt, h->step, h->rank, &why)) {
        task_fail_with(t, &why);
        return;
    }
    if (s->segments_open >= SEGMENTS_OPEN_MAX ||
        s->tables_bytes + tables_bytes(c->m.chunks) > TABLES_BYTES_MAX) {
        task_fail(t, ERR_BUSY, "the server writes %u segments already, as many as it can; try again later",
                  s->segments_open);
        return;
    }
    if (!quota_allows(t, c->m.reserve_bytes) || !space_allows(t, c->m.reserve_bytes))
        return;
    struct segment *g = segment_insert(t->run, &h->segment_id, SEGMENT_CREATING);
    if (g && !writer_alloc(s, g, c)) {
        segment_forget(g);
        g = NULL;
    }
    if (!g) {
        task_fail(t, ERR_NO_MEMORY, "the server has no memory for a segment of %u chunks; try again later",
                  c->m.chunks);
        return;
    }
    g->attempt = h->attempt;
    g->step = h->step;
    g->rank = h->rank;
    g->world = h->world;
    segment_hold(t, g);
    segment_touch(s, g);
    writer_begin(g);
    s->creating_bytes += c->m.reserve_bytes;
    backend_create(s->o.backend, task_op(t, file_created), c->m.reserve_bytes, &g->writer->file);
}

static void create_look(struct task *t)
{
    struct create *c = t->own;
    segment_drop(t);
    if (t->run->destroying) {
        task_fail(t, ERR_NOT_FOUND, "the run has been destroyed");
        return;
    }
    if (!task_attempt_is_live(t, t->run, &c->header.attempt))
        return;
    struct segment *g = segment_find(t->tenant, &c->header.segment_id);
    if (g)
        create_again(t, g);
    else
        create_new(t);
}

void do_segment_create(struct task *t)
{
    struct create *c = task_own(t, sizeof *c);
    if (!c || !task_decode(t, segment_create, &c->m) || !task_run_by_id(t, &c->m.run_id))
        return;
    if (c->m.header.n != BLOCK_BYTES) {
        task_fail(t, ERR_PROTOCOL, "expected a segment header of %u bytes, found %zu", BLOCK_BYTES,
                  c->m.header.n);
        return;
    }
    if (segment_header_decode(c->m.header.p, &c->header, t->err) < 0) {
        task_end(t);
        return;
    }
    if (strcmp(c->header.tenant, t->op->tenant) != 0 || !id_equal(&c->header.run_id, &c->m.run_id)) {
        task_fail(t, ERR_INVALID,
                  "the segment's header names tenant %s and another run or tenant than the request",
                  c->header.tenant);
        return;
    }
    /* Header, as much index as so many chunks need, trailer. */
    uint64_t least = 2ull * BLOCK_BYTES + block_align(32 + (uint64_t)c->m.chunks * CHUNK_ENTRY_BYTES);
    if (c->m.chunks > SEGMENT_CHUNKS_MAX || c->m.reserve_bytes < least ||
        c->m.reserve_bytes > SEGMENT_BYTES_MAX) {
        task_fail(t, ERR_LIMIT,
                  "a segment of %u chunks in %" PRIu64
                  " bytes; at most %u chunks and %llu bytes are allowed, and so "
                  "many chunks need at least %" PRIu64,
                  c->m.chunks, c->m.reserve_bytes, SEGMENT_CHUNKS_MAX, SEGMENT_BYTES_MAX, least);
        return;
    }
    c->m.reserve_bytes = block_align(c->m.reserve_bytes);
    create_look(t);
}

/* ---- chunks ---- */

struct chunk_job {
    struct msg_segment_chunk m;
    struct chunk_entry entry;
    const uint8_t *tail;
    size_t padded;
};

static task_step chunk_look;

static void buffers_release(struct store *s, size_t n)
{
    s->buffers_bytes -= n;
    uint64_t room = s->o.buffers_bytes_max > s->buffers_bytes ? s->o.buffers_bytes_max - s->buffers_bytes : 0;
    while (!list_empty(&s->buffer_queue)) {
        struct task *t = container_of(s->buffer_queue.next, struct task, queue);
        const struct chunk_job *job = t->own;
        if (job->padded > room && s->buffers_bytes > 0)
            break;
        room -= job->padded < room ? job->padded : room;
        task_wake(t);
    }
}

/* A buffer was written to the task's segment, or not. */
static void written(struct task *t, size_t padded, bool good, const char *what)
{
    struct segment *g = t->segment;
    if (g->state == SEGMENT_OPEN)
        segment_touch(t->s, g);
    buffers_release(t->s, padded);
    writer_end(t->s, g);
    if (!good)
        task_fail_io(t, what);
    else if (g->state >= SEGMENT_LEAVING)
        fail_gone(t, g);
    else
        task_end(t);
}

static void chunk_written(struct task *t)
{
    struct chunk_job *job = t->own;
    struct segment *g = t->segment;
    struct writer *w = g->writer;
    bool good = task_result(t) >= 0;
    w->states[job->m.number] = good ? CHUNK_WRITTEN : CHUNK_ABSENT;
    if (good) {
        w->received++;
        metric_add(METRIC_chunks_received, 1);
        metric_add(METRIC_segment_written_bytes, job->entry.stored_bytes);
    }
    written(t, job->padded, good, "writing a chunk");
}

/* 1: this very chunk is there. 0: absent. -1: the task has been failed or waits. */
static int chunk_again(struct task *t, struct segment *g)
{
    struct chunk_job *job = t->own;
    struct writer *w = g->writer;
    if (w->states[job->m.number] == CHUNK_ABSENT)
        return 0;
    if (memcmp(w->entries[job->m.number], job->m.entry.bytes, CHUNK_ENTRY_BYTES) != 0) {
        task_fail(t, ERR_EXISTS,
                  "chunk %u was sent before with another place, length or checksum; a sealed chunk is only "
                  "ever sent "
                  "again as the same bytes",
                  job->m.number);
        return -1;
    }
    if (w->states[job->m.number] == CHUNK_WRITING) {
        task_wait(t, &g->waiting, "an earlier write of the same chunk", chunk_look);
        return -1;
    }
    return 1;
}

static bool chunk_fits(struct task *t, const struct writer *w)
{
    const struct chunk_job *job = t->own;
    uint64_t end;
    if (job->entry.stored_bytes == 0)
        return true;
    if (job->entry.offset < BLOCK_BYTES || job->entry.offset % BLOCK_BYTES != 0 ||
        add_overflows(job->entry.offset, job->padded + BLOCK_BYTES, &end) || end > w->reserve_bytes) {
        task_fail(t, ERR_LIMIT,
                  "chunk %u of %u bytes at offset %" PRIu64
                  " does not lie on a %u-byte border between the header and "
                  "the end of the %" PRIu64 " bytes reserved",
                  job->m.number, job->entry.stored_bytes, job->entry.offset, BLOCK_BYTES, w->reserve_bytes);
        return false;
    }
    return true;
}

static void chunk_look(struct task *t)
{
    struct chunk_job *job = t->own;
    struct store *s = t->s;
    struct segment *g = writable(t, &job->m.segment);
    if (!g)
        return;
    if (g->state == SEGMENT_CREATING) {
        task_wait(t, &g->waiting, "the creation of the segment", chunk_look);
        return;
    }
    if (g->state != SEGMENT_OPEN || job->m.number >= g->writer->chunks) {
        if (g->state == SEGMENT_OPEN)
            task_fail(t, ERR_INVALID, "chunk %u of a segment of %u chunks", job->m.number, g->writer->chunks);
        else
            task_fail(t, ERR_INVALID, "chunk %u for a segment that is sealed already", job->m.number);
        return;
    }
    struct writer *w = g->writer;
    int again = chunk_again(t, g);
    if (again < 0 || (again == 0 && !chunk_fits(t, w)))
        return;
    if (again == 1) {
        task_end(t);
        return;
    }
    if (job->padded > 0 && s->buffers_bytes > 0 && s->buffers_bytes + job->padded > s->o.buffers_bytes_max) {
        task_wait(t, &s->buffer_queue, "a free write buffer: the disk is slower than the network",
                  chunk_look);
        return;
    }
    memcpy(w->entries[job->m.number], job->m.entry.bytes, CHUNK_ENTRY_BYTES);
    if (job->padded == 0) {
        w->states[job->m.number] = CHUNK_WRITTEN;
        w->received++;
        metric_add(METRIC_chunks_received, 1);
        segment_touch(s, g);
        task_end(t);
        return;
    }
    w->states[job->m.number] = CHUNK_WRITING;
    s->buffers_bytes += job->padded;
    writer_begin(g);
    backend_append(s->o.backend, task_op(t, chunk_written), w->file, job->entry.offset, job->tail,
                   job->padded);
}

void do_segment_chunk(struct task *t)
{
    struct chunk_job *job = task_own(t, sizeof *job);
    if (!job)
        return;
    struct rcur in = rcur_of(t->op->payload, t->op->payload_bytes);
    if (msg_segment_chunk_decode(&in, &job->m, t->err) < 0 ||
        chunk_entry_decode(job->m.entry.bytes, job->m.number, &job->entry, t->err) < 0) {
        task_end(t);
        return;
    }
    if (in.left != job->entry.stored_bytes || in.left > CHUNK_STORED_BYTES_MAX) {
        task_fail(t, ERR_PROTOCOL, "chunk %u announces %u stored bytes, the message carries %zu",
                  job->m.number, job->entry.stored_bytes, in.left);
        return;
    }
    job->tail = in.p;
    job->padded = (size_t)block_align(in.left);
    check(in.left == 0 || (uintptr_t)job->tail % BLOCK_BYTES == 0);
    chunk_look(t);
}

/* ---- the index ---- */

struct piece_job {
    struct msg_segment_index m;
    size_t bytes, padded; /* of it that are new */
};

static bool piece_fits(struct task *t, const struct writer *w, size_t n)
{
    const struct msg_segment_index *m = &((struct piece_job *)t->own)->m;
    uint64_t end;
    if (m->offset % BLOCK_BYTES != 0 || m->index_offset % BLOCK_BYTES != 0 || m->index_offset < BLOCK_BYTES ||
        (w->index_offset && m->index_offset != w->index_offset)) {
        task_fail(t, ERR_INVALID,
                  "a piece from byte %" PRIu64 " of an index at byte %" PRIu64
                  " of the segment; expected multiples of %u, and the same place for all pieces",
                  m->offset, m->index_offset, BLOCK_BYTES);
        return false;
    }
    if (m->offset > w->index_bytes || (w->index_bytes % BLOCK_BYTES != 0 && m->offset + n > w->index_bytes)) {
        task_fail(t, ERR_INVALID,
                  "a piece of %zu bytes of the index from %" PRIu64
                  " on; the next piece begins at %zu, a multiple of %u unless all of it came",
                  n, m->offset, w->index_bytes, BLOCK_BYTES);
        return false;
    }
    if (m->offset + n > INDEX_BYTES_MAX ||
        add_overflows(m->index_offset, block_align(m->offset + n) + BLOCK_BYTES, &end) ||
        end > w->reserve_bytes) {
        task_fail(t, ERR_LIMIT,
                  "an index of %" PRIu64 " bytes or more at byte %" PRIu64
                  " of the segment; at most %u, and what was reserved, are allowed",
                  m->offset + n, m->index_offset, INDEX_BYTES_MAX);
        return false;
    }
    return true;
}

static void piece_written(struct task *t)
{
    const struct piece_job *job = t->own;
    struct segment *g = t->segment;
    bool good = task_result(t) >= 0;
    struct err why = t->io->op.err;
    if (!good && g->state == SEGMENT_OPEN) /* what came behind it may be answered already */
        segment_give_up(t->s, g, &why);
    written(t, job->padded, good, "writing a piece of the index");
}

/* Takes in what is new of the piece. Pieces keep their order, so none waits for a buffer; few are under way.
 */
static void piece_take(struct task *t, struct segment *g, const uint8_t *p)
{
    struct piece_job *job = t->own;
    struct writer *w = g->writer;
    uint64_t place = job->m.index_offset + w->index_bytes;
    size_t table = index_public_bytes(w->chunks), at = w->index_bytes;
    if (at < table)
        memcpy(w->table + at, p, job->bytes < table - at ? job->bytes : table - at);
    sha256_update(w->index_hash, p, job->bytes);
    w->index_offset = job->m.index_offset;
    w->index_bytes += job->bytes;
    job->padded = (size_t)block_align(job->bytes);
    t->s->buffers_bytes += job->padded;
    writer_begin(g);
    backend_append(t->s->o.backend, task_op(t, piece_written), w->file, place, p, job->padded);
}

void do_segment_index(struct task *t)
{
    struct piece_job *job = task_own(t, sizeof *job);
    if (!job)
        return;
    struct rcur in = rcur_of(t->op->payload, t->op->payload_bytes);
    if (msg_segment_index_decode(&in, &job->m, t->err) < 0) {
        task_end(t);
        return;
    }
    struct segment *g = writable(t, &job->m.segment);
    if (!g)
        return;
    struct writer *w = g->writer;
    if (g->state != SEGMENT_OPEN || !w->index_hash) {
        task_fail(t, ERR_INVALID, "a piece of the index for a segment that is %s",
                  g->state == SEGMENT_CREATING ? "not created yet"
                                               : "sealed, or whose seal was tried, already");
        return;
    }
    if (!piece_fits(t, w, in.left))
        return;
    size_t had = w->index_bytes - (size_t)job->m.offset;
    if (in.left <= had) {
        segment_touch(t->s, g);
        task_end(t);
        return;
    }
    check((uintptr_t)in.p % BLOCK_BYTES == 0);
    job->bytes = in.left - had;
    piece_take(t, g, in.p + had);
}

/* ---- seal ---- */

struct seal_job {
    struct msg_segment_seal m;
    struct segment_trailer trailer;
};

static void sealed(struct task *t)
{
    struct seal_job *job = t->own;
    struct segment *g = t->segment;
    struct store *s = t->s;
    bool left = g->state == SEGMENT_LEAVING;
    struct err why = t->io->op.err;
    g->writer->file = NULL;
    if (task_result(t) < 0) {
        if (!left)
            segment_give_up(s, g, &why);
        writer_end(s, g);
        task_fail_io(t, "making a segment durable");
        return;
    }
    writer_close(s, g);
    struct err *gone = g->why;
    g->why = NULL;
    segment_stored(g, job->trailer.file_bytes);
    memcpy(g->index_digest, job->trailer.index_digest, sizeof g->index_digest);
    segment_touch(s, g);
    metric_add(METRIC_segments_sealed, 1);
    log_debug("segment sealed tenant=%s run=%s step=%" PRIu64 " rank=%u bytes=%" PRIu64, t->op->tenant,
              run_text(g->run), g->step, g->rank, g->file_bytes);
    if (left) { /* fenced or destroyed while the sync ran */
        why = gone ? *gone : (struct err){.class = ERR_FENCED, .errnum = err_class_errno(ERR_FENCED)};
        free(gone);
        segment_give_up(s, g, &why);
        task_fail_with(t, &why);
        return;
    }
    task_wake_all(&g->waiting);
    task_end(t);
}

static void trailer_written(struct task *t)
{
    struct segment *g = t->segment;
    struct store *s = t->s;
    if (task_result(t) < 0 || g->state == SEGMENT_LEAVING) {
        if (g->state == SEGMENT_SEALING)
            g->state = SEGMENT_OPEN;
        writer_end(s, g);
        if (task_result(t) < 0)
            task_fail_io(t, "writing the trailer of a segment");
        else
            fail_gone(t, g);
        return;
    }
    name_of_segment(g, t->io->name);
    struct backend_op *b = task_op(t, sealed);
    t->io->changing = true;
    backend_seal(s->o.backend, b, g->writer->file, t->io->name);
}

/* The table that the client sealed must be the one that the server received. */
static bool table_matches(struct task *t, const struct writer *w, const struct segment_trailer *trailer)
{
    struct chunk_entry *chunks = NULL;
    uint32_t count = 0;
    if (index_public_decode(w->table, (size_t)trailer->index_public_bytes, trailer->index_offset, &chunks,
                            &count, t->err) < 0) {
        task_end(t);
        return false;
    }
    uint32_t differs = count == w->chunks ? UINT32_MAX : 0;
    for (uint32_t i = 0; i < count && differs == UINT32_MAX; i++) {
        uint8_t entry[CHUNK_ENTRY_BYTES];
        chunk_entry_encode(&chunks[i], entry);
        if (memcmp(entry, w->entries[i], sizeof entry) != 0)
            differs = i;
    }
    free(chunks);
    if (differs != UINT32_MAX)
        task_fail(t, ERR_CORRUPT,
                  "the index's table of %u chunks differs from the %u received, first at chunk %u; save the "
                  "part again",
                  count, w->chunks, differs);
    return differs == UINT32_MAX;
}

static bool seal_matches(struct task *t, const struct writer *w, const struct segment_trailer *trailer)
{
    uint32_t missing = 0;
    while (missing < w->chunks && w->states[missing] == CHUNK_WRITTEN)
        missing++;
    if (w->received != w->chunks || trailer->chunks != w->chunks) {
        task_fail(t, ERR_INVALID,
                  "%u of %u chunks are there (the first missing is %u), the trailer says %u; send all, "
                  "then seal",
                  w->received, w->chunks, missing, trailer->chunks);
        return false;
    }
    if (trailer->index_bytes != w->index_bytes || trailer->index_offset != w->index_offset ||
        trailer->file_bytes > w->reserve_bytes) {
        task_fail(t, ERR_INVALID,
                  "the trailer speaks of %" PRIu64 " bytes of index at byte %" PRIu64 " in a file of %" PRIu64
                  "; %zu came, for byte %" PRIu64 ", and %" PRIu64 " bytes are reserved",
                  trailer->index_bytes, trailer->index_offset, trailer->file_bytes, w->index_bytes,
                  w->index_offset, w->reserve_bytes);
        return false;
    }
    return true;
}

static task_step seal_look;

static void seal_again(struct task *t, const struct segment *g)
{
    const struct seal_job *job = t->own;
    if (g->file_bytes == job->trailer.file_bytes &&
        memcmp(g->index_digest, job->trailer.index_digest, SHA256_BYTES) == 0)
        task_end(t);
    else
        task_fail(t, ERR_EXISTS, "the segment is sealed already, with another index; save the part again");
}

static void seal_look(struct task *t)
{
    struct seal_job *job = t->own;
    struct segment *g = writable(t, &job->m.segment);
    if (!g)
        return;
    struct writer *w = g->writer;
    if (g->state == SEGMENT_SEALED) {
        seal_again(t, g);
        return;
    }
    if (g->state != SEGMENT_OPEN || w->flying > 0) {
        task_wait(t, &g->waiting, "the segment's writes in flight", seal_look);
        return;
    }
    if (!seal_matches(t, w, &job->trailer))
        return;
    if (w->index_hash) {
        sha256_end(w->index_hash, w->index_digest);
        w->index_hash = NULL;
    }
    if (memcmp(w->index_digest, job->trailer.index_digest, SHA256_BYTES) != 0) {
        task_fail(t, ERR_CORRUPT,
                  "the index that arrived does not have the digest in the trailer; save the part again");
        return;
    }
    if (!table_matches(t, w, &job->trailer))
        return;
    w->trailer = job->trailer;
    g->state = SEGMENT_SEALING;
    segment_touch(t->s, g);
    writer_begin(g);
    segment_trailer_encode(&w->trailer, w->block);
    backend_append(t->s->o.backend, task_op(t, trailer_written), w->file, w->trailer.file_bytes - BLOCK_BYTES,
                   w->block, BLOCK_BYTES);
}

void do_segment_seal(struct task *t)
{
    struct seal_job *job = task_own(t, sizeof *job);
    if (!job || !task_decode(t, segment_seal, &job->m))
        return;
    if (job->m.trailer.n != BLOCK_BYTES) {
        task_fail(t, ERR_PROTOCOL, "expected a segment trailer of %u bytes, found %zu", BLOCK_BYTES,
                  job->m.trailer.n);
        return;
    }
    if (segment_trailer_decode(job->m.trailer.p, &job->trailer, t->err) < 0) {
        task_end(t);
        return;
    }
    if (!id_equal(&job->trailer.segment_id, &job->m.segment)) {
        task_fail(t, ERR_INVALID, "the trailer belongs to another segment than the request names");
        return;
    }
    seal_look(t);
}

/* ---- discard ---- */

void do_segment_discard(struct task *t)
{
    struct msg_segment_discard m = {0};
    if (!task_decode(t, segment_discard, &m))
        return;
    struct segment *g = segment_find(t->tenant, &m.segment);
    char hex[2 * ID_BYTES + 1];
    struct err why = {0};
    if (g && g->commits > 0) {
        task_fail(t, ERR_INVALID, "segment %s belongs to a commit; prune removes it with the commit",
                  id_text(&g->id, hex));
        return;
    }
    if (g && g->save) {
        task_fail(t, ERR_BUSY, "segment %s has joined a save; abort the save instead", id_text(&g->id, hex));
        return;
    }
    err_set(&why, ERR_CANCELLED, "the segment was discarded by its writer");
    if (g)
        segment_give_up(t->s, g, &why);
    task_end(t); /* one that is not there is as good as discarded */
}
