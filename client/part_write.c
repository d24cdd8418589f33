/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writing a part. A chunk is compressed and sealed on the calling thread; its place in the segment is known
 * only when all chunks before it have their sizes, so sealed chunks are parked until then and sent in order.
 *
 * Sealed bytes are kept until the server answered: what a lost connection may have swallowed is sent again as
 * the same bytes, after the server has told (segment_create, repeated) what it has. Sealing twice never
 * happens. All of that runs on the connection's thread, in the `done` of calls; nobody waits for anybody.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "client/clock.h"
#include "client/opened.h"
#include "client/part_private.h"
#include "client/secrets.h"
#include "format/base/pages.h"
#include "format/version.h"

#define IN_FLIGHT_DEFAULT (32u << 20)
#define CALLS_MAX         48u /* the server takes at least 64 requests of one session */
#define RESENDS_MAX       8u  /* of one chunk, for other reasons than a lost connection */
#define INDEX_PIECE_BYTES (512u << 10)
#define INDEX_CALLS       4u                 /* pieces under way at once */
#define RESERVE_PER_CHUNK (2u * BLOCK_BYTES) /* tag, codec header, padding; table entry and plain hash */

struct sealed {
    struct call call;
    struct part_writer *writer;
    struct list link; /* parked by number, or lost */
    uint32_t number, resends;
    struct chunk_entry entry;
    uint8_t *bytes;      /* sealed */
    struct spare memory; /* where they lie; none: in that of the giver */
};

struct part_writer {
    struct part_writer_options o;
    struct segment_header header;
    uint8_t header_block[BLOCK_BYTES];
    uint64_t reserve_bytes;
    struct seal *seal;
    uint32_t verify_salt;

    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct err err; /* the first failure; everything stops */
    struct chunk_entry *entries;
    struct hash128 *plain_hashes;
    uint8_t index_digest[SHA256_BYTES]; /* its own thread's, like the index */
    struct sealed **parked;             /* by number */
    uint8_t *answered;                  /* by number: 1: yes, 2: before the server was asked what it has */
    uint32_t next_place;                /* all chunks before it have their place */
    uint64_t end_bytes;                 /* where the next one goes */
    uint32_t calls;                     /* chunk calls submitted and not done */
    uint32_t alive;                     /* sealed chunks in memory that were placed */
    uint64_t in_flight;                 /* their bytes */
    struct list lost;                   /* to be sent again */
    struct list gone;                   /* to be freed once the lock is free */
    bool resuming;                      /* segment_create is under way again */
    struct call resume;
    uint64_t give_up_ms; /* of the losses, since the last answer */
    uint64_t plain_bytes, stored_bytes, sent_bytes;
    uint32_t chunks_sent;
    bool sealed;
};

static void chunk_send(struct part_writer *w, struct sealed *s, bool push_follows);
static void resume_send(struct part_writer *w);

/* With the lock held. */
static void writer_fail(struct part_writer *w, const struct err *e)
{
    if (w->err.class == ERR_NONE)
        w->err = *e;
    pthread_cond_broadcast(&w->changed);
}

static int writer_error(struct part_writer *w, struct err *e)
{
    if (w->err.class == ERR_NONE)
        return 0;
    if (e)
        *e = w->err;
    return -w->err.errnum;
}

void part_writer_fail(struct part_writer *w, const struct err *e)
{
    pthread_mutex_lock(&w->lock);
    writer_fail(w, e);
    pthread_mutex_unlock(&w->lock);
}

/* ---- chunks on their way ---- */

static void sealed_free(const struct part_writer_options *o, struct sealed *s)
{
    if (s->memory.p)
        spares_give(&o->client->sealed, &s->memory);
    else if (s->bytes)
        o->give(o->give_arg, s->bytes);
    free(s);
}

/* Memory goes back to its giver without the lock, which he may take while he holds his own. The writer may be
 * gone once it is unlocked. */
static void unlock(struct part_writer *w)
{
    struct part_writer_options o = w->o;
    struct list gone, *it;
    list_init(&gone);
    while ((it = list_pop(&w->gone)) != NULL)
        list_add_tail(&gone, it);
    pthread_mutex_unlock(&w->lock);
    while ((it = list_pop(&gone)) != NULL)
        sealed_free(&o, container_of(it, struct sealed, link));
}

