/* SPDX-License-Identifier: Apache-2.0 */
/*
 * TLS 1.3 under a channel: bytes are pulled from and pushed to whoever owns it. It keeps no buffer but
 * OpenSSL's own record of at most 16 KiB each way. Used by channel.c; everybody else uses channel.h.
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

#include "format/base/err.h"
#include "format/identity.h"

#define TLS_RECORD_BYTES_MAX 16384u /* plaintext of one record */
#define TLS_RECORD_OVERHEAD  22u    /* header 5, content type 1, tag 16 */

struct channel_config; /* channel.h */
struct tls;

struct tls_io {
    /* Gives up to n bytes from the network; 0: none now. */
    size_t (*pull)(void *arg, void *p, size_t n);
    /* Takes n bytes for the network; false: no memory. */
    bool (*push)(void *arg, const void *p, size_t n);
    void *arg;
};

must_check int tls_create(struct channel_config *config, const char *expected_host, const struct tls_io *io,
                          struct tls **out, struct err *e);
void tls_free(struct tls *t);

/* 1: done, the peer is authenticated; 0: more input is needed; <0: refused, with the alert pushed. */
must_check int tls_handshake(struct tls *t, struct err *e);
const struct identity *tls_peer(const struct tls *t); /* after the handshake */
/* Bytes of plaintext, 1..n; 0: more input is needed, or the peer closed; <0. n <= INT_MAX. */
must_check int tls_read(struct tls *t, void *p, size_t n, struct err *e);
/* All n bytes, 0 < n <= INT_MAX; 0 or <0. */
must_check int tls_write(struct tls *t, const void *p, size_t n, struct err *e);
void tls_close(struct tls *t); /* pushes close_notify */
bool tls_peer_closed(const struct tls *t);
must_check int tls_export(struct tls *t, const char *label, const void *context, size_t context_bytes,
                          void *out, size_t n);

#endif
