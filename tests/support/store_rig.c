/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/store_rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "format/commit.h"
#include "format/index.h"
#include "format/seal.h"
#include "server/io/ring.h"
#include "tests/support/folder.h"

#define SIM_EVENTS_MAX 2000000u

static void die(const char *what, const struct err *e)
{
    fprintf(stderr, "store rig: %s: %s\n", what, e ? e->text : "");
    abort();
}

/* ---- running ---- */

struct until {
    struct io_op anchor;
    struct loop_timer look;
    struct store_rig *rig;
    bool (*holds)(void *arg);
    void *arg;
    uint64_t end_ms;
    bool released;
};

static void until_look(struct loop_timer *timer)
{
    struct until *u = container_of(timer, struct until, look);
    if (u->holds(u->arg))
        loop_cancel(u->rig->loop, &u->anchor);
    else if (loop_now_ms(u->rig->loop) > u->end_ms)
        die("waited a minute", NULL);
    else
        loop_timer_set(u->rig->loop, &u->look, loop_now_ms(u->rig->loop) + 1);
}

static void until_end(struct io_op *op)
{
    container_of(op, struct until, anchor)->released = true;
}

/* On a ring: a receive that nothing will ever end keeps the loop running while a timer looks at the
 * condition. */
static void until_on_ring(struct store_rig *r, bool (*holds)(void *arg), void *arg)
{
    static char byte;
    struct err e = {0};
    struct until u = {.rig = r, .holds = holds, .arg = arg, .end_ms = loop_now_ms(r->loop) + 60000};
    u.anchor.done = until_end;
    u.look.fire = until_look;
    if (holds(arg))
        return;
    loop_recv(r->loop, &u.anchor, r->anchor[0], &byte, 1);
    loop_timer_set(r->loop, &u.look, 1);
    if (loop_run(r->loop, &e) < 0 || !u.released)
        die("running the loop", &e);
}

/* In the simulator; the power fails once crash_after events have been run. */
static void until_on_sim(struct store_rig *r, bool (*holds)(void *arg), void *arg)
{
    while (!holds(arg)) {
        uint64_t most = r->crash_after && !r->crashed ? r->crash_after : SIM_EVENTS_MAX;
        uint64_t ran = sim_run(r->sim, holds, arg, most);
        r->events += ran;
        if (r->crash_after && !r->crashed && (r->crash_after -= ran) == 0) {
            sim_crash(r->sim, 0);
            r->crashed = true;
        } else if (!holds(arg)) {
            die(ran == most ? "the simulation does not end"
                            : "nothing is left to do, and what was waited for has not come",
                NULL);
        }
    }
}

void store_rig_until(struct store_rig *r, bool (*holds)(void *arg), void *arg)
{
    if (r->kind == STORE_ON_SIM)
        until_on_sim(r, holds, arg);
    else
        until_on_ring(r, holds, arg);
}

struct sleeper {
    struct store_rig *rig;
    struct loop_timer timer;
    bool over;
};

static void sleep_over(struct loop_timer *timer)
{
    container_of(timer, struct sleeper, timer)->over = true;
}

static bool is_over(void *arg)
{
    return ((struct sleeper *)arg)->over;
}

void store_rig_sleep(struct store_rig *r, uint64_t ms)
{
    struct sleeper s = {.rig = r, .timer = {.fire = sleep_over}};
    loop_timer_set(r->loop, &s.timer, loop_now_ms(r->loop) + ms);
    store_rig_until(r, is_over, &s);
}

/* ---- life ---- */

void store_rig_random(struct store_rig *r, void *p, size_t n)
{
    uint8_t *b = p;
    while (n-- > 0) {
        r->random ^= r->random << 13;
        r->random ^= r->random >> 7;
        r->random ^= r->random << 17;
        *b++ = (uint8_t)(r->random >> 24);
    }
}

struct id store_rig_id(struct store_rig *r)
{
    struct id id;
    store_rig_random(r, &id, sizeof id);
    return id;
}

