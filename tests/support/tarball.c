/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/tarball.h"

#include <stdio.h>
#include <string.h>

void tarball_resum(struct buf *b, size_t at)
{
    uint8_t *h = b->p + at;
    unsigned sum = 0;
    memset(h + 148, ' ', 8);
    for (int i = 0; i < 512; i++)
        sum += h[i];
    snprintf((char *)h + 148, 8, "%06o", sum);
    h[155] = ' ';
}

void tarball_header(struct buf *b, char type, const char *name, uint64_t size)
{
    size_t at = b->n, n = strlen(name);
    buf_zeros(b, 512);
    check(!b->failed);
    char *h = (char *)b->p + at;
    const char *cut = n > 100 ? strchr(name + n - 100 - (n > 100), '/') : NULL;
    if (cut && cut - name <= 155) { /* ustar's way: the front goes to the prefix */
        memcpy(h + 345, name, (size_t)(cut - name));
        memcpy(h, cut + 1, n - (size_t)(cut + 1 - name));
    } else {
        memcpy(h, name, n < 100 ? n : 100);
    }
    snprintf(h + 100, 8, "%07o", 0644);
    snprintf(h + 108, 8, "%07o", 0);
    snprintf(h + 116, 8, "%07o", 0);
    if (size < 1ull << 33) {
        snprintf(h + 124, 12, "%011llo", (unsigned long long)size);
    } else {
        h[124] = (char)0x80;
        for (int i = 0; i < 8; i++)
            h[135 - i] = (char)(size >> 8 * i);
    }
    snprintf(h + 136, 12, "%011o", 0);
    h[156] = type;
    memcpy(h + 257,
           "ustar\0"
           "00",
           8);
    tarball_resum(b, at);
}

void tarball_data(struct buf *b, const void *p, size_t n)
{
    buf_put(b, p, n);
    buf_zeros(b, -n % 512);
}

void tarball_pax(struct buf *b, char type, const char *key, const char *value)
{
    char record[8192];
    size_t rest = strlen(key) + strlen(value) + 3, n = rest + 1;
    for (int i = 0; i < 4; i++) /* the length counts its own digits */
        n = rest + (size_t)snprintf(NULL, 0, "%zu", n);
    check((size_t)snprintf(record, sizeof record, "%zu %s=%s\n", n, key, value) == n);
    tarball_header(b, type, "PaxHeaders/x", n);
    tarball_data(b, record, n);
}

void tarball_file(struct buf *b, enum tarball_dialect dialect, const char *name, const void *p, size_t n)
{
    if (strlen(name) > 100 && dialect == TARBALL_GNU) {
        tarball_header(b, 'L', "././@LongLink", strlen(name) + 1);
        tarball_data(b, name, strlen(name) + 1);
    }
    if (strlen(name) > 100 && dialect == TARBALL_PAX)
        tarball_pax(b, 'x', "path", name);
    size_t at = b->n;
    tarball_header(b, '0', name, n);
    if (dialect == TARBALL_GNU) {
        memset(b->p + at + 345, 0, 155);
        memcpy(b->p + at + 257, "ustar  ", 8);
        tarball_resum(b, at);
    }
    tarball_data(b, p, n);
}

void tarball_end(struct buf *b)
{
    buf_zeros(b, 1024);
}
