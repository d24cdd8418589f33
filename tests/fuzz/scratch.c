/* SPDX-License-Identifier: Apache-2.0 */
/* The first 64 bytes of a scratch file's header and a table out of any bytes, also with hashes made to fit:
 * what decodes must encode to the bytes that it came from, and lie within the file. */
#include <stdlib.h>
#include <string.h>

#include "format/scratch.h"

#define START 64u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void table(const struct scratch_header *h, const uint8_t *data, size_t n)
{
    struct scratch_item *items = NULL;
    struct err e = {0};
    struct buf again = {0};
    int rc = scratch_table_decode(data, n, h, &items, &e);
    check(rc == 0 || (rc < 0 && e.text[0]));
    if (rc < 0)
        return;
    for (uint32_t i = 0; i < h->tensors; i++) {
        check(items[i].place >= BLOCK_BYTES && items[i].place + items[i].tensor.bytes <= h->table_offset);
        scratch_item_encode(&again, &items[i]);
    }
    check(again.n == n && (n == 0 || memcmp(again.p, data, n) == 0));
    buf_free(&again);
    free(items);
}

static void try(const uint8_t block[BLOCK_BYTES], const uint8_t *data, size_t n)
{
    uint8_t again[BLOCK_BYTES];
    struct scratch_header h;
    struct err e = {0};
    int rc = scratch_header_decode(block, &h, &e);
    check(rc == 0 || (rc < 0 && e.text[0]));
    if (rc < 0)
        return;
    scratch_header_encode(&h, again);
    check(memcmp(again, block, BLOCK_BYTES) == 0);
    table(&h, data, n);
    h.table_bytes = n;
    h.table_hash = hash64(data, n);
    table(&h, data, n);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    uint8_t block[BLOCK_BYTES] = {0};
    size_t start = n < START ? n : START;
    memcpy(block, data, start);
    try(block, data + start, n - start);
    le64_put(block, hash64(block + 8, BLOCK_BYTES - 8));
    try(block, data + start, n - start);
    return 0;
}