void store_rig_open(struct store_rig *r, enum store_rig_kind kind, uint64_t seed)
{
    struct err e = {0};
    memset(r, 0, sizeof *r);
    r->kind = kind;
    r->random = seed * 0x9e3779b97f4a7c15ull + 1;
    r->tenant = "acme";
    r->role = ROLE_ADMIN;
    if (kind == STORE_ON_SIM) {
        struct sim_options o = {.seed = seed, .faults = {.lose_unsynced = true}};
        r->sim = sim_create(&o);
        check(r->sim);
        r->loop = sim_loop(r->sim, 0);
        snprintf(r->folder, sizeof r->folder, "/store");
    } else {
        struct ring_options o = {0};
        if (ring_create(&o, &r->loop, &e) < 0)
            o.worker_pool = true; /* io_uring is refused here */
        if (!r->loop && ring_create(&o, &r->loop, &e) < 0)
            die("no loop", &e);
        loop_stop(r->loop); /* loop_run returns whenever nothing is pending */
        folder_make(r->folder, sizeof r->folder);
        check(socketpair(AF_UNIX, SOCK_STREAM, 0, r->anchor) == 0);
    }
    if (kind == STORE_ON_MEMORY)
        check((r->disk = memory_disk_create(1ull << 30)));
    r->options = (struct store_options){
        .loop = r->loop,
        .space_reserve_bytes = 1 << 20,
        .join_wait_max_ms = 30000,
        .check_wait_ms = 5000,
        .segment_idle_ms = 60000,
        .buffers_bytes_max = 64 << 20,
    };
}

void store_rig_close(struct store_rig *r)
{
    if (r->store)
        store_rig_stop(r);
    memory_disk_unref(r->disk);
    loop_destroy(r->loop);
    if (r->sim) {
        sim_destroy(r->sim);
        return;
    }
    folder_remove(r->folder);
    close(r->anchor[0]);
    close(r->anchor[1]);
}

struct opening {
    struct store_opening o;
    struct backend_op op;
    bool done;
};

static void backend_opened(struct backend_op *op)
{
    container_of(op, struct opening, op)->done = true;
}

static void store_opened(struct store_opening *o)
{
    container_of(o, struct opening, o)->done = true;
}

static bool opening_done(void *arg)
{
    return ((struct opening *)arg)->done;
}

void rig_set_flag(void *arg)
{
    *(bool *)arg = true;
}

bool rig_flag_set(void *arg)
{
    return *(bool *)arg;
}

static void backend_stop(struct store_rig *r)
{
    bool done = false;
    backend_close(r->backend, rig_set_flag, &done);
    store_rig_until(r, rig_flag_set, &done);
    r->backend = NULL;
}

bool store_rig_start(struct store_rig *r)
{
    struct opening x = {.o.done = store_opened, .op.done = backend_opened};
    check(!r->backend);
    if (r->kind == STORE_ON_MEMORY) {
        r->backend = backend_memory(r->loop, r->disk);
        check(r->backend);
    } else {
        backend_local_open(r->loop, &x.op, r->folder, true, &r->backend);
        store_rig_until(r, opening_done, &x);
        if (x.op.result < 0) {
            r->err = x.op.err;
            return false;
        }
    }
    x.done = false;
    r->options.loop = r->loop;
    r->options.backend = r->backend;
    store_open(&r->options, &x.o);
    store_rig_until(r, opening_done, &x);
    r->store = x.o.store;
    r->err = x.o.err;
    if (!r->store)
        backend_stop(r);
    return r->store != NULL;
}

void store_rig_stop(struct store_rig *r)
{
    bool done = false;
    if (r->store) {
        store_close(r->store, rig_set_flag, &done);
        store_rig_until(r, rig_flag_set, &done);
        r->store = NULL;
    }
    if (r->backend)
        backend_stop(r);
}

bool store_rig_power_on(struct store_rig *r)
{
    if (!r->crashed)
        sim_crash(r->sim, 0);
    r->crashed = true;
    store_rig_stop(r);
    loop_destroy(r->loop);
    r->loop = sim_loop(r->sim, 0);
    r->crashed = false;
    r->crash_after = 0;
    return store_rig_start(r);
}

/* ---- calls ---- */

static void ask_done(struct store_op *op)
{
    container_of(op, struct ask, op)->done = true;
}

static void ask_more(struct store_op *op)
{
    struct ask *c = container_of(op, struct ask, op);
    c->frames++;
    if (c->frame)
        c->frame(c);
    if (!c->stop_after_frame)
        store_continue(c->rig->store, op);
}

