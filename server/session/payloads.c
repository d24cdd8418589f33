/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that chunks come into and are written from. Buffers for whole frames are kept by the worker and
 * given out again: fresh memory would cost a fault for each of its pages, as much as receiving itself.
 */
#include <stdlib.h>

#include "format/base/pages.h"
#include "server/session/session.h"

#define KEPT_BYTES_MIN (256u << 10) /* smaller ones are malloc's */
/* The largest payload with what lies before and behind it (struct frame). */
#define BUFFER_BYTES block_align(BLOCK_BYTES + FRAME_PAYLOAD_BYTES_MAX)

/* NULL: all are taken, or no memory. */
static uint8_t *kept_take(struct worker *w)
{
    void *p;
    for (unsigned i = w->payload_count; i-- > 0;) {
        struct payload_buffer *b = &w->payloads[i];
        if (b->taken)
            continue;
        b->taken = true;
        return b->p;
    }
    if (w->payload_count == PAYLOADS_KEPT_MAX || !(p = pages_alloc(BUFFER_BYTES)))
        return NULL;
    w->payloads[w->payload_count++] = (struct payload_buffer){.p = p, .taken = true};
    return p;
}

static uint8_t *take(void *worker, size_t n)
{
    void *p = n >= KEPT_BYTES_MIN && n <= BUFFER_BYTES ? kept_take(worker) : NULL;
    if (p)
        return p;
    return posix_memalign(&p, BLOCK_BYTES, n) == 0 ? p : NULL;
}

void payload_give(struct worker *w, uint8_t *p)
{
    for (unsigned i = 0; p && i < w->payload_count; i++)
        if (w->payloads[i].p == p) {
            w->payloads[i].taken = false;
            return;
        }
    free(p);
}

static void give(void *worker, uint8_t *p)
{
    payload_give(worker, p);
}

void payloads_serve(struct worker *w, struct channel *c)
{
    channel_use_memory(c, &(struct channel_memory){.take = take, .give = give, .arg = w});
}

void payloads_free(struct worker *w)
{
    while (w->payload_count > 0) {
        check(!w->payloads[--w->payload_count].taken);
        free(w->payloads[w->payload_count].p);
    }
}
