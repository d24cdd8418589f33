/* SPDX-License-Identifier: Apache-2.0 */
/* Headers of safetensors files out of any bytes: length of the data (u32) first, then JSON. What parses can
 * be written, and parses then to the same. */
#include <string.h>

#include "format/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct safetensors st, back;
    struct err e = {0};
    struct buf b = {0};
    if (n < 4)
        return 0;
    int r = safetensors_parse(data + 4, n - 4, 8 + (uint64_t)(n - 4) + le32_get(data), &st, &e);
    check(r == 0 || (r < 0 && e.text[0]));
    if (r < 0)
        return 0;
    check(safetensors_write(&st, &b, &e) == 0);
    check(safetensors_parse(b.p + 8, b.n - 8, b.n + st.data_bytes, &back, &e) == 0);
    check(back.count == st.count && back.metadata_pairs == st.metadata_pairs);
    for (size_t i = 0; i < st.count; i++) {
        const struct safetensors_entry *x = &st.entries[i], *y = &back.entries[i];
        check(x->begin == y->begin && x->end == y->end);
    }
    safetensors_free(&back);
    safetensors_free(&st);
    buf_free(&b);
    return 0;
}