/* With the lock held: a placed chunk leaves memory. */
static void chunk_gone(struct part_writer *w, struct sealed *s)
{
    w->alive--;
    w->in_flight -= s->entry.stored_bytes;
    list_add_tail(&w->gone, &s->link);
    pthread_cond_broadcast(&w->changed);
}

static void chunk_answered(struct part_writer *w, struct sealed *s)
{
    w->answered[s->number] = 1;
    w->sent_bytes += s->entry.stored_bytes;
    w->chunks_sent++;
    w->give_up_ms = 0;
    chunk_gone(w, s);
}

/* Worth sending again? Damaged on the way, or too many requests at once. */
static bool may_resend(const struct sealed *s)
{
    return (s->call.err.class == ERR_CORRUPT || s->call.err.class == ERR_BUSY) && s->resends < RESENDS_MAX;
}

/* With the lock held. A lost connection: asks the server what it has, once for all that was lost. */
static void chunk_lost(struct part_writer *w, struct sealed *s)
{
    uint64_t now = clock_ms();
    if (!w->give_up_ms)
        w->give_up_ms = now + conn_reconnect_ms(w->o.conn);
    if (now >= w->give_up_ms)
        writer_fail(w, &s->call.err);
    list_add_tail(&w->lost, &s->link);
    if (!w->resuming && w->err.class == ERR_NONE) {
        w->resuming = true;
        resume_send(w);
    }
}

static void drop_lost(struct part_writer *w)
{
    struct list *it;
    while ((it = list_pop(&w->lost)) != NULL)
        chunk_gone(w, container_of(it, struct sealed, link));
}

static void chunk_done(struct call *call)
{
    struct sealed *s = container_of(call, struct sealed, call);
    struct part_writer *w = s->writer;
    call_free(call);
    pthread_mutex_lock(&w->lock);
    w->calls--;
    if (call->err.class == ERR_NONE) {
        chunk_answered(w, s);
    } else if (w->err.class != ERR_NONE) {
        chunk_gone(w, s);
    } else if (call->err.class == ERR_NETWORK) {
        chunk_lost(w, s);
    } else if (may_resend(s)) {
        s->resends++;
        chunk_send(w, s, false);
    } else {
        err_prepend(&call->err, "sending chunk %u", s->number);
        writer_fail(w, &call->err);
        chunk_gone(w, s);
    }
    if (w->err.class != ERR_NONE && !w->resuming)
        drop_lost(w);
    unlock(w);
}

/* With the lock held. */
static void chunk_send(struct part_writer *w, struct sealed *s, bool push_follows)
{
    struct buf b = {0};
    struct msg_segment_chunk m = {.segment = w->header.segment_id, .number = s->number};
    chunk_entry_encode(&s->entry, m.entry.bytes);
    msg_segment_chunk_encode(&m, &b);
    if (b.failed) {
        struct err e;
        err_set(&e, ERR_NO_MEMORY, "no memory for sending a chunk");
        writer_fail(w, &e);
        chunk_gone(w, s);
    } else {
        s->call = (struct call){
            .opcode = OP_SEGMENT_CHUNK, .sealed = true, .push_follows = push_follows, .done = chunk_done};
        w->calls++;
        conn_submit(w->o.conn, &s->call, SLICE(b.p, b.n), SLICE(s->bytes, s->entry.stored_bytes));
    }
    buf_free(&b);
}

/* ---- going on after a lost connection ---- */

static int create_message(const struct part_writer *w, struct buf *b, struct err *e)
{
    struct msg_segment_create m = {.run_id = w->header.run_id,
                                   .chunks = w->o.chunks,
                                   .reserve_bytes = w->reserve_bytes,
                                   .header = SLICE(w->header_block, BLOCK_BYTES)};
    msg_segment_create_encode(&m, b);
    return buf_end(b, "segment_create", e);
}

