/* SPDX-License-Identifier: Apache-2.0 */
/* Two ends of a channel in one process, with a CA, certificates and nothing of a network between them. */
#ifndef LARDER_TESTS_TLS_PAIR_H
#define LARDER_TESTS_TLS_PAIR_H

#include <stdbool.h>
#include <stddef.h>

#include "format/channel.h"
#include "format/pki.h"

/* Certificates that every test may use: made once, valid now, for localhost, 127.0.0.1 and ::1. */
struct tls_material {
    struct pki_pair ca;
    struct pki_pair server;
    struct pki_pair user; /* larder://acme/writer */
};
void tls_material_make(struct tls_material *m);
void tls_material_free(struct tls_material *m);
/* Configuration of one side; fails the test if it cannot be made. */
struct channel_config *tls_config(bool server, const struct pki_pair *ca, const struct pki_pair *own);

struct tls_pair {
    struct channel *server;
    struct channel *client;
    struct err server_err; /* the first error that each side met; class ERR_NONE if none */
    struct err client_err;
    size_t step; /* bytes moved at a time; 0: all there are */
};
/* Ends are owned by the pair from here on; configs are only borrowed. */
void tls_pair_open(struct tls_pair *p, struct channel_config *server, struct channel_config *client,
                   const char *expected_host);
void tls_pair_close(struct tls_pair *p);
/* Moves bytes both ways until neither side has any left; a side that failed still has its output delivered.
 */
void tls_pair_move(struct tls_pair *p);

#endif
