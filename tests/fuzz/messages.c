/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every message of messages.def, frame headers and error answers out of any bytes. Input: one byte that
 * chooses, then the bytes. What decodes, encoded again, must be the bytes that were read.
 */
#include <string.h>

#include "format/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void same(const struct buf *b, const uint8_t *data, size_t read)
{
    check(!b->failed && b->n == read && (read == 0 || memcmp(b->p, data, read) == 0));
}

#define MSG(name, fields)                                 \
    static void try_##name(const uint8_t *data, size_t n) \
    {                                                     \
        struct msg_##name m;                              \
        struct rcur in = rcur_of(data, n);                \
        struct buf b = {0};                               \
        struct err e = {0};                               \
        if (msg_##name##_decode(&in, &m, &e) < 0) {       \
            check(e.class == ERR_PROTOCOL);               \
            return;                                       \
        }                                                 \
        msg_##name##_encode(&m, &b);                      \
        same(&b, data, n - in.left);                      \
        buf_free(&b);                                     \
    }
#include "format/messages.def"
#undef MSG

#define MSG(name, fields) try_##name,
static void (*const messages[])(const uint8_t *data, size_t n) = {
#include "format/messages.def"
};
#undef MSG
#define MESSAGES (sizeof messages / sizeof messages[0])

static void header(const uint8_t *data, size_t n)
{
    struct frame_header h;
    uint8_t again[FRAME_HEADER_BYTES];
    if (n < FRAME_HEADER_BYTES || frame_header_decode(data, &h, NULL) < 0)
        return;
    frame_header_encode(&h, again);
    check(memcmp(again, data, sizeof again) == 0);
}

static void error_answer(const uint8_t *data, size_t n)
{
    struct rcur in = rcur_of(data, n);
    struct err e = {0}, back = {0};
    struct buf b = {0};
    check(err_of_msg(&in, &e) < 0);
    check(e.class > ERR_NONE && e.class < ERR_CLASS_COUNT && e.errnum > 0);
    msg_of_err(&e, &b);
    in = rcur_of(b.p, b.n);
    check(err_of_msg(&in, &back) < 0 && in.left == 0);
    check(back.class == e.class && back.errnum == e.errnum);
    buf_free(&b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n == 0)
        return 0;
    size_t which = data[0] % (MESSAGES + 2);
    if (which < MESSAGES)
        messages[which](data + 1, n - 1);
    else if (which == MESSAGES)
        header(data + 1, n - 1);
    else
        error_answer(data + 1, n - 1);
    return 0;
}
