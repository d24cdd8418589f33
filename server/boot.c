/* SPDX-License-Identifier: Apache-2.0 */
#include "server/boot.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"

struct boot_loop {
    struct boot *boot;
    size_t number;
    struct loop *loop;
    struct backend *backend;
    struct backend_op op;
    struct loop_msg msg;
};

struct boot {
    struct boot_options o;
    boot_started *started;
    boot_stopped *stopped;
    void *arg, *stop_arg;
    struct err err;
    struct loop_msg msg;
    struct store_opening opening;
    struct store *store;
    struct store_op tenant_op;
    struct buf tenant_request;
    struct server_loop *server_loops;
    struct server_starting starting;
    struct server_stopping stopping;
    struct server *server;
    bool running;
    struct boot_loop loops[];
};

/* Down: sessions, store, backends, loops. Each step goes on to the next; a start that failed enters where it
 * got to. */

static void ended(struct loop_msg *m)
{
    struct boot *b = container_of(m, struct boot, msg);
    struct boot copy = *b;
    loop_stop(copy.o.loops[0]);
    free(b->server_loops);
    free(b);
    if (copy.running)
        copy.stopped(copy.stop_arg, copy.stopping.finished, copy.stopping.failed);
    else
        copy.started(copy.arg, NULL, &copy.err);
}

static void close_backend(struct loop_msg *m);

static void backend_closed(void *arg)
{
    struct boot_loop *l = arg;
    struct boot *b = l->boot;
    struct loop *loop = l->loop;
    l->backend = NULL;
    if (l->number > 0) {
        b->loops[l->number - 1].msg.run = close_backend;
        loop_post(b->loops[l->number - 1].loop, &b->loops[l->number - 1].msg);
        loop_stop(loop); /* nothing of this loop is used from here on */
        return;
    }
    b->msg.run = ended;
    loop_post(b->loops[0].loop, &b->msg);
}

/* Readers first: loop 0 holds the store's lock until nobody reads any more. */
static void close_backend(struct loop_msg *m)
{
    struct boot_loop *l = container_of(m, struct boot_loop, msg);
    if (l->backend)
        backend_close(l->backend, backend_closed, l);
    else
        backend_closed(l);
}

static void close_backends(void *arg)
{
    struct boot *b = arg;
    struct boot_loop *last = &b->loops[b->o.loop_count - 1];
    b->store = NULL;
    last->msg.run = close_backend;
    loop_post(last->loop, &last->msg);
}

static void close_store(struct boot *b)
{
    buf_free(&b->tenant_request);
    buf_free(&b->tenant_op.reply);
    if (b->store)
        store_close(b->store, close_backends, b);
    else
        close_backends(b);
}

static void server_stopped(struct server_stopping *s)
{
    struct boot *b = container_of(s, struct boot, stopping);
    b->server = NULL;
    close_store(b);
}

void boot_stop(struct boot *b, uint32_t bound_ms, boot_stopped *stopped, void *arg)
{
    b->stopped = stopped;
    b->stop_arg = arg;
    b->stopping.done = server_stopped;
    server_stop(b->server, bound_ms, &b->stopping);
}

void boot_hurry(struct boot *b)
{
    if (b->server)
        server_hurry(b->server);
}

struct server *boot_server(struct boot *b)
{
    return b->server;
}

/* Up. */

static void server_started(struct server_starting *s)
{
    struct boot *b = container_of(s, struct boot, starting);
    if (!s->server) {
        b->err = s->err;
        close_store(b);
        return;
    }
    b->server = s->server;
    b->running = true;
    b->started(b->arg, b, &b->err);
}

static void start_server(struct boot *b)
{
    b->o.server.loops = b->server_loops;
    b->o.server.loop_count = b->o.loop_count;
    b->o.server.store = b->store;
    for (size_t i = 0; i < b->o.loop_count; i++)
        b->server_loops[i] = (struct server_loop){.loop = b->loops[i].loop, .backend = b->loops[i].backend};
    b->starting.done = server_started;
    server_start(&b->o.server, &b->starting);
}

