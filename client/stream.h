/* SPDX-License-Identifier: Apache-2.0 */
/* Copying what will not be read again soon by the core that copies it. */
#ifndef LARDER_CLIENT_STREAM_H
#define LARDER_CLIENT_STREAM_H

#include <stddef.h>

/*
 * Like memcpy. A long copy goes past the caches (non-temporal stores): memory is then written without being
 * read first, and the trainer's working set stays where it is. All stores are visible to other threads when
 * it returns, as with memcpy.
 */
void stream_copy(void *to, const void *from, size_t n);

#endif
