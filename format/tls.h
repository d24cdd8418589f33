/* SPDX-License-Identifier: Apache-2.0 */
/*
 * TLS 1.3 under a channel: bytes lie in memory of whoever owns it. Used by channel.c; everybody else uses
 * channel.h.
 *
 * OpenSSL makes the handshake: keys, certificates, alerts, everything before application data. From there on
 * records are sealed from and opened to where their bytes are (record.h), without a copy: its own buffers
 * and the memory BIO between would cost as much as the cipher. OpenSSL hands the two traffic secrets out by
 * its hook for key logs, reads no byte behind the peer's Finished, and is asked for exported keys only.
 *
 * Only TLS 1.3, both sides authenticated, ALPN "larder/1" required of both, no tickets, no resumption, no
 * early data, no renegotiation, no compression. Errors are in words for people: whose certificate, what about
 * it, with its dates.
 */
#ifndef LARDER_TLS_H
#define LARDER_TLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format/base/cursor.h"
#include "format/base/err.h"
#include "format/identity.h"

struct channel_config; /* channel.h */
struct tls;

struct tls_io {
    /* What has come from the network and was not skipped: at least n bytes in one piece, or fewer than n: no
     * more has come. Valid until the next call. */
    struct slice (*see)(void *arg, size_t n);
    void (*skip)(void *arg, size_t n);
    /* Makes n bytes of output, to be filled in at once. NULL: no memory. */
    uint8_t *(*grow)(void *arg, size_t n);
    void *arg;
};

must_check int tls_create(struct channel_config *config, const char *expected_host, const struct tls_io *io,
                          struct tls **out, struct err *e);
void tls_free(struct tls *t);

/* 1: done, the peer is authenticated; 0: more input is needed; <0: refused, with the alert in the output. */
must_check int tls_handshake(struct tls *t, struct err *e);
const struct identity *tls_peer(const struct tls *t); /* after the handshake */
/* Bytes of plaintext, 1..n, all verified; 0: more input is needed, or the peer closed; <0: broken, with the
 * alert in the output. What of p lies behind them may have been written to as well. n <= INT_MAX. */
must_check int tls_read(struct tls *t, void *p, size_t n, struct err *e);
/* All bytes of the parts, one behind the other, in as few records as hold them; 0 or <0 (no memory). */
#define TLS_PARTS_MAX 3
must_check int tls_write(struct tls *t, const struct slice *parts, size_t count, struct err *e);
/* Bytes of output that tls_write makes at most for so many. */
size_t tls_output_bytes(size_t n);
void tls_close(struct tls *t); /* close_notify */
bool tls_peer_closed(const struct tls *t);
must_check int tls_export(struct tls *t, const char *label, const void *context, size_t context_bytes,
                          void *out, size_t n);

#endif