/* Marks in `has` (one byte per chunk) what the server holds. *known: it told of all chunks below that. */
static int chunks_received(const struct part_writer *w, struct call *call, uint8_t *has, uint32_t *known,
                           struct err *e)
{
    struct rcur in = rcur_of(call->payload, call->payload_bytes);
    struct msg_segment_create_reply m;
    int rc = msg_segment_create_reply_decode(&in, &m, e);
    if (rc < 0)
        return rc;
    *known = w->o.chunks;
    for (size_t at = 0; at + 4 <= m.chunks_received.n; at += 4) {
        uint32_t number = le32_get(m.chunks_received.p + at);
        if (number >= w->o.chunks)
            return err_set(e, ERR_PROTOCOL, "the server has chunk %u of a segment of %u chunks", number,
                           w->o.chunks);
        has[number] = 1;
        if (m.chunks_received.n >= 65536 && at + 8 > m.chunks_received.n)
            *known = number + 1; /* a long list may have been cut */
    }
    return 0;
}

/* With the lock held: what was answered before must still be there, for its sealed bytes are gone. */
static int still_there(const struct part_writer *w, const uint8_t *has, uint32_t known, struct err *e)
{
    for (uint32_t i = 0; i < known; i++)
        if (w->answered[i] == 2 && !has[i])
            return err_set(e, ERR_NETWORK,
                           "the connection was lost and the server has lost what it had taken of this part "
                           "(was it restarted?); "
                           "save again");
    return 0;
}

static void resume_lost(struct part_writer *w, const uint8_t *has)
{
    struct list all;
    list_init(&all);
    while (!list_empty(&w->lost))
        list_add_tail(&all, list_pop(&w->lost));
    struct list *it;
    while ((it = list_pop(&all)) != NULL) {
        struct sealed *s = container_of(it, struct sealed, link);
        if (has[s->number])
            chunk_answered(w, s);
        else
            chunk_send(w, s, false);
    }
}

static void resume_done(struct call *call)
{
    struct part_writer *w = container_of(call, struct part_writer, resume);
    struct err e = call->err;
    uint32_t known = 0;
    uint8_t *has = NULL;
    if (e.class == ERR_NONE) {
        has = calloc(w->o.chunks + 1u, 1);
        if (!has)
            err_set(&e, ERR_NO_MEMORY, "no memory for going on with a segment of %u chunks", w->o.chunks);
        else
            (void)chunks_received(w, call, has, &known, &e);
    }
    call_free(call);
    pthread_mutex_lock(&w->lock);
    if (e.class == ERR_NONE)
        (void)still_there(w, has, known, &e);
    bool again = call->err.class == ERR_NETWORK && w->err.class == ERR_NONE && clock_ms() < w->give_up_ms;
    if (again) {
        resume_send(w);
    } else {
        w->resuming = false;
        if (e.class != ERR_NONE)
            writer_fail(w, &e);
        if (w->err.class != ERR_NONE)
            drop_lost(w);
        else
            resume_lost(w, has);
    }
    pthread_cond_broadcast(&w->changed);
    unlock(w);
    free(has);
}

/* With the lock held. */
static void resume_send(struct part_writer *w)
{
    struct buf b = {0};
    struct err e;
    err_clear(&e);
    /* Chunks that wait for a bulk lane may be answered before this is, and be missing in it. */
    for (uint32_t i = 0; i < w->o.chunks; i++)
        if (w->answered[i])
            w->answered[i] = 2;
    if (create_message(w, &b, &e) < 0) {
        w->resuming = false;
        writer_fail(w, &e);
    } else {
        w->resume = (struct call){.opcode = OP_SEGMENT_CREATE, .done = resume_done};
        conn_submit(w->o.conn, &w->resume, SLICE(b.p, b.n), SLICE(NULL, 0));
    }
    buf_free(&b);
}

/* ---- sealing one chunk ---- */

