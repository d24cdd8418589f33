/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `larderd --dev DIR`: a folder with everything that a server and its users need, made as far as it is
 * missing, so that the same DIR goes on with the same data:
 *
 *   ca.pem ca.key server.pem server.key   a certificate authority of its own, and the server's certificate
 *   larderd.conf                          the configuration; edits are kept
 *   store/                                the store, with a tenant "dev"
 *   dev-ROLE.json                         credential files: admin, writer, reader, operator; one key for all
 *   address, larderd.pid                  while it runs
 *
 * Files with keys have mode 0600, the folder 0700.
 */
#ifndef LARDER_DEV_H
#define LARDER_DEV_H

#include "format/base/err.h"

#define DEV_TENANT "dev"

struct dev;
/* Makes what is missing but credentials; then config is the path of the configuration. */
must_check int dev_prepare(const char *folder, const char *listen, struct dev **out, struct err *e);
void dev_free(struct dev *d); /* NULL allowed */
const char *dev_config(const struct dev *d);
/* The server runs at this address: writes the credential files, the process id and, last, the address. */
must_check int dev_announce(struct dev *d, const char *address, struct err *e);
/* Prints how to use it. */
void dev_print(const struct dev *d, const char *address);
/* The server has stopped: removes address and process id. */
void dev_withdraw(struct dev *d);

#endif
