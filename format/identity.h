/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who the holder of a certificate is: its SAN URI, larder://TENANT/ROLE, or larder://server. Nothing else of
 * a certificate is ever read for a decision.
 */
#ifndef LARDER_IDENTITY_H
#define LARDER_IDENTITY_H

#include <stdbool.h>
#include <stddef.h>

#include "format/base/err.h"
#include "format/limits.h"
#include "format/wire.h"

struct identity {
    char tenant[TENANT_NAME_BYTES_MAX + 1];
    enum client_role role;
    bool server;
    char subject[128]; /* for the log */
};

#define IDENTITY_SCHEME "larder://"

/* Fills tenant, role and server from n bytes of a URI that begins with IDENTITY_SCHEME; subject is left
 * alone. ERR_DENIED saying what was expected and found. */
must_check int identity_parse(const char *uri, size_t n, struct identity *out, struct err *e);

#endif