struct ask *ask_new(struct store_rig *r, uint16_t opcode)
{
    struct ask *c = calloc(1, sizeof *c);
    check(c);
    c->rig = r;
    c->op.tenant = r->tenant;
    c->op.role = r->role;
    c->op.opcode = opcode;
    c->op.done = ask_done;
    c->op.more = ask_more;
    return c;
}

void ask_begin(struct ask *c)
{
    check(!c->payload.failed);
    if (!c->op.payload) {
        c->op.payload = c->payload.p;
        c->op.payload_bytes = c->payload.n;
    }
    c->done = false;
    store_submit(c->rig->store, &c->op);
}

bool ask_is_done(void *c)
{
    return ((struct ask *)c)->done;
}

enum err_class ask_end(struct ask *c)
{
    store_rig_until(c->rig, ask_is_done, c);
    if (c->op.err.class != ERR_NONE)
        c->rig->err = c->op.err;
    return c->op.err.class;
}

enum err_class ask_do(struct ask *c)
{
    ask_begin(c);
    return ask_end(c);
}

void ask_free(struct ask *c)
{
    buf_free(&c->op.reply);
    buf_free(&c->payload);
    free(c->aligned);
    free(c);
}

/* Does it and frees it. */
static enum err_class ask_once(struct ask *c)
{
    enum err_class class = ask_do(c);
    ask_free(c);
    return class;
}

/* ---- what clients do ---- */

enum err_class rig_tenant_add(struct store_rig *r, const char *name, uint64_t quota_bytes)
{
    return ask_once(ASK(r, OP_TENANT_ADD, tenant_add, .name = slice_str(name), .quota_bytes = quota_bytes,
                        .residency = slice_str("eu")));
}

enum err_class rig_run_open(struct store_rig *r, unsigned kind, const char *name, bool create, struct id *run)
{
    struct ask *c = ASK(r, OP_RUN_OPEN, run_open, .kind = (uint8_t)kind, .name = slice_str(name),
                        .create = create, .run_id = store_rig_id(r));
    enum err_class class = ask_do(c);
    if (class == ERR_NONE)
        *run = ANSWER(c, run_open_reply).run_id;
    ask_free(c);
    return class;
}

enum err_class rig_attempt(struct store_rig *r, const struct id *run, const struct id *attempt,
                           uint32_t world, uint64_t *number)
{
    struct ask *c = ASK(r, OP_ATTEMPT, attempt, .run_id = *run, .attempt = *attempt, .world = world);
    enum err_class class = ask_do(c);
    if (class == ERR_NONE && number)
        *number = ANSWER(c, attempt_reply).number;
    ask_free(c);
    return class;
}

/* ---- parts ---- */

/* What stands behind the public part, but for room for the tag, becomes the sealed part. */
static void seal_whole_index(const struct seal *seal, struct seal_state *st, struct buf *index,
                             size_t public_bytes)
{
    uint8_t digest[SHA256_BYTES], *sealed = index->p + public_bytes;
    sha256(index->p, public_bytes, digest);
    check(seal_index(seal, st, digest, sealed, index->n - public_bytes - TAG_BYTES, sealed, NULL) == 0);
}

