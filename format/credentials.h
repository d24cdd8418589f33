/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The credential file: one per user of a tenant; JSON. It holds all that a client needs: server address, CA,
 * certificate, key and KEKs. LARDER_CREDENTIALS names it. Decoding keeps secrets in `struct secret` and wipes
 * the rest.
 *
 *   {"larder_credentials": 1, "server": "host:port", "tenant": "acme", "role": "writer", "ca": PEM,
 *    "certificate": PEM, "key": PEM, "keks": [{"epoch": 1, "key": 64 hex digits}], "kek_command": "..."
 * (optional)}
 *
 * With kek_command the keks stand in the command's output instead, one "EPOCH HEX" a line.
 */
#ifndef LARDER_CREDENTIALS_H
#define LARDER_CREDENTIALS_H

#include "format/base/cursor.h"
#include "format/base/err.h"
#include "format/base/secret.h"
#include "format/keys.h"
#include "format/limits.h"
#include "format/wire.h"

struct credentials {
    char server[272]; /* host:port, [v6]:port */
    char tenant[TENANT_NAME_BYTES_MAX + 1];
    enum client_role role;
    char *ca_pem;
    char *certificate_pem;
    struct secret *key_pem;
    struct keyring keks;
    char *kek_command; /* NULL if none */
};

must_check int credentials_decode(const void *json, size_t n, struct credentials *out, struct err *e);
/* Lines "EPOCH HEX" of a kek_command's output. */
must_check int credentials_keks_parse(const void *text, size_t n, struct keyring *out, struct err *e);
/* out holds secrets: wipe it (secret_wipe over out->p, then buf_free) after use. */
must_check int credentials_encode(const struct credentials *c, struct buf *out, struct err *e);
void credentials_free(struct credentials *c);
/* "host:port" or "[v6]:port" into its parts. */
must_check int address_split(const char *address, char *host, size_t host_size, char *port, size_t port_size,
                             struct err *e);
/* An address to listen on: as address_split, but port 0 is allowed. */
must_check int listen_split(const char *address, char *host, size_t host_size, char *port, size_t port_size,
                            struct err *e);

#endif
