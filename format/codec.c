/* SPDX-License-Identifier: Apache-2.0 */
#include "format/codec.h"

static const char *const names[CODEC_COUNT] = {
    [CODEC_RAW] = "raw",   [CODEC_ZERO] = "zero",     [CODEC_CONSTANT] = "constant",
    [CODEC_ZSTD] = "zstd", [CODEC_PLANES] = "planes",
};

const char *codec_name(enum codec codec)
{
    return (unsigned)codec < CODEC_COUNT ? names[codec] : "unknown";
}