void rig_part_make(struct store_rig *r, struct rig_part *p)
{
    struct segment_header h = {
        .version = 1,
        .suite = 1,
        .segment_id = store_rig_id(r),
        .run_id = p->run,
        .attempt = p->attempt,
        .step = p->step,
        .rank = p->rank,
        .world = p->world,
    };
    snprintf(h.tenant, sizeof h.tenant, "%s", r->tenant);
    store_rig_random(r, h.salt, sizeof h.salt);
    store_rig_random(r, h.commitment, sizeof h.commitment);
    h.dek_id = store_rig_id(r);
    struct seal *seal = NULL;
    struct seal_state *st = seal_state_create();
    check(st && (!r->dek || seal_create(r->dek, &h, p->chunks, &seal, NULL) == 0));
    p->segment = h.segment_id;
    segment_header_encode(&h, p->header);
    p->chunk = calloc(p->chunks + 1u, sizeof *p->chunk);
    struct chunk_entry *entries = calloc(p->chunks + 1u, sizeof *entries);
    check(p->chunk && entries);
    uint64_t at = BLOCK_BYTES;
    for (uint32_t i = 0; i < p->chunks; i++) {
        struct rig_chunk *c = &p->chunk[i];
        uint16_t size;
        store_rig_random(r, &size, sizeof size);
        bool zero = size % 7 == 0;
        c->n = zero ? 0 : 17u + size % 20000u;
        check((c->bytes = malloc(c->n + 1u)));
        store_rig_random(r, c->bytes, c->n);
        entries[i] = (struct chunk_entry){.offset = zero ? 0 : at,
                                          .stored_bytes = c->n,
                                          .plain_bytes = zero ? 4096 : c->n - TAG_BYTES,
                                          .codec = zero ? CODEC_ZERO : CODEC_RAW,
                                          .dtype = DTYPE_U8};
        if (!zero && seal)
            check(seal_chunk(seal, st, i, c->n - TAG_BYTES, CODEC_RAW, DTYPE_U8, c->bytes, c->n - TAG_BYTES,
                             c->bytes, NULL, NULL) == 0);
        if (!zero)
            entries[i].stored_hash = hash128(c->bytes, c->n);
        chunk_entry_encode(&entries[i], c->entry);
        at += block_align(c->n);
    }
    check(index_public_encode(entries, p->chunks, &p->index, NULL) == 0);
    free(entries);
    struct segment_trailer t = {.version = 1,
                                .segment_id = p->segment,
                                .index_offset = at,
                                .index_public_bytes = p->index.n,
                                .chunks = p->chunks};
    for (uint32_t i = 0; i < p->index_extra + 40; i++)
        buf_u8(&p->index, (uint8_t)(i * 31));
    if (seal)
        seal_whole_index(seal, st, &p->index, (size_t)t.index_public_bytes);
    t.index_bytes = p->index.n;
    t.file_bytes = block_align(at + p->index.n) + BLOCK_BYTES;
    sha256(p->index.p, p->index.n, t.index_digest);
    check(!seal || seal_trailer(seal, st, &t, NULL) == 0);
    segment_trailer_encode(&t, p->trailer);
    seal_state_free(st);
    seal_free(seal);
    memcpy(p->index_digest, t.index_digest, SHA256_BYTES);
    p->file_bytes = t.file_bytes;
    p->index_offset = t.index_offset;
    p->reserve_bytes = t.file_bytes + 5 * BLOCK_BYTES;
}

void rig_part_free(struct rig_part *p)
{
    for (uint32_t i = 0; p->chunk && i < p->chunks; i++)
        free(p->chunk[i].bytes);
    free(p->chunk);
    p->chunk = NULL;
    buf_free(&p->index);
}

struct ask *rig_create(struct store_rig *r, const struct rig_part *p)
{
    return ASK(r, OP_SEGMENT_CREATE, segment_create, .run_id = p->run, .chunks = p->chunks,
               .reserve_bytes = p->reserve_bytes, .header = SLICE(p->header, BLOCK_BYTES));
}

/* A message and a tail that lies ready to be written. */
static struct ask *ask_to_write(struct ask *c, const void *tail, size_t n)
{
    size_t room = BLOCK_BYTES + (size_t)block_align(n);
    check((c->aligned = aligned_alloc(BLOCK_BYTES, room)));
    memset(c->aligned, 0, room);
    memcpy(c->aligned + BLOCK_BYTES - c->payload.n, c->payload.p, c->payload.n);
    memcpy(c->aligned + BLOCK_BYTES, tail, n);
    c->op.payload = c->aligned + BLOCK_BYTES - c->payload.n;
    c->op.payload_bytes = c->payload.n + n;
    return c;
}

struct ask *rig_chunk(struct store_rig *r, const struct rig_part *p, uint32_t number)
{
    const struct rig_chunk *x = &p->chunk[number];
    struct msg_segment_chunk m = {.segment = p->segment, .number = number};
    memcpy(m.entry.bytes, x->entry, sizeof x->entry);
    struct ask *c = ask_new(r, OP_SEGMENT_CHUNK);
    msg_segment_chunk_encode(&m, &c->payload);
    return ask_to_write(c, x->bytes, x->n);
}

struct ask *rig_index(struct store_rig *r, const struct rig_part *p, size_t from, size_t n)
{
    struct ask *c = ASK(r, OP_SEGMENT_INDEX, segment_index, .segment = p->segment,
                        .index_offset = p->index_offset, .offset = from);
    return ask_to_write(c, p->index.p + from, n);
}

