/* SPDX-License-Identifier: Apache-2.0 */
#include "format/wire.h"

#include <errno.h>
#include <string.h>

#include "format/version.h"

void frame_header_encode(const struct frame_header *h, uint8_t out[FRAME_HEADER_BYTES])
{
    le32_put(out, FRAME_MAGIC);
    le16_put(out + 4, PROTOCOL_VERSION);
    le16_put(out + 6, h->opcode);
    le32_put(out + 8, h->flags);
    le32_put(out + 12, h->payload_bytes);
    le64_put(out + 16, h->request_id);
    le32_put(out + 24, h->deadline_ms);
    le32_put(out + 28, 0);
}

int frame_header_decode(const uint8_t in[FRAME_HEADER_BYTES], struct frame_header *out, struct err *e)
{
    if (le32_get(in) != FRAME_MAGIC)
        return err_set(e, ERR_PROTOCOL, "expected a larder frame, found magic 0x%08x; is the peer a larder?",
                       le32_get(in));
    if (le16_get(in + 4) != PROTOCOL_VERSION)
        return err_set(e, ERR_VERSION,
                       "the peer speaks protocol version %u, this side version %u; upgrade the older one",
                       le16_get(in + 4), PROTOCOL_VERSION);
    *out = (struct frame_header){
        .opcode = le16_get(in + 6),
        .flags = le32_get(in + 8),
        .payload_bytes = le32_get(in + 12),
        .request_id = le64_get(in + 16),
        .deadline_ms = le32_get(in + 24),
    };
    if (out->flags & ~(uint32_t)FRAME_FLAGS_KNOWN)
        return err_set(e, ERR_PROTOCOL, "frame of request %llu has unknown flags 0x%x",
                       (unsigned long long)out->request_id, out->flags);
    if (le32_get(in + 28) != 0)
        return err_set(e, ERR_PROTOCOL, "frame of request %llu has reserved bits set",
                       (unsigned long long)out->request_id);
    if (out->payload_bytes > FRAME_PAYLOAD_BYTES_MAX)
        return err_set(e, ERR_PROTOCOL, "frame of request %llu announces %u bytes, at most %u are allowed",
                       (unsigned long long)out->request_id, out->payload_bytes, FRAME_PAYLOAD_BYTES_MAX);
    return 0;
}

const char *opcode_name(unsigned opcode)
{
    switch (opcode) {
    case OP_HELLO: return "hello";
    case OP_PING: return "ping";
    case OP_CANCEL: return "cancel";
    case OP_CREDIT: return "credit";
    case OP_STATUS: return "status";
    case OP_LANE_OPEN: return "lane_open";
    case OP_TENANT_ADD: return "tenant_add";
    case OP_TENANT_LIST: return "tenant_list";
    case OP_RUN_OPEN: return "run_open";
    case OP_RUN_LIST: return "run_list";
    case OP_RUN_DESTROY: return "run_destroy";
    case OP_ENVELOPE_PUT: return "envelope_put";
    case OP_ENVELOPE_DROP: return "envelope_drop";
    case OP_ATTEMPT: return "attempt";
    case OP_SEGMENT_CREATE: return "segment_create";
    case OP_SEGMENT_CHUNK: return "segment_chunk";
    case OP_SEGMENT_INDEX: return "segment_index";
    case OP_SEGMENT_SEAL: return "segment_seal";
    case OP_SEGMENT_DISCARD: return "segment_discard";
    case OP_JOIN: return "join";
    case OP_COMMIT: return "commit";
    case OP_SAVE_ABORT: return "save_abort";
    case OP_COMMIT_LIST: return "commit_list";
    case OP_COMMIT_GET: return "commit_get";
    case OP_MARK: return "mark";
    case OP_PRUNE: return "prune";
    case OP_SCRUB: return "scrub";
    case OP_READ: return "read";
    case OP_PUBLISHED_LIST: return "published_list";
    case OP_PUBLISHED_OPEN: return "published_open";
    case OP_PUBLISHED_SAMPLES: return "published_samples";
    case OP_READ_SCANS: return "read_scans";
    case OP_FEED_REPORT: return "feed_report";
    default: return "unknown";
    }
}