/* With the lock held: gives places to all that can have one now, and queues them for conn_push. */
static void place_and_send(struct part_writer *w)
{
    while (w->next_place < w->o.chunks && w->parked[w->next_place]) {
        struct sealed *s = w->parked[w->next_place];
        w->parked[w->next_place] = NULL;
        if (s->entry.stored_bytes > 0) {
            s->entry.offset = w->end_bytes;
            w->end_bytes += block_align(s->entry.stored_bytes);
        }
        w->entries[w->next_place++] = s->entry;
        w->alive++;
        w->in_flight += s->entry.stored_bytes;
        if (w->err.class != ERR_NONE)
            chunk_gone(w, s);
        else if (w->resuming)
            list_add_tail(&w->lost, &s->link); /* behind the answer to segment_create */
        else
            chunk_send(w, s, true);
    }
}

/* The C14 sample: is what is about to be sent what was given? */
static int decode_again(struct part_scratch *sc, const struct sealed *s, const uint8_t *payload, size_t n,
                        const void *plain, struct err *e)
{
    if (!sc->plain)
        sc->plain = pages_alloc(CHUNK_PLAIN_BYTES_MAX);
    if (!sc->plain)
        return err_set(e, ERR_NO_MEMORY, "no memory for decoding a chunk again");
    const struct chunk_entry *c = &s->entry;
    int rc = codec_decode(sc->codec, (enum codec)c->codec, (enum dtype)c->dtype, payload, n, sc->plain,
                          c->plain_bytes, NULL, e);
    if (rc == 0 && memcmp(sc->plain, plain, c->plain_bytes) != 0)
        rc = err_set(e, ERR_CORRUPT, "codec %s did not give back the bytes that it was given",
                     codec_name((enum codec)c->codec));
    return rc < 0 ? err_prepend(
                        e, "chunk %u was encoded wrongly and is not sent: a fault of memory or of liblarder",
                        s->number)
                  : 0;
}

static bool in_sample(const struct part_writer *w, uint32_t number)
{
    uint32_t x = (number + w->verify_salt) * 2654435761u;
    return (x >> 16) % 100 < w->o.verify_percent;
}

/* Compressed bytes are sealed and sent where they are, in memory that goes round fast and is in the cache.
 * Plain ones are given back then; if they are to be, and no such memory is free, the sealed bytes take their
 * place. */
static int seal_one(struct part_writer *w, struct part_scratch *sc, struct sealed *s, uint8_t *plain,
                    struct err *e)
{
    const struct part_writer_options *o = &w->o;
    struct chunk_entry *c = &s->entry;
    size_t n = 0;
    enum codec codec;
    bool own =
        spares_take(&o->client->sealed, codec_payload_max(c->plain_bytes) + TAG_BYTES, o->give, &s->memory);
    uint8_t *payload = own ? s->memory.p : sc->bytes;
    s->bytes = own ? payload : o->give ? plain : NULL;
    if (!s->bytes)
        return err_set(e, ERR_NO_MEMORY, "no memory for a chunk of %u bytes", c->plain_bytes);
    int rc = codec_encode(sc->codec, o->level, (enum dtype)c->dtype, plain, c->plain_bytes, payload, &n,
                          &codec, &w->plain_hashes[s->number], e);
    if (rc == 0) {
        c->codec = (uint8_t)codec;
        if (in_sample(w, s->number))
            rc = decode_again(sc, s, payload, n, plain, e);
    }
    if (own && o->give)
        o->give(o->give_arg, plain);
    if (own && rc == 0 && codec == CODEC_ZERO) { /* nothing to keep until all before it have their places */
        spares_give(&o->client->sealed, &s->memory);
        s->bytes = NULL;
    }
    if (rc < 0 || codec == CODEC_ZERO)
        return rc;
    c->stored_bytes = (uint32_t)n + TAG_BYTES;
    return seal_chunk(w->seal, sc->seal, s->number, c->plain_bytes, codec, (enum dtype)c->dtype, payload, n,
                      s->bytes, &c->stored_hash, e);
}

/* Waits while enough is on its way. The calls on their way have deadlines, so this ends. */
static int wait_for_room(struct part_writer *w, struct err *e)
{
    while (w->err.class == ERR_NONE && w->alive > 0 &&
           (w->in_flight >= w->o.in_flight_bytes || w->alive >= CALLS_MAX))
        pthread_cond_wait(&w->changed, &w->lock);
    return writer_error(w, e);
}

