/* SPDX-License-Identifier: Apache-2.0 */
/* A real larderd as a process of its own, on a folder of the test's, to be stopped, killed and started again.
 */
#ifndef LARDER_TESTS_LARDERD_H
#define LARDER_TESTS_LARDERD_H

#include <sys/types.h>

struct larderd {
    char folder[256];
    char address[64];    /* the same over restarts */
    pid_t pid;           /* 0: not running */
    const char *program; /* below the build folder */
};

/* Makes a folder with everything (larderd --dev) and starts it. publish: a folder to be served as tar shards
 * under the name "published", or NULL. */
void larderd_start(struct larderd *d, const char *publish);
/* The same with another program of the build folder in place of "larderd". */
void larderd_start_as(struct larderd *d, const char *program, const char *publish);
/* Ends it with the signal and waits until it is gone. */
void larderd_end(struct larderd *d, int signal);
/* Starts it again where it was. */
void larderd_again(struct larderd *d);
/* Ends it and removes the folder. */
void larderd_remove(struct larderd *d);
/* Path of the credential file of a role: "writer". One static buffer. */
const char *larderd_credentials(const struct larderd *d, const char *role);

#endif
