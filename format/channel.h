/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One end of a connection without its socket: TLS 1.3 on memory buffers, and frames inside. Bytes from the
 * network go in, frames come out; frames go in, bytes for the network come out. Server, client, fuzzer and
 * simulator use the same code. A clear channel (no TLS, identity given) exists for the simulator and is never
 * offered by larderd. A lane (lane.h) carries sealed chunks in the clear, each frame authenticated.
 *
 * After an error of channel_input the channel only has output left to flush (an alert), then it is to be
 * freed. After an error of channel_frame nothing more comes in, but the peer can still be told: channel_send
 * works.
 */
#ifndef LARDER_CHANNEL_H
#define LARDER_CHANNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/base/cursor.h"
#include "format/base/err.h"
#include "format/base/hash.h"
#include "format/base/secret.h"
#include "format/identity.h"
#include "format/lane.h"
#include "format/limits.h"
#include "format/wire.h"

/* Certificates and settings shared by many channels; reference-counted, immutable, thread-safe. */
struct channel_config;
/* PEM texts. TLS 1.3 only, both sides authenticated, ALPN "larder/1", no early data, no renegotiation, no
 * tickets. ERR_INVALID, ERR_DENIED (key does not fit certificate, certificate expired: with its dates). */
must_check int channel_config_create(bool server, const char *ca_pem, const char *certificate_pem,
                                     const struct secret *key_pem, struct channel_config **out,
                                     struct err *e);
struct channel_config *channel_config_ref(struct channel_config *c);
void channel_config_unref(struct channel_config *c); /* NULL allowed */
bool channel_config_is_server(const struct channel_config *c);

struct channel;
/* expected_host: the client checks that the certificate is a server's (SAN URI larder://server) and, if not
 * NULL, names that host or address. */
must_check int channel_create(struct channel_config *config, const char *expected_host, struct channel **out,
                              struct err *e);
must_check int channel_create_clear(bool server, const struct identity *peer, struct channel **out);
/*
 * A bulk lane. Frames are followed by tags: one of 16 bytes directly behind the header, over it, so that a
 * length is trusted only when it is known to be the peer's; and one behind the payload, over it, where there
 * is a payload that is not sealed already. The server's answers to OP_READ carry bytes of sealed chunks only:
 * their payload has no tag, the chunks have theirs.
 *
 *   header, 32 | tag, 16 | payload ............... | tag, 16 (payload covered)
 *
 * The client opens it with its hello, the server answers; both are authenticated like frames. peer: whom the
 * ticket was given to or by. ERR_NO_MEMORY.
 */
must_check int channel_create_lane(bool server, const struct identity *peer, const struct lane_keys *keys,
                                   const struct id *ticket, struct channel **out, struct err *e);
void channel_free(struct channel *c);
/* Where memory for payloads comes from and goes to: n bytes on a border of BLOCK_BYTES, or NULL. Without it:
 * posix_memalign, and free(). Before the first input. */
struct channel_memory {
    uint8_t *(*take)(void *arg, size_t n);
    void (*give)(void *arg, uint8_t *p);
    void *arg;
};
void channel_use_memory(struct channel *c, const struct channel_memory *m);

/* What a channel holds at most: beyond it, input breaks the channel (ERR_LIMIT; feed none while a frame is
 * not taken), and channel_send is refused (ERR_BUSY; nothing was queued, send the output first). */
#define CHANNEL_INPUT_BYTES_MAX  (8u << 20)
#define CHANNEL_OUTPUT_BYTES_MAX (64u << 20)

/*
 * Payloads that go to their last place as they are received, instead of into memory of the channel. On a lane
 * only those that no tag of the frame covers. The frame is then handed out without its payload.
 */
struct channel_sink {
    bool (*wants)(void *arg, const struct frame_header *h); /* asked once, when the header has come */
    uint8_t *(*place)(void *arg, size_t skip, size_t *n);   /* of the bytes behind the next `skip`; how many
                                                               fit: at least 1. NULL, not for skip 0: unknown */
    void (*came)(void *arg, size_t n);                      /* so many were put there */
    void *arg;
};
void channel_sink(struct channel *c, const struct channel_sink *s); /* copied; before the first frame */

/* Bytes received from the network; all are taken. Starts the handshake on a client with n = 0. Errors:
 * ERR_DENIED (certificate refused: why), ERR_PROTOCOL (no TLS, or not ours), ERR_CORRUPT, ERR_LIMIT,
 * ERR_NO_MEMORY. What is wrong inside frames is told by channel_frame. */
must_check int channel_input(struct channel *c, const void *p, size_t n, struct err *e);
/* Where the bytes from the network that come behind the next `skip` may be put instead of being given to
 * channel_input: in the payload being received, if nothing else is kept before it and it is not encrypted. n:
 * how many fit; NULL: nowhere. Valid until the next call on the channel but channel_frame (that finds no
 * whole frame). */