/* NULL: no memory. */
static struct sealed *sealed_create(struct part_writer *w, uint32_t number, enum dtype dtype,
                                    uint32_t plain_bytes)
{
    struct sealed *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->writer = w;
    s->number = number;
    s->entry = (struct chunk_entry){.plain_bytes = plain_bytes, .dtype = (uint8_t)dtype};
    list_init(&s->link);
    return s;
}

static int wait_and_seal(struct part_writer *w, struct part_scratch *sc, struct sealed *s, uint8_t *plain,
                         struct err *e)
{
    s->bytes = w->o.give ? plain : NULL;
    pthread_mutex_lock(&w->lock);
    int rc = wait_for_room(w, e);
    unlock(w);
    if (rc == 0 && (rc = seal_one(w, sc, s, plain, e)) < 0 && e)
        part_writer_fail(w, e);
    return rc;
}

int part_writer_chunk(struct part_writer *w, struct part_scratch *sc, uint32_t number, enum dtype dtype,
                      void *plain, uint32_t plain_bytes, struct err *e)
{
    check(number < w->o.chunks && plain_bytes > 0 && plain_bytes <= CHUNK_PLAIN_BYTES_MAX);
    struct sealed *s = sealed_create(w, number, dtype, plain_bytes);
    if (!s) {
        if (w->o.give)
            w->o.give(w->o.give_arg, plain);
        return err_set(e, ERR_NO_MEMORY, "no memory for a chunk");
    }
    int rc = wait_and_seal(w, sc, s, plain, e);
    if (rc < 0) {
        sealed_free(&w->o, s);
        return rc;
    }
    pthread_mutex_lock(&w->lock);
    check(!w->parked[number] && number >= w->next_place); /* a chunk is given once */
    w->parked[number] = s;
    w->plain_bytes += plain_bytes;
    w->stored_bytes += s->entry.stored_bytes;
    place_and_send(w);
    rc = writer_error(w, e);
    unlock(w);
    conn_push(w->o.conn);
    return rc;
}

/* ---- sealing the part ---- */

/* All chunks are stored: fills in what was not known before, and begins to seal what is sealed. From here on
 * the index tells nothing of the tensors. */
static int begin_index(struct part_writer *w, struct seal_state *st, struct err *e)
{
    struct buf table = {0}, *index = w->o.index;
    uint8_t digest[SHA256_BYTES];
    size_t public_bytes = index_public_bytes(w->o.chunks);
    if (index->n + TAG_BYTES > INDEX_BYTES_MAX)
        return err_set(e, ERR_LIMIT,
                       "the index of this part has %zu bytes, at most %u are allowed; save fewer or "
                       "shorter-named tensors per rank",
                       index->n + TAG_BYTES, INDEX_BYTES_MAX);
    int rc = buf_reserve(index, TAG_BYTES) ? 0 : err_set(e, ERR_NO_MEMORY, "no memory for the index");
    if (rc == 0)
        rc = index_public_encode(w->entries, w->o.chunks, &table, e);
    if (rc == 0) {
        memcpy(index->p, table.p, public_bytes);
        sha256(index->p, public_bytes, digest);
        index_private_hash(w->plain_hashes, w->o.chunks, index->p + public_bytes);
        rc = seal_index_begin(w->seal, st, digest, index->n - public_bytes, e);
        index->n += TAG_BYTES;
    }
    buf_free(&table);
    return rc;
}

/* What lies in the piece of what is sealed: piece by piece, in order. */
static void seal_piece(struct part_writer *w, struct seal_state *st, size_t at, size_t n)
{
    uint8_t *p = w->o.index->p;
    size_t from = index_public_bytes(w->o.chunks), end = w->o.index->n - TAG_BYTES, to = at + n;
    from = from < at ? at : from;
    if (from < (to < end ? to : end))
        seal_index_add(st, p + from, (to < end ? to : end) - from, p + from);
    if (at < end && end <= to)
        seal_index_end(st, p + end);
}

