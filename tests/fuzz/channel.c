/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames out of any bytes in any splits. Input: one byte that chooses the splits, then what the network
 * gives. Every frame that comes out, sent again, must give the bytes that it came from, and the payload must
 * lie as channel.h promises.
 */
#include <stdlib.h>
#include <string.h>

#include "format/channel.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check_place(const struct frame *f)
{
    size_t lead = frame_written_at(f->header.opcode);
    size_t bytes = f->header.payload_bytes;
    if (bytes == 0)
        return;
    check(((uintptr_t)f->payload + lead) % BLOCK_BYTES == 0);
    for (size_t i = bytes; (uintptr_t)(f->payload + i) % BLOCK_BYTES != 0; i++)
        check(f->payload[i] == 0);
}

/* All frames that have arrived; *at is how far in the input they reach. False: broken. */
static bool take(struct channel *in, struct channel *out, const uint8_t *data, size_t n, size_t *at)
{
    struct frame f;
    struct err e;
    int rc;
    while ((rc = channel_frame(in, &f, &e)) == 1) {
        check_place(&f);
        check(channel_send(out, &f.header, SLICE(f.payload, f.header.payload_bytes), SLICE(NULL, 0), NULL) ==
              0);
        uint8_t *memory = NULL;
        bool steal = f.header.request_id % 2;
        if (steal)
            memory = channel_frame_steal(in);
        else
            channel_frame_done(in);
        size_t sent;
        uint8_t *bytes = channel_output_take(out, &sent);
        check(sent <= n - *at && memcmp(bytes, data + *at, sent) == 0);
        *at += sent;
        free(bytes);
        free(memory);
    }
    check(rc == 0 || e.text[0]);
    return rc == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n == 0)
        return 0;
    struct identity who = {.tenant = "fuzz", .role = ROLE_WRITER};
    struct channel *in, *out;
    size_t step = data[0] ? data[0] : n, at = 0;
    check(channel_create_clear(true, &who, &in) == 0 && channel_create_clear(false, &who, &out) == 0);
    if (data[0] % 2)
        channel_allow_large(in);
    data++, n--;
    for (size_t given = 0; given < n;) {
        size_t piece = n - given < step ? n - given : step;
        struct err e = {0};
        int rc = channel_input(in, data + given, piece, &e);
        check(rc == 0 || (rc < 0 && e.text[0]));
        given += piece;
        if (!take(in, out, data, n, &at) || rc < 0)
            break;
    }
    channel_free(in);
    channel_free(out);
    return 0;
}