struct ask *rig_seal(struct store_rig *r, const struct rig_part *p)
{
    return ASK(r, OP_SEGMENT_SEAL, segment_seal, .segment = p->segment,
               .trailer = SLICE(p->trailer, BLOCK_BYTES));
}

struct ask *rig_join(struct store_rig *r, const struct rig_part *p, uint32_t wait_ms)
{
    struct msg_join m = {.run_id = p->run,
                         .step = p->step,
                         .attempt = p->attempt,
                         .rank = p->rank,
                         .world = p->world,
                         .segment = p->segment,
                         .segment_bytes = p->file_bytes,
                         .plain_bytes = p->file_bytes,
                         .wait_ms = wait_ms};
    memcpy(m.index_digest.bytes, p->index_digest, SHA256_BYTES);
    struct ask *c = ask_new(r, OP_JOIN);
    msg_join_encode(&m, &c->payload);
    return c;
}

struct ask *rig_commit(struct store_rig *r, const struct rig_part *p, enum err_class verdict,
                       const char *text)
{
    return ASK(r, OP_COMMIT, commit, .run_id = p->run, .step = p->step, .attempt = p->attempt,
               .world = p->world, .verdict = (uint32_t)verdict, .text = slice_str(text));
}

enum err_class rig_part_write(struct store_rig *r, const struct rig_part *p)
{
    enum err_class class = ask_once(rig_create(r, p));
    for (uint32_t i = p->chunks; i-- > 0 && class == ERR_NONE;) /* any order will do */
        class = ask_once(rig_chunk(r, p, i));
    size_t half = p->index.n / 2 / BLOCK_BYTES * BLOCK_BYTES;
    if (class == ERR_NONE && half > 0)
        class = ask_once(rig_index(r, p, 0, half));
    if (class == ERR_NONE)
        class = ask_once(rig_index(r, p, half, p->index.n - half));
    return class == ERR_NONE ? ask_once(rig_seal(r, p)) : class;
}

static bool any_done(void *arg)
{
    for (struct ask **c = arg; *c; c++)
        if ((*c)->done)
            return true;
    return false;
}

enum err_class rig_save(struct store_rig *r, const struct id *run, const struct id *attempt, uint64_t step,
                        uint32_t world, uint64_t *sequence, struct rig_part *parts)
{
    struct rig_part *mine = calloc(world, sizeof *mine);
    struct ask **joins = calloc(world + 1u, sizeof *joins);
    enum err_class class = ERR_NONE;
    check(mine && joins);
    for (uint32_t i = 0; i < world; i++) {
        mine[i] = (struct rig_part){.run = *run,
                                    .attempt = *attempt,
                                    .step = step,
                                    .rank = i,
                                    .world = world,
                                    .chunks = 3,
                                    .index_extra = 100};
        rig_part_make(r, &mine[i]);
        if (class == ERR_NONE)
            class = rig_part_write(r, &mine[i]);
    }
    for (uint32_t i = 0; i < world && class == ERR_NONE; i++)
        ask_begin(joins[i] = rig_join(r, &mine[i], 0));
    if (class == ERR_NONE) {
        store_rig_until(r, any_done, joins);
        class = ask_once(rig_commit(r, &mine[0], ERR_NONE, ""));
    }
    for (uint32_t i = 0; i < world; i++) {
        if (!joins[i])
            continue;
        enum err_class end = ask_end(joins[i]);
        if (class == ERR_NONE && end == ERR_NONE && ANSWER(joins[i], join_reply).state == JOIN_CHECK) {
            ask_free(joins[i]);
            end = ask_do(joins[i] = rig_join(r, &mine[i], 0));
        }
        if (class == ERR_NONE)
            class = end;
        if (class == ERR_NONE && sequence)
            *sequence = ANSWER(joins[i], join_reply).sequence;
        ask_free(joins[i]);
    }
    for (uint32_t i = 0; i < world; i++)
        if (parts)
            parts[i] = mine[i];
        else
            rig_part_free(&mine[i]);
    free(joins);
    free(mine);
    return class;
}

/* ---- objects ---- */

struct verb {
    struct backend_op op;
    bool done;
};

static void verb_done(struct backend_op *op)
{
    container_of(op, struct verb, op)->done = true;
}

static int64_t verb_end(struct store_rig *r, struct verb *v)
{
    store_rig_until(r, rig_flag_set, &v->done);
    return v->op.result;
}

