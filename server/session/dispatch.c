/* SPDX-License-Identifier: Apache-2.0 */
/* The one table of what can be asked, by whom, when, and how much of it; and the requests answered at once.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "format/base/log.h"
#include "format/version.h"
#include "server/obs/metrics.h"
#include "server/session/session.h"

static void hello_handle(struct session *s, const struct op_entry *op, struct frame *f);
static void ping_handle(struct session *s, const struct op_entry *op, struct frame *f);
static void cancel_handle(struct session *s, const struct op_entry *op, struct frame *f);

#define IN_HELLO (1u << SESSION_HELLO)
#define IN_OPEN  (1u << SESSION_OPEN)

#define ON_LANE (1u << 7) /* also on a bulk lane; else only over TLS */

#define READER   (1u << ROLE_READER)
#define WRITER   (1u << ROLE_WRITER)
#define OPERATOR (1u << ROLE_OPERATOR)
#define ADMIN    (1u << ROLE_ADMIN)
#define ALL      (READER | WRITER | OPERATOR | ADMIN)
#define ADDS     (WRITER | ADMIN)   /* adds, cannot remove */
#define RULES    (OPERATOR | ADMIN) /* prunes, pins, verifies, rotates; writes no data */
#define EITHER   (WRITER | OPERATOR | ADMIN)

#define SMALL 1024u
#define BLOCK (BLOCK_BYTES + SMALL) /* a message with a header or trailer in it */
#define TEXT  (64u << 10)
#define READ  (READ_RANGES_MAX * 32u + SMALL)

static const struct op_entry table[] = {
    /* opcode, states and ON_LANE, roles, class, where, audit, payload at most, handler */
    {OP_HELLO, IN_HELLO, ALL, OPCLASS_CONTROL, OP_ON_SESSION, false, SMALL, hello_handle},
    {OP_PING, IN_OPEN | ON_LANE, ALL, OPCLASS_CONTROL, OP_ON_SESSION, false, 0, ping_handle},
    {OP_CANCEL, IN_OPEN | ON_LANE, ALL, OPCLASS_CONTROL, OP_ON_SESSION, false, SMALL, cancel_handle},
    {OP_CREDIT, IN_OPEN | ON_LANE, ALL, OPCLASS_CONTROL, OP_ON_SESSION, false, SMALL, credit_handle},
    {OP_STATUS, IN_OPEN, ALL, OPCLASS_CONTROL, OP_ON_SESSION, false, 0, status_handle},
    {OP_LANE_OPEN, IN_OPEN, ALL, OPCLASS_CONTROL, OP_ON_SESSION, false, 0, lane_open_handle},

    {OP_TENANT_ADD, IN_OPEN, ADMIN, OPCLASS_CONTROL, OP_ON_STORE, true, SMALL, call_handle},
    {OP_TENANT_LIST, IN_OPEN, ADMIN, OPCLASS_CONTROL, OP_ON_STORE, false, SMALL, call_handle},
    {OP_RUN_OPEN, IN_OPEN, ALL, OPCLASS_CONTROL, OP_ON_STORE, false, SMALL, call_handle},
    {OP_RUN_LIST, IN_OPEN, ALL, OPCLASS_CONTROL, OP_ON_STORE, false, SMALL, call_handle},
    {OP_RUN_DESTROY, IN_OPEN, RULES, OPCLASS_CONTROL, OP_ON_STORE, true, SMALL, call_handle},
    {OP_ENVELOPE_PUT, IN_OPEN, EITHER, OPCLASS_CONTROL, OP_ON_STORE, true, SMALL, call_handle},
    {OP_ENVELOPE_DROP, IN_OPEN, RULES, OPCLASS_CONTROL, OP_ON_STORE, true, SMALL, call_handle},

    {OP_ATTEMPT, IN_OPEN, ADDS, OPCLASS_CONTROL, OP_ON_STORE, true, SMALL, call_handle},
    {OP_SEGMENT_CREATE, IN_OPEN, ADDS, OPCLASS_CONTROL, OP_ON_STORE, false, BLOCK, call_handle},
    {OP_SEGMENT_CHUNK, IN_OPEN | ON_LANE, ADDS, OPCLASS_SAVE, OP_ON_STORE, false, FRAME_PAYLOAD_BYTES_MAX,
     call_handle},
    {OP_SEGMENT_INDEX, IN_OPEN, ADDS, OPCLASS_SAVE, OP_ON_STORE, false, FRAME_PAYLOAD_BYTES_MAX, call_handle},
    {OP_SEGMENT_SEAL, IN_OPEN, ADDS, OPCLASS_CONTROL, OP_ON_STORE, false, BLOCK, call_handle},
    {OP_SEGMENT_DISCARD, IN_OPEN, ADDS, OPCLASS_CONTROL, OP_ON_STORE, false, SMALL, call_handle},
    {OP_JOIN, IN_OPEN, ADDS, OPCLASS_CONTROL, OP_ON_STORE, false, TEXT, call_handle},
    {OP_COMMIT, IN_OPEN, ADDS, OPCLASS_CONTROL, OP_ON_STORE, true, TEXT, call_handle},
    {OP_SAVE_ABORT, IN_OPEN, ADDS, OPCLASS_CONTROL, OP_ON_STORE, true, TEXT, call_handle},

    {OP_COMMIT_LIST, IN_OPEN, ALL, OPCLASS_CONTROL, OP_ON_STORE, false, SMALL, call_handle},
    {OP_COMMIT_GET, IN_OPEN, ALL, OPCLASS_CONTROL, OP_ON_STORE, false, SMALL, call_handle},
    {OP_MARK, IN_OPEN, EITHER, OPCLASS_CONTROL, OP_ON_STORE, true, TEXT, call_handle},
    {OP_PRUNE, IN_OPEN, RULES, OPCLASS_CONTROL, OP_ON_STORE, true, SMALL, call_handle},
    {OP_SCRUB, IN_OPEN, RULES, OPCLASS_SCRUB, OP_ON_STORE, false, SMALL, call_handle},

    {OP_READ, IN_OPEN | ON_LANE, ALL, OPCLASS_READ, OP_ON_SESSION, false, READ, read_handle},
    {OP_PUBLISHED_LIST, IN_OPEN, ALL, OPCLASS_CONTROL, OP_ON_SESSION, false, SMALL, published_list_handle},
    {OP_PUBLISHED_OPEN, IN_OPEN, ALL, OPCLASS_CONTROL, OP_ON_SESSION, false, SMALL, published_open_handle},
    {OP_PUBLISHED_SAMPLES, IN_OPEN, ALL, OPCLASS_READ, OP_ON_SESSION, false, SMALL, published_samples_handle},
    {OP_READ_SCANS, IN_OPEN, ALL, OPCLASS_CONTROL, OP_ON_SESSION, false, SMALL, read_scans_handle},
    {OP_FEED_REPORT, IN_OPEN, ALL, OPCLASS_CONTROL, OP_ON_SESSION, false, SMALL, feed_report_handle},
};

