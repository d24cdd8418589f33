/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory for bytes by the MiB: on large pages where the kernel grants them, since looking up small ones costs
 * a tenth to a quarter of the time of copying, hashing or sealing what they hold, and each a fault at first.
 */
#ifndef LARDER_BASE_PAGES_H
#define LARDER_BASE_PAGES_H

#include <stddef.h>

/* n > 0 bytes, uninitialised, on a border of 4096 at least; free() releases them. NULL: no memory. */
void *pages_alloc(size_t n) __attribute__((malloc, warn_unused_result));

#endif
