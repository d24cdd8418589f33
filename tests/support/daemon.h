/* SPDX-License-Identifier: Apache-2.0 */
/* A larderd of its own for a test: `larderd --dev` in a fresh folder, on loopback, gone with the test. And a
 * proxy before it that cuts connections. */
#ifndef LARDER_TESTS_DAEMON_H
#define LARDER_TESTS_DAEMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/larder.h"

struct daemon {
    char folder[256];
    char address[64]; /* kept over restarts */
    pid_t pid;
};

void daemon_start(struct daemon *d);
void daemon_kill(struct daemon *d);    /* SIGKILL; the folder stays */
void daemon_restart(struct daemon *d); /* on the same address */
void daemon_stop(struct daemon *d);    /* and removes the folder */
/* Path of the credential file of a role ("writer"); out as long as daemon's folder and some. */
void daemon_credentials(const struct daemon *d, const char *role, char *out, size_t size);
/* A copy of it that names another server address (and, if not NULL, has `from` replaced by `to`). */
void daemon_credentials_edit(const struct daemon *d, const char *role, const char *name, const char *address,
                             const char *from, const char *to, char *out, size_t size);
/* Opens a client with small staging; fails the test if it cannot. */
struct larder *daemon_client(const struct daemon *d, const char *role);
struct larder *daemon_client_at(const char *credentials, uint64_t staging_bytes);
/* The n-th largest stored segment's path (0: the largest). */
void daemon_segment(const struct daemon *d, unsigned n, char *out, size_t size);
void daemon_flip(const char *path, int64_t offset, uint8_t mask); /* offset < 0: from the end */

struct proxy;
struct proxy *proxy_start(const char *server_address);
const char *proxy_address(const struct proxy *p);
/* Cuts every connection once, as soon as so many bytes more went through, both ways together. */
void proxy_cut_after(struct proxy *p, uint64_t bytes);
unsigned proxy_cuts(struct proxy *p);
/* From now on a connection's bytes to the server stop once there were so many, and wait; UINT64_MAX: they go
 * on.
 */
void proxy_hold_after(struct proxy *p, uint64_t bytes);
void proxy_stop(struct proxy *p);

#endif
