/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in for cuFile (tests/support/cufile/cufile.h) in a test's own process, on top of that for CUDA's
 * driver. */
#ifndef LARDER_TESTS_SUPPORT_STANDIN_CUFILE_H
#define LARDER_TESTS_SUPPORT_STANDIN_CUFILE_H

#include "tests/support/cufile/cufile.h"
#include "tests/support/standin.h"

struct standin_cufile {
#define STANDIN_CUFILE_MEMBER(symbol, result, parameters) result(*symbol) parameters;
    STANDIN_CUFILE_CALLS(STANDIN_CUFILE_MEMBER)
};

/* Loads it, once, after standin_load, in front of any cuFile of this machine. Before anything looks for
 * cuFile; stops the test program if it cannot. settings: as in LARDER_STANDIN_CUFILE; NULL: none. */
const struct standin_cufile *standin_cufile_load(const char *settings);

#endif
