/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which codec a chunk gets. All equal elements: zero or constant. Otherwise samples of a few KiB say what
 * planes and zstd would make of it; whatever gains less than three percent is stored raw, for the price of
 * the look.
 */
#include "format/codec.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <zstd.h>

#include "format/codec_planes.h"
#include "format/codec_tiers.h"
#include "format/limits.h"

#define SMALL_BYTES  64u        /* below: raw, unless all elements are equal */
#define SLACK_BYTES  1024u      /* that an encoder may write before it is told that it did not gain */
#define PROBE_PIECES 3u         /* of what zstd is tried on */
#define PROBE_BYTES  (8u << 10) /* each */
#define COPY_PIECE   (32u << 10)
#define ZSTD_FAST    1
#define ZSTD_DENSE   6

static const char *const names[CODEC_COUNT] = {
    [CODEC_RAW] = "raw",   [CODEC_ZERO] = "zero",     [CODEC_CONSTANT] = "constant",
    [CODEC_ZSTD] = "zstd", [CODEC_PLANES] = "planes",
};

struct codec_state {
    struct planes_state *planes;
    ZSTD_CCtx *pack;
    ZSTD_DCtx *unpack;
    uint8_t probe[PROBE_BYTES * 2]; /* what a piece was packed into, and thrown away */
};

const char *codec_name(enum codec codec)
{
    return (unsigned)codec < CODEC_COUNT ? names[codec] : "unknown";
}

struct codec_state *codec_state_create(void)
{
    struct codec_state *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->planes = planes_state_create();
    s->pack = ZSTD_createCCtx();
    s->unpack = ZSTD_createDCtx();
    if (s->planes && s->pack && s->unpack)
        return s;
    codec_state_free(s);
    return NULL;
}

void codec_state_free(struct codec_state *s)
{
    if (!s)
        return;
    planes_state_free(s->planes);
    ZSTD_freeCCtx(s->pack);
    ZSTD_freeDCtx(s->unpack);
    free(s);
}

const char *codec_loops_at(unsigned i)
{
    const struct tiers_ops *ops = tiers_ops_at(i);
    return ops ? ops->name : NULL;
}

int codec_state_loops(struct codec_state *s, const char *name)
{
    for (unsigned i = 0; codec_loops_at(i); i++)
        if (strcasecmp(codec_loops_at(i), name) == 0) {
            planes_state_use(s->planes, tiers_ops_at(i));
            return 0;
        }
    return -ENOTSUP;
}

size_t codec_payload_max(size_t n)
{
    return n + SLACK_BYTES;
}

/* Bytes of the element that "constant" repeats: 1 where elements share bytes. */
static size_t unit_bytes(enum dtype dtype)
{
    unsigned bits = dtype_bits(dtype);
    return bits % 8 == 0 ? bits / 8 : 1;
}

static bool all_zero(const uint8_t *p, size_t n)
{
    return p[0] == 0 && (n == 1 || memcmp(p, p + 1, n - 1) == 0);
}

static bool all_equal(const uint8_t *p, size_t n, size_t unit)
{
    return n > unit && memcmp(p, p + unit, n - unit) == 0;
}

static size_t zstd_pack(struct codec_state *s, int level, const uint8_t *plain, size_t n, uint8_t *out,
                        size_t room)
{
    size_t r = ZSTD_compressCCtx(s->pack, out, room, plain, n, level);
    return ZSTD_isError(r) ? 0 : r; /* the one error possible here: no room */
}

/* About how many bytes zstd would make of n, from pieces of it. */
static size_t zstd_probe(struct codec_state *s, const uint8_t *plain, size_t n)
{
    size_t seen = 0, packed = 0;
    size_t piece = n < PROBE_PIECES * PROBE_BYTES ? n / PROBE_PIECES : PROBE_BYTES;
    for (size_t i = 0; i < PROBE_PIECES; i++) {
        size_t at = (n - piece) / (PROBE_PIECES - 1) * i;
        size_t r = zstd_pack(s, ZSTD_FAST, plain + at, piece, s->probe, sizeof s->probe);
        packed += r > 0 && r < piece ? r : piece;
        seen += piece;
    }
    return (size_t)((double)n * ((double)packed / (double)seen));
}

/* Planes run at the speed of memory and zstd at a tenth of it, so fast asks of zstd that it gains clearly
 * more: half of the size for numbers; a quarter for bytes, which are text more often than not. */
static enum codec choose(struct codec_state *s, enum codec_level level, enum dtype dtype,
                         const uint8_t *plain, size_t n)
{
    size_t planes = planes_probe(s->planes, dtype, level == CODEC_LEVEL_DENSE, plain, n);
    size_t enough = n - n / 32;
    /* Floats of which only the exponents repeat are what planes are for: zstd cannot come near. */
    bool only_exponents = planes_width(dtype) > 1 && planes < enough && planes > n / 2;
    size_t zstd = only_exponents && level == CODEC_LEVEL_FAST ? n : zstd_probe(s, plain, n);
    size_t handicap = level == CODEC_LEVEL_DENSE ? 0 : planes_width(dtype) > 1 ? zstd : zstd / 4;
    if (zstd + handicap < planes && zstd < enough)
        return CODEC_ZSTD;
    if (planes < enough)
        return CODEC_PLANES;
    return zstd < enough ? CODEC_ZSTD : CODEC_RAW;
}

/* Copies, and adds to the sum what it copies while it is in the cache. */
static void copy(uint8_t *out, const uint8_t *in, size_t n, struct hash128_sum *sum)
{
    size_t piece = sum ? COPY_PIECE : n;
    for (size_t at = 0; at < n; at += piece) {
        size_t take = n - at < piece ? n - at : piece;
        memcpy(out + at, in + at, take);
        if (sum)
            hash128_add(sum, in + at, take);
    }
}

