/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/publishing.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

enum err_class published_open(struct caller *c, const char *name, struct published_opened *o)
{
    struct buf b = {0};
    struct answer a;
    struct msg_published_open m = {.name = slice_str(name)};
    struct msg_published_open_reply reply;
    msg_published_open_encode(&m, &b);
    enum err_class class = caller_call(c, OP_PUBLISHED_OPEN, &b, &a);
    o->err = a.err;
    if (class == ERR_NONE) {
        struct rcur in = rcur_of(a.payload, a.header.payload_bytes);
        assert_int_equal(msg_published_open_reply_decode(&in, &reply, NULL), 0);
        o->version = reply.version;
        o->count = reply.count;
        in = rcur_of(reply.shards.p, reply.shards.n);
        for (uint32_t i = 0; i < reply.count && i < 8; i++) {
            struct msg_published_shard shard;
            assert_int_equal(msg_published_shard_decode(&in, &shard, NULL), 0);
            assert_true(slice_cstr(shard.name, o->names[i], sizeof o->names[i]));
            o->bytes[i] = shard.bytes;
        }
    }
    answer_free(&a);
    return class;
}

uint64_t published_ask_read(struct caller *c, const struct id *version, uint64_t credit, uint32_t shard,
                            uint64_t offset, uint64_t bytes)
{
    struct buf b = {0}, items = {0};
    struct msg_read_range r = {.offset = offset, .bytes = bytes};
    le32_put(r.object.bytes, shard);
    msg_read_range_encode(&r, &items);
    struct msg_read m = {.source = READ_PUBLISHED,
                         .class = 2,
                         .scope = *version,
                         .credit = credit,
                         .count = 1,
                         .ranges = SLICE(items.p, items.n)};
    msg_read_encode(&m, &b);
    buf_free(&items);
    return caller_send(c, OP_READ, 0, &b, (struct slice){0});
}

uint64_t published_ask_samples(struct caller *c, const struct id *version, uint64_t credit, uint32_t shard)
{
    struct buf b = {0};
    struct msg_published_samples m = {.version = *version, .shard = shard, .credit = credit};
    msg_published_samples_encode(&m, &b);
    return caller_send(c, OP_PUBLISHED_SAMPLES, 0, &b, (struct slice){0});
}

struct err caller_gather(struct caller *c, uint64_t id, struct buf *out, size_t until)
{
    struct err e = {0};
    for (bool more = true; more && out->n < until;) {
        struct answer a;
        assert_true(caller_answer(c, &a));
        assert_int_equal(a.header.request_id, id);
        more = a.header.flags & FRAME_MORE;
        e = a.err;
        if (e.class == ERR_NONE)
            buf_put(out, a.payload, a.header.payload_bytes);
        answer_free(&a);
    }
    return e;
}
