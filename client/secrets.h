/* SPDX-License-Identifier: Apache-2.0 */
/* Where the client's secrets come from: the credential file and, if it names one, its kek_command. */
#ifndef LARDER_CLIENT_SECRETS_H
#define LARDER_CLIENT_SECRETS_H

#include "format/credentials.h"

/* Refuses a file that others can read (ERR_DENIED, with the chmod to run).
 * timeout_ms bounds the kek_command. */
must_check int secrets_load(const char *path, unsigned timeout_ms, struct credentials *out, struct err *e);

/* Randomness for ids and salts, from the kernel. */
void secrets_random(void *p, size_t n);

#endif
