/* SPDX-License-Identifier: Apache-2.0 */
#include "client/spares.h"

#include <stdlib.h>

#include "format/base/pages.h"

#define ROUND_BYTES ((size_t)256 << 10) /* so that one fits many */

void spares_init(struct spares *s)
{
    *s = (struct spares){0};
    pthread_mutex_init(&s->lock, NULL);
}

void spares_end(struct spares *s)
{
    while (s->count > 0)
        free(s->kept[--s->count].p);
    pthread_mutex_destroy(&s->lock);
}

/* With the lock held: the last one given back that is large enough, or none. */
static struct spare kept_take(struct spares *s, size_t n)
{
    struct spare found = {0};
    for (unsigned i = s->count; !found.p && i-- > 0;) {
        if (s->kept[i].room < n)
            continue;
        found = s->kept[i];
        s->count--;
        for (unsigned k = i; k < s->count; k++)
            s->kept[k] = s->kept[k + 1];
    }
    return found;
}

bool spares_take(struct spares *s, size_t n, bool few, struct spare *out)
{
    *out = (struct spare){0};
    pthread_mutex_lock(&s->lock);
    bool may = !few || s->taken < SPARES_MAX;
    if (may) {
        s->taken++;
        *out = kept_take(s, n);
    }
    pthread_mutex_unlock(&s->lock);
    if (!may || out->p)
        return may;
    out->room = (n + ROUND_BYTES - 1) / ROUND_BYTES * ROUND_BYTES;
    if ((out->p = pages_alloc(out->room)) != NULL)
        return true;
    pthread_mutex_lock(&s->lock);
    s->taken--;
    pthread_mutex_unlock(&s->lock);
    return false;
}

void spares_give(struct spares *s, struct spare *x)
{
    struct spare over = *x;
    *x = (struct spare){0};
    pthread_mutex_lock(&s->lock);
    s->taken--;
    if (s->count < SPARES_MAX) {
        s->kept[s->count++] = over;
        over.p = NULL;
    }
    pthread_mutex_unlock(&s->lock);
    free(over.p);
}
