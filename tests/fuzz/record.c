/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Records of TLS with an adversary on the way. Input: a script of bytes that says which records the peer
 * seals, of any content, type and padding, and what the adversary does with them: changes, drops, repeats or
 * swaps them, or puts bytes of the script in. What is opened must be the next that was sealed, unchanged;
 * what is refused must have left nothing behind; and without any change all must open that may be sent.
 */
#include <stdlib.h>
#include <string.h>

#include "format/record.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define RECORDS_MAX 8
#define SEALED_MAX  600

struct sealed {
    uint8_t inner[SEALED_MAX]; /* content, type, padding */
    size_t inner_bytes, bytes;
    uint8_t record[SEALED_MAX + RECORD_OVERHEAD];
};

static uint8_t next(const uint8_t **data, size_t *n)
{
    if (*n == 0)
        return 0;
    (*n)--;
    return *(*data)++;
}

static void seal_one(struct record_key *k, const uint8_t **data, size_t *n, struct sealed *s)
{
    static const uint8_t types[] = {RECORD_ALERT, RECORD_HANDSHAKE, RECORD_DATA, 0};
    uint8_t what = next(data, n);
    size_t content = next(data, n), padding = what & 4 ? next(data, n) : 0;
    memset(s->inner, 0, sizeof s->inner);
    for (size_t i = 0; i < content; i++)
        s->inner[i] = (uint8_t)(what + i);
    s->inner[content] = what & 8 ? what : types[what & 3];
    s->inner_bytes = content + 1 + padding;
    s->bytes = record_seal(k, (enum record_type)s->inner[s->inner_bytes - 1],
                           &SLICE(s->inner, s->inner_bytes - 1), 1, s->record);
}

/* What a receiver may make of it: the alert, or 0. */
static int judge(const struct sealed *s, enum record_type *type, size_t *bytes)
{
    size_t n = s->inner_bytes;
    while (n > 0 && s->inner[n - 1] == 0)
        n--;
    uint8_t t = n > 0 ? s->inner[n - 1] : 0;
    if ((t != RECORD_ALERT && t != RECORD_HANDSHAKE && t != RECORD_DATA) || (n == 1 && t != RECORD_DATA))
        return ALERT_UNEXPECTED_MESSAGE;
    *type = (enum record_type)t;
    *bytes = n - 1;
    return 0;
}

static void check_empty(const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        check(p[i] == 0);
}

/* Opens what came; false: refused. */
static bool open_one(struct record_key *k, const uint8_t *record, size_t n, const struct sealed *want)
{
    uint8_t *out = malloc(n);
    enum record_type type, right;
    size_t whole, bytes, right_bytes;
    bool good = n >= RECORD_HEADER_BYTES && record_bytes(record, &whole) == 0 && whole == n;
    if (good) {
        memset(out, 1, n);
        int alert = record_open(k, record, n, out, &type, &bytes);
        good = alert == 0;
        if (alert == ALERT_BAD_RECORD_MAC || alert == ALERT_UNEXPECTED_MESSAGE)
            check_empty(out, n - RECORD_OVERHEAD);
        if (alert != ALERT_BAD_RECORD_MAC) {
            check(want && n == want->bytes && memcmp(record, want->record, n) == 0);
            check(judge(want, &right, &right_bytes) == alert);
        }
        if (good)
            check(type == right && bytes == right_bytes && memcmp(out, want->inner, bytes) == 0);
    }
    free(out);
    return good;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const uint16_t suites[] = {0x1301, 0x1302, 0x1303};
    static const uint8_t secret[RECORD_SECRET_MAX] = {7};
    static struct sealed s[RECORDS_MAX];
    struct record_key *seals, *opens;
    uint8_t first = next(&data, &n);
    size_t count = first % RECORDS_MAX + 1;
    uint16_t suite = suites[first / RECORDS_MAX % 3];
    check(record_key_create(true, suite, secret, &seals) == 0 &&
          record_key_create(false, suite, secret, &opens) == 0);
    for (size_t i = 0; i < count; i++)
        seal_one(seals, &data, &n, &s[i]);
    bool good = true;
    for (size_t i = 0; i < count && good; i++) {
        uint8_t record[sizeof s->record], act = next(&data, &n);
        size_t from = act % 8 == 3 ? act / 8 % count : i, bytes = s[from].bytes;
        memcpy(record, s[from].record, bytes);
        if (act % 8 == 4)
            record[act * 31u % bytes] ^= (uint8_t)(1u << act / 32);
        else if (act % 8 == 5)
            bytes -= act / 8 < bytes ? act / 8 : bytes;
        else if (act % 8 == 6)
            for (size_t at = next(&data, &n); at < bytes && n > 0; at++)
                record[at] = next(&data, &n);
        good = open_one(opens, record, bytes, &s[i]);
        if (good && act % 8 == 7)
            good = open_one(opens, record, bytes, i + 1 < count ? &s[i + 1] : NULL); /* repeated */
    }
    record_key_free(seals);
    record_key_free(opens);
    return 0;
}