static size_t pack(struct codec_state *s, enum codec codec, enum codec_level level, const uint8_t *plain,
                   size_t n, uint8_t *out, struct hash128_sum *sum)
{
    if (codec == CODEC_PLANES)
        return planes_encode(s->planes, plain, n, out, sum);
    if (sum)
        hash128_add(sum, plain, n);
    return zstd_pack(s, level == CODEC_LEVEL_DENSE ? ZSTD_DENSE : ZSTD_FAST, plain, n, out, n);
}

/* What all the bytes together say. RAW: nothing. */
static enum codec look(struct codec_state *s, enum codec_level level, enum dtype dtype, const uint8_t *plain,
                       size_t n)
{
    if (level == CODEC_LEVEL_OFF)
        return CODEC_RAW;
    if (all_zero(plain, n))
        return CODEC_ZERO;
    if (all_equal(plain, n, unit_bytes(dtype)))
        return CODEC_CONSTANT;
    return n >= SMALL_BYTES ? choose(s, level, dtype, plain, n) : CODEC_RAW;
}

/* As the codec says, or raw if that gains nothing. Returns the payload's size. */
static size_t encode(struct codec_state *s, enum codec_level level, enum dtype dtype, const uint8_t *plain,
                     size_t n, uint8_t *out, enum codec *codec, struct hash128_sum *sum)
{
    size_t packed = 0;
    switch (*codec) {
    case CODEC_ZERO: break;
    case CODEC_CONSTANT:
        packed = unit_bytes(dtype);
        memcpy(out, plain, packed);
        break;
    case CODEC_RAW: break;
    default: packed = pack(s, *codec, level, plain, n, out, sum);
    }
    if (*codec == CODEC_ZERO || *codec == CODEC_CONSTANT) {
        if (sum)
            hash128_add(sum, plain, n);
        return packed;
    }
    if (packed > 0 && packed < n)
        return packed;
    if (sum)
        hash128_begin(sum);
    *codec = CODEC_RAW;
    copy(out, plain, n, sum);
    return n;
}

int codec_encode(struct codec_state *s, enum codec_level level, enum dtype dtype, const void *plain, size_t n,
                 void *out, size_t *payload_bytes, enum codec *codec, struct hash128 *plain_hash,
                 struct err *e)
{
    struct hash128_sum sum;
    if (!dtype_known(dtype) || n == 0 || n > CHUNK_PLAIN_BYTES_MAX || n % unit_bytes(dtype) != 0)
        return err_set(e, ERR_INVALID, "a chunk of %zu bytes of %s; expected 1 to %u bytes of whole elements",
                       n, dtype_name(dtype), CHUNK_PLAIN_BYTES_MAX);
    if (plain_hash)
        hash128_begin(&sum);
    *codec = look(s, level, dtype, plain, n);
    *payload_bytes = encode(s, level, dtype, plain, n, out, codec, plain_hash ? &sum : NULL);
    if (plain_hash)
        *plain_hash = hash128_end(&sum);
    return 0;
}

static void repeat(uint8_t *out, size_t n, const uint8_t *unit, size_t unit_n)
{
    memcpy(out, unit, unit_n);
    for (size_t done = unit_n; done < n;) {
        size_t step = done < n - done ? done : n - done;
        memcpy(out + done, out, step);
        done += step;
    }
}

/* Any codec but planes. False: the payload does not give n bytes. */
static bool decode(struct codec_state *s, enum codec codec, size_t unit, const uint8_t *payload,
                   size_t payload_bytes, uint8_t *out, size_t n, struct hash128_sum *sum)
{
    bool fine = false;
    switch (codec) {
    case CODEC_RAW:
        if (payload_bytes != n)
            return false;
        copy(out, payload, n, sum);
        return true;
    case CODEC_ZERO:
        fine = payload_bytes == 0;
        if (fine)
            memset(out, 0, n);
        break;
    case CODEC_CONSTANT:
        fine = payload_bytes == unit && n % unit == 0;
        if (fine)
            repeat(out, n, payload, unit);
        break;
    case CODEC_ZSTD:
        fine = ZSTD_findFrameCompressedSize(payload, payload_bytes) == payload_bytes &&
               ZSTD_decompressDCtx(s->unpack, out, n, payload, payload_bytes) == n;
        break;
    default: break;
    }
    if (fine && sum)
        hash128_add(sum, out, n);
    return fine;
}

int codec_decode(struct codec_state *s, enum codec codec, enum dtype dtype, const void *payload,
                 size_t payload_bytes, void *out, size_t n, struct hash128 *plain_hash, struct err *e)
{
    /* cppcheck-suppress uninitvar; hash128_begin below, where there is a sum */
    struct hash128_sum all, *sum = plain_hash ? &all : NULL;
    int rc = 0;
    if (!dtype_known(dtype) || n == 0 || n > CHUNK_PLAIN_BYTES_MAX)
        return err_set(e, ERR_CORRUPT, "codec %s: %zu plain bytes of %s cannot be", codec_name(codec), n,
                       dtype_name(dtype));
    if (sum)
        hash128_begin(sum);
    if (codec == CODEC_PLANES)
        rc = planes_decode(s->planes, dtype, payload, payload_bytes, out, n, sum, e);
    else if (!decode(s, codec, unit_bytes(dtype), payload, payload_bytes, out, n, sum))
        rc = err_set(e, ERR_CORRUPT,
                     "codec %s: %zu bytes of payload do not give %zu plain bytes of %s; the chunk "
                     "is damaged",
                     codec_name(codec), payload_bytes, n, dtype_name(dtype));
    if (rc == 0 && sum)
        *plain_hash = hash128_end(sum);
    return rc;
}