static void tenant_added(struct store_op *op)
{
    struct boot *b = container_of(op, struct boot, tenant_op);
    if (op->err.class != ERR_NONE && op->err.class != ERR_EXISTS) {
        b->err = op->err;
        err_prepend(&b->err, "making the tenant %s", b->o.ensure_tenant);
        close_store(b);
        return;
    }
    start_server(b);
}

static void ensure_tenant(struct boot *b)
{
    struct msg_tenant_add m = {.name = slice_str(b->o.ensure_tenant), .weight = 1};
    msg_tenant_add_encode(&m, &b->tenant_request);
    if (buf_end(&b->tenant_request, "the tenant", &b->err) < 0) {
        close_store(b);
        return;
    }
    b->tenant_op = (struct store_op){.tenant = b->o.ensure_tenant,
                                     .role = ROLE_ADMIN,
                                     .opcode = OP_TENANT_ADD,
                                     .payload = b->tenant_request.p,
                                     .payload_bytes = b->tenant_request.n,
                                     .done = tenant_added};
    store_submit(b->store, &b->tenant_op);
}

static void store_opened(struct store_opening *opening)
{
    struct boot *b = container_of(opening, struct boot, opening);
    b->store = opening->store;
    if (!b->store) {
        b->err = opening->err;
        close_store(b);
    } else if (b->o.ensure_tenant) {
        ensure_tenant(b);
    } else {
        start_server(b);
    }
}

static void open_store(struct loop_msg *m)
{
    struct boot *b = container_of(m, struct boot, msg);
    if (b->err.class != ERR_NONE) {
        close_store(b);
        return;
    }
    struct store_options so = {.loop = b->loops[0].loop,
                               .backend = b->loops[0].backend,
                               .space_reserve_bytes = b->o.space_reserve_bytes,
                               .join_wait_max_ms = b->o.join_wait_ms,
                               .check_wait_ms = b->o.check_wait_ms,
                               .segment_idle_ms = b->o.segment_idle_ms,
                               .buffers_bytes_max = b->o.buffers_bytes};
    b->opening.done = store_opened;
    store_open(&so, &b->opening);
}

static void open_backend(struct loop_msg *m);

static void backend_next(struct boot_loop *l)
{
    struct boot *b = l->boot;
    if (b->err.class == ERR_NONE && l->number + 1 < b->o.loop_count) {
        struct boot_loop *next = l + 1;
        next->msg.run = open_backend;
        loop_post(next->loop, &next->msg);
        return;
    }
    b->msg.run = open_store;
    loop_post(b->loops[0].loop, &b->msg);
}

static void backend_opened(struct backend_op *op)
{
    struct boot_loop *l = container_of(op, struct boot_loop, op);
    if (op->result < 0 || !l->backend) {
        l->backend = NULL;
        l->boot->err = op->err;
    }
    backend_next(l);
}

static void open_backend(struct loop_msg *m)
{
    struct boot_loop *l = container_of(m, struct boot_loop, msg);
    struct boot *b = l->boot;
    if (b->o.memory) {
        l->backend = backend_memory(l->loop, b->o.memory);
        if (!l->backend)
            err_set(&b->err, ERR_NO_MEMORY, "no memory for the backend of loop %zu", l->number);
        backend_next(l);
        return;
    }
    l->op.done = backend_opened;
    backend_local_open(l->loop, &l->op, b->o.folder, l->number == 0, &l->backend);
}

int boot_start(const struct boot_options *o, boot_started *started, void *arg)
{
    check(o->loop_count > 0);
    struct boot *b = calloc(1, sizeof *b + o->loop_count * sizeof *b->loops);
    if (b)
        b->server_loops = calloc(o->loop_count, sizeof *b->server_loops);
    if (!b || !b->server_loops) {
        free(b);
        return -ENOMEM;
    }
    b->o = *o;
    b->started = started;
    b->arg = arg;
    for (size_t i = 0; i < o->loop_count; i++) {
        b->loops[i].boot = b;
        b->loops[i].number = i;
        b->loops[i].loop = o->loops[i];
    }
    b->loops[0].msg.run = open_backend;
    loop_post(o->loops[0], &b->loops[0].msg);
    return 0;
}