static int call_simple(struct part_writer *w, uint16_t opcode, struct buf *b, struct slice tail,
                       struct err *e)
{
    struct call call;
    int rc = buf_end(b, opcode_name(opcode), e);
    if (rc == 0)
        rc = conn_call(w->o.conn, opcode, SLICE(b->p, b->n), tail, 0, &call, NULL, e);
    if (rc == 0)
        call_free(&call);
    return rc;
}

struct index_piece {
    struct call call;
    struct part_writer *writer;
    bool flying;
};

static void piece_done(struct call *call)
{
    struct index_piece *p = container_of(call, struct index_piece, call);
    struct part_writer *w = p->writer;
    call_free(call);
    pthread_mutex_lock(&w->lock);
    p->flying = false;
    pthread_cond_broadcast(&w->changed);
    unlock(w);
}

/* Each has a deadline. */
static bool piece_wait(struct part_writer *w, struct index_piece *p)
{
    pthread_mutex_lock(&w->lock);
    while (p->flying)
        pthread_cond_wait(&w->changed, &w->lock);
    unlock(w);
    return p->call.err.class == ERR_NONE;
}

static struct slice piece_at(const struct part_writer *w, size_t at, struct buf *message)
{
    size_t left = w->o.index->n - at;
    buf_reset(message);
    msg_segment_index_encode(&(struct msg_segment_index){.segment = w->header.segment_id,
                                                         .index_offset = w->end_bytes,
                                                         .offset = at},
                             message);
    return SLICE(w->o.index->p + at, left < INDEX_PIECE_BYTES ? left : INDEX_PIECE_BYTES);
}

static bool piece_send(struct part_writer *w, struct index_piece *p, const struct buf *message,
                       struct slice tail)
{
    if (message->failed || !piece_wait(w, p))
        return false;
    *p = (struct index_piece){
        .call = {.opcode = OP_SEGMENT_INDEX, .done = piece_done}, .writer = w, .flying = true};
    conn_submit(w->o.conn, &p->call, SLICE(message->p, message->n), tail);
    return true;
}

/* Each piece is sealed, and digested while it is on its way, several at once. False: one did not arrive, for
 * whatever reason. */
static bool seal_and_send(struct part_writer *w, struct seal_state *st, struct sha256 *sum)
{
    struct index_piece pieces[INDEX_CALLS] = {0};
    struct buf b = {0};
    bool good = true;
    size_t at = 0;
    for (unsigned i = 0; at < w->o.index->n; i = (i + 1) % INDEX_CALLS) {
        struct slice tail = piece_at(w, at, &b);
        seal_piece(w, st, at, tail.n);
        good = good && piece_send(w, &pieces[i], &b, tail);
        sha256_update(sum, tail.p, tail.n);
        at += tail.n;
    }
    for (unsigned i = 0; i < INDEX_CALLS; i++)
        good &= piece_wait(w, &pieces[i]);
    buf_free(&b);
    return good;
}

/* One after the other: the server passes over what it has, and each call outlives a lost connection. */
static int send_again(struct part_writer *w, struct err *e)
{
    struct buf b = {0};
    int rc = 0;
    for (size_t at = 0; rc == 0 && at < w->o.index->n;) {
        struct slice tail = piece_at(w, at, &b);
        rc = call_simple(w, OP_SEGMENT_INDEX, &b, tail, e);
        at += tail.n;
    }
    buf_free(&b);
    return rc;
}

static int send_index(struct part_writer *w, struct err *e)
{
    struct seal_state *st = seal_state_create();
    struct sha256 *sum = sha256_start();
    int rc = st && sum ? begin_index(w, st, e) : err_set(e, ERR_NO_MEMORY, "no memory for a cipher");
    if (rc == 0 && !seal_and_send(w, st, sum))
        rc = send_again(w, e);
    sha256_end(sum, w->index_digest);
    seal_state_free(st);
    return rc;
}

