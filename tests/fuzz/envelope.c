/* SPDX-License-Identifier: Apache-2.0 */
/* Envelopes out of any bytes, also with a checksum made to fit. Only one that we would have written may open.
 */
#include <stdlib.h>
#include <string.h>

#include "format/base/cursor.h"
#include "format/base/hash.h"
#include "format/keys.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void try(const uint8_t *p, size_t n)
{
    uint8_t raw[KEY_BYTES] = {1}, again[ENVELOPE_BYTES];
    struct kek kek = {.epoch = 1, .key = secret_create(raw, sizeof raw)};
    struct keyring ring = {.keks = &kek, .count = 1};
    struct dek dek;
    struct id run = {{0}}, seen;
    struct err e = {0};
    uint32_t epoch;
    check(kek.key);
    int rc = envelope_epoch(p, n, &seen, &epoch, &e);
    check(rc == 0 || (rc < 0 && e.text[0]));
    int opened = envelope_open(&ring, "fuzz", rc == 0 ? &seen : &run, p, n, &dek, &e);
    check(opened == 0 || (opened < 0 && e.text[0]));
    check(rc == 0 || opened < 0);
    if (opened == 0) {
        check(envelope_wrap(&kek, "fuzz", &seen, &dek, p + 128, again, &e) == 0);
        check(memcmp(again, p, ENVELOPE_BYTES) == 0);
        dek_free(&dek);
    }
    secret_free(kek.key);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    try(data, n);
    if (n != ENVELOPE_BYTES)
        return 0;
    uint8_t fitted[ENVELOPE_BYTES];
    memcpy(fitted, data, sizeof fitted);
    le64_put(fitted, hash64(fitted + 8, sizeof fitted - 8));
    try(fitted, sizeof fitted);
    return 0;
}
