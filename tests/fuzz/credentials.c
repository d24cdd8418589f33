/* SPDX-License-Identifier: Apache-2.0 */
/* Credential files, output of key commands, and addresses out of any bytes. What is taken is written and read
 * again as the same. */
#include <stdlib.h>
#include <string.h>

#include "format/credentials.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void file(const uint8_t *data, size_t n)
{
    struct credentials a, b;
    struct buf out = {0}, again = {0};
    struct err e = {0};
    int rc = credentials_decode(data, n, &a, &e);
    check(rc == 0 || (rc < 0 && e.text[0]));
    if (rc < 0)
        return;
    check(credentials_encode(&a, &out, &e) == 0);
    check(credentials_decode(out.p, out.n, &b, &e) == 0);
    check(credentials_encode(&b, &again, &e) == 0);
    check(out.n == again.n && memcmp(out.p, again.p, out.n) == 0);
    credentials_free(&a);
    credentials_free(&b);
    buf_free(&out);
    buf_free(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct keyring ring;
    struct err e = {0};
    char host[256], port[8], *text = malloc(n + 1);
    check(text);
    memcpy(text, data, n);
    text[n] = '\0';
    file(data, n);
    if (credentials_keks_parse(data, n, &ring, &e) == 0) {
        check(ring.count > 0);
        keyring_free(&ring);
    } else {
        check(e.text[0]);
    }
    if (address_split(text, host, sizeof host, port, sizeof port, &e) == 0)
        check(host[0] && port[0] && strlen(host) + strlen(port) < strlen(text));
    free(text);
    return 0;
}
