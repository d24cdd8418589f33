/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Somebody on the path between client and server who knows the form of bulk lanes and changes what travels on
 * them; TLS connections pass untouched. Two threads for each connection.
 */
#ifndef LARDER_TESTS_TAMPER_H
#define LARDER_TESTS_TAMPER_H

#include <stdbool.h>

enum tamper_kind {
    TAMPER_HEADER,  /* a bit of a frame's header */
    TAMPER_PAYLOAD, /* a bit of a payload */
    TAMPER_TAG,     /* of the tag behind the header */
    TAMPER_DROP,    /* a frame is left out */
    TAMPER_REPEAT,  /* comes twice */
    TAMPER_SWAP,    /* changes places with the next */
    TAMPER_CUT,     /* is cut, and the connection with it */
    TAMPER_KINDS
};

struct tamper;
struct tamper *tamper_start(const char *server_address);
const char *tamper_address(const struct tamper *t);
/* From now on: `times` frames in that direction are met with, after `skip` others went through. Large: for
 * ever. */
void tamper_arm(struct tamper *t, enum tamper_kind kind, bool to_server, unsigned skip, unsigned times);
unsigned tamper_count(struct tamper *t);  /* frames changed so far */
unsigned tamper_frames(struct tamper *t); /* frames seen on lanes */
unsigned tamper_lanes(struct tamper *t);  /* lanes opened */
void tamper_stop(struct tamper *t);

#endif
