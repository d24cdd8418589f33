/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tenants' weights live in the store. After start and after each change the server lists them there and hands
 * them to every loop's scheduler. All of it on the thread of loops[0], but for the last step.
 */
#include <stdlib.h>
#include <string.h>

#include "format/base/log.h"
#include "server/session/session.h"

#define LIST_DEADLINE_MS 30000u

struct tenants_refresh {
    struct server *s;
    struct store_op op;
    struct buf request;
};

struct weight {
    char name[TENANT_NAME_BYTES_MAX + 1];
    uint32_t weight;
};

/* One page of tenants on its way to one worker. */
struct weights_msg {
    struct loop_msg msg;
    struct worker *w;
    size_t count;
    struct weight weights[];
};

static uint64_t cap_of(const struct server *s, const char *tenant)
{
    for (size_t i = 0; i < s->o.cap_count; i++)
        if (strcmp(s->o.caps[i].tenant, tenant) == 0)
            return s->o.caps[i].bytes_s;
    return 0;
}

static void apply(struct loop_msg *m)
{
    struct weights_msg *wm = container_of(m, struct weights_msg, msg);
    for (size_t i = 0; i < wm->count; i++) {
        struct sched_tenant *t = sched_tenant(wm->w->sched, wm->weights[i].name);
        if (t)
            sched_tenant_set(t, wm->weights[i].weight, cap_of(wm->w->server, wm->weights[i].name));
    }
    free(wm);
}

static void send_page(struct worker *w, const struct msg_list_reply *page)
{
    if (page->count > LIST_ITEMS_MAX)
        return;
    struct weights_msg *wm = calloc(1, sizeof *wm + page->count * sizeof *wm->weights);
    if (!wm)
        return; /* weights stay as they were */
    struct rcur in = rcur_of(page->items.p, page->items.n);
    struct msg_tenant_item item;
    while (wm->count < page->count && msg_tenant_item_decode(&in, &item, NULL) == 0) {
        struct weight *to = &wm->weights[wm->count];
        to->weight = item.weight;
        wm->count += slice_cstr(item.name, to->name, sizeof to->name);
    }
    wm->w = w;
    wm->msg.run = apply;
    loop_post(w->loop, &wm->msg);
}

static void ask(struct tenants_refresh *r, struct slice after);

static void finish(struct tenants_refresh *r)
{
    struct server *s = r->s;
    buf_free(&r->request);
    buf_free(&r->op.reply);
    free(r);
    s->refresh = NULL;
    if (s->phase == SERVER_STOPPING) {
        server_try_free(s);
    } else if (s->refresh_again) {
        s->refresh_again = false;
        server_tenants_changed(s);
    }
}

static void listed(struct store_op *op)
{
    struct tenants_refresh *r = container_of(op, struct tenants_refresh, op);
    struct err e = op->err;
    struct msg_list_reply page = {0};
    struct rcur in = rcur_of(op->reply.p, op->reply.n);
    if (e.class != ERR_NONE || msg_list_reply_decode(&in, &page, &e) < 0) {
        log_warn("tenants' weights could not be read: %s", e.text);
        finish(r);
        return;
    }
    if (r->s->phase != SERVER_STOPPING)
        for (size_t i = 0; i < r->s->worker_count; i++)
            send_page(&r->s->workers[i], &page);
    if (page.next.n > 0 && r->s->phase != SERVER_STOPPING)
        ask(r, page.next);
    else
        finish(r);
}

static void ask(struct tenants_refresh *r, struct slice after)
{
    struct msg_list m = {.after = after};
    struct buf request = {0};
    msg_list_encode(&m, &request); /* before `after`'s memory goes */
    buf_free(&r->request);
    buf_free(&r->op.reply);
    r->request = request;
    memset(&r->op, 0, sizeof r->op);
    r->op.tenant = "larderd";
    r->op.role = ROLE_ADMIN;
    r->op.opcode = OP_TENANT_LIST;
    r->op.payload = r->request.p;
    r->op.payload_bytes = r->request.n;
    r->op.deadline_at_ms = loop_now_ms(r->s->workers[0].loop) + LIST_DEADLINE_MS;
    r->op.done = listed;
    store_submit(r->s->o.store, &r->op);
}

static void refresh(struct server *s)
{
    if (s->phase == SERVER_STOPPING)
        return;
    if (s->refresh) {
        s->refresh_again = true;
        return;
    }
    struct tenants_refresh *r = calloc(1, sizeof *r);
    if (!r)
        return;
    r->s = s;
    s->refresh = r;
    ask(r, (struct slice){0});
}

struct changed_msg {
    struct loop_msg msg;
    struct server *s;
};

static void changed(struct loop_msg *m)
{
    struct changed_msg *c = container_of(m, struct changed_msg, msg);
    struct server *s = c->s;
    free(c);
    refresh(s);
}

void server_tenants_changed(struct server *s)
{
    struct changed_msg *c = calloc(1, sizeof *c);
    if (!c)
        return; /* weights stay as they were */
    c->s = s;
    c->msg.run = changed;
    loop_post(s->workers[0].loop, &c->msg);
}
