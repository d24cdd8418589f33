/* SPDX-License-Identifier: Apache-2.0 */
/* Token indexes out of any bytes: the first byte says in what pieces they are pushed, the next 4 the window
 * (0: documents) and how far it reaches beyond, 4 more the length of the .bin; the rest is the .idx. */
#include "tests/fuzz/found.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct rcur c = rcur_of(data, n);
    size_t piece = 1 + rcur_u8(&c);
    struct token_window window = {.tokens = rcur_u16(&c)};
    window.extra = rcur_u16(&c);
    uint64_t bin_bytes = rcur_u32(&c);
    if (c.failed)
        return 0;
    if (window.extra > window.tokens)
        window.extra = window.tokens;
    struct samples_source source = {.format = SHARD_TOKENS,
                                    .shard = "fuzz",
                                    .shard_bytes = bin_bytes,
                                    .idx_bytes = c.left,
                                    .window = window};
    found_both_ways(&source, c.p, piece);
    return 0;
}