static int make_trailer(struct part_writer *w, struct segment_trailer *t, struct err *e)
{
    *t = (struct segment_trailer){
        .version = SEGMENT_VERSION,
        .segment_id = w->header.segment_id,
        .file_bytes = w->end_bytes + block_align(w->o.index->n) + BLOCK_BYTES,
        .index_offset = w->end_bytes,
        .index_bytes = w->o.index->n,
        .index_public_bytes = index_public_bytes(w->o.chunks),
        .chunks = w->o.chunks,
    };
    memcpy(t->index_digest, w->index_digest, SHA256_BYTES);
    struct seal_state *st = seal_state_create();
    int rc = st ? seal_trailer(w->seal, st, t, e) : err_set(e, ERR_NO_MEMORY, "no memory for a cipher");
    seal_state_free(st);
    return rc;
}

static int wait_for_answers(struct part_writer *w, struct err *e)
{
    pthread_mutex_lock(&w->lock);
    while (w->err.class == ERR_NONE && (w->alive > 0 || w->resuming))
        pthread_cond_wait(&w->changed, &w->lock);
    if (w->err.class == ERR_NONE)
        check(w->next_place == w->o.chunks); /* the caller gave all of them */
    int rc = writer_error(w, e);
    unlock(w);
    return rc;
}

static int publish(struct part_writer *w, const struct segment_trailer *t, struct err *e)
{
    uint8_t block[BLOCK_BYTES];
    struct buf b = {0};
    segment_trailer_encode(t, block);
    msg_segment_seal_encode(
        &(struct msg_segment_seal){.segment = w->header.segment_id, .trailer = SLICE(block, BLOCK_BYTES)},
        &b);
    int rc = call_simple(w, OP_SEGMENT_SEAL, &b, SLICE(NULL, 0), e);
    buf_free(&b);
    return rc;
}

int part_writer_seal(struct part_writer *w, struct commit_part *out, struct err *e)
{
    struct segment_trailer t;
    int rc = wait_for_answers(w, e);
    if (rc == 0)
        rc = send_index(w, e);
    if (rc == 0)
        rc = make_trailer(w, &t, e);
    if (rc == 0)
        rc = publish(w, &t, e);
    if (rc < 0)
        return err_prepend(e, "sealing part %u of step %llu of %s", w->o.rank, (unsigned long long)w->o.step,
                           w->o.run->name);
    w->sealed = true;
    *out = (struct commit_part){
        .rank = w->o.rank, .segment = w->header.segment_id, .segment_bytes = t.file_bytes};
    memcpy(out->index_digest, t.index_digest, SHA256_BYTES);
    return 0;
}

/* ---- life ---- */

/* Upper bound of the segment: chunks stored raw, and the index. */
static int reserve(struct part_writer *w, struct err *e)
{
    uint64_t per_chunks = (uint64_t)w->o.chunks * RESERVE_PER_CHUNK, total;
    if (add_overflows(w->o.plain_bytes, per_chunks, &total) ||
        add_overflows(total, w->o.index->n + 8 * BLOCK_BYTES, &total) || total > SEGMENT_BYTES_MAX)
        return err_set(e, ERR_LIMIT, "one part of %llu bytes; at most %llu are allowed; save with more ranks",
                       (unsigned long long)w->o.plain_bytes, (unsigned long long)SEGMENT_BYTES_MAX);
    w->reserve_bytes = block_align(total);
    return 0;
}

static int create_segment(struct part_writer *w, struct err *e)
{
    const struct part_writer_options *o = &w->o;
    w->header = (struct segment_header){
        .version = SEGMENT_VERSION,
        .suite = SUITE_AES256GCM_HKDF_SHA256,
        .run_id = o->run->run_id,
        .attempt = o->attempt,
        .step = o->step,
        .rank = o->rank,
        .world = o->world,
        .dek_id = o->run->dek.id,
    };
    secrets_random(&w->header.segment_id, sizeof w->header.segment_id);
    secrets_random(w->header.salt, sizeof w->header.salt);
    memcpy(&w->verify_salt, &w->header.segment_id, sizeof w->verify_salt);
    strcpy(w->header.tenant, client_credentials(o->client)->tenant);
    int rc = seal_create(&o->run->dek, &w->header, o->chunks, &w->seal, e);
    if (rc < 0)
        return rc;
    segment_header_encode(&w->header, w->header_block);
    struct buf b = {0};
    rc = create_message(w, &b, e);
    if (rc == 0)
        rc = call_simple(w, OP_SEGMENT_CREATE, &b, SLICE(NULL, 0), e);
    buf_free(&b);
    return rc;
}