const struct op_entry *dispatch_find(uint16_t opcode)
{
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].opcode == opcode)
            return &table[i];
    return NULL;
}

/* A frame that is not allowed now: the peer broke the protocol, and nothing after it can be trusted. */
static void broken(struct session *s, const struct frame *f, const char *what)
{
    struct err e = {0};
    err_set(&e, ERR_PROTOCOL, "opcode %u (%s), request %" PRIu64 ": %s", f->header.opcode,
            opcode_name(f->header.opcode), f->header.request_id, what);
    uint16_t opcode = f->header.opcode;
    uint64_t id = f->header.request_id;
    channel_frame_done(s->channel);
    session_send_error(s, opcode, id, &e);
    session_close(s, true, e.text);
}

/* A request that is understood and refused; the session goes on. */
static void refused(struct session *s, const struct frame *f, const struct err *e)
{
    uint16_t opcode = f->header.opcode;
    uint64_t id = f->header.request_id;
    channel_frame_done(s->channel);
    metric_add(METRIC_requests_failed, 1);
    log_info("request refused session=%llu tenant=%s op=%s id=%llu class=\"%s\": %s",
             (unsigned long long)s->number, s->identity.tenant, opcode_name(opcode), (unsigned long long)id,
             err_class_name(e->class), e->text);
    session_send_error(s, opcode, id, e);
}

static void roles_text(unsigned roles, char *out, size_t size)
{
    size_t n = 0;
    *out = 0;
    for (enum client_role r = ROLE_READER; r <= ROLE_ADMIN; r++)
        if (roles & 1u << r && n < size)
            n += (size_t)snprintf(out + n, size - n, "%s%s", n ? " or " : "", role_name(r));
}

/* Two opcodes do more for some than for others; the message tells which is asked for. */
static unsigned roles_of_request(const struct op_entry *op, const struct frame *f)
{
    struct rcur in = rcur_of(f->payload, f->header.payload_bytes);
    struct msg_run_open open;
    struct msg_mark mark;
    if (op->opcode == OP_RUN_OPEN && msg_run_open_decode(&in, &open, NULL) == 0 && open.create)
        return ADDS;
    if (op->opcode == OP_MARK && msg_mark_decode(&in, &mark, NULL) == 0 && mark.action != MARK_ACTION_BAD)
        return RULES; /* a trainer that finds a checkpoint damaged may say so, and nothing else */
    return op->roles;
}

static int denied(const struct session *s, const struct op_entry *op, const struct frame *f, struct err *e)
{
    unsigned roles = roles_of_request(op, f);
    enum client_role role = s->identity.role;
    if (roles & 1u << role)
        return 0;
    char needed[64];
    roles_text(roles, needed, sizeof needed);
    return err_set(e, ERR_DENIED, "%s needs the role %s; this certificate has %s; use other credentials",
                   opcode_name(op->opcode), needed, role_name(role));
}

