/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that runs out. Objects below $(BUILD)/scarce are those of the program with their calls of the
 * allocator, and of the library calls that take memory or start a thread, turned to here (objcopy, see the
 * Makefile), so that the n-th of them can fail, once. What was taken and not given back is known by place.
 * Tests' own objects are not turned, and never fail. Any thread.
 */
#ifndef LARDER_TESTS_SCARCE_H
#define LARDER_TESTS_SCARCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A process that has this in its environment, a file, keeps its count there. All that follows then speaks of
 * that process, in one that has said scarce_of_another; its own calls never fail. */
#define SCARCE_ENVIRONMENT "LARDER_TEST_SCARCE"
void scarce_of_another(const char *path);

/* From now on calls are counted from 1; that of number fail_at fails (ENOMEM), 0: none. counts: asked at each
 * call whether it is to be counted; NULL: all are. */
void scarce_begin(uint64_t fail_at, bool (*counts)(void));
/* No call fails any more. Returns how many were counted. */
uint64_t scarce_end(void);
/* The call that failed since the last begin: its function and its callers as "program+0x...", for addr2line;
 * "" if none did. Good until the next begin. */
const char *scarce_failed(void);

/* What is held of that which was taken since scarce_watch; begins with nothing. */
void scarce_watch(void);
size_t scarce_held(void);
/* Says where in the program the first of it was taken, for addr2line, with its bytes. */
void scarce_describe(char *out, size_t size);

/* Gives back what the code under test gave to its caller. */
void scarce_free(void *p);

#endif