static const char *const roles[] = {
    [ROLE_NONE] = "none",         [ROLE_READER] = "reader", [ROLE_WRITER] = "writer",
    [ROLE_OPERATOR] = "operator", [ROLE_ADMIN] = "admin",
};

const char *role_name(enum client_role role)
{
    return (unsigned)role < sizeof roles / sizeof roles[0] ? roles[role] : "none";
}

int role_of_name(const char *name, enum client_role *out)
{
    for (int i = ROLE_READER; i <= ROLE_ADMIN; i++) {
        if (strcmp(name, roles[i]) == 0) {
            *out = (enum client_role)i;
            return 0;
        }
    }
    return -EINVAL;
}

#define put_u8(b, v)    buf_u8(b, v)
#define put_u16(b, v)   buf_u16(b, v)
#define put_u32(b, v)   buf_u32(b, v)
#define put_u64(b, v)   buf_u64(b, v)
#define put_id(b, v)    buf_put(b, (v).bytes, sizeof(v).bytes)
#define put_hash(b, v)  buf_put(b, (v).bytes, sizeof(v).bytes)
#define put_entry(b, v) buf_put(b, (v).bytes, sizeof(v).bytes)
#define put_str(b, v)   buf_put16(b, v)
#define put_bytes(b, v) buf_put32(b, v)

#define get_u8(c, v)    (*(v) = rcur_u8(c))
#define get_u16(c, v)   (*(v) = rcur_u16(c))
#define get_u32(c, v)   (*(v) = rcur_u32(c))
#define get_u64(c, v)   (*(v) = rcur_u64(c))
#define get_id(c, v)    rcur_copy(c, (v)->bytes, sizeof(v)->bytes)
#define get_hash(c, v)  rcur_copy(c, (v)->bytes, sizeof(v)->bytes)
#define get_entry(c, v) rcur_copy(c, (v)->bytes, sizeof(v)->bytes)
#define get_str(c, v)   (*(v) = rcur_take16(c))
#define get_bytes(c, v) (*(v) = rcur_take32(c))

#define MSG_PUT(type, field) put_##type(out, m->field);
#define MSG_GET(type, field) get_##type(in, &out->field);
#define MSG(name, fields)                                                                                  \
    void msg_##name##_encode(const struct msg_##name *m, struct buf *out)                                  \
    {                                                                                                      \
        fields(MSG_PUT)                                                                                    \
    }                                                                                                      \
    int msg_##name##_decode(struct rcur *in, struct msg_##name *out, struct err *e)                        \
    {                                                                                                      \
        fields(MSG_GET) if (in->failed) return err_set(e, ERR_PROTOCOL, "message %s is cut short", #name); \
        return 0;                                                                                          \
    }
#include "format/messages.def"
#undef MSG

void msg_of_err(const struct err *e, struct buf *out)
{
    struct msg_error m = {
        .class = (uint32_t)e->class, .errnum = (uint32_t)e->errnum, .text = slice_str(e->text)};
    msg_error_encode(&m, out);
}

int err_of_msg(struct rcur *in, struct err *e)
{
    struct msg_error m;
    int rc = msg_error_decode(in, &m, e);
    if (rc < 0)
        return rc;
    enum err_class class =
        m.class > ERR_NONE && m.class < ERR_CLASS_COUNT ? (enum err_class)m.class : ERR_PROTOCOL;
    char text[ERR_TEXT_BYTES];
    rc = err_set(e, class, "%s", err_quote(text, sizeof text, m.text.p, m.text.n));
    if (e && m.errnum > 0 && m.errnum < 4096) {
        e->errnum = (int)m.errnum;
        rc = -e->errnum;
    }
    return rc;
}