uint8_t *channel_place(struct channel *c, size_t skip, size_t *n);
/* At least so many bytes from the network must still come before the frame being received is whole. */
size_t channel_awaited(const struct channel *c);
must_check int channel_placed(struct channel *c, size_t n, struct err *e); /* n bytes came there */
bool channel_ready(const struct channel *c);                  /* handshake done, both authenticated */
const struct identity *channel_peer(const struct channel *c); /* NULL until ready */

/*
 * A whole frame that has arrived. Payload memory belongs to the channel until channel_frame_done. It is
 * placed for direct I/O: the payload begins on a border of BLOCK_BYTES in memory, except that where a tail
 * is to be written (frame_written_at) this one does. Behind the payload's end, up to the next border, lie
 * zeros that belong to it: a tail can be written in whole blocks without a copy.
 *
 *   OP_SEGMENT_CHUNK   | 4036 unused | message, 60 | tail ............ | zeros |
 *   OP_SEGMENT_INDEX   | 4064 unused | message, 32 | tail ............ | zeros |
 *   border             ^                           ^                           ^
 *   others             | payload ................................... | zeros |
 */
struct frame {
    struct frame_header header;
    const uint8_t *payload; /* never NULL */
    bool sunk;              /* the payload went to the sink, and payload is no more than a pointer */
    bool summed;            /* a chunk that came to a server on a lane: tail_hash was taken as it came */
    struct hash128 tail_hash;
};
#define CHUNK_MESSAGE_BYTES 60 /* msg_segment_chunk as encoded: 16 + 4 + 40 */
#define INDEX_MESSAGE_BYTES 32 /* msg_segment_index as encoded: 16 + 8 + 8 */
/* Where in the payload begins what is written from where it lies; 0: nothing is. */
static inline size_t frame_written_at(uint16_t opcode)
{
    return opcode == OP_SEGMENT_CHUNK   ? CHUNK_MESSAGE_BYTES
           : opcode == OP_SEGMENT_INDEX ? INDEX_MESSAGE_BYTES
                                        : 0;
}
/* 1: *out is filled; 0: more input is needed; <0: broken, ERR_PROTOCOL, ERR_VERSION or ERR_LIMIT. Call again
 * only after channel_frame_done. Before hello is done only payloads of FRAME_CONTROL_BYTES_MAX are taken in.
 */
must_check int channel_frame(struct channel *c, struct frame *out, struct err *e);
void channel_frame_done(struct channel *c);
/* Takes the payload's memory away from the channel instead of channel_frame_done. Returns the allocation to
 * give back later (channel_use_memory; else free() it), NULL for an empty payload; it is not the payload's
 * address (see struct frame), which stays as it was and valid in it. */
must_check uint8_t *channel_frame_steal(struct channel *c);
void channel_allow_large(struct channel *c);      /* after hello: payloads up to FRAME_PAYLOAD_BYTES_MAX */
bool channel_partial(const struct channel *c);    /* a frame has begun to arrive and is not whole yet */
size_t channel_buffered(const struct channel *c); /* input bytes held, for accounting */

/* Queues a frame: header (payload_bytes is computed), message bytes and tail, both may be empty. Copies
 * (encrypts) them. */
must_check int channel_send(struct channel *c, const struct frame_header *h, struct slice message,
                            struct slice tail, struct err *e);
/*
 * The same without copying the tail where that saves work (on a lane, if it is large): it has to stay as it
 * is while channel_lent says so, or until channel_lent_keep has made a copy of what is left (ERR_NO_MEMORY:
 * then the channel sends nothing more). While it is lent nothing else can be sent.
 */
must_check int channel_lend(struct channel *c, const struct frame_header *h, struct slice message,
                            struct slice tail, struct err *e);
bool channel_lent(const struct channel *c);
must_check int channel_lent_keep(struct channel *c, struct err *e);
/* Queues only the header of a frame whose payload, tail_bytes of sealed chunks, the caller sends itself right
 * behind the output of now. For answers to OP_READ on a lane. */
must_check int channel_send_head(struct channel *c, const struct frame_header *h, size_t tail_bytes,
                                 struct err *e);
/* Bytes waiting for the network; the view is valid until the next call on the channel. */
struct slice channel_output(struct channel *c);
void channel_output_done(struct channel *c, size_t n); /* n bytes of it were sent */
bool channel_output_more(const struct channel *c);     /* there is more behind it, right now */
/* Takes the whole output away as memory of the caller's (free() it), for an asynchronous send; {NULL,0} if
 * none. */
uint8_t *channel_output_take(struct channel *c, size_t *n);
void channel_close(struct channel *c);             /* queues TLS close_notify */
bool channel_peer_closed(const struct channel *c); /* close_notify was received: a clean end */

/* RFC 8446 7.5 exporter, for keys of connections bound to this one. -ENOTSUP on a clear channel. */
must_check int channel_export(struct channel *c, const char *label, const void *context, size_t context_bytes,
                              void *out, size_t n);

#endif