void dispatch(struct session *s, struct frame *f)
{
    struct err e = {0};
    const struct op_entry *op = dispatch_find(f->header.opcode);
    if (f->header.flags != 0) {
        broken(s, f, "flags of an answer on a request");
    } else if (s->state == SESSION_HELLO && f->header.opcode != OP_HELLO) {
        broken(s, f, "hello must come first");
    } else if (!op) {
        err_set(&e, ERR_UNSUPPORTED,
                "opcode %u is not known to larderd " LARDER_VERSION_STRING
                "; the client is newer than the server: upgrade the server",
                f->header.opcode);
        refused(s, f, &e);
    } else if (!(op->states & 1u << s->state)) {
        broken(s, f, "not allowed in this state of the session");
    } else if (s->lane && !(op->states & ON_LANE)) {
        broken(s, f, "not allowed on a bulk lane, which carries sealed chunks only; send it over TLS");
    } else if (f->header.payload_bytes > op->payload_bytes_max) {
        err_set(&e, ERR_LIMIT, "%s takes at most %u bytes, %u were sent", opcode_name(op->opcode),
                op->payload_bytes_max, f->header.payload_bytes);
        refused(s, f, &e);
    } else if (s->state == SESSION_OPEN && denied(s, op, f, &e) < 0) {
        refused(s, f, &e);
    } else if (op->opcode != OP_CANCEL && op->opcode != OP_CREDIT && request_find(s, f->header.request_id)) {
        broken(s, f, "its id is that of a request still in flight");
    } else {
        op->handle(s, op, f);
    }
}

static int check_features(uint64_t features, struct err *e)
{
    uint64_t unknown = features & ~FEATURES_KNOWN & ~0ull << FEATURE_MANDATORY_FIRST;
    if (unknown == 0)
        return 0;
    return err_set(e, ERR_VERSION,
                   "the client requires feature %d, which larderd " LARDER_VERSION_STRING
                   " does not know; upgrade the server or use an older client",
                   __builtin_ctzll(unknown));
}

static void send_hello(struct session *s, uint64_t id)
{
    struct buf b = {0};
    struct msg_hello_reply reply = {
        .features = s->features,
        .software = slice_str("larderd " LARDER_VERSION_STRING),
        .store_id = s->w->server->store_id,
        .tenant = slice_str(s->identity.tenant),
        .role = (uint8_t)s->identity.role,
        .server_time_ns = loop_unix_ns(s->w->loop),
        .default_deadline_ms = s->w->server->limits.deadline_ms,
    };
    msg_hello_reply_encode(&reply, &b);
    if (b.failed)
        s->broken = true;
    else
        session_send(s, OP_HELLO, 0, id, SLICE(b.p, b.n), (struct slice){0});
    buf_free(&b);
}

static void hello_handle(struct session *s, const struct op_entry *op, struct frame *f)
{
    struct err e = {0};
    struct msg_hello hello;
    char software[64] = "";
    uint64_t id = f->header.request_id;
    struct rcur in = rcur_of(f->payload, f->header.payload_bytes);
    if (msg_hello_decode(&in, &hello, &e) == 0 && rcur_end(&in, "hello", &e) == 0 &&
        check_features(hello.features, &e) == 0 &&
        !(s->tenant = sched_tenant(s->w->sched, channel_peer(s->channel)->tenant)))
        err_set(&e, ERR_NO_MEMORY, "no memory for the session");
    if (e.class == ERR_NONE)
        err_quote(software, sizeof software, hello.software.p, hello.software.n);
    channel_frame_done(s->channel);
    if (e.class != ERR_NONE) {
        session_send_error(s, op->opcode, id, &e);
        session_close(s, true, e.text);
        return;
    }
    s->identity = *channel_peer(s->channel);
    s->features = hello.features & FEATURES_KNOWN;
    if (!lane_allowed(s->w->server))
        s->features &= ~(1ull << FEATURE_BULK_LANE);
    s->state = SESSION_OPEN;
    s->state_at_ms = loop_now_ms(s->w->loop);
    channel_allow_large(s->channel);
    metric_add(METRIC_sessions_open, 1);
    metric_add(METRIC_sessions_total, 1);
    log_info("session opened session=%llu tenant=%s role=%s by=\"%s\" peer=%s software=\"%s\"",
             (unsigned long long)s->number, s->identity.tenant, role_name(s->identity.role),
             s->identity.subject, s->peer, software);
    send_hello(s, id);
}

static void ping_handle(struct session *s, const struct op_entry *op, struct frame *f)
{
    uint64_t id = f->header.request_id;
    channel_frame_done(s->channel);
    session_send(s, op->opcode, 0, id, (struct slice){0}, (struct slice){0});
}

static void cancel_handle(struct session *s, const struct op_entry *op, struct frame *f)
{
    (void)op;
    struct err e = {0};
    struct msg_cancel m;
    struct rcur in = rcur_of(f->payload, f->header.payload_bytes);
    int bad = msg_cancel_decode(&in, &m, &e);
    if (bad == 0)
        bad = rcur_end(&in, "cancel", &e);
    if (bad < 0) {
        broken(s, f, e.text);
        return;
    }
    channel_frame_done(s->channel);
    struct request *r = request_find(s, m.request_id);
    if (!r)
        return; /* it was done already */
    metric_add(METRIC_requests_cancelled, 1);
    err_set(&e, ERR_CANCELLED, "%s was cancelled by the client", opcode_name(r->op->opcode));
    r->cancel(r, &e);
}
