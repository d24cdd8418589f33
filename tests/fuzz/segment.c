/* SPDX-License-Identifier: Apache-2.0 */
/* Segment headers and trailers out of any bytes, also with a checksum made to fit: what decodes must encode
 * to the bytes that it came from. */
#include <string.h>

#include "format/segment.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void try(const uint8_t block[BLOCK_BYTES])
{
    uint8_t again[BLOCK_BYTES];
    struct segment_header h;
    struct segment_trailer t;
    struct err e = {0};
    int r = segment_header_decode(block, &h, &e);
    check(r == 0 || (r < 0 && e.text[0]));
    if (r == 0) {
        segment_header_encode(&h, again);
        check(memcmp(again, block, BLOCK_BYTES) == 0);
    }
    r = segment_trailer_decode(block, &t, &e);
    check(r == 0 || (r < 0 && e.text[0]));
    if (r == 0) {
        segment_trailer_encode(&t, again);
        check(memcmp(again, block, BLOCK_BYTES) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    uint8_t block[BLOCK_BYTES] = {0};
    memcpy(block, data, n < BLOCK_BYTES ? n : BLOCK_BYTES);
    try(block);
    le64_put(block, hash64(block + 8, BLOCK_BYTES - 8));
    try(block);
    return 0;
}
