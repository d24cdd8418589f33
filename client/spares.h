/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory for chunks on their way, used again and again: taken afresh, every page of it would be a fault. What
 * was given back last is taken first, since it may still be in a cache. Any thread.
 */
#ifndef LARDER_CLIENT_SPARES_H
#define LARDER_CLIENT_SPARES_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SPARES_MAX 6u /* kept while nobody uses them: at most 24 MiB */

struct spare { /* zeroed: none */
    uint8_t *p;
    size_t room;
};

struct spares {
    pthread_mutex_t lock; /* no other is taken under it */
    struct spare kept[SPARES_MAX];
    unsigned count, taken;
};

void spares_init(struct spares *s);
void spares_end(struct spares *s); /* everything was given back */
/* At least n bytes. False: no memory; if `few`, also when SPARES_MAX are taken. */
bool spares_take(struct spares *s, size_t n, bool few, struct spare *out);
void spares_give(struct spares *s, struct spare *x); /* empties x, which has memory */

#endif
