/* SPDX-License-Identifier: Apache-2.0 */
#include "client/list.h"

#include <stdlib.h>
#include <string.h>

/* A page's reply: calls each per item. *next is a copy of the name to go on from; "" at the end. */
static int take_page(struct rcur *in, list_item *each, void *arg, char next[NAME_BYTES_MAX + 1],
                     struct err *e)
{
    struct msg_list_reply m;
    int rc = msg_list_reply_decode(in, &m, e);
    if (rc < 0)
        return rc;
    if (!slice_cstr(m.next, next, NAME_BYTES_MAX + 1))
        return err_set(e, ERR_PROTOCOL,
                       "a listing continues after a name of %zu bytes; at most %u are possible", m.next.n,
                       NAME_BYTES_MAX);
    struct rcur items = rcur_of(m.items.p, m.items.n);
    for (uint32_t i = 0; i < m.count; i++) {
        rc = each(arg, &items, e);
        if (rc != 0)
            return rc;
    }
    if (items.left != 0)
        return err_set(e, ERR_PROTOCOL, "a listing of %u items has %zu bytes too many", m.count, items.left);
    return 0;
}

static int ask_page(struct larder *c, uint16_t opcode, struct buf *message, list_item *each, void *arg,
                    char next[NAME_BYTES_MAX + 1], struct err *e)
{
    struct call call;
    struct rcur in = {0};
    int rc = buf_end(message, "a listing", e);
    if (rc == 0)
        rc = conn_call(client_conn(c), opcode, SLICE(message->p, message->n), SLICE(NULL, 0), 0, &call, &in,
                       e);
    buf_reset(message);
    if (rc < 0)
        return rc;
    rc = take_page(&in, each, arg, next, e);
    call_free(&call);
    return rc;
}

/* kind 0: the message is msg_list, else msg_run_list. */
static int list_by_name(struct larder *c, uint16_t opcode, uint8_t kind, list_item *each, void *arg,
                        struct err *e)
{
    struct buf b = {0};
    char after[NAME_BYTES_MAX + 1] = "", next[NAME_BYTES_MAX + 1];
    int rc;
    for (;;) {
        if (kind)
            msg_run_list_encode(&(struct msg_run_list){.kind = kind, .after = slice_str(after)}, &b);
        else
            msg_list_encode(&(struct msg_list){.after = slice_str(after)}, &b);
        rc = ask_page(c, opcode, &b, each, arg, next, e);
        if (rc != 0 || !*next)
            break;
        if (strcmp(next, after) <= 0) { /* or it would never end */
            rc = err_set(e, ERR_PROTOCOL, "a listing goes back from \"%s\" to \"%s\"", after, next);
            break;
        }
        strcpy(after, next);
    }
    buf_free(&b);
    return rc;
}

int list_runs(struct larder *c, enum run_kind kind, list_item *each, void *arg, struct err *e)
{
    return list_by_name(c, OP_RUN_LIST, (uint8_t)kind, each, arg, e);
}

int list_tenants(struct larder *c, list_item *each, void *arg, struct err *e)
{
    return list_by_name(c, OP_TENANT_LIST, 0, each, arg, e);
}

int list_published(struct larder *c, list_item *each, void *arg, struct err *e)
{
    return list_by_name(c, OP_PUBLISHED_LIST, 0, each, arg, e);
}

/* ---- commits: paged by sequence ---- */

struct commit_pages {
    list_item *each;
    void *arg;
    uint64_t last; /* highest sequence seen */
};

static int take_commit(void *arg, struct rcur *in, struct err *e)
{
    struct commit_pages *p = arg;
    struct rcur ahead = *in;
    struct msg_commit_item item;
    int rc = msg_commit_item_decode(&ahead, &item, e);
    if (rc < 0)
        return rc;
    if (item.sequence > p->last)
        p->last = item.sequence;
    rc = p->each(p->arg, in, e);
    *in = ahead;
    return rc;
}

int list_commits(struct larder *c, enum run_kind kind, const char *run, bool with_pending, list_item *each,
                 void *arg, struct err *e)
{
    struct buf b = {0};
    char next[NAME_BYTES_MAX + 1];
    struct commit_pages pages = {.each = each, .arg = arg};
    int rc;
    for (;;) {
        uint64_t after = pages.last;
        struct msg_commit_list m = {.kind = (uint8_t)kind,
                                    .name = slice_str(run),
                                    .after_sequence = after,
                                    .with_pending = with_pending};
        msg_commit_list_encode(&m, &b);
        rc = ask_page(c, OP_COMMIT_LIST, &b, take_commit, &pages, next, e);
        if (rc != 0 || !*next)
            break;
        if (pages.last == after) {
            rc = err_set(e, ERR_PROTOCOL, "the listing of %s does not go on after sequence %llu", run,
                         (unsigned long long)after);
            break;
        }
    }
    buf_free(&b);
    return rc;
}
