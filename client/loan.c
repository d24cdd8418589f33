/* SPDX-License-Identifier: Apache-2.0 */
#include "client/loan.h"

#include <stdlib.h>
#include <string.h>

#include "client/saver.h"
#include "format/base/pages.h"

/* Below, a slot would be wasted; above, fresh memory takes as long as reading into it. */
#define LEAST_BYTES (1u << 20)

static uint8_t *lend(struct saver *v, size_t slots)
{
    pthread_mutex_lock(&v->lock);
    struct pool *p = v->client->staging;
    uint8_t *memory = NULL;
    if (v->lent + slots <= pool_slots(p) / 2)
        memory = slots == 1 ? pool_take(p) : pool_take_row(p, slots);
    v->lent += memory ? slots : 0;
    pthread_mutex_unlock(&v->lock);
    return memory;
}

bool loan_begin(struct larder *c, size_t bytes, struct loan *out)
{
    size_t slots = (bytes + STAGING_SLOT_BYTES - 1) / STAGING_SLOT_BYTES;
    uint8_t *lent = c && c->saver && bytes >= LEAST_BYTES ? lend(c->saver, slots) : NULL;
    *out = lent ? (struct loan){lent, slots}
                : (struct loan){.memory = bytes < LEAST_BYTES ? malloc(bytes) : pages_alloc(bytes)};
    return out->memory;
}

bool loan_grow(struct larder *c, struct loan *l, size_t used, size_t bytes)
{
    struct loan larger;
    if (!loan_begin(c, bytes, &larger))
        return false;
    if (used > 0)
        memcpy(larger.memory, l->memory, used);
    loan_end(c, l);
    *l = larger;
    return true;
}

void loan_end(struct larder *c, struct loan *l)
{
    if (l->slots > 0) {
        struct saver *v = c->saver;
        pthread_mutex_lock(&v->lock);
        v->lent -= l->slots;
        for (size_t i = 0; i < l->slots; i++)
            pool_give(c->staging, l->memory + i * STAGING_SLOT_BYTES);
        pthread_cond_broadcast(&v->changed);
        pthread_mutex_unlock(&v->lock);
    } else {
        free(l->memory);
    }
    *l = (struct loan){0};
}
