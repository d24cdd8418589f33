/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Brings up and takes down everything that stands on the loops: a backend per loop, the store, the server.
 * Loops are the caller's, and are run by it (threads, or the simulator).
 *
 * boot_start may be called on any thread before or while the loops run; the callbacks run on the thread of
 * loops[0], where boot_stop, boot_hurry and boot_reload must be called.
 */
#ifndef LARDER_BOOT_H
#define LARDER_BOOT_H

#include "server/session/server.h"

struct boot_options {
    struct loop *const *loops;
    size_t loop_count;
    const char *folder;         /* of the store */
    struct memory_disk *memory; /* instead of a folder, for tests */
    uint64_t space_reserve_bytes;
    uint32_t join_wait_ms, check_wait_ms, segment_idle_ms;
    uint64_t buffers_bytes;
    const char *ensure_tenant;    /* made if it is missing; NULL: none */
    struct server_options server; /* loops and store are filled in here */
};

struct boot;
typedef void boot_started(void *arg, struct boot *b, const struct err *e); /* e->class: ERR_NONE if it runs */
typedef void boot_stopped(void *arg, uint64_t finished, uint64_t failed);

/* Options and what they point to live until the end. After a failed start everything is taken down and freed
 * before `started` is called (b is NULL then), and the loops are told to stop. */
must_check int boot_start(const struct boot_options *o, boot_started *started, void *arg);
struct server *boot_server(struct boot *b);
/* Sessions first, then the store, then the backends; then the loops are told to stop, b is freed, and
 * `stopped` is called. */
void boot_stop(struct boot *b, uint32_t bound_ms, boot_stopped *stopped, void *arg);
void boot_hurry(struct boot *b);

#endif