static struct backend_op *verb(struct verb *v)
{
    memset(v, 0, sizeof *v);
    v->op.done = verb_done;
    return &v->op;
}

const char *rig_object(struct store_rig *r, const struct id *run, const char *component)
{
    static char name[BACKEND_NAME_BYTES_MAX + 1];
    char hex[33];
    hex_encode(run->bytes, sizeof run->bytes, hex);
    snprintf(name, sizeof name, "t/%s/r/%s/%s", r->tenant, hex, component);
    return name;
}

const char *rig_segment_name(struct store_rig *r, const struct rig_part *p)
{
    static char name[BACKEND_NAME_BYTES_MAX + 1];
    store_segment_name(r->tenant, &p->run, &p->segment, name);
    return name;
}

const char *rig_folder(struct store_rig *r, const struct id *run)
{
    static char name[BACKEND_NAME_BYTES_MAX + 1];
    snprintf(name, sizeof name, "%s", rig_object(r, run, ""));
    name[strlen(name) - 1] = 0;
    return name;
}

size_t rig_object_list(struct store_rig *r, const char *prefix, struct loop_names *names)
{
    struct verb v;
    backend_list(r->backend, verb(&v), prefix, names);
    if (verb_end(r, &v) < 0)
        die("listing objects", &v.op.err);
    return names->count;
}

uint8_t *rig_object_read(struct store_rig *r, const char *name, size_t *n)
{
    struct verb v;
    uint64_t bytes;
    backend_stat(r->backend, verb(&v), name, &bytes);
    if (verb_end(r, &v) < 0)
        return NULL;
    uint8_t *p = malloc((size_t)bytes + 1);
    check(p);
    backend_read(r->backend, verb(&v), name, false, 0, p, (size_t)bytes);
    check(verb_end(r, &v) == (int64_t)bytes);
    *n = (size_t)bytes;
    return p;
}

void rig_object_remove(struct store_rig *r, const char *name)
{
    struct verb v;
    backend_remove(r->backend, verb(&v), name);
    if (verb_end(r, &v) < 0)
        die("removing an object", &v.op.err);
}

void rig_object_replace(struct store_rig *r, const char *name, const void *p, size_t n)
{
    struct verb v;
    size_t before;
    uint8_t *old = rig_object_read(r, name, &before);
    if (old)
        rig_object_remove(r, name);
    free(old);
    if (n % BLOCK_BYTES != 0 || n == 0) {
        backend_put_new(r->backend, verb(&v), name, p, n);
    } else {
        struct backend_file *file;
        uint8_t *aligned = aligned_alloc(BLOCK_BYTES, n);
        check(aligned);
        memcpy(aligned, p, n);
        backend_create(r->backend, verb(&v), n, &file);
        check(verb_end(r, &v) >= 0);
        backend_append(r->backend, verb(&v), file, 0, aligned, n);
        check(verb_end(r, &v) >= 0);
        free(aligned);
        backend_seal(r->backend, verb(&v), file, name);
    }
    if (verb_end(r, &v) < 0)
        die("replacing an object", &v.op.err);
}

void rig_object_flip(struct store_rig *r, const char *name, size_t at, uint8_t mask)
{
    size_t n;
    uint8_t *p = rig_object_read(r, name, &n);
    check(p && at < n);
    p[at] ^= mask;
    rig_object_replace(r, name, p, n);
    free(p);
}

size_t rig_commits(struct store_rig *r, unsigned kind, const char *name, bool pending,
                   struct msg_commit_item *items, size_t max)
{
    struct ask *c = ASK(r, OP_COMMIT_LIST, commit_list, .kind = (uint8_t)kind, .name = slice_str(name),
                        .with_pending = pending);
    if (ask_do(c) != ERR_NONE)
        die("listing commits", &c->op.err);
    struct msg_list_reply reply = ANSWER(c, list_reply);
    struct rcur in = rcur_of(reply.items.p, reply.items.n);
    check(reply.count <= max);
    for (size_t i = 0; i < reply.count; i++) {
        check(msg_commit_item_decode(&in, &items[i], NULL) == 0);
        items[i].reason = items[i].labels = (struct slice){0}; /* they lie in the answer, which goes */
    }
    check(in.left == 0);
    size_t n = reply.count;
    ask_free(c);
    return n;
}
