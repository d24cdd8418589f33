/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A libcufile.so.0 for tests: every call of gpudirect/cufile.h on the device memory of the stand-in for
 * CUDA's driver (tests/support/cuda/standin.h), which must be loaded before.
 *
 * What it does as the library does: calls need a current context; memory must lie in one allocation of that
 * context's device; files must be open for direct I/O for the direct path, else they go in compatibility
 * mode, where that is allowed. What it does to find mistakes: a handle that is no more aborts.
 *
 * It is set up by text, from the environment variable LARDER_STANDIN_CUFILE at load, or by
 * standin_cufile_configure:
 *
 *   nvfs=N            version of nvidia-fs, 226 for 2.26; 0: not loaded (226)
 *   compatible=N      may it go in compatibility mode? (1)
 *   kinds=N           bits of the kinds of storage that it reaches directly (all)
 *   p2p=N             can it do PCI P2PDMA? (0)
 *   short=N           no call moves more than N bytes (0: any number)
 *   fail=CALL:N:CODE  the N-th call from now fails, once: open, properties, register, read, write. CODE as in
 * cufile.h, or below 4096 an errno
 *
 * Unknown words abort.
 */
#ifndef LARDER_TESTS_STANDIN_CUFILE_H
#define LARDER_TESTS_STANDIN_CUFILE_H

#include <stdint.h>

#include "gpudirect/cufile.h"

struct standin_cufile_counts {
    uint64_t reads, writes, read_bytes, written_bytes;
    uint64_t compatible; /* of the calls, those in compatibility mode */
    uint64_t files;      /* known now */
};

/* X(symbol, result, parameters) of what only tests call. Any thread. */
#define STANDIN_CUFILE_CALLS(X)                           \
    X(standin_cufile_configure, void, (const char *text)) \
    X(standin_cufile_counts, void, (struct standin_cufile_counts * out))

#endif