static void writer_release(struct part_writer *w)
{
    if (w->parked)
        for (uint32_t i = 0; i < w->o.chunks; i++)
            if (w->parked[i])
                sealed_free(&w->o, w->parked[i]);
    seal_free(w->seal);
    free(w->entries);
    free(w->plain_hashes);
    free(w->parked);
    free(w->answered);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

int part_writer_create(const struct part_writer_options *o, struct part_writer **out, struct err *e)
{
    struct part_writer *w = calloc(1, sizeof *w);
    if (!w)
        return err_set(e, ERR_NO_MEMORY, "no memory for a part");
    w->o = *o;
    if (w->o.in_flight_bytes == 0)
        w->o.in_flight_bytes = IN_FLIGHT_DEFAULT;
    w->end_bytes = BLOCK_BYTES;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    list_init(&w->lost);
    list_init(&w->gone);
    size_t n = o->chunks + 1u; /* none at all is legal */
    int rc =
        o->chunks <= SEGMENT_CHUNKS_MAX
            ? 0
            : err_set(e, ERR_LIMIT, "one part of %u chunks; at most %u are allowed; save with more ranks",
                      o->chunks, SEGMENT_CHUNKS_MAX);
    if (rc == 0) {
        w->entries = calloc(n, sizeof *w->entries);
        w->plain_hashes = calloc(n, sizeof *w->plain_hashes);
        w->parked = calloc(n, sizeof(struct sealed *));
        w->answered = calloc(n, 1);
        if (!w->entries || !w->plain_hashes || !w->parked || !w->answered)
            rc = err_set(e, ERR_NO_MEMORY, "no memory for a part of %u chunks", o->chunks);
    }
    if (rc == 0)
        rc = reserve(w, e);
    if (rc == 0)
        rc = create_segment(w, e);
    if (rc < 0) {
        writer_release(w);
        return err_prepend(e, "beginning part %u of step %llu of %s", o->rank, (unsigned long long)o->step,
                           o->run->name);
    }
    *out = w;
    return 0;
}

void part_writer_progress(struct part_writer *w, uint64_t *plain, uint64_t *stored, uint64_t *sent,
                          uint32_t *chunks_sent)
{
    pthread_mutex_lock(&w->lock);
    *plain = w->plain_bytes;
    *stored = w->stored_bytes;
    *sent = w->sent_bytes;
    *chunks_sent = w->chunks_sent;
    unlock(w);
}

void part_writer_stored(struct part_writer *w, uint8_t *stored)
{
    pthread_mutex_lock(&w->lock);
    for (uint32_t i = 0; i < w->o.chunks; i++)
        stored[i] = w->answered[i] != 0;
    pthread_mutex_unlock(&w->lock);
}

static void discard_done(struct call *call)
{
    call_free(call);
    free(call);
}

/* Best effort: what is not told is given up by the server after a while. */
static void discard(struct part_writer *w)
{
    struct call *call = calloc(1, sizeof *call);
    struct buf b = {0};
    msg_segment_discard_encode(&(struct msg_segment_discard){.segment = w->header.segment_id}, &b);
    if (call && !b.failed) {
        call->opcode = OP_SEGMENT_DISCARD;
        call->done = discard_done;
        conn_submit(w->o.conn, call, SLICE(b.p, b.n), SLICE(NULL, 0));
        call = NULL;
    }
    buf_free(&b);
    free(call);
}

void part_writer_free(struct part_writer *w)
{
    if (!w)
        return;
    struct err e;
    err_set(&e, ERR_CANCELLED, "the part was given up");
    pthread_mutex_lock(&w->lock);
    if (!w->sealed)
        writer_fail(w, &e);
    if (!w->resuming)
        drop_lost(w);
    while (w->calls > 0 || w->resuming || w->alive > 0) /* each has a deadline */
        pthread_cond_wait(&w->changed, &w->lock);
    unlock(w);
    if (!w->sealed)
        discard(w);
    writer_release(w);
}
