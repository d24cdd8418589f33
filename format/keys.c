/* SPDX-License-Identifier: Apache-2.0 */
#include "format/keys.h"

#include <stdlib.h>

void keyring_free(struct keyring *k)
{
    for (size_t i = 0; i < k->count; i++)
        secret_free(k->keks[i].key);
    free(k->keks);
    *k = (struct keyring){0};
}

const struct kek *keyring_newest(const struct keyring *k)
{
    const struct kek *newest = NULL;
    for (size_t i = 0; i < k->count; i++)
        if (!newest || k->keks[i].epoch > newest->epoch)
            newest = &k->keks[i];
    return newest;
}

const struct kek *keyring_find(const struct keyring *k, uint32_t epoch)
{
    for (size_t i = 0; i < k->count; i++)
        if (k->keks[i].epoch == epoch)
            return &k->keks[i];
    return NULL;
}

void dek_free(struct dek *d)
{
    secret_free(d->key);
    *d = (struct dek){0};
}
