/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small certificate authority for a cluster's own use: makes a CA, issues server and user certificates
 * (EC P-256, TLS 1.3). Time is passed in.
 */
#ifndef LARDER_PKI_H
#define LARDER_PKI_H

#include <stdint.h>

#include "format/base/err.h"
#include "format/base/secret.h"
#include "format/wire.h"

struct pki_pair {
    char *certificate_pem;  /* malloc'ed */
    struct secret *key_pem; /* PKCS#8 PEM with a terminating NUL inside the size */
};
void pki_pair_free(struct pki_pair *p);

/* now_s: Unix time; certificates begin one hour earlier (clocks differ) and last `days`. */
must_check int pki_ca_create(const char *name, int64_t now_s, unsigned days, struct pki_pair *out,
                             struct err *e);
/* hosts: DNS names and IP addresses for the SAN, NULL-terminated. SAN URI larder://server. */
must_check int pki_issue_server(const struct pki_pair *ca, const char *const *hosts, int64_t now_s,
                                unsigned days, struct pki_pair *out, struct err *e);
/* SAN URI larder://TENANT/ROLE. days may be negative: tests make expired ones so. */
must_check int pki_issue_user(const struct pki_pair *ca, const char *tenant, enum client_role role,
                              int64_t now_s, int days, struct pki_pair *out, struct err *e);

#endif
