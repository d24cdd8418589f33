/* SPDX-License-Identifier: Apache-2.0 */
/* Payloads out of any bytes: codec, dtype and plain length (u16) first, then the payload. Decoding gives
 * exactly the plain bytes or an error; all loops of "planes" agree; and the plain bytes make the way there
 * and back. */
#include <stdlib.h>
#include <string.h>

#include "format/base/cursor.h"
#include "format/codec.h"
#include "format/codec_planes.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static struct codec_state *state;
static struct planes_state *portable;

static void there_and_back(enum dtype dtype, const uint8_t *plain, size_t n)
{
    uint8_t *out = malloc(codec_payload_max(n)), *back = malloc(n);
    check(out && back);
    for (enum codec_level level = CODEC_LEVEL_OFF; level <= CODEC_LEVEL_DENSE; level++) {
        size_t bytes;
        enum codec codec;
        if (codec_encode(state, level, dtype, plain, n, out, &bytes, &codec, NULL, NULL) < 0)
            break; /* no whole elements */
        check(bytes <= n && codec_decode(state, codec, dtype, out, bytes, back, n, NULL, NULL) == 0);
        check(memcmp(back, plain, n) == 0);
    }
    free(out);
    free(back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (!state) {
        state = codec_state_create();
        portable = planes_state_create();
        check(state && portable);
        planes_state_use(portable, &tiers_portable);
    }
    if (n < 4)
        return 0;
    unsigned codec = data[0], dtype = data[1];
    size_t plain_n = le16_get(data + 2);
    uint8_t *plain = malloc(plain_n + !plain_n), *other = malloc(plain_n + !plain_n);
    struct err e = {0};
    check(plain && other);
    int r = codec_decode(state, codec, dtype, data + 4, n - 4, plain, plain_n, NULL, &e);
    check(r == 0 || (r < 0 && e.text[0]));
    if (codec == CODEC_PLANES && plain_n > 0 && dtype_known(dtype)) {
        int q = planes_decode(portable, dtype, data + 4, n - 4, other, plain_n, NULL, &e);
        check(q == r && (r < 0 || memcmp(plain, other, plain_n) == 0));
    }
    if (r == 0)
        there_and_back(dtype, plain, plain_n);
    free(plain);
    free(other);
    return 0;
}
