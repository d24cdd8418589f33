/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in for CUDA's driver (tests/support/cuda/standin.h) in a test's own process. */
#ifndef LARDER_TESTS_SUPPORT_STANDIN_H
#define LARDER_TESTS_SUPPORT_STANDIN_H

#include "tests/support/cuda/standin.h"

/* Its calls, for tests that play the trainer: cuda->cuCtxPushCurrent_v2(...), cuda->standin_hold(...). */
struct standin {
#define STANDIN_MEMBER(symbol, parameters)      cu_result(*symbol) parameters;
#define STANDIN_OWN(symbol, result, parameters) result(*symbol) parameters;
    CUDA_CALLS(STANDIN_MEMBER)
    STANDIN_CALLS(STANDIN_OWN)
};

/* Loads it, once, in front of any driver of this machine, and sets it up. Before anything looks for CUDA;
 * stops the test program if it cannot. settings: as in LARDER_STANDIN; NULL: none. */
const struct standin *standin_load(const char *settings);
/* The folder of its library, or of another kind ("standin-lacking"), for LD_LIBRARY_PATH of programs. */
const char *standin_folder(const char *kind, char *path, size_t size);

/* For other stand-ins beside it: opens the library of that name, set up by that environment variable, and
 * finds its symbols. Both stop the program if they cannot. */
void *standin_open(const char *name, const char *variable, const char *settings);
void standin_find(void *library, void *to, const char *symbol);

#endif
