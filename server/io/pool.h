/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loop where io_uring is refused: file operations on helper threads, sockets on epoll. Same semantics,
 * more system calls. Private to server/io; ring_create chooses it.
 */
#ifndef LARDER_POOL_H
#define LARDER_POOL_H

#include "server/io/loop.h"

must_check int pool_loop_create(struct loop **out, struct err *e);

#endif
